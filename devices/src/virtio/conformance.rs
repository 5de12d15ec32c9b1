// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The same tests for every virtio device.

#![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixDatagram;
use std::sync::Arc;

use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;

use super::balloon::{Balloon, BalloonConfig};
use super::block::{Block, BlockConfig};
use super::console::{Console, ConsoleConfig};
use super::iommu::{Iommu, IommuConfig};
use super::mem::{Mem, MemConfig};
use super::net::Net;
use super::pmem::{Pmem, PmemConfig, PmemFile};
use super::rng::{Rng, RngConfig};
use super::rtc::{Rtc, RtcConfig};
use super::test_driver::Driver;
use super::vsock::{Vsock, VsockConfig};
use super::watchdog::{Watchdog, WatchdogConfig};
use super::{ActivateError, Activation, StateError, VirtioDevice};
use crate::endpoint::ConsoleEndpoint;

/// A device, with what must outlive it.
struct Subject {
    device: Box<dyn VirtioDevice>,
    kind: &'static str,
    _keep: Box<dyn std::any::Any>,
}

fn block() -> Subject {
    let image = tempfile::NamedTempFile::new().unwrap();
    image.as_file().set_len(1 << 20).unwrap();
    let config = BlockConfig { path: image.path().to_owned(), ..BlockConfig::default() };
    let device = Box::new(Block::new(config).unwrap());
    Subject { device, kind: "virtio-block", _keep: Box::new(image) }
}

fn console() -> Subject {
    let endpoint = Arc::new(ConsoleEndpoint::null().unwrap());
    let device = Box::new(Console::new(ConsoleConfig { id: "console".to_owned(), endpoint }));
    Subject { device, kind: "virtio-console", _keep: Box::new(()) }
}

fn balloon() -> Subject {
    let zone = memory::ZoneSpec::new("balloon", 4 << 20);
    let config = memory::RamConfig { zones: vec![zone] };
    let ram = memory::GuestRam::new(&config, memory::RamLayout::default()).unwrap();
    let config = BalloonConfig {
        free_page_reporting: true,
        free_page_hinting: true,
        statistics_every: Some(std::time::Duration::from_hours(1)),
        ..BalloonConfig::default()
    };
    let device = Box::new(Balloon::new(config, Arc::new(ram)).unwrap());
    Subject { device, kind: "virtio-balloon", _keep: Box::new(()) }
}

fn mem() -> Subject {
    let later = memory::ZoneSpec {
        block_bytes: Some(2 << 20),
        shared: true,
        ..memory::ZoneSpec::new("later", 8 << 20)
    };
    let zones = vec![memory::ZoneSpec::new("now", 4 << 20), later];
    let config = memory::RamConfig { zones };
    let ram = memory::GuestRam::new(&config, memory::RamLayout::default()).unwrap();
    let config = MemConfig {
        id: "mem".to_owned(),
        zone: "later".to_owned(),
        requested_bytes: 4 << 20,
        node: None,
    };
    let device = Box::new(Mem::new(&config, &Arc::new(ram)).unwrap());
    Subject { device, kind: "virtio-mem", _keep: Box::new(()) }
}

fn rng() -> Subject {
    let device = Box::new(Rng::new(RngConfig::default()).unwrap());
    Subject { device, kind: "virtio-rng", _keep: Box::new(()) }
}

fn rtc() -> Subject {
    let device = Box::new(Rtc::new(RtcConfig { id: "rtc".to_owned() }));
    Subject { device, kind: "virtio-rtc", _keep: Box::new(()) }
}

fn iommu() -> Subject {
    let config = IommuConfig { id: "iommu".to_owned(), address_bits: 64, memory_bytes: 0 };
    let device = Box::new(Iommu::new(config).unwrap());
    Subject { device, kind: "virtio-iommu", _keep: Box::new(()) }
}

fn pmem() -> Subject {
    let backing = tempfile::NamedTempFile::new().unwrap();
    backing.as_file().set_len(2 << 20).unwrap();
    let config = PmemConfig { path: backing.path().to_owned(), ..PmemConfig::default() };
    let file = PmemFile::open(&config, None).unwrap();
    let device = Box::new(Pmem::new("pmem".to_owned(), &file, 4 << 30));
    Subject { device, kind: "virtio-pmem", _keep: Box::new(backing) }
}

fn net() -> Subject {
    let (near, far) = UnixDatagram::pair().unwrap();
    near.set_nonblocking(true).unwrap();
    let device = Box::new(Net::for_test(OwnedFd::from(near).into()));
    Subject { device, kind: "virtio-net", _keep: Box::new(far) }
}

fn vsock() -> Subject {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("vsock");
    let device = Box::new(Vsock::new(VsockConfig { id: "vsock".to_owned(), cid: 3, path }));
    device.socket().attach().unwrap();
    Subject { device, kind: "virtio-vsock", _keep: Box::new(dir) }
}

fn watchdog() -> Subject {
    let config = WatchdogConfig::new("watchdog".to_owned(), Arc::new(|| ()));
    let device = Box::new(Watchdog::new(config));
    Subject { device, kind: "virtio-watchdog", _keep: Box::new(()) }
}

fn driver_for(device: &dyn VirtioDevice) -> Driver {
    Driver::new(u16::try_from(device.queue_sizes_max().len()).unwrap(), 64)
}

fn offers_version_1(make: fn() -> Subject) {
    let subject = make();
    assert_ne!(subject.device.features() & 1 << VIRTIO_F_VERSION_1, 0);
    assert!(subject.device.queue_sizes_max().iter().all(|size| size.is_power_of_two()));
}

