// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests of networks of vhost-user that move: their state, the log of what back ends write, and announcements.

#![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::sync::mpsc::{Receiver, channel};

use memory::GuestRam;
use serde_json::json;
use vm_memory::GuestAddressSpace as _;

use super::scripted::{
    Answer, FEATURES, GET_FEATURES, GET_PROTOCOL_FEATURES, PROTOCOL_FEATURES, Request,
    SET_LOG_BASE, back_end,
};
use super::session::Session;
use super::tests::{PATIENT, SET_FEATURES, SET_VRING_ENABLE, config, losses, ram};
use super::*;
use crate::virtio::test_driver::{DATA, Driver, readable, writable};
use crate::virtio::{StateError, VirtioDevice as _};

const SET_MEM_TABLE: u32 = 5;
const SET_VRING_ADDR: u32 = 9;
const SET_VRING_BASE: u32 = 10;
const GET_VRING_BASE: u32 = 11;
const SEND_RARP: u32 = 19;
const CTRL_VQ: u64 = 1 << 17;
const GUEST_ANNOUNCE: u64 = 1 << 21;
const MQ: u64 = 1 << 22;
const LOG_ALL: u64 = 1 << 26;
/// Bits of the protocol.
const PROTOCOL_LOG: u64 = 1 << 1;
const PROTOCOL_RARP: u64 = 1 << 2;
const QUEUES: u16 = 4;
const CONTROL: usize = 4;
const MAC: [u8; 6] = [2, 0, 0, 0, 0, 9];

struct Asked {
    number: u32,
    payload: Vec<u8>,
    file: Option<File>,
}

struct Network {
    device: VhostUser,
    driver: Driver,
    ram: GuestRam,
    requests: Receiver<Asked>,
    losses: Receiver<String>,
}

fn of_network(request: &Request) -> Answer {
    match request.number {
        GET_FEATURES => request.reply(&(FEATURES | CTRL_VQ | MQ | LOG_ALL).to_le_bytes()),
        GET_PROTOCOL_FEATURES => {
            request.reply(&(PROTOCOL_FEATURES | PROTOCOL_LOG | PROTOCOL_RARP).to_le_bytes())
        }
        SET_LOG_BASE => request.reply(&request.payload),
        _ => request.usual(),
    }
}

impl Network {
    /// A device whose driver has not started it.
    fn new(mut answer: impl FnMut(&Request) -> Answer + Send + 'static) -> Self {
        let (asked, requests) = channel();
        let recorded = move |request: &Request| {
            let file = request.file.as_ref().map(|file| file.try_clone().unwrap());
            let payload = request.payload.clone();
            let _ = asked.send(Asked { number: request.number, payload, file });
            answer(request)
        };
        let offloads = NetOffloads { csum: true, tso: true, ufo: true };
        let kind = VhostUserKind::Net { mac: MAC, mtu: Some(1400), offloads };
        let session =
            Session::over(back_end(recorded).unwrap(), kind.needs(QUEUES), PATIENT).unwrap();
        let ram = ram(1, true);
        ram.track_device_writes(true);
        let memory = ram.guest_memory();
        let config = VhostUserConfig { kind, num_queues: QUEUES, ..config(1) };
        let (on_lost, losses) = losses();
        let device = VhostUser::over(session, config, &memory.memory(), on_lost).unwrap();
        let driver = Driver::over(ram.guest_memory(), QUEUES + 1, 16);
        Self { device, driver, ram, requests, losses }
    }

    fn started(answer: impl FnMut(&Request) -> Answer + Send + 'static) -> Self {
        let mut network = Self::new(answer);
        network.driver.activate_all(&mut network.device);
        network.pairs(1);
        network
    }

    /// Uses this many pairs, once the device works.
    fn pairs(&mut self, pairs: u8) {
        self.driver.write(DATA, &[4, 0, pairs, 0]);
        self.driver.queues[CONTROL].add(&[readable(DATA, 4), writable(DATA + 8, 1)]);
        self.driver.queues[CONTROL].kick();
        self.driver.wait_used(CONTROL);
        assert_eq!(self.driver.read(DATA + 8, 1), [0]);
    }

    fn asked(&self) -> Vec<Asked> {
        self.requests.try_iter().collect()
    }
}

fn numbers(asked: &[Asked]) -> Vec<u32> {
    asked.iter().map(|asked| asked.number).collect()
}

fn word(asked: &Asked) -> u64 {
    u64::from_le_bytes(asked.payload[..8].try_into().unwrap())
}

