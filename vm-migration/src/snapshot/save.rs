// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Writes a snapshot of a paused guest.
//!
//! Owns the threads that write memory: each claims a block, finds out which of its pages hold
//! data, without populating any, and writes those straight from guest memory. The guest must
//! not run; the caller has stopped it.

use std::panic::resume_unwind;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::block::{inspect, spans};
use super::draft::Draft;
use super::error::SnapshotError;
use super::file::MemoryFile;
use super::geometry::{BLOCK_CHUNKS, CHUNK_PAGES, Geometry};
use super::index::{Entry, Index};
use super::manifest::{Manifest, Sealed};
use super::{CONFIG_FILE, INDEX_FILE, MEMORY_FILE, STATE_FILE};
use crate::cancel::Cancel;
use crate::layout::{PAGE_BYTES, PageRun, to_usize};
use crate::protocol::codec::{CONFIG_BYTES_MAX, STATE_BYTES_MAX};
use crate::ram::GuestMemoryMap;

/// The documents that are saved with the memory.
#[derive(Clone, Copy, Debug)]
pub struct Saved<'a> {
    /// The configuration, from which the same machine can be built.
    pub config_json: &'a [u8],
    /// The state of vCPUs and devices.
    pub state_json: &'a [u8],
}

/// Result of saving a snapshot.
#[derive(Clone, Copy, Debug)]
pub struct SaveReport {
    /// Bytes of pages that are not zero.
    pub data_bytes: u64,
    /// Size of guest memory.
    pub memory_bytes: u64,
    /// True when the page cache was bypassed.
    pub direct: bool,
    /// Duration, including the sync.
    pub took: Duration,
}

/// Writes a snapshot into an existing directory that has none. The guest must not run, and nothing
/// else may write its memory, until this returns or 1 s has passed since a cancel: what is still being
/// written then is not used, and memory is only read by system calls.
///
/// # Errors
/// What failed and on which file; nothing is left in the directory then.
pub fn save<M: GuestMemoryMap>(
    directory: &Path,
    saved: Saved<'_>,
    memory: &M,
    threads: usize,
    cancel: &Cancel,
) -> Result<SaveReport, SnapshotError> {
    let began = Instant::now();
    // Documents that could not be restored are refused before the directory is touched.
    fits("the configuration", saved.config_json, CONFIG_BYTES_MAX)?;
    fits("the state", saved.state_json, STATE_BYTES_MAX)?;
    let draft = Draft::begin(directory)?;
    let geometry = Geometry::new(memory.layout());
    let file = MemoryFile::create(&draft.partial(MEMORY_FILE), geometry.len_bytes())?;
    let index = write_memory(memory, &geometry, &file, threads, cancel)?;
    let not_cancelled = || {
        if cancel.is_cancelled() { Err(SnapshotError::Cancelled) } else { Ok(()) }
    };
    draft.write(CONFIG_FILE, saved.config_json)?;
    draft.write(STATE_FILE, saved.state_json)?;
    let index_bytes = index.encode();
    draft.write(INDEX_FILE, &index_bytes)?;
    file.sync()?;
    let manifest = Manifest::new(
        Sealed::of(saved.config_json),
        Sealed::of(saved.state_json),
        Sealed::of(&index_bytes),
        memory.layout(),
        &geometry,
    );
    let manifest = manifest.encode().map_err(|error| SnapshotError::Malformed {
        path: directory.join(super::MANIFEST_FILE),
        why: error.to_string(),
    })?;
    draft.publish(&manifest, &not_cancelled)?;
    Ok(SaveReport {
        data_bytes: index.present_pages() * PAGE_BYTES,
        memory_bytes: geometry.len_bytes(),
        direct: file.is_direct(),
        took: began.elapsed(),
    })
}

fn fits(what: &'static str, json: &[u8], limit_bytes: u64) -> Result<(), SnapshotError> {
    let len_bytes = u64::try_from(json.len()).unwrap_or(u64::MAX);
    if len_bytes > limit_bytes {
        return Err(SnapshotError::TooLong { what, len_bytes, limit_bytes });
    }
    Ok(())
}

