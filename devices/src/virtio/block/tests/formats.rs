// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Images in a format, seen from the driver.

use std::time::{Duration, Instant};

use super::super::no_space::OnFull;
use super::super::{DiskFormat, Qcow2Sample, vhd};
use super::*;

/// Changes to the file by a write to a new cluster before those to its tables.
const DATA_CHANGES: i32 = 3;
const PATIENCE: Duration = Duration::from_secs(20);

fn qcow2() -> NamedTempFile {
    let sample =
        Qcow2Sample { cluster_bits: 12, size_bytes: SECTORS * 512, ..Qcow2Sample::default() };
    let mut image = NamedTempFile::new().unwrap();
    image.write_all(&sample.image()).unwrap();
    image
}

fn vhd_of(mut image: NamedTempFile) -> NamedTempFile {
    image.seek(SeekFrom::End(0)).unwrap();
    image.write_all(&vhd::footer(SECTORS * 512, 2)).unwrap();
    image
}

/// A device with the image locked and loaded.
fn fixture(image: NamedTempFile, change: impl FnOnce(&mut BlockConfig)) -> Fixture {
    let mut config = BlockConfig { format: DiskFormat::Qcow2, ..config(&image) };
    change(&mut config);
    let device = Block::new(config).unwrap();
    let lock = device.lock();
    lock.lock().unwrap();
    lock.load().unwrap();
    Fixture::with(device, image)
}

#[test]
fn requests_reach_the_disk_in_the_image() {
    let mut fixture = fixture(qcow2(), |_| {});
    let mut capacity = [0; 8];
    fixture.device.read_config(0, &mut capacity);
    assert_eq!(u64::from_le_bytes(capacity), SECTORS);
    // A driver frees whole clusters.
    let mut unit = [0; 4];
    fixture.device.read_config(44, &mut unit);
    assert_eq!(u32::from_le_bytes(unit), 8);
    for sector in 0..32 {
        fixture.driver.write(BUFFER, &pattern(sector));
        let status = fixture.request(abi::VIRTIO_BLK_T_OUT, sector, &[readable(BUFFER, 512)]);
        assert_eq!(status, (OK, 1));
    }
    assert_eq!(fixture.request(abi::VIRTIO_BLK_T_FLUSH, 0, &[]).0, OK);
    assert_eq!(fixture.ranges(abi::VIRTIO_BLK_T_DISCARD, &[(8, 8, 0)]), OK);
    assert_eq!(fixture.ranges(abi::VIRTIO_BLK_T_WRITE_ZEROES, &[(20, 1, 1)]), OK);
    for sector in 0..40 {
        let read = [writable(BUFFER, 512)];
        assert_eq!(fixture.request(abi::VIRTIO_BLK_T_IN, sector, &read), (OK, 513));
        let is_zero = (8..16).contains(&sector) || sector == 20 || sector >= 32;
        let expected = if is_zero { [0; 512] } else { pattern(sector) };
        assert_eq!(fixture.driver.read(BUFFER, 512), expected, "sector {sector}");
    }
    let beyond = [readable(BUFFER, 512)];
    assert_eq!(fixture.request(abi::VIRTIO_BLK_T_OUT, SECTORS, &beyond).0, IO_ERROR);
    let id = [writable(BUFFER, 20)];
    assert_eq!(fixture.request(abi::VIRTIO_BLK_T_GET_ID, 0, &id).0, OK);
}

