// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The rules of a start, asked without one.
//!
//! Owns how each is asked so that nothing of the host changes: images are opened for reading and not locked, taps are not
//! opened, and the kernel is loaded into memory of this process. It must never have a rule of its own: what is refused
//! here is refused by a start, with the same words.

use std::io;
use std::path::Path;
use std::sync::Arc;

use devices::virtio::block::{DiskError, DiskLock};
use devices::virtio::net::TapOutlook;
use devices::virtio::pmem::PmemFile;
use devices::virtio::rng::{Rng, RngConfig};
use memory::{Backing, GuestRam, RamConfig, RamLayout, ZoneSpec};
use rustix::fs::{Access, AtFlags, CWD, accessat};
use vfio::DmaLimits;

use super::disks::{self, DiskWiringError};
use super::exclusive::{ExclusiveError, LockedImages};
use super::limits::RateGroups;
use super::passthrough::{self, IommuBackend};
use super::virtio::VirtioError;
use super::{Host, MachineError, MachineRamError, boot, nets, pmems, ram};
use crate::config::{
    DeviceConfig, DiskConfig, ImageType, MemoryConfig, NetConfig, PmemConfig, VmConfig,
};

/// Error number with which the process may not use a path in these ways, as its effective user; `None` if it may.
pub fn refusal(path: &Path, wanted: Access) -> Option<i32> {
    let asked = match accessat(CWD, path, wanted, AtFlags::EACCESS) {
        // Before Linux 5.8.
        Err(rustix::io::Errno::NOSYS | rustix::io::Errno::INVAL) => {
            accessat(CWD, path, wanted, AtFlags::empty())
        }
        other => other,
    };
    asked.err().map(rustix::io::Errno::raw_os_error)
}

/// The zones of guest memory.
///
/// # Errors
/// The huge page size is not supported.
pub fn zones(config: &MemoryConfig) -> Result<RamConfig, MachineRamError> {
    Ok(RamConfig { zones: ram::specs(config)? })
}

/// Where guest memory would be, as the devices allow: what is chosen for them is put into the configuration. Without a
/// host its processor is taken for one that has all configured address bits.
pub fn layout(config: &mut VmConfig, host: Option<&Host>) -> RamLayout {
    passthrough::choose_high_hole(config);
    let bits = host.map_or(config.cpus.max_phys_bits, |host| host.phys_bits(&config.cpus));
    ram::layout_for(config, bits)
}

/// Memory of this process at the addresses of guest memory, which takes what is written to it; `None` if the process
/// does not have the addresses.
pub fn stand_in(config: &RamConfig, layout: RamLayout) -> Option<Arc<GuestRam>> {
    let plain = |zone: &ZoneSpec| ZoneSpec {
        backing: Backing::Anonymous,
        block_bytes: zone.block_bytes,
        thp: false,
        ..ZoneSpec::new(zone.id.clone(), zone.size_bytes)
    };
    let zones = config.zones.iter().map(plain).collect();
    GuestRam::new(&RamConfig { zones }, layout).ok().map(Arc::new)
}

/// Whether kernel or firmware can be loaded into such memory.
///
/// # Errors
/// Names the file.
pub fn payload(config: &VmConfig, ram: &GuestRam) -> Result<(), MachineError> {
    Ok(boot::check_payload(&config.payload, ram)?)
}

/// Whether a disk of the VMM's own could be opened, locked and used.
///
/// # Errors
/// Names the disk.
pub fn disk(config: &DiskConfig, of: &VmConfig) -> Result<(), MachineError> {
    let lock = opened(config, of)?;
    let id = config.id.clone().unwrap_or_default();
    let refused = |source| ExclusiveError::Disk { id: id.clone(), source };
    lock.check_free(!config.readonly).map_err(refused)?;
    let refused = |source| ExclusiveError::Load { id: id.clone(), source };
    lock.check_format().map_err(refused)?;
    Ok(())
}

/// Whether a disk of a VM that arrives could be opened. Its source has it locked, and writes it.
///
/// # Errors
/// Names the disk.
pub fn arriving_disk(config: &DiskConfig, of: &VmConfig) -> Result<(), MachineError> {
    opened(config, of).map(drop)
}

