// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A virtio device as a PCI function.
//!
//! Owns the configuration space and routes accesses to the BAR: registers to the transport, the
//! table to MSI-X, notifications straight to eventfds. Holds none of its locks while the
//! transport works, as a reset may take a while. Obeys Bus Master Enable: once a driver has set the bit, the
//! device neither touches guest memory nor sends interrupts while it is clear ([`super::bus_master`]).

use std::sync::Arc;

use devices::virtio::iommu::Endpoint;
use devices::virtio::{PendingPause, VirtioDevice};
use hypervisor::irq::{IoEvents, MsiSource};
use memory::GuestMemoryHandle;
use parking_lot::Mutex;
use thiserror::Error;

use super::bus_master::BusMaster;
use super::identity::identity;
use super::interrupt::PciInterrupt;
use super::layout::{
    BAR_INDEX, BarWidth, Capabilities, Region, VIRTIO_QUEUES_MAX_COUNT, WindowAccess,
};
use super::notify::Notify;
use super::rules::{GODWIT, VirtioPciRules};
use super::state::{VERSION, VIRTIO_PCI_KIND, VirtioPciState, VirtioStateError, needed_version};
use super::transport::{Run, RunningQueues, Transport, offers_version_1};
use crate::bar::{BarDecode, BarDescription};
use crate::config_space::{ConfigError, ConfigSpace, register};
use crate::device::{PciDevice, PciDeviceState, PciStateError};
use crate::msix::{Msix, MsixError};

/// Why a virtio device cannot be a PCI function.
#[derive(Debug, Error)]
pub enum VirtioPciError {
    /// The device type is too large for a PCI device id.
    #[error("virtio device type {device_id} has no PCI device ID")]
    DeviceId {
        /// The device type.
        device_id: u16,
    },
    /// The device does not offer VERSION_1.
    #[error("virtio device {id} does not offer VERSION_1, without which there is no modern device")]
    Legacy {
        /// Id of the device.
        id: String,
    },
    /// The device has too many queues.
    #[error("virtio device {id} has {count} queues; {VIRTIO_QUEUES_MAX_COUNT} are possible")]
    QueueCount {
        /// Id of the device.
        id: String,
        /// Number of queues.
        count: usize,
    },
    /// A queue size is invalid.
    #[error("virtio device {id} has a queue of size {size}; it must be a power of two up to 32768")]
    QueueSize {
        /// Id of the device.
        id: String,
        /// The size.
        size: u16,
    },
    /// Interrupts cannot be set up.
    #[error("cannot set up the interrupts of virtio device {id}")]
    Msix {
        /// Id of the device.
        id: String,
        /// The cause.
        #[source]
        source: MsixError,
    },
    /// An eventfd cannot be created.
    #[error("cannot create the eventfds of virtio device {id}; raise the limit of open files")]
    Eventfd {
        /// Id of the device.
        id: String,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
    /// The configuration space cannot be built.
    #[error("cannot lay out the configuration space of virtio device {id}")]
    Config {
        /// Id of the device.
        id: String,
        /// The cause.
        #[source]
        source: ConfigError,
    },
}

/// What a virtio function looks like.
#[derive(Clone, Copy, Debug)]
pub struct VirtioPciForm {
    /// Width of its BAR.
    pub width: BarWidth,
    /// The rules of its platform.
    pub rules: &'static VirtioPciRules,
}

/// A virtio device with the PCI transport.
pub struct VirtioPciDevice {
    id: String,
    rules: &'static VirtioPciRules,
    config: Mutex<ConfigSpace>,
    capabilities: Capabilities,
    msix: Arc<Msix>,
    interrupt: Arc<PciInterrupt>,
    notify: Arc<Notify>,
    transport: Mutex<Transport>,
}

impl VirtioPciDevice {
    /// Creates a PCI function for `device`, with one MSI-X vector per queue and one for configuration
    /// changes. Its BAR has `width`, unless there is no space for that or a restored state has another.
    pub fn new(
        id: String,
        device: Box<dyn VirtioDevice>,
        width: BarWidth,
        memory: GuestMemoryHandle,
        interrupts: &dyn MsiSource,
        events: Arc<dyn IoEvents>,
    ) -> Result<Self, VirtioPciError> {
        let form = VirtioPciForm { width, rules: &GODWIT };
        Self::with_form(id, device, form, memory, interrupts, events)
    }

