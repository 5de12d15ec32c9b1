// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Wiring of passed-through devices, and of guest memory into the IOMMU.
//!
//! Owns the devices and the pipeline that maps memory for them, from the moment the devices are open
//! until the machine ends. Tells the event monitor how mapping ended, and takes the devices from the
//! guest if it failed.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Instant;

use arch::acpi::IntxRoute;
use arch::layout;
use hypervisor::irq::IrqError;
use hypervisor::{SlotConfig, Vm};
use memory::{DiscardBan, GuestRam};
use pci::vfio::{
    BarMapping, BarSlots, DmaGate, GuestRamPopulator, IntxLine, PinError, PinProgress, PinState,
    Pinning, Type1Container, VfioError, VfioFunction, VfioPciDevice, VfioWiring,
};
use pci::{Bdf, DeviceNumber, MapError, PciDevice, PciError};
use thiserror::Error;

use super::virtio::Sockets;
use crate::config::{DeviceConfig, PinMode, VmConfig};
use crate::events;

/// Numbers of memory slots from here on are for BARs; those below are for RAM.
const FIRST_BAR_SLOT: u32 = 1024;
/// Lines of the I/O APIC that no fixed device has.
const INTX_LINES: u32 = layout::FIRST_MSI_GSI - layout::FIRST_FREE_GSI;

/// Why a machine lacks a passed-through device.
#[derive(Debug, Error)]
pub enum PassthroughError {
    /// VFIO.
    #[error("cannot pass devices through")]
    Vfio(#[source] VfioError),
    /// One device.
    #[error("cannot pass through '{id}' ({})", path.display())]
    Device {
        /// Its id.
        id: String,
        /// Where it was looked for.
        path: PathBuf,
        /// Why.
        #[source]
        source: VfioError,
    },
    /// Its interrupt line.
    #[error("cannot give '{id}' an interrupt line")]
    Line {
        /// Its id.
        id: String,
        /// Why.
        #[source]
        source: IrqError,
    },
    /// The bus.
    #[error("cannot give '{id}' a place on the PCI bus")]
    Bus {
        /// Its id.
        id: String,
        /// Why.
        #[source]
        source: PciError,
    },
    /// Memory for DMA.
    #[error("cannot make guest memory ready for DMA")]
    Pin(#[from] PinError),
    /// A migration or a snapshot.
    #[error(
        "the VM has passed-through devices ({0}), and the state of their hardware cannot be moved: \
         it can be neither migrated nor saved; start it without them for that"
    )]
    NotMovable(String),
}

/// BARs as memory slots of KVM.
struct KvmBarSlots {
    vm: Vm,
    /// Numbers in use; held for an instant.
    taken: Mutex<BTreeSet<u32>>,
}

impl KvmBarSlots {
    fn take(&self) -> u32 {
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        let free = (FIRST_BAR_SLOT..u32::MAX).find(|number| !taken.contains(number));
        let number = free.unwrap_or(u32::MAX);
        taken.insert(number);
        number
    }

    fn give_back(&self, number: u32) {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner).remove(&number);
    }
}

impl BarSlots for KvmBarSlots {
    fn map(&self, gpa: u64, memory: &Arc<BarMapping>) -> Result<u32, MapError> {
        let slot = self.take();
        let config = SlotConfig {
            slot,
            gpa,
            hva: memory.host_addr(),
            len_bytes: memory.len_bytes(),
            log_dirty: false,
            readonly: false,
        };
        // SAFETY: the mapping is `len_bytes` long and stays until it is dropped, of which the slot
        // holds a share; nothing in this process reads or writes it.
        let made = unsafe { self.vm.set_memory_slot(config, Arc::<BarMapping>::clone(memory)) };
        made.map_err(|error| {
            self.give_back(slot);
            MapError { source: Box::new(error) }
        })?;
        Ok(slot)
    }

    fn unmap(&self, slot: u32) -> Result<(), MapError> {
        self.vm.remove_memory_slot(slot).map_err(|error| MapError { source: Box::new(error) })?;
        self.give_back(slot);
        Ok(())
    }
}

