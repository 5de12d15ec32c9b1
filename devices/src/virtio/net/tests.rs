// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A network device, seen from its driver and from the network.

#![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod limits;
mod rules;

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use virtio_bindings::virtio_net as abi;

use super::config::tun_flags;
use super::{MacAddress, Net, NetConfig, NetError, TapConfig, TapError};
use crate::virtio::test_driver::{BORDER, DATA, Driver, ProbingInterrupt, readable, writable};
use crate::virtio::{Counters, VirtioDevice};

const RECEIVE: usize = 0;
const TRANSMIT: usize = 1;
const CONTROL: usize = 2;
const HEADER: usize = 12;
const ANNOUNCEMENTS: u64 = 5;

struct Fixture {
    driver: Driver,
    device: Net,
    network: UnixDatagram,
}

impl Fixture {
    /// With all features but `without`.
    fn new(without: u64) -> Self {
        let (near, network) = UnixDatagram::pair().unwrap();
        near.set_nonblocking(true).unwrap();
        network.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        let mut device = Net::for_test(OwnedFd::from(near).into());
        let driver = Driver::new(3, 16);
        let features = device.features() & !without;
        driver.activate(&mut device, features);
        Self { driver, device, network }
    }

    fn send_frame(&self, len_bytes: usize) -> Vec<u8> {
        let mut frame = vec![0; HEADER];
        frame.extend((0..len_bytes).map(|index| u8::try_from(index % 251).unwrap()));
        self.network.send(&frame).unwrap();
        frame
    }

    /// A command on the control queue; gives its answer.
    fn control(&mut self, command: &[u8]) -> u8 {
        const ANSWER: u64 = DATA + 0x8000;
        self.driver.write(DATA, command);
        self.driver.write(ANSWER, &[0xee]);
        let len_bytes = u32::try_from(command.len() - 2).unwrap();
        let buffers = [readable(DATA, 2), readable(DATA + 2, len_bytes), writable(ANSWER, 1)];
        self.driver.queues[CONTROL].add(&buffers);
        self.driver.queues[CONTROL].kick();
        self.driver.wait_used(CONTROL);
        self.driver.read(ANSWER, 1)[0]
    }

    fn status(&self) -> u8 {
        let mut status = [0; 2];
        self.device.read_config(6, &mut status);
        status[0]
    }
}

#[test]
fn frames_leave_as_the_driver_wrote_them() {
    let mut fixture = Fixture::new(0);
    let frame: Vec<u8> = (0..112).collect();
    fixture.driver.write(DATA, &frame);
    fixture.driver.queues[TRANSMIT].add(&[readable(DATA, 12), readable(DATA + 12, 100)]);
    fixture.driver.queues[TRANSMIT].kick();
    let mut received = [0; 200];
    let len_bytes = fixture.network.recv(&mut received).unwrap();
    assert_eq!(received[..len_bytes], frame);
    assert_eq!(fixture.driver.wait_used(TRANSMIT), (0, 0));
    let counters = fixture.device.counters().counters();
    assert_eq!((counters["tx_frames"], counters["tx_bytes"]), (1, 100));
}

#[test]
fn impossible_frames_are_dropped_and_completed() {
    let mut fixture = Fixture::new(0);
    for buffer in [readable(DATA, 12), readable(DATA, 100_000), readable(1 << 40, 100)] {
        fixture.driver.queues[TRANSMIT].add(&[buffer]);
        fixture.driver.queues[TRANSMIT].kick();
        fixture.driver.wait_used(TRANSMIT);
    }
    let counters = fixture.device.counters();
    assert_eq!(counters.dropped(), 3);
    assert_eq!(counters.counters()["tx_frames"], 0);
    assert!(!fixture.driver.interrupt.is_broken());
}

#[test]
fn frames_arrive_in_one_buffer_and_are_marked_dirty() {
    for without in [0, 1 << abi::VIRTIO_NET_F_MRG_RXBUF] {
        let mut fixture = Fixture::new(without);
        fixture.driver.track_writes();
        let target = BORDER - 600;
        fixture.driver.queues[RECEIVE].add(&[writable(target, 2000)]);
        fixture.driver.queues[RECEIVE].kick();
        let mut frame = fixture.send_frame(1500);
        frame[10] = 1;
        assert_eq!(fixture.driver.wait_used(RECEIVE), (0, 1512));
        assert_eq!(fixture.driver.read(target, frame.len()), frame);
        assert!(fixture.driver.was_written(target) && fixture.driver.was_written(BORDER));
        let counters = fixture.device.counters().counters();
        assert_eq!((counters["rx_frames"], counters["rx_bytes"]), (1, 1500));
    }
}

