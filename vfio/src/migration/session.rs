// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The state machine of VFIO migration v2 for one function.
//!
//! Owns the current state, and the only transitions to others. Never guesses: after a failed
//! step the kernel is asked for the function's state, and if that is unknown the function counts as failed.
//!
//! ```text
//!   RUNNING <-> RUNNING_P2P <-> STOP <-> STOP_COPY   its state is read
//!                                 ^----> RESUMING    its state is loaded
//! ```
//!
//! Functions of one VM may reach each other, so all of them are in `RUNNING_P2P` before the first
//! stops, and before the first works again. Those that do not support that state skip it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use log::warn;
use parking_lot::Mutex;

use super::error::{MigrationError, NotMigratable};
use super::port::{DeviceState, MigrationPort, MigrationSupport};
use super::saved::HardwareState;

/// Maximum length in bytes of a function's state that is kept with the other state: in a snapshot, and on the way to an
/// older destination. All states are one document of at most 256 MiB there, in base64, with those of vCPUs and devices.
pub const STATE_LEN_BYTES_MAX: u64 = 128 << 20;

/// Bytes of a state read at a time.
const READ_BYTES: usize = 1 << 20;

/// The migration state machine of one function.
pub struct Migration {
    id: String,
    port: Arc<dyn MigrationPort>,
    support: Result<MigrationSupport, NotMigratable>,
    /// Last known state. Locked during a transition, and while a part of the function's state is read or written.
    state: Mutex<DeviceState>,
    /// Bytes that were written since it began to take a state; changed with `state` locked.
    written_bytes: AtomicU64,
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
        let this = Self { id: id_here, port, support, state: Mutex::new(state), written_bytes };
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

    /// Whether the function is stopped.
    pub fn is_stopped(&self) -> bool {
        !matches!(*self.state.lock(), DeviceState::Running | DeviceState::RunningP2p)
    }

    /// Enters `RunningP2p`. No effect if the function is stopped or does not support it.
    ///
    /// # Errors
    /// As [`Self::go`].
    pub fn quiesce(&self) -> Result<(), MigrationError> {
        let mut state = self.state.lock();
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
        self.go(&mut self.state.lock(), DeviceState::Stop)
    }

    /// Leaves the stopped state for `RunningP2p`, if supported. No effect if the function runs.
    ///
    /// # Errors
    /// As [`Self::go`].
    pub fn wake(&self) -> Result<(), MigrationError> {
        let mut state = self.state.lock();
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
        self.go(&mut self.state.lock(), DeviceState::Running)
    }

    /// Records a reset, after which the function runs.
    pub fn was_reset(&self) {
        *self.state.lock() = DeviceState::Running;
    }

    /// Estimated length of the state in bytes; zero if it has none.
    pub fn estimated_len_bytes(&self) -> u64 {
        if self.support.is_err() { 0 } else { self.port.state_len_bytes().unwrap_or(0) }
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
        let mut state = self.state.lock();
        needs(*state, DeviceState::Stop)?;
        self.go(&mut state, DeviceState::StopCopy)
    }

    /// Reads the next bytes of the state, which follow `read_bytes` others; none at its end.
    ///
    /// # Errors
    /// The state cannot be read.
    pub fn read_part(&self, part: &mut [u8], read_bytes: u64) -> Result<usize, MigrationError> {
        let state = self.state.lock();
        needs(*state, DeviceState::StopCopy)?;
        loop {
            match self.port.read_state(part) {
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                read => return read.map_err(|source| MigrationError::Read { read_bytes, source }),
            }
        }
    }

    /// Ends the reading, after which the function is stopped as before. No effect if it has left that state meanwhile.
    ///
    /// # Errors
    /// As [`Self::go`].
    pub fn end_save(&self) -> Result<(), MigrationError> {
        let mut state = self.state.lock();
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
        needs(*self.state.lock(), DeviceState::Stop)
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
        let mut state = self.state.lock();
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
        let state = self.state.lock();
        needs(*state, DeviceState::Resuming)?;
        let written_bytes = self.written_bytes.load(Ordering::Relaxed);
        let len_bytes = part.len() as u64;
        self.port.write_state(part).map_err(|source| MigrationError::Write {
            len_bytes,
            written_bytes,
            source,
        })?;
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
        let mut state = self.state.lock();
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
        let Err(source) = self.port.set_device_state(to) else {
            *state = to;
            return Ok(());
        };
        let now = self.port.device_state().ok().and_then(DeviceState::from_number);
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
