// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Postcopy that loses its connections: a proxy between both sides cuts or stalls them, and the
//! guest's memory is complete in the end without an operator.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::{
    Builder, FakeVm, Guest, LIMITS, Target, assert_whole, have_uffd, loopback, memory, migrate,
    options,
};
use crate::channel::Channel;
use crate::destination::Faulting;
use crate::progress::{Phase, ProgressDocument};
use crate::protocol::message::{Message, Recover};
use crate::steering::{self, Steering};
use crate::testing::{FakeMemory, Inject, Pace};
use crate::transport::Connection;
use crate::{Address, Cancel, Cause, Limits, MemoryMode, Progress, SendOptions, Side};

/// Limits with which a stall is detected soon.
const SHORT: Limits = Limits { stall: Duration::from_millis(700), ..LIMITS };

/// A rate low enough that all cuts of a test find pages in flight: 12 MiB take three seconds.
pub(super) const SLOW: u64 = 4 << 20;

/// Forwards connections, and can cut or stall them.
pub(super) struct Proxy {
    address: Address,
    links: Arc<Mutex<Vec<Link>>>,
    accepted: Arc<AtomicU64>,
    /// Connections are not forwarded.
    closed: Arc<AtomicBool>,
    /// One-way delay in milliseconds.
    delay_ms: Arc<AtomicU64>,
}

struct Link {
    ends: [TcpStream; 2],
    stalled: Arc<AtomicBool>,
}

impl Link {
    fn cut(&self) {
        for end in &self.ends {
            let _ = end.shutdown(Shutdown::Both);
        }
    }
}

impl Proxy {
    fn start(to: &Address) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("tcp:{}", listener.local_addr().unwrap()).parse().unwrap();
        let Address::Tcp { host, port } = to.clone() else { panic!() };
        let links = Arc::new(Mutex::new(Vec::new()));
        let (accepted, closed) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
        let delay_ms = Arc::new(AtomicU64::new(0));
        let delay = Arc::clone(&delay_ms);
        let (all, count, shut) = (Arc::clone(&links), Arc::clone(&accepted), Arc::clone(&closed));
        std::thread::spawn(move || {
            while let Ok((source, _)) = listener.accept() {
                if shut.load(Ordering::SeqCst) {
                    continue;
                }
                let Ok(destination) = TcpStream::connect((host.as_str(), port)) else { continue };
                let stalled = Arc::new(AtomicBool::new(false));
                pass(&source, &destination, &stalled, &delay);
                pass(&destination, &source, &stalled, &delay);
                all.lock().push(Link { ends: [source, destination], stalled });
                count.fetch_add(1, Ordering::SeqCst);
            }
        });
        Self { address, links, accepted, closed, delay_ms }
    }

    pub(super) fn cut_all(&self) {
        for link in self.links.lock().drain(..) {
            link.cut();
        }
    }

    /// Cuts one connection of the last set, by number.
    pub(super) fn cut_one(&self, number: usize, of: usize) {
        let links = self.links.lock();
        let last = links.len().saturating_sub(of);
        if let Some(link) = links.get(last + number % of) {
            link.cut();
        }
    }

    fn stall_one(&self, number: usize, of: usize) {
        let links = self.links.lock();
        let last = links.len().saturating_sub(of);
        links[last + number % of].stalled.store(true, Ordering::SeqCst);
    }
}

fn pass(from: &TcpStream, to: &TcpStream, stalled: &Arc<AtomicBool>, delay: &Arc<AtomicU64>) {
    for stream in [from, to] {
        stream.set_nodelay(true).unwrap();
    }
    let (mut from, mut to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
    let (stalled, delay) = (Arc::clone(stalled), Arc::clone(delay));
    std::thread::spawn(move || {
        let mut buffer = vec![0; 64 << 10];
        while let Ok(len @ 1..) = from.read(&mut buffer) {
            if stalled.load(Ordering::SeqCst) {
                // Silent, and open until the other side closes.
                while matches!(from.read(&mut buffer), Ok(1..)) {}
                break;
            }
            // This is the delay of the link, not a wait for a condition.
            std::thread::sleep(Duration::from_millis(delay.load(Ordering::SeqCst)));
            if to.write_all(&buffer[..len]).is_err() {
                break;
            }
        }
        let _ = (from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both));
    });
}