fn pause_gives_the_states_of_all_queues(make: fn() -> Subject) {
    let mut device = make().device;
    let driver = driver_for(device.as_ref());
    driver.activate_all(device.as_mut());

    let states = device.pause();
    let indexes: Vec<u16> = states.iter().map(|(index, _)| *index).collect();
    let expected: Vec<u16> = driver.queues.iter().map(|queue| queue.index).collect();
    assert_eq!(indexes, expected);
    assert!(states.iter().all(|(_, state)| state.ready && state.size == 64));
    device.reset();
}

fn pause_and_resume_are_idempotent(make: fn() -> Subject) {
    let mut device = make().device;
    assert_eq!(device.pause(), [], "not active");
    device.resume();
    let driver = driver_for(device.as_ref());
    driver.activate_all(device.as_mut());

    let first = device.pause();
    assert_eq!(device.pause(), first);
    device.resume();
    device.resume();
    assert_eq!(device.pause(), first, "nothing happened between");
    device.resume();
    assert!(!driver.interrupt.is_broken());
}

fn restored_state_saves_the_same(make: fn() -> Subject) {
    let mut subject = make();
    let driver = driver_for(subject.device.as_ref());
    let features = subject.device.features();
    driver.activate(subject.device.as_mut(), features);
    subject.device.pause();
    let saved = subject.device.save();
    assert_eq!(saved.kind, subject.kind);
    subject.device.reset();
    subject.device.restore(&saved).unwrap();
    assert_eq!(subject.device.save(), saved);

    let text = serde_json::to_string(&saved).unwrap();
    let read: super::DeviceSnapshot = serde_json::from_str(&text).unwrap();
    assert_eq!(read, saved);
}

fn works_again_after_a_reset(make: fn() -> Subject) {
    let mut device = make().device;
    device.reset();
    let features = device.features();
    for _ in 0..2 {
        let driver = driver_for(device.as_ref());
        driver.activate(device.as_mut(), features);
        assert_eq!(device.pause().len(), driver.queues.len());
        device.resume();
        device.reset();
        assert_eq!(device.pause(), [], "a device that was reset has no queues");
        device.resume();
    }
}

fn starts_paused_if_it_was_paused_before(make: fn() -> Subject) {
    let mut device = make().device;
    assert_eq!(device.pause(), []);
    let mut driver = driver_for(device.as_ref());
    // A violation that a working device would detect at once.
    driver.queues[0].set_available(1000);
    driver.activate_all(device.as_mut());
    device.pause();
    assert!(!driver.interrupt.is_broken());
    device.resume();
    driver.interrupt.wait_broken();
}

fn an_impossible_available_index_needs_a_reset(make: fn() -> Subject) {
    let mut device = make().device;
    let features = device.features();
    let mut driver = driver_for(device.as_ref());
    driver.activate(device.as_mut(), features);
    driver.queues[0].set_available(1000);
    driver.queues[0].kick();
    driver.interrupt.wait_broken();
    assert_eq!(device.pause().len(), driver.queues.len(), "still answers");
    device.resume();
    device.reset();

    let driver = driver_for(device.as_ref());
    driver.activate(device.as_mut(), features);
    device.pause();
    assert!(!driver.interrupt.is_broken());
}

fn configuration_ends_in_zeros(make: fn() -> Subject) {
    let mut device = make().device;
    for offset in [4096, u64::from(u32::MAX), u64::MAX] {
        let mut data = [0xff; 8];
        device.read_config(offset, &mut data);
        assert_eq!(data, [0; 8]);
        device.write_config(offset, &[0xff; 8]);
    }
    let mut whole = [0xff; 4096];
    device.read_config(0, &mut whole);
    assert_eq!(whole[4000..], [0; 96]);
    device.read_config(0, &mut []);
    device.write_config(0, &[]);
}

fn foreign_states_are_refused(make: fn() -> Subject) {
    let mut device = make().device;
    let good = device.save();

    let mut other = good.clone();
    other.kind = "virtio-other".to_owned();
    assert!(matches!(device.restore(&other), Err(StateError::Kind { .. })));
    for version in [0, good.version + 1, u32::MAX] {
        let mut other = good.clone();
        other.version = version;
        assert!(matches!(device.restore(&other), Err(StateError::Version { .. })));
    }
    let mut other = good.clone();
    other.data = serde_json::Value::Bool(true);
    assert!(matches!(device.restore(&other), Err(StateError::Malformed { .. })));
    assert_eq!(device.save(), good, "a refused state changes nothing");
}

fn a_missing_queue_is_an_error(make: fn() -> Subject) {
    let mut device = make().device;
    let driver = driver_for(device.as_ref());
    let features = device.features();
    let none = Activation { queues: Vec::new(), ..driver.fresh(features) };
    let error = device.activate(none).unwrap_err();
    assert!(matches!(error, ActivateError::MissingQueue { index: 0 }), "{error}");
    driver.activate(device.as_mut(), features);
}

macro_rules! conformance {
    ($($device:ident: [$($test:ident),* $(,)?];)*) => {
        $(mod $device {
            $(#[test]
            fn $test() {
                super::$test(super::$device);
            })*
        })*
    };
}

macro_rules! conformance_of {
    ($($device:ident),*) => {
        conformance! {
            $($device: [
                offers_version_1,
                pause_gives_the_states_of_all_queues,
                pause_and_resume_are_idempotent,
                restored_state_saves_the_same,
                works_again_after_a_reset,
                starts_paused_if_it_was_paused_before,
                an_impossible_available_index_needs_a_reset,
                configuration_ends_in_zeros,
                foreign_states_are_refused,
                a_missing_queue_is_an_error,
            ];)*
        }
    };
}

conformance_of!(balloon, block, console, iommu, mem, pmem, rng, rtc, net, vsock, watchdog);
