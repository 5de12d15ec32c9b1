// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! State of devices that is sent as bytes: it arrives as it was, on any number of connections, and whatever goes wrong
//! with it the guest continues at the source.

use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use super::early::wait_for;
use super::hostile::agree;
use super::{
    Builder, FakeVm, Guest, LIMITS, SendResult, Target, assert_in_order, assert_whole, loopback,
    memory, migrate, options, send,
};
use crate::channel::Channel;
use crate::error::Cause;
use crate::options::MemoryMode;
use crate::progress::Phase;
use crate::protocol::blobs::{
    BLOB_BYTES_MAX, BLOBS_MAX, BlobChunk, BlobInfo, BlobList, WINDOW_BYTES_MAX,
};
use crate::protocol::message::{Message, Role};
use crate::source::SendFailure;
use crate::testing::{BlobFault, FakeBlobs, FakeMemory, Gated, Inject};
use crate::transport::Connection;
use crate::{Address, Cancel, Limits, Progress, Side, TimeoutStrategy};

/// Two that take several chunks, one that is empty, and one that ends with a chunk.
const LENS: [usize; 4] = [5_000_001, 7, 0, 2 << 20];

struct Run {
    from: Arc<FakeMemory>,
    guest: Arc<Guest>,
    sent: SendResult,
    received: super::ReceiveResult,
}

fn run(blobs: &FakeBlobs, connections: u16) -> Run {
    let (from, to) = (memory(), memory());
    let guest = Guest::new(&from, 71);
    guest.fill(&from, 20);
    let target = Target::start(&loopback(), Builder::new(&to, &guest).blobs(blobs), LIMITS);
    let mut options = options(&target.address);
    options.connections = connections;
    let vm = FakeVm::new(&from, &guest).blobs(blobs).running();
    let sent = send(vm, &options);
    Run { from, guest, sent, received: target.join() }
}

#[test]
fn the_state_of_devices_arrives_on_all_connections() {
    for connections in [1, 2, 5] {
        let blobs = FakeBlobs::new(&LENS);
        let run = run(&blobs, connections);
        run.sent.unwrap();
        let mut vm = run.received.unwrap().vm;
        vm.stop();
        assert!(blobs.have_arrived(true), "{connections}");
        assert_whole(&run.guest, vm.memory());
    }
}

#[test]
fn the_destination_prepares_before_the_guest_stops_and_all_comes_before_the_state() {
    for local in [false, true] {
        let (from, to) = (memory(), memory());
        let guest = Guest::new(&from, 72);
        let blobs = FakeBlobs::new(&LENS);
        let vm = FakeVm::new(&from, &guest).blobs(&blobs).running();
        let calls = vm.calls();
        let dir = tempfile::tempdir().unwrap();
        let at = if local { Address::Unix(dir.path().join("mig")) } else { loopback() };
        let builder = Builder::new(&to, &guest).blobs(&blobs).note_in(&calls);
        let target = Target::start(&at, builder, LIMITS);
        let mut options = options(&target.address);
        options.local = local;
        send(vm, &options).unwrap();
        target.join().unwrap().vm.stop();
        assert!(blobs.have_arrived(true));
        let order = ["ready", "await blobs", "pause", "read blobs", "state", "apply"];
        assert_in_order(&calls, &order);
    }
}

#[test]
fn whatever_goes_wrong_with_it_the_guest_continues_at_the_source() {
    let cases = [
        (BlobFault::Read(0), "the device has failed", true),
        (BlobFault::Read(3 << 20), "the device has failed", true),
        (BlobFault::Write(0), "the device refuses its state", true),
        (BlobFault::Write(3 << 20), "the device refuses its state", true),
        (BlobFault::Missing, "there is no 'gpu0' here", false),
        (BlobFault::Longer(1), "'gpu0' has 5000001 bytes or more, and 5000000 at most", true),
        (BlobFault::Endless, "'gpu0' has 5242880 bytes or more, and 5000001 at most", true),
    ];
    for (fault, expected, is_stopped) in cases {
        for connections in [1, 3] {
            let blobs = FakeBlobs::new(&LENS[..2]).fault(fault);
            let run = run(&blobs, connections);
            let failure = *run.sent.unwrap_err();
            let SendFailure::Resumed { mut vm, error } = failure else { panic!("{failure:?}") };
            let told = error_text::chain(&error);
            assert!(told.contains(expected), "{fault:?} on {connections}: {told}");
            assert!(vm.runs());
            vm.stop();
            assert_whole(&run.guest, &run.from);
            assert_eq!(vm.calls().lock().contains(&"pause"), is_stopped, "{fault:?}");
            assert_eq!(blobs.open_sources(), 0, "all devices are done");
            let refused = error_text::chain(&run.received.unwrap_err().error);
            assert!(refused.contains(expected), "{fault:?} on {connections}: {refused}");
        }
    }
}

