// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `--check` against a start: what one finds to fail the other fails for, and the other way round.
//!
//! Each configuration is checked, then started with the same words, as the same user.

use std::fs;
use std::path::Path;

use serde_json::Value;
use tempfile::TempDir;

use crate::harness::taps::{Tap, interface_exists};
use crate::harness::vmm::write_file;
use crate::harness::{HugePages, Suite, VmmBuilder, image, is_root, skip, wait_for};

/// The VM would not start.
const LACKING: i32 = 6;

type Words = &'static [&'static str];

/// A configuration of the test guest, and the check that is to fail; none if it is to start. `{}` is a folder.
struct Row {
    name: &'static str,
    words: Words,
    lacking: Option<(&'static str, &'static str)>,
}

const fn row(name: &'static str, words: Words, check: &'static str, reason: &'static str) -> Row {
    Row { name, words, lacking: Some((check, reason)) }
}

const fn fine(name: &'static str, words: Words) -> Row {
    Row { name, words, lacking: None }
}

const ROWS: &[Row] = &[
    fine("plain", &["--memory", "size=96M"]),
    fine("disk", &["--memory", "size=96M,shared=on", "--disk", "path={}/disk"]),
    fine("outputs", &["--serial", "file={}/serial", "--vsock", "cid=3,socket={}/vsock"]),
    fine(
        "zone_in_a_file",
        &["--memory", "size=0", "--memory-zone", "id=a,size=96M,shared=on,file={}/memory"],
    ),
    fine("pmem", &["--pmem", "file={}/pmem"]),
    row("disk_missing", &["--disk", "path={}/none"], "disk", "missing"),
    row("disk_is_a_folder", &["--disk", "path={}"], "disk", "unusable"),
    row("disk_in_a_format", &["--disk", "path={}/qcow2"], "disk", "unusable"),
    row("pmem_of_odd_size", &["--pmem", "file={}/large"], "pmem", "unusable"),
    row("rng_missing", &["--rng", "src={}/none"], "rng", "unusable"),
    row("device_missing", &["--device", "path={}/none"], "device", "missing"),
    row("device_without_a_group", &["--device", "path={}/device"], "device", "no-group"),
    row(
        "reserve_beyond_the_host",
        &["--memory", "size=32T,reserve=on"],
        "memory-zones",
        "not-reservable",
    ),
    row(
        "prefault_beyond_the_host",
        &["--memory", "size=2T,prefault=on"],
        "memory-room",
        "too-little",
    ),
    row(
        "huge_pages_beyond_the_host",
        &["--memory", "size=2T,hugepages=on"],
        "huge-pages",
        "too-few",
    ),
    row(
        "zone_file_below_nothing",
        &["--memory", "size=0", "--memory-zone", "id=a,size=96M,file={}/none/file"],
        "memory-zones",
        "file",
    ),
    row(
        "node_that_is_not_there",
        &["--memory", "size=0", "--memory-zone", "id=a,size=96M,host_numa_node=900"],
        "memory-zones",
        "no-such-node",
    ),
    row(
        "memory_beyond_addresses",
        &["--cpus", "boot=1,max_phys_bits=36", "--memory", "size=128G"],
        "memory-zones",
        "impossible",
    ),
    row("initramfs_missing", &["--initramfs", "{}/none"], "payload", "unusable"),
    row(
        "initramfs_too_large",
        &["--memory", "size=64M", "--initramfs", "{}/large"],
        "payload",
        "unusable",
    ),
    row("console_below_nothing", &["--serial", "file={}/none/serial"], "output", "no-folder"),
    row("vsock_below_nothing", &["--vsock", "cid=3,socket={}/none/vsock"], "output", "no-folder"),
    row("tpm_missing", &["--tpm", "socket={}/none"], "back-end", "missing"),
    row(
        "fs_missing",
        &["--memory", "size=96M,shared=on", "--fs", "tag=a,socket={}/none"],
        "back-end",
        "missing",
    ),
    row("vdpa_missing", &["--vdpa", "path={}/none,num_queues=2"], "back-end", "missing"),
    row(
        "landlock_path_missing",
        &["--landlock", "--landlock-rules", "path={}/none,access=r"],
        "landlock",
        "path-missing",
    ),
];

