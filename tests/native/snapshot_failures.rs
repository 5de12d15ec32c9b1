// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Snapshots that cannot be written or read: the guest is unharmed, nothing half stays behind, the
//! error names the file, and the VMM can be used again at once.

use std::fs::{self, File, OpenOptions};
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use tempfile::TempDir;

use crate::harness::{Suite, Vmm, VmmBuilder, is_root, skip, wait_for};
use crate::snapshot::{place, save, saved, source};

const FILES: [&str; 5] =
    ["config.json", "state.json", "memory-index", "memory-ranges", "manifest.json"];

pub fn add(suite: &mut Suite) {
    for file in FILES {
        suite.add(&format!("snapshot_failures::missing_{file}"), move || {
            spoiled(file, |path| fs::remove_file(path).expect("removed"));
        });
        suite.add(&format!("snapshot_failures::truncated_{file}"), move || {
            spoiled(file, |path| {
                let len = fs::metadata(path).expect("metadata").len();
                let file = OpenOptions::new().write(true).open(path).expect("opened");
                file.set_len(len / 2).expect("truncated");
            });
        });
        suite.add(&format!("snapshot_failures::corrupt_{file}"), move || {
            spoiled(file, flip);
        });
        suite.add(&format!("snapshot_failures::foreign_{file}"), move || {
            spoiled(file, |path| fs::write(path, "not of this program").expect("written"));
        });
    }
    suite.add("snapshot_failures::newer_version", newer);
    suite.add("snapshot_failures::damage_found_on_demand_ends_the_vm", damage_on_demand);
    suite.add("snapshot_failures::directory_missing_or_no_directory", no_directory);
    suite.add("snapshot_failures::an_existing_snapshot_is_refused", existing);
    suite.add("snapshot_failures::disk_full", disk_full);
    suite.add("snapshot_failures::file_size_limit", file_size_limit);
    suite.add("snapshot_failures::killed_in_the_middle", killed);
    suite.add("snapshot_failures::terminated_in_the_middle", terminated);
    suite.add("snapshot_failures::without_a_vm_or_with_one", without_a_vm);
}

/// Where the next data or hole of a file is.
pub fn seek(file: &File, from: u64, whence: i32) -> Option<u64> {
    let from = libc::off_t::try_from(from).expect("an offset");
    // SAFETY: seeks in our own file.
    let found = unsafe { libc::lseek(file.as_raw_fd(), from, whence) };
    u64::try_from(found).ok()
}

/// Where a file's last run of data begins, which is always a page with contents.
fn last_data(file: &File) -> u64 {
    let (mut last, mut at) = (0, 0);
    while let Some(start) = seek(file, at, libc::SEEK_DATA) {
        last = start;
        match seek(file, start, libc::SEEK_HOLE) {
            Some(end) => at = end,
            None => break,
        }
    }
    last
}

/// Changes one bit of a byte that means something.
fn flip(path: &Path) {
    let file = OpenOptions::new().read(true).write(true).open(path).expect("opened");
    let len = file.metadata().expect("metadata").len();
    let at = if len > 1 << 20 { last_data(&file) } else { len / 2 };
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).expect("read");
    byte[0] ^= 1;
    file.write_all_at(&byte, at).expect("written");
}

/// Nothing of the failed restore is left: the same VMM restores a good one.
fn spoiled(name: &str, spoil: impl Fn(&Path)) {
    let (folder, url) = saved();
    let good = TempDir::with_prefix("godwit-good-").expect("a folder");
    for file in FILES {
        fs::copy(folder.path().join(file), good.path().join(file)).expect("copied");
    }
    spoil(&folder.path().join(name));
    let vmm = Vmm::empty();
    for mode in ["copy", "ondemand"] {
        if mode == "ondemand" && name == "memory-ranges" {
            // Its contents are looked at while the guest runs; see the test of that.
            continue;
        }
        let wish = format!("source_url={url},memory_restore_mode={mode}");
        let refused = vmm.remote(&["restore", &wish]);
        let text = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(!refused.status.success(), "a snapshot with a spoiled {name} was restored");
        assert!(text.contains(name), "the file is not named: {text}");
        assert_eq!(vmm.api().get("vm.info").status, 404);
    }
    vmm.wait_for_event("restore-failed");
    let wish = format!("source_url=file://{},resume=on", good.path().display());
    vmm.remote_ok(&["restore", &wish]);
    vmm.wait_for_work(5_000);
    vmm.verify();
    vmm.shut_down();
}

