// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Requests that the `vhost` crate does not make, or of which it does not read each answer.
//!
//! Owns their messages. A back end says by an answer without the bytes that were asked for that it has no such
//! configuration (vhost-user, `VHOST_USER_GET_CONFIG`), and the crate waits for the bytes; it takes the number of pairs
//! that some back ends of networks answer for the highest number of a ring; it takes one of several answers to
//! `VHOST_USER_SET_LOG_BASE`; and it does not tell a back end of an MTU, nor to announce a guest. They must never be used without a time limit.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::AsRawFd as _;
use std::os::unix::net::UnixStream;

use vhost::vhost_user::Error as ProtocolError;
use vmm_sys_util::sock_ctrl_msg::ScmSocket as _;

/// Numbers of the requests.
const SET_LOG_BASE: u32 = 6;
const GET_QUEUE_NUM: u32 = 17;
const SEND_RARP: u32 = 19;
const NET_SET_MTU: u32 = 20;
const GET_CONFIG: u32 = 24;
/// Version 1 of the protocol.
const REQUEST_FLAGS: u32 = 1;
/// The same of a request that is answered only if the back end is asked to.
const NEED_REPLY_FLAGS: u32 = REQUEST_FLAGS | 1 << 3;
/// The same of an answer.
const REPLY_FLAGS: u32 = 1 | 1 << 2;
const HEADER_LEN_BYTES: usize = 12;
/// The longest answer to `SET_LOG_BASE`, which repeats it.
const LOG_ANSWER_LEN_BYTES_MAX: usize = 16;
/// Offset, length and flags, before the bytes.
const PLACE_LEN_BYTES: u32 = 12;

fn broken(error: std::io::Error) -> vhost::Error {
    vhost::Error::VhostUserProtocol(ProtocolError::SocketBroken(error))
}

fn invalid() -> vhost::Error {
    vhost::Error::VhostUserProtocol(ProtocolError::InvalidMessage)
}

fn words<const COUNT: usize>(bytes: &[u8]) -> [u32; COUNT] {
    let (words, _) = bytes.as_chunks();
    std::array::from_fn(|at| words.get(at).map_or(0, |word| u32::from_le_bytes(*word)))
}

fn send(mut to: impl Write, number: u32, flags: u32, payload: &[u8]) -> vhost::Result<()> {
    let len_bytes = u32::try_from(payload.len()).map_err(|_| invalid())?;
    let mut message: Vec<u8> =
        [number, flags, len_bytes].iter().flat_map(|word| word.to_le_bytes()).collect();
    message.extend_from_slice(payload);
    to.write_all(&message).map_err(broken)
}

/// Reads the head of an answer to request `number`; returns the length of what follows.
fn receive_head(mut from: impl Read, number: u32) -> vhost::Result<u32> {
    let mut header = [0; HEADER_LEN_BYTES];
    from.read_exact(&mut header).map_err(broken)?;
    let [answered, flags, len_bytes] = words(&header);
    if answered == number && flags == REPLY_FLAGS { Ok(len_bytes) } else { Err(invalid()) }
}

fn receive_u64(mut from: impl Read, number: u32) -> vhost::Result<u64> {
    let mut value = [0; 8];
    if receive_head(&mut from, number)? as usize != value.len() {
        return Err(invalid());
    }
    from.read_exact(&mut value).map_err(broken)?;
    Ok(u64::from_le_bytes(value))
}

/// What the back end says when it is asked how many queues it serves.
///
/// # Errors
/// The connection is broken, or the answer is none to this.
pub(super) fn get_queue_num(mut connection: impl Read + Write) -> vhost::Result<u64> {
    send(&mut connection, GET_QUEUE_NUM, REQUEST_FLAGS, &[])?;
    receive_u64(connection, GET_QUEUE_NUM)
}

