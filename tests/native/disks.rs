// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What the guest counts as written is on its disk whenever another host may look there: after a
//! migration, in a pause, at the end; and a disk is locked as long as anything may still be written.
//!
//! The guest writes numbered blocks, reads each before it is overwritten, and never flushes. Loop
//! devices over one file are one disk as several hosts see it: each has a page cache of its own.

use std::fs::{self, File};
use std::io::Write as _;
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use guest_reader::abi::{self, PAGE_BYTES, disk::BLOCKS, param, vcpu};
use serde_json::json;
use tempfile::TempDir;
use vm_migration::protocol::message::Command;

use crate::harness::faults::Faults;
use crate::harness::loops::{Loop, Mounted, format};
use crate::harness::migrate::{Reception, failure_of, migrate, send_option, text};
use crate::harness::relay::{Link, Point, Relay, Row, Setting};
use crate::harness::upstream::command;
use crate::harness::upstream_destination::read_frame;
use crate::harness::{Mode, Suite, Transport, Vmm, VmmBuilder, wait_for};
use crate::hung_disk::wait_until_it_hangs;

pub fn add(suite: &mut Suite) {
    for mode in [Mode::Precopy, Mode::Postcopy] {
        let name = format!("disks::another_host_reads_what_was_written_after_{}", mode.name());
        suite.add(&name, move || moves(&Disk::new(), mode));
    }
    suite.add("disks::a_pause_writes_back", paused);
    suite.add("disks::the_end_of_the_vm_writes_back", ended);
    suite.add("disks::a_disk_that_goes_with_a_reboot_is_written_back", rebooted);
    suite.add(
        "disks::a_disk_that_the_guest_ejects_is_written_back_before_its_lock_is_free",
        ejected,
    );
    suite.add("disks::a_reboot_keeps_the_lock", lock_over_reboot);
    suite.add("disks::a_failed_flush_is_named_and_stays", failed_flush);
    suite.add("disks::the_lock_outlives_the_last_write", slow_disk);
    suite.add("disks::a_vm_resumes_with_its_lock_or_not_at_all", resumes_locked);
    suite.add(
        "disks::one_that_cannot_be_read_anew_keeps_the_guest_at_the_source",
        cannot_be_read_anew,
    );
    suite.add("disks::one_that_cannot_be_read_anew_late_is_released", cannot_be_read_anew_late);
    suite.add(
        "disks::one_that_cannot_be_unlocked_keeps_the_guest_at_the_source",
        cannot_be_unlocked,
    );
}

pub const MEMORY: &str = "size=128M,shared=on";
const GUEST: &str = "workload=disk-write mem=16M";
pub const DISK_BYTES: u64 = 8 << 20;
const BLOCK: usize = 4096;

/// A disk in a folder of its own, by a name that may come to mean another device.
pub struct Disk {
    pub file: PathBuf,
    name: PathBuf,
    /// Options that say what the file is, and what gives the disk in it.
    pub option: &'static str,
    pub contents: fn(Vec<u8>) -> Vec<u8>,
    _folder: TempDir,
}

impl Disk {
    pub fn new() -> Self {
        let folder = TempDir::with_prefix("godwit-disk-").expect("a folder");
        let (file, name) = (folder.path().join("file"), folder.path().join("disk"));
        File::create(&file).and_then(|file| file.set_len(DISK_BYTES)).expect("a file");
        Self { file, name, option: "", contents: |file| file, _folder: folder }
    }

    /// From now on the name means `to`.
    pub fn name_is(&self, to: &Path) {
        let next = self.name.with_extension("next");
        std::os::unix::fs::symlink(to, &next).expect("a link");
        fs::rename(&next, &self.name).expect("a name");
    }

    pub fn guest(&self) -> Vmm {
        self.guest_with(1, GUEST)
    }

    fn guest_with(&self, vcpus: u32, cmdline: &str) -> Vmm {
        let option = format!("path={},id=data{}", self.name.display(), self.option);
        let vmm = VmmBuilder::guest(vcpus, MEMORY, cmdline).with(&["--disk", &option]).start();
        write_more(&vmm, 2 * BLOCKS);
        vmm
    }