#[test]
fn what_is_allocated_is_read_and_written_in_its_place() {
    if !Ring::is_available() {
        test_skip::skip!("io_uring cannot be used here");
        return;
    }
    let mut fixture = fixture(qcow2(), |_| {});
    let lock = fixture.device.lock();
    let begun = || lock.disk.formatted().unwrap().transfers_begun();
    for (round, in_place) in [(0, 0), (1, 1)] {
        fixture.driver.write(BUFFER, &pattern(round));
        let write = [readable(BUFFER, 200), readable(BUFFER + 200, 312)];
        assert_eq!(fixture.request(abi::VIRTIO_BLK_T_OUT, 9, &write), (OK, 1));
        assert_eq!(begun(), in_place);
    }
    let read = [writable(BUFFER + 0x1000, 512)];
    assert_eq!(fixture.request(abi::VIRTIO_BLK_T_IN, 9, &read), (OK, 513));
    assert_eq!(begun(), 2);
    assert_eq!(fixture.driver.read(BUFFER + 0x1000, 512), pattern(1));
    // What is nowhere is not.
    assert_eq!(fixture.request(abi::VIRTIO_BLK_T_IN, 900, &read), (OK, 513));
    assert_eq!(begun(), 2);
    // Without a cache of the host, a write takes the tables with it.
    fixture.device.write_config(32, &[0]);
    assert_eq!(fixture.request(abi::VIRTIO_BLK_T_OUT, 9, &[readable(BUFFER, 512)]).0, OK);
    assert_eq!(begun(), 2);
}

#[test]
fn a_transfer_that_the_file_refuses_takes_the_usual_way() {
    if !Ring::is_available() {
        test_skip::skip!("io_uring cannot be used here");
        return;
    }
    let mut fixture = fixture(qcow2(), |_| {});
    let write = [readable(BUFFER, 4096)];
    assert_eq!(fixture.request(abi::VIRTIO_BLK_T_OUT, 8, &write), (OK, 1));
    // The file ends within the cluster: what is behind reads as zeros, which the kernel's answer does not say.
    let lock = fixture.device.lock();
    let place = lock.disk.formatted().unwrap().begin_transfer(4096, 4096, false).unwrap().place;
    fixture.image.as_file().set_len(place.offset + 1024).unwrap();
    fixture.driver.write(BUFFER, &[0xee; 4096]);
    assert_eq!(fixture.request(abi::VIRTIO_BLK_T_IN, 8, &[writable(BUFFER, 4096)]), (OK, 4097));
    assert_eq!(fixture.driver.read(BUFFER, 4096), [0; 4096]);
    // An error of the host is reported once, by the driver of the format.
    lock.disk.refusal.set(libc::EIO);
    assert_eq!(fixture.request(abi::VIRTIO_BLK_T_OUT, 8, &[readable(BUFFER, 512)]).0, IO_ERROR);
    lock.disk.refusal.set(0);
    assert_eq!(fixture.request(abi::VIRTIO_BLK_T_OUT, 8, &[readable(BUFFER, 512)]).0, OK);
    assert_eq!(fixture.device.pause().len(), 1);
}

/// Time that the thread of the queue has had a processor for.
fn processor_time(thread: &str) -> Duration {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let is_meant = |task: &std::path::Path| {
        std::fs::read_to_string(task.join("comm")).is_ok_and(|comm| comm.trim() == thread)
    };
    let mut tasks = tasks.map(|task| task.unwrap().path());
    let task = tasks.find(|task| is_meant(task)).unwrap();
    let text = std::fs::read_to_string(task.join("schedstat")).unwrap();
    Duration::from_nanos(text.split(' ').next().unwrap().parse().unwrap())
}

#[test]
fn a_queue_with_nothing_to_do_takes_no_processor() {
    let mut fixture = fixture(qcow2(), |config| "spins".clone_into(&mut config.id));
    // Several at a time, so that a thread of the pool announces what was taken with the work of another.
    for round in 0..300_u64 {
        for slot in 0..4_u64 {
            let at = DATA + 0x1_0000 + slot * 0x1000;
            let mut header = [0; 16];
            header[8..].copy_from_slice(&((round * 4 + slot) % SECTORS).to_le_bytes());
            fixture.driver.write(at, &header);
            let buffers = [readable(at, 16), writable(at + 0x200, 512), writable(at + 0x10, 1)];
            fixture.driver.queues[0].add(&buffers);
        }
        fixture.driver.queues[0].kick();
        for _ in 0..4 {
            fixture.driver.wait_used(0);
        }
        if round % 10 == 9 {
            let (before, began) = (processor_time("spins_q0"), Instant::now());
            while began.elapsed() < Duration::from_millis(10) {
                std::thread::yield_now();
            }
            let took = processor_time("spins_q0").saturating_sub(before);
            assert!(took < Duration::from_millis(4), "{took:?} after round {round}");
        }
    }
}

