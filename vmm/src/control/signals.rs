// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Signals as events of the VMM thread.
//!
//! Owns the descriptor from which they are read. All threads block all signals (the vCPU threads
//! but for their kick), so each reaches this descriptor.

use std::fs::File;
use std::io::{self, Read as _};
use std::os::fd::{AsRawFd, FromRawFd, RawFd};

/// A signal that the VMM acts on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Signal {
    /// End the process: SIGTERM or SIGINT.
    End,
}

/// Reads signals.
pub struct Signals {
    file: File,
}

impl Signals {
    /// Signals that are blocked in all threads from now on are read here.
    ///
    /// # Errors
    /// The host gives no descriptor.
    pub fn new() -> io::Result<Self> {
        // A file that grows beyond the limit of the process (a snapshot, say) is an error of that
        // write, which names the file, and not the end of the VM.
        // SAFETY: only the disposition of one signal is changed, to one that runs no code.
        unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
        // SAFETY: an all-zero set is a valid argument of sigemptyset, which initialises it; the
        // calls write only to `set`, which lives across them; the descriptor is new and ours.
        let fd = unsafe {
            let mut set: libc::sigset_t = std::mem::zeroed();
            libc::sigemptyset(&raw mut set);
            libc::sigaddset(&raw mut set, libc::SIGTERM);
            libc::sigaddset(&raw mut set, libc::SIGINT);
            libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut());
            libc::signalfd(-1, &raw const set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK)
        };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor was just made and nothing else owns it.
        Ok(Self { file: unsafe { File::from_raw_fd(fd) } })
    }

    /// The next signal, if there is one.
    pub fn next(&mut self) -> Option<Signal> {
        let mut info = [0_u8; size_of::<libc::signalfd_siginfo>()];
        matches!(self.file.read(&mut info), Ok(len) if len == info.len()).then_some(Signal::End)
    }
}

impl AsRawFd for Signals {
    fn as_raw_fd(&self) -> RawFd {
        self.file.as_raw_fd()
    }
}
