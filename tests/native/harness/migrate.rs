// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Moving a VM from one process to another, as a user would: `ch-remote` on both sides.
//!
//! Owns addresses (a port that the receiver chose, a socket in its folder) and the order of steps.
//! Must never judge what arrived; [`Vmm::verify`] does.

use std::process::{Child, Output};
use std::time::Instant;

use serde_json::Value;

use super::vmm::finish;
use super::{PATIENCE, Vmm, wait_for};

/// What carries it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// TCP on loopback.
    Tcp,
    /// A Unix socket.
    Unix,
}

/// When memory travels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Before the guest runs there.
    Precopy,
    /// After.
    Postcopy,
    /// Before, and the rest after.
    Auto,
}

impl Mode {
    /// As in an option string.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Precopy => "precopy",
            Self::Postcopy => "postcopy",
            Self::Auto => "auto",
        }
    }
}

/// A VMM that listens, and the `ch-remote` that waits for the VM's arrival.
pub struct Reception {
    remote: Child,
    /// Where it listens.
    pub url: String,
}

/// Rules of `receive-migration` for a source that may name anything, as a file that holds something.
pub const ANYTHING: &str =
    ",allow=[/:disk+memory+console+payload+rng+pool+device,*:tap,tty:console]";

impl Reception {
    /// Makes `destination` listen.
    #[track_caller]
    pub fn start(destination: &Vmm, transport: Transport, mode: Mode) -> Self {
        Self::start_with(destination, transport, mode, "")
    }

    /// The same with more options, which begin with a comma.
    #[track_caller]
    pub fn start_with(destination: &Vmm, transport: Transport, mode: Mode, more: &str) -> Self {
        let wanted = match transport {
            Transport::Tcp => "tcp:127.0.0.1:0".to_owned(),
            Transport::Unix => format!("unix:{}", destination.path("migration").display()),
        };
        let seen = ready_addresses(destination).len();
        let option = format!("receiver_url={wanted},memory_mode={}{more}", mode.name());
        let remote = destination.remote_spawn(&["receive-migration", &option]);
        let url = wait_for("the destination to listen", || {
            ready_addresses(destination).into_iter().nth(seen)
        });
        Self { remote, url }
    }

    /// Whether `ch-remote` has ended.
    pub fn has_ended(&mut self) -> bool {
        self.remote.try_wait().expect("it can be waited for").is_some()
    }

    /// Waits for `ch-remote` to end.
    #[track_caller]
    pub fn finish(self) -> Output {
        finish(self.remote)
    }
}

fn ready_addresses(vmm: &Vmm) -> Vec<String> {
    vmm.events()
        .iter()
        .filter(|event| event["event"] == "migration-receive-ready")
        .map(|event| event["properties"]["address"].as_str().unwrap_or_default().to_owned())
        .collect()
}

/// Waits for the event that says that a destination is done, and returns as it comes: in postcopy the threads of the
/// connections end after that, within less time than there is between two looks of `wait_for`. Whether they had not yet.
#[track_caller]
pub fn wait_for_done(destination: &Vmm) -> bool {
    let begun = Instant::now();
    loop {
        let events = destination.events();
        let is_done = |event: &Value| {
            event["event"] == "migration-phase" && event["properties"]["phase"] == "done"
        };
        let has = |name: &str| events.iter().any(|event| event["event"] == name);
        if events.iter().any(is_done) && has("migration-receive-finished") {
            return !has("postcopy-migration-completed");
        }
        std::thread::yield_now();
        assert!(begun.elapsed() < PATIENCE, "no end: {}", destination.output());
    }
}

/// The option string for a migration to `url` that must come to an end.
pub fn send_option(url: &str, mode: Mode) -> String {
    let url = url.to_owned();
    let mode = mode.name();
    format!(
        "destination_url={url},memory_mode={mode},downtime_ms=300,timeout_s=4,\
         timeout_strategy=ignore"
    )
}

/// Moves the VM, and waits until the destination has all of it and the source has ended.
#[track_caller]
pub fn migrate(source: Vmm, destination: &Vmm, transport: Transport, mode: Mode) {
    migrate_by(source, destination, transport, mode, |url| send_option(url, mode));
}

/// The same with options of its own, for an address.
#[track_caller]
pub fn migrate_by(
    source: Vmm,
    destination: &Vmm,
    transport: Transport,
    mode: Mode,
    option: impl FnOnce(&str) -> String,
) {
    let reception = Reception::start(destination, transport, mode);
    migrate_to(reception, source, destination, option);
}

/// The same where the destination listens already.
#[track_caller]
pub fn migrate_to(
    reception: Reception,
    mut source: Vmm,
    destination: &Vmm,
    option: impl FnOnce(&str) -> String,
) {
    let before = source.events().len();
    source.remote_ok(&["send-migration", &option(&reception.url)]);
    // The end of an earlier one may be written only now; it is before the begin of this one.
    let begun = wait_for("the begin of the migration", || {
        let events = source.events();
        let later = events.iter().skip(before);
        later
            .rev()
            .position(|event| event["event"] == "migration-starting")
            .map(|back| events.len() - back)
    });
    let event = source.wait_for_later_events(begun, &["migration-finished", "migration-failed"]);
    assert_eq!(
        event["event"],
        "migration-finished",
        "{event}\n--- source\n{}\n--- destination\n{}",
        source.output(),
        destination.output()
    );
    let output = reception.finish();
    assert!(output.status.success(), "{output:?}\n{}", destination.output());
    wait_for("the last page", || {
        let progress = destination.api().get("vm.migration-progress").ok().json();
        (progress["phase"] == "done").then_some(())
    });
    let code = source.wait_for_exit();
    assert_eq!(code, 0, "the source after its migration:\n{}", source.output());
}

/// The reason that the source gave for a migration that failed.
#[track_caller]
pub fn failure_of(source: &Vmm) -> String {
    failure_after(source, 0)
}

/// The same for one that has failed before: behind the first `before` events.
#[track_caller]
pub fn failure_after(source: &Vmm, before: usize) -> String {
    let event = source.wait_for_later_events(before, &["migration-failed", "migration-finished"]);
    assert_eq!(event["event"], "migration-failed", "{event}");
    text(&event)
}

/// The reason in an event.
pub fn text(event: &Value) -> String {
    event["properties"]["error"].as_str().unwrap_or_default().to_owned()
}
