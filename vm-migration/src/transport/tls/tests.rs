// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Connections with TLS: certificates, data, waits, and peers that break the rules.

#![expect(clippy::unwrap_used, reason = "a failing unwrap fails the test")]

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rustls::ContentType;

use super::record::EMPTY_RECORDS_MAX;
use super::{ClientTls, ServerTls, TlsError};
use crate::cancel::Cancel;
use crate::channel::Channel;
use crate::layout::{Backing, PAGE_BYTES, PageRun};
use crate::protocol::message::Message;
use crate::ram::slice;
use crate::testing::{FakeMemory, TestCa};
use crate::transport::ByteSource as _;
use crate::transport::{Address, Connection, Listener, Part, Reader, TransportError};

const LONG: Duration = Duration::from_secs(20);
const SHORT: Duration = Duration::from_millis(50);

/// Certificates of both sides, for a destination on this host.
pub(crate) fn certificates() -> (ClientTls, ServerTls) {
    let dir = tempfile::tempdir().unwrap();
    TestCa::new().write_all(dir.path(), &["127.0.0.1", "localhost"]);
    load(dir.path())
}

fn load(dir: &Path) -> (ClientTls, ServerTls) {
    (ClientTls::load(dir).unwrap(), ServerTls::load(dir).unwrap())
}

fn listen(server: Option<&ServerTls>) -> Listener {
    let at = Address::Tcp { host: "127.0.0.1".into(), port: 0 };
    Listener::bind(&at).unwrap().with_tls(server.cloned())
}

fn connect(
    to: &Address,
    client: &ClientTls,
    stall: Duration,
) -> Result<Connection, TransportError> {
    Connection::connect_secured(to, Some(client), &Cancel::new().unwrap(), LONG, stall)
}

/// Both ends of a connection: the source's, and the destination's.
fn pair_of(client: &ClientTls, server: &ServerTls, stall: Duration) -> (Connection, Connection) {
    let listener = listen(Some(server));
    let to = listener.address().clone();
    let never = Cancel::new().unwrap();
    std::thread::scope(|scope| {
        let accepted = scope.spawn(|| listener.accept(&never, Some(LONG), stall).unwrap());
        let source = connect(&to, client, stall).unwrap();
        (source, accepted.join().unwrap())
    })
}

fn pair(stall: Duration) -> (Connection, Connection) {
    let (client, server) = certificates();
    pair_of(&client, &server, stall)
}

/// Result of a handshake on both sides; the source's is that of the first answer.
fn agree(
    client: &ClientTls,
    server: &ServerTls,
    to: impl FnOnce(Address) -> Address,
) -> (Result<(), TransportError>, Result<Connection, TransportError>) {
    let listener = listen(Some(server));
    let to = to(listener.address().clone());
    let never = Cancel::new().unwrap();
    std::thread::scope(|scope| {
        let accepted = scope.spawn(|| {
            let accepted = listener.accept(&never, Some(LONG), LONG)?;
            accepted.send(b"welcome")?;
            Ok(accepted)
        });
        let source = connect(&to, client, LONG).and_then(|connection| {
            let mut reader = Reader::new(Arc::new(connection));
            reader.read_exact(&mut [0; 7])
        });
        (source, accepted.join().unwrap())
    })
}

fn chain(error: &TransportError) -> String {
    error_text::chain(error)
}

/// Certificates of which those of one side are invalid in some way.
fn odd(side: &str, hosts: &[&str], has_expired: bool, other_ca: bool) -> (ClientTls, ServerTls) {
    let dir = tempfile::tempdir().unwrap();
    let ca = TestCa::new();
    let other = if other_ca { &TestCa::new() } else { &ca };
    let (first, second) =
        if side == "server" { ("client", "server") } else { ("server", "client") };
    ca.write_side(dir.path(), first, &["127.0.0.1"], false);
    let good = dir.path().join("good");
    std::fs::create_dir(&good).unwrap();
    ca.write_side(&good, first, &["127.0.0.1"], false);
    other.write_side(dir.path(), second, hosts, has_expired);
    if side == "server" {
        (ClientTls::load(&good).unwrap(), ServerTls::load(dir.path()).unwrap())
    } else {
        (ClientTls::load(dir.path()).unwrap(), ServerTls::load(&good).unwrap())
    }
}

