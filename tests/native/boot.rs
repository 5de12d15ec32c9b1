// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The guest boots and its memory is what was asked for: numbers of vCPUs, sizes, backings.

use std::fs;

use guest_reader::abi::{CONTROL_GPA, control};
use tempfile::TempDir;

use crate::harness::{HugePages, Suite, Vmm, VmmBuilder, image, process};

/// Kinds of memory: a name, the options, and flags of the kernel for its mapping (`VmFlags` in proc(5)) that it must
/// have and must not have: `sh` shared, `nr` no reservation, `hg` and `nh` with and without transparent huge pages, `mg`
/// merged.
type Backing = (&'static str, &'static str, &'static [&'static str], &'static [&'static str]);
const BACKINGS: [Backing; 6] = [
    ("anonymous", "size=192M", &["nr"], &["sh", "nh", "mg"]),
    ("shared", "size=192M,shared=on", &["sh", "nr"], &["nh", "mg"]),
    ("no_thp", "size=192M,shared=on,thp=off", &["sh", "nr"], &["hg", "mg"]),
    ("prefault", "size=192M,shared=on,prefault=on", &["sh", "nr"], &["nh", "mg"]),
    ("reserve", "size=192M,shared=on,reserve=on", &["sh"], &["nr", "mg"]),
    ("mergeable", "size=192M,mergeable=on", &["mg", "nr"], &["sh"]),
];

pub fn add(suite: &mut Suite) {
    for vcpus in [1, 2, 4] {
        suite.add(&format!("boot::vcpus_{vcpus}"), move || boots_with_vcpus(vcpus));
    }
    for (name, memory, with, without) in BACKINGS {
        suite.add(&format!("boot::memory_{name}"), move || works_in(memory, with, without));
    }
    suite.add("boot::memory_hugepages", hugepages);
    suite.add("boot::memory_zones", zones);
    suite.add("boot::memory_file_zone", file_zone);
    suite.add("boot::memory_beyond_4_gib_is_sparse", beyond_4_gib);
    suite.add("boot::prefault_brings_all_memory_in", prefault_is_complete);
    suite.add("boot::virtio_devices_start_where_they_lie", devices_start);
}

fn boots_with_vcpus(vcpus: u32) {
    let vmm = Vmm::boot(vcpus, "size=192M,shared=on", "workload=random-write mem=64M");
    let status = vmm.guest_status();
    assert_eq!(status.vcpus_wanted, u64::from(vcpus), "{status:?}");
    assert_eq!(status.vcpus_online, u64::from(vcpus), "{status:?}");
    vmm.wait_for_heartbeat();
    let info = vmm.api().get("vm.info").ok().json();
    assert_eq!(info["state"], "Running");
    assert_eq!(info["config"]["cpus"]["boot_vcpus"], vcpus);
    vmm.verify();
    vmm.shut_down();
}

/// The fields of the mappings of guest memory: those that are as long as it, by a name and the rest of the line.
fn mappings(vmm: &Vmm, len_bytes: u64) -> Vec<Vec<(String, String)>> {
    let path = format!("/proc/{}/smaps", vmm.pid());
    let text = fs::read_to_string(path).expect("its mappings");
    let mut all: Vec<Vec<(String, String)>> = Vec::new();
    for line in text.lines() {
        match line.split_once(':') {
            Some((name, rest)) if !name.contains(' ') => {
                let last = all.last_mut().expect("the first line of a mapping");
                last.push((name.to_owned(), rest.trim().to_owned()));
            }
            _ => all.push(Vec::new()),
        }
    }
    let size = format!("{} kB", len_bytes >> 10);
    all.retain(|mapping| mapping.contains(&("Size".to_owned(), size.clone())));
    assert!(!all.is_empty(), "no mapping of {size}");
    all
}

fn field<'a>(mapping: &'a [(String, String)], name: &str) -> &'a str {
    mapping.iter().find(|(field, _)| field == name).map_or("", |(_, value)| value)
}

fn works_in(memory: &str, with: &[&str], without: &[&str]) {
    let vmm = Vmm::boot(2, memory, "workload=random-write mem=64M");
    for mapping in mappings(&vmm, 192 << 20) {
        let flags: Vec<&str> = field(&mapping, "VmFlags").split(' ').collect();
        assert!(with.iter().all(|flag| flags.contains(flag)), "{with:?} of {flags:?}");
        assert!(!without.iter().any(|flag| flags.contains(flag)), "none of {without:?}: {flags:?}");
    }
    vmm.wait_for_work(20_000);
    let report = vmm.verify();
    assert_eq!(report.written, (64 << 20) / 4096, "{report:?}");
    vmm.shut_down();
}

