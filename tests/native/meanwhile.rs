// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What people, the system and the guest do in the middle of a migration: requests to both VMMs,
//! cancels, signals, a guest that resets. The migration is held at every message for it.

use std::process::Output;

use crate::cuts::{Stopped, ended, is_unheard, stop_at};
use crate::harness::faults::Frozen;
use crate::harness::relay::{self, Link, Point, Row, Setting};
use crate::harness::vmm::finish;
use crate::harness::{Mode, Suite, Transport, Vmm, image, wait_for};
use vm_migration::protocol::message::Command;

pub fn add(suite: &mut Suite) {
    for mode in [Mode::Precopy, Mode::Postcopy] {
        let name = mode.name();
        for row in rows(mode) {
            let at = format!("{:?}_{:?}", row.link, row.command).to_lowercase();
            suite.add(&format!("meanwhile::{name}_requests_at_{at}"), move || requests(row));
            suite.add(&format!("meanwhile::{name}_cancel_at_{at}"), move || cancel(row));
            if guest_runs(row) {
                suite.add(&format!("meanwhile::{name}_reset_at_{at}"), move || reset(row));
            }
        }
        suite
            .add(&format!("meanwhile::{name}_reset_as_it_is_stopped"), move || reset_stopped(mode));
        suite.add(&format!("meanwhile::{name}_source_told_to_end"), move || source_ends(mode));
        suite.add(&format!("meanwhile::{name}_source_told_twice"), move || source_ends_now(mode));
        suite.add(&format!("meanwhile::{name}_destination_told_to_end"), move || {
            destination_ends(mode);
        });
        suite.add(&format!("meanwhile::{name}_destination_told_too_late"), move || {
            destination_stays(mode);
        });
    }
    suite.add("meanwhile::nothing_to_cancel", nothing_to_cancel);
    suite.add("meanwhile::cancel_of_one_that_is_awaited", awaited);
}

/// The messages of an ordinary migration.
fn rows(mode: Mode) -> Vec<Row> {
    let mut rows = relay::rows(mode);
    rows.retain(|row| row.setting == Setting::Usual && row.point == Point::Message);
    rows
}

/// The destination does not have the guest yet, whatever the source does.
fn is_early(row: Row) -> bool {
    row.link == Link::Control && !matches!(row.command, Command::Confirm | Command::PostcopyDone)
}

/// It runs at the destination, and its pages still arrive.
fn is_late(row: Row) -> bool {
    row.link != Link::Control || row.command == Command::PostcopyDone
}

/// The guest runs while the relay holds this message, and its code is where it runs.
fn guest_runs(row: Row) -> bool {
    let early = [Command::Start, Command::Capabilities, Command::Config, Command::Memory];
    row.link == Link::Control && (early.contains(&row.command) || is_late(row))
}

/// Puts a body to a VMM that must say no, in words that name the reason.
#[track_caller]
fn refused(vmm: &Vmm, name: &str, body: &str) {
    let answer = vmm.api().put(name, body);
    assert!([404, 405, 409].contains(&answer.status), "{name}: {answer:?}");
    let named = ["migra", "arriv", "VM"].iter().any(|word| answer.body.contains(word));
    assert!(named, "{name}: {answer:?}");
}

const SEND: &str = r#"{"destination_url":"tcp:127.0.0.1:1"}"#;
const RECEIVE: &str = r#"{"receiver_url":"tcp:127.0.0.1:0"}"#;

