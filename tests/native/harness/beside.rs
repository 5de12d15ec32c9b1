// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The tests that run beside others, by a second process of this program, which runs them one after the other; the
//! first one takes part once it has no others left.
//!
//! Owns that process, its output, which is printed as a whole at the end, and who of the two runs a test. It must
//! never outlive this one.

use std::env;
use std::fs::File;
use std::io::{self, Read as _, Seek as _};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use tempfile::TempDir;

/// Set for that process: the folder in which each of the two takes its tests.
const MARK: &str = "GODWIT_NATIVE_BESIDE";

/// Whether this is that process.
pub fn is_it() -> bool {
    env::var_os(MARK).is_some()
}

/// Whether the test of this number is this process's own: the first that asks has it.
pub fn take(number: usize) -> bool {
    env::var_os(MARK).is_none_or(|folder| take_in(&PathBuf::from(folder), number))
}

fn take_in(folder: &Path, number: usize) -> bool {
    match File::create_new(folder.join(number.to_string())) {
        Ok(_) => true,
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => false,
        // Else neither might run it.
        Err(error) => panic!("test {number} cannot be taken in {}: {error}", folder.display()),
    }
}

/// The process.
pub struct Beside {
    child: Child,
    output: File,
    taken: TempDir,
}

impl Beside {
    /// Starts it with the arguments of this one.
    pub fn start() -> io::Result<Self> {
        let output = tempfile::tempfile()?;
        let taken = TempDir::with_prefix("godwit-beside-")?;
        let mut command = Command::new(env::current_exe()?);
        command.args(env::args_os().skip(1)).env(MARK, taken.path()).stdin(Stdio::null());
        command.stdout(output.try_clone()?).stderr(output.try_clone()?);
        // SAFETY: between fork and exec only one system call is made, which takes no memory.
        unsafe {
            command.pre_exec(|| {
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                Ok(())
            });
        }
        Ok(Self { child: command.spawn()?, output, taken })
    }

    /// Whether that process leaves the test of this number to this one.
    pub fn leaves(&self, number: usize) -> bool {
        take_in(self.taken.path(), number)
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
