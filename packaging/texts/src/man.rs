// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Man pages: options, their keys and commands from the definitions, exit codes from `docs/exit-codes.md`, and the rest
//! from [`crate::programs`].
//!
//! Owns the order of a page. It must never contain text about a particular option.

use clap::{Arg, ArgAction, Command};
use godwit::cli::manual::{self, KeyText};
use vmm::config::family::FamilyInfo;

use crate::programs::{Exit, Keys, Program, no_keys};
use crate::roff::{Page, bold, escaped, italic, marked};

/// The table of exit codes.
const EXIT_CODES: &str = include_str!("../../../docs/exit-codes.md");

/// Codes and meanings of that table, in Markdown.
fn documented_codes() -> impl Iterator<Item = (u8, &'static str)> {
    EXIT_CODES.lines().filter_map(|line| {
        let row = line.strip_prefix("| ")?.strip_suffix(" |")?;
        let (code, meaning) = row.split_once(" | ")?;
        Some((code.parse().ok()?, meaning))
    })
}

/// What stands for an option's values.
fn values(arg: &Arg) -> String {
    if !arg.get_action().takes_values() {
        return String::new();
    }
    let names: Vec<String> = match arg.get_value_names() {
        Some(names) => names.iter().map(|name| italic(name.as_str())).collect(),
        None => vec![italic(&arg.get_id().as_str().to_uppercase())],
    };
    let (mut least, mut most) = (1, 1);
    if let Some(range) = arg.get_num_args() {
        (least, most) = (range.min_values(), range.max_values());
    }
    let is_optional = least == 0 || (arg.is_positional() && !arg.is_required_set());
    let values = names.join(" ") + if most > names.len() { "..." } else { "" };
    if is_optional { format!("[{values}]") } else { values }
}

/// An option as it is given, or the name of an argument.
fn term(arg: &Arg) -> String {
    let short = arg.get_short().map(|short| bold(&format!("-{short}")));
    let long = arg.get_long().map(|long| bold(&format!("--{long}")));
    let names: Vec<String> = short.into_iter().chain(long).collect();
    let values = values(arg);
    match (names.is_empty(), values.is_empty()) {
        (true, _) => values,
        (false, true) => names.join(", "),
        (false, false) => format!("{} {values}", names.join(", ")),
    }
}

/// What is said of an option; of the keys of its value apart from them.
fn meaning(arg: &Arg, keys: Option<&FamilyInfo>) -> String {
    let help = arg.get_help().map(ToString::to_string).unwrap_or_default();
    let help = keys.map_or(help, manual::about);
    let mut facts = Vec::new();
    if arg.is_required_set() && !arg.is_positional() {
        facts.push("required".to_owned());
    }
    if matches!(arg.get_action(), ArgAction::Append) {
        facts.push("may be given several times".to_owned());
    }
    if !arg.get_action().takes_values() {
        return marked(&help);
    }
    let possible: Vec<String> =
        arg.get_possible_values().iter().map(|value| value.get_name().to_owned()).collect();
    if !possible.is_empty() {
        facts.push(format!("one of {}", possible.join(", ")));
    }
    let defaults: Vec<_> =
        arg.get_default_values().iter().filter_map(|text| text.to_str()).collect();
    if defaults.iter().any(|text| !text.is_empty()) {
        facts.push(format!("default {}", defaults.join(" ")));
    }
    let facts = if facts.is_empty() { String::new() } else { format!(" [{}]", facts.join("; ")) };
    marked(&(help + &facts))
}

/// Escaped text that may go on in the next line between its parts.
fn breakable(text: &str) -> String {
    text.replace(':', ":\\:").replace('|', "|\\:").replace('_', "_\\:")
}

/// A key as it is given.
fn key_term(key: &KeyText) -> String {
    let one = |syntax: &String| match syntax.split_once('=') {
        Some((key, value)) => bold(&format!("{key}=")) + &breakable(&italic(value)),
        None => bold(syntax),
    };
    key.syntax.iter().map(one).collect::<Vec<_>>().join(" | ")
}

/// The keys of the entry before.
fn write_keys(page: &mut Page, info: &FamilyInfo) {
    let keys = manual::described(info);
    page.indent();
    for key in &keys.known {
        page.entry(&key_term(key), &marked(&key.meaning));
    }
    if !keys.refused.is_empty() {
        let names: Vec<String> = keys.refused.iter().map(|key| bold(key)).collect();
        page.paragraph(&format!("Not supported by this version: {}", names.join(", ")));
    }
    page.outdent();
}

