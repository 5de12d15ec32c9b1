// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Guest memory in files: a guest moves to where a file holds another guest's memory, and back, and is
//! restored over such a file; every page is compared. And a file that is in use is refused by name,
//! with no harm to the guest in it.

use std::fs::{self, File};
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};

use tempfile::TempDir;

use crate::harness::faults::Stopped;
use crate::harness::migrate::{
    ANYTHING, Reception, failure_after, failure_of, migrate, migrate_to, send_option,
};
use crate::harness::vmm::RAM_FILE;
use crate::harness::{HugePages, Mode, Suite, Transport, Vmm, VmmBuilder, image, skip, wait_for};
use crate::postcopy::progress;
use crate::snapshot::place;

pub fn add(suite: &mut Suite) {
    for mode in [Mode::Precopy, Mode::Postcopy, Mode::Auto] {
        let name = mode.name();
        suite.add(&format!("file_zones::there_and_back_{name}"), move || there_and_back(mode));
        suite.add(&format!("file_zones::of_huge_pages_there_and_back_{name}"), move || huge(mode));
    }
    for mode in ["copy", "ondemand"] {
        let test = move || restored_over(mode);
        suite.add(&format!("file_zones::restored_over_an_old_file_{mode}"), test);
    }
    suite.add("file_zones::a_private_file_is_left_as_it_is_by_what_arrives", private);
    suite.add("file_zones::a_source_empties_no_file_that_no_rule_allows", not_emptied);
    suite.add("file_zones::both_vmms_on_one_path_are_refused_by_name", both_on_one);
    suite.add("file_zones::a_boot_and_a_restore_over_a_running_guest_are_refused", over_a_guest);
    suite.add("file_zones::what_a_page_server_reads_is_refused", page_server);
    suite.add("file_zones::handed_over_locally_it_stays_locked", local);
    suite.add("file_zones::a_reboot_lets_no_other_vm_in", reboot);
    suite.add("file_zones::a_guest_boots_over_an_old_file", boots);
}

const MIB: u64 = 1 << 20;
const SIZE: u64 = 192 * MIB;
/// No page of a guest holds this and nothing else.
const OLD: u8 = 0xA5;
/// A guest that leaves much of its memory untouched.
const LOAD: &str = "workload=random-write mem=96M prefill=0";

/// Folders on a file system in memory, in which each VMM finds the zone's file by the same name.
struct Folders {
    root: PathBuf,
    _tmpfs: Option<TempDir>,
    _mount: Option<Mount>,
    zone: String,
}

/// A file system that ends with the test.
struct Mount(TempDir);

impl Drop for Mount {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.0.path()).status();
    }
}

impl Folders {
    fn small(shared: &str) -> Self {
        let folder = TempDir::with_prefix_in("godwit-files-", "/dev/shm").expect("a folder");
        let root = folder.path().to_owned();
        Self { root, _tmpfs: Some(folder), _mount: None, zone: zone(shared) }
    }

    /// On hugetlbfs, where this machine lets it be mounted.
    fn huge() -> Self {
        let folder = TempDir::with_prefix("godwit-files-").expect("a folder");
        let mut mount = Command::new("mount");
        mount.args(["-t", "hugetlbfs", "-o", "pagesize=2M", "none"]).arg(folder.path());
        if !mount.status().is_ok_and(|status| status.success()) {
            skip("hugetlbfs cannot be mounted".to_owned());
        }
        let root = folder.path().to_owned();
        Self { root, _tmpfs: None, _mount: Some(Mount(folder)), zone: zone("on") }
    }

    fn folder(&self, name: &str) -> PathBuf {
        let folder = self.root.join(name);
        fs::create_dir_all(&folder).expect("a folder");
        folder
    }

    fn file(&self, name: &str) -> PathBuf {
        self.folder(name).join(RAM_FILE)
    }

    fn in_folder(&self, name: &str, builder: VmmBuilder) -> VmmBuilder {
        let folder = self.folder(name);
        builder.wrapped(&["env", "-C", folder.to_str().expect("UTF-8")])
    }

    /// One without a VM.
    fn empty(&self, name: &str) -> Vmm {
        self.in_folder(name, VmmBuilder::new::<&str>(&[])).start()
    }

    fn guest(&self, name: &str, load: &str) -> VmmBuilder {
        let builder = VmmBuilder::guest(2, "size=0", load).with(&["--memory-zone", &self.zone]);
        self.in_folder(name, builder)
    }

