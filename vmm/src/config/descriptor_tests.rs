// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Descriptors in configurations: how long they live, and where those of a request go.

#![expect(clippy::unwrap_used, reason = "a test that cannot unwrap has failed")]

use std::io::Read as _;
use std::os::unix::net::UnixStream;

use serde_json::json;

use super::*;
use crate::config::{Family as _, ReceiveMigrationData, RestoreConfig};

#[test]
fn they_lose_their_numbers_in_json() {
    let fds = ConfigFds::inherited([7, 9]);
    assert_eq!(serde_json::to_string(&fds).unwrap(), "[-1,-1]");
    let read = serde_json::from_str::<ConfigFds>("[3]").unwrap();
    assert_eq!(read, ConfigFds::inherited([-1]));
    assert_eq!(serde_json::to_string(&ConfigFd::inherited(7)).unwrap(), "-1");
    assert_eq!(serde_json::from_str::<ConfigFd>("7").unwrap(), ConfigFd::ELSEWHERE);
    for bad in [-1, 0, 2] {
        assert!(ConfigFd::inherited(bad).check().is_err(), "{bad}");
        assert!(bad >= 0 || ConfigFd::inherited(bad).duplicate().is_err());
    }
    assert_eq!(ConfigFd::inherited(3).check(), Ok(()));
}

#[test]
fn one_that_was_received_is_closed_with_the_last_configuration() {
    let (ours, mut other) = UnixStream::pair().unwrap();
    let fd = ConfigFd::received(ours.into());
    assert_eq!(fd.check(), Ok(()));
    let second = fd.clone();
    drop(fd.duplicate().unwrap());
    drop(fd);
    other.set_nonblocking(true).unwrap();
    let kind = other.read(&mut [0]).unwrap_err().kind();
    assert_eq!(kind, std::io::ErrorKind::WouldBlock, "a configuration still names it");
    drop(second);
    assert_eq!(other.read(&mut [0]).unwrap(), 0, "it is held no more");
}

fn config() -> VmConfig {
    serde_json::from_value(json!({
        "payload": {"kernel": "/k"},
        "cpus": {"boot_vcpus": 2, "max_vcpus": 2},
        "net": [{"id": "lan", "fds": [-1, -1], "num_queues": 4}, {"id": "wan", "tap": "tap7"}],
        "devices": [{"id": "gpu", "path": "/sys/gpu"}]}))
    .unwrap()
}

#[test]
fn what_a_request_brings_goes_to_its_devices_in_order() {
    let mut restore_config: RestoreConfig = serde_json::from_value(json!({
        "source_url": "file:///s",
        "net_fds": [{"id": "wan", "num_fds": 1}, {"id": "lan", "num_fds": 2, "fds": null}],
        "vfio_fds": [{"id": "gpu", "fd": -1}]}))
    .unwrap();
    let mut fds = restore_config.arriving_fds();
    assert_eq!(fds.expected(), 5);
    let sent: Vec<_> = [11, 12, 13, 14, 15].map(ConfigFd::inherited).into();
    fds.fill(sent.clone());
    assert_eq!(fds.in_order(), sent);
    restore_config.set_arriving_fds(fds);
    let mut config = config();
    restore_config.arriving_fds().place(&mut config).unwrap();
    let config = config.complete().unwrap();
    let nets = config.net.as_ref().unwrap();
    assert_eq!(nets[0].fds, Some(ConfigFds::inherited([12, 13])));
    assert_eq!((&nets[1].fds, &nets[1].tap), (&Some(ConfigFds::inherited([11])), &None));
    let device = &config.devices.as_ref().unwrap()[0];
    assert_eq!((&device.fd, &device.path), (&Some(ConfigFd::inherited(14)), &None));
    let platform = config.platform.as_ref().unwrap();
    assert_eq!((platform.iommufd, &platform.iommufd_fd), (true, &Some(ConfigFd::inherited(15))));
}

#[test]
fn option_strings() {
    let text =
        "source_url=file:///s,net_fds=[net1@[23,24],net2@[25]],vfio_fds=[gpu@5],iommufd_fd=6";
    let restore = RestoreConfig::parse(text).unwrap();
    let numbers: Vec<_> = restore.arriving_fds().in_order().iter().map(ConfigFd::number).collect();
    assert_eq!(numbers, [23, 24, 25, 5, 6]);
    assert_eq!(restore.net_fds.as_ref().unwrap()[0].num_fds, 2);
    assert_eq!(RestoreConfig::parse(&restore.print()).unwrap(), restore);
    let text = "receiver_url=unix:/s,net_fds=[net1@[23]]";
    let receive = ReceiveMigrationData::parse(text).unwrap();
    assert_eq!(receive.arriving_fds().expected(), 1);
    for bad in ["net_fds=[a]", "net_fds=[a@x]", "vfio_fds=[a@[3]]", "iommufd_fd=x"] {
        assert!(RestoreConfig::parse(&format!("source_url=file:///s,{bad}")).is_err(), "{bad}");
    }
}

#[test]
fn devices_that_are_not_there_are_refused_by_name() {
    let refused = |nets: serde_json::Value| {
        let nets = serde_json::from_value(nets).unwrap();
        let fds = ArrivingFds { nets, ..ArrivingFds::default() };
        fds.place(&mut config()).unwrap_err().to_string()
    };
    let error = refused(json!([{"id": "gpu", "num_fds": 1}]));
    assert!(error.contains("gpu") && error.contains("no network device"), "{error}");
    let error = refused(json!([{"id": "lan", "num_fds": 1}, {"id": "lan", "num_fds": 1}]));
    assert!(error.contains("twice"), "{error}");
    // A guest that had descriptors elsewhere, and gets none here.
    let error = config().complete().unwrap_err().to_string();
    assert!(error.contains("cannot be passed in JSON"), "{error}");
}
