// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A program that a benchmark has started: killed and waited for when dropped.
//!
//! Owns the child's end, however the benchmark itself ends. Must never depend on the program.

use std::error::Error;
use std::io::Read as _;
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use crate::processor::Used;

/// A running program, which is killed when this is dropped.
pub struct Killed(pub Child, Option<Used>);

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
        Ok(Self(command.spawn()?, None))
    }

    /// Its process ID.
    pub fn pid(&self) -> u32 {
        self.0.id()
    }

    /// Its exit status and standard error, if it has ended; its standard error must be a pipe.
    pub fn ended(&mut self) -> std::io::Result<Option<String>> {
        // What it used is known only until it has been waited for.
        self.1 = Used::of(self.pid()).or(self.1);
        if !self.1.is_some_and(|used| used.is_zombie) {
            return Ok(None);
        }
        let Some(status) = self.0.try_wait()? else { return Ok(None) };
        let mut text = String::new();
        if let Some(error) = self.0.stderr.as_mut() {
            error.read_to_string(&mut text)?;
        }
        Ok(Some(format!("{status}: {}", text.trim())))
    }

    /// Waits until it has ended by itself; returns the processor time that it used, teardown of its memory included.
    pub fn used_in_all(&mut self, limit: Duration) -> Result<Duration, Box<dyn Error>> {
        let start = Instant::now();
        loop {
            if self.ended()?.is_some() {
                return self.1.map(|used| used.time).ok_or_else(|| "nothing is known of it".into());
            }
            if start.elapsed() > limit {
                return Err(format!("process {} does not end", self.pid()).into());
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
