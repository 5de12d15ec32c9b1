// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Writes a snapshot in a form that others read: two documents, and a memory file with ranges of guest memory one after
//! another.
//!
//! Owns when it is complete: such a snapshot has no manifest, so that the configuration, without which no program restores
//! it, gets its name last. What the documents say is the caller's matter. The guest must not run, as with [`super::save`].

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use super::block::{not_zero, spans};
use super::draft::Draft;
use super::error::SnapshotError;
use super::file::MemoryFile;
use super::geometry::{CHUNK_PAGES, Geometry};
use super::save::{SaveReport, Saved, for_each_block, populated_masks};
use super::{CONFIG_FILE, MEMORY_FILE, STATE_FILE};
use crate::cancel::Cancel;
use crate::layout::{GpaRange, PAGE_BYTES, PageRun};
use crate::ram::GuestMemoryMap;

/// A range, and where it begins in the file.
struct Placed {
    run: PageRun,
    offset_bytes: u64,
}

impl Placed {
    /// The pages that are also in `other`.
    fn within(&self, other: PageRun) -> Option<PageRun> {
        let first = self.run.first.max(other.first);
        let count = self.run.end().min(other.end()).checked_sub(first)?;
        let is_there = self.run.region == other.region && count > 0;
        is_there.then_some(PageRun { region: other.region, first, count })
    }
}

/// Writes a snapshot with these ranges of memory, in their order, into an existing directory that has none. Each lies in one
/// region; pages that are in none are left out. When to stop writing memory is as with [`super::save`].
///
/// # Errors
/// What failed and on which file; nothing is left in the directory then.
pub fn save_ranges<M: GuestMemoryMap>(
    directory: &Path,
    saved: Saved<'_>,
    ranges: &[GpaRange],
    memory: &M,
    threads: usize,
    cancel: &Cancel,
) -> Result<SaveReport, SnapshotError> {
    let began = Instant::now();
    let mut placed = Vec::new();
    let mut len_bytes = 0_u64;
    for range in ranges {
        let run = memory.layout().locate(*range).map_err(SnapshotError::Range)?;
        placed.push(Placed { run, offset_bytes: len_bytes });
        len_bytes = len_bytes.saturating_add(range.len_bytes);
    }
    let draft = Draft::begin(directory)?;
    let file = MemoryFile::create(&draft.partial(MEMORY_FILE), len_bytes)?;
    let geometry = Geometry::new(memory.layout());
    let data_pages = AtomicU64::new(0);
    for_each_block(&geometry, threads, cancel, |block| {
        let writer = Writer { memory, geometry: &geometry, file: &file, placed: &placed };
        let pages = writer.block(block, cancel)?;
        data_pages.fetch_add(pages, Ordering::Relaxed);
        Ok(())
    })?;
    draft.write(STATE_FILE, saved.state_json)?;
    draft.write(CONFIG_FILE, saved.config_json)?;
    file.sync()?;
    let not_cancelled = || {
        if cancel.is_cancelled() { Err(SnapshotError::Cancelled) } else { Ok(()) }
    };
    draft.publish_without_manifest(&[MEMORY_FILE, STATE_FILE, CONFIG_FILE], &not_cancelled)?;
    Ok(SaveReport {
        data_bytes: data_pages.into_inner().saturating_mul(PAGE_BYTES),
        memory_bytes: len_bytes,
        direct: file.is_direct(),
        took: began.elapsed(),
    })
}

/// What the threads share that write memory.
struct Writer<'w, M> {
    memory: &'w M,
    geometry: &'w Geometry,
    file: &'w MemoryFile,
    placed: &'w [Placed],
}

impl<M: GuestMemoryMap> Writer<'_, M> {
    /// Writes the pages of a block that hold data, and returns their number.
    fn block(&self, block: PageRun, cancel: &Cancel) -> Result<u64, SnapshotError> {
        let parts = self.placed.iter().filter_map(|placed| Some((placed, placed.within(block)?)));
        let parts: Vec<_> = parts.collect();
        if parts.is_empty() {
            return Ok(0);
        }
        let hold = self.memory.hold(block.region, block.first..block.end());
        let Some(mut masks) = populated_masks(self.memory, block)? else { return Ok(0) };
        for ((_, chunk), mask) in self.geometry.chunks_of(block).zip(&mut masks) {
            if *mask != 0 {
                *mask = not_zero(self.memory, chunk, *mask);
            }
        }
        drop(hold);
        let mut first_chunk = self.geometry.chunks_of(block).map(|(number, _)| number);
        let first_chunk = first_chunk.next().unwrap_or(0);
        let mut pages = 0_u64;
        for (placed, part) in parts {
            let present = |number: usize| {
                let index = number.saturating_sub(first_chunk);
                let first = u64::try_from(index).unwrap_or(0).saturating_mul(CHUNK_PAGES);
                let mask = masks.get(index).copied().unwrap_or(0);
                mask & pages_of(part, block.first.saturating_add(first))
            };
            for span in spans(self.geometry, block, present) {
                // After a long write the guest may be running again.
                if cancel.is_cancelled() {
                    return Err(SnapshotError::Cancelled);
                }
                let before = span.first().saturating_sub(placed.run.first);
                let offset = placed.offset_bytes.saturating_add(before.saturating_mul(PAGE_BYTES));
                pages = span.runs.iter().fold(pages, |sum, run| sum.saturating_add(run.count));
                self.file.write(&span.pieces(self.memory), offset)?;
            }
        }
        Ok(pages)
    }
}

