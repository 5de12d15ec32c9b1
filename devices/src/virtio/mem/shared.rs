// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! State shared by the device, its thread and its handles.
//!
//! Owns how much memory the guest is to have. Takes a lock only to read the driver's state.

use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use memory::plugging::PlugError;
use memory::{GuestRam, RamRegion};
use parking_lot::Mutex;
use vmm_sys_util::eventfd::EventFd;

use super::config::ConfigSpace;
use super::requests::{Blocks, PlugState, Request, Response};
use crate::virtio::VirtioInterrupt;
use crate::{LogLimit, log_limited};

/// See the module.
pub(crate) struct Shared {
    ram: Arc<GuestRam>,
    region: Arc<RamRegion>,
    pub(super) block_bytes: u64,
    /// NUMA node of the guest, if it has nodes.
    pub(super) node: Option<u16>,
    requested_bytes: AtomicU64,
    /// Interrupt of the current driver. Only locked briefly.
    driver: Mutex<Option<Arc<dyn VirtioInterrupt>>>,
    /// Called when the guest has plugged more memory.
    pub(super) growth: OnceLock<Arc<dyn Fn() + Send + Sync>>,
    /// Wakes the device's thread to retry discards.
    retry_event: EventFd,
    /// Block with which the retry continues.
    retry_from: AtomicU64,
    /// Whether another retry was requested since this one started.
    retry_asked: AtomicBool,
    log: LogLimit,
    /// Rate limit for messages about every request, apart from that of `log`.
    debug_log: LogLimit,
}

/// Bytes discarded at a time; a request or a pause waits for that.
const RETRY_BYTES: u64 = 1 << 30;

impl Shared {
    /// `None` if the region is not divided into blocks.
    ///
    /// # Errors
    /// The event descriptor cannot be created.
    pub(crate) fn new(
        ram: Arc<GuestRam>,
        region: Arc<RamRegion>,
        node: Option<u16>,
    ) -> io::Result<Option<Self>> {
        let Some(block_bytes) = region.block_bytes() else { return Ok(None) };
        let (requested_bytes, driver) = (AtomicU64::new(0), Mutex::new(None));
        let retry_event = EventFd::new(libc::EFD_NONBLOCK)?;
        let (retry_from, retry_asked) = (AtomicU64::new(0), AtomicBool::new(false));
        Ok(Some(Self {
            ram,
            region,
            block_bytes,
            node,
            requested_bytes,
            driver,
            retry_event,
            retry_from,
            retry_asked,
            growth: OnceLock::new(),
            log: LogLimit::default(),
            debug_log: LogLimit::default(),
        }))
    }

    pub(super) fn retry_event(&self) -> &EventFd {
        &self.retry_event
    }

    /// Has the device's thread retry the discard of unplugged blocks.
    pub(super) fn ask_for_retry(&self) {
        self.retry_asked.store(true, Ordering::Release);
        self.wake();
    }

    fn wake(&self) {
        // A saturated counter wakes the thread as well.
        let _ = self.retry_event.write(1);
    }

    /// Discards some of them, and signals the event again if more are left. Only on the device's thread,
    /// which also plugs.
    pub(super) fn retry_unplugged(&self) {
        let from = self.retry_from.load(Ordering::Relaxed);
        if from == 0 {
            self.retry_asked.store(false, Ordering::Release);
        }
        let next = self.ram.retry_unplugged(&self.region, from, RETRY_BYTES);
        self.retry_from.store(next.unwrap_or(0), Ordering::Relaxed);
        if next.is_some() || self.retry_asked.load(Ordering::Acquire) {
            self.wake();
        }
    }

    pub(super) fn region(&self) -> &RamRegion {
        &self.region
    }

    pub(super) fn config(&self) -> ConfigSpace {
        ConfigSpace {
            block_bytes: self.block_bytes,
            gpa: self.region.gpa(),
            region_bytes: self.region.len_bytes(),
            plugged_bytes: self.region.usable_bytes(),
            requested_bytes: self.requested_bytes(),
            node: self.node.unwrap_or(0),
        }
    }