fn write_options<'a>(page: &mut Page, args: impl Iterator<Item = &'a Arg>, keys: Keys) {
    for arg in args.filter(|arg| !arg.is_hide_set()) {
        let info = keys(arg.get_id().as_str());
        page.entry(&term(arg), &meaning(arg, info.as_ref()));
        if let Some(info) = info {
            write_keys(page, &info);
        }
    }
}

/// The arguments of a subcommand alone: neither those of all, nor `--help`.
fn own_arguments(command: &Command) -> impl Iterator<Item = &Arg> {
    let is_own =
        |arg: &&Arg| !arg.is_global_set() && !["help", "version"].contains(&arg.get_id().as_str());
    command.get_arguments().filter(is_own)
}

fn write_subcommand(page: &mut Page, command: &Command, keys: Keys) {
    let arguments = own_arguments(command).filter(|arg| !arg.is_hide_set()).map(|arg| {
        if arg.is_positional() || arg.is_required_set() {
            term(arg)
        } else {
            format!("[{}]", term(arg))
        }
    });
    let words: Vec<String> = std::iter::once(bold(command.get_name())).chain(arguments).collect();
    let about = command.get_about().map(ToString::to_string).unwrap_or_default();
    page.entry(&words.join(" "), &marked(&about));
    if own_arguments(command).next().is_none() {
        return;
    }
    page.indent();
    write_options(page, own_arguments(command), no_keys);
    if let Some(info) = keys(command.get_name()) {
        write_keys(page, &info);
    }
    page.outdent();
}

fn write_exit_codes(page: &mut Page, codes: &[Exit]) {
    page.section("EXIT STATUS");
    for (code, own) in codes {
        let documented = || documented_codes().find(|(known, _)| known == code);
        let meaning = own.or_else(|| documented().map(|(_, meaning)| meaning)).unwrap_or_default();
        page.entry(&bold(&code.to_string()), &marked(meaning));
    }
}

