// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! One region of every kind: content, maps, discard, and what the kernel says of it.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs::Permissions;
use std::ops::Range;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::Path;
use std::sync::Arc;

use vm_memory::{Bytes, GuestAddress, GuestAddressSpace, VolatileMemory};

use super::{Collapsing, Zone};
use crate::backing::ZoneBacking;
use crate::host::Host;
use crate::host::testing::{BorrowedHugePages, HugePagesTurn, is_mapped, smaps_bytes};
use crate::{
    AccessError, Backing, GuestRam, HugePageSize, ProvidedFile, RamConfig, RamLayout, RamRegion,
    ZoneKind, ZoneSpec,
};

const MIB: u64 = 1 << 20;
const PAGE: u64 = 4096;

fn ram(change: impl FnOnce(&mut ZoneSpec)) -> GuestRam {
    let mut zone = ZoneSpec::new("t", 8 * MIB);
    change(&mut zone);
    GuestRam::new(&RamConfig { zones: vec![zone] }, RamLayout::default()).unwrap()
}

fn anonymous() -> GuestRam {
    ram(|z| z.backing = Backing::Anonymous)
}

fn memfd() -> GuestRam {
    ram(|z| z.backing = Backing::Memfd)
}

fn file(dir: &Path) -> GuestRam {
    ram(|z| z.backing = Backing::File(dir.to_owned()))
}

fn hugetlb() -> GuestRam {
    ram(|z| z.backing = Backing::Hugetlb { page_size: HugePageSize::Mib2 })
}

/// Runs `test` with each kind of memory that this host supports, 8 MiB each.
fn each_kind(test: impl Fn(&GuestRam, &RamRegion)) {
    let dir = tempfile::tempdir().unwrap();
    let private = dir.path().join("private");
    std::fs::write(&private, vec![0; 8 << 20]).unwrap();
    let private_file = ram(|z| z.backing = Backing::File(private));
    assert_eq!(private_file.regions()[0].kind(), ZoneKind::PrivateFile);
    let mut all = vec![anonymous(), memfd(), file(dir.path()), private_file];
    let borrowed = BorrowedHugePages::new(8);
    if borrowed.is_some() {
        all.push(hugetlb());
    }
    for ram in &all {
        test(ram, &ram.regions()[0]);
    }
    drop(all);
}

fn write_main(ram: &GuestRam, gpa: u64, bytes: &[u8]) {
    ram.guest_memory().memory().write_slice(bytes, GuestAddress(gpa)).unwrap();
}

fn read_main(ram: &GuestRam, gpa: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0xee; len];
    ram.guest_memory().memory().read_slice(&mut bytes, GuestAddress(gpa)).unwrap();
    bytes
}

fn contains(runs: &[std::ops::Range<u64>], offset: u64) -> bool {
    runs.iter().any(|run| run.contains(&offset))
}

#[test]
fn devices_and_migration_see_the_same_bytes() {
    each_kind(|ram, region| {
        write_main(ram, 0x3ff8, &[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]);
        let mut got = [0; 10];
        region.read_page_range(0x3ff8, &mut got).unwrap();
        assert_eq!(got, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10], "{:?}", region.kind());
        region.write_range(5 * MIB, &[42; 5000]).unwrap();
        assert_eq!(read_main(ram, 5 * MIB, 5001)[4999..], [42, 0]);
        assert!(!region.zero().is_zero(5 * MIB / PAGE + 1));
    });
}

#[test]
fn the_alias_is_another_mapping_of_shared_memory_only() {
    each_kind(|_, region| {
        let alias = region.alias_slice(&(0..4096));
        if region.kind() == ZoneKind::Shared {
            let address = alias.unwrap().ptr_guard().as_ptr().addr() as u64;
            assert_ne!(address, region.host_addr());
            let again = region.alias_slice(&(0..4096)).unwrap().ptr_guard().as_ptr();
            assert_eq!(again.addr() as u64, address);
            assert!(region.file().is_some());
            // Writing through the alias does not populate what userfaultfd watches.
            region.write_range(3 * MIB, &[1]).unwrap();
            assert!(!is_mapped(region.as_ptr().wrapping_add(3 << 20)));
        } else {
            assert!(matches!(alias, Err(AccessError::NoAlias { .. })));
            assert!(region.file().is_none());
            let main = region.io_slice(&(0..4096)).unwrap().ptr_guard().as_ptr();
            assert_eq!(main.addr() as u64, region.host_addr());
        }
    });
}