/// A discard waits for transfers that only the thread of their queue ends, whatever that is told meanwhile.
#[test]
fn transfers_end_before_what_waits_for_them() {
    const ROUNDS: u32 = 200;
    if !Ring::is_available() {
        test_skip::skip!("io_uring cannot be used here");
        return;
    }
    let (tell, told) = std::sync::mpsc::channel();
    let work = move || {
        for round in 0..ROUNDS {
            // Direct, so that the kernel does not answer at once.
            let mut fixture = fixture(qcow2(), |config| config.direct = true);
            fixture.driver.write(BUFFER, &[0xee; 4096]);
            let write = [readable(BUFFER, 4096)];
            assert_eq!(fixture.request(abi::VIRTIO_BLK_T_OUT, 8, &write).0, OK);
            let ask = |fixture: &mut Fixture, at: u64, kind: u32, sector: u64, data| {
                let mut header = [0; 16];
                header[..4].copy_from_slice(&kind.to_le_bytes());
                header[8..].copy_from_slice(&sector.to_le_bytes());
                fixture.driver.write(at, &header);
                let buffers = [readable(at, 16), data, writable(at + 0x40, 1)];
                fixture.driver.queues[0].add(&buffers);
            };
            let lock = fixture.device.lock();
            let begun = lock.disk.formatted().unwrap().transfers_begun();
            let read = writable(BUFFER + 0x2000, 4096);
            ask(&mut fixture, DATA + 0x8000, abi::VIRTIO_BLK_T_IN, 8, read);
            let range = [8_u64.to_le_bytes().to_vec(), [8, 0, 0, 0, 0, 0, 0, 0].to_vec()].concat();
            fixture.driver.write(DATA + 0x8800, &range);
            let range = readable(DATA + 0x8800, 16);
            ask(&mut fixture, DATA + 0x8400, abi::VIRTIO_BLK_T_DISCARD, 0, range);
            let is_broken = round % 2 == 1;
            if is_broken {
                // Has no room for a status.
                fixture.driver.queues[0].add(&[readable(HEADER, 16)]);
            }
            fixture.driver.queues[0].kick();
            let formatted = lock.disk.formatted().unwrap();
            while formatted.transfers_begun() == begun {
                std::thread::yield_now();
            }
            if is_broken {
                fixture.driver.interrupt.wait_broken();
                // Of another queue, for example.
                drop(formatted.hold());
                fixture.device.pause();
            } else {
                fixture.device.reset();
            }
            drop(fixture);
        }
        tell.send(()).unwrap();
    };
    let thread = std::thread::spawn(work);
    told.recv_timeout(Duration::from_mins(1)).expect("a queue waits for itself, or a step failed");
    thread.join().unwrap();
}

#[test]
fn an_image_that_is_not_loaded_answers_with_errors() {
    let image = qcow2();
    let device = Block::new(BlockConfig { format: DiskFormat::Qcow2, ..config(&image) }).unwrap();
    let mut fixture = Fixture::with(device, image);
    let read = [writable(BUFFER, 512)];
    assert_eq!(fixture.request(abi::VIRTIO_BLK_T_IN, 0, &read).0, IO_ERROR);
    let lock = fixture.device.lock();
    lock.lock().unwrap();
    lock.load().unwrap();
    assert_eq!(fixture.request(abi::VIRTIO_BLK_T_IN, 0, &read).0, OK);
}

