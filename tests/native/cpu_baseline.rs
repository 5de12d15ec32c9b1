// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! CPU baselines: made of the reports of hosts, kept by a guest wherever it goes, and refused where the host lacks something.
//!
//! There is one host here. Others are its own report with a feature less, or more.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::harness::migrate::migrate;
use crate::harness::vmm::write_file;
use crate::harness::{Mode, Suite, Transport, Vmm, VmmBuilder, image, skip};
use crate::snapshot;

pub fn add(suite: &mut Suite) {
    suite.add("cpu_baseline::a_guest_keeps_it_wherever_it_goes", kept);
    suite.add("cpu_baseline::a_host_below_it_is_refused_by_name", below);
    suite.add("cpu_baseline::one_that_arrives_finds_what_it_was_shown", arrives_below);
    suite.add("cpu_baseline::one_that_arrived_at_a_weaker_host_boots_again", weaker);
    suite.add("cpu_baseline::what_is_none_is_named", rubbish);
}

/// Leaf 7 EBX: bits that are only instructions, and their names.
const INSTRUCTIONS: [(u64, &str); 12] = [
    (3, "bmi1"),
    // Of few processors, or of none that has others of these.
    (4, "hle"),
    (14, "mpx"),
    (16, "avx512f"),
    (21, "avx512ifma"),
    (5, "avx2"),
    (8, "bmi2"),
    (18, "rdseed"),
    (19, "adx"),
    (23, "clflushopt"),
    (24, "clwb"),
    (29, "sha_ni"),
];
const MEMORY: &str = "size=96M,shared=on";

/// What a file of a host has.
fn own_report() -> Value {
    let (code, output) = VmmBuilder::new(&["--check=json"]).bare().run();
    let report = serde_json::Deserializer::from_str(&output).into_iter::<Value>().next();
    let Some(Ok(report)) = report else { panic!("no report (exit code {code}): {output}") };
    assert!(report["cpu"]["cpuid"].is_array(), "{report:#}");
    report
}

fn number(value: &Value) -> u64 {
    let text = value.as_str().unwrap_or("0x0");
    u64::from_str_radix(text.trim_start_matches("0x"), 16).expect("a number")
}

/// Leaf 7 EBX of a baseline.
fn leaf_7_ebx(baseline: &mut Value) -> &mut Value {
    let rows = baseline["cpuid"].as_array_mut().expect("leaves");
    let is_wanted = |row: &&mut Value| row["leaf"] == "0x7" && number(&row["subleaf"]) == 0;
    let row = rows.iter_mut().find(is_wanted).expect("leaf 7");
    &mut row["ebx"]
}

/// An instruction that this host has, or lacks.
fn instruction(baseline: &Value, is_there: bool) -> (u64, &'static str) {
    let here = number(leaf_7_ebx(&mut baseline.clone()));
    let found = INSTRUCTIONS.into_iter().find(|(bit, _)| (here >> bit & 1 == 1) == is_there);
    found.unwrap_or_else(|| {
        skip(format!("leaf 7 is {here:#x}, with all of these instructions or none"))
    })
}

fn with_bit(baseline: &Value, bit: u64, is_there: bool) -> Value {
    let mut changed = baseline.clone();
    let ebx = leaf_7_ebx(&mut changed);
    let (set, mask) = (number(ebx), 1 << bit);
    *ebx = json!(format!("{:#x}", if is_there { set | mask } else { set & !mask }));
    changed
}

fn file(folder: &TempDir, name: &str, value: &Value) -> PathBuf {
    let path = folder.path().join(name);
    write_file(&path, value.to_string().as_bytes());
    path
}

fn guest(baseline: &Path) -> VmmBuilder {
    let cpus = format!("boot=2,baseline={}", baseline.display());
    let words = ["--serial", "off", "--console", "off", "--kernel", image(), "--cpus", &cpus];
    VmmBuilder::new(&words).with(&[
        "--memory",
        MEMORY,
        "--cmdline",
        "workload=random-write mem=32M",
    ])
}