pub fn add(suite: &mut Suite) {
    for row in ROWS {
        suite.add(&format!("preflight::{}", row.name), || {
            let folder = folder();
            agree(&guest(row.words, folder.path()), row.lacking);
        });
    }
    suite.add("preflight::kernel_is_text", kernel_is_text);
    suite.add("preflight::no_kernel_is_needed", no_kernel);
    suite.add("preflight::hyperv", hyperv);
    suite.add("preflight::kvm_missing", || kvm("true", "missing"));
    suite.add("preflight::kvm_denied", || {
        kvm("mknod -m 600 /dev/kvm c 10 232 && chown 65534 /dev/kvm", "denied");
    });
    suite.add("preflight::disk_of_another_vm", disk_of_another);
    suite.add("preflight::tap", tap);
    suite.add("preflight::tap_without_rights", tap_without_rights);
    suite.add("preflight::tap_in_use", tap_in_use);
    suite.add("preflight::huge_pages", huge_pages);
    suite.add("preflight::text_and_options", text);
}

fn folder() -> TempDir {
    let folder = TempDir::with_prefix("godwit-check-").expect("a folder");
    let at = |name: &str| folder.path().join(name);
    for (name, bytes) in [("disk", 1 << 20), ("large", (100 << 20) + 4096), ("pmem", 4 << 20)] {
        fs::File::create(at(name)).and_then(|file| file.set_len(bytes)).expect("a file");
    }
    write_file(&at("text"), b"this is no kernel, only a line of text");
    write_file(&at("qcow2"), &[b"QFI\xfb\0\0\0\x03".as_slice(), &[0; 4096]].concat());
    fs::create_dir(at("device")).expect("a folder");
    folder
}

/// The test guest, of which later words replace earlier ones.
fn guest(words: &[&str], folder: &Path) -> VmmBuilder {
    let folder = folder.display().to_string();
    let words: Vec<String> = words.iter().map(|word| word.replace("{}", &folder)).collect();
    let has = |option: &str| words.iter().any(|word| word == option);
    let mut all = vec!["--kernel", image(), "--console", "off"];
    for (option, value) in [("--serial", "off"), ("--memory", "size=96M")] {
        if !has(option) {
            all.extend([option, value]);
        }
    }
    VmmBuilder::new(&all).with(&words).unconfined()
}

/// What a check of it reports, and its exit code.
#[track_caller]
fn check(builder: &VmmBuilder) -> (i32, Value) {
    let (code, output) = builder.clone().bare().with(&["--check=json"]).run();
    let report = serde_json::Deserializer::from_str(&output).into_iter::<Value>().next();
    let Some(Ok(report)) = report else { panic!("no report (exit code {code}): {output}") };
    (code, report)
}

/// Whether it starts, and what it prints.
fn start(builder: &VmmBuilder) -> (bool, String) {
    let mut vmm = builder.spawn();
    let api = vmm.api();
    let runs = wait_for("the VM to run or the VMM to end", || {
        if vmm.exited().is_some() {
            return Some(false);
        }
        let info = api.request("GET", "vm.info", None).ok().filter(|info| info.status == 200)?;
        (info.json()["state"] == "Running").then_some(true)
    });
    (runs, vmm.output())
}

/// Checks it, then starts it: both have to come to the same end.
#[track_caller]
fn agree(builder: &VmmBuilder, lacking: Option<(&str, &str)>) -> Value {
    let (code, report) = check(builder);
    let findings = report["findings"].as_array().expect("findings");
    let failing: Vec<_> =
        findings.iter().filter(|finding| finding["severity"] == "fails").collect();
    let names: Vec<_> = failing
        .iter()
        .map(|finding| {
            (
                finding["check"].as_str().expect("a name"),
                finding["reason"].as_str().expect("a reason"),
            )
        })
        .collect();
    assert_eq!(names.is_empty(), lacking.is_none(), "{report:#}");
    if let Some(lacking) = lacking {
        assert!(names.contains(&lacking), "no {lacking:?} in {names:?}: {report:#}");
    }
    assert_eq!(code, if names.is_empty() { 0 } else { LACKING }, "{report:#}");
    assert_eq!(report["verdict"] == "fails", !names.is_empty(), "{report:#}");
    let (runs, output) = start(builder);
    assert_eq!(runs, names.is_empty(), "{names:?}, and the start: {output}");
    report
}

