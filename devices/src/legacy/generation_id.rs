// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The generation ID of the virtual machine: 16 bytes of guest memory that differ in every restored copy of
//! a guest, so that random numbers and what is derived from them are not used twice.
//!
//! Owns whether the guest has one and where. Guests that booted without it never get one: nothing reserved
//! its place in their memory. Never writes guest memory, and never decides when to renew the ID.

use std::sync::atomic::{AtomicBool, Ordering};

use serde::{Deserialize, Serialize};

use crate::Snapshot;
use crate::state::StateFormat;
use crate::virtio::{DeviceSnapshot, StateError};

/// Length of the ID in bytes.
pub const GENERATION_ID_LEN_BYTES: usize = 16;

/// The generation ID of one machine.
pub struct GenerationId {
    gpa: u64,
    is_present: AtomicBool,
}

impl GenerationId {
    /// An ID at `gpa`, not present for the guest yet.
    pub fn new(gpa: u64) -> Self {
        Self { gpa, is_present: AtomicBool::new(false) }
    }

    /// Address of the ID, if the guest has one.
    pub fn gpa(&self) -> Option<u64> {
        self.is_present.load(Ordering::Acquire).then_some(self.gpa)
    }

    /// Sets whether the guest has an ID.
    pub fn set_present(&self, is_present: bool) {
        self.is_present.store(is_present, Ordering::Release);
    }
}

const FORMAT: StateFormat = StateFormat { kind: "vmgenid", newest: 1 };

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct GenerationIdState {
    gpa: u64,
}

impl Snapshot for GenerationId {
    /// Only relevant if the guest has an ID.
    fn save(&self) -> DeviceSnapshot {
        FORMAT.encode(&GenerationIdState { gpa: self.gpa })
    }

    /// The guest has an ID.
    fn restore(&self, state: &DeviceSnapshot) -> Result<(), StateError> {
        let GenerationIdState { gpa } = FORMAT.decode(state)?;
        if gpa != self.gpa {
            return Err(FORMAT.invalid(format!("it is at {gpa:#x}, here at {:#x}", self.gpa)));
        }
        self.set_present(true);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

    use super::*;

    #[test]
    fn a_guest_that_has_one_keeps_it_where_it_is() {
        let (there, here) = (GenerationId::new(0xe_f000), GenerationId::new(0xe_f000));
        assert_eq!(there.gpa(), None);
        there.set_present(true);
        here.restore(&there.save()).unwrap();
        assert_eq!(here.gpa(), Some(0xe_f000));
        let elsewhere = GenerationId::new(0xd_f000);
        assert!(matches!(elsewhere.restore(&there.save()), Err(StateError::Invalid { .. })));
        assert_eq!(elsewhere.gpa(), None);
    }
}
