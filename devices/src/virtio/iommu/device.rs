// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The IOMMU device.

use std::io;

use super::domains::{DOMAIN_MAX, IommuHandle, PAGE_BYTES};
use super::request::PROBE_LEN_BYTES;
use super::state;
use super::worker::IommuWorker;
use crate::virtio::device::{ActivateError, Activation, DeviceSnapshot, StateError, VirtioDevice};
use crate::virtio::queue::WorkQueue;
use crate::virtio::worker::{Pausing, Workers};
use crate::virtio::{RING_FEATURES, read_config_bytes};

/// Virtio device ID of IOMMUs.
const DEVICE_ID: u16 = 23;
const QUEUE_SIZES: [u16; 2] = [256, 256];

/// Features of the device (virtio 1.3, 5.13.3).
const INPUT_RANGE: u64 = 1 << 0;
const DOMAIN_RANGE: u64 = 1 << 1;
const MAP_UNMAP: u64 = 1 << 2;
const PROBE: u64 = 1 << 4;
const BYPASS_CONFIG: u64 = 1 << 6;

const CONFIG_LEN_BYTES: usize = 40;
const BYPASS_OFFSET: u64 = 36;

/// Configuration of an IOMMU.
#[derive(Clone, Debug)]
pub struct IommuConfig {
    /// Id of the device, for its thread name.
    pub id: String,
    /// Bits of the addresses that it translates, 1 to 64.
    pub address_bits: u8,
    /// Bytes of guest memory, by which mappings are limited.
    pub memory_bytes: u64,
}

/// An IOMMU.
pub struct Iommu {
    config: IommuConfig,
    handle: IommuHandle,
    features: u64,
    workers: Workers,
}

impl Iommu {
    /// An IOMMU with no device behind it.
    ///
    /// # Errors
    /// The host gives no eventfd.
    pub fn new(config: IommuConfig) -> io::Result<Self> {
        let unused = 64_u32.saturating_sub(u32::from(config.address_bits)).min(63);
        let handle = IommuHandle::new(u64::MAX >> unused, config.memory_bytes)?;
        Ok(Self { config, handle, features: 0, workers: Workers::default() })
    }

    /// What the VMM tells it of devices.
    pub fn handle(&self) -> IommuHandle {
        self.handle.clone()
    }

    fn config_bytes(&self) -> [u8; CONFIG_LEN_BYTES] {
        let domains = self.handle.domains.lock();
        let probe_bytes = u32::try_from(PROBE_LEN_BYTES).unwrap_or(0);
        let mut bytes = [0; CONFIG_LEN_BYTES];
        let page_sizes = (!(PAGE_BYTES - 1)).to_le_bytes();
        let config = page_sizes
            .into_iter()
            .chain(0_u64.to_le_bytes())
            .chain(domains.last_address().to_le_bytes())
            .chain(0_u32.to_le_bytes())
            .chain(DOMAIN_MAX.to_le_bytes())
            .chain(probe_bytes.to_le_bytes())
            .chain([u8::from(domains.bypass())]);
        bytes.iter_mut().zip(config).for_each(|(to, from)| *to = from);
        bytes
    }
}

impl VirtioDevice for Iommu {
    fn device_id(&self) -> u16 {
        DEVICE_ID
    }

    fn queue_sizes_max(&self) -> &[u16] {
        &QUEUE_SIZES
    }

    fn features(&self) -> u64 {
        RING_FEATURES | INPUT_RANGE | DOMAIN_RANGE | MAP_UNMAP | PROBE | BYPASS_CONFIG
    }

    fn acknowledge_features(&mut self, features: u64) {
        self.features = features;
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        read_config_bytes(&self.config_bytes(), offset, data);
    }

    fn write_config(&mut self, offset: u64, data: &[u8]) {
        if let (BYPASS_OFFSET, [value @ (0 | 1), ..]) = (offset, data)
            && self.features & BYPASS_CONFIG != 0
        {
            self.handle.domains.lock().set_bypass(*value == 1);
        }
    }

    fn activate(&mut self, activation: Activation) -> Result<(), ActivateError> {
        let Activation { memory, interrupt, queues, features } = activation;
        let mut queues = queues.into_iter();
        let mut take = |index| {
            let queue = queues.next().filter(|queue| queue.index == index);
            let queue = queue.ok_or(ActivateError::MissingQueue { index })?;
            Ok(WorkQueue::new(queue, &memory, &interrupt, features))
        };
        let worker = IommuWorker::new(take(0)?, take(1)?, self.handle.clone());
        self.workers.spawn(&self.config.id, &[], worker)
    }

    /// What endpoints without a domain reach is kept (virtio 1.3, 5.13.5).
    fn reset(&mut self) {
        self.workers.stop();
        self.features = 0;
        self.handle.domains.lock().clear();
        self.handle.notices.forget_faults();
    }

    fn pausing(&mut self) -> &mut dyn Pausing {
        &mut self.workers
    }

    fn save(&self) -> DeviceSnapshot {
        state::save(&self.handle)
    }

    fn restore(&mut self, state: &DeviceSnapshot) -> Result<(), StateError> {
        state::restore(state, &self.handle)
    }
}
