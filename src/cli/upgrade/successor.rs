// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The process that takes the place of another: started, waited for, and ended with all that it has made unless the guest
//! is in it.
//!
//! Owns the process and the files beside the sockets of the old one. It must never end one that may have the guest.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::{self, Read as _};
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::fs::FileTypeExt as _;
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use thiserror::Error;
use vmm::api::client::{Client, OpenClient};
use vmm::api::successor::SuccessorArgs;

use super::predecessor::Predecessor;
use super::process::child_has_ended;
use super::surroundings::Surroundings;

/// Time between two looks at a process that starts or ends.
const POLL: Duration = Duration::from_millis(1);

/// Time that a process has to end when it is told to.
const END_TIME: Duration = Duration::from_secs(2);

/// What is read of what a program prints.
const PRINTED_BYTES: usize = 4096;

/// What is shown of it.
const SHOWN_CHARS: usize = 300;

/// Why there is no successor.
#[derive(Debug, Error)]
pub enum SuccessorError {
    /// It cannot be executed.
    #[error("'{binary}' cannot be started")]
    Start {
        /// The program.
        binary: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// It did not say its version in time.
    #[error("'{binary}' has not said its version within the time limit, and was ended")]
    Hangs {
        /// The program.
        binary: PathBuf,
    },
    /// It is no VMM that takes the place of another.
    #[error("'{binary}' is no VMM that can take over: {how}{}", shown(text))]
    Other {
        /// The program.
        binary: PathBuf,
        /// How it ended.
        how: String,
        /// What it printed.
        text: String,
    },
    /// It ended before it answered.
    #[error("the new process has ended before it could take over: {how}{}", shown(text))]
    Ended {
        /// How it ended.
        how: String,
        /// What it said of the reason.
        text: String,
    },
    /// Something else is at its path.
    #[error("another process answers at the path of the new one")]
    Stranger,
    /// It has not answered.
    #[error("the new process has not answered within the time limit, and was ended")]
    Silent,
}

fn shown(text: &str) -> String {
    if text.is_empty() { String::new() } else { format!(": {text}") }
}

/// What a program printed, on one line and without control characters.
fn plain(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes);
    let words: Vec<_> =
        text.split(|char: char| char.is_whitespace() || char.is_control()).collect();
    let line: Vec<_> = words.into_iter().filter(|word| !word.is_empty()).collect();
    line.join(" ").chars().take(SHOWN_CHARS).collect()
}

fn how(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit code {code}"),
        (None, Some(signal)) => format!("signal {signal}"),
        (None, None) => "no exit code".to_owned(),
    }
}

/// Whether a program that prints this is a VMM of this kind.
fn is_vmm(printed: &str) -> bool {
    printed.starts_with("cloud-hypervisor v")
        && printed.lines().any(|line| line.starts_with("godwit v"))
}

/// What was printed so far.
fn printed(from: &UnixStream) -> Vec<u8> {
    let mut bytes = Vec::new();
    if from.set_nonblocking(true).is_ok() {
        // What its children print later is of no interest.
        let limit = u64::try_from(PRINTED_BYTES).unwrap_or_default();
        let _ = from.take(limit).read_to_end(&mut bytes);
    }
    bytes
}

/// Ends a process and all that it has started, at once.
fn kill_all(child: &mut Child) -> Option<ExitStatus> {
    if let Ok(pid) = libc::pid_t::try_from(child.id()) {
        // SAFETY: takes numbers only. The process leads a group of this number, and has not been waited for.
        unsafe { libc::kill(-pid, libc::SIGKILL) };
    }
    let _ = child.kill();
    child.wait().ok()
}

/// What is started, and how.
pub struct Start<'a> {
    /// The program.
    pub binary: &'a Path,
    /// The process whose place it takes.
    pub predecessor: &'a Predecessor,
    /// What it has from what started it.
    pub surroundings: &'a Surroundings,
    /// Suffix of its paths until it has the guest.
    pub suffix: &'a str,
}

