// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A console, seen from its driver and from its terminal.

#![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::{Console, ConsoleConfig};
use crate::endpoint::ConsoleEndpoint;
use crate::syscalls;
use crate::virtio::VirtioDevice;
use crate::virtio::test_driver::{DATA, Driver, ProbingInterrupt, readable, writable};

const RECEIVE: usize = 0;
const TRANSMIT: usize = 1;

struct Fixture {
    driver: Driver,
    device: Console,
    endpoint: Arc<ConsoleEndpoint>,
}

impl Fixture {
    fn new() -> Self {
        Self::over(ConsoleEndpoint::pty().unwrap())
    }

    fn over(endpoint: ConsoleEndpoint) -> Self {
        let endpoint = Arc::new(endpoint);
        let config = ConsoleConfig { id: "console".to_owned(), endpoint: Arc::clone(&endpoint) };
        let mut device = Console::new(config);
        let driver = Driver::new(2, 16);
        driver.activate_all(&mut device);
        Self { driver, device, endpoint }
    }

    fn terminal(&self) -> File {
        let path = self.endpoint.pty_path().unwrap();
        let mut options = OpenOptions::new();
        options.read(true).write(true).custom_flags(libc::O_NOCTTY).open(path).unwrap()
    }
}

#[test]
fn output_reaches_the_terminal() {
    let mut fixture = Fixture::new();
    fixture.driver.write(DATA, b"hello, world");
    fixture.driver.queues[TRANSMIT].add(&[readable(DATA, 5), readable(DATA + 5, 7)]);
    fixture.driver.queues[TRANSMIT].kick();
    assert_eq!(fixture.driver.wait_used(TRANSMIT), (0, 0));
    let mut buffer = [0; 12];
    fixture.terminal().read_exact(&mut buffer).unwrap();
    assert_eq!(&buffer, b"hello, world");
}

#[test]
fn input_waits_for_buffers_and_is_marked_dirty() {
    let mut fixture = Fixture::new();
    let mut terminal = fixture.terminal();
    terminal.write_all(b"abcdefgh").unwrap();
    fixture.driver.track_writes();
    fixture.driver.queues[RECEIVE].add(&[writable(DATA, 5)]);
    fixture.driver.queues[RECEIVE].kick();
    assert_eq!(fixture.driver.wait_used(RECEIVE).1, 5);
    assert_eq!(fixture.driver.read(DATA, 5), b"abcde");
    assert!(fixture.driver.was_written(DATA));

    fixture.driver.queues[RECEIVE].add(&[writable(DATA, 5)]);
    fixture.driver.queues[RECEIVE].kick();
    assert_eq!(fixture.driver.wait_used(RECEIVE).1, 3);
    assert_eq!(fixture.driver.read(DATA, 3), b"fgh");

    // Buffers first, then input.
    fixture.driver.queues[RECEIVE].add(&[writable(DATA, 5)]);
    fixture.driver.queues[RECEIVE].kick();
    terminal.write_all(b"z").unwrap();
    assert_eq!(fixture.driver.wait_used(RECEIVE).1, 1);
    assert_eq!(fixture.driver.read(DATA, 1), b"z");
}

#[test]
fn a_paused_console_takes_no_input() {
    let mut fixture = Fixture::new();
    fixture.driver.queues[RECEIVE].add(&[writable(DATA, 5)]);
    fixture.driver.queues[RECEIVE].kick();
    fixture.device.pause();
    fixture.terminal().write_all(b"q").unwrap();
    let states = fixture.device.pause();
    assert_eq!(states[0].1.next_avail, 0, "the buffer is still the driver's");
    fixture.device.resume();
    assert_eq!(fixture.driver.wait_used(RECEIVE).1, 1);
}

#[test]
fn a_console_whose_terminal_is_not_read_pauses_all_the_same() {
    let (_master, terminal, _path) = syscalls::open_pty().unwrap();
    let nothing = File::open("/dev/null").unwrap();
    let endpoint = ConsoleEndpoint::standard(nothing.as_fd(), terminal.as_fd()).unwrap();
    let mut fixture = Fixture::over(endpoint);
    fixture.driver.write(DATA, &b"a line\n".repeat(500));
    // More than the kernel keeps for a terminal and the endpoint together.
    for _ in 0..400 {
        fixture.driver.queues[TRANSMIT].add(&[readable(DATA, 3500)]);
        fixture.driver.queues[TRANSMIT].kick();
        fixture.driver.wait_used(TRANSMIT);
    }
    assert!(fixture.endpoint.lost_bytes() > 0);
    fixture.device.pause();
    fixture.device.resume();
    fixture.device.reset();
}

