// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Bus Master Enable: once a driver has set it, a device without it neither works nor interrupts.

use super::*;
use crate::virtio::VirtioPciState;

const MEMORY: [u8; 2] = [2, 0];
const MEMORY_AND_BUS_MASTER: [u8; 2] = [6, 0];
const DRIVER_OK: u8 = 15;
const NEEDS_RESET: u8 = 0x40;

fn save(rig: &Rig) -> VirtioPciState {
    VirtioPciDevice::save(&rig.device).unwrap()
}

fn restored(state: &VirtioPciState) -> Rig {
    let mut rig = Rig::cold();
    VirtioPciDevice::restore(&rig.device, state).unwrap();
    rig.segment.refresh_mappings();
    rig.find();
    rig
}

/// A driver that is ready and has cleared the bit before.
fn ready_without() -> Rig {
    let rig = Rig::new();
    rig.write_config(4, &MEMORY_AND_BUS_MASTER);
    rig.write_config(4, &MEMORY);
    assert!(rig.negotiate(FakeDevice::OFFERED));
    rig.enable_msix();
    rig.set_up_queue(0, 128, 0x1_0000);
    rig.take_calls();
    rig.set_status(DRIVER_OK);
    rig
}

/// What a kernel does that another one is to follow (kexec), and the other one.
#[test]
fn clearing_it_stops_the_device_until_a_reset() {
    let rig = Rig::driving();
    let interrupt = rig.interrupt();
    rig.take_calls();
    rig.write_config(4, &MEMORY);
    assert_eq!(rig.take_calls(), [DeviceCall::Reset]);
    assert!(!rig.device.is_active());
    assert_eq!(rig.events.addresses(), [0_u64; 0]);
    assert_eq!(rig.status(), DRIVER_OK | NEEDS_RESET);
    interrupt.queue_used(0);
    assert_eq!((0..4).map(|vector| rig.delivered(vector)).sum::<usize>(), 0);

    rig.write_config(4, &MEMORY_AND_BUS_MASTER);
    assert_eq!(rig.take_calls(), [], "it continues with rings that may be something else by now");
    assert_eq!(rig.delivered(0), 1, "that it needs a reset is told when it may be");
    rig.set_status(0);
    assert!(rig.negotiate(FakeDevice::OFFERED));
    rig.set_up_queue(0, 128, 0x1_0000);
    rig.set_status(DRIVER_OK);
    assert!(rig.take_calls().ends_with(&[DeviceCall::Activate]));
    assert_eq!(rig.status(), DRIVER_OK);
}

#[test]
fn a_device_that_is_ready_without_it_begins_when_it_is_set() {
    let rig = ready_without();
    assert_eq!(rig.take_calls(), []);
    assert_eq!(rig.status(), DRIVER_OK);
    rig.device.pause();
    rig.device.resume();
    assert_eq!(rig.take_calls(), [], "a pause changes nothing about it");
    rig.write_config(4, &MEMORY_AND_BUS_MASTER);
    assert_eq!(rig.take_calls(), [DeviceCall::Activate]);
    assert_eq!(rig.events.addresses(), [rig.notify_gpa(0)]);
    rig.interrupt().queue_used(0);
    assert_eq!(rig.delivered(1), 1);
    rig.write_config(4, &MEMORY_AND_BUS_MASTER);
    assert_eq!(rig.take_calls(), [], "writing the same again does nothing");
}

#[test]
fn a_reset_before_it_is_set_ends_the_wait() {
    let rig = ready_without();
    rig.set_status(0);
    rig.take_calls();
    rig.write_config(4, &MEMORY_AND_BUS_MASTER);
    assert_eq!(rig.take_calls(), []);
}

/// As some firmware does.
#[test]
fn a_driver_that_never_sets_it_is_served_here_and_elsewhere() {
    let mut source = Rig::cold();
    source.write_config(4, &MEMORY);
    source.find();
    assert!(source.negotiate(FakeDevice::OFFERED));
    source.enable_msix();
    source.set_up_queue(0, 128, 0x1_0000);
    source.take_calls();
    source.set_status(DRIVER_OK);
    assert_eq!(source.take_calls(), [DeviceCall::Activate]);
    source.interrupt().queue_used(0);
    assert_eq!(source.delivered(1), 1);
    source.device.pause();
    let rig = restored(&save(&source));
    rig.take_calls();
    rig.device.resume();
    assert_eq!(rig.take_calls(), [DeviceCall::Activate]);
    rig.write_config(4, &MEMORY_AND_BUS_MASTER);
    assert!(rig.device.is_active(), "the next driver sets it");
    rig.write_config(4, &MEMORY);
    assert!(!rig.device.is_active());
}

#[test]
fn a_stopped_device_stays_stopped_elsewhere() {
    let source = Rig::driving();
    source.write_config(4, &MEMORY);
    source.device.pause();
    let state = save(&source);
    let rig = restored(&state);
    rig.take_calls();
    rig.device.resume();
    rig.write_config(4, &MEMORY_AND_BUS_MASTER);
    assert_eq!(rig.take_calls(), []);
    assert_eq!(rig.status(), DRIVER_OK | NEEDS_RESET);
}

#[test]
fn a_state_that_is_refused_leaves_the_bit_as_it_was() {
    let source = Rig::driving();
    source.write_config(4, &MEMORY);
    source.device.pause();
    let mut state = save(&source);
    state.msix.version += 1;
    let mut rig = Rig::cold();
    VirtioPciDevice::restore(&rig.device, &state).unwrap_err();
    rig.write_config(4, &MEMORY);
    rig.find();
    assert!(rig.negotiate(FakeDevice::OFFERED));
    rig.enable_msix();
    rig.set_up_queue(0, 128, 0x1_0000);
    rig.take_calls();
    rig.set_status(DRIVER_OK);
    assert_eq!(rig.take_calls(), [DeviceCall::Activate]);
    rig.interrupt().queue_used(0);
    assert_eq!(rig.delivered(1), 1);
}

/// The wait for a device's last work is on a vCPU's thread, and others continue meanwhile.
#[test]
fn vcpus_that_race_leave_it_as_the_last_one_wrote_it() {
    let rig = Rig::driving();
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                for _ in 0..200 {
                    rig.write_config(4, &MEMORY);
                    rig.write_config(4, &MEMORY_AND_BUS_MASTER);
                }
            });
        }
        for _ in 0..200 {
            rig.device.pause();
            rig.device.resume();
        }
    });
    rig.set_status(0);
    assert!(rig.negotiate(FakeDevice::OFFERED));
    rig.set_up_queue(0, 128, 0x1_0000);
    rig.take_calls();
    rig.set_status(DRIVER_OK);
    assert_eq!(rig.take_calls(), [DeviceCall::Activate]);
}