/// Gives the back end the memory in which it marks pages.
///
/// # Errors
/// The connection is broken, or the answer is none to this.
pub(super) fn set_log_base(
    mut connection: &UnixStream,
    file: &File,
    len_bytes: u64,
) -> vhost::Result<()> {
    let head = [SET_LOG_BASE, REQUEST_FLAGS, 16].into_iter().flat_map(u32::to_le_bytes);
    let offset = 0_u64;
    let place = [len_bytes, offset].into_iter().flat_map(u64::to_le_bytes);
    let message: Vec<u8> = head.chain(place).collect();
    let sent = connection.send_with_fd(&message[..], file.as_raw_fd());
    let sent = sent.map_err(|error| broken(error.into()))?;
    connection.write_all(message.get(sent..).unwrap_or_default()).map_err(broken)?;
    // Some back ends answer with what they were told, some with a number, and some with nothing at all.
    let len_bytes = receive_head(connection, SET_LOG_BASE)? as usize;
    let mut answer = [0; LOG_ANSWER_LEN_BYTES_MAX];
    let answer = answer.get_mut(..len_bytes).ok_or_else(invalid)?;
    connection.read_exact(answer).map_err(broken)
}

/// Has the back end announce an address on the network. It may refuse that if it `confirms` requests.
///
/// # Errors
/// The connection is broken, or the answer is none to this.
pub(super) fn send_rarp(
    mut connection: impl Read + Write,
    mac: [u8; 6],
    confirms: bool,
) -> vhost::Result<()> {
    let flags = if confirms { NEED_REPLY_FLAGS } else { REQUEST_FLAGS };
    let mut payload = [0; 8];
    payload.iter_mut().zip(mac).for_each(|(to, from)| *to = from);
    send(&mut connection, SEND_RARP, flags, &payload)?;
    if confirms {
        receive_u64(connection, SEND_RARP)?;
    }
    Ok(())
}

/// Tells the back end the MTU in bytes; false if it refuses that. One that `confirms` no request cannot.
///
/// # Errors
/// The connection is broken, or the answer is none to this.
pub(super) fn set_mtu(
    mut connection: impl Read + Write,
    mtu: u16,
    confirms: bool,
) -> vhost::Result<bool> {
    let flags = if confirms { NEED_REPLY_FLAGS } else { REQUEST_FLAGS };
    send(&mut connection, NET_SET_MTU, flags, &u64::from(mtu).to_le_bytes())?;
    Ok(!confirms || receive_u64(connection, NET_SET_MTU)? == 0)
}

/// Fills `data` with the configuration at `offset`; false if the back end does not have all of it there.
///
/// # Errors
/// The connection is broken, or the answer is none to this.
pub(super) fn get_config(
    mut connection: impl Read + Write,
    offset: u32,
    data: &mut [u8],
) -> vhost::Result<bool> {
    let len_bytes = u32::try_from(data.len()).map_err(|_| invalid())?;
    let all_bytes = PLACE_LEN_BYTES.checked_add(len_bytes).ok_or_else(invalid)?;
    let mut payload: Vec<u8> =
        [offset, len_bytes, 0].iter().flat_map(|word| word.to_le_bytes()).collect();
    payload.resize(payload.len() + data.len(), 0);
    send(&mut connection, GET_CONFIG, REQUEST_FLAGS, &payload)?;
    let answer_bytes = receive_head(&mut connection, GET_CONFIG)?;
    // Without anything at all in some back ends.
    if answer_bytes == 0 {
        return Ok(false);
    }
    if answer_bytes != PLACE_LEN_BYTES && answer_bytes != all_bytes {
        return Err(invalid());
    }
    let mut place = [0; PLACE_LEN_BYTES as usize];
    connection.read_exact(&mut place).map_err(broken)?;
    let [at, len, _] = words(&place);
    match (answer_bytes == all_bytes, len) {
        (true, len) if len == len_bytes && at == offset => {
            connection.read_exact(data).map_err(broken)?;
            Ok(true)
        }
        (false, 0) => Ok(false),
        _ => Err(invalid()),
    }
}
