// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The start of vCPU threads.
//!
//! Owns threads from their start until all of a group are ready. Must never let a vCPU run.

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, OnceLock, mpsc};
use std::time::Instant;

use parking_lot::{Condvar, Mutex};

use super::flag::Flag;
use super::runner::Runner;
use super::{Control, Exited, IS_VCPU, Phase, Shared, Target, Thread, ThreadsConfig, ThreadsError};
use crate::kick::set_signal_mask;
use crate::vcpu::Vcpu;

/// A group of threads, after all have been started or have failed.
pub(super) struct Started {
    /// The first ones, which are ready.
    pub(super) first: Vec<Thread>,
    /// Those that are ready, and come after one that is not.
    pub(super) later: Vec<Thread>,
    /// vCPUs without a thread.
    pub(super) unused: Vec<Vcpu>,
    /// Why there are some.
    pub(super) error: Option<ThreadsError>,
}

/// A vCPU until its thread is ready, which takes it then.
type Slot = Arc<Mutex<Option<Vcpu>>>;

/// A thread that is not known to be ready.
struct Starting {
    thread: Thread,
    ready: mpsc::Receiver<io::Result<()>>,
    slot: Slot,
}

/// Starts the threads of `vcpus`, and waits until they are ready; they prepare at the same time.
pub(super) fn start(
    vcpus: Vec<Vcpu>,
    config: &ThreadsConfig,
    first_run: &Arc<OnceLock<Instant>>,
) -> Started {
    let mut started =
        Started { first: Vec::new(), later: Vec::new(), unused: Vec::new(), error: None };
    let mut starting = Vec::new();
    let mut vcpus = vcpus.into_iter();
    let mut spawn_error = None;
    for vcpu in vcpus.by_ref() {
        match spawn(vcpu, config, first_run) {
            Ok(begun) => starting.push(begun),
            Err((error, vcpu)) => {
                started.unused.extend(vcpu);
                spawn_error = Some(error);
                break;
            }
        }
    }
    started.unused.extend(vcpus);
    for Starting { thread, ready, slot } in starting {
        let index = thread.shared.index;
        let error = match ready.recv() {
            Ok(Ok(())) if started.error.is_none() => {
                started.first.push(thread);
                continue;
            }
            Ok(Ok(())) => {
                started.later.push(thread);
                continue;
            }
            Ok(Err(source)) => ThreadsError::Start { index, source },
            Err(_) => ThreadsError::Exited { index },
        };
        thread.join();
        started.unused.extend(slot.lock().take());
        started.error.get_or_insert(error);
    }
    started.error = started.error.or(spawn_error);
    started
}

/// Starts the thread of `vcpu`, without waiting until it is ready. The vCPU comes back if that fails.
fn spawn(
    vcpu: Vcpu,
    config: &ThreadsConfig,
    first_run: &Arc<OnceLock<Instant>>,
) -> Result<Starting, (ThreadsError, Option<Vcpu>)> {
    let index = vcpu.index();
    let shared = Arc::new(Shared {
        index,
        thread_id: OnceLock::new(),
        control: Mutex::new(Control {
            target: Target::Park,
            phase: Phase::Parked,
            jobs: VecDeque::new(),
        }),
        changed: Condvar::new(),
        leave: Flag::new(),
        hold: Flag::new(),
        tasks_pending: Flag::new(),
        handle: Mutex::new(None),
        run_page: Arc::clone(&vcpu.run_page),
        handler: Arc::downgrade(&config.handler),
    });
    let slot: Slot = Arc::new(Mutex::new(Some(vcpu)));
    let (started, ready) = mpsc::sync_channel(1);
    let body = {
        let (shared, slot) = (Arc::clone(&shared), Arc::clone(&slot));
        let first_run = Arc::clone(first_run);
        let ThreadsConfig { handler, on_start } = config.clone();
        move || {
            let exited = Exited(&shared);
            IS_VCPU.set(true);
            // SAFETY: takes nothing and touches no memory.
            let _ = shared.thread_id.set(unsafe { libc::gettid() });
            let setup = set_signal_mask()
                .and_then(|()| on_start.map_or(Ok(()), |on_start| on_start(index)));
            let vcpu = setup.is_ok().then(|| slot.lock().take()).flatten();
            drop(slot);
            let _ = started.send(setup);
            if let Some(vcpu) = vcpu {
                Runner { shared: &shared, vcpu, handler, first_run }.work();
            }
            drop(exited);
        }
    };
    match stoppable_thread::spawn(format!("vcpu{index}"), body) {
        Ok(handle) => {
            *shared.handle.lock() = Some(handle);
            Ok(Starting { thread: Thread { shared }, ready, slot })
        }
        Err(source) => Err((ThreadsError::Spawn { index, source }, slot.lock().take())),
    }
}
