// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Requests that fail because the host's storage is full.
//!
//! Owns them from the error ENOSPC or EDQUOT until they are started again: they are not answered, so
//! that the driver, which counts them as in flight, waits and loses nothing. No request of their queue is
//! started meanwhile. Must never keep a flush: data that the host has accepted and could not write back is
//! lost, and no later flush brings it back.

use std::io;
use std::path::Path;
use std::sync::{Arc, OnceLock};

use memory::GuestMemoryHandle;
use parking_lot::{Mutex, MutexGuard};
use vm_memory::GuestAddressSpace;

use super::image::Disk;
use super::perform::{Engine, Failure};
use super::request::Request;

/// Outcome for a request that the host has no room for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnFull {
    /// The driver gets an I/O error.
    #[default]
    Report,
    /// It is kept until there is room; the owner of the VM is told, to pause it.
    Pause,
}

/// Whether the host had no room.
pub(super) fn is_full(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOSPC | libc::EDQUOT))
}

/// One that is kept.
struct PendingRequest {
    queue: u16,
    request: Request,
    engine: Engine,
    memory: GuestMemoryHandle,
}

/// The requests of one device that are kept.
#[derive(Default)]
pub(crate) struct NoSpace {
    /// Held for an instant, never while a request is carried out.
    kept: Mutex<Vec<PendingRequest>>,
    tell: OnceLock<Box<dyn Fn() + Send + Sync>>,
}

impl NoSpace {
    fn lock(&self) -> MutexGuard<'_, Vec<PendingRequest>> {
        self.kept.lock()
    }

    /// Keeps a request of a queue.
    pub(super) fn keep(
        &self,
        queue: u16,
        request: Request,
        engine: Engine,
        memory: GuestMemoryHandle,
    ) {
        self.lock().push(PendingRequest { queue, request, engine, memory });
    }

    /// Says that there are requests that are kept. Called once by each queue after it was started.
    pub(super) fn tell(&self) {
        if let Some(tell) = self.tell.get() {
            tell();
        }
    }

    /// Takes those of a queue, in the order in which they came: to be begun again, or as its driver is not to
    /// be answered any more.
    pub(super) fn take(&self, queue: u16) -> Vec<Request> {
        let mut kept = self.lock();
        let (own, others) =
            std::mem::take(&mut *kept).into_iter().partition(|kept| kept.queue == queue);
        *kept = others;
        let own: Vec<PendingRequest> = own;
        own.into_iter().map(|kept| kept.request).collect()
    }

    /// Forgets them all, as the driver that waited for them is gone; gives their number.
    pub(super) fn forget(&self) -> usize {
        std::mem::take(&mut *self.lock()).len()
    }
}

/// What the owner of a VM may ask of a disk that keeps requests; cheap to clone.
#[derive(Clone)]
pub struct FullDisk {
    full: Arc<NoSpace>,
    disk: Arc<Disk>,
}

impl FullDisk {
    pub(super) fn new(full: &Arc<NoSpace>, disk: &Arc<Disk>) -> Self {
        Self { full: Arc::clone(full), disk: Arc::clone(disk) }
    }

    /// Has `tell` called, on a thread of the device, when a request has been kept; it must not wait. Only the
    /// first one set counts.
    pub fn on_full(&self, tell: impl Fn() + Send + Sync + 'static) {
        // The one that is set first stays.
        let _ = self.full.tell.set(Box::new(tell));
    }

    /// Requests that are kept.
    pub fn kept(&self) -> usize {
        self.full.lock().len()
    }

    /// The image.
    pub fn path(&self) -> &Path {
        self.disk.path()
    }

    /// Carries out what is kept, as far as there is room, and answers none of it: the device, which must hold
    /// still, begins it again when it continues. To write the same to the same place twice changes nothing.
    /// Takes as long as the storage takes.
    ///
    /// # Errors
    /// There is no room yet. Any other failure is the driver's to be told of, when the device continues.
    pub fn try_again(&self) -> io::Result<()> {
        // In turn and without the lock, which others look behind meanwhile.
        let next = |at: usize| {
            let kept = self.full.lock();
            let kept = kept.get(at)?;
            Some((kept.request.operation.clone(), kept.engine.clone(), kept.memory.clone()))
        };
        for at in 0.. {
            let Some((operation, engine, memory)) = next(at) else { break };
            match engine.perform(&operation, &memory.memory()) {
                Err(Failure::Host(error)) if is_full(&error) => return Err(error),
                _ => {}
            }
        }
        Ok(())
    }
}