/// The man page of a program.
pub fn page(program: &Program) -> String {
    let texts = &program.texts;
    let mut command = program.command.clone();
    // What clap adds: --help, --version, options of all subcommands.
    command.build();
    let mut page = Page::new(program.name, concat!("Godwit ", env!("CARGO_PKG_VERSION")));
    page.section("NAME");
    page.text(&format!("{} \\- {}", escaped(program.name), escaped(texts.summary)));
    page.section("SYNOPSIS");
    for line in texts.synopsis {
        page.paragraph(&marked(line));
    }
    page.section("DESCRIPTION");
    for text in texts.description {
        page.paragraph(&marked(text));
    }
    page.section("OPTIONS");
    write_options(&mut page, command.get_arguments(), program.option_keys);
    if command.has_subcommands() {
        page.section("COMMANDS");
        for sub in command.get_subcommands().filter(|sub| sub.get_name() != "help") {
            write_subcommand(&mut page, sub, program.argument_keys);
        }
    }
    if let Some(configuration) = texts.configuration {
        page.section("CONFIGURATION");
        page.code(configuration);
    }
    page.section("FILES");
    for (path, text) in texts.files {
        page.entry(&bold(path), &marked(text));
    }
    write_exit_codes(&mut page, texts.exit_codes);
    page.section("EXAMPLES");
    for (text, commands) in texts.examples {
        page.paragraph(&marked(text));
        page.code(commands);
    }
    page.section("SEE ALSO");
    page.paragraph(&marked(texts.see_also));
    page.finish()
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test that cannot unwrap has failed")]

    use std::io::Write as _;
    use std::process::{Command as Process, Stdio};

    use super::*;
    use crate::programs;

    /// A page without its fonts and escapes.
    fn plain(page: &str) -> String {
        let fonts = ["\\fB", "\\fI", "\\fR"]
            .iter()
            .fold(page.to_owned(), |text, font| text.replace(font, ""));
        fonts
            .replace("\\:", "")
            .replace("\\-", "-")
            .replace("\\(aq", "'")
            .replace("\\&", "")
            .replace("\\e", "\\")
    }

    /// The paragraph that begins with a line for which this holds.
    fn has_entry(text: &str, is_it: impl Fn(&str) -> bool) -> bool {
        let lines: Vec<&str> = text.lines().collect();
        lines.windows(3).any(|entry| {
            entry[0] == ".TP"
                && is_it(entry[1])
                && !entry[2].is_empty()
                && !entry[2].starts_with('.')
        })
    }

    fn begins_with(line: &str, word: &str) -> bool {
        line.split([' ', ',']).any(|part| part.trim_matches(['[', ']']) == word)
    }

    #[test]
    fn every_option_and_command_has_an_entry_and_none_that_is_hidden() {
        for program in programs::all() {
            let text = plain(&page(&program));
            let commands =
                std::iter::once(&program.command).chain(program.command.get_subcommands());
            for command in commands {
                for arg in command.get_arguments() {
                    let Some(long) = arg.get_long() else { continue };
                    let option = format!("--{long}");
                    let is_told = has_entry(&text, |line| {
                        line.starts_with('-') && begins_with(line, &option)
                    });
                    assert_eq!(is_told, !arg.is_hide_set(), "{}: {option}", program.name);
                }
            }
            for sub in program.command.get_subcommands() {
                let name = sub.get_name();
                assert!(has_entry(&text, |line| line.split(' ').next() == Some(name)), "{name}");
            }
        }
    }

    #[test]
    fn every_key_is_told_with_its_default_below_its_option() {
        let mut count = 0;
        for program in programs::all() {
            let text = plain(&page(&program));
            let options = program.command.get_arguments().map(|arg| {
                ((program.option_keys)(arg.get_id().as_str()), format!("--{}", arg.get_id()))
            });
            let arguments = program
                .command
                .get_subcommands()
                .map(|sub| ((program.argument_keys)(sub.get_name()), sub.get_name().to_owned()));
            for (info, word) in options.chain(arguments) {
                let Some(info) = info else { continue };
                let at = text.find(&format!("\n.TP\n{word}")).unwrap();
                for key in manual::described(&info).known {
                    let entry = format!("\n.TP\n{}\n", key.syntax.join(" | "));
                    let told = text[at..].find(&entry).unwrap_or_else(|| panic!("{word}: {entry}"));
                    // The backticks of its meaning are fonts here.
                    let meaning = key.meaning.replace('`', "");
                    let rest = &text[at + told + entry.len()..];
                    assert!(
                        rest.starts_with(plain(&marked(&meaning)).as_str()),
                        "{word}: {meaning}"
                    );
                    count += 1;
                }
            }
        }
        assert!(count > 300, "{count} keys");
    }

    #[test]
    fn every_exit_code_is_on_a_page_and_has_a_meaning() {
        let programs = programs::all();
        let codes: Vec<u8> = documented_codes().map(|(code, _)| code).collect();
        assert!(codes.len() >= 8, "{codes:?}");
        for code in &codes {
            let of =
                |program: &Program| program.texts.exit_codes.iter().any(|(known, _)| known == code);
            assert!(programs.iter().any(of), "{code}");
        }
        for program in &programs {
            let text = page(program);
            for (code, own) in program.texts.exit_codes {
                assert!(own.is_some() || codes.contains(code), "{}: {code}", program.name);
                assert!(has_entry(&text, |line| line == bold(&code.to_string())));
            }
        }
    }

    /// What groff has to say of a page; nothing, after saying so, where it is missing.
    fn complaints(page: &str) -> Option<String> {
        let groff = Process::new("groff")
            .args(["-man", "-Tutf8", "-ww", "-z"])
            .stdin(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn();
        match groff {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                test_skip::skip!("there is no groff here");
                None
            }
            groff => {
                let mut groff = groff.unwrap();
                groff.stdin.take().unwrap().write_all(page.as_bytes()).unwrap();
                let output = groff.wait_with_output().unwrap();
                Some(String::from_utf8_lossy(&output.stderr).into_owned())
            }
        }
    }

    #[test]
    fn groff_has_nothing_to_complain_of() {
        let Some(found) = complaints(".TH a 1\n.SH NAME\n.nosuchrequest\n") else { return };
        assert!(!found.is_empty(), "it finds nothing");
        for program in programs::all() {
            assert_eq!(complaints(&page(&program)).unwrap(), "", "{}", program.name);
        }
    }
}