    fn boot(&self, name: &str, load: &str) -> Vmm {
        let vmm = self.guest(name, load).start();
        vmm.guest();
        vmm
    }

    /// Fills the file there as an earlier guest might have.
    fn make_old(&self, name: &str) {
        let path = self.file(name);
        let file = File::options().read(true).write(true).create(true).truncate(false).open(&path);
        let file = file.expect("a file");
        file.set_len(SIZE).expect("room");
        // hugetlbfs has no write().
        // SAFETY: a new mapping of a file of this length, used here alone and unmapped below.
        unsafe {
            let len = usize::try_from(SIZE).expect("a size");
            let (protection, shared) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED);
            let start =
                libc::mmap(std::ptr::null_mut(), len, protection, shared, file.as_raw_fd(), 0);
            assert_ne!(start, libc::MAP_FAILED, "{}", std::io::Error::last_os_error());
            std::ptr::write_bytes(start.cast::<u8>(), OLD, len);
            libc::munmap(start, len);
        }
    }

    /// Pages of the file that are as [`make_old`](Self::make_old) left them.
    fn old_pages(&self, name: &str) -> usize {
        let file = File::open(self.file(name)).expect("the file");
        let mut page = [0; 4096];
        let mut is_old = |at| {
            file.read_exact_at(&mut page, at).expect("a page");
            page.iter().all(|byte| *byte == OLD)
        };
        (0..SIZE).step_by(4096).filter(|at| is_old(*at)).count()
    }
}

fn zone(shared: &str) -> String {
    format!("id=z,size={}M,shared={shared},file={RAM_FILE}", SIZE / MIB)
}

/// Compares every page, and sees to it that none is the earlier guest's.
#[track_caller]
fn check(folders: &Folders, name: &str, vmm: &Vmm) {
    vmm.wait_for_work(2_000);
    vmm.api().put("vm.pause", "").ok();
    vmm.verify_paused();
    assert_eq!(folders.old_pages(name), 0, "pages of an earlier guest");
    vmm.api().put("vm.resume", "").ok();
}

/// Moves a guest to where its file may be emptied.
#[track_caller]
fn move_over(source: Vmm, destination: &Vmm, mode: Mode) {
    let reception = Reception::start_with(destination, Transport::Tcp, mode, ANYTHING);
    migrate_to(reception, source, destination, |url| send_option(url, mode));
}

#[track_caller]
fn move_about(folders: &Folders, mode: Mode) {
    let here = folders.boot("a", LOAD);
    here.wait_for_work(5_000);
    folders.make_old("b");
    let there = folders.empty("b");
    move_over(here, &there, mode);
    check(folders, "b", &there);
    folders.make_old("a");
    let back = folders.empty("a");
    move_over(there, &back, mode);
    check(folders, "a", &back);
    back.shut_down();
}

fn there_and_back(mode: Mode) {
    move_about(&Folders::small("on"), mode);
}

fn huge(mode: Mode) {
    // Two files, of which one belongs to a guest.
    let _pool = HugePages::borrow(2 * SIZE / (2 * MIB));
    move_about(&Folders::huge(), mode);
}

fn restored_over(mode: &str) {
    let folders = Folders::small("on");
    let (_folder, url) = place();
    let mut source = folders.boot("a", LOAD);
    source.wait_for_work(5_000);
    crate::snapshot::save(&source, &url);
    source.signal(libc::SIGKILL);
    source.wait_for_exit();
    folders.make_old("a");
    let vmm = folders.empty("a");
    let option = format!("source_url={url},memory_restore_mode={mode}");
    vmm.remote_ok(&["restore", &option]);
    if mode == "ondemand" {
        vmm.wait_for_event("restore-memory-completed");
    }
    vmm.verify_paused();
    assert_eq!(folders.old_pages("a"), 0, "pages of an earlier guest");
    vmm.remote_ok(&["resume"]);
    check(&folders, "a", &vmm);
    vmm.shut_down();
}

fn private() {
    let folders = Folders::small("off");
    let here = folders.boot("a", LOAD);
    here.wait_for_work(5_000);
    folders.make_old("b");
    let whole = folders.old_pages("b");
    let there = folders.empty("b");
    migrate(here, &there, Transport::Tcp, Mode::Postcopy);
    there.wait_for_work(2_000);
    there.verify();
    assert_eq!(folders.old_pages("b"), whole, "the file was written");
    there.shut_down();
}

