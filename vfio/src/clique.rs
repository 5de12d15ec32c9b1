// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! GPUDirect cliques: NVIDIA's hint to a guest that GPUs reach each other by DMA.
//!
//! A guest's driver cannot see the host's bridges, so it does without DMA between GPUs unless the VMM says that it
//! works. It says so in a vendor-specific capability of configuration space that real GPUs do not have; GPUs with
//! the same number reach each other.
//!
//! Owns the layout of the capability and the choice of its place. It must never cover a register of the function,
//! nor take a capability from the list.

use super::capabilities::{self, byte};
use super::error::VfioError;
use pci::register;

/// Largest number of a clique.
pub const CLIQUE_MAX: u8 = 15;

const NVIDIA: u16 = 0x10de;
/// Base class of display controllers (PCI Code and ID Assignment, 1.4).
const DISPLAY: u8 = 0x03;

const LEN_BYTES: u8 = 8;
/// The place that NVIDIA has kept free for it, and the one since Turing, whose MSI-X is at the first.
const KEPT_FREE: [u16; 2] = [0xc8, 0xd4];
const FIRST_OFFSET: u16 = 0x40;
const CONVENTIONAL_END: u16 = 0x100;
const ALIGNMENT: u16 = 4;
/// Where the number is in the last 16 bits; below it is the version, which is zero.
const CLIQUE_SHIFT: u16 = 3;

/// The capability, and where it belongs in configuration space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CliqueCapability {
    /// Its offset.
    pub offset: u16,
    /// Offset of the pointer that leads to it: that of the last capability of the function.
    pub link: u16,
    /// Its registers.
    pub registers: [u8; LEN_BYTES as usize],
}

impl CliqueCapability {
    /// The capability for a function with this configuration space.
    ///
    /// # Errors
    /// The function is no GPU of NVIDIA's, the number is too large, or there is no room.
    pub fn place(config: &[u8], clique: u8) -> Result<Self, VfioError> {
        let vendor = capabilities::word(config, register::VENDOR_ID).unwrap_or(u16::MAX);
        let class = byte(config, register::REVISION_ID + 3).unwrap_or(u8::MAX);
        if vendor != NVIDIA || class != DISPLAY {
            return Err(VfioError::CliqueOfOther { vendor, class });
        }
        if clique > CLIQUE_MAX {
            return Err(VfioError::CliqueNumber { clique });
        }
        let listed = capabilities::conventional(config);
        let (last, _) = listed.last().ok_or(VfioError::NoRoomForClique)?;
        let taken: Vec<_> =
            listed.iter().map(|(offset, id)| (*offset, end_of(config, *offset, *id))).collect();
        let is_free = |offset: u16| {
            let end = offset + u16::from(LEN_BYTES);
            byte(config, end - 1).is_some()
                && taken.iter().all(|(start, taken_end)| end <= *start || *taken_end <= offset)
        };
        // Elsewhere a register that is in no capability might be what the driver needs: one that reads as zero is
        // none, as far as can be told.
        let is_unused = |offset: u16| {
            (offset..offset + u16::from(LEN_BYTES)).all(|at| byte(config, at) == Some(0))
        };
        let elsewhere = (FIRST_OFFSET..=CONVENTIONAL_END - u16::from(LEN_BYTES))
            .rev()
            .step_by(ALIGNMENT.into())
            .filter(|offset| is_unused(*offset));
        let offset = KEPT_FREE
            .into_iter()
            .chain(elsewhere)
            .find(|offset| is_free(*offset))
            .ok_or(VfioError::NoRoomForClique)?;
        let [number, _] = (u16::from(clique) << CLIQUE_SHIFT).to_le_bytes();
        let id = capabilities::VENDOR_SPECIFIC;
        let registers = [id, 0, LEN_BYTES, b'P', b'2', b'P', number, 0];
        Ok(Self { offset, link: last + 1, registers })
    }
}

/// End of a capability, from what is known of its kind; of another it is the next one's start.
fn end_of(config: &[u8], offset: u16, id: u16) -> u16 {
    let next = || {
        let listed = capabilities::conventional(config).into_iter();
        let later = listed.map(|(at, _)| at).filter(|at| *at > offset);
        later.min().unwrap_or(CONVENTIONAL_END)
    };
    let len_bytes = match u8::try_from(id).unwrap_or(0) {
        capabilities::POWER_MANAGEMENT | capabilities::VITAL_PRODUCT_DATA => 8,
        // As long as it can be: with 64 bits and masks.
        capabilities::MSI => 24,
        capabilities::MSIX => 12,
        capabilities::EXPRESS => 0x3c,
        capabilities::VENDOR_SPECIFIC => {
            byte(config, offset + 2).filter(|len| *len >= 3).map_or(3, u16::from)
        }
        capabilities::NONE => 4,
        _ => return next(),
    };
    offset.saturating_add(len_bytes).min(CONVENTIONAL_END)
}

