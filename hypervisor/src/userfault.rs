// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Userfault exits: a vCPU leaves the guest at a page whose contents have not arrived.
//!
//! Owns the check whether this KVM supports them (a handshake, see docs/fault-exits.md), and the
//! bitmap that KVM reads. Must never rely on a capability number: the numbers of patches
//! that are not upstream mean something else on other kernels. Must never decide what is missing:
//! the caller sets and clears the bits.

use std::io;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicU64, Ordering};

use kvm_bindings::KVMIO;
use serde::Serialize;
use vmm_sys_util::ioctl::ioctl_with_mut_ref;
use vmm_sys_util::ioctl_iowr_nr;

const MAGIC_ASK: u64 = 0x4b56_4d55_4661_5331;
const MAGIC_ANSWER: u64 = 0x3141_6e53_5546_4d6b;
/// The only supported version of the interface.
const VERSION: u32 = 1;
const FEATURE_REFUSED_FAULT: u64 = 1 << 0;
const FEATURE_BITMAP: u64 = 1 << 1;
const BITS_PER_WORD: u64 = 64;

/// `struct kvm_userfault_info`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Info {
    magic: u64,
    nonce: u64,
    version: u32,
    min_version: u32,
    features: u64,
    slot_flag: u32,
    cap: u32,
    exit_flag: u64,
    pad: [u64; 2],
}
const _: () = assert!(size_of::<Info>() == 64);

ioctl_iowr_nr!(KVM_GET_USERFAULT_INFO, KVMIO, 0xfe, Info);

/// Userfault support of this KVM, with its flags.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct UserfaultSupport {
    /// Whether a refused access exits with its address, and never as an asynchronous page fault.
    pub refused_faults: bool,
    /// Flag of a memory slot with a bitmap; `None` if not supported.
    pub slot_flag: Option<u32>,
    /// Flag of a memory fault exit for a page whose bit was set.
    exit_flag: u64,
}

/// A guest access that the host could not resolve.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FaultedAccess {
    /// Guest physical address, if known: unpatched kernels often do not report it.
    pub gpa: Option<u64>,
    /// Length of the range to resolve; 0 if unknown.
    pub len_bytes: u64,
    /// The kernel's flags (KVM_MEMORY_EXIT_FLAG_*).
    pub flags: u64,
}

/// Cause of a fault exit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultCause {
    /// The page's bit is set in the slot's bitmap; host memory was not accessed.
    Marked,
    /// The host refused the access, as a userfaultfd in SIGBUS mode does.
    Refused,
}

impl UserfaultSupport {
    /// Queries KVM; `None` without userfault exits, or with an unknown version.
    pub(crate) fn probe(kvm: &impl AsRawFd) -> Option<Self> {
        let nonce = nonce();
        let mut info = Info { magic: MAGIC_ASK, nonce, ..Default::default() };
        // SAFETY: the kernel reads and writes one `struct kvm_userfault_info`, whose size is part
        // of the request's number; a kernel that does not know the request touches nothing.
        let answer = unsafe { ioctl_with_mut_ref(kvm, KVM_GET_USERFAULT_INFO(), &mut info) };
        (answer == 0).then(|| Self::judge(&info, nonce)).flatten()
    }

    fn judge(info: &Info, nonce: u64) -> Option<Self> {
        let spoken = (info.min_version..=info.version).contains(&VERSION);
        let genuine = info.magic == MAGIC_ANSWER ^ nonce && info.nonce == nonce;
        let one_bit = info.slot_flag.is_power_of_two() && info.exit_flag.is_power_of_two();
        let bitmap = info.features & FEATURE_BITMAP != 0 && one_bit;
        (genuine && spoken).then_some(Self {
            refused_faults: info.features & FEATURE_REFUSED_FAULT != 0,
            slot_flag: bitmap.then_some(info.slot_flag),
            exit_flag: info.exit_flag,
        })
    }

