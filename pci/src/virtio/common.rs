// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The common configuration structure (virtio 1.3, 4.1.4.3).
//!
//! Reads may have any width and alignment. Writes must have the width of the register, and 64-bit
//! ones may come in halves, as the specification requires of drivers; all others are ignored.

use super::queue::QueueRegisters;
use super::status::Phase;
use super::transport::Transport;
use crate::msix::NO_VECTOR;

const LEN_BYTES: usize = 0x40;

/// Offsets of the registers.
mod register {
    pub const DEVICE_FEATURE_SELECT: u64 = 0x00;
    pub const DEVICE_FEATURE: u64 = 0x04;
    pub const DRIVER_FEATURE_SELECT: u64 = 0x08;
    pub const DRIVER_FEATURE: u64 = 0x0c;
    pub const CONFIG_MSIX_VECTOR: u64 = 0x10;
    pub const NUM_QUEUES: u64 = 0x12;
    pub const DEVICE_STATUS: u64 = 0x14;
    pub const CONFIG_GENERATION: u64 = 0x15;
    pub const QUEUE_SELECT: u64 = 0x16;
    pub const QUEUE_SIZE: u64 = 0x18;
    pub const QUEUE_MSIX_VECTOR: u64 = 0x1a;
    pub const QUEUE_ENABLE: u64 = 0x1c;
    pub const QUEUE_NOTIFY_OFF: u64 = 0x1e;
    pub const QUEUE_DESC: u64 = 0x20;
    pub const QUEUE_DRIVER: u64 = 0x28;
    pub const QUEUE_DEVICE: u64 = 0x30;
    pub const QUEUE_DEVICE_END: u64 = 0x38;
}

/// Words of accepted features above bit 63, of which only the presence of any bit matters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct FeaturesBeyond {
    /// Those that current drivers write; a bit in them can be taken back.
    near: [bool; 2],
    /// Any other word, until a reset.
    far: bool,
}

impl FeaturesBeyond {
    /// First word.
    const FIRST: u32 = 2;

    /// Of a state, which does not say which word it is.
    pub(super) fn restored(any: bool) -> Self {
        Self { far: any, ..Self::default() }
    }

    fn write(&mut self, word: u32, value: u32) {
        let at = word.checked_sub(Self::FIRST).and_then(|at| usize::try_from(at).ok());
        match at.and_then(|at| self.near.get_mut(at)) {
            Some(near) => *near = value != 0,
            None => self.far |= value != 0,
        }
    }

    /// Whether a feature is accepted that does not exist.
    pub(super) fn is_any(self) -> bool {
        self.far || self.near.contains(&true)
    }
}

impl Transport {
    /// Reads the common configuration; zeros beyond its end.
    pub(super) fn read_common(&mut self, offset: u64, data: &mut [u8]) {
        let start = usize::try_from(offset).unwrap_or(LEN_BYTES);
        let read = offset..offset.saturating_add(u64::try_from(data.len()).unwrap_or(u64::MAX));
        if read.contains(&register::CONFIG_GENERATION) {
            self.update_config_generation();
        }
        let image = self.common_image();
        for (byte, at) in data.iter_mut().zip(0..) {
            *byte = image.get(start.saturating_add(at)).copied().unwrap_or(0);
        }
    }

    fn common_image(&self) -> [u8; LEN_BYTES] {
        let mut image = [0; LEN_BYTES];
        let mut put = |offset: u64, bytes: &[u8]| {
            let start = usize::try_from(offset).unwrap_or(LEN_BYTES);
            for (byte, to) in bytes.iter().zip(image.iter_mut().skip(start)) {
                *to = *byte;
            }
        };
        let queue = self.queue();
        let of_queue = |value: fn(&QueueRegisters) -> u64| queue.map_or(0, value).to_le_bytes();
        let interrupt = &self.interrupt;
        let queues_count = u16::try_from(self.queues.len()).unwrap_or(u16::MAX);
        let status = self.status.bits(interrupt.is_reset_needed());
        put(register::DEVICE_FEATURE_SELECT, &self.device_feature_select.to_le_bytes());
        put(register::DEVICE_FEATURE, &word(self.offered_features(), self.device_feature_select));
        put(register::DRIVER_FEATURE_SELECT, &self.driver_feature_select.to_le_bytes());
        put(register::DRIVER_FEATURE, &word(self.driver_features, self.driver_feature_select));
        put(register::CONFIG_MSIX_VECTOR, &interrupt.config_vector().to_le_bytes());
        put(register::NUM_QUEUES, &queues_count.to_le_bytes());
        put(register::DEVICE_STATUS, &[status]);
        put(register::CONFIG_GENERATION, &[interrupt.config_generation()]);
        put(register::QUEUE_SELECT, &self.queue_select.to_le_bytes());
        put(register::QUEUE_SIZE, &of_queue(|queue| queue.size.into())[..2]);
        let vector = queue.map_or(NO_VECTOR, |_| interrupt.queue_vector(self.queue_select));
        put(register::QUEUE_MSIX_VECTOR, &vector.to_le_bytes());
        put(register::QUEUE_ENABLE, &of_queue(|queue| queue.enabled.into())[..2]);
        // The notification address of a queue is its index times the multiplier.
        let notify_off = queue.map_or(0, |_| self.queue_select);
        put(register::QUEUE_NOTIFY_OFF, &notify_off.to_le_bytes());
        put(register::QUEUE_DESC, &of_queue(|queue| queue.desc_gpa));
        put(register::QUEUE_DRIVER, &of_queue(|queue| queue.driver_gpa));
        put(register::QUEUE_DEVICE, &of_queue(|queue| queue.device_gpa));
        image
    }

