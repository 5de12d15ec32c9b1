// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A connection, step by step, with reads whose results are given.

#![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::collections::VecDeque;
use std::io::Read as _;

use super::*;

const SHARE: usize = 10_000;

/// A room in which each read ends as it is told, with an error or a length.
#[derive(Default)]
struct Told {
    ends: VecDeque<Result<usize, i32>>,
    /// What was wanted by each read, and its limit.
    asked: Vec<(usize, usize)>,
}

impl Room for Told {
    fn read(
        &mut self,
        _stream: &UnixStream,
        wanted_bytes: usize,
        limit_bytes: usize,
    ) -> io::Result<Filled> {
        self.asked.push((wanted_bytes, limit_bytes));
        match self.ends.pop_front().unwrap() {
            // Its buffers have 100 bytes each.
            Ok(len_bytes) => {
                let room_bytes = wanted_bytes.next_multiple_of(100).min(limit_bytes);
                Ok(Filled { len_bytes, is_full: len_bytes == room_bytes })
            }
            Err(errno) => Err(io::Error::from_raw_os_error(errno)),
        }
    }
}

fn header(op: u16, buf_alloc: u32, fwd_cnt: u32) -> Header {
    Header { op, buf_alloc, fwd_cnt, ..Header::default() }
}

/// An open connection to a guest with this room, which has been told so, and whose stream has data.
fn open(buf_alloc: u32) -> (Connection, UnixStream) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let mut connection = Connection::of_guest(ours, &header(op::REQUEST, buf_alloc, 0), 4096);
    assert_eq!(next(&mut connection, &[]), (Some((op::RESPONSE, 0)), vec![]));
    connection.stream_ready(EventSet::IN);
    (connection, theirs)
}

/// Operation and length of a packet, and what each read before it wanted, with its limit.
type Next = (Option<(u16, usize)>, Vec<(usize, usize)>);

/// The next packet, where reads end in this way.
fn next(connection: &mut Connection, ends: &[Result<usize, i32>]) -> Next {
    let mut room = Told { ends: ends.iter().copied().collect(), asked: Vec::new() };
    let packet = connection.next_packet(&mut room, SHARE);
    assert!(room.ends.is_empty(), "not all was read");
    (packet.map(|packet| (packet.op, packet.len_bytes)), room.asked)
}

#[test]
fn a_connection_that_has_waited_long_enough_has_no_deadline_left_in_the_past() {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    theirs.set_nonblocking(true).unwrap();
    let mut connection = Connection::of_host(ours, 4096);
    assert!(connection.deadline().is_some(), "the guest has to answer in time");
    assert_eq!(next(&mut connection, &[]).0, Some((op::REQUEST, 0)));
    assert!(connection.is_known());
    connection.overdue();
    assert_eq!(
        theirs.read(&mut [0]).unwrap(),
        0,
        "the client does not wait for the guest's buffer"
    );
    // A guest without a buffer for the RST must not cause repeated wake-ups.
    assert_eq!(connection.deadline(), None);
    connection.restart_time_limit();
    assert_eq!(connection.deadline(), None);
    assert!(connection.has_packets());
    assert_eq!(next(&mut connection, &[]).0, Some((op::RST, 0)));
    assert!(connection.is_over());
}

#[test]
fn a_guest_that_was_not_asked_yet_is_not_asked_for_a_client_that_has_been_given_up() {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    theirs.set_nonblocking(true).unwrap();
    let mut connection = Connection::of_host(ours, 4096);
    assert!(!connection.is_known(), "packets for these ports are of another connection");
    connection.overdue();
    assert!(connection.is_over(), "nothing waits for a buffer of the guest");
    assert_eq!(theirs.read(&mut [0]).unwrap(), 0);
}

