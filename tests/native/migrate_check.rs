// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Checks of a migration: what they find between two real processes, that the guest runs meanwhile, that nothing is left
//! behind, and that the real migration to the same destination, which has waited on, succeeds.

use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::harness::migrate::{Reception, migrate_to, send_option};
use crate::harness::{Mode, Suite, Transport, Vmm, VmmBuilder, is_root, skip};

/// Exit code of a migration that would not succeed.
const NOT_POSSIBLE: i32 = 7;

pub fn add(suite: &mut Suite) {
    for mode in [Mode::Precopy, Mode::Postcopy] {
        let name = format!("migrate_check::{}_is_possible_and_succeeds", mode.name());
        suite.add(&name, move || possible(mode));
    }
    suite.add("migrate_check::of_memory_that_would_be_handed_over", handed_over);
    suite.add("migrate_check::names_all_that_is_missing", missing);
    suite.add("migrate_check::names_a_tap_that_cannot_be_had", no_tap);
    suite.add("migrate_check::names_what_no_rule_allows", not_allowed);
    suite.add("migrate_check::of_a_paused_vm_leaves_it_paused", paused);
    suite.add("migrate_check::is_cancelled_and_refuses_a_second_one", cancelled);
}

const CMDLINE: &str = "workload=random-write mem=32M";

/// The answer to a check, and its exit code.
#[track_caller]
fn check(source: &Vmm, url: &str, mode: Mode) -> (Value, i32) {
    let option = format!("destination_url={url},memory_mode={}", mode.name());
    check_with(source, &option)
}

#[track_caller]
fn check_with(source: &Vmm, option: &str) -> (Value, i32) {
    let output = source.remote(&["migrate-check", "--json", option]);
    let answer = serde_json::from_slice(&output.stdout);
    let answer = answer.unwrap_or_else(|error| panic!("{error}: {output:?}\n{}", source.output()));
    (answer, output.status.code().expect("it ended by itself"))
}

fn problems(answer: &Value) -> Vec<&str> {
    let all = answer["problems"].as_array().expect("a list");
    all.iter().map(|problem| problem["text"].as_str().expect("a text")).collect()
}

/// Descriptors that a process has open.
fn descriptors(vmm: &Vmm) -> usize {
    fs::read_dir(format!("/proc/{}/fd", vmm.pid())).expect("it runs").count()
}

/// Memory that a process has populated, in KiB.
fn resident_kib(vmm: &Vmm) -> u64 {
    let text = fs::read_to_string(format!("/proc/{}/status", vmm.pid())).expect("it runs");
    let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("Linux says so");
    line.trim().trim_end_matches(" kB").parse().expect("a number")
}

fn possible(mode: Mode) {
    let source = Vmm::boot(2, "size=192M,shared=on", "workload=random-write mem=64M");
    source.wait_for_work(2_000);
    let destination = Vmm::empty();
    let mut reception = Reception::start(&destination, Transport::Tcp, mode);
    let (before, resident) = (descriptors(&destination), resident_kib(&destination));
    let worked = source.guest().status().expect("a status").iterations();
    for _ in 0..3 {
        let (answer, code) = check(&source, &reception.url, mode);
        assert_eq!(problems(&answer), [""; 0], "{answer}");
        assert_eq!((code, &answer["possible"]), (0, &Value::Bool(true)), "{answer}");
        for measured in ["link_bytes_per_second", "round_trip_us", "dirty_bytes_per_second"] {
            assert!(answer[measured].as_u64() > Some(0), "{measured}: {answer}");
        }
        let memory = answer["memory_bytes"].as_u64().expect("a number");
        assert!((32 << 20..=192 << 20).contains(&memory), "{answer}");
        assert_eq!(answer["postcopy"]["converges"], true, "{answer}");
        assert!(answer["precopy"]["duration_ms"].as_u64() > Some(0), "{answer}");
    }
    assert!(source.guest().status().expect("a status").iterations() > worked, "it did not run");
    let names = source.event_names();
    assert!(!names.iter().any(|name| name.starts_with("migration-")), "{names:?}");
    assert_eq!(source.api().state(), "Running");
    // The last thread ends after its answer. What could have ended it is dropped with the next check.
    crate::harness::wait_for("the descriptors of the checks to be closed", || {
        (descriptors(&destination) <= before + 1).then_some(())
    });
    let grown = resident_kib(&destination).saturating_sub(resident);
    assert!(grown < 16 << 10, "{grown} KiB were left behind");
    assert!(!reception.has_ended(), "the destination waits on");
    let text = source.remote_ok(&["migrate-check", &reception.url]);
    assert!(text.starts_with("possible      yes\n") && text.contains("\nprecopy "), "{text}");
    migrate_to(reception, source, &destination, |url| send_option(url, mode));
    destination.wait_for_work(5_000);
    destination.verify();
    destination.shut_down();
}

