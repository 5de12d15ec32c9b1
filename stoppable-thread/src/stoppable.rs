// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A thread with an owner: it is told to stop, and waited for, when that is dropped.
//!
//! Owns the handle of the thread and the signal that stops it. Must never be used for a thread whose
//! waits the signal does not end: dropping it would wait as long.

use std::fmt;
use std::io;
use std::panic::resume_unwind;
use std::thread::JoinHandle;

use crate::start::Builder;

/// A thread that is stopped and joined when this is dropped.
pub struct StoppableThread<T = ()> {
    stop: Box<dyn Fn() + Send + Sync>,
    /// Until it is joined.
    handle: Option<JoinHandle<T>>,
}

impl<T: Send + 'static> StoppableThread<T> {
    /// Starts a thread of this name. `stop` has `body` return soon; it may be called more than once, also
    /// when the thread has ended, and must not wait.
    ///
    /// # Errors
    /// The host gives no thread.
    pub fn spawn(
        name: impl Into<String>,
        stop: impl Fn() + Send + Sync + 'static,
        body: impl FnOnce() -> T + Send + 'static,
    ) -> io::Result<Self> {
        Self::build(Builder::new(name), stop, body)
    }

    /// The same for a thread with a stack of its own size.
    ///
    /// # Errors
    /// The host gives no thread.
    pub fn build(
        builder: Builder,
        stop: impl Fn() + Send + Sync + 'static,
        body: impl FnOnce() -> T + Send + 'static,
    ) -> io::Result<Self> {
        Ok(Self { stop: Box::new(stop), handle: Some(builder.spawn(body)?) })
    }
}

impl<T> StoppableThread<T> {
    /// Tells it to stop, and does not wait.
    pub fn stop(&self) {
        (self.stop)();
    }

    /// Whether it has ended, so that joining does not wait.
    pub fn is_finished(&self) -> bool {
        self.handle.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Waits until it ends by itself; what it returns. A panic of it is one of the caller, where panics
    /// unwind.
    pub fn join(mut self) -> T {
        match self.handle.take().map(JoinHandle::join) {
            Some(Ok(value)) => value,
            Some(Err(panic)) => resume_unwind(panic),
            None => unreachable!("only this takes the handle of one that is not dropped"),
        }
    }
}

impl<T> Drop for StoppableThread<T> {
    fn drop(&mut self) {
        let Some(handle) = self.handle.take() else { return };
        self.stop();
        // A panic has been reported by the thread, and nothing wants what it returns.
        let _ = handle.join();
    }
}

impl<T> fmt::Debug for StoppableThread<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StoppableThread").field("handle", &self.handle).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test that cannot unwrap has failed")]

    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
    use std::sync::mpsc::{Sender, channel};

    use super::*;

    /// A thread that ends when it is told to, how often that was, and whether it has.
    fn waiting() -> (StoppableThread<&'static str>, Arc<AtomicU32>, Arc<AtomicBool>) {
        let (stop, stopped): (Sender<()>, _) = channel();
        let (told, ended) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicBool::new(false)));
        let (count, end) = (Arc::clone(&told), Arc::clone(&ended));
        let stop = move || {
            count.fetch_add(1, Ordering::SeqCst);
            let _ = stop.send(());
        };
        let body = move || {
            stopped.recv().unwrap();
            end.store(true, Ordering::SeqCst);
            "done"
        };
        (StoppableThread::spawn("waits", stop, body).unwrap(), told, ended)
    }

    #[test]
    fn dropping_stops_and_waits() {
        let (thread, told, ended) = waiting();
        assert!(!thread.is_finished());
        drop(thread);
        assert!(ended.load(Ordering::SeqCst));
        assert_eq!(told.load(Ordering::SeqCst), 1);
    }

    #[test]
    fn joining_waits_for_the_end_and_stops_nothing() {
        let (thread, told, ended) = waiting();
        thread.stop();
        assert_eq!(thread.join(), "done");
        assert!(ended.load(Ordering::SeqCst));
        assert_eq!(told.load(Ordering::SeqCst), 1, "joining tells it nothing");
    }
}
