// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The configuration file: slots, users, and limits on processor time and bandwidth.
//!
//! Owns its form (TOML) and its rules. Must never look at the host: whether there are such pages is
//! found out when they are made.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

use pci_address::Bdf;
use prezero_pool_client::{SlotPages, ZONES_MAX};
use serde::Deserialize;
use thiserror::Error;

/// Slots in all, of which each zone is a descriptor.
const SLOTS_MAX: u64 = 256;
/// Memory of a slot, and of a zone: more than a processor's addresses reach with memory around it.
const SIZE_BYTES_MAX: u64 = 64 << 40;
/// Threads for each node; memory bandwidth ends before.
const THREADS_MAX: u32 = 64;
/// Bytes per second that zeroing may use at most if nothing is said: about what one processor does, so that
/// more has to be asked for.
const BANDWIDTH_DEFAULT: u64 = 16 << 30;
/// The same while the host is busy.
const BANDWIDTH_BUSY_DEFAULT: u64 = 2 << 30;
/// Default for the memory that is left to the rest of the host.
const KEEP_FREE_DEFAULT: u64 = 1 << 30;
/// How much larger than asked for a slot may be.
const WASTE_PERCENT_DEFAULT: u32 = 25;

/// A configuration that cannot be used.
#[derive(Debug, Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read the configuration file {}", path.display())]
    Read {
        /// Its path.
        path: PathBuf,
        /// The host's answer.
        #[source]
        source: io::Error,
    },
    /// It is not TOML of this form.
    #[error("the configuration is not valid")]
    Syntax(#[from] toml::de::Error),
    /// A value makes no sense.
    #[error("{key} = {value:?}: {problem}")]
    Value {
        /// Where.
        key: String,
        /// What stands there.
        value: String,
        /// What is wrong with it.
        problem: &'static str,
    },
}

/// The memory of one zone of a VM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SlotZone {
    /// How long its memfd is.
    pub size_bytes: u64,
    /// What it consists of.
    pub pages: SlotPages,
    /// The NUMA node that it comes from; any if nothing is said.
    pub node: Option<u32>,
}

/// Slots of one kind.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Class {
    /// What each consists of: of one, unless it has a device.
    pub zones: Vec<SlotZone>,
    /// How many are kept.
    pub count: u32,
    /// What it is mapped for; then there is one of it.
    pub device: Option<SlotDevice>,
}

impl Class {
    /// Bytes of a slot.
    pub fn size_bytes(&self) -> u64 {
        self.zones.iter().map(|zone| zone.size_bytes).fold(0, u64::saturating_add)
    }

    /// The node that all of a slot comes from, if it is one.
    pub fn only_node(&self) -> Option<u32> {
        let node = self.zones.first()?.node?;
        self.zones.iter().all(|zone| zone.node == Some(node)).then_some(node)
    }
}

/// A device that goes with a slot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SlotDevice {
    /// Which.
    pub address: Bdf,
    /// Users that may have it, besides root and the pool's own user.
    pub users: Vec<u32>,
    /// The addresses above 4 GiB at which its VM has no memory; if nothing is said, those that the device's IOMMU
    /// keeps.
    pub high_hole: Option<HighHole>,
}

/// Addresses above 4 GiB without memory, as a VM's `high_hole`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum HighHole {
    /// None.
    Off,
    /// Those that AMD's IOMMU keeps.
    HyperTransport,
}

/// What may be used again of memory that comes back.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Reuse {
    /// Nothing: its pages go back to the kernel, and new ones take their place, for any user.
    #[default]
    Never,
    /// Its pages, cleared in place, for the user that had them.
    SameUser,
}

/// How much each user may have.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct UserLimits {
    /// Bytes for users that are not named.
    pub default_bytes: u64,
    /// Bytes by user id.
    pub users: BTreeMap<u32, u64>,
}

impl UserLimits {
    /// Bytes that `uid` may have at the same time. Root and the pool's own user (`own_uid`) could
    /// take the host's memory anyway.
    pub fn of(&self, uid: u32, own_uid: u32) -> u64 {
        let trusted = uid == 0 || uid == own_uid;
        let unnamed = if trusted { u64::MAX } else { self.default_bytes };
        self.users.get(&uid).copied().unwrap_or(unnamed)
    }
}

