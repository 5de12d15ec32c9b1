// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Changing the size of a raw disk while its device may be in use.
//!
//! Owns the order of the steps: the lock covers the new size before the file has it, and the driver is notified when
//! requests to all of it can be carried out. A block device of the host has its size from elsewhere and is only asked
//! for it. Must never cut an image while requests are in flight: the caller stops vCPUs and device for
//! that, and never change one that is not locked.

use std::io;
use std::sync::Arc;

use parking_lot::Mutex;
use thiserror::Error;

use super::formatted::DiskFormat;
use super::image::Disk;
use super::lock::{DiskLock, LockGranularity};
use super::no_space::NoSpace;
use crate::virtio::VirtioInterrupt;

/// Why a disk does not get another size.
#[derive(Debug, Error)]
pub enum ResizeDiskError {
    /// The image is not raw.
    #[error("a {0} image cannot be given another size; a raw one can")]
    Format(DiskFormat),
    /// The disk is read-only.
    #[error("it is read-only")]
    ReadOnly,
    /// The size is invalid.
    #[error(
        "{size_bytes} bytes are no size for it: a size is a multiple of its block size, {block_bytes} bytes, and not zero"
    )]
    Size {
        /// The requested size.
        size_bytes: u64,
        /// Logical block size.
        block_bytes: u64,
    },
    /// The host's block device has another size.
    #[error(
        "the block device of the host has {device_bytes} bytes, and not {size_bytes}: change that first, then repeat this"
    )]
    Device {
        /// Size of the block device.
        device_bytes: u64,
        /// The requested size.
        size_bytes: u64,
    },
    /// Requests wait for free space, some of which may be for the part that goes.
    #[error("requests wait for free space on the host: it can be made smaller when they are done")]
    Waiting,
    /// The image is not locked.
    #[error("its image is not locked by this VM, and may be in use by another")]
    NotLocked,
    /// The lock cannot be extended.
    #[error("another process has a lock on the part that would be added")]
    Locked,
    /// The host's error.
    #[error("the host cannot change it")]
    Host(#[source] io::Error),
}

/// How a driver is told that the configuration has changed.
#[derive(Default)]
pub(super) struct Notice {
    /// That of an active device.
    interrupt: Option<Arc<dyn VirtioInterrupt>>,
    /// Whether a driver is to be told when the device is activated: one that was restored has read the old size.
    is_due: bool,
}

impl Notice {
    /// The device is active, and tells the driver what it has missed.
    pub(super) fn activate(&mut self, interrupt: &Arc<dyn VirtioInterrupt>) {
        if std::mem::take(&mut self.is_due) {
            interrupt.config_changed();
        }
        self.interrupt = Some(Arc::clone(interrupt));
    }

    /// The device is reset. A driver reads the configuration after that.
    pub(super) fn reset(&mut self) {
        *self = Self::default();
    }

    fn tell(&mut self) {
        match &self.interrupt {
            Some(interrupt) => interrupt.config_changed(),
            None => self.is_due = true,
        }
    }
}

/// Handle to change the size of a disk while the transport owns its device.
#[derive(Clone)]
pub struct DiskResizer {
    pub(super) lock: DiskLock,
    pub(super) full: Arc<NoSpace>,
    pub(super) notice: Arc<Mutex<Notice>>,
}

impl DiskResizer {
    fn disk(&self) -> &Disk {
        &self.lock.disk
    }

    /// Whether this size is smaller than the present one, so that the device must be paused for the change.
    pub fn cuts(&self, size_bytes: u64) -> bool {
        size_bytes < self.disk().size_bytes()
    }

    /// Whether this size is possible. A block device must have it already.
    ///
    /// # Errors
    /// [`ResizeDiskError`].
    pub fn check(&self, size_bytes: u64) -> Result<(), ResizeDiskError> {
        let disk = self.disk();
        if disk.format() != DiskFormat::Raw {
            return Err(ResizeDiskError::Format(disk.format()));
        }
        if disk.readonly() && !disk.is_device() {
            return Err(ResizeDiskError::ReadOnly);
        }
        if !self.lock.is_held() {
            return Err(ResizeDiskError::NotLocked);
        }
        let block_bytes = disk.topology().logical_block_bytes;
        if size_bytes == 0 || !size_bytes.is_multiple_of(block_bytes) {
            return Err(ResizeDiskError::Size { size_bytes, block_bytes });
        }
        if self.cuts(size_bytes) && self.full.has_requests() {
            return Err(ResizeDiskError::Waiting);
        }
        if disk.is_device() {
            let device_bytes = disk.host_len_bytes().map_err(ResizeDiskError::Host)?;
            if device_bytes != size_bytes {
                return Err(ResizeDiskError::Device { device_bytes, size_bytes });
            }
        }
        Ok(())
    }

    /// Gives the disk this size and notifies the driver. If [`Self::cuts`], the device must be paused. Takes as long as the
    /// storage does.
    ///
    /// # Errors
    /// [`ResizeDiskError`]; the size is as before.
    pub fn resize(&self, size_bytes: u64) -> Result<(), ResizeDiskError> {
        self.check(size_bytes)?;
        let disk = self.disk();
        if size_bytes == disk.size_bytes() {
            return Ok(());
        }
        self.extend_lock(size_bytes)?;
        if !disk.is_device() {
            disk.file_to_change().set_len(size_bytes).map_err(ResizeDiskError::Host)?;
        }
        disk.set_size_bytes(size_bytes);
        self.notice.lock().tell();
        Ok(())
    }

    /// Locks the bytes that are added, too.
    fn extend_lock(&self, size_bytes: u64) -> Result<(), ResizeDiskError> {
        let mut locked = self.disk().condition.locked_bytes();
        let locked_bytes = locked.ok_or(ResizeDiskError::NotLocked)?;
        if locked_bytes >= size_bytes || self.lock.granularity == LockGranularity::Full {
            return Ok(());
        }
        self.lock.set_len(size_bytes).map_err(|error| match error.raw_os_error() {
            Some(libc::EAGAIN | libc::EACCES) => ResizeDiskError::Locked,
            _ => ResizeDiskError::Host(error),
        })?;
        *locked = Some(size_bytes);
        Ok(())
    }
}
