// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The registers of one queue, and their validation.
//!
//! Whatever a driver writes is kept and read back; only [`QueueRegisters::build`] decides whether
//! it describes a valid queue. Never touches guest memory: a ring's pages may not have arrived yet.

use memory::GuestMemory;
use thiserror::Error;
use virtio_queue::{Queue, QueueState};
use vm_memory::{GuestAddress, GuestMemoryBackend};

use super::state::QueueProgressState;

/// Why queue registers are invalid.
#[derive(Debug, Error)]
pub enum QueueError {
    /// Size or alignment violates the standard (virtio 1.3, 2.7).
    #[error("its size or the alignment of its addresses is not allowed")]
    Registers {
        /// The violated rule.
        #[source]
        source: virtio_queue::Error,
    },
    /// A ring is outside guest memory.
    #[error("its {ring} of {len_bytes} bytes at {gpa:#x} is not in guest memory")]
    Outside {
        /// The ring.
        ring: &'static str,
        /// Its address.
        gpa: u64,
        /// Its length in bytes.
        len_bytes: u64,
    },
    /// The driver has not given the address of the available ring; it cannot be at 0.
    #[error("its available ring has no address")]
    NoAddress,
    /// Two rings share memory.
    #[error("its {first} and its {second} overlap")]
    Overlap {
        /// A ring.
        first: &'static str,
        /// Another one.
        second: &'static str,
    },
}

/// The registers of a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueRegisters {
    /// Maximum size, given by the device.
    pub size_max: u16,
    /// Size chosen by the driver.
    pub size: u16,
    /// Whether the driver has enabled it.
    pub enabled: bool,
    /// Descriptor area.
    pub desc_gpa: u64,
    /// Driver area (available ring).
    pub driver_gpa: u64,
    /// Device area (used ring).
    pub device_gpa: u64,
}

impl QueueRegisters {
    /// The registers after a reset.
    pub fn new(size_max: u16) -> Self {
        Self { size_max, size: size_max, enabled: false, desc_gpa: 0, driver_gpa: 0, device_gpa: 0 }
    }

    /// Validates the registers, and builds the queue. Its rings have to lie in `memory`, if that is given.
    pub fn build(
        &self,
        progress: QueueProgressState,
        event_idx: bool,
        memory: Option<&GuestMemory>,
    ) -> Result<Queue, QueueError> {
        let state = QueueState {
            max_size: self.size_max,
            next_avail: progress.next_avail,
            next_used: progress.next_used,
            event_idx_enabled: event_idx,
            size: self.size,
            ready: self.enabled,
            desc_table: self.desc_gpa,
            avail_ring: self.driver_gpa,
            used_ring: self.device_gpa,
        };
        let queue = Queue::try_from(state).map_err(|source| QueueError::Registers { source })?;
        // Lengths include the event fields of VIRTIO_F_EVENT_IDX (virtio 1.3, 2.7).
        let size = u64::from(self.size);
        if let Some(memory) = memory {
            inside(memory, "descriptor table", self.desc_gpa, 16 * size)?;
            inside(memory, "available ring", self.driver_gpa, 6 + 2 * size)?;
            inside(memory, "used ring", self.device_gpa, 6 + 8 * size)?;
        }
        Ok(queue)
    }

    /// Refuses rings of a new driver that cannot be meant, so that nothing is written where they lie. A valid
    /// queue is expected. Not for restored ones: those were served elsewhere.
    pub fn check_areas(&self, event_idx: bool) -> Result<(), QueueError> {
        if self.driver_gpa == 0 {
            return Err(QueueError::NoAddress);
        }
        let size = u64::from(self.size);
        // Drivers without event indexes may use the space of the event fields.
        let event_bytes = if event_idx { 2 } else { 0 };
        let areas = [
            ("descriptor table", self.desc_gpa, 16 * size),
            ("available ring", self.driver_gpa, 4 + 2 * size + event_bytes),
            ("used ring", self.device_gpa, 4 + 8 * size + event_bytes),
        ];
        let end = |gpa: u64, len_bytes| gpa.saturating_add(len_bytes);
        for (at, (first, gpa, len_bytes)) in areas.iter().enumerate() {
            for (second, other_gpa, other_bytes) in areas.iter().skip(at + 1) {
                if *gpa < end(*other_gpa, *other_bytes) && *other_gpa < end(*gpa, *len_bytes) {
                    return Err(QueueError::Overlap { first, second });
                }
            }
        }
        Ok(())
    }
}

