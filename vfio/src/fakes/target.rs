// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A fake of an IOMMU. It records what was mapped. Never used by a VMM.

use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use memory::{GuestRam, RamRegion};
use parking_lot::Mutex;

use crate::dma::DmaTarget;
use crate::error::VfioError;
use crate::limits::DmaLimits;
use crate::p2p::P2pTarget;
use crate::space::{DmaSpace, OpenedFunction, SpaceHold};
use crate::sysfs::HostPlace;

type BeforeMap = Box<dyn Fn(u64) -> io::Result<()> + Send + Sync>;

/// An IOMMU that writes down what it was asked to map; `before` may wait or refuse.
#[derive(Default)]
pub struct FakeTarget {
    pub mapped: Mutex<Vec<Range<u64>>>,
    /// What was prepared, each before anything of it was mapped.
    pub prepared: Mutex<Vec<Range<u64>>>,
    pub limits: DmaLimits,
    pub maps_last: bool,
    pub takes_mmap_lock: bool,
    pub before: Option<BeforeMap>,
    /// Called before everything is unmapped.
    pub before_unmap_all: OnceLock<Box<dyn Fn() + Send + Sync>>,
    pub unmaps: AtomicU64,
    /// Stays mapped without functions.
    pub outlives_vm: bool,
    /// Its references are what keeps memory mapped without functions.
    pub hold: Arc<()>,
    /// What was to stay mapped without functions is not mapped any more.
    pub has_lost_kept: AtomicBool,
    /// Nothing can be unmapped.
    pub keeps_all: AtomicBool,
}

impl FakeTarget {
    pub fn unmaps(&self) -> u64 {
        self.unmaps.load(Ordering::Relaxed)
    }

    pub fn mapped_bytes_in(&self, gpa: &Range<u64>) -> u64 {
        let part =
            |piece: &Range<u64>| piece.end.min(gpa.end).saturating_sub(piece.start.max(gpa.start));
        self.mapped.lock().iter().map(part).sum()
    }

    /// In how many pieces all of it is mapped.
    pub fn is_mapped(&self, gpa: Range<u64>) -> Option<usize> {
        let is_whole = self.mapped_bytes_in(&gpa) == gpa.end - gpa.start;
        let touches = |piece: &&Range<u64>| piece.start < gpa.end && gpa.start < piece.end;
        is_whole.then(|| self.mapped.lock().iter().filter(touches).count())
    }
}

/// Without functions.
impl DmaSpace for FakeTarget {
    fn open(&self, _place: HostPlace) -> Result<OpenedFunction, VfioError> {
        Err(VfioError::Io {
            what: "open a function of a fake",
            source: io::ErrorKind::NotFound.into(),
        })
    }

    fn memory(&self) -> Arc<GuestRam> {
        unreachable!("it has no functions")
    }

    fn outlive_vm(&self) -> Result<SpaceHold, &'static str> {
        if self.outlives_vm { Ok(Box::new(Arc::clone(&self.hold))) } else { Err("it is a fake") }
    }

    fn check_kept(&self) -> Result<(), &'static str> {
        if self.has_lost_kept.load(Ordering::Relaxed) { Err("it is a fake") } else { Ok(()) }
    }

    fn peer_target(self: Arc<Self>) -> Option<Arc<dyn P2pTarget>> {
        None
    }
}

impl DmaTarget for FakeTarget {
    fn maps_last(&self, _region: &RamRegion) -> bool {
        self.maps_last
    }

    fn takes_mmap_lock(&self) -> bool {
        self.takes_mmap_lock
    }

    fn prepare(&self, region: &RamRegion, range: &Range<u64>) {
        let gpa = region.gpa() + range.start..region.gpa() + range.end;
        assert_eq!(self.mapped_bytes_in(&gpa), 0, "{gpa:x?} is mapped already");
        self.prepared.lock().push(gpa);
    }

    fn map(&self, region: &RamRegion, range: &Range<u64>) -> io::Result<()> {
        let gpa = region.gpa() + range.start;
        if let Some(before) = &self.before {
            before(gpa)?;
        }
        self.mapped.lock().push(gpa..region.gpa() + range.end);
        Ok(())
    }

    fn unmap(&self, gpa: &Range<u64>) -> io::Result<()> {
        if self.keeps_all.load(Ordering::Relaxed) {
            return Err(io::Error::from_raw_os_error(libc::EIO));
        }
        let mut mapped = self.mapped.lock();
        let touches = |piece: &Range<u64>| piece.start < gpa.end && gpa.start < piece.end;
        let is_inside = |piece: &Range<u64>| gpa.start <= piece.start && piece.end <= gpa.end;
        if mapped.iter().any(|piece| touches(piece) && !is_inside(piece)) {
            // As type1: a mapping cannot be cut.
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        mapped.retain(|piece| !touches(piece));
        self.unmaps.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    fn unmap_all(&self) {
        if let Some(before) = self.before_unmap_all.get() {
            before();
        }
        self.mapped.lock().clear();
    }

    fn limits(&self) -> DmaLimits {
        self.limits.clone()
    }
}
