// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The time-stamp counter of a vCPU across a migration.
//!
//! May contain `unsafe`: reading the counter. Owns the arithmetic that makes a vCPU's TSC continue with the clock (see `clock`). Must never set a
//! frequency that the host can only emulate: KVM then catches the guest's TSC up in software or lets it run
//! at the wrong speed.

use kvm_bindings::{KVM_VCPU_TSC_CTRL, KVM_VCPU_TSC_OFFSET};
use serde::{Deserialize, Serialize};

use crate::clock::TimeBase;

/// Group and number of the TSC offset attribute of a vCPU.
pub const OFFSET_ATTRIBUTE: (u32, u32) = (KVM_VCPU_TSC_CTRL, KVM_VCPU_TSC_OFFSET);
/// Default tolerance between frequencies, in ppm, if the host does not report its own: KVM's default, half
/// of what NTP can correct. KVM neither scales such a TSC nor adjusts it by software.
const TOLERANCE_PPM: u64 = 250;

/// State of a vCPU's TSC; untrusted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TscState {
    /// Frequency in kHz, if known.
    pub khz: Option<u32>,
    /// Value at some moment of the save.
    pub value: u64,
    /// Offset to the host's TSC, if known and not scaled.
    pub offset: Option<u64>,
}

impl TscState {
    /// The state as it was `ns` earlier, if the frequency is known.
    #[must_use]
    pub fn earlier(&self, ns: u64) -> Self {
        let passed = self.khz.map_or(0, |khz| cycles(ns, khz));
        Self { value: self.value.wrapping_sub(passed), ..*self }
    }
}

/// What the TSCs of a VM's vCPUs have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SharedTsc {
    /// Frequency in kHz, if known.
    pub(crate) khz: Option<u32>,
    /// Offset to the host's TSC, which may be scaled first; `None` if the kernel does not tell.
    pub(crate) offset: Option<u64>,
}

/// How a vCPU's TSC is set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TscTarget {
    /// By its offset to the host's TSC, which is exact.
    Offset(u64),
    /// By its current value, approximately: KVM synchronises vCPUs that are set within a second.
    Value(u64),
}

/// What to do about the TSC frequency of a vCPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Frequency {
    /// It is the host's frequency.
    Keep,
    /// Set it. Also if nothing changes: KVM then reports the guest's frequency and not the host's, so that
    /// a guest does not drift by the tolerance of each host that it is migrated to.
    Set(u32),
    /// The TSC would run at the wrong speed.
    Refuse,
}

/// The decision on a host of `host_khz` for a guest of `wanted_khz`, as KVM makes it in `kvm_set_tsc_khz`:
/// within `tolerance_ppm` of the host's frequency nothing changes; beyond, KVM scales the TSC if the host
/// supports that, or else would adjust it by software.
pub fn frequency(wanted_khz: u32, host_khz: u32, scales: bool, tolerance_ppm: u64) -> Frequency {
    match wanted_khz {
        _ if wanted_khz == host_khz => Frequency::Keep,
        _ if scales || is_within(host_khz, wanted_khz, tolerance_ppm) => Frequency::Set(wanted_khz),
        _ => Frequency::Refuse,
    }
}

/// The tolerance is relative to the host's frequency, and KVM rounds the limits down.
fn is_within(host_khz: u32, khz: u32, tolerance_ppm: u64) -> bool {
    let limit = u64::from(host_khz).saturating_mul(tolerance_ppm) / 1_000_000;
    u64::from(host_khz.abs_diff(khz)) <= limit
}

/// Reads the host's TSC.
pub fn of_host() -> u64 {
    // SAFETY: every x86-64 processor has both instructions; neither touches memory.
    unsafe {
        // Keeps the processor from reading it early.
        std::arch::x86_64::_mm_lfence();
        std::arch::x86_64::_rdtsc()
    }
}

/// Whether a vCPU's TSC is unscaled: then its value minus `offset` is between two readings of the host's
/// TSC. A scaled one is not, unless it deviates by less than the interval.
pub fn is_unscaled(value: u64, offset: u64, host: (u64, u64)) -> bool {
    let (before, after) = host;
    value.wrapping_sub(offset).wrapping_sub(before) <= after.wrapping_sub(before)
}

/// Maximum deviation of a vCPU's frequency from the host's without scaling, in ppm.
pub fn tolerance_ppm() -> u64 {
    let set = std::fs::read_to_string("/sys/module/kvm/parameters/tsc_tolerance_ppm");
    set.ok().and_then(|text| text.trim().parse().ok()).unwrap_or(TOLERANCE_PPM)
}

