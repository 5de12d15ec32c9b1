// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The sandbox of a VMM that runs: filters and capabilities of each thread, and a VM without root.

use std::collections::BTreeMap;
use std::fs::{self, File, Permissions};
use std::os::unix::fs::{PermissionsExt as _, chown};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use serde_json::json;
use tempfile::TempDir;

use crate::harness::migrate::{Reception, send_option};
use crate::harness::pool::Pool;
use crate::harness::taps::{Tap, interface_exists, taps_of};
use crate::harness::{
    Mode, Suite, Transport, Vmm, VmmBuilder, is_root, skip, wait_for, wait_within,
};

pub fn add(suite: &mut Suite) {
    suite.add("sandbox::each_thread_has_its_filters", each_thread_has_its_filters);
    suite.add("sandbox::each_thread_has_the_capabilities_of_its_kind", capabilities);
    suite.add("sandbox::faults_are_resolved_first_and_without_capabilities", faults);
    suite.add("sandbox::a_pool_keeps_what_it_needs", pool);
    suite.add("sandbox::a_vm_runs_without_root", runs_without_root);
}

/// A field of a thread's status.
fn field(status: &str, name: &str) -> u32 {
    let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    line.and_then(|value| value.trim().parse().ok())
        .unwrap_or_else(|| panic!("no {name}: {status}"))
}

fn each_thread_has_its_filters() {
    let vmm = Vmm::boot(2, "size=192M,shared=on", "workload=random-write mem=64M");
    vmm.wait_for_heartbeat();
    let mut threads = 0;
    for task in fs::read_dir(format!("/proc/{}/task", vmm.pid())).expect("threads").flatten() {
        // A thread may have ended meanwhile.
        let Ok(status) = fs::read_to_string(task.path().join("status")) else { continue };
        threads += 1;
        assert_eq!(field(&status, "NoNewPrivs"), 1, "{status}");
        assert_eq!(field(&status, "Seccomp"), 2, "{status}");
        let of_main = task.file_name().to_string_lossy() == vmm.pid().to_string();
        // `main` has its table's and the one that has clone3(2) fail.
        let filters = field(&status, "Seccomp_filters");
        assert!(if of_main { filters == 2 } else { filters > 2 }, "{status}");
    }
    assert!(threads > 3, "{threads} threads");
    vmm.verify();
    vmm.shut_down();
}

/// For threads of a migration to begin and to be at work.
const PAGES_TIME: Duration = Duration::from_mins(1);

/// Bits of capabilities in a set, as in linux/capability.h.
const DAC_OVERRIDE: u32 = 1;
const NET_ADMIN: u32 = 12;
const IPC_LOCK: u32 = 14;
const SYS_NICE: u32 = 23;
const PERFMON: u32 = 38;
const BPF: u32 = 39;
/// What nothing in Godwit needs: CHOWN, SETGID, SETUID, SETPCAP, NET_RAW, SYS_MODULE, SYS_RAWIO, SYS_CHROOT, SYS_ADMIN,
/// SYS_BOOT, SYS_RESOURCE, SYS_TIME, MKNOD, SETFCAP.
const NEVER: &[u32] = &[0, 6, 7, 8, 13, 16, 17, 18, 21, 22, 24, 25, 27, 31];

fn bit(capability: u32) -> u64 {
    1 << capability
}

fn sum(capabilities: &[u32]) -> u64 {
    capabilities.iter().fold(0, |all, capability| all | bit(*capability))
}

fn set(status: &str, name: &str) -> u64 {
    let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    let value = line.and_then(|value| u64::from_str_radix(value.trim(), 16).ok());
    value.unwrap_or_else(|| panic!("no {name}: {status}"))
}

/// What the threads of a process have in any of their sets, by name; each with the same bounding set.
pub fn held(pid: u32) -> (BTreeMap<String, u64>, u64) {
    let mut held = BTreeMap::new();
    let mut bounding = None;
    for task in fs::read_dir(format!("/proc/{pid}/task")).expect("threads").flatten() {
        let Ok(status) = fs::read_to_string(task.path().join("status")) else { continue };
        let name = status.lines().find_map(|line| line.strip_prefix("Name:")).expect("a name");
        let sets = ["CapEff", "CapPrm", "CapInh", "CapAmb"].map(|name| set(&status, name));
        let all = sets.into_iter().fold(0, |all, set| all | set);
        *held.entry(name.trim().to_owned()).or_default() |= all;
        let bound = set(&status, "CapBnd");
        assert_eq!(*bounding.get_or_insert(bound), bound, "{status}");
    }
    (held, bounding.expect("threads"))
}

/// What a test has that runs as root with its usual capabilities.
fn needs_capabilities() {
    let own = fs::read_to_string("/proc/self/status").expect("a status");
    let wanted = sum(&[DAC_OVERRIDE, NET_ADMIN, IPC_LOCK, SYS_NICE, 8, 21]);
    if !is_root() || set(&own, "CapEff") & wanted != wanted {
        skip("this process has no capabilities that a VMM could drop");
    }
}

