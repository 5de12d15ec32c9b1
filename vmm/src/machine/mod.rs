// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A machine: guest memory, vCPUs and devices, wired together.
//!
//! Owns everything that a guest sees, and the order in which it starts, stops, is saved and comes
//! back. Knows nothing of HTTP, of migration, or of what happens to the process.
//!
//! ```text
//!            boot()                     arriving(), restore()
//!               \                         /
//!                v                       v
//!               resume <-> pause -> save, write_back, release_exclusive
//! ```
//!
//! | module | owns |
//! | --- | --- |
//! | `ahead` | the rules of a start, asked without one |
//! | `parts` | all of a machine but its vCPUs, wired together |
//! | `error` | why a machine cannot be made, run, stopped, saved or restored |
//! | `ram` | guest RAM: from options to memory slots |
//! | `prefault`, `prezeroed`, `stage2` | populating it ahead of time, from the pool, in stage-2 tables |
//! | `faults` | guest RAM of which vCPUs may be refused a page |
//! | `boot` | CPUID, tables, kernel, registers |
//! | `boot_devices` | the virtio devices of a booting machine, kind by kind |
//! | `numa` | NUMA nodes, as tables and memory devices tell of them |
//! | `affinity` | host CPUs of vCPU threads |
//! | `core_scheduling` | what may run beside a vCPU on its core |
//! | `features`, `generation`, `host` | the processor, the generation ID, this host |
//! | `space` | ports and MMIO: what vCPU exits do |
//! | `segments` | PCI segments and their device windows |
//! | `virtio`, `place` | virtio devices on the PCI bus, and where on it |
//! | `disks`, `nets`, `vsocks`, `vhost_users`, `vdpas`, `consoles`, `balloons`, `mems`, `pmems`, `panics`, `tpms`, `legacy` | wiring of each kind of device |
//! | `passthrough` | VFIO devices |
//! | `user_devices` | PCI devices that other processes emulate |
//! | `opening` | opening what is behind an added device |
//! | `hotplug` | devices that come and go |
//! | `memory_hotplug` | memory that comes as memory devices of ACPI |
//! | `exclusive` | images and taps that only one VM may use |
//! | `full_disks`, `write_back` | disks without space; writing back to stable storage |
//! | `pausing` | stopping a machine within a time limit |
//! | `saving`, `state` | its state, and the format of that |
//! | `events` | guest events that the VMM must act on |
//! | `inspect` | counters and requests to a running machine |
//! | `meters` | handles to its counters, for when another thread owns it |

mod affinity;
pub mod ahead;
mod balloons;
mod baseline;
mod boot;
mod boot_devices;
mod consoles;
mod core_dump;
mod core_scheduling;
mod cpu_hotplug;
mod disk_sizes;
mod disks;
mod error;
mod events;
mod exclusive;
mod faults;
pub mod features;
mod full_disks;
mod generation;
mod host;
mod hotplug;
mod inspect;
mod iommus;
mod legacy;
mod limits;
mod memory_hotplug;
mod mems;
mod meters;
mod nets;
mod numa;
mod opening;
mod panics;
mod parts;
mod passthrough;
mod pausing;
mod place;
mod pmems;
mod prefault;
mod prezeroed;
mod queued;
mod ram;
mod saving;
mod segments;
mod space;
mod stage2;
mod state;
mod tpms;
mod user_devices;
mod vdpas;
mod vhost_users;
mod virtio;
mod vsocks;
mod write_back;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use arch::cpuid::VmCpuid;
use devices::virtio::block::DiskLock;
use hypervisor::{CpuidEntry, MsrValue, Stage2Fill, ThreadsConfig, Vcpu, VcpuThreads, Vm};
use memory::{Collapse, GuestRam, RamSources};
use prezero_pool_client::{PoolConnection, PoolError};
use vfio::pin_time::GATE_WAIT_MAX;

use crate::config::VmConfig;

