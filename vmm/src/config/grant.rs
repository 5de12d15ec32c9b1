// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Access rules of `receive-migration`: which host resources an incoming configuration may name.
//!
//! Owns the form of a rule, `<root>:<kind>[+<kind>]`. What a root is depends on the kind: a file or
//! directory, the name of a tap, or the terminal. It must never look at the host.

use std::fmt;
use std::path::{Component, Path};
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use utoipa::openapi::RefOr;
use utoipa::openapi::schema::{ObjectBuilder, Schema, Type};

use super::codec::ValueCodec;
use super::option_string::{list_items, quote, unquote};
use super::value::FieldValue;

/// Kind of a host resource that a configuration names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GrantKind {
    /// Disk images.
    Disk,
    /// Files of memory zones.
    Memory,
    /// Sockets of memory pools.
    Pool,
    /// Files and sockets of consoles, the sockets of vsock, vhost-user and vfio-user devices and of the TPM, and the terminal of this process.
    Console,
    /// Kernel, initramfs and firmware, which are read again when the guest reboots.
    Payload,
    /// Entropy sources.
    Rng,
    /// Passed-through devices.
    Device,
    /// Tap interfaces.
    Tap,
}

/// All kinds with their names.
pub const GRANT_KINDS: [(GrantKind, &str); 8] = [
    (GrantKind::Disk, "disk"),
    (GrantKind::Memory, "memory"),
    (GrantKind::Pool, "pool"),
    (GrantKind::Console, "console"),
    (GrantKind::Payload, "payload"),
    (GrantKind::Rng, "rng"),
    (GrantKind::Device, "device"),
    (GrantKind::Tap, "tap"),
];

/// The root that stands for the terminal of this process.
pub const TERMINAL: &str = "tty";

/// Maximum length of the name of a network interface.
const INTERFACE_CHARS_MAX: usize = 15;

impl GrantKind {
    /// Name of the kind.
    pub fn name(self) -> &'static str {
        GRANT_KINDS.iter().find(|(kind, _)| *kind == self).map_or("", |(_, name)| name)
    }
}

/// A rule that allows a received configuration to name resources of this host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Grant {
    root: String,
    kinds: Vec<GrantKind>,
}

impl Grant {
    /// The allowed file or directory with everything below it, if the rule has one and is of this kind.
    pub fn path(&self, kind: GrantKind) -> Option<&Path> {
        (self.kinds.contains(&kind) && self.root.starts_with('/')).then(|| Path::new(&self.root))
    }

    /// Whether the rule allows this tap.
    pub fn is_of_tap(&self, name: &str) -> bool {
        self.kinds.contains(&GrantKind::Tap)
            && match self.root.strip_suffix('*') {
                Some(beginning) => name.starts_with(beginning),
                None => name == self.root,
            }
    }

    /// Whether the rule allows the terminal.
    pub fn is_of_terminal(&self) -> bool {
        self.root == TERMINAL && self.kinds.contains(&GrantKind::Console)
    }
}

impl FromStr for Grant {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (root, names) = text.rsplit_once(':').ok_or_else(|| {
            format!("expected a rule like /var/lib/vms:disk+console, not {text:?}")
        })?;
        let mut kinds = Vec::new();
        for name in names.split('+') {
            let kind = GRANT_KINDS.iter().find(|(_, known)| *known == name).ok_or_else(|| {
                let known: Vec<_> = GRANT_KINDS.iter().map(|(_, name)| *name).collect();
                format!("a rule is about {}, not about {name:?}", known.join(", "))
            })?;
            if kinds.contains(&kind.0) {
                return Err(format!("the rule {text:?} names {name} twice"));
            }
            kinds.push(kind.0);
        }
        if root.starts_with('/') {
            if Path::new(root).components().any(|part| part == Component::ParentDir) {
                return Err(format!("the path of the rule {text:?} contains '..'"));
            }
            if kinds.contains(&GrantKind::Tap) {
                return Err("a tap is given by name or prefix (vm*:tap), not by path".into());
            }
        } else if kinds == [GrantKind::Tap] {
            let name = root.strip_suffix('*').unwrap_or(root);
            let fits = root == "*" || !name.is_empty() && name.len() <= INTERFACE_CHARS_MAX;
            if !fits || name.contains(|c: char| c.is_whitespace() || matches!(c, '/' | '*')) {
                return Err(format!("{root:?} is neither the name of a tap nor a prefix (vm*)"));
            }
        } else if root != TERMINAL || kinds != [GrantKind::Console] {
            return Err(format!("the rule {text:?} needs a path that begins with '/'"));
        }
        Ok(Self { root: root.to_owned(), kinds })
    }
}

