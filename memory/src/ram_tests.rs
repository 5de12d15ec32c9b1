// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Guest RAM as a whole: refusals, layout, cost, and the view of devices.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::os::fd::AsRawFd;

use vm_memory::{Bytes, GuestAddressSpace, GuestMemoryBackend, GuestMemoryRegion};

use super::*;
use crate::config::HugePageSize;
use crate::host::testing::{BorrowedHugePages, resident_bytes, smaps_bytes};
use crate::lease::Lease;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

fn zone(id: &str, size_bytes: u64, change: impl FnOnce(&mut ZoneSpec)) -> ZoneSpec {
    let mut zone = ZoneSpec::new(id, size_bytes);
    change(&mut zone);
    zone
}

fn make(zones: Vec<ZoneSpec>) -> Result<GuestRam, RamError> {
    GuestRam::new(&RamConfig { zones }, RamLayout::default())
}

/// A small hole, so that small guests have memory on both sides.
fn small_hole() -> RamLayout {
    RamLayout { hole_start: 4 * MIB, hole_end: 8 * MIB, ..RamLayout::default() }
}

/// A host with only these files.
fn pretend(files: &[(&str, &str)]) -> (tempfile::TempDir, Host) {
    let root = tempfile::tempdir().unwrap();
    for (name, text) in files {
        let path = root.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }
    let host = Host::pretended(root.path());
    (root, host)
}

fn make_on(host: &Host, zones: Vec<ZoneSpec>) -> Result<GuestRam, RamError> {
    GuestRam::on_host(&RamConfig { zones }, RamLayout::default(), &RamSources::default(), host)
}

#[test]
fn making_a_large_guest_uses_no_memory() {
    for size_bytes in [64 * GIB, 4096 * GIB] {
        for backing in [Backing::Anonymous, Backing::Memfd] {
            let ram = make(vec![zone("big", size_bytes, |z| z.backing = backing.clone())]).unwrap();
            assert_eq!(ram.total_bytes(), size_bytes);
            for region in ram.regions() {
                assert_eq!(smaps_bytes(region.as_ptr(), "Rss"), 0, "{backing:?}");
                assert!(region.resident().is_resident(region.len_pages() - 1));
                assert!(region.zero().is_zero(region.len_pages() - 1));
                let maps = [region.resident().absent(), region.zero().data()];
                for map in maps {
                    let len = map.len() / 8;
                    assert_eq!(resident_bytes(map.storage(), len), 0, "{backing:?}");
                }
            }
            // Nor does examining all of it.
            ram.track_device_writes(true);
            let high = &ram.regions()[1];
            high.sync_zero_map(&(0..high.len_bytes())).unwrap();
            assert_eq!(high.zero().data_count(), 0);
            assert_eq!(resident_bytes(high.zero().data().storage(), high.len_pages() / 8), 0);
        }
    }
}

#[test]
fn ram_lies_below_and_above_the_hole() {
    let config = RamConfig { zones: vec![zone("a", 12 * MIB, |z| z.backing = Backing::Memfd)] };
    let ram = GuestRam::new(&config, small_hole()).unwrap();
    let shape: Vec<_> = ram.regions().iter().map(|r| (r.gpa(), r.len_bytes())).collect();
    assert_eq!(shape, [(0, 4 * MIB), (8 * MIB, 8 * MIB)]);
    assert_eq!(ram.regions()[1].file_offset(), 4 * MIB);
    // The zone has one file, and its halves do not overlap in it.
    let memory = ram.guest_memory().memory().clone();
    memory.write_slice(&[1], GuestAddress(0)).unwrap();
    memory.write_slice(&[2], GuestAddress(8 * MIB)).unwrap();
    let mut byte = [0];
    ram.regions()[0].read_page_range(0, &mut byte).unwrap();
    assert_eq!(byte, [1]);
    let file = ram.regions()[0].file().unwrap();
    std::os::unix::fs::FileExt::read_exact_at(&**file, &mut byte, 4 * MIB).unwrap();
    assert_eq!(byte, [2]);

    let at = |gpa| ram.region_at(gpa).map(|(region, offset)| (region.gpa(), offset));
    assert_eq!(at(4 * MIB - 1), Some((0, 4 * MIB - 1)));
    assert_eq!(at(4 * MIB), None);
    assert_eq!(at(8 * MIB), Some((8 * MIB, 0)));
    assert_eq!(at(16 * MIB), None);
    assert!(memory.write_slice(&[0; 2], GuestAddress(4 * MIB - 1)).is_err());
}

