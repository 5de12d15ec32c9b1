// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Set-up of the fault source of a machine that arrives in postcopy.
//!
//! Owns the choice between the fault sources, and what joins a vCPU's exit to the page engine: where
//! the vCPU faulted, which page that is, and when to give up. Must never bring a page in for a vCPU
//! on another thread than its own.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use hypervisor::{
    CpuidEntry, FaultAction, FaultTraceError, FaultTracer, FaultedAccess, FaultedAt, MemslotError,
    UserfaultBitmap, Vm,
};
use memory::{AccessError, GuestRam, ZoneKind};
use parking_lot::RwLock;
use thiserror::Error;
use vm_memory::{Bytes as _, GuestAddress, GuestAddressSpace as _};
use vm_migration::MemoryMode;
use vm_migration::fault::{FaultSource, VcpuBarrier};
use vm_migration::layout::{PAGE_BYTES, PageRun};
use vm_migration::uffd::{OwnFaults, Refused, UffdError};

use super::fault_choice::{Choice, HostAndGuest, VcpuFaultsUnavailable, choose, may_nest};
use super::memory::MigratingRam;
use super::resident::KvmLimits;
use crate::config::FaultSourceChoice;
use crate::machine::{Host, Machine, MissingPages};

/// userfaultfds for accesses of all threads but vCPUs, each with a reader.
const READERS: usize = 2;

/// How long a vCPU may be refused the same page again and again although nothing here refuses any,
/// before it is stopped: what refuses it then is not postcopy. A count would say nothing: how many
/// refusals there are in a second depends on the host.
const REFUSALS_TIME_MAX: Duration = Duration::from_secs(10);

/// Refusals of one page that are further apart than this do not belong together: the vCPU ran in
/// between.
const REFUSALS_GAP_MAX: Duration = Duration::from_secs(1);

