// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests of the requests of vhost-user back ends.

#![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::fs::File;
use std::io::{ErrorKind, Read as _, Write as _};
use std::os::fd::{AsRawFd as _, FromRawFd as _, IntoRawFd as _};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use vmm_sys_util::sock_ctrl_msg::ScmSocket as _;

use super::scripted::{
    Answer, GET_CONFIG, GET_PROTOCOL_FEATURES, PROTOCOL_FEATURES, Request, SET_BACKEND_REQ_FD,
    back_end,
};
use super::tests::{PATIENT, SET_VRING_ENABLE, SHORT, driver, over, ram};
use super::*;
use crate::virtio::VirtioDevice as _;
use crate::virtio::test_driver::Driver;

const PROTOCOL_BACKEND_REQ: u64 = 1 << 5;
const PROTOCOL_CONFIG: u64 = 1 << 9;
const CONFIG_CHANGE: u32 = 2;
const NEED_REPLY: u32 = 1 | 1 << 3;

fn message(number: u32, flags: u32, payload: &[u8]) -> Vec<u8> {
    let len_bytes = u32::try_from(payload.len()).unwrap();
    let header = [number, flags, len_bytes];
    header.iter().flat_map(|word| word.to_le_bytes()).chain(payload.iter().copied()).collect()
}

/// The answer to a request.
fn answer(channel: &mut UnixStream) -> (u32, u64) {
    let (mut header, mut value) = ([0; 12], [0; 8]);
    channel.read_exact(&mut header).unwrap();
    channel.read_exact(&mut value).unwrap();
    assert_eq!(header[4..], [5, 0, 0, 0, 8, 0, 0, 0]);
    let number = u32::from_le_bytes(header[..4].try_into().unwrap());
    (number, u64::from_le_bytes(value))
}

/// A disk with a back end that makes requests.
struct Disk {
    device: VhostUser,
    driver: Driver,
    channel: UnixStream,
    losses: Receiver<String>,
    /// Sectors that the back end says it has, and each time that it is asked.
    sectors: Arc<Mutex<u64>>,
    reads: Receiver<()>,
}

impl Disk {
    /// Whose driver is to be started.
    fn new(
        mut other: impl FnMut(&Request, Option<&UnixStream>) -> Option<Answer> + Send + 'static,
    ) -> Self {
        let (sent, channels) = channel();
        let sectors = Arc::new(Mutex::new(8_u64));
        let said = Arc::clone(&sectors);
        let mut own = None;
        let (read, reads) = channel();
        let answer = move |request: &Request| {
            if let Some(answer) = other(request, own.as_ref()) {
                return answer;
            }
            match (request.number, &request.file) {
                (GET_PROTOCOL_FEATURES, _) => {
                    request.reply(&(PROTOCOL_FEATURES | PROTOCOL_BACKEND_REQ).to_le_bytes())
                }
                (SET_BACKEND_REQ_FD, Some(file)) => {
                    let fd = file.try_clone().unwrap().into_raw_fd();
                    // SAFETY: nothing else has the descriptor.
                    let channel = unsafe { UnixStream::from_raw_fd(fd) };
                    own = Some(channel.try_clone().unwrap());
                    let _ = sent.send(channel);
                    request.usual()
                }
                (GET_CONFIG, _) => {
                    let _ = read.send(());
                    let mut payload = request.payload.clone();
                    payload[12..20].copy_from_slice(&said.lock().to_le_bytes());
                    request.reply(&payload)
                }
                _ => request.usual(),
            }
        };
        let ram = ram(1, true);
        let (device, losses) = over(back_end(answer).unwrap(), PATIENT, &ram).unwrap();
        let channel = channels.recv_timeout(PATIENT).unwrap();
        channel.set_read_timeout(Some(PATIENT)).unwrap();
        Self { device, driver: driver(&ram), channel, losses, sectors, reads }
    }

    fn started() -> Self {
        let mut disk = Self::new(|_, _| None);
        disk.driver.activate_all(&mut disk.device);
        disk
    }

    fn send(&mut self, bytes: &[u8]) {
        self.channel.write_all(bytes).unwrap();
    }

