// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Assignment of slots with a device, and when the pool holds the device. The memory is real and small, the
//! device and the iommufd are open files that show which process has them.

#![expect(clippy::unwrap_used, reason = "a test that cannot unwrap has failed")]

use std::io::Read as _;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt as _;
use std::os::unix::net::UnixStream;

use pci_address::Bdf;
use prezero_pool_client::{PagesWanted, PinnedGrant, SlotPages};

use super::*;
use crate::config::{Config, Reuse, SlotDevice};
use crate::slot::ZeroingOptions;
use crate::worker::{JobOutcome, JobResult};

const MIB: u64 = 1 << 20;
const ALICE: u32 = 1000;
const BOB: u32 = 1001;
const EVE: u32 = 1002;

fn address() -> Bdf {
    "0000:65:00.0".parse().unwrap()
}

/// A broker with one slot, and the devices that workers got.
struct Pool {
    broker: Broker,
    now: Instant,
    /// Ends when neither the pool nor a user has the device.
    device: Option<UnixStream>,
    /// Another process has it.
    is_taken: bool,
}

impl Pool {
    fn new() -> Self {
        let mut config = Config::parse("socket = '/s'\n[limits]\ndefault = '8M'").unwrap();
        config.reuse = Reuse::SameUser;
        let device = Some(SlotDevice { address: address(), users: vec![ALICE, BOB] });
        let (pages, node) = (SlotPages::Small, None);
        config.classes = vec![Class { size_bytes: 4 * MIB, pages, node, count: 1, device }];
        let broker = Broker::new(config, 7);
        Self { broker, now: Instant::now(), device: None, is_taken: false }
    }

    fn is_device_free(&self) -> bool {
        // The other end is closed.
        self.device.as_ref().is_none_or(|mut end| matches!(end.read(&mut [0]), Ok(0)))
    }

    fn pin(&mut self, memory: &SlotMemory) -> Result<Prepinned, PinError> {
        if self.is_taken || !self.is_device_free() {
            return Err(PinError::NoDevice);
        }
        let (ours, theirs) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        self.device = Some(ours);
        let grant = PinnedGrant {
            size_bytes: 4 * MIB,
            pages: SlotPages::Small,
            piece_bytes: MIB,
            device_id: 1,
            space_id: 2,
            table_id: 3,
            regions: Vec::new(),
        };
        let device = File::from(OwnedFd::from(theirs));
        // As iommufd has.
        let iommufd = memory.lease().unwrap();
        Ok(Prepinned { iommufd, device, grant })
    }

    /// One job, as a worker would do it.
    fn work(&mut self) -> bool {
        let options = ZeroingOptions::unlimited();
        let memory = |scrubbed, result| JobOutcome::Memory { scrubbed, result };
        let (slot, outcome) = match self.broker.next_job() {
            None => return false,
            Some(Job::Build { slot, class }) => {
                (slot, memory(false, SlotMemory::build(&class, &options)))
            }
            Some(Job::Renew { slot, class, memory: old }) => {
                drop(old);
                (slot, memory(false, SlotMemory::build(&class, &options)))
            }
            Some(Job::Scrub { slot, class, memory: old }) => {
                (slot, memory(true, old.scrub(&class, &options).map(|()| old)))
            }
            Some(Job::Pin { slot, memory, .. }) => {
                let result = self.pin(&memory);
                (slot, JobOutcome::Pinned { memory, result })
            }
        };
        self.broker.done(JobResult { slot, outcome }, self.now);
        true
    }

    fn settle(&mut self, seconds: u64) {
        self.now += Duration::from_secs(seconds);
        self.broker.tick(self.now);
        while self.work() {
            self.broker.tick(self.now);
        }
    }

    fn take(&mut self, uid: u32) -> PinnedAnswer {
        self.ask(uid, &request())
    }

    fn ask(&mut self, uid: u32, request: &TakePinned) -> PinnedAnswer {
        self.broker.take_pinned(1, uid, request, false, self.now)
    }

    fn state(&self) -> &'static str {
        self.broker.slots[0].state.name()
    }
}

