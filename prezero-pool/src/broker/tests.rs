// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Assignment of slots, and handling of returned ones. The memory is real and small.

#![expect(clippy::unwrap_used, reason = "a test that cannot unwrap has failed")]

use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::sync::atomic::{AtomicU64, Ordering};

use prezero_pool_client::{PagesWanted, SlotPages};

use super::*;
use crate::slot::ZeroingOptions;

const MIB: u64 = 1 << 20;
const OWN: u32 = 7;
const ALICE: u32 = 1000;
const BOB: u32 = 1001;

fn config(slots: &[(u64, SlotPages, u32)], limit: u64) -> Config {
    let mut config = Config::parse("socket = '/s'\nmax_waste_percent = 50").unwrap();
    config.limits.default_bytes = limit;
    config.reuse = Reuse::SameUser;
    let class = |(size_bytes, pages, count): &(u64, SlotPages, u32)| {
        let zones = vec![SlotZone { size_bytes: *size_bytes, pages: *pages, node: None }];
        Class { zones, count: *count, device: None }
    };
    config.classes = slots.iter().map(class).collect();
    config
}

fn memory_done(
    slot: usize,
    scrubbed: bool,
    result: Result<SlotMemory, PoolSlotError>,
) -> JobResult {
    JobResult { slot, outcome: JobOutcome::Memory { part: 0, scrubbed, result } }
}

/// Does all work that is due an hour after the last time, as workers would.
fn settle(broker: &mut Broker) {
    static HOUR: AtomicU64 = AtomicU64::new(0);
    let hour = HOUR.fetch_add(1, Ordering::Relaxed);
    let later = Instant::now() + Duration::from_secs(3600 * hour);
    let options = ZeroingOptions::unlimited();
    for _ in 0..100 {
        broker.tick(later);
        let mut idle = true;
        while let Some(job) = broker.next_job() {
            idle = false;
            let done = match job {
                Job::Work(Work::Build { slot, zone, .. }) => {
                    memory_done(slot, false, SlotMemory::build(&zone, &options))
                }
                Job::Work(Work::Renew { slot, zone, memory, .. }) => {
                    drop(memory);
                    memory_done(slot, false, SlotMemory::build(&zone, &options))
                }
                Job::Work(Work::Scrub { slot, zone, memory, .. }) => {
                    memory_done(slot, true, memory.scrub(&zone, &options).map(|()| memory))
                }
                Job::Work(Work::Pin { .. }) | Job::Close(_) => panic!("no slot has a device"),
            };
            broker.done(done, later);
        }
        if idle {
            return;
        }
    }
    panic!("there is always more to do");
}

fn broker(slots: &[(u64, SlotPages, u32)], limit: u64) -> Broker {
    let mut broker = Broker::new(config(slots, limit), OWN);
    settle(&mut broker);
    broker
}

fn request(mib: u64) -> Take {
    Take { size_bytes: mib * MIB, pages: PagesWanted::Small, node: None }
}

fn refusal(reply: &Reply) -> Option<Refusal> {
    match reply {
        Reply::Refused { reason, .. } => Some(*reason),
        Reply::Granted { .. } | Reply::GrantedPinned(_) => None,
    }
}

fn count(broker: &Broker, state: &str) -> usize {
    broker.slot_counts().iter().filter(|c| c.state == state).map(|c| c.count).sum()
}

#[test]
fn the_smallest_slot_that_fits_is_leased() {
    let slots = [(6 * MIB, SlotPages::Small, 1), (4 * MIB, SlotPages::Small, 1)];
    let mut broker = broker(&slots, 64 * MIB);
    let (reply, file) = broker.take(1, ALICE, &request(4));
    assert_eq!(reply, Reply::Granted { size_bytes: 4 * MIB, pages: SlotPages::Small });
    assert_eq!(file.unwrap().metadata().unwrap().len(), 4 * MIB);
    let (reply, _) = broker.take(1, ALICE, &request(4));
    assert_eq!(reply, Reply::Granted { size_bytes: 6 * MIB, pages: SlotPages::Small });
    assert_eq!(refusal(&broker.take(1, ALICE, &request(4)).0), Some(Refusal::Empty));
    // Half as much again is the most that may be wasted.
    assert_eq!(refusal(&broker.take(1, ALICE, &request(2)).0), Some(Refusal::NoSuchSlot));
    assert_eq!(refusal(&broker.take(1, ALICE, &request(8)).0), Some(Refusal::NoSuchSlot));
    let huge = Take { pages: PagesWanted::Huge2Mib, ..request(4) };
    assert_eq!(refusal(&broker.take(1, ALICE, &huge).0), Some(Refusal::NoSuchSlot));
    let elsewhere = Take { node: Some(3), ..request(4) };
    assert_eq!(refusal(&broker.take(1, ALICE, &elsewhere).0), Some(Refusal::NoSuchSlot));
}

#[test]
fn a_user_has_no_more_than_the_limit_even_while_memory_lingers() {
    let mut broker = broker(&[(4 * MIB, SlotPages::Small, 3)], 4 * MIB);
    let (reply, held) = broker.take(1, ALICE, &request(4));
    assert_eq!(refusal(&reply), None);
    assert_eq!(refusal(&broker.take(2, ALICE, &request(4)).0), Some(Refusal::OverLimit));
    assert_eq!(refusal(&broker.take(3, BOB, &request(4)).0), None);
    assert_eq!(refusal(&broker.take(4, OWN, &request(4)).0), None);
    // The connection is gone, and a process still has the memory.
    broker.closed(1, Instant::now());
    settle(&mut broker);
    assert_eq!(count(&broker, "lingering"), 1);
    assert_eq!(refusal(&broker.take(5, ALICE, &request(4)).0), Some(Refusal::OverLimit));
    drop(held);
    settle(&mut broker);
    assert_eq!(refusal(&broker.take(6, ALICE, &request(4)).0), None);
}

