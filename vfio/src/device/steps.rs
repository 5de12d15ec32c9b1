// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The threads that are in a step of a function's migration interface, and to which of them it is left.
//!
//! A call into the kernel may never return, with the driver's state locked, and a reset waits for that lock. So while one
//! thread is in a step no other resets the function: it is left to the thread of the step, the end of which resets it.
//! Owns that decision. Nothing here waits for a step, and no call is made with the list of threads locked.

use std::sync::atomic::Ordering;
use std::thread::{self, ThreadId};

use parking_lot::Mutex;
use pci::register;

use super::VfioPciDevice;
use crate::config::ShadowConfig;
use crate::migration::{Call, MigrationError};

/// The threads that are in a step: each from before its call until it has dealt with the result, also by a reset.
#[derive(Default)]
pub(super) struct Steps(Mutex<Vec<ThreadId>>);

impl Steps {
    /// Calls this while the threads remain the same, with whether another one than this is in a step.
    fn with_others<T>(&self, then: impl FnOnce(bool) -> T) -> T {
        let threads = self.0.lock();
        let own = thread::current().id();
        then(threads.iter().any(|thread| *thread != own))
    }
}

/// A thread in a step, until dropped.
struct InStep<'a>(&'a VfioPciDevice);

impl<'a> InStep<'a> {
    fn begin(device: &'a VfioPciDevice) -> Self {
        device.steps.0.lock().push(thread::current().id());
        Self(device)
    }
}

impl Drop for InStep<'_> {
    fn drop(&mut self) {
        let Self(device) = self;
        let mut threads = device.steps.0.lock();
        let own = thread::current().id();
        if let Some(at) = threads.iter().position(|thread| *thread == own) {
            threads.swap_remove(at);
        }
        // One that leaves it does so with the list locked, and so has seen a thread there that comes here later.
        let is_last_of_left = threads.is_empty() && device.migration.is_left();
        drop(threads);
        if is_last_of_left {
            device.reset_late();
        }
    }
}

impl VfioPciDevice {
    /// Makes a step of the migration interface on this thread. Resets the function at its end if it was left to it.
    pub(super) fn stepping<T>(
        &self,
        step: impl FnOnce() -> Result<T, MigrationError>,
    ) -> Result<T, MigrationError> {
        let in_step = InStep::begin(self);
        let made = step();
        drop(in_step);
        match made {
            Ok(_) if self.is_left() => Err(MigrationError::Left),
            made => made,
        }
    }

    /// Leaves the function to the thread whose call into the kernel does not return: it is lost to the guest, and neither its
    /// guest nor the end of its machine waits for it. What it can reach of memory it reaches until it has been reset, which
    /// that thread does when the call returns. Returns the call. Does not wait for it.
    pub fn leave(&self) -> String {
        let call = self.call();
        let has_thread = self.steps.with_others(|has_thread| {
            self.migration.leave();
            has_thread
        });
        if has_thread {
            self.note_left();
        }
        self.lose();
        if !has_thread {
            // It has returned in this moment, and its thread may have ended.
            self.reset_late();
        }
        call.map_or_else(|| "the end of its state".to_owned(), |call| call.to_string())
    }

    /// Disables bus mastering of a function that was [left](Self::leave) to a change of its state, and may have been working.
    /// The host does this beside that call. Returns whether the function reaches no memory any more: it says so itself, or
    /// answers nothing, as one that is not on the bus. Waits for no lock of this function: no write of the guest
    /// follows the mark that it is lost.
    pub fn cut_off(&self) -> bool {
        self.host.write_config(register::COMMAND, &ShadowConfig::first_command());
        let mut command = [0xff; 2];
        self.host.read_config(register::COMMAND, &mut command);
        command == [0xff; 2] || !ShadowConfig::asks_for_bus_master(register::COMMAND, &command)
    }

    /// Whether another thread is to reset the function: it is left to one, or one is in a step, to which it is left here.
    pub(super) fn is_left_to_a_step(&self) -> bool {
        let leaves = self.steps.with_others(|has_thread| {
            let leaves = has_thread && !self.is_left();
            if leaves {
                self.migration.leave();
            }
            leaves
        });
        if leaves {
            self.note_left();
        }
        self.is_left()
    }

    /// The current call into the kernel that waits for the hardware.
    pub fn call(&self) -> Option<Call> {
        self.migration.call()
    }

    /// Whether it was left to a call that did not return.
    pub fn is_left(&self) -> bool {
        self.migration.is_left()
    }

    /// Whether it was left to a call that has not returned, or whose thread has not reset it yet: it may reach memory.
    pub fn is_hung(&self) -> bool {
        self.is_left() && !self.is_disarmed()
    }

    /// Tells the host that it is left, unless the thread of the step has reset it meanwhile.
    fn note_left(&self) {
        self.host.note_left(true);
        if self.is_disarmed() {
            self.host.note_left(false);
        }
    }

    /// Resets the function after its call has returned, once.
    fn reset_late(&self) {
        // One that has failed in the call was reset by the thread of that call.
        if !self.late_reset.swap(true, Ordering::AcqRel) && !self.is_disarmed() {
            self.lose();
            self.end_dma();
        }
        if self.is_disarmed() {
            self.host.note_left(false);
        }
    }
}
