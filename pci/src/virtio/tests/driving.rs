// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What a well-behaved driver does.

use devices::virtio::iommu::{Iommu, IommuConfig};

use super::*;

#[test]
fn the_function_says_what_it_is() {
    let rig = Rig::new();
    assert_eq!(rig.config_u32(0), 0x1042_1af4);
    assert_eq!(rig.config_u32(8), 0x0100_0001);
    assert_eq!(rig.found.notify_multiplier, 4);
    assert_eq!(rig.bar_gpa(), WINDOWS.above_4g.start_gpa);
    for place in [rig.found.common, rig.found.isr, rig.found.device, rig.found.msix_table] {
        assert!((rig.bar_gpa()..rig.bar_gpa() + 0x1_0000).contains(&place));
    }
}

#[test]
fn linux_drives_the_device() {
    let mut rig = Rig::cold();
    // Sizing with decode off, as the PCI core does it.
    rig.write_config(4, &[0, 0]);
    rig.write_config(0x10, &[0xff; 4]);
    rig.write_config(0x14, &[0xff; 4]);
    assert_eq!(rig.config_u32(0x10), 0xffff_0004);
    assert_eq!(rig.config_u32(0x14), 0xffff_ffff);
    rig.write_config(0x10, &4_u32.to_le_bytes());
    rig.write_config(0x14, &0x40_u32.to_le_bytes());
    assert_eq!(rig.mapper.take_calls(), []);
    rig.probe();

    rig.set_status(0);
    assert_eq!(rig.status(), 0);
    rig.set_status(1);
    rig.set_status(3);
    assert_eq!(rig.offered_features(), FakeDevice::OFFERED, "RING_RESET is not offered");
    assert!(rig.negotiate(FakeDevice::OFFERED));
    rig.enable_msix();
    rig.write_u16(reg::CONFIG_VECTOR, 0);
    assert_eq!(rig.read_u16(reg::CONFIG_VECTOR), 0);
    assert_eq!(rig.read_u16(reg::NUM_QUEUES), 3);
    rig.write_u16(reg::QUEUE_SELECT, 1);
    assert_eq!(rig.read_u16(reg::QUEUE_SIZE), 64);
    assert_eq!(rig.read_u16(reg::QUEUE_ENABLE), 0);
    rig.set_up_queue(0, 256, 0x1_0000);
    rig.set_up_queue(2, 512, 0x4_0000);
    assert_eq!(rig.read_u16(reg::QUEUE_ENABLE), 1);
    rig.set_status(15);
    assert_eq!(rig.status(), 15);

    let calls = rig.take_calls();
    let acknowledged = DeviceCall::Acknowledge(FakeDevice::OFFERED);
    assert!(calls.ends_with(&[acknowledged, DeviceCall::Activate]), "{calls:?}");
    let record = rig.record();
    let activation = record.activation.as_ref().unwrap();
    assert_eq!(activation.features, FakeDevice::OFFERED);
    let states: Vec<_> = activation.queues.iter().map(|q| (q.index, q.queue.state())).collect();
    assert_eq!(states.len(), 2);
    let (index, state) = states[1];
    assert_eq!((index, state.size, state.max_size, state.ready), (2, 512, 1024, true));
    assert_eq!(
        (state.desc_table, state.avail_ring, state.used_ring),
        (0x4_0000, 0x5_0000, 0x6_0000)
    );
    assert!(state.event_idx_enabled);
}

#[test]
fn behind_an_iommu_the_driver_s_addresses_are_not_those_of_memory() {
    const ACCESS_PLATFORM: u64 = 1 << 33;
    let config = IommuConfig { id: "iommu".to_owned(), address_bits: 48, memory_bytes: 0 };
    let iommu = Iommu::new(config).unwrap();
    let endpoint = iommu.handle().endpoint();
    let mut rig = Rig::cold_as(BarWidth::Bits64, WINDOWS, |device| device.behind(endpoint));
    rig.probe();
    assert_eq!(rig.offered_features(), FakeDevice::OFFERED | ACCESS_PLATFORM);
    // Whether the driver knows or not; the device itself never does.
    for accepted in [0, ACCESS_PLATFORM] {
        assert!(rig.negotiate(FakeDevice::OFFERED | accepted));
        rig.set_up_queue(0, 128, 1 << 40);
        rig.set_status(15);
        assert_eq!(rig.status(), 15);
        let calls = rig.take_calls();
        let acknowledged = DeviceCall::Acknowledge(FakeDevice::OFFERED);
        assert!(calls.ends_with(&[acknowledged, DeviceCall::Activate]), "{calls:?}");
        let record = rig.record();
        let activation = record.activation.as_ref().unwrap();
        assert_eq!(activation.features, FakeDevice::OFFERED);
        assert!(activation.queues.iter().all(|queue| queue.dma.is_some()));
    }
}