/// What all devices of a machine share.
struct Shared<'a> {
    sockets: &'a Sockets<'a>,
    container: &'a Type1Container,
    slots: Arc<KvmBarSlots>,
    gate: Arc<DmaGate>,
}

/// The passed-through devices of one machine.
#[derive(Default)]
pub struct Passthrough {
    /// First, so that nothing is mapped any more when the devices go.
    pinning: Option<Pinning>,
    /// Where memory will be mapped, until that begins.
    target: Option<(Type1Container, Arc<DmaGate>)>,
    devices: Vec<(Bdf, Arc<VfioPciDevice>)>,
    routes: Vec<IntxRoute>,
    strict: bool,
    /// Last: what devices may write stays theirs until they are gone.
    _ban: Option<DiscardBan>,
}

impl Passthrough {
    /// Refuses what would move a machine with passed-through devices.
    ///
    /// # Errors
    /// Naming the devices.
    pub fn refuse_move(config: &VmConfig) -> Result<(), PassthroughError> {
        let ids: Vec<_> =
            config.devices.iter().flatten().filter_map(|device| device.id.as_deref()).collect();
        if ids.is_empty() { Ok(()) } else { Err(PassthroughError::NotMovable(ids.join(", "))) }
    }

    /// With passed-through devices no memory is given back to the host: they would go on writing
    /// pages that the guest no longer has. To be called before a balloon is made, which then does
    /// not offer what would not work.
    pub fn ban_discards(config: &VmConfig, ram: &GuestRam) -> Option<DiscardBan> {
        let has_devices = config.devices.as_ref().is_some_and(|devices| !devices.is_empty());
        has_devices.then(|| ram.ban_discards("passed-through devices may write all guest memory"))
    }

    /// Opens the devices and puts them on the bus.
    ///
    /// # Errors
    /// Naming the device.
    pub fn wire(
        config: &VmConfig,
        sockets: &Sockets<'_>,
        ram: &Arc<GuestRam>,
        ban: Option<DiscardBan>,
    ) -> Result<Self, PassthroughError> {
        let mut this = Self { _ban: ban, ..Self::default() };
        let Some(configs) = config.devices.as_ref().filter(|devices| !devices.is_empty()) else {
            return Ok(this);
        };
        let container =
            Type1Container::new(sockets.vm, Arc::clone(ram)).map_err(PassthroughError::Vfio)?;
        let gate = Arc::new(DmaGate::default());
        let slots = Arc::new(KvmBarSlots { vm: sockets.vm.clone(), taken: Mutex::default() });
        let shared = Shared { sockets, container: &container, slots, gate: Arc::clone(&gate) };
        for (index, config) in (0_u32..).zip(configs) {
            this.plug(config, index, &shared)?;
        }
        this.strict = configs.iter().any(|device| device.pin == PinMode::Strict);
        this.target = Some((container, gate));
        Ok(this)
    }

    fn plug(
        &mut self,
        config: &DeviceConfig,
        index: u32,
        shared: &Shared<'_>,
    ) -> Result<(), PassthroughError> {
        let Shared { sockets, container, slots, gate } = shared;
        let id = config.id.clone().unwrap_or_default();
        let path = config.path.clone().unwrap_or_default();
        let failed =
            |source| PassthroughError::Device { id: id.clone(), path: path.clone(), source };
        let function = VfioFunction::open(&id, &path, container).map_err(failed)?;
        let gsi = layout::FIRST_FREE_GSI + index % INTX_LINES;
        let line = sockets
            .vm
            .create_level_line(gsi)
            .map_err(|source| PassthroughError::Line { id: id.clone(), source })?;
        let trapped = config.x_exclude_mmap_bars.iter();
        let wiring = VfioWiring {
            msi_source: sockets.vm,
            slots: slots.clone(),
            gate: Arc::clone(gate),
            intx: Some(Box::new(line) as Box<dyn IntxLine>),
            trapped_bars: trapped.filter_map(|bar| u8::try_from(*bar).ok()).collect(),
        };
        let device = VfioPciDevice::new(id.clone(), Arc::new(function), wiring).map_err(failed)?;
        let device = Arc::new(device);
        let on_bus: Arc<dyn PciDevice> = device.clone();
        let number = config.pci_device_id.and_then(|number| DeviceNumber::new(number).ok());
        let bdf = sockets
            .segment
            .add_device(&on_bus, number)
            .map_err(|source| PassthroughError::Bus { id, source })?;
        self.routes.push(IntxRoute { device: bdf.device(), pin: 0, gsi });
        self.devices.push((bdf, device));
        Ok(())
    }

