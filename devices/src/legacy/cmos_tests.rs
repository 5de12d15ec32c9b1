// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The CMOS memory and its clock, seen from the guest.

#![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use proptest::prelude::*;

use super::calendar::Calendar;
use super::*;
use crate::Snapshot;
use crate::bus::BusDevice;
use crate::virtio::StateError;

/// A clock that stands where it is put.
#[derive(Clone)]
struct FixedClock(Arc<Mutex<Duration>>);

impl FixedClock {
    fn at(seconds: u64, nanos: u32) -> Self {
        Self(Arc::new(Mutex::new(Duration::new(seconds, nanos))))
    }

    fn go_on(&self, seconds: u64) {
        *self.0.lock() += Duration::from_secs(seconds);
    }
}

impl Clock for FixedClock {
    fn since_epoch(&self) -> Duration {
        *self.0.lock()
    }
}

fn cmos_with(clock: &FixedClock) -> Cmos {
    Cmos::new(0, 0, Box::new(clock.clone()))
}

fn cmos_at(seconds: u64, nanos: u32) -> Cmos {
    cmos_with(&FixedClock::at(seconds, nanos))
}

fn register(cmos: &Cmos, index: u8) -> u8 {
    cmos.write(0, &[index]);
    let mut data = [0];
    cmos.read(1, &mut data);
    data[0]
}

fn set_register(cmos: &Cmos, index: u8, value: u8) {
    cmos.write(0, &[index]);
    cmos.write(1, &[value]);
}

/// Century to second.
const TIME: [u8; 7] = [0x32, 0x09, 0x08, 0x07, 0x04, 0x02, 0x00];

fn shown(cmos: &Cmos) -> [u8; 7] {
    TIME.map(|index| register(cmos, index))
}

fn set_time(cmos: &Cmos, values: [u8; 7]) {
    for (index, value) in TIME.into_iter().zip(values) {
        set_register(cmos, index, value);
    }
}

#[test]
fn clock_registers_show_the_time_in_bcd() {
    // 2026-11-21 04:23:11 UTC, a Saturday.
    let cmos = cmos_at(1_795_234_991, 0);
    let expected = [
        (0x00, 0x11),
        (0x02, 0x23),
        (0x04, 0x04),
        (0x06, 0x07),
        (0x07, 0x21),
        (0x08, 0x11),
        (0x09, 0x26),
        (0x32, 0x20),
        (0x0a, 0x26),
        (0x0b, 0x02),
        (0x0d, 0x80),
    ];
    for (index, value) in expected {
        assert_eq!(register(&cmos, index), value, "register {index:#x}");
    }
    // Bit 7 of the index masks NMIs.
    assert_eq!(register(&cmos, 0x80), 0x11);
}

#[test]
fn clock_registers_follow_the_format_that_the_guest_chose() {
    let cmos = cmos_at(1_795_234_991 + 13 * 3600, 0);
    cmos.write(0, &[0x0b]);
    cmos.write(1, &[0x06]);
    assert_eq!(register(&cmos, 0x04), 17);
    cmos.write(0, &[0x0b]);
    cmos.write(1, &[0x00]);
    assert_eq!(register(&cmos, 0x04), 0x85, "five in the afternoon");
}

#[test]
fn an_update_is_shown_before_it_comes() {
    assert_eq!(register(&cmos_at(0, 999_755_999), 0x0a) & 0x80, 0);
    assert_eq!(register(&cmos_at(0, 999_756_000), 0x0a) & 0x80, 0x80);
}

#[test]
fn memory_registers_describe_both_sides_of_the_hole() {
    let cmos = Cmos::new(3 << 30, 5 << 30, Box::new(HostClock));
    let number = |indexes: &[u8]| {
        indexes.iter().rev().fold(0_u64, |sum, index| sum << 8 | u64::from(register(&cmos, *index)))
    };
    assert_eq!((number(&[0x34, 0x35]) << 16) + (16 << 20), 3 << 30);
    assert_eq!(number(&[0x5b, 0x5c, 0x5d]) << 16, 5 << 30);
    let tiny = Cmos::new(1 << 20, 0, Box::new(HostClock));
    assert_eq!(register(&tiny, 0x34), 0);
}

