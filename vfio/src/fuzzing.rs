// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Entry points for fuzzing: bytes are interpreted as a function's configuration space and a guest's accesses,
//! or as a saved state.
//!
//! Whatever the hardware returns, a guest does or a peer sends, nothing may panic, no emulated register may reach
//! the host, no BAR may lie over another in the guest, bus mastering may never pass a closed gate, other
//! functions may reach nothing that the guest does not reach, and nothing may be left visible, mapped or
//! connected.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use devices::bus::BusDevice as _;
use pci::DeviceNumber;
use pci::PciDevice;
use pci::fakes::{FakeMapper, FakeMsiSource};
use pci::{MmioRange, MmioWindows, PortWindow};
use pci::{PciEcam, PciSegment, PciSegmentOptions};

use super::fakes::{FakeFunction, FakeLine, FakeP2p, FakeSlots};
use super::{DmaGate, HostFunction, P2pBars, VfioPciDevice, VfioWiring};

const PORTS: MmioRange = MmioRange { start_gpa: 0x1000, len_bytes: 0xf000 };
const WINDOWS: MmioWindows = MmioWindows {
    below_4g: MmioRange { start_gpa: 0xc000_0000, len_bytes: 0x100_0000 },
    above_4g: MmioRange { start_gpa: 0x40_0000_0000, len_bytes: 0x100_0000 },
};
/// Maximum number of accesses per run, so that a long input does not look like a hang.
const ACCESSES_MAX: usize = 4096;

fn take<'a>(input: &mut &'a [u8], len: usize) -> &'a [u8] {
    let (head, rest) = input.split_at(input.len().min(len));
    *input = rest;
    head
}

fn byte(input: &mut &[u8]) -> u8 {
    take(input, 1).first().copied().unwrap_or(0)
}

fn offset(input: &mut &[u8]) -> u16 {
    // Mostly offsets of existing registers.
    const PLACES: [u16; 8] = [0x04, 0x10, 0x30, 0x3c, 0x50, 0x70, 0x100, 0x140];
    let low = u16::from(byte(input));
    match byte(input) {
        place if place < 0xc0 => PLACES[usize::from(place % 8)] + (low & 0x1f),
        high => (u16::from(high & 0xf) << 8 | low) & 0xfff,
    }
}

/// Fuzzes configuration space; the input gives the configuration, the gate (first bit of the first byte)
/// and the accesses. Returns whether there was a device for these.
pub fn fuzz_vfio_config(mut input: &[u8]) -> bool {
    let kind = byte(&mut input);
    let gate = Arc::new(DmaGate::default());
    if kind & 1 == 0 {
        gate.open();
    } else {
        gate.fail("told to");
    }
    let mut config = FakeFunction::config();
    if kind & 2 != 0 {
        config.truncate(256);
    }
    for _ in 0..byte(&mut input) % 32 {
        let (at, value) = (offset(&mut input), byte(&mut input));
        if let Some(current) = config.get_mut(usize::from(at)) {
            *current = value;
        }
    }
    let Ok(host) = FakeFunction::new(config, Arc::clone(&gate)) else { return false };
    if kind & 4 != 0 {
        host.set_rom(0x1_0000, &[0x55, 0xaa]);
    }
    let slots = Arc::new(FakeSlots::default());
    let mapper = Arc::new(FakeMapper::new(vec![WINDOWS.below_4g, WINDOWS.above_4g]));
    let iommu = Arc::new(FakeP2p::new(Arc::clone(&slots), Arc::clone(&gate)));
    iommu.may_sleep.store(true, Ordering::Relaxed);
    let peers = P2pBars::new(iommu.clone());
    // A second function, so that sharing has an effect.
    let _other = peers.join("other", Vec::new());
    let is_driven = drive(&host, &slots, &mapper, (&gate, &peers), input);
    assert_eq!(host.violations(), Vec::<String>::new());
    assert_eq!(slots.violations(), Vec::<String>::new());
    assert_eq!(mapper.violations(), Vec::<String>::new());
    // Its windows keep the device alive.
    drop(mapper);
    assert_eq!(slots.shown(), Vec::<std::ops::Range<u64>>::new());
    assert_eq!(iommu.mapped(), Vec::<std::ops::Range<u64>>::new());
    assert_eq!(iommu.violations(), Vec::<String>::new());
    assert_eq!(host.connected(), None);
    is_driven
}

