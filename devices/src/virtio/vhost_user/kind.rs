// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The kinds of devices that a vhost-user back end serves.
//!
//! Owns for each kind its features, its queues and its configuration space. It must never talk to the
//! back end.

use virtio_bindings::{virtio_blk as blk, virtio_net as net};

use super::session::QueueNeeds;
use crate::virtio::RING_FEATURES;

/// Bytes of the configuration of a block device that are known to drivers and back ends of any age: up to the limits of
/// write zeroes (virtio 1.3, 5.2.4).
const BLOCK_CONFIG_LEN_BYTES: u32 = 60;
/// Offset of the number of queues in it.
const BLOCK_NUM_QUEUES_OFFSET: usize = 34;

/// Features of block devices that concern only driver and back end. Not among them: those that need a writable
/// configuration (CONFIG_WCE), and those with a longer one (secure erase, zones).
const BLOCK_FEATURES: u64 = 1 << blk::VIRTIO_BLK_F_SIZE_MAX
    | 1 << blk::VIRTIO_BLK_F_SEG_MAX
    | 1 << blk::VIRTIO_BLK_F_RO
    | 1 << blk::VIRTIO_BLK_F_BLK_SIZE
    | 1 << blk::VIRTIO_BLK_F_FLUSH
    | 1 << blk::VIRTIO_BLK_F_TOPOLOGY
    | 1 << blk::VIRTIO_BLK_F_DISCARD
    | 1 << blk::VIRTIO_BLK_F_WRITE_ZEROES;

/// Bytes of the name of a file system (virtio 1.3, 5.11.4).
pub const FS_TAG_LEN_BYTES: usize = 36;

/// Offloads of checksums of a network device, without which it has none of the others.
const NET_CSUM_FEATURES: u64 = 1 << net::VIRTIO_NET_F_CSUM | 1 << net::VIRTIO_NET_F_GUEST_CSUM;
/// Offloads of TCP segmentation.
const NET_TSO_FEATURES: u64 = 1 << net::VIRTIO_NET_F_GUEST_TSO4
    | 1 << net::VIRTIO_NET_F_GUEST_TSO6
    | 1 << net::VIRTIO_NET_F_GUEST_ECN
    | 1 << net::VIRTIO_NET_F_HOST_TSO4
    | 1 << net::VIRTIO_NET_F_HOST_TSO6
    | 1 << net::VIRTIO_NET_F_HOST_ECN;
/// Offloads of UDP fragmentation.
const NET_UFO_FEATURES: u64 = 1 << net::VIRTIO_NET_F_GUEST_UFO | 1 << net::VIRTIO_NET_F_HOST_UFO;

/// Features of device types, which concern driver and back end (virtio 1.3, 2.2). The others are about queues and the
/// transport, which the VMM has to know: packed rings, a reset of one queue, notifications with data, administration.
const DEVICE_FEATURES: u64 = ((1 << 24) - 1) | !((1 << 50) - 1);

/// Queues of a network device: one pair.
pub const NET_QUEUES: u16 = 2;

/// Offloads that a network device may have, if its back end offers them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NetOffloads {
    /// Checksums; the others need it.
    pub csum: bool,
    /// TCP segmentation.
    pub tso: bool,
    /// UDP fragmentation.
    pub ufo: bool,
}

impl NetOffloads {
    fn features(self) -> u64 {
        let Self { csum, tso, ufo } = self;
        if !csum {
            return 0;
        }
        let of = |is_on: bool, features: u64| if is_on { features } else { 0 };
        NET_CSUM_FEATURES | of(tso, NET_TSO_FEATURES) | of(ufo, NET_UFO_FEATURES)
    }
}

/// What a device is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum VhostUserKind {
    /// A block device.
    Block,
    /// A file system, with the name by which the guest mounts it. It has no window of shared memory (DAX).
    Fs {
        /// The name, at most [`FS_TAG_LEN_BYTES`] bytes.
        tag: String,
    },
    /// A network device of one pair of queues and without a control queue. Its address and MTU are the VMM's.
    Net {
        /// Address of the guest's end.
        mac: [u8; 6],
        /// Maximum transmission unit that the driver is told, in bytes.
        mtu: Option<u16>,
        /// Offloads that it may have.
        offloads: NetOffloads,
    },
    /// A device of which the VMM knows nothing: its configuration is the back end's, and so are its features but for
    /// those of the transport.
    Generic {
        /// Virtio device ID.
        device_id: u16,
        /// Size of each of its queues, powers of two.
        queue_sizes: Vec<u16>,
    },
}

