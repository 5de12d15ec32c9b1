// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The dirty log of a function's DMA writes.
//!
//! Owns the decision which pages may have new contents. A function that can log its writes reports them
//! itself. Any other function may have written every page until it stopped: all
//! pages then count as written, once. The same applies if a log is lost meanwhile.

use std::ops::Range;
use std::sync::Arc;

use log::{info, warn};
use memory::GuestRam;
use parking_lot::Mutex;

use super::VfioPciDevice;
use crate::migration::LOG_PAGE_BYTES;
use pci::PciDevice as _;

/// Bytes of guest memory per query: 32 KiB of bits.
const REPORT_BYTES: u64 = 1 << 30;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Tracking {
    /// The function logs its writes.
    Logged,
    /// The function may write anywhere until it stops.
    Anything,
    /// The function has stopped, and all of its writes have been collected.
    Complete,
}

/// The DMA writes of one function to guest memory, from creation until dropped.
pub struct DmaLog {
    device: Arc<VfioPciDevice>,
    /// Locked by the one thread that starts a round.
    tracking: Mutex<Tracking>,
}

impl DmaLog {
    /// Starts the log; later writes to guest memory are reported.
    pub fn start(device: Arc<VfioPciDevice>, ram: &GuestRam) -> Self {
        let id = device.id();
        let ranges: Vec<_> =
            ram.regions().iter().map(|region| span(region.gpa(), region)).collect();
        let tracking = if device.is_left() {
            Tracking::Anything
        } else if device.is_stopped() {
            // Already stopped, so nothing was written since memory was last read.
            Tracking::Complete
        } else {
            match device.port().start_dma_log(&ranges) {
                Ok(()) => {
                    info!("passed-through device {id} logs what it writes to guest memory");
                    Tracking::Logged
                }
                Err(error) => {
                    warn!(
                        "passed-through device {id} cannot log what it writes to guest memory \
                         ({error}): all of it will have to be sent again when the guest has stopped"
                    );
                    Tracking::Anything
                }
            }
        };
        Self { device, tracking: Mutex::new(tracking) }
    }

    /// Whether the function may have written every page when it stops, and has not stopped yet. One that is lost is
    /// refused by its own reason.
    pub fn is_missing(&self) -> bool {
        *self.tracking.lock() == Tracking::Anything && !self.device.is_lost()
    }

    /// ID of the function.
    pub fn device_id(&self) -> &str {
        self.device.id()
    }

    /// Marks the pages written since the last call in the regions' logs of device writes.
    pub fn collect(&self, ram: &GuestRam) {
        let mut tracking = self.tracking.lock();
        if self.device.is_left() {
            // The kernel's answer would wait for the call that hangs. What it has written is in no migration any more.
            return;
        }
        // Before the log is read: writes in between are in the next report.
        let stopped = self.device.is_stopped();
        if *tracking == Tracking::Logged
            && let Err(error) = self.take(ram)
        {
            warn!(
                "passed-through device {}: the log of what it writes is lost ({error}); all guest \
                 memory will be sent again when the guest has stopped",
                self.device.id()
            );
            self.end();
            *tracking = Tracking::Anything;
        }
        if *tracking == Tracking::Anything && stopped {
            for region in ram.regions() {
                mark_all(region);
            }
            *tracking = Tracking::Complete;
        }
    }

    fn take(&self, ram: &GuestRam) -> std::io::Result<()> {
        for region in ram.regions() {
            let mut at = 0;
            while at < region.len_bytes() {
                let end = at.saturating_add(REPORT_BYTES).min(region.len_bytes());
                let range = region.gpa() + at..region.gpa() + end;
                let words = self.device.port().take_dma_log(&range)?;
                let first = at / LOG_PAGE_BYTES;
                let pages = (end - at).div_ceil(LOG_PAGE_BYTES);
                let len = usize::try_from(pages.div_ceil(64)).unwrap_or(usize::MAX);
                if words.len() != len {
                    let what = format!("{} words came for {pages} pages", words.len());
                    return Err(std::io::Error::other(what));
                }
                region.device_dirty().put_back(first..first + pages, &words);
                at = end;
            }
        }
        Ok(())
    }

    fn end(&self) {
        if self.device.is_left() {
            return;
        }
        if let Err(error) = self.device.port().stop_dma_log() {
            let id = self.device.id();
            warn!("passed-through device {id} keeps logging its writes: {error}");
        }
    }
}

fn span(start: u64, region: &memory::RamRegion) -> Range<u64> {
    start..start.saturating_add(region.len_bytes())
}

fn mark_all(region: &memory::RamRegion) {
    const PAGES: u64 = 64 * 512;
    let words = [u64::MAX; 512];
    let mut first = 0;
    while first < region.len_pages() {
        let end = (first + PAGES).min(region.len_pages());
        region.device_dirty().put_back(first..end, &words);
        first = end;
    }
}

impl Drop for DmaLog {
    fn drop(&mut self) {
        if *self.tracking.lock() == Tracking::Logged {
            self.end();
        }
    }
}
