// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Drivers that keep to no rule.

use std::collections::HashMap;
use std::num::Wrapping;
use std::sync::Arc;

use proptest::prelude::*;

use super::super::connection::Data;
use super::super::muxer::CONNECTIONS_MAX;
use super::super::socket::VsockSocket;
use super::receiving::{PlainRoom, muxer};
use super::*;

fn breaks(attack: impl FnOnce(&mut Fixture)) {
    let mut fixture = Fixture::new();
    let _client = fixture.connected();
    attack(&mut fixture);
    fixture.driver.interrupt.wait_broken();
}

#[test]
fn buffers_that_are_none_need_a_reset() {
    breaks(|fixture| {
        fixture.driver.queues[TRANSMIT].add(&[readable(1 << 40, 44)]);
        fixture.driver.queues[TRANSMIT].kick();
    });
    breaks(|fixture| {
        let packet = Header { len_bytes: 16, ..header(op::RW) };
        fixture.driver.write(DATA, &packet.to_bytes());
        fixture.driver.queues[TRANSMIT].add(&[readable(DATA, 44), readable(2 * BORDER - 8, 16)]);
        fixture.driver.queues[TRANSMIT].kick();
    });
    breaks(|fixture| {
        fixture.driver.queues[TRANSMIT].add(&[readable(DATA, 43)]);
        fixture.driver.queues[TRANSMIT].kick();
    });
    breaks(|fixture| {
        fixture.driver.queues[TRANSMIT].add(&[writable(DATA, 64)]);
        fixture.driver.queues[TRANSMIT].kick();
    });
}

#[test]
fn receive_buffers_that_hold_no_packet_need_a_reset() {
    for buffer in
        [writable(DATA, 43), writable(DATA, 44), readable(DATA, 64), writable(1 << 40, 64)]
    {
        let dir = tempfile::tempdir().unwrap();
        let mut device = device(&dir);
        let driver = Driver::new(3, 64);
        driver.activate_all(&mut device);
        let mut fixture = Fixture { driver, device, dir };
        fixture.driver.queues[RECEIVE].add(&[buffer]);
        fixture.send(op::RW);
        fixture.driver.interrupt.wait_broken();
    }
}

#[test]
fn packets_that_do_not_have_what_they_say_end_their_connection() {
    for len_bytes in [1, 64 << 10, (64 << 10) + 1, u32::MAX] {
        let mut fixture = Fixture::new();
        let mut client = fixture.connected();
        fixture.put(Header { len_bytes, ..header(op::RW) }, &[]);
        fixture.driver.wait_used(TRANSMIT);
        fixture.receive_op(op::RST);
        assert_eq!(client.read(&mut [0; 8]).unwrap(), 0);
    }
    for second in [op::REQUEST, op::RESPONSE, 0, 77] {
        let mut fixture = Fixture::new();
        let _client = fixture.connected();
        fixture.send(second);
        fixture.receive_op(op::RST);
    }
}

/// A guest that gives no buffers never has the packets that its connections have for it.
#[test]
fn a_connection_that_is_opened_and_reset_again_and_again_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let socket = Arc::new(VsockSocket::new(dir.path().join("v")));
    let mut muxer = muxer(socket);
    let listener = UnixListener::bind(dir.path().join("v_1")).unwrap();
    for _ in 0..100 {
        muxer.take_packets(1, &Header { dst_port: 1, ..header(op::REQUEST) }, None);
        assert_eq!((muxer.sizes().0, muxer.ready_len()), (1, 1));
        drop(listener.accept().unwrap());
        muxer.take_packets(1, &Header { dst_port: 1, ..header(op::RST) }, None);
        assert_eq!((muxer.sizes().0, muxer.ready_len()), (0, 0));
    }
}

/// As many descriptors as the host lets a process have: a shell has 1024.
fn raise_descriptor_limit() {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the kernel writes a limit to where there is room for one.
    assert_eq!(unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) }, 0);
    limit.rlim_cur = limit.rlim_max;
    // SAFETY: the kernel reads a limit from where there is one; only more becomes possible.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) }, 0);
}

