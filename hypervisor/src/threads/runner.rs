// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The loop of a vCPU thread: tasks, and entries into the guest.
//!
//! Owns what the thread does between two checks for requests. Must never wait for another vCPU.

use std::sync::{Arc, OnceLock};
use std::time::Instant;

use super::flag::before_entry;
use super::{Next, Phase, Shared, Target};
use crate::exits::{ExitHandler, RunOutcome, StopReason, run_once};
use crate::vcpu::Vcpu;

/// The loop of a vCPU thread.
pub(super) struct Runner<'a> {
    pub(super) shared: &'a Shared,
    pub(super) vcpu: Vcpu,
    pub(super) handler: Arc<dyn ExitHandler>,
    pub(super) first_run: Arc<OnceLock<Instant>>,
}

impl Runner<'_> {
    /// Follows the requested state until the thread is to end.
    pub(super) fn work(&mut self) {
        loop {
            match self.shared.next() {
                Next::Exit => return,
                Next::Job(job) => job(&mut self.vcpu),
                Next::Run => {
                    self.first_run.get_or_init(Instant::now);
                    match self.run() {
                        Ok(()) => self.park(),
                        Err(reason) => self.end(reason),
                    }
                }
            }
        }
    }

    /// Runs the guest until the vCPU is to leave it.
    fn run(&mut self) -> Result<(), StopReason> {
        let Shared { run_page, leave, hold, tasks_pending, .. } = self.shared;
        loop {
            before_entry(&**run_page, [leave, hold, tasks_pending]);
            match run_once(&mut self.vcpu, &*self.handler) {
                RunOutcome::Interrupted if leave.is_set() => return Ok(()),
                RunOutcome::Interrupted if hold.is_set() => self.shared.stand_by(),
                RunOutcome::Interrupted if tasks_pending.is_set() => self.run_pending_tasks(),
                // Interrupted without a request, by a late signal.
                RunOutcome::Handled | RunOutcome::Interrupted => {}
                RunOutcome::Leave => self.leave_by_itself(),
                RunOutcome::Stopped(reason) => return Err(reason),
            }
        }
    }

    /// Parks as if this vCPU had been paused.
    fn leave_by_itself(&self) {
        let mut control = self.shared.lock();
        if control.target == Target::Run {
            control.target = Target::Park;
        }
        self.shared.leave.set(true);
    }

    fn park(&self) {
        self.vcpu.notify_clock_paused();
        self.shared.set_phase(Phase::Parked);
    }

    fn end(&self, reason: StopReason) {
        // Before the report, so that its receiver can pause the VM.
        self.shared.set_phase(Phase::Stopped);
        self.handler.stopped(self.shared.index, reason);
    }
}