#[test]
fn event_index_is_off_unless_accepted() {
    let rig = Rig::new();
    assert!(rig.negotiate(1 << 32));
    rig.set_up_queue(0, 256, 0x1_0000);
    rig.set_status(15);
    let record = rig.record();
    assert!(!record.activation.as_ref().unwrap().queues[0].queue.state().event_idx_enabled);
}

#[test]
fn notifications_go_through_the_kernel_once_the_driver_is_ready() {
    let rig = Rig::driving();
    let (first, third) = (rig.notify_gpa(0), rig.notify_gpa(2));
    assert_eq!(rig.events.addresses(), [first, third], "only enabled queues");
    assert!(rig.events.signal(third));
    assert_eq!(rig.take_kicks(2), 1);
    assert_eq!(rig.take_kicks(0), 0);
}

#[test]
fn trapped_notifications_arrive_as_well() {
    let rig = Rig::driving();
    let gpa = rig.notify_gpa(2);
    assert!(rig.mapper.write(gpa, &2_u16.to_le_bytes()));
    assert_eq!(rig.take_kicks(2), 1);
    assert!(rig.mapper.write(gpa, &2_u32.to_le_bytes()), "as firmware does");
    assert_eq!(rig.take_kicks(2), 1);
    assert!(rig.mapper.write(gpa + 4, &[9, 0]), "a queue that does not exist");
    assert!(rig.mapper.write(rig.found.notify + 0xffc, &[9, 0]));
}

#[test]
fn ioeventfds_move_with_the_bar() {
    let mut rig = Rig::driving();
    let before = rig.events.addresses();
    rig.write_config(0x10, &0x0080_0000_u32.to_le_bytes());
    assert_eq!(rig.bar_gpa(), WINDOWS.above_4g.start_gpa + 0x80_0000);
    let moved: Vec<u64> = before.iter().map(|gpa| gpa + 0x80_0000).collect();
    assert_eq!(rig.events.addresses(), moved);
    rig.find();
    rig.write(rig.notify_gpa(0), &[0, 0]);
    assert_eq!(rig.take_kicks(0), 1);

    rig.write_config(4, &[4, 0]);
    assert_eq!(rig.events.addresses(), [0_u64; 0]);
    rig.write_config(4, &[6, 0]);
    assert_eq!(rig.events.addresses(), moved);
}

#[test]
fn used_buffers_raise_the_queue_s_vector() {
    let rig = Rig::driving();
    let interrupt = rig.interrupt();
    interrupt.queue_used(2);
    assert_eq!((rig.delivered(0), rig.delivered(1), rig.delivered(3)), (0, 0, 1));
    interrupt.queue_used(0);
    assert_eq!(rig.delivered(1), 1);
    assert_eq!(rig.read::<1>(rig.found.isr), [1]);
    assert_eq!(rig.read::<1>(rig.found.isr), [0], "reading clears it");
    interrupt.queue_used(1);
    interrupt.queue_used(999);
    assert_eq!((0..4).map(|vector| rig.delivered(vector)).sum::<usize>(), 0);
}

#[test]
fn configuration_changes_count_and_interrupt() {
    let rig = Rig::driving();
    let [before] = rig.read(rig.found.common + reg::GENERATION);
    rig.interrupt().config_changed();
    assert_eq!(rig.delivered(0), 1);
    assert_eq!(rig.read(rig.found.common + reg::GENERATION), [before + 1]);
    assert_eq!(rig.read::<4>(rig.found.isr), [2, 0, 0, 0]);
}

/// The generation as a driver reads it.
fn generation(rig: &Rig) -> u8 {
    let [generation] = rig.read(rig.found.common + reg::GENERATION);
    generation
}