#[test]
fn discarded_memory_is_zero_and_the_maps_know() {
    each_kind(|ram, region| {
        write_main(ram, 0, &vec![7; 8 << 20]);
        region.sync_zero_map(&(0..8 * MIB)).unwrap();
        assert_eq!(region.zero().data_count(), region.len_pages());
        // The contents of these pages are still to arrive, whatever happens to the pages.
        region.resident().set_absent(1000..1100);
        // Starts and ends inside huge pages.
        let gone = 3 * MIB..7 * MIB;
        ram.discard_in_region(0, &gone).unwrap();
        let kind = (region.kind(), region.is_hugetlb());
        assert!(read_main(ram, 3 * MIB, 4 << 20).iter().all(|byte| *byte == 0), "{kind:?}");
        assert_eq!(read_main(ram, 3 * MIB - 1, 1), [7], "{kind:?}");
        assert_eq!(read_main(ram, 7 * MIB, 1), [7], "{kind:?}");
        let pages = RamRegion::pages_of(&gone);
        for page in 0..region.len_pages() {
            assert_eq!(region.zero().is_zero(page), pages.contains(&page), "{kind:?} {page}");
            assert_eq!(region.resident().is_resident(page), !(1000..1100).contains(&page));
        }
    });
}

#[test]
fn discard_gives_memory_back() {
    for ram in [anonymous(), memfd()] {
        let region = &ram.regions()[0];
        write_main(&ram, 0, &vec![7; 4 << 20]);
        assert!(smaps_bytes(region.as_ptr(), "Rss") >= 4 * MIB);
        ram.discard_in_region(0, &(0..8 * MIB)).unwrap();
        assert_eq!(smaps_bytes(region.as_ptr(), "Rss"), 0, "{:?}", region.kind());
        assert_eq!(region.populated_runs(&(0..8 * MIB)).unwrap(), []);
    }
}

#[test]
fn populated_runs_are_found_without_populating() {
    // 4 KiB pages, so that the runs are known exactly.
    let small = |backing| {
        ram(|z| {
            z.backing = backing;
            z.thp = false;
        })
    };
    for ram in [small(Backing::Anonymous), small(Backing::Memfd)] {
        let region = &ram.regions()[0];
        let all = 0..8 * MIB;
        assert_eq!(region.populated_runs(&all).unwrap(), []);
        write_main(&ram, MIB, &[1; 8192]);
        write_main(&ram, 6 * MIB - 1, &[1]);
        let expected = vec![MIB..MIB + 8192, 6 * MIB - PAGE..6 * MIB];
        assert_eq!(region.populated_runs(&all).unwrap(), expected, "{:?}", region.kind());
        // The query changed nothing.
        assert_eq!(region.populated_runs(&all).unwrap(), expected);
        assert_eq!(smaps_bytes(region.as_ptr(), "Rss"), 3 * PAGE);
        let part = region.populated_runs(&(MIB + PAGE..2 * MIB)).unwrap();
        assert_eq!(part, vec![MIB + PAGE..MIB + 8192]);
    }
}

#[test]
fn populated_runs_never_leave_data_out() {
    each_kind(|ram, region| {
        write_main(ram, 2 * MIB + 5, &[1]);
        region.write_range(7 * MIB, &[1]).unwrap();
        let runs = region.populated_runs(&(0..8 * MIB)).unwrap();
        assert!(contains(&runs, 2 * MIB) && contains(&runs, 7 * MIB), "{runs:?}");
        // Only whole pages of the region are accepted.
        assert!(region.populated_runs(&(0..8 * MIB + PAGE)).is_err());
        assert!(region.populated_runs(&(1..PAGE)).is_err());
    });
}