#[test]
fn many_requests_at_a_time_are_finished_before_a_pause() {
    let mut fixture = fixture(qcow2(), |config| config.queue_size = 64);
    for round in 0..4_u64 {
        for slot in 0..16_u64 {
            let at = DATA + 0x1_0000 + slot * 0x1000;
            let mut header = [0; 16];
            header[..4].copy_from_slice(&abi::VIRTIO_BLK_T_OUT.to_le_bytes());
            let sector = (round * 16 + slot) * 3;
            header[8..].copy_from_slice(&sector.to_le_bytes());
            fixture.driver.write(at, &header);
            fixture.driver.write(at + 0x200, &pattern(sector));
            let buffers = [readable(at, 16), readable(at + 0x200, 512), writable(at + 0x10, 1)];
            fixture.driver.queues[0].add(&buffers);
        }
        fixture.driver.queues[0].kick();
        // In the last round they are under way, or not begun.
        if round < 3 {
            for _ in 0..16 {
                fixture.driver.wait_used(0);
            }
        }
    }
    fixture.device.pause();
    let answered = fixture.driver.queues[0].used_index();
    assert!((48..=64).contains(&answered), "{answered}");
    fixture.device.lock().write_back().unwrap();
    fixture.device.resume();
    let until = Instant::now() + PATIENCE;
    while fixture.driver.queues[0].used_index() != 64 {
        assert!(Instant::now() < until, "{}", fixture.driver.queues[0].used_index());
        std::thread::yield_now();
    }
    let lock = fixture.device.lock();
    for number in 0..64 {
        let mut found = [0; 512];
        lock.disk.read_exact_at(&mut found, number * 3 * 512).unwrap();
        assert_eq!(found, pattern(number * 3));
    }
}

#[test]
fn what_is_under_way_keeps_a_pause_waiting_and_no_other_queue() {
    let mut fixture = fixture(qcow2(), |_| {});
    fixture.driver.write(BUFFER, &pattern(5));
    let lock = fixture.device.lock();
    let held = lock.disk.formatted().unwrap().hold();
    fixture.header(abi::VIRTIO_BLK_T_OUT, 5);
    let buffers = [readable(HEADER, 16), readable(BUFFER, 512), writable(STATUS, 1)];
    fixture.driver.queues[0].add(&buffers);
    fixture.driver.queues[0].kick();
    // Waits for nothing of the image, so its answer comes first, from the thread of the queue.
    let (header, status) = (DATA + 0x8000, DATA + 0x8100);
    let mut id = [0; 16];
    id[..4].copy_from_slice(&abi::VIRTIO_BLK_T_GET_ID.to_le_bytes());
    fixture.driver.write(header, &id);
    let buffers = [readable(header, 16), writable(DATA + 0x8200, 20), writable(status, 1)];
    fixture.driver.queues[0].add(&buffers);
    fixture.driver.queues[0].kick();
    fixture.driver.wait_used(0);
    assert_eq!(fixture.driver.read(status, 1), [OK]);
    let still = fixture.device.begin_pause();
    assert!(!still.wait_until(Instant::now() + Duration::from_millis(50)));
    assert_eq!(fixture.driver.queues[0].used_index(), 1);
    drop(held);
    assert!(still.wait_until(Instant::now() + PATIENCE));
    assert_eq!(fixture.driver.queues[0].used_index(), 2);
    assert_eq!(fixture.driver.read(STATUS, 1), [OK]);
}

