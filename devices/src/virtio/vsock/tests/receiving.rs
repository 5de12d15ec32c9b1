// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Data of clients in the buffers that a guest provides: several at once, of any form, and shared fairly.

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::sync::Arc;

use memory::{GuestMemory, GuestMemoryHandle};
use vm_memory::{FileOffset, GuestAddress};
use vmm_sys_util::epoll::Epoll;

use super::super::connection::{Data, Filled, Room};
use super::super::muxer::{Muxer, Outgoing};
use super::super::socket::VsockSocket;
use super::*;
use crate::virtio::Counters as _;
use crate::virtio::test_driver::Buffer;

/// Buffers in the test's own memory.
pub(super) struct PlainRoom {
    buffer_bytes: usize,
    bytes: Vec<u8>,
}

impl PlainRoom {
    pub(super) fn new(buffer_bytes: usize) -> Self {
        Self { buffer_bytes, bytes: Vec::new() }
    }
}

impl Room for PlainRoom {
    fn read(
        &mut self,
        mut stream: &UnixStream,
        wanted_bytes: usize,
        limit_bytes: usize,
    ) -> io::Result<Filled> {
        let room_bytes = wanted_bytes.next_multiple_of(self.buffer_bytes).min(limit_bytes);
        self.bytes.resize(room_bytes, 0);
        let len_bytes = stream.read(&mut self.bytes)?;
        Ok(Filled { len_bytes, is_full: len_bytes == room_bytes })
    }
}

/// Data in the test's own memory.
impl Data for &[u8] {
    fn len_bytes(&self) -> usize {
        self.len()
    }

    fn write(&mut self, mut stream: &UnixStream) -> io::Result<usize> {
        let written = stream.write(self)?;
        *self = &self[written..];
        Ok(written)
    }

    fn keep(&mut self, kept: &mut VecDeque<u8>) -> io::Result<()> {
        kept.extend(*self);
        Ok(())
    }
}

/// Connections whose descriptors it is asked for itself.
pub(super) fn muxer(socket: Arc<VsockSocket>) -> Muxer {
    Muxer::new(CID, socket, Arc::default(), Arc::default(), Arc::new(Epoll::new().unwrap()))
}

/// A device whose guest has no receive buffers yet.
fn without_buffers(driver: Driver) -> Fixture {
    let dir = tempfile::tempdir().unwrap();
    let mut device = device(&dir);
    driver.activate_all(&mut device);
    Fixture { driver, device, dir }
}

/// The next packet in buffers that begin at `place(head)`.
fn packet(fixture: &mut Fixture, place: impl Fn(u16) -> u64) -> (Header, Vec<u8>) {
    let (head, written) = fixture.driver.wait_used(RECEIVE);
    let bytes = fixture.driver.read(place(head), usize::try_from(written).unwrap());
    let header = Header::parse(bytes[..HEADER_BYTES].try_into().unwrap());
    assert_eq!(usize::try_from(header.len_bytes), Ok(bytes.len() - HEADER_BYTES));
    (header, bytes[HEADER_BYTES..].to_vec())
}

#[test]
fn a_stream_fills_what_buffers_there_are_and_the_rest_waits() {
    let mut fixture = Fixture::new();
    let mut client = fixture.connected();
    fixture.device.pause();
    let all = pattern(200_000);
    client.set_nonblocking(true).unwrap();
    let written = client.write(&all).unwrap();
    assert!(written > 33 * 4096, "the kernel keeps {written} bytes");
    fixture.driver.track_writes();
    fixture.device.resume();
    let mut received = Vec::new();
    // As many as there are.
    for _ in 0..32 {
        let (head, len) = fixture.driver.wait_used(RECEIVE);
        assert_eq!(len, BUFFER);
        let at = BUFFERS + u64::from(BUFFER) * u64::from(head);
        let bytes = fixture.driver.read(at, BUFFER as usize);
        let header = Header::parse(bytes[..HEADER_BYTES].try_into().unwrap());
        assert_eq!((header.op, header.len_bytes, header.buf_alloc), (op::RW, 4096, BUFFER_BYTES));
        assert!(fixture.driver.was_written(at) && fixture.driver.was_written(at + 4000));
        received.extend(&bytes[HEADER_BYTES..]);
    }
    assert!(!fixture.driver.queues[RECEIVE].has_used());
    fixture.post(20);
    received.extend(fixture.receive_data(written - received.len()));
    assert!(received == all[..written]);
    let used = fixture.driver.queues[RECEIVE].used_index();
    let states = fixture.device.pause();
    assert_eq!(states[RECEIVE].1.next_avail, used, "what was not filled is given back");
    let counters = fixture.device.counters().counters();
    assert_eq!(counters["rx_packets"], u64::from(used));
    assert_eq!(counters["rx_bytes"], written as u64);
}

