// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Wiring of the TPM.
//!
//! Owns where its registers are, what its loss leads to (an event), and under which name its state is saved: among the
//! legacy devices, although it is saved and restored by itself, as both can fail.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use arch::layout;
use devices::tpm::{CRB_CONTROL_OFFSET, CRB_LEN_BYTES, Tpm, TpmError};
use devices::virtio::DeviceSnapshot;

use super::error::MachineError;
use super::passthrough::Opening;
use super::pausing::CancelToken;
use super::space::AddressSpace;
use crate::config::VmConfig;
use crate::events;

/// How long the emulator may take to its first answer, where a guest boots: it may still execute a command of the guest
/// before the reboot.
const BOOT_WITHIN: Duration = Duration::from_secs(30);

/// The same where a VM arrives: an emulator that does not answer has another VM.
const ARRIVAL_WITHIN: Duration = Duration::from_secs(5);

/// How long a running command holds up the stop of a migration. Creating a key of 2048 bits takes less.
const IDLE_WITHIN: Duration = Duration::from_secs(10);

/// Its name among the legacy devices of a saved state.
const NAME: &str = "tpm";

// The tables of one crate describe the registers of the other.
const _: () = assert!(CRB_LEN_BYTES == layout::TPM_BYTES);
const _: () = assert!(CRB_CONTROL_OFFSET == layout::TPM_CONTROL_OFFSET);

/// The TPM of a machine, if it has one.
pub(super) struct TpmDevice(Option<Arc<Tpm>>);

impl TpmDevice {
    /// Connects to the emulator, and places the registers.
    ///
    /// # Errors
    /// Names the socket, or the address that is taken.
    pub(super) fn wire(
        config: &VmConfig,
        space: &AddressSpace,
        opening: Opening,
        cancel: &CancelToken,
    ) -> Result<Self, MachineError> {
        let Some(tpm) = &config.tpm else { return Ok(Self(None)) };
        let on_lost = Box::new(|why: &str| {
            log::error!("the TPM is lost, and its commands fail from now on: {why}");
            events::emit("vm", "tpm-lost", &[("error", why)]);
        });
        let within = match opening {
            Opening::Meanwhile => BOOT_WITHIN,
            Opening::Before => ARRIVAL_WITHIN,
        };
        let is_cancelled = || cancel.is_cancelled();
        let tpm = Tpm::connect(&tpm.socket, layout::TPM_GPA, on_lost, within, &is_cancelled)?;
        let device = Arc::new(tpm);
        space.insert_memory(layout::TPM_GPA, CRB_LEN_BYTES, NAME, device.clone())?;
        Ok(Self(Some(device)))
    }

    /// Starts it for a guest that boots.
    ///
    /// # Errors
    /// The emulator refuses.
    pub(super) fn power_on(&self) -> Result<(), TpmError> {
        self.0.as_ref().map_or(Ok(()), |tpm| tpm.power_on())
    }

    /// Waits, while the guest runs, until it executes no command, so that the guest need not stand still for it.
    pub(super) fn prepare_stop(&self, is_cancelled: &dyn Fn() -> bool) {
        if let Some(tpm) = &self.0 {
            tpm.wait_until_idle(IDLE_WITHIN, is_cancelled);
        }
    }

    /// Adds its state to those of legacy devices.
    ///
    /// # Errors
    /// It executes a command for too long, or the emulator does not answer.
    pub(super) fn save_to(
        &self,
        states: &mut BTreeMap<String, DeviceSnapshot>,
    ) -> Result<(), TpmError> {
        if let Some(tpm) = &self.0 {
            states.insert(NAME.to_owned(), tpm.save()?);
        }
        Ok(())
    }

    /// Takes its state out of those of legacy devices, and restores it.
    ///
    /// # Errors
    /// There is one without the other, or the emulator refuses the state.
    pub(super) fn restore_from(
        &self,
        states: &mut BTreeMap<String, DeviceSnapshot>,
    ) -> Result<(), MachineError> {
        match (&self.0, states.remove(NAME)) {
            (Some(tpm), Some(state)) => Ok(tpm.restore(&state)?),
            (None, None) => Ok(()),
            (Some(_), None) => Err(MachineError::StateMismatch("it has no TPM".to_owned())),
            (None, Some(_)) => Err(MachineError::StateMismatch("it has a TPM".to_owned())),
        }
    }
}
