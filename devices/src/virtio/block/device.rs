// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The block device.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use virtio_bindings::virtio_blk as abi;

use super::config::{self, ConfigInput};
use super::counters::BlockCounters;
use super::formatted::DiskFormat;
#[cfg(any(test, feature = "testing"))]
use super::image::SECTOR_BYTES;
use super::image::{Disk, DiskError};
use super::limits::BlockLimits;
use super::lock::{DiskLock, LockGranularity};
use super::no_space::{FullDisk, NoSpace, OnFull};
use super::perform::{CacheMode, Engine};
use super::pool::QueueThreads;
#[cfg(any(test, feature = "testing"))]
use super::request::Range;
use super::request::SERIAL_BYTES;
use super::resize::{DiskResizer, Notice};
use super::ring::Ring;
use super::state;
#[cfg(any(test, feature = "testing"))]
use super::synchronous;
use super::worker::{BlockWorker, Shared};
use crate::log_limited;
use crate::virtio::RateLimiter;
use crate::virtio::buffers::RANGES_MAX;
use crate::virtio::device::{ActivateError, Activation, DeviceSnapshot, StateError, VirtioDevice};
use crate::virtio::limiter::Throttle;
use crate::virtio::queue::WorkQueue;
use crate::virtio::worker::{Pausing, Workers};
use crate::virtio::{RING_FEATURES, read_config_bytes};

/// Virtio device ID of block devices.
const DEVICE_ID: u16 = 2;
/// Descriptors of a request in addition to its data: header and status.
const OVERHEAD_DESCRIPTORS: u32 = 2;

/// Configuration of a block device.
#[derive(Clone, Debug)]
pub struct BlockConfig {
    /// Id of the device, for thread names and messages.
    pub id: String,
    /// Image or block device.
    pub path: PathBuf,
    /// Format of the image, which is never detected.
    pub format: DiskFormat,
    /// Whether to open the backing files that the image names.
    pub backing_files: bool,
    /// Whether the disk is read-only.
    pub readonly: bool,
    /// Whether to bypass the host's page cache.
    pub direct: bool,
    /// Whether to offer discard, and write zeroes with deallocation.
    pub sparse: bool,
    /// Number of queues, each with its own thread.
    pub num_queues: u16,
    /// Size of each queue, a power of two.
    pub queue_size: u16,
    /// Serial string, by default the id; truncated to 20 bytes.
    pub serial: Option<String>,
    /// Whether to avoid io_uring.
    pub disable_io_uring: bool,
    /// Byte range that [`DiskLock`] locks.
    pub lock_granularity: LockGranularity,
    /// Host CPUs for the thread of each queue; empty for all.
    pub queue_affinity: Vec<Vec<usize>>,
    /// Handling of requests for which the host has no space.
    pub on_full: OnFull,
    /// Limit on bytes read and written and on requests, shared by all queues and perhaps other disks.
    pub limiter: Option<Arc<RateLimiter>>,
    /// What is accepted of discards and writes of zeroes.
    pub limits: BlockLimits,
}

impl Default for BlockConfig {
    fn default() -> Self {
        Self {
            id: String::new(),
            path: PathBuf::new(),
            format: DiskFormat::Raw,
            backing_files: false,
            readonly: false,
            direct: false,
            sparse: true,
            num_queues: 1,
            queue_size: 128,
            serial: None,
            disable_io_uring: false,
            lock_granularity: LockGranularity::default(),
            queue_affinity: Vec::new(),
            on_full: OnFull::default(),
            limiter: None,
            limits: BlockLimits::GODWIT,
        }
    }
}

/// A block device.
pub struct Block {
    config: BlockConfig,
    disk: Arc<Disk>,
    queue_sizes: Vec<u16>,
    features: u64,
    acknowledged: u64,
    writeback: Arc<AtomicBool>,
    counters: Arc<BlockCounters>,
    full: Arc<NoSpace>,
    /// For changes of the size.
    notice: Arc<Mutex<Notice>>,
    workers: Workers,
}

impl Block {
    /// Opens the image. The lock is not taken: see [`Self::lock`].
    pub fn new(config: BlockConfig) -> Result<Self, DiskError> {
        check_queues(&config)?;
        let disk = Arc::new(Disk::open_as(&config)?);
        Ok(Self::with_disk(config, disk))
    }

