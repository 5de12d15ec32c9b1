// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Assignment of slots with a device, and when the pool holds the device. The memory is real and small, the
//! device and the iommufd are open files that show which process has them.

#![expect(clippy::unwrap_used, reason = "a test that cannot unwrap has failed")]

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read as _;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt as _;
use std::os::unix::net::UnixStream;

use pci_address::Bdf;
use prezero_pool_client::{PagesWanted, PinnedGrant, PinnedRegion, SlotPages, ZoneWanted};

use super::super::PIN_WAIT_MAX;
use super::*;
use crate::config::{Config, Reuse, SlotDevice, SlotZone};
use crate::slot::{PoolSlotError, ZeroingOptions};
use crate::worker::{Job, JobOutcome, JobResult, Work};

const MIB: u64 = 1 << 20;
const ALICE: u32 = 1000;
const BOB: u32 = 1001;
const EVE: u32 = 1002;

/// The device of slot 0, of slot 1, and so on.
fn address(slot: usize) -> Bdf {
    format!("0000:{:02x}:00.0", 0x65 + slot).parse().unwrap()
}

/// A broker with slots, and the devices that workers got.
struct Pool {
    broker: Broker,
    now: Instant,
    /// By slot: ends when neither the pool nor a user has the device.
    devices: BTreeMap<usize, UnixStream>,
    /// Another process has the devices.
    is_taken: bool,
    /// What is still to be closed.
    leftovers: Vec<(usize, Option<File>)>,
    /// Zones that cannot be made.
    failing: Vec<usize>,
}

fn zone(mib: u64) -> SlotZone {
    SlotZone { size_bytes: mib * MIB, pages: SlotPages::Small, node: None }
}

/// Where these zones are, in a VM whose holes are far away.
fn regions(zones: &[SlotZone]) -> Vec<PinnedRegion> {
    let mut gpa = 0;
    let region = |(zone, SlotZone { size_bytes, .. }): (usize, &SlotZone)| {
        let region = PinnedRegion { zone, gpa, len_bytes: *size_bytes, offset: 0 };
        gpa += size_bytes;
        region
    };
    zones.iter().enumerate().map(region).collect()
}

impl Pool {
    fn new() -> Self {
        Self::with(&[&[zone(4)]])
    }

    /// Slots of these zones, with a device each.
    fn with(slots: &[&[SlotZone]]) -> Self {
        let mut config = Config::parse("socket = '/s'\n[limits]\ndefault = '8M'").unwrap();
        config.reuse = Reuse::SameUser;
        let class = |(slot, zones): (usize, &&[SlotZone])| {
            let (address, users) = (address(slot), vec![ALICE, BOB]);
            let device = Some(SlotDevice { address, users, high_hole: None });
            Class { zones: zones.to_vec(), count: 1, device }
        };
        config.classes = slots.iter().enumerate().map(class).collect();
        let broker = Broker::new(config, 7);
        let (devices, leftovers, failing) = (BTreeMap::new(), Vec::new(), Vec::new());
        Self { broker, now: Instant::now(), devices, is_taken: false, leftovers, failing }
    }

    fn is_free(&self, slot: usize) -> bool {
        // The other end is closed.
        self.devices.get(&slot).is_none_or(|mut end| matches!(end.read(&mut [0]), Ok(0)))
    }

    fn is_device_free(&self) -> bool {
        self.is_free(0)
    }

    fn pin(
        &mut self,
        slot: usize,
        class: &Class,
        memory: &[SlotMemory],
    ) -> Result<Prepinned, PinError> {
        if self.is_taken || !self.is_free(slot) {
            return Err(PinError::NoDevice);
        }
        let (ours, theirs) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        self.devices.insert(slot, ours);
        let grant = PinnedGrant {
            device: address(slot),
            zones: Vec::new(),
            piece_bytes: MIB,
            device_id: 1,
            space_id: 2,
            table_id: 3,
            regions: regions(&class.zones),
        };
        let device = File::from(OwnedFd::from(theirs));
        // As iommufd has.
        let iommufd = memory[0].lease().unwrap();
        Ok(Prepinned { iommufd, device, grant })
    }

    fn done(&mut self, slot: usize, outcome: JobOutcome) {
        self.broker.done(JobResult { slot, outcome }, self.now);
    }

    fn make(&mut self, part: usize, zone: &SlotZone) -> Result<SlotMemory, PoolSlotError> {
        if self.failing.contains(&part) {
            return Err(PoolSlotError::NotZero { at: 0 });
        }
        SlotMemory::build(zone, &ZeroingOptions::unlimited())
    }

