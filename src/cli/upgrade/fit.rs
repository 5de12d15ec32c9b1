// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Which VMs cannot be handed to another process of the same host, by what `vm.info` says of them.
//!
//! Owns the refusals that are made before a process is started. What it does not know is refused by the VMM, before
//! anything is handed over. It must never read a type of its own version, but plain JSON: the VMM may be older or newer.

use serde_json::Value;
use thiserror::Error;

/// Name of the zone of memory without zones.
const ONLY_ZONE: &str = "mem0";

/// Why a VM stays where it is.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum NotFit {
    /// Neither running nor paused.
    #[error("the VM is in the state '{0}': only one that runs or is paused can be handed over")]
    State(String),
    /// Something else is being done to it.
    #[error("the VM is being {0}, which has to end first")]
    Busy(String),
    /// An earlier migration has not come to its end.
    #[error("an earlier migration of the VM has not come to its end: {0}")]
    InDoubt(String),
    /// Anonymous memory cannot be given to another process.
    #[error(
        "memory zone '{0}' is private memory, which no other process can have: boot the VM with shared=on or hugepages=on \
         for later upgrades (docs/upgrade.md)"
    )]
    Private(String),
    /// A console at a socket.
    #[error(
        "the {0} is at a socket, at which the new process cannot listen while the old one does: a file, a terminal or a \
         pseudo terminal can be handed over"
    )]
    Console(&'static str),
    /// One process alone can have the device.
    #[error("the {kind} '{id}' cannot be handed to another process: {why}")]
    Device {
        /// What it is.
        kind: &'static str,
        /// Its name.
        id: String,
        /// The reason.
        why: &'static str,
    },
}

const PASSED_THROUGH: &str =
    "the host lets one process have it open, and for a moment there are two";
const BACK_END: &str =
    "the process that serves it has one connection, and for a moment there are two of VMMs";
const DESCRIPTORS: &str =
    "it has descriptors from the program that started the VM, and only that one can pass them on";

/// What a list of the configuration is of, which entries of it stay, and why.
type Staying = (&'static str, &'static str, fn(&Value) -> bool, &'static str);

/// Devices that stay, by list of the configuration.
const STAYING: [Staying; 8] = [
    ("devices", "passed-through device", any, PASSED_THROUGH),
    ("vdpa", "vDPA device", any, PASSED_THROUGH),
    ("user_devices", "vfio-user device", any, BACK_END),
    ("fs", "vhost-user file system", any, BACK_END),
    ("generic_vhost_user", "vhost-user device", any, BACK_END),
    ("disks", "vhost-user disk", of_back_end, BACK_END),
    ("net", "vhost-user network device", of_back_end, BACK_END),
    ("net", "network device", with_descriptors, DESCRIPTORS),
];

fn any(_: &Value) -> bool {
    true
}

fn of_back_end(device: &Value) -> bool {
    device["vhost_user"] == Value::Bool(true)
}

fn with_descriptors(device: &Value) -> bool {
    device["fds"].as_array().is_some_and(|fds| !fds.is_empty())
}

fn list<'a>(of: &'a Value, name: &str) -> impl Iterator<Item = &'a Value> {
    of[name].as_array().into_iter().flatten()
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

/// Refuses a VM that cannot be handed over.
///
/// # Errors
/// [`NotFit`], for the first reason.
pub fn check(info: &Value) -> Result<(), NotFit> {
    let state = text(&info["state"]);
    for (key, refuse) in [
        ("doing", NotFit::Busy as fn(String) -> NotFit),
        ("in_doubt", NotFit::InDoubt),
        ("postcopy_paused", NotFit::InDoubt),
    ] {
        if let Some(why) = info[key].as_str() {
            return Err(refuse(why.to_owned()));
        }
    }
    if !["Running", "Paused"].contains(&state.as_str()) {
        return Err(NotFit::State(state));
    }
    let config = &info["config"];
    check_memory(&config["memory"])?;
    let consoles =
        [("serial", "serial port"), ("console", "console"), ("debug_console", "debug console")];
    if let Some((_, what)) = consoles.into_iter().find(|(key, _)| config[*key]["mode"] == "Socket")
    {
        return Err(NotFit::Console(what));
    }
    if config["tpm"].is_object() {
        return Err(NotFit::Device {
            kind: "TPM",
            id: text(&config["tpm"]["socket"]),
            why: BACK_END,
        });
    }
    for (name, kind, stays, why) in STAYING {
        if let Some(device) = list(config, name).find(|device| stays(device)) {
            return Err(NotFit::Device { kind, id: text(&device["id"]), why });
        }
    }
    Ok(())
}