    /// A device with the open image and lock of another device of this process, so that no other VM can
    /// take it in between. Options for opening it keep their earlier values.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn over(config: BlockConfig, kept: &DiskLock) -> Result<Self, DiskError> {
        check_queues(&config)?;
        let disk = Arc::new(kept.disk.again()?);
        Ok(Self::with_disk(config, disk))
    }

    pub(super) fn with_disk(config: BlockConfig, disk: Arc<Disk>) -> Self {
        Self {
            queue_sizes: vec![config.queue_size; config.num_queues.into()],
            features: offered_features(&config),
            config,
            disk,
            acknowledged: 0,
            writeback: Arc::new(AtomicBool::new(true)),
            counters: Arc::default(),
            full: Arc::default(),
            notice: Arc::default(),
            workers: Workers::default(),
        }
    }

    /// The lock of the image, to be taken before the guest runs and released when another VMM takes the
    /// guest over.
    pub fn lock(&self) -> DiskLock {
        DiskLock { disk: Arc::clone(&self.disk), granularity: self.config.lock_granularity }
    }

    /// Handle to the requests that wait for free space, if the device keeps them (on_full=pause).
    pub fn full_disk(&self) -> Option<FullDisk> {
        let keeps = self.config.on_full == OnFull::Pause;
        keeps.then(|| FullDisk::new(&self.full, &self.disk))
    }

    /// Handle to change the size of the disk.
    pub fn resizer(&self) -> DiskResizer {
        let (full, notice) = (Arc::clone(&self.full), Arc::clone(&self.notice));
        DiskResizer { lock: self.lock(), full, notice }
    }

    /// The device's counters.
    pub fn counters(&self) -> Arc<BlockCounters> {
        Arc::clone(&self.counters)
    }

    /// Reads and writes at several offsets, ignoring errors, and writes the tables.
    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn try_image(&self) {
        const LEN_BYTES: usize = 24 << 10;
        let disk = &self.disk;
        let lock = self.lock();
        if lock.lock().and_then(|()| lock.load()).is_err() {
            return;
        }
        let size_bytes = disk.capacity_sectors().saturating_mul(SECTOR_BYTES);
        let last = size_bytes.saturating_sub(u64::try_from(LEN_BYTES).unwrap_or(0));
        let mut buffer = vec![0xa5; LEN_BYTES];
        for offset in [0, 8192, 2 << 20, last] {
            let offset = offset.min(last);
            let len_bytes = size_bytes.min(16 << 10);
            let range = |unmap| Range { offset, len_bytes, unmap };
            let len = usize::try_from(size_bytes).unwrap_or(LEN_BYTES).min(LEN_BYTES);
            let buffer = buffer.get_mut(..len).unwrap_or_default();
            let _ = disk.read_exact_at(buffer, offset);
            if !disk.readonly() {
                let _ = disk.write_all_at(buffer, offset);
                let _ = synchronous::discard(disk, &[range(false)]);
                let _ = synchronous::write_zeroes(disk, &[range(true)], true);
                let _ = synchronous::write_zeroes(disk, &[range(false)], true);
                let _ = disk.write_all_at(buffer, offset);
            }
        }
        let _ = lock.write_back();
        let _ = lock.unlock();
    }

    fn serial(&self) -> [u8; SERIAL_BYTES] {
        let text = self.config.serial.as_deref().unwrap_or(&self.config.id);
        let mut serial = [0; SERIAL_BYTES];
        for (to, from) in serial.iter_mut().zip(text.bytes()) {
            *to = from;
        }
        serial
    }

    fn seg_max(&self) -> u32 {
        let ranges_max = u32::try_from(RANGES_MAX).unwrap_or(u32::MAX);
        let descriptors = u32::from(self.config.queue_size).min(ranges_max);
        descriptors.saturating_sub(OVERHEAD_DESCRIPTORS).max(1)
    }

    fn start(&mut self, activation: Activation) -> Result<(), ActivateError> {
        let Activation { memory, interrupt, queues, features } = activation;
        if queues.first().is_none_or(|queue| queue.index != 0) {
            return Err(ActivateError::MissingQueue { index: 0 });
        }
        let engine = Engine {
            disk: Arc::clone(&self.disk),
            serial: self.serial(),
            cache: CacheMode {
                flush_negotiated: has(features, abi::VIRTIO_BLK_F_FLUSH)
                    || has(features, abi::VIRTIO_BLK_F_CONFIG_WCE),
                writeback: Arc::clone(&self.writeback),
            },
            sparse: self.config.sparse,
            on_full: self.config.on_full,
        };
        let shared = Shared {
            engine,
            limits: self.config.limits,
            threads: QueueThreads {
                device: self.config.id.clone(),
                queues: self.config.num_queues,
                cpus: Arc::new(self.config.queue_affinity.clone()),
            },
            counters: Arc::clone(&self.counters),
            full: Arc::clone(&self.full),
            log: self.workers.log_limit(),
        };
        let with_ring = !self.config.disable_io_uring && Ring::is_available();
        for active in queues {
            let index = active.index;
            let name = format!("{}_q{index}", self.config.id);
            let cpus = self.config.queue_affinity.get(usize::from(index));
            let cpus = cpus.map(Vec::as_slice).unwrap_or_default();
            let queue = WorkQueue::new(active, &memory, &interrupt, features);
            let worker = BlockWorker::new(queue, shared.clone(), with_ring)
                .limited(Throttle::new(self.config.limiter.as_ref())?);
            self.workers.spawn(&name, cpus, worker)?;
        }
        Ok(())
    }
}

