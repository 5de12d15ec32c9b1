// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Writes the memory of a paused guest to a file for debuggers: a header of a format that the caller
//! knows, then all regions of RAM one after the other, with holes for pages of zeros.
//!
//! Owns when such a file is complete: the header, without which no debugger opens it, is written last.
//! Must never know the format, nor populate a page.

use std::fs;
use std::io;
use std::ops::Range;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::block::{not_zero, present_runs};
use super::error::SnapshotError;
use super::file::{AlignedBuffer, MemoryFile};
use super::geometry::Geometry;
use super::save::{for_each_block, populated_masks, write_present};
use crate::cancel::Cancel;
use crate::layout::{PAGE_BYTES, PageRun, to_usize};
use crate::ram::{self, GuestMemoryMap};

/// Bytes of each page that [`CoreFormat::text_at`] is shown.
pub const PAGE_START_BYTES: usize = 64;

/// Longest text that is taken from guest memory.
const TEXT_BYTES_MAX: usize = 4096;

/// The format of a core file.
pub trait CoreFormat: Sync {
    /// Offset of memory in the file, a multiple of 4096.
    fn memory_offset(&self) -> u64;

    /// Where a text lies that belongs in the header, relative to the page that begins with `start`. The
    /// bytes are the guest's.
    fn text_at(&self, start: &[u8; PAGE_START_BYTES]) -> Option<Range<usize>>;

    /// Everything before memory, at most [`memory_offset`](Self::memory_offset) bytes, with the text of the
    /// first page that has one.
    fn header(&self, text: Option<&[u8]>) -> Vec<u8>;
}

/// Result of writing a core file.
#[derive(Clone, Copy, Debug)]
pub struct CoreReport {
    /// Bytes of pages that are not zero.
    pub data_bytes: u64,
    /// Size of guest memory.
    pub memory_bytes: u64,
    /// Whether a text of the guest is in the header.
    pub has_text: bool,
    /// Duration, including the sync.
    pub took: Duration,
}

/// Why a core file cannot be written.
#[derive(Debug, thiserror::Error)]
pub enum CoreError {
    /// The path exists.
    #[error("{} exists already; a core dump never overwrites a file", .0.display())]
    Exists(PathBuf),
    /// A cancel was requested.
    #[error("the core dump was cancelled")]
    Cancelled,
    /// An operation on the file or on memory failed.
    #[error(transparent)]
    Write(SnapshotError),
}

impl From<SnapshotError> for CoreError {
    fn from(error: SnapshotError) -> Self {
        match error {
            SnapshotError::Cancelled => Self::Cancelled,
            SnapshotError::Io { path, source, .. }
                if source.kind() == io::ErrorKind::AlreadyExists =>
            {
                Self::Exists(path)
            }
            other => Self::Write(other),
        }
    }
}

/// A file that is removed unless it becomes complete. After a cancel that was not waited for, its path may be
/// another's by then.
struct Incomplete<'p> {
    path: &'p Path,
    identity: Option<(u64, u64)>,
}

impl<'p> Incomplete<'p> {
    fn new(path: &'p Path, file: &MemoryFile) -> Self {
        Self { path, identity: file.metadata().ok().map(|file| (file.dev(), file.ino())) }
    }
}

impl Drop for Incomplete<'_> {
    fn drop(&mut self) {
        let there = fs::symlink_metadata(self.path).ok().map(|file| (file.dev(), file.ino()));
        if there.is_none() || there != self.identity {
            return;
        }
        if let Err(error) = fs::remove_file(self.path) {
            log::warn!("an incomplete core dump is left in {}: {error}", self.path.display());
        }
    }
}

/// The directory of a file.
fn directory_of(path: &Path) -> &Path {
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    parent.unwrap_or(Path::new("."))
}

/// Writes a new core file. The guest must not run, and nothing else may write its memory, until this
/// returns or 1 s has passed since a cancel, as with [`super::save`].
///
/// # Errors
/// What failed and on which file; the file does not exist then.
pub fn write_core<M: GuestMemoryMap>(
    path: &Path,
    format: &dyn CoreFormat,
    memory: &M,
    threads: usize,
    cancel: &Cancel,
) -> Result<CoreReport, CoreError> {
    let began = Instant::now();
    let geometry = Geometry::new(memory.layout());
    let memory_offset = format.memory_offset();
    let len_bytes = memory_offset.saturating_add(geometry.len_bytes());
    // Its name is written to the disk last; that it cannot be is known first.
    let parent = directory_of(path);
    let directory = fs::File::open(parent);
    let directory = directory.map_err(SnapshotError::io("open the directory", parent))?;
    let file = MemoryFile::create_empty(path)?;
    let incomplete = Incomplete::new(path, &file);
    file.set_len(len_bytes)?;
    let writer = Writer {
        memory,
        geometry: &geometry,
        file: &file,
        format,
        first_text: Mutex::new(None),
        data_pages: AtomicU64::new(0),
    };
    for_each_block(&geometry, threads, cancel, |block| writer.block(block, cancel))?;
    let text = writer.text();
    let header = format.header(text.as_deref());
    let mut buffer = AlignedBuffer::new(memory_offset.div_ceil(PAGE_BYTES));
    let header = header.get(..to_usize(memory_offset)).unwrap_or(&header);
    buffer.bytes_mut()[..header.len()].copy_from_slice(header);
    // What the header says is there is on the disk before the header.
    file.sync()?;
    if cancel.is_cancelled() {
        return Err(CoreError::Cancelled);
    }
    file.write_buffer(&mut buffer, 0)?;
    file.sync()?;
    directory.sync_all().map_err(SnapshotError::io("write to the disk", parent))?;
    // The storage may have answered long after the cancel.
    if cancel.is_cancelled() {
        return Err(CoreError::Cancelled);
    }
    std::mem::forget(incomplete);
    Ok(CoreReport {
        data_bytes: writer.data_pages.into_inner() * PAGE_BYTES,
        memory_bytes: geometry.len_bytes(),
        has_text: text.is_some(),
        took: began.elapsed(),
    })
}