impl Start<'_> {
    fn command<T: AsRef<OsStr>>(&self, arguments: &[T], link: &UnixStream) -> Command {
        let mut command = Command::new(self.binary);
        command.args(arguments);
        let fd = link.as_raw_fd();
        command.arg("--successor").arg(SuccessorArgs::text(fd, self.suffix));
        self.surroundings.give(&mut command);
        // SAFETY: one system call on a descriptor that is open until the program has been executed.
        unsafe {
            command.pre_exec(move || match libc::fcntl(fd, libc::F_SETFD, 0) {
                0 => Ok(()),
                _ => Err(io::Error::last_os_error()),
            });
        }
        command
    }

    fn failed(&self, source: io::Error) -> SuccessorError {
        SuccessorError::Start { binary: self.binary.to_owned(), source }
    }

    /// Has the program say its version, which shows whether it is a VMM that can take over; gives the version.
    ///
    /// # Errors
    /// [`SuccessorError`]; no process is left.
    pub fn version(&self, until: Instant) -> Result<String, SuccessorError> {
        let (ours, theirs) = UnixStream::pair().map_err(|source| self.failed(source))?;
        let copy = || theirs.try_clone().map(OwnedFd::from).map(Stdio::from);
        let (stdout, stderr) = (copy(), copy());
        let mut command = self.command(&["--version"], &theirs);
        command.stdin(Stdio::null());
        command.stdout(stdout.map_err(|source| self.failed(source))?);
        command.stderr(stderr.map_err(|source| self.failed(source))?);
        let mut child = command.spawn().map_err(|source| self.failed(source))?;
        let binary = self.binary.to_owned();
        let is_late = !child_has_ended(&child, until);
        // What it has started, too.
        let status = kill_all(&mut child);
        let Some(status) = status.filter(|_| !is_late) else {
            return Err(SuccessorError::Hangs { binary });
        };
        let bytes = printed(&ours);
        let text = String::from_utf8_lossy(&bytes);
        if status.success() && is_vmm(&text) {
            return Ok(text.lines().nth(1).unwrap_or_default().to_owned());
        }
        Err(SuccessorError::Other { binary, how: how(status), text: plain(&bytes) })
    }

    /// Starts it; `files` are what it makes beside the sockets of the old process.
    ///
    /// # Errors
    /// [`SuccessorError`]; no process is left.
    pub fn start(
        &self,
        arguments: &[OsString],
        files: Vec<PathBuf>,
    ) -> Result<Successor, SuccessorError> {
        let (link, theirs) = UnixStream::pair().map_err(|source| self.failed(source))?;
        let mut command = self.command(arguments, &theirs);
        let standard =
            |number| self.predecessor.descriptor(number).map_or_else(Stdio::null, Stdio::from);
        command.stdin(standard(0)).stdout(standard(1)).stderr(standard(2));
        let child = command.spawn().map_err(|source| self.failed(source))?;
        drop(theirs);
        Ok(Successor { child, link, files, may_have_the_guest: false })
    }
}

/// The process. It ends when this is dropped, unless it may have the guest.
#[derive(Debug)]
pub struct Successor {
    child: Child,
    link: UnixStream,
    files: Vec<PathBuf>,
    may_have_the_guest: bool,
}

impl Successor {
    /// Its process ID.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Waits for its API.
    ///
    /// # Errors
    /// It has ended, or does not answer in time.
    pub fn wait_for_api(
        &mut self,
        client: &Client,
        until: Instant,
    ) -> Result<OpenClient, SuccessorError> {
        loop {
            self.check()?;
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(SuccessorError::Silent);
            }
            let client = client.clone().with_limit(Some(left));
            if let Ok(mut open) = client.open() {
                self.check_peer(&open)?;
                if open.ask(vmm::api::endpoints::Method::Get, "vmm.ping", None).is_ok() {
                    return Ok(open);
                }
            }
            thread::sleep(POLL);
        }
    }

    /// Whether a connection is to this process: in a directory that others may write to its path could be theirs.
    ///
    /// # Errors
    /// It is to another one.
    pub fn check_peer(&self, client: &OpenClient) -> Result<(), SuccessorError> {
        match client.peer_pid().map(u32::try_from) {
            Some(Ok(pid)) if pid == self.child.id() => Ok(()),
            _ => Err(SuccessorError::Stranger),
        }
    }

    /// Whether it still runs.
    ///
    /// # Errors
    /// It has ended.
    pub fn check(&mut self) -> Result<(), SuccessorError> {
        match self.child.try_wait() {
            Ok(Some(status)) => {
                let text = plain(&printed(&self.link));
                Err(SuccessorError::Ended { how: how(status), text })
            }
            _ => Ok(()),
        }
    }

    /// From now on it may have the guest, and is not ended.
    pub fn may_have_the_guest(&mut self, may: bool) {
        self.may_have_the_guest = may;
    }
}

impl Drop for Successor {
    fn drop(&mut self) {
        if self.may_have_the_guest {
            return;
        }
        if matches!(self.child.try_wait(), Ok(None))
            && let Ok(pid) = libc::pid_t::try_from(self.child.id())
        {
            // SAFETY: takes numbers only; the child has not been waited for, so the number is its own.
            unsafe { libc::kill(pid, libc::SIGTERM) };
            child_has_ended(&self.child, Instant::now() + END_TIME);
            kill_all(&mut self.child);
        }
        for file in &self.files {
            // They have names that nothing else has; one that was killed has left them.
            if fs::symlink_metadata(file).is_ok_and(|there| there.file_type().is_socket()) {
                let _ = fs::remove_file(file);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vmm_is_known_by_its_version() {
        assert!(is_vmm("cloud-hypervisor v53.0.0\ngodwit v0.1.0\n"));
        for other in ["", "cloud-hypervisor v53.0\n", "godwit v0.1.0\n", "rubbish"] {
            assert!(!is_vmm(other), "{other}");
        }
    }

    #[test]
    fn what_a_program_prints_is_shown_on_one_line() {
        assert_eq!(plain(b"  a\x1b[31m\n\tb\0c\n"), "a [31m b c");
        assert_eq!(plain(&[b'x'; 10_000]).len(), SHOWN_CHARS);
        assert_eq!(shown(""), "");
    }
}
