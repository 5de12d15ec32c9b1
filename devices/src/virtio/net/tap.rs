// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tap interfaces of the host.
//!
//! Owns the calls that make, find and configure one. A tap that this process made is removed when its
//! last descriptor is closed.

use std::fs::{File, OpenOptions};
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::str::FromStr;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::syscalls::{check, set_nonblocking};

/// Length of the header before each frame (virtio 1.3, 5.1.6).
pub(super) const HEADER_BYTES: usize = 12;
/// Name pattern in which the kernel fills in a number.
pub(super) const NAME_PATTERN: &str = "vmtap%d";

// linux/if.h and linux/if_tun.h
const TUNGETIFF: libc::Ioctl = 0x8004_54d2;
const TUNSETQUEUE: libc::Ioctl = 0x4004_54d9;
const IFF_ATTACH_QUEUE: libc::c_int = 0x0200;
const IFF_DETACH_QUEUE: libc::c_int = 0x0400;
const SIOCSIFADDR: libc::Ioctl = 0x8916;
const SIOCSIFNETMASK: libc::Ioctl = 0x891c;
const ARPHRD_ETHER: libc::c_ushort = 1;

/// A MAC address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MacAddress(pub [u8; 6]);

impl MacAddress {
    /// A random, locally administered unicast address.
    pub fn random() -> io::Result<Self> {
        let mut bytes = [0; 6];
        crate::syscalls::random(&mut bytes)?;
        bytes[0] = bytes[0] & 0xfe | 0x02;
        Ok(Self(bytes))
    }
}

impl std::fmt::Display for MacAddress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for (index, byte) in self.0.iter().enumerate() {
            let separator = if index == 0 { "" } else { ":" };
            write!(f, "{separator}{byte:02x}")?;
        }
        Ok(())
    }
}

/// The text is not a MAC address.
#[derive(Debug, Error, PartialEq, Eq)]
#[error("{0} is not a MAC address (six bytes in hexadecimal with colons between them)")]
pub struct BadMacAddress(String);

impl FromStr for MacAddress {
    type Err = BadMacAddress;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let bad = || BadMacAddress(text.to_owned());
        let mut bytes = [0; 6];
        let mut parts = text.split(':');
        for byte in &mut bytes {
            let part = parts.next().ok_or_else(bad)?;
            if part.len() != 2 || !part.bytes().all(|digit| digit.is_ascii_hexdigit()) {
                return Err(bad());
            }
            *byte = u8::from_str_radix(part, 16).map_err(|_| bad())?;
        }
        if parts.next().is_some() { Err(bad()) } else { Ok(Self(bytes)) }
    }
}

/// Why a tap cannot be used.
#[derive(Debug, Error)]
pub enum TapError {
    /// The interface name is invalid.
    #[error("{name} is not a name for a tap (1 to 15 characters, without / and spaces)")]
    Name {
        /// The name.
        name: String,
    },
    /// This process may not use /dev/net/tun.
    #[error("cannot open /dev/net/tun")]
    Driver(#[source] io::Error),
    /// The interface does not exist, and may not be created.
    #[error("tap {name} does not exist, and creating it needs CAP_NET_ADMIN")]
    Missing {
        /// Name of the tap.
        name: String,
    },
    /// Another process has it open.
    #[error("tap {name} is in use by another process")]
    InUse {
        /// Name of the tap.
        name: String,
    },
    /// The process lacks the permission.
    #[error(
        "no permission to use tap {name}: it belongs to another user, or CAP_NET_ADMIN is missing"
    )]
    Permission {
        /// Name of the tap.
        name: String,
    },
    /// The interface is not a tap, or does not match in multi-queue mode.
    #[error("interface {name} cannot be used: it is not a tap {}", if *.multi_queue { "with multi_queue" } else { "without multi_queue" })]
    Kind {
        /// Name of the interface.
        name: String,
        /// Whether multi-queue was requested.
        multi_queue: bool,
    },
    /// A descriptor that was passed in is not a tap.
    #[error("descriptor {fd} is not a tap")]
    NotTap {
        /// Number of the descriptor.
        fd: i32,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// The tap cannot be configured.
    #[error("cannot {what} of tap {name}")]
    Configure {
        /// What was attempted, as an infinitive clause.
        what: &'static str,
        /// Name of the tap.
        name: String,
        /// The cause.
        #[source]
        source: io::Error,
    },
}

/// A queue of a tap.
#[derive(Debug)]
pub(crate) struct Tap {
    file: File,
    name: String,
    /// Set for another file in place of a tap.
    plain: Option<Plain>,
}

/// Replaces the settings of a tap for another file.
#[derive(Debug, Default)]
pub(super) struct Plain {
    pub(super) offloads: AtomicU32,
    /// Whether changes of offloads fail.
    pub(super) refuses: AtomicBool,
}

