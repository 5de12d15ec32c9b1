// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The messages of the protocol: one variant and one command number each, read and written in one place.
//!
//! Owns the mapping between commands and payloads. A new message does not compile until it has a
//! number, a form and a limit. Whether a message is allowed now is for the state machines.

use super::ProtocolError;
pub use super::answer::Answer;
use super::blobs::{self, BLOB_LIST_BYTES_MAX, BlobChunk};
use super::capabilities::TOKEN_BYTES;
use super::check::CHECK_BYTES_MAX;
use super::codec::{
    CAPABILITIES_BYTES_MAX, CONFIG_BYTES_MAX, FIGURES_BYTES_MAX, Header, PENDING_BYTES_MAX,
    PLAIN_TABLE_BYTES_MAX, REASON_BYTES_MAX, STATE_BYTES_MAX, TABLE_BYTES_MAX, put_table,
    read_payload, read_table,
};
use crate::commit::Verdict;
use crate::layout::GpaRange;
use crate::transport::ByteSource;

/// The protocol version that Start announces.
pub const VERSION: u16 = 0;

/// Mark in the spare header bytes of Start (an offer) and of its answer (the offer is accepted). Version 0
/// peers send zeros there and ignore what they receive.
pub(super) const OFFER: [u8; 4] = *b"GwC1";

/// The kind of a message; the number is its command code in the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub enum Command {
    /// Begins a migration.
    Start = 1,
    /// The machine's configuration.
    Config = 2,
    /// Device and vCPU state.
    State = 3,
    /// Ranges and, after the table, their contents.
    Memory = 4,
    /// Everything has been sent; the guest is to run.
    Complete = 5,
    /// The source abandons the migration.
    Abandon = 6,
    /// A memory region as a file descriptor (local migration).
    MemoryFd = 7,
    /// Everything has been sent; the guest is to stay paused.
    CompletePaused = 8,
    /// The destination requests pages.
    PageFault = 9,
    /// Capabilities and parameters of the source. Own numbers start far above those of version 0.
    Capabilities = 0x4701,
    /// Ranges that hold zeros.
    ZeroPages = 0x4702,
    /// The pages that are missing at a postcopy destination.
    Pending = 0x4703,
    /// The source has received the acknowledgement and cannot run the guest any more.
    Confirm = 0x4704,
    /// Requested pages that are in flight on another connection.
    Elsewhere = 0x4705,
    /// The destination has every page.
    PostcopyDone = 0x4706,
    /// Answered once the destination's machine is built and ready, and only its state is missing.
    AwaitMachine = 0x4707,
    /// Ranges and, after the table, their contents as one zstd frame.
    MemoryZstd = 0x4708,
    /// The source reconnects after postcopy has lost a connection.
    Recover = 0x4710,
    /// Pages to be read ahead, sent after requested ones.
    Ahead = 0x4711,
    /// The destination of a postcopy is alive and asks whether the source is, as does a source that waits for the state of a
    /// device; or the side that is to answer is alive and still working.
    Alive = 0x4712,
    /// Ranges that will be sent: the destination may populate them beforehand.
    Coming = 0x4713,
    /// Units that were sent in precopy and are outdated, or were not sent: to be discarded while the guest
    /// still runs at the source. Units that Pending lists later are missing in addition.
    Stale = 0x4714,
    /// The source requests a new acknowledgement of the handover.
    Renew = 0x4715,
    /// Which side has the guest, sent by a source whose connection was lost around the handover.
    Verdict = 0x4716,
    /// The parts of the state that will be sent as bytes beside it.
    Blobs = 0x4717,
    /// Bytes of one of them.
    BlobChunk = 0x4718,
    /// How much of each of them is written at the destination. Not answered.
    BlobsWritten = 0x4719,
    /// Begins a check of a migration, which moves nothing. A destination that does not know it refuses it, and goes on
    /// waiting.
    Check = 0x471a,
    /// Bytes that measure the link in a check, and are discarded.
    CheckBytes = 0x471b,
}

impl Command {
    /// All commands, for tables and tests.
    pub const ALL: [Self; 29] = [
        Self::Start,
        Self::Config,
        Self::State,
        Self::Memory,
        Self::Complete,
        Self::Abandon,
        Self::MemoryFd,
        Self::CompletePaused,
        Self::PageFault,
        Self::Capabilities,
        Self::ZeroPages,
        Self::Pending,
        Self::Confirm,
        Self::Elsewhere,
        Self::PostcopyDone,
        Self::Recover,
        Self::Ahead,
        Self::Alive,
        Self::AwaitMachine,
        Self::MemoryZstd,
        Self::Coming,
        Self::Stale,
        Self::Renew,
        Self::Verdict,
        Self::Blobs,
        Self::BlobChunk,
        Self::BlobsWritten,
        Self::Check,
        Self::CheckBytes,
    ];