/// What is said of a file that another process uses. That has dropped dumps and this one its capabilities, so it is
/// not named; the command in the text names it.
#[track_caller]
fn is_refusal(text: &str, pid: u32) {
    assert!(text.contains("'z'") && text.contains(RAM_FILE), "{text}");
    let command = text.split_once("locked by another process (root finds it by ");
    let command = command.and_then(|(_, rest)| rest.split_once(')'));
    let (command, _) = command.unwrap_or_else(|| panic!("{text}"));
    let found = Command::new("sh").args(["-c", command]).output().expect("a shell");
    let found = String::from_utf8_lossy(&found.stdout).into_owned();
    assert!(found.lines().any(|line| line.starts_with(&format!("/proc/{pid}/"))), "{found}");
}

fn not_emptied() {
    let folders = Folders::small("on");
    let source = folders.boot("a", LOAD);
    source.wait_for_work(5_000);
    folders.make_old("b");
    let whole = folders.old_pages("b");
    let destination = folders.empty("b");
    for mode in [Mode::Precopy, Mode::Postcopy] {
        let reception = Reception::start(&destination, Transport::Tcp, mode);
        let before = source.events().len();
        source.remote_ok(&["send-migration", &send_option(&reception.url, mode)]);
        let told = reception.finish();
        assert!(!told.status.success());
        let failure = failure_after(&source, before);
        for text in [failure, String::from_utf8_lossy(&told.stderr).into_owned()] {
            assert!(text.contains("holds data") && text.contains(RAM_FILE), "{text}");
        }
        assert_eq!(folders.old_pages("b"), whole, "the file was emptied");
        wait_for("the guest at the source", || (source.api().state() == "Running").then_some(()));
        source.wait_for_work(5_000);
    }
    move_over(source, &destination, Mode::Precopy);
    check(&folders, "b", &destination);
    destination.shut_down();
}

fn both_on_one() {
    for mode in [Mode::Precopy, Mode::Postcopy] {
        let folders = Folders::small("on");
        let source = folders.boot("a", LOAD);
        source.wait_for_work(5_000);
        let destination = folders.empty("a");
        let reception = Reception::start(&destination, Transport::Unix, mode);
        source.remote_ok(&["send-migration", &send_option(&reception.url, mode)]);
        is_refusal(&failure_of(&source), source.pid());
        assert!(!reception.finish().status.success());
        wait_for("the guest at the source", || (source.api().state() == "Running").then_some(()));
        source.wait_for_work(5_000);
        source.verify();
        source.shut_down();
    }
}

fn over_a_guest() {
    let folders = Folders::small("on");
    let (_folder, url) = place();
    let guest = folders.boot("a", LOAD);
    guest.wait_for_work(5_000);
    crate::snapshot::save(&guest, &url);
    guest.remote_ok(&["resume"]);
    for mode in ["copy", "ondemand"] {
        let vmm = folders.empty("a");
        let option = format!("source_url={url},memory_restore_mode={mode}");
        let output = vmm.remote(&["restore", &option]);
        assert!(!output.status.success());
        let text = String::from_utf8_lossy(&output.stderr);
        is_refusal(&text, guest.pid());
        vmm.shut_down();
    }
    let (code, text) = folders.guest("a", LOAD).run();
    assert_ne!(code, 0, "{text}");
    is_refusal(&text, guest.pid());
    guest.wait_for_work(5_000);
    guest.verify();
    guest.shut_down();
}

fn page_server() {
    let folders = Folders::small("on");
    let mut source = folders.boot("a", "workload=random-write mem=96M");
    source.wait_for_work(5_000);
    let destination = folders.empty("b");
    let reception = Reception::start(&destination, Transport::Tcp, Mode::Postcopy);
    let option = format!(
        "destination_url={},memory_mode=postcopy,page_server=on,bandwidth=8M",
        reception.url
    );
    source.remote_ok(&["send-migration", &option]);
    let handed_on = source.wait_for_event("migration-handed-on");
    let pid = handed_on["properties"]["pid"].as_str().and_then(|pid| pid.parse().ok());
    let pid: u32 = pid.expect("a process");
    // It stands still with pages that it has not sent, however long the rest takes.
    let page_server = Stopped::process(pid);
    assert_eq!(source.wait_for_exit(), 0, "{}", source.output());
    let (code, text) = folders.guest("a", LOAD).run();
    assert_ne!(code, 0, "{text}");
    is_refusal(&text, pid);
    drop(page_server);
    assert!(reception.finish().status.success(), "{}", destination.output());
    wait_for("the last page", || (progress(&destination)["phase"] == "done").then_some(()));
    check(&folders, "b", &destination);
    // And free again.
    wait_for("the end of the page server", || lock_is_free(&folders.file("a")).then_some(()));
    folders.boot("a", LOAD).shut_down();
    destination.shut_down();
}

