// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Dates and times of day as the real-time clock has them.
//!
//! Owns the arithmetic between them and seconds. Knows no register and no clock.

use serde::{Deserialize, Serialize};

/// Days from 1 March of the year 0.
const DAYS_BEFORE_1970: i64 = 719_468;
const DAYS_OF_400_YEARS: i64 = 146_097;
const SECONDS_PER_DAY: i64 = 86_400;
/// 1 January of the year 1; and the last second of the year 9999: the range of two two-digit registers.
const FIRST_SECOND: i64 = -62_135_596_800;
const LAST_SECOND: i64 = 253_402_300_799;

/// Date and time of day as in the registers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Calendar {
    pub(super) second: u8,
    pub(super) minute: u8,
    pub(super) hour: u8,
    /// Sunday is 1.
    pub(super) weekday: u8,
    pub(super) day: u8,
    pub(super) month: u8,
    pub(super) year_of_century: u8,
    pub(super) century: u8,
}

impl Calendar {
    /// The proleptic Gregorian date of a number of seconds since 1970, clamped to the years 1 to 9999.
    ///
    /// Days are counted from 1 March of the year 0, so that a leap day is the last of its year.
    pub(super) fn from_epoch_seconds(seconds: i64) -> Self {
        let seconds = seconds.clamp(FIRST_SECOND, LAST_SECOND);
        let days = seconds.div_euclid(SECONDS_PER_DAY);
        let second_of_day = seconds.rem_euclid(SECONDS_PER_DAY);
        let shifted = days + DAYS_BEFORE_1970;
        let era = shifted / DAYS_OF_400_YEARS;
        let day_of_era = shifted % DAYS_OF_400_YEARS;
        let year_of_era =
            (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
        let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        // March is 0. A month takes 30.6 days on the average of five.
        let month_index = (5 * day_of_year + 2) / 153;
        let day = day_of_year - (153 * month_index + 2) / 5 + 1;
        let month = if month_index < 10 { month_index + 3 } else { month_index - 9 };
        let year = era * 400 + year_of_era + i64::from(month <= 2);
        Self {
            second: small(second_of_day % 60),
            minute: small(second_of_day / 60 % 60),
            hour: small(second_of_day / 3_600),
            // 1 January 1970 was a Thursday.
            weekday: small((days + 4).rem_euclid(7) + 1),
            day: small(day),
            month: small(month),
            year_of_century: small(year % 100),
            century: small(year / 100 % 100),
        }
    }

    /// Whether each number is valid for its register. Any month may have a 31st.
    pub(super) fn can_be_shown(self) -> bool {
        self.second < 60
            && self.minute < 60
            && self.hour < 24
            && (1..=7).contains(&self.weekday)
            && (1..=31).contains(&self.day)
            && (1..=12).contains(&self.month)
            && self.year_of_century < 100
            && self.century < 100
    }

    /// Seconds since 1970, ignoring the day of the week. A day beyond the end of its month belongs to the
    /// next one.
    pub(super) fn epoch_seconds(self) -> i64 {
        let month = i64::from(self.month.clamp(1, 12));
        let year = i64::from(self.century) * 100 + i64::from(self.year_of_century);
        // Years start in March here.
        let year = year.max(1) - i64::from(month <= 2);
        let month_index = (month + 9) % 12;
        let day_of_year = (153 * month_index + 2) / 5 + i64::from(self.day) - 1;
        let (era, year_of_era) = (year / 400, year % 400);
        let day_of_era = year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + day_of_year;
        let days = era * DAYS_OF_400_YEARS + day_of_era - DAYS_BEFORE_1970;
        let second_of_day =
            i64::from(self.hour) * 3_600 + i64::from(self.minute) * 60 + i64::from(self.second);
        days * SECONDS_PER_DAY + second_of_day
    }
}

fn small(value: i64) -> u8 {
    u8::try_from(value).unwrap_or(u8::MAX)
}
