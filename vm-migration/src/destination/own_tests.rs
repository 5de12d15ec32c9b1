// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A vCPU's own connection: who reads there, and what ends the vCPU's wait. The source is the test, which sees what is
//! asked for and answers when it likes.

#![expect(clippy::unwrap_used, reason = "a failing unwrap fails the test")]

use std::io;
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{Receiver, channel};
use std::thread::ThreadId;

use page_bitmap::PageBitmap;

use super::*;
use crate::fault::{Fault, FaultSource, FaultSourceKind, FaultWait};
use crate::layout::{Backing, PAGE_BYTES, PageRun};
use crate::progress::Progress;
use crate::protocol::message::Message;
use crate::ram;
use crate::session::Session;
use crate::testing::FakeMemory;
use crate::transport::Reader;
use crate::uffd::UffdError;
use crate::{Cancel, Side};

/// Longer than anything here takes.
const PATIENCE: Duration = Duration::from_mins(1);

const PAGES: u64 = 64;

/// A fault source of one vCPU that puts contents into memory which nothing watches, and notes who did.
struct Noting {
    memory: Arc<FakeMemory>,
    bells: [Option<Arc<Bell>>; 1],
    placed: Mutex<Vec<(u64, ThreadId)>>,
    /// The host has no memory until then.
    memory_is_there: Cancel,
    /// A vCPU's thread was told so.
    was_refused: Cancel,
}

impl Noting {
    fn put(&self, run: PageRun, bytes: &[u8]) {
        ram::slice(&*self.memory, run).write(bytes);
        let who = std::thread::current().id();
        self.placed.lock().extend((run.first..run.end()).map(|page| (page, who)));
    }
}

impl FaultSource for Noting {
    fn kind(&self) -> FaultSourceKind {
        FaultSourceKind::Exit
    }

    fn readers(&self) -> usize {
        0
    }

    fn bells(&self) -> &[Option<Arc<Bell>>] {
        &self.bells
    }

    fn next_faults(&self, _: usize, _: &mut Vec<Fault>) -> Result<FaultWait, UffdError> {
        Ok(FaultWait::Stopped)
    }

    fn stop_readers(&self) {}

    fn receives_in_place(&self, _: usize) -> bool {
        false
    }

    fn prefers_copies_of_small_runs(&self, _: usize) -> bool {
        true
    }

    fn make_present(&self, _: PageRun) -> Result<(), UffdError> {
        Ok(())
    }

    fn copy_in(&self, run: PageRun, bytes: &[u8]) -> Result<(), UffdError> {
        crate::transport::wait_readable(&[], &self.memory_is_there, Some(PATIENCE)).unwrap();
        self.put(run, bytes);
        Ok(())
    }

    fn copy_in_now(&self, run: PageRun, bytes: &[u8]) -> Result<(), UffdError> {
        if !self.memory_is_there.is_cancelled() {
            self.was_refused.cancel();
            let source = io::Error::from_raw_os_error(libc::ENOMEM);
            return Err(UffdError::Pages { what: "fill", region: 0, first: 0, pages: 1, source });
        }
        self.put(run, bytes);
        Ok(())
    }

    fn make_zero(&self, _: PageRun) -> Result<(), UffdError> {
        Ok(())
    }

    fn wake(&self, _: PageRun) -> Result<(), UffdError> {
        Ok(())
    }

    fn release(&self) -> Result<(), UffdError> {
        Ok(())
    }
}

/// One vCPU, its own connection, the thread for what is left, and the source's end.
struct Bench {
    source: Arc<Noting>,
    engine: Arc<Engine<FakeMemory>>,
    own: Arc<OwnConnection>,
    session: Session,
    theirs: Arc<Connection>,
    heard: Reader,
}

fn range(page: u64) -> GpaRange {
    GpaRange { gpa: page * PAGE_BYTES, len_bytes: PAGE_BYTES }
}

fn byte(page: u64) -> u8 {
    u8::try_from(page).unwrap() + 1
}

impl Bench {
    /// All but what is expected is looked for so seldom that no test sees it, unless `look_every` says otherwise.
    fn new() -> Self {
        Self::looking_every(PATIENCE * 10)
    }

    fn looking_every(look_every: Duration) -> Self {
        let memory_is_there = Cancel::new().unwrap();
        memory_is_there.cancel();
        Self::with(look_every, memory_is_there)
    }

