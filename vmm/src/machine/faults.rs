// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Guest RAM in which a vCPU's access to a missing page fails, and its handler.
//!
//! Owns the place where a machine asks for such a page, and the registers that its vCPUs get only
//! when no page is missing. Must never know why pages are missing or where they come from.

use std::sync::Arc;

use hypervisor::{FaultAction, FaultedAccess, FaultedAt, MsrValue};

use super::{Machine, MachineError};

/// Guest RAM whose missing pages are fetched by the faulting vCPUs. Called on the vCPU threads, but for
/// [`kicked`](Self::kicked).
pub trait MissingPages: Send + Sync {
    /// Where the calling vCPU's access was refused, when KVM does not report it.
    fn faulted_at(&self) -> Option<FaultedAt>;

    /// Resolves the refused access of the vCPU with this number; returns when the page is resident, or when
    /// the thread was kicked.
    fn resolve(&self, vcpu: u32, access: FaultedAccess) -> FaultAction;

    /// The vCPU with this number is kicked: its thread is to return from [`resolve`](Self::resolve), or from the
    /// next call of it at once. Called on other threads.
    fn kicked(&self, vcpu: u32);

    /// Reads RAM that KVM could not read for an instruction that it emulates, and so reported as MMIO.
    /// Waits for the page; false if the address belongs to a device.
    fn read(&self, gpa: u64, data: &mut [u8]) -> bool;

    /// Like [`Self::read`], for a write.
    fn write(&self, gpa: u64, data: &[u8]) -> bool;
}

impl Machine {
    /// The numbers of the vCPUs.
    pub fn vcpu_numbers(&self) -> impl Iterator<Item = usize> {
        (0..self.config.cpus.boot_vcpus).map(|index| self.parts.topology.apic_id(index) as usize)
    }

    /// Keeps MSRs that were left out of the vCPU state, by the index of the vCPU, for
    /// [`Self::restore_held_msrs`].
    pub fn hold_msrs(&mut self, registers: Vec<(usize, MsrValue)>) {
        self.held_msrs = registers;
    }

    /// Sets the held MSRs once all memory is resident, unless the guest has written them in the meantime.
    /// Pauses the vCPUs for a moment.
    ///
    /// # Errors
    /// The vCPUs cannot be stopped, or refuse the values.
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

    /// Stops the watchdog while memory is missing: vCPUs may wait for pages without a time limit, so a
    /// guest that does not reset its watchdog is not stuck.
    pub(super) fn stop_watchdog(&self) {
        if let Some(watchdog) = self.parts.devices.watchdog() {
            watchdog.stop();
        }
    }

    /// Starts the watchdog's full period once all memory is resident.
    pub fn start_watchdog(&self) {
        if let Some(watchdog) = self.parts.devices.watchdog() {
            watchdog.start();
        }
    }

    /// Sets the handler that fetches missing pages for faulting vCPUs. Called once, before the guest runs.
    pub fn set_missing_page_handler(&self, pages: Arc<dyn MissingPages>) {
        self.parts.space.set_missing_pages(pages);
    }
}
