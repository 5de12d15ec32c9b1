// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A source that sends invalid data: each time an error, with nothing written and nothing allocated.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::recovery::wait_until;
use super::{Builder, Guest, LIMITS, Target, assert_whole, have_uffd, loopback, memory};
use crate::channel::Channel;
use crate::layout::{GpaRange, PAGE_BYTES};
use crate::options::{CONNECTIONS_MAX, Limits, MemoryMode};
use crate::progress::Phase;
use crate::protocol::ProtocolError;
use crate::protocol::capabilities::{Accepted, Offer, features};
use crate::protocol::codec::Header;
use crate::protocol::message::{Command, Message, Role, VERSION};
use crate::ram::GuestMemoryMap;
use crate::testing::FakeMemory;
use crate::transport::{Connection, TransportError};
use crate::{Cancel, Cause};

const HUGE: u64 = 1 << 62;

/// A source that has negotiated up to the point where memory may be sent.
struct HostileSource {
    control: Channel,
    target: Target,
    to: Arc<FakeMemory>,
    token: [u8; 16],
    cancel: Cancel,
}

impl HostileSource {
    fn connect(limits: Limits) -> Self {
        let to = memory();
        let target = Target::start(&loopback(), Builder::new(&to, &Guest::new(&to, 1)), limits);
        Self::connect_to(target, to)
    }

    fn connect_to(target: Target, to: Arc<FakeMemory>) -> Self {
        let cancel = Cancel::new().unwrap();
        let connection =
            Connection::connect(&target.address, &cancel, LIMITS.connect, LIMITS.answer).unwrap();
        Self { control: Channel::new(connection), target, to, token: [0; 16], cancel }
    }

    fn negotiated(mode: MemoryMode) -> Self {
        Self::negotiated_within(LIMITS, mode)
    }

    fn negotiated_within(limits: Limits, mode: MemoryMode) -> Self {
        Self::connect(limits).negotiate(mode)
    }

    fn negotiated_with(target: Target, to: Arc<FakeMemory>, mode: MemoryMode) -> Self {
        Self::connect_to(target, to).negotiate(mode)
    }

    fn negotiate(self, mode: MemoryMode) -> Self {
        let mut hostile = self;
        hostile.token = agree(&mut hostile.control, &hostile.to, mode);
        hostile.control.ask(&Message::Config(b"{}".to_vec()), LIMITS.answer).unwrap();
        hostile
    }

    fn extra(&self, role: Role) -> Channel {
        let address = &self.target.address;
        Channel::open_extra(address, role, Some(&self.token), &self.cancel, &LIMITS).unwrap()
    }

    /// Sends bytes and expects a refusal; returns the destination's cause.
    fn provoke(mut self, bytes: &[u8]) -> Cause {
        self.control.connection.send(bytes).unwrap();
        let answer = self.control.answer(LIMITS.answer);
        assert!(matches!(answer, Err(Cause::Refused(_))), "{answer:?}");
        drop(self.control);
        let failure = *self.target.join().unwrap_err();
        for region in 0..2 {
            assert_eq!(self.to.populated_bytes(region).unwrap(), 0, "memory was written");
        }
        failure.error.cause
    }
}

/// Negotiates up to the point where the configuration may be sent; returns the migration's token.
pub(super) fn agree(control: &mut Channel, to: &FakeMemory, mode: MemoryMode) -> [u8; 16] {
    let limit = LIMITS.answer;
    control.ask(&Message::Start { version: VERSION, offer: true }, limit).unwrap();
    let offer = Offer {
        recover_timeout_ms: None,
        formats: crate::protocol::formats::Formats::default(),
        software: "hostile".into(),
        features: features(),
        memory_mode: mode,
        bulk_connections: 1,
        urgent_connections: 1,
        many_urgent_connections: None,
        vcpus: None,
        local: false,
        regions: to.layout().regions().to_vec(),
    };
    let answer = control.ask(&Message::Capabilities(offer.to_json()), limit).unwrap();
    Accepted::parse(&answer.payload).unwrap().token
}