fn handed_over() {
    let source = Vmm::boot(1, "size=96M,shared=on", CMDLINE);
    source.wait_for_work(1_000);
    let destination = Vmm::empty();
    let reception = Reception::start(&destination, Transport::Unix, Mode::Precopy);
    let option = |url: &str| format!("destination_url={url},local=on");
    let (answer, code) = check_with(&source, &option(&reception.url));
    assert_eq!(code, 0, "{answer}");
    assert_eq!(answer["memory_bytes"], 0, "nothing is copied: {answer}");
    assert_eq!(answer["precopy"]["converges"], true, "{answer}");
    migrate_to(reception, source, &destination, option);
    destination.wait_for_work(1_000);
    destination.verify();
    destination.shut_down();
}

/// A disk for a VM, in a file.
fn disk(path: &Path) -> String {
    fs::File::create(path).and_then(|file| file.set_len(1 << 20)).expect("a disk");
    path.to_str().expect("UTF-8").to_owned()
}

fn missing() {
    let folder = tempfile::tempdir().expect("a folder");
    let paths = ["one", "two"].map(|name| folder.path().join(name));
    let disks = paths.each_ref().map(|path| disk(path));
    let [one, two] = &disks;
    let source = VmmBuilder::guest(1, "size=96M,shared=on", CMDLINE)
        .with(&["--disk", &format!("path={one},id=one"), &format!("path={two},id=two")])
        .start();
    source.wait_for_work(1_000);
    let destination = Vmm::empty();
    let mut reception = Reception::start(&destination, Transport::Tcp, Mode::Precopy);
    // The source holds both, which is no problem.
    let (answer, code) = check(&source, &reception.url, Mode::Precopy);
    assert_eq!((code, problems(&answer).len()), (0, 0), "{answer}");
    let aside = paths.each_ref().map(|path| path.with_extension("aside"));
    for (path, aside) in paths.iter().zip(&aside) {
        fs::rename(path, aside).expect("it can be renamed");
    }
    let (answer, code) = check(&source, &reception.url, Mode::Precopy);
    assert_eq!((code, &answer["possible"]), (NOT_POSSIBLE, &Value::Bool(false)), "{answer}");
    let found = problems(&answer);
    assert_eq!(found.len(), 2, "{answer}");
    assert!(found[0].contains(one.as_str()) && found[1].contains(two.as_str()), "{answer}");
    assert!(answer["problems"][0]["side"] == "destination", "{answer}");
    // It is measured nevertheless.
    assert!(answer["link_bytes_per_second"].as_u64() > Some(0), "{answer}");
    let output = source.remote(&["migrate-check", &reception.url]);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(text.starts_with("possible      NO\n") && text.contains(two.as_str()), "{text}");
    for (path, aside) in paths.iter().zip(&aside) {
        fs::rename(aside, path).expect("it can be renamed");
    }
    assert!(!reception.has_ended(), "the destination waits on");
    migrate_to(reception, source, &destination, |url| send_option(url, Mode::Precopy));
    destination.wait_for_work(1_000);
    destination.verify();
    destination.shut_down();
}

