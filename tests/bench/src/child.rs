// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A program that a benchmark has started: killed and waited for when dropped.
//!
//! Owns the child's end, however the benchmark itself ends. Must never depend on the program.

use std::io::Read as _;
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command};

/// A running program, which is killed when this is dropped.
pub struct Killed(pub Child);

impl Killed {
    /// Starts the program. It ends with the calling thread, also when the benchmark is killed.
    pub fn spawn(command: &mut Command) -> std::io::Result<Self> {
        // SAFETY: between fork and exec only one system call is made, which takes no memory.
        unsafe {
            command.pre_exec(|| match libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) {
                0 => Ok(()),
                _ => Err(std::io::Error::last_os_error()),
            });
        }
        command.spawn().map(Self)
    }

    /// Its process ID.
    pub fn pid(&self) -> u32 {
        self.0.id()
    }

    /// Its exit status and standard error, if it has ended; its standard error must be a pipe.
    pub fn ended(&mut self) -> std::io::Result<Option<String>> {
        let Some(status) = self.0.try_wait()? else { return Ok(None) };
        let mut text = String::new();
        if let Some(error) = self.0.stderr.as_mut() {
            error.read_to_string(&mut text)?;
        }
        Ok(Some(format!("{status}: {}", text.trim())))
    }
}

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
