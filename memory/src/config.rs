// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Configuration of guest RAM: zones, their backings and their properties.
//!
//! Owns the rules that can be checked without the host. Must never touch the host: whether a configuration
//! is valid must not depend on where it is read.

use std::collections::HashSet;
use std::path::PathBuf;

use crate::PAGE_BYTES;

/// Longest zone ID in bytes: it is part of a memfd's name, which the kernel limits to 249.
const ZONE_ID_BYTES_MAX: usize = 128;
/// Most zones: far above any host's number of NUMA nodes times backings.
const ZONES_MAX: usize = 1024;
/// Number of NUMA nodes that a kernel node mask can name.
const NUMA_NODES_MAX: u32 = 1024;

/// All of guest RAM, in the order of its layout.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct RamConfig {
    /// The zones; at least one.
    pub zones: Vec<ZoneSpec>,
}

/// A zone: RAM of one kind. Untrusted until [`RamConfig::validate`] has accepted it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ZoneSpec {
    /// Unique; names the zone in errors, and its memfd (`ram-<id>`).
    pub id: String,
    /// A multiple of the backing's page size.
    pub size_bytes: u64,
    /// The backing.
    pub backing: Backing,
    /// Other processes may map the zone, and writes reach a file that holds data.
    pub shared: bool,
    /// Identical pages may be merged by the host (KSM). Private anonymous memory only.
    pub mergeable: bool,
    /// Use transparent huge pages.
    pub thp: bool,
    /// Populate everything before the guest needs it.
    pub prefault: bool,
    /// Refuse now, rather than fail later, if the host cannot hold the zone.
    pub reserve: bool,
    /// Take the pages from this NUMA node of the host.
    pub host_numa_node: Option<u32>,
    /// Block size, if the guest gets the zone block by block while it runs: see
    /// [`plugging`](crate::plugging). The zone then follows all others.
    pub block_bytes: Option<u64>,
}

impl ZoneSpec {
    /// A zone with the defaults of the command line: `thp=on`, everything else off.
    pub fn new(id: impl Into<String>, size_bytes: u64) -> Self {
        Self {
            id: id.into(),
            size_bytes,
            backing: Backing::Auto,
            shared: false,
            mergeable: false,
            thp: true,
            prefault: false,
            reserve: false,
            host_numa_node: None,
            block_bytes: None,
        }
    }
}

/// Backing of a zone.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Backing {
    /// Memfd or private anonymous memory, by the rules in the crate's documentation.
    #[default]
    Auto,
    /// Private anonymous memory.
    Anonymous,
    /// A memfd.
    Memfd,
    /// A memfd of hugetlb pages.
    Hugetlb {
        /// Size of its pages.
        page_size: HugePageSize,
    },
    /// A file, which is created if necessary; for a directory, an unnamed file in it.
    File(PathBuf),
}

/// Size of a hugetlb page.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum HugePageSize {
    /// The host's default size.
    #[default]
    HostDefault,
    /// 2 MiB.
    Mib2,
    /// 1 GiB.
    Gib1,
}

impl HugePageSize {
    /// The size with this number of bytes.
    ///
    /// # Errors
    /// When this processor has no pages of that size.
    pub fn from_bytes(bytes: u64) -> Result<Self, ConfigError> {
        match bytes {
            0x20_0000 => Ok(Self::Mib2),
            0x4000_0000 => Ok(Self::Gib1),
            _ => Err(ConfigError::HugePageSize { bytes }),
        }
    }

    /// The size in bytes, where it does not depend on the host.
    pub const fn bytes(self) -> Option<u64> {
        match self {
            Self::HostDefault => None,
            Self::Mib2 => Some(2 << 20),
            Self::Gib1 => Some(1 << 30),
        }
    }
}

