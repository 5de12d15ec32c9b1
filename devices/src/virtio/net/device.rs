// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The network device.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use thiserror::Error;
use virtio_bindings::virtio_net as abi;

use super::announce::Announcer;
use super::config::{GUEST_OFFLOADS, Link};
use super::control::{ControlWorker, control_index};
use super::counters::NetCounters;
use super::slot::{TapConfig, TapSlot};
use super::state;
use super::tap::{MacAddress, TapError};
use super::worker::{NetWorker, PairLimits};
use crate::virtio::device::{
    ActivateError, Activation, ActiveQueue, DeviceSnapshot, StateError, VirtioDevice,
};
use crate::virtio::limiter::Throttle;
use crate::virtio::queue::WorkQueue;
use crate::virtio::worker::{Pausing, Workers};
use crate::virtio::{BucketConfig, RING_FEATURES, RateLimiter, read_config_bytes};

/// Virtio device ID of network devices.
const DEVICE_ID: u16 = 1;
/// Maximum number of queue pairs, which is that of a tap.
const PAIRS_MAX: u16 = 256;

/// Configuration of a network device.
#[derive(Debug)]
pub struct NetConfig {
    /// Id of the device, for thread names and messages.
    pub id: String,
    /// The tap to open by name. Its `queue_pairs` is that of the device.
    pub tap: TapConfig,
    /// Tap descriptors, one per queue pair, if another process has opened it.
    pub fds: Vec<OwnedFd>,
    /// MAC address of the guest; random by default.
    pub mac: Option<MacAddress>,
    /// Size of each queue, a power of two.
    pub queue_size: u16,
    /// Whether to offer TCP segmentation in both directions.
    pub offload_tso: bool,
    /// Whether to offer UDP fragmentation in both directions.
    pub offload_ufo: bool,
    /// Whether to offer checksums in both directions, which the other offloads require.
    pub offload_csum: bool,
    /// Whether to open the tap only when the device runs, as at a migration destination.
    pub open_tap_later: bool,
    /// Limit on the bytes of frames, for each queue pair and direction by itself.
    pub bandwidth: BucketConfig,
    /// Limit on frames, in the same way.
    pub ops: BucketConfig,
}

impl Default for NetConfig {
    fn default() -> Self {
        Self {
            id: String::new(),
            tap: TapConfig { queue_pairs: 1, ..TapConfig::default() },
            fds: Vec::new(),
            mac: None,
            queue_size: 256,
            offload_tso: true,
            offload_ufo: true,
            offload_csum: true,
            open_tap_later: false,
            bandwidth: BucketConfig::default(),
            ops: BucketConfig::default(),
        }
    }
}

/// Why a network device cannot be created.
#[derive(Debug, Error)]
pub enum NetError {
    /// The tap cannot be opened or configured.
    #[error("network device {id} has no tap")]
    Tap {
        /// Id of the device.
        id: String,
        /// The cause.
        #[source]
        source: TapError,
    },
    /// A number is out of range.
    #[error("network device {id} cannot have {what} {value}: it must be {allowed}")]
    Number {
        /// Id of the device.
        id: String,
        /// Name of the value.
        what: &'static str,
        /// The value.
        value: u16,
        /// The valid range.
        allowed: &'static str,
    },
    /// No random MAC address is available.
    #[error("network device {id} gets no random MAC address")]
    Mac {
        /// Id of the device.
        id: String,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
}

/// A network device.
pub struct Net {
    id: String,
    link: Arc<Link>,
    /// The address that `reset` restores.
    mac: MacAddress,
    queue_sizes: Vec<u16>,
    features: u64,
    counters: Arc<NetCounters>,
    workers: Workers,
    /// The limits on receiving and on transmitting of each queue pair. A reset of the device does not refill them.
    limiters: Vec<[Option<Arc<RateLimiter>>; 2]>,
}

impl Net {
    /// Creates the device and opens the tap, unless it is to be opened later.
    pub fn new(config: NetConfig) -> Result<Self, NetError> {
        let id = config.id.clone();
        let tap_error = |source| NetError::Tap { id: id.clone(), source };
        let NetConfig { tap, fds, .. } = config;
        let mut tap = tap;
        let is_opened = !fds.is_empty();
        if is_opened {
            tap.queue_pairs = u16::try_from(fds.len()).unwrap_or(u16::MAX);
        }
        let settings = NetSettings {
            id: config.id,
            mac: config.mac,
            queue_size: config.queue_size,
            pairs: tap.queue_pairs,
            mtu: tap.mtu,
            offload_tso: config.offload_tso,
            offload_ufo: config.offload_ufo,
            offload_csum: config.offload_csum,
        };
        settings.check()?;
        let slot = if is_opened {
            TapSlot::with_fds(tap, fds).map_err(tap_error)?
        } else {
            let slot = TapSlot::new(tap);
            if !config.open_tap_later {
                slot.acquire().map_err(tap_error)?;
            }
            slot
        };
        let mut net = Self::with_slot(settings, Arc::new(slot))?;
        net.limit(config.bandwidth, config.ops);
        Ok(net)
    }

