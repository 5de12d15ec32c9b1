// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Operations on a disk by plain system calls.
//!
//! The only way where io_uring is not available, and for images in a format; otherwise the way for rare operations:
//! discard, write zeroes, and direct I/O with buffers that are not aligned as the host requires.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::ptr::NonNull;

use memory::GuestMemory;

use super::image::Disk;
use super::request::{Range, SERIAL_BYTES, Status};
use crate::syscalls::check;
use crate::virtio::buffers::{HostRanges, Segments};

/// Maximum bytes in a bounce buffer at a time.
const BOUNCE_BYTES_MAX: usize = 1 << 20;
/// Strictest alignment that any disk requires.
const BOUNCE_ALIGN_BYTES: usize = 4096;

/// Whether a transfer is aligned for direct I/O without a bounce buffer; never for an image in a format.
pub(super) fn is_direct_ready<M>(disk: &Disk, offset: u64, ranges: &HostRanges<M>) -> bool
where
    M: std::ops::Deref<Target = GuestMemory>,
{
    if disk.formatted().is_some() {
        return false;
    }
    let align = disk.offset_align_bytes();
    let len_bytes = u64::try_from(ranges.len_bytes()).unwrap_or(u64::MAX);
    offset.is_multiple_of(align)
        && len_bytes.is_multiple_of(align)
        && ranges.is_aligned(disk.address_align_bytes())
}

/// Reads `data.len_bytes()` bytes at `offset`.
pub(super) fn read(
    disk: &Disk,
    memory: &GuestMemory,
    offset: u64,
    data: &Segments,
) -> io::Result<()> {
    let mut ranges = data.host_ranges(memory).map_err(not_ram)?;
    if !is_direct_ready(disk, offset, &ranges) {
        return read_bounced(disk, memory, offset, data);
    }
    let mut done = 0;
    // In any case, mark what was written so far.
    let result = transfer(&mut ranges, |ranges| {
        let len_bytes = ranges.read_at(disk.file(), offset + done)?;
        done += u64::try_from(len_bytes).unwrap_or(0);
        Ok(len_bytes)
    });
    data.mark_written(memory, done);
    result
}

/// Writes `data.len_bytes()` bytes at `offset`; with `through`, stable on completion if one call can do
/// both. Returns whether they are stable.
pub(super) fn write(
    disk: &Disk,
    memory: &GuestMemory,
    offset: u64,
    data: &Segments,
    through: bool,
) -> io::Result<bool> {
    disk.may_change()?;
    let mut ranges = data.host_ranges(memory).map_err(not_ram)?;
    if !is_direct_ready(disk, offset, &ranges) {
        write_bounced(disk, memory, offset, data)?;
        return Ok(false);
    }
    let flags = if through { libc::RWF_DSYNC } else { 0 };
    let mut done = 0;
    let written = transfer(&mut ranges, |ranges| {
        let len_bytes = ranges.write_at(disk.file(), offset + done, flags)?;
        done += u64::try_from(len_bytes).unwrap_or(0);
        Ok(len_bytes)
    });
    if let (true, Err(error)) = (through, &written) {
        disk.note_failed_through(error);
    }
    written.map(|()| through)
}

