// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Work of one thread that others share: populating, clearing and mapping the pieces of a slot.
//!
//! Owns the helping threads while the work lasts. They inherit priority and processors of the thread that
//! starts them. Must never fail because a thread cannot be started: the others do its share.

use std::num::NonZeroUsize;
use std::panic::resume_unwind;

/// Calls `work` on so many threads, the calling one included; each returns when nothing is left to claim.
///
/// # Errors
/// The error of one of them.
pub fn run<E: Send>(
    threads: NonZeroUsize,
    work: impl Fn() -> Result<(), E> + Sync,
) -> Result<(), E> {
    let work = &work;
    std::thread::scope(|scope| {
        let mut helpers = Vec::new();
        for _ in 1..threads.get() {
            match stoppable_thread::spawn_scoped(scope, "zeroer", work) {
                Ok(helper) => helpers.push(helper),
                Err(error) => {
                    log::warn!("a slot is worked on by {} threads: {error}", helpers.len() + 1);
                    break;
                }
            }
        }
        let own = work();
        let join = |helper: std::thread::ScopedJoinHandle<'_, _>| {
            helper.join().unwrap_or_else(|panic| resume_unwind(panic))
        };
        helpers.into_iter().map(join).fold(own, Result::and)
    })
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    #[test]
    fn all_threads_work_at_the_same_time_and_an_error_of_any_is_returned() {
        let threads = NonZeroUsize::MIN.saturating_add(2);
        let (all, calls) = (Barrier::new(threads.get()), AtomicU32::new(0));
        let caller = std::thread::current().id();
        for caller_fails in [true, false] {
            let work = || {
                all.wait();
                calls.fetch_add(1, Ordering::Relaxed);
                let is_caller = std::thread::current().id() == caller;
                if is_caller == caller_fails { Err("no memory") } else { Ok(()) }
            };
            assert_eq!(run(threads, work), Err("no memory"), "of the caller: {caller_fails}");
        }
        assert_eq!(calls.load(Ordering::Relaxed), 6);
        assert_eq!(run(NonZeroUsize::MIN, || Ok::<(), ()>(())), Ok(()));
    }
}
