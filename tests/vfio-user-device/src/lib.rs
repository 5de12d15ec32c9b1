// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A vfio-user device server for tests.
//!
//! Owns the server's side of the protocol, written from its specification and not from the client of this repository,
//! so that both read it independently. It does as a server should, unless the test that runs it has other answers sent.

#![allow(missing_docs, reason = "not part of an interface")]

pub mod device;

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

pub use device::Device;

/// Numbers of the commands.
pub mod command {
    pub const VERSION: u16 = 1;
    pub const DMA_MAP: u16 = 2;
    pub const DMA_UNMAP: u16 = 3;
    pub const GET_INFO: u16 = 4;
    pub const GET_REGION_INFO: u16 = 5;
    pub const GET_IRQ_INFO: u16 = 7;
    pub const SET_IRQS: u16 = 8;
    pub const REGION_READ: u16 = 9;
    pub const REGION_WRITE: u16 = 10;
    pub const DMA_READ: u16 = 11;
    pub const RESET: u16 = 13;
}

/// Length of the header of each message.
pub const HEADER: usize = 16;
/// Flags of an answer, and of one that is a refusal.
pub const REPLY: u32 = 1;
pub const REFUSAL: u32 = 1 | 1 << 5;
/// Descriptors that one message may have.
const FDS: usize = 8;

/// A message that has come.
#[derive(Debug)]
pub struct Message {
    pub id: u16,
    pub command: u16,
    pub flags: u32,
    pub error: u32,
    pub payload: Vec<u8>,
    pub fds: Vec<OwnedFd>,
}

/// An answer that is to go out.
#[derive(Debug)]
pub struct Reply {
    /// All of it.
    pub bytes: Vec<u8>,
    /// Descriptors that go along.
    pub fds: Vec<OwnedFd>,
}

/// What is done with an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Act {
    /// It is sent.
    Send,
    /// The connection is closed instead.
    HangUp,
    /// Nothing is sent.
    Keep,
}

/// Looks at each answer before it is sent, and may change it. Gets the command, and the connection to send other things on.
pub type Tamper = Box<dyn FnMut(&Message, &mut Reply, &UnixStream) -> Act + Send>;

fn invalid(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

fn word(bytes: &[u8], at: usize) -> io::Result<u32> {
    let bytes = bytes.get(at..).and_then(|rest| rest.first_chunk());
    bytes.map(|bytes| u32::from_le_bytes(*bytes)).ok_or_else(|| invalid("a short message"))
}

fn quad(bytes: &[u8], at: usize) -> io::Result<u64> {
    Ok(u64::from(word(bytes, at)?) | u64::from(word(bytes, at + 4)?) << 32)
}

/// A header.
pub fn header(id: u16, command: u16, len: usize, flags: u32, error: u32) -> Vec<u8> {
    let mut bytes = Vec::new();
    bytes.extend(id.to_le_bytes());
    bytes.extend(command.to_le_bytes());
    bytes.extend(u32::try_from(len).unwrap_or(u32::MAX).to_le_bytes());
    bytes.extend(flags.to_le_bytes());
    bytes.extend(error.to_le_bytes());
    bytes
}

/// Sends bytes, with descriptors.
///
/// # Errors
/// The client has gone.
pub fn send(stream: &UnixStream, mut bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut fds = fds;
    while !bytes.is_empty() {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            assert!(control.push(SendAncillaryMessage::ScmRights(fds)), "too many descriptors");
        }
        let sent = sendmsg(stream, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL)?;
        bytes = bytes.get(sent..).unwrap_or_default();
        fds = &[];
    }
    Ok(())
}

fn receive(stream: &UnixStream, mut buffer: &mut [u8], fds: &mut Vec<OwnedFd>) -> io::Result<bool> {
    while !buffer.is_empty() {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::CMSG_CLOEXEC;
        let received = recvmsg(stream, &mut [IoSliceMut::new(buffer)], &mut control, flags)?;
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(come) = message {
                fds.extend(come);
            }
        }
        if received.bytes == 0 {
            return Ok(false);
        }
        buffer = buffer.get_mut(received.bytes..).unwrap_or_default();
    }
    Ok(true)
}

