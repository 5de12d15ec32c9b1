// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Places of virtio devices on the PCI bus: segment, device number and BARs.
//!
//! Owns the numbers that are taken before any device has one, and the devices whose BARs are placed last.
//!
//! Disks of a VM that boots have 32-bit BARs in segment 0, as cloud-hypervisor's have (`device_manager.rs` of v53):
//! firmware drives them, and it has page tables for the first 4 GiB. All else has 64-bit ones, a disk that is added
//! later, or that is in another segment, too.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use devices::virtio::iommu::IommuHandle;
use devices::virtio::{Activated, DriverEvent, OnDriver, VirtioDevice};
use hypervisor::irq::IoEvents;
use pci::{
    BarWidth, Bdf, DEVICES_PER_BUS_COUNT, DeviceNumber, PciDevice, PciError, VirtioPciDevice,
    VirtioPciForm,
};

use super::iommus;
use super::segments::{PlaceError, Segments};
use super::virtio::{PciContext, VirtioDevices, VirtioError};
use crate::config::VmConfig;
use crate::config::on_platform::PciNumber;
use crate::config::segments::PciPlace;
use crate::events;
use crate::platform::Unlisted;

/// Width of a device's BAR, and when it is placed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum BarPlacement {
    /// 64 bits, placed at once.
    Wide,
    /// 32 bits if there is space, placed at once.
    Narrow,
    /// 32 bits if there is space after the passed-through devices are placed.
    NarrowLater,
}

impl BarPlacement {
    fn of_bar(self) -> BarWidth {
        match self {
            Self::Wide => BarWidth::Bits64,
            Self::Narrow | Self::NarrowLater => BarWidth::Bits32,
        }
    }

    /// Placement of a disk present at boot.
    fn of_boot_disk(config: &VmConfig, segment: u16) -> Self {
        let passes_through = config.devices.iter().flatten().next().is_some();
        match (segment, passes_through) {
            (0, true) => Self::NarrowLater,
            (0, false) => Self::Narrow,
            _ => Self::Wide,
        }
    }
}

/// Where a device is to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    segment: u16,
    /// The lowest free number if it asks for none.
    number: Option<u8>,
    bars: BarPlacement,
    iommu: bool,
    is_vdpa: bool,
}

impl Place {
    /// In a segment, perhaps with a number.
    pub fn new(segment: u16, number: Option<u8>) -> Self {
        Self { segment, number, bars: BarPlacement::Wide, iommu: false, is_vdpa: false }
    }

    /// Of a vDPA device, whose events have a source of their own.
    pub fn of_vdpa(segment: u16, number: Option<u8>) -> Self {
        Self { is_vdpa: true, ..Self::new(segment, number) }
    }

    /// Of a disk present at boot.
    pub fn of_boot_disk(config: &VmConfig, segment: u16, number: Option<u8>) -> Self {
        Self { bars: BarPlacement::of_boot_disk(config, segment), ..Self::new(segment, number) }
    }

    /// The same place, perhaps behind the IOMMU.
    #[must_use]
    pub fn behind_iommu(self, iommu: bool) -> Self {
        Self { iommu, ..self }
    }
}

/// Device numbers in segment 0 that options request, and those of devices for which no option names one.
#[derive(Default)]
pub struct TakenNumbers {
    taken: BTreeSet<u8>,
    /// By id, from an earlier machine of the guest.
    kept: BTreeMap<String, u8>,
    /// The lowest free number, for devices without any.
    is_lowest: bool,
}

impl TakenNumbers {
    /// Reserves the numbers that options request in each segment, so that no other device takes one.
    ///
    /// # Errors
    /// A number is taken; names the device.
    pub fn reserve(config: &VmConfig, segments: &Segments) -> Result<Self, VirtioError> {
        let mut taken: BTreeSet<u8> =
            config.removed_device_numbers.iter().flatten().copied().collect();
        let mut kept = BTreeMap::new();
        for PciNumber { id, number } in config.pci_numbers.iter().flatten() {
            let Ok(wish) = DeviceNumber::new(*number) else { continue };
            let reserved = segments
                .get(0)
                .and_then(|segment| segment.reserve(wish, id).map_err(PlaceError::Bus));
            reserved.map_err(|source| VirtioError::Bus { id: id.clone(), source })?;
            taken.insert(*number);
            kept.insert(id.clone(), *number);
        }
        for PciPlace { id, segment, number, .. } in config.pci_places() {
            let Some(number) = number.and_then(|number| DeviceNumber::new(number).ok()) else {
                continue;
            };
            let id = id.clone().unwrap_or_default();
            let reserved = segments
                .get(segment)
                .and_then(|segment| segment.reserve(number, &id).map_err(PlaceError::Bus));
            reserved.map_err(|source| VirtioError::Bus { id, source })?;
            if segment == 0 {
                taken.insert(number.get());
            }
        }
        let is_lowest = config.machine_platform().numbers.unlisted == Unlisted::LowestFree;
        Ok(Self { taken, kept, is_lowest })
    }

    /// The number of a device for which no option names one. `None` stands for the lowest free one. Otherwise it is the
    /// highest one that is not taken: that is the same on another host, whatever was plugged before.
    pub fn take(&mut self, id: &str) -> Option<u8> {
        if let Some(number) = self.kept.get(id) {
            return Some(*number);
        }
        if self.is_lowest {
            return None;
        }
        (1..DEVICES_PER_BUS_COUNT).rev().find(|number| self.taken.insert(*number))
    }