#[test]
fn both_sides_know_each_other_by_address_or_name() {
    let (client, server) = certificates();
    let (source, destination) = agree(&client, &server, |to| to);
    source.unwrap();
    destination.unwrap();
    let named = |to| match to {
        Address::Tcp { port, .. } => Address::Tcp { host: "localhost".into(), port },
        to @ Address::Unix(_) => to,
    };
    let (source, destination) = agree(&client, &server, named);
    source.unwrap();
    destination.unwrap();
}

#[test]
fn a_destination_with_a_wrong_certificate_is_refused() {
    for (hosts, has_expired, other_ca, why) in [
        (&["127.0.0.1"][..], false, true, "UnknownIssuer"),
        (&["127.0.0.1"], true, false, "expired"),
        (&["host-b.example", "10.0.0.9"], false, false, "not valid for name"),
    ] {
        let (client, server) = odd("server", hosts, has_expired, other_ca);
        let (source, destination) = agree(&client, &server, |to| to);
        let error = source.unwrap_err();
        assert!(matches!(error, TransportError::Tls(TlsError::Certificate(_))), "{error:?}");
        assert!(chain(&error).contains(why), "{}", chain(&error));
        let error = destination.unwrap_err();
        assert!(matches!(error, TransportError::Tls(TlsError::Refused { .. })), "{error:?}");
    }
}

#[test]
fn a_source_with_a_wrong_certificate_is_refused() {
    for (has_expired, other_ca, why) in [(false, true, "UnknownIssuer"), (true, false, "expired")] {
        let (client, server) = odd("client", &["source"], has_expired, other_ca);
        // The source trusts the CA of the destination.
        let (source, destination) = agree(&client_of(&client, &server), &server, |to| to);
        let error = destination.unwrap_err();
        assert!(matches!(error, TransportError::Tls(TlsError::Certificate(_))), "{error:?}");
        assert!(chain(&error).contains(why), "{}", chain(&error));
        let error = source.unwrap_err();
        assert!(matches!(error, TransportError::Tls(TlsError::Refused { .. })), "{error:?}");
    }
}

/// The source's certificate, with the destination's trusted CA.
fn client_of(client: &ClientTls, server: &ServerTls) -> ClientTls {
    let (mut ours, theirs) = (serde_json::to_value(&*client.files).unwrap(), &*server.files);
    ours["ca"] = serde_json::to_value(theirs).unwrap()["ca"].clone();
    ClientTls::new(serde_json::from_value(ours).unwrap()).unwrap()
}

#[test]
fn a_source_without_a_certificate_is_refused() {
    let (mut client, server) = certificates();
    let roots = client.files.material(super::files::Kind::Client).unwrap().roots;
    let mut config = rustls::ClientConfig::builder_with_provider(super::provider())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.enable_secret_extraction = true;
    client.config = Arc::new(config);
    let (source, destination) = agree(&client, &server, |to| to);
    let error = destination.unwrap_err();
    let none = TlsError::Certificate(rustls::Error::NoCertificatesPresented);
    assert_eq!(chain(&error), chain(&none.into()));
    assert!(chain(&source.unwrap_err()).contains("showed no certificate"));
}

