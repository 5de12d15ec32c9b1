// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What the guest is shown of a vDPA device: its type, features, queues and configuration.
//!
//! Owns the questions to a device that was opened, the checks of its answers, and the rule which features pass: those
//! that concern driver and device alone, and whose queues the guest has.

use virtio_bindings::virtio_config::{
    VIRTIO_F_ACCESS_PLATFORM, VIRTIO_F_ORDER_PLATFORM, VIRTIO_F_VERSION_1,
};
use virtio_bindings::{virtio_blk as blk, virtio_ids as ids, virtio_net as net};

use super::backend::{Backend, IOTLB_BATCH, IOTLB_MSG_V2, RESUME, SUSPEND};
use super::error::VdpaError;
use super::session::called;
use crate::virtio::RING_FEATURES;

/// Features of device types (virtio 1.3, 2.2). The others are about queues and the transport, which the VMM has to
/// know: packed rings, a reset of one queue, notifications with data, administration.
const DEVICE_FEATURES: u64 = ((1 << 24) - 1) | !((1 << 50) - 1);

/// The device's barriers are those of the bus; driver and device alone are concerned.
const ORDER_PLATFORM: u64 = 1 << VIRTIO_F_ORDER_PLATFORM;

/// The device reaches memory through mappings, as every vDPA device does. Not for the guest, whose physical addresses
/// are what is mapped.
const ACCESS_PLATFORM: u64 = 1 << VIRTIO_F_ACCESS_PLATFORM;

/// Features of network devices whose commands go by the control queue (virtio 1.3, 5.1.3.1), and the queue itself.
const NET_CONTROL: u64 = 1 << net::VIRTIO_NET_F_CTRL_VQ
    | 1 << net::VIRTIO_NET_F_CTRL_GUEST_OFFLOADS
    | 1 << net::VIRTIO_NET_F_CTRL_RX
    | 1 << net::VIRTIO_NET_F_CTRL_VLAN
    | 1 << net::VIRTIO_NET_F_CTRL_RX_EXTRA
    | 1 << net::VIRTIO_NET_F_GUEST_ANNOUNCE
    | 1 << net::VIRTIO_NET_F_CTRL_MAC_ADDR
    | NET_PAIRS
    | 1 << net::VIRTIO_NET_F_NOTF_COAL
    | 1 << net::VIRTIO_NET_F_VQ_NOTF_COAL;

/// Features of network devices with several pairs of queues.
const NET_PAIRS: u64 =
    1 << net::VIRTIO_NET_F_MQ | 1 << net::VIRTIO_NET_F_RSS | 1 << net::VIRTIO_NET_F_HASH_REPORT;

/// Queues of a network device with a control queue.
const NET_WITH_CONTROL: u16 = 3;
/// Queues of one without.
const NET_QUEUES: u16 = 2;

/// Where the configuration has the most pairs of queues of a network device (virtio 1.3, 5.1.4).
const NET_PAIRS_OFFSET: u32 = 8;
/// Where it has the number of queues of a block device (virtio 1.3, 5.2.4).
const BLOCK_QUEUES_OFFSET: u32 = 34;

/// Bytes of a configuration that a guest can reach (the transport's structure for it has a page).
const CONFIG_LEN_BYTES_MAX: u32 = 4096;
/// The largest queue (virtio 1.3, 2.7).
const QUEUE_SIZE_MAX: u16 = 32768;
/// A queue of fewer descriptors transfers nothing for most devices.
const QUEUE_SIZE_MIN: u16 = 2;

/// What a device offers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Offer {
    /// Virtio device ID.
    pub(super) device_id: u16,
    /// Features for the guest.
    pub(super) features: u64,
    /// Those that the device gets whatever the guest accepts.
    pub(super) features_always: u64,
    /// Size of each queue.
    pub(super) queue_sizes: Vec<u16>,
    /// Bytes of its configuration.
    pub(super) config_len_bytes: u32,
    /// Several mappings can be one change.
    pub(super) has_batches: bool,
    /// It can be stopped with its state, and go on.
    pub(super) can_suspend: bool,
}

