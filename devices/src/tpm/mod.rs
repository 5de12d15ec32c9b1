// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A TPM 2.0 with a command response buffer, whose commands another process executes (swtpm).
//!
//! ```text
//! vCPU --> crb: registers and buffer --> thread `tpm` --> data socket --> emulator
//! VMM thread: power on, save, restore ------------------> control socket
//! ```
//!
//! A vCPU never waits for the emulator: it sets a bit, and the driver polls until the thread has cleared it. Everything
//! that the emulator says is bounded in length, and on the control socket in time. State of the TPM is in the
//! emulator; it is part of a saved VM ([`Tpm::save`]), so that a VM moves with its TPM. Must never know
//! where the registers are in the guest, nor interpret a command.

mod crb;
mod emulator;
#[cfg(any(test, feature = "testing"))]
mod fuzz;
mod state;
mod worker;

#[cfg(test)]
mod tests;

use std::io;
use std::net::Shutdown;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use stoppable_thread::StoppableThread;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::bus::BusDevice;
use crate::state::{DeviceSnapshot, StateError};
use crb::Crb;
pub use crb::{CRB_CONTROL_OFFSET, CRB_LEN_BYTES};
pub use emulator::EmulatorError;
use emulator::{Emulator, StateBlobs};
#[cfg(any(test, feature = "testing"))]
pub use fuzz::{fuzz, fuzz_state};
use state::{FORMAT, SavedTpm};
use worker::Worker;

/// How long a command may still run when the TPM is saved: the guest stands still meanwhile. Before that
/// [`Tpm::wait_until_idle`] has waited.
const SAVE_WITHIN: Duration = Duration::from_secs(3);