    /// Like [`VirtioPciDevice::new`], by the rules of a platform.
    pub fn with_form(
        id: String,
        device: Box<dyn VirtioDevice>,
        VirtioPciForm { width, rules }: VirtioPciForm,
        memory: GuestMemoryHandle,
        interrupts: &dyn MsiSource,
        events: Arc<dyn IoEvents>,
    ) -> Result<Self, VirtioPciError> {
        let device_id = device.device_id();
        let identity = identity(device_id, rules).ok_or(VirtioPciError::DeviceId { device_id })?;
        if !offers_version_1(device.as_ref()) {
            return Err(VirtioPciError::Legacy { id });
        }
        let sizes = device.queue_sizes_max();
        let Some(count) =
            u16::try_from(sizes.len()).ok().filter(|count| *count <= VIRTIO_QUEUES_MAX_COUNT)
        else {
            return Err(VirtioPciError::QueueCount { id, count: sizes.len() });
        };
        if let Some(size) = sizes.iter().copied().find(|size| !size.is_power_of_two()) {
            return Err(VirtioPciError::QueueSize { id, size });
        }
        let msix = match Msix::new(count + 1, interrupts) {
            Ok(msix) => Arc::new(msix),
            Err(source) => return Err(VirtioPciError::Msix { id, source }),
        };
        let doorbells = rules.notify.offset.into();
        let shared = device.shares_kicks();
        let notify = match Notify::new(usize::from(count), events, shared, doorbells) {
            Ok(notify) => Arc::new(notify),
            Err(source) => return Err(VirtioPciError::Eventfd { id, source }),
        };
        let mut config = ConfigSpace::endpoint(&identity);
        config.allow(register::COMMAND, &rules.command_writable.to_le_bytes());
        let capabilities = match Capabilities::add(&mut config, &msix, width, rules, device_id) {
            Ok(capabilities) => capabilities,
            Err(source) => return Err(VirtioPciError::Config { id, source }),
        };
        let interrupt = Arc::new(PciInterrupt::new(Arc::clone(&msix), usize::from(count)));
        let mut transport =
            Transport::new(id.clone(), device, memory, Arc::clone(&interrupt), Arc::clone(&notify));
        transport.bus_master = BusMaster::under(rules.bus_mastering);
        Ok(Self {
            id,
            rules,
            config: Mutex::new(config),
            capabilities,
            msix,
            interrupt,
            notify,
            transport: Mutex::new(transport),
        })
    }

    /// Places the device behind the IOMMU, before any driver has it: the addresses that its driver uses are those of
    /// `endpoint`.
    #[must_use]
    pub fn behind(self, endpoint: Arc<Endpoint>) -> Self {
        self.transport.lock().endpoint = Some(endpoint);
        self
    }

    /// Runs `f` with exclusive access to the device. It must not call back into this.
    pub fn with_device<R>(&self, f: impl FnOnce(&mut dyn VirtioDevice) -> R) -> R {
        f(self.transport.lock().device.as_mut())
    }

    /// Whether the device is activated, also while paused.
    pub fn is_active(&self) -> bool {
        !matches!(self.transport.lock().run, Run::Stopped)
    }

    /// Resets device and transport, as a driver's reset does; waits until the device has ended all accesses
    /// to guest memory.
    pub fn reset(&self) {
        self.transport.lock().reset();
    }

    /// Signals each queue of a device that runs, as a driver does whose notification is lost, and returns them; `None` if it
    /// does not run, or a driver is resetting it.
    pub fn kick_queues(&self) -> Option<RunningQueues> {
        self.transport.try_lock().and_then(|transport| transport.kick_queues())
    }

