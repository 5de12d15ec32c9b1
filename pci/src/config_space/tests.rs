// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests of the configuration space.
#![expect(clippy::unwrap_used, reason = "tests")]

use proptest::prelude::*;

use super::*;

fn identity() -> Identity {
    Identity {
        vendor_id: 0x1af4,
        device_id: 0x1042,
        revision: 1,
        class: 0x01_80_00,
        subsystem_vendor_id: 0x1af4,
        subsystem_id: 0x1042,
    }
}

fn bar(index: u8, kind: BarKind, len_bytes: u64) -> BarDescription {
    BarDescription { index, kind, prefetchable: false, len_bytes }
}

fn space() -> ConfigSpace {
    let mut space = ConfigSpace::endpoint(&identity());
    space.add_bar(bar(0, BarKind::Memory64, 0x1_0000)).unwrap();
    space.add_bar(bar(2, BarKind::Memory32, 0x1000)).unwrap();
    space
        .add_bar(BarDescription {
            index: 4,
            kind: BarKind::Memory64,
            prefetchable: true,
            len_bytes: 1 << 34,
        })
        .unwrap();
    space.add_capability(0x11, &[0, 0, 1, 2, 3, 4], &[0, 0xc0]).unwrap();
    space.add_capability(0x09, &[3, 4, 5], &[]).unwrap();
    space.add_extended_capability(0x0b, 1, &[1, 2, 3, 4], &[0xff]).unwrap();
    space
}

fn size_register(space: &mut ConfigSpace, offset: u16) -> u32 {
    let before = space.read_u32(offset);
    space.write(offset, &[0xff; 4]);
    let size = space.read_u32(offset);
    space.write(offset, &before.to_le_bytes());
    size
}

#[test]
fn header_says_who_it_is() {
    let space = space();
    assert_eq!(space.read_u32(0), 0x1042_1af4);
    assert_eq!(space.read_u32(8), 0x0180_0001);
    assert_eq!(space.read_u32(0x2c), 0x1042_1af4);
    assert_eq!(space.read_u32(0x3c), 0, "no interrupt pin");
}

#[test]
fn sizing_reads_back_the_size() {
    let mut space = space();
    assert_eq!(size_register(&mut space, 0x10), 0xffff_0004);
    assert_eq!(size_register(&mut space, 0x14), 0xffff_ffff);
    assert_eq!(size_register(&mut space, 0x18), 0xffff_f000);
    assert_eq!(size_register(&mut space, 0x1c), 0, "a BAR that does not exist");
    assert_eq!(
        size_register(&mut space, 0x20),
        0x0000_000c,
        "all address bits are in the upper half"
    );
    assert_eq!(size_register(&mut space, 0x24), 0xffff_fffc);
}

#[test]
fn bars_keep_their_flags_and_their_alignment() {
    let mut space = space();
    space.set_bar_gpa(0, 0x12_3456_789a);
    assert_eq!(space.bar_gpa(0), Some(0x12_3456_0000));
    assert_eq!(space.read_u32(0x10), 0x3456_0004);
    space.set_bar_gpa(2, 0xfff_c000_1fff);
    assert_eq!(space.bar_gpa(2), Some(0xc000_1000));
    assert_eq!(space.bar_gpa(1), None);
    assert_eq!(space.bar_gpa(200), None);
}

#[test]
fn ports_have_their_own_flag_size_and_decode_bit() {
    let mut space = ConfigSpace::endpoint(&identity());
    space.write(register::COMMAND, &[1]);
    assert!(!space.io_decode(), "without ports there is nothing to switch on");
    space.add_bar(bar(0, BarKind::Ports, 8)).unwrap();
    space.add_bar(bar(1, BarKind::Ports, 256)).unwrap();
    assert_eq!(size_register(&mut space, 0x10), 0xffff_fff9);
    assert_eq!(size_register(&mut space, 0x14), 0xffff_ff01);
    space.set_bar_gpa(0, 0x100f);
    assert_eq!((space.bar_gpa(0), space.read_u32(0x10)), (Some(0x1008), 0x1009));
    space.write(register::COMMAND, &[1]);
    let decode = space.bar_decode();
    assert!(decode.ports_enabled && !decode.enabled);
    assert_eq!(decode.gpas, [(0, 0x1008), (1, 0)]);
    for len_bytes in [0, 2, 12, 512] {
        let refused = space.add_bar(bar(2, BarKind::Ports, len_bytes));
        assert_eq!(refused, Err(ConfigError::BarSize { len_bytes }));
    }
}

