// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Checks of a migration: what is found, peers that do not know them, and peers that leave, send rubbish or stall at each
//! step. The destination goes on waiting, and the real migration succeeds.

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::by_hand::accepted;
use super::recovery::wait_until;
use super::{
    Builder, FakeVm, Guest, LIMITS, Target, assert_whole, loopback, memory, options, send,
};
use crate::destination::CHECKS_MAX;
use crate::layout::PAGE_BYTES;
use crate::options::{Compression, Limits, SendOptions};
use crate::progress::Phase;
use crate::protocol::capabilities::{FEATURE_CHECK, Offer, features};
use crate::protocol::check::{
    CHECK_BYTES_MAX, CHECK_TRANSFER_BYTES_MAX, CheckFindings, CheckRequest,
};
use crate::protocol::formats::Formats;
use crate::protocol::message::{Answer, Message};
use crate::ram::GuestMemoryMap as _;
use crate::source::{CheckError, KnownBefore, check};
use crate::testing::{FakeBlobs, FakeMemory, Inject};
use crate::vm::{ArrivalCheck, AskedMigration, SourceVm as _};
use crate::{Address, Cancel, Cause, MemoryMode, MigrationCheck, Side};

/// Answers with these findings, perhaps when a gate is opened.
#[derive(Default)]
struct FakeCheck {
    findings: CheckFindings,
    gate: Option<Mutex<Receiver<()>>>,
    asked: Mutex<Vec<(Vec<u8>, AskedMigration)>>,
}

impl ArrivalCheck for FakeCheck {
    fn findings(&self, config_json: &[u8], asked: AskedMigration) -> CheckFindings {
        self.asked.lock().push((config_json.to_vec(), asked));
        if let Some(gate) = &self.gate {
            let _ = gate.lock().recv();
        }
        self.findings.clone()
    }
}

struct Pair {
    from: Arc<FakeMemory>,
    to: Arc<FakeMemory>,
    guest: Arc<Guest>,
    target: Target,
    check: Arc<FakeCheck>,
}

impl Pair {
    fn new(check: FakeCheck, limits: Limits) -> Self {
        let (from, to) = (memory(), memory());
        let guest = Guest::new(&from, 4);
        guest.fill(&from, 60);
        let check = Arc::new(check);
        let builder = Builder::new(&to, &guest).answering(check.clone());
        let target = Target::start(&loopback(), builder, limits);
        Self { from, to, guest, target, check }
    }

    fn usual() -> Self {
        Self::new(FakeCheck::default(), LIMITS)
    }

    fn vm(&self) -> FakeVm {
        FakeVm::new(&self.from, &self.guest)
    }

    fn options(&self) -> SendOptions {
        options(&self.target.address)
    }

    /// Nothing has been allocated, and the real migration succeeds.
    fn migrate(self) {
        assert_eq!(self.target.progress.phase(), Phase::Listen);
        for region in 0..2 {
            assert_eq!(self.to.populated_bytes(region).unwrap(), 0, "memory was written");
        }
        send(self.vm().running(), &options(&self.target.address)).unwrap();
        drop(self.target.join().unwrap());
        assert_whole(&self.guest, &self.to);
    }
}

fn known() -> KnownBefore {
    KnownBefore { problems: Vec::new(), may_postcopy: true }
}

fn ask(vm: &mut FakeVm, options: &SendOptions) -> Result<MigrationCheck, CheckError> {
    check(vm, known(), options, &Cancel::new().unwrap())
}

fn texts(check: &MigrationCheck) -> Vec<(Side, &str)> {
    check.problems.iter().map(|found| (found.side, found.text.as_str())).collect()
}

