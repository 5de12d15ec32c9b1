// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The PCI Express capability of a function that a guest has on its root bus.
//!
//! Owns which of its registers are not the host's. An endpoint has a link to a port above it, but there is no
//! port above a root bus: such a function is an integrated endpoint of the root complex, without link registers
//! (PCI Express 4.0, 1.3.2.3 and 7.5.3.2 ff.). Windows does not start a device that says otherwise. A legacy
//! endpoint cannot be one, as it may need ports (1.3.2.3), and is shown without the capability.

use super::capabilities::{self, word};
use pci::{ConfigSpace, ConfigSpaceState};

const CONVENTIONAL_END: u16 = 0x100;
/// Offset of the flags register (7.5.3.2): capability version and port type.
const FLAGS: u16 = 0x02;
const VERSION_MASK: u16 = 0xf;
const PORT_SHIFT: u16 = 4;
const PORT_MASK: u8 = 0xf0;
const ENDPOINT: u16 = 0;
const LEGACY_ENDPOINT: u16 = 1;
const INTEGRATED_ENDPOINT: u8 = 9;
/// Offset of the link registers: capabilities, control and status (7.5.3.6 to 7.5.3.8).
const LINK: u16 = 0x0c;
/// Offset of the second link registers (7.5.3.18 to 7.5.3.20).
const LINK_2: u16 = 0x2c;
const LINK_LEN_BYTES: u16 = 8;

/// Emulated bits: offset, mask, and values.
pub(super) type EmulatedBits = (u16, &'static [u8], &'static [u8]);

const NO_LINK: (&[u8], &[u8]) = (&[0xff; LINK_LEN_BYTES as usize], &[0; LINK_LEN_BYTES as usize]);

/// Port type shown to the guest for a function that is an endpoint on the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Port {
    /// The type that it has on the host.
    Host,
    /// A root complex integrated endpoint.
    RootComplex,
}

/// The PCI Express capability of a function that is an endpoint on the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Express {
    offset: u16,
    version: u16,
    is_legacy: bool,
}

impl Express {
    /// The capability in configuration space; `None` also for a function without a link.
    pub(super) fn find(config: &[u8]) -> Option<Self> {
        let offset = capabilities::find(config, capabilities::EXPRESS)?;
        let flags = word(config, offset + FLAGS)?;
        let is_legacy = match flags >> PORT_SHIFT & 0xf {
            ENDPOINT => false,
            LEGACY_ENDPOINT => true,
            _ => return None,
        };
        Some(Self { offset, version: flags & VERSION_MASK, is_legacy })
    }

    /// All emulated bits.
    pub(super) fn made_up(self) -> impl Iterator<Item = EmulatedBits> {
        const PORT: (&[u8], &[u8]) = (&[PORT_MASK], &[INTEGRATED_ENDPOINT << PORT_SHIFT]);
        const NO_CAPABILITY: (&[u8], &[u8]) = (&[0xff], &[0]);
        let second = (self.version >= 2).then_some((LINK_2, NO_LINK));
        let integrated = [(FLAGS, PORT), (LINK, NO_LINK)].into_iter().chain(second);
        // A null capability, whose next pointer still works.
        let legacy = [(0, NO_CAPABILITY)].into_iter();
        let (integrated, legacy) =
            if self.is_legacy { (None, Some(legacy)) } else { (Some(integrated), None) };
        let all = integrated.into_iter().flatten().chain(legacy.into_iter().flatten());
        all.filter_map(move |(register, (masks, values))| {
            let at = self.offset.checked_add(register)?;
            let end = at.checked_add(u16::try_from(masks.len()).ok()?)?;
            (end <= CONVENTIONAL_END).then_some((at, masks, values))
        })
    }

    /// The port type shown to the guest; `space` holds the emulated bits.
    pub(super) fn port(self, space: &ConfigSpace) -> Port {
        let [flags, _] = space.read_u16(self.offset.saturating_add(FLAGS)).to_le_bytes();
        self.port_by(flags)
    }

    /// Whether the guest sees an integrated endpoint, rather than no capability.
    pub(super) fn is_shown_integrated(self, space: &ConfigSpace) -> bool {
        !self.is_legacy && self.port(space) == Port::RootComplex
    }

    /// Whether a saved state is of a guest that was shown the host's registers, as in earlier versions.
    pub(super) fn is_of_host(self, state: &ConfigSpaceState) -> bool {
        let register = state.registers.get(usize::from(self.offset / 4));
        register.is_some_and(|register| {
            let [_, _, flags, _] = register.to_le_bytes();
            self.port_by(flags) == Port::Host
        })
    }

    fn port_by(self, flags: u8) -> Port {
        if self.is_legacy || flags & PORT_MASK != 0 { Port::RootComplex } else { Port::Host }
    }

    /// Removes the emulated port type, so that the host's is shown.
    pub(super) fn show_port_of_host(self, space: &mut ConfigSpace) {
        space.put(self.offset.saturating_add(FLAGS), &[0]);
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]
    use crate::config::ShadowConfig;
    use crate::fakes::FakeFunction;

    /// What a guest reads of the capability, over host registers that are all ones.
    fn read(shadow: &ShadowConfig) -> (u8, [u8; 8]) {
        let (mut flags, mut link) = ([0x02], [0xff; 8]);
        shadow.overlay(0x82, &mut flags);
        shadow.overlay(0x8c, &mut link);
        (flags[0], link)
    }

    #[test]
    fn a_guest_that_was_shown_an_endpoint_keeps_seeing_one() {
        let new = || ShadowConfig::new(&FakeFunction::config(), &[], None, None, false).unwrap();
        let state = new().save();
        let mut earlier = state.clone();
        assert_eq!(earlier.registers[0x80 / 4], 0x90 << 16);
        earlier.registers[0x80 / 4] = 0;
        for (state, expected) in [(state, (0x92, [0; 8])), (earlier, (0x02, [0xff; 8]))] {
            let mut shadow = new();
            shadow.take(shadow.restored(&state).unwrap());
            assert_eq!(read(&shadow), expected);
            // Also in the next migration.
            assert_eq!(shadow.save(), state);
            let forwarded = shadow.write(0x90, &[3, 0]);
            assert_eq!(forwarded.is_empty(), expected.0 == 0x92, "link control");
        }
    }
}