/// Both sides of a postcopy through a proxy.
pub(super) struct Run {
    to: Arc<FakeMemory>,
    guest: Arc<Guest>,
    pub proxy: Proxy,
    pub source: Arc<Progress>,
    pub destination: Arc<Progress>,
    send_steering: Steering,
    receive_steering: Steering,
    sender: JoinHandle<Result<(), String>>,
    receiver: JoinHandle<(FakeVm, Result<ProgressDocument, String>)>,
}

pub(super) fn wait_until(what: &str, condition: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_mins(1);
    while !condition() {
        assert!(Instant::now() < deadline, "{what} did not happen");
        std::thread::sleep(Duration::from_millis(1));
    }
}

impl Run {
    fn start(limits: Limits, adjust: impl FnOnce(&mut SendOptions)) -> Self {
        Self::between(&memory(), memory(), 2, limits, adjust)
    }

    fn between(
        from: &Arc<FakeMemory>,
        to: Arc<FakeMemory>,
        vcpus: u64,
        limits: Limits,
        adjust: impl FnOnce(&mut SendOptions),
    ) -> Self {
        Self::of(from, to, vcpus, limits, adjust, |vm| vm)
    }

    /// The same with a machine that `equip` modifies.
    pub(super) fn of(
        from: &Arc<FakeMemory>,
        to: Arc<FakeMemory>,
        vcpus: u64,
        limits: Limits,
        adjust: impl FnOnce(&mut SendOptions),
        equip: impl FnOnce(FakeVm) -> FakeVm,
    ) -> Self {
        Self::with(from, to, (vcpus, false), limits, adjust, equip)
    }

    /// With so many vCPUs that resolve their own faults.
    pub(super) fn own(vcpus: u64, adjust: impl FnOnce(&mut SendOptions)) -> Self {
        Self::with(&memory(), memory(), (vcpus, true), LIMITS, adjust, |vm| vm)
    }

    fn with(
        from: &Arc<FakeMemory>,
        to: Arc<FakeMemory>,
        (vcpus, own_faults): (u64, bool),
        limits: Limits,
        adjust: impl FnOnce(&mut SendOptions),
        equip: impl FnOnce(FakeVm) -> FakeVm,
    ) -> Self {
        let guest = Guest::new(from, 77);
        guest.fill(from, 60);
        // Slow enough not to request all pages before the test acts.
        let pace = Pace::Paced(4, Duration::from_millis(3));
        let builder = Builder::new(&to, &guest).load(vcpus, 90, pace);
        let builder = if own_faults { builder.own_faults() } else { builder };
        let receive_steering = Steering::new();
        let target = Target::steered(&loopback(), builder, limits, receive_steering.clone());
        let proxy = Proxy::start(&target.address);
        let mut options = options(&proxy.address);
        options.memory_mode = MemoryMode::Postcopy;
        options.limits = limits;
        options.bandwidth_bytes_per_s = SLOW;
        adjust(&mut options);
        let send_steering = options.steering.clone();
        let source = Arc::new(Progress::new(Side::Source));
        let destination = Arc::clone(&target.progress);
        let receiver = std::thread::spawn(move || {
            let received =
                target.join().map_err(|failure| error_text::chain(&failure.error)).unwrap();
            let done = received.faults.map(Faulting::wait).unwrap();
            let done = done.map_err(|paused| {
                let text = error_text::chain(&paused.error);
                // Its waiters never get their pages.
                std::mem::forget(paused);
                text
            });
            (received.vm, done)
        });
        let sender = {
            let vm = equip(FakeVm::new(from, &guest)).running();
            let progress = Arc::clone(&source);
            std::thread::spawn(move || {
                let sent = migrate(vm, &options, &progress, &Cancel::new().unwrap());
                sent.map(drop).map_err(|failure| error_text::chain(failure.error()))
            })
        };
        wait_until("the handover", || destination.phase() == Phase::Fault);
        Self {
            to,
            guest,
            proxy,
            source,
            destination,
            send_steering,
            receive_steering,
            sender,
            receiver,
        }
    }

