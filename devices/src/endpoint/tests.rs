// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Endpoints with readers that are there, slow, late or gone.

#![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::fs::OpenOptions;
use std::io::{Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixStream;

use super::*;
use crate::log_limit::kept;
use crate::syscalls;

fn is_ready(endpoint: &ConsoleEndpoint) -> bool {
    // SAFETY: the descriptor is open as long as the endpoint, which is borrowed.
    let fd = unsafe { BorrowedFd::borrow_raw(endpoint.poll_fd()) };
    syscalls::poll_now(fd, libc::POLLIN).unwrap() != 0
}

fn slave(endpoint: &ConsoleEndpoint) -> std::fs::File {
    OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(libc::O_NOCTTY | libc::O_NONBLOCK)
        .open(endpoint.pty_path().unwrap())
        .unwrap()
}

#[test]
fn a_pty_without_a_reader_does_not_block_and_keeps_the_newest() {
    let endpoint = ConsoleEndpoint::pty().unwrap();
    let block = [b'.'; 4096];
    for _ in 0..300 {
        endpoint.write(&block);
    }
    endpoint.write(b"the end");
    assert!(endpoint.lost_bytes() > 0);

    let mut reader = slave(&endpoint);
    let mut received = Vec::new();
    let mut buffer = [0; 4096];
    // Raw output, as much as the kernel holds, and again after the endpoint was served.
    loop {
        endpoint.service(&mut []);
        match reader.read(&mut buffer) {
            Ok(len_bytes) => received.extend_from_slice(&buffer[..len_bytes]),
            Err(error) => {
                assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
                if !is_ready(&endpoint) {
                    break;
                }
            }
        }
    }
    assert!(received.ends_with(b"the end"));
    assert!(received.len() >= PENDING_BYTES_MAX);
}

#[test]
fn a_pty_carries_bytes_as_they_are_in_both_directions() {
    let endpoint = ConsoleEndpoint::pty().unwrap();
    let mut peer = slave(&endpoint);
    endpoint.write(b"a\r\n\x03b");
    let mut buffer = [0; 64];
    let len_bytes = peer.read(&mut buffer).unwrap();
    assert_eq!(&buffer[..len_bytes], b"a\r\n\x03b");

    peer.write_all(b"in\r\x03").unwrap();
    assert!(!is_ready(&endpoint), "input is not wanted");
    assert_eq!(endpoint.service(&mut buffer), 0);
    endpoint.want_input(true);
    assert!(is_ready(&endpoint));
    let len_bytes = endpoint.service(&mut buffer);
    assert_eq!(&buffer[..len_bytes], b"in\r\x03");
    assert!(!is_ready(&endpoint));
}

#[test]
fn input_stays_outside_until_there_is_room() {
    let endpoint = ConsoleEndpoint::pty().unwrap();
    slave(&endpoint).write_all(b"abcdef").unwrap();
    endpoint.want_input(true);
    let mut small = [0; 4];
    assert_eq!(endpoint.service(&mut small), 4);
    assert!(is_ready(&endpoint));
    assert_eq!(endpoint.service(&mut small), 2);
    assert_eq!(&small[..2], b"ef");
}

#[test]
fn a_socket_serves_one_peer_after_the_other() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("console.sock");
    let endpoint = ConsoleEndpoint::socket(&path).unwrap();
    endpoint.want_input(true);
    endpoint.write(b"before any peer came");
    for greeting in ["first", "second"] {
        let mut peer = UnixStream::connect(&path).unwrap();
        assert!(is_ready(&endpoint));
        let mut buffer = [0; 64];
        assert_eq!(endpoint.service(&mut buffer), 0);
        endpoint.write(greeting.as_bytes());
        let len_bytes = peer.read(&mut buffer).unwrap();
        let text = std::str::from_utf8(&buffer[..len_bytes]).unwrap();
        assert!(text.contains("before any peer") || text == greeting, "{text}");
        peer.write_all(b"x").unwrap();
        assert_eq!(endpoint.service(&mut buffer), 1);
        drop(peer);
        assert!(is_ready(&endpoint));
        assert_eq!(endpoint.service(&mut buffer), 0);
        assert!(!is_ready(&endpoint), "a peer that is gone is forgotten");
    }
    drop(endpoint);
    assert!(!path.exists());
}

