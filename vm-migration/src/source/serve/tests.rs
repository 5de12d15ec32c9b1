// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Destinations that are slow with what they say, or never come to the end of it.

#![expect(clippy::unwrap_used, reason = "a failing unwrap fails the test")]

use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{Sender, channel};
use std::time::{Duration, Instant};

use super::*;
use crate::cancel::Cancel;
use crate::layout::Backing;
use crate::layout::GpaRange;
use crate::options::Limits;
use crate::protocol::codec::{FIGURES_BYTES_MAX, Header, PENDING_BYTES_MAX, TABLE_BYTES_MAX};
use crate::protocol::message::Command;
use crate::source::negotiate::Links;
use crate::testing::FakeMemory;
use crate::transport::ByteSource as _;
use crate::transport::{Connection, Listener};
use crate::{Progress, Side};

/// The longest that a peer continues: far longer than the limit under test.
const LONG: Duration = Duration::from_secs(20);

/// The stall timeout.
const STALL: Duration = Duration::from_millis(500);

fn options(to: &crate::Address) -> SendOptions {
    let limits = Limits { connect: LONG, answer: STALL, stall: STALL, ..Limits::default() };
    SendOptions { limits, ..SendOptions::new(to.clone()) }
}

/// A server with one page.
fn server(options: &SendOptions) -> Arc<Server<FakeMemory>> {
    let memory = FakeMemory::new(&[(0, 1)], Backing::Shared, PAGE_BYTES).unwrap();
    let progress = Arc::new(Progress::new(Side::Source));
    let missing = vec![PageBitmap::new(1)];
    Arc::new(Server::new(memory, missing, vec![Grain::new(1, 1)], options, progress))
}

/// Sends `first`, and then `more` again and again, for a long time or until it is not accepted.
fn go_on(connection: &Connection, first: &[u8], more: &[u8]) {
    let began = Instant::now();
    let mut sent = connection.send(first);
    while sent.is_ok() && began.elapsed() < LONG {
        std::thread::sleep(Duration::from_millis(5));
        sent = connection.send(more);
    }
}

/// A destination to which a source reconnects. It sends `first`, and then `more` again and again.
fn serve_reconnect(listener: &Listener, first: &[u8], more: &[u8], begun: &Sender<()>) {
    let never = Cancel::new().unwrap();
    let mut control = Channel::new(listener.accept(&never, Some(LONG), LONG).unwrap());
    let recover = control.timed(Message::read).unwrap();
    assert!(matches!(recover, Message::Recover(_)), "{recover:?}");
    let answer = Answer::Ok { offer_taken: true, payload: vec![7; 16] };
    control.connection.send(&answer.encode()).unwrap();
    let extra = listener.accept(&never, Some(LONG), LONG).unwrap();
    extra.send(&Answer::ok().encode()).unwrap();
    begun.send(()).unwrap();
    go_on(&control.connection, first, more);
}

/// Reconnects to such a destination; the operator abandons the migration if `is_abandoned`. Returns how
/// and after which time it ends.
fn come_back(first: &[u8], more: &[u8], is_abandoned: bool) -> (Failure, Duration) {
    let listener = Listener::bind(&"tcp:127.0.0.1:0".parse().unwrap()).unwrap();
    let options = options(listener.address());
    let server = server(&options);
    let mut reconnect = Reconnect::new(&options, [1; 16], 1, 0);
    let (begun, begins) = channel();
    std::thread::scope(|scope| {
        scope.spawn(|| serve_reconnect(&listener, first, more, &begun));
        let steering = options.steering.clone();
        scope.spawn(move || {
            begins.recv().unwrap();
            if is_abandoned {
                steering.abandon();
            }
        });
        let began = Instant::now();
        let Err(failure) = reconnect.connect(&server) else { panic!("it is connected") };
        (failure, began.elapsed())
    })
}

#[test]
fn an_operator_can_abandon_whatever_the_destination_says() {
    let alive = Message::Alive.encode();
    let pending = Header::new(Command::Pending.code(), PENDING_BYTES_MAX).encode();
    // Endlessly, and with contents that take a good part of an hour at the lowest allowed rate.
    for (first, more) in [(&[][..], &alive[..]), (&pending, &[0; 4096])] {
        let (failure, took) = come_back(first, more, true);
        assert!(took < LONG / 2, "it took {took:?}");
        let cause = &failure.cause;
        let cancelled = matches!(
            cause,
            Cause::Cancelled
                | Cause::Transport(TransportError::Cancelled)
                | Cause::Protocol(ProtocolError::Transport(TransportError::Cancelled))
        );
        assert!(cancelled, "{cause:?}");
    }
}

