// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! An IOMMU and devices behind it, seen from their drivers.

#![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::sync::Arc;

use vm_memory::{Bytes as _, GuestAddress, GuestAddressSpace as _};

use super::domains::{DOMAIN_MAX, MAPPINGS_RANGE, PAGE_BYTES};
use super::request::{Request, Status};
use super::{Endpoint, Iommu, IommuConfig, IommuHandle};
use crate::virtio::queue::WorkQueue;
use crate::virtio::rng::{Rng, RngConfig};
use crate::virtio::test_driver::{BORDER, DATA, Driver, readable, writable};
use crate::virtio::{RING_FEATURES, VirtioDevice};

/// The number of the device behind the IOMMU.
const NUMBER: u32 = 0x1_0018;
const ANSWER: u64 = DATA + 0x100;
const READ_WRITE: u32 = 3;

fn iommu() -> Iommu {
    of_guest(0)
}

fn of_guest(memory_bytes: u64) -> Iommu {
    let config = IommuConfig { id: "iommu".to_owned(), address_bits: 48, memory_bytes };
    Iommu::new(config).unwrap()
}

fn started() -> (Iommu, Driver, Arc<Endpoint>) {
    let mut device = iommu();
    let endpoint = device.handle().endpoint();
    device.handle().add(NUMBER, &endpoint);
    let driver = Driver::new(2, 16);
    driver.activate_all(&mut device);
    (device, driver, endpoint)
}

fn perform(handle: &IommuHandle, request: Request) -> Status {
    let (status, wait) = handle.domains.lock().perform(request);
    assert!(!wait.is_due());
    status
}

fn attach(domain: u32) -> Request {
    Request::Attach { domain, endpoint: NUMBER, bypass: false }
}

fn map(first: u64, gpa: u64, pages: u64, flags: u32) -> Request {
    Request::Map { domain: 1, first, last: first + pages * PAGE_BYTES - 1, gpa, flags }
}

fn unmap(first: u64, pages: u64) -> Request {
    Request::Unmap { domain: 1, first, last: first + pages * PAGE_BYTES - 1 }
}

fn bytes(request: Request) -> Vec<u8> {
    let (kind, body): (u8, Vec<Vec<u8>>) = match request {
        Request::Attach { domain, endpoint, bypass } => {
            let numbers = [domain, endpoint, u32::from(bypass), 0];
            (1, numbers.iter().map(|it| it.to_le_bytes().to_vec()).collect())
        }
        Request::Detach { domain, endpoint } => {
            (2, [domain, endpoint, 0, 0].iter().map(|it| it.to_le_bytes().to_vec()).collect())
        }
        Request::Map { domain, first, last, gpa, flags } => {
            let mut body = vec![domain.to_le_bytes().to_vec()];
            body.extend([first, last, gpa].iter().map(|it| it.to_le_bytes().to_vec()));
            body.push(flags.to_le_bytes().to_vec());
            (3, body)
        }
        Request::Unmap { domain, first, last } => {
            let mut body = vec![domain.to_le_bytes().to_vec()];
            body.extend([first, last].iter().map(|it| it.to_le_bytes().to_vec()));
            body.push(vec![0; 4]);
            (4, body)
        }
        Request::Probe { endpoint } => (5, vec![endpoint.to_le_bytes().to_vec(), vec![0; 64]]),
    };
    [vec![kind, 0, 0, 0], body.concat()].concat()
}

fn send(driver: &mut Driver, request: &[u8], room: u32) {
    driver.write(DATA, request);
    driver.write(ANSWER, &[0xee; 80]);
    let len = u32::try_from(request.len()).unwrap();
    driver.queues[0].add(&[readable(DATA, len), writable(ANSWER, room)]);
    driver.queues[0].kick();
}

fn ask(driver: &mut Driver, request: Request) -> u8 {
    send(driver, &bytes(request), 4);
    assert_eq!(driver.wait_used(0).1, 4);
    driver.read(ANSWER, 1)[0]
}