#[test]
fn long_frames_are_spread_over_buffers_that_appear_together() {
    let mut fixture = Fixture::new(0);
    for index in 0..4 {
        fixture.driver.queues[RECEIVE].add(&[writable(DATA + index * 0x1000, 1000)]);
    }
    fixture.driver.queues[RECEIVE].kick();
    let mut frame = fixture.send_frame(2500);
    frame[10] = 3;
    assert_eq!(fixture.driver.wait_used(RECEIVE), (0, 1000));
    assert_eq!(fixture.driver.queues[RECEIVE].used_index(), 3, "all at once");
    assert_eq!(fixture.driver.wait_used(RECEIVE), (1, 1000));
    assert_eq!(fixture.driver.wait_used(RECEIVE), (2, 512));
    let mut received = fixture.driver.read(DATA, 1000);
    received.extend(fixture.driver.read(DATA + 0x1000, 1000));
    received.extend(fixture.driver.read(DATA + 0x2000, 512));
    assert_eq!(received, frame);

    fixture.send_frame(10);
    assert_eq!(fixture.driver.wait_used(RECEIVE), (3, 22), "the queue continues behind it");
}

/// Long and short ones in any order, several at a time, in buffers of all lengths.
#[test]
fn frames_arrive_whole_however_many_buffers_were_taken_for_them() {
    const BUFFERS: u16 = 16;
    let place = |head: u16| DATA + u64::from(head) * 0x1000;
    let mut fixture = Fixture::new(0);
    let (mut number, mut added, mut used) = (7_u64, 0_u16, 0_u16);
    let mut random = |below: u64| {
        number = number.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (number >> 33) % below
    };
    // Until no driver's ring wraps at a multiple of the rounds.
    for round in 0..150 {
        let mut frames = Vec::new();
        for _ in 0..=random(3) {
            let is_long = round % 50 < 25 && random(3) > 0;
            let len = if is_long { 1500 + random(1500) } else { 1 + random(300) };
            frames.push(fixture.send_frame(usize::try_from(len).unwrap()));
        }
        let mut received = Vec::new();
        for mut frame in frames {
            while received.len() < frame.len() {
                while added - used < BUFFERS {
                    let head = added % BUFFERS;
                    let len = 64 + u32::try_from(random(1900)).unwrap();
                    fixture.driver.queues[RECEIVE].add(&[writable(place(head), len)]);
                    added += 1;
                }
                fixture.driver.queues[RECEIVE].kick();
                let (head, len) = fixture.driver.wait_used(RECEIVE);
                assert_eq!(head, used % BUFFERS, "in the order of the ring");
                used += 1;
                frame[10] += 1;
                received.extend(fixture.driver.read(place(head), usize::try_from(len).unwrap()));
            }
            assert!(received == frame, "round {round}");
            received.clear();
        }
    }
    let (_, state) = fixture.device.pause().swap_remove(RECEIVE);
    assert_eq!(state.next_avail, used, "what was not used is given back");
}

#[test]
fn a_long_frame_waits_for_more_buffers() {
    let mut fixture = Fixture::new(0);
    fixture.driver.queues[RECEIVE].add(&[writable(DATA, 1000)]);
    fixture.driver.queues[RECEIVE].kick();
    let mut frame = fixture.send_frame(2500);
    frame[10] = 3;
    for index in 1..3 {
        fixture.driver.queues[RECEIVE].add(&[writable(DATA + index * 0x1000, 1000)]);
        fixture.driver.queues[RECEIVE].kick();
    }
    assert_eq!(fixture.driver.wait_used(RECEIVE), (0, 1000));
    let mut received = fixture.driver.read(DATA, 1000);
    received.extend(fixture.driver.read(DATA + 0x1000, 1000));
    received.extend(fixture.driver.read(DATA + 0x2000, 512));
    assert_eq!(received, frame);
}