    /// The same on the platform of cloud-hypervisor, for which a destination of the plain protocol is taken.
    fn guest_of_the_platform(&self) -> Vmm {
        let option = format!("path={},id=data{}", self.name.display(), self.option);
        let platform = ["--platform", "platform=cloud-hypervisor-53", "--disk", &option];
        let vmm = VmmBuilder::guest(1, MEMORY, GUEST).with(&platform).start();
        write_more(&vmm, 2 * BLOCKS);
        vmm
    }

    /// Checks that the file has every block that was acknowledged.
    #[track_caller]
    pub fn holds(&self, acknowledged: u64) {
        let flat = self.file.with_extension("flat");
        let copied = fs::read(&self.file).and_then(|it| fs::write(&flat, (self.contents)(it)));
        copied.map(|()| holds(&flat, acknowledged)).expect("a copy");
    }
}

/// Checks that an image has every block that was acknowledged.
#[track_caller]
pub fn holds(file: &Path, acknowledged: u64) {
    let file = File::open(file).expect("the file");
    let mut block = [0; BLOCK];
    let oldest = acknowledged.saturating_sub(BLOCKS);
    let mut lost = Vec::new();
    for number in oldest..acknowledged {
        file.read_exact_at(&mut block, number % BLOCKS * PAGE_BYTES).expect("a block");
        // The one after the last may have been written and not be counted yet.
        let next = (number + BLOCKS == acknowledged).then_some(number + BLOCKS);
        let is = |number: u64| block.chunks(8).all(|word| word == (number + 1).to_le_bytes());
        if !is(number) && !next.is_some_and(is) {
            lost.push(number);
        }
    }
    assert!(lost.is_empty(), "of {acknowledged} blocks the file lacks {lost:?}");
}

/// A figure of the guest's first vCPU.
pub fn word(vmm: &Vmm, field: u64) -> u64 {
    let guest = vmm.guest();
    guest.memory().word(abi::vcpu_gpa(0) + field).expect("the guest's memory")
}

/// Blocks that the guest counts as written; it has seen nothing wrong.
#[track_caller]
pub fn written(vmm: &Vmm) -> u64 {
    assert_eq!(word(vmm, vcpu::DISK_FAILURE), 0, "what the guest read is not what it wrote");
    word(vmm, vcpu::DISK_WRITES)
}

/// Waits until the guest has written so many more.
#[track_caller]
pub fn write_more(vmm: &Vmm, blocks: u64) {
    write_until(vmm, written(vmm) + blocks);
}

/// Waits until the guest has written so many in all.
#[track_caller]
pub fn write_until(vmm: &Vmm, target: u64) {
    wait_for("blocks written by the guest", || (written(vmm) >= target).then_some(()));
}

/// The lock that a VM takes.
fn whole() -> libc::flock {
    let l_type = libc::c_short::try_from(libc::F_WRLCK).expect("a constant");
    libc::flock { l_type, l_whence: 0, l_start: 0, l_len: 0, l_pid: 0 }
}

/// Whether another open file could not lock it.
pub fn is_locked(path: &Path) -> bool {
    let file = File::options().read(true).write(true).open(path).expect("the disk");
    let mut range = whole();
    // SAFETY: F_OFD_GETLK reads and writes one flock, which lives during the call.
    let answer = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_GETLK, &raw mut range) };
    assert_eq!(answer, 0, "{}", std::io::Error::last_os_error());
    i32::from(range.l_type) != libc::F_UNLCK
}

/// Takes the lock that a VM would as soon as it is free, until the answer is dropped.
pub fn lock(path: &Path) -> File {
    let file = File::options().read(true).write(true).open(path).expect("the disk");
    let range = whole();
    // SAFETY: F_OFD_SETLKW reads one flock, which lives during the call.
    let answer = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLKW, &raw const range) };
    assert_eq!(answer, 0, "{}", std::io::Error::last_os_error());
    file
}

pub fn moves(disk: &Disk, mode: Mode) {
    let (here, there) = (Loop::over(&disk.file), Loop::over(&disk.file));
    disk.name_is(here.path());
    let source = disk.guest();
    // The other host has had the disk open, so it has pages of it that are old.
    let reader = File::open(there.path()).expect("the disk");
    let mut old = vec![0; usize::try_from(BLOCKS).expect("few") * BLOCK];
    reader.read_exact_at(&mut old, 0).expect("its contents");
    write_more(&source, BLOCKS / 2);
    disk.name_is(there.path());
    let destination = Vmm::empty();
    migrate(source, &destination, Transport::Tcp, mode);
    // The source has ended, and with it whatever it might have written late.
    write_more(&destination, 2 * BLOCKS);
    destination.api().put("vm.pause", "").ok();
    disk.holds(written(&destination));
    destination.shut_down();
}

