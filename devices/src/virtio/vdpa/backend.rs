// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The calls by which a vDPA device is driven, as the kernel's vhost-vdpa has them.
//!
//! Owns the trait, so that all else can be tested without a device, and the names of what a back end can do. It must
//! never decide an order of calls.

use std::io;
use std::ops::RangeInclusive;

use vmm_sys_util::eventfd::EventFd;

/// Messages about mappings have the second format; the first cannot be told apart on other architectures.
pub(super) const IOTLB_MSG_V2: u64 = 1 << 1;
/// Several mappings can be one change.
pub(super) const IOTLB_BATCH: u64 = 1 << 2;
/// The device can be stopped with its state kept.
pub(super) const SUSPEND: u64 = 1 << 4;
/// A device that was stopped can go on.
pub(super) const RESUME: u64 = 1 << 5;

/// Where a ring is in guest memory, and its size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RingPlace {
    /// Number of descriptors.
    pub(super) size: u16,
    /// Guest physical address of the descriptor table.
    pub(super) desc_table: u64,
    /// Guest physical address of the available ring.
    pub(super) avail_ring: u64,
    /// Guest physical address of the used ring.
    pub(super) used_ring: u64,
}

/// A vDPA device of the host. Each method is one call of the kernel, and may take as long as the device does.
pub(super) trait Backend: Send + Sync {
    /// Makes this process the owner, of whose memory parts are mapped.
    fn set_owner(&self) -> io::Result<()>;
    /// Virtio device ID.
    fn device_id(&self) -> io::Result<u32>;
    /// Number of its queues.
    fn queues_count(&self) -> io::Result<u32>;
    /// Most descriptors of a queue.
    fn queue_size_max(&self) -> io::Result<u16>;
    /// Bytes of its configuration.
    fn config_len_bytes(&self) -> io::Result<u32>;
    /// Addresses that it can be given for DMA.
    fn iova_range(&self) -> io::Result<RangeInclusive<u64>>;
    /// Virtio features that it offers.
    fn features(&self) -> io::Result<u64>;
    /// Accepts virtio features.
    fn set_features(&self, features: u64) -> io::Result<()>;
    /// What the interface can do: [`IOTLB_BATCH`] and others.
    fn backend_features(&self) -> io::Result<u64>;
    /// Accepts some of it, before the device is shared.
    fn set_backend_features(&mut self, features: u64) -> io::Result<()>;
    /// The device status (virtio 1.3, 2.1).
    fn status(&self) -> io::Result<u8>;
    /// Sets the device status; 0 resets the device.
    fn set_status(&self, status: u8) -> io::Result<()>;
    /// Reads the configuration.
    fn read_config(&self, offset: u32, data: &mut [u8]) -> io::Result<()>;
    /// Writes the configuration.
    fn write_config(&self, offset: u32, data: &[u8]) -> io::Result<()>;
    /// Sets the size of a queue.
    fn set_vring_num(&self, index: u16, size: u16) -> io::Result<()>;
    /// Sets the addresses of a queue.
    fn set_vring_addr(&self, index: u16, place: &RingPlace) -> io::Result<()>;
    /// Sets the index of the next available entry.
    fn set_vring_base(&self, index: u16, next_avail: u16) -> io::Result<()>;
    /// The index of the next available entry.
    fn vring_base(&self, index: u16) -> io::Result<u32>;
    /// Has the device serve a queue.
    fn enable_vring(&self, index: u16) -> io::Result<()>;
    /// Sets the eventfd by which a queue is notified.
    fn set_vring_kick(&self, index: u16, kick: &EventFd) -> io::Result<()>;
    /// Sets the eventfd that is signalled when a queue has used buffers.
    fn set_vring_call(&self, index: u16, call: &EventFd) -> io::Result<()>;
    /// Sets the eventfd that is signalled when the configuration has changed.
    fn set_config_call(&self, call: &EventFd) -> io::Result<()>;
    /// Stops the device, which keeps its state ([`SUSPEND`]).
    fn suspend(&self) -> io::Result<()>;
    /// Lets it go on ([`RESUME`]).
    fn resume(&self) -> io::Result<()>;
    /// Maps memory of this process for DMA. The memory has to stay until it is unmapped.
    fn map(&self, iova: u64, len_bytes: u64, address: *const u8) -> io::Result<()>;
    /// Unmaps what was mapped as a whole.
    fn unmap(&self, iova: u64, len_bytes: u64) -> io::Result<()>;
    /// Begins a change of several mappings ([`IOTLB_BATCH`]).
    fn begin_batch(&self) -> io::Result<()>;
    /// Ends it: the device has all mappings then.
    fn end_batch(&self) -> io::Result<()>;
}