/// A folder into which its owner alone may look, and that is not root.
fn of_another_user() -> TempDir {
    let folder = TempDir::with_prefix("godwit-user-").expect("a folder");
    fs::set_permissions(folder.path(), Permissions::from_mode(0o700)).expect("it is ours");
    chown(folder.path(), Some(65534), Some(65534)).expect("root gives it away");
    folder
}

fn image_of_another_user(folder: &Path, name: &str) -> PathBuf {
    let path = folder.join(name);
    File::create(&path).and_then(|file| file.set_len(8 << 20)).expect("a file");
    fs::set_permissions(&path, Permissions::from_mode(0o600)).expect("it is ours");
    chown(&path, Some(65534), Some(65534)).expect("root gives it away");
    path
}

/// Each kind of thread that is there while a guest with a disk runs, and then what an operator may ask of a VMM that was
/// started as root: files of other users, a tap, a snapshot.
fn capabilities() {
    needs_capabilities();
    let folder = of_another_user();
    let option = format!("path={},id=data", image_of_another_user(folder.path(), "data").display());
    let vmm = VmmBuilder::guest(2, "size=192M,shared=on", "workload=disk-write mem=16M")
        .with(&["--disk", &option])
        .start();
    vmm.wait_for_heartbeat();
    // It has its name before it drops what it does not need.
    let has_disk = || (held(vmm.pid()).0.get("data_q0") == Some(&0)).then_some(());
    wait_for("the thread of the disk, without capabilities", has_disk);
    let (held_now, bounding) = held(vmm.pid());
    println!("     {held_now:x?} {bounding:x}");
    let main = held_now["cloud-hyperviso"];
    let kept = sum(&[DAC_OVERRIDE, NET_ADMIN, SYS_NICE]);
    assert_eq!(main & kept, kept, "{main:x}");
    assert_eq!((main | bounding) & sum(NEVER), 0, "{main:x} {bounding:x}");
    assert_eq!(main & !bounding, 0, "{main:x} {bounding:x}");
    if Path::new("/dev/userfaultfd").exists() {
        assert_eq!(bounding & bit(19), 0, "SYS_PTRACE: {bounding:x}");
    }
    for (name, held) in &held_now {
        let allowed = match name.as_str() {
            // KVM's own thread has what the vCPU has that starts it.
            name if name.starts_with("vcpu") || name.starts_with("kvm-") => bit(IPC_LOCK),
            "cloud-hyperviso" => main,
            // It starts those of network and vsock devices.
            "device-start" => sum(&[DAC_OVERRIDE, 2, NET_ADMIN, IPC_LOCK]),
            // They remove sockets.
            "http-server" | "metrics-server" | "put-back" => sum(&[DAC_OVERRIDE, 2, 3]),
            _ => 0,
        };
        assert_eq!(held & !allowed, 0, "{name}: {held_now:x?}");
    }

    let added = image_of_another_user(folder.path(), "added");
    vmm.api().put("vm.add-disk", &json!({"path": added, "id": "added"}).to_string()).ok();
    // Whether this machine has taps at all; its own is gone at the end of the statement.
    drop(Tap::open());
    vmm.api()
        .put("vm.add-net", r#"{"id": "lan", "ip": "192.0.2.1", "mask": "255.255.255.0"}"#)
        .ok();
    let taps = taps_of(&vmm);
    assert_eq!(taps.len(), 1, "{taps:?}");
    vmm.wait_for_heartbeat();
    vmm.api().put("vm.pause", "").ok();
    let saved = folder.path().join("saved");
    fs::create_dir(&saved).expect("a folder");
    fs::set_permissions(&saved, Permissions::from_mode(0o700)).expect("it is ours");
    chown(&saved, Some(65534), Some(65534)).expect("root gives it away");
    let url = format!("file://{}", saved.display());
    vmm.api().put("vm.snapshot", &json!({"destination_url": url}).to_string()).ok();
    // Paused: what it wrote later, the restored guest would find on its disk.
    vmm.shut_down();
    assert!(taps.iter().all(|tap| !interface_exists(tap)), "{taps:?}");

    let restored = Vmm::empty();
    restored.remote_ok(&["restore", &format!("source_url={url},resume=true")]);
    restored.wait_for_heartbeat();
    restored.verify();
    restored.shut_down();
}

/// Threads whose name begins like this, and how each is scheduled.
fn schedulers(pid: u32, name: &str) -> Vec<libc::c_int> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).expect("threads").flatten();
    let of_name = tasks.filter(|task| {
        let comm = fs::read_to_string(task.path().join("comm")).unwrap_or_default();
        comm.starts_with(name)
    });
    let ids = of_name.filter_map(|task| task.file_name().to_str()?.parse().ok());
    // SAFETY: takes and returns numbers only.
    ids.map(|id| unsafe { libc::sched_getscheduler(id) }).filter(|policy| *policy >= 0).collect()
}

