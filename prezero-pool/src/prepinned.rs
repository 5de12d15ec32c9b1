// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Memory that is mapped for a device in advance.
//!
//! Owns the iommufd and the device until they are handed over with the memory, and then nothing of them:
//! the holder of an iommufd controls every address space in it, so there is one for each slot. Must never
//! attach the device: it reaches nothing before its user says so.
//!
//! Terabytes take long to map, and as long to unpin when their iommufd is closed. So mapping can be stopped, and
//! whatever goes wrong, the caller closes both: the device before the iommufd.

use std::fs::File;
use std::io;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::os::fd::AsFd as _;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use ioas::{HYPERTRANSPORT, HostReach, Ioas, MapFileError, Mapped, Unreachable, check_reach};
use iommufd_ioctls::{IommuFd, IommufdError};
use memory::{LayoutError, RamHole, RamLayout, ZoneSpec};
use parking_lot::Mutex;
use pci_address::Bdf;
use prezero_pool_client::{PinnedGrant, PinnedRegion, PinnedZone, SlotPages, pieces};
use thiserror::Error;
use vfio_ioctls::{VfioDevice, VfioError, VfioIommufd};

use crate::config::{Class, HighHole, SlotDevice, SlotZone};
use crate::parallel;
use crate::slot::{PoolSlotError, SlotMemory, spec_of};

const IOMMUFD: &str = "/dev/iommu";
const DEVICES: &str = "/sys/bus/pci/devices";
/// What is mapped by one call: not larger than needed for the kernel to pin large runs at once, and the
/// smallest thing that a VM can return.
const PIECE_BYTES: u64 = 64 << 20;

