// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! BARs of a function that the guest has put into D3hot.
//!
//! There a function responds to configuration space alone (PCI Bus Power Management 1.2, 5.4.1), and the kernel refuses
//! accesses to its BARs through mappings: a vCPU that makes one would end the VM. Such accesses leave the guest meanwhile,
//! and read as ones.
//!
//! Owns the order: hidden before the host's function may sleep, shown once it is awake. Must never change where a BAR is,
//! nor what other functions reach of it, which needs no access by the kernel.

use std::sync::atomic::Ordering;

use super::VfioPciDevice;
use crate::config::ShadowConfig;

/// The byte of the register with the state D0.
const D0: [u8; 1] = [0];

impl VfioPciDevice {
    pub(super) fn is_asleep(&self) -> bool {
        self.asleep.load(Ordering::Acquire)
    }

    /// Whether an access that has left the guest is not to reach the function. While a write of the power state is
    /// carried out, that is not known before its end.
    pub(super) fn is_out_of_reach(&self) -> bool {
        if !self.is_asleep() {
            return false;
        }
        drop(self.config.lock());
        self.is_asleep()
    }

    /// Has the guest reach no BAR without an exit.
    pub(super) fn fall_asleep(&self) {
        let mut direct = self.direct.lock();
        self.asleep.store(true, Ordering::Release);
        for bar in direct.iter_mut() {
            for shown in bar.areas.iter_mut().filter_map(|area| area.shown.as_mut()) {
                if let Some(Err(error)) = shown.slot.take().map(|slot| self.slots.unmap(slot)) {
                    self.complain("hide", bar.index, &error);
                }
            }
        }
    }

    /// Shows what was hidden if the function is awake, whatever has woken it: the register, or a reset. What cannot be
    /// shown is trapped.
    pub(super) fn wake_up_if_awake(&self, config: &ShadowConfig) {
        if !self.is_asleep() || config.is_asleep(|at, data| self.host.read_config(at, data)) {
            return;
        }
        let mut direct = self.direct.lock();
        self.asleep.store(false, Ordering::Release);
        for bar in direct.iter_mut() {
            for area in &mut bar.areas {
                let Some(shown) = area.shown.as_mut().filter(|shown| shown.slot.is_none()) else {
                    continue;
                };
                match self.slots.map(shown.gpa, &area.memory) {
                    Ok(slot) => shown.slot = Some(slot),
                    Err(error) => self.complain("show", bar.index, &error),
                }
            }
        }
    }

    /// Wakes the host's function: when the kernel does so later it restores a command register with bus mastering.
    pub(super) fn wake_host(&self, config: &ShadowConfig) {
        if let Some(at) = config.power().filter(|_| self.is_asleep()) {
            self.host.write_config(at, &D0);
        }
    }
}