#[test]
fn a_migration_that_would_succeed_is_forecast_and_nothing_is_moved() {
    let pair = Pair::usual();
    let mut vm = pair.vm().running();
    let found = ask(&mut vm, &pair.options()).unwrap();
    assert!(found.possible && found.problems.is_empty() && found.warnings.is_empty(), "{found:?}");
    assert_eq!(found.destination, Some(crate::protocol::capabilities::software()));
    assert!(found.link_bytes_per_second.unwrap() > 1 << 20, "{found:?}");
    assert!(found.round_trip_us.unwrap() > 0);
    assert!(found.dirty_bytes_per_second.unwrap() > 0, "the guest writes: {found:?}");
    let populated: u64 = (0..2).map(|region| pair.from.populated_bytes(region).unwrap()).sum();
    assert!(found.memory_bytes > 0 && found.memory_bytes <= populated, "{found:?}");
    let (precopy, postcopy) = (found.precopy.unwrap(), found.postcopy.unwrap());
    assert!(precopy.duration_ms >= precopy.downtime_ms && postcopy.converges);
    let all_asked = std::mem::take(&mut *pair.check.asked.lock());
    let [(config, asked)] = &all_asked[..] else { panic!("{all_asked:?}") };
    assert!(serde_json::from_slice::<serde_json::Value>(config).is_ok());
    let expected =
        AskedMigration { mode: MemoryMode::Precopy, local: false, move_bytes: found.memory_bytes };
    assert_eq!(*asked, expected);
    assert!(!vm.calls().lock().iter().any(|call| ["pause", "release"].contains(call)));
    drop(vm);
    pair.migrate();
}

#[test]
fn all_problems_of_both_sides_are_told() {
    let findings = CheckFindings {
        problems: vec!["no disk".to_owned(), "no tap".to_owned()],
        warnings: vec!["small pages".to_owned()],
    };
    let pair = Pair::new(FakeCheck { findings, ..FakeCheck::default() }, LIMITS);
    let known = KnownBefore { problems: vec!["'gpu0' stays".to_owned()], may_postcopy: false };
    let found = check(&mut pair.vm(), known, &pair.options(), &Cancel::new().unwrap()).unwrap();
    assert!(!found.possible);
    let expected = [
        (Side::Source, "'gpu0' stays"),
        (Side::Destination, "no disk"),
        (Side::Destination, "no tap"),
    ];
    assert_eq!(texts(&found), expected);
    assert_eq!((found.warnings.len(), found.warnings[0].text.as_str()), (1, "small pages"));
    assert!(found.postcopy.is_none(), "it may not be moved so");
    pair.migrate();
}

#[test]
fn what_keeps_the_source_from_describing_its_machine_is_a_problem() {
    let pair = Pair::usual();
    let mut vm = pair.vm().inject(Inject::Config);
    let found = ask(&mut vm, &pair.options()).unwrap();
    assert_eq!(texts(&found), [(Side::Source, "injected failure in config")]);
    assert!(pair.check.asked.lock().is_empty() && found.link_bytes_per_second.is_none());
    let mut vm = pair.vm().inject(Inject::StartLog);
    let found = ask(&mut vm, &pair.options()).unwrap();
    assert!(!found.possible && found.dirty_bytes_per_second.is_none(), "{found:?}");
    let mut vm = pair.vm().formats(Formats { config: 1, state: 9 });
    let found = ask(&mut vm, &pair.options()).unwrap();
    assert!(texts(&found)[0].1.contains("a machine state of version 9"), "{found:?}");
    drop(vm);
    pair.migrate();
}

#[test]
fn what_nothing_logs_is_a_warning_and_costs_all_of_memory() {
    let pair = Pair::usual();
    let found = ask(&mut pair.vm().inject(Inject::Unlogged), &pair.options()).unwrap();
    assert!(found.possible && found.warnings[0].text.contains("nothing logs"), "{found:?}");
    pair.migrate();
}

#[test]
fn blobs_and_other_options_are_asked_about_as_a_migration_would() {
    let pair = Pair::usual();
    let mut sent = pair.options();
    sent.compression = Compression::Zstd;
    let mut vm = pair.vm().blobs(&FakeBlobs::new(&[1000]));
    assert!(ask(&mut vm, &sent).unwrap().possible);
    drop(vm);
    pair.migrate();
}

#[test]
fn a_destination_that_cannot_be_reached_is_a_problem() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("tcp:{}", listener.local_addr().unwrap());
    drop(listener);
    let from = memory();
    let guest = Guest::new(&from, 1);
    let mut vm = FakeVm::new(&from, &guest);
    let found = ask(&mut vm, &options(&address.parse().unwrap())).unwrap();
    assert!(!found.possible && found.destination.is_none() && found.precopy.is_none());
    assert!(texts(&found)[0].1.contains("is a VM waiting there"), "{found:?}");
    assert!(found.dirty_bytes_per_second.is_none(), "without a forecast there is no use in them");
}

