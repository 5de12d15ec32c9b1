// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A rate limit for log lines that a guest can cause.
//!
//! Owns the count of lines and of suppressed ones. Whatever a guest does, one device writes a
//! burst and then a line per minute, so that a hostile guest cannot fill the host's disk, and a fault
//! that begins after a week is still seen. Belongs to a device, not to a thread that its driver can
//! restart.

use std::fmt;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// Default burst in lines; enough to see a pattern.
const BURST_LINES: u32 = 32;
/// Time after which another line is allowed.
const LINE_EVERY: Duration = Duration::from_mins(1);

/// Rate limit of log lines; see the module. Used by [`crate::log_limited`].
#[derive(Debug)]
pub struct LogLimit {
    burst_lines: u32,
    /// Held only to count.
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    used: u32,
    /// When a line was last added to the allowance; set while the allowance is below its maximum.
    refilled: Option<Instant>,
    suppressed: u64,
}

impl State {
    fn refill(&mut self, now: Instant) {
        let since = *self.refilled.get_or_insert(now);
        let lines = now.saturating_duration_since(since).as_secs() / LINE_EVERY.as_secs();
        let lines = u32::try_from(lines).unwrap_or(u32::MAX).min(self.used);
        self.used -= lines;
        self.refilled = (self.used > 0).then(|| since + LINE_EVERY * lines);
    }
}

impl Default for LogLimit {
    fn default() -> Self {
        Self::with_burst(BURST_LINES)
    }
}

impl LogLimit {
    /// A limit with a burst of `lines`.
    pub fn with_burst(lines: u32) -> Self {
        Self { burst_lines: lines, state: Mutex::default() }
    }

    /// Takes a line from the allowance, with the suffix that it must end with; `None` if it is used up.
    pub fn take(&self) -> Option<SuppressedLines> {
        self.take_at(Instant::now())
    }

    fn take_at(&self, now: Instant) -> Option<SuppressedLines> {
        let mut state = self.state.lock();
        state.refill(now);
        if state.used >= self.burst_lines {
            state.suppressed = state.suppressed.saturating_add(1);
            return None;
        }
        state.used += 1;
        state.refilled.get_or_insert(now);
        Some(SuppressedLines(std::mem::take(&mut state.suppressed)))
    }
}

/// Number of lines suppressed before this one; formats as nothing if zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SuppressedLines(u64);

impl fmt::Display for SuppressedLines {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            0 => Ok(()),
            1 => write!(f, " (1 line about this device was left out before)"),
            count => write!(f, " ({count} lines about this device were left out before)"),
        }
    }
}

/// Logs a line that a guest can cause, within a [`LogLimit`]: limit, name of the level ([`log::Level`]),
/// then as for `format!`.
#[macro_export]
macro_rules! log_limited {
    ($limit:expr, $level:ident, $($text:tt)+) => {
        if ::log::log_enabled!(::log::Level::$level)
            && let Some(suppressed) = $limit.take()
        {
            ::log::log!(::log::Level::$level, "{}{suppressed}", format_args!($($text)+));
        }
    };
}

/// A logger that keeps the lines of this process's tests, for those that count their own.
#[cfg(test)]
pub(crate) mod kept {
    #![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

    use std::sync::Once;

    use parking_lot::Mutex;

    struct Kept;

    static LINES: Mutex<Vec<String>> = Mutex::new(Vec::new());
    static START: Once = Once::new();

    impl log::Log for Kept {
        fn enabled(&self, _metadata: &log::Metadata<'_>) -> bool {
            true
        }

        fn log(&self, record: &log::Record<'_>) {
            LINES.lock().push(record.args().to_string());
        }

        fn flush(&self) {}
    }

    /// Keeps lines from now on.
    pub(crate) fn start() {
        START.call_once(|| {
            log::set_logger(&Kept).unwrap();
            log::set_max_level(log::LevelFilter::Info);
        });
    }

    /// How many have this in them.
    pub(crate) fn count(part: &str) -> usize {
        LINES.lock().iter().filter(|line| line.contains(part)).count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_ends_and_what_comes_later_says_what_is_missing() {
        let limit = LogLimit::default();
        let start = Instant::now();
        let burst = u64::from(BURST_LINES);
        let granted = (0..1_000_000).filter(|_| limit.take_at(start).is_some()).count();
        assert_eq!(u64::try_from(granted), Ok(burst));
        assert_eq!(limit.take_at(start + LINE_EVERY / 2), None);
        let suppressed = 1_000_001 - burst;
        assert_eq!(limit.take_at(start + LINE_EVERY), Some(SuppressedLines(suppressed)));
        assert_eq!(limit.take_at(start + LINE_EVERY), None);
        assert_eq!(limit.take_at(start + LINE_EVERY * 2), Some(SuppressedLines(1)));
        assert_eq!(
            SuppressedLines(1).to_string(),
            " (1 line about this device was left out before)"
        );
        assert!(SuppressedLines(suppressed).to_string().contains("999969 lines"));
    }

    #[test]
    fn quiet_hours_give_no_more_than_a_burst() {
        let limit = LogLimit::default();
        let start = Instant::now();
        for hours in 0..3 {
            let now = start + LINE_EVERY * 60 * hours;
            let granted = (0..200).filter(|_| limit.take_at(now).is_some()).count();
            assert_eq!(u32::try_from(granted), Ok(BURST_LINES), "hour {hours}");
        }
    }

    #[test]
    fn a_line_at_times_is_never_left_out() {
        let limit = LogLimit::default();
        let start = Instant::now();
        assert!(
            (0..1000)
                .all(|line| limit.take_at(start + LINE_EVERY * line) == Some(SuppressedLines(0)))
        );
        assert_eq!(SuppressedLines(0).to_string(), "");
    }
}
