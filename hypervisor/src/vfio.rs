// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! KVM support for passed-through devices: the KVM-VFIO device and level-triggered interrupt lines.
//!
//! Owns the eventfds of a line, and which files were registered with KVM. Knows nothing of VFIO itself: the
//! caller that opens a group or a device registers it with KVM through this module.

use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use kvm_bindings::{
    KVM_DEV_VFIO_FILE, KVM_DEV_VFIO_FILE_ADD, KVM_DEV_VFIO_FILE_DEL, kvm_create_device,
    kvm_device_attr, kvm_device_type_KVM_DEV_TYPE_VFIO,
};
use kvm_ioctls::DeviceFd;
use vmm_sys_util::eventfd::EventFd;

use crate::error::{KvmContext, KvmError};
use crate::irq::IrqError;
use crate::routing::IOAPIC_LINES;
use crate::vm::{Vm, VmShared, kernel, new_event};

/// A line of the interrupt controllers that stays high until the guest has served it.
///
/// The device signals [`LevelLine::event`], which raises the line. When the guest says that it is
/// done, KVM lowers the line and signals [`LevelLine::resample`], upon which the device looks
/// whether it still wants to interrupt. Several devices may share a line.
pub struct LevelLine {
    vm: Arc<VmShared>,
    gsi: u32,
    event: EventFd,
    resample: EventFd,
}

impl LevelLine {
    /// Raises the line.
    pub fn event(&self) -> &EventFd {
        &self.event
    }

    /// Signalled by KVM when the guest is done with the interrupt.
    pub fn resample(&self) -> &EventFd {
        &self.resample
    }
}

/// KVM's VFIO device, for a caller that opens devices one by one. A VM has one at most.
#[derive(Clone)]
pub struct VfioFiles(Arc<DeviceFd>);

impl VfioFiles {
    /// Tells KVM of the open file of a device.
    ///
    /// # Errors
    /// It is no such file, or KVM knows it already.
    pub fn tell(&self, file: BorrowedFd<'_>) -> Result<AttachedFile, KvmError> {
        let what = "take note of a passed-through device";
        let file = file.try_clone_to_owned().context(what)?;
        self.set(KVM_DEV_VFIO_FILE_ADD, &file).context(what)?;
        Ok(AttachedFile { files: self.clone(), file })
    }

    fn set(&self, attribute: u32, file: &OwnedFd) -> Result<(), kvm_ioctls::Error> {
        let number = file.as_raw_fd();
        // The kernel reads one i32 there, which lives across the call.
        let addr = (&raw const number).addr() as u64;
        let attr = u64::from(attribute);
        self.0.set_device_attr(&kvm_device_attr { flags: 0, group: KVM_DEV_VFIO_FILE, attr, addr })
    }
}

/// A file that KVM was told of. It holds the file open, and so does KVM, until this is dropped.
pub struct AttachedFile {
    files: VfioFiles,
    file: OwnedFd,
}

impl Drop for AttachedFile {
    fn drop(&mut self) {
        if let Err(error) = self.files.set(KVM_DEV_VFIO_FILE_DEL, &self.file) {
            log::warn!("KVM does not release a passed-through device: {error}");
        }
    }
}

impl Drop for LevelLine {
    fn drop(&mut self) {
        if let Err(error) = self.vm.fd.unregister_irqfd(&self.event, self.gsi) {
            log::warn!("interrupt line {}: cannot detach its eventfd: {error}", self.gsi);
        }
    }
}

impl Vm {
    /// KVM's VFIO device, by which it learns of the groups whose devices this VM has.
    ///
    /// # Errors
    /// When the kernel has none.
    pub fn create_vfio_device(&self) -> Result<DeviceFd, KvmError> {
        let mut request =
            kvm_create_device { type_: kvm_device_type_KVM_DEV_TYPE_VFIO, fd: 0, flags: 0 };
        self.shared().fd.create_device(&mut request).context("make KVM's VFIO device")
    }

    /// The same, for devices that are opened one by one.
    ///
    /// # Errors
    /// When the kernel has none, or this VM has one already.
    pub fn vfio_files(&self) -> Result<VfioFiles, KvmError> {
        self.create_vfio_device().map(|device| VfioFiles(Arc::new(device)))
    }

    /// Makes a level-triggered line of `gsi` (0 to 23).
    ///
    /// # Errors
    /// When there is no such line, or the kernel refuses.
    pub fn create_level_line(&self, gsi: u32) -> Result<LevelLine, IrqError> {
        if gsi >= IOAPIC_LINES {
            return Err(IrqError::Exhausted { limit: IOAPIC_LINES });
        }
        let (event, resample) = (new_event()?, new_event()?);
        let shared = self.shared();
        shared
            .fd
            .register_irqfd_with_resample(&event, &resample, gsi)
            .map_err(kernel("attach a level-triggered interrupt line's eventfd"))?;
        Ok(LevelLine { vm: Arc::clone(shared), gsi, event, resample })
    }
}
