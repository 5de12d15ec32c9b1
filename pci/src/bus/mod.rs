// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A PCI segment: one root bus with its host bridge, and the two ways to its configuration space.
//!
//! Owns the device numbers and, through the placement, the mappings of BARs. Never holds a lock
//! while a function handles an access, as that may wait.

mod arrivals;
mod config_io;
mod ecam;
mod host_bridge;
#[cfg(test)]
mod tests;
mod visibility;

use std::sync::{Arc, OnceLock};

use parking_lot::{Mutex, RwLock};
use pci_address::{Bdf, DEVICES_PER_BUS_COUNT, DeviceNumber};
use thiserror::Error;

use crate::bar_placement::{
    BarMapper, BarPlacement, BarRules, GODWIT_BARS, MmioRange, MmioWindows, PlacementError,
    PortWindow, RangeWish,
};
use crate::config_space::{BARS_COUNT, register};
use crate::device::PciDevice;

use arrivals::Arrivals;
pub use config_io::PciConfigIo;
pub use ecam::{ECAM_SEGMENT_LEN_BYTES, PciEcam};
pub use host_bridge::HostBridge;
use visibility::Visibility;

/// Why a function cannot be added to the bus.
#[derive(Debug, Error)]
pub enum PciError {
    /// The requested device number is taken.
    #[error(
        "PCI address {bdf} asked for by {id} is taken by {holder}; choose another pci_device_id"
    )]
    Taken {
        /// The requested address.
        bdf: Bdf,
        /// Id of the device.
        id: String,
        /// Id of the device that has the number.
        holder: String,
    },
    /// All device numbers are taken.
    #[error("PCI segment {segment} is full: no device number is left for {id}")]
    Full {
        /// The segment.
        segment: u16,
        /// Id of the device.
        id: String,
    },
    /// Another function has the same id.
    #[error("PCI segment {segment} has a device {id} already")]
    DuplicateId {
        /// The segment.
        segment: u16,
        /// The id.
        id: String,
    },
    /// The BARs cannot be placed.
    #[error("cannot place the BARs of PCI segment {segment}")]
    Placement {
        /// The segment.
        segment: u16,
        /// The cause.
        #[source]
        source: PlacementError,
    },
}

/// Configuration of a segment.
#[derive(Clone, Copy, Debug)]
pub struct PciSegmentOptions {
    /// Segment number (ACPI `_SEG`).
    pub segment: u16,
    /// Address windows for its BARs.
    pub windows: MmioWindows,
}

#[derive(Clone)]
enum Slot {
    Free,
    /// Reserved for a device that will request the number.
    Reserved,
    /// Reserved for a device that the guest has, and that is still being opened.
    Opening,
    Taken(Arc<dyn PciDevice>),
}

/// A PCI segment with one root bus.
///
/// The MMIO bus holds [`PciEcam`], which only has a weak reference to this, as this holds the MMIO bus
/// through its [`BarMapper`]: the owner of the VM keeps segments alive.
pub struct PciSegment {
    segment: u16,
    slots: RwLock<[Slot; DEVICES_PER_BUS_COUNT as usize]>,
    visibility: Visibility,
    arrivals: Arrivals,
    on_waited: OnceLock<OnWaited>,
    placement: Mutex<BarPlacement>,
}

/// Called on a thread that has waited for a function to be opened; must not block.
pub type OnWaited = Box<dyn Fn() + Send + Sync>;

impl PciSegment {
    /// A segment with only a host bridge, at device number 0.
    pub fn new(
        options: PciSegmentOptions,
        mapper: Arc<dyn BarMapper>,
    ) -> Result<Arc<Self>, PciError> {
        Self::with_ports(options, mapper, None)
    }

    /// Like [`PciSegment::new`], with ports for I/O BARs.
    ///
    /// # Errors
    /// A window is invalid.
    pub fn with_ports(
        options: PciSegmentOptions,
        mapper: Arc<dyn BarMapper>,
        ports: Option<PortWindow>,
    ) -> Result<Arc<Self>, PciError> {
        Self::with_rules(options, GODWIT_BARS, mapper, ports)
    }

