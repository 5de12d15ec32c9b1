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
    let config = kind.config(Vec::new(), 2);
    assert_eq!(config, [2, 0, 0, 0, 0, 9, 0, 0, 0, 0, 0x78, 5]);
    let (csum, mtu, mac, tso4, ufo) = (1, 1 << 3, 1 << 5, 1 << 11, 1 << 14);
    let all = kind.features(u64::MAX, 2);
    assert_eq!(all & (csum | mtu | mac | tso4 | ufo), csum | mtu | mac | tso4 | ufo);
    // Neither a control queue nor several pairs, announcements, or a status.
    assert_eq!(all & (1 << 16 | 1 << 17 | 1 << 21 | 1 << 22), 0);
    assert_eq!(kind.features(0, 2), mtu | mac, "what the VMM has itself");
    let without = |offloads| net(None, offloads).features(u64::MAX, 2);
    assert_eq!(without(NetOffloads { tso: false, ..ALL }) & (csum | tso4 | ufo), csum | ufo);
    assert_eq!(without(NetOffloads { ufo: false, ..ALL }) & (csum | tso4 | ufo), csum | tso4);
    assert_eq!(without(NetOffloads { csum: false, ..ALL }) & (csum | tso4 | ufo | mtu), 0);
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
