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

/// Granularity of the DMA log in bytes: a guest page.
pub const LOG_PAGE_BYTES: u64 = 4096;

/// Migration states of a function, named as in the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum DeviceState {
    /// Failed; only a reset helps.
    Error = ERROR,
    /// Stopped; the state does not change.
    Stop = STOP,
    /// Running.
    Running = RUNNING,
    /// Stopped, with the state readable.
    StopCopy = STOP_COPY,
    /// Stopped, accepting a state.
    Resuming = RESUMING,
    /// Running, without starting DMA to other functions.
    RunningP2p = RUNNING_P2P,
    /// Running, with a part of the state readable.
    PreCopy = PRE_COPY,
    /// `PreCopy` and `RunningP2p` combined.
    PreCopyP2p = PRE_COPY_P2P,
}

impl DeviceState {
    /// The state for the kernel's number.
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

/// Migration support of a function and its host driver.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MigrationSupport {
    /// It can be stopped, and its state read and restored elsewhere; required.
    pub stop_copy: bool,
    /// It can be p2p-quiesced before it is stopped.
    pub p2p: bool,
    /// A part of the state can be read while it runs.
    pub pre_copy: bool,
}

impl MigrationSupport {
    /// From the kernel's flags.
    pub fn from_flags(flags: u64) -> Self {
        let has = |flag: u32| flags & u64::from(flag) != 0;
        Self {
            stop_copy: has(VFIO_MIGRATION_STOP_COPY),
            p2p: has(VFIO_MIGRATION_P2P),
            pre_copy: has(VFIO_MIGRATION_PRE_COPY),
        }
    }
}

/// The migration interface of a function. Each method is one call to the kernel.
pub trait MigrationPort: Send + Sync {
    /// The migration support; `None` if the driver has none.
    ///
    /// # Errors
    /// The kernel's error.
    fn migration_support(&self) -> io::Result<Option<MigrationSupport>>;
    /// Changes the state. Entering `StopCopy` or `Resuming` opens a data stream; leaving them closes it.
    ///
    /// # Errors
    /// The kernel's error. The function may be in any state then, see [`Self::device_state`].
    fn set_device_state(&self, state: DeviceState) -> io::Result<()>;
    /// The number of the current state.
    ///
    /// # Errors
    /// The kernel's error.
    fn device_state(&self) -> io::Result<u32>;
    /// Estimated length of the state in bytes.
    ///
    /// # Errors
    /// The kernel does not know.
    fn state_len_bytes(&self) -> io::Result<u64>;
    /// Reads the next bytes of the stream; zero at its end.
    ///
    /// # Errors
    /// There is no stream, or the function cannot save its state.
    fn read_state(&self, buffer: &mut [u8]) -> io::Result<usize>;
    /// Writes all of `data` to the stream.
    ///
    /// # Errors
    /// There is no stream, or the function refuses the state.
    fn write_state(&self, data: &[u8]) -> io::Result<()>;
    /// Starts to log DMA writes to these guest physical ranges.
    ///
    /// # Errors
    /// Not supported, or not for ranges of this size.
    fn start_dma_log(&self, ranges: &[Range<u64>]) -> io::Result<()>;
    /// Reads and clears the log: a bit for each page of [`LOG_PAGE_BYTES`].
    ///
    /// # Errors
    /// The kernel's error; the writes are unknown then.
    fn take_dma_log(&self, range: &Range<u64>) -> io::Result<Vec<u64>>;
    /// Stops the log.
    ///
    /// # Errors
    /// The kernel's error.
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
