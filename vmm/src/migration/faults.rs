// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! How a machine that arrives in postcopy catches accesses to missing pages.
//!
//! Owns the choice between the fault sources, and what joins a vCPU's exit to the page engine: where
//! the vCPU faulted, which page that is, and when to give up. Must never bring a page in for a vCPU
//! on another thread than its own.

use std::io;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use hypervisor::{
    CpuidEntry, FaultAction, FaultTraceError, FaultTracer, FaultedAccess, FaultedAt, SlotError,
    UserfaultBitmap, Vm,
};
use memory::{AccessError, GuestRam, ZoneKind};
use thiserror::Error;
use vm_memory::{Bytes as _, GuestAddress, GuestAddressSpace as _};
use vm_migration::fault::{FaultSource, VcpuBarrier};
use vm_migration::layout::{PAGE_BYTES, PageRun};
use vm_migration::uffd::{OwnFaults, Refused, UffdError};

use super::fault_choice::{Choice, Circumstances, Obstacle, choose, may_nest};
use super::memory::MigratingRam;
use super::resident::Weakness;
use crate::config::{FaultSourceChoice, MigrationMode};
use crate::machine::{Host, Machine, MissingPages};

/// userfaultfds for accesses of everybody but vCPUs, each with a reader.
const READERS: usize = 2;

/// How often in a row a vCPU may be refused the same page although it is here, before it is stopped:
/// what refuses it then is not postcopy.
const REFUSALS_MAX: u32 = 100_000;

/// Why a fault source cannot be used here.
#[derive(Debug, Error)]
pub enum FaultPlanError {
    /// KVM lacks it.
    #[error(
        "fault_source=exit needs the patched KVM, and this one has no userfault exits: build and \
         load it with scripts/kvm-modules, or use fault_source=uffd"
    )]
    NoExits,
    /// KVM says no address, and nobody else may.
    #[error("fault_source=sigbus cannot be used here; fault_source=uffd needs none of this")]
    Trace(#[from] FaultTraceError),
}

