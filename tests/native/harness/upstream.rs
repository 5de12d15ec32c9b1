// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A stand-in for a cloud-hypervisor v53 source: sends what one has sent, and holds each answer against what such a
//! source reads.
//!
//! Owns the recorded streams, and how they fall into requests: the reader here knows this peer's protocol alone, by
//! `docs/cloud-hypervisor-state.md`, and shares nothing with the code under test. Must never be more lenient than the
//! peer: it reads 16 bytes for an answer, and whatever follows them is a fault.

use std::fs;
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::runs;

/// Requests of this peer.
pub mod command {
    pub const START: u16 = 1;
    pub const CONFIG: u16 = 2;
    pub const STATE: u16 = 3;
    pub const MEMORY: u16 = 4;
    pub const COMPLETE: u16 = 5;
    pub const COMPLETE_PAUSED: u16 = 8;
    pub const PAGE_FAULT: u16 = 9;
}

const HEADER: usize = 16;
const OK: u16 = 1;
/// Roles of further connections.
const ROLE: usize = 2;

/// The folder of this version's recordings.
pub fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../data/cloud-hypervisor-53")
}

/// A message: a request with the contents that follow it, or an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frame {
    /// Command or status.
    pub kind: u16,
    /// What the header has between that and the length.
    pub between: [u8; 6],
    pub payload: Vec<u8>,
    /// Contents of memory, of a Memory request.
    pub contents: Vec<u8>,
}

impl Frame {
    /// As bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = self.kind.to_le_bytes().to_vec();
        bytes.extend(self.between);
        bytes.extend(u64::try_from(self.payload.len()).expect("a length").to_le_bytes());
        bytes.extend(&self.payload);
        bytes.extend(&self.contents);
        bytes
    }

    /// Pairs of address and length, of a Memory or PageFault request.
    pub fn ranges(&self) -> Vec<(u64, u64)> {
        let word = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().expect("eight bytes"));
        let pairs = self.payload.chunks_exact(16);
        assert!(pairs.remainder().is_empty(), "half a range");
        pairs.map(|pair| (word(&pair[..8]), word(&pair[8..]))).collect()
    }
}

fn split(mut bytes: &[u8], has_contents: bool) -> Vec<Frame> {
    let mut take = |len: usize| {
        let (front, back) = bytes.split_at_checked(len)?;
        bytes = back;
        Some(front)
    };
    let mut frames = Vec::new();
    while let Some(head) = take(HEADER) {
        let len = u64::from_le_bytes(head[8..].try_into().expect("eight bytes"));
        let mut frame = Frame {
            kind: u16::from_le_bytes([head[0], head[1]]),
            between: head[2..8].try_into().expect("six bytes"),
            payload: take(usize::try_from(len).expect("64 bits")).expect("a whole payload").into(),
            contents: Vec::new(),
        };
        if has_contents && frame.kind == command::MEMORY {
            let len: u64 = frame.ranges().iter().map(|(_, len)| len).sum();
            frame.contents = take(usize::try_from(len).expect("64 bits")).expect("contents").into();
        }
        frames.push(frame);
    }
    assert!(bytes.is_empty(), "{} bytes that are no message", bytes.len());
    frames
}

/// One connection of a recorded migration.
pub struct Connection {
    /// What was said first on a further connection.
    pub role: Option<u16>,
    /// What was asked, by the side that asks on it.
    pub requests: Vec<Frame>,
    /// What that was answered.
    pub answers: Vec<Frame>,
}

/// A recorded migration, by the name of its folder.
pub fn stream(name: &str) -> Vec<Connection> {
    let folder = folder().join("streams").join(name);
    let of = |number: &str| -> Option<[Vec<u8>; 2]> {
        let packed = fs::read(folder.join(format!("source{number}.runs"))).ok()?;
        let back = fs::read(folder.join(format!("destination{number}"))).expect("both directions");
        Some([runs::unpack(&packed), back])
    };
    let first = of("").or_else(|| of("-0")).expect("a recorded stream");
    let first = Connection {
        role: None,
        requests: split(&first[0], true),
        answers: split(&first[1], false),
    };
    let further = (1..).map_while(|number| of(&format!("-{number}"))).map(|[said, back]| {
        let (role, said) = said.split_at(ROLE);
        let role = u16::from_le_bytes([role[0], role[1]]);
        // For faults it is the destination that asks.
        let (requests, answers) = if role == 2 { (&back[..], said) } else { (said, &back[..]) };
        Connection {
            role: Some(role),
            requests: split(requests, true),
            answers: split(answers, false),
        }
    });
    std::iter::once(first).chain(further).collect()
}

/// An answer that such a source does not read as what it is.
#[derive(Debug)]
pub struct Misread {
    /// Place of the request in the stream.
    pub request: usize,
    /// Its command.
    pub command: u16,
    pub why: String,
}

/// Sends all requests of a connection, each after the answer to the one before; configuration and state after a `change`.
/// Every answer has to be Ok without a payload.
pub fn replay(
    socket: &mut impl Socket,
    requests: &[Frame],
    change: impl Fn(u16, &mut Value),
) -> Result<(), Misread> {
    for (request, frame) in requests.iter().enumerate() {
        let fault = |why| Misread { request, command: frame.kind, why };
        let frame = changed(frame, &change);
        socket.write_all(&frame.encode()).map_err(|error| fault(error.to_string()))?;
        answer(socket).map_err(fault)?;
    }
    Ok(())
}

/// A request whose document went through a `change`.
pub fn changed(frame: &Frame, change: impl Fn(u16, &mut Value)) -> Frame {
    let mut frame = frame.clone();
    if matches!(frame.kind, command::CONFIG | command::STATE) {
        let mut document = serde_json::from_slice(&frame.payload).expect("JSON");
        change(frame.kind, &mut document);
        frame.payload = document.to_string().into_bytes();
    }
    frame
}

/// What carries a connection.
pub trait Socket: Read + Write {
    /// Whether reading waits.
    fn wait(&self, waits: bool) -> io::Result<()>;
}

impl Socket for UnixStream {
    fn wait(&self, waits: bool) -> io::Result<()> {
        self.set_nonblocking(!waits)
    }
}

impl Socket for TcpStream {
    fn wait(&self, waits: bool) -> io::Result<()> {
        self.set_nonblocking(!waits)
    }
}

/// Reads what the peer reads, and looks whether there is more.
pub fn answer(socket: &mut impl Socket) -> Result<(), String> {
    let mut head = [0; HEADER];
    socket.read_exact(&mut head).map_err(|error| format!("no answer: {error}"))?;
    let len = u64::from_le_bytes(head[8..].try_into().expect("eight bytes"));
    let status = u16::from_le_bytes([head[0], head[1]]);
    if len != 0 {
        return Err(format!("status {status} with a payload of {len} bytes"));
    }
    if status != OK {
        return Err(format!("status {status}"));
    }
    if head[2..8] != [0; 6] {
        return Err(format!("bytes that are not zero in {head:?}"));
    }
    socket.wait(false).map_err(|error| error.to_string())?;
    let more = socket.read(&mut [0]);
    socket.wait(true).map_err(|error| error.to_string())?;
    match more {
        Ok(1..) => Err("more than an answer".to_owned()),
        Err(error) if error.kind() != io::ErrorKind::WouldBlock => Err(error.to_string()),
        // Closed, or nothing.
        _ => Ok(()),
    }
}
