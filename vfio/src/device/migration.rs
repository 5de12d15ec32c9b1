// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Migration operations of a passed-through function: stop, save, restore, resume.
//!
//! Owns the order in which the hardware's state and the state that is kept here are saved and restored. No state
//! is loaded before all guest memory is mapped, since a function may use memory from then on. A function that
//! fails meanwhile is reset, and is gone for the guest.

use std::sync::Arc;

use memory::GuestRam;

use super::{DmaLog, VfioPciDevice};
use crate::capabilities::{self, word};
use crate::config::ShadowConfig;
use crate::error::VfioError;
use crate::migration::{
    DeviceState, Hardware, HardwareState, MigrationError, MigrationPort, MigrationSupport,
    NotMigratable, VfioState,
};
use pci::MsixError;
use pci::register;
use pci::{PciDevice as _, PciStateError};

/// Offsets of Device Control and Device Control 2 in the PCI Express capability.
const EXPRESS_CONTROLS: [u16; 2] = [0x08, 0x28];
/// Capability version, in its second register; determines its length.
const EXPRESS_VERSION_MASK: u16 = 0xf;
/// Bit of Device Control that resets the function.
const INITIATE_RESET: u16 = 1 << 15;

impl VfioPciDevice {
    /// The migration support of hardware and host driver.
    ///
    /// # Errors
    /// Why the function cannot be migrated.
    pub fn movable(&self) -> Result<MigrationSupport, &NotMigratable> {
        if self.is_lost() { Err(&NotMigratable::Lost) } else { self.migration.support() }
    }

    /// Enters the p2p-quiescent state: no new DMA to other functions.
    ///
    /// # Errors
    /// The kernel refuses or the function has failed, and is lost to the guest.
    pub fn quiesce(&self) -> Result<(), MigrationError> {
        self.unless_lost(|this| this.migration.quiesce())
    }

    /// Stops the function, if that is supported.
    ///
    /// # Errors
    /// As [`Self::quiesce`].
    pub fn stop(&self) -> Result<(), MigrationError> {
        self.unless_lost(|this| this.migration.stop())
    }

    /// Leaves the stopped state for the p2p-quiescent one.
    ///
    /// # Errors
    /// As [`Self::quiesce`].
    pub fn wake(&self) -> Result<(), MigrationError> {
        self.unless_lost(|this| this.migration.wake())
    }

    /// Sets the function running.
    ///
    /// # Errors
    /// As [`Self::quiesce`].
    pub fn run(&self) -> Result<(), MigrationError> {
        self.unless_lost(|this| this.migration.run())
    }

    /// Whether the function has stopped, so that its DMA writes are complete.
    pub fn is_stopped(&self) -> bool {
        self.migration.is_stopped()
    }

    /// Whether it is known to be in this state. Does not wait for a step of another thread.
    pub fn is_known_in(&self, state: DeviceState) -> bool {
        self.migration.is_known_in(state)
    }

    /// Estimated length in bytes of the hardware state.
    pub fn estimated_state_len_bytes(&self) -> u64 {
        self.migration.estimated_len_bytes()
    }

    /// Starts to log DMA writes to guest memory.
    pub fn watch_dma(self: &Arc<Self>, ram: &GuestRam) -> DmaLog {
        DmaLog::start(Arc::clone(self), ram)
    }

    pub(super) fn port(&self) -> &dyn MigrationPort {
        self.host.as_ref()
    }

    fn unless_lost(
        &self,
        step: impl FnOnce(&Self) -> Result<(), MigrationError>,
    ) -> Result<(), MigrationError> {
        if self.is_lost() {
            return Ok(());
        }
        self.stepping(|| {
            // Lost meanwhile, by a thread that may not have seen this step.
            if self.is_lost() {
                return Ok(());
            }
            step(self).inspect_err(|error| self.mark_lost_if_failed(error))
        })
    }

    pub(super) fn mark_lost_if_failed(&self, error: &MigrationError) {
        if matches!(error, MigrationError::Failed { .. }) {
            self.disarm();
        }
    }

    pub(crate) fn state_error(&self, error: MigrationError) -> PciStateError {
        PciStateError::Device { id: self.id.clone(), source: Box::new(error) }
    }

    /// Saves the state of the function, which must be stopped.
    pub(crate) fn saved(&self) -> Result<VfioState, MigrationError> {
        let data = self.stepping(|| {
            self.check_movable()?;
            self.migration.save().inspect_err(|error| self.mark_lost_if_failed(error))
        })?;
        Ok(self.saved_with(HardwareState::Here(data)))
    }

    /// The same, if the hardware's part was read already and travels beside it.
    pub(super) fn saved_beside(&self, len_bytes: u64) -> Result<VfioState, MigrationError> {
        self.check_movable()?;
        self.migration.check_stopped()?;
        Ok(self.saved_with(HardwareState::Apart { len_bytes }))
    }

