// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A virtio device as a PCI function.
//!
//! Owns the configuration space and routes accesses to the BAR: registers to the transport, the
//! table to MSI-X, notifications straight to eventfds. Holds none of its locks while the
//! transport works, as a reset may take a while. Obeys Bus Master Enable: once a driver has set the bit, the
//! device neither touches guest memory nor sends interrupts while it is clear ([`super::bus_master`]).

use std::sync::Arc;

use devices::virtio::{PendingPause, VirtioDevice};
use hypervisor::irq::{IoEvents, MsiSource};
use memory::GuestMemoryHandle;
use parking_lot::Mutex;
use thiserror::Error;

use super::bus_master::BusMaster;
use super::identity::identity;
use super::interrupt::PciInterrupt;
use super::layout::{
    BAR_INDEX, BAR_LEN_BYTES, BarWidth, Capabilities, Region, VIRTIO_QUEUES_MAX_COUNT, WindowAccess,
};
use super::notify::Notify;
use super::state::{VERSION, VIRTIO_PCI_KIND, VirtioPciState, VirtioStateError, needed_version};
use super::transport::{Run, Transport, offers_version_1};
use crate::bar::{BarDecode, BarDescription};
use crate::config_space::{ConfigError, ConfigSpace};
use crate::device::{PciDevice, PciDeviceState, PciStateError};
use crate::msix::{Msix, MsixError};

/// Why a virtio device could not become a PCI function.
#[derive(Debug, Error)]
pub enum VirtioPciError {
    /// Its type does not fit into a PCI device ID.
    #[error("virtio device type {device_id} has no PCI device ID")]
    DeviceId {
        /// The type.
        device_id: u16,
    },
    /// It does not offer VERSION_1.
    #[error("virtio device {id} does not offer VERSION_1, without which there is no modern device")]
    Legacy {
        /// Its id.
        id: String,
    },
    /// It has too many queues.
    #[error("virtio device {id} has {count} queues; {VIRTIO_QUEUES_MAX_COUNT} are possible")]
    QueueCount {
        /// Its id.
        id: String,
        /// Number of queues.
        count: usize,
    },
    /// A queue size cannot be.
    #[error("virtio device {id} has a queue of size {size}; it must be a power of two up to 32768")]
    QueueSize {
        /// Its id.
        id: String,
        /// The size.
        size: u16,
    },
    /// Interrupts could not be set up.
    #[error("cannot set up the interrupts of virtio device {id}")]
    Msix {
        /// Its id.
        id: String,
        /// The reason.
        #[source]
        source: MsixError,
    },
    /// The host gives no eventfd.
    #[error("cannot create the eventfds of virtio device {id}; raise the limit of open files")]
    Eventfd {
        /// Its id.
        id: String,
        /// The host's answer.
        #[source]
        source: std::io::Error,
    },
    /// The configuration space could not be laid out.
    #[error("cannot lay out the configuration space of virtio device {id}")]
    Config {
        /// Its id.
        id: String,
        /// The reason.
        #[source]
        source: ConfigError,
    },
}

/// A virtio device on the PCI bus.
pub struct VirtioPciDevice {
    id: String,
    config: Mutex<ConfigSpace>,
    capabilities: Capabilities,
    msix: Arc<Msix>,
    interrupt: Arc<PciInterrupt>,
    notify: Arc<Notify>,
    transport: Mutex<Transport>,
}

impl VirtioPciDevice {
    /// Makes a PCI function of `device`, with one MSI-X vector for each queue and one for the
    /// configuration. Its BAR has `width`, unless there is no room for that or a saved state says
    /// otherwise.
    pub fn new(
        id: String,
        device: Box<dyn VirtioDevice>,
        width: BarWidth,
        memory: GuestMemoryHandle,
        interrupts: &dyn MsiSource,
        events: Arc<dyn IoEvents>,
    ) -> Result<Self, VirtioPciError> {
        let device_id = device.device_id();
        let identity = identity(device_id).ok_or(VirtioPciError::DeviceId { device_id })?;
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
        let notify = match Notify::new(usize::from(count), events) {
            Ok(notify) => Arc::new(notify),
            Err(source) => return Err(VirtioPciError::Eventfd { id, source }),
        };
        let mut config = ConfigSpace::endpoint(&identity);
        let capabilities = match Capabilities::add(&mut config, &msix, width) {
            Ok(capabilities) => capabilities,
            Err(source) => return Err(VirtioPciError::Config { id, source }),
        };
        let interrupt = Arc::new(PciInterrupt::new(Arc::clone(&msix), usize::from(count)));
        let transport =
            Transport::new(id.clone(), device, memory, Arc::clone(&interrupt), Arc::clone(&notify));
        Ok(Self {
            id,
            config: Mutex::new(config),
            capabilities,
            msix,
            interrupt,
            notify,
            transport: Mutex::new(transport),
        })
    }