/// Whether a queue of the endpoint gives the chain that was added.
fn taken(driver: &Driver, endpoint: &Arc<Endpoint>) -> WorkQueue {
    let mut active = driver.fresh(RING_FEATURES).queues.into_iter().next().unwrap();
    active.dma = Some(endpoint.queue());
    let activation = driver.fresh(RING_FEATURES);
    WorkQueue::new(active, &driver.memory, &activation.interrupt, RING_FEATURES)
}

#[test]
fn requests_are_answered_with_the_status_that_the_standard_names() {
    let (device, mut driver, _endpoint) = started();
    let mut config = [0; 40];
    device.read_config(0, &mut config);
    assert_eq!(config[..8], (!0xfff_u64).to_le_bytes());
    assert_eq!(config[16..24], ((1_u64 << 48) - 1).to_le_bytes());
    assert_eq!((config[32], config[36]), (64, 1));
    let (ok, invalid, range, missing) = (0, 4, 5, 6);
    let page = PAGE_BYTES;
    let other = Request::Attach { domain: 1, endpoint: NUMBER + 1, bypass: false };
    for (request, status) in [
        (map(0, 0, 1, READ_WRITE), missing),
        (unmap(0, 1), missing),
        (other, missing),
        (Request::Detach { domain: 1, endpoint: NUMBER }, invalid),
        (attach(DOMAIN_MAX + 1), range),
        (attach(1), ok),
        (attach(1), ok),
        (Request::Attach { domain: 1, endpoint: NUMBER, bypass: true }, invalid),
        (map(0, 0, 1, 4), invalid),
        (map(0, 1, 1, READ_WRITE), range),
        (map(1, 0, 1, READ_WRITE), range),
        (map(1 << 48, 0, 1, READ_WRITE), range),
        (map(0xfee0_0000, 0, 1, READ_WRITE), invalid),
        (map(0xfed0_0000, 0, 0x101, READ_WRITE), invalid),
        (map(0, u64::MAX - page + 1, 2, READ_WRITE), range),
        (map(8 * page, 0, 4, READ_WRITE), ok),
        (map(11 * page, 0, 1, READ_WRITE), invalid),
        (unmap(8 * page, 1), range),
        (unmap(7 * page, 3), range),
        (unmap(4 * page, 1), ok),
        (unmap(0, 64), ok),
        (map(11 * page, 0, 1, READ_WRITE), ok),
        (Request::Detach { domain: 1, endpoint: NUMBER }, ok),
        (map(0, 0, 1, READ_WRITE), missing),
        (Request::Attach { domain: 2, endpoint: NUMBER, bypass: true }, ok),
        (Request::Map { domain: 2, first: 0, last: 0xfff, gpa: 0, flags: 1 }, invalid),
        (attach(3), ok),
        (Request::Unmap { domain: 2, first: 0, last: 0xfff }, missing),
    ] {
        assert_eq!(ask(&mut driver, request), status, "{request:x?}");
    }
    send(&mut driver, &[9; 30], 4);
    driver.wait_used(0);
    assert_eq!(driver.read(ANSWER, 4), [2, 0, 0, 0]);
}

#[test]
fn a_probe_tells_where_interrupts_go() {
    let (_device, mut driver, _endpoint) = started();
    let probe = bytes(Request::Probe { endpoint: NUMBER });
    send(&mut driver, &probe, 68);
    assert_eq!(driver.wait_used(0).1, 68);
    let answer = driver.read(ANSWER, 68);
    assert_eq!(
        (answer[..2].to_vec(), answer[4], answer[64..].to_vec()),
        (vec![1, 0], 1, vec![0; 4])
    );
    send(&mut driver, &bytes(Request::Probe { endpoint: 7 }), 68);
    assert_eq!(driver.wait_used(0).1, 68);
    let answer = driver.read(ANSWER, 69);
    assert_eq!(answer[..65], [vec![0; 64], vec![6]].concat());
    assert_eq!(answer[68], 0xee);
    for room in [4, 10, 64, 66] {
        send(&mut driver, &probe, room);
        assert_eq!(driver.wait_used(0).1, room);
        let answer = driver.read(ANSWER, usize::try_from(room).unwrap());
        assert_eq!(answer[answer.len() - 4..], [4, 0, 0, 0], "{room}");
    }
}