impl VhostUserKind {
    /// Virtio device ID.
    pub(super) fn device_id(&self) -> u16 {
        match self {
            Self::Block => 2,
            Self::Fs { .. } => 26,
            Self::Net { .. } => 1,
            Self::Generic { device_id, .. } => *device_id,
        }
    }

    /// Kind of its saved state.
    pub(super) fn name(&self) -> &'static str {
        match self {
            Self::Block => "vhost-user-block",
            Self::Fs { .. } => "vhost-user-fs",
            Self::Net { .. } => "vhost-user-net",
            Self::Generic { .. } => "vhost-user-generic",
        }
    }

    /// Queues of a device with `num_queues` request queues.
    pub(super) fn queues(&self, num_queues: u16) -> usize {
        match self {
            Self::Block | Self::Net { .. } => usize::from(num_queues),
            // One for requests of high priority comes first.
            Self::Fs { .. } => usize::from(num_queues) + 1,
            Self::Generic { queue_sizes, .. } => queue_sizes.len(),
        }
    }

    /// Size of each queue of a device with `num_queues` request queues of `queue_size`.
    pub(super) fn queue_sizes(&self, num_queues: u16, queue_size: u16) -> Vec<u16> {
        match self {
            Self::Generic { queue_sizes, .. } => queue_sizes.clone(),
            _ => vec![queue_size; self.queues(num_queues)],
        }
    }

    /// What a back end has to serve for a device with `num_queues` request queues.
    pub(super) fn needs(&self, num_queues: u16) -> QueueNeeds {
        let count = self.queues(num_queues);
        match self {
            // Some back ends of networks say how many pairs they serve, and some how many queues. One pair all serve.
            Self::Net { .. } => {
                QueueNeeds { count, without_mq: usize::from(NET_QUEUES), is_asked: false }
            }
            // How many a device of this kind has at least is not known here.
            Self::Generic { .. } => QueueNeeds { count, without_mq: count, is_asked: true },
            Self::Block | Self::Fs { .. } => {
                QueueNeeds { count, without_mq: self.queues(1), is_asked: true }
            }
        }
    }

    /// Features to offer, of those that the back end has.
    pub(super) fn features(&self, back_end: u64, num_queues: u16) -> u64 {
        let own = match self {
            Self::Block if num_queues > 1 => BLOCK_FEATURES | 1 << blk::VIRTIO_BLK_F_MQ,
            Self::Block => BLOCK_FEATURES,
            Self::Fs { .. } => 0,
            Self::Generic { .. } => DEVICE_FEATURES,
            Self::Net { offloads, .. } => offloads.features() | 1 << net::VIRTIO_NET_F_MRG_RXBUF,
        };
        back_end & (RING_FEATURES | own) | self.features_of_vmm()
    }

    /// Features of fields of the configuration that the VMM has, whatever the back end knows of them.
    fn features_of_vmm(&self) -> u64 {
        match self {
            Self::Net { mtu: Some(_), .. } => {
                1 << net::VIRTIO_NET_F_MAC | 1 << net::VIRTIO_NET_F_MTU
            }
            Self::Net { .. } => 1 << net::VIRTIO_NET_F_MAC,
            Self::Block | Self::Fs { .. } | Self::Generic { .. } => 0,
        }
    }

    /// Bytes of its configuration that the back end has; none if the VMM has it.
    pub(super) fn config_len_bytes(&self) -> Option<u32> {
        match self {
            Self::Block => Some(BLOCK_CONFIG_LEN_BYTES),
            Self::Fs { .. } | Self::Net { .. } | Self::Generic { .. } => None,
        }
    }

    /// Whether the driver's accesses of the configuration go to the back end.
    pub(super) fn is_config_of_back_end(&self) -> bool {
        matches!(self, Self::Generic { .. })
    }

    /// The configuration that the driver sees, of what the back end has.
    pub(super) fn config(&self, mut of_back_end: Vec<u8>, num_queues: u16) -> Vec<u8> {
        match self {
            Self::Block => {
                let field = of_back_end.iter_mut().skip(BLOCK_NUM_QUEUES_OFFSET);
                field.zip(num_queues.to_le_bytes()).for_each(|(to, from)| *to = from);
                of_back_end
            }
            Self::Fs { tag } => {
                let mut config = vec![0; FS_TAG_LEN_BYTES];
                config.iter_mut().zip(tag.bytes()).for_each(|(to, from)| *to = from);
                config.extend_from_slice(&u32::from(num_queues).to_le_bytes());
                config
            }
            // Status and number of pairs, of features that are not offered, are zero.
            Self::Net { mac, mtu, .. } => {
                [&mac[..], &[0; 4], &mtu.unwrap_or(0).to_le_bytes()].concat()
            }
            Self::Generic { .. } => Vec::new(),
        }
    }
}