/// How often a wait for the end of a command looks whether it is still wanted.
const IDLE_POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Why a TPM cannot be made, started, saved or restored.
#[derive(Debug, thiserror::Error)]
pub enum TpmError {
    /// The emulator refuses, or does not answer.
    #[error("the TPM at {socket} cannot be used")]
    Emulator {
        /// Path of its socket.
        socket: String,
        /// What failed.
        #[source]
        source: EmulatorError,
    },
    /// A thread or descriptor was refused.
    #[error("the host refused a resource for the TPM")]
    Resource(#[source] io::Error),
    /// A command is still being executed.
    #[error("the TPM executes a command since more than {} s; try again when the guest has its result", SAVE_WITHIN.as_secs())]
    Busy,
    /// The emulator was lost while the guest ran.
    #[error("the connection to the TPM at {socket} was lost")]
    Lost {
        /// Path of its socket.
        socket: String,
    },
    /// A saved state is refused.
    #[error(transparent)]
    State(#[from] StateError),
}

/// Called once when the emulator is lost, with the reason.
pub type OnLost = Box<dyn Fn(&str) + Send + Sync>;

/// What vCPUs, the thread and the VMM thread share.
struct Shared {
    inner: Mutex<Inner>,
    /// Signalled when a command has ended.
    ended: Condvar,
    /// Signalled for the thread: there is a command, or it is to end.
    kick: EventFd,
    control: Mutex<Emulator>,
    on_lost: OnLost,
}

struct Inner {
    crb: Crb,
    /// To be passed on by the thread.
    command: Option<Vec<u8>>,
    is_lost: bool,
    is_ending: bool,
}

impl Shared {
    fn lose(&self, why: &str) {
        let mut inner = self.inner.lock();
        inner.crb.fail();
        let is_first = !std::mem::replace(&mut inner.is_lost, true);
        let is_news = is_first && !inner.is_ending;
        drop(inner);
        self.ended.notify_all();
        if is_news {
            (self.on_lost)(why);
        }
    }
}

/// The device.
pub struct Tpm {
    shared: Arc<Shared>,
    socket: String,
    _thread: StoppableThread,
}

impl Tpm {
    /// Connects to the emulator that listens at `socket`, which may begin to listen within a moment.
    /// The guest is told that its buffer is in the registers at `gpa`. The first answer may take longer than the others:
    /// the emulator may still execute a command of the guest before a reboot.
    ///
    /// # Errors
    /// It cannot be reached, or lacks what is needed.
    pub fn connect(
        socket: &Path,
        gpa: u64,
        on_lost: OnLost,
        first_answer_within: Duration,
        is_cancelled: &dyn Fn() -> bool,
    ) -> Result<Self, TpmError> {
        let name = socket.display().to_string();
        let of_emulator = |source| TpmError::Emulator { socket: name.clone(), source };
        let connected = Emulator::connect(socket, first_answer_within, is_cancelled);
        let (control, data) = connected.map_err(of_emulator)?;
        let own_control = control.handle().map_err(TpmError::Resource)?;
        let shared = Arc::new(Shared {
            inner: Mutex::new(Inner {
                crb: Crb::new(gpa),
                command: None,
                is_lost: false,
                is_ending: false,
            }),
            ended: Condvar::new(),
            kick: EventFd::new(EFD_NONBLOCK).map_err(TpmError::Resource)?,
            control: Mutex::new(control),
            on_lost,
        });
        let own_data = data.try_clone().map_err(TpmError::Resource)?;
        let worker = Worker::new(Arc::clone(&shared), data).map_err(TpmError::Resource)?;
        let own = Arc::clone(&shared);
        let stop = move || {
            own.inner.lock().is_ending = true;
            // The thread may wait for the rest of a response.
            let _ = own_data.shutdown(Shutdown::Both);
            let _ = own_control.shutdown(Shutdown::Both);
            // A full counter has woken the thread already.
            let _ = own.kick.write(1);
        };
        let thread = StoppableThread::spawn("tpm", stop, move || worker.run());
        Ok(Self { shared, socket: name, _thread: thread.map_err(TpmError::Resource)? })
    }

    /// Starts the TPM as at power on.
    ///
    /// # Errors
    /// The emulator refuses.
    pub fn power_on(&self) -> Result<(), TpmError> {
        self.shared.control.lock().power_on().map_err(|source| self.failed(source))
    }

    /// Waits, while the guest runs, until no command is being executed, for `within` at most.
    pub fn wait_until_idle(&self, within: Duration, is_cancelled: &dyn Fn() -> bool) {
        let until = Instant::now() + within;
        let mut inner = self.shared.inner.lock();
        while inner.crb.is_running() && !is_cancelled() && Instant::now() < until {
            let next = until.min(Instant::now() + IDLE_POLL_INTERVAL);
            self.shared.ended.wait_until(&mut inner, next);
        }
    }

    /// Saves registers, buffer and the emulator's state. The vCPUs are paused; a command that is being
    /// executed is waited for.
    ///
    /// # Errors
    /// The command takes longer than 3 s, or the emulator does not answer.
    pub fn save(&self) -> Result<DeviceSnapshot, TpmError> {
        let mut inner = self.shared.inner.lock();
        self.shared.ended.wait_while_for(
            &mut inner,
            |inner| inner.crb.is_running() && !inner.is_lost,
            SAVE_WITHIN,
        );
        if inner.is_lost {
            return Err(TpmError::Lost { socket: self.socket.clone() });
        }
        if inner.crb.is_running() {
            return Err(TpmError::Busy);
        }
        let registers = inner.crb.save();
        drop(inner);
        let blobs = self.shared.control.lock().state().map_err(|source| self.failed(source))?;
        Ok(FORMAT.encode(&SavedTpm::new(registers, blobs)))
    }

    /// Gives the emulator a saved state, which replaces its own, and starts it with that.
    ///
    /// # Errors
    /// The state is malformed, or the emulator refuses it.
    pub fn restore(&self, snapshot: &DeviceSnapshot) -> Result<(), TpmError> {
        let (registers, blobs): (_, StateBlobs) =
            FORMAT.decode::<SavedTpm>(snapshot)?.into_parts()?;
        self.shared.control.lock().restore(&blobs).map_err(|source| self.failed(source))?;
        let mut inner = self.shared.inner.lock();
        if inner.is_lost {
            return Err(TpmError::Lost { socket: self.socket.clone() });
        }
        inner.crb.restore(&registers);
        Ok(())
    }

    fn failed(&self, source: EmulatorError) -> TpmError {
        TpmError::Emulator { socket: self.socket.clone(), source }
    }
}

impl BusDevice for Tpm {
    fn read(&self, offset: u64, data: &mut [u8]) {
        self.shared.inner.lock().crb.read(offset, data);
    }

    fn write(&self, offset: u64, data: &[u8]) {
        let mut inner = self.shared.inner.lock();
        let Some(command) = inner.crb.write(offset, data) else { return };
        if inner.is_lost {
            inner.crb.fail();
            return;
        }
        inner.command = Some(command);
        drop(inner);
        let _ = self.shared.kick.write(1);
    }
}
