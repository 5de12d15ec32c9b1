// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! VMs on memory of the pool: no VM sees what another VM wrote, whatever happened to that VM, and
//! without the pool a VM starts all the same.

use std::fs::{File, Metadata};
use std::io::{PipeReader, Read as _};
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::time::{Duration, Instant};

use prezero_pool_client::{PagesWanted, PoolConnection, PoolError, Refusal, Take};

use crate::harness::migrate::Reception;
use crate::harness::pool::Pool;
use crate::harness::{
    HugePages, Mode, PATIENCE, Suite, Transport, Vmm, VmmBuilder, process, wait_for,
};

/// The soak's length in seconds, and the variable that makes it longer.
const SOAK_S: u64 = 15;
const SOAK_VARIABLE: &str = "GODWIT_POOL_SOAK_S";

pub fn add(suite: &mut Suite) {
    suite.add("prezero::the_next_vm_sees_zeroes_after_a_kill", after_a_kill);
    suite.add("prezero::a_page_that_a_former_user_keeps_is_no_other_users", || kept_page(None));
    suite.add("prezero::with_reuse_a_page_in_a_pipe_is_the_same_users", || {
        kept_page(Some("same-user"));
    });
    suite.add("prezero::a_user_without_a_limit_keeps_root_out_of_nothing", connections);
    suite.add("prezero::who_says_nothing_is_closed_and_who_has_memory_is_not", silent);
    suite.add("prezero::zones_with_slots_of_their_own", zones);
    suite.add_long(
        "prezero::memory_on_both_sides_of_the_hole",
        Duration::from_mins(5),
        around_the_hole,
    );
    suite.add("prezero::huge_pages", huge_pages);
    suite.add("prezero::a_reboot_keeps_the_slot", || {
        reboot("4K", "size=192M,thp=off");
    });
    suite.add("prezero::a_reboot_keeps_the_slot_with_huge_pages", || {
        // Not one page is left for other memory.
        let _pages = HugePages::borrow(96);
        reboot("2M", "size=192M,hugepages=on");
    });
    suite.add("prezero::memory_that_moved_is_left_alone", moved);
    suite.add("prezero::a_vm_starts_without_the_pool", without);
    let seconds = std::env::var(SOAK_VARIABLE).ok().and_then(|text| text.parse().ok());
    let seconds = seconds.unwrap_or(SOAK_S);
    let limit = Duration::from_secs(2 * seconds + 300);
    suite.add_long("prezero::soak", limit, move || soak(Duration::from_secs(seconds)));
}

/// Whether all of a file is zero, without populating what it lacks.
#[track_caller]
pub fn assert_zero(file: &File, len_bytes: u64) {
    let mut bytes = vec![0; 1 << 20];
    let mut at = 0;
    while at < len_bytes {
        let len = bytes.len().min(usize::try_from(len_bytes - at).expect("a length"));
        let part = &mut bytes[..len];
        file.read_exact_at(part, at).expect("memory can be read");
        let found = part.iter().position(|byte| *byte != 0);
        assert!(found.is_none(), "a foreign byte at {at:#x} + {found:?}");
        at += len as u64;
    }
}

/// The memfd that a VMM took from the pool.
pub fn memory_of_pool(pid: u32) -> Metadata {
    let folder = std::fs::read_dir(format!("/proc/{pid}/fd")).expect("the process is there");
    let is_ram = |path: &std::path::PathBuf| {
        let target = std::fs::read_link(path).unwrap_or_default();
        target.to_string_lossy().starts_with("/memfd:ram-pool")
    };
    let mut paths = folder.filter_map(|entry| Some(entry.ok()?.path()));
    let path = paths.find(is_ram).expect("memory of the pool");
    std::fs::metadata(path).expect("a memfd")
}

fn inode_of_ram(pid: u32) -> u64 {
    memory_of_pool(pid).ino()
}

