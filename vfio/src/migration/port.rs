// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The interface to a host function's migration support (VFIO migration v2).
//!
//! Owns the trait that a host function and the tests' fake implement, and the names of its
//! states. Does not check their order: [`super::Migration`] does.

use std::fmt;
use std::io;
use std::ops::Range;

use vfio_bindings::bindings::vfio::{
    VFIO_MIGRATION_P2P, VFIO_MIGRATION_PRE_COPY, VFIO_MIGRATION_STOP_COPY,
    vfio_device_mig_state_VFIO_DEVICE_STATE_ERROR as ERROR,
    vfio_device_mig_state_VFIO_DEVICE_STATE_PRE_COPY as PRE_COPY,
    vfio_device_mig_state_VFIO_DEVICE_STATE_PRE_COPY_P2P as PRE_COPY_P2P,
    vfio_device_mig_state_VFIO_DEVICE_STATE_RESUMING as RESUMING,
    vfio_device_mig_state_VFIO_DEVICE_STATE_RUNNING as RUNNING,
    vfio_device_mig_state_VFIO_DEVICE_STATE_RUNNING_P2P as RUNNING_P2P,
    vfio_device_mig_state_VFIO_DEVICE_STATE_STOP as STOP,
    vfio_device_mig_state_VFIO_DEVICE_STATE_STOP_COPY as STOP_COPY,
};

/// Grain of the log of a function's writes: a page of the guest.
pub const LOG_PAGE_BYTES: u64 = 4096;

/// States of a function, as the kernel names them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum DeviceState {
    /// It has failed; only a reset helps.
    Error = ERROR,
    /// It does nothing, and nothing in it changes.
    Stop = STOP,
    /// It works.
    Running = RUNNING,
    /// It does nothing, and its state can be read.
    StopCopy = STOP_COPY,
    /// It does nothing, and takes a state.
    Resuming = RESUMING,
    /// It answers others and begins nothing: no DMA to other functions.
    RunningP2p = RUNNING_P2P,
    /// It works, and a part of its state can be read.
    PreCopy = PRE_COPY,
    /// Both of the last two.
    PreCopyP2p = PRE_COPY_P2P,
}

impl DeviceState {
    /// The state that the kernel means by `number`.
    pub fn from_number(number: u32) -> Option<Self> {
        [
            Self::Error,
            Self::Stop,
            Self::Running,
            Self::StopCopy,
            Self::Resuming,
            Self::RunningP2p,
            Self::PreCopy,
            Self::PreCopyP2p,
        ]
        .into_iter()
        .find(|state| *state as u32 == number)
    }
}

impl fmt::Display for DeviceState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Error => "ERROR",
            Self::Stop => "STOP",
            Self::Running => "RUNNING",
            Self::StopCopy => "STOP_COPY",
            Self::Resuming => "RESUMING",
            Self::RunningP2p => "RUNNING_P2P",
            Self::PreCopy => "PRE_COPY",
            Self::PreCopyP2p => "PRE_COPY_P2P",
        })
    }
}

/// What a function and its driver on the host can do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MigrationSupport {
    /// It can be stopped, its state read, and put in elsewhere. Nothing works without.
    pub stop_copy: bool,
    /// It can stop to reach other functions before it stops altogether.
    pub p2p: bool,
    /// Part of its state can be read while it works.
    pub pre_copy: bool,
}

impl MigrationSupport {
    /// What the kernel's flags say.
    pub fn from_flags(flags: u64) -> Self {
        let has = |flag: u32| flags & u64::from(flag) != 0;
        Self {
            stop_copy: has(VFIO_MIGRATION_STOP_COPY),
            p2p: has(VFIO_MIGRATION_P2P),
            pre_copy: has(VFIO_MIGRATION_PRE_COPY),
        }
    }
}

/// The migration interface of a function. Every method is one question or order to the kernel.
pub trait MigrationPort: Send + Sync {
    /// What it can do; `None` if it knows nothing of migration.
    ///
    /// # Errors
    /// The kernel's answer.
    fn migration_support(&self) -> io::Result<Option<MigrationSupport>>;
    /// Brings it to a state. On the way to `StopCopy` and `Resuming` a stream of data is opened; on
    /// the way from there it is closed.
    ///
    /// # Errors
    /// The kernel's answer. It may be in any state then, see [`Self::device_state`].
    fn set_device_state(&self, state: DeviceState) -> io::Result<()>;
    /// The number of the state that it is in.
    ///
    /// # Errors
    /// The kernel's answer.
    fn device_state(&self) -> io::Result<u32>;
    /// How long its state may be, in bytes; an estimate.
    ///
    /// # Errors
    /// The kernel does not know.
    fn state_len_bytes(&self) -> io::Result<u64>;
    /// Reads on in the stream; zero at its end.
    ///
    /// # Errors
    /// There is no stream, or the function cannot give its state.
    fn read_state(&self, buffer: &mut [u8]) -> io::Result<usize>;
    /// Writes all of `data` to the stream.
    ///
    /// # Errors
    /// There is no stream, or the function does not take it.
    fn write_state(&self, data: &[u8]) -> io::Result<()>;
    /// Begins to log what it writes to these guest physical addresses.
    ///
    /// # Errors
    /// It cannot, or not for so much.
    fn start_dma_log(&self, ranges: &[Range<u64>]) -> io::Result<()>;
    /// Takes what was logged since the last time: a bit for each page of [`LOG_PAGE_BYTES`].
    ///
    /// # Errors
    /// The kernel's answer; what was written is not known any more then.
    fn take_dma_log(&self, range: &Range<u64>) -> io::Result<Vec<u64>>;
    /// Ends the log.
    ///
    /// # Errors
    /// The kernel's answer.
    fn stop_dma_log(&self) -> io::Result<()>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_the_kernels() {
        // include/uapi/linux/vfio.h
        assert_eq!(DeviceState::from_number(0), Some(DeviceState::Error));
        assert_eq!(DeviceState::from_number(1), Some(DeviceState::Stop));
        assert_eq!(DeviceState::from_number(5), Some(DeviceState::RunningP2p));
        assert_eq!(DeviceState::from_number(7), Some(DeviceState::PreCopyP2p));
        assert_eq!(DeviceState::from_number(8), None);
        let all = MigrationSupport { stop_copy: true, p2p: true, pre_copy: true };
        assert_eq!(MigrationSupport::from_flags(0b111), all);
        assert!(!MigrationSupport::from_flags(0b1).p2p);
    }
}
