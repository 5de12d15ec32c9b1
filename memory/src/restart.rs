// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Reuse of guest RAM by the next boot of the same VM: a warm reset.
//!
//! Owns which state of the memory a reset takes back (plugged blocks, what was discarded, logs) and which
//! it leaves alone: the contents, the mappings, the lease of a pool. As on real hardware, RAM keeps its
//! contents over a warm reset, and firmware and kernels do not rely on them; both guests are the
//! same VM, so nothing has to be kept from the second. Must only be used while no guest runs, and no
//! page is still to arrive.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

use crate::config::{Backing, RamConfig, ZoneSpec};
use crate::layout::RamLayout;
use crate::prefault::{Prefault, PrefaultError, PrefaultOptions};
use crate::ram::GuestRam;
use crate::region::RamRegion;

/// Whether pages of a hugetlb zone that the guest has from the start were given back.
fn lacks_huge_pages(region: &RamRegion) -> bool {
    region.is_hugetlb() && region.has_holes() && region.block_bytes().is_none()
}

/// Another process that may write guest memory, and is never taken to have stopped if this is dropped.
#[derive(Debug)]
pub struct ForeignWriter(Weak<GuestRam>);

impl ForeignWriter {
    /// The process says that it has no reference to the memory left.
    pub fn has_stopped(self) {
        if let Some(ram) = self.0.upgrade() {
            ram.foreign_writers.fetch_sub(1, Ordering::SeqCst);
        }
    }
}

impl GuestRam {
    /// Whether a boot with this configuration can use the memory of the guest before it: it is the same,
    /// and no page is missing. Private mappings of files are not used again: such a zone begins with the
    /// file's contents. Nor is memory that another process may still write, or that vCPUs map separately, for faults
    /// that are over by now, unless it is prezeroed: its creator may have no other.
    pub fn can_restart(&self, config: &RamConfig, layout: RamLayout) -> bool {
        let is_complete = |region: &RamRegion| {
            let mut missing = region.resident().absent_runs(0..region.len_pages());
            missing.next().is_none() && (region.vcpus_ptr().is_none() || region.was_prezeroed())
        };
        let shows_file = |zone: &ZoneSpec| matches!(zone.backing, Backing::File(_)) && !zone.shared;
        self.is_of(config, layout)
            && self.foreign_writers.load(Ordering::SeqCst) == 0
            && !config.zones.iter().any(shows_file)
            && self.regions().iter().all(|region| is_complete(region))
    }

    /// Notes that another process may write this memory from now on, at any time: one that served a device, has it
    /// mapped, and cannot be told to stop. No later guest may have the memory.
    pub fn note_stray_writer(&self) {
        self.foreign_writers.fetch_add(1, Ordering::SeqCst);
    }

    /// Notes the same of a process that can be told to stop, before it is handed memory: until it says that it has
    /// stopped.
    pub fn foreign_writer(self: &Arc<Self>) -> ForeignWriter {
        self.note_stray_writer();
        ForeignWriter(Arc::downgrade(self))
    }

    /// Prepares the memory of a guest that has ended for its next boot. No block is plugged afterwards, device
    /// writes are not logged, and a prefault populates what the guest had given back. All else stays:
    /// [`starts_zero`](Self::starts_zero) is false from now on. Cancelling leaves pages of unplugged blocks with the VM.
    pub fn restart(&self, is_cancelled: &dyn Fn() -> bool) {
        self.note_used();
        self.track_device_writes(false);
        self.unplug_all(is_cancelled);
        for region in self.regions() {
            region.forget_discards();
            region.return_vcpus_to_main();
        }
    }

    /// Starts to populate hugetlb zones of which the guest before had given pages back: another process may
    /// have these pages by now, which an access of the guest would learn by a SIGBUS. `None` if there are none.
    ///
    /// # Errors
    /// When no thread could be started.
    pub fn refill_huge_pages(
        &self,
        options: &PrefaultOptions,
    ) -> Result<Option<Prefault>, PrefaultError> {
        let regions: Vec<_> =
            self.regions().iter().filter(|region| lacks_huge_pages(region)).cloned().collect();
        if regions.is_empty() {
            return Ok(None);
        }
        Prefault::start(&regions, options).map(Some)
    }