/// Keeps the first page of `file` in a pipe, as `vmsplice` does, and returns the end to read it from.
fn page_in_a_pipe(file: &File) -> PipeReader {
    let (reader, writer) = std::io::pipe().expect("a pipe");
    // SAFETY: a new mapping at an address that the kernel chooses; nothing refers to it.
    let page = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            4096,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED,
            file.as_raw_fd(),
            0,
        )
    };
    assert_ne!(page, libc::MAP_FAILED, "{}", std::io::Error::last_os_error());
    let part = libc::iovec { iov_base: page, iov_len: 4096 };
    // SAFETY: the kernel reads one structure and takes a reference to the page, which is mapped.
    let len = unsafe { libc::vmsplice(writer.as_raw_fd(), &raw const part, 1, 0) };
    assert_eq!(len, 4096, "{}", std::io::Error::last_os_error());
    // SAFETY: the mapping made above, which nothing refers to.
    assert_eq!(unsafe { libc::munmap(page, 4096) }, 0);
    reader
}

/// A user puts a page into a pipe and returns the memory; the next one, of the same user id, writes to all of it.
fn kept_page(reuse: Option<&str>) {
    const SIZE: u64 = 4 << 20;
    let more = reuse.map(|reuse| format!("reuse = '{reuse}'\n")).unwrap_or_default();
    let pool = Pool::start_with(&more, &["size = '4M'\npages = '4K'\ncount = 1"]);
    let (connection, taken) = pool.take(SIZE).expect("memory");
    taken.file.write_all_at(&[b'a'; 4096], 0).expect("a write");
    let mut reader = page_in_a_pipe(&taken.file);
    drop((connection, taken));
    pool.wait_until_ready();
    let (_connection, taken) = pool.take(SIZE).expect("memory");
    assert_zero(&taken.file, SIZE);
    for at in (0..SIZE).step_by(4096) {
        taken.file.write_all_at(&[b'b'; 4096], at).expect("a write");
    }
    let mut page = [0; 4096];
    reader.read_exact(&mut page).expect("the page in the pipe");
    // In place means the same page, which is why it is not the default.
    let expected = if reuse.is_some() { b'b' } else { b'a' };
    assert!(page.iter().all(|byte| *byte == expected), "it holds {:?}", &page[..8]);
}

/// Connects as another user, on a thread of its own: the kernel takes the credentials of the thread.
fn connections_of(uid: u32, socket: &Path, count: usize) -> Vec<PoolConnection> {
    std::thread::scope(|scope| {
        let connect = || {
            // SAFETY: takes numbers; only this thread changes.
            let changed = unsafe { libc::syscall(libc::SYS_setresuid, uid, uid, uid) };
            assert_eq!(changed, 0, "{}", std::io::Error::last_os_error());
            (0..count).map_while(|_| PoolConnection::open(socket).ok()).collect()
        };
        scope.spawn(connect).join().expect("the thread")
    })
}

fn connections() {
    // SAFETY: takes nothing and cannot fail.
    if unsafe { libc::geteuid() } != 0 {
        crate::harness::skip("only root can be other users".to_owned());
    }
    let more = "socket_mode = '0666'\n[limits.users]\n1 = '4M'\n2 = '4M'\n3 = '4M'\n4 = '4M'\n";
    let pool = Pool::start_with(more, &["size = '4M'\npages = '4K'\ncount = 1"]);
    pool.open_folder();
    let socket = pool.socket();
    // With a limit and without, as many as they like.
    let idle: Vec<_> = (1..=8).map(|uid| connections_of(uid, &socket, 200)).collect();
    let (connection, taken) = pool.take(4 << 20).expect("root gets in");
    drop((connection, taken));
    drop(idle);
    // A user that may have nothing is told why.
    let refused = connections_of(9, &socket, 1);
    let request = Take { size_bytes: 4 << 20, pages: PagesWanted::Small, node: None };
    let error = refused[0].take(&request).expect_err("a user without a limit");
    assert!(matches!(&error, PoolError::Refused { reason: Refusal::OverLimit, .. }), "{error:?}");
}

fn silent() {
    let pool = Pool::start(&["size = '4M'\npages = '4K'\ncount = 1"]);
    let (with_memory, taken) = pool.take(4 << 20).expect("memory");
    let begun = Instant::now();
    let mut silent = UnixStream::connect(pool.socket()).expect("a connection");
    silent.set_read_timeout(Some(PATIENCE)).expect("a limit");
    assert_eq!(silent.read(&mut [0; 8]).expect("the end"), 0);
    let took = begun.elapsed();
    // The documented limit, and the time of one look.
    assert!(took >= Duration::from_secs(10), "closed after {} ms", took.as_millis());
    assert_eq!(pool.slots("lent"), 1);
    drop((with_memory, taken));
    pool.wait_until_ready();
}