fn memory_of(ranges: &[(u64, u64)]) -> Vec<u8> {
    let ranges =
        ranges.iter().map(|(gpa, len_bytes)| GpaRange { gpa: *gpa, len_bytes: *len_bytes });
    Message::Memory(ranges.collect()).encode()
}

#[test]
fn tables_that_leave_guest_memory_are_refused_before_a_byte_is_taken() {
    let page = PAGE_BYTES;
    for ranges in [
        vec![(HUGE, page)],
        vec![(0, HUGE)],
        vec![(0, u64::MAX)],
        vec![(u64::MAX - page + 1, page)],
        vec![(2047 * page, 2 * page)],
        vec![(1, page)],
        vec![(0, 1)],
        vec![(0, 0)],
        vec![(0, page), (2048 * page, page)],
    ] {
        let ranges: Vec<_> =
            ranges.into_iter().map(|(gpa, len_bytes)| GpaRange { gpa, len_bytes }).collect();
        for message in [Message::Memory(ranges.clone()), Message::Coming(ranges.clone())] {
            let cause = HostileSource::negotiated(MemoryMode::Precopy).provoke(&message.encode());
            assert!(
                matches!(cause, Cause::Protocol(ProtocolError::Layout(_))),
                "{message:?}: {cause:?}"
            );
        }
    }
}

#[test]
fn lengths_beyond_every_limit_are_refused_without_allocating() {
    for code in [2u16, 3, 4, 6, 9, 0x4701, 0x4702, 0x4703, 0x4705, 0x4713] {
        let bytes = Header::new(code, HUGE).encode();
        let cause = HostileSource::negotiated(MemoryMode::Precopy).provoke(&bytes);
        assert!(
            matches!(cause, Cause::Protocol(ProtocolError::TooLong { len_bytes: HUGE, .. })),
            "{code:#x}: {cause:?}"
        );
    }
}

#[test]
fn compressed_memory_that_lies_is_refused_before_a_page_is_written() {
    let frame = zstd::bulk::compress(&[7; 8192], 1).unwrap();
    let message = |pages: u64, frame: &[u8]| {
        let ranges = vec![GpaRange { gpa: 0, len_bytes: pages * PAGE_BYTES }];
        let frame_bytes = u32::try_from(frame.len()).unwrap();
        [&Message::MemoryZstd { ranges, frame_bytes }.encode()[..], frame].concat()
    };
    let bomb = zstd::bulk::compress(&vec![0; 256 << 20], 1).unwrap();
    for bytes in [
        // Fewer and more pages than it holds, an invalid frame, a frame that holds far more.
        message(1, &frame),
        message(3, &frame),
        message(2, &[0xa5; 64]),
        message(2, &[]),
        message(2048, &bomb[..bomb.len().min(4096)]),
        // More than a frame may hold, and a frame longer than its contents.
        message(2048, &frame),
        message(1, &vec![0; 5000]),
    ] {
        let cause = HostileSource::negotiated(MemoryMode::Precopy).provoke(&bytes);
        assert!(
            matches!(
                cause,
                Cause::Protocol(ProtocolError::Zstd(_) | ProtocolError::TooLong { .. })
            ),
            "{cause:?}"
        );
    }
}

#[test]
fn messages_out_of_place_are_refused() {
    let wrong = [
        Message::Start { version: VERSION, offer: true },
        Message::Config(b"{}".to_vec()),
        Message::Complete,
        Message::CompletePaused,
        Message::Confirm(Vec::new()),
        Message::PostcopyDone(b"{}".to_vec()),
        Message::MemoryFd { slot: 0 },
        Message::PageFault(vec![]),
        Message::Elsewhere(vec![]),
        Message::Pending(vec![0, 0, 0, 0]),
    ];
    for message in wrong {
        let name = message.command().name();
        let cause = HostileSource::negotiated(MemoryMode::Precopy).provoke(&message.encode());
        assert!(
            matches!(&cause, Cause::Protocol(ProtocolError::Unexpected { got, .. }) if *got == name),
            "{name}: {cause:?}"
        );
    }
}

