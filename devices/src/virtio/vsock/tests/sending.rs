// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Data of a guest on their way to clients: from wherever they are in its memory, and several packets together.

use super::receiving::memory_with_a_hole;
use super::*;
use crate::virtio::Counters as _;
use crate::virtio::test_driver::Buffer;

/// Where a packet is put, by its number; data begin behind the header and a gap.
fn place(number: usize) -> u64 {
    BORDER + 0x1_0800 * number as u64
}

/// Makes packets available, each in two ranges, of which the device is notified together.
fn put_together(fixture: &mut Fixture, packets: &[(Header, &[u8])]) {
    for (number, (header, data)) in packets.iter().enumerate() {
        let (at, len_bytes) = (place(number), u32::try_from(data.len()).unwrap());
        let header = Header { len_bytes, ..*header };
        fixture.driver.write(at, &header.to_bytes());
        fixture.driver.write(at + 0x100, data);
        let ranges = [readable(at, 44), readable(at + 0x100, len_bytes)];
        let ranges = if data.is_empty() { &ranges[..1] } else { &ranges[..] };
        fixture.driver.queues[TRANSMIT].add(ranges);
    }
    fixture.driver.queues[TRANSMIT].kick();
}

/// The same with a paused device, so that it finds all at once.
fn put_at_once(fixture: &mut Fixture, packets: &[(Header, &[u8])]) {
    fixture.device.pause();
    put_together(fixture, packets);
    fixture.device.resume();
}

/// A second connection, to the next port of the host.
fn second(fixture: &mut Fixture) -> (Header, UnixStream) {
    let listener = UnixListener::bind(fixture.port_path(HOST + 1)).unwrap();
    let to_second = Header { dst_port: HOST + 1, ..header(op::RW) };
    fixture.send_packet(Header { op: op::REQUEST, ..to_second }, &[]);
    fixture.receive_op(op::RESPONSE);
    let client = listener.accept().unwrap().0;
    client.set_read_timeout(Some(PATIENCE)).unwrap();
    (to_second, client)
}

fn is_closed(client: &mut UnixStream) -> bool {
    let end = client.read(&mut [0; 8]);
    matches!(&end, Ok(0)) || end.is_err_and(|it| it.kind() == ErrorKind::ConnectionReset)
}

#[test]
fn packets_of_several_connections_arrive_whole_and_in_their_order() {
    let mut fixture = Fixture::new();
    let mut first = fixture.connected();
    let (to_second, mut other) = second(&mut fixture);
    let (all, to_first) = (pattern(3000), header(op::RW));
    let end = Header { flags: 2, ..header(op::SHUTDOWN) };
    let packets: &[(Header, &[u8])] = &[
        (to_first, &all[..100]),
        (to_first, &all[100..101]),
        (to_second, &all[..7]),
        (to_first, &[]),
        (to_first, &all[101..1000]),
        (header(op::CREDIT_UPDATE), &[]),
        (to_first, &all[1000..3000]),
        (end, &[]),
        (to_second, &all[7..20]),
    ];
    put_at_once(&mut fixture, packets);
    for _ in packets {
        fixture.driver.wait_used(TRANSMIT);
    }
    assert_eq!(read(&mut first, 3000), all);
    assert!(is_closed(&mut first), "the end comes behind the data");
    assert_eq!(read(&mut other, 20), all[..20]);
    let counters = fixture.device.counters().counters();
    assert_eq!(counters["tx_bytes"], 3020);
    assert_eq!(counters["tx_packets"], 2 + packets.len() as u64);
}

