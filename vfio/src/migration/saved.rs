// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The saved form of a passed-through function: the state that is kept here, and the state of its
//! hardware.
//!
//! Owns the form, and the check that a state is complete and comes from the same kind of hardware. Only the
//! driver on the host knows what the hardware's part means. Everything in it comes from a peer or a
//! file.

use std::fmt;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::error::MigrationError;
use super::session::STATE_LEN_BYTES_MAX;
use crate::capabilities::{self, HIDDEN_EXTENDED, double_word};
use pci::BarDescription;
use pci::{ConfigSpaceState, register};
use pci::{MsixState, ROM_INDEX};

/// Version of [`VfioState`] for a function shown as an integrated endpoint, which it is not on the host.
pub const INTEGRATED_ENDPOINT_VERSION: u32 = 2;
/// Version of [`VfioState`] for a function whose expansion ROM the guest sees.
pub const ROM_VERSION: u32 = 3;
/// Newest version of [`VfioState`] that is read. The lowest version that can represent a state is written.
pub const VFIO_STATE_VERSION: u32 = ROM_VERSION;

/// The state returned by the host driver. In JSON it is base64, with its length, or only the length.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Encoded", into = "Encoded")]
pub enum HardwareState {
    /// The bytes.
    Here(Vec<u8>),
    /// The bytes travel beside this. Only between programs that have agreed on that.
    Apart {
        /// Their number.
        len_bytes: u64,
    },
}

/// Maximum length in bytes of a state that travels beside the other state.
pub const APART_LEN_BYTES_MAX: u64 = 1 << 40;

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Encoded {
    len_bytes: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    base64: Option<String>,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    apart: bool,
}

/// Why bytes are not a hardware state.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum HardwareStateError {
    /// The length differs from the announced one.
    #[error("the state of the hardware has {found} bytes in place of {expected}")]
    Length {
        /// Actual length.
        found: u64,
        /// Announced length.
        expected: u64,
    },
    /// The state exceeds the limit.
    #[error("the state of the hardware has {len_bytes} bytes, at most {limit_bytes} are possible")]
    TooLong {
        /// Announced length.
        len_bytes: u64,
        /// The limit.
        limit_bytes: u64,
    },
    /// Both forms or none.
    #[error("the state of the hardware is neither here nor beside this, or both")]
    Form,
    /// The base64 is malformed.
    #[error("the state of the hardware is not valid base64")]
    Base64(#[from] base64::DecodeError),
}

impl From<HardwareState> for Encoded {
    fn from(state: HardwareState) -> Self {
        match state {
            HardwareState::Here(bytes) => Self {
                len_bytes: bytes.len() as u64,
                base64: Some(STANDARD.encode(bytes)),
                apart: false,
            },
            HardwareState::Apart { len_bytes } => Self { len_bytes, base64: None, apart: true },
        }
    }
}

impl TryFrom<Encoded> for HardwareState {
    type Error = HardwareStateError;

    fn try_from(encoded: Encoded) -> Result<Self, HardwareStateError> {
        let Encoded { len_bytes, base64, apart } = encoded;
        // The decoded state is shorter than its text, whose length was limited where it was received.
        let limit_bytes = if apart { APART_LEN_BYTES_MAX } else { STATE_LEN_BYTES_MAX };
        if len_bytes > limit_bytes {
            return Err(HardwareStateError::TooLong { len_bytes, limit_bytes });
        }
        let base64 = match (base64, apart) {
            (None, true) => return Ok(Self::Apart { len_bytes }),
            (Some(base64), false) => base64,
            _ => return Err(HardwareStateError::Form),
        };
        let bytes = STANDARD.decode(base64)?;
        let found = bytes.len() as u64;
        if found != len_bytes {
            return Err(HardwareStateError::Length { found, expected: len_bytes });
        }
        Ok(Self::Here(bytes))
    }
}

impl fmt::Debug for HardwareState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Here(bytes) => write!(f, "{} bytes", bytes.len()),
            Self::Apart { len_bytes } => write!(f, "{len_bytes} bytes beside this"),
        }
    }
}