#[test]
fn cmos_memory_is_kept_and_restored() {
    let cmos = cmos_at(0, 0);
    cmos.write(0, &[0x0f]);
    cmos.write(1, &[0x0a]);
    let saved = cmos.save();
    let other = cmos_at(0, 0);
    other.restore(&saved).unwrap();
    assert_eq!(other.save(), saved);
    let mut data = [0];
    other.read(1, &mut data);
    assert_eq!(data, [0x0a], "the index is restored as well");

    let mut short = saved.clone();
    short.data["bytes"] = serde_json::json!([1, 2]);
    assert!(matches!(other.restore(&short), Err(StateError::Invalid { .. })));
    let mut outside = saved.clone();
    outside.data["index"] = serde_json::json!(200);
    assert!(matches!(other.restore(&outside), Err(StateError::Invalid { .. })));
    assert_eq!(other.save(), saved, "a refused state changes nothing");
}

#[test]
fn calendar_knows_leap_years() {
    let date = |seconds| {
        let time = Calendar::from_epoch_seconds(seconds);
        (time.century, time.year_of_century, time.month, time.day, time.weekday)
    };
    assert_eq!(date(0), (19, 70, 1, 1, 5));
    assert_eq!(date(951_782_400), (20, 0, 2, 29, 3));
    assert_eq!(date(951_868_800), (20, 0, 3, 1, 4));
    assert_eq!(date(1_709_164_800), (20, 24, 2, 29, 5));
    assert_eq!(date(4_107_542_400), (21, 0, 3, 1, 2));
}

#[test]
fn a_clock_that_the_guest_sets_continues_from_there() {
    let clock = FixedClock::at(1_795_234_991, 0);
    let cmos = cmos_with(&clock);
    // As Linux does: time is held meanwhile.
    set_register(&cmos, 0x0b, 0x82);
    clock.go_on(5);
    assert_eq!(shown(&cmos), [0x20, 0x26, 0x11, 0x21, 0x04, 0x23, 0x11], "it stands still");
    let leap_day = [0x20, 0x24, 0x02, 0x29, 0x23, 0x59, 0x58];
    set_time(&cmos, leap_day);
    assert_eq!((shown(&cmos), register(&cmos, 0x0b)), (leap_day, 0x82));
    set_register(&cmos, 0x0b, 0x02);
    assert_eq!((shown(&cmos), register(&cmos, 0x06)), (leap_day, 0x05));
    clock.go_on(3);
    assert_eq!(shown(&cmos), [0x20, 0x24, 0x03, 0x01, 0x00, 0x00, 0x01]);
    assert_eq!(register(&cmos, 0x06), 0x06, "the day of the week follows");
}

#[test]
fn a_clock_can_be_set_without_holding_it() {
    let clock = FixedClock::at(1_795_234_991, 0);
    let cmos = cmos_with(&clock);
    set_register(&cmos, 0x0b, 0x00);
    set_register(&cmos, 0x04, 0x85);
    assert_eq!(register(&cmos, 0x04), 0x85, "five in the afternoon");
    set_register(&cmos, 0x04, 0x12);
    assert_eq!(register(&cmos, 0x04), 0x12, "midnight");
    set_register(&cmos, 0x0b, 0x06);
    set_register(&cmos, 0x04, 17);
    clock.go_on(3_600);
    assert_eq!(register(&cmos, 0x04), 18);
}

#[test]
fn numbers_that_are_none_are_left_out() {
    let cmos = cmos_at(1_795_234_991, 0);
    let before = shown(&cmos);
    for (index, value) in [
        (0x00, 0x60),
        (0x02, 0x6a),
        (0x04, 0x24),
        (0x07, 0x32),
        (0x07, 0),
        (0x08, 0x13),
        (0x09, 0xa0),
    ] {
        set_register(&cmos, index, value);
        assert_eq!(shown(&cmos), before, "{value:#x} in {index:#x}");
    }
}

