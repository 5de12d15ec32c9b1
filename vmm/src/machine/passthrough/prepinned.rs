// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A pool slot whose memory is already mapped for the machine's device, and the device.
//!
//! Owns what came from the pool until the machine has it: the memory first, then the address space, then
//! the device. Must never fail a VM: a mismatch is reported, and everything is done as without the pool.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;

use memory::{Lease, ProvidedFile};
use pci::Bdf;
use prezero_pool_client::{PinnedGrant, PoolConnection, TakePinned};
use vfio::{
    DmaMap, DmaSpace, DmaTarget, HostPlace, IommufdSpace, OnLost, VfioError, mapped_pieces,
};

use super::PassthroughError;
use super::backend::Backend;
use crate::config::VmConfig;
use crate::events;
use crate::machine::prezeroed;
use crate::machine::ram::{self, MachineRamError};
use crate::machine::virtio::PciContext;

/// Memory, mapped for a device, that a pool has provided.
pub struct PrepinnedSlot {
    given: ProvidedFile,
    iommufd: Option<OwnedFd>,
    /// Address of the device.
    address: Bdf,
    /// Path and descriptor of the device, until taken.
    device: Option<(PathBuf, OwnedFd)>,
    grant: PinnedGrant,
    /// The mapped ranges, once compared with the machine's memory.
    mapped: BTreeMap<u64, u64>,
}

/// Address of the device at a sysfs path.
fn address_of(path: &std::path::Path) -> Option<Bdf> {
    path.canonicalize().ok()?.file_name()?.to_str()?.parse().ok()
}

fn warn(device: Bdf, error: &dyn std::error::Error) {
    let why = error_text::chain(error);
    log::warn!(
        "the pool has no memory that is mapped for device {device}; it is mapped while the guest starts: \
         {why}"
    );
    let device = device.to_string();
    events::emit("vm", "prepinned-unavailable", &[("device", &device), ("error", &why)]);
}

impl PrepinnedSlot {
    /// Requests a slot from the pool, if the machine fits one: iommufd, a device given by path, and a
    /// single zone of pool memory that cannot grow. With several devices the slot is that of the first.
    ///
    /// # Errors
    /// The memory configuration is invalid.
    pub fn take(config: &VmConfig, phys_bits: u8) -> Result<Option<Self>, MachineRamError> {
        if !matches!(Backend::of(config), Backend::Iommufd { given: None }) {
            return Ok(None);
        }
        let first = config.devices.iter().flatten().next().filter(|device| device.fd.is_none());
        let Some(path) = first.and_then(|device| device.path.clone()) else { return Ok(None) };
        let Some((zone, socket)) = ram::only_zone(&config.memory)? else { return Ok(None) };
        // Opening the device reports what is wrong with the path.
        let Some(device) = address_of(&path) else { return Ok(None) };
        let layout = ram::layout_for(config, phys_bits);
        let request = TakePinned {
            size_bytes: zone.size_bytes,
            pages: prezeroed::pages(&zone),
            node: zone.host_numa_node,
            hole_start: layout.hole_start,
            hole_end: layout.hole_end,
            device,
        };
        let taken = PoolConnection::open(&socket)
            .and_then(|pool| pool.take_pinned(&request).map(|memory| (pool, memory)));
        let (pool, memory) = match taken {
            Ok(taken) => taken,
            Err(error) => {
                warn(device, &error);
                return Ok(None);
            }
        };
        let (bytes, name) = (memory.grant.size_bytes.to_string(), device.to_string());
        let properties = [("zone", zone.id.as_str()), ("bytes", &bytes), ("device", &name)];
        events::emit("vm", "prepinned-taken", &properties);
        Ok(Some(Self {
            given: ProvidedFile::prezeroed(
                &zone.id,
                Arc::new(memory.file),
                Lease::new(Arc::new(pool)),
            ),
            iommufd: Some(memory.iommufd.into()),
            address: device,
            device: Some((path, memory.device.into())),
            grant: memory.grant,
            mapped: BTreeMap::new(),
        }))
    }

    /// The file of the memory.
    pub fn memory(&self) -> ProvidedFile {
        self.given.clone()
    }

    /// Takes the address space, once.
    ///
    /// # Errors
    /// Its mappings do not match the machine's memory.
    pub(super) fn space(
        &mut self,
        context: &PciContext<'_>,
    ) -> Result<Arc<dyn DmaSpace>, VfioError> {
        self.mapped = mapped_pieces(context.ram, &self.grant)?;
        let iommufd = self.iommufd.take().ok_or(VfioError::OtherMemory("it is in use"))?;
        let ram = Arc::clone(context.ram);
        Ok(Arc::new(IommufdSpace::prepinned(context.vm, ram, iommufd, &self.grant)?))
    }

    /// Whether the device has not been taken yet.
    pub(super) fn has_device(&self) -> bool {
        self.device.is_some()
    }

    /// Takes the device, once.
    pub(super) fn take_device(&mut self) -> Option<HostPlace> {
        self.device.take().map(|(path, node)| HostPlace::Prepinned { path, node })
    }

    /// The mapping of all memory.
    pub(super) fn dma_map(self, target: Arc<dyn DmaSpace>, on_lost: OnLost) -> Arc<DmaMap> {
        let target: Arc<dyn DmaTarget> = target;
        DmaMap::prepinned(target, self.mapped, self.grant.piece_bytes, on_lost)
    }

    /// Logs why the machine does not use the slot. The device is closed on return.
    pub(super) fn refuse(self, error: &PassthroughError) {
        let device = self.address.to_string();
        // Closes iommufd and device, unless the failed attempt has consumed them.
        drop(self);
        let why = error_text::chain(error);
        log::warn!("memory mapped by the pool is not used, and memory is mapped anew: {why}");
        events::emit("vm", "prepinned-unavailable", &[("device", &device), ("error", &why)]);
    }
}

#[cfg(test)]
mod tests {
    use arch::layout::HighHole;
    use memory::RamLayout;

    use super::*;

    /// A pool uses the memory crate's default layout.
    #[test]
    fn the_pool_and_the_machine_lay_memory_out_alike() {
        assert_eq!(ram::layout_of(52, HighHole::None), RamLayout::default());
    }
}
