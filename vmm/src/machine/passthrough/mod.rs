// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Wiring of passed-through devices, and of guest memory into the IOMMU.
//!
//! Owns the devices and the pipeline that maps memory for them, from the moment the devices are open
//! until the machine ends.
//!
//! | module | owns |
//! | --- | --- |
//! | `adding` | devices that come and go while the machine is there |
//! | `announcing` | devices that the guest does not see before memory is mapped |
//! | `opening` | threads that open devices while the guest runs |
//! | `starting` | devices that the start of the guest waits for |
//! | `late` | devices that it does not wait for any longer |
//! | `hung` | devices that hang in a call, at the end of the machine |
//! | `forecast` | devices that it was to wait for shortly, if that takes long |
//! | `openers` | threads that open a device which nothing waits for any more |
//! | `mapping` | when memory is mapped, and who waits for that |
//! | `backend` | VFIO container or iommufd |
//! | `counters` | times and states of the devices, for `vm.counters` |
//! | `kept` | what stays mapped while the guest reboots |
//! | `prepinned` | memory from a pool that is mapped for the device already |
//! | `slots` | BARs as memory slots of KVM |
//! | `populating` | memory that is populated while devices are opened |
//! | `outcome` | what follows when memory is mapped, or cannot be |
//! | `reach` | guest memory at addresses that the IOMMU can map |
//! | `device_events` | error and request interrupts of the host |
//! | `migration` | which devices can be migrated |
//! | `stopping` | their part in a pause |
//! | `streaming` | states of devices that are sent as bytes |
//! | `turns` | calls for devices that may never return |

mod adding;
mod announcing;
mod backend;
mod counters;
mod device_events;
mod error;
mod forecast;
mod hung;
mod kept;
mod late;
mod mapping;
mod migration;
mod openers;
mod opening;
mod outcome;
mod populating;
mod prepinned;
mod reach;
mod slots;
mod starting;
mod stopping;
mod streaming;
mod turns;

use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock, Weak};
use std::time::Instant;

use arch::acpi::IntxRoute;
use arch::layout;
use hypervisor::Standstill;
use memory::{DiscardBan, GuestRam};
use pci::{Bdf, DEVICES_PER_BUS_COUNT, DeviceNumber, PciDevice};
use prezero_pool_client::PoolConnection;
use vfio::{
    DeviceEvents, DmaGate, DmaSpace, HostFunction, IntxLine, P2pBars, Pinning, SpaceHold,
    VfioError, VfioPciDevice, VfioWiring,
};

use super::events::EventSink;
use super::pausing::CancelToken;
use super::prefault::pin_threads;
use super::virtio::PciContext;
use crate::config::{DeviceConfig, PinMode, VmConfig};
use announcing::Withheld;
use backend::Backend;
use error::no_device;
use forecast::Watched;
use openers::{Abandoned, OpenerEnd, OpenerPlace};
use opening::{Opened, PendingDevice, report_opened};
use outcome::{SharedDeviceList, read};
use populating::EarlyPopulating;
use starting::ArrivedDevice;

pub use announcing::{WaitsFor, WithheldStatus};
pub use backend::Backend as IommuBackend;
pub use error::PassthroughError;
pub use kept::{KeptDma, KeptDmaSlot};
pub use migration::check_config;
pub use openers::LeftOpenings;
pub use opening::{Opening, check_ahead};
pub use outcome::DiscardingDevices;
pub use prepinned::{PrepinnedSlot, SlotAnswer};
pub use reach::choose_high_hole;
pub use slots::KvmBarSlots;
pub use starting::DeviceStart;
pub use streaming::{DeviceStateReader, StateApart};
pub use turns::{CallLimits, Patience};

/// Number of I/O APIC lines that no fixed device uses.
const INTX_LINES: u32 = layout::FIRST_MSI_GSI - layout::FIRST_FREE_GSI;