#[test]
fn a_guest_that_receives_no_more_is_told_that_its_client_has_gone() {
    let (mut connection, theirs) = open(1000);
    let header = Header { flags: SHUTDOWN_RECEIVE, ..header(op::SHUTDOWN, 1000, 0) };
    connection.take_packet(&header, None, 1);
    assert_eq!(next(&mut connection, &[]).0, None);
    drop(theirs);
    connection.stream_ready(EventSet::HANG_UP);
    let packet = connection.next_packet(&mut Told::default(), SHARE).unwrap();
    assert_eq!((packet.op, packet.flags), (op::SHUTDOWN, SHUTDOWN_SEND | SHUTDOWN_RECEIVE));
    assert!(connection.deadline().is_some(), "the guest closes it now");
}

#[test]
fn a_client_that_goes_on_reading_gets_the_last_data_however_long_that_takes() {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    ours.set_nonblocking(true).unwrap();
    let mut connection = Connection::of_guest(ours, &header(op::REQUEST, 1000, 0), 4 << 20);
    let sent = vec![7; 4 << 20];
    connection.take_packet(&header(op::RW, 1000, 0), Some(&mut sent.as_slice()), 1);
    let flags = SHUTDOWN_SEND | SHUTDOWN_RECEIVE;
    connection.take_packet(&Header { flags, ..header(op::SHUTDOWN, 1000, 0) }, None, 1);
    assert_eq!(next(&mut connection, &[]).0, Some((op::RST, 0)));
    let mut last = connection.deadline().unwrap();
    let mut left = sent.len();
    let mut bytes = vec![0; 256 << 10];
    while !connection.is_over() {
        left -= theirs.read(&mut bytes).unwrap();
        connection.stream_ready(EventSet::OUT);
        let deadline = connection.deadline().unwrap();
        assert!(deadline > last || left + bytes.len() >= sent.len(), "its time begins again");
        last = deadline;
    }
    drop(connection);
    left -= theirs.read_to_end(&mut Vec::new()).unwrap();
    assert_eq!(left, 0);
}

#[test]
fn several_buffers_are_for_a_client_that_has_filled_one() {
    let (mut connection, _theirs) = open(50_000);
    assert_eq!(next(&mut connection, &[Ok(99)]), (Some((op::RW, 99)), vec![(1, 50_000)]));
    // What is left is reported again.
    assert!(!connection.has_packets());
    connection.stream_ready(EventSet::IN);
    assert_eq!(next(&mut connection, &[Ok(100)]), (Some((op::RW, 100)), vec![(99, 49_901)]));
    assert_eq!(next(&mut connection, &[Ok(SHARE)]).1, [(SHARE, 49_801)]);
    assert_eq!(next(&mut connection, &[Ok(SHARE - 1)]).1, [(SHARE, 39_801)]);
    assert!(!connection.has_packets());
    // It may have as much as the last time.
    connection.stream_ready(EventSet::IN);
    let ends = [Err(libc::EINTR), Ok(7)];
    assert_eq!(next(&mut connection, &ends), (Some((op::RW, 7)), vec![(SHARE, 29_802); 2]));
    connection.stream_ready(EventSet::IN);
    assert_eq!(next(&mut connection, &[Err(libc::EAGAIN)]), (None, vec![(7, 29_795)]));
}

#[test]
fn a_stream_whose_data_had_to_wait_is_read_until_it_has_none() {
    let (mut connection, _theirs) = open(50_000);
    assert_eq!(connection.interest(), Some(EventSet::IN));
    // The guest had no buffers when the first event came.
    connection.stream_ready(EventSet::IN);
    assert_eq!(connection.interest(), Some(EventSet::IN | EventSet::EDGE_TRIGGERED));
    assert_eq!(next(&mut connection, &[Ok(99)]).1, [(1, 50_000)]);
    // What is read short may be the end of it, or not: only a read that finds nothing is.
    assert!(connection.has_packets());
    assert_eq!(next(&mut connection, &[Ok(100)]).1, [(1, 49_901)]);
    assert_eq!(next(&mut connection, &[Ok(SHARE)]).1, [(SHARE, 49_801)]);
    assert_eq!(next(&mut connection, &[Ok(5)]).1, [(SHARE, 39_801)]);
    assert_eq!(next(&mut connection, &[Err(libc::EAGAIN)]), (None, vec![(1, 39_796)]));
    assert!(!connection.has_packets());
}