pub use balloons::ResizeBalloonError;
pub use boot::MachineBootError;
pub use consoles::{ConsoleError, Consoles};
pub use cpu_hotplug::ResizeVcpusError;
pub use disk_sizes::DiskSizeError;
pub use error::MachineError;
pub use events::{EventSink, GuestEvent, Power};
pub use exclusive::{ExclusiveError, KeptForReboot, LockedImages, WriteBackFailed};
pub use faults::MissingPages;
pub use full_disks::{DisksFull, FullDiskStatus};
pub use generation::GenerationError;
pub use host::{Host, HostError};
pub use hotplug::RemoveError;
pub use inspect::{FunctionInfo, SeenDevice, StoppedMemoryWork};
pub use legacy::{LegacyError, LegacyStateError};
pub use mems::ResizeMemoryError;
pub use meters::MachineMeters;
pub use passthrough::{
    CallLimits, DeviceStateReader, PassthroughError, Patience, StateApart, WaitsFor, WithheldStatus,
};
pub use pausing::CancelToken;
pub use prefault::{BootPrefault, BootWatch, PrefaultEnd, PrefaultStatus};
pub use queued::has_free_buffers;
pub use ram::{MachineRamError, later_id as later_memory_id, prefault_modes, slots_in};
#[cfg(test)]
pub use ram::{layout_for, make_arriving};
pub use segments::device_window_gpa;
pub use state::{
    INTEGRATED_ENDPOINTS_VERSION, MACHINE_STATE_VERSION, MachineState, MachineStateError,
    NARROW_BARS_VERSION, PCI_SEGMENTS_VERSION, PLATFORMS_VERSION, PciFunctionState, ROMS_VERSION,
    StateJsonError,
};
pub use vhost_users::check_logs;
pub use virtio::{HotAddError, VirtioError};
pub use write_back::{WriteBack, WriteBackError, report_write_back_failure};

use affinity::affinity_setter;
use parts::{BuildInput, MachineParts};
use passthrough::{DeviceStart, KeptDmaSlot, OpenInput, Opening, PrepinnedSlot, SlotAnswer};
use space::Exits;
use virtio::PciContext;

/// A machine: the memory, vCPUs and devices of a booted VM.
pub struct Machine {
    // Drop order matters: vCPU threads end first, then the parts.
    /// Collapse of received memory to huge pages, in the background. Declared before the stage-2 prefault, which waits for
    /// its end.
    collapse: Option<Collapse>,
    /// Stage-2 prefault of received memory. Declared before the vCPUs, whose threads it uses.
    stage2: Option<Stage2Fill>,
    vcpus: VcpuThreads,
    /// vCPUs that KVM has made and that could not be set up or started, by APIC id; used for the next of that id.
    spare_vcpus: BTreeMap<u32, Vcpu>,
    paused: bool,
    /// See [`Machine::end`].
    has_ended: bool,
    /// Another host may have written to the disks since they were opened or released.
    disks_are_stale: bool,
    /// The guest has run elsewhere or in an earlier process, and not yet here.
    has_arrived: bool,
    /// Background prefault, in progress or finished.
    prefault: Option<prefault::Background>,
    /// Everything except the vCPUs.
    parts: MachineParts,
    /// The pool that was asked for a slot with a device. It leaves the devices alone while this is open, as
    /// the next machine has it on a reboot, and threads that still open devices.
    pool: Option<Arc<PoolConnection>>,
    /// Images in a format that the next machine has: their tables are written when this one ends.
    passed_on: Vec<(String, DiskLock)>,
    consoles: Consoles,
    /// See [`Machine::restore_held_msrs`].
    held_msrs: Vec<(usize, MsrValue)>,
    /// The CPUID that vCPUs would be shown if the guest booted here.
    cpuid: VmCpuid,
    /// The CPUID that they were shown when it booted, here or elsewhere.
    shown: Vec<CpuidEntry>,
    /// Feature MSRs as the guest found them at boot.
    feature_msrs: Vec<MsrValue>,
    config: VmConfig,
}

impl Machine {
    /// A paused machine of these parts.
    ///
    /// # Errors
    /// A vCPU thread cannot be started.
    fn start(
        parts: MachineParts,
        vcpus: Vec<Vcpu>,
        cpuid: VmCpuid,
        config: VmConfig,
        consoles: Consoles,
    ) -> Result<Self, MachineError> {
        let exits = Exits::new(Arc::clone(&parts.space), Arc::clone(&parts.power));
        let threads = ThreadsConfig {
            handler: Arc::new(exits),
            on_start: Some(affinity_setter(&config, &parts.topology)),
        };
        let vcpus = VcpuThreads::start(vcpus, threads)?;
        core_scheduling::isolate(&vcpus, config.cpus.core_scheduling, config.cpus.boot_vcpus)?;
        parts.passthrough.report_waits(vcpus.standstill());
        Ok(Self {
            stage2: None,
            vcpus,
            spare_vcpus: BTreeMap::new(),
            paused: true,
            disks_are_stale: false,
            has_arrived: false,
            has_ended: false,
            prefault: None,
            collapse: None,
            parts,
            pool: None,
            passed_on: Vec::new(),
            consoles,
            held_msrs: Vec::new(),
            shown: features::shown(&cpuid),
            feature_msrs: Vec::new(),
            cpuid,
            config,
        })
    }