#[test]
fn tls_on_one_side_only_is_a_problem() {
    let (from, to) = (memory(), memory());
    let guest = Guest::new(&from, 1);
    let mut target = None;
    super::tls::secured(|| {
        let builder = Builder::new(&to, &guest).answering(Arc::new(FakeCheck::default()));
        target = Some(Target::start(&loopback(), builder, LIMITS));
        let address = &target.as_ref().unwrap().address;
        let found = ask(&mut FakeVm::new(&from, &guest), &options(address)).unwrap();
        assert!(found.possible && found.link_bytes_per_second.is_some(), "{found:?}");
    });
    let target = target.unwrap();
    let found = ask(&mut FakeVm::new(&from, &guest), &options(&target.address)).unwrap();
    assert!(texts(&found)[0].1.contains("give tls_dir to send-migration"), "{found:?}");
    assert_eq!(target.progress.phase(), Phase::Listen);
    target.cancel.cancel();
    target.join().unwrap_err();
}

/// A peer that reads a message and answers it with these bytes, again and again, and then waits for the end.
struct Peer {
    address: Address,
    _end: Sender<()>,
}

impl Peer {
    fn new(answers: Vec<Vec<u8>>, closes: bool) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("tcp:{}", listener.local_addr().unwrap()).parse().unwrap();
        let (end, ended) = channel::<()>();
        std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            for answer in answers {
                let mut header = [0; 16];
                if stream.read_exact(&mut header).is_err() {
                    return;
                }
                let len = u64::from_le_bytes(header[8..].try_into().unwrap());
                std::io::copy(&mut (&mut stream).take(len), &mut std::io::sink()).unwrap();
                let _ = stream.write_all(&answer);
            }
            if !closes {
                let _ = ended.recv();
            }
        });
        Self { address, _end: end }
    }

    fn check(&self, answer: Duration) -> Result<MigrationCheck, CheckError> {
        let from = memory();
        let guest = Guest::new(&from, 1);
        let limits = Limits { answer, ..LIMITS };
        let options = SendOptions { limits, ..options(&self.address) };
        ask(&mut FakeVm::new(&from, &guest), &options)
    }
}

fn refusal(reason: &str) -> Vec<u8> {
    Answer::Error { reason: reason.to_owned() }.encode()
}

fn yes(payload: Vec<u8>) -> Vec<u8> {
    Answer::Ok { offer_taken: true, payload }.encode()
}

#[test]
fn a_peer_that_knows_no_checks_is_named_with_what_to_do() {
    // As earlier versions say it, whose words do not change any more; and a peer of version 0, without a reason.
    let old = "a migration is awaited here, and this message does not begin one";
    let mut without = accepted(features());
    without.features.remove(FEATURE_CHECK);
    for (answer, who) in [
        (refusal(old), "an earlier version, or another program"),
        (refusal(""), "an earlier version, or another program"),
        (yes(without.to_json()), "godwit 9.8.7"),
    ] {
        let error = Peer::new(vec![answer], false).check(LIMITS.answer).unwrap_err();
        let text = error_text::chain(&error);
        let names_this = text.contains(&crate::protocol::capabilities::software());
        assert!(text.contains(who) && names_this && text.contains("update it"), "{text}");
    }
    // What other destinations refuse is told as they say it.
    let error = Peer::new(vec![refusal("it is full")], false).check(LIMITS.answer).unwrap_err();
    assert!(matches!(&error.cause, Cause::Refused(why) if why == "it is full"), "{error:?}");
}

#[test]
fn a_destination_without_an_answer_says_so_and_waits_on() {
    let (from, to) = (memory(), memory());
    let guest = Guest::new(&from, 1);
    let target = Target::start(&loopback(), Builder::new(&to, &guest), LIMITS);
    let error = ask(&mut FakeVm::new(&from, &guest), &options(&target.address)).unwrap_err();
    assert!(matches!(&error.cause, Cause::Refused(why) if why.contains("answers no checks")));
    assert_eq!(target.progress.phase(), Phase::Listen);
    target.cancel.cancel();
    target.join().unwrap_err();
}

/// The answers of a destination up to each step.
fn answers() -> Vec<Vec<u8>> {
    let findings = CheckFindings::default().to_json();
    vec![yes(accepted(features()).to_json()), yes(Vec::new()), yes(findings), yes(Vec::new())]
}

