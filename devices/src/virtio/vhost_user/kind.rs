// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The kinds of devices that a vhost-user back end serves.
//!
//! Owns for each kind its features, its queues and its configuration space. It must never talk to the
//! back end.

use vhost::vhost_user::message::VhostUserProtocolFeatures as Protocol;
use virtio_bindings::{virtio_blk as blk, virtio_net as net};

use super::needs::{AskedQueues, Needs};
use super::net_link::STATUS_OFFSET;
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

/// Queues of a network device with one pair.
pub const NET_QUEUES: u16 = 2;
/// Bytes of the configuration of a network device, up to the MTU (virtio 1.3, 5.1.4).
const NET_CONFIG_LEN_BYTES: u32 = 12;
/// Offset of the MTU in it.
pub(super) const NET_MTU_OFFSET: usize = 10;
/// The link of a network is up.
const LINK_UP: u16 = 1;
/// The smallest MTU that a device may have (virtio 1.3, 5.1.4.1).
const NET_MTU_MIN: u16 = 68;

/// Where the configuration of a device comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ConfigSource {
    /// From the VMM alone.
    Vmm,
    /// In part from the back end, which has to have this many bytes.
    Needed(u32),
    /// The same, if it has them.
    IfPresent(u32),
    /// From the back end, with each access of the driver.
    BackEnd,
}

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
    /// A network device. Its address is the VMM's, which serves the control queue; the driver has one if the back end offers
    /// it.
    Net {
        /// Address of the guest's end.
        mac: [u8; 6],
        /// Maximum transmission unit that the driver is told, in bytes; that of the back end, if it has one, without.
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

    /// Queues of a device with `num_queues` request queues that the back end serves.
    pub(super) fn queues(&self, num_queues: u16) -> usize {
        match self {
            Self::Block | Self::Net { .. } => usize::from(num_queues),
            // One for requests of high priority comes first.
            Self::Fs { .. } => usize::from(num_queues) + 1,
            Self::Generic { queue_sizes, .. } => queue_sizes.len(),
        }
    }

    /// Size of each queue of a device with `num_queues` request queues of `queue_size` and these features.
    pub(super) fn queue_sizes(&self, num_queues: u16, queue_size: u16, features: u64) -> Vec<u16> {
        match self {
            Self::Generic { queue_sizes, .. } => queue_sizes.clone(),
            Self::Net { .. } if features & 1 << net::VIRTIO_NET_F_CTRL_VQ != 0 => {
                vec![queue_size; self.queues(num_queues) + 1]
            }
            _ => vec![queue_size; self.queues(num_queues)],
        }
    }

    /// What a back end has to serve for a device with `num_queues` request queues.
    pub(super) fn needs(&self, num_queues: u16) -> Needs {
        let count = self.queues(num_queues);
        // By which the back end says that the configuration has changed.
        let changes = Protocol::BACKEND_REQ;
        match self {
            // One pair all serve.
            Self::Net { .. } => Needs {
                count,
                without_mq: usize::from(NET_QUEUES),
                asked: if num_queues > NET_QUEUES {
                    AskedQueues::QueuesOrPairs
                } else {
                    AskedQueues::No
                },
                protocol: changes | Protocol::MTU | Protocol::RARP | Protocol::LOG_SHMFD,
            },
            // How many a device of this kind has at least is not known here.
            Self::Generic { .. } => {
                Needs { count, without_mq: count, asked: AskedQueues::Queues, protocol: changes }
            }
            Self::Block => {
                Needs { count, without_mq: 1, asked: AskedQueues::Queues, protocol: changes }
            }
            Self::Fs { .. } => {
                let protocol = Protocol::LOG_SHMFD | Protocol::DEVICE_STATE;
                Needs { count, without_mq: self.queues(1), asked: AskedQueues::Queues, protocol }
            }
        }
    }

    /// Features to offer, of those that the back end has; it may have a configuration, too.
    pub(super) fn features(
        &self,
        back_end: u64,
        num_queues: u16,
        of_back_end: Option<&[u8]>,
    ) -> u64 {
        let own = match self {
            Self::Block if num_queues > 1 => BLOCK_FEATURES | 1 << blk::VIRTIO_BLK_F_MQ,
            Self::Block => BLOCK_FEATURES,
            Self::Fs { .. } => 0,
            Self::Generic { .. } => DEVICE_FEATURES,
            Self::Net { offloads, .. } => {
                let control = back_end & 1 << net::VIRTIO_NET_F_CTRL_VQ;
                // Which the driver chooses by the control queue.
                let pairs = if control != 0 && num_queues > NET_QUEUES {
                    1 << net::VIRTIO_NET_F_MQ
                } else {
                    0
                };
                offloads.features() | 1 << net::VIRTIO_NET_F_MRG_RXBUF | control | pairs
            }
        };
        back_end & (RING_FEATURES | own) | self.features_of_vmm(back_end, of_back_end)
    }

    /// Features of fields of the configuration that the VMM has, or knows from the back end, and of what it does itself
    /// with the control queue.
    fn features_of_vmm(&self, back_end: u64, of_back_end: Option<&[u8]>) -> u64 {
        let Self::Net { mtu, .. } = self else { return 0 };
        let mut features = 1 << net::VIRTIO_NET_F_MAC;
        if mtu.or_else(|| mtu_of(of_back_end?)).is_some() {
            features |= 1 << net::VIRTIO_NET_F_MTU;
        }
        if back_end & 1 << net::VIRTIO_NET_F_CTRL_VQ != 0 {
            features |= 1 << net::VIRTIO_NET_F_GUEST_ANNOUNCE | 1 << net::VIRTIO_NET_F_STATUS;
        }
        if of_back_end.is_some() {
            features |= back_end & 1 << net::VIRTIO_NET_F_STATUS;
        }
        features
    }

    /// Where its configuration comes from, if the back end has these features.
    pub(super) fn config_source(&self, back_end: u64) -> ConfigSource {
        match self {
            Self::Block => ConfigSource::Needed(BLOCK_CONFIG_LEN_BYTES),
            Self::Fs { .. } => ConfigSource::Vmm,
            Self::Net { .. } => {
                let fields = 1 << net::VIRTIO_NET_F_MTU | 1 << net::VIRTIO_NET_F_STATUS;
                if back_end & fields == 0 {
                    return ConfigSource::Vmm;
                }
                ConfigSource::IfPresent(NET_CONFIG_LEN_BYTES)
            }
            Self::Generic { .. } => ConfigSource::BackEnd,
        }
    }

    /// The configuration that a driver which is offered `features` sees, of what the back end has.
    pub(super) fn config(
        &self,
        of_back_end: Option<&[u8]>,
        num_queues: u16,
        features: u64,
    ) -> Vec<u8> {
        match self {
            Self::Block => {
                let mut config = of_back_end.unwrap_or_default().to_vec();
                let field = config.iter_mut().skip(BLOCK_NUM_QUEUES_OFFSET);
                field.zip(num_queues.to_le_bytes()).for_each(|(to, from)| *to = from);
                config
            }
            Self::Fs { tag } => {
                let mut config = vec![0; FS_TAG_LEN_BYTES];
                config.iter_mut().zip(tag.bytes()).for_each(|(to, from)| *to = from);
                config.extend_from_slice(&u32::from(num_queues).to_le_bytes());
                config
            }
            // Fields of features that are not offered are zero.
            Self::Net { mac, mtu, .. } => {
                let field = |feature: u32, value: u16| {
                    if features & 1 << feature == 0 { [0; 2] } else { value.to_le_bytes() }
                };
                // Up, if the back end does not say.
                let link =
                    of_back_end.map_or(LINK_UP, |config| word(config, STATUS_OFFSET) & LINK_UP);
                let mtu = mtu.or_else(|| mtu_of(of_back_end?)).unwrap_or(0);
                let status = field(net::VIRTIO_NET_F_STATUS, link);
                let pairs = field(net::VIRTIO_NET_F_MQ, num_queues / 2);
                [&mac[..], &status, &pairs, &field(net::VIRTIO_NET_F_MTU, mtu)].concat()
            }
            Self::Generic { .. } => Vec::new(),
        }
    }
}

fn word(config: &[u8], at: usize) -> u16 {
    let field = config.get(at..).and_then(|from| from.first_chunk());
    field.map_or(0, |field| u16::from_le_bytes(*field))
}

/// The MTU of a network's configuration, if it can be one.
fn mtu_of(config: &[u8]) -> Option<u16> {
    Some(word(config, NET_MTU_OFFSET)).filter(|mtu| *mtu >= NET_MTU_MIN)
}