/// All that the peer can get now.
fn received(endpoint: &ConsoleEndpoint, peer: &mut UnixStream) -> Vec<u8> {
    peer.set_nonblocking(true).unwrap();
    let (mut all, mut buffer) = (Vec::new(), vec![0; 64 << 10]);
    loop {
        endpoint.service(&mut []);
        match peer.read(&mut buffer) {
            Ok(0) => return all,
            Ok(len_bytes) => all.extend_from_slice(&buffer[..len_bytes]),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return all,
            Err(error) => panic!("{error}"),
        }
    }
}

#[test]
fn the_newest_mebibyte_is_kept_until_a_peer_comes() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("console.sock");
    let endpoint = ConsoleEndpoint::socket(&path).unwrap();
    endpoint.write(b"oldest");
    let rest: Vec<u8> = (0..1 << 20).map(|at: u32| at.to_le_bytes()[at as usize % 3]).collect();
    rest.chunks(1000).for_each(|piece| endpoint.write(piece));
    assert_eq!(endpoint.lost_bytes(), 6);
    let mut peer = UnixStream::connect(&path).unwrap();
    assert!(received(&endpoint, &mut peer) == rest);
}

#[test]
fn a_new_peer_takes_the_place_of_one_that_is_there() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("console.sock");
    let endpoint = ConsoleEndpoint::socket(&path).unwrap();
    endpoint.want_input(true);
    let mut first = UnixStream::connect(&path).unwrap();
    endpoint.service(&mut []);
    endpoint.write(b"to the first");
    let mut second = UnixStream::connect(&path).unwrap();
    assert!(is_ready(&endpoint), "it is not waited for");
    let mut buffer = [0; 64];
    assert_eq!(endpoint.service(&mut buffer), 0);
    endpoint.write(b"to the second");
    assert_eq!(received(&endpoint, &mut second), b"to the second");
    let mut text = String::new();
    first.read_to_string(&mut text).unwrap();
    assert_eq!(text, "to the first", "and its connection has ended");
    second.write_all(b"in").unwrap();
    assert!(is_ready(&endpoint));
    assert_eq!(endpoint.service(&mut buffer), 2);
    assert!(!is_ready(&endpoint));
}

#[test]
fn peers_that_come_and_go_fill_no_log() {
    // Two lines of each: it came, and output to it fails.
    const LINES_MAX: usize = 32 / 2 + 1;
    kept::start();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("console.sock");
    let endpoint = ConsoleEndpoint::socket(&path).unwrap();
    for _ in 0..100 {
        let peer = UnixStream::connect(&path).unwrap();
        assert!(is_ready(&endpoint), "each is accepted");
        endpoint.service(&mut []);
        drop(peer);
        endpoint.write(b"output without a reader");
    }
    let lines = kept::count(path.to_str().unwrap());
    assert!((1..=LINES_MAX).contains(&lines), "{lines}");
}

#[test]
fn a_socket_has_the_rights_that_the_process_gives_to_new_files() {
    use std::os::unix::fs::PermissionsExt as _;
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("console.sock");
    let _endpoint = ConsoleEndpoint::socket(&path).unwrap();
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let mask = status.lines().find_map(|line| line.strip_prefix("Umask:")).unwrap().trim();
    let mask = u32::from_str_radix(mask, 8).unwrap();
    let mode = path.symlink_metadata().unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o777 & !mask);
}

#[test]
fn an_endpoint_that_another_thread_has_is_not_waited_for() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("console.sock");
    let endpoint = ConsoleEndpoint::socket(&path).unwrap();
    endpoint.with(|_, _| {
        std::thread::scope(|scope| {
            let other = scope.spawn(|| endpoint.try_close(std::time::Duration::from_millis(20)));
            assert!(!other.join().unwrap());
        });
    });
    assert!(path.exists());
    assert!(endpoint.try_close(std::time::Duration::ZERO));
    assert!(!path.exists());
}

