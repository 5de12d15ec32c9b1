// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What a source has to show when it reconnects, and what it is asked for then. The test plays the source.

#![expect(clippy::unwrap_used, reason = "a failing unwrap fails the test")]

use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

use page_bitmap::PageBitmap;
use parking_lot::Mutex;

use super::*;
use crate::Side;
use crate::destination::engine::Engine;
use crate::destination::fault::{FaultThreads, ParkedThreads};
use crate::destination::late_reconnects::rejoin_for_tests;
use crate::fault::{Fault, FaultSource, FaultSourceKind, FaultWait};
use crate::layout::{Backing, GpaRange, PAGE_BYTES, PageRun};
use crate::progress::Progress;
use crate::testing::FakeMemory;
use crate::transport::Address;
use crate::uffd::UffdError;

/// Longer than anything here takes.
const PATIENCE: Duration = Duration::from_secs(30);

type Token = [u8; TOKEN_BYTES];

fn rejoin() -> Rejoin {
    rejoin_for_tests(&"tcp:127.0.0.1:0".parse().unwrap(), &LateReconnects::default())
}

fn connect(to: &Address) -> Connection {
    Connection::connect(to, &Cancel::new().unwrap(), PATIENCE, PATIENCE).unwrap()
}

/// The message of the source of [`rejoin`].
fn recover(attempt: u32) -> Recover {
    Recover { id: [7; TOKEN_BYTES], attempt, bulk: 1, urgent: 1, alive: false }
}

/// What a source hears that begins with this message.
fn ask(to: &Address, message: Recover) -> JoinHandle<Result<(Channel, Token), Cause>> {
    let to = to.clone();
    std::thread::spawn(move || {
        let mut control = Channel::new(connect(&to));
        let answer = control.ask(&Message::Recover(message), PATIENCE)?;
        Ok((control, answer.payload.try_into().unwrap()))
    })
}

/// Meets who asks, until one is taken or `asking` has been answered.
fn meet<T>(rejoin: &mut Rejoin, asking: &JoinHandle<T>) -> Option<Returned> {
    let never = Cancel::new().unwrap();
    let mut arrivals = rejoin.arrivals();
    let deadline = Instant::now() + PATIENCE;
    while !asking.is_finished() {
        assert!(Instant::now() < deadline, "no source comes");
        let mut fds = Vec::new();
        arrivals.add_fds(&rejoin.listener, &mut fds);
        wait_readable(&fds, &never, Some(LOOK_EVERY)).unwrap();
        if let Some(returned) = rejoin.meet(&mut arrivals, &never) {
            return Some(returned);
        }
    }
    None
}

/// The reason why this is turned away, or nothing if it is taken.
fn turned_away(rejoin: &mut Rejoin, message: Recover) -> Option<String> {
    let asking = ask(&rejoin.listener.address().clone(), message);
    if let Some(returned) = meet(rejoin, &asking) {
        drop(returned);
        // It hears that the connection has ended.
        asking.join().unwrap().unwrap_err();
        return None;
    }
    match asking.join().unwrap() {
        Err(Cause::Refused(why)) => Some(why),
        other => panic!("{other:?}"),
    }
}

#[test]
fn only_an_attempt_that_is_newer_than_all_before_it_is_taken() {
    let mut rejoin = rejoin();
    for (attempt, is_taken, last) in [
        (0, false, 0),
        (1, true, 1),
        (1, false, 1),
        (0, false, 1),
        (5, true, 5),
        (5, false, 5),
        (4, false, 5),
        (6, true, 6),
        (u32::MAX, true, u32::MAX),
        (u32::MAX, false, u32::MAX),
    ] {
        let why = turned_away(&mut rejoin, recover(attempt));
        assert_eq!(why.is_none(), is_taken, "attempt {attempt}: {why:?}");
        assert!(why.is_none_or(|why| why.contains("older than an earlier one")));
        assert_eq!(rejoin.attempt, last, "after attempt {attempt}");
    }
}