    /// Begins to map memory, and waits for it if a device asks for that. Comes last before the vCPUs
    /// are started: what happens before would have to share the processors and the process's memory
    /// map with the threads that populate.
    ///
    /// # Errors
    /// A limit that is too low, or memory cannot be mapped.
    pub fn map_memory(&mut self, ram: &Arc<GuestRam>) -> Result<(), PassthroughError> {
        let Some((container, gate)) = self.target.take() else { return Ok(()) };
        let populator = Arc::new(GuestRamPopulator(Arc::clone(ram)));
        let total_bytes = ram.total_bytes();
        let devices: Vec<_> =
            self.devices.iter().map(|(_, device)| Arc::downgrade(device)).collect();
        let on_end = Box::new(move |state: &PinState| tell(state, total_bytes, &devices));
        let mut pinning = Pinning::start(Arc::new(container), populator, gate, on_end)?;
        if self.strict {
            pinning.wait()?;
        }
        self.pinning = Some(pinning);
        Ok(())
    }

    /// Lets every vCPU go that waits for memory.
    pub fn cancel(&self) {
        if let Some(pinning) = &self.pinning {
            pinning.cancel();
        }
    }

    /// How far memory is; `None` without devices.
    pub fn progress(&self) -> Option<PinProgress> {
        self.pinning.as_ref().map(Pinning::progress)
    }

    /// The devices and where they sit.
    pub fn devices(&self) -> &[(Bdf, Arc<VfioPciDevice>)] {
        &self.devices
    }

    /// Lines of the devices' interrupt pins.
    pub fn routes(&self) -> &[IntxRoute] {
        &self.routes
    }

    /// When each device's driver asked for DMA, and how long it waited, in microseconds.
    pub fn counters(
        &self,
        clock_us: impl Fn(Instant) -> u64,
    ) -> BTreeMap<String, BTreeMap<String, u64>> {
        let of_device = |device: &VfioPciDevice| {
            let times = device.bus_master_times();
            let mut counters = BTreeMap::new();
            if let Some(asked) = times.asked {
                counters.insert("bus_master_asked_monotonic_us".to_owned(), clock_us(asked));
            }
            if let (Some(asked), Some(granted)) = (times.asked, times.granted) {
                let waited = granted.saturating_duration_since(asked).as_micros();
                let waited = u64::try_from(waited).unwrap_or(u64::MAX);
                counters.insert("bus_master_waited_us".to_owned(), waited);
            }
            counters.insert("lost".to_owned(), u64::from(device.is_lost()));
            counters
        };
        self.devices.iter().map(|(_, device)| (device.id().to_owned(), of_device(device))).collect()
    }
}

/// Tells how mapping ended, and takes the devices from the guest if it failed.
fn tell(state: &PinState, total_bytes: u64, devices: &[Weak<VfioPciDevice>]) {
    let bytes = total_bytes.to_string();
    match state {
        PinState::Pinning => {}
        PinState::Pinned(took) => {
            let took_ms = took.as_millis().to_string();
            log::info!(
                "{} MiB of guest memory are mapped for DMA after {took_ms} ms",
                total_bytes >> 20
            );
            events::emit("vm", "passthrough-pinned", &[("bytes", &bytes), ("took_ms", &took_ms)]);
        }
        PinState::Failed(reason) => {
            log::error!("passed-through devices are taken from the guest: {reason}");
            events::emit("vm", "passthrough-failed", &[("error", reason)]);
            for device in devices.iter().filter_map(Weak::upgrade) {
                device.lose();
                events::emit("vm", "passthrough-device-lost", &[("id", device.id())]);
            }
        }
    }
}