#[test]
fn requests_without_room_for_a_status_need_a_reset() {
    let (_device, mut driver, _endpoint) = started();
    send(&mut driver, &bytes(attach(1)), 3);
    driver.interrupt.wait_broken();
}

#[test]
fn a_device_behind_it_reaches_what_is_mapped_across_borders() {
    let iommu = iommu();
    let handle = iommu.handle();
    let endpoint = handle.endpoint();
    handle.add(NUMBER, &endpoint);
    let mut rng = Rng::new(RngConfig::default()).unwrap();
    let mut driver = Driver::new(1, 16);
    driver.queues[0].endpoint = Some(Arc::clone(&endpoint));
    assert_eq!(perform(&handle, attach(1)), Status::Ok);
    // The rings at their own addresses, and two pages next to each other that are not so in memory.
    assert_eq!(perform(&handle, map(0, 0, 1, READ_WRITE)), Status::Ok);
    let second = BORDER + 0x1000;
    assert_eq!(perform(&handle, map(0x7000_0000, BORDER - 0x1000, 1, 2)), Status::Ok);
    assert_eq!(perform(&handle, map(0x7000_1000, second, 1, 2)), Status::Ok);
    driver.track_writes();
    driver.activate_all(&mut rng);
    driver.queues[0].add(&[writable(0x7000_0fe0, 64)]);
    driver.queues[0].kick();
    assert_eq!(driver.wait_used(0).1, 64);
    assert_ne!(driver.read(BORDER - 32, 32), [0; 32]);
    assert_ne!(driver.read(second, 32), [0; 32]);
    assert_eq!(driver.read(BORDER, 32), [0; 32]);
    assert!(driver.was_written(BORDER - 32) && driver.was_written(second));
    assert!(!driver.was_written(BORDER));
}

#[test]
fn rings_may_lie_on_pages_in_any_order() {
    let handle = iommu().handle();
    let endpoint = handle.endpoint();
    handle.add(NUMBER, &endpoint);
    assert_eq!(perform(&handle, attach(1)), Status::Ok);
    let mut driver = Driver::new(1, 16);
    driver.queues[0].endpoint = Some(Arc::clone(&endpoint));
    let mut queue = taken(&driver, &endpoint);
    let memory = queue.memory();
    assert!(queue.pop(&memory).is_err(), "nothing is mapped");
    // The first half of the page with the rings alone.
    assert_eq!(perform(&handle, map(0, 0, 1, 1)), Status::Ok);
    driver.queues[0].add(&[readable(0, 8), readable(0x10, 8)]);
    let chain = queue.pop(&memory).unwrap().unwrap();
    assert!(queue.add_used(&memory, chain.head, 0).is_err(), "the used ring is read-only");
}

#[test]
fn refused_accesses_are_reported_and_stop_the_device() {
    let (_device, mut driver, endpoint) = started();
    driver.queues[1].add(&[writable(DATA + 0x400, 24)]);
    driver.queues[1].kick();
    assert_eq!(ask(&mut driver, attach(1)), 0);
    assert_eq!(ask(&mut driver, map(0, 0, 1, READ_WRITE)), 0);
    assert_eq!(ask(&mut driver, map(0x10_0000, 0x1000, 1, 1)), 0);
    let mut rng = Rng::new(RngConfig::default()).unwrap();
    let mut other = Driver::new(1, 16);
    other.queues[0].endpoint = Some(endpoint);
    other.activate_all(&mut rng);
    other.queues[0].add(&[writable(0x10_0800, 16)]);
    other.queues[0].kick();
    other.interrupt.wait_broken();
    assert_eq!(driver.wait_used(1).1, 24);
    let report = driver.read(DATA + 0x400, 24);
    assert_eq!(report[..12], [2, 0, 0, 0, 2, 1, 0, 0, 0x18, 0, 1, 0]);
    assert_eq!(report[16..], 0x10_0800_u64.to_le_bytes());
    assert_eq!(other.read(0x1800, 16), [0; 16]);
}

