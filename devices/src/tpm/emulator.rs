// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The control connection to the process that implements the TPM.
//!
//! Owns the protocol of swtpm's control channel (its header `tpm_ioctl.h`): numbers are big-endian, each
//! answer begins with a result. Must never trust a length, nor wait without limit.

use std::io::{self, Read, Write};
use std::os::fd::AsRawFd as _;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use vmm_sys_util::sock_ctrl_msg::ScmSocket as _;

use super::crb::BUFFER_BYTES;
use crate::unix_connect::connect_within;

/// How long a started emulator may take until it listens.
const LISTEN_WITHIN: Duration = Duration::from_secs(2);
/// How long one answer may take. Starting a TPM for the first time takes part of a second.
pub(super) const ANSWER_WITHIN: Duration = Duration::from_secs(5);
const CANCEL_POLL_INTERVAL: Duration = Duration::from_millis(100);
/// Longest part of a state: several times what a TPM 2.0 with all its non-volatile memory in use has.
pub(super) const BLOB_BYTES_MAX: usize = 1 << 20;

const GET_CAPABILITY: u32 = 1;
const INIT: u32 = 2;
const GET_STATE: u32 = 12;
const SET_STATE: u32 = 13;
const STOP: u32 = 14;
const SET_DATA_FD: u32 = 16;
const SET_BUFFER_SIZE: u32 = 17;

/// What has to be there, and its name.
const NEEDED: [(u32, &str); 6] = [
    (1, "init"),
    (1 << 8, "reading its state"),
    (1 << 9, "setting its state"),
    (1 << 10, "stop"),
    (1 << 12, "a data socket"),
    (1 << 13, "setting the size of its buffer"),
];
/// A volatile state that was set is deleted once it is loaded: a later start is one from power off.
const INIT_DELETE_VOLATILE: u32 = 1;
/// Bit of results that are no errors.
const NOT_FATAL: u32 = 0x800;
/// The state is wanted as the next emulator can read it without the key of this one.
const STATE_DECRYPTED: u32 = 1;

