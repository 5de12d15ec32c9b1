// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `bench postcopy-scaling`: how many faults per second a host resolves for 1 to 160 threads that
//! do nothing else, on plain memory, without KVM and without a network.
//!
//! Owns the three variants: one userfaultfd with one reader, the migration's own fault source with
//! the number of descriptors and readers that a guest with as many vCPUs gets, and threads that
//! resolve their own faults in a signal handler, like a vCPU thread that has left the guest. Must
//! never compare variants with different numbers of pages.

use std::error::Error;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use vm_migration::destination::READERS_MAX;
use vm_migration::fault::{FaultSource as _, FaultWait};
use vm_migration::layout::{Backing, PageRun};
use vm_migration::options::urgent_connections_for;
use vm_migration::testing::FakeMemory;
use vm_migration::uffd::Uffd;

use super::uffd::{self, Missing, PAGE_BYTES};
use crate::machine;
use crate::report::{Figure, Report};

/// Pages that are touched once each, by all threads together.
const PAGES: usize = 32 << 10;
/// Distance between two pages that a thread touches: odd, so that all of a power of two are
/// touched.
const STEP: usize = 4099;
const THREADS: [usize; 9] = [1, 2, 4, 8, 16, 32, 64, 128, 160];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    OneReader,
    Ours,
    Own,
}

const WAYS: [Way; 3] = [Way::OneReader, Way::Ours, Way::Own];

impl Way {
    const fn name(self) -> &'static str {
        match self {
            Self::OneReader => "one userfaultfd, one reader",
            Self::Ours => "godwit",
            Self::Own => "threads that resolve their own faults",
        }
    }

    fn measure(self, threads: usize) -> Result<Duration, Box<dyn Error>> {
        match self {
            Self::OneReader => one_reader(threads),
            Self::Ours => ours(threads),
            Self::Own => own(threads),
        }
    }
}

/// Runs the benchmark.
pub fn run(runs: usize) -> Result<Report, Box<dyn Error>> {
    let mut taken: Vec<(Way, usize, f64)> = Vec::new();
    for run in 0..runs {
        for threads in THREADS {
            for way in WAYS {
                eprintln!("run {} of {runs}: {threads} threads: {}", run + 1, way.name());
                let took = way
                    .measure(threads)
                    .map_err(|error| format!("{}, {threads} threads: {error}", way.name()))?;
                let pages = u32::try_from(PAGES).map_or(0.0, f64::from);
                taken.push((way, threads, pages / took.as_secs_f64() / 1e3));
            }
        }
    }
    let mut figures = Vec::new();
    for way in WAYS {
        for threads in THREADS {
            let mine = taken.iter().filter(|entry| (entry.0, entry.1) == (way, threads));
            let name = format!("{}, {threads} threads", way.name());
            figures.extend(Figure::of(name, "thousand pages/s", mine.map(|e| e.2).collect()));
        }
    }
    let notes = vec![
        "every page is copied in once; there is no network and no guest in these figures"
            .to_owned(),
    ];
    let machine = machine::name();
    Ok(Report { name: "postcopy-scaling", machine, figures, targets: Vec::new(), notes })
}

/// Touches all pages from `threads` threads; page `p` belongs to thread `p` modulo their number.
fn touch_all(threads: usize, touch: impl Fn(usize) + Sync) -> Duration {
    let (ready, go) = (AtomicUsize::new(0), std::sync::Barrier::new(threads + 1));
    std::thread::scope(|scope| {
        for thread in 0..threads {
            let (ready, go, touch) = (&ready, &go, &touch);
            scope.spawn(move || {
                ready.fetch_add(1, Ordering::Relaxed);
                go.wait();
                for page in (thread..PAGES).step_by(threads) {
                    touch(page * STEP % PAGES);
                }
            });
        }
        while ready.load(Ordering::Relaxed) < threads {
            std::thread::yield_now();
        }
        // Read before the threads start, because this thread may not run again until they are done.
        let start = Instant::now();
        go.wait();
        start
    })
    .elapsed()
}