#[test]
fn a_second_attempt_finds_everything_as_it_was() {
    let blobs = FakeBlobs::new(&LENS);
    let (from, to) = (memory(), memory());
    let guest = Guest::new(&from, 73);
    let builder = Builder::new(&to, &guest).blobs(&blobs).inject(Inject::Apply);
    let target = Target::start(&loopback(), builder, LIMITS);
    let vm = FakeVm::new(&from, &guest).blobs(&blobs).running();
    let failure = *send(vm, &options(&target.address)).unwrap_err();
    let SendFailure::Resumed { vm, .. } = failure else { panic!("{failure:?}") };
    target.join().unwrap_err();
    let to = memory();
    let target = Target::start(&loopback(), Builder::new(&to, &guest).blobs(&blobs), LIMITS);
    send(vm, &options(&target.address)).unwrap();
    target.join().unwrap().vm.stop();
    assert!(blobs.have_arrived(true));
}

/// The device at the destination takes nothing for a while: no more than the window is read meanwhile.
#[test]
fn a_slow_destination_holds_up_the_reading() {
    for connections in [1, 4] {
        let len = usize::try_from(2 * WINDOW_BYTES_MAX).unwrap();
        let (open, gate) = channel();
        let blobs = FakeBlobs::new(&[len]).gate(Gated::Writes, gate);
        let (from, to) = (memory(), memory());
        let guest = Guest::new(&from, 74);
        let target = Target::start(&loopback(), Builder::new(&to, &guest).blobs(&blobs), LIMITS);
        let mut options = options(&target.address);
        options.connections = connections;
        // Much more is to be sent than the downtime allows.
        options.timeout_strategy = TimeoutStrategy::Ignore;
        let vm = FakeVm::new(&from, &guest).blobs(&blobs);
        let sender = std::thread::spawn(move || send(vm, &options));
        let held = WINDOW_BYTES_MAX + (1 << 20);
        wait_for("the window", || blobs.read_bytes() == held);
        assert_eq!(blobs.arrived_bytes(), 0);
        open.send(()).unwrap();
        wait_for("another chunk", || blobs.read_bytes() > held);
        assert!(blobs.read_bytes() <= held + (1 << 20));
        drop(open);
        sender.join().unwrap().unwrap();
        target.join().unwrap();
        assert!(blobs.have_arrived(true));
    }
}

/// A device at the destination takes nothing for good: the guest goes on at the source, although the destination answers.
#[test]
fn a_device_that_does_not_go_on_ends_the_migration() {
    let (open, gate) = channel();
    let blobs = FakeBlobs::new(&[1000]).gate(Gated::Writes, gate);
    let (from, to) = (memory(), memory());
    let guest = Guest::new(&from, 79);
    let target = Target::start(&loopback(), Builder::new(&to, &guest).blobs(&blobs), LIMITS);
    let mut options = options(&target.address);
    options.limits.prepare = Duration::from_secs(3);
    let vm = FakeVm::new(&from, &guest).blobs(&blobs).running();
    let failure = *send(vm, &options).unwrap_err();
    let SendFailure::Resumed { mut vm, error } = failure else { panic!("{failure:?}") };
    assert!(matches!(error.cause, Cause::DeviceStands { waited_s: 3 }), "{error:?}");
    assert!(vm.runs());
    vm.stop();
    drop(open);
    target.join().unwrap_err();
}

