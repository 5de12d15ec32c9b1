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
    CpuidEntry, FaultAction, FaultTraceError, FaultTracer, FaultTrialError, FaultedAccess,
    FaultedAt, MemslotError, UserfaultBitmap, Vm,
};
use memory::{AccessError, GuestRam, ZoneKind};
use parking_lot::RwLock;
use thiserror::Error;
use vm_memory::{Bytes as _, GuestAddress, GuestAddressSpace as _};
use vm_migration::MemoryMode;
use vm_migration::fault::{FaultSource, VcpuBarrier};
use vm_migration::layout::{PAGE_BYTES, PageRun};
use vm_migration::uffd::{OwnFaults, Refused, UffdError};

use super::fault_choice::{
    Choice, HostAndGuest, VcpuFaultsUnavailable, choose, has_hyperv, may_nest,
};
use super::memory::MigratingRam;
use super::resident::KvmLimits;
use crate::config::FaultSourceChoice;
use crate::events;
use crate::machine::{Host, Machine, MissingPages};

/// Number of userfaultfds for accesses by threads other than vCPUs, each with a reader.
const READERS: usize = 2;

/// Time after which a vCPU is stopped that is refused the same page repeatedly although the page is not
/// missing: the cause is not postcopy. A count would not do, as the rate of refusals depends on the host.
const REFUSALS_TIME_MAX: Duration = Duration::from_secs(10);

/// Refusals of a page that are further apart than this are unrelated: the vCPU ran in between.
const REFUSALS_GAP_MAX: Duration = Duration::from_secs(1);

