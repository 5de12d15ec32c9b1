// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A socket device, seen from its driver and from the clients of the host.

#![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod hostile;
mod receiving;
mod sending;

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::time::Duration;

use tempfile::TempDir;

use super::muxer::LARGE_BUFFER_BYTES as BUFFER_BYTES;
use super::packet::{HEADER_BYTES, HOST_CID, Header, TYPE_STREAM, op};
use super::{Vsock, VsockConfig};
use crate::virtio::VirtioDevice;
use crate::virtio::test_driver::{BORDER, DATA, Driver, readable, writable};

const RECEIVE: usize = 0;
const TRANSMIT: usize = 1;
const EVENT: usize = 2;
const CID: u64 = 3;
/// Ports of guest and host in these tests.
const GUEST: u32 = 1024;
const HOST: u32 = 7;
/// What the guest says that it has room for.
const ROOM: u32 = 1 << 20;
/// A receive buffer of the guest, with its header.
const BUFFER: u32 = 4096 + 44;
const BUFFERS: u64 = DATA + (1 << 19);
/// Longer than anything here takes.
const PATIENCE: Duration = Duration::from_secs(20);

struct Fixture {
    driver: Driver,
    device: Vsock,
    dir: TempDir,
}

fn device(dir: &TempDir) -> Vsock {
    let path = dir.path().join("vsock");
    Vsock::new(VsockConfig { id: "vsock".to_owned(), cid: CID, path })
}

fn header(op: u16) -> Header {
    Header {
        src_cid: CID,
        dst_cid: HOST_CID,
        src_port: GUEST,
        dst_port: HOST,
        kind: TYPE_STREAM,
        op,
        buf_alloc: ROOM,
        ..Header::default()
    }
}

impl Fixture {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut device = device(&dir);
        device.socket().attach().unwrap();
        let driver = Driver::new(3, 64);
        driver.activate_all(&mut device);
        let mut fixture = Self { driver, device, dir };
        fixture.post(32);
        fixture
    }

    fn path(&self) -> PathBuf {
        self.dir.path().join("vsock")
    }

    fn port_path(&self, port: u32) -> PathBuf {
        self.dir.path().join(format!("vsock_{port}"))
    }

    /// Gives the device receive buffers.
    fn post(&mut self, count: usize) {
        let queue = &mut self.driver.queues[RECEIVE];
        for _ in 0..count {
            let at = BUFFERS + u64::from(BUFFER) * u64::from(queue.next_head());
            queue.add(&[writable(at, BUFFER)]);
        }
        queue.kick();
    }

    fn put(&mut self, header: Header, data: &[u8]) {
        self.driver.write(DATA, &header.to_bytes());
        self.driver.write(DATA + HEADER_BYTES as u64, data);
        let len_bytes = u32::try_from(HEADER_BYTES + data.len()).unwrap();
        self.driver.queues[TRANSMIT].add(&[readable(DATA, len_bytes)]);
        self.driver.queues[TRANSMIT].kick();
    }

    fn send_packet(&mut self, header: Header, data: &[u8]) {
        let len_bytes = u32::try_from(data.len()).unwrap();
        self.put(Header { len_bytes, ..header }, data);
        self.driver.wait_used(TRANSMIT);
    }

    fn send(&mut self, op: u16) {
        self.send_packet(header(op), &[]);
    }

    /// The next packet for the guest, whose buffer goes back to the device.
    fn receive(&mut self) -> (Header, Vec<u8>) {
        let (head, written) = self.driver.wait_used(RECEIVE);
        let at = BUFFERS + u64::from(BUFFER) * u64::from(head);
        let bytes = self.driver.read(at, usize::try_from(written).unwrap());
        let header = Header::parse(bytes[..HEADER_BYTES].try_into().unwrap());
        let data = bytes[HEADER_BYTES..].to_vec();
        assert_eq!(usize::try_from(header.len_bytes), Ok(data.len()));
        assert_eq!((header.src_cid, header.dst_cid), (HOST_CID, CID));
        self.post(1);
        (header, data)
    }

    fn receive_op(&mut self, op: u16) -> Header {
        let (header, _) = self.receive();
        assert_eq!(header.op, op, "{header:?}");
        header
    }

    /// Data until there are so many.
    fn receive_data(&mut self, len_bytes: usize) -> Vec<u8> {
        let mut all = Vec::new();
        while all.len() < len_bytes {
            let (header, data) = self.receive();
            assert_eq!(header.op, op::RW);
            all.extend(data);
        }
        all
    }

    /// A connection that the guest has opened, at the host.
    fn connected(&mut self) -> UnixStream {
        let listener = UnixListener::bind(self.port_path(HOST)).unwrap();
        self.send(op::REQUEST);
        let header = self.receive_op(op::RESPONSE);
        assert_eq!((header.src_port, header.dst_port), (HOST, GUEST));
        assert_eq!((header.buf_alloc, header.fwd_cnt), (BUFFER_BYTES, 0));
        let client = listener.accept().unwrap().0;
        client.set_read_timeout(Some(PATIENCE)).unwrap();
        client
    }

    /// A client of the host that asks for a port of the guest.
    fn client(&self, line: &str) -> UnixStream {
        let mut client = UnixStream::connect(self.path()).unwrap();
        client.set_read_timeout(Some(PATIENCE)).unwrap();
        client.write_all(line.as_bytes()).unwrap();
        client
    }
}

