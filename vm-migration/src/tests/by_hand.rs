// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A destination of any version, message by message, without the code of a destination.
//!
//! Owns its reading and writing of frames, and what it says of itself.

use std::collections::BTreeSet;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;

use crate::protocol::capabilities::{Accepted, Offer};
use crate::protocol::codec::HEADER_BYTES;
use crate::protocol::formats::Formats;
use crate::protocol::message::Answer;

/// The payload of the next message.
pub(super) fn message(stream: &mut TcpStream) -> Vec<u8> {
    let mut header = [0; HEADER_BYTES];
    stream.read_exact(&mut header).unwrap();
    let len = u64::from_le_bytes(header[8..].try_into().unwrap());
    let mut payload = vec![0; usize::try_from(len).unwrap()];
    stream.read_exact(&mut payload).unwrap();
    payload
}

pub(super) fn answer(stream: &mut TcpStream, offer_taken: bool, payload: Vec<u8>) {
    stream.write_all(&Answer::Ok { offer_taken, payload }.encode()).unwrap();
}

/// What a destination with these features says of itself.
pub(super) fn accepted(features: BTreeSet<String>) -> Accepted {
    Accepted {
        software: "godwit 9.8.7".to_owned(),
        features,
        token: [7; 16],
        promise_ms: None,
        formats: Formats::default(),
        connections_max: None,
    }
}

/// Answers up to the capabilities; gives the source's.
pub(super) fn negotiate(stream: &mut TcpStream, features: BTreeSet<String>) -> Offer {
    message(stream);
    answer(stream, true, Vec::new());
    let offer = Offer::parse(&message(stream)).unwrap();
    answer(stream, false, accepted(features).to_json());
    offer
}
