// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A loopback interface that carries only the measured traffic, and its byte counter.
//!
//! Owns the network namespace of this process. The kernel's counter is the same for every program
//! that is compared and does not rely on any of them. Must be entered before there are other
//! threads.

use std::fs;
use std::io;

/// The network namespace whose counter is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Loopback {
    /// A network namespace of this process alone.
    Own,
    /// The machine's own: other traffic is counted as well.
    Shared,
}

impl Loopback {
    /// Moves this process, and all processes that it starts later, to a new network namespace.
    pub fn enter() -> Self {
        // SAFETY: takes no memory; there is one thread, so no other is left behind.
        if unsafe { libc::unshare(libc::CLONE_NEWNET) } != 0 {
            return Self::Shared;
        }
        if bring_up().is_err() {
            // Without a usable interface the measurement fails and reports that.
            return Self::Shared;
        }
        Self::Own
    }

    /// Bytes received so far, headers included.
    pub fn bytes() -> io::Result<u64> {
        let table = fs::read_to_string("/proc/self/net/dev")?;
        parse(&table).ok_or_else(|| io::Error::other("no loopback interface in /proc/self/net/dev"))
    }
}

/// Bytes received: the first number after `lo:`.
fn parse(table: &str) -> Option<u64> {
    let line = table.lines().find_map(|line| line.trim_start().strip_prefix("lo:"))?;
    line.split_ascii_whitespace().next()?.parse().ok()
}

fn bring_up() -> io::Result<()> {
    // SAFETY: takes no memory.
    let socket = unsafe { libc::socket(libc::AF_INET, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0) };
    if socket < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: all bits zero is a value of this plain C structure.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (place, byte) in request.ifr_name.iter_mut().zip(*b"lo") {
        *place = byte.cast_signed();
    }
    request.ifr_ifru.ifru_flags =
        libc::c_short::try_from(libc::IFF_UP | libc::IFF_RUNNING).unwrap_or(1);
    // SAFETY: the socket is open and the structure lives across the call, which reads it only.
    let outcome = unsafe { libc::ioctl(socket, libc::SIOCSIFFLAGS, &raw const request) };
    let error = io::Error::last_os_error();
    // SAFETY: opened above and used nowhere else.
    unsafe { libc::close(socket) };
    if outcome == 0 { Ok(()) } else { Err(error) }
}

#[cfg(test)]
mod tests {
    use super::parse;

    #[test]
    fn the_bytes_of_the_loopback_interface() {
        let table =
            "Inter-|   Receive\n face |bytes    packets\n  eth0: 7 1 0\n    lo:  4321  12 0 0\n";
        assert_eq!(parse(table), Some(4321));
        assert_eq!(parse("eth0: 7"), None);
    }
}