#[test]
fn a_mapping_is_removed_when_what_uses_it_has_ended() {
    let (device, mut driver, endpoint) = started();
    let mut other = Driver::new(1, 16);
    assert_eq!(ask(&mut driver, attach(1)), 0);
    assert_eq!(ask(&mut driver, map(0, 0, 1, READ_WRITE)), 0);
    for page in [1, 2] {
        assert_eq!(ask(&mut driver, map(page << 20, 0x1000 * page, 1, READ_WRITE)), 0);
    }
    let mut queue = taken(&other, &endpoint);
    let memory = queue.memory();
    other.queues[0].add(&[readable(1 << 20, 16), writable((1 << 20) + 0x800, 16)]);
    let chain = queue.pop(&memory).unwrap().unwrap();
    // What is not in use is removed at once.
    assert_eq!(ask(&mut driver, unmap(2 << 20, 1)), 0);
    // What is in use is gone at once for the next chain, and the request is not answered, however often something
    // else ends.
    let wait_until_carried_out = || {
        while device.handle().domains.lock().pending.is_none() {
            std::thread::yield_now();
        }
    };
    send(&mut driver, &bytes(unmap(1 << 20, 1)), 4);
    wait_until_carried_out();
    other.queues[0].add(&[readable(1 << 20, 16)]);
    assert!(queue.pop(&memory).is_err());
    for _ in 0..100 {
        device.handle().notices.event.write(1).unwrap();
        while device.handle().notices.event.read().is_ok() {
            std::thread::yield_now();
        }
        assert!(device.handle().domains.lock().pending.is_some());
    }
    assert_eq!(driver.queues[0].take_used(), None);
    queue.add_used(&memory, chain.head, 16).unwrap();
    assert_eq!(driver.wait_used(0).1, 4);
    assert_eq!(driver.read(ANSWER, 1), [0]);
    // The same for what ends with its queue.
    assert_eq!(ask(&mut driver, map(1 << 20, 0x1000, 1, READ_WRITE)), 0);
    other.queues[0].add(&[readable(1 << 20, 16)]);
    let _chain = queue.pop(&memory).unwrap().unwrap();
    send(&mut driver, &bytes(Request::Detach { domain: 1, endpoint: NUMBER }), 4);
    wait_until_carried_out();
    drop(queue);
    assert_eq!(driver.wait_used(0).1, 4);
    assert_eq!(driver.read(ANSWER, 1), [0]);
}

#[test]
fn a_chain_that_uses_too_many_mappings_is_refused() {
    const PAGES: u64 = 1 << 16;
    let handle = of_guest(1 << 40).handle();
    let endpoint = handle.endpoint();
    handle.add(NUMBER, &endpoint);
    assert_eq!(perform(&handle, attach(1)), Status::Ok);
    let first = 1 << 40;
    // Next to each other in memory as well, so that what they lead to is one range.
    for page in 0..PAGES {
        let gpa = page * PAGE_BYTES;
        assert_eq!(perform(&handle, map(first + gpa, gpa, 1, 1)), Status::Ok);
    }
    assert_eq!(perform(&handle, map(0, 0, 1, READ_WRITE)), Status::Ok);
    for (pages, is_taken) in [(PAGES - 1, true), (PAGES, false)] {
        let mut driver = Driver::new(1, 16);
        let mut queue = taken(&driver, &endpoint);
        let memory = queue.memory();
        let len_bytes = u32::try_from(pages * PAGE_BYTES).unwrap();
        driver.queues[0].add(&[readable(first, len_bytes)]);
        assert_eq!(queue.pop(&memory).is_ok(), is_taken, "{pages}");
    }
}

