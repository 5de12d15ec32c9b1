// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests of the segment and of both ways to configuration space.
#![expect(clippy::unwrap_used, reason = "tests")]

use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use devices::bus::BusDevice;
use memory::{GuestMemory, GuestMemoryHandle};
use vm_memory::GuestAddress;

use super::*;
use crate::bar::{BarDecode, BarDescription};
use crate::bar_placement::MmioRange;
use crate::device::{PciDeviceState, PciStateError};
use crate::fakes::{FakeDevice, FakeIoEvents, FakeMapper, FakeMsiSource};
use crate::virtio::{BarWidth, VirtioPciDevice};

const HIGH: u64 = 0x40_0000_0000;
const WINDOWS: MmioWindows = MmioWindows {
    below_4g: MmioRange { start_gpa: 0xc000_0000, len_bytes: 0x10_0000 },
    above_4g: MmioRange { start_gpa: HIGH, len_bytes: 0x100_0000 },
};

fn device(id: &str) -> Arc<dyn PciDevice> {
    device_of(id, BarWidth::Bits64)
}

fn device_of(id: &str, width: BarWidth) -> Arc<dyn PciDevice> {
    let memory = GuestMemory::from_ranges(&[(GuestAddress(0), 0x1000)]).unwrap();
    let memory = GuestMemoryHandle::new(memory);
    let events = Arc::new(FakeIoEvents::default());
    let interrupts = FakeMsiSource::new(16);
    let device = VirtioPciDevice::new(
        id.to_owned(),
        FakeDevice::with_record().0,
        width,
        memory,
        &interrupts,
        events,
    );
    Arc::new(device.unwrap())
}

fn segment(segment: u16) -> (Arc<PciSegment>, Arc<FakeMapper>) {
    let mapper = Arc::new(FakeMapper::new(vec![WINDOWS.below_4g, WINDOWS.above_4g]));
    let options = PciSegmentOptions { segment, windows: WINDOWS };
    (PciSegment::new(options, mapper.clone()).unwrap(), mapper)
}

fn number(device: u8) -> Option<DeviceNumber> {
    DeviceNumber::new(device).ok()
}

fn read_u32(bus: &dyn BusDevice, offset: u64) -> u32 {
    let mut data = [0; 4];
    bus.read(offset, &mut data);
    u32::from_le_bytes(data)
}

#[test]
fn numbers_are_given_in_order_and_wishes_honoured() {
    let (segment, _) = segment(3);
    let add = |id, wish| segment.add_device(&device(id), wish).map(|bdf| bdf.to_string());
    assert_eq!(add("a", None).unwrap(), "0003:00:01.0");
    assert_eq!(add("b", number(2)).unwrap(), "0003:00:02.0");
    assert_eq!(add("c", number(31)).unwrap(), "0003:00:1f.0");
    assert_eq!(add("d", None).unwrap(), "0003:00:03.0");
    let ids: Vec<String> =
        segment.devices().into_iter().map(|(_, device)| device.id().to_owned()).collect();
    assert_eq!(ids, ["_pci_host_bridge_3", "a", "b", "d", "c"]);
}

#[test]
fn a_taken_number_is_refused_by_name() {
    let (segment, _) = segment(0);
    segment.add_device(&device("a"), number(5)).unwrap();
    let error = segment.add_device(&device("b"), number(5)).unwrap_err();
    assert_eq!(
        error.to_string(),
        "PCI address 0000:00:05.0 asked for by b is taken by a; choose another pci_device_id"
    );
    let error = segment.add_device(&device("b"), number(0)).unwrap_err();
    assert!(matches!(error, PciError::Taken { holder, .. } if holder == "_pci_host_bridge_0"));
    let error = segment.add_device(&device("a"), None).unwrap_err();
    assert!(matches!(error, PciError::DuplicateId { id, .. } if id == "a"));
}

#[test]
fn reserved_numbers_wait_for_their_device() {
    let (segment, _) = segment(0);
    segment.reserve(number(1).unwrap(), "late").unwrap();
    assert!(segment.reserve(number(1).unwrap(), "other").is_err());
    assert!(segment.reserve(DeviceNumber::HOST_BRIDGE, "other").is_err());
    assert_eq!(segment.add_device(&device("early"), None).unwrap().device(), 2);
    assert_eq!(segment.add_device(&device("late"), number(1)).unwrap().device(), 1);
}