    /// One job, as a worker would do it; what takes long is left over.
    fn work(&mut self) -> bool {
        let memory = |part, scrubbed, result| JobOutcome::Memory { part, scrubbed, result };
        match self.broker.next_job() {
            None => return false,
            Some(Job::Work(Work::Build { slot, part, zone })) => {
                let made = self.make(part, &zone);
                self.done(slot, memory(part, false, made));
            }
            Some(Job::Work(Work::Renew { slot, part, zone, memory: old })) => {
                drop(old);
                let made = self.make(part, &zone);
                self.done(slot, memory(part, false, made));
            }
            Some(Job::Work(Work::Scrub { slot, part, zone, memory: old })) => {
                let cleared = old.scrub(&zone, &ZeroingOptions::unlimited()).map(|()| old);
                self.done(slot, memory(part, true, cleared));
            }
            Some(Job::Work(Work::Pin { slot, class, order })) => {
                // Or it was taken back.
                let Some(memory) = order.begin() else { return true };
                let result = self.pin(slot, &class, &memory);
                if result.is_err() {
                    self.leftovers.push((slot, None));
                }
                self.done(slot, JobOutcome::Pinned { memory, result });
            }
            Some(Job::Close(Closing::Prepinned { slot, prepinned })) => {
                let Prepinned { iommufd, device, .. } = prepinned;
                drop(device);
                self.done(slot, JobOutcome::Released);
                self.leftovers.push((slot, Some(iommufd)));
            }
            Some(Job::Close(Closing::Sent(files))) => drop(files),
            Some(Job::Close(Closing::Failed { .. })) => {
                panic!("only a worker knows what it opened")
            }
        }
        true
    }

    /// What takes long is over.
    fn unpin(&mut self) {
        for (slot, iommufd) in std::mem::take(&mut self.leftovers) {
            drop(iommufd);
            self.done(slot, JobOutcome::Unpinned);
        }
    }

    fn settle(&mut self, seconds: u64) {
        self.now += Duration::from_secs(seconds);
        self.unpin();
        self.broker.tick(self.now);
        while self.work() {
            self.unpin();
            self.broker.tick(self.now);
        }
    }

    fn take(&mut self, uid: u32) -> PinnedAnswer {
        let answer = self.ask(uid, &request());
        self.waited(uid, &request(), answer)
    }

    fn ask(&mut self, uid: u32, request: &TakePinned) -> PinnedAnswer {
        self.broker.take_pinned(1, uid, request, None, self.now)
    }

    /// Asks again, as long as there is something to do for workers.
    fn waited(&mut self, uid: u32, request: &TakePinned, first: PinnedAnswer) -> PinnedAnswer {
        let mut answer = first;
        while let PinnedAnswer::Later(waited) = answer {
            let worked = self.work();
            answer = self.broker.take_pinned(1, uid, request, Some(waited), self.now);
            if !worked {
                break;
            }
        }
        answer
    }

    fn asks(&mut self, uid: u32, request: &TakePinned) -> PinnedAnswer {
        let answer = self.ask(uid, request);
        self.waited(uid, request, answer)
    }

    fn state(&self) -> &'static str {
        self.broker.slots[0].state.name()
    }
}

fn request_for(devices: &[usize], zones: &[SlotZone]) -> TakePinned {
    let wanted = |zone: &SlotZone| {
        let (pages, node) = (PagesWanted::Small, zone.node);
        ZoneWanted { size_bytes: zone.size_bytes, pages, node }
    };
    TakePinned {
        devices: devices.iter().map(|slot| address(*slot)).collect(),
        zones: zones.iter().map(wanted).collect(),
        regions: regions(zones),
    }
}

fn request() -> TakePinned {
    request_for(&[0], &[zone(4)])
}

fn refusal(answer: &PinnedAnswer) -> Option<Refusal> {
    match answer {
        PinnedAnswer::Now(Reply::Refused { reason, .. }, None) => Some(*reason),
        PinnedAnswer::Now(Reply::GrantedPinned(_), Some(_)) | PinnedAnswer::Later(_) => None,
        PinnedAnswer::Now(..) => panic!("{answer:?}"),
    }
}

fn text(answer: PinnedAnswer) -> String {
    match answer {
        PinnedAnswer::Now(Reply::Refused { text, .. }, None) => text,
        other => panic!("{other:?}"),
    }
}