    /// Its number in the protocol.
    pub fn code(self) -> u16 {
        self as u16
    }

    /// The command with this number.
    ///
    /// # Errors
    /// [`ProtocolError::UnknownCommand`].
    pub fn from_code(code: u16) -> Result<Self, ProtocolError> {
        Self::ALL
            .into_iter()
            .find(|command| command.code() == code)
            .ok_or(ProtocolError::UnknownCommand(code))
    }

    /// Its name in logs and errors.
    pub fn name(self) -> &'static str {
        match self {
            Self::Start => "Start",
            Self::Config => "Config",
            Self::State => "State",
            Self::Memory => "Memory",
            Self::Complete => "Complete",
            Self::Abandon => "Abandon",
            Self::MemoryFd => "MemoryFd",
            Self::CompletePaused => "CompletePaused",
            Self::PageFault => "PageFault",
            Self::Capabilities => "Capabilities",
            Self::ZeroPages => "ZeroPages",
            Self::Pending => "Pending",
            Self::Confirm => "Confirm",
            Self::Elsewhere => "Elsewhere",
            Self::PostcopyDone => "PostcopyDone",
            Self::Recover => "Recover",
            Self::Ahead => "Ahead",
            Self::Alive => "Alive",
            Self::AwaitMachine => "AwaitMachine",
            Self::MemoryZstd => "MemoryZstd",
            Self::Coming => "Coming",
            Self::Stale => "Stale",
            Self::Renew => "Renew",
            Self::Verdict => "Verdict",
            Self::Blobs => "Blobs",
            Self::BlobChunk => "BlobChunk",
            Self::BlobsWritten => "BlobsWritten",
            Self::Check => "Check",
            Self::CheckBytes => "CheckBytes",
        }
    }
}

/// A message of source or destination. Tables are unchecked; JSON is unparsed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Message {
    /// See [`Command::Start`].
    Start {
        /// Protocol version of the sender.
        version: u16,
        /// The sender offers to negotiate.
        offer: bool,
    },
    /// See [`Command::Config`].
    Config(Vec<u8>),
    /// See [`Command::State`].
    State(Vec<u8>),
    /// See [`Command::Memory`]; the contents follow, and the caller reads them once it has checked the table.
    Memory(Vec<GpaRange>),
    /// See [`Command::Complete`].
    Complete,
    /// See [`Command::Abandon`]; a version 0 peer gives no reason.
    Abandon(String),
    /// See [`Command::MemoryFd`]; the descriptor comes with the payload, by SCM_RIGHTS.
    MemoryFd {
        /// Index of the memory region in the layout.
        slot: u32,
    },
    /// See [`Command::CompletePaused`].
    CompletePaused,
    /// See [`Command::PageFault`]; version 0 peers request one range at a time.
    PageFault(Vec<GpaRange>),
    /// See [`Command::Capabilities`].
    Capabilities(Vec<u8>),
    /// See [`Command::ZeroPages`].
    ZeroPages(Vec<GpaRange>),
    /// See [`Command::Pending`].
    Pending(Vec<u8>),
    /// See [`Command::Confirm`]; with the source's figures if both sides have [`FEATURE_FIGURES`].
    ///
    /// [`FEATURE_FIGURES`]: super::capabilities::FEATURE_FIGURES
    Confirm(Vec<u8>),
    /// See [`Command::Elsewhere`].
    Elsewhere(Vec<GpaRange>),
    /// See [`Command::PostcopyDone`]; with the destination's figures, and the source's in its answer.
    PostcopyDone(Vec<u8>),
    /// See [`Command::Recover`].
    Recover(Recover),
    /// See [`Command::Ahead`].
    Ahead(Vec<GpaRange>),
    /// See [`Command::Alive`].
    Alive,
    /// See [`Command::AwaitMachine`].
    AwaitMachine,
    /// See [`Command::MemoryZstd`]; the frame follows, see [`super::inflate`].
    MemoryZstd {
        /// The ranges that the contents belong to.
        ranges: Vec<GpaRange>,
        /// Length of the frame, in the spare header bytes.
        frame_bytes: u32,
    },
    /// See [`Command::Coming`].
    Coming(Vec<GpaRange>),
    /// See [`Command::Stale`]; encoded as Pending.
    Stale(Vec<u8>),
    /// See [`Command::Renew`].
    Renew,
    /// See [`Command::Verdict`].
    Verdict {
        /// The token that identifies the migration.
        id: [u8; TOKEN_BYTES],
        /// The source's decision.
        verdict: Verdict,
    },
    /// See [`Command::Blobs`]; a [`super::blobs::BlobList`].
    Blobs(Vec<u8>),
    /// See [`Command::BlobChunk`].
    BlobChunk(BlobChunk),
    /// See [`Command::BlobsWritten`]; by number of the part.
    BlobsWritten(Vec<u64>),
    /// See [`Command::Check`].
    Check,
    /// See [`Command::CheckBytes`].
    CheckBytes(Vec<u8>),
}

