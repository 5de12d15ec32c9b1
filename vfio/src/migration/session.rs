// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The state machine of VFIO migration v2 for one function.
//!
//! Owns the current state, and the only transitions to others. Never guesses: after a failed
//! step the kernel is asked for the function's state, and if that is unknown the function counts as failed. A call into the
//! kernel may never return, with the state locked: once the function is left to the thread of that call ([`Migration::leave`])
//! nothing waits for it any more.
//!
//! ```text
//!   RUNNING <-> RUNNING_P2P <-> STOP <-> STOP_COPY   its state is read
//!                                 ^----> RESUMING    its state is loaded
//! ```
//!
//! Functions of one VM may reach each other, so all of them are in `RUNNING_P2P` before the first
//! stops, and before the first works again. Those that do not support that state skip it.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use log::warn;
use parking_lot::{Mutex, MutexGuard};

use super::error::{MigrationError, NotMigratable};
use super::port::{DeviceState, MigrationPort, MigrationSupport};
use super::saved::HardwareState;

/// Maximum length in bytes of a function's state that is kept with the other state: in a snapshot, and on the way to an
/// older destination. All states are one document of at most 256 MiB there, in base64, with those of vCPUs and devices.
pub const STATE_LEN_BYTES_MAX: u64 = 128 << 20;

/// Bytes of a state read at a time.
const READ_BYTES: usize = 1 << 20;

/// How often a wait for the call of another thread looks whether the function was left to it.
const LEFT_LOOK: Duration = Duration::from_millis(50);

/// A call into the kernel that waits for the function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    /// A transition.
    Go {
        /// State before it.
        from: DeviceState,
        /// State after it.
        to: DeviceState,
    },
    /// Reading a part of its state.
    Read {
        /// Bytes read before.
        read_bytes: u64,
    },
    /// Writing a part of its state.
    Write {
        /// Length of the part in bytes.
        len_bytes: u64,
        /// Bytes written before.
        written_bytes: u64,
    },
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Go { from, to } => write!(f, "its way from state {from} to {to}"),
            Self::Read { read_bytes } => {
                write!(f, "reading its state beyond the first {read_bytes} bytes")
            }
            Self::Write { len_bytes, written_bytes } => {
                write!(f, "writing {len_bytes} bytes of its state after {written_bytes} others")
            }
        }
    }
}

/// The migration state machine of one function.
pub struct Migration {
    id: String,
    port: Arc<dyn MigrationPort>,
    support: Result<MigrationSupport, NotMigratable>,
    /// Last known state. Locked during a transition, and while a part of the function's state is read or written.
    state: Mutex<DeviceState>,
    /// Bytes that were written since it began to take a state; changed with `state` locked.
    written_bytes: AtomicU64,
    /// The current call into the kernel. Locked for one access.
    call: Mutex<Option<Call>>,
    /// Left to the thread of that call. Never unset: what the call did to the function is not known.
    is_left: AtomicBool,
}

impl Migration {
    /// For a function that was just opened; sets it running, as not every host driver does that itself
    /// after the process that stopped it has exited.
    pub fn new(id: &str, port: Arc<dyn MigrationPort>) -> Self {
        let support = match port.migration_support() {
            Ok(Some(support)) if support.stop_copy => Ok(support),
            Ok(Some(_)) => Err(NotMigratable::NoStopCopy),
            Ok(None) => Err(NotMigratable::Unsupported),
            Err(error) => Err(NotMigratable::Unknown(Arc::new(error))),
        };
        let found = support.as_ref().ok().and_then(|_| port.device_state().ok());
        let state = found.and_then(DeviceState::from_number).unwrap_or(DeviceState::Running);
        let (id_here, written_bytes) = (id.to_owned(), AtomicU64::new(0));
        let (state_here, call, is_left) =
            (Mutex::new(state), Mutex::new(None), AtomicBool::new(false));
        let this =
            Self { id: id_here, port, support, state: state_here, written_bytes, call, is_left };
        if let Err(error) = this.run() {
            let error = error_text::chain(&error);
            warn!("passed-through device {id} was found in {state}, and stays there: {error}");
        }
        this
    }

    /// The migration support.
    ///
    /// # Errors
    /// The function cannot be migrated.
    pub fn support(&self) -> Result<MigrationSupport, &NotMigratable> {
        self.support.as_ref().copied()
    }

    /// Leaves the function to the thread whose call into the kernel does not return: nothing waits for it from now on, and all
    /// later steps are refused.
    pub fn leave(&self) {
        self.is_left.store(true, Ordering::SeqCst);
    }

    /// The current call into the kernel.
    pub fn call(&self) -> Option<Call> {
        *self.call.lock()
    }

    /// Whether it was left.
    pub fn is_left(&self) -> bool {
        self.is_left.load(Ordering::SeqCst)
    }