fn hugepages() {
    let _pool = HugePages::borrow(96);
    let vmm = Vmm::boot(1, "size=192M,shared=on,hugepages=on", "workload=random-write mem=64M");
    for mapping in mappings(&vmm, 192 << 20) {
        assert_eq!(field(&mapping, "KernelPageSize"), "2048 kB", "{mapping:?}");
    }
    vmm.wait_for_work(10_000);
    vmm.verify();
    vmm.shut_down();
}

fn zones() {
    let vmm = VmmBuilder::guest(2, "size=0", "workload=random-write mem=96M")
        .with(&["--memory-zone", "id=zone0,size=128M,shared=on", "id=zone1,size=64M,shared=on"])
        .start();
    vmm.wait_for_work(20_000);
    let ram = vmm.guest_status().ram_bytes;
    assert!(ram > 190 << 20 && ram <= 192 << 20, "{ram}");
    vmm.verify();
    vmm.shut_down();
}

fn file_zone() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("ram-file");
    fs::File::create(&file).and_then(|file| file.set_len(192 << 20)).expect("a file");
    let zone = format!("id=zone0,size=192M,shared=on,file={}", file.display());
    let vmm = VmmBuilder::guest(1, "size=0", "workload=random-write mem=64M")
        .with(&["--memory-zone", &zone])
        .start();
    let api = vmm.api();
    // The reader looks for memfds; what a file backs is read from the file.
    let control = usize::try_from(guest_reader::abi::CONTROL_GPA).expect("an offset");
    crate::harness::wait_for("the guest's magic word in the file", || {
        use std::os::unix::fs::FileExt as _;
        let mut word = [0; 8];
        let at = u64::try_from(control).expect("an offset");
        fs::File::open(&file).and_then(|file| file.read_exact_at(&mut word, at)).ok()?;
        (u64::from_le_bytes(word) == guest_reader::abi::MAGIC).then_some(())
    });
    assert_eq!(api.state(), "Running");
    vmm.shut_down();
}

fn beyond_4_gib() {
    let vmm = Vmm::boot(2, "size=8G,shared=on", "workload=random-write mem=7G..64M prefill=1");
    let status = vmm.guest_status();
    assert!(status.ram_bytes > 8_580_000_000, "{} bytes of RAM", status.ram_bytes);
    vmm.wait_for_work(20_000);
    vmm.verify();
    let resident_kib = process::status_kib(vmm.pid(), "VmRSS");
    assert!(resident_kib < 400 << 10, "{resident_kib} KiB are resident for 64 MiB in use");
    vmm.shut_down();
}

fn prefault_is_complete() {
    let vmm =
        VmmBuilder::guest(1, "size=256M,shared=on,prefault=on", "workload=idle prefill=0").start();
    vmm.guest();
    let resident_kib = process::status_kib(vmm.pid(), "RssShmem");
    assert!(resident_kib >= 256 << 10, "{resident_kib} KiB of 256 MiB are resident");
    vmm.shut_down();
}

/// Devices at the top of the address space, with all that they offer, started at once.
fn devices_start() {
    let folder = TempDir::with_prefix("godwit-boot-").expect("a folder");
    let disk = folder.path().join("disk");
    fs::File::create(&disk).and_then(|file| file.set_len(1 << 20)).expect("a disk");
    let vsock = format!("cid=3,socket={}", folder.path().join("vsock").display());
    let console = folder.path().join("console");
    let vmm = VmmBuilder::new(&["--serial", "off", "--kernel", image()])
        .with(&["--cpus", "boot=1,max_phys_bits=39", "--memory", "size=64M,shared=on"])
        .with(&["--cmdline", "workload=random-write mem=16M reserve=1M wake=1"])
        .with(&["--console", &format!("file={}", console.display())])
        .with(&["--disk", &format!("path={}", disk.display())])
        .with(&["--balloon", "size=0,free_page_reporting=on", "--vsock", &vsock])
        .with(&["--rng", "src=/dev/urandom", "--watchdog", "--rtc", "id=clock"])
        .start();
    vmm.wait_for_work(1_000);
    let word = vmm.guest().memory().word(CONTROL_GPA + control::WOKEN).expect("the guest's memory");
    assert_eq!(
        word.count_ones(),
        7,
        "{word:#x}: console, disk, rng, balloon, vsock, watchdog, rtc"
    );
    assert_eq!(fs::read_to_string(&console).expect("what it said"), "awake\r\n");
    vmm.verify();
    vmm.shut_down();
}
