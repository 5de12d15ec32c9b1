// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests of vDPA devices, with one that is scripted.

#![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use memory::{GuestRam, RamConfig, RamLayout, ZoneSpec};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::offer::Offer;
use super::scripted::{Answers, Fails, Scripted, Seen};
use super::session::Session;
use super::*;
use crate::log_limit::kept;
use crate::virtio::test_driver::Driver;
use crate::virtio::{Counters as _, VirtioDevice};

const MIB: u64 = 1 << 20;
/// Longer than any of these tests takes.
const PATIENCE: Duration = Duration::from_secs(20);

fn ram(zones: usize) -> Arc<GuestRam> {
    let zone = |index| ZoneSpec { shared: true, ..ZoneSpec::new(format!("z{index}"), 4 * MIB) };
    let config = RamConfig { zones: (0..zones).map(zone).collect() };
    Arc::new(GuestRam::new(&config, RamLayout::default()).unwrap())
}

fn config(num_queues: u16) -> VdpaDeviceConfig {
    VdpaDeviceConfig { id: "vdpa0".to_owned(), path: "/nowhere".into(), num_queues }
}

fn never() -> Fails {
    Box::new(|_| None)
}

/// Fails each call whose name and arguments begin like this.
fn fails(begin: &str) -> Fails {
    let begin = begin.to_owned();
    Box::new(move |call| call.starts_with(&begin).then(|| io::Error::from_raw_os_error(libc::EIO)))
}

fn open(
    answers: Answers,
    fails: Fails,
    num_queues: u16,
    ram: &Arc<GuestRam>,
) -> (Result<Vdpa, VdpaError>, Arc<Seen>) {
    let scripted = Scripted::new(answers, fails);
    let seen = Arc::clone(&scripted.seen);
    (Vdpa::over(Box::new(scripted), config(num_queues), ram), seen)
}

/// A device that is open, and its driver in the same memory.
fn opened(answers: Answers, fails: Fails) -> (Vdpa, Arc<Seen>, Driver) {
    let ram = ram(1);
    let (device, seen) = open(answers, fails, 1, &ram);
    seen.calls.lock().clear();
    (device.unwrap(), seen, Driver::over(ram.guest_memory(), 1, 16))
}

/// Waits until something is so.
fn wait(what: &str, is_so: impl Fn() -> bool) {
    let until = Instant::now() + PATIENCE;
    while !is_so() {
        assert!(Instant::now() < until, "{what}");
        std::thread::yield_now();
    }
}

fn wait_for_call(seen: &Seen, call: &str) {
    wait(call, || seen.calls.lock().iter().any(|made| made == call));
}

/// The calls by which a device with one queue starts, in order (virtio 1.3, 3.1.1).
const START: [&str; 16] = [
    "set_status 0",
    "set_status 1",
    "set_status 3",
    "set_features 0x320000200",
    "set_status 11",
    "begin_batch",
    "map 0x0 0x400000",
    "end_batch",
    "set_vring_num 0 16",
    "set_vring_addr 0 0x0 0x100 0x128",
    "set_vring_base 0 0",
    "set_vring_call 0",
    "set_config_call",
    "enable_vring 0",
    "set_status 15",
    "set_vring_kick 0",
];

#[test]
fn a_device_starts_and_is_reset_in_the_order_of_the_specification() {
    let (mut device, seen, driver) = opened(Answers::default(), never());
    driver.activate_all(&mut device);
    wait_for_call(&seen, "set_vring_kick 0");
    assert_eq!(*seen.calls.lock(), START);
    seen.calls.lock().clear();
    device.reset();
    let reset = ["suspend", "set_status 0", "begin_batch", "unmap 0x0 0x400000", "end_batch"];
    assert_eq!(*seen.calls.lock(), reset);
    assert!(seen.mapped.lock().is_empty());
    // What the driver has notified of before it set the device up is not lost.
    assert_eq!(seen.kicks.lock()[&0].read().unwrap(), 1);
}

