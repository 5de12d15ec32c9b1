// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! `--memory` and `--memory-zone`: size, layout and backing of guest memory.
//!
//! Owns the families and their rules. Whether the host has the memory is not decided here.

use std::collections::BTreeSet;
use std::path::PathBuf;

use arch::layout;

use super::codec::{Bytes, Choice, File, Id, Int, JsonOnly, One, Opt, Toggle};
use super::enums::option_enum;
use super::error::ConfigError;
use super::family::option_family;
use super::prefault::{Prefault, PrefaultWord};

/// Granularity of guest memory sizes.
pub const PAGE_BYTES: u64 = 4096;

/// Huge page size assumed by the rules if none is given.
pub const DEFAULT_HUGEPAGE_BYTES: u64 = 2 << 20;

/// What memory devices of ACPI have a multiple of: the smallest unit in which a guest adds memory.
const DEVICE_BLOCK_BYTES: u64 = 128 << 20;

/// The largest such unit.
const DEVICE_BLOCK_BYTES_MAX: u64 = 2 << 30;

/// End of memory from which on the unit may be larger than the smallest.
const LARGE_BLOCKS_FROM_BYTES: u64 = 64 << 30;

/// Minimum block size of hot-plugged memory.
const BLOCK_BYTES_MIN: u64 = 2 << 20;

/// Maximum number of blocks of a zone with blocks of minimum size.
const BLOCKS_MAX: u64 = 16 << 10;

/// Name of the zone of a machine without configured zones.
pub const DEFAULT_ZONE: &str = "mem0";

/// Guest memory size if none is given.
pub const DEFAULT_MEMORY_BYTES: u64 = 512 << 20;

option_enum! {
    /// Method of memory hot-plug.
    HotplugMethod = "acpi|virtio-mem", default Acpi {
        /// Memory devices in ACPI.
        Acpi = "acpi",
        /// A virtio-mem device.
        VirtioMem = "virtio-mem",
    }
}

option_enum! {
    /// Guest addresses above 4 GiB that are left without memory and devices.
    HighHole = "off|hypertransport", default Off {
        /// None.
        Off = "off",
        /// Those that IOMMUs of AMD keep for HyperTransport, from 0xfd00000000 to 0xffffffffff.
        HyperTransport = "hypertransport",
    }
}

option_family! {
    /// A part of guest memory with its own properties.
    MemoryZoneConfig "memory-zone" {
        /// Name of the zone.
        id: String = String::new(), "id" as One<Id>, required();
        /// Size in bytes.
        size: u64 = DEFAULT_MEMORY_BYTES, "size" as One<Bytes>, required_json();
        /// File or directory that backs the zone.
        file: Option<PathBuf> = None, "file" as Opt<File>;
        /// Let the host merge identical pages (KSM).
        mergeable: bool = false, "mergeable" as One<Toggle>;
        /// Use a shared mapping, so that other processes can share the memory.
        shared: bool = false, "shared" as One<Toggle>;
        /// Use hugetlb pages.
        hugepages: bool = false, "hugepages" as One<Toggle>;
        /// Size of a huge page in bytes.
        hugepage_size: Option<u64> = None, "hugepage_size" as Opt<Bytes>;
        /// Host NUMA node that the memory comes from.
        host_numa_node: Option<u32> = None, "host_numa_node" as Opt<Int>;
        /// Maximum size of hot-plugged memory in bytes.
        hotplug_size: Option<u64> = None, "hotplug_size" as Opt<Bytes>;
        /// Current size of hot-plugged memory in bytes.
        hotplugged_size: Option<u64> = None, "hotplugged_size" as Opt<Bytes>;
        /// Populate all pages before the guest runs, or in the background while it runs; in JSON
        /// true, false or "background".
        prefault: Prefault = Prefault::Off, "prefault" as One<PrefaultWord>;
        /// Reserve the memory at start, and fail if the host cannot.
        reserve: bool = false, "reserve" as One<Toggle>;
        /// Socket of a prezero-pool to take populated, zeroed memory from.
        prezeroed: Option<PathBuf> = None, "prezeroed" as Opt<File>;
    }
}

