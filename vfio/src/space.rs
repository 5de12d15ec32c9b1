// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The common interface of the host's two IOMMU backends: type1 ([`super::Type1Container`]) and
//! iommufd ([`super::IommufdSpace`]).
//!
//! Owns the trait, and the check that a range lies in the memory that the address space keeps.

use std::any::Any;
use std::fs::File;
use std::io;
use std::ops::{Range, RangeInclusive};
use std::path::PathBuf;
use std::sync::Arc;

use hypervisor::{AttachedFile, Vm};
use memory::{GuestRam, RamRegion};
use vfio_ioctls::VfioDevice;

use super::dma::DmaTarget;
use super::error::VfioError;
use super::groups::Lease;
use super::p2p::P2pTarget;
use super::sysfs::HostPlace;

/// The IOMMU address space for all passed-through functions of a VM.
pub trait DmaSpace: DmaTarget {
    /// Opens a function and attaches it to the space: it can access everything mapped, now and later.
    ///
    /// # Errors
    /// Names what the host lacks.
    fn open(&self, place: HostPlace) -> Result<OpenedFunction, VfioError>;
    /// The I/O addresses that can be mapped for the functions that are open, if the kernel says so.
    ///
    /// # Errors
    /// The kernel's.
    fn valid_ranges(&self) -> io::Result<Option<Vec<RangeInclusive<u64>>>> {
        Ok(None)
    }
    /// The memory that may be mapped, kept as long as a function of the space.
    fn memory(&self) -> Arc<GuestRam>;
    /// Prepares to outlive the VM. As long as the returned value lives, guest memory stays mapped, and pinned, without a
    /// function; after that, as long as a function is open. Called once no function can access memory, before all are closed.
    ///
    /// # Errors
    /// Why it does not stay mapped.
    fn outlive_vm(&self) -> Result<SpaceHold, &'static str> {
        Err("it is mapped only as long as devices are open")
    }
    /// Has the functions that are opened from now on belong to this VM, after
    /// [`outlive_vm`](Self::outlive_vm).
    ///
    /// # Errors
    /// KVM's.
    fn join_vm(&self, _vm: &Vm) -> Result<(), VfioError> {
        Ok(())
    }
    /// Names the functions that the VM is to have, by their folders in sysfs, before the first is opened.
    fn expect(&self, _paths: &[PathBuf]) {}
    /// Whether all that was to stay mapped without functions ([`outlive_vm`](Self::outlive_vm)) is mapped still. Called when a
    /// function is open, before anything else is mapped.
    ///
    /// # Errors
    /// Why it is not. Nothing is mapped then.
    fn check_kept(&self) -> Result<(), &'static str> {
        Ok(())
    }
    /// The same space as a target for device memory, if it supports that.
    fn peer_target(self: Arc<Self>) -> Option<Arc<dyn P2pTarget>>;
}

/// What keeps memory mapped in an address space without functions.
pub type SpaceHold = Box<dyn Any + Send + Sync>;

/// A function attached to an address space, until dropped.
pub struct OpenedFunction {
    // Drop order matters: the file is closed first.
    pub(super) file: File,
    pub(super) attachment: Attachment,
}

/// What attaches a function to an address space.
pub(super) enum Attachment {
    /// Its group is in the container.
    Group(Lease),
    /// It is bound to an iommufd, until dropped, and then no longer registered with KVM.
    Iommufd { _device: VfioDevice, _told: AttachedFile },
}

/// A validated part of guest memory.
pub(super) struct Mapping {
    pub gpa: u64,
    pub len: usize,
    pub address: *mut u8,
}

impl Mapping {
    /// The part `range` of `region`, which must be one of `ram`.
    ///
    /// # Errors
    /// It is not.
    pub fn of(ram: &GuestRam, region: &RamRegion, range: &Range<u64>) -> io::Result<Self> {
        let ours = ram.regions().iter().any(|own| std::ptr::eq(&raw const **own, region));
        let inside = range.start < range.end && range.end <= region.len_bytes();
        if !ours || !inside {
            return Err(io::Error::from(io::ErrorKind::InvalidInput));
        }
        let start = usize::try_from(range.start).map_err(io::Error::other)?;
        let len = usize::try_from(range.end - range.start).map_err(io::Error::other)?;
        let gpa = region.gpa().saturating_add(range.start);
        Ok(Self { gpa, len, address: region.as_ptr().wrapping_add(start) })
    }
}

#[cfg(test)]
#[expect(clippy::unwrap_used, reason = "tests")]
mod tests {
    use memory::{RamConfig, RamLayout, ZoneSpec};
    use proptest::prelude::*;

    use super::*;

    const MIB: u64 = 1 << 20;

    fn ram() -> GuestRam {
        let layout = RamLayout {
            hole_start: 2 * MIB,
            hole_end: 4 * MIB,
            end: 1 << 40,
            ..RamLayout::default()
        };
        GuestRam::new(&RamConfig { zones: vec![ZoneSpec::new("mem0", 4 * MIB)] }, layout).unwrap()
    }

    #[test]
    fn memory_of_another_vm_is_none() {
        let (ours, theirs) = (ram(), ram());
        let range = 0..MIB;
        assert!(Mapping::of(&ours, &ours.regions()[1], &range).is_ok());
        assert!(Mapping::of(&ours, &theirs.regions()[1], &range).is_err());
    }

    proptest! {
        #[test]
        fn a_piece_is_inside_its_region(
            start in prop_oneof![0..3 * MIB, any::<u64>()],
            end in prop_oneof![0..3 * MIB, any::<u64>()],
        ) {
            let ram = ram();
            let region = &ram.regions()[1];
            match Mapping::of(&ram, region, &(start..end)) {
                Ok(piece) => {
                    prop_assert!(start < end && end <= region.len_bytes());
                    prop_assert_eq!(piece.gpa, region.gpa() + start);
                    prop_assert_eq!(piece.len as u64, end - start);
                    prop_assert_eq!(piece.address.addr() as u64, region.host_addr() + start);
                }
                Err(_) => prop_assert!(start >= end || end > region.len_bytes()),
            }
        }
    }
}