#[test]
fn host_addresses_suit_huge_pages() {
    for backing in [Backing::Anonymous, Backing::Memfd] {
        let config = RamConfig { zones: vec![zone("a", 12 * MIB, |z| z.backing = backing)] };
        let ram = GuestRam::new(&config, small_hole()).unwrap();
        for region in ram.regions() {
            assert_eq!(region.host_addr() % THP_BYTES, region.gpa() % THP_BYTES);
        }
    }
}

#[test]
fn memory_stays_mapped_while_a_device_holds_it() {
    let ram = make(vec![ZoneSpec::new("a", 4 * MIB)]).unwrap();
    let memory = ram.guest_memory().memory().clone();
    drop(ram);
    memory.write_slice(&[3; 64], GuestAddress(MIB)).unwrap();
    let mut bytes = [0; 64];
    memory.read_slice(&mut bytes, GuestAddress(MIB)).unwrap();
    assert_eq!(bytes, [3; 64]);
}

#[test]
fn nothing_is_left_behind() {
    let ram = make(vec![zone("leaves-nothing", 4 * MIB, |z| z.shared = true)]).unwrap();
    ram.regions()[0].alias_slice(&(0..4096)).unwrap();
    let maps = || {
        let maps = fs::read_to_string("/proc/self/maps").unwrap();
        maps.lines().filter(|line| line.contains("memfd:ram-leaves-nothing")).count()
    };
    assert_eq!(maps(), 2);
    let fd = ram.regions()[0].file().unwrap().as_raw_fd();
    let name = fs::read_link(format!("/proc/self/fd/{fd}")).unwrap();
    assert!(name.to_str().unwrap().starts_with("/memfd:ram-leaves-nothing"));
    drop(ram);
    assert_eq!(maps(), 0);
}

#[test]
fn device_writes_are_taken_by_guest_address() {
    let config = RamConfig { zones: vec![ZoneSpec::new("a", 12 * MIB)] };
    let ram = GuestRam::new(&config, small_hole()).unwrap();
    ram.track_device_writes(true);
    let memory = ram.guest_memory().memory().clone();
    memory.write_slice(&[1; 10], GuestAddress(8 * MIB + 5 * 4096)).unwrap();
    assert_eq!(ram.take_device_dirty(0, 4 * MIB).unwrap(), vec![0; 16]);
    // Starting in the middle of a word.
    let words = ram.take_device_dirty(8 * MIB + 3 * 4096, 64 * 4096).unwrap();
    assert_eq!(words, [0b100]);
    let words = ram.take_device_dirty(8 * MIB, 8 * MIB).unwrap();
    assert_eq!(words, vec![0; 32]);
    for (gpa, len_bytes) in
        [(0, 8 * MIB), (4 * MIB, 4096), (1, 4096), (0, 100), (u64::MAX, 4096), (4096, u64::MAX)]
    {
        let result = ram.take_device_dirty(gpa, len_bytes);
        assert!(matches!(result, Err(AccessError::NoSuchGpa { .. })), "{gpa:#x} {len_bytes:#x}");
    }
}

#[test]
fn the_view_of_devices_knows_the_file() {
    let ram = make(vec![zone("a", 4 * MIB, |z| z.shared = true)]).unwrap();
    let memory = ram.guest_memory().memory().clone();
    let region = memory.find_region(GuestAddress(0)).unwrap();
    let offset = region.file_offset().unwrap();
    assert!(Arc::ptr_eq(offset.arc(), ram.regions()[0].file().unwrap()));
    assert_eq!(region.is_hugetlbfs(), Some(false));
    let private = make(vec![zone("a", 4 * MIB, |z| z.backing = Backing::Anonymous)]).unwrap();
    let memory = private.guest_memory().memory().clone();
    assert!(memory.find_region(GuestAddress(0)).unwrap().file_offset().is_none());
}