/// The features that the back end is told, and for each ring whose address it is told whether that one is logged and where.
fn log_of(asked: &[Asked]) -> (Vec<bool>, Vec<(u8, bool, u64)>) {
    let of = |number: u32| asked.iter().filter(move |asked| asked.number == number);
    let features = of(SET_FEATURES).map(|asked| word(asked) & LOG_ALL != 0).collect();
    let ring = |asked: &Asked| {
        let at = u64::from_le_bytes(asked.payload[32..40].try_into().unwrap());
        (asked.payload[0], asked.payload[4] & 1 != 0, at)
    };
    (features, of(SET_VRING_ADDR).map(ring).collect())
}

/// Marks a page as the back end does.
fn mark(log: &File, page: u64) {
    log.write_all_at(&[1 << (page % 8)], page / 8).unwrap();
}

fn dirty(ram: &GuestRam, page: u64) -> bool {
    ram.take_device_dirty(page * 4096, 4096).unwrap()[0] & 1 != 0
}

#[test]
fn a_state_has_the_pairs_in_use_and_goes_to_another_back_end() {
    let mut source = Network::started(|request| match request.number {
        GET_VRING_BASE => {
            let mut payload = request.payload.clone();
            // As if frames had gone by the rings.
            payload[4] = 5 + payload[0];
            request.reply(&payload)
        }
        _ => of_network(request),
    });
    source.pairs(2);
    let rings = source.device.pause();
    let state = source.device.save();
    assert_eq!((state.kind.as_str(), state.version), ("vhost-user-net", 1));
    let features = source.device.features();

    let mut there = Network::new(of_network);
    there.device.pause();
    there.device.acknowledge_features(features);
    there.device.restore(&state).unwrap();
    there.asked();
    there.driver.activate_restored(&mut there.device, features, &rings);
    assert!(there.asked().is_empty(), "not before it is resumed");
    there.device.resume();
    // The control queue continues where it was.
    there.driver.queues[CONTROL].set_available(2);
    there.driver.queues[CONTROL].want_interrupt_at(2);
    there.driver.write(DATA, &[77, 0]);
    there.driver.queues[CONTROL].add(&[readable(DATA, 2), writable(DATA + 8, 1)]);
    there.driver.queues[CONTROL].kick();
    there.driver.interrupt.wait_queue(u16::try_from(CONTROL).unwrap());
    let asked = there.asked();
    let bases: Vec<_> = asked.iter().filter(|asked| asked.number == SET_VRING_BASE).collect();
    let bases: Vec<_> = bases.iter().map(|asked| (asked.payload[0], asked.payload[4])).collect();
    assert_eq!(bases, [(0, 5), (1, 6), (2, 7), (3, 8)]);
    let enabled = asked.iter().filter(|asked| asked.number == SET_VRING_ENABLE).count();
    assert_eq!(enabled, 8, "both pairs");
    assert!(there.losses.try_recv().is_err());
}

#[test]
fn states_that_cannot_be_are_refused() {
    let mut network = Network::new(of_network);
    let state = network.device.save();
    network.device.restore(&state).unwrap();
    for (key, value) in [
        ("active_pairs", json!(0)),
        ("active_pairs", json!(3)),
        ("active_pairs", json!(65_535)),
        ("active_pairs", json!(-1)),
        ("mtu", json!(1500)),
        ("more", json!(1)),
    ] {
        let mut other = state.clone();
        other.data[key] = value.clone();
        network.device.restore(&other).expect_err(&format!("{key}: {value}"));
    }
    let other = crate::virtio::DeviceSnapshot { kind: "virtio-net".to_owned(), ..state.clone() };
    assert!(matches!(network.device.restore(&other), Err(StateError::Kind { .. })));
    let other = crate::virtio::DeviceSnapshot { version: 2, ..state };
    assert!(matches!(network.device.restore(&other), Err(StateError::Version { .. })));
}

#[test]
fn what_a_back_end_writes_is_logged_while_its_rings_are_served() {
    let mut network = Network::started(of_network);
    network.asked();
    let log = network.device.handle().watch_writes(&network.ram);
    assert!(!log.is_missing());
    let asked = network.asked();
    let shared = asked[0].file.as_ref().unwrap();
    assert_eq!(asked[0].number, SET_LOG_BASE);
    assert!(word(&asked[0]) * 8 * 4096 >= 4 << 20, "a bit for each page");
    let used = |ring: usize| network.driver.queues[ring].used_ring();
    let rings = vec![(0, true, used(0)), (1, true, used(1))];
    assert_eq!(log_of(&asked), (vec![true], rings));
    let enabled = numbers(&asked).iter().filter(|number| **number == SET_VRING_ENABLE).count();
    assert_eq!(enabled, 2, "some back ends disable rings with the features");
    log.collect(&network.ram);
    for page in [3, 1023] {
        dirty(&network.ram, page);
        mark(shared, page);
        log.collect(&network.ram);
        assert!(dirty(&network.ram, page));
        log.collect(&network.ram);
        assert!(!dirty(&network.ram, page), "once");
    }
    // Beyond the end of memory there is nothing.
    mark(shared, 1024);
    log.collect(&network.ram);

    // What starts meanwhile is logged as well.
    network.pairs(2);
    let used = |ring: usize| network.driver.queues[ring].used_ring();
    assert_eq!(log_of(&network.asked()), (vec![], vec![(2, true, used(2)), (3, true, used(3))]));
    network.device.pause();
    network.device.resume();
    network.pairs(1);
    let (features, rings) = log_of(&network.asked());
    assert_eq!((features, rings.iter().filter(|ring| ring.1).count()), (vec![true], 4));

    drop(log);
    let (features, rings) = log_of(&network.asked());
    assert_eq!((features, rings.iter().filter(|ring| ring.1).count()), (vec![false], 0));
    network.device.pause();
    network.device.resume();
    network.pairs(1);
    assert_eq!(log_of(&network.asked()).0, [false]);
    assert!(network.losses.try_recv().is_err());
}

