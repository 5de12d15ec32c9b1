// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! An entropy device, seen from its driver.

#![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::path::Path;

use super::{Rng, RngConfig};
use crate::virtio::test_driver::{BORDER, DATA, Driver, readable, writable};

fn device(source: &Path) -> Rng {
    Rng::new(RngConfig { id: "rng".to_owned(), source: source.to_owned() }).unwrap()
}

#[test]
fn bytes_come_from_the_source_and_are_marked_dirty() {
    let source = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(source.path(), b"0123456789").unwrap();
    let mut device = device(source.path());
    let mut driver = Driver::new(1, 16);
    driver.activate_all(&mut device);
    driver.track_writes();
    driver.queues[0].add(&[writable(DATA, 4), writable(BORDER - 2, 4)]);
    driver.queues[0].kick();
    assert_eq!(driver.wait_used(0), (0, 8));
    assert_eq!(driver.read(DATA, 4), b"0123");
    assert_eq!(driver.read(BORDER - 2, 4), b"4567");
    assert!(driver.was_written(DATA) && driver.was_written(BORDER));
}

#[test]
fn an_exhausted_source_is_replaced_by_the_kernel() {
    let mut device = device(Path::new("/dev/null"));
    let mut driver = Driver::new(1, 16);
    driver.activate_all(&mut device);
    driver.queues[0].add(&[writable(DATA, 64)]);
    driver.queues[0].kick();
    assert_eq!(driver.wait_used(0), (0, 64));
    assert_ne!(driver.read(DATA, 64), [0; 64]);
}

#[test]
fn one_request_gets_a_bounded_answer() {
    let mut device = device(Path::new("/dev/zero"));
    let mut driver = Driver::new(1, 16);
    driver.activate_all(&mut device);
    driver.queues[0].add(&[writable(DATA, 1 << 20)]);
    driver.queues[0].kick();
    assert_eq!(driver.wait_used(0), (0, 64 << 10));
}

#[test]
fn requests_without_room_need_a_reset() {
    let mut device = device(Path::new("/dev/zero"));
    let mut driver = Driver::new(1, 16);
    driver.activate_all(&mut device);
    driver.queues[0].add(&[readable(DATA, 16)]);
    driver.queues[0].kick();
    driver.interrupt.wait_broken();
}

#[test]
fn a_missing_source_is_named() {
    let config = RngConfig { source: "/nonexistent/random".into(), ..RngConfig::default() };
    let error = Rng::new(config).err().unwrap();
    assert!(error.to_string().contains("/nonexistent/random"), "{error}");
}
