// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The test guest and its reader under QEMU: what they report must be true, or nothing that is
//! judged by them is.
#![expect(clippy::unwrap_used, reason = "a test may fail that way")]

mod machine;

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::process::Command;
use std::time::{Duration, Instant};

use guest_reader::{Guest, PageErrorKind, Patience, Pulse, abi};
use machine::{Config, Machine, PATIENCE, available, turn};
use serde_json::{Value, json};

const PAGE: u64 = abi::PAGE_BYTES;

/// Applies settings and waits until they are in use.
fn apply(guest: &Guest, words: &str) {
    let generation = guest.set(words).unwrap();
    guest.wait_for_generation(generation, PATIENCE).unwrap();
}

/// Holds the guest, checks everything, lets it continue.
fn assert_clean(guest: &Guest) {
    guest.hold(PATIENCE).unwrap();
    let report = guest.verify_all(2).unwrap();
    assert!(report.is_clean(), "{report:?}");
    guest.release().unwrap();
}

#[test]
fn every_workload_does_its_work() {
    if !available(true) {
        return;
    }
    let _turn = turn();
    let machine = Machine::start(&Config::new(2, "256M", "mem=64M workload=idle seed=5"));
    let guest = machine.guest();

    apply(&guest, "workload=fill reset=1");
    let status = guest.wait_until("the fill", PATIENCE, |s| s.all_in("done")).unwrap();
    let writes: u64 = status.known().map(|vcpu| vcpu.writes).sum();
    assert_eq!(writes, (64 << 20) / PAGE);
    assert_clean(&guest);

    for (words, writes, reads) in [
        ("workload=verify verify=full", false, true),
        ("workload=random-write", true, false),
        ("workload=random-write write_percent=50", true, true),
        ("workload=sequential-write write_percent=100", true, false),
        ("workload=hot-write verify=none", true, false),
        ("workload=read-only verify=light", false, true),
    ] {
        apply(&guest, &format!("{words} iterations=20000 after=verify reset=1"));
        let status = guest.wait_until(words, PATIENCE, |s| s.all_in("done")).unwrap();
        let own = (64 << 20) / PAGE / 2;
        for vcpu in status.known() {
            assert_eq!(vcpu.iterations, 20_000 + own, "{words}: the work and a check of all");
            assert_eq!((vcpu.writes > 0, vcpu.reads > own), (writes, reads), "{words}");
            assert_eq!((vcpu.errors, vcpu.tsc_backwards), (0, 0), "{words}");
            assert_eq!(vcpu.accesses, vcpu.iterations, "{words}");
        }
        let histogram = guest.histogram().unwrap();
        assert_eq!(histogram.count(), status.iterations(), "{words}");
        let summary = histogram.summary(40);
        assert!(summary.p50_ns > 0 && summary.p50_ns <= summary.max_ns, "{words}: {summary:?}");
        assert_clean(&guest);
    }
}

#[test]
fn all_vcpus_come_up_and_work_on_pages_of_their_own() {
    if !available(true) {
        return;
    }
    let _turn = turn();
    for machine in ["q35", "microvm"] {
        for vcpus in [1, 2, 4] {
            let config = Config { machine, ..Config::new(vcpus, "128M", "mem=50%..8M") };
            let machine = Machine::start(&config);
            let guest = machine.guest();
            let enough = |s: &guest_reader::Status| s.known().all(|v| v.verified > 5000);
            let status = guest.wait_until("work on all vCPUs", PATIENCE, enough).unwrap();
            assert_eq!(status.vcpus.len(), vcpus as usize);
            assert_eq!(status.errors(), 0);
            assert_clean(&guest);
        }
    }
}

#[test]
fn memory_above_four_gib_is_used() {
    if !available(true) {
        return;
    }
    let _turn = turn();
    for machine in ["q35", "microvm"] {
        let cmdline = "workload=random-write mem=99%..1% iterations=20000 after=verify";
        let config = Config { machine, ..Config::new(2, "6G", cmdline) };
        let machine = Machine::start(&config);
        let guest = machine.guest();
        let status = guest.wait_until("the work", PATIENCE, |s| s.all_in("done")).unwrap();
        assert_eq!(status.errors(), 0);
        assert!(status.known().all(|vcpu| vcpu.access_max_page > status.pages * 98 / 100));
        let top = guest.memory().segments().last().copied().unwrap();
        assert!(
            top.gpa == 4 << 30
                && guest.memory().resident(top.gpa + top.len_bytes - 8192, 1).unwrap().0
        );
        let report = guest.verify_all(2).unwrap();
        assert!(report.is_clean(), "{report:?}");
        assert!(report.written > 15_000 && report.resident < report.pages / 20, "{report:?}");
    }
}

