// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The destination side of a machine's migration: building it from the peer's documents.
//!
//! Owns the machine from the configuration that the source sent to the moment it runs. The
//! configuration and the state come from a peer: both are checked as data of an unrelated peer would be.

use std::sync::Arc;
use std::time::{Duration, Instant};

use hypervisor::ClockPolicy;
use memory::{InitialContents, ProvidedFile, RamSources};
use vm_migration::commit::destination::InDoubt;
use vm_migration::fault::FaultSource;
use vm_migration::protocol::formats::Formats;
use vm_migration::vm::{
    ArrivalCheck, BlobInfo, BlobSink, DestinationBuilder, DestinationVm, GivenMemory, MappedMachine,
};
use vm_migration::{MemoryMode, VmError};

use super::adopted_arrival::{AdoptedArrival, Started};
use super::document::{KNOWN, MachineDocument};
use super::faults::FaultPlan;
use super::memory::MigratingRam;
use super::resident::{self, KvmLimits};
use super::{blobs, grants, updates};
use crate::config::zone_update::MemoryUpdates;
use crate::config::{ArrivingFds, Grant, VmConfig};
use crate::machine::{
    CallLimits, Consoles, EventSink, Host, Machine, MachineState, Patience, features,
};
use crate::sandbox::landlock::LandlockError;

/// Time that storage has to drop this host's cached contents of the disks while the guest is stopped: as
/// long as the source waits for the write-back, and less than it waits for an answer.
const DROP_CACHES_TIME_MAX: Duration = Duration::from_secs(10);

/// Builds the machine of an incoming migration.
pub struct ArrivingBuilder {
    host: Arc<Host>,
    sink: EventSink,
    faults: FaultPlan,
    rules: Option<Vec<Grant>>,
    doubts: DoubtObserver,
    fds: ArrivingFds,
    memory: MemoryUpdates,
    confine: ConfineArrival,
    check: Option<Arc<dyn ArrivalCheck>>,
}

/// Confines the process to the paths of a VM, if it is to be.
pub type ConfineArrival = Box<dyn Fn(&VmConfig) -> Result<(), LandlockError> + Send>;

/// Called with a VM that has come into doubt, and again, with `true`, when that has lasted longer than its
/// source can act on the acknowledgement.
pub type DoubtObserver = Box<dyn Fn(&Machine, InDoubt, bool) + Send>;

impl ArrivingBuilder {
    /// A builder on this host. `sink` receives the guest's events, `faults` is the fault source for missing
    /// pages, and `doubts` is called with VMs in doubt. The configuration may name any file or device of
    /// this host.
    pub fn new(host: Arc<Host>, sink: EventSink, faults: FaultPlan, doubts: DoubtObserver) -> Self {
        let (fds, confine) = (ArrivingFds::default(), Box::new(|_: &VmConfig| Ok(())));
        Self {
            host,
            sink,
            faults,
            rules: None,
            doubts,
            fds,
            memory: MemoryUpdates::default(),
            confine,
            check: None,
        }
    }

    /// The same builder, with what answers sources that only ask.
    #[must_use]
    pub fn checked_by(self, check: Arc<dyn ArrivalCheck>) -> Self {
        Self { check: Some(check), ..self }
    }

    /// The same builder, restricted to configurations that the rules allow, if there are any.
    #[must_use]
    pub fn within(self, rules: Option<Vec<Grant>>) -> Self {
        Self { rules, ..self }
    }

    /// The same, for VMs that say to which paths the process is confined.
    #[must_use]
    pub fn confined_by(self, confine: ConfineArrival) -> Self {
        Self { confine, ..self }
    }

    /// The same builder, with descriptors for the devices.
    #[must_use]
    pub fn with_descriptors(self, fds: ArrivingFds) -> Self {
        Self { fds, ..self }
    }

    /// The same builder, with other memory of this host.
    #[must_use]
    pub fn with_memory(self, memory: MemoryUpdates) -> Self {
        Self { memory, ..self }
    }
}

/// The configuration with what a request says of this host.
///
/// # Errors
/// What of it is not valid here.
pub fn complete(
    fds: &ArrivingFds,
    memory: &MemoryUpdates,
    mut config: VmConfig,
) -> Result<VmConfig, VmError> {
    fds.place(&mut config)?;
    updates::change_memory(&mut config, memory)?;
    Ok(config.complete_begun()?)
}

