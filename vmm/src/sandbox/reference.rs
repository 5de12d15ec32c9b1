// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The generated part of `docs/sandbox.md`: capabilities, kinds of threads and groups of calls.
//!
//! Owns its words. Only a test writes the page; it must never say what the table does not.

use std::fmt::Write as _;

use rustix::thread::CapabilitySet;

use super::calls::{CAPABILITIES, Check, Group, RUNTIME};
use super::capabilities::{NEEDS, Need, Span, kept};
use super::table::{BUILDERS, KINDS};

fn checked(check: Check) -> String {
    let list = |values: &[u32]| {
        values.iter().map(|value| format!("{value:#x}")).collect::<Vec<_>>().join(", ")
    };
    match check {
        Check::Any => String::new(),
        Check::NotExecutable => "without `PROT_EXEC`".to_owned(),
        Check::NoNamespace => "without `CLONE_NEW*`".to_owned(),
        Check::Library => "`PROT_READ` and `PROT_EXEC` of a file".to_owned(),
        Check::ThisProcess => "of this process".to_owned(),
        Check::OwnPriority => "of the calling thread".to_owned(),
        Check::First(&[0]) => "first argument 0, which is the caller".to_owned(),
        Check::First(values) => format!("first argument {}", list(values)),
        Check::Second(values) => format!("request {}", list(values)),
        Check::Requests(requests) => {
            let names = requests.iter().flat_map(|request| request.name.split("_and_"));
            let names: Vec<_> = names.map(|name| format!("`{name}`")).collect();
            names.join(", ")
        }
    }
}

/// Names as in capabilities(7), without the prefix.
fn names(set: CapabilitySet) -> String {
    set.iter_names().map(|(name, _)| name).collect::<Vec<_>>().join(", ")
}

fn threads(need: &Need) -> String {
    let all = need.threads.iter().flat_map(|list| {
        if *list == BUILDERS {
            vec!["those that build or change a machine".to_owned()]
        } else {
            list.iter().map(|name| format!("`{name}`")).collect()
        }
    });
    all.collect::<Vec<_>>().join(", ")
}

fn row(need: &Need) -> String {
    let dropped = match (need.span, need.unless) {
        (Span::Start, _) => "once the thread has it".to_owned(),
        (Span::Life, Some(unless)) => format!("at the start, if {}", unless.text),
        (Span::Life, None) => String::new(),
    };
    format!("| `CAP_{}` | {} | {} | {dropped} |", names(need.capability), need.why, threads(need))
}

/// The text.
pub(super) fn reference() -> String {
    let builders: Vec<_> = BUILDERS.iter().map(|name| format!("`{name}`")).collect();
    let mut text = format!(
        "\n## What is kept of root's capabilities\n\nAll others are dropped. A thread has those of the threads that it \
         starts as well: the table of kinds has the sum. Those that build or change a machine are {}.\n\n\
         | capability | what for | threads that need it themselves | dropped |\n| --- | --- | --- | --- |\n",
        builders.join(", ")
    );
    for need in NEEDS {
        text.push_str(&row(need));
        text.push('\n');
    }
    text.push_str(
        "\n## Kinds of threads\n\nEach has the group *runtime* as well, and each that starts others the group \
         *capabilities*.\n\n\
         | kind | groups of its own | capabilities | starts | what for |\n| --- | --- | --- | --- | --- |\n",
    );
    let mut groups: Vec<&'static Group> = vec![&RUNTIME, &CAPABILITIES];
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
        let kept = names(kept(kind));
        let _ = writeln!(text, "| `{}` | {own} | {kept} | {starts} | {} |", kind.name, kind.why);
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
