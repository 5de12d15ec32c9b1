// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Slots whose device is left to a user: for how long, and how their memory is lent meanwhile.

use super::*;

const FIRST: Lessee = 1;
const SECOND: Lessee = 2;

fn take(mib: u64) -> Take {
    Take { size_bytes: mib * MIB, pages: PagesWanted::Small, node: None }
}

impl Pool {
    fn ask_over(&mut self, lessee: Lessee, request: &TakePinned) -> PinnedAnswer {
        self.broker.take_pinned(lessee, ALICE, request, None, self.now)
    }

    fn close(&mut self, lessee: Lessee) {
        self.broker.closed(lessee, self.now);
    }
}

#[test]
fn a_device_that_is_left_to_one_vm_is_not_bound_for_another() {
    let mut pool = Pool::new();
    pool.settle(0);
    let other = request_for(&[0], &[zone(8)]);
    assert_eq!(refusal(&pool.asks(ALICE, &other)), Some(Refusal::NoSuchSlot));
    assert!(pool.broker.has_any(FIRST), "its connection would be too old soon");
    pool.settle(60);
    assert_eq!(refusal(&pool.ask_over(SECOND, &request())), Some(Refusal::Empty));
    pool.settle(60);
    assert!(pool.is_device_free());
    // Both have it open, or are about to.
    pool.close(FIRST);
    assert!(!pool.broker.has_any(FIRST));
    pool.settle(60);
    assert!(pool.is_device_free());
    pool.close(SECOND);
    pool.settle(0);
    assert_eq!(pool.state(), "ready");
}

#[test]
fn a_vm_that_did_not_wait_for_the_answer_finds_the_device_free() {
    for is_mapped in [false, true] {
        let (mut pool, mapping) = Pool::mapping();
        assert!(matches!(pool.ask(ALICE, &request()), PinnedAnswer::Later(_)));
        pool.now += PIN_WAIT_MAX;
        pool.broker.tick(pool.now);
        assert!(pool.is_stopped());
        pool.close(FIRST);
        // The device is slow.
        pool.now += Duration::from_secs(20);
        if is_mapped {
            pool.mapped(mapping);
        } else {
            pool.stopped(mapping);
        }
        pool.settle(9);
        assert!(pool.is_device_free(), "the pool was faster than the VM");
        pool.settle(9);
        assert_eq!(pool.state(), "ready");
    }
}

#[test]
fn mapping_is_given_up_for_those_only_who_still_wait() {
    let (mut pool, _mapping) = Pool::mapping();
    assert!(matches!(pool.ask_over(FIRST, &request()), PinnedAnswer::Later(_)));
    pool.now += Duration::from_secs(3);
    assert!(matches!(pool.ask_over(SECOND, &request()), PinnedAnswer::Later(_)));
    let second = pool.now;
    pool.close(FIRST);
    assert_eq!(pool.broker.tick(pool.now), Some(second + PIN_WAIT_MAX));
    pool.close(SECOND);
    pool.now += PIN_WAIT_MAX;
    assert_eq!(pool.broker.tick(pool.now), None);
    assert!(!pool.is_stopped(), "no client waits for the device");
}