#[test]
fn a_set_clock_is_saved_and_one_that_is_not_leaves_the_state_as_it_was() {
    let clock = FixedClock::at(1_795_234_991, 0);
    let cmos = cmos_with(&clock);
    let untouched = cmos.save();
    assert_eq!((untouched.version, untouched.data.get("clock")), (1, None));
    let yesterday = [0x20, 0x26, 0x11, 0x20, 0x04, 0x23, 0x11];
    set_time(&cmos, yesterday);
    let saved = cmos.save();
    assert_eq!(saved.version, CMOS_CLOCK_VERSION);
    let there = FixedClock::at(1_795_234_991 + 60, 0);
    let other = cmos_with(&there);
    other.restore(&saved).unwrap();
    assert_eq!(shown(&other), [0x20, 0x26, 0x11, 0x20, 0x04, 0x24, 0x11]);
    // Held over the move.
    set_register(&cmos, 0x0b, 0x82);
    other.restore(&cmos.save()).unwrap();
    there.go_on(9);
    assert_eq!(shown(&other), yesterday);
    set_register(&other, 0x0b, 0x02);
    there.go_on(1);
    assert_eq!(register(&other, 0x00), 0x12);
    // 31 February, on the way from 31 January to 15 February.
    set_time(&cmos, [0x20, 0x26, 0x01, 0x31, 0x04, 0x23, 0x11]);
    set_register(&cmos, 0x0b, 0x82);
    set_register(&cmos, 0x08, 0x02);
    other.restore(&cmos.save()).unwrap();
    set_register(&other, 0x07, 0x15);
    set_register(&other, 0x0b, 0x02);
    assert_eq!(shown(&other), [0x20, 0x26, 0x02, 0x15, 0x04, 0x23, 0x11]);
    // For a program that knows no such thing.
    let mut older = saved.clone();
    assert!(Cmos::forget_clock(&mut older) && !Cmos::forget_clock(&mut older));
    assert_eq!(older, untouched);
    let mut wrong = saved.clone();
    wrong.version = 1;
    assert!(matches!(other.restore(&wrong), Err(StateError::Invalid { .. })));
}

proptest! {
    #[test]
    fn calendar_days_follow_each_other(day in -700_000_i64..2_900_000) {
        let today = Calendar::from_epoch_seconds(day * 86_400);
        let tomorrow = Calendar::from_epoch_seconds((day + 1) * 86_400);
        prop_assert_eq!(tomorrow.weekday, today.weekday % 7 + 1);
        let same_month = tomorrow.month == today.month;
        prop_assert_eq!(tomorrow.day, if same_month { today.day + 1 } else { 1 });
        prop_assert!((1..=31).contains(&today.day) && (1..=12).contains(&today.month));
    }

    #[test]
    fn a_calendar_is_of_its_second(seconds in -62_135_596_800_i64..=253_402_300_799) {
        prop_assert_eq!(Calendar::from_epoch_seconds(seconds).epoch_seconds(), seconds);
    }

    #[test]
    fn any_clock_that_is_restored_or_set_can_be_read(
        ahead: i64, held: Option<[u8; 8]>, writes in proptest::collection::vec(any::<(u8, u8)>(), 0..20),
    ) {
        let cmos = cmos_at(1_795_234_991, 0);
        let mut state = cmos.save();
        state.version = CMOS_CLOCK_VERSION;
        let held = held.map(|[second, minute, hour, weekday, day, month, year_of_century, century]| {
            Calendar { second, minute, hour, weekday, day, month, year_of_century, century }
        });
        state.data["clock"] = serde_json::json!({"ahead_s": ahead, "held": held});
        let is_refused = cmos.restore(&state).is_err();
        prop_assert_eq!(is_refused, held.is_some_and(|held| !held.can_be_shown()));
        for (index, value) in writes {
            set_register(&cmos, index, value);
            shown(&cmos);
        }
        cmos.restore(&cmos.save()).unwrap();
    }
}
