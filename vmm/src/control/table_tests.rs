// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Every request in every state of the life cycle that needs no machine: what it is answered, and which state it
//! leaves. With a machine the native tests ask (`requests`, `states`, `meanwhile`). Skipped without /dev/kvm.

#![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::fmt::Write as _;
use std::time::Duration;

use hypervisor::StopReason;
use serde::de::DeserializeOwned;
use vm_migration::{Cancel, MemoryMode, Side};

use super::inbox::Inbox;
use super::pausing::TransitionKind;
use super::teardown::AfterTeardown;
use super::*;
use crate::api::request::call_for_tests;
use crate::config::NewDevice;
use crate::machine::{BootPrefault, CancelToken, Consoles, GuestEvent};

/// What a request comes to:
///
/// | word | |
/// | --- | --- |
/// | a number | it is answered at once, with this HTTP status |
/// | `later` | it is answered when the operation that it began or ended is over |
/// | `waits` | it is carried out when the VM has left the state |
/// | `ends` | the process ends |
///
/// `>State` follows if the VM is in another state then.
#[rustfmt::skip]
const TABLE: &[(&str, [&str; 11])] = &[
    // None, Created, Launching, Starting, Restoring, Saving, Pausing, TearingDown, Receiving, Migrating, Serving
    ("ping", ["200"; 11]),
    ("create", ["200>Created", "409", "waits", "waits", "409", "409", "waits", "waits", "409", "409", "409"]),
    ("boot", ["404", "later>Starting", "waits", "waits", "409", "409", "waits", "waits", "404", "409", "409"]),
    ("info", ["404", "200", "waits", "200", "409", "200", "200", "200", "404", "200", "409"]),
    ("counters", ["404", "405", "waits", "waits", "409", "409", "waits", "waits", "404", "409", "409"]),
    ("metrics", ["200"; 11]),
    ("pause", ["404", "405", "waits", "waits", "409", "409", "waits", "waits", "404", "409", "409"]),
    ("resume", ["404", "405", "waits", "waits", "409", "409", "later", "waits", "404", "409", "409"]),
    ("resume force", ["404", "405", "waits", "waits", "409", "409", "later", "waits", "404", "409", "409"]),
    ("shutdown", ["404", "405", "later", "later", "later", "409", "waits", "waits", "404", "409", "409"]),
    ("reboot", ["404", "405", "waits", "waits", "409", "409", "waits", "waits", "404", "409", "409"]),
    ("power button", ["404", "405", "waits", "waits", "409", "409", "waits", "waits", "404", "409", "409"]),
    ("nmi", ["404", "405", "waits", "waits", "409", "409", "waits", "waits", "404", "409", "409"]),
    ("delete", ["200", "200>None", "later", "later", "later", "409", "waits", "waits", "later", "409", "409"]),
    ("delete force", ["200", "200>None", "later", "later", "later", "409", "waits", "waits", "later", "409", "later"]),
    ("add device", ["404", "200", "waits", "waits", "409", "409", "waits", "waits", "404", "409", "409"]),
    ("remove device", ["404", "404", "waits", "waits", "409", "409", "waits", "waits", "404", "409", "409"]),
    ("resize", ["404", "400", "waits", "waits", "409", "409", "waits", "waits", "404", "409", "409"]),
    ("resize zone", ["404", "400", "waits", "waits", "409", "409", "waits", "waits", "404", "409", "409"]),
    ("resize disk", ["404", "405", "waits", "waits", "409", "409", "waits", "waits", "404", "409", "409"]),
    ("send", ["404", "405", "waits", "waits", "409", "409", "waits", "waits", "404", "409", "409"]),
    ("migrate check", ["404", "405", "waits", "waits", "409", "409", "waits", "waits", "404", "409", "409"]),
    ("receive", ["400", "409", "waits", "waits", "409", "409", "waits", "waits", "409", "409", "409"]),
    ("progress", ["404", "404", "404", "404", "404", "404", "404", "404", "200", "200", "200"]),
    ("report", ["404", "404", "404", "404", "404", "404", "404", "404", "200", "200", "200"]),
    ("cancel", ["404", "404", "404", "404", "404", "404", "404", "404", "later", "later", "409"]),
    ("postcopy", ["404", "404", "waits", "waits", "404", "404", "waits", "waits", "404", "200", "409"]),
    ("recover", ["404", "404", "waits", "waits", "404", "404", "404", "waits", "404", "404", "409"]),
    ("snapshot", ["404", "405", "waits", "waits", "409", "409", "waits", "waits", "404", "409", "409"]),
    ("core dump", ["404", "405", "waits", "waits", "409", "409", "waits", "waits", "404", "409", "409"]),
    ("snapshot cancel", ["404", "404", "404", "404", "404", "later", "404", "404", "404", "404", "404"]),
    ("restore", ["later>Busy", "409", "waits", "waits", "409", "409", "waits", "waits", "409", "409", "409"]),
    ("vmm shutdown", ["ends", "ends", "later", "later", "later", "later", "later", "later", "later", "409", "409"]),
    ("vmm shutdown force", ["ends", "ends", "later", "later", "later", "later", "later", "later", "later", "409", "ends>None"]),
];

