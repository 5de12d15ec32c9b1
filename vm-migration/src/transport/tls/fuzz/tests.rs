// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The entry point with inputs that are known, and with any.

use proptest::prelude::*;

use super::*;

const DELIVER: u8 = 0;
const DELIVER_SOME: u8 = 1;
const IN_PIECES: u8 = 2;
const INSERT: u8 = 3;
const CHANGE: u8 = 4;
const REPEAT: u8 = 5;
const SWAP: u8 = 6;
const DROP: u8 = 7;
const SEND: u8 = 8;
const SEAL: u8 = 9;
const READ: u8 = 10;
const KEYS_AFTER: u8 = 11;
const ASK: u8 = 12;
const CLOSE: u8 = 13;
const END: u8 = 14;

/// The destination receives.
const UP: u8 = 1 << 7;

/// The whole handshake.
const AGREE: [u8; 3] = [DELIVER | UP, DELIVER, DELIVER | UP];

fn run(suite: u8, steps: &[&[u8]]) -> TlsRecordsOutcome {
    tls_records_outcome(&[&[suite << SUITE_SHIFT], &steps.concat()[..]].concat())
}

#[test]
fn what_is_sent_arrives_whatever_the_pieces() {
    for suite in 0..4 {
        let outcome = run(
            suite,
            &[
                &[IN_PIECES | UP, 1, IN_PIECES, 1],
                &[SEND | UP, 0, 100, IN_PIECES | UP, 1, SEND, 0x80, 0, ASK, KEYS_AFTER, 2],
                &[DELIVER_SOME, 0, 3, READ, 0, 0, 9, IN_PIECES, 100, READ, 1, 0, 9, READ, 3, 0, 9],
                &[SEND | UP, 0xff, 0xff, SEND, 0, 1, READ, 2, 0, 9, READ, 4, 0, 9, CLOSE],
            ],
        );
        assert_eq!(outcome.is_secured, [true; 2]);
        assert_eq!(outcome.heard_bytes, [0x8001, 100 + 0xffff]);
    }
}

/// Each piece takes more of a socket's room than it has bytes.
#[test]
fn the_rest_arrives_after_a_socket_was_full_of_small_pieces() {
    let agree = [IN_PIECES | UP, 1, IN_PIECES, 9, IN_PIECES | UP, 5];
    for len in [[4, 0x6b], [0x10, 0]] {
        let outcome = run(1, &[&agree, &[SEND | UP, len[0], len[1], IN_PIECES | UP, 0]]);
        assert_eq!(outcome.heard_bytes, [0, usize::from(u16::from_be_bytes(len))]);
    }
}

#[test]
fn a_handshake_that_is_changed_fails_and_data_that_is_ends_the_connection() {
    for suite in 1..4 {
        let outcome = run(suite, &[&[CHANGE | UP, 0, 40, 1], &AGREE]);
        assert_eq!(outcome.is_secured, [false; 2], "{outcome:?}");
        for (tamper, heard_bytes) in [
            (&[CHANGE, 0, 5, 1][..], 0),
            (&[INSERT, 1, 0xee], 0),
            (&[DELIVER, REPEAT, 0], 7),
            (&[SEND, 0, 1, SWAP], 0),
            (&[DROP, SEND, 0, 1], 0),
            (&[DELIVER_SOME, 0, 5, END], 0),
            (&[SEAL, 22, 3, 0, 4, 0, 0], 7),
            (&[SEAL, 23, 2, 0, 1, 1], 9),
        ] {
            let outcome = run(suite, &[&AGREE, &[SEND, 0, 7], tamper]);
            assert_eq!(outcome.heard_bytes[0], heard_bytes, "{tamper:?}");
        }
    }
}

#[test]
fn a_handshake_that_fails_is_answered_with_one_alert() {
    const ALERT_BYTES: usize = 5 + 2;
    // An empty message, which stays in the buffer when it is refused; alone, and with another behind it.
    let record = [22, 3, 3, 0, 0];
    for records in [&record[..], &[record; 2].concat()] {
        let input = [&[RAW | TO_SERVER, 0xff, 0xff], records].concat();
        let outcome = tls_records_outcome(&input);
        assert!(outcome.has_failed[1]);
        assert_eq!(outcome.sent[1].1, ALERT_BYTES);
    }
}

#[test]
fn an_input_has_the_same_result_each_time() {
    for suite in 0..4 {
        let once = || run(suite, &[&AGREE, &[SEND, 0, 7, ASK | UP, SEND | UP, 1, 0]]);
        assert_eq!(once(), once());
        assert!(once().sent.iter().all(|(_, len)| *len > 500));
    }
}

/// A step with its operands.
fn step() -> impl Strategy<Value = Vec<u8>> {
    (any::<u8>(), prop::collection::vec(any::<u8>(), 0..6))
        .prop_map(|(step, operands)| [&[step], &operands[..]].concat())
}

/// A step that tampers with nothing.
fn honest_step() -> impl Strategy<Value = Vec<u8>> {
    let to = prop_oneof![Just(0), Just(UP)];
    let kinds = [
        (DELIVER, 0),
        (DELIVER_SOME, 2),
        (IN_PIECES, 1),
        (SEND, 2),
        (READ, 3),
        (KEYS_AFTER, 1),
        (ASK, 0),
        (CLOSE, 0),
    ];
    (to, prop::sample::select(kinds.to_vec()), any::<[u8; 3]>())
        .prop_map(|(to, (kind, len), operands)| [&[kind | to], &operands[..len]].concat())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, ..ProptestConfig::default() })]

    #[test]
    fn what_is_not_tampered_with_arrives(
        suite in 0..4u8,
        steps in prop::collection::vec(honest_step(), 0..40),
    ) {
        let outcome = run(suite, &[&steps.concat()]);
        prop_assert_eq!(outcome.is_secured, [true; 2]);
    }

    #[test]
    fn any_steps_are_survived(
        suite in 0..4u8,
        agrees: bool,
        steps in prop::collection::vec(step(), 0..40),
    ) {
        let agree = if agrees { &AGREE[..] } else { &[] };
        run(suite, &[agree, &steps.concat()]);
    }

    #[test]
    fn any_bytes_of_a_stranger_are_refused(
        to in 0..2u8,
        size: [u8; 2],
        kind in 20..24u8,
        bytes in prop::collection::vec(any::<u8>(), 0..400),
    ) {
        let begin = [RAW | to, size[0], size[1]];
        fuzz_tls_records(&[&begin, &bytes[..]].concat());
        let len = u16::try_from(bytes.len()).unwrap_or(u16::MAX).to_be_bytes();
        fuzz_tls_records(&[&begin, &[kind, 3, 3], &len[..], &bytes].concat());
    }
}