/// Why a fault source cannot be used on this host.
#[derive(Debug, Error)]
pub enum FaultPlanError {
    /// KVM lacks userfault exits.
    #[error(
        "fault_source=exit needs the patched KVM, and this one has no userfault exits: build and \
         load it with the package godwit-kvm or scripts/kvm-modules, or use fault_source=uffd"
    )]
    NoExits,
    /// KVM reports no address, and the process may not trace.
    #[error("fault_source=sigbus cannot be used here; use fault_source=uffd")]
    Trace(#[from] FaultTraceError),
    /// A refused access that was tried did not come out as it has to.
    #[error("fault_source=sigbus cannot be relied on here; use fault_source=uffd")]
    Trial(#[from] FaultTrialError),
}

/// Why a fault source could not be set up.
#[derive(Debug, Error)]
pub enum FaultSetupError {
    /// The memory has no separate mapping for vCPUs.
    #[error(
        "vCPUs cannot be given a mapping of their own, which fault_source=sigbus needs: give the \
         VM shared memory (shared=on or hugepages=on), or use fault_source=uffd"
    )]
    Mapping(#[from] AccessError),
    /// KVM fills pages that the guest names at any time.
    #[error(
        "the guest is shown Hyper-V (kvm_hyperv=on), whose pages KVM fills itself when the guest names them, which \
         fault_source=sigbus would refuse: use fault_source=uffd"
    )]
    Hyperv,
    /// A userfaultfd cannot be registered.
    #[error(transparent)]
    Uffd(#[from] UffdError),
    /// KVM refuses a userfault bitmap.
    #[error("pages cannot be marked as missing for KVM")]
    SetBitmap(#[from] MemslotError),
    /// The bitmaps cannot be allocated.
    #[error("there is no memory for the userfault bitmaps")]
    Bitmap(#[source] io::Error),
}

/// Traces the addresses of refused vCPU accesses, while that is needed.
type Tracer = Arc<RwLock<Option<FaultTracer>>>;

/// How vCPU accesses to missing pages are handled.
pub enum FaultPlan {
    /// They wait in userfaultfd, as those of all other threads.
    Wait,
    /// They are refused; with a tracer if KVM does not report the address.
    Refuse(Option<FaultTracer>, KvmLimits),
    /// They exit, by KVM's userfault bitmap.
    Mark,
    /// The best of these, chosen once memory and guest are known.
    Auto(Undecided),
}

/// Facts about the host, until memory and guest are known.
pub struct Undecided {
    /// The facts, some of which memory and guest can still change.
    known: HostAndGuest,
    kvm_limits: KvmLimits,
}

impl FaultPlan {
    /// The plan for the configured `choice` on this host; `mode` is the migration mode that the request
    /// announces. That accesses can be refused is tried before it is relied on.
    ///
    /// # Errors
    /// Names what is missing and how to provide it. Never with `auto` and `uffd`.
    pub fn new(
        choice: FaultSourceChoice,
        mode: MemoryMode,
        host: &Host,
    ) -> Result<Self, FaultPlanError> {
        let capabilities = host.capabilities();
        let shadow_paging = capabilities.uses_shadow_paging();
        let expects_postcopy = mode != MemoryMode::Precopy;
        let known = HostAndGuest::of_host(capabilities.userfault, shadow_paging, expects_postcopy);
        let HostAndGuest { has_bitmap, says_where, .. } = known;
        let kvm_limits = KvmLimits { shadow_paging, async_page_faults: !says_where };
        Ok(match choice {
            FaultSourceChoice::Uffd => Self::Wait,
            FaultSourceChoice::Exit if has_bitmap => Self::Mark,
            FaultSourceChoice::Exit => return Err(FaultPlanError::NoExits),
            FaultSourceChoice::Sigbus => {
                let tracer =
                    if says_where { None } else { Some(FaultTracer::start(capabilities)?) };
                host.try_refused_access(tracer.as_ref())?;
                Self::Refuse(tracer, kvm_limits)
            }
            FaultSourceChoice::Auto => {
                let mut known = known;
                if matches!(choose(known), Choice::Sigbus)
                    && let Err(error) = host.try_refused_access(None)
                {
                    log::warn!("{}", error_text::chain(&error));
                    known.says_where = false;
                }
                Self::Auto(Undecided { known, kvm_limits })
            }
        })
    }

    /// Makes the pending choice, and prepares memory before the machine is created on it. `shown` is the
    /// CPUID that the guest was shown.
    ///
    /// # Errors
    /// The kind of memory does not support the fault source.
    pub fn prepare(&mut self, ram: &GuestRam, shown: &[CpuidEntry]) -> Result<(), FaultSetupError> {
        let plan = std::mem::replace(self, Self::Wait);
        *self = match plan {
            Self::Auto(undecided) => undecided.decide(ram, shown),
            decided => decided,
        };
        if matches!(self, Self::Refuse(..)) {
            if has_hyperv(shown) {
                return Err(FaultSetupError::Hyperv);
            }
            for region in ram.regions() {
                region.map_for_vcpus()?;
            }
        }
        Ok(())
    }

    /// Sets up the fault source of a machine that has not run; `None` if vCPUs wait in userfaultfd.
    ///
    /// # Errors
    /// Names what the host refuses.
    pub fn set_up(
        self,
        machine: &Machine,
        memory: &Arc<MigratingRam>,
    ) -> Result<Option<OwnFaulting>, FaultSetupError> {
        let vcpu_numbers: Vec<_> = machine.vcpu_numbers().collect();
        let table_len = vcpu_numbers.iter().max().map_or(0, |highest| highest + 1);
        let ram = Arc::clone(memory.ram());
        let (tracer, faults, kvm_limits) = match self {
            // A choice that has not been made by now is not made any more.
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
        let repeats = (0..table_len).map(|_| RepeatedFaults::default()).collect();
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
        let known = HostAndGuest {
            shared_memory: shared,
            may_nest: may_nest(shown),
            has_hyperv: has_hyperv(shown),
            ..known
        };
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

/// Reports, in the log and as an event, what is missing for vCPUs to fetch their own pages; the log also has what that
/// would gain, and how to provide it.
fn explain(reason: VcpuFaultsUnavailable) {
    if reason == VcpuFaultsUnavailable::NotExpected {
        return;
    }
    log::warn!(
        "fault_source=auto takes uffd: {reason}. With the patched KVM (package godwit-kvm, or \
         scripts/kvm-modules) each vCPU would bring the pages that it needs itself, without a \
         queue that all share"
    );
    events::emit("vm", "migration-faults-by-uffd", &[("reason", &reason.to_string())]);
}

/// A machine whose vCPUs fetch their own missing pages.
pub struct OwnFaulting {
    /// The fault source for the migration.
    pub source: Arc<dyn FaultSource>,
    /// What KVM itself cannot access; `None` if its own accesses wait.
    pub kvm_limits: Option<KvmLimits>,
}

/// Keeps tracing on while an access may be refused.
struct FaultTracing(Tracer);

impl VcpuBarrier for FaultTracing {
    fn unblock(&self, _run: PageRun) {}

    fn open(&self) {}

    fn remove(&self, _region: usize) -> io::Result<()> {
        drop(self.0.write().take());
        Ok(())
    }
}

/// KVM's userfault bitmaps, one per region; slot numbers equal region numbers. Of memory that is plugged in while the
/// guest runs only what is plugged in has a slot.
struct UserfaultBitmaps {
    vm: Vm,
    bitmaps: Vec<Arc<UserfaultBitmap>>,
}

impl UserfaultBitmaps {
    /// Creates the bitmaps, with every page marked.
    fn set(vm: &Vm, ram: &GuestRam) -> Result<Self, FaultSetupError> {
        let mut bitmaps = Vec::new();
        let slots = vm.memory_slots();
        for (slot, region) in (0_u32..).zip(ram.regions()) {
            let there = slots.iter().find(|there| there.slot == slot);
            let pages = there.map_or(region.len_pages(), |there| there.len_bytes / 4096);
            let bitmap = UserfaultBitmap::new(pages, true);
            let bitmap = Arc::new(bitmap.map_err(FaultSetupError::Bitmap)?);
            if there.is_some() {
                vm.set_userfault(slot, Some(Arc::clone(&bitmap)))?;
            }
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
            let count = run.count.min(bitmap.pages().saturating_sub(run.first));
            bitmap.clear_range(run.first, count);
        }
    }

    fn open(&self) {
        open_all(&self.bitmaps);
    }

    fn remove(&self, region: usize) -> io::Result<()> {
        let slot = u32::try_from(region).map_err(io::Error::other)?;
        if !self.vm.memory_slots().iter().any(|there| there.slot == slot) {
            return Ok(());
        }
        self.vm.set_userfault(slot, None).map_err(io::Error::other)
    }
}

/// The page at which a vCPU was last refused although it is not missing, and since when. Written by the
/// vCPU's own thread.
#[derive(Default)]
struct RepeatedFaults {
    page: AtomicU64,
    /// Time of the first refusal, and below it that of the last, in microseconds.
    since_us: AtomicU64,
    last_us: AtomicU64,
}

impl RepeatedFaults {
    /// Records a refusal; false if the refusals have lasted for too long.
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

/// Passes vCPU exits to the page engine.
struct VcpuFaults {
    faults: Arc<OwnFaults<MigratingRam>>,
    tracer: Tracer,
    repeats: Vec<RepeatedFaults>,
    /// Origin of the times in `repeats`.
    start: Instant,
    ram: Arc<GuestRam>,
    /// What the vCPU does once its page is resident.
    when_here: FaultAction,
}

impl VcpuFaults {
    /// Handles a refusal of a page that is not missing. The access is retried, as the page may have arrived
    /// since; a vCPU that keeps being refused is stopped.
    fn no_resolver(&self, vcpu: u32, access: FaultedAccess) -> FaultAction {
        let page = access.gpa.map_or(u64::MAX, |gpa| gpa / PAGE_BYTES);
        let repeats = self.repeats.get(vcpu as usize);
        if repeats.is_some_and(|repeats| repeats.note(page, self.start.elapsed())) {
            return FaultAction::Retry;
        }
        log::error!("vcpu{vcpu} fails repeatedly on the same access: {access:?}");
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
        // Without an address the refusal may be outdated, or not one of memory.
        let Some(gpa) = access.gpa else { return self.no_resolver(vcpu, access) };
        match self.faults.refused(vcpu_index, gpa) {
            Ok(Refused::TryAgain) => self.when_here,
            Ok(Refused::NoResolver) => self.no_resolver(vcpu, access),
            Ok(Refused::NotRam) => FaultAction::Stop,
            Err(error) => {
                // It waits, as with userfaultfd, until it is ended or paused.
                log::warn!("vcpu{vcpu} waits: {error}");
                std::thread::park();
                FaultAction::Retry
            }
        }
    }

    fn kicked(&self, vcpu: u32) {
        self.faults.kick(vcpu as usize);
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
        // Regardless of their number.
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
