// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Guest-physical addresses, and the backings that hold them.
//!
//! Owns the translation. RAM is taken to fill the address space in the order of the backings:
//! from 0 to the MMIO hole, and from 4 GiB on. Where the hole begins differs between VMMs (2 or
//! 3 GiB, the backing's size), so it follows from where the guest says that RAM ends.

use thiserror::Error;

use crate::abi::PAGE_BYTES;
use crate::process::{Backing, ProcessError};

/// Where RAM continues behind the MMIO hole.
const HIGH_RAM_GPA: u64 = 4 << 30;
/// A VM with no more RAM than this has none above the hole in any VMM.
const ALWAYS_LOW_BYTES: u64 = 2 << 30;
/// Where the hole usually begins.
const USUAL_LOW_BYTES: u64 = 3 << 30;

/// Why guest memory was not read.
#[derive(Debug, Error)]
pub enum MemoryError {
    /// No backing has this address.
    #[error("there is no RAM at gpa {gpa:#x}")]
    NoRam {
        /// Which address.
        gpa: u64,
    },
    /// The page is a hole in its backing: never touched, or still to arrive.
    #[error("the page at gpa {gpa:#x} is not resident yet")]
    NotResident {
        /// Which address.
        gpa: u64,
    },
    /// The process' memory could not be accessed.
    #[error("guest memory at gpa {gpa:#x} is out of reach")]
    Process {
        /// Which address.
        gpa: u64,
        /// Why.
        #[source]
        source: ProcessError,
    },
}

/// A run of guest-physical memory in one backing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// First address.
    pub gpa: u64,
    /// Size.
    pub len_bytes: u64,
    /// Which backing.
    pub backing: usize,
    /// Where in it.
    pub offset: u64,
}

/// Guest RAM.
#[derive(Debug)]
pub struct GuestMemory {
    backings: Vec<Backing>,
    segments: Vec<Segment>,
}

impl GuestMemory {
    /// RAM in `backings`, `low_bytes` of it below the hole (a guess is made when none).
    pub fn new(backings: Vec<Backing>, low_bytes: Option<u64>) -> Self {
        let sizes: Vec<u64> = backings.iter().map(Backing::len_bytes).collect();
        let segments = segments(&sizes, low_bytes.unwrap_or_else(|| usual_low(&sizes)));
        Self { backings, segments }
    }

    /// Moves the hole to where it must be for RAM to end at `ram_end`.
    pub fn place_hole(&mut self, ram_end: u64) {
        let sizes: Vec<u64> = self.backings.iter().map(Backing::len_bytes).collect();
        let total: u64 = sizes.iter().sum();
        let high = ram_end.saturating_sub(HIGH_RAM_GPA);
        self.segments = segments(&sizes, total.saturating_sub(high));
    }

    /// Places RAM as told.
    #[must_use]
    pub fn with_segments(mut self, segments: Vec<Segment>) -> Self {
        self.segments = segments;
        self
    }

    /// Where everything is.
    pub fn segments(&self) -> &[Segment] {
        &self.segments
    }

    /// RAM in all, bytes.
    pub fn len_bytes(&self) -> u64 {
        self.segments.iter().map(|segment| segment.len_bytes).sum()
    }

    fn locate(&self, gpa: u64) -> Result<(&Backing, u64, u64), MemoryError> {
        for segment in &self.segments {
            let within = gpa.wrapping_sub(segment.gpa);
            if within < segment.len_bytes
                && let Some(backing) = self.backings.get(segment.backing)
            {
                return Ok((backing, segment.offset + within, segment.len_bytes - within));
            }
        }
        Err(MemoryError::NoRam { gpa })
    }

    /// Whether the bytes from `gpa` on are resident, and for how many, at most `limit_bytes`,
    /// that is true.
    pub fn resident(&self, gpa: u64, limit_bytes: u64) -> Result<(bool, u64), MemoryError> {
        let (backing, offset, left) = self.locate(gpa)?;
        backing
            .resident(offset, limit_bytes.min(left))
            .map_err(|source| MemoryError::Process { gpa, source })
    }

    /// Reads bytes, all of which must be resident.
    pub fn read(&self, gpa: u64, buffer: &mut [u8]) -> Result<(), MemoryError> {
        self.pieces(gpa, buffer, |gpa, resident, piece| {
            if !resident {
                return Err(MemoryError::NotResident { gpa });
            }
            self.read_resident(gpa, piece)
        })
    }