#[test]
fn a_change_between_two_reads_counts_before_the_device_tells_of_it() {
    let rig = Rig::driving();
    rig.record().config[..8].copy_from_slice(&(4_u64 << 30).to_le_bytes());
    let before = generation(&rig);
    let low: [u8; 4] = rig.read(rig.found.device);
    // As by the thread of the API, which has not come to `config_changed` yet.
    rig.record().config[..8].copy_from_slice(&(3_u64 << 30).to_le_bytes());
    let high: [u8; 4] = rig.read(rig.found.device + 4);
    assert_eq!((low, high), ([0; 4], [0; 4]), "a mixture");
    assert_ne!(generation(&rig), before);
    assert_eq!(rig.delivered(0), 0);

    let before = generation(&rig);
    rig.record().config[15] = 1;
    assert_ne!(generation(&rig), before, "whatever part changes");
    let before = generation(&rig);
    assert_eq!(rig.read::<8>(rig.found.device), (3_u64 << 30).to_le_bytes());
    assert_eq!(generation(&rig), before, "nothing changes");
}

#[test]
fn device_configuration_is_reached() {
    let rig = Rig::new();
    rig.write(rig.found.device + 4, &[1, 2, 3, 4]);
    assert_eq!(rig.record().config[4..8], [1, 2, 3, 4]);
    assert_eq!(rig.read::<8>(rig.found.device + 4), [1, 2, 3, 4, 0, 0, 0, 0]);
    assert_eq!(rig.read::<4>(rig.found.device + 0xffc), [0; 4]);
}

#[test]
fn a_driver_without_the_bar_uses_the_window() {
    let rig = Rig::new();
    rig.write_config(4, &[0, 0]);
    let at = rig.found.window_capability;
    let status = u32::try_from(reg::STATUS).unwrap();
    let bar_offset = u32::try_from(rig.found.common - rig.bar_gpa()).unwrap();
    rig.write_config(at + 4, &[0]);
    rig.write_config(at + 8, &(bar_offset + status).to_le_bytes());
    rig.write_config(at + 12, &1_u32.to_le_bytes());
    rig.write_config(at + 16, &[1]);
    rig.write_config(at + 16, &[3]);
    assert_eq!(rig.config_u8(at + 16), 3);
    rig.write_config(at + 8, &(bar_offset + 4).to_le_bytes());
    rig.write_config(at + 12, &4_u32.to_le_bytes());
    assert_eq!(u64::from(rig.config_u32(at + 16)), FakeDevice::OFFERED & 0xffff_ffff);
    // Another BAR, a length that is none, a place that is not aligned or not there: ignored.
    rig.write_config(at + 8, &(bar_offset + status).to_le_bytes());
    for (bar, len_bytes, offset) in [
        (1, 1_u32, bar_offset + status),
        (0, 3, bar_offset + status),
        (0, 4, bar_offset + 2),
        (0, 4, 0x1_0000),
    ] {
        rig.write_config(at + 4, &[bar]);
        rig.write_config(at + 8, &offset.to_le_bytes());
        rig.write_config(at + 12, &len_bytes.to_le_bytes());
        rig.write_config(at + 16, &[0; 4]);
    }
    rig.write_config(4, &[6, 0]);
    assert_eq!(rig.status(), 3);
}

#[test]
fn reset_works_while_active() {
    let rig = Rig::driving();
    let gpa = rig.notify_gpa(0);
    rig.write(gpa, &[0, 0]);
    rig.take_calls();
    rig.set_status(0);
    assert_eq!(rig.status(), 0);
    assert_eq!(rig.take_calls(), [DeviceCall::Reset]);
    assert_eq!(rig.events.addresses(), [0_u64; 0]);
    assert_eq!(rig.read_u16(reg::CONFIG_VECTOR), 0xffff);
    rig.write_u16(reg::QUEUE_SELECT, 2);
    assert_eq!(rig.read_u16(reg::QUEUE_SIZE), 1024);
    assert_eq!(rig.read_u16(reg::QUEUE_ENABLE), 0);
    assert_eq!(rig.read_u16(reg::QUEUE_VECTOR), 0xffff);
    assert_eq!(rig.read::<8>(rig.found.common + reg::QUEUE_DESC), [0; 8]);

    // And again, from the beginning; the old kick is gone.
    assert!(rig.negotiate(FakeDevice::OFFERED));
    rig.set_up_queue(0, 64, 0x1_0000);
    rig.set_status(15);
    assert_eq!(rig.status(), 15);
    assert_eq!(rig.take_kicks(0), 0);
}

