// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! virtio block device (virtio 1.3, 5.2) on an image, raw or in a format, or on a block device.
//!
//! ```text
//!   queue > worker (a thread per queue) > request: parsed, checked against the disk
//!                                            |
//!                       io_uring  <----------+----------> synchronous calls
//!                 (read, write, flush)       |      (discard, write zeroes, unaligned direct I/O,
//!                           |                v       and everything where io_uring is not available)
//!                           |      pool: threads that make       |
//!                           |      such calls on an image        |
//!                           |      in a format (formatted)       |
//!                           |                |                   |
//!                           +-----no space on the host-----------+--> kept, if the VM is to be paused then
//! ```
//!
//! Owns the image and its lock. Must never detect the format of an image to use it; the signatures of formats serve to
//! refuse such images as raw disks.

mod config;
mod counters;
mod device;
mod format;
mod formatted;
mod image;
mod limits;
mod lock;
mod long_transfer;
mod no_space;
pub(super) mod perform;
mod placed;
pub(super) mod pool;
mod qcow2;
mod request;
mod resize;
mod ring;
mod stable_storage;
mod state;
mod store;
mod synchronous;
#[cfg(test)]
mod tests;
mod vhd;
pub(super) mod vhdx;
pub(super) mod worker;

pub use counters::BlockCounters;
pub use device::{Block, BlockConfig};
pub use format::ImageFormat;
pub use formatted::{DiskFormat, FormatError};
#[cfg(any(test, feature = "testing"))]
pub(super) use image::Disk;
pub use image::DiskError;
pub use limits::BlockLimits;
pub use lock::{DiskLock, LockGranularity};
pub use no_space::{FullDisk, OnFull};
#[cfg(any(test, feature = "testing"))]
pub use qcow2::Sample as Qcow2Sample;
pub use resize::{DiskResizer, ResizeDiskError};

/// Whether disks of this process can use io_uring.
pub fn has_io_uring() -> bool {
    ring::Ring::is_available()
}
