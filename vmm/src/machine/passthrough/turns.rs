// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Calls into the kernel for devices which may never return: changes of their state, and their states.
//!
//! Owns the thread that makes such calls, one after the other, and the limit within which each of them is waited for. The
//! thread owns all that it uses; if a call takes longer, it is left behind, with the device, which is lost to the guest. Must
//! never be used for what waits for something else than the device, such as memory.

use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use pci::PciDevice as _;
use vfio::VfioPciDevice;
use vm_migration::{Limits, Stay};

use super::PassthroughError;
use super::migration::LossReporter;
use crate::machine::pausing::POLL_INTERVAL;

/// How long a call is waited for.
#[derive(Clone, Copy, Debug)]
pub struct CallLimits {
    /// A single one.
    pub call: Duration,
    /// One that is under way when the request for it is cancelled.
    pub leave: Duration,
}

impl Default for CallLimits {
    fn default() -> Self {
        let Limits { prepare, device_leave, .. } = Limits::default();
        Self { call: prepare, leave: device_leave }
    }
}

impl CallLimits {
    /// The limits for a machine that arrives, before the guest has stopped at its source: less than the source waits for
    /// it, so that it hears the name of the device.
    pub fn of_arrival() -> Self {
        Self { call: Limits::default().device_call(), ..Self::default() }
    }

    /// The same for the state that comes last, whose acknowledgement the source waits for.
    ///
    /// Other parts of the state take some of that time: what is left of it is up to [`Patience::until`].
    pub fn of_handover() -> Self {
        Self { call: Limits::default().last_device_call(), ..Self::default() }
    }
}

/// How long calls are waited for, and whether the request for them is cancelled.
#[derive(Clone, Copy)]
pub struct Patience<'a> {
    /// The limits.
    pub limits: CallLimits,
    /// When the time for all calls together is over.
    pub until: Option<Instant>,
    /// Whether the request is cancelled.
    pub is_cancelled: &'a dyn Fn() -> bool,
}

impl Patience<'static> {
    /// With these limits, and never cancelled.
    pub fn within(limits: CallLimits) -> Self {
        Self { limits, until: None, is_cancelled: &|| false }
    }
}

/// What is known of the thread that makes the calls.
#[derive(Default)]
pub(super) struct Turns {
    now: Mutex<Now>,
    /// A turn or the thread has ended.
    changed: Condvar,
}

#[derive(Default)]
struct Now {
    /// The device whose turn it is, or was last.
    device: Option<Arc<VfioPciDevice>>,
    /// Number of that turn.
    turn: usize,
    stay: Stay,
}

/// Why not all calls were made.
pub(super) enum Unmade {
    /// That of this turn has not returned. The device is left, and reported as lost to the guest.
    Hangs(usize, PassthroughError),
    /// There is no thread for them.
    NoThread(io::Error),
}

impl From<Unmade> for PassthroughError {
    fn from(unmade: Unmade) -> Self {
        match unmade {
            Unmade::Hangs(_, hangs) => hangs,
            Unmade::NoThread(error) => Self::NoThread(error),
        }
    }
}

impl Turns {
    /// Makes a call of a device on this thread. `None` once the thread is left behind: then it has to end.
    pub(super) fn take<T>(
        &self,
        turn: usize,
        device: &Arc<VfioPciDevice>,
        call: impl FnOnce(&VfioPciDevice) -> T,
    ) -> Option<T> {
        let mut now = self.now.lock();
        if now.stay.is_left {
            return None;
        }
        (now.device, now.turn) = (Some(Arc::clone(device)), turn);
        now.stay.called = Some(Instant::now());
        drop(now);
        let made = call(device);
        let mut now = self.now.lock();
        now.stay.called = None;
        (!now.stay.is_left).then_some(made)
    }

    /// Waits until the thread has ended, or a call takes too long.
    fn await_end(
        &self,
        patience: &Patience<'_>,
        reporter: &LossReporter,
    ) -> Result<(), (usize, PassthroughError)> {
        let Patience { limits, until, is_cancelled } = patience;
        let mut cancelled_at = None;
        let mut now = self.now.lock();
        while !now.stay.has_ended {
            if cancelled_at.is_none() && is_cancelled() {
                cancelled_at = Some(Instant::now());
            }
            let is_awaited = |since: Instant| since.elapsed() < limits.leave;
            let limit = if until.is_some_and(|until| Instant::now() >= until) {
                Duration::ZERO
            } else if cancelled_at.is_none_or(is_awaited) {
                limits.call
            } else {
                limits.call.min(limits.leave)
            };
            if let (Some(waited), Some(device)) = (now.stay.hangs(limit), now.device.clone()) {
                let turn = now.turn;
                now.stay.leave(device.id());
                drop(now);
                return Err((turn, leave(&device, waited, reporter)));
            }
            self.changed.wait_for(&mut now, POLL_INTERVAL);
        }
        Ok(())
    }
}

/// Leaves the device to the thread of its call, and reports it as lost to the guest. Does not wait for it.
fn leave(
    device: &Arc<VfioPciDevice>,
    waited: Duration,
    reporter: &LossReporter,
) -> PassthroughError {
    let (id, doing) = (device.id().to_owned(), device.leave());
    let hangs = PassthroughError::Hangs { id, doing, waited_s: waited.as_secs() };
    reporter.report(device, &hangs);
    hangs
}

/// Says that the thread has ended, also if it has panicked.
struct EndOfThread(Arc<Turns>, LossReporter);

impl Drop for EndOfThread {
    fn drop(&mut self) {
        let Self(turns, reporter) = self;
        let mut now = turns.now.lock();
        let device = now.device.take();
        now.stay.end(device.as_ref().map_or("", |device| device.id()));
        let is_left = now.stay.is_left;
        drop(now);
        turns.changed.notify_all();
        if let Some(device) = device.filter(|_| is_left) {
            // Its call has returned, and it was reset here.
            reporter.report_here(&device, &vfio::migration::MigrationError::Left);
        }
    }
}

/// Makes the calls of `work` on a thread of its own, each in a turn, and waits for them. Each of `work`'s calls of a device
/// must be in a turn.
///
/// # Errors
/// A call takes too long, or there is no thread.
pub(super) fn call_apart<T: Send + 'static>(
    patience: &Patience<'_>,
    reporter: &LossReporter,
    work: impl FnOnce(&Turns) -> T + Send + 'static,
) -> Result<T, Unmade> {
    let turns = Arc::new(Turns::default());
    let end = EndOfThread(Arc::clone(&turns), reporter.clone());
    let calls = move || {
        let end = end;
        work(&end.0)
    };
    let thread: JoinHandle<T> =
        stoppable_thread::spawn("mig-state", calls).map_err(Unmade::NoThread)?;
    let ended = turns.await_end(patience, reporter);
    ended.map_err(|(turn, hangs)| Unmade::Hangs(turn, hangs))?;
    Ok(thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
}

/// Makes a call of one device in the same way.
///
/// # Errors
/// As [`call_apart`].
pub(super) fn call_one<T: Send + 'static>(
    device: &Arc<VfioPciDevice>,
    patience: &Patience<'_>,
    reporter: &LossReporter,
    call: impl FnOnce(&VfioPciDevice) -> T + Send + 'static,
) -> Result<T, PassthroughError> {
    let device = Arc::clone(device);
    match call_apart(patience, reporter, move |turns| turns.take(0, &device, call))? {
        Some(made) => Ok(made),
        // `take` gives none to a thread that was left alone, and then `call_apart` has failed.
        None => unreachable!("a thread that was not left has made its call"),
    }
}
