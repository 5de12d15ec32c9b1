// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A vDPA device for tests that answers whatever a test wants, and records what it is asked.
//!
//! Owns what a kernel would hold: the status, the mappings, the eventfds. It must never reach the memory that is mapped
//! for it.

use std::collections::BTreeMap;
use std::io;
use std::ops::RangeInclusive;
use std::sync::Arc;

use parking_lot::Mutex;
use vmm_sys_util::eventfd::EventFd;

use super::backend::{Backend, IOTLB_BATCH, IOTLB_MSG_V2, RESUME, RingPlace, SUSPEND};

/// Decides by a call's name and arguments whether it fails.
pub(super) type Fails = Box<dyn FnMut(&str) -> Option<io::Error> + Send>;

/// What the device says of itself.
#[derive(Clone, Debug)]
pub(super) struct Answers {
    pub(super) device_id: u32,
    pub(super) queues: u32,
    pub(super) queue_size: u16,
    pub(super) config: Vec<u8>,
    /// What it says of the length of its configuration.
    pub(super) config_len_bytes: u32,
    pub(super) iova: RangeInclusive<u64>,
    pub(super) features: u64,
    pub(super) backend_features: u64,
    /// Bits of the status that the device does not take.
    pub(super) refused_status: u8,
    /// Bits of the status that it sets itself.
    pub(super) own_status: u8,
    pub(super) vring_base: u32,
}

impl Default for Answers {
    fn default() -> Self {
        Self {
            device_id: 2,
            queues: 4,
            queue_size: 256,
            config: (0..60).collect(),
            config_len_bytes: 60,
            iova: 0..=u64::MAX,
            // VERSION_1, ACCESS_PLATFORM, EVENT_IDX, FLUSH of block devices.
            features: 1 << 32 | 1 << 33 | 1 << 29 | 1 << 9,
            backend_features: IOTLB_MSG_V2 | IOTLB_BATCH | SUSPEND | RESUME,
            refused_status: 0,
            own_status: 0,
            vring_base: 7,
        }
    }
}

/// What a test sees of the device.
#[derive(Default)]
pub(super) struct Seen {
    /// Calls that change something, with their arguments, in order.
    pub(super) calls: Mutex<Vec<String>>,
    /// Mapped ranges: start and length.
    pub(super) mapped: Mutex<BTreeMap<u64, u64>>,
    /// Eventfds of queues, by index: for its signals, and those of the driver.
    pub(super) vring_calls: Mutex<BTreeMap<u16, EventFd>>,
    pub(super) kicks: Mutex<BTreeMap<u16, EventFd>>,
    pub(super) config_call: Mutex<Option<EventFd>>,
    pub(super) status: Mutex<u8>,
}

/// The device.
pub(super) struct Scripted {
    pub(super) answers: Arc<Mutex<Answers>>,
    pub(super) seen: Arc<Seen>,
    fails: Mutex<Fails>,
}

impl Scripted {
    /// A device with these answers, of which calls fail as `fails` says.
    pub(super) fn new(answers: Answers, fails: Fails) -> Self {
        let answers = Arc::new(Mutex::new(answers));
        Self { answers, seen: Arc::default(), fails: Mutex::new(fails) }
    }

    /// A question.
    fn ask<T>(&self, call: &str, answer: impl FnOnce(&Answers) -> T) -> io::Result<T> {
        match (self.fails.lock())(call) {
            Some(error) => Err(error),
            None => Ok(answer(&self.answers.lock())),
        }
    }

    /// A change.
    fn tell(&self, call: String) -> io::Result<()> {
        let failed = (self.fails.lock())(&call);
        self.seen.calls.lock().push(call);
        failed.map_or(Ok(()), Err)
    }
}

impl Backend for Scripted {
    fn set_owner(&self) -> io::Result<()> {
        self.tell("set_owner".to_owned())
    }

    fn device_id(&self) -> io::Result<u32> {
        self.ask("device_id", |answers| answers.device_id)
    }

    fn queues_count(&self) -> io::Result<u32> {
        self.ask("queues_count", |answers| answers.queues)
    }

    fn queue_size_max(&self) -> io::Result<u16> {
        self.ask("queue_size_max", |answers| answers.queue_size)
    }

    fn config_len_bytes(&self) -> io::Result<u32> {
        self.ask("config_len_bytes", |answers| answers.config_len_bytes)
    }

    fn iova_range(&self) -> io::Result<RangeInclusive<u64>> {
        self.ask("iova_range", |answers| answers.iova.clone())
    }

