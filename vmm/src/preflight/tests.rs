// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Hosts that this one is not, and what is said of them.

#![expect(clippy::unwrap_used, reason = "a test that cannot unwrap has failed")]

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use ::memory::{HostMemory, RamLayout};
use serde_json::{Value, json};
use vfio::{DmaLimits, GroupMember, LockedMemory};

use super::definitions::{self as of, ALL};
use super::devices::DeviceFacts;
use super::facts::Facts;
use super::faults::FaultFacts;
use super::finding::{Finding, PreflightReport, Severity};
use super::host_files::HostFiles;
use super::kernel::KernelFacts;
use super::kvm::{KvmFacts, KvmSupport};
use super::limits::LimitFacts;
use super::memory::MemoryFacts;
use super::net::NetFacts;
use super::passthrough::{HostDevice, PassthroughFacts};
use super::rights::Rights;
use super::{judge, kvm, limits, memory, passthrough, reference};
use crate::config::VmConfig;
use crate::migration::fault_choice::HostAndGuest;
use crate::options::SeccompMode;
use vm_migration::uffd::Features;

const GIB: u64 = 1 << 30;

fn config(values: &Value) -> VmConfig {
    let mut all = json!({"payload": {"kernel": "/k"}, "console": {"mode": "Off"}});
    for (key, value) in values.as_object().unwrap() {
        all[key] = value.clone();
    }
    serde_json::from_value::<VmConfig>(all).unwrap().complete().unwrap()
}

fn write(root: &Path, file: &str, text: &str) {
    let path = root.join(file);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, text).unwrap();
}

/// A host with this much RAM, all but 1 GiB of it available, and huge pages for all kinds of memory.
fn host(root: &Path, ram_gib: u64) -> HostMemory {
    let (total, available) = (ram_gib << 20, (ram_gib - 1) << 20);
    let text = format!(
        "MemTotal: {total} kB\nMemAvailable: {available} kB\nSwapTotal: 0 kB\nHugepagesize: 2048 kB\n"
    );
    write(root, "proc/meminfo", &text);
    let thp = "sys/kernel/mm/transparent_hugepage";
    write(root, &format!("{thp}/enabled"), "[always] madvise never");
    write(root, &format!("{thp}/shmem_enabled"), "always within_size [advise] never");
    HostMemory::at(root)
}

fn support() -> KvmSupport {
    KvmSupport {
        baseline: None,
        vcpus_max: 1024,
        known: HostAndGuest::of_host(None, false, true),
        has_manual_dirty_log: true,
        shown: Ok(Vec::new()),
        trace: Ok(()),
        paging_option: Some("kvm_intel ept=1"),
    }
}

fn limit_facts() -> LimitFacts {
    LimitFacts { cpus: 64, open_files: Some(1 << 20), ..LimitFacts::default() }
}

/// A host without an IOMMU that lacks nothing else.
fn facts(root: &Path, config: &VmConfig) -> Facts {
    let files = HostFiles::at(root);
    let rights = Rights { capabilities: u64::MAX, ..Rights::default() };
    Facts {
        kernel: KernelFacts {
            release: "6.1.0-37-amd64".to_owned(),
            seccomp_actions: Some("kill_process kill_thread trap errno".to_owned()),
            landlock: Ok(()),
            has_io_uring: true,
            has_io_uring_switch: true,
            rules_without_path: Vec::new(),
        },
        kvm: KvmFacts { support: Ok(support()) },
        faults: FaultFacts {
            features: Ok(Features::from_bits(u64::MAX)),
            has_node: true,
            unprivileged: Some(0),
        },
        memory: MemoryFacts::read(&host(root, 64), config, RamLayout::default()),
        passthrough: PassthroughFacts {
            container: Some(libc::ENOENT),
            iommufd: Some(libc::ENOENT),
            ..PassthroughFacts::default()
        },
        net: NetFacts::read(&files, &rights),
        devices: DeviceFacts::default(),
        limits: limit_facts(),
    }
}

fn reasons(findings: &[Finding]) -> Vec<(&str, &str)> {
    let lacks = findings.iter().filter_map(|f| Some((f.check.as_str(), f.reason.as_deref()?)));
    lacks.collect()
}

fn mend(findings: &[Finding], reason: &str) -> Vec<String> {
    findings.iter().find(|f| f.reason.as_deref() == Some(reason)).unwrap().mend.clone()
}