option_family! {
    /// Guest memory.
    MemoryConfig "memory" {
        /// Size in bytes; 0 if zones are given.
        size: u64 = DEFAULT_MEMORY_BYTES, "size" as One<Bytes>, required_json();
        /// Maximum size of hot-plugged memory in bytes.
        hotplug_size: Option<u64> = None, "hotplug_size" as Opt<Bytes>;
        /// Current size of hot-plugged memory in bytes.
        hotplugged_size: Option<u64> = None, "hotplugged_size" as Opt<Bytes>;
        /// Let the host merge identical pages (KSM).
        mergeable: bool = false, "mergeable" as One<Toggle>;
        /// How memory is hot-plugged; with acpi it cannot be removed, and there are no zones.
        hotplug_method: HotplugMethod = HotplugMethod::Acpi, "hotplug_method" as One<Choice>;
        /// Use a shared mapping, so that other processes can share the memory.
        shared: bool = false, "shared" as One<Toggle>;
        /// Use hugetlb pages.
        hugepages: bool = false, "hugepages" as One<Toggle>;
        /// Size of a huge page in bytes.
        hugepage_size: Option<u64> = None, "hugepage_size" as Opt<Bytes>;
        /// Populate all pages before the guest runs, or in the background while it runs; in JSON
        /// true, false or "background".
        prefault: Prefault = Prefault::Off, "prefault" as One<PrefaultWord>;
        /// Reserve the memory at start, and fail if the host cannot.
        reserve: bool = false, "reserve" as One<Toggle>;
        /// Threads that populate pages for prefault, and pin them for passed-through devices; by default one for
        /// each CPU of the memory's NUMA node that the process may use.
        prefault_threads: Option<u32> = None, "prefault_threads" as Opt<Int>, range(1, 512);
        /// Threads that populate and pin pages for passed-through devices, if not as many as `prefault_threads`.
        pin_threads: Option<u32> = None, "pin_threads" as Opt<Int>, range(1, 512);
        /// Socket of a prezero-pool to take populated, zeroed memory from.
        prezeroed: Option<PathBuf> = None, "prezeroed" as Opt<File>;
        /// Request transparent huge pages.
        thp: bool = true, "thp" as One<Toggle>;
        /// Guest addresses above 4 GiB that are left without memory and devices: `hypertransport` leaves
        /// out 0xfd00000000 to 0xffffffffff, which IOMMUs of AMD cannot map. By default what the devices
        /// passed through at boot need.
        high_hole: Option<HighHole> = None, "high_hole" as Opt<Choice>;
        /// Memory zones, if memory is divided into zones.
        zones: Option<Vec<MemoryZoneConfig>> = None, "" as JsonOnly;
    }
}

/// Properties that memory as a whole and a zone share.
struct Backing<'a> {
    what: &'a str,
    is_zone: bool,
    size_bytes: u64,
    has_file: bool,
    mergeable: bool,
    shared: bool,
    hugepages: bool,
    hugepage_bytes: Option<u64>,
    prezeroed: Option<&'a PathBuf>,
    method: HotplugMethod,
    hotplug_size: Option<u64>,
    hotplugged_size: Option<u64>,
}

/// Block size of hot-plugged memory: the huge page size, or larger for large memory, so that a host can map
/// the blocks for passed-through devices easily.
fn block_bytes(size_bytes: u64, page_bytes: u64) -> u64 {
    let few = (size_bytes / BLOCKS_MAX).max(1).next_power_of_two();
    few.max(page_bytes).max(BLOCK_BYTES_MIN)
}

/// Unit in which a guest that boots with `boot_bytes` adds memory. From 64 GiB on Linux takes the largest power of two up
/// to 2 GiB of which the end of its memory is a multiple, and refuses any other device (`probe_memory_block_size`).
fn guest_block_bytes(boot_bytes: u64) -> u64 {
    let hole_bytes = layout::HIGH_RAM_64_GPA - layout::LOW_RAM_END_GPA;
    // A hole further up is a multiple of the largest block.
    let end = boot_bytes.saturating_add(hole_bytes);
    if end < LARGE_BLOCKS_FROM_BYTES {
        return DEVICE_BLOCK_BYTES;
    }
    (1_u64 << end.trailing_zeros().min(63)).clamp(DEVICE_BLOCK_BYTES, DEVICE_BLOCK_BYTES_MAX)
}

/// Maximum bytes of memory devices of ACPI, and their block size, for a `hotplug_size`, which may be any; `None` if it is
/// too little for one.
fn device_room(boot_bytes: u64, size_bytes: u64, page_bytes: u64) -> Option<(u64, u64)> {
    let block_bytes = page_bytes.max(guest_block_bytes(boot_bytes));
    let room_bytes = size_bytes - size_bytes % block_bytes;
    (room_bytes > 0).then_some((room_bytes, block_bytes))
}

impl MemoryZoneConfig {
    /// Maximum bytes to be hot-plugged, and the block size; `None` without hot-plug.
    pub fn later(&self, method: HotplugMethod) -> Option<(u64, u64)> {
        let size_bytes = self.hotplug_size.filter(|bytes| *bytes > 0)?;
        let page = if self.hugepages { self.hugepage_size } else { None };
        let page = page.unwrap_or(0);
        match method {
            HotplugMethod::VirtioMem => Some((size_bytes, block_bytes(size_bytes, page))),
            HotplugMethod::Acpi => device_room(self.size, size_bytes, page),
        }
    }
}

