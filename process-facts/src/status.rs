// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The status of a process: its user, groups, capabilities, and counters.
//!
//! Owns the form of `/proc/PID/status`. A field that is missing, or of another form, is none. Must never take one for
//! another whose name begins with its own.

/// The status of a process, by the text of that file.
#[derive(Clone, Copy, Debug)]
pub struct Status<'a>(&'a str);

impl<'a> Status<'a> {
    /// That in such a text.
    pub fn of(text: &'a str) -> Self {
        Self(text)
    }

    /// The value of a field, without space around it.
    pub fn field(self, name: &str) -> Option<&'a str> {
        let value = |line: &'a str| line.strip_prefix(name)?.strip_prefix(':');
        self.0.lines().find_map(value).map(str::trim)
    }

    /// All numbers of a field, of which there may be none; `None` if one is not a number.
    pub fn numbers(self, name: &str) -> Option<Vec<u32>> {
        self.field(name)?.split_ascii_whitespace().map(|word| word.parse().ok()).collect()
    }

    /// The effective one of a process's users (`Uid`) or groups (`Gid`): the second after the real one, before the saved one
    /// and that of files.
    pub fn effective(self, name: &str) -> Option<u32> {
        self.field(name)?.split_ascii_whitespace().nth(1)?.parse().ok()
    }

    /// The effective capabilities, a bit for each.
    pub fn effective_capabilities(self) -> Option<u64> {
        u64::from_str_radix(self.field("CapEff")?, 16).ok()
    }

    /// Whether a capability is among the effective ones.
    pub fn has_capability(self, capability: u32) -> bool {
        let bits = self.effective_capabilities().and_then(|bits| bits.checked_shr(capability));
        bits.is_some_and(|bits| bits & 1 != 0)
    }

    /// A counter of memory, in bytes.
    pub fn bytes(self, name: &str) -> Option<u64> {
        let kib: u64 = self.field(name)?.strip_suffix("kB")?.trim().parse().ok()?;
        kib.checked_mul(1024)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const STATUS: &str = "Name:\tx\nUid:\t1000\t1001\t1002\t1003\nGid:\t5\t6\t7\t8\nGroups:\t7 8 \n\
                          VmLck:\t    12 kB\nCapInh:\tffff\nCapEff:\t0000000000005000\n";

    #[test]
    fn fields_have_a_name_and_a_value() {
        let status = Status::of(STATUS);
        assert_eq!(status.field("Name"), Some("x"));
        assert_eq!(status.field("Nam"), None, "another one's name begins so");
        assert_eq!([status.effective("Uid"), status.effective("Gid")], [Some(1001), Some(6)]);
        assert_eq!(status.numbers("Groups"), Some(vec![7, 8]));
        assert_eq!(status.bytes("VmLck"), Some(12 << 10));
        assert_eq!(status.effective_capabilities(), Some(0x5000));
        let has = [12, 13, 14, 64, u32::MAX].map(|capability| status.has_capability(capability));
        assert_eq!(has, [true, false, true, false, false]);
    }

    #[test]
    fn what_is_missing_or_of_another_form_is_none() {
        for text in ["", "Uid:\nGroups:\nCapEff:\nVmLck:\n", "Uid 1 2\nCapEff:\tx\nVmLck:\t1\n"] {
            let status = Status::of(text);
            assert_eq!(status.effective("Uid"), None, "{text}");
            assert_eq!(status.effective_capabilities(), None, "{text}");
            assert_eq!(status.bytes("VmLck"), None, "{text}");
            assert!(!status.has_capability(0), "{text}");
        }
        assert_eq!(Status::of("Groups:\t\n").numbers("Groups"), Some(vec![]), "none");
        assert_eq!(Status::of("Groups:\t1 x\n").numbers("Groups"), None);
        assert_eq!(Status::of("VmPin:\t18446744073709551615 kB\n").bytes("VmPin"), None);
    }

    proptest! {
        #[test]
        fn a_value_is_what_follows_its_name(text in "[A-Ca-c0-9: \t\n]{0,80}", name in "[A-C][a-c]{0,2}") {
            let begins = format!("{name}:");
            let first = text.lines().find(|line| line.starts_with(&begins));
            let expected = first.map(|line| line[begins.len()..].trim());
            prop_assert_eq!(Status::of(&text).field(&name), expected);
        }
    }
}
