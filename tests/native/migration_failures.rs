// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Migrations that fail before the handover: the guest continues at the source, whole, and both sides
//! say why.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::harness::migrate::{Reception, failure_of, send_option, text};
use crate::harness::{Mode, Suite, Transport, Vmm, VmmBuilder, free_port, wait_for};

pub fn add(suite: &mut Suite) {
    for mode in [Mode::Precopy, Mode::Postcopy] {
        let name = mode.name();
        suite.add(&format!("migration_failures::{name}_no_listener"), move || no_listener(mode));
        suite.add(&format!("migration_failures::{name}_peer_closes"), move || peer_closes(mode));
        suite
            .add(&format!("migration_failures::{name}_peer_speaks_rubbish"), move || rubbish(mode));
        for answers in 1..5 {
            let name = format!("migration_failures::{name}_peer_gone_after_{answers}_answers");
            suite.add(&name, move || gone_after(mode, answers));
        }
        suite.add(&format!("migration_failures::{name}_destination_killed"), move || killed(mode));
        suite.add(&format!("migration_failures::{name}_destination_has_a_vm"), move || {
            has_a_vm(mode);
        });
    }
    suite.add("migration_failures::destination_gets_rubbish", destination_gets_rubbish);
    suite.add("migration_failures::modes_differ", modes_differ);
    suite.add("migration_failures::address_taken", address_taken);
    suite.add("migration_failures::then_it_works", then_it_works);
}

const OK: u16 = 1;

fn source() -> Vmm {
    Vmm::boot(2, "size=192M,shared=on", "workload=random-write mem=64M")
}

fn send(source: &Vmm, url: &str, mode: Mode) {
    let option = format!("destination_url={url},memory_mode={}", mode.name());
    // The request may be refused at once, or the migration fail later; either way there is an event.
    source.remote(&["send-migration", &option]);
}

/// The guest is at the source, runs, and has all its pages.
#[track_caller]
fn assert_intact(source: Vmm) {
    wait_for("the VM to run on", || (source.api().state() == "Running").then_some(()));
    source.wait_for_work(5_000);
    source.verify();
    source.shut_down();
}

fn no_listener(mode: Mode) {
    let source = source();
    let url = format!("tcp:127.0.0.1:{}", free_port());
    send(&source, &url, mode);
    let reason = failure_of(&source).to_lowercase();
    assert!(reason.contains("refused") || reason.contains("connect"), "{reason}");
    assert_intact(source);
}

/// A peer on a thread that does `serve` with the first connection.
fn peer(serve: impl FnOnce(TcpStream) + Send + 'static) -> (String, JoinHandle<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let url = format!("tcp:{}", listener.local_addr().expect("an address"));
    let thread = std::thread::spawn(move || {
        let (stream, _) = listener.accept().expect("a connection");
        stream.set_read_timeout(Some(Duration::from_secs(20))).expect("a timeout");
        serve(stream);
    });
    (url, thread)
}

fn peer_closes(mode: Mode) {
    let source = source();
    let (url, thread) = peer(drop);
    send(&source, &url, mode);
    assert!(!failure_of(&source).is_empty());
    thread.join().expect("the peer");
    assert_intact(source);
}

fn rubbish(mode: Mode) {
    let source = source();
    let (url, thread) = peer(|mut stream| {
        let mut chunk = [0; 16];
        let _ = stream.read(&mut chunk);
        let _ = stream.write_all(&[0xa5; 4096]);
        let mut rest = Vec::new();
        let _ = stream.read_to_end(&mut rest);
    });
    send(&source, &url, mode);
    assert!(!failure_of(&source).is_empty());
    assert_intact(source);
    thread.join().expect("the peer");
}

/// A peer that says yes to the first requests, whatever they are, and then goes away.
fn gone_after(mode: Mode, answers: usize) {
    let source = source();
    let (url, thread) = peer(move |mut stream| {
        for _ in 0..answers {
            let mut header = [0; 16];
            if stream.read_exact(&mut header).is_err() {
                return;
            }
            let length = u64::from_le_bytes(header[8..].try_into().expect("eight bytes"));
            let mut body = Read::take(&mut stream, length.min(1 << 30));
            if std::io::copy(&mut body, &mut std::io::sink()).is_err() {
                return;
            }
            let mut answer = [0; 16];
            answer[..2].copy_from_slice(&OK.to_le_bytes());
            if stream.write_all(&answer).is_err() {
                return;
            }
        }
    });
    send(&source, &url, mode);
    let reason = failure_of(&source);
    assert!(!reason.is_empty());
    assert_intact(source);
    thread.join().expect("the peer");
}

