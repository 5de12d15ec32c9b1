// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Addresses of migration peers as text: `tcp:HOST:PORT` and `unix:PATH`.
//!
//! Owns their syntax. Names are not resolved here.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr};
use std::path::PathBuf;
use std::str::FromStr;

/// Longest name in DNS.
const HOST_BYTES_MAX: usize = 253;

/// Longest path of a Unix socket (`sun_path` less its terminator).
const PATH_BYTES_MAX: usize = 107;

/// Address of a migration peer.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Address {
    /// Host (name, IPv4 or IPv6 without brackets) and port; port 0 lets a listener choose.
    Tcp {
        /// Host.
        host: String,
        /// Port.
        port: u16,
    },
    /// Path of a Unix socket.
    Unix(PathBuf),
}

impl Address {
    /// True when the host is a name that must be resolved, which may take long.
    pub fn has_name(&self) -> bool {
        matches!(self, Self::Tcp { host, .. } if host.parse::<IpAddr>().is_err())
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp { host, port } if host.contains(':') => write!(f, "tcp:[{host}]:{port}"),
            Self::Tcp { host, port } => write!(f, "tcp:{host}:{port}"),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

/// The error for a text that is not an address.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not a migration address ({why}); use tcp:HOST:PORT or unix:PATH")]
pub struct AddressError {
    text: String,
    why: &'static str,
}

impl FromStr for Address {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        parse(text).map_err(|why| {
            let shown = &text[..text.floor_char_boundary(2 * HOST_BYTES_MAX)];
            AddressError { text: shown.to_string(), why }
        })
    }
}

fn parse(text: &str) -> Result<Address, &'static str> {
    if let Some(path) = text.strip_prefix("unix:") {
        return parse_path(path);
    }
    let rest = text.strip_prefix("tcp:").ok_or("it starts with neither tcp: nor unix:")?;
    if rest.starts_with("//") {
        return Err("no slashes belong after tcp:");
    }
    let (host, port) = match rest.strip_prefix('[') {
        Some(rest) => {
            let (host, after) = rest.split_once(']').ok_or("the closing bracket is missing")?;
            host.parse::<Ipv6Addr>().map_err(|_| "what is in brackets is not an IPv6 address")?;
            (host, after.strip_prefix(':').ok_or("the port is missing")?)
        }
        None => rest.rsplit_once(':').ok_or("the port is missing")?,
    };
    check_host(host)?;
    if port.is_empty() || !port.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err("the port is not a number");
    }
    let port = port.parse().map_err(|_| "the port is above 65535")?;
    Ok(Address::Tcp { host: host.to_string(), port })
}

fn parse_path(path: &str) -> Result<Address, &'static str> {
    if path.is_empty() {
        return Err("the path is missing");
    }
    if path.len() > PATH_BYTES_MAX {
        return Err("the path of a Unix socket has at most 107 bytes");
    }
    if path.contains('\0') {
        return Err("the path contains a zero byte");
    }
    Ok(Address::Unix(PathBuf::from(path)))
}

fn check_host(host: &str) -> Result<(), &'static str> {
    if host.is_empty() {
        return Err("the host is missing");
    }
    if host.len() > HOST_BYTES_MAX {
        return Err("the host is longer than any name");
    }
    if host.parse::<IpAddr>().is_ok_and(|ip| ip.is_ipv4()) || is_name(host) {
        return Ok(());
    }
    // The brackets are removed by now; without them the port could not be told from the address.
    if host.parse::<Ipv6Addr>().is_ok() {
        return Ok(());
    }
    Err("the host is neither a name nor an address")
}

fn is_name(host: &str) -> bool {
    host.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_'))
}