fn kernel_is_text() {
    let folder = folder();
    let text = folder.path().join("text");
    let words = ["--serial", "off", "--console", "off", "--kernel", text.to_str().expect("UTF-8")];
    agree(&VmmBuilder::new(&words).unconfined(), Some(("payload", "unusable")));
}

fn no_kernel() {
    let (code, report) = check(&VmmBuilder::new::<&str>(&[]));
    assert_eq!(code, 0, "{report:#}");
    let (code, output) = VmmBuilder::new(&["--check", "--disk", "readonly=on"]).bare().run();
    assert_eq!(code, 2, "{output}");
    assert!(output.contains("path"), "{output}");
}

fn hyperv() {
    let folder = folder();
    let builder = guest(&["--cpus", "boot=1,kvm_hyperv=on"], folder.path());
    // Some KVMs have it, and some do not.
    let (code, _) = check(&builder);
    agree(&builder, (code != 0).then_some(("vcpus", "features")));
}

/// With another /dev, in which `make` makes what there is of KVM.
fn kvm(make: &str, reason: &'static str) {
    if !is_root() {
        skip("only root can hide /dev/kvm");
    }
    let folder = folder();
    let script = format!(
        "mount -t tmpfs none /dev && mknod -m 666 /dev/null c 1 3 && mknod -m 666 /dev/urandom c 1 9 && {make} && \
         exec setpriv --bounding-set=-dac_override,-dac_read_search --inh-caps=-dac_override,-dac_read_search \"$@\""
    );
    let builder = guest(&[], folder.path());
    let builder = builder.wrapped(&["unshare", "--mount", "sh", "-c", &script, "sh"]);
    let (_, output) = builder.clone().bare().with(&["--version"]).run();
    if !output.starts_with("cloud-hypervisor") {
        skip(format!("another /dev cannot be made here: {}", output.trim()));
    }
    agree(&builder, Some(("kvm", reason)));
}

fn disk_of_another() {
    let folder = folder();
    let words = ["--disk", "path={}/disk,id=root"];
    let first = guest(&words, folder.path()).start();
    let report = agree(&guest(&words, folder.path()), Some(("disk", "in-use")));
    let about = |finding: &&Value| finding["check"] == "disk";
    let finding = report["findings"].as_array().expect("findings").iter().find(about);
    assert_eq!(finding.expect("a disk")["about"], "root");
    assert_eq!(first.api().state(), "Running", "the check has taken nothing");
    first.shut_down();
    agree(&guest(&words, folder.path()), None);
}

fn tap_name() -> String {
    format!("gc{}", std::process::id())
}

fn tap() {
    drop(Tap::open());
    let folder = folder();
    let net = format!("tap={}", tap_name());
    let words = ["--net", net.as_str()];
    let builder = guest(&words, folder.path());
    check(&builder);
    assert!(!interface_exists(&tap_name()), "the check has made a tap");
    agree(&builder, None);
}

fn tap_without_rights() {
    drop(Tap::open());
    let folder = folder();
    let net = format!("tap={}", tap_name());
    let builder = guest(&["--net", &net], folder.path());
    let rights = ["setpriv", "--bounding-set=-net_admin", "--inh-caps=-net_admin"];
    let report = agree(&builder.wrapped(&rights), Some(("tap", "missing")));
    let findings = report["findings"].as_array().expect("findings");
    let finding = findings.iter().find(|finding| finding["check"] == "tap").expect("a tap");
    let command = format!("sudo ip tuntap add dev {} mode tap user $USER", tap_name());
    assert_eq!(finding["mend"][0], command);
}

fn tap_in_use() {
    let tap = Tap::open();
    let folder = folder();
    let net = format!("tap={}", tap.name);
    agree(&guest(&["--net", &net], folder.path()), Some(("tap", "in-use")));
    assert!(tap.exists());
}

fn huge_pages() {
    let pages = HugePages::borrow(48);
    let folder = folder();
    let words = ["--memory", "size=96M,hugepages=on,prefault=on"];
    agree(&guest(&words, folder.path()), None);
    assert_eq!(pages.taken(), 0);
}

fn text() {
    let folder = folder();
    let words = ["--check", "--disk", "path={}/none,id=root"];
    let (code, output) = guest(&words, folder.path()).bare().run();
    assert_eq!(code, LACKING, "{output}");
    assert!(output.contains("disk (root)"), "{output}");
    assert!(output.contains("would NOT start here"), "{output}");
    assert!(!output.contains('{'), "{output}");
}