    /// A machine at its first instruction, paused. Once it runs, [`Machine::finish_opening`] must be
    /// called. Images, memory files and memory in `kept` are used again. Cancelling ends prefault early.
    ///
    /// # Errors
    /// Names what is missing.
    pub fn boot(
        mut config: VmConfig,
        consoles: Consoles,
        host: &Host,
        sink: EventSink,
        kept: &mut KeptForReboot,
        watch: &BootWatch<'_>,
    ) -> Result<Self, MachineError> {
        let BootWatch { prefault: boot_prefault, cancel } = *watch;
        disks::detect_formats(&mut config).map_err(VirtioError::from)?;
        if let Some(baseline) = &mut config.cpus.baseline {
            baseline.load()?;
        }
        // First: what the host lacks is not to be found after all memory has been populated.
        let supported = host.supported(&config.cpus)?;
        baseline::check_for_boot(host, &config.cpus, kept.is_reboot)?;
        passthrough::choose_high_hole(&mut config);
        let bits = host.phys_bits(&config.cpus);
        segments::keep_address_bits(&mut config, bits);
        // Those of an earlier boot: what was added or removed since may have changed them.
        config.pci_numbers = None;
        let locked = std::mem::take(&mut kept.files);
        if config.memory.has_memory_devices() {
            // What is plugged in from the start would be missing among the mappings.
            drop(kept.dma.take());
        }
        let layout = ram::layout_for(&config, bits);
        let before = ram::restart(&config.memory, layout, kept.ram.take(), boot_prefault, cancel)?;
        let dma = kept.dma.take().filter(|dma| dma.is_for(&config, before.as_ref()));
        let asked = kept.pool.take();
        let (ram, slot, pool) = if let Some(ram) = before {
            (ram, None, asked)
        } else {
            // Its slot is returned, for this VM to ask anew.
            drop(asked);
            let SlotAnswer { slot, pool } = PrepinnedSlot::take(&config, bits)?;
            let provided = slot.iter().flat_map(PrepinnedSlot::memory).collect();
            let origin = RamSources { provided, locked, ..RamSources::default() };
            let memory = &config.memory;
            let ram = ram::make(memory, layout, origin, pool.as_ref(), boot_prefault, cancel)?;
            (ram, slot, pool)
        };
        let images = &mut kept.disks;
        let left = host.left.clone();
        let open = OpenInput {
            opening: Opening::Meanwhile,
            slot,
            kept: dma,
            left,
            pool: pool.clone(),
            cancel,
        };
        let build = BuildInput { ram, open, images };
        let mut parts = MachineParts::build(&config, &consoles, host, sink, build)?;
        parts.devices.settle_pmems(&mut config);
        config.pci_numbers = parts.kept_numbers();
        let vcpus = parts.create_vcpus(&config)?;
        let platform = config.machine_platform();
        let entry = boot::load(boot::LoadInput {
            ram: &parts.ram,
            config: &config,
            registers: boot::registers_of(&config, &parts.ram, &parts.segments),
            topology: &parts.topology,
            segments: parts.segments.described(&passthrough::routes(platform.first_intx_gsi)),
            place: &|id| parts.passthrough.address_of(id),
            iommu: parts.devices.described_iommu(&config),
            has_serial: consoles.serial.is_some(),
        })?;
        if platform.tables.has_generation_id {
            generation::write_new(&parts.ram)?;
            parts.legacy.generation().set_present(true);
        }
        parts.tpm.power_on()?;
        let cpuid = parts.cpuid(&vcpus, &supported, &config);
        for (index, vcpu) in (0_u32..).zip(&vcpus) {
            let registers = if index == 0 { Some(boot::registers(vcpu, &entry)?) } else { None };
            let cpuid = cpuid.for_vcpu(index)?;
            vcpu.init(&boot::vcpu_init(cpuid, registers))
                .map_err(|source| MachineError::Vcpu { index, source })?;
        }
        baseline::set_msrs(&vcpus, &cpuid, &config.cpus)?;
        let discarding = parts.devices.discarding_devices();
        parts.passthrough.check_limits(&parts.ram, &discarding)?;
        parts.passthrough.map_memory(&parts.ram, discarding, cancel)?;
        let described =
            vcpus.first().map(|vcpu| vcpu.read_registers(&arch::feature_msrs::indices()));
        let mut machine = Self::start(parts, vcpus, cpuid, config, consoles)?;
        machine.feature_msrs = described.transpose()?.unwrap_or_default();
        machine.pool = pool;
        let memory = &machine.config.memory;
        let modes = ram::prefault_modes(memory);
        let balloon = machine.balloon().cloned();
        machine.prefault = prefault::Background::start(&machine.parts.ram, memory, &modes, balloon);
        Ok(machine)
    }