#[test]
fn more_than_is_written_at_once_arrives_whole() {
    let mut fixture = Fixture::new();
    let mut client = fixture.connected();
    let all = pattern(31 * 100);
    let packets: Vec<_> = all.chunks(100).map(|chunk| (header(op::RW), chunk)).collect();
    put_at_once(&mut fixture, &packets);
    assert_eq!(read(&mut client, all.len()), all);
    // Of many ranges each.
    let many = |at: u64| -> Vec<Buffer> { (0..300).map(|byte| readable(at + byte, 1)).collect() };
    fixture.device.pause();
    for number in 0..5 {
        let (at, header) = (place(number), Header { len_bytes: 256, ..header(op::RW) });
        fixture.driver.write(at, &header.to_bytes());
        fixture.driver.write(at + 44, &all[number * 256..(number + 1) * 256]);
        fixture.driver.queues[TRANSMIT].add_indirect(at + 0x1000, &many(at));
    }
    fixture.driver.queues[TRANSMIT].kick();
    fixture.device.resume();
    assert_eq!(read(&mut client, 5 * 256), all[..5 * 256]);
}

/// How many bytes the device has forwarded.
fn forwarded(fixture: &mut Fixture) -> usize {
    fixture.send(op::CREDIT_REQUEST);
    let mut update = fixture.receive_op(op::CREDIT_UPDATE);
    while fixture.driver.queues[RECEIVE].has_used() {
        update = fixture.receive_op(op::CREDIT_UPDATE);
    }
    usize::try_from(update.fwd_cnt).unwrap()
}

/// A client that has read nothing, and all that the guest has sent it: more than its socket has room for.
fn behind(fixture: &mut Fixture) -> (UnixStream, Vec<u8>) {
    let client = fixture.connected();
    let (mut sent, chunk) = (Vec::new(), pattern(4096));
    while forwarded(fixture) == sent.len() {
        fixture.send_packet(header(op::RW), &chunk);
        sent.extend(&chunk);
    }
    (client, sent)
}

#[test]
fn packets_of_which_the_stream_takes_a_part_arrive_whole() {
    let mut fixture = Fixture::new();
    let mut client = fixture.connected();
    let (to_second, mut other) = second(&mut fixture);
    let all = pattern(1 << 20);
    let mut sent = 0;
    // In one of these it takes some of a packet in the middle, and a packet of another connection is not held up.
    while forwarded(&mut fixture) == sent {
        let lens = [1, 60_000, 50_001, 49_999, 60_000];
        let mut packets = Vec::new();
        for len_bytes in lens {
            packets.push((header(op::RW), &all[sent..sent + len_bytes]));
            sent += len_bytes;
        }
        packets.insert(4, (to_second, b"other"));
        put_at_once(&mut fixture, &packets);
        assert_eq!(read(&mut other, 5), b"other");
    }
    assert!(read(&mut client, sent) == all[..sent]);
}

#[test]
fn many_packets_for_a_client_that_does_not_read_are_kept_as_far_as_they_have_credit() {
    let mut fixture = Fixture::new();
    let (mut client, mut sent) = behind(&mut fixture);
    let all = pattern(200_000);
    let packets: Vec<_> = all.chunks(50_000).map(|chunk| (header(op::RW), chunk)).collect();
    put_at_once(&mut fixture, &packets);
    sent.extend(&all);
    assert!(read(&mut client, sent.len()) == sent);
}

#[test]
fn packets_together_beyond_the_credit_reset_the_connection_behind_those_within() {
    let mut fixture = Fixture::new();
    let (client, _) = behind(&mut fixture);
    let chunk = pattern(60_000);
    put_at_once(&mut fixture, &vec![(header(op::RW), &chunk[..]); 5]);
    fixture.receive_op(op::RST);
    drop(client);
    // None of several is held to be more than there is room for only because they come together.
    let mut fixture = Fixture::new();
    let mut client = fixture.connected();
    put_at_once(&mut fixture, &vec![(header(op::RW), &chunk[..]); 5]);
    let (mut all, mut bytes) = (Vec::<u8>::new(), vec![0; 400_000]);
    while all.len() < 4 * chunk.len() {
        let count = client.read(&mut bytes).unwrap();
        assert!(count > 0, "the first four are within");
        all.extend(&bytes[..count]);
    }
    assert!(all[..4 * chunk.len()] == chunk.repeat(4));
}