    /// True when the source has nothing more to do.
    pub(super) fn source_is_over(&self) -> bool {
        self.sender.is_finished()
    }

    pub(super) fn is_over(&self) -> bool {
        self.destination.phase() == Phase::Done
    }

    pub(super) fn losses(&self) -> u32 {
        self.destination.snapshot().recovery.losses
    }

    /// Once the source has lost its connections, and does not reconnect by itself: makes it do so with `connections` of
    /// each kind.
    pub(super) fn recover_over(&self, connections: u16) {
        wait_until("the pause", || self.source.phase() == Phase::PostcopyPaused);
        self.send_steering.recover_over(steering::Recover::There, Some(connections));
        wait_until("the recovery", || self.source.snapshot().recovery.recoveries == 1);
    }

    /// Waits until everything has arrived, and asserts that nothing is wrong.
    pub(super) fn finish(self) -> (ProgressDocument, ProgressDocument) {
        let sent = self.sender.join().unwrap();
        let (mut vm, done) = self.receiver.join().unwrap();
        sent.unwrap();
        let destination = done.unwrap();
        vm.stop();
        assert_whole(&self.guest, &self.to);
        assert_eq!(destination.remaining_bytes, Some(0));
        (self.source.snapshot(), destination)
    }
}

/// Number of connections with the options of these tests: the first, one background, two for
/// requests.
const SET: usize = 4;

#[test]
pub(super) fn a_cut_of_any_connection_heals_without_help() {
    if !have_uffd() {
        return;
    }
    for number in 0..SET {
        let run = Run::start(LIMITS, |_| {});
        run.proxy.cut_one(number, SET);
        wait_until("the recovery", || run.destination.snapshot().recovery.recoveries == 1);
        let (source, destination) = run.finish();
        assert_eq!((source.recovery.losses, destination.recovery.losses), (1, 1));
        assert!(destination.recovery.reason.is_some());
    }
}

#[test]
fn large_host_pages_that_came_in_part_come_again_after_a_cut() {
    let Some((from, to, _pool)) = super::pieces::onto_large_pages() else { return };
    // No page is requested: all pages would be here before the first cut.
    let slow = |options: &mut SendOptions| options.bandwidth_bytes_per_s = SLOW / 2;
    let run = Run::between(&from, to, 0, LIMITS, slow);
    for cut in 0..4 {
        wait_until("a piece more", || {
            let now = run.destination.snapshot();
            now.phase == Phase::Fault && now.memory_bytes_received > Some(cut * (256 << 10))
        });
        run.proxy.cut_all();
        wait_until("the loss", || u64::from(run.losses()) > cut);
    }
    let (_, destination) = run.finish();
    assert!(destination.recovery.recoveries >= 4, "{destination:?}");
}

#[test]
fn a_hundred_cuts_heal() {
    if !have_uffd() {
        return;
    }
    let (mut cuts, mut losses) = (0, 0);
    let mut number = 1u64;
    while cuts < 100 {
        let run = Run::start(LIMITS, |options| options.bandwidth_bytes_per_s = SLOW / 4);
        while cuts < 100 && !run.is_over() {
            let before = run.losses();
            number = number.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            match number >> 40 & 7 {
                0..4 => run.proxy.cut_all(),
                one => run.proxy.cut_one(usize::try_from(one).unwrap(), SET),
            }
            cuts += 1;
            // The next cut comes at any moment after the loss, during the recovery or after it. The
            // connection may have been lost already, so there need not be a new loss.
            let soon = Instant::now() + Duration::from_millis(300);
            wait_until("the loss", || run.losses() > before || Instant::now() > soon);
            std::thread::sleep(Duration::from_millis(number >> 50 & 127));
        }
        losses += run.losses();
        run.finish();
    }
    assert!(losses > 50, "{losses} losses of 100 cuts");
}

