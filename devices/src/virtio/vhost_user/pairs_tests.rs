// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests of network devices of vhost-user with several pairs of queues, which their driver chooses by the control queue.

#![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::sync::mpsc::{Receiver, channel};
use std::time::Instant;

use memory::GuestRam;
use vm_memory::GuestAddressSpace as _;

use super::scripted::{
    Answer, FEATURES, GET_CONFIG, GET_FEATURES, GET_PROTOCOL_FEATURES, GET_QUEUE_NUM,
    GET_VRING_BASE, NET_SET_MTU, PROTOCOL_FEATURES, Request, back_end,
};
use super::session::Session;
use super::tests::{PATIENT, SET_VRING_ENABLE, SET_VRING_KICK, config, losses, ram};
use super::*;
use crate::virtio::VirtioDevice as _;
use crate::virtio::test_driver::{DATA, Driver, readable, writable};

const SET_VRING_NUM: u32 = 8;
const MTU: u64 = 1 << 3;
const STATUS: u64 = 1 << 16;
const CTRL_VQ: u64 = 1 << 17;
const MQ: u64 = 1 << 22;
/// Bits of the protocol: MQ, REPLY_ACK, MTU.
const PROTOCOL_MQ: u64 = 1;
const PROTOCOL_REPLY_ACK: u64 = 1 << 3;
const PROTOCOL_MTU: u64 = 1 << 4;

/// Of the device.
const QUEUES: u16 = 4;
const CONTROL: usize = 4;

/// The answers of a back end of a network.
fn of_network(request: &Request) -> Answer {
    match request.number {
        GET_FEATURES => request.reply(&(FEATURES | MTU | CTRL_VQ | MQ).to_le_bytes()),
        GET_PROTOCOL_FEATURES => request.reply(&(PROTOCOL_FEATURES | PROTOCOL_MTU).to_le_bytes()),
        _ => request.usual(),
    }
}

fn kind(mtu: Option<u16>) -> VhostUserKind {
    let offloads = NetOffloads { csum: true, tso: true, ufo: true };
    VhostUserKind::Net { mac: [2, 0, 0, 0, 0, 9], mtu, offloads }
}

fn made(
    mtu: Option<u16>,
    answer: impl FnMut(&Request) -> Answer + Send + 'static,
) -> Result<(VhostUser, GuestRam, Receiver<String>), VhostUserError> {
    let kind = kind(mtu);
    let session = Session::over(back_end(answer).unwrap(), kind.needs(QUEUES), PATIENT)?;
    let ram = ram(1, true);
    let memory = ram.guest_memory();
    let config = VhostUserConfig { kind, num_queues: QUEUES, ..config(1) };
    let (on_lost, losses) = losses();
    let device = VhostUser::over(session, config, &memory.memory(), on_lost)?;
    Ok((device, ram, losses))
}

/// A device whose driver has set up these queues, and the requests that its back end gets.
struct Network {
    device: VhostUser,
    driver: Driver,
    requests: Receiver<(u32, Vec<u8>)>,
    losses: Receiver<String>,
    control: usize,
}

impl Network {
    fn start(mut answer: impl FnMut(&Request) -> Answer + Send + 'static) -> Self {
        let (asked, requests) = channel();
        let recorded = move |request: &Request| {
            let _ = asked.send((request.number, request.payload.clone()));
            answer(request)
        };
        let (mut device, ram, losses) = made(None, recorded).unwrap();
        let driver = Driver::over(ram.guest_memory(), QUEUES + 1, 16);
        driver.activate_all(&mut device);
        Self { device, driver, requests, losses, control: CONTROL }
    }

    /// A command of the driver; gives its answer.
    fn control(&mut self, command: &[u8]) -> u8 {
        let (to, answer) = (DATA, DATA + 0x100);
        self.driver.write(to, command);
        self.driver.write(answer, &[0xff]);
        let len_bytes = u32::try_from(command.len()).unwrap();
        let queue = &mut self.driver.queues[self.control];
        queue.add(&[readable(to, len_bytes), writable(answer, 1)]);
        queue.kick();
        self.driver.wait_used(self.control);
        self.driver.read(answer, 1)[0]
    }