#[test]
fn a_stream_that_is_polled_no_more_is_read_to_its_end() {
    let (mut connection, _theirs) = open(1000);
    connection.stream_ready(EventSet::IN | EventSet::HANG_UP);
    assert_eq!(connection.interest(), None);
    assert_eq!(next(&mut connection, &[Ok(5)]).0, Some((op::RW, 5)));
    assert_eq!(next(&mut connection, &[Ok(6)]).0, Some((op::RW, 6)));
    assert_eq!(next(&mut connection, &[Ok(0)]).0, Some((op::SHUTDOWN, 0)));
}

#[test]
fn no_more_is_read_than_the_guest_has_room_for_whatever_it_says_later() {
    let (mut connection, _theirs) = open(1000);
    assert_eq!(next(&mut connection, &[Ok(100)]).1, [(1, 1000)]);
    assert_eq!(next(&mut connection, &[Ok(400)]).1, [(SHARE, 900)]);
    connection.stream_ready(EventSet::IN);
    // Half of it is left, which it takes back, and then more than that.
    for (buf_alloc, fwd_cnt) in [(500, 0), (300, 0), (0, 0), (1000, 501), (0, 500)] {
        connection.take_packet(&header(op::CREDIT_UPDATE, buf_alloc, fwd_cnt), None, 1);
        assert_eq!(next(&mut connection, &[]).0, None);
    }
    connection.take_packet(&header(op::CREDIT_UPDATE, 300, 400), None, 1);
    assert_eq!(next(&mut connection, &[Ok(1)]).1, [(500, 200)]);
}

/// A connection whose guest has no room for what its client has written.
fn without_credit() -> (Connection, UnixStream) {
    let (mut connection, theirs) = open(100);
    assert_eq!(next(&mut connection, &[Ok(100)]).0, Some((op::RW, 100)));
    (connection, theirs)
}

/// The guest has taken `fwd_cnt` bytes, and has room for 100 more.
fn report(connection: &mut Connection, fwd_cnt: u32) {
    connection.take_packet(&header(op::CREDIT_UPDATE, 100, fwd_cnt), None, 1);
}

#[test]
fn a_guest_that_reports_its_space_by_itself_is_not_asked() {
    let (mut connection, _theirs) = without_credit();
    for count in 1..10 {
        assert!(!connection.has_packets());
        assert!(connection.deadline().is_some(), "it is asked if it reports nothing");
        report(&mut connection, 100 * count);
        assert_eq!(connection.deadline(), None);
        assert_eq!(next(&mut connection, &[Ok(100)]).0, Some((op::RW, 100)));
    }
}

#[test]
fn a_guest_that_reports_nothing_is_asked_late_and_sooner_once_it_has_answered() {
    let (mut connection, _theirs) = without_credit();
    connection.overdue();
    assert_eq!(next(&mut connection, &[]).0, Some((op::CREDIT_REQUEST, 0)));
    assert!(!connection.has_packets());
    for count in 1..5 {
        report(&mut connection, 100 * count);
        assert_eq!(next(&mut connection, &[Ok(100)]).0, Some((op::RW, 100)));
        assert!(connection.has_packets(), "it would not report its space");
        assert_eq!(next(&mut connection, &[]).0, Some((op::CREDIT_REQUEST, 0)));
    }
    // It has no space, and reports some later.
    report(&mut connection, 400);
    assert!(!connection.has_packets());
    report(&mut connection, 500);
    assert_eq!(next(&mut connection, &[Ok(100)]).0, Some((op::RW, 100)));
    assert!(!connection.has_packets());
    assert!(connection.deadline().is_some());
}

