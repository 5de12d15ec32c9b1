// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A machine as cloud-hypervisor v53 saves or sends it: its documents, and the ranges of memory that are saved with them.
//!
//! Owns what of a machine is looked at, and what of a machine that is saved cannot be sent; what it means there is known to
//! [`crate::export`]. Nothing is written here. What was said of a machine that is sent stays true until its state follows, or
//! the state is refused.

use std::sync::Arc;

use cloud_hypervisor_state::{DocumentError, MemoryManager};
use thiserror::Error;
use vm_migration::borders::Borders;
use vm_migration::layout::GpaRange;

use super::adopted_arrival::warn_of;
use super::memory::{MigratingRam, MigratingRamError};
use crate::config::VmConfig;
use crate::export::{
    self, ExportError, Exported, Seen, check_platform, check_queued, export, layout_of,
};
use crate::machine::{CallLimits, Machine, MachineError, Patience};

/// Why a machine cannot be written as one of cloud-hypervisor.
#[derive(Debug, Error)]
pub enum ExportedMachineError {
    /// Its memory cannot be described.
    #[error(transparent)]
    Memory(#[from] MigratingRamError),
    /// Another machine than the destination's.
    #[error(
        "the destination is cloud-hypervisor, or a program that speaks as it does: of this VM it has nothing to make one of"
    )]
    OtherPlatform(#[source] ExportError),
    /// It can be saved, and not sent.
    #[error("{what} cannot be sent to cloud-hypervisor 53: {problem}")]
    NotSent {
        /// The part.
        what: String,
        /// Why.
        problem: &'static str,
    },
    /// Its state cannot be read.
    #[error("its state cannot be read")]
    Machine(#[from] MachineError),
    /// A part of it is not possible there.
    #[error("it cannot be written as a VM of cloud-hypervisor 53")]
    Export(#[from] ExportError),
    /// A document cannot be written.
    #[error("its state cannot be written as a document of cloud-hypervisor 53")]
    Document(#[from] DocumentError),
    /// The configuration has no JSON form.
    #[error("its configuration cannot be written as JSON")]
    Json(#[from] serde_json::Error),
}

/// A machine that was converted.
pub struct ExportedSnapshot {
    /// The configuration.
    pub config_json: Vec<u8>,
    /// The state.
    pub state_json: Vec<u8>,
    /// The memory that belongs to it, in the order in which the state names it. Each range is in one region.
    pub ranges: Vec<GpaRange>,
}

/// What a machine is converted for.
#[derive(Clone, Copy)]
enum Goal {
    /// It is saved, and may go on here.
    Saved,
    /// It is sent.
    Sent,
}

/// Converts a paused machine.
///
/// # Errors
/// Names the part that v53 does not have, or not in this state.
fn convert(machine: &Machine, goal: Goal) -> Result<Exported, ExportedMachineError> {
    let config = machine.config();
    // Cheap, and the reason that most will see.
    check_platform(config)?;
    let layout = layout_of(config, machine.ram())?;
    let devices = machine.seen_devices();
    let guest = MigratingRam::as_mapped(Arc::clone(machine.ram()))?;
    let seen = Seen { config, layout: &layout, devices: &devices, guest: &guest };
    let state = machine.save(&Patience::within(CallLimits::default()))?;
    if let Goal::Sent = goal {
        check_queued(&state, &guest)?;
    }
    let exported = export(&seen, &state)?;
    warn_of(&exported.losses);
    Ok(exported)
}

impl ExportedSnapshot {
    /// Converts a paused machine.
    ///
    /// # Errors
    /// As [`convert`], or a document cannot be written.
    pub fn of(machine: &Machine) -> Result<Self, ExportedMachineError> {
        let Exported { vm_config, document, .. } = convert(machine, Goal::Saved)?;
        let ranges = document.memory.memory_ranges.data.iter();
        let ranges = ranges.map(|range| GpaRange { gpa: range.gpa, len_bytes: range.length });
        Ok(Self {
            config_json: serde_json::to_vec(&vm_config)?,
            state_json: document.write()?,
            ranges: ranges.collect(),
        })
    }
}

/// What has been said of a machine before its memory is sent.
pub struct SentMachine {
    config_json: Vec<u8>,
    memory: MemoryManager,
}

impl SentMachine {
    /// The message that is sent before memory, of a machine whose guest may run.
    ///
    /// # Errors
    /// Names what v53 does not have, as far as that is known by then.
    pub fn begin(machine: &Machine) -> Result<Self, ExportedMachineError> {
        let config = machine.config();
        check_platform(config).map_err(ExportedMachineError::OtherPlatform)?;
        check_sent(config)?;
        let layout = layout_of(config, machine.ram())?;
        let devices = machine.memory_devices();
        let message = export::begin(config, &layout, machine.shown(), devices.as_ref())?;
        Ok(Self { config_json: message.write()?, memory: message.memory_manager_data })
    }

    /// The message.
    pub fn config_json(&self) -> &[u8] {
        &self.config_json
    }

    /// The borders of the memory that its destination maps.
    pub fn borders(&self) -> Borders {
        let mappings = self.memory.guest_ram_mappings.iter();
        Borders::of(mappings.map(|it| GpaRange { gpa: it.gpa, len_bytes: it.size }))
    }

    /// The state of the machine, which is paused by now.
    ///
    /// # Errors
    /// Names what v53 does not have, or not in this state, or what is not as it was said to be.
    pub fn state_json(&self, machine: &Machine) -> Result<Vec<u8>, ExportedMachineError> {
        let document = convert(machine, Goal::Sent)?.document;
        check_same_memory(&self.memory, &document.memory)?;
        Ok(document.write()?)
    }
}

/// Refuses memory, or registers of memory devices, that are not as they were: v53 does not look at those of the state.
fn check_same_memory(
    sent: &MemoryManager,
    now: &MemoryManager,
) -> Result<(), ExportedMachineError> {
    let seen = |it: &MemoryManager| {
        let mappings = it.guest_ram_mappings.clone();
        (mappings, it.hotplug_slots.clone(), it.selected_slot, it.next_hotplug_slot)
    };
    if seen(sent) == seen(now) {
        return Ok(());
    }
    let what = "a VM whose guest has just plugged in memory".to_owned();
    let problem = "the registers of its memory devices have changed meanwhile; try again";
    Err(ExportedMachineError::NotSent { what, problem })
}

/// Refuses what its destination could not have as it is.
fn check_sent(config: &VmConfig) -> Result<(), ExportedMachineError> {
    let given = |net: &&crate::config::NetConfig| net.fds.is_some();
    if let Some(net) = config.net.iter().flatten().find(given) {
        let what = format!("network '{}'", net.id.as_deref().unwrap_or_default());
        let problem = "its tap is a descriptor, which cannot be given to a VM that arrives there";
        return Err(ExportedMachineError::NotSent { what, problem });
    }
    Ok(())
}

#[cfg(test)]
#[path = "exported_machine_tests.rs"]
mod tests;
