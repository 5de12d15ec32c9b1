// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A memory device, seen from its driver and from its VMM.

#![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use memory::{GuestRam, RamConfig, RamLayout, ZoneSpec};

use super::requests::{REQUEST_BYTES, RESPONSE_BYTES};
use super::{Mem, MemConfig, MemError, MemHandle};
use crate::virtio::test_driver::{BORDER, DATA, Driver, readable, writable};
use crate::virtio::{DeviceSnapshot, StateError, VirtioDevice};

const BLOCK: u64 = 2 << 20;
const REGION: u64 = 4 << 30;
const PLUG: u16 = 0;
const UNPLUG: u16 = 1;
const UNPLUG_ALL: u16 = 2;
const STATE: u16 = 3;
const ACK: u16 = 0;
const NACK: u16 = 1;
const BUSY: u16 = 2;
const ERROR: u16 = 3;

struct Guest {
    ram: Arc<GuestRam>,
    device: Mem,
    driver: Driver,
}

fn device(requested_bytes: u64) -> Result<(Arc<GuestRam>, Mem), MemError> {
    device_of_node(requested_bytes, None)
}

fn device_of_node(
    requested_bytes: u64,
    node: Option<u16>,
) -> Result<(Arc<GuestRam>, Mem), MemError> {
    let later =
        ZoneSpec { block_bytes: Some(BLOCK), shared: true, ..ZoneSpec::new("later", 8 * BLOCK) };
    let zones = vec![ZoneSpec { thp: false, ..ZoneSpec::new("now", 2 * BORDER) }, later];
    let ram = Arc::new(GuestRam::new(&RamConfig { zones }, RamLayout::default()).unwrap());
    let config = MemConfig { id: "mem".into(), zone: "later".into(), requested_bytes, node };
    Mem::new(&config, &ram).map(|device| (ram, device))
}

impl Guest {
    fn new(requested_blocks: u64) -> Self {
        let (ram, mut device) = device(requested_blocks * BLOCK).unwrap();
        let driver = Driver::over(ram.guest_memory(), 1, 16);
        driver.activate_all(&mut device);
        Self { ram, device, driver }
    }

    /// Kind and state of the answer.
    fn ask(&mut self, what: u16, gpa: u64, count: u16) -> (u16, u16) {
        let mut request = [0; REQUEST_BYTES];
        request[..2].copy_from_slice(&what.to_le_bytes());
        request[8..16].copy_from_slice(&gpa.to_le_bytes());
        request[16..18].copy_from_slice(&count.to_le_bytes());
        self.driver.write(DATA, &request);
        let response = DATA + 64;
        self.driver.write(response, &[0xee; RESPONSE_BYTES]);
        let buffers = [readable(DATA, 24), writable(response, 10)];
        self.driver.queues[0].add(&buffers);
        self.driver.queues[0].kick();
        assert_eq!(self.driver.wait_used(0).1, 10);
        let bytes = self.driver.read(response, RESPONSE_BYTES);
        let field = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
        (field(0), field(8))
    }

    fn blocks(&mut self, what: u16, first: u64, count: u16) -> u16 {
        self.ask(what, REGION + first * BLOCK, count).0
    }

    fn handle(&self) -> MemHandle {
        self.device.handle()
    }

    fn config(&self, field: u64) -> u64 {
        let mut bytes = [0; 8];
        self.device.read_config(8 * field, &mut bytes);
        u64::from_le_bytes(bytes)
    }
}

