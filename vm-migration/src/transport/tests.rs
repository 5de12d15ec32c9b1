// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Addresses, listeners, and waits that end.

#![expect(clippy::unwrap_used, reason = "a failing unwrap fails the test")]

use std::os::fd::AsRawFd as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

use proptest::prelude::*;

use super::{Address, Connection, Listener, Part, Reader, TransportError};
use crate::cancel::Cancel;
use crate::layout::{Backing, PAGE_BYTES, PageRun};
use crate::ram::{GuestMemoryMap as _, slice};
use crate::testing::FakeMemory;
use crate::transport::ByteSource;
use crate::transport::reader::{AHEAD_BYTES, AHEAD_WITH_PAGE_BYTES};

const LONG: Duration = Duration::from_secs(20);
const SHORT: Duration = Duration::from_millis(50);

fn tcp(host: &str, port: u16) -> Address {
    Address::Tcp { host: host.into(), port }
}

#[test]
fn addresses_are_read() {
    for (text, address) in [
        ("tcp:10.0.0.1:4444", tcp("10.0.0.1", 4444)),
        ("tcp:host-1.example:0", tcp("host-1.example", 0)),
        ("tcp:[::1]:65535", tcp("::1", 65535)),
        ("tcp:[fe80::1]:1", tcp("fe80::1", 1)),
        ("unix:/run/x.sock", Address::Unix("/run/x.sock".into())),
        ("unix:relative", Address::Unix("relative".into())),
    ] {
        assert_eq!(text.parse::<Address>().unwrap(), address);
        assert_eq!(address.to_string(), text);
    }
}

#[test]
fn what_is_no_address_is_refused_with_the_reason() {
    let long_host = format!("tcp:{}:1", "a".repeat(300));
    let long_path = format!("unix:/{}", "a".repeat(107));
    for (text, why) in [
        ("", "neither tcp: nor unix:"),
        ("10.0.0.1:4444", "neither tcp: nor unix:"),
        ("http://x", "neither tcp: nor unix:"),
        ("tcp://host:1", "no slashes"),
        ("tcp:", "port is missing"),
        ("tcp:host", "port is missing"),
        ("tcp::1", "host is missing"),
        ("tcp:host:", "not a number"),
        ("tcp:host:+1", "not a number"),
        ("tcp:host:1a", "not a number"),
        ("tcp:host:65536", "above 65535"),
        ("tcp:ho st:1", "neither a name nor an address"),
        ("tcp:ho\0st:1", "neither a name nor an address"),
        ("tcp:[::1:1", "closing bracket"),
        ("tcp:[host]:1", "not an IPv6 address"),
        ("tcp:[::1]1", "port is missing"),
        ("unix:", "path is missing"),
        ("unix:a\0b", "zero byte"),
        (long_host.as_str(), "longer than any name"),
        (long_path.as_str(), "at most 107"),
    ] {
        let error = text.parse::<Address>().unwrap_err().to_string();
        assert!(error.contains(why), "{text:?}: {error}");
        assert!(error.len() < 1200, "the error repeats all of a long text");
    }
}

proptest! {
    #[test]
    fn any_text_is_read_or_refused(text in "\\PC{0,80}") {
        if let Ok(address) = text.parse::<Address>() {
            prop_assert_eq!(address.to_string().parse::<Address>().unwrap(), address);
        }
        let _ = format!("tcp:{text}").parse::<Address>();
        let _ = format!("unix:{text}").parse::<Address>();
    }
}

/// Both ends of a connection.
fn pair(stall: Duration) -> (Connection, Connection, Cancel) {
    let cancel = Cancel::new().unwrap();
    let listener = Listener::bind(&tcp("127.0.0.1", 0)).unwrap();
    let one = Connection::connect(listener.address(), &cancel, LONG, stall).unwrap();
    let other = listener.accept(&cancel, Some(LONG), stall).unwrap();
    (one, other, cancel)
}

#[test]
fn listeners_know_their_port_and_speak_ipv6() {
    for host in ["127.0.0.1", "::1", "localhost"] {
        let Ok(listener) = Listener::bind(&tcp(host, 0)) else {
            test_skip::skip!("this machine has no {host}");
            continue;
        };
        let Address::Tcp { port, .. } = listener.address() else { panic!() };
        assert_ne!(*port, 0);
        let cancel = Cancel::new().unwrap();
        Connection::connect(listener.address(), &cancel, LONG, LONG).unwrap();
        listener.accept(&cancel, Some(LONG), LONG).unwrap();
    }
}

