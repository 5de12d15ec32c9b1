// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests of vhost-user devices: with a back end that serves a file, and with some that are faulty.

#![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::os::unix::fs::FileExt as _;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use memory::{Backing, GuestRam, RamConfig, RamLayout, ZoneSpec};
use parking_lot::Mutex;
use tempfile::{NamedTempFile, TempDir};
use vm_memory::GuestAddressSpace;

use super::scripted::{
    Answer, FEATURES, GET_CONFIG, GET_FEATURES, GET_PROTOCOL_FEATURES, GET_QUEUE_NUM,
    GET_VRING_BASE, PROTOCOL_FEATURES, Request, back_end,
};
use super::session::Session;
use super::*;
use crate::virtio::test_driver::{DATA, Driver, readable, writable};
use crate::virtio::{StateError, VirtioDevice};

/// Longer than a back end without faults takes, on a busy machine.
pub(super) const PATIENT: Duration = Duration::from_secs(20);
/// Time limit for a back end that does not answer.
pub(super) const SHORT: Duration = Duration::from_millis(100);
const SECTOR: usize = 512;
const IMAGE_BYTES: u64 = 1 << 20;
const IN: u32 = 0;
const OUT: u32 = 1;

/// Guest memory of one region each for the zones.
pub(super) fn ram(zones: usize, shared: bool) -> GuestRam {
    let backing = if shared { Backing::Memfd } else { Backing::Anonymous };
    let zone = |index| {
        let backing = backing.clone();
        ZoneSpec { shared, backing, ..ZoneSpec::new(format!("z{index}"), 4 << 20) }
    };
    let config = RamConfig { zones: (0..zones).map(zone).collect() };
    GuestRam::new(&config, RamLayout::default()).unwrap()
}

pub(super) fn driver(ram: &GuestRam) -> Driver {
    Driver::over(ram.guest_memory(), 1, 16)
}

pub(super) fn config(num_queues: u16) -> VhostUserConfig {
    VhostUserConfig {
        id: "disk".to_owned(),
        kind: VhostUserKind::Block,
        socket: "/nowhere".into(),
        listens: false,
        num_queues,
        queue_size: 16,
    }
}

/// Records why back ends are lost.
pub(super) fn losses() -> (OnLost, Receiver<String>) {
    let (lost, losses) = channel();
    let lost = Mutex::new(lost);
    (Arc::new(move |why: &str| drop(lost.lock().send(why.to_owned()))), losses)
}

pub(super) fn over(
    connection: UnixStream,
    limit: Duration,
    ram: &GuestRam,
) -> Result<(VhostUser, Receiver<String>), VhostUserError> {
    let (on_lost, losses) = losses();
    let session = Session::over(connection, config(1).kind.needs(1), limit)?;
    let memory = ram.guest_memory();
    let device = VhostUser::over(session, config(1), &memory.memory(), on_lost)?;
    Ok((device, losses))
}

fn scripted(
    answer: impl FnMut(&Request) -> Answer + Send + 'static,
    limit: Duration,
) -> Result<(VhostUser, Receiver<String>), VhostUserError> {
    over(back_end(answer).unwrap(), limit, &ram(1, true))
}

/// A back end that serves a file.
struct Served {
    image: NamedTempFile,
    folder: TempDir,
    daemon: Option<JoinHandle<()>>,
}

impl Served {
    fn start(queues: usize) -> Self {
        let image = NamedTempFile::new().unwrap();
        image.as_file().set_len(IMAGE_BYTES).unwrap();
        let folder = TempDir::new().unwrap();
        let (socket, path) = (folder.path().join("s"), image.path().to_owned());
        let daemon = std::thread::spawn(move || {
            vhost_user_disk::serve(&socket, &path, queues).unwrap();
        });
        Self { image, folder, daemon: Some(daemon) }
    }

    fn connect(&self, ram: &GuestRam, num_queues: u16) -> Result<VhostUser, VhostUserError> {
        let config = VhostUserConfig { socket: self.folder.path().join("s"), ..config(num_queues) };
        VhostUser::connect(config, &ram.guest_memory().memory(), losses().0)
    }

    fn bytes(&self, sector: u64) -> [u8; SECTOR] {
        let mut bytes = [0; SECTOR];
        self.image.as_file().read_exact_at(&mut bytes, sector * SECTOR as u64).unwrap();
        bytes
    }

    /// Waits until it has ended.
    fn end(mut self) {
        self.daemon.take().unwrap().join().unwrap();
    }
}

/// Where the parts of a request are besides its data.
const HEADER: u64 = DATA - 0x100;
const STATUS: u64 = DATA - 0x80;

