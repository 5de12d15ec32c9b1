// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A snapshot directory of cloud-hypervisor: recognised, read, and its memory copied.
//!
//! Owns the files, which are untrusted; what they say of the machine is converted by [`crate::adopt`]. There is no mark
//! of completeness: a memory file that is shorter than its ranges is an unfinished snapshot.

use std::error::Error;
use std::fs::{File, OpenOptions};
use std::io::{self, Read as _};
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use cloud_hypervisor_state::{
    ConfigMessage, DOCUMENT_BYTES_MAX, Document, DocumentError, MemoryRange,
};
use thiserror::Error;
use vm_memory::{Bytes as _, GuestAddress, GuestAddressSpace as _};
use vm_migration::Cancel;
use vm_migration::layout::{GpaRange, PAGE_BYTES, PageRun};
use vm_migration::ram::GuestMemoryMap as _;

use super::adopted_arrival::warn_of;
use super::memory::MigratingRam;
use crate::adopt::{AdoptError, Adopted, MemoryLayout, ReadGuest, adopt, check_ranges};
use crate::config::VmConfig;
use crate::machine::MachineState;

/// The file that only snapshots of this program have.
const MANIFEST_FILE: &str = "manifest.json";
const CONFIG_FILE: &str = "config.json";
const STATE_FILE: &str = "state.json";
const MEMORY_FILE: &str = "memory-ranges";
/// How a machine state of this program begins, but for white space.
const OWN_STATE_START: &[u8] = b"{\"version\":";
/// Bytes that are read at once.
const CHUNK_BYTES: usize = 1 << 20;
const PAGE: usize = 4096;

