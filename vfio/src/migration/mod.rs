// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Migration of passed-through functions: VFIO migration v2.
//!
//! Owns the way of one function through its states ([`Migration`]), the form in which it is saved
//! ([`saved`]), and the log of what it writes to guest memory ([`DmaLog`]). Never knows what the state
//! of the hardware means, which functions a VM has, nor how a state travels.

mod device;
mod dma_log;
mod error;
#[cfg(any(test, feature = "testing"))]
pub mod fakes;
mod port;
mod saved;
mod session;
#[cfg(test)]
mod tests;

pub use dma_log::DmaLog;
pub use error::{MigrationError, NotMigratable};
pub use port::{DeviceState, LOG_PAGE_BYTES, MigrationPort, MigrationSupport};
pub use saved::{
    Hardware, HardwareState, INTEGRATED_ENDPOINT_VERSION, VFIO_STATE_VERSION, VfioState,
};
pub use session::{Migration, STATE_LEN_BYTES_MAX};
