// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A guest of the campaign: where it is, how it is looked at, and what is left behind by its moves.
//!
//! Owns its VMMs and the two directories that stand for two hosts: a zone's file has the same name
//! in both. Must never decide where the guest has to be.

use std::fs::{self, File};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process;
use std::time::Instant;

use guest_reader::{AttachOptions, Guest, Patience};
use serde_json::json;
use tempfile::TempDir;
use vm_migration::testing::TestCa;

use super::counts::{
    assert_locks, assert_memory_is_bounded, assert_no_files, assert_no_processes, assert_only,
    assert_tap,
};
use super::lives::{Life, Memory};
use crate::harness::pool::Pool;
use crate::harness::taps::interface_exists;
use crate::harness::vmm::GUEST_PATIENCE;
use crate::harness::{Vmm, VmmBuilder, wait_for};
use crate::meanwhile;
use crate::snapshot::{place, save};

/// Where files of zones are: userfaultfd wants shared memory.
pub const SHARED_MEMORY: &str = "/dev/shm";
/// Of every zone that is a file.
const ZONE_FILE: &str = "ram.mem";
/// Of the disk that is there from the start.
const BOOT_DISK: &str = "boot";
/// The socket of the vsock device, alongside the images.
const VSOCK: &str = "vsock";
/// So many times a guest gives all its pages up at a go.
pub const BALLOON_ROUNDS: u64 = 3;
/// A guest with the VMM it is in, and the other one while it moves.
pub struct Running {
    pub life: Life,
    pub here: Option<Vmm>,
    pub there: Option<Vmm>,
    hosts: [TempDir; 2],
    /// Where it is, and where the other VMM is.
    at: usize,
    there_at: usize,
    /// What its destinations may take their memory from, from the first that does.
    pool: Option<Pool>,
    disks: Disks,
    /// Of both sides, from the first migration that needs them.
    certificates: Option<TempDir>,
    /// Of its tap.
    tap: Option<String>,
    /// Whether its last VMM was killed.
    pub was_killed: bool,
}

/// Its disks, on storage that both hosts have, and those that came while it ran.
struct Disks {
    images: TempDir,
    boot: String,
    /// How many there have been.
    count: u32,
    plugged: Vec<String>,
    /// Those that it was asked to let go, which it never does: they are gone after a reset.
    leaving: Vec<String>,
}

impl Disks {
    const MAX: u32 = 4;

    fn new() -> Self {
        let images = TempDir::with_prefix("godwit-soak-disks-").expect("a folder");
        Self {
            images,
            boot: BOOT_DISK.to_owned(),
            count: 0,
            plugged: Vec::new(),
            leaving: Vec::new(),
        }
    }

    /// The image of one.
    fn path(&self, id: &str) -> PathBuf {
        self.images.path().join(id)
    }

    fn make(&self, id: &str) -> PathBuf {
        let path = self.path(id);
        File::create(&path).and_then(|file| file.set_len(1 << 20)).expect("a file");
        path
    }

    /// The ids in a VM's configuration.
    fn of(vmm: &Vmm) -> Vec<String> {
        let info = vmm.api().get("vm.info").ok().json();
        let disks = info["config"]["disks"].as_array().cloned().unwrap_or_default();
        disks.iter().filter_map(|disk| Some(disk["id"].as_str()?.to_owned())).collect()
    }
}

impl Running {
    /// Boots the guest of this seed.
    pub fn boot(life: Life, seed: u64) -> Self {
        // Named after this process and this guest: 15 characters at most.
        let tap = || format!("gs{}x{}", process::id() % 10_000_000, seed % 1_000);
        let tap = life.devices.has_tap.then(tap);
        let base = if Path::new(SHARED_MEMORY).is_dir() {
            SHARED_MEMORY.into()
        } else {
            std::env::temp_dir()
        };
        let host = || TempDir::with_prefix_in("godwit-soak-", &base).expect("a folder");
        let mut running = Self {
            life,
            here: None,
            there: None,
            hosts: [host(), host()],
            at: 0,
            there_at: 0,
            pool: None,
            disks: Disks::new(),
            certificates: None,
            tap,
            was_killed: false,
        };
        let mut builder =
            VmmBuilder::guest(running.life.vcpus, &running.memory(), &running.life.cmdline)
                .with(&running.zones())
                .with(&running.devices());
        if running.life.has_balloon {
            builder = builder.with(&["--balloon", "size=0,free_page_reporting=on"]);
        }
        running.here = Some(in_directory(builder, running.hosts[0].path()).start());
        if running.life.memory == Memory::FileOld {
            fill(&running.hosts[1].path().join(ZONE_FILE), running.life.mib);
        }
        running.wait_until_it_works();
        running.assert_holds_its_own();
        running
    }

