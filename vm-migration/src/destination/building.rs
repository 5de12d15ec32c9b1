// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Builds the machine on a separate thread while memory arrives, or once its state has arrived.
//!
//! Owns that thread. The receive loop polls its result together with the connections, so that the source
//! learns of a missing back end while its guest still runs. Dropping it waits a bounded time for the thread,
//! so that taps, sockets and KVM are closed before the next migration begins. A thread that is blocked on a
//! file of this host is detached after that; it drops what it has built as soon as it returns.

use std::os::fd::AsRawFd;
use std::panic::resume_unwind;
use std::thread::JoinHandle;
use std::time::Duration;

use super::negotiate::read;
use crate::cancel::Cancel;
use crate::channel::Channel;
use crate::error::{Cause, Failure, Step};
use crate::transport::{TransportError, WaitEnd, wait_readable, wait_readable_or_left};
use crate::vm::{MappedMachine, VmError};

const STEP: &str = "building the machine at the destination";

/// How long the end of a migration waits for a machine that is still being built.
const END_TIMEOUT: Duration = Duration::from_secs(3);

/// A machine that a thread is building.
pub(crate) struct Building<V> {
    work: Work<V>,
    /// Readable once the thread has ended.
    ended: Cancel,
    /// Readable once building has failed.
    failed: Cancel,
    /// The machine is not needed any more.
    unwanted: Cancel,
}

/// Builds a machine from its state.
type FromState<V> = Box<dyn FnOnce(&[u8]) -> Result<V, VmError> + Send>;

enum Work<V> {
    Thread(JoinHandle<Result<V, Cause>>),
    Here(Result<V, Cause>),
    /// Begins when the state has come.
    Deferred(FromState<V>),
    Taken,
}

impl<V: Send + 'static> Building<V> {
    /// Starts the thread that builds the machine and, with `until_ready`, waits until it can take its state.
    pub(crate) fn start<M: MappedMachine<Vm = V>>(
        mapped: M,
        until_ready: bool,
    ) -> Result<Self, Failure>
    where
        V: crate::vm::DestinationVm,
    {
        let mut building = Self::with(Work::Taken)?;
        building.spawn(move || mapped.build(), until_ready)?;
        Ok(building)
    }

    /// A machine whose building waits for its state: see [`begin_from`](Self::begin_from).
    pub(crate) fn deferred<M: MappedMachine<Vm = V>>(mapped: M) -> Result<Self, Failure> {
        Self::with(Work::Deferred(Box::new(move |state| mapped.build_from_state(state))))
    }

    /// Starts the thread of a machine that has waited for this state. The state of any other machine is returned.
    pub(crate) fn begin_from(&mut self, state: Vec<u8>) -> Result<Option<Vec<u8>>, Failure>
    where
        V: crate::vm::DestinationVm,
    {
        match std::mem::replace(&mut self.work, Work::Taken) {
            Work::Deferred(build) => {
                self.spawn(move || build(&state), true)?;
                Ok(None)
            }
            other => {
                self.work = other;
                Ok(Some(state))
            }
        }
    }

    fn spawn(
        &mut self,
        build: impl FnOnce() -> Result<V, VmError> + Send + 'static,
        until_ready: bool,
    ) -> Result<(), Failure>
    where
        V: crate::vm::DestinationVm,
    {
        let body = {
            let Self { ended, failed, unwanted, .. } = self;
            let (ended, failed, unwanted) = (ended.clone(), failed.clone(), unwanted.clone());
            move || {
                let build = || {
                    let vm = build()?;
                    if until_ready {
                        vm.await_ready(&|| unwanted.is_cancelled())?;
                    }
                    Ok(vm)
                };
                let result = build().map_err(Cause::Vm);
                if result.is_err() {
                    failed.cancel();
                }
                ended.cancel();
                result
            }
        };
        let thread = stoppable_thread::spawn("mig-build", body);
        self.work = Work::Thread(thread.map_err(Cause::Resource).step(STEP)?);
        Ok(())
    }

    /// A machine that is built already.
    pub(crate) fn done(vm: V) -> Result<Self, Failure> {
        let building = Self::with(Work::Here(Ok(vm)))?;
        building.ended.cancel();
        Ok(building)
    }

    fn with(work: Work<V>) -> Result<Self, Failure> {
        let event = || Cancel::new().map_err(Cause::Resource).step(STEP);
        Ok(Self { work, ended: event()?, failed: event()?, unwanted: event()? })
    }

    /// Readable once building has failed.
    pub(crate) fn failed(&self) -> &Cancel {
        &self.failed
    }

    /// Waits until the machine is built or building has failed, a cancel comes, or the source, which waits
    /// for an answer on `control`, has closed the connection. Storage that does not respond may block the
    /// thread forever, so the wait can end before it does.
    pub(crate) fn wait(&self, control: &mut Channel, cancel: &Cancel) -> Result<(), Failure> {
        self.wait_telling(control, false, cancel)
    }

    /// The same; with `told` the source expects keep-alives until it has its answer, and gets them.
    pub(crate) fn wait_telling(
        &self,
        control: &mut Channel,
        told: bool,
        cancel: &Cancel,
    ) -> Result<(), Failure> {
        let connection = control.connection.as_raw_fd();
        let wait = || wait_readable_or_left(self.ended.fd(), connection, cancel, None);
        match control.busy(told, wait) {
            Ok(WaitEnd::Cancelled) => Err(Cause::Cancelled).step(STEP),
            Ok(WaitEnd::Ready(1)) => Err(last_word(control)),
            Ok(_) => Ok(()),
            Err(error) => Err(TransportError::io("waiting")(error)).step(STEP),
        }
    }

    /// The machine; waits for the thread.
    pub(crate) fn finish(&mut self) -> Result<V, Failure> {
        match std::mem::replace(&mut self.work, Work::Taken) {
            Work::Thread(thread) => thread.join().unwrap_or_else(|panic| resume_unwind(panic)),
            Work::Here(result) => result,
            Work::Deferred(_) | Work::Taken => unreachable!("a machine is begun, and taken once"),
        }
        .step(STEP)
    }
}

