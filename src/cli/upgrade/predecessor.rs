// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The process whose place is taken: which of its options belong to the process and not to the VM.
//!
//! Owns what is read of it, which is its command line. It must never change anything of it, nor pass on options of the VM,
//! which come with the VM.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};
use std::os::unix::ffi::OsStringExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use thiserror::Error;

use super::process;
use crate::cli::launch::{self, Launch, RunArgs};

/// Why the place of a process cannot be taken.
#[derive(Debug, Error)]
pub enum PredecessorError {
    /// Its command line cannot be read.
    #[error("process {pid} cannot be looked at")]
    Look {
        /// The process.
        pid: i32,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// Its command line is of another program, or of another version.
    #[error("the command line of process {pid} is not one that this ch-remote knows: {reason}")]
    CommandLine {
        /// The process.
        pid: i32,
        /// The reason.
        reason: String,
    },
    /// Another process has made the socket.
    #[error(
        "the API socket was made by another process, as by a socket unit of systemd: a VM whose API socket is inherited \
         cannot be upgraded"
    )]
    InheritedSocket,
    /// The socket's path on the command line leads to something else.
    #[error("the process listens at '{own}', which is not '{seen}' here")]
    OtherSocket {
        /// Its path.
        own: PathBuf,
        /// The path that was given.
        seen: PathBuf,
    },
    /// A relative path of a process whose directory cannot be read.
    #[error(
        "'{0}' on its command line is relative, and the directory of the process cannot be read"
    )]
    Relative(PathBuf),
    /// A descriptor of the process.
    #[error(
        "its --event-monitor is a descriptor, which cannot be passed on: a VM with --event-monitor path=PATH can be \
         upgraded"
    )]
    EventDescriptor,
}

/// The process, and what it was started with.
#[derive(Debug)]
pub struct Predecessor {
    /// Its process ID.
    pub pid: i32,
    pidfd: OwnedFd,
    args: RunArgs,
    /// Its directory, if it can be read.
    directory: Option<PathBuf>,
}

impl Predecessor {
    /// Looks at a process.
    ///
    /// # Errors
    /// [`PredecessorError`]
    pub fn of(pid: i32) -> Result<Self, PredecessorError> {
        let look = |source| PredecessorError::Look { pid, source };
        let pidfd = process::open(pid).map_err(look)?;
        let line = fs::read(format!("/proc/{pid}/cmdline")).map_err(look)?;
        let args = read(pid, &line)?;
        let directory = fs::read_link(format!("/proc/{pid}/cwd")).ok();
        Ok(Self { pid, pidfd, args, directory })
    }

    /// Its directory, if it can be read.
    pub fn directory(&self) -> Option<&Path> {
        self.directory.as_deref()
    }

    /// The path of its API socket, as it sees it itself, which has to be the socket at `seen`.
    ///
    /// # Errors
    /// It has none, or another.
    pub fn socket(&self, seen: &Path) -> Result<PathBuf, PredecessorError> {
        let text = self.args.api_socket.as_deref().unwrap_or_default();
        if text.starts_with("fd=") || text.is_empty() {
            return Err(PredecessorError::InheritedSocket);
        }
        let own = self.absolute(text.strip_prefix("path=").unwrap_or(text))?;
        let identity = |path: &Path| {
            let there = fs::metadata(path).ok()?;
            Some((there.dev(), there.ino()))
        };
        // Its file system may be another, and may not be looked at.
        let inside = Path::new(&format!("/proc/{}/root", self.pid))
            .join(own.strip_prefix("/").unwrap_or(&own));
        let found = identity(&inside).or_else(|| identity(&own));
        if found.is_some() && found == identity(seen) && own.file_name() == seen.file_name() {
            return Ok(own);
        }
        Err(PredecessorError::OtherSocket { own, seen: seen.to_owned() })
    }

    /// The path of its metrics socket, as it sees it.
    ///
    /// # Errors
    /// It is relative to a directory that cannot be read.
    pub fn metrics(&self) -> Result<Option<PathBuf>, PredecessorError> {
        let path = self.args.metrics.as_deref().and_then(|text| text.strip_prefix("unix:"));
        path.map(|path| self.absolute(path)).transpose()
    }

    fn absolute(&self, path: impl AsRef<Path>) -> Result<PathBuf, PredecessorError> {
        let path = path.as_ref();
        if path.is_absolute() {
            return Ok(path.to_owned());
        }
        let directory = self.directory.as_ref();
        directory
            .map(|directory| directory.join(path))
            .ok_or_else(|| PredecessorError::Relative(path.to_owned()))
    }

    /// The options that belong to the process, for the one that takes its place.
    ///
    /// # Errors
    /// One of them cannot be passed on.
    pub fn arguments(&self, socket: &Path) -> Result<Vec<OsString>, PredecessorError> {
        let args = &self.args;
        let with = |prefix: &str, path: &Path| {
            let mut text = OsString::from(prefix);
            text.push(path);
            text
        };
        let mut line = vec!["--api-socket".into(), with("path=", socket)];
        if let Some(path) = self.metrics()? {
            line.extend(["--metrics".into(), with("unix:", &path)]);
        }
        if let Some(target) = &args.event_monitor {
            let path = target.strip_prefix("path=").ok_or(PredecessorError::EventDescriptor)?;
            line.extend(["--event-monitor".into(), with("path=", &self.absolute(path)?)]);
        }
        if let Some(path) = &args.log_file {
            line.extend(["--log-file".into(), self.absolute(path)?.into()]);
        }
        if let Some(format) = &args.log_format {
            line.extend(["--log-format".into(), format.into()]);
        }
        line.extend(["--seccomp".into(), args.seccomp.text().into()]);
        if args.no_shutdown {
            line.push("--no-shutdown".into());
        }
        line.extend((0..args.verbosity).map(|_| "-v".into()));
        Ok(line)
    }

