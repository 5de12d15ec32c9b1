// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests of network devices of vhost-user, and of back ends that connect to the VMM.

#![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::sync::mpsc::channel;

use tempfile::TempDir;
use vm_memory::GuestAddressSpace as _;

use super::scripted::{FEATURES, GET_QUEUE_NUM, Request, back_end};
use super::session::Session;
use super::tests::{PATIENT, SET_FEATURES, SHORT, config, losses, ram};
use super::*;
use crate::virtio::VirtioDevice as _;
use crate::virtio::test_driver::Driver;

fn net(mtu: Option<u16>, offloads: NetOffloads) -> VhostUserKind {
    VhostUserKind::Net { mac: [2, 0, 0, 0, 0, 9], mtu, offloads }
}

const ALL: NetOffloads = NetOffloads { csum: true, tso: true, ufo: true };

#[test]
fn what_the_guest_sees_of_a_network() {
    let kind = net(Some(1400), ALL);
    assert_eq!((kind.device_id(), kind.queues(2)), (1, 2));
    let (csum, mtu, mac, tso4, ufo) = (1, 1 << 3, 1 << 5, 1 << 11, 1 << 14);
    let (status, control, announce, pairs) = (1 << 16, 1 << 17, 1 << 21, 1 << 22);
    let all = kind.features(u64::MAX, 2, None);
    let expected = csum | mtu | mac | tso4 | ufo | status | control | announce;
    assert_eq!(all & (expected | pairs), expected, "one pair");
    assert_eq!(kind.queue_sizes(2, 16, all), [16; 3]);
    let config = kind.config(None, 2, all);
    assert_eq!(config, [2, 0, 0, 0, 0, 9, 1, 0, 0, 0, 0x78, 5]);
    let more = kind.features(u64::MAX, 6, None);
    assert_eq!(more & pairs, pairs);
    assert_eq!(kind.queue_sizes(6, 16, more), [16; 7]);
    assert_eq!(kind.config(None, 6, more)[8..10], [3, 0]);

    assert_eq!(kind.features(0, 2, None), mtu | mac, "what the VMM has itself");
    let without = kind.features(!control, 6, None);
    assert_eq!(without & (status | control | announce | pairs), 0, "all need a control queue");
    assert_eq!(kind.queue_sizes(6, 16, without), [16; 6]);
    assert_eq!(kind.config(None, 6, without)[6..10], [0; 4]);
    // All that the driver changes by the control queue but what the VMM knows.
    assert_eq!(all & (1 << 2 | 1 << 18 | 1 << 19 | 1 << 20 | 1 << 23), 0);
    let without = |offloads| net(None, offloads).features(u64::MAX, 2, None);
    assert_eq!(without(NetOffloads { tso: false, ..ALL }) & (csum | tso4 | ufo), csum | ufo);
    assert_eq!(without(NetOffloads { ufo: false, ..ALL }) & (csum | tso4 | ufo), csum | tso4);
    assert_eq!(without(NetOffloads { csum: false, ..ALL }) & (csum | tso4 | ufo | mtu), 0);
}

#[test]
fn what_the_back_end_has_of_a_networks_configuration() {
    let (mtu, status) = (1 << 3, 1 << 16);
    let config = |link: u8, mtu: u16| [&[7; 6][..], &[link, 0, 9, 0], &mtu.to_le_bytes()].concat();
    let seen = |own: Option<u16>, of_back_end: &[u8]| {
        let kind = net(own, ALL);
        let features = kind.features(mtu | status, 2, Some(of_back_end));
        let config = kind.config(Some(of_back_end), 2, features);
        assert_eq!(config[..6], [2, 0, 0, 0, 0, 9], "the address is the VMM's");
        assert_eq!(config[8..10], [0; 2], "the pairs, too");
        (features & mtu, config[6], u16::from_le_bytes([config[10], config[11]]))
    };
    assert_eq!(seen(None, &config(1, 9000)), (mtu, 1, 9000));
    assert_eq!(seen(None, &config(0, 9000)), (mtu, 0, 9000));
    assert_eq!(seen(Some(1400), &config(3, 9000)), (mtu, 1, 1400), "one that is configured");
    assert_eq!(seen(None, &config(1, 67)), (0, 1, 0), "none that can be");
    assert_eq!(net(None, ALL).features(mtu | status, 2, None) & (mtu | status), 0);
}

/// Back ends refuse features that they have not offered.
#[test]
fn the_back_end_of_a_network_is_told_of_its_own_features_and_not_asked_for_queues() {
    let (asked, requests) = channel();
    let answer = move |request: &Request| {
        let _ = asked.send((request.number, request.payload.clone()));
        request.usual()
    };
    let kind = net(Some(1400), ALL);
    let session =
        Session::over(back_end(answer).unwrap(), kind.needs(NET_QUEUES), PATIENT).unwrap();
    let ram = ram(1, true);
    let memory = ram.guest_memory();
    let config = VhostUserConfig { kind, num_queues: NET_QUEUES, ..config(1) };
    let mut device = VhostUser::over(session, config, &memory.memory(), losses().0).unwrap();
    assert_eq!(device.features() & (1 << 3 | 1 << 5), 1 << 3 | 1 << 5);
    let driver = Driver::over(ram.guest_memory(), 2, 16);
    driver.activate_all(&mut device);
    let features = loop {
        let (number, payload) = requests.recv_timeout(PATIENT).unwrap();
        assert_ne!(number, GET_QUEUE_NUM);
        if number == SET_FEATURES {
            break u64::from_le_bytes(payload.try_into().unwrap());
        }
    };
    assert_eq!(features & !FEATURES, 0, "{features:#x}");
    device.reset();
}

#[test]
fn a_back_end_may_come_to_a_socket_of_the_vmm() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("s");
    // What an earlier VMM left.
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    let there = path.clone();
    let waiting = std::thread::spawn(move || super::accept::accept(&there, PATIENT).unwrap());
    let mut theirs = crate::unix_connect::connect_within(&path, PATIENT, &|| false).unwrap();
    let mut ours = waiting.join().unwrap();
    std::io::Write::write_all(&mut theirs, b"x").unwrap();
    std::io::Read::read_exact(&mut ours, &mut [0]).unwrap();
    assert!(!path.exists(), "a socket that is not served");
    let error = super::accept::accept(&path, SHORT).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::TimedOut);
    assert!(!path.exists());
    // Neither one that is served nor another file is taken away.
    let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
    let error = super::accept::accept(&path, SHORT).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::AddrInUse);
    drop(listener);
    std::fs::remove_file(&path).unwrap();
    std::fs::write(&path, "a file").unwrap();
    super::accept::accept(&path, SHORT).unwrap_err();
    assert_eq!(std::fs::read(&path).unwrap(), b"a file");
}

/// A connection that was queued where the back end before had listened is closed with it.
#[test]
fn a_back_end_that_ends_when_it_is_connected_to_is_tried_again() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("s");
    let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
    let image = tempfile::NamedTempFile::new().unwrap();
    image.as_file().set_len(1 << 20).unwrap();
    let (there, file) = (path.clone(), image.path().to_owned());
    let daemon = std::thread::spawn(move || {
        for _ in 0..2 {
            drop(listener.accept().unwrap());
        }
        drop(listener);
        vhost_user_disk::serve(&there, &file, 1).unwrap();
    });
    let config = VhostUserConfig { socket: path, ..config(1) };
    let device =
        VhostUser::connect(config, &ram(1, true).guest_memory().memory(), losses().0).unwrap();
    drop(device);
    daemon.join().unwrap();
}
