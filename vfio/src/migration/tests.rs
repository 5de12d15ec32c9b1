// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Functions that are moved, with everything around them made up.
#![expect(clippy::unwrap_used, reason = "tests")]

use std::sync::Arc;
use std::sync::atomic::Ordering;

use hypervisor::irq::MsiVector as _;
use memory::{GuestRam, RamConfig, RamLayout, ZoneSpec};
use serde_json::{Value, json};

use super::fakes::StepFailure;
use super::*;
use crate::HostFunction as _;
use crate::fakes::{FakeFunction, MSI_OFFSET, MSIX_OFFSET, TABLE_OFFSET};
use crate::tests::{ABOVE, Rig};
use pci::{PciDevice as _, PciDeviceState};

const FIRMWARE: &[u8] = b"rings, filters and counters";
const MIB: u64 = 1 << 20;

fn rig(p2p: bool) -> Rig {
    let rig = Rig::prepared(FakeFunction::config(), |host| host.migration.allow(p2p, FIRMWARE));
    rig.gate.open();
    rig
}

/// A destination, whose hardware remembers nothing.
fn empty_rig() -> Rig {
    let rig = Rig::prepared(FakeFunction::config(), |host| host.migration.allow(true, b""));
    rig.device.stop().unwrap();
    rig
}

fn memory_of(rig: &Rig) -> Vec<u8> {
    rig.host.migration.hardware_mut().memory.clone()
}

fn state_of(rig: &Rig) -> DeviceState {
    rig.host.migration.hardware_mut().state
}

fn saved(rig: &Rig) -> PciDeviceState {
    rig.device.quiesce().unwrap();
    rig.device.stop().unwrap();
    let state = rig.device.save().unwrap();
    serde_json::from_slice(&serde_json::to_vec(&state).unwrap()).unwrap()
}

fn chain(error: &dyn std::error::Error) -> String {
    error_text::chain(error)
}

#[test]
fn a_function_that_was_left_stopped_works_when_it_is_opened() {
    let rig = Rig::prepared(FakeFunction::config(), |host| {
        host.migration.allow(true, FIRMWARE);
        host.migration.hardware_mut().state = DeviceState::Stop;
    });
    assert_eq!(state_of(&rig), DeviceState::Running);
    assert!(!rig.device.is_stopped());
}

#[test]
fn a_function_continues_at_the_destination_as_it_was() {
    let source = rig(true);
    source.write(0x10, &0x0010_0000_u32.to_le_bytes());
    source.write(0x20, &[0x60, 0xc0]);
    source.write(4, &[7, 4]);
    source.write(0x3c, &[11]);
    source.write(0x88, &[0x50, 0x29]);
    source.mapper.write(ABOVE + MIB + TABLE_OFFSET, &0xfee0_1000_u64.to_le_bytes());
    source.mapper.write(ABOVE + MIB + TABLE_OFFSET + 8, &0x41_u64.to_le_bytes());
    source.write(MSIX_OFFSET + 2, &[0, 0x80]);
    let state = saved(&source);

    let here = empty_rig();
    here.gate.open();
    here.device.restore(&state).unwrap();
    here.segment.refresh_mappings();
    assert_eq!(state_of(&here), DeviceState::Stop, "until the guest continues");
    assert_eq!(memory_of(&here), FIRMWARE);
    assert_eq!(here.read::<64>(0), source.read::<64>(0));
    assert_eq!(here.read::<16>(0x80), source.read::<16>(0x80));
    assert!(here.host.is_bus_master());
    assert_eq!(here.slots.shown(), source.slots.shown());
    assert!(here.slots.shown().iter().any(|range| range.start == ABOVE + MIB));
    assert_eq!((here.ports.mapped(), here.host.command() & 1), (vec![0xc060], 1));
    assert_eq!(here.host.connected(), source.host.connected());
    let vector = here.msi.vector(0).unwrap();
    let message = vector.record().programmed.unwrap();
    assert_eq!((message.address, message.data), (0xfee0_1000, 0x41));
    here.device.wake().unwrap();
    here.device.run().unwrap();
    let way = [
        DeviceState::Stop,
        DeviceState::Resuming,
        DeviceState::Stop,
        DeviceState::RunningP2p,
        DeviceState::Running,
    ];
    assert_eq!(here.host.migration.hardware_mut().history, way);
    source.check();
    here.check();
}