/// Breaks pages in every way that counts, and expects both the reader and the guest to say so.
#[test]
fn wrong_pages_are_found_by_reader_and_guest() {
    if !available(true) {
        return;
    }
    let _turn = turn();
    let machine = Machine::start(&Config::new(2, "128M", "mem=32M iterations=100000"));
    let guest = machine.guest();
    guest.wait_until("the work", PATIENCE, |s| s.all_in("done")).unwrap();

    let memory = guest.memory();
    let first_gpa = memory.word(abi::CONTROL_GPA + abi::control::RANGES).unwrap();
    let gpa = |page: u64| first_gpa + page * PAGE;
    let read = |page| {
        let mut bytes = vec![0; 4096];
        memory.read(gpa(page), &mut bytes).unwrap();
        bytes
    };
    let old = read(1003);
    apply(&guest, "iterations=200000 reset=1");
    guest.wait_until("more work", PATIENCE, |s| s.all_in("done")).unwrap();
    assert_clean(&guest);

    memory.write(gpa(1003), &old).unwrap();
    memory.write(gpa(1004), &vec![0; 4096]).unwrap();
    memory.write(gpa(1005), &read(2005)).unwrap();
    let word = memory.word(gpa(1006) + 4088).unwrap();
    memory.set_word(gpa(1006) + 4088, word ^ 1 << 40).unwrap();

    let report = guest.verify_all(2).unwrap();
    let kinds: Vec<_> = report.records.iter().map(|record| (record.page, record.kind)).collect();
    let expected = [
        (1003, PageErrorKind::Stale),
        (1004, PageErrorKind::Missing),
        (1005, PageErrorKind::Misplaced),
        (1006, PageErrorKind::Corrupt),
    ];
    assert_eq!(kinds, expected);
    assert_eq!((report.errors, report.wrong_sums.len()), (4, 0));

    apply(&guest, "workload=verify verify=full iterations=4096 reset=1 after=none");
    let status = guest.wait_until("the check", PATIENCE, |s| s.all_in("done")).unwrap();
    let mut found: Vec<_> = status.known().flat_map(|vcpu| &vcpu.error_records).collect();
    found.sort_by_key(|record| record.page);
    let pages: Vec<_> = found.iter().map(|record| record.page).collect();
    assert_eq!((status.errors(), pages), (4, vec![1003, 1004, 1005, 1006]));
    assert_eq!(found[0].gpa, gpa(1003));
    assert!(found[0].found_counter < found[0].counter);
    assert_eq!((found[3].word, found[3].found), (511, found[3].expected ^ 1 << 40));

    // A stale shadow table that goes with a stale page is caught by the sum alone.
    let shadow = memory.word(abi::CONTROL_GPA + abi::control::SHADOW_GPA).unwrap();
    let before = memory.word(shadow).unwrap();
    memory.set_word(shadow, before - 1).unwrap();
    assert_eq!(guest.verify_all(2).unwrap().wrong_sums, [0]);
}

#[test]
fn a_page_that_should_be_zero_and_is_not_is_found() {
    if !available(true) {
        return;
    }
    let _turn = turn();
    let machine = Machine::start(&Config::new(1, "128M", "mem=8M workload=idle"));
    let guest = machine.guest();
    let file = ram_file(machine.pid());
    let range = guest.memory().word(abi::CONTROL_GPA + abi::control::RANGES).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, &[1], range + 5 * PAGE).unwrap();
    let report = guest.verify_all(1).unwrap();
    assert_eq!(report.records.len(), 1, "{report:?}");
    assert_eq!((report.records[0].page, report.records[0].kind), (5, PageErrorKind::NotZero));
}

fn ram_file(pid: u32) -> fs::File {
    let is_ram = |path: &std::path::PathBuf| {
        fs::read_link(path).is_ok_and(|to| to.to_string_lossy().contains("memory-backend-memfd"))
    };
    let path = fs::read_dir(format!("/proc/{pid}/fd"))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .find(is_ram)
        .unwrap();
    fs::File::options().read(true).write(true).open(path).unwrap()
}