#[test]
fn a_chosen_number_is_kept_and_can_be_released() {
    let (segment, _) = segment(0);
    let first = segment.choose(None, "a").unwrap();
    assert_eq!(first.get(), 1);
    assert_eq!(segment.choose(number(1), "a").unwrap(), first, "kept for it already");
    assert_eq!(segment.choose(None, "b").unwrap().get(), 2);
    segment.release(first);
    assert_eq!(segment.add_device(&device("c"), None).unwrap().device(), 1);
    segment.release(first);
    assert!(segment.choose(number(1), "d").is_err(), "only what is kept is returned");
    assert!(segment.choose(number(0), "d").is_err());
}

#[test]
fn a_removed_function_leaves_nothing_behind() {
    let (segment, mapper) = segment(0);
    let ecam = PciEcam::new(&segment);
    let (first, second) = (device("a"), device("b"));
    let at = segment.add_device(&first, None).unwrap();
    segment.add_device(&second, None).unwrap();
    ecam.write(1 << 15 | 4, &[2, 0]);
    ecam.write(2 << 15 | 4, &[2, 0]);
    let both = mapper.mapped();
    assert_eq!(both.len(), 2);
    let number = number(at.device()).unwrap();

    segment.hide(number);
    assert_eq!(read_u32(&ecam, 1 << 15), u32::MAX);
    ecam.write(1 << 15 | 4, &[0, 0]);
    assert_eq!(mapper.mapped(), both, "hidden, and writes go nowhere");

    assert_eq!(segment.remove_device(number).unwrap().id(), "a");
    assert_eq!(mapper.mapped().len(), 1);
    assert!(segment.remove_device(number).is_none());
    assert!(segment.remove_device(DeviceNumber::HOST_BRIDGE).is_none());
    assert_eq!(Arc::strong_count(&first), 1, "no reference is left");

    // The next one there gets its number and its addresses.
    let third = device("c");
    assert_eq!(segment.add_device(&third, None).unwrap(), at);
    assert_ne!(read_u32(&ecam, 1 << 15), u32::MAX, "not hidden");
    ecam.write(1 << 15 | 4, &[2, 0]);
    assert_eq!(mapper.mapped(), both);
    assert_eq!(mapper.violations(), Vec::<String>::new());
}

#[test]
fn a_full_segment_says_so() {
    let (segment, _) = segment(0);
    for at in 1..32 {
        segment.add_device(&device(&format!("d{at}")), None).unwrap();
    }
    let error = segment.add_device(&device("one-too-many"), None).unwrap_err();
    assert!(matches!(error, PciError::Full { segment: 0, id } if id == "one-too-many"));
}

#[test]
fn no_room_for_bars_leaves_the_number_free() {
    let mapper = Arc::new(FakeMapper::default());
    let tiny = MmioRange { start_gpa: HIGH, len_bytes: 0x1000 };
    let windows = MmioWindows { above_4g: tiny, ..WINDOWS };
    let segment = PciSegment::new(PciSegmentOptions { segment: 0, windows }, mapper).unwrap();
    let error = segment.add_device(&device("a"), None).unwrap_err();
    assert!(matches!(error, PciError::Placement { .. }));
    assert_eq!(segment.devices().len(), 1);
}

#[test]
fn ecam_finds_functions_and_ones_elsewhere() {
    let (segment, _) = segment(0);
    segment.add_device(&device("a"), number(5)).unwrap();
    let ecam = PciEcam::new(&segment);
    assert_eq!(read_u32(&ecam, 0), 0x0d57_8086);
    assert_eq!(read_u32(&ecam, 8), 0x0600_0000);
    assert_eq!(read_u32(&ecam, 5 << 15), 0x1042_1af4);
    for absent in [4 << 15, 5 << 15 | 1 << 12, 1 << 20 | 5 << 15, u64::MAX] {
        assert_eq!(read_u32(&ecam, absent), 0xffff_ffff, "{absent:#x}");
    }
    assert_eq!(read_u32(&ecam, (5 << 15) + 4094), 0xffff_0000, "over the end of a function");
}

