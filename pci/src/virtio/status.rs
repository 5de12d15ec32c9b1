// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The device status register as a state machine (virtio 1.3, 2.1 and 3.1.1).
//!
//! ```text
//!   Reset > Acknowledged > Driver > FeaturesOk > DriverOk
//!     ^________ any phase, by writing zero ________|
//! ```
//!
//! A phase has exactly one set of status bits, so contradictory bits cannot be
//! represented. FAILED and DEVICE_NEEDS_RESET are kept in addition to the phase.

use virtio_bindings::virtio_config as bits;

#[expect(clippy::cast_possible_truncation, reason = "the status register has eight bits")]
mod bit {
    use super::bits;
    pub const ACKNOWLEDGE: u8 = bits::VIRTIO_CONFIG_S_ACKNOWLEDGE as u8;
    pub const DRIVER: u8 = bits::VIRTIO_CONFIG_S_DRIVER as u8;
    pub const DRIVER_OK: u8 = bits::VIRTIO_CONFIG_S_DRIVER_OK as u8;
    pub const FEATURES_OK: u8 = bits::VIRTIO_CONFIG_S_FEATURES_OK as u8;
    pub const NEEDS_RESET: u8 = bits::VIRTIO_CONFIG_S_NEEDS_RESET as u8;
    pub const FAILED: u8 = bits::VIRTIO_CONFIG_S_FAILED as u8;
}

/// Initialisation phase of the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    /// Reset.
    Reset,
    /// ACKNOWLEDGE: the guest has noticed the device.
    Acknowledged,
    /// DRIVER: the guest has a driver for it.
    Driver,
    /// FEATURES_OK: features are negotiated.
    FeaturesOk,
    /// DRIVER_OK: the driver is ready.
    DriverOk,
}

impl Phase {
    const ALL: [Self; 5] =
        [Self::Reset, Self::Acknowledged, Self::Driver, Self::FeaturesOk, Self::DriverOk];

    /// The status bits of the phase.
    pub const fn bits(self) -> u8 {
        match self {
            Self::Reset => 0,
            Self::Acknowledged => bit::ACKNOWLEDGE,
            Self::Driver => Self::Acknowledged.bits() | bit::DRIVER,
            Self::FeaturesOk => Self::Driver.bits() | bit::FEATURES_OK,
            Self::DriverOk => Self::FeaturesOk.bits() | bit::DRIVER_OK,
        }
    }

    fn from_bits(bits: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|phase| phase.bits() == bits)
    }

    /// The next phase.
    pub fn next(self) -> Option<Self> {
        Self::ALL.into_iter().find(|phase| *phase > self)
    }
}

/// Phase, and whether the driver has failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceStatus {
    /// The phase.
    pub phase: Phase,
    /// Whether the driver has set FAILED.
    pub failed: bool,
}

/// Meaning of a write to the status register.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StatusRequest {
    /// Reset the device.
    Reset,
    /// Advance to this phase through those in between; nothing if it is the current one.
    Advance(Phase),
    /// The driver has failed.
    Fail,
    /// Invalid: an impossible combination of bits, or an earlier phase.
    Nonsense,
}

impl DeviceStatus {
    /// The status after a reset.
    pub const RESET: Self = Self { phase: Phase::Reset, failed: false };

    /// Value of the register.
    pub fn bits(self, needs_reset: bool) -> u8 {
        let mut bits = self.phase.bits();
        if self.failed {
            bits |= bit::FAILED;
        }
        if needs_reset {
            bits |= bit::NEEDS_RESET;
        }
        bits
    }

    /// Status and DEVICE_NEEDS_RESET from a value of the register.
    pub fn from_bits(bits: u8) -> Option<(Self, bool)> {
        let phase = Phase::from_bits(bits & !(bit::FAILED | bit::NEEDS_RESET))?;
        let status = Self { phase, failed: bits & bit::FAILED != 0 };
        Some((status, bits & bit::NEEDS_RESET != 0))
    }

    /// The meaning of a write of `value`.
    ///
    /// Drivers read the register and write it back with another bit, so DEVICE_NEEDS_RESET is ignored.
    /// After FAILED, only a reset counts.
    pub fn request(self, value: u8) -> StatusRequest {
        if value == 0 {
            return StatusRequest::Reset;
        }
        if value & bit::FAILED != 0 {
            return StatusRequest::Fail;
        }
        match Phase::from_bits(value & !bit::NEEDS_RESET) {
            Some(phase) if phase >= self.phase && !self.failed => StatusRequest::Advance(phase),
            _ => StatusRequest::Nonsense,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(phase: Phase) -> DeviceStatus {
        DeviceStatus { phase, failed: false }
    }

    #[test]
    fn the_usual_way_up() {
        assert_eq!(at(Phase::Reset).request(1), StatusRequest::Advance(Phase::Acknowledged));
        assert_eq!(at(Phase::Acknowledged).request(3), StatusRequest::Advance(Phase::Driver));
        assert_eq!(at(Phase::Driver).request(11), StatusRequest::Advance(Phase::FeaturesOk));
        assert_eq!(at(Phase::FeaturesOk).request(15), StatusRequest::Advance(Phase::DriverOk));
    }

    #[test]
    fn no_way_back_but_reset() {
        for phase in Phase::ALL {
            assert_eq!(at(phase).request(0), StatusRequest::Reset);
            assert_eq!(at(phase).request(0x80 | phase.bits()), StatusRequest::Fail);
            for lower in Phase::ALL.into_iter().filter(|lower| *lower < phase && lower.bits() != 0)
            {
                assert_eq!(at(phase).request(lower.bits()), StatusRequest::Nonsense);
            }
        }
    }

    #[test]
    fn contradicting_bits_are_nonsense() {
        for value in [2, 4, 5, 7, 8, 9, 12, 16, 32, 0x2f] {
            assert_eq!(at(Phase::Reset).request(value), StatusRequest::Nonsense, "{value:#x}");
            assert_eq!(DeviceStatus::from_bits(value), None);
        }
    }

    #[test]
    fn bits_round_trip() {
        for value in 0..=u8::MAX {
            if let Some((status, needs_reset)) = DeviceStatus::from_bits(value) {
                assert_eq!(status.bits(needs_reset), value);
            }
        }
    }

    #[test]
    fn a_driver_that_gave_up_can_only_reset() {
        let failed = DeviceStatus { phase: Phase::Driver, failed: true };
        assert_eq!(failed.request(11), StatusRequest::Nonsense);
        assert_eq!(failed.request(0), StatusRequest::Reset);
    }
}