/// The next message; `None` when the client has gone.
///
/// # Errors
/// The client says what it may not.
pub fn next(stream: &UnixStream) -> io::Result<Option<Message>> {
    let (mut head, mut fds) = ([0; HEADER], Vec::new());
    if !receive(stream, &mut head, &mut fds)? {
        return Ok(None);
    }
    let [i0, i1, c0, c1, ..] = head;
    let len = usize::try_from(word(&head, 4)?).map_err(io::Error::other)?;
    let len = len.checked_sub(HEADER).filter(|len| *len <= 2 << 20);
    let mut payload = vec![0; len.ok_or_else(|| invalid("a length"))?];
    if !receive(stream, &mut payload, &mut fds)? {
        return Ok(None);
    }
    let (id, command) = (u16::from_le_bytes([i0, i1]), u16::from_le_bytes([c0, c1]));
    let (flags, error) = (word(&head, 8)?, word(&head, 12)?);
    Ok(Some(Message { id, command, flags, error, payload, fds }))
}

/// Serves one client until it goes.
///
/// # Errors
/// The client says what it may not.
pub fn serve_one(
    stream: &UnixStream,
    device: &Mutex<Device>,
    tamper: &mut Tamper,
) -> io::Result<()> {
    while let Some(mut message) = next(stream)? {
        let mut device = device.lock().unwrap_or_else(PoisonError::into_inner);
        if message.flags & 0xf != 0 {
            device.refusals.push(message.error);
            continue;
        }
        device.commands.push(message.command);
        let answer = answer(&mut device, &mut message);
        drop(device);
        let mut reply = match answer {
            Ok((payload, fds)) => {
                let len = HEADER + payload.len();
                let head = header(message.id, message.command, len, REPLY, 0);
                Reply { bytes: [head, payload].concat(), fds }
            }
            Err(error) => {
                // EINVAL.
                let errno = error.raw_os_error().unwrap_or(22).unsigned_abs();
                let head = header(message.id, message.command, HEADER, REFUSAL, errno);
                Reply { bytes: head, fds: Vec::new() }
            }
        };
        match tamper(&message, &mut reply, stream) {
            Act::Send => {
                let fds: Vec<_> = reply.fds.iter().map(|fd| fd.as_fd()).collect();
                send(stream, &reply.bytes, &fds)?;
            }
            Act::HangUp => break,
            Act::Keep => {}
        }
    }
    // The stream is still there, and is served no longer.
    let _ = stream.shutdown(std::net::Shutdown::Both);
    device.lock().unwrap_or_else(PoisonError::into_inner).forget();
    Ok(())
}

/// Serves one client after the other at a socket.
///
/// # Errors
/// The socket cannot be listened at.
pub fn serve_all(socket: &Path, device: &Mutex<Device>, tamper: &mut Tamper) -> io::Result<()> {
    // Of a server that was killed.
    let _ = std::fs::remove_file(socket);
    let listener = UnixListener::bind(socket)?;
    loop {
        let (stream, _) = listener.accept()?;
        if let Err(error) = serve_one(&stream, device, tamper) {
            eprintln!("a client of the device server: {error}");
        }
    }
}

type Answer = (Vec<u8>, Vec<OwnedFd>);

