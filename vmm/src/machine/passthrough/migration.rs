// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Migration of passed-through devices: which of them cannot be migrated, and why.
//!
//! Owns that, what their hardware states add up to, and the report of a device that is lost. Only the device knows what its
//! state means.

use std::sync::Arc;

use pci::PciDevice as _;
use vfio::DmaLog;
use vfio::VfioPciDevice;
use vfio::migration::STATE_LEN_BYTES_MAX;

use super::outcome::{SharedDeviceList, unmap_if_unused};
use super::{Passthrough, PassthroughError};
use crate::config::VmConfig;
use crate::events;
use crate::machine::events::{EventSink, GuestEvent};
use crate::machine::ram;
use crate::machine::state::hardware_state_len_bytes_max;

/// Refuses to migrate or save a machine if its configuration alone shows that a device cannot be.
///
/// # Errors
/// Names the devices and the reasons.
pub fn check_config(config: &VmConfig) -> Result<(), PassthroughError> {
    let devices = config.devices.as_deref().unwrap_or_default();
    let mut reasons: Vec<_> = devices
        .iter()
        .filter(|device| device.fd.is_some())
        .map(|device| {
            let id = device.id.as_deref().unwrap_or_default();
            reason(id, &"it was given as a descriptor, which does not travel; give its path")
        })
        .collect();
    if !devices.is_empty() && !ram::hotplug_zones(&config.memory).is_empty() {
        reasons.push(
            "devices alongside memory that the guest gets while it runs (hotplug_size)".into(),
        );
    }
    refuse(&reasons)
}

pub(super) fn reason(id: &str, why: &dyn std::fmt::Display) -> String {
    format!("'{id}': {why}")
}

pub(super) fn refuse(reasons: &[String]) -> Result<(), PassthroughError> {
    if reasons.is_empty() {
        return Ok(());
    }
    Err(PassthroughError::NotMovable(reasons.join("; ")))
}

impl Passthrough {
    /// Refuses to migrate or save a machine with devices that cannot be.
    ///
    /// # Errors
    /// Names the devices and the reasons.
    pub fn check_movable(&self, config: &VmConfig) -> Result<(), PassthroughError> {
        check_config(config)?;
        let why = |(_, device): &(_, Arc<VfioPciDevice>)| {
            Some(reason(device.id(), &error_text::chain(device.movable().err()?)))
        };
        let mut reasons: Vec<_> = self.devices.iter().filter_map(why).collect();
        reasons.extend(self.why_withheld());
        reasons.extend(self.reached_while_stopped().map(|device| {
            let why = "its driver cannot keep it from reaching the other devices while they stop, nor that of \
                       another one (no RUNNING_P2P state); give the VM one such device, or vfio_p2p_dma=off";
            reason(device.id(), &why)
        }));
        refuse(&reasons)
    }

    /// Refuses devices whose hardware states are too long to be kept with the other state: in a snapshot, and on the way
    /// to an older destination.
    ///
    /// # Errors
    /// Names the devices, with their lengths.
    pub fn check_state_len(&self, config: &VmConfig) -> Result<(), PassthroughError> {
        let limit_bytes = hardware_state_len_bytes_max(config.cpus.boot_vcpus);
        match &self.too_much_state(limit_bytes)[..] {
            [] => Ok(()),
            reasons => Err(PassthroughError::StateTooLong(reasons.join("; "))),
        }
    }

    /// Devices that cannot be kept from reaching others, if that are several and they reach each other: whichever
    /// stops first may be accessed by the next (Linux, `include/uapi/linux/vfio.h`). One is stopped first, and
    /// works first: the others are quiet meanwhile and respond to it.
    fn reached_while_stopped(&self) -> impl Iterator<Item = &Arc<VfioPciDevice>> {
        let (without, _) = self.by_p2p();
        let are_several = self.peers.is_some() && without.len() > 1;
        without.into_iter().filter(move |_| are_several)
    }

    /// Whether a device that stops could be accessed by another: also by one that cannot be moved, and so continues.
    pub(super) fn one_would_be_reached(&self) -> bool {
        let devices = || self.devices.iter().map(|(_, device)| device);
        let continues =
            |device: &Arc<VfioPciDevice>| !device.is_lost() && device.movable().is_err();
        let by_one_that_continues = self.peers.is_some()
            && devices().any(|device| device.movable().is_ok())
            && devices().any(continues);
        by_one_that_continues || self.reached_while_stopped().next().is_some()
    }

