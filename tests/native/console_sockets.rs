// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Consoles at a Unix socket: clients one after another, one that does not read, and when the path is there.

use std::io::Read as _;
use std::os::unix::net::UnixStream;
use std::path::Path;

use tempfile::TempDir;

use crate::harness::migrate::{Reception, failure_of, send_option};
use crate::harness::payload;
use crate::harness::{Mode, Suite, Transport, Vmm, VmmBuilder, wait_for};

pub fn add(suite: &mut Suite) {
    suite.add(
        "console_sockets::clients_come_and_go_and_one_that_does_not_read_delays_nothing",
        clients,
    );
    suite.add("console_sockets::a_path_in_use_keeps_the_guest_at_the_source", in_use);
}

/// More than the guest writes in one life.
const NEWLINES: u32 = 2000;

fn connect(path: &Path) -> UnixStream {
    wait_for("the console's socket", || UnixStream::connect(path).ok())
}

/// The next output of the guest.
fn reads(client: &mut UnixStream, len_bytes: usize) {
    let mut text = vec![0; len_bytes];
    client.read_exact(&mut text).expect("the guest's output");
    assert!(text.iter().all(|byte| *byte == b'\n'), "{text:?}");
}

fn clients() {
    let folder = TempDir::with_prefix("godwit-console-").expect("a folder");
    let (serial, socket) = (folder.path().join("serial"), folder.path().join("serial"));
    let kernel = payload::resetting(folder.path(), NEWLINES);
    let mut vmm =
        VmmBuilder::new(&["--kernel", kernel.to_str().expect("UTF-8"), "--memory", "size=64M"])
            .with(&["--console", "off", "--serial", &format!("socket={}", socket.display())])
            .start_at_once();
    let mut first = connect(&serial);
    reads(&mut first, 3 * 2000);
    drop(first);
    let mut second = connect(&serial);
    reads(&mut second, 2000);
    // It stays and reads no more. The guest goes on all the same.
    let lives = || vmm.event_names().iter().filter(|name| *name == "rebooted").count();
    let before = lives();
    wait_for("further lives", || (lives() >= before + 10).then_some(()));
    // Another one takes its place, and has what it has not read.
    let mut third = connect(&serial);
    reads(&mut third, 2000);
    let mut rest = Vec::new();
    second.read_to_end(&mut rest).expect("the rest, and an end");
    vmm.signal(libc::SIGTERM);
    assert_eq!(vmm.wait_for_exit(), 0, "{}", vmm.output());
    assert!(!serial.exists(), "the path goes with the VMM");
}

fn in_use() {
    let folder = TempDir::with_prefix("godwit-console-").expect("a folder");
    let path = folder.path().join("serial");
    let option = format!("socket={}", path.display());
    let source = VmmBuilder::new(&["--console", "off", "--serial", &option])
        .with(&["--kernel", crate::harness::image(), "--memory", "size=128M,shared=on"])
        .with(&["--cmdline", "workload=random-write mem=16M"])
        .start();
    source.wait_for_heartbeat();
    let destination = Vmm::empty();
    let reception = Reception::start(&destination, Transport::Unix, Mode::Precopy);
    source.remote(&["send-migration", &send_option(&reception.url, Mode::Precopy)]);
    let why = failure_of(&source);
    assert!(why.contains(path.to_str().expect("UTF-8")), "{why}");
    source.wait_for_heartbeat();
    // The one that was refused has left what is the source's.
    let _client = connect(&path);
    source.shut_down();
    assert!(!path.exists());
    destination.shut_down();
}
