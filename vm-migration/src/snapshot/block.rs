// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! One block of memory in a snapshot: which pages are present, their checksums, and the transfers needed.
//!
//! Owns how scattered pages are combined into few transfers: pages closer together than
//! [`GAP_PAGES_MAX`] share one, with zeros between them in the file.

use super::file::Piece;
use super::geometry::Geometry;
use super::index::{Entry, Index};
use crate::layout::{PAGE_BYTES, PageRun, to_usize};
use crate::ram::{self, GuestMemoryMap};

/// Longest gap that is cheaper to transfer than to skip.
const GAP_PAGES_MAX: u64 = 7;

/// Bytes that are copied out of guest memory at once for a checksum: few enough for the first-level
/// cache.
const CHECK_BYTES: usize = 16 << 10;

/// Pages of one transfer: runs of present pages of one region, ascending.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Span {
    /// The runs.
    pub runs: Vec<PageRun>,
}

impl Span {
    /// First page.
    pub(crate) fn first(&self) -> u64 {
        self.runs.first().map_or(0, |run| run.first)
    }

    /// The pieces of the transfer, gaps included.
    pub(crate) fn pieces<'m, M: GuestMemoryMap>(&self, memory: &'m M) -> Vec<Piece<'m>> {
        let mut at = self.first();
        let mut pieces = Vec::with_capacity(2 * self.runs.len());
        for run in &self.runs {
            if run.first > at {
                pieces.push(Piece::Gap(to_usize((run.first - at) * PAGE_BYTES)));
            }
            pieces.push(Piece::Guest(ram::slice(memory, *run)));
            at = run.end();
        }
        pieces
    }
}

/// The runs of present pages of a chunk.
pub(crate) fn present_runs(chunk: PageRun, present: u16) -> impl Iterator<Item = PageRun> {
    let mut left = present;
    std::iter::from_fn(move || {
        let skip = left.trailing_zeros();
        if left == 0 {
            return None;
        }
        let count = (left >> skip).trailing_ones();
        left &= u16::MAX.checked_shl(skip + count).unwrap_or(0);
        Some(PageRun {
            region: chunk.region,
            first: chunk.first + u64::from(skip),
            count: u64::from(count),
        })
    })
}

/// The transfers of a block, or of any run of whole chunks.
pub(crate) fn spans(
    geometry: &Geometry,
    run: PageRun,
    present: impl Fn(usize) -> u16,
) -> Vec<Span> {
    let mut spans: Vec<Span> = Vec::new();
    for (chunk, pages) in geometry.chunks_of(run) {
        for run in present_runs(pages, present(chunk)) {
            match spans.last_mut().and_then(|span| span.runs.last_mut()) {
                Some(last) if last.end() == run.first => last.count += run.count,
                Some(last) if run.first - last.end() <= GAP_PAGES_MAX => {
                    if let Some(span) = spans.last_mut() {
                        span.runs.push(run);
                    }
                }
                _ => spans.push(Span { runs: vec![run] }),
            }
        }
    }
    spans
}

/// Finds the pages of a chunk that are not zero, and their checksum; only `populated` pages are read.
pub(crate) fn inspect<M: GuestMemoryMap>(memory: &M, chunk: PageRun, populated: u16) -> Entry {
    let present = not_zero(memory, chunk, populated);
    Entry { crc: checksum(memory, chunk, present), present }
}

/// Finds the pages of a chunk that are not zero; only `populated` pages are read.
pub(crate) fn not_zero<M: GuestMemoryMap>(memory: &M, chunk: PageRun, populated: u16) -> u16 {
    let mut present = 0;
    for page in 0..chunk.count {
        let one = PageRun { region: chunk.region, first: chunk.first + page, count: 1 };
        if populated >> page & 1 != 0 && !ram::is_zero(memory, one) {
            present |= 1 << page;
        }
    }
    present
}

/// Checksum of the present pages of a chunk of guest memory.
pub(crate) fn checksum<M: GuestMemoryMap>(memory: &M, chunk: PageRun, present: u16) -> u32 {
    let mut buffer = [0; CHECK_BYTES];
    let mut crc = 0;
    for run in present_runs(chunk, present) {
        let mut rest = ram::slice(memory, run);
        while rest.len() > 0 {
            let piece = &mut buffer[..rest.len().min(CHECK_BYTES)];
            rest.read(piece);
            crc = crc32c::crc32c_append(crc, piece);
            rest = rest.skip(piece.len());
        }
    }
    crc
}

/// Checksum of the present pages of a chunk whose bytes are in a buffer, gaps included.
pub(crate) fn checksum_of(bytes: &[u8], chunk: PageRun, present: u16) -> u32 {
    present_runs(chunk, present).fold(0, |crc, run| {
        let start = to_usize((run.first - chunk.first) * PAGE_BYTES);
        crc32c::crc32c_append(crc, &bytes[start..start + to_usize(run.len_bytes())])
    })
}

/// The first chunk within a run of whole chunks whose guest memory differs from the index.
pub(crate) fn first_damaged<M: GuestMemoryMap>(
    memory: &M,
    geometry: &Geometry,
    index: &Index,
    run: PageRun,
) -> Option<PageRun> {
    geometry.chunks_of(run).find_map(|(number, chunk)| {
        let entry = index.entry(number);
        (checksum(memory, chunk, entry.present) != entry.crc).then_some(chunk)
    })
}
