// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Memory handed over as descriptors: nothing is copied, and incomplete memory is refused.

use std::io::Write as _;
use std::os::fd::AsFd as _;
use std::sync::Arc;

use super::{
    Builder, FakeVm, Guest, LIMITS, Target, assert_whole, loopback, memory, options, send,
};
use crate::channel::Channel;
use crate::layout::{Backing, PAGE_BYTES};
use crate::protocol::capabilities::{Offer, features};
use crate::protocol::message::{Message, VERSION};
use crate::ram::GuestMemoryMap;
use crate::source::SendFailure;
use crate::testing::{FakeMemory, Inject};
use crate::transport::Connection;
use crate::{Address, Cancel, MemoryMode};

fn unix(dir: &tempfile::TempDir) -> Address {
    format!("unix:{}", dir.path().join("mig").display()).parse().unwrap()
}

#[test]
fn the_guest_continues_in_the_same_memory_and_nothing_is_copied() {
    let dir = tempfile::tempdir().unwrap();
    for seed in 1..=5 {
        let (from, unused) = (memory(), memory());
        let guest = Guest::new(&from, seed);
        guest.fill(&from, 60);
        let target = Target::start(&unix(&dir), Builder::new(&unused, &guest), LIMITS);
        let mut options = options(&target.address);
        options.local = true;
        let vm = FakeVm::new(&from, &guest).running();
        let calls = vm.calls();
        let finished = send(vm, &options).unwrap();
        assert_eq!(finished.report.memory_bytes_sent, Some(0));
        assert!(!calls.lock().contains(&"start log"), "no dirty log is needed");
        let mut vm = target.join().unwrap().vm;
        let visits = guest.visits();
        while guest.visits() < visits + 2000 {
            std::thread::yield_now();
        }
        vm.stop();
        assert_whole(&guest, vm.memory());
        // Both sides see the same memory.
        assert_whole(&guest, &from);
        assert_eq!(unused.populated_bytes(0).unwrap(), 0);
    }
}

#[test]
fn a_guest_stays_when_the_other_side_fails() {
    let dir = tempfile::tempdir().unwrap();
    for inject in [Inject::Map, Inject::Prepare, Inject::Apply] {
        let (from, unused) = (memory(), memory());
        let guest = Guest::new(&from, 9);
        guest.fill(&from, 60);
        let builder = Builder::new(&unused, &guest).inject(inject);
        let target = Target::start(&unix(&dir), builder, LIMITS);
        let mut options = options(&target.address);
        options.local = true;
        let failure = *send(FakeVm::new(&from, &guest).running(), &options).unwrap_err();
        let SendFailure::Resumed { mut vm, error } = failure else { panic!("{failure:?}") };
        assert!(
            error_text::chain(&error).contains("injected failure"),
            "{}",
            error_text::chain(&error)
        );
        target.join().unwrap_err();
        vm.stop();
        assert_whole(&guest, &from);
    }
}

#[test]
fn private_memory_and_a_network_are_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let mut options = options(&loopback());
    options.local = true;
    assert!(options.check().unwrap_err().to_string().contains("unix:"));
    options.to = unix(&dir);
    options.memory_mode = MemoryMode::Postcopy;
    assert!(options.check().unwrap_err().to_string().contains("memory_mode=postcopy"));
    options.memory_mode = MemoryMode::Precopy;
    let private = FakeMemory::new(super::REGIONS, Backing::Anonymous, PAGE_BYTES).unwrap();
    let guest = Guest::new(&private, 3);
    let target = Target::start(&unix(&dir), Builder::new(&memory(), &guest), LIMITS);
    let failure = *send(FakeVm::new(&private, &guest).running(), &options).unwrap_err();
    let SendFailure::Resumed { error, .. } = failure else { panic!("{failure:?}") };
    let text = error_text::chain(&error);
    assert!(text.contains("'ram0'") && text.contains("shared=on"), "{text}");
    // The source has begun nothing: it is still awaited.
    target.cancel.cancel();
    target.join().unwrap_err();
}

/// A source that has offered a local migration.
fn offered(dir: &tempfile::TempDir, to: &Arc<FakeMemory>) -> (Channel, Target) {
    let guest = Guest::new(to, 1);
    let target = Target::start(&unix(dir), Builder::new(to, &guest), LIMITS);
    let cancel = Cancel::new().unwrap();
    let connection =
        Connection::connect(&target.address, &cancel, LIMITS.connect, LIMITS.answer).unwrap();
    let mut control = Channel::new(connection);
    control.ask(&Message::Start { version: VERSION, offer: true }, LIMITS.answer).unwrap();
    let offer = Offer {
        recover_timeout_ms: None,
        formats: crate::protocol::formats::Formats::default(),
        software: "hostile".into(),
        features: features(),
        memory_mode: MemoryMode::Precopy,
        bulk_connections: 0,
        urgent_connections: 0,
        many_urgent_connections: None,
        vcpus: None,
        local: true,
        regions: to.layout().regions().to_vec(),
    };
    control.ask(&Message::Capabilities(offer.to_json()), LIMITS.answer).unwrap();
    (control, target)
}

#[test]
fn descriptors_that_are_missing_doubled_or_for_nothing_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let to = memory();
    let give = |control: &mut Channel, slot| {
        let file = to.file(0).unwrap();
        control.give(&Message::MemoryFd { slot }, file).unwrap();
        control.answer(LIMITS.answer)
    };
    let refused = |control: Channel, target: Target, why: &str| {
        drop(control);
        let text = error_text::chain(&target.join().unwrap_err().error);
        assert!(text.contains(why), "{text}");
    };
    for slot in [2, u32::MAX] {
        let (mut control, target) = offered(&dir, &to);
        give(&mut control, slot).unwrap_err();
        refused(control, target, "no region");
    }
    let (mut control, target) = offered(&dir, &to);
    give(&mut control, 0).unwrap();
    give(&mut control, 0).unwrap_err();
    refused(control, target, "one already");
    let (mut control, target) = offered(&dir, &to);
    control.ask(&Message::MemoryFd { slot: 0 }, LIMITS.answer).unwrap_err();
    refused(control, target, "no descriptor");
    let (mut control, target) = offered(&dir, &to);
    give(&mut control, 1).unwrap();
    control.ask(&Message::Config(b"{}".to_vec()), LIMITS.answer).unwrap_err();
    refused(control, target, "a zone has none");
    // Two descriptors before the first is used, and memory contents in addition to the files.
    let (control, target) = offered(&dir, &to);
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(b"x").unwrap();
    control.connection.send_with_descriptor(&[7, 0], file.as_fd()).unwrap();
    control.connection.send_with_descriptor(&[0, 0], file.as_fd()).unwrap();
    let mut control = control;
    control.answer(LIMITS.answer).unwrap_err();
    refused(control, target, "descriptor");
    let (mut control, target) = offered(&dir, &to);
    give(&mut control, 0).unwrap();
    let file = to.file(1).unwrap();
    control.give(&Message::MemoryFd { slot: 1 }, file).unwrap();
    control.answer(LIMITS.answer).unwrap();
    control.ask(&Message::Config(b"{}".to_vec()), LIMITS.answer).unwrap();
    control.ask(&Message::ZeroPages(Vec::new()), LIMITS.answer).unwrap_err();
    refused(control, target, "ZeroPages");
}
