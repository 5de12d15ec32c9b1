// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The connection is lost between the acknowledgement of the handover and its confirmation, or the
//! guest cannot be started where it has arrived: it is kept, whatever is asked meanwhile.

use std::fs;

use tempfile::TempDir;
use vm_migration::protocol::message::Command;

use crate::cuts::{Stopped, stop_at};
use crate::harness::migrate::{Reception, send_option};
use crate::harness::relay::{Link, Point, Relay, Row, Setting};
use crate::harness::vmm::finish;
use crate::harness::{Mode, Suite, Transport, Vmm, VmmBuilder, wait_for};

pub fn add(suite: &mut Suite) {
    for mode in [Mode::Precopy, Mode::Postcopy] {
        let name = mode.name();
        suite.add(&format!("in_doubt::{name}_nothing_but_the_source_ends_it"), move || waits(mode));
        suite.add(&format!("in_doubt::{name}_source_that_goes_on_says_so"), move || goes_on(mode));
        suite.add(&format!("in_doubt::{name}_a_person_who_insists_ends_it"), move || insists(mode));
    }
    suite.add("in_doubt::a_disk_that_is_taken_keeps_the_guest_standing", taken);
    suite.add("in_doubt::a_guest_that_stands_is_not_ended_while_its_pages_come", standing);
}

/// The source has handed the guest over, and its word is on its way.
fn confirm(mode: Mode) -> Row {
    let (link, setting) = (Link::Control, Setting::Usual);
    Row { mode, link, command: Command::Confirm, point: Point::Message, setting }
}