#[test]
fn ports_find_the_same_functions() {
    let (segment, _) = segment(0);
    segment.add_device(&device("a"), number(5)).unwrap();
    let ports = PciConfigIo::new(&segment);
    assert_eq!(read_u32(&ports, 4), 0xffff_ffff, "not enabled");
    ports.write(0, &0x8000_2803_u32.to_le_bytes());
    assert_eq!(read_u32(&ports, 0), 0x8000_2800);
    assert_eq!(read_u32(&ports, 4), 0x1042_1af4);
    let mut device_id = [0; 2];
    ports.read(6, &mut device_id);
    assert_eq!(device_id, [0x42, 0x10]);
    ports.write(0, &[0; 2]);
    ports.write(1, &[6]);
    assert_eq!(ports.address(), 0x8000_2800, "only whole words reach the address register");

    ports.write(0, &0x8000_283c_u32.to_le_bytes());
    ports.write(4, &[9]);
    assert_eq!(read_u32(&ports, 4) & 0xff, 9);
    ports.write(0, &0x8001_2800_u32.to_le_bytes());
    assert_eq!(read_u32(&ports, 4), 0xffff_ffff, "another bus");
    for offset in [1, 2, 3, 8, u64::MAX] {
        assert_eq!(read_u32(&ports, offset), 0xffff_ffff);
    }
}

#[test]
fn the_address_register_can_be_saved() {
    let (segment, _) = segment(0);
    let ports = PciConfigIo::new(&segment);
    ports.write(0, &0x8000_2804_u32.to_le_bytes());
    let other = PciConfigIo::new(&segment);
    other.set_address(ports.address());
    assert_eq!(read_u32(&other, 0), 0x8000_2804);
    other.set_address(u32::MAX);
    assert_eq!(other.address(), 0x80ff_fffc);
}

#[test]
fn the_command_register_maps_the_bar() {
    let (segment, mapper) = segment(0);
    segment.add_device(&device("a"), number(5)).unwrap();
    let ecam = PciEcam::new(&segment);
    ecam.write(5 << 15 | 4, &[2, 0]);
    assert_eq!(mapper.mapped(), [HIGH]);
    ecam.write(5 << 15 | 0x10, &0x0010_0000_u32.to_le_bytes());
    assert_eq!(mapper.mapped(), [HIGH + 0x10_0000]);
    ecam.write(5 << 15 | 3, &[0, 0]);
    assert_eq!(
        mapper.mapped(),
        [0_u64; 0],
        "a write that only touches the command register's first byte"
    );
    assert_eq!(mapper.violations(), Vec::<String>::new());
}

#[test]
fn a_segment_that_is_gone_reads_as_ones() {
    let (segment, _) = segment(0);
    let (ecam, ports) = (PciEcam::new(&segment), PciConfigIo::new(&segment));
    ports.write(0, &0x8000_0000_u32.to_le_bytes());
    drop(segment);
    assert_eq!(read_u32(&ecam, 0), 0xffff_ffff);
    assert_eq!(read_u32(&ports, 4), 0xffff_ffff);
    ecam.write(0, &[0]);
}

#[test]
fn the_host_bridge_saves_and_refuses_foreign_states() {
    let bridge = HostBridge::new(0);
    let state = bridge.save().unwrap();
    bridge.restore(&state).unwrap();
    let mut foreign = state.clone();
    foreign.kind = "virtio-pci".to_owned();
    assert!(matches!(bridge.restore(&foreign), Err(crate::PciStateError::Kind { .. })));
    let mut newer = state.clone();
    newer.version = 2;
    assert!(matches!(bridge.restore(&newer), Err(crate::PciStateError::Version { .. })));
    let mut other = state;
    other.data["registers"][0] = 1.into();
    assert!(matches!(bridge.restore(&other), Err(crate::PciStateError::Device { .. })));
}

