// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Locks that ignore poisoning.
//!
//! Every lock in this crate guards plain values that are consistent between any two statements, so
//! a poisoned lock is still usable. The order in which locks nest is: arrivals on a segment, segment
//! slots, placement, transport, configuration space, MSI-X table or notification state.

use std::sync::{Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// Locks, whether or not another holder panicked.
pub fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Locks for reading, whether or not another holder panicked.
pub fn read<T: ?Sized>(rw_lock: &RwLock<T>) -> RwLockReadGuard<'_, T> {
    rw_lock.read().unwrap_or_else(PoisonError::into_inner)
}

/// Locks for writing, whether or not another holder panicked.
pub fn write<T: ?Sized>(rw_lock: &RwLock<T>) -> RwLockWriteGuard<'_, T> {
    rw_lock.write().unwrap_or_else(PoisonError::into_inner)
}