fn read(client: &mut UnixStream, len_bytes: usize) -> Vec<u8> {
    let mut bytes = vec![0; len_bytes];
    client.read_exact(&mut bytes).unwrap();
    bytes
}

fn pattern(len_bytes: usize) -> Vec<u8> {
    (0..len_bytes).map(|at| u8::try_from(at % 251).unwrap()).collect()
}

#[test]
fn a_guest_reaches_what_listens_beside_the_socket() {
    let mut fixture = Fixture::new();
    let mut client = fixture.connected();
    fixture.send_packet(header(op::RW), b"hello");
    assert_eq!(read(&mut client, 5), b"hello");
    fixture.driver.track_writes();
    client.write_all(b"world").unwrap();
    let (packet, data) = fixture.receive();
    assert_eq!((packet.op, data.as_slice()), (op::RW, b"world".as_slice()));
    assert_eq!(packet.fwd_cnt, 5, "the guest learns what the host took");
    assert!(fixture.driver.was_written(BUFFERS + u64::from(BUFFER)));
    drop(client);
    assert_eq!(fixture.receive_op(op::SHUTDOWN).flags, 3);
    fixture.send(op::RST);
    fixture.send(op::RW);
    fixture.receive_op(op::RST);
}

#[test]
fn a_client_reaches_the_port_that_it_names_and_is_told_its_own() {
    let mut fixture = Fixture::new();
    let mut client = fixture.client("CONNECT 52\nand data");
    let request = fixture.receive_op(op::REQUEST);
    assert_eq!(request.dst_port, 52);
    let answer = Header { src_port: 52, dst_port: request.src_port, ..header(op::RESPONSE) };
    fixture.send_packet(answer, &[]);
    let line = format!("OK {}\n", request.src_port);
    assert_eq!(read(&mut client, line.len()), line.as_bytes());
    assert_eq!(fixture.receive_data(8), b"and data");
    fixture.send_packet(Header { op: op::RW, ..answer }, &pattern(9000));
    assert_eq!(read(&mut client, 9000), pattern(9000));
    // Another one has another port.
    let _second = fixture.client("CONNECT 52\n");
    assert_ne!(fixture.receive_op(op::REQUEST).src_port, request.src_port);
}