fn assert_too_slow(cause: &Cause) {
    let slow = matches!(
        cause,
        Cause::Transport(TransportError::TooSlow { .. })
            | Cause::Protocol(ProtocolError::Transport(TransportError::TooSlow { .. }))
    );
    assert!(slow, "{cause:?}");
}

#[test]
fn what_is_missing_has_a_total_time() {
    let pending = Header::new(Command::Pending.code(), PENDING_BYTES_MAX).encode();
    let (failure, took) = come_back(&pending, &[0], false);
    assert!(took < LONG / 2, "it took {took:?}");
    assert_too_slow(&failure.cause);
}

/// Both ends of a connection.
fn pair() -> (Channel, Connection) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let over = |stream| Connection::over(stream, &Cancel::new().unwrap(), STALL).unwrap();
    (Channel::new(over(ours)), over(theirs))
}

#[test]
fn the_last_message_has_a_total_time() {
    let options = options(&"unix:nowhere".parse().unwrap());
    let server = server(&options);
    let (control, theirs) = pair();
    let (session, never) = (Session::new().unwrap(), Cancel::new().unwrap());
    let context = Context { options: &options, progress: &server.progress, cancel: &never };
    let done = Header::new(Command::PostcopyDone.code(), FIGURES_BYTES_MAX).encode();
    std::thread::scope(|scope| {
        scope.spawn(move || go_on(&theirs, &done, b" "));
        let Err(failure) = server.watch(control, &session, context) else { panic!("it is done") };
        assert_too_slow(&failure.cause);
    });
}

#[test]
fn bytes_that_make_no_message_are_no_sign_of_life() {
    use std::io::Write as _;
    let (client, tls) = crate::transport::tls::tests::certificates();
    let listener = Listener::bind(&"tcp:127.0.0.1:0".parse().unwrap()).unwrap();
    let listener = listener.with_tls(Some(tls));
    let (to, never) = (listener.address().clone(), Cancel::new().unwrap());
    let options = options(&to);
    let server = server(&options);
    let session = Session::new().unwrap();
    let context = Context { options: &options, progress: &server.progress, cancel: &never };
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let theirs = listener.accept(&never, Some(LONG), LONG).unwrap();
            // SAFETY: the descriptor is open as long as the connection is there.
            let socket = unsafe { BorrowedFd::borrow_raw(theirs.as_raw_fd()) };
            let mut raw = std::net::TcpStream::from(socket.try_clone_to_owned().unwrap());
            // A record that is never complete in any time that matters.
            let began = Instant::now();
            let mut sent = raw.write_all(&[23, 3, 3, 0x40, 0]);
            while sent.is_ok() && began.elapsed() < LONG {
                std::thread::sleep(Duration::from_millis(2));
                sent = raw.write_all(&[0]);
            }
        });
        let source = Connection::connect_secured(&to, Some(&client), &never, LONG, LONG).unwrap();
        let began = Instant::now();
        let ended = server.watch(Channel::new(source), &session, context);
        let Err(failure) = ended else { panic!("it is done") };
        let is_silent = matches!(failure.cause, Cause::Transport(TransportError::Timeout { .. }));
        assert!(is_silent, "{:?}", failure.cause);
        assert!(began.elapsed() < LONG / 2, "it took {:?}", began.elapsed());
    });
}

#[test]
fn what_waits_for_its_turn_in_the_background_can_be_asked_for() {
    let options = SendOptions {
        bandwidth_bytes_per_s: 1,
        limits: Limits { stall: Duration::from_secs(1 << 20), ..Limits::default() },
        ..SendOptions::new("unix:nowhere".parse().unwrap())
    };
    let memory = FakeMemory::new(&[(0, 2)], Backing::Shared, PAGE_BYTES).unwrap();
    for page in 0..2 {
        memory.word(0, page, 0).store(page + 1, Ordering::Relaxed);
    }
    let missing = PageBitmap::new(2);
    missing.set_range(0..2);
    let progress = Arc::new(Progress::new(Side::Source));
    let grains = vec![Grain::new(1, 1)];
    let server = Arc::new(Server::new(memory, vec![missing], grains, &options, progress));
    let (ours, theirs) = UnixStream::pair().unwrap();
    let over = |stream| Connection::over(stream, &Cancel::new().unwrap(), LONG).unwrap();
    let (ours, mut theirs) = (Channel::new(over(ours)), Channel::new(over(theirs)));
    let mut session = Session::new().unwrap();
    serve_bulk(&server, &mut session, vec![ours]).unwrap();
    let mut take = |gpa| {
        theirs.connection.wait_for_data(Some(LONG)).unwrap();
        let range = GpaRange { gpa, len_bytes: PAGE_BYTES };
        assert_eq!(Message::read(&mut theirs.reader).unwrap(), Message::Memory(vec![range]));
        let mut page = [0; 4096];
        theirs.reader.read_exact(&mut page).unwrap();
        let next = GpaRange { gpa: gpa + PAGE_BYTES, len_bytes: PAGE_BYTES };
        theirs.connection.send(&Message::PageFault(vec![next]).encode()).unwrap();
    };
    take(0);
    take(PAGE_BYTES);
    session.end();
}