fn answer(device: &mut Device, message: &mut Message) -> io::Result<Answer> {
    let payload = &message.payload;
    match message.command {
        command::VERSION => {
            let mut answer = vec![0, 0, 1, 0];
            answer.extend(
                br#"{"capabilities":{"max_msg_fds":2,"max_data_xfer_size":1024,"pgsizes":4096}}"#,
            );
            answer.push(0);
            Ok((answer, Vec::new()))
        }
        command::GET_INFO => {
            // A PCI device that can be reset, with nine regions and five kinds of interrupts.
            let answer = [16_u32, 0b11, 9, 5];
            Ok((answer.into_iter().flat_map(u32::to_le_bytes).collect(), Vec::new()))
        }
        command::GET_REGION_INFO => region(device, word(payload, 0)?, word(payload, 8)?),
        command::GET_IRQ_INFO => {
            let index = word(payload, 8)?;
            // The pin masks itself.
            let (flags, count) = match index {
                0 => (0b111, 1),
                2 => (0b1001, u32::from(device::VECTORS)),
                _ => (1, 0),
            };
            let answer = [16, flags, index, count];
            Ok((answer.into_iter().flat_map(u32::to_le_bytes).collect(), Vec::new()))
        }
        command::SET_IRQS => {
            let [flags, index, start, count] = [4, 8, 12, 16].map(|at| word(payload, at));
            let (flags, start, count) = (flags?, start?, count?);
            let index = usize::try_from(index?).map_err(io::Error::other)?;
            let start = usize::try_from(start).map_err(io::Error::other)?;
            match flags {
                0b10_0100 if message.fds.len() as u64 == u64::from(count) => {
                    device.connect(index, start, std::mem::take(&mut message.fds));
                }
                0b10_0001 if count == 0 => device.connect(index, 0, Vec::new()),
                0b01_0001 if index == 0 => device.unmasked += 1,
                _ => return Err(invalid("interrupts")),
            }
            Ok((Vec::new(), Vec::new()))
        }
        command::REGION_READ => {
            let (offset, region, count) =
                (quad(payload, 0)?, word(payload, 8)?, word(payload, 12)?);
            let mut data = vec![0; usize::try_from(count).map_err(io::Error::other)?];
            device.read(region, offset, &mut data);
            Ok(([payload.as_slice(), &data].concat(), Vec::new()))
        }
        command::REGION_WRITE => {
            let (offset, region) = (quad(payload, 0)?, word(payload, 8)?);
            let (head, data) = payload.split_at_checked(16).ok_or_else(|| invalid("a write"))?;
            device.write(region, offset, data);
            Ok((head.to_vec(), Vec::new()))
        }
        command::DMA_MAP => {
            let [file_offset, gpa, len_bytes] = [8, 16, 24].map(|at| quad(payload, at));
            let (file_offset, gpa, len_bytes) = (file_offset?, gpa?, len_bytes?);
            let file = message.fds.pop().ok_or_else(|| invalid("memory without a file"))?.into();
            device.parts.push(device::Part { gpa, len_bytes, file, file_offset });
            Ok((Vec::new(), Vec::new()))
        }
        command::DMA_UNMAP => {
            let (gpa, len_bytes) = (quad(payload, 8)?, quad(payload, 16)?);
            let is = |part: &device::Part| (part.gpa, part.len_bytes) == (gpa, len_bytes);
            let at = device.parts.iter().position(is).ok_or_else(|| invalid("not mapped"))?;
            device.parts.remove(at);
            Ok((payload.clone(), Vec::new()))
        }
        command::RESET => {
            device.reset();
            Ok((Vec::new(), Vec::new()))
        }
        _ => Err(invalid("a command")),
    }
}

/// What a region is; BAR 1 comes with a list of one area, and with its file.
fn region(device: &Device, room: u32, index: u32) -> io::Result<Answer> {
    let len_bytes = match index {
        0 => device::REGISTERS_LEN_BYTES,
        1 => device::SHARED_LEN_BYTES,
        2 => device::MSIX_LEN_BYTES,
        7 => device::CONFIG_LEN_BYTES,
        _ => 0,
    };
    let is_shared = index == 1;
    let (needed, flags) = if is_shared { (64, 0b1111) } else { (32, 0b11) };
    let (first, at) = if is_shared { (32, device::SHARED_FILE_OFFSET) } else { (0, 0) };
    let mut answer: Vec<u8> =
        [needed, flags, index, first].into_iter().flat_map(u32::to_le_bytes).collect();
    answer.extend([len_bytes, at].into_iter().flat_map(u64::to_le_bytes));
    if !is_shared || room < needed {
        return Ok((answer, Vec::new()));
    }
    // Capability 1, version 1, the last one; one area.
    answer.extend([1_u16, 1].into_iter().flat_map(u16::to_le_bytes));
    answer.extend([0_u32, 1, 0].into_iter().flat_map(u32::to_le_bytes));
    answer.extend([0, device::SHARED_MAPPED_LEN_BYTES].into_iter().flat_map(u64::to_le_bytes));
    Ok((answer, vec![device.shared.try_clone()?.into()]))
}