    fn devices(&self) -> Vec<String> {
        let devices = self.life.devices;
        let mut words = Vec::new();
        if devices.has_disk {
            let path = self.disks.make(BOOT_DISK);
            let more = if devices.has_iommu { ",iommu=on" } else { "" };
            words.push("--disk".to_owned());
            words.push(format!("path={},id={BOOT_DISK}{more}", path.display()));
        }
        if let Some(tap) = &self.tap {
            words.extend(["--net".to_owned(), format!("tap={tap},id=lan")]);
        }
        if devices.has_vsock {
            let socket = self.disks.path(VSOCK);
            words.push("--vsock".to_owned());
            words.push(format!("cid=3,socket={}", socket.display()));
        }
        if devices.has_rtc {
            words.extend(["--rtc", "id=clock"].map(str::to_owned));
        }
        words
    }

    fn memory(&self) -> String {
        let mib = self.life.mib;
        match self.life.memory {
            Memory::Small => format!("size={mib}M,shared=on,thp=off"),
            Memory::Thp => format!("size={mib}M,shared=on"),
            Memory::Private => format!("size={mib}M"),
            Memory::Huge => format!("size={mib}M,hugepages=on,hugepage_size=2M"),
            Memory::FileFresh | Memory::FileOld | Memory::Zones => "size=0".to_owned(),
        }
    }

    fn zones(&self) -> Vec<String> {
        let mib = self.life.mib;
        let mut zones = match self.life.memory {
            Memory::FileFresh | Memory::FileOld => {
                vec![format!("id=file,size={mib}M,shared=on,file={ZONE_FILE}")]
            }
            Memory::Zones => vec![
                format!("id=file,size={}M,shared=on,file={ZONE_FILE}", mib / 2),
                format!("id=one,size={}M,shared=on", mib / 4),
                format!("id=two,size={}M,shared=on", mib / 4),
            ],
            _ => return Vec::new(),
        };
        zones.insert(0, "--memory-zone".to_owned());
        zones
    }

    /// The VMM that has it.
    pub fn vmm(&self) -> &Vmm {
        self.here.as_ref().expect("a VMM")
    }

    /// A VMM at the other host, or at the same one.
    pub fn start_destination(&mut self, is_same_host: bool) {
        self.there_at = if is_same_host { self.at } else { 1 - self.at };
        let host = self.hosts[self.there_at].path();
        if !is_same_host && matches!(self.life.memory, Memory::FileFresh | Memory::Zones) {
            let _ = fs::remove_file(host.join(ZONE_FILE));
        }
        self.there = Some(in_directory(VmmBuilder::new::<&str>(&[]), host).start());
    }

    /// It is where it was sent. The VMM that it has left.
    pub fn arrived(&mut self) -> Option<Vmm> {
        self.at = self.there_at;
        std::mem::replace(&mut self.here, self.there.take())
    }

    /// Saves it, kills its VMM, and restores it in another.
    pub fn through_snapshot(&mut self, mode: &str) {
        let (_folder, url) = place();
        save(self.vmm(), &url);
        if let Some(mut old) = self.here.take() {
            old.signal(libc::SIGKILL);
            old.wait_for_exit();
        }
        let restored =
            in_directory(VmmBuilder::new::<&str>(&[]), self.hosts[self.at].path()).start();
        self.here = Some(restored);
        let option = format!("source_url={url},memory_restore_mode={mode},resume=on");
        self.vmm().remote_ok(&["restore", &option]);
        if mode == "ondemand" {
            // The file is read until then.
            self.vmm().wait_for_event("restore-memory-completed");
        }
        self.wait_until_it_works();
    }

    /// The option of a destination that takes its memory from the pool.
    pub fn pool(&mut self) -> String {
        let pages = if self.life.memory == Memory::Small { "4K" } else { "thp" };
        let slots = format!("size = '{}M'\npages = '{pages}'\ncount = 3", self.life.mib);
        self.pool.get_or_insert_with(|| Pool::start(&[&slots])).option()
    }

    /// A disk comes, or the guest is asked to let one go.
    pub fn plug(&mut self) {
        let api = self.here.as_ref().expect("a VMM").api();
        let disks = &mut self.disks;
        if let Some(id) = disks.plugged.pop() {
            api.put("vm.remove-device", &json!({ "id": id }).to_string()).ok();
            disks.leaving.push(id);
        } else if disks.count < Disks::MAX {
            disks.count += 1;
            let id = format!("hot{}", disks.count);
            let path = disks.make(&id);
            api.put("vm.add-disk", &json!({ "path": path, "id": id }).to_string()).ok();
            disks.plugged.push(id);
        }
    }

