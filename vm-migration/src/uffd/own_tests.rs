// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Refused faults on fake memory. A system call that reads from the vCPUs' mapping is used in place
//! of `KVM_RUN`, because the kernel fails both with EFAULT.

#![expect(clippy::unwrap_used, reason = "a failing unwrap fails the test")]

use std::io;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use parking_lot::Mutex;

use super::{OwnFaults, Refused, thread_id};
use crate::fault::{Fault, FaultError, FaultResolver, FaultSource, FaultSourceKind, VcpuBarrier};
use crate::layout::{Backing, PAGE_BYTES, PageRun};
use crate::ram::GuestMemoryMap;
use crate::testing::FakeMemory;
use crate::uffd::check;

const PAGES: u64 = 64;
const GPA: u64 = 0x10_0000;

fn run(first: u64, count: u64) -> PageRun {
    PageRun { region: 0, first, count }
}

/// The first byte of a page, as a vCPU reads it.
fn vcpu_reads(memory: &FakeMemory, page: u64) -> io::Result<u8> {
    memory.vcpu_reads(0, page)
}

fn is_refused(memory: &FakeMemory, page: u64) -> bool {
    vcpu_reads(memory, page).is_err_and(|error| error.raw_os_error() == Some(libc::EFAULT))
}

/// Watched memory, or `None` where that is not permitted.
fn watched() -> Option<(Arc<FakeMemory>, Arc<OwnFaults<FakeMemory>>)> {
    let memory = FakeMemory::new(&[(GPA, PAGES)], Backing::Shared, PAGE_BYTES).unwrap();
    if let Err(error) = check(memory.layout().regions()) {
        test_skip::skip!("{error}");
        return None;
    }
    let sigbus = Arc::new(
        OwnFaults::refusing(Arc::clone(&memory), 1, 0..2, Box::new(Noted::default())).unwrap(),
    );
    Some((memory, sigbus))
}

/// Resolves faults with pages full of nines, and counts its calls.
struct Nines(Arc<OwnFaults<FakeMemory>>, AtomicUsize);

impl FaultResolver for Nines {
    fn resolve(&self, vcpu: usize, fault: Fault) -> Result<(), FaultError> {
        assert_eq!((vcpu, fault.region), (1, 0));
        assert!(fault.thread.is_some_and(|thread| thread > 0));
        self.1.fetch_add(1, Ordering::SeqCst);
        self.0.copy_in(run(fault.page, 1), &[9; 4096]).map_err(|_| FaultError)
    }
}

#[test]
fn a_vcpu_is_refused_until_the_page_is_in_the_file() {
    let Some((memory, sigbus)) = watched() else { return };
    assert!(is_refused(&memory, 3));
    sigbus.copy_in(run(3, 2), &[5; 8192]).unwrap();
    assert_eq!((vcpu_reads(&memory, 3).unwrap(), vcpu_reads(&memory, 4).unwrap()), (5, 5));
    assert!(is_refused(&memory, 5), "the neighbours of a page that came are still missing");
    sigbus.make_zero(run(5, 1)).unwrap();
    assert_eq!(vcpu_reads(&memory, 5).unwrap(), 0);
    sigbus.make_zero(run(4, 1)).unwrap();
    assert_eq!(vcpu_reads(&memory, 4).unwrap(), 5, "a page with contents keeps them");
}

