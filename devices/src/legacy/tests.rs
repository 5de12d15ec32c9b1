// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Legacy devices, seen from the guest.

#![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use proptest::prelude::*;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::*;
use crate::Snapshot;
use crate::bus::BusDevice;
use crate::endpoint::ConsoleEndpoint;
use crate::syscalls;
use crate::virtio::StateError;

/// A wait that takes this long has failed.
const PATIENCE: Duration = Duration::from_secs(20);

#[derive(Default)]
struct Events {
    resets: AtomicU32,
    shutdowns: AtomicU32,
}

impl PowerEvents for Events {
    fn reset(&self) {
        self.resets.fetch_add(1, Ordering::Relaxed);
    }
    fn shutdown(&self) {
        self.shutdowns.fetch_add(1, Ordering::Relaxed);
    }
}

impl Events {
    fn seen(&self) -> (u32, u32) {
        (self.resets.load(Ordering::Relaxed), self.shutdowns.load(Ordering::Relaxed))
    }
}

fn read(device: &dyn BusDevice, offset: u64) -> u8 {
    let mut data = [0xee];
    device.read(offset, &mut data);
    data[0]
}

fn line() -> EventFd {
    EventFd::new(EFD_NONBLOCK).unwrap()
}

fn ignored() -> OnEject {
    OnEject { hide: Box::new(|_, _| {}), notify: Box::new(|| {}) }
}

#[test]
fn power_control_knows_reset_and_switching_off() {
    let events = Arc::new(Events::default());
    let power = PowerControl::new(events.clone());
    for value in [0, 2, 5 << 2, 1 << 5, 4 << 2 | 1 << 5, 0xff] {
        power.write(0, &[value]);
    }
    power.write(0, &[]);
    // Nothing is behind the register.
    for offset in 1..8 {
        power.write(offset, &[RESET_VALUE]);
        power.write(offset, &[SLEEP_S5_VALUE]);
    }
    assert_eq!(events.seen(), (0, 0));
    power.write(0, &[SLEEP_S5_VALUE]);
    assert_eq!(events.seen(), (0, 1));
    power.write(0, &[RESET_VALUE]);
    assert_eq!(events.seen(), (1, 1));
    assert_eq!(SLEEP_S5_VALUE, 0x34);
    assert_eq!(read(&power, 0), 0);
}

#[test]
fn keyboard_controller_resets_on_its_one_command() {
    let events = Arc::new(Events::default());
    let controller = I8042::new(events.clone());
    controller.write(0, &[0xfe]);
    controller.write(4, &[0xff]);
    controller.write(4, &[0xfe, 0xfe]);
    assert_eq!(events.seen(), (0, 0));
    controller.write(4, &[0xfe]);
    assert_eq!(events.seen(), (1, 0));
    assert_eq!(read(&controller, 4), 0, "ready for a command");
    assert_eq!(read(&controller, 1), 0x20);
}

#[test]
fn a_keyboard_controller_without_a_data_port_begins_one_port_later() {
    let events = Arc::new(Events::default());
    let controller = I8042::without_data_port(events.clone());
    assert_eq!((read(&controller, 0), read(&controller, 3)), (0x20, 0));
    controller.write(4, &[0xfe]);
    assert_eq!(events.seen(), (0, 0));
    controller.write(3, &[0xfe]);
    assert_eq!(events.seen(), (1, 0));
}

#[test]
fn firmware_finds_its_port_and_may_write_anything_there() {
    let output = FirmwareOutput::default();
    assert_eq!(read(&output, 0), 0xe9);
    output.write(0, b"text");
}

#[test]
fn event_device_shows_events_once() {
    let interrupt = line();
    let device = GedDevice::new(interrupt.try_clone().unwrap());
    assert_eq!(read(&device, 0), 0);
    assert!(interrupt.read().is_err(), "no interrupt before an event");
    device.set_power_button();
    device.notify(GED_PCI_DEVICES_CHANGED);
    assert_eq!(interrupt.read().unwrap(), 2);

    let saved = device.save();
    assert_eq!(read(&device, 1), 0, "only the first byte");
    assert_eq!(read(&device, 0), GED_POWER_BUTTON_CHANGED | GED_PCI_DEVICES_CHANGED);
    assert_eq!(read(&device, 0), 0);
    device.restore(&saved).unwrap();
    assert_eq!(read(&device, 0), GED_POWER_BUTTON_CHANGED | GED_PCI_DEVICES_CHANGED);
}