#[test]
fn a_frame_that_no_ring_has_room_for_costs_the_next_one_nothing() {
    /// More of all buffers than a call takes.
    const RANGES: u64 = 70;
    let place = |head: u64| DATA + 0x1_0000 + head * 0x1000;
    let mut fixture = Fixture::new(0);
    for head in 0..16_u64 {
        let ranges: Vec<_> = (0..RANGES).map(|at| writable(place(head) + 2 * at, 2)).collect();
        fixture.driver.queues[RECEIVE].add_indirect(DATA + head * 0x1000, &ranges);
    }
    // In all there is room for 2240 bytes.
    fixture.send_frame(2500);
    let mut frame = fixture.send_frame(2100);
    frame[10] = 16;
    fixture.driver.queues[RECEIVE].kick();
    let mut received = Vec::new();
    for head in 0..16 {
        let (used, len) = fixture.driver.wait_used(RECEIVE);
        assert_eq!(u64::from(used), head);
        received.extend(fixture.driver.read(place(head), usize::try_from(len).unwrap()));
    }
    assert!(received == frame, "{} bytes", received.len());
    assert_eq!(fixture.device.counters().dropped(), 1);
}

#[test]
fn a_buffer_without_any_room_needs_a_reset() {
    let mut fixture = Fixture::new(0);
    fixture.driver.queues[RECEIVE].add(&[writable(DATA, 0)]);
    fixture.send_frame(8);
    fixture.driver.queues[RECEIVE].kick();
    fixture.driver.interrupt.wait_broken();
}

#[test]
fn a_frame_that_does_not_fit_is_dropped_and_the_buffer_kept() {
    let mut fixture = Fixture::new(1 << abi::VIRTIO_NET_F_MRG_RXBUF);
    fixture.driver.queues[RECEIVE].add(&[writable(DATA, 1000)]);
    fixture.driver.queues[RECEIVE].kick();
    fixture.send_frame(2500);
    fixture.send_frame(100);
    assert_eq!(fixture.driver.wait_used(RECEIVE), (0, 112));
    assert_eq!(fixture.device.counters().dropped(), 1);
}

#[test]
fn a_paused_device_leaves_frames_to_the_tap() {
    let mut fixture = Fixture::new(0);
    fixture.driver.queues[RECEIVE].add(&[writable(DATA, 2000)]);
    fixture.driver.queues[RECEIVE].kick();
    fixture.device.pause();
    fixture.send_frame(64);
    let states = fixture.device.pause();
    assert_eq!(states[0].1.next_avail, 0);
    fixture.device.resume();
    assert_eq!(fixture.driver.wait_used(RECEIVE), (0, 76));
}

#[test]
fn the_control_queue_answers_what_it_knows() {
    let mut fixture = Fixture::new(0);
    let (class_rx, class_mac, class_vlan) = (0, 1, 2);
    assert_eq!(fixture.control(&[class_rx, 0, 1]), 0, "promiscuous");
    assert_eq!(fixture.control(&[class_rx, 2, 1]), 1, "extra modes are not offered");
    assert_eq!(fixture.control(&[class_vlan, 0, 5, 0]), 0);
    assert_eq!(fixture.control(&[class_vlan, 2, 5, 0]), 1);
    assert_eq!(fixture.control(&[class_mac, 0, 0, 0, 0, 0, 0, 0, 0, 0]), 0);
    assert_eq!(fixture.control(&[class_mac, 1, 1, 2, 3]), 1, "too short");
    assert_eq!(fixture.control(&[class_mac, 1, 2, 0, 0, 0, 0, 9]), 0);
    assert_eq!(fixture.device.mac(), MacAddress([2, 0, 0, 0, 0, 9]));
    let mut mac = [0; 6];
    fixture.device.read_config(0, &mut mac);
    assert_eq!(mac, [2, 0, 0, 0, 0, 9]);
    assert_eq!(fixture.control(&[4, 0, 1, 0]), 1, "several pairs are not offered");
    assert_eq!(fixture.control(&[77, 0, 1]), 1);

    let saved = fixture.device.save();
    fixture.device.reset();
    assert_eq!(fixture.device.mac(), MacAddress([2, 1, 2, 3, 4, 5]));
    fixture.device.restore(&saved).unwrap();
    assert_eq!(fixture.device.mac(), MacAddress([2, 0, 0, 0, 0, 9]));
}

#[test]
fn offloads_can_be_switched_within_what_was_negotiated() {
    let mut fixture = Fixture::new(1 << abi::VIRTIO_NET_F_GUEST_UFO);
    let checksum = 1 << abi::VIRTIO_NET_F_GUEST_CSUM;
    assert_eq!(fixture.control(&offloads_command(checksum)), 0);
    assert_eq!(fixture.device.save().data["offloads"], checksum);
    assert_eq!(fixture.control(&offloads_command(1 << abi::VIRTIO_NET_F_GUEST_UFO)), 1);
    assert_eq!(fixture.control(&offloads_command(1 << 60)), 1);
    assert_eq!(fixture.device.save().data["offloads"], checksum);
}