fn text(output: &std::process::Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Asks for what must be refused in doubt, in words that say why.
#[track_caller]
fn refused(vmm: &Vmm, name: &str, word: &str) {
    let answer = vmm.api().put(name, "");
    assert_eq!(answer.status, 409, "{name}: {answer:?}");
    assert!(answer.body.contains(word), "{name}: {answer:?}");
}

/// What is asked before and after the cut changes nothing; the source that can be reached again
/// completes it.
fn waits(mode: Mode) {
    let Stopped { mut source, destination: mut there, relay, reception } = stop_at(confirm(mode));
    let cancel = there.remote_spawn(&["migration-cancel"]);
    there.wait_for_event("migration-cancelling");
    there.signal(libc::SIGTERM);
    wait_for("the log", || there.output().contains("told to end").then_some(()));
    relay.cut();
    there.wait_for_event("migration-in-doubt");
    let cancelled = finish(cancel);
    assert_eq!(cancelled.status.code(), Some(1), "{cancelled:?}");
    assert!(text(&cancelled).contains("which of the two has it"), "{cancelled:?}");
    for name in ["vm.migration-cancel", "vmm.shutdown", "vm.shutdown", "vm.reboot", "vm.pause"] {
        refused(&there, name, "which of the two has it");
    }
    refused(&there, "vm.delete", "force");
    there.signal_again(libc::SIGTERM);
    wait_for("the log", || there.output().contains("told to end; a second request").then_some(()));
    let info = there.api().get("vm.info").ok().json();
    assert_eq!(info["state"], "Paused", "{info}");
    assert!(info["in_doubt"].as_str().is_some_and(|why| !why.is_empty()), "{info}");
    let progress = there.api().get("vm.migration-progress").ok().json();
    assert_eq!(progress["phase"], "in-doubt", "{progress}");
    let phase = if mode == Mode::Precopy { "in-doubt" } else { "postcopy-paused" };
    wait_for("the source to know", || {
        let document = source.api().get("vm.migration-progress").ok().json();
        (document["phase"] == phase).then_some(())
    });
    source.remote_ok(&["migration-recover", &reception.url]);
    let output = reception.finish();
    assert!(output.status.success(), "{output:?}\n{}", there.output());
    assert_eq!(source.wait_for_exit(), 0, "{}", source.output());
    there.wait_for_work(2_000);
    assert_eq!(there.api().state(), "Running");
    assert!(there.api().get("vm.info").ok().json()["in_doubt"].is_null());
    there.verify();
    there.shut_down();
}

/// The acknowledgement does not arrive: the source continues to run the guest, and tells the destination
/// as soon as there is a way.
fn goes_on(mode: Mode) {
    let row = Row { command: Command::Complete, point: Point::Answer, ..confirm(mode) };
    let Stopped { source, destination: there, relay, reception } = stop_at(row);
    relay.cut_and_heal();
    source.wait_for_event("migration-failed");
    let output = reception.finish();
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert!(text(&output).contains("continues to run the guest"), "{output:?}");
    assert_eq!(there.api().get("vm.info").status, 404);
    wait_for("the VM to run on", || (source.api().state() == "Running").then_some(()));
    crate::harness::migrate::migrate(source, &there, Transport::Tcp, mode);
    there.wait_for_work(2_000);
    there.verify();
    there.shut_down();
}

/// A second signal, or a request with force, gives up what is in doubt.
fn insists(mode: Mode) {
    let Stopped { source, destination: mut there, relay, reception } = stop_at(confirm(mode));
    relay.cut();
    // The event is that of the thread that receives; the one that takes signals hears of it after that.
    wait_for("the doubt", || {
        let info = there.api().get("vm.info");
        (info.status == 200 && info.json()["in_doubt"].is_string()).then_some(())
    });
    for times in 1..=2 {
        if times == 1 {
            there.signal(libc::SIGTERM);
        } else {
            there.signal_again(libc::SIGTERM);
        }
        if times == 1 {
            wait_for("the log", || {
                there.output().contains("told to end; a second request").then_some(())
            });
            there.api().get("vmm.ping").ok();
        }
    }
    assert_eq!(there.wait_for_exit(), 0, "{}", there.output());
    assert_eq!(reception.finish().status.code(), Some(1));
    // What has handed it over is a thread, which may be ahead of the one that answers.
    wait_for("the source to know", || (source.api().get("vm.info").status != 200).then_some(()));
    source.api().put("vm.delete", r#"{"force":true}"#).ok();
    source.shut_down();
}

/// A guest that has arrived and was not started, because a third VM has its disk.
struct Taken {
    source: Vmm,
    there: Vmm,
    third: Vmm,
    /// Through which its pages come.
    _relay: Relay,
    /// Of the disk.
    _folder: TempDir,
}

impl Taken {
    /// Sent with these keys besides.
    fn new(keys: &str) -> Self {
        let folder = TempDir::with_prefix("godwit-disk-").expect("a folder");
        let path = folder.path().join("disk");
        fs::File::create(&path).and_then(|file| file.set_len(8 << 20)).expect("a file");
        let option = format!("path={}", path.display());
        let with_disk = || {
            VmmBuilder::guest(1, "size=96M,shared=on", "workload=random-write mem=32M")
                .with(&["--disk", &option])
        };
        let source = with_disk().start();
        source.wait_for_work(2_000);
        let there = Vmm::empty();
        let reception = Reception::start(&there, Transport::Tcp, Mode::Postcopy);
        let relay = Relay::start(&reception.url, Mode::Postcopy, Some(confirm(Mode::Postcopy)));
        let option = format!("{}{keys}", send_option(&relay.url, Mode::Postcopy));
        source.remote_ok(&["send-migration", &option]);
        assert!(relay.wait(std::time::Duration::from_secs(20)), "{}", source.output());
        let third = with_disk().start();
        relay.release();
        let output = reception.finish();
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        let told = text(&output);
        assert!(told.contains("was not started") && told.contains("disk"), "{told}");
        Self { source, there, third, _relay: relay, _folder: folder }
    }
}

/// It is all that there is of the guest: a request that knows nothing of that does not end it.
fn standing() {
    // So slowly that the last page does not come within the test.
    let Taken { source, there, third, _relay, _folder } = Taken::new(",bandwidth=100K");
    refused(&there, "vmm.shutdown", "still arriving");
    assert_eq!(there.api().state(), "Paused");
    there.api().put("vm.delete", "").ok();
    assert_eq!(there.api().get("vm.info").status, 404);
    third.shut_down();
    // What is left of it is nothing to the next VM here.
    source.api().put("vm.delete", r#"{"force":true}"#).ok();
    source.shut_down();
    there.shut_down();
}

/// A third VM has the disk when the destination wants to start its guest.
fn taken() {
    let Taken { mut source, there, third, _relay, _folder } = Taken::new("");
    // All its pages come, and the source is free.
    there.wait_for_event("postcopy-migration-completed");
    assert_eq!(source.wait_for_exit(), 0, "{}", source.output());
    assert_eq!(there.api().state(), "Paused");
    let again = there.api().put("vm.resume", "");
    assert!(again.status >= 400 && again.body.contains("disk"), "{again:?}");
    assert_eq!(there.api().state(), "Paused");
    third.shut_down();
    there.api().put("vm.resume", "").ok();
    there.wait_for_work(2_000);
    there.verify();
    there.shut_down();
}