/// The message of a source that reconnects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Recover {
    /// The token that identifies the migration.
    pub id: [u8; TOKEN_BYTES],
    /// Number of the attempt, from 1: one that is not above all earlier ones is refused.
    pub attempt: u32,
    /// Number of connections for background pages that will follow.
    pub bulk: u16,
    /// Number of connections for requested pages that will follow.
    pub urgent: u16,
    /// The source accepts [`Command::Alive`] while it waits for the list of missing pages, and sends it while
    /// it processes that list, if the destination accepts it as well (mark of an accepted offer in its
    /// answer). Sent in the spare header bytes, where older peers send zeros and ignore what they receive.
    pub alive: bool,
}

impl Recover {
    /// Length of the payload in bytes.
    pub const BYTES: usize = TOKEN_BYTES + 8;

    fn encode(self) -> Vec<u8> {
        let mut bytes = self.id.to_vec();
        bytes.extend_from_slice(&self.attempt.to_le_bytes());
        bytes.extend_from_slice(&self.bulk.to_le_bytes());
        bytes.extend_from_slice(&self.urgent.to_le_bytes());
        bytes
    }

    fn read(
        from: &mut impl ByteSource,
        Header { len_bytes, extra, .. }: Header,
    ) -> Result<Self, ProtocolError> {
        let mut bytes = [0; Self::BYTES];
        if len_bytes != bytes.len() as u64 {
            return Err(ProtocolError::BadLength { what: "Recover", len_bytes });
        }
        from.read_exact(&mut bytes)?;
        let [id @ .., a0, a1, a2, a3, b0, b1, u0, u1] = bytes;
        Ok(Self {
            id,
            attempt: u32::from_le_bytes([a0, a1, a2, a3]),
            bulk: u16::from_le_bytes([b0, b1]),
            urgent: u16::from_le_bytes([u0, u1]),
            alive: extra[2..] == OFFER,
        })
    }
}

impl Message {
    /// Its command.
    pub fn command(&self) -> Command {
        match self {
            Self::Start { .. } => Command::Start,
            Self::Config(_) => Command::Config,
            Self::State(_) => Command::State,
            Self::Memory(_) => Command::Memory,
            Self::Complete => Command::Complete,
            Self::Abandon(_) => Command::Abandon,
            Self::MemoryFd { .. } => Command::MemoryFd,
            Self::CompletePaused => Command::CompletePaused,
            Self::PageFault(_) => Command::PageFault,
            Self::Capabilities(_) => Command::Capabilities,
            Self::ZeroPages(_) => Command::ZeroPages,
            Self::Pending(_) => Command::Pending,
            Self::Confirm(_) => Command::Confirm,
            Self::Elsewhere(_) => Command::Elsewhere,
            Self::PostcopyDone(_) => Command::PostcopyDone,
            Self::Recover(_) => Command::Recover,
            Self::Ahead(_) => Command::Ahead,
            Self::Alive => Command::Alive,
            Self::AwaitMachine => Command::AwaitMachine,
            Self::MemoryZstd { .. } => Command::MemoryZstd,
            Self::Coming(_) => Command::Coming,
            Self::Stale(_) => Command::Stale,
            Self::Renew => Command::Renew,
            Self::Verdict { .. } => Command::Verdict,
            Self::Blobs(_) => Command::Blobs,
            Self::BlobChunk(_) => Command::BlobChunk,
            Self::BlobsWritten(_) => Command::BlobsWritten,
            Self::Check => Command::Check,
            Self::CheckBytes(_) => Command::CheckBytes,
        }
    }