#[test]
fn impossible_bars_are_refused() {
    let mut space = space();
    for index in [0, 1, 2, 5, 6, 255] {
        let refused = space.add_bar(bar(index, BarKind::Memory32, 16));
        assert_eq!(refused, Err(ConfigError::BarIndex { index }));
    }
    assert_eq!(
        space.add_bar(bar(3, BarKind::Memory64, 16)),
        Err(ConfigError::BarIndex { index: 3 }),
        "its upper half is taken"
    );
    for len_bytes in [0, 8, 48, 1 << 32] {
        let refused = space.add_bar(bar(3, BarKind::Memory32, len_bytes));
        assert_eq!(refused, Err(ConfigError::BarSize { len_bytes }));
    }
}

#[test]
fn capabilities_are_linked() {
    let space = space();
    assert_eq!(space.read_u16(register::STATUS) & STATUS_CAPABILITIES, STATUS_CAPABILITIES);
    assert_eq!(space.read_u16(register::CAPABILITIES), 0x40);
    assert_eq!(space.read_u16(0x40), 0x4811);
    assert_eq!(space.read_u16(0x48), 0x0009);
    assert_eq!(space.read_u32(0x100), 0x0001_000b);
}

#[test]
fn extended_capabilities_are_linked() {
    let mut space = space();
    let offset = space.add_extended_capability(0x1d, 2, &[0; 8], &[]).unwrap();
    assert_eq!(offset, 0x108);
    assert_eq!(space.read_u32(0x100), 0x1081_000b);
    assert_eq!(space.read_u32(0x108), 0x0002_001d);
}

#[test]
fn capabilities_that_do_not_fit_are_refused() {
    let mut space = space();
    let body = [0; 0xb0];
    assert_eq!(
        space.add_capability(9, &body, &[]),
        Err(ConfigError::CapabilityRoom { id: 9, len_bytes: 0xb2 })
    );
    space.add_capability(9, &body[..0xad], &[]).unwrap();
    assert!(space.add_capability(9, &[], &[]).is_err());
}

#[test]
fn command_switches_decode_and_bus_master() {
    let mut space = space();
    assert!(!space.memory_decode() && !space.bus_master());
    space.write(register::COMMAND, &[0xff, 0xff]);
    assert!(space.memory_decode() && space.bus_master());
    assert_eq!(space.read_u16(register::COMMAND), COMMAND_WRITABLE);
    space.write(register::COMMAND, &[0x02]);
    assert!(space.memory_decode() && !space.bus_master());
}

#[test]
fn host_bridge_cannot_be_written() {
    let mut space = ConfigSpace::host_bridge(&identity());
    let before = space.save();
    for offset in 0..CONFIG_SPACE_LEN_BYTES {
        space.write(offset, &[0xff; 4]);
    }
    assert_eq!(space.save(), before);
}

#[test]
fn beyond_the_end_reads_as_ones() {
    let mut space = space();
    let mut data = [0; 8];
    space.read(4094, &mut data);
    assert_eq!(data, [0, 0, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff]);
    space.write(4094, &data);
    space.read(u16::MAX, &mut data);
    assert_eq!(data, [0xff; 8]);
}

#[test]
fn state_comes_back() {
    let mut space = space();
    space.set_bar_gpa(0, 0x80_0000_0000);
    space.write(register::COMMAND, &[6]);
    space.write(0x43, &[0x80]);
    space.write(0x104, &[0x55]);
    let state = space.save();
    let text = serde_json::to_string(&state).unwrap();
    let restored = self::space().restored(&serde_json::from_str(&text).unwrap()).unwrap();
    assert_eq!(restored.save(), state);
    assert_eq!(restored.bar_gpa(0), Some(0x80_0000_0000));
}