/// Why a snapshot of cloud-hypervisor cannot be restored.
#[derive(Debug, Error)]
pub enum AdoptedSnapshotError {
    /// A file cannot be used.
    #[error("cannot {what} {}", path.display())]
    Io {
        /// What was attempted.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// A file is no regular one, or too long.
    #[error("{} is no file of a snapshot: it has {len_bytes} bytes, or is none", .path.display())]
    Foreign {
        /// The file.
        path: PathBuf,
        /// Its length.
        len_bytes: u64,
    },
    /// A document cannot be read.
    #[error("{} cannot be read", .path.display())]
    Document {
        /// The file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: DocumentError,
    },
    /// The memory file is not as long as its ranges.
    #[error("{} has {found} bytes of {expected}: the snapshot was not finished", .path.display())]
    Length {
        /// The file.
        path: PathBuf,
        /// Its length.
        found: u64,
        /// The sum of the ranges.
        expected: u64,
    },
    /// The host has no memory for a part of it.
    #[error("guest memory at {gpa:#x} cannot be populated")]
    Populate {
        /// Where it was to be.
        gpa: u64,
        /// Why not.
        source: io::Error,
    },
    /// A range is not in the machine's memory.
    #[error("the snapshot has memory at {gpa:#x} that the machine does not have")]
    Range {
        /// Its address.
        gpa: u64,
    },
    /// The machine cannot be taken over.
    #[error("the VM of cloud-hypervisor cannot be taken over")]
    Adopt(#[from] AdoptError),
    /// The restore was cancelled.
    #[error("the restore was cancelled")]
    Cancelled,
}

/// Whether a directory has a snapshot of cloud-hypervisor, and not an unfinished one of this program.
pub fn is_in(directory: &Path) -> bool {
    let has = |name: &str| directory.join(name).exists();
    let is_there = !has(MANIFEST_FILE) && has(CONFIG_FILE) && has(STATE_FILE);
    is_there && !is_own_state(&directory.join(STATE_FILE))
}

/// Whether a machine state of this program is in the file, perhaps not all of it. The file need not be one of a snapshot.
fn is_own_state(path: &Path) -> bool {
    let Ok((file, _)) = open(path) else { return false };
    let mut start = [0; 64];
    let len = file.read_at(&mut start, 0).unwrap_or(0);
    let mut visible = start.iter().take(len).filter(|byte| !byte.is_ascii_whitespace());
    OWN_STATE_START.iter().all(|byte| visible.next() == Some(byte))
}

/// A snapshot that was converted.
pub struct AdoptedSnapshot {
    /// Configuration of the machine.
    pub config: VmConfig,
    /// Its state.
    pub state: MachineState,
    /// Its memory.
    pub memory: MemoryContents,
    /// Where the guest has its memory.
    pub layout: MemoryLayout,
    /// Network devices whose taps were given as descriptors, and have to be again.
    pub without_tap: Vec<String>,
}

impl AdoptedSnapshot {
    /// Opens the snapshot in a directory.
    ///
    /// # Errors
    /// Names the file, or the part that cannot be taken over.
    pub fn open(directory: &Path) -> Result<Self, AdoptedSnapshotError> {
        let document = |name: &str| {
            let path = directory.join(name);
            move |source| AdoptedSnapshotError::Document { path, source }
        };
        let config = read_whole(&directory.join(CONFIG_FILE))?;
        let config = ConfigMessage::read_vm_config(&config).map_err(document(CONFIG_FILE))?;
        let state = read_whole(&directory.join(STATE_FILE))?;
        let state = Document::read(&state).map_err(document(STATE_FILE))?;
        let ranges = &state.memory.memory_ranges.data;
        let memory = MemoryContents::open(&directory.join(MEMORY_FILE), ranges)?;
        let adopted = adopt(&config, &state.memory, &state, &memory)?;
        // What is missing is only in files that the configuration names: nothing may be made of them.
        check_ranges(&adopted.memory, &state, &adopted.config.memory)?;
        let Adopted { config, without_tap, memory: layout, state, losses, .. } = adopted;
        warn_of(&losses);
        Ok(Self { config, state, memory, layout, without_tap })
    }
}

fn open(path: &Path) -> Result<(File, u64), AdoptedSnapshotError> {
    let io = |what| move |source| AdoptedSnapshotError::Io { what, path: path.to_owned(), source };
    // Opening a pipe would wait for its other end.
    let opened = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path);
    let file = opened.map_err(io("open"))?;
    let metadata = file.metadata().map_err(io("look at"))?;
    if metadata.is_file() {
        return Ok((file, metadata.len()));
    }
    Err(AdoptedSnapshotError::Foreign { path: path.to_owned(), len_bytes: metadata.len() })
}

fn read_whole(path: &Path) -> Result<Vec<u8>, AdoptedSnapshotError> {
    let (file, len_bytes) = open(path)?;
    if usize::try_from(len_bytes).map_or(true, |len| len > DOCUMENT_BYTES_MAX) {
        return Err(AdoptedSnapshotError::Foreign { path: path.to_owned(), len_bytes });
    }
    let mut bytes = Vec::new();
    // The file may grow while it is read.
    file.take(len_bytes).read_to_end(&mut bytes).map_err(|source| AdoptedSnapshotError::Io {
        what: "read",
        path: path.to_owned(),
        source,
    })?;
    Ok(bytes)
}

/// The contents of memory: ranges of it, one after another in a file.
pub struct MemoryContents {
    path: PathBuf,
    file: Option<File>,
    /// Each with its place in the file, by address.
    ranges: Vec<(MemoryRange, u64)>,
}

impl MemoryContents {
    fn open(path: &Path, ranges: &[MemoryRange]) -> Result<Self, AdoptedSnapshotError> {
        let mut placed = Vec::new();
        let mut expected = 0_u64;
        for range in ranges {
            placed.push((*range, expected));
            expected = expected.saturating_add(range.length);
        }
        placed.sort_by_key(|(range, _)| range.gpa);
        let (file, found) = if ranges.is_empty() {
            (None, 0)
        } else {
            let (file, found) = open(path)?;
            (Some(file), found)
        };
        let path = path.to_owned();
        if found != expected {
            return Err(AdoptedSnapshotError::Length { path, found, expected });
        }
        Ok(Self { path, file, ranges: placed })
    }