/// Reads the vendor of device 1 in a thread, which tells when it begins and what it has seen.
fn reader(segment: &Arc<PciSegment>) -> (mpsc::Receiver<()>, mpsc::Receiver<u16>) {
    let (begun, has_begun) = mpsc::channel();
    let (seen, has_seen) = mpsc::channel();
    let segment = Arc::clone(segment);
    std::thread::spawn(move || {
        begun.send(()).unwrap();
        let mut vendor = [0; 2];
        let address = ConfigAddress { bus: 0, device: 1, function: 0, offset: register::VENDOR_ID };
        segment.read_config(address, &mut vendor);
        seen.send(u16::from_le_bytes(vendor)).unwrap();
    });
    (has_begun, has_seen)
}

const LONG: Duration = Duration::from_mins(1);

#[test]
fn who_looks_at_a_coming_function_waits_for_it() {
    for comes in [true, false] {
        let (segment, _) = segment(0);
        let (waited, has_waited) = mpsc::channel();
        let waited = std::sync::Mutex::new(waited);
        segment.report_waits(Box::new(move || waited.lock().unwrap().send(()).unwrap()));
        let number = segment.expect(None, "a").unwrap();
        assert_eq!(number.get(), 1);
        assert!(segment.choose(Some(number), "b").is_err());
        assert!(segment.add_device(&device("b"), Some(number)).is_err());
        let (begun, seen) = reader(&segment);
        begun.recv_timeout(LONG).unwrap();
        // Others are not kept waiting.
        let mut vendor = [0; 2];
        let address = ConfigAddress { bus: 0, device: 2, function: 0, offset: register::VENDOR_ID };
        segment.read_config(address, &mut vendor);
        assert_eq!(vendor, [0xff; 2]);
        assert_eq!(seen.recv_timeout(Duration::from_millis(50)), Err(RecvTimeoutError::Timeout));
        assert!(has_waited.try_recv().is_err(), "it waits, and the other did not");
        if comes {
            segment.deliver(&device("a"), number).unwrap();
            assert_eq!(seen.recv_timeout(LONG), Ok(0x1af4));
        } else {
            segment.release(number);
            assert_eq!(seen.recv_timeout(LONG), Ok(0xffff));
        }
        has_waited.recv_timeout(LONG).unwrap();
        assert!(has_waited.try_recv().is_err(), "one wait is reported once");
    }
}

#[test]
fn a_function_that_the_guest_has_looked_at_stays() {
    let (segment, _) = segment(0);
    let number = segment.choose(None, "a").unwrap();
    let at = |offset| ConfigAddress { bus: 0, device: number.get(), function: 0, offset };
    let mut word = [0; 2];
    segment.read_config(at(0), &mut word);
    assert_eq!(word, [0xff; 2], "there is none yet");
    segment.add_device(&device("a"), Some(number)).unwrap();
    assert!(segment.hide_unseen(number), "it has not been looked at");
    segment.read_config(at(0), &mut word);
    assert_eq!(word, [0xff; 2]);
    segment.show(number);
    segment.read_config(at(0), &mut word);
    assert_ne!(word, [0xff; 2]);
    assert!(!segment.hide_unseen(number));
    segment.read_config(at(0), &mut word);
    assert_ne!(word, [0xff; 2]);
}

#[test]
fn a_hidden_function_is_not_waited_for_and_responds_once_it_is_shown() {
    let (segment, _) = segment(0);
    let number = segment.expect(None, "a").unwrap();
    let look = || {
        let (begun, seen) = reader(&segment);
        begun.recv_timeout(LONG).unwrap();
        seen
    };
    let waiting = look();
    assert_eq!(waiting.recv_timeout(Duration::from_millis(50)), Err(RecvTimeoutError::Timeout));
    segment.hide(number);
    assert_eq!(waiting.recv_timeout(LONG), Ok(0xffff), "its wait is over");
    segment.deliver(&device("a"), number).unwrap();
    assert_eq!(look().recv_timeout(LONG), Ok(0xffff));
    segment.show(number);
    assert_eq!(look().recv_timeout(LONG), Ok(0x1af4));
    // A number that is released hides no later function.
    let other = segment.choose(None, "b").unwrap();
    segment.hide(other);
    segment.release(other);
    assert_eq!(segment.choose(None, "c").unwrap(), other);
    segment.add_device(&device("c"), Some(other)).unwrap();
    let address = ConfigAddress { bus: 0, device: other.get(), function: 0, offset: 0 };
    let mut vendor = [0; 2];
    segment.read_config(address, &mut vendor);
    assert_eq!(vendor, 0x1af4_u16.to_le_bytes());
}