    /// Plugs the passed-through devices that are being opened while the guest starts, those that are open in time: the
    /// guest finds the others later, when [`GuestEvent::WithheldDevice`] has told that they are
    /// ([`Machine::take_ejected`]). Cancelling ends the wait for a device.
    ///
    /// # Errors
    /// Names the device, or says that the start was cancelled. The machine is unusable then, and its guest
    /// has run: [`Machine::end`] must be called.
    pub fn finish_opening(&mut self, cancel: &CancelToken) -> Result<(), MachineError> {
        let late_at = Instant::now() + GATE_WAIT_MAX;
        let passthrough = &mut self.parts.passthrough;
        if !passthrough.is_opening() {
            return Ok(());
        }
        let segments = &self.parts.segments;
        let context = PciContext {
            segments,
            vm: &self.parts.vm,
            ram: &self.parts.ram,
            activation: &self.parts.activation,
            platform: self.config.machine_platform(),
        };
        // Not before the guest runs: starting threads takes time, and takes from what it may have of them.
        passthrough.populate_early(&self.config.memory, &self.parts.ram, true);
        let discarding = self.parts.devices.discarding_devices();
        let mut start = DeviceStart::new(discarding, cancel);
        passthrough.receive_opened(&context, &mut start, Some(late_at))?;
        passthrough.withhold_late(segments);
        passthrough.put_on_bus(segments, &start)?;
        // Those that the guest cannot do without.
        passthrough.receive_opened(&context, &mut start, None)?;
        passthrough.put_on_bus(segments, &start)?;
        self.parts.devices.place_later(segments)?;
        Ok(())
    }

    /// Ends the guest: on return its disks are written back and their locks are released. Passed-through
    /// devices that are still being opened are not waited for, also when the value is dropped. Idempotent.
    pub fn end(&mut self) {
        if std::mem::replace(&mut self.has_ended, true) {
            return;
        }
        self.collapse = None;
        // A vCPU may be waiting for a device, or for memory to be mapped for one.
        self.parts.passthrough.release_numbers(&self.parts.segments);
        self.parts.devices.release_numbers(&self.parts.segments);
        self.parts.passthrough.cancel();
        if let Err(error) = self.vcpus.stop_all() {
            log::warn!("vCPU threads did not end cleanly: {error}");
        }
        // Before anything that the next boot does with memory.
        self.parts.passthrough.leave(&self.parts.ram);
        self.parts.user_devices.end();
        self.end_devices();
    }

    /// Has the machine leave mapped for DMA what it can when it ends, as the guest reboots; it is in the
    /// returned slot then.
    pub fn keep_dma(&mut self) -> KeptDmaSlot {
        self.parts.passthrough.keep_mappings()
    }

    /// The connection over which a pool leaves the devices alone, for the next boot.
    pub fn keep_pool(&self) -> Option<Arc<PoolConnection>> {
        self.pool.clone()
    }

    /// Has the pool leave the devices alone if it does not any more, as it was started anew: before the machine is dropped,
    /// whose devices are opened again by the next one. Waits for the pool for 2 s at most, with one of an earlier version for
    /// 4 s.
    pub fn renew_pool(&self) {
        let Some(pool) = &self.pool else { return };
        match pool.renew() {
            Ok(()) => {}
            // What is not there takes no device, but for one that is started now.
            Err(error @ PoolError::Connect { .. }) => {
                let why = error_text::chain(&error);
                log::info!(
                    "a pool that is started now may take devices of the VM, which reboots: {why}"
                );
            }
            Err(error) => {
                let why = error_text::chain(&error);
                log::warn!("a pool may take devices of the VM while it reboots: {why}");
            }
        }
    }

    /// Memory for a machine to be received or restored. Zones for which `origin` provides a file consist of
    /// these files, with their contents; all others are empty: the contents of their files are discarded
    /// here, before a page arrives or is pinned, if `origin.contents` allows that. It is unpopulated, but for zones
    /// with memory of a pool.
    ///
    /// # Errors
    /// Names the zone and what is missing here, the process that holds its file, or says that the file is
    /// not empty.
    pub fn arriving_ram(
        config: &VmConfig,
        host: &Host,
        origin: RamSources,
    ) -> Result<Arc<GuestRam>, MachineError> {
        passthrough::check_config(config)?;
        vhost_users::check_movable(config)?;
        vdpas::check_movable(config)?;
        user_devices::check_movable(config)?;
        pmems::check_movable(config)?;
        let bits = host.phys_bits(&config.cpus);
        Ok(ram::make_arriving(&config.memory, ram::layout_for(config, bits), origin)?)
    }

