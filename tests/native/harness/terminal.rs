// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A terminal whose other end is read by nothing.
//!
//! Owns both ends. Must never read the outer one.

use std::fs::File;
use std::io::{ErrorKind, Write as _};
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};
use std::os::unix::fs::OpenOptionsExt as _;

/// A terminal without a user. What is written to it stays in the kernel, until that has no more room.
pub struct Terminal {
    _master: OwnedFd,
    slave: OwnedFd,
}

impl Terminal {
    /// One in the mode in which a shell has it.
    pub fn new() -> Self {
        let (mut master, mut slave) = (-1, -1);
        let name = std::ptr::null_mut();
        // SAFETY: two numbers are written, which live during the call, and nothing else is passed.
        let made = unsafe {
            libc::openpty(&raw mut master, &raw mut slave, name, std::ptr::null(), std::ptr::null())
        };
        assert_eq!(made, 0, "{}", std::io::Error::last_os_error());
        // SAFETY: both have just been opened, and nothing else owns them.
        let own = |fd| unsafe { OwnedFd::from_raw_fd(fd) };
        Self { _master: own(master), slave: own(slave) }
    }

    /// For another process of the same user, as long as this is there.
    pub fn path(&self) -> String {
        let link = format!("/proc/self/fd/{}", self.slave.as_raw_fd());
        let path = std::fs::read_link(link).expect("a terminal has a name");
        path.to_str().expect("UTF-8").to_owned()
    }

    /// Whether it collects lines, echoes and makes signals of keys.
    pub fn modes(&self) -> libc::tcflag_t {
        // SAFETY: termios is a plain C struct for which all zeros is a valid value.
        let mut settings: libc::termios = unsafe { std::mem::zeroed() };
        // SAFETY: one termios is filled, which lives during the call; the descriptor is open.
        let done = unsafe { libc::tcgetattr(self.slave.as_raw_fd(), &raw mut settings) };
        assert_eq!(done, 0, "{}", std::io::Error::last_os_error());
        settings.c_lflag
    }

    /// Writes to it until it has no room for another byte.
    pub fn fill(&self) {
        let mut options = File::options();
        let mut file = options
            .write(true)
            .custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY)
            .open(self.path())
            .expect("the terminal");
        // The kernel keeps moving what it has got, and has room once more then.
        let mut full_looks = 0;
        while full_looks < 20 {
            match file.write(&[b'.'; 512]) {
                Ok(1..) => full_looks = 0,
                Ok(0) => panic!("a terminal takes something or says that it does not"),
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::WouldBlock);
                    full_looks += 1;
                    std::thread::sleep(std::time::Duration::from_millis(5));
                }
            }
        }
    }

    /// Whether it has no room for another byte.
    pub fn is_full(&self) -> bool {
        let mut entry =
            libc::pollfd { fd: self.slave.as_raw_fd(), events: libc::POLLOUT, revents: 0 };
        // SAFETY: one pollfd is filled, which lives during the call; the descriptor is open.
        let ready = unsafe { libc::poll(&raw mut entry, 1, 0) };
        assert!(ready >= 0, "{}", std::io::Error::last_os_error());
        entry.revents & libc::POLLOUT == 0
    }
}
