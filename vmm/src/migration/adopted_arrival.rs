// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A VM that arrives from cloud-hypervisor: recognised by its configuration, and converted once its state has come.
//!
//! Owns which of its documents comes when; what they say of the machine is converted by [`crate::adopt`]. Both come from
//! a peer. What the configuration alone shows to be impossible is refused before memory is sent.

use std::error::Error;

use cloud_hypervisor_state::{ConfigMessage, Document, DocumentError};
use hypervisor::CpuidEntry;
use memory::GuestRam;
use serde::Deserialize;
use serde::de::IgnoredAny;
use thiserror::Error;
use vm_memory::{Bytes as _, GuestAddress, GuestAddressSpace as _};

use super::memory::MigratingRam;
use crate::adopt::{
    AdoptError, Adopted, Begun, MemoryLayout, ReadGuest, adopt, begin, check_made, check_taps,
};
use crate::config::VmConfig;
use crate::machine::MachineState;

/// Why a VM of cloud-hypervisor is refused.
#[derive(Debug, Error)]
pub enum AdoptedArrivalError {
    /// A document cannot be read.
    #[error("the {what} that cloud-hypervisor sent cannot be read")]
    Document {
        /// Which one.
        what: &'static str,
        /// The cause.
        #[source]
        source: DocumentError,
    },
    /// The machine cannot be taken over.
    #[error("the VM of cloud-hypervisor cannot be taken over")]
    Adopt(#[from] AdoptError),
}

/// A VM of cloud-hypervisor of which the configuration has come.
pub struct AdoptedArrival {
    message: ConfigMessage,
    /// Where the guest has its memory.
    memory: MemoryLayout,
    /// Network devices whose taps were given as descriptors, and have to be again.
    without_tap: Vec<String>,
}

/// What the configuration alone says of a VM.
pub struct Started {
    /// The VM, until its state comes.
    pub arrival: AdoptedArrival,
    /// The configuration without the places of devices.
    pub config: VmConfig,
    /// The CPUID that the vCPUs were shown.
    pub shown: Vec<CpuidEntry>,
}

/// The one key that tells its configuration from all others.
#[derive(Deserialize)]
struct Mark {
    memory_manager_data: Option<IgnoredAny>,
}

impl AdoptedArrival {
    /// Reads a configuration and begins to convert it; `None` if it is not one of cloud-hypervisor.
    ///
    /// # Errors
    /// Names the field that cannot be read, or the part that cannot be taken over.
    pub fn read(config_json: &[u8]) -> Result<Option<Started>, AdoptedArrivalError> {
        let mark = serde_json::from_slice::<Mark>(config_json);
        if !mark.is_ok_and(|mark| mark.memory_manager_data.is_some()) {
            return Ok(None);
        }
        let document = |source| AdoptedArrivalError::Document { what: "configuration", source };
        let message = ConfigMessage::read(config_json).map_err(document)?;
        let Begun { config, without_tap, memory, shown } = begin(&message)?;
        let arrival = Self { message, memory, without_tap };
        Ok(Some(Started { arrival, config, shown }))
    }

    /// Checks that each tap has been given that has to be, in a configuration that has what the request says of this host.
    ///
    /// # Errors
    /// Names the network device.
    pub fn check_taps(&self, config: &VmConfig) -> Result<(), AdoptedArrivalError> {
        Ok(check_taps(&self.without_tap, config)?)
    }

    /// Checks that the memory of a machine is where the guest has found it.
    ///
    /// # Errors
    /// Names the address.
    pub fn check_memory(
        &self,
        config: &VmConfig,
        ram: &GuestRam,
    ) -> Result<(), AdoptedArrivalError> {
        Ok(check_made(&self.memory, config, ram)?)
    }

    /// The whole configuration, and the state of the machine. All of memory has arrived.
    ///
    /// # Errors
    /// Names the part that cannot be read or taken over.
    pub fn finish(
        self,
        state_json: &[u8],
        memory: &MigratingRam,
    ) -> Result<(VmConfig, MachineState), AdoptedArrivalError> {
        let arrived_ns = hypervisor::now_ns();
        let document = |source| AdoptedArrivalError::Document { what: "state", source };
        let state = Document::read(state_json).map_err(document)?;
        let ConfigMessage { vm_config, memory_manager_data, .. } = &self.message;
        let mut adopted = adopt(vm_config, memory_manager_data, &state, memory)?;
        adopted.count_tsc_from(arrived_ns);
        // The address bits are those of vCPU 0 now.
        check_made(&adopted.memory, &adopted.config, memory.ram())?;
        let Adopted { config, state, losses, .. } = adopted;
        warn_of(&losses);
        Ok((config, state))
    }
}

/// What is lost goes to the log.
pub fn warn_of(losses: &[String]) {
    for loss in losses {
        log::warn!("{loss}");
    }
}

impl ReadGuest for MigratingRam {
    fn read_u16(&self, gpa: u64) -> Result<u16, Box<dyn Error + Send + Sync>> {
        let mut bytes = [0; 2];
        self.ram().guest_memory().memory().read_slice(&mut bytes, GuestAddress(gpa))?;
        Ok(u16::from_le_bytes(bytes))
    }
}
