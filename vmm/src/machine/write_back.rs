// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Disks being written back to stable storage, so that another host, or a copy of the image, finds
//! what the guest counts as written; and whatever else of the same kind the host is asked to do to them.
//!
//! Owns the threads that do it, one per disk: a disk may take any time, and the waiting thread may
//! stop waiting. Must never touch guest memory or the devices.

use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use devices::virtio::block::{DiskError, DiskLock};
use parking_lot::{Condvar, Mutex, MutexGuard};
use thiserror::Error;

use crate::events;

/// Why a disk cannot be written back.
#[derive(Debug, Error)]
pub enum WriteBackError {
    /// The flush failed, or an earlier one had failed.
    #[error("disk '{id}' cannot be written back")]
    Disk {
        /// Id of the device.
        id: String,
        /// The cause.
        #[source]
        source: DiskError,
    },
    /// No thread could be started, and the caller has a time limit.
    #[error("a thread cannot be started for disk '{id}'")]
    Thread {
        /// Id of the device.
        id: String,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// The write-back has not finished in time.
    #[error("disk '{id}' ({path}) was not written back within {} ms", .within.as_millis())]
    Slow {
        /// Id of the device.
        id: String,
        /// Path of the image.
        path: PathBuf,
        /// The time limit.
        within: Duration,
    },
}

impl WriteBackError {
    /// Id of the device.
    pub fn id(&self) -> &str {
        let (Self::Disk { id, .. } | Self::Thread { id, .. } | Self::Slow { id, .. }) = self;
        id
    }
}

#[derive(Default)]
struct State {
    /// Disks not finished yet, by id.
    left: BTreeMap<String, PathBuf>,
    failure: Option<WriteBackError>,
}

#[derive(Default)]
struct Shared {
    /// Only locked briefly.
    state: Mutex<State>,
    changed: Condvar,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    fn done(&self, id: &str, result: Result<(), WriteBackError>) {
        let mut state = self.lock();
        state.left.remove(id);
        if let Err(error) = result {
            state.failure.get_or_insert(error);
        }
        drop(state);
        self.changed.notify_all();
    }
}

fn failed(id: &str, source: DiskError) -> WriteBackError {
    WriteBackError::Disk { id: id.to_owned(), source }
}

/// How threads are started, and what happens if they cannot be.
#[derive(Clone, Copy)]
struct Spawn {
    name: &'static str,
    /// Whether the caller may block for as long as the work takes.
    may_wait: bool,
}

impl Spawn {
    fn thread(self, work: impl FnOnce() + Send + 'static) -> io::Result<()> {
        stoppable_thread::spawn(self.name, work).map(drop)
    }
}

/// Disks that are being written back, on threads; dropping this lets them continue.
pub struct WriteBack {
    shared: Arc<Shared>,
    began: Instant,
}

impl WriteBack {
    /// Starts to write back what was written to these disks so far. If a thread cannot be started, the
    /// calling thread does its work.
    pub fn start(disks: impl IntoIterator<Item = (String, DiskLock)>) -> Self {
        Self::each(disks, DiskLock::write_back, Spawn { name: "write-back", may_wait: true })
    }

    /// Starts other work on each of these disks, on threads of this name. Never blocks: if a thread cannot
    /// be started, that is an error.
    pub(super) fn start_other(
        name: &'static str,
        disks: impl IntoIterator<Item = (String, DiskLock)>,
        work: impl Fn(&DiskLock) -> Result<(), DiskError> + Clone + Send + 'static,
    ) -> Self {
        Self::each(disks, work, Spawn { name, may_wait: false })
    }

    fn each(
        disks: impl IntoIterator<Item = (String, DiskLock)>,
        work: impl Fn(&DiskLock) -> Result<(), DiskError> + Clone + Send + 'static,
        spawn: Spawn,
    ) -> Self {
        let shared = Arc::new(Shared::default());
        let began = Instant::now();
        for (id, disk) in disks {
            shared.lock().left.insert(id.clone(), disk.path().to_owned());
            let (for_thread, own_id, own_disk) = (Arc::clone(&shared), id.clone(), disk.clone());
            let own_work = work.clone();
            let spawned = spawn.thread(move || {
                let result = own_work(&own_disk);
                for_thread.done(&own_id, result.map_err(|source| failed(&own_id, source)));
            });
            let result = match spawned {
                Ok(()) => continue,
                Err(error) if spawn.may_wait => {
                    log::debug!("disk '{id}' has no thread for {}: {error}", spawn.name);
                    work(&disk).map_err(|source| failed(&id, source))
                }
                Err(source) => Err(WriteBackError::Thread { id: id.clone(), source }),
            };
            shared.done(&id, result);
        }
        Self { shared, began }
    }

    /// Whether all disks are finished.
    pub fn is_done(&self) -> bool {
        self.shared.lock().left.is_empty()
    }

    /// Waits for all disks, without a time limit.
    ///
    /// # Errors
    /// The first failure.
    pub fn wait(self) -> Result<(), WriteBackError> {
        let mut state = self.shared.lock();
        let waiting = |state: &mut State| !state.left.is_empty();
        self.shared.changed.wait_while(&mut state, waiting);
        state.failure.take().map_or(Ok(()), Err)
    }

    /// Waits for all disks with a time limit.
    ///
    /// # Errors
    /// [`WriteBackError::Slow`] names one of the unfinished disks; they continue.
    pub fn wait_within(&self, within: Duration) -> Result<(), WriteBackError> {
        let mut state = self.shared.lock();
        let waiting = |state: &mut State| !state.left.is_empty() && state.failure.is_none();
        self.shared.changed.wait_while_for(&mut state, waiting, within);
        if let Some(failure) = state.failure.take() {
            return Err(failure);
        }
        match state.left.first_key_value() {
            None => Ok(()),
            Some((id, path)) => {
                Err(WriteBackError::Slow { id: id.clone(), path: path.clone(), within })
            }
        }
    }

    /// Time since the start.
    pub fn elapsed(&self) -> Duration {
        self.began.elapsed()
    }
}

/// Reports a failure that no request can be answered with.
pub fn report_write_back_failure(error: &WriteBackError) {
    let reason = error_text::chain(error);
    log::error!("{reason}");
    events::emit("vm", "disk-write-back-failed", &[("id", error.id()), ("error", &reason)]);
}