/// The pages of a chunk that are in a run.
fn pages_of(run: PageRun, chunk_first: u64) -> u16 {
    (0..CHUNK_PAGES).fold(0, |mask, page| {
        let page_number = chunk_first.saturating_add(page);
        let is_in = (run.first..run.end()).contains(&page_number);
        mask | u16::from(is_in) << page
    })
}

#[cfg(all(test, not(loom)))]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a failing unwrap fails the test")]

    use std::fs;
    use std::os::unix::fs::MetadataExt as _;
    use std::sync::Arc;

    use tempfile::TempDir;

    use super::super::draft::partial;
    use super::super::{INDEX_FILE, MANIFEST_FILE};
    use super::*;
    use crate::layout::Backing;
    use crate::testing::FakeMemory;

    const SAVED: Saved<'static> = Saved { config_json: b"{}", state_json: b"[]" };
    const MIB: u64 = 1 << 20;

    fn memory() -> Arc<FakeMemory> {
        let regions = [(0, 9 * MIB / PAGE_BYTES), (1 << 32, 12 * MIB / PAGE_BYTES)];
        FakeMemory::new(&regions, Backing::Shared, PAGE_BYTES).unwrap()
    }

    fn page_of(number: u8) -> Vec<u8> {
        vec![number; 4096]
    }

    fn put(memory: &FakeMemory, gpa: u64, number: u8) {
        let range = GpaRange { gpa, len_bytes: PAGE_BYTES };
        let run = memory.layout().locate(range).unwrap();
        for word in 0..PAGE_BYTES / 8 {
            let value = u64::from_le_bytes([number; 8]);
            memory.word(run.region, run.first, word).store(value, Ordering::Relaxed);
        }
    }

    fn save(
        folder: &Path,
        memory: &FakeMemory,
        ranges: &[GpaRange],
    ) -> Result<SaveReport, SnapshotError> {
        save_ranges(folder, SAVED, ranges, memory, 3, &Cancel::new().unwrap())
    }

    #[test]
    fn ranges_follow_one_another_in_their_order() {
        let (memory, folder) = (memory(), TempDir::new().unwrap());
        let high = 1_u64 << 32;
        // The last page of one range, the first of the next, one between ranges, one in the middle of a block.
        for (gpa, number) in [
            (0, 1),
            (9 * MIB - 4096, 2),
            (high + 2 * MIB - 4096, 3),
            (high + 2 * MIB, 4),
            (high + 4 * MIB - 4096, 5),
            (high + 4 * MIB, 6),
            (high + 7 * MIB, 7),
        ] {
            put(&memory, gpa, number);
        }
        let ranges = [
            GpaRange { gpa: high + 2 * MIB, len_bytes: 2 * MIB },
            GpaRange { gpa: 0, len_bytes: 9 * MIB },
            GpaRange { gpa: high + 6 * MIB, len_bytes: 6 * MIB },
        ];
        let report = save(folder.path(), &memory, &ranges).unwrap();
        assert_eq!((report.memory_bytes, report.data_bytes), (17 * MIB, 5 * PAGE_BYTES));
        let file = fs::read(folder.path().join(MEMORY_FILE)).unwrap();
        let mut expected = vec![0; file.len()];
        for (offset, number) in
            [(0, 4), (2 * MIB - 4096, 5), (2 * MIB, 1), (11 * MIB - 4096, 2), (12 * MIB, 7)]
        {
            let at = usize::try_from(offset).unwrap();
            expected[at..at + 4096].copy_from_slice(&page_of(number));
        }
        assert!(file == expected, "{} bytes", file.len());
        let blocks = fs::metadata(folder.path().join(MEMORY_FILE)).unwrap().blocks();
        assert!(blocks * 512 < 2 * MIB, "there are holes");
        let mut names: Vec<_> = fs::read_dir(folder.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort_unstable();
        assert_eq!(names, [CONFIG_FILE, MEMORY_FILE, STATE_FILE]);
        assert_eq!(fs::read(folder.path().join(CONFIG_FILE)).unwrap(), SAVED.config_json);
        assert_eq!(fs::read(folder.path().join(STATE_FILE)).unwrap(), SAVED.state_json);
        // A snapshot is never replaced.
        let error = save(folder.path(), &memory, &ranges).unwrap_err();
        assert!(matches!(error, SnapshotError::Exists(_)), "{error}");
    }

    #[test]
    fn what_fails_leaves_nothing() {
        let (memory, folder) = (memory(), TempDir::new().unwrap());
        let outside = [GpaRange { gpa: 9 * MIB, len_bytes: PAGE_BYTES }];
        let error = save(folder.path(), &memory, &outside).unwrap_err();
        assert!(matches!(error, SnapshotError::Range(_)), "{error}");
        let cancel = Cancel::new().unwrap();
        cancel.cancel();
        let all = [GpaRange { gpa: 0, len_bytes: 9 * MIB }];
        let error = save_ranges(folder.path(), SAVED, &all, &*memory, 2, &cancel).unwrap_err();
        assert!(matches!(error, SnapshotError::Cancelled), "{error}");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    fn names_in(folder: &TempDir) -> Vec<String> {
        let entries = fs::read_dir(folder.path()).unwrap();
        let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<_> = names.collect();
        names.sort_unstable();
        names
    }

    /// As after a kill between the last name and the removal of the marker.
    #[test]
    fn a_whole_snapshot_beside_a_marker_is_never_removed() {
        let (memory, folder) = (memory(), TempDir::new().unwrap());
        let all = [GpaRange { gpa: 0, len_bytes: 9 * MIB }];
        save(folder.path(), &memory, &all).unwrap();
        fs::write(partial(folder.path(), MANIFEST_FILE), []).unwrap();
        let error = save(folder.path(), &memory, &all).unwrap_err();
        assert!(matches!(&error, SnapshotError::Exists(path) if path.ends_with(CONFIG_FILE)));
        let left = [&partial(Path::new(""), MANIFEST_FILE).display().to_string(), CONFIG_FILE];
        assert_eq!(names_in(&folder), [left[0], left[1], MEMORY_FILE, STATE_FILE]);
    }

    /// As after a kill at any time before.
    #[test]
    fn what_a_killed_process_left_is_removed() {
        let (memory, folder) = (memory(), TempDir::new().unwrap());
        let all = [GpaRange { gpa: 0, len_bytes: 9 * MIB }];
        let files = [MEMORY_FILE, STATE_FILE, CONFIG_FILE];
        for named in 0..files.len() {
            fs::write(partial(folder.path(), MANIFEST_FILE), []).unwrap();
            for (number, name) in files.into_iter().enumerate() {
                let own = folder.path().join(name);
                let path = if number < named { own } else { partial(folder.path(), name) };
                fs::write(path, "unfinished").unwrap();
            }
            save(folder.path(), &memory, &all).unwrap();
            assert_eq!(names_in(&folder), [CONFIG_FILE, MEMORY_FILE, STATE_FILE]);
            for name in files {
                fs::remove_file(folder.path().join(name)).unwrap();
            }
        }
        // One with a manifest that had most of its names.
        for index in [folder.path().join(INDEX_FILE), partial(folder.path(), INDEX_FILE)] {
            fs::write(partial(folder.path(), MANIFEST_FILE), []).unwrap();
            for name in files {
                fs::write(folder.path().join(name), "unfinished").unwrap();
            }
            fs::write(&index, "unfinished").unwrap();
            save(folder.path(), &memory, &all).unwrap();
            for name in files {
                fs::remove_file(folder.path().join(name)).unwrap();
            }
        }
    }

    #[test]
    fn a_marker_that_cannot_be_removed_is_no_failure() {
        let folder = TempDir::new().unwrap();
        let draft = Draft::begin(folder.path()).unwrap();
        let files = [MEMORY_FILE, STATE_FILE, CONFIG_FILE];
        for name in files {
            draft.write(name, b"x").unwrap();
        }
        let marker = partial(folder.path(), MANIFEST_FILE);
        let block = || {
            if marker.is_file() {
                fs::remove_file(&marker).unwrap();
                fs::create_dir(&marker).unwrap();
            }
            Ok(())
        };
        draft.publish_without_manifest(&files, &block).unwrap();
        assert_eq!(names_in(&folder).len(), 4);
    }
}
