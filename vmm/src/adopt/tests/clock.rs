// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The TSC at the moment of the clock, by the pages in which KVM has told the guest of both.

use cloud_hypervisor_state::{Clock, Msr};

use super::*;

const PLACE: u32 = 0x4b56_4d01;
/// Where the two vCPUs have their pages.
const FIRST: u64 = 0x1000;
const SECOND: u64 = 0x1040;
/// 2.6 GHz: 2^32 times two cycles, in nanoseconds.
const MUL: u32 = 3_303_820_997;
const SHIFT: i8 = -1;
const CYCLES_PER_S: u64 = 2_600_000_000;
const SECOND_NS: u64 = 1_000_000_000;
/// What the clock showed at the pause.
const CLOCK_NS: u64 = 100 * SECOND_NS;

/// A machine of two vCPUs that have pages.
fn with_pages() -> Recorded {
    let mut recorded = recorded!("plain-2");
    recorded.memory = vec![0; 0x2000];
    let Some(Clock::Kvm(bytes)) = &mut recorded.document.vm.clock else { panic!("a clock") };
    bytes[..8].copy_from_slice(&CLOCK_NS.to_le_bytes());
    for (index, place) in [(0, FIRST), (1, SECOND)] {
        let msrs = &mut recorded.vcpu(index).msrs;
        let all = msrs.iter().filter(|msr| msr.index != PLACE).copied();
        let all: Vec<Msr> = all.chain([Msr { index: PLACE, data: place | 1 }]).collect();
        *msrs = List::try_from(all).ok().unwrap();
    }
    recorded
}

/// Writes a page: the TSC when the clock was `system_ns`.
fn write(recorded: &mut Recorded, gpa: u64, tsc: u64, system_ns: u64) {
    let at = usize::try_from(gpa).unwrap();
    let page = &mut recorded.memory[at..at + 32];
    page[..4].copy_from_slice(&8_u32.to_le_bytes());
    page[8..16].copy_from_slice(&tsc.to_le_bytes());
    page[16..24].copy_from_slice(&system_ns.to_le_bytes());
    page[24..28].copy_from_slice(&MUL.to_le_bytes());
    page[28] = SHIFT.cast_unsigned();
}

/// The TSC of the first vCPU in the document, which was read after the clock.
fn later_tsc() -> u64 {
    recorded!("plain-2").adopted().state.vcpus[0].tsc.value
}

#[track_caller]
fn is_near(recorded: &Recorded, expected: u64) {
    let adopted = recorded.adopted();
    assert!(adopted.is_tsc_of_clock);
    for vcpu in &adopted.state.vcpus {
        let found = vcpu.tsc.value;
        assert!(found.abs_diff(expected) <= 4, "{found} is not {expected}");
    }
}

/// The TSC is the later one, that of the document.
#[track_caller]
fn is_later(recorded: &Recorded) {
    let adopted = recorded.adopted();
    assert!(!adopted.is_tsc_of_clock);
    assert!(adopted.state.vcpus.iter().all(|vcpu| vcpu.tsc.value == later_tsc()));
}

#[test]
fn the_tsc_is_that_of_the_moment_of_the_clock() {
    let later = later_tsc();
    let mut recorded = with_pages();
    // The page was written a second before the pause, and the TSC was read 10 s after it.
    let tsc = later - 11 * CYCLES_PER_S;
    write(&mut recorded, FIRST, tsc, CLOCK_NS - SECOND_NS);
    is_near(&recorded, tsc + CYCLES_PER_S);
    // That of another vCPU is newer.
    write(&mut recorded, SECOND, tsc + CYCLES_PER_S / 2, CLOCK_NS - SECOND_NS / 4);
    is_near(&recorded, tsc + CYCLES_PER_S / 2 + CYCLES_PER_S / 4);
}

#[test]
fn frequencies_are_scaled_in_both_directions() {
    let later = later_tsc();
    let tsc = later - 11 * CYCLES_PER_S;
    // 650 MHz, and 5.2 GHz.
    for (shift, khz) in [(1, 650_000), (-2, 5_200_000)] {
        let mut recorded = with_pages();
        write(&mut recorded, FIRST, tsc, CLOCK_NS - SECOND_NS);
        recorded.memory[0x1000 + 28] = i8::cast_unsigned(shift);
        is_near(&recorded, tsc + khz * 1000);
    }
}

#[test]
fn without_a_page_that_tells_the_later_tsc_is_taken() {
    let later = later_tsc();
    is_later(&recorded!("plain-2"));
    // Of zeros.
    is_later(&with_pages());
    let tsc = later - 11 * CYCLES_PER_S;
    let system_ns = CLOCK_NS - SECOND_NS;
    let with = |tsc: u64, system_ns: u64, change: &dyn Fn(&mut Recorded)| {
        let mut recorded = with_pages();
        write(&mut recorded, FIRST, tsc, system_ns);
        change(&mut recorded);
        recorded
    };
    is_near(&with(tsc, system_ns, &|_| {}), tsc + CYCLES_PER_S);
    // Being written, without a frequency, with a shift that no frequency has.
    is_later(&with(tsc, system_ns, &|it| it.memory[0x1000] = 7));
    is_later(&with(tsc, system_ns, &|it| it.memory[0x1000 + 24..0x1000 + 28].fill(0)));
    is_later(&with(tsc, system_ns, &|it| it.memory[0x1000 + 28] = 32));
    is_later(&with(tsc, system_ns, &|it| it.memory[0x1000 + 28] = 0x80));
    // Written after the clock was read; a TSC that would be later than the later one.
    is_later(&with(tsc, CLOCK_NS + 1, &|_| {}));
    is_later(&with(later - CYCLES_PER_S / 2, system_ns, &|_| {}));
    is_later(&with(0, 0, &|it| it.memory[0x1000 + 24..0x1000 + 28].copy_from_slice(&[1, 0, 0, 0])));
    // The vCPU has no page any more; one at the last address.
    let place = |recorded: &mut Recorded, data: u64| {
        let msrs = &mut recorded.vcpu(0).msrs;
        let at = msrs.iter().position(|msr| msr.index == PLACE).unwrap();
        *msrs = changed(msrs, at, |msr| msr.data = data);
    };
    is_later(&with(tsc, system_ns, &|it| place(it, FIRST)));
    is_later(&with(tsc, system_ns, &|it| place(it, u64::MAX)));
}

#[test]
fn a_tsc_of_another_moment_goes_on_from_the_arrival() {
    let after = |recorded: &Recorded, seconds: u64| {
        let mut adopted = recorded.adopted();
        let before = adopted.state.vcpus[1].tsc.value;
        adopted.count_tsc_from(adopted.state.clock.realtime_ns + seconds * SECOND_NS);
        before - adopted.state.vcpus[1].tsc.value
    };
    assert_eq!(after(&recorded!("plain-2"), 3), 3 * CYCLES_PER_S);
    // A host whose time is behind.
    let mut adopted = recorded!("plain-2").adopted();
    adopted.count_tsc_from(7);
    assert_eq!(adopted.state.vcpus[0].tsc.value, later_tsc());
    // The moment of the clock is known.
    let mut recorded = with_pages();
    write(&mut recorded, FIRST, later_tsc() - 11 * CYCLES_PER_S, CLOCK_NS - SECOND_NS);
    assert_eq!(after(&recorded, 3), 0);
}