    pub(super) fn check_movable(&self) -> Result<(), MigrationError> {
        self.movable().map(|_| ()).map_err(|reason| reason.clone().into())
    }

    /// The properties of the hardware that its state belongs to.
    pub fn hardware(&self) -> Hardware {
        let raw = self.raw_config();
        Hardware::of(&raw, &self.config.lock().bars())
    }

    fn saved_with(&self, state: HardwareState) -> VfioState {
        let raw = self.raw_config();
        let mut command = [0; 2];
        self.read_config(register::COMMAND, &mut command);
        let config = self.config.lock();
        VfioState {
            hardware: Hardware::of(&raw, &config.bars()),
            registers: config.save(),
            command: u16::from_le_bytes(command),
            express_controls: express_controls(&raw)
                .map(|places| places.map(|at| word(&raw, at).unwrap_or(0))),
            msix: self.interrupts.msix().map(pci::Msix::save),
            msi_pending: self.interrupts.msi().map_or(0, crate::msi::Msi::pending),
            state,
        }
    }

    /// Restores a state, once all guest memory is mapped. The function must be stopped, or have taken the hardware's part.
    pub(crate) fn put_in(&self, state: &VfioState) -> Result<(), MigrationError> {
        self.stepping(|| self.put_in_here(state))
    }

    fn put_in_here(&self, state: &VfioState) -> Result<(), MigrationError> {
        self.check_movable()?;
        let raw = self.raw_config();
        let config = self.config.lock();
        state.hardware.check(&Hardware::of(&raw, &config.bars()))?;
        let registers = config.restored(&state.registers)?;
        drop(config);
        match (self.interrupts.msix(), &state.msix) {
            (Some(msix), Some(saved)) => msix.check(saved)?,
            (None, None) => {}
            (here, there) => {
                let (found, expected) = (usize::from(there.is_some()), usize::from(here.is_some()));
                return Err(MsixError::StateLength { found, expected }.into());
            }
        }
        // The guest does not run, so no vCPU waits for these registers.
        self.gate.wait()?;
        // From the beginning: a reset would lose what it takes.
        self.host.set_in_use(true);
        // Not locked in the calls before and after, which may hang: the thread that takes the function from the guest then needs it.
        let complete = || self.complete(&mut self.config.lock(), registers, &raw, state);
        let put = self.migration.load(&state.state, complete);
        put.inspect_err(|error| self.mark_lost_if_failed(error))
    }

    /// Restores the emulated part, after the hardware has its state but before it has completed the
    /// transition.
    fn complete(
        &self,
        config: &mut ShadowConfig,
        registers: pci::ConfigSpace,
        raw: &[u8],
        state: &VfioState,
    ) -> Result<(), MigrationError> {
        // Under the lock, so that nothing is written to one that is taken from the guest meanwhile.
        if self.is_lost() {
            return Err(NotMigratable::Lost.into());
        }
        config.take(registers);
        for (at, bytes) in config.write(register::COMMAND, &state.command.to_le_bytes()) {
            self.host.write_config(at, &bytes);
        }
        if let (Some(places), Some(controls)) = (express_controls(raw), state.express_controls) {
            let [first, second] = controls;
            for (at, control) in places.into_iter().zip([first & !INITIATE_RESET, second]) {
                self.host.write_config(at, &control.to_le_bytes());
            }
        }
        if let (Some(msix), Some(saved)) = (self.interrupts.msix(), &state.msix) {
            msix.restore(saved, config.msix_control().unwrap_or(0))?;
        }
        // The source can still resume the guest, so a device without working interrupts is an error here
        // rather than a log message.
        let cannot = |source| MigrationError::Interrupts(Box::new(source));
        if let Some(msi) = self.interrupts.msi() {
            msi.set_pending(state.msi_pending).map_err(|error| cannot(VfioError::Msi(error)))?;
        }
        let (msix_control, msi) = (config.msix_control(), config.msi());
        self.interrupts.connect_as(msix_control, msi.as_ref()).map_err(cannot)
    }

    fn raw_config(&self) -> Vec<u8> {
        let mut raw = vec![0xff; self.host.config_len_bytes().into()];
        self.host.read_config(0, &mut raw);
        raw
    }
}

/// Offsets of the PCI Express control registers, if the capability has both.
fn express_controls(raw: &[u8]) -> Option<[u16; 2]> {
    let offset = capabilities::find(raw, capabilities::EXPRESS)?;
    let version = word(raw, offset.checked_add(2)?)? & EXPRESS_VERSION_MASK;
    let places = EXPRESS_CONTROLS.map(|register| offset.saturating_add(register));
    // Version 1 of the capability ends before the second.
    (version >= 2 && places.iter().all(|at| word(raw, *at).is_some())).then_some(places)
}
