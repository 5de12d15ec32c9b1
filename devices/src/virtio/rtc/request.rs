// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The requests to a real-time clock, and the answers (linux/virtio_rtc.h).
//!
//! Owns their layout. It must never access guest memory, nor a clock.

/// Bytes of a request that are looked at: a head with the type, and the parameters.
pub(super) const REQUEST_LEN_BYTES_MAX: usize = 16;
/// Bytes of the head of a request, and of an answer.
const HEAD_LEN_BYTES: usize = 8;

const READ: u16 = 1;
const READ_CROSS: u16 = 2;
const CONFIG: u16 = 0x1000;
const CLOCK_CAPABILITIES: u16 = 0x1001;
const CROSS_CAPABILITIES: u16 = 0x1002;

const OK: u8 = 0;
const NOT_SUPPORTED: u8 = 2;
const NO_SUCH_CLOCK: u8 = 3;
const INVALID: u8 = 4;
const HOST_ERROR: u8 = 5;

/// Clocks that there are, whose numbers begin with 0.
const CLOCKS: u16 = 1;
/// UTC of the host. Whether leap seconds are smeared there, and how, is not known.
const UTC_MAYBE_SMEARED: u8 = 4;
const SMEARING_UNKNOWN: u8 = 0;

/// A head alone.
fn head(status: u8) -> Vec<u8> {
    let mut head = vec![status];
    head.resize(HEAD_LEN_BYTES, 0);
    head
}

fn answer(body: [u8; 8]) -> Vec<u8> {
    let mut answer = head(OK);
    answer.extend(body);
    answer
}

/// The answer to a request. `now_ns` gives the host's UTC in nanoseconds since 1970, if it has it.
pub(super) fn answer_to(request: &[u8], now_ns: impl FnOnce() -> Option<u64>) -> Vec<u8> {
    let number = |at: usize| {
        request.get(at..at + 2).and_then(|bytes| bytes.try_into().ok()).map(u16::from_le_bytes)
    };
    let Some(kind) = number(0).filter(|_| request.len() >= HEAD_LEN_BYTES) else {
        return head(INVALID);
    };
    if kind == CONFIG {
        let [low, high] = CLOCKS.to_le_bytes();
        return answer([low, high, 0, 0, 0, 0, 0, 0]);
    }
    if ![READ, READ_CROSS, CLOCK_CAPABILITIES, CROSS_CAPABILITIES].contains(&kind) {
        return head(NOT_SUPPORTED);
    }
    // The others name a clock first.
    match number(HEAD_LEN_BYTES).filter(|_| request.len() >= REQUEST_LEN_BYTES_MAX) {
        None => return head(INVALID),
        Some(CLOCKS..) => return head(NO_SUCH_CLOCK),
        Some(_) => {}
    }
    match kind {
        READ => now_ns().map_or_else(|| head(HOST_ERROR), |now_ns| answer(now_ns.to_le_bytes())),
        CLOCK_CAPABILITIES => answer([UTC_MAYBE_SMEARED, SMEARING_UNKNOWN, 0, 0, 0, 0, 0, 0]),
        // With no counter.
        CROSS_CAPABILITIES => answer([0; 8]),
        _ => head(NOT_SUPPORTED),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const NOW_NS: u64 = 0x1234_5678_9abc_def0;

    fn ask(kind: u16, parameters: &[u8]) -> Vec<u8> {
        let mut request = kind.to_le_bytes().to_vec();
        request.resize(HEAD_LEN_BYTES, 0);
        request.extend(parameters);
        answer_to(&request, || Some(NOW_NS))
    }

    #[test]
    fn there_is_one_clock_of_the_host() {
        let head = [0; 8];
        let of = |answer: Vec<u8>| answer.strip_prefix(&head).map(<[u8]>::to_vec);
        assert_eq!(of(ask(CONFIG, &[])), Some(vec![1, 0, 0, 0, 0, 0, 0, 0]));
        assert_eq!(of(ask(CLOCK_CAPABILITIES, &[0; 8])), Some(vec![4, 0, 0, 0, 0, 0, 0, 0]));
        assert_eq!(of(ask(CROSS_CAPABILITIES, &[0, 0, 1, 0, 0, 0, 0, 0])), Some(vec![0; 8]));
        assert_eq!(of(ask(READ, &[0; 8])), Some(NOW_NS.to_le_bytes().to_vec()));
    }

    #[test]
    fn what_it_does_not_have_is_refused() {
        let status = |kind, parameters: &[u8]| {
            let answer = ask(kind, parameters);
            assert_eq!((answer.len(), &answer[1..]), (8, &[0; 7][..]));
            answer[0]
        };
        for kind in [READ, CLOCK_CAPABILITIES, CROSS_CAPABILITIES, READ_CROSS] {
            assert_eq!(status(kind, &[1, 0, 0, 0, 0, 0, 0, 0]), NO_SUCH_CLOCK);
            assert_eq!(status(kind, &[0, 1, 0, 0, 0, 0, 0, 0]), NO_SUCH_CLOCK);
            assert_eq!(status(kind, &[0; 7]), INVALID);
        }
        assert_eq!(status(READ_CROSS, &[0, 0, 1, 0, 0, 0, 0, 0]), NOT_SUPPORTED);
        // Alarms, and what no draft has.
        for kind in [0, 3, 0x1003, 0x1005, 0x2000, u16::MAX] {
            assert_eq!(status(kind, &[0; 8]), NOT_SUPPORTED);
        }
        assert_eq!(answer_to(&[], || None)[0], INVALID);
        assert_eq!(answer_to(&[1; 7], || None)[0], INVALID);
        let mut request = [0; 16];
        request[0] = 1;
        assert_eq!(answer_to(&request, || None)[0], HOST_ERROR);
    }

    proptest! {
        #[test]
        fn each_request_has_an_answer(request in prop::collection::vec(any::<u8>(), 0..40)) {
            let answer = answer_to(&request, || Some(NOW_NS));
            prop_assert!(answer.len() == 8 || (answer.len() == 16 && answer[0] == OK));
        }
    }
}