/// Each device has its own window: one that is read or written slowly holds up none of the others.
#[test]
fn a_slow_device_holds_up_no_other() {
    let len = usize::try_from(WINDOW_BYTES_MAX).unwrap() + (4 << 20);
    for (gated, connections) in [
        (Gated::WritesOf(0), 1),
        (Gated::WritesOf(0), 3),
        (Gated::ReadsOf(0), 1),
        (Gated::WritesOf(1), 2),
    ] {
        let (open, gate) = channel();
        let blobs = FakeBlobs::new(&[len, len]).gate(gated, gate);
        let (from, to) = (memory(), memory());
        let guest = Guest::new(&from, 78);
        let target = Target::start(&loopback(), Builder::new(&to, &guest).blobs(&blobs), LIMITS);
        let mut options = options(&target.address);
        options.connections = connections;
        options.timeout_strategy = TimeoutStrategy::Ignore;
        let vm = FakeVm::new(&from, &guest).blobs(&blobs);
        let sender = std::thread::spawn(move || send(vm, &options));
        let (slow, other) = if gated == Gated::WritesOf(1) { (1, 0) } else { (0, 1) };
        wait_for("the other device", || blobs.arrived_of(other) == len);
        assert_eq!(blobs.arrived_of(slow), 0, "{gated:?} on {connections}");
        drop(open);
        sender.join().unwrap().unwrap();
        target.join().unwrap();
        assert!(blobs.have_arrived(true), "{gated:?} on {connections}");
    }
}

/// Either side says that it is alive while a device keeps it waiting, longer than an answer may take.
#[test]
fn a_device_may_take_longer_than_an_answer() {
    let limits = Limits { answer: Duration::from_secs(4), ..LIMITS };
    let case = |gated: Gated, connections: u16| {
        let (open, gate) = channel();
        let blobs = FakeBlobs::new(&LENS).gate(gated, gate);
        let (from, to) = (memory(), memory());
        let guest = Guest::new(&from, 80);
        let vm = FakeVm::new(&from, &guest).blobs(&blobs);
        let calls = vm.calls();
        let builder = Builder::new(&to, &guest).blobs(&blobs).note_in(&calls);
        let target = Target::start(&loopback(), builder, limits);
        let mut options = options(&target.address);
        (options.connections, options.limits) = (connections, limits);
        options.timeout_strategy = TimeoutStrategy::Ignore;
        let sender = std::thread::spawn(move || send(vm, &options));
        let first = if gated == Gated::Prepare { "await blobs" } else { "read blobs" };
        wait_for("the devices", || calls.lock().contains(&first));
        let began = Instant::now();
        wait_for("longer than an answer", || began.elapsed() > limits.answer * 3 / 2);
        drop(open);
        sender.join().unwrap().unwrap();
        target.join().unwrap();
        assert!(blobs.have_arrived(true), "{gated:?} on {connections}");
    };
    let cases = [
        (Gated::Prepare, 1),
        (Gated::Open, 1),
        (Gated::ReadsOf(0), 1),
        (Gated::ReadsOf(1), 3),
        (Gated::WritesOf(0), 1),
        (Gated::WritesOf(1), 3),
    ];
    std::thread::scope(|scope| {
        for (gated, connections) in cases {
            scope.spawn(move || case(gated, connections));
        }
    });
}

#[test]
fn a_cancel_ends_it_and_the_guest_continues() {
    let (open, gate) = channel();
    let blobs =
        FakeBlobs::new(&[usize::try_from(2 * WINDOW_BYTES_MAX).unwrap()]).gate(Gated::Writes, gate);
    let (from, to) = (memory(), memory());
    let guest = Guest::new(&from, 75);
    let target = Target::start(&loopback(), Builder::new(&to, &guest).blobs(&blobs), LIMITS);
    let mut options = options(&target.address);
    (options.connections, options.timeout_strategy) = (3, TimeoutStrategy::Ignore);
    let vm = FakeVm::new(&from, &guest).blobs(&blobs).running();
    let (cancel, progress) = (Cancel::new().unwrap(), Arc::new(Progress::new(Side::Source)));
    let sender = {
        let cancel = cancel.clone();
        std::thread::spawn(move || migrate(vm, &options, &progress, &cancel))
    };
    wait_for("the reading", || blobs.read_bytes() > WINDOW_BYTES_MAX);
    cancel.cancel();
    let failure = *sender.join().unwrap().unwrap_err();
    let SendFailure::Resumed { mut vm, error } = failure else { panic!("{failure:?}") };
    assert!(matches!(error.cause, Cause::Cancelled), "{error:?}");
    assert_eq!((error.phase, blobs.open_sources()), (Phase::Handover, 0));
    assert!(vm.runs());
    vm.stop();
    assert_whole(&guest, &from);
    drop(open);
    target.join().unwrap_err();
}