#[test]
fn a_vcpu_is_refused_pages_of_ready_memory_until_they_are_shown() {
    let memory = FakeMemory::new(&[(GPA, PAGES)], Backing::Shared, PAGE_BYTES).unwrap();
    if let Err(error) = check(memory.layout().regions()) {
        return test_skip::skip!("{error}");
    }
    memory.make_ready().unwrap();
    let barrier = Box::new(Noted::default());
    let sigbus = OwnFaults::refusing(Arc::clone(&memory), 1, 0..2, barrier).unwrap();
    assert!(is_refused(&memory, 3));
    crate::ram::slice(&*memory, run(3, 2)).write(&[5; 8192]);
    assert!(is_refused(&memory, 3), "contents that are not complete yet are seen");
    sigbus.make_present(run(3, 2)).unwrap();
    assert_eq!((vcpu_reads(&memory, 3).unwrap(), vcpu_reads(&memory, 4).unwrap()), (5, 5));
    assert_eq!(memory.word(0, 4, 0).load(Ordering::Relaxed), u64::from_le_bytes([5; 8]));
    assert!(is_refused(&memory, 5));
    sigbus.make_zero(run(5, 1)).unwrap();
    assert_eq!(vcpu_reads(&memory, 5).unwrap(), 0);
    sigbus.show_more(run(10, 3));
    for vcpus in [false, true] {
        let is_mapped = |page: &u64| memory.is_mapped(0, *page, vcpus).unwrap();
        assert_eq!((6..PAGES).filter(is_mapped).collect::<Vec<_>>(), [10, 11, 12]);
    }
    sigbus.release().unwrap();
    assert_eq!(vcpu_reads(&memory, 6).unwrap(), 0, "after the release all are as they are");
}

#[test]
fn devices_wait_on_the_other_mapping_of_the_same_page() {
    let Some((memory, sigbus)) = watched() else { return };
    assert!(is_refused(&memory, 9));
    let device = {
        let memory = Arc::clone(&memory);
        std::thread::spawn(move || memory.word(0, 9, 0).load(Ordering::Relaxed))
    };
    let mut faults = Vec::new();
    sigbus.next_faults(0, &mut faults).unwrap();
    assert_eq!((faults.len(), faults[0].page), (1, 9), "a refused access makes no event");
    sigbus.copy_in(run(9, 1), &[6; 4096]).unwrap();
    assert_eq!(device.join().unwrap(), u64::from_le_bytes([6; 8]));
    assert_eq!(vcpu_reads(&memory, 9).unwrap(), 6);
}

#[test]
fn who_is_refused_brings_the_page_at_the_desk() {
    let Some((memory, sigbus)) = watched() else { return };
    assert_eq!(sigbus.refused(1, GPA).unwrap(), Refused::NoResolver, "there is no resolver yet");
    let resolver = Arc::new(Nines(Arc::clone(&sigbus), AtomicUsize::new(0)));
    let weak: Weak<Nines> = Arc::downgrade(&resolver);
    sigbus.set_resolver(weak);
    assert_eq!(sigbus.refused(1, GPA + 7 * PAGE_BYTES + 123).unwrap(), Refused::TryAgain);
    assert_eq!(vcpu_reads(&memory, 7).unwrap(), 9);
    for outside in [0, GPA - 1, GPA + PAGES * PAGE_BYTES, u64::MAX] {
        assert_eq!(sigbus.refused(1, outside).unwrap(), Refused::NotRam, "{outside:#x}");
    }
    assert_eq!(resolver.1.load(Ordering::SeqCst), 1);
    drop(resolver);
    assert_eq!(sigbus.refused(1, GPA).unwrap(), Refused::NoResolver, "the resolver is closed");
}

#[test]
fn after_the_release_no_thread_is_refused() {
    let Some((memory, sigbus)) = watched() else { return };
    assert!(is_refused(&memory, 1));
    sigbus.release().unwrap();
    assert_eq!(vcpu_reads(&memory, 1).unwrap(), 0);
    assert_eq!(sigbus.refused(0, GPA).unwrap(), Refused::NoResolver);
}

#[test]
fn memory_with_one_mapping_is_refused_with_what_to_do() {
    let memory = FakeMemory::new(&[(0, PAGES)], Backing::Anonymous, PAGE_BYTES).unwrap();
    if check(memory.layout().regions()).is_err() {
        return;
    }
    let error =
        OwnFaults::refusing(memory, 1, 0..1, Box::new(Noted::default())).unwrap_err().to_string();
    assert!(error.contains("shared=on") && error.contains("fault_source=uffd"), "{error}");
}

/// Records which marks were cleared, and in which regions the barrier was removed.
#[derive(Clone, Default)]
struct Noted(Arc<Mutex<(Vec<PageRun>, Vec<usize>)>>);