    /// Copies all of it into the memory of a machine that has not run. Pages that are zero are not touched.
    ///
    /// # Errors
    /// The file cannot be read, or a range is not in the machine's memory; the memory cannot be used then.
    pub fn copy_in(
        &self,
        memory: &MigratingRam,
        cancel: &Cancel,
    ) -> Result<u64, AdoptedSnapshotError> {
        for (region, info) in memory.layout().regions().iter().enumerate() {
            memory.mark_zero(PageRun { region, first: 0, count: info.pages() });
        }
        let mut chunk = vec![0; CHUNK_BYTES];
        let mut data_bytes = 0_u64;
        for (range, place) in &self.ranges {
            let mut done = 0_u64;
            while done < range.length {
                if cancel.is_cancelled() {
                    return Err(AdoptedSnapshotError::Cancelled);
                }
                let left = usize::try_from(range.length.saturating_sub(done)).unwrap_or(usize::MAX);
                let Some(now) = chunk.get_mut(..left.min(CHUNK_BYTES)) else { break };
                self.read(now, place.saturating_add(done))?;
                let gpa = range.gpa.saturating_add(done);
                data_bytes = data_bytes.saturating_add(put(memory, gpa, now)?);
                done = done.saturating_add(u64::try_from(now.len()).unwrap_or(u64::MAX));
            }
        }
        Ok(data_bytes)
    }

    fn read(&self, to: &mut [u8], place: u64) -> Result<(), AdoptedSnapshotError> {
        let Some(file) = &self.file else { return Ok(()) };
        file.read_exact_at(to, place).map_err(|source| AdoptedSnapshotError::Io {
            what: "read",
            path: self.path.clone(),
            source,
        })
    }
}

/// Writes the pages that are not zero, and returns their bytes.
fn put(memory: &MigratingRam, gpa: u64, bytes: &[u8]) -> Result<u64, AdoptedSnapshotError> {
    let guest = memory.ram().guest_memory();
    let guest = guest.memory();
    let mut data_bytes = 0_u64;
    let is_zero = |page: &[u8]| page.iter().all(|byte| *byte == 0);
    let (mut rest, mut gpa) = (bytes, gpa);
    while !rest.is_empty() {
        let zeroes =
            rest.chunks(PAGE).take_while(|page| is_zero(page)).count().saturating_mul(PAGE);
        let data = rest.get(zeroes..).unwrap_or_default();
        gpa = gpa.saturating_add(u64::try_from(zeroes).unwrap_or(u64::MAX));
        let count = data.chunks(PAGE).take_while(|page| !is_zero(page)).count();
        if count == 0 {
            break;
        }
        let outside = || AdoptedSnapshotError::Range { gpa };
        let first = GpaRange { gpa, len_bytes: PAGE_BYTES };
        let first = memory.layout().locate(first).map_err(|_| outside())?;
        let info = memory.layout().regions().get(first.region).ok_or_else(outside)?;
        // The next region has its own turn.
        let count = u64::try_from(count).unwrap_or(u64::MAX);
        let run = PageRun { count: count.min(info.pages().saturating_sub(first.first)), ..first };
        let (now, next) = data
            .split_at_checked(usize::try_from(run.len_bytes()).unwrap_or(usize::MAX))
            .ok_or_else(outside)?;
        // Where the host has no page for it a store would end the process.
        let unit = info.host_page_bytes / PAGE_BYTES;
        let start = run.first / unit * unit;
        let end = run.end().next_multiple_of(unit).min(info.pages());
        memory
            .populate(PageRun { first: start, count: end.saturating_sub(start), ..run })
            .map_err(|source| AdoptedSnapshotError::Populate { gpa, source })?;
        guest.write_slice(now, GuestAddress(gpa)).map_err(|_| outside())?;
        memory.mark_resident(run);
        data_bytes = data_bytes.saturating_add(run.len_bytes());
        gpa = gpa.saturating_add(run.len_bytes());
        rest = next;
    }
    Ok(data_bytes)
}

impl ReadGuest for MemoryContents {
    fn read_u16(&self, gpa: u64) -> Result<u16, Box<dyn Error + Send + Sync>> {
        let holds = |range: &MemoryRange| {
            let offset = gpa.checked_sub(range.gpa)?;
            (offset.checked_add(2)? <= range.length).then_some(offset)
        };
        let after = self.ranges.partition_point(|(range, _)| range.gpa <= gpa);
        let place = after.checked_sub(1).and_then(|index| {
            let (range, place) = self.ranges.get(index)?;
            Some(place.saturating_add(holds(range)?))
        });
        let place = place.ok_or("the snapshot does not have this memory")?;
        let mut bytes = [0; 2];
        self.read(&mut bytes, place)?;
        Ok(u16::from_le_bytes(bytes))
    }
}

#[cfg(test)]
#[path = "adopted_snapshot_tests.rs"]
mod tests;
