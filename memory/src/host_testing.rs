// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What several test modules need: looking at this process's memory, borrowing huge pages of hugetlb, and knowing whether
//! the host has transparent ones.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fmt::Debug;
use std::fs;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use parking_lot::{Mutex, MutexGuard};

use super::Host;
use crate::populate::THP_BYTES;
use crate::populated::{PAGE_IS_ZERO_PAGE, scan_pagemap};
use crate::{Backing, GuestRam, RamConfig, RamLayout, ZoneSpec};

impl Host {
    /// A host whose `sys` and `proc` are in the directory `root`.
    pub fn pretended(root: &Path) -> Self {
        Self { sys: root.join("sys"), proc: root.join("proc") }
    }
}

/// Bytes of `start..start + len_bytes` that have pages of their own (the shared zero page does not count).
pub fn resident_bytes(start: *const u8, len_bytes: u64) -> u64 {
    let pagemap = fs::File::open("/proc/self/pagemap").unwrap();
    if let Ok(runs) = scan_pagemap(&pagemap, start, 0..len_bytes, PAGE_IS_ZERO_PAGE) {
        return runs.into_iter().map(|run| run.end - run.start).sum();
    }
    // Before Linux 6.7: each entry is read, and compared with the frame of the zero page.
    let probe = page_bitmap::PageBitmap::sparse(1).unwrap();
    assert!(!probe.get(0));
    let zero_page = page_entry(&pagemap, probe.storage());
    assert_ne!(zero_page << 9, 0, "frame numbers are for root only");
    let pages = (0..len_bytes).step_by(4096);
    let entry = |offset| page_entry(&pagemap, start.wrapping_add(crate::to_usize(offset)));
    let own = pages.filter(|offset| entry(*offset) >> 62 != 0 && entry(*offset) != zero_page);
    own.count() as u64 * 4096
}

fn page_entry(pagemap: &fs::File, address: *const u8) -> u64 {
    let mut entry = [0; 8];
    pagemap.read_exact_at(&mut entry, address.addr() as u64 / 4096 * 8).unwrap();
    u64::from_ne_bytes(entry)
}

/// True when the page at `address` is present in this process's page table.
pub fn is_mapped(address: *const u8) -> bool {
    let pagemap = fs::File::open("/proc/self/pagemap").unwrap();
    page_entry(&pagemap, address) >> 63 == 1
}

/// A field of the `smaps` entry that contains `address`, in bytes.
pub fn smaps_bytes(address: *const u8, field: &str) -> u64 {
    let text = fs::read_to_string("/proc/self/smaps").unwrap();
    let mut inside = false;
    for line in text.lines() {
        let first = line.split(' ').next().unwrap();
        if let Some((low, high)) = first.split_once('-')
            && let Ok(low) = usize::from_str_radix(low, 16)
        {
            let high = usize::from_str_radix(high, 16).unwrap();
            inside = (low..high).contains(&address.addr());
        } else if inside && let Some(rest) = line.strip_prefix(field) {
            let kib = rest.trim_start_matches(':').trim().trim_end_matches(" kB");
            return kib.parse::<u64>().unwrap() << 10;
        }
    }
    panic!("no {field} for {address:?}");
}

/// Held by the test that needs huge pages: what one has no other gets.
static TURN: Mutex<()> = Mutex::new(());

/// Extra pages in the host's 2 MiB hugetlb pool; returned on drop. Only one test at a time has them.
pub struct BorrowedHugePages {
    pool: PathBuf,
    before: u64,
    _turn: MutexGuard<'static, ()>,
}

impl BorrowedHugePages {
    /// `None`, with the test reported as skipped, when the host provides none (not root, no memory, no
    /// hugetlb).
    pub fn new(pages: u64) -> Option<Self> {
        let turn = TURN.lock();
        let pool = Host::hugetlb_path(2 << 20);
        let number = || fs::read_to_string(&pool).ok()?.trim().parse::<u64>().ok();
        let Some(before) = number() else {
            test_skip::skip!("no {}", pool.display());
            return None;
        };
        let written = fs::write(&pool, (before + pages).to_string());
        let borrowed = Self { pool: pool.clone(), before, _turn: turn };
        if written.is_err() || number() != Some(before + pages) {
            test_skip::skip!("could not get {pages} huge pages ({written:?})");
            return None;
        }
        Some(borrowed)
    }
}

impl Drop for BorrowedHugePages {
    fn drop(&mut self) {
        let _ = fs::write(&self.pool, self.before.to_string());
    }
}

/// The turn of a test that needs transparent huge pages, of which the host had enough when it began. Only one test at a
/// time has it.
pub struct HugePagesTurn {
    bytes: u64,
    _turn: MutexGuard<'static, ()>,
}

impl HugePagesTurn {
    /// `None`, with the test reported as skipped, when this kernel collapses no memory, or the host has no huge pages for so
    /// many bytes, as its memory is in pieces, even after it was compacted.
    pub fn new(bytes: u64) -> Option<Self> {
        let turn = TURN.lock();
        is_available(bytes).then_some(Self { bytes, _turn: turn })
    }

    /// True when `found` is what is expected; false, with the test reported as skipped, when others have taken the huge pages
    /// meanwhile.
    ///
    /// # Panics
    /// When it is not, and the host has had them: what should have made them has not.
    #[must_use]
    #[track_caller]
    #[expect(clippy::needless_pass_by_value, reason = "calls read like those of assert_eq")]
    pub fn has_given<T: PartialEq + Debug>(&self, found: T, expected: T) -> bool {
        if found == expected {
            return true;
        }
        assert!(!is_available(self.bytes), "{found:?}, and not {expected:?}");
        false
    }
}

/// Whether the host has so many bytes in huge pages; says that the test is skipped if not.
fn is_available(bytes: u64) -> bool {
    let Err(mut error) = collapse(bytes) else { return true };
    // Some users may not ask for it; and pages that are being moved are in use.
    for _ in 0..3 {
        if error.raw_os_error() == Some(libc::EINVAL) {
            test_skip::skip!("this kernel does not collapse");
            return false;
        }
        let _ = fs::write("/proc/sys/vm/compact_memory", "1");
        match collapse(bytes) {
            Ok(()) => return true,
            Err(again) => error = again,
        }
    }
    let pages = bytes / THP_BYTES;
    test_skip::skip!("the host gives no {pages} pages of 2 MiB: {error}");
    false
}

/// Makes huge pages of so many bytes in small ones, by the kernel's call itself: not as the code under test does it.
fn collapse(bytes: u64) -> io::Result<()> {
    let zone =
        ZoneSpec { thp: true, shared: true, backing: Backing::Memfd, ..ZoneSpec::new("p", bytes) };
    let ram = GuestRam::new(&RamConfig { zones: vec![zone] }, RamLayout::default()).unwrap();
    let region = &ram.regions()[0];
    region.use_small_pages(true);
    region.fill(&(0..bytes)).unwrap();
    region.use_small_pages(false);
    assert_eq!(region.host_addr() % THP_BYTES, 0, "it can be huge");
    let len_bytes = crate::to_usize(bytes);
    // SAFETY: the region is mapped for as long as `ram` is there, and its contents stay.
    match unsafe { libc::madvise(region.as_ptr().cast(), len_bytes, libc::MADV_COLLAPSE) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