#[test]
fn populated_huge_pages_are_found_in_every_mapping() {
    let Some(_borrowed) = BorrowedHugePages::new(4) else { return };
    let ram = hugetlb();
    let region = &ram.regions()[0];
    let all = 0..8 * MIB;
    assert_eq!(region.populated_runs(&all).unwrap(), []);
    write_main(&ram, 2 * MIB, &[1]);
    assert_eq!(region.populated_runs(&all).unwrap(), vec![2 * MIB..4 * MIB]);
    region.write_range(6 * MIB, &[1]).unwrap();
    assert_eq!(region.populated_runs(&all).unwrap(), vec![2 * MIB..4 * MIB, 6 * MIB..8 * MIB]);
    // A page that only another process touched: here, a mapping that is not the region's.
    let elsewhere = vm_memory::MmapRegion::<()>::build(
        Some(vm_memory::FileOffset::from_arc(region.file().unwrap().clone(), 0)),
        8 << 20,
        libc::PROT_READ | libc::PROT_WRITE,
        libc::MAP_SHARED,
    )
    .unwrap();
    elsewhere.get_slice(1 << 20, 1).unwrap().copy_from(&[1_u8]);
    assert_eq!(region.populated_runs(&all).unwrap(), vec![0..4 * MIB, 6 * MIB..8 * MIB]);
    assert_eq!(
        region.populated_runs(&(MIB..5 * MIB)).unwrap(),
        [Range { start: MIB, end: 4 * MIB }]
    );
    assert_eq!(region.populated_runs(&(4 * MIB..6 * MIB)).unwrap(), []);
    let allocated = region.file().unwrap().metadata().unwrap().blocks() * 512;
    assert_eq!(allocated, 6 * MIB, "no hole was filled by looking at it");
}

#[test]
fn the_zero_map_follows_the_kernel() {
    let ram = memfd();
    let region = &ram.regions()[0];
    let page = 3 * MIB / PAGE;
    assert!(region.zero().is_zero(page));
    write_main(&ram, 3 * MIB, &[1]);
    region.sync_zero_map(&(0..MIB)).unwrap();
    assert!(region.zero().is_zero(page), "outside of what was asked");
    region.sync_zero_map(&(0..8 * MIB)).unwrap();
    assert!(!region.zero().is_zero(page));
    assert!(!region.page_is_zero(page).unwrap());
    assert!(region.page_is_zero(0).unwrap());
}

#[test]
fn a_file_keeps_what_the_guest_wrote_only_if_shared() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("ram");
    std::fs::write(&path, vec![9; 8 << 20]).unwrap();
    for shared in [false, true] {
        let ram = ram(|z| {
            z.backing = Backing::File(path.clone());
            z.shared = shared;
        });
        let region = &ram.regions()[0];
        assert_eq!(read_main(&ram, 0, 1), [9]);
        assert!(!region.zero().is_zero(0), "what the file held is data");
        write_main(&ram, 0, &[1]);
        ram.discard_in_region(0, &(PAGE..2 * PAGE)).unwrap();
        assert_eq!(read_main(&ram, 0, 1), [1]);
        assert_eq!(read_main(&ram, PAGE, 1), [0]);
        drop(ram);
        let kept = std::fs::read(&path).unwrap();
        assert_eq!((kept[0], kept[4096]), if shared { (1, 0) } else { (9, 9) });
    }
}

#[test]
fn accesses_outside_are_refused() {
    let ram = memfd();
    let region = &ram.regions()[0];
    let end = 8 * MIB;
    let mut bytes = [0; 8];
    assert!(region.read_page_range(end - 8, &mut bytes).is_ok());
    for offset in [end - 7, end, u64::MAX - 3, u64::MAX] {
        assert!(region.read_page_range(offset, &mut bytes).is_err(), "{offset:#x}");
        assert!(region.write_range(offset, &bytes).is_err(), "{offset:#x}");
    }
    #[expect(clippy::reversed_empty_ranges, reason = "that is what is to be refused")]
    let backwards = 8192..4096;
    let error = region.alias_slice(&backwards).unwrap_err();
    assert!(error.to_string().contains("'t'"), "{error}");
    assert!(ram.discard_in_region(0, &backwards).is_err());
    assert!(ram.discard_in_region(0, &(0..end + PAGE)).is_err());
    assert!(ram.discard_in_region(0, &(0..100)).is_err());
    assert!(region.page_is_zero(u64::MAX).is_err());
    assert_eq!(region.collapse(&(0..end + 1)), Collapsing::Impossible);
    assert!(ram.discard_in_region(0, &(PAGE..PAGE)).is_ok());
}

