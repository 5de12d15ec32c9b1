// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The expansion ROM of a function, which has code and tables for firmware and drivers, such as a GPU's video BIOS.
//!
//! The guest gets a copy, made when it first reads: hardware may share the decoder of its ROM with a BAR, and there
//! are functions whose ROM can be read only before they have been used.
//!
//! Owns the copy. It must never write to the host's ROM, nor keep a guest waiting twice for it.

use std::io;
use std::sync::OnceLock;

use log::{info, warn};

use super::host::HostFunction;
use pci::{BarDescription, BarKind, ROM_INDEX, ROM_LENS};

/// The BAR of the function's ROM, if it has one that a guest can be shown.
pub(super) fn describe(id: &str, host: &dyn HostFunction) -> Option<BarDescription> {
    let host_bytes = host.rom_len_bytes();
    if host_bytes == 0 {
        return None;
    }
    let len_bytes = host_bytes.checked_next_power_of_two().map(|len| len.max(*ROM_LENS.start()));
    let len_bytes = len_bytes.filter(|len| ROM_LENS.contains(len));
    if len_bytes.is_none() {
        warn!(
            "the guest does not see the expansion ROM of passed-through device {id}: it has {host_bytes:#x} bytes"
        );
    }
    let description = |len_bytes| BarDescription {
        index: ROM_INDEX,
        kind: BarKind::Rom,
        prefetchable: false,
        len_bytes,
    };
    len_bytes.map(description)
}

/// The copy of a function's ROM.
#[derive(Default)]
pub(super) struct Rom(OnceLock<Vec<u8>>);

impl Rom {
    /// Reads the ROM: ones where it ends, and if the host cannot read it.
    pub fn read(&self, id: &str, host: &dyn HostFunction, offset: u64, data: &mut [u8]) {
        let contents = self.0.get_or_init(|| taken(id, host.read_rom()));
        data.fill(0xff);
        let rest = usize::try_from(offset).ok().and_then(|start| contents.get(start..));
        for (byte, known) in data.iter_mut().zip(rest.unwrap_or_default()) {
            *byte = *known;
        }
    }
}

fn taken(id: &str, read: io::Result<Vec<u8>>) -> Vec<u8> {
    match read {
        Ok(contents) => {
            info!(
                "passed-through device {id}: the guest reads its expansion ROM of {} bytes",
                contents.len()
            );
            contents
        }
        Err(error) => {
            warn!("passed-through device {id}: its expansion ROM cannot be read: {error}");
            Vec::new()
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use super::*;
    use crate::fakes::FakeFunction;
    use crate::tests::{BELOW, Rig};

    const REGISTER: u16 = 0x30;
    const CONTENTS: [u8; 3] = [0x55, 0xaa, 7];
    const LEN_BYTES: u64 = 0x1_0000;

    fn rig() -> Rig {
        Rig::prepared(FakeFunction::config(), |host| host.set_rom(LEN_BYTES - 5, &CONTENTS))
    }

    fn register(rig: &Rig) -> u32 {
        u32::from_le_bytes(rig.read(REGISTER))
    }

    fn first_bytes(rig: &Rig, gpa: u32) -> Option<[u8; 4]> {
        let mut data = [0; 4];
        rig.mapper.read(gpa.into(), &mut data).then_some(data)
    }

    #[test]
    fn the_guest_sizes_the_rom_and_reads_it_while_both_bits_are_set() {
        let rig = rig();
        let gpa = register(&rig);
        assert!(u64::from(gpa) >= BELOW && u64::from(gpa) % LEN_BYTES == 0, "{gpa:#x}");
        rig.write(REGISTER, &0xffff_fffe_u32.to_le_bytes());
        assert_eq!(register(&rig), 0xffff_0000);
        rig.write(REGISTER, &u32::MAX.to_le_bytes());
        assert_eq!(register(&rig), 0xffff_0001);
        rig.write(REGISTER, &(gpa | 1).to_le_bytes());
        assert_eq!(first_bytes(&rig, gpa), None, "memory is not decoded");
        assert_eq!(rig.host.rom_reads.load(Ordering::Relaxed), 0);
        rig.write(4, &[2]);
        assert_eq!(first_bytes(&rig, gpa), Some([0x55, 0xaa, 7, 0xff]));
        rig.mapper.write(gpa.into(), &[0; 4]);
        assert_eq!(first_bytes(&rig, gpa), Some([0x55, 0xaa, 7, 0xff]), "it is read-only");
        assert_eq!(rig.host.rom_reads.load(Ordering::Relaxed), 1, "the copy serves all reads");
        rig.write(REGISTER, &gpa.to_le_bytes());
        assert_eq!(first_bytes(&rig, gpa), None, "the ROM is not decoded");
        let moved = u32::try_from(BELOW).unwrap_or(0);
        rig.write(REGISTER, &(moved | 1).to_le_bytes());
        assert_eq!(first_bytes(&rig, moved), Some([0x55, 0xaa, 7, 0xff]));
        assert_eq!(first_bytes(&rig, gpa), None);
        rig.device.lose();
        rig.segment.refresh_mappings();
        assert_eq!(first_bytes(&rig, moved), None);
        rig.check();
    }

    #[test]
    fn the_rom_never_lies_over_another_bar() {
        let rig = rig();
        rig.write(4, &[2]);
        let other = u32::from_le_bytes(rig.read(0x18));
        let before = first_bytes(&rig, other);
        assert!(before.is_some());
        rig.write(REGISTER, &(other & 0xffff_0000 | 1).to_le_bytes());
        assert_eq!(first_bytes(&rig, other), before, "the BAR was there first");
        rig.check();
    }

    #[test]
    fn a_rom_that_cannot_be_read_is_all_ones_and_one_of_no_use_is_not_shown() {
        let rig = rig();
        rig.host.refuses_rom.store(true, Ordering::Relaxed);
        let gpa = register(&rig);
        rig.write(REGISTER, &(gpa | 1).to_le_bytes());
        rig.write(4, &[2]);
        assert_eq!(first_bytes(&rig, gpa), Some([0xff; 4]));
        for (host_bytes, shown) in [
            (0, None),
            (1, Some(0x800)),
            (3 << 20, Some(4 << 20)),
            (16 << 20, Some(16 << 20)),
            ((16 << 20) + 1, None),
            (u64::MAX, None),
        ] {
            let rig =
                Rig::prepared(FakeFunction::config(), |host| host.set_rom(host_bytes, &CONTENTS));
            let described = describe("rom", &*rig.host).map(|bar| bar.len_bytes);
            assert_eq!(described, shown, "{host_bytes:#x}");
            rig.write(REGISTER, &u32::MAX.to_le_bytes());
            assert_eq!(register(&rig) != 0, shown.is_some());
        }
        rig.check();
    }
}