    fn with(look_every: Duration, memory_is_there: Cancel) -> Self {
        let memory = FakeMemory::new(&[(0, PAGES)], Backing::Shared, PAGE_BYTES).unwrap();
        let bells = [Some(Arc::new(Bell::new().unwrap()))];
        let placed = Mutex::default();
        let (of_source, was_refused) = (Arc::clone(&memory), Cancel::new().unwrap());
        let noting = Noting { memory: of_source, bells, placed, memory_is_there, was_refused };
        let source = Arc::new(noting);
        let missing = PageBitmap::new(PAGES);
        missing.set_range(0..PAGES);
        let progress = Arc::new(Progress::new(Side::Destination));
        let faults: Arc<dyn FaultSource> = source.clone();
        let engine = Engine::with_missing(&memory, faults, vec![missing], progress).unwrap();
        let engine = Arc::new(engine);
        engine.commit().unwrap();
        let mut session = Session::new().unwrap();
        let (ours, theirs) = UnixStream::pair().unwrap();
        let [ours, theirs] = [ours, theirs]
            .map(|end| Connection::over(end, session.fate().stop(), PATIENCE).unwrap());
        let theirs = Arc::new(theirs);
        let bell = Arc::new(Bell::new().unwrap());
        let own = Arc::new(OwnConnection::new(Channel::new(ours), &bell, session.fate()));
        let left = Leftovers { connections: vec![Arc::clone(&own)], bell, look_every };
        let part = (Arc::clone(&engine), Arc::clone(session.fate()), left);
        let read = |(engine, fate, left): &mut (Arc<Engine<FakeMemory>>, _, Leftovers)| {
            let fate: &Arc<SessionState> = fate;
            left.read(engine, fate)
        };
        let urgency = crate::session::Urgency::Later { vcpus: 0, threads: 1 };
        session.spawn("mig-urgent", urgency, part, read, |failure| panic!("{failure:?}")).unwrap();
        let heard = Reader::new(Arc::clone(&theirs));
        Self { source, engine, own, session, theirs, heard }
    }

    /// The same without asking.
    fn late_fault(&self, page: u64) -> (ThreadId, Receiver<bool>) {
        self.fault_with(page, false, |_| {})
    }

    /// The vCPU needs a page, and says with whether it is here that it goes on. It asks for `ahead` as well.
    fn fault(&self, page: u64, ahead: &[u64]) -> (ThreadId, Receiver<bool>) {
        let own = Arc::clone(&self.own);
        let ahead: Vec<_> = ahead.iter().map(|page| range(*page)).collect();
        self.fault_with(page, true, move |asked| {
            own.note(&asked);
            own.note(&ahead);
            for message in [Message::PageFault(asked), Message::Ahead(ahead)] {
                own.connection.send(&message.encode()).unwrap();
            }
        })
    }

    fn fault_with(
        &self,
        page: u64,
        asks: bool,
        ask: impl FnOnce(Vec<GpaRange>) + Send + 'static,
    ) -> (ThreadId, Receiver<bool>) {
        let (engine, own) = (Arc::clone(&self.engine), Arc::clone(&self.own));
        let (goes_on, on) = channel();
        let thread = std::thread::spawn(move || {
            let wait = |(): (), waiting: &Waiting<'_>, is_missing: &dyn Fn() -> bool| {
                own.wait_for(&engine, (0, waiting), asks, is_missing);
            };
            let fault = Fault { region: 0, page, thread: None };
            engine.resolve(0, fault, ask, wait).unwrap();
            goes_on.send(!engine.missing()[0].get(page)).unwrap();
        });
        (thread.thread().id(), on)
    }

    /// Hears what a fault asks for.
    fn hear(&mut self, page: u64) {
        let asked = Message::read(&mut self.heard).unwrap();
        assert_eq!(asked, Message::PageFault(vec![range(page)]));
        assert!(matches!(Message::read(&mut self.heard).unwrap(), Message::Ahead(_)));
    }

    fn kick(&self) {
        self.source.bells[0].as_ref().unwrap().ring();
    }

    fn wait_for(&self, page: u64) {
        let deadline = std::time::Instant::now() + PATIENCE;
        while self.engine.missing()[0].get(page) {
            assert!(std::time::Instant::now() < deadline, "page {page} is not read");
            std::thread::yield_now();
        }
        let word = self.source.memory.word(0, page, 7).load(Ordering::Relaxed);
        assert_eq!(word, u64::from_ne_bytes([byte(page); 8]), "contents of page {page}");
    }

    /// The thread that has placed a page.
    fn placed(&self, page: u64) -> ThreadId {
        self.wait_for(page);
        let placed = self.source.placed.lock();
        placed.iter().find(|placed| placed.0 == page).unwrap().1
    }

    fn send(&self, bytes: &[u8]) {
        self.theirs.send(bytes).unwrap();
    }
}

fn contents(pages: &[u64]) -> Vec<u8> {
    let mut bytes = Message::Memory(pages.iter().map(|page| range(*page)).collect()).encode();
    for page in pages {
        bytes.extend([byte(*page); 4096]);
    }
    bytes
}

