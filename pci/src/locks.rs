// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Locking that survives a panic elsewhere, and a bound on what a guest can make us log.
//!
//! Every lock in this crate guards plain values that are consistent between any two statements, so
//! a poisoned lock is still usable. The order in which locks nest is: arrivals on a segment, segment
//! slots, placement, transport, configuration space, MSI-X table or notification state.

use std::sync::atomic::{AtomicU32, Ordering};
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

/// A budget of log lines for what a guest does wrong, so that it cannot fill the host's disk.
#[derive(Debug, Default)]
pub struct LogBudget(AtomicU32);

impl LogBudget {
    /// Lines that one device may write about its driver's mistakes; enough to see a pattern.
    const LINES_MAX: u32 = 32;

    /// Whether one more line may be written.
    pub fn take(&self) -> bool {
        self.0
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |used| {
                (used < Self::LINES_MAX).then_some(used + 1)
            })
            .is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn budget_ends() {
        let budget = LogBudget::default();
        let granted = (0..LogBudget::LINES_MAX * 2).filter(|_| budget.take()).count();
        assert_eq!(u32::try_from(granted), Ok(LogBudget::LINES_MAX));
    }
}