/// What the threads share that write memory.
struct Writer<'w, M> {
    memory: &'w M,
    geometry: &'w Geometry,
    file: &'w MemoryFile,
    format: &'w dyn CoreFormat,
    /// The first page with a text, and where in it.
    first_text: Mutex<Option<(PageRun, Range<usize>)>>,
    data_pages: AtomicU64,
}

impl<M: GuestMemoryMap> Writer<'_, M> {
    fn block(&self, block: PageRun, cancel: &Cancel) -> Result<(), SnapshotError> {
        let hold = self.memory.hold(block.region, block.first..block.end());
        let Some(mut masks) = populated_masks(self.memory, block)? else { return Ok(()) };
        let mut pages = 0;
        for ((_, chunk), mask) in self.geometry.chunks_of(block).zip(&mut masks) {
            if *mask != 0 {
                *mask = not_zero(self.memory, chunk, *mask);
                pages += u64::from(mask.count_ones());
                self.look_for_text(chunk, *mask);
            }
        }
        drop(hold);
        self.data_pages.fetch_add(pages, Ordering::Relaxed);
        let mut first_chunk = self.geometry.chunks_of(block).map(|(number, _)| number);
        let first_chunk = first_chunk.next().unwrap_or(0);
        let present = |number: usize| masks.get(number - first_chunk).copied().unwrap_or(0);
        let to = (self.file, self.format.memory_offset());
        write_present(self.memory, self.geometry, to, block, &present, cancel)
    }

    fn look_for_text(&self, chunk: PageRun, present: u16) {
        let pages = present_runs(chunk, present).flat_map(|run| run.cut(1));
        for page in pages {
            let mut start = [0; PAGE_START_BYTES];
            ram::slice(self.memory, page).first(PAGE_START_BYTES).read(&mut start);
            let Some(text) = self.format.text_at(&start) else { continue };
            let mut first = self.first_text.lock();
            let is_first = first
                .as_ref()
                .is_none_or(|(other, _)| (page.region, page.first) < (other.region, other.first));
            if is_first {
                *first = Some((page, text));
            }
        }
    }

    /// The text, if it is within RAM and not too long.
    fn text(&self) -> Option<Vec<u8>> {
        let first = self.first_text.lock();
        let (page, text) = first.clone()?;
        if text.len() > TEXT_BYTES_MAX {
            return None;
        }
        let count = (text.end as u64).div_ceil(PAGE_BYTES);
        let place = self.geometry.regions().get(page.region)?;
        if place.pages.checked_sub(page.first)? < count {
            return None;
        }
        let run = PageRun { count, ..page };
        let _held = self.memory.hold(run.region, run.first..run.end());
        let mut bytes = vec![0; text.len()];
        ram::slice(self.memory, run).skip(text.start).first(text.len()).read(&mut bytes);
        Some(bytes)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a failing unwrap fails the test")]

    use std::os::unix::fs::MetadataExt as _;
    use std::sync::Arc;

    use super::*;
    use crate::layout::Backing;
    use crate::testing::FakeMemory;

    /// A header of two pages that begins with the text; the text of a page follows the word `TEXT`.
    struct Format;

    /// The same, whose file is cancelled, and perhaps replaced, when its memory is written.
    struct Late {
        path: PathBuf,
        cancel: Cancel,
        replaces: bool,
    }

    impl CoreFormat for Late {
        fn memory_offset(&self) -> u64 {
            Format.memory_offset()
        }

        fn text_at(&self, start: &[u8; PAGE_START_BYTES]) -> Option<Range<usize>> {
            Format.text_at(start)
        }

        fn header(&self, text: Option<&[u8]>) -> Vec<u8> {
            self.cancel.cancel();
            if self.replaces {
                fs::remove_file(&self.path).unwrap();
                fs::write(&self.path, "another's").unwrap();
            }
            Format.header(text)
        }
    }

    const REGIONS: [(u64, u64); 2] = [(0, 77), (1 << 32, 2500)];
    const TEXT: u64 = u64::from_le_bytes(*b"TEXT\0\0\0\0");

    impl CoreFormat for Format {
        fn memory_offset(&self) -> u64 {
            2 * PAGE_BYTES
        }

        fn text_at(&self, start: &[u8; PAGE_START_BYTES]) -> Option<Range<usize>> {
            start.starts_with(b"TEXT").then_some(4088..4104)
        }

        fn header(&self, text: Option<&[u8]>) -> Vec<u8> {
            let mut header = b"HEAD".to_vec();
            header.extend_from_slice(text.unwrap_or(b"none"));
            header
        }
    }

    fn memory(pages: &[(usize, u64)]) -> Arc<FakeMemory> {
        let memory = FakeMemory::new(&REGIONS, Backing::Shared, PAGE_BYTES).unwrap();
        for (region, page) in pages {
            memory.word(*region, *page, 511).store(page + 7, Ordering::Relaxed);
        }
        memory
    }

    fn write(path: &Path, memory: &FakeMemory, cancel: &Cancel) -> Result<CoreReport, CoreError> {
        write_core(path, &Format, memory, 3, cancel)
    }

    #[test]
    fn each_page_is_where_the_format_says_and_zeros_are_holes() {
        let pages = [(0, 0), (0, 76), (1, 0), (1, 1023), (1, 1024), (1, 2499)];
        let memory = memory(&pages);
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("core");
        let report = write(&path, &memory, &Cancel::new().unwrap()).unwrap();
        assert_eq!(report.data_bytes, 6 * PAGE_BYTES);
        let bytes = fs::read(&path).unwrap();
        assert_eq!(bytes.len() as u64, (2 + 77 + 2500) * PAGE_BYTES);
        assert!(bytes.starts_with(b"HEADnone\0"));
        for (index, page) in bytes[8192..].chunks(4096).enumerate() {
            let (region, number) = if index < 77 { (0, index) } else { (1, index - 77) };
            let expected =
                if pages.contains(&(region, number as u64)) { number as u64 + 7 } else { 0 };
            let (zeros, last) = page.split_at(4088);
            assert!(zeros.iter().all(|byte| *byte == 0));
            assert_eq!(u64::from_le_bytes(last.try_into().unwrap()), expected, "page {index}");
        }
        assert!(path.metadata().unwrap().blocks() * 512 < 200 * PAGE_BYTES, "no holes");
    }

    #[test]
    fn the_text_of_the_lowest_page_is_in_the_header_also_across_two_pages() {
        let memory = memory(&[(1, 2000), (1, 2001), (1, 2002)]);
        for page in [2000, 2002] {
            memory.word(1, page, 0).store(TEXT, Ordering::Relaxed);
        }
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("core");
        memory.word(1, 2001, 0).store(99, Ordering::Relaxed);
        assert!(write(&path, &memory, &Cancel::new().unwrap()).unwrap().has_text);
        let bytes = fs::read(&path).unwrap();
        assert_eq!(u64::from_le_bytes(bytes[4..12].try_into().unwrap()), 2007);
        assert_eq!(u64::from_le_bytes(bytes[12..20].try_into().unwrap()), 99);
    }

    #[test]
    fn a_text_beyond_the_end_of_memory_is_left_out() {
        let memory = memory(&[(1, 2499)]);
        memory.word(1, 2499, 0).store(TEXT, Ordering::Relaxed);
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("core");
        assert!(!write(&path, &memory, &Cancel::new().unwrap()).unwrap().has_text);
        assert!(fs::read(&path).unwrap().starts_with(b"HEADnone"));
    }

    #[test]
    fn nothing_is_overwritten_and_nothing_is_left() {
        let memory = memory(&[(0, 3)]);
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("core");
        let cancelled = Cancel::new().unwrap();
        cancelled.cancel();
        assert!(matches!(write(&path, &memory, &cancelled), Err(CoreError::Cancelled)));
        assert!(!path.exists());
        fs::write(&path, "mine").unwrap();
        let again = write(&path, &memory, &Cancel::new().unwrap());
        assert!(matches!(again, Err(CoreError::Exists(_))));
        assert_eq!(fs::read(&path).unwrap(), b"mine");
        // Another's file at the path of one that was cancelled late, when all but the end was written.
        fs::remove_file(&path).unwrap();
        let cancel = Cancel::new().unwrap();
        let late = Late { path: path.clone(), cancel: cancel.clone(), replaces: true };
        let ended = write_core(&path, &late, &*memory, 3, &cancel);
        assert!(matches!(ended, Err(CoreError::Cancelled)));
        assert_eq!(fs::read(&path).unwrap(), b"another's");
        fs::remove_file(&path).unwrap();
        let cancel = Cancel::new().unwrap();
        let late = Late { path: path.clone(), cancel: cancel.clone(), replaces: false };
        let ended = write_core(&path, &late, &*memory, 3, &cancel);
        assert!(matches!(ended, Err(CoreError::Cancelled)));
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
        let nowhere = write(&folder.path().join("none/core"), &memory, &Cancel::new().unwrap());
        assert!(matches!(nowhere, Err(CoreError::Write(SnapshotError::Io { .. }))));
    }
}
