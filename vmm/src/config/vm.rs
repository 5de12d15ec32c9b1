// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The complete configuration of a VM, its JSON form, and the rules across option families.
//!
//! Raw values (what was asked for) become complete ones in [`VmConfig::complete`]: rules checked,
//! names and MAC addresses filled in. After that the value is what `vm.info` shows and what
//! travels with a migration; completing it again changes nothing.
//!
//! It must never touch the host except for random bytes.

use std::collections::BTreeSet;
use std::path::PathBuf;

use super::balloon::BalloonConfig;
use super::codec::JsonOnly;
use super::console::{ConsoleConfig, ConsoleMode, DebugConsoleConfig, SerialConfig};
use super::cpus::CpusConfig;
use super::device::DeviceConfig;
use super::disk::DiskConfig;
use super::error::ConfigError;
use super::family::option_family;
use super::fs::FsConfig;
use super::generic_vhost_user::GenericVhostUserConfig;
use super::landlock::LandlockConfig;
use super::memory::MemoryConfig;
use super::net::NetConfig;
use super::numa::{self, NumaConfig, NumaScope};
use super::on_platform::PciNumber;
use super::payload::PayloadConfig;
use super::platform::{PciSegmentConfig, PlatformConfig};
use super::pmem::PmemConfig;
use super::rate_limiter::RateLimitGroupConfig;
use super::rng::RngConfig;
use super::rtc::RtcConfig;
use super::tpm::TpmConfig;
use super::user_device::UserDeviceConfig;
use super::value::MacAddr;
use super::vdpa::VdpaConfig;
use super::vsock::VsockConfig;

/// Id of the console device.
pub const CONSOLE_ID: &str = "__console";
/// Id of the entropy device.
pub const RNG_ID: &str = "__rng";
/// Id of the real-time clock.
pub const RTC_ID: &str = "__rtc";
/// Id of the balloon.
pub const BALLOON_ID: &str = "__balloon";
/// Id of the virtual IOMMU.
pub const IOMMU_ID: &str = "__iommu";
/// Id of the watchdog.
pub const WATCHDOG_ID: &str = "__watchdog";
/// Name of the panic device.
pub const PVPANIC_ID: &str = "__pvpanic";

option_family! {
    /// The configuration of a virtual machine.
    VmConfig "vm" {
        /// Virtual CPUs.
        cpus: CpusConfig = CpusConfig::default(), "" as JsonOnly;
        /// Guest memory.
        memory: MemoryConfig = MemoryConfig::default(), "" as JsonOnly;
        /// Boot payload: kernel or firmware.
        payload: PayloadConfig = PayloadConfig::default(), "" as JsonOnly, required_json();
        /// Rate limiters shared by disks.
        rate_limit_groups: Option<Vec<RateLimitGroupConfig>> = None, "" as JsonOnly;
        /// Block devices.
        disks: Option<Vec<DiskConfig>> = None, "" as JsonOnly;
        /// Network devices.
        net: Option<Vec<NetConfig>> = None, "" as JsonOnly;
        /// Entropy device.
        rng: RngConfig = RngConfig::default(), "" as JsonOnly;
        /// Balloon device.
        balloon: Option<BalloonConfig> = None, "" as JsonOnly;
        /// Shared directories.
        fs: Option<Vec<FsConfig>> = None, "" as JsonOnly;
        /// Other vhost-user devices.
        generic_vhost_user: Option<Vec<GenericVhostUserConfig>> = None, "" as JsonOnly,
            alias("generic-vhost-user");
        /// Persistent memory.
        pmem: Option<Vec<PmemConfig>> = None, "" as JsonOnly;
        /// Serial port.
        serial: SerialConfig = SerialConfig::default(), "" as JsonOnly;
        /// Virtio console.
        console: ConsoleConfig = ConsoleConfig::default(), "" as JsonOnly;
        /// Debug console.
        debug_console: DebugConsoleConfig = DebugConsoleConfig::default(), "" as JsonOnly;
        /// Passed-through host devices.
        devices: Option<Vec<DeviceConfig>> = None, "" as JsonOnly;
        /// Devices emulated by other processes (vfio-user).
        user_devices: Option<Vec<UserDeviceConfig>> = None, "" as JsonOnly;
        /// vDPA devices.
        vdpa: Option<Vec<VdpaConfig>> = None, "" as JsonOnly;
        /// Socket device (virtio-vsock).
        vsock: Option<VsockConfig> = None, "" as JsonOnly;
        /// NUMA nodes of the guest.
        numa: Option<Vec<NumaConfig>> = None, "" as JsonOnly;
        /// Virtual IOMMU; there is one in any case if a device or segment is to be behind it.
        iommu: bool = false, "" as JsonOnly;
        /// Watchdog device.
        watchdog: bool = false, "" as JsonOnly;
        /// Real-time clock device.
        rtc: Option<RtcConfig> = None, "" as JsonOnly;
        /// Device through which the guest reports a panic.
        pvpanic: bool = false, "" as JsonOnly;
        /// PCI segments.
        pci_segments: Option<Vec<PciSegmentConfig>> = None, "" as JsonOnly;
        /// Address bits by which the windows of several PCI segments were shared out at boot, or by which the platform's
        /// windows and registers were placed: another host may have more. Kept by the VMM.
        pci_address_bits: Option<u8> = None, "" as JsonOnly, hidden();
        /// Device numbers that devices had requested which were removed since. The watchdog, the panic device and memory
        /// devices were placed around them, and are found there again. Kept by the VMM.
        removed_device_numbers: Option<Vec<u8>> = None, "" as JsonOnly, hidden();
        /// Device numbers of devices for which no option names one, on platforms on which they are found again by it.
        /// Kept by the VMM.
        pci_numbers: Option<Vec<PciNumber>> = None, "" as JsonOnly, hidden();
        /// Options of the machine as a whole.
        platform: Option<PlatformConfig> = None, "" as JsonOnly;
        /// Trusted platform module.
        tpm: Option<TpmConfig> = None, "" as JsonOnly;
        /// Confine the process with Landlock to the paths of this configuration.
        landlock_enable: bool = false, "" as JsonOnly;
        /// Paths that remain accessible with Landlock beyond those.
        landlock_rules: Option<Vec<LandlockConfig>> = None, "" as JsonOnly;
    }
}

