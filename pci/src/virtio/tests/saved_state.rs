// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Saving, restoring, and states that were tampered with.

use std::error::Error;

use super::*;
use crate::NO_VECTOR;
use crate::virtio::{QueueProgressState, VirtioPciState, VirtioStateError};

fn save(rig: &Rig) -> VirtioPciState {
    VirtioPciDevice::save(&rig.device).unwrap()
}

fn restore(rig: &mut Rig, state: &VirtioPciState) -> Result<(), VirtioStateError> {
    VirtioPciDevice::restore(&rig.device, state)?;
    rig.segment.refresh_mappings();
    rig.find();
    Ok(())
}

/// A machine that has run for a while, with something pending everywhere, paused.
fn paused() -> Rig {
    let rig = Rig::driving();
    rig.write_config(0x10, &0x0040_0000_u32.to_le_bytes());
    let mut rig = rig;
    rig.find();
    rig.write(rig.found.msix_table + 16 + 12, &1_u32.to_le_bytes());
    let interrupt = rig.interrupt();
    interrupt.queue_used(0);
    interrupt.config_changed();
    rig.record().config = [7; FakeDevice::CONFIG_LEN_BYTES];
    rig.record().progress = 300;
    rig.device.pause();
    rig
}

#[test]
fn a_working_device_cannot_be_saved() {
    let rig = Rig::driving();
    let refused = VirtioPciDevice::save(&rig.device);
    assert!(matches!(refused, Err(VirtioStateError::NotPaused { id }) if id == "disk0"));
}

#[test]
fn a_device_comes_back_as_it_was() {
    let source = paused();
    let state = save(&source);
    let text = serde_json::to_string(&state).unwrap();
    let read: VirtioPciState = serde_json::from_str(&text).unwrap();
    assert_eq!(read, state);

    let mut rig = Rig::cold();
    restore(&mut rig, &read).unwrap();
    assert_eq!(save(&rig), state, "before it runs");
    assert_eq!(rig.bar_gpa(), source.bar_gpa());
    assert_eq!(rig.mapper.mapped(), source.mapper.mapped());
    assert_eq!(rig.programmed(3), source.programmed(3));
    let calls = rig.take_calls();
    assert_eq!(calls, [DeviceCall::Acknowledge(FakeDevice::OFFERED), DeviceCall::Restore]);

    rig.device.resume();
    assert_eq!(rig.take_calls(), [DeviceCall::Activate]);
    assert_eq!(rig.status(), 15);
    assert_eq!(rig.events.addresses(), source.events.addresses());
    assert_eq!(rig.record().config, [7; FakeDevice::CONFIG_LEN_BYTES]);
    {
        let record = rig.record();
        let queue = record.activation.as_ref().unwrap().queues[1].queue.state();
        assert_eq!((queue.next_avail, queue.next_used, queue.size), (300, 300, 1024));
        assert!(queue.event_idx_enabled);
    }
    rig.device.pause();
    assert_eq!(save(&rig), state, "after it ran");
}

#[test]
fn nothing_under_way_is_lost() {
    let state = save(&paused());
    let mut rig = Rig::cold();
    restore(&mut rig, &state).unwrap();
    assert_eq!((0..4).map(|vector| rig.delivered(vector)).sum::<usize>(), 0, "not before resume");
    rig.device.resume();
    assert_eq!((rig.take_kicks(0), rig.take_kicks(2)), (1, 1));
    assert_eq!(rig.delivered(3), 1);
    assert_eq!(rig.delivered(0), 1, "a configuration change was noted in ISR");
    assert_eq!(rig.delivered(1), 0, "masked");
    rig.write(rig.found.msix_table + 16 + 12, &0_u32.to_le_bytes());
    assert_eq!(rig.delivered(1), 1);
}

#[test]
fn the_source_continues_after_a_failed_migration() {
    let rig = paused();
    let before = save(&rig);
    rig.device.resume();
    assert_eq!((rig.take_kicks(0), rig.take_kicks(2)), (1, 1));
    assert_eq!(rig.status(), 15);
    // The fake repeats the positions that it was activated with.
    rig.record().progress = 300;
    rig.device.pause();
    assert_eq!(save(&rig), before);
}