/// Why a fault source could not be set up.
#[derive(Debug, Error)]
pub enum FaultSetupError {
    /// A mapping for vCPUs.
    #[error(
        "vCPUs cannot be given a mapping of their own, which fault_source=sigbus needs: give the \
         VM shared memory (shared=on or hugepages=on), or use fault_source=uffd"
    )]
    Mapping(#[from] AccessError),
    /// The watches.
    #[error(transparent)]
    Uffd(#[from] UffdError),
    /// KVM's bitmaps.
    #[error("pages cannot be marked as missing for KVM")]
    Marks(#[from] SlotError),
    /// Memory for them.
    #[error("there is no memory for the marks of missing pages")]
    Bitmap(#[source] io::Error),
}

/// What notes where vCPUs fault, while that is needed.
type Tracer = Arc<RwLock<Option<FaultTracer>>>;

/// How faults of vCPUs are caught.
pub enum FaultPlan {
    /// They wait, as everybody does.
    Wait,
    /// They are refused; with a tracer where KVM does not say what.
    Refuse(Option<FaultTracer>, Weakness),
    /// KVM looks at a bitmap.
    Mark,
    /// What is best, as soon as memory and guest are known.
    Auto(Undecided),
}

/// What is known of the host before memory and guest are.
pub struct Undecided {
    /// What memory and guest may still change.
    known: Circumstances,
    weakness: Weakness,
}

impl FaultPlan {
    /// What `choice` means on this host; `mode` is what whoever asks expects to be sent.
    ///
    /// # Errors
    /// What is missing, and how to get it. Never with `auto` and `uffd`.
    pub fn new(
        choice: FaultSourceChoice,
        mode: MigrationMode,
        host: &Host,
    ) -> Result<Self, FaultPlanError> {
        let capabilities = host.capabilities();
        let patched = capabilities.userfault;
        let has_bitmap = patched.is_some_and(|support| support.slot_flag.is_some());
        let says_where = patched.is_some_and(|support| support.refused_faults);
        let weakness = Weakness {
            shadow_paging: capabilities.uses_shadow_paging(),
            async_page_faults: !says_where,
        };
        Ok(match choice {
            FaultSourceChoice::Uffd => Self::Wait,
            FaultSourceChoice::Exit if has_bitmap => Self::Mark,
            FaultSourceChoice::Exit => return Err(FaultPlanError::NoExits),
            FaultSourceChoice::Sigbus => {
                let tracer =
                    if says_where { None } else { Some(FaultTracer::start(capabilities)?) };
                Self::Refuse(tracer, weakness)
            }
            FaultSourceChoice::Auto => {
                let known = Circumstances {
                    has_bitmap,
                    shadow_paging: weakness.shadow_paging,
                    says_where,
                    shared_memory: true,
                    expects_postcopy: mode != MigrationMode::Precopy,
                    may_nest: false,
                };
                Self::Auto(Undecided { known, weakness })
            }
        })
    }

    /// Decides what is left to decide, and prepares memory before the machine is made on it. `shown` is
    /// what the guest was told of its processor.
    ///
    /// # Errors
    /// The memory is of a kind that cannot be used so.
    pub fn prepare(&mut self, ram: &GuestRam, shown: &[CpuidEntry]) -> Result<(), FaultSetupError> {
        let plan = std::mem::replace(self, Self::Wait);
        *self = match plan {
            Self::Auto(undecided) => undecided.decide(ram, shown),
            decided => decided,
        };
        if matches!(self, Self::Refuse(..)) {
            for region in ram.regions() {
                region.map_for_vcpus()?;
            }
        }
        Ok(())
    }

    /// Prepares a machine that has not run; `None` where faults wait.
    ///
    /// # Errors
    /// Naming what the host refuses.
    pub fn set_up(
        self,
        machine: &Machine,
        memory: &Arc<MigratingRam>,
    ) -> Result<Option<OwnFaulting>, FaultSetupError> {
        let seats = machine.vcpu_numbers();
        let ram = Arc::clone(memory.ram());
        let (tracer, faults, weakness) = match self {
            // What is not decided by now is not going to be.
            Self::Wait | Self::Auto(_) => return Ok(None),
            Self::Refuse(tracer, weakness) => {
                let tracer: Tracer = Arc::new(RwLock::new(tracer));
                let tracing = Box::new(Tracing(Arc::clone(&tracer)));
                let faults = OwnFaults::refusing(Arc::clone(memory), READERS, seats, tracing)?;
                (tracer, faults, Some(weakness))
            }
            Self::Mark => {
                let marks = Box::new(Marks::set(machine.vm(), &ram)?);
                let faults = OwnFaults::marked(Arc::clone(memory), READERS, seats, marks)?;
                (Tracer::default(), faults, None)
            }
        };
        let faults = Arc::new(faults);
        let repeats = (0..seats).map(|_| Repeats::default()).collect();
        let when_here = if machine.vm().capabilities().pre_fault_memory {
            FaultAction::Map
        } else {
            FaultAction::Retry
        };
        let source: Arc<dyn FaultSource> = faults.clone();
        machine.bring_pages_by(Arc::new(VcpuFaults { faults, tracer, repeats, ram, when_here }));
        Ok(Some(OwnFaulting { source, weakness }))
    }
}

impl Undecided {
    fn decide(self, ram: &GuestRam, shown: &[CpuidEntry]) -> FaultPlan {
        let Self { known, weakness } = self;
        let shared = ram.regions().iter().all(|region| region.kind() == ZoneKind::Shared);
        let known = Circumstances { shared_memory: shared, may_nest: may_nest(shown), ..known };
        match choose(known) {
            Choice::Exit => FaultPlan::Mark,
            Choice::Sigbus => FaultPlan::Refuse(None, weakness),
            Choice::Uffd(obstacle) => {
                explain(obstacle);
                FaultPlan::Wait
            }
        }
    }
}

/// Says once what is missing for vCPUs that bring their pages, what it would bring, and how to get it.
fn explain(obstacle: Obstacle) {
    if obstacle == Obstacle::NotExpected {
        return;
    }
    log::info!(
        "fault_source=auto takes uffd: {obstacle}. With the patched KVM (scripts/kvm-modules) \
         each vCPU would bring the pages that it needs itself, without a queue that all share"
    );
}

/// vCPUs of a machine bring their own pages.
pub struct OwnFaulting {
    /// For the migration.
    pub source: Arc<dyn FaultSource>,
    /// What KVM cannot reach: `None` where its own accesses wait.
    pub weakness: Option<Weakness>,
}

/// Tracing goes on for as long as anybody may be refused.
struct Tracing(Tracer);

impl VcpuBarrier for Tracing {
    fn let_through(&self, _run: PageRun) {}

    fn remove(&self, _region: usize) -> io::Result<()> {
        drop(self.0.write().unwrap_or_else(PoisonError::into_inner).take());
        Ok(())
    }
}

/// KVM's bitmaps, one for each region; the slot has the region's number.
struct Marks {
    vm: Vm,
    bitmaps: Vec<Arc<UserfaultBitmap>>,
}

impl Marks {
    /// Marks every page.
    fn set(vm: &Vm, ram: &GuestRam) -> Result<Self, FaultSetupError> {
        let mut bitmaps = Vec::new();
        for (slot, region) in (0_u32..).zip(ram.regions()) {
            let bitmap = UserfaultBitmap::new(region.len_pages(), true);
            let bitmap = Arc::new(bitmap.map_err(FaultSetupError::Bitmap)?);
            vm.set_userfault(slot, Some(Arc::clone(&bitmap)))?;
            bitmaps.push(bitmap);
        }
        Ok(Self { vm: vm.clone(), bitmaps })
    }
}

impl VcpuBarrier for Marks {
    fn let_through(&self, run: PageRun) {
        if let Some(bitmap) = self.bitmaps.get(run.region) {
            bitmap.clear_range(run.first, run.count);
        }
    }

    fn remove(&self, region: usize) -> io::Result<()> {
        let slot = u32::try_from(region).map_err(io::Error::other)?;
        self.vm.set_userfault(slot, None).map_err(io::Error::other)
    }
}

/// Where a vCPU was refused last, and how often in a row. Written by its own thread.
#[derive(Default)]
struct Repeats {
    page: AtomicU64,
    count: AtomicU32,
}

impl Repeats {
    /// Notes a refusal; false when there have been too many.
    fn note(&self, page: u64) -> bool {
        if self.page.swap(page, Ordering::Relaxed) != page {
            self.count.store(0, Ordering::Relaxed);
        }
        self.count.fetch_add(1, Ordering::Relaxed) < REFUSALS_MAX
    }
}

/// Takes exits of vCPUs to the page engine.
struct VcpuFaults {
    faults: Arc<OwnFaults<MigratingRam>>,
    tracer: Tracer,
    repeats: Vec<Repeats>,
    ram: Arc<GuestRam>,
    /// What follows when a page was brought.
    when_here: FaultAction,
}

impl VcpuFaults {
    fn is_ram(&self, gpa: u64) -> bool {
        self.ram.region_at(gpa).is_some()
    }
}

impl MissingPages for VcpuFaults {
    fn faulted_at(&self) -> Option<FaultedAt> {
        let tracer = self.tracer.read().unwrap_or_else(PoisonError::into_inner);
        tracer.as_ref().and_then(FaultTracer::take)
    }

    fn bring(&self, vcpu: u32, access: FaultedAccess) -> FaultAction {
        let seat = vcpu as usize;
        // Without an address it may be a refusal of the past, or not one of memory at all.
        let page = access.gpa.map_or(u64::MAX, |gpa| gpa / PAGE_BYTES);
        if !self.repeats.get(seat).is_some_and(|repeats| repeats.note(page)) {
            log::error!("vcpu{vcpu} is refused memory again and again: {access:?}");
            return FaultAction::Stop;
        }
        let Some(gpa) = access.gpa else { return FaultAction::Retry };
        match self.faults.refused(seat, gpa) {
            Ok(Refused::TryAgain) => self.when_here,
            Ok(Refused::NotByUs) => FaultAction::Retry,
            Ok(Refused::NotRam) => FaultAction::Stop,
            Err(error) => {
                // As with userfaultfd it waits, until somebody ends or pauses it.
                log::warn!("vcpu{vcpu} waits: {error}");
                std::thread::park();
                FaultAction::Retry
            }
        }
    }

    fn read(&self, gpa: u64, data: &mut [u8]) -> bool {
        let memory = self.ram.guest_memory();
        self.is_ram(gpa) && memory.memory().read_slice(data, GuestAddress(gpa)).is_ok()
    }

    fn write(&self, gpa: u64, data: &[u8]) -> bool {
        let memory = self.ram.guest_memory();
        self.is_ram(gpa) && memory.memory().write_slice(data, GuestAddress(gpa)).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_refusals_of_one_page_in_a_row_add_up() {
        let repeats = Repeats::default();
        for _ in 0..3 {
            assert!((0..REFUSALS_MAX).all(|_| repeats.note(7)));
            assert!(repeats.note(8));
        }
        assert!((0..REFUSALS_MAX).all(|_| repeats.note(7)));
        assert!(!repeats.note(7));
    }
}
