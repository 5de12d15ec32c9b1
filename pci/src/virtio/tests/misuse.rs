// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What a driver must not do, and devices that no transport can carry.

use devices::virtio::{
    ActivateError, Activation, DeviceSnapshot, Pausing, PendingPause, StateError, VirtioDevice,
};
use virtio_queue::QueueState;

use super::*;
use crate::virtio::VirtioPciError;

const NEEDS_RESET: u8 = 0x40;

#[test]
fn unsupported_features_are_refused() {
    let rig = Rig::new();
    assert!(!rig.negotiate(FakeDevice::OFFERED | 1 << 40), "masked out by the transport");
    assert_eq!(rig.status(), 3);
    assert!(!rig.negotiate(FakeDevice::OFFERED | 1));
    assert!(!rig.negotiate(FakeDevice::OFFERED & !(1 << 32)), "VERSION_1 is a must");
    let acknowledged = |call: &DeviceCall| matches!(call, DeviceCall::Acknowledge(_));
    assert!(!rig.take_calls().iter().any(acknowledged));
    assert!(rig.negotiate(1 << 32), "it can be tried again");
}

#[test]
fn features_beyond_the_known_words_are_refused() {
    let rig = Rig::new();
    assert!(rig.negotiate(1 << 32));
    rig.set_status(0);
    rig.set_status(3);
    rig.write_u32(reg::DRIVER_FEATURE_SELECT, 1);
    rig.write_u32(reg::DRIVER_FEATURE, 1);
    rig.write_u32(reg::DRIVER_FEATURE_SELECT, 2);
    rig.write_u32(reg::DRIVER_FEATURE, 0);
    assert_eq!(rig.read_u32(reg::DRIVER_FEATURE), 0);
    rig.write_u32(reg::DRIVER_FEATURE_SELECT, 3);
    rig.write_u32(reg::DRIVER_FEATURE, 1);
    rig.set_status(11);
    assert_eq!(rig.status(), 3);
    rig.write_u32(reg::DRIVER_FEATURE, 0);
    rig.set_status(11);
    assert_eq!(rig.status(), 11, "it was taken back");
    rig.set_status(0);
    rig.set_status(3);
    rig.write_u32(reg::DRIVER_FEATURE_SELECT, 1);
    rig.write_u32(reg::DRIVER_FEATURE, 1);
    for value in [1, 0] {
        rig.write_u32(reg::DRIVER_FEATURE_SELECT, u32::MAX);
        rig.write_u32(reg::DRIVER_FEATURE, value);
    }
    rig.set_status(11);
    assert_eq!(rig.status(), 3, "words that no driver knows count until a reset");
    rig.write_u32(reg::DEVICE_FEATURE_SELECT, u32::MAX);
    assert_eq!(rig.read_u32(reg::DEVICE_FEATURE), 0);
}

#[test]
fn features_cannot_change_after_agreement() {
    let rig = Rig::new();
    assert!(rig.negotiate(1 << 32));
    rig.write_u32(reg::DRIVER_FEATURE_SELECT, 0);
    rig.write_u32(reg::DRIVER_FEATURE, 1 << 5);
    rig.set_up_queue(0, 256, 0x1_0000);
    rig.set_status(15);
    assert_eq!(rig.record().activation.as_ref().unwrap().features, 1 << 32);
}

#[test]
fn steps_cannot_be_left_out_or_taken_back() {
    let rig = Rig::new();
    for nonsense in [2, 4, 8, 12, 0x10, 0x20] {
        rig.set_status(nonsense);
        assert_eq!(rig.status(), 0);
    }
    assert!(rig.negotiate(1 << 32));
    rig.set_status(3);
    assert_eq!(rig.status(), 11);
    rig.set_status(0x8b);
    assert_eq!(rig.status(), 0x8b);
    rig.set_status(15);
    assert_eq!(rig.status(), 0x8b, "a driver that gave up cannot continue");
    rig.set_status(0);
    assert_eq!(rig.status(), 0);
}

/// Sets queue 0 up with one register changed, and expects the device to ask for a reset.
fn refused_queue(change: impl Fn(&Rig)) {
    let rig = Rig::new();
    assert!(rig.negotiate(FakeDevice::OFFERED));
    rig.enable_msix();
    rig.write_u16(reg::CONFIG_VECTOR, 0);
    rig.write_u16(reg::QUEUE_SELECT, 0);
    rig.write_u64(reg::QUEUE_DESC, 0x1_0000);
    rig.write_u64(reg::QUEUE_DRIVER, 0x2_0000);
    rig.write_u64(reg::QUEUE_DEVICE, 0x3_0000);
    change(&rig);
    rig.write_u16(reg::QUEUE_ENABLE, 1);
    rig.take_calls();
    rig.set_status(15);
    assert_eq!(rig.status(), 15 | NEEDS_RESET);
    assert_eq!(rig.delivered(0), 1, "the driver is told");
    assert_eq!(rig.take_calls(), [], "the device never sees the queue");
    assert_eq!(rig.events.addresses(), [0_u64; 0]);
    rig.set_status(0);
    assert_eq!(rig.status(), 0);
}