#[test]
fn the_source_continues_after_it_was_saved() {
    let source = rig(true);
    source.write(4, &[6, 0]);
    source.write(MSI_OFFSET + 16, &[1, 0, 0, 0]);
    source.write(MSI_OFFSET + 2, &[1, 0]);
    source.msi.vector(usize::from(crate::fakes::MSIX_COUNT)).unwrap().trigger().unwrap();
    let first = saved(&source);
    assert_eq!(first.data["msi_pending"], json!(1));
    assert_eq!(saved(&source), first, "nothing was lost by looking");
    source.device.wake().unwrap();
    source.device.run().unwrap();
    let way = [
        DeviceState::RunningP2p,
        DeviceState::Stop,
        DeviceState::StopCopy,
        DeviceState::Stop,
        DeviceState::StopCopy,
        DeviceState::Stop,
        DeviceState::RunningP2p,
        DeviceState::Running,
    ];
    assert_eq!(source.host.migration.hardware_mut().history, way);
    assert!(source.host.is_bus_master() && !source.device.is_lost());
    assert_eq!(*source.host.resets.lock(), 0);
    source.check();
}

#[test]
fn without_peer_to_peer_that_state_is_left_out() {
    let source = rig(false);
    saved(&source);
    source.device.wake().unwrap();
    source.device.run().unwrap();
    let way = [DeviceState::Stop, DeviceState::StopCopy, DeviceState::Stop, DeviceState::Running];
    assert_eq!(source.host.migration.hardware_mut().history, way);
}

#[test]
fn what_cannot_be_moved_says_why_and_is_left_alone() {
    let plain = Rig::new();
    assert!(plain.device.movable().unwrap_err().to_string().contains("no VFIO migration v2"));
    plain.device.quiesce().unwrap();
    plain.device.stop().unwrap();
    assert!(!plain.device.is_stopped(), "a pause leaves it as it was");
    plain.device.wake().unwrap();
    plain.device.run().unwrap();
    assert!(chain(&plain.device.save().unwrap_err()).contains("no VFIO migration v2"));
    assert!(chain(&plain.device.restore(&saved(&rig(true))).unwrap_err()).contains("v2"));

    let half = Rig::prepared(FakeFunction::config(), |host| {
        host.migration.allow(true, b"");
        host.migration.hardware_mut().support = Some(MigrationSupport::default());
    });
    assert!(half.device.movable().unwrap_err().to_string().contains("STOP_COPY"));

    let silent = Rig::prepared(FakeFunction::config(), |host| {
        host.migration.hardware_mut().is_silent = true;
    });
    let error = chain(silent.device.movable().unwrap_err());
    assert!(error.contains("did not say") && error.contains("os error 5"), "{error}");

    let gone = rig(true);
    assert!(gone.device.movable().unwrap().p2p);
    gone.device.lose();
    assert!(gone.device.movable().unwrap_err().to_string().contains("gone for the guest"));
    assert!(chain(&gone.device.save().unwrap_err()).contains("gone for the guest"));
}

#[test]
fn no_state_is_put_in_before_memory_is_mapped() {
    let state = saved(&rig(true));
    let here = empty_rig();
    let (device, gate) = (Arc::clone(&here.device), Arc::clone(&here.gate));
    std::thread::scope(|scope| {
        let restoring = scope.spawn(|| device.restore(&state));
        // It may have come to the gate or not; either way it is not through.
        assert_eq!(state_of(&here), DeviceState::Stop);
        gate.open();
        restoring.join().unwrap().unwrap();
    });
    assert_eq!(memory_of(&here), FIRMWARE);
    here.check();

    let without = empty_rig();
    without.gate.fail("the limit on locked memory is reached");
    let error = chain(&without.device.restore(&state).unwrap_err());
    assert!(error.contains("the limit on locked memory is reached"), "{error}");
    assert_eq!(state_of(&without), DeviceState::Stop);
    without.check();
}

