// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests of placement and relocation.
#![expect(clippy::unwrap_used, reason = "tests")]

use std::sync::atomic::Ordering;

use parking_lot::Mutex;
use proptest::prelude::*;

use super::*;
use crate::bar::BarDecode;
use crate::device::{PciDeviceState, PciStateError};
use crate::fakes::{FakeMapper, MapCall};

const LOW: u64 = 0xc000_0000;
/// Where the first BAR of a page is placed.
const LOW_LAST_PAGE: u64 = LOW + 0xf_f000;
const HIGH: u64 = 0x40_0000_0000;
const WINDOWS: MmioWindows = MmioWindows {
    below_4g: MmioRange { start_gpa: LOW, len_bytes: 0x10_0000 },
    above_4g: MmioRange { start_gpa: HIGH, len_bytes: 0x10_0000 },
};

const PORTS: MmioRange = MmioRange { start_gpa: 0x1000, len_bytes: 0x300 };

/// A function whose registers a test sets directly.
struct Function {
    bars: Mutex<Vec<BarDescription>>,
    can_widen: bool,
    decode: Mutex<BarDecode>,
    moves: Mutex<Vec<Option<u64>>>,
}

impl Function {
    fn new(bars: &[(BarKind, u64)], can_widen: bool) -> Arc<Self> {
        let bars = (0..)
            .step_by(2)
            .zip(bars)
            .map(|(index, &(kind, len_bytes))| BarDescription {
                index,
                kind,
                prefetchable: false,
                len_bytes,
            })
            .collect();
        Arc::new(Self {
            bars: Mutex::new(bars),
            can_widen,
            decode: Mutex::new(BarDecode {
                enabled: false,
                ports_enabled: false,
                rom_enabled: false,
                gpas: Vec::new(),
            }),
            moves: Mutex::default(),
        })
    }

    fn gpa(&self, index: u8) -> u64 {
        self.decode.lock().gpas.iter().find(|(at, _)| *at == index).unwrap().1
    }

    fn take_moves(&self) -> Vec<Option<u64>> {
        std::mem::take(&mut self.moves.lock())
    }
}

impl PciDevice for Function {
    fn id(&self) -> &'static str {
        "function"
    }
    fn kind(&self) -> &'static str {
        "test"
    }
    fn read_config(&self, _offset: u16, _data: &mut [u8]) {}
    fn write_config(&self, _offset: u16, _data: &[u8]) {}
    fn bars(&self) -> Vec<BarDescription> {
        self.bars.lock().clone()
    }
    fn widen_bar(&self, index: u8) -> bool {
        let mut bars = self.bars.lock();
        let bar = bars.iter_mut().find(|bar| bar.index == index && self.can_widen);
        bar.map(|bar| bar.kind = BarKind::Memory64).is_some()
    }
    fn bar_decode(&self) -> BarDecode {
        self.decode.lock().clone()
    }
    fn place_bar(&self, index: u8, gpa: u64) {
        let mut decode = self.decode.lock();
        decode.gpas.retain(|(at, _)| *at != index);
        decode.gpas.push((index, gpa));
    }
    fn bar_moved(&self, _index: u8, gpa: Option<u64>) {
        self.moves.lock().push(gpa);
    }
    fn read_bar(&self, index: u8, _offset: u64, data: &mut [u8]) {
        data.fill(index);
    }
    fn write_bar(&self, _index: u8, _offset: u64, _data: &[u8]) {}
    fn save(&self) -> Result<PciDeviceState, PciStateError> {
        PciDeviceState::encode(self, 1, &())
    }
    fn restore(&self, _state: &PciDeviceState) -> Result<(), PciStateError> {
        Ok(())
    }
}

struct Rig {
    placement: BarPlacement,
    mapper: Arc<FakeMapper>,
    ports: Arc<FakeMapper>,
    functions: Vec<Arc<Function>>,
    can_widen: bool,
}

impl Rig {
    fn new() -> Self {
        let mapper = Arc::new(FakeMapper::new(vec![WINDOWS.below_4g, WINDOWS.above_4g]));
        let ports = Arc::new(FakeMapper::new(vec![PORTS]));
        let window = PortWindow { first: 0x1000, last: 0x12ff, mapper: ports.clone() };
        let placement =
            BarPlacement::new(WINDOWS, GODWIT_BARS, mapper.clone(), Some(window)).unwrap();
        Self { placement, mapper, ports, functions: Vec::new(), can_widen: false }
    }