#[test]
fn a_socket_peer_that_does_not_read_does_not_block() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("console.sock");
    let endpoint = ConsoleEndpoint::socket(&path).unwrap();
    let _peer = UnixStream::connect(&path).unwrap();
    endpoint.service(&mut []);
    for _ in 0..500 {
        endpoint.write(&[b'x'; 4096]);
    }
    assert!(endpoint.lost_bytes() > 0);
}

#[test]
fn a_file_gets_everything_and_null_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("out");
    std::fs::write(&path, "old").unwrap();
    let endpoint = ConsoleEndpoint::file(&path).unwrap();
    let long = vec![b'y'; 100_000];
    endpoint.write(&long);
    assert_eq!(std::fs::read(&path).unwrap(), [b"old", &long[..]].concat());
    assert_eq!(endpoint.size(), None);

    let null = ConsoleEndpoint::null().unwrap();
    null.write(&long);
    null.want_input(true);
    assert!(!is_ready(&null));
    assert_eq!(null.lost_bytes(), 0, "nothing is kept without a peer");

    let missing = directory.path().join("no/such/directory");
    let error = ConsoleEndpoint::file(&missing).err().unwrap();
    assert!(error.to_string().contains("no/such/directory"), "{error}");
}

/// Has this much written in lines, which must not wait for whatever does not read them.
#[track_caller]
fn flood(endpoint: &std::sync::Arc<ConsoleEndpoint>) {
    let (done, is_done) = std::sync::mpsc::channel();
    let written = std::sync::Arc::clone(endpoint);
    std::thread::spawn(move || {
        let lines = b"a line of the guest's\n".repeat(200);
        for _ in 0..400 {
            written.write(&lines);
            written.service(&mut []);
        }
        done.send(()).unwrap();
    });
    is_done.recv_timeout(std::time::Duration::from_secs(20)).expect("a write that does not wait");
    assert!(endpoint.lost_bytes() > 0);
}

#[test]
fn an_unread_terminal_blocks_nothing_whatever_its_mode() {
    let nothing = std::fs::File::open("/dev/null").unwrap();
    for is_raw in [false, true] {
        let (master, terminal, _path) = syscalls::open_pty().unwrap();
        // Raw if the input is the same terminal; else as a shell has it, with two bytes for a newline.
        let input = if is_raw { terminal.as_fd() } else { nothing.as_fd() };
        let endpoint = ConsoleEndpoint::standard(input, terminal.as_fd()).unwrap();
        let endpoint = std::sync::Arc::new(endpoint);
        flood(&endpoint);
        // Other processes that have the terminal open wait as before.
        // SAFETY: F_GETFL takes no third argument; the descriptor is open.
        let flags = unsafe { libc::fcntl(terminal.as_raw_fd(), libc::F_GETFL) };
        assert_eq!(flags & libc::O_NONBLOCK, 0);
        assert_eq!(endpoint.size(), syscalls::terminal_size(terminal.as_fd()).ok());
        endpoint.write(b"the end");
        let mut reader = std::fs::File::from(master);
        let mut received = Vec::new();
        let mut buffer = [0; 4096];
        while !received.ends_with(b"the end") {
            endpoint.service(&mut []);
            if let Ok(len_bytes) = reader.read(&mut buffer) {
                received.extend_from_slice(&buffer[..len_bytes]);
            }
        }
    }
}

#[test]
fn what_cannot_be_opened_again_is_waited_for_elsewhere() {
    let nothing = std::fs::File::open("/dev/null").unwrap();
    let (mut reader, output) = UnixStream::pair().unwrap();
    let endpoint = ConsoleEndpoint::standard(nothing.as_fd(), output.as_fd()).unwrap();
    drop(output);
    endpoint.write(b"the last words");
    // They are there when it is gone, and so is every descriptor of it.
    drop(endpoint);
    let mut text = String::new();
    reader.read_to_string(&mut text).unwrap();
    assert_eq!(text, "the last words");

    let (_unread, output) = UnixStream::pair().unwrap();
    let endpoint = ConsoleEndpoint::standard(nothing.as_fd(), output.as_fd()).unwrap();
    flood(&std::sync::Arc::new(endpoint));
    // The outer end of a pseudo terminal, whose inner end does not read.
    let (master, _terminal, _path) = syscalls::open_pty().unwrap();
    let endpoint = ConsoleEndpoint::standard(nothing.as_fd(), master.as_fd()).unwrap();
    flood(&std::sync::Arc::new(endpoint));
}