#[test]
fn a_device_without_batches_gets_each_mapping_by_itself() {
    let answers = Answers { backend_features: 1 << 1, ..Answers::default() };
    let (mut device, seen, driver) = opened(answers, never());
    driver.activate_all(&mut device);
    wait_for_call(&seen, "set_vring_kick 0");
    assert_eq!(seen.mapped.lock().len(), 1);
    device.reset();
    let calls = seen.calls.lock();
    assert!(!calls.iter().any(|call| call.contains("batch")), "{calls:?}");
    assert!(seen.mapped.lock().is_empty());
}

#[test]
fn every_call_that_fails_while_a_device_is_opened_is_named_and_leaves_nothing() {
    for (call, name) in [
        ("set_owner", "VHOST_SET_OWNER"),
        ("set_status", "VHOST_VDPA_SET_STATUS"),
        ("backend_features", "VHOST_GET_BACKEND_FEATURES"),
        ("set_backend_features", "VHOST_SET_BACKEND_FEATURES"),
        ("device_id", "VHOST_VDPA_GET_DEVICE_ID"),
        ("queues_count", "VHOST_VDPA_GET_VQS_COUNT"),
        ("queue_size_max", "VHOST_VDPA_GET_VRING_NUM"),
        ("config_len_bytes", "VHOST_VDPA_GET_CONFIG_SIZE"),
        ("features", "VHOST_GET_FEATURES"),
        ("read_config", "VHOST_VDPA_GET_CONFIG"),
        ("iova_range", "VHOST_VDPA_GET_IOVA_RANGE"),
    ] {
        let ram = ram(1);
        // With several queues, so that its configuration is read.
        let answers = Answers { features: 1 << 32 | 1 << 12, ..Answers::default() };
        let error = open(answers, fails(call), 1, &ram).0.err().unwrap().to_string();
        assert!(error.ends_with(name), "{call}: {error}");
        assert_eq!(ram.discards_banned(), None, "{call}");
    }
}

#[test]
fn every_call_that_fails_while_a_device_starts_costs_its_driver_a_reset_and_leaves_nothing_mapped()
{
    for call in START.iter().skip(1).copied().chain(["status"]) {
        let (mut device, seen, driver) = opened(Answers::default(), fails(call));
        driver.activate_all(&mut device);
        driver.interrupt.wait_broken();
        let calls = seen.calls.lock().clone();
        let last = calls.iter().rposition(|made| made.starts_with("set_status")).unwrap();
        assert_eq!(calls[last], "set_status 0", "{call}: {calls:?}");
        assert!(seen.mapped.lock().is_empty(), "{call}: {calls:?}");
        let count = |what: &str| calls.iter().filter(|made| *made == what).count();
        // One that has not begun has no end.
        let begun = if call == "begin_batch" { 0 } else { count("begin_batch") };
        assert_eq!(count("end_batch"), begun, "{call}: a batch is left open: {calls:?}");
        // A driver may try again, and the device may not work again.
        device.reset();
        drop(device);
    }
}

#[test]
fn a_device_that_does_not_accept_what_it_offers_is_left() {
    for (refused_status, last) in [(8, "set_status 11"), (4, "set_status 15")] {
        let answers = Answers { refused_status, ..Answers::default() };
        let (mut device, seen, driver) = opened(answers, never());
        driver.activate_all(&mut device);
        driver.interrupt.wait_broken();
        assert!(seen.mapped.lock().is_empty());
        let calls = seen.calls.lock().clone();
        assert!(!calls.contains(&"set_vring_kick 0".to_owned()));
        let reset = calls.iter().rposition(|made| made == "set_status 0").unwrap();
        let before = calls[..reset].iter().rfind(|made| made.starts_with("set_status")).unwrap();
        assert_eq!(before, last);
        device.reset();
    }
}

