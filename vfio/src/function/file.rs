// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The open file of a host function: what the kernel says of its regions and interrupts, and the calls that
//! connect interrupts.
//!
//! Owns the checks of what the kernel says. It must never know groups or iommufd: the file may come from either.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd};

use vfio_bindings::bindings::vfio::{
    VFIO_DEVICE_FLAGS_PCI, VFIO_IRQ_SET_ACTION_TRIGGER as TRIGGER,
    VFIO_IRQ_SET_ACTION_UNMASK as UNMASK, VFIO_IRQ_SET_DATA_EVENTFD as EVENTFD,
    VFIO_IRQ_SET_DATA_NONE as NONE, VFIO_PCI_CONFIG_REGION_INDEX as CONFIG_REGION,
    VFIO_PCI_INTX_IRQ_INDEX as INTX, VFIO_PCI_MSIX_IRQ_INDEX as MSIX, VFIO_REGION_INFO_FLAG_CAPS,
    VFIO_REGION_INFO_FLAG_MMAP,
};

use crate::ioctl::{self, argument, u32_at, u64_at};
use crate::user::sparse_areas;

/// Bytes of a region's description without capabilities.
const REGION_INFO_BYTES: usize = 32;
/// Limit on those with capabilities, in case the kernel names an absurd number.
const REGION_INFO_BYTES_MAX: usize = 64 << 10;
/// Kinds of interrupts that are of use here: the pin, MSI, MSI-X, errors, and that the host wants the function back.
const IRQS: usize = 5;

/// A region of the file: a BAR, the expansion ROM or configuration space.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Region {
    /// Length in bytes; zero if there is none.
    pub len_bytes: u64,
    /// Where it begins in the file.
    pub offset: u64,
    /// What can be done with it.
    pub flags: u32,
    /// The parts that can be mapped.
    pub mappable: Vec<Range<u64>>,
}

/// The open file of a function.
pub struct DeviceFile {
    file: File,
    /// By index, up to configuration space.
    regions: Vec<Region>,
    /// How many interrupts there are, by kind.
    irqs: [u32; IRQS],
}

impl DeviceFile {
    /// Asks the kernel what the open file has.
    ///
    /// # Errors
    /// The kernel's, or it is not a PCI function.
    pub fn new(file: File) -> io::Result<Self> {
        let mut info = argument(&[0; 5]);
        ioctl::call(file.as_fd(), ioctl::DEVICE_INFO, &mut info)?;
        let (flags, regions, kinds) = (u32_at(&info, 4), u32_at(&info, 8), u32_at(&info, 12));
        if flags & VFIO_DEVICE_FLAGS_PCI == 0 || regions <= CONFIG_REGION || kinds <= MSIX {
            return Err(io::Error::other("it is not a PCI function"));
        }
        let regions = (0..=CONFIG_REGION).map(|index| {
            region(index, &mut |info| ioctl::call(file.as_fd(), ioctl::REGION_INFO, info))
                .unwrap_or_else(|error| {
                    log::warn!("region {index} of a passed-through device is left out: {error}");
                    Region::default()
                })
        });
        let regions = regions.collect();
        let mut irqs = [0; IRQS];
        for (index, count) in (0..kinds).zip(&mut irqs) {
            let mut info = argument(&[0, index, 0]);
            // Some drivers know no errors, and say so by an error.
            if ioctl::call(file.as_fd(), ioctl::IRQ_INFO, &mut info).is_ok() {
                *count = u32_at(&info, 12);
            }
        }
        Ok(Self { file, regions, irqs })
    }

    /// The file.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// A region; one that there is not has no bytes.
    pub fn region(&self, index: u32) -> &Region {
        static NO_REGION: Region =
            Region { len_bytes: 0, offset: 0, flags: 0, mappable: Vec::new() };
        usize::try_from(index).ok().and_then(|at| self.regions.get(at)).unwrap_or(&NO_REGION)
    }

    /// Offset in the file of `len` bytes of a region, if it has them.
    pub fn offset(&self, index: u32, start: u64, len: usize) -> Option<u64> {
        let region = self.region(index);
        let end = start.checked_add(u64::try_from(len).ok()?)?;
        (end <= region.len_bytes).then(|| region.offset.checked_add(start))?
    }

    /// How many interrupts of a kind there are.
    pub fn irqs_count(&self, index: u32) -> u32 {
        usize::try_from(index).ok().and_then(|at| self.irqs.get(at)).map_or(0, |count| *count)
    }

    fn set_irqs(&self, index: u32, what: u32, count: usize, events: &[i32]) -> io::Result<()> {
        let count = u32::try_from(count).map_err(io::Error::other)?;
        let mut set = argument(&[what, index, 0, count]);
        set.extend(events.iter().flat_map(|event| event.to_ne_bytes()));
        ioctl::call(self.as_fd(), ioctl::SET_IRQS, &mut set)
    }