pub(super) fn request(name: &str) -> Result<libc::ifreq, TapError> {
    let bad = || TapError::Name { name: name.to_owned() };
    // SAFETY: ifreq is a plain C struct for which all zeros is a valid value.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    let fits = !name.is_empty() && name.len() < request.ifr_name.len();
    if !fits || name.bytes().any(|byte| byte == b'/' || byte.is_ascii_whitespace() || byte == 0) {
        return Err(bad());
    }
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = libc::c_char::try_from(from).map_err(|_| bad())?;
    }
    Ok(request)
}

fn name_of(request: &libc::ifreq) -> String {
    let bytes = request.ifr_name.iter().take_while(|byte| **byte != 0);
    bytes.filter_map(|byte| u8::try_from(*byte).ok()).map(char::from).collect()
}

/// IFF_PERSIST of linux/if_tun.h, as in the flags in sysfs.
pub(super) const PERSISTENT: u32 = 0x0800;

impl Tap {
    /// Opens `count` queues of the tap with this name, or of a new one.
    pub(super) fn open(name: Option<&str>, count: u16) -> Result<Vec<Self>, TapError> {
        let multi_queue = count > 1;
        let mut name = name.unwrap_or(NAME_PATTERN).to_owned();
        let mut taps = Vec::new();
        for _ in 0..count {
            let tap = Self::open_queue(&name, multi_queue)?;
            name.clone_from(&tap.name);
            taps.push(tap);
        }
        Ok(taps)
    }