fn write_memory<M: GuestMemoryMap>(
    memory: &M,
    geometry: &Geometry,
    file: &MemoryFile,
    threads: usize,
    cancel: &Cancel,
) -> Result<Index, SnapshotError> {
    let entries: Vec<AtomicU64> = (0..geometry.chunks()).map(|_| AtomicU64::new(0)).collect();
    for_each_block(geometry, threads, cancel, |block| {
        write_block(memory, geometry, file, &entries, block, cancel)
    })?;
    let entries = entries.into_iter().map(|word| Entry::unpack(word.into_inner()));
    Ok(Index::new(entries.collect()))
}

fn write_block<M: GuestMemoryMap>(
    memory: &M,
    geometry: &Geometry,
    file: &MemoryFile,
    entries: &[AtomicU64],
    block: PageRun,
    cancel: &Cancel,
) -> Result<(), SnapshotError> {
    // Held while this process reads it, but not while it waits for the storage.
    let hold = memory.hold(block.region, block.first..block.end());
    let Some(masks) = populated_masks(memory, block)? else { return Ok(()) };
    for ((number, chunk), mask) in geometry.chunks_of(block).zip(masks) {
        if mask != 0 {
            entries[number].store(inspect(memory, chunk, mask).pack(), Ordering::Relaxed);
        }
    }
    drop(hold);
    let present = |chunk: usize| Entry::unpack(entries[chunk].load(Ordering::Relaxed)).present;
    write_present(memory, geometry, (file, 0), block, &present, cancel)
}

/// Which pages of each chunk of a block are populated; `None` when none is. The block is held by the
/// caller.
pub(crate) fn populated_masks<M: GuestMemoryMap>(
    memory: &M,
    block: PageRun,
) -> Result<Option<[u16; to_usize(BLOCK_CHUNKS)]>, SnapshotError> {
    let populated = memory.populated_runs(block.region, block.first..block.end());
    let populated = populated.map_err(SnapshotError::Memory)?;
    if populated.is_empty() {
        return Ok(None);
    }
    let mut masks = [0_u16; to_usize(BLOCK_CHUNKS)];
    for run in populated {
        // A host page may extend beyond the block.
        for page in run.start.max(block.first)..run.end.min(block.end()) {
            let at = page - block.first;
            masks[to_usize(at / CHUNK_PAGES)] |= 1 << (at % CHUNK_PAGES);
        }
    }
    Ok(Some(masks))
}

/// Writes the present pages of a block to a file in which memory begins at an offset.
pub(crate) fn write_present<M: GuestMemoryMap>(
    memory: &M,
    geometry: &Geometry,
    (file, memory_offset): (&MemoryFile, u64),
    block: PageRun,
    present: &dyn Fn(usize) -> u16,
    cancel: &Cancel,
) -> Result<(), SnapshotError> {
    for span in spans(geometry, block, present) {
        // After a long write the guest may be running again.
        if cancel.is_cancelled() {
            return Err(SnapshotError::Cancelled);
        }
        let offset = memory_offset + geometry.offset_of(block.region, span.first());
        file.write(&span.pieces(memory), offset)?;
    }
    Ok(())
}

/// Calls `work` for every block of memory once, on several threads. The first error ends it.
pub(crate) fn for_each_block(
    geometry: &Geometry,
    threads: usize,
    cancel: &Cancel,
    work: impl Fn(PageRun) -> Result<(), SnapshotError> + Sync,
) -> Result<(), SnapshotError> {
    let blocks = geometry.blocks();
    let next = AtomicU64::new(0);
    let loop_of_one = || {
        loop {
            let block = next.fetch_add(1, Ordering::Relaxed);
            if block >= blocks {
                return Ok(());
            }
            let done = if cancel.is_cancelled() {
                Err(SnapshotError::Cancelled)
            } else {
                work(geometry.block(block))
            };
            if done.is_err() {
                // No other thread gets another block.
                next.store(blocks, Ordering::Relaxed);
                return done;
            }
        }
    };
    let threads = threads.clamp(1, usize::try_from(blocks).unwrap_or(usize::MAX).max(1));
    std::thread::scope(|scope| {
        let spawn = |_| {
            let thread = stoppable_thread::spawn_scoped(scope, "snapshot-mem", loop_of_one);
            thread.map_err(SnapshotError::Resource)
        };
        let all: Vec<_> = (0..threads).map(spawn).collect();
        let mut result = Ok(());
        for thread in all {
            let one = match thread {
                Ok(thread) => thread.join().unwrap_or_else(|panic| resume_unwind(panic)),
                Err(error) => Err(error),
            };
            if result.is_ok() {
                result = one;
            }
        }
        result
    })
}
