// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Seeds that are what migration peers send: streams of messages, answers, roles.

use super::Seed;

const START: u16 = 1;
const CONFIG: u16 = 2;
const STATE: u16 = 3;
const MEMORY: u16 = 4;
const COMPLETE: u16 = 5;
const ABANDON: u16 = 6;
const MEMORY_FD: u16 = 7;
const COMPLETE_PAUSED: u16 = 8;
const PAGE_FAULT: u16 = 9;
const CAPABILITIES: u16 = 0x4701;
const ZERO_PAGES: u16 = 0x4702;
const PENDING: u16 = 0x4703;
const CONFIRM: u16 = 0x4704;
const ELSEWHERE: u16 = 0x4705;
const POSTCOPY_DONE: u16 = 0x4706;
const BLOBS: u16 = 0x4717;
const BLOB_CHUNK: u16 = 0x4718;
const BLOBS_WRITTEN: u16 = 0x4719;
const CHECK: u16 = 0x471a;
const CHECK_BYTES: u16 = 0x471b;

const OFFER: [u8; 6] = *b"\0\0GwC1";

const CAPABILITIES_JSON: &[u8] = br#"{"software":"godwit 0.1.0","features":["zero-pages","confirm-handover","postcopy"],"memory_mode":"postcopy","bulk_connections":1,"urgent_connections":1,"regions":[{"name":"mem0","gpa":0,"len_bytes":1048576,"host_page_bytes":4096,"backing":"shared"}]}"#;
const ACCEPTED_JSON: &[u8] = br#"{"software":"godwit 0.1.0","features":["postcopy"],"token":[1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16]}"#;
const BLOBS_JSON: &[u8] = br#"{"blobs":[{"name":"gpu0","len_bytes_max":64,"about":{"hardware":{"device":1}}},{"name":"gpu1","len_bytes_max":1073741824,"about":null}]}"#;
/// Both regions of the small machine: three runs, then the plain bitmap of 64 pages.
const PENDING_SETS: [u8; 17] =
    [0, 3, 0, 1, 5, 2, 0x20, 0x90, 1, 1, 0xff, 0, 0xff, 0, 0xff, 0, 0xff];

fn message(code: u16, extra: [u8; 6], payload: &[u8]) -> Vec<u8> {
    let len_bytes = payload.len() as u64;
    [&code.to_le_bytes(), &extra[..], &len_bytes.to_le_bytes(), payload].concat()
}

fn plain(code: u16, payload: &[u8]) -> Vec<u8> {
    message(code, [0; 6], payload)
}

fn table(code: u16, ranges: &[(u64, u64)]) -> Vec<u8> {
    let payload: Vec<u8> = ranges
        .iter()
        .flat_map(|(gpa, len)| [gpa.to_le_bytes(), len.to_le_bytes()].concat())
        .collect();
    plain(code, &payload)
}

fn chunk(blob: u8, offset: u64, bytes: &[u8]) -> Vec<u8> {
    message(BLOB_CHUNK, [blob, 0, 0, 0, 0, 0], &[&offset.to_le_bytes()[..], bytes].concat())
}

pub fn seeds() -> Vec<Seed> {
    let config = br#"{"payload":{"kernel":"/k"}}"#;
    let state = br#"{"vcpus":[],"devices":{}}"#;
    let ranges = [(0, 4096), (0x2000, 0x4000), (1 << 32, 0x1000)];
    let version_0 = [
        plain(START, &[]),
        plain(CONFIG, config),
        table(MEMORY, &ranges),
        plain(STATE, state),
        plain(COMPLETE, &[]),
    ];
    let postcopy = [
        message(START, OFFER, &[]),
        plain(CAPABILITIES, CAPABILITIES_JSON),
        plain(CONFIG, config),
        table(ZERO_PAGES, &ranges[..1]),
        plain(PENDING, &PENDING_SETS),
        plain(STATE, state),
        plain(COMPLETE, &[]),
        plain(CONFIRM, &[]),
    ];
    let urgent = [
        table(PAGE_FAULT, &[(0x3000, 0x1000)]),
        table(MEMORY, &[(0x3000, 0x1000)]),
        table(ELSEWHERE, &[(0x4000, 0x2000)]),
        plain(POSTCOPY_DONE, &[]),
    ];
    let local = [
        plain(START, &[]),
        plain(MEMORY_FD, &[1, 0, 0, 0]),
        plain(COMPLETE_PAUSED, &[]),
        plain(ABANDON, b"the guest has no disk"),
    ];
    // Of two devices, on several connections: some bytes are early.
    let devices = [
        plain(BLOBS, BLOBS_JSON),
        chunk(0, 4, b"ware"),
        chunk(1, 0, b"rings"),
        chunk(0, 0, b"firm"),
        chunk(0, 8, b""),
        chunk(1, 5, b""),
        plain(BLOBS_WRITTEN, &[8, 0, 0, 0, 0, 0, 0, 0, 5, 0, 0, 0, 0, 0, 0, 0]),
        plain(STATE, state),
    ];
    let request = [br#"{"move_bytes":1048576,"offer":"#, CAPABILITIES_JSON, b"}"].concat();
    let check = [
        plain(CHECK, &[]),
        plain(CAPABILITIES, &request),
        plain(CONFIG, config),
        plain(CHECK_BYTES, &[7; 64]),
    ];
    let answers = [
        message(1, OFFER, &[]),
        plain(1, ACCEPTED_JSON),
        plain(1, &[]),
        plain(1, br#"{"problems":["tap 'lan' is missing"],"warnings":["it is slow"]}"#),
        plain(2, b"no room for 1 GiB"),
    ];
    [
        ("version-0", version_0.concat()),
        ("postcopy", postcopy.concat()),
        ("accepted", plain(CAPABILITIES, ACCEPTED_JSON)),
        ("pending", plain(PENDING, &PENDING_SETS)),
        ("urgent", urgent.concat()),
        ("local", local.concat()),
        ("devices", devices.concat()),
        ("check", check.concat()),
        ("answers", answers.concat()),
        ("role", [&[2, 0][..], &[7; 16]].concat()),
    ]
    .map(|(name, contents)| Seed::new("migration_stream", name, contents))
    .into()
}