    fn features(&self) -> io::Result<u64> {
        self.ask("features", |answers| answers.features)
    }

    fn set_features(&self, features: u64) -> io::Result<()> {
        self.tell(format!("set_features {features:#x}"))
    }

    fn backend_features(&self) -> io::Result<u64> {
        self.ask("backend_features", |answers| answers.backend_features)
    }

    fn set_backend_features(&mut self, features: u64) -> io::Result<()> {
        self.tell(format!("set_backend_features {features:#x}"))
    }

    fn status(&self) -> io::Result<u8> {
        let status = *self.seen.status.lock();
        self.ask("status", |answers| status & !answers.refused_status | answers.own_status)
    }

    fn set_status(&self, status: u8) -> io::Result<()> {
        self.tell(format!("set_status {status}"))?;
        *self.seen.status.lock() = status;
        Ok(())
    }

    fn read_config(&self, offset: u32, data: &mut [u8]) -> io::Result<()> {
        let len = data.len();
        self.ask(&format!("read_config {offset} {len}"), |answers| {
            let from = answers.config.iter().skip(usize::try_from(offset).unwrap_or(usize::MAX));
            data.iter_mut().zip(from).for_each(|(to, from)| *to = *from);
        })
    }

    fn write_config(&self, offset: u32, data: &[u8]) -> io::Result<()> {
        self.tell(format!("write_config {offset} {data:?}"))
    }

    fn set_vring_num(&self, index: u16, size: u16) -> io::Result<()> {
        self.tell(format!("set_vring_num {index} {size}"))
    }

    fn set_vring_addr(&self, index: u16, place: &RingPlace) -> io::Result<()> {
        let RingPlace { desc_table, avail_ring, used_ring, .. } = place;
        self.tell(format!("set_vring_addr {index} {desc_table:#x} {avail_ring:#x} {used_ring:#x}"))
    }

    fn set_vring_base(&self, index: u16, next_avail: u16) -> io::Result<()> {
        self.tell(format!("set_vring_base {index} {next_avail}"))
    }

    fn vring_base(&self, index: u16) -> io::Result<u32> {
        self.ask(&format!("vring_base {index}"), |answers| answers.vring_base)
    }

    fn enable_vring(&self, index: u16) -> io::Result<()> {
        self.tell(format!("enable_vring {index}"))
    }

    fn set_vring_kick(&self, index: u16, kick: &EventFd) -> io::Result<()> {
        self.tell(format!("set_vring_kick {index}"))?;
        self.seen.kicks.lock().insert(index, kick.try_clone()?);
        Ok(())
    }

    fn set_vring_call(&self, index: u16, call: &EventFd) -> io::Result<()> {
        self.tell(format!("set_vring_call {index}"))?;
        self.seen.vring_calls.lock().insert(index, call.try_clone()?);
        Ok(())
    }

    fn set_config_call(&self, call: &EventFd) -> io::Result<()> {
        self.tell("set_config_call".to_owned())?;
        *self.seen.config_call.lock() = Some(call.try_clone()?);
        Ok(())
    }

    fn suspend(&self) -> io::Result<()> {
        self.tell("suspend".to_owned())
    }

    fn resume(&self) -> io::Result<()> {
        self.tell("resume".to_owned())
    }

    fn map(&self, iova: u64, len_bytes: u64, _address: *const u8) -> io::Result<()> {
        self.tell(format!("map {iova:#x} {len_bytes:#x}"))?;
        let mut mapped = self.seen.mapped.lock();
        let below = mapped.range(..=iova).next_back();
        let overlaps = below.is_some_and(|(start, len)| start.saturating_add(*len) > iova);
        // As the kernel does.
        if overlaps
            || mapped.range(iova..).next().is_some_and(|(start, _)| *start < iova + len_bytes)
        {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        mapped.insert(iova, len_bytes);
        Ok(())
    }

    fn unmap(&self, iova: u64, len_bytes: u64) -> io::Result<()> {
        self.tell(format!("unmap {iova:#x} {len_bytes:#x}"))?;
        let mut mapped = self.seen.mapped.lock();
        match mapped.get(&iova) {
            Some(len) if *len == len_bytes => drop(mapped.remove(&iova)),
            _ => return Err(io::ErrorKind::NotFound.into()),
        }
        Ok(())
    }

    fn begin_batch(&self) -> io::Result<()> {
        self.tell("begin_batch".to_owned())
    }

    fn end_batch(&self) -> io::Result<()> {
        self.tell("end_batch".to_owned())
    }
}