/// Whether a console is at the terminal of its process.
pub fn is_at_terminal(info: &Value) -> bool {
    ["serial", "console"].iter().any(|key| info["config"][*key]["mode"] == "Tty")
}

fn check_memory(memory: &Value) -> Result<(), NotFit> {
    let is_on = |of: &Value, key: &str| of[key] == Value::Bool(true);
    let has_file = |of: &Value| {
        is_on(of, "shared")
            || is_on(of, "hugepages")
            || ["file", "prezeroed"].iter().any(|key| of[*key].is_string())
    };
    let mut zones = list(memory, "zones").peekable();
    if zones.peek().is_none() {
        let is_private = !has_file(memory);
        return if is_private { Err(NotFit::Private(ONLY_ZONE.to_owned())) } else { Ok(()) };
    }
    match zones.find(|zone| !has_file(zone)) {
        Some(zone) => Err(NotFit::Private(text(&zone["id"]))),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn with(config: &Value) -> Result<(), NotFit> {
        check(&json!({"state": "Running", "config": config}))
    }

    #[test]
    fn a_vm_has_to_be_at_rest() {
        let shared = json!({"memory": {"shared": true}});
        for (state, fits) in [("Running", true), ("Paused", true), ("Created", false)] {
            let info = json!({"state": state, "config": shared});
            assert_eq!(check(&info).is_ok(), fits, "{state}");
        }
        for key in ["doing", "in_doubt", "postcopy_paused"] {
            let error = check(&json!({"state": "Running", key: "why", "config": shared}));
            assert!(error.expect_err(key).to_string().contains("why"), "{key}");
        }
    }

    #[test]
    fn private_memory_is_named() {
        let zone = |id: &str, key: &str, value: Value| json!({"id": id, key: value});
        let private = |id: &str| Err(NotFit::Private(id.to_owned()));
        assert_eq!(with(&json!({"memory": {"size": 1}})), private("mem0"));
        assert_eq!(with(&json!({"memory": {"hugepages": true}})), Ok(()));
        let good = [
            zone("a", "shared", json!(true)),
            zone("b", "hugepages", json!(true)),
            zone("c", "file", json!("/f")),
            zone("d", "prezeroed", json!("/p")),
        ];
        assert_eq!(with(&json!({"memory": {"zones": good}})), Ok(()));
        let mut bad = good.to_vec();
        bad.push(zone("mine", "mergeable", json!(true)));
        assert_eq!(with(&json!({"memory": {"zones": bad}})), private("mine"));
    }

    #[test]
    fn consoles_and_a_tpm_at_a_socket_stay() {
        let with_one = |key: &str, value: Value| {
            with(&json!({"memory": {"shared": true}, key: value}))
                .map_err(|error| error.to_string())
        };
        for key in ["serial", "console", "debug_console"] {
            assert_eq!(with_one(key, json!({"mode": "Pty"})), Ok(()));
            let error = with_one(key, json!({"mode": "Socket", "socket": "/s"})).expect_err(key);
            assert!(error.contains("at a socket"), "{error}");
        }
        assert_eq!(with_one("tpm", Value::Null), Ok(()));
        let error = with_one("tpm", json!({"socket": "/tpm"})).expect_err("a TPM");
        assert!(error.contains("TPM '/tpm'"), "{error}");
    }

    #[test]
    fn devices_that_stay_are_named() {
        let memory = json!({"shared": true});
        for (name, kind, ..) in STAYING {
            let device = json!({"id": "it", "vhost_user": true, "fds": [4]});
            let error = with(&json!({"memory": memory, name: [device]})).expect_err(name);
            let text = error.to_string();
            assert!(text.contains("'it'") && text.contains("another process"), "{kind}: {text}");
        }
        let tap = json!({"id": "n", "tap": "t", "vhost_user": false, "fds": null});
        let disk = json!({"id": "d", "path": "/d", "vhost_user": false});
        assert_eq!(with(&json!({"memory": memory, "net": [tap], "disks": [disk]})), Ok(()));
    }
}
