// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Requests that fail because the host's storage is full.
//!
//! Owns them from the error ENOSPC or EDQUOT until they are started again: they are not answered, so
//! that the driver, which counts them as in flight, waits and loses nothing. No request of their queue is
//! started meanwhile. Must never keep a flush of data: what the host has accepted and could not write back is
//! lost, and no later flush brings it back. Tables of an image in a format are not lost by a failed flush.

use std::io;
use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use memory::GuestMemoryHandle;
use parking_lot::{Mutex, MutexGuard};
use vm_memory::GuestAddressSpace;

use super::image::Disk;
use super::perform::{Engine, Failure};
use super::request::Request;

/// For how long pieces of one range are tried, while the device is paused: what they did is done again afterwards.
const PIECES_TIME: Duration = Duration::from_secs(1);

/// Handling of a request for which the host has no space.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnFull {
    /// The driver gets an I/O error.
    #[default]
    Report,
    /// The request waits for free space; the VMM thread is notified, to pause the VM.
    Pause,
}

/// Whether the host is out of space.
pub(super) fn is_full(error: &io::Error) -> bool {
    // An error with added context has a kind and no errno.
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}

/// A request that waits for free space.
struct PendingRequest {
    queue: u16,
    request: Request,
    engine: Engine,
    memory: GuestMemoryHandle,
}

/// The requests of a device that wait for free space.
#[derive(Default)]
pub(crate) struct NoSpace {
    /// Only locked briefly, never while a request is carried out.
    kept: Mutex<Vec<PendingRequest>>,
    tell: OnceLock<Box<dyn Fn() + Send + Sync>>,
}

impl NoSpace {
    fn lock(&self) -> MutexGuard<'_, Vec<PendingRequest>> {
        self.kept.lock()
    }

    /// Adds a request of a queue.
    pub(super) fn keep(
        &self,
        queue: u16,
        request: Request,
        engine: Engine,
        memory: GuestMemoryHandle,
    ) {
        self.lock().push(PendingRequest { queue, request, engine, memory });
    }

    /// Reports that requests are waiting. Called once by each queue when it starts.
    pub(super) fn tell(&self) {
        if let Some(tell) = self.tell.get() {
            tell();
        }
    }

    /// Removes the requests of a queue, in order of arrival: to be retried, or dropped because the driver
    /// must not be answered any more.
    pub(super) fn take(&self, queue: u16) -> Vec<Request> {
        let mut kept = self.lock();
        let (own, others) =
            std::mem::take(&mut *kept).into_iter().partition(|kept| kept.queue == queue);
        *kept = others;
        let own: Vec<PendingRequest> = own;
        own.into_iter().map(|kept| kept.request).collect()
    }

    /// Whether requests wait.
    pub(super) fn has_requests(&self) -> bool {
        !self.lock().is_empty()
    }

    /// Drops all requests, as the driver is gone; returns their number.
    pub(super) fn forget(&self) -> usize {
        std::mem::take(&mut *self.lock()).len()
    }
}

/// Handle to a disk with requests that wait for free space; cheap to clone.
#[derive(Clone)]
pub struct FullDisk {
    full: Arc<NoSpace>,
    disk: Arc<Disk>,
}

impl FullDisk {
    pub(super) fn new(full: &Arc<NoSpace>, disk: &Arc<Disk>) -> Self {
        Self { full: Arc::clone(full), disk: Arc::clone(disk) }
    }

    /// Sets the callback for a request that starts to wait; called on a thread of the device, and must not
    /// block. Only the first callback set counts.
    pub fn on_full(&self, tell: impl Fn() + Send + Sync + 'static) {
        // A callback set before is kept.
        let _ = self.full.tell.set(Box::new(tell));
    }

    /// Number of waiting requests.
    pub fn kept(&self) -> usize {
        self.full.lock().len()
    }

    /// Path of the image.
    pub fn path(&self) -> &Path {
        self.disk.path()
    }

    /// Carries out the waiting requests as far as there is space, without completing them: the device,
    /// which must be paused, repeats them when it resumes, as writing the same data again changes nothing. Of a range that
    /// takes several pieces those that a second is enough for: the rest may fill the disk once more.
    /// Takes as long as the storage does.
    ///
    /// # Errors
    /// There is no space yet. Other errors are reported to the driver when the device resumes.
    pub fn try_again(&self) -> io::Result<()> {
        // One at a time and without the lock, which other threads use meanwhile.
        let next = |at: usize| {
            let kept = self.full.lock();
            let kept = kept.get(at)?;
            Some((kept.request.operation.clone(), kept.engine.clone(), kept.memory.clone()))
        };
        for at in 0.. {
            let Some((operation, engine, memory)) = next(at) else { break };
            let began = Instant::now();
            for piece in operation.pieces() {
                match engine.perform(&piece, &memory.memory()) {
                    Err(Failure::Host(error)) if is_full(&error) => return Err(error),
                    Ok(_) if began.elapsed() < PIECES_TIME => {}
                    _ => break,
                }
            }
        }
        Ok(())
    }
}
