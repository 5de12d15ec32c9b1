// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Versions of configuration and state: what the destination cannot read is refused by name before
//! anything but the offer has been sent, whichever of the two is the older program.

use super::{
    Builder, FakeVm, Guest, LIMITS, Target, assert_whole, loopback, memory, options, send,
};
use crate::channel::Channel;
use crate::protocol::capabilities::{Accepted, Offer, features};
use crate::protocol::formats::Formats;
use crate::protocol::message::{Answer, Message, VERSION};
use crate::ram::GuestMemoryMap;
use crate::source::SendFailure;
use crate::transport::Connection;
use crate::{Cancel, MemoryMode};

const OLD: Formats = Formats { config: 1, state: 1 };
const NEW: Formats = Formats { config: 1, state: 4 };

#[test]
fn both_learn_the_versions_and_a_newer_destination_takes_an_older_guest() {
    for (needs, reads) in [(OLD, OLD), (OLD, NEW), (NEW, NEW)] {
        let (from, to) = (memory(), memory());
        let guest = Guest::new(&from, 3);
        guest.fill(&from, 50);
        let target = Target::start(&loopback(), Builder::new(&to, &guest).formats(reads), LIMITS);
        let vm = FakeVm::new(&from, &guest).formats(needs);
        let met = vm.met();
        send(vm, &options(&target.address)).unwrap();
        assert_eq!(*met.lock(), Some(reads));
        drop(target.join().unwrap());
        assert_whole(&guest, &to);
    }
}

#[test]
fn a_newer_guest_is_refused_before_its_configuration_is_sent() {
    let (from, to) = (memory(), memory());
    let guest = Guest::new(&from, 3);
    let builder = Builder::new(&to, &guest).formats(OLD);
    let calls = builder.calls();
    let target = Target::start(&loopback(), builder, LIMITS);
    let vm = FakeVm::new(&from, &guest).formats(NEW).running();
    let failure = *send(vm, &options(&target.address)).unwrap_err();
    let SendFailure::Resumed { mut vm, error } = failure else { panic!("{failure:?}") };
    assert!(vm.runs());
    vm.stop();
    let refusal = target.join().unwrap_err();
    for text in [format!("{error:?}"), format!("{refusal:?}")] {
        assert!(
            text.contains("a machine state of version 4, and the newest known there is 1"),
            "{text}"
        );
    }
    assert!(!vm.calls().lock().contains(&"config"));
    assert!(calls.lock().is_empty());
}

/// A destination from before format versions: it answers literally as such a program does.
#[test]
fn a_source_refuses_a_destination_that_says_nothing_of_versions() {
    let (from, guest) = {
        let from = memory();
        let guest = Guest::new(&from, 3);
        (from, guest)
    };
    for (needs, goes_on) in [(OLD, true), (NEW, false)] {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = crate::transport::Address::Tcp {
            host: "127.0.0.1".to_owned(),
            port: listener.local_addr().unwrap().port(),
        };
        let old = std::thread::spawn(move || {
            use std::io::{Read, Write};
            let (mut stream, _) = listener.accept().unwrap();
            let mut commands = Vec::new();
            loop {
                let mut head = [0; 16];
                if stream.read_exact(&mut head).is_err() {
                    return commands;
                }
                let code = u16::from_le_bytes([head[0], head[1]]);
                commands.push(code);
                let len =
                    usize::try_from(u64::from_le_bytes(head[8..].try_into().unwrap())).unwrap();
                stream.read_exact(&mut vec![0; len]).unwrap();
                let answer = match code {
                    1 => Answer::Ok { offer_taken: true, payload: Vec::new() },
                    0x4701 => {
                        let said = serde_json::json!({
                            "software": "godwit 0.1.0", "features": features(), "token": vec![0; 16]});
                        Answer::Ok { offer_taken: false, payload: said.to_string().into_bytes() }
                    }
                    _ => Answer::Error { reason: "enough".to_owned() },
                };
                stream.write_all(&answer.encode()).unwrap();
            }
        });
        let vm = FakeVm::new(&from, &guest).formats(needs);
        let failure = *send(vm, &options(&address)).unwrap_err();
        let SendFailure::Resumed { error, .. } = failure else { panic!("{failure:?}") };
        let commands = old.join().unwrap();
        assert_eq!(commands.contains(&2), goes_on, "{commands:x?}");
        let named = format!("{error:?}").contains("a machine state of version 4");
        assert_eq!(named, !goes_on, "{error:?}");
    }
}

/// A source from before format versions.
#[test]
fn an_offer_that_says_nothing_of_versions_is_taken() {
    let to = memory();
    let guest = Guest::new(&to, 1);
    let target = Target::start(&loopback(), Builder::new(&to, &guest).formats(NEW), LIMITS);
    let cancel = Cancel::new().unwrap();
    let connection =
        Connection::connect(&target.address, &cancel, LIMITS.connect, LIMITS.answer).unwrap();
    let mut control = Channel::new(connection);
    control.ask(&Message::Start { version: VERSION, offer: true }, LIMITS.answer).unwrap();
    let offer = Offer {
        recover_timeout_ms: None,
        software: "godwit 0.1.0".to_owned(),
        features: features(),
        memory_mode: MemoryMode::Precopy,
        bulk_connections: 0,
        urgent_connections: 0,
        many_urgent_connections: None,
        vcpus: None,
        local: false,
        regions: to.layout().regions().to_vec(),
        formats: NEW,
    };
    let mut said: serde_json::Value = serde_json::from_slice(&offer.to_json()).unwrap();
    said.as_object_mut().unwrap().remove("formats").unwrap();
    let answer =
        control.ask(&Message::Capabilities(said.to_string().into_bytes()), LIMITS.answer).unwrap();
    assert_eq!(Accepted::parse(&answer.payload).unwrap().formats, NEW);
    drop(control);
    assert!(target.join().is_err());
}

/// A source that needs more than this program supports.
#[test]
fn a_destination_refuses_what_it_does_not_read_whatever_the_source_does() {
    let to = memory();
    let guest = Guest::new(&to, 1);
    let builder = Builder::new(&to, &guest);
    let target = Target::start(&loopback(), builder, LIMITS);
    let cancel = Cancel::new().unwrap();
    let connection =
        Connection::connect(&target.address, &cancel, LIMITS.connect, LIMITS.answer).unwrap();
    let mut control = Channel::new(connection);
    control.ask(&Message::Start { version: VERSION, offer: true }, LIMITS.answer).unwrap();
    let said = serde_json::json!({
        "software": "godwit 9", "features": features(), "memory_mode": "precopy",
        "bulk_connections": 0, "urgent_connections": 0, "formats": {"config": 2},
        "regions": to.layout().regions()});
    let refused = control
        .ask(&Message::Capabilities(said.to_string().into_bytes()), LIMITS.answer)
        .unwrap_err();
    let text = format!("{refused:?}");
    assert!(
        text.contains("a configuration of version 2, and the newest known there is 1"),
        "{text}"
    );
    let refusal = target.join().unwrap_err();
    assert!(format!("{refusal:?}").contains("Unsupported"), "{refusal:?}");
}