#[test]
fn a_write_for_which_there_is_no_room_is_kept() {
    let mut fixture = fixture(qcow2(), |config| config.on_full = OnFull::Pause);
    let full = fixture.device.full_disk().unwrap();
    let (tell, told) = std::sync::mpsc::channel();
    full.on_full(move || tell.send(()).unwrap());
    fixture.device.lock().disk.refusal.set(libc::ENOSPC);
    fixture.driver.write(BUFFER, &pattern(5));
    fixture.header(abi::VIRTIO_BLK_T_OUT, 5);
    let buffers = [readable(HEADER, 16), readable(BUFFER, 512), writable(STATUS, 1)];
    fixture.driver.queues[0].add(&buffers);
    fixture.driver.queues[0].kick();
    told.recv_timeout(PATIENCE).unwrap();
    fixture.device.pause();
    assert_eq!(full.kept(), 1);
    full.try_again().unwrap_err();
    fixture.device.lock().disk.refusal.set(0);
    full.try_again().unwrap();
    fixture.device.resume();
    fixture.driver.wait_used(0);
    assert_eq!(fixture.driver.read(STATUS, 1), [OK]);
    let read = [writable(BUFFER + 0x1000, 512)];
    assert_eq!(fixture.request(abi::VIRTIO_BLK_T_IN, 5, &read).0, OK);
    assert_eq!(fixture.driver.read(BUFFER + 0x1000, 512), pattern(5));
}

/// The data are in the file, and the tables find no room: nothing is lost.
#[test]
fn a_flush_for_whose_tables_there_is_no_room_may_be_done_again() {
    let data = [readable(BUFFER, 512)];
    let read = [writable(BUFFER + 0x1000, 512)];
    for on_full in [OnFull::Report, OnFull::Pause] {
        let mut fixture = fixture(qcow2(), |config| config.on_full = on_full);
        fixture.driver.write(BUFFER, &pattern(7));
        assert_eq!(fixture.request(abi::VIRTIO_BLK_T_OUT, 7, &data).0, OK);
        fixture.device.lock().disk.refusal.set(libc::ENOSPC);
        if on_full == OnFull::Report {
            assert_eq!(fixture.request(abi::VIRTIO_BLK_T_FLUSH, 0, &[]).0, IO_ERROR);
            fixture.device.lock().check_stable().unwrap();
            fixture.device.lock().disk.refusal.set(0);
            assert_eq!(fixture.request(abi::VIRTIO_BLK_T_FLUSH, 0, &[]).0, OK);
        } else {
            let full = fixture.device.full_disk().unwrap();
            let (tell, told) = std::sync::mpsc::channel();
            full.on_full(move || tell.send(()).unwrap());
            fixture.header(abi::VIRTIO_BLK_T_FLUSH, 0);
            fixture.driver.queues[0].add(&[readable(HEADER, 16), writable(STATUS, 1)]);
            fixture.driver.queues[0].kick();
            told.recv_timeout(PATIENCE).unwrap();
            fixture.device.pause();
            fixture.device.lock().disk.refusal.set(0);
            full.try_again().unwrap();
            fixture.device.resume();
            fixture.driver.wait_used(0);
            assert_eq!(fixture.driver.read(STATUS, 1), [OK]);
        }
        fixture.device.lock().check_stable().unwrap();
        assert_eq!(fixture.request(abi::VIRTIO_BLK_T_IN, 7, &read).0, OK);
        assert_eq!(fixture.driver.read(BUFFER + 0x1000, 512), pattern(7));
        // Any other failure is not to be made good.
        fixture.driver.write(BUFFER, &pattern(300));
        assert_eq!(fixture.request(abi::VIRTIO_BLK_T_OUT, 300, &data).0, OK);
        fixture.device.lock().disk.refusal.set(libc::EIO);
        assert_eq!(fixture.request(abi::VIRTIO_BLK_T_FLUSH, 0, &[]).0, IO_ERROR);
        fixture.device.lock().disk.refusal.set(0);
        assert_eq!(fixture.request(abi::VIRTIO_BLK_T_FLUSH, 0, &[]).0, IO_ERROR);
    }
}

