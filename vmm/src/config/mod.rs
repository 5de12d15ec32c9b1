// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The configuration of a VM: one module per option family, and the rules across families.
//!
//! ```text
//! command line ──> VmParams ──> raw VmConfig ──complete()──> VmConfig ──> the VM, vm.info,
//! HTTP body    ──> serde    ──^                                           the migration
//! ```
//!
//! An option is defined once, in its family ([`family`], with its [`enums`]); option string, JSON, schema, help and
//! reference page are made from that. Rules within a family live alongside it, rules across families
//! in [`vm`]. Nothing in here opens a file, a device or a socket.

pub mod balloon;
pub mod codec;
pub mod console;
pub mod cpu_baseline;
pub mod cpus;
pub mod descriptor;
pub mod device;
pub mod disk;
pub mod enums;
pub mod error;
mod exclusive;
pub mod family;
pub(crate) mod foreign;
pub mod fs;
pub mod generic_vhost_user;
pub mod grant;
pub mod hotplug;
mod iommu;
pub mod landlock;
pub mod memory;
pub mod migration;
pub mod net;
pub mod numa;
pub mod on_platform;
pub mod option_string;
pub mod params;
pub mod payload;
pub mod platform;
pub mod pmem;
pub mod prefault;
pub mod rate_limiter;
pub mod reference;
pub mod resize;
pub mod rng;
pub mod rtc;
pub mod segments;
pub mod snapshot_format;
pub mod tpm;
pub mod user_device;
pub mod value;
pub mod vdpa;
pub mod vm;
pub mod vsock;
pub mod zone_update;

#[cfg(test)]
mod listed_tests;
#[cfg(test)]
mod tests;

pub use balloon::BalloonConfig;
pub use console::{ConsoleConfig, ConsoleMode, DebugConsoleConfig, SerialConfig};
pub use cpus::{CoreSchedulingMode, CpuAffinity, CpuTopology, CpusConfig};
pub use descriptor::{ArrivingFds, ConfigFd, ConfigFds};
pub use device::{DeviceConfig, PinMode};
pub use disk::{DiskConfig, ImageType, LockGranularity, OnFull};
pub use error::ConfigError;
pub use family::Family;
pub use fs::FsConfig;
pub use generic_vhost_user::GenericVhostUserConfig;
pub use grant::Grant;
pub use hotplug::{NewDevice, VmRemoveDevice};
pub use landlock::{LandlockConfig, RuleAccess};
pub use memory::{MemoryConfig, MemoryZoneConfig};
pub use migration::{
    FaultSourceChoice, ForceData, GuestClock, MemoryRestoreMode, MigrationRecoverData,
    ReceiveMigrationData, RestoreConfig, SendMigrationData, VmCoredumpData, VmSnapshotConfig,
};
pub use net::NetConfig;
pub use option_string::OptionError;
pub use params::VmParams;
pub use payload::PayloadConfig;
pub use platform::PlatformConfig;
pub use pmem::PmemConfig;
pub use prefault::Prefault;
pub use resize::{VmResize, VmResizeDisk, VmResizeZone};
pub use rng::RngConfig;
pub use rtc::RtcConfig;
pub use snapshot_format::SnapshotFormat;
pub use user_device::UserDeviceConfig;
pub use value::MacAddr;
pub use vdpa::VdpaConfig;
pub use vm::{VmConfig, random_bytes};
pub use vsock::VsockConfig;

use value::FieldValue;

/// Refuses all unsupported options that are set in `value`, together.
///
/// # Errors
/// [`ConfigError::Unsupported`] with the JSON paths.
pub fn refuse_unsupported<T: FieldValue>(value: &T) -> Result<(), ConfigError> {
    let mut names = Vec::new();
    value.refuse("", &mut names);
    if names.is_empty() { Ok(()) } else { Err(ConfigError::Unsupported { names }) }
}