fn newer() {
    let (folder, url) = saved();
    let path = folder.path().join("manifest.json");
    let text = fs::read_to_string(&path).expect("read").replace("\"version\": 1", "\"version\": 9");
    fs::write(&path, text).expect("written");
    let vmm = Vmm::empty();
    let refused = vmm.remote(&["restore", &format!("source_url={url}")]);
    let text = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(text.contains("manifest.json") && text.contains("version 9"), "{text}");
    vmm.shut_down();
}

fn damage_on_demand() {
    let (folder, url) = saved();
    let path = folder.path().join("memory-ranges");
    let file = OpenOptions::new().read(true).write(true).open(&path).expect("opened");
    file.write_all_at(&[0x55; 64], last_data(&file)).expect("written");
    let mut vmm = Vmm::empty();
    let wish = format!("source_url={url},memory_restore_mode=ondemand,resume=on");
    vmm.remote(&["restore", &wish]);
    assert_eq!(vmm.wait_for_exit(), 1, "{}", vmm.output());
    assert!(!vmm.socket().exists());
    let event = vmm.wait_for_event("restore-failed");
    let text = event["properties"]["error"].as_str().unwrap_or_default().to_owned();
    assert!(text.contains("memory-ranges") && text.contains("checksum"), "{text}");
    assert!(!vmm.event_names().iter().any(|name| name == "restore-memory-completed"));
}

fn no_directory() {
    let source = source("size=128M,shared=on", "mem=16M");
    source.remote_ok(&["pause"]);
    let file = source.path("plain");
    fs::write(&file, "x").expect("a file");
    for (url, word) in [
        ("file:///no/such/directory".to_owned(), "/no/such/directory"),
        (format!("file://{}", file.display()), "plain"),
        ("/tmp".to_owned(), "file://"),
        ("http://x/y".to_owned(), "file://"),
        (String::new(), "file://"),
    ] {
        let refused = source.remote(&["snapshot", &url]);
        let text = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(!refused.status.success() && text.contains(word), "{url}: {text}");
    }
    source.remote_ok(&["resume"]);
    source.wait_for_work(2_000);
    source.verify();
    source.shut_down();
    let vmm = Vmm::empty();
    for url in ["file:///no/such/directory", "file:///tmp", "nonsense"] {
        let refused = vmm.remote(&["restore", &format!("source_url={url}")]);
        let text = String::from_utf8_lossy(&refused.stderr).into_owned();
        let path = url.trim_start_matches("file://");
        assert!(!refused.status.success() && text.contains(path), "{url}: {text}");
    }
    vmm.shut_down();
}

fn contents(folder: &Path) -> Vec<(String, Vec<u8>)> {
    let small = FILES.iter().filter(|name| **name != "memory-ranges");
    small.map(|name| ((*name).to_owned(), fs::read(folder.join(name)).expect("read"))).collect()
}

fn existing() {
    let (folder, url) = place();
    let source = source("size=128M,shared=on", "mem=16M");
    save(&source, &url);
    let before = contents(folder.path());
    source.remote_ok(&["resume"]);
    source.wait_for_work(2_000);
    source.remote_ok(&["pause"]);
    let refused = source.remote(&["snapshot", &url]);
    let text = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && text.contains("manifest.json"), "{text}");
    assert_eq!(contents(folder.path()), before, "the snapshot that was there has changed");
    // What is not ours is refused as well, and stays.
    let (other, other_url) = place();
    fs::write(other.path().join("config.json"), "mine").expect("a file");
    let refused = source.remote(&["snapshot", &other_url]);
    assert!(!refused.status.success());
    assert_eq!(fs::read(other.path().join("config.json")).expect("read"), b"mine");
    assert_eq!(names_in(other.path()), ["config.json"]);
    source.remote_ok(&["resume"]);
    source.wait_for_work(2_000);
    source.shut_down();
    let vmm = Vmm::empty();
    vmm.remote_ok(&["restore", &format!("source_url={url},resume=on")]);
    vmm.wait_for_work(2_000);
    vmm.shut_down();
}

fn names_in(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(folder)
        .expect("a folder")
        .map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}

/// The snapshot fails, nothing stays behind, and the guest continues.
#[track_caller]
fn assert_unharmed(source: Vmm, url: &str, folder: &Path) {
    let refused = source.remote(&["snapshot", url]);
    let text = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success(), "it fits after all");
    assert!(text.contains("memory-ranges"), "the file is not named: {text}");
    source.wait_for_event("snapshot-failed");
    assert_eq!(names_in(folder), Vec::<String>::new(), "files are left behind");
    assert_eq!(source.api().state(), "Paused");
    source.remote_ok(&["resume"]);
    source.wait_for_work(2_000);
    source.verify();
    source.shut_down();
}