#[test]
fn a_restored_device_can_be_paused_saved_and_reset_before_it_runs() {
    let state = save(&paused());
    let mut rig = Rig::cold();
    restore(&mut rig, &state).unwrap();
    rig.device.pause();
    assert_eq!(save(&rig), state);
    rig.set_status(0);
    rig.device.resume();
    assert!(!rig.take_calls().contains(&DeviceCall::Activate));
    assert_eq!(rig.events.addresses(), [0_u64; 0]);
}

#[test]
fn a_restored_device_that_cannot_start_asks_for_a_reset() {
    let state = save(&paused());
    let mut rig = Rig::cold();
    restore(&mut rig, &state).unwrap();
    rig.record().refuses_activation = true;
    rig.device.resume();
    assert_eq!(rig.status(), 15 | 0x40);
    rig.device.pause();
    let broken = save(&rig);
    assert!(!broken.common.active);
    restore(&mut Rig::cold(), &broken).unwrap();
}

#[test]
fn a_device_that_waits_for_its_reset_does_nothing_elsewhere_until_then() {
    let source = paused();
    source.interrupt().needs_reset();
    let mut rig = Rig::cold();
    restore(&mut rig, &save(&source)).unwrap();
    rig.take_calls();
    rig.device.resume();
    assert_eq!(rig.take_calls(), [], "it is not activated");
    assert_eq!(rig.status(), 15 | 0x40);
    assert_eq!(rig.delivered(0), 1, "the driver may not have been told");
    rig.device.pause();
    // And on from there.
    let mut next = Rig::cold();
    restore(&mut next, &save(&rig)).unwrap();
    next.device.resume();
    assert_eq!(next.status(), 15 | 0x40);
    next.set_status(0);
    assert_eq!(next.status(), 0);
}

#[test]
fn every_phase_can_be_saved() {
    for phase in [0, 1, 3, 11] {
        let rig = Rig::new();
        if phase == 11 {
            assert!(rig.negotiate(1 << 32));
            rig.set_up_queue(0, 3, 0xffff_0000);
        } else {
            rig.set_status(phase);
        }
        let state = save(&rig);
        let mut other = Rig::cold();
        restore(&mut other, &state).unwrap();
        assert_eq!(save(&other), state);
        other.device.resume();
        assert_eq!(other.status(), phase);
    }
}

#[test]
fn a_device_in_use_refuses_and_stays_as_it_is() {
    let state = save(&paused());
    let rig = Rig::driving();
    let refused = VirtioPciDevice::restore(&rig.device, &state);
    assert!(matches!(refused, Err(VirtioStateError::InUse { .. })));
    assert_eq!(rig.status(), 15);
    assert!(rig.record().activation.is_some());
}

#[test]
fn the_trait_wraps_the_state() {
    let source = paused();
    let wrapped = PciDevice::save(source.device.as_ref()).unwrap();
    assert_eq!((wrapped.kind.as_str(), wrapped.version), ("virtio-pci", 1));
    let rig = Rig::cold();
    PciDevice::restore(rig.device.as_ref(), &wrapped).unwrap();
    assert_eq!(save(&rig), save(&source));
    let mut broken = wrapped.clone();
    broken.data["common"]["status"] = serde_json::Value::Null;
    assert!(PciDevice::restore(Rig::cold().device.as_ref(), &broken).is_err());
}

type Alter = fn(&mut VirtioPciState);

