// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! virtio block device (virtio 1.3, 5.2) on a raw image or a block device.
//!
//! ```text
//!   queue > worker (a thread per queue) > request: parsed, checked against the disk
//!                                            |
//!                       io_uring  <----------+----------> synchronous calls
//!                 (read, write, flush)              (discard, write zeroes, unaligned direct I/O,
//!                                                    and everything where io_uring is not available)
//!                           |                         |
//!                           +-- no space on the host -+--> kept, if the VM is to be paused then
//! ```
//!
//! Owns the image and its lock. Never reads an image format other than raw; it knows the signatures of
//! other formats, so that their images are not taken for raw ones.

mod config;
mod counters;
mod device;
mod format;
mod image;
mod lock;
mod long_transfer;
mod no_space;
pub(super) mod perform;
mod request;
mod ring;
mod stable_storage;
mod state;
mod synchronous;
#[cfg(test)]
mod tests;
pub(super) mod worker;

pub use counters::BlockCounters;
pub use device::{Block, BlockConfig};
pub use format::ImageFormat;
#[cfg(any(test, feature = "testing"))]
pub(super) use image::Disk;
pub use image::DiskError;
pub use lock::{DiskLock, LockGranularity};
pub use no_space::{FullDisk, OnFull};
