// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Slots for large VMs: memory that takes longer to map than a client waits, several devices, several zones.

use std::sync::Arc;

use super::super::super::PIN_BEGIN_MAX;
use super::*;
use crate::prepinned::PinOrder;

/// A worker that maps terabytes.
pub(super) struct Mapping(usize, Class, Vec<SlotMemory>);

/// One that has other things to do before.
struct Queued(usize, Class, Arc<PinOrder>);

impl Pool {
    /// One whose worker has other things to do before.
    fn queued() -> (Self, Queued) {
        let mut pool = Self::new();
        assert_eq!(pool.broker.tick(pool.now), None);
        assert!(pool.work());
        pool.broker.tick(pool.now);
        let queued = pool.queue();
        (pool, queued)
    }

    /// What is to be mapped next, and is not begun.
    fn queue(&mut self) -> Queued {
        let Some(Job::Work(Work::Pin { slot, class, order })) = self.broker.next_job() else {
            panic!("nothing is mapped");
        };
        Queued(slot, class, order)
    }

    /// One whose worker is at it.
    pub(super) fn mapping() -> (Self, Mapping) {
        let (pool, Queued(slot, class, order)) = Self::queued();
        let memory = order.begin().unwrap();
        (pool, Mapping(slot, class, memory))
    }

    pub(super) fn is_stopped(&self) -> bool {
        matches!(&self.broker.slots[0].state, State::Pinning { order, .. } if order.is_stopped())
    }

    /// The worker has been told.
    pub(super) fn stopped(&mut self, Mapping(slot, _, memory): Mapping) {
        let result = Err(PinError::Stopped(address(0)));
        self.done(slot, JobOutcome::Pinned { memory, result });
        self.leftovers.push((slot, None));
    }

    /// The worker has not been told in time.
    pub(super) fn mapped(&mut self, Mapping(slot, class, memory): Mapping) {
        let result = self.pin(slot, &class, &memory);
        self.done(slot, JobOutcome::Pinned { memory, result });
    }

    pub(super) fn again(&mut self, request: &TakePinned, answer: PinnedAnswer) -> PinnedAnswer {
        let PinnedAnswer::Later(waited) = answer else { panic!("{answer:?}") };
        self.broker.take_pinned(1, ALICE, request, Some(waited), self.now)
    }
}

#[test]
fn mapping_that_takes_longer_than_a_client_waits_is_given_up() {
    let (mut pool, mapping) = Pool::mapping();
    let answer = pool.ask(ALICE, &request());
    let due = pool.broker.tick(pool.now);
    assert_eq!(due, Some(pool.now + PIN_WAIT_MAX));
    let answer = pool.again(&request(), answer);
    assert!(!pool.is_stopped());
    pool.now += PIN_WAIT_MAX;
    pool.broker.tick(pool.now);
    assert!(pool.is_stopped());
    let answer = pool.again(&request(), answer);
    assert!(matches!(answer, PinnedAnswer::Later(_)), "the pool has the device: {answer:?}");
    pool.stopped(mapping);
    let answer = pool.again(&request(), answer);
    assert_eq!(refusal(&answer), Some(Refusal::Empty));
    assert!(text(answer).contains("still to be mapped"));
    assert_eq!(pool.broker.counters.pin_failures, 0);
    // As a VMM of an earlier version does before it opens the device.
    pool.broker.closed(1, pool.now);
    pool.settle(9);
    assert!(pool.devices.is_empty(), "the pool was faster than the VM");
    pool.settle(9);
    assert_eq!(pool.state(), "ready");
}

#[test]
fn mapping_is_given_up_at_once_for_a_vm_that_has_no_use_for_it() {
    let other = request_for(&[0], &[zone(8)]);
    let (mut pool, mapping) = Pool::mapping();
    let answer = pool.ask(ALICE, &other);
    assert!(pool.is_stopped());
    assert!(matches!(answer, PinnedAnswer::Later(_)), "{answer:?}");
    pool.stopped(mapping);
    assert_eq!(refusal(&pool.again(&other, answer)), Some(Refusal::NoSuchSlot));
    // For an order that was not begun the device is not open.
    let (mut pool, Queued(_, _, order)) = Pool::queued();
    assert_eq!(refusal(&pool.ask(ALICE, &other)), Some(Refusal::NoSuchSlot));
    assert!(order.begin().is_none(), "it would take the device from the VM");
    assert_eq!(pool.state(), "waiting");
    pool.broker.closed(1, pool.now);
    pool.settle(20);
    assert_eq!(pool.state(), "ready");
}