fn one_reader(threads: usize) -> Result<Duration, Box<dyn Error>> {
    let memory = Missing::new(PAGES, 0)?;
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let page = [7; PAGE_BYTES];
            (0..PAGES).try_for_each(|_| memory.fill(memory.next_fault()?, &page))
        });
        let took = touch_all(threads, |page| memory.touch(page));
        reader.join().map_err(|_| io::Error::other("the reader panicked"))??;
        Ok(took)
    })
}

fn ours(threads: usize) -> Result<Duration, Box<dyn Error>> {
    let memory = FakeMemory::new(&[(0, PAGES as u64)], Backing::Shared, PAGE_BYTES as u64)
        .map_err(|error| error.to_string())?;
    let readers = usize::from(urgent_connections_for(u32::try_from(threads)?).min(READERS_MAX));
    let source = Uffd::register(Arc::clone(&memory), readers)?;
    let took = std::thread::scope(|scope| {
        let readers: Vec<_> = (0..source.readers())
            .map(|reader| {
                let source = &source;
                scope.spawn(move || -> Result<(), vm_migration::uffd::UffdError> {
                    let page = [7; PAGE_BYTES];
                    let mut faults = Vec::new();
                    while source.next_faults(reader, &mut faults)? == FaultWait::Faults {
                        for fault in faults.drain(..) {
                            let run = PageRun { region: fault.region, first: fault.page, count: 1 };
                            source.copy_in(run, &page)?;
                        }
                    }
                    Ok(())
                })
            })
            .collect();
        let took = touch_all(threads, |page| {
            memory.word(0, page as u64, 0).fetch_add(1, Ordering::Relaxed);
        });
        source.stop_readers();
        for reader in readers {
            reader.join().map_err(|_| io::Error::other("a reader panicked"))??;
        }
        Ok::<Duration, Box<dyn Error>>(took)
    })?;
    source.release()?;
    Ok(took)
}

/// The userfaultfd whose faults the handler resolves.
static RESOLVED: AtomicI32 = AtomicI32::new(-1);
static PAGE: [u8; PAGE_BYTES] = [7; PAGE_BYTES];

fn own(threads: usize) -> Result<Duration, Box<dyn Error>> {
    let memory = Missing::new(PAGES, uffd::SIGBUS)?;
    RESOLVED.store(memory.fd(), Ordering::Release);
    // SAFETY: all bits zero is a value of this plain C structure.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = resolve as *const () as usize;
    action.sa_flags = libc::SA_SIGINFO;
    // SAFETY: the handler only makes a system call on memory that lives for as long as faults of it
    // can occur.
    if unsafe { libc::sigaction(libc::SIGBUS, &raw const action, std::ptr::null_mut()) } != 0 {
        return Err(io::Error::last_os_error().into());
    }
    let took = touch_all(threads, |page| memory.touch(page));
    action.sa_sigaction = libc::SIG_DFL;
    // SAFETY: as above, back to what it was.
    unsafe { libc::sigaction(libc::SIGBUS, &raw const action, std::ptr::null_mut()) };
    Ok(took)
}

/// Copies in the page on which this thread has faulted; the access is then repeated.
extern "C" fn resolve(_: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: the kernel hands over a valid structure, of a fault, which has an address.
    let address = unsafe { (*info).si_addr() }.expose_provenance() as u64;
    let page = address & !(PAGE_BYTES as u64 - 1);
    // Without the page the access would fault forever: a real bus error must end the program.
    if uffd::copy(RESOLVED.load(Ordering::Acquire), page, &PAGE).is_err() {
        // SAFETY: ends the process; may be called from a handler.
        unsafe { libc::_exit(3) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_way_resolves_every_fault() {
        for way in WAYS {
            let Some(time) = test_skip::permitted(way.measure(3)) else { return };
            assert!(time > Duration::ZERO, "{way:?}");
        }
    }
}
