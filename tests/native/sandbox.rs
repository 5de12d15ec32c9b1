// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The sandbox of a VMM that runs: filters on each thread, and a VM without root.

use std::fs;
use std::process::Command;

use crate::harness::{Suite, Vmm, VmmBuilder, is_root, skip};

pub fn add(suite: &mut Suite) {
    suite.add("sandbox::each_thread_has_its_filters", each_thread_has_its_filters);
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