#[test]
fn tables_that_name_more_than_the_guest_has_are_refused() {
    // Each range lies in guest memory; together they are endless work. That of Memory is no more than its sender has, which
    // sends all of it.
    let ranges = vec![GpaRange { gpa: 0, len_bytes: 2048 * PAGE_BYTES }; 1 << 16];
    for message in [Message::ZeroPages(ranges.clone()), Message::Coming(ranges)] {
        let name = message.command().name();
        let cause = HostileSource::negotiated(MemoryMode::Precopy).provoke(&message.encode());
        assert!(
            matches!(cause, Cause::Protocol(ProtocolError::Malformed { .. })),
            "{name}: {cause:?}"
        );
    }
}

#[test]
fn extra_connections_have_a_limit() {
    let hostile = HostileSource::negotiated(MemoryMode::Precopy);
    let most = usize::from(CONNECTIONS_MAX);
    let kept: Vec<_> = (0..most).map(|_| hostile.extra(Role::Memory)).collect();
    let more = hostile.extra(Role::Memory);
    assert!(more.connection.wait_for_data(Some(LIMITS.answer)).is_ok());
    assert!(matches!(more.connection.receive_now(&mut [0]), Err(TransportError::Closed)));
    assert!(kept[0].connection.receive_now(&mut [0]).unwrap().is_none());
    drop((kept, more, hostile.control));
    hostile.target.join().unwrap_err();
}

#[test]
fn a_message_that_trickles_has_an_end() {
    let limits = Limits { answer: Duration::from_millis(400), ..LIMITS };
    let hostile = HostileSource::negotiated_within(limits, MemoryMode::Precopy);
    let began = Instant::now();
    let connection = &hostile.control.connection;
    connection.send(&Header::new(Command::State.code(), 1 << 20).encode()).unwrap();
    // It never stalls, and never makes progress either.
    while connection.send(b" ").is_ok()
        && connection.receive_now(&mut [0]).is_ok_and(|r| r.is_none())
    {
        assert!(began.elapsed() < LIMITS.answer, "it is still read");
        std::thread::sleep(Duration::from_millis(20));
    }
    drop(hostile.control);
    let cause = hostile.target.join().unwrap_err().error.cause;
    assert!(
        matches!(
            cause,
            Cause::Transport(TransportError::TooSlow { .. })
                | Cause::Protocol(ProtocolError::Transport(TransportError::TooSlow { .. }))
        ),
        "{cause:?}"
    );
}

#[test]
fn announcements_get_pages_and_nothing_else() {
    let mut hostile = HostileSource::negotiated(MemoryMode::Precopy);
    let coming = |gpa, pages| {
        Message::Coming(vec![GpaRange { gpa: gpa * PAGE_BYTES, len_bytes: pages * PAGE_BYTES }])
    };
    // The same ranges twice, overlapping, and far more often than there is memory.
    for (gpa, pages) in [(0, 512), (0, 512), (256, 512)].into_iter().chain([(64, 64); 100]) {
        hostile.control.ask(&coming(gpa, pages), LIMITS.answer).unwrap();
    }
    let began = std::time::Instant::now();
    while hostile.to.populated_bytes(0).unwrap() < 512 * PAGE_BYTES {
        assert!(began.elapsed() < LIMITS.answer, "no pages were got");
        std::thread::yield_now();
    }
    drop(hostile.control);
    hostile.target.join().unwrap_err();
    let guest = Guest::new(&hostile.to, 1);
    assert_whole(&guest, &hostile.to);
}

#[test]
fn announcements_are_refused_where_pages_are_missing() {
    if !have_uffd() {
        return;
    }
    let mut hostile = HostileSource::negotiated(MemoryMode::Postcopy);
    let _extra = [hostile.extra(Role::Memory), hostile.extra(Role::Fault)];
    hostile.control.ask(&Message::Pending(vec![0, 1, 0, 1, 0, 0]), LIMITS.answer).unwrap();
    let range = GpaRange { gpa: 0, len_bytes: PAGE_BYTES };
    let cause = hostile.provoke(&Message::Coming(vec![range]).encode());
    assert!(matches!(cause, Cause::Protocol(ProtocolError::Unexpected { .. })), "{cause:?}");
}