#[test]
fn files_that_cannot_be_used_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    let fails = |with: &str| {
        let errors = [ClientTls::load(dir.path()).map(drop), ServerTls::load(dir.path()).map(drop)];
        for error in errors {
            let error = error_text::chain(&error.unwrap_err());
            assert!(error.contains(with), "{error}");
        }
    };
    fails("ca-cert.pem cannot be read: No such file");
    let fresh = || TestCa::new().write_all(dir.path(), &["127.0.0.1"]);
    fresh();
    load(dir.path());
    for side in ["server", "client"] {
        std::fs::remove_file(path(&format!("{side}-key.pem"))).unwrap();
    }
    fails("-key.pem cannot be read");
    fresh();
    for side in ["server", "client"] {
        std::fs::copy(path("ca-cert.pem"), path(&format!("{side}-key.pem"))).unwrap();
    }
    fails("-key.pem holds no private key");
    fresh();
    for (from, to) in
        [("client-key.pem", "x"), ("server-key.pem", "client-key.pem"), ("x", "server-key.pem")]
    {
        std::fs::rename(path(from), path(to)).unwrap();
    }
    fails("does not belong to the certificate in");
    fresh();
    std::fs::write(path("ca-cert.pem"), "").unwrap();
    fails("ca-cert.pem holds no certificate");
    std::fs::write(path("ca-cert.pem"), vec![b' '; 70_000]).unwrap();
    fails("ca-cert.pem has more than 65536 bytes");
    std::fs::remove_file(path("ca-cert.pem")).unwrap();
    std::fs::create_dir(path("ca-cert.pem")).unwrap();
    fails("ca-cert.pem cannot be read: it is not a regular file");
}

#[test]
fn guest_memory_travels_in_any_pieces_and_keys_change_on_the_way() {
    let pages = 3000;
    let new = || FakeMemory::new(&[(0, pages)], Backing::Shared, PAGE_BYTES).unwrap();
    let (from, to) = (new(), new());
    for page in 0..pages {
        for word in [0, 7, 511] {
            from.word(0, page, word).store(page * 7 + word + 1, Ordering::Relaxed);
        }
    }
    let run = |first, count| PageRun { region: 0, first, count };
    let sent: Vec<PageRun> = (0..pages).map(|page| run(page, 1)).collect();
    let received: Vec<PageRun> = (0..pages / 100).map(|index| run(index * 100, 100)).collect();
    let (one, other) = pair(LONG);
    one.tls.as_ref().unwrap().change_keys_after(3);
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
        for word in [0, 7, 511] {
            let there = to.word(0, page, word).load(Ordering::Relaxed);
            assert_eq!(there, page * 7 + word + 1, "page {page}");
        }
    }
}

#[test]
fn both_directions_move_at_once() {
    let (one, other) = pair(LONG);
    let (one, other) = (Arc::new(one), Arc::new(other));
    let bytes: Vec<u8> = (0..4 << 20).map(|at: u32| (at % 251) as u8).collect();
    std::thread::scope(|scope| {
        for (from, to) in [(&one, &other), (&other, &one)] {
            let bytes = &bytes;
            scope.spawn(move || from.send(bytes).unwrap());
            scope.spawn(move || {
                let mut heard = vec![0; bytes.len()];
                Reader::new(Arc::clone(to)).read_exact(&mut heard).unwrap();
                assert!(heard == *bytes);
            });
        }
    });
}

#[test]
fn a_request_for_other_keys_is_heeded_and_holds_no_reader_up() {
    let (one, other) = pair(LONG);
    let tls = one.tls.as_ref().unwrap();
    let ask = tls.seal_for_test(ContentType::Handshake, &[24, 0, 0, 1, 1]);
    tls.change_keys_for_test();
    super::super::socket::send_now(&one.socket, &ask).unwrap();
    // The socket is readable, but no plaintext can be read.
    let deadline = Instant::now() + LONG;
    while !other.tls.as_ref().unwrap().is_asked_for_keys() {
        assert!(!other.has_data_now().unwrap());
        assert!(Instant::now() < deadline);
    }
    let waited = other.wait_for_data(Some(SHORT));
    assert!(matches!(waited, Err(TransportError::Timeout { .. })), "{waited:?}");
    one.send(b"with new keys").unwrap();
    other.wait_for_data(Some(LONG)).unwrap();
    let mut heard = [0; 13];
    Reader::new(Arc::new(other)).read_exact(&mut heard).unwrap();
    assert_eq!(&heard, b"with new keys");
}