/// Nothing that is asked meanwhile changes the migration, and everything is answered at once.
fn requests(row: Row) {
    let Stopped { mut source, destination, relay, reception } = stop_at(row);
    let names = ["vm.shutdown", "vm.delete", "vm.pause", "vm.resume", "vm.reboot", "vmm.shutdown"];
    for name in names {
        refused(&source, name, "");
    }
    for vmm in [&source, &destination] {
        vmm.api().get("vmm.ping").ok();
        refused(vmm, "vm.create", &crate::lifecycle::config(64));
        refused(vmm, "vm.boot", "");
        refused(vmm, "vm.send-migration", SEND);
        refused(vmm, "vm.receive-migration", RECEIVE);
        vmm.api().get("vm.migration-progress").ok();
    }
    if is_late(row) {
        for name in ["vm.pause", "vm.shutdown", "vm.delete", "vm.reboot", "vmm.shutdown"] {
            refused(&destination, name, "");
        }
        // Its pages are sent by a thread that may be ahead of the one that answers.
        let handed_over = || (source.api().get("vm.info").status == 409).then_some(());
        wait_for("the source to have handed the VM over", handed_over);
    } else {
        for name in ["vm.pause", "vm.resume", "vm.shutdown", "vm.reboot"] {
            refused(&destination, name, "");
        }
        assert_eq!(source.api().state(), "Running");
    }
    relay.release();
    assert!(reception.finish().status.success(), "{}", destination.output());
    // A client that has asked for the progress is waited for.
    ended(&source);
    assert_eq!(source.wait_for_exit(), 0, "{}", source.output());
    destination.wait_for_work(2_000);
    destination.verify();
    destination.shut_down();
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// A cancel at the destination ends the migration until the handover, and is refused after it.
/// (At the source: every case of `cuts::*_stalled`.)
fn cancel(row: Row) {
    let Stopped { mut source, destination, relay, reception } = stop_at(row);
    if is_early(row) {
        let printed = destination.remote_ok(&["migration-cancel"]);
        let answer: serde_json::Value = serde_json::from_str(&printed).expect("JSON");
        assert_eq!(
            (&answer["side"], &answer["guest"]),
            (&"destination".into(), &"not-here".into())
        );
        let output = reception.finish();
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        assert!(text(&output).contains("cancelled"), "{output:?}");
        destination.wait_for_event("migration-cancelled");
        relay.cut();
        source.wait_for_event("migration-failed");
        assert_eq!(destination.api().get("vm.info").status, 404);
        source.wait_for_work(2_000);
        source.verify();
        crate::harness::migrate::migrate(source, &destination, Transport::Tcp, row.mode);
    } else {
        let asked = [&source, &destination].map(|vmm| vmm.remote_spawn(&["migration-cancel"]));
        let answers = if is_late(row) {
            let answers = asked.map(finish);
            relay.release();
            answers
        } else {
            // The answer has to wait until it is known where the guest is.
            for vmm in [&source, &destination] {
                vmm.wait_for_event("migration-cancelling");
            }
            relay.release();
            asked.map(finish)
        };
        for output in answers {
            assert_eq!(output.status.code(), Some(1), "{output:?}");
            let text = text(&output);
            let place = ["can no longer be cancelled", "no migration is in progress"];
            assert!(place.iter().any(|place| text.contains(place)), "{text}");
        }
        assert!(reception.finish().status.success(), "{}", destination.output());
        assert_eq!(source.wait_for_exit(), 0, "{}", source.output());
    }
    destination.wait_for_work(2_000);
    destination.verify();
    destination.shut_down();
}

pub fn crash(vmm: &Vmm) {
    crash_guest(&vmm.guest());
}

/// Makes the guest execute what it cannot, at its next instruction: a triple fault, which resets.
pub fn crash_guest(guest: &guest_reader::Guest) {
    const BREAKPOINT: u8 = 0xcc;
    let bytes = std::fs::read(image()).expect("the image");
    let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
    let headers = usize::try_from(word(0x20)).expect("an offset");
    let count = usize::from(u16::from_le_bytes([bytes[0x38], bytes[0x39]]));
    for at in (0..count).map(|index| headers + index * 56) {
        let (is_loaded, is_code) = (bytes[at] == 1, bytes[at + 4] & 1 != 0);
        if is_loaded && is_code {
            let (gpa, len_bytes) = (word(at + 24), word(at + 32));
            for page in (gpa..gpa + len_bytes).step_by(4096) {
                let end = (page & !4095) + 4096;
                let len = usize::try_from(end.min(gpa + len_bytes) - page).expect("a length");
                // Pages that have not arrived are not being executed.
                let _ = guest.memory().write(page, &vec![BREAKPOINT; len]);
            }
        }
    }
}

/// A guest that resets while it is being sent stays, and one that has arrived resets when it is
/// whole.
fn reset(row: Row) {
    let Stopped { mut source, destination, relay, reception } = stop_at(row);
    if is_late(row) {
        crash(&destination);
        wait_for("the log", || {
            destination.output().contains("waits until its last page is here").then_some(())
        });
        relay.release();
        assert!(reception.finish().status.success(), "{}", destination.output());
        assert_eq!(source.wait_for_exit(), 0, "{}", source.output());
        destination.wait_for_event("postcopy-migration-completed");
        destination.wait_for_event("rebooted");
        destination.wait_for_heartbeat();
        destination.verify();
        return destination.shut_down();
    }
    crash(&source);
    // A peer that says nothing for too long would end the migration as well, and is not what ends this one.
    let reason = crate::harness::migrate::failure_of(&source);
    let ends = ["cancelled", "rebooting or shutting down"];
    assert!(ends.iter().any(|end| reason.contains(end)), "{reason}");
    assert!(
        source.output().contains("the guest ends or reboots while it is migrated"),
        "{}",
        source.output()
    );
    source.wait_for_event("rebooted");
    relay.cut();
    if is_unheard(row) {
        destination.remote_ok(&["migration-cancel"]);
    }
    assert_eq!(reception.finish().status.code(), Some(1), "{}", destination.output());
    wait_for("the guest to run again", || (source.api().state() == "Running").then_some(()));
    source.wait_for_heartbeat();
    crate::harness::migrate::migrate(source, &destination, Transport::Tcp, row.mode);
    destination.wait_for_work(2_000);
    destination.verify();
    destination.shut_down();
}

/// The guest has reset, and the migration stops it before the VMM has heard of that: it continues at the source
/// all the same, where it resets.
fn reset_stopped(mode: Mode) {
    let Stopped { source, destination, relay, reception } = stop_at(early(mode));
    let frozen = Frozen::first_thread(&source);
    crash(&source);
    // Its vCPU waits for what happens to it, in no system call of KVM.
    let futex = format!("{} ", libc::SYS_futex);
    wait_for("the end of its vCPU", || {
        let call = std::fs::read_to_string(thread(&source, "vcpu0").join("syscall")).ok()?;
        call.starts_with(&futex).then_some(())
    });
    relay.release();
    let output = reception.finish();
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert!(text(&output).contains("rebooting or shutting down"), "{output:?}");
    drop(frozen);
    let reason = crate::harness::migrate::failure_of(&source);
    assert!(reason.contains("rebooting or shutting down"), "{reason}");
    source.wait_for_event("rebooted");
    wait_for("the guest to run again", || (source.api().state() == "Running").then_some(()));
    source.wait_for_heartbeat();
    crate::harness::migrate::migrate(source, &destination, Transport::Tcp, mode);
    destination.wait_for_work(2_000);
    destination.verify();
    destination.shut_down();
}

/// What the system tells of a thread.
#[track_caller]
fn thread(vmm: &Vmm, name: &str) -> std::path::PathBuf {
    let tasks = std::fs::read_dir(format!("/proc/{}/task", vmm.pid())).expect("its threads");
    let mut paths = tasks.flatten().map(|task| task.path());
    let is_it = |path: &std::path::PathBuf| {
        std::fs::read_to_string(path.join("comm")).is_ok_and(|comm| comm.trim() == name)
    };
    paths.find(is_it).expect("the thread")
}

/// A row in the middle: memory.
fn middle(mode: Mode) -> Row {
    rows(mode).into_iter().find(|row| row.command == Command::Memory).expect("memory")
}

/// A row before the handover.
fn early(mode: Mode) -> Row {
    rows(mode).into_iter().find(|row| row.command == Command::Config).expect("a configuration")
}

/// SIGTERM at the source waits for the end of the migration, and so does a closed terminal.
fn source_ends(mode: Mode) {
    for (row, signal) in [(early(mode), libc::SIGTERM), (middle(mode), libc::SIGHUP)] {
        let Stopped { mut source, destination, relay, reception } = stop_at(row);
        source.signal(signal);
        wait_for("the log", || source.output().contains("told to end").then_some(()));
        source.api().get("vmm.ping").ok();
        relay.release();
        assert!(reception.finish().status.success(), "{}", destination.output());
        assert_eq!(source.wait_for_exit(), 0, "{}", source.output());
        destination.wait_for_work(2_000);
        destination.verify();
        destination.shut_down();
    }
}

/// A second one cancels it, and the guest ends with its VMM.
fn source_ends_now(mode: Mode) {
    let Stopped { mut source, destination, relay, reception } = stop_at(early(mode));
    for times in 1..=2 {
        if times == 1 {
            source.signal(libc::SIGTERM);
        } else {
            source.signal_again(libc::SIGTERM);
        }
        wait_for("the log", || {
            (source.output().matches("told to end").count() == times).then_some(())
        });
    }
    assert_eq!(source.wait_for_exit(), 0, "{}", source.output());
    relay.cut();
    assert_eq!(reception.finish().status.code(), Some(1));
    assert_eq!(destination.api().get("vm.info").status, 404);
    destination.shut_down();
}

/// A destination without a guest ends at once, and the guest stays.
fn destination_ends(mode: Mode) {
    let steps: [fn(&mut Vmm); 2] =
        [|vmm| vmm.signal(libc::SIGTERM), |vmm| drop(vmm.api().put("vmm.shutdown", "").ok())];
    for step in steps {
        let Stopped { source, mut destination, relay, reception } = stop_at(early(mode));
        step(&mut destination);
        assert_eq!(destination.wait_for_exit(), 0, "{}", destination.output());
        assert_eq!(reception.finish().status.code(), Some(1));
        relay.cut();
        source.wait_for_event("migration-failed");
        source.wait_for_work(2_000);
        source.verify();
        source.shut_down();
    }
}

/// From the acknowledgement on the guest counts more.
fn destination_stays(mode: Mode) {
    let confirm = |row: &Row| row.command == Command::Confirm;
    let row = rows(mode).into_iter().find(confirm).expect("a confirmation");
    let Stopped { mut source, mut destination, relay, reception } = stop_at(row);
    destination.signal(libc::SIGTERM);
    wait_for("the log", || destination.output().contains("told to end").then_some(()));
    relay.release();
    assert!(reception.finish().status.success(), "{}", destination.output());
    assert_eq!(source.wait_for_exit(), 0, "{}", source.output());
    destination.wait_for_work(2_000);
    destination.verify();
    destination.shut_down();
}

fn nothing_to_cancel() {
    let vmm = Vmm::empty();
    let none = vmm.remote(&["migration-cancel"]);
    assert_eq!(none.status.code(), Some(1));
    assert!(text(&none).contains("no migration is in progress"), "{none:?}");
    vmm.shut_down();
    let vmm = Vmm::boot(1, "size=64M,shared=on", "workload=idle prefill=0");
    let none = vmm.remote(&["migration-cancel"]);
    assert!(text(&none).contains("no migration is in progress"), "{none:?}");
    vmm.shut_down();
}

/// A destination without a connection.
fn awaited() {
    let vmm = Vmm::empty();
    for _ in 0..3 {
        let reception =
            crate::harness::migrate::Reception::start(&vmm, Transport::Tcp, Mode::Precopy);
        let answer = vmm.api().put("vm.migration-cancel", "").ok().json();
        assert_eq!(answer["guest"], "not-here", "{answer}");
        let output = reception.finish();
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        assert!(text(&output).contains("cancelled"), "{output:?}");
    }
    vmm.shut_down();
}
