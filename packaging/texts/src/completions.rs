// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What bash, zsh and fish complete: options, commands, and values where there are few.
//!
//! Owns the names of the files, which are those that the shells look for. `clap_complete` writes them. It must never complete
//! an option that the help hides.

use std::path::Path;

use clap::Command;
use clap_complete::aot::{Shell, generate};
use godwit::cli::manual;

use crate::File;
use crate::programs::{Keys, Program, no_keys};

/// The command as users see it: without hidden options, and with a line for each of the others.
fn shown(command: &Command, keys: Keys) -> Command {
    let args = command.get_arguments().filter(|arg| !arg.is_hide_set()).map(|arg| {
        let arg = arg.clone();
        match keys(arg.get_id().as_str()) {
            // Its help has all keys, which fills a screen.
            Some(info) => arg.help(manual::about(&info)),
            None => arg,
        }
    });
    let subcommands = command.get_subcommands().map(|sub| shown(sub, no_keys));
    let mut out = Command::new(command.get_name().to_owned()).args(args).subcommands(subcommands);
    if command.has_subcommands() {
        // That of clap has every command a second time.
        let help = Command::new("help").about("Print the help of a command");
        out = out.disable_help_subcommand(true).subcommand(help);
    }
    if let Some(about) = command.get_about() {
        out = out.about(about.clone());
    }
    if let Some(version) = command.get_version() {
        out = out.version(version.to_owned());
    }
    out
}

/// The completion of one shell.
fn of_shell(shell: Shell, command: &Command, name: &str) -> Vec<u8> {
    let mut contents = Vec::new();
    generate(shell, &mut command.clone(), name, &mut contents);
    let Shell::Bash = shell else { return contents };
    // clap_complete 4.6 remembers a command by the name of the program with two underscores in place of a hyphen, and
    // looks for it by a name with another word there.
    let (set, searched) = (name.replace('-', "__"), name.replace('-', "__subcmd__"));
    String::from_utf8_lossy(&contents).replace(&searched, &set).into_bytes()
}

/// A file for each shell.
pub fn files(program: &Program) -> Vec<File> {
    let name = program.name;
    let command = shown(&program.command, program.option_keys);
    [
        (Shell::Bash, "bash", name.to_owned()),
        (Shell::Zsh, "zsh", format!("_{name}")),
        (Shell::Fish, "fish", format!("{name}.fish")),
    ]
    .into_iter()
    .map(|(shell, folder, file)| {
        let path = Path::new("completions").join(folder).join(file);
        File { path, contents: of_shell(shell, &command, name) }
    })
    .collect()
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test that cannot unwrap has failed")]

    use std::process::Command as Process;

    use super::*;
    use crate::programs;

    /// Of one shell: the names of the programs, and the text of their files.
    fn texts(shell: &str) -> Vec<(Program, String)> {
        programs::all()
            .into_iter()
            .map(|program| {
                let mut of_all = files(&program).into_iter();
                let file =
                    of_all.find(|file| file.path.parent().unwrap().ends_with(shell)).unwrap();
                (program, String::from_utf8(file.contents).unwrap())
            })
            .collect()
    }

    /// The options and commands of a command and of those below it, each with whether it is shown.
    fn words(command: &Command) -> Vec<(String, bool)> {
        let options = command
            .get_arguments()
            .filter_map(|arg| arg.get_long().map(|long| (format!("--{long}"), !arg.is_hide_set())));
        let below = command.get_subcommands().flat_map(|sub| {
            let mut all = words(sub);
            all.push((sub.get_name().to_owned(), true));
            all
        });
        options.chain(below).collect()
    }

    #[test]
    fn every_option_and_command_is_completed_and_none_that_is_hidden() {
        for shell in ["bash", "zsh", "fish"] {
            for (program, text) in texts(shell) {
                for (word, is_shown) in words(&program.command) {
                    // fish has options without their dashes.
                    let option = word.strip_prefix("--").map(|long| format!("-l {long}"));
                    let searched = if shell == "fish" { option.unwrap_or(word) } else { word };
                    let is_there = text.match_indices(&searched).any(|(at, _)| {
                        let next = text[at + searched.len()..].chars().next().unwrap_or(' ');
                        !next.is_alphanumeric() && next != '-'
                    });
                    assert_eq!(is_there, is_shown, "{shell}, {}: {searched}", program.name);
                }
            }
        }
    }

    #[test]
    fn an_option_is_described_in_a_line_that_can_be_read() {
        for (program, text) in texts("zsh") {
            // The keys of a disk have over 1000 characters.
            let longest = text.lines().map(str::len).max().unwrap();
            assert!(longest < 300, "{}: {longest}", program.name);
        }
    }

    /// The output of a shell's commands; nothing, after saying so, if the shell is not there.
    fn run(shell: &str, commands: &str) -> Option<String> {
        match Process::new(shell).args(["-c", commands]).output() {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                test_skip::skip!("there is no {shell} here");
                None
            }
            output => {
                let output = output.unwrap();
                let errors = String::from_utf8_lossy(&output.stderr).into_owned();
                assert!(output.status.success() && errors.is_empty(), "{shell}: {errors}");
                Some(String::from_utf8(output.stdout).unwrap())
            }
        }
    }

    #[test]
    fn bash_completes_with_it() {
        let folder = tempfile::tempdir().unwrap();
        for (program, text) in texts("bash") {
            std::fs::write(folder.path().join(program.name), text).unwrap();
        }
        // What bash does when Tab is pressed behind these words.
        let completed = |words: &[&str]| {
            let path = folder.path().join(words[0]);
            let (current, previous) = (words[words.len() - 1], words[words.len() - 2]);
            let quoted: Vec<String> = words.iter().map(|word| format!("'{word}'")).collect();
            let commands = format!(
                ". '{}'; f=$(complete -p {name}); f=${{f#*-F }}; COMP_WORDS=({}); COMP_CWORD={}; \
                 ${{f%% *}} {name} '{current}' '{previous}'; echo \"${{COMPREPLY[*]}}\"",
                path.display(),
                quoted.join(" "),
                words.len() - 1,
                name = words[0],
            );
            run("bash", &commands).map(|text| text.trim().to_owned())
        };
        let Some(found) = completed(&["cloud-hypervisor", "--bal"]) else { return };
        assert_eq!(found, "--balloon");
        let is = |words: &[&str], wanted: &str| assert_eq!(completed(words).unwrap(), wanted);
        is(&["cloud-hypervisor", "--seccomp", "l"], "log");
        is(&["ch-remote", "add-gen"], "add-generic-vhost-user");
        is(&["ch-remote", "send-migration", "--wa"], "--wait --watch");
        is(&["ch-remote", "--api-socket", "/s", "send-migration", "--wa"], "--wait --watch");
        is(&["ch-remote", "--api-socket", "/s", "migration-p"], "migration-progress");
        is(&["prezero-pool", "stats", "--conf"], "--config");
    }

    #[test]
    fn zsh_and_fish_can_read_it() {
        for shell in ["zsh", "fish"] {
            for (_, text) in texts(shell) {
                let file = tempfile::NamedTempFile::new().unwrap();
                std::fs::write(file.path(), text).unwrap();
                let check = format!("{shell} -n {}", file.path().display());
                if run(shell, &check).is_none() {
                    break;
                }
            }
        }
    }
}