#[test]
fn a_ring_may_cross_pages_that_are_not_next_to_each_other() {
    let handle = iommu().handle();
    let endpoint = handle.endpoint();
    handle.add(NUMBER, &endpoint);
    assert_eq!(perform(&handle, attach(1)), Status::Ok);
    let driver = Driver::new(1, 16);
    let memory = driver.memory.memory();
    assert_eq!(perform(&handle, map(0x7000_0000, DATA + 0x3000, 1, READ_WRITE)), Status::Ok);
    assert_eq!(perform(&handle, map(0x7000_1000, DATA, 1, READ_WRITE)), Status::Ok);
    let dma = endpoint.queue();
    let bytes: Vec<u8> = (1..=32).collect();
    dma.rings(&memory).write_slice(&bytes, GuestAddress(0x7000_0ff0)).unwrap();
    assert_eq!(driver.read(DATA + 0x3ff0, 16), bytes[..16]);
    assert_eq!(driver.read(DATA, 16), bytes[16..]);
    assert_eq!(driver.read(DATA + 0x4000, 16), [0; 16]);
    let mut read = [0; 32];
    dma.rings(&memory).read_slice(&mut read, GuestAddress(0x7000_0ff0)).unwrap();
    assert_eq!(read[..], bytes);
    assert!(dma.rings(&memory).read_slice(&mut read, GuestAddress(0x7000_1ff0)).is_err());
}

#[test]
fn what_a_queue_has_kept_is_not_used_in_another_domain() {
    let handle = iommu().handle();
    let endpoint = handle.endpoint();
    handle.add(NUMBER, &endpoint);
    let mut driver = Driver::new(1, 16);
    assert_eq!(perform(&handle, attach(1)), Status::Ok);
    for request in [map(0, 0, 1, READ_WRITE), map(1 << 20, DATA, 1, 1)] {
        assert_eq!(perform(&handle, request), Status::Ok);
    }
    let mut queue = taken(&driver, &endpoint);
    let memory = queue.memory();
    driver.queues[0].add(&[readable(1 << 20, 16)]);
    let chain = queue.pop(&memory).unwrap().unwrap();
    queue.add_used(&memory, chain.head, 0).unwrap();
    assert_eq!(perform(&handle, attach(2)), Status::Ok);
    let in_second =
        |first, gpa| Request::Map { domain: 2, first, last: first + 0xfff, gpa, flags: 3 };
    assert_eq!(perform(&handle, in_second(0, 0)), Status::Ok);
    driver.queues[0].add(&[readable(1 << 20, 16)]);
    assert!(queue.pop(&memory).is_err());
}

#[test]
fn a_chain_is_in_flight_once() {
    let handle = iommu().handle();
    let endpoint = handle.endpoint();
    handle.add(NUMBER, &endpoint);
    let mut driver = Driver::new(1, 16);
    let mut queue = taken(&driver, &endpoint);
    let memory = queue.memory();
    driver.queues[0].add(&[readable(DATA, 16)]);
    let chain = queue.pop(&memory).unwrap().unwrap();
    queue.undo_pop();
    assert_eq!(queue.pop(&memory).unwrap().unwrap().head, chain.head);
    driver.queues[0].publish(chain.head);
    assert!(queue.pop(&memory).is_err());
}

