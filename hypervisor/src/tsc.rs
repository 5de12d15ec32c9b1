// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The time-stamp counter of a vCPU across a move.
//!
//! Owns the arithmetic that makes a vCPU's TSC go on with the clock (see `clock`). Must never set a
//! frequency that the host can only pretend: KVM then trails the guest's TSC by hand or lets it run
//! at the wrong speed.

use kvm_bindings::{KVM_VCPU_TSC_CTRL, KVM_VCPU_TSC_OFFSET};
use serde::{Deserialize, Serialize};

use crate::clock::TimeBase;

/// Group and number of the TSC offset among a vCPU's attributes.
pub const OFFSET_ATTRIBUTE: (u32, u32) = (KVM_VCPU_TSC_CTRL, KVM_VCPU_TSC_OFFSET);
/// Frequencies that differ by less are the same one: KVM's own default tolerance.
const TOLERANCE_PPM: u64 = 250;

/// A vCPU's TSC; untrusted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TscState {
    /// Frequency, if the host knows it.
    pub khz: Option<u32>,
    /// Counter at some moment of the save.
    pub value: u64,
    /// Difference to the host's counter, if the host can tell.
    pub offset: Option<u64>,
}

/// How a vCPU's TSC is set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TscTarget {
    /// By its difference to the host's counter: exact.
    Offset(u64),
    /// By its value at about now: the kernel makes vCPUs agree that are set within a second.
    Value(u64),
}

/// Whether two frequencies are the same for KVM.
pub fn same_frequency(a_khz: u32, b_khz: u32) -> bool {
    is_within(a_khz, b_khz, TOLERANCE_PPM)
}

fn is_within(a_khz: u32, b_khz: u32, tolerance_ppm: u64) -> bool {
    let limit = u64::from(a_khz) * tolerance_ppm / 1_000_000;
    u64::from(a_khz.abs_diff(b_khz)) <= limit
}

/// How far a vCPU's frequency may be from this host's before its counter is scaled, in millionths.
pub fn tolerance_ppm() -> u64 {
    let set = std::fs::read_to_string("/sys/module/kvm/parameters/tsc_tolerance_ppm");
    set.ok().and_then(|text| text.trim().parse().ok()).unwrap_or(TOLERANCE_PPM)
}

/// Cycles of a counter of `khz` in `elapsed_ns`, modulo 2^64 as the counter itself.
fn cycles(elapsed_ns: u64, khz: u32) -> u64 {
    let cycles = u128::from(elapsed_ns) * u128::from(khz) / 1_000_000;
    u64::try_from(cycles & u128::from(u64::MAX)).unwrap_or(0)
}