#[test]
fn reading_leaves_missing_pages_missing() {
    if !available(true) {
        return;
    }
    let _turn = turn();
    let machine = Machine::start(&Config::new(2, "1G", "mem=16M workload=fill"));
    let guest = machine.guest();
    guest.wait_until("the fill", PATIENCE, |s| s.all_in("done")).unwrap();
    let file = ram_file(machine.pid());
    let before = file.metadata().unwrap().blocks();
    let report = guest.verify_all(2).unwrap();
    guest.status().unwrap();
    guest.histogram().unwrap();
    assert!(guest.memory().word(512 << 20).is_err_and(|e| e.to_string().contains("not resident")));
    assert_eq!(file.metadata().unwrap().blocks(), before);
    assert!(report.is_clean() && report.resident < 5000 && report.written == 4096, "{report:?}");
}

#[test]
fn a_stop_is_seen_as_the_longest_gap() {
    if !available(true) {
        return;
    }
    let _turn = turn();
    const STOP_MS: u64 = 300;
    for workload in ["idle", "random-write", "random-write pace_ns=2000000"] {
        let machine = Machine::start(&Config::new(2, "128M", "mem=4M"));
        let guest = machine.guest();
        apply(&guest, &format!("workload={workload} reset=1"));
        guest.wait_for_heartbeat(PATIENCE).unwrap();
        let signal = |name: &str| {
            let pid = machine.pid().to_string();
            assert!(Command::new("kill").args([name, &pid]).status().unwrap().success());
        };
        let start = guest_reader::tsc::now();
        let mut pulse = Pulse::new(Instant::now());
        pulse.observe(guest.heartbeat().unwrap(), Instant::now());
        signal("-STOP");
        std::thread::sleep(Duration::from_millis(STOP_MS));
        signal("-CONT");
        let status = guest.wait_for_heartbeat(PATIENCE).unwrap();
        pulse.observe(guest.heartbeat().unwrap(), Instant::now());
        assert!(pulse.longest() >= Duration::from_millis(STOP_MS), "{pulse:?}");
        let span_ns = guest_reader::tsc::nanoseconds(
            guest_reader::tsc::now() - start,
            guest_reader::tsc::khz(),
        );
        for vcpu in status.known() {
            let gap = vcpu.gap_max;
            assert!(gap.ns > (STOP_MS - 10) * 1_000_000 && gap.ns < span_ns, "{workload} {gap:?}");
            assert!(vcpu.stall_total_ns >= gap.ns && vcpu.gaps.contains(&gap), "{workload}");
        }
    }
}

#[test]
fn a_paced_workload_keeps_its_pace() {
    if !available(true) {
        return;
    }
    let _turn = turn();
    let cmdline = Box::leak(
        format!("mem=4M prefill=0 pace_ns=1000000 tsc_khz={}", guest_reader::tsc::khz())
            .into_boxed_str(),
    );
    let machine = Machine::start(&Config::new(2, "128M", cmdline));
    let guest = machine.guest();
    let status = guest.wait_until("some iterations", PATIENCE, |s| s.iterations() > 400).unwrap();
    for vcpu in status.known() {
        let ran_ns =
            guest_reader::tsc::nanoseconds(vcpu.last_tsc - vcpu.start_tsc, guest.tsc_khz());
        let most = ran_ns / 1_000_000 + 2;
        assert!(vcpu.iterations <= most && vcpu.iterations > most / 3, "{most}: {vcpu:?}");
    }
}

#[test]
fn private_memory_is_found_and_read() {
    if !available(true) {
        return;
    }
    let _turn = turn();
    let config = Config { shared: false, ..Config::new(2, "128M", "mem=16M") };
    let machine = Machine::start(&config);
    let guest = machine.guest();
    guest.wait_until("work", PATIENCE, |s| s.iterations() > 50_000).unwrap();
    assert_clean(&guest);
    assert!(guest.verify_all(1).unwrap().resident < 6000);
    apply(&guest, "workload=idle");
}

#[test]
fn it_runs_in_pure_emulation() {
    if !available(false) {
        return;
    }
    let _turn = turn();
    let config =
        Config { kvm: false, ..Config::new(2, "128M", "mem=4M iterations=5000 after=verify") };
    let machine = Machine::start(&config);
    let guest = machine.guest();
    let status = guest.wait_until("the work", PATIENCE, |s| s.all_in("done")).unwrap();
    assert_eq!(status.errors(), 0);
    let report = guest.verify_all(2).unwrap();
    assert!(report.is_clean(), "{report:?}");
}