/// Fuzzes saved states: `input`, a JSON object, replaces parts of a valid one. Returns whether it is taken.
pub fn fuzz_vfio_state(input: &[u8]) -> bool {
    let Ok(changes) = serde_json::from_slice::<serde_json::Map<_, _>>(input) else { return false };
    let gate = Arc::new(DmaGate::default());
    gate.open();
    let function = || FakeFunction::new(FakeFunction::config(), Arc::clone(&gate)).ok();
    let (Some(there), Some(here)) = (function(), function()) else { return false };
    let slots = Arc::new(FakeSlots::default());
    let take = |host: &Arc<FakeFunction>| {
        host.migration.allow(true, b"firmware");
        let wiring = VfioWiring {
            msi_source: &FakeMsiSource::new(64),
            slots: slots.clone(),
            gate: Arc::clone(&gate),
            intx: None,
            trapped_bars: Vec::new(),
            has_ports: true,
            gpudirect_clique: None,
            peers: None,
        };
        let device = VfioPciDevice::new("fuzz".to_owned(), host.clone(), wiring).ok()?;
        device.stop().ok()?;
        Some(device)
    };
    let (Some(source), Some(destination)) = (take(&there), take(&here)) else { return false };
    let Ok(mut state) = source.save() else { return false };
    if let Some(parts) = state.data.as_object_mut() {
        parts.extend(changes);
    }
    let is_taken = destination.restore(&state).is_ok();
    if is_taken {
        assert!(destination.wake().and_then(|()| destination.run()).is_ok());
        assert!(destination.stop().is_ok() && destination.save().is_ok());
    }
    destination.lose();
    assert_eq!(here.violations(), Vec::<String>::new());
    assert_eq!(slots.violations(), Vec::<String>::new());
    assert_eq!(here.connected(), None);
    is_taken
}

fn drive(
    host: &Arc<FakeFunction>,
    slots: &Arc<FakeSlots>,
    mapper: &Arc<FakeMapper>,
    (gate, peers): (&Arc<DmaGate>, &Arc<P2pBars>),
    mut input: &[u8],
) -> bool {
    let line = std::fs::File::open("/dev/null").ok();
    let wiring = VfioWiring {
        msi_source: &FakeMsiSource::new(4096),
        slots: slots.clone(),
        gate: Arc::clone(gate),
        intx: line.map(|file| Box::new(FakeLine(file)) as _),
        trapped_bars: Vec::new(),
        has_ports: true,
        gpudirect_clique: None,
        peers: Some(Arc::clone(peers)),
    };
    let host: Arc<dyn HostFunction> = host.clone();
    let Ok(device) = VfioPciDevice::new("fuzz".to_owned(), host, wiring) else { return false };
    let device: Arc<dyn PciDevice> = Arc::new(device);
    let options = PciSegmentOptions { segment: 0, windows: WINDOWS };
    let ports = Arc::new(FakeMapper::new(vec![PORTS]));
    let window = PortWindow { first: 0x1000, last: 0xffff, mapper: ports.clone() };
    let segment = PciSegment::with_ports(options, mapper.clone(), Some(window));
    let Ok(segment) = segment else { return false };
    if segment.add_device(&device, DeviceNumber::new(1).ok()).is_err() {
        return false;
    }
    let ecam = PciEcam::new(&segment);
    for _ in 0..ACCESSES_MAX {
        if input.is_empty() {
            break;
        }
        let (kind, at) = (byte(&mut input), offset(&mut input));
        let mut data = take(&mut input, usize::from(1_u8 << (kind & 3))).to_vec();
        let bar_gpa = device.bar_decode().gpas.first().map_or(0, |(_, gpa)| *gpa);
        let in_bar = bar_gpa.wrapping_add(u64::from(at) << (kind >> 6));
        match kind >> 2 & 7 {
            0..=2 => ecam.write(1 << 15 | u64::from(at), &data),
            3 | 4 => ecam.read(1 << 15 | u64::from(at), &mut data),
            5 => drop(mapper.write(in_bar, &data) || ports.write(in_bar, &data)),
            6 => drop(mapper.read(in_bar, &mut data) || ports.read(in_bar, &mut data)),
            _ => device.write_bar(at.to_le_bytes()[0] % 7, u64::from(at) << 4, &data),
        }
    }
    assert_eq!(ports.violations(), Vec::<String>::new());
    true
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn any_function_and_any_guest_are_harmless(bytes in prop::collection::vec(any::<u8>(), 0..2048)) {
            // The violation of what is promised is asserted there, whether or not it is a function.
            let is_driven = fuzz_vfio_config(&bytes);
            prop_assert!(is_driven || !bytes.is_empty());
        }

        #[test]
        fn any_saved_state_is_taken_or_refused(
            key in "hardware|registers|command|express_controls|msix|msi_pending|state|other",
            value in "null|[0-9]{1,6}|-1|\\[[0-9,\\[\\]]{0,12}\\]|\\{\"(len_bytes|base64|version)\":[0-9]{1,3}\\}",
            (len_bytes, base64) in (0_u64..40, "[A-Za-d0-9+/=]{0,48}"),
        ) {
            let is_taken = fuzz_vfio_state(format!("{{\"{key}\":{value}}}").as_bytes());
            prop_assert!(!is_taken || key != "other", "an unknown part is taken");
            let state = format!(r#"{{"state":{{"len_bytes":{len_bytes},"base64":"{base64}"}}}}"#);
            fuzz_vfio_state(state.as_bytes());
            let apart = format!(r#"{{"state":{{"len_bytes":{len_bytes},"apart":true}}}}"#);
            fuzz_vfio_state(apart.as_bytes());
        }
    }

    #[test]
    fn what_is_usual_gets_to_the_end() {
        for kind in [0, 2, 4] {
            assert!(fuzz_vfio_config(&[kind]), "{kind}");
        }
        assert!(fuzz_vfio_state(b"{}"));
    }
}
