// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Wiring of persistent memory.
//!
//! Owns the translation from options to devices, and the range of guest addresses of each: a part of the window for
//! 64-bit BARs of its segment, in which no BAR is placed, and which stays where it is for as long as the guest has the
//! device, here or elsewhere. The memory of such a device is no guest RAM: it has no dirty log, no device reads or
//! writes it, and a migration leaves it in its file.

use std::collections::BTreeSet;
use std::sync::Arc;

use devices::virtio::Offering;
use devices::virtio::block::DiskLock;
use devices::virtio::pmem::{Pmem, PmemConfig as FileConfig, PmemError, PmemFile, PmemMapping};
use hypervisor::{MemslotConfig, MemslotError, StopReason, Vm};
use pci::{Bdf, MmioRange, PciSegment, RangeWish};
use thiserror::Error;

use super::Machine;
use super::exclusive::LockedImages;
use super::place::Place;
use super::segments::PlaceError;
use super::virtio::{PciContext, VirtioDevices, VirtioError};
use crate::config::pmem::PMEM_ALIGN_BYTES;
use crate::config::{PmemConfig, VmConfig};

/// First memory slot number for persistent memory; lower numbers are for RAM and BARs.
const FIRST_SLOT: u32 = 16_384;

/// Why persistent memory cannot be created.
#[derive(Debug, Error)]
#[error("cannot make persistent memory '{id}'")]
pub struct PmemWiringError {
    /// Id of the device.
    id: String,
    /// The cause.
    #[source]
    source: PmemCause,
}

#[derive(Debug, Error)]
enum PmemCause {
    #[error(transparent)]
    File(#[from] PmemError),
    #[error("there is no guest address for it")]
    Range(#[source] PlaceError),
    #[error("KVM refused it")]
    Slot(#[source] MemslotError),
}

/// A machine with such persistent memory cannot be migrated or saved.
#[derive(Debug, Error)]
#[error(
    "{} cannot be migrated or saved: its contents are in this process alone, as discard_writes=on or a temporary file \
     has it",
    .0.join(", ")
)]
pub struct PmemNotMovable(Vec<String>);

/// Refuses to migrate, save, receive or restore a machine whose persistent memory has contents that no file of a name
/// has.
///
/// # Errors
/// Names the devices.
pub fn check_movable(config: &VmConfig) -> Result<(), PmemNotMovable> {
    let pmems = config.pmem.iter().flatten();
    let stay = pmems.filter(|pmem| pmem.discard_writes || pmem.file.is_dir());
    refuse(stay.map(|pmem| pmem.id.as_deref().unwrap_or_default()))
}

fn refuse<'a>(ids: impl Iterator<Item = &'a str>) -> Result<(), PmemNotMovable> {
    let ids: Vec<_> = ids.map(|id| format!("'{id}'")).collect();
    if ids.is_empty() { Ok(()) } else { Err(PmemNotMovable(ids)) }
}

/// A range of guest addresses, with the memory that the guest has there.
pub struct PmemRange {
    vm: Vm,
    segment: Arc<PciSegment>,
    range: MmioRange,
    /// Set once there is one.
    slot: Option<u32>,
    /// Whether no file of a name has the contents.
    is_bound: bool,
}

impl PmemRange {
    fn reserve(
        context: &PciContext<'_>,
        config: &PmemConfig,
        file: &PmemFile,
    ) -> Result<Self, PmemCause> {
        let len_bytes = file.len_bytes();
        let segment = context.segments.get(config.pci_segment).map_err(PmemCause::Range)?;
        let wish = RangeWish { start_gpa: config.gpa, len_bytes, align_bytes: PMEM_ALIGN_BYTES };
        let range = segment.reserve_range(wish);
        let range = range.map_err(|source| PmemCause::Range(source.into()))?;
        Ok(Self {
            vm: context.vm.clone(),
            segment: Arc::clone(segment),
            range,
            slot: None,
            is_bound: config.discard_writes || file.is_temporary(),
        })
    }

