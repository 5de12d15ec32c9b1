// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests on a directory with the files of a recorded snapshot.

#![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::sync::Arc;

use memory::{GuestRam, RamConfig, RamLayout, ZoneSpec};

use super::*;

const RAM_BYTES: u64 = 8 << 20;

macro_rules! file {
    ($name:literal) => {
        include_bytes!(concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/../tests/data/cloud-hypervisor-53/snapshots/plain-1/",
            $name
        ))
    };
}

/// A snapshot with this length of its memory file, in which one page has contents.
fn directory(memory_bytes: u64) -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    std::fs::write(path(CONFIG_FILE), file!("config.json")).unwrap();
    std::fs::write(path(STATE_FILE), file!("state.json")).unwrap();
    let memory = File::create(path(MEMORY_FILE)).unwrap();
    memory.set_len(memory_bytes).unwrap();
    memory.write_all_at(&[7; PAGE], 0x5000).unwrap();
    directory
}

fn ram() -> MigratingRam {
    let config = RamConfig { zones: vec![ZoneSpec::new("mem0", RAM_BYTES)] };
    let layout = RamLayout {
        hole_start: 3 << 30,
        hole_end: 4 << 30,
        high_hole: None,
        end: 1 << 39,
        later_align_bytes: 128 << 20,
    };
    MigratingRam::as_mapped(Arc::new(GuestRam::new(&config, layout).unwrap())).unwrap()
}

fn refusal(directory: &Path) -> String {
    match AdoptedSnapshot::open(directory) {
        Ok(_) => panic!("it is opened"),
        Err(error) => error_text::chain(&error),
    }
}

#[test]
fn a_snapshot_is_recognised_and_its_memory_copied() {
    let directory = directory(RAM_BYTES);
    assert!(is_in(directory.path()));
    let snapshot = AdoptedSnapshot::open(directory.path()).unwrap();
    assert_eq!(snapshot.state.vcpus.len(), 1);
    assert_eq!(snapshot.memory.read_u16(0x5ffe).unwrap(), 0x0707);
    assert_eq!(snapshot.memory.read_u16(0x5fff).unwrap(), 0x0007);
    assert!(snapshot.memory.read_u16(RAM_BYTES - 1).is_err());
    let ram = ram();
    assert_eq!(snapshot.memory.copy_in(&ram, &Cancel::new().unwrap()).unwrap(), PAGE_BYTES);
    let mut page = [0; PAGE];
    ram.ram().guest_memory().memory().read_slice(&mut page, GuestAddress(0x5000)).unwrap();
    assert_eq!(page, [7; PAGE]);
    let zero = ram.ram().regions()[0].zero();
    assert!(zero.is_zero(4) && !zero.is_zero(5) && zero.is_zero(6));
    // One of this program has a manifest.
    std::fs::write(directory.path().join(MANIFEST_FILE), "{}").unwrap();
    assert!(!is_in(directory.path()));
}

#[test]
fn an_unfinished_snapshot_is_refused() {
    for bytes in [RAM_BYTES - 1, RAM_BYTES + 1] {
        let error = refusal(directory(bytes).path());
        assert!(error.contains("memory-ranges has") && error.contains("not finished"), "{error}");
    }
    let directory = directory(RAM_BYTES);
    std::fs::remove_file(directory.path().join(MEMORY_FILE)).unwrap();
    assert!(refusal(directory.path()).contains("cannot open"));
}

#[test]
fn files_that_are_no_documents_are_named() {
    for (name, contents, expected) in [
        (STATE_FILE, "{", "state.json cannot be read: (root): EOF"),
        (CONFIG_FILE, "[", "config.json cannot be read: config: [0]: EOF"),
        (CONFIG_FILE, "[]", "cannot be taken over: the configuration has vm_config=[]"),
    ] {
        let directory = directory(RAM_BYTES);
        std::fs::write(directory.path().join(name), contents).unwrap();
        let error = refusal(directory.path());
        assert!(error.contains(expected), "{error}");
    }
    let directory = directory(RAM_BYTES);
    std::fs::remove_file(directory.path().join(STATE_FILE)).unwrap();
    std::fs::create_dir(directory.path().join(STATE_FILE)).unwrap();
    assert!(refusal(directory.path()).contains("state.json is no file of a snapshot"));
}

#[test]
fn memory_that_the_machine_does_not_have_is_refused() {
    let directory = directory(RAM_BYTES);
    let range = MemoryRange { gpa: PAGE_BYTES, length: RAM_BYTES };
    let contents = MemoryContents::open(&directory.path().join(MEMORY_FILE), &[range]).unwrap();
    let file = contents.file.as_ref().unwrap();
    let writable = OpenOptions::new().write(true).open(directory.path().join(MEMORY_FILE)).unwrap();
    writable.write_all_at(&[1], RAM_BYTES - 1).unwrap();
    assert_eq!(file.metadata().unwrap().len(), RAM_BYTES);
    let error = contents.copy_in(&ram(), &Cancel::new().unwrap()).unwrap_err();
    assert!(error.to_string().contains("memory at 0x800000"), "{error}");
    let cancel = Cancel::new().unwrap();
    cancel.cancel();
    let cancelled = contents.copy_in(&ram(), &cancel).unwrap_err();
    assert!(matches!(cancelled, AdoptedSnapshotError::Cancelled));
}