fn request() -> TakePinned {
    let layout = RamLayout::default();
    TakePinned {
        size_bytes: 4 * MIB,
        pages: PagesWanted::Small,
        node: None,
        hole_start: layout.hole_start,
        hole_end: layout.hole_end,
        device: address(),
    }
}

fn refusal(answer: &PinnedAnswer) -> Option<Refusal> {
    match answer {
        PinnedAnswer::Now(Reply::Refused { reason, .. }, None) => Some(*reason),
        PinnedAnswer::Now(Reply::GrantedPinned(_), Some(_)) | PinnedAnswer::Later => None,
        PinnedAnswer::Now(..) => panic!("{answer:?}"),
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
    files.memory.write_all_at(&[1; 4096], 0).unwrap();
    assert_eq!(pool.state(), "lent");
    assert_eq!(refusal(&pool.take(ALICE)), Some(Refusal::Empty), "lent twice");
    drop(files);
    assert!(pool.is_device_free(), "the pool has kept a descriptor of what it lent");
    pool.broker.closed(1, pool.now);
    pool.settle(20);
    assert_eq!((pool.state(), pool.is_device_free()), ("ready", false));
    let mut bytes = vec![1; 4 << 20];
    granted(pool.take(ALICE)).memory.read_exact_at(&mut bytes, 0).unwrap();
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
    let elsewhere = TakePinned { device: "0000:66:00.0".parse().unwrap(), ..request() };
    assert_eq!(refusal(&pool.ask(ALICE, &elsewhere)), Some(Refusal::NoSuchSlot));
    assert_eq!(pool.state(), "ready");
    // Nor can its memory be leased alone.
    let memory =
        prezero_pool_client::Take { size_bytes: 4 * MIB, pages: PagesWanted::Small, node: None };
    assert!(pool.broker.take(1, ALICE, &memory).1.is_none());
    assert_eq!(refusal(&pool.take(7)), None, "the pool's own user");
}

#[test]
fn a_refused_client_finds_the_device_free() {
    for change in [
        |request: &mut TakePinned| request.size_bytes += MIB,
        |request: &mut TakePinned| request.hole_start -= 4096,
        |request: &mut TakePinned| request.pages = PagesWanted::Huge2Mib,
        |request: &mut TakePinned| request.node = Some(0),
    ] {
        let mut pool = Pool::new();
        pool.settle(0);
        let mut other = request();
        change(&mut other);
        assert_eq!(refusal(&pool.ask(ALICE, &other)), Some(Refusal::NoSuchSlot));
        assert!(pool.is_device_free());
        pool.settle(9);
        assert!(pool.is_device_free(), "the pool was faster than the VM");
        pool.is_taken = true;
        pool.settle(60);
        assert_eq!(pool.state(), "waiting");
        pool.is_taken = false;
        pool.settle(60);
        assert_eq!(pool.state(), "ready");
    }
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
    assert!(
        matches!(pool.broker.jobs.front(), Some(Job::Renew { .. })),
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
    assert!(matches!(pool.take(ALICE), PinnedAnswer::Later));
    assert!(matches!(pool.take(ALICE), PinnedAnswer::Later));
    pool.work();
    let answer = pool.broker.take_pinned(1, ALICE, &request(), true, pool.now);
    drop(granted(answer));

    let mut pool = Pool::new();
    pool.is_taken = true;
    pool.settle(0);
    assert!(matches!(pool.take(ALICE), PinnedAnswer::Later));
    pool.work();
    let answer = pool.broker.take_pinned(1, ALICE, &request(), true, pool.now);
    assert_eq!(refusal(&answer), Some(Refusal::Empty), "tried forever");
}

#[test]
fn a_limit_holds_for_slots_with_devices_too() {
    let mut pool = Pool::new();
    pool.broker.config.limits.default_bytes = MIB;
    pool.settle(0);
    assert_eq!(refusal(&pool.take(ALICE)), Some(Refusal::OverLimit));
    assert!(pool.is_device_free());
}
