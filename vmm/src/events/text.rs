// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! An event as text.
//!
//! Owns its form and its maximum length. It must never fail: an event that does not fit is truncated.

use std::time::{Duration, SystemTime};

use serde::ser::{Serialize, SerializeMap as _, SerializeStruct as _, Serializer};

use super::utc;
use crate::json_text;

/// Maximum length of an event in bytes: one less than a pipe takes atomically (`PIPE_BUF`). libvirt reads
/// events into a buffer of that size, and loses longer ones.
pub const EVENT_MAX_BYTES: usize = libc::PIPE_BUF - 1;

/// Marks where text was cut off.
const CUT: &str = "...";

/// An event for the event monitor.
#[derive(Debug)]
pub struct Event {
    /// Time since the process started.
    pub time: Duration,
    /// Time of the host's clock.
    pub wallclock: SystemTime,
    /// The component that it is about.
    pub source: &'static str,
    /// Name of the event.
    pub name: &'static str,
    /// Further properties.
    pub properties: Vec<(&'static str, String)>,
}

struct Time(Duration);

impl Serialize for Time {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut time = serializer.serialize_struct("timestamp", 2)?;
        time.serialize_field("secs", &self.0.as_secs())?;
        time.serialize_field("nanos", &self.0.subsec_nanos())?;
        time.end()
    }
}

struct Properties<'a>(&'a [(&'static str, String)]);

impl Serialize for Properties<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if self.0.is_empty() {
            return serializer.serialize_none();
        }
        let mut map = serializer.serialize_map(Some(self.0.len()))?;
        for (key, value) in self.0 {
            map.serialize_entry(key, value)?;
        }
        map.end()
    }
}

impl Serialize for Event {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut event = serializer.serialize_struct("event", 5)?;
        event.serialize_field("timestamp", &Time(self.time))?;
        event.serialize_field("wallclock", &utc(self.wallclock))?;
        event.serialize_field("source", self.source)?;
        event.serialize_field("event", self.name)?;
        event.serialize_field("properties", &Properties(&self.properties))?;
        event.end()
    }
}

impl Event {
    /// The event as JSON, followed by a blank line.
    pub fn into_text(mut self) -> Vec<u8> {
        loop {
            // Strings and numbers can always be written as JSON.
            let mut text = json_text::event(&self).unwrap_or_default();
            text.extend_from_slice(b"\n\n");
            if text.len() <= EVENT_MAX_BYTES || !self.cut() {
                return text;
            }
        }
    }

    /// Cuts the longest property in half; false if nothing is left to cut.
    fn cut(&mut self) -> bool {
        let longest = self.properties.iter_mut().max_by_key(|(_, value)| value.len());
        let Some((_, value)) = longest.filter(|(_, value)| value.len() > CUT.len()) else {
            return false;
        };
        let kept_bytes = (value.len() / 2).saturating_sub(CUT.len());
        value.truncate(value.floor_char_boundary(kept_bytes));
        value.push_str(CUT);
        true
    }
}
