// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Networks that another process serves over vhost-user, in a VM that moves or is saved: the driver goes on with another
//! connection, with the pairs of queues that it had in use.

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::disks::{write_more, written};
use crate::harness::migrate::{Reception, failure_of, migrate, migrate_by, send_option};
use crate::harness::{Mode, Suite, Transport, Vmm, VmmBuilder};
use crate::vhost_peers::NET_MOVES;
use crate::vhost_user::BackEnd;

pub fn add(suite: &mut Suite) {
    suite.add("vhost_moves::a_network_is_saved_and_restored", restores);
    suite.add("vhost_moves::a_network_moves_in_precopy", moves);
    suite.add("vhost_moves::a_back_end_that_is_lost_meanwhile_keeps_the_guest_here", lost);
    suite.add("vhost_moves::what_cannot_move_is_refused_by_name", refusals);
}

fn started(back_end: &BackEnd) -> Vmm {
    let vmm = NET_MOVES.vm(&(NET_MOVES.text)(&back_end.socket())).start();
    write_more(&vmm, 100);
    vmm
}

/// The state in a snapshot.
fn state(folder: &TempDir) -> String {
    let text = std::fs::read(folder.path().join("state.json")).expect("a state");
    let state: Value = serde_json::from_slice(&text).expect("JSON");
    state.to_string()
}

fn restores() {
    let back_end = NET_MOVES.back_end();
    let mut vmm = started(&back_end);
    for _ in 0..3 {
        let folder = TempDir::new().expect("a folder");
        let url = format!("file://{}", folder.path().display());
        vmm.remote_ok(&["pause"]);
        let before = written(&vmm);
        vmm.remote_ok(&["snapshot", &url]);
        vmm.shut_down();
        let state = state(&folder);
        assert!(state.contains("\"kind\":\"vhost-user-net\""), "{state}");
        let pairs = [1, 2].map(|pairs| format!("\"active_pairs\":{pairs}"));
        assert!(pairs.iter().any(|pairs| state.contains(pairs)), "{state}");
        vmm = VmmBuilder::new::<&str>(&[]).start();
        let body = json!({"source_url": url, "memory_restore_mode": "OnDemand"});
        let refused = vmm.api().put("vm.restore", &body.to_string());
        assert!(refused.status >= 400 && refused.body.contains("another process"), "{refused:?}");
        vmm.remote_ok(&["restore", &format!("source_url={url},resume=on")]);
        write_more(&vmm, 100);
        assert!(written(&vmm) >= before + 100);
    }
    vmm.remote_ok(&["reboot"]);
    write_more(&vmm, 100);
    vmm.shut_down();
}

fn moves() {
    let back_end = NET_MOVES.back_end();
    let mut vmm = started(&back_end);
    for _ in 0..4 {
        let destination = VmmBuilder::new::<&str>(&[]).start();
        // Postcopy is not switched to.
        migrate_by(vmm, &destination, Transport::Unix, Mode::Auto, |url| {
            send_option(url, Mode::Auto)
        });
        write_more(&destination, 100);
        vmm = destination;
    }
    let counters = vmm.api().get("vm.counters").ok().json();
    assert!(counters["peer"]["interrupts"].as_u64() > Some(0), "{counters}");
    vmm.remote_ok(&["reboot"]);
    write_more(&vmm, 100);
    let destination = VmmBuilder::new::<&str>(&[]).start();
    migrate(vmm, &destination, Transport::Tcp, Mode::Precopy);
    write_more(&destination, 100);
    destination.shut_down();
}

/// What it has taken and not answered is in no state.
fn lost() {
    let mut back_end = NET_MOVES.back_end();
    let vmm = started(&back_end);
    let destination = VmmBuilder::new::<&str>(&[]).start();
    let reception = Reception::start(&destination, Transport::Unix, Mode::Precopy);
    // Too slow to end by itself.
    let option = format!("destination_url={},downtime_ms=1,bandwidth=1M", reception.url);
    vmm.remote_ok(&["send-migration", &option]);
    vmm.wait_for_event("migration-started");
    back_end.kill();
    let why = failure_of(&vmm);
    assert!(why.contains("'peer'") && why.contains("is lost"), "{why}");
    // The guest runs on without it.
    assert_eq!(vmm.api().state(), "Running");
    vmm.shut_down();
}

fn refusals() {
    let mut back_end = NET_MOVES.back_end();
    let vmm = started(&back_end);
    let text = |output: std::process::Output| {
        assert!(!output.status.success(), "{output:?}");
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    let postcopy =
        text(vmm.remote(&["send-migration", &send_option("unix:/nowhere", Mode::Postcopy)]));
    assert!(postcopy.contains("another process"), "{postcopy}");

    // A destination without a back end: the guest stays.
    let elsewhere = VmmBuilder::new::<&str>(&[]).start();
    let rule = ",allow=[/:payload,/nowhere:console]";
    let reception = Reception::start_with(&elsewhere, Transport::Unix, Mode::Precopy, rule);
    vmm.remote_ok(&["send-migration", &send_option(&reception.url, Mode::Precopy)]);
    let why = failure_of(&vmm);
    assert!(why.contains("socket of network device"), "{why}");
    write_more(&vmm, 100);

    back_end.kill();
    vmm.wait_for_event("back-end-lost");
    vmm.remote_ok(&["pause"]);
    let url = format!("file://{}", TempDir::new().expect("a folder").path().display());
    let lost = text(vmm.remote(&["snapshot", &url]));
    assert!(lost.contains("'peer'") && lost.contains("is lost"), "{lost}");
    vmm.remote_ok(&["resume"]);
    vmm.shut_down();
}
