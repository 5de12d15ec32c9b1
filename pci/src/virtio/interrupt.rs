// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Interrupts of a virtio device: MSI-X vectors and the ISR register.
//!
//! Device threads call this for every used buffer that they announce: it uses atomics and no lock.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU16, Ordering};

use devices::virtio::VirtioInterrupt;

use crate::msix::{Msix, NO_VECTOR};

/// ISR bit of a queue interrupt (virtio 1.3, 4.1.4.5).
pub const ISR_QUEUE: u8 = 1;
/// ISR bit of a configuration change.
pub const ISR_CONFIG: u8 = 2;

/// Interrupts from a device to its driver.
pub struct PciInterrupt {
    msix: Arc<Msix>,
    isr: AtomicU8,
    needs_reset: AtomicBool,
    config_generation: AtomicU8,
    config_vector: AtomicU16,
    queue_vectors: Vec<AtomicU16>,
}

impl PciInterrupt {
    /// Without vectors assigned to events.
    pub fn new(msix: Arc<Msix>, queues_count: usize) -> Self {
        Self {
            msix,
            isr: AtomicU8::new(0),
            needs_reset: AtomicBool::new(false),
            config_generation: AtomicU8::new(0),
            config_vector: AtomicU16::new(NO_VECTOR),
            queue_vectors: (0..queues_count).map(|_| AtomicU16::new(NO_VECTOR)).collect(),
        }
    }

    /// Resets the device's interrupts. The generation keeps counting, so that a driver that compares it
    /// across the reset sees a change.
    pub fn reset(&self) {
        self.isr.store(0, Ordering::Release);
        self.needs_reset.store(false, Ordering::Release);
        self.config_vector.store(NO_VECTOR, Ordering::Release);
        for vector in &self.queue_vectors {
            vector.store(NO_VECTOR, Ordering::Release);
        }
    }

    /// Reads the ISR register, which clears it.
    pub fn take_isr(&self) -> u8 {
        self.isr.swap(0, Ordering::AcqRel)
    }

    /// The ISR register, not cleared.
    pub fn isr(&self) -> u8 {
        self.isr.load(Ordering::Acquire)
    }

    /// Sets the ISR register from a saved state.
    pub fn set_isr(&self, isr: u8) {
        self.isr.store(isr & (ISR_QUEUE | ISR_CONFIG), Ordering::Release);
    }

    /// Whether DEVICE_NEEDS_RESET is set.
    pub fn is_reset_needed(&self) -> bool {
        self.needs_reset.load(Ordering::Acquire)
    }

    /// Sets DEVICE_NEEDS_RESET from a saved state, without an interrupt.
    pub fn set_reset_needed(&self, needed: bool) {
        self.needs_reset.store(needed, Ordering::Release);
    }

    /// Counts a configuration change, without an interrupt.
    pub fn count_config_change(&self) {
        self.config_generation.fetch_add(1, Ordering::AcqRel);
    }

    /// Number of configuration changes, modulo 256; some count twice.
    pub fn config_generation(&self) -> u8 {
        self.config_generation.load(Ordering::Acquire)
    }

    /// Restores the configuration generation.
    pub fn set_config_generation(&self, generation: u8) {
        self.config_generation.store(generation, Ordering::Release);
    }

    /// Whether a driver may choose this vector.
    pub fn is_vector_valid(&self, vector: u16) -> bool {
        vector == NO_VECTOR || vector < self.msix.vectors_count()
    }

    /// Vector of configuration changes.
    pub fn config_vector(&self) -> u16 {
        self.config_vector.load(Ordering::Acquire)
    }

    /// Sets the vector of configuration changes; an invalid one becomes [`NO_VECTOR`], which tells the
    /// driver that it failed (virtio 1.3, 4.1.5.1.2).
    pub fn set_config_vector(&self, vector: u16) {
        self.config_vector.store(self.valid_or_none(vector), Ordering::Release);
    }

    /// Vector of a queue; [`NO_VECTOR`] for a queue that does not exist.
    pub fn queue_vector(&self, queue_index: u16) -> u16 {
        self.queue_vectors
            .get(usize::from(queue_index))
            .map_or(NO_VECTOR, |vector| vector.load(Ordering::Acquire))
    }

    /// Sets the vector of a queue, like [`PciInterrupt::set_config_vector`].
    pub fn set_queue_vector(&self, queue_index: u16, vector: u16) {
        if let Some(entry) = self.queue_vectors.get(usize::from(queue_index)) {
            entry.store(self.valid_or_none(vector), Ordering::Release);
        }
    }

    fn valid_or_none(&self, vector: u16) -> u16 {
        if self.is_vector_valid(vector) { vector } else { NO_VECTOR }
    }

    /// Interrupts the driver for a change of configuration or status.
    pub fn raise_config(&self) {
        self.isr.fetch_or(ISR_CONFIG, Ordering::AcqRel);
        self.msix.trigger(self.config_vector());
    }
}

impl VirtioInterrupt for PciInterrupt {
    fn queue_used(&self, queue_index: u16) {
        self.isr.fetch_or(ISR_QUEUE, Ordering::AcqRel);
        self.msix.trigger(self.queue_vector(queue_index));
    }

    fn config_changed(&self) {
        self.count_config_change();
        self.raise_config();
    }

    fn needs_reset(&self) {
        self.needs_reset.store(true, Ordering::Release);
        self.raise_config();
    }
}