/// A command that switches the guest's offloads.
fn offloads_command(offloads: u64) -> Vec<u8> {
    [vec![5, 0], offloads.to_le_bytes().to_vec()].concat()
}

#[test]
fn the_driver_is_told_ok_when_the_tap_does_what_it_asked_for() {
    let mut fixture = Fixture::new(0);
    let tap = fixture.device.tap().pair(0).unwrap();
    let plain = tap.plain().unwrap();
    let set = || plain.offloads.load(Ordering::Acquire);
    let checksum = 1 << abi::VIRTIO_NET_F_GUEST_CSUM;
    assert_eq!(set(), 0x1f, "what was negotiated");
    // Marks of congestion rest on segmentation: a tap refuses them alone.
    let alone = checksum | 1 << abi::VIRTIO_NET_F_GUEST_ECN;
    assert_eq!(fixture.control(&offloads_command(alone)), 0);
    assert_eq!(set(), libc::TUN_F_CSUM);
    plain.refuses.store(true, Ordering::Release);
    assert_eq!(fixture.control(&offloads_command(0)), 1);
    assert_eq!(fixture.device.save().data["offloads"], alone, "as before");
    plain.refuses.store(false, Ordering::Release);
    assert_eq!(fixture.control(&offloads_command(0)), 0);
    assert_eq!(set(), 0);
}

#[test]
fn offloads_that_a_guest_has_turned_off_stay_off_elsewhere() {
    let mut fixture = Fixture::new(0);
    assert_eq!(fixture.control(&offloads_command(0)), 0);
    fixture.device.pause();
    let saved = fixture.device.save();
    let (near, _network) = UnixDatagram::pair().unwrap();
    let mut other = Net::for_test(OwnedFd::from(near).into());
    other.acknowledge_features(other.features());
    other.restore(&saved).unwrap();
    let tap = other.tap().pair(0).unwrap();
    assert_eq!(tap.plain().unwrap().offloads.load(Ordering::Acquire), 0);
    assert_eq!(other.save(), saved);
    // The next driver begins anew.
    other.reset();
    other.acknowledge_features(other.features());
    assert_eq!(tap.plain().unwrap().offloads.load(Ordering::Acquire), 0x1f);
}

#[test]
fn tap_flags_follow_the_offloads() {
    let bit = |feature: u32| 1_u64 << feature;
    let checksum = bit(abi::VIRTIO_NET_F_GUEST_CSUM);
    assert_eq!(tun_flags(checksum), libc::TUN_F_CSUM);
    let all = checksum
        | bit(abi::VIRTIO_NET_F_GUEST_TSO4)
        | bit(abi::VIRTIO_NET_F_GUEST_TSO6)
        | bit(abi::VIRTIO_NET_F_GUEST_ECN)
        | bit(abi::VIRTIO_NET_F_GUEST_UFO);
    assert_eq!(tun_flags(all), 0x1f);
    assert_eq!(tun_flags(checksum | bit(abi::VIRTIO_NET_F_GUEST_ECN)), libc::TUN_F_CSUM);
    assert_eq!(tun_flags(all & !checksum), 0, "segmentation rests on checksums");
}

#[test]
fn an_announcement_goes_out_and_asks_the_driver_until_it_answers() {
    let mut fixture = Fixture::new(0);
    assert_eq!(fixture.status(), 1, "link up");
    fixture.device.announcer().announce();
    assert_eq!(fixture.status(), 3);
    for _ in 0..ANNOUNCEMENTS {
        let mut frame = [0; 100];
        assert_eq!(fixture.network.recv(&mut frame).unwrap(), HEADER + 60);
        assert_eq!(frame[HEADER..HEADER + 6], [0xff; 6]);
        assert_eq!(frame[HEADER + 6..HEADER + 12], [2, 1, 2, 3, 4, 5]);
        assert_eq!(frame[HEADER + 12..HEADER + 14], [0x80, 0x35]);
    }
    // One alone gets lost like a frame. The driver is asked behind each.
    let start = Instant::now();
    while fixture.driver.interrupt.config_changes() < ANNOUNCEMENTS {
        assert!(start.elapsed() < Duration::from_secs(20), "the driver is not asked again");
        std::thread::yield_now();
    }
    let saved = fixture.device.save();
    assert_eq!(fixture.control(&[3, 0]), 0);
    assert_eq!(fixture.status(), 1);
    fixture.device.restore(&saved).unwrap();
    assert_eq!(fixture.status(), 3, "not lost with a second migration");
}