#[test]
fn who_is_turned_away_for_another_reason_uses_up_no_attempt() {
    let mut rejoin = rejoin();
    let of = |change: fn(&mut Recover)| {
        let mut message = recover(9);
        change(&mut message);
        message
    };
    for (message, reason) in [
        (of(|message| message.id[15] ^= 1), "another migration"),
        (of(|message| message.bulk = 0), "not valid"),
        (of(|message| message.bulk = CONNECTIONS_MAX + 1), "not valid"),
        (of(|message| message.urgent = URGENT_CONNECTIONS_MAX + 1), "not valid"),
    ] {
        let why = turned_away(&mut rejoin, message);
        assert!(why.as_ref().is_some_and(|why| why.contains(reason)), "{message:?}: {why:?}");
        assert_eq!(rejoin.attempt, 0);
    }
    let most = |message: &mut Recover| (message.bulk, message.urgent) = (CONNECTIONS_MAX, 0);
    assert_eq!(turned_away(&mut rejoin, of(most)), None);
}

/// Joins a set as the source does.
fn join(to: &Address, role: Role, token: Token) -> Result<Channel, Cause> {
    Channel::introduce(connect(to), role, Some(&token), PATIENCE)
}

/// Goes on as the source does that was taken: joins, and reads what is missing.
fn go_on(to: &Address, mut control: Channel, token: Token) -> [Channel; 3] {
    let bulk = join(to, Role::Memory, token).unwrap();
    let urgent = join(to, Role::Fault, token).unwrap();
    let listed = control.read_message().unwrap();
    assert!(matches!(listed, Message::Pending(_)), "{listed:?}");
    control.yes().unwrap();
    [control, bulk, urgent]
}

/// A stranger that saw the address, or another connection, could put pages into the guest's memory.
#[test]
fn every_connection_of_an_attempt_shows_the_token_of_that_attempt() {
    let mut rejoin = rejoin();
    let to = rejoin.listener.address().clone();
    let mut earlier = [0; TOKEN_BYTES];
    for attempt in [1, 2] {
        let asking = ask(&to, recover(attempt));
        let returned = meet(&mut rejoin, &asking).unwrap();
        let here = rejoin.clone();
        let never = Cancel::new().unwrap();
        let accepting =
            std::thread::spawn(move || here.connect(returned, || Ok(vec![1, 2]), &never));
        let (control, token) = asking.join().unwrap().unwrap();
        assert_ne!(token, earlier);
        let near = |at: usize| {
            let mut token = token;
            token[at] ^= 1;
            token
        };
        let last = TOKEN_BYTES - 1;
        for shown in [[0; TOKEN_BYTES], [7; TOKEN_BYTES], earlier, near(0), near(last)] {
            for role in [Role::Memory, Role::Fault] {
                let joined = join(&to, role, shown);
                let Err(Cause::Refused(why)) = joined else { panic!("{role:?}: {joined:?}") };
                assert_eq!(why, ProtocolError::Token.to_string());
            }
        }
        let _set = go_on(&to, control, token);
        let Connections { bulk, urgent, .. } = accepting.join().unwrap().unwrap();
        assert_eq!((bulk.len(), urgent.len()), (1, 1));
        earlier = token;
    }
}

/// A guest whose accesses the test makes.
struct Accesses {
    /// Pages of the next read.
    pages: Mutex<Receiver<u64>>,
    /// How often faults were asked for: those before have been handled.
    reads: AtomicU32,
}

impl FaultSource for Accesses {
    fn kind(&self) -> FaultSourceKind {
        FaultSourceKind::Uffd
    }

    fn readers(&self) -> usize {
        1
    }

    fn next_faults(&self, _: usize, faults: &mut Vec<Fault>) -> Result<FaultWait, UffdError> {
        self.reads.fetch_add(1, Ordering::SeqCst);
        // The test's end of it is dropped when the readers are to end.
        let Ok(page) = self.pages.lock().recv() else { return Ok(FaultWait::Stopped) };
        faults.push(Fault { region: 0, page, thread: None });
        Ok(FaultWait::Faults)
    }