    /// Starts to pause the device, without waiting for its requests; `None` if a driver is resetting it.
    /// [`VirtioPciDevice::pause`] completes it.
    pub fn begin_pause(&self) -> Option<PendingPause> {
        self.transport.try_lock().map(|mut transport| transport.begin_pause())
    }

    /// Pauses the device. Returns once it no longer accesses guest memory. Idempotent.
    pub fn pause(&self) {
        self.transport.lock().pause();
    }

    /// Resumes the device after [`VirtioPciDevice::pause`], or starts it after
    /// [`VirtioPciDevice::restore`]. Idempotent.
    ///
    /// Each queue is notified and its interrupt raised once, so that no notification or interrupt that was
    /// in flight is lost; spurious ones are harmless. A restored device that cannot be activated requests a
    /// reset by its driver.
    pub fn resume(&self) {
        self.transport.lock().resume();
    }

    /// Saves the state; only while paused or not activated.
    pub fn save(&self) -> Result<VirtioPciState, VirtioStateError> {
        let transport = self.transport.lock();
        let queues = transport.save_queues()?;
        let config = self.config.lock().save();
        Ok(VirtioPciState {
            version: needed_version(&config),
            device_id: transport.device.device_id(),
            config,
            msix: self.msix.save(),
            common: transport.save_common(),
            queues,
            device: transport.device.save(),
        })
    }

    /// Restores a state into a new device, after validating all of it.
    ///
    /// An activated device gets its queues back and is activated by [`VirtioPciDevice::resume`], so that it
    /// cannot write to the memory of a guest that may still resume elsewhere. After an error the transport
    /// is reset, and another state may be restored. BARs move with [`crate::PciSegment::refresh_mappings`].
    pub fn restore(&self, state: &VirtioPciState) -> Result<(), VirtioStateError> {
        let mut transport = self.transport.lock();
        let mut config = self.config.lock();
        // The guest has found a BAR of that width, which depends on the program's version.
        let mut as_saved = config.clone();
        BarWidth::of(&state.config).apply(&mut as_saved)?;
        let restored = as_saved.restored(&state.config)?;
        self.msix.check(&state.msix)?;
        let control = self.capabilities.msix_control(&restored);
        if let Err(error) = transport.restore(state) {
            if !matches!(error, VirtioStateError::InUse { .. }) {
                transport.reset();
            }
            return Err(error);
        }
        let needs_reset = transport.interrupt.is_reset_needed();
        let bus_master = transport.bus_master.restored(restored.bus_master(), needs_reset);
        self.msix.set_bus_master(bus_master.allows());
        if let Err(error) = self.msix.restore(&state.msix, control) {
            transport.reset();
            self.msix.reset();
            self.msix.set_bus_master(transport.bus_master.allows());
            return Err(error.into());
        }
        transport.bus_master = bus_master;
        *config = restored;
        Ok(())
    }

    /// Applies Bus Master Enable to transport and interrupts. Waits for requests in flight, without the
    /// lock of the configuration space.
    fn apply_bus_master(&self) {
        let mut transport = self.transport.lock();
        // The current value: of two concurrent writes by vCPUs the last one counts.
        let bus_master = transport.bus_master.written(self.config.lock().bus_master());
        self.msix.set_bus_master(bus_master.allows());
        transport.set_bus_master(bus_master);
    }

    fn read_window(&self, access: WindowAccess) -> [u8; 4] {
        let mut data = [0; 4];
        self.read_bar(BAR_INDEX, access.bar_offset, &mut data[..access.len_bytes]);
        data
    }
}

impl Drop for VirtioPciDevice {
    fn drop(&mut self) {
        // Ends the device's threads before the memory of its queues is dropped.
        self.reset();
    }
}

impl PciDevice for VirtioPciDevice {
    fn id(&self) -> &str {
        &self.id
    }

    fn kind(&self) -> &'static str {
        VIRTIO_PCI_KIND
    }

    fn read_config(&self, offset: u16, data: &mut [u8]) {
        let access = {
            let config = self.config.lock();
            self.capabilities.window_access(&config, offset, data.len())
        };
        // The lock is free meanwhile: a read of the status register may wait for a long reset.
        let window = access.map(|access| self.read_window(access));
        let mut config = self.config.lock();
        if let Some(window) = window {
            config.put(self.capabilities.window_data_offset(), &window);
        }
        config.read(offset, data);
    }