#[test]
fn queues_that_cannot_be_are_refused() {
    for size in [0, 3, 100, 512, 0xffff] {
        refused_queue(|rig| rig.write_u16(reg::QUEUE_SIZE, size));
    }
    for register in [reg::QUEUE_DESC, reg::QUEUE_DRIVER, reg::QUEUE_DEVICE] {
        for gpa in [0xf_fff0, 0x10_0000, 0x1_0001, 0xc000_0000, !0xf] {
            refused_queue(|rig| rig.write_u64(register, gpa));
        }
    }
    refused_queue(|rig| {
        for register in [reg::QUEUE_DESC, reg::QUEUE_DRIVER, reg::QUEUE_DEVICE] {
            rig.write_u64(register, 0);
        }
    });
    // The available ring without an address, and in the descriptor table.
    for gpa in [0, 0x1_0ffe] {
        refused_queue(|rig| rig.write_u64(reg::QUEUE_DRIVER, gpa));
    }
}

#[test]
fn a_device_that_does_not_start_asks_for_a_reset() {
    let rig = Rig::new();
    rig.record().refuses_activation = true;
    assert!(rig.negotiate(FakeDevice::OFFERED));
    rig.set_up_queue(0, 256, 0x1_0000);
    rig.set_status(15);
    assert_eq!(rig.status(), 15 | NEEDS_RESET);
    assert!(!rig.device.is_active());
    assert_eq!(rig.events.addresses(), [0_u64; 0]);
    rig.device.pause();
    rig.device.resume();
    rig.record().refuses_activation = false;
    assert!(rig.negotiate(FakeDevice::OFFERED));
    rig.set_up_queue(0, 256, 0x1_0000);
    rig.set_status(15);
    assert_eq!(rig.status(), 15);
}

#[test]
fn a_broken_device_asks_for_a_reset() {
    let rig = Rig::driving();
    rig.interrupt().needs_reset();
    assert_eq!(rig.status(), 15 | NEEDS_RESET);
    assert_eq!(rig.delivered(0), 1);
    rig.set_status(15 | NEEDS_RESET);
    assert_eq!(rig.status(), 15 | NEEDS_RESET);
    rig.set_status(0);
    assert_eq!(rig.status(), 0);
}

#[test]
fn queues_are_fixed_once_the_driver_is_ready() {
    let rig = Rig::driving();
    rig.write_u16(reg::QUEUE_SELECT, 0);
    rig.write_u16(reg::QUEUE_SIZE, 8);
    rig.write_u64(reg::QUEUE_DESC, 0x9_0000);
    rig.write_u16(reg::QUEUE_ENABLE, 0);
    assert_eq!(rig.read_u16(reg::QUEUE_SIZE), 128);
    assert_eq!(rig.read(rig.found.common + reg::QUEUE_DESC), 0x1_0000_u64.to_le_bytes());
    assert_eq!(rig.read_u16(reg::QUEUE_ENABLE), 1);
    rig.write_u16(reg::QUEUE_SELECT, 1);
    rig.write_u16(reg::QUEUE_ENABLE, 1);
    assert_eq!(rig.read_u16(reg::QUEUE_ENABLE), 0);
}

#[test]
fn a_queue_is_fixed_once_enabled() {
    let rig = Rig::new();
    assert!(rig.negotiate(FakeDevice::OFFERED));
    rig.set_up_queue(0, 128, 0x1_0000);
    rig.write_u16(reg::QUEUE_SIZE, 8);
    assert_eq!(rig.read_u16(reg::QUEUE_SIZE), 128);
}

#[test]
fn a_queue_that_does_not_exist_reads_as_unavailable() {
    let rig = Rig::new();
    assert!(rig.negotiate(FakeDevice::OFFERED));
    for index in [3, 0x7fff, 0xffff] {
        rig.write_u16(reg::QUEUE_SELECT, index);
        for register in [reg::QUEUE_SIZE, reg::QUEUE_DESC, reg::QUEUE_ENABLE] {
            rig.write_u16(register, 1);
            assert_eq!(rig.read_u16(register), 0);
        }
        rig.write_u16(reg::QUEUE_VECTOR, 1);
        assert_eq!(rig.read_u16(reg::QUEUE_VECTOR), 0xffff);
        assert_eq!(rig.read_u16(reg::QUEUE_NOTIFY_OFF), 0);
    }
}

