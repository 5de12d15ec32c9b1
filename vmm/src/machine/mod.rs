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
//! | `ram` | guest RAM: from options to memory slots |
//! | `prefault`, `prezeroed`, `stage2` | populating it ahead of time, from the pool, in second-stage tables |
//! | `faults` | guest RAM of which vCPUs may be refused a page |
//! | `boot` | CPUID, tables, kernel, registers |
//! | `affinity` | host CPUs of vCPU threads |
//! | `features`, `generation`, `host` | the processor, the generation ID, this host |
//! | `space` | ports and MMIO: what vCPU exits do |
//! | `virtio` | virtio devices on the PCI bus |
//! | `disks`, `nets`, `vsocks`, `consoles`, `balloons`, `mems`, `legacy` | wiring of each kind of device |
//! | `passthrough` | VFIO devices |
//! | `opening` | opening what is behind an added device |
//! | `hotplug` | devices that come and go |
//! | `exclusive` | images and taps that only one VM may use |
//! | `full_disks`, `write_back` | disks without space; writing back to stable storage |
//! | `pausing` | stopping a machine within a time limit |
//! | `saving`, `state` | its state, and the format of that |
//! | `events` | guest events that the VMM must act on |
//! | `inspect` | counters and requests to a running machine |

mod affinity;
mod balloons;
mod boot;
mod consoles;
mod disks;
mod events;
mod exclusive;
mod faults;
pub mod features;
mod full_disks;
mod generation;
mod host;
mod hotplug;
mod inspect;
mod legacy;
mod mems;
mod nets;
mod opening;
mod passthrough;
mod pausing;
mod prefault;
mod prezeroed;
mod ram;
mod saving;
mod space;
mod stage2;
mod state;
mod virtio;
mod vsocks;
mod write_back;

use std::fs::File;
use std::sync::Arc;
use std::time::Duration;

use arch::cpuid::{CpuTopology, CpuidTooLong, VmCpuid, phys_bits};
use arch::layout;
use devices::bus::BusError;
use devices::virtio::StateError;
use hypervisor::{
    AmxError, CpuidEntry, IrqchipStateError, KvmError, MsrValue, Stage2Fill, ThreadsConfig,
    ThreadsError, Vcpu, VcpuStateError, VcpuThreads, Vm,
};
use kvm_bindings::CpuId;
use memory::{Collapse, GuestRam, InitialContents, ProvidedFile, RamSources};
use pci::{
    ECAM_SEGMENT_LEN_BYTES, MmioWindows, PciConfigIo, PciEcam, PciError, PciSegment, PciStateError,
};
use thiserror::Error;

use crate::config::VmConfig;
use crate::config::console::DEBUG_CONSOLE_PORT;

pub use balloons::ResizeBalloonError;
pub use boot::MachineBootError;
pub use consoles::{ConsoleError, Consoles};
pub use events::{EventSink, GuestEvent, Power};
pub use exclusive::{ExclusiveError, LockedImages, RebootLocks, WriteBackFailed};
pub use faults::MissingPages;
pub use full_disks::{DisksFull, FullDiskStatus};
pub use generation::GenerationError;
pub use host::{Host, HostError};
pub use hotplug::RemoveError;
pub use inspect::{FunctionInfo, StoppedMemoryWork};
pub use legacy::{LegacyError, LegacyStateError};
pub use mems::ResizeMemoryError;
pub use passthrough::PassthroughError;
pub use pausing::CancelToken;
pub use prefault::{PrefaultEnd, PrefaultStatus};
pub use ram::MachineRamError;
pub use state::{
    INTEGRATED_ENDPOINTS_VERSION, MACHINE_STATE_VERSION, MachineState, MachineStateError,
    NARROW_BARS_VERSION, PciFunctionState, StateJsonError,
};
pub use virtio::{HotAddError, VirtioError};
pub use write_back::{WriteBack, WriteBackError, report_write_back_failure};

use affinity::affinity_setter;
use hotplug::Hotplug;
use legacy::LegacyDevices;
use passthrough::{OpenInput, Opening, Passthrough, PrepinnedSlot};
use space::{AddressSpace, Exits};
use virtio::{PciContext, VirtioDevices};

