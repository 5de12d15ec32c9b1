// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The virtio devices that a machine has from its first instruction, kind by kind.
//!
//! Owns how the devices of each kind are made and put on the bus. Their order, and what they offer, are up to the
//! platform.

use std::sync::Arc;

use devices::virtio::console::{Console, ConsoleConfig};
use devices::virtio::iommu::Iommu;
use devices::virtio::rng::{Rng, RngConfig};
use devices::virtio::rtc::{Rtc, RtcConfig};
use devices::virtio::watchdog::{Watchdog, WatchdogConfig};
use devices::virtio::{Offer, Offering, VirtioDevice};

use super::consoles::Consoles;
use super::events::{GuestEvent, Power};
use super::exclusive::LockedImages;
use super::mems::{self, Wired};
use super::place::Place;
use super::pmems::WiredPmem;
use super::virtio::{PciContext, VirtioDevices, VirtioError};
use super::{balloons, disks, nets, vhost_users, vsocks};
use crate::config::VmConfig;
use crate::config::vm::{IOMMU_ID, WATCHDOG_ID};
use crate::platform::DeviceKind;

/// What the devices of a booting machine are made of, but for their options.
pub(super) struct Early<'a> {
    /// The consoles.
    pub(super) consoles: &'a Consoles,
    /// Images that are open and locked.
    pub(super) images: &'a mut LockedImages,
    /// What the watchdog tells.
    pub(super) power: &'a Arc<Power>,
    /// Persistent memory, whose addresses are reserved.
    pub(super) pmems: Vec<WiredPmem>,
    /// The IOMMU, which devices are put behind.
    pub(super) iommu: Option<Iommu>,
}

fn offering(device: impl VirtioDevice + 'static, offer: Offer) -> Box<dyn VirtioDevice> {
    Box::new(Offering::of(Box::new(device), offer))
}

impl VirtioDevices {
    /// Creates the configured devices of a kind.
    ///
    /// # Errors
    /// Names the device.
    pub(super) fn plug_kind(
        &mut self,
        kind: DeviceKind,
        config: &VmConfig,
        context: &PciContext<'_>,
        early: &mut Early<'_>,
    ) -> Result<(), VirtioError> {
        match kind {
            DeviceKind::Console => self.plug_console(config, early.consoles, context),
            DeviceKind::Disk => self.plug_disks(config, context, early.images),
            DeviceKind::Net => self.plug_nets(config, context),
            DeviceKind::Fs => self.plug_fs(config, context),
            DeviceKind::GenericVhostUser => self.plug_generic(config, context),
            DeviceKind::Vdpa => self.plug_vdpas(config, context),
            DeviceKind::Rng => self.plug_rng(config, context),
            DeviceKind::Rtc => self.plug_rtc(config, context),
            DeviceKind::Pmem => {
                let mut pmems = std::mem::take(&mut early.pmems).into_iter();
                pmems.try_for_each(|pmem| self.plug_pmem(pmem, context).map(drop))
            }
            DeviceKind::Vsock => config.vsock.iter().try_for_each(|vsock| {
                self.plug_vsock(vsock, vsocks::make(vsock), context).map(drop)
            }),
            DeviceKind::Mem => self.plug_mems(config, context),
            DeviceKind::Watchdog => self.plug_watchdog(config, context, early.power),
            DeviceKind::Iommu => early.iommu.take().map_or(Ok(()), |iommu| {
                let place = Place::new(0, self.taken.take(IOMMU_ID));
                let device = offering(iommu, context.platform.offers.iommu);
                self.plug(context, IOMMU_ID, device, place).map(drop)
            }),
            DeviceKind::Balloon => self.plug_balloon(config, context),
        }
    }

    fn plug_console(
        &mut self,
        config: &VmConfig,
        consoles: &Consoles,
        context: &PciContext<'_>,
    ) -> Result<(), VirtioError> {
        let Some(endpoint) = &consoles.virtio else { return Ok(()) };
        let id = config.console.id.clone().unwrap_or_default();
        let console =
            Console::new(ConsoleConfig { id: id.clone(), endpoint: Arc::clone(endpoint) });
        self.console = Some(console.resizer());
        let place = Place::new(config.console.pci_segment, config.console.pci_device_id)
            .behind_iommu(config.console.iommu);
        let device = offering(console, context.platform.offers.console);
        self.plug(context, &id, device, place).map(drop)
    }