#[test]
fn a_vector_that_does_not_exist_reads_back_as_none() {
    let rig = Rig::new();
    rig.write_u16(reg::CONFIG_VECTOR, 4);
    assert_eq!(rig.read_u16(reg::CONFIG_VECTOR), 0xffff);
    rig.write_u16(reg::QUEUE_VECTOR, 3);
    assert_eq!(rig.read_u16(reg::QUEUE_VECTOR), 3);
    rig.write_u16(reg::QUEUE_VECTOR, 0xfffe);
    assert_eq!(rig.read_u16(reg::QUEUE_VECTOR), 0xffff);
}

#[test]
fn writes_of_a_wrong_width_are_ignored() {
    let rig = Rig::driving();
    let common = rig.found.common;
    let before: [u8; 64] = rig.read(common);
    for (offset, len) in
        [(0x14, 2), (0x14, 4), (0x10, 4), (0x16, 1), (0x20, 2), (0x24, 8), (0x1d, 2), (0x3a, 2)]
    {
        rig.write(common + offset, &[0; 8][..len]);
    }
    assert_eq!(rig.read::<64>(common), before);
    assert!(rig.device.is_active());
}

#[test]
fn reads_of_any_width_agree() {
    let rig = Rig::driving();
    let common: [u8; 64] = rig.read(rig.found.common);
    for (offset, expected) in (0..).zip(common) {
        assert_eq!(rig.read(rig.found.common + offset), [expected]);
    }
    assert_eq!(rig.read::<8>(rig.found.common + 0x3c), [0; 8]);
}

/// A device of whatever shape.
struct OddDevice {
    device_id: u16,
    features: u64,
    queue_sizes: Vec<u16>,
}

impl Pausing for OddDevice {
    fn pause(&mut self) -> Vec<(u16, QueueState)> {
        Vec::new()
    }
    fn begin_pause(&mut self) -> PendingPause {
        PendingPause::default()
    }
    fn resume(&mut self) {}
}

impl VirtioDevice for OddDevice {
    fn device_id(&self) -> u16 {
        self.device_id
    }
    fn queue_sizes_max(&self) -> &[u16] {
        &self.queue_sizes
    }
    fn features(&self) -> u64 {
        self.features
    }
    fn acknowledge_features(&mut self, _features: u64) {}
    fn read_config(&self, _offset: u64, _data: &mut [u8]) {}
    fn write_config(&mut self, _offset: u64, _data: &[u8]) {}
    fn activate(&mut self, _activation: Activation) -> Result<(), ActivateError> {
        Ok(())
    }
    fn reset(&mut self) {}
    fn pausing(&mut self) -> &mut dyn Pausing {
        self
    }
    fn save(&self) -> DeviceSnapshot {
        DeviceSnapshot { kind: "odd".to_owned(), version: 1, data: serde_json::Value::Null }
    }
    fn restore(&mut self, _state: &DeviceSnapshot) -> Result<(), StateError> {
        Ok(())
    }
}

fn odd(
    device_id: u16,
    features: u64,
    queue_sizes: Vec<u16>,
) -> Result<VirtioPciDevice, VirtioPciError> {
    let memory = GuestMemory::from_ranges(&[(GuestAddress(0), 0x1000)]).unwrap();
    VirtioPciDevice::new(
        "odd".to_owned(),
        Box::new(OddDevice { device_id, features, queue_sizes }),
        BarWidth::Bits64,
        GuestMemoryHandle::new(memory),
        &FakeMsiSource::new(8),
        Arc::new(FakeIoEvents::default()),
    )
}

#[test]
fn devices_that_cannot_be_carried_are_refused() {
    let version_1 = 1 << 32;
    assert!(odd(2, version_1, vec![256; 7]).is_ok());
    assert!(matches!(odd(0xf000, version_1, vec![]), Err(VirtioPciError::DeviceId { .. })));
    assert!(matches!(odd(2, 0, vec![]), Err(VirtioPciError::Legacy { .. })));
    assert!(matches!(odd(2, version_1, vec![1; 1025]), Err(VirtioPciError::QueueCount { .. })));
    for size in [0, 3, 0xffff] {
        assert!(matches!(odd(2, version_1, vec![size]), Err(VirtioPciError::QueueSize { .. })));
    }
    assert!(matches!(odd(2, version_1, vec![1; 8]), Err(VirtioPciError::Msix { .. })));
}

#[test]
fn a_queue_that_the_device_does_not_serve_is_saved_where_it_began() {
    let mut rig = Rig::new();
    assert!(rig.negotiate(1 << 32));
    rig.set_up_queue(0, 256, 0x1_0000);
    rig.set_status(15);
    // As of a queue that belongs to a feature which the driver has not accepted.
    rig.record().activation = None;
    rig.device.pause();
    let state = VirtioPciDevice::save(&rig.device).unwrap();
    let progress = state.queues[0].progress.unwrap();
    assert_eq!((progress.next_avail, progress.next_used), (0, 0));
    rig.found = Found::default();
}