#[test]
fn the_answer_to_a_request_for_other_keys_comes_with_the_next_message() {
    let (one, other) = pair(LONG);
    let tls = one.tls.as_ref().unwrap();
    let ask = tls.seal_for_test(ContentType::Handshake, &[24, 0, 0, 1, 1]);
    tls.change_keys_for_test();
    super::super::socket::send_now(&one.socket, &ask).unwrap();
    one.send(b"x").unwrap();
    let mut heard = [0; 1];
    assert_eq!(other.receive_some(&mut heard).unwrap(), 1);
    other.send(b"with other keys").unwrap();
    let mut heard = [0; 15];
    Reader::new(Arc::new(one)).read_exact(&mut heard).unwrap();
    assert_eq!(&heard, b"with other keys");
}

#[test]
fn records_without_data_keep_no_reader() {
    const NEW_KEYS: &[u8] = &[24, 0, 0, 1, 0];
    const TICKET: &[u8] = &[4, 0, 0, 0];
    for (typ, payload) in [
        (ContentType::ApplicationData, &[][..]),
        (ContentType::Handshake, TICKET),
        (ContentType::Handshake, NEW_KEYS),
    ] {
        let (one, other) = pair(LONG);
        let tls = other.tls.as_ref().unwrap();
        let send = |count| {
            for _ in 0..count {
                let record = tls.seal_for_test(typ, payload);
                if payload == NEW_KEYS {
                    tls.change_keys_for_test();
                }
                super::super::socket::send_now(&other.socket, &record).unwrap();
            }
        };
        let mut reader = Reader::new(Arc::new(one));
        for _ in 0..2 {
            send(EMPTY_RECORDS_MAX);
            other.send(b"x").unwrap();
            reader.read_exact(&mut [0; 1]).unwrap();
        }
        let began = Instant::now();
        send(EMPTY_RECORDS_MAX + 1);
        let error = reader.read_exact(&mut [0; 1]).unwrap_err();
        assert!(matches!(error, TransportError::Tls(TlsError::NoData)), "{error:?}");
        assert!(began.elapsed() < LONG / 2);
    }
}

#[test]
fn a_look_ahead_leaves_a_failure_to_the_reader() {
    let (one, other) = pair(LONG);
    super::super::socket::send_now(&one.socket, &[23, 3, 3, 0, 5, 1, 2, 3, 4, 5]).unwrap();
    other.wait_for_data(Some(LONG)).unwrap();
    assert_eq!(other.peek_now(&mut [0; 16]), 0);
    let error = other.receive_now(&mut [0; 16]).unwrap_err();
    assert!(matches!(error, TransportError::Tls(_)), "{error:?}");
}

#[test]
fn the_reason_of_a_cancel_follows_whole_messages_that_fill_the_socket() {
    let (one, other) = pair(LONG);
    let cancel = Cancel::new().unwrap();
    one.set_cancel(&cancel);
    one.set_stall_timeout(SHORT);
    let alive = Message::Alive.encode();
    let waited = loop {
        if let Err(error) = one.send(&alive) {
            break error;
        }
    };
    assert!(matches!(waited, TransportError::Timeout { .. }), "{waited:?}");
    assert!(one.is_between_messages(), "nothing of the last one has gone out");
    cancel.cancel();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut reader = Reader::new(Arc::new(other));
            loop {
                match Message::read(&mut reader).unwrap() {
                    Message::Alive => {}
                    Message::Abandon(reason) => break assert_eq!(reason, "the operator wants it"),
                    other => panic!("{other:?}"),
                }
            }
        });
        Channel::new(one).abandon("the operator wants it");
    });
}