#[test]
fn names_are_told_apart_and_stay_short_words() {
    let mut names = BTreeSet::new();
    for (check, lacks) in ALL {
        assert!(names.insert((check.name, "")), "{}", check.name);
        for lack in *lacks {
            assert!(names.insert((check.name, lack.reason)), "{} {}", check.name, lack.reason);
            assert_ne!(lack.severity, Severity::Ok, "{} {}", check.name, lack.reason);
            assert!(!lack.cost.ends_with('.') && !lack.cost.is_empty());
            assert_eq!(lack.check.name, check.name);
        }
    }
    let is_plain =
        |name: &str| name.chars().all(|c| c.is_ascii_lowercase() || c == '-' || c.is_ascii_digit());
    assert!(names.iter().all(|(check, reason)| is_plain(check) && is_plain(reason)));
}

#[test]
fn a_host_without_an_iommu_runs_vms_without_devices() {
    let root = tempfile::tempdir().unwrap();
    write(root.path(), "dev/net/tun", "");
    let plain = config(&json!({}));
    let report = judge(&facts(root.path(), &plain), &plain, SeccompMode::Enforce);
    assert_eq!(report.verdict, Severity::Costs, "{}", report.text());
    let wanted = [
        ("fault-source", "uffd"),
        ("iommu", "missing"),
        ("vfio", "unavailable"),
        ("iommufd", "unavailable"),
    ];
    assert_eq!(reasons(&report.findings), wanted, "{}", report.text());
    // The same host for a VM with a device that is there.
    let with = config(&json!({"devices": [{"path": "/sys/devices/x", "id": "gpu"}]}));
    let report = judge(&facts(root.path(), &with), &with, SeccompMode::Enforce);
    assert_eq!(report.verdict, Severity::Fails);
    assert!(reasons(&report.findings).contains(&("vfio", "wanted")), "{}", report.text());
}

#[test]
fn every_subject_is_looked_at_once() {
    let root = tempfile::tempdir().unwrap();
    let plain = config(&json!({}));
    let report = judge(&facts(root.path(), &plain), &plain, SeccompMode::Enforce);
    let found: BTreeSet<_> = report.findings.iter().map(|f| f.check.as_str()).collect();
    // Those that a VM without devices does not have.
    let of_devices = [
        "device",
        "device-node",
        "device-group",
        "device-reset",
        "tap",
        "payload",
        "disk",
        "pmem",
        "rng",
        "back-end",
        "output",
        "prezero-pool",
    ];
    for (check, _) in ALL {
        assert_ne!(found.contains(check.name), of_devices.contains(&check.name), "{}", check.name);
    }
}

#[test]
fn a_kernel_without_what_is_wanted_of_it() {
    let root = tempfile::tempdir().unwrap();
    let of_kernel = |values: Value, seccomp| {
        let config = config(&values);
        let kernel = KernelFacts {
            release: "5.10.0-30-amd64".to_owned(),
            seccomp_actions: None,
            landlock: Err("it is off".to_owned()),
            has_io_uring: false,
            has_io_uring_switch: false,
            rules_without_path: vec!["/none".into()],
        };
        let facts = Facts { kernel, ..facts(root.path(), &config) };
        let findings = judge(&facts, &config, seccomp).findings;
        findings.into_iter().take_while(|finding| finding.check != "kvm").collect::<Vec<_>>()
    };
    let plain = of_kernel(json!({}), SeccompMode::Off);
    let wanted = [("kernel", "old"), ("landlock", "missing"), ("io-uring", "missing")];
    assert_eq!(reasons(&plain), wanted);
    assert!(mend(&plain[2..], "missing").len() > 1, "{plain:?}");
    assert!(plain.last().unwrap().mend.is_empty(), "this kernel has no such switch");
    let confined = of_kernel(json!({"landlock_enable": true}), SeccompMode::Enforce);
    let reasons = reasons(&confined);
    for wanted in [("seccomp", "missing"), ("landlock", "wanted"), ("landlock", "path-missing")] {
        assert!(reasons.contains(&wanted), "{reasons:?}");
    }
}

#[test]
fn kvm_that_cannot_be_used_ends_what_depends_on_it() {
    let root = tempfile::tempdir().unwrap();
    let plain = config(&json!({}));
    let denied = KvmFacts { support: Err((&of::KVM_DENIED, "no permission".to_owned())) };
    let report =
        judge(&Facts { kvm: denied, ..facts(root.path(), &plain) }, &plain, SeccompMode::Enforce);
    assert_eq!(report.verdict, Severity::Fails);
    assert_eq!(mend(&report.findings, "denied").first().unwrap(), "sudo usermod -aG kvm $USER");
    assert!(!report.findings.iter().any(|finding| finding.check == "paging"));
}