/// What to set, on a vCPU whose frequency is `khz` by now. This host scales no counter whose frequency
/// is within `tolerance_ppm` of its own: hosts of one kind differ by some millionths.
pub fn target(
    state: &TscState,
    time: &TimeBase,
    khz: Option<u32>,
    tolerance_ppm: u64,
) -> TscTarget {
    let unscaled = |host_khz: Option<u32>, vcpu_khz: Option<u32>, ppm| {
        host_khz.zip(vcpu_khz).is_some_and(|(host, vcpu)| is_within(host, vcpu, ppm))
    };
    // With an unscaled counter the guest's value at the moment of the clock reading is known: it is
    // that of the counter, which was read within a second. (What the source tolerates is not known.)
    let exact = match (time.source.host_tsc, state.offset) {
        (Some(host), Some(offset)) => Some(host.wrapping_add(offset)),
        _ => None,
    };
    let second = state.khz.map_or(0, |khz| u64::from(khz) * 1000);
    let is_near = |exact: &u64| {
        let ahead = state.value.wrapping_sub(*exact);
        ahead.min(ahead.wrapping_neg()) < second
    };
    let source_khz = time.source.host_tsc_khz;
    let exact = exact
        .filter(|_| unscaled(source_khz, state.khz, TOLERANCE_PPM))
        .filter(|exact| source_khz == state.khz || is_near(exact));
    let passed = khz.map_or(0, |khz| cycles(time.elapsed_ns, khz));
    let now = exact.unwrap_or(state.value).wrapping_add(passed);
    match time.here.host_tsc {
        Some(host) if exact.is_some() && unscaled(time.here.host_tsc_khz, khz, tolerance_ppm) => {
            TscTarget::Offset(now.wrapping_sub(host))
        }
        _ => TscTarget::Value(now),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::ClockState;

    fn clock(host_tsc: Option<u64>, khz: u32) -> ClockState {
        ClockState { host_tsc, host_tsc_khz: Some(khz), ..Default::default() }
    }

    fn base(source: ClockState, here: ClockState) -> TimeBase {
        TimeBase { elapsed_ns: 1_000_000, source, here }
    }

    const STATE: TscState =
        TscState { khz: Some(2_000_000), value: 777, offset: Some(0_u64.wrapping_sub(900)) };

    #[test]
    fn the_offset_makes_the_counter_advance_by_the_elapsed_time() {
        let time = base(clock(Some(1_000), 2_000_000), clock(Some(50), 2_000_000));
        // Guest counter 100 at the source, one millisecond at 2 GHz later 2,000,100.
        let expected = TscTarget::Offset(2_000_100 - 50);
        assert_eq!(target(&STATE, &time, Some(2_000_000), 250), expected);
    }

    #[test]
    fn a_host_with_a_larger_counter_gives_a_negative_offset() {
        let time = base(clock(Some(1_000), 2_000_000), clock(Some(9_000_000), 2_000_000));
        let expected = TscTarget::Offset(2_000_100_u64.wrapping_sub(9_000_000));
        assert_eq!(target(&STATE, &time, Some(2_000_000), 250), expected);
    }

    #[test]
    fn hosts_that_differ_by_some_millionths_are_exact_as_well() {
        let (source, here) = (clock(Some(1_000), 2_000_003), clock(Some(50), 1_999_998));
        let time = base(source, here);
        let expected = TscTarget::Offset(2_000_100 - 50);
        assert_eq!(target(&STATE, &time, Some(2_000_000), 250), expected);
        // A host that was told to tolerate less scales the counter.
        let scaled = TscTarget::Value(2_000_100);
        assert_eq!(target(&STATE, &time, Some(2_000_000), 0), scaled);
        // And so did the source: the counter is nowhere near what the offset says.
        let state = TscState { value: 9_000_000_000, ..STATE };
        let expected = TscTarget::Value(9_002_000_000);
        assert_eq!(target(&state, &time, Some(2_000_000), 250), expected);
    }

    #[test]
    fn scaling_on_the_destination_sets_the_value() {
        let time = base(clock(Some(1_000), 2_000_000), clock(Some(50), 3_000_000));
        assert_eq!(target(&STATE, &time, Some(2_000_000), 250), TscTarget::Value(2_000_100));
    }

    #[test]
    fn without_an_exact_reading_the_saved_value_is_moved_on() {
        for source in [clock(None, 2_000_000), clock(Some(1_000), 3_000_000)] {
            let time = base(source, clock(Some(50), 2_000_000));
            let expected = TscTarget::Value(777 + 2_000_000);
            assert_eq!(target(&STATE, &time, Some(2_000_000), 250), expected);
        }
    }

    #[test]
    fn frequencies_within_the_tolerance_are_the_same() {
        assert!(same_frequency(2_000_000, 2_000_500));
        assert!(!same_frequency(2_000_000, 2_000_501));
        assert!(!same_frequency(2_000_000, 0));
    }

    #[test]
    fn hostile_numbers_do_not_overflow() {
        let state = TscState { khz: Some(u32::MAX), value: u64::MAX, offset: Some(u64::MAX) };
        let clock = ClockState {
            clock_ns: u64::MAX,
            realtime_ns: 0,
            host_tsc: Some(u64::MAX),
            host_tsc_khz: Some(u32::MAX),
        };
        let time = TimeBase { elapsed_ns: u64::MAX, source: clock, here: clock };
        let _ = target(&state, &time, Some(u32::MAX), u64::from(u32::MAX));
    }
}