fn inside(
    memory: &GuestMemory,
    ring: &'static str,
    gpa: u64,
    len_bytes: u64,
) -> Result<(), QueueError> {
    let fits = gpa.checked_add(len_bytes).is_some()
        && usize::try_from(len_bytes)
            .is_ok_and(|len| GuestMemoryBackend::check_range(memory, GuestAddress(gpa), len));
    if fits { Ok(()) } else { Err(QueueError::Outside { ring, gpa, len_bytes }) }
}

#[cfg(test)]
#[expect(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    fn memory() -> GuestMemory {
        GuestMemory::from_ranges(&[(GuestAddress(0), 0x1_0000), (GuestAddress(0x2_0000), 0x1000)])
            .unwrap()
    }

    fn good() -> QueueRegisters {
        QueueRegisters {
            size_max: 256,
            size: 128,
            enabled: true,
            desc_gpa: 0x1000,
            driver_gpa: 0x2000,
            device_gpa: 0x3000,
        }
    }

    fn build(registers: QueueRegisters) -> Result<Queue, QueueError> {
        registers.build(QueueProgressState { next_avail: 3, next_used: 2 }, true, Some(&memory()))
    }

    #[test]
    fn good_registers_make_a_queue() {
        let state = build(good()).unwrap().state();
        assert_eq!((state.size, state.max_size, state.ready), (128, 256, true));
        assert_eq!((state.next_avail, state.next_used, state.event_idx_enabled), (3, 2, true));
        assert_eq!((state.desc_table, state.avail_ring, state.used_ring), (0x1000, 0x2000, 0x3000));
    }

    #[test]
    fn bad_sizes_and_alignments_are_refused() {
        for size in [0, 3, 512, u16::MAX] {
            let refused = build(QueueRegisters { size, ..good() });
            assert!(matches!(refused, Err(QueueError::Registers { .. })), "{size}");
        }
        for registers in [
            QueueRegisters { desc_gpa: 0x1008, ..good() },
            QueueRegisters { driver_gpa: 0x2001, ..good() },
            QueueRegisters { device_gpa: 0x3002, ..good() },
        ] {
            assert!(matches!(build(registers), Err(QueueError::Registers { .. })));
        }
    }

    #[test]
    fn rings_that_touch_are_allowed_and_those_that_overlap_are_not() {
        // As close as they may be: the used ring begins at the next multiple of 4.
        let packed = |device_gpa| QueueRegisters {
            size: 128,
            desc_gpa: 0x1000,
            driver_gpa: 0x1800,
            device_gpa,
            ..good()
        };
        packed(0x1908).check_areas(true).unwrap();
        // Without event indexes there is no event field at 0x1904.
        packed(0x1904).check_areas(false).unwrap();
        for (registers, event_idx) in [(packed(0x1904), true), (packed(0x1900), false)] {
            let refused = registers.check_areas(event_idx);
            assert!(matches!(
                refused,
                Err(QueueError::Overlap { first: "available ring", second: "used ring" })
            ));
        }
        let below = QueueRegisters { device_gpa: 0xc00, ..good() };
        assert!(matches!(below.check_areas(true), Err(QueueError::Overlap { .. })));
        QueueRegisters { device_gpa: 0xbf8, ..good() }.check_areas(true).unwrap();
    }

    #[test]
    fn rings_outside_of_memory_are_refused() {
        for gpa in [0xf900, 0x1_0000, 0x1_f000, 0x2_0ff0, 0xffff_ffff_ffff_fff0] {
            let outside = build(QueueRegisters { desc_gpa: gpa, ..good() });
            assert!(matches!(outside, Err(QueueError::Outside { ring: "descriptor table", .. })));
        }
        for registers in [
            QueueRegisters { driver_gpa: 0xff00, ..good() },
            QueueRegisters { device_gpa: 0xfc00, ..good() },
        ] {
            assert!(matches!(build(registers), Err(QueueError::Outside { .. })));
        }
        build(QueueRegisters { desc_gpa: 0xf800, ..good() }).unwrap();
    }
}