/// Memory that could not be mapped for its device.
#[derive(Debug, Error)]
pub enum PinError {
    /// The kernel has no iommufd, or the pool may not use it.
    #[error("cannot open {IOMMUFD} (a kernel with CONFIG_IOMMUFD, and the right to open it)")]
    Iommufd(#[source] io::Error),
    /// The device is not there for passing through.
    #[error(
        "cannot open device {0} (is it bound to vfio-pci, has the kernel CONFIG_VFIO_DEVICE_CDEV, may \
         the pool open its node in /dev/vfio/devices?)"
    )]
    Open(Bdf, #[source] VfioError),
    /// Another process has it.
    #[error("cannot use device {0}: a VM or another process uses it")]
    Bind(Bdf, #[source] VfioError),
    /// An object of iommufd.
    #[error("cannot create the iommufd objects for device {0}")]
    Object(Bdf, #[source] IommufdError),
    /// The IOMMU of the device does not reach where the VM has its memory.
    #[error("a VM with this memory cannot have device {0} (see high_hole)")]
    Unreachable(Bdf, #[source] Unreachable),
    /// Pinning.
    #[error(
        "cannot map {len_bytes} bytes at {gpa:#x} for device {device} (ENOMEM: raise LimitMEMLOCK, or \
         give the pool CAP_IPC_LOCK)"
    )]
    Map {
        /// For which.
        device: Bdf,
        /// Where.
        gpa: u64,
        /// How much.
        len_bytes: u64,
        /// The kernel's answer.
        #[source]
        source: MapFileError,
    },
    /// The layout of the VM's memory.
    #[error("this memory cannot be that of a VM")]
    Layout(#[source] LayoutError),
    /// An own open file of the memory.
    #[error("cannot map memory")]
    File(#[source] PoolSlotError),
    /// Descriptors.
    #[error("cannot duplicate a descriptor")]
    Duplicate(#[source] io::Error),
    /// A slot without a device.
    #[error("the slot has no device")]
    NoDevice,
    /// The order was taken back.
    #[error("a VM needs device {0} before its memory is mapped")]
    Stopped(Bdf),
}

/// A device, its iommufd, and what is mapped there.
#[derive(Debug)]
pub struct Prepinned {
    pub iommufd: File,
    pub device: File,
    pub grant: PinnedGrant,
}

/// What goes to a user: a memfd for each zone, and the two.
#[derive(Debug)]
pub struct PinnedFiles {
    pub memory: Vec<File>,
    pub iommufd: File,
    pub device: File,
}

/// Memory that could not be mapped.
#[derive(Debug)]
pub struct PinFailure {
    pub error: PinError,
    /// The device, and the iommufd in which some of it may be mapped: closing them takes long then.
    pub opened: Option<(File, File)>,
}

impl From<PinError> for PinFailure {
    fn from(error: PinError) -> Self {
        Self { error, opened: None }
    }
}

/// An order to map memory, which may be taken back.
///
/// Owns the memory until it is begun: an order whose turn is late, as terabytes are mapped before, keeps it from no user.
#[derive(Debug)]
pub struct PinOrder {
    /// What is to be mapped, until that begins.
    memory: Mutex<Option<Vec<SlotMemory>>>,
    is_stopped: AtomicBool,
    /// Where the memory is mapped, once that is known.
    regions: OnceLock<Vec<PinnedRegion>>,
}

impl PinOrder {
    /// To map this memory.
    pub fn new(memory: Vec<SlotMemory>) -> Self {
        let (is_stopped, regions) = (AtomicBool::new(false), OnceLock::new());
        Self { memory: Mutex::new(Some(memory)), is_stopped, regions }
    }

    /// Begins to carry it out, with the memory; `None` if it was taken back.
    pub fn begin(&self) -> Option<Vec<SlotMemory>> {
        self.memory.lock().take()
    }

    /// Takes it back. Returns the memory if it was not begun, and then it never is; otherwise what is being mapped is left
    /// as soon as possible.
    #[must_use]
    pub fn stop(&self) -> Option<Vec<SlotMemory>> {
        let memory = self.begin();
        if memory.is_none() {
            self.is_stopped.store(true, Ordering::Relaxed);
        }
        memory
    }

    /// Whether it was begun, so that the device may be open for it.
    pub fn is_begun(&self) -> bool {
        self.memory.lock().is_none()
    }

    /// Whether it was taken back after it was begun.
    pub fn is_stopped(&self) -> bool {
        self.is_stopped.load(Ordering::Relaxed)
    }

    /// Says where the memory is mapped, long before it is.
    pub fn set_regions(&self, regions: &[PinnedRegion]) {
        self.regions.get_or_init(|| regions.to_vec());
    }

    /// Where the memory is mapped; nothing if that is not known yet.
    pub fn regions(&self) -> Option<&[PinnedRegion]> {
        self.regions.get().map(Vec::as_slice)
    }
}

fn page_bytes(pages: SlotPages) -> u64 {
    match pages {
        SlotPages::Small | SlotPages::Transparent => 4096,
        SlotPages::Huge2Mib => 2 << 20,
        SlotPages::Huge1Gib => 1 << 30,
    }
}

/// The addresses above 4 GiB that are left without memory. A VM leaves the same ones out when it boots with the device.
fn high_hole(device: &SlotDevice, reach: &HostReach) -> Option<RamHole> {
    let is_left_out = match device.high_hole {
        Some(HighHole::Off) => false,
        Some(HighHole::HyperTransport) => true,
        None => reach.excludes(&HYPERTRANSPORT),
    };
    let (start, last) = HYPERTRANSPORT.into_inner();
    is_left_out.then_some(RamHole { start, end: last + 1 })
}

/// Where the VM has the memory: the same rule that its VMM goes by.
fn regions(
    zones: &[SlotZone],
    high_hole: Option<RamHole>,
) -> Result<Vec<PinnedRegion>, LayoutError> {
    let layout = RamLayout { high_hole, ..RamLayout::default() };
    let specs: Vec<ZoneSpec> = zones.iter().map(spec_of).collect();
    let places = layout.place_zones(&specs)?.into_iter();
    let region = |place: memory::Placement| PinnedRegion {
        zone: place.zone,
        gpa: place.gpa,
        len_bytes: place.bytes.end - place.bytes.start,
        offset: place.bytes.start,
    };
    Ok(places.map(region).collect())
}

fn ranges(regions: &[PinnedRegion]) -> Vec<Range<u64>> {
    regions.iter().map(|region| region.gpa..region.gpa.saturating_add(region.len_bytes)).collect()
}

/// As a line of the log has it.
fn shown(regions: &[PinnedRegion]) -> String {
    let shown: Vec<_> =
        ranges(regions).iter().map(|part| format!("{:#x}-{:#x}", part.start, part.end)).collect();
    shown.join(", ")
}

/// Has `map` called for each piece of the regions, on so many threads; ends early with the first error, or when
/// the order is taken back. Returns whether all was mapped.
fn map_pieces<E: Send>(
    zones: &[SlotZone],
    regions: &[PinnedRegion],
    threads: NonZeroUsize,
    order: &PinOrder,
    map: impl Fn(&PinnedRegion) -> Result<(), E> + Sync,
) -> Result<bool, E> {
    let page_bytes = |zone: usize| zones.get(zone).map_or(0, |zone| page_bytes(zone.pages));
    let all: Vec<_> = regions
        .iter()
        .flat_map(|region| pieces(*region, PIECE_BYTES, page_bytes(region.zone)))
        .collect();
    let next = AtomicUsize::new(0);
    parallel::run(threads, || {
        while !order.is_stopped()
            && let Some(piece) = all.get(next.fetch_add(1, Ordering::Relaxed))
        {
            // The other threads end with their piece.
            map(piece).inspect_err(|_| next.store(all.len(), Ordering::Relaxed))?;
        }
        Ok(())
    })?;
    // What was claimed is mapped.
    Ok(next.into_inner() >= all.len())
}

impl Prepinned {
    /// Opens the device, maps the memory at the VM's addresses and fills a page table with it, on so many
    /// threads, unless the order, which is begun, is taken back.
    ///
    /// # Errors
    /// Saying what the host lacks; the device is as before once it is closed.
    pub fn new(
        class: &Class,
        memory: &[SlotMemory],
        threads: NonZeroUsize,
        order: &PinOrder,
    ) -> Result<Self, PinFailure> {
        let slot = class.device.as_ref().ok_or(PinError::NoDevice)?;
        let address = slot.address;
        let path = Path::new(DEVICES).join(address.to_string());
        let reach = HostReach::in_sysfs(&path);
        let regions = regions(&class.zones, high_hole(slot, &reach)).map_err(PinError::Layout)?;
        let reached = reach.check(&ranges(&regions));
        reached.map_err(|source| PinError::Unreachable(address, source))?;
        order.set_regions(&regions);
        let iommufd =
            File::options().read(true).write(true).open(IOMMUFD).map_err(PinError::Iommufd)?;
        let device =
            VfioDevice::open_cdev(&path).map_err(|source| PinError::Open(address, source))?;
        let mapping = Mapping { address, class, memory, regions, threads, order };
        match mapping.map(&iommufd, &device) {
            Ok(grant) => {
                log::info!(
                    "{} bytes are mapped for device {address}, at guest addresses {}",
                    class.size_bytes(),
                    shown(&grant.regions)
                );
                Ok(Self { iommufd, device, grant })
            }
            Err(error) => Err(PinFailure { error, opened: Some((device, iommufd)) }),
        }
    }
}

/// What is mapped for which device.
struct Mapping<'a> {
    address: Bdf,
    class: &'a Class,
    memory: &'a [SlotMemory],
    regions: Vec<PinnedRegion>,
    threads: NonZeroUsize,
    order: &'a PinOrder,
}

impl Mapping<'_> {
    /// Maps all of it. Duplicates of both files are closed again.
    fn map(self, iommufd: &File, device: &File) -> Result<PinnedGrant, PinError> {
        let Self { address, class, memory, regions, threads, order } = self;
        let files = memory.iter().map(SlotMemory::lease).collect::<Result<Vec<_>, _>>();
        let files = files.map_err(PinError::File)?;
        // The crate's values are for an owner that keeps them: these have duplicates, and what they undo when
        // they are dropped is an address space of their own and no attachment.
        let copy = iommufd.try_clone().map_err(PinError::Duplicate)?;
        let control = Arc::new(IommuFd::new_from_fd(copy));
        let space = VfioIommufd::new(Arc::clone(&control), None, None);
        let space = space.map_err(|source| PinError::Open(address, source))?;
        let copy = device.try_clone().map_err(PinError::Duplicate)?;
        let bound = VfioDevice::new_from_fd(copy, Arc::new(space), false)
            .map_err(|source| PinError::Bind(address, source))?;
        let device_id = bound.iommufd_dev_id().ok_or(PinError::NoDevice)?;

        let object = |source| PinError::Object(address, source);
        let space = Ioas::new(&control).map_err(object)?;
        // First, so that each piece is pinned as it is mapped: without a table nothing is.
        let table_id = space.new_table(device_id).map_err(object)?;
        // The width of the IOMMU's addresses, which sysfs has not for all kinds; what is kept of them follows only when
        // the device is attached.
        match space.valid_ranges() {
            Ok(valid) => check_reach(&valid, &ranges(&regions))
                .map_err(|source| PinError::Unreachable(address, source))?,
            Err(error) => {
                log::warn!("it is not known which addresses device {address} can reach: {error}");
            }
        }
        let is_mapped = map_pieces(&class.zones, &regions, threads, order, |piece| {
            let PinnedRegion { zone, gpa, len_bytes, offset } = *piece;
            let Some(file) = files.get(zone) else { return Err(PinError::NoDevice) };
            let mapped = space.map_file(file.as_fd(), offset, Mapped { iova: gpa, len_bytes });
            mapped.map_err(|source| PinError::Map { device: address, gpa, len_bytes, source })
        })?;
        if !is_mapped {
            return Err(PinError::Stopped(address));
        }
        let zone = |zone: &SlotZone| PinnedZone { size_bytes: zone.size_bytes, pages: zone.pages };
        Ok(PinnedGrant {
            device: address,
            zones: class.zones.iter().map(zone).collect(),
            piece_bytes: PIECE_BYTES,
            device_id,
            space_id: space.id(),
            table_id,
            regions,
        })
    }
}

#[cfg(test)]
#[path = "prepinned_tests.rs"]
mod tests;
