// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What VMMs hold and leave behind: descriptors, threads, memory, processes, files, taps, locks.
//!
//! Owns what is more than there should be. All of it is counted by what is this campaign's own (process
//! ids, names, inodes), so that other tests may run meanwhile; only [`shared_memory_mib`] is the host's.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use crate::harness::Vmm;
use crate::harness::process::{descriptors, memfds_kib, paths, status_kib, thread_names};
use crate::harness::taps::taps_of;
use crate::harness::vmm::LANDLOCK_SWITCH;

/// By how much a failed migration may leave a VMM's own memory larger: what its allocator keeps of threads
/// that have ended.
const GROWTH_KIB_MAX: u64 = 8 << 10;
/// A VMM's own memory at any time between migrations: a few MiB, and what allocators keep for each thread.
const OWN_KIB_MAX: u64 = 24 << 10;
/// The largest of these that was seen, of VMMs whose guest has other memory.
static LARGEST_KIB: AtomicU64 = AtomicU64::new(0);
/// What a VMM has in memfds other than the guest's memory.
const OTHER_FILES_KIB_MAX: u64 = 4 << 10;
/// What a VMM of a test leaves in its folder while it runs, and after.
const FILES: [&str; 5] = ["api", "events", "log", "stdout", "stderr"];

/// The thread that collapses memory into huge pages after a guest has arrived.
const COLLAPSES: &str = "huge-pages";
/// The kernel's own, one for each VM from the first time that a vCPU runs. Where a guest has just
/// reset, that can come after the VMM was looked at.
const KERNELS: &str = "kvm-nx-lpage-re";

/// The names that are there more often than before.
fn more_than<'a>(now: &'a [String], before: &[String]) -> Vec<&'a String> {
    let mut left = before.to_vec();
    let is_new = |name: &&String| match left.iter().position(|other| other == *name) {
        Some(at) => {
            left.swap_remove(at);
            false
        }
        None => true,
    };
    now.iter().filter(is_new).collect()
}

/// What a VMM holds.
pub struct Holdings {
    descriptors: Vec<String>,
    threads: Vec<String>,
    /// Memory of its own, with that of a guest whose memory is private.
    anonymous_kib: u64,
}

impl Holdings {
    pub fn of(vmm: &Vmm) -> Self {
        let mut threads = thread_names(vmm.pid());
        // They go on where they were stopped for a migration that failed.
        threads.retain(|name| name != COLLAPSES);
        if let Some(one) = threads.iter().position(|name| name == KERNELS) {
            threads.swap_remove(one);
        }
        let anonymous_kib = status_kib(vmm.pid(), "RssAnon");
        let mut descriptors = descriptors(vmm.pid());
        // What a VM may open stays in force when it has gone, and its rules hold their paths.
        if std::env::var_os(LANDLOCK_SWITCH).is_some() {
            for path in paths(vmm.pid()) {
                if let Some(at) = descriptors.iter().position(|other| *other == path) {
                    descriptors.swap_remove(at);
                }
            }
        }
        Self { descriptors, threads, anonymous_kib }
    }

    /// Without what its guest may have taken meanwhile, which is looked at in [`assert_memory_is_bounded`].
    pub const fn of_any_memory(mut self) -> Self {
        self.anonymous_kib = u64::MAX;
        self
    }

    /// What is there and was not before.
    fn beyond(&self, before: &Self) -> Option<String> {
        let descriptors = more_than(&self.descriptors, &before.descriptors);
        let threads = more_than(&self.threads, &before.threads);
        let grown_kib = self.anonymous_kib.saturating_sub(before.anonymous_kib);
        let is_more = !descriptors.is_empty()
            || self.threads.len() > before.threads.len()
            || grown_kib > GROWTH_KIB_MAX;
        is_more.then(|| {
            format!("descriptors {descriptors:?}, threads {threads:?}, memory {grown_kib} KiB")
        })
    }
}

/// Waits until a VMM holds no more than before.
pub fn assert_holds_no_more(vmm: &Vmm, before: &Holdings, what: &str) {
    assert_soon(|| {
        let more = Holdings::of(vmm).beyond(before)?;
        Some(format!("{what} holds more than before: {more}"))
    });
}

/// Waits until it holds; panics with what is wrong when it does not.
#[track_caller]
fn assert_soon(mut wrong: impl FnMut() -> Option<String>) {
    let start = Instant::now();
    while let Some(what) = wrong() {
        assert!(start.elapsed() < super::LEFTOVERS_TIME, "{what}");
        std::thread::sleep(super::POLL);
    }
}