    /// Cause of an exit that has an address.
    pub fn cause(&self, access: &FaultedAccess) -> FaultCause {
        if self.slot_flag.is_some() && access.flags & self.exit_flag != 0 {
            FaultCause::Marked
        } else {
            FaultCause::Refused
        }
    }
}

/// A random number that an unrelated response does not contain by accident.
fn nonce() -> u64 {
    use std::hash::{BuildHasher, Hasher, RandomState};
    RandomState::new().build_hasher().finish()
}

/// One bit per 4 KiB page of a memory slot, which KVM reads on vCPU faults.
///
/// A set bit makes a vCPU exit at that page while KVM has not mapped it. Any thread may change bits at any
/// time, without a system call.
#[derive(Debug)]
pub struct UserfaultBitmap {
    words: Box<[AtomicU64]>,
    pages: u64,
}

impl UserfaultBitmap {
    /// A bitmap for `pages` pages, with all bits set or clear.
    ///
    /// # Errors
    /// [`io::ErrorKind::OutOfMemory`] if the address space cannot hold it.
    pub fn new(pages: u64, set: bool) -> io::Result<Self> {
        let too_large = || io::Error::from(io::ErrorKind::OutOfMemory);
        let count = usize::try_from(pages.div_ceil(BITS_PER_WORD)).map_err(|_| too_large())?;
        let mut words = Vec::new();
        words.try_reserve_exact(count).map_err(|_| too_large())?;
        words.resize_with(count, || AtomicU64::new(if set { u64::MAX } else { 0 }));
        Ok(Self { words: words.into_boxed_slice(), pages })
    }

    /// Number of pages.
    pub fn pages(&self) -> u64 {
        self.pages
    }

    /// Marks a page resident; a vCPU that sees the bit clear also sees the contents. Returns whether the
    /// bit was set: of several threads that resolve a page, one gets `true`. Pages out of range are clear.
    pub fn clear(&self, page: u64) -> bool {
        self.word(page).is_some_and(|(word, bit)| word.fetch_and(!bit, Ordering::AcqRel) & bit != 0)
    }

    /// Marks `count` pages from `first` resident; pages out of range are ignored.
    pub fn clear_range(&self, first: u64, count: u64) {
        let end = first.saturating_add(count).min(self.pages);
        let mut page = first;
        while page < end {
            let offset = page % BITS_PER_WORD;
            let run = (BITS_PER_WORD - offset).min(end - page);
            let bits = (u64::MAX >> (BITS_PER_WORD - run)) << offset;
            if let Some((word, _)) = self.word(page) {
                word.fetch_and(!bits, Ordering::AcqRel);
            }
            page += run;
        }
    }

    /// Marks a page missing. Effective once KVM has unmapped the page: set the bit before the page is
    /// removed from the host mapping, or before the bitmap is used.
    pub fn set(&self, page: u64) {
        if let Some((word, bit)) = self.word(page) {
            word.fetch_or(bit, Ordering::SeqCst);
        }
    }

    /// Whether the page is missing.
    pub fn is_set(&self, page: u64) -> bool {
        self.word(page).is_some_and(|(word, bit)| word.load(Ordering::Acquire) & bit != 0)
    }

    /// Address of the bitmap for KVM, valid while this value lives.
    pub(crate) fn hva(&self) -> u64 {
        self.words.as_ptr().expose_provenance() as u64
    }