#[test]
fn answers_that_no_device_can_have_are_refused_by_name() {
    let usual = Answers::default;
    let ram = ram(1);
    for (answers, num_queues, why) in [
        (Answers { device_id: 0, ..usual() }, 1, "type is 0"),
        (Answers { device_id: 0x1_0002, ..usual() }, 1, "type is 65538"),
        (Answers { queues: 1, ..usual() }, 2, "has 1 queues"),
        (Answers { device_id: 1, ..usual() }, 1, "at least 2 queues"),
        (Answers { queue_size: 0, ..usual() }, 1, "0 descriptors"),
        (Answers { queue_size: 1, ..usual() }, 1, "1 descriptors"),
        (Answers { features: 1 << 33, ..usual() }, 1, "VIRTIO_F_VERSION_1"),
        (Answers { backend_features: 0, ..usual() }, 1, "IOTLB_MSG_V2"),
        (Answers { iova: 0..=4 * MIB - 2, ..usual() }, 1, "can reach"),
        (Answers { iova: 1..=u64::MAX, ..usual() }, 1, "can reach"),
    ] {
        let error = open(answers, never(), num_queues, &ram).0.err().unwrap().to_string();
        assert!(error.contains(why), "{error}");
    }
    assert!(open(Answers { iova: 0..=4 * MIB - 1, ..usual() }, never(), 1, &ram).0.is_ok());
}

#[test]
fn sizes_of_queues_are_powers_of_two() {
    for (says, size) in [(2, 2), (255, 128), (256, 256), (0x8000, 0x8000), (0xffff, 0x8000)] {
        let answers = Answers { queue_size: says, ..Answers::default() };
        let device = open(answers, never(), 3, &ram(1)).0.unwrap();
        assert_eq!(device.queue_sizes_max(), [size; 3]);
    }
}

#[test]
fn the_guest_is_offered_what_driver_and_device_alone_are_concerned_with() {
    let offered = |device_id, features, num_queues, config: &[u8]| {
        let config_len_bytes = u32::try_from(config.len()).unwrap();
        let config = config.to_vec();
        let answers = Answers {
            device_id,
            features,
            queues: 64,
            config,
            config_len_bytes,
            ..Answers::default()
        };
        open(answers, never(), num_queues, &ram(1)).0.unwrap().features()
    };
    // A type of which nothing is known.
    let all = offered(26, u64::MAX, 1, &[]);
    let of_transport = (24..50).filter(|bit| all & 1 << bit != 0).collect::<Vec<_>>();
    // Indirect descriptors, event indexes, VERSION_1, ORDER_PLATFORM.
    assert_eq!(of_transport, [28, 29, 32, 36]);
    assert_eq!(all & 0xff_ffff, 0xff_ffff);
    // Network: the control queue, pairs, and commands.
    let (control, pairs, commands) = (1 << 17, 1 << 22, 1 << 23);
    let net = |num_queues, pairs_max: u8| {
        let config = [0, 0, 0, 0, 0, 0, 0, 0, pairs_max, 0];
        offered(1, u64::MAX, num_queues, &config) & (control | pairs | commands)
    };
    assert_eq!(net(2, 1), 0);
    assert_eq!(net(3, 1), control | pairs | commands);
    assert_eq!(net(3, 2), control | commands, "the control queue would be queue 4");
    assert_eq!(net(5, 2), control | pairs | commands);
    // Block: as many queues as it says.
    let mut config = [0; 60];
    config[34] = 4;
    let several = 1 << 12;
    assert_eq!(offered(2, u64::MAX, 1, &config) & several, 0);
    assert_eq!(offered(2, u64::MAX, 4, &config) & several, several);
    // A configuration that ends before the field.
    assert_eq!(offered(2, u64::MAX, 1, &config[..35]) & several, several);
}

#[test]
fn the_device_has_mappings_whatever_the_guest_accepts() {
    let (mut device, seen, driver) = opened(Answers::default(), never());
    assert_eq!(device.features() & 1 << 33, 0, "the guest has no mappings");
    // With a feature that only the transport knows.
    driver.activate(&mut device, 1 << 32 | 1 << 35);
    wait_for_call(&seen, "set_features 0x300000000");
    device.reset();
}

