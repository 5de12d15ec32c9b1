// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Migrations over TLS: what works without it works with it, and unknown peers are refused.

use std::cell::RefCell;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{
    Builder, FakeVm, Guest, LIMITS, Target, assert_whole, loopback, memory, options, send,
};
use crate::channel::Channel;
use crate::destination::LateReconnects;
use crate::protocol::message::{Message, Recover};
use crate::source::SendFailure;
use crate::testing::{FakeMemory, Inject};
use crate::transport::tls::tests::certificates;
use crate::transport::{ClientTls, Connection, ServerTls, TransportError};
use crate::{Address, Cancel, MemoryMode};

/// Certificates of the source and the destination.
type Certificates = (ClientTls, ServerTls);

thread_local! {
    static CERTIFICATES: RefCell<Option<Certificates>> = const { RefCell::new(None) };
}

/// The certificates for both sides of migrations that this thread starts over a network.
pub(super) fn of_this_thread(at: &Address) -> Option<Certificates> {
    let all = CERTIFICATES.with_borrow(Clone::clone);
    all.filter(|_| matches!(at, Address::Tcp { .. }))
}

/// Runs a function whose migrations use TLS.
pub(super) fn secured<T>(run: impl FnOnce() -> T) -> T {
    let before = CERTIFICATES.replace(Some(certificates()));
    let done = run();
    CERTIFICATES.set(before);
    done
}

/// Runs tests of other files over TLS.
macro_rules! over_tls {
    ($($name:ident = $test:path,)*) => {
        $(#[test]
        fn $name() {
            secured(|| $test());
        })*
    };
}

over_tls! {
    precopy_over_four_connections = super::moves::precopy_over_four_connections,
    precopy_of_anonymous_memory = super::moves::precopy_of_anonymous_memory,
    postcopy_with_several_channels_of_each_kind = super::moves::postcopy_with_several_channels_of_each_kind,
    postcopy_of_anonymous_memory = super::moves::postcopy_of_anonymous_memory,
    a_limit_on_bytes_per_second_holds_in_precopy = super::moves::a_limit_on_bytes_per_second_holds_in_precopy,
    restoring_state_may_touch_memory_that_has_not_arrived = super::moves::restoring_state_may_touch_memory_that_has_not_arrived,
    anonymous_memory_is_discarded_where_it_is_stale = super::auto::anonymous_memory_is_discarded_where_it_is_stale,
    the_clock_and_the_operator_end_a_round_in_its_middle = super::auto::the_clock_and_the_operator_end_a_round_in_its_middle,
    frames_arrive_page_by_page_as_they_were = super::compressed::frames_arrive_page_by_page_as_they_were,
    memory_travels_while_the_machine_is_built_and_the_guest_runs_until_it_is = super::early::memory_travels_while_the_machine_is_built_and_the_guest_runs_until_it_is,
    a_machine_that_cannot_be_built_ends_precopy_with_the_reason = super::early::a_machine_that_cannot_be_built_ends_precopy_with_the_reason,
    a_guest_is_whole_that_brings_its_own_pages = super::own::a_guest_is_whole_that_brings_its_own_pages,
    postcopy_onto_large_pages_puts_them_together = super::pieces::postcopy_onto_large_pages_puts_them_together,
    a_cut_of_any_connection_heals_without_help = super::recovery::a_cut_of_any_connection_heals_without_help,
    a_stall_of_any_connection_is_found_and_heals = super::recovery::a_stall_of_any_connection_is_found_and_heals,
    requests_that_share_the_bulk_connection_heal_too = super::recovery::requests_that_share_the_bulk_connection_heal_too,
    many_connections_over_a_long_link_are_made_at_once = super::recovery::many_connections_over_a_long_link_are_made_at_once,
    the_source_is_done_when_the_page_server_serves = super::handed_on::the_source_is_done_when_the_page_server_serves,
    what_a_page_server_loses_heals = super::handed_on::what_a_page_server_loses_heals,
    a_source_whose_page_server_vanishes_serves_by_itself = super::handed_on::a_source_whose_page_server_vanishes_serves_by_itself,
    a_page_server_that_ends_half_way_leaves_the_source_serving = super::handed_on::a_page_server_that_ends_half_way_leaves_the_source_serving,
}