    /// A rig with functions that have one 64-bit BAR of 64 KiB each.
    fn with_functions(count: usize) -> Self {
        let mut rig = Self::new();
        for _ in 0..count {
            rig.add(&[(BarKind::Memory64, 0x1_0000)]).unwrap();
        }
        rig
    }

    fn number(at: usize) -> DeviceNumber {
        DeviceNumber::new(u8::try_from(at + 1).unwrap()).unwrap()
    }

    fn add(&mut self, bars: &[(BarKind, u64)]) -> Result<Arc<Function>, PlacementError> {
        let function = Function::new(bars, self.can_widen);
        let device: Arc<dyn PciDevice> = function.clone();
        self.placement.add(Self::number(self.functions.len()), &device)?;
        self.functions.push(Arc::clone(&function));
        Ok(function)
    }

    fn set(&mut self, at: usize, gpa: u64, enabled: bool) {
        self.functions[at].place_bar(0, gpa);
        self.decode(at, enabled);
    }

    fn decode(&mut self, at: usize, enabled: bool) {
        self.functions[at].decode.lock().enabled = enabled;
        self.placement.refresh(Self::number(at));
    }

    fn decode_ports(&mut self, at: usize, enabled: bool) {
        self.functions[at].decode.lock().ports_enabled = enabled;
        self.placement.refresh(Self::number(at));
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            assert_eq!(self.mapper.violations(), Vec::<String>::new());
            assert_eq!(self.ports.violations(), Vec::<String>::new());
        }
    }
}

#[test]
fn bars_are_placed_by_width_and_aligned_to_their_size() {
    let mut rig = Rig::new();
    let function = rig
        .add(&[
            (BarKind::Memory32, 0x1000),
            (BarKind::Memory64, 0x1000),
            (BarKind::Memory64, 0x4_0000),
        ])
        .unwrap();
    assert_eq!(function.gpa(0), LOW_LAST_PAGE, "from the end of the window");
    assert_eq!(function.gpa(4), HIGH, "the largest comes first");
    assert_eq!(function.gpa(2), HIGH + 0x4_0000);
    assert_eq!(rig.mapper.take_calls(), [], "nothing is mapped before the guest says so");
}

/// The allocator hands out a part of a range that is taken when it is asked for exactly that.
#[test]
fn a_small_bar_inside_of_a_large_one_gets_nothing_until_that_goes() {
    let mut rig = Rig::new();
    rig.add(&[(BarKind::Memory64, 0x1_0000)]).unwrap();
    rig.add(&[(BarKind::Memory64, 0x1000)]).unwrap();
    rig.set(1, HIGH + 0x1000, false);
    // Each returns what it has, and the allocator has to know it.
    rig.set(0, HIGH + 0x4_0000, true);
    rig.set(1, HIGH + 0x1000, true);
    assert_eq!(rig.mapper.mapped(), [HIGH + 0x1000, HIGH + 0x4_0000]);
}

/// Small ones do not take the place of those that are aligned to a half of the window.
#[test]
fn small_32_bit_bars_leave_the_beginning_of_their_window() {
    let mut rig = Rig::new();
    for at in 1..=8 {
        let function = rig.add(&[(BarKind::Memory32, 0x1_0000)]).unwrap();
        assert_eq!(function.gpa(0), LOW + 0x10_0000 - at * 0x1_0000);
    }
    assert_eq!(rig.add(&[(BarKind::Memory32, 0x8_0000)]).unwrap().gpa(0), LOW);
}