#[test]
fn accesses_of_the_configuration_stay_in_it() {
    for (says, read, written) in [
        (60, "read_config 56 4", "write_config 56 [9, 9, 9, 9]"),
        (58, "read_config 56 2", "write_config 56 [9, 9]"),
    ] {
        let log = Arc::new(parking_lot::Mutex::new(Vec::new()));
        let noted = Arc::clone(&log);
        let note: Fails = Box::new(move |call| {
            noted.lock().push(call.to_owned());
            None
        });
        let answers = Answers { config_len_bytes: says, ..Answers::default() };
        let (mut device, seen, _) = opened(answers, note);
        let mut data = [0xee; 8];
        device.read_config(56, &mut data);
        assert_eq!(log.lock().last().unwrap(), read);
        let end = usize::try_from(says).unwrap() - 56;
        assert_eq!(data[..end], [56, 57, 58, 59][..end]);
        assert_eq!(data[end..], [0; 8][end..]);
        device.write_config(56, &[9; 8]);
        assert_eq!(seen.calls.lock().last().unwrap(), written);
        log.lock().clear();
        for offset in [u64::from(says), 1 << 32, u64::MAX] {
            device.read_config(offset, &mut data);
            assert_eq!(data, [0; 8]);
            device.write_config(offset, &[9; 8]);
        }
        assert!(log.lock().is_empty(), "the device was asked for {:?}", log.lock());
    }
}

/// The transport has a page for it.
#[test]
fn a_configuration_of_any_length_is_asked_for_where_a_guest_can_see_it() {
    let asked = Arc::new(parking_lot::Mutex::new(Vec::new()));
    let noted = Arc::clone(&asked);
    let note: Fails = Box::new(move |call| {
        noted.lock().push(call.to_owned());
        None
    });
    let answers = Answers { config_len_bytes: u32::MAX, ..Answers::default() };
    let (device, _, _) = opened(answers, note);
    asked.lock().clear();
    for offset in [4094, 4096, u64::from(u32::MAX) - 1] {
        device.read_config(offset, &mut [0; 4]);
    }
    assert_eq!(*asked.lock(), ["read_config 4094 2"]);
}

#[test]
fn a_configuration_that_cannot_be_read_reads_as_zeros() {
    let (mut device, _, _) = opened(Answers::default(), fails("read_config 4 "));
    let mut data = [0xee; 4];
    device.read_config(4, &mut data);
    assert_eq!(data, [0; 4]);
    device.write_config(4, &[1; 4]);
}

#[test]
fn signals_of_the_device_reach_the_driver() {
    let (mut device, seen, driver) = opened(Answers::default(), never());
    driver.activate_all(&mut device);
    wait_for_call(&seen, "set_vring_kick 0");
    seen.vring_calls.lock()[&0].write(1).unwrap();
    wait("an interrupt", || driver.interrupt.queue_interrupts(0) == 1);
    assert_eq!(device.counters().counters()["interrupts"], 1);
    seen.config_call.lock().as_ref().unwrap().write(1).unwrap();
    wait("a change", || driver.interrupt.config_changes() == 1);
    assert!(!driver.interrupt.is_broken());
    device.reset();
}

#[test]
fn a_device_that_says_that_it_needs_a_reset_gets_one() {
    let ram = ram(1);
    let scripted = Scripted::new(Answers::default(), never());
    let (seen, answers) = (Arc::clone(&scripted.seen), Arc::clone(&scripted.answers));
    let mut device = Vdpa::over(Box::new(scripted), config(1), &ram).unwrap();
    let driver = Driver::over(ram.guest_memory(), 1, 16);
    driver.activate_all(&mut device);
    wait_for_call(&seen, "set_vring_kick 0");
    answers.lock().own_status = 64;
    seen.config_call.lock().as_ref().unwrap().write(1).unwrap();
    driver.interrupt.wait_broken();
    assert!(seen.mapped.lock().is_empty());
    assert_eq!(driver.interrupt.config_changes(), 0);
    // As the status says at once.
    device.reset();
    seen.calls.lock().clear();
    driver.activate_all(&mut device);
    wait_for_call(&seen, "set_status 0");
    device.reset();
    assert!(!seen.calls.lock().contains(&"set_vring_kick 0".to_owned()));
}