#[test]
fn a_client_that_the_guest_refuses_is_closed() {
    let mut fixture = Fixture::new();
    let mut client = fixture.client("CONNECT 52\n");
    let request = fixture.receive_op(op::REQUEST);
    let answer = Header { src_port: 52, dst_port: request.src_port, ..header(op::RST) };
    fixture.send_packet(answer, &[]);
    assert_eq!(client.read(&mut [0; 8]).unwrap(), 0);
    let mut nonsense = fixture.client("GET / HTTP/1.1\r\n\r\n");
    // What it had sent is thrown away, which the kernel tells it.
    let end = nonsense.read(&mut [0; 8]);
    assert!(matches!(&end, Ok(0)) || end.is_err_and(|it| it.kind() == ErrorKind::ConnectionReset));
}

#[test]
fn ports_and_packets_without_a_connection_are_reset_once() {
    let mut fixture = Fixture::new();
    fixture.send(op::REQUEST);
    let packet = fixture.receive_op(op::RST);
    assert_eq!((packet.src_port, packet.dst_port), (HOST, GUEST));
    for op in [op::RESPONSE, op::RW, op::SHUTDOWN, op::CREDIT_UPDATE, op::CREDIT_REQUEST, 0, 99] {
        fixture.send(op);
        fixture.receive_op(op::RST);
    }
    fixture.send(op::RST);
    fixture.send_packet(Header { kind: 9, ..header(op::RST) }, &[]);
    fixture.send_packet(Header { src_cid: 4, ..header(op::REQUEST) }, &[]);
    fixture.send_packet(Header { dst_cid: 1, ..header(op::REQUEST) }, &[]);
    fixture.send_packet(Header { kind: 2, dst_port: 99, ..header(op::REQUEST) }, &[]);
    let packet = fixture.receive_op(op::RST);
    assert_eq!((packet.src_port, packet.kind), (99, 2), "the first of these that has an answer");
}

#[test]
fn data_come_as_far_as_the_guest_has_room_for_them() {
    let mut fixture = Fixture::new();
    let listener = UnixListener::bind(fixture.port_path(HOST)).unwrap();
    fixture.send_packet(Header { buf_alloc: 1000, ..header(op::REQUEST) }, &[]);
    fixture.receive_op(op::RESPONSE);
    let mut client = listener.accept().unwrap().0;
    client.write_all(&pattern(3000)).unwrap();
    let mut all = fixture.receive_data(1000);
    assert_eq!(all.len(), 1000);
    fixture.receive_op(op::CREDIT_REQUEST);
    // None yet, and so it is not asked again; a lie gives none either.
    for fwd_cnt in [0, 2000] {
        let update = Header { buf_alloc: 1000, fwd_cnt, ..header(op::CREDIT_UPDATE) };
        fixture.send_packet(update, &[]);
    }
    let update = Header { buf_alloc: 1500, fwd_cnt: 1000, ..header(op::CREDIT_UPDATE) };
    fixture.send_packet(update, &[]);
    all.extend(fixture.receive_data(1500));
    assert_eq!(all.len(), 2500);
    fixture.receive_op(op::CREDIT_REQUEST);
    let update = Header { buf_alloc: 1500, fwd_cnt: 2500, ..header(op::CREDIT_UPDATE) };
    fixture.send_packet(update, &[]);
    all.extend(fixture.receive_data(500));
    assert_eq!(all, pattern(3000));
}

#[test]
fn a_client_that_does_not_read_costs_its_buffer_and_no_more() {
    let mut fixture = Fixture::new();
    let client = fixture.connected();
    // More than the kernel and the device keep; the guest does not mind its credit.
    let data = pattern(4096);
    let mut last = header(op::CREDIT_UPDATE);
    for _ in 0..(64 << 20) / data.len() {
        fixture.send_packet(header(op::RW), &data);
        while last.op == op::CREDIT_UPDATE && fixture.driver.queues[RECEIVE].has_used() {
            last = fixture.receive().0;
        }
        if last.op != op::CREDIT_UPDATE {
            break;
        }
    }
    assert_eq!(last.op, op::RST);
    drop(client);
}