    /// Encodes header and payload, without memory contents.
    pub fn encode(&self) -> Vec<u8> {
        let mut payload = Vec::new();
        let mut extra = [0; 6];
        match self {
            Self::Start { version, offer } => {
                extra[..2].copy_from_slice(&version.to_le_bytes());
                if *offer {
                    extra[2..].copy_from_slice(&OFFER);
                }
            }
            Self::Config(bytes)
            | Self::State(bytes)
            | Self::Capabilities(bytes)
            | Self::Stale(bytes)
            | Self::Blobs(bytes)
            | Self::CheckBytes(bytes)
            | Self::Confirm(bytes)
            | Self::PostcopyDone(bytes)
            | Self::Pending(bytes) => return framed(self.command().code(), extra, bytes),
            Self::Memory(ranges)
            | Self::PageFault(ranges)
            | Self::ZeroPages(ranges)
            | Self::Elsewhere(ranges)
            | Self::Ahead(ranges)
            | Self::Coming(ranges) => put_table(&mut payload, ranges),
            Self::Recover(recover) => {
                if recover.alive {
                    extra[2..].copy_from_slice(&OFFER);
                }
                payload = recover.encode();
            }
            Self::Verdict { id, verdict } => {
                payload.extend_from_slice(id);
                payload.push(match verdict {
                    Verdict::Withheld => WITHHELD,
                    Verdict::Committed => COMMITTED,
                });
            }
            Self::BlobsWritten(written) => payload = blobs::encode_written(written),
            Self::BlobChunk(chunk) => return [&chunk.head()[..], &chunk.bytes].concat(),
            Self::MemoryZstd { ranges, frame_bytes } => {
                extra[..4].copy_from_slice(&frame_bytes.to_le_bytes());
                put_table(&mut payload, ranges);
            }
            Self::Abandon(reason) => payload.extend_from_slice(bounded_reason(reason).as_bytes()),
            Self::MemoryFd { slot } => payload.extend_from_slice(&slot.to_le_bytes()),
            Self::Complete
            | Self::CompletePaused
            | Self::Alive
            | Self::Renew
            | Self::Check
            | Self::AwaitMachine => {}
        }
        framed(self.command().code(), extra, &payload)
    }

    /// Reads a message of bounded length.
    ///
    /// # Errors
    /// When the bytes are not a message; see [`ProtocolError`].
    pub fn read(from: &mut impl ByteSource) -> Result<Self, ProtocolError> {
        Self::read_with(from, TABLE_BYTES_MAX)
    }

    /// Reads a message of a source of plain version 0 on its first connection, whose tables of memory may be longer.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn read_plain(from: &mut impl ByteSource) -> Result<Self, ProtocolError> {
        Self::read_with(from, PLAIN_TABLE_BYTES_MAX)
    }

    fn read_with(
        from: &mut impl ByteSource,
        memory_table_bytes_max: u64,
    ) -> Result<Self, ProtocolError> {
        let header = Header::read(from)?;
        let command = Command::from_code(header.code)?;
        let (what, len) = (command.name(), header.len_bytes);
        let table = |from: &mut _| read_table(from, what, len, TABLE_BYTES_MAX);
        Ok(match command {
            Command::Start => {
                empty(what, len)?;
                let [v0, v1, offer @ ..] = header.extra;
                Self::Start { version: u16::from_le_bytes([v0, v1]), offer: offer == OFFER }
            }
            Command::Config => Self::Config(read_payload(from, what, len, CONFIG_BYTES_MAX)?),
            Command::State => Self::State(read_payload(from, what, len, STATE_BYTES_MAX)?),
            Command::Memory => Self::Memory(read_table(from, what, len, memory_table_bytes_max)?),
            Command::Complete => empty(what, len).map(|()| Self::Complete)?,
            Command::Abandon => Self::Abandon(read_reason(from, what, len)?),
            Command::MemoryFd => {
                let mut bytes = [0; 4];
                if len != bytes.len() as u64 {
                    return Err(ProtocolError::BadLength { what, len_bytes: len });
                }
                from.read_exact(&mut bytes)?;
                Self::MemoryFd { slot: u32::from_le_bytes(bytes) }
            }
            Command::CompletePaused => empty(what, len).map(|()| Self::CompletePaused)?,
            Command::PageFault => Self::PageFault(table(from)?),
            Command::Capabilities => {
                Self::Capabilities(read_payload(from, what, len, CAPABILITIES_BYTES_MAX)?)
            }
            Command::ZeroPages => Self::ZeroPages(table(from)?),
            Command::Stale => Self::Stale(read_payload(from, what, len, PENDING_BYTES_MAX)?),
            Command::Pending => Self::Pending(read_payload(from, what, len, PENDING_BYTES_MAX)?),
            Command::Confirm => Self::Confirm(read_payload(from, what, len, FIGURES_BYTES_MAX)?),
            Command::Elsewhere => Self::Elsewhere(table(from)?),
            Command::PostcopyDone => {
                Self::PostcopyDone(read_payload(from, what, len, FIGURES_BYTES_MAX)?)
            }
            Command::Recover => Self::Recover(Recover::read(from, header)?),
            Command::Ahead => Self::Ahead(table(from)?),
            Command::Alive => empty(what, len).map(|()| Self::Alive)?,
            Command::AwaitMachine => empty(what, len).map(|()| Self::AwaitMachine)?,
            Command::Coming => Self::Coming(table(from)?),
            Command::Renew => empty(what, len).map(|()| Self::Renew)?,
            Command::Verdict => read_verdict(from, what, len)?,
            Command::Blobs => Self::Blobs(read_payload(from, what, len, BLOB_LIST_BYTES_MAX)?),
            Command::BlobChunk => Self::BlobChunk(BlobChunk::read(from, header)?),
            Command::BlobsWritten => Self::BlobsWritten(blobs::read_written(from, header)?),
            Command::Check => empty(what, len).map(|()| Self::Check)?,
            Command::CheckBytes => {
                Self::CheckBytes(read_payload(from, what, len, CHECK_BYTES_MAX)?)
            }
            Command::MemoryZstd => {
                let [b0, b1, b2, b3, ..] = header.extra;
                let frame_bytes = u32::from_le_bytes([b0, b1, b2, b3]);
                Self::MemoryZstd { ranges: table(from)?, frame_bytes }
            }
        })
    }
}