fn granted(answer: PinnedAnswer) -> PinnedFiles {
    match answer {
        PinnedAnswer::Now(Reply::GrantedPinned(_), Some(files)) => files,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_user_that_is_named_for_a_device_may_ask_without_a_limit() {
    let mut pool = Pool::new();
    pool.broker.config.limits.default_bytes = 0;
    assert!(pool.broker.may_ask(ALICE) && !pool.broker.may_ask(BOB + 1000));
}

#[test]
fn the_device_goes_with_the_memory_and_comes_back_with_it() {
    let mut pool = Pool::new();
    pool.settle(0);
    assert_eq!((pool.state(), pool.is_device_free()), ("ready", false));
    let files = granted(pool.take(ALICE));
    files.memory[0].write_all_at(&[1; 4096], 0).unwrap();
    assert_eq!(pool.state(), "lent");
    assert_eq!(refusal(&pool.take(ALICE)), Some(Refusal::Empty), "lent twice");
    drop(files);
    assert!(pool.is_device_free(), "the pool has kept a descriptor of what it lent");
    pool.broker.closed(1, pool.now);
    pool.settle(20);
    assert_eq!((pool.state(), pool.is_device_free()), ("ready", false));
    let mut bytes = vec![1; 4 << 20];
    granted(pool.take(ALICE)).memory[0].read_exact_at(&mut bytes, 0).unwrap();
    assert!(memory::is_zero(&bytes));
}

#[test]
fn what_the_user_passed_on_keeps_the_memory_from_others() {
    let mut pool = Pool::new();
    pool.settle(0);
    let PinnedFiles { memory, iommufd, device } = granted(pool.take(ALICE));
    drop((memory, device));
    pool.broker.closed(1, pool.now);
    pool.settle(20);
    assert_eq!(pool.state(), "lingering");
    drop(iommufd);
    pool.settle(20);
    assert_eq!(pool.state(), "ready");
}

#[test]
fn a_user_that_is_not_named_gets_nothing_and_disturbs_no_other() {
    let mut pool = Pool::new();
    pool.settle(0);
    assert_eq!(refusal(&pool.take(EVE)), Some(Refusal::NotAllowed));
    assert_eq!(pool.state(), "ready");
    let elsewhere = request_for(&[1], &[zone(4)]);
    assert_eq!(refusal(&pool.ask(ALICE, &elsewhere)), Some(Refusal::NoSuchSlot));
    assert_eq!(pool.state(), "ready");
    // Nor can its memory be leased alone.
    let memory =
        prezero_pool_client::Take { size_bytes: 4 * MIB, pages: PagesWanted::Small, node: None };
    assert!(pool.broker.take(1, ALICE, &memory).1.is_none());
    assert_eq!(refusal(&pool.take(7)), None, "the pool's own user");
}

/// Makes a request one for another VM.
type Change = fn(&mut TakePinned);

#[test]
fn a_refused_client_finds_the_device_free() {
    let changes: [(Change, &str); 5] = [
        (|request| request.zones[0].size_bytes += MIB, "and the VM has 5242880 bytes"),
        (|request| request.regions[0].gpa += 4096, "0x0 where the VM has 4194304 bytes at 0x1000"),
        (|request| request.zones[0].pages = PagesWanted::Huge2Mib, "Huge2Mib"),
        (|request| request.zones[0].node = Some(0), "pages of node 0"),
        (|request| request.zones.push(request.zones[0]), "for 1 zones, and the VM has 2"),
    ];
    for (change, named) in changes {
        let mut pool = Pool::new();
        pool.settle(0);
        let mut other = request();
        change(&mut other);
        // Not before it is.
        let first = pool.ask(ALICE, &other);
        assert!(matches!(first, PinnedAnswer::Later(_)), "{first:?}");
        assert!(!pool.is_device_free());
        // Closing it resets it.
        pool.now += Duration::from_secs(8);
        let answer = pool.waited(ALICE, &other, first);
        assert_eq!(refusal(&answer), Some(Refusal::NoSuchSlot));
        assert!(pool.is_device_free());
        let text = text(answer);
        assert!(text.contains(named) && text.len() < 512, "{text}");
        pool.settle(3600);
        assert!(pool.is_device_free(), "the VM may open it, or open it again");
        pool.broker.closed(1, pool.now);
        pool.is_taken = true;
        pool.settle(60);
        assert_eq!((pool.state(), pool.broker.counters.pin_failures), ("waiting", 1));
        pool.is_taken = false;
        pool.settle(60);
        assert_eq!(pool.state(), "ready");
    }
}

#[test]
fn memory_that_reaches_the_high_hole_is_not_that_of_a_vm_without_one() {
    let mut pool = Pool::new();
    pool.settle(0);
    let State::Ready { prepinned: Some(prepinned), .. } = &mut pool.broker.slots[0].state else {
        panic!("not ready");
    };
    // 4 MiB stand for terabytes.
    let region = |gpa, len_bytes, offset| PinnedRegion { zone: 0, gpa, len_bytes, offset };
    let split = vec![region(0, 3 * MIB, 0), region(1 << 40, MIB, 3 * MIB)];
    prepinned.grant.regions.clone_from(&split);
    let answer = pool.asks(ALICE, &TakePinned { regions: split, ..request() });
    drop(granted(answer));

    let mut pool = Pool::new();
    pool.settle(0);
    let State::Ready { prepinned: Some(prepinned), .. } = &mut pool.broker.slots[0].state else {
        panic!("not ready");
    };
    prepinned.grant.regions = vec![region(0, 3 * MIB, 0), region(1 << 40, MIB, 3 * MIB)];
    let answer = pool.asks(ALICE, &request());
    assert!(pool.is_device_free());
    let text = text(answer);
    assert!(text.contains("3145728 bytes at 0x0 where the VM has 4194304"), "{text}");
    assert!(text.contains("high_hole"), "{text}");
}

#[test]
fn what_is_mapped_goes_after_its_device_and_before_it_is_mapped_again() {
    let mut pool = Pool::new();
    pool.settle(0);
    let other = request_for(&[0], &[zone(8)]);
    let first = pool.ask(ALICE, &other);
    assert_eq!(refusal(&pool.waited(ALICE, &other, first)), Some(Refusal::NoSuchSlot));
    // To unpin terabytes takes longer than all else.
    assert_eq!((pool.leftovers.len(), pool.is_device_free()), (1, true));
    assert_eq!(refusal(&pool.take(ALICE)), Some(Refusal::Empty));
    pool.now += Duration::from_mins(10);
    pool.broker.closed(1, pool.now);
    pool.broker.tick(pool.now);
    assert!(!pool.work(), "it would be pinned twice");
    pool.settle(60);
    assert_eq!(pool.state(), "ready");
}

#[test]
fn memory_of_one_user_is_not_mapped_for_another() {
    let mut pool = Pool::new();
    pool.settle(0);
    drop(granted(pool.take(ALICE)));
    pool.broker.closed(1, pool.now);
    pool.settle(20);
    assert_eq!(refusal(&pool.take(BOB)), Some(Refusal::Empty));
    assert!(pool.is_device_free());
    assert!(pool.broker.jobs.is_empty(), "memory whose pages are pinned is not made anew");
    pool.unpin();
    assert!(
        matches!(pool.broker.jobs.front(), Some(Job::Work(Work::Renew { .. }))),
        "released by the thread that serves all clients"
    );
    let before = pool.broker.counters.built_bytes;
    pool.settle(20);
    assert_eq!(pool.broker.counters.built_bytes, before + 4 * MIB, "not made anew");
    granted(pool.take(BOB));
}

#[test]
fn who_asks_while_the_pool_has_the_device_in_its_hands_waits() {
    let mut pool = Pool::new();
    pool.is_taken = true;
    pool.settle(0);
    assert_eq!(pool.state(), "waiting");
    // A VM that ends, and one that starts at once: the device is free by then.
    pool.is_taken = false;
    assert!(matches!(pool.ask(ALICE, &request()), PinnedAnswer::Later(_)));
    let answer = pool.ask(ALICE, &request());
    assert!(matches!(answer, PinnedAnswer::Later(_)));
    drop(granted(pool.waited(ALICE, &request(), answer)));

    let mut pool = Pool::new();
    pool.is_taken = true;
    pool.settle(0);
    let answer = pool.ask(ALICE, &request());
    let answer = pool.waited(ALICE, &request(), answer);
    assert_eq!(refusal(&answer), Some(Refusal::Empty), "tried forever");
}

#[test]
fn a_user_whose_memory_cannot_be_sent_finds_the_device_free() {
    let mut pool = Pool::new();
    pool.settle(0);
    let State::Ready { memory, .. } = &mut pool.broker.slots[0].state else { panic!("not ready") };
    // No path opens a socket.
    memory[0] = File::from(OwnedFd::from(UnixStream::pair().unwrap().0)).into();
    let first = pool.ask(ALICE, &request());
    assert!(matches!(first, PinnedAnswer::Later(_)) && !pool.is_device_free(), "{first:?}");
    assert_eq!(refusal(&pool.waited(ALICE, &request(), first)), Some(Refusal::Failed));
    assert!(pool.is_device_free());
    pool.settle(3600);
    assert_eq!((pool.state(), pool.is_device_free()), ("waiting", true), "the VM opens it");
}

#[test]
fn a_limit_holds_for_slots_with_devices_too() {
    let mut pool = Pool::new();
    pool.broker.config.limits.default_bytes = MIB;
    pool.settle(0);
    assert_eq!(refusal(&pool.take(ALICE)), Some(Refusal::OverLimit));
    assert!(pool.is_device_free());
}

#[path = "pinned_large_tests.rs"]
mod large;
#[path = "pinned_left_tests.rs"]
mod left;