fn check_queues(config: &BlockConfig) -> Result<(), DiskError> {
    let error = |what, value, allowed| {
        Err(DiskError::Queues { path: config.path.clone(), what, value, allowed })
    };
    if config.num_queues == 0 {
        return error("num_queues", config.num_queues, "at least 1");
    }
    if !config.queue_size.is_power_of_two() || config.queue_size < 2 || config.queue_size > 32768 {
        return error("queue_size", config.queue_size, "a power of two from 2 to 32768");
    }
    Ok(())
}

fn offered_features(config: &BlockConfig) -> u64 {
    let mut features = RING_FEATURES
        | 1 << abi::VIRTIO_BLK_F_SEG_MAX
        | 1 << abi::VIRTIO_BLK_F_BLK_SIZE
        | 1 << abi::VIRTIO_BLK_F_FLUSH
        | 1 << abi::VIRTIO_BLK_F_TOPOLOGY
        | 1 << abi::VIRTIO_BLK_F_CONFIG_WCE;
    if config.readonly {
        features |= 1 << abi::VIRTIO_BLK_F_RO;
    } else {
        features |= 1 << abi::VIRTIO_BLK_F_WRITE_ZEROES;
        if config.sparse {
            features |= 1 << abi::VIRTIO_BLK_F_DISCARD;
        }
    }
    if config.num_queues > 1 {
        features |= 1 << abi::VIRTIO_BLK_F_MQ;
    }
    features
}

fn has(features: u64, bit: u32) -> bool {
    features & (1 << bit) != 0
}

impl VirtioDevice for Block {
    fn device_id(&self) -> u16 {
        DEVICE_ID
    }

    fn queue_sizes_max(&self) -> &[u16] {
        &self.queue_sizes
    }

    fn features(&self) -> u64 {
        self.features
    }

    fn acknowledge_features(&mut self, features: u64) {
        self.acknowledged = features & self.features;
        // For a driver that can change the cache mode and cannot flush, the cache starts off (virtio 1.3,
        // 5.2.5.2).
        let starts_through = has(self.acknowledged, abi::VIRTIO_BLK_F_CONFIG_WCE)
            && !has(self.acknowledged, abi::VIRTIO_BLK_F_FLUSH);
        self.writeback.store(!starts_through, Ordering::Release);
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        let input = ConfigInput {
            seg_max: self.seg_max(),
            num_queues: self.config.num_queues,
            writeback: self.writeback.load(Ordering::Acquire),
            sparse: self.config.sparse,
            limits: self.config.limits,
        };
        read_config_bytes(&config::build(&self.disk, &input), offset, data);
    }

    fn write_config(&mut self, offset: u64, data: &[u8]) {
        if offset == config::WRITEBACK_OFFSET
            && has(self.acknowledged, abi::VIRTIO_BLK_F_CONFIG_WCE)
            && let [value @ (0 | 1)] = data
        {
            self.writeback.store(*value == 1, Ordering::Release);
        }
    }

    fn activate(&mut self, activation: Activation) -> Result<(), ActivateError> {
        let interrupt = Arc::clone(&activation.interrupt);
        let started = self.start(activation);
        if started.is_ok() {
            self.notice.lock().activate(&interrupt);
        } else {
            self.workers.stop();
            self.full.forget();
        }
        started
    }

    fn reset(&mut self) {
        self.notice.lock().reset();
        self.workers.stop();
        let kept = self.full.forget();
        if kept > 0 {
            let path = self.disk.path().display();
            log_limited!(
                self.workers.log_limit(),
                Warn,
                "disk {path}: {kept} requests that there was no room for are not carried out, as the device is reset"
            );
        }
        self.acknowledged = 0;
        self.writeback.store(true, Ordering::Release);
    }

    fn pausing(&mut self) -> &mut dyn Pausing {
        &mut self.workers
    }

    fn save(&self) -> DeviceSnapshot {
        state::save(&self.disk, self.writeback.load(Ordering::Acquire))
    }

    fn restore(&mut self, state: &DeviceSnapshot) -> Result<(), StateError> {
        let writeback = state::check(&self.disk, state)?;
        self.writeback.store(writeback, Ordering::Release);
        Ok(())
    }
}