#[cfg(test)]
#[expect(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;
    use crate::fakes::FakeFunction;
    use crate::tests::Rig;

    /// A GPU with these capabilities: offset and registers, in the order of the list.
    fn gpu(capabilities: &[(u16, &[u8])]) -> Vec<u8> {
        let mut config = vec![0; 4096];
        config[..12].copy_from_slice(&[0xde, 0x10, 0x30, 0x23, 0, 0, 0x10, 0, 0xa1, 0, 2, 3]);
        let mut link = usize::from(register::CAPABILITIES);
        for (offset, registers) in capabilities {
            let at = usize::from(*offset);
            config[link] = u8::try_from(*offset).unwrap();
            config[at..at + registers.len()].copy_from_slice(registers);
            link = at + 1;
        }
        config
    }

    const PM: (u16, &[u8]) = (0x60, &[0x01, 0, 3, 0]);
    const MSI: (u16, &[u8]) = (0x68, &[0x05, 0, 0x80, 0]);
    const EXPRESS: (u16, &[u8]) = (0x78, &[0x10, 0, 2, 0]);
    const OWN: (u16, &[u8]) = (0xb4, &[0x09, 0, 0x14, 1]);
    const MSIX: (u16, &[u8]) = (0xc8, &[0x11, 0, 5, 0]);

    #[test]
    fn the_capability_is_at_the_end_of_the_list_where_nvidia_wants_it() {
        let place = |capabilities: &[_]| CliqueCapability::place(&gpu(capabilities), 5).unwrap();
        let placed = place(&[PM, MSI, EXPRESS, OWN]);
        assert_eq!((placed.offset, placed.link), (0xc8, 0xb5));
        assert_eq!(placed.registers, [0x09, 0, 8, b'P', b'2', b'P', 0x28, 0]);
        let placed = place(&[PM, MSI, EXPRESS, MSIX, OWN]);
        assert_eq!((placed.offset, placed.link), (0xd4, 0xb5), "the list ends elsewhere");
        let numbers = [0, 15]
            .map(|clique| CliqueCapability::place(&gpu(&[PM]), clique).unwrap().registers[6]);
        assert_eq!(numbers, [0, 0x78]);
    }

    #[test]
    fn a_place_that_is_taken_is_left_alone() {
        let long: (u16, &[u8]) = (0xc0, &[0x09, 0, 0x1c, 1]);
        let mut config = gpu(&[PM, long]);
        let at = |config: &[u8]| CliqueCapability::place(config, 0).map(|placed| placed.offset);
        assert_eq!(at(&config).unwrap(), 0xf8);
        config[0xf9] = 1;
        assert_eq!(at(&config).unwrap(), 0xf0, "a register that is in no list");
        config[0xdc..0x100].fill(1);
        assert_eq!(at(&config).unwrap(), 0xb8, "below the capability");
        config[0x40..0x60].fill(1);
        config[0x68..0xc0].fill(1);
        assert!(matches!(at(&config), Err(VfioError::NoRoomForClique)));
        let unknown: (u16, &[u8]) = (0xbc, &[0x0a, 0]);
        assert_eq!(at(&gpu(&[PM, unknown])).unwrap(), 0xb4, "its length is not known");
        assert!(matches!(at(&gpu(&[])), Err(VfioError::NoRoomForClique)), "no list");
        assert_eq!(at(&gpu(&[PM])[..0x80]).unwrap(), 0x78, "a space that is short");
    }

    #[test]
    fn the_guest_sees_the_clique_after_all_that_the_gpu_has() {
        let mut config = FakeFunction::config();
        config[..2].copy_from_slice(&[0xde, 0x10]);
        config[11] = 3;
        let rig = Rig::wired(config.clone(), |_| {}, |wiring| wiring.gpudirect_clique = Some(9));
        let registers = [0x09, 0, 8, b'P', b'2', b'P', 9 << 3, 0];
        assert_eq!(rig.read(0xc8), registers);
        let seen: Vec<u8> = (0..256).flat_map(|offset| rig.read::<1>(offset)).collect();
        let mut expected = capabilities::conventional(&config);
        expected.push((0xc8, capabilities::VENDOR_SPECIFIC.into()));
        assert_eq!(capabilities::conventional(&seen), expected, "nothing is hidden");
        rig.host.config_writes.lock().clear();
        rig.write(0xc8, &[0xff; 8]);
        assert_eq!(rig.read(0xc8), registers);
        assert!(rig.host.config_writes.lock().is_empty(), "the hardware knows nothing of it");
        let state = rig.device.config.lock().save();
        assert!(rig.device.config.lock().restored(&state).is_ok());
        let other = Rig::wired(config, |_| {}, |_| {});
        assert!(other.device.config.lock().restored(&state).is_err(), "a guest keeps what it saw");
        rig.check();
    }

    #[test]
    fn only_gpus_of_nvidia_have_a_clique() {
        let mut config = gpu(&[PM]);
        let refused = |config: &[u8], clique| {
            CliqueCapability::place(config, clique).unwrap_err().to_string()
        };
        assert!(refused(&config, 16).contains("clique 16"));
        config[11] = 4;
        assert!(refused(&config, 0).contains("vendor 0x10de, class 0x04"));
        (config[0], config[11]) = (0x86, 3);
        assert!(refused(&config, 0).contains("vendor 0x1086"));
        assert!(refused(&[], 0).contains("vendor 0xffff"));
    }
}
