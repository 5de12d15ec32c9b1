// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Each message there and back, its exact bytes where version 0 defines them, and every kind of
//! bytes that is none.

#![expect(clippy::unwrap_used, reason = "a failing unwrap fails the test")]

use page_bitmap::PageBitmap;
use proptest::prelude::*;

use super::ProtocolError;
use super::blobs::{
    BLOB_BYTES_MAX, BLOB_LIST_BYTES_MAX, BLOBS_MAX, BlobChunk, BlobError, BlobInfo, BlobList,
    CHUNK_BYTES_MAX,
};
use super::check::CHECK_BYTES_MAX;
use super::codec::{
    ANSWER_BYTES_MAX, CAPABILITIES_BYTES_MAX, CONFIG_BYTES_MAX, Header, PENDING_BYTES_MAX,
    PLAIN_TABLE_BYTES_MAX, RANGE_BYTES, REASON_BYTES_MAX, STATE_BYTES_MAX, TABLE_BYTES_MAX,
    put_varint, read_payload, take_varint,
};
use super::fuzzing::fuzz_stream;
use super::message::{Answer, Command, Message, Recover, Role, VERSION};
use super::runs;
use crate::commit::Verdict;
use crate::layout::GpaRange;

fn chunk(bytes: &[u8]) -> BlobChunk {
    BlobChunk { blob: 0x102, offset: 0x0102_0304_0506, bytes: bytes.to_vec() }
}