fn after_a_kill() {
    for reuse in ["never", "same-user"] {
        after_a_kill_with(reuse);
    }
}

fn after_a_kill_with(reuse: &str) {
    let more = format!("reuse = '{reuse}'\n");
    let pool = Pool::start_with(&more, &["size = '192M'\npages = '4K'\ncount = 1"]);
    let memory = format!("size=192M,thp=off{}", pool.option());
    let mut first = Vmm::boot(2, &memory, "workload=random-write mem=100% seed=7");
    first.wait_for_work(20_000);
    first.verify();
    let inode = inode_of_ram(first.pid());
    assert_eq!((pool.slots("lent"), pool.count("grants_total", "")), (1, 1));
    // No other VM gets it meanwhile.
    assert!(pool.take(192 << 20).is_err());
    first.signal(libc::SIGKILL);
    assert_eq!(first.wait_for_exit(), -libc::SIGKILL);
    pool.wait_until_ready();

    let (connection, taken) = pool.take(192 << 20).expect("memory");
    let is_same = taken.file.metadata().expect("a memfd").ino() == inode;
    assert_eq!(is_same, reuse == "same-user", "{reuse}");
    let inode = taken.file.metadata().expect("a memfd").ino();
    let blocks = taken.file.metadata().expect("a memfd").blocks();
    assert_eq!(blocks * 512, 192 << 20, "it is not populated");
    assert_zero(&taken.file, 192 << 20);
    drop((connection, taken));
    pool.wait_until_ready();

    // The guest itself finds a page that it never wrote to be zero.
    let second = Vmm::boot(1, &memory, "workload=random-write mem=100% prefill=0 check_zero=1");
    assert_eq!(inode_of_ram(second.pid()) == inode, reuse == "same-user");
    second.wait_for_work(20_000);
    second.verify();
    second.wait_for_event("prezeroed-taken");
    second.shut_down();
    pool.wait_until_ready();
    assert_eq!(pool.count("not_zero_total", "") + pool.count("unproved_total", ""), 0);
}

fn zones() {
    let pool = Pool::start(&[
        "size = '128M'\npages = '4K'\ncount = 1",
        "size = '72M'\npages = '4K'\ncount = 1",
    ]);
    let with = pool.option();
    let vmm = VmmBuilder::guest(2, "size=0,thp=off", "workload=random-write mem=96M")
        .with(&[
            "--memory-zone",
            &format!("id=zone0,size=128M,prefault=on{with}"),
            &format!("id=zone1,size=64M,prefault=background{with}"),
        ])
        .start();
    vmm.wait_for_work(20_000);
    vmm.verify();
    assert_eq!(pool.slots("lent"), 2);
    // All of it was there before, so there was nothing to populate. That would have been told before the end of
    // the pause in which pages were compared.
    vmm.wait_for_event("resumed");
    let names = vmm.event_names();
    assert!(!names.iter().any(|name| name.starts_with("prefault")), "{names:?}");
    reboot_once(&vmm);
    vmm.verify();
    assert_eq!((pool.slots("lent"), pool.count("grants_total", "")), (2, 2));
    vmm.shut_down();
    pool.wait_until_ready();
}

fn around_the_hole() {
    let pool = Pool::start(&["size = '4G'\npages = 'thp'\ncount = 1"]);
    let memory = format!("size=4G{}", pool.option());
    let vmm = Vmm::boot(2, &memory, "workload=random-write mem=2900M..300M prefill=1");
    assert_eq!(pool.slots("lent"), 1);
    vmm.wait_for_work(20_000);
    vmm.verify();
    let ram = vmm.guest_status().ram_bytes;
    assert!(ram > 4 * ((1 << 30) - (1 << 20)), "{ram}");
    vmm.shut_down();
}

fn huge_pages() {
    let _pages = HugePages::borrow(96);
    for reuse in ["never", "same-user"] {
        huge_pages_with(reuse);
    }
}