/// Leaf 7 EBX as the guest was to be shown it.
fn shown(vmm: &Vmm) -> u64 {
    let (folder, url) = snapshot::place();
    vmm.remote_ok(&["pause"]);
    vmm.remote_ok(&["snapshot", &url]);
    let state: Value =
        serde_json::from_slice(&fs::read(folder.path().join("state.json")).expect("the state"))
            .expect("JSON");
    vmm.remote_ok(&["resume"]);
    // What this host's KVM returns of a vCPU need not be what it was told.
    let leaves = state["shown"].as_array().expect("leaves");
    let leaf = leaves.iter().find(|leaf| leaf["function"] == 7 && leaf["index"] == 0);
    leaf.and_then(|leaf| leaf["answer"][1].as_u64()).expect("a number")
}

/// One file of two hosts, one of which lacks an instruction; with that.
fn of_two_hosts(folder: &TempDir) -> (PathBuf, u64) {
    let report = own_report();
    let (bit, name) = instruction(&report["cpu"], true);
    let here = file(folder, "here.json", &report);
    let older = file(folder, "older.json", &with_bit(&report["cpu"], bit, false));
    let (code, output) = VmmBuilder::new(&["--cpu-baseline"]).with(&[&here, &older]).bare().run();
    assert_eq!(code, 0, "{output}");
    let left_out =
        output.lines().find(|line| line.contains("here.json")).expect("a line about this host");
    assert!(left_out.contains(name), "{output}");
    assert!(!output.contains("older.json"), "{output}");
    let pool = output.find('{').map(|start| serde_json::Deserializer::from_str(&output[start..]));
    let pool = pool.and_then(|text| text.into_iter::<Value>().next()).expect("JSON").expect("JSON");
    (file(folder, "pool.json", &pool), bit)
}

fn kept() {
    let folder = TempDir::with_prefix("godwit-baseline-").expect("a folder");
    let (pool, bit) = of_two_hosts(&folder);
    let lacks_it = |vmm: &Vmm| shown(vmm) >> bit & 1 == 0;
    let vmm = guest(&pool).start();
    vmm.wait_for_heartbeat();
    assert!(lacks_it(&vmm), "the guest is shown what the other host lacks");
    // What the file said is the VM's now.
    fs::remove_file(&pool).expect("removed");
    let info: Value = vmm.api().get("vm.info").ok().json();
    let written = &info["config"]["cpus"]["baseline"];
    assert!(written.get("file").is_none_or(Value::is_null), "{written}");
    assert!(written["cpuid"].as_array().is_some_and(|rows| !rows.is_empty()), "{written}");
    vmm.remote_ok(&["reboot"]);
    vmm.wait_for_heartbeat();
    assert!(lacks_it(&vmm), "after a reboot");
    let destination = Vmm::empty();
    migrate(vmm, &destination, Transport::Unix, Mode::Precopy);
    assert!(lacks_it(&destination), "at the destination");
    destination.remote_ok(&["reboot"]);
    destination.wait_for_heartbeat();
    assert!(lacks_it(&destination), "after a reboot at the destination");
    destination.shut_down();
}

fn below() {
    let folder = TempDir::with_prefix("godwit-baseline-").expect("a folder");
    let report = own_report();
    let (bit, name) = instruction(&report["cpu"], false);
    let newer = file(&folder, "newer.json", &with_bit(&report["cpu"], bit, true));
    let (code, output) = guest(&newer).bare().run();
    assert_eq!(code, 1, "{output}");
    assert!(output.contains("below the CPU baseline") && output.contains(name), "{output}");
    let (code, output) = guest(&newer).bare().with(&["--check"]).run();
    assert_eq!(code, 6, "{output}");
    assert!(output.contains(name), "{output}");
    // Over the API, with the baseline in the configuration.
    let vmm = Vmm::empty();
    let config = json!({
        "cpus": {"boot_vcpus": 1, "max_vcpus": 1, "baseline": with_bit(&report["cpu"], bit, true)},
        "memory": {"size": 96 << 20},
        "payload": {"kernel": image()},
        "serial": {"mode": "Off"},
        "console": {"mode": "Off"},
    });
    vmm.api().put("vm.create", &config.to_string()).ok();
    let refused = vmm.api().put("vm.boot", "");
    assert_eq!(refused.status, 500, "{refused:?}");
    assert!(refused.body.contains(name), "{refused:?}");
    assert_eq!(vmm.api().state(), "Created");
    vmm.shut_down();
}