/// Fuzzes the option string parsers; the first line selects the family.
#[cfg(any(test, feature = "testing"))]
pub fn fuzz_option_string(data: &[u8]) {
    fn check<T: Family + std::fmt::Debug>(text: &str) {
        if let Ok(value) = T::parse(text) {
            let printed = value.print();
            let again = T::parse(&printed);
            assert_eq!(again.as_ref(), Ok(&value), "{text:?} printed as {printed:?}");
        }
    }
    let Ok(text) = std::str::from_utf8(data) else { return };
    let (family, text) = text.split_once('\n').unwrap_or(("", text));
    match family {
        "cpus" => {
            let _ = CpusConfig::parse_cpus(text);
            check::<CpusConfig>(text);
        }
        "memory" => check::<MemoryConfig>(text),
        "memory-zone" => check::<MemoryZoneConfig>(text),
        "platform" => check::<PlatformConfig>(text),
        "net" => check::<NetConfig>(text),
        "fs" => check::<FsConfig>(text),
        "generic-vhost-user" => check::<GenericVhostUserConfig>(text),
        "user-device" => check::<UserDeviceConfig>(text),
        "vdpa" => check::<VdpaConfig>(text),
        "rng" => check::<RngConfig>(text),
        "rtc" => check::<RtcConfig>(text),
        "balloon" => check::<BalloonConfig>(text),
        "console" => check::<ConsoleConfig>(text),
        "serial" => check::<SerialConfig>(text),
        "debug-console" => check::<DebugConsoleConfig>(text),
        "numa" => check::<numa::NumaConfig>(text),
        "pci-segment" => check::<platform::PciSegmentConfig>(text),
        "device" => check::<DeviceConfig>(text),
        "tpm" => check::<tpm::TpmConfig>(text),
        "vsock" => check::<VsockConfig>(text),
        "send-migration" => {
            let _ = SendMigrationData::parse_or_url(text).map(|data| data.validate());
            check::<SendMigrationData>(text);
        }
        "receive-migration" => {
            let _ = ReceiveMigrationData::parse_or_url(text).map(|data| data.validate());
            check::<ReceiveMigrationData>(text);
        }
        "restore" => check::<RestoreConfig>(text),
        "landlock-rules" => check::<LandlockConfig>(text),
        "rate-limit-group" => check::<rate_limiter::RateLimitGroupConfig>(text),
        _ => check::<DiskConfig>(text),
    }
}

/// Fuzzes the JSON parsers of the API.
#[cfg(any(test, feature = "testing"))]
pub fn fuzz_api_json(data: &[u8]) {
    if let Ok(config) = serde_json::from_slice::<VmConfig>(data)
        && let Ok(config) = config.complete()
    {
        // A complete configuration survives a round trip through JSON and stays complete.
        let json = serde_json::to_vec(&config).unwrap_or_default();
        let again = serde_json::from_slice::<VmConfig>(&json).map_err(|e| e.to_string());
        let again = again.and_then(|config| config.complete().map_err(|e| e.to_string()));
        assert_eq!(again.as_ref().map(|config| &config.payload), Ok(&config.payload));
    }
    let config = VmConfig::default();
    let _ = serde_json::from_slice(data).map(|it| NewDevice::Host(it).add_to(&config));
    let _ = serde_json::from_slice(data).map(|it| NewDevice::Disk(it).add_to(&config));
    let _ = serde_json::from_slice(data).map(|it| NewDevice::Net(it).add_to(&config));
    let _ = serde_json::from_slice(data).map(|it| NewDevice::Fs(it).add_to(&config));
    let _ = serde_json::from_slice(data).map(|it| NewDevice::GenericVhostUser(it).add_to(&config));
    let _ = serde_json::from_slice(data).map(|it| NewDevice::User(it).add_to(&config));
    let _ = serde_json::from_slice(data).map(|it| NewDevice::Vdpa(it).add_to(&config));
    let _ = serde_json::from_slice(data).map(|it| NewDevice::Vsock(it).add_to(&config));
    let _ = serde_json::from_slice::<SendMigrationData>(data).map(|data| data.validate());
    let _ = serde_json::from_slice::<ReceiveMigrationData>(data).map(|data| data.validate());
    let _ = serde_json::from_slice::<RestoreConfig>(data)
        .map(|data| data.arriving_fds().place(&mut VmConfig::default()));
}
