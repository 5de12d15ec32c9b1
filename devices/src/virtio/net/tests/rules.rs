// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What the specification forbids for received frames, and what is offered.

use std::os::fd::AsRawFd;
use std::time::Instant;

use super::*;

#[test]
fn flags_of_frames_are_zero_for_drivers_that_do_not_know_them() {
    const DATA_VALID: u8 = 2;
    for (without, flags) in [(0, DATA_VALID), (1 << abi::VIRTIO_NET_F_GUEST_CSUM, 0)] {
        // Read into its buffer, and copied to several.
        for len_bytes in [1000, 50] {
            let mut fixture = Fixture::new(without);
            for index in 0..4 {
                let buffer = writable(DATA + index * 0x1000, len_bytes);
                fixture.driver.queues[RECEIVE].add(&[buffer]);
            }
            let mut frame = vec![0x5a; 100];
            frame[..HEADER].copy_from_slice(&[DATA_VALID, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
            fixture.network.send(&frame).unwrap();
            fixture.driver.queues[RECEIVE].kick();
            fixture.driver.wait_used(RECEIVE);
            let header = fixture.driver.read(DATA, HEADER);
            let count = u8::from(len_bytes == 50) + 1;
            assert_eq!(header, [flags, 0, 0, 0, 0, 0, 0, 0, 0, 0, count, 0], "{len_bytes}");
        }
    }
}

/// Waits until nothing is left to be read from the file.
fn wait_read(file: &UnixDatagram) {
    let deadline = Instant::now() + Duration::from_secs(20);
    loop {
        let mut byte = 0_u8;
        let flags = libc::MSG_PEEK | libc::MSG_DONTWAIT;
        // SAFETY: writes to one byte, which lives during the call; the descriptor is open.
        let read = unsafe { libc::recv(file.as_raw_fd(), (&raw mut byte).cast(), 1, flags) };
        if read < 0 {
            return;
        }
        assert!(Instant::now() < deadline, "a frame is not read");
        std::thread::yield_now();
    }
}

#[test]
fn no_frame_arrives_in_a_pair_that_was_put_out_of_use() {
    const SECOND: usize = 2;
    const CONTROL: usize = 4;
    let (first, _first_network) = UnixDatagram::pair().unwrap();
    let (second, network) = UnixDatagram::pair().unwrap();
    first.set_nonblocking(true).unwrap();
    second.set_nonblocking(true).unwrap();
    let looked_at = second.try_clone().unwrap();
    let taps = [first, second].map(|tap| OwnedFd::from(tap).into()).into();
    let mut device = Net::for_test_of_pairs(taps);
    let mut driver = Driver::new(5, 16);
    driver.activate_all(&mut device);
    let set_pairs = |driver: &mut Driver, pairs: u8| {
        driver.write(DATA, &[4, 0, pairs, 0]);
        driver.queues[CONTROL].add(&[readable(DATA, 4), writable(DATA + 0x100, 1)]);
        driver.queues[CONTROL].kick();
        driver.wait_used(CONTROL);
        assert_eq!(driver.read(DATA + 0x100, 1), [0]);
    };
    set_pairs(&mut driver, 2);
    driver.queues[SECOND].add(&[writable(DATA + 0x1000, 100)]);
    driver.queues[SECOND].kick();
    network.send(&[0; 1000]).unwrap();
    wait_read(&looked_at);
    // What the worker does with it is over when it pauses.
    device.pause();
    device.resume();
    // It waits for more buffers now, and there are enough when the pair is no longer in use.
    set_pairs(&mut driver, 1);
    driver.queues[SECOND].add(&[writable(DATA + 0x2000, 2000)]);
    driver.queues[SECOND].kick();
    let deadline = Instant::now() + Duration::from_secs(20);
    while device.counters().dropped() == 0 {
        assert!(Instant::now() < deadline, "it is not dropped");
        assert_eq!(driver.queues[SECOND].used_index(), 0, "it arrives");
        std::thread::yield_now();
    }
    set_pairs(&mut driver, 2);
    network.send(&[0; 60]).unwrap();
    assert_eq!(driver.wait_used(SECOND), (0, 60));
    assert_eq!(device.counters().dropped(), 1);
}

#[test]
fn offloads_that_are_off_are_not_offered() {
    const CHECKSUMS: u64 = 1 << abi::VIRTIO_NET_F_CSUM
        | 1 << abi::VIRTIO_NET_F_GUEST_CSUM
        | 1 << abi::VIRTIO_NET_F_CTRL_GUEST_OFFLOADS;
    const SEGMENTS: u64 = 1 << abi::VIRTIO_NET_F_HOST_TSO4
        | 1 << abi::VIRTIO_NET_F_HOST_TSO6
        | 1 << abi::VIRTIO_NET_F_HOST_ECN
        | 1 << abi::VIRTIO_NET_F_GUEST_TSO4
        | 1 << abi::VIRTIO_NET_F_GUEST_TSO6
        | 1 << abi::VIRTIO_NET_F_GUEST_ECN;
    const DATAGRAMS: u64 = 1 << abi::VIRTIO_NET_F_HOST_UFO | 1 << abi::VIRTIO_NET_F_GUEST_UFO;
    let offered = |offload_tso, offload_ufo, offload_csum| {
        let open_tap_later = true;
        let config = NetConfig {
            offload_tso,
            offload_ufo,
            offload_csum,
            open_tap_later,
            ..NetConfig::default()
        };
        Net::new(config).unwrap().features() & (CHECKSUMS | SEGMENTS | DATAGRAMS)
    };
    assert_eq!(offered(true, true, true), CHECKSUMS | SEGMENTS | DATAGRAMS);
    assert_eq!(offered(false, true, true), CHECKSUMS | DATAGRAMS);
    assert_eq!(offered(true, false, true), CHECKSUMS | SEGMENTS);
    // Each of the others needs checksums (virtio 1.3, 5.1.3.1).
    assert_eq!(offered(true, true, false), 0);
}
