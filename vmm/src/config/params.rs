// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Converts the option strings of a command line to a [`VmConfig`].
//!
//! Owns which option feeds which field. It must never know a command line parser.

use super::cpus::CpusConfig;
use super::error::ConfigError;
use super::family::Family;
use super::payload::PayloadConfig;
use super::platform::PlatformConfig;
use super::vm::VmConfig;

/// The unparsed option strings of a command line that describe a VM.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VmParams {
    /// `--cpus`.
    pub cpus: Option<String>,
    /// `--memory`.
    pub memory: Option<String>,
    /// `--memory-zone`, each.
    pub memory_zones: Vec<String>,
    /// `--firmware`.
    pub firmware: Option<String>,
    /// `--kernel`.
    pub kernel: Option<String>,
    /// `--initramfs`.
    pub initramfs: Option<String>,
    /// `--cmdline`.
    pub cmdline: Option<String>,
    /// `--igvm`.
    pub igvm: Option<String>,
    /// `--host-data`.
    pub host_data: Option<String>,
    /// `--rate-limit-group`, each.
    pub rate_limit_groups: Vec<String>,
    /// `--disk`, each.
    pub disks: Vec<String>,
    /// `--net`, each.
    pub net: Vec<String>,
    /// `--rng`.
    pub rng: Option<String>,
    /// `--rtc`.
    pub rtc: Option<String>,
    /// `--balloon`.
    pub balloon: Option<String>,
    /// `--fs`, each.
    pub fs: Vec<String>,
    /// `--generic-vhost-user`, each.
    pub generic_vhost_user: Vec<String>,
    /// `--pmem`, each.
    pub pmem: Vec<String>,
    /// `--serial`.
    pub serial: Option<String>,
    /// `--console`.
    pub console: Option<String>,
    /// `--debug-console`.
    pub debug_console: Option<String>,
    /// `--device`, each.
    pub devices: Vec<String>,
    /// `--user-device`, each.
    pub user_devices: Vec<String>,
    /// `--vdpa`, each.
    pub vdpa: Vec<String>,
    /// `--vsock`.
    pub vsock: Option<String>,
    /// `--numa`, each.
    pub numa: Vec<String>,
    /// `--pci-segment`, each.
    pub pci_segments: Vec<String>,
    /// `--platform`.
    pub platform: Option<String>,
    /// `--tpm`.
    pub tpm: Option<String>,
    /// `--watchdog`.
    pub watchdog: bool,
    /// `--pvpanic`.
    pub pvpanic: bool,
    /// `--landlock`.
    pub landlock: bool,
    /// `--landlock-rules`, each.
    pub landlock_rules: Vec<String>,
}

fn named<T: Family>(
    result: Result<T, super::option_string::OptionError>,
) -> Result<T, ConfigError> {
    result.map_err(|source| ConfigError::Option { option: T::NAME, source })
}

fn one<T: Family>(text: Option<&String>) -> Result<Option<T>, ConfigError> {
    text.map(|text| named(T::parse(text))).transpose()
}

fn many<T: Family>(texts: &[String]) -> Result<Option<Vec<T>>, ConfigError> {
    if texts.is_empty() {
        return Ok(None);
    }
    texts.iter().map(|text| named(T::parse(text))).collect::<Result<_, _>>().map(Some)
}

impl VmParams {
    /// Parses all option strings and completes the configuration.
    ///
    /// # Errors
    /// As [`VmConfig::complete`], or an option string cannot be parsed.
    pub fn into_config(self) -> Result<VmConfig, ConfigError> {
        self.raw_config()?.complete()
    }

    /// The same for a VM that is not started, and need not have anything to boot.
    ///
    /// # Errors
    /// As [`Self::into_config`].
    pub fn into_config_to_check(self) -> Result<VmConfig, ConfigError> {
        let mut config = self.raw_config()?;
        let is_given = config.payload.kernel.is_some() || config.payload.firmware.is_some();
        if is_given {
            return config.complete();
        }
        // The rules of a complete configuration ask for one.
        config.payload.kernel = Some("/dev/null".into());
        let mut config = config.complete()?;
        config.payload.kernel = None;
        Ok(config)
    }

    /// Parses all option strings without validating them together.
    ///
    /// # Errors
    /// An option string cannot be parsed.
    pub fn raw_config(&self) -> Result<VmConfig, ConfigError> {
        let mut config = VmConfig {
            payload: PayloadConfig {
                firmware: self.firmware.as_ref().map(Into::into),
                kernel: self.kernel.as_ref().map(Into::into),
                cmdline: self.cmdline.clone(),
                initramfs: self.initramfs.as_ref().map(Into::into),
                igvm: self.igvm.as_ref().map(Into::into),
                host_data: self.host_data.clone(),
            },
            rate_limit_groups: many(&self.rate_limit_groups)?,
            disks: many(&self.disks)?,
            net: many(&self.net)?,
            rng: one(self.rng.as_ref())?.unwrap_or_default(),
            rtc: one(self.rtc.as_ref())?,
            balloon: one(self.balloon.as_ref())?,
            fs: many(&self.fs)?,
            generic_vhost_user: many(&self.generic_vhost_user)?,
            pmem: many(&self.pmem)?,
            serial: one(self.serial.as_ref())?.unwrap_or_default(),
            console: one(self.console.as_ref())?.unwrap_or_default(),
            debug_console: one(self.debug_console.as_ref())?.unwrap_or_default(),
            devices: many(&self.devices)?,
            user_devices: many(&self.user_devices)?,
            vdpa: many(&self.vdpa)?,
            vsock: one(self.vsock.as_ref())?,
            numa: many(&self.numa)?,
            watchdog: self.watchdog,
            pvpanic: self.pvpanic,
            pci_segments: many(&self.pci_segments)?,
            platform: self
                .platform
                .as_ref()
                .map(|text| named(PlatformConfig::parse_platform(text)))
                .transpose()?,
            tpm: one(self.tpm.as_ref())?,
            landlock_enable: self.landlock,
            landlock_rules: many(&self.landlock_rules)?,
            ..VmConfig::default()
        };
        if let Some(cpus) = &self.cpus {
            config.cpus = named(CpusConfig::parse_cpus(cpus))?;
        }
        config.memory = one(self.memory.as_ref())?.unwrap_or_default();
        config.memory.zones = many(&self.memory_zones)?;
        Ok(config)
    }
}