impl Backing<'_> {
    /// Validates the options of hot-plugged memory.
    fn validate_later(&self) -> Result<(), String> {
        let plugged = self.hotplugged_size.unwrap_or(0);
        let Some(size) = self.hotplug_size.filter(|bytes| *bytes > 0) else {
            return match plugged {
                0 => Ok(()),
                _ => Err("hotplugged_size needs a hotplug_size".into()),
            };
        };
        if self.has_file {
            return Err("memory in a file cannot be added while the guest runs".into());
        }
        let page = if self.hugepages { self.hugepage_bytes.unwrap_or(0) } else { 0 };
        if self.method == HotplugMethod::Acpi {
            return self.validate_devices(size, plugged, page);
        }
        let block = block_bytes(size, page);
        if !size.is_multiple_of(block) || !plugged.is_multiple_of(block) {
            return Err(format!("hotplug_size and hotplugged_size must be multiples of {block}"));
        }
        if plugged > size {
            return Err(format!("hotplugged_size {plugged} is more than hotplug_size {size}"));
        }
        Ok(())
    }

    /// Validates the options of memory that comes as memory devices of ACPI.
    fn validate_devices(&self, size: u64, plugged: u64, page: u64) -> Result<(), String> {
        if self.is_zone {
            return Err("hotplug_size of a zone needs hotplug_method=virtio-mem".into());
        }
        let block = guest_block_bytes(self.size_bytes).max(page);
        let (room, _) = device_room(self.size_bytes, size, page).unwrap_or_default();
        if !plugged.is_multiple_of(block) {
            return Err(format!("hotplugged_size must be a multiple of {block}"));
        }
        if plugged > room {
            return Err(format!("hotplugged_size {plugged} is more than hotplug_size {size}"));
        }
        Ok(())
    }

    fn validate(&self) -> Result<(), ConfigError> {
        let refuse =
            |problem: String| Err(ConfigError::Memory { what: self.what.to_owned(), problem });
        if self.size_bytes == 0 {
            return refuse("the size must not be 0".into());
        }
        if let Some(bytes) = self.hugepage_bytes {
            if !self.hugepages {
                return refuse("hugepage_size needs hugepages=on".into());
            }
            if !bytes.is_power_of_two() || bytes <= PAGE_BYTES {
                return refuse(format!("hugepage_size {bytes} is not a huge page size"));
            }
        }
        let unit = if self.hugepages {
            self.hugepage_bytes.unwrap_or(DEFAULT_HUGEPAGE_BYTES)
        } else {
            PAGE_BYTES
        };
        if !self.size_bytes.is_multiple_of(unit) {
            return refuse(format!("the size {} is not a multiple of {unit}", self.size_bytes));
        }
        if self.hugepages && self.has_file {
            return refuse("hugepages and file exclude each other, use a file on hugetlbfs".into());
        }
        if self.mergeable && (self.shared || self.hugepages || self.has_file) {
            return refuse(
                "mergeable needs private anonymous memory, without shared, hugepages \
                           and file"
                    .into(),
            );
        }
        self.validate_later().or_else(refuse)?;
        if let Some(socket) = self.prezeroed {
            if socket.as_os_str().is_empty() {
                return refuse("prezeroed= has no path".into());
            }
            if self.has_file || self.mergeable {
                return refuse("prezeroed excludes file and mergeable".into());
            }
        }
        Ok(())
    }
}

impl MemoryConfig {
    /// The guest addresses above 4 GiB that are left out.
    pub fn hole(&self) -> arch::layout::HighHole {
        match self.high_hole {
            None | Some(HighHole::Off) => arch::layout::HighHole::None,
            Some(HighHole::HyperTransport) => arch::layout::HighHole::AmdHyperTransport,
        }
    }

    /// Whether the guest is to have memory devices of ACPI when it boots.
    pub fn has_memory_devices(&self) -> bool {
        self.hotplug_method == HotplugMethod::Acpi
            && self.hotplugged_size.is_some_and(|bytes| bytes > 0)
    }

    /// Whether the guest has memory that was added after its boot, or that is still to be.
    pub fn has_hotplugged(&self) -> bool {
        let zones = self.zones.iter().flatten().map(|zone| zone.hotplugged_size);
        zones.chain([self.hotplugged_size]).flatten().any(|bytes| bytes > 0)
    }

    /// Whether other processes can have all guest memory: it is shared, or consists of hugetlb pages.
    pub fn is_shared(&self) -> bool {
        match self.zones.as_deref().unwrap_or_default() {
            [] => self.shared || self.hugepages,
            zones => zones.iter().all(|zone| zone.shared || zone.hugepages),
        }
    }

