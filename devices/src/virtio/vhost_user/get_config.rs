// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Reads of a part of the configuration that the back end may not have.
//!
//! Owns the one message that the `vhost` crate does not read: an answer without the bytes that were asked for, by which a
//! back end says that it has none (vhost-user, `VHOST_USER_GET_CONFIG`); the crate waits for the bytes. It must never be
//! used without a time limit.

use std::io::{Read, Write};

use vhost::vhost_user::Error as ProtocolError;

/// Number of the request.
const GET_CONFIG: u32 = 24;
/// Version 1 of the protocol.
const REQUEST_FLAGS: u32 = 1;
/// The same of an answer.
const REPLY_FLAGS: u32 = 1 | 1 << 2;
const HEADER_LEN_BYTES: usize = 12;
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
    let request = [GET_CONFIG, REQUEST_FLAGS, all_bytes, offset, len_bytes, 0];
    let mut message: Vec<u8> = request.iter().flat_map(|word| word.to_le_bytes()).collect();
    message.resize(message.len() + data.len(), 0);
    connection.write_all(&message).map_err(broken)?;

    let mut header = [0; HEADER_LEN_BYTES];
    connection.read_exact(&mut header).map_err(broken)?;
    let [number, flags, answer_bytes] = words(&header);
    if number != GET_CONFIG || flags != REPLY_FLAGS {
        return Err(invalid());
    }
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
