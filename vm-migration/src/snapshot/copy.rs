// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Restores all memory before the guest runs.
//!
//! Owns the threads that read: each claims a block, reads its pages straight into guest memory and
//! compares the checksums of what has arrived. Zero pages are not touched, so they stay holes.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::block::{first_damaged, spans};
use super::error::SnapshotError;
use super::open::Opened;
use super::save::for_each_block;
use crate::cancel::Cancel;
use crate::layout::{PAGE_BYTES, PageRun};
use crate::ram::GuestMemoryMap;

/// Result of a restore by copy.
#[derive(Clone, Copy, Debug)]
pub struct CopyReport {
    /// Bytes of pages that are not zero.
    pub data_bytes: u64,
    /// Duration of the restore.
    pub took: Duration,
}

/// Reads a snapshot into the memory of a machine that has not run. The memory must be empty: pages that
/// are zero in the snapshot are not written, and it may be pinned for devices already, so that nothing
/// can be discarded.
///
/// # Errors
/// Names the file and what is wrong with it; the memory cannot be used then.
pub fn copy_in<M: GuestMemoryMap>(
    snapshot: &Opened,
    memory: &M,
    threads: usize,
    cancel: &Cancel,
) -> Result<CopyReport, SnapshotError> {
    let began = Instant::now();
    let (geometry, index) = snapshot.index_for(memory.layout())?;
    let file = snapshot.memory();
    let data_pages = AtomicU64::new(0);
    for_each_block(&geometry, threads, cancel, |block| {
        let mut at = block.first;
        let zero_until = |from: u64, to: u64| {
            if from < to {
                memory.mark_zero(PageRun { region: block.region, first: from, count: to - from });
            }
        };
        for span in spans(&geometry, block, |chunk| index.entry(chunk).present) {
            file.read(&span.pieces(memory), geometry.offset_of(block.region, span.first()))?;
            for run in span.runs {
                data_pages.fetch_add(run.count, Ordering::Relaxed);
                memory.mark_resident(run);
                zero_until(at, run.first);
                at = run.end();
            }
        }
        zero_until(at, block.end());
        match first_damaged(memory, &geometry, &index, block) {
            None => Ok(()),
            Some(chunk) => Err(damaged(file.path(), memory, chunk)),
        }
    })?;
    let data_bytes = data_pages.into_inner() * PAGE_BYTES;
    Ok(CopyReport { data_bytes, took: began.elapsed() })
}

/// The error of a chunk whose checksum is wrong.
pub(crate) fn damaged<M: GuestMemoryMap>(
    path: &std::path::Path,
    memory: &M,
    chunk: PageRun,
) -> SnapshotError {
    let range = memory.layout().range_of(chunk);
    let part = format!("guest memory {:#x}+{:#x}", range.gpa, range.len_bytes);
    SnapshotError::Damaged { path: path.to_owned(), part }
}