    fn stop_readers(&self) {}

    fn receives_in_place(&self, _: usize) -> bool {
        false
    }

    fn make_present(&self, _: PageRun) -> Result<(), UffdError> {
        Ok(())
    }

    fn copy_in(&self, _: PageRun, _: &[u8]) -> Result<(), UffdError> {
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

fn page(number: u64) -> GpaRange {
    GpaRange { gpa: number * PAGE_BYTES, len_bytes: PAGE_BYTES }
}

fn wait_for(what: &str, condition: impl Fn() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !condition() {
        assert!(Instant::now() < deadline, "{what} does not come");
        std::thread::yield_now();
    }
}

/// The pages that are requested on a connection next.
fn requested(channel: &mut Channel) -> Vec<GpaRange> {
    channel.connection.wait_for_data(Some(PATIENCE)).expect("pages are requested");
    match channel.read_message().unwrap() {
        Message::PageFault(ranges) => ranges,
        other => panic!("{other:?}"),
    }
}

/// Threads of a guest with 16 missing pages of which it accesses some, and the source's end of its connection.
fn faulting() -> (FaultThreads<FakeMemory>, Arc<Accesses>, Sender<u64>, Channel) {
    let memory = FakeMemory::new(&[(0, 16)], Backing::Shared, PAGE_BYTES).unwrap();
    let missing = PageBitmap::new(16);
    missing.set_range(0..16);
    let (access, pages) = channel();
    let source = Arc::new(Accesses { pages: Mutex::new(pages), reads: AtomicU32::new(0) });
    let progress = Arc::new(Progress::new(Side::Destination));
    let faults: Arc<dyn FaultSource> = source.clone();
    let engine = Engine::with_missing(&memory, faults, vec![missing], progress).unwrap();
    engine.commit().unwrap();
    let never = Cancel::new().unwrap();
    let (ours, theirs) = UnixStream::pair().unwrap();
    let [ours, theirs] =
        [ours, theirs].map(|end| Channel::new(Connection::over(end, &never, PATIENCE).unwrap()));
    let threads = FaultThreads::start(
        Arc::new(engine),
        rejoin(),
        vec![ours],
        Vec::new(),
        ParkedThreads::new().unwrap(),
    )
    .unwrap();
    (threads, source, access, theirs)
}

/// Those that were asked for on the lost connections, and those accessed without any.
#[test]
fn what_the_guest_waits_for_is_asked_for_again_on_new_connections() {
    let (mut threads, source, access, mut lost) = faulting();
    access.send(2).unwrap();
    assert_eq!(requested(&mut lost), [page(2)]);
    drop(lost);
    threads.disconnect();
    access.send(5).unwrap();
    wait_for("the access", || source.reads.load(Ordering::SeqCst) == 3);
    let to = threads.rejoin.listener.address().clone();
    let again = |threads: &mut FaultThreads<FakeMemory>, attempt| {
        let (asking, to) = (ask(&to, recover(attempt)), to.clone());
        let returned = meet(&mut threads.rejoin, &asking).unwrap();
        let source = std::thread::spawn(move || {
            let (control, token) = asking.join().unwrap().unwrap();
            go_on(&to, control, token)
        });
        threads.take_over(returned, &Cancel::new().unwrap()).unwrap();
        source.join().unwrap()
    };
    let [control, bulk, mut urgent] = again(&mut threads, 1);
    assert_eq!(requested(&mut urgent), [2, 5].map(page));
    access.send(9).unwrap();
    assert_eq!(requested(&mut urgent), [page(9)]);
    // What has come is not asked for again.
    bulk.connection.send(&Message::ZeroPages(vec![page(2)]).encode()).unwrap();
    wait_for("page 2", || threads.engine.missing_pages() == 15);
    drop((control, bulk, urgent));
    threads.disconnect();
    let [_control, _bulk, mut urgent] = again(&mut threads, 2);
    assert_eq!(requested(&mut urgent), [5, 9].map(page));
    // The reader ends.
    drop(access);
}