    fn write_config(&self, offset: u16, data: &[u8]) {
        let (window, is_bus_master_changed) = {
            let mut config = self.config.lock();
            let was_bus_master = config.bus_master();
            config.write(offset, data);
            let is_changed = config.bus_master() != was_bus_master;
            // Under the lock, so that the value of the last writer counts.
            if let Some(control) =
                self.capabilities.written_msix_control(&config, offset, data.len())
            {
                self.msix.set_control(control);
            }
            let window = self.capabilities.window_access(&config, offset, data.len());
            let window = window.map(|access| {
                let data = config.read_u32(self.capabilities.window_data_offset());
                (access, data.to_le_bytes())
            });
            (window, is_changed)
        };
        if is_bus_master_changed {
            self.apply_bus_master();
        }
        if let Some((access, data)) = window {
            self.write_bar(BAR_INDEX, access.bar_offset, &data[..access.len_bytes]);
        }
    }

    fn bars(&self) -> Vec<BarDescription> {
        self.config.lock().bars().collect()
    }

    fn bar_decode(&self) -> BarDecode {
        self.config.lock().bar_decode()
    }

    fn widen_bar(&self, index: u8) -> bool {
        index == BAR_INDEX && BarWidth::Bits64.apply(&mut self.config.lock()).is_ok()
    }

    fn place_bar(&self, index: u8, gpa: u64) {
        self.config.lock().set_bar_gpa(index, gpa);
    }

    fn bar_moved(&self, index: u8, gpa: Option<u64>) {
        if index == BAR_INDEX {
            self.notify.bar_moved(gpa);
        }
    }

    fn read_bar(&self, index: u8, offset: u64, data: &mut [u8]) {
        data.fill(0);
        if index != BAR_INDEX || offset >= self.rules.bar_len_bytes {
            return;
        }
        match Region::at(offset, self.rules) {
            Region::Common(offset) => self.transport.lock().read_common(offset, data),
            Region::Isr(0) => {
                if let Some(isr) = data.first_mut() {
                    *isr = self.interrupt.take_isr();
                }
            }
            Region::Device(offset) => self.transport.lock().read_device_config(offset, data),
            Region::MsixTable(offset) => self.msix.read_table(offset, data),
            Region::MsixPba(offset) => self.msix.read_pba(offset, data),
            Region::Isr(_) | Region::Notify(_) | Region::Hole => {}
        }
    }

    fn write_bar(&self, index: u8, offset: u64, data: &[u8]) {
        if index != BAR_INDEX || offset >= self.rules.bar_len_bytes || data.is_empty() {
            return;
        }
        match Region::at(offset, self.rules) {
            Region::Common(offset) => self.transport.lock().write_common(offset, data),
            Region::Device(offset) => self.transport.lock().device.write_config(offset, data),
            Region::Notify(offset) => self.notify.trapped(offset),
            Region::MsixTable(offset) => self.msix.write_table(offset, data),
            Region::Isr(_) | Region::MsixPba(_) | Region::Hole => {}
        }
    }

    fn pause(&self) {
        Self::pause(self);
    }

    fn resume(&self) {
        Self::resume(self);
    }

    fn save(&self) -> Result<PciDeviceState, PciStateError> {
        let state = Self::save(self).map_err(|source| PciStateError::Device {
            id: self.id.clone(),
            source: source.into(),
        })?;
        PciDeviceState::encode(self, state.version, &state)
    }

    fn restore(&self, state: &PciDeviceState) -> Result<(), PciStateError> {
        let version = state.version;
        let state: VirtioPciState = state.decode(self, VERSION)?;
        if state.version != version {
            let (id, newest) = (self.id.clone(), VERSION);
            return Err(PciStateError::Version { id, found: state.version, newest });
        }
        Self::restore(self, &state)
            .map_err(|source| PciStateError::Device { id: self.id.clone(), source: source.into() })
    }
}
