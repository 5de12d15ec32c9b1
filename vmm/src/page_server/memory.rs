// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The memory of a migrated guest, mapped by the page server from its files.
//!
//! May contain `unsafe`: it promises that its mappings live. It only reads what it maps.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::sync::Arc;

use thiserror::Error;
use vm_memory::mmap::MmapRegionError;
use vm_memory::{FileOffset, MmapRegion};
use vm_migration::layout::{Layout, PageRun};
use vm_migration::page_server::ServedMemory;
use vm_migration::protocol::ProtocolError;
use vm_migration::ram::GuestMemoryMap;

/// Why guest memory cannot be mapped.
#[derive(Debug, Error)]
pub enum ServedRamError {
    /// The description is invalid.
    #[error("the description of guest memory is invalid")]
    Description(#[source] ProtocolError),
    /// The file of a zone is missing.
    #[error("memory zone '{zone}' was received without its file")]
    NoFile {
        /// Id of the zone.
        zone: String,
    },
    /// The file of a zone is too short.
    #[error("the file of memory zone '{zone}' is shorter than the zone")]
    Short {
        /// Id of the zone.
        zone: String,
    },
    /// The file cannot be mapped.
    #[error("memory zone '{zone}' cannot be mapped")]
    Map {
        /// Id of the zone.
        zone: String,
        /// The cause.
        #[source]
        source: MmapRegionError,
    },
}

/// Guest memory, mapped for reading.
pub struct ServedRam {
    layout: Layout,
    /// The mappings, in the order of the layout.
    regions: Vec<MmapRegion>,
}

impl ServedRam {
    /// Maps the described regions of the files passed with the description.
    ///
    /// # Errors
    /// A file is missing, too short, or cannot be mapped.
    pub fn map(description: &ServedMemory, files: Vec<File>) -> Result<Self, ServedRamError> {
        let layout = description.layout().map_err(ServedRamError::Description)?;
        let files: Vec<Arc<File>> = files.into_iter().map(Arc::new).collect();
        let mut regions = Vec::new();
        for served in description.regions() {
            let zone = || served.region.name.clone();
            let file = usize::try_from(served.file).ok().and_then(|number| files.get(number));
            let file = file.ok_or_else(|| ServedRamError::NoFile { zone: zone() })?;
            // An access beyond its end would end the process with SIGBUS.
            let end = served.file_offset.saturating_add(served.region.len_bytes);
            if file.metadata().map_or(0, |file| file.len()) < end {
                return Err(ServedRamError::Short { zone: zone() });
            }
            let place = FileOffset::from_arc(Arc::clone(file), served.file_offset);
            // A length beyond the address space exceeds every file.
            let len = usize::try_from(served.region.len_bytes).unwrap_or(usize::MAX);
            let region = MmapRegion::from_file(place, len)
                .map_err(|source| ServedRamError::Map { zone: zone(), source })?;
            regions.push(region);
        }
        Ok(Self { layout, regions })
    }

    /// Total length in bytes.
    pub fn len_bytes(&self) -> u64 {
        self.layout.regions().iter().map(|region| region.len_bytes).sum()
    }
}

fn never_written<T>() -> io::Result<T> {
    Err(io::Error::new(io::ErrorKind::Unsupported, "a page server only reads guest memory"))
}

// SAFETY: each mapping is as long as its region (and its file is no shorter), readable and
// writable, and lives as long as the value; the layout never changes.
unsafe impl GuestMemoryMap for ServedRam {
    fn layout(&self) -> &Layout {
        &self.layout
    }

    fn main(&self, region: usize) -> *mut u8 {
        self.regions[region].as_ptr()
    }

    fn alias(&self, _: usize) -> Option<*mut u8> {
        None
    }

    fn file(&self, region: usize) -> Option<BorrowedFd<'_>> {
        self.regions[region].file_offset().map(|place| place.file().as_fd())
    }

    fn file_offset(&self, region: usize) -> u64 {
        self.regions[region].file_offset().map_or(0, FileOffset::start)
    }

    fn populated_runs(&self, _: usize, pages: Range<u64>) -> io::Result<Vec<Range<u64>>> {
        Ok(vec![pages])
    }

    fn mark_zero(&self, _: PageRun) {}

    fn mark_resident(&self, _: PageRun) {}

    fn mark_absent(&self, _: PageRun) {}

    fn discard(&self, _: PageRun) -> io::Result<()> {
        never_written()
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test that cannot unwrap has failed")]

    use std::os::unix::fs::FileExt as _;

    use serde_json::{Value, json};

    use super::*;

    fn description(regions: &Value) -> ServedMemory {
        let document = json!({"version": 1, "files": 1, "regions": regions});
        ServedMemory::parse(&serde_json::to_vec(&document).unwrap()).unwrap()
    }

    fn region(gpa: u64, len_bytes: u64, file_offset: u64) -> Value {
        let region = json!({
            "name": "mem0", "gpa": gpa, "len_bytes": len_bytes, "host_page_bytes": 4096,
            "backing": "shared",
        });
        json!({"region": region, "file": 0, "file_offset": file_offset})
    }

    #[test]
    fn regions_of_one_file_are_mapped_where_they_are() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(4 << 12).unwrap();
        file.write_all_at(b"second", 3 << 12).unwrap();
        let served =
            description(&json!([region(0, 3 << 12, 0), region(1 << 32, 1 << 12, 3 << 12)]));
        let ram = ServedRam::map(&served, vec![file]).unwrap();
        assert_eq!((ram.len_bytes(), ram.layout().regions().len()), (4 << 12, 2));
        // SAFETY: one byte of a mapping that `ram` holds; no code writes to it.
        assert_eq!(unsafe { ram.main(1).read_volatile() }, b's');
        let run = PageRun { region: 0, first: 0, count: 1 };
        assert!(ram.discard(run).is_err());
    }

    #[test]
    fn a_file_that_is_too_short_or_missing_is_named() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(1 << 12).unwrap();
        let served = description(&json!([region(0, 2 << 12, 0)]));
        let error = ServedRam::map(&served, vec![file]).err().unwrap();
        assert!(error.to_string().contains("'mem0' is shorter"), "{error}");
        let error = ServedRam::map(&served, Vec::new()).err().unwrap();
        assert!(matches!(error, ServedRamError::NoFile { .. }), "{error}");
    }
}
