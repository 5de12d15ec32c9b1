// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Threads that take over values owned by the VMM thread.
//!
//! Owns a load on its way to such a thread: if the thread cannot be started, the load is returned. Must never know
//! what the load is.

use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;

use parking_lot::Mutex;

/// Starts a thread that owns `load`, or returns it.
pub fn spawn_with<T: Send + 'static>(
    name: &str,
    load: T,
    work: impl FnOnce(T) + Send + 'static,
) -> Result<JoinHandle<()>, (T, io::Error)> {
    let slot = Arc::new(Mutex::new(Some(load)));
    let take = |slot: &Mutex<Option<T>>| slot.lock().take();
    let inner = Arc::clone(&slot);
    let spawned = stoppable_thread::spawn(name, move || {
        if let Some(load) = take(&inner) {
            work(load);
        }
    });
    spawned.map_err(|error| match take(&slot) {
        Some(load) => (load, error),
        // Only the thread takes it, and there is none.
        None => unreachable!("no thread was made"),
    })
}
