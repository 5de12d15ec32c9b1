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

/// A level-triggered interrupt line, high until the guest has acknowledged the interrupt.
///
/// The device signals [`LevelLine::event`], which raises the line. On the guest's EOI, KVM lowers the line
/// and signals [`LevelLine::resample`], and the device checks whether it still has an interrupt pending.
/// Several devices may share a line.
pub struct LevelLine {
    vm: Arc<VmShared>,
    gsi: u32,
    event: EventFd,
    resample: EventFd,
}

impl LevelLine {
    /// The eventfd that raises the line.
    pub fn event(&self) -> &EventFd {
        &self.event
    }

    /// The eventfd that KVM signals when the guest has acknowledged the interrupt.
    pub fn resample(&self) -> &EventFd {
        &self.resample
    }
}

/// KVM's VFIO device, for a caller that opens groups or devices. At most one per VM.
#[derive(Clone)]
pub struct VfioFiles(Arc<DeviceFd>);

impl VfioFiles {
    /// Registers the open file of a group or a device with KVM.
    ///
    /// # Errors
    /// It is not such a file, or is registered already.
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

/// A file registered with KVM, kept open on both sides until this is dropped.
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
    /// Creates KVM's VFIO device, with which groups and devices of this VM are registered.
    ///
    /// # Errors
    /// The kernel has none, or this VM has one already.
    pub fn vfio_files(&self) -> Result<VfioFiles, KvmError> {
        let mut request =
            kvm_create_device { type_: kvm_device_type_KVM_DEV_TYPE_VFIO, fd: 0, flags: 0 };
        let device = self.shared().fd.create_device(&mut request);
        Ok(VfioFiles(Arc::new(device.context("make KVM's VFIO device")?)))
    }

    /// Creates a level-triggered line for `gsi` (0 to 23).
    ///
    /// # Errors
    /// The number is out of range, or the kernel refuses.
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