    fn plug_disks(
        &mut self,
        config: &VmConfig,
        context: &PciContext<'_>,
        images: &mut LockedImages,
    ) -> Result<(), VirtioError> {
        for disk in config.disks.iter().flatten() {
            let place = Place::of_boot_disk(config, disk.pci_segment, disk.pci_device_id)
                .behind_iommu(disk.iommu);
            if disk.vhost_user {
                let made = vhost_users::make_disk(disk, context.ram)?;
                self.plug_vhost_user(made, context, place)?;
            } else {
                let limits = context.platform.offers.disk_limits;
                let made = disks::make(disk, limits, images, &self.rate_groups)?;
                self.plug_disk(disk, made, context, place)?;
            }
        }
        Ok(())
    }

    fn plug_nets(
        &mut self,
        config: &VmConfig,
        context: &PciContext<'_>,
    ) -> Result<(), VirtioError> {
        for net in config.net.iter().flatten() {
            if net.vhost_user {
                let made = vhost_users::make_net(net, context.ram)?;
                let place = Place::new(net.pci_segment, net.pci_device_id);
                self.plug_vhost_user(made, context, place)?;
            } else {
                self.plug_net(net, nets::make(net)?, context)?;
            }
        }
        Ok(())
    }

    fn plug_rng(&mut self, config: &VmConfig, context: &PciContext<'_>) -> Result<(), VirtioError> {
        let id = config.rng.id.clone().unwrap_or_default();
        let rng = Rng::new(RngConfig { id: id.clone(), source: config.rng.src.clone() })?;
        let place = Place::new(config.rng.pci_segment, config.rng.pci_device_id)
            .behind_iommu(config.rng.iommu);
        self.plug(context, &id, offering(rng, context.platform.offers.rng), place).map(drop)
    }

    fn plug_rtc(&mut self, config: &VmConfig, context: &PciContext<'_>) -> Result<(), VirtioError> {
        let Some(rtc) = &config.rtc else { return Ok(()) };
        let id = rtc.id.clone().unwrap_or_default();
        let device = Rtc::new(RtcConfig { id: id.clone() });
        let place = Place::new(rtc.pci_segment, rtc.pci_device_id).behind_iommu(rtc.iommu);
        self.plug(context, &id, offering(device, context.platform.offers.rtc), place).map(drop)
    }

    fn plug_mems(
        &mut self,
        config: &VmConfig,
        context: &PciContext<'_>,
    ) -> Result<(), VirtioError> {
        for Wired { id, device, handle } in mems::make(config, context.ram)? {
            self.mems.push((id.clone(), handle));
            let place = Place::new(0, self.taken.take(&id));
            self.plug(context, &id, offering(device, context.platform.offers.mem), place)?;
        }
        Ok(())
    }

    fn plug_watchdog(
        &mut self,
        config: &VmConfig,
        context: &PciContext<'_>,
        power: &Arc<Power>,
    ) -> Result<(), VirtioError> {
        if !config.watchdog {
            return Ok(());
        }
        let power = Arc::clone(power);
        let expired = Arc::new(move || power.signal(GuestEvent::WatchdogExpired));
        let watchdog = Watchdog::new(WatchdogConfig::new(WATCHDOG_ID.to_owned(), expired));
        self.watchdog = Some(watchdog.handle());
        let place = Place::new(0, self.taken.take(WATCHDOG_ID));
        let device = offering(watchdog, context.platform.offers.watchdog);
        self.plug(context, WATCHDOG_ID, device, place).map(drop)
    }

    fn plug_balloon(
        &mut self,
        config: &VmConfig,
        context: &PciContext<'_>,
    ) -> Result<(), VirtioError> {
        let Some(balloon) = &config.balloon else { return Ok(()) };
        let id = balloon.id.clone().unwrap_or_default();
        let device = balloons::make(balloon, context.ram, self.coming_bytes())?;
        for (_, mem) in &self.mems {
            let handle = device.handle();
            mem.on_growth(Arc::new(move || handle.memory_has_grown()));
        }
        self.balloon = Some(device.handle());
        self.counters.push((id.clone(), device.counters()));
        let place = Place::new(balloon.pci_segment, balloon.pci_device_id);
        let offer = context.platform.offers.balloon(balloon.free_page_reporting);
        self.plug(context, &id, offering(device, offer), place).map(drop)
    }
}