#[test]
fn a_guest_gets_what_it_is_to_have_and_no_more() {
    let mut guest = Guest::new(3);
    assert_eq!((guest.config(0), guest.config(2), guest.config(3)), (BLOCK, REGION, 8 * BLOCK));
    assert_eq!((guest.config(5), guest.config(6)), (0, 3 * BLOCK));
    assert_eq!(guest.blocks(PLUG, 1, 2), ACK);
    assert_eq!(guest.blocks(PLUG, 4, 2), NACK);
    assert_eq!(guest.blocks(PLUG, 4, 1), ACK);
    assert_eq!(guest.config(5), 3 * BLOCK);
    assert_eq!(guest.handle().plugged_bytes(), 3 * BLOCK);
    guest.handle().resize(8 * BLOCK).unwrap();
    assert_eq!(guest.driver.interrupt.config_changes(), 1);
    assert_eq!(guest.blocks(PLUG, 5, 3), ACK);
    let states = [(0, 1, 1), (1, 2, 0), (0, 2, 2), (4, 4, 0)];
    for (first, count, state) in states {
        assert_eq!(guest.ask(STATE, REGION + first * BLOCK, count), (ACK, state), "{first}");
    }
}

#[test]
fn unplugged_memory_is_returned_to_the_host() {
    let mut guest = Guest::new(4);
    assert_eq!(guest.blocks(PLUG, 0, 4), ACK);
    let region = Arc::clone(&guest.ram.regions()[1]);
    guest.driver.write(REGION, &vec![7; usize::try_from(4 * BLOCK).unwrap()]);
    guest.handle().resize(2 * BLOCK).unwrap();
    assert_eq!(guest.blocks(UNPLUG, 1, 2), ACK);
    let left = region.populated_runs(&(0..region.len_bytes())).unwrap();
    assert_eq!(left, [0..BLOCK, 3 * BLOCK..4 * BLOCK]);
    assert_eq!(guest.blocks(UNPLUG_ALL, 0, 0), ACK);
    assert!(region.populated_runs(&(0..region.len_bytes())).unwrap().is_empty());
    assert_eq!(guest.config(5), 0);
    assert_eq!(guest.blocks(UNPLUG_ALL, 0, 0), ACK);
}

#[test]
fn requests_that_make_no_sense_are_errors() {
    let mut guest = Guest::new(8);
    assert_eq!(guest.blocks(PLUG, 3, 1), ACK);
    for what in [PLUG, UNPLUG, STATE] {
        for (gpa, count) in [
            (REGION, 0),
            (REGION + 4096, 1),
            (REGION - BLOCK, 1),
            (REGION + 8 * BLOCK, 1),
            (REGION + 7 * BLOCK, 2),
            (u64::MAX - BLOCK + 1, u16::MAX),
            (0, 1),
        ] {
            assert_eq!(guest.ask(what, gpa, count).0, ERROR, "{what} {gpa:#x} {count}");
        }
    }
    assert_eq!(guest.blocks(PLUG, 2, 2), ERROR, "it has one of them");
    assert_eq!(guest.blocks(UNPLUG, 2, 2), ERROR, "it lacks one of them");
    assert_eq!(guest.blocks(4, 0, 1), ERROR);
    assert_eq!(guest.config(5), BLOCK);
    guest.driver.queues[0].add(&[readable(DATA, 23), writable(DATA + 64, 10)]);
    guest.driver.queues[0].kick();
    guest.driver.interrupt.wait_broken();
}

#[test]
fn while_memory_must_stay_as_it_is_drivers_are_told_to_wait() {
    let mut guest = Guest::new(8);
    assert_eq!(guest.blocks(PLUG, 0, 1), ACK);
    let ban = guest.ram.ban_discards("a test");
    assert_eq!((guest.blocks(PLUG, 1, 1), guest.blocks(UNPLUG, 0, 1)), (BUSY, BUSY));
    guest.handle().retry();
    assert_eq!(guest.driver.interrupt.config_changes(), 1);
    drop(ban);
    assert_eq!((guest.blocks(PLUG, 1, 1), guest.blocks(UNPLUG, 0, 1)), (ACK, ACK));
}

#[test]
fn sizes_are_whole_blocks_that_fit() {
    let guest = Guest::new(0);
    for bytes in [9 * BLOCK, BLOCK + 4096, u64::MAX] {
        assert!(matches!(guest.handle().resize(bytes), Err(MemError::Size { .. })), "{bytes}");
    }
    assert_eq!(guest.driver.interrupt.config_changes(), 0);
    assert!(device(9 * BLOCK).is_err());
}

