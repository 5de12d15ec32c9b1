// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Taps that a test opens itself, as management programs do, and descriptors that a process inherits or is
//! sent.
//!
//! Owns no interface: that of a tap goes with its last descriptor.

use std::fs;
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};

use super::{Vmm, is_root, skip};

/// An open tap of a name that is free.
pub struct Tap {
    /// Its descriptor.
    pub fd: OwnedFd,
    /// Its name.
    pub name: String,
}

impl Tap {
    /// Makes one, without a queue of a second pair.
    pub fn open() -> Self {
        if !is_root() || !Path::new("/dev/net/tun").exists() {
            skip("taps need root and /dev/net/tun");
        }
        let file = fs::File::options().read(true).write(true).open("/dev/net/tun");
        let fd: OwnedFd = match file {
            Ok(file) => file.into(),
            Err(error) => skip(format!("/dev/net/tun cannot be opened: {error}")),
        };
        // SAFETY: ifreq is a plain C struct for which all zeros is a valid value; the kernel then
        // chooses the name.
        let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
        let flags = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR;
        request.ifr_ifru.ifru_flags = i16::try_from(flags).expect("16 bits");
        // SAFETY: TUNSETIFF reads and writes one ifreq, which lives during the call.
        let result = unsafe { libc::ioctl(fd.as_raw_fd(), libc::TUNSETIFF, &raw mut request) };
        if result != 0 {
            let error = std::io::Error::last_os_error();
            skip(format!("this machine does not let a tap be made: {error}"));
        }
        let name = request.ifr_name.iter().take_while(|byte| **byte != 0);
        let name = name.map(|byte| char::from(byte.cast_unsigned())).collect();
        Self { fd, name }
    }

    /// Whether the interface still exists: that of a tap goes with its last descriptor.
    pub fn exists(&self) -> bool {
        interface_exists(&self.name)
    }

    /// Closes ours; gives its name.
    pub fn close(self) -> String {
        self.name
    }
}

/// Sends a text in one message, and descriptors with it if there are any.
#[track_caller]
pub fn send_with(socket: impl AsFd, text: &str, fds: &[BorrowedFd<'_>]) {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        assert!(control.push(SendAncillaryMessage::ScmRights(fds)), "there is room");
    }
    let pieces = [IoSlice::new(text.as_bytes())];
    let sent = rustix::net::sendmsg(socket, &pieces, &mut control, SendFlags::NOSIGNAL);
    assert_eq!(sent.expect("sent"), text.len());
}

/// Whether the host has an interface of this name.
pub fn interface_exists(name: &str) -> bool {
    Path::new("/sys/class/net").join(name).exists()
}

/// Taps that a VMM has open.
pub fn taps_of(vmm: &Vmm) -> Vec<String> {
    let mut taps: Vec<_> = fs::read_dir(format!("/proc/{}/fdinfo", vmm.pid()))
        .expect("its descriptors")
        .filter_map(|entry| fs::read_to_string(entry.ok()?.path()).ok())
        .filter_map(|text| Some(text.lines().find_map(|it| it.strip_prefix("iff:"))?.trim().into()))
        .collect();
    taps.sort();
    taps.dedup();
    taps
}

/// Lets processes that are started in between inherit a descriptor.
pub fn inherited<T>(fd: &OwnedFd, run: impl FnOnce(i32) -> T) -> T {
    let change = |flags| {
        rustix::io::fcntl_setfd(fd, flags).expect("a flag of an open descriptor");
    };
    change(rustix::io::FdFlags::empty());
    let result = run(fd.as_raw_fd());
    change(rustix::io::FdFlags::CLOEXEC);
    result
}