impl VmConfig {
    /// Validates the configuration, and fills in missing ids and MAC addresses.
    ///
    /// # Errors
    /// All unsupported options together, or the first violated rule.
    pub fn complete(self) -> Result<Self, ConfigError> {
        self.complete_with(|config| {
            config.cpus.check_apic_ids()?;
            config.check_numa_devices()?;
            config.check_reserved()
        })
    }

    /// Like [`Self::complete`], for a guest that has run, at a migration source or before a snapshot: ids
    /// and numbers that an earlier version accepted are kept.
    ///
    /// # Errors
    /// As [`Self::complete`].
    pub fn complete_begun(self) -> Result<Self, ConfigError> {
        if let Some(path) = self.cpus.baseline.as_ref().and_then(|baseline| baseline.file.clone()) {
            // Before anything looks for it: it would be a file of this host.
            return Err(ConfigError::BaselineFile { path });
        }
        self.complete_with(|_| Ok(()))
    }

    /// Like [`Self::complete`], with further rules of the caller, which run once devices have ids.
    ///
    /// # Errors
    /// As [`Self::complete`].
    pub(super) fn complete_with(
        mut self,
        check: impl FnOnce(&Self) -> Result<(), ConfigError>,
    ) -> Result<Self, ConfigError> {
        super::refuse_unsupported(&self)?;
        self.validate_families()?;
        if self.console.mode == ConsoleMode::Tty && self.serial.mode == ConsoleMode::Tty {
            return Err(ConfigError::DoubleTty);
        }
        self.assign_ids()?;
        self.iommu |= self.needs_iommu();
        check(&self)?;
        self.check_slots()?;
        self.check_iommu()?;
        self.check_platform()?;
        self.check_host_devices()?;
        self.check_exclusive()?;
        self.check_vhost_user()?;
        self.check_vdpa()?;
        self.check_user_devices()?;
        self.check_rate_groups()?;
        self.check_numa()?;
        for net in self.net.iter_mut().flatten() {
            if net.mac.is_none() {
                net.mac = Some(random_mac()?);
            }
        }
        Ok(self)
    }

    fn validate_families(&self) -> Result<(), ConfigError> {
        self.cpus.validate()?;
        self.memory.validate()?;
        self.payload.validate()?;
        for disk in self.disks.iter().flatten() {
            disk.validate(self.cpus.max_vcpus)?;
        }
        for net in self.net.iter().flatten() {
            net.validate(self.cpus.max_vcpus)?;
        }
        for fs in self.fs.iter().flatten() {
            fs.validate(self.cpus.max_vcpus)?;
        }
        for device in self.generic_vhost_user.iter().flatten() {
            device.validate()?;
        }
        self.pmem.iter().flatten().try_for_each(PmemConfig::validate)?;
        for device in self.devices.iter().flatten() {
            device.validate(self.platform.as_ref())?;
        }
        self.vdpa.iter().flatten().try_for_each(VdpaConfig::validate)?;
        self.user_devices.iter().flatten().try_for_each(UserDeviceConfig::validate)?;
        if let Some(balloon) = &self.balloon {
            balloon.validate(self.memory.most_bytes().unwrap_or(0))?;
        }
        if let Some(tpm) = &self.tpm {
            tpm.validate()?;
        }
        if let Some(vsock) = &self.vsock {
            vsock.validate()?;
        }
        self.console.validate()?;
        self.serial.validate()?;
        self.debug_console.validate()?;
        if let Some(platform) = &self.platform {
            platform.validate()?;
        }
        self.pci_segments.iter().flatten().try_for_each(PciSegmentConfig::validate)?;
        self.landlock_rules.iter().flatten().try_for_each(LandlockConfig::validate)
    }