    fn word(&self, page: u64) -> Option<(&AtomicU64, u64)> {
        let index = usize::try_from(page / BITS_PER_WORD).ok()?;
        let word = self.words.get(index).filter(|_| page < self.pages)?;
        Some((word, 1 << (page % BITS_PER_WORD)))
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

    use proptest::prelude::*;

    use super::*;

    const NONCE: u64 = 0x0123_4567_89ab_cdef;

    fn answer() -> Info {
        Info {
            magic: MAGIC_ANSWER ^ NONCE,
            nonce: NONCE,
            version: 1,
            min_version: 1,
            features: FEATURE_REFUSED_FAULT | FEATURE_BITMAP,
            slot_flag: 1 << 3,
            cap: 0x4757_4654,
            exit_flag: 1 << 4,
            pad: [0; 2],
        }
    }

    #[test]
    fn the_handshake_takes_the_numbers_from_the_answer() {
        let support = UserfaultSupport::judge(&answer(), NONCE).unwrap();
        assert!(support.refused_faults);
        assert_eq!(support.slot_flag, Some(8));
        let moved = Info { slot_flag: 1 << 9, exit_flag: 1 << 7, ..answer() };
        let support = UserfaultSupport::judge(&moved, NONCE).unwrap();
        assert_eq!(support.slot_flag, Some(1 << 9));
        let access = |flags| FaultedAccess { gpa: Some(0), len_bytes: 4096, flags };
        assert_eq!(support.cause(&access(1 << 7 | 2)), FaultCause::Marked);
        assert_eq!(support.cause(&access(1 << 4 | 2)), FaultCause::Refused);
    }

    #[test]
    fn answers_that_only_look_right_are_none() {
        for wrong in [
            Info { magic: MAGIC_ASK, ..answer() },
            Info { magic: MAGIC_ANSWER, ..answer() },
            Info { nonce: 0, ..answer() },
            Info { version: 0, min_version: 0, ..answer() },
            Info { version: 3, min_version: 2, ..answer() },
            Info::default(),
        ] {
            assert_eq!(UserfaultSupport::judge(&wrong, NONCE), None, "{wrong:?}");
        }
        assert_eq!(UserfaultSupport::judge(&answer(), NONCE + 1), None);
        let newer = Info { version: 5, ..answer() };
        assert!(UserfaultSupport::judge(&newer, NONCE).is_some());
    }

    #[test]
    fn without_the_bitmap_every_fault_was_refused() {
        for lacking in [
            Info { features: FEATURE_REFUSED_FAULT, ..answer() },
            Info { slot_flag: 0, ..answer() },
            Info { exit_flag: 3, ..answer() },
        ] {
            let support = UserfaultSupport::judge(&lacking, NONCE).unwrap();
            assert_eq!(support.slot_flag, None, "{lacking:?}");
            let access = FaultedAccess { gpa: Some(0), len_bytes: 4096, flags: 1 << 4 };
            assert_eq!(support.cause(&access), FaultCause::Refused);
        }
    }

    #[test]
    fn something_that_is_not_kvm_has_none() {
        let null = std::fs::File::open("/dev/null").unwrap();
        assert_eq!(UserfaultSupport::probe(&null), None);
    }

    #[test]
    fn of_several_who_bring_a_page_one_is_first() {
        let bitmap = UserfaultBitmap::new(70, true).unwrap();
        assert!(bitmap.clear(69));
        assert!(!bitmap.clear(69) && !bitmap.is_set(69) && bitmap.is_set(68));
        bitmap.set(69);
        assert!(bitmap.is_set(69) && bitmap.clear(69));
        bitmap.set(70);
        assert!(!bitmap.is_set(70) && !bitmap.clear(70));
    }

    proptest! {
        #[test]
        fn clearing_a_range_is_clearing_its_pages(pages in 1_u64..300, first in 0_u64..400, count in 0_u64..400) {
            let bitmap = UserfaultBitmap::new(pages, true).unwrap();
            bitmap.clear_range(first, count);
            for page in 0..pages {
                let within = page >= first && page < first + count;
                prop_assert_eq!(bitmap.is_set(page), !within, "page {}", page);
            }
        }
    }

    #[test]
    fn ranges_up_to_the_end_of_numbers_are_taken() {
        let bitmap = UserfaultBitmap::new(65, true).unwrap();
        bitmap.clear_range(u64::MAX - 1, u64::MAX);
        assert!(bitmap.is_set(64));
        bitmap.clear_range(0, u64::MAX);
        assert!(!bitmap.is_set(0) && !bitmap.is_set(64));
        assert!(UserfaultBitmap::new(u64::MAX, true).is_err());
    }
}
