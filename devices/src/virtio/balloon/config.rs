// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The configuration space of a balloon (virtio 1.3, 5.5.4).
//!
//! Owns its layout and which of its bytes a driver may write. The command for hints, one of its fields,
//! belongs to [`super::hinting`].

/// Length of the configuration in bytes.
pub(super) const CONFIG_BYTES: usize = 16;
const ACTUAL_AT: usize = 4;
const POISON_AT: usize = 12;

/// The device configuration, except the hinting command.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct ConfigSpace {
    /// Target size of the balloon in pages.
    pub(super) target_pages: u32,
    /// Size that the driver reports, in pages. Untrusted; only informative.
    pub(super) actual_pages: u32,
    /// Value with which the driver fills free pages.
    pub(super) poison: u32,
}

impl ConfigSpace {
    pub(super) fn bytes(&self, hint_command: u32) -> [u8; CONFIG_BYTES] {
        let mut bytes = [0; CONFIG_BYTES];
        let fields = [self.target_pages, self.actual_pages, hint_command, self.poison];
        for (to, field) in bytes.chunks_exact_mut(4).zip(fields) {
            to.copy_from_slice(&field.to_le_bytes());
        }
        bytes
    }

    /// Handles a write of any width; bytes of other fields are ignored.
    pub(super) fn write(&mut self, offset: u64, data: &[u8]) {
        let start = usize::try_from(offset).unwrap_or(usize::MAX);
        let mut bytes = self.bytes(0);
        for (to, from) in bytes.iter_mut().skip(start).zip(data) {
            *to = *from;
        }
        let field = |at: usize| {
            let mut field = [0; 4];
            field.copy_from_slice(&bytes[at..at + 4]);
            u32::from_le_bytes(field)
        };
        self.actual_pages = field(ACTUAL_AT);
        self.poison = field(POISON_AT);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_driver_writes_two_fields_and_no_others() {
        let mut config = ConfigSpace { target_pages: 7, actual_pages: 1, poison: 0 };
        config.write(0, &[0xff; CONFIG_BYTES]);
        assert_eq!(config.target_pages, 7);
        assert_eq!((config.actual_pages, config.poison), (u32::MAX, u32::MAX));
        config.write(5, &[1, 2]);
        assert_eq!(config.actual_pages, 0xff02_01ff);
        for offset in [16, u64::from(u32::MAX), u64::MAX] {
            let before = config;
            config.write(offset, &[3; 8]);
            assert_eq!(config, before);
        }
    }

    #[test]
    fn the_layout_is_that_of_the_standard() {
        let config = ConfigSpace { target_pages: 1, actual_pages: 2, poison: 4 };
        assert_eq!(config.bytes(3), [1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0, 4, 0, 0, 0]);
    }
}