#[test]
fn waits_are_bounded_and_cancelled() {
    let timed_out = |result| matches!(result, Err(TransportError::Timeout { .. }));
    let (one, other) = pair(SHORT);
    let mut reader = Reader::new(Arc::new(one));
    assert!(timed_out(reader.read_exact(&mut [0; 1])));
    assert!(timed_out(other.wait_for_data(Some(SHORT))));
    assert!(timed_out(other.send(&vec![0; 64 << 20])));
    // A sealed record that was not sent leaves a gap in the stream: nothing can follow it.
    assert!(!other.is_between_messages());
    assert!(matches!(other.send(b"x"), Err(TransportError::Closed)));
    let (one, other) = pair(LONG);
    let cancel = Cancel::new().unwrap();
    one.set_cancel(&cancel);
    other.set_cancel(&cancel);
    std::thread::scope(|scope| {
        let send = scope.spawn(|| one.send(&vec![0; 64 << 20]));
        let wait = scope.spawn(|| one.wait_for_data(None));
        cancel.cancel();
        assert!(matches!(send.join().unwrap(), Err(TransportError::Cancelled)));
        assert!(matches!(wait.join().unwrap(), Err(TransportError::Cancelled)));
    });
}

/// The source's end of a connection whose other end the test controls, with access to both TCP ends in
/// between for tampering.
fn tampered(with: impl FnOnce(&mut TcpStream, &mut TcpStream) + Send + 'static) -> Connection {
    let (client, server) = certificates();
    let listener = listen(Some(&server));
    let Address::Tcp { host, port } = listener.address().clone() else { panic!() };
    let between = TcpListener::bind("127.0.0.1:0").unwrap();
    let to = Address::Tcp { host: "127.0.0.1".into(), port: between.local_addr().unwrap().port() };
    let (sent, sends) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let accepted = listener.accept(&Cancel::new().unwrap(), Some(LONG), LONG).unwrap();
        sent.send(accepted).unwrap();
    });
    let (done, is_done) = std::sync::mpsc::channel::<()>();
    std::thread::spawn(move || {
        let (source, _) = between.accept().unwrap();
        let destination = TcpStream::connect((host, port)).unwrap();
        let (mut up, mut out) = (source.try_clone().unwrap(), destination.try_clone().unwrap());
        std::thread::spawn(move || std::io::copy(&mut up, &mut out));
        let (mut from, mut to) = (destination, source);
        // The destination's part of the handshake, and no byte after it.
        let mut buffer = [0; 4096];
        from.set_nonblocking(true).unwrap();
        while is_done.try_recv().is_err() {
            if let Ok(len @ 1..) = from.read(&mut buffer) {
                to.write_all(&buffer[..len]).unwrap();
            }
            std::thread::yield_now();
        }
        from.set_nonblocking(false).unwrap();
        let destination = sends.recv().unwrap();
        destination.send(b"to be tampered with").unwrap();
        with(&mut from, &mut to);
        let _ = to.shutdown(std::net::Shutdown::Both);
    });
    let source = connect(&to, &client, LONG).unwrap();
    done.send(()).unwrap();
    source
}

#[test]
fn what_is_tampered_with_or_cut_off_is_a_lost_connection() {
    type Tamper = fn(&mut TcpStream, &mut TcpStream);
    fn heard(from: &mut TcpStream) -> Vec<u8> {
        let mut buffer = vec![0; 4096];
        let len = from.read(&mut buffer).unwrap();
        buffer.truncate(len);
        buffer
    }
    let flipped: Tamper = |from, to| {
        let mut record = heard(from);
        *record.last_mut().unwrap() ^= 1;
        to.write_all(&record).unwrap();
    };
    let twice: Tamper = |from, to| {
        let record = heard(from);
        to.write_all(&[&record[..], &record].concat()).unwrap();
    };
    let garbage: Tamper = |_, to| to.write_all(&[0xee; 64]).unwrap();
    let plain: Tamper = |_, to| to.write_all(&[23, 3, 3, 0, 1, 7]).unwrap();
    let long: Tamper = |_, to| to.write_all(&[23, 3, 3, 0xff, 0xff, 7]).unwrap();
    // No close_notify: in the middle of a record, and between two.
    let half: Tamper = |from, to| {
        let record = heard(from);
        to.write_all(&record[..record.len() - 3]).unwrap();
    };
    let nothing: Tamper = |from, _| drop(heard(from));
    for (name, tamper, is_tls) in [
        ("flipped", flipped, true),
        ("twice", twice, true),
        ("garbage", garbage, true),
        ("plain", plain, true),
        ("long", long, true),
        ("half", half, false),
        ("nothing", nothing, false),
    ] {
        let source = tampered(tamper);
        let mut reader = Reader::new(Arc::new(source));
        let mut bytes = [0; 19];
        let mut read = reader.read_exact(&mut bytes);
        if name == "twice" {
            read.unwrap();
            assert_eq!(&bytes, b"to be tampered with");
            read = reader.read_exact(&mut [0; 1]);
        }
        let error = read.unwrap_err();
        match error {
            TransportError::Tls(_) => assert!(is_tls, "{name}: {error:?}"),
            TransportError::Closed => assert!(!is_tls, "{name}"),
            error => panic!("{name}: {error:?}"),
        }
        // The failure is permanent.
        assert!(reader.read_exact(&mut [0; 1]).is_err(), "{name}");
    }
}