fn huge_pages_with(reuse: &str) {
    let more = format!("reuse = '{reuse}'\n");
    let pool = Pool::start_with(&more, &["size = '192M'\npages = '2M'\ncount = 1"]);
    let memory = format!("size=192M,hugepages=on{}", pool.option());
    let mut first = Vmm::boot(2, &memory, "workload=random-write mem=100%");
    let inode = inode_of_ram(first.pid());
    first.wait_for_work(5_000);
    first.verify();
    first.signal(libc::SIGKILL);
    first.wait_for_exit();
    pool.wait_until_ready();
    let second = Vmm::boot(1, &memory, "workload=random-write mem=100% prefill=0 check_zero=1");
    assert_eq!(inode_of_ram(second.pid()) == inode, reuse == "same-user");
    second.wait_for_work(5_000);
    second.verify();
    second.shut_down();
}

/// Reboots the guest and waits until the one after it works.
#[track_caller]
fn reboot_once(vmm: &Vmm) {
    vmm.reboot();
    vmm.wait_for_work(2_000);
}

/// The most memory that a process has had in its page tables, in bytes; hugetlb pages do not count.
fn most_resident_bytes(pid: u32) -> u64 {
    let status =
        std::fs::read_to_string(format!("/proc/{pid}/status")).expect("the process is there");
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).expect("a peak");
    let kib: u64 = line.trim().trim_end_matches(" kB").parse().expect("a number");
    kib << 10
}

fn reboot(pages: &str, memory: &str) {
    const SIZE: u64 = 192 << 20;
    let pool = Pool::start(&[&format!("size = '192M'\npages = '{pages}'\ncount = 1")]);
    let memory = format!("{memory}{}", pool.option());
    let vmm = Vmm::boot(2, &memory, "workload=random-write mem=100% prefill=1");
    let inode = inode_of_ram(vmm.pid());
    for _ in 0..3 {
        vmm.wait_for_work(5_000);
        reboot_once(&vmm);
        vmm.verify();
        assert_eq!(inode_of_ram(vmm.pid()), inode, "the guest has other memory");
        let (grants, returns) = (pool.count("grants_total", ""), pool.count("returns_total", ""));
        assert_eq!((pool.slots("lent"), grants, returns), (1, 1, 0));
    }
    let most = most_resident_bytes(vmm.pid());
    assert!(most < SIZE + SIZE / 2, "{} MiB were resident at a time", most >> 20);
    // An orderly end gives it back, and the next boot asks anew.
    vmm.api().put("vm.shutdown", "").ok();
    pool.wait_until_ready();
    assert_eq!(pool.count("returns_total", ""), 1);
    vmm.api().put("vm.boot", "").ok();
    vmm.wait_for_work(2_000);
    assert_eq!((pool.slots("lent"), pool.count("grants_total", "")), (1, 2));
    vmm.shut_down();
}

fn moved() {
    let pool = Pool::start(&["size = '192M'\npages = '4K'\ncount = 1"]);
    let memory = format!("size=192M,shared=on,thp=off{}", pool.option());
    let mut source = Vmm::boot(2, &memory, "workload=random-write mem=64M");
    let destination = Vmm::empty();
    let reception = Reception::start(&destination, Transport::Unix, Mode::Precopy);
    source.remote_ok(&["send-migration", &format!("destination_url={},local=on", reception.url)]);
    let output = reception.finish();
    assert!(output.status.success(), "{output:?}");
    assert_eq!(source.wait_for_exit(), 0);
    // The VMM that took the memory is gone, and the guest still lives in it.
    wait_for("lingering memory", || (pool.slots("lingering") == 1).then_some(()));
    destination.wait_for_work(20_000);
    destination.verify();
    assert_eq!(pool.slots("lingering"), 1);
    let built = || pool.count("built_bytes_total", "");
    assert_eq!(built(), 192 << 20);
    destination.shut_down();
    pool.wait_until_ready();
    assert_eq!(built(), 2 * (192 << 20));
}

