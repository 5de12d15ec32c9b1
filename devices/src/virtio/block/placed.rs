// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Transfers of an image in a format that go straight to its file, as those of a raw image do.
//!
//! Owns the record of those in progress, for which an operation that changes where data are has to wait. A transfer is
//! begun by the thread of a queue, which must never wait here, as it alone ends those that others wait for: it gives up
//! where such an operation is in progress, and the request takes the usual way through the driver of the format. The
//! driver may read a table meanwhile, and write others for which it is in the way, but waits for no transfer.

use std::sync::Arc;

use parking_lot::{Condvar, Mutex};

/// Where a range of a disk is in the image's own file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) offset: u64,
    /// Alignment of the memory, for direct I/O; 1 without.
    pub(super) address_align_bytes: usize,
}

/// The transfers in progress of an image.
#[derive(Default)]
pub(super) struct Transfers {
    count: Mutex<usize>,
    ended: Condvar,
    #[cfg(test)]
    begun: std::sync::atomic::AtomicUsize,
}

impl Transfers {
    /// Counts a transfer until the returned value is dropped. Only while operations of the driver may begin.
    pub(super) fn begin(self: &Arc<Self>, place: Place) -> Transfer {
        *self.count.lock() += 1;
        #[cfg(test)]
        self.begun.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        Transfer { place, of: Arc::clone(self) }
    }

    /// How many have begun so far.
    #[cfg(test)]
    pub(super) fn begun(&self) -> usize {
        self.begun.load(std::sync::atomic::Ordering::Relaxed)
    }

    /// Waits until none is in progress. Only while none may begin.
    pub(super) fn wait(&self) {
        let mut count = self.count.lock();
        self.ended.wait_while(&mut count, |count| *count > 0);
    }
}

/// A transfer in progress: what is there stays there.
pub(super) struct Transfer {
    pub(super) place: Place,
    of: Arc<Transfers>,
}

impl Drop for Transfer {
    fn drop(&mut self) {
        let mut count = self.of.count.lock();
        *count = count.saturating_sub(1);
        self.of.ended.notify_all();
    }
}
