// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Saved form of an MSI-X table.
//!
//! Whether MSI-X is on, and the function mask, are in the configuration space's state alone.

use serde::{Deserialize, Serialize};

use hypervisor::irq::MsiMessage;

use super::{Entry, Msix, MsixError};

/// Version of [`MsixState`] that is written, and the newest that is read.
const VERSION: u32 = 1;

/// State of a table; plain data, untrusted. All entry values are ones that a guest could have written.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MsixState {
    /// Version of this structure.
    pub version: u32,
    /// The entries.
    pub entries: Vec<MsixEntryState>,
}

/// One saved entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MsixEntryState {
    /// Message address.
    pub address: u64,
    /// Message data.
    pub data: u32,
    /// The entry's own mask bit.
    pub masked: bool,
    /// Whether an interrupt is pending.
    pub pending: bool,
}

impl Msix {
    /// Saves the table, without effects that the guest could notice.
    pub fn save(&self) -> MsixState {
        let mut table = self.table.lock();
        let entries = (0..self.vectors.len())
            .map(|vector| {
                let pending = self.collect_pending(&mut table, vector);
                let entry = table.entries.get(vector).copied().unwrap_or(Entry::RESET);
                MsixEntryState {
                    address: entry.message.address,
                    data: entry.message.data,
                    masked: entry.masked,
                    pending,
                }
            })
            .collect();
        MsixState { version: VERSION, entries }
    }

    /// Validates a state.
    pub fn check(&self, state: &MsixState) -> Result<(), MsixError> {
        if state.version != VERSION {
            return Err(MsixError::StateVersion { found: state.version, newest: VERSION });
        }
        let (found, expected) = (state.entries.len(), self.vectors.len());
        if found != expected {
            return Err(MsixError::StateLength { found, expected });
        }
        Ok(())
    }

    /// Restores a table, with the message control register of the same state.
    pub fn restore(&self, state: &MsixState, control: u16) -> Result<(), MsixError> {
        self.check(state)?;
        let mut table = self.table.lock();
        table.enabled = control & super::CONTROL_ENABLE != 0;
        table.function_masked = control & super::CONTROL_FUNCTION_MASK != 0;
        for (entry, saved) in table.entries.iter_mut().zip(&state.entries) {
            entry.message = MsiMessage { address: saved.address, data: saved.data };
            entry.masked = saved.masked;
            entry.pending = saved.pending;
        }
        for vector in 0..self.vectors_count() {
            self.apply(&mut table, usize::from(vector))
                .map_err(|source| MsixError::Vector { vector, source })?;
        }
        Ok(())
    }
}
