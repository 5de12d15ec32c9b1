// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! System calls of a trace, and which receiving one has got what a sending one sent.
//!
//! Owns the matching of both ends of a connection, by the bytes in their order. Must never guess: what cannot be
//! matched is left out.

use std::collections::BTreeMap;

use super::events::{Event, What};

/// A place in the trace, and its time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Point {
    pub at: usize,
    pub us: u64,
}

/// A call that has begun and ended in the trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Call {
    pub thread: u32,
    pub kind: i64,
    pub arguments: [u64; 2],
    pub result: i64,
    pub enter: Point,
    pub exit: Point,
}

impl Call {
    /// Bytes that it has moved; 0 if it failed.
    pub fn bytes(&self) -> u64 {
        u64::try_from(self.result).unwrap_or(0)
    }

    /// True if it runs at that place of the trace.
    pub fn spans(&self, place: usize) -> bool {
        (self.enter.at..self.exit.at).contains(&place)
    }
}

/// All calls, by when they began.
pub fn all(events: &[Event]) -> Vec<Call> {
    let mut running: BTreeMap<u32, (i64, [u64; 2], Point)> = BTreeMap::new();
    let mut calls = Vec::new();
    for (at, event) in events.iter().enumerate() {
        let (thread, here) = (event.by, Point { at, us: event.us });
        match event.what {
            What::Enter { call, arguments } => {
                running.insert(thread, (call, arguments, here));
            }
            What::Exit { call, result } => {
                // One that was running when the trace began has no beginning.
                if let Some((began, arguments, enter)) = running.remove(&thread)
                    && began == call
                {
                    calls.push(Call { thread, kind: call, arguments, result, enter, exit: here });
                }
            }
            What::Waking(_) | What::Switch { .. } => {}
        }
    }
    calls.sort_by_key(|call| call.enter.at);
    calls
}

/// For each call that sends, the one that has received the last of its bytes. `woke` says where a call has woken a
/// receiver that was waiting for bytes: all that was sent before had been received then.
pub fn deliver<'c>(
    sends: &[Call],
    receives: &[&'c Call],
    woke: impl Fn(&Call) -> Option<usize>,
) -> Vec<Option<&'c Call>> {
    let mut left = receives.iter().copied().peekable();
    // Bytes that were received and belong to what is sent next; nothing is known before the first waking.
    let mut ahead: Option<u64> = None;
    let mut last: Option<&Call> = None;
    let mut found = Vec::with_capacity(sends.len());
    for send in sends {
        if let Some(place) = woke(send) {
            while left.next_if(|receive| receive.exit.at < place).is_some() {}
            ahead = Some(0);
        }
        let Some(here) = &mut ahead else {
            found.push(None);
            continue;
        };
        while *here < send.bytes() {
            let Some(receive) = left.next() else { break };
            *here += receive.bytes();
            last = Some(receive);
        }
        let is_here = *here >= send.bytes();
        *here = here.saturating_sub(send.bytes());
        // Nothing is received before it is sent.
        found.push(last.filter(|receive| is_here && receive.exit.at > send.enter.at));
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(enter: usize, exit: usize, result: i64) -> Call {
        let point = |at: usize| Point { at, us: at as u64 };
        let (enter, exit) = (point(enter), point(exit));
        Call { thread: 1, kind: 0, arguments: [0; 2], result, enter, exit }
    }

    #[test]
    fn a_call_has_a_beginning_and_an_end() {
        let event = |by, what| Event { us: 5, processor: 0, by, what };
        let calls = all(&[
            event(1, What::Exit { call: 7, result: 1 }),
            event(1, What::Enter { call: 8, arguments: [3, 4] }),
            event(2, What::Enter { call: 9, arguments: [5, 6] }),
            event(2, What::Exit { call: 9, result: -11 }),
            event(1, What::Exit { call: 8, result: 32 }),
            event(2, What::Enter { call: 9, arguments: [5, 6] }),
        ]);
        let found =
            calls.iter().map(|call| (call.thread, call.enter.at, call.exit.at, call.bytes()));
        assert_eq!(found.collect::<Vec<_>>(), [(1, 1, 4, 32), (2, 2, 3, 0)]);
        assert!(calls[0].spans(1) && calls[0].spans(3) && !calls[0].spans(4));
    }

    #[test]
    fn bytes_are_followed_from_when_a_receiver_waited_for_them() {
        let sends = [
            call(0, 1, 32),
            call(10, 12, 32),
            call(20, 21, 48),
            call(30, 31, 32),
            call(50, 51, 16),
        ];
        // Two of them come together, and one in parts; what came first is of no known send.
        let receives = [
            call(3, 4, 32),
            call(11, 13, 32),
            call(34, 35, 60),
            call(36, 37, 20),
            call(52, 55, 32),
        ];
        let receives: Vec<&Call> = receives.iter().collect();
        let woke = |send: &Call| (send.enter.at == 10).then_some(11);
        let found: Vec<_> = deliver(&sends, &receives, woke)
            .into_iter()
            .map(|receive| receive.map(|receive| receive.exit.at))
            .collect();
        assert_eq!(found, [None, Some(13), Some(35), Some(37), Some(55)]);
        // What wakes a receiver once more comes next, whatever is not known of what was before.
        let woke = |send: &Call| [10, 50].contains(&send.enter.at).then_some(send.exit.at);
        assert_eq!(deliver(&sends, &receives, woke)[4].map(|receive| receive.exit.at), Some(55));
        let found = deliver(&sends, &receives, |_| None);
        assert!(found.iter().all(Option::is_none));
    }

    #[test]
    fn nothing_is_received_before_it_is_sent() {
        let (sends, receive) = ([call(0, 1, 32), call(20, 21, 32)], call(3, 4, 64));
        let found = deliver(&sends, &[&receive], |send| (send.enter.at == 0).then_some(1));
        let ends: Vec<_> = found.iter().map(|found| found.map(|receive| receive.exit.at)).collect();
        assert_eq!(ends, [Some(4), None]);
    }
}