#[test]
fn a_guest_that_minds_its_credit_sends_all_that_it_has() {
    let mut fixture = Fixture::new();
    let mut client = fixture.connected();
    let all = pattern(1 << 20);
    let expected = all.clone();
    let reader = std::thread::spawn(move || read(&mut client, expected.len()) == expected);
    let mut taken = 0;
    for (index, chunk) in all.chunks(4096).enumerate() {
        let sent = u32::try_from(index * 4096).unwrap();
        while sent + 4096 - taken > BUFFER_BYTES {
            taken = fixture.receive_op(op::CREDIT_UPDATE).fwd_cnt;
        }
        fixture.send_packet(header(op::RW), chunk);
    }
    assert!(reader.join().unwrap());
}

#[test]
fn what_a_client_writes_arrives_whole_and_in_its_order_within_the_guest_s_credit() {
    const CREDIT: u32 = 100 << 10;
    let mut fixture = Fixture::new();
    let client = fixture.connected();
    let credit = |taken| Header { buf_alloc: CREDIT, fwd_cnt: taken, ..header(op::CREDIT_UPDATE) };
    fixture.send_packet(credit(0), &[]);
    let all = pattern(600_001);
    let expected = all.clone();
    // Pieces of any length, and at last the end.
    let writer = std::thread::spawn(move || {
        let (mut client, mut at, mut len) = (client, 0, 1);
        while at < all.len() {
            let end = all.len().min(at + len);
            client.write_all(&all[at..end]).unwrap();
            (at, len) = (end, len * 3 % 70_001 + 1);
        }
        client.shutdown(Shutdown::Write).unwrap();
        client
    });
    let (mut received, mut told) = (Vec::new(), 0_u32);
    loop {
        let (header, data) = fixture.receive();
        match header.op {
            op::RW => received.extend(data),
            // It is granted where the device asks, and no sooner.
            op::CREDIT_REQUEST => {
                told = u32::try_from(received.len()).unwrap();
                fixture.send_packet(credit(told), &[]);
            }
            op => {
                assert_eq!((op, header.flags), (op::SHUTDOWN, 2));
                break;
            }
        }
        assert!(received.len() - usize::try_from(told).unwrap() <= CREDIT as usize);
    }
    assert!(received == expected, "{} bytes", received.len());
    drop(writer.join().unwrap());
}

#[test]
fn one_direction_ends_and_the_other_goes_on() {
    let mut fixture = Fixture::new();
    let mut client = fixture.connected();
    client.write_all(b"last").unwrap();
    client.shutdown(Shutdown::Write).unwrap();
    assert_eq!(fixture.receive_data(4), b"last");
    assert_eq!(fixture.receive_op(op::SHUTDOWN).flags, 2);
    fixture.send_packet(header(op::RW), b"still");
    assert_eq!(read(&mut client, 5), b"still");
    fixture.send_packet(Header { flags: 2, ..header(op::SHUTDOWN) }, &[]);
    assert_eq!(client.read(&mut [0; 8]).unwrap(), 0, "the end of what the guest sends");
    assert_eq!(fixture.receive_op(op::SHUTDOWN).flags, 3);
    fixture.send_packet(Header { flags: 1, ..header(op::SHUTDOWN) }, &[]);
    fixture.receive_op(op::RST);
}

#[test]
fn a_guest_that_receives_no_more_is_sent_no_more() {
    let mut fixture = Fixture::new();
    let mut client = fixture.connected();
    fixture.send_packet(Header { flags: 1, ..header(op::SHUTDOWN) }, &[]);
    let broken = client.write(b"x").unwrap_err();
    assert_eq!(broken.kind(), ErrorKind::BrokenPipe);
    fixture.send_packet(header(op::RW), b"more");
    assert_eq!(read(&mut client, 4), b"more");
    // Against its promise.
    fixture.send_packet(Header { flags: 2, ..header(op::SHUTDOWN) }, &[]);
    fixture.receive_op(op::RST);
    fixture.send(op::RW);
    fixture.receive_op(op::RST);
}

