// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Destinations that are slow with what they say, or never come to the end of it.

#![expect(clippy::unwrap_used, reason = "a failing unwrap fails the test")]

use std::os::unix::net::UnixStream;
use std::sync::mpsc::{Sender, channel};
use std::time::{Duration, Instant};

use super::*;
use crate::cancel::Cancel;
use crate::layout::Backing;
use crate::options::Limits;
use crate::protocol::codec::{FIGURES_BYTES_MAX, Header, PENDING_BYTES_MAX, TABLE_BYTES_MAX};
use crate::protocol::message::Command;
use crate::testing::FakeMemory;
use crate::transport::{Connection, Listener};
use crate::{Progress, Side};

/// How long a peer goes on at most: far longer than what is to end it.
const LONG: Duration = Duration::from_secs(20);

/// How long a peer may stand still.
const STALL: Duration = Duration::from_millis(500);

fn options(to: &crate::Address) -> SendOptions {
    let limits = Limits { connect: LONG, answer: STALL, stall: STALL, ..Limits::default() };
    SendOptions { limits, ..SendOptions::new(to.clone()) }
}

/// A server of one page.
fn server(options: &SendOptions) -> Arc<Server<FakeMemory>> {
    let memory = FakeMemory::new(&[(0, 1)], Backing::Shared, PAGE_BYTES).unwrap();
    let progress = Arc::new(Progress::new(Side::Source));
    let missing = vec![ClaimMap::new(1)];
    Arc::new(Server::new(memory, missing, vec![Grain::new(1, 1)], options, progress))
}

/// Says `first`, and then `more` again and again, for a long time or until that is not taken.
fn go_on(connection: &Connection, first: &[u8], more: &[u8]) {
    let began = Instant::now();
    let mut sent = connection.send(first);
    while sent.is_ok() && began.elapsed() < LONG {
        std::thread::sleep(Duration::from_millis(5));
        sent = connection.send(more);
    }
}

/// A destination to which a source comes back. It says that it is there, and then goes on so.
fn take_back(listener: &Listener, first: &[u8], more: &[u8], begun: &Sender<()>) {
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

/// Comes back to such a destination; a person gives up when `gives_up`. Gives how it ends, and after
/// which time.
fn come_back(first: &[u8], more: &[u8], gives_up: bool) -> (Failure, Duration) {
    let listener = Listener::bind(&"tcp:127.0.0.1:0".parse().unwrap()).unwrap();
    let options = options(listener.address());
    let server = server(&options);
    let mut reconnect = Reconnect::new(&options, [1; 16], 1, 0);
    let (begun, begins) = channel();
    std::thread::scope(|scope| {
        scope.spawn(|| take_back(&listener, first, more, &begun));
        let steering = options.steering.clone();
        scope.spawn(move || {
            begins.recv().unwrap();
            if gives_up {
                steering.give_up();
            }
        });
        let began = Instant::now();
        let Err(failure) = reconnect.connect(&server) else { panic!("it is connected") };
        (failure, began.elapsed())
    })
}

#[test]
fn a_person_gives_up_whatever_the_destination_says() {
    let alive = Message::Alive.encode();
    let pending = Header::new(Command::Pending.code(), PENDING_BYTES_MAX).encode();
    // For ever, and with contents that take a good part of an hour at the slowest that is allowed.
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
