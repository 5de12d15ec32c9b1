// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Standard input and output as a non-blocking console backend.
//!
//! Owns how that is done: whether a write blocks is a property of the open file description,
//! which the shell and other programs share, so it must never be changed here. A terminal or a pipe is
//! opened once more; where that is impossible, a separate thread does the blocking calls.

use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use crate::syscalls;

/// Longest wait at the end for the last output, which may be the guest's final message.
const LAST_OUTPUT_TIME: Duration = Duration::from_millis(200);

/// Bytes that the thread copies at a time.
const CARRY_BYTES: usize = 4096;

/// An output with non-blocking writes.
pub(super) struct Output {
    pub(super) file: File,
    /// The thread that does blocking writes, if needed. Dropped after the file.
    pub(super) carrier: Option<Carrier>,
}

/// A thread that copies bytes from a pipe to an output. Dropping it waits briefly for the last of them.
pub(super) struct Carrier {
    done: Receiver<()>,
}

impl Drop for Carrier {
    fn drop(&mut self) {
        // An error means that the thread has ended, or that the reader is too slow.
        let _ = self.done.recv_timeout(LAST_OUTPUT_TIME);
    }
}

/// A non-blocking output to the file of `fd`.
///
/// # Errors
/// The host's error.
pub(super) fn output(fd: BorrowedFd<'_>) -> io::Result<Output> {
    let own = fd.try_clone_to_owned()?;
    let file = File::from(own);
    // Writes to a regular file do not block, and another file description would have its own offset.
    if file.metadata()?.file_type().is_file() {
        return Ok(Output { file, carrier: None });
    }
    match open_again(&file, libc::O_WRONLY) {
        Ok(file) => Ok(Output { file, carrier: None }),
        // A socket cannot be reopened, nor can a terminal of another user.
        Err(error) => {
            log::debug!("standard output is written to by a thread of its own: {error}");
            carried(file)
        }
    }
}

/// A non-blocking input from the file of `fd`. If it cannot be reopened, a read can block only because of
/// another reader of the same terminal.
///
/// # Errors
/// The host's error.
pub(super) fn input(fd: BorrowedFd<'_>) -> io::Result<File> {
    let file = File::from(fd.try_clone_to_owned()?);
    Ok(open_again(&file, libc::O_RDONLY).unwrap_or(file))
}

/// A new file description of the same terminal, pipe or device.
fn open_again(file: &File, access: libc::c_int) -> io::Result<File> {
    let there = file.metadata()?;
    let kind = there.file_type();
    // Opening /dev/ptmx would create another pseudo terminal.
    let is_master = kind.is_char_device() && there.rdev() == libc::makedev(5, 2);
    if is_master || !kind.is_char_device() && !kind.is_fifo() {
        return Err(io::ErrorKind::Unsupported.into());
    }
    syscalls::open_again(file.as_fd(), access).map(File::from)
}

/// Writes everything, also if another program has made the output non-blocking.
fn write_waiting(to: &mut File, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match to.write(bytes) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(len_bytes) => bytes = bytes.get(len_bytes..).unwrap_or_default(),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                syscalls::poll_for(to.as_fd(), libc::POLLOUT)?;
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// A pipe to a thread that writes to `to`, which may block.
pub(super) fn carried(mut to: File) -> io::Result<Output> {
    let (mut from, pipe) = io::pipe()?;
    let pipe = OwnedFd::from(pipe);
    syscalls::set_nonblocking(pipe.as_fd())?;
    let (running, done) = channel::<()>();
    stoppable_thread::spawn("console-out", move || {
        let _running = running;
        let mut buffer = [0; CARRY_BYTES];
        loop {
            match from.read(&mut buffer) {
                Ok(0) => break,
                Ok(len_bytes) => {
                    let bytes = buffer.get(..len_bytes).unwrap_or_default();
                    if write_waiting(&mut to, bytes).is_err() {
                        break;
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => break,
            }
        }
    })?;
    Ok(Output { file: pipe.into(), carrier: Some(Carrier { done }) })
}