#[test]
fn shadow_paging_and_vcpus_are_told_of() {
    let shadow = KvmSupport {
        vcpus_max: 8,
        known: HostAndGuest::of_host(None, true, true),
        has_manual_dirty_log: false,
        ..support()
    };
    let of_vcpus = |boot: u32, max: u32| {
        let config = config(&json!({"cpus": {"boot_vcpus": boot, "max_vcpus": max}}));
        let facts = KvmFacts { support: Ok(shadow.clone()) };
        let limits = LimitFacts { cpus: 4, ..limit_facts() };
        kvm::findings(&facts, &limits, &config)
    };
    let findings = of_vcpus(9, 9);
    let wanted = [
        ("paging", "shadow"),
        ("vcpus", "too-many"),
        ("vcpus", "overcommitted"),
        ("dirty-log", "not-manual"),
    ];
    assert_eq!(reasons(&findings), wanted);
    let option = "echo 'options kvm_intel ept=1' | sudo tee /etc/modprobe.d/godwit.conf";
    assert_eq!(mend(&findings, "shadow").first().unwrap(), option);
    assert!(reasons(&of_vcpus(4, 9)).contains(&("vcpus", "too-many-later")));
    assert!(!reasons(&of_vcpus(4, 8)).iter().any(|(check, _)| *check == "vcpus"));
}

#[test]
fn huge_pages_that_are_on_the_other_node_are_told_of() {
    let root = tempfile::tempdir().unwrap();
    let host = host(root.path(), 64);
    let pool = "sys/kernel/mm/hugepages/hugepages-2048kB";
    write(root.path(), &format!("{pool}/nr_hugepages"), "1024\n");
    write(root.path(), &format!("{pool}/free_hugepages"), "1024\n");
    for (node, free) in [(0, 0), (1, 1024)] {
        let file = format!("sys/devices/system/node/node{node}/hugepages/hugepages-2048kB");
        write(root.path(), &format!("{file}/free_hugepages"), &free.to_string());
    }
    let of_zone = |size: u64, node: Value, page: Value| {
        let zone = json!({"id": "a", "size": size, "hugepages": true, "hugepage_size": page, "host_numa_node": node});
        let config = config(&json!({"memory": {"size": 0, "zones": [zone]}}));
        let facts = MemoryFacts::read(&host, &config, RamLayout::default());
        memory::findings(&facts, &config)
    };
    assert_eq!(reasons(&of_zone(2 * GIB, json!(1), Value::Null)), []);
    let findings = of_zone(GIB, json!(0), Value::Null);
    assert_eq!(reasons(&findings), [("huge-pages", "too-few-on-node")]);
    let file = "/sys/devices/system/node/node0/hugepages/hugepages-2048kB/nr_hugepages";
    let command = format!("echo $(($(cat {file}) + 512)) | sudo tee {file}");
    assert_eq!(mend(&findings, "too-few-on-node"), [command]);
    let findings = of_zone(3 * GIB, Value::Null, Value::Null);
    assert_eq!(reasons(&findings), [("huge-pages", "too-few")]);
    assert!(mend(&findings, "too-few").first().unwrap().contains("+ 512"), "{findings:?}");
    let findings = of_zone(GIB, Value::Null, json!(GIB));
    assert_eq!(reasons(&findings), [("huge-pages", "no-such-size")]);
    let command = "sudo sed -i 's/^GRUB_CMDLINE_LINUX=\"/&hugepagesz=1048576K /' /etc/default/grub";
    assert_eq!(mend(&findings, "no-such-size").first().unwrap(), command);
    let findings = of_zone(GIB, json!(2), Value::Null);
    assert_eq!(reasons(&findings), [("memory-zones", "no-such-node")]);
}