/// Why a configuration is invalid on any host.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// No zone at all.
    #[error("guest memory has no zone: give it a size")]
    NoZone,
    /// Too many zones.
    #[error("{count} memory zones are more than the {ZONES_MAX} supported")]
    TooManyZones {
        /// Their number.
        count: usize,
    },
    /// An id that is empty, too long, or unprintable.
    #[error(
        "memory zone id {id:?} must have 1 to {ZONE_ID_BYTES_MAX} bytes and no control character"
    )]
    BadId {
        /// The id.
        id: String,
    },
    /// Two zones with the same ID.
    #[error("memory zone id '{id}' is used twice")]
    DuplicateId {
        /// The id.
        id: String,
    },
    /// A zone of size zero.
    #[error("memory zone '{id}' has size 0")]
    ZeroSize {
        /// The zone.
        id: String,
    },
    /// A size that is not a whole number of pages.
    #[error(
        "size {size_bytes} of memory zone '{id}' is not a multiple of its page size, \
         {page_bytes} bytes"
    )]
    OddSize {
        /// The zone.
        id: String,
        /// Its size.
        size_bytes: u64,
        /// The page size of its backing.
        page_bytes: u64,
    },
    /// Settings that exclude each other.
    #[error("memory zone '{id}': {what}")]
    Contradiction {
        /// The zone.
        id: String,
        /// The settings.
        what: &'static str,
    },
    /// A page size that does not exist.
    #[error("huge pages of {bytes} bytes do not exist here: use 2M or 1G")]
    HugePageSize {
        /// The requested size.
        bytes: u64,
    },
    /// A node number that no kernel supports.
    #[error("memory zone '{id}': host NUMA node {node} is not below {NUMA_NODES_MAX}")]
    BadNode {
        /// The zone.
        id: String,
        /// The node.
        node: u32,
    },
}

impl RamConfig {
    /// Checks everything that does not depend on the host.
    ///
    /// # Errors
    /// The first rule that is violated, with the zone.
    pub fn validate(&self) -> Result<(), ConfigError> {
        if self.zones.is_empty() {
            return Err(ConfigError::NoZone);
        }
        if self.zones.len() > ZONES_MAX {
            return Err(ConfigError::TooManyZones { count: self.zones.len() });
        }
        let mut ids = HashSet::new();
        for zone in &self.zones {
            zone.validate()?;
            if !ids.insert(zone.id.as_str()) {
                return Err(ConfigError::DuplicateId { id: zone.id.clone() });
            }
        }
        Ok(())
    }
}

impl ZoneSpec {
    fn validate(&self) -> Result<(), ConfigError> {
        let id = || self.id.clone();
        let bad_length = self.id.is_empty() || self.id.len() > ZONE_ID_BYTES_MAX;
        if bad_length || self.id.chars().any(char::is_control) {
            return Err(ConfigError::BadId { id: id() });
        }
        if self.size_bytes == 0 {
            return Err(ConfigError::ZeroSize { id: id() });
        }
        let page_bytes = match self.backing {
            Backing::Hugetlb { page_size } => page_size.bytes().unwrap_or(PAGE_BYTES),
            _ => PAGE_BYTES,
        };
        self.check_page_size(page_bytes)?;
        if let Some(node) = self.host_numa_node.filter(|node| *node >= NUMA_NODES_MAX) {
            return Err(ConfigError::BadNode { id: id(), node });
        }
        match self.contradiction() {
            Some(what) => Err(ConfigError::Contradiction { id: id(), what }),
            None => Ok(()),
        }
    }

    pub(crate) fn check_page_size(&self, page_bytes: u64) -> Result<(), ConfigError> {
        if self.size_bytes.is_multiple_of(page_bytes) {
            return Ok(());
        }
        let (id, size_bytes) = (self.id.clone(), self.size_bytes);
        Err(ConfigError::OddSize { id, size_bytes, page_bytes })
    }