/// In postcopy, with a program that traces faults, which takes capabilities: the threads that resolve faults have their
/// priority and nothing else.
fn faults() {
    const REAL_TIME: libc::c_int = libc::SCHED_RR | libc::SCHED_RESET_ON_FORK;
    needs_capabilities();
    let mut source = Vmm::boot(2, "size=256M,shared=on", "workload=random-write mem=160M");
    source.wait_for_work(5_000);
    let destination = Vmm::empty();
    let more = ",fault_source=sigbus";
    let reception = Reception::start_with(&destination, Transport::Tcp, Mode::Postcopy, more);
    let option = format!("{},preempt=2,bandwidth=32M", send_option(&reception.url, Mode::Postcopy));
    source.remote_ok(&["send-migration", &option]);
    let pids = [("mig-faults", destination.pid()), ("mig-urgent", destination.pid())];
    for (name, pid) in pids {
        // A thread has its name before its priority.
        wait_within(PAGES_TIME, "the priority of threads that resolve faults", || {
            let found = schedulers(pid, name);
            let is_right = !found.is_empty() && found.iter().all(|policy| *policy == REAL_TIME);
            is_right.then_some(())
        });
    }
    let at_work = ["mig-faults", "mig-urgent", "mig-pages"];
    let held_now = wait_within(PAGES_TIME, "the threads that receive pages", || {
        let (held_now, _) = held(destination.pid());
        at_work.iter().all(|name| held_now.get(*name) == Some(&0)).then_some(held_now)
    });
    println!("     {held_now:x?}");
    for (name, held) in &held_now {
        let of_main = name == "cloud-hyperviso";
        assert_eq!(held & sum(&[BPF, PERFMON]) != 0, of_main, "{name}: {held_now:x?}");
        let has_priority = name.starts_with("mig-") && name != "migration-recv";
        assert!(!has_priority || held & bit(SYS_NICE) == 0, "{name}: {held_now:x?}");
    }
    assert!(reception.finish().status.success(), "{}", destination.output());
    assert_eq!(source.wait_for_exit(), 0, "{}", source.output());
    destination.wait_for_work(5_000);
    destination.verify();
    destination.shut_down();
}

/// The daemon that keeps memory, with a VM that takes it.
fn pool() {
    needs_capabilities();
    let pool = Pool::start(&["size = '64M'\npages = '4K'\ncount = 2"]);
    let (held_now, bounding) = held(pool.pid());
    println!("     {held_now:x?} {bounding:x}");
    let kept = sum(&[DAC_OVERRIDE, 2, 3, IPC_LOCK]);
    assert_eq!(bounding & !kept, 0, "{bounding:x}");
    assert!(held_now.len() > 1, "{held_now:x?}");
    for (name, held) in &held_now {
        let allowed = if name == "zeroer" { bit(IPC_LOCK) } else { kept };
        assert_eq!(held & !allowed, 0, "{name}: {held_now:x?}");
    }
    let memory = format!("size=64M,shared=on{}", pool.option());
    let vmm = Vmm::boot(1, &memory, "workload=random-write mem=16M");
    vmm.wait_for_heartbeat();
    vmm.verify();
    vmm.shut_down();
}

/// Gives the folder of the API's socket to a user, and `/dev/kvm` to a group of it that nothing else knows; then runs
/// the program as that user.
const AS_USER: &str = r#"
set -e
last=
for word; do
  [ "$last" != --api-socket ] || folder=$(dirname "$word")
  last=$word
done
mkdir "$folder/dev"
mount -t tmpfs none "$folder/dev"
mknod "$folder/dev/kvm" c 10 232
chown 0:65533 "$folder/dev/kvm"
chmod 660 "$folder/dev/kvm"
mount --bind "$folder/dev/kvm" /dev/kvm
chown -R 65534:65534 "$folder"
chown 0:65533 "$folder/dev/kvm"
exec setpriv --reuid=65534 --regid=65534 --groups=65533 --inh-caps=-all --bounding-set=-all "$0" "$@"
"#;

fn runs_without_root() {
    let can_wrap = Command::new("unshare").args(["-m", "setpriv", "--version"]).output();
    if !is_root() || !can_wrap.is_ok_and(|output| output.status.success()) {
        skip("no root, unshare(1) or setpriv(1) to make a user's view of /dev/kvm");
    }
    let vmm = VmmBuilder::guest(1, "size=192M,shared=on", "workload=random-write mem=64M")
        .wrapped(&["unshare", "-m", "sh", "-c", AS_USER])
        .start();
    let status = fs::read_to_string(format!("/proc/{}/status", vmm.pid())).expect("the VMM");
    assert_eq!(field(&status, "CapEff"), 0, "{status}");
    vmm.wait_for_heartbeat();
    vmm.verify();
    vmm.shut_down();
}