#[test]
fn memory_that_is_not_there_fails_only_if_it_is_populated_before_the_guest_runs() {
    let root = tempfile::tempdir().unwrap();
    let host = host(root.path(), 64);
    let of_memory = |memory: Value, devices: Value| {
        let config = config(&json!({"memory": memory, "devices": devices}));
        let facts = MemoryFacts::read(&host, &config, RamLayout::default());
        memory::findings(&facts, &config)
    };
    let none = json!([]);
    let small = of_memory(json!({"size": 32 * GIB, "prefault": true}), none.clone());
    assert_eq!(reasons(&small), []);
    let boot = of_memory(json!({"size": 4096 * GIB, "prefault": true}), none.clone());
    assert_eq!(reasons(&boot), [("memory-room", "too-little")]);
    let later = of_memory(json!({"size": 4096 * GIB}), none.clone());
    assert_eq!(reasons(&later), [("memory-room", "too-little-later")]);
    let pinned = of_memory(json!({"size": 4096 * GIB}), json!([{"path": "/d"}]));
    assert_eq!(reasons(&pinned), [("memory-room", "too-little-to-pin")]);
    let reserved = of_memory(json!({"size": 4096 * GIB, "reserve": true}), none.clone());
    assert!(reasons(&reserved).contains(&("memory-zones", "not-reservable")));
    // A cgroup of the process.
    write(root.path(), "proc/self/cgroup", "0::/vms\n");
    write(root.path(), "sys/fs/cgroup/vms/memory.max", &(8 * GIB).to_string());
    write(root.path(), "sys/fs/cgroup/vms/memory.current", "0");
    let grouped = of_memory(json!({"size": 32 * GIB, "prefault": true}), none.clone());
    assert_eq!(reasons(&grouped), [("memory-room", "too-little")]);
    assert!(grouped.iter().any(|finding| finding.found.contains("vms/memory.max")), "{grouped:?}");
    // Shared memory without huge pages.
    write(root.path(), "sys/kernel/mm/transparent_hugepage/shmem_enabled", "[never]");
    let shared = of_memory(json!({"size": GIB, "shared": true}), none);
    assert_eq!(reasons(&shared), [("transparent-huge-pages", "none-shared")]);
}

#[test]
fn a_host_of_4_tib_lacks_nothing_for_a_guest_of_3() {
    let root = tempfile::tempdir().unwrap();
    let host = host(root.path(), 4096);
    let config =
        config(&json!({"memory": {"size": 3072 * GIB, "prefault": true, "reserve": true}}));
    let facts = MemoryFacts::read(&host, &config, RamLayout::default());
    assert_eq!(reasons(&memory::findings(&facts, &config)), []);
    assert_eq!(facts.bytes(), (3072 * GIB, 3072 * GIB));
}

fn device() -> HostDevice {
    let member = |name: &str, driver: Option<&str>| GroupMember {
        name: name.to_owned(),
        driver: driver.map(ToOwned::to_owned),
    };
    HostDevice {
        id: "gpu".to_owned(),
        path: "/sys/devices/pci0000:00/0000:01:00.0".into(),
        checked: Ok(()),
        group: Some((
            "9".to_owned(),
            vec![member("0000:01:00.0", Some("vfio-pci")), member("0000:01:00.1", None)],
        )),
        node: Some((PathBuf::from("/dev/vfio/9"), None)),
        has_reset: true,
    }
}

#[test]
fn what_is_in_the_way_of_a_device_is_named_with_its_commands() {
    let root = tempfile::tempdir().unwrap();
    let with =
        config(&json!({"devices": [{"path": "/d", "id": "gpu"}], "memory": {"size": 4 * GIB}}));
    let memory = MemoryFacts::read(&host(root.path(), 64), &with, RamLayout::default());
    let of_device = |device: HostDevice, limits: DmaLimits| {
        let iommus = vec!["dmar0".to_owned()];
        let facts = PassthroughFacts {
            iommus,
            groups: 12,
            container: None,
            iommufd: None,
            devices: vec![device],
            limits,
        };
        passthrough::findings(&facts, &memory, &with)
    };
    let all = || DmaLimits::default();
    assert_eq!(reasons(&of_device(device(), all())), []);
    let mut bound = device();
    bound.group.as_mut().unwrap().1[1].driver = Some("snd_hda_intel".to_owned());
    let findings = of_device(bound, all());
    assert_eq!(reasons(&findings), [("device-group", "bound-elsewhere")]);
    let commands = mend(&findings, "bound-elsewhere");
    assert!(commands[1].contains("0000:01:00.1/driver/unbind"), "{commands:?}");
    let node = Some((PathBuf::from("/dev/vfio/9"), Some(libc::EACCES)));
    let findings = of_device(HostDevice { node, has_reset: false, ..device() }, all());
    assert_eq!(reasons(&findings), [("device-node", "denied"), ("device-reset", "missing")]);
    assert_eq!(mend(&findings, "denied"), ["sudo chown $USER /dev/vfio/9"]);
    let wrong = Err((&of::DEVICE_DRIVER, "belongs to nvme".to_owned()));
    let findings = of_device(HostDevice { checked: wrong, ..device() }, all());
    let commands = mend(&findings, "driver");
    assert!(commands[3].starts_with("echo 0000:01:00.0 |"), "{commands:?}");
    let missing = Err((&of::DEVICE_MISSING, "not there".to_owned()));
    let gone = HostDevice { checked: missing, group: None, node: None, ..device() };
    assert_eq!(reasons(&of_device(gone, all())), [("device", "missing")]);
    let locked = LockedMemory { limit_bytes: Some(8 << 20), used_bytes: 4096 };
    let findings = of_device(device(), DmaLimits { locked, ..all() });
    assert_eq!(reasons(&findings), [("dma-limits", "memlock")]);
    let number = 4 * GIB + 4096;
    let command = format!("sudo prlimit --memlock={number}:{number} --pid $$");
    assert_eq!(mend(&findings, "memlock"), [command]);
    let cgroup = Some((GIB, PathBuf::from("/sys/fs/cgroup/a/memory.max")));
    let findings = of_device(device(), DmaLimits { cgroup, ..all() });
    assert_eq!(reasons(&findings), [("dma-limits", "cgroup")]);
}