#[test]
fn a_guest_larger_than_the_host_is_refused_with_reserve_only() {
    let meminfo = "MemTotal: 1048576 kB\nSwapTotal: 0 kB\nCommitLimit: 524288 kB\n\
                   Committed_AS: 0 kB\n";
    let loose = [("proc/meminfo", meminfo), ("proc/sys/vm/overcommit_memory", "0")];
    let strict = [("proc/meminfo", meminfo), ("proc/sys/vm/overcommit_memory", "2")];
    let zones = |size_bytes, reserve| {
        let half = |id| zone(id, size_bytes / 2, |z| z.reserve = reserve);
        vec![half("a"), half("b")]
    };
    let (_root, host) = pretend(&loose);
    assert!(make_on(&host, zones(GIB, true)).is_ok());
    assert!(make_on(&host, zones(GIB + 8192, false)).is_ok());
    let error = make_on(&host, zones(GIB + 8192, true)).unwrap_err();
    let RamError::HostTooSmall { needed_bytes, available_bytes } = error else { panic!("{error}") };
    assert_eq!((needed_bytes, available_bytes), (GIB + 8192, GIB));
    let (_root, host) = pretend(&strict);
    assert!(make_on(&host, zones(GIB / 2, true)).is_ok());
    assert!(matches!(make_on(&host, zones(GIB, true)), Err(RamError::HostTooSmall { .. })));
    // The same on the real host.
    let real = make(vec![zone("a", 1 << 48, |z| z.reserve = true)]).unwrap_err();
    assert!(matches!(real, RamError::HostTooSmall { .. }), "{real}");
}

#[test]
fn odd_configurations_are_refused_by_name() {
    let refuse = |zones: Vec<ZoneSpec>| make(zones).unwrap_err().to_string();
    assert!(refuse(vec![]).contains("no zone"));
    assert!(refuse(vec![ZoneSpec::new("odd", 4097)]).contains("'odd'"));
    assert!(refuse(vec![ZoneSpec::new("none", 0)]).contains("'none'"));
    let twice = vec![ZoneSpec::new("twin", 4096), ZoneSpec::new("twin", 4096)];
    assert!(refuse(twice).contains("'twin'"));
    let vast = vec![ZoneSpec::new("vast", 1 << 60), ZoneSpec::new("b", 4096)];
    assert!(refuse(vast).contains("'vast'"));
    let overflow = vec![ZoneSpec::new("a", 4096), ZoneSpec::new("all", u64::MAX - 4095)];
    assert!(refuse(overflow).contains("'all'"));
    let node = vec![zone("far", 4096, |z| z.host_numa_node = Some(1000))];
    assert!(refuse(node).contains("NUMA node 1000"));
}

#[test]
fn a_guest_that_does_not_fit_leaves_no_file() {
    let dir = tempfile::tempdir().unwrap();
    let file = zone("a", 4 * MIB, |z| z.backing = Backing::File(dir.path().join("ram")));
    assert!(make(vec![file, ZoneSpec::new("vast", 1 << 60)]).is_err());
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn two_zones_never_share_a_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("ram");
    let link = dir.path().join("link");
    let on = |id, path: &std::path::Path| {
        zone(id, 4 * MIB, |z| z.backing = Backing::File(path.to_owned()))
    };
    make(vec![on("a", &path)]).unwrap();
    fs::hard_link(&path, &link).unwrap();
    let error = make(vec![on("a", &path), on("b", &link)]).unwrap_err();
    assert!(matches!(error, RamError::SameFile { .. }), "{error}");
    // In a directory, each zone has its own file.
    make(vec![on("a", dir.path()), on("b", dir.path())]).unwrap();
}

