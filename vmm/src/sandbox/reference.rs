// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The generated part of `docs/sandbox.md`: kinds of threads and groups of calls.
//!
//! Owns its words. Only a test writes the page; it must never say what the table does not.

use std::fmt::Write as _;

use super::calls::{Check, Group, RUNTIME};
use super::table::KINDS;

fn checked(check: Check) -> String {
    let list = |values: &[u32]| {
        values.iter().map(|value| format!("{value:#x}")).collect::<Vec<_>>().join(", ")
    };
    match check {
        Check::Any => String::new(),
        Check::NotExecutable => "without `PROT_EXEC`".to_owned(),
        Check::NoNamespace => "without `CLONE_NEW*`".to_owned(),
        Check::Library => "`PROT_READ` and `PROT_EXEC` of a file".to_owned(),
        Check::First(values) => format!("first argument {}", list(values)),
        Check::Second(values) => format!("request {}", list(values)),
        Check::Requests(requests) => {
            let names = requests.iter().flat_map(|request| request.name.split("_and_"));
            let names: Vec<_> = names.map(|name| format!("`{name}`")).collect();
            names.join(", ")
        }
    }
}

/// The text.
pub(super) fn reference() -> String {
    let mut text = String::from(
        "\n## Kinds of threads\n\nEach has the group *runtime* as well.\n\n\
         | kind | groups of its own | starts | what for |\n| --- | --- | --- | --- |\n",
    );
    let mut groups: Vec<&'static Group> = vec![&RUNTIME];
    for kind in KINDS {
        for group in kind.groups {
            if !groups.iter().any(|known| known.name == group.name) {
                groups.push(group);
            }
        }
        let own: Vec<_> = kind.groups.iter().map(|group| group.name).collect();
        let starts: Vec<_> =
            kind.starts.iter().copied().flatten().map(|name| format!("`{name}`")).collect();
        let (own, starts) = (own.join(", "), starts.join(", "));
        let _ = writeln!(text, "| `{}` | {own} | {starts} | {} |", kind.name, kind.why);
    }
    for group in groups {
        let _ = write!(
            text,
            "\n## Group *{}*\n\n| call | checked | why |\n| --- | --- | --- |\n",
            group.name
        );
        for call in group.calls {
            let _ =
                writeln!(text, "| `{}` | {} | {} |", call.name(), checked(call.check), call.why);
        }
    }
    text
}