#[test]
fn a_destination_that_leaves_stalls_or_sends_rubbish_ends_the_check_and_nothing_else() {
    for steps in 0..=answers().len() {
        let until = answers()[..steps].to_vec();
        let rubbish = [&until[..], &[vec![0xff; 64]]].concat();
        for (answers, closes) in [(until.clone(), true), (rubbish, false), (until, false)] {
            let began = Instant::now();
            let found = Peer::new(answers, closes).check(Duration::from_millis(700));
            assert!(found.is_err(), "after {steps} answers: {found:?}");
            assert!(began.elapsed() < LIMITS.answer, "after {steps} answers");
        }
    }
    // What comes is checked as well.
    for (at, wrong) in [(0, yes(b"{}".to_vec())), (2, yes(b"[]".to_vec()))] {
        let mut answers = answers();
        answers[at] = wrong;
        Peer::new(answers, false).check(LIMITS.answer).unwrap_err();
    }
}

#[test]
fn a_destination_to_which_another_vm_is_on_its_way_is_a_problem() {
    let pair = Pair::usual();
    let mut other = connect(&pair.target.address);
    let start = Message::Start { version: 0, offer: true }.encode();
    say(&mut other, &[start, Message::Capabilities(offer(&pair).to_json()).encode()]);
    other.write_all(&Message::Config(pair.vm().config_json().unwrap()).encode()).unwrap();
    let found = ask(&mut pair.vm(), &pair.options()).unwrap();
    assert!(texts(&found)[0].1.contains("another VM is on its way to here"), "{found:?}");
    assert_eq!(found.problems.len(), 1, "{found:?}");
    drop(other);
    pair.target.join().unwrap_err();
}

#[test]
fn a_cancel_ends_a_check_that_waits() {
    let from = memory();
    let guest = Guest::new(&from, 1);
    let peer = Peer::new(Vec::new(), false);
    let cancel = Cancel::new().unwrap();
    let mut vm = FakeVm::new(&from, &guest);
    let result = std::thread::scope(|scope| {
        let checking = scope.spawn(|| check(&mut vm, known(), &options(&peer.address), &cancel));
        cancel.cancel();
        checking.join().unwrap()
    });
    assert!(matches!(result, Err(CheckError { cause: Cause::Cancelled, .. })), "{result:?}");
}

fn connect(address: &Address) -> TcpStream {
    let Address::Tcp { host, port } = address else { panic!("{address}") };
    TcpStream::connect((host.as_str(), *port)).unwrap()
}

fn offer(pair: &Pair) -> Offer {
    Offer {
        software: "a source".to_owned(),
        features: features(),
        memory_mode: MemoryMode::Precopy,
        bulk_connections: 0,
        urgent_connections: 0,
        many_urgent_connections: None,
        vcpus: None,
        local: false,
        recover_timeout_ms: None,
        regions: pair.from.layout().regions().to_vec(),
        formats: Formats::default(),
    }
}

/// The messages of a source up to each step.
fn messages(pair: &Pair) -> Vec<Vec<u8>> {
    let offer = offer(pair);
    let request = CheckRequest { offer, move_bytes: 7 * PAGE_BYTES };
    [
        Message::Check,
        Message::Capabilities(request.to_json()),
        Message::Config(b"{}".to_vec()),
        Message::CheckBytes(vec![3; 100]),
    ]
    .map(|message| message.encode())
    .into()
}

/// Sends messages, and reads the answer to each.
fn say(stream: &mut TcpStream, messages: &[Vec<u8>]) {
    for message in messages {
        stream.write_all(message).unwrap();
        assert_eq!(answer_code(stream), 1, "it says yes");
    }
}