#[test]
fn connections_have_a_limit_whoever_opens_them_and_each_that_ends_makes_room() {
    raise_descriptor_limit();
    let mut fixture = Fixture::new();
    let listener = UnixListener::bind(fixture.port_path(HOST)).unwrap();
    let mut clients = Vec::new();
    for _ in 0..CONNECTIONS_MAX {
        clients.push(fixture.client("CONNECT 52\n"));
        let request = fixture.receive_op(op::REQUEST);
        let answer = Header { src_port: 52, dst_port: request.src_port, ..header(op::RESPONSE) };
        fixture.send_packet(answer, &[]);
    }
    let mut late = fixture.client("CONNECT 53\n");
    assert_eq!(late.read(&mut [0; 8]).unwrap(), 0, "a client is closed");
    fixture.send(op::REQUEST);
    fixture.receive_op(op::RST);
    // One of the clients goes, and the guest agrees.
    drop(clients.pop());
    let end = fixture.receive_op(op::SHUTDOWN);
    let reset = Header { src_port: 52, dst_port: end.src_port, ..header(op::RST) };
    fixture.send_packet(reset, &[]);
    fixture.send(op::REQUEST);
    fixture.receive_op(op::RESPONSE);
    drop(listener);
}

/// What a driver may say of itself in a packet.
fn packets() -> impl Strategy<Value = (Header, Vec<u8>, bool)> {
    let ports = (0_u32..4, 0_u32..4);
    let credit = (prop_oneof![Just(0), Just(ROOM), any::<u32>()], any::<u32>());
    let rest = (0_u16..9, 0_u32..8, 0_usize..20_000, any::<bool>());
    (ports, credit, rest).prop_map(|((src_port, dst_port), credit, rest)| {
        let (op, flags, len_bytes, has_data) = rest;
        let (buf_alloc, fwd_cnt) = credit;
        let header = Header {
            src_port,
            dst_port,
            flags,
            buf_alloc,
            fwd_cnt,
            len_bytes: u32::try_from(len_bytes).unwrap(),
            ..header(op)
        };
        (header, vec![7; len_bytes], has_data)
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    /// Whatever comes, what is kept is bounded, and no guest is sent more than it says it has room for.
    #[test]
    fn any_packets_in_any_order(packets in proptest::collection::vec(packets(), 1..60)) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("v");
        let socket = Arc::new(VsockSocket::new(path.clone()));
        let mut muxer = muxer(socket);
        let listeners: Vec<_> = (0..3)
            .map(|port| UnixListener::bind(dir.path().join(format!("v_{port}"))).unwrap())
            .collect();
        for listener in &listeners {
            listener.set_nonblocking(true).unwrap();
        }
        let mut clients = Vec::new();
        let mut credit: HashMap<(u32, u32), (u32, u32, u32)> = HashMap::new();
        for (header, data, has_data) in &packets {
            if muxer.has_room_for_answers() {
                let ports = (header.dst_port, header.src_port);
                if header.op == op::REQUEST {
                    credit.entry(ports).or_default();
                }
                if let Some((room, taken, _)) = credit.get_mut(&ports) {
                    (*room, *taken) = (header.buf_alloc, header.fwd_cnt);
                }
                let mut data = data.as_slice();
                muxer.take_packets(1, header, has_data.then_some(&mut data as &mut dyn Data));
            }
            for listener in &listeners {
                if let Ok((mut client, _)) = listener.accept() {
                    client.write_all(&[9; 3000]).unwrap();
                    clients.push(client);
                }
            }
            muxer.serve_ready();
            let mut room = PlainRoom::new(700);
            for _ in 0..3 {
                let Some(packet) = muxer.next_packet(&mut room) else { break };
                let ports = (packet.header.src_port, packet.header.dst_port);
                let len_bytes = u32::try_from(packet.len_bytes).unwrap();
                match packet.header.op {
                    op::RW => {
                        let (room, taken, sent) = credit.get_mut(&ports).unwrap();
                        let Wrapping(in_flight) = Wrapping(*sent) - Wrapping(*taken);
                        let free = room.saturating_sub(in_flight);
                        prop_assert!(len_bytes <= free);
                        *sent += len_bytes;
                    }
                    op::RESPONSE => credit.get_mut(&ports).unwrap().2 = 0,
                    _ => {}
                }
            }
            let (connections, greetings) = muxer.sizes();
            prop_assert!(connections <= 16 && greetings == 0);
            prop_assert!(muxer.ready_len() <= connections);
        }
    }
}