#[test]
fn a_driver_that_cannot_announce_is_not_asked() {
    let fixture = Fixture::new(1 << abi::VIRTIO_NET_F_GUEST_ANNOUNCE);
    fixture.device.announcer().announce();
    assert_eq!(fixture.driver.interrupt.config_changes(), 0);
    assert_eq!(fixture.status(), 1);
    // Its frames are sent a few times instead.
    for _ in 0..ANNOUNCEMENTS {
        let mut frame = [0; 100];
        assert_eq!(fixture.network.recv(&mut frame).unwrap(), HEADER + 60);
        assert_eq!(frame[HEADER + 12..HEADER + 14], [0x80, 0x35]);
    }
}

#[test]
fn nothing_is_announced_for_a_guest_that_has_gone() {
    let fixture = Fixture::new(1 << abi::VIRTIO_NET_F_GUEST_ANNOUNCE);
    let Fixture { device, network, driver } = fixture;
    device.announcer().announce();
    device.tap().release();
    drop((device, driver));
    // The tap's other end is open for as long as a descriptor of the tap is open: the first frame, then
    // the end.
    let mut frame = [0; 100];
    assert_eq!(network.recv(&mut frame).unwrap(), HEADER + 60);
    network.set_read_timeout(Some(Duration::from_millis(500))).unwrap();
    assert!(network.recv(&mut frame).is_err());
}

#[test]
fn impossible_states_are_refused() {
    let mut fixture = Fixture::new(0);
    let good = fixture.device.save();
    for (field, value) in [("active_pairs", 0_u64), ("active_pairs", 2), ("offloads", 1 << 40)] {
        let mut bad = good.clone();
        bad.data[field] = serde_json::json!(value);
        assert!(fixture.device.restore(&bad).is_err(), "{field} = {value}");
    }
    fixture.device.restore(&good).unwrap();
}

#[test]
fn addresses_are_read_and_shown() {
    let mac: MacAddress = "02:aB:00:ff:10:7e".parse().unwrap();
    assert_eq!(mac.to_string(), "02:ab:00:ff:10:7e");
    for bad in
        ["", "02:ab:00:ff:10", "02:ab:00:ff:10:7e:00", "02:ab:00:ff:10:7", "+2:ab:00:ff:10:7e"]
    {
        assert!(bad.parse::<MacAddress>().is_err(), "{bad}");
    }
    let random = MacAddress::random().unwrap();
    assert_eq!(random.0[0] & 3, 2, "administered locally, not a group's");
}

fn config(name: &str, queue_pairs: u16) -> NetConfig {
    let tap = TapConfig { name: Some(name.to_owned()), queue_pairs, ..TapConfig::default() };
    NetConfig { id: "net0".to_owned(), tap, ..NetConfig::default() }
}

#[test]
fn bad_numbers_and_names_are_refused() {
    let zero = Net::new(config("x", 0)).err().unwrap();
    assert!(matches!(zero, NetError::Number { what: "queue pairs", .. }), "{zero}");
    let odd = Net::new(NetConfig { queue_size: 3, ..config("x", 1) }).err().unwrap();
    assert!(matches!(odd, NetError::Number { what: "queue_size", .. }), "{odd}");
    for name in ["", "a/b", "a name", "sixteen-letters-"] {
        let error = Net::new(config(name, 1)).err().unwrap();
        let NetError::Tap { source, .. } = error else { panic!("{error}") };
        assert!(matches!(source, TapError::Name { .. }), "{name}: {source}");
    }
    let (socket, _other) = UnixDatagram::pair().unwrap();
    let fds = NetConfig { fds: vec![socket.into()], ..config("x", 1) };
    let NetError::Tap { source, .. } = Net::new(fds).err().unwrap() else { panic!("no tap error") };
    assert!(matches!(source, TapError::NotTap { .. }), "{source}");
}

/// A name that no other test and no other process uses.
fn tap_name(suffix: char) -> String {
    format!("gt{}{suffix}", std::process::id())
}

/// Whether this process can make taps here.
fn can_make_taps() -> bool {
    let usable = super::Tap::open(None, 1);
    if let Err(error) = &usable {
        test_skip::skip!("no taps here: {error}");
    }
    usable.is_ok()
}