fn on_a_loop() -> (Disk, Loop) {
    let disk = Disk::new();
    let device = Loop::over(&disk.file);
    disk.name_is(device.path());
    (disk, device)
}

fn paused() {
    let (disk, _device) = on_a_loop();
    let vmm = disk.guest();
    for _ in 0..3 {
        vmm.api().put("vm.pause", "").ok();
        disk.holds(written(&vmm));
        vmm.api().put("vm.resume", "").ok();
        write_more(&vmm, BLOCKS);
    }
    vmm.shut_down();
}

fn ended() {
    let (disk, device) = on_a_loop();
    // Another process has it open: it is not written back by being closed.
    let _reader = File::open(device.path()).expect("the disk");
    let vmm = disk.guest();
    let at_least = written(&vmm);
    vmm.api().put("vm.shutdown", "").ok();
    assert!(!is_locked(device.path()));
    let file = File::open(&disk.file).expect("the file");
    let mut oldest = u64::MAX;
    for block in 0..BLOCKS {
        let mut word = [0; 8];
        file.read_exact_at(&mut word, block * PAGE_BYTES).expect("a block");
        oldest = oldest.min(u64::from_le_bytes(word));
    }
    // Words are numbers and one.
    assert!(oldest + BLOCKS > at_least, "block {oldest} is the oldest after {at_least}");
    vmm.shut_down();
}

fn rebooted() {
    let (disk, device) = on_a_loop();
    let _reader = File::open(device.path()).expect("the disk");
    let vmm = disk.guest();
    let api = vmm.api();
    api.put("vm.remove-device", &json!({"id": "data"}).to_string()).ok();
    vmm.wait_for_event("device-removing");
    let at_least = written(&vmm);
    api.put("vm.reboot", "").ok();
    assert!(!is_locked(device.path()));
    let mut first = [0; 8];
    let newest = |block: u64| {
        let file = File::open(&disk.file).expect("the file");
        file.read_exact_at(&mut first, block * PAGE_BYTES).expect("a block");
        u64::from_le_bytes(first)
    };
    let newest = (0..BLOCKS).map(newest).max().expect("blocks");
    assert!(newest >= at_least, "block {newest} is the newest after {at_least}");
    vmm.shut_down();
}

fn ejected() {
    let (disk, device) = on_a_loop();
    let mut first = [0; 8];
    // The disk has been open elsewhere all the time: it is not written back by being closed.
    let reader = File::open(device.path()).expect("the disk");
    // The second vCPU is what the guest lets go with.
    let vmm = disk.guest_with(2, &format!("{GUEST} vcpus=1"));
    let api = vmm.api();
    let places = crate::hotplug::places(&api);
    let (_, place) = places.iter().find(|(id, _)| id == "data").expect("its place");
    let number = place.split(['/', ':', '.']).rev().nth(1).expect("a device number");
    let number = u32::from_str_radix(number, 16).expect("a device number");
    // What was written before the request is written back at once. What comes later is what this is about.
    let asked = written(&vmm);
    api.put("vm.remove-device", &json!({"id": "data"}).to_string()).ok();
    vmm.wait_for_event("device-removing");
    let file = File::open(&disk.file).expect("the file");
    wait_for("the first writing back", || {
        let newest = |block: u64| {
            file.read_exact_at(&mut first, block * PAGE_BYTES).expect("a block");
            u64::from_le_bytes(first)
        };
        ((0..BLOCKS).map(newest).max() >= Some(asked)).then_some(())
    });
    write_more(&vmm, BLOCKS);
    assert!(is_locked(device.path()));
    let path = device.path().to_owned();
    let watcher = std::thread::spawn(move || lock(&path));
    let guest = vmm.guest();
    guest
        .memory()
        .set_word(abi::PARAM_GPA + param::EJECT, 1 << number)
        .expect("the parameter page");
    let locked = watcher.join().expect("the lock");
    // The guest has stopped writing before it let go.
    disk.holds(written(&vmm));
    drop((locked, reader));
    vmm.wait_for_event("device-removed");
    assert!(!crate::hotplug::places(&api).iter().any(|(id, _)| id == "data"));
    vmm.wait_for_heartbeat();
    vmm.shut_down();
}

