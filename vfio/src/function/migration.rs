// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Migration support of a function of the host, by the ioctls of VFIO migration v2.
//!
//! Owns how each question and order of [`MigrationPort`] becomes an ioctl, and the stream that a state has. Checks
//! no order, as the trait does not.

use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::ops::Range;
use std::os::fd::{AsFd as _, AsRawFd as _, FromRawFd as _};

use vfio_bindings::bindings::vfio::{
    VFIO_DEVICE_FEATURE_DMA_LOGGING_REPORT as LOG_REPORT,
    VFIO_DEVICE_FEATURE_DMA_LOGGING_START as LOG_START,
    VFIO_DEVICE_FEATURE_DMA_LOGGING_STOP as LOG_STOP, VFIO_DEVICE_FEATURE_GET as GET,
    VFIO_DEVICE_FEATURE_MIG_DATA_SIZE as DATA_SIZE,
    VFIO_DEVICE_FEATURE_MIG_DEVICE_STATE as DEVICE_STATE,
    VFIO_DEVICE_FEATURE_MIGRATION as MIGRATION, VFIO_DEVICE_FEATURE_SET as SET,
};

use super::VfioFunction;
use crate::ioctl::{answered, argument, number, u32_at, u64_at};
use crate::migration::{DeviceState, LOG_PAGE_BYTES, MigrationPort, MigrationSupport};

/// Bytes before what a feature says: length and flags.
const HEAD_BYTES: usize = 8;

impl VfioFunction {
    /// Gets or sets a feature of the device, and returns what `said` has become.
    ///
    /// # Safety
    /// Every address in `said` is one of memory that the kernel may read, or write, as the feature does.
    unsafe fn feature(&self, feature: u32, said: &[u8]) -> io::Result<Vec<u8>> {
        let len = u32::try_from(HEAD_BYTES + said.len()).map_err(io::Error::other)?;
        let mut bytes = argument(&[feature]);
        bytes[..4].copy_from_slice(&len.to_ne_bytes());
        bytes.extend(said);
        let file = self.device.as_fd().as_raw_fd();
        // SAFETY: the kernel reads and writes no more of the argument than its length says, and memory that addresses in it
        // name only as the caller promises.
        answered(unsafe { libc::ioctl(file, number::FEATURE, bytes.as_mut_ptr()) })?;
        Ok(bytes.split_off(HEAD_BYTES))
    }

    /// Gets or sets a feature that has no addresses.
    fn plain_feature(&self, feature: u32, said: &[u8]) -> io::Result<Vec<u8>> {
        // SAFETY: the features that this is called for have no addresses.
        unsafe { self.feature(feature, said) }
    }
}

fn no_stream() -> io::Error {
    io::Error::other("the function is in no state that has a stream")
}

/// Whether a function in this state has a stream, which stays when the state changes to another such.
fn has_stream(state: DeviceState) -> bool {
    match state {
        DeviceState::StopCopy
        | DeviceState::Resuming
        | DeviceState::PreCopy
        | DeviceState::PreCopyP2p => true,
        DeviceState::Error | DeviceState::Stop | DeviceState::Running | DeviceState::RunningP2p => {
            false
        }
    }
}

impl MigrationPort for VfioFunction {
    fn migration_support(&self) -> io::Result<Option<MigrationSupport>> {
        match self.plain_feature(GET | MIGRATION, &[0; 8]) {
            Ok(said) => Ok(Some(MigrationSupport::from_flags(u64_at(&said, 0)))),
            // The kernel does not know the call, or the driver not the feature.
            Err(error) if matches!(error.raw_os_error(), Some(libc::ENOTTY | libc::EINVAL)) => {
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    fn set_device_state(&self, state: DeviceState) -> io::Result<()> {
        let said = [(state as u32).to_ne_bytes(), (-1_i32).to_ne_bytes()].concat();
        let mut stream = self.state_stream.lock();
        let answer = self.plain_feature(SET | DEVICE_STATE, &said).inspect_err(|_| {
            // The kernel may have closed its end on the way.
            *stream = None;
        })?;
        let descriptor = u32_at(&answer, 4).cast_signed();
        if descriptor >= 0 {
            // SAFETY: the kernel has just made the descriptor for the caller, which nothing else knows.
            *stream = Some(unsafe { File::from_raw_fd(descriptor) });
        } else if !has_stream(state) {
            *stream = None;
        }
        Ok(())
    }

    fn device_state(&self) -> io::Result<u32> {
        Ok(u32_at(&self.plain_feature(GET | DEVICE_STATE, &[0; 8])?, 0))
    }

    fn state_len_bytes(&self) -> io::Result<u64> {
        Ok(u64_at(&self.plain_feature(GET | DATA_SIZE, &[0; 8])?, 0))
    }

    fn read_state(&self, buffer: &mut [u8]) -> io::Result<usize> {
        self.state_stream.lock().as_mut().ok_or_else(no_stream)?.read(buffer)
    }

    fn write_state(&self, data: &[u8]) -> io::Result<()> {
        self.state_stream.lock().as_mut().ok_or_else(no_stream)?.write_all(data)
    }

    fn start_dma_log(&self, ranges: &[Range<u64>]) -> io::Result<()> {
        let count = u32::try_from(ranges.len()).map_err(io::Error::other)?;
        let ranges: Vec<[u64; 2]> = ranges
            .iter()
            .map(|range| [range.start, range.end.saturating_sub(range.start)])
            .collect();
        let address = ranges.as_ptr().expose_provenance() as u64;
        // Size of a page, number of ranges, and where they are. The kernel converts the function's own granularity to the
        // requested one in its reports.
        let said = [
            &LOG_PAGE_BYTES.to_ne_bytes()[..],
            &count.to_ne_bytes(),
            &[0; 4],
            &address.to_ne_bytes(),
        ];
        // SAFETY: the kernel reads as many ranges of two u64 there as there are, which live across the call.
        unsafe { self.feature(SET | LOG_START, &said.concat()) }.map(|_| ())
    }

    fn take_dma_log(&self, range: &Range<u64>) -> io::Result<Vec<u64>> {
        let len_bytes = range.end.saturating_sub(range.start);
        let words = len_bytes.div_ceil(LOG_PAGE_BYTES).div_ceil(u64::BITS.into());
        let mut bits = vec![0_u64; usize::try_from(words).map_err(io::Error::other)?];
        let address = bits.as_mut_ptr().expose_provenance() as u64;
        let said = [range.start, len_bytes, LOG_PAGE_BYTES, address].map(u64::to_ne_bytes);
        // SAFETY: the kernel writes a bit for each page of the range there, in words of 64 bits that live across the call.
        unsafe { self.feature(GET | LOG_REPORT, &said.concat()) }?;
        Ok(bits)
    }

    fn stop_dma_log(&self) -> io::Result<()> {
        self.plain_feature(SET | LOG_STOP, &[]).map(|_| ())
    }
}