    /// Limits each queue pair and direction, with full buckets.
    pub(super) fn limit(&mut self, bandwidth: BucketConfig, ops: BucketConfig) {
        let limiter = || RateLimiter::new(bandwidth, ops);
        self.limiters = (0..self.link.max_pairs).map(|_| [limiter(), limiter()]).collect();
    }

    pub(super) fn with_slot(settings: NetSettings, slot: Arc<TapSlot>) -> Result<Self, NetError> {
        let features = settings.features();
        let mac = match settings.mac {
            Some(mac) => mac,
            None => MacAddress::random()
                .map_err(|source| NetError::Mac { id: settings.id.clone(), source })?,
        };
        // Plus the control queue.
        let queues = usize::from(settings.pairs) * 2 + 1;
        Ok(Self {
            link: Arc::new(Link::new(slot, mac, settings.pairs, settings.mtu)),
            mac,
            queue_sizes: vec![settings.queue_size; queues],
            features,
            counters: Arc::default(),
            workers: Workers::default(),
            limiters: Vec::new(),
            id: settings.id,
        })
    }

    /// MAC address of the guest.
    pub fn mac(&self) -> MacAddress {
        self.link.state().mac
    }

    /// The tap, to be released to or taken over from another VMM.
    pub fn tap(&self) -> Arc<TapSlot> {
        Arc::clone(&self.link.tap)
    }

    /// The handle to announce the guest after a migration.
    pub fn announcer(&self) -> Announcer {
        Announcer { link: Arc::clone(&self.link) }
    }

    /// The device's counters.
    pub fn counters(&self) -> Arc<NetCounters> {
        Arc::clone(&self.counters)
    }

    /// The same with limits of a test, for receiving and for transmitting.
    #[cfg(test)]
    pub(super) fn limit_by(&mut self, limiters: [Option<Arc<RateLimiter>>; 2]) {
        self.limiters = vec![limiters];
    }

    fn limits(&self, pair: u16) -> Result<PairLimits, ActivateError> {
        let Some([receive, transmit]) = self.limiters.get(usize::from(pair)) else {
            return Ok(PairLimits::default());
        };
        Ok(PairLimits {
            receive: Throttle::new(receive.as_ref())?,
            transmit: Throttle::new(transmit.as_ref())?,
        })
    }

    fn start(&mut self, activation: Activation) -> Result<(), ActivateError> {
        let Activation { memory, interrupt, queues, features } = activation;
        let control_index = control_index(self.link.max_pairs, features);
        let mut queues: Vec<Option<ActiveQueue>> = queues.into_iter().map(Some).collect();
        let mut take = |index: u16| {
            let found = queues
                .iter_mut()
                .find(|queue| queue.as_ref().is_some_and(|queue| queue.index == index));
            let active = found.and_then(Option::take)?;
            Some(WorkQueue::new(active, &memory, &interrupt, features))
        };
        let has_control = features & 1 << abi::VIRTIO_NET_F_CTRL_VQ != 0;
        if has_control && let Some(queue) = take(control_index) {
            let worker = ControlWorker::new(queue, Arc::clone(&self.link), features);
            self.workers.spawn(&format!("{}_ctrl", self.id), &[], worker)?;
        }
        for pair in 0..self.link.max_pairs {
            let (receive_index, transmit_index) = (pair * 2, pair * 2 + 1);
            if receive_index == control_index {
                break;
            }
            let (receive, transmit) = match (take(receive_index), take(transmit_index)) {
                (Some(receive), Some(transmit)) => (receive, transmit),
                // Only the first pair is required.
                (None, _) if pair == 0 => {
                    return Err(ActivateError::MissingQueue { index: receive_index });
                }
                (_, None) if pair == 0 => {
                    return Err(ActivateError::MissingQueue { index: transmit_index });
                }
                _ => continue,
            };
            let worker = NetWorker::new(
                receive,
                transmit,
                pair,
                Arc::clone(&self.link),
                Arc::clone(&self.counters),
                features,
            )
            .limited(self.limits(pair)?);
            self.workers.spawn(&format!("{}_qp{pair}", self.id), &[], worker)?;
        }
        if features & 1 << abi::VIRTIO_NET_F_GUEST_ANNOUNCE != 0 {
            self.link.set_interrupt(Some(interrupt));
        }
        Ok(())
    }
}

/// Settings of the device, without the tap.
pub(super) struct NetSettings {
    pub(super) id: String,
    pub(super) mac: Option<MacAddress>,
    pub(super) queue_size: u16,
    pub(super) pairs: u16,
    pub(super) mtu: Option<u16>,
    pub(super) offload_tso: bool,
    pub(super) offload_ufo: bool,
    pub(super) offload_csum: bool,
}

impl NetSettings {
    fn check(&self) -> Result<(), NetError> {
        let error = |what, value, allowed| {
            Err(NetError::Number { id: self.id.clone(), what, value, allowed })
        };
        if !(1..=PAIRS_MAX).contains(&self.pairs) {
            return error("queue pairs", self.pairs, "from 1 to 256");
        }
        let size = self.queue_size;
        if !size.is_power_of_two() || !(2..=32768).contains(&size) {
            return error("queue_size", size, "a power of two from 2 to 32768");
        }
        // IPv6 needs more; this is the minimum of the virtio standard.
        if self.mtu.is_some_and(|mtu| mtu < 68) {
            return error("mtu", self.mtu.unwrap_or(0), "at least 68");
        }
        Ok(())
    }