#[test]
fn a_vcpu_places_its_page_itself_and_leaves_the_rest_to_another_thread() {
    let mut bench = Bench::new();
    for (page, more) in [(1, [2, 3]), (10, [11, 12])] {
        let (vcpu, on) = bench.fault(page, &more);
        bench.hear(page);
        bench.send(&contents(&[page]));
        assert_eq!(on.recv_timeout(PATIENCE), Ok(true));
        assert_eq!(bench.placed(page), vcpu);
        // No thread waits for them, and none faults.
        for page in more {
            bench.send(&contents(&[page]));
        }
        assert!(more.iter().all(|page| bench.placed(*page) != vcpu));
    }
    // What is behind its page in one message, and received with it.
    let (vcpu, on) = bench.fault(20, &[21, 22]);
    bench.hear(20);
    bench.send(&contents(&[20, 21, 22]));
    assert_eq!(on.recv_timeout(PATIENCE), Ok(true));
    assert_eq!(bench.placed(20), vcpu);
    assert!(bench.placed(22) != vcpu);
    let counted = bench.engine.progress().snapshot();
    assert_eq!((counted.faults.requested, counted.faults.latency_us.unwrap().count), (Some(3), 3));
    assert_eq!(counted.memory_bytes_received, Some(9 * PAGE_BYTES));
    assert_eq!(counted.remaining_bytes, Some((PAGES - 9) * PAGE_BYTES));
}

#[test]
fn pages_of_others_and_zeros_on_the_way_to_its_own_are_placed() {
    let mut bench = Bench::new();
    let (vcpu, on) = bench.fault(5, &[6, 7]);
    bench.hear(5);
    bench.send(&contents(&[6]));
    bench.send(&Message::ZeroPages(vec![range(7)]).encode());
    assert_eq!(bench.placed(6), vcpu);
    assert!(on.try_recv().is_err(), "it goes on without its page");
    bench.send(&contents(&[5]));
    assert_eq!(on.recv_timeout(PATIENCE), Ok(true));
    assert_eq!(bench.placed(5), vcpu);
    assert!(!bench.engine.missing()[0].get(7));
    assert!(!bench.own.claim.is_left(), "nothing is to come, and the other thread polls");
}

#[test]
fn a_kick_ends_the_wait_between_any_two_bytes_and_the_page_comes_all_the_same() {
    let mut bench = Bench::new();
    let whole = contents(&[9]).len();
    for (page, sent) in [0, 1, 16, 20, 32, 33, 4000, whole - 1].into_iter().enumerate() {
        let page = page as u64 + 30;
        let (vcpu, on) = bench.fault(page, &[]);
        bench.hear(page);
        let answer = contents(&[page]);
        bench.send(&answer[..sent]);
        bench.kick();
        assert_eq!(on.recv_timeout(PATIENCE), Ok(false));
        bench.send(&answer[sent..]);
        assert_ne!(bench.placed(page), vcpu);
    }
}

#[test]
fn what_was_asked_for_ahead_is_read_when_the_page_itself_was_here() {
    let bench = Bench::new();
    bench.engine.take_zeros(&[range(40)], Via::Bulk).unwrap();
    let (vcpu, on) = bench.fault(40, &[41]);
    assert_eq!(on.recv_timeout(PATIENCE), Ok(true));
    bench.send(&contents(&[41]));
    assert_ne!(bench.placed(41), vcpu);
}

#[test]
fn a_kick_ends_the_wait_while_a_source_sends_without_end() {
    let mut bench = Bench::new();
    let (_, on) = bench.fault(42, &[]);
    bench.hear(42);
    let notice = Message::Elsewhere(vec![range(43)]).encode();
    std::thread::scope(|scope| {
        // Until the connection is closed.
        let theirs = &bench.theirs;
        scope.spawn(move || while theirs.send(&notice).is_ok() {});
        bench.kick();
        let goes_on = on.recv_timeout(PATIENCE);
        bench.own.close();
        assert_eq!(goes_on, Ok(false));
    });
}

#[test]
fn what_is_not_expected_is_read_however_often_the_bell_rings() {
    let bench = Bench::looking_every(Duration::from_millis(20));
    std::thread::scope(|scope| {
        let (own, engine) = (&bench.own, &bench.engine);
        scope.spawn(move || {
            let deadline = Instant::now() + PATIENCE;
            while engine.missing()[0].get(50) && Instant::now() < deadline {
                own.others.ring();
                std::thread::yield_now();
            }
        });
        bench.send(&contents(&[50]));
        bench.wait_for(50);
    });
}

#[test]
fn more_than_is_remembered_is_read_as_well() {
    let bench = Bench::new();
    bench.own.note(&vec![range(60); ASKED_MAX]);
    bench.own.note(&[range(61)]);
    bench.own.leave();
    bench.send(&contents(&[60]));
    bench.wait_for(60);
    bench.send(&contents(&[61]));
    bench.wait_for(61);
}

