// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Following a migration with `ch-remote`: what is printed on a terminal and elsewhere, and the exit
//! code for each end.

use std::io::Read as _;
use std::process::{Child, Command, Stdio};

use vm_migration::protocol::message::Command as Word;

use crate::cuts::{Stopped, stop_at};
use crate::harness::migrate::Reception;
use crate::harness::relay::{self, Point, Row, Setting};
use crate::harness::vmm::{CH_REMOTE, finish};
use crate::harness::{Mode, Suite, Transport, Vmm, free_port, skip, wait_for};

pub fn add(suite: &mut Suite) {
    for mode in [Mode::Precopy, Mode::Postcopy] {
        let name = mode.name();
        suite.add(&format!("watch::{name}_lines_of_both_sides"), move || lines(mode));
        suite.add(&format!("watch::{name}_bar_on_a_terminal"), move || bar(mode));
    }
    suite.add("watch::exit_code_of_a_failure", failure);
    suite.add("watch::told_of_a_failure_the_guest_can_be_paused", paused_at_once);
    suite.add("watch::exit_code_of_a_cancel", cancel);
    suite.add("watch::continues_while_in_doubt", doubt);
    suite.add("watch::exit_code_of_a_vmm_that_is_gone", gone);
    suite.add("watch::nothing_to_watch", nothing);
}

fn source() -> Vmm {
    Vmm::boot(1, "size=192M,shared=on", "workload=random-write mem=128M")
}

fn option(reception: &Reception, mode: Mode) -> String {
    format!(
        "destination_url={},memory_mode={},timeout_s=4,timeout_strategy=ignore",
        reception.url,
        mode.name()
    )
}

/// Waits for a child: exit code, stdout, stderr.
fn end(child: Child) -> (Option<i32>, String, String) {
    let output = finish(child);
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status.code(), text(&output.stdout), text(&output.stderr))
}

/// Both sides see every phase that lasts, and the end, although the source ends with it.
fn lines(mode: Mode) {
    let (mut source, destination) = (source(), Vmm::empty());
    let reception = Reception::start(&destination, Transport::Tcp, mode);
    let (there, first) = watcher(&destination);
    assert_eq!(first, "listen\n");
    let here = source.remote_spawn(&["send-migration", "--watch", &option(&reception, mode)]);
    for child in [here, there] {
        let (code, out, error) = end(child);
        assert_eq!(code, Some(0), "{out}{error}");
        let last = out.lines().last().unwrap_or_default();
        assert!(last.starts_with("done in ") && last.contains(" of memory"), "{out}");
        assert!(!out.contains('\u{1b}') && !out.contains('\r'), "{out:?}");
    }
    reception.finish();
    assert_eq!(source.wait_for_exit(), 0, "{}", source.output());
    // A later request gets the report at once.
    let (code, out, _) = end(destination.remote_spawn(&["migration-progress", "--watch"]));
    assert_eq!(code, Some(0), "{out}");
    if mode == Mode::Postcopy {
        assert!(out.contains("faults"), "{out}");
    }
    destination.verify();
    destination.shut_down();
}

