// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! `--log-format`: parsing and formatting of log lines.
//!
//! Owns the tokens in braces, with the names that cloud-hypervisor gives them, and the clocks behind
//! them. It must never write anything.

use std::fmt::Write as _;

use log::{Level, Record};
use thiserror::Error;
use vmm::events;

/// Why a log format is invalid.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum FormatError {
    /// An opening brace is not closed.
    #[error("the log format has a '{{' without a '}}'; '{{{{' stands for the character")]
    Unclosed,
    /// A closing brace has no opening one.
    #[error("the log format has a '}}' without a '{{'; '}}}}' stands for the character")]
    Unopened,
    /// No token has this name.
    #[error("the log format has an unknown token '{{{0}}}'; docs/usage.md lists them")]
    Unknown(String),
}

/// A component of date or time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Field {
    Year,
    Month,
    Day,
    Hour,
    Minute,
    Second,
    Micros,
    Offset,
}

/// Time zone of a component.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Zone {
    Utc,
    Local,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Token {
    Text(String),
    BootTime,
    WallClock,
    Glog(Zone),
    Time(Field, Zone),
    Pid,
    Tid,
    Thread,
    Level,
    LevelChar,
    Location,
    Message,
}

impl Token {
    fn by_name(name: &str) -> Option<Self> {
        Some(match name {
            "boottime" => Self::BootTime,
            "wallclock" => Self::WallClock,
            "pid" => Self::Pid,
            "tid" => Self::Tid,
            "thread" => Self::Thread,
            "level" => Self::Level,
            "levelchar" => Self::LevelChar,
            "location" => Self::Location,
            "msg" => Self::Message,
            _ => {
                let (zone, name) = match name.strip_prefix("local") {
                    Some(name) => (Zone::Local, name),
                    None => (Zone::Utc, name),
                };
                match name {
                    "glog" => Self::Glog(zone),
                    "year" => Self::Time(Field::Year, zone),
                    "month" => Self::Time(Field::Month, zone),
                    "day" => Self::Time(Field::Day, zone),
                    "hour" => Self::Time(Field::Hour, zone),
                    "minute" => Self::Time(Field::Minute, zone),
                    "second" => Self::Time(Field::Second, zone),
                    "micros" => Self::Time(Field::Micros, zone),
                    "offset" => Self::Time(Field::Offset, zone),
                    _ => return None,
                }
            }
        })
    }
}

/// A parsed log format.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogFormat(Vec<Token>);

impl LogFormat {
    /// The default format of a program.
    pub fn default_of(program: &str) -> Self {
        let text = |text: &str| Token::Text(text.to_owned());
        Self(vec![
            text(&format!("{program}: ")),
            Token::BootTime,
            text("s: <"),
            Token::Thread,
            text("> "),
            Token::Level,
            text(":"),
            Token::Location,
            text(" -- "),
            Token::Message,
        ])
    }

    /// Parses a format: tokens in braces, other text literally, `{{` and `}}` for braces.
    ///
    /// # Errors
    /// The unmatched brace or unknown token.
    pub fn parse(format: &str) -> Result<Self, FormatError> {
        let mut tokens = Vec::new();
        let mut text = String::new();
        let mut rest = format.chars().peekable();
        while let Some(next) = rest.next() {
            match next {
                '{' | '}' if rest.peek() == Some(&next) => {
                    rest.next();
                    text.push(next);
                }
                '}' => return Err(FormatError::Unopened),
                '{' => {
                    let mut name = String::new();
                    loop {
                        match rest.next() {
                            Some('}') => break,
                            Some(letter) if letter != '{' => name.push(letter),
                            _ => return Err(FormatError::Unclosed),
                        }
                    }
                    let token = Token::by_name(&name).ok_or(FormatError::Unknown(name))?;
                    if !text.is_empty() {
                        tokens.push(Token::Text(std::mem::take(&mut text)));
                    }
                    tokens.push(token);
                }
                other => text.push(other),
            }
        }
        if !text.is_empty() {
            tokens.push(Token::Text(text));
        }
        Ok(Self(tokens))
    }

    /// Formats a record as a line, without a newline. All tokens of a line use the same time.
    pub fn line(&self, record: &Record<'_>) -> String {
        self.line_at(record, Timestamp::now())
    }

    fn line_at(&self, record: &Record<'_>, moment: Timestamp) -> String {
        let mut out = String::with_capacity(128);
        for token in &self.0 {
            // Writing to a string cannot fail.
            let _ = write_token(&mut out, token, record, moment);
        }
        out
    }
}