/// Values of the last byte of a Verdict.
const WITHHELD: u8 = 0;
const COMMITTED: u8 = 1;

fn read_verdict(
    from: &mut impl ByteSource,
    what: &'static str,
    len_bytes: u64,
) -> Result<Message, ProtocolError> {
    let mut bytes = [0; TOKEN_BYTES + 1];
    if len_bytes != bytes.len() as u64 {
        return Err(ProtocolError::BadLength { what, len_bytes });
    }
    from.read_exact(&mut bytes)?;
    let [id @ .., verdict] = bytes;
    let verdict = match verdict {
        WITHHELD => Verdict::Withheld,
        COMMITTED => Verdict::Committed,
        _ => {
            return Err(ProtocolError::Malformed { what, why: "it has neither of its two values" });
        }
    };
    Ok(Message::Verdict { id, verdict })
}

fn empty(what: &'static str, len_bytes: u64) -> Result<(), ProtocolError> {
    if len_bytes == 0 { Ok(()) } else { Err(ProtocolError::BadLength { what, len_bytes }) }
}

pub(super) fn framed(code: u16, extra: [u8; 6], payload: &[u8]) -> Vec<u8> {
    let header = Header { code, extra, len_bytes: payload.len() as u64 };
    let mut bytes = Vec::with_capacity(payload.len() + super::codec::HEADER_BYTES);
    bytes.extend_from_slice(&header.encode());
    bytes.extend_from_slice(payload);
    bytes
}

/// Cuts a reason to the length that a peer accepts, at a character boundary.
pub(crate) fn bounded_reason(reason: &str) -> &str {
    &reason[..reason.floor_char_boundary(usize::try_from(REASON_BYTES_MAX).unwrap_or(0))]
}

/// Reads a text of the peer without its control characters, which could control a terminal.
pub(super) fn read_reason(
    from: &mut impl ByteSource,
    what: &'static str,
    len_bytes: u64,
) -> Result<String, ProtocolError> {
    let bytes = read_payload(from, what, len_bytes, REASON_BYTES_MAX)?;
    let text = String::from_utf8_lossy(&bytes);
    Ok(text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect())
}

/// Purpose of an extra connection; the first two bytes on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub enum Role {
    /// Carries memory.
    Memory = 1,
    /// Carries page requests and their answers.
    Fault = 2,
}

impl Role {
    /// Its number in the protocol.
    pub fn code(self) -> u16 {
        self as u16
    }

    /// Reads a role.
    ///
    /// # Errors
    /// [`ProtocolError::UnknownRole`].
    pub fn read(from: &mut impl ByteSource) -> Result<Self, ProtocolError> {
        let mut bytes = [0; 2];
        from.read_exact(&mut bytes)?;
        match u16::from_le_bytes(bytes) {
            1 => Ok(Self::Memory),
            2 => Ok(Self::Fault),
            code => Err(ProtocolError::UnknownRole(code)),
        }
    }
}