#[test]
fn a_notification_that_the_kernel_did_not_take_is_passed_on() {
    let (mut device, seen, driver) = opened(Answers::default(), never());
    let trapped = driver.queues[0].own_eventfd();
    driver.activate_all(&mut device);
    wait_for_call(&seen, "set_vring_kick 0");
    seen.kicks.lock()[&0].read().unwrap();
    seen.calls.lock().clear();
    trapped.write(1).unwrap();
    wait_for_call(&seen, "set_vring_kick 0");
    wait("a notification", || seen.kicks.lock()[&0].read().is_ok());
    device.reset();
}

#[test]
fn a_device_is_suspended_while_the_machine_is_paused() {
    let (mut device, seen, driver) = opened(Answers::default(), never());
    assert!(device.can_suspend());
    driver.activate_all(&mut device);
    wait_for_call(&seen, "set_vring_kick 0");
    seen.calls.lock().clear();
    let states = device.pause();
    assert_eq!(states.iter().map(|(at, it)| (*at, it.next_avail)).collect::<Vec<_>>(), [(0, 7)]);
    assert_eq!(*seen.calls.lock(), ["suspend"]);
    assert_eq!(seen.mapped.lock().len(), 1);
    device.resume();
    wait_for_call(&seen, "set_vring_kick 0");
    assert_eq!(*seen.calls.lock(), ["suspend", "resume", "set_vring_kick 0"]);
    seen.vring_calls.lock()[&0].write(1).unwrap();
    wait("an interrupt", || device.counters().counters()["interrupts"] == 1);
    device.reset();
}

#[test]
fn a_device_that_cannot_do_both_goes_on() {
    for can in [1 << 4, 1 << 5] {
        let answers = Answers { backend_features: 1 << 1 | can, ..Answers::default() };
        let (mut device, seen, driver) = opened(answers, never());
        assert!(!device.can_suspend());
        driver.activate_all(&mut device);
        wait_for_call(&seen, "set_vring_kick 0");
        seen.calls.lock().clear();
        device.pause();
        device.resume();
        seen.vring_calls.lock()[&0].write(1).unwrap();
        wait("an interrupt", || device.counters().counters()["interrupts"] == 1);
        assert!(seen.calls.lock().is_empty());
        device.reset();
    }
}

#[test]
fn a_device_that_fails_in_a_pause_is_reset() {
    for call in ["suspend", "vring_base 0", "resume"] {
        let (mut device, seen, driver) = opened(Answers::default(), fails(call));
        driver.activate_all(&mut device);
        wait_for_call(&seen, "set_vring_kick 0");
        device.pause();
        device.resume();
        driver.interrupt.wait_broken();
        assert!(seen.mapped.lock().is_empty(), "{call}");
        device.reset();
    }
}

#[test]
fn nothing_is_discarded_as_long_as_a_device_is_there() {
    let ram = ram(1);
    let (device, _) = open(Answers::default(), never(), 1, &ram);
    let reason = ram.discards_banned().unwrap();
    assert!(reason.contains("vDPA"), "{reason}");
    drop(device.unwrap());
    assert_eq!(ram.discards_banned(), None);
}

fn session(scripted: Scripted, ram: &Arc<GuestRam>, stops: &Arc<AtomicBool>) -> Session {
    let mut scripted = scripted;
    let offer = Offer::ask(&mut scripted, 1).unwrap();
    let log = Arc::default();
    Session::new(Arc::new(scripted), Arc::clone(ram), Arc::new(offer), Arc::clone(stops), log)
}