/// The passed-through devices of a machine.
pub struct Passthrough {
    /// Handles device events; created with the first device.
    notices: Option<DeviceEvents>,
    sink: EventSink,
    /// Populates memory until [`Passthrough::map_memory`] does.
    early: Option<EarlyPopulating>,
    /// Declared before the devices, so that mapping has ended when they are closed.
    pinning: Option<Pinning>,
    devices: Vec<(Bdf, Arc<VfioPciDevice>)>,
    /// Where each device is on the host, also of one that was removed and is still open.
    places: Vec<(OpenerPlace, Weak<VfioPciDevice>)>,
    /// When each device was open, by id.
    opened: BTreeMap<String, Instant>,
    /// Devices that are being opened, for which the start of the guest waits.
    pending: Vec<PendingDevice>,
    /// Devices that are open, and that the start of the guest has not put on the bus yet.
    arrived: Vec<ArrivedDevice>,
    /// Devices that are being opened, and without which the guest runs.
    late: Vec<PendingDevice>,
    /// Devices that could not be used when they came late, and without which the guest goes on.
    unopened: Vec<(Bdf, String)>,
    device_list: SharedDeviceList,
    /// Gate that device access waits at; replaced once the last device has been removed.
    gate: Arc<DmaGate>,
    backend: Backend,
    /// Created for the first device and kept: KVM is told of VFIO only once.
    space: Option<Arc<dyn DmaSpace>>,
    /// What has kept memory mapped over a reboot, until all devices are open.
    hold: Option<SpaceHold>,
    /// The devices that are configured, by path.
    expected: Vec<PathBuf>,
    slots: Option<Arc<KvmBarSlots>>,
    /// Memory mapped in advance by a pool, until [`Passthrough::map_memory`] takes it.
    prepinned: Option<PrepinnedSlot>,
    /// Memory that has stayed mapped over a reboot, until [`Passthrough::map_memory`] takes it.
    kept: Option<KeptDma>,
    /// Where to leave what stays mapped for the next boot, if the guest is to reboot.
    leaves_to: Option<KeptDmaSlot>,
    /// Devices that the guest does not see yet.
    withheld: Withheld,
    /// Devices that it may see before memory is mapped.
    watched: Watched,
    /// Informs the guest of waits at the gate, once it has vCPUs.
    standstill: Arc<OnceLock<Standstill>>,
    /// Devices removed while they were being opened, until they are closed.
    withdrawn: Vec<Abandoned>,
    /// The same of machines that have ended.
    left: LeftOpenings,
    /// Whether devices are to reach each other's BARs by DMA.
    needs_p2p: bool,
    /// BARs mapped for p2p; replaced like the gate.
    peers: Option<Arc<P2pBars>>,
    /// Number of threads that populate and pin memory, if configured.
    threads: Option<NonZeroUsize>,
    /// Whether a device requires all memory to be mapped before the guest resumes.
    strict: bool,
    /// The guest arrives from elsewhere: [`Self::await_memory`] waits for memory.
    arrives: bool,
    /// Declared last: pages that devices may write are not discarded until the devices are closed or the
    /// ban is lifted.
    ban: Option<Arc<DiscardBan>>,
}

/// The I/O APIC line for the interrupt pin of a device.
pub fn line_of(number: DeviceNumber) -> u32 {
    layout::FIRST_FREE_GSI + u32::from(number.get()) % INTX_LINES
}

/// I/O APIC lines from `first_gsi` on for the interrupt pins of all possible devices of a segment, the same in each.
pub fn routes(first_gsi: u32) -> Vec<IntxRoute> {
    (1..DEVICES_PER_BUS_COUNT)
        .filter_map(|number| DeviceNumber::new(number).ok())
        .map(|number| {
            let gsi = first_gsi + u32::from(number.get()) % INTX_LINES;
            IntxRoute { device: number.get(), pin: 0, gsi }
        })
        .collect()
}

/// When a device that is placed on the bus responds there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Showing {
    AtOnce,
    /// Once memory is mapped.
    Later,
}

/// How the configured devices are opened.
pub struct OpenInput<'a> {
    /// When they are opened.
    pub opening: Opening,
    /// The slot that a pool has prepared for one of the devices.
    pub slot: Option<PrepinnedSlot>,
    /// What has stayed mapped of this memory since the guest ran before its reboot.
    pub kept: Option<KeptDma>,
    /// What earlier machines of this process may still be opening.
    pub left: LeftOpenings,
    /// The pool that leaves the devices alone while this is open.
    pub pool: Option<Arc<PoolConnection>>,
    /// Ends every wait for a device or for memory.
    pub cancel: &'a CancelToken,
}

impl Passthrough {
    /// With passed-through devices no memory is discarded: they would keep writing to pages that the guest
    /// no longer has. Must be called before a balloon is created, which then does not offer features that
    /// depend on discarding.
    pub fn ban_discards(config: &VmConfig, ram: &GuestRam) -> Option<DiscardBan> {
        let has_devices = config.devices.as_ref().is_some_and(|devices| !devices.is_empty());
        has_devices.then(|| ban(ram))
    }

