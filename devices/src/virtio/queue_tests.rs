// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What a queue makes of its driver's rings.

#![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use proptest::prelude::*;

use super::*;
use crate::virtio::RING_FEATURES;
use crate::virtio::test_driver::{BORDER, DATA, Driver, readable, writable};

fn queue(driver: &Driver, features: u64) -> WorkQueue {
    let activation = driver.fresh(features);
    let active = activation.queues.into_iter().next().unwrap();
    WorkQueue::new(active, &driver.memory, &activation.interrupt, features)
}

fn use_one(driver: &mut Driver, queue: &mut WorkQueue) {
    let memory = queue.memory();
    driver.queues[0].add(&[readable(DATA, 1)]);
    let chain = queue.pop(&memory).unwrap().unwrap();
    queue.add_used(&memory, chain.head, 0).unwrap();
}

#[test]
fn the_driver_is_interrupted_at_the_index_that_it_names() {
    let mut driver = Driver::new(1, 16);
    let mut queue = queue(&driver, RING_FEATURES);
    driver.queues[0].want_interrupt_at(2);
    let memory = queue.memory();
    let mut interrupts = Vec::new();
    for _ in 0..5 {
        use_one(&mut driver, &mut queue);
        queue.notify(&memory).unwrap();
        interrupts.push(driver.interrupt.queue_interrupts(0));
    }
    assert_eq!(interrupts, [0, 0, 1, 1, 1]);
}

#[test]
fn chains_that_are_used_together_interrupt_the_driver_at_its_index_and_not_otherwise() {
    let mut driver = Driver::new(1, 16);
    let mut queue = queue(&driver, RING_FEATURES);
    driver.queues[0].want_interrupt_at(4);
    let memory = queue.memory();
    let mut interrupts = Vec::new();
    // Until the ring has wrapped.
    for _ in 0..7 {
        let heads: Vec<_> =
            (0..3).map(|_| (driver.queues[0].add(&[readable(DATA, 1)]), 0)).collect();
        for _ in &heads {
            queue.pop(&memory).unwrap().unwrap();
        }
        queue.add_used_together(&memory, &heads).unwrap();
        queue.notify(&memory).unwrap();
        interrupts.push(driver.interrupt.queue_interrupts(0));
    }
    assert_eq!(interrupts, [0, 1, 1, 1, 1, 1, 1]);
}

#[test]
fn without_event_indexes_the_flag_of_the_driver_counts() {
    let mut driver = Driver::new(1, 16);
    let mut queue = queue(&driver, 0);
    let memory = queue.memory();
    use_one(&mut driver, &mut queue);
    queue.notify(&memory).unwrap();
    assert_eq!(driver.interrupt.queue_interrupts(0), 1);
    driver.write(driver.queues[0].available_ring(), &[1, 0]);
    use_one(&mut driver, &mut queue);
    queue.notify(&memory).unwrap();
    assert_eq!(driver.interrupt.queue_interrupts(0), 1);
}

#[test]
fn a_driver_is_not_interrupted_for_nothing() {
    let mut driver = Driver::new(1, 16);
    let mut queue = queue(&driver, 0);
    for used in 0..3 {
        for _ in 0..2 {
            queue.serve(16, |_, _| Ok(0)).unwrap();
            let memory = queue.memory();
            queue.notify(&memory).unwrap();
            assert_eq!(driver.interrupt.queue_interrupts(0), used);
        }
        driver.queues[0].add(&[readable(DATA, 1)]);
    }
}

#[test]
fn chains_that_break_the_rules_are_found_out() {
    let next = virtio_bindings::virtio_ring::VRING_DESC_F_NEXT;
    let indirect = virtio_bindings::virtio_ring::VRING_DESC_F_INDIRECT;
    type Build = fn(&mut Driver, u32, u32);
    let cases: [(&str, Build); 6] = [
        ("loop", |driver, next, _| {
            driver.queues[0].put_descriptor(0, readable(DATA, 1), next, 0);
            driver.queues[0].publish(0);
        }),
        ("next outside of the table", |driver, next, _| {
            driver.queues[0].put_descriptor(0, readable(DATA, 1), next, 16);
            driver.queues[0].publish(0);
        }),
        ("head outside of the table", |driver, _, _| driver.queues[0].publish(16)),
        ("readable behind writable", |driver, _, _| {
            driver.queues[0].add(&[writable(DATA, 1), readable(DATA, 1)]);
        }),
        ("indirect table of odd length", |driver, _, indirect| {
            driver.queues[0].put_descriptor(0, readable(DATA, 17), indirect, 0);
            driver.queues[0].publish(0);
        }),
        ("indirect table outside of RAM", |driver, _, indirect| {
            driver.queues[0].put_descriptor(0, readable(1 << 40, 16), indirect, 0);
            driver.queues[0].publish(0);
        }),
    ];
    for (name, build) in cases {
        let mut driver = Driver::new(1, 16);
        let mut queue = queue(&driver, RING_FEATURES);
        build(&mut driver, next, indirect);
        let memory = queue.memory();
        assert!(queue.pop(&memory).is_err(), "{name}");
    }
}