#[test]
fn a_32_bit_bar_without_room_becomes_a_64_bit_one_if_it_can() {
    let mut rig = Rig::new();
    rig.add(&[(BarKind::Memory32, 0x10_0000)]).unwrap();
    let refused = rig.add(&[(BarKind::Memory32, 0x1_0000)]).err().unwrap();
    assert!(matches!(refused, PlacementError::NoRoom { start_gpa: LOW, .. }), "{refused}");
    rig.can_widen = true;
    let function = rig.add(&[(BarKind::Memory32, 0x1_0000)]).unwrap();
    assert_eq!((function.bars()[0].kind, function.gpa(0)), (BarKind::Memory64, HIGH));
    rig.set(1, HIGH, true);
    assert_eq!(rig.mapper.mapped(), [HIGH]);
    // Nor does one that can fail where there is no room at all.
    rig.add(&[(BarKind::Memory64, 0x8_0000)]).unwrap();
    let refused = rig.add(&[(BarKind::Memory32, 0x10_0000)]).err().unwrap();
    assert!(matches!(refused, PlacementError::NoRoom { start_gpa: HIGH, .. }), "{refused}");
}

#[test]
fn a_function_without_room_gives_back_what_it_got() {
    let mut rig = Rig::new();
    let refused = rig.add(&[(BarKind::Memory64, 0x8_0000), (BarKind::Memory32, 0x100_0000)]);
    let error = refused.err().unwrap();
    assert!(matches!(error, PlacementError::NoRoom { index: 2, start_gpa: LOW, .. }), "{error}");
    let function = rig.add(&[(BarKind::Memory64, 0x10_0000)]).unwrap();
    assert_eq!(function.gpa(0), HIGH);
}

#[test]
fn ports_and_memory_of_a_function_come_and_go_by_bits_of_their_own() {
    let mut rig = Rig::new();
    let function = rig.add(&[(BarKind::Ports, 8), (BarKind::Memory32, 0x1000)]).unwrap();
    assert_eq!((function.gpa(0), function.gpa(2)), (0x1000, LOW_LAST_PAGE));
    rig.decode(0, true);
    assert_eq!((rig.ports.mapped(), rig.mapper.mapped()), (vec![], vec![LOW_LAST_PAGE]));
    rig.decode_ports(0, true);
    assert_eq!((rig.ports.mapped(), rig.mapper.mapped()), (vec![0x1000], vec![LOW_LAST_PAGE]));
    let mut data = [0xff];
    assert!(rig.ports.read(0x1007, &mut data) && data == [0]);
    rig.decode(0, false);
    assert_eq!((rig.ports.mapped(), rig.mapper.mapped()), (vec![0x1000], vec![]));
    rig.placement.remove(Rig::number(0));
    assert_eq!(rig.ports.mapped(), [0_u64; 0]);
    assert_eq!(rig.add(&[(BarKind::Ports, 8)]).unwrap().gpa(0), 0x1000, "they are free again");
}

#[test]
fn ports_follow_their_register_inside_of_their_window() {
    let mut rig = Rig::new();
    rig.add(&[(BarKind::Ports, 8)]).unwrap();
    rig.add(&[(BarKind::Ports, 0x100)]).unwrap();
    assert_eq!(rig.functions[1].gpa(0), 0x1100);
    rig.decode_ports(0, true);
    rig.decode_ports(1, true);
    rig.functions[0].place_bar(0, 0x12f8);
    rig.decode_ports(0, true);
    assert_eq!(rig.ports.mapped(), [0x1100, 0x12f8]);
    // Fixed ports, beyond the window, memory, and another's.
    for elsewhere in [0, 0x3f8, 0x1300, LOW, HIGH, 0x1180] {
        rig.functions[0].place_bar(0, elsewhere);
        rig.decode_ports(0, true);
        assert_eq!(rig.ports.mapped(), [0x1100], "{elsewhere:#x}");
    }
    rig.functions[0].place_bar(0, 0x1000);
    rig.decode_ports(0, true);
    assert_eq!(rig.ports.mapped(), [0x1000, 0x1100]);
    assert_eq!(rig.mapper.take_calls(), []);
}

#[test]
fn a_function_without_room_for_its_ports_has_them_nowhere() {
    let mut rig = Rig::new();
    for _ in 0..3 {
        rig.add(&[(BarKind::Ports, 0x100)]).unwrap();
        rig.decode_ports(rig.functions.len() - 1, true);
    }
    let late = rig.add(&[(BarKind::Ports, 4), (BarKind::Memory32, 0x1000)]).unwrap();
    assert_eq!((late.gpa(0), late.gpa(2)), (0, LOW_LAST_PAGE));
    rig.decode_ports(3, true);
    assert_eq!(rig.ports.mapped(), [0x1000, 0x1100, 0x1200]);
    // The guest makes room.
    rig.decode_ports(1, false);
    late.place_bar(0, 0x1104);
    rig.decode_ports(3, true);
    assert_eq!(rig.ports.mapped(), [0x1000, 0x1104, 0x1200]);
}