    /// Reads bytes, with zeroes where nothing is resident; gives how many bytes were not.
    pub fn read_or_zero(&self, gpa: u64, buffer: &mut [u8]) -> Result<u64, MemoryError> {
        let mut missing = 0;
        self.pieces(gpa, buffer, |gpa, resident, piece| {
            if resident {
                return self.read_resident(gpa, piece);
            }
            missing += piece.len() as u64;
            piece.fill(0);
            Ok(())
        })?;
        Ok(missing)
    }

    fn pieces(
        &self,
        mut gpa: u64,
        buffer: &mut [u8],
        mut visit: impl FnMut(u64, bool, &mut [u8]) -> Result<(), MemoryError>,
    ) -> Result<(), MemoryError> {
        let mut rest = buffer;
        while !rest.is_empty() {
            let (resident, bytes) = self.resident(gpa, rest.len() as u64)?;
            let bytes = bytes.max(1);
            let count = usize::try_from(bytes).unwrap_or(usize::MAX).min(rest.len());
            let (piece, after) = rest.split_at_mut(count);
            visit(gpa, resident, piece)?;
            rest = after;
            gpa += bytes;
        }
        Ok(())
    }

    fn read_resident(&self, gpa: u64, buffer: &mut [u8]) -> Result<(), MemoryError> {
        let (backing, offset, _) = self.locate(gpa)?;
        backing.read(offset, buffer).map_err(|source| MemoryError::Process { gpa, source })
    }

    /// Writes bytes that lie in one page, which must be resident.
    pub fn write(&self, gpa: u64, bytes: &[u8]) -> Result<(), MemoryError> {
        let (backing, offset, _) = self.locate(gpa)?;
        if !self.resident(gpa, 1)?.0 {
            return Err(MemoryError::NotResident { gpa });
        }
        backing.write(offset, bytes).map_err(|source| MemoryError::Process { gpa, source })
    }

    /// Reads a 64-bit word.
    pub fn word(&self, gpa: u64) -> Result<u64, MemoryError> {
        let mut bytes = [0; 8];
        self.read(gpa, &mut bytes)?;
        Ok(u64::from_le_bytes(bytes))
    }

    /// Writes a 64-bit word.
    pub fn set_word(&self, gpa: u64, value: u64) -> Result<(), MemoryError> {
        self.write(gpa, &value.to_le_bytes())
    }

    /// Reads a run of words.
    pub fn words(&self, gpa: u64, count: u64) -> Result<Words, MemoryError> {
        let bytes = usize::try_from(count * 8).unwrap_or(0);
        let mut buffer = vec![0; bytes];
        self.read(gpa, &mut buffer)?;
        Ok(Words { buffer })
    }

    /// Reads a run of words, zero where nothing is resident.
    pub fn words_or_zero(&self, gpa: u64, count: u64) -> Result<Words, MemoryError> {
        let bytes = usize::try_from(count * 8).unwrap_or(0);
        let mut buffer = vec![0; bytes];
        self.read_or_zero(gpa, &mut buffer)?;
        Ok(Words { buffer })
    }

    /// Reads a page of words.
    pub fn page(&self, gpa: u64) -> Result<Words, MemoryError> {
        self.words(gpa, PAGE_BYTES / 8)
    }
}

/// A copy of some words of the guest.
#[derive(Clone, Debug)]
pub struct Words {
    buffer: Vec<u8>,
}

impl Words {
    /// The word at a byte offset, 0 behind the end.
    pub fn at(&self, offset: u64) -> u64 {
        u64::from_le_bytes(self.array(offset))
    }

    /// The 32-bit word at a byte offset.
    pub fn at32(&self, offset: u64) -> u32 {
        u32::from_le_bytes(self.array(offset))
    }

    /// The bytes from an offset on.
    pub fn bytes(&self, offset: u64, count: u64) -> &[u8] {
        let start = usize::try_from(offset).unwrap_or(usize::MAX);
        let count = usize::try_from(count).unwrap_or(usize::MAX);
        let rest = self.buffer.get(start..).unwrap_or(&[]);
        rest.get(..count).unwrap_or(rest)
    }

    fn array<const N: usize>(&self, offset: u64) -> [u8; N] {
        self.bytes(offset, N as u64).try_into().unwrap_or([0; N])
    }
}

fn usual_low(sizes: &[u64]) -> u64 {
    let total: u64 = sizes.iter().sum();
    if total <= ALWAYS_LOW_BYTES { total } else { total.min(USUAL_LOW_BYTES) }
}

