// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! File descriptors in a configuration, and those that come with a request for an incoming VM.
//!
//! Owns a descriptor that came with a request for as long as any configuration names it. An
//! inherited one belongs to the process that started this one and is never closed. A number means nothing
//! in another process, so it is written and read as -1. Nothing here is opened; a device that uses
//! a descriptor gets a duplicate.

use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd, OwnedFd};
use std::sync::Arc;

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use utoipa::openapi::RefOr;
use utoipa::openapi::schema::Schema;

use super::codec::{JsonOnly, ValueCodec, pair_items};
use super::error::ConfigError;
use super::family::option_family;
use super::option_string::list_items;
use super::value::FieldValue;
use super::{ReceiveMigrationData, RestoreConfig, VmConfig};

/// A descriptor that the configuration names.
#[derive(Clone, Debug)]
pub struct ConfigFd {
    number: i32,
    owner: Option<Arc<OwnedFd>>,
}

/// Equal if the numbers are equal.
impl PartialEq for ConfigFd {
    fn eq(&self, other: &Self) -> bool {
        self.number == other.number
    }
}

impl Eq for ConfigFd {}

impl ConfigFd {
    /// A descriptor of another process, which cannot be used here.
    const ELSEWHERE: Self = Self::inherited(-1);

    /// A descriptor that the process inherited.
    pub const fn inherited(number: i32) -> Self {
        Self { number, owner: None }
    }

    /// A descriptor received with a request; it is closed when the last configuration that names it is
    /// dropped.
    pub fn received(fd: OwnedFd) -> Self {
        Self { number: fd.as_raw_fd(), owner: Some(Arc::new(fd)) }
    }

    /// The number in this process.
    pub fn number(&self) -> i32 {
        self.number
    }

    /// Name of the descriptor for messages; `place` is its index in a list.
    pub fn name(&self, place: usize) -> String {
        match self.owner {
            None => format!("descriptor {}", self.number),
            Some(_) => {
                format!(
                    "descriptor {} of those that came with the request",
                    place.saturating_add(1)
                )
            }
        }
    }

    /// Whether a device can use the descriptor.
    ///
    /// # Errors
    /// The reason: it is a number in JSON, or one of the standard streams.
    pub fn check(&self) -> Result<(), &'static str> {
        match self.number {
            _ if self.owner.is_some() => Ok(()),
            i32::MIN..0 => Err(
                "a descriptor cannot be passed in JSON: give it on the command line, or send it \
                 with the request (SCM_RIGHTS)",
            ),
            0..=2 => Err("descriptors 0 to 2 are stdin, stdout and stderr"),
            _ => Ok(()),
        }
    }

    /// A duplicate for a device; the original is kept for a reboot.
    ///
    /// # Errors
    /// The descriptor is not open.
    pub fn duplicate(&self) -> io::Result<OwnedFd> {
        if let Some(owner) = &self.owner {
            return owner.try_clone();
        }
        if self.number < 0 {
            return Err(io::Error::from_raw_os_error(libc::EBADF));
        }
        // SAFETY: the number is only passed to the kernel, which refuses it if nothing is open
        // there; it is not kept beyond this call.
        let borrowed = unsafe { BorrowedFd::borrow_raw(self.number) };
        borrowed.try_clone_to_owned()
    }
}

impl Serialize for ConfigFd {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_i32(-1)
    }
}

impl<'de> Deserialize<'de> for ConfigFd {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        i64::deserialize(deserializer).map(|_number| Self::ELSEWHERE)
    }
}

impl FieldValue for ConfigFd {
    fn schema() -> RefOr<Schema> {
        <u32 as FieldValue>::schema()
    }

    fn type_name() -> String {
        <u32 as FieldValue>::type_name()
    }

    fn is_trivial(&self) -> bool {
        false
    }
}

/// A list of descriptors.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ConfigFds(pub Vec<ConfigFd>);

impl ConfigFds {
    /// Descriptors that the process inherited.
    pub fn inherited(numbers: impl IntoIterator<Item = i32>) -> Self {
        Self(numbers.into_iter().map(ConfigFd::inherited).collect())
    }
}

impl FieldValue for ConfigFds {
    fn schema() -> RefOr<Schema> {
        <Vec<u32> as FieldValue>::schema()
    }

    fn type_name() -> String {
        "list of integer".to_owned()
    }

    fn is_trivial(&self) -> bool {
        self.0.is_empty()
    }
}

