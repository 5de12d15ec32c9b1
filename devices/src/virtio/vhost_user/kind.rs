// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The kinds of devices that a vhost-user back end serves.
//!
//! Owns for each kind its features, its queues and its configuration space. It must never talk to the
//! back end.

use virtio_bindings::virtio_blk as blk;

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
}

impl VhostUserKind {
    /// Virtio device ID.
    pub(super) fn device_id(&self) -> u16 {
        match self {
            Self::Block => 2,
            Self::Fs { .. } => 26,
        }
    }

    /// Kind of its saved state.
    pub(super) fn name(&self) -> &'static str {
        match self {
            Self::Block => "vhost-user-block",
            Self::Fs { .. } => "vhost-user-fs",
        }
    }

    /// Queues of a device with `num_queues` request queues.
    pub(super) fn queues(&self, num_queues: u16) -> usize {
        match self {
            Self::Block => usize::from(num_queues),
            // One for requests of high priority comes first.
            Self::Fs { .. } => usize::from(num_queues) + 1,
        }
    }

    /// Queues of a back end that does not say how many it serves.
    pub(super) fn queues_without_mq(&self) -> usize {
        self.queues(1)
    }

    /// Features to offer, of those that the back end has.
    pub(super) fn features(&self, back_end: u64, num_queues: u16) -> u64 {
        let own = match self {
            Self::Block if num_queues > 1 => BLOCK_FEATURES | 1 << blk::VIRTIO_BLK_F_MQ,
            Self::Block => BLOCK_FEATURES,
            Self::Fs { .. } => 0,
        };
        back_end & (RING_FEATURES | own)
    }

    /// Bytes of its configuration that the back end has; none if the VMM has it.
    pub(super) fn config_len_bytes(&self) -> Option<u32> {
        match self {
            Self::Block => Some(BLOCK_CONFIG_LEN_BYTES),
            Self::Fs { .. } => None,
        }
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
        }
    }
}