#[test]
fn memory_that_is_not_mapped_in_time_is_lent_without_the_device() {
    let (mut pool, mapping) = Pool::mapping();
    let answer = pool.ask(ALICE, &request());
    pool.now += PIN_WAIT_MAX;
    pool.broker.tick(pool.now);
    let answer = pool.again(&request(), answer);
    assert!(pool.broker.take(FIRST, ALICE, &take(4)).1.is_none(), "the device is there");
    pool.stopped(mapping);
    assert_eq!(refusal(&pool.again(&request(), answer)), Some(Refusal::Empty));
    // What is mapped is still being released.
    assert_eq!(pool.leftovers.len(), 1);
    assert!(pool.broker.take(SECOND, ALICE, &take(4)).1.is_none(), "it was not refused this slot");
    assert!(pool.broker.take(FIRST, ALICE, &take(2)).1.is_none(), "of another size");
    let (reply, file) = pool.broker.take(FIRST, ALICE, &take(4));
    assert_eq!(reply, Reply::Granted { size_bytes: 4 * MIB, pages: SlotPages::Small });
    let file = file.unwrap();
    file.write_all_at(&[1; 4096], 0).unwrap();
    assert!(pool.broker.take(FIRST, ALICE, &take(4)).1.is_none(), "lent twice");
    pool.settle(3600);
    assert_eq!((pool.state(), pool.devices.len()), ("lent", 0));
    pool.close(FIRST);
    pool.settle(20);
    assert_eq!(pool.state(), "lingering");
    drop(file);
    pool.settle(20);
    assert_eq!(pool.state(), "ready");
    let mut bytes = vec![1; 4 << 20];
    granted(pool.take(ALICE)).memory[0].read_exact_at(&mut bytes, 0).unwrap();
    assert!(memory::is_zero(&bytes));
}

#[test]
fn zones_are_lent_one_by_one_to_the_same_vm() {
    let zones = [zone(4), zone(2)];
    let mut pool = Pool::with(&[&zones]);
    pool.is_taken = true;
    pool.settle(0);
    let request = request_for(&[0], &zones);
    let other = request_for(&[0], &[zone(4)]);
    let answer = pool.ask_over(SECOND, &other);
    assert_eq!(refusal(&answer), Some(Refusal::NoSuchSlot));
    assert!(pool.broker.take(SECOND, ALICE, &take(4)).1.is_none(), "a part is of no use to it");
    pool.close(SECOND);
    assert_eq!(refusal(&pool.asks(ALICE, &request)), Some(Refusal::Empty));
    // All of it counts.
    pool.broker.config.limits.default_bytes = 5 * MIB;
    assert!(pool.broker.take(FIRST, ALICE, &take(2)).1.is_none());
    pool.broker.config.limits.default_bytes = 6 * MIB;
    for mib in [2, 4] {
        let (_, file) = pool.broker.take(FIRST, ALICE, &take(mib));
        assert_eq!(file.unwrap().metadata().unwrap().len(), mib * MIB);
        assert!(pool.broker.take(FIRST, ALICE, &take(mib)).1.is_none(), "lent twice");
    }
    pool.is_taken = false;
    pool.close(FIRST);
    pool.settle(20);
    assert_eq!((pool.state(), pool.broker.counters.scrubbed_bytes), ("ready", 6 * MIB));
}

/// As for a VM that reboots after the pool was started anew.
#[test]
fn a_device_that_a_vm_has_is_left_to_it_when_it_says_so() {
    let mut pool = Pool::new();
    pool.is_taken = true;
    pool.settle(0);
    let alone = TakePinned { zones: Vec::new(), regions: Vec::new(), ..request() };
    assert_eq!(refusal(&pool.ask(ALICE, &alone)), Some(Refusal::NoSuchSlot));
    pool.is_taken = false;
    pool.settle(3600);
    assert_eq!((pool.state(), pool.devices.len()), ("waiting", 0));
    // It has its memory.
    assert!(pool.broker.take(FIRST, ALICE, &take(4)).1.is_none());
    pool.close(FIRST);
    pool.settle(0);
    assert_eq!(pool.state(), "ready");
}

#[test]
fn a_device_is_released_for_a_vmm_that_knows_no_such_slots() {
    let mut pool = Pool::new();
    pool.settle(0);
    let alone = TakePinned { zones: Vec::new(), regions: Vec::new(), ..request() };
    let answer = pool.asks(ALICE, &alone);
    assert_eq!(refusal(&answer), Some(Refusal::NoSuchSlot));
    assert!(pool.is_device_free());
    let text = text(answer);
    assert!(text.contains("0000:65:00.0 alone was asked for"), "{text}");
    // It is closed before the device is opened.
    pool.close(FIRST);
    pool.settle(9);
    assert!(pool.is_device_free());
}