#[test]
fn a_device_that_cannot_be_reset_again_and_again_does_not_fill_the_log() {
    kept::start();
    let is_opened = Arc::new(AtomicBool::new(false));
    let opened = Arc::clone(&is_opened);
    let fails: Fails = Box::new(move |call| {
        let fails = opened.load(Ordering::Acquire) && call.starts_with("set_status");
        fails.then(|| io::Error::other("a fault of this very test"))
    });
    let scripted = Scripted::new(Answers::default(), fails);
    let mut session = session(scripted, &ram(1), &Arc::default());
    is_opened.store(true, Ordering::Release);
    for _ in 0..200 {
        session.reset();
    }
    let lines = kept::count("a fault of this very test");
    assert!((1..100).contains(&lines), "{lines} lines for 200 resets");
}

#[test]
fn a_reset_does_not_wait_for_memory_that_is_still_to_be_mapped() {
    let (ram, stops) = (ram(3), Arc::new(AtomicBool::new(false)));
    let stop = Arc::clone(&stops);
    let scripted = Scripted::new(
        Answers::default(),
        Box::new(move |call| {
            if call.starts_with("map") {
                stop.store(true, Ordering::Release);
            }
            None
        }),
    );
    let seen = Arc::clone(&scripted.seen);
    let mut session = session(scripted, &ram, &stops);
    let call = EventFd::new(EFD_NONBLOCK).unwrap();
    let error = session.start(1 << 32, &[], &call).unwrap_err();
    assert!(matches!(error, VdpaError::Cancelled), "{error}");
    let calls = seen.calls.lock();
    let maps = calls.iter().filter(|call| call.starts_with("map")).count();
    assert_eq!(maps, 1, "{calls:?}");
    assert!(seen.mapped.lock().is_empty());
}

#[test]
fn memory_is_mapped_in_chunks_where_the_guest_has_some() {
    let big = ZoneSpec { shared: true, ..ZoneSpec::new("big", 600 * MIB) };
    let later =
        ZoneSpec { shared: true, block_bytes: Some(2 * MIB), ..ZoneSpec::new("later", 64 * MIB) };
    let config = RamConfig { zones: vec![big, later] };
    let ram = Arc::new(GuestRam::new(&config, RamLayout::default()).unwrap());
    let region = ram.regions().iter().find(|region| region.block_bytes().is_some()).unwrap();
    region.set_usable(&[2 * MIB..4 * MIB, 8 * MIB..12 * MIB]).unwrap();
    let scripted = Scripted::new(Answers::default(), never());
    let seen = Arc::clone(&scripted.seen);
    let mut session = session(scripted, &ram, &Arc::default());
    session.start(1 << 32, &[], &EventFd::new(EFD_NONBLOCK).unwrap()).unwrap();
    let mapped: Vec<_> = seen.mapped.lock().iter().map(|(at, len)| (*at, *len)).collect();
    let later = region.gpa();
    let expected = [
        (0, 256 * MIB),
        (256 * MIB, 256 * MIB),
        (512 * MIB, 88 * MIB),
        (later + 2 * MIB, 2 * MIB),
        (later + 8 * MIB, 4 * MIB),
    ];
    assert_eq!(mapped, expected);
    drop(session);
    assert!(seen.mapped.lock().is_empty());
}

#[test]
fn only_a_character_device_can_be_opened() {
    let ram = ram(1);
    let file = tempfile::NamedTempFile::new().unwrap();
    for (path, why) in [("/nowhere", "(os error 2)"), (file.path().to_str().unwrap(), "character")]
    {
        let config = VdpaDeviceConfig { path: path.into(), ..config(1) };
        let error = Vdpa::open(config, &ram).err().unwrap();
        let error = error_text::chain(&error);
        assert!(error.contains(path) && error.contains(why), "{error}");
    }
    // Another one, which knows no such request.
    let config = VdpaDeviceConfig { path: "/dev/null".into(), ..config(1) };
    let error = Vdpa::open(config, &ram).err().unwrap().to_string();
    assert!(error.ends_with("VHOST_SET_OWNER"), "{error}");
}