fn transfer<M>(
    ranges: &mut HostRanges<M>,
    mut step: impl FnMut(&HostRanges<M>) -> io::Result<usize>,
) -> io::Result<()>
where
    M: std::ops::Deref<Target = GuestMemory>,
{
    while ranges.len_bytes() > 0 {
        match step(ranges) {
            // The image has been truncated.
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(len_bytes) => ranges.advance(len_bytes),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// A piece of a transfer: the requested range, and the aligned range around it.
struct Piece {
    wanted: Segments,
    /// Bytes between the start of the aligned range and the requested one.
    skip: usize,
    wanted_bytes: usize,
    aligned_offset: u64,
    aligned_bytes: usize,
}

fn next_piece(disk: &Disk, offset: u64, rest: &mut Segments) -> Option<Piece> {
    let align = disk.offset_align_bytes().max(1);
    let bounce = u64::try_from(BOUNCE_BYTES_MAX).unwrap_or(0);
    let aligned_offset = offset / align * align;
    let skip = offset - aligned_offset;
    let wanted_bytes = rest.len_bytes().min(bounce - skip);
    let wanted = rest.split_front(wanted_bytes)?;
    let aligned_bytes = (skip + wanted_bytes).next_multiple_of(align);
    Some(Piece {
        wanted,
        skip: usize::try_from(skip).ok()?,
        wanted_bytes: usize::try_from(wanted_bytes).ok()?,
        aligned_offset,
        aligned_bytes: usize::try_from(aligned_bytes).ok()?,
    })
}

fn read_bounced(
    disk: &Disk,
    memory: &GuestMemory,
    mut offset: u64,
    data: &Segments,
) -> io::Result<()> {
    let mut rest = data.clone();
    let mut bounce = AlignedBuffer::for_transfer(disk, data.len_bytes());
    while rest.len_bytes() > 0 {
        let piece = next_piece(disk, offset, &mut rest).ok_or(io::ErrorKind::InvalidInput)?;
        let buffer = bounce.get_mut(piece.aligned_bytes)?;
        disk.read_exact_at(buffer, piece.aligned_offset)?;
        let content = buffer.get(piece.skip..piece.skip + piece.wanted_bytes).unwrap_or_default();
        piece.wanted.copy_in(memory, content).map_err(not_ram)?;
        offset += u64::try_from(piece.wanted_bytes).unwrap_or(0);
    }
    Ok(())
}

fn write_bounced(
    disk: &Disk,
    memory: &GuestMemory,
    mut offset: u64,
    data: &Segments,
) -> io::Result<()> {
    let mut rest = data.clone();
    let mut bounce = AlignedBuffer::for_transfer(disk, data.len_bytes());
    while rest.len_bytes() > 0 {
        let piece = next_piece(disk, offset, &mut rest).ok_or(io::ErrorKind::InvalidInput)?;
        let buffer = bounce.get_mut(piece.aligned_bytes)?;
        let partial = piece.wanted_bytes != piece.aligned_bytes;
        let _guard = partial.then(|| disk.partial_write.lock());
        if partial {
            disk.read_exact_at(buffer, piece.aligned_offset)?;
        }
        let content =
            buffer.get_mut(piece.skip..piece.skip + piece.wanted_bytes).unwrap_or_default();
        piece.wanted.copy_out(memory, content).map_err(not_ram)?;
        disk.write_all_at(buffer, piece.aligned_offset)?;
        offset += u64::try_from(piece.wanted_bytes).unwrap_or(0);
    }
    Ok(())
}

fn not_ram(error: vm_memory::GuestMemoryError) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, error)
}

/// Writes the serial string, padded with zeros; the buffer must be large enough.
pub(super) fn get_id(
    memory: &GuestMemory,
    data: &Segments,
    serial: &[u8; SERIAL_BYTES],
) -> Result<u64, Status> {
    if data.len_bytes() < u64::try_from(SERIAL_BYTES).unwrap_or(0) {
        return Err(Status::IoError);
    }
    let len_bytes = data.copy_in(memory, serial).map_err(|_| Status::IoError)?;
    Ok(u64::try_from(len_bytes).unwrap_or(0))
}

/// Deallocates ranges; `false` if the host does not support it.
pub(super) fn discard(disk: &Disk, ranges: &[Range]) -> io::Result<bool> {
    disk.may_change()?;
    if let Some(formatted) = disk.formatted() {
        ranges.iter().try_for_each(|range| formatted.discard(*range))?;
        return Ok(true);
    }
    for range in ranges {
        let done = if disk.is_device() && range.len_bytes > 0 {
            disk.discard_on_device(range.offset, range.len_bytes)
        } else {
            fallocate(disk.file(), libc::FALLOC_FL_PUNCH_HOLE, *range)
        };
        if !accepted(done)? {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Makes ranges read as zeros: by deallocation if both driver and `unmap` allow it, through the file
/// system, or else by writing.
pub(super) fn write_zeroes(disk: &Disk, ranges: &[Range], unmap: bool) -> io::Result<()> {
    disk.may_change()?;
    if let Some(formatted) = disk.formatted() {
        return ranges
            .iter()
            .try_for_each(|range| formatted.write_zeroes(*range, unmap && range.unmap));
    }
    for range in ranges {
        let punched = unmap
            && range.unmap
            && accepted(fallocate(disk.file(), libc::FALLOC_FL_PUNCH_HOLE, *range))?;
        let zeroed =
            punched || accepted(fallocate(disk.file(), libc::FALLOC_FL_ZERO_RANGE, *range))?;
        if !zeroed {
            write_zero_bytes(disk, *range)?;
        }
    }
    Ok(())
}

/// `false` if the host does not support the operation.
fn accepted(result: io::Result<()>) -> io::Result<bool> {
    match result {
        Ok(()) => Ok(true),
        Err(error) if is_unsupported(&error) => Ok(false),
        Err(error) => Err(error),
    }
}

fn is_unsupported(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EOPNOTSUPP | libc::ENOSYS | libc::EINVAL))
}

fn fallocate(file: &File, mode: libc::c_int, range: Range) -> io::Result<()> {
    if range.len_bytes == 0 {
        return Ok(());
    }
    let invalid = |_| io::Error::from(io::ErrorKind::InvalidInput);
    let offset = libc::off_t::try_from(range.offset).map_err(invalid)?;
    let len_bytes = libc::off_t::try_from(range.len_bytes).map_err(invalid)?;
    let mode = mode | libc::FALLOC_FL_KEEP_SIZE;
    // SAFETY: only numbers are passed; the descriptor is open.
    check(unsafe { libc::fallocate(file.as_raw_fd(), mode, offset, len_bytes) })?;
    Ok(())
}

/// Writes zeros to whole sectors; if the host's blocks are larger, partial blocks at the ends keep their
/// other data.
fn write_zero_bytes(disk: &Disk, range: Range) -> io::Result<()> {
    let align = disk.offset_align_bytes().max(1);
    let bounce_bytes = u64::try_from(BOUNCE_BYTES_MAX).unwrap_or(0);
    let mut bounce = AlignedBuffer::for_transfer(disk, range.len_bytes);
    let mut offset = range.offset;
    let end = range.offset + range.len_bytes;
    while offset < end {
        let aligned_offset = offset / align * align;
        let wanted_end = end.min(aligned_offset + bounce_bytes);
        let aligned_bytes = (wanted_end - aligned_offset).next_multiple_of(align);
        let buffer = bounce.get_mut(usize::try_from(aligned_bytes).unwrap_or(usize::MAX))?;
        let partial = offset != aligned_offset || wanted_end - aligned_offset != aligned_bytes;
        let _guard = partial.then(|| disk.partial_write.lock());
        if partial {
            disk.read_exact_at(buffer, aligned_offset)?;
        }
        let start = usize::try_from(offset - aligned_offset).unwrap_or(usize::MAX);
        let stop = usize::try_from(wanted_end - aligned_offset).unwrap_or(usize::MAX);
        buffer.get_mut(start..stop).unwrap_or_default().fill(0);
        disk.write_all_at(buffer, aligned_offset)?;
        offset = wanted_end;
    }
    Ok(())
}

/// Memory aligned for direct I/O on any disk.
pub(super) struct AlignedBuffer {
    start: NonNull<u8>,
    layout: Layout,
}

impl AlignedBuffer {
    /// A buffer for a transfer with partial blocks at both ends, or for a piece of it.
    fn for_transfer(disk: &Disk, len_bytes: u64) -> Self {
        let room = len_bytes.saturating_add(2 * disk.offset_align_bytes());
        Self::new(usize::try_from(room).unwrap_or(usize::MAX).min(BOUNCE_BYTES_MAX))
    }

    pub(super) fn new(len_bytes: usize) -> Self {
        let layout = Layout::from_size_align(len_bytes.max(1), BOUNCE_ALIGN_BYTES)
            .unwrap_or(Layout::new::<[u8; BOUNCE_ALIGN_BYTES]>());
        // SAFETY: the layout has a size other than zero.
        let start = unsafe { alloc_zeroed(layout) };
        let Some(start) = NonNull::new(start) else { handle_alloc_error(layout) };
        Self { start, layout }
    }

    /// The first `len_bytes` bytes.
    pub(super) fn get_mut(&mut self, len_bytes: usize) -> io::Result<&mut [u8]> {
        if len_bytes > self.layout.size() {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        // SAFETY: that many bytes were allocated, initialised with zeros and belong to `self`,
        // which is borrowed for as long as the slice lives.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), len_bytes) })
    }
}

impl Drop for AlignedBuffer {
    fn drop(&mut self) {
        // SAFETY: allocated by `new` with this layout, and not freed before.
        unsafe { dealloc(self.start.as_ptr(), self.layout) };
    }
}
