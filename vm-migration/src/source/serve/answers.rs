// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The page requests of one connection, and the order in which they are answered.
//!
//! Owns that order. Of the requested units, the one with the fewest pieces left is sent first: a small page
//! never waits for the rest of a large one, nor does a large one that has nearly arrived in the background.
//! Readahead is sent when no request is left. This module reads and sends nothing itself.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::sync::atomic::{AtomicU32, Ordering};

use super::Server;
use super::pages::{REQUEST_UNITS_MAX, Reply, UnitRange};
use crate::layout::{GpaRange, to_usize};
use crate::protocol::ProtocolError;
use crate::ram::GuestMemoryMap;

/// Most readahead units that are queued; newer predictions replace older ones.
const AHEAD_MAX: usize = 512;

/// A requested unit. Ordered by what is left to send, then by the time of the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct PageRequest {
    /// Pieces that were pending at the request and have not been sent on this connection.
    left: u64,
    number: u64,
    /// A part of it has been sent on this connection.
    sent: bool,
    stretch: UnitRange,
}

/// Why pages are sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SendReason {
    /// They were requested.
    Requested,
    /// As readahead along with requested ones.
    Readahead,
}

/// While it exists, the background senders yield to answers.
struct InService<'s>(&'s AtomicU32);

impl<'s> InService<'s> {
    fn begin(count: &'s AtomicU32) -> Self {
        count.fetch_add(1, Ordering::Relaxed);
        Self(count)
    }
}

impl Drop for InService<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Requests on a connection that are not fully answered.
pub(super) struct Answers<'s, M> {
    server: &'s Server<M>,
    waited: BinaryHeap<Reverse<PageRequest>>,
    ahead: VecDeque<UnitRange>,
    /// Number of requests so far.
    noted: u64,
    in_service: Option<InService<'s>>,
}

impl<'s, M: GuestMemoryMap> Answers<'s, M> {
    pub(super) fn new(server: &'s Server<M>) -> Self {
        let (waited, ahead) = (BinaryHeap::new(), VecDeque::new());
        Self { server, waited, ahead, noted: 0, in_service: None }
    }

    /// Queues requested ranges.
    pub(super) fn wait_for(&mut self, ranges: &[GpaRange]) -> Result<(), ProtocolError> {
        for stretch in self.server.stretches(ranges)? {
            let left = self.server.pending_of(stretch);
            self.waited.push(Reverse(PageRequest {
                left,
                number: self.noted,
                sent: false,
                stretch,
            }));
            self.noted += 1;
        }
        if !self.waited.is_empty() && self.in_service.is_none() {
            self.in_service = Some(InService::begin(&self.server.in_service));
        }
        Ok(())
    }

    /// Queues ranges for readahead.
    pub(super) fn add_readahead(&mut self, ranges: &[GpaRange]) -> Result<(), ProtocolError> {
        self.ahead.extend(self.server.stretches(ranges)?);
        let too_many = self.ahead.len().saturating_sub(AHEAD_MAX);
        self.ahead.drain(..too_many);
        Ok(())
    }

    /// True while more requests are accepted; a peer that sends more has to wait.
    pub(super) fn has_room(&self) -> bool {
        self.waited.len() < to_usize(REQUEST_UNITS_MAX)
    }

    /// True when every request has been answered and sent.
    pub(super) fn is_done(&self) -> bool {
        self.waited.is_empty() && self.ahead.is_empty()
    }

    /// The next piece of an answer, which may be empty; `None` when everything is answered.
    pub(super) fn next_piece(&mut self) -> Option<(Reply, SendReason)> {
        if self.is_done() {
            return None;
        }
        let mut reply = Reply::default();
        if self.waited.is_empty() {
            while !reply.is_large()
                && let Some(mut stretch) = self.ahead.pop_front()
            {
                self.server.claim_from(&mut stretch, &mut reply);
                if !stretch.is_done() {
                    self.ahead.push_front(stretch);
                }
            }
            return Some((reply, SendReason::Readahead));
        }
        while !reply.is_large()
            && let Some(Reverse(mut wish)) = self.waited.pop()
        {
            // Pieces that are not pending never become so: with nothing left, the rest need not be
            // examined.
            if wish.left > 0 {
                let claimed = self.server.claim_from(&mut wish.stretch, &mut reply);
                wish.sent |= claimed > 0;
                wish.left = wish.left.saturating_sub(claimed);
            }
            if wish.left > 0 && !wish.stretch.is_done() {
                self.waited.push(Reverse(wish));
            } else if !wish.sent {
                self.server.add_elsewhere(&mut reply, wish.stretch);
            }
        }
        Some((reply, SendReason::Requested))
    }