    /// Names of the zones; memory without zones is one by itself.
    pub fn zone_ids(&self) -> BTreeSet<&str> {
        match self.zones.as_deref().unwrap_or_default() {
            [] => BTreeSet::from([DEFAULT_ZONE]),
            zones => zones.iter().map(|zone| zone.id.as_str()).collect(),
        }
    }

    /// Bytes of guest memory at boot, zones included; `None` on overflow.
    pub fn total_bytes(&self) -> Option<u64> {
        self.zones.iter().flatten().try_fold(self.size, |sum, zone| sum.checked_add(zone.size))
    }

    /// Maximum bytes of guest memory, with all hot-plugged memory; `None` on overflow.
    pub fn most_bytes(&self) -> Option<u64> {
        let zones = self.zones.iter().flatten().map(|zone| zone.hotplug_size);
        let later = zones.chain([self.hotplug_size]).flatten();
        later.fold(self.total_bytes(), |sum, size| sum?.checked_add(size))
    }

    /// Validates the options within the two families.
    ///
    /// # Errors
    /// The first violated rule.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let zones = self.zones.as_deref().unwrap_or_default();
        if self.most_bytes().is_none_or(|bytes| bytes > 1 << 46) {
            return Err(ConfigError::Memory {
                what: "memory".into(),
                problem: "the sizes add up to more than 64 TiB".into(),
            });
        }
        if zones.is_empty() {
            return Backing {
                what: "memory",
                is_zone: false,
                size_bytes: self.size,
                has_file: false,
                mergeable: self.mergeable,
                shared: self.shared,
                hugepages: self.hugepages,
                hugepage_bytes: self.hugepage_size,
                prezeroed: self.prezeroed.as_ref(),
                method: self.hotplug_method,
                hotplug_size: self.hotplug_size,
                hotplugged_size: self.hotplugged_size,
            }
            .validate();
        }
        // A toggle that is on here applies to all zones. Kata's runtimes set it both here and for each
        // zone. It has no effect of its own, so each zone must have it.
        let all = |of_memory: bool, of_zone: fn(&MemoryZoneConfig) -> bool| {
            !of_memory || zones.iter().all(of_zone)
        };
        if self.size != 0
            || !all(self.mergeable, |zone| zone.mergeable)
            || !all(self.shared, |zone| zone.shared)
            || !all(self.hugepages, |zone| zone.hugepages)
            || zones.iter().any(|zone| {
                !matches!(self.prefault, Prefault::Off) && zone.prefault != self.prefault
            })
            || self.prezeroed.is_some()
            || self.reserve
            || self.hugepage_size.is_some()
            || self.hotplug_size.is_some()
            || self.hotplugged_size.is_some()
        {
            return Err(ConfigError::Memory {
                what: "memory".into(),
                problem: "with zones, size must be 0 and properties belong to the zones: what is \
                          on here has to be on for each of them"
                    .into(),
            });
        }
        let mut ids = BTreeSet::new();
        for zone in zones {
            if zone.id.is_empty() {
                return Err(ConfigError::EmptyId { family: "memory-zone" });
            }
            if !ids.insert(zone.id.as_str()) {
                return Err(ConfigError::DuplicateId { id: zone.id.clone() });
            }
            Backing {
                what: &format!("memory zone '{}'", zone.id),
                is_zone: true,
                size_bytes: zone.size,
                has_file: zone.file.is_some(),
                mergeable: zone.mergeable,
                shared: zone.shared,
                hugepages: zone.hugepages,
                hugepage_bytes: zone.hugepage_size,
                prezeroed: zone.prezeroed.as_ref(),
                method: self.hotplug_method,
                hotplug_size: zone.hotplug_size,
                hotplugged_size: zone.hotplugged_size,
            }
            .validate()?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_devices_are_what_a_guest_of_that_size_adds() {
        const MIB: u64 = 1 << 20;
        const GIB: u64 = 1 << 30;
        // 1 GiB of addresses below 4 GiB has no memory.
        for (boot, block) in [
            (256 * MIB, 128 * MIB),
            (63 * GIB - 128 * MIB, 128 * MIB),
            (63 * GIB, 2 * GIB),
            (64 * GIB, GIB),
            (64 * GIB + 512 * MIB, 512 * MIB),
            (64 * GIB + 64 * MIB, 128 * MIB),
            (4095 * GIB, 2 * GIB),
            (u64::MAX, 128 * MIB),
        ] {
            assert_eq!(guest_block_bytes(boot), block, "{boot:#x}");
        }
        assert_eq!(device_room(64 * GIB, 5 * GIB + 1, 0), Some((5 * GIB, GIB)));
        assert_eq!(device_room(64 * GIB, GIB - 1, 0), None);
    }
}