    /// Whether a number is taken.
    pub fn contains(&self, number: u8) -> bool {
        self.taken.contains(&number)
    }

    /// The numbers of such devices to be kept with the configuration, if the platform wants that; `functions` are all of
    /// segment 0 by id and number.
    pub fn to_be_kept<'a>(
        &self,
        ids: &[&str],
        functions: impl Iterator<Item = (&'a str, u8)>,
    ) -> Option<Vec<PciNumber>> {
        if !self.is_lowest {
            return None;
        }
        let kept = functions.filter(|(id, _)| ids.contains(id));
        let kept: Vec<_> =
            kept.map(|(id, number)| PciNumber { id: id.to_owned(), number }).collect();
        (!kept.is_empty()).then_some(kept)
    }
}

/// Writes an event for what the driver of a device does.
fn tells(id: String, is_vdpa: bool) -> OnDriver {
    Box::new(move |event| {
        let of_device = [("id", id.as_str())];
        match (event, is_vdpa) {
            (DriverEvent::Activated, false) => {
                events::emit("virtio-device", "activated", &of_device);
            }
            (DriverEvent::Activated, true) => events::emit("vdpa", "activated", &of_device),
            (DriverEvent::Reset, false) => events::emit("virtio-device", "reset", &of_device),
            (DriverEvent::Reset, true) => events::emit("vdpa", "reset", &of_device),
        }
    })
}

impl VirtioDevices {
    pub(super) fn plug(
        &mut self,
        context: &PciContext<'_>,
        id: &str,
        device: Box<dyn VirtioDevice>,
        place: Place,
    ) -> Result<Bdf, VirtioError> {
        let wished = place.number.map(|number| {
            let number = DeviceNumber::new(number);
            number.map_err(|source| VirtioError::Number { id: id.to_owned(), source })
        });
        let wished = wished.transpose()?;
        let no_place = |source| VirtioError::Bus { id: id.to_owned(), source };
        let segment = context.segments.get(place.segment).map_err(no_place)?;
        let events: Arc<dyn IoEvents> = Arc::new(context.vm.clone());
        let function = VirtioPciDevice::with_form(
            id.to_owned(),
            Box::new(Activated::on(
                context.activation,
                device,
                tells(id.to_owned(), place.is_vdpa),
            )),
            VirtioPciForm { width: place.bars.of_bar(), rules: &context.platform.virtio_pci },
            context.ram.guest_memory(),
            context.vm,
            events,
        )
        .map_err(|source| VirtioError::Transport { id: id.to_owned(), source })?;
        let endpoint = self.iommu().filter(|_| place.iommu).map(IommuHandle::endpoint);
        let function = Arc::new(match &endpoint {
            Some(endpoint) => function.behind(Arc::clone(endpoint)),
            None => function,
        });
        let as_pci: Arc<dyn PciDevice> = function.clone();
        let explain = |source: PciError| {
            no_place(context.segments.explain(place.segment, as_pci.as_ref(), source))
        };
        let bdf = if place.bars == BarPlacement::NarrowLater {
            let number = segment.expect(wished, id).map_err(explain)?;
            let bdf = Bdf::on_root_bus(segment.segment(), number);
            self.unplaced.push((bdf, Arc::clone(&function)));
            bdf
        } else {
            segment.add_device(&as_pci, wished).map_err(explain)?
        };
        if let (Some(iommu), Some(endpoint)) = (self.iommu(), &endpoint) {
            iommu.add(iommus::number(bdf), endpoint);
        }
        self.functions.push((bdf, function));
        Ok(bdf)
    }

    /// Places the BARs of the devices that were deferred until the passed-through devices are on the bus that are
    /// not late, whose 32-bit BARs have no alternative, while those of virtio devices become 64-bit ones where there
    /// is no space. Does nothing if there are none.
    ///
    /// # Errors
    /// Names the device.
    pub fn place_later(&mut self, segments: &Segments) -> Result<(), VirtioError> {
        // One that fails, and those after it, are left to `release_numbers`.
        while let Some((bdf, function)) = self.unplaced.first() {
            let as_pci: Arc<dyn PciDevice> = function.clone();
            segments
                .deliver(&as_pci, *bdf)
                .map_err(|source| VirtioError::Bus { id: as_pci.id().to_owned(), source })?;
            self.unplaced.remove(0);
        }
        Ok(())
    }

    /// Releases vCPUs that wait for a device that will not be placed.
    pub fn release_numbers(&self, segments: &Segments) {
        self.unplaced.iter().for_each(|(bdf, _)| segments.release(*bdf));
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]
    use super::*;

    /// The 32-bit BARs of passed-through devices have no alternative.
    #[test]
    fn disks_come_after_passed_through_devices() {
        let mut config: VmConfig =
            serde_json::from_str(r#"{"payload":{"kernel":"/k"},"disks":[{"path":"/d"}]}"#).unwrap();
        assert_eq!(BarPlacement::of_boot_disk(&config, 0), BarPlacement::Narrow);
        config.devices = Some(Vec::new());
        assert_eq!(BarPlacement::of_boot_disk(&config, 0), BarPlacement::Narrow);
        let device = r#"{"path":"/sys/bus/pci/devices/0000:01:00.0"}"#;
        config.devices = Some(vec![serde_json::from_str(device).unwrap()]);
        assert_eq!(BarPlacement::of_boot_disk(&config, 0), BarPlacement::NarrowLater);
        assert_eq!(BarPlacement::of_boot_disk(&config, 1), BarPlacement::Wide);
    }
}
