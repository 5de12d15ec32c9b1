// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! BARs of a function that the guest has put into D3hot.
//!
//! There a function responds to configuration space alone (PCI Bus Power Management 1.2, 5.4.1), and the kernel refuses
//! accesses to its BARs through mappings: a vCPU that makes one would end the VM. Such accesses leave the guest meanwhile,
//! and read as ones.
//!
//! Owns the order: hidden before the host's function sleeps, shown once it is awake. Must never change where a BAR is.

use std::sync::atomic::Ordering;

use super::VfioPciDevice;
use crate::config::ShadowConfig;

impl VfioPciDevice {
    pub(super) fn is_asleep(&self) -> bool {
        self.asleep.load(Ordering::Acquire)
    }

    /// Has the guest reach no BAR without an exit.
    pub(super) fn fall_asleep(&self) {
        let mut direct = self.direct.lock();
        self.asleep.store(true, Ordering::Release);
        direct.iter_mut().for_each(|bar| self.hide(bar));
    }

    /// Shows what was hidden if the function is awake, whatever has woken it: the register, or a reset.
    pub(super) fn wake_up_if_awake(&self, config: &ShadowConfig) {
        if !self.is_asleep() || config.is_asleep(|at, data| self.host.read_config(at, data)) {
            return;
        }
        let mut direct = self.direct.lock();
        self.asleep.store(false, Ordering::Release);
        for bar in direct.iter_mut() {
            // `lose` sets its mark before it takes the lock.
            if let Some(gpa) = bar.gpa.filter(|_| !self.is_lost()) {
                self.show(bar, gpa);
            }
        }
    }
}