/// One field altered at a time, each to a value that cannot be.
const REFUSED: [(&str, Alter); 34] = [
    ("version", |s| s.version = 3),
    ("device id", |s| s.device_id = 1),
    ("config version", |s| s.config.version = 0),
    ("vendor", |s| s.config.registers[0] ^= 1),
    ("config length", |s| s.config.registers.push(0)),
    ("BAR flags", |s| s.config.registers[4] ^= 8),
    ("BAR type", |s| s.config.registers[4] ^= 2),
    ("BAR of ports", |s| s.config.registers[4] |= 1),
    ("32-bit BAR in version 1", |s| {
        s.config.registers[4] = 0xc000_0000;
        s.config.registers[5] = 0;
    }),
    ("upper half of a 32-bit BAR", |s| {
        s.version = 2;
        s.config.registers[4] = 0xc000_0000;
        s.config.registers[5] = 1;
    }),
    ("capability", |s| s.config.registers[0x10] ^= 1),
    ("extended", |s| s.config.extended_registers.push((0x100, 1))),
    ("msix version", |s| s.msix.version = 9),
    ("msix length", |s| s.msix.entries.truncate(1)),
    ("status bits", |s| s.common.status = 0x2f),
    ("status phase", |s| s.common.status = 11),
    ("activity", |s| s.common.active = false),
    ("features", |s| s.common.driver_features |= 1),
    ("features too few", |s| s.common.driver_features = 0),
    ("features beyond", |s| s.common.driver_features_beyond = true),
    ("isr", |s| s.common.isr = 4),
    ("config vector", |s| s.common.config_vector = 4),
    ("queue count", |s| s.queues.truncate(2)),
    ("queue size", |s| s.queues[0].size = 3),
    ("queue too large", |s| s.queues[0].size = 512),
    ("queue enabled", |s| s.queues[1].enabled = true),
    ("queue disabled", |s| s.queues[0].enabled = false),
    ("desc", |s| s.queues[0].desc_gpa = 0x10_0000),
    ("driver", |s| s.queues[0].driver_gpa = 1),
    ("device", |s| s.queues[0].device_gpa = u64::MAX - 3),
    ("queue vector", |s| s.queues[0].vector = 4),
    ("no progress", |s| s.queues[0].progress = None),
    ("progress", |s| s.queues[1].progress = Some(QueueProgressState::default())),
    ("device state", |s| s.device.data = serde_json::Value::Null),
];

#[test]
fn impossible_states_are_refused_and_leave_no_trace() {
    let good = save(&paused());
    for (what, alter) in REFUSED {
        let mut state = good.clone();
        alter(&mut state);
        let mut rig = Rig::cold();
        let fresh = save(&rig);
        let refused = restore(&mut rig, &state);
        assert!(refused.is_err(), "{what}");
        assert_eq!(save(&rig), fresh, "{what}");
        assert_eq!(rig.events.addresses(), [0_u64; 0], "{what}");
        assert_eq!(rig.programmed(3), None, "{what}");
        restore(&mut rig, &good).unwrap();
    }
}

#[test]
fn a_vector_that_cannot_be_programmed_leaves_no_trace() {
    let state = save(&paused());
    let mut rig = Rig::cold();
    let fresh = save(&rig);
    rig.interrupts.vector(2).unwrap().record().refuses = true;
    let refused = restore(&mut rig, &state);
    assert!(matches!(refused, Err(VirtioStateError::Msix(_))));
    let left = save(&rig);
    assert_eq!((left.config, left.msix, left.queues), (fresh.config, fresh.msix, fresh.queues));
    assert_eq!(left.common.config_vector, NO_VECTOR);
    assert_eq!(rig.programmed(0), None);
    assert_eq!(rig.take_calls().last(), Some(&DeviceCall::Reset));
    assert_eq!(left.common.status, 0);
}

/// Fields that may have any value, because a guest could have written it.
const HARMLESS: [(&str, Alter); 12] = [
    ("command", |s| s.config.registers[1] &= !0xffff),
    ("BAR", |s| s.config.registers[4] = 0xffff_0004),
    ("BAR high", |s| s.config.registers[5] = 0),
    ("interrupt line", |s| s.config.registers[15] = 0xff),
    ("message", |s| s.msix.entries[1].address = 0),
    ("mask", |s| s.msix.entries[3].masked = true),
    ("pending", |s| s.msix.entries[1].pending = false),
    ("selects", |s| s.common.queue_select = 0xffff),
    ("feature select", |s| s.common.driver_feature_select = u32::MAX),
    ("generation", |s| s.common.config_generation = 255),
    ("next avail", |s| {
        s.queues[0].progress = Some(QueueProgressState { next_avail: 0xffff, next_used: 0 });
    }),
    ("unused queue", |s| s.queues[1].desc_gpa = u64::MAX),
];