/// Cycles at `khz` in `elapsed_ns`, modulo 2^64 like the TSC.
fn cycles(elapsed_ns: u64, khz: u32) -> u64 {
    let cycles = u128::from(elapsed_ns) * u128::from(khz) / 1_000_000;
    u64::try_from(cycles & u128::from(u64::MAX)).unwrap_or(0)
}

/// How to set the TSC of a vCPU whose frequency has been set to `khz`. This host does not scale within
/// `tolerance_ppm` of its own frequency: hosts of one model differ by a few ppm.
pub fn target(
    state: &TscState,
    time: &TimeBase,
    khz: Option<u32>,
    tolerance_ppm: u64,
) -> TscTarget {
    let unscaled = |host_khz: Option<u32>, vcpu_khz: Option<u32>, ppm| {
        host_khz.zip(vcpu_khz).is_some_and(|(host, vcpu)| is_within(host, vcpu, ppm))
    };
    // With an unscaled counter the guest's value at the moment of the clock reading is known. A source that
    // scales it gives no offset; an older one may have been told to tolerate less than others, and scale
    // by less than that: its counter is near what the offset says all the same while its host has not run for
    // long. The counter was read after the clock, within a second, so one that is behind is scaled.
    let exact = match (time.source.host_tsc, state.offset) {
        (Some(host), Some(offset)) => Some(host.wrapping_add(offset)),
        _ => None,
    };
    let second = state.khz.map_or(0, |khz| u64::from(khz) * 1000);
    let is_near = |exact: &u64| state.value.wrapping_sub(*exact) < second;
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
        // Or behind it: the counter was read after the clock.
        let state = TscState { value: 99, ..STATE };
        let expected = TscTarget::Value(2_000_099);
        assert_eq!(target(&state, &time, Some(2_000_000), 250), expected);
    }

    #[test]
    fn a_counter_that_the_host_scales_is_told_from_one_that_it_does_not() {
        let offset = 0_u64.wrapping_sub(900);
        assert!(is_unscaled(100, offset, (1_000, 1_000)));
        assert!(is_unscaled(100, offset, (990, 1_010)));
        // By three millionths, on a host that has run for half an hour.
        let (host, scaled) = (3_600_000_000_000, 3_600_010_800_000);
        assert!(is_unscaled(host, 0, (host, host + 1_000)));
        assert!(!is_unscaled(scaled, 0, (host, host + 1_000)));
        assert!(!is_unscaled(host, 0, (scaled, scaled + 1_000)));
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
    fn an_earlier_state_is_behind_by_the_cycles_in_between() {
        assert_eq!(STATE.earlier(0), STATE);
        let earlier = TscState { khz: Some(2_000_000), value: 10_000_777, offset: None };
        assert_eq!(earlier.earlier(5_000_000), TscState { value: 777, ..earlier });
        assert_eq!(TscState { khz: None, ..earlier }.earlier(5_000_000).value, 10_000_777);
    }

    #[test]
    fn a_frequency_within_the_tolerance_of_the_host_is_told_and_any_other_needs_scaling() {
        let on_host = |wanted, scales, ppm| frequency(wanted, 2_000_000, scales, ppm);
        for scales in [false, true] {
            assert_eq!(on_host(2_000_000, scales, 250), Frequency::Keep);
            for near in [2_000_500, 1_999_500] {
                assert_eq!(on_host(near, scales, 250), Frequency::Set(near));
            }
        }
        for far in [2_000_501, 1_999_499, 0] {
            assert_eq!(on_host(far, true, 250), Frequency::Set(far));
            assert_eq!(on_host(far, false, 250), Frequency::Refuse);
        }
        // The tolerance that is configured on this host.
        assert_eq!(on_host(2_000_002, false, 0), Frequency::Refuse);
        assert_eq!(on_host(2_000_600, false, 300), Frequency::Set(2_000_600));
        // Relative to the host's frequency, not the guest's.
        assert_eq!(frequency(4_000_000, 3_999_000, false, 250), Frequency::Refuse);
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
        // (2^64 - 1) * (2^32 - 1) / 10^6 cycles have passed since a counter of -1 with an offset of -1; this host's is at -1.
        let passed = 0xf7a0_a526_9595_ee13;
        assert_eq!(
            target(&state, &time, Some(u32::MAX), u64::from(u32::MAX)),
            TscTarget::Offset(passed - 1)
        );
    }
}