#[test]
fn devices_are_found_in_a_tree_like_sysfs() {
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("0000:03:00.0");
    let group = root.path().join("iommu_groups/4");
    fs::create_dir_all(&path).unwrap();
    fs::create_dir_all(group.join("devices")).unwrap();
    symlink(&group, path.join("iommu_group")).unwrap();
    symlink(&path, group.join("devices/0000:03:00.0")).unwrap();
    symlink("/sys/bus/pci/drivers/nvme", path.join("driver")).unwrap();
    let with = config(&json!({"devices": [{"path": path}]}));
    let zones = crate::machine::ahead::zones(&with.memory).unwrap();
    let ram = crate::machine::ahead::stand_in(&zones, RamLayout::default()).unwrap();
    let facts = PassthroughFacts::read(&HostFiles::at(root.path()), &with, Some(&ram));
    let [device] = facts.devices.as_slice() else { panic!("{facts:?}") };
    assert!(
        matches!(&device.checked, Err((lack, why)) if lack.reason == "driver" && why.contains("nvme"))
    );
    assert_eq!(device.node.as_ref().unwrap().0, Path::new("/dev/vfio/4"));
    assert!(!device.has_reset);
    assert_eq!(facts.container, Some(libc::ENOENT));
}

#[test]
fn limits_of_cgroups_are_the_lowest_of_all_above() {
    let root = tempfile::tempdir().unwrap();
    write(root.path(), "proc/self/cgroup", "0::/a/b\n");
    write(root.path(), "sys/fs/cgroup/a/b/pids.max", "max\n");
    write(root.path(), "sys/fs/cgroup/a/pids.max", "40\n");
    write(root.path(), "sys/fs/cgroup/a/pids.current", "38\n");
    write(root.path(), "sys/fs/cgroup/a/b/cpu.max", "150000 100000\n");
    write(root.path(), "sys/fs/cgroup/a/cpu.max", "max 100000\n");
    let facts = LimitFacts::read(&HostFiles::at(root.path()), &Rights::default());
    assert_eq!(facts.threads, Some((2, "/sys/fs/cgroup/a/pids.max".to_owned())));
    assert_eq!(facts.cpu_milli, Some((1500, "/sys/fs/cgroup/a/b/cpu.max".to_owned())));
    let two = config(&json!({"cpus": {"boot_vcpus": 2, "max_vcpus": 2}}));
    let facts = LimitFacts { open_files: Some(3), ..facts };
    let findings = limits::findings(&facts, &two);
    let wanted = [("open-files", "scarce"), ("threads", "too-few"), ("cpu-quota", "below-vcpus")];
    assert_eq!(reasons(&findings), wanted);
    let one = LimitFacts { open_files: Some(1), threads: None, cpu_milli: None, ..facts };
    assert_eq!(reasons(&limits::findings(&one, &two)), [("open-files", "too-few")]);
    // Version 1.
    write(root.path(), "proc/self/cgroup", "9:memory:/vm\n4:cpu,cpuacct:/\n");
    write(root.path(), "sys/fs/cgroup/memory/vm/memory.limit_in_bytes", "268435456\n");
    write(root.path(), "sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
    let facts = LimitFacts::read(&HostFiles::at(root.path()), &Rights::default());
    assert_eq!(facts.memory_v1.as_ref().unwrap().0, 256 << 20);
    let findings = limits::findings(&LimitFacts { cpus: 9, open_files: None, ..facts }, &two);
    assert_eq!(reasons(&findings), [("cgroup-memory", "below-guest")]);
}

#[test]
fn the_report_is_the_same_after_json() {
    let root = tempfile::tempdir().unwrap();
    let plain = config(&json!({}));
    let report = judge(&facts(root.path(), &plain), &plain, SeccompMode::Enforce);
    let read: PreflightReport = serde_json::from_str(&report.json()).unwrap();
    assert_eq!(read, report);
    let value: Value = serde_json::from_str(&report.json()).unwrap();
    // There is no /dev/net/tun, which a VM without taps does not miss.
    assert_eq!((&value["version"], &value["verdict"]), (&json!(1), &json!("costs")), "{value}");
}

#[test]
fn reading_a_host_changes_none_of_its_files() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    fs::write(at("disk"), vec![0; 1 << 20]).unwrap();
    let before = fs::metadata(at("disk")).unwrap().modified().unwrap();
    let all = config(&json!({
        "payload": {"kernel": at("kernel")},
        "disks": [{"path": at("disk"), "id": "root"}, {"path": at("none"), "id": "data"}],
        "serial": {"mode": "File", "file": at("serial")},
        "console": {"mode": "Socket", "socket": at("below/console")},
        "vsock": {"cid": 3, "socket": at("vsock")},
        "memory": {"size": 0, "zones": [{"id": "a", "size": 64 << 20, "shared": true, "file": at("memory")}]},
        "tpm": {"socket": at("tpm")},
    }));
    let report = super::run(all, SeccompMode::Enforce);
    let names: Vec<_> =
        fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names, ["disk"]);
    assert_eq!(fs::metadata(at("disk")).unwrap().modified().unwrap(), before);
    assert_eq!(report.verdict, Severity::Fails);
    let lacking: BTreeSet<_> = report
        .findings
        .iter()
        .filter(|finding| finding.severity == Severity::Fails && finding.check != "kvm")
        .map(|finding| (finding.check.as_str(), finding.about.as_deref().unwrap_or_default()))
        .collect();
    let wanted =
        [("payload", "kernel"), ("disk", "data"), ("output", "console"), ("back-end", "tpm")];
    assert_eq!(lacking, wanted.into_iter().collect(), "{}", report.text());
}

