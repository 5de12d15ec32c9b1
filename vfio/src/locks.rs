// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Locking that survives a panic elsewhere.
//!
//! Every lock in this crate guards plain values that are consistent between any two statements, so a poisoned lock
//! is still usable. Where locks nest, `docs/architecture.md` has their order.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks, whether or not another holder panicked.
pub fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