#[test]
fn an_undelivered_interrupt_is_awaited_until_its_number_is_released() {
    let (segment, _) = segment(0);
    let number = segment.expect(None, "a").unwrap();
    segment.add_device(&device("a"), None).unwrap();
    let (begun, seen) = reader(&segment);
    begun.recv_timeout(LONG).unwrap();
    assert!(matches!(segment.deliver(&device("a"), number), Err(PciError::DuplicateId { .. })));
    let (begun_late, seen_late) = reader(&segment);
    begun_late.recv_timeout(LONG).unwrap();
    for seen in [&seen, &seen_late] {
        assert_eq!(seen.recv_timeout(Duration::from_millis(50)), Err(RecvTimeoutError::Timeout));
    }
    segment.release(number);
    assert_eq!([&seen, &seen_late].map(|seen| seen.recv_timeout(LONG)), [Ok(0xffff); 2]);
}

#[test]
fn a_number_is_released_while_those_who_wait_look_again() {
    for _ in 0..50 {
        let (segment, _) = segment(0);
        let number = segment.expect(None, "a").unwrap();
        let other = segment.expect(None, "b").unwrap();
        let readers: Vec<_> = (0..4).map(|_| reader(&segment)).collect();
        for (begun, _) in &readers {
            begun.recv_timeout(LONG).unwrap();
        }
        let waking = Arc::clone(&segment);
        let (stop, stopped) = mpsc::channel::<()>();
        std::thread::spawn(move || {
            while stopped.try_recv().is_err() {
                waking.hide(other);
            }
        });
        // By now they are looking, one after the other.
        std::thread::sleep(Duration::from_millis(1));
        segment.release(number);
        for (_, seen) in readers {
            assert_eq!(seen.recv_timeout(LONG), Ok(0xffff));
        }
        stop.send(()).unwrap();
    }
}

/// A function whose one BAR has 32 bits, and takes the whole window of those.
struct WholeWindowDevice(Arc<dyn PciDevice>);

impl PciDevice for WholeWindowDevice {
    fn id(&self) -> &'static str {
        "whole_window"
    }

    fn kind(&self) -> &'static str {
        "whole_window"
    }

    fn read_config(&self, offset: u16, data: &mut [u8]) {
        self.0.read_config(offset, data);
    }

    fn write_config(&self, _offset: u16, _data: &[u8]) {}

    fn bars(&self) -> Vec<BarDescription> {
        let len_bytes = WINDOWS.below_4g.len_bytes;
        vec![BarDescription { len_bytes, ..self.0.bars()[0] }]
    }

    fn bar_decode(&self) -> BarDecode {
        self.0.bar_decode()
    }

    fn place_bar(&self, index: u8, gpa: u64) {
        self.0.place_bar(index, gpa);
    }

    fn bar_moved(&self, _index: u8, _gpa: Option<u64>) {}

    fn read_bar(&self, _index: u8, _offset: u64, _data: &mut [u8]) {}

    fn write_bar(&self, _index: u8, _offset: u64, _data: &[u8]) {}

    fn save(&self) -> Result<PciDeviceState, PciStateError> {
        self.0.save()
    }

    fn restore(&self, state: &PciDeviceState) -> Result<(), PciStateError> {
        self.0.restore(state)
    }
}

/// The order of machines with passed-through devices: those have no other place for such a BAR.
#[test]
fn a_device_that_can_do_with_another_place_is_delivered_after_one_that_cannot() {
    let (segment, _) = segment(0);
    let disk = device_of("disk", BarWidth::Bits32);
    let disk_number = segment.expect(None, "disk").unwrap();
    let whole_window: Arc<dyn PciDevice> =
        Arc::new(WholeWindowDevice(device_of("model", BarWidth::Bits32)));
    let bdf = segment.add_device(&whole_window, None).unwrap();
    assert_eq!(bdf.device(), 2, "numbers are as if the disk had come first");
    assert_eq!(segment.deliver(&disk, disk_number).unwrap().device(), 1);
    assert_eq!(disk.bar_decode().gpas[0].1, HIGH, "above 4 GiB");
}