    /// Uses this many pairs.
    fn pairs(&mut self, pairs: u16) -> u8 {
        let [low, high] = pairs.to_le_bytes();
        self.control(&[4, 0, low, high])
    }

    /// What has been said of rings since, in this order: index, and whether it is enabled.
    fn enabled(&self) -> Vec<(u8, bool)> {
        let said = self.requests.try_iter().filter(|(number, _)| *number == SET_VRING_ENABLE);
        said.map(|(_, payload)| (payload[0], payload[4] == 1)).collect()
    }

    /// Waits until the device serves its queues.
    fn served(&mut self) {
        assert_eq!(self.control(&[77, 0]), 1, "an unknown command");
    }
}

/// Each ring is enabled twice, before and after its eventfd is sent.
fn on(rings: &[u8]) -> Vec<(u8, bool)> {
    [rings, rings].concat().into_iter().map(|index| (index, true)).collect()
}

fn off(rings: &[u8]) -> Vec<(u8, bool)> {
    rings.iter().map(|index| (*index, false)).collect()
}

#[test]
fn the_driver_enables_and_disables_pairs() {
    let mut network = Network::start(of_network);
    network.served();
    assert_eq!(network.enabled(), on(&[0, 1]), "one pair at first (virtio 1.3, 5.1.6.5.6)");
    assert_eq!(network.pairs(2), 0);
    assert_eq!(network.enabled(), on(&[2, 3]));
    assert_eq!(network.pairs(2), 0);
    assert_eq!(network.enabled(), [], "nothing has changed");
    assert_eq!(network.pairs(1), 0);
    assert_eq!(network.enabled(), off(&[2, 3]));
    // Started anew, with what was notified of meanwhile.
    assert_eq!(network.pairs(2), 0);
    let requests: Vec<_> = network.requests.try_iter().map(|(number, _)| number).collect();
    let of = |wanted: u32| requests.iter().filter(|number| **number == wanted).count();
    assert_eq!((of(GET_VRING_BASE), of(SET_VRING_KICK), of(SET_VRING_ENABLE)), (2, 2, 4));
    assert!(network.losses.try_recv().is_err());
}

#[test]
fn pairs_that_cannot_be_are_refused() {
    let mut network = Network::start(of_network);
    network.served();
    network.enabled();
    for pairs in [0, 3, 0x8000, 0xffff] {
        assert_eq!(network.pairs(pairs), 1, "{pairs}");
    }
    assert_eq!(network.control(&[4, 0]), 1, "without a number");
    assert_eq!(network.control(&[4, 0, 1, 0, 0]), 1, "too long");
    // Of other features: RSS, hashes, an address, offloads.
    for command in [&[4, 1, 1, 0][..], &[4, 2, 1, 0], &[1, 1, 2, 0, 0, 0, 0, 1], &[5, 0, 0, 0, 0]] {
        assert_eq!(network.control(command), 1, "{command:?}");
    }
    assert_eq!(network.enabled(), []);
    assert!(!network.driver.interrupt.is_broken());
}

#[test]
fn pairs_without_rings_are_refused() {
    let (mut device, ram, losses) = made(None, of_network).unwrap();
    let mut driver = Driver::over(ram.guest_memory(), QUEUES + 1, 16);
    driver.queues[3].index = 3;
    let features = device.features();
    let mut activation = driver.fresh(features);
    activation.queues.retain(|queue| queue.index != 3);
    device.activate(activation).unwrap();
    driver.write(DATA, &[4, 0, 2, 0]);
    driver.queues[CONTROL].add(&[readable(DATA, 4), writable(DATA + 8, 1)]);
    driver.queues[CONTROL].kick();
    driver.wait_used(CONTROL);
    assert_eq!(driver.read(DATA + 8, 1), [1]);
    assert!(losses.try_recv().is_err());
}

#[test]
fn pairs_stay_over_a_pause_and_not_over_a_reset() {
    let mut network = Network::start(of_network);
    assert_eq!(network.pairs(2), 0);
    network.enabled();
    let states = network.device.pause();
    assert_eq!(states.iter().map(|(index, _)| *index).collect::<Vec<_>>(), [0, 1, 2, 3, 4]);
    assert_eq!(network.enabled(), off(&[0, 1, 2, 3]));
    network.device.resume();
    network.served();
    assert_eq!(network.enabled(), on(&[0, 1, 2, 3]));
    network.device.reset();
    network.enabled();
    let driver = Driver::over(network.driver.memory.clone(), QUEUES + 1, 16);
    network.driver = driver;
    network.driver.activate_all(&mut network.device);
    network.served();
    assert_eq!(network.enabled(), on(&[0, 1]));
}

