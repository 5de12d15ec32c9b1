// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Core dumps: every page is where the segments say, each vCPU has its registers, nothing is overwritten, and
//! an interrupted one is no core file. What debuggers make of one is looked at with a Linux guest.

use std::fs;
use std::path::{Path, PathBuf};

use tempfile::TempDir;

use crate::harness::vmm::finish;
use crate::harness::{Suite, Vmm, VmmBuilder, is_root, skip, wait_for};
use crate::snapshot::{place, source};
use crate::snapshot_failures::seek;

pub fn add(suite: &mut Suite) {
    let memories = [
        ("shared", "size=192M,shared=on", "mem=96M"),
        ("private", "size=192M", "mem=96M"),
        ("beyond_4_gib", "size=6G,shared=on", "mem=5G..64M"),
    ];
    for (name, memory, workload) in memories {
        suite.add(&format!("core_dump::{name}"), move || whole(memory, workload));
    }
    suite.add("core_dump::refused_while_it_runs", refused);
    suite.add("core_dump::disk_full", disk_full);
    suite.add("core_dump::cancelled_and_killed", interrupted);
}

fn core(folder: &TempDir) -> (PathBuf, String) {
    let path = folder.path().join("core");
    let url = format!("file://{}", path.display());
    (path, url)
}

#[track_caller]
fn refusal(vmm: &Vmm, arguments: &[&str]) -> String {
    let output = vmm.remote(arguments);
    assert!(!output.status.success(), "{arguments:?}");
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

/// Type, offset, address and length of each program header.
fn segments(core: &[u8]) -> Vec<(u32, u64, u64, u64)> {
    let count = usize::from(u16::from_le_bytes([core[56], core[57]]));
    let header = |index: usize| {
        let at = 64 + 56 * index;
        let kind = u32::from_le_bytes(core[at..at + 4].try_into().expect("four bytes"));
        (kind, u64_at(core, at + 8), u64_at(core, at + 24), u64_at(core, at + 32))
    };
    (0..count).map(header).collect()
}

/// Asserts that the core file holds the memory of a snapshot of the same pause, page by page.
fn assert_same(core: &Path, memory: &Path) {
    use std::os::unix::fs::FileExt as _;
    let (core_file, memory_file) = (fs::File::open(core), fs::File::open(memory));
    let (core_file, memory_file) = (core_file.expect("the core"), memory_file.expect("memory"));
    let mut head = vec![0; 64 << 10];
    let got = core_file.read_at(&mut head, 0).expect("a header");
    head.truncate(got);
    assert!(head.starts_with(b"\x7fELF"));
    let mut at = 0;
    let (mut ours, mut theirs) = (vec![0; 1 << 20], vec![0; 1 << 20]);
    for (kind, offset, gpa, len) in segments(&head) {
        if kind != 1 {
            continue;
        }
        assert!(gpa == 0 || gpa >= 1 << 20, "{gpa:#x}");
        for piece in (0..len).step_by(1 << 20) {
            let count = usize::try_from((len - piece).min(1 << 20)).expect("a length");
            let has_data = |file: &fs::File, at: u64| {
                seek(file, at, libc::SEEK_DATA).is_some_and(|next| next < at + count as u64)
            };
            // Holes are zeros in both.
            if !has_data(&core_file, offset + piece) && !has_data(&memory_file, at + piece) {
                continue;
            }
            core_file.read_exact_at(&mut ours[..count], offset + piece).expect("memory");
            memory_file.read_exact_at(&mut theirs[..count], at + piece).expect("memory");
            assert!(ours[..count] == theirs[..count], "at gpa {:#x}", gpa + piece);
        }
        at += len;
    }
    assert_eq!(at, memory_file.metadata().expect("a length").len());
}

fn whole(memory: &str, workload: &str) {
    let (folder, url) = place();
    let (other, core_folder) = (source(memory, workload), TempDir::new().expect("a folder"));
    let source = other;
    let (path, core_url) = core(&core_folder);
    source.remote_ok(&["pause"]);
    source.remote_ok(&["coredump", &core_url]);
    source.remote_ok(&["snapshot", &url]);
    assert_same(&path, &folder.path().join("memory-ranges"));
    let bytes = {
        use std::os::unix::fs::FileExt as _;
        let mut head = vec![0; 8192];
        let file = fs::File::open(&path).expect("the core");
        file.read_exact_at(&mut head, 0).expect("a header");
        head
    };
    let notes = segments(&bytes).into_iter().find(|segment| segment.0 == 4).expect("notes");
    let notes = &bytes[usize::try_from(notes.1).expect("an offset")..];
    // The registers of both vCPUs: 20 bytes of header, `rip` at 112 + 16 * 8 of 336.
    for vcpu in 0..2 {
        let note = &notes[356 * vcpu..];
        assert_eq!(&note[12..16], b"CORE");
        assert_ne!(u64_at(note, 20 + 240), 0, "vCPU {vcpu} is nowhere");
    }
    assert_eq!(&notes[712 + 12..712 + 16], b"QEMU");
    // It is private, and never overwritten.
    use std::os::unix::fs::PermissionsExt as _;
    assert_eq!(path.metadata().expect("a file").permissions().mode() & 0o777, 0o600);
    let again = refusal(&source, &["coredump", &core_url]);
    assert!(again.contains("exists already"), "{again}");
    assert_same(&path, &folder.path().join("memory-ranges"));
    source.wait_for_event("coredumped");
    source.wait_for_event("coredump-failed");
    source.remote_ok(&["resume"]);
    source.wait_for_heartbeat();
    source.shut_down();
}

fn refused() {
    let folder = TempDir::new().expect("a folder");
    let (path, url) = core(&folder);
    let vmm = source("size=128M,shared=on", "mem=48M");
    let text = refusal(&vmm, &["coredump", &url]);
    assert!(text.contains("pause it"), "{text}");
    vmm.remote_ok(&["pause"]);
    let nowhere = format!("file://{}/none/core", folder.path().display());
    let text = refusal(&vmm, &["coredump", &nowhere]);
    assert!(text.contains("/none"), "{text}");
    let text = refusal(&vmm, &["coredump", "tcp:1.2.3.4"]);
    assert!(text.contains("file://"), "{text}");
    assert!(!path.exists());
    vmm.remote_ok(&["resume"]);
    vmm.wait_for_heartbeat();
    vmm.shut_down();
}

fn disk_full() {
    if !is_root() {
        skip("mounting a small file system needs root");
    }
    let folder = TempDir::new().expect("a folder");
    let (_, url) = core(&folder);
    let script = "mount -t tmpfs -o size=16m none \"$0\" && exec \"$@\"";
    let directory = folder.path().to_str().expect("UTF-8");
    let vmm = VmmBuilder::guest(2, "size=128M,shared=on", "workload=random-write mem=64M")
        .wrapped(&["unshare", "-m", "sh", "-c", script, directory])
        .start();
    vmm.wait_for_work(5_000);
    vmm.remote_ok(&["pause"]);
    let text = refusal(&vmm, &["coredump", &url]);
    assert!(text.contains("No space left"), "{text}");
    let inside = PathBuf::from(format!("/proc/{}/root{directory}", vmm.pid()));
    assert_eq!(fs::read_dir(inside).expect("the folder").count(), 0);
    vmm.remote_ok(&["resume"]);
    vmm.wait_for_heartbeat();
    vmm.shut_down();
}

fn interrupted() {
    let folder = TempDir::new().expect("a folder");
    let (path, url) = core(&folder);
    let mut vmm = source("size=1280M,shared=on", "mem=1G");
    vmm.remote_ok(&["pause"]);
    // Cancelled: no file, and the VM is there.
    let dump = vmm.remote_spawn(&["coredump", &url]);
    wait_for("the file", || fs::metadata(&path).ok().map(drop));
    vmm.remote_ok(&["snapshot-cancel"]);
    assert!(!finish(dump).status.success());
    assert!(!path.exists());
    vmm.remote_ok(&["resume"]);
    vmm.wait_for_heartbeat();
    vmm.remote_ok(&["pause"]);
    // Killed: no debugger takes it for a core file.
    let dump = vmm.remote_spawn(&["coredump", &url]);
    wait_for("the file", || fs::metadata(&path).ok().map(drop));
    vmm.signal(libc::SIGKILL);
    vmm.wait_for_exit();
    finish(dump);
    // The file may have been too young to have any.
    let start = fs::read(&path).expect("the file");
    assert!(start.iter().take(4).all(|byte| *byte == 0), "{:?}", start.get(..4));
}