    fn capacity(&self) -> u64 {
        let mut sectors = [0; 8];
        self.device.read_config(0, &mut sectors);
        u64::from_le_bytes(sectors)
    }

    /// Changes what the back end says, and waits until the driver is told.
    fn resize(&mut self, sectors: u64) {
        let before = self.driver.interrupt.config_changes();
        *self.sectors.lock() = sectors;
        self.send(&message(CONFIG_CHANGE, NEED_REPLY, &[]));
        assert_eq!(answer(&mut self.channel), (CONFIG_CHANGE, 0));
        self.driver.interrupt.wait_config_change(before);
        assert_eq!(self.capacity(), sectors);
    }
}

#[test]
fn the_driver_is_told_of_a_configuration_that_has_changed() {
    let mut disk = Disk::started();
    assert_eq!(disk.capacity(), 8);
    disk.resize(16);
    // One that does not want an answer.
    *disk.sectors.lock() = 24;
    disk.send(&message(CONFIG_CHANGE, 1, &[]));
    disk.driver.interrupt.wait_config_change(1);
    assert_eq!(disk.capacity(), 24);
    // The same again is nothing to be told of.
    while disk.reads.try_recv().is_ok() {}
    disk.send(&message(CONFIG_CHANGE, NEED_REPLY, &[]));
    answer(&mut disk.channel);
    disk.reads.recv_timeout(PATIENT).unwrap();
    disk.resize(32);
    assert_eq!(disk.driver.interrupt.config_changes(), 3);
    assert!(disk.losses.try_recv().is_err());
}

#[test]
fn a_change_before_the_driver_or_in_a_pause_is_told_later() {
    let mut disk = Disk::new(|_, _| None);
    *disk.sectors.lock() = 16;
    disk.send(&message(CONFIG_CHANGE, NEED_REPLY, &[]));
    assert_eq!(answer(&mut disk.channel), (CONFIG_CHANGE, 0), "at once");
    disk.driver.activate_all(&mut disk.device);
    disk.driver.interrupt.wait_config_change(0);
    assert_eq!(disk.capacity(), 16);
    disk.device.pause();
    *disk.sectors.lock() = 24;
    disk.send(&message(CONFIG_CHANGE, NEED_REPLY, &[]));
    assert_eq!(answer(&mut disk.channel), (CONFIG_CHANGE, 0));
    assert_eq!((disk.driver.interrupt.config_changes(), disk.capacity()), (1, 16));
    disk.device.resume();
    disk.driver.interrupt.wait_config_change(1);
    assert_eq!(disk.capacity(), 24);
}

/// A back end that waits for an answer while it is asked for something would wait without an end.
#[test]
fn a_request_is_answered_while_another_is_waited_for() {
    let (answered, is_answered) = channel();
    let mut has_asked = false;
    let mut disk = Disk::new(move |request, channel| {
        let mut channel = channel?;
        // Once: later ones would read answers beside the test.
        if request.number == SET_VRING_ENABLE && !std::mem::replace(&mut has_asked, true) {
            channel.write_all(&message(CONFIG_CHANGE, NEED_REPLY, &[])).unwrap();
            assert_eq!(answer(&mut channel.try_clone().unwrap()), (CONFIG_CHANGE, 0));
            let _ = answered.send(());
        }
        None
    });
    disk.driver.activate_all(&mut disk.device);
    // There is one reader of answers at a time.
    is_answered.recv_timeout(PATIENT).unwrap();
    disk.resize(16);
    disk.device.pause();
    assert!(disk.losses.try_recv().is_err());
}

#[test]
fn other_requests_are_refused() {
    let mut disk = Disk::started();
    // Of an IOTLB, of memory of the host, of objects, of shared memory; and what does not exist.
    for number in [1, 3, 4, 5, 6, 7, 8, 9, 10, 0, 99, u32::MAX] {
        disk.send(&message(number, NEED_REPLY, &[7; 40]));
        assert_eq!(answer(&mut disk.channel), (number, 1));
    }
    disk.send(&message(CONFIG_CHANGE, NEED_REPLY, &[0; 8]));
    assert_eq!(answer(&mut disk.channel), (CONFIG_CHANGE, 1), "it has no payload");
    disk.resize(16);
    assert_eq!(disk.driver.interrupt.config_changes(), 1);
}