#[test]
fn devices_that_take_their_state_at_once_are_not_asked_for_more() {
    if !super::have_uffd() {
        return;
    }
    let (from, to) = (memory(), memory());
    let guest = Guest::new(&from, 76);
    let blobs = FakeBlobs::new(&[50_000]);
    let target = Target::start(&loopback(), Builder::new(&to, &guest).blobs(&blobs), LIMITS);
    let mut options = options(&target.address);
    options.memory_mode = MemoryMode::Postcopy;
    let receiver = std::thread::spawn(move || {
        let mut received = target.join().unwrap();
        received.faults.take().unwrap().wait().map(drop).unwrap();
        received.vm.stop();
    });
    send(FakeVm::new(&from, &guest).blobs(&blobs), &options).unwrap();
    receiver.join().unwrap();
    assert!(blobs.have_arrived(false), "within the state, as before");
}

/// What is sent of the state counts for the forecast of the downtime, at the rate at which memory was sent.
#[test]
fn a_state_that_takes_too_long_is_part_of_the_forecast() {
    let (from, to) = (memory(), memory());
    let guest = Guest::new(&from, 77);
    guest.fill(&from, 100);
    let blobs = FakeBlobs::new(&[20 << 20]);
    let target = Target::start(&loopback(), Builder::new(&to, &guest).blobs(&blobs), LIMITS);
    let mut options = options(&target.address);
    // Memory of 12 MiB takes more than a second, and the state two.
    options.bandwidth_bytes_per_s = 10 << 20;
    options.downtime = Duration::from_millis(300);
    options.downtime_max = Some(Duration::from_millis(600));
    let progress = Arc::new(Progress::new(Side::Source));
    let vm = FakeVm::new(&from, &guest).blobs(&blobs);
    migrate(vm, &options, &progress, &Cancel::new().unwrap()).unwrap();
    let document = progress.snapshot();
    let expected = Duration::from_micros(document.expected_downtime_us.unwrap());
    assert!(expected > Duration::from_secs(2), "{expected:?}");
    target.join().unwrap();
    assert!(blobs.have_arrived(true));
}

/// A source that has announced this, up to where the state is due.
fn announced(list: &BlobList) -> (Channel, Target, [u8; 16]) {
    let to = memory();
    let guest = Guest::new(&to, 1);
    let blobs = FakeBlobs::new(&[9, 9]);
    let target = Target::start(&loopback(), Builder::new(&to, &guest).blobs(&blobs), LIMITS);
    let never = Cancel::new().unwrap();
    let connection =
        Connection::connect(&target.address, &never, LIMITS.connect, LIMITS.answer).unwrap();
    let mut control = Channel::new(connection);
    let token = agree(&mut control, &to, MemoryMode::Precopy);
    control.ask(&Message::Config(b"{}".to_vec()), LIMITS.answer).unwrap();
    control.tell(&Message::Blobs(list.to_json())).unwrap();
    (control, target, token)
}

fn list(len_bytes_max: u64) -> BlobList {
    let info = |number: u32| BlobInfo {
        name: format!("gpu{number}"),
        len_bytes_max,
        about: serde_json::json!({"number": number}),
    };
    BlobList { blobs: vec![info(0), info(1)] }
}

fn chunk(blob: u16, offset: u64, bytes: &[u8]) -> Message {
    Message::BlobChunk(BlobChunk { blob, offset, bytes: bytes.to_vec() })
}

/// Sends a message, and returns what the destination says before it answers.
fn tell(channel: &mut Channel, message: &Message) -> Result<Vec<Vec<u64>>, Cause> {
    channel.tell(message)?;
    let mut written = Vec::new();
    while let Some(more) = channel.hear_of_blobs()? {
        written.push(more);
    }
    Ok(written)
}