/// Boots with `--memory` and expects the VMM to have said why it does without the pool.
#[track_caller]
fn boots_without(memory: &str, reason: &str) {
    let start = Instant::now();
    let vmm = Vmm::boot(1, memory, "workload=random-write mem=32M");
    let event = vmm.wait_for_event("prezeroed-unavailable");
    let error = event["properties"]["error"].as_str().unwrap_or_default().to_owned();
    assert!(error.contains(reason), "{error}");
    assert!(vmm.output().contains("does without prezeroed memory"), "{}", vmm.output());
    assert!(start.elapsed() < Duration::from_secs(20), "it waited for {:?}", start.elapsed());
    vmm.wait_for_work(1_000);
    vmm.shut_down();
}

fn without() {
    let folder = tempfile::tempdir().expect("a folder");
    let nowhere = folder.path().join("nowhere");
    let memory = |path: &std::path::Path| format!("size=128M,prezeroed={}", path.display());
    boots_without(&memory(&nowhere), "cannot be reached");
    // A pool that never answers.
    let silent = folder.path().join("silent");
    let _listener = UnixListener::bind(&silent).expect("a socket");
    boots_without(&memory(&silent), "does not answer");
    let mut pool = Pool::start(&["size = '128M'\npages = '4K'\ncount = 1"]);
    let memory = memory(&pool.socket());
    boots_without(&memory.replace("128M", "512M"), "no slots of at least");
    let user = Vmm::boot(1, &memory, "workload=random-write mem=64M");
    boots_without(&memory, "none of its 1 slots");
    // A pool that ends takes nothing away.
    pool.kill();
    user.wait_for_work(5_000);
    user.verify();
    boots_without(&memory, "cannot be reached");
    user.shut_down();
}

/// A source of numbers for the soak; the same each time.
struct Dice(u64);

impl Dice {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit
    }
}

fn soak(length: Duration) {
    const SLOT: u64 = 96 << 20;
    let pool = Pool::start(&["size = '96M'\npages = '4K'\ncount = 3"]);
    let memory = format!("size=96M,thp=off{}", pool.option());
    let descriptors = process::descriptors(pool.pid()).len();
    let start = Instant::now();
    let mut dice = Dice(0x9e37_79b9_7f4a_7c15);
    let mut running: Vec<Vmm> = Vec::new();
    let (mut kills, mut scans) = (0_u64, 0_u64);
    while start.elapsed() < length {
        match dice.below(4) {
            0 | 1 if running.len() < 3 => {
                let cmdline = format!("workload=random-write mem=100% seed={}", dice.below(1000));
                running.push(VmmBuilder::guest(1, &memory, &cmdline).spawn());
            }
            2 if !running.is_empty() => {
                let index = usize::try_from(dice.below(running.len() as u64)).expect("an index");
                let mut vmm = running.swap_remove(index);
                // At any moment of its life, the very first included.
                std::thread::sleep(Duration::from_millis(dice.below(400)));
                vmm.signal(libc::SIGKILL);
                vmm.wait_for_exit();
                kills += 1;
            }
            _ => {
                if let Ok((connection, taken)) = pool.take(SLOT) {
                    assert_zero(&taken.file, SLOT);
                    taken.file.write_all_at(b"mine", dice.below(SLOT - 4)).expect("a write");
                    scans += 1;
                    drop((connection, taken));
                }
            }
        }
    }
    for mut vmm in running {
        vmm.signal(libc::SIGKILL);
        vmm.wait_for_exit();
        kills += 1;
    }
    pool.wait_until_ready();
    let count = |name| pool.count(name, "");
    println!(
        "{kills} VMMs killed, {scans} slots scanned, {} lent, {} MiB made",
        count("grants_total"),
        count("built_bytes_total") >> 20
    );
    assert!(kills > 0 && scans > 0, "{kills} kills, {scans} scans");
    assert_eq!(count("grants_total"), count("returns_total"));
    assert_eq!([count("not_zero_total"), count("failures_total"), count("unproved_total")], [0; 3]);
    let now = process::descriptors(pool.pid());
    assert!(now.len() <= descriptors, "descriptors are left over: {now:?}");
    for _ in 0..3 {
        let (_connection, taken) = pool.take(SLOT).expect("memory");
        assert_zero(&taken.file, SLOT);
    }
}