#[test]
fn a_guest_is_asked_again_ever_more_seldom() {
    let (mut connection, _theirs) = without_credit();
    let mut waits = Vec::new();
    for _ in 0..10 {
        let wait = connection.deadline().unwrap().saturating_duration_since(Instant::now());
        waits.push(wait.as_millis().next_multiple_of(10));
        connection.overdue();
        assert_eq!(next(&mut connection, &[]).0, Some((op::CREDIT_REQUEST, 0)));
        // It answers some of the questions, but its program does not read.
        if waits.len() % 2 == 0 {
            report(&mut connection, 0);
        }
    }
    assert!(waits.is_sorted() && waits[9] > 500 && waits[9] <= 1000, "{waits:?}");
}

#[test]
fn a_guest_is_not_asked_for_data_that_nobody_wants_any_more() {
    let (mut connection, _theirs) = without_credit();
    connection.overdue();
    let end = Header { flags: SHUTDOWN_RECEIVE, ..header(op::SHUTDOWN, 100, 0) };
    connection.take_packet(&end, None, 1);
    assert_eq!(connection.deadline(), None);
    assert_eq!(next(&mut connection, &[]).0, None);
    let (mut connection, _theirs) = without_credit();
    connection.fail();
    assert_eq!(connection.deadline(), None);
    assert_eq!(next(&mut connection, &[]).0, Some((op::RST, 0)));
}

#[test]
fn a_guest_with_a_small_buffer_is_told_of_its_credit_before_that_is_used_up() {
    let (mut connection, _theirs) = open(1000);
    // Linux sends no more at a time than its own buffer holds.
    connection.take_packet(&header(op::RW, 1000, 0), Some(&mut [1; 400].as_slice()), 1);
    assert_eq!(next(&mut connection, &[Err(libc::EAGAIN)]).0, None, "less than a half");
    connection.take_packet(&header(op::RW, 1000, 0), Some(&mut [1; 100].as_slice()), 1);
    assert_eq!(next(&mut connection, &[]).0, Some((op::CREDIT_UPDATE, 0)));
    assert_eq!(next(&mut connection, &[]).0, None, "once");
}

#[test]
fn the_end_of_a_stream_is_told_behind_its_data() {
    for end in [Ok(0), Err(libc::ECONNRESET)] {
        let (mut connection, _theirs) = open(1000);
        assert_eq!(next(&mut connection, &[Ok(5)]).0, Some((op::RW, 5)));
        connection.stream_ready(EventSet::IN);
        assert_eq!(next(&mut connection, &[end]).0, Some((op::SHUTDOWN, 0)), "{end:?}");
        assert_eq!(next(&mut connection, &[]).0, None);
    }
}

#[test]
fn data_that_cannot_be_put_into_the_guest_s_memory_are_no_end_but_a_reset() {
    for errno in [libc::EFAULT, libc::ENOMEM, libc::EIO] {
        let (mut connection, _theirs) = open(1000);
        assert_eq!(next(&mut connection, &[Err(errno)]).0, Some((op::RST, 0)));
        assert!(connection.is_over());
    }
}

#[test]
fn a_bad_buffer_among_several_is_for_one_connection_only() {
    let (mut connection, _theirs) = open(50_000);
    next(&mut connection, &[Ok(100)]);
    let ends = [Err(libc::EFAULT), Ok(100)];
    let wanted = vec![(SHARE, 49_900), (1, 49_900)];
    assert_eq!(next(&mut connection, &ends), (Some((op::RW, 100)), wanted));
}

/// Data whose writes end as they are told.
struct Sent {
    ends: VecDeque<Result<usize, i32>>,
    left: Vec<u8>,
}

impl Sent {
    fn new(len_bytes: u8, ends: &[Result<usize, i32>]) -> Self {
        Self { ends: ends.iter().copied().collect(), left: (0..len_bytes).collect() }
    }
}