    /// Opens the devices and places them on the bus, or starts to; [`Passthrough::receive_opened`] goes on then.
    ///
    /// # Errors
    /// Names the device.
    pub fn wire(
        config: &VmConfig,
        context: &PciContext<'_>,
        ban: Option<DiscardBan>,
        sink: EventSink,
        OpenInput { opening, slot, kept, left, pool, cancel }: OpenInput<'_>,
    ) -> Result<Self, PassthroughError> {
        let standstill = Arc::default();
        let mut this = Self {
            notices: None,
            gate: new_gate(&standstill),
            standstill,
            withheld: Withheld::default(),
            watched: Watched::default(),
            sink,
            early: None,
            pinning: None,
            devices: Vec::new(),
            places: Vec::new(),
            opened: BTreeMap::new(),
            pending: Vec::new(),
            arrived: Vec::new(),
            late: Vec::new(),
            unopened: Vec::new(),
            device_list: SharedDeviceList::default(),
            backend: Backend::of(config),
            space: None,
            hold: None,
            expected: paths_of(config),
            slots: None,
            prepinned: slot,
            kept,
            leaves_to: None,
            withdrawn: Vec::new(),
            left,
            needs_p2p: config.platform.as_ref().is_none_or(|platform| platform.vfio_p2p_dma),
            peers: None,
            threads: pin_threads(&config.memory),
            strict: false,
            arrives: false,
            ban: ban.map(Arc::new),
        };
        let overlaps = opening.overlaps(config);
        if overlaps {
            let standstill = Arc::clone(&this.standstill);
            let report: Arc<dyn Fn() + Send + Sync> = Arc::new(move || report(&standstill));
            context.segments.report_waits(&report);
        }
        if !overlaps && opening == Opening::Meanwhile {
            // All memory is to be mapped before the first instruction.
            this.populate_early(&config.memory, context.ram, false);
        }
        this.attach_that_of_slot(config.devices.as_deref().unwrap_or_default(), context);
        for config in config.devices.iter().flatten() {
            if opening == Opening::Before {
                this.refuse_left(config, config.id.as_deref().unwrap_or_default())?;
            }
            if overlaps {
                this.expect(config, context, pool.clone())?;
            } else {
                this.plug(config, context, Showing::AtOnce, cancel)?;
            }
        }
        Ok(this)
    }

    /// Opens a device and places it on the bus.
    fn plug(
        &mut self,
        config: &DeviceConfig,
        context: &PciContext<'_>,
        showing: Showing,
        cancel: &CancelToken,
    ) -> Result<Bdf, PassthroughError> {
        let id = config.id.clone().unwrap_or_default();
        let bus = |source| PassthroughError::Bus { id: id.clone(), source };
        let segment = context.segments.get(config.pci_segment).map_err(bus)?;
        let requested = config.pci_device_id.and_then(|number| DeviceNumber::new(number).ok());
        let number = segment.choose(requested, &id).map_err(|source| bus(source.into()))?;
        let device = self.open(config, &id, number, context, cancel);
        let added = device.and_then(|(device, at)| {
            let on_bus: Arc<dyn PciDevice> = device.clone();
            if showing == Showing::Later {
                segment.hide(number);
            }
            let bdf = segment.add_device(&on_bus, Some(number)).map_err(|source| {
                bus(context.segments.explain(segment.segment(), on_bus.as_ref(), source))
            })?;
            Ok((bdf, device, at))
        });
        let (bdf, device, at) = added.inspect_err(|_| segment.release(number))?;
        self.keep(config, bdf, device, at);
        if showing == Showing::Later {
            self.withheld.add(bdf);
        }
        Ok(bdf)
    }

    fn open(
        &mut self,
        config: &DeviceConfig,
        id: &str,
        number: DeviceNumber,
        context: &PciContext<'_>,
        cancel: &CancelToken,
    ) -> Result<(Arc<VfioPciDevice>, Instant), PassthroughError> {
        self.refuse_withdrawn(config, id)?;
        let open = self.opener(config, id, context)?;
        // Held by the thread that opens the device, also after the addition was cancelled.
        let end = OpenerEnd::default();
        let mark = end.mark();
        self.withdrawn.retain(Abandoned::is_in_use);
        self.withdrawn.push(Abandoned { place: OpenerPlace::of(config), end });
        let token = cancel.clone();
        let open = move || (open(&token), mark);
        let opened = self.open_unless_cancelled(open, cancel);
        let what = "start the thread that opens it";
        let opened = opened.map_err(|source| VfioError::Io { what, source }).transpose();
        let opened = opened.ok_or(PassthroughError::Cancelled)?.flatten();
        let opened = opened.map_err(|source| no_device(config, id, source))?;
        report_opened(id, &opened);
        let Opened { function, at, .. } = opened;
        Ok((self.make_device(function, config, id, number, context)?, at))
    }

    fn keep(&mut self, config: &DeviceConfig, bdf: Bdf, device: Arc<VfioPciDevice>, at: Instant) {
        self.opened.insert(device.id().to_owned(), at);
        self.strict |= config.pin == PinMode::Strict;
        self.places.retain(|(_, device)| device.strong_count() > 0);
        self.places.push((OpenerPlace::of(config), Arc::downgrade(&device)));
        read(&self.device_list).devices.push(Arc::downgrade(&device));
        self.listen_to(&device);
        self.devices.push((bdf, device));
    }

