// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Queries and small requests to a running machine, apart from running and migrating it.
//!
//! Owns no state. Must never stop a vCPU, nor wait for one.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use devices::virtio::DeviceSnapshot;
use devices::virtio::balloon::BalloonHandle;
use devices::virtio::vhost_user::WriteLog;
use hypervisor::VcpuThrottle;
use memory::Collapse;
use pci::{BarDecode, BarDescription, BarKind, Bdf, PciDevice};
use vfio::{DmaLog, PinProgress, VfioPciDevice};

use super::memory_hotplug::MemoryHotplug;
use super::prefault::{Background, PrefaultStatus};
use super::ram;
use super::{Machine, MachineError, ResizeBalloonError, user_devices, vdpas, vhost_users};

/// One PCI function, for `vm.info`.
pub struct FunctionInfo {
    /// Id of the function.
    pub id: String,
    /// Address of the function.
    pub bdf: Bdf,
    /// Whether it is the transport of a virtio device.
    pub is_virtio: bool,
    /// The BARs with their current addresses. Empty for a passed-through function while its configuration
    /// space is being accessed, and for one that is still being opened.
    pub bars: Vec<(BarDescription, u64)>,
}

impl FunctionInfo {
    fn of_virtio(bdf: Bdf, device: &dyn PciDevice) -> Self {
        let bars = placed(device.bars(), &device.bar_decode());
        Self { id: device.id().to_owned(), bdf, is_virtio: true, bars }
    }

    fn of_emulated(bdf: Bdf, device: &dyn PciDevice) -> Self {
        Self { is_virtio: false, ..Self::of_virtio(bdf, device) }
    }

    fn of_passed_through(bdf: Bdf, device: &VfioPciDevice) -> Self {
        let bars = device.bars_if_idle().map(|(bars, decode)| placed(bars, &decode));
        let bars = bars.unwrap_or_default();
        Self { id: device.id().to_owned(), bdf, is_virtio: false, bars }
    }

    fn of_unopened((bdf, id): (Bdf, &str)) -> Self {
        Self { id: id.to_owned(), bdf, is_virtio: false, bars: Vec::new() }
    }
}

fn placed(bars: Vec<BarDescription>, decode: &BarDecode) -> Vec<(BarDescription, u64)> {
    let gpa_of = |bar: &BarDescription| {
        decode.gpas.iter().find(|(index, _)| *index == bar.index).map_or(0, |(_, gpa)| *gpa)
    };
    bars.into_iter().map(|bar| (bar, gpa_of(&bar))).collect()
}

/// What a guest sees of a virtio device, apart from what is saved of it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SeenDevice {
    /// Features that it offers.
    pub features: u64,
    /// The first bytes of its device configuration; zeros beyond its end.
    pub config: Vec<u8>,
    /// Maximum size of each queue.
    pub queue_sizes: Vec<u16>,
}

/// Bytes of a device configuration in [`SeenDevice`]: no device here has a longer one.
const SEEN_CONFIG_BYTES: usize = 64;

/// Which background work on guest memory was stopped for a migration.
#[derive(Clone, Copy, Debug, Default)]
pub struct StoppedMemoryWork {
    populating: bool,
    collapsing: bool,
    filling: bool,
}

impl Machine {
    /// Progress of background prefault; `None` if it is not configured.
    pub fn prefault_status(&self) -> Option<PrefaultStatus> {
        self.prefault.as_ref().map(Background::status)
    }

    /// Stops background work on guest memory for a migration: prefault, collapse to huge pages, and stage-2
    /// prefault. [`Machine::resume_memory_work`] starts it again.
    pub fn stop_memory_work(&mut self) -> StoppedMemoryWork {
        let is_populating = |running: &Background| running.status().end.is_none();
        let populating = self.prefault.as_ref().is_some_and(is_populating);
        if let Some(prefault) = &self.prefault {
            prefault.cancel();
        }
        // What has ended is not begun again: the guest would lose its second-stage tables for nothing.
        let is_collapsing = |collapse: Collapse| !collapse.end().within(Duration::ZERO);
        let collapsing = self.collapse.take().is_some_and(is_collapsing);
        StoppedMemoryWork { populating, collapsing, filling: self.stop_stage2() }
    }