fn no_tap() {
    if !is_root() {
        skip("only root can make a tap");
    }
    let name = format!("gc{}", std::process::id());
    let source = VmmBuilder::guest(1, "size=96M,shared=on", CMDLINE)
        .with(&["--net", &format!("tap={name},id=lan")])
        .start();
    if source.api().state() != "Running" {
        skip(format!("no tap can be made here: {}", source.output()));
    }
    source.wait_for_work(1_000);
    let powerless = VmmBuilder::new::<&str>(&[])
        .wrapped(&["setpriv", "--bounding-set=-net_admin", "--inh-caps=-net_admin"])
        .start();
    let reception = Reception::start(&powerless, Transport::Tcp, Mode::Precopy);
    // The tap is there as long as the source has it, and is its.
    let (answer, _) = check(&source, &reception.url, Mode::Precopy);
    let all = answer.to_string();
    assert!(all.contains("tap (lan)") && all.contains(&name), "{answer}");
    powerless.remote_ok(&["migration-cancel"]);
    reception.finish();
    let able = Vmm::empty();
    let reception = Reception::start(&able, Transport::Tcp, Mode::Precopy);
    let (answer, code) = check(&source, &reception.url, Mode::Precopy);
    assert_eq!(code, 0, "a tap that the source uses is no problem: {answer}");
    migrate_to(reception, source, &able, |url| send_option(url, Mode::Precopy));
    able.wait_for_work(1_000);
    able.verify();
    able.shut_down();
    powerless.shut_down();
}

fn not_allowed() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = disk(&folder.path().join("disk"));
    let source = VmmBuilder::guest(1, "size=96M,shared=on", CMDLINE)
        .with(&["--disk", &format!("path={path},id=root")])
        .start();
    source.wait_for_work(1_000);
    let destination = Vmm::empty();
    let reception = Reception::start_with(
        &destination,
        Transport::Tcp,
        Mode::Precopy,
        ",allow=[/nonexistent:disk]",
    );
    let (answer, code) = check(&source, &reception.url, Mode::Precopy);
    assert_eq!(code, NOT_POSSIBLE, "{answer}");
    let found = problems(&answer);
    assert!(found.iter().any(|text| text.contains(&path)), "{answer}");
    assert!(found.iter().all(|text| text.contains("no rule")), "{answer}");
    destination.remote_ok(&["migration-cancel"]);
    reception.finish();
    source.wait_for_work(1_000);
    source.verify();
    source.shut_down();
    destination.shut_down();
}

fn paused() {
    let source = Vmm::boot(1, "size=96M,shared=on", CMDLINE);
    source.wait_for_work(1_000);
    source.api().put("vm.pause", "").ok();
    let destination = Vmm::empty();
    let reception = Reception::start(&destination, Transport::Tcp, Mode::Precopy);
    let (answer, code) = check(&source, &reception.url, Mode::Precopy);
    assert_eq!((code, &answer["dirty_bytes_per_second"]), (0, &Value::from(0)), "{answer}");
    assert_eq!(source.api().state(), "Paused");
    source.api().put("vm.resume", "").ok();
    migrate_to(reception, source, &destination, |url| send_option(url, Mode::Precopy));
    destination.wait_for_work(1_000);
    destination.verify();
    destination.shut_down();
}

/// A destination that accepts connections and says nothing.
fn cancelled() {
    let source = Vmm::boot(1, "size=96M,shared=on", CMDLINE);
    source.wait_for_work(1_000);
    let silent = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let url = format!("tcp:{}", silent.local_addr().expect("an address"));
    let waiting = source.remote_spawn(&["migrate-check", &url]);
    let (_stream, _) = silent.accept().expect("it connects");
    let refused = source.remote(&["migrate-check", &url]);
    let text = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert_eq!(refused.status.code(), Some(1), "{refused:?}");
    assert!(text.contains("is being checked"), "{text}");
    source.wait_for_work(1_000);
    // There is none whose progress could be awaited.
    assert_eq!(source.api().get("vm.migration-progress").status, 404);
    source.remote_ok(&["migration-cancel"]);
    let output = waiting.wait_with_output().expect("it ends");
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let names = source.event_names();
    assert!(!names.iter().any(|name| name.starts_with("migration-")), "{names:?}");
    // A real migration is as it would have been.
    let destination = Vmm::empty();
    let reception = Reception::start(&destination, Transport::Tcp, Mode::Precopy);
    migrate_to(reception, source, &destination, |url| send_option(url, Mode::Precopy));
    destination.wait_for_work(1_000);
    destination.verify();
    destination.shut_down();
}