fn lock_over_reboot() {
    let disk = Disk::new();
    disk.name_is(&disk.file);
    let vmm = disk.guest();
    let path = disk.file.clone();
    let over = std::sync::atomic::AtomicBool::new(false);
    let free = std::thread::scope(|scope| {
        let watcher = scope.spawn(|| {
            let mut free = 0_u64;
            while !over.load(std::sync::atomic::Ordering::Relaxed) {
                free += u64::from(!is_locked(&path));
            }
            free
        });
        for _ in 0..5 {
            vmm.api().put("vm.reboot", "").ok();
        }
        over.store(true, std::sync::atomic::Ordering::Relaxed);
        watcher.join().expect("the watcher")
    });
    assert_eq!(free, 0, "another VM could have had the disk");
    write_more(&vmm, BLOCKS);
    vmm.api().put("vm.shutdown", "").ok();
    assert!(!is_locked(&path));
    vmm.api().put("vm.boot", "").ok();
    assert!(is_locked(&path));
    vmm.shut_down();
}

/// The disk takes what the page cache holds only in part: the file system that its file is on is full.
fn failed_flush() {
    let folder = TempDir::with_prefix("godwit-small-").expect("a folder");
    let _small = Mounted::at(folder.path(), &["-t", "tmpfs", "-o", "size=512k", "none"]);
    let file = folder.path().join("file");
    File::create(&file).and_then(|file| file.set_len(DISK_BYTES)).expect("a file");
    let device = Loop::over(&file);
    let disk = Disk::new();
    disk.name_is(device.path());
    let vmm = disk.guest();
    let name = disk.name.to_str().expect("UTF-8").to_owned();
    let paused = vmm.api().put("vm.pause", "");
    assert_eq!(paused.status, 500, "{paused:?}");
    assert!(paused.body.contains(&name) && paused.body.contains("'data'"), "{paused:?}");
    assert_eq!(vmm.api().get("vm.info").json()["state"], "Paused");
    let told = text(&vmm.wait_for_event("disk-write-back-failed"));
    assert!(told.contains(&name), "{told}");

    let snapshots = TempDir::with_prefix("godwit-snapshot-").expect("a folder");
    let url = format!("file://{}", snapshots.path().display());
    let snapshot = vmm.api().put("vm.snapshot", &json!({"destination_url": url}).to_string());
    assert!(snapshot.status >= 400 && snapshot.body.contains(&name), "{snapshot:?}");
    let send = json!({"destination_url": "tcp:127.0.0.1:1"}).to_string();
    let send = vmm.api().put("vm.send-migration", &send);
    assert!(send.status >= 400 && send.body.contains(&name), "{send:?}");
    vmm.api().put("vm.resume", "").ok();
    vmm.wait_for_heartbeat();
    let again = vmm.api().put("vm.pause", "");
    assert_eq!(again.status, 500, "a flush that failed stays failed: {again:?}");
    vmm.shut_down();
}

fn slow_disk() {
    let folder = TempDir::with_prefix("godwit-slow-").expect("a folder");
    let system = folder.path().join("system");
    File::create(&system).and_then(|file| file.set_len(64 << 20)).expect("a file");
    format(&system);
    let mount = folder.path().join("mount");
    fs::create_dir(&mount).expect("a folder");
    let system = system.to_str().expect("UTF-8");
    let mounted = Mounted::at(&mount, &["-t", "ext4", "-o", "loop,noatime", system]);
    let file = mount.join("disk");
    let bytes = vec![0; usize::try_from(DISK_BYTES).expect("little")];
    fs::write(&file, bytes).expect("a file");
    let option = format!("path={},id=data", file.display());
    let mut vmm = VmmBuilder::guest(1, MEMORY, GUEST).with(&["--disk", &option]).start();
    write_more(&vmm, BLOCKS);
    let frozen = mounted.freeze();
    wait_until_it_hangs(&vmm);
    vmm.signal(libc::SIGTERM);
    let tasks = format!("/proc/{}/task", vmm.pid());
    let has_vcpus = || {
        let tasks = fs::read_dir(&tasks).expect("its threads");
        tasks.flatten().any(|task| {
            let name = fs::read_to_string(task.path().join("comm")).unwrap_or_default();
            name.starts_with("vcpu")
        })
    };
    wait_for("the end of the vCPUs", || (!has_vcpus()).then_some(()));
    // From here on it could be released at any time.
    let until = Instant::now() + Duration::from_secs(1);
    while Instant::now() < until {
        assert!(is_locked(&file), "the lock is gone while a write is under way");
    }
    assert_eq!(vmm.exited(), None);
    drop(frozen);
    assert_eq!(vmm.wait_for_exit(), 0, "{}", vmm.output());
    assert!(!is_locked(&file));
}