/// Both kinds of QEMU's own migration, to itself: the contents arrive, and what the guest saw is
/// of the size of what QEMU says.
#[test]
fn contents_survive_a_migration_by_qemu() {
    if !available(true) {
        return;
    }
    let _turn = turn();
    for postcopy in [false, true] {
        let folder = tempfile::TempDir::new().unwrap();
        let socket = folder.path().join("migration");
        let config = Config::new(2, "256M", "workload=random-write mem=64M");
        let mut source = Machine::start(&config);
        let uri = format!("unix:{}", socket.display());
        let mut destination = Machine::start_with(&config, &["-incoming", "defer"]);
        let capabilities = json!({ "execute": "migrate-set-capabilities", "arguments": {
            "capabilities": [ { "capability": "postcopy-ram", "state": postcopy } ] } });
        let parameters = json!({ "execute": "migrate-set-parameters", "arguments": {
            "max-bandwidth": 4_000_000_000u64, "downtime-limit": 1500 } });
        for machine in [&mut source, &mut destination] {
            machine.command(&capabilities);
            machine.command(&parameters);
        }
        destination.command(&json!({ "execute": "migrate-incoming", "arguments": { "uri": uri } }));

        let guest = source.guest();
        guest
            .wait_until("work", PATIENCE, |s| s.all_in("work") && s.iterations() > 100_000)
            .unwrap();
        let before = guest.status().unwrap();
        source.migrate(&socket);
        if postcopy {
            source.wait_for_status("query-migrate", "active");
            source.execute("migrate-start-postcopy");
        }
        let answer = source.wait_for_status("query-migrate", "completed");
        destination.wait_for_status("query-status", "running");

        let arrived = Guest::attach_within(destination.pid(), PATIENCE).unwrap();
        arrived.wait_for_heartbeat(PATIENCE).unwrap();
        let more = before.iterations() + 200_000;
        let status = arrived.wait_until("more work", PATIENCE, |s| s.iterations() > more).unwrap();
        assert_eq!(status.errors(), 0, "{status:?}");
        let downtime_ms = answer["downtime"].as_u64().unwrap();
        let gap_ms = status.gap_max_ns() / 1_000_000;
        println!(
            "postcopy {postcopy}: downtime {downtime_ms} ms by QEMU, {gap_ms} ms by the guest"
        );
        assert!(gap_ms + 2 >= downtime_ms / 2 && gap_ms < downtime_ms * 2 + 500);
        destination.execute("stop");
        let report = arrived.verify_all(2).unwrap();
        assert!(report.is_clean(), "{report:?}");
        assert!(report.in_flight <= 2 && report.written == (64 << 20) / PAGE);
    }
}

/// The command says by its exit code what it found: 0 fine, 1 errors, 3 not in time.
#[test]
fn the_command_reports_by_exit_code() {
    if !available(true) {
        return;
    }
    let _turn = turn();
    let machine = Machine::start(&Config::new(2, "128M", "mem=4M"));
    let pid = machine.pid().to_string();
    let run = |words: &str| {
        let output = Command::new(env!("CARGO_BIN_EXE_guest-reader"))
            .args(["--json", "--pid", &pid])
            .args(words.split(' '))
            .output()
            .unwrap();
        let answer: Value = serde_json::from_slice(&output.stdout).unwrap_or(Value::Null);
        (output.status.code(), answer)
    };
    let (code, answer) = run("--timeout-ms 60000 wait-for --heartbeat --iterations 5000");
    assert_eq!((code, &answer["stage"]), (Some(0), &json!("running")));
    let (code, answer) = run("histogram --buckets");
    assert!(code == Some(0) && answer["count"].as_u64() > Some(0) && answer["buckets"].is_array());
    let (code, answer) = run("verify-all --hold");
    assert_eq!((code, &answer["errors"], &answer["written"]), (Some(0), &json!(0), &json!(1024)));
    assert_eq!(run("--timeout-ms 20 wait-for --state done").0, Some(3));
    assert_eq!(run("set workload=juggle").0, Some(1));

    let (code, answer) = run("set workload=idle");
    assert_eq!((code, &answer["workload"]), (Some(0), &json!("idle")));
    let guest = machine.guest();
    let page = guest.memory().word(abi::CONTROL_GPA + abi::control::RANGES).unwrap() + 7 * PAGE;
    guest.memory().set_word(page + 800, 0).unwrap();
    let (code, answer) = run("verify-all");
    assert_eq!((code, &answer["records"][0]["page"]), (Some(1), &json!(7)));
    assert_eq!(answer["records"][0]["kind"], "corrupt");
}

#[test]
fn a_process_without_a_guest_is_refused() {
    let refused = Guest::attach(std::process::id()).unwrap_err();
    assert!(refused.is_transient(), "{refused:?}");
    let waited = Guest::attach_within(std::process::id(), Patience::millis(5)).unwrap_err();
    assert!(waited.to_string().contains("did not happen within 5 ms"), "{waited}");
    assert!(!Guest::attach(u32::MAX).unwrap_err().is_transient());
}