/// Properties of the hardware that the guest's driver has seen and relies on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Hardware {
    /// Device and vendor id.
    pub device: u32,
    /// Class code and revision.
    pub class: u32,
    /// Subsystem and subsystem vendor id.
    pub subsystem: u32,
    /// Length of configuration space.
    pub config_len_bytes: u16,
    /// Offsets and ids of capabilities, extended ones included.
    pub capabilities: Vec<(u16, u16)>,
    /// Indexes and lengths of BARs.
    pub bars: Vec<(u8, u64)>,
}

impl Hardware {
    /// The properties of a function with this configuration space.
    pub fn of(config: &[u8], bars: &[BarDescription]) -> Self {
        let register = |offset| double_word(config, offset).unwrap_or(u32::MAX);
        let mut all = capabilities::conventional(config);
        let extended = capabilities::extended(config);
        // Hidden capabilities may differ.
        all.extend(extended.into_iter().filter(|(_, id)| !HIDDEN_EXTENDED.contains(id)));
        Self {
            device: register(register::VENDOR_ID),
            class: register(register::REVISION_ID),
            subsystem: register(register::SUBSYSTEM_VENDOR_ID),
            config_len_bytes: u16::try_from(config.len()).unwrap_or(u16::MAX),
            capabilities: all,
            bars: bars.iter().map(|bar| (bar.index, bar.len_bytes)).collect(),
        }
    }

    /// Checks that the saved hardware `self` matches `here`.
    ///
    /// # Errors
    /// Names the first difference.
    pub fn check(&self, here: &Self) -> Result<(), MigrationError> {
        let numbers = [
            ("its vendor and device", self.device, here.device),
            ("its class and revision", self.class, here.class),
            ("its subsystem", self.subsystem, here.subsystem),
        ];
        for (what, found, expected) in numbers {
            if found != expected {
                return Err(differs(what, format!("{found:#010x}"), format!("{expected:#010x}")));
            }
        }
        if self.config_len_bytes != here.config_len_bytes {
            let (found, expected) = (self.config_len_bytes, here.config_len_bytes);
            let what = "the length of its configuration space";
            return Err(differs(what, found.to_string(), expected.to_string()));
        }
        if self.capabilities != here.capabilities {
            let shown = |list: &[(u16, u16)]| {
                let entry = |(offset, id): &(u16, u16)| format!("{id:#x} at {offset:#x}");
                list.iter().take(SHOWN_MAX).map(entry).collect::<Vec<_>>().join(", ")
            };
            let what = "its list of capabilities";
            return Err(differs(what, shown(&self.capabilities), shown(&here.capabilities)));
        }
        // A guest of an earlier version has seen no expansion ROM, and finds one here that it has not switched on.
        let has_rom = self.bars.iter().any(|(index, _)| *index == ROM_INDEX);
        let mut here_bars = here.bars.clone();
        here_bars.retain(|(index, _)| *index != ROM_INDEX || has_rom);
        if self.bars != here_bars {
            let shown = |list: &[(u8, u64)]| {
                let entry = |(index, len): &(u8, u64)| format!("BAR {index} of {len:#x} bytes");
                list.iter().take(SHOWN_MAX).map(entry).collect::<Vec<_>>().join(", ")
            };
            return Err(differs("its BARs", shown(&self.bars), shown(&here_bars)));
        }
        Ok(())
    }
}

/// Maximum number of list entries in a message.
const SHOWN_MAX: usize = 48;

fn differs(what: &'static str, found: String, expected: String) -> MigrationError {
    MigrationError::OtherHardware { what, found, expected }
}

/// State of a saved function; plain data, untrusted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VfioState {
    /// The hardware that it was saved from.
    pub hardware: Hardware,
    /// Emulated registers of configuration space.
    pub registers: ConfigSpaceState,
    /// The command register as the guest sees it.
    pub command: u16,
    /// Device Control and Device Control 2 of PCI Express, as the guest has set them.
    pub express_controls: Option<[u16; 2]>,
    /// The table of MSI-X.
    pub msix: Option<MsixState>,
    /// Pending bits of masked MSI messages.
    pub msi_pending: u32,
    /// State of the hardware.
    pub state: HardwareState,
}