#[test]
fn a_page_that_comes_elsewhere_ends_the_wait() {
    let mut bench = Bench::new();
    let (_, on) = bench.fault(3, &[]);
    bench.hear(3);
    let bytes = [byte(3); 4096];
    let engine = &bench.engine;
    engine.take_contents(&mut &bytes[..], &[range(3)], Via::Bulk, &mut Vec::new()).unwrap();
    assert_eq!(on.recv_timeout(PATIENCE), Ok(true));
    // A vCPU that saw the page before it was rung has that still before it, and would look again at once.
    bench.source.bells[0].as_ref().unwrap().take_ring();
    // The notice is read with the next answer.
    bench.send(&Message::Elsewhere(vec![range(3)]).encode());
    // The thread that reads what vCPUs leave may have begun with it, and then reads the answer as well.
    let (_, on) = bench.fault(4, &[]);
    bench.hear(4);
    bench.send(&contents(&[4]));
    assert_eq!(on.recv_timeout(PATIENCE), Ok(true));
    assert_eq!(bench.engine.progress().snapshot().faults.elsewhere, Some(1));
}

#[test]
fn what_another_thread_asks_for_there_is_read_without_the_vcpu() {
    let mut bench = Bench::new();
    let ask = |bench: &Bench, page| {
        bench.own.note(&[range(page)]);
        bench.own.leave();
        bench.send(&contents(&[page]));
    };
    ask(&bench, 40);
    bench.wait_for(40);
    // While the vCPU reads, it is the vCPU that places it, or what is left when it goes.
    let (_, on) = bench.fault(41, &[]);
    bench.hear(41);
    ask(&bench, 42);
    bench.wait_for(42);
    bench.own.note(&[range(43)]);
    bench.own.leave();
    bench.send(&contents(&[41]));
    assert_eq!(on.recv_timeout(PATIENCE), Ok(true));
    bench.send(&contents(&[43]));
    bench.wait_for(43);
}

#[test]
fn a_vcpu_that_finds_no_memory_of_the_host_can_be_kicked() {
    let memory_is_there = Cancel::new().unwrap();
    let mut bench = Bench::with(PATIENCE * 10, memory_is_there.clone());
    let (vcpu, on) = bench.fault(8, &[]);
    bench.hear(8);
    bench.send(&contents(&[8]));
    let refused = &bench.source.was_refused;
    crate::transport::wait_readable(&[], refused, Some(PATIENCE)).unwrap();
    assert!(refused.is_cancelled() && on.try_recv().is_err());
    bench.kick();
    assert_eq!(on.recv_timeout(PATIENCE), Ok(false));
    memory_is_there.cancel();
    assert_ne!(bench.placed(8), vcpu);
}

#[test]
fn an_end_of_the_connection_is_found_while_nobody_reads_there() {
    let bench = Bench::looking_every(Duration::from_millis(10));
    bench.theirs.shut_down();
    let stop = bench.session.fate().stop();
    crate::transport::wait_readable(&[], stop, Some(PATIENCE)).unwrap();
    assert!(stop.is_cancelled());
}

#[test]
fn an_end_of_the_connection_under_a_vcpu_ends_the_set_and_not_the_wait() {
    let mut bench = Bench::new();
    let (_, on) = bench.fault(8, &[]);
    bench.hear(8);
    bench.theirs.shut_down();
    let stop = bench.session.fate().stop();
    crate::transport::wait_readable(&[], stop, Some(PATIENCE)).unwrap();
    assert!(stop.is_cancelled());
    assert!(on.try_recv().is_err());
    // The set is over: the vCPU looks for another.
    bench.engine.wake_vcpus();
    assert_eq!(on.recv_timeout(PATIENCE), Ok(false));
}

/// What has come on a lost connection is not placed behind the list of missing pages with which the next set begins.
#[test]
fn nothing_is_placed_that_came_on_a_connection_that_is_closed() {
    let mut bench = Bench::new();
    let (_, on) = bench.fault(50, &[51]);
    bench.hear(50);
    let answer = contents(&[50]);
    bench.send(&answer[..4000]);
    bench.session.fate().stop().cancel();
    bench.engine.wake_vcpus();
    bench.own.close();
    assert_eq!(on.recv_timeout(PATIENCE), Ok(false));
    let mut inbox = bench.own.claim.wait();
    assert!(!inbox.take_next(&bench.engine, Via::Urgent).unwrap());
    drop(inbox);
    // A vCPU that had found the connection before that neither reads nor waits there.
    let (_, on) = bench.late_fault(52);
    bench.source.bells[0].as_ref().unwrap().ring();
    assert_eq!(on.recv_timeout(PATIENCE), Ok(false));
    assert!(bench.source.placed.lock().is_empty());
}
