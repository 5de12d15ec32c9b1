// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `ch-remote`: a VM's life driven by it, what it prints, its help, its exit codes.

use std::process::Command;

use serde_json::Value;

use crate::harness::vmm::{CH_REMOTE, write_file};
use crate::harness::{Suite, Vmm, ch_remote};
use crate::lifecycle::config;

/// Subcommands that do something, and those that are known and refused by name.
const WORKING: [&str; 16] = [
    "boot",
    "counters",
    "create",
    "delete",
    "info",
    "pause",
    "ping",
    "power-button",
    "reboot",
    "receive-migration",
    "resume",
    "send-migration",
    "shutdown",
    "shutdown-vmm",
    "migration-progress",
    "migration-report",
];

pub fn add(suite: &mut Suite) {
    suite.add("remote::life_cycle", life_cycle);
    suite.add("remote::help_of_each_subcommand", help);
    suite.add("remote::errors_are_told_once", errors);
    suite.add("remote::nobody_has_to_read_the_answer", nobody_has_to_read_the_answer);
}

fn json(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

fn life_cycle() {
    let mut vmm = Vmm::empty();
    let ping = json(&vmm.remote_ok(&["ping"]));
    assert_eq!(ping["pid"], vmm.pid());
    assert!(ping["version"].is_string(), "{ping}");
    let file = write_file(&vmm.path("config.json"), config(128).as_bytes());
    assert_eq!(vmm.remote_ok(&["create", &file]), "");
    assert_eq!(json(&vmm.remote_ok(&["info"]))["state"], "Created");
    assert_eq!(vmm.remote_ok(&["boot"]), "");
    vmm.wait_for_heartbeat();
    assert_eq!(json(&vmm.remote_ok(&["info"]))["state"], "Running");
    assert!(json(&vmm.remote_ok(&["counters"])).is_object());
    vmm.remote_ok(&["pause"]);
    assert_eq!(json(&vmm.remote_ok(&["info"]))["state"], "Paused");
    vmm.remote_ok(&["resume"]);
    vmm.remote_ok(&["reboot"]);
    vmm.wait_for_heartbeat();
    vmm.remote_ok(&["power-button"]);
    vmm.remote_ok(&["shutdown"]);
    vmm.remote_ok(&["delete"]);
    vmm.remote_ok(&["shutdown-vmm"]);
    assert_eq!(vmm.wait_for_exit(), 0, "{}", vmm.output());
}

fn help() {
    let all = ch_remote(&["--help"]);
    assert!(all.status.success());
    let text = String::from_utf8_lossy(&all.stdout).into_owned();
    for name in WORKING {
        assert!(text.contains(name), "{name} is not in --help:\n{text}");
        let output = ch_remote(&[name, "--help"]);
        let own = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{name} --help");
        assert!(own.lines().next().is_some_and(|line| line.len() > 10), "{name}: {own}");
        assert!(own.contains("Usage"), "{name}: {own}");
    }
    let recover = ch_remote(&["migration-recover", "--help"]);
    let text = String::from_utf8_lossy(&recover.stdout).into_owned();
    assert!(text.contains("url=") && text.contains("connections="), "{text}");
    let send = ch_remote(&["send-migration", "--help"]);
    let text = String::from_utf8_lossy(&send.stdout).into_owned();
    for key in ["destination_url", "memory_mode", "downtime_ms", "timeout_s", "connections"] {
        assert!(text.contains(key), "{key} is not in {text}");
    }
}

fn errors() {
    let vmm = Vmm::empty();
    let cases: [(&[&str], &str); 5] = [
        (&["info"], "there is no VM"),
        (&["boot"], "there is no VM"),
        (&["create", "/nonexistent.json"], "/nonexistent.json"),
        (&["send-migration", "destination_url=nowhere"], "nowhere"),
        (&["no-such-command"], "no-such-command"),
    ];
    for (words, text) in cases {
        let output = vmm.remote(words);
        assert!(!output.status.success(), "{words:?} succeeded");
        assert!(output.status.code().is_some(), "{words:?} ended by a signal");
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(error.matches(text).count(), 1, "{words:?}: {error}");
        assert!(!error.contains("panicked"), "{words:?}: {error}");
    }
    let nowhere = ch_remote(&["--api-socket", "/nonexistent/api", "ping"]);
    let error = String::from_utf8_lossy(&nowhere.stderr).into_owned();
    assert!(!nowhere.status.success() && error.contains("/nonexistent/api"), "{error}");
    vmm.shut_down();
}

fn nobody_has_to_read_the_answer() {
    let vmm = Vmm::empty();
    let (reader, writer) = std::io::pipe().expect("a pipe");
    drop(reader);
    let output = Command::new(CH_REMOTE)
        .arg("--api-socket")
        .arg(vmm.socket())
        .arg("ping")
        .stdout(writer)
        .output()
        .expect("ch-remote runs");
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
    vmm.shut_down();
}