/// Why a fault source cannot be used here.
#[derive(Debug, Error)]
pub enum FaultPlanError {
    /// KVM lacks it.
    #[error(
        "fault_source=exit needs the patched KVM, and this one has no userfault exits: build and \
         load it with scripts/kvm-modules, or use fault_source=uffd"
    )]
    NoExits,
    /// KVM says no address, and nothing else may.
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
    SetBitmap(#[from] MemslotError),
    /// Memory for them.
    #[error("there is no memory for the marks of missing pages")]
    Bitmap(#[source] io::Error),
}

/// What notes where vCPUs fault, while that is needed.
type Tracer = Arc<RwLock<Option<FaultTracer>>>;

/// How faults of vCPUs are caught.
pub enum FaultPlan {
    /// They wait, as all other threads do.
    Wait,
    /// They are refused; with a tracer where KVM does not say what.
    Refuse(Option<FaultTracer>, KvmLimits),
    /// KVM looks at a bitmap.
    Mark,
    /// What is best, as soon as memory and guest are known.
    Auto(Undecided),
}

/// What is known of the host before memory and guest are.
pub struct Undecided {
    /// What memory and guest may still change.
    known: HostAndGuest,
    kvm_limits: KvmLimits,
}

impl FaultPlan {
    /// What `choice` means on this host; `mode` is what the request expects to be sent.
    ///
    /// # Errors
    /// What is missing, and how to get it. Never with `auto` and `uffd`.
    pub fn new(
        choice: FaultSourceChoice,
        mode: MemoryMode,
        host: &Host,
    ) -> Result<Self, FaultPlanError> {
        let capabilities = host.capabilities();
        let patched = capabilities.userfault;
        let has_bitmap = patched.is_some_and(|support| support.slot_flag.is_some());
        let says_where = patched.is_some_and(|support| support.refused_faults);
        let kvm_limits = KvmLimits {
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
                Self::Refuse(tracer, kvm_limits)
            }
            FaultSourceChoice::Auto => {
                let known = HostAndGuest {
                    has_bitmap,
                    shadow_paging: kvm_limits.shadow_paging,
                    says_where,
                    shared_memory: true,
                    expects_postcopy: mode != MemoryMode::Precopy,
                    may_nest: false,
                };
                Self::Auto(Undecided { known, kvm_limits })
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
        let vcpu_numbers = machine.vcpu_numbers();
        let ram = Arc::clone(memory.ram());
        let (tracer, faults, kvm_limits) = match self {
            // What is not decided by now is not going to be.
            Self::Wait | Self::Auto(_) => return Ok(None),
            Self::Refuse(tracer, kvm_limits) => {
                let tracer: Tracer = Arc::new(RwLock::new(tracer));
                let tracing = Box::new(FaultTracing(Arc::clone(&tracer)));
                let faults =
                    OwnFaults::refusing(Arc::clone(memory), READERS, vcpu_numbers, tracing)?;
                (tracer, faults, Some(kvm_limits))
            }
            Self::Mark => {
                let bitmaps = Box::new(UserfaultBitmaps::set(machine.vm(), &ram)?);
                let faults = OwnFaults::marked(Arc::clone(memory), READERS, vcpu_numbers, bitmaps)?;
                (Tracer::default(), faults, None)
            }
        };
        let faults = Arc::new(faults);
        let repeats = (0..vcpu_numbers).map(|_| RepeatedFaults::default()).collect();
        let when_here = if machine.vm().capabilities().pre_fault_memory {
            FaultAction::Map
        } else {
            FaultAction::Retry
        };
        let source: Arc<dyn FaultSource> = faults.clone();
        let start = Instant::now();
        let pages = VcpuFaults { faults, tracer, repeats, start, ram, when_here };
        machine.set_missing_page_handler(Arc::new(pages));
        Ok(Some(OwnFaulting { source, kvm_limits }))
    }
}

impl Undecided {
    fn decide(self, ram: &GuestRam, shown: &[CpuidEntry]) -> FaultPlan {
        let Self { known, kvm_limits } = self;
        let shared = ram.regions().iter().all(|region| region.kind() == ZoneKind::Shared);
        let known = HostAndGuest { shared_memory: shared, may_nest: may_nest(shown), ..known };
        match choose(known) {
            Choice::Exit => FaultPlan::Mark,
            Choice::Sigbus => FaultPlan::Refuse(None, kvm_limits),
            Choice::Uffd(reason) => {
                explain(reason);
                FaultPlan::Wait
            }
        }
    }
}

/// Says once what is missing for vCPUs that bring their pages, what it would bring, and how to get it.
fn explain(reason: VcpuFaultsUnavailable) {
    if reason == VcpuFaultsUnavailable::NotExpected {
        return;
    }
    log::info!(
        "fault_source=auto takes uffd: {reason}. With the patched KVM (scripts/kvm-modules) \
         each vCPU would bring the pages that it needs itself, without a queue that all share"
    );
}

/// vCPUs of a machine bring their own pages.
pub struct OwnFaulting {
    /// For the migration.
    pub source: Arc<dyn FaultSource>,
    /// What KVM cannot reach: `None` where its own accesses wait.
    pub kvm_limits: Option<KvmLimits>,
}

/// Tracing continues for as long as an access may be refused.
struct FaultTracing(Tracer);

impl VcpuBarrier for FaultTracing {
    fn unblock(&self, _run: PageRun) {}

    fn open(&self) {}

    fn remove(&self, _region: usize) -> io::Result<()> {
        drop(self.0.write().take());
        Ok(())
    }
}

/// KVM's bitmaps, one for each region; the slot has the region's number.
struct UserfaultBitmaps {
    vm: Vm,
    bitmaps: Vec<Arc<UserfaultBitmap>>,
}

impl UserfaultBitmaps {
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

fn open_all(bitmaps: &[Arc<UserfaultBitmap>]) {
    for bitmap in bitmaps {
        bitmap.clear_range(0, bitmap.pages());
    }
}

impl VcpuBarrier for UserfaultBitmaps {
    fn unblock(&self, run: PageRun) {
        if let Some(bitmap) = self.bitmaps.get(run.region) {
            bitmap.clear_range(run.first, run.count);
        }
    }

    fn open(&self) {
        open_all(&self.bitmaps);
    }

    fn remove(&self, region: usize) -> io::Result<()> {
        let slot = u32::try_from(region).map_err(io::Error::other)?;
        self.vm.set_userfault(slot, None).map_err(io::Error::other)
    }
}

/// Where a vCPU was refused last without postcopy's doing, and since when. Written by its own thread.
#[derive(Default)]
struct RepeatedFaults {
    page: AtomicU64,
    /// When that began, and when it was last, in microseconds.
    since_us: AtomicU64,
    last_us: AtomicU64,
}

impl RepeatedFaults {
    /// Notes a refusal at a time; false when it has continued for too long.
    fn note(&self, page: u64, now: Duration) -> bool {
        let now_us = u64::try_from(now.as_micros()).unwrap_or(u64::MAX);
        let gap_us = now_us.saturating_sub(self.last_us.swap(now_us, Ordering::Relaxed));
        let apart = u128::from(gap_us) > REFUSALS_GAP_MAX.as_micros();
        if self.page.swap(page, Ordering::Relaxed) != page || apart {
            self.since_us.store(now_us, Ordering::Relaxed);
        }
        let took_us = now_us.saturating_sub(self.since_us.load(Ordering::Relaxed));
        u128::from(took_us) < REFUSALS_TIME_MAX.as_micros()
    }
}

/// Takes exits of vCPUs to the page engine.
struct VcpuFaults {
    faults: Arc<OwnFaults<MigratingRam>>,
    tracer: Tracer,
    repeats: Vec<RepeatedFaults>,
    /// What the times in `repeats` count from.
    start: Instant,
    ram: Arc<GuestRam>,
    /// What follows when a page was brought.
    when_here: FaultAction,
}

impl VcpuFaults {
    /// Nothing here refuses the access now. It is tried again, for that may have changed since; a vCPU
    /// for which it does not change is stopped.
    fn not_by_us(&self, vcpu: u32, access: FaultedAccess) -> FaultAction {
        let page = access.gpa.map_or(u64::MAX, |gpa| gpa / PAGE_BYTES);
        let repeats = self.repeats.get(vcpu as usize);
        if repeats.is_some_and(|repeats| repeats.note(page, self.start.elapsed())) {
            return FaultAction::Retry;
        }
        log::error!("vcpu{vcpu} is refused memory again and again: {access:?}");
        FaultAction::Stop
    }

    fn is_ram(&self, gpa: u64) -> bool {
        self.ram.region_at(gpa).is_some()
    }
}

impl MissingPages for VcpuFaults {
    fn faulted_at(&self) -> Option<FaultedAt> {
        let tracer = self.tracer.read();
        tracer.as_ref().and_then(FaultTracer::take)
    }

    fn resolve(&self, vcpu: u32, access: FaultedAccess) -> FaultAction {
        let vcpu_index = vcpu as usize;
        // Without an address it may be a refusal of the past, or not one of memory at all.
        let Some(gpa) = access.gpa else { return self.not_by_us(vcpu, access) };
        match self.faults.refused(vcpu_index, gpa) {
            Ok(Refused::TryAgain) => self.when_here,
            Ok(Refused::NotByUs) => self.not_by_us(vcpu, access),
            Ok(Refused::NotRam) => FaultAction::Stop,
            Err(error) => {
                // As with userfaultfd it waits, until it is ended or paused.
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
    fn only_refusals_of_one_page_without_a_pause_add_up() {
        let repeats = RepeatedFaults::default();
        let ms = Duration::from_millis;
        let refused = |from: u64, until: u64, page| {
            (from..until).step_by(500).all(|at| repeats.note(page, ms(at)))
        };
        // However many there are.
        assert!((0..1_000_000).all(|at| repeats.note(7, Duration::from_micros(at))));
        assert!(refused(1000, 10_000, 7));
        assert!(repeats.note(8, ms(10_001)), "another page");
        assert!(refused(10_100, 20_000, 7));
        assert!(repeats.note(7, ms(21_100)), "the vCPU ran in between");
        assert!(refused(21_200, 31_000, 7));
        assert!(!repeats.note(7, ms(31_200)));
    }

    #[test]
    fn all_marks_are_clear_at_once_without_a_call_of_kvm() {
        let bitmap = || Arc::new(UserfaultBitmap::new(130, true).expect("memory for a bitmap"));
        let bitmaps = [bitmap(), bitmap()];
        open_all(&bitmaps);
        assert!(bitmaps.iter().all(|bitmap| (0..130).all(|page| !bitmap.is_set(page))));
    }
}
