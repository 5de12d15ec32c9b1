// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The array in which the program that traces faults notes addresses, mapped into this process.
//!
//! May contain `unsafe`: the mapping. Owns the layout of the array. A slot belongs to the first thread that faults and
//! whose ID leads to it, from then on for good: only that thread writes and reads its address, the program in the kernel
//! and [`FaultSlots::take`] after it, so no two processors order anything by it. Other threads with the same slot have a
//! table. Must never be taken for the cause of a fault.
//!
//! The program looks whether a slot is free, and then takes it, in two steps: two threads whose IDs are equal modulo the number
//! of slots may both take it, if each faults for the first time at the same moment. vCPUs that start together have IDs
//! closer than that; one that is added later meets a slot that was taken long before. Should it happen, the ID that is written
//! last stays, and that once the other thread loses its address, or the owner takes that of the other: an access
//! without an address, or whose address is not missing, is tried again, and the next fault finds the slot taken.

use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::bpf;

/// Number of slots, a power of two: more than a VM has vCPUs, whose threads are started one after the other.
pub const SLOTS: i32 = 4096;

/// Logarithm of the size of a slot.
pub const SLOT_BITS: i32 = 4;

/// An address that no access has: of none.
const NONE: u64 = u64::MAX;

/// A slot as the program has it. Of an array that was just made all is 0.
#[repr(C)]
struct Slot {
    /// Thread ID, or 0.
    owner: AtomicU64,
    address: AtomicU64,
}

const _: () = assert!(size_of::<Slot>() == 1 << SLOT_BITS);

/// What a slot has for a thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Taken {
    /// The address that was noted last, and was not taken before.
    Address(u64),
    Nothing,
    /// Another thread has the slot.
    OfAnother,
}

/// The slots.
#[derive(Debug)]
pub struct FaultSlots {
    array: OwnedFd,
    slots: NonNull<Slot>,
}

// SAFETY: the mapping belongs to no thread, and all of it is atomics.
unsafe impl Send for FaultSlots {}
// SAFETY: as above.
unsafe impl Sync for FaultSlots {}

impl FaultSlots {
    /// Offsets in a slot.
    pub const OWNER: i16 = 0;
    pub const ADDRESS: i16 = 8;

    const COUNT: usize = SLOTS as usize;
    const BYTES: u32 = (SLOTS as u32) << SLOT_BITS;

    /// Makes the array, and maps it.
    ///
    /// # Errors
    /// The kernel's error: `EPERM` without the permission, `EINVAL` where arrays cannot be mapped.
    pub fn create() -> io::Result<Self> {
        Self::map(bpf::create_mappable(Self::BYTES)?)
    }

    /// Maps an array, or another file of that size.
    fn map(array: OwnedFd) -> io::Result<Self> {
        // SAFETY: a new mapping of a file that this owns, at an address that the kernel chooses.
        let mapped = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                Self::BYTES as usize,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                array.as_raw_fd(),
                0,
            )
        };
        if mapped == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let slots = NonNull::new(mapped.cast::<Slot>());
        Ok(Self { array, slots: slots.ok_or_else(|| io::Error::other("mapped at 0"))? })
    }

    /// The array, for the program.
    pub fn array(&self) -> &OwnedFd {
        &self.array
    }

    /// Takes what was noted for the calling thread, whose ID this is.
    pub fn take(&self, thread: u32) -> Taken {
        let slot = self.slot(thread);
        // What it is compared with was written on this thread, or leads to another one.
        match slot.owner.load(Ordering::Relaxed) {
            0 => Taken::Nothing,
            owner if owner != u64::from(thread) => Taken::OfAnother,
            _ => match slot.address.swap(NONE, Ordering::Relaxed) {
                NONE => Taken::Nothing,
                address => Taken::Address(address),
            },
        }
    }

    fn slot(&self, thread: u32) -> &Slot {
        let index = thread as usize & (Self::COUNT - 1);
        // SAFETY: the mapping has `COUNT` slots, of which the masked index is one, and lives as long as this. They are
        // aligned, because it begins at a page; any bytes are values of them, and all that this process and the kernel do
        // with one are whole accesses to 64 bits.
        unsafe { self.slots.add(index).as_ref() }
    }

    /// Gives the slot of one thread to another one, for which this address is noted.
    #[cfg(test)]
    pub fn give_to(&self, thread: u32, other: u32, address: u64) {
        let slot = self.slot(thread);
        slot.address.store(address, Ordering::Relaxed);
        slot.owner.store(other.into(), Ordering::Relaxed);
    }
}

impl Drop for FaultSlots {
    fn drop(&mut self) {
        // SAFETY: this mapping was made by `map`, and no reference to a slot outlives `self`.
        unsafe { libc::munmap(self.slots.as_ptr().cast(), Self::BYTES as usize) };
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

    use std::fs::File;
    use std::os::fd::FromRawFd as _;

    use super::*;

    /// Slots that no program writes to.
    fn slots() -> FaultSlots {
        // SAFETY: makes a file without a name from a string that ends.
        let fd = unsafe { libc::memfd_create(c"slots".as_ptr(), libc::MFD_CLOEXEC) };
        assert!(fd >= 0);
        // SAFETY: the call above has just made it.
        let file = unsafe { File::from_raw_fd(fd) };
        file.set_len(FaultSlots::BYTES.into()).unwrap();
        FaultSlots::map(file.into()).unwrap()
    }

    #[test]
    fn an_address_is_taken_once_by_the_thread_that_has_the_slot() {
        let slots = slots();
        assert_eq!(slots.take(5000), Taken::Nothing);
        slots.give_to(5000, 5000, 0x9000);
        let shares = 5000 + SLOTS.unsigned_abs();
        assert_eq!(slots.take(shares), Taken::OfAnother);
        assert_eq!(slots.take(5001), Taken::Nothing);
        assert_eq!([slots.take(5000), slots.take(5000)], [Taken::Address(0x9000), Taken::Nothing]);
        assert_eq!(slots.take(shares), Taken::OfAnother, "for good");
        slots.give_to(5000, 5000, 0);
        assert_eq!(slots.take(5000), Taken::Address(0), "as any other");
        for thread in [0, 1, u32::MAX] {
            assert_eq!(slots.take(thread), Taken::Nothing, "{thread} is within");
        }
    }
}
