// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A driver that makes a request for each that is completed, before the device looks for more.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use vm_memory::{Bytes as _, GuestAddress, GuestAddressSpace as _};

use super::*;
use crate::virtio::{Activation, VirtioInterrupt};

const EVENT_IDX: u64 = 1 << 29;
/// Longer than anything here takes.
const PATIENCE: Duration = Duration::from_secs(20);

/// Makes the same chain available again at each interrupt.
struct Again {
    memory: memory::GuestMemoryHandle,
    available_index: GuestAddress,
    interrupts: AtomicU64,
}

impl VirtioInterrupt for Again {
    fn queue_used(&self, _queue_index: u16) {
        let memory = self.memory.memory();
        let available: u16 = memory.load(self.available_index, Ordering::Acquire).unwrap();
        memory.store(available.wrapping_add(1), self.available_index, Ordering::Release).unwrap();
        self.interrupts.fetch_add(1, Ordering::Relaxed);
    }
    fn config_changed(&self) {}
    fn needs_reset(&self) {
        panic!("the driver keeps the rules");
    }
}

#[test]
fn a_driver_that_never_rests_does_not_keep_the_device_from_pausing() {
    with_both_engines(|synchronous| {
        let image = image();
        let config = BlockConfig { disable_io_uring: synchronous, ..config(&image) };
        let mut device = Block::new(config).unwrap();
        let mut driver = Driver::new(1, 64);
        let features = device.features() & !EVENT_IDX;
        driver.write(HEADER, &[0; 16]);
        let ring = driver.queues[0].available_ring();
        driver.queues[0].add(&[readable(HEADER, 16), writable(BUFFER, 512), writable(STATUS, 1)]);
        // All entries of the ring name this chain, whose head is 0.
        let again = Arc::new(Again {
            memory: driver.memory.clone(),
            available_index: GuestAddress(ring + 2),
            interrupts: AtomicU64::new(0),
        });
        device.acknowledge_features(features);
        let activation = driver.fresh(features);
        device.activate(Activation { interrupt: again.clone(), ..activation }).unwrap();
        driver.queues[0].kick();
        let begun = Instant::now();
        while again.interrupts.load(Ordering::Relaxed) < 1000 {
            assert!(begun.elapsed() < PATIENCE, "requests are completed");
            std::thread::yield_now();
        }
        let (tell, told) = channel();
        let pausing = std::thread::spawn(move || {
            device.pause();
            tell.send(()).unwrap();
        });
        told.recv_timeout(PATIENCE).expect("the device pauses");
        pausing.join().unwrap();
        assert_eq!(driver.read(BUFFER, 512), pattern(0));
    });
}