/// A sample message for each command.
fn sample(command: Command) -> Message {
    let range = |gpa, len_bytes| GpaRange { gpa, len_bytes };
    let table = vec![range(0x1000, 0x2000), range(0x1_0000_0000, 0x1000)];
    match command {
        Command::Start => Message::Start { version: VERSION, offer: true },
        Command::Config => Message::Config(br#"{"cpus":1}"#.to_vec()),
        Command::State => Message::State(br#"{"state":2}"#.to_vec()),
        Command::Memory => Message::Memory(table),
        Command::Complete => Message::Complete,
        Command::Abandon => Message::Abandon("no disk \u{1f4be}".to_string()),
        Command::MemoryFd => Message::MemoryFd { slot: 3 },
        Command::CompletePaused => Message::CompletePaused,
        Command::PageFault => Message::PageFault(table),
        Command::Capabilities => Message::Capabilities(b"{}".to_vec()),
        Command::ZeroPages => Message::ZeroPages(table),
        Command::Pending => Message::Pending(vec![0, 1, 2, 3]),
        Command::Confirm => Message::Confirm(br#"{"rounds":2}"#.to_vec()),
        Command::Elsewhere => Message::Elsewhere(vec![]),
        Command::PostcopyDone => Message::PostcopyDone(b"{}".to_vec()),
        Command::Recover => Message::Recover(Recover {
            id: [7; 16],
            attempt: 0x0102_0304,
            bulk: 5,
            urgent: 0x607,
            alive: false,
        }),
        Command::Ahead => Message::Ahead(table),
        Command::Alive => Message::Alive,
        Command::AwaitMachine => Message::AwaitMachine,
        Command::Coming => Message::Coming(table),
        Command::Stale => Message::Stale(vec![0, 0]),
        Command::Renew => Message::Renew,
        Command::Verdict => Message::Verdict { id: [9; 16], verdict: Verdict::Committed },
        Command::Blobs => Message::Blobs(b"[]".to_vec()),
        Command::BlobChunk => Message::BlobChunk(chunk(b"firmware")),
        Command::BlobsWritten => Message::BlobsWritten(vec![0x0102_0304_0506, 0, u64::MAX]),
        Command::Check => Message::Check,
        Command::CheckBytes => Message::CheckBytes(vec![7; 3]),
        Command::MemoryZstd => Message::MemoryZstd { ranges: table, frame_bytes: 0x1_0203 },
    }
}

fn there_and_back(command: Command) {
    let message = sample(command);
    assert_eq!(message.command(), command);
    let bytes = message.encode();
    assert_eq!(bytes[..2], command.code().to_le_bytes());
    let mut rest = &bytes[..];
    assert_eq!(Message::read(&mut rest).unwrap(), message);
    assert!(rest.is_empty(), "{} bytes were left", rest.len());
    for cut in 0..bytes.len() {
        let cut = Message::read(&mut &bytes[..cut]);
        assert!(matches!(cut, Err(ProtocolError::Transport(_))), "{command:?}: {cut:?}");
    }
}

macro_rules! one_test_per_message {
    ($($test:ident: $command:ident,)*) => {
        $(#[test] fn $test() { there_and_back(Command::$command); })*

        #[test]
        fn no_message_is_without_its_test() {
            assert_eq!([$(Command::$command),*], Command::ALL);
        }
    };
}

one_test_per_message! {
    start: Start,
    config: Config,
    state: State,
    memory: Memory,
    complete: Complete,
    abandon: Abandon,
    memory_fd: MemoryFd,
    complete_paused: CompletePaused,
    page_fault: PageFault,
    capabilities: Capabilities,
    zero_pages: ZeroPages,
    pending: Pending,
    confirm: Confirm,
    elsewhere: Elsewhere,
    postcopy_done: PostcopyDone,
    recover: Recover,
    ahead: Ahead,
    alive: Alive,
    await_machine: AwaitMachine,
    memory_zstd: MemoryZstd,
    coming: Coming,
    stale: Stale,
    renew: Renew,
    verdict: Verdict,
    blobs: Blobs,
    blob_chunk: BlobChunk,
    blobs_written: BlobsWritten,
    check: Check,
    check_bytes: CheckBytes,
}

#[test]
fn version_0_bytes_are_as_every_peer_writes_them() {
    let plain = Message::Start { version: 0, offer: false };
    assert_eq!(plain.encode(), [1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    let memory = Message::Memory(vec![GpaRange { gpa: 0x10_2000, len_bytes: 0x3000 }]);
    let mut expected = vec![4, 0, 0, 0, 0, 0, 0, 0, 16, 0, 0, 0, 0, 0, 0, 0];
    expected.extend([0, 0x20, 0x10, 0, 0, 0, 0, 0, 0, 0x30, 0, 0, 0, 0, 0, 0]);
    assert_eq!(memory.encode(), expected);
    assert_eq!(Answer::ok().encode()[..8], [1, 0, 0, 0, 0, 0, 0, 0]);
    let error = Answer::Error { reason: String::new() };
    assert_eq!(error.encode(), [2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!((Role::Memory.code(), Role::Fault.code()), (1, 2));
    let numbers = [1, 2, 3, 4, 5, 6, 7, 8, 9].map(|code| Command::from_code(code).unwrap());
    assert_eq!(numbers, Command::ALL[..9]);
}

#[test]
fn an_offer_is_seen_only_where_there_is_one() {
    for offer in [false, true] {
        let bytes = Message::Start { version: 0, offer }.encode();
        assert_eq!(Message::read(&mut &bytes[..]).unwrap(), Message::Start { version: 0, offer });
        let bytes = Answer::Ok { offer_taken: offer, payload: vec![1] }.encode();
        let Answer::Ok { offer_taken, .. } = Answer::read(&mut &bytes[..]).unwrap() else {
            panic!("an Ok");
        };
        assert_eq!(offer_taken, offer);
    }
}

#[test]
fn unknown_numbers_are_errors() {
    for code in [0u16, 10, 0x4700, 0x47ff, 0xffff] {
        let bytes = Header::new(code, 0).encode();
        let message = Message::read(&mut &bytes[..]);
        assert!(matches!(message, Err(ProtocolError::UnknownCommand(c)) if c == code));
    }
    for status in [0u16, 3, 0xffff] {
        let bytes = Header::new(status, 0).encode();
        let answer = Answer::read(&mut &bytes[..]);
        assert!(matches!(answer, Err(ProtocolError::UnknownStatus(s)) if s == status));
    }
    for role in [0u16, 3] {
        let bytes = role.to_le_bytes();
        let read = Role::read(&mut &bytes[..]);
        assert!(matches!(read, Err(ProtocolError::UnknownRole(r)) if r == role));
    }
}

#[test]
fn messages_without_payload_accept_none() {
    for command in [Command::Start, Command::Complete, Command::Renew, Command::AwaitMachine] {
        let bytes = [&Header::new(command.code(), 1).encode()[..], &[0]].concat();
        let message = Message::read(&mut &bytes[..]);
        assert!(matches!(message, Err(ProtocolError::BadLength { .. })), "{message:?}");
    }
}

#[test]
fn a_table_is_a_whole_number_of_entries_and_bounded() {
    let odd = [&Header::new(Command::Memory.code(), 17).encode()[..], &[0; 17]].concat();
    assert!(matches!(Message::read(&mut &odd[..]), Err(ProtocolError::BadLength { .. })));
    let long =
        |max_bytes| Header::new(Command::Memory.code(), max_bytes + RANGE_BYTES as u64).encode();
    let refused = Message::read(&mut &long(TABLE_BYTES_MAX)[..]);
    assert!(matches!(refused, Err(ProtocolError::TooLong { .. })), "{refused:?}");
    let refused = Message::read_plain(&mut &long(PLAIN_TABLE_BYTES_MAX)[..]);
    assert!(matches!(refused, Err(ProtocolError::TooLong { .. })), "{refused:?}");
    let cut = Message::read_plain(&mut &long(TABLE_BYTES_MAX)[..]);
    assert!(matches!(cut, Err(ProtocolError::Transport(_))), "it is not too long: {cut:?}");
}

#[test]
fn every_payload_has_a_limit() {
    for (command, max_bytes) in [
        (Command::Capabilities, CAPABILITIES_BYTES_MAX),
        (Command::Config, CONFIG_BYTES_MAX),
        (Command::State, STATE_BYTES_MAX),
        (Command::Pending, PENDING_BYTES_MAX),
        (Command::Stale, PENDING_BYTES_MAX),
        (Command::Abandon, REASON_BYTES_MAX),
        (Command::Memory, TABLE_BYTES_MAX),
        (Command::MemoryZstd, TABLE_BYTES_MAX),
        (Command::ZeroPages, TABLE_BYTES_MAX),
        (Command::Coming, TABLE_BYTES_MAX),
        (Command::Elsewhere, TABLE_BYTES_MAX),
        (Command::PageFault, TABLE_BYTES_MAX),
        (Command::Ahead, TABLE_BYTES_MAX),
        (Command::Blobs, BLOB_LIST_BYTES_MAX),
        (Command::BlobChunk, CHUNK_BYTES_MAX),
        (Command::BlobsWritten, 8 * BLOBS_MAX as u64),
        (Command::CheckBytes, CHECK_BYTES_MAX),
    ] {
        let bytes = Header::new(command.code(), max_bytes + RANGE_BYTES as u64).encode();
        let refused = Message::read(&mut &bytes[..]);
        assert!(matches!(refused, Err(ProtocolError::TooLong { .. })), "{command:?}: {refused:?}");
    }
    for command in [Command::MemoryFd, Command::Recover, Command::Verdict] {
        let bytes = Header::new(command.code(), 65).encode();
        let refused = Message::read(&mut &bytes[..]);
        assert!(
            matches!(refused, Err(ProtocolError::BadLength { .. })),
            "{command:?}: {refused:?}"
        );
    }
    for (status, max_bytes) in [(1, ANSWER_BYTES_MAX), (2, REASON_BYTES_MAX)] {
        let bytes = Header::new(status, max_bytes + 1).encode();
        let refused = Answer::read(&mut &bytes[..]);
        assert!(matches!(refused, Err(ProtocolError::TooLong { .. })), "{status}: {refused:?}");
    }
}

#[test]
fn a_payload_grows_with_what_arrives_and_not_with_what_is_announced() {
    // If the announced 16 MiB were allocated, so would be the 2 GiB below; the peer sends only a
    // few bytes.
    let mut from = &b"few"[..];
    let payload = read_payload(&mut from, "a test", CONFIG_BYTES_MAX, CONFIG_BYTES_MAX);
    assert!(matches!(payload, Err(ProtocolError::Transport(_))));
    let too_long = read_payload(&mut from, "a test", u64::MAX, CONFIG_BYTES_MAX);
    assert!(matches!(too_long, Err(ProtocolError::TooLong { .. })));
    let long = vec![7; 300_000];
    assert_eq!(read_payload(&mut &long[..], "a test", 300_000, 300_000).unwrap(), long);
}

#[test]
fn reasons_are_cut_to_the_limit_and_cannot_control_a_terminal() {
    let long = "\u{e4}".repeat(usize::try_from(REASON_BYTES_MAX).unwrap());
    let bytes = Answer::Error { reason: long }.encode();
    let Answer::Error { reason } = Answer::read(&mut &bytes[..]).unwrap() else { panic!() };
    assert_eq!(reason.len() as u64, REASON_BYTES_MAX);
    let nasty = b"\x1b[31mred\x07\n\xff";
    let mut bytes = Header::new(2, nasty.len() as u64).encode().to_vec();
    bytes.extend(nasty);
    let Answer::Error { reason } = Answer::read(&mut &bytes[..]).unwrap() else { panic!() };
    assert_eq!(reason, " [31mred  \u{fffd}");
}

#[test]
fn chunks_of_the_state_are_whole_and_bounded() {
    let expected = [
        &[0x18, 0x47, 2, 1, 0, 0, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0][..],
        &[6, 5, 4, 3, 2, 1, 0, 0, b'x'],
    ];
    assert_eq!(Message::BlobChunk(chunk(b"x")).encode(), expected.concat());
    let end = Message::BlobChunk(chunk(b""));
    assert_eq!(Message::read(&mut &end.encode()[..]).unwrap(), end);
    let full = Message::BlobChunk(chunk(&vec![7; usize::try_from(CHUNK_BYTES_MAX).unwrap()]));
    assert_eq!(Message::read(&mut &full.encode()[..]).unwrap(), full);
    let long = [&Header::new(Command::BlobChunk.code(), CHUNK_BYTES_MAX + 9).encode()[..], &[0; 8]];
    let refused = Message::read(&mut &long.concat()[..]);
    assert!(matches!(refused, Err(ProtocolError::TooLong { .. })), "{refused:?}");
    let short = [&Header::new(Command::BlobChunk.code(), 7).encode()[..], &[0; 7]].concat();
    let refused = Message::read(&mut &short[..]);
    assert!(matches!(refused, Err(ProtocolError::BadLength { .. })), "{refused:?}");
    let mut odd = Message::BlobChunk(chunk(b"x")).encode();
    odd[4] = 1;
    let refused = Message::read(&mut &odd[..]);
    assert!(matches!(refused, Err(ProtocolError::Malformed { .. })), "{refused:?}");
}

#[test]
fn what_is_written_of_the_state_is_bounded_and_whole() {
    let most = Message::BlobsWritten(vec![7; BLOBS_MAX]);
    assert_eq!(Message::read(&mut &most.encode()[..]).unwrap(), most);
    let more = Message::BlobsWritten(vec![7; BLOBS_MAX + 1]).encode();
    let refused = Message::read(&mut &more[..]);
    assert!(matches!(refused, Err(ProtocolError::TooLong { .. })), "{refused:?}");
    let part = [&Header::new(Command::BlobsWritten.code(), 9).encode()[..], &[0; 9]].concat();
    let refused = Message::read(&mut &part[..]);
    assert!(matches!(refused, Err(ProtocolError::BadLength { .. })), "{refused:?}");
}

#[test]
fn a_list_of_parts_of_the_state_has_limits() {
    let list = |count: usize, len_bytes_max| BlobList {
        blobs: (0..count)
            .map(|number| BlobInfo {
                name: format!("gpu{number}"),
                len_bytes_max,
                about: serde_json::json!({"device": [1, 2]}),
            })
            .collect(),
    };
    let most = list(BLOBS_MAX, BLOB_BYTES_MAX);
    assert_eq!(BlobList::parse(&most.to_json()).unwrap(), most);
    let refused = BlobList::parse(&list(BLOBS_MAX + 1, 1).to_json());
    assert!(matches!(refused, Err(ProtocolError::Blob(BlobError::TooMany(_)))), "{refused:?}");
    let refused = BlobList::parse(&list(1, BLOB_BYTES_MAX + 1).to_json());
    assert!(matches!(refused, Err(ProtocolError::Blob(BlobError::Limit { .. }))), "{refused:?}");
    let mut red = list(1, 1);
    red.blobs[0].name = "\x1b[31mgpu".to_owned();
    let refused = BlobList::parse(&red.to_json());
    assert!(matches!(refused, Err(ProtocolError::Malformed { .. })), "{refused:?}");
    assert!(matches!(BlobList::parse(b"[]"), Err(ProtocolError::Json { .. })));
}

/// Maps of these lengths with these bits set.
fn maps(sets: &[(u64, Vec<u64>)]) -> Vec<PageBitmap> {
    let one = |(len, bits): &(u64, Vec<u64>)| {
        let map = PageBitmap::new(*len);
        for bit in bits.iter().filter(|bit| *bit < len) {
            map.set(*bit);
        }
        map
    };
    sets.iter().map(one).collect()
}

fn empty_like(maps: &[PageBitmap]) -> Vec<PageBitmap> {
    maps.iter().map(|map| PageBitmap::new(map.len())).collect()
}

#[test]
fn a_full_and_a_scattered_set_stay_small() {
    let pages = 262_144;
    let full = PageBitmap::new(pages);
    full.set_range(0..pages);
    assert!(runs::encode(&[full]).len() < 16);
    let every_other = PageBitmap::new(pages);
    for page in (0..pages).step_by(2) {
        every_other.set(page);
    }
    assert!(runs::encode(&[every_other]).len() as u64 <= pages / 8 + 1);
}

proptest! {
    #[test]
    fn page_sets_come_back(
        sets in prop::collection::vec((1u64..400, prop::collection::vec(0u64..400, 0..300)), 1..4)
    ) {
        let maps = maps(&sets);
        let back = empty_like(&maps);
        runs::decode(&runs::encode(&maps), &back).unwrap();
        for (one, other) in maps.iter().zip(&back) {
            prop_assert!(one.runs().eq(other.runs()));
        }
    }

    #[test]
    fn nonsense_as_a_page_set_is_refused_or_is_a_set(
        bytes in prop::collection::vec(prop_oneof![6 => 0..4_u8, 1 => any::<u8>()], 0..40),
        more: u8,
    ) {
        let maps = [PageBitmap::new(100), PageBitmap::new(7)];
        match runs::decode(&bytes, &maps) {
            Ok(()) => {
                let encoded = runs::encode(&maps);
                prop_assert!(encoded.len() <= bytes.len(), "{encoded:?}");
                let back = empty_like(&maps);
                runs::decode(&encoded, &back).unwrap();
                for (one, other) in maps.iter().zip(&back) {
                    prop_assert!(one.runs().eq(other.runs()));
                    prop_assert!(one.runs().all(|run| run.end <= one.len()));
                }
                let longer = [&bytes[..], &[more]].concat();
                prop_assert!(runs::decode(&longer, &empty_like(&maps)).is_err());
            }
            Err(error) => prop_assert!(error.to_string().contains("pending pages"), "{error}"),
        }
    }

    #[test]
    fn numbers_come_back(value: u64) {
        let mut bytes = Vec::new();
        put_varint(&mut bytes, value);
        let mut rest = &bytes[..];
        prop_assert_eq!(take_varint(&mut rest), Some(value));
        prop_assert!(rest.is_empty());
        prop_assert_eq!(take_varint(&mut &bytes[..bytes.len() - 1]), None);
    }

    #[test]
    fn numbers_beyond_64_bits_are_refused(mut bytes in prop::collection::vec(128u8..=255, 9), last in 2u8..128) {
        bytes.push(last);
        prop_assert_eq!(take_varint(&mut &bytes[..]), None);
    }

    #[test]
    fn tables_come_back(ranges in prop::collection::vec(any::<(u64, u64)>(), 0..50)) {
        let ranges: Vec<_> = ranges
            .into_iter()
            .map(|(gpa, len_bytes)| GpaRange { gpa, len_bytes })
            .collect();
        let message = Message::Memory(ranges);
        prop_assert_eq!(Message::read(&mut &message.encode()[..]).unwrap(), message);
    }

    #[test]
    fn chunks_of_the_state_come_back(
        blob: u16, offset: u64, bytes in prop::collection::vec(any::<u8>(), 0..300),
    ) {
        let message = Message::BlobChunk(BlobChunk { blob, offset, bytes });
        prop_assert_eq!(Message::read(&mut &message.encode()[..]).unwrap(), message);
    }

    #[test]
    fn any_chunks_of_the_state_are_taken_or_refused(
        chunks in prop::collection::vec((0u16..3, 0u64..12, 0usize..5), 0..40),
    ) {
        let encoded = chunks.into_iter().flat_map(|(blob, offset, len)| {
            let bytes = vec![1; len];
            Message::BlobChunk(BlobChunk { blob, offset, bytes }).encode()
        });
        fuzz_stream(&encoded.collect::<Vec<_>>());
    }

    #[test]
    fn any_bytes_are_read_without_a_panic(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        fuzz_stream(&bytes);
    }

    #[test]
    fn mangled_messages_are_read_without_a_panic(
        which in 0..Command::ALL.len(), at in 0usize..64, byte: u8,
    ) {
        let mut bytes = sample(Command::ALL[which]).encode();
        let len = bytes.len();
        bytes[at % len] = byte;
        fuzz_stream(&bytes);
    }
}