    /// Devices that can be moved without `RUNNING_P2P`, and all others.
    pub(super) fn by_p2p(&self) -> (Vec<&Arc<VfioPciDevice>>, Vec<&Arc<VfioPciDevice>>) {
        let devices = self.devices.iter().map(|(_, device)| device);
        devices.partition(|device| device.movable().is_ok_and(|support| !support.p2p))
    }

    /// Why the hardware states are too large to be transferred, as far as is known before the devices stop:
    /// that of one device, or of all together.
    fn too_much_state(&self, limit_bytes: u64) -> Vec<String> {
        let mib = |bytes: u64| bytes.div_ceil(1 << 20);
        let len = |(_, device): &(_, Arc<VfioPciDevice>)| device.estimated_state_len_bytes();
        let lens = || self.devices.iter().map(|entry| (entry.1.id(), len(entry)));
        let too_long = |(id, len_bytes): (&str, u64)| {
            let most = mib(STATE_LEN_BYTES_MAX);
            let why = format!("its state has {} MiB, and may have {most}", mib(len_bytes));
            (len_bytes > STATE_LEN_BYTES_MAX).then(|| reason(id, &why))
        };
        let single: Vec<_> = lens().filter_map(too_long).collect();
        if !single.is_empty() || self.state_len_bytes() <= limit_bytes {
            return single;
        }
        let most = limit_bytes >> 20;
        let part = |(id, len_bytes)| {
            let has =
                format!("its state has {} MiB, and all together may have {most}", mib(len_bytes));
            reason(id, &has)
        };
        lens().filter(|(_, len_bytes)| *len_bytes > 0).map(part).collect()
    }

    pub(super) fn report_lost(&self, device: &VfioPciDevice, error: &dyn std::error::Error) {
        self.loss_reporter().report(device, error);
    }

    /// What reports a device as lost that has failed on another thread.
    pub(super) fn loss_reporter(&self) -> LossReporter {
        LossReporter { device_list: Arc::clone(&self.device_list), sink: Arc::clone(&self.sink) }
    }

    /// Starts to log DMA writes to guest memory; ends when the logs are dropped.
    pub fn watch_dma(&self, ram: &memory::GuestRam) -> Vec<DmaLog> {
        self.devices.iter().map(|(_, device)| device.watch_dma(ram)).collect()
    }

    /// Estimated total length in bytes of the hardware states.
    pub fn state_len_bytes(&self) -> u64 {
        let lens = self.devices.iter().map(|(_, device)| device.estimated_state_len_bytes());
        lens.fold(0, u64::saturating_add)
    }
}

/// Reports a device that is lost to the guest.
#[derive(Clone)]
pub(super) struct LossReporter {
    device_list: SharedDeviceList,
    sink: EventSink,
}

impl LossReporter {
    /// The same on the thread that has made a call: a device that was left to it is reported already, and was reset here.
    pub(super) fn report_here(&self, device: &VfioPciDevice, error: &dyn std::error::Error) {
        if device.is_left() {
            unmap_if_unused(&self.device_list);
        } else {
            self.report(device, error);
        }
    }

    /// Reports it, if this error has made it so.
    pub(super) fn report(&self, device: &VfioPciDevice, error: &dyn std::error::Error) {
        if device.is_lost() {
            let (id, reason) = (device.id(), error_text::chain(error));
            log::error!("passed-through device '{id}' is gone for the guest: {reason}");
            let lost = [("id", id), ("error", reason.as_str())];
            events::emit("vm", "passthrough-device-lost", &lost);
            unmap_if_unused(&self.device_list);
            (self.sink)(GuestEvent::WithheldDevice);
        }
    }
}

#[cfg(test)]
#[expect(clippy::unwrap_used, reason = "tests")]
pub(super) mod tests {
    use std::collections::BTreeMap;

    use memory::{GuestRam, RamConfig, RamLayout, ZoneSpec};
    use pci::Bdf;
    use pci::fakes::FakeMsiSource;
    use vfio::fakes::{FakeFunction, FakeP2p, FakeSlots, FakeTarget};
    use vfio::migration::DeviceState;
    use vfio::migration::fakes::StepFailure;
    use vfio::{DmaGate, P2pBars, VfioWiring};

    use super::super::announcing::Withheld;
    use super::super::{Backend, CancelToken, DiscardingDevices, LeftOpenings};
    use super::*;

    /// Devices 'one' and 'two', which can be migrated, and their fake hosts.
    pub(in super::super) fn two_devices() -> (Passthrough, [Arc<FakeFunction>; 2]) {
        two_devices_with([Some(true); 2])
    }

    fn peers() -> Arc<P2pBars> {
        P2pBars::new(Arc::new(FakeP2p::new(Arc::new(FakeSlots::default()), Arc::default())))
    }

