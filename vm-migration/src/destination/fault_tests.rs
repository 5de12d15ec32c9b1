// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A host that lacks memory: what waits for it can be ended, and what it refuses is tried again.

#![expect(clippy::unwrap_used, reason = "a failing unwrap fails the test")]

use std::io;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::channel;

use page_bitmap::PageBitmap;

use super::*;
use crate::destination::late_reconnects::{LateReconnects, rejoin_for_tests};
use crate::fault::{Fault, FaultSource, FaultSourceKind};
use crate::layout::{Backing, PAGE_BYTES, PageRun};
use crate::progress::Progress;
use crate::testing::FakeMemory;
use crate::transport::wait_readable;
use crate::uffd::UffdError;
use crate::{Side, Steering};

/// Longer than anything here takes.
const PATIENCE: Duration = Duration::from_mins(1);

/// A fault source on a host without memory for contents.
struct OutOfMemorySource {
    /// Requested once a thread waits for memory.
    waits: Cancel,
    stop: Cancel,
    /// How many more times the release fails.
    refusals: AtomicU32,
}

impl OutOfMemorySource {
    fn new(refusals: u32) -> Arc<Self> {
        let (waits, stop) = (Cancel::new().unwrap(), Cancel::new().unwrap());
        Arc::new(Self { waits, stop, refusals: AtomicU32::new(refusals) })
    }

    fn no_memory() -> UffdError {
        let source = io::Error::from_raw_os_error(libc::ENOMEM);
        UffdError::Pages { what: "fill", region: 0, first: 0, pages: 1, source }
    }
}

impl FaultSource for OutOfMemorySource {
    fn kind(&self) -> FaultSourceKind {
        FaultSourceKind::Uffd
    }

    fn readers(&self) -> usize {
        1
    }

    fn next_faults(&self, _: usize, _: &mut Vec<Fault>) -> Result<FaultWait, UffdError> {
        wait_readable(&[], &self.stop, None).unwrap();
        Ok(FaultWait::Stopped)
    }

    fn stop_readers(&self) {
        self.stop.cancel();
    }

    fn receives_in_place(&self, _: usize) -> bool {
        false
    }

    fn make_present(&self, _: PageRun) -> Result<(), UffdError> {
        Ok(())
    }

    fn copy_in(&self, _: PageRun, _: &[u8]) -> Result<(), UffdError> {
        self.waits.cancel();
        wait_readable(&[], &self.stop, None).unwrap();
        Err(Self::no_memory())
    }

    fn make_zero(&self, _: PageRun) -> Result<(), UffdError> {
        Ok(())
    }

    fn wake(&self, _: PageRun) -> Result<(), UffdError> {
        Ok(())
    }

    fn release(&self) -> Result<(), UffdError> {
        let left = self.refusals.load(Ordering::SeqCst);
        self.refusals.store(left.saturating_sub(1), Ordering::SeqCst);
        if left > 0 { Err(Self::no_memory()) } else { Ok(()) }
    }
}

/// The threads of a guest that may run, one of which waits for memory; and the source's end of the
/// connection.
fn out_of_memory(source: &Arc<OutOfMemorySource>) -> (FaultThreads<FakeMemory>, Connection) {
    let memory = FakeMemory::new(&[(0, 4)], Backing::Shared, PAGE_BYTES).unwrap();
    let missing = PageBitmap::new(4);
    missing.set_range(0..4);
    let progress = Arc::new(Progress::new(Side::Destination));
    let source_of_faults: Arc<dyn FaultSource> = source.clone();
    let engine = Engine::with_missing(&memory, source_of_faults, vec![missing], progress).unwrap();
    engine.commit().unwrap();
    let never = Cancel::new().unwrap();
    let (ours, theirs) = UnixStream::pair().unwrap();
    let [ours, theirs] = [ours, theirs].map(|end| Connection::over(end, &never, PATIENCE).unwrap());
    let rejoin = rejoin_for_tests(&"tcp:127.0.0.1:0".parse().unwrap(), &LateReconnects::default());
    let bulk = vec![Channel::new(ours)];
    let threads = FaultThreads::start(
        Arc::new(engine),
        rejoin,
        bulk,
        Vec::new(),
        ParkedThreads::new().unwrap(),
    )
    .unwrap();
    let page = GpaRange { gpa: 0, len_bytes: PAGE_BYTES };
    theirs.send(&Message::Memory(vec![page]).encode()).unwrap();
    theirs.send(&[1; 4096]).unwrap();
    wait_readable(&[], &source.waits, Some(PATIENCE)).unwrap();
    assert!(source.waits.is_cancelled());
    (threads, theirs)
}

/// True when `work`, on a thread of its own, ends in time.
fn ends(work: impl FnOnce() + Send + 'static) -> bool {
    let (done, is_done) = channel();
    std::thread::spawn(move || {
        work();
        done.send(()).unwrap();
    });
    is_done.recv_timeout(PATIENCE).is_ok()
}

#[test]
fn a_thread_that_waits_for_memory_of_the_host_ends_with_the_others() {
    let (threads, _theirs) = out_of_memory(&OutOfMemorySource::new(0));
    assert!(ends(move || drop(threads)));
}

#[test]
fn giving_up_ends_a_wait_for_memory_of_the_host_when_connections_are_lost() {
    let (mut threads, theirs) = out_of_memory(&OutOfMemorySource::new(0));
    let steering: Steering = threads.rejoin.steering.clone();
    drop(theirs);
    steering.abandon();
    assert!(ends(move || {
        threads.disconnect();
        assert!(threads.engine.failed().is_cancelled());
    }));
}

#[test]
fn the_release_of_a_discarded_machine_is_retried_until_it_succeeds() {
    let source = OutOfMemorySource::new(3);
    let (threads, _theirs) = out_of_memory(&source);
    threads.release_waiters();
    assert_eq!(source.refusals.load(Ordering::SeqCst), 0);
    assert!(source.release().is_ok());
}