    /// A paused machine on such memory, whose state is still to be received. Does not change the contents
    /// of memory; for passed-through devices all of it is populated.
    ///
    /// # Errors
    /// Names what is missing here.
    pub fn arriving(
        mut config: VmConfig,
        consoles: Consoles,
        host: &Host,
        sink: EventSink,
        ram: Arc<GuestRam>,
    ) -> Result<Self, MachineError> {
        disks::assume_raw(&mut config);
        let images = &mut LockedImages::default();
        let cancel = &CancelToken::default();
        let left = host.left.clone();
        let open = OpenInput {
            opening: Opening::Before,
            slot: None,
            kept: None,
            left,
            pool: None,
            cancel,
        };
        let build = BuildInput { ram, open, images };
        let supported = host.supported(&config.cpus)?;
        let mut parts = MachineParts::build(&config, &consoles, host, sink, build)?;
        parts.passthrough.check_movable(&config)?;
        parts.passthrough.stop_within(&Patience::within(CallLimits::of_arrival()))?;
        // On threads of its own; contents that arrive meanwhile are kept.
        parts.passthrough.map_beside();
        let discarding = parts.devices.discarding_devices();
        parts.passthrough.map_memory(&parts.ram, discarding, cancel)?;
        let vcpus = parts.create_vcpus(&config)?;
        let cpuid = parts.cpuid(&vcpus, &supported, &config);
        let mut machine = Self::start(parts, vcpus, cpuid, config, consoles)?;
        machine.disks_are_stale = true;
        machine.has_arrived = true;
        machine.stop_watchdog();
        machine.parts.devices.pause();
        machine.parts.legacy.pause();
        Ok(machine)
    }

    /// Waits until a machine that arrives can take its state: all memory is mapped for its devices.
    ///
    /// # Errors
    /// Memory cannot be mapped, or `is_cancelled`.
    pub fn await_ready(&self, is_cancelled: &dyn Fn() -> bool) -> Result<(), MachineError> {
        Ok(self.parts.passthrough.await_memory(is_cancelled)?)
    }

    /// The configuration.
    pub fn config(&self) -> &VmConfig {
        &self.config
    }

    /// The CPUID that all vCPUs were shown when the guest booted, here or elsewhere.
    pub fn shown(&self) -> &[CpuidEntry] {
        &self.shown
    }

    /// The feature MSRs that the guest sees.
    pub fn feature_msrs(&self) -> &[MsrValue] {
        &self.feature_msrs
    }

    /// The console endpoints.
    pub fn consoles(&self) -> &Consoles {
        &self.consoles
    }

    /// The guest memory.
    pub fn ram(&self) -> &Arc<GuestRam> {
        &self.parts.ram
    }

    /// The KVM VM.
    pub fn vm(&self) -> &Vm {
        &self.parts.vm
    }

    /// Whether the machine is paused.
    pub fn is_paused(&self) -> bool {
        self.paused
    }

    /// Whether a passed-through device has stopped that [`Self::resume`] sets running, which takes as long as its driver does.
    pub fn has_stopped_devices(&self) -> bool {
        self.parts.passthrough.has_stopped()
    }

    /// Whether the machine can be migrated or saved.
    ///
    /// # Errors
    /// Names the devices that cannot be migrated, or the disk that is full or of which a flush has failed.
    pub fn check_movable(&self) -> Result<(), MachineError> {
        self.refusals().into_iter().next().map_or(Ok(()), Err)
    }

    /// Whether the hardware states of devices are short enough to be kept with the other state.
    ///
    /// # Errors
    /// Names the devices, with their lengths.
    pub fn check_state_len(&self) -> Result<(), MachineError> {
        Ok(self.parts.passthrough.check_state_len(&self.config)?)
    }

    /// Resumes the guest, with all image locks and taps: those that are not held are taken first.
    ///
    /// # Errors
    /// Names the device that another VM holds; the machine stays paused.
    pub fn resume(&mut self) -> Result<(), MachineError> {
        if self.paused {
            self.take_exclusive()?;
            self.parts.passthrough.run();
            self.parts.devices.resume();
            // The terminal may have another size than where the guest ran before, or have changed during
            // the pause.
            self.parts.devices.follow_terminal();
            self.parts.legacy.resume();
            self.vcpus.resume_all();
            self.paused = false;
            // Not earlier: until now frames for the guest belong to where it ran before.
            if std::mem::take(&mut self.has_arrived) {
                self.parts.devices.announce();
            }
        }
        Ok(())
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        self.end();
    }
}