    /// Waits until no other thread makes a step, unless the function is left to one.
    fn locked(&self) -> Result<MutexGuard<'_, DeviceState>, MigrationError> {
        loop {
            let state = self.state.try_lock_for(LEFT_LOOK);
            if self.is_left() {
                return Err(MigrationError::Left);
            }
            if let Some(state) = state {
                return Ok(state);
            }
        }
    }

    /// Makes a call into the kernel, with the state locked.
    fn calling<T>(&self, call: Call, body: impl FnOnce() -> T) -> T {
        *self.call.lock() = Some(call);
        let done = body();
        *self.call.lock() = None;
        done
    }

    /// Whether the function is stopped. Of one that was left nothing is known.
    pub fn is_stopped(&self) -> bool {
        let works = |state: MutexGuard<'_, DeviceState>| {
            matches!(*state, DeviceState::Running | DeviceState::RunningP2p)
        };
        self.locked().is_ok_and(|state| !works(state))
    }

    /// Whether this is the function's state, as far as that is known without waiting for another thread.
    pub fn is_known_in(&self, state: DeviceState) -> bool {
        !self.is_left() && self.state.try_lock().is_some_and(|now| *now == state)
    }

    /// Enters `RunningP2p`. No effect if the function is stopped or does not support it.
    ///
    /// # Errors
    /// As [`Self::go`].
    pub fn quiesce(&self) -> Result<(), MigrationError> {
        let mut state = self.locked()?;
        if *state == DeviceState::Running && self.has_p2p() {
            self.go(&mut state, DeviceState::RunningP2p)?;
        }
        Ok(())
    }

    /// Stops the function. No effect on one that cannot be migrated.
    ///
    /// # Errors
    /// As [`Self::go`].
    pub fn stop(&self) -> Result<(), MigrationError> {
        if self.support.is_err() {
            return Ok(());
        }
        self.go(&mut *self.locked()?, DeviceState::Stop)
    }

    /// Leaves the stopped state for `RunningP2p`, if supported. No effect if the function runs.
    ///
    /// # Errors
    /// As [`Self::go`].
    pub fn wake(&self) -> Result<(), MigrationError> {
        let mut state = self.locked()?;
        if *state != DeviceState::Running && self.has_p2p() {
            self.go(&mut state, DeviceState::RunningP2p)?;
        }
        Ok(())
    }

    /// Sets the function running. No effect if it runs.
    ///
    /// # Errors
    /// As [`Self::go`].
    pub fn run(&self) -> Result<(), MigrationError> {
        self.go(&mut *self.locked()?, DeviceState::Running)
    }

    /// Records a reset, after which the function runs. A thread in a step learns of it from the kernel.
    pub fn was_reset(&self) {
        if let Some(mut state) = self.state.try_lock() {
            *state = DeviceState::Running;
        }
    }

    /// Estimated length of the state in bytes; zero if it has none.
    pub fn estimated_len_bytes(&self) -> u64 {
        // The kernel's answer would wait for the call.
        let is_known = self.support.is_ok() && !self.is_left();
        if is_known { self.port.state_len_bytes().unwrap_or(0) } else { 0 }
    }

    /// Reads the state whole. The function must be stopped, and stays so.
    ///
    /// # Errors
    /// It is not stopped, the state cannot be read, or it is too long.
    pub fn save(&self) -> Result<Vec<u8>, MigrationError> {
        self.begin_save()?;
        let data = self.read();
        let back = self.end_save();
        // The read error is more helpful than that of the transition back.
        let data = data?;
        back.map(|()| data)
    }

    /// Begins to read the state in parts. The function must be stopped, and can be nothing else before
    /// [`Self::end_save`].
    ///
    /// # Errors
    /// It is not stopped, or as [`Self::go`].
    pub fn begin_save(&self) -> Result<(), MigrationError> {
        let mut state = self.locked()?;
        needs(*state, DeviceState::Stop)?;
        self.go(&mut state, DeviceState::StopCopy)
    }

    /// Reads the next bytes of the state, which follow `read_bytes` others; none at its end.
    ///
    /// # Errors
    /// The state cannot be read.
    pub fn read_part(&self, part: &mut [u8], read_bytes: u64) -> Result<usize, MigrationError> {
        let state = self.locked()?;
        needs(*state, DeviceState::StopCopy)?;
        loop {
            match self.calling(Call::Read { read_bytes }, || self.port.read_state(part)) {
                Err(error)
                    if error.kind() == std::io::ErrorKind::Interrupted && !self.is_left() => {}
                read => return read.map_err(|source| MigrationError::Read { read_bytes, source }),
            }
        }
    }

    /// Ends the reading, after which the function is stopped as before. No effect if it has left that state meanwhile.
    ///
    /// # Errors
    /// As [`Self::go`].
    pub fn end_save(&self) -> Result<(), MigrationError> {
        let mut state = self.locked()?;
        if *state == DeviceState::StopCopy {
            return self.go(&mut state, DeviceState::Stop);
        }
        Ok(())
    }

    /// Refuses a function that is not stopped.
    ///
    /// # Errors
    /// Its state.
    pub fn check_stopped(&self) -> Result<(), MigrationError> {
        needs(*self.locked()?, DeviceState::Stop)
    }

    fn read(&self) -> Result<Vec<u8>, MigrationError> {
        let mut data = Vec::new();
        let mut part = vec![0; READ_BYTES];
        loop {
            let read_bytes = data.len() as u64;
            let len = self.read_part(&mut part, read_bytes)?;
            if len == 0 {
                return Ok(data);
            }
            if read_bytes + len as u64 > STATE_LEN_BYTES_MAX {
                return Err(MigrationError::TooLong { limit_bytes: STATE_LEN_BYTES_MAX });
            }
            data.extend_from_slice(part.get(..len).unwrap_or(&part));
        }
    }

    /// Begins to take a state. The function must be stopped; all guest memory must be mapped.
    ///
    /// # Errors
    /// It is not stopped, or as [`Self::go`].
    pub fn begin_load(&self) -> Result<(), MigrationError> {
        let mut state = self.locked()?;
        needs(*state, DeviceState::Stop)?;
        self.go(&mut state, DeviceState::Resuming)?;
        self.written_bytes.store(0, Ordering::Relaxed);
        Ok(())
    }

    /// Writes the next bytes of a state.
    ///
    /// # Errors
    /// The function takes none, or refuses these; it is unusable then.
    pub fn write_part(&self, part: &[u8]) -> Result<(), MigrationError> {
        let state = self.locked()?;
        needs(*state, DeviceState::Resuming)?;
        let written_bytes = self.written_bytes.load(Ordering::Relaxed);
        let len_bytes = part.len() as u64;
        let wrote =
            self.calling(Call::Write { len_bytes, written_bytes }, || self.port.write_state(part));
        wrote.map_err(|source| MigrationError::Write { len_bytes, written_bytes, source })?;
        self.written_bytes.store(written_bytes.saturating_add(len_bytes), Ordering::Relaxed);
        Ok(())
    }

    /// Ends a state of this length; `complete` runs before the function has accepted it. The function is stopped then.
    ///
    /// # Errors
    /// Another number of bytes was written, or it refuses the state; it is unusable then.
    pub fn end_load(
        &self,
        len_bytes: u64,
        complete: impl FnOnce() -> Result<(), MigrationError>,
    ) -> Result<(), MigrationError> {
        let mut state = self.locked()?;
        needs(*state, DeviceState::Resuming)?;
        let written_bytes = self.written_bytes.load(Ordering::Relaxed);
        if written_bytes != len_bytes {
            return Err(MigrationError::Incomplete { written_bytes, len_bytes });
        }
        complete()?;
        // The function reports only here whether the state is valid.
        self.go(&mut state, DeviceState::Stop)
    }

    /// Takes a state whole: all of it was written already, or it is here. The function is stopped then.
    ///
    /// # Errors
    /// As the steps of it.
    pub fn load(
        &self,
        state: &HardwareState,
        complete: impl FnOnce() -> Result<(), MigrationError>,
    ) -> Result<(), MigrationError> {
        match state {
            HardwareState::Here(data) => {
                self.begin_load()?;
                self.write_part(data)?;
                self.end_load(data.len() as u64, complete)
            }
            HardwareState::Apart { len_bytes } => self.end_load(*len_bytes, complete),
        }
    }

    fn has_p2p(&self) -> bool {
        self.support.as_ref().is_ok_and(|support| support.p2p)
    }

    /// Makes one transition, if needed.
    ///
    /// # Errors
    /// The kernel refuses, or the function has failed.
    fn go(&self, state: &mut DeviceState, to: DeviceState) -> Result<(), MigrationError> {
        let from = *state;
        if from == to {
            return Ok(());
        }
        let go = || {
            let done = self.port.set_device_state(to);
            done.map_err(|error| (error, self.port.device_state().ok()))
        };
        let Err((source, now)) = self.calling(Call::Go { from, to }, go) else {
            *state = to;
            return Ok(());
        };
        let now = now.and_then(DeviceState::from_number);
        *state = now.unwrap_or(DeviceState::Error);
        if *state == DeviceState::Error {
            warn!("passed-through device {} has failed between {from} and {to}", self.id);
            return Err(MigrationError::Failed { from, to, source });
        }
        Err(MigrationError::Refused { from, to, now: *state, source })
    }
}

fn needs(now: DeviceState, needed: DeviceState) -> Result<(), MigrationError> {
    if now == needed { Ok(()) } else { Err(MigrationError::Order { now, needed }) }
}