    /// Like [`PciSegment::with_ports`], with BARs placed by the rules of a platform.
    ///
    /// # Errors
    /// A window is invalid.
    pub fn with_rules(
        options: PciSegmentOptions,
        rules: BarRules,
        mapper: Arc<dyn BarMapper>,
        ports: Option<PortWindow>,
    ) -> Result<Arc<Self>, PciError> {
        let segment = options.segment;
        let placement = BarPlacement::new(options.windows, rules, mapper, ports)
            .map_err(|source| PciError::Placement { segment, source })?;
        let mut slots = [const { Slot::Free }; DEVICES_PER_BUS_COUNT as usize];
        slots[0] = Slot::Taken(Arc::new(HostBridge::new(segment)));
        Ok(Arc::new(Self {
            segment,
            slots: RwLock::new(slots),
            visibility: Visibility::default(),
            arrivals: Arrivals::default(),
            on_waited: OnceLock::new(),
            placement: Mutex::new(placement),
        }))
    }

    /// Has each wait for a function that is still being opened reported when it is over. The first call counts.
    pub fn report_waits(&self, on_waited: OnWaited) {
        let _ = self.on_waited.set(on_waited);
    }

    /// Number of the segment.
    pub fn segment(&self) -> u16 {
        self.segment
    }

    /// Reserves a device number for a later [`PciSegment::add_device`] that requests it.
    pub fn reserve(&self, number: DeviceNumber, id: &str) -> Result<(), PciError> {
        let mut slots = self.slots.write();
        let slot = &mut slots[usize::from(number.get())];
        match slot {
            Slot::Free => {
                *slot = Slot::Reserved;
                Ok(())
            }
            Slot::Reserved | Slot::Opening => {
                Err(self.taken(number, id, "another device's pci_device_id"))
            }
            Slot::Taken(holder) => Err(self.taken(number, id, holder.id())),
        }
    }

    /// Reserves `wish`, or the lowest free number, for a device to be created; `wish` may be reserved for
    /// it already. If the device is not added, the number must be released with [`PciSegment::release`].
    ///
    /// # Errors
    /// The number is taken, or none is left.
    pub fn choose(&self, wish: Option<DeviceNumber>, id: &str) -> Result<DeviceNumber, PciError> {
        let mut slots = self.slots.write();
        let number = self.number_for(&*slots, wish, id)?;
        slots[usize::from(number.get())] = Slot::Reserved;
        Ok(number)
    }

    /// Like [`PciSegment::choose`], for a device that the guest has from its first instruction, but that
    /// takes time to open: accesses to its configuration space wait until it is added or the number
    /// released.
    ///
    /// # Errors
    /// The number is taken, or none is left.
    pub fn expect(&self, wish: Option<DeviceNumber>, id: &str) -> Result<DeviceNumber, PciError> {
        let mut slots = self.slots.write();
        let number = self.number_for(&*slots, wish, id)?;
        slots[usize::from(number.get())] = Slot::Opening;
        Ok(number)
    }

    /// Releases a reserved number.
    pub fn release(&self, number: DeviceNumber) {
        let mut slots = self.slots.write();
        let slot = &mut slots[usize::from(number.get())];
        if matches!(slot, Slot::Reserved | Slot::Opening) {
            *slot = Slot::Free;
            self.visibility.forget(number);
        }
        // Who waits for a function looks at the slots with the lock of arrivals.
        drop(slots);
        self.arrivals.tell();
    }