#[test]
fn packets_for_a_client_that_has_gone_are_taken_and_it_is_reported() {
    let mut fixture = Fixture::new();
    let client = fixture.connected();
    fixture.device.pause();
    drop(client);
    let chunk = pattern(60_000);
    put_together(&mut fixture, &[(header(op::RW), &chunk[..]); 3]);
    fixture.device.resume();
    for _ in 0..3 {
        fixture.driver.wait_used(TRANSMIT);
    }
    assert_eq!(fixture.receive_op(op::SHUTDOWN).flags & 1, 1);
    assert!(!fixture.driver.interrupt.is_broken());
}

#[test]
fn a_bad_packet_behind_good_ones_takes_none_of_them_with_it() {
    let bad: [(Header, &[Buffer]); 3] = [
        (header(op::RW), &[readable(DATA, 44), readable(DATA + 44, 8), readable(1 << 40, 8)]),
        (header(op::RW), &[readable(DATA, 44), readable(2 * BORDER - 8, 16)]),
        (header(op::RW), &[readable(DATA, 43)]),
    ];
    for (header_of_bad, ranges) in bad {
        let mut fixture = Fixture::new();
        let mut client = fixture.connected();
        fixture.device.pause();
        let header_of_bad = Header { len_bytes: 16, ..header_of_bad };
        fixture.driver.write(DATA, &header_of_bad.to_bytes());
        put_together(&mut fixture, &[(header(op::RW), b"good"), (header(op::RW), b"too")]);
        fixture.driver.queues[TRANSMIT].add(ranges);
        fixture.device.resume();
        assert_eq!(read(&mut client, 7), b"goodtoo", "{ranges:?}");
        assert!(is_closed(&mut client));
        fixture.driver.interrupt.wait_broken();
        assert_eq!(fixture.driver.queues[TRANSMIT].used_index(), 1 + 2);
    }
}

#[test]
fn a_packet_that_says_too_much_ends_its_connection_behind_those_before_it() {
    for len_bytes in [9, (64 << 10) + 1, u32::MAX] {
        let mut fixture = Fixture::new();
        let mut client = fixture.connected();
        fixture.device.pause();
        put_together(&mut fixture, &[(header(op::RW), b"good")]);
        let packet = Header { len_bytes, ..header(op::RW) };
        fixture.driver.write(DATA, &packet.to_bytes());
        // Long enough for the second of the lengths: what matters is the limit.
        let rest = if len_bytes == 9 { 8 } else { (64 << 10) + 1 };
        fixture.driver.queues[TRANSMIT].add(&[readable(DATA, 44), readable(DATA + 44, rest)]);
        fixture.device.resume();
        assert_eq!(read(&mut client, 4), b"good");
        assert!(is_closed(&mut client), "{len_bytes}");
        fixture.receive_op(op::RST);
    }
}

#[test]
fn memory_that_the_host_cannot_read_costs_a_connection() {
    let (memory, _file) = memory_with_a_hole();
    let dir = tempfile::tempdir().unwrap();
    let mut device = device(&dir);
    device.socket().attach().unwrap();
    let driver = Driver::over(memory, 3, 64);
    driver.activate_all(&mut device);
    let mut fixture = Fixture { driver, device, dir };
    fixture.post(16);
    let mut client = fixture.connected();
    let (_, mut other) = second(&mut fixture);
    let packet = Header { len_bytes: 108, ..header(op::RW) };
    fixture.driver.write(DATA, &packet.to_bytes());
    fixture.driver.queues[TRANSMIT].add(&[readable(DATA, 52), readable(BORDER, 100)]);
    fixture.driver.queues[TRANSMIT].kick();
    fixture.driver.wait_used(TRANSMIT);
    assert_eq!(fixture.receive_op(op::RST).src_port, HOST);
    let mut rest = Vec::new();
    let _ = client.read_to_end(&mut rest);
    assert!(rest.len() <= 8, "{rest:?}");
    let to_second = Header { dst_port: HOST + 1, ..header(op::RW) };
    fixture.send_packet(to_second, b"still");
    assert_eq!(read(&mut other, 5), b"still");
    assert!(!fixture.driver.interrupt.is_broken());
}