/// Every step at the source goes wrong in every way.
#[test]
fn a_step_that_is_refused_changes_nothing_and_one_that_fails_loses_the_device() {
    let steps = [DeviceState::RunningP2p, DeviceState::Stop, DeviceState::StopCopy];
    for to in steps {
        for failure in [StepFailure::Refused, StepFailure::Failed, StepFailure::Silent] {
            let source = rig(true);
            source.write(4, &[6, 0]);
            source.host.migration.hardware_mut().failure = Some((to, failure));
            let device = &source.device;
            let stopped = device.quiesce().and_then(|()| device.stop());
            let error = match stopped {
                Ok(()) => chain(&device.save().unwrap_err()),
                Err(error) => chain(&error),
            };
            let is_named = error.contains(&format!("to {to}"))
                || error.contains(&format!("state RUNNING_P2P to {to}"));
            assert!(is_named, "{to} {failure:?}: {error}");
            assert!(error.contains("os error 5"), "{error}");
            let is_lost = failure != StepFailure::Refused;
            assert_eq!(device.is_lost(), is_lost, "{to} {failure:?}");
            assert_eq!(*source.host.resets.lock(), u32::from(is_lost));
            source.host.migration.hardware_mut().failure = None;
            device.wake().unwrap();
            device.run().unwrap();
            assert_eq!(state_of(&source), DeviceState::Running);
            assert_eq!(source.host.is_bus_master(), !is_lost);
            source.check();
        }
    }
}

#[test]
fn a_device_that_does_not_resume_reports_it() {
    for to in [DeviceState::RunningP2p, DeviceState::Running] {
        for failure in [StepFailure::Refused, StepFailure::Failed] {
            let source = rig(true);
            saved(&source);
            source.host.migration.hardware_mut().failure = Some((to, failure));
            let device = &source.device;
            assert!(device.wake().and_then(|()| device.run()).is_err());
            assert_eq!(device.is_lost(), failure == StepFailure::Failed);
        }
    }
}

#[test]
fn a_state_that_cannot_be_read_whole_is_none() {
    let source = rig(true);
    source.device.stop().unwrap();
    source.host.migration.hardware_mut().breaks_after = Some(10);
    let error = chain(&source.device.save().unwrap_err());
    assert!(error.contains("beyond its first 10 bytes"), "{error}");
    assert_eq!(state_of(&source), DeviceState::Stop);
    source.host.migration.hardware_mut().breaks_after = None;
    source.host.migration.hardware_mut().is_endless = true;
    let error = chain(&source.device.save().unwrap_err());
    assert!(error.contains("longer than 134217728 bytes"), "{error}");
    assert_eq!(state_of(&source), DeviceState::Stop);
    source.host.migration.hardware_mut().is_endless = false;
    assert!(source.device.save().is_ok(), "another time");
    source.device.run().unwrap();
    let error = chain(&source.device.save().unwrap_err());
    assert!(error.contains("is in state RUNNING, and has to be in STOP"), "{error}");
}

fn changed(path: &str, value: Value) -> PciDeviceState {
    let source = rig(true);
    source.write(4, &[6, 0]);
    let mut state = saved(&source);
    *state.data.pointer_mut(path).unwrap() = value;
    state
}

fn refusal_of(state: &PciDeviceState) -> (Rig, String) {
    let here = empty_rig();
    here.gate.open();
    let error = chain(&here.device.restore(state).unwrap_err());
    (here, error)
}

#[test]
fn a_state_that_does_not_fit_is_refused_before_the_hardware_hears_of_it() {
    let cases = [
        ("/hardware/device", json!(1), "vendor and device is 0x00000001 there and 0x00101b36 here"),
        ("/hardware/bars/0/1", json!(0x8000), "BAR 0 of 0x8000 bytes"),
        ("/hardware/capabilities/0/0", json!(0x44), "its list of capabilities"),
        ("/registers/registers/4", json!(0xfeed_0005_u32), "the register at 0x10"),
        ("/registers/version", json!(9), "version 9"),
        ("/msix", json!(null), "its interrupts do not fit"),
        ("/msix/entries", json!([]), "its interrupts do not fit"),
        ("/state/base64", json!("cmlu"), "has 3 bytes in place of"),
        ("/state/len_bytes", json!(3), "in place of 3"),
        ("/state/len_bytes", json!(1_u64 << 40), "at most 134217728 are possible"),
        ("/state/base64", json!("?"), "is not valid base64"),
        ("/command", json!(-1), "cannot be read"),
    ];
    for (path, value, expected) in cases {
        let (here, error) = refusal_of(&changed(path, value));
        assert!(error.contains(expected), "{path}: {error}");
        assert_eq!(here.host.migration.hardware_mut().history, [DeviceState::Stop], "{path}");
        assert!(!here.host.is_bus_master(), "{path}");
        here.check();
    }
    let mut newer = saved(&rig(true));
    newer.version = super::VFIO_STATE_VERSION + 1;
    assert!(refusal_of(&newer).1.contains("version 4"));
}