#[test]
fn announcements_get_no_pages_where_pages_may_have_to_be_missing() {
    if !have_uffd() {
        return;
    }
    let mut hostile = HostileSource::negotiated(MemoryMode::Auto);
    let range = GpaRange { gpa: 0, len_bytes: 512 * PAGE_BYTES };
    hostile.control.ask(&Message::Coming(vec![range]), LIMITS.answer).unwrap();
    // All populating ends with the reception.
    drop(hostile.control);
    hostile.target.join().unwrap_err();
    assert_eq!(hostile.to.populated_bytes(0).unwrap(), 0);
}

#[test]
fn strangers_do_not_stand_for_a_source_that_is_silent() {
    let to = memory();
    let limits = crate::Limits { answer: std::time::Duration::from_secs(2), ..LIMITS };
    let target = Target::start(&loopback(), Builder::new(&to, &Guest::new(&to, 1)), limits);
    let hostile = HostileSource::negotiated_with(target, to, MemoryMode::Precopy);
    let address = hostile.target.address.clone();
    let over = std::sync::atomic::AtomicBool::new(false);
    let began = std::time::Instant::now();
    let long = std::time::Duration::from_secs(30);
    let cause = std::thread::scope(|scope| {
        scope.spawn(|| {
            let cancel = Cancel::new().unwrap();
            while !over.load(std::sync::atomic::Ordering::Relaxed) && began.elapsed() < long {
                // Refused when the reception is over.
                let _ = Connection::connect(&address, &cancel, LIMITS.connect, LIMITS.answer);
                std::thread::sleep(std::time::Duration::from_millis(20));
            }
        });
        let cause = hostile.target.join().unwrap_err().error.cause;
        over.store(true, std::sync::atomic::Ordering::Relaxed);
        cause
    });
    let told = error_text::chain(&cause);
    assert!(told.contains("memory or state"), "{told}");
    assert!(began.elapsed() < long, "strangers kept it waiting");
}

#[test]
fn a_client_with_the_wrong_token_is_refused_and_the_migration_continues() {
    let mut hostile = HostileSource::negotiated(MemoryMode::Precopy);
    let stranger = Channel::open_extra(
        &hostile.target.address,
        Role::Memory,
        Some(&[7; 16]),
        &hostile.cancel,
        &LIMITS,
    );
    assert!(stranger.is_err());
    let mut friend = hostile.extra(Role::Memory);
    let mut message = memory_of(&[(0, PAGE_BYTES)]);
    message.resize(message.len() + 4096, 9);
    friend.connection.send(&message).unwrap();
    friend.answer(LIMITS.answer).unwrap();
    drop(friend);
    hostile.control.ask(&Message::State(b"{}".to_vec()), LIMITS.answer).unwrap();
    hostile.control.ask(&Message::CompletePaused, LIMITS.answer).unwrap();
    hostile.control.ask(&Message::Confirm(vec![b'x'; 100]), LIMITS.answer).unwrap();
    hostile.target.join().unwrap();
    let word = hostile.to.word(0, 0, 0).load(std::sync::atomic::Ordering::Relaxed);
    assert_eq!(word, u64::from_le_bytes([9; 8]));
}

#[test]
fn a_second_source_hears_at_once_that_another_vm_arrives() {
    let hostile = HostileSource::negotiated(MemoryMode::Precopy);
    let address = &hostile.target.address;
    let connection =
        Connection::connect(address, &hostile.cancel, LIMITS.connect, LIMITS.answer).unwrap();
    let began = Instant::now();
    let told = Channel::new(connection)
        .ask(&Message::Start { version: VERSION, offer: true }, LIMITS.answer)
        .unwrap_err();
    assert!(matches!(&told, Cause::Refused(why) if why.contains("another VM")), "{told:?}");
    assert!(began.elapsed() < Duration::from_secs(8), "{:?}", began.elapsed());
    drop(hostile.control);
    hostile.target.join().unwrap_err();
}

