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
use socket2::{Domain, SockAddr, Socket, Type};
use vmm_sys_util::sock_ctrl_msg::ScmSocket as _;

use super::crb::BUFFER_BYTES;

/// How long a started emulator may take until it listens.
const LISTEN_WITHIN: Duration = Duration::from_secs(2);
const BETWEEN_ATTEMPTS: Duration = Duration::from_millis(20);
/// How long one answer may take. Starting a TPM for the first time takes part of a second.
const ANSWER_WITHIN: Duration = Duration::from_secs(5);
/// Longest part of a state: several times what a TPM 2.0 with all its non-volatile memory in use has.
pub(super) const BLOB_BYTES_MAX: usize = 1 << 20;

const GET_CAPABILITY: u32 = 1;
const INIT: u32 = 2;
const CANCEL: u32 = 9;
const GET_STATE: u32 = 12;
const SET_STATE: u32 = 13;
const STOP: u32 = 14;
const SET_DATA_FD: u32 = 16;
const SET_BUFFER_SIZE: u32 = 17;

/// What has to be there, and its name.
const NEEDED: [(u64, &str); 7] = [
    (1, "init"),
    (1 << 5, "cancel"),
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
    #[error("it does not answer to '{what}'")]
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

/// The control connection.
pub(super) struct Emulator {
    control: UnixStream,
}

impl Emulator {
    /// Connects, and returns the data connection, too.
    pub(super) fn connect(path: &Path) -> Result<(Self, UnixStream), EmulatorError> {
        Self::over(connect(path).map_err(EmulatorError::Connect)?)
    }

    /// The same over a connection that is there.
    pub(super) fn over(control: UnixStream) -> Result<(Self, UnixStream), EmulatorError> {
        let limited = control
            .set_read_timeout(Some(ANSWER_WITHIN))
            .and_then(|()| control.set_write_timeout(Some(ANSWER_WITHIN)));
        limited.map_err(EmulatorError::Connect)?;
        let mut this = Self { control };
        this.check_capabilities()?;
        let (data, theirs) = UnixStream::pair().map_err(EmulatorError::Connect)?;
        let what = "set the data socket";
        let request = SET_DATA_FD.to_be_bytes();
        let sent = this.control.send_with_fd(&request[..], theirs.as_raw_fd());
        sent.map_err(|error| EmulatorError::Io { what, source: error.into() })?;
        this.result(what)?;
        let _ = data.set_write_timeout(Some(ANSWER_WITHIN));
        this.stop()?;
        this.set_buffer_size()?;
        Ok((this, data))
    }

    /// Starts the TPM as at power on.
    pub(super) fn power_on(&mut self) -> Result<(), EmulatorError> {
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

    /// Ends the command that is being executed.
    pub(super) fn cancel(&mut self) -> Result<(), EmulatorError> {
        self.request("cancel", CANCEL, &[])
    }

    fn check_capabilities(&mut self) -> Result<(), EmulatorError> {
        let what = "get capability";
        self.send(what, GET_CAPABILITY, &[])?;
        // The first half is a result in later versions, and zero in both.
        let answer: [u8; 8] = self.receive(what)?;
        let has = u64::from_be_bytes(answer);
        match NEEDED.iter().find(|(bit, _)| has & bit == 0) {
            Some((_, name)) => Err(EmulatorError::Lacks(name)),
            None => Ok(()),
        }
    }

    fn set_buffer_size(&mut self) -> Result<(), EmulatorError> {
        let what = "set buffer size";
        let size = u32::try_from(BUFFER_BYTES).unwrap_or(u32::MAX);
        self.send(what, SET_BUFFER_SIZE, &size.to_be_bytes())?;
        self.result(what)?;
        let [set, ..] = self.words::<3>(what)?;
        if set == size { Ok(()) } else { Err(EmulatorError::Buffer(set)) }
    }

    fn stop(&mut self) -> Result<(), EmulatorError> {
        self.request("stop", STOP, &[])
    }

    fn init(&mut self, flags: u32) -> Result<(), EmulatorError> {
        self.request("init", INIT, &flags.to_be_bytes())
    }

    fn blob(&mut self, kind: u32) -> Result<StateBlob, EmulatorError> {
        let what = "get state";
        let request = [STATE_DECRYPTED, kind, 0].map(u32::to_be_bytes).concat();
        self.send(what, GET_STATE, &request)?;
        match self.result(what) {
            // There is no such part, as after a start from power off; the lengths come nevertheless.
            Err(EmulatorError::Refused { result, .. }) if result & NOT_FATAL != 0 => {}
            other => other?,
        }
        let [flags, total, length] = self.words::<3>(what)?;
        let len = usize::try_from(length).unwrap_or(usize::MAX);
        if total != length || len > BLOB_BYTES_MAX {
            return Err(EmulatorError::TooLong(total.max(length)));
        }
        let mut bytes = vec![0; len];
        self.control.read_exact(&mut bytes).map_err(|source| EmulatorError::Io { what, source })?;
        Ok(StateBlob { flags, bytes })
    }

    fn set_blob(&mut self, kind: u32, blob: &StateBlob) -> Result<(), EmulatorError> {
        let what = "set state";
        let length = u32::try_from(blob.bytes.len()).unwrap_or(u32::MAX);
        let mut request = [blob.flags, kind, length].map(u32::to_be_bytes).concat();
        request.extend_from_slice(&blob.bytes);
        self.request(what, SET_STATE, &request)
    }

    fn request(
        &mut self,
        what: &'static str,
        command: u32,
        body: &[u8],
    ) -> Result<(), EmulatorError> {
        self.send(what, command, body)?;
        self.result(what)
    }

    fn send(&mut self, what: &'static str, command: u32, body: &[u8]) -> Result<(), EmulatorError> {
        let message = [&command.to_be_bytes(), body].concat();
        self.control.write_all(&message).map_err(|source| EmulatorError::Io { what, source })
    }

    fn receive<const N: usize>(&mut self, what: &'static str) -> Result<[u8; N], EmulatorError> {
        let mut bytes = [0; N];
        self.control.read_exact(&mut bytes).map_err(|source| EmulatorError::Io { what, source })?;
        Ok(bytes)
    }

    fn words<const N: usize>(&mut self, what: &'static str) -> Result<[u32; N], EmulatorError> {
        let mut words = [0; N];
        for word in &mut words {
            *word = u32::from_be_bytes(self.receive(what)?);
        }
        Ok(words)
    }

    fn result(&mut self, what: &'static str) -> Result<(), EmulatorError> {
        match u32::from_be_bytes(self.receive(what)?) {
            0 => Ok(()),
            result => Err(EmulatorError::Refused { what, result }),
        }
    }
}

fn connect(path: &Path) -> io::Result<UnixStream> {
    let address = SockAddr::unix(path)?;
    let until = Instant::now() + LISTEN_WITHIN;
    loop {
        let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
        let error = match socket.connect_timeout(&address, ANSWER_WITHIN) {
            Ok(()) => return Ok(std::os::fd::OwnedFd::from(socket).into()),
            Err(error) => error,
        };
        let may_come =
            matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused);
        if !may_come || Instant::now() >= until {
            return Err(error);
        }
        std::thread::sleep(BETWEEN_ATTEMPTS);
    }
}
