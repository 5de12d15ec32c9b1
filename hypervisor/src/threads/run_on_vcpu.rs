// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tasks that run on vCPU threads between two entries into the guest.
//!
//! Owns how such a task reaches its thread; the kick protocol is that of `threads`. Must
//! never wait for a vCPU.

use std::io;
use std::ops::Range;
use std::sync::mpsc;
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;

use super::flag::get_out;
use super::runner::Runner;
use super::{Job, Phase, Shared, Target, Thread, ThreadsError, VcpuThreads, refuse_vcpu_thread};
use crate::stage2::{RunOnVcpu, Stage2Fill, Stage2Filled, VcpuTask};
use crate::vcpu::Vcpu;

impl Shared {
    /// Queues a job for the vCPU thread, whether the guest runs or not; false if the thread is ending.
    fn begin_job(&self, job: Job) -> bool {
        let mut control = self.lock();
        if control.phase == Phase::Exited || control.target == Target::Exit {
            return false;
        }
        control.jobs.push_back(job);
        if control.phase == Phase::Running {
            get_out(&self.tasks_pending, &*self.run_page, || self.signal());
        }
        drop(control);
        self.changed.notify_all();
        true
    }
}

impl RunOnVcpu for Shared {
    fn run_on_vcpu(&self, task: VcpuTask) -> bool {
        self.begin_job(Box::new(move |vcpu: &mut Vcpu| task(vcpu)))
    }
}

impl VcpuThreads {
    /// Starts to fill stage-2 on the vCPU threads, whether the guest runs or not. `runs` returns the guest
    /// physical ranges with memory; it and `done` are called on a separate thread.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub fn fill_stage2(
        &self,
        runs: impl FnOnce() -> Vec<Range<u64>> + Send + 'static,
        done: impl FnOnce(Stage2Filled) + Send + 'static,
    ) -> io::Result<Stage2Fill> {
        let vcpu = |thread: &Thread| -> Arc<dyn RunOnVcpu> { thread.shared.clone() };
        Stage2Fill::start(self.threads.iter().map(vcpu).collect(), runs, done)
    }

    /// Sends each vCPU a non-maskable interrupt, like the NMI button of a server. A paused vCPU takes it
    /// when resumed. Does not wait: the interrupt becomes pending once the vCPU thread has left the guest.
    pub fn send_nmi(&self) {
        for Thread { shared } in &self.threads {
            shared.begin_job(Box::new(|vcpu| {
                if let Err(error) = vcpu.send_nmi() {
                    log::warn!("vcpu{} got no non-maskable interrupt: {error}", vcpu.index());
                }
            }));
        }
    }
}

impl VcpuThreads {
    /// Runs `f` for vCPU `index` whether it runs or not: a running one leaves the guest for it. Waits for the answer
    /// as long as `wait_on` says, which is asked every 100 ms.
    ///
    /// # Errors
    /// There is no such vCPU, its thread has ended, or it has not left the guest or its device.
    pub fn interrupt<R: Send + 'static>(
        &self,
        index: u32,
        f: impl FnOnce(&mut Vcpu) -> R + Send + 'static,
        mut wait_on: impl FnMut() -> bool,
    ) -> Result<R, ThreadsError> {
        const STEP: Duration = Duration::from_millis(100);
        refuse_vcpu_thread()?;
        let thread = self.threads.iter().find(|thread| thread.shared.index == index);
        let thread = thread.ok_or(ThreadsError::Unknown { index })?;
        let (done, answer) = mpsc::sync_channel(1);
        let job = Box::new(move |vcpu: &mut Vcpu| {
            let _ = done.send(f(vcpu));
        });
        if !thread.shared.begin_job(job) {
            return Err(ThreadsError::Exited { index });
        }
        let mut waited = Duration::ZERO;
        loop {
            match answer.recv_timeout(STEP) {
                Ok(result) => return Ok(result),
                Err(mpsc::RecvTimeoutError::Disconnected) => {
                    return Err(ThreadsError::Exited { index });
                }
                Err(mpsc::RecvTimeoutError::Timeout) => waited = waited.saturating_add(STEP),
            }
            if !wait_on() {
                return Err(ThreadsError::Timeout { index, within: waited });
            }
        }
    }

    /// What informs the guest that its vCPUs stood still.
    pub fn standstill(&self) -> Standstill {
        Standstill(Arc::clone(&self.standing))
    }
}

/// Informs the watchdogs of a guest that its vCPUs stood still, also those that are added later.
pub struct Standstill(Arc<Mutex<Vec<Weak<Shared>>>>);

impl Standstill {
    /// Has each vCPU note it (`KVM_KVMCLOCK_CTRL`) before it is in the guest again, as far as the guest uses
    /// kvmclock. A running vCPU leaves the guest for it. Does not wait, and may be called by a vCPU thread that
    /// handles an exit.
    pub fn report(&self) {
        let standing: Vec<_> = self.0.lock().iter().filter_map(Weak::upgrade).collect();
        for shared in standing {
            shared.begin_job(Box::new(|vcpu| vcpu.notify_clock_paused()));
        }
    }
}

impl Runner<'_> {
    /// Runs the jobs for which a running vCPU has left the guest.
    pub(super) fn run_pending_tasks(&mut self) {
        self.shared.tasks_pending.set(false);
        let next = || self.shared.lock().jobs.pop_front();
        while let Some(job) = next() {
            job(&mut self.vcpu);
        }
    }
}