/// Makes a request available.
fn put_request(driver: &mut Driver, kind: u32, sector: u64) {
    let (header, status) = (HEADER, STATUS);
    let mut bytes = [0; 16];
    bytes[..4].copy_from_slice(&kind.to_le_bytes());
    bytes[8..].copy_from_slice(&sector.to_le_bytes());
    driver.write(header, &bytes);
    driver.write(status, &[0xff]);
    let len = u32::try_from(SECTOR).unwrap();
    let data = if kind == IN { writable(DATA, len) } else { readable(DATA, len) };
    driver.queues[0].add(&[readable(header, 16), data, writable(status, 1)]);
}

/// Waits for the answer; returns its status.
fn answered(driver: &mut Driver) -> u8 {
    driver.wait_used(0);
    driver.read(STATUS, 1)[0]
}

/// Has a request carried out; returns its status.
fn request(driver: &mut Driver, kind: u32, sector: u64) -> u8 {
    put_request(driver, kind, sector);
    driver.queues[0].kick();
    answered(driver)
}

#[test]
fn a_back_end_reads_and_writes_for_the_guest() {
    let (ram, served) = (ram(1, true), Served::start(2));
    let mut device = served.connect(&ram, 1).unwrap();
    assert_eq!(device.features() & 1 << 11, 0, "the configuration cannot be written");
    let mut capacity = [0; 8];
    device.read_config(0, &mut capacity);
    assert_eq!(u64::from_le_bytes(capacity), IMAGE_BYTES / SECTOR as u64);

    let mut driver = driver(&ram);
    driver.activate_all(&mut device);
    driver.write(DATA, &[7; SECTOR]);
    assert_eq!(request(&mut driver, OUT, 3), 0);
    assert_eq!(served.bytes(3), [7; SECTOR]);
    driver.write(DATA, &[0; SECTOR]);
    assert_eq!(request(&mut driver, IN, 3), 0);
    assert_eq!(driver.read(DATA, SECTOR), [7; SECTOR]);
    // A request that the back end cannot carry out.
    assert_ne!(request(&mut driver, OUT, IMAGE_BYTES), 0);
    drop(device);
    served.end();
}

#[test]
fn paused_and_reset_queues_are_not_served_and_continue() {
    let (ram, served) = (ram(1, true), Served::start(1));
    let mut device = served.connect(&ram, 1).unwrap();
    let mut driver = driver(&ram);
    driver.activate_all(&mut device);
    for round in 1..=3_u8 {
        driver.write(DATA, &[round; SECTOR]);
        assert_eq!(request(&mut driver, OUT, round.into()), 0);
        let states = device.pause();
        assert_eq!((states[0].1.next_avail, states[0].1.next_used), (round.into(), round.into()));
        assert_eq!(device.pause(), states);
        device.resume();
    }
    device.pause();
    driver.write(DATA, &[9; SECTOR]);
    let used = driver.queues[0].used_index();
    driver.queues[0].add(&[readable(DATA, 16), writable(DATA, 1)]);
    driver.queues[0].kick();
    assert_eq!(driver.queues[0].used_index(), used);
    device.reset();

    // As after a reboot of the guest, with the same back end.
    let mut driver = super::tests::driver(&ram);
    device.resume();
    driver.activate_all(&mut device);
    assert_eq!(request(&mut driver, IN, 2), 0);
    assert_eq!(driver.read(DATA, SECTOR), [2; SECTOR]);
    assert_eq!(driver.queues[0].used_index(), 1);
    assert!(!driver.interrupt.is_broken());
}

/// Firmware that cannot reach the BAR notifies by configuration space, which the kernel does not take.
#[test]
fn a_notification_that_is_trapped_reaches_the_back_end() {
    let (ram, served) = (ram(1, true), Served::start(1));
    let mut device = served.connect(&ram, 1).unwrap();
    let mut driver = driver(&ram);
    let trapped = driver.queues[0].own_eventfd();
    driver.activate_all(&mut device);
    assert_eq!(request(&mut driver, IN, 0), 0);
    for round in 1..=20_u8 {
        driver.write(DATA, &[round; SECTOR]);
        put_request(&mut driver, OUT, 5);
        trapped.write(1).unwrap();
        assert_eq!(answered(&mut driver), 0);
        assert_eq!(served.bytes(5), [round; SECTOR]);
        // The usual ones still arrive.
        assert_eq!(request(&mut driver, IN, 5), 0);
    }
    assert!(!driver.interrupt.is_broken());
}