    /// Runs `f` on the device, while no one else is in it. It must not call back into this.
    pub fn with_device<R>(&self, f: impl FnOnce(&mut dyn VirtioDevice) -> R) -> R {
        f(self.transport.lock().device.as_mut())
    }

    /// Whether the device works on its queues, or would if it were not paused.
    pub fn is_active(&self) -> bool {
        !matches!(self.transport.lock().run, Run::Stopped)
    }

    /// Stops the device and forgets all driver state, as a driver's reset does; waits until it
    /// touches guest memory no more.
    pub fn reset(&self) {
        self.transport.lock().reset();
    }

    /// Tells the device to hold still, without waiting for it or for a driver that has it reset now:
    /// `None` then. [`VirtioPciDevice::pause`] waits for the rest.
    pub fn begin_pause(&self) -> Option<PendingPause> {
        self.transport.try_lock().map(|mut transport| transport.begin_pause())
    }

    /// Makes the device hold still. Returns when it touches guest memory no more. Idempotent.
    pub fn pause(&self) {
        self.transport.lock().pause();
    }

    /// Lets the device continue after [`VirtioPciDevice::pause`], or start after
    /// [`VirtioPciDevice::restore`]. Idempotent.
    ///
    /// Every queue is kicked and every queue interrupt raised once, so that no notification and no
    /// interrupt that was under way when the VM stopped is lost; drivers and devices find out for
    /// themselves that there is nothing to do. A restored device that cannot be activated asks
    /// its driver for a reset.
    pub fn resume(&self) {
        self.transport.lock().resume();
    }

    /// The state to save; only while paused or not active.
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

    /// Takes a saved state, after checking all of it; a new device only.
    ///
    /// An active device gets its queues back and is activated by [`VirtioPciDevice::resume`], so
    /// that it cannot write to a guest that may yet continue elsewhere. After an error the
    /// transport is as after a reset, and another state may be restored. BARs move when the segment
    /// is told ([`crate::PciSegment::refresh_mappings`]).
    pub fn restore(&self, state: &VirtioPciState) -> Result<(), VirtioStateError> {
        let mut transport = self.transport.lock();
        let mut config = self.config.lock();
        // The guest has found a BAR of that width; programs differ in which they give.
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
        let bus_master = BusMaster::restored(restored.bus_master(), needs_reset);
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

    /// Makes transport and interrupts obey Bus Master Enable. Waits for what the device has in
    /// flight, without the lock of the configuration space.
    fn apply_bus_master(&self) {
        let mut transport = self.transport.lock();
        // As it is now: of two vCPUs that write it at a time the last one counts.
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
        // Ends the device's threads before its queues' memory goes.
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
        // The lock is free meanwhile: what is read may be a status register behind a long reset.
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
            // Under the lock, so that the last writer's value is the one that counts.
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
        if index != BAR_INDEX || offset >= BAR_LEN_BYTES {
            return;
        }
        match Region::at(offset) {
            Region::Common(offset) => self.transport.lock().read_common(offset, data),
            Region::Isr(0) => {
                if let Some(isr) = data.first_mut() {
                    *isr = self.interrupt.take_isr();
                }
            }
            Region::Device(offset) => self.transport.lock().device.read_config(offset, data),
            Region::MsixTable(offset) => self.msix.read_table(offset, data),
            Region::MsixPba(offset) => self.msix.read_pba(offset, data),
            Region::Isr(_) | Region::Notify(_) | Region::Hole => {}
        }
    }

    fn write_bar(&self, index: u8, offset: u64, data: &[u8]) {
        if index != BAR_INDEX || offset >= BAR_LEN_BYTES || data.is_empty() {
            return;
        }
        match Region::at(offset) {
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