impl Data for Sent {
    fn len_bytes(&self) -> usize {
        self.left.len()
    }

    fn write(&mut self, _stream: &UnixStream) -> io::Result<usize> {
        let written = self.ends.pop_front().unwrap().map_err(io::Error::from_raw_os_error)?;
        self.left.drain(..written);
        Ok(written)
    }

    fn keep(&mut self, kept: &mut VecDeque<u8>) -> io::Result<()> {
        kept.extend(&self.left);
        Ok(())
    }
}

#[test]
fn what_a_stream_does_not_take_is_kept_and_comes_before_what_is_sent_later() {
    let (mut connection, mut theirs) = open(1000);
    assert_eq!(connection.direct_bytes(), Some(4096));
    let ends = [Ok(10), Err(libc::EINTR), Ok(5), Err(libc::EAGAIN)];
    let mut sent = Sent::new(40, &ends);
    connection.take_packet(&header(op::RW, 1000, 0), Some(&mut sent), 1);
    assert!(sent.ends.is_empty());
    assert!(connection.interest().unwrap().contains(EventSet::OUT));
    assert_eq!(connection.direct_bytes(), None);
    // No further write is tried until there is room.
    connection.take_packet(&header(op::RW, 1000, 0), Some(&mut Sent::new(3, &[])), 1);
    connection.stream_ready(EventSet::OUT);
    assert!(!connection.interest().unwrap().contains(EventSet::OUT));
    let mut received = [0; 28];
    theirs.read_exact(&mut received).unwrap();
    let expected: Vec<u8> = (15..40).chain(0..3).collect();
    assert_eq!(&received[..], expected);
    assert_eq!(connection.direct_bytes(), Some(4096));
}

#[test]
fn what_is_kept_is_a_part_of_the_credit() {
    let (mut connection, _theirs) = open(1000);
    let mut first = Sent { ends: [Err(libc::EAGAIN)].into(), left: vec![1; 4000] };
    connection.take_packet(&header(op::RW, 1000, 0), Some(&mut first), 1);
    connection.take_packet(&header(op::RW, 1000, 0), Some(&mut Sent::new(96, &[])), 1);
    assert_eq!(next(&mut connection, &[Err(libc::EAGAIN)]).0, None);
    connection.take_packet(&header(op::RW, 1000, 0), Some(&mut Sent::new(1, &[])), 1);
    assert_eq!(next(&mut connection, &[]).0, Some((op::RST, 0)));
    assert!(connection.is_over(), "what was kept is not delivered either");
}

#[test]
fn data_that_cannot_be_read_from_the_guest_s_memory_are_no_data_but_a_reset() {
    let (mut connection, mut theirs) = open(1000);
    let mut sent = Sent::new(40, &[Ok(10), Err(libc::EFAULT)]);
    connection.take_packet(&header(op::RW, 1000, 0), Some(&mut sent), 1);
    assert_eq!(next(&mut connection, &[]).0, Some((op::RST, 0)));
    assert_eq!(theirs.read(&mut [0]).unwrap(), 0);
}

#[test]
fn a_guest_is_told_of_a_client_that_reads_no_more_and_its_data_are_dropped() {
    let (mut connection, _theirs) = open(1000);
    let mut sent = Sent::new(40, &[Ok(10), Err(libc::EPIPE)]);
    connection.take_packet(&header(op::RW, 1000, 0), Some(&mut sent), 1);
    let mut room = Told { ends: [Err(libc::EAGAIN)].into(), asked: Vec::new() };
    let packet = connection.next_packet(&mut room, SHARE).unwrap();
    assert_eq!((packet.op, packet.flags), (op::SHUTDOWN, SHUTDOWN_RECEIVE));
    assert_eq!(packet.fwd_cnt, 40, "the guest may send on, for what was written before");
    connection.take_packet(&header(op::RW, 1000, 0), Some(&mut Sent::new(5, &[])), 1);
    assert_eq!(connection.direct_bytes(), None);
}
