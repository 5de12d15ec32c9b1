// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! When a socket device takes packets of its guest, step by step.

#![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::sync::Arc;

use super::*;
use crate::LogLimit;
use crate::virtio::test_driver::{DATA, Driver, readable, writable};
use crate::virtio::vsock::packet::{HOST_CID, TYPE_STREAM, op};
use crate::virtio::vsock::socket::VsockSocket;

const CID: u64 = 3;
const RECEIVE: usize = 0;
const TRANSMIT: usize = 1;
/// Answers that the device keeps.
const ANSWERS: u16 = 256;

fn worker(driver: &Driver) -> VsockWorker {
    let activation = driver.fresh(0);
    let mut queues = activation
        .queues
        .into_iter()
        .map(|queue| WorkQueue::new(queue, &driver.memory, &activation.interrupt, 0));
    let mut queue = || queues.next().unwrap();
    let socket = Arc::new(VsockSocket::new("/nonexistent/vsock".into()));
    let muxer = Muxer::new(CID, socket, Arc::default(), Arc::new(LogLimit::default())).unwrap();
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
    let mut worker = worker(&driver);
    let mut watch = Watch::new().unwrap();
    send(&mut driver, ANSWERS + 10);
    for _ in 0..2 {
        worker.transmit().unwrap();
        worker.transmit.take_kick();
    }
    assert_eq!(driver.queues[TRANSMIT].used_index(), ANSWERS);
    // The guest gives buffers when the device has found that it has no room, and takes some answers.
    post(&mut driver, 3);
    worker.receive().unwrap();
    assert!(worker.muxer.has_room_for_answers());
    worker.ready(RECEIVE_TOKEN, &mut watch).unwrap();
    assert_eq!(driver.queues[TRANSMIT].used_index(), ANSWERS + 3);
    assert!(worker.transmit.kick().read().is_err(), "no room is left");
    post(&mut driver, 20);
    worker.ready(RECEIVE_TOKEN, &mut watch).unwrap();
    assert_eq!(driver.queues[TRANSMIT].used_index(), ANSWERS + 10);
}