/// Without a cache a write has to bring its tables with it.
#[test]
fn a_stable_write_for_whose_tables_there_is_no_room_is_kept() {
    let (image, change) = (qcow2(), |config: &mut BlockConfig| config.on_full = OnFull::Pause);
    let mut fixture = fixture(image, change);
    // The driver turns its cache off.
    fixture.device.write_config(32, &[0]);
    let full = fixture.device.full_disk().unwrap();
    let (tell, told) = std::sync::mpsc::channel();
    full.on_full(move || tell.send(()).unwrap());
    // The first write of a cluster: its L2 table is there, and what comes after the data are the tables.
    fixture.driver.write(BUFFER, &pattern(1));
    assert_eq!(fixture.request(abi::VIRTIO_BLK_T_OUT, 1, &[readable(BUFFER, 512)]).0, OK);
    fixture.device.lock().disk.refusal.set_after(DATA_CHANGES, libc::ENOSPC);
    fixture.driver.write(BUFFER, &pattern(80));
    fixture.header(abi::VIRTIO_BLK_T_OUT, 80);
    let buffers = [readable(HEADER, 16), readable(BUFFER, 512), writable(STATUS, 1)];
    fixture.driver.queues[0].add(&buffers);
    fixture.driver.queues[0].kick();
    told.recv_timeout(PATIENCE).unwrap();
    fixture.device.pause();
    fixture.device.lock().disk.refusal.set(0);
    full.try_again().unwrap();
    fixture.device.resume();
    fixture.driver.wait_used(0);
    assert_eq!(fixture.driver.read(STATUS, 1), [OK]);
}

#[test]
fn a_loaded_image_passes_to_the_next_device() {
    let image = qcow2();
    let config = BlockConfig { format: DiskFormat::Qcow2, ..config(&image) };
    let first = Block::new(config.clone()).unwrap();
    let kept = first.lock();
    kept.lock().unwrap();
    kept.load().unwrap();
    kept.disk.write_all_at(&pattern(9), 9 * 512).unwrap();
    assert!(kept.fits(&config));
    assert!(!kept.fits(&BlockConfig { format: DiskFormat::Raw, ..config.clone() }));
    drop(first);
    let next = Block::over(config, &kept).unwrap();
    drop(kept);
    let mut found = [0; 512];
    next.lock().disk.read_exact_at(&mut found, 9 * 512).unwrap();
    assert_eq!(found, pattern(9));
    assert_eq!(next.lock().disk.capacity_sectors(), SECTORS);
}

#[test]
fn a_fixed_vhd_ends_before_its_footer() {
    for direct in [false, true] {
        let image = vhd_of(image());
        let config = BlockConfig { format: DiskFormat::FixedVhd, direct, ..config(&image) };
        let Ok(device) = Block::new(config.clone()) else {
            assert!(direct, "it can be opened");
            test_skip::skip!("no direct I/O here");
            continue;
        };
        let mut fixture = Fixture::with(device, image);
        let buffer = [readable(BUFFER, 512)];
        assert_eq!(fixture.request(abi::VIRTIO_BLK_T_OUT, SECTORS - 8, &buffer).0, OK);
        assert_eq!(fixture.request(abi::VIRTIO_BLK_T_OUT, SECTORS, &buffer).0, IO_ERROR);
        let read = [writable(BUFFER, 512)];
        assert_eq!(fixture.request(abi::VIRTIO_BLK_T_IN, SECTORS - 9, &read).0, OK);
        assert_eq!(fixture.driver.read(BUFFER, 512), pattern(SECTORS - 9));
        assert_eq!(fixture.on_disk(SECTORS, 1), vhd::footer(SECTORS * 512, 2));
        let lock = fixture.device.lock();
        let again = Block::over(config, &lock).unwrap();
        assert_eq!(again.lock().disk.capacity_sectors(), SECTORS);
    }
    let raw = image();
    let refused = Block::new(BlockConfig { format: DiskFormat::FixedVhd, ..config(&raw) });
    assert!(matches!(refused, Err(DiskError::Format { .. })));
}