/// What `check` says of the rules and what the configuration names. A pool that the request for this migration names is
/// not the source's choice.
pub fn check_grants<T>(
    rules: Option<&[Grant]>,
    memory: &MemoryUpdates,
    config: &VmConfig,
    check: fn(Option<&[Grant]>, &VmConfig) -> T,
) -> T {
    if memory.pool.is_none() || rules.is_none() {
        return check(rules, config);
    }
    let mut named = config.clone();
    updates::name_pool(&mut named, None);
    check(rules, &named)
}

impl ArrivingBuilder {
    fn complete(&self, config: VmConfig) -> Result<VmConfig, VmError> {
        complete(&self.fds, &self.memory, config)
    }

    fn check_grants(&self, config: &VmConfig) -> Result<(), VmError> {
        Ok(check_grants(self.rules.as_deref(), &self.memory, config, grants::check)?)
    }
}

/// A machine that has its memory, and no state yet.
pub struct MappedArrival {
    builder: ArrivingBuilder,
    config: VmConfig,
    memory: Arc<MigratingRam>,
    /// Set if it is of cloud-hypervisor.
    adopted: Option<AdoptedArrival>,
}

/// A machine that has arrived and has not run here yet.
pub struct ArrivingMachine {
    machine: Machine,
    memory: Arc<MigratingRam>,
    /// The state that the machine was made of.
    converted: Option<Box<MachineState>>,
    /// Present until the fault source is set up on request.
    faults: Option<FaultPlan>,
    /// Set if vCPUs are refused missing pages: KVM's own accesses to them fail.
    kvm_limits: Option<KvmLimits>,
    doubts: DoubtObserver,
}

/// A device cannot wait for a missing page as a vCPU can.
#[derive(Debug, thiserror::Error)]
#[error(
    "the VM has passed-through devices, or devices that another process serves, which may access any of its memory at any \
     time and cannot wait for pages that are still to come: it can be migrated in precopy only, and restored by copying"
)]
pub struct DmaToMissingPages;

impl ArrivingMachine {
    /// The machine, to be described.
    pub fn machine(&self) -> &Machine {
        &self.machine
    }
}

impl DestinationBuilder for ArrivingBuilder {
    type Vm = ArrivingMachine;
    type Mapped = MappedArrival;

    fn formats(&self) -> Formats {
        KNOWN
    }

    fn check(&self) -> Option<Arc<dyn ArrivalCheck>> {
        self.check.clone()
    }

    fn map_memory(
        mut self,
        config_json: &[u8],
        given: Vec<GivenMemory>,
        mode: MemoryMode,
    ) -> Result<MappedArrival, VmError> {
        let (adopted, vm_config, common_cpuid, feature_msrs) =
            if let Some(Started { arrival, config, shown }) = AdoptedArrival::read(config_json)? {
                (Some(arrival), config, shown, Vec::new())
            } else {
                let MachineDocument { vm_config, common_cpuid, feature_msrs } =
                    MachineDocument::read(config_json)?;
                (None, vm_config, common_cpuid, feature_msrs)
            };
        let config = self.complete(vm_config)?;
        if let Some(adopted) = &adopted {
            adopted.check_taps(&config)?;
        }
        self.check_grants(&config)?;
        (self.confine)(&config)?;
        self.host.check_shown(&config, &common_cpuid, &feature_msrs)?;
        let given = given.into_iter();
        let provided =
            given.map(|zone| ProvidedFile::file(&zone.name, Arc::new(zone.file))).collect();
        // Without rules the source alone has named the files: those with contents must not be emptied for
        // it. cloud-hypervisor may use them on this host, as it takes no locks of them.
        let contents = match (&adopted, &self.rules) {
            (Some(_), _) => InitialContents::MustBeNew,
            (None, Some(_)) => InitialContents::Nothing,
            (None, None) => InitialContents::MustBeEmpty,
        };
        let origin = RamSources { provided, contents, ..RamSources::default() };
        let ram = Machine::arriving_ram(&config, &self.host, origin)?;
        if let Some(adopted) = &adopted {
            adopted.check_memory(&config, &ram)?;
        }
        self.faults.prepare(&ram, &common_cpuid)?;
        let is_behind_guest = mode.may_postcopy();
        let of = if is_behind_guest { MigratingRam::with_aliases } else { MigratingRam::as_mapped };
        let memory = Arc::new(of(ram)?);
        Ok(MappedArrival { builder: self, config, memory, adopted })
    }
}

impl MappedMachine for MappedArrival {
    type Vm = ArrivingMachine;

    fn memory(&self) -> Arc<MigratingRam> {
        Arc::clone(&self.memory)
    }

