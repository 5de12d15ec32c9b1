// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Console backends: terminals, files, sockets.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use log::warn;
use parking_lot::{Mutex, MutexGuard};

use super::WRITE_CHUNK_BYTES;
use super::listener::PathListener;
use super::standard::{self, Carrier};
use crate::{LogLimit, log_limited, syscalls};

/// Raw mode of a terminal; restored when dropped, unless another owner has the terminal by then.
///
/// A machine may end late, when the next one already uses the same terminal. So each terminal has one owner
/// in this process, the most recent one, and only that restores the original settings.
pub struct RawTerminal {
    fd: OwnedFd,
    number: u64,
}

/// Device and inode of a terminal, and its device number.
type TerminalId = (u64, u64, u64);

/// A terminal in raw mode.
struct Owned {
    terminal: TerminalId,
    owner: u64,
    before: libc::termios,
}

struct Owners {
    terminals: Vec<Owned>,
    last: u64,
}

/// Locked while a terminal's settings are changed, which does not block on its reader.
static OWNERS: Mutex<Owners> = Mutex::new(Owners { terminals: Vec::new(), last: 0 });

fn owners() -> MutexGuard<'static, Owners> {
    OWNERS.lock()
}

fn terminal_id(fd: BorrowedFd<'_>) -> io::Result<TerminalId> {
    let there = File::from(fd.try_clone_to_owned()?).metadata()?;
    Ok((there.dev(), there.ino(), there.rdev()))
}

impl RawTerminal {
    /// Sets raw mode; `None` if the descriptor is not a terminal.
    pub fn enter(fd: BorrowedFd<'_>) -> io::Result<Option<Self>> {
        if !syscalls::is_terminal(fd) {
            return Ok(None);
        }
        let (now, terminal) = (syscalls::terminal_settings(fd)?, terminal_id(fd)?);
        let mut owners = owners();
        owners.last += 1;
        let guard = Self { fd: fd.try_clone_to_owned()?, number: owners.last };
        let owned = owners.terminals.iter_mut().find(|owned| owned.terminal == terminal);
        let before = if let Some(owned) = owned {
            owned.owner = guard.number;
            owned.before
        } else {
            owners.terminals.push(Owned { terminal, owner: guard.number, before: now });
            now
        };
        let set = syscalls::set_terminal_settings(fd, &syscalls::raw_settings(before));
        // The cleanup on failure takes the lock.
        drop(owners);
        set.map(|()| Some(guard))
    }

    /// Restores the terminal, unless it has another owner by now. Idempotent.
    pub fn restore(&self) {
        let mut owners = owners();
        let owned = owners.terminals.iter().position(|owned| owned.owner == self.number);
        let Some(owned) = owned.map(|at| owners.terminals.swap_remove(at)) else { return };
        if let Err(error) = syscalls::set_terminal_settings(self.fd.as_fd(), &owned.before) {
            warn!("cannot restore the terminal: {error}");
        }
    }
}

impl Drop for RawTerminal {
    fn drop(&mut self) {
        self.restore();
    }
}

/// Current source of input and sink of output. They are separate descriptors even for the same file, as
/// each is polled by itself.
#[derive(Default)]
pub(super) struct Channel {
    pub(super) input: Option<File>,
    pub(super) output: Option<File>,
    /// Of lines that peers cause by coming and going.
    log_limit: LogLimit,
}

impl Channel {
    /// Writes without blocking; returns the number of bytes written. A broken output is closed.
    pub(super) fn write(&mut self, bytes: &[u8]) -> usize {
        let mut written = 0;
        while let Some(output) = &mut self.output {
            let rest = bytes.get(written..).unwrap_or_default();
            let chunk = rest.get(..rest.len().min(WRITE_CHUNK_BYTES)).unwrap_or_default();
            if chunk.is_empty() {
                break;
            }
            match syscalls::poll_now(output.as_fd(), libc::POLLOUT) {
                Ok(ready) if ready & (libc::POLLOUT | libc::POLLERR | libc::POLLHUP) != 0 => {}
                _ => break,
            }
            match output.write(chunk) {
                Ok(len_bytes) => written += len_bytes,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    log_limited!(self.log_limit, Warn, "console output is gone: {error}");
                    self.output = None;
                }
            }
        }
        written
    }

    /// Reads available input; `Err` at the end of the input.
    fn read(&mut self, buffer: &mut [u8]) -> Result<usize, ()> {
        let Some(input) = &mut self.input else { return Ok(0) };
        if buffer.is_empty() {
            return Ok(0);
        }
        match syscalls::poll_now(input.as_fd(), libc::POLLIN) {
            Ok(0) => return Ok(0),
            Ok(_) => {}
            Err(_) => return Err(()),
        }
        match input.read(buffer) {
            Ok(0) => Err(()),
            Ok(len_bytes) => Ok(len_bytes),
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
                ) =>
            {
                Ok(0)
            }
            Err(_) => Err(()),
        }
    }
}

