// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Guest RAM of a machine: from its options to mapped memory in KVM's slots.
//!
//! Owns the translation only; slot number and region index are the same number. Only the last region may have
//! several slots, one for each memory device that was added, which have the numbers that follow.

use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use arch::layout::{self, GpaRange, HighHole};
use hypervisor::{KvmError, MemslotConfig, MemslotError, Vm};
use memory::plugging::PlugError;
use memory::{
    Backing, BackingError, GuestRam, HugePageSize, InitialContents, PopulateError, PrefaultError,
    PrefaultOptions, RamConfig, RamError, RamHole, RamLayout, RamRegion, RamSources, ZoneSpec,
};
use prezero_pool_client::PoolConnection;
use thiserror::Error;

use super::prefault::BootPrefault;
use super::{CancelToken, prefault, prezeroed};
use crate::config::memory::{DEFAULT_ZONE, HotplugMethod};
use crate::config::{MemoryConfig, MemoryZoneConfig, Prefault, VmConfig};

/// Why guest memory cannot be set up.
#[derive(Debug, Error)]
pub enum MachineRamError {
    /// The huge page size is not supported.
    #[error("cannot use these huge pages")]
    HugePages(#[source] memory::ConfigError),
    /// The memory cannot be created.
    #[error("cannot make guest memory")]
    Make(#[source] RamError),
    /// The memory cannot be prefaulted.
    #[error("cannot populate guest memory, as prefault=on asks")]
    Prefault(#[source] PrefaultError),
    /// The host has no huge pages for what the guest before a reboot had given back.
    #[error("cannot populate the memory that the guest had given back before it rebooted")]
    Refill(#[source] PrefaultError),
    /// Memory that is hot-plugged from the start cannot be.
    #[error("cannot plug in the memory that the guest is to have")]
    Plug(#[source] PlugError),
    /// KVM refuses a memory slot.
    #[error("KVM refused guest memory")]
    Slot(#[source] MemslotError),
    /// KVM would handle refused accesses as asynchronous page faults.
    #[error("KVM's asynchronous page faults cannot be disabled, as fault_source=sigbus needs")]
    AsyncFaults(#[source] KvmError),
}

fn backing(config: &MemoryZoneConfig) -> Result<Backing, memory::ConfigError> {
    if let Some(path) = &config.file {
        return Ok(Backing::File(path.clone()));
    }
    if config.hugepages {
        let page_size = match config.hugepage_size {
            Some(bytes) => HugePageSize::from_bytes(bytes)?,
            None => HugePageSize::HostDefault,
        };
        return Ok(Backing::Hugetlb { page_size });
    }
    Ok(match (config.mergeable, config.shared) {
        (true, _) => Backing::Anonymous,
        (false, true) => Backing::Memfd,
        (false, false) => Backing::Auto,
    })
}

fn zone_spec(config: &MemoryZoneConfig, thp: bool) -> Result<ZoneSpec, MachineRamError> {
    Ok(ZoneSpec {
        id: config.id.clone(),
        size_bytes: config.size,
        backing: backing(config).map_err(MachineRamError::HugePages)?,
        shared: config.shared,
        mergeable: config.mergeable,
        thp,
        prefault: config.prefault == Prefault::Boot,
        reserve: config.reserve,
        host_numa_node: config.host_numa_node,
        block_bytes: None,
    })
}

/// A zone, or the part of one, that is hot-plugged.
pub struct HotplugZone {
    /// Its id, which is also that of its virtio-mem device.
    pub id: String,
    /// Bytes to be plugged at boot.
    pub plugged_bytes: u64,
    spec: MemoryZoneConfig,
    block_bytes: u64,
}

/// Id of the hot-plugged part of a zone.
pub fn later_id(zone: &str) -> String {
    format!("__mem_{zone}")
}

/// The hot-plugged parts of the configured memory.
pub fn hotplug_zones(config: &MemoryConfig) -> Vec<HotplugZone> {
    let of_zone = |zone: MemoryZoneConfig| {
        let (size, block_bytes) = zone.later(config.hotplug_method)?;
        let id = later_id(&zone.id);
        let plugged_bytes = zone.hotplugged_size.unwrap_or(0);
        let prefault = Prefault::Off;
        let spec = MemoryZoneConfig { id: id.clone(), size, prefault, prezeroed: None, ..zone };
        Some(HotplugZone { id, plugged_bytes, spec, block_bytes })
    };
    zones(config).into_iter().filter_map(of_zone).collect()
}

/// The hot-plugged regions.
pub fn hotplug_regions(ram: &GuestRam) -> impl Iterator<Item = &Arc<RamRegion>> {
    ram.regions().iter().filter(|region| region.block_bytes().is_some())
}

/// Plugs in the memory devices that the guest finds when it boots, or marks them as plugged in if their contents are
/// still to arrive.
fn plug_devices(
    config: &MemoryConfig,
    ram: &GuestRam,
    contents: InitialContents,
) -> Result<(), MachineRamError> {
    if config.hotplug_method != HotplugMethod::Acpi {
        return Ok(());
    }
    for zone in hotplug_zones(config).iter().filter(|zone| zone.plugged_bytes > 0) {
        let mut regions = hotplug_regions(ram).filter(|region| region.zone_id() == zone.id);
        let Some(region) = regions.next() else { continue };
        let bytes = 0..zone.plugged_bytes;
        let plugged = if contents == InitialContents::AsFound {
            ram.plug(&(region.gpa()..region.gpa().saturating_add(bytes.end)))
        } else {
            region.set_usable(std::slice::from_ref(&bytes))
        };
        plugged.map_err(MachineRamError::Plug)?;
    }
    Ok(())
}

/// The configured zones.
fn zones(config: &MemoryConfig) -> Vec<MemoryZoneConfig> {
    match &config.zones {
        Some(zones) if !zones.is_empty() => zones.clone(),
        _ => vec![MemoryZoneConfig {
            id: DEFAULT_ZONE.to_owned(),
            size: config.size,
            mergeable: config.mergeable,
            shared: config.shared,
            hugepages: config.hugepages,
            hugepage_size: config.hugepage_size,
            prefault: config.prefault,
            reserve: config.reserve,
            prezeroed: config.prezeroed.clone(),
            hotplug_size: config.hotplug_size,
            hotplugged_size: config.hotplugged_size,
            ..MemoryZoneConfig::default()
        }],
    }
}

/// The prefault mode of each zone, by id.
pub fn prefault_modes(config: &MemoryConfig) -> Vec<(String, Prefault)> {
    zones(config).into_iter().map(|zone| (zone.id, zone.prefault)).collect()
}

/// The layout of guest memory. It depends on the configuration, which travels with the VM, not on the host.
pub fn layout_of(phys_bits: u8, high_hole: HighHole) -> RamLayout {
    let hole = |range: GpaRange| RamHole { start: range.gpa, end: range.end_gpa() };
    RamLayout {
        hole_start: layout::LOW_RAM_END_GPA,
        hole_end: layout::HIGH_RAM_64_GPA,
        high_hole: high_hole.range().map(hole),
        end: 1 << phys_bits.min(52),
        ..RamLayout::default()
    }
}

/// The same for a configuration, on its platform.
pub fn layout_for(config: &VmConfig, phys_bits: u8) -> RamLayout {
    let later_align_bytes = config.machine_platform().windows.later_memory_align_bytes;
    RamLayout { later_align_bytes, ..layout_of(phys_bits, config.memory.hole()) }
}

/// The zones of a machine without hot-plugged memory, and the one pool that all of them name.
///
/// # Errors
/// The huge page size is not supported.
pub fn zones_of_one_pool(
    config: &MemoryConfig,
) -> Result<Option<(Vec<ZoneSpec>, PathBuf)>, MachineRamError> {
    let zones = zones(config);
    let Some(socket) = zones.first().and_then(|zone| zone.prezeroed.clone()) else {
        return Ok(None);
    };
    let is_of_it = |zone: &MemoryZoneConfig| zone.prezeroed.as_ref() == Some(&socket);
    if !zones.iter().all(is_of_it) || !hotplug_zones(config).is_empty() {
        return Ok(None);
    }
    Ok(Some((specs(config)?, socket)))
}

/// All zones, the hot-plugged ones last.
pub(super) fn specs(config: &MemoryConfig) -> Result<Vec<ZoneSpec>, MachineRamError> {
    let zones = zones(config);
    let mut specs =
        zones.iter().map(|zone| zone_spec(zone, config.thp)).collect::<Result<Vec<_>, _>>()?;
    for zone in hotplug_zones(config) {
        let spec = zone_spec(&zone.spec, config.thp)?;
        specs.push(ZoneSpec { block_bytes: Some(zone.block_bytes), ..spec });
    }
    Ok(specs)
}

/// The RAM of the guest before a reboot, for the guest after it; `None`, with that RAM released, if the
/// configuration asks for other memory, a lost back end may write it, or a page is found to have a hardware error.
/// Prefaults like [`make`].
///
/// # Errors
/// The host has no pages for what the guest before had given back, or the huge page size is not supported.
pub fn restart(
    config: &MemoryConfig,
    layout: RamLayout,
    before: Option<Arc<GuestRam>>,
    boot_prefault: &BootPrefault,
    cancel: &CancelToken,
) -> Result<Option<Arc<GuestRam>>, MachineRamError> {
    let Some(ram) = before else { return Ok(None) };
    if !ram.can_restart(&RamConfig { zones: specs(config)? }, layout) {
        log::info!(
            "guest memory is made anew: the VM reboots with other memory, or has lost a back end"
        );
        return Ok(None);
    }
    ram.restart(&|| cancel.is_cancelled());
    plug_devices(config, &ram, InitialContents::AsFound)?;
    let modes = prefault_modes(config);
    let refilled = refill(&ram, config, boot_prefault, cancel).map_err(MachineRamError::Refill);
    let populated = refilled.and_then(|()| {
        let populated = prefault::complete(&ram, config, &modes, boot_prefault, cancel);
        populated.map_err(MachineRamError::Prefault)
    });
    match populated {
        Ok(()) => Ok(Some(ram)),
        // A reset is how a guest gets rid of such a page.
        Err(error) if is_poisoned(&error) => {
            log::warn!("guest memory is made anew: {}", error_text::chain(&error));
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

/// Populates hugetlb zones again where the guest before had given pages back.
fn refill(
    ram: &GuestRam,
    config: &MemoryConfig,
    boot_prefault: &BootPrefault,
    cancel: &CancelToken,
) -> Result<(), PrefaultError> {
    let options = PrefaultOptions {
        threads: prefault::prefault_threads(config),
        observer: Some(boot_prefault.observer()),
        ..PrefaultOptions::default()
    };
    let Some(running) = ram.refill_huge_pages(&options)? else { return Ok(()) };
    running.wait_unless(&|| cancel.is_cancelled())?;
    ram.huge_pages_refilled();
    Ok(())
}

/// Whether a page of the memory has a hardware error.
fn is_poisoned(error: &MachineRamError) -> bool {
    matches!(
        error,
        MachineRamError::Refill(PrefaultError::Populate(PopulateError::HardwarePoison { .. }))
            | MachineRamError::Prefault(PrefaultError::Populate(
                PopulateError::HardwarePoison { .. }
            ))
    )
}

/// Creates guest RAM whose contents are as found, and prefaults it. `pool`: see [`prezeroed::take`]. Cancelling ends the
/// prefault early.
///
/// # Errors
/// Names the zone and the limit.
pub fn make(
    config: &MemoryConfig,
    layout: RamLayout,
    origin: RamSources,
    pool: Option<&Arc<PoolConnection>>,
    boot_prefault: &BootPrefault,
    cancel: &CancelToken,
) -> Result<Arc<GuestRam>, MachineRamError> {
    let ram = make_unpopulated(config, layout, origin, pool)?;
    let modes = prefault_modes(config);
    let populated = prefault::complete(&ram, config, &modes, boot_prefault, cancel);
    populated.map_err(MachineRamError::Prefault)?;
    Ok(Arc::new(ram))
}

/// Creates guest RAM whose contents are still to arrive.
///
/// # Errors
/// Names the zone and the limit.
pub fn make_arriving(
    config: &MemoryConfig,
    layout: RamLayout,
    origin: RamSources,
) -> Result<Arc<GuestRam>, MachineRamError> {
    let ram = make_unpopulated(config, layout, origin, None)?;
    let room = prefault::check_room(&ram, &prefault_modes(config));
    room.map_err(|error| MachineRamError::Prefault(error.into()))?;
    Ok(Arc::new(ram))
}

/// Creates guest RAM of which only what a pool gives is populated.
fn make_unpopulated(
    config: &MemoryConfig,
    layout: RamLayout,
    mut origin: RamSources,
    pool: Option<&Arc<PoolConnection>>,
) -> Result<GuestRam, MachineRamError> {
    let contents = origin.contents;
    let specs = specs(config)?;
    let zones = zones(config);
    let sockets = zones.iter().map(|zone| zone.prezeroed.as_deref());
    let is_there = |zone: &ZoneSpec| origin.provided.iter().any(|file| file.zone() == zone.id);
    let requests: Vec<_> = specs.iter().zip(sockets).filter(|(zone, _)| !is_there(zone)).collect();
    if origin.image.is_none() {
        origin.provided.extend(prezeroed::take(&requests, pool));
    }
    let ram = with_origin(&RamConfig { zones: specs }, layout, origin)?;
    for warning in ram.warnings() {
        log::warn!("{warning}");
    }
    plug_devices(config, &ram, contents)?;
    Ok(ram)
}

/// Creates guest RAM from the provided files; pool memory that does not fit is left out.
fn with_origin(
    config: &RamConfig,
    layout: RamLayout,
    mut origin: RamSources,
) -> Result<GuestRam, MachineRamError> {
    loop {
        let error = match GuestRam::with_sources(config, layout, &origin) {
            Ok(ram) => return Ok(ram),
            Err(error) => error,
        };
        let files = &mut origin.provided;
        let unfit = match &error {
            RamError::Backing(BackingError::ProvidedFile { zone, .. }) => {
                files.iter().position(|file| file.zone() == zone && file.is_prezeroed())
            }
            _ => None,
        };
        let Some(unfit) = unfit else { return Err(MachineRamError::Make(error)) };
        prezeroed::warn(files.swap_remove(unfit).zone(), &error);
    }
}

/// Attaches the RAM to the KVM VM. With memory devices only what is plugged in is attached.
///
/// # Errors
/// Names the slot.
pub fn attach(vm: &Vm, ram: &Arc<GuestRam>, method: HotplugMethod) -> Result<(), MachineRamError> {
    // A vCPU whose access is refused must exit. A KVM without the bundled patches turns a refusal into an
    // asynchronous page fault whenever it could halt the vCPU meanwhile.
    let refused = ram.regions().iter().any(|region| region.vcpus_ptr().is_some());
    let comes_back = vm.capabilities().userfault.is_some_and(|support| support.refused_faults);
    if refused && !comes_back {
        vm.keep_halted_vcpus_in_guest().map_err(MachineRamError::AsyncFaults)?;
    }
    for (slot, region) in (0_u32..).zip(ram.regions()) {
        let len_bytes = match method {
            HotplugMethod::Acpi => region.usable_bytes(),
            HotplugMethod::VirtioMem => region.len_bytes(),
        };
        if len_bytes > 0 {
            attach_range(vm, ram, slot, region, 0..len_bytes).map_err(MachineRamError::Slot)?;
        }
    }
    Ok(())
}

/// Attaches the addresses `gpa` of a memory device that was plugged in, in the last region.
///
/// # Errors
/// KVM refuses it.
pub fn attach_more(
    vm: &Vm,
    ram: &Arc<GuestRam>,
    region: &RamRegion,
    gpa: &Range<u64>,
) -> Result<(), MemslotError> {
    let first = ram.regions().iter().position(|other| other.gpa() == region.gpa()).unwrap_or(0);
    let before = slots_in(vm, region).len();
    let slot = u32::try_from(first.saturating_add(before)).unwrap_or(u32::MAX);
    let at = |gpa: u64| gpa.saturating_sub(region.gpa());
    attach_range(vm, ram, slot, region, at(gpa.start)..at(gpa.end).min(region.len_bytes()))
}

/// The memory slots of a region, in the order of their addresses.
pub fn slots_in(vm: &Vm, region: &RamRegion) -> Vec<MemslotConfig> {
    let all = region.gpa()..region.gpa().saturating_add(region.len_bytes());
    let slots = vm.memory_slots().into_iter();
    let mut slots: Vec<_> = slots.filter(|slot| all.contains(&slot.gpa)).collect();
    slots.sort_unstable_by_key(|slot| slot.gpa);
    slots
}

/// Attaches `bytes` of a region.
fn attach_range(
    vm: &Vm,
    ram: &Arc<GuestRam>,
    slot: u32,
    region: &RamRegion,
    bytes: Range<u64>,
) -> Result<(), MemslotError> {
    let config = MemslotConfig {
        slot,
        gpa: region.gpa().saturating_add(bytes.start),
        hva: region.slot_addr().saturating_add(bytes.start),
        len_bytes: bytes.end.saturating_sub(bytes.start),
        log_dirty: false,
        readonly: false,
    };
    // SAFETY: the region maps the bytes up to `bytes.end`, which its callers keep within its length, for as long as
    // it lives, and the slot keeps the whole of guest RAM alive; RAM is only ever reached by volatile and atomic
    // accesses.
    unsafe { vm.set_memory_slot(config, Arc::<GuestRam>::clone(ram)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_hardware_error_has_memory_made_anew() {
        let poison = || {
            PrefaultError::Populate(PopulateError::HardwarePoison { zone: "a".to_owned(), at: 0 })
        };
        assert!(is_poisoned(&MachineRamError::Refill(poison())));
        assert!(is_poisoned(&MachineRamError::Prefault(poison())));
        let full = PopulateError::OutOfMemory { zone: "a".to_owned(), at: 0 };
        assert!(!is_poisoned(&MachineRamError::Refill(full.into())));
    }
}