    /// Restarts the work that was stopped, for a guest that has stayed here.
    pub fn resume_memory_work(&mut self, stopped: StoppedMemoryWork) {
        let StoppedMemoryWork { populating, collapsing, filling } = stopped;
        if populating {
            let memory = &self.config.memory;
            let modes = ram::prefault_modes(memory);
            let balloon = self.balloon().cloned();
            self.prefault = Background::start(&self.parts.ram, memory, &modes, balloon);
        }
        if collapsing {
            self.restore_huge_pages();
        }
        if filling {
            self.prefault_stage2();
        }
    }

    /// Starts to collapse received memory into huge pages, where they are configured. All memory must be
    /// resident.
    pub fn restore_huge_pages(&mut self) {
        match Collapse::start(self.parts.ram.regions(), self.config.cpus.boot_vcpus) {
            Ok(collapse) => self.collapse = collapse,
            Err(error) => {
                log::warn!("guest memory is not collapsed into huge pages: no thread: {error}");
            }
        }
    }

    /// Whether the guest has requested a reset or shutdown, or a vCPU has stopped.
    pub fn is_ending(&self) -> bool {
        self.parts.power.is_pending()
    }

    /// Whether a virtio device has a 32-bit BAR, which needs a newer version of the machine state.
    pub fn has_narrow_bars(&self) -> bool {
        let functions = self.parts.devices.functions().iter();
        let mut bars = functions.flat_map(|(_, function)| function.bars());
        bars.any(|bar| bar.kind == BarKind::Memory32)
    }

    /// Whether there are several PCI segments, which need a newer version of the machine state.
    pub fn has_segments(&self) -> bool {
        self.parts.segments.last() > 0
    }

    /// Whether the guest sees an expansion ROM of a passed-through device, which needs a newer version of the machine
    /// state.
    pub fn has_roms(&self) -> bool {
        self.parts.passthrough.devices().iter().any(|(_, device)| device.has_rom())
    }

    /// Whether a passed-through device is shown as an integrated endpoint, which needs a newer version of
    /// the machine state.
    pub fn has_integrated_endpoints(&self) -> bool {
        self.parts.passthrough.devices().iter().any(|(_, device)| device.is_integrated_endpoint())
    }

    /// When the guest's first instruction ran in this process.
    pub fn first_run(&self) -> Option<Instant> {
        self.vcpus.first_run()
    }

    /// When the guest first accessed MMIO in this process.
    pub fn first_mmio(&self) -> Option<Instant> {
        self.parts.space.first_mmio()
    }

    /// Progress of mapping memory for DMA; `None` without passed-through devices.
    pub fn pin_progress(&self) -> Option<PinProgress> {
        self.parts.passthrough.progress()
    }

    /// Whether the machine has passed-through devices.
    pub fn has_passthrough(&self) -> bool {
        !self.parts.passthrough.devices().is_empty()
    }

    /// Estimated length in bytes of the hardware state of the passed-through devices.
    pub fn hardware_state_len_bytes(&self) -> u64 {
        self.parts.passthrough.state_len_bytes()
    }

    /// Everything that keeps the machine from being migrated: all that [`check_movable`](Self::check_movable) refuses, which
    /// names the first.
    pub fn refusals(&self) -> Vec<MachineError> {
        let Self { parts, config, .. } = self;
        let checked = [
            parts.devices.check_disks().map_err(MachineError::from),
            self.check_room().map_err(MachineError::from),
            vhost_users::check_movable(config).map_err(MachineError::from),
            vdpas::check_movable(config).map_err(MachineError::from),
            user_devices::check_movable(config).map_err(MachineError::from),
            parts.devices.check_back_ends().map_err(MachineError::from),
            parts.devices.check_movable().map_err(MachineError::from),
            parts.passthrough.check_movable(config).map_err(MachineError::from),
        ];
        checked.into_iter().filter_map(Result::err).collect()
    }

    /// Whether devices access guest memory that cannot wait for a page which is still to arrive: passed-through ones, and
    /// those that other processes serve over vhost-user.
    pub fn needs_all_pages(&self) -> bool {
        self.has_passthrough() || self.parts.devices.has_vhost_users()
    }

    /// Starts to log the DMA writes of passed-through devices; ends when the logs are dropped.
    pub fn watch_dma(&self) -> Vec<DmaLog> {
        self.parts.passthrough.watch_dma(&self.parts.ram)
    }