/// One descriptor, `3`.
#[derive(Debug)]
pub struct Fd;

impl ValueCodec<ConfigFd> for Fd {
    const SYNTAX: &'static str = "<file_descriptor>";

    fn parse(raw: &str) -> Result<ConfigFd, String> {
        let number = raw.parse().map_err(|_| "expected a file descriptor, like 3")?;
        Ok(ConfigFd::inherited(number))
    }

    fn print(value: &ConfigFd) -> String {
        value.number.to_string()
    }
}

/// Several descriptors, `3` or `[3,4]`.
#[derive(Debug)]
pub struct Fds;

impl ValueCodec<ConfigFds> for Fds {
    const SYNTAX: &'static str = "<list_of_file_descriptors>";

    fn parse(raw: &str) -> Result<ConfigFds, String> {
        const EXPECTED: &str = "expected file descriptors, like [3,4]";
        let items = list_items(raw).ok_or(EXPECTED)?;
        let numbers: Result<Vec<i32>, _> = items.into_iter().map(str::parse).collect();
        numbers.map(ConfigFds::inherited).map_err(|_| EXPECTED.to_owned())
    }

    fn print(value: &ConfigFds) -> String {
        let items: Vec<_> = value.0.iter().map(|fd| fd.number.to_string()).collect();
        format!("[{}]", items.join(","))
    }
}

option_family! {
    /// Open tap descriptors for a network device of a migrated or restored VM, replacing those in its
    /// configuration.
    RestoredNetConfig "net-fds" {
        /// The device.
        id: String = String::new(), "" as JsonOnly, required_json();
        /// Number of descriptors sent for the device with the request.
        num_fds: u16 = 0, "" as JsonOnly, required_json(), range(1, 254);
        /// The descriptors; sent with a request by SCM_RIGHTS.
        fds: Option<ConfigFds> = None, "" as JsonOnly;
    }
}

option_family! {
    /// An open descriptor for a passed-through device of a migrated or restored VM.
    RestoredVfioConfig "vfio-fds" {
        /// The device.
        id: String = String::new(), "" as JsonOnly, required_json();
        /// Descriptor of the device's node in /dev/vfio/devices; sent with a request by SCM_RIGHTS.
        fd: Option<ConfigFd> = None, "" as JsonOnly;
    }
}

/// Network devices with their descriptors, `[net1@[23,24],net2@[25]]`.
#[derive(Debug)]
pub struct NetFds;

impl ValueCodec<Vec<RestoredNetConfig>> for NetFds {
    const SYNTAX: &'static str = "<list_of_ids_with_file_descriptors>";

    fn parse(raw: &str) -> Result<Vec<RestoredNetConfig>, String> {
        let pairs = pair_items(raw).ok_or("expected descriptors by device, like [net1@[3,4]]")?;
        let one = |(id, fds): (&str, &str)| {
            let fds = Fds::parse(fds)?;
            let num_fds = u16::try_from(fds.0.len()).unwrap_or(u16::MAX);
            Ok(RestoredNetConfig { id: id.to_owned(), num_fds, fds: Some(fds) })
        };
        pairs.into_iter().map(one).collect()
    }

    fn print(value: &Vec<RestoredNetConfig>) -> String {
        let fds = |net: &RestoredNetConfig| Fds::print(&net.fds.clone().unwrap_or_default());
        let items: Vec<_> = value.iter().map(|net| format!("{}@{}", net.id, fds(net))).collect();
        format!("[{}]", items.join(","))
    }
}

/// Passed-through devices with their descriptors, `[vfio0@5,vfio1@6]`.
#[derive(Debug)]
pub struct VfioFds;

impl ValueCodec<Vec<RestoredVfioConfig>> for VfioFds {
    const SYNTAX: &'static str = "<list_of_ids_with_a_file_descriptor>";

    fn parse(raw: &str) -> Result<Vec<RestoredVfioConfig>, String> {
        let pairs = pair_items(raw).ok_or("expected a descriptor by device, like [vfio0@5]")?;
        let one = |(id, fd): (&str, &str)| {
            Ok(RestoredVfioConfig { id: id.to_owned(), fd: Some(Fd::parse(fd)?) })
        };
        pairs.into_iter().map(one).collect()
    }

    fn print(value: &Vec<RestoredVfioConfig>) -> String {
        let number = |device: &RestoredVfioConfig| device.fd.as_ref().map_or(-1, ConfigFd::number);
        let items: Vec<_> = value.iter().map(|it| format!("{}@{}", it.id, number(it))).collect();
        format!("[{}]", items.join(","))
    }
}

