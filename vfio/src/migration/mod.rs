// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Migration of passed-through functions: VFIO migration v2.
//!
//! Owns the transitions of one function between its states ([`Migration`]), and the form in which it is saved
//! ([`saved`]). Never knows what the state of the hardware means, which functions a VM has, or how a state is
//! transferred. How a passed-through function uses it, and the log of its writes to guest memory, are in `device`.

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
    APART_LEN_BYTES_MAX, Hardware, HardwareState, INTEGRATED_ENDPOINT_VERSION, ROM_VERSION,
    VFIO_STATE_VERSION, VfioState,
};
pub use session::{Call, Migration, STATE_LEN_BYTES_MAX};