#[test]
fn chunks_that_do_not_fit_end_the_migration_on_either_connection() {
    let state = || Message::State(b"{}".to_vec());
    let cases = [
        (vec![chunk(2, 0, b"x")], "bytes of part 2 of the state, and announced 2"),
        (vec![chunk(0, 0, b"xy"), chunk(0, 1, b"y")], "'gpu0' came twice, at 1"),
        (vec![chunk(1, 8, b"xy"), chunk(1, 8, b"xy")], "'gpu1' came twice, at 8"),
        (vec![chunk(0, 99, b"xy")], "'gpu0' has 101 bytes or more, and 100 at most"),
        (vec![chunk(0, 1, b""), chunk(0, 0, b"xy")], "'gpu0' goes on at 0, beyond its end"),
        (vec![chunk(0, 0, b"x"), chunk(0, 1, b""), state()], "'gpu1' is not complete: 0 bytes"),
        (vec![chunk(0, 1, b"x"), chunk(0, 2, b""), state()], "'gpu0' is not complete: 0 bytes"),
        (vec![Message::Blobs(list(1).to_json())], "Blobs where Memory or State was due"),
    ];
    for (messages, expected) in cases {
        for is_extra in [false, true] {
            let is_chunk = |message: &Message| matches!(message, Message::BlobChunk(_));
            if is_extra && !messages.iter().all(is_chunk) {
                continue;
            }
            let (mut control, target, token) = announced(&list(100));
            control.answer(LIMITS.answer).unwrap();
            let never = Cancel::new().unwrap();
            let mut channel = if is_extra {
                Channel::open_extra(&target.address, Role::Memory, Some(&token), &never, &LIMITS)
                    .unwrap()
            } else {
                control
            };
            let (last, before) = messages.split_last().unwrap();
            let mut written = Vec::new();
            for message in before {
                written.extend(tell(&mut channel, message).unwrap());
            }
            if let (Message::State(_), Message::BlobChunk(BlobChunk { offset: 0, .. })) =
                (last, &messages[0])
            {
                while !written.contains(&vec![1, 0]) {
                    written.extend(channel.hear_of_blobs().unwrap());
                }
            }
            let refused = tell(&mut channel, last).unwrap_err();
            let told = error_text::chain(&refused);
            assert!(told.contains(expected), "{expected}: {told}");
            let error = error_text::chain(&target.join().unwrap_err().error);
            assert!(error.contains(expected), "{expected}: {error}");
        }
    }
}

#[test]
fn lists_that_are_no_good_are_refused_with_the_reason() {
    let mut other = list(1);
    other.blobs.swap(0, 1);
    let many = BlobList { blobs: vec![list(1).blobs[0].clone(); BLOBS_MAX + 1] };
    let cases = [
        (other, "unknown device 'gpu1'"),
        (list(BLOB_BYTES_MAX + 1), "up to 1099511627777 bytes of the state of 'gpu0'"),
        (many, "announced 257 parts of the state"),
    ];
    for (list, expected) in cases {
        let (mut control, target, _) = announced(&list);
        let told = error_text::chain(&control.answer(LIMITS.answer).unwrap_err());
        assert!(told.contains(expected), "{expected}: {told}");
        target.join().unwrap_err();
    }
}

#[test]
fn bytes_before_they_are_announced_are_refused() {
    let to = memory();
    let target = Target::start(&loopback(), Builder::new(&to, &Guest::new(&to, 1)), LIMITS);
    let never = Cancel::new().unwrap();
    let connection =
        Connection::connect(&target.address, &never, LIMITS.connect, LIMITS.answer).unwrap();
    let mut control = Channel::new(connection);
    agree(&mut control, &to, MemoryMode::Precopy);
    control.ask(&Message::Config(b"{}".to_vec()), LIMITS.answer).unwrap();
    let refused = control.ask(&chunk(0, 0, b"x"), LIMITS.answer).unwrap_err();
    assert!(error_text::chain(&refused).contains("sent BlobChunk where"), "{refused:?}");
    target.join().unwrap_err();
}

/// A migration of two devices, of which one at one of the sides hangs as `gated` says.
struct Hang {
    blobs: FakeBlobs,
    guest: Arc<Guest>,
    from: Arc<FakeMemory>,
    sent: SendResult,
    received: super::ReceiveResult,
    calls: Vec<&'static str>,
    took: Duration,
}