impl Offer {
    /// Asks a device that was just opened, of which `num_queues` queues are wanted. It is reset.
    ///
    /// # Errors
    /// A call fails, or the device is none that a guest can be given like this.
    pub(super) fn ask(backend: &mut dyn Backend, num_queues: u16) -> Result<Self, VdpaError> {
        called("VHOST_SET_OWNER", backend.set_owner())?;
        called("VHOST_VDPA_SET_STATUS", backend.set_status(0))?;
        let can = called("VHOST_GET_BACKEND_FEATURES", backend.backend_features())?;
        if can & IOTLB_MSG_V2 == 0 {
            return Err(VdpaError::Lacks("VHOST_BACKEND_F_IOTLB_MSG_V2"));
        }
        let can = can & (IOTLB_MSG_V2 | IOTLB_BATCH | SUSPEND | RESUME);
        called("VHOST_SET_BACKEND_FEATURES", backend.set_backend_features(can))?;
        let device_id = called("VHOST_VDPA_GET_DEVICE_ID", backend.device_id())?;
        let device_id = match u16::try_from(device_id) {
            Ok(id) if id > 0 => id,
            _ => return Err(VdpaError::Type(device_id)),
        };
        if u32::from(device_id) == ids::VIRTIO_ID_NET && num_queues < NET_QUEUES {
            return Err(VdpaError::TooFew(num_queues));
        }
        let offered = called("VHOST_VDPA_GET_VQS_COUNT", backend.queues_count())?;
        if offered < u32::from(num_queues) {
            return Err(VdpaError::Queues { offered, needed: num_queues });
        }
        let size = called("VHOST_VDPA_GET_VRING_NUM", backend.queue_size_max())?;
        let queue_size = queue_size(size).ok_or(VdpaError::QueueSize(size))?;
        let config_len_bytes = called("VHOST_VDPA_GET_CONFIG_SIZE", backend.config_len_bytes())?;
        let config_len_bytes = config_len_bytes.min(CONFIG_LEN_BYTES_MAX);
        let has = called("VHOST_GET_FEATURES", backend.features())?;
        if has & 1 << VIRTIO_F_VERSION_1 == 0 {
            return Err(VdpaError::Lacks("VIRTIO_F_VERSION_1"));
        }
        let field = |offset| field(backend, config_len_bytes, offset);
        let hidden = match u32::from(device_id) {
            ids::VIRTIO_ID_NET => hidden_of_net(has, num_queues, field)?,
            ids::VIRTIO_ID_BLOCK => hidden_of_block(has, num_queues, field)?,
            _ => 0,
        };
        Ok(Self {
            device_id,
            features: has & (RING_FEATURES | DEVICE_FEATURES | ORDER_PLATFORM) & !hidden,
            features_always: has & ACCESS_PLATFORM,
            queue_sizes: vec![queue_size; usize::from(num_queues)],
            config_len_bytes,
            has_batches: can & IOTLB_BATCH != 0,
            can_suspend: can & SUSPEND != 0 && can & RESUME != 0,
        })
    }

    /// The part of an access of `len` bytes at `offset` that is in the configuration.
    pub(super) fn in_config(&self, offset: u64, len: usize) -> Option<(u32, usize)> {
        let offset = u32::try_from(offset).ok()?;
        let left = usize::try_from(self.config_len_bytes.checked_sub(offset)?).ok()?;
        Some((offset, len.min(left))).filter(|(_, len)| *len > 0)
    }
}

/// The largest power of two in what a device says of its queues.
fn queue_size(size: u16) -> Option<u16> {
    let size = size.min(QUEUE_SIZE_MAX);
    Some(1 << size.checked_ilog2()?).filter(|size| *size >= QUEUE_SIZE_MIN)
}

/// A field of two bytes of the configuration; 0 if that is shorter.
fn field(backend: &dyn Backend, config_len_bytes: u32, offset: u32) -> Result<u16, VdpaError> {
    let mut field = [0; 2];
    if offset.saturating_add(2) <= config_len_bytes {
        called("VHOST_VDPA_GET_CONFIG", backend.read_config(offset, &mut field))?;
    }
    Ok(u16::from_le_bytes(field))
}

/// A network device finds its control queue behind all its other queues.
fn hidden_of_net(
    has: u64,
    num_queues: u16,
    field: impl Fn(u32) -> Result<u16, VdpaError>,
) -> Result<u64, VdpaError> {
    if num_queues < NET_WITH_CONTROL {
        return Ok(NET_CONTROL);
    }
    if has & NET_PAIRS == 0 {
        return Ok(0);
    }
    let needed = u32::from(field(NET_PAIRS_OFFSET)?) * 2 + 1;
    Ok(if needed > u32::from(num_queues) { NET_PAIRS } else { 0 })
}

/// A block device says how many queues it has.
fn hidden_of_block(
    has: u64,
    num_queues: u16,
    field: impl Fn(u32) -> Result<u16, VdpaError>,
) -> Result<u64, VdpaError> {
    let several = 1 << blk::VIRTIO_BLK_F_MQ;
    let is_hidden = has & several != 0 && field(BLOCK_QUEUES_OFFSET)? > num_queues;
    Ok(if is_hidden { several } else { 0 })
}
