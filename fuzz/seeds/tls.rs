// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Seeds for TLS: what one side of a handshake says, and steps between two sides.
//!
//! The entry point has no randomness: what stands for it are bytes of 0x5a.

use super::Seed;

/// Mode: the bytes of a peer follow, for a source.
const TO_CLIENT: u8 = 2;
/// Mode: the bytes of a peer follow, for a destination.
const TO_SERVER: u8 = 3;

/// Step for the destination.
const UP: u8 = 1 << 7;

/// The first three flights, whole.
const AGREE: [u8; 3] = [UP, 0, UP];

const SERVER_HELLO: u8 = 2;
const CLIENT_HELLO: u8 = 1;
const ENCRYPTED_EXTENSIONS: u8 = 8;
const CERTIFICATE_REQUEST: u8 = 13;
const CERTIFICATE: u8 = 11;

const SIGNATURE_ALGORITHMS: u16 = 13;
const SUPPORTED_GROUPS: u16 = 10;
const SUPPORTED_VERSIONS: u16 = 43;
const KEY_SHARE: u16 = 51;

const X25519: u16 = 29;
const SECP256R1: u16 = 23;
const SAME: [u8; 32] = [0x5a; 32];

/// A length of one, two or three bytes, then the bytes.
fn sized<const N: usize>(bytes: &[u8]) -> Vec<u8> {
    let len = (bytes.len() as u32).to_be_bytes();
    [&len[4 - N..], bytes].concat()
}

fn record(kind: u8, payload: &[u8]) -> Vec<u8> {
    [&[kind, 3, 3][..], &sized::<2>(payload)].concat()
}

/// A record of the suite without protection.
fn sealed(kind: u8, payload: &[u8]) -> Vec<u8> {
    record(23, &[payload, &[kind]].concat())
}

fn message(kind: u8, body: &[u8]) -> Vec<u8> {
    [&[kind][..], &sized::<3>(body)].concat()
}

fn extension(kind: u16, body: &[u8]) -> Vec<u8> {
    [&kind.to_be_bytes()[..], &sized::<2>(body)].concat()
}

fn share(group: u16, key: &[u8]) -> Vec<u8> {
    [&group.to_be_bytes()[..], &sized::<2>(key)].concat()
}

fn client_hello(shares: &[u8]) -> Vec<u8> {
    let groups = [X25519.to_be_bytes(), SECP256R1.to_be_bytes()].concat();
    let extensions = [
        extension(SUPPORTED_VERSIONS, &sized::<1>(&[3, 4])),
        extension(SUPPORTED_GROUPS, &sized::<2>(&groups)),
        // Ed25519, and ECDSA with P-256.
        extension(SIGNATURE_ALGORITHMS, &sized::<2>(&[8, 7, 4, 3])),
        extension(KEY_SHARE, &sized::<2>(shares)),
    ];
    let hello = [
        &[3, 3][..],
        &SAME,
        &sized::<1>(&SAME),
        &sized::<2>(&[0x13, 1, 0x13, 2, 0x13, 3]),
        &sized::<1>(&[0]),
        &sized::<2>(&extensions.concat()),
    ];
    message(CLIENT_HELLO, &hello.concat())
}

/// Up to the middle of the certificates.
fn answer() -> Vec<u8> {
    let extensions =
        [extension(SUPPORTED_VERSIONS, &[3, 4]), extension(KEY_SHARE, &share(X25519, &SAME))];
    let hello = [
        &[3, 3][..],
        &SAME,
        &sized::<1>(&SAME),
        &[0x13, 1, 0],
        &sized::<2>(&extensions.concat()),
    ];
    let algorithms = extension(SIGNATURE_ALGORITHMS, &sized::<2>(&[8, 7, 4, 3]));
    let request = [&[0][..], &sized::<2>(&algorithms)].concat();
    let entry = [sized::<3>(&[0x30, 0x82, 1, 0]), sized::<2>(&[])].concat();
    let certificate = message(CERTIFICATE, &[&[0][..], &sized::<3>(&entry)].concat());
    [
        record(22, &message(SERVER_HELLO, &hello.concat())),
        record(20, &[1]),
        sealed(22, &message(ENCRYPTED_EXTENSIONS, &sized::<2>(&[]))),
        sealed(22, &message(CERTIFICATE_REQUEST, &request)),
        sealed(22, &certificate[..certificate.len() - 4]),
    ]
    .concat()
}