/// Why the emulator cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum EmulatorError {
    /// Nothing listens at the socket.
    #[error("it cannot be connected to; start swtpm with --ctrl type=unixio,path=... first")]
    Connect(#[source] io::Error),
    /// A request was not answered.
    #[error("it does not answer to '{what}'; it may be busy, or serve another VM")]
    Io {
        /// The request.
        what: &'static str,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// A request was refused.
    #[error("it refuses '{what}' with TPM result {result:#x}")]
    Refused {
        /// The request.
        what: &'static str,
        /// Its result.
        result: u32,
    },
    /// An earlier answer did not come in time.
    #[error("'{0}' is not asked, as an earlier answer was late or made no sense; reboot the VM")]
    Broken(&'static str),
    /// It cannot do all that is needed.
    #[error("it does not support {0}; swtpm does since version 0.1")]
    Lacks(&'static str),
    /// It cannot take commands of the interface's size.
    #[error("its buffer has {0} bytes, and the interface needs {BUFFER_BYTES}")]
    Buffer(u32),
    /// A part of its state is too long.
    #[error("a part of its state has {0} bytes, more than {BLOB_BYTES_MAX}")]
    TooLong(u32),
}

/// A part of the emulator's state.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct StateBlob {
    /// The emulator's flags.
    pub(super) flags: u32,
    /// Contents; empty where there is no such part.
    pub(super) bytes: Vec<u8>,
}

/// Permanent, volatile and saved state, in the order in which they are set.
pub(super) type StateBlobs = [StateBlob; 3];

/// Until when an answer is waited for, and whether it is still wanted.
pub(super) struct Deadline<'a> {
    until: Instant,
    is_cancelled: &'a dyn Fn() -> bool,
}

impl<'a> Deadline<'a> {
    /// From now on for `within`, unless cancelled.
    pub(super) fn new(within: Duration, is_cancelled: &'a dyn Fn() -> bool) -> Self {
        Self { until: Instant::now() + within, is_cancelled }
    }

    /// How long the next system call may take.
    fn next(&self) -> io::Result<Duration> {
        if (self.is_cancelled)() {
            return Err(io::Error::other("the start was cancelled"));
        }
        match self.until.saturating_duration_since(Instant::now()) {
            Duration::ZERO => Err(io::ErrorKind::TimedOut.into()),
            left => Ok(left.min(CANCEL_POLL_INTERVAL)),
        }
    }
}

/// The control connection. After an answer that did not come in time, or made no sense, what comes next might be that
/// answer: nothing is asked any more.
pub(super) struct Emulator {
    control: UnixStream,
    is_broken: bool,
}

impl Emulator {
    /// Connects, and returns the data connection, too.
    pub(super) fn connect(
        path: &Path,
        first_answer_within: Duration,
        is_cancelled: &dyn Fn() -> bool,
    ) -> Result<(Self, UnixStream), EmulatorError> {
        let control = connect_within(path, LISTEN_WITHIN, is_cancelled);
        let control = control.map_err(EmulatorError::Connect)?;
        Self::over(control, first_answer_within, is_cancelled)
    }

    /// The same over a connection that is there.
    pub(super) fn over(
        control: UnixStream,
        first_answer_within: Duration,
        is_cancelled: &dyn Fn() -> bool,
    ) -> Result<(Self, UnixStream), EmulatorError> {
        let mut this = Self { control, is_broken: false };
        this.check_capabilities(&Deadline::new(first_answer_within, is_cancelled))?;
        let (data, theirs) = UnixStream::pair().map_err(EmulatorError::Connect)?;
        let what = "set the data socket";
        let request = SET_DATA_FD.to_be_bytes();
        let sent = this.control.send_with_fd(&request[..], theirs.as_raw_fd());
        sent.map_err(|error| EmulatorError::Io { what, source: error.into() })?;
        this.result(what, &Deadline::new(ANSWER_WITHIN, is_cancelled))?;
        drop(theirs);
        let limited = data
            .set_write_timeout(Some(ANSWER_WITHIN))
            .and_then(|()| data.set_read_timeout(Some(ANSWER_WITHIN)));
        limited.map_err(EmulatorError::Connect)?;
        this.stop()?;
        this.set_buffer_size()?;
        Ok((this, data))
    }

    /// Another handle of the connection, by which it can be ended.
    pub(super) fn handle(&self) -> io::Result<UnixStream> {
        self.control.try_clone()
    }

    /// Starts the TPM as at power on. A volatile state that a failed restore has left is not one of this start.
    pub(super) fn power_on(&mut self) -> Result<(), EmulatorError> {
        self.stop()?;
        self.init(INIT_DELETE_VOLATILE)?;
        self.stop()?;
        self.init(0)
    }

    /// The state of a TPM that executes no command.
    pub(super) fn state(&mut self) -> Result<StateBlobs, EmulatorError> {
        Ok([self.blob(1)?, self.blob(2)?, self.blob(3)?])
    }

    /// Starts the TPM with a state.
    pub(super) fn restore(&mut self, blobs: &StateBlobs) -> Result<(), EmulatorError> {
        self.stop()?;
        for (kind, blob) in (1..).zip(blobs) {
            if !blob.bytes.is_empty() {
                self.set_blob(kind, blob)?;
            }
        }
        self.init(INIT_DELETE_VOLATILE)
    }

    fn check_capabilities(&mut self, deadline: &Deadline<'_>) -> Result<(), EmulatorError> {
        let what = "get capability";
        self.send(what, &[GET_CAPABILITY], &[], deadline)?;
        // The first word is a result in later versions, and zero in both.
        let [_, has] = self.words(what, deadline)?;
        match NEEDED.iter().find(|(bit, _)| has & bit == 0) {
            Some((_, name)) => Err(EmulatorError::Lacks(name)),
            None => Ok(()),
        }
    }

    fn set_buffer_size(&mut self) -> Result<(), EmulatorError> {
        let what = "set buffer size";
        let size = u32::try_from(BUFFER_BYTES).unwrap_or(u32::MAX);
        let [result, set, ..] = self.ask::<4>(what, &[SET_BUFFER_SIZE, size], &[])?;
        refusal(what, result)?;
        if set == size { Ok(()) } else { Err(EmulatorError::Buffer(set)) }
    }

    fn stop(&mut self) -> Result<(), EmulatorError> {
        self.request("stop", &[STOP], &[])
    }

    fn init(&mut self, flags: u32) -> Result<(), EmulatorError> {
        self.request("init", &[INIT, flags], &[])
    }

    fn blob(&mut self, kind: u32) -> Result<StateBlob, EmulatorError> {
        let what = "get state";
        let deadline = Deadline::new(ANSWER_WITHIN, &|| false);
        self.send(what, &[GET_STATE, STATE_DECRYPTED, kind, 0], &[], &deadline)?;
        // Lengths come with a refusal, too.
        let [result, flags, total, length] = self.words(what, &deadline)?;
        let len = usize::try_from(length).unwrap_or(usize::MAX);
        if total != length || len > BLOB_BYTES_MAX {
            self.is_broken = true;
            return Err(EmulatorError::TooLong(total.max(length)));
        }
        let mut bytes = vec![0; len];
        self.read(what, &mut bytes, &deadline)?;
        // Without this bit it is an error; with it there is no such part, as after a start from power off.
        refusal(what, if result & NOT_FATAL == 0 { result } else { 0 })?;
        Ok(StateBlob { flags, bytes })
    }

    fn set_blob(&mut self, kind: u32, blob: &StateBlob) -> Result<(), EmulatorError> {
        let length = u32::try_from(blob.bytes.len()).unwrap_or(u32::MAX);
        self.request("set state", &[SET_STATE, blob.flags, kind, length], &blob.bytes)
    }

    fn request(
        &mut self,
        what: &'static str,
        words: &[u32],
        body: &[u8],
    ) -> Result<(), EmulatorError> {
        let [result] = self.ask(what, words, body)?;
        refusal(what, result)
    }

    /// A request and its answer of so many words.
    fn ask<const N: usize>(
        &mut self,
        what: &'static str,
        words: &[u32],
        body: &[u8],
    ) -> Result<[u32; N], EmulatorError> {
        let deadline = Deadline::new(ANSWER_WITHIN, &|| false);
        self.send(what, words, body, &deadline)?;
        self.words(what, &deadline)
    }

    fn send(
        &mut self,
        what: &'static str,
        words: &[u32],
        body: &[u8],
        deadline: &Deadline<'_>,
    ) -> Result<(), EmulatorError> {
        let words = words.iter().flat_map(|word| word.to_be_bytes());
        let message: Vec<u8> = words.chain(body.iter().copied()).collect();
        self.transfer(what, message.len(), deadline, |mut control, at| {
            control.write(message.get(at..).unwrap_or_default())
        })
    }

    fn read(
        &mut self,
        what: &'static str,
        bytes: &mut [u8],
        deadline: &Deadline<'_>,
    ) -> Result<(), EmulatorError> {
        self.transfer(what, bytes.len(), deadline, |mut control, at| {
            control.read(bytes.get_mut(at..).unwrap_or_default())
        })
    }

    /// Repeats a system call until all bytes are through; what is late or cut breaks the connection.
    fn transfer(
        &mut self,
        what: &'static str,
        len: usize,
        deadline: &Deadline<'_>,
        mut call: impl FnMut(&UnixStream, usize) -> io::Result<usize>,
    ) -> Result<(), EmulatorError> {
        if self.is_broken {
            return Err(EmulatorError::Broken(what));
        }
        let mut at = 0;
        while at < len {
            let done = deadline.next().and_then(|next| {
                self.control.set_read_timeout(Some(next))?;
                self.control.set_write_timeout(Some(next))?;
                call(&self.control, at)
            });
            match done {
                Ok(0) => {
                    self.is_broken = true;
                    return Err(EmulatorError::Io {
                        what,
                        source: io::ErrorKind::UnexpectedEof.into(),
                    });
                }
                Ok(done) => at += done,
                // The limit of one call has passed, or a signal came: the deadline decides.
                Err(error)
                    if matches!(
                        error.kind(),
                        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
                    ) => {}
                Err(source) => {
                    self.is_broken = true;
                    return Err(EmulatorError::Io { what, source });
                }
            }
        }
        Ok(())
    }

    fn words<const N: usize>(
        &mut self,
        what: &'static str,
        deadline: &Deadline<'_>,
    ) -> Result<[u32; N], EmulatorError> {
        let mut words = [0; N];
        for word in &mut words {
            let mut bytes = [0; 4];
            self.read(what, &mut bytes, deadline)?;
            *word = u32::from_be_bytes(bytes);
        }
        Ok(words)
    }

    fn result(&mut self, what: &'static str, deadline: &Deadline<'_>) -> Result<(), EmulatorError> {
        let [result] = self.words(what, deadline)?;
        refusal(what, result)
    }
}

/// Success is zero.
fn refusal(what: &'static str, result: u32) -> Result<(), EmulatorError> {
    if result == 0 { Ok(()) } else { Err(EmulatorError::Refused { what, result }) }
}