    fn number_for(
        &self,
        slots: &[Slot],
        wish: Option<DeviceNumber>,
        id: &str,
    ) -> Result<DeviceNumber, PciError> {
        match wish {
            Some(number) => match &slots[usize::from(number.get())] {
                Slot::Taken(holder) => Err(self.taken(number, id, holder.id())),
                Slot::Opening => Err(self.taken(number, id, "a device that is being opened")),
                Slot::Free | Slot::Reserved => Ok(number),
            },
            None => DeviceNumber::all()
                .find(|number| matches!(slots[usize::from(number.get())], Slot::Free))
                .ok_or_else(|| PciError::Full { segment: self.segment, id: id.to_owned() }),
        }
    }

    /// Adds a function, at `requested` or the lowest free device number, and allocates addresses for its
    /// BARs. They are mapped once the guest enables decoding.
    pub fn add_device(
        &self,
        device: &Arc<dyn PciDevice>,
        requested: Option<DeviceNumber>,
    ) -> Result<Bdf, PciError> {
        self.put(&mut *self.slots.write(), device, requested)
    }

    /// Like [`PciSegment::add_device`], with a number that [`PciSegment::expect`] has reserved; accesses
    /// that wait for the function continue.
    ///
    /// # Errors
    /// As [`PciSegment::add_device`]; waiting accesses then wait until the number is released.
    pub fn deliver(
        &self,
        device: &Arc<dyn PciDevice>,
        number: DeviceNumber,
    ) -> Result<Bdf, PciError> {
        let bdf = {
            let mut slots = self.slots.write();
            let at = usize::from(number.get());
            let kept = std::mem::replace(&mut slots[at], Slot::Reserved);
            let bdf = self.put(&mut *slots, device, Some(number));
            if bdf.is_err() {
                slots[at] = kept;
            }
            bdf?
        };
        self.arrivals.tell();
        Ok(bdf)
    }

    fn put(
        &self,
        slots: &mut [Slot],
        device: &Arc<dyn PciDevice>,
        requested: Option<DeviceNumber>,
    ) -> Result<Bdf, PciError> {
        let id = device.id();
        let same_id = |slot: &Slot| matches!(slot, Slot::Taken(other) if other.id() == id);
        if slots.iter().any(same_id) {
            return Err(PciError::DuplicateId { segment: self.segment, id: id.to_owned() });
        }
        let number = self.number_for(slots, requested, id)?;
        self.placement
            .lock()
            .add(number, device)
            .map_err(|source| PciError::Placement { segment: self.segment, source })?;
        slots[usize::from(number.get())] = Slot::Taken(Arc::clone(device));
        Ok(Bdf::on_root_bus(self.segment, number))
    }

    /// Makes a function stop responding in configuration space, as if unplugged; its mappings stay until
    /// [`PciSegment::remove_device`]. Also for one that is still to be added: it responds from
    /// [`PciSegment::show`] on, and no access waits for it.
    pub fn hide(&self, number: DeviceNumber) {
        self.visibility.hide(number);
        self.arrivals.tell();
    }

    /// Like [`PciSegment::hide`], unless the guest has accessed the function's configuration space, or is about to: then
    /// nothing changes, and the answer is false.
    pub fn hide_unseen(&self, number: DeviceNumber) -> bool {
        self.visibility.hide_unseen(number)
    }

    /// Makes a function respond that [`PciSegment::hide`] has hidden.
    pub fn show(&self, number: DeviceNumber) {
        self.visibility.show(number);
    }

    /// Removes a function: on return none of it is mapped, and its number and addresses are free. An access
    /// of another vCPU may still be in progress.
    pub fn remove_device(&self, number: DeviceNumber) -> Option<Arc<dyn PciDevice>> {
        let slot = &mut self.slots.write()[usize::from(number.get())];
        if !matches!(slot, Slot::Taken(_)) || number == DeviceNumber::HOST_BRIDGE {
            return None;
        }
        let Slot::Taken(device) = std::mem::replace(slot, Slot::Free) else { return None };
        self.placement.lock().remove(number);
        self.visibility.forget(number);
        Some(device)
    }