/// Those built on vhost-user-backend lose used entries when they are told the address of a ring that they serve.
#[test]
fn rings_of_a_back_end_without_rarp_are_stopped_for_the_log() {
    const SET_VRING_NUM: u32 = 8;
    const SET_VRING_KICK: u32 = 12;
    const SET_VRING_CALL: u32 = 13;
    let mut network = Network::started(|request| match request.number {
        GET_PROTOCOL_FEATURES => request.reply(&(PROTOCOL_FEATURES | PROTOCOL_LOG).to_le_bytes()),
        GET_VRING_BASE => {
            let mut payload = request.payload.clone();
            payload[4] = 5 + payload[0];
            request.reply(&payload)
        }
        _ => of_network(request),
    });
    // The rings of the second pair are started, and not served.
    network.pairs(2);
    network.pairs(1);
    network.asked();
    let interrupts = |network: &Network, ring| network.driver.interrupt.queue_interrupts(ring);
    let before = interrupts(&network, 0);
    let log = network.device.handle().watch_writes(&network.ram);
    assert!(!log.is_missing());
    assert_eq!(interrupts(&network, 0), before + 1, "for what was used last");
    let mut log = Some(log);
    for is_logged in [true, false] {
        if !is_logged {
            drop(log.take());
        }
        let asked = network.asked();
        let of = |ring: u8| {
            asked.iter().filter(move |asked| {
                asked.payload[0] == ring && (SET_VRING_NUM..=SET_VRING_CALL).contains(&asked.number)
                    || asked.number == SET_FEATURES
            })
        };
        for ring in 0..4 {
            let numbers: Vec<_> = of(ring).map(|asked| asked.number).collect();
            let mut expected = vec![
                GET_VRING_BASE,
                SET_FEATURES,
                SET_VRING_NUM,
                SET_VRING_ADDR,
                SET_VRING_BASE,
                SET_VRING_CALL,
            ];
            expected.extend((ring < 2).then_some(SET_VRING_KICK));
            assert_eq!(numbers, expected, "ring {ring}");
            let base = of(ring).find(|asked| asked.number == SET_VRING_BASE).unwrap();
            assert_eq!(base.payload[4], 5 + ring);
        }
        let enabled = asked.iter().filter(|asked| asked.number == SET_VRING_ENABLE);
        let enabled: Vec<_> = enabled.map(|asked| (asked.payload[0], asked.payload[4])).collect();
        assert_eq!(enabled, [(0, 0), (1, 0), (0, 1), (1, 1), (0, 1), (1, 1)]);
        let (features, rings) = log_of(&asked);
        assert_eq!(features, [is_logged]);
        assert_eq!(rings.iter().filter(|ring| ring.1).count(), if is_logged { 4 } else { 0 });
    }
    assert!(network.losses.try_recv().is_err());
}

/// A back end has to know memory before it can mark pages of it.
#[test]
fn a_driver_that_starts_while_its_guest_moves_is_logged() {
    let mut network = Network::new(of_network);
    let log = network.device.handle().watch_writes(&network.ram);
    assert!(network.asked().iter().all(|asked| asked.number != SET_LOG_BASE));
    network.driver.activate_all(&mut network.device);
    network.pairs(1);
    let asked = network.asked();
    let at = |number: u32| numbers(&asked).iter().position(|other| *other == number).unwrap();
    assert!(at(SET_MEM_TABLE) < at(SET_LOG_BASE) && at(SET_LOG_BASE) < at(SET_VRING_ADDR));
    let (features, rings) = log_of(&asked);
    assert_eq!((features, rings.iter().filter(|ring| ring.1).count()), (vec![true], 2));
    let shared = asked[at(SET_LOG_BASE)].file.as_ref().unwrap();
    log.collect(&network.ram);
    dirty(&network.ram, 9);
    mark(shared, 9);
    log.collect(&network.ram);
    assert!(dirty(&network.ram, 9));
}