    fn is_built_from_state(&self) -> bool {
        self.adopted.is_some()
    }

    fn build_from_state(mut self, state_json: &[u8]) -> Result<ArrivingMachine, VmError> {
        let Some(adopted) = self.adopted.take() else { return self.build() };
        let (config, state) = adopted.finish(state_json, &self.memory)?;
        let config = self.builder.complete(config)?;
        // The same files, whatever the state has added.
        self.builder.check_grants(&config)?;
        let features = state.vcpus.first().map(|vcpu| features::describing(&vcpu.msrs));
        self.builder.host.check_shown(&config, &state.shown, &features.unwrap_or_default())?;
        let arriving = Self { config, ..self }.build()?;
        Ok(ArrivingMachine { converted: Some(Box::new(state)), ..arriving })
    }

    fn build(self) -> Result<ArrivingMachine, VmError> {
        let Self { builder, mut config, memory, .. } = self;
        let ArrivingBuilder { host, sink, faults, doubts, rules, .. } = builder;
        let consoles = Consoles::open(&mut config)?;
        let ram = Arc::clone(memory.ram());
        let machine = Machine::arriving(config, consoles, &host, sink, ram)?;
        // Their names are in the images: only headers have been read of any of them.
        grants::check_behind(rules.as_deref(), machine.backing_files())?;
        machine.check_exclusive()?;
        // Repeated once the state has arrived, with little left to do then.
        machine.drop_disk_caches()?;
        let (converted, faults) = (None, Some(faults));
        Ok(ArrivingMachine { machine, memory, converted, faults, kvm_limits: None, doubts })
    }
}

impl DestinationVm for ArrivingMachine {
    type Memory = MigratingRam;
    type Running = Machine;

    fn vcpus(&self) -> u32 {
        self.machine.config().cpus.boot_vcpus
    }

    fn fault_source(&mut self) -> Result<Option<Arc<dyn FaultSource>>, VmError> {
        if self.machine.needs_all_pages() {
            return Err(DmaToMissingPages.into());
        }
        let Some(plan) = self.faults.take() else { return Ok(None) };
        let Some(faulting) = plan.set_up(&self.machine, &self.memory)? else { return Ok(None) };
        self.kvm_limits = faulting.kvm_limits;
        Ok(Some(faulting.source))
    }

    fn await_ready(&self, is_cancelled: &dyn Fn() -> bool) -> Result<(), VmError> {
        Ok(self.machine.await_ready(is_cancelled)?)
    }

    fn open_blobs(&mut self, blobs: &[BlobInfo]) -> Result<Vec<Box<dyn BlobSink>>, VmError> {
        blobs::sinks(&self.machine, blobs)
    }

    fn apply_state(&mut self, state_json: &[u8]) -> Result<(), VmError> {
        // The source waits for all of this together.
        let limits = CallLimits::of_handover();
        let until = Instant::now().checked_add(limits.call);
        // The source sends the state once all that the guest wrote is on its disks, and nothing is written
        // until the guest runs here. A disk whose cache cannot be dropped, or whose storage does not
        // respond in time, fails here, while the source can still resume the guest.
        self.machine.drop_disk_caches_within(DROP_CACHES_TIME_MAX)?;
        let mut state = match self.converted.take() {
            Some(state) => *state,
            None => MachineState::from_json(state_json)?,
        };
        if let Some(kvm_limits) = self.kvm_limits {
            resident::bring_in(self.memory.ram(), &state.vcpus, kvm_limits)?;
            if kvm_limits.async_page_faults {
                self.machine.hold_msrs(resident::hold_msrs(&mut state.vcpus));
            }
        }
        let patience = Patience { until, ..Patience::within(limits) };
        Ok(self.machine.restore(state, ClockPolicy::CatchUp, &patience)?)
    }

    fn take_exclusive(&mut self) -> Result<(), VmError> {
        Ok(self.machine.take_exclusive()?)
    }

    fn in_doubt(&mut self, doubt: InDoubt, lasts: bool) {
        (self.doubts)(&self.machine, doubt, lasts);
    }

    fn run(self, resume: bool) -> Result<Machine, (Self, VmError)> {
        let Self { mut machine, memory, converted, faults, kvm_limits, doubts } = self;
        let running = if resume { machine.resume() } else { machine.take_exclusive() };
        match running {
            Ok(()) => Ok(machine),
            Err(error) => {
                let arrived = Self { machine, memory, converted, faults, kvm_limits, doubts };
                Err((arrived, error.into()))
            }
        }
    }
}
