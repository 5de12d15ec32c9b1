// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A vhost-user back end for tests that answers whatever a test wants: also nothing, or nonsense.
//!
//! Owns the peer's side of a connection, on a thread that ends with it.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::thread::JoinHandle;

use vmm_sys_util::sock_ctrl_msg::ScmSocket as _;

/// Requests, by their numbers in the protocol.
pub(super) const GET_FEATURES: u32 = 1;
pub(super) const GET_VRING_BASE: u32 = 11;
pub(super) const GET_PROTOCOL_FEATURES: u32 = 15;
pub(super) const GET_QUEUE_NUM: u32 = 17;
#[cfg(test)]
pub(super) const NET_SET_MTU: u32 = 20;
pub(super) const SET_BACKEND_REQ_FD: u32 = 21;
pub(super) const SET_LOG_BASE: u32 = 6;
pub(super) const SET_DEVICE_STATE_FD: u32 = 42;
pub(super) const CHECK_DEVICE_STATE: u32 = 43;
pub(super) const GET_CONFIG: u32 = 24;
pub(super) const GET_MAX_MEM_SLOTS: u32 = 36;

/// Flags of a message: version 1, and that it is a reply.
const REPLY: u32 = 1 | 1 << 2;
const NEED_REPLY: u32 = 1 << 3;

/// VERSION_1, EVENT_IDX, FLUSH of block devices, and the bit for protocol features.
pub(super) const FEATURES: u64 = 1 << 32 | 1 << 30 | 1 << 29 | 1 << 9;
/// MQ, REPLY_ACK, CONFIG, CONFIGURE_MEM_SLOTS.
pub(super) const PROTOCOL_FEATURES: u64 = 1 | 1 << 3 | 1 << 9 | 1 << 15;
/// Beside these, all that a network can have: MTU, status, a control queue, pairs, and a log of what is written.
pub(super) const NET_FEATURES: u64 = FEATURES | 1 << 3 | 1 << 16 | 1 << 17 | 1 << 22 | 1 << 26;
/// The same of the protocol: a log, announcements, an MTU, requests of the back end, its state.
pub(super) const MORE_PROTOCOL_FEATURES: u64 =
    PROTOCOL_FEATURES | 1 << 1 | 1 << 2 | 1 << 4 | 1 << 5 | 1 << 19;
/// Queues that a usual back end serves.
const QUEUES: u64 = 4;
/// Longer than any request of the front end.
const PAYLOAD_LEN_BYTES_MAX: usize = 4096;

/// A message of the front end.
pub(super) struct Request {
    pub(super) number: u32,
    pub(super) flags: u32,
    pub(super) payload: Vec<u8>,
    /// The descriptor that came with it, or one of them.
    pub(super) file: Option<File>,
}

/// What the back end does with a request.
pub(super) enum Answer {
    /// Sends these bytes, perhaps none.
    Send(Vec<u8>),
    /// Closes the connection.
    Close,
}

impl Request {
    /// A reply to it.
    pub(super) fn reply(&self, payload: &[u8]) -> Answer {
        let len_bytes = u32::try_from(payload.len()).unwrap_or(u32::MAX);
        let header = [self.number, REPLY, len_bytes];
        let mut bytes: Vec<u8> = header.iter().flat_map(|word| word.to_le_bytes()).collect();
        bytes.extend_from_slice(payload);
        Answer::Send(bytes)
    }

    /// The answer of a back end without faults that can do all of the protocol that is used.
    pub(super) fn usual_of_all(&self) -> Answer {
        match self.number {
            GET_FEATURES => self.reply(&NET_FEATURES.to_le_bytes()),
            GET_PROTOCOL_FEATURES => self.reply(&MORE_PROTOCOL_FEATURES.to_le_bytes()),
            SET_LOG_BASE => self.reply(&self.payload),
            // No other descriptor is to be used.
            SET_DEVICE_STATE_FD => self.reply(&(1_u64 << 8).to_le_bytes()),
            CHECK_DEVICE_STATE => self.reply(&0_u64.to_le_bytes()),
            _ => self.usual(),
        }
    }

    /// The answer of a back end without faults.
    pub(super) fn usual(&self) -> Answer {
        match self.number {
            GET_FEATURES => self.reply(&FEATURES.to_le_bytes()),
            GET_PROTOCOL_FEATURES => self.reply(&PROTOCOL_FEATURES.to_le_bytes()),
            GET_QUEUE_NUM => self.reply(&QUEUES.to_le_bytes()),
            GET_MAX_MEM_SLOTS => self.reply(&32_u64.to_le_bytes()),
            GET_CONFIG | GET_VRING_BASE => self.reply(&self.payload),
            _ if self.flags & NEED_REPLY != 0 => self.reply(&0_u64.to_le_bytes()),
            _ => Answer::Send(Vec::new()),
        }
    }
}

fn read(connection: &mut UnixStream) -> Option<Request> {
    let mut header = [0; 12];
    // Descriptors come with the first byte.
    let (received, file) = connection.recv_with_fd(&mut header).ok().filter(|(len, _)| *len > 0)?;
    connection.read_exact(header.get_mut(received..)?).ok()?;
    let (words, _) = header.as_chunks();
    let [number, flags, len] =
        [0, 1, 2].map(|at| words.get(at).map_or(0, |word| u32::from_le_bytes(*word)));
    let len = usize::try_from(len).ok().filter(|len| *len <= PAYLOAD_LEN_BYTES_MAX)?;
    let mut payload = vec![0; len];
    connection.read_exact(&mut payload).ok()?;
    Some(Request { number, flags, payload, file })
}

/// Starts a back end; returns the front end's side of the connection.
#[cfg(test)]
pub(super) fn back_end(
    answer: impl FnMut(&Request) -> Answer + Send + 'static,
) -> std::io::Result<UnixStream> {
    Ok(back_end_with_thread(answer)?.0)
}

/// The same, with the thread, which ends when the connection is closed.
pub(super) fn back_end_with_thread(
    mut answer: impl FnMut(&Request) -> Answer + Send + 'static,
) -> std::io::Result<(UnixStream, JoinHandle<()>)> {
    let (ours, mut theirs) = UnixStream::pair()?;
    let thread = stoppable_thread::spawn("back-end", move || {
        while let Some(request) = read(&mut theirs) {
            let Answer::Send(bytes) = answer(&request) else { return };
            if theirs.write_all(&bytes).is_err() {
                return;
            }
        }
    })?;
    Ok((ours, thread))
}