#[test]
fn odd_states_are_harmless() {
    let good = save(&paused());
    for (what, alter) in HARMLESS {
        let mut state = good.clone();
        alter(&mut state);
        assert_ne!(state, good, "{what}");
        let mut rig = Rig::cold();
        restore(&mut rig, &state).unwrap();
        assert_eq!(save(&rig), state, "{what}");
        rig.device.resume();
        assert!(rig.device.is_active(), "{what}");
    }
}

#[test]
fn an_error_does_not_repeat_its_source() {
    let mut state = save(&paused());
    state.queues[0].size = 3;
    let error = restore(&mut Rig::cold(), &state).unwrap_err();
    let source = error.source().unwrap().to_string();
    assert!(!error.to_string().contains(&source), "{error} / {source}");
}

/// Each width is restored into a machine that would have given the device the other one.
#[test]
fn a_device_comes_back_with_the_width_that_its_guest_has_found() {
    use BarWidth::{Bits32, Bits64};
    for (saved, here, version) in [(Bits64, Bits32, 1), (Bits32, Bits64, 2), (Bits32, Bits32, 2)] {
        let mut source = Rig::cold_with(saved, WINDOWS);
        source.probe();
        assert_eq!(source.bar_width(), saved);
        let state = save(&source);
        let wrapped = PciDevice::save(source.device.as_ref()).unwrap();
        assert_eq!((state.version, wrapped.version), (version, version));

        let mut rig = Rig::cold_with(here, WINDOWS);
        restore(&mut rig, &state).unwrap();
        assert_eq!(rig.bar_width(), saved);
        assert_eq!(rig.bar_gpa(), source.bar_gpa());
        assert_eq!(rig.mapper.mapped(), source.mapper.mapped());
        assert_eq!(save(&rig), state);
        // Its guest looks for the size, then moves it.
        rig.write_config(0x10, &u32::MAX.to_le_bytes());
        rig.write_config(0x14, &u32::MAX.to_le_bytes());
        let sizing = if saved == Bits32 { [0xffff_0000, 0] } else { [0xffff_0004, u32::MAX] };
        assert_eq!([rig.config_u32(0x10), rig.config_u32(0x14)], sizing);
        let window = if saved == Bits32 { WINDOWS.below_4g } else { WINDOWS.above_4g };
        let address = window.start_gpa.to_le_bytes();
        let (low, high) = address.split_at(4);
        rig.write_config(0x14, high);
        rig.write_config(0x10, low);
        assert_eq!(rig.mapper.mapped(), [window.start_gpa]);
    }
}

#[test]
fn a_device_gets_a_64_bit_bar_where_there_is_no_room_below_4_gib() {
    let below_4g = MmioRange { start_gpa: WINDOWS.below_4g.start_gpa, len_bytes: 0x8000 };
    let mut rig = Rig::cold_with(BarWidth::Bits32, MmioWindows { below_4g, ..WINDOWS });
    assert_eq!(rig.bar_width(), BarWidth::Bits64);
    rig.probe();
    assert_eq!(rig.mapper.mapped(), [WINDOWS.above_4g.start_gpa]);
    assert_eq!(save(&rig).version, 1);
}

#[test]
fn the_versions_of_a_state_agree() {
    let mut source = Rig::cold_with(BarWidth::Bits32, WINDOWS);
    source.probe();
    let mut wrapped = PciDevice::save(source.device.as_ref()).unwrap();
    wrapped.version = 1;
    let refused = PciDevice::restore(Rig::cold().device.as_ref(), &wrapped).unwrap_err();
    assert!(refused.to_string().contains("state version 2"), "{refused}");
}