/// The image of a disk, opened for reading and not locked.
fn opened(config: &DiskConfig, of: &VmConfig) -> Result<DiskLock, MachineError> {
    let id = config.id.clone().unwrap_or_default();
    let mut one = VmConfig { disks: Some(vec![config.clone()]), ..VmConfig::default() };
    disks::detect_formats(&mut one).map_err(VirtioError::from)?;
    let path = config.path.clone().unwrap_or_default();
    if !config.readonly
        && let Some(errno) = refusal(&path, Access::WRITE_OK)
    {
        let source = io::Error::from_raw_os_error(errno);
        let source = DiskError::Open { path, direct: config.direct, source };
        return Err(VirtioError::from(DiskWiringError::Make { id, source }).into());
    }
    let found = one.disks.iter().flatten().next().map_or(ImageType::Raw, |disk| disk.image_type);
    let to_read = DiskConfig { readonly: true, image_type: found, ..config.clone() };
    let limits = of.machine_platform().offers.disk_limits;
    let (_, lock) =
        disks::make(&to_read, limits, &mut LockedImages::default(), &RateGroups::default())
            .map_err(VirtioError::from)?;
    Ok(lock)
}

/// Whether persistent memory could be opened, locked and used. A temporary file is not made.
///
/// # Errors
/// Names the device.
pub fn pmem(config: &PmemConfig) -> Result<(), MachineError> {
    let Some(file) = opened_pmem(config)? else { return Ok(()) };
    let id = config.id.clone().unwrap_or_default();
    let refused = |source| ExclusiveError::Disk { id: id.clone(), source };
    file.lock().check_free(!config.discard_writes).map_err(refused)?;
    Ok(())
}

/// Whether persistent memory of a VM that arrives could be opened. Its source has it locked.
///
/// # Errors
/// Names the device.
pub fn arriving_pmem(config: &PmemConfig) -> Result<(), MachineError> {
    opened_pmem(config).map(drop)
}

/// The file of persistent memory, opened for reading and not locked; `None` if it is to be made in a directory.
fn opened_pmem(config: &PmemConfig) -> Result<Option<PmemFile>, MachineError> {
    if config.file.is_dir() {
        return Ok(None);
    }
    let id = config.id.clone().unwrap_or_default();
    let to_read = PmemConfig { discard_writes: true, ..config.clone() };
    let file = pmems::open(&to_read, &mut LockedImages::default()).map_err(VirtioError::from)?;
    let refused = |source| ExclusiveError::Disk { id: id.clone(), source };
    if !config.discard_writes
        && let Some(errno) = refusal(&config.file, Access::WRITE_OK)
    {
        let source = io::Error::from_raw_os_error(errno);
        let path = config.file.clone();
        return Err(refused(DiskError::Open { path, direct: false, source }).into());
    }
    Ok(Some(file))
}

/// Whether the source of the entropy device can be read.
///
/// # Errors
/// Names the source.
pub fn rng(config: &VmConfig) -> Result<(), MachineError> {
    let id = config.rng.id.clone().unwrap_or_default();
    let rng = Rng::new(RngConfig { id, source: config.rng.src.clone() });
    rng.map(drop).map_err(|error| VirtioError::from(error).into())
}

/// Whether the taps of a network device could be opened and configured.
///
/// # Errors
/// Names the device.
pub fn tap(config: &NetConfig, outlook: &TapOutlook) -> Result<(), ExclusiveError> {
    let id = config.id.clone().unwrap_or_default();
    outlook.check(&nets::tap_config(config)).map_err(|source| ExclusiveError::Tap { id, source })
}

/// Whether a device of the host is one that can be passed through, and reaches such memory.
///
/// # Errors
/// Names the device.
pub fn passthrough(config: &DeviceConfig, ram: &GuestRam) -> Result<(), MachineError> {
    Ok(passthrough::check_ahead(config, ram)?)
}

/// The limits of this process on what is mapped for passed-through devices.
pub fn dma_limits(config: &VmConfig) -> DmaLimits {
    IommuBackend::of(config).limits()
}