    pub(super) fn requested_bytes(&self) -> u64 {
        self.requested_bytes.load(Ordering::Acquire)
    }

    /// Sets the requested size, and notifies the driver of a change.
    pub(crate) fn request(&self, bytes: u64) {
        if self.requested_bytes.swap(bytes, Ordering::AcqRel) != bytes {
            self.notify_driver();
        }
    }

    /// Has the driver compare the plugged with the requested size.
    pub(super) fn notify_driver(&self) {
        if let Some(driver) = &*self.driver.lock() {
            driver.config_changed();
        }
    }

    pub(super) fn set_driver(&self, driver: Option<Arc<dyn VirtioInterrupt>>) {
        *self.driver.lock() = driver;
    }

    /// Carries out a request of the driver.
    pub(super) fn serve(&self, request: Request) -> Response {
        log_limited!(self.debug_log, Debug, "{request:?}");
        match request {
            Request::Plug(blocks) => self.plug(blocks),
            Request::Unplug(blocks) => match self.range(blocks) {
                Some(range) => self.respond(&self.ram.unplug(&range)),
                None => Response::Error,
            },
            Request::UnplugAll => self.unplug_all(),
            Request::State(blocks) => match self.range(blocks) {
                Some(range) => Response::State(self.plug_state(&range)),
                None => Response::Error,
            },
            Request::Unknown(_) => Response::Error,
        }
    }

    fn plug(&self, blocks: Blocks) -> Response {
        let Some(range) = self.range(blocks) else { return Response::Error };
        if self.plug_state(&range) != PlugState::Unplugged {
            return Response::Error;
        }
        let wanted = self.region.usable_bytes().saturating_add(range.end - range.start);
        if wanted > self.requested_bytes() {
            return Response::Nack;
        }
        let done = self.ram.plug(&range);
        if done.is_ok()
            && let Some(listener) = self.growth.get()
        {
            listener();
        }
        self.respond(&done)
    }

    fn unplug_all(&self) -> Response {
        let gpa = self.region.gpa();
        for run in self.region.usable_runs() {
            let response = self.respond(&self.ram.unplug(&(gpa + run.start..gpa + run.end)));
            if response != Response::Ack {
                return response;
            }
        }
        Response::Ack
    }

    /// The guest physical range of blocks in the region.
    fn range(&self, blocks: Blocks) -> Option<Range<u64>> {
        let start = blocks.gpa.checked_sub(self.region.gpa())?;
        let len_bytes = u64::from(blocks.count).checked_mul(self.block_bytes)?;
        let end = start.checked_add(len_bytes)?;
        let fits = start.is_multiple_of(self.block_bytes) && end <= self.region.len_bytes();
        (fits && blocks.count > 0).then(|| blocks.gpa..blocks.gpa + len_bytes)
    }

    fn plug_state(&self, range: &Range<u64>) -> PlugState {
        let gpa = self.region.gpa();
        match self.region.is_usable(&(range.start - gpa..range.end - gpa)) {
            (_, true) => PlugState::Plugged,
            (false, _) => PlugState::Unplugged,
            (true, false) => PlugState::Mixed,
        }
    }

    fn respond(&self, done: &Result<(), PlugError>) -> Response {
        let Err(error) = done else { return Response::Ack };
        match error {
            PlugError::NotBlocks { .. } => Response::Error,
            PlugError::Busy { .. } => {
                log_limited!(self.debug_log, Debug, "{error}");
                Response::Busy
            }
            PlugError::NoPages(_) | PlugError::NotCleared { .. } | PlugError::NotMapped { .. } => {
                // Drivers retry later, and the limit may have been raised by then.
                let reason = error_text::chain(error);
                log_limited!(
                    self.log,
                    Warn,
                    "a guest gets less memory than it is to have: {reason}"
                );
                Response::Busy
            }
        }
    }
}