#[test]
fn without_a_window_there_are_no_ports() {
    let mapper = Arc::new(FakeMapper::default());
    let mut placement = BarPlacement::new(WINDOWS, GODWIT_BARS, mapper.clone(), None).unwrap();
    let function = Function::new(&[(BarKind::Ports, 8)], false);
    let device: Arc<dyn PciDevice> = function.clone();
    placement.add(Rig::number(0), &device).unwrap();
    function.place_bar(0, 0x1000);
    function.decode.lock().ports_enabled = true;
    placement.refresh_all();
    assert_eq!(mapper.take_calls(), []);
}

#[test]
fn impossible_windows_are_refused() {
    let window = MmioRange { start_gpa: u64::MAX, len_bytes: 2 };
    let windows = MmioWindows { above_4g: window, ..WINDOWS };
    let refused = BarPlacement::new(windows, GODWIT_BARS, Arc::new(FakeMapper::default()), None);
    assert!(matches!(refused, Err(PlacementError::Window { start_gpa: u64::MAX, .. })));
}

#[test]
fn decode_maps_and_unmaps() {
    let mut rig = Rig::with_functions(1);
    rig.decode(0, true);
    assert_eq!(rig.mapper.take_calls(), [MapCall::Map(HIGH)]);
    assert_eq!(rig.functions[0].take_moves(), [Some(HIGH)]);
    let mut data = [0xff; 4];
    assert!(rig.mapper.read(HIGH + 0x8000, &mut data));
    assert_eq!(data, [0; 4], "the BAR with index 0 answered");
    rig.decode(0, false);
    assert_eq!(rig.mapper.take_calls(), [MapCall::Unmap(HIGH)]);
    assert_eq!(rig.functions[0].take_moves(), [None]);
}

#[test]
fn a_decoding_bar_moves_with_its_register() {
    let mut rig = Rig::with_functions(1);
    rig.decode(0, true);
    rig.mapper.take_calls();
    rig.functions[0].take_moves();
    rig.set(0, HIGH + 0x4_0000, true);
    assert_eq!(rig.mapper.take_calls(), [MapCall::Relocate(HIGH, HIGH + 0x4_0000)]);
    assert_eq!(rig.functions[0].take_moves(), [None, Some(HIGH + 0x4_0000)]);
    rig.set(0, LOW, true);
    assert_eq!(rig.mapper.mapped(), [LOW], "a 64-bit BAR may lie below 4 GiB");
}

#[test]
fn a_silent_bar_moves_only_its_register() {
    let mut rig = Rig::with_functions(1);
    rig.set(0, HIGH + 0x4_0000, false);
    assert_eq!(rig.mapper.take_calls(), []);
    rig.decode(0, true);
    assert_eq!(rig.mapper.take_calls(), [MapCall::Map(HIGH + 0x4_0000)]);
}

#[test]
fn a_bar_outside_of_the_windows_is_not_mapped_until_it_comes_back() {
    let mut rig = Rig::with_functions(1);
    rig.decode(0, true);
    for gpa in [0, 0x10_0000, HIGH - 0x1_0000, HIGH + 0x10_0000, 0xffff_ffff_ffff_0000] {
        rig.set(0, gpa, true);
        assert_eq!(rig.mapper.mapped(), [0_u64; 0], "{gpa:#x}");
    }
    rig.set(0, HIGH, true);
    assert_eq!(rig.mapper.mapped(), [HIGH]);
}

#[test]
fn a_bar_on_top_of_another_is_not_mapped_until_that_goes_away() {
    let mut rig = Rig::with_functions(2);
    rig.decode(0, true);
    rig.decode(1, true);
    rig.set(1, HIGH, true);
    assert_eq!(rig.mapper.mapped(), [HIGH]);
    assert_eq!(rig.functions[0].take_moves(), [Some(HIGH)], "the first one keeps its place");
    rig.set(0, HIGH + 0x8_0000, true);
    assert_eq!(rig.mapper.mapped(), [HIGH, HIGH + 0x8_0000]);
    assert_eq!(rig.functions[1].take_moves().last(), Some(&Some(HIGH)));
}