#[test]
fn guest_memory_of_many_regions_goes_region_by_region() {
    let (ram, served) = (ram(12, true), Served::start(1));
    let mut device = served.connect(&ram, 1).unwrap();
    let mut driver = driver(&ram);
    driver.activate_all(&mut device);
    assert_eq!(request(&mut driver, IN, 0), 0);
}

#[test]
fn more_regions_than_the_back_end_takes_are_refused() {
    let answer = |request: &Request| match request.number {
        GET_PROTOCOL_FEATURES => request.reply(&(PROTOCOL_FEATURES & !(1 << 15)).to_le_bytes()),
        _ => request.usual(),
    };
    let error = over(back_end(answer).unwrap(), PATIENT, &ram(9, true)).err().unwrap();
    assert!(matches!(error, VhostUserError::Regions { offered: 8, needed: 9 }), "{error}");
}

#[test]
fn private_memory_is_refused_by_name() {
    let connection = back_end(Request::usual).unwrap();
    let error = over(connection, PATIENT, &ram(1, false)).err().unwrap().to_string();
    assert!(error.contains("shared=on"), "{error}");
}

#[test]
fn back_ends_that_lack_something_are_refused_by_name() {
    type Answers = fn(&Request) -> Answer;
    let cases: [(Answers, &str); 5] = [
        (
            |request| match request.number {
                GET_QUEUE_NUM => request.reply(&0_u64.to_le_bytes()),
                _ => request.usual(),
            },
            "0 queues at most, and the device has 1",
        ),
        (
            |request| match request.number {
                GET_FEATURES => request.reply(&(FEATURES & !(1 << 32)).to_le_bytes()),
                _ => request.usual(),
            },
            "VIRTIO_F_VERSION_1",
        ),
        (
            |request| match request.number {
                GET_FEATURES => request.reply(&(FEATURES & !(1 << 30)).to_le_bytes()),
                _ => request.usual(),
            },
            "VHOST_USER_F_PROTOCOL_FEATURES",
        ),
        (
            |request| match request.number {
                GET_PROTOCOL_FEATURES => {
                    request.reply(&(PROTOCOL_FEATURES & !(1 << 9)).to_le_bytes())
                }
                _ => request.usual(),
            },
            "VHOST_USER_PROTOCOL_F_CONFIG",
        ),
        (
            |request| match request.number {
                GET_CONFIG => {
                    let mut shorter = request.payload.clone();
                    shorter[4] = 20;
                    request.reply(&shorter)
                }
                _ => request.usual(),
            },
            "GET_CONFIG",
        ),
    ];
    for (answer, expected) in cases {
        let error = scripted(answer, PATIENT).err().unwrap().to_string();
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn a_back_end_that_serves_one_queue_has_no_device_with_two() {
    let (ram, served) = (ram(1, true), Served::start(1));
    let error = served.connect(&ram, 2).err().unwrap();
    assert!(matches!(error, VhostUserError::Queues { offered: 1, needed: 2 }), "{error}");
}

#[test]
fn an_answer_that_does_not_come_is_not_waited_for() {
    let started = Instant::now();
    let answer = |request: &Request| match request.number {
        GET_FEATURES => Answer::Send(vec![1, 0, 0]),
        _ => request.usual(),
    };
    let error = scripted(answer, SHORT).err().unwrap();
    assert!(matches!(error, VhostUserError::Stalled { request: "GET_FEATURES", .. }), "{error}");
    assert!(started.elapsed() < PATIENT);
}

#[test]
fn a_socket_at_which_nothing_listens_is_named() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("s");
    let error = crate::unix_connect::connect_within(&path, SHORT, &|| false).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::NotFound);
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    let error = crate::unix_connect::connect_within(&path, SHORT, &|| false).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionRefused);
}

#[test]
fn a_back_end_that_listens_a_moment_later_is_found() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("s");
    let there = path.clone();
    let connecting = std::thread::spawn(move || {
        crate::unix_connect::connect_within(&there, PATIENT, &|| false).unwrap()
    });
    let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
    listener.accept().unwrap();
    connecting.join().unwrap();
}