    /// Reboots it: disks that were asked to go are gone.
    pub fn reset(&mut self) {
        self.vmm().api().put("vm.reboot", "").ok();
        let left = Disks::of(self.vmm());
        for id in self.disks.leaving.drain(..) {
            assert!(!left.contains(&id), "the disk {id} is there after a reset: {left:?}");
        }
    }

    /// The guest in this VMM, as far as it has come.
    fn guest(vmm: &Vmm) -> Guest {
        let options =
            AttachOptions { names: vec![ZONE_FILE.to_owned()], ..AttachOptions::default() };
        GUEST_PATIENCE
            .until("the guest to be there", || Guest::attach_with(vmm.pid(), &options).map(Some))
            .unwrap_or_else(|error| panic!("{error:?}"))
    }

    /// Waits until the guest has filled its pages and every vCPU moves on. A reset that was on its way
    /// gives the guest other memory, so it is looked for anew now and then.
    pub fn wait_until_it_works(&self) {
        let begun = Instant::now();
        let part = Patience(GUEST_PATIENCE.0 / 12);
        let filled = |status: &guest_reader::Status| {
            status.stage == "running"
                && status.complete()
                && status.known().all(|vcpu| vcpu.state != "prefill" && vcpu.iterations > 0)
        };
        loop {
            let guest = Self::guest(self.vmm());
            let works = guest.wait_until("the workload", part, filled);
            let Err(error) = works.and_then(|_| guest.wait_for_heartbeat(part)) else { return };
            assert!(begun.elapsed() < GUEST_PATIENCE.0, "the guest does not run: {error}");
        }
    }

    /// Compares every page, twice if the guest is to continue: right after the move, and after it has
    /// written for a while.
    pub fn check(&self, is_paused: bool) {
        let vmm = self.vmm();
        if is_paused {
            let guest = Self::guest(vmm);
            assert_eq!(vmm.api().state(), "Paused", "a paused VM arrives paused");
            // What a guest that releases pages holds in the middle of that, its table does not say.
            if !self.life.has_balloon {
                Self::compare(&guest);
            }
            vmm.api().put("vm.resume", "").ok();
        }
        assert_eq!(vmm.api().state(), "Running", "after the move");
        let disks = Disks::of(vmm);
        for id in self.disk_ids() {
            assert!(disks.contains(id), "the disk {id} is gone: {disks:?}");
        }
        self.wait_until_it_works();
        let guest = self.compare_running();
        let before = guest.status().expect("the guest's status").iterations();
        self.use_balloon();
        let more = if self.life.has_balloon { 1 } else { 200 };
        guest
            .wait_until("the guest to continue", GUEST_PATIENCE, |status| {
                status.iterations() >= before + more
            })
            .unwrap_or_else(|error| panic!("{error:?}"));
        self.wait_for_balloon(&guest);
    }

    fn compare_running(&self) -> Guest {
        let vmm = self.vmm();
        let guest = Self::guest(vmm);
        self.wait_for_balloon(&guest);
        vmm.api().put("vm.pause", "").ok();
        Self::compare(&guest);
        vmm.api().put("vm.resume", "").ok();
        guest
    }

    /// While others move it goes on, and its memory and what it has of the host stay its own.
    pub fn look(&self) {
        let guest = self.compare_running();
        if !self.life.has_balloon {
            guest.wait_for_heartbeat(GUEST_PATIENCE).unwrap_or_else(|error| panic!("{error:?}"));
        }
        self.assert_holds_its_own();
    }

    fn disk_ids(&self) -> impl Iterator<Item = &String> {
        let boot = self.life.devices.has_disk.then_some(&self.disks.boot);
        boot.into_iter().chain(&self.disks.plugged)
    }

    /// Its VMM has its tap and its locks, no other process has them, and its memory is bounded.
    pub fn assert_holds_its_own(&self) {
        let vmm = self.vmm();
        assert_tap(vmm, self.tap.as_deref());
        let held: Vec<_> = self.disk_ids().map(|id| self.disks.path(id)).collect();
        assert_locks(&self.files(), Some(vmm), &held);
        assert_memory_is_bounded(vmm, self.life.mib, self.life.memory.is_shared());
    }

    /// All that can be locked.
    fn files(&self) -> Vec<PathBuf> {
        let images = fs::read_dir(self.disks.images.path()).expect("a folder").flatten();
        let zones = self.hosts.iter().map(|host| host.path().join(ZONE_FILE));
        images.map(|entry| entry.path()).chain(zones).collect()
    }