#[test]
fn two_decoding_bars_can_change_places() {
    let mut rig = Rig::with_functions(2);
    rig.decode(0, true);
    rig.decode(1, true);
    rig.set(0, HIGH + 0x1_0000, true);
    rig.set(1, HIGH, true);
    assert_eq!(rig.mapper.mapped(), [HIGH, HIGH + 0x1_0000]);
}

#[test]
fn two_silent_bars_can_change_places() {
    let mut rig = Rig::with_functions(2);
    rig.set(0, HIGH + 0x1_0000, false);
    rig.set(1, HIGH, false);
    rig.decode(0, true);
    rig.decode(1, true);
    assert_eq!(rig.mapper.mapped(), [HIGH, HIGH + 0x1_0000]);
}

#[test]
fn a_bar_that_leaves_makes_room_for_one_that_comes_before_it() {
    let mut rig = Rig::with_functions(2);
    rig.decode(0, true);
    rig.set(0, HIGH + 0x1_0000, true);
    rig.set(1, HIGH + 0x1_0000, true);
    assert_eq!(rig.mapper.mapped(), [HIGH + 0x1_0000]);
    rig.functions[0].take_moves();
    // The first one waits for the range that the second one holds while it falls silent.
    rig.set(0, HIGH, true);
    rig.set(0, HIGH + 0x1_0000, true);
    rig.set(1, HIGH, false);
    assert_eq!(rig.mapper.mapped(), [HIGH + 0x1_0000]);
    assert_eq!(rig.functions[0].take_moves().last(), Some(&Some(HIGH + 0x1_0000)));
}

#[test]
fn a_new_function_is_not_placed_where_a_silent_bar_points() {
    let mut rig = Rig::with_functions(1);
    rig.set(0, HIGH + 0x1_0000, false);
    rig.add(&[(BarKind::Memory64, 0x1_0000)]).unwrap();
    rig.add(&[(BarKind::Memory64, 0x1_0000)]).unwrap();
    assert_eq!(rig.functions[1].gpa(0), HIGH);
    assert_eq!(rig.functions[2].gpa(0), HIGH + 0x2_0000);
}

#[test]
fn no_bar_takes_a_part_of_a_reserved_range() {
    let mut rig = Rig::with_functions(2);
    let wish = RangeWish { start_gpa: None, len_bytes: 0x2_0000, align_bytes: 0x1_0000 };
    let range = rig.placement.reserve(wish).unwrap();
    assert_eq!(range.start_gpa, HIGH + 0x2_0000);
    rig.add(&[(BarKind::Memory64, 0x1_0000)]).unwrap();
    assert_eq!(rig.functions[2].gpa(0), HIGH + 0x4_0000, "a new one is placed behind it");
    for gpa in [range.start_gpa, range.start_gpa + 0x1_0000] {
        rig.set(0, gpa, false);
        rig.decode(0, true);
        assert_eq!(rig.mapper.mapped(), [0_u64; 0]);
    }
    rig.placement.release(range);
    assert_eq!(rig.mapper.mapped(), [range.start_gpa + 0x1_0000]);
    let refused = rig.placement.reserve(RangeWish { start_gpa: Some(range.start_gpa), ..wish });
    assert!(matches!(refused, Err(PlacementError::RangeTaken { .. })));
}

#[test]
fn a_refused_mapping_leaves_the_bar_unmapped() {
    let mut rig = Rig::with_functions(1);
    rig.mapper.refuses.store(true, Ordering::Relaxed);
    rig.decode(0, true);
    assert_eq!(rig.functions[0].take_moves(), []);
    rig.mapper.refuses.store(false, Ordering::Relaxed);
    rig.decode(0, true);
    assert_eq!(rig.mapper.mapped(), [HIGH], "it is tried again");

    rig.mapper.refuses.store(true, Ordering::Relaxed);
    rig.set(0, HIGH + 0x4_0000, true);
    assert_eq!(rig.mapper.mapped(), [0_u64; 0]);
    assert_eq!(rig.functions[0].take_moves(), [Some(HIGH), None, None]);
}