    /// Assigns the ids `_disk0`, `_net1` and so on to devices without one; one counter for all kinds.
    fn assign_ids(&mut self) -> Result<(), ConfigError> {
        let mut ids = BTreeSet::new();
        let mut take = |family: &'static str, id: &str, own: &str| {
            if id.is_empty() {
                return Err(ConfigError::EmptyId { family });
            }
            if id.starts_with("__") && id != own {
                return Err(ConfigError::ReservedId { id: id.to_owned() });
            }
            if ids.insert(id.to_owned()) {
                Ok(())
            } else {
                Err(ConfigError::DuplicateId { id: id.to_owned() })
            }
        };
        let console = self.console.id.get_or_insert_with(|| CONSOLE_ID.to_owned());
        take("console", console, CONSOLE_ID)?;
        let rng = self.rng.id.get_or_insert_with(|| RNG_ID.to_owned());
        take("rng", rng, RNG_ID)?;
        if let Some(balloon) = &mut self.balloon {
            take("balloon", balloon.id.get_or_insert_with(|| BALLOON_ID.to_owned()), BALLOON_ID)?;
        }
        if let Some(rtc) = &mut self.rtc {
            take("rtc", rtc.id.get_or_insert_with(|| RTC_ID.to_owned()), RTC_ID)?;
        }
        for id in self.disks.iter().flatten().filter_map(|disk| disk.id.as_deref()) {
            take("disk", id, "")?;
        }
        for id in self.net.iter().flatten().filter_map(|net| net.id.as_deref()) {
            take("net", id, "")?;
        }
        for id in self.fs.iter().flatten().filter_map(|fs| fs.id.as_deref()) {
            take("fs", id, "")?;
        }
        let generic = self.generic_vhost_user.iter().flatten();
        for id in generic.filter_map(|device| device.id.as_deref()) {
            take("generic-vhost-user", id, "")?;
        }
        for id in self.pmem.iter().flatten().filter_map(|pmem| pmem.id.as_deref()) {
            take("pmem", id, "")?;
        }
        for id in self.devices.iter().flatten().filter_map(|device| device.id.as_deref()) {
            take("device", id, "")?;
        }
        for id in self.vdpa.iter().flatten().filter_map(|vdpa| vdpa.id.as_deref()) {
            take("vdpa", id, "")?;
        }
        for id in self.user_devices.iter().flatten().filter_map(|device| device.id.as_deref()) {
            take("user-device", id, "")?;
        }
        if let Some(id) = self.vsock.as_ref().and_then(|vsock| vsock.id.as_deref()) {
            take("vsock", id, "")?;
        }
        let disks = self.disks.iter_mut().flatten().map(|disk| ("_disk", &mut disk.id));
        let nets = self.net.iter_mut().flatten().map(|net| ("_net", &mut net.id));
        let fs = self.fs.iter_mut().flatten().map(|fs| ("_fs", &mut fs.id));
        let generic = self.generic_vhost_user.iter_mut().flatten();
        let fs = fs.chain(generic.map(|device| ("_generic_vhost_user", &mut device.id)));
        let pmems = self.pmem.iter_mut().flatten().map(|pmem| ("_pmem", &mut pmem.id));
        let fs = fs.chain(pmems);
        let devices = self.devices.iter_mut().flatten().map(|device| ("_vfio", &mut device.id));
        let vdpas = self.vdpa.iter_mut().flatten().map(|vdpa| ("_vdpa", &mut vdpa.id));
        let users = self.user_devices.iter_mut().flatten();
        let users = users.map(|device| ("_vfio_user", &mut device.id));
        let devices = devices.chain(vdpas).chain(users);
        let vsock = self.vsock.iter_mut().map(|vsock| ("_vsock", &mut vsock.id));
        let mut count = 0_u32;
        for (prefix, id) in disks.chain(nets).chain(fs).chain(devices).chain(vsock) {
            while id.is_none() {
                let name = format!("{prefix}{count}");
                count += 1;
                if ids.insert(name.clone()) {
                    *id = Some(name);
                }
            }
        }
        Ok(())
    }

    fn check_host_devices(&self) -> Result<(), ConfigError> {
        let first = self.devices.iter().flatten().next();
        if let (Some(_), Some(pmem)) = (first, self.pmem.iter().flatten().next()) {
            let problem =
                "persistent memory and passed-through devices are not possible in one VM: \
                           the devices could not reach it"
                    .to_owned();
            let id = pmem.id.clone().unwrap_or_default();
            return Err(ConfigError::Device { what: "pmem", id, problem });
        }
        let mut paths = BTreeSet::new();
        for path in self.devices.iter().flatten().filter_map(|device| device.path.as_ref()) {
            if !paths.insert(path.clone()) {
                return Err(ConfigError::DuplicatePath { path: path.clone() });
            }
        }
        for fd in self.devices.iter().flatten().filter_map(|device| device.fd.as_ref()) {
            let path = PathBuf::from(format!("descriptor {}", fd.number()));
            if !paths.insert(path.clone()) {
                return Err(ConfigError::DuplicatePath { path });
            }
        }
        Ok(())
    }

    /// A vhost-user back end maps guest memory, which private memory does not allow.
    fn check_vhost_user(&self) -> Result<(), ConfigError> {
        match self.vhost_user_devices().first() {
            Some((what, id)) if !self.memory.is_shared() => {
                let option = if matches!(*what, "disk" | "net") { "vhost_user=on " } else { "" };
                let problem = format!("{option}needs --memory shared=on");
                Err(ConfigError::Device { what, id: (*id).to_owned(), problem })
            }
            _ => Ok(()),
        }
    }

    fn check_rate_groups(&self) -> Result<(), ConfigError> {
        let mut groups = BTreeSet::new();
        for RateLimitGroupConfig { id, .. } in self.rate_limit_groups.iter().flatten() {
            if id.is_empty() {
                return Err(ConfigError::EmptyId { family: "rate-limit-group" });
            }
            if !groups.insert(id.as_str()) {
                return Err(ConfigError::DuplicateId { id: id.clone() });
            }
        }
        for disk in self.disks.iter().flatten() {
            if let Some(group) = &disk.rate_limit_group
                && !groups.contains(group.as_str())
            {
                let problem = format!("there is no --rate-limit-group '{group}'");
                let id = disk.id.clone().unwrap_or_default();
                return Err(ConfigError::Device { what: "disk", id, problem });
            }
        }
        Ok(())
    }

    fn check_numa(&self) -> Result<(), ConfigError> {
        let scope = NumaScope {
            max_vcpus: self.cpus.max_vcpus,
            zones: self.memory.zone_ids(),
            segments: self.platform.as_ref().map_or(1, |platform| platform.num_pci_segments),
        };
        numa::validate(self.numa.as_deref().unwrap_or_default(), &scope)
    }

    fn check_numa_devices(&self) -> Result<(), ConfigError> {
        let ids = self.devices.iter().flatten().filter_map(|device| device.id.as_deref());
        numa::check_devices(self.numa.as_deref().unwrap_or_default(), &ids.collect())
    }

    /// Family and id of each device that another process serves over vhost-user.
    pub fn vhost_user_devices(&self) -> Vec<(&'static str, &str)> {
        let disks = self.disks.iter().flatten().filter(|disk| disk.vhost_user);
        let disks = disks.map(|disk| ("disk", &disk.id));
        let fs = self.fs.iter().flatten().map(|fs| ("fs", &fs.id));
        let generic = self.generic_vhost_user.iter().flatten();
        let fs = fs.chain(generic.map(|device| ("generic-vhost-user", &device.id)));
        let nets = self.net.iter().flatten().filter(|net| net.vhost_user);
        let nets = nets.map(|net| ("net", &net.id));
        disks
            .chain(nets)
            .chain(fs)
            .map(|(what, id)| (what, id.as_deref().unwrap_or_default()))
            .collect()
    }
}

fn random_mac() -> Result<MacAddr, ConfigError> {
    random_bytes().map(MacAddr::locally_administered).ok_or(ConfigError::Random)
}

/// Up to 256 random bytes from the host; `None` if it provides none.
pub fn random_bytes<const LEN: usize>() -> Option<[u8; LEN]> {
    let mut bytes = [0_u8; LEN];
    // SAFETY: the kernel writes at most `bytes.len()` bytes into `bytes`, which outlives the call.
    let got = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
    (usize::try_from(got) == Ok(bytes.len())).then_some(bytes)
}