    fn open_queue(name: &str, multi_queue: bool) -> Result<Self, TapError> {
        let mut request = request(name)?;
        let existed = Path::new("/sys/class/net").join(name).exists();
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(libc::O_NONBLOCK | libc::O_CLOEXEC)
            .open("/dev/net/tun")
            .map_err(TapError::Driver)?;
        let flags = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR;
        let flags = if multi_queue { flags | libc::IFF_MULTI_QUEUE } else { flags };
        // All flags are in the lower 16 bits.
        request.ifr_ifru.ifru_flags = libc::c_short::try_from(flags).unwrap_or(libc::c_short::MAX);
        // SAFETY: TUNSETIFF reads and writes one ifreq, which lives during the call; the
        // descriptor is open.
        let result = unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETIFF, &raw mut request) };
        check(result).map_err(|source| open_error(name, multi_queue, existed, source))?;
        let tap = Self { file, name: name_of(&request), plain: None };
        tap.set_header_len()?;
        Ok(tap)
    }

    /// Whether the tap persists when no process has it open.
    pub(super) fn is_persistent(name: &str) -> bool {
        let flags =
            std::fs::read_to_string(Path::new("/sys/class/net").join(name).join("tun_flags"));
        let flags = flags
            .ok()
            .and_then(|text| u32::from_str_radix(text.trim().trim_start_matches("0x"), 16).ok());
        flags.is_some_and(|flags| flags & PERSISTENT != 0)
    }

    /// Uses a descriptor opened by another process.
    pub(super) fn from_fd(fd: OwnedFd) -> Result<Self, TapError> {
        let number = fd.as_raw_fd();
        let not_tap = |source| TapError::NotTap { fd: number, source };
        // SAFETY: ifreq is a plain C struct for which all zeros is a valid value.
        let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
        // SAFETY: TUNGETIFF writes one ifreq, which lives during the call; the descriptor is open.
        check(unsafe { libc::ioctl(number, TUNGETIFF, &raw mut request) }).map_err(not_tap)?;
        // SAFETY: TUNGETIFF has filled the flags.
        let flags = libc::c_int::from(unsafe { request.ifr_ifru.ifru_flags });
        let needed = libc::IFF_TAP | libc::IFF_VNET_HDR;
        if flags & needed != needed {
            let wrong = io::Error::new(
                io::ErrorKind::InvalidInput,
                "it was not opened with IFF_TAP and IFF_VNET_HDR",
            );
            return Err(not_tap(wrong));
        }
        set_nonblocking(std::os::fd::AsFd::as_fd(&fd)).map_err(not_tap)?;
        let tap = Self { file: fd.into(), name: name_of(&request), plain: None };
        tap.set_header_len()?;
        Ok(tap)
    }

    /// Uses any file that preserves frame boundaries in place of a tap.
    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn from_file(file: File) -> Self {
        Self { file, name: "none".to_owned(), plain: Some(Plain::default()) }
    }

    #[cfg(test)]
    pub(super) fn plain(&self) -> Option<&Plain> {
        self.plain.as_ref()
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn file(&self) -> &File {
        &self.file
    }

    fn set_header_len(&self) -> Result<(), TapError> {
        let len_bytes = libc::c_int::try_from(HEADER_BYTES).unwrap_or(libc::c_int::MAX);
        // SAFETY: TUNSETVNETHDRSZ reads one int; the descriptor is open.
        let result = unsafe {
            libc::ioctl(self.file.as_raw_fd(), libc::TUNSETVNETHDRSZ, &raw const len_bytes)
        };
        check(result).map_err(|source| self.failed("set the header length", source))?;
        Ok(())
    }

    /// Sets the offloads that the guest accepts in received frames: `TUN_F_*`.
    pub(super) fn set_offloads(&self, offloads: u32) -> Result<(), TapError> {
        if let Some(plain) = &self.plain {
            if plain.refuses.load(Ordering::Acquire) {
                let refused = io::Error::from_raw_os_error(libc::EINVAL);
                return Err(self.failed("set the offloads", refused));
            }
            plain.offloads.store(offloads, Ordering::Release);
            return Ok(());
        }
        let argument = libc::c_ulong::from(offloads);
        // SAFETY: TUNSETOFFLOAD takes a number; the descriptor is open.
        let result = unsafe { libc::ioctl(self.file.as_raw_fd(), libc::TUNSETOFFLOAD, argument) };
        check(result).map_err(|source| self.failed("set the offloads", source))?;
        Ok(())
    }

    /// Sets whether the kernel passes frames to this queue.
    pub(super) fn set_attached(&self, attached: bool) -> io::Result<()> {
        if self.plain.is_some() {
            return Ok(());
        }
        // SAFETY: ifreq is a plain C struct for which all zeros is a valid value.
        let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
        let flags = if attached { IFF_ATTACH_QUEUE } else { IFF_DETACH_QUEUE };
        request.ifr_ifru.ifru_flags = libc::c_short::try_from(flags).unwrap_or(0);
        // SAFETY: TUNSETQUEUE reads one ifreq, which lives during the call; the descriptor is open.
        check(unsafe { libc::ioctl(self.file.as_raw_fd(), TUNSETQUEUE, &raw const request) })?;
        Ok(())
    }

    /// Sets the MTU of the host's interface, if it has another one: to set it takes a capability, also to what it is.
    pub(super) fn set_mtu(&self, mtu: u16) -> Result<(), TapError> {
        const WHAT: &str = "set the MTU";
        let query = self.ask(libc::SIOCGIFMTU, WHAT)?;
        // SAFETY: SIOCGIFMTU has filled the MTU.
        if unsafe { query.ifr_ifru.ifru_mtu } == i32::from(mtu) {
            return Ok(());
        }
        self.interface_call(libc::SIOCSIFMTU, WHAT, |request| {
            request.ifr_ifru.ifru_mtu = mtu.into();
            Ok(())
        })
    }

    /// Sets the MAC address of the host's interface.
    pub(super) fn set_mac(&self, mac: MacAddress) -> Result<(), TapError> {
        self.interface_call(libc::SIOCSIFHWADDR, "set the MAC address", |request| {
            // SAFETY: sockaddr is a plain C struct for which all zeros is a valid value.
            let mut address: libc::sockaddr = unsafe { std::mem::zeroed() };
            address.sa_family = ARPHRD_ETHER;
            for (to, from) in address.sa_data.iter_mut().zip(mac.0) {
                *to = libc::c_char::from_ne_bytes([from]);
            }
            request.ifr_ifru.ifru_hwaddr = address;
            Ok(())
        })
    }

    /// Sets IP address and netmask of the host's interface.
    pub(super) fn set_ip(&self, address: IpAddr, mask: IpAddr) -> Result<(), TapError> {
        match (address, mask) {
            (IpAddr::V4(address), IpAddr::V4(mask)) => {
                self.interface_call(SIOCSIFADDR, "set the IP address", |request| {
                    request.ifr_ifru.ifru_addr = inet_address(address);
                    Ok(())
                })?;
                self.interface_call(SIOCSIFNETMASK, "set the netmask", |request| {
                    request.ifr_ifru.ifru_addr = inet_address(mask);
                    Ok(())
                })
            }
            (IpAddr::V6(address), IpAddr::V6(mask)) => self.set_ipv6(address, mask),
            _ => Err(self.failed(
                "set the IP address",
                io::Error::new(
                    io::ErrorKind::InvalidInput,
                    "address and netmask are of different IP versions",
                ),
            )),
        }
    }

    fn set_ipv6(
        &self,
        address: std::net::Ipv6Addr,
        mask: std::net::Ipv6Addr,
    ) -> Result<(), TapError> {
        /// `struct in6_ifreq` (linux/ipv6.h).
        #[repr(C)]
        struct Request {
            address: libc::in6_addr,
            prefix_bits: u32,
            interface: libc::c_int,
        }
        const WHAT: &str = "set the IPv6 address";
        let fail = |source| self.failed(WHAT, source);
        let mut query = request(&self.name)?;
        let socket = socket(libc::AF_INET6).map_err(fail)?;
        // SAFETY: SIOCGIFINDEX reads and writes one ifreq; the descriptor is open.
        let result = unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCGIFINDEX, &raw mut query) };
        check(result).map_err(fail)?;
        // SAFETY: SIOCGIFINDEX has filled the index.
        let interface = unsafe { query.ifr_ifru.ifru_ifindex };
        let change = Request {
            address: libc::in6_addr { s6_addr: address.octets() },
            prefix_bits: u128::from(mask).leading_ones(),
            interface,
        };
        // SAFETY: on an IPv6 socket SIOCSIFADDR reads one in6_ifreq; the descriptor is open.
        let result = unsafe { libc::ioctl(socket.as_raw_fd(), SIOCSIFADDR, &raw const change) };
        match check(result) {
            Err(error) if error.raw_os_error() == Some(libc::EEXIST) => Ok(()),
            other => other.map(|_| ()).map_err(fail),
        }
    }

    /// Brings the host's interface up, if it is not.
    pub(super) fn set_up(&self) -> Result<(), TapError> {
        const WHAT: &str = "switch on the interface";
        let query = self.ask(libc::SIOCGIFFLAGS, WHAT)?;
        // SAFETY: SIOCGIFFLAGS has filled the flags.
        let flags = unsafe { query.ifr_ifru.ifru_flags };
        let wanted = libc::c_short::try_from(libc::IFF_UP | libc::IFF_RUNNING).unwrap_or(0);
        if flags & wanted == wanted {
            return Ok(());
        }
        self.interface_call(libc::SIOCSIFFLAGS, WHAT, |request| {
            request.ifr_ifru.ifru_flags = flags | wanted;
            Ok(())
        })
    }

    /// The answer to a question about the host's interface.
    fn ask(&self, call: libc::c_ulong, what: &'static str) -> Result<libc::ifreq, TapError> {
        let fail = |source| self.failed(what, source);
        let mut query = request(&self.name)?;
        let socket = socket(libc::AF_INET).map_err(fail)?;
        // SAFETY: the calls used here read and write one ifreq, which lives during the call; the descriptor is open.
        check(unsafe { libc::ioctl(socket.as_raw_fd(), call, &raw mut query) }).map_err(fail)?;
        Ok(query)
    }

    fn interface_call(
        &self,
        call: libc::c_ulong,
        what: &'static str,
        fill: impl FnOnce(&mut libc::ifreq) -> io::Result<()>,
    ) -> Result<(), TapError> {
        let fail = |source| self.failed(what, source);
        let mut request = request(&self.name)?;
        fill(&mut request).map_err(fail)?;
        let socket = socket(libc::AF_INET).map_err(fail)?;
        // SAFETY: the calls used here read one ifreq, which lives during the call; the descriptor
        // is open.
        check(unsafe { libc::ioctl(socket.as_raw_fd(), call, &raw const request) })
            .map_err(fail)?;
        Ok(())
    }

    pub(super) fn failed(&self, what: &'static str, source: io::Error) -> TapError {
        TapError::Configure { what, name: self.name.clone(), source }
    }
}