#[test]
fn a_restored_guest_has_the_same_blocks() {
    let mut guest = Guest::new(5);
    assert_eq!((guest.blocks(PLUG, 0, 1), guest.blocks(PLUG, 3, 4)), (ACK, ACK));
    guest.device.pause();
    let state = guest.device.save();
    let (ram, mut other) = device(0).unwrap();
    other.restore(&state).unwrap();
    assert_eq!(ram.regions()[1].usable_runs(), [0..BLOCK, 3 * BLOCK..7 * BLOCK]);
    assert_eq!(other.handle().requested_bytes(), 5 * BLOCK);

    let with = |name: &str, value: serde_json::Value| {
        let mut data = state.data.clone();
        data[name] = value;
        DeviceSnapshot { data, ..state.clone() }
    };
    for bad in [
        with("block_bytes", (4 << 20).into()),
        with("requested_bytes", (9 * BLOCK).into()),
        with("requested_bytes", 1.into()),
        with("plugged", serde_json::json!([[7, 2]])),
        with("plugged", serde_json::json!([[1, 0]])),
        with("plugged", serde_json::json!([[3, 1], [3, 1]])),
        with("plugged", serde_json::json!([[u64::MAX, u64::MAX]])),
    ] {
        let refused = other.restore(&bad);
        assert!(matches!(refused, Err(StateError::Invalid { .. })), "{bad:?}");
    }
}

#[test]
fn more_memory_is_told_and_less_is_not() {
    let mut guest = Guest::new(4);
    let (tell, told) = std::sync::mpsc::channel();
    guest.device.handle().on_growth(Arc::new(move || tell.send(()).unwrap()));
    assert_eq!(guest.ask(PLUG, REGION, 2).0, ACK);
    assert_eq!(told.try_iter().count(), 1);
    assert_eq!(guest.ask(PLUG, REGION, 1).0, ERROR, "it is there already");
    assert_eq!(guest.ask(UNPLUG, REGION, 2).0, ACK);
    assert_eq!(told.try_iter().count(), 0);
}

#[test]
fn memory_that_is_not_plugged_goes_back_although_the_driver_broke_its_queue() {
    let mut guest = Guest::new(8);
    assert_eq!(guest.blocks(PLUG, 0, 2), ACK);
    guest.driver.write(REGION, &vec![7; usize::try_from(2 * BLOCK).unwrap()]);
    let region = Arc::clone(&guest.ram.regions()[1]);
    let populated = || region.populated_runs(&(0..region.len_bytes())).unwrap();
    // Contents that were to arrive are not there when the block goes.
    region.resident().set_absent(512..1024);
    assert_eq!(guest.blocks(UNPLUG, 1, 1), ACK);
    let (before, after) = (0..2 * BLOCK, 0..BLOCK);
    assert_eq!(populated(), std::slice::from_ref(&before));
    guest.driver.queues[0].set_available(1000);
    guest.driver.queues[0].kick();
    guest.driver.interrupt.wait_broken();
    region.resident().set_resident(512..1024);
    guest.handle().retry();
    let until = Instant::now() + Duration::from_secs(20);
    while populated() != std::slice::from_ref(&after) {
        assert!(Instant::now() < until, "it stays: {:?}", populated());
        std::thread::yield_now();
    }
}

#[test]
fn the_node_is_told_to_a_guest_that_has_nodes() {
    let offers = |node| {
        let device = device_of_node(0, node).unwrap().1;
        let mut bytes = [0xff; 8];
        device.read_config(8, &mut bytes);
        (device.features() & 1, u64::from_le_bytes(bytes))
    };
    assert_eq!(offers(None), (0, 0));
    assert_eq!(offers(Some(0)), (1, 0));
    assert_eq!(offers(Some(0x1ff)), (1, 0x1ff));
}