/// Runs one in which `patience` is the time for a byte of any device, and ends with a cancel at the source, or without one.
fn hang(gated: Gated, patience: Duration, is_cancelled: bool) -> Hang {
    let (open, gate) = channel();
    let blobs = FakeBlobs::new(&[3_000_000, 7]).gate(gated, gate);
    let (from, to) = (memory(), memory());
    let guest = Guest::new(&from, 81);
    guest.fill(&from, 20);
    let leave = Duration::from_millis(300);
    let limits = Limits { prepare: patience, device_leave: leave, ..LIMITS };
    let target = Target::start(&loopback(), Builder::new(&to, &guest).blobs(&blobs), limits);
    let mut options = options(&target.address);
    options.limits = limits;
    options.timeout_strategy = TimeoutStrategy::Ignore;
    let vm = FakeVm::new(&from, &guest).blobs(&blobs).running();
    let calls = vm.calls();
    let (cancel, progress) = (Cancel::new().unwrap(), Arc::new(Progress::new(Side::Source)));
    let sender = {
        let cancel = cancel.clone();
        std::thread::spawn(move || migrate(vm, &options, &progress, &cancel))
    };
    if is_cancelled {
        wait_for("the call that hangs", || blobs.is_at_gate());
        wait_for("the other device", || blobs.arrived_of(1) == 7);
        cancel.cancel();
    }
    let began = Instant::now();
    let sent = sender.join().unwrap();
    let took = began.elapsed();
    let received = target.join();
    let calls = calls.lock().clone();
    // Only now may the thread that was left go on.
    wait_for("the device", || !blobs.left().is_empty());
    drop(open);
    Hang { blobs, guest, from, sent, received, calls, took }
}

fn resumed(sent: SendResult) -> (FakeVm, crate::MigrationError) {
    let failure = *sent.unwrap_err();
    let SendFailure::Resumed { vm, error } = failure else { panic!("{failure:?}") };
    (vm, error)
}

#[test]
fn the_guest_runs_again_whose_device_hangs_at_the_source() {
    for gated in [Gated::ReadsOf(0), Gated::EndOf(0)] {
        let hang = hang(gated, Duration::from_secs(2), false);
        let (mut vm, error) = resumed(hang.sent);
        let told = error_text::chain(&error);
        let named = "the device 'gpu0' hangs: giving its state has not ended within";
        assert!(told.contains(named), "{gated:?}: {told}");
        assert_eq!(error.step, "reading the state of devices");
        assert!(vm.runs(), "{gated:?}");
        vm.stop();
        assert_whole(&hang.guest, &hang.from);
        let order: Vec<_> =
            hang.calls.iter().filter(|call| ["leave", "resume"].contains(*call)).collect();
        assert_eq!(order, [&"leave", &"resume"], "it does not wait for the device");
        assert_eq!(hang.blobs.left(), [0]);
        wait_for("the end of its thread", || hang.blobs.open_sources() == 0);
        hang.received.unwrap_err();
    }
}

#[test]
fn a_destination_whose_device_hangs_ends_and_says_which() {
    for gated in [Gated::WritesOf(0), Gated::BeginOf(0)] {
        let hang = hang(gated, Duration::from_secs(2), false);
        let named = "the device 'gpu0' hangs: taking its state has not ended within";
        // The machine there has ended without that thread.
        let received = error_text::chain(&hang.received.unwrap_err().error);
        assert!(received.contains(named), "{gated:?}: {received}");
        let (mut vm, error) = resumed(hang.sent);
        let told = error_text::chain(&error);
        assert!(told.contains(named), "{gated:?}: {told}");
        assert!(vm.runs(), "{gated:?}");
        vm.stop();
        assert_whole(&hang.guest, &hang.from);
        assert!(hang.blobs.left().iter().all(|device| *device == 0));
    }
}

#[test]
fn a_cancel_does_not_wait_for_a_device_that_hangs() {
    for gated in [Gated::ReadsOf(0), Gated::WritesOf(0)] {
        let hang = hang(gated, LIMITS.prepare, true);
        let (mut vm, error) = resumed(hang.sent);
        assert!(matches!(error.cause, Cause::Cancelled), "{error:?}");
        assert!(hang.took < LIMITS.prepare / 2, "{gated:?}: {:?}", hang.took);
        assert!(vm.runs(), "{gated:?}");
        vm.stop();
        hang.received.unwrap_err();
        assert_eq!(hang.blobs.left(), [0], "{gated:?}");
    }
}
