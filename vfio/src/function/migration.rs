// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Migration support of a function of the host, by the ioctls of VFIO migration v2.
//!
//! Owns how each question and order of [`MigrationPort`] becomes an ioctl, and what of its answer is kept. Checks
//! no order, as the trait does not.

use std::io;
use std::ops::Range;

use vfio_ioctls::{DmaLoggingRange, VfioError as IoctlError};

use super::VfioFunction;
use crate::migration::{DeviceState, LOG_PAGE_BYTES, MigrationPort, MigrationSupport};

/// The errno of an ioctl, if it has one.
fn to_io(error: IoctlError) -> io::Error {
    match error {
        IoctlError::VfioDeviceFeature(errno) => io::Error::from_raw_os_error(errno.errno()),
        IoctlError::VfioMigrationDataIo(error) => error,
        other => io::Error::other(other),
    }
}

fn logged(range: &Range<u64>) -> DmaLoggingRange {
    DmaLoggingRange { iova: range.start, length: range.end.saturating_sub(range.start) }
}

impl MigrationPort for VfioFunction {
    fn migration_support(&self) -> io::Result<Option<MigrationSupport>> {
        let flags = self.device().query_migration_support().map_err(to_io)?;
        Ok(flags.map(MigrationSupport::from_flags))
    }

    fn set_device_state(&self, state: DeviceState) -> io::Result<()> {
        self.device().set_migration_state(state as u32).map_err(to_io)
    }

    fn device_state(&self) -> io::Result<u32> {
        self.device().get_migration_state().map_err(to_io)
    }

    fn state_len_bytes(&self) -> io::Result<u64> {
        self.device().get_mig_data_size().map_err(to_io)
    }

    fn read_state(&self, buffer: &mut [u8]) -> io::Result<usize> {
        self.device().read_migration_data(buffer).map_err(to_io)
    }

    fn write_state(&self, data: &[u8]) -> io::Result<()> {
        self.device().write_migration_data(data).map_err(to_io)
    }

    fn start_dma_log(&self, ranges: &[Range<u64>]) -> io::Result<()> {
        let ranges: Vec<_> = ranges.iter().map(logged).collect();
        // The kernel converts the function's own granularity to the requested one in its reports.
        self.device().start_dma_logging(LOG_PAGE_BYTES, &ranges).map(|_grain| ()).map_err(to_io)
    }

    fn take_dma_log(&self, range: &Range<u64>) -> io::Result<Vec<u64>> {
        self.device().report_dma_logging(logged(range), LOG_PAGE_BYTES).map_err(to_io)
    }

    fn stop_dma_log(&self) -> io::Result<()> {
        self.device().stop_dma_logging().map_err(to_io)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_own_answer_is_kept() {
        let errno = vmm_sys_util::errno::Error::new(libc::E2BIG);
        assert_eq!(to_io(IoctlError::VfioDeviceFeature(errno)).raw_os_error(), Some(libc::E2BIG));
    }
}
