// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A machine as cloud-hypervisor v53 saves it: its documents, and the ranges of memory that are saved with them.
//!
//! Owns what of a machine is looked at; what it means there is known to [`crate::export`]. Nothing is written here.

use std::error::Error;

use cloud_hypervisor_state::DocumentError;
use memory::GuestRam;
use thiserror::Error;
use vm_memory::{Bytes as _, GuestAddress, GuestAddressSpace as _};
use vm_migration::layout::GpaRange;

use crate::adopt::ReadGuest;
use crate::export::{ExportError, Exported, Seen, check_platform, export, layout_of};
use crate::machine::{Machine, MachineError};

/// Why a machine cannot be written as one of cloud-hypervisor.
#[derive(Debug, Error)]
pub enum ExportedSnapshotError {
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

/// Guest memory, all of which is there.
struct Present<'a>(&'a GuestRam);

impl ReadGuest for Present<'_> {
    fn read_u16(&self, gpa: u64) -> Result<u16, Box<dyn Error + Send + Sync>> {
        let mut bytes = [0; 2];
        self.0.guest_memory().memory().read_slice(&mut bytes, GuestAddress(gpa))?;
        Ok(u16::from_le_bytes(bytes))
    }
}

/// Converts a paused machine.
///
/// # Errors
/// Names the part that v53 does not have, or not in this state.
pub fn convert(machine: &Machine) -> Result<Exported, ExportedSnapshotError> {
    let config = machine.config();
    // Cheap, and the reason that most will see.
    check_platform(config)?;
    let layout = layout_of(config, machine.ram())?;
    let devices = machine.seen_devices();
    let guest = Present(machine.ram());
    let seen = Seen { config, layout: &layout, devices: &devices, guest: &guest };
    let exported = export(&seen, &machine.save()?)?;
    for loss in &exported.losses {
        log::warn!("{loss}");
    }
    Ok(exported)
}

impl ExportedSnapshot {
    /// Converts a paused machine.
    ///
    /// # Errors
    /// As [`convert`], or a document cannot be written.
    pub fn of(machine: &Machine) -> Result<Self, ExportedSnapshotError> {
        let Exported { vm_config, document, .. } = convert(machine)?;
        let ranges = document.memory.memory_ranges.data.iter();
        let ranges = ranges.map(|range| GpaRange { gpa: range.gpa, len_bytes: range.length });
        Ok(Self {
            config_json: serde_json::to_vec(&vm_config)?,
            state_json: document.write()?,
            ranges: ranges.collect(),
        })
    }
}