#[test]
pub(super) fn a_stall_of_any_connection_is_found_and_heals() {
    if !have_uffd() {
        return;
    }
    for number in 0..SET {
        let run = Run::start(SHORT, |options| options.bandwidth_bytes_per_s = SLOW / 4);
        run.proxy.stall_one(number, SET);
        wait_until("the recovery", || run.destination.snapshot().recovery.recoveries > 0);
        run.finish();
    }
}

#[test]
pub(super) fn requests_that_share_the_bulk_connection_heal_too() {
    if !have_uffd() {
        return;
    }
    let run = Run::start(LIMITS, |options| options.urgent_connections = Some(0));
    run.proxy.cut_all();
    let (_, destination) = run.finish();
    assert_eq!(destination.recovery.recoveries, 1);
}

/// One after another they would take 2 round trips each: longer than the destination waits.
#[test]
pub(super) fn many_connections_over_a_long_link_are_made_at_once() {
    if !have_uffd() {
        return;
    }
    let limits = Limits { stall: Duration::from_secs(3), ..LIMITS };
    let run = Run::start(limits, |options| {
        options.connections = 60;
        options.bandwidth_bytes_per_s = SLOW / 16;
    });
    run.proxy.delay_ms.store(40, Ordering::SeqCst);
    run.proxy.cut_all();
    wait_until("the recovery", || run.destination.snapshot().recovery.recoveries > 0);
    run.proxy.delay_ms.store(0, Ordering::SeqCst);
    run.finish();
}

#[test]
fn the_operator_may_ask_for_fewer_connections() {
    if !have_uffd() {
        return;
    }
    let run = Run::start(LIMITS, |options| {
        options.connections = 5;
        options.recover_timeout = Duration::ZERO;
        options.bandwidth_bytes_per_s = SLOW / 2;
    });
    run.proxy.cut_all();
    wait_until("the pause", || run.source.phase() == Phase::PostcopyPaused);
    let before = run.proxy.accepted.load(Ordering::SeqCst);
    run.recover_over(1);
    let made = run.proxy.accepted.load(Ordering::SeqCst) - before;
    assert_eq!(made, 3, "the first, one for the background, one for requests");
    run.finish();
}

#[test]
fn a_process_that_is_short_of_descriptors_tries_again() {
    if !have_uffd() {
        return;
    }
    let slow = |options: &mut SendOptions| options.bandwidth_bytes_per_s = SLOW / 2;
    let short = |vm: FakeVm| vm.inject(Inject::Descriptors);
    let run = Run::of(&memory(), memory(), 2, LIMITS, slow, short);
    run.proxy.cut_all();
    wait_until("the recovery", || run.source.snapshot().recovery.recoveries == 1);
    let (source, _) = run.finish();
    assert_eq!((source.recovery.losses, source.recovery.recoveries), (1, 1));
}

/// A client that connects and sends a byte now and then, before the source reconnects.
#[test]
fn a_stranger_that_says_nothing_holds_up_no_recovery() {
    if !have_uffd() {
        return;
    }
    let limits = Limits { stall: Duration::from_mins(1), ..LIMITS };
    let run = Run::start(limits, |options| options.bandwidth_bytes_per_s = SLOW / 2);
    let cancel = Cancel::new().unwrap();
    let limit = Duration::from_secs(5);
    let strangers: Vec<Connection> = (0..20)
        .map(|_| {
            let stranger = Connection::connect(&run.proxy.address, &cancel, limit, limit).unwrap();
            stranger.send(&[0x10]).unwrap();
            stranger
        })
        .collect();
    run.proxy.cut_all();
    let again: Vec<Connection> = (0..20)
        .map(|_| Connection::connect(&run.proxy.address, &cancel, limit, limit).unwrap())
        .collect();
    // Far sooner than the time that one of them has for its first message.
    wait_until("the recovery", || run.destination.snapshot().recovery.recoveries == 1);
    drop((strangers, again));
    run.finish();
}

