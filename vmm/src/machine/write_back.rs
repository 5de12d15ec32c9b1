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

/// Why disks are not written back.
#[derive(Debug, Error)]
pub enum WriteBackError {
    /// The host refused, now or to an earlier flush.
    #[error("disk '{id}' cannot be written back")]
    Disk {
        /// The device.
        id: String,
        /// Why.
        #[source]
        source: DiskError,
    },
    /// There is no thread for it, and a caller with a limit cannot do it itself.
    #[error("a thread cannot be started for disk '{id}'")]
    Thread {
        /// The device.
        id: String,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// It takes too long.
    #[error("disk '{id}' ({path}) was not written back within {} ms", .within.as_millis())]
    Slow {
        /// The device.
        id: String,
        /// Its image.
        path: PathBuf,
        /// How long it was waited for.
        within: Duration,
    },
}

impl WriteBackError {
    /// The disk.
    pub fn id(&self) -> &str {
        let (Self::Disk { id, .. } | Self::Thread { id, .. } | Self::Slow { id, .. }) = self;
        id
    }
}

#[derive(Default)]
struct State {
    /// Disks that are not done, by their ids.
    left: BTreeMap<String, PathBuf>,
    failure: Option<WriteBackError>,
}

#[derive(Default)]
struct Shared {
    /// Held for an instant.
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

/// How threads are made, and what if they cannot be.
#[derive(Clone, Copy)]
struct Spawn {
    name: &'static str,
    /// The caller may be kept for as long as it takes.
    may_wait: bool,
}

impl Spawn {
    fn thread(self, work: impl FnOnce() + Send + 'static) -> io::Result<()> {
        stoppable_thread::spawn(self.name, work).map(drop)
    }
}

/// Disks that are being written back. Dropping it leaves them to it.
pub struct WriteBack {
    shared: Arc<Shared>,
    began: Instant,
}

impl WriteBack {
    /// Begins with what was written to these disks up to now. Without a thread for one it is waited for
    /// here.
    pub fn start(disks: impl IntoIterator<Item = (String, DiskLock)>) -> Self {
        Self::each(disks, DiskLock::write_back, Spawn { name: "write-back", may_wait: true })
    }

    /// Begins with other work on each of these disks, which may take as long, on threads of this name. It
    /// never waits: without a thread for one that is an error.
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

    /// Whether there is nothing left to wait for.
    pub fn is_done(&self) -> bool {
        self.shared.lock().left.is_empty()
    }

    /// Waits for all of them, however long they take.
    ///
    /// # Errors
    /// Of the first that could not be.
    pub fn wait(self) -> Result<(), WriteBackError> {
        let mut state = self.shared.lock();
        let waiting = |state: &mut State| !state.left.is_empty();
        self.shared.changed.wait_while(&mut state, waiting);
        state.failure.take().map_or(Ok(()), Err)
    }

    /// The same for so long at most.
    ///
    /// # Errors
    /// [`WriteBackError::Slow`] names one of those that are left; they continue.
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

    /// How long it has taken up to now.
    pub fn elapsed(&self) -> Duration {
        self.began.elapsed()
    }
}

/// Tells of a failure that no request can be answered with.
pub fn report_write_back_failure(error: &WriteBackError) {
    let reason = error_text::chain(error);
    log::error!("{reason}");
    events::emit("vm", "disk-write-back-failed", &[("id", error.id()), ("error", &reason)]);
}