/// A VMM has no more memory than its guest's and a little of its own, however often that has moved.
pub fn assert_memory_is_bounded(vmm: &Vmm, guest_mib: u64, is_shared: bool) {
    let guest_kib = guest_mib << 10;
    assert_soon(|| {
        let anonymous_kib = status_kib(vmm.pid(), "RssAnon");
        let own_kib = if is_shared { anonymous_kib } else { 0 };
        LARGEST_KIB.fetch_max(own_kib, Ordering::Relaxed);
        let most_kib = OWN_KIB_MAX + if is_shared { 0 } else { guest_kib };
        let files_kib = memfds_kib(vmm.pid());
        let is_more = anonymous_kib > most_kib || files_kib > guest_kib + OTHER_FILES_KIB_MAX;
        is_more.then(|| {
            format!(
                "a VMM of {guest_mib} MiB holds {anonymous_kib} KiB, and {files_kib} KiB in memfds"
            )
        })
    });
}

/// The most memory of its own that a VMM was seen with.
pub fn largest_kib() -> u64 {
    LARGEST_KIB.load(Ordering::Relaxed)
}

/// Shared memory of the whole host.
pub fn shared_memory_mib() -> u64 {
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("Shmem:"));
    let kib = line.and_then(|line| line.split_ascii_whitespace().next()?.parse::<u64>().ok());
    kib.unwrap_or(0) >> 10
}

/// Locks on one file, of the lines of a text of the kernel: kind, holder and range.
fn locks_in(text: &str, file: &str) -> Vec<String> {
    let words =
        |line: &str| -> Vec<String> { line.split_ascii_whitespace().map(str::to_owned).collect() };
    let lines = text.lines().map(|line| words(line.trim_start_matches("lock:")));
    lines
        .filter(|words| words.iter().any(|word| word == file))
        // The number in front is of the text alone.
        .filter_map(|words| Some(words.get(1..)?.join(" ")))
        .collect()
}

/// Only `holder` has locks on these files, and it has one on each of `held`.
pub fn assert_locks(files: &[PathBuf], holder: Option<&Vmm>, held: &[PathBuf]) {
    for path in files {
        // A zone's file may have gone with its guest.
        let Ok(file) = fs::metadata(path) else { continue };
        let device = file.dev();
        let name =
            format!("{:02x}:{:02x}:{}", libc::major(device), libc::minor(device), file.ino());
        assert_soon(|| {
            let all = locks_in(&fs::read_to_string("/proc/locks").unwrap_or_default(), &name);
            let own = holder.map(|vmm| locks_of(vmm, &name)).unwrap_or_default();
            let others = more_than(&all, &own);
            let is_missing = own.is_empty() && held.contains(path);
            (is_missing || !others.is_empty()).then(|| {
                format!("{}: its VMM has the locks {own:?}, others have {others:?}", path.display())
            })
        });
    }
}

fn locks_of(vmm: &Vmm, file: &str) -> Vec<String> {
    let Ok(entries) = fs::read_dir(format!("/proc/{}/fdinfo", vmm.pid())) else {
        return Vec::new();
    };
    let texts = entries.flatten().filter_map(|entry| fs::read_to_string(entry.path()).ok());
    texts.flat_map(|text| locks_in(&text, file)).collect()
}

/// A VMM has this tap and no other.
pub fn assert_tap(vmm: &Vmm, name: Option<&str>) {
    let expected: Vec<&str> = name.into_iter().collect();
    assert_soon(|| {
        let taps = taps_of(vmm);
        (taps != expected).then(|| format!("the VMM has the taps {taps:?}, not {expected:?}"))
    });
}

/// A folder holds nothing but these.
pub fn assert_only(folder: &Path, names: &[String]) {
    assert_soon(|| {
        let mut left = Vec::new();
        for entry in fs::read_dir(folder).expect("a folder").flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            if !names.contains(&name) {
                left.push(name);
            }
        }
        (!left.is_empty())
            .then(|| format!("files that were left in {}: {left:?}", folder.display()))
    });
}

/// Files that a VMM should not have left in its folder.
pub fn assert_no_files(vmm: &Vmm) {
    assert_only(&vmm.path(""), &FILES.map(str::to_owned));
}

/// Processes that were started with something in this VMM's folder, other than itself.
pub fn assert_no_processes(vmm: &Vmm, side: &str) {
    let folder = vmm.path("").display().to_string();
    assert_soon(|| {
        let left: Vec<String> = fs::read_dir("/proc")
            .expect("processes")
            .flatten()
            .filter_map(|entry| entry.file_name().to_string_lossy().parse::<u32>().ok())
            .filter(|pid| *pid != vmm.pid() && *pid != process::id())
            .filter_map(|pid| {
                let line = fs::read(format!("/proc/{pid}/cmdline")).ok()?;
                let line = String::from_utf8_lossy(&line).replace('\0', " ");
                line.contains(&folder).then(|| format!("{pid}: {line}"))
            })
            .collect();
        (!left.is_empty()).then(|| format!("processes of the {side} are left: {left:?}"))
    });
}