#[test]
fn an_unread_pipe_blocks_nothing_and_a_file_gets_everything() {
    let nothing = std::fs::File::open("/dev/null").unwrap();
    let (_unread, pipe) = io::pipe().unwrap();
    let endpoint = ConsoleEndpoint::standard(nothing.as_fd(), pipe.as_fd()).unwrap();
    flood(&std::sync::Arc::new(endpoint));
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(b"before ").unwrap();
    let endpoint = ConsoleEndpoint::standard(nothing.as_fd(), file.as_file().as_fd()).unwrap();
    endpoint.write(b"behind");
    assert_eq!(std::fs::read(file.path()).unwrap(), b"before behind");
}

#[test]
fn raw_mode_ends_with_its_guard() {
    let (_master, terminal, _path) = syscalls::open_pty().unwrap();
    let modes = || syscalls::terminal_settings(terminal.as_fd()).unwrap().c_lflag;
    let before = modes();
    assert_ne!(before & libc::ICANON, 0);
    let guard = RawTerminal::enter(terminal.as_fd()).unwrap().unwrap();
    assert_eq!(modes() & (libc::ICANON | libc::ECHO | libc::ISIG), 0);
    drop(guard);
    assert_eq!(modes(), before);
    let (file, _) = UnixStream::pair().unwrap();
    assert!(RawTerminal::enter(file.as_fd()).unwrap().is_none(), "not a terminal");
}

#[test]
fn a_machine_that_ends_late_leaves_the_terminal_to_the_next() {
    let (_master, terminal, _path) = syscalls::open_pty().unwrap();
    let modes = || syscalls::terminal_settings(terminal.as_fd()).unwrap().c_lflag;
    let before = modes();
    let late = RawTerminal::enter(terminal.as_fd()).unwrap().unwrap();
    let next = RawTerminal::enter(terminal.as_fd()).unwrap().unwrap();
    drop(late);
    assert_eq!(modes() & libc::ICANON, 0, "the next one uses it");
    drop(next);
    assert_eq!(modes(), before, "as it was before the first");
    let late = RawTerminal::enter(terminal.as_fd()).unwrap().unwrap();
    let next = RawTerminal::enter(terminal.as_fd()).unwrap().unwrap();
    drop(next);
    assert_eq!(modes(), before);
    late.restore();
    assert_eq!(modes(), before);
}

#[test]
fn a_socket_that_was_left_behind_is_replaced_and_another_ones_is_not_removed() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("console");
    // As a process leaves it that was killed.
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    let first = ConsoleEndpoint::socket(&path).unwrap();
    let taken = ConsoleEndpoint::socket(&path).map(drop).unwrap_err();
    assert!(matches!(&taken, EndpointError::Socket { source, .. }
        if source.kind() == std::io::ErrorKind::AddrInUse));
    std::fs::remove_file(&path).unwrap();
    let second = ConsoleEndpoint::socket(&path).unwrap();
    drop(first);
    UnixStream::connect(&path).unwrap();
    drop(second);
    assert!(!path.exists());
}

#[test]
fn a_socket_needs_no_right_to_read_its_folder() {
    use std::os::unix::fs::PermissionsExt as _;
    let folder = tempfile::tempdir().unwrap();
    let set_mode = |mode| {
        std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(mode)).unwrap();
    };
    set_mode(0o300);
    let path = folder.path().join("console");
    // Another thread, as root's right to read everything does not come back.
    std::thread::scope(|scope| {
        scope.spawn(|| {
            syscalls::drop_capabilities().unwrap();
            drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
            let endpoint = ConsoleEndpoint::socket(&path).unwrap();
            UnixStream::connect(&path).unwrap();
            drop(endpoint);
            assert!(!path.exists());
        });
    });
    set_mode(0o700);
}