    /// Registers for the events of a device. A device without events can be used all the same.
    fn listen_to(&mut self, device: &VfioPciDevice) {
        let id = device.id();
        if self.notices.is_none() {
            let for_thread = (Arc::clone(&self.device_list), Arc::clone(&self.sink));
            let listen = || device_events::listen(for_thread.0.clone(), for_thread.1.clone());
            match listen().or_else(|error| self.with_room(error, listen)) {
                Ok(notices) => self.notices = Some(notices),
                Err(error) => {
                    log::warn!("a failure of device '{id}' will not be reported: {error}");
                }
            }
        }
        if let Some(notices) = &self.notices
            && let Err(error) = device.report_to(notices)
        {
            log::warn!("a failure of device '{id}' will not be reported: {error}");
        }
    }

    fn space(&mut self, context: &PciContext<'_>) -> Result<Arc<dyn DmaSpace>, PassthroughError> {
        if let Some(space) = &self.space {
            return Ok(Arc::clone(space));
        }
        let space = match (&self.kept, &mut self.prepinned) {
            (Some(kept), _) => kept.space(context),
            (None, Some(slot)) => slot.space(context),
            (None, None) => self.backend.new_space(context),
        };
        let space = space.map_err(PassthroughError::Vfio)?;
        space.expect(&std::mem::take(&mut self.expected));
        Ok(Arc::clone(self.space.insert(space)))
    }

    fn peers(&mut self, space: &Arc<dyn DmaSpace>) -> Option<Arc<P2pBars>> {
        if self.peers.is_none() && self.needs_p2p {
            self.peers = Arc::clone(space).peer_target().map(P2pBars::new);
        }
        self.peers.clone()
    }

    /// Creates a device from an open function.
    fn make_device(
        &mut self,
        function: Arc<dyn HostFunction>,
        config: &DeviceConfig,
        id: &str,
        number: DeviceNumber,
        context: &PciContext<'_>,
    ) -> Result<Arc<VfioPciDevice>, PassthroughError> {
        let space = self.space(context)?;
        let peers = self.peers(&space);
        let slots =
            self.slots.get_or_insert_with(|| Arc::new(KvmBarSlots::new(context.vm.clone())));
        let line = context
            .vm
            .create_level_line(line_of(number))
            .map_err(|source| PassthroughError::Line { id: id.to_owned(), source })?;
        let trapped = config.x_exclude_mmap_bars.iter();
        let wiring = VfioWiring {
            msi_source: context.vm,
            slots: slots.clone(),
            gate: Arc::clone(&self.gate),
            intx: Some(Box::new(line) as Box<dyn IntxLine>),
            trapped_bars: trapped.filter_map(|bar| u8::try_from(*bar).ok()).collect(),
            has_ports: config.pci_segment == 0,
            gpudirect_clique: config.x_nv_gpudirect_clique,
            peers,
        };
        let device = VfioPciDevice::new(id.to_owned(), function, wiring);
        device.map(Arc::new).map_err(|source| no_device(config, id, source))
    }

    /// Has waits at the gate reported to the guest by its vCPUs.
    pub fn report_waits(&self, standstill: Standstill) {
        // There is one set of vCPUs a machine.
        let _ = self.standstill.set(standstill);
    }

    /// The device at this address.
    pub fn at(&self, bdf: Bdf) -> Option<&Arc<VfioPciDevice>> {
        self.devices.iter().find(|(at, _)| *at == bdf).map(|(_, device)| device)
    }

    /// The devices with their addresses.
    pub fn devices(&self) -> &[(Bdf, Arc<VfioPciDevice>)] {
        &self.devices
    }
}

/// Where the configured devices are that were given by path.
fn paths_of(config: &VmConfig) -> Vec<PathBuf> {
    let devices = config.devices.iter().flatten().filter(|device| device.fd.is_none());
    devices.filter_map(|device| device.path.clone()).collect()
}

/// A gate that reports each wait of a vCPU, during which the guest's clock went on.
fn new_gate(standstill: &Arc<OnceLock<Standstill>>) -> Arc<DmaGate> {
    let standstill = Arc::clone(standstill);
    Arc::new(DmaGate::reporting(Box::new(move || report(&standstill))))
}

/// Reports that a vCPU has waited, once there are vCPUs.
fn report(standstill: &OnceLock<Standstill>) {
    if let Some(standstill) = standstill.get() {
        standstill.report();
    }
}

fn ban(ram: &GuestRam) -> DiscardBan {
    ram.ban_discards("passed-through devices may write all guest memory")
}