/// Lays backings of these sizes out one after the other, the first `low_bytes` from 0 on.
fn segments(sizes: &[u64], low_bytes: u64) -> Vec<Segment> {
    let mut list = Vec::new();
    let mut position = 0;
    for (backing, &size) in sizes.iter().enumerate() {
        let low = low_bytes.saturating_sub(position).min(size);
        if low > 0 {
            list.push(Segment { gpa: position, len_bytes: low, backing, offset: 0 });
        }
        if size > low {
            let gpa = HIGH_RAM_GPA + (position + low).saturating_sub(low_bytes);
            list.push(Segment { gpa, len_bytes: size - low, backing, offset: low });
        }
        position += size;
    }
    list
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    #[test]
    fn one_backing_is_split_at_the_hole() {
        let list = segments(&[6 * GIB], 3 * GIB);
        let low = Segment { gpa: 0, len_bytes: 3 * GIB, backing: 0, offset: 0 };
        let high = Segment { gpa: 4 * GIB, len_bytes: 3 * GIB, backing: 0, offset: 3 * GIB };
        assert_eq!(list, [low, high]);
    }

    #[test]
    fn several_backings_follow_each_other() {
        let list = segments(&[2 * GIB, 2 * GIB, GIB], 3 * GIB);
        let gpas: Vec<_> =
            list.iter().map(|s| (s.gpa / GIB, s.len_bytes / GIB, s.backing)).collect();
        assert_eq!(gpas, [(0, 2, 0), (2, 1, 1), (4, 1, 1), (5, 1, 2)]);
    }

    #[test]
    fn the_hole_follows_from_the_end_of_ram() {
        let file = tempfile::tempfile().expect("temporary file");
        file.set_len(4 * GIB).expect("sparse file");
        let backing = Backing::File { name: String::from("ram"), file, len_bytes: 4 * GIB };
        let mut memory = GuestMemory::new(vec![backing], None);
        memory.place_hole(6 * GIB);
        let sizes: Vec<_> = memory.segments().iter().map(|s| s.len_bytes / GIB).collect();
        assert_eq!(sizes, [2, 2]);
    }

    #[test]
    fn holes_are_told_from_pages_and_stay_holes() {
        use std::os::unix::fs::{FileExt, MetadataExt};
        let flags = rustix::fs::MemfdFlags::CLOEXEC;
        let file = std::fs::File::from(rustix::fs::memfd_create("ram-test", flags).expect("memfd"));
        file.set_len(5 * PAGE_BYTES).expect("size");
        file.write_all_at(&[7; 8192], PAGE_BYTES).expect("two pages");
        let blocks = file.metadata().expect("metadata").blocks();
        let watched = file.try_clone().expect("second descriptor");
        let name = String::from("ram-test");
        let memory =
            GuestMemory::new(vec![Backing::File { name, file, len_bytes: 5 * PAGE_BYTES }], None);
        let runs: Vec<_> = [0, 100, 4096, 8000, 12288, 16384]
            .map(|gpa| memory.resident(gpa, 1 << 20).expect("known"))
            .into();
        let (hole, page) = (false, true);
        let expected =
            [(hole, 4096), (hole, 3996), (page, 8192), (page, 4288), (hole, 8192), (hole, 4096)];
        assert_eq!(runs, expected);

        let mut all = vec![1; 5 * 4096];
        assert_eq!(memory.read_or_zero(0, &mut all).expect("read"), 3 * PAGE_BYTES);
        assert!(all[..4096].iter().chain(&all[12288..]).all(|byte| *byte == 0));
        assert!(all[4096..12288].iter().all(|byte| *byte == 7));
        let refused = memory.read(8192, &mut [0; 8192]).expect_err("half of it is a hole");
        assert!(matches!(refused, MemoryError::NotResident { gpa: 12288 }), "{refused:?}");
        let words = memory.words_or_zero(8192, 1024).expect("words");
        let sevens = u64::from_le_bytes([7; 8]);
        assert_eq!(
            [words.at(0), words.at(4088), words.at(4096), words.at(8184)],
            [sevens, sevens, 0, 0]
        );
        assert!(matches!(memory.set_word(0, 1), Err(MemoryError::NotResident { gpa: 0 })));
        assert!(matches!(memory.word(1 << 40), Err(MemoryError::NoRam { .. })));
        assert_eq!(watched.metadata().expect("metadata").blocks(), blocks);
    }
}