    /// The same, with `RUNNING_P2P` or without; those with `None` cannot be moved.
    fn two_devices_with(p2p: [Option<bool>; 2]) -> (Passthrough, [Arc<FakeFunction>; 2]) {
        let gate = Arc::new(DmaGate::default());
        let hosts = p2p.map(|p2p| {
            let host = FakeFunction::new(FakeFunction::config(), Arc::clone(&gate)).unwrap();
            if let Some(p2p) = p2p {
                host.migration.allow(p2p, b"state");
            }
            host
        });
        let device = |(number, id, host): (u8, &str, &Arc<FakeFunction>)| {
            let wiring = VfioWiring {
                msi_source: &FakeMsiSource::new(64),
                slots: Arc::new(FakeSlots::default()),
                gate: Arc::clone(&gate),
                intx: None,
                trapped_bars: Vec::new(),
                has_ports: true,
                gpudirect_clique: None,
                peers: None,
            };
            let device = VfioPciDevice::new(id.to_owned(), host.clone(), wiring).unwrap();
            (Bdf::new(0, 0, number, 0).unwrap(), Arc::new(device))
        };
        let passthrough = Passthrough {
            notices: None,
            sink: Arc::new(|_| {}),
            early: None,
            pinning: None,
            devices: [(1, "one", &hosts[0]), (2, "two", &hosts[1])].map(device).into(),
            places: Vec::new(),
            opened: BTreeMap::new(),
            pending: Vec::new(),
            arrived: Vec::new(),
            late: Vec::new(),
            unopened: Vec::new(),
            device_list: SharedDeviceList::default(),
            gate: Arc::clone(&gate),
            backend: Backend::Type1,
            space: None,
            hold: None,
            expected: Vec::new(),
            slots: None,
            prepinned: None,
            kept: None,
            leaves_to: None,
            withheld: Withheld::default(),
            watched: super::super::forecast::Watched::default(),
            standstill: Arc::default(),
            withdrawn: Vec::new(),
            left: LeftOpenings::default(),
            needs_p2p: false,
            peers: None,
            threads: None,
            strict: false,
            arrives: false,
            ban: None,
        };
        (passthrough, hosts)
    }

    fn history(host: &FakeFunction) -> Vec<DeviceState> {
        host.migration.hardware_mut().history.clone()
    }

    #[test]
    fn memory_ends_with_the_machine_whose_devices_reached_it() {
        let (mut passthrough, _hosts) = two_devices();
        let target = Arc::new(FakeTarget::default());
        passthrough.space = Some(target.clone());
        let zones = vec![ZoneSpec { shared: true, ..ZoneSpec::new("mem0", 4 << 20) }];
        let ram = GuestRam::new(&RamConfig { zones }, RamLayout::default()).unwrap();
        let ram = Arc::new(ram);
        let never = CancelToken::default();
        passthrough.strict = true;
        passthrough.map_memory(&ram, DiscardingDevices::default(), &never).unwrap();
        assert!(target.is_mapped(0..4 << 20).is_some());
        let weak = (Arc::downgrade(&target), Arc::downgrade(&ram));
        drop((passthrough, target, ram));
        assert!(weak.0.upgrade().is_none(), "the address space stays");
        assert!(weak.1.upgrade().is_none(), "guest memory stays");
    }

    #[test]
    fn memory_is_awaited_until_it_is_mapped_or_cannot_be_or_that_is_cancelled() {
        for fails in [false, true] {
            let (mut passthrough, _hosts) = two_devices();
            let zones = vec![ZoneSpec { shared: true, ..ZoneSpec::new("mem0", 4 << 20) }];
            let ram = GuestRam::new(&RamConfig { zones }, RamLayout::default()).unwrap();
            let kernel = Arc::new(DmaGate::default());
            let hold = Arc::clone(&kernel);
            let before = Box::new(move |_| hold.wait().map_err(std::io::Error::other));
            passthrough.space =
                Some(Arc::new(FakeTarget { before: Some(before), ..FakeTarget::default() }));
            passthrough.strict = true;
            passthrough.map_beside();
            let discarding = DiscardingDevices::default();
            passthrough.map_memory(&Arc::new(ram), discarding, &CancelToken::default()).unwrap();
            let cancelled = passthrough.await_memory(&|| true).unwrap_err();
            assert!(matches!(cancelled, PassthroughError::Cancelled), "{cancelled}");
            if fails {
                kernel.fail("no room");
            } else {
                kernel.open();
            }
            match passthrough.await_memory(&|| false) {
                Ok(()) => assert!(!fails),
                Err(error) => {
                    let told = error_text::chain(&error);
                    assert!(fails && told.contains("no room"), "{told}");
                }
            }
        }
    }

