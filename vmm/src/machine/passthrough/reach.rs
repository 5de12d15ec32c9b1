// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Guest memory at addresses that the IOMMUs of passed-through devices can map.
//!
//! Owns the choice of the addresses above 4 GiB that a new guest is not given, and the comparison with a device
//! before it is opened. The choice becomes part of the configuration, as the guest has its memory at the same
//! addresses wherever it is moved: a guest that has booted keeps what it has.

use std::ops::Range;

use arch::layout::{HIGH_RAM_64_GPA, HighHole as LeftOut};
use memory::{GuestRam, LATER_ALIGN_BYTES};
use vfio::{HYPERTRANSPORT, VfioError, bars_bytes_of, reach_of};

use super::backend::place_of;
use crate::config::memory::HighHole;
use crate::config::{DeviceConfig, MemoryConfig, VmConfig};

/// Leaves out the addresses that the IOMMU of a device keeps for HyperTransport, if memory or BARs may reach them and
/// the configuration does not say what is left out. Called before a guest boots. What is chosen is in the configuration
/// for good, and earlier versions do not know it: a VM that has no use for it does without.
pub fn choose_high_hole(config: &mut VmConfig) {
    if config.memory.high_hole.is_some() {
        return;
    }
    let places = config.devices.iter().flatten().filter_map(|device| place_of(device).ok());
    let bars_bytes = places.map(|place| bars_bytes_of(&place)).fold(0, u64::saturating_add);
    // Segments share out all addresses, and large BARs begin anywhere in a share.
    let is_shared_out = config.pci_segments_count() > 1;
    if !is_shared_out && !may_reach(&config.memory, bars_bytes, *HYPERTRANSPORT.start()) {
        return;
    }
    // A device that cannot be found is reported when it is opened.
    let is_kept = |device: &&DeviceConfig| {
        place_of(device).is_ok_and(|place| reach_of(&place).excludes(&HYPERTRANSPORT))
    };
    if let Some(device) = config.devices.iter().flatten().find(is_kept) {
        let id = device.id.as_deref().unwrap_or_default();
        log::info!(
            "guest addresses from {:#x} to {:#x} are left without memory: the IOMMU of '{id}' cannot map them",
            HYPERTRANSPORT.start(),
            HYPERTRANSPORT.end()
        );
        config.memory.high_hole = Some(HighHole::HyperTransport);
    }
}

/// Whether memory, with all that may be plugged, or BARs behind it may have addresses from `gpa` on: memory has a hole
/// below 4 GiB, and each part that is added later begins at a multiple of its alignment.
fn may_reach(memory: &MemoryConfig, bars_bytes: u64, gpa: u64) -> bool {
    let later = memory.zones.iter().flatten().map(|zone| zone.hotplug_size);
    let later: Vec<u64> = later.chain([memory.hotplug_size]).flatten().collect();
    let gaps_bytes = HIGH_RAM_64_GPA.saturating_add(LATER_ALIGN_BYTES * (later.len() as u64));
    let later_bytes = later.into_iter().fold(gaps_bytes, u64::saturating_add);
    let behind_bytes = later_bytes.saturating_add(bars_bytes);
    memory.total_bytes().unwrap_or(u64::MAX).saturating_add(behind_bytes) > gpa
}

/// Compares guest memory with what the host says of a device, which need not be open.
///
/// # Errors
/// Names the first address that cannot be mapped.
pub fn check(config: &DeviceConfig, ram: &GuestRam) -> Result<(), VfioError> {
    let regions = ram.regions().iter();
    let memory: Vec<Range<u64>> =
        regions.map(|region| region.gpa()..region.gpa() + region.len_bytes()).collect();
    Ok(reach_of(&place_of(config)?).check(&memory)?)
}

