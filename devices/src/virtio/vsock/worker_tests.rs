// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! When a socket device takes packets of its guest and interrupts it, step by step.

#![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::io::{Read as _, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::Arc;

use tempfile::TempDir;
use vm_memory::GuestAddressSpace as _;

use super::*;
use crate::LogLimit;
use crate::virtio::RING_FEATURES;
use crate::virtio::test_driver::{DATA, Driver, readable, writable};
use crate::virtio::vsock::packet::{HOST_CID, TYPE_STREAM, op};
use crate::virtio::vsock::socket::VsockSocket;

const CID: u64 = 3;
const RECEIVE: usize = 0;
const TRANSMIT: usize = 1;
/// Answers that the device keeps.
const ANSWERS: u16 = 256;

fn worker(driver: &Driver, watch: &Watch) -> VsockWorker {
    worker_at("/nonexistent/vsock".into(), driver, watch, 0)
}

fn worker_at(path: PathBuf, driver: &Driver, watch: &Watch, features: u64) -> VsockWorker {
    let activation = driver.fresh(features);
    let mut queues = activation
        .queues
        .into_iter()
        .map(|queue| WorkQueue::new(queue, &driver.memory, &activation.interrupt, features));
    let mut queue = || queues.next().unwrap();
    let socket = Arc::new(VsockSocket::new(path));
    let log = Arc::new(LogLimit::default());
    let muxer = Muxer::new(CID, socket, Arc::default(), log, watch.epoll());
    VsockWorker::new(queue(), queue(), queue(), muxer, false).unwrap()
}

/// Packets that are each answered by an RST.
fn send(driver: &mut Driver, count: u16) {
    let packet = Header {
        src_cid: CID,
        dst_cid: HOST_CID,
        kind: TYPE_STREAM,
        op: op::RW,
        ..Header::default()
    };
    driver.write(DATA, &packet.to_bytes());
    let len_bytes = u32::try_from(HEADER_BYTES).unwrap();
    for _ in 0..count {
        driver.queues[TRANSMIT].add(&[readable(DATA, len_bytes)]);
    }
}

fn post(driver: &mut Driver, count: u16) {
    for _ in 0..count {
        driver.queues[RECEIVE].add(&[writable(DATA + 4096, 100)]);
    }
}

#[test]
fn packets_that_were_held_are_taken_at_any_event_once_there_is_room() {
    let mut driver = Driver::new(3, 512);
    let mut watch = Watch::new().unwrap();
    let mut worker = worker(&driver, &watch);
    send(&mut driver, ANSWERS + 10);
    for _ in 0..2 {
        worker.transmit(&driver.memory.memory()).unwrap();
        worker.transmit.take_kick();
    }
    assert_eq!(driver.queues[TRANSMIT].used_index(), ANSWERS);
    // The guest gives buffers when the device has found that it has no room, and takes some answers.
    post(&mut driver, 3);
    worker.receive(&driver.memory.memory()).unwrap();
    assert!(worker.muxer.has_room_for_answers());
    worker.settle(&mut watch).unwrap();
    assert_eq!(driver.queues[TRANSMIT].used_index(), ANSWERS + 3);
    assert!(worker.transmit.kick().read().is_err(), "no room is left");
    post(&mut driver, 20);
    worker.settle(&mut watch).unwrap();
    assert_eq!(driver.queues[TRANSMIT].used_index(), ANSWERS + 10);
}

const PORT: u32 = 7;
/// The guest's receive buffers, and where its packets are.
const BUFFERS: u64 = DATA + (512 << 10);
const BUFFER_BYTES: u32 = 4096 + 44;

/// A guest with one connection, whose device does what it is told to, step by step.
struct Steps {
    driver: Driver,
    watch: Watch,
    worker: VsockWorker,
    client: UnixStream,
    /// Interrupts of the receive queue and of the transmit queue that were looked at.
    seen: [u64; 2],
    _dir: TempDir,
}

impl Steps {
    fn new(buf_alloc: u32) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(dir.path().join(format!("v_{PORT}"))).unwrap();
        let mut driver = Driver::new(3, 256);
        let watch = Watch::new().unwrap();
        let worker = worker_at(dir.path().join("v"), &driver, &watch, RING_FEATURES);
        for _ in 0..128 {
            let at = BUFFERS + u64::from(driver.queues[RECEIVE].next_head()) * 4160;
            driver.queues[RECEIVE].add(&[writable(at, BUFFER_BYTES)]);
        }
        put(&mut driver, header(op::REQUEST, buf_alloc, 0));
        let mut steps = Self {
            driver,
            watch,
            worker,
            client: UnixStream::pair().unwrap().0,
            seen: [0; 2],
            _dir: dir,
        };
        steps.worker.start(&mut steps.watch).unwrap();
        steps.client = listener.accept().unwrap().0;
        assert_eq!(steps.received(), [(op::RESPONSE, 0)]);
        steps.step();
        steps.new_interrupts();
        steps
    }

    /// The guest sends a packet, of which the device is notified.
    fn send(&mut self, header: Header) {
        put(&mut self.driver, header);
        self.worker.ready(TRANSMIT_TOKEN, &mut self.watch).unwrap();
    }

    /// The device handles what is ready.
    fn step(&mut self) {
        self.watch.serve_ready(&mut self.worker).unwrap();
    }

    fn interrupts(&self) -> [u64; 2] {
        let of =
            |queue: usize| self.driver.interrupt.queue_interrupts(u16::try_from(queue).unwrap());
        [of(RECEIVE), of(TRANSMIT)]
    }

    /// Interrupts of both queues since the last look. The guest takes back what was taken when it is interrupted for that.
    fn new_interrupts(&mut self) -> [u64; 2] {
        let now = self.interrupts();
        let new = [now[0] - self.seen[0], now[1] - self.seen[1]];
        self.seen = now;
        while new[1] > 0 && self.driver.queues[TRANSMIT].take_used().is_some() {}
        new
    }

    /// Operation and length of the packets that the guest was given.
    fn received(&mut self) -> Vec<(u16, u32)> {
        let mut packets = Vec::new();
        while let Some((head, _)) = self.driver.queues[RECEIVE].take_used() {
            let at = BUFFERS + u64::from(head) * 4160;
            let bytes = self.driver.read(at, HEADER_BYTES);
            let header = Header::parse(bytes[..].try_into().unwrap());
            packets.push((header.op, header.len_bytes));
        }
        packets
    }
}

