// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A vDPA device as the kernel has it: a character device `/dev/vhost-vdpa-N`.
//!
//! Owns the open file. It must never keep anything of what the device has said.

use std::fs::{File, OpenOptions};
use std::io;
use std::ops::RangeInclusive;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::{FileTypeExt as _, OpenOptionsExt as _};
use std::path::Path;

use memory::GuestMemoryHandle;
use vhost::vdpa::VhostVdpa as _;
use vhost::vhost_kern::VhostKernFeatures as _;
use vhost::vhost_kern::vdpa::VhostKernVdpa;
use vhost::{
    VhostAccess, VhostBackend as _, VhostIotlbBackend as _, VhostIotlbMsg, VhostIotlbType,
    VringConfigData,
};
use vmm_sys_util::eventfd::EventFd;

use super::backend::{Backend, RingPlace};
use crate::syscalls;

/// VHOST_VDPA_RESUME of `linux/vhost.h`, which the crate does not have: `_IO(0xaf, 0x7e)`.
const VHOST_VDPA_RESUME: libc::c_ulong = 0xaf7e;

/// An open vDPA device.
pub(super) struct KernelDevice(VhostKernVdpa<GuestMemoryHandle>);

impl KernelDevice {
    /// Opens the device at `path`. Only one process at a time can have it open.
    pub(super) fn open(path: &Path, memory: GuestMemoryHandle) -> io::Result<Self> {
        let flags = libc::O_CLOEXEC | libc::O_NONBLOCK;
        let file: File =
            OpenOptions::new().read(true).write(true).custom_flags(flags).open(path)?;
        if !file.metadata()?.file_type().is_char_device() {
            return Err(io::Error::other("it is not a character device"));
        }
        Ok(Self(VhostKernVdpa::with(file, memory, 0)))
    }

    fn send(
        &self,
        iova: u64,
        len_bytes: u64,
        address: u64,
        kind: VhostIotlbType,
    ) -> io::Result<()> {
        let message = VhostIotlbMsg {
            iova,
            size: len_bytes,
            userspace_addr: address,
            perm: VhostAccess::ReadWrite,
            msg_type: kind,
        };
        plain(self.0.send_iotlb_msg(&message))
    }
}

/// The kernel's error, without the crate's name for it.
fn plain<T>(result: vhost::Result<T>) -> io::Result<T> {
    result.map_err(|error| match error {
        vhost::Error::IoctlError(error) | vhost::Error::IOError(error) => error,
        other => io::Error::other(other),
    })
}

impl Backend for KernelDevice {
    fn set_owner(&self) -> io::Result<()> {
        plain(self.0.set_owner())
    }

    fn device_id(&self) -> io::Result<u32> {
        plain(self.0.get_device_id())
    }

    fn queues_count(&self) -> io::Result<u32> {
        plain(self.0.get_vqs_count())
    }

    fn queue_size_max(&self) -> io::Result<u16> {
        plain(self.0.get_vring_num())
    }

    fn config_len_bytes(&self) -> io::Result<u32> {
        plain(self.0.get_config_size())
    }

    fn iova_range(&self) -> io::Result<RangeInclusive<u64>> {
        plain(self.0.get_iova_range()).map(|range| range.first..=range.last)
    }

    fn features(&self) -> io::Result<u64> {
        plain(self.0.get_features())
    }

    fn set_features(&self, features: u64) -> io::Result<()> {
        plain(self.0.set_features(features))
    }

    fn backend_features(&self) -> io::Result<u64> {
        plain(self.0.get_backend_features())
    }

    fn set_backend_features(&mut self, features: u64) -> io::Result<()> {
        plain(self.0.set_backend_features(features))
    }

    fn status(&self) -> io::Result<u8> {
        plain(self.0.get_status())
    }

    fn set_status(&self, status: u8) -> io::Result<()> {
        plain(self.0.set_status(status))
    }

    fn read_config(&self, offset: u32, data: &mut [u8]) -> io::Result<()> {
        plain(self.0.get_config(offset, data))
    }

    fn write_config(&self, offset: u32, data: &[u8]) -> io::Result<()> {
        plain(self.0.set_config(offset, data))
    }

    fn set_vring_num(&self, index: u16, size: u16) -> io::Result<()> {
        plain(self.0.set_vring_num(index.into(), size))
    }

    fn set_vring_addr(&self, index: u16, place: &RingPlace) -> io::Result<()> {
        let RingPlace { size, desc_table, avail_ring, used_ring } = *place;
        let config = VringConfigData {
            queue_max_size: size,
            queue_size: size,
            flags: 0,
            desc_table_addr: desc_table,
            used_ring_addr: used_ring,
            avail_ring_addr: avail_ring,
            log_addr: None,
        };
        // Not that of the trait, which passes addresses in this process: the device has guest physical ones.
        plain(VhostKernVdpa::set_vring_addr(&self.0, index.into(), &config))
    }

    fn set_vring_base(&self, index: u16, next_avail: u16) -> io::Result<()> {
        plain(self.0.set_vring_base(index.into(), next_avail))
    }

    fn vring_base(&self, index: u16) -> io::Result<u32> {
        plain(self.0.get_vring_base(index.into()))
    }

    fn enable_vring(&self, index: u16) -> io::Result<()> {
        plain(self.0.set_vring_enable(index.into(), true))
    }

    fn set_vring_kick(&self, index: u16, kick: &EventFd) -> io::Result<()> {
        plain(self.0.set_vring_kick(index.into(), kick))
    }

    fn set_vring_call(&self, index: u16, call: &EventFd) -> io::Result<()> {
        plain(self.0.set_vring_call(index.into(), call))
    }

    fn set_config_call(&self, call: &EventFd) -> io::Result<()> {
        plain(self.0.set_config_call(call))
    }

    fn suspend(&self) -> io::Result<()> {
        plain(self.0.suspend())
    }

    fn resume(&self) -> io::Result<()> {
        // SAFETY: the request takes no argument, and the descriptor is open.
        syscalls::check(unsafe { libc::ioctl(self.0.as_raw_fd(), VHOST_VDPA_RESUME) }).map(drop)
    }

    fn map(&self, iova: u64, len_bytes: u64, address: *const u8) -> io::Result<()> {
        self.send(iova, len_bytes, address.addr() as u64, VhostIotlbType::Update)
    }

    fn unmap(&self, iova: u64, len_bytes: u64) -> io::Result<()> {
        self.send(iova, len_bytes, 0, VhostIotlbType::Invalidate)
    }

    fn begin_batch(&self) -> io::Result<()> {
        self.send(0, 0, 0, VhostIotlbType::BatchBegin)
    }

    fn end_batch(&self) -> io::Result<()> {
        self.send(0, 0, 0, VhostIotlbType::BatchEnd)
    }
}