// The two crates speak of the same addresses.
const _: () = {
    let Some(range) = LeftOut::AmdHyperTransport.range() else { panic!("it leaves something out") };
    assert!(range.gpa == *HYPERTRANSPORT.start() && range.end_gpa() == *HYPERTRANSPORT.end() + 1);
};

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test that cannot unwrap has failed")]

    use std::fs;
    use std::path::Path;

    use memory::{RamConfig, ZoneSpec};
    use serde_json::json;
    use vmm_sys_util::tempdir::TempDir;

    use super::*;
    use crate::machine::{ram, segments};

    const GIB: u64 = 1 << 30;
    const INTEL: &str = "0x00000000fee00000 0x00000000feefffff msi\n";
    const AMD: &str = "0x00000000fee00000 0x00000000feefffff msi\n\
                       0x000000fd00000000 0x000000ffffffffff reserved\n";

    /// A directory like a device's in sysfs, behind an IOMMU with these reserved regions.
    fn device(regions: &str) -> TempDir {
        let folder = TempDir::new().unwrap();
        fs::create_dir(folder.as_path().join("iommu_group")).unwrap();
        fs::write(folder.as_path().join("iommu_group/reserved_regions"), regions).unwrap();
        folder
    }

    fn config(memory: &serde_json::Value, devices: &[&Path]) -> VmConfig {
        let devices: Vec<_> = devices.iter().map(|path| json!({"path": path})).collect();
        let config = json!({"payload": {"kernel": "/k"}, "memory": memory, "devices": devices});
        serde_json::from_value(config).unwrap()
    }

    fn chosen(memory: &serde_json::Value, devices: &[&Path]) -> Option<HighHole> {
        let mut config = config(memory, devices);
        choose_high_hole(&mut config);
        config.memory.high_hole
    }

    #[test]
    fn a_device_behind_an_iommu_of_amd_leaves_a_hole_unless_configured() {
        let (amd, intel) = (device(AMD), device(INTEL));
        let memory = json!({"size": 1012 * GIB});
        assert_eq!(chosen(&memory, &[]), None);
        assert_eq!(chosen(&memory, &[intel.as_path()]), None);
        let both = chosen(&memory, &[intel.as_path(), amd.as_path()]);
        assert_eq!(both, Some(HighHole::HyperTransport));
        let off = json!({"size": 512 * GIB, "high_hole": "Off"});
        assert_eq!(chosen(&off, &[amd.as_path()]), Some(HighHole::Off));
        let asked = json!({"size": 512 * GIB, "high_hole": "HyperTransport"});
        assert_eq!(chosen(&asked, &[]), Some(HighHole::HyperTransport));
        assert_eq!(chosen(&memory, &[Path::new("/nowhere")]), None);
        // A guest whose memory is below the hole has the layout that it always had.
        for small in [json!({"size": GIB}), json!({"size": 1000 * GIB})] {
            assert_eq!(chosen(&small, &[amd.as_path()]), None);
        }
        // Of several segments each has a part of all addresses.
        let mut shared_out = config(&json!({"size": GIB}), &[amd.as_path()]);
        shared_out.platform = serde_json::from_value(json!({"num_pci_segments": 2})).unwrap();
        choose_high_hole(&mut shared_out);
        assert_eq!(shared_out.memory.high_hole, Some(HighHole::HyperTransport));
        // Eight accelerators with BARs of 128 GiB have some of them there.
        let bars = "0x0000380000000000 0x0000381fffffffff 0x000000000014220c\n";
        fs::write(amd.as_path().join("resource"), bars).unwrap();
        let half = json!({"size": 512 * GIB});
        assert_eq!(chosen(&half, &[amd.as_path()]), None);
        assert_eq!(chosen(&half, &[amd.as_path(); 8]), Some(HighHole::HyperTransport));
        fs::remove_file(amd.as_path().join("resource")).unwrap();
        let grows = json!({"size": GIB, "hotplug_method": "VirtioMem", "hotplug_size": 1012 * GIB});
        assert_eq!(chosen(&grows, &[amd.as_path()]), Some(HighHole::HyperTransport));
    }

    #[test]
    fn what_was_chosen_travels_and_what_was_not_is_not_named() {
        let amd = device(AMD);
        let mut of_amd = config(&json!({"size": 4096 * GIB}), &[amd.as_path()]);
        choose_high_hole(&mut of_amd);
        let json = serde_json::to_value(&of_amd).unwrap();
        assert_eq!(json["memory"]["high_hole"], "HyperTransport");
        let there: VmConfig = serde_json::from_value(json).unwrap();
        assert_eq!(
            ram::layout_of(48, there.memory.hole()),
            ram::layout_of(48, of_amd.memory.hole())
        );
        let other = config(&json!({"size": 4096 * GIB}), &[]);
        assert_eq!(serde_json::to_value(&other).unwrap()["memory"].get("high_hole"), None);
    }

    /// Unpopulated memory, which takes addresses of this process alone.
    fn memory_of(size_gib: u64, hole: LeftOut) -> GuestRam {
        let zones = vec![ZoneSpec::new("mem0", size_gib * GIB)];
        GuestRam::new(&RamConfig { zones }, ram::layout_of(48, hole)).unwrap()
    }

    #[test]
    fn bars_are_placed_outside_the_hole() {
        let windows = |size_gib: u64, hole: LeftOut| {
            segments::wide_window(&memory_of(size_gib, hole), 48, hole).unwrap()
        };
        for size_gib in [512, 1012, 1024, 4096] {
            let without = windows(size_gib, LeftOut::None);
            assert_eq!(without.gpa, (size_gib + 1) * GIB, "as ever");
            let with = windows(size_gib, LeftOut::AmdHyperTransport);
            let after = if size_gib < 1012 { 1024 } else { size_gib + 13 };
            assert_eq!(with.gpa, after * GIB);
            assert_eq!(with.end_gpa(), without.end_gpa());
        }
    }

    #[test]
    fn memory_in_the_hole_is_refused_by_name_and_memory_around_it_is_not() {
        let amd = device(AMD);
        let mut of_amd = config(&json!({"size": GIB}), &[amd.as_path()]);
        let of_amd = of_amd.devices.as_mut().unwrap().remove(0);
        for (size_gib, hole, fits) in [
            (512, LeftOut::None, true),
            (512, LeftOut::AmdHyperTransport, true),
            (1011, LeftOut::None, true),
            (1012, LeftOut::None, false),
            (1012, LeftOut::AmdHyperTransport, true),
            (1024, LeftOut::None, false),
            (1024, LeftOut::AmdHyperTransport, true),
            (4096, LeftOut::None, false),
            (4096, LeftOut::AmdHyperTransport, true),
        ] {
            let result = check(&of_amd, &memory_of(size_gib, hole));
            assert_eq!(result.is_ok(), fits, "{size_gib} GiB, {hole:?}: {result:?}");
            let Err(error) = result else { continue };
            let error = error.to_string();
            assert!(error.contains("guest memory at 0xfd00000000"), "{error}");
            assert!(error.contains("high_hole=hypertransport"), "{error}");
        }
    }
}