#[test]
fn a_port_and_a_socket_file_in_use_are_refused_and_a_stale_file_is_replaced() {
    let listener = Listener::bind(&tcp("127.0.0.1", 0)).unwrap();
    let again = Listener::bind(listener.address());
    assert!(matches!(again, Err(TransportError::InUse(_))), "{again:?}");

    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s");
    let address = Address::Unix(path.clone());
    // A socket file without a listener: its process died without removing it.
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    let listener = Listener::bind(&address).unwrap();
    let again = Listener::bind(&address);
    assert!(matches!(again, Err(TransportError::InUse(_))), "{again:?}");
    // A file that another listener has created there must not be removed.
    std::fs::remove_file(&path).unwrap();
    let next = Listener::bind(&address).unwrap();
    drop(listener);
    std::os::unix::net::UnixStream::connect(&path).unwrap();
    drop(next);
    assert!(!path.exists());
    std::fs::write(&path, "precious").unwrap();
    assert!(Listener::bind(&address).is_err());
    assert_eq!(std::fs::read(&path).unwrap(), b"precious", "a file that is no socket stays");
}

#[test]
fn every_wait_is_bounded() {
    let (one, _other, cancel) = pair(SHORT);
    let timed_out = |result| matches!(result, Err(TransportError::Timeout { .. }));
    let mut reader = Reader::new(Arc::new(one));
    assert!(timed_out(reader.read_exact(&mut [0; 1])));
    let (one, _other, _) = pair(SHORT);
    assert!(timed_out(one.send(&vec![0; 64 << 20])));
    assert!(timed_out(one.wait_for_data(Some(SHORT))));
    let listener = Listener::bind(&tcp("127.0.0.1", 0)).unwrap();
    assert!(timed_out(listener.accept(&cancel, Some(SHORT), LONG).map(drop)));
}

#[test]
fn every_wait_ends_when_it_is_cancelled() {
    let cancelled = |result| matches!(result, Err(TransportError::Cancelled));
    let (one, _other, cancel) = pair(LONG);
    std::thread::scope(|scope| {
        let send = scope.spawn(|| one.send(&vec![0; 64 << 20]));
        let wait = scope.spawn(|| one.wait_for_data(None));
        let listener = Listener::bind(&tcp("127.0.0.1", 0)).unwrap();
        let accept_cancel = cancel.clone();
        let accept = scope.spawn(move || listener.accept(&accept_cancel, None, LONG).map(drop));
        cancel.cancel();
        assert!(cancelled(send.join().unwrap()));
        assert!(cancelled(wait.join().unwrap()));
        assert!(cancelled(accept.join().unwrap()));
    });
    // Connecting to a listener that does not accept and has a full backlog: the cancel is checked
    // first.
    let cancel = Cancel::new().unwrap();
    cancel.cancel();
    let unreachable = tcp("name.invalid", 1);
    let resolved = Connection::connect(&unreachable, &cancel, LONG, LONG).map(drop);
    assert!(resolved.is_err());
}

#[test]
fn a_closed_peer_is_noticed() {
    let (one, other, _) = pair(LONG);
    drop(other);
    let mut reader = Reader::new(Arc::new(one));
    assert!(matches!(reader.read_exact(&mut [0; 1]), Err(TransportError::Closed)));
}

#[test]
fn a_name_that_does_not_resolve_is_an_error_that_names_it() {
    let cancel = Cancel::new().unwrap();
    let error = Connection::connect(&tcp("no-such-host.invalid", 1), &cancel, LONG, LONG);
    let error = error.unwrap_err().to_string();
    assert!(error.contains("tcp:no-such-host.invalid:1"), "{error}");
}

#[test]
fn guest_memory_travels_in_any_pieces() {
    let pages = 3000;
    let new = || FakeMemory::new(&[(0, pages)], Backing::Shared, PAGE_BYTES).unwrap();
    let (from, to) = (new(), new());
    let order = std::sync::atomic::Ordering::Relaxed;
    for page in 0..pages {
        from.word(0, page, 1).store(page * 7 + 1, order);
    }
    let (one, other, _) = pair(LONG);
    // More pieces than one system call takes, an odd prefix that the reader reads ahead, and runs
    // that are cut differently on both sides.
    let run = |first, count| PageRun { region: 0, first, count };
    let sent: Vec<PageRun> = (0..pages).map(|page| run(page, 1)).collect();
    let received: Vec<PageRun> = (0..pages / 100).map(|index| run(index * 100, 100)).collect();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let head = [9u8; 77];
            let mut parts = vec![Part::Bytes(&head)];
            parts.extend(sent.iter().map(|run| Part::Guest(slice(&*from, *run))));
            one.send_parts(&parts).unwrap();
        });
        let mut reader = Reader::new(Arc::new(other));
        let mut head = [0; 77];
        reader.read_exact(&mut head).unwrap();
        assert_eq!(head, [9; 77]);
        let slices: Vec<_> = received.iter().map(|run| slice(&*to, *run)).collect();
        reader.read_guest(&slices).unwrap();
    });
    for page in 0..pages {
        assert_eq!(to.word(0, page, 1).load(order), page * 7 + 1, "page {page}");
    }
}

/// Both ends of a connection with small buffers.
fn narrow(stall: Duration) -> (Connection, std::os::unix::net::UnixStream) {
    let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
    socket2::SockRef::from(&ours).set_send_buffer_size(1).unwrap();
    (Connection::over(ours, &Cancel::new().unwrap(), stall).unwrap(), theirs)
}

