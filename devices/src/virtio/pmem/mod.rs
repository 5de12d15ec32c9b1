// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! virtio persistent memory device (virtio 1.3, 5.19).
//!
//! A file of the host is guest memory at an address that the device names. The driver reads and writes it without the
//! device, and requests a flush when data must be on stable storage. Owns the file, its lock, its mapping and the
//! flushes, which run on the device's own thread. Must never read or write the mapping: another process may shorten the
//! file, after which an access of this process would end it.

mod device;
mod file;
mod mapping;
mod requests;
mod state;
#[cfg(test)]
mod tests;
pub(super) mod worker;

pub use device::Pmem;
pub use file::{PMEM_ALIGN_BYTES, PmemConfig, PmemError, PmemFile};
pub use mapping::PmemMapping;