fn raw(mode: u8, size: u16, bytes: &[u8]) -> Vec<u8> {
    [&[mode][..], &size.to_be_bytes(), bytes].concat()
}

fn steps(suite: u8, steps: &[&[u8]]) -> Vec<u8> {
    [&[suite << 2], &steps.concat()[..]].concat()
}

pub fn seeds() -> Vec<Seed> {
    let hello = client_hello(&share(X25519, &SAME));
    let (first, second) = hello.split_at(90);
    let two = [record(22, first), record(22, second)].concat();
    let other = record(22, &client_hello(&share(0x1234, &SAME)));
    let asked_again = [other, record(20, &[1])].concat();
    // Data both ways, in pieces, read in each way.
    let talk = [
        &[8 | UP, 1, 0, 2 | UP, 100, 8, 0x90, 0, 1, 0, 50, 2, 255][..],
        &[10 | UP, 0, 1, 0, 10, 1, 0, 9, 10, 2, 0, 9, 10, 3, 0, 9, 10, 4, 0, 9],
    ];
    // Other keys, as a peer asks for them and of one's own accord; then the end.
    let keys = [&[12 | UP, 8, 0, 100, 12, 11, 1, 8 | UP, 0xa0, 0, 8, 0, 9, 13, 13 | UP][..]];
    // A ticket in two records, and data after it.
    let ticket = [&[9, 22, 4, 0, 4, 0, 0, 2, 9, 22, 2, 0, 1, 2, 9, 23, 3, 0, 7, 8, 9][..]];
    // What the other end refuses: each is made of valid records.
    let tampered = [
        ("repeated", &[8, 0, 9, 5, 3][..]),
        ("changed", &[8, 0, 9, 4, 0, 9, 1]),
        ("swapped", &[8, 0, 9, 8, 0, 8, 6]),
        ("left-out", &[8, 0, 9, 7, 8, 0, 8]),
        ("inserted", &[8, 0, 9, 3, 5, 23, 3, 3, 0, 0]),
        ("cut", &[8, 0, 9, 1, 0, 9, 14]),
        ("long", &[9, 23, 100, 200]),
    ];
    let mut all = vec![
        ("hello".to_owned(), raw(TO_SERVER, 0xffff, &record(22, &hello))),
        ("hello-in-pieces".to_owned(), raw(TO_SERVER, 7, &record(22, &hello))),
        ("hello-in-records".to_owned(), raw(TO_SERVER, 0xffff, &two)),
        ("hello-of-another-group".to_owned(), raw(TO_SERVER, 0xffff, &asked_again)),
        ("answer".to_owned(), raw(TO_CLIENT, 0xffff, &answer())),
        ("answer-in-pieces".to_owned(), raw(TO_CLIENT, 3, &answer())),
    ];
    for suite in 0..4 {
        let with = |what: &[&[u8]]| steps(suite, &[&[&AGREE[..]], what].concat());
        all.push((format!("talk-{suite}"), with(&talk)));
        all.push((format!("keys-{suite}"), with(&keys)));
        all.push((format!("ticket-{suite}"), with(&ticket)));
    }
    // A handshake in pieces.
    all.push(("talk-in-pieces".to_owned(), steps(1, &[&[2 | UP, 1, 2, 9, 2 | UP, 5], talk[0]])));
    for (name, what) in tampered {
        all.push((format!("tampered-{name}"), steps(1, &[&AGREE, what])));
        all.push((format!("unprotected-{name}"), steps(0, &[&AGREE, what])));
    }
    all.into_iter().map(|(name, contents)| Seed::new("tls_records", name, contents)).collect()
}