/// A function whose expansion ROM has this length, or none.
fn rig_with_rom(len_bytes: u64) -> Rig {
    let rig = Rig::prepared(FakeFunction::config(), |host| {
        host.migration.allow(true, FIRMWARE);
        host.set_rom(len_bytes, &[0x55, 0xaa]);
    });
    rig.gate.open();
    rig
}

#[test]
fn an_expansion_rom_moves_as_bars_do() {
    let (rom_gpa, source) = (0xc020_0000_u32, rig_with_rom(0x8000));
    source.write(0x30, &(rom_gpa | 1).to_le_bytes());
    source.write(4, &[2, 0]);
    let state = saved(&source);
    assert_eq!(state.version, 3);
    let here = rig_with_rom(0x8000);
    here.device.stop().unwrap();
    here.device.restore(&state).unwrap();
    here.segment.refresh_mappings();
    assert_eq!(here.read(0x30), (rom_gpa | 1).to_le_bytes());
    let mut data = [0; 2];
    assert!(here.mapper.read(rom_gpa.into(), &mut data) && data == [0x55, 0xaa]);
    here.check();
    for (len_bytes, expected) in [(0, "its BARs"), (0x1_0000, "BAR 6 of 0x10000 bytes here")] {
        let other = rig_with_rom(len_bytes);
        other.device.stop().unwrap();
        let refused = chain(&other.device.restore(&state).unwrap_err());
        assert!(refused.contains(expected), "{refused}");
    }
}

#[test]
fn a_guest_that_has_seen_no_rom_finds_one_that_is_off() {
    let source = rig(true);
    source.write(4, &[2, 0]);
    let state = saved(&source);
    assert_eq!(state.version, 2, "as an earlier version writes it");
    let here = rig_with_rom(0x8000);
    here.device.stop().unwrap();
    here.device.restore(&state).unwrap();
    here.segment.refresh_mappings();
    assert_eq!(here.read(0x30), [0; 4]);
    assert_eq!(here.slots.shown(), source.slots.shown());
    here.check();
}

#[test]
fn hardware_that_does_not_take_its_state_refuses() {
    let state = saved(&rig(true));
    let refused = |set: &dyn Fn(&mut super::fakes::FakeHardware)| {
        let here = empty_rig();
        here.gate.open();
        set(&mut here.host.migration.hardware_mut());
        let error = chain(&here.device.restore(&state).unwrap_err());
        here.check();
        (here.device.is_lost(), error)
    };
    let (is_lost, error) = refused(&|hardware| hardware.takes_at_most = Some(8));
    assert!(!is_lost && error.contains("refused its state of 36 bytes"), "{error}");
    let way_in = Some((DeviceState::Resuming, StepFailure::Refused));
    let (is_lost, error) = refused(&|hardware| hardware.failure = way_in);
    assert!(!is_lost && error.contains("from state STOP to RESUMING"), "{error}");
    let way_out = Some((DeviceState::Stop, StepFailure::Failed));
    let (is_lost, error) = refused(&|hardware| hardware.failure = way_out);
    assert!(is_lost && error.contains("from state RESUMING to STOP"), "{error}");
}

#[test]
fn hardware_notices_what_was_changed_on_the_way() {
    let mut state = saved(&rig(true));
    let text = state.data["state"]["base64"].as_str().unwrap().replacen('c', "d", 1);
    state.data["state"]["base64"] = json!(text);
    let (here, error) = refusal_of(&state);
    assert!(error.contains("failed on its way from state RESUMING to STOP"), "{error}");
    assert!(here.device.is_lost() && !here.host.is_bus_master());
    here.check();
}

