// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The start of vCPU threads.
//!
//! Owns threads from their start until all of a group are ready. Must never let a vCPU run.

use std::collections::VecDeque;
use std::io;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock, mpsc};
use std::time::Instant;

use parking_lot::{Condvar, Mutex};

use super::runner::Runner;
use super::{Control, Exited, IS_VCPU, Phase, Shared, Target, Thread, ThreadsConfig, ThreadsError};
use crate::kick::set_signal_mask;
use crate::vcpu::Vcpu;

/// Threads that have been started and are not known to be ready. When dropped, ends them.
#[derive(Default)]
pub(super) struct StartingThreads(Vec<(Thread, mpsc::Receiver<io::Result<()>>)>);

impl StartingThreads {
    /// Starts the thread of `vcpu`, without waiting until it is ready.
    pub(super) fn spawn(
        &mut self,
        vcpu: Vcpu,
        config: &ThreadsConfig,
        first_run: &Arc<OnceLock<Instant>>,
    ) -> Result<(), ThreadsError> {
        let index = vcpu.index();
        let shared = Arc::new(Shared {
            index,
            control: Mutex::new(Control {
                target: Target::Park,
                phase: Phase::Parked,
                jobs: VecDeque::new(),
            }),
            changed: Condvar::new(),
            leave: AtomicBool::new(false),
            hold: AtomicBool::new(false),
            tasks_pending: AtomicBool::new(false),
            handle: Mutex::new(None),
            run_page: Arc::clone(&vcpu.run_page),
        });
        let (started, answer) = mpsc::sync_channel(1);
        let body = {
            let shared = Arc::clone(&shared);
            let first_run = Arc::clone(first_run);
            let ThreadsConfig { handler, on_start } = config.clone();
            move || {
                let exited = Exited(&shared);
                IS_VCPU.set(true);
                let setup = set_signal_mask()
                    .and_then(|()| on_start.map_or(Ok(()), |on_start| on_start(index)));
                let failed = setup.is_err();
                let _ = started.send(setup);
                if !failed {
                    Runner { shared: &shared, vcpu, handler, first_run }.work();
                }
                drop(exited);
            }
        };
        let handle = stoppable_thread::spawn(format!("vcpu{index}"), body)
            .map_err(|source| ThreadsError::Spawn { index, source })?;
        *shared.handle.lock() = Some(handle);
        self.0.push((Thread { shared }, answer));
        Ok(())
    }

    /// Waits until all are ready; they prepare at the same time.
    pub(super) fn finish(mut self) -> Result<Vec<Thread>, ThreadsError> {
        for (thread, started) in &self.0 {
            let index = thread.shared.index;
            match started.recv() {
                Ok(Ok(())) => {}
                Ok(Err(source)) => return Err(ThreadsError::Start { index, source }),
                Err(_) => return Err(ThreadsError::Exited { index }),
            }
        }
        Ok(std::mem::take(&mut self.0).into_iter().map(|(thread, _)| thread).collect())
    }
}

impl Drop for StartingThreads {
    fn drop(&mut self) {
        self.0.iter().for_each(|(thread, _)| thread.request(Target::Exit));
        self.0.iter().for_each(|(thread, _)| thread.join());
    }
}
