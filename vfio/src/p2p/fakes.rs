// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A fake of an IOMMU that can map device memory, for tests and fuzz targets.
//!
//! Records what is mapped, and every request that must not be made (`violations`). Never used by a VMM.
#![allow(missing_docs, reason = "not part of the interface")]

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::Mutex;

use super::P2pTarget;
use crate::fakes::FakeSlots;
use crate::gate::DmaGate;
use crate::mapping::BarMapping;

/// An IOMMU that takes device memory which the guest reaches, and no other.
pub struct FakeP2p {
    pub slots: Arc<FakeSlots>,
    pub gate: Arc<DmaGate>,
    pub entries: Option<u64>,
    /// Maps nothing from now on.
    pub refuses: AtomicBool,
    /// Unmaps nothing from now on.
    pub keeps: AtomicBool,
    /// Functions may sleep, whose BARs the guest does not reach and other functions do.
    pub may_sleep: AtomicBool,
    mapped: Mutex<BTreeMap<u64, u64>>,
    /// Guest physical addresses and host addresses of all that was ever mapped.
    pub places: Mutex<Vec<(u64, u64)>>,
    calls: AtomicU64,
    violations: Mutex<Vec<String>>,
}

impl FakeP2p {
    pub fn new(slots: Arc<FakeSlots>, gate: Arc<DmaGate>) -> Self {
        Self {
            slots,
            gate,
            entries: None,
            refuses: AtomicBool::new(false),
            keeps: AtomicBool::new(false),
            may_sleep: AtomicBool::new(false),
            mapped: Mutex::default(),
            places: Mutex::default(),
            calls: AtomicU64::new(0),
            violations: Mutex::default(),
        }
    }

    /// First and last guest physical addresses of what is mapped, in order.
    pub fn mapped(&self) -> Vec<Range<u64>> {
        self.mapped.lock().iter().map(|(start, len)| *start..start + len).collect()
    }

    /// How often it was asked to map something.
    pub fn calls(&self) -> u64 {
        self.calls.load(Ordering::Relaxed)
    }

    pub fn violations(&self) -> Vec<String> {
        self.violations.lock().clone()
    }

    fn check(&self, what: &str, gpa: &Range<u64>) {
        let may_sleep = self.may_sleep.load(Ordering::Relaxed);
        if !may_sleep && !self.slots.shown().contains(gpa) {
            self.violations.lock().push(format!("{what} {gpa:x?}, which the guest does not reach"));
        }
    }
}

impl P2pTarget for FakeP2p {
    fn map_bar(&self, gpa: u64, memory: &BarMapping) -> io::Result<()> {
        self.calls.fetch_add(1, Ordering::Relaxed);
        let range = gpa..gpa.saturating_add(memory.len_bytes());
        self.check("maps", &range);
        if !self.gate.is_open() {
            self.violations.lock().push(format!("{range:x?} is mapped behind a closed gate"));
        }
        if self.refuses.load(Ordering::Relaxed) {
            return Err(io::Error::from_raw_os_error(libc::EEXIST));
        }
        let mut mapped = self.mapped.lock();
        if mapped.iter().any(|(start, len)| *start < range.end && gpa < start + len) {
            self.violations.lock().push(format!("{range:x?} overlaps another"));
        }
        mapped.insert(gpa, memory.len_bytes());
        self.places.lock().push((gpa, memory.host_addr()));
        Ok(())
    }

    fn unmap_bar(&self, gpa: &Range<u64>) -> io::Result<()> {
        self.check("unmaps", gpa);
        if self.keeps.load(Ordering::Relaxed) {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        if self.mapped.lock().remove(&gpa.start) != Some(gpa.end - gpa.start) {
            self.violations.lock().push(format!("{gpa:x?} was not mapped as one"));
        }
        Ok(())
    }

    fn entries(&self) -> Option<u64> {
        self.entries
    }
}