#[test]
fn what_is_no_request_ends_the_channel_and_not_the_device() {
    let cases = [
        message(CONFIG_CHANGE, 2, &[]),
        message(CONFIG_CHANGE, 1 | 1 << 2, &[]),
        [2_u32, 1, 4097].iter().flat_map(|word| word.to_le_bytes()).collect(),
        [2_u32, 1, u32::MAX].iter().flat_map(|word| word.to_le_bytes()).collect(),
        vec![0xff; 12],
    ];
    for bytes in cases {
        let mut disk = Disk::started();
        disk.send(&bytes);
        let ended = disk.channel.read(&mut [0]);
        assert_eq!(ended.unwrap(), 0, "{bytes:?}");
        disk.device.pause();
        disk.device.resume();
        disk.device.pause();
        assert!(!disk.driver.interrupt.is_broken() && disk.losses.try_recv().is_err());
    }
}

#[test]
fn half_a_request_keeps_nothing_waiting() {
    for bytes in [&message(CONFIG_CHANGE, 1, &[])[..7], &message(9, 1, &[0; 100])[..50]] {
        let mut disk = Disk::started();
        disk.send(bytes);
        let began = Instant::now();
        disk.device.pause();
        disk.device.resume();
        disk.device.reset();
        drop(disk);
        assert!(began.elapsed() < PATIENT);
    }
}

/// Neither the processor nor the guest is flooded, and the device ends at once.
#[test]
fn a_flood_of_requests_is_held_back() {
    let mut disk = Disk::started();
    disk.channel.set_write_timeout(Some(SHORT)).unwrap();
    let many = message(CONFIG_CHANGE, NEED_REPLY, &[]).repeat(100);
    let mut flood = (0..10_000).map(|round| {
        *disk.sectors.lock() = round;
        disk.channel.write_all(&many)
    });
    let error = flood.find_map(Result::err).expect("it is not read as fast as it comes");
    assert!(matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut), "{error}");
    // Those of a period or two.
    let told = disk.driver.interrupt.config_changes();
    assert!((1..=100).contains(&told), "{told}");
    let began = Instant::now();
    disk.device.pause();
    assert!(!disk.driver.interrupt.is_broken());
    disk.device.reset();
    let Disk { device, channel, .. } = disk;
    drop(device);
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
    drop(channel);
}

#[test]
fn descriptors_are_not_received() {
    let mut disk = Disk::started();
    let mut ends = [0; 2];
    // SAFETY: there is room for two descriptors.
    assert_eq!(unsafe { libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC) }, 0);
    // SAFETY: they were just made, and nothing else has them.
    let (mut read, write) = unsafe { (File::from_raw_fd(ends[0]), File::from_raw_fd(ends[1])) };
    let bytes = message(3, NEED_REPLY, &[]);
    disk.channel.send_with_fd(&bytes[..], write.as_raw_fd()).unwrap();
    drop(write);
    assert_eq!(answer(&mut disk.channel), (3, 1));
    assert_eq!(read.read(&mut [0]).unwrap(), 0, "nothing has the other end");
}

#[test]
fn a_channel_is_of_use_only_with_a_configuration() {
    let (sent, channels) = channel();
    let answer = move |request: &Request| {
        if request.number == SET_BACKEND_REQ_FD {
            let _ = sent.send(());
        }
        match request.number {
            GET_PROTOCOL_FEATURES => {
                let bits = (PROTOCOL_FEATURES | PROTOCOL_BACKEND_REQ) & !PROTOCOL_CONFIG;
                request.reply(&bits.to_le_bytes())
            }
            _ => request.usual(),
        }
    };
    let kind = VhostUserKind::Generic { device_id: 26, queue_sizes: vec![16] };
    super::session::Session::over(back_end(answer).unwrap(), kind.needs(0), PATIENT).unwrap();
    assert!(channels.try_recv().is_err());
}