fn open_error(name: &str, multi_queue: bool, existed: bool, source: io::Error) -> TapError {
    let name = name.to_owned();
    match source.raw_os_error() {
        Some(libc::EBUSY) => TapError::InUse { name },
        Some(libc::EPERM | libc::EACCES) if existed => TapError::Permission { name },
        Some(libc::EPERM | libc::EACCES) => TapError::Missing { name },
        Some(libc::EINVAL) => TapError::Kind { name, multi_queue },
        _ => TapError::Configure { what: "open a queue", name, source },
    }
}

fn socket(family: libc::c_int) -> io::Result<OwnedFd> {
    // SAFETY: only numbers are passed; the result is checked before use.
    let fd = check(unsafe { libc::socket(family, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0) })?;
    // SAFETY: `fd` was just opened and has no other owner.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn inet_address(address: std::net::Ipv4Addr) -> libc::sockaddr {
    // SAFETY: sockaddr is a plain C struct for which all zeros is a valid value.
    let mut socket_address: libc::sockaddr = unsafe { std::mem::zeroed() };
    socket_address.sa_family = libc::sa_family_t::try_from(libc::AF_INET).unwrap_or(0);
    // Port, then address.
    for (to, from) in socket_address.sa_data.iter_mut().skip(2).zip(address.octets()) {
        *to = libc::c_char::from_ne_bytes([from]);
    }
    socket_address
}
