// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Configuration overrides of a restore: disks, network devices, memory zones; the last also of a VM that arrives.
//!
//! Owns the changes of configuration and state that go together: a device is found by its name in both.
//! Must never change what the guest's driver relies on without the guest being able to find out.

use std::collections::BTreeSet;
use std::path::PathBuf;

use thiserror::Error;

use crate::config::zone_update::{MemoryUpdates, PoolUpdate, VmMemoryZoneUpdateData};
use crate::config::{MacAddr, RestoreConfig, VmConfig};
use crate::machine::MachineState;

/// Why a change of a restored VM is refused.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum UpdateError {
    /// A change names an unknown device or zone.
    #[error("{list} names '{id}', which the VM does not have")]
    Unknown {
        /// The list of changes.
        list: &'static str,
        /// The name in it.
        id: String,
    },
    /// A device is named twice.
    #[error("{list} names '{id}' twice")]
    Twice {
        /// The list of changes.
        list: &'static str,
        /// The name in it.
        id: String,
    },
    /// The MAC address is zero.
    #[error("net_updates gives '{0}' a MAC address of zeros, which is not valid")]
    ZeroMac(String),
    /// The state has no such device, or none with a MAC address.
    #[error("the saved state has no MAC address of '{0}'")]
    NoMac(String),
}

/// Has zones take their memory from other nodes of the host, or from another pool.
///
/// # Errors
/// Names the unknown zone.
pub fn change_memory(config: &mut VmConfig, updates: &MemoryUpdates) -> Result<(), UpdateError> {
    change_zones(config, &updates.zones)?;
    match &updates.pool {
        None => {}
        Some(PoolUpdate::Off) => name_pool(config, None),
        Some(PoolUpdate::At(socket)) => name_pool(config, Some(socket)),
    }
    Ok(())
}

/// Names this pool for all memory that can be a pool's.
pub fn name_pool(config: &mut VmConfig, socket: Option<&PathBuf>) {
    let memory = &mut config.memory;
    let Some(zones) = memory.zones.as_mut().filter(|zones| !zones.is_empty()) else {
        memory.prezeroed = socket.filter(|_| !memory.mergeable).cloned();
        return;
    };
    for zone in zones {
        zone.prezeroed = socket.filter(|_| !zone.mergeable && zone.file.is_none()).cloned();
    }
}

fn change_zones(
    config: &mut VmConfig,
    updates: &[VmMemoryZoneUpdateData],
) -> Result<(), UpdateError> {
    let mut seen = BTreeSet::new();
    for update in updates {
        if !seen.insert(&update.id) {
            let (list, id) = ("zone_updates", update.id.clone());
            return Err(UpdateError::Twice { list, id });
        }
        let zone = config.memory.zones.iter_mut().flatten().find(|zone| zone.id == update.id);
        let Some(zone) = zone else {
            return Err(UpdateError::Unknown { list: "zone_updates", id: update.id.clone() });
        };
        zone.host_numa_node = Some(update.host_numa_node);
    }
    Ok(())
}

/// Changes the configuration before it is completed and validated, so that new names and files are
/// validated with all others.
///
/// # Errors
/// Names the unknown device or zone.
pub fn change_config(config: &mut VmConfig, request: &RestoreConfig) -> Result<(), UpdateError> {
    let unknown = |list, id: &String| UpdateError::Unknown { list, id: id.clone() };
    change_memory(config, &request.memory_updates())?;
    let mut seen = BTreeSet::new();
    let mut once = |list, id: &String| {
        if seen.insert(id.clone()) {
            Ok(())
        } else {
            Err(UpdateError::Twice { list, id: id.clone() })
        }
    };
    for update in request.net_updates.iter().flatten() {
        once("net_updates", &update.id)?;
        let id = Some(&update.id);
        let net = config.net.iter_mut().flatten().find(|net| net.id.as_ref() == id);
        let net = net.ok_or_else(|| unknown("net_updates", &update.id))?;
        if update.mac.is_some_and(MacAddr::is_zero) {
            return Err(UpdateError::ZeroMac(update.id.clone()));
        }
        net.mac = update.mac.or(net.mac);
        net.tap = update.tap.clone().or_else(|| net.tap.take());
    }
    for update in request.disk_updates.iter().flatten() {
        once("disk_updates", &update.id)?;
        let id = Some(&update.id);
        let disk = config.disks.iter_mut().flatten().find(|disk| disk.id.as_ref() == id);
        let disk = disk.ok_or_else(|| unknown("disk_updates", &update.id))?;
        disk.path = update.path.clone().or_else(|| disk.path.take());
    }
    // Names last and all at once, so that two devices can swap theirs.
    let renamed = renamed(request);
    let nets = config.net.iter_mut().flatten().map(|net| &mut net.id);
    let disks = config.disks.iter_mut().flatten().map(|disk| &mut disk.id);
    for id in nets.chain(disks).flatten() {
        if let Some((_, new)) = renamed.iter().find(|(old, _)| old == id) {
            (*new).clone_into(id);
        }
    }
    Ok(())
}

/// Pairs of old and new names.
fn renamed(request: &RestoreConfig) -> Vec<(&str, &str)> {
    let nets = request.net_updates.iter().flatten().map(|update| (&update.id, &update.new_id));
    let disks = request.disk_updates.iter().flatten().map(|update| (&update.id, &update.new_id));
    nets.chain(disks).filter_map(|(id, new)| Some((id.as_str(), new.as_deref()?))).collect()
}

/// Makes the same changes to the state.
///
/// # Errors
/// Names the device whose state cannot hold the change.
pub fn change_state(state: &mut MachineState, request: &RestoreConfig) -> Result<(), UpdateError> {
    for update in request.net_updates.iter().flatten() {
        let Some(mac) = update.mac else { continue };
        // The transport's state contains that of the device, with the fields that the guest reads.
        let function = state.pci.get_mut(&update.id);
        let saved =
            function.and_then(|function| function.state.data.pointer_mut("/device/data/mac"));
        let saved = saved.ok_or_else(|| UpdateError::NoMac(update.id.clone()))?;
        *saved = mac.bytes().to_vec().into();
    }
    let mut moved = Vec::new();
    for (old, new) in renamed(request) {
        if let Some(function) = state.pci.remove(old) {
            moved.push((new.to_owned(), function));
        }
    }
    state.pci.extend(moved);
    Ok(())
}

#[cfg(test)]
#[path = "updates_tests.rs"]
mod tests;