impl fmt::Display for Grant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kinds: Vec<_> = self.kinds.iter().map(|kind| kind.name()).collect();
        write!(f, "{}:{}", self.root, kinds.join("+"))
    }
}

impl Serialize for Grant {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Grant {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

impl FieldValue for Grant {
    fn schema() -> RefOr<Schema> {
        ObjectBuilder::new().schema_type(Type::String).into()
    }

    fn type_name() -> String {
        "string".to_owned()
    }
}

/// `<root>:<kind>+<kind>`, or a bracketed list of them.
#[derive(Debug)]
pub struct GrantList;

impl ValueCodec<Vec<Grant>> for GrantList {
    const SYNTAX: &'static str = "<list_of_rules>";

    fn parse(raw: &str) -> Result<Vec<Grant>, String> {
        let items = list_items(raw).ok_or("expected rules, like [/var/lib/vms:disk,vm*:tap]")?;
        items.into_iter().map(|item| unquote(item).parse()).collect()
    }

    fn print(value: &Vec<Grant>) -> String {
        let items: Vec<_> = value.iter().map(|grant| quote(&grant.to_string())).collect();
        format!("[{}]", items.join(","))
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test that cannot unwrap has failed")]

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn rules_are_read_and_written() {
        for text in [
            "/var/lib/vms:disk+console",
            "/:disk",
            "/sys/bus/pci/devices/0000:3b:00.0:device",
            "vm*:tap",
            "*:tap",
            "tap0:tap",
            "tty:console",
            "/with space, and comma:payload",
        ] {
            let grant: Grant = text.parse().unwrap();
            assert_eq!(grant.to_string(), text);
            let list = vec![grant.clone(), grant];
            assert_eq!(GrantList::parse(&GrantList::print(&list)).unwrap(), list);
        }
        assert_eq!(GrantList::parse("/a:disk").unwrap().len(), 1);
        assert!(GrantList::parse("[]").unwrap().is_empty());
    }

    #[test]
    fn what_is_no_rule_is_refused_with_the_reason() {
        for (text, why) in [
            ("/var/lib", "a rule like"),
            ("/var/lib:", "not about \"\""),
            ("/var/lib:disk+", "not about \"\""),
            ("/var/lib:disc", "not about \"disc\""),
            ("/var/lib:disk+disk", "twice"),
            ("/var/../etc:disk", "'..'"),
            ("var/lib:disk", "begins with '/'"),
            ("tty:disk", "begins with '/'"),
            ("/dev:tap", "not by path"),
            ("/dev:disk+tap", "not by path"),
            ("vm*:tap+disk", "begins with '/'"),
            ("v*m:tap", "neither"),
            (":tap", "neither"),
            ("a-name-of-17-chars:tap", "neither"),
        ] {
            let error = text.parse::<Grant>().unwrap_err();
            assert!(error.contains(why), "{text}: {error}");
        }
    }

    proptest! {
        #[test]
        fn any_text_is_a_rule_or_not(text in "[/a-z.*:+ \\[\\],\"]{0,40}") {
            if let Ok(grant) = text.parse::<Grant>() {
                prop_assert_eq!(grant.to_string().parse::<Grant>().unwrap(), grant);
            }
            if let Ok(list) = GrantList::parse(&text) {
                prop_assert_eq!(GrantList::parse(&GrantList::print(&list)).unwrap(), list);
            }
        }
    }
}