/// A source that has sent so many messages, once the destination answers it.
fn said(pair: &Pair, count: usize) -> TcpStream {
    let deadline = Instant::now() + Duration::from_mins(1);
    loop {
        let mut stream = connect(&pair.target.address);
        stream.write_all(&Message::Check.encode()).unwrap();
        if answer_code(&mut stream) == 1 {
            say(&mut stream, &messages(pair)[1..count]);
            return stream;
        }
        assert!(Instant::now() < deadline, "the check before does not end");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Reads an answer, and returns its code.
fn answer_code(stream: &mut TcpStream) -> u8 {
    let mut header = [0; 16];
    stream.read_exact(&mut header).unwrap();
    let len = u64::from_le_bytes(header[8..].try_into().unwrap());
    std::io::copy(&mut stream.take(len), &mut std::io::sink()).unwrap();
    header[0]
}

/// Waits until the destination answers checks again.
fn answers_again(pair: &Pair) {
    wait_until("the end of the check before", || match ask(&mut pair.vm(), &pair.options()) {
        Ok(found) => found.possible,
        Err(CheckError { cause: Cause::Refused(why), .. }) => {
            assert!(why.contains("other checks"), "{why}");
            false
        }
        Err(error) => panic!("{error:?}"),
    });
}

#[test]
fn a_source_that_leaves_or_sends_rubbish_at_a_step_leaves_the_destination_waiting() {
    let pair = Pair::usual();
    let steps = messages(&pair).len();
    for count in 1..=steps {
        for rubbish in [None, Some(vec![0xff; 64]), Some(Message::Complete.encode())] {
            let mut stream = said(&pair, count);
            if let Some(rubbish) = &rubbish {
                stream.write_all(rubbish).unwrap();
                let mut told = Vec::new();
                stream.read_to_end(&mut told).unwrap();
                let answer = Answer::read(&mut &told[..]);
                assert!(matches!(answer, Ok(Answer::Error { .. })), "{count}: {answer:?}");
            }
        }
        // A part of a message.
        let mut stream = said(&pair, count);
        stream.write_all(&messages(&pair)[steps - 1][..10]).unwrap();
        assert_eq!(pair.target.progress.phase(), Phase::Listen);
    }
    answers_again(&pair);
    pair.migrate();
}

#[test]
fn a_source_that_stalls_delays_neither_a_migration_nor_for_long_another_check() {
    const SHORT: Duration = Duration::from_millis(300);
    for count in 1..=messages(&Pair::usual()).len() {
        let pair = Pair::new(FakeCheck::default(), Limits { answer: SHORT, ..LIMITS });
        let stalled: Vec<_> = (0..CHECKS_MAX).map(|_| said(&pair, count)).collect();
        answers_again(&pair);
        drop(stalled);
        let pair = Pair::usual();
        let stalled: Vec<_> = (0..CHECKS_MAX).map(|_| said(&pair, count)).collect();
        let error = ask(&mut pair.vm(), &pair.options()).unwrap_err();
        let text = error_text::chain(&error);
        assert!(text.contains("other checks are being answered"), "{text}");
        let began = Instant::now();
        pair.migrate();
        assert!(began.elapsed() < LIMITS.answer);
        for mut stalled in stalled {
            let mut told = Vec::new();
            stalled.read_to_end(&mut told).unwrap();
            let told = String::from_utf8_lossy(&told);
            assert!(told.contains("does not wait for a migration any more"), "{told}");
        }
    }
}

#[test]
fn storage_that_does_not_respond_holds_up_no_migration() {
    let (open, gate) = channel();
    let check = FakeCheck { gate: Some(Mutex::new(gate)), ..FakeCheck::default() };
    let pair = Pair::new(check, LIMITS);
    let mut asking = connect(&pair.target.address);
    for message in &messages(&pair)[..3] {
        asking.write_all(message).unwrap();
    }
    wait_until("the question", || !pair.check.asked.lock().is_empty());
    pair.migrate();
    drop(open);
}

#[test]
fn a_source_that_never_stops_measuring_is_refused() {
    let pair = Pair::usual();
    let mut stream = said(&pair, 3);
    let most = usize::try_from(CHECK_BYTES_MAX).unwrap();
    let full = vec![Message::CheckBytes(vec![1; most]).encode()];
    for _ in 0..CHECK_TRANSFER_BYTES_MAX / CHECK_BYTES_MAX {
        say(&mut stream, &full);
    }
    stream.write_all(&full[0]).unwrap();
    let mut told = Vec::new();
    stream.read_to_end(&mut told).unwrap();
    let answer = Answer::read(&mut &told[..]);
    assert!(matches!(&answer, Ok(Answer::Error { reason }) if reason.contains("does not end")));
    answers_again(&pair);
    pair.migrate();
}