    /// Notes that the result of [`next_piece`](Self::next_piece) has been sent.
    pub(super) fn sent(&mut self) {
        if self.waited.is_empty() {
            self.in_service = None;
        }
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a failing unwrap fails the test")]
    use std::collections::BTreeSet;
    use std::sync::Arc;

    use page_bitmap::PageBitmap;

    use super::*;
    use crate::layout::{Backing, PAGE_BYTES, PageRun};
    use crate::progress::Progress;
    use crate::source::serve::Grain;
    use crate::testing::{FakeMemory, Guest};
    use crate::{SendOptions, Side};

    const UNIT: u64 = 512;
    const SMALL: u64 = 1 << 32;

    /// A server with four large host pages of the destination and 64 small ones; all have contents.
    fn server() -> Server<FakeMemory> {
        let regions = [(0, 4 * UNIT), (SMALL, 64)];
        let memory = FakeMemory::new(&regions, Backing::Shared, PAGE_BYTES).unwrap();
        Guest::new(&memory, 1).fill(&memory, 100);
        let missing = vec![PageBitmap::new(4), PageBitmap::new(64)];
        for map in &missing {
            map.set_range(0..map.len());
        }
        let grains = vec![Grain::new(1, UNIT), Grain::new(1, 1)];
        let options = SendOptions::new("tcp:127.0.0.1:1".parse().unwrap());
        Server::new(memory, missing, grains, &options, Arc::new(Progress::new(Side::Source)))
    }

    fn unit(number: u64) -> GpaRange {
        GpaRange { gpa: number * UNIT * PAGE_BYTES, len_bytes: UNIT * PAGE_BYTES }
    }

    fn small(page: u64) -> GpaRange {
        GpaRange { gpa: SMALL + page * PAGE_BYTES, len_bytes: PAGE_BYTES }
    }

    fn pages(runs: &[PageRun]) -> Vec<(usize, u64)> {
        runs.iter().flat_map(|run| (run.first..run.end()).map(|page| (run.region, page))).collect()
    }

    fn data(answers: &mut Answers<'_, FakeMemory>) -> Vec<(usize, u64)> {
        let (reply, _) = answers.next_piece().unwrap();
        answers.sent();
        pages(&reply.data)
    }

    #[test]
    fn a_request_names_so_many_pages_and_no_more() {
        let server = server();
        let some = vec![small(1); to_usize(REQUEST_UNITS_MAX)];
        assert_eq!(server.stretches(&some).unwrap().len(), some.len());
        let refused = server.stretches(&[&some[..], &[small(1)]].concat());
        assert!(refused.is_err());
    }

    #[test]
    fn what_the_guest_has_discarded_stays_a_hole() {
        let server = server();
        let given = PageRun { region: 0, first: 3, count: 20 };
        crate::ram::GuestMemoryMap::discard(&*server.memory, given).unwrap();
        let before = server.memory.blocks(0);
        let (mut at, mut zero) = ((0, 0), Vec::new());
        for _ in 0..2 {
            zero.extend(pages(&server.next_chunk(&mut at).unwrap().zero));
        }
        let gone = PageRun { region: 1, first: 7, count: 1 };
        crate::ram::GuestMemoryMap::discard(&*server.memory, gone).unwrap();
        let small_before = server.memory.blocks(1);
        let mut answers = Answers::new(&server);
        answers.wait_for(&[small(7)]).unwrap();
        zero.extend(pages(&answers.next_piece().unwrap().0.zero));
        let expected = (3..23).map(|page| (0, page)).chain([(1, 7)]).collect::<Vec<_>>();
        assert_eq!(zero, expected);
        assert_eq!((server.memory.blocks(0), server.memory.blocks(1)), (before, small_before));
    }

    #[test]
    fn a_small_page_never_waits_for_the_rest_of_a_large_one() {
        let server = server();
        let mut answers = Answers::new(&server);
        answers.wait_for(&[unit(1)]).unwrap();
        let mut sent = data(&mut answers);
        assert_eq!(sent, (UNIT..UNIT + 16).map(|page| (0, page)).collect::<Vec<_>>());
        answers.wait_for(&[small(7)]).unwrap();
        let next = data(&mut answers);
        assert_eq!(next.first(), Some(&(1, 7)), "{next:?}");
        assert!(next.len() <= 16, "{next:?}");
        sent.extend(next);
        while !answers.is_done() {
            let next = data(&mut answers);
            assert!(next.len() <= 16, "{next:?}");
            sent.extend(next);
        }
        assert_eq!(sent.len() as u64, UNIT + 1);
        assert_eq!(sent.into_iter().collect::<BTreeSet<_>>().len() as u64, UNIT + 1, "twice");
    }

    #[test]
    fn the_large_page_of_which_least_is_left_goes_first() {
        let server = server();
        let mut at = (0, UNIT);
        for _ in 0..31 {
            server.next_chunk(&mut at).unwrap();
        }
        let mut answers = Answers::new(&server);
        answers.wait_for(&[unit(0), unit(1)]).unwrap();
        let first = data(&mut answers);
        assert_eq!(first, (2 * UNIT - 16..2 * UNIT).map(|page| (0, page)).collect::<Vec<_>>());
        assert_eq!(data(&mut answers).first(), Some(&(0, 0)));
    }

    #[test]
    fn what_all_comes_on_other_connections_is_said_to_be_there() {
        let server = server();
        let mut at = (0, 2 * UNIT);
        for _ in 0..32 {
            server.next_chunk(&mut at).unwrap();
        }
        let mut answers = Answers::new(&server);
        answers.wait_for(&[unit(2)]).unwrap();
        let (reply, why) = answers.next_piece().unwrap();
        assert_eq!((pages(&reply.data).len(), why), (0, SendReason::Requested));
        assert_eq!(reply.elsewhere, [PageRun { region: 0, first: 2 * UNIT, count: UNIT }]);
        assert!(answers.next_piece().is_none());
    }

    #[test]
    fn readahead_is_sent_when_no_request_waits() {
        let server = server();
        let mut answers = Answers::new(&server);
        answers.add_readahead(&[unit(3)]).unwrap();
        let (reply, why) = answers.next_piece().unwrap();
        assert_eq!((pages(&reply.data).len(), why), (16, SendReason::Readahead));
        answers.wait_for(&[small(1)]).unwrap();
        assert_eq!(server.in_service.load(Ordering::Relaxed), 1, "pushers have to give way");
        let (reply, why) = answers.next_piece().unwrap();
        assert_eq!((pages(&reply.data), why), (vec![(1, 1)], SendReason::Requested));
        answers.sent();
        assert_eq!(server.in_service.load(Ordering::Relaxed), 0, "no request waits");
        assert!(matches!(answers.next_piece(), Some((_, SendReason::Readahead))));
    }

    #[test]
    fn a_pusher_finishes_a_large_page_before_it_goes_where_the_guest_is() {
        let server = server();
        let mut at = (0, 0);
        server.next_chunk(&mut at).unwrap();
        Answers::new(&server).wait_for(&[unit(1)]).unwrap();
        for chunk in 1..32 {
            let reply = server.next_chunk(&mut at).unwrap();
            assert_eq!(pages(&reply.data).first(), Some(&(0, chunk * 16)));
        }
        let reply = server.next_chunk(&mut at).unwrap();
        assert_eq!(pages(&reply.data).first(), Some(&(0, 2 * UNIT)), "behind what was asked for");
    }

    #[test]
    fn after_a_loss_whole_large_pages_are_pending_again() {
        let server = server();
        let mut answers = Answers::new(&server);
        answers.wait_for(&[unit(0), unit(1)]).unwrap();
        while answers.next_piece().is_some() {}
        let lacks = [PageBitmap::new(4), PageBitmap::new(64)];
        lacks[0].set(1);
        server.pend(&crate::protocol::runs::encode(&lacks)).unwrap();
        assert_eq!(server.pending_pages(), UNIT);
        assert_eq!(server.encode_pending(), crate::protocol::runs::encode(&lacks));
    }
}
