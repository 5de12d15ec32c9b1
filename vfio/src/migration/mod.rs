// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Migration of passed-through functions: VFIO migration v2.
//!
//! Owns the way of one function through its states ([`Migration`]), and the form in which it is saved ([`saved`]).
//! Never knows what the state of the hardware means, which functions a VM has, nor how a state travels. What a
//! passed-through function does with it, and the log of what it writes to guest memory, is in `device`.

mod error;
#[cfg(any(test, feature = "testing"))]
pub mod fakes;
mod port;
mod saved;
mod session;
#[cfg(test)]
mod tests;

pub use error::{MigrationError, NotMigratable};
pub use port::{DeviceState, LOG_PAGE_BYTES, MigrationPort, MigrationSupport};
pub use saved::{
    Hardware, HardwareState, INTEGRATED_ENDPOINT_VERSION, VFIO_STATE_VERSION, VfioState,
};
pub use session::{Migration, STATE_LEN_BYTES_MAX};