#[test]
fn an_end_is_announced_and_noticed() {
    let (one, other) = pair(LONG);
    other.send(b"last words").unwrap();
    other.shut_down_sending();
    assert!(other.send(b"x").is_err());
    let mut reader = Reader::new(Arc::new(one));
    let mut heard = [0; 10];
    reader.read_exact(&mut heard).unwrap();
    assert!(matches!(reader.read_exact(&mut [0; 1]), Err(TransportError::Closed)));
    let (one, other) = pair(LONG);
    drop(other);
    let mut reader = Reader::new(Arc::new(one));
    assert!(matches!(reader.read_exact(&mut [0; 1]), Err(TransportError::Closed)));
}

#[test]
fn a_handshake_has_a_deadline_however_it_goes_on() {
    let (client, _) = certificates();
    for drips in [false, true] {
        let silent = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = silent.local_addr().unwrap().port();
        let end = std::thread::spawn(move || {
            let (mut stream, _) = silent.accept().unwrap();
            // A record of the handshake that is never complete.
            let mut sent = stream.write_all(&[22, 3, 3, 0x20, 0]);
            while drips && sent.is_ok() {
                std::thread::sleep(Duration::from_millis(5));
                sent = stream.write_all(&[0]);
            }
            let _ = stream.read_to_end(&mut Vec::new());
        });
        let to = Address::Tcp { host: "127.0.0.1".into(), port };
        let began = Instant::now();
        let error = connect(&to, &client, 6 * SHORT).unwrap_err();
        assert!(matches!(error, TransportError::Timeout { .. }), "{error:?}");
        assert!(began.elapsed() < LONG / 2);
        end.join().unwrap();
    }
}

#[test]
fn a_peer_without_tls_is_told_from_a_lost_connection() {
    let (client, _) = certificates();
    type Case = (&'static [u8], fn(&TlsError) -> bool);
    let cases: [Case; 2] = [
        (b"\x02\0\0\0\0\0\0\0", |error| matches!(error, TlsError::NotTls)),
        (b"", |error| matches!(error, TlsError::Ended)),
    ];
    for (answer, is_right) in cases {
        let plain = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = plain.local_addr().unwrap().port();
        std::thread::spawn(move || {
            let (mut stream, _) = plain.accept().unwrap();
            let _ = stream.read(&mut [0; 4096]);
            let _ = stream.write_all(answer);
        });
        let to = Address::Tcp { host: "127.0.0.1".into(), port };
        match connect(&to, &client, LONG).unwrap_err() {
            TransportError::Tls(error) => assert!(is_right(&error), "{error:?}"),
            error => panic!("{error:?}"),
        }
    }
}

#[test]
fn memory_without_a_page_is_told_from_a_lost_connection() {
    let (ours, theirs) = pair(LONG);
    theirs.send(&[1; 16]).unwrap();
    let page = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 16 };
    // SAFETY: nothing is there that could be written to: the kernel says so.
    let received = unsafe { ours.receive(&mut [page]) };
    assert!(matches!(received, Err(TransportError::NoPage { .. })), "{received:?}");
}