/// A peer of the plain protocol that takes everything, and refuses when the guest is to run.
fn refuse_at_complete(mut source: TcpStream, at_complete: impl FnOnce()) {
    const OK: u8 = 1;
    const REFUSED: u8 = 2;
    let mut at_complete = Some(at_complete);
    while let Some(frame) = read_frame(&mut source) {
        let is_last = frame.kind == command::COMPLETE;
        if is_last {
            at_complete.take().expect("once")();
        }
        let mut answer = [0; 16];
        answer[0] = if is_last { REFUSED } else { OK };
        source.write_all(&answer).expect("the source listens");
        if is_last {
            return;
        }
    }
}

/// A hand-over fails when the disk has been released, and another VM has it by then.
fn resumes_locked() {
    let disk = Disk::new();
    disk.name_is(&disk.file);
    let vmm = disk.guest_of_the_platform();
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let url = format!("tcp:{}", listener.local_addr().expect("an address"));
    let mut other = None;
    std::thread::scope(|scope| {
        let peer = scope.spawn(|| {
            let (stream, _) = listener.accept().expect("the source connects");
            let mut held = None;
            refuse_at_complete(stream, || held = Some(lock(&disk.file)));
            held
        });
        let send = json!({"destination_url": url, "memory_mode": "Precopy"}).to_string();
        let sent = vmm.api().put("vm.send-migration", &send);
        assert!(sent.status < 300, "{sent:?}");
        other = peer.join().expect("the peer");
    });
    assert!(other.is_some(), "the source never came to the end");
    vmm.wait_for_event("migration-failed");
    wait_for("the machine", || {
        (vmm.api().get("vm.info").json()["state"] == "Paused").then_some(())
    });
    let before = written(&vmm);
    let refused = vmm.api().put("vm.resume", "");
    assert_eq!(refused.status, 500, "{refused:?}");
    assert!(refused.body.contains(disk.name.to_str().expect("UTF-8")), "{refused:?}");
    assert_eq!(vmm.api().get("vm.info").json()["state"], "Paused");
    assert_eq!(written(&vmm), before, "the guest ran on a disk of another VM");
    drop(other);
    vmm.api().put("vm.resume", "").ok();
    assert!(is_locked(&disk.file));
    write_more(&vmm, BLOCKS);
    vmm.shut_down();
}

/// A migration that is held at a message, and whose destination has a disk that cannot be read anew.
struct Held {
    source: Vmm,
    destination: Vmm,
    _relay: Relay,
    reception: Reception,
    here: Loop,
    there: Loop,
    _disk: Disk,
    _small: Mounted,
    _folder: TempDir,
}

impl Held {
    /// Something else has written to the disk at the destination when the migration comes to `command`,
    /// and the host cannot put that anywhere: the file system under it is full.
    fn at(command: Command) -> Self {
        let folder = TempDir::with_prefix("godwit-full-").expect("a folder");
        let small = Mounted::at(folder.path(), &["-t", "tmpfs", "-o", "size=2m", "none"]);
        let file = folder.path().join("file");
        let all = File::create(&file).and_then(|file| file.set_len(DISK_BYTES).map(|()| file));
        let used = vec![1; usize::try_from(BLOCKS * PAGE_BYTES).expect("little")];
        all.and_then(|file| file.write_all_at(&used, 0)).expect("a file");
        fs::write(folder.path().join("rest"), vec![1; 4 << 20]).expect_err("it is full now");
        let (here, there) = (Loop::over(&file), Loop::over(&file));
        let mut disk = Disk::new();
        disk.file = file;
        disk.name_is(here.path());
        let source = disk.guest();
        disk.name_is(there.path());
        let destination = Vmm::empty();
        let (mode, link, point) = (Mode::Precopy, Link::Control, Point::Message);
        let reception = Reception::start(&destination, Transport::Tcp, mode);
        let row = Row { mode, link, command, point, setting: Setting::Usual };
        let relay = Relay::start(&reception.url, mode, Some(row));
        source.remote_ok(&["send-migration", &send_option(&relay.url, mode)]);
        assert!(relay.wait(Duration::from_secs(20)), "{}", source.output());
        let other = File::options().write(true).open(there.path()).expect("the disk");
        other.write_all_at(&[7; BLOCK], DISK_BYTES - PAGE_BYTES).expect("into the page cache");
        relay.release();
        Self {
            source,
            destination,
            _relay: relay,
            reception,
            here,
            there,
            _disk: disk,
            _small: small,
            _folder: folder,
        }
    }
}