#[test]
fn an_event_with_a_pending_interrupt_is_signalled_again_after_the_move() {
    let source = GedDevice::new(line());
    source.set_power_button();
    let interrupt = line();
    let device = GedDevice::new(interrupt.try_clone().unwrap());
    device.resume();
    assert!(interrupt.read().is_err(), "nothing is pending");
    device.restore(&source.save()).unwrap();
    assert!(interrupt.read().is_err(), "not before the guest continues");
    device.resume();
    assert_eq!(interrupt.read().unwrap(), 1);
    assert_eq!(read(&device, 0), GED_POWER_BUTTON_CHANGED);
    device.resume();
    assert!(interrupt.read().is_err(), "the guest has seen it");
}

#[test]
fn pm_timer_moves_on_with_the_other_clocks() {
    const HOUR: Duration = Duration::from_hours(1);
    let timer = PmTimer::new();
    let before = ticks(&timer);
    timer.read_at(Instant::now());
    let then = ticks(&timer);
    // Others take their time to be saved; a thousandth of a second would count.
    while ticks(&timer).wrapping_sub(then) < 40_000 {
        std::thread::yield_now();
    }
    let saved = timer.save();
    let ticks_then = u32::try_from(saved.data["ticks"].as_u64().unwrap()).unwrap();
    assert!((before..=then).contains(&ticks_then), "as of the moment that was said");

    let other = PmTimer::new();
    other.restore(&saved).unwrap();
    let restored_at = Instant::now();
    other.advance(HOUR, restored_at);
    let passed = ticks(&other).wrapping_sub(ticks_then);
    let hour = u32::try_from(3_579_545_u64 * 3600 % (1 << 32)).unwrap();
    let late = passed.wrapping_sub(hour);
    let since = restored_at.elapsed().as_nanos() * 3_579_545 / 1_000_000_000;
    assert!(u128::from(late) <= since + 1, "{late} ticks more than have passed");
}

fn ticks(timer: &PmTimer) -> u32 {
    let mut data = [0; 4];
    timer.read(0, &mut data);
    u32::from_le_bytes(data)
}

#[test]
fn pm_timer_runs_at_its_rate_and_continues_after_a_restore() {
    let timer = PmTimer::new();
    let before = Instant::now();
    let first = ticks(&timer);
    let mut second = first;
    while second.wrapping_sub(first) < 1000 {
        second = ticks(&timer);
    }
    let took_us = before.elapsed().as_micros();
    assert!(took_us >= 279, "a thousand ticks in {took_us} us is too fast");

    let saved = timer.save();
    let other = PmTimer::new();
    other.restore(&saved).unwrap();
    let difference = ticks(&other).wrapping_sub(second);
    assert!(difference < 1 << 31, "it went back by {}", difference.wrapping_neg());

    let top = serde_json::json!({ "ticks": u32::MAX });
    let mut near_the_end = saved.clone();
    near_the_end.data = top;
    other.restore(&near_the_end).unwrap();
    while ticks(&other) > 1 << 31 {}
    let mut tail = [0xff; 8];
    timer.read(u64::MAX, &mut tail);
    assert_eq!(tail, [0; 8]);
}

proptest! {
    #[test]
    fn accesses_of_any_shape_are_harmless(
        accesses in proptest::collection::vec(
            (any::<bool>(), 0_u64..10, proptest::collection::vec(any::<u8>(), 0..9)),
            0..50,
        ),
    ) {
        let events: Arc<Events> = Arc::default();
        let endpoint = Arc::new(ConsoleEndpoint::null().unwrap());
        let devices: [Box<dyn BusDevice>; 9] = [
            Box::new(PowerControl::new(events.clone())),
            Box::new(PmTimer::new()),
            Box::new(GedDevice::new(line())),
            Box::new(Cmos::new(1 << 30, 0, Box::new(HostClock))),
            Box::new(I8042::new(events)),
            Box::new(PciHotplug::new(0, ignored())),
            Box::new(DebugConsole::new(Arc::clone(&endpoint))),
            Box::<DebugPort>::default(),
            Box::new(Serial::new(endpoint, line()).unwrap()),
        ];
        for device in &devices {
            for (is_read, offset, data) in &accesses {
                if *is_read {
                    device.read(*offset, &mut data.clone());
                } else {
                    device.write(*offset, data);
                }
            }
        }
    }
}