fn local() {
    let folders = Folders::small("on");
    let mut source = folders.boot("a", LOAD);
    source.wait_for_work(5_000);
    let destination = folders.empty("a");
    let reception = Reception::start(&destination, Transport::Unix, Mode::Precopy);
    source.remote_ok(&["send-migration", &format!("destination_url={},local=on", reception.url)]);
    assert!(reception.finish().status.success(), "{}", destination.output());
    assert_eq!(source.wait_for_exit(), 0, "{}", source.output());
    let (code, text) = folders.guest("a", LOAD).run();
    assert_ne!(code, 0, "{text}");
    is_refusal(&text, destination.pid());
    check(&folders, "a", &destination);
    destination.shut_down();
}

/// Takes the lock that a VM takes, and releases it at once; whether it was to be had.
fn lock_is_free(path: &Path) -> bool {
    let file = File::options().read(true).write(true).open(path).expect("the file");
    let kind = |kind: libc::c_int| libc::c_short::try_from(kind).expect("a small number");
    let whole = libc::flock {
        l_type: kind(libc::F_WRLCK),
        l_whence: kind(libc::SEEK_SET),
        l_start: 0,
        l_len: 0,
        l_pid: 0,
    };
    // SAFETY: F_OFD_SETLK reads one flock, which lives during the call; the descriptor is open.
    unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const whole) == 0 }
}

fn reboot() {
    for shared in ["on", "off"] {
        let folders = Folders::small(shared);
        let vmm = folders.boot("a", LOAD);
        let (path, over) = (folders.file("a"), AtomicBool::new(false));
        let identity = fs::metadata(&path).expect("the file").ino();
        std::thread::scope(|scope| {
            let prober = scope.spawn(|| {
                let mut looks = 0_u32;
                while !over.load(Ordering::Relaxed) {
                    assert!(!lock_is_free(&path), "another VM could have had it");
                    looks += 1;
                }
                looks
            });
            for _ in 0..5 {
                vmm.remote_ok(&["reboot"]);
            }
            over.store(true, Ordering::Relaxed);
            assert!(prober.join().expect("no gap") > 0);
        });
        assert_eq!(fs::metadata(&path).expect("the file").ino(), identity);
        wait_for("the guest after its reboot", || (vmm.api().state() == "Running").then_some(()));
        vmm.wait_for_work(2_000);
        vmm.shut_down();
        assert!(lock_is_free(&path));
    }
}

/// Where a program of the guest's image expects zeros that the image does not hold.
fn bss_of_image() -> Vec<std::ops::Range<u64>> {
    let bytes = fs::read(image()).expect("the image");
    let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"));
    let half = |at: usize| usize::from(u16::from_le_bytes([bytes[at], bytes[at + 1]]));
    let wide = bytes[4] == 2;
    assert!(wide, "a 64-bit ELF");
    let table = usize::try_from(word(32)).expect("an offset");
    let headers = (0..half(56)).map(|number| table + number * half(54));
    let loads = headers.filter(|at| bytes[*at] == 1);
    loads.map(|at| word(at + 24) + word(at + 32)..word(at + 24) + word(at + 40)).collect()
}

fn boots() {
    let folders = Folders::small("on");
    folders.make_old("a");
    let vmm = folders.boot("a", LOAD);
    vmm.wait_for_work(2_000);
    let file = File::open(folders.file("a")).expect("the file");
    let mut bytes = 0;
    for range in bss_of_image() {
        let mut found = vec![0; usize::try_from(range.end - range.start).expect("a length")];
        file.read_exact_at(&mut found, range.start).expect("bytes of the image");
        // The guest has written some of it, and may have written this byte, but not many times in a row.
        for (at, piece) in (range.start..).step_by(8).zip(found.chunks(8)) {
            assert!(piece.iter().any(|byte| *byte != OLD), "{at:#x} was not cleared");
        }
        bytes += found.len();
    }
    println!("     {bytes} bytes that the image does not hold");
    let mut low = vec![0; 1 << 20];
    file.read_exact_at(&mut low, 0).expect("the first MiB");
    let old = low.chunks(16).filter(|piece| piece.iter().all(|byte| *byte == OLD)).count();
    assert_eq!(old, 0, "tables of an earlier VM could be found");
    vmm.shut_down();
}