/// What cannot be read anew is found out as long as the source can take its guest back.
fn cannot_be_read_anew() {
    let held = Held::at(Command::State);
    let received = held.reception.finish();
    assert!(!received.status.success(), "{}", held.destination.output());
    let told = String::from_utf8_lossy(&received.stderr).into_owned();
    assert!(told.contains("cannot be read anew"), "{told}");
    assert_eq!(held.destination.api().get("vm.info").status, 404);
    let reason = failure_of(&held.source);
    assert!(reason.contains("cannot be read anew"), "{reason}");
    wait_for("the VM to run on", || (held.source.api().state() == "Running").then_some(()));
    assert!(is_locked(held.here.path()) && !is_locked(held.there.path()));
    write_more(&held.source, BLOCKS);
    held.source.shut_down();
    held.destination.shut_down();
}

/// After the acknowledgement the guest is the destination's: it stays there, stands, and `vm.resume` tries
/// again.
fn cannot_be_read_anew_late() {
    let held = Held::at(Command::Confirm);
    let received = held.reception.finish();
    assert!(!received.status.success(), "{}", held.destination.output());
    let told = String::from_utf8_lossy(&received.stderr).into_owned();
    assert!(told.contains("was not started") && told.contains("cannot be read anew"), "{told}");
    let event = text(&held.destination.wait_for_event("migration-receive-failed"));
    assert!(event.contains("cannot be read anew"), "{event}");
    assert_eq!(held.destination.api().state(), "Paused");
    assert!(!is_locked(held.there.path()), "no VM can continue with the disk");
    // The source hears of it on its own connection, and gives up what is left of the guest no earlier.
    failure_of(&held.source);
    held.source.api().put("vm.delete", "").ok();
    held.source.shut_down();
    // An operator that knows what was lost starts it; flushes keep failing.
    held.destination.api().put("vm.resume", "").ok();
    assert!(is_locked(held.there.path()));
    write_more(&held.destination, BLOCKS);
    let paused = held.destination.api().put("vm.pause", "");
    assert_eq!(paused.status, 500, "the failure was forgotten: {paused:?}");
    held.destination.shut_down();
}

/// The lock of a disk cannot be released at the source: another VM must not count on having it, so the
/// guest stays.
fn cannot_be_unlocked() {
    let disk = Disk::new();
    disk.name_is(&disk.file);
    let source = disk.guest();
    let destination = Vmm::empty();
    let (mode, link, command) = (Mode::Precopy, Link::Control, Command::Complete);
    let reception = Reception::start(&destination, Transport::Tcp, mode);
    let row = Row { mode, link, command, point: Point::Answer, setting: Setting::Usual };
    let relay = Relay::start(&reception.url, mode, Some(row));
    source.remote_ok(&["send-migration", &send_option(&relay.url, mode)]);
    assert!(relay.wait(Duration::from_secs(20)), "{}", source.output());
    // The source has not heard of the acknowledgement, and releases its lock next.
    let faults = Faults::inject(&source, &disk.file, "fcntl:error=EIO");
    relay.release();
    let reason = failure_of(&source);
    let name = disk.name.to_str().expect("UTF-8");
    assert!(reason.contains("'data' cannot be released") && reason.contains(name), "{reason}");
    let received = reception.finish();
    assert_eq!(received.status.code(), Some(1), "{received:?}");
    let told = String::from_utf8_lossy(&received.stderr).into_owned();
    assert!(told.contains("released"), "{told}");
    assert_eq!(destination.api().get("vm.info").status, 404);
    drop(faults);
    wait_for("the VM to run on", || (source.api().state() == "Running").then_some(()));
    assert!(is_locked(&disk.file));
    write_more(&source, BLOCKS);
    // The next migration releases it.
    migrate(source, &destination, Transport::Tcp, mode);
    write_more(&destination, BLOCKS);
    assert!(is_locked(&disk.file));
    destination.shut_down();
}