    /// The same for what the back ends of vhost-user devices write.
    pub fn watch_back_ends(&self) -> Vec<WriteLog> {
        self.parts.devices.watch_back_ends(&self.parts.ram)
    }

    /// A throttle for the vCPUs; `None`, with a warning, if its thread cannot be started.
    pub fn throttle(&self) -> Option<VcpuThrottle> {
        let throttle = self.vcpus.throttle();
        throttle.inspect_err(|error| log::warn!("vCPUs cannot be throttled: {error}")).ok()
    }

    /// Informs the guest of the current size of its terminal.
    pub fn follow_terminal(&self) {
        self.parts.devices.follow_terminal();
    }

    /// Presses the power button.
    pub fn press_power_button(&self) {
        self.parts.legacy.press_power_button();
    }

    /// Sends a non-maskable interrupt to each vCPU; see [`VcpuThreads::send_nmi`].
    ///
    /// [`VcpuThreads::send_nmi`]: hypervisor::threads::VcpuThreads::send_nmi
    pub fn send_nmi(&self) {
        self.vcpus.send_nmi();
    }

    /// The balloon, if there is one.
    pub fn balloon(&self) -> Option<&BalloonHandle> {
        self.parts.devices.balloon()
    }

    /// Whether the balloon can be resized to `size_bytes`.
    ///
    /// # Errors
    /// As [`Machine::resize_balloon`].
    pub fn check_balloon(&self, size_bytes: u64) -> Result<(), ResizeBalloonError> {
        let (Some(balloon), Some(_)) = (self.parts.devices.balloon(), &self.config.balloon) else {
            return Err(ResizeBalloonError::None);
        };
        Ok(balloon.check(size_bytes)?)
    }

    /// Sets the target size of the balloon, now and after a reboot.
    ///
    /// # Errors
    /// There is no balloon, or the size exceeds guest memory.
    pub fn resize_balloon(&mut self, size_bytes: u64) -> Result<(), ResizeBalloonError> {
        let (Some(balloon), Some(config)) =
            (self.parts.devices.balloon(), &mut self.config.balloon)
        else {
            return Err(ResizeBalloonError::None);
        };
        balloon.resize(size_bytes)?;
        config.size = balloon.target_bytes();
        Ok(())
    }

    /// Counters by device and name; `clock_us` converts an instant to microseconds.
    pub fn counters(
        &self,
        clock_us: impl Fn(Instant) -> u64,
    ) -> BTreeMap<String, BTreeMap<String, u64>> {
        let mut counters = self.parts.devices.counters();
        counters.extend(self.parts.passthrough.counters(clock_us));
        counters
    }

    /// What the guest sees of each virtio device, by id.
    pub fn seen_devices(&self) -> BTreeMap<String, SeenDevice> {
        let functions = self.parts.devices.functions().iter();
        let seen = functions.map(|(_, function)| {
            let seen = function.with_device(|device| {
                let mut config = vec![0; SEEN_CONFIG_BYTES];
                device.read_config(0, &mut config);
                let queue_sizes = device.queue_sizes_max().to_vec();
                SeenDevice { features: device.features(), config, queue_sizes }
            });
            (function.id().to_owned(), seen)
        });
        seen.collect()
    }

    /// The registers of memory devices; `None` if all that is plugged in is one that the guest knows of.
    pub fn memory_devices(&self) -> Option<DeviceSnapshot> {
        self.parts.memory_hotplug.as_ref().and_then(MemoryHotplug::save)
    }

    /// The PCI functions.
    pub fn functions(&self) -> Vec<FunctionInfo> {
        let virtio = self.parts.devices.functions().iter();
        let virtio = virtio.map(|(bdf, device)| FunctionInfo::of_virtio(*bdf, device.as_ref()));
        let passed = self.parts.passthrough.devices().iter();
        let passed = passed.map(|(bdf, device)| FunctionInfo::of_passed_through(*bdf, device));
        let late = self.parts.passthrough.late_devices().map(FunctionInfo::of_unopened);
        let panics = self.parts.panics.iter();
        let panics = panics.map(|(bdf, device)| FunctionInfo::of_emulated(*bdf, device.as_ref()));
        let users = self.parts.user_devices.devices();
        let users = users.map(|(bdf, device)| FunctionInfo::of_passed_through(bdf, device));
        virtio.chain(panics).chain(passed).chain(late).chain(users).collect()
    }
}