#[test]
fn debug_console_identifies_itself_and_prints() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("debug");
    let console = DebugConsole::new(Arc::new(ConsoleEndpoint::file(&path).unwrap()));
    assert_eq!(read(&console, 0), 0xe9);
    console.write(0, b"f");
    console.write(0, b"w");
    assert_eq!(std::fs::read(&path).unwrap(), b"fw");
}

fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < PATIENCE, "{what} did not happen");
        std::thread::yield_now();
    }
}

#[test]
fn serial_output_goes_to_the_endpoint() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("serial");
    let serial = Serial::new(Arc::new(ConsoleEndpoint::file(&path).unwrap()), line()).unwrap();
    for byte in b"hello" {
        serial.write(0, &[*byte]);
    }
    assert_eq!(std::fs::read(&path).unwrap(), b"hello");
    assert_eq!(read(&serial, 5) & 0x60, 0x60, "ready to transmit");
}

#[test]
fn serial_input_reaches_the_guest_with_an_interrupt_however_long_it_is() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("serial.sock");
    let interrupt = line();
    let endpoint = Arc::new(ConsoleEndpoint::socket(&path).unwrap());
    let serial = Serial::new(endpoint, interrupt.try_clone().unwrap()).unwrap();
    serial.write(1, &[1]);
    let sent: Vec<u8> = (0..1000_u32).map(|number| (number % 256).try_into().unwrap()).collect();
    let mut peer = UnixStream::connect(&path).unwrap();
    peer.write_all(&sent).unwrap();

    let mut received = Vec::new();
    wait_until("all input", || {
        while read(&serial, 5) & 1 != 0 {
            received.push(read(&serial, 0));
        }
        received.len() == sent.len()
    });
    assert_eq!(received, sent);
    assert!(interrupt.read().unwrap() > 0);
}

#[test]
fn a_paused_serial_port_takes_no_input_and_its_state_has_what_came_before() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("serial.sock");
    let serial = Serial::new(Arc::new(ConsoleEndpoint::socket(&path).unwrap()), line()).unwrap();
    serial.write(7, &[0x42]);
    let mut peer = UnixStream::connect(&path).unwrap();
    peer.write_all(b"a").unwrap();
    wait_until("first byte", || read(&serial, 5) & 1 != 0);
    serial.pause();
    peer.write_all(b"b").unwrap();
    assert!(syscalls::poll_now(peer.as_fd(), libc::POLLOUT).is_ok());
    let saved = serial.save();
    assert_eq!(saved.data["in_buffer"], serde_json::json!([b'a']));

    let other = Serial::new(Arc::new(ConsoleEndpoint::null().unwrap()), line()).unwrap();
    other.restore(&saved).unwrap();
    assert_eq!(other.save(), saved);
    assert_eq!(read(&other, 7), 0x42);
    assert_eq!(read(&other, 0), b'a');
    serial.resume();
    let _ = read(&serial, 0);
    wait_until("second byte", || read(&serial, 5) & 1 != 0);
    assert_eq!(read(&serial, 0), b'b');

    let mut overfull = saved.clone();
    overfull.data["in_buffer"] = serde_json::json!(vec![0; 1000]);
    assert!(matches!(other.restore(&overfull), Err(StateError::Invalid { .. })));
}

#[test]
fn foreign_states_are_refused_by_every_legacy_device() {
    let events: Arc<Events> = Arc::default();
    let endpoint = Arc::new(ConsoleEndpoint::null().unwrap());
    let devices: Mutex<[Box<dyn Snapshot>; 8]> = Mutex::new([
        Box::new(PowerControl::new(events.clone())),
        Box::new(PmTimer::new()),
        Box::new(GedDevice::new(line())),
        Box::new(Cmos::new(1 << 30, 0, Box::new(HostClock))),
        Box::new(I8042::new(events)),
        Box::new(PciHotplug::new(0, ignored())),
        Box::new(DebugConsole::new(Arc::clone(&endpoint))),
        Box::new(Serial::new(endpoint, line()).unwrap()),
    ]);
    for device in devices.lock().iter() {
        let good = device.save();
        device.restore(&good).unwrap();
        let mut other = good.clone();
        other.kind = "toaster".to_owned();
        assert!(matches!(device.restore(&other), Err(StateError::Kind { .. })));
        let mut newer = good.clone();
        newer.version = u32::MAX;
        assert!(matches!(device.restore(&newer), Err(StateError::Version { .. })));
        let mut malformed = good;
        malformed.data = serde_json::json!("rubbish");
        assert!(matches!(device.restore(&malformed), Err(StateError::Malformed { .. })));
    }
}
