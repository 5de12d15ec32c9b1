// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The form of what a platform says of each kind of virtio device.
//!
//! Owns the kinds, and the values for each: features and queues. What a device does with a feature is its own matter;
//! here is only which of those that it has are offered.

use devices::virtio::block::BlockLimits;
use devices::virtio::{ALL_AS_THE_DEVICE, Offer};

/// A kind of virtio device, as far as platforms tell them apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum DeviceKind {
    /// Virtio console.
    Console,
    /// Disks, also those that other processes serve.
    Disk,
    /// Network devices, also those that other processes serve.
    Net,
    /// Entropy device.
    Rng,
    /// Shared directories.
    Fs,
    /// Other vhost-user devices.
    GenericVhostUser,
    /// Persistent memory.
    Pmem,
    /// Socket device.
    Vsock,
    /// virtio-mem devices.
    Mem,
    /// Balloon.
    Balloon,
    /// Watchdog.
    Watchdog,
    /// vDPA devices.
    Vdpa,
    /// Real-time clock.
    Rtc,
    /// The virtual IOMMU.
    Iommu,
}

/// What a platform offers of each kind of device that this program emulates itself. Devices that other processes serve
/// offer what their back ends have.
#[derive(Clone, Copy, Debug)]
pub struct KindOffers {
    /// Virtio console.
    pub console: Offer,
    /// Disks.
    pub disk: Offer,
    /// What disks accept of a request.
    pub disk_limits: BlockLimits,
    /// Network devices.
    pub net: Offer,
    /// Entropy device.
    pub rng: Offer,
    /// Persistent memory.
    pub pmem: Offer,
    /// Socket device.
    pub vsock: Offer,
    /// virtio-mem devices.
    pub mem: Offer,
    /// Balloon.
    pub balloon: Offer,
    /// Queues of a balloon without free page reporting, if it has fewer.
    pub silent_balloon_queues: Option<&'static [u16]>,
    /// Watchdog.
    pub watchdog: Offer,
    /// Real-time clock.
    pub rtc: Offer,
    /// The virtual IOMMU.
    pub iommu: Offer,
}

impl KindOffers {
    /// What a balloon offers that reports free pages, or does not.
    pub fn balloon(&self, reports: bool) -> Offer {
        match self.silent_balloon_queues.filter(|_| !reports) {
            Some(queues) => Offer { queue_sizes: Some(queues), ..self.balloon },
            None => self.balloon,
        }
    }

    /// All devices offer what they have.
    pub(super) const AS_THE_DEVICES: Self = Self {
        console: ALL_AS_THE_DEVICE,
        disk: ALL_AS_THE_DEVICE,
        disk_limits: BlockLimits::GODWIT,
        net: ALL_AS_THE_DEVICE,
        rng: ALL_AS_THE_DEVICE,
        pmem: ALL_AS_THE_DEVICE,
        vsock: ALL_AS_THE_DEVICE,
        mem: ALL_AS_THE_DEVICE,
        balloon: ALL_AS_THE_DEVICE,
        silent_balloon_queues: None,
        watchdog: ALL_AS_THE_DEVICE,
        rtc: ALL_AS_THE_DEVICE,
        iommu: ALL_AS_THE_DEVICE,
    };
}