#[test]
fn small_pages_become_huge_by_collapse() {
    let Some(turn) = HugePagesTurn::new(8 * MIB) else { return };
    let ram = memfd();
    let region = &ram.regions()[0];
    write_main(&ram, 0, &vec![5; 8 << 20]);
    // Where the host made huge pages at once nothing is left to collapse.
    if !turn.has_given(region.collapse(&(0..8 * MIB)), Collapsing::Done) {
        return;
    }
    assert_eq!(smaps_bytes(region.as_ptr(), "ShmemPmdMapped"), 8 * MIB);
    assert!(read_main(&ram, 0, 8 << 20).iter().all(|byte| *byte == 5));
}

#[test]
fn memory_is_prepared_with_the_pages_that_it_is_to_have() {
    each_kind(|ram, region| {
        write_main(ram, 5 * MIB, &[0xa5]);
        region.prepare_for_io(&(2 * MIB..6 * MIB)).unwrap();
        assert_eq!(read_main(ram, 5 * MIB, 2), [0xa5, 0]);
        let populated = region.populated_runs(&(0..8 * MIB)).unwrap();
        let has = |range: &Range<u64>| {
            populated.iter().any(|run| run.start <= range.start && range.end <= run.end)
        };
        assert!(has(&(2 * MIB..6 * MIB)), "{populated:?}");
        assert!(region.prepare_for_io(&(0..100)).is_err());
    });
}

#[test]
fn cleared_memory_is_zero_to_the_last_byte_and_only_there() {
    each_kind(|ram, region| {
        region.fill(&(0..8 * MIB)).unwrap();
        for at in [0, MIB - 1, MIB, 2 * MIB - 1, 2 * MIB] {
            write_main(ram, at, &[0xa5]);
        }
        assert!(!region.is_clear(&(MIB..2 * MIB)).unwrap());
        region.clear(&(MIB..2 * MIB)).unwrap();
        assert!(region.is_clear(&(MIB..2 * MIB)).unwrap());
        for at in [0, MIB - 1, 2 * MIB] {
            assert_eq!(read_main(ram, at, 1), [0xa5], "{at:#x}");
        }
        assert!(!region.is_clear(&(0..MIB)).unwrap());
        assert!(region.clear(&(0..100)).is_err() && region.clear(&(0..9 * MIB)).is_err());
    });
}

#[test]
fn vcpus_with_a_mapping_of_their_own_see_the_same_memory() {
    each_kind(|ram, region| {
        assert_eq!(region.slot_addr(), region.host_addr());
        if region.kind() != ZoneKind::Shared {
            assert!(matches!(region.map_for_vcpus(), Err(AccessError::NoAlias { .. })));
            assert_eq!(region.slot_addr(), region.host_addr());
            return;
        }
        region.map_for_vcpus().unwrap();
        let start = region.vcpus_ptr().unwrap();
        region.map_for_vcpus().unwrap();
        assert_eq!(region.vcpus_ptr().unwrap(), start);
        assert_eq!(region.slot_addr(), start.addr() as u64);
        assert_ne!(region.slot_addr(), region.host_addr());
        write_main(ram, region.gpa() + 5 * PAGE, &[7; 16]);
        // SAFETY: inside the mapping, which is as long as the region.
        let seen = unsafe { start.add(5 * 4096).read_volatile() };
        assert_eq!(seen, 7);
    });
}

/// The flags of the mapping that begins at an address, from `smaps`.
fn vm_flags(start: *const u8) -> String {
    let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let begin = format!("{:x}-", start.addr());
    let mut lines = smaps.lines().skip_while(|line| !line.starts_with(&begin));
    lines.find_map(|line| line.strip_prefix("VmFlags:")).unwrap().to_owned()
}