#[test]
fn mappings_are_limited() {
    let limit = |memory_bytes| of_guest(memory_bytes).handle().domains.lock().mappings_max();
    let (least, most) = MAPPINGS_RANGE.into_inner();
    assert_eq!((limit(0), limit(1 << 30), limit(1 << 40)), (least, 1 << 18, most));
    let handle = iommu().handle();
    let endpoint = handle.endpoint();
    handle.add(NUMBER, &endpoint);
    assert_eq!(perform(&handle, attach(1)), Status::Ok);
    let first = 1 << 40;
    for page in 0..least as u64 {
        assert_eq!(perform(&handle, map(first + page * PAGE_BYTES, 0, 1, 1)), Status::Ok);
    }
    assert_eq!(perform(&handle, map(0, 0, 1, 1)), Status::NoMemory);
    assert_eq!(perform(&handle, unmap(first, 1)), Status::Ok);
    assert_eq!(perform(&handle, map(0, 0, 1, 1)), Status::Ok);
    // Those of a domain end with it.
    let detach = Request::Detach { domain: 1, endpoint: NUMBER };
    assert_eq!(perform(&handle, detach), Status::Ok);
    assert_eq!(perform(&handle, attach(1)), Status::Ok);
    assert_eq!(perform(&handle, map(0, 0, 1, 1)), Status::Ok);
}

#[test]
fn without_a_domain_the_register_counts_and_outlives_a_reset() {
    let (mut device, _driver, endpoint) = started();
    let mut other = Driver::new(1, 16);
    other.queues[0].add(&[readable(DATA, 16)]);
    let reaches = |endpoint: &Arc<Endpoint>| {
        let mut queue = taken(&other, endpoint);
        let memory = queue.memory();
        matches!(queue.pop(&memory), Ok(Some(_)))
    };
    assert!(reaches(&endpoint));
    device.write_config(36, &[2]);
    device.write_config(35, &[0]);
    assert!(reaches(&endpoint));
    device.write_config(36, &[0]);
    assert!(!reaches(&endpoint));
    assert_eq!(perform(&device.handle(), attach(1)), Status::Ok);
    device.reset();
    assert!(!reaches(&endpoint));
    // Without the feature the register is read-only.
    device.write_config(36, &[1]);
    assert!(!reaches(&endpoint));
    device.acknowledge_features(device.features());
    device.write_config(36, &[1]);
    assert!(reaches(&endpoint));
}

#[test]
fn domains_are_saved_and_restored() {
    let (mut device, mut driver, endpoint) = started();
    assert_eq!(ask(&mut driver, attach(1)), 0);
    assert_eq!(ask(&mut driver, map(0, 0, 1, READ_WRITE)), 0);
    assert_eq!(ask(&mut driver, map(1 << 20, 0x1000, 3, 1)), 0);
    device.write_config(36, &[0]);
    // A request that is not answered yet is answered at the destination.
    let mut other = Driver::new(1, 16);
    let mut queue = taken(&other, &endpoint);
    other.queues[0].add(&[readable(1 << 20, 16)]);
    let memory = queue.memory();
    let _chain = queue.pop(&memory).unwrap().unwrap();
    send(&mut driver, &bytes(Request::Detach { domain: 1, endpoint: NUMBER }), 4);
    while device.handle().domains.lock().pending.is_none() {
        std::thread::yield_now();
    }
    let positions = device.pause();
    let state = device.save();

    let mut destination = iommu();
    let endpoint = destination.handle().endpoint();
    assert!(destination.restore(&state).is_ok(), "the domain is gone with its last endpoint");
    destination.handle().add(NUMBER, &endpoint);
    destination.restore(&state).unwrap();
    assert_eq!(destination.save(), state);
    device.reset();
    driver.activate_restored(&mut destination, device.features(), &positions);
    assert_eq!(driver.wait_used(0).1, 4);
    assert_eq!(driver.read(ANSWER, 1), [0]);
    assert_eq!(ask(&mut driver, attach(1)), 0);
    assert_eq!(ask(&mut driver, map(1 << 20, 0x1000, 3, 1)), 0);
    destination.pause();
    let state = destination.save();
    let mut third = iommu();
    assert!(third.restore(&state).is_err(), "there is no such device");
    let endpoint = third.handle().endpoint();
    third.handle().add(NUMBER, &endpoint);
    third.restore(&state).unwrap();
    assert_eq!(third.save(), state);
    assert_eq!(perform(&third.handle(), unmap(1 << 20, 3)), Status::Ok);
}