/// All descriptors for the devices of a restored or received VM.
#[derive(Clone, Debug, Default)]
pub struct ArrivingFds {
    /// Those of network devices.
    pub nets: Vec<RestoredNetConfig>,
    /// Those of passed-through devices; `None` if the request names none, and so no iommufd either.
    pub vfio: Option<Vec<RestoredVfioConfig>>,
    /// The iommufd that the passed-through devices are bound to.
    pub iommufd: Option<ConfigFd>,
}

impl ArrivingFds {
    /// Number of descriptors that come with the request: those of network devices, then of passed-through
    /// devices, then the iommufd.
    pub fn expected(&self) -> usize {
        let nets: usize = self.nets.iter().map(|net| usize::from(net.num_fds)).sum();
        nets + self.vfio.as_ref().map_or(0, |vfio| vfio.len() + 1)
    }

    /// Assigns the descriptors received with the request, in that order; missing ones stay unset.
    pub fn fill(&mut self, fds: Vec<ConfigFd>) {
        let mut fds = fds.into_iter();
        for net in &mut self.nets {
            net.fds = Some(ConfigFds(fds.by_ref().take(net.num_fds.into()).collect()));
        }
        for device in self.vfio.iter_mut().flatten() {
            device.fd = fds.next();
        }
        self.iommufd = fds.next();
    }

    /// All descriptors in that order, as they are sent with a request.
    pub fn in_order(&self) -> Vec<ConfigFd> {
        let nets = self.nets.iter().filter_map(|net| net.fds.as_ref()).flat_map(|fds| &fds.0);
        let vfio = self.vfio.iter().flatten().filter_map(|device| device.fd.as_ref());
        nets.chain(vfio).chain(&self.iommufd).cloned().collect()
    }

    /// Inserts the descriptors into a received configuration, before it is completed and validated.
    ///
    /// # Errors
    /// Names a device that is unknown or named twice.
    pub fn place(&self, config: &mut VmConfig) -> Result<(), ConfigError> {
        let refuse = |what: &'static str, id: &str, problem: &str| {
            Err(ConfigError::Device { what, id: id.to_owned(), problem: problem.to_owned() })
        };
        let mut seen = std::collections::BTreeSet::new();
        for net in &self.nets {
            let id = Some(&net.id);
            if !seen.insert(&net.id) {
                return refuse("net_fds", &net.id, "is named twice");
            }
            let Some(found) = config.net.iter_mut().flatten().find(|it| it.id.as_ref() == id)
            else {
                return refuse("net_fds", &net.id, "is no network device of the VM");
            };
            found.fds.clone_from(&net.fds);
            // The tap name is that of another host.
            found.tap = None;
        }
        for device in self.vfio.iter().flatten() {
            let id = Some(&device.id);
            if !seen.insert(&device.id) {
                return refuse("vfio_fds", &device.id, "is named twice");
            }
            let found = config.devices.iter_mut().flatten().find(|it| it.id.as_ref() == id);
            let Some(found) = found else {
                return refuse("vfio_fds", &device.id, "is no passed-through device of the VM");
            };
            found.fd.clone_from(&device.fd);
            found.path = None;
        }
        if self.vfio.is_some() {
            let platform = config.platform.get_or_insert_default();
            platform.iommufd = true;
            platform.iommufd_fd.clone_from(&self.iommufd);
        }
        Ok(())
    }
}

/// Gives a request type access to all descriptors for the received VM at once.
macro_rules! arriving_fds {
    ($($request:ty),+) => {$(
        impl $request {
            /// The descriptors for the received VM.
            pub fn arriving_fds(&self) -> ArrivingFds {
                ArrivingFds {
                    nets: self.net_fds.clone().unwrap_or_default(),
                    vfio: self.vfio_fds.clone(),
                    iommufd: self.iommufd_fd.clone(),
                }
            }

            /// Replaces the descriptors.
            pub fn set_arriving_fds(&mut self, fds: ArrivingFds) {
                self.net_fds = (!fds.nets.is_empty()).then_some(fds.nets);
                self.vfio_fds = fds.vfio;
                self.iommufd_fd = fds.iommufd;
            }
        }
    )+};
}

arriving_fds!(ReceiveMigrationData, RestoreConfig);

#[cfg(test)]
#[path = "descriptor_tests.rs"]
mod tests;