#[test]
fn after_the_timeout_it_recovers_on_command_and_at_another_address() {
    if !have_uffd() {
        return;
    }
    let run = Run::start(LIMITS, |options| options.recover_timeout = Duration::ZERO);
    run.proxy.closed.store(true, Ordering::SeqCst);
    run.proxy.cut_all();
    wait_until("the pause", || run.source.phase() == Phase::PostcopyPaused);
    wait_until("the pause", || run.destination.phase() == Phase::PostcopyPaused);
    // No side retries by itself, and a failed attempt changes nothing.
    let accepted = run.proxy.accepted.load(Ordering::SeqCst);
    run.send_steering.recover(steering::Recover::There);
    wait_until("a failure", || {
        run.source.snapshot().recovery.reason.is_some_and(|why| why.contains("asking to continue"))
    });
    assert_eq!(run.proxy.accepted.load(Ordering::SeqCst), accepted);
    let dir = tempfile::tempdir().unwrap();
    let other: Address = format!("unix:{}", dir.path().join("again").display()).parse().unwrap();
    run.receive_steering.recover(steering::Recover::At(other.clone()));
    wait_until("the socket", || dir.path().join("again").exists());
    run.send_steering.recover(steering::Recover::At(other));
    run.finish();
}

#[test]
fn strangers_are_turned_away_while_pages_arrive() {
    if !have_uffd() {
        return;
    }
    let run = Run::start(LIMITS, |options| options.bandwidth_bytes_per_s = SLOW / 2);
    let ask = |message: Message| {
        let cancel = Cancel::new().unwrap();
        let limit = Duration::from_secs(5);
        let connection = Connection::connect(&run.proxy.address, &cancel, limit, limit).unwrap();
        match Channel::new(connection).ask(&message, limit).unwrap_err() {
            Cause::Refused(reason) => reason,
            other => panic!("{other:?}"),
        }
    };
    let recover =
        |id, attempt| Message::Recover(Recover { id, attempt, bulk: 1, urgent: 1, alive: false });
    assert!(ask(recover([3; 16], 9)).contains("another migration"));
    assert!(ask(Message::Start { version: 0, offer: true }).contains("a VM is here already"));
    assert_eq!(run.losses(), 0, "strangers must not disturb");
    run.finish();
}

#[test]
fn a_recovery_that_goes_to_a_third_host_is_refused_there() {
    let to = memory();
    let guest = Guest::new(&to, 1);
    let target = Target::start(&loopback(), Builder::new(&to, &guest), LIMITS);
    let (cancel, limit) = (Cancel::new().unwrap(), Duration::from_secs(5));
    let connection = Connection::connect(&target.address, &cancel, limit, limit).unwrap();
    let recover =
        Message::Recover(Recover { id: [1; 16], attempt: 1, bulk: 1, urgent: 1, alive: false });
    let refused = Channel::new(connection).ask(&recover, limit).unwrap_err();
    assert!(matches!(&refused, Cause::Refused(why) if why.contains("recover where the VM runs")));
    // It keeps waiting for its own source.
    assert_eq!(target.progress.phase(), Phase::Listen);
    target.cancel.cancel();
    target.join().unwrap_err();
}

#[test]
fn an_operator_that_abandons_gets_what_is_left() {
    if !have_uffd() {
        return;
    }
    let run = Run::start(LIMITS, |_| {});
    run.proxy.closed.store(true, Ordering::SeqCst);
    run.proxy.cut_all();
    wait_until("the pause", || run.source.phase() == Phase::PostcopyPaused);
    run.send_steering.abandon();
    let error = run.sender.join().unwrap().unwrap_err();
    assert!(error.contains("postcopy is paused"), "{error}");
    // The guest at the destination waits for pages that never come: its threads are left behind.
    std::mem::forget(run.receiver);
}
