// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The tests that run beside others, by a second process of this program, which runs them one after the other.
//!
//! Owns that process and its output, which is printed as a whole at the end. It must never outlive this one.

use std::env;
use std::fs::File;
use std::io::{self, Read as _, Seek as _};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, Stdio};

/// Set for that process.
const MARK: &str = "GODWIT_NATIVE_BESIDE";

/// Whether this is that process.
pub fn is_it() -> bool {
    env::var_os(MARK).is_some()
}

/// The process.
pub struct Beside {
    child: Child,
    output: File,
}

impl Beside {
    /// Starts it with the arguments of this one.
    pub fn start() -> io::Result<Self> {
        let output = tempfile::tempfile()?;
        let mut command = Command::new(env::current_exe()?);
        command.args(env::args_os().skip(1)).env(MARK, "1").stdin(Stdio::null());
        command.stdout(output.try_clone()?).stderr(output.try_clone()?);
        // SAFETY: between fork and exec only one system call is made, which takes no memory.
        unsafe {
            command.pre_exec(|| {
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                Ok(())
            });
        }
        Ok(Self { child: command.spawn()?, output })
    }

    /// Waits for its end and prints what it has said; whether all went well.
    pub fn finish(mut self) -> io::Result<bool> {
        let status = self.child.wait()?;
        self.output.rewind()?;
        let mut said = Vec::new();
        self.output.read_to_end(&mut said)?;
        println!("\ntests that ran beside the others:{}", String::from_utf8_lossy(&said));
        Ok(status.success())
    }
}