/// A postcopy up to the state, which touches page 0. The source has that page and never sends it.
fn touches_what_never_comes(stall: Duration) -> (HostileSource, [Channel; 2]) {
    let to = memory();
    let builder = Builder::new(&to, &Guest::new(&to, 1)).touch(vec![(0, 0)]);
    let limits = Limits { stall, ..LIMITS };
    let target = Target::start(&loopback(), builder, limits);
    let mut hostile = HostileSource::negotiated_with(target, to, MemoryMode::Postcopy);
    let mut links = [hostile.extra(Role::Memory), hostile.extra(Role::Fault)];
    hostile.control.ask(&Message::Pending(vec![0, 1, 0, 1, 0, 0]), LIMITS.answer).unwrap();
    hostile.control.tell(&Message::State(b"{}".to_vec())).unwrap();
    let request = links[1].timed(Message::read).unwrap();
    assert!(matches!(request, Message::PageFault(_)), "{request:?}");
    (hostile, links)
}

#[test]
fn a_cancel_reaches_a_destination_that_waits_for_a_page_before_the_guest_runs() {
    if !have_uffd() {
        return;
    }
    let (hostile, _links) = touches_what_never_comes(Duration::from_mins(10));
    hostile.target.cancel.cancel();
    wait_until("the end", || hostile.target.is_over());
    let failure = *hostile.target.join().unwrap_err();
    assert!(matches!(failure.error.cause, Cause::Cancelled), "{:?}", failure.error);
    assert_eq!(failure.error.phase, Phase::Prepare);
}

#[test]
fn a_page_that_never_comes_ends_the_wait_for_it_before_the_guest_runs() {
    if !have_uffd() {
        return;
    }
    let (mut hostile, _links) = touches_what_never_comes(Duration::from_millis(300));
    let told = hostile.control.answer(LIMITS.answer).unwrap_err();
    assert!(matches!(&told, Cause::Refused(why) if why.contains("requested page")), "{told:?}");
    drop(hostile.control);
    let failure = *hostile.target.join().unwrap_err();
    assert_eq!(failure.error.phase, Phase::Prepare);
}

#[test]
fn an_answer_that_trickles_is_a_loss_while_pages_arrive() {
    if !have_uffd() {
        return;
    }
    let (to, steering) = (memory(), crate::Steering::new());
    let builder = Builder::new(&to, &Guest::new(&to, 1));
    let limits = Limits { stall: Duration::from_secs(3), ..LIMITS };
    let target = Target::steered(&loopback(), builder, limits, steering.clone());
    let mut hostile = HostileSource::negotiated_with(target, to, MemoryMode::Postcopy);
    let _links = [hostile.extra(Role::Memory), hostile.extra(Role::Fault)];
    hostile.control.ask(&Message::Pending(vec![0, 1, 0, 1, 0, 0]), LIMITS.answer).unwrap();
    hostile.control.ask(&Message::State(b"{}".to_vec()), LIMITS.answer).unwrap();
    hostile.control.ask(&Message::CompletePaused, LIMITS.answer).unwrap();
    hostile.control.ask(&Message::Confirm(Vec::new()), LIMITS.answer).unwrap();
    let connection = &hostile.control.connection;
    // The answer to any message.
    connection.send(&Header::new(1, 1 << 20).encode()).unwrap();
    let progress = Arc::clone(&hostile.target.progress);
    let faults = hostile.target.join().unwrap().faults.unwrap();
    let waiting = std::thread::spawn(move || faults.wait().map(drop).map_err(drop));
    wait_until("the loss", || {
        let _ = connection.send(b" ");
        progress.snapshot().recovery.losses == 1
    });
    let reason = progress.snapshot().recovery.reason.unwrap();
    assert!(reason.contains("has to travel"), "{reason}");
    steering.abandon();
    waiting.join().unwrap().unwrap_err();
}

