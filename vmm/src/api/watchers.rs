// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Clients that follow a migration on a connection that they keep.
//!
//! Owns their number: connections on which the progress was asked for, and its end not told. A process that ends with the
//! migration stays for them, however long each is kept from asking again. Of clients that connect for each request only the
//! time of the last one is known, to others. It must never wait for a client, and decides nothing: how long a process stays
//! is for those that read the number.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use vm_migration::{Phase, ProgressDocument};
use vmm_sys_util::eventfd::EventFd;

/// The number of such clients.
#[derive(Clone, Debug, Default)]
pub struct Watchers {
    count: Arc<AtomicUsize>,
    /// Wakes the thread that waits for the last of them.
    event: Option<Arc<EventFd>>,
}

/// One of them, until this is dropped.
#[derive(Debug)]
pub struct Watching(Watchers);

impl Watchers {
    /// None yet; `event` is written when one has gone.
    pub(super) fn new(event: &Arc<EventFd>) -> Self {
        Self { count: Arc::default(), event: Some(Arc::clone(event)) }
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.count.load(Ordering::SeqCst)
    }

    /// One more.
    pub fn begin(&self) -> Watching {
        self.count.fetch_add(1, Ordering::SeqCst);
        Watching(self.clone())
    }
}

impl Drop for Watching {
    fn drop(&mut self) {
        self.0.count.fetch_sub(1, Ordering::SeqCst);
        if let Some(event) = &self.0.event {
            // A saturated counter wakes the thread as well.
            let _ = event.write(1);
        }
    }
}

/// Whether a client that has read this needs no more of this process.
pub fn is_the_end(document: &ProgressDocument) -> bool {
    matches!(document.phase, Phase::Done | Phase::HandedOn | Phase::Failed)
}