/// Keeps the channel open, or opens new ones.
enum OutputSource {
    Nothing,
    /// Standard output, with what is dropped with the endpoint.
    Standard {
        output: OwnedFd,
        _carrier: Option<Carrier>,
        _raw: Option<RawTerminal>,
    },
    /// Keeps a slave open, so that the master neither hangs up nor fails.
    Slave {
        _slave: OwnedFd,
    },
    Listener(PathListener),
}

pub(super) struct Backend {
    pub(super) channel: Channel,
    source: OutputSource,
}

impl Backend {
    pub(super) fn null() -> Self {
        Self { channel: Channel::default(), source: OutputSource::Nothing }
    }

    pub(super) fn file(path: &Path) -> io::Result<Self> {
        let output = super::open_output(path)?;
        Ok(Self {
            channel: Channel { output: Some(output), ..Channel::default() },
            source: OutputSource::Nothing,
        })
    }

    /// A channel of `input` and `output`; a terminal at the input is in raw mode while this lives.
    pub(super) fn standard(input: BorrowedFd<'_>, output: BorrowedFd<'_>) -> io::Result<Self> {
        let standard::Output { file, carrier } = standard::output(output)?;
        let source = OutputSource::Standard {
            output: output.try_clone_to_owned()?,
            _carrier: carrier,
            _raw: RawTerminal::enter(input)?,
        };
        let channel = Channel {
            input: Some(standard::input(input)?),
            output: Some(file),
            ..Channel::default()
        };
        Ok(Self { channel, source })
    }

    pub(super) fn pty() -> io::Result<(Self, PathBuf)> {
        let (master, slave, path) = syscalls::open_pty()?;
        let raw = syscalls::raw_settings(syscalls::terminal_settings(slave.as_fd())?);
        syscalls::set_terminal_settings(slave.as_fd(), &raw)?;
        let backend = Self {
            channel: Channel {
                input: Some(master.try_clone()?.into()),
                output: Some(master.into()),
                ..Channel::default()
            },
            source: OutputSource::Slave { _slave: slave },
        };
        Ok((backend, path.into()))
    }

    pub(super) fn socket(path: &Path) -> io::Result<Self> {
        let source = OutputSource::Listener(PathListener::bind(path)?);
        Ok(Self { channel: Channel::default(), source })
    }

    /// Whether all output is discarded.
    pub(super) fn discards(&self) -> bool {
        self.channel.output.is_none() && !matches!(self.source, OutputSource::Listener(_))
    }

    /// The terminal whose size is that of the console, if there is one.
    pub(super) fn screen(&self) -> Option<BorrowedFd<'_>> {
        match &self.source {
            OutputSource::Standard { output, .. } => Some(output.as_fd()),
            _ => self.channel.output.as_ref().map(AsFd::as_fd),
        }
    }

    /// The descriptor of the listener.
    pub(super) fn listener(&self) -> Option<RawFd> {
        match &self.source {
            OutputSource::Listener(listener) => Some(listener.as_raw_fd()),
            _ => None,
        }
    }

    /// Accepts a peer, which takes the place of an earlier one: that one may have hung for long.
    pub(super) fn accept(&mut self) {
        let OutputSource::Listener(listener) = &self.source else { return };
        let Ok(peer) = listener.accept() else { return };
        let path = listener.path().display();
        log_limited!(self.channel.log_limit, Info, "a peer connected to the console socket {path}");
        (self.channel.input, self.channel.output) = both_ways(peer).unzip();
    }

    pub(super) fn read(&mut self, buffer: &mut [u8]) -> usize {
        if let Ok(len_bytes) = self.channel.read(buffer) {
            return len_bytes;
        }
        self.channel.input = None;
        if matches!(self.source, OutputSource::Listener(_)) {
            self.channel.output = None;
        }
        0
    }
}

/// Its input and its output.
fn both_ways(peer: UnixStream) -> Option<(File, File)> {
    peer.set_nonblocking(true).ok()?;
    let output = peer.try_clone().ok()?;
    Some((OwnedFd::from(peer).into(), OwnedFd::from(output).into()))
}