fn killed(mode: Mode) {
    // Paced, so that the first round is under way for long enough to be interrupted.
    let source = Vmm::boot(2, "size=1280M,shared=on", "workload=random-write mem=1G");
    let mut destination = Vmm::empty();
    let reception = Reception::start(&destination, Transport::Tcp, mode);
    // Postcopy hands over at once; precopy at a strict downtime keeps copying.
    let option = match mode {
        Mode::Precopy | Mode::Auto => {
            format!("destination_url={},downtime_ms=1", reception.url)
        }
        Mode::Postcopy => format!("destination_url={},memory_mode=postcopy", reception.url),
    };
    if mode == Mode::Postcopy {
        // Before the handover: when the source has just connected.
        destination.signal(libc::SIGSTOP);
        source.remote(&["send-migration", &option]);
        source.wait_for_event("migration-starting");
        destination.signal(libc::SIGKILL);
    } else {
        source.remote_ok(&["send-migration", &option]);
        destination.wait_for_event("migration-receive-started");
        destination.signal(libc::SIGKILL);
    }
    let reason = failure_of(&source);
    assert!(!reason.is_empty());
    let _ = reception.finish();
    assert_intact(source);
}

fn has_a_vm(mode: Mode) {
    let destination = source();
    let port = free_port();
    let option = format!("receiver_url=tcp:127.0.0.1:{port},memory_mode={}", mode.name());
    let output = destination.remote(&["receive-migration", &option]);
    assert!(!output.status.success(), "{output:?}");
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(error.contains("VM"), "{error}");
    assert_intact(destination);
}

fn destination_gets_rubbish() {
    let destination = Vmm::empty();
    let mut attempts: Vec<Vec<u8>> =
        vec![vec![0xa5; 64], b"GET / HTTP/1.1\r\n\r\n".to_vec(), Vec::new()];
    // Well formed headers: config first, a length beyond reason, state before anything.
    for (command, length) in [(2_u16, 1_u64 << 60), (1, 1 << 40), (3, 8), (4, u64::MAX), (77, 0)] {
        let mut bytes = vec![0; 16];
        bytes[..2].copy_from_slice(&command.to_le_bytes());
        bytes[8..].copy_from_slice(&length.to_le_bytes());
        bytes.extend([0x20; 64]);
        attempts.push(bytes);
    }
    let reception = Reception::start(&destination, Transport::Tcp, Mode::Precopy);
    for bytes in attempts {
        let mut stream =
            TcpStream::connect(reception.url.trim_start_matches("tcp:")).expect("it listens");
        stream.write_all(&bytes).expect("bytes can be sent");
        let _ = stream.shutdown(std::net::Shutdown::Write);
        // Until it has been turned away.
        let _ = stream.read_to_end(&mut Vec::new());
        destination.api().get("vmm.ping").ok();
        assert_eq!(destination.api().get("vm.info").status, 404, "a VM was left behind");
    }
    // None of that was the source, which is still awaited.
    let source = source();
    source.remote_ok(&["send-migration", &send_option(&reception.url, Mode::Precopy)]);
    let output = reception.finish();
    assert!(output.status.success(), "{output:?}");
    destination.wait_for_work(5_000);
    destination.verify();
    destination.shut_down();
}

/// Either side may be told the mode; when they disagree, it is refused or agreed upon, never half
/// done.
fn modes_differ() {
    let mut source = source();
    let destination = Vmm::empty();
    let reception = Reception::start(&destination, Transport::Tcp, Mode::Precopy);
    send(&source, &reception.url, Mode::Postcopy);
    let event = source.wait_for_events(&["migration-failed", "migration-finished"]);
    let output = reception.finish();
    if event["event"] == "migration-failed" {
        assert!(!text(&event).is_empty());
        assert!(!output.status.success());
        assert_intact(source);
    } else {
        assert_eq!(source.wait_for_exit(), 0);
        destination.wait_for_work(5_000);
        destination.verify();
    }
}

fn address_taken() {
    let held = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = held.local_addr().expect("an address");
    let destination = Vmm::empty();
    let option = format!("receiver_url=tcp:{address}");
    let output = destination.remote(&["receive-migration", &option]);
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success(), "{output:?}");
    assert!(error.contains(&address.to_string()), "{error}");
    destination.shut_down();
}

fn then_it_works() {
    let mut source =
        VmmBuilder::guest(2, "size=192M,shared=on", "workload=random-write mem=64M").start();
    source.guest();
    for (count, mode) in [(1, Mode::Precopy), (2, Mode::Postcopy)] {
        send(&source, &format!("tcp:127.0.0.1:{}", free_port()), mode);
        wait_for("the failure", || {
            let names = source.event_names();
            let failed = names.iter().filter(|name| *name == "migration-failed").count();
            (failed == count).then_some(())
        });
    }
    wait_for("the VM to run on", || (source.api().state() == "Running").then_some(()));
    let destination = Vmm::empty();
    let reception = Reception::start(&destination, Transport::Tcp, Mode::Postcopy);
    send(&source, &reception.url, Mode::Postcopy);
    assert!(reception.finish().status.success(), "{}", destination.output());
    assert_eq!(source.wait_for_exit(), 0, "{}", source.output());
    destination.wait_for_work(5_000);
    destination.verify();
    destination.shut_down();
}