#[test]
fn what_comes_back_is_zero_again_and_only_for_the_same_user() {
    let mut broker = broker(&[(4 * MIB, SlotPages::Small, 1)], 64 * MIB);
    let mut bytes = vec![1; 4 << 20];
    let (_, file) = broker.take(1, ALICE, &request(4));
    file.unwrap().write_all_at(&bytes, 0).unwrap();
    broker.closed(1, Instant::now());
    settle(&mut broker);
    assert_eq!((broker.counters.scrubbed_bytes, broker.counters.returns), (4 * MIB, 1));
    // Another user waits until the memory has gone back to the kernel.
    assert_eq!(refusal(&broker.take(2, BOB, &request(4)).0), Some(Refusal::Empty));
    settle(&mut broker);
    assert_eq!(broker.counters.built_bytes, 8 * MIB);
    let (_, file) = broker.take(2, BOB, &request(4));
    file.unwrap().read_exact_at(&mut bytes, 0).unwrap();
    assert!(memory::is_zero(&bytes));
    broker.closed(2, Instant::now());
    settle(&mut broker);
    let (_, file) = broker.take(3, BOB, &request(4));
    file.unwrap().read_exact_at(&mut bytes, 0).unwrap();
    assert!(memory::is_zero(&bytes));
}

#[test]
fn what_a_user_returned_counts_until_there_is_new_memory() {
    for reuse in [Reuse::Never, Reuse::SameUser] {
        let mut config = config(&[(4 * MIB, SlotPages::Small, 3)], 4 * MIB);
        config.reuse = reuse;
        let mut broker = Broker::new(config, OWN);
        settle(&mut broker);
        for lessee in 1..=3 {
            drop(broker.take(lessee, ALICE, &request(4)));
            broker.closed(lessee, Instant::now());
            broker.tick(Instant::now());
        }
        assert_eq!((count(&broker, "ready"), count(&broker, "in_work")), (2, 1), "{reuse:?}");
        assert_eq!(refusal(&broker.take(4, ALICE, &request(4)).0), Some(Refusal::OverLimit));
        assert_eq!(refusal(&broker.take(5, BOB, &request(4)).0), None, "another user's");
        settle(&mut broker);
        assert_eq!(refusal(&broker.take(6, ALICE, &request(4)).0), None, "{reuse:?}");
    }
}

#[test]
fn memory_of_others_is_released_by_a_worker() {
    let mut broker = broker(&[(4 * MIB, SlotPages::Small, 1)], 64 * MIB);
    drop(broker.take(1, ALICE, &request(4)));
    broker.closed(1, Instant::now());
    settle(&mut broker);
    assert_eq!(refusal(&broker.take(2, BOB, &request(4)).0), Some(Refusal::Empty));
    assert!(matches!(broker.next_job(), Some(Job::Work(Work::Renew { slot: 0, .. }))));
}

#[test]
fn without_reuse_what_comes_back_is_other_memory_for_any_user() {
    let mut config = config(&[(4 * MIB, SlotPages::Small, 1)], 64 * MIB);
    config.reuse = Reuse::default();
    let mut broker = Broker::new(config, OWN);
    settle(&mut broker);
    let (_, file) = broker.take(1, ALICE, &request(4));
    let inode = file.unwrap().metadata().unwrap().ino();
    broker.closed(1, Instant::now());
    settle(&mut broker);
    assert_eq!((broker.counters.scrubbed_bytes, broker.counters.built_bytes), (0, 8 * MIB));
    let (reply, file) = broker.take(2, BOB, &request(4));
    assert_eq!(refusal(&reply), None, "another user has to wait");
    assert_ne!(file.unwrap().metadata().unwrap().ino(), inode);
}

#[test]
fn memory_that_another_process_still_maps_is_not_touched() {
    let mut broker = broker(&[(4 * MIB, SlotPages::Small, 1)], 64 * MIB);
    let (_, file) = broker.take(1, ALICE, &request(4));
    let file = file.unwrap();
    file.write_all_at(b"alive", 4096).unwrap();
    // As after a local migration: the first user is gone, the second has the descriptor.
    broker.closed(1, Instant::now());
    for _ in 0..5 {
        settle(&mut broker);
    }
    let mut bytes = [0; 5];
    file.read_exact_at(&mut bytes, 4096).unwrap();
    assert_eq!((&bytes, count(&broker, "lingering")), (b"alive", 1));
    drop(file);
    settle(&mut broker);
    assert_eq!(count(&broker, "ready"), 1);
}

#[test]
fn memory_that_cannot_be_made_is_tried_again_later_and_later() {
    let mut broker = Broker::new(config(&[(1 << 45, SlotPages::Huge2Mib, 1)], 0), OWN);
    let options = ZeroingOptions::unlimited();
    let mut waits = Vec::new();
    let mut now = Instant::now();
    for _ in 0..3 {
        let next = broker.tick(now);
        assert_eq!(next, None);
        let Some(Job::Work(Work::Build { slot, zone, .. })) = broker.next_job() else {
            panic!("no job");
        };
        let result = SlotMemory::build(&zone, &options);
        assert!(result.is_err());
        broker.done(memory_done(slot, false, result), now);
        let at = broker.tick(now).unwrap();
        waits.push(at - now);
        now = at;
    }
    assert_eq!(waits, [RETRY_MIN, RETRY_MIN * 2, RETRY_MIN * 4]);
    assert_eq!(broker.counters.failures, 3);
}