#[test]
fn memory_whose_turn_to_be_mapped_is_late_is_lent_without_the_device() {
    let take = Take { size_bytes: 4 * MIB, pages: PagesWanted::Small, node: None };
    // Queued by itself, or as a client asked.
    for is_asked_for in [false, true] {
        let (mut pool, queued) = Pool::queued();
        if is_asked_for {
            let memory = queued.2.begin().unwrap();
            pool.stopped(Mapping(queued.0, queued.1, memory));
            pool.unpin();
            assert_eq!(pool.state(), "waiting");
        }
        let answer = pool.ask(ALICE, &request());
        let late = if is_asked_for { pool.queue().2 } else { queued.2 };
        assert_eq!(pool.broker.tick(pool.now), Some(pool.now + PIN_BEGIN_MAX));
        assert!(matches!(answer, PinnedAnswer::Later(_)), "{answer:?}");
        pool.now += PIN_BEGIN_MAX;
        pool.broker.tick(pool.now);
        assert_eq!(refusal(&pool.again(&request(), answer)), Some(Refusal::Empty));
        assert!(late.begin().is_none(), "it would take the device from the VM");
        let (reply, file) = pool.broker.take(1, ALICE, &take);
        assert_eq!(reply, Reply::Granted { size_bytes: 4 * MIB, pages: SlotPages::Small });
        pool.settle(3600);
        assert_eq!((pool.state(), pool.devices.len()), ("lent", 0));
        drop(file);
        pool.broker.closed(1, pool.now);
        pool.settle(20);
        assert_eq!(pool.state(), "ready");
    }
}

#[test]
fn a_client_waits_longer_for_memory_whose_turn_has_come() {
    let (mut pool, Queued(slot, class, order)) = Pool::queued();
    let answer = pool.ask(ALICE, &request());
    let asked = pool.now;
    pool.broker.tick(pool.now);
    let mapping = Mapping(slot, class, order.begin().unwrap());
    pool.now += PIN_BEGIN_MAX;
    assert_eq!(pool.broker.tick(pool.now), Some(asked + PIN_WAIT_MAX));
    pool.mapped(mapping);
    granted(pool.again(&request(), answer));
}

#[test]
fn memory_is_mapped_once_however_often_that_was_taken_back() {
    let mut pool = Pool::new();
    pool.broker.tick(pool.now);
    assert!(pool.work());
    let other = request_for(&[0], &[zone(8)]);
    for _ in 0..3 {
        pool.broker.tick(pool.now);
        assert_eq!(pool.state(), "pinning");
        assert_eq!(refusal(&pool.ask(ALICE, &other)), Some(Refusal::NoSuchSlot));
        pool.broker.closed(1, pool.now);
        pool.now += HOLD_OFF;
    }
    pool.broker.tick(pool.now);
    assert_eq!(pool.broker.jobs.len(), 4);
    pool.settle(0);
    assert_eq!((pool.state(), pool.broker.counters.pin_failures), ("ready", 0));
}

#[test]
fn mapping_is_given_up_for_a_vm_that_has_its_memory_elsewhere() {
    let (mut pool, mapping) = Pool::mapping();
    let State::Pinning { order, .. } = &pool.broker.slots[0].state else { panic!("not mapping") };
    order.set_regions(&regions(&[zone(4)]));
    let mut other = request();
    other.regions[0].gpa += 4096;
    let answer = pool.ask(ALICE, &other);
    assert!(pool.is_stopped(), "terabytes are mapped before it is told");
    pool.stopped(mapping);
    assert_eq!(refusal(&pool.again(&other, answer)), Some(Refusal::NoSuchSlot));
}

#[test]
fn what_is_mapped_before_it_is_given_up_is_released() {
    let (mut pool, mapping) = Pool::mapping();
    let other = request_for(&[0], &[zone(8)]);
    let answer = pool.ask(ALICE, &other);
    pool.mapped(mapping);
    let answer = pool.again(&other, answer);
    assert!(matches!(answer, PinnedAnswer::Later(_)) && !pool.is_device_free());
    assert!(pool.work());
    assert_eq!(refusal(&pool.again(&other, answer)), Some(Refusal::NoSuchSlot));
    assert!(pool.is_device_free());
}