/// The recorded snapshot with one thing changed, and a memory file of its ranges.
fn changed(
    change: impl FnOnce(&mut serde_json::Value, &mut Vec<MemoryRange>),
) -> tempfile::TempDir {
    let directory = directory(RAM_BYTES);
    let path = |name: &str| directory.path().join(name);
    let mut config = serde_json::from_slice(file!("config.json")).unwrap();
    let mut document = Document::read(file!("state.json")).unwrap();
    let mut ranges = document.memory.memory_ranges.data.to_vec();
    change(&mut config, &mut ranges);
    let len = ranges.iter().map(|range| range.length).sum();
    File::create(path(MEMORY_FILE)).unwrap().set_len(len).unwrap();
    document.memory.memory_ranges.data = ranges.try_into().ok().unwrap();
    std::fs::write(path(CONFIG_FILE), serde_json::to_vec(&config).unwrap()).unwrap();
    std::fs::write(path(STATE_FILE), document.write().unwrap()).unwrap();
    directory
}

#[test]
fn ranges_that_are_not_the_machines_memory_are_refused() {
    let range = |gpa, length| MemoryRange { gpa, length };
    let half = RAM_BYTES / 2;
    for (ranges, expected) in [
        (vec![], "0x0 to 0x800000, memory of zone 'mem0', is not in the snapshot"),
        (vec![range(0, half)], "memory of zone 'mem0', is not in the snapshot"),
        (
            vec![range(0, half), range(half + PAGE_BYTES, half - PAGE_BYTES)],
            "memory of zone 'mem0', is not in the snapshot",
        ),
        (
            vec![range(0, RAM_BYTES), range(half, PAGE_BYTES)],
            "the memory at 0x400000 is there twice",
        ),
        (vec![range(0, RAM_BYTES + PAGE_BYTES)], "0x0 to 0x801000 is not all memory of the VM"),
        (
            vec![range(0, RAM_BYTES), range(1 << 40, 1 << 40)],
            "0x10000000000 to 0x20000000000 is not all memory of the VM",
        ),
    ] {
        let error = refusal(changed(|_, found| *found = ranges).path());
        assert!(error.contains("memory-manager: memory_ranges: "), "{error}");
        assert!(error.contains(expected), "{expected}: {error}");
    }
    // In pieces, and not in order.
    let pieces = vec![range(half, half), range(0, half)];
    AdoptedSnapshot::open(changed(|_, found| *found = pieces).path()).unwrap();
}

#[test]
fn memory_that_is_only_in_a_zones_file_is_refused_and_left_there() {
    let files = tempfile::tempdir().unwrap();
    let file = files.path().join("ram");
    std::fs::write(&file, [7; PAGE]).unwrap();
    let zone = |shared: bool| {
        serde_json::json!({
            "size": 0, "zones": [{"id": "mem0", "size": RAM_BYTES, "file": file, "shared": shared}]
        })
    };
    let directory = changed(|config, ranges| {
        config["memory"] = zone(true);
        ranges.clear();
    });
    std::fs::remove_file(directory.path().join(MEMORY_FILE)).unwrap();
    let error = refusal(directory.path());
    assert!(error.contains("memory of zone 'mem0', is not in the snapshot but only in"), "{error}");
    assert!(error.contains(file.to_str().unwrap()), "{error}");
    assert_eq!(std::fs::read(&file).unwrap(), [7; PAGE]);
    // What a private mapping has is in the snapshot, and its file is not opened at all.
    let private = changed(|config, _| config["memory"] = zone(false));
    let adopted = AdoptedSnapshot::open(private.path()).unwrap();
    let zones = adopted.config.memory.zones.unwrap();
    assert!(zones.iter().all(|zone| zone.file.is_none() && !zone.shared));
}

#[test]
fn an_unfinished_snapshot_of_this_program_is_not_taken_for_another() {
    let directory = directory(RAM_BYTES);
    for (state, is_ours) in [
        ("{\"version\":9,\"vcpus\":[", true),
        ("{ \"version\": 1", true),
        ("{\"snapshots\":{}}", false),
        ("{\"ver", false),
        ("", false),
    ] {
        std::fs::write(directory.path().join(STATE_FILE), state).unwrap();
        assert_eq!(is_in(directory.path()), !is_ours, "{state}");
    }
    let adopted = AdoptedSnapshot::open(changed(|_, _| {}).path()).unwrap();
    std::fs::write(directory.path().join(STATE_FILE), adopted.state.to_json().unwrap()).unwrap();
    assert!(!is_in(directory.path()));
}