#[test]
fn a_hugetlb_pool_that_is_too_small_is_named() {
    let dir = "sys/kernel/mm/hugepages/hugepages-2048kB";
    let node_dir = "sys/devices/system/node/node0/hugepages/hugepages-2048kB";
    let files =
        [(format!("{dir}/free_hugepages"), "3"), (format!("{node_dir}/free_hugepages"), "1")];
    let files: Vec<_> = files.iter().map(|(name, text)| (name.as_str(), *text)).collect();
    let (_root, host) = pretend(&files);
    let huge = |id, pages: u64, node| {
        zone(id, pages * 2 * MIB, |z| {
            z.backing = Backing::Hugetlb { page_size: HugePageSize::Mib2 };
            z.host_numa_node = node;
        })
    };
    let error = make_on(&host, vec![huge("a", 2, None), huge("b", 2, None)]).unwrap_err();
    let text = error.to_string();
    let pool = "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages";
    for part in ["'a', 'b'", "4 huge pages", "3 are available", pool] {
        assert!(text.contains(part), "{text}");
    }
    let error = make_on(&host, vec![huge("a", 2, Some(0))]).unwrap_err().to_string();
    assert!(error.contains("1 are available on NUMA node 0"), "{error}");
    if Host::real().hugetlb_pool(2 << 20).is_some() {
        let real = make(vec![huge("a", 1 << 20, None)]).unwrap_err();
        assert!(matches!(real, RamError::HugetlbPool { .. }), "{real}");
    }
}

#[test]
fn hugetlb_memory_is_promised_when_it_is_made() {
    let Some(_borrowed) = BorrowedHugePages::new(4) else { return };
    let huge = |id| {
        let backing = Backing::Hugetlb { page_size: HugePageSize::Mib2 };
        zone(id, 8 * MIB, |z| z.backing = backing)
    };
    let free = || Host::real().hugetlb_pool(2 << 20).unwrap().available;
    let before = free();
    let ram = make(vec![huge("a")]).unwrap();
    assert_eq!(free(), before - 4);
    // The second mapping uses no further pages.
    ram.regions()[0].write_range(0, &[1]).unwrap();
    assert_eq!(free(), before - 4);
    assert_eq!(ram.regions()[0].page_bytes(), 2 << 20);
    drop(ram);
    assert_eq!(free(), before);
}

#[test]
fn a_file_handed_over_is_the_memory() {
    let make_with = |files: &[(String, Arc<File>)]| {
        let config = RamConfig { zones: vec![ZoneSpec::new("a", 4 * MIB)] };
        GuestRam::with_files(&config, RamLayout::default(), files)
    };
    let source = make(vec![zone("a", 4 * MIB, |z| z.shared = true)]).unwrap();
    source.regions()[0].write_range(MIB, &[8]).unwrap();
    let file = Arc::clone(source.regions()[0].file().unwrap());
    let ram = make_with(&[("a".into(), file.clone())]).unwrap();
    let mut byte = [0];
    ram.regions()[0].read_page_range(MIB, &mut byte).unwrap();
    assert_eq!(byte, [8]);
    assert!(!ram.regions()[0].zero().is_zero(MIB / 4096));
    let unknown = make_with(&[("b".into(), file)]).unwrap_err();
    assert!(matches!(unknown, RamError::UnknownZone { .. }), "{unknown}");
}

#[test]
fn what_is_handed_over_is_not_counted_a_second_time() {
    let meminfo = "MemTotal: 1048576 kB\nSwapTotal: 0 kB\n";
    let pool = "sys/kernel/mm/hugepages/hugepages-2048kB/";
    let (free, total) = (format!("{pool}free_hugepages"), format!("{pool}nr_hugepages"));
    let files = [("proc/meminfo", meminfo), (free.as_str(), "0"), (total.as_str(), "0")];
    let (_root, host) = pretend(&files);
    let reserving = zone("a", 2 * GIB, |z| {
        z.reserve = true;
        z.backing = Backing::Memfd;
    });
    let refused = make_on(&host, vec![reserving.clone()]).unwrap_err();
    assert!(matches!(refused, RamError::HostTooSmall { .. }), "{refused}");
    let source = make(vec![zone("a", 2 * GIB, |z| z.backing = Backing::Memfd)]).unwrap();
    let provided = vec![ProvidedFile::file("a", Arc::clone(source.regions()[0].file().unwrap()))];
    let config = RamConfig { zones: vec![reserving] };
    let sources = RamSources { provided, ..RamSources::default() };
    GuestRam::on_host(&config, RamLayout::default(), &sources, &host).unwrap();
    // Untouched huge pages are reserved for their file already.
    let huge =
        || zone("a", 4 * MIB, |z| z.backing = Backing::Hugetlb { page_size: HugePageSize::Mib2 });
    let Some(_borrowed) = BorrowedHugePages::new(2) else { return };
    let source = make(vec![huge()]).unwrap();
    let refused = make_on(&host, vec![huge()]).unwrap_err();
    assert!(matches!(refused, RamError::HugetlbPool { .. }), "{refused}");
    let provided = vec![ProvidedFile::file("a", Arc::clone(source.regions()[0].file().unwrap()))];
    let config = RamConfig { zones: vec![huge()] };
    let sources = RamSources { provided, ..RamSources::default() };
    GuestRam::on_host(&config, RamLayout::default(), &sources, &host).unwrap();
}