    #[test]
    fn none_stops_before_all_are_quiet() {
        use DeviceState::{Running, RunningP2p};
        let (passthrough, [one, two]) = two_devices();
        two.migration.hardware_mut().failure = Some((RunningP2p, StepFailure::Refused));
        let error = passthrough.stop().unwrap_err();
        assert_eq!(error.to_string(), "cannot stop passed-through device 'two'");
        assert_eq!(history(&one), [RunningP2p]);
        assert_eq!(history(&two), []);
        passthrough.run();
        assert_eq!(history(&one), [RunningP2p, Running]);
        assert!(passthrough.devices.iter().all(|(_, device)| !device.is_lost()));
    }

    #[test]
    fn one_that_cannot_be_quiet_stops_first_and_works_first() {
        use DeviceState::{Running, RunningP2p, Stop};
        let config = serde_json::from_str(r#"{"payload":{"kernel":"/k"}}"#).unwrap();
        let (mut passthrough, [one, two]) = two_devices_with([Some(true), Some(false)]);
        passthrough.peers = Some(peers());
        passthrough.check_movable(&config).unwrap();
        // What the first has begun when the other one's step fails.
        two.migration.hardware_mut().failure = Some((Stop, StepFailure::Refused));
        passthrough.stop().unwrap_err();
        assert_eq!(
            history(&one),
            [RunningP2p],
            "it reaches no stopped one, and is not stopped itself"
        );
        two.migration.hardware_mut().failure = None;
        passthrough.stop().unwrap();
        assert_eq!((history(&one), history(&two)), (vec![RunningP2p, Stop], vec![Stop]));
        let order: Vec<_> = passthrough
            .in_turn([VfioPciDevice::wake, VfioPciDevice::run])
            .map(|it| it.0.id())
            .collect();
        assert_eq!(order, ["two", "one", "two", "one"]);
        passthrough.run();
        assert_eq!(history(&two), [Stop, Running]);
        assert_eq!(history(&one), [RunningP2p, Stop, RunningP2p, Running]);
    }

    #[test]
    fn several_that_cannot_be_quiet_are_refused_where_they_reach_each_other() {
        let config = serde_json::from_str(r#"{"payload":{"kernel":"/k"}}"#).unwrap();
        let (mut passthrough, hosts) = two_devices_with([Some(false); 2]);
        passthrough.check_movable(&config).unwrap();
        passthrough.peers = Some(peers());
        let error = passthrough.check_movable(&config).unwrap_err().to_string();
        for text in ["'one': its driver", "'two': its driver", "vfio_p2p_dma=off"] {
            assert!(error.contains(text), "{error}");
        }
        passthrough.stop().unwrap();
        assert!(hosts.iter().all(|host| history(host).is_empty()), "none was asked to stop");
        passthrough.run();
    }

    #[test]
    fn none_stops_that_one_which_continues_may_access() {
        let (mut passthrough, [one, _two]) = two_devices_with([Some(true), None]);
        passthrough.peers = Some(peers());
        passthrough.stop().unwrap();
        assert_eq!(history(&one), []);
        passthrough.peers = None;
        passthrough.stop().unwrap();
        assert_eq!(history(&one), [DeviceState::RunningP2p, DeviceState::Stop]);
    }

    #[test]
    fn when_one_does_not_stop_all_continue() {
        use DeviceState::{Running, RunningP2p, Stop};
        let (passthrough, [one, two]) = two_devices();
        two.migration.hardware_mut().failure = Some((Stop, StepFailure::Refused));
        assert!(passthrough.stop().is_err());
        assert_eq!(history(&one), [RunningP2p, Stop], "nothing works that was stopped");
        passthrough.run();
        assert_eq!(history(&one), [RunningP2p, Stop, RunningP2p, Running]);
        assert_eq!(history(&two), [RunningP2p, Running]);
        two.migration.hardware_mut().failure = None;
        passthrough.stop().unwrap();
        passthrough.stop().unwrap();
        assert_eq!(passthrough.state_len_bytes(), 2 * 14);
        passthrough.run();
        assert_eq!(history(&two)[2..], [RunningP2p, Stop, RunningP2p, Running]);
    }

    #[test]
    fn one_that_fails_is_gone_and_the_others_continue() {
        let (passthrough, [one, two]) = two_devices();
        passthrough.stop().unwrap();
        one.migration.hardware_mut().failure = Some((DeviceState::Running, StepFailure::Refused));
        passthrough.run();
        let is_lost = |index: usize| passthrough.devices[index].1.is_lost();
        assert!(is_lost(0) && !is_lost(1));
        assert_eq!(*one.resets.lock(), 1);
        assert_eq!(history(&two).last(), Some(&DeviceState::Running));
        let config = serde_json::from_str(r#"{"payload":{"kernel":"/k"}}"#).unwrap();
        let error = passthrough.check_movable(&config).unwrap_err().to_string();
        assert!(error.contains("'one': it is gone for the guest") && !error.contains("'two'"));
    }

    #[test]
    fn all_that_cannot_be_moved_are_named() {
        let (mut passthrough, hosts) = two_devices();
        let config = serde_json::from_str(r#"{"payload":{"kernel":"/k"}}"#).unwrap();
        passthrough.check_movable(&config).unwrap();
        for ((_, device), host) in passthrough.devices.iter_mut().zip(&hosts) {
            host.migration.hardware_mut().support = None;
            let wiring = VfioWiring {
                msi_source: &FakeMsiSource::new(64),
                slots: Arc::new(FakeSlots::default()),
                gate: Arc::default(),
                intx: None,
                trapped_bars: Vec::new(),
                has_ports: true,
                gpudirect_clique: None,
                peers: None,
            };
            let id = device.id().to_owned();
            *device = Arc::new(VfioPciDevice::new(id, host.clone(), wiring).unwrap());
        }
        let error = passthrough.check_movable(&config).unwrap_err().to_string();
        for id in ["'one': its driver", "'two': its driver"] {
            assert!(error.contains(id), "{error}");
        }
    }

    #[test]
    fn too_much_state_is_refused_by_name_before_anything_stops() {
        let (passthrough, hosts) = two_devices();
        // The state of the fake: its memory, and nine bytes around it.
        assert_eq!(passthrough.state_len_bytes(), 2 * 14);
        assert_eq!(passthrough.too_much_state(28), Vec::<String>::new());
        let reasons = passthrough.too_much_state(27);
        assert!(reasons[0].starts_with("'one': its state has 1 MiB, and all together may have 0"));
        assert!(reasons[1].starts_with("'two': "), "{reasons:?}");
        let estimates = |bytes: [u64; 2]| {
            for (host, bytes) in hosts.iter().zip(bytes) {
                host.migration.hardware_mut().estimate_bytes = Some(bytes);
            }
        };
        estimates([1, STATE_LEN_BYTES_MAX + 1]);
        let config = serde_json::from_str(r#"{"payload":{"kernel":"/k"}}"#).unwrap();
        passthrough.check_movable(&config).unwrap();
        let error = passthrough.check_state_len(&config).unwrap_err().to_string();
        assert!(error.contains("'two': its state has 129 MiB, and may have 128"), "{error}");
        assert!(!error.contains("'one'"), "{error}");
        assert!(hosts.iter().all(|host| history(host).is_empty()), "none was asked to stop");
        // Each is within the limit for a device, and both exceed the total limit.
        estimates([100 << 20; 2]);
        let error = passthrough.check_state_len(&config).unwrap_err().to_string();
        for id in ["'one'", "'two'"] {
            assert!(error.contains(id) && error.contains("all together may have 179"), "{error}");
        }
    }

    fn why(json: &str) -> Option<String> {
        let config: VmConfig = serde_json::from_str(json).unwrap();
        check_config(&config).err().map(|error| error.to_string())
    }

    #[test]
    fn what_the_configuration_forbids_is_named() {
        let path = r#""devices":[{"path":"/run/nic","id":"nic"}]"#;
        let payload = r#""payload":{"kernel":"/k"}"#;
        assert_eq!(why(&format!("{{{payload},{path}}}")), None);
        let later = r#""memory":{"size":1073741824,"hotplug_method":"VirtioMem","hotplug_size":1073741824}"#;
        assert_eq!(why(&format!("{{{payload},{later}}}")), None, "no devices");
        let error = why(&format!("{{{payload},{later},{path}}}")).unwrap();
        assert!(error.contains("hotplug_size"), "{error}");
    }

    #[test]
    fn a_descriptor_does_not_travel() {
        let json = r#"{"payload":{"kernel":"/k"},"devices":[{"path":"/x","id":"nic"}]}"#;
        let mut config: VmConfig = serde_json::from_str(json).unwrap();
        for device in config.devices.iter_mut().flatten() {
            device.fd = Some(crate::config::ConfigFd::inherited(9));
        }
        let error = check_config(&config).unwrap_err().to_string();
        assert!(error.contains("'nic': it was given as a descriptor"), "{error}");
    }
}