    /// Has the interrupts of a kind signal these eventfds, of which the kernel keeps references.
    ///
    /// # Errors
    /// There are not so many, or the kernel's.
    pub fn connect(&self, index: u32, events: &[BorrowedFd<'_>]) -> io::Result<()> {
        let most = self.irqs_count(index);
        if events.is_empty() || usize::try_from(most).is_ok_and(|most| events.len() > most) {
            return Err(io::Error::other(format!("it has {most} of them")));
        }
        let events: Vec<_> = events.iter().map(BorrowedFd::as_raw_fd).collect();
        self.set_irqs(index, EVENTFD | TRIGGER, events.len(), &events)
    }

    /// Has the pin unmasked when the eventfd is signalled.
    ///
    /// # Errors
    /// The kernel's; drivers of mediated devices may not know that.
    pub fn connect_resample(&self, event: BorrowedFd<'_>) -> io::Result<()> {
        self.set_irqs(INTX, EVENTFD | UNMASK, 1, &[event.as_raw_fd()])
    }

    /// Unmasks the pin.
    ///
    /// # Errors
    /// The kernel's.
    pub fn unmask_pin(&self) -> io::Result<()> {
        self.set_irqs(INTX, NONE | UNMASK, 1, &[])
    }

    /// Switches the interrupts of a kind off.
    ///
    /// # Errors
    /// The kernel's.
    pub fn disconnect(&self, index: u32) -> io::Result<()> {
        self.set_irqs(index, NONE | TRIGGER, 0, &[])
    }
}

impl AsFd for DeviceFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// A region as `ask` describes it, again with more room where there are capabilities.
fn region(index: u32, ask: &mut dyn FnMut(&mut [u8]) -> io::Result<()>) -> io::Result<Region> {
    let mut info = argument(&[0, index, 0, 0, 0, 0, 0]);
    ask(&mut info)?;
    let flags = u32_at(&info, 4);
    let needed = usize::try_from(u32_at(&info, 0)).map_err(io::Error::other)?;
    let (len_bytes, offset) = (u64_at(&info, 16), u64_at(&info, 24));
    let mut region = Region { len_bytes, offset, flags, mappable: Vec::new() };
    if flags & VFIO_REGION_INFO_FLAG_MMAP == 0 || len_bytes == 0 {
        return Ok(region);
    }
    let mut areas = Ok(None);
    if flags & VFIO_REGION_INFO_FLAG_CAPS != 0 && needed > REGION_INFO_BYTES {
        if needed > REGION_INFO_BYTES_MAX {
            areas = Err(format!("{needed} bytes describe it"));
        } else {
            info.resize(needed, 0);
            ask(&mut info)?;
            areas = sparse_areas(&info, u32_at(&info, 12), len_bytes);
        }
    }
    match areas {
        Ok(Some(areas)) => region.mappable = areas,
        Ok(None) => region.mappable.push(0..len_bytes),
        Err(why) => log::warn!(
            "accesses to region {index} of a passed-through device will be slow: what of it can be mapped is not \
             known ({why})"
        ),
    }
    Ok(region)
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "tests")]

    use super::*;

    const MAPPABLE: u32 = VFIO_REGION_INFO_FLAG_MMAP;
    const LISTED: u32 = VFIO_REGION_INFO_FLAG_MMAP | VFIO_REGION_INFO_FLAG_CAPS;

    /// A region of 64 KiB with that in place of its capabilities, of which `needed` is said.
    fn described(flags: u32, needed: u32, capabilities: &[u8]) -> io::Result<Region> {
        let head = [&needed.to_ne_bytes()[..], &flags.to_ne_bytes(), &[2, 0, 0, 0, 32, 0, 0, 0]];
        let numbers = [0x1_0000_u64, 2 << 40].map(u64::to_ne_bytes);
        let all: Vec<u8> = [&head.concat()[..], &numbers.concat(), capabilities].concat();
        region(2, &mut |info| {
            assert_eq!(u32_at(info, 8), 2, "of this region");
            for (byte, said) in info.iter_mut().zip(&all) {
                *byte = *said;
            }
            Ok(())
        })
    }

    /// A capability that lists these areas.
    fn sparse(next: u32, areas: &[[u64; 2]]) -> Vec<u8> {
        let mut bytes = vec![1, 0, 1, 0];
        bytes.extend(next.to_ne_bytes());
        bytes.extend(u32::try_from(areas.len()).unwrap().to_ne_bytes());
        bytes.extend([0; 4]);
        bytes.extend(areas.iter().flatten().flat_map(|number| number.to_ne_bytes()));
        bytes
    }

    #[test]
    fn what_can_be_mapped_is_what_the_kernel_lists() {
        let plain = described(0, 32, &[]).unwrap();
        let (len_bytes, offset) = (0x1_0000, 2 << 40);
        assert_eq!(plain, Region { len_bytes, offset, flags: 0, mappable: Vec::new() });
        let whole = |flags, needed, capabilities: &[u8]| {
            described(flags, needed, capabilities).unwrap().mappable
        };
        assert_eq!(whole(MAPPABLE, 32, &[]), [Range { start: 0, end: 0x1_0000 }]);
        // One that says that MSI-X can be mapped.
        let other = [3, 0, 1, 0, 0, 0, 0, 0];
        assert_eq!(whole(LISTED, 40, &other), [Range { start: 0, end: 0x1_0000 }]);
        let areas = sparse(0, &[[0, 0x1000], [0x2000, 0xe000]]);
        assert_eq!(whole(LISTED, 80, &areas), [0..0x1000, 0x2000..0x1_0000]);
    }

    #[test]
    fn of_a_region_that_is_described_wrongly_nothing_is_mapped() {
        for (needed, capabilities) in [
            // Outside of the region; in a circle; cut off; absurdly long.
            (64, sparse(0, &[[0, 0x1_0001]])),
            (64, sparse(0, &[[u64::MAX, 2]])),
            (40, vec![3, 0, 1, 0, 32, 0, 0, 0]),
            (48, sparse(0, &[[0, 0x1000]])),
            (u32::MAX, Vec::new()),
        ] {
            let region = described(LISTED, needed, &capabilities).unwrap();
            assert_eq!((region.len_bytes, region.mappable), (0x1_0000, Vec::new()));
        }
    }

    #[test]
    fn a_file_that_is_no_function_is_refused() {
        let error = DeviceFile::new(File::open("/dev/null").unwrap()).err().unwrap();
        assert_eq!(error.raw_os_error(), Some(libc::ENOTTY));
    }
}