    /// The option of both sides for a migration over TLS.
    pub fn tls(&mut self) -> String {
        let folder = self.certificates.get_or_insert_with(|| {
            let folder = TempDir::with_prefix("godwit-tls-").expect("a folder");
            TestCa::new().write_all(folder.path(), &["127.0.0.1"]);
            folder
        });
        format!(",tls_dir={}", folder.path().display())
    }

    /// Lets it give all its pages up and take them again, a few times; meanwhile its table
    /// does not say what they hold.
    pub fn use_balloon(&self) {
        if self.life.has_balloon {
            let words = format!("iterations={BALLOON_ROUNDS}");
            Self::guest(self.vmm()).set(&words).unwrap_or_else(|error| panic!("{error:?}"));
        }
    }

    fn wait_for_balloon(&self, guest: &Guest) {
        if self.life.has_balloon {
            guest
                .wait_until("the last page to be filled", GUEST_PATIENCE, |status| {
                    status.all_in("done")
                })
                .unwrap_or_else(|error| panic!("{error:?}"));
        }
    }

    fn compare(guest: &Guest) {
        let report = guest.verify_all(2).expect("every page can be read");
        let status = guest.status().expect("the guest's status");
        assert!(report.is_clean(), "wrong pages: {report:?}");
        assert!(report.written > 0, "nothing was written: {report:?}");
        assert!(status.complete(), "status pages are missing");
        assert_eq!(status.errors(), 0, "the guest saw errors: {status:?}");
        for vcpu in status.known() {
            assert_eq!(vcpu.tsc_backwards, 0, "the TSC went backwards");
            assert_eq!(vcpu.balloon.failure, None, "the balloon's driver failed");
        }
    }

    /// Makes the guest crash, if its code can be written yet.
    pub fn crash(vmm: &Vmm) {
        let options =
            AttachOptions { names: vec![ZONE_FILE.to_owned()], ..AttachOptions::default() };
        if let Ok(guest) = Guest::attach_with(vmm.pid(), &options) {
            meanwhile::crash_guest(&guest);
        }
    }

    /// A fresh copy of the guest's code, and of all it does.
    pub fn reboot(&self) {
        let vmm = self.vmm();
        self.wait_until_it_works();
        let before = Self::guest(vmm).status().expect("the guest's status").first_tsc;
        vmm.api().put("vm.reboot", "").ok();
        wait_for("a guest that started anew", || {
            let status = Self::guest(vmm).status().ok()?;
            (status.first_tsc != before && status.stage == "running").then_some(())
        });
        self.wait_until_it_works();
    }

    /// Ends it, and its VMM with it.
    pub fn end(mut self) {
        if let Some(mut vmm) = self.here.take() {
            vmm.end();
            assert_no_processes(&vmm, "last VMM");
            assert_no_files(&vmm);
        }
        self.assert_nothing_is_left();
    }

    /// It was lost with the process that had its pages, and so is all that it had of the host.
    pub fn lost(self) {
        self.assert_nothing_is_left();
    }

    fn assert_nothing_is_left(mut self) {
        if let Some(pool) = self.pool.take() {
            pool.wait_until_ready();
            let wrong = pool.count("not_zero_total", "") + pool.count("unproved_total", "");
            assert_eq!(wrong, 0, "memory came back to the pool with something in it");
        }
        assert_locks(&self.files(), None, &[]);
        if let Some(tap) = &self.tap {
            wait_for("the end of the tap", || (!interface_exists(tap)).then_some(()));
        }
        for host in &self.hosts {
            assert_only(host.path(), &[ZONE_FILE.to_owned()]);
        }
        let mut images: Vec<_> = (1..=Disks::MAX).map(|number| format!("hot{number}")).collect();
        images.push(BOOT_DISK.to_owned());
        if self.was_killed {
            // Its VMM could not take it away.
            images.push(VSOCK.to_owned());
        }
        assert_only(self.disks.images.path(), &images);
    }
}

fn in_directory(builder: VmmBuilder, directory: &Path) -> VmmBuilder {
    let directory = directory.to_str().expect("UTF-8");
    builder.wrapped(&["sh", "-c", "cd \"$0\" && exec \"$@\"", directory])
}

/// A file that another guest has used.
fn fill(path: &Path, mib: u64) {
    let old: Vec<u8> =
        (0..1_u32 << 18).flat_map(|word| (word | 0x5500_0001).to_le_bytes()).collect();
    let mut file = fs::File::create(path).expect("a file");
    for _ in 0..mib {
        file.write_all(&old).expect("room for a file");
    }
}