const STATES: [&str; 11] = [
    "None",
    "Created",
    "Launching",
    "Starting",
    "Restoring",
    "Saving",
    "Pausing",
    "TearingDown",
    "Receiving",
    "Migrating",
    "Serving",
];

#[expect(clippy::unnecessary_box_returns, reason = "most requests hold it in a box")]
fn body<T: DeserializeOwned>(json: &str) -> Box<T> {
    Box::new(serde_json::from_str(json).unwrap())
}

fn config() -> Box<VmConfig> {
    body(r#"{"payload":{"kernel":"/nonexistent"},"memory":{"size":67108864}}"#)
}

/// All requests. What they name does not exist, so that nothing is made where one is carried out.
fn requests() -> Vec<VmmRequest> {
    let id = || body(r#"{"id":"nothing"}"#);
    vec![
        VmmRequest::Ping,
        VmmRequest::Create(config()),
        VmmRequest::Boot,
        VmmRequest::Info,
        VmmRequest::Counters,
        VmmRequest::Metrics,
        VmmRequest::Pause,
        VmmRequest::Resume { force: false },
        VmmRequest::Resume { force: true },
        VmmRequest::Shutdown,
        VmmRequest::Reboot,
        VmmRequest::PowerButton,
        VmmRequest::Nmi,
        VmmRequest::Delete { force: false },
        VmmRequest::Delete { force: true },
        VmmRequest::AddDevice(Box::new(NewDevice::Disk(*body(r#"{"path":"/nonexistent"}"#)))),
        VmmRequest::RemoveDevice(*id()),
        VmmRequest::Resize(body(r#"{"desired_balloon":1048576}"#)),
        VmmRequest::ResizeZone(*body(r#"{"id":"nothing","desired_ram":1}"#)),
        VmmRequest::ResizeDisk(*body(r#"{"id":"nothing","desired_size":512}"#)),
        VmmRequest::SendMigration(body(r#"{"destination_url":"tcp:127.0.0.1:1"}"#)),
        VmmRequest::MigrateCheck(body(r#"{"destination_url":"tcp:127.0.0.1:1"}"#)),
        VmmRequest::ReceiveMigration(body(r#"{"receiver_url":"nowhere"}"#)),
        VmmRequest::MigrationProgress,
        VmmRequest::MigrationReport,
        VmmRequest::MigrationCancel,
        VmmRequest::MigrationStartPostcopy,
        VmmRequest::MigrationRecover(body("{}")),
        VmmRequest::Snapshot(body(r#"{"destination_url":"file:///nonexistent"}"#)),
        VmmRequest::CoreDump(body(r#"{"destination_url":"file:///dev/null"}"#)),
        VmmRequest::SnapshotCancel,
        VmmRequest::Restore(body(r#"{"source_url":"file:///nonexistent"}"#)),
        VmmRequest::VmmShutdown { force: false },
        VmmRequest::VmmShutdown { force: true },
    ]
}

/// The row of a request. One that is new has no row, and this does not compile.
fn row_of(request: &VmmRequest) -> &'static str {
    match request {
        VmmRequest::Ping => "ping",
        VmmRequest::Create(_) => "create",
        VmmRequest::Boot => "boot",
        VmmRequest::Info => "info",
        VmmRequest::Counters => "counters",
        VmmRequest::Metrics => "metrics",
        VmmRequest::Pause => "pause",
        VmmRequest::Resume { force: false } => "resume",
        VmmRequest::Resume { force: true } => "resume force",
        VmmRequest::Shutdown => "shutdown",
        VmmRequest::Reboot => "reboot",
        VmmRequest::PowerButton => "power button",
        VmmRequest::Nmi => "nmi",
        VmmRequest::Delete { force: false } => "delete",
        VmmRequest::Delete { force: true } => "delete force",
        VmmRequest::AddDevice(_) => "add device",
        VmmRequest::RemoveDevice(_) => "remove device",
        VmmRequest::Resize(_) => "resize",
        VmmRequest::ResizeZone(_) => "resize zone",
        VmmRequest::ResizeDisk(_) => "resize disk",
        VmmRequest::SendMigration(_) => "send",
        VmmRequest::MigrateCheck(_) => "migrate check",
        VmmRequest::ReceiveMigration(_) => "receive",
        VmmRequest::MigrationProgress => "progress",
        VmmRequest::MigrationReport => "report",
        VmmRequest::MigrationCancel => "cancel",
        VmmRequest::MigrationStartPostcopy => "postcopy",
        VmmRequest::MigrationRecover(_) => "recover",
        VmmRequest::Snapshot(_) => "snapshot",
        VmmRequest::CoreDump(_) => "core dump",
        VmmRequest::SnapshotCancel => "snapshot cancel",
        VmmRequest::Restore(_) => "restore",
        VmmRequest::VmmShutdown { force: false } => "vmm shutdown",
        VmmRequest::VmmShutdown { force: true } => "vmm shutdown force",
    }
}

fn info() -> Box<VmInfo> {
    Box::new(describe::of_config(&config()))
}

fn sending() -> Sending {
    Sending {
        progress: Arc::new(Progress::new(Side::Source)),
        cancel: Cancel::new().unwrap(),
        steering: Steering::new(),
        mode: MemoryMode::Postcopy,
        is_check: false,
        cancellers: Vec::new(),
        deleters: Vec::new(),
        resumers: Vec::new(),
    }
}

/// A VM in this state, in which no thread is at work.
fn in_state(state: &str) -> VmLifecycle {
    let starting = |at_launch| {
        let mut starting = Starting::at_launch(BootPrefault::default());
        starting.at_launch = at_launch;
        VmLifecycle::Starting(starting)
    };
    let busy = |work| VmLifecycle::Busy(Busy::new(work, Cancel::new().unwrap()));
    let consoles = Consoles::default();
    match state {
        "None" => VmLifecycle::None,
        "Created" => VmLifecycle::Created(config()),
        "Launching" => starting(true),
        "Starting" => starting(false),
        "Restoring" => busy(Work::Restore),
        "Saving" => busy(Work::Snapshot(info())),
        "Pausing" => {
            let cancel = CancelToken::default();
            let kind = TransitionKind::Pause;
            VmLifecycle::Transitioning(Transition::new(kind, info(), consoles, cancel))
        }
        "TearingDown" => {
            let after = AfterTeardown::Created { config: config(), responder: None };
            VmLifecycle::TearingDown(Teardown { info: info(), consoles, after })
        }
        "Receiving" => VmLifecycle::Receiving(Receiving {
            progress: Arc::new(Progress::new(Side::Destination)),
            cancel: Cancel::new().unwrap(),
            steering: Steering::new(),
            cancellers: Vec::new(),
            doubt: None,
            decision_requests: Vec::new(),
        }),
        "Migrating" => {
            let stopped = StoppedMemoryWork::default();
            VmLifecycle::Migrating { info: info(), sending: sending(), stopped }
        }
        "Serving" => VmLifecycle::Serving(sending()),
        other => panic!("{other}"),
    }
}

fn name_of(vm: &VmLifecycle) -> &'static str {
    match vm {
        VmLifecycle::None => "None",
        VmLifecycle::Created(_) => "Created",
        VmLifecycle::Live(_) => "Live",
        VmLifecycle::Migrating { .. } => "Migrating",
        VmLifecycle::Serving(_) => "Serving",
        VmLifecycle::Receiving(_) => "Receiving",
        VmLifecycle::NotStarted { .. } => "NotStarted",
        VmLifecycle::Unanswered(_) => "Unanswered",
        VmLifecycle::Busy(_) => "Busy",
        VmLifecycle::Starting(_) => "Starting",
        VmLifecycle::Transitioning(_) => "Transitioning",
        VmLifecycle::TearingDown(_) => "TearingDown",
        VmLifecycle::HandedOver { .. } => "HandedOver",
    }
}

/// A VMM whose VM is in this state.
fn vmm_in(state: &str) -> Vmm {
    let (inbox_sender, _inbox) = Inbox::new().unwrap();
    let mut vmm = Vmm::new(Host::open().unwrap(), inbox_sender, false, ChildLogging::default());
    vmm.vm = in_state(state);
    vmm.progress = match &vmm.vm {
        VmLifecycle::Migrating { sending, .. } | VmLifecycle::Serving(sending) => {
            Some(Arc::clone(&sending.progress))
        }
        VmLifecycle::Receiving(receiving) => Some(Arc::clone(&receiving.progress)),
        _ => None,
    };
    vmm
}

/// What a request comes to in a state.
fn outcome(state: &str, request: VmmRequest) -> String {
    let mut vmm = vmm_in(state);
    let before = name_of(&vmm.vm);
    let (call, mut answer) = call_for_tests("asked", request);
    let waits = Between { vm: &vmm.vm, has_arrived: false }.waits(call.request());
    let next = vmm.call(call);
    let told = match answer.try_recv() {
        Ok(Ok(_)) => Some("200".to_owned()),
        Ok(Err(error)) => Some(error.kind.http_status().to_string()),
        Err(_) => None,
    };
    let after = name_of(&vmm.vm);
    // What another thread carries out since the request may have been answered by that already.
    let told = told.filter(|_| after == before || after != "Busy");
    let mut outcome = match (next, told) {
        (Next::Exit(_), _) => "ends".to_owned(),
        (Next::Fail(error), _) => panic!("{error}"),
        (Next::Continue, Some(status)) => status,
        (Next::Continue, None) if waits => "waits".to_owned(),
        (Next::Continue, None) => "later".to_owned(),
    };
    if after != before {
        write!(outcome, ">{after}").unwrap();
    }
    outcome
}

#[test]
fn every_request_is_answered_by_the_table_in_every_state() {
    if !test_skip::kvm() {
        return;
    }
    let mut differs = String::new();
    let rows: Vec<_> = requests().iter().map(row_of).collect();
    for (at, row) in rows.iter().enumerate() {
        let expected = TABLE.iter().find(|(name, _)| name == row).map(|(_, cells)| cells);
        let cells: Vec<_> =
            STATES.iter().map(|state| outcome(state, requests().swap_remove(at))).collect();
        if expected.is_none_or(|expected| cells != expected) {
            writeln!(differs, "(\"{row}\", {cells:?}),").unwrap();
        }
    }
    assert!(differs.is_empty(), "these rows are another:\n{differs}");
    assert_eq!(rows.len(), TABLE.len(), "each request has one row");
}

/// Its migration would otherwise send a guest that is about to reset, until a time limit ends that.
#[test]
fn a_guest_that_ends_cancels_its_migration_until_it_is_handed_over() {
    if !test_skip::kvm() {
        return;
    }
    const MACHINE: u64 = 7;
    let id = || "device".to_owned();
    for (event, ends) in [
        (GuestEvent::Reset, true),
        (GuestEvent::TripleFault { index: 0 }, true),
        (GuestEvent::WatchdogExpired, true),
        (GuestEvent::Shutdown, true),
        (GuestEvent::VcpuStopped { index: 0, reason: StopReason::Shutdown }, true),
        (GuestEvent::Panicked { event: "panic" }, false),
        (GuestEvent::Ejected, false),
        (GuestEvent::DeviceWanted { id: id() }, false),
        (GuestEvent::WithheldDevice, false),
        (GuestEvent::LongMapping { left: Duration::ZERO }, false),
        (GuestEvent::DiskFull { id: id() }, false),
    ] {
        for (state, number) in [("Migrating", MACHINE), ("Migrating", 6), ("Serving", MACHINE)] {
            let mut vmm = vmm_in(state);
            vmm.machine_number = MACHINE;
            vmm.note_guest_event(number, event.clone(), Instant::now());
            let (VmLifecycle::Migrating { sending, .. } | VmLifecycle::Serving(sending)) = &vmm.vm
            else {
                panic!("the state is another");
            };
            let expected = ends && state == "Migrating" && number == MACHINE;
            assert_eq!(sending.cancel.is_cancelled(), expected, "{event:?} {state} {number}");
        }
    }
}
