// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The memory of one zone of a slot: created, leased, verified to be unused, cleared.
//!
//! Owns the pool's own open file of the memfd. Must never call memory zero that was not looked at
//! byte by byte, and never clear memory that another process may have.

use std::fs::{File, OpenOptions, Permissions};
use std::io;
use std::num::NonZeroUsize;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::PermissionsExt as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use memory::available::InsufficientMemory;
use memory::{
    AccessError, Backing, GuestRam, HugePageSize, LATER_ALIGN_BYTES, PrefaultError, ProvidedFile,
    RamConfig, RamError, RamLayout, RamRegion, ZoneSpec,
};
use prezero_pool_client::SlotPages;
use thiserror::Error;

use crate::config::SlotZone;
use crate::pace::{Pace, Reading};
use crate::parallel;
use crate::sys::{self, Users};

/// The unit in which memory is touched: small enough that the rate is even.
const CHUNK_BYTES: u64 = 16 << 20;
/// Names the memory in errors, and its memfd.
const ZONE: &str = "pool";

/// Memory that could not be made or cleared.
#[derive(Debug, Error)]
pub enum PoolSlotError {
    /// It cannot be had.
    #[error("cannot make a slot of {size_bytes} bytes")]
    Make {
        /// Its size.
        size_bytes: u64,
        /// Why.
        #[source]
        source: RamError,
    },
    /// It cannot be populated.
    #[error("cannot populate a slot of {size_bytes} bytes")]
    Populate {
        /// Its size.
        size_bytes: u64,
        /// Why.
        #[source]
        source: PrefaultError,
    },
    /// All of it would be more than there is.
    #[error(transparent)]
    InsufficientMemory(#[from] InsufficientMemory),
    /// The host needs its memory.
    #[error(
        "the host (or the cgroup or NUMA node, if that has less) has {available_bytes} bytes of memory \
         left, and keep_free asks for {keep_free_bytes}"
    )]
    HostFull {
        /// What it has.
        available_bytes: u64,
        /// What it is to keep.
        keep_free_bytes: u64,
    },
    /// A byte is not zero that must be.
    #[error("memory is not zero at byte {at:#x} or after it although it was just cleared")]
    NotZero {
        /// The chunk.
        at: u64,
    },
    /// Own mistake.
    #[error("memory could not be reached")]
    Access(#[from] AccessError),
    /// The memfd cannot be opened anew.
    #[error("cannot open a memfd a second time through /proc/self/fd")]
    Open(#[source] io::Error),
}

/// How memory is worked on.
#[derive(Debug)]
pub struct ZeroingOptions {
    pub pace: Pace,
    pub keep_free_bytes: u64,
    pub idle_only: bool,
    /// Threads that work on a slot together.
    pub threads: NonZeroUsize,
}

#[cfg(test)]
impl ZeroingOptions {
    /// Without any limit, on two threads.
    pub fn unlimited() -> Self {
        let threads = NonZeroUsize::MIN.saturating_add(1);
        Self { pace: Pace::new(0, 0), keep_free_bytes: 0, idle_only: false, threads }
    }
}

/// The memory of a zone.
#[derive(Debug)]
pub struct SlotMemory {
    file: Arc<File>,
}

/// Everything at its place from 0 on, without a hole.
const LAYOUT: RamLayout = RamLayout {
    hole_start: 0,
    hole_end: 0,
    high_hole: None,
    end: 1 << 52,
    later_align_bytes: LATER_ALIGN_BYTES,
};

pub fn spec_of(zone: &SlotZone) -> ZoneSpec {
    let huge = |page_size| Backing::Hugetlb { page_size };
    ZoneSpec {
        backing: match zone.pages {
            SlotPages::Small | SlotPages::Transparent => Backing::Memfd,
            SlotPages::Huge2Mib => huge(HugePageSize::Mib2),
            SlotPages::Huge1Gib => huge(HugePageSize::Gib1),
        },
        shared: true,
        // Asks for huge pages to be made even where the host's settings would give small ones.
        thp: zone.pages == SlotPages::Transparent,
        prefault: true,
        host_numa_node: zone.node,
        ..ZoneSpec::new(ZONE, zone.size_bytes)
    }
}

fn open_anew(file: &File) -> io::Result<File> {
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    OpenOptions::new().read(true).write(true).open(path)
}

#[cfg(test)]
impl From<File> for SlotMemory {
    fn from(file: File) -> Self {
        Self { file: Arc::new(file) }
    }
}

impl SlotMemory {
    /// Makes memory, populates it and looks at every byte.
    ///
    /// # Errors
    /// There is none to be had; nothing is left behind.
    pub fn build(zone: &SlotZone, options: &ZeroingOptions) -> Result<Self, PoolSlotError> {
        let size_bytes = zone.size_bytes;
        let config = RamConfig { zones: vec![spec_of(zone)] };
        let ram = GuestRam::new(&config, LAYOUT)
            .map_err(|source| PoolSlotError::Make { size_bytes, source })?;
        // Before the first page, so that no memory is reclaimed for a slot that is abandoned again.
        memory::check_available(ram.regions())?;
        let own = ram.regions().first().and_then(|region| region.file());
        let own = own.ok_or_else(|| PoolSlotError::Open(io::Error::other("it has no file")))?;
        // The pool's user may open it again, others may not, whatever descriptor they have.
        own.set_permissions(Permissions::from_mode(0o600)).map_err(PoolSlotError::Open)?;
        let file = Arc::new(open_anew(own).map_err(PoolSlotError::Open)?);
        work(&ram, zone, options, Work::Build)?;
        // With it goes the open file that made the memfd, which the kernel does not count.
        drop(ram);
        Ok(Self { file })
    }

    /// An open file of its own for a user.
    ///
    /// # Errors
    /// The process has no descriptor left.
    pub fn lease(&self) -> Result<File, PoolSlotError> {
        open_anew(&self.file).map_err(PoolSlotError::Open)
    }

    /// Processes that can reach the memory.
    pub fn users(&self) -> Users {
        sys::users_of(&self.file)
    }

    /// Fills holes, clears all of it in place, and looks at every byte. No other process may have it.
    ///
    /// # Errors
    /// There is no memory for the holes, `keep_free` included, or it does not stay zero.
    pub fn scrub(&self, zone: &SlotZone, options: &ZeroingOptions) -> Result<(), PoolSlotError> {
        let size_bytes = zone.size_bytes;
        let config = RamConfig { zones: vec![spec_of(zone)] };
        let given = [ProvidedFile::file(ZONE, Arc::clone(&self.file))];
        let ram = GuestRam::with_provided(&config, LAYOUT, &given)
            .map_err(|source| PoolSlotError::Make { size_bytes, source })?;
        work(&ram, zone, options, Work::Scrub)
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Work {
    Build,
    Scrub,
}

fn work(
    ram: &GuestRam,
    zone: &SlotZone,
    options: &ZeroingOptions,
    what: Work,
) -> Result<(), PoolSlotError> {
    for region in ram.regions() {
        let len = region.len_bytes();
        let step = CHUNK_BYTES.max(region.page_bytes());
        let next = AtomicU64::new(0);
        let chunk = || {
            let at = next.fetch_add(step, Ordering::Relaxed);
            (at < len).then(|| at..len.min(at.saturating_add(step)))
        };
        let chunks = usize::try_from(len.div_ceil(step)).unwrap_or(usize::MAX);
        let threads = options.threads.min(NonZeroUsize::new(chunks).unwrap_or(NonZeroUsize::MIN));
        parallel::run(threads, || {
            while let Some(chunk) = chunk() {
                // The other threads end with their chunk.
                work_on(region, &chunk, zone, options, what)
                    .inspect_err(|_| next.store(len, Ordering::Relaxed))?;
            }
            Ok::<(), PoolSlotError>(())
        })?;
    }
    Ok(())
}

fn work_on(
    region: &RamRegion,
    chunk: &std::ops::Range<u64>,
    zone: &SlotZone,
    options: &ZeroingOptions,
    what: Work,
) -> Result<(), PoolSlotError> {
    let bytes = chunk.end - chunk.start;
    let keep_free_bytes = options.keep_free_bytes;
    // Huge pages were set aside before.
    if !region.is_hugetlb() {
        // What is cleared in place takes nothing, but what its user gave back does.
        let there = if what == Work::Scrub { region.populated_runs(chunk)? } else { Vec::new() };
        let there_bytes: u64 = there.iter().map(|run| run.end - run.start).sum();
        let missing_bytes = bytes.saturating_sub(there_bytes);
        let available_bytes = memory::available::available_bytes(zone.node);
        if missing_bytes > 0 && available_bytes < keep_free_bytes.saturating_add(missing_bytes) {
            return Err(PoolSlotError::HostFull { available_bytes, keep_free_bytes });
        }
    }
    options.pace.wait(bytes);
    region
        .fill(chunk)
        .map_err(|source| PoolSlotError::Populate { size_bytes: zone.size_bytes, source })?;
    if what == Work::Scrub {
        region.clear(chunk)?;
    }
    options.pace.wait(bytes);
    let before = sys::processor_time();
    if !region.is_clear(chunk)? {
        return Err(PoolSlotError::NotZero { at: chunk.start });
    }
    let reading = if what == Work::Scrub { Reading::Cleared } else { Reading::New };
    options.pace.note(reading, bytes, sys::processor_time().saturating_sub(before));
    Ok(())
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test that cannot unwrap has failed")]

    use std::os::unix::fs::FileExt as _;

    use super::*;

    const SIZE: u64 = 4 << 20;

    fn zone() -> SlotZone {
        SlotZone { size_bytes: SIZE, pages: SlotPages::Small, node: None }
    }

    fn options() -> ZeroingOptions {
        ZeroingOptions::unlimited()
    }

    #[test]
    fn memory_is_there_at_once_and_zero_again_after_use() {
        let memory = SlotMemory::build(&zone(), &options()).unwrap();
        let user = memory.lease().unwrap();
        let blocks = std::os::unix::fs::MetadataExt::blocks(&user.metadata().unwrap());
        assert_eq!(blocks * 512, SIZE, "it is not populated");
        user.write_all_at(b"secret", SIZE - 6).unwrap();
        drop(user);
        memory.scrub(&zone(), &options()).unwrap();
        let mut bytes = vec![1; usize::try_from(SIZE).unwrap()];
        memory.lease().unwrap().read_exact_at(&mut bytes, 0).unwrap();
        assert!(memory::is_zero(&bytes));
    }

    /// As if clearing had missed it, or another process still wrote.
    #[test]
    fn memory_with_a_byte_in_it_is_not_ready_wherever_that_is() {
        let zone = SlotZone { size_bytes: 2 * CHUNK_BYTES, ..zone() };
        let memory = SlotMemory::build(&zone, &options()).unwrap();
        let user = memory.lease().unwrap();
        let given = [ProvidedFile::file(ZONE, Arc::clone(&memory.file))];
        let config = RamConfig { zones: vec![spec_of(&zone)] };
        let ram = GuestRam::with_provided(&config, LAYOUT, &given).unwrap();
        let look = || work(&ram, &zone, &options(), Work::Build);
        look().unwrap();
        for at in [0, 4095, CHUNK_BYTES - 1, CHUNK_BYTES, 2 * CHUNK_BYTES - 1] {
            user.write_all_at(&[1], at).unwrap();
            let error = look().unwrap_err();
            let chunk = at / CHUNK_BYTES * CHUNK_BYTES;
            assert!(matches!(error, PoolSlotError::NotZero { at } if at == chunk), "{at}: {error}");
            user.write_all_at(&[0], at).unwrap();
            look().unwrap();
        }
    }

    #[test]
    fn a_descriptor_a_mapping_and_one_in_a_socket_are_seen() {
        use vmm_sys_util::sock_ctrl_msg::ScmSocket as _;
        let memory = SlotMemory::build(&zone(), &options()).unwrap();
        if memory.users() == Users::Unknown {
            test_skip::skip!("users of a memfd: this kernel gives no leases on them");
            return;
        }
        assert_eq!(memory.users(), Users::OnlyUs);
        let user = memory.lease().unwrap();
        let copy = user.try_clone().unwrap();
        assert_eq!(memory.users(), Users::Others);
        drop(user);
        assert_eq!(memory.users(), Users::Others, "a duplicate was overlooked");
        let config = RamConfig { zones: vec![spec_of(&zone())] };
        let given = [ProvidedFile::file(ZONE, Arc::new(copy))];
        let mapped = GuestRam::with_provided(&config, LAYOUT, &given).unwrap();
        let handle = mapped.guest_memory();
        drop((mapped, given));
        assert_eq!(memory.users(), Users::Others, "a mapping was overlooked");
        drop(handle);
        assert_eq!(memory.users(), Users::OnlyUs);
        let (one, other) = std::os::unix::net::UnixStream::pair().unwrap();
        let user = memory.lease().unwrap();
        one.send_with_fd(&b"x"[..], user.as_raw_fd()).unwrap();
        drop(user);
        assert_eq!(memory.users(), Users::Others, "one in a socket was overlooked");
        drop((one, other));
        assert_eq!(memory.users(), Users::OnlyUs);
    }

    #[test]
    fn a_full_host_is_left_alone() {
        let options = ZeroingOptions { keep_free_bytes: u64::MAX, ..options() };
        let error = SlotMemory::build(&zone(), &options).unwrap_err();
        assert!(matches!(error, PoolSlotError::HostFull { .. }), "{error}");
    }

    #[test]
    fn a_full_host_is_left_alone_when_holes_are_filled() {
        let full = ZeroingOptions { keep_free_bytes: u64::MAX, ..options() };
        let memory = SlotMemory::build(&zone(), &options()).unwrap();
        memory.scrub(&zone(), &full).unwrap();
        // The user's balloon has given a page back.
        let user = memory.lease().unwrap();
        let (at, mode) = (SIZE / 2, libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE);
        let at = libc::off_t::try_from(at).unwrap();
        // SAFETY: takes numbers only; the descriptor is open.
        assert_eq!(unsafe { libc::fallocate(user.as_raw_fd(), mode, at, 4096) }, 0);
        drop(user);
        let error = memory.scrub(&zone(), &full).unwrap_err();
        assert!(matches!(error, PoolSlotError::HostFull { .. }), "{error}");
        memory.scrub(&zone(), &options()).unwrap();
    }
}
