// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Guest RAM in which a vCPU's access to a missing page fails, and its handler.
//!
//! Owns the place where a machine asks for such a page, and the registers that its vCPUs get only
//! when no page is missing. Must never know why pages are missing or where they come from.

use std::sync::Arc;

use hypervisor::{FaultAction, FaultedAccess, FaultedAt, MsrValue};

use super::{Machine, MachineError};

/// RAM whose missing pages vCPUs bring themselves. Called on the vCPUs' threads.
pub trait MissingPages: Send + Sync {
    /// Where the calling vCPU was refused, when KVM does not say.
    fn faulted_at(&self) -> Option<FaultedAt>;

    /// The vCPU with this number was refused; returns when its page is here, or when its thread was
    /// kicked.
    fn resolve(&self, vcpu: u32, access: FaultedAccess) -> FaultAction;

    /// KVM could not read RAM for an instruction that it emulates, and took it for a device's; false
    /// if it is one's. Waits for the page.
    fn read(&self, gpa: u64, data: &mut [u8]) -> bool;

    /// The same for a write.
    fn write(&self, gpa: u64, data: &[u8]) -> bool;
}

impl Machine {
    /// One more than the highest number of a vCPU.
    pub fn vcpu_numbers(&self) -> usize {
        let numbers = (0..self.config.cpus.boot_vcpus)
            .map(|index| self.parts.topology.apic_id(index) as usize + 1);
        numbers.max().unwrap_or(0)
    }

    /// Registers, by the vCPU's place among the vCPUs, that were left out of their state.
    pub fn hold_msrs(&mut self, registers: Vec<(usize, MsrValue)>) {
        self.held_msrs = registers;
    }

    /// All memory is here: vCPUs get what was held back, unless the guest has written it meanwhile.
    /// They stand still for a moment.
    ///
    /// # Errors
    /// The vCPUs cannot be stopped, or do not take it.
    pub fn restore_held_msrs(&mut self) -> Result<(), MachineError> {
        let held = std::mem::take(&mut self.held_msrs);
        if held.is_empty() {
            return Ok(());
        }
        self.vcpus.pause_all()?;
        let given = held.into_iter().try_for_each(|(index, msr)| {
            let number = self.parts.topology.apic_id(u32::try_from(index).unwrap_or(u32::MAX));
            Ok(self.vcpus.on_one(number, move |vcpu| vcpu.restore_msr(msr))??)
        });
        if !self.paused {
            self.vcpus.resume_all();
        }
        given
    }

    /// Memory is still to come, and vCPUs may wait for it however long that takes: a guest that does not set its
    /// watchdog back is not stuck.
    pub(super) fn stop_watchdog(&self) {
        if let Some(watchdog) = self.parts.devices.watchdog() {
            watchdog.stop();
        }
    }

    /// All memory is here: the guest has the whole time from now on.
    pub fn start_watchdog(&self) {
        if let Some(watchdog) = self.parts.devices.watchdog() {
            watchdog.start();
        }
    }

    /// Lets vCPUs bring pages that they are refused. Once, before the guest runs.
    pub fn set_missing_page_handler(&self, pages: Arc<dyn MissingPages>) {
        self.parts.space.set_missing_pages(pages);
    }
}