/// Faults of a back end at the request of this number, which the device survives: its driver is told.
fn lost_at(number: u32, fault: fn(&Request) -> Answer, expected: &str) {
    let ram = ram(1, true);
    let (enabled, is_enabled) = channel();
    let mut has_kick = false;
    let answer = move |request: &Request| {
        has_kick |= request.number == SET_VRING_KICK;
        // The last request of a start is the second that enables the ring.
        let is_last = request.number == SET_VRING_ENABLE && has_kick;
        if is_last {
            let _ = enabled.send(());
        }
        let is_meant = request.number == number && (is_last || number != SET_VRING_ENABLE);
        if is_meant { fault(request) } else { request.usual() }
    };
    let connection = back_end(answer).unwrap();
    let (mut device, losses) = over(connection, SHORT, &ram).unwrap();
    let driver = driver(&ram);
    driver.activate_all(&mut device);
    if number == GET_VRING_BASE {
        // A queue that is not served yet is not stopped.
        is_enabled.recv_timeout(PATIENT).unwrap();
        device.pause();
    }
    driver.interrupt.wait_broken();
    let why = losses.recv_timeout(PATIENT).unwrap();
    assert!(why.contains(expected), "{why}");
    // All that comes later is done at once, and fails.
    let started = Instant::now();
    device.pause();
    device.resume();
    device.reset();
    let driver = super::tests::driver(&ram);
    driver.activate_all(&mut device);
    driver.interrupt.wait_broken();
    device.reset();
    assert!(started.elapsed() < PATIENT);
    assert!(losses.try_recv().is_err(), "a loss is reported once");
}

pub(super) const SET_FEATURES: u32 = 2;
const SET_MEM_TABLE: u32 = 5;
pub(super) const SET_VRING_KICK: u32 = 12;
pub(super) const SET_VRING_CALL: u32 = 13;
pub(super) const SET_VRING_ENABLE: u32 = 18;

#[test]
fn the_driver_is_told_of_a_back_end_that_refuses() {
    let refuse = |request: &Request| request.reply(&1_u64.to_le_bytes());
    lost_at(SET_FEATURES, refuse, "SET_FEATURES");
    lost_at(SET_MEM_TABLE, refuse, "SET_MEM_TABLE");
    lost_at(SET_VRING_ENABLE, refuse, "SET_VRING_ENABLE");
}

#[test]
fn the_driver_is_told_of_a_back_end_that_stalls_or_closes() {
    lost_at(SET_MEM_TABLE, |_| Answer::Send(Vec::new()), "not answered SET_MEM_TABLE");
    lost_at(GET_VRING_BASE, |_| Answer::Send(Vec::new()), "not answered GET_VRING_BASE");
    lost_at(SET_VRING_ENABLE, |_| Answer::Close, "SET_VRING_ENABLE");
    lost_at(GET_VRING_BASE, |_| Answer::Close, "GET_VRING_BASE");
}

#[test]
fn the_driver_is_told_of_a_back_end_that_sends_what_was_not_asked_for() {
    let twice = |request: &Request| {
        let Answer::Send(mut bytes) = request.usual() else { return Answer::Close };
        bytes.extend(bytes.clone());
        Answer::Send(bytes)
    };
    lost_at(SET_VRING_ENABLE, twice, "not asked for");
}

#[test]
fn the_driver_is_told_when_the_back_end_ends() {
    let ram = ram(1, true);
    let (enabled, is_enabled) = channel();
    let answer = move |request: &Request| {
        if request.number == SET_VRING_ENABLE {
            let _ = enabled.send(());
        }
        request.usual()
    };
    let connection = back_end(answer).unwrap();
    let end = connection.try_clone().unwrap();
    let (mut device, losses) = over(connection, PATIENT, &ram).unwrap();
    let driver = driver(&ram);
    driver.activate_all(&mut device);
    is_enabled.recv_timeout(PATIENT).unwrap();
    end.shutdown(std::net::Shutdown::Both).unwrap();
    driver.interrupt.wait_broken();
    losses.recv_timeout(PATIENT).unwrap();
    device.reset();
}

/// What is done with a device, within a time limit.
fn in_time(what: impl FnOnce() + Send + 'static) {
    let (done, is_done) = channel();
    let thread = std::thread::spawn(move || {
        what();
        done.send(()).unwrap();
    });
    is_done.recv_timeout(PATIENT).expect("it ends");
    thread.join().unwrap();
}

/// Makes reads of an empty eventfd, and writes to a full one, block.
fn make_block(file: &std::fs::File, count: u64) {
    use std::io::{Read as _, Write as _};
    use std::os::fd::AsRawFd as _;
    let mut file = file;
    if count > 0 {
        // An error means that it is empty. Not for one that stays empty: each start passes it again, and it blocks by then.
        let _ = file.read(&mut [0; 8]);
        file.write_all(&count.to_ne_bytes()).unwrap();
    }
    // SAFETY: it changes no memory, and the file is open.
    assert_eq!(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETFL, 0) }, 0);
}

