// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Bounded reading of an image whose every field is untrusted.
//!
//! Owns the rule that no byte is read past the end of the file and none is buffered that the
//! caller did not name a limit for. Must never interpret what it reads.

use std::io::{Read, Seek, SeekFrom};

use memory::GuestMemory;
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, ReadVolatile};

use super::error::{BootError, Image};

/// What an image may be read from: a file, or bytes in a test.
pub trait ImageSource: Read + Seek + ReadVolatile {}

impl<T: Read + Seek + ReadVolatile> ImageSource for T {}

/// An open image and its length.
pub struct ImageReader<'a, S> {
    source: &'a mut S,
    image: Image,
    len_bytes: u64,
}

impl<'a, S: ImageSource> ImageReader<'a, S> {
    /// Takes the length by seeking, so a pipe is an error here and not halfway through.
    pub fn new(source: &'a mut S, image: Image) -> Result<Self, BootError> {
        let len_bytes =
            source.seek(SeekFrom::End(0)).map_err(|source| BootError::Read { image, source })?;
        Ok(Self { source, image, len_bytes })
    }

    /// Length of the file.
    pub fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    /// Fills `buffer` from `offset`; `what` names the part in the error.
    pub fn read_at(
        &mut self,
        offset: u64,
        buffer: &mut [u8],
        what: &'static str,
    ) -> Result<(), BootError> {
        self.seek_checked(offset, buffer.len() as u64, what)?;
        let image = self.image;
        self.source.read_exact(buffer).map_err(|source| BootError::Read { image, source })
    }

    /// Copies `len_bytes` from `offset` of the file to guest memory at `gpa`, without a buffer
    /// between. The caller has checked that the destination is RAM.
    pub fn load(
        &mut self,
        mem: &GuestMemory,
        offset: u64,
        len_bytes: u64,
        gpa: u64,
        what: &'static str,
    ) -> Result<(), BootError> {
        self.seek_checked(offset, len_bytes, what)?;
        let count = usize::try_from(len_bytes).map_err(|_| self.truncated(len_bytes, what))?;
        mem.read_exact_volatile_from(GuestAddress(gpa), self.source, count)
            .map_err(|source| BootError::Write { what, gpa, source })
    }

    fn seek_checked(
        &mut self,
        offset: u64,
        len_bytes: u64,
        what: &'static str,
    ) -> Result<(), BootError> {
        let end = offset.saturating_add(len_bytes);
        if end > self.len_bytes {
            return Err(self.truncated(end, what));
        }
        let image = self.image;
        self.source
            .seek(SeekFrom::Start(offset))
            .map(|_| ())
            .map_err(|source| BootError::Read { image, source })
    }

    fn truncated(&self, need_bytes: u64, what: &'static str) -> BootError {
        BootError::Truncated { image: self.image, what, need_bytes, have_bytes: self.len_bytes }
    }
}

/// Whether every byte of the range is RAM.
pub fn is_ram(mem: &GuestMemory, gpa: u64, len_bytes: u64) -> bool {
    let Ok(count) = usize::try_from(len_bytes) else { return false };
    gpa.checked_add(len_bytes).is_some()
        && GuestMemoryBackend::check_range(mem, GuestAddress(gpa), count)
}

/// Little-endian fields at fixed offsets of a header. An offset past the end reads as zero, which
/// is what the Linux boot protocol says of header fields that an old image lacks.
#[derive(Clone, Copy)]
pub struct Fields<'a>(pub &'a [u8]);

impl Fields<'_> {
    fn bytes<const N: usize>(self, offset: usize) -> [u8; N] {
        offset
            .checked_add(N)
            .and_then(|end| self.0.get(offset..end))
            .and_then(|bytes| bytes.try_into().ok())
            .unwrap_or([0; N])
    }

    /// One byte.
    pub fn u8(self, offset: usize) -> u8 {
        u8::from_le_bytes(self.bytes(offset))
    }

    /// Two bytes.
    pub fn u16(self, offset: usize) -> u16 {
        u16::from_le_bytes(self.bytes(offset))
    }

    /// Four bytes.
    pub fn u32(self, offset: usize) -> u32 {
        u32::from_le_bytes(self.bytes(offset))
    }

    /// Eight bytes.
    pub fn u64(self, offset: usize) -> u64 {
        u64::from_le_bytes(self.bytes(offset))
    }
}