    /// Writes the common configuration.
    pub(super) fn write_common(&mut self, offset: u64, data: &[u8]) {
        match *data {
            [value] if offset == register::DEVICE_STATUS => self.write_status(value),
            [a, b] => self.write_common_u16(offset, u16::from_le_bytes([a, b])),
            [a, b, c, d] => self.write_common_u32(offset, u32::from_le_bytes([a, b, c, d])),
            _ if data.len() == 8 && is_address(offset) && offset.is_multiple_of(8) => {
                let (low, high) = data.split_at(4);
                self.write_common(offset, low);
                self.write_common(offset + 4, high);
            }
            _ => self.log_ignored(offset, data.len()),
        }
    }

    fn write_common_u16(&mut self, offset: u64, value: u16) {
        match offset {
            register::CONFIG_MSIX_VECTOR => self.interrupt.set_config_vector(value),
            register::QUEUE_SELECT => self.queue_select = value,
            register::QUEUE_MSIX_VECTOR => {
                self.interrupt.set_queue_vector(self.queue_select, value);
            }
            // The size is validated when the queue is activated.
            register::QUEUE_SIZE => match self.queue_in_setup() {
                Some(queue) => queue.size = value,
                None => self.log_ignored(offset, 2),
            },
            // A driver only ever writes 1.
            register::QUEUE_ENABLE if value == 1 => match self.queue_in_setup() {
                Some(queue) => queue.enabled = true,
                None => self.log_ignored(offset, 2),
            },
            _ => self.log_ignored(offset, 2),
        }
    }

    fn write_common_u32(&mut self, offset: u64, value: u32) {
        match offset {
            register::DEVICE_FEATURE_SELECT => self.device_feature_select = value,
            register::DRIVER_FEATURE_SELECT => self.driver_feature_select = value,
            register::DRIVER_FEATURE => self.write_driver_feature(value),
            _ if is_address(offset) && offset.is_multiple_of(4) => match self.queue_in_setup() {
                Some(queue) => {
                    let address = match offset & !7 {
                        register::QUEUE_DESC => &mut queue.desc_gpa,
                        register::QUEUE_DRIVER => &mut queue.driver_gpa,
                        _ => &mut queue.device_gpa,
                    };
                    *address = with_half(*address, offset & 4 != 0, value);
                }
                None => self.log_ignored(offset, 4),
            },
            _ => self.log_ignored(offset, 4),
        }
    }

    fn write_driver_feature(&mut self, value: u32) {
        if self.status.phase >= Phase::FeaturesOk {
            return self.log_ignored(register::DRIVER_FEATURE, 4);
        }
        match self.driver_feature_select {
            0 => self.driver_features = with_half(self.driver_features, false, value),
            1 => self.driver_features = with_half(self.driver_features, true, value),
            word => self.driver_features_beyond.write(word, value),
        }
    }

    fn log_ignored(&self, offset: u64, len_bytes: usize) {
        let bits = self.status.bits(self.interrupt.is_reset_needed());
        let queue = self.queue_select;
        self.log(|| {
            format!(
                "ignored a write of {len_bytes} bytes to common configuration {offset:#x} \
                 (status {bits:#x}, queue {queue} selected)"
            )
        });
    }
}

fn is_address(offset: u64) -> bool {
    (register::QUEUE_DESC..register::QUEUE_DEVICE_END).contains(&offset)
}

/// 32-bit word `select` of a feature set, which has two.
fn word(features: u64, select: u32) -> [u8; 4] {
    let word = match select {
        0 => features & 0xffff_ffff,
        1 => features >> 32,
        _ => 0,
    };
    u32::try_from(word).unwrap_or(0).to_le_bytes()
}

/// `value` with one half replaced.
fn with_half(value: u64, upper: bool, half: u32) -> u64 {
    let half = u64::from(half);
    if upper { value & 0xffff_ffff | half << 32 } else { value & !0xffff_ffff | half }
}