    /// Keeps a range of the window for 64-bit BARs free of BARs, until [`PciSegment::release_range`]. The guest may
    /// lay a BAR over it, which is not mapped then.
    ///
    /// # Errors
    /// The window has no such range, or a part of it is taken.
    pub fn reserve_range(&self, wish: RangeWish) -> Result<MmioRange, PciError> {
        let reserved = self.placement.lock().reserve(wish);
        reserved.map_err(|source| PciError::Placement { segment: self.segment, source })
    }

    /// Gives back a range of [`PciSegment::reserve_range`], in which nothing is mapped any more.
    pub fn release_range(&self, range: MmioRange) {
        self.placement.lock().release(range);
    }

    fn taken(&self, number: DeviceNumber, id: &str, holder: &str) -> PciError {
        PciError::Taken {
            bdf: Bdf::on_root_bus(self.segment, number),
            id: id.to_owned(),
            holder: holder.to_owned(),
        }
    }

    /// All functions, including the host bridge, by address.
    pub fn devices(&self) -> Vec<(Bdf, Arc<dyn PciDevice>)> {
        let slots = self.slots.read();
        DeviceNumber::all()
            .zip(slots.iter())
            .filter_map(|(number, slot)| match slot {
                Slot::Taken(device) => {
                    Some((Bdf::on_root_bus(self.segment, number), Arc::clone(device)))
                }
                Slot::Free | Slot::Reserved | Slot::Opening => None,
            })
            .collect()
    }

    /// Updates all mappings from the BAR registers, after devices were restored.
    pub fn refresh_mappings(&self) {
        self.placement.lock().refresh_all();
    }

    /// Reads the configuration space of a function; all ones if there is none. Waits for a function that is
    /// expected, as does a write.
    pub fn read_config(&self, address: ConfigAddress, data: &mut [u8]) {
        match self.function(address) {
            Some((_, device)) => device.read_config(address.offset, data),
            None => data.fill(0xff),
        }
    }

    /// Writes the configuration space of a function.
    pub fn write_config(&self, address: ConfigAddress, data: &[u8]) {
        let Some((number, device)) = self.function(address) else { return };
        device.write_config(address.offset, data);
        if concerns_decoding(address.offset, data.len()) {
            // The last thread sees the current registers, so the mappings are right whatever the order of
            // concurrent writers.
            self.placement.lock().refresh(number);
        }
    }

    fn function(&self, address: ConfigAddress) -> Option<(DeviceNumber, Arc<dyn PciDevice>)> {
        if address.bus != 0 || address.function != 0 {
            return None;
        }
        let number = DeviceNumber::new(address.device).ok()?;
        // The function of the slot, if any; `None` while it is expected.
        let look = || {
            if self.visibility.is_hidden(number) {
                return Some(None);
            }
            match &self.slots.read()[usize::from(number.get())] {
                // It may have been hidden since.
                Slot::Taken(device) => {
                    Some(self.visibility.see(number).then(|| (number, Arc::clone(device))))
                }
                Slot::Free | Slot::Reserved => Some(None),
                Slot::Opening => None,
            }
        };
        look().unwrap_or_else(|| {
            let found = self.arrivals.wait_for(look);
            if let Some(on_waited) = self.on_waited.get() {
                on_waited();
            }
            found
        })
    }
}

/// Address in the configuration space of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConfigAddress {
    /// Bus number.
    pub bus: u8,
    /// Device number.
    pub device: u8,
    /// Function number.
    pub function: u8,
    /// Offset in the function's configuration space.
    pub offset: u16,
}

/// Whether a write may have changed the command register, a BAR or the expansion ROM.
fn concerns_decoding(offset: u16, len_bytes: usize) -> bool {
    let start = usize::from(offset);
    let end = start.saturating_add(len_bytes);
    let touches = |first: u16, last: u16| start <= usize::from(last) && end > usize::from(first);
    let bars_last = register::BAR0 + u16::from(BARS_COUNT) * 4 - 1;
    touches(register::COMMAND, register::COMMAND + 1)
        || touches(register::BAR0, bars_last)
        || touches(register::ROM, register::ROM + 3)
}
