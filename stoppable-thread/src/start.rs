// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The start of a thread: its name, its stack, and what the process has every thread do first.
//!
//! Owns the hook. Must never start a thread that does not run it.

use std::cell::RefCell;
use std::fmt;
use std::io;
use std::panic::resume_unwind;
use std::sync::OnceLock;
use std::thread::{JoinHandle, Scope, ScopedJoinHandle};

/// Called on each new thread before its body, with the kinds of the thread and of the thread that started it.
///
/// The kind is the thread's full name, also where Linux truncates it to 15 bytes, or the argument of
/// [`Builder::kind`]. The hook is the place for what a thread of that kind needs for its whole life, such as a filter
/// of system calls. It cannot fail: where a thread must not run without it, it has to end the process.
pub type StartHook = fn(Kinds<'_>);

/// The kinds of two threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kinds<'a> {
    /// Of the new thread.
    pub own: &'a str,
    /// Of the thread that started it, if that was started here as well: what it passes on to the threads that it
    /// starts, the new thread has already.
    pub starter: Option<&'a str>,
}

static START_HOOK: OnceLock<StartHook> = OnceLock::new();

/// There is a hook already, which stays.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HookIsSet;

/// From now on each thread that is started calls `hook` first, until the process ends. Threads that run
/// already do not, `main` among them.
///
/// # Errors
/// There is a hook already.
pub fn set_start_hook(hook: StartHook) -> Result<(), HookIsSet> {
    START_HOOK.set(hook).map_err(|_| HookIsSet)
}

thread_local! {
    /// Kind of this thread, if it was started here.
    static KIND: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// The kind of the calling thread. One whose values are being dropped has none any more.
fn own_kind() -> Option<String> {
    KIND.try_with(|kind| kind.borrow().clone()).ok().flatten()
}

fn run_start_hook(own: &str, starter: Option<&str>) {
    KIND.set(Some(own.to_owned()));
    if let Some(hook) = START_HOOK.get() {
        hook(Kinds { own, starter });
    }
}

/// A thread to be started.
#[derive(Debug)]
pub struct Builder {
    name: String,
    kind: Option<&'static str>,
    stack_bytes: Option<usize>,
    before_hook: Option<First>,
}

/// What a thread does first.
struct First(Box<dyn FnOnce() + Send>);

impl fmt::Debug for First {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("First")
    }
}

impl Builder {
    /// A thread of this name, with the usual stack.
    pub fn new(name: impl Into<String>) -> Self {
        Self { name: name.into(), kind: None, stack_bytes: None, before_hook: None }
    }

    /// Of this kind, which the start hook gets in place of the name: for a name that comes from outside, such as
    /// that of a device.
    #[must_use]
    pub fn kind(self, kind: &'static str) -> Self {
        Self { kind: Some(kind), ..self }
    }

    /// With a stack of so many bytes.
    #[must_use]
    pub fn stack_bytes(self, bytes: usize) -> Self {
        Self { stack_bytes: Some(bytes), ..self }
    }

    /// Calls `first` on the new thread before the start hook: for what the hook takes the right to.
    #[must_use]
    pub fn before_hook(self, first: impl FnOnce() + Send + 'static) -> Self {
        Self { before_hook: Some(First(Box::new(first))), ..self }
    }

    /// What the new thread does before its body.
    fn begin(self, starter: Option<&str>) {
        if let Some(First(first)) = self.before_hook {
            first();
        }
        run_start_hook(self.kind.unwrap_or(&self.name), starter);
    }

    fn of_std(&self) -> std::thread::Builder {
        let builder = std::thread::Builder::new().name(self.name.clone());
        match self.stack_bytes {
            Some(bytes) => builder.stack_size(bytes),
            None => builder,
        }
    }

    /// Starts it.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub fn spawn<T: Send + 'static>(
        self,
        body: impl FnOnce() -> T + Send + 'static,
    ) -> io::Result<JoinHandle<T>> {
        let starter = own_kind();
        self.of_std().spawn(move || {
            self.begin(starter.as_deref());
            body()
        })
    }

    /// Starts it in a scope, which waits for its end.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub fn spawn_scoped<'scope, T: Send + 'scope>(
        self,
        scope: &'scope Scope<'scope, '_>,
        body: impl FnOnce() -> T + Send + 'scope,
    ) -> io::Result<ScopedJoinHandle<'scope, T>> {
        let starter = own_kind();
        self.of_std().spawn_scoped(scope, move || {
            self.begin(starter.as_deref());
            body()
        })
    }
}

/// Starts a thread of this name.
///
/// # Errors
/// The thread cannot be started.
pub fn spawn<T: Send + 'static>(
    name: impl Into<String>,
    body: impl FnOnce() -> T + Send + 'static,
) -> io::Result<JoinHandle<T>> {
    Builder::new(name).spawn(body)
}

/// Starts a thread of this name in a scope, which waits for its end.
///
/// # Errors
/// The thread cannot be started.
pub fn spawn_scoped<'scope, T: Send + 'scope>(
    scope: &'scope Scope<'scope, '_>,
    name: impl Into<String>,
    body: impl FnOnce() -> T + Send + 'scope,
) -> io::Result<ScopedJoinHandle<'scope, T>> {
    Builder::new(name).spawn_scoped(scope, body)
}

/// Calls `start` on a thread of this kind, for it to start several threads of the same kind, and returns its result.
/// What the start hook does for a kind and threads inherit is then done once for all of them.
///
/// # Errors
/// The thread cannot be started.
pub fn start_group<T: Send>(kind: &str, start: impl FnOnce() -> T + Send) -> io::Result<T> {
    std::thread::scope(|scope| {
        let thread = spawn_scoped(scope, kind, start)?;
        Ok(thread.join().unwrap_or_else(|panic| resume_unwind(panic)))
    })
}