#[test]
fn a_tap_exists_as_long_as_its_device() {
    if !can_make_taps() {
        return;
    }
    let name = tap_name('a');
    let mut wanted = config(&name, 1);
    wanted.tap.mtu = Some(1400);
    wanted.tap.host_mac = Some(MacAddress([2, 0, 0, 0, 0, 1]));
    wanted.tap.ip = Some("192.0.2.1".parse().unwrap());
    wanted.tap.mask = Some("255.255.255.0".parse().unwrap());
    let device = Net::new(wanted).unwrap();
    let entry = |file: &str| {
        let path = Path::new("/sys/class/net").join(&name).join(file);
        std::fs::read_to_string(path).unwrap().trim().to_owned()
    };
    assert_eq!(entry("mtu"), "1400");
    assert_eq!(entry("address"), "02:00:00:00:00:01");
    assert_eq!(device.tap().name(), Some(name.clone()));

    let error = Net::new(config(&name, 1)).err().unwrap();
    let NetError::Tap { source, .. } = error else { panic!("{error}") };
    assert!(matches!(source, TapError::InUse { .. }), "{source}");
    let error = Net::new(config(&name, 2)).err().unwrap();
    let NetError::Tap { source, .. } = error else { panic!("{error}") };
    assert!(matches!(source, TapError::Kind { multi_queue: true, .. }), "{source}");

    drop(device);
    assert!(!Path::new("/sys/class/net").join(&name).exists());
}

#[test]
fn a_tap_moves_to_another_device() {
    if !can_make_taps() {
        return;
    }
    let name = tap_name('b');
    let mut source = Net::new(config(&name, 1)).unwrap();
    let destination = Net::new(NetConfig { open_tap_later: true, ..config(&name, 1) }).unwrap();
    let driver = Driver::new(3, 16);
    driver.activate_all(&mut source);
    source.pause();
    assert!(destination.tap().acquire().is_err());
    source.tap().release();
    destination.tap().acquire().unwrap();
    // The migration fails after all: the source takes its tap back before it continues.
    destination.tap().release();
    source.tap().acquire().unwrap();
    source.resume();
    assert_eq!(source.tap().name(), Some(name));
}

#[test]
fn several_queue_pairs_share_one_tap() {
    if !can_make_taps() {
        return;
    }
    let name = tap_name('c');
    let mut device = Net::new(config(&name, 2)).unwrap();
    assert_ne!(device.features() & 1 << abi::VIRTIO_NET_F_MQ, 0);
    assert_eq!(device.queue_sizes_max().len(), 5);
    let mut driver = Driver::new(5, 16);
    driver.activate_all(&mut device);
    for (pairs, answer) in [(2, 0), (1, 0), (2, 0), (3, 1), (0, 1)] {
        driver.write(DATA, &[4, 0, pairs, 0]);
        driver.queues[4].add(&[readable(DATA, 4), writable(DATA + 0x100, 1)]);
        driver.queues[4].kick();
        driver.wait_used(4);
        assert_eq!(driver.read(DATA + 0x100, 1), [answer], "{pairs} pairs");
    }
    assert_eq!(device.save().data["active_pairs"], 2);
    assert_eq!(device.pause().len(), 5);
}

#[test]
fn a_reset_waits_while_a_driver_is_asked_and_no_later_one_is() {
    let fixture = Fixture::new(0);
    let link = fixture.device.announcer().link;
    let probed = Arc::clone(&link);
    let probe = ProbingInterrupt::new(move || probed.interrupt.try_lock().is_none());
    link.set_interrupt(Some(probe.clone()));
    link.ask_to_announce();
    assert!(probe.was_right.load(Ordering::Acquire), "its driver cannot go meanwhile");
    assert_eq!(fixture.status(), 3);
    link.set_interrupt(None);
    link.change(|state| state.announce_pending = false);
    link.ask_to_announce();
    assert_eq!(fixture.status(), 1);
}

#[test]
fn receive_buffers_with_a_readable_part_need_a_reset() {
    let (odd, sound) = (readable(DATA, 8), writable(DATA + 0x2000, 40));
    for (first, second) in [(sound, odd), (odd, sound)] {
        let mut fixture = Fixture::new(0);
        // A frame that does not fit into the first buffer.
        fixture.send_frame(100);
        fixture.driver.queues[RECEIVE].add(&[first, writable(DATA + 0x1000, 40)]);
        fixture.driver.queues[RECEIVE].add(&[second, writable(DATA + 0x2000, 200)]);
        fixture.driver.queues[RECEIVE].kick();
        fixture.driver.interrupt.wait_broken();
        assert_eq!(fixture.driver.queues[RECEIVE].used_index(), 0);
    }
}