    fn map(&mut self, slot: u32, memory: &Arc<PmemMapping>) -> Result<(), PmemCause> {
        let config = MemslotConfig {
            slot,
            gpa: self.range.start_gpa,
            hva: memory.host_addr(),
            len_bytes: memory.len_bytes(),
            log_dirty: false,
            readonly: false,
        };
        // SAFETY: the mapping is `len_bytes` long and stays until it is dropped, of which the slot holds a share;
        // nothing in this process reads or writes it.
        let made = unsafe { self.vm.set_memory_slot(config, Arc::<PmemMapping>::clone(memory)) };
        made.map_err(PmemCause::Slot)?;
        self.slot = Some(slot);
        Ok(())
    }
}

impl Drop for PmemRange {
    fn drop(&mut self) {
        if let Some(slot) = self.slot
            && let Err(error) = self.vm.remove_memory_slot(slot)
        {
            // The addresses stay taken: another device must not be placed over the memory.
            log::warn!("persistent memory stays mapped: {}", error_text::chain(&error));
            return;
        }
        self.segment.release_range(self.range);
    }
}

/// Persistent memory that is open, with its place in the guest.
pub struct WiredPmem {
    config: PmemConfig,
    file: PmemFile,
    range: PmemRange,
}

/// Opens the file of a device, or takes it with its lock from `images`; in the first case it is not locked yet.
///
/// # Errors
/// Names the device and its file.
pub fn open(config: &PmemConfig, images: &mut LockedImages) -> Result<PmemFile, PmemWiringError> {
    let id = config.id.clone().unwrap_or_default();
    let kept = images.take_file(&id, &config.file, config.discard_writes);
    let config = FileConfig {
        path: config.file.clone(),
        size_bytes: config.size,
        discard_writes: config.discard_writes,
    };
    PmemFile::open(&config, kept).map_err(|source| PmemWiringError { id, source: source.into() })
}

/// The lowest number that no memory slot has; one that could not be removed keeps its own.
fn free_slot(vm: &Vm) -> u32 {
    let taken: BTreeSet<u32> = vm.memory_slots().into_iter().map(|slot| slot.slot).collect();
    (FIRST_SLOT..u32::MAX).find(|number| !taken.contains(number)).unwrap_or(u32::MAX)
}

fn wire(
    config: &PmemConfig,
    file: PmemFile,
    context: &PciContext<'_>,
) -> Result<WiredPmem, PmemWiringError> {
    let id = || config.id.clone().unwrap_or_default();
    let place = || {
        let mut range = PmemRange::reserve(context, config, &file)?;
        range.map(free_slot(context.vm), file.mapping())?;
        Ok(range)
    };
    let range = place().map_err(|source| PmemWiringError { id: id(), source })?;
    Ok(WiredPmem { config: config.clone(), file, range })
}

/// Opens all configured persistent memory, and gives it its addresses, before any BAR has one: first where the guest
/// has it already.
///
/// # Errors
/// Names the device.
pub fn make(
    config: &VmConfig,
    context: &PciContext<'_>,
    images: &mut LockedImages,
) -> Result<Vec<WiredPmem>, PmemWiringError> {
    let mut wired = Vec::new();
    let pmems = || (0_usize..).zip(config.pmem.iter().flatten());
    let settled = pmems().filter(|(_, pmem)| pmem.gpa.is_some());
    let others = pmems().filter(|(_, pmem)| pmem.gpa.is_none());
    for (at, pmem) in settled.chain(others) {
        wired.push((at, wire(pmem, open(pmem, images)?, context)?));
    }
    wired.sort_by_key(|(at, _)| *at);
    Ok(wired.into_iter().map(|(_, wired)| wired).collect())
}

impl VirtioDevices {
    /// Plugs persistent memory that has its addresses.
    ///
    /// # Errors
    /// Names the device.
    pub(super) fn plug_pmem(
        &mut self,
        WiredPmem { config, file, range }: WiredPmem,
        context: &PciContext<'_>,
    ) -> Result<Bdf, VirtioError> {
        let id = config.id.clone().unwrap_or_default();
        let device = Pmem::new(id.clone(), &file, range.range.start_gpa);
        let place = Place::new(config.pci_segment, config.pci_device_id).behind_iommu(config.iommu);
        let device = Offering::of(Box::new(device), context.platform.offers.pmem);
        let bdf = self.plug(context, &id, Box::new(device), place)?;
        self.locks.push((id.clone(), file.lock()));
        self.pmems.push((id, range));
        Ok(bdf)
    }