#[test]
fn what_a_guest_sent_before_it_closed_is_still_to_be_read() {
    let mut fixture = Fixture::new();
    let mut client = fixture.connected();
    // As much as the kernel takes, and some of the device's buffer: the host has not taken that.
    let data = pattern(4096);
    let mut sent = 0_usize;
    let mut held = 0;
    while held < 4096 * 4 {
        fixture.send_packet(header(op::RW), &data);
        sent += data.len();
        fixture.send(op::CREDIT_REQUEST);
        let mut update = fixture.receive_op(op::CREDIT_UPDATE);
        while fixture.driver.queues[RECEIVE].has_used() {
            update = fixture.receive_op(op::CREDIT_UPDATE);
        }
        held = sent - usize::try_from(update.fwd_cnt).unwrap();
    }
    fixture.send_packet(Header { flags: 3, ..header(op::SHUTDOWN) }, &[]);
    fixture.receive_op(op::RST);
    let expected: Vec<u8> = data.iter().copied().cycle().take(sent).collect();
    assert_eq!(read(&mut client, sent), expected);
    assert_eq!(client.read(&mut [0; 8]).unwrap(), 0);
}

#[test]
fn clients_that_name_no_port_keep_none_out() {
    let mut fixture = Fixture::new();
    let mut silent: Vec<_> = (0..200).map(|_| fixture.client("CONN")).collect();
    let _client = fixture.client("CONNECT 52\n");
    assert_eq!(fixture.receive_op(op::REQUEST).dst_port, 52);
    let end = silent[0].read(&mut [0; 8]);
    assert!(matches!(&end, Ok(0)) || end.is_err_and(|it| it.kind() == ErrorKind::ConnectionReset));
    // The newest may still name its own.
    silent.last_mut().unwrap().write_all(b"ECT 53\n").unwrap();
    assert_eq!(fixture.receive_op(op::REQUEST).dst_port, 53);
}

#[test]
fn a_driver_that_receives_nothing_is_not_answered_for_ever() {
    let dir = tempfile::tempdir().unwrap();
    let mut device = device(&dir);
    let driver = Driver::new(3, 64);
    driver.activate_all(&mut device);
    let mut fixture = Fixture { driver, device, dir };
    for _ in 0..256 {
        fixture.send(op::RW);
    }
    // This one is left to the driver until there is room for its answer.
    fixture.put(header(op::RW), &[]);
    let states = fixture.device.pause();
    assert_eq!(states[TRANSMIT].1.next_avail, 256);
    fixture.device.resume();
    fixture.post(32);
    for _ in 0..257 {
        fixture.receive_op(op::RST);
    }
    fixture.driver.wait_used(TRANSMIT);
}

#[test]
fn a_pause_keeps_connections_and_a_restored_guest_is_told_that_they_are_gone() {
    let mut fixture = Fixture::new();
    let mut client = fixture.connected();
    for _ in 0..2 {
        fixture.driver.queues[EVENT].add(&[writable(DATA - 64, 8)]);
    }
    fixture.driver.queues[EVENT].kick();
    fixture.device.pause();
    client.write_all(b"held").unwrap();
    fixture.device.resume();
    assert_eq!(fixture.receive_data(4), b"held");
    assert!(!fixture.driver.queues[EVENT].has_used(), "nothing has happened to it");

    let states = fixture.device.pause();
    let saved = fixture.device.save();
    fixture.device.socket().detach();
    let mut second = device(&fixture.dir);
    let features = second.features();
    second.acknowledge_features(features);
    second.restore(&saved).unwrap();
    second.pause();
    fixture.driver.activate_restored(&mut second, features, &states);
    second.socket().attach().unwrap();
    fixture.device.reset();
    assert_eq!(client.read(&mut [0; 8]).unwrap(), 0);
    fixture.driver.write(DATA - 64, &[0xff; 8]);
    second.resume();
    fixture.device = second;
    let (_, written) = fixture.driver.wait_used(EVENT);
    assert_eq!((written, fixture.driver.read(DATA - 64, 4)), (4, vec![0; 4]));
    fixture.send(op::RW);
    fixture.receive_op(op::RST);
    let _client = fixture.client("CONNECT 5\n");
    fixture.receive_op(op::REQUEST);
    fixture.device.pause();
    assert!(!fixture.driver.queues[EVENT].has_used(), "it is told once");
}