#[test]
fn all_that_a_back_end_without_a_log_may_have_written_counts_when_it_stops() {
    for lacks in [LOG_ALL, PROTOCOL_LOG] {
        let mut network = Network::started(move |request| match request.number {
            GET_FEATURES if lacks == LOG_ALL => {
                request.reply(&(FEATURES | CTRL_VQ | MQ).to_le_bytes())
            }
            GET_PROTOCOL_FEATURES if lacks == PROTOCOL_LOG => {
                request.reply(&PROTOCOL_FEATURES.to_le_bytes())
            }
            _ => of_network(request),
        });
        let log = network.device.handle().watch_writes(&network.ram);
        dirty(&network.ram, 1000);
        log.collect(&network.ram);
        assert!(log.is_missing() && !dirty(&network.ram, 1000), "not yet");
        network.device.pause();
        log.collect(&network.ram);
        assert!(!log.is_missing() && dirty(&network.ram, 1000));
        log.collect(&network.ram);
        assert!(!dirty(&network.ram, 1000), "once");
        // The driver may start again.
        network.device.resume();
        network.pairs(1);
        log.collect(&network.ram);
        assert!(log.is_missing());
        network.device.pause();
        log.collect(&network.ram);
        assert!(!log.is_missing() && dirty(&network.ram, 1000));
    }
}

#[test]
fn the_log_may_be_answered_in_several_ways_and_not_in_others() {
    let answered = |payload: Option<Vec<u8>>| {
        let mut network = Network::started(move |request| match (request.number, &payload) {
            (SET_LOG_BASE, Some(payload)) => request.reply(payload),
            (SET_LOG_BASE, None) => Answer::Close,
            _ => of_network(request),
        });
        let log = network.device.handle().watch_writes(&network.ram);
        network.device.pause();
        log.collect(&network.ram);
        (network.losses.try_recv().is_err(), dirty(&network.ram, 1000))
    };
    for len in [0, 8, 16] {
        assert_eq!(answered(Some(vec![0; len])), (true, false), "{len}");
    }
    // What such a back end may have written is not known.
    assert_eq!(answered(Some(vec![0; 17])), (false, true));
    assert_eq!(answered(None), (false, true));
}

#[test]
fn a_guest_is_announced_by_its_driver_or_by_the_back_end() {
    let mut network = Network::started(of_network);
    assert_ne!(network.device.features() & GUEST_ANNOUNCE, 0);
    let status = |network: &Network| {
        let mut status = [0; 2];
        network.device.read_config(6, &mut status);
        u16::from_le_bytes(status)
    };
    network.asked();
    network.device.handle().announce();
    assert_eq!((status(&network), network.driver.interrupt.config_changes()), (3, 1));
    assert!(network.asked().is_empty());
    // The driver has announced itself.
    network.driver.write(DATA, &[3, 0]);
    network.driver.queues[CONTROL].add(&[readable(DATA, 2), writable(DATA + 8, 1)]);
    network.driver.queues[CONTROL].kick();
    network.driver.wait_used(CONTROL);
    assert_eq!((network.driver.read(DATA + 8, 1), status(&network)), (vec![0], 1));

    // One that cannot, and is there later.
    network.device.reset();
    network.asked();
    network.device.handle().announce();
    assert_eq!(
        (numbers(&network.asked()), status(&network)),
        (vec![], 1),
        "no ring would be there"
    );
    network.driver.activate_all(&mut network.device);
    network.pairs(1);
    let asked = network.asked();
    let at = |number: u32| numbers(&asked).iter().rposition(|other| *other == number).unwrap();
    assert!(at(SET_VRING_ENABLE) < at(SEND_RARP));
    assert_eq!(asked[at(SEND_RARP)].payload, [2, 0, 0, 0, 0, 9, 0, 0]);
    network.device.pause();
    network.device.resume();
    network.pairs(1);
    assert!(!numbers(&network.asked()).contains(&SEND_RARP), "once");
}

/// To DPDK a ring that stops is the end of the device.
#[test]
fn pairs_that_come_back_are_enabled_where_rings_need_not_stop() {
    let mut network = Network::started(of_network);
    network.pairs(2);
    network.asked();
    for (pairs, enabled) in [(1, 0), (2, 1), (1, 0), (2, 1)] {
        network.pairs(pairs);
        let asked = network.asked();
        let told: Vec<_> =
            asked.iter().map(|it| (it.number, it.payload[0], it.payload[4])).collect();
        let expected = [2, 3].map(|ring| (SET_VRING_ENABLE, ring, enabled));
        assert_eq!(told, expected);
    }
    assert!(network.losses.try_recv().is_err());
}