/// `script` gives it a terminal. The guest is large enough for the bar to be drawn before it moved.
fn bar(mode: Mode) {
    let mut source = Vmm::boot(1, "size=1G,shared=on", "workload=random-write mem=900M prefill=1");
    source.wait_for_heartbeat();
    let destination = Vmm::empty();
    let reception = Reception::start(&destination, Transport::Tcp, mode);
    let option = option(&reception, mode);
    let command = format!(
        "stty cols 100; exec {CH_REMOTE} --api-socket {} send-migration --watch {option}",
        source.socket().display()
    );
    let child = Command::new("script")
        .args(["--quiet", "--return", "--command", &command, "/dev/null"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    let Ok(child) = child else { skip("there is no 'script' here") };
    let (code, out, error) = end(child);
    assert_eq!(code, Some(0), "{out}{error}");
    assert!(out.contains('\u{1b}'), "nothing was drawn: {out:?}");
    assert!(out.contains(" %"), "{out:?}");
    assert!(out.contains("done in "), "{out:?}");
    reception.finish();
    assert_eq!(source.wait_for_exit(), 0, "{}", source.output());
    destination.verify();
    destination.shut_down();
}

fn failure() {
    let source = source();
    let url = format!("tcp:127.0.0.1:{}", free_port());
    for flag in ["--wait", "--watch"] {
        let (code, _, error) = end(source.remote_spawn(&["send-migration", flag, &url]));
        assert_eq!(code, Some(1), "{error}");
        assert!(error.contains("migration failed on the source in phase connect"), "{error}");
        assert!(error.contains("the guest continues at the source"), "{error}");
    }
    source.verify();
    source.shut_down();
}

/// A client that is told that a migration failed and the guest is here finds it here.
fn paused_at_once() {
    let source = source();
    let api = source.api();
    for _ in 0..100 {
        let url = format!(r#"{{"destination_url":"tcp:127.0.0.1:{}"}}"#, free_port());
        api.put("vm.send-migration", &url).ok();
        wait_for("the failure", || {
            let phase = api.get("vm.migration-progress").json()["phase"].clone();
            (phase == "failed").then_some(())
        });
        api.put("vm.pause", "").ok();
        api.put("vm.resume", "").ok();
    }
    source.verify();
    source.shut_down();
}

fn row(command: Word) -> Row {
    let fits = |row: &Row| {
        (row.command, row.point, row.setting) == (command, Point::Message, Setting::Usual)
    };
    relay::rows(Mode::Precopy).into_iter().find(fits).expect("a row")
}

/// A watcher that has looked once, and its first line.
fn watcher(vmm: &Vmm) -> (Child, String) {
    let mut child = vmm.remote_spawn(&["migration-progress", "--watch"]);
    let out = child.stdout.as_mut().expect("a pipe");
    let mut line = Vec::new();
    while line.last() != Some(&b'\n') {
        // Byte by byte: what follows is for a client that waits for its end.
        let mut byte = [0];
        assert_eq!(out.read(&mut byte).expect("a line"), 1, "it ended without a line");
        line.push(byte[0]);
    }
    (child, String::from_utf8_lossy(&line).into_owned())
}

fn cancel() {
    let Stopped { source, destination, relay, reception } = stop_at(row(Word::Memory));
    let watchers = [watcher(&source).0, watcher(&destination).0];
    source.remote_ok(&["migration-cancel"]);
    relay.cut();
    let [here, there] = watchers.map(end);
    assert_eq!(here.0, Some(3), "{here:?}");
    assert!(here.2.contains("cancelled"), "{here:?}");
    // At the destination it is the other side that gave up.
    assert_eq!(there.0, Some(1), "{there:?}");
    reception.finish();
    source.verify();
    source.shut_down();
}

fn doubt() {
    let Stopped { mut source, destination, relay, reception } = stop_at(row(Word::Confirm));
    let mut watchers = [watcher(&source).0, watcher(&destination).0];
    relay.cut();
    destination.wait_for_event("migration-in-doubt");
    wait_for("the source to know", || {
        let document = source.api().get("vm.migration-progress").ok().json();
        (document["phase"] == "in-doubt").then_some(())
    });
    for watcher in &mut watchers {
        assert!(watcher.try_wait().expect("a child").is_none(), "nothing has ended yet");
    }
    source.remote_ok(&["migration-recover", &reception.url]);
    for watcher in watchers {
        let (code, out, error) = end(watcher);
        assert_eq!(code, Some(0), "{out}{error}");
    }
    assert!(reception.finish().status.success(), "{}", destination.output());
    assert_eq!(source.wait_for_exit(), 0, "{}", source.output());
    destination.shut_down();
}

fn gone() {
    let Stopped { mut source, relay, reception, .. } = stop_at(row(Word::Memory));
    let (watcher, _) = watcher(&source);
    source.signal(libc::SIGKILL);
    let (code, _, error) = end(watcher);
    assert_eq!(code, Some(4), "{error}");
    assert!(error.contains("check the other side"), "{error}");
    relay.cut();
    reception.finish();
}

fn nothing() {
    let vmm = Vmm::empty();
    let (code, _, error) = end(vmm.remote_spawn(&["migration-progress", "--watch"]));
    assert_eq!(code, Some(1), "{error}");
    assert!(error.contains("there is no migration to follow"), "{error}");
    vmm.shut_down();
}