#[test]
fn of_several_devices_one_comes_with_the_slot_and_the_others_are_free() {
    let slots: [&[SlotZone]; 3] = [&[zone(2)], &[zone(4)], &[zone(4)]];
    let mut pool = Pool::with(&slots);
    pool.settle(0);
    let all = |pool: &Pool| [0, 1, 2].map(|slot| pool.is_free(slot));
    assert_eq!(all(&pool), [false; 3]);
    // The first that has a slot of this size, after one that is in no slot.
    let request = request_for(&[9, 0, 1, 2], &[zone(4)]);
    let answer = pool.ask(ALICE, &request);
    assert!(matches!(answer, PinnedAnswer::Later(_)), "the others are not free: {answer:?}");
    let answer = pool.waited(ALICE, &request, answer);
    let PinnedAnswer::Now(Reply::GrantedPinned(grant), Some(files)) = answer else {
        panic!("{answer:?}");
    };
    assert_eq!((grant.device, all(&pool)), (address(1), [true, false, true]));
    pool.settle(3600);
    assert_eq!(all(&pool), [true, false, true], "the VM opens them again when it reboots");
    drop(files);
    pool.broker.closed(1, pool.now);
    pool.settle(60);
    assert_eq!(all(&pool), [false; 3]);

    // None that may not be had is released.
    let device = pool.broker.config.classes[2].device.as_mut().unwrap();
    device.users = vec![BOB];
    let none = pool.asks(ALICE, &request_for(&[0, 2], &[zone(4)]));
    assert_eq!(refusal(&none), Some(Refusal::NoSuchSlot));
    assert_eq!(all(&pool), [true, false, false]);
    let none = pool.asks(ALICE, &request_for(&[2], &[zone(4)]));
    assert_eq!((refusal(&none), all(&pool)), (Some(Refusal::NotAllowed), [true, false, false]));
}

#[test]
fn a_slot_of_several_zones_is_leased_and_comes_back_as_one() {
    let zones = [zone(4), zone(2)];
    let mut pool = Pool::with(&[&zones]);
    pool.failing = vec![1];
    pool.settle(0);
    assert_eq!((pool.state(), pool.broker.counters.built_bytes), ("absent", 4 * MIB));
    pool.failing.clear();
    pool.settle(60);
    assert_eq!(pool.state(), "ready");
    assert_eq!(pool.broker.counters.built_bytes, 6 * MIB, "the other zone was made again");
    let request = request_for(&[0], &zones);
    let files = granted(pool.asks(ALICE, &request));
    let lens: Vec<_> = files.memory.iter().map(|file| file.metadata().unwrap().len()).collect();
    assert_eq!(lens, [4 * MIB, 2 * MIB]);
    files.memory[1].write_all_at(&[1; 4096], 0).unwrap();
    // All of it counts.
    pool.broker.config.limits.default_bytes = 11 * MIB;
    assert_eq!(refusal(&pool.asks(ALICE, &request)), Some(Refusal::OverLimit));
    pool.broker.config.limits.default_bytes = 12 * MIB;
    // A process still has the second zone.
    let PinnedFiles { mut memory, iommufd, device } = files;
    let second = memory.pop().unwrap();
    drop((memory, iommufd, device));
    pool.broker.closed(1, pool.now);
    pool.settle(20);
    assert_eq!(pool.state(), "lingering");
    drop(second);
    pool.settle(20);
    assert_eq!((pool.state(), pool.broker.counters.scrubbed_bytes), ("ready", 6 * MIB));
    let mut bytes = vec![1; 2 << 20];
    granted(pool.asks(ALICE, &request)).memory[1].read_exact_at(&mut bytes, 0).unwrap();
    assert!(memory::is_zero(&bytes));
}

#[test]
fn what_one_zone_of_a_former_user_lacks_keeps_the_rest_from_others() {
    let zones = [zone(4), zone(2)];
    let mut pool = Pool::with(&[&zones]);
    pool.settle(0);
    let request = request_for(&[0], &zones);
    drop(granted(pool.asks(ALICE, &request)));
    pool.broker.closed(1, pool.now);
    pool.broker.tick(pool.now);
    // The first zone is cleared in place for the same user, the second is not.
    let cleared = pool.broker.next_job();
    let Some(Job::Work(Work::Scrub { slot, part: 0, memory, .. })) = cleared else {
        panic!("{cleared:?}");
    };
    let outcome = |part, result| JobOutcome::Memory { part, scrubbed: true, result };
    pool.done(slot, outcome(0, Ok(memory)));
    assert!(matches!(pool.broker.next_job(), Some(Job::Work(Work::Scrub { part: 1, .. }))));
    pool.done(slot, outcome(1, Err(PoolSlotError::NotZero { at: 0 })));
    pool.settle(60);
    assert_eq!(pool.state(), "ready");
    assert_eq!(refusal(&pool.asks(BOB, &request)), Some(Refusal::Empty));
    pool.settle(60);
    drop(granted(pool.asks(BOB, &request)));
}