fn header(op: u16, buf_alloc: u32, fwd_cnt: u32) -> Header {
    Header {
        src_cid: CID,
        dst_cid: HOST_CID,
        src_port: 1024,
        dst_port: PORT,
        kind: TYPE_STREAM,
        op,
        buf_alloc,
        fwd_cnt,
        ..Header::default()
    }
}

/// A packet of the guest, with its data in a range of their own.
fn put(driver: &mut Driver, header: Header) {
    let at = DATA + u64::from(driver.queues[TRANSMIT].next_head()) * 64;
    driver.write(at, &header.to_bytes());
    let ranges = [readable(at, 44), readable(2 << 20, header.len_bytes)];
    let ranges = if header.len_bytes == 0 { &ranges[..1] } else { &ranges[..] };
    driver.queues[TRANSMIT].add(ranges);
}

fn data(len_bytes: u32) -> Header {
    Header { len_bytes, ..header(op::RW, 1 << 20, 0) }
}

#[test]
fn a_question_and_its_answer_interrupt_the_guest_once_for_each_queue_at_the_same_time() {
    let mut steps = Steps::new(1 << 20);
    for count in 1..100 {
        steps.send(data(1));
        steps.worker.settle(&mut steps.watch).unwrap();
        assert_eq!(steps.new_interrupts(), [0, 0], "{count}");
        steps.client.read_exact(&mut [0]).unwrap();
        steps.client.write_all(&[1]).unwrap();
        steps.step();
        assert_eq!(steps.received(), [(op::RW, 1)]);
        assert_eq!(steps.new_interrupts(), [1, 1], "{count}");
        // As Linux reports its space when it has read.
        steps.send(header(op::CREDIT_UPDATE, 1 << 20, count));
    }
}

#[test]
fn a_guest_that_gets_no_answer_is_interrupted_soon() {
    let mut steps = Steps::new(1 << 20);
    steps.send(data(1));
    steps.worker.settle(&mut steps.watch).unwrap();
    assert_eq!(steps.new_interrupts(), [0, 0]);
    // Nothing has come in time.
    steps.step();
    assert_eq!(steps.new_interrupts(), [0, 1]);
    steps.send(data(1));
    steps.worker.settle(&mut steps.watch).unwrap();
    assert_eq!(steps.new_interrupts(), [0, 1], "it was waited for in vain");
}

#[test]
fn a_guest_is_interrupted_for_what_was_taken_before_a_pause() {
    let mut steps = Steps::new(1 << 20);
    steps.send(data(1));
    steps.worker.settle(&mut steps.watch).unwrap();
    assert_eq!(steps.new_interrupts(), [0, 0]);
    steps.worker.drain().unwrap();
    assert_eq!(steps.new_interrupts(), [0, 1]);
}

#[test]
fn a_guest_that_sends_much_is_interrupted_once_for_half_of_its_credit() {
    let mut steps = Steps::new(1 << 20);
    let mut bytes = vec![0; 128 << 10];
    for _ in 0..20 {
        for _ in 0..2 {
            steps.send(data(64 << 10));
        }
        steps.worker.settle(&mut steps.watch).unwrap();
        assert_eq!(steps.received(), [(op::CREDIT_UPDATE, 0)]);
        assert_eq!(steps.new_interrupts(), [1, 1]);
        steps.client.read_exact(&mut bytes).unwrap();
        steps.step();
        assert_eq!(steps.new_interrupts(), [0, 0]);
    }
}

#[test]
fn a_guest_that_receives_much_is_not_asked_for_credit_nor_the_timer_set_for_each_wait() {
    const ROOM: u32 = 8192;
    let mut steps = Steps::new(ROOM);
    steps.client.write_all(&vec![3; 20 * 8192]).unwrap();
    let (mut taken, mut armed) = (0, None);
    for round in 0..20_u32 {
        steps.step();
        assert_eq!(steps.received().iter().map(|(_, len_bytes)| len_bytes).sum::<u32>(), ROOM);
        let expected = [1, u64::from(round > 0)];
        assert_eq!(steps.new_interrupts(), expected, "{round}");
        let now = steps.worker.armed.expect("it would be asked");
        let before = armed.replace(now).unwrap_or(now);
        assert!(now == before || Instant::now() >= before, "{round}");
        taken += ROOM;
        steps.send(header(op::CREDIT_UPDATE, ROOM, taken));
    }
}