    fn features(&self) -> u64 {
        let mut features = RING_FEATURES
            | 1 << abi::VIRTIO_NET_F_MAC
            | 1 << abi::VIRTIO_NET_F_STATUS
            | 1 << abi::VIRTIO_NET_F_MRG_RXBUF
            | 1 << abi::VIRTIO_NET_F_CTRL_VQ
            | 1 << abi::VIRTIO_NET_F_CTRL_RX
            | 1 << abi::VIRTIO_NET_F_CTRL_VLAN
            | 1 << abi::VIRTIO_NET_F_CTRL_MAC_ADDR
            | 1 << abi::VIRTIO_NET_F_GUEST_ANNOUNCE;
        if self.pairs > 1 {
            features |= 1 << abi::VIRTIO_NET_F_MQ;
        }
        if self.mtu.is_some() {
            features |= 1 << abi::VIRTIO_NET_F_MTU;
        }
        if !self.offload_csum {
            return features;
        }
        features |= 1 << abi::VIRTIO_NET_F_CSUM
            | 1 << abi::VIRTIO_NET_F_GUEST_CSUM
            | 1 << abi::VIRTIO_NET_F_CTRL_GUEST_OFFLOADS;
        if self.offload_tso {
            features |= 1 << abi::VIRTIO_NET_F_HOST_TSO4
                | 1 << abi::VIRTIO_NET_F_HOST_TSO6
                | 1 << abi::VIRTIO_NET_F_HOST_ECN
                | 1 << abi::VIRTIO_NET_F_GUEST_TSO4
                | 1 << abi::VIRTIO_NET_F_GUEST_TSO6
                | 1 << abi::VIRTIO_NET_F_GUEST_ECN;
        }
        if self.offload_ufo {
            features |= 1 << abi::VIRTIO_NET_F_HOST_UFO | 1 << abi::VIRTIO_NET_F_GUEST_UFO;
        }
        features
    }
}

impl VirtioDevice for Net {
    fn device_id(&self) -> u16 {
        DEVICE_ID
    }

    fn queue_sizes_max(&self) -> &[u16] {
        &self.queue_sizes
    }

    fn features(&self) -> u64 {
        self.features
    }

    /// The offloads that the driver may change at run time start as those it has accepted.
    fn acknowledge_features(&mut self, features: u64) {
        self.link.change(|state| state.offloads = features & self.features & GUEST_OFFLOADS);
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        read_config_bytes(&self.link.config(), offset, data);
    }

    fn activate(&mut self, activation: Activation) -> Result<(), ActivateError> {
        let started = self.start(activation);
        if started.is_err() {
            self.workers.stop();
        }
        started
    }

    fn reset(&mut self) {
        self.link.set_interrupt(None);
        self.workers.stop();
        self.link.change(|state| {
            state.mac = self.mac;
            state.offloads = 0;
            state.active_pairs = 1;
            state.announce_pending = false;
        });
    }

    fn pausing(&mut self) -> &mut dyn Pausing {
        &mut self.workers
    }

    fn save(&self) -> DeviceSnapshot {
        state::save(&self.link)
    }

    fn restore(&mut self, state: &DeviceSnapshot) -> Result<(), StateError> {
        let restored = state::check(&self.link, state)?;
        self.link.change(|state| *state = restored);
        Ok(())
    }
}

#[cfg(test)]
impl Net {
    /// A device with one queue pair, whose tap is any file that preserves frame boundaries.
    pub(in crate::virtio) fn for_test(tap: std::fs::File) -> Self {
        Self::for_test_of_pairs(vec![tap])
    }

    /// The same with a queue pair for each file.
    pub(super) fn for_test_of_pairs(taps: Vec<std::fs::File>) -> Self {
        let pairs = u16::try_from(taps.len()).unwrap_or(1);
        let taps = taps.into_iter().map(super::tap::Tap::from_file).collect();
        let slot = TapSlot::with_taps(TapConfig::default(), taps);
        let settings = NetSettings {
            id: "net".to_owned(),
            mac: Some(MacAddress([0x02, 1, 2, 3, 4, 5])),
            queue_size: 256,
            pairs,
            mtu: Some(1500),
            offload_tso: true,
            offload_ufo: true,
            offload_csum: true,
        };
        #[expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]
        Self::with_slot(settings, Arc::new(slot)).unwrap()
    }
}