/// All of it, checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// Where VMMs ask.
    pub socket: PathBuf,
    /// Its permission bits.
    pub socket_mode: u32,
    /// Where statistics are read.
    pub stats_socket: Option<PathBuf>,
    /// Threads for each NUMA node with slots; they work on one slot at a time.
    pub threads: NonZeroUsize,
    /// Threads run only where a processor would idle otherwise.
    pub idle_only: bool,
    /// Most bytes per second over all threads; no limit if nothing.
    pub bandwidth: Option<u64>,
    /// The same while the host is busy.
    pub bandwidth_busy: u64,
    /// What may be used again.
    pub reuse: Reuse,
    /// Memory that the host keeps.
    pub keep_free_bytes: u64,
    /// How much larger than asked for a slot may be, in hundredths.
    pub max_waste_percent: u32,
    /// Limits per user.
    pub limits: UserLimits,
    /// What is kept.
    pub classes: Vec<Class>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawConfig {
    socket: PathBuf,
    socket_mode: Option<String>,
    stats_socket: Option<PathBuf>,
    threads: Option<u32>,
    idle_only: Option<bool>,
    bandwidth: Option<String>,
    bandwidth_busy: Option<String>,
    #[serde(default)]
    reuse: Reuse,
    keep_free: Option<String>,
    max_waste_percent: Option<u32>,
    #[serde(default)]
    limits: RawLimits,
    #[serde(default)]
    slots: Vec<RawSlots>,
    #[serde(default)]
    device_slots: Vec<RawDeviceSlot>,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawLimits {
    default: Option<String>,
    #[serde(default)]
    users: BTreeMap<String, String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawSlots {
    size: String,
    pages: String,
    node: Option<u32>,
    count: u32,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawDeviceSlot {
    device: String,
    size: Option<String>,
    pages: Option<String>,
    node: Option<u32>,
    zones: Option<Vec<RawZone>>,
    high_hole: Option<HighHole>,
    #[serde(default)]
    users: Vec<u32>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawZone {
    size: String,
    pages: String,
    node: Option<u32>,
}

fn refuse<T>(
    key: impl Into<String>,
    value: impl Into<String>,
    problem: &'static str,
) -> Result<T, ConfigError> {
    Err(ConfigError::Value { key: key.into(), value: value.into(), problem })
}

/// `4G` and the like.
fn bytes(key: &str, text: &str) -> Result<u64, ConfigError> {
    let (digits, shift) = match text.char_indices().next_back() {
        Some((at, 'K')) => (text.get(..at), 10),
        Some((at, 'M')) => (text.get(..at), 20),
        Some((at, 'G')) => (text.get(..at), 30),
        Some((at, 'T')) => (text.get(..at), 40),
        _ => (Some(text), 0),
    };
    let number = digits.and_then(|digits| digits.parse::<u64>().ok());
    match number.and_then(|number| number.checked_mul(1 << shift)) {
        Some(bytes) => Ok(bytes),
        None => refuse(key, text, "expected a number of bytes, with K, M, G or T"),
    }
}

fn optional_bytes(key: &str, text: Option<&String>, default: u64) -> Result<u64, ConfigError> {
    text.map_or(Ok(default), |text| bytes(key, text))
}

/// Memory as the table `table` describes it.
fn memory(
    table: &str,
    size: &str,
    pages: &str,
    node: Option<u32>,
) -> Result<SlotZone, ConfigError> {
    let key = |name: &str| format!("{table}.{name}");
    let (pages, page_bytes) = match pages {
        "4K" => (SlotPages::Small, 4096),
        "thp" => (SlotPages::Transparent, 2 << 20),
        "2M" => (SlotPages::Huge2Mib, 2 << 20),
        "1G" => (SlotPages::Huge1Gib, 1 << 30),
        other => return refuse(key("pages"), other, "expected 4K, thp, 2M or 1G"),
    };
    let size_bytes = bytes(&key("size"), size)?;
    if size_bytes == 0 || !size_bytes.is_multiple_of(page_bytes) {
        return refuse(key("size"), size, "it is not a multiple of the page size");
    }
    // What a node number may be is the kernel's to say.
    if size_bytes > SIZE_BYTES_MAX {
        return refuse(key("size"), size, "more than 64 TiB");
    }
    Ok(SlotZone { size_bytes, pages, node })
}

impl RawSlots {
    fn check(&self) -> Result<Class, ConfigError> {
        let zones = vec![memory("slots", &self.size, &self.pages, self.node)?];
        Ok(Class { zones, count: self.count, device: None })
    }
}

impl RawDeviceSlot {
    fn check(&self) -> Result<Class, ConfigError> {
        let zones = self.zones()?;
        let size_bytes = zones.iter().map(|zone| zone.size_bytes).fold(0, u64::saturating_add);
        if size_bytes > SIZE_BYTES_MAX {
            return refuse("device_slots.zones", size_bytes.to_string(), "more than 64 TiB in all");
        }
        let Ok(address) = self.device.parse() else {
            let problem = "expected the address of a PCI device such as 0000:65:00.0";
            return refuse("device_slots.device", &self.device, problem);
        };
        let (users, high_hole) = (self.users.clone(), self.high_hole);
        let device = Some(SlotDevice { address, users, high_hole });
        Ok(Class { zones, count: 1, device })
    }

    fn zones(&self) -> Result<Vec<SlotZone>, ConfigError> {
        let table = "device_slots";
        match (&self.zones, &self.size, &self.pages) {
            (None, Some(size), Some(pages)) => Ok(vec![memory(table, size, pages, self.node)?]),
            (Some(zones), None, None) if self.node.is_none() => {
                if !(1..=ZONES_MAX).contains(&zones.len()) {
                    let count = zones.len().to_string();
                    return refuse("device_slots.zones", count, "expected 1 to 16 zones");
                }
                let zone = |zone: &RawZone| {
                    memory("device_slots.zones", &zone.size, &zone.pages, zone.node)
                };
                zones.iter().map(zone).collect()
            }
            _ => {
                let problem =
                    "expected either size and pages, perhaps with a node, or zones that have them";
                refuse(table, &self.device, problem)
            }
        }
    }
}

// The message of `zones` says so.
const _: () = assert!(ZONES_MAX == 16);

impl Config {
    /// Reads and checks a file.
    ///
    /// # Errors
    /// The file is not there, or something in it makes no sense.
    pub fn read(path: &Path) -> Result<Self, ConfigError> {
        let text = std::fs::read_to_string(path)
            .map_err(|source| ConfigError::Read { path: path.to_owned(), source })?;
        Self::parse(&text)
    }

    /// Reads and checks a text.
    ///
    /// # Errors
    /// Something in it makes no sense.
    pub fn parse(text: &str) -> Result<Self, ConfigError> {
        let raw: RawConfig = toml::from_str(text)?;
        let mode = raw.socket_mode.as_deref().unwrap_or("0660");
        let socket_mode = match u32::from_str_radix(mode, 8) {
            Ok(bits) if bits <= 0o777 => bits,
            _ => return refuse("socket_mode", mode, "expected permission bits such as \"0660\""),
        };
        let threads = raw.threads.unwrap_or(1);
        let Some(threads) =
            NonZeroUsize::new(usize::try_from(threads.min(THREADS_MAX)).unwrap_or(1))
        else {
            return refuse("threads", "0", "at least one thread has to do the work");
        };
        let bandwidth = optional_bytes("bandwidth", raw.bandwidth.as_ref(), BANDWIDTH_DEFAULT)?;
        let bandwidth_busy =
            optional_bytes("bandwidth_busy", raw.bandwidth_busy.as_ref(), BANDWIDTH_BUSY_DEFAULT)?;
        if bandwidth_busy == 0 {
            let problem =
                "a busy host would never have memory; without a limit use bandwidth = \"0\"";
            return refuse("bandwidth_busy", "0", problem);
        }
        let keep_free_bytes =
            optional_bytes("keep_free", raw.keep_free.as_ref(), KEEP_FREE_DEFAULT)?;
        let default_bytes = optional_bytes("limits.default", raw.limits.default.as_ref(), 0)?;
        let mut users = BTreeMap::new();
        for (name, limit) in &raw.limits.users {
            let Ok(uid) = name.parse::<u32>() else {
                return refuse("limits.users", name, "expected a numeric user id");
            };
            users.insert(uid, bytes(&format!("limits.users.{name}"), limit)?);
        }
        let plain = raw.slots.iter().map(RawSlots::check);
        let with_device = raw.device_slots.iter().map(RawDeviceSlot::check);
        let classes = plain.chain(with_device).collect::<Result<Vec<_>, _>>()?;
        let mut devices = BTreeSet::new();
        for device in classes.iter().filter_map(|class| class.device.as_ref()) {
            if !devices.insert(device.address) {
                let (key, problem) = ("device_slots.device", "a device can be in one slot only");
                return refuse(key, device.address.to_string(), problem);
            }
        }
        let zones = |class: &Class| u64::from(class.count).saturating_mul(class.zones.len() as u64);
        let count = classes.iter().map(zones).fold(0, u64::saturating_add);
        if count > SLOTS_MAX {
            let problem = "more than 256 slots in all, of which each zone counts";
            return refuse("slots", count.to_string(), problem);
        }
        Ok(Self {
            socket: raw.socket,
            socket_mode,
            stats_socket: raw.stats_socket,
            threads,
            idle_only: raw.idle_only.unwrap_or(true),
            bandwidth: (bandwidth > 0).then_some(bandwidth),
            bandwidth_busy,
            reuse: raw.reuse,
            keep_free_bytes,
            max_waste_percent: raw.max_waste_percent.unwrap_or(WASTE_PERCENT_DEFAULT),
            limits: UserLimits { default_bytes, users },
            classes,
        })
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test that cannot unwrap has failed")]

    use super::*;

    #[test]
    fn a_whole_configuration_is_read() {
        let config = Config::parse(
            r#"
            socket = "/run/pool.sock"
            stats_socket = "/run/stats.sock"
            socket_mode = "0666"
            threads = 2
            bandwidth = "0"
            bandwidth_busy = "1G"
            reuse = "same-user"
            keep_free = "512M"
            max_waste_percent = 0
            [limits]
            default = "4G"
            [limits.users]
            1000 = "64G"
            [[slots]]
            size = "4G"
            pages = "2M"
            node = 1
            count = 3
            [[device_slots]]
            device = "0000:65:00.0"
            size = "8G"
            pages = "thp"
            users = [1000]
            "#,
        )
        .unwrap();
        assert_eq!((config.socket_mode, config.threads.get()), (0o666, 2));
        assert_eq!((config.bandwidth, config.keep_free_bytes), (None, 512 << 20));
        assert_eq!((config.bandwidth_busy, config.reuse), (1 << 30, Reuse::SameUser));
        let zone = |size_bytes, pages, node| SlotZone { size_bytes, pages, node };
        let zones = vec![zone(4 << 30, SlotPages::Huge2Mib, Some(1))];
        let class = Class { zones, count: 3, device: None };
        let address = "0000:65:00.0".parse().unwrap();
        let device = Some(SlotDevice { address, users: vec![1000], high_hole: None });
        let zones = vec![zone(8 << 30, SlotPages::Transparent, None)];
        let with_device = Class { zones, count: 1, device };
        assert_eq!(config.classes, [class, with_device]);
        let limit = |uid| config.limits.of(uid, 7);
        assert_eq!([limit(1000), limit(1001)], [64 << 30, 4 << 30]);
        assert_eq!([limit(0), limit(7)], [u64::MAX, u64::MAX]);
    }

    #[test]
    fn no_other_user_gets_anything_unless_it_is_configured() {
        let config = Config::parse("socket = '/s'").unwrap();
        assert_eq!(config.limits.of(1000, 7), 0);
        assert_eq!((config.bandwidth, config.idle_only), (Some(16 << 30), true));
        assert_eq!((config.bandwidth_busy, config.reuse), (2 << 30, Reuse::Never));
    }

    #[test]
    fn a_device_is_in_one_slot() {
        let slot = "[[device_slots]]\ndevice = '0000:65:00.0'\nsize = '2M'\npages = '2M'\n";
        assert!(Config::parse(&format!("socket = '/s'\n{slot}")).is_ok());
        let error = Config::parse(&format!("socket = '/s'\n{slot}{slot}")).unwrap_err();
        assert!(error.to_string().contains("one slot only"), "{error}");
        let elsewhere = slot.replace("0000:65:00.0", "/dev/vfio/devices/vfio0");
        let error = Config::parse(&format!("socket = '/s'\n{elsewhere}")).unwrap_err();
        assert!(error.to_string().contains("device_slots.device"), "{error}");
    }

    #[test]
    fn a_slot_with_a_device_may_have_zones_and_a_hole() {
        let parse = |more: &str| {
            let slot = format!("socket = '/s'\n[[device_slots]]\ndevice = '0000:65:00.0'\n{more}");
            Config::parse(&slot).map(|config| config.classes[0].clone())
        };
        let zones = "zones = [{ size = '2T', pages = '1G', node = 0 }, \
                     { size = '1T', pages = '2M', node = 1 }]\n";
        let class = parse(&format!("{zones}high_hole = 'hypertransport'")).unwrap();
        assert_eq!((class.size_bytes(), class.only_node()), (3 << 40, None));
        let nodes: Vec<_> = class.zones.iter().map(|zone| (zone.pages, zone.node)).collect();
        assert_eq!(nodes, [(SlotPages::Huge1Gib, Some(0)), (SlotPages::Huge2Mib, Some(1))]);
        assert_eq!(class.device.unwrap().high_hole, Some(HighHole::HyperTransport));
        let one = parse("size = '1G'\npages = '1G'\nnode = 3\nhigh_hole = 'off'").unwrap();
        assert_eq!((one.zones.len(), one.only_node()), (1, Some(3)));
        assert_eq!(one.device.unwrap().high_hole, Some(HighHole::Off));
        let zone = "{ size = '32T', pages = '1G' }";
        for (wrong, named) in [
            (String::new(), "expected either"),
            ("size = '1G'".to_owned(), "expected either"),
            (format!("{zones}size = '1G'\npages = '1G'"), "expected either"),
            (format!("{zones}node = 1"), "expected either"),
            ("zones = []".to_owned(), "1 to 16 zones"),
            (format!("zones = [{}]", [zone; 17].join(",")), "1 to 16 zones"),
            (format!("zones = [{}]", [zone; 3].join(",")), "64 TiB in all"),
            ("zones = [{ size = '3M', pages = '2M' }]".to_owned(), "device_slots.zones.size"),
            (format!("{zones}high_hole = 'amd'"), "high_hole"),
        ] {
            let error = parse(&wrong).unwrap_err();
            let text = error_text::chain(&error);
            assert!(text.contains(named), "{wrong}: {text}");
        }
    }

    #[test]
    fn what_makes_no_sense_is_named() {
        for (text, named) in [
            ("", "socket"),
            ("socket = '/s'\nsoket_mode = '1'", "soket_mode"),
            ("socket = '/s'\nsocket_mode = '9'", "socket_mode"),
            ("socket = '/s'\nthreads = 0", "threads"),
            ("socket = '/s'\nbandwidth = 'fast'", "bandwidth"),
            ("socket = '/s'\nbandwidth_busy = '0'", "bandwidth_busy"),
            ("socket = '/s'\nreuse = 'always'", "same-user"),
            ("socket = '/s'\n[limits.users]\nme = '1G'", "me"),
            ("socket = '/s'\n[[slots]]\nsize = '3M'\npages = '2M'\ncount = 1", "slots.size"),
            ("socket = '/s'\n[[slots]]\nsize = '2M'\npages = '4M'\ncount = 1", "slots.pages"),
            ("socket = '/s'\n[[slots]]\nsize = '2M'\npages = '4K'\ncount = 300", "256"),
        ] {
            let error = Config::parse(text).unwrap_err();
            let chain = error_text::chain(&error);
            assert!(chain.contains(named), "{text:?}: {chain}");
        }
    }
}