fn write_token(
    out: &mut String,
    token: &Token,
    record: &Record<'_>,
    moment: Timestamp,
) -> std::fmt::Result {
    match token {
        Token::Text(text) => out.write_str(text),
        Token::BootTime => write!(out, "{:>10.6}", events::uptime().as_secs_f64()),
        Token::WallClock => {
            let Calendar { year, month, day, hour, minute, second, .. } = moment.utc();
            let micros = moment.micros;
            write!(
                out,
                "{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{micros:06}Z"
            )
        }
        Token::Glog(zone) => {
            let Calendar { month, day, hour, minute, second, .. } = moment.calendar(*zone);
            let micros = moment.micros;
            write!(out, "{month:02}{day:02} {hour:02}:{minute:02}:{second:02}.{micros:06}")
        }
        Token::Time(field, zone) => {
            let calendar = moment.calendar(*zone);
            match field {
                Field::Year => write!(out, "{:04}", calendar.year),
                Field::Month => write!(out, "{:02}", calendar.month),
                Field::Day => write!(out, "{:02}", calendar.day),
                Field::Hour => write!(out, "{:02}", calendar.hour),
                Field::Minute => write!(out, "{:02}", calendar.minute),
                Field::Second => write!(out, "{:02}", calendar.second),
                Field::Micros => write!(out, "{:06}", moment.micros),
                Field::Offset => {
                    let sign = if calendar.offset_s < 0 { '-' } else { '+' };
                    let minutes = calendar.offset_s.unsigned_abs() / 60;
                    write!(out, "{sign}{:02}:{:02}", minutes / 60, minutes % 60)
                }
            }
        }
        Token::Pid => write!(out, "{}", std::process::id()),
        // SAFETY: the call takes nothing and cannot fail.
        Token::Tid => write!(out, "{}", unsafe { libc::gettid() }),
        Token::Thread => out.write_str(std::thread::current().name().unwrap_or("anonymous")),
        Token::Level => write!(out, "{}", record.level()),
        Token::LevelChar => out.write_char(match record.level() {
            Level::Error => 'E',
            Level::Warn => 'W',
            Level::Info => 'I',
            Level::Debug => 'D',
            Level::Trace => 'T',
        }),
        Token::Location => match (record.file(), record.line()) {
            (Some(file), Some(line)) => write!(out, "{file}:{line}"),
            _ => out.write_str(record.target()),
        },
        Token::Message => write!(out, "{}", record.args()),
    }
}

/// A time of the real-time clock.
#[derive(Clone, Copy, Debug)]
struct Timestamp {
    seconds: libc::time_t,
    micros: i64,
}

/// A calendar date and time of day.
#[derive(Clone, Copy, Debug)]
struct Calendar {
    year: i64,
    month: libc::c_int,
    day: libc::c_int,
    hour: libc::c_int,
    minute: libc::c_int,
    second: libc::c_int,
    /// Offset from UTC in seconds, positive to the east.
    offset_s: i64,
}

/// Has the C library read the time zone of the host, which it does once.
pub fn read_time_zone() {
    let _ = Timestamp::now().calendar(Zone::Local);
}

impl Timestamp {
    fn now() -> Self {
        let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: the call writes one timespec, which it gets; this clock always exists.
        unsafe { libc::clock_gettime(libc::CLOCK_REALTIME, &raw mut time) };
        Self { seconds: time.tv_sec, micros: time.tv_nsec / 1000 }
    }

    fn utc(self) -> Calendar {
        self.calendar(Zone::Utc)
    }

    fn calendar(self, zone: Zone) -> Calendar {
        // SAFETY: all zeros are a valid tm: numbers, and a null pointer to the zone's name.
        let mut parts: libc::tm = unsafe { std::mem::zeroed() };
        // SAFETY: both calls read one time_t and write one tm, which live across them. A year that
        // no tm can have leaves the zeros.
        unsafe {
            match zone {
                Zone::Utc => libc::gmtime_r(&raw const self.seconds, &raw mut parts),
                Zone::Local => libc::localtime_r(&raw const self.seconds, &raw mut parts),
            }
        };
        Calendar {
            year: i64::from(parts.tm_year) + 1900,
            month: parts.tm_mon + 1,
            day: parts.tm_mday,
            hour: parts.tm_hour,
            minute: parts.tm_min,
            second: parts.tm_sec,
            offset_s: parts.tm_gmtoff,
        }
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test that cannot unwrap has failed")]

    use proptest::prelude::*;

    use super::*;

    /// 2024-05-21 08:02:15.542701 UTC.
    const MOMENT: Timestamp = Timestamp { seconds: 1_716_278_535, micros: 542_701 };

    fn line(format: &str) -> String {
        let record = Record::builder()
            .args(format_args!("hello"))
            .level(Level::Warn)
            .target("t")
            .file(Some("a.rs"))
            .line(Some(7))
            .build();
        LogFormat::parse(format).unwrap().line_at(&record, MOMENT)
    }

    #[test]
    fn every_token_has_its_value() {
        assert_eq!(line("{wallclock} {level} {msg}"), "2024-05-21T08:02:15.542701Z WARN hello");
        assert_eq!(line("{levelchar}{glog} {location}]"), "W0521 08:02:15.542701 a.rs:7]");
        assert_eq!(
            line("{year}/{month}/{day} {hour}-{minute}-{second}.{micros}{offset}"),
            "2024/05/21 08-02-15.542701+00:00"
        );
        assert_eq!(line("{pid}"), std::process::id().to_string());
        assert!(line("{tid}").parse::<u32>().unwrap() > 0);
        assert!(line("{boottime}").trim().parse::<f64>().unwrap() >= 0.0);
        assert_eq!(line("{{{thread}}}").chars().next(), Some('{'));
        assert_eq!(line("{localoffset}").len(), "+00:00".len());
        assert_eq!(line("{localyear}{localmonth}{localday}{localhour}").len(), 10);
        assert_eq!(line("{localglog}").len(), line("{glog}").len());
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        assert_eq!(LogFormat::parse("{level"), Err(FormatError::Unclosed));
        assert_eq!(LogFormat::parse("{le{vel}"), Err(FormatError::Unclosed));
        assert_eq!(LogFormat::parse("level}"), Err(FormatError::Unopened));
        assert_eq!(LogFormat::parse("{}"), Err(FormatError::Unknown(String::new())));
        let error = LogFormat::parse("{levl}").unwrap_err();
        assert!(error.to_string().contains("'{levl}'"), "{error}");
    }

    proptest! {
        #[test]
        fn any_text_is_read_or_refused(text in ".{0,40}") {
            if let Ok(format) = LogFormat::parse(&text) {
                let record = Record::builder().args(format_args!("")).build();
                let line = format.line_at(&record, MOMENT);
                let has_braces = text.contains(['{', '}']);
                prop_assert!(has_braces || line == text);
            }
        }
    }
}