/// Why a machine cannot be made, run, stopped, saved or restored.
#[derive(Debug, Error)]
pub enum MachineError {
    /// Memory.
    #[error("cannot give the VM its memory")]
    Ram(#[from] MachineRamError),
    /// KVM.
    #[error("cannot make the VM")]
    Kvm(#[from] KvmError),
    /// What boots.
    #[error("cannot boot the VM")]
    Boot(#[from] MachineBootError),
    /// A feature that the kernel gives on request.
    #[error(transparent)]
    Amx(#[from] AmxError),
    /// Features of vCPUs.
    #[error("cannot describe the vCPUs")]
    Cpuid(#[from] CpuidTooLong),
    /// The initial or saved state of a vCPU.
    #[error("cannot set up vCPU {index}")]
    Vcpu {
        /// Its number.
        index: u32,
        /// Why.
        #[source]
        source: VcpuStateError,
    },
    /// Storage or a network that does not answer.
    #[error(
        "'{id}' has not finished its requests within {} ms: what is behind it does not answer",
        .within.as_millis()
    )]
    DeviceBusy {
        /// The device.
        id: String,
        /// How long it was waited for.
        within: Duration,
    },
    /// A pause was taken back before it was done.
    #[error("the pause was taken back before all devices had finished their requests")]
    PauseWithdrawn,
    /// A device was removed before it was open.
    #[error("'{id}' was removed before it could be opened")]
    AddWithdrawn {
        /// The device.
        id: String,
    },
    /// A device that is to be added.
    #[error("cannot start a thread that opens '{id}'")]
    OpenThread {
        /// The device.
        id: String,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// The threads of vCPUs.
    #[error("cannot control the vCPUs")]
    Threads(#[from] ThreadsError),
    /// Legacy devices.
    #[error("cannot make the legacy devices")]
    Legacy(#[from] LegacyError),
    /// Virtio devices.
    #[error("cannot make the virtio devices")]
    Virtio(#[from] VirtioError),
    /// A disk or network device for a machine that is there.
    #[error(transparent)]
    HotAdd(#[from] HotAddError),
    /// Devices that come and go.
    #[error("cannot restore the state of PCI hotplug")]
    HotplugState(#[from] StateError),
    /// Passed-through devices.
    #[error(transparent)]
    Passthrough(#[from] PassthroughError),
    /// The PCI bus.
    #[error("cannot make the PCI bus")]
    Pci(#[from] PciError),
    /// A place on a bus.
    #[error("cannot place the PCI configuration space")]
    Bus(#[from] BusError),
    /// Locks and taps.
    #[error("a resource that only one VM may use is not free")]
    Exclusive(#[from] ExclusiveError),
    /// A flush has failed.
    #[error(transparent)]
    WriteBackFailed(#[from] WriteBackFailed),
    /// A disk.
    #[error(transparent)]
    WriteBack(#[from] WriteBackError),
    /// The host has no room for what the guest has written.
    #[error(transparent)]
    DisksFull(#[from] DisksFull),
    /// State of a version that is not known.
    #[error(
        "the machine state has version {0}, and the newest known here is {MACHINE_STATE_VERSION}"
    )]
    StateVersion(u32),
    /// The guest relies on what this processor does not have.
    #[error(
        "this host lacks processor features that the guest has been shown: {0}; use a host that \
         has them"
    )]
    Features(String),
    /// State of another machine.
    #[error("the machine state does not fit this machine: {0}")]
    StateMismatch(String),
    /// State of the interrupt controllers.
    #[error("cannot restore the interrupt controllers")]
    Irqchips(#[from] IrqchipStateError),
    /// The generation ID.
    #[error(transparent)]
    Generation(#[from] GenerationError),
    /// State of legacy devices.
    #[error("cannot restore the legacy devices")]
    LegacyState(#[from] LegacyStateError),
    /// State of PCI devices.
    #[error("cannot save or restore a PCI device")]
    PciState(#[from] PciStateError),
}

/// A machine.
pub struct Machine {
    // Order matters on drop: vCPU threads end first, then devices, then memory.
    /// Tables of vCPUs being filled for memory from elsewhere. Before the vCPUs, as it uses them.
    stage2: Option<Stage2Fill>,
    vcpus: VcpuThreads,
    paused: bool,
    /// See [`Machine::end`].
    has_ended: bool,
    /// Another host may have written to the disks since they were opened or released.
    disks_are_stale: bool,
    /// The guest has run elsewhere, or before, and not yet here.
    has_arrived: bool,
    /// Guest memory that is populated while the guest runs, or was.
    prefault: Option<prefault::Background>,
    /// Memory from elsewhere that gets huge pages while the guest runs.
    collapse: Option<Collapse>,
    devices: VirtioDevices,
    passthrough: Passthrough,
    legacy: LegacyDevices,
    hotplug: Hotplug,
    segment: Arc<PciSegment>,
    config_ports: Arc<PciConfigIo>,
    space: Arc<AddressSpace>,
    power: Arc<Power>,
    vm: Vm,
    ram: Arc<GuestRam>,
    consoles: Consoles,
    topology: CpuTopology,
    /// See [`Machine::restore_held_msrs`].
    held_msrs: Vec<(usize, MsrValue)>,
    /// What vCPUs would be made to show if the guest booted here.
    cpuid: VmCpuid,
    /// What they were made to show when it booted, here or elsewhere.
    shown: Vec<CpuidEntry>,
    /// Registers that describe the processor, as the guest found them then.
    feature_msrs: Vec<MsrValue>,
    config: VmConfig,
}

/// A machine without vCPU threads.
struct MachineParts {
    devices: VirtioDevices,
    passthrough: Passthrough,
    legacy: LegacyDevices,
    hotplug: Hotplug,
    segment: Arc<PciSegment>,
    config_ports: Arc<PciConfigIo>,
    space: Arc<AddressSpace>,
    power: Arc<Power>,
    vm: Vm,
    ram: Arc<GuestRam>,
    topology: CpuTopology,
    windows: MmioWindows,
}

/// What is there before any device of a machine.
struct BuildInput<'a> {
    ram: Arc<GuestRam>,
    open: OpenInput<'a>,
    images: &'a mut LockedImages,
}

impl MachineParts {
    fn build(
        config: &VmConfig,
        consoles: &Consoles,
        host: &Host,
        sink: EventSink,
        BuildInput { ram, open, images }: BuildInput<'_>,
    ) -> Result<Self, MachineError> {
        let bits = phys_bits(&host.cpuid, config.cpus.max_phys_bits);
        let vm = Vm::create_with_memory(
            &host.hypervisor,
            &hypervisor::VmConfig {
                tss_gpa: layout::KVM_TSS_GPA,
                identity_map_gpa: layout::KVM_IDENTITY_MAP_GPA,
            },
            |vm| Ok::<_, MachineError>(ram::attach(vm, &ram)?),
        )?;
        let space = Arc::new(AddressSpace::default());
        let power = Power::new(Arc::clone(&sink));
        let debug_port = config.debug_console.iobase.unwrap_or(DEBUG_CONSOLE_PORT);
        let legacy = LegacyDevices::wire(&vm, &space, &ram, consoles, debug_port, &power)?;

        let windows = boot::device_windows(&ram, bits)?;
        let segment = space.new_segment(windows)?;
        space.insert_memory(
            layout::ECAM_GPA,
            ECAM_SEGMENT_LEN_BYTES,
            "PCI ECAM",
            Arc::new(PciEcam::new(&segment)),
        )?;
        let config_ports = Arc::new(PciConfigIo::new(&segment));
        space.insert_ports(
            layout::PCI_CONFIG_PORT,
            u64::from(layout::PCI_CONFIG_PORT_COUNT),
            "PCI configuration ports",
            config_ports.clone(),
        )?;
        let hotplug = Hotplug::wire(&space, &segment, Arc::clone(&sink))?;
        let pci = PciContext { segment: &segment, vm: &vm, ram: &ram };
        let ban = Passthrough::ban_discards(config, &ram);
        let mut devices =
            VirtioDevices::wire(config, consoles, &pci, images, Arc::clone(&sink), &power)?;
        let passthrough = Passthrough::wire(config, &pci, ban, sink, open)?;
        if !passthrough.is_opening() {
            devices.place_later(&segment)?;
        }
        let topology = boot::topology(&config.cpus)?;
        Ok(Self {
            devices,
            passthrough,
            legacy,
            hotplug,
            segment,
            config_ports,
            space,
            power,
            vm,
            ram,
            topology,
            windows,
        })
    }

    fn create_vcpus(&self, config: &VmConfig) -> Result<Vec<Vcpu>, MachineError> {
        (0..config.cpus.boot_vcpus)
            .map(|index| Ok(self.vm.create_vcpu(self.topology.apic_id(index))?))
            .collect()
    }

    fn cpuid(&self, vcpus: &[Vcpu], host: &CpuId, config: &VmConfig) -> VmCpuid {
        let tsc_khz = vcpus.first().and_then(Vcpu::tsc_khz);
        boot::vm_cpuid(host, &config.cpus, self.topology, tsc_khz)
    }

    fn start(
        self,
        vcpus: Vec<Vcpu>,
        cpuid: VmCpuid,
        config: VmConfig,
        consoles: Consoles,
    ) -> Result<Machine, MachineError> {
        let exits = Exits::new(Arc::clone(&self.space), Arc::clone(&self.power));
        let threads = ThreadsConfig {
            handler: Arc::new(exits),
            on_start: Some(affinity_setter(&config, &self.topology)),
        };
        Ok(Machine {
            stage2: None,
            vcpus: VcpuThreads::start(vcpus, &threads)?,
            paused: true,
            disks_are_stale: false,
            has_arrived: false,
            has_ended: false,
            prefault: None,
            collapse: None,
            devices: self.devices,
            passthrough: self.passthrough,
            legacy: self.legacy,
            hotplug: self.hotplug,
            segment: self.segment,
            config_ports: self.config_ports,
            space: self.space,
            power: self.power,
            vm: self.vm,
            ram: self.ram,
            consoles,
            topology: self.topology,
            held_msrs: Vec::new(),
            shown: features::shown(&cpuid),
            feature_msrs: Vec::new(),
            cpuid,
            config,
        })
    }
}

impl Machine {
    /// A machine at its first instruction, paused. When it runs, [`Machine::finish_opening`] has to follow.
    /// Images and files of memory that are in `locks` are not opened again. Populating memory ends early
    /// when it is to be cancelled.
    ///
    /// # Errors
    /// Naming what is missing.
    pub fn boot(
        mut config: VmConfig,
        consoles: Consoles,
        host: &Host,
        sink: EventSink,
        locks: &mut RebootLocks,
        cancel: &CancelToken,
    ) -> Result<Self, MachineError> {
        disks::detect_formats(&mut config).map_err(VirtioError::from)?;
        let bits = phys_bits(&host.cpuid, config.cpus.max_phys_bits);
        let slot = PrepinnedSlot::take(&config, bits)?;
        let provided = slot.iter().map(PrepinnedSlot::memory).collect();
        let locked = std::mem::take(&mut locks.files);
        let origin = RamSources { provided, locked, contents: InitialContents::AsFound };
        let ram = ram::make(&config.memory, bits, origin, cancel)?;
        let images = &mut locks.disks;
        let open = OpenInput { opening: Opening::Meanwhile, slot, cancel };
        let build = BuildInput { ram, open, images };
        let supported = host.supported(&config.cpus)?;
        let mut parts = MachineParts::build(&config, &consoles, host, sink, build)?;
        let vcpus = parts.create_vcpus(&config)?;
        let entry = boot::load(
            &parts.ram,
            &config,
            &parts.topology,
            parts.windows,
            &passthrough::routes(),
            consoles.serial.is_some(),
        )?;
        generation::write_new(&parts.ram)?;
        parts.legacy.generation().set_present(true);
        let cpuid = parts.cpuid(&vcpus, &supported, &config);
        for (index, vcpu) in (0_u32..).zip(&vcpus) {
            let registers = if index == 0 { Some(boot::registers(vcpu, &entry)?) } else { None };
            let cpuid = cpuid.for_vcpu(index)?;
            vcpu.init(&boot::vcpu_init(cpuid, registers))
                .map_err(|source| MachineError::Vcpu { index, source })?;
        }
        let discarding = parts.devices.discarding_devices();
        parts.passthrough.check_limits(&parts.ram, &discarding)?;
        parts.passthrough.map_memory(&parts.ram, discarding, cancel)?;
        let described =
            vcpus.first().map(|vcpu| vcpu.read_registers(&arch::feature_msrs::indices()));
        let mut machine = parts.start(vcpus, cpuid, config, consoles)?;
        machine.feature_msrs = described.transpose()?.unwrap_or_default();
        let memory = &machine.config.memory;
        let modes = ram::prefault_modes(memory);
        machine.prefault = prefault::Background::start(&machine.ram, memory, &modes);
        Ok(machine)
    }

    /// Gives the guest the passed-through devices that have been opened while it began to run. A device that
    /// is still being opened is not waited for when that is to be cancelled.
    ///
    /// # Errors
    /// Naming the device, or that the start was cancelled; the machine is of no use then, and its guest has run:
    /// [`Machine::end`] has to follow.
    pub fn finish_opening(&mut self, cancel: &CancelToken) -> Result<(), MachineError> {
        let context = PciContext { segment: &self.segment, vm: &self.vm, ram: &self.ram };
        self.passthrough.finish_opening(&context, self.devices.discarding_devices(), cancel)?;
        Ok(self.devices.place_later(&self.segment)?)
    }

    /// Ends the guest: what it has written is on its disks, and their locks are released, when this
    /// returns. What waits for passed-through devices that are still being opened is left to the end of
    /// the value. Does nothing the second time.
    pub fn end(&mut self) {
        if std::mem::replace(&mut self.has_ended, true) {
            return;
        }
        // A vCPU may be waiting for a device, or for memory that one is to reach.
        self.passthrough.release_numbers(&self.segment);
        self.devices.release_numbers(&self.segment);
        self.passthrough.cancel();
        if let Err(error) = self.vcpus.stop_all() {
            log::warn!("vCPU threads did not end well: {error}");
        }
        self.end_devices();
    }

    /// Memory for a machine that is still to come, not populated. The zones that are named in
    /// `given` consist of these files, as they are; all others hold nothing: what was in their files is
    /// thrown away here, before a page arrives and before any is pinned, if `contents` allows that.
    ///
    /// # Errors
    /// Naming the zone and what is missing here, or which other process has its file, or that it holds
    /// something.
    pub fn arriving_ram(
        config: &VmConfig,
        host: &Host,
        given: &[(String, Arc<File>)],
        contents: InitialContents,
    ) -> Result<Arc<GuestRam>, MachineError> {
        passthrough::check_config(config)?;
        let bits = phys_bits(&host.cpuid, config.cpus.max_phys_bits);
        let given = given.iter().map(|(zone, file)| ProvidedFile::file(zone, Arc::clone(file)));
        let origin = RamSources { provided: given.collect(), locked: Vec::new(), contents };
        Ok(ram::make(&config.memory, bits, origin, &CancelToken::default())?)
    }

    /// A machine on such memory, whose state is still to come, paused. Does not touch what is in
    /// memory; for passed-through devices all of it gets its pages.
    ///
    /// # Errors
    /// Naming what is missing here.
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
        let open = OpenInput { opening: Opening::Before, slot: None, cancel };
        let build = BuildInput { ram, open, images };
        let supported = host.supported(&config.cpus)?;
        let mut parts = MachineParts::build(&config, &consoles, host, sink, build)?;
        parts.passthrough.check_movable(&config)?;
        parts.passthrough.stop()?;
        // On threads of their own; what arrives in a page stays in it.
        let discarding = parts.devices.discarding_devices();
        parts.passthrough.map_memory(&parts.ram, discarding, cancel)?;
        let vcpus = parts.create_vcpus(&config)?;
        let cpuid = parts.cpuid(&vcpus, &supported, &config);
        let mut machine = parts.start(vcpus, cpuid, config, consoles)?;
        machine.disks_are_stale = true;
        machine.has_arrived = true;
        machine.stop_watchdog();
        machine.devices.pause();
        machine.legacy.pause();
        Ok(machine)
    }

    /// Its configuration.
    pub fn config(&self) -> &VmConfig {
        &self.config
    }

    /// What all its vCPUs were made to show when the guest booted, here or elsewhere.
    pub fn shown(&self) -> &[CpuidEntry] {
        &self.shown
    }

    /// Registers that describe the processor to its guest.
    pub fn feature_msrs(&self) -> &[MsrValue] {
        &self.feature_msrs
    }

    /// The endpoints of its consoles.
    pub fn consoles(&self) -> &Consoles {
        &self.consoles
    }

    /// Its memory.
    pub fn ram(&self) -> &Arc<GuestRam> {
        &self.ram
    }

    /// Its VM.
    pub fn vm(&self) -> &Vm {
        &self.vm
    }

    /// Whether the guest is stopped by its owner.
    pub fn is_paused(&self) -> bool {
        self.paused
    }

    /// Whether it could run elsewhere, or later.
    ///
    /// # Errors
    /// Naming the devices that cannot be moved, or the disk of which a flush has failed or that is full.
    pub fn check_movable(&self) -> Result<(), MachineError> {
        self.devices.check_disks()?;
        self.check_room()?;
        Ok(self.passthrough.check_movable(&self.config)?)
    }

    /// Lets the guest run, with all image locks and taps: those that are not held are taken first,
    /// whichever way the machine has come here.
    ///
    /// # Errors
    /// Naming the device that another VM holds; the machine stays paused.
    pub fn resume(&mut self) -> Result<(), MachineError> {
        if self.paused {
            self.take_exclusive()?;
            self.passthrough.run();
            self.devices.resume();
            // A guest that comes from elsewhere knows another, and may have stood through a change.
            self.devices.follow_terminal();
            self.legacy.resume();
            self.vcpus.resume_all();
            self.paused = false;
            // Not before: until then frames for the guest belong where it ran.
            if std::mem::take(&mut self.has_arrived) {
                self.devices.announce();
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
