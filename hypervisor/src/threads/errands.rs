// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What running vCPUs come out of the guest for, do on their threads, and go back.
//!
//! Owns how such an errand reaches its thread; the protocol of the kick is the one of `threads`. Must
//! never wait for a vCPU.

use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::runner::Runner;
use super::{Phase, Shared, Thread, VcpuThreads, Want};
use crate::stage2::{Errand, RunsErrands, Stage2Fill, Stage2Filled};
use crate::vcpu::Vcpu;

impl RunsErrands for Shared {
    fn run_errand(&self, errand: Errand) -> bool {
        let mut control = self.lock();
        if control.phase == Phase::Gone || control.want == Want::Exit {
            return false;
        }
        control.jobs.push_back(Box::new(move |vcpu: &mut Vcpu| errand(vcpu)));
        if control.phase == Phase::Running {
            self.errands.store(true, Ordering::SeqCst);
            self.run_page.set_immediate_exit(true);
            self.signal();
        }
        drop(control);
        self.changed.notify_all();
        true
    }
}

impl VcpuThreads {
    /// Begins to fill the second-stage tables on the vCPUs' threads, while the guest runs or not.
    /// `runs` gives the guest physical addresses that have memory; it and `done` are called on a
    /// thread of their own.
    ///
    /// # Errors
    /// The host gives no thread.
    pub fn fill_stage2(
        &self,
        runs: impl FnOnce() -> Vec<Range<u64>> + Send + 'static,
        done: impl FnOnce(Stage2Filled) + Send + 'static,
    ) -> io::Result<Stage2Fill> {
        let vcpu = |thread: &Thread| -> Arc<dyn RunsErrands> { thread.shared.clone() };
        Stage2Fill::start(self.threads.iter().map(vcpu).collect(), runs, done)
    }
}

impl Runner<'_> {
    /// What the vCPU came out of the guest for, although it runs.
    pub(super) fn do_errands(&mut self) {
        self.shared.errands.store(false, Ordering::SeqCst);
        let next = || self.shared.lock().jobs.pop_front();
        while let Some(job) = next() {
            self.do_job(job);
        }
    }
}