/// The control queue is the third of a driver that does not use pairs (virtio 1.3, 5.1.2).
#[test]
fn a_driver_without_pairs_has_its_control_queue_after_the_first() {
    let (mut device, ram, losses) = made(None, of_network).unwrap();
    let driver = Driver::over(ram.guest_memory(), 3, 16);
    let features = device.features() & !MQ;
    driver.activate(&mut device, features);
    let (_, requests) = channel();
    let mut network = Network { device, driver, requests, losses, control: 2 };
    network.served();
    assert_eq!(network.pairs(1), 1, "not a feature of this driver");
    assert_eq!(network.device.pause().len(), 3);
}

#[test]
fn a_notification_that_is_trapped_reaches_the_control_queue() {
    let (mut device, ram, losses) = made(None, of_network).unwrap();
    let driver = Driver::over(ram.guest_memory(), QUEUES + 1, 16);
    let trapped = driver.queues[CONTROL].own_eventfd();
    driver.activate_all(&mut device);
    let (_, requests) = channel();
    let mut network = Network { device, driver, requests, losses, control: CONTROL };
    network.served();
    for pairs in [2, 1, 2] {
        network.driver.write(DATA, &[4, 0, pairs, 0]);
        network.driver.queues[CONTROL].add(&[readable(DATA, 4), writable(DATA + 8, 1)]);
        trapped.write(1).unwrap();
        network.driver.wait_used(CONTROL);
        assert_eq!(network.driver.read(DATA + 8, 1), [0]);
    }
}

#[test]
fn a_back_end_that_ends_while_pairs_are_enabled_costs_the_driver_its_device() {
    let mut network = Network::start(|request| {
        if request.number == SET_VRING_ENABLE && request.payload[0] == 3 {
            // The first ring of the pair is enabled by now.
            return Answer::Close;
        }
        of_network(request)
    });
    let began = Instant::now();
    assert_eq!(network.pairs(2), 1);
    network.driver.interrupt.wait_broken();
    let why = network.losses.recv_timeout(PATIENT).unwrap();
    assert!(why.contains("SET_VRING_ENABLE"), "{why}");
    network.device.pause();
    network.device.resume();
    network.device.reset();
    assert!(began.elapsed() < PATIENT);
    assert!(network.losses.try_recv().is_err(), "a loss is reported once");
}

/// A vCPU may be waiting for the answer.
#[test]
fn a_back_end_that_does_not_answer_is_not_waited_for_with_a_command() {
    let mut network = Network::start(|request| {
        if request.number == SET_VRING_ENABLE && request.payload[0] == 2 {
            return Answer::Send(Vec::new());
        }
        of_network(request)
    });
    assert_eq!(network.pairs(2), 1);
    let why = network.losses.recv_timeout(PATIENT).unwrap();
    assert!(why.contains("SET_VRING_ENABLE within 3000 ms"), "{why}");
}

/// Answers how many queues there are, and refuses those from `refused` on.
fn with_queues(said: u64, refused: u8) -> impl FnMut(&Request) -> Answer + Send + 'static {
    move |request| match request.number {
        GET_QUEUE_NUM => request.reply(&said.to_le_bytes()),
        SET_VRING_NUM if request.payload[0] >= refused => request.reply(&1_u64.to_le_bytes()),
        _ => of_network(request),
    }
}