#[test]
fn the_path_is_one_devices_and_what_was_left_there_is_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let (first, second) = (device(&dir).socket(), device(&dir).socket());
    first.check().unwrap();
    // As a process leaves it that was killed.
    drop(UnixListener::bind(dir.path().join("vsock")).unwrap());
    first.attach().unwrap();
    first.attach().unwrap();
    let error = second.attach().unwrap_err();
    assert!(error.to_string().contains("vsock"), "{error}");
    assert!(first.is_attached() && !second.is_attached());
    first.detach();
    assert!(!dir.path().join("vsock").exists());
    second.attach().unwrap();
    drop(first);
    assert!(dir.path().join("vsock").exists(), "it is another's by now");
    let missing = Vsock::new(VsockConfig {
        id: String::new(),
        cid: CID,
        path: dir.path().join("none/vsock"),
    });
    missing.socket().check().unwrap_err();
}

#[test]
fn a_packet_may_lie_anywhere() {
    let mut fixture = Fixture::new();
    let mut client = fixture.connected();
    let packet = Header { len_bytes: 6, ..header(op::RW) };
    let mut bytes = packet.to_bytes().to_vec();
    bytes.extend(b"pieces");
    // A byte each, across the border of two regions.
    let start = BORDER - 20;
    fixture.driver.write(start, &bytes);
    let pieces: Vec<_> = (0..50).map(|at| readable(start + at, 1)).collect();
    fixture.driver.queues[TRANSMIT].add_indirect(DATA + 0x1000, &pieces);
    fixture.driver.queues[TRANSMIT].kick();
    fixture.driver.wait_used(TRANSMIT);
    assert_eq!(read(&mut client, 6), b"pieces");
}

#[test]
fn the_context_id_is_in_the_configuration() {
    let fixture = Fixture::new();
    let mut config = [0xff; 10];
    fixture.device.read_config(0, &mut config);
    assert_eq!(config, [3, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
}

#[test]
fn clients_of_a_guest_that_broke_a_queue_are_closed_until_it_has_reset_the_device() {
    let mut fixture = Fixture::new();
    let mut connected = fixture.connected();
    let mut waiting = fixture.client("CON");
    fixture.driver.queues[TRANSMIT].set_available(1000);
    fixture.driver.queues[TRANSMIT].kick();
    fixture.driver.interrupt.wait_broken();
    assert_eq!(connected.read(&mut [0; 8]).unwrap(), 0);
    let is_closed = |client: &mut UnixStream| {
        let end = client.read(&mut [0; 8]);
        matches!(&end, Ok(0)) || end.is_err_and(|it| it.kind() == ErrorKind::ConnectionReset)
    };
    assert!(is_closed(&mut waiting));
    for _ in 0..2 {
        let mut late = UnixStream::connect(fixture.path()).unwrap();
        late.set_read_timeout(Some(PATIENCE)).unwrap();
        assert!(is_closed(&mut late));
        fixture.device.pause();
        fixture.device.resume();
    }
    fixture.device.reset();
    fixture.driver = Driver::new(3, 64);
    fixture.driver.activate_all(&mut fixture.device);
    fixture.post(32);
    let _client = fixture.client("CONNECT 52\n");
    fixture.receive_op(op::REQUEST);
}