    /// Waits for its end; whether it has ended.
    pub fn has_ended(&self, limit: Duration) -> bool {
        process::has_ended(&self.pidfd, limit)
    }

    /// A duplicate of one of its descriptors; `None` where that is not allowed, as to other than root.
    pub fn descriptor(&self, number: i32) -> Option<OwnedFd> {
        let pidfd = self.pidfd.as_raw_fd();
        // SAFETY: takes numbers only.
        let fd = unsafe { libc::syscall(libc::SYS_pidfd_getfd, pidfd, number, 0_u32) };
        // SAFETY: the kernel has just made the descriptor for this process; nothing else owns it.
        let own = |fd| unsafe { OwnedFd::from_raw_fd(fd) };
        i32::try_from(fd).ok().filter(|fd| *fd >= 0).map(own)
    }
}

/// The arguments in a command line as the kernel has it.
fn read(pid: i32, line: &[u8]) -> Result<RunArgs, PredecessorError> {
    let bad = |reason: String| PredecessorError::CommandLine { pid, reason };
    let line = line.strip_suffix(b"\0").unwrap_or(line);
    let words = line.split(|byte| *byte == 0).map(|word| OsString::from_vec(word.to_owned()));
    let first_line = |text: String| text.lines().next().unwrap_or_default().to_owned();
    match launch::parse(words) {
        Ok(Ok(Launch::Run(args))) => Ok(*args),
        Ok(Ok(_)) => Err(bad("it is no VMM".to_owned())),
        Ok(Err(error)) => Err(bad(error_text::chain(&error))),
        Err(error) => Err(bad(first_line(error.to_string()))),
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test that cannot unwrap has failed")]

    use super::*;

    fn with(line: &str, directory: Option<&str>) -> Predecessor {
        let pid = i32::try_from(std::process::id()).unwrap();
        let line = format!("cloud-hypervisor {line}").replace(' ', "\0") + "\0";
        let args = read(pid, line.as_bytes()).unwrap();
        Predecessor {
            pid,
            pidfd: process::open(pid).unwrap(),
            args,
            directory: directory.map(Into::into),
        }
    }

    fn line(of: &Predecessor) -> Result<String, PredecessorError> {
        let words = of.arguments(Path::new("/run/api"))?;
        let words: Vec<_> = words.iter().map(|word| word.to_str().unwrap()).collect();
        Ok(words.join(" "))
    }

    #[test]
    fn options_of_the_process_are_passed_on_and_those_of_the_vm_are_not() {
        let all = "--api-socket /run/api --kernel /k --memory size=1G,shared=on --landlock --metrics unix:m -vv \
                   --log-file log --log-format {msg} --event-monitor path=/e --seccomp log --no-shutdown";
        assert_eq!(
            line(&with(all, Some("/here"))).unwrap(),
            "--api-socket path=/run/api --metrics unix:/here/m --event-monitor path=/e --log-file /here/log \
             --log-format {msg} --seccomp log --no-shutdown -v -v"
        );
        let again = "--api-socket path=/run/api --seccomp true --successor fd=5,suffix=.x";
        assert_eq!(line(&with(again, None)).unwrap(), "--api-socket path=/run/api --seccomp true");
    }

    #[test]
    fn what_cannot_be_passed_on_is_refused() {
        let error = line(&with("--api-socket /a --log-file log", None)).unwrap_err();
        assert!(matches!(error, PredecessorError::Relative(path) if path == Path::new("log")));
        let error = line(&with("--api-socket /a --event-monitor fd=7", None)).unwrap_err();
        assert!(matches!(error, PredecessorError::EventDescriptor));
        let page_server = b"cloud-hypervisor\0--page-server\x001\0--api-socket\0/a\0";
        assert!(matches!(read(1, page_server), Err(PredecessorError::CommandLine { .. })));
        let error = read(1, b"sleep\0--forever\0").unwrap_err().to_string();
        assert!(error.contains("'--forever'") && !error.contains('\n'), "{error}");
    }

    #[test]
    fn a_socket_is_known_by_its_file() {
        let folder = std::env::temp_dir().join(format!("godwit-upgrade-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let (one, other) = (folder.join("api"), folder.join("other"));
        fs::write(&one, "").unwrap();
        fs::write(&other, "").unwrap();
        let with_path = with(&format!("--api-socket path={}", one.display()), None);
        assert_eq!(with_path.socket(&one).unwrap(), one);
        let error = with_path.socket(&other).unwrap_err();
        assert!(matches!(error, PredecessorError::OtherSocket { .. }), "{error}");
        let relative = with("--api-socket api", folder.to_str());
        assert_eq!(relative.socket(&one).unwrap(), one);
        let inherited = with("--api-socket fd=3", None).socket(&one).unwrap_err();
        assert!(matches!(inherited, PredecessorError::InheritedSocket), "{inherited}");
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn a_process_that_runs_has_not_ended() {
        let own = with("--api-socket /a", None);
        assert!(!own.has_ended(Duration::ZERO));
        assert!(own.descriptor(2).is_some(), "one's own");
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let pidfd = process::open(i32::try_from(child.id()).unwrap()).unwrap();
        let other = Predecessor { pidfd, ..own };
        assert!(other.has_ended(Duration::from_mins(1)));
        child.wait().unwrap();
    }
}