#[test]
fn what_is_not_quite_as_wished_is_said() {
    let (_root, host) = pretend(&[]);
    let on = |zones| {
        let ram = make_on(&host, zones).unwrap();
        ram.warnings().to_vec()
    };
    let shared = on(vec![zone("s", 8 * GIB, |z| z.shared = true)]);
    assert_eq!(shared.len(), 1, "{shared:?}");
    assert!(shared[0].contains("'s'") && shared[0].contains("hugepages=on"), "{shared:?}");
    let thp = "sys/kernel/mm/transparent_hugepage/shmem_enabled";
    let (_advise, advising) = pretend(&[(thp, "always [advise] never")]);
    let fine = make_on(&advising, vec![zone("s", GIB, |z| z.shared = true)]).unwrap();
    assert!(fine.warnings().is_empty(), "{:?}", fine.warnings());
    let merge = on(vec![zone("m", MIB, |z| {
        z.shared = true;
        z.mergeable = true;
        z.thp = false;
    })]);
    assert!(merge.len() == 1 && merge[0].contains("mergeable=on"), "{merge:?}");
    let skewed = on(vec![
        zone("a", 3 * MIB, |z| z.thp = false),
        zone("b", 4 * MIB, |z| z.backing = Backing::Memfd),
    ]);
    assert!(
        skewed.iter().any(|w| w.contains("'b' begins at guest address 0x300000")),
        "{skewed:?}"
    );
}

#[test]
fn a_lease_is_kept_as_long_as_the_memory() {
    let config = RamConfig { zones: vec![zone("mem0", 2 * MIB, |zone| zone.shared = true)] };
    let own = GuestRam::new(&config, RamLayout::default()).unwrap();
    let file = Arc::clone(own.regions()[0].file().unwrap());
    let connection = Arc::new("the connection to a pool");
    let lent = Arc::downgrade(&connection);
    let provided = ProvidedFile::prezeroed("mem0", file, Lease::new(connection));
    let ram = GuestRam::with_provided(&config, RamLayout::default(), &[provided]).unwrap();
    let region = Arc::clone(&ram.regions()[0]);
    drop(ram);
    assert!(lent.upgrade().is_some(), "a region of it is left");
    drop(region);
    assert!(lent.upgrade().is_none(), "nothing uses it any more");
}

#[test]
fn memory_that_arrives_in_small_pages_is_joined_whatever_the_host_does_with_other() {
    let root = tempfile::tempdir().unwrap();
    let settings = root.path().join("sys/kernel/mm/transparent_hugepage");
    fs::create_dir_all(&settings).unwrap();
    for setting in ["never", "advise"] {
        fs::write(settings.join("shmem_enabled"), format!("[{setting}]")).unwrap();
        let zone = |id: &str, thp, shared, backing| ZoneSpec {
            backing,
            shared,
            thp,
            ..ZoneSpec::new(id, 4 << 20)
        };
        let zones = vec![
            zone("huge", true, true, Backing::Memfd),
            zone("small", false, true, Backing::Memfd),
            zone("private", true, false, Backing::Anonymous),
        ];
        let ram = make_on(&Host::pretended(root.path()), zones).unwrap();
        let wanting = || ram.regions().iter().map(|region| region.wants_collapse());
        let is_made_by_us = setting == "never";
        assert!(wanting().eq([is_made_by_us, false, false]), "{setting}");
        for region in ram.regions() {
            region.use_small_pages(true);
        }
        assert!(wanting().eq([true, false, false]), "{setting}");
    }
}