#[test]
fn a_new_size_is_told_once() {
    let mut fixture = Fixture::new();
    let resizer = fixture.device.resizer();
    resizer.resize(132, 43);
    resizer.resize(132, 43);
    assert_eq!(fixture.driver.interrupt.config_changes(), 1);
    let mut config = [0; 8];
    fixture.device.read_config(0, &mut config);
    assert_eq!(config, [132, 0, 43, 0, 1, 0, 0, 0]);
    fixture.device.reset();
    resizer.resize(80, 24);
    assert_eq!(fixture.driver.interrupt.config_changes(), 1, "there is no driver");
}

#[test]
fn the_guest_learns_of_the_size_of_its_terminal() {
    let mut fixture = Fixture::new();
    let resizer = fixture.device.resizer();
    let mut terminal = fixture.terminal();
    let size = |fixture: &Fixture| {
        let mut config = [0; 4];
        fixture.device.read_config(0, &mut config);
        [config[0], config[2]]
    };
    resizer.resize(90, 30);
    resizer.follow_terminal();
    assert_eq!(size(&fixture), [90, 30], "a terminal without a size says nothing");
    syscalls::set_terminal_size(terminal.as_fd(), 132, 43).unwrap();
    resizer.follow_terminal();
    assert_eq!((size(&fixture), fixture.driver.interrupt.config_changes()), ([132, 43], 2));
    // With what is typed into a pseudo terminal, of which no signal tells.
    syscalls::set_terminal_size(terminal.as_fd(), 80, 25).unwrap();
    fixture.driver.queues[RECEIVE].add(&[writable(DATA, 5)]);
    fixture.driver.queues[RECEIVE].kick();
    terminal.write_all(b"x").unwrap();
    fixture.driver.wait_used(RECEIVE);
    assert_eq!((size(&fixture), fixture.driver.interrupt.config_changes()), ([80, 25], 3));
}

#[test]
fn buffers_outside_of_ram_need_a_reset() {
    let mut fixture = Fixture::new();
    fixture.driver.queues[TRANSMIT].add(&[readable(1 << 40, 10)]);
    fixture.driver.queues[TRANSMIT].kick();
    fixture.driver.interrupt.wait_broken();
}

#[test]
fn output_of_before_reaches_a_peer_of_a_console_whose_driver_broke_a_queue() {
    for is_paused_meanwhile in [false, true] {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("console");
        let mut fixture = Fixture::over(ConsoleEndpoint::socket(&path).unwrap());
        fixture.driver.write(DATA, b"panic");
        fixture.driver.queues[TRANSMIT].add(&[readable(DATA, 5)]);
        fixture.driver.queues[TRANSMIT].kick();
        fixture.driver.wait_used(TRANSMIT);
        fixture.driver.queues[RECEIVE].set_available(1000);
        fixture.driver.queues[RECEIVE].kick();
        fixture.driver.interrupt.wait_broken();
        if is_paused_meanwhile {
            fixture.device.pause();
            fixture.device.resume();
        }
        let mut peer = UnixStream::connect(&path).unwrap();
        peer.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        let mut buffer = [0; 5];
        peer.read_exact(&mut buffer).unwrap();
        assert_eq!(&buffer, b"panic");
    }
}

#[test]
fn a_reset_waits_while_the_driver_is_told_of_a_size() {
    let fixture = Fixture::over(ConsoleEndpoint::null().unwrap());
    let resizer = fixture.device.resizer();
    let probed = Arc::clone(&resizer.shared);
    let probe = ProbingInterrupt::new(move || probed.try_lock().is_none());
    resizer.shared.lock().interrupt = Some(probe.clone());
    resizer.resize(100, 40);
    assert!(probe.was_right.load(Ordering::Acquire), "its driver cannot go meanwhile");
    resizer.shared.lock().interrupt = None;
}