impl VcpuBarrier for Noted {
    fn unblock(&self, run: PageRun) {
        self.0.lock().0.push(run);
    }

    fn open(&self) {}

    fn remove(&self, region: usize) -> io::Result<()> {
        self.0.lock().1.push(region);
        Ok(())
    }
}

#[test]
fn a_mark_goes_when_its_page_has_come_and_all_go_in_the_end() {
    let memory = FakeMemory::new(&[(GPA, PAGES)], Backing::Shared, PAGE_BYTES).unwrap();
    if check(memory.layout().regions()).is_err() {
        return;
    }
    let noted = Noted::default();
    let marked = OwnFaults::marked(memory, 1, 0..1, Box::new(noted.clone())).unwrap();
    assert_eq!(marked.kind(), FaultSourceKind::Exit);
    marked.copy_in(run(3, 2), &[5; 8192]).unwrap();
    marked.make_zero(run(9, 1)).unwrap();
    assert!(marked.copy_in(run(9, 1), &[5; 4096]).is_err(), "a page that is there is kept");
    assert_eq!(noted.0.lock().0, [run(3, 2), run(9, 1)]);
    marked.release().unwrap();
    assert_eq!(noted.0.lock().1, [0]);
}

/// Marks of two regions like those of a patched KVM: removing one takes long, and meanwhile a vCPU
/// accesses the other region.
#[derive(Clone, Default)]
struct Slow {
    open: Arc<AtomicBool>,
    removed: Arc<Mutex<Vec<usize>>>,
    faults: Arc<OnceLock<Arc<OwnFaults<FakeMemory>>>>,
}

const SECOND: u64 = 1 << 32;

impl VcpuBarrier for Slow {
    fn unblock(&self, _: PageRun) {}

    fn open(&self) {
        self.open.store(true, Ordering::SeqCst);
    }

    fn remove(&self, region: usize) -> io::Result<()> {
        assert!(self.open.load(Ordering::SeqCst), "vCPUs are still refused pages that are here");
        let faults = self.faults.get().unwrap();
        assert_eq!(faults.refused(1, SECOND).unwrap(), Refused::TryAgain, "it is brought");
        self.removed.lock().push(region);
        Err(io::Error::from_raw_os_error(libc::ENOMEM))
    }
}

/// Makes pages visible that have stayed holes, as the engine does when all pages are here.
struct Holes(Weak<OwnFaults<FakeMemory>>);

impl FaultResolver for Holes {
    fn resolve(&self, _: usize, fault: Fault) -> Result<(), FaultError> {
        let run = PageRun { region: fault.region, first: fault.page, count: 1 };
        self.0.upgrade().unwrap().make_zero(run).map_err(|_| FaultError)
    }
}

#[test]
fn no_vcpu_is_refused_a_page_that_is_here_while_marks_are_taken_away() {
    let regions = [(GPA, PAGES), (SECOND, PAGES)];
    let memory = FakeMemory::new(&regions, Backing::Shared, PAGE_BYTES).unwrap();
    if check(memory.layout().regions()).is_err() {
        return;
    }
    let slow = Slow::default();
    let faults = Arc::new(OwnFaults::marked(memory, 1, 0..2, Box::new(slow.clone())).unwrap());
    let _ = slow.faults.set(Arc::clone(&faults));
    let resolver = Arc::new(Holes(Arc::downgrade(&faults)));
    let weak: Weak<Holes> = Arc::downgrade(&resolver);
    faults.set_resolver(weak);
    faults.release().expect("marks that stay do no harm once they are clear");
    assert_eq!(*slow.removed.lock(), [0, 1]);
    assert_eq!(faults.refused(1, SECOND).unwrap(), Refused::NoResolver);
}

#[test]
fn each_thread_has_its_own_id() {
    let ids = || {
        // SAFETY: takes nothing and touches no memory.
        let asked = unsafe { libc::gettid() }.cast_unsigned();
        assert_eq!([thread_id(), thread_id()], [asked; 2]);
        asked
    };
    assert_ne!(std::thread::spawn(ids).join().unwrap(), ids());
}