    fn contradiction(&self) -> Option<&'static str> {
        match self.backing {
            Backing::Anonymous if self.shared => {
                Some("private anonymous memory cannot have shared=on")
            }
            Backing::File(ref path) if path.as_os_str().is_empty() => Some("file= has no path"),
            _ => self.bad_blocks(),
        }
    }

    fn bad_blocks(&self) -> Option<&'static str> {
        let block_bytes = self.block_bytes?;
        let page_bytes = match self.backing {
            Backing::Hugetlb { page_size } => page_size.bytes().unwrap_or(PAGE_BYTES),
            Backing::File(_) => return Some("a file cannot be plugged in block by block"),
            _ => PAGE_BYTES,
        };
        let fits = block_bytes.is_power_of_two()
            && block_bytes >= page_bytes
            && self.size_bytes.is_multiple_of(block_bytes);
        match (fits, self.prefault) {
            (false, _) => {
                Some("its size is not a multiple of its blocks, which are huge pages or more")
            }
            (true, true) => Some("what is plugged in later cannot be populated before"),
            (true, false) => None,
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;

    fn check(change: impl FnOnce(&mut ZoneSpec)) -> Result<(), ConfigError> {
        let mut zone = ZoneSpec::new("z", 1 << 30);
        change(&mut zone);
        RamConfig { zones: vec![zone] }.validate()
    }

    #[test]
    fn the_defaults_are_valid() {
        assert_eq!(check(|_| {}), Ok(()));
    }

    #[test]
    fn sizes_must_be_whole_pages() {
        assert!(matches!(check(|z| z.size_bytes = 0), Err(ConfigError::ZeroSize { .. })));
        let odd = check(|z| z.size_bytes = 4097).unwrap_err();
        assert!(odd.to_string().contains("'z'") && odd.to_string().contains("4097"), "{odd}");
        let huge = |page_size, size_bytes| {
            check(|z| {
                z.backing = Backing::Hugetlb { page_size };
                z.size_bytes = size_bytes;
            })
        };
        assert_eq!(huge(HugePageSize::Mib2, 4 << 20), Ok(()));
        assert!(matches!(huge(HugePageSize::Mib2, 3 << 20), Err(ConfigError::OddSize { .. })));
        assert!(matches!(huge(HugePageSize::Gib1, 3 << 29), Err(ConfigError::OddSize { .. })));
    }

    #[test]
    fn ids_are_named_and_unique() {
        let long = "i".repeat(129);
        for id in ["", "a\0b", "a\nb", &long] {
            let result = check(|z| z.id = id.to_owned());
            assert!(matches!(result, Err(ConfigError::BadId { .. })), "{id:?}");
        }
        let zones = vec![ZoneSpec::new("a", 4096), ZoneSpec::new("a", 4096)];
        let twice = RamConfig { zones }.validate();
        assert_eq!(twice, Err(ConfigError::DuplicateId { id: "a".into() }));
        assert_eq!(RamConfig::default().validate(), Err(ConfigError::NoZone));
        let zones = (0..1025).map(|n| ZoneSpec::new(n.to_string(), 4096)).collect();
        let many = RamConfig { zones }.validate();
        assert_eq!(many, Err(ConfigError::TooManyZones { count: 1025 }));
    }

    #[test]
    fn wishes_that_exclude_each_other_are_refused() {
        let private = check(|z| {
            z.backing = Backing::Anonymous;
            z.shared = true;
        });
        assert!(matches!(private, Err(ConfigError::Contradiction { .. })));
        let nowhere = check(|z| z.backing = Backing::File(PathBuf::new()));
        assert!(matches!(nowhere, Err(ConfigError::Contradiction { .. })));
        let node = check(|z| z.host_numa_node = Some(1024));
        assert!(matches!(node, Err(ConfigError::BadNode { node: 1024, .. })));
    }

    #[test]
    fn blocks_are_pages_and_divide_the_zone() {
        let blocks = |block_bytes, change: fn(&mut ZoneSpec)| {
            check(|z| {
                z.block_bytes = Some(block_bytes);
                change(z);
            })
        };
        assert_eq!(blocks(2 << 20, |_| {}), Ok(()));
        for (block_bytes, change) in [
            (0, (|_| {}) as fn(&mut ZoneSpec)),
            (3 << 20, |_| {}),
            (1 << 31, |_| {}),
            (2 << 20, |z| z.prefault = true),
            (2 << 20, |z| z.backing = Backing::File("f".into())),
            (2 << 20, |z| z.backing = Backing::Hugetlb { page_size: HugePageSize::Gib1 }),
        ] {
            let refused = blocks(block_bytes, change);
            assert!(matches!(refused, Err(ConfigError::Contradiction { .. })), "{refused:?}");
        }
    }

    #[test]
    fn huge_page_sizes_are_those_of_the_processor() {
        assert_eq!(HugePageSize::from_bytes(2 << 20), Ok(HugePageSize::Mib2));
        assert_eq!(HugePageSize::from_bytes(1 << 30), Ok(HugePageSize::Gib1));
        assert!(HugePageSize::from_bytes(64 << 10).is_err());
    }
}
