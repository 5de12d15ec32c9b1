// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The address of a PCI function: segment, bus, device and function number.
//!
//! Owns the notation `0000:00:05.0`, which is that of sysfs, the ranges of the parts, and the 16-bit routing ID. For
//! functions of the guest and of the host alike. Must never guess a missing part or a missing digit.

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

/// Device numbers on one bus (PCI 3.0, 3.2.2.3.4).
pub const DEVICES_PER_BUS_COUNT: u8 = 32;
const FUNCTIONS_PER_DEVICE_COUNT: u8 = 8;

/// Why a PCI address was refused.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum BdfError {
    /// The text does not have the form of an address.
    #[error("`{text}` is not a PCI address; write it as segment:bus:device.function, 0000:00:05.0")]
    Syntax {
        /// What was given.
        text: String,
    },
    /// The device number does not exist.
    #[error("PCI device number {device} is out of range (0 to 31)")]
    Device {
        /// What was given.
        device: u8,
    },
    /// The function number does not exist.
    #[error("PCI function number {function} is out of range (0 to 7)")]
    Function {
        /// What was given.
        function: u8,
    },
}

/// A device number on a bus, 0 to 31.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DeviceNumber(u8);

impl DeviceNumber {
    /// The number of the host bridge.
    pub const HOST_BRIDGE: Self = Self(0);

    /// Checks a number.
    pub fn new(device: u8) -> Result<Self, BdfError> {
        if device < DEVICES_PER_BUS_COUNT {
            Ok(Self(device))
        } else {
            Err(BdfError::Device { device })
        }
    }

    /// The plain number.
    pub fn get(self) -> u8 {
        self.0
    }

    /// All numbers, rising.
    pub fn all() -> impl Iterator<Item = Self> {
        (0..DEVICES_PER_BUS_COUNT).map(Self)
    }
}

impl fmt::Display for DeviceNumber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// Segment, bus, device and function.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Bdf {
    segment: u16,
    bus: u8,
    device: u8,
    function: u8,
}

impl Bdf {
    /// Puts an address together.
    pub fn new(segment: u16, bus: u8, device: u8, function: u8) -> Result<Self, BdfError> {
        DeviceNumber::new(device)?;
        if function >= FUNCTIONS_PER_DEVICE_COUNT {
            return Err(BdfError::Function { function });
        }
        Ok(Self { segment, bus, device, function })
    }

    /// The first function of a device on bus 0 of a segment.
    pub fn on_root_bus(segment: u16, device: DeviceNumber) -> Self {
        Self { segment, bus: 0, device: device.get(), function: 0 }
    }

    /// The function with this routing ID in a segment: every number is one.
    pub fn from_routing_id(segment: u16, routing_id: u16) -> Self {
        let [bus, devfn] = routing_id.to_be_bytes();
        Self { segment, bus, device: devfn >> 3, function: devfn & 7 }
    }

    /// PCI segment (ACPI `_SEG`).
    pub fn segment(self) -> u16 {
        self.segment
    }

    /// Bus number in the segment.
    pub fn bus(self) -> u8 {
        self.bus
    }

    /// Device number on the bus.
    pub fn device(self) -> u8 {
        self.device
    }

    /// Function number in the device.
    pub fn function(self) -> u8 {
        self.function
    }

    /// The 16-bit routing ID (PCIe 4.0, 2.2.4.2), as in requester IDs.
    pub fn routing_id(self) -> u16 {
        u16::from(self.bus) << 8 | u16::from(self.device) << 3 | u16::from(self.function)
    }
}

impl fmt::Display for Bdf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04x}:{:02x}:{:02x}.{:01x}", self.segment, self.bus, self.device, self.function)
    }
}

impl FromStr for Bdf {
    type Err = BdfError;

    /// Reads what [`fmt::Display`] writes, with digits of either case; a part with fewer digits is refused.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let syntax = || BdfError::Syntax { text: text.to_owned() };
        let (segment, rest) = text.split_once(':').ok_or_else(syntax)?;
        let (bus, rest) = rest.split_once(':').ok_or_else(syntax)?;
        let (device, function) = rest.split_once('.').ok_or_else(syntax)?;
        let byte = |text, digits_count| {
            hex(text, digits_count).and_then(|value| u8::try_from(value).ok()).ok_or_else(syntax)
        };
        let segment = hex(segment, 4).ok_or_else(syntax)?;
        Self::new(segment, byte(bus, 2)?, byte(device, 2)?, byte(function, 1)?)
    }
}

/// So many hexadecimal digits and nothing else (`from_str_radix` would take a sign).
fn hex(text: &str, digits_count: usize) -> Option<u16> {
    let is_hex = text.len() == digits_count && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    if is_hex { u16::from_str_radix(text, 16).ok() } else { None }
}

#[cfg(test)]
#[expect(clippy::unwrap_used, reason = "tests")]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn prints_as_lspci_does() {
        assert_eq!(Bdf::new(0, 0, 5, 0).unwrap().to_string(), "0000:00:05.0");
        assert_eq!(Bdf::new(0x1a, 0xff, 31, 7).unwrap().to_string(), "001a:ff:1f.7");
    }

    #[test]
    fn refuses_what_is_no_address() {
        for text in [
            "",
            "00:05.0",
            "0000:00:05",
            "0:00:05.0",
            "0000:0:05.0",
            "0000:00:5.0",
            "00000:00:05.0",
            "0000:065:00.0",
            "0000:00:+5.0",
            "0000:00:05.10",
            "0000:00:05.0 ",
        ] {
            assert!(matches!(text.parse::<Bdf>(), Err(BdfError::Syntax { .. })), "{text}");
        }
        assert_eq!("0000:00:1F.0".parse(), Bdf::new(0, 0, 31, 0), "digits of either case");
        assert_eq!("0000:00:20.0".parse::<Bdf>(), Err(BdfError::Device { device: 32 }));
        assert_eq!("0000:00:1f.8".parse::<Bdf>(), Err(BdfError::Function { function: 8 }));
    }

    #[test]
    fn routing_id_packs_bus_device_function() {
        assert_eq!("0000:01:05.3".parse::<Bdf>().unwrap().routing_id(), 0x012b);
    }

    proptest! {
        #[test]
        fn round_trips(segment: u16, bus: u8, device in 0u8..32, function in 0u8..8) {
            let bdf = Bdf::new(segment, bus, device, function).unwrap();
            prop_assert_eq!(bdf.to_string().parse::<Bdf>().unwrap(), bdf);
            prop_assert_eq!(Bdf::from_routing_id(segment, bdf.routing_id()), bdf);
        }

        #[test]
        fn every_routing_id_is_a_function(segment: u16, routing_id: u16) {
            let bdf = Bdf::from_routing_id(segment, routing_id);
            prop_assert_eq!(bdf.routing_id(), routing_id);
            let parts = Bdf::new(bdf.segment(), bdf.bus(), bdf.device(), bdf.function());
            prop_assert_eq!(parts, Ok(bdf));
        }

        #[test]
        fn what_is_read_is_what_would_be_written(text in "[0-9a-fA-F:.+]{12}|[0-9a-f]{3,5}:[0-9a-f]{1,3}:[0-9a-f]{1,3}[.][0-9a-f]{1,2}") {
            if let Ok(bdf) = text.parse::<Bdf>() {
                prop_assert_eq!(bdf.to_string(), text.to_ascii_lowercase());
            }
        }

        #[test]
        fn any_text_is_harmless(text in ".{0,24}") {
            if let Ok(bdf) = text.parse::<Bdf>() {
                prop_assert!(bdf.device() < 32 && bdf.function() < 8);
            }
        }
    }
}