#[test]
fn a_back_end_cannot_make_its_eventfds_block_the_vmm() {
    let (enabled, is_enabled) = channel();
    let answer = move |request: &Request| {
        match (request.number, &request.file) {
            (SET_VRING_KICK, Some(file)) => make_block(file, u64::MAX - 1),
            (SET_VRING_CALL, Some(file)) => make_block(file, 0),
            (SET_VRING_KICK | SET_VRING_CALL, None) => return Answer::Close,
            (SET_VRING_ENABLE, _) => drop(enabled.send(())),
            _ => (),
        }
        request.usual()
    };
    let ram = ram(1, true);
    let (mut device, losses) = over(back_end(answer).unwrap(), PATIENT, &ram).unwrap();
    let driver = driver(&ram);
    in_time(move || {
        driver.activate_all(&mut device);
        is_enabled.recv_timeout(PATIENT).unwrap();
        for _ in 0..2 {
            device.pause();
            device.resume();
        }
        device.pause();
        assert!(!driver.interrupt.is_broken());
        device.reset();
    });
    assert!(losses.try_recv().is_err());
}

#[test]
fn each_start_signals_an_eventfd_of_its_own() {
    let (kick, kicks) = channel();
    let answer = move |request: &Request| {
        if let (SET_VRING_KICK, Some(file)) = (request.number, &request.file) {
            let _ = kick.send(file.try_clone().unwrap());
        }
        request.usual()
    };
    let ram = ram(1, true);
    let (mut device, _losses) = over(back_end(answer).unwrap(), PATIENT, &ram).unwrap();
    let driver = driver(&ram);
    driver.activate_all(&mut device);
    let count = |mut file: std::fs::File| {
        use std::io::Read as _;
        let mut count = [0; 8];
        file.read_exact(&mut count).map(|()| u64::from_ne_bytes(count))
    };
    let first = kicks.recv_timeout(PATIENT).unwrap();
    assert_eq!(count(first.try_clone().unwrap()).unwrap(), 1);
    device.pause();
    device.resume();
    // What the driver notifies of now reaches the second.
    let second = kicks.recv_timeout(PATIENT).unwrap();
    driver.queues[0].kick_anyway();
    assert!(count(first).is_err());
    assert_eq!(count(second).unwrap(), 2);
}

#[test]
fn a_back_end_that_answers_each_request_late_has_one_limit_for_all() {
    let late = Duration::from_millis(150);
    let answer = move |request: &Request| {
        if request.number == SET_FEATURES || request.number == SET_MEM_TABLE || request.number >= 8
        {
            // What it is slow in is all that is asked of it once the driver starts.
            if request.flags & 1 << 3 != 0 {
                std::thread::sleep(late);
            }
        }
        request.usual()
    };
    // None of them is late by itself, and together the eight of them are.
    let limit = 4 * late;
    let ram = ram(1, true);
    let (mut device, losses) = over(back_end(answer).unwrap(), limit, &ram).unwrap();
    let driver = driver(&ram);
    driver.activate_all(&mut device);
    let why = losses.recv_timeout(PATIENT).unwrap();
    assert!(why.contains("within 600 ms"), "{why}");
    driver.interrupt.wait_broken();
    device.reset();
}

#[test]
fn a_reset_waits_less_for_a_back_end_than_a_pause() {
    let (enabled, is_enabled) = channel();
    let answer = move |request: &Request| {
        if request.number == SET_VRING_ENABLE {
            let _ = enabled.send(());
        }
        match request.number {
            GET_VRING_BASE => Answer::Send(Vec::new()),
            _ => request.usual(),
        }
    };
    let ram = ram(1, true);
    let (mut device, losses) = over(back_end(answer).unwrap(), 10 * PATIENT, &ram).unwrap();
    driver(&ram).activate_all(&mut device);
    is_enabled.recv_timeout(PATIENT).unwrap();
    in_time(move || device.reset());
    let why = losses.try_recv().unwrap();
    assert!(why.contains("GET_VRING_BASE within 3000 ms"), "{why}");
}

#[test]
fn a_state_of_another_process_is_refused() {
    let (mut device, _) = scripted(Request::usual, PATIENT).unwrap();
    let state = device.save();
    assert_eq!(state.kind, "vhost-user-block");
    assert!(matches!(device.restore(&state), Err(StateError::Invalid { .. })));
}

#[test]
fn what_the_guest_sees_of_a_file_system() {
    let tag = "shared".to_owned();
    let kind = VhostUserKind::Fs { tag };
    assert_eq!((kind.device_id(), kind.queues(2), kind.needs(2).without_mq), (26, 3, 2));
    let config = kind.config(None, 2, 0);
    assert_eq!(&config[..7], b"shared\0");
    assert_eq!((config.len(), &config[36..]), (40, &[2, 0, 0, 0][..]));
    assert_eq!(kind.features(u64::MAX, 2, None), crate::virtio::RING_FEATURES);
}