    /// Adds persistent memory to the machine; its file is locked.
    ///
    /// # Errors
    /// Names the device; nothing has changed then.
    pub fn add_pmem(
        &mut self,
        config: &PmemConfig,
        file: PmemFile,
        context: &PciContext<'_>,
        is_paused: bool,
    ) -> Result<Bdf, VirtioError> {
        let bdf = self.plug_pmem(wire(config, file, context)?, context)?;
        self.pause_if_machine_is(is_paused);
        Ok(bdf)
    }

    /// Records in the configuration where the guest has its persistent memory.
    pub fn settle_pmems(&self, config: &mut VmConfig) {
        for (id, PmemRange { range, .. }) in &self.pmems {
            config.settle_pmem(id, range.start_gpa, range.len_bytes);
        }
    }

    /// As [`check_movable`], for a machine that is there.
    ///
    /// # Errors
    /// Names the devices.
    pub fn check_movable(&self) -> Result<(), PmemNotMovable> {
        let bound = self.pmems.iter().filter(|(_, range)| range.is_bound);
        refuse(bound.map(|(id, _)| id.as_str()))
    }
}

impl Machine {
    /// Says which persistent memory may be why a vCPU has stopped: the host could not provide what the guest accessed.
    pub fn pmem_behind(&self, reason: &StopReason) -> Option<String> {
        let StopReason::MemoryFault(access) = reason else { return None };
        let devices = &self.parts.devices;
        let range_of = |id: &str| devices.pmems.iter().find(|(other, _)| other == id);
        let of_pmem = devices.locks.iter().filter_map(|(id, lock)| {
            let (_, pmem) = range_of(id)?;
            Some((id, lock, pmem.range))
        });
        let all: Vec<(&String, &DiskLock, MmioRange)> = of_pmem.collect();
        let is_short = |(_, lock, range): &&(&String, &DiskLock, MmioRange)| {
            lock.host_len_bytes().is_ok_and(|len_bytes| len_bytes < range.len_bytes)
        };
        if let Some((id, lock, _)) = all.iter().find(is_short) {
            return Some(format!(
                "{} is shorter than persistent memory '{id}'",
                lock.path().display()
            ));
        }
        let may_be = |(_, _, range): &&(&String, &DiskLock, MmioRange)| {
            access.gpa.is_none_or(|gpa| gpa.wrapping_sub(range.start_gpa) < range.len_bytes)
        };
        let named = all
            .iter()
            .filter(may_be)
            .map(|(id, lock, _)| format!("{} of persistent memory '{id}'", lock.path().display()));
        let named: Vec<_> = named.collect();
        let what = "the host may have no room for what the guest writes to it, or cannot read it";
        (!named.is_empty()).then(|| format!("look at {}: {what}", named.join(", ")))
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

    use serde_json::json;

    use super::*;

    #[test]
    fn what_no_named_file_has_stays_where_it_is() {
        let dir = tempfile::tempdir().unwrap();
        let check = |more: serde_json::Value| {
            let pmem = json!({ "payload": { "kernel": "/k" }, "pmem": [{ "file": "/p" }, more] });
            let config = serde_json::from_value::<VmConfig>(pmem).unwrap();
            check_movable(&config).map_err(|error| error.to_string())
        };
        check(json!({ "file": "/q", "id": "q" })).unwrap();
        for stays in [
            json!({ "file": "/q", "id": "q", "discard_writes": true }),
            json!({ "file": dir.path(), "id": "q", "size": 2 << 20 }),
        ] {
            let refused = check(stays).unwrap_err();
            assert!(refused.starts_with("'q' cannot be migrated or saved"), "{refused}");
        }
    }
}