/// A snapshot of a VM whose baseline says more than this host has.
fn arrives_below() {
    let folder = TempDir::with_prefix("godwit-baseline-").expect("a folder");
    let report = own_report();
    let (bit, name) = instruction(&report["cpu"], false);
    let own = file(&folder, "own.json", &report["cpu"]);
    let vmm = guest(&own).start();
    vmm.wait_for_heartbeat();
    let before = shown(&vmm);
    let (saved, url) = snapshot::place();
    snapshot::save(&vmm, &url);
    drop(vmm);
    let restored = Vmm::empty();
    restored.remote_ok(&["restore", &format!("source_url={url}")]);
    restored.remote_ok(&["resume"]);
    restored.wait_for_heartbeat();
    assert_eq!(shown(&restored), before);
    restored.shut_down();
    let refused = |baseline: Value| {
        snapshot::change(saved.path(), "config", |config| config["cpus"]["baseline"] = baseline);
        let refusing = Vmm::empty();
        let answer = refusing.remote(&["restore", &format!("source_url={url}")]);
        assert!(!answer.status.success());
        refusing.shut_down();
        String::from_utf8_lossy(&answer.stderr).into_owned()
    };
    // One that is there and one that is not are told apart by nothing: none is looked for.
    for named in [own, folder.path().join("none")] {
        let error = refused(json!({"file": named}));
        assert!(error.contains("names the file"), "{error}");
    }
    let error = refused(with_bit(&report["cpu"], bit, true));
    assert!(error.contains("below the CPU baseline") && error.contains(name), "{error}");
}

/// A guest whose baseline does not tell of a weakness that this host has: it does not boot here, but goes on if it has booted
/// elsewhere, and boots again.
fn weaker() {
    /// Bits of `IA32_ARCH_CAPABILITIES` that name weaknesses: RSBA and RRSBA.
    const WEAKNESSES: u64 = 1 << 2 | 1 << 19;
    let folder = TempDir::with_prefix("godwit-baseline-").expect("a folder");
    let report = own_report();
    let mut untold = report["cpu"].clone();
    let rows = untold["msrs"].as_array_mut().expect("registers");
    let row = rows.iter_mut().find(|row| row["index"] == "0x10a");
    let here = row.as_deref().map_or(0, |row| number(&row["value"]));
    if here & WEAKNESSES == 0 {
        skip(format!("this host has no weakness that guests are told of ({here:#x})"));
    }
    if let Some(row) = row {
        row["value"] = json!(format!("{:#x}", here & !WEAKNESSES));
    }
    let (code, output) = guest(&file(&folder, "untold.json", &untold)).bare().run();
    assert_eq!(code, 1, "{output}");
    assert!(output.contains("which the baseline does not tell of"), "{output}");
    let vmm = guest(&file(&folder, "own.json", &report["cpu"])).start();
    vmm.wait_for_heartbeat();
    let (saved, url) = snapshot::place();
    snapshot::save(&vmm, &url);
    drop(vmm);
    snapshot::change(saved.path(), "config", |config| config["cpus"]["baseline"] = untold);
    let arrived = Vmm::empty();
    arrived.remote_ok(&["restore", &format!("source_url={url}")]);
    arrived.remote_ok(&["resume"]);
    arrived.wait_for_heartbeat();
    arrived.remote_ok(&["reboot"]);
    arrived.wait_for_heartbeat();
    let output = arrived.output();
    assert!(output.contains("of which the VM's CPU baseline does not tell"), "{output}");
    arrived.shut_down();
}

fn rubbish() {
    let folder = TempDir::with_prefix("godwit-baseline-").expect("a folder");
    for (value, why) in [
        (json!({"cpuid": [{"leaf": "0x4", "eax": "0x1"}]}), "leaf 0x4"),
        (json!({"file": "/etc/hostname"}), "names another file"),
        (json!([]), "is no CPU baseline"),
    ] {
        let (code, output) = guest(&file(&folder, "rubbish.json", &value)).bare().run();
        assert_eq!(code, 1, "{output}");
        assert!(output.contains(why), "{output}");
    }
    let (code, output) = guest(&folder.path().join("none")).bare().run();
    assert_eq!(code, 1, "{output}");
    assert!(output.contains("cannot read the CPU baseline"), "{output}");
    let absent = folder.path().join("none");
    let (code, output) = VmmBuilder::new(&["--cpu-baseline"]).with(&[&absent]).bare().run();
    assert_eq!(code, 1, "{output}");
    assert!(output.contains("cannot read '") && output.contains("none"), "{output}");
}