#[test]
fn addresses_may_be_written_in_one_go() {
    let rig = Rig::new();
    assert!(rig.negotiate(FakeDevice::OFFERED));
    let gpa = rig.found.common + reg::QUEUE_DEVICE;
    rig.write(gpa, &0x12_3456_789a_u64.to_le_bytes());
    assert_eq!(rig.read(gpa), 0x12_3456_789a_u64.to_le_bytes());
}

#[test]
fn pause_and_resume_reach_the_device_once() {
    let rig = Rig::driving();
    rig.take_calls();
    rig.device.pause();
    rig.device.pause();
    assert_eq!(rig.take_calls(), [DeviceCall::Pause]);
    rig.device.resume();
    rig.device.resume();
    assert_eq!(rig.take_calls(), [DeviceCall::Resume]);
    assert_eq!((rig.take_kicks(0), rig.take_kicks(2)), (1, 1));
    assert_eq!((rig.delivered(1), rig.delivered(3)), (1, 1));
    rig.set_status(0);
    rig.take_calls();
    rig.device.pause();
    rig.device.resume();
    assert_eq!(rig.take_calls(), [], "a device that is not active has nothing to pause");
}

/// A vCPU may have been stopped between the ring and the notification.
#[test]
fn a_device_that_runs_is_told_of_each_of_its_queues() {
    let rig = Rig::driving();
    let queues = rig.device.kick_queues().unwrap();
    let indexes: Vec<_> = queues.rings.iter().map(|rings| rings.index).collect();
    assert_eq!((&indexes[..], queues.count), (&[0, 2][..], 3));
    assert!(queues.rings.iter().all(|rings| rings.driver_gpa != rings.device_gpa));
    assert_eq!((rig.take_kicks(0), rig.take_kicks(1), rig.take_kicks(2)), (1, 0, 1));
    rig.device.pause();
    assert_eq!(rig.device.kick_queues(), None, "it is not to access memory");
    assert_eq!(rig.take_kicks(0), 0);
}

#[test]
fn vcpus_and_device_threads_do_not_block_each_other() {
    const ROUNDS: u64 = 200;
    let rig = Rig::driving();
    let bar = rig.bar_gpa();
    let offset = rig.notify_gpa(0) - bar;
    let interrupt = rig.interrupt();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for round in 0..ROUNDS {
                let low = u32::try_from(round % 4 * 0x10_0000).unwrap();
                rig.write_config(0x10, &low.to_le_bytes());
            }
        });
        scope.spawn(|| {
            for _ in 0..ROUNDS {
                rig.mapper.write(bar + offset, &[0, 0]);
                rig.ecam.write(SLOT + rig.found.msix_capability + 2, &[0, 0x80]);
            }
        });
        scope.spawn(|| {
            for _ in 0..ROUNDS {
                interrupt.queue_used(0);
                interrupt.config_changed();
            }
        });
        for _ in 0..ROUNDS {
            rig.device.pause();
            rig.device.resume();
        }
    });
    let rounds = usize::try_from(ROUNDS).unwrap();
    assert!(rig.delivered(1) >= rounds && rig.delivered(0) >= rounds);
    assert_eq!(rig.events.addresses().len(), 2);
    assert!(rig.device.is_active());
}

#[test]
fn dropping_the_device_stops_it() {
    let mut rig = Rig::driving();
    let (record, events) = (Arc::clone(&rig.record), Arc::clone(&rig.events));
    rig.take_calls();
    let spare = Rig::cold();
    rig.segment = Arc::clone(&spare.segment);
    rig.mapper = Arc::clone(&spare.mapper);
    rig.device = Arc::clone(&spare.device);
    assert_eq!(record.lock().take_calls(), [DeviceCall::Reset]);
    assert_eq!(events.addresses(), [0_u64; 0]);
}