/// Why the source has closed the connection: its own reason, if it sent one.
fn last_word(control: &mut Channel) -> Failure {
    // The source has closed the connection, so this loop ends: with its reason, which follows what it had
    // sent before, or without one.
    loop {
        if let Err(failure) = read(control, STEP) {
            return failure;
        }
    }
}

impl<V> Drop for Building<V> {
    fn drop(&mut self) {
        let Work::Thread(thread) = std::mem::replace(&mut self.work, Work::Taken) else { return };
        self.unwanted.cancel();
        // Nothing can cancel this wait: the migration has ended already.
        let waited = Cancel::new()
            .and_then(|never| wait_readable(&[self.ended.fd()], &never, Some(END_TIMEOUT)));
        if let Ok(WaitEnd::Ready(_)) = waited {
            // A failure of the thread has been reported, or does not matter any more.
            let _ = thread.join();
        } else {
            log::warn!(
                "a machine that is no longer needed is still being built, and is released afterwards: \
                 what it has opened stays open until then"
            );
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a failing unwrap fails the test")]
    use std::io::Write as _;
    use std::os::unix::net::UnixStream;

    use super::*;
    use crate::protocol::message::Message;
    use crate::transport::Connection;

    #[test]
    fn the_word_of_a_source_that_is_gone_is_heard_behind_other_messages() {
        let word = |said: &[Message]| {
            let (ours, mut theirs) = UnixStream::pair().unwrap();
            let never = Cancel::new().unwrap();
            let mut control = Channel::new(Connection::over(ours, &never, END_TIMEOUT).unwrap());
            let said = said.iter().flat_map(Message::encode).collect::<Vec<_>>();
            theirs.write_all(&said).unwrap();
            drop(theirs);
            last_word(&mut control).cause
        };
        let why = "a cancel has come".to_string();
        let before = [Message::State(b"{}".to_vec()), Message::Complete];
        let cause = word(&[&before[..], &[Message::Abandon(why.clone())]].concat());
        assert!(matches!(&cause, Cause::Abandoned(heard) if *heard == why), "{cause:?}");
        let cause = word(&before);
        assert!(!matches!(cause, Cause::Abandoned(_)), "{cause:?}");
    }
}