/// A source that is about to send, and a destination that waits for one.
struct Sides {
    from: Arc<FakeMemory>,
    guest: Arc<Guest>,
    to: Arc<FakeMemory>,
    target: Target,
}

impl Sides {
    /// Sides with certificates at the destination, or without.
    fn new(tls: Option<ServerTls>) -> Self {
        let (from, to) = (memory(), memory());
        let guest = Guest::new(&from, 5);
        guest.fill(&from, 30);
        let builder = Builder::new(&to, &guest);
        let target = match tls {
            Some(tls) => {
                let before = CERTIFICATES.replace(Some((certificates().0, tls)));
                let target = Target::start(&loopback(), builder, LIMITS);
                CERTIFICATES.set(before);
                target
            }
            None => Target::start(&loopback(), builder, LIMITS),
        };
        Self { from, guest, to, target }
    }

    /// Runs a source that fails; returns the reason. Its guest continues.
    fn fails(&self, tls: Option<ClientTls>) -> String {
        let options = crate::SendOptions { tls, ..options(&self.target.address) };
        let began = Instant::now();
        let failure = send(FakeVm::new(&self.from, &self.guest).running(), &options).unwrap_err();
        assert!(began.elapsed() < LIMITS.answer / 2, "it took {:?}", began.elapsed());
        let SendFailure::Resumed { mut vm, error } = *failure else { panic!() };
        assert!(vm.runs());
        vm.stop();
        assert_whole(&self.guest, &self.from);
        error_text::chain(&error)
    }

    /// Runs a source with a valid certificate, whose guest arrives.
    fn succeeds(self, tls: Option<ClientTls>) {
        let options = crate::SendOptions { tls, ..options(&self.target.address) };
        send(FakeVm::new(&self.from, &self.guest).running(), &options).unwrap();
        drop(self.target.join().unwrap());
        assert_whole(&self.guest, &self.to);
    }
}

#[test]
fn a_side_that_alone_has_certificates_fails_at_once_and_says_why() {
    let (source, destination) = certificates();
    let sides = Sides::new(Some(destination));
    let told = sides.fails(None);
    assert!(told.contains("give tls_dir to send-migration as well"), "{told}");
    sides.succeeds(Some(source.clone()));
    let sides = Sides::new(None);
    let told = sides.fails(Some(source));
    assert!(told.contains("the peer does not use TLS"), "{told}");
    sides.succeeds(None);
}

#[test]
fn who_is_not_known_ends_no_wait_for_the_source() {
    let (source, destination) = certificates();
    let sides = Sides::new(Some(destination));
    let (other, _) = certificates();
    let told = sides.fails(Some(other));
    assert!(told.contains("certificate"), "{told}");
    let Address::Tcp { host, port } = sides.target.address.clone() else { panic!() };
    let connect = || TcpStream::connect((host.as_str(), port)).unwrap();
    // More than are examined together, with all kinds of first bytes.
    let mut strangers: Vec<_> = (0..400).map(|_| connect()).collect();
    for noise in [
        &b"GET / HTTP/1.1\r\n\r\n"[..],
        &[22],
        &[22, 3, 1, 0x02, 0, 1, 0, 1, 0xfc],
        &[22, 3, 1, 0xff, 0xff, 1],
        &[22, 3, 1, 0, 4, 1, 0xff, 0xff, 0xff],
        &[21, 3, 3, 0, 2, 2, 40],
        &[23, 3, 3, 0, 5, 1, 2, 3, 4, 5],
        &[0xff; 64],
    ] {
        let mut stranger = connect();
        stranger.write_all(noise).unwrap();
        strangers.push(stranger);
    }
    // One that stopped sending in the middle of the handshake.
    let mut hello = connect();
    hello.write_all(&client_hello()).unwrap();
    assert!(hello.read(&mut [0; 1]).unwrap() > 0, "the destination answers");
    sides.succeeds(Some(source));
}