fn ram() -> GuestRam {
    let layout = RamLayout {
        hole_start: 64 * MIB,
        hole_end: 128 * MIB,
        end: 1 << 40,
        ..RamLayout::default()
    };
    let zones = vec![ZoneSpec::new("mem0", 96 * MIB)];
    GuestRam::new(&RamConfig { zones }, layout).unwrap()
}

fn dirty_pages(ram: &GuestRam) -> Vec<(usize, u64)> {
    let mut pages = Vec::new();
    for (index, region) in ram.regions().iter().enumerate() {
        let mut words = vec![0; usize::try_from(region.len_pages().div_ceil(64)).unwrap()];
        region.device_dirty().take(0..region.len_pages(), &mut words);
        for (page, word) in (0_u64..).step_by(64).zip(words) {
            let set = (0..64).filter(|bit| word >> bit & 1 != 0);
            pages.extend(set.map(|bit| (index, page + bit)));
        }
    }
    pages
}

#[test]
fn what_a_function_logs_is_dirty() {
    let (source, ram) = (rig(true), ram());
    source.host.migration.hardware_mut().logs = true;
    ram.track_device_writes(true);
    let log = source.device.watch_dma(&ram);
    source.host.migration.write_memory(5 * 4096 + 7);
    source.host.migration.write_memory(128 * MIB + 4096);
    assert_eq!(dirty_pages(&ram), [], "there was no request");
    log.collect(&ram);
    assert_eq!(dirty_pages(&ram), [(0, 5), (1, 1)]);
    log.collect(&ram);
    assert_eq!(dirty_pages(&ram), []);
    source.host.migration.write_memory(160 * MIB - 1);
    source.device.stop().unwrap();
    log.collect(&ram);
    assert_eq!(dirty_pages(&ram), [(1, 32 * 256 - 1)], "the last page of the last region");
    drop(log);
    assert!(!source.host.migration.is_logging());
}

#[test]
fn without_a_dirty_log_all_memory_is_dirty_once_the_function_has_stopped() {
    for loses in [false, true] {
        let (source, ram) = (rig(true), ram());
        source.host.migration.hardware_mut().logs = loses;
        source.host.migration.hardware_mut().loses_log = loses;
        ram.track_device_writes(true);
        let log = source.device.watch_dma(&ram);
        log.collect(&ram);
        assert_eq!(dirty_pages(&ram).len(), 0, "it works, and writes on");
        assert!(log.is_missing());
        assert!(!source.host.migration.is_logging());
        source.device.stop().unwrap();
        log.collect(&ram);
        assert_eq!(dirty_pages(&ram).len() as u64, 96 * 256);
        assert!(!log.is_missing(), "it writes no more");
        log.collect(&ram);
        assert_eq!(dirty_pages(&ram).len(), 0, "once");
    }
}

#[test]
fn a_function_that_had_stopped_before_has_written_nothing() {
    let (source, ram) = (rig(true), ram());
    source.device.stop().unwrap();
    let log = source.device.watch_dma(&ram);
    log.collect(&ram);
    assert_eq!(dirty_pages(&ram), []);
}

#[test]
fn the_estimate_is_the_hardwares() {
    assert_eq!(rig(true).device.estimated_state_len_bytes(), 36);
    assert_eq!(Rig::new().device.estimated_state_len_bytes(), 0);
    assert!(Rig::new().host.config_len_bytes() > 0);
}

/// A host that has no vectors left says so while the source can still take the guest back.
#[test]
fn a_destination_that_cannot_connect_interrupts_refuses_the_state() {
    let source = rig(true);
    source.write(MSIX_OFFSET + 2, &[0, 0x80]);
    let state = saved(&source);
    let here = empty_rig();
    here.gate.open();
    here.host.refuses_interrupts.store(true, Ordering::Relaxed);
    let error = chain(&here.device.restore(&state).unwrap_err());
    assert!(error.contains("the device's interrupts cannot be connected"), "{error}");
    // Another attempt finds everything as it was.
    let again = empty_rig();
    again.gate.open();
    again.device.restore(&state).unwrap();
    assert_eq!(again.host.connected(), source.host.connected());
}