#[cfg(test)]
#[expect(clippy::unwrap_used, reason = "tests")]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn read(len_bytes: u64, base64: &str) -> Result<HardwareState, HardwareStateError> {
        Encoded { len_bytes, base64: Some(base64.to_owned()), apart: false }.try_into()
    }

    #[test]
    fn what_is_cut_off_or_too_long_is_refused() {
        let here = HardwareState::Here(b"firmware state".to_vec());
        let whole = Encoded::from(here.clone()).base64.unwrap();
        assert_eq!(read(14, &whole).unwrap(), here);
        let short = |found, expected| Err(HardwareStateError::Length { found, expected });
        assert_eq!(read(14, &whole[..16]), short(12, 14));
        assert_eq!(read(13, &whole), short(14, 13));
        assert_eq!(read(0, ""), Ok(HardwareState::Here(Vec::new())));
        assert_eq!(
            read(1 << 40, "AAAA"),
            Err(HardwareStateError::TooLong {
                len_bytes: 1 << 40,
                limit_bytes: STATE_LEN_BYTES_MAX
            })
        );
        assert!(matches!(read(3, "A*=="), Err(HardwareStateError::Base64(_))));
        assert!(matches!(read(14, &whole[..19]), Err(HardwareStateError::Base64(_))));
    }

    #[test]
    fn a_state_beside_the_document_is_a_length_with_a_limit() {
        let read = |json: &str| serde_json::from_str::<HardwareState>(json);
        let apart = HardwareState::Apart { len_bytes: APART_LEN_BYTES_MAX };
        let json = serde_json::to_string(&apart).unwrap();
        assert_eq!(json, r#"{"len_bytes":1099511627776,"apart":true}"#);
        assert_eq!(read(&json).unwrap(), apart);
        for (json, expected) in [
            (r#"{"len_bytes":1099511627777,"apart":true}"#, "at most 1099511627776"),
            (r#"{"len_bytes":3,"base64":"AAAA","apart":true}"#, "or both"),
            (r#"{"len_bytes":3}"#, "neither here"),
            (r#"{"len_bytes":3,"apart":false}"#, "neither here"),
            (r#"{"apart":true}"#, "len_bytes"),
        ] {
            let error = read(json).unwrap_err().to_string();
            assert!(error.contains(expected), "{json}: {error}");
        }
    }

    #[test]
    fn other_hardware_is_named() {
        let here = Hardware {
            device: 0x1018_15b3,
            class: 0x0200_0000,
            subsystem: 0x0001_15b3,
            config_len_bytes: 4096,
            capabilities: vec![(0x60, 0x10), (0x100, 1)],
            bars: vec![(0, 0x10_0000)],
        };
        assert!(here.check(&here.clone()).is_ok());
        let why = |change: fn(&mut Hardware)| {
            let mut there = here.clone();
            change(&mut there);
            there.check(&here).unwrap_err().to_string()
        };
        assert!(
            why(|there| there.device = 0x1019_15b3).contains("0x101915b3 there and 0x101815b3")
        );
        assert!(why(|there| there.class += 1).contains("revision"));
        assert!(why(|there| there.subsystem = 0).contains("subsystem"));
        assert!(why(|there| there.config_len_bytes = 256).contains("256 there and 4096"));
        assert!(
            why(|there| there.capabilities.clear()).contains("0x10 at 0x60, 0x1 at 0x100 here")
        );
        assert!(why(|there| there.bars[0].1 = 0x20_0000).contains("BAR 0 of 0x200000 bytes there"));
    }

    proptest! {
        #[test]
        fn what_is_written_is_read(bytes in prop::collection::vec(any::<u8>(), 0..512)) {
            let state = HardwareState::Here(bytes);
            let json = serde_json::to_string(&state).unwrap();
            prop_assert_eq!(serde_json::from_str::<HardwareState>(&json).unwrap(), state);
        }

        #[test]
        fn any_text_is_read_or_refused(len_bytes in 0_u64..64, text in "[A-Za-z0-9+/=*]{0,80}") {
            match read(len_bytes, &text) {
                Ok(HardwareState::Here(bytes)) => prop_assert_eq!(bytes.len() as u64, len_bytes),
                other => prop_assert!(other.is_err()),
            }
        }
    }
}