#[test]
fn altered_states_are_refused() {
    let space = space();
    let good = space.save();
    let refused = |alter: fn(&mut ConfigSpaceState)| {
        let mut state = good.clone();
        alter(&mut state);
        space.restored(&state).err().unwrap()
    };
    assert_eq!(refused(|s| s.version = 2), ConfigStateError::Version { found: 2 });
    assert_eq!(refused(|s| s.registers.truncate(63)), ConfigStateError::Length { found: 63 });
    assert!(matches!(
        refused(|s| s.registers[0] ^= 1),
        ConfigStateError::ReadOnly { offset: 0, .. }
    ));
    assert!(matches!(
        refused(|s| s.registers[4] ^= 4),
        ConfigStateError::ReadOnly { offset: 0x10, .. }
    ));
    assert!(matches!(refused(|s| s.registers[16] ^= 1), ConfigStateError::ReadOnly { .. }));
    assert!(matches!(refused(|s| s.extended_registers.clear()), ConfigStateError::ReadOnly { .. }));
    assert_eq!(
        refused(|s| s.extended_registers.push((0x106, 1))),
        ConfigStateError::Offset { offset: 0x106 }
    );
    assert_eq!(
        refused(|s| s.extended_registers.push((0xfff0, 1))),
        ConfigStateError::Offset { offset: 0xfff0 }
    );
}

proptest! {
    #[test]
    fn writes_change_writable_bits_only(
        accesses in prop::collection::vec((any::<u16>(), prop::collection::vec(any::<u8>(), 0..9)), 0..64)
    ) {
        let fresh = space();
        let mut space = space();
        for (offset, data) in &accesses {
            space.write(*offset, data);
            let mut read = vec![0; data.len()];
            space.read(*offset, &mut read);
        }
        for ((now, before), mask) in space.bytes.iter().zip(fresh.bytes.iter()).zip(fresh.writable.iter()) {
            prop_assert_eq!((now ^ before) & !mask, 0);
        }
        let state = space.save();
        prop_assert_eq!(fresh.restored(&state).unwrap().save(), state);
    }
}

#[test]
fn an_expansion_rom_is_sized_and_has_an_enable_bit_of_its_own() {
    let mut space = ConfigSpace::endpoint(&identity());
    space.add_bar(bar(0, BarKind::Memory32, 0x1000)).unwrap();
    space.add_bar(bar(ROM_INDEX, BarKind::Rom, 0x1_0000)).unwrap();
    assert!(!space.bar_decode().rom_enabled);
    space.set_bar_gpa(ROM_INDEX, 0xc012_3456);
    assert_eq!(space.read_u32(register::ROM), 0xc012_0000);
    space.write(register::ROM, &u32::MAX.to_le_bytes());
    assert_eq!(space.read_u32(register::ROM), 0xffff_0001);
    assert_eq!(space.bar_gpa(ROM_INDEX), Some(0xffff_0000));
    assert!(space.bar_decode().rom_enabled);
    assert_eq!(space.read_u32(register::BAR0), 0, "a register apart");
    let restored = space.restored(&space.save()).unwrap();
    assert_eq!(restored.bar_decode(), space.bar_decode());
    for (index, kind, len_bytes) in [
        (ROM_INDEX, BarKind::Rom, 0x1000),
        (ROM_INDEX, BarKind::Memory32, 0x1000),
        (2, BarKind::Rom, 0x1000),
        (7, BarKind::Rom, 0x1000),
    ] {
        assert!(space.add_bar(bar(index, kind, len_bytes)).is_err(), "{index} {kind:?}");
    }
    let refused = |len_bytes| {
        ConfigSpace::endpoint(&identity()).add_bar(bar(ROM_INDEX, BarKind::Rom, len_bytes))
    };
    assert!([0x400, 0x1800, 0x200_0000].map(refused).iter().all(Result::is_err));
    assert!([0x800, 0x100_0000].map(refused).iter().all(Result::is_ok));
}