    /// Notes that [`refill_huge_pages`](Self::refill_huge_pages) has populated all of them, before a guest runs.
    pub fn huge_pages_refilled(&self) {
        self.regions()
            .iter()
            .filter(|region| lacks_huge_pages(region))
            .for_each(|region| region.forget_holes());
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

    use std::sync::Arc;

    use super::*;
    use crate::host::Host;
    use crate::host::testing::{BorrowedHugePages, resident_bytes};
    use crate::{HugePageSize, Lease, ProvidedFile};

    const MIB: u64 = 1 << 20;
    const BLOCK: u64 = 2 * MIB;
    const LATER: u64 = 4 << 30;

    fn config() -> RamConfig {
        let later =
            ZoneSpec { block_bytes: Some(BLOCK), shared: true, ..ZoneSpec::new("l", 8 * BLOCK) };
        RamConfig { zones: vec![ZoneSpec::new("a", 8 * MIB), later] }
    }

    #[test]
    fn contents_stay_and_what_was_plugged_or_given_back_is_as_at_boot() {
        let ram = GuestRam::new(&config(), RamLayout::default()).unwrap();
        let [first, later] = [0, 1].map(|at| Arc::clone(&ram.regions()[at]));
        assert!(ram.starts_zero());
        first.write_range(MIB, b"kept").unwrap();
        ram.plug(&(LATER..LATER + 2 * BLOCK)).unwrap();
        later.write_range(BLOCK, b"gone").unwrap();
        let given_back = ram.discard_unpinned(4 * MIB..6 * MIB);
        assert!(given_back.covers(&(4 * MIB..6 * MIB)));
        ram.track_device_writes(true);

        ram.restart(&|| false);
        assert!(!ram.starts_zero(), "a loader would leave old bytes in place");
        let mut bytes = [0; 4];
        first.read_page_range(MIB, &mut bytes).unwrap();
        assert_eq!(&bytes, b"kept");
        assert_eq!((later.usable_bytes(), ram.total_bytes()), (0, 8 * MIB));
        assert_eq!(later.populated_runs(&(0..8 * BLOCK)).unwrap(), []);
        assert!(first.never_discarded(&(0..8 * MIB)).iter().eq([&(0..8 * MIB)]));
        assert!(!first.device_dirty().is_tracking(), "device writes are still logged");
        ram.plug(&(LATER..LATER + BLOCK)).unwrap();
    }

    #[test]
    fn a_cancelled_restart_unplugs_all_and_what_is_left_comes_back_as_zeros() {
        let ram = GuestRam::new(&config(), RamLayout::default()).unwrap();
        let later = Arc::clone(&ram.regions()[1]);
        ram.plug(&(LATER..LATER + BLOCK)).unwrap();
        later.write_range(0, b"old").unwrap();
        ram.restart(&|| true);
        assert_eq!((later.usable_bytes(), ram.total_bytes()), (0, 8 * MIB));
        assert_ne!(later.populated_runs(&(0..BLOCK)).unwrap(), [], "nothing was cancelled");
        ram.plug(&(LATER..LATER + BLOCK)).unwrap();
        let mut bytes = [1; 3];
        later.read_page_range(0, &mut bytes).unwrap();
        assert_eq!(bytes, [0; 3]);
    }

    #[test]
    fn only_the_same_memory_with_all_its_pages_is_used_again() {
        let (config, layout) = (config(), RamLayout::default());
        let ram = GuestRam::new(&config, layout).unwrap();
        assert!(ram.can_restart(&config, layout));
        let mut larger = config.clone();
        larger.zones[0].size_bytes += 2 * MIB;
        assert!(!ram.can_restart(&larger, layout));
        assert!(!ram.can_restart(&config, RamLayout { hole_end: 5 << 30, ..layout }));
        let page = ram.regions()[0].resident();
        page.set_absent(3..4);
        assert!(!ram.can_restart(&config, layout), "a page is still to arrive");
        page.set_resident(3..4);
        assert!(ram.can_restart(&config, layout));
        ram.regions()[1].map_for_vcpus().unwrap();
        assert!(!ram.can_restart(&config, layout), "vCPUs have a mapping of their own");
    }

    #[test]
    fn memory_that_another_process_may_write_is_not_used_again() {
        let (config, layout) = (config(), RamLayout::default());
        let ram = GuestRam::new(&config, layout).unwrap();
        assert!(ram.can_restart(&config, layout));
        let ram = Arc::new(ram);
        let (first, second) = (ram.foreign_writer(), ram.foreign_writer());
        first.has_stopped();
        assert!(!ram.can_restart(&config, layout), "the other one");
        second.has_stopped();
        assert!(ram.can_restart(&config, layout));
        drop(ram.foreign_writer());
        assert!(!ram.can_restart(&config, layout));
        let ram = GuestRam::new(&config, layout).unwrap();
        ram.note_stray_writer();
        assert!(!ram.can_restart(&config, layout));
    }

    #[test]
    fn huge_pages_that_the_guest_gave_back_are_there_again_or_the_reboot_fails() {
        let Some(_borrowed) = BorrowedHugePages::new(4) else { return };
        let backing = Backing::Hugetlb { page_size: HugePageSize::Mib2 };
        let config = RamConfig { zones: vec![ZoneSpec { backing, ..ZoneSpec::new("a", 8 * MIB) }] };
        let ram = GuestRam::new(&config, RamLayout::default()).unwrap();
        let options = PrefaultOptions::default();
        ram.restart(&|| false);
        assert!(ram.refill_huge_pages(&options).unwrap().is_none(), "all pages are promised");
        ram.regions()[0].fill(&(0..8 * MIB)).unwrap();
        ram.discard_unpinned(2 * MIB..6 * MIB);
        ram.restart(&|| false);
        // All that the host has left, of which others may have put aside some.
        let size_bytes = Host::real().hugetlb_pool(2 << 20).unwrap().available * 2 * MIB;
        let other = GuestRam::new(
            &RamConfig { zones: vec![ZoneSpec { size_bytes, ..config.zones[0].clone() }] },
            RamLayout::default(),
        );
        let other = other.unwrap();
        let failed = ram.refill_huge_pages(&options).unwrap().unwrap().wait();
        assert!(matches!(failed, Err(PrefaultError::Populate(_))), "{failed:?}");
        drop(other);
        ram.refill_huge_pages(&options).unwrap().unwrap().wait().unwrap();
        ram.huge_pages_refilled();
        assert!(ram.refill_huge_pages(&options).unwrap().is_none(), "all pages are there");
        let runs = ram.regions()[0].populated_runs(&(0..8 * MIB)).unwrap();
        assert!(runs.iter().eq([&(0..8 * MIB)]), "{runs:?}");
    }

    #[test]
    fn memory_of_a_pool_is_populated_again_where_the_guest_gave_it_back() {
        let zone = ZoneSpec { shared: true, thp: false, ..ZoneSpec::new("a", 8 * MIB) };
        let config = RamConfig { zones: vec![ZoneSpec { prefault: true, ..zone }] };
        let own = GuestRam::new(&config, RamLayout::default()).unwrap();
        own.regions()[0].fill(&(0..8 * MIB)).unwrap();
        let file = Arc::clone(own.regions()[0].file().unwrap());
        drop(own);
        let lease = Arc::new(());
        let kept: Arc<dyn std::any::Any + Send + Sync> = lease.clone();
        let given = [ProvidedFile::prezeroed("a", file, Lease::new(kept))];
        let ram = GuestRam::with_provided(&config, RamLayout::default(), &given).unwrap();
        drop(given);
        let region: &Arc<RamRegion> = &ram.regions()[0];
        assert!(region.is_prezeroed());
        region.map_for_vcpus().unwrap();
        assert!(ram.can_restart(&config, RamLayout::default()), "the pool may have no other");
        assert!(region.vcpus_ptr().is_some());
        ram.discard_unpinned(2 * MIB..4 * MIB);
        ram.restart(&|| false);
        assert_eq!(Arc::strong_count(&lease), 2, "the lease has ended");
        assert_eq!((region.vcpus_ptr(), region.slot_addr()), (None, region.host_addr()));
        ram.prefault(&PrefaultOptions::default()).unwrap().wait().unwrap();
        assert!(region.populated_runs(&(0..8 * MIB)).unwrap().iter().eq([&(0..8 * MIB)]));
        assert!(resident_bytes(region.as_ptr(), 8 * MIB) >= 2 * MIB);
    }
}