#[test]
fn what_trickles_in_has_a_total_time() {
    use std::io::Write as _;
    let (ours, mut theirs) = narrow(Duration::from_millis(300));
    let ours = Arc::new(ours);
    let mut reader = Reader::new(Arc::clone(&ours));
    let end = std::thread::spawn(move || {
        while theirs.write_all(&[7]).is_ok() {
            std::thread::sleep(Duration::from_millis(10));
        }
    });
    // Without a limit for the message, only a stall ends it.
    reader.read_exact(&mut [0; 100]).unwrap();
    ours.time_message(true);
    let error = reader.read_exact(&mut vec![0; 1 << 20]).unwrap_err();
    assert!(matches!(error, TransportError::TooSlow { bytes: 1.., .. }), "{error:?}");
    ours.shut_down();
    end.join().unwrap();
}

#[test]
fn who_takes_a_little_now_and_then_has_a_total_time() {
    use std::io::Read as _;
    // Below the slowest that is allowed, and kept to: it is no stall when this thread wakes late.
    const BYTES_PER_S: u32 = 40 << 10;
    let (ours, mut theirs) = narrow(Duration::from_secs(1));
    let end = std::thread::spawn(move || {
        let mut some = [0; 64];
        let (began, mut taken) = (Instant::now(), 0);
        while let Ok(len @ 1..) = theirs.read(&mut some) {
            taken += u32::try_from(len).unwrap();
            let due = began + Duration::from_secs(1) * taken / BYTES_PER_S;
            std::thread::sleep(due.saturating_duration_since(Instant::now()));
        }
    });
    let error = ours.send(&vec![0; 4 << 20]).unwrap_err();
    assert!(matches!(error, TransportError::TooSlow { bytes: 1.., .. }), "{error:?}");
    ours.shut_down();
    end.join().unwrap();
}

#[test]
fn memory_without_a_page_is_told_from_a_lost_connection() {
    let (ours, theirs, _cancel) = pair(Duration::from_secs(20));
    theirs.send(&[1; 16]).unwrap();
    let page = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 16 };
    // SAFETY: nothing is there that could be written to: the kernel says so.
    let received = unsafe { ours.receive(&mut [page]) };
    assert!(matches!(received, Err(TransportError::NoPage { .. })), "{received:?}");
    assert!(received.unwrap_err().to_string().contains("hugetlb"));
}

#[test]
fn a_message_and_its_page_come_in_one_call() {
    let sent: Vec<u8> = (0..64 + 4096_u32).map(|at| (at % 251) as u8).collect();
    for (ahead_bytes, whole) in [(None, false), (Some(AHEAD_WITH_PAGE_BYTES), true)] {
        let (ours, theirs, _cancel) = pair(LONG);
        theirs.send(&sent).unwrap();
        let mut reader = Reader::new(Arc::new(ours));
        // What has been read ahead before is kept.
        let mut head = [0; 64];
        reader.read_exact(&mut head[..1]).unwrap();
        if let Some(ahead_bytes) = ahead_bytes {
            reader.read_ahead_up_to(ahead_bytes);
        }
        reader.read_exact(&mut head[1..]).unwrap();
        assert_eq!(head, sent[..64]);
        // The first call brought no more than is read ahead at first; the next one brings the rest.
        let mut rest = vec![0; 4096];
        reader.read_exact(&mut rest[..AHEAD_BYTES]).unwrap();
        let (done, left) = rest.split_at_mut(AHEAD_BYTES);
        if let Some(lent) = reader.lend(left.len()) {
            left.copy_from_slice(lent);
        } else {
            assert!(!whole, "the page was not read ahead");
            reader.read_exact(left).unwrap();
        }
        assert_eq!(done, &sent[64..][..AHEAD_BYTES]);
        assert_eq!(left, &sent[64 + AHEAD_BYTES..]);
        assert!(!reader.has_buffered());
    }
}

#[test]
fn what_was_read_ahead_finds_no_page_and_is_an_error_too() {
    let (ours, theirs, _cancel) = pair(LONG);
    theirs.send(&[1; 64]).unwrap();
    let mut reader = Reader::new(Arc::new(ours));
    reader.read_exact(&mut [0; 1]).unwrap();
    assert!(reader.has_buffered());
    let memory = FakeMemory::new(&[(0, 1)], Backing::Shared, PAGE_BYTES).unwrap();
    let page = slice(&*memory, PageRun { region: 0, first: 0, count: 1 });
    // As a pool of huge pages does that has none left: the host has no page for this place.
    let file = memory.file(0).unwrap();
    // SAFETY: the file is this test's own, and nothing accesses what is beyond its end but what is tested.
    assert_eq!(unsafe { libc::ftruncate(file.as_raw_fd(), 0) }, 0);
    let received = reader.read_guest(std::slice::from_ref(&page));
    assert!(matches!(received, Err(TransportError::NoPage { .. })), "{received:?}");
}