#[test]
fn buffers_may_be_of_any_lengths_in_any_ranges() {
    /// Lengths of the ranges of a buffer, which in all have its bytes.
    fn ranges(at: u64, head: u16) -> Vec<Buffer> {
        let lens: Vec<u32> = match head % 4 {
            0 => vec![20, 30, 1, 2000],
            1 => vec![1; 200],
            2 => vec![45],
            _ => vec![44, 1000, 7, 3, 90_000],
        };
        let mut at = at;
        let place = |len: u32| {
            at += u64::from(len);
            writable(at - u64::from(len), len)
        };
        lens.into_iter().map(place).collect()
    }
    // The border of two regions is within the first one.
    let place = |head: u16| BORDER - 100 + u64::from(head) * 0x1_8000;
    let mut fixture = without_buffers(Driver::new(3, 64));
    let post = |fixture: &mut Fixture| {
        let queue = &mut fixture.driver.queues[RECEIVE];
        let head = queue.next_head();
        let table = DATA + 0x8_0000 + u64::from(head % 16) * 0x1000;
        queue.add_indirect(table, &ranges(place(head % 16), head));
        queue.kick();
    };
    for _ in 0..16 {
        post(&mut fixture);
    }
    let listener = UnixListener::bind(fixture.port_path(HOST)).unwrap();
    fixture.send(op::REQUEST);
    assert_eq!(packet(&mut fixture, |head| place(head % 16)).0.op, op::RESPONSE);
    let client = listener.accept().unwrap().0;
    let all = pattern(700_000);
    let expected = all.clone();
    let writer = std::thread::spawn(move || {
        let mut client = client;
        client.write_all(&all).unwrap();
        client
    });
    let mut received = Vec::new();
    while received.len() < expected.len() {
        let (header, data) = packet(&mut fixture, |head| place(head % 16));
        assert_eq!(header.op, op::RW);
        assert!(!data.is_empty() && data.len() <= 64 << 10, "{}", data.len());
        received.extend(data);
        post(&mut fixture);
    }
    assert!(received == expected);
    drop(writer.join().unwrap());
}

#[test]
fn one_bad_buffer_among_several_needs_a_reset() {
    let short = [writable(DATA, 44)];
    let outside = [writable(DATA, 44), writable(1 << 40, 8)];
    let unwritable = [readable(DATA, 4096)];
    for bad in [&short[..], &outside[..], &unwritable[..]] {
        let mut fixture = without_buffers(Driver::new(3, 64));
        let listener = UnixListener::bind(fixture.port_path(HOST)).unwrap();
        fixture.post(2);
        fixture.send(op::REQUEST);
        fixture.driver.wait_used(RECEIVE);
        let mut client = listener.accept().unwrap().0;
        client.write_all(&pattern(20_000)).unwrap();
        fixture.driver.wait_used(RECEIVE);
        fixture.device.pause();
        // The client has filled a buffer: more are taken at once.
        let queue = &mut fixture.driver.queues[RECEIVE];
        for _ in 0..2 {
            queue.add(&[writable(BUFFERS, BUFFER)]);
        }
        queue.add(bad);
        fixture.device.resume();
        fixture.driver.interrupt.wait_broken();
        assert_eq!(fixture.driver.queues[RECEIVE].used_index(), 2, "{bad:?}");
    }
}

/// Guest memory whose upper half is gone: a file that was cut off.
pub(super) fn memory_with_a_hole() -> (GuestMemoryHandle, File) {
    let half = usize::try_from(BORDER).unwrap();
    let file = tempfile::tempfile().unwrap();
    file.set_len(BORDER).unwrap();
    let upper = FileOffset::new(file.try_clone().unwrap(), 0);
    let ranges = [(GuestAddress(0), half, None), (GuestAddress(BORDER), half, Some(upper))];
    let memory = GuestMemory::from_ranges_with_files(ranges).unwrap();
    file.set_len(0).unwrap();
    (GuestMemoryHandle::new(memory), file)
}

#[test]
fn memory_that_the_host_cannot_write_costs_a_connection() {
    let (memory, _file) = memory_with_a_hole();
    let mut fixture = without_buffers(Driver::over(memory, 3, 64));
    let listener = UnixListener::bind(fixture.port_path(HOST)).unwrap();
    for _ in 0..3 {
        let in_two = [writable(BUFFERS, 44 + 100), writable(BORDER, 4096)];
        fixture.driver.queues[RECEIVE].add(&in_two);
    }
    fixture.send(op::REQUEST);
    let place = |_| BUFFERS;
    assert_eq!(packet(&mut fixture, place).0.op, op::RESPONSE);
    let mut client = listener.accept().unwrap().0;
    client.write_all(&pattern(100)).unwrap();
    assert_eq!(packet(&mut fixture, place).1, pattern(100));
    client.write_all(&pattern(200)).unwrap();
    let (header, data) = packet(&mut fixture, place);
    assert_eq!((header.op, data.len()), (op::RST, 0));
    client.set_read_timeout(Some(PATIENCE)).unwrap();
    let end = client.read(&mut [0; 8]);
    assert!(matches!(&end, Ok(0)) || end.is_err_and(|it| it.kind() == ErrorKind::ConnectionReset));
    assert!(!fixture.driver.interrupt.is_broken());
}

#[test]
fn connections_that_all_have_much_share_a_round() {
    let dir = tempfile::tempdir().unwrap();
    let socket = Arc::new(VsockSocket::new(dir.path().join("v")));
    let mut muxer = muxer(socket);
    let mut clients = Vec::new();
    let mut room = PlainRoom::new(4096);
    for port in 0..4 {
        let listener = UnixListener::bind(dir.path().join(format!("v_{port}"))).unwrap();
        muxer.take_packets(1, &Header { dst_port: port, ..header(op::REQUEST) }, None);
        assert_eq!(muxer.next_packet(&mut room).unwrap().header.op, op::RESPONSE);
        let mut client = listener.accept().unwrap().0;
        client.set_nonblocking(true).unwrap();
        assert!(client.write(&pattern(100_000)).unwrap() > 80_000);
        clients.push(client);
    }
    muxer.serve_ready();
    let mut turn = || {
        let Outgoing { header, len_bytes } = muxer.next_packet(&mut room).unwrap();
        assert_eq!(header.op, op::RW);
        (header.src_port, len_bytes)
    };
    // One buffer each, as nothing is known of them yet, and then their parts of a round.
    let first: Vec<_> = (0..4).map(|_| turn()).collect();
    assert!(first.iter().all(|(_, len_bytes)| *len_bytes == 4096), "{first:?}");
    for _ in 0..2 {
        for (port, _) in &first {
            assert_eq!(turn(), (*port, 32 << 10));
        }
    }
}