#[test]
fn an_image_that_is_locked_is_in_use() {
    use devices::virtio::block::{Block, BlockConfig};
    let image = tempfile::NamedTempFile::new().unwrap();
    image.as_file().set_len(1 << 20).unwrap();
    let disk = |readonly: bool| {
        let disk = json!({"path": image.path(), "readonly": readonly, "image_type": "Raw"});
        let config = config(&json!({"disks": [disk]}));
        let facts = DeviceFacts::read(&config, None);
        let of_disk = facts.asked.iter().find(|asked| asked.check.name == "disk").unwrap();
        of_disk.outcome.as_ref().map_err(|(lack, _)| lack.reason).copied()
    };
    assert_eq!(disk(false), Ok(()));
    let path = image.path().to_owned();
    let user = Block::new(BlockConfig { path, readonly: true, ..BlockConfig::default() }).unwrap();
    let lock = user.lock();
    lock.lock().unwrap();
    assert_eq!((disk(true), disk(false)), (Ok(()), Err("in-use")));
    lock.unlock().unwrap();
    assert_eq!(disk(false), Ok(()));
}

#[test]
fn the_page_of_the_documents_is_up_to_date() {
    let mark = "<!-- From here on generated: UPDATE_DOCS=1 cargo test -p vmm preflight -->\n";
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/check.md");
    let kept = fs::read_to_string(path).unwrap();
    let (own, _) = kept.split_once(mark).unwrap();
    let now = format!("{own}{mark}{}", reference::reference());
    if std::env::var_os("UPDATE_DOCS").is_some() {
        fs::write(path, &now).unwrap();
        return;
    }
    assert!(kept == now, "docs/check.md is stale, run the test with UPDATE_DOCS=1");
}