fn disk_full() {
    if !is_root() {
        skip("mounting a small file system needs root");
    }
    let (folder, url) = place();
    let script = "mount -t tmpfs -o size=16m none \"$0\" && exec \"$@\"";
    let directory = folder.path().to_str().expect("UTF-8");
    let source = VmmBuilder::guest(2, "size=128M,shared=on", "workload=random-write mem=64M")
        .wrapped(&["unshare", "-m", "sh", "-c", script, directory])
        .start();
    source.wait_for_work(5_000);
    source.remote_ok(&["pause"]);
    let inside = format!("/proc/{}/root{directory}", source.pid());
    assert_unharmed(source, &url, Path::new(&inside));
}

fn file_size_limit() {
    let (folder, url) = place();
    let source = source("size=128M,shared=on", "mem=64M");
    source.remote_ok(&["pause"]);
    let limit = libc::rlimit { rlim_cur: 16 << 20, rlim_max: 16 << 20 };
    let pid = libc::pid_t::try_from(source.pid()).expect("a process id");
    // SAFETY: the limit is read from a value that lives across the call.
    let set =
        unsafe { libc::prlimit(pid, libc::RLIMIT_FSIZE, &raw const limit, std::ptr::null_mut()) };
    assert_eq!(set, 0, "{}", std::io::Error::last_os_error());
    assert_unharmed(source, &url, folder.path());
}

/// Starts a snapshot and ends the VMM with `signal` while it is written; gives the directory, or
/// nothing if the snapshot was whole by then.
fn interrupted(signal: i32) -> Option<(TempDir, String, i32)> {
    let (folder, url) = place();
    let mut source = source("size=1280M,shared=on", "mem=1G");
    source.remote_ok(&["pause"]);
    let remote = source.remote_spawn(&["snapshot", &url]);
    wait_for("the memory file", || {
        fs::metadata(folder.path().join(".memory-ranges.partial")).ok().map(drop)
    });
    source.signal(signal);
    let code = source.wait_for_exit();
    crate::harness::vmm::finish(remote);
    (!folder.path().join("manifest.json").exists()).then_some((folder, url, code))
}

#[track_caller]
fn in_the_middle(signal: i32) -> (TempDir, String, i32) {
    (0..5).find_map(|_| interrupted(signal)).expect("one that is not whole yet")
}

fn killed() {
    let (folder, url, _) = in_the_middle(libc::SIGKILL);
    assert!(!names_in(folder.path()).is_empty());
    let vmm = Vmm::empty();
    for mode in ["copy", "ondemand"] {
        let wish = format!("source_url={url},memory_restore_mode={mode}");
        let refused = vmm.remote(&["restore", &wish]);
        let text = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(!refused.status.success() && text.contains("never finished"), "{text}");
    }
    vmm.shut_down();
    // The next snapshot clears the remains away.
    let source = source("size=128M,shared=on", "mem=16M");
    save(&source, &url);
    source.shut_down();
    let mut expected: Vec<String> = FILES.iter().map(|name| (*name).to_owned()).collect();
    expected.sort();
    assert_eq!(names_in(folder.path()), expected);
    let vmm = Vmm::empty();
    vmm.remote_ok(&["restore", &format!("source_url={url},resume=on")]);
    vmm.wait_for_work(2_000);
    vmm.verify();
    vmm.shut_down();
}

fn terminated() {
    let (folder, _url, code) = in_the_middle(libc::SIGTERM);
    assert_eq!(code, 0);
    assert_eq!(names_in(folder.path()), Vec::<String>::new(), "files are left behind");
}

fn without_a_vm() {
    let vmm = Vmm::empty();
    let refused = vmm.api().put("vm.snapshot", r#"{"destination_url":"file:///tmp"}"#);
    assert_eq!(refused.status, 404, "{refused:?}");
    vmm.shut_down();
    let (_folder, url) = saved();
    let busy = source("size=128M,shared=on", "mem=16M");
    let body = format!(r#"{{"source_url":"{url}"}}"#);
    let refused = busy.api().put("vm.restore", &body);
    assert!(refused.status == 409 && refused.body.contains("already"), "{refused:?}");
    busy.wait_for_work(2_000);
    busy.verify();
    busy.shut_down();
}