#[test]
fn a_bad_table_on_an_extra_connection_ends_the_migration() {
    let mut hostile = HostileSource::negotiated(MemoryMode::Precopy);
    let mut extra = hostile.extra(Role::Memory);
    extra.connection.send(&memory_of(&[(HUGE, PAGE_BYTES)])).unwrap();
    let refusal = extra.answer(LIMITS.answer);
    assert!(matches!(refusal, Err(Cause::Refused(_))), "{refusal:?}");
    drop(extra);
    let refusal = hostile.control.answer(LIMITS.answer);
    assert!(matches!(refusal, Err(Cause::Refused(_))), "{refusal:?}");
    drop(hostile.control);
    hostile.target.join().unwrap_err();
}

#[test]
fn nonsense_as_the_set_of_missing_pages_is_refused() {
    if !have_uffd() {
        return;
    }
    for bytes in [
        &[][..],
        &[0],
        &[7, 0, 0, 0],
        &[0, 0, 0, 0, 0],
        // Region 0 has 2048 pages: a run of 2049, one that starts beyond, one that wraps.
        &[0, 1, 0, 0x81, 0x10, 0, 0],
        &[0, 1, 0x81, 0x10, 1, 0, 0],
        &[0, 1, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1, 1, 0, 0],
        &[1, 0, 0],
    ] {
        let hostile = HostileSource::negotiated(MemoryMode::Postcopy);
        let _links = [hostile.extra(Role::Memory), hostile.extra(Role::Fault)];
        hostile.provoke(&Message::Pending(bytes.to_vec()).encode());
    }
    // Without the connections that postcopy needs, and state before the set of missing pages.
    HostileSource::negotiated(MemoryMode::Postcopy)
        .provoke(&Message::Pending(vec![0, 0, 0, 0]).encode());
    HostileSource::negotiated(MemoryMode::Postcopy)
        .provoke(&Message::State(b"{}".to_vec()).encode());
    // The same once pages were named as outdated, which the guest would see.
    let mut hostile = HostileSource::negotiated(MemoryMode::Auto);
    hostile.control.ask(&Message::Stale(vec![0, 1, 0, 1, 0, 0]), LIMITS.answer).unwrap();
    let cause = hostile.provoke(&Message::State(b"{}".to_vec()).encode());
    assert!(
        matches!(&cause, Cause::Protocol(ProtocolError::Unexpected { got: "State", .. })),
        "{cause:?}"
    );
}

#[test]
fn pages_that_are_not_missing_are_not_overwritten_in_postcopy() {
    if !have_uffd() {
        return;
    }
    let mut hostile = HostileSource::negotiated(MemoryMode::Postcopy);
    let links = [hostile.extra(Role::Memory), hostile.extra(Role::Fault)];
    // Only page 0 of region 0 is missing.
    hostile.control.ask(&Message::Pending(vec![0, 1, 0, 1, 0, 0]), LIMITS.answer).unwrap();
    let mut message = memory_of(&[(PAGE_BYTES, PAGE_BYTES)]);
    message.resize(message.len() + 4096, 9);
    links[0].connection.send(&message).unwrap();
    // The engine fails; whether the state is still accepted depends on which thread is first, but the
    // handover never is.
    let _ = hostile.control.tell(&Message::State(b"{}".to_vec()));
    links[0].connection.wait_for_data(Some(LIMITS.answer)).unwrap();
    let _ = hostile.control.tell(&Message::Complete);
    let _ = hostile.control.answer(LIMITS.answer);
    assert!(hostile.control.answer(LIMITS.answer).is_err());
    drop(hostile.control);
    let error = hostile.target.join().unwrap_err().error;
    assert!(matches!(error.cause, Cause::Protocol(ProtocolError::Malformed { .. })), "{error:?}");
    assert_eq!(hostile.to.populated_bytes(0).unwrap(), 0);
}