#[test]
fn no_mapping_of_shared_memory_gets_huge_pages_while_small_ones_are_wanted() {
    let ram = ram(|z| {
        z.backing = Backing::Memfd;
        z.thp = true;
    });
    let region = &ram.regions()[0];
    region.map_for_vcpus().unwrap();
    let whole = region.alias_slice(&(0..region.len_bytes())).unwrap();
    let alias = whole.ptr_guard().as_ptr();
    let vcpus = region.vcpus_ptr().unwrap().cast_const();
    let mappings = [region.as_ptr().cast_const(), alias, vcpus];
    let all_have = |flag: &str| {
        mappings.iter().all(|start| vm_flags(*start).split_whitespace().any(|one| one == flag))
    };
    if !all_have("hg") {
        test_skip::skip!("this kernel has no transparent huge pages");
        return;
    }
    region.use_small_pages(true);
    assert!(all_have("nh") && !all_have("hg"));
    region.populate_for_io(&(0..8 * MIB)).unwrap();
    assert_ne!(
        region.collapse(&(0..8 * MIB)),
        Collapsing::Done,
        "nothing makes a huge page meanwhile"
    );
    region.use_small_pages(false);
    assert!(all_have("hg"));
}

#[test]
fn a_block_is_no_smaller_than_a_page_of_the_host() {
    let blocks = |page_bytes| {
        let zone = ZoneSpec { block_bytes: Some(2 * MIB), ..ZoneSpec::new("t", 2 << 30) };
        let backing = ZoneBacking {
            kind: ZoneKind::PrivateAnonymous,
            file: None,
            page_bytes,
            hugetlb: true,
            holds_data: false,
            prezeroed: false,
            locked: false,
            image_data: None,
        };
        Zone::new(zone, backing, false, &Host::real(), None).spec.block_bytes
    };
    assert_eq!((blocks(PAGE), blocks(1 << 30)), (Some(2 * MIB), Some(1 << 30)));
}

/// Calls `act` on a thread that has the rights of another, ordinary user; `None` where that takes a right.
fn as_another_user<T: Send>(act: impl FnOnce() -> T + Send) -> Option<T> {
    const USER: libc::c_long = 54321;
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            // SAFETY: takes numbers; unlike the C library's function, the call changes this thread alone.
            let changed = unsafe { libc::syscall(libc::SYS_setresuid, USER, USER, USER) };
            (changed == 0).then(act)
        });
        thread.join().unwrap()
    })
}

#[test]
fn memory_of_another_user_is_populated_where_it_has_pages() {
    let owner = memfd();
    let file = Arc::clone(owner.regions()[0].file().unwrap());
    file.set_permissions(Permissions::from_mode(0o600)).unwrap();
    for page in [0, 1, 700] {
        write_main(&owner, page * PAGE, &[7; 16]);
    }
    let asked = as_another_user(|| {
        let given = [ProvidedFile::file("t", file)];
        let config =
            RamConfig { zones: vec![ZoneSpec { shared: true, ..ZoneSpec::new("t", 8 * MIB) }] };
        let ram = GuestRam::with_provided(&config, RamLayout::default(), &given).unwrap();
        let region = &ram.regions()[0];
        let before = region.populated_runs(&(0..8 * MIB)).unwrap();
        ram.discard(PAGE..2 * PAGE);
        (before, region.populated_runs(&(0..MIB)).unwrap())
    });
    let Some((before, after)) = asked else {
        test_skip::skip!("this thread cannot become another user");
        return;
    };
    assert_eq!(before, [0..2 * PAGE, 700 * PAGE..701 * PAGE]);
    assert!(after.iter().eq([&(0..PAGE)]), "{after:?}");
}

#[test]
fn what_is_populated_before_it_is_filled_is_mapped_where_it_is_filled() {
    let ram = ram(|zone| zone.shared = true);
    let region = &ram.regions()[0];
    let mapped = |at: *const u8| smaps_bytes(at, "Rss");
    region.populate_for_io(&(0..256 << 10)).unwrap();
    assert_eq!(mapped(region.as_ptr()), 256 << 10, "the guest has it without a fault");
    let alias = region.alias_slice(&(0..MIB)).unwrap().ptr_guard().as_ptr();
    assert_eq!(mapped(alias), 0);
    region.populate_for_io(&(512 << 10..640 << 10)).unwrap();
    assert_eq!(mapped(alias), 128 << 10);
    assert_eq!(mapped(region.as_ptr()), 256 << 10, "the guest still waits for it");
}