proptest! {
    /// Guests shuffle BARs at will: mappings never overlap or leave the windows, and whenever all
    /// BARs point to places of their own, all are mapped.
    #[test]
    fn any_shuffle_ends_well(
        steps in prop::collection::vec((0_usize..3, 0_u64..20, any::<bool>()), 0..64)
    ) {
        let mut rig = Rig::with_functions(3);
        for (at, place, enabled) in steps {
            // Places 16 to 19 are outside of the window.
            rig.set(at, HIGH + place * 0x1_0000, enabled);
            let mapped = rig.mapper.mapped();
            for function in &rig.functions {
                let gpa = function.gpa(0);
                let decodes = |other: &&Arc<Function>| other.decode.lock().enabled && other.gpa(0) == gpa;
                let rivals = rig.functions.iter().filter(decodes).count();
                let inside = gpa < HIGH + 0x10_0000;
                prop_assert_eq!(mapped.contains(&gpa), rivals > 0 && inside);
            }
            prop_assert_eq!(rig.mapper.violations(), Vec::<String>::new());
        }
    }
}

#[test]
fn an_expansion_rom_takes_no_room_that_a_bar_needs() {
    let mut rig = Rig::new();
    // The larger of the two, and placed last all the same.
    let bars = [(BarKind::Rom, 0x4_0000), (BarKind::Memory32, 0x1000)];
    let function = rig.add(&bars).unwrap();
    assert_eq!((function.gpa(2), function.gpa(0)), (LOW_LAST_PAGE, LOW + 0x8_0000));
    let other = rig.add(&[(BarKind::Memory32, 0x8_0000)]).unwrap();
    assert_eq!(other.gpa(0), LOW, "there is room for both");
    let third = rig.add(&[(BarKind::Memory32, 0x4_0000)]).unwrap();
    assert_eq!(third.gpa(0), function.gpa(0), "the ROM is not decoded");
    let refused = rig.add(&[(BarKind::Memory32, 0x8_0000)]).err().unwrap();
    assert!(matches!(refused, PlacementError::NoRoom { index: 0, .. }), "{refused}");
    let no_room = rig.add(&[(BarKind::Memory64, 0x1000), (BarKind::Rom, 0x10_0000)]).unwrap();
    assert_eq!((no_room.gpa(0), no_room.gpa(2)), (HIGH, 0), "it is done without");
}

#[test]
fn a_rom_that_made_room_for_nothing_has_it_back() {
    let mut rig = Rig::new();
    let function = rig.add(&[(BarKind::Rom, 0x4_0000)]).unwrap();
    rig.add(&[(BarKind::Memory32, 0x10_0000), (BarKind::Memory32, 0x1000)]).err().unwrap();
    let next = rig.add(&[(BarKind::Rom, 0x4_0000)]).unwrap();
    assert!(next.gpa(0) < function.gpa(0), "its range is taken");
}

#[test]
fn a_rom_is_mapped_while_memory_and_it_are_enabled() {
    let mut rig = Rig::new();
    let function = rig.add(&[(BarKind::Rom, 0x1000)]).unwrap();
    for (memory, rom) in [(false, true), (true, false), (false, false)] {
        function.decode.lock().rom_enabled = rom;
        rig.decode(0, memory);
        assert_eq!(rig.mapper.mapped(), [0_u64; 0], "{memory} {rom}");
    }
    function.decode.lock().rom_enabled = true;
    rig.decode(0, true);
    assert_eq!(rig.mapper.mapped(), [LOW_LAST_PAGE]);
    let bar = rig.add(&[(BarKind::Memory32, 0x1000)]).unwrap();
    rig.set(1, LOW_LAST_PAGE, true);
    assert_eq!(rig.mapper.mapped(), [LOW_LAST_PAGE], "the ROM was there first");
    assert_eq!(bar.moves.lock().last(), None);
    function.decode.lock().rom_enabled = false;
    rig.decode(0, true);
    assert_eq!(bar.moves.lock().last(), Some(&Some(LOW_LAST_PAGE)));
}