#[test]
fn a_limit_leaves_enough_to_keep_a_connection_alive() {
    let pace = |bandwidth_bytes_per_s, piece_bytes| {
        let limits = Limits { stall: Duration::from_secs(10), ..Limits::default() };
        let to = "unix:nowhere".parse().unwrap();
        let options = SendOptions { bandwidth_bytes_per_s, limits, ..SendOptions::new(to) };
        background_pace(&options, piece_bytes)
    };
    assert_eq!((pace(0, 4096), pace(64 << 10, 4096)), (0, 64 << 10));
    assert_eq!(pace(64 << 10, 2 << 20), 4 * (2 << 20) / 10);
    assert_eq!(pace(100, 4096), 4 * 4096 / 10);
}

#[test]
fn a_request_has_a_total_time() {
    let options = options(&"unix:nowhere".parse().unwrap());
    let server = server(&options);
    let (channel, theirs) = pair();
    let mut session = Session::new().unwrap();
    let fault = Header::new(Command::PageFault.code(), TABLE_BYTES_MAX).encode();
    std::thread::scope(|scope| {
        scope.spawn(move || go_on(&theirs, &fault, &[0]));
        serve_urgent(&server, &mut session, vec![channel]).unwrap();
        let never = Cancel::new().unwrap();
        wait_readable(&[session.fate().stop().fd()], &never, Some(LONG)).unwrap();
        assert_too_slow(&session.fate().take_failure().unwrap().cause);
    });
}

/// A connection on which a thread waits for requests while the guest runs, and the destination's end.
pub(crate) fn awaited() -> (Links, Gate<FakeMemory>, Connection) {
    let never = Cancel::new().unwrap();
    let (ours, theirs) = UnixStream::pair().unwrap();
    let [ours, theirs] = [ours, theirs].map(|end| Connection::over(end, &never, LONG).unwrap());
    let mut links = Links {
        memory: Vec::new(),
        urgent: vec![Channel::new(ours)],
        urgent_count: 1,
        terms: crate::source::negotiate::Terms::Plain { other: None },
        token: None,
        records: Vec::new(),
        round_trip: Duration::ZERO,
        page_server: None,
        blobs: Vec::new(),
        serving: Some(Session::new().unwrap()),
    };
    let gate = await_requests(&mut links).unwrap();
    assert!(links.urgent.is_empty() && links.lost_for_requests().is_none());
    (links, gate, theirs)
}

/// Why the requests of `links` cannot be served, once that is known.
pub(crate) fn loss(links: &Links) -> Cause {
    let never = Cancel::new().unwrap();
    let lost = [links.serving.as_ref().unwrap().fate().stop().fd()];
    assert_eq!(wait_readable(&lost, &never, Some(LONG)).unwrap(), WaitEnd::Ready(0));
    links.lost_for_requests().unwrap().cause
}

#[test]
fn a_request_is_answered_by_a_thread_that_has_waited_for_it_since_before_the_stop() {
    let (links, gate, theirs) = awaited();
    let server = server(&options(&"tcp:127.0.0.1:0".parse().unwrap()));
    server.pending[0].set(0);
    gate.open(&server);
    let page = GpaRange { gpa: 0, len_bytes: PAGE_BYTES };
    theirs.send(&Message::PageFault(vec![page]).encode()).unwrap();
    let mut theirs = Channel::new(theirs);
    let answer = theirs.timed(Message::read).unwrap();
    assert!(matches!(answer, Message::Memory(_) | Message::ZeroPages(_)), "{answer:?}");
    assert!(links.lost_for_requests().is_none());
}

#[test]
fn a_connection_for_requests_that_is_lost_while_the_guest_runs_is_noticed_then() {
    let (links, _gate, theirs) = awaited();
    drop(theirs);
    assert!(matches!(loss(&links), Cause::Transport(TransportError::Closed)));
    let (links, _gate, theirs) = awaited();
    theirs.send(&Message::PageFault(Vec::new()).encode()).unwrap();
    let cause = loss(&links);
    let early = "nothing before the handover";
    assert!(
        matches!(cause, Cause::Protocol(ProtocolError::Unexpected { expected, .. }) if expected == early)
    );
}