/// The first bytes of a source.
fn client_hello() -> Vec<u8> {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let to = format!("tcp:{}", listener.local_addr().unwrap()).parse().unwrap();
    let never = Cancel::new().unwrap();
    let (source, _) = certificates();
    let heard = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut hello = vec![0; 4096];
        let len = stream.read(&mut hello).unwrap();
        hello.truncate(len);
        hello
    });
    let limit = Duration::from_secs(20);
    Connection::connect_secured(&to, Some(&source), &never, limit, limit).unwrap_err();
    heard.join().unwrap()
}

#[test]
fn tls_needs_a_network_and_hands_no_memory_over() {
    let (source, _) = certificates();
    let unix = "unix:/nowhere".parse().unwrap();
    for (local, why) in [(false, "tls_dir needs a tcp: address"), (true, "leave tls_dir out")] {
        let options = crate::SendOptions { tls: Some(source.clone()), local, ..options(&unix) };
        let error = options.check().unwrap_err().to_string();
        assert!(error.contains(why), "{error}");
    }
}

#[test]
fn who_comes_late_is_answered_over_tls_and_in_no_other_way() {
    let (source, destination) = certificates();
    let limit = Duration::from_secs(5);
    let never = Cancel::new().unwrap();
    let late_reconnects = LateReconnects::default();
    let ask = |address: &Address, id, tls: Option<&ClientTls>| {
        let connection = Connection::connect_secured(address, tls, &never, limit, limit)?;
        let recover =
            Message::Recover(Recover { id, attempt: 7, bulk: 1, urgent: 1, alive: false });
        Channel::new(connection).ask(&recover, limit).map(|answer| answer.payload)
    };
    let (address, id) = crate::destination::late_reconnects_for_tests(
        &loopback(),
        Some(destination),
        &late_reconnects,
    );
    assert_eq!(ask(&address, id, Some(&source)).unwrap(), b"");
    ask(&address, id, None).unwrap_err();
    // The next migration at that port cannot omit TLS, at any address, and its attempt changes nothing.
    let bind = |at: &Address, tls| {
        crate::destination::Listener::bind_over(at, tls, &late_reconnects, &never)
    };
    let Address::Tcp { port, .. } = address else { panic!() };
    for at in [&address, &Address::Tcp { host: "0.0.0.0".into(), port }] {
        let refused = bind(at, None).unwrap_err();
        assert!(matches!(refused, TransportError::NeedsTls(_)), "{refused:?}");
        assert!(refused.to_string().contains("give tls_dir"), "{refused}");
        assert_eq!(ask(&address, id, Some(&source)).unwrap(), b"");
        ask(&address, id, None).unwrap_err();
    }
    // With the certificates of the next migration, also after that has ended.
    let (other_source, other) = certificates();
    let next = bind(&address, Some(other)).unwrap();
    assert!(next.is_authenticated());
    drop(next);
    assert_eq!(ask(&address, id, Some(&other_source)).unwrap(), b"");
    let refused = ask(&address, id, Some(&source)).unwrap_err();
    let crate::Cause::Transport(TransportError::Tls(_)) = refused else { panic!("{refused:?}") };
}

#[test]
fn a_machine_that_fails_at_the_destination_is_told_over_tls() {
    let (source, destination) = certificates();
    let (from, to) = (memory(), memory());
    let guest = Guest::new(&from, 5);
    guest.fill(&from, 30);
    let before = CERTIFICATES.replace(Some((source, destination)));
    for mode in [MemoryMode::Precopy, MemoryMode::Auto] {
        let builder = Builder::new(&to, &guest).inject(Inject::Apply);
        let target = Target::start(&loopback(), builder, LIMITS);
        let options = crate::SendOptions { memory_mode: mode, ..options(&target.address) };
        let failure = send(FakeVm::new(&from, &guest).running(), &options).unwrap_err();
        let told = error_text::chain(failure.error());
        assert!(told.contains("the peer refused"), "{told}");
        target.join().unwrap_err();
    }
    CERTIFICATES.set(before);
}