#[test]
fn a_back_end_may_say_how_many_queues_or_how_many_pairs() {
    made(None, with_queues(4, 4)).unwrap();
    made(None, with_queues(u64::MAX, 4)).unwrap();
    // Pairs: it has the last queue.
    let (mut device, ram, losses) = made(None, with_queues(2, 4)).unwrap();
    let driver = Driver::over(ram.guest_memory(), QUEUES + 1, 16);
    driver.activate_all(&mut device);
    let (_, requests) = channel();
    let mut network = Network { device, driver, requests, losses, control: CONTROL };
    assert_eq!(network.pairs(2), 0);

    let refused = |answer: Box<dyn FnMut(&Request) -> Answer + Send>| {
        let error = made(None, answer).err().unwrap();
        assert!(matches!(error, VhostUserError::Queues { needed: 4, .. }), "{error}");
    };
    // Queues: it does not have the last.
    refused(Box::new(with_queues(2, 2)));
    refused(Box::new(with_queues(3, 3)));
    refused(Box::new(with_queues(1, 4)));
    refused(Box::new(with_queues(0, 4)));
    let protocol = |bits: u64| {
        move |request: &Request| match request.number {
            GET_PROTOCOL_FEATURES => request.reply(&bits.to_le_bytes()),
            _ => of_network(request),
        }
    };
    refused(Box::new(protocol(PROTOCOL_FEATURES & !PROTOCOL_MQ)));
    // One that does not confirm closes the connection instead.
    let mut inner = with_queues(2, 2);
    refused(Box::new(move |request| match request.number {
        GET_PROTOCOL_FEATURES => {
            request.reply(&(PROTOCOL_FEATURES & !PROTOCOL_REPLY_ACK).to_le_bytes())
        }
        SET_VRING_NUM => Answer::Close,
        _ => inner(request),
    }));
}

/// Starts a network with an MTU; gives what the back end was told of it.
fn told_mtu(
    answer: fn(&Request) -> Answer,
) -> (VhostUser, Driver, Receiver<u64>, Receiver<String>) {
    let (told, mtus) = channel();
    let recorded = move |request: &Request| {
        if request.number == NET_SET_MTU {
            let _ = told.send(u64::from_le_bytes(request.payload.as_slice().try_into().unwrap()));
        }
        answer(request)
    };
    let (mut device, ram, losses) = made(Some(1400), recorded).unwrap();
    let driver = Driver::over(ram.guest_memory(), QUEUES + 1, 16);
    driver.activate_all(&mut device);
    (device, driver, mtus, losses)
}

#[test]
fn the_back_end_is_told_of_an_mtu_that_it_can_take() {
    let (mut device, driver, mtus, _losses) = told_mtu(of_network);
    let mut config = [0; 12];
    device.read_config(0, &mut config);
    assert_eq!(config[10..], 1400_u16.to_le_bytes());
    assert_eq!(mtus.recv_timeout(PATIENT).unwrap(), 1400);
    device.pause();
    assert!(!driver.interrupt.is_broken());

    let (mut device, driver, mtus, _losses) = told_mtu(|request| match request.number {
        GET_PROTOCOL_FEATURES => request.reply(&PROTOCOL_FEATURES.to_le_bytes()),
        _ => of_network(request),
    });
    device.pause();
    assert!(!driver.interrupt.is_broken());
    assert!(mtus.try_recv().is_err(), "one that cannot");
}

#[test]
fn a_back_end_that_refuses_the_mtu_is_left() {
    let (_device, driver, _mtus, losses) = told_mtu(|request| match request.number {
        NET_SET_MTU => request.reply(&1_u64.to_le_bytes()),
        _ => of_network(request),
    });
    driver.interrupt.wait_broken();
    let why = losses.recv_timeout(PATIENT).unwrap();
    assert!(why.contains("refuses an MTU of 1400"), "{why}");
}

#[test]
fn the_configuration_of_the_back_end_is_read_if_it_has_one() {
    let with = |bytes: Vec<u8>| {
        move |request: &Request| match request.number {
            GET_FEATURES => request.reply(&(FEATURES | MTU | STATUS).to_le_bytes()),
            GET_CONFIG if bytes.is_empty() => request.reply(&[]),
            GET_CONFIG => request.reply(&[&request.payload[..12], &bytes].concat()),
            _ => of_network(request),
        }
    };
    let seen = |answer| {
        let (device, ..) = made(None, answer).unwrap();
        let mut config = [0; 12];
        device.read_config(0, &mut config);
        (
            device.features() & (MTU | STATUS),
            config[6],
            u16::from_le_bytes([config[10], config[11]]),
        )
    };
    let of_back_end = [0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0xdc, 5];
    assert_eq!(seen(with(of_back_end.to_vec())), (MTU | STATUS, 1, 1500));
    assert_eq!(seen(with(Vec::new())), (0, 0, 0));
}