#[test]
fn a_buffer_is_taken_as_any_chain_is() {
    let mut driver = Driver::new(1, 16);
    let (mut plain, mut quick) = (queue(&driver, RING_FEATURES), queue(&driver, RING_FEATURES));
    let memory = plain.memory();
    let mut both = || {
        let expected = plain.pop(&memory).map_err(|error| error.to_string());
        let got = quick.pop_buffer(&memory).map_err(|error| error.to_string());
        assert_eq!(format!("{expected:?}"), format!("{got:?}"));
        assert_eq!(plain.state(), quick.state());
        expected
    };
    assert!(both().unwrap().is_none());
    driver.queues[0].add(&[writable(DATA, 7)]);
    driver.queues[0].add(&[readable(DATA, 7)]);
    driver.queues[0].add(&[readable(DATA, 7), writable(DATA, 7)]);
    driver.queues[0].add_indirect(DATA, &[writable(DATA, 7), writable(DATA, 9)]);
    driver.queues[0].add(&[writable(DATA, 0)]);
    assert_eq!(both().unwrap().unwrap().writable.len_bytes(), 7);
    for _ in 0..4 {
        assert!(both().unwrap().is_some());
    }
    assert!(both().unwrap().is_none());
    driver.queues[0].publish(16);
    both().unwrap_err();
    for _ in 0..20 {
        driver.queues[0].publish(0);
    }
    both().unwrap_err();
}

#[test]
fn requests_that_take_long_leave_the_queue_for_other_events_sooner() {
    let mut driver = Driver::new(1, 16);
    let mut queue = queue(&driver, RING_FEATURES);
    for _ in 0..5 {
        driver.queues[0].add(&[readable(DATA, 1)]);
    }
    let (mut turns, mut served) = (Vec::new(), 0);
    while served < 5 {
        let before = served;
        queue
            .serve_by_cost(10, |_, _| {
                served += 1;
                Ok((0, 6))
            })
            .unwrap();
        turns.push(served - before);
        assert_eq!(queue.kick().read().is_ok(), served < 5 || served - before == 2);
    }
    assert_eq!(turns, [2, 2, 1]);
}

#[test]
fn a_chain_as_long_as_its_queue_is_fine() {
    let mut driver = Driver::new(1, 16);
    let mut queue = queue(&driver, RING_FEATURES);
    driver.queues[0].add(&[readable(DATA, 1); 16]);
    let memory = queue.memory();
    let chain = queue.pop(&memory).unwrap().unwrap();
    assert_eq!(chain.readable.len_bytes(), 16);
    assert!(queue.pop(&memory).unwrap().is_none());
}

#[test]
fn a_race_with_the_driver_is_seen_when_kicks_are_allowed_again() {
    let mut driver = Driver::new(1, 16);
    let mut queue = queue(&driver, RING_FEATURES);
    let memory = queue.memory();
    queue.suppress_kicks(&memory).unwrap();
    assert!(!queue.allow_kicks(&memory).unwrap());
    driver.queues[0].add(&[readable(DATA, 1)]);
    assert!(queue.allow_kicks(&memory).unwrap());
    assert!(!queue.allow_kicks_beyond(&memory, 1).unwrap());
    driver.queues[0].add(&[readable(DATA, 1)]);
    assert!(queue.allow_kicks_beyond(&memory, 1).unwrap());
    assert_eq!(queue.pop(&memory).unwrap().unwrap().head, 0, "the position is as it was");
}

/// A descriptor as any driver may write it: address, length, flags, next.
fn descriptors(count: usize) -> impl Strategy<Value = Vec<(u64, u32, u16, u16)>> {
    let address = prop_oneof![
        4 => Just(DATA),
        2 => Just(DATA + 32),
        1 => Just(BORDER - 40),
        1 => any::<u64>()
    ];
    let len = prop_oneof![4 => (0_u32..8).prop_map(|count| 16 * count), 2 => 0_u32..200, 1 => any::<u32>()];
    let flags = prop_oneof![8 => 0_u16..8, 1 => any::<u16>()];
    let next = prop_oneof![8 => 0_u16..16, 1 => any::<u16>()];
    proptest::collection::vec((address, len, flags, next), count)
}

fn bytes_of(descriptors: &[(u64, u32, u16, u16)]) -> Vec<u8> {
    let of = |&(address, len, flags, next): &(u64, u32, u16, u16)| {
        let mut bytes = address.to_le_bytes().to_vec();
        bytes.extend(len.to_le_bytes());
        bytes.extend(flags.to_le_bytes());
        bytes.extend(next.to_le_bytes());
        bytes
    };
    descriptors.iter().flat_map(of).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, ..ProptestConfig::default() })]

    /// What is taken the short way is what the general way takes, and what that refuses is refused.
    #[test]
    fn chains_in_a_row_are_taken_as_each_by_itself(
        table in descriptors(16),
        indirect in descriptors(10),
        heads in proptest::collection::vec(prop_oneof![20 => 0_u16..16, 1 => any::<u16>()], 1..20),
        undone in any::<u32>(),
    ) {
        let mut driver = Driver::new(1, 16);
        let (mut plain, mut quick) = (queue(&driver, RING_FEATURES), queue(&driver, RING_FEATURES));
        let memory = plain.memory();
        driver.write(0, &bytes_of(&table));
        driver.write(DATA, &bytes_of(&indirect));
        driver.write(BORDER - 40, &bytes_of(&indirect));
        let mut available = quick.available(&memory);
        for (index, head) in heads.into_iter().enumerate() {
            driver.queues[0].publish(head);
            for look in 0..2 {
                let expected = plain.pop(&memory);
                let got = quick.pop_from(&mut available);
                prop_assert_eq!(format!("{:?}", expected), format!("{:?}", got));
                prop_assert_eq!(plain.state(), quick.state());
                if expected.is_err() {
                    return Ok(());
                }
                if look == 0 && undone >> index & 1 != 0 && expected.is_ok_and(|it| it.is_some()) {
                    plain.undo_pop();
                    quick.undo_pop();
                }
            }
        }
    }
}
