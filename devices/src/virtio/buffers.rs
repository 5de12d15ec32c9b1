// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Buffers in guest memory as a driver describes them.
//!
//! Owns the step from guest physical ranges to host addresses for system calls that read and write
//! guest memory by themselves. Those bypass the dirty tracking of `vm-memory`: the caller that lets the
//! kernel write must call [`Segments::mark_written`] afterwards. Ranges are untrusted;
//! one that is not guest RAM is an error.

use std::fs::File;
use std::io;
use std::ops::Deref;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use memory::GuestMemory;
use smallvec::SmallVec;
use vm_memory::bitmap::{Bitmap, MS};
use vm_memory::{
    Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryError, MmapRegion, VolatileSlice,
};

use crate::syscalls::check_len;

/// Maximum number of iovecs of a system call (`IOV_MAX`).
pub(crate) const RANGES_MAX: usize = 1024;

/// Ranges of a buffer that take no allocation: most have one or two.
const RANGES_INLINE: usize = 2;

/// A part of guest memory.
pub(crate) type GuestSlice<'a> = VolatileSlice<'a, MS<'a, GuestMemory>>;

/// A range of guest physical addresses, not validated to be RAM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Segment {
    pub(crate) gpa: GuestAddress,
    pub(crate) len_bytes: u32,
}

impl Segment {
    /// What is left behind the first `left_bytes`, from which those skipped are taken.
    fn skip(self, left_bytes: &mut u64) -> Self {
        let skipped = u32::try_from(*left_bytes).unwrap_or(u32::MAX).min(self.len_bytes);
        *left_bytes -= u64::from(skipped);
        // An address that overflows is not RAM, which the access reports.
        let gpa = GuestAddress(self.gpa.0.saturating_add(u64::from(skipped)));
        Self { gpa, len_bytes: self.len_bytes - skipped }
    }
}

/// The ranges of a buffer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Segments(SmallVec<[Segment; RANGES_INLINE]>);

impl Segments {
    pub(crate) fn push(&mut self, segment: Segment) {
        if segment.len_bytes > 0 {
            self.0.push(segment);
        }
    }

    /// Appends the ranges of another buffer.
    pub(crate) fn append(&mut self, mut other: Segments) {
        self.0.append(&mut other.0);
    }

    pub(crate) fn len_bytes(&self) -> u64 {
        self.0.iter().map(|segment| u64::from(segment.len_bytes)).sum()
    }

    /// Address and length of each range.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (u64, u32)> {
        self.0.iter().map(|segment| (segment.gpa.0, segment.len_bytes))
    }

    /// Splits `len_bytes` off the front; `None`, and no change, if there is less.
    pub(crate) fn split_front(&mut self, len_bytes: u64) -> Option<Segments> {
        if len_bytes > self.len_bytes() {
            return None;
        }
        let mut front = SmallVec::new();
        let mut back = SmallVec::new();
        let mut wanted = len_bytes;
        for segment in &self.0 {
            let taken = u32::try_from(wanted).unwrap_or(u32::MAX).min(segment.len_bytes);
            wanted -= u64::from(taken);
            if taken > 0 {
                front.push(Segment { gpa: segment.gpa, len_bytes: taken });
            }
            if taken < segment.len_bytes {
                // An address that overflows is not RAM, which the access reports.
                let gpa = GuestAddress(segment.gpa.0.saturating_add(u64::from(taken)));
                back.push(Segment { gpa, len_bytes: segment.len_bytes - taken });
            }
        }
        self.0 = back;
        Some(Segments(front))
    }

    /// Splits `len_bytes` off the back; `None`, and no change, if there is less.
    pub(crate) fn split_back(&mut self, len_bytes: u64) -> Option<Segments> {
        let front = self.split_front(self.len_bytes().checked_sub(len_bytes)?)?;
        Some(std::mem::replace(self, front))
    }

    /// Copies from guest memory to the front of `to`; returns the length.
    pub(crate) fn copy_out(
        &self,
        memory: &GuestMemory,
        to: &mut [u8],
    ) -> Result<usize, GuestMemoryError> {
        self.copy_out_at(memory, 0, to)
    }

    /// The same from `offset` in the buffer.
    pub(crate) fn copy_out_at(
        &self,
        memory: &GuestMemory,
        offset: u64,
        to: &mut [u8],
    ) -> Result<usize, GuestMemoryError> {
        let mut done = 0;
        let mut skipped = offset;
        for segment in &self.0 {
            let rest = to.get_mut(done..).unwrap_or_default();
            if rest.is_empty() {
                break;
            }
            let segment = segment.skip(&mut skipped);
            let len_bytes = rest.len().min(usize_of(segment.len_bytes));
            memory.read_slice(rest.get_mut(..len_bytes).unwrap_or_default(), segment.gpa)?;
            done += len_bytes;
        }
        Ok(done)
    }

    /// Copies the front of `from` to guest memory; returns the length.
    pub(crate) fn copy_in(
        &self,
        memory: &GuestMemory,
        from: &[u8],
    ) -> Result<usize, GuestMemoryError> {
        self.copy_in_at(memory, 0, from)
    }

    /// Copies `from` to guest memory at `offset` in the buffer; less than all of it if there is no space. Returns the
    /// length.
    pub(crate) fn copy_in_at(
        &self,
        memory: &GuestMemory,
        offset: u64,
        from: &[u8],
    ) -> Result<usize, GuestMemoryError> {
        let mut done = 0;
        let mut skipped = offset;
        for segment in &self.0 {
            let rest = from.get(done..).unwrap_or_default();
            if rest.is_empty() {
                break;
            }
            let segment = segment.skip(&mut skipped);
            let len_bytes = rest.len().min(usize_of(segment.len_bytes));
            write(memory, segment.gpa, rest.get(..len_bytes).unwrap_or_default())?;
            done += len_bytes;
        }
        Ok(done)
    }

    /// Marks the first `len_bytes` dirty, after the kernel has written them.
    pub(crate) fn mark_written(&self, memory: &GuestMemory, len_bytes: u64) {
        if !is_logged(memory) {
            return;
        }
        let mut left = len_bytes;
        for segment in &self.0 {
            let written = u32::try_from(left).unwrap_or(u32::MAX).min(segment.len_bytes);
            for slice in memory.get_slices(segment.gpa, usize_of(written)).flatten() {
                slice.bitmap().mark_dirty(0, slice.len());
            }
            left -= u64::from(written);
        }
    }

    /// Host addresses of the buffer.
    pub(crate) fn host_ranges<M>(&self, memory: M) -> Result<HostRanges<M>, GuestMemoryError>
    where
        M: Deref<Target = GuestMemory>,
    {
        let mut ranges = HostRanges::with_capacity(memory, self.0.len());
        ranges.push(self, 0, usize::MAX)?;
        Ok(ranges)
    }
}

/// A descriptor chain: readable buffers, then writable ones.
#[derive(Debug, Default)]
pub(crate) struct Chain {
    /// Head descriptor, which identifies the chain to the driver.
    pub(crate) head: u16,
    /// Buffers that the driver has written for the device.
    pub(crate) readable: Segments,
    /// Buffers that the device may write.
    pub(crate) writable: Segments,
}

/// Whether writes of devices are logged now, after the kernel has written: [`Segments::mark_written`] has something to do.
pub(crate) fn is_logged(memory: &GuestMemory) -> bool {
    // Mostly nothing is, which is found out sooner than where a buffer is. The write came first, as for each mark.
    fence(Ordering::SeqCst);
    let is_logged = |region: &MmapRegion<memory::DeviceDirtyLog>| region.bitmap().is_tracking();
    memory.iter().any(|region| is_logged(region))
}

/// Writes to guest memory: `write_slice`, for what is within one region as nearly everything is.
pub(crate) fn write(
    memory: &GuestMemory,
    gpa: GuestAddress,
    bytes: &[u8],
) -> Result<(), GuestMemoryError> {
    match memory.get_slice(gpa, bytes.len()) {
        Ok(place) => {
            place.copy_from(bytes);
            Ok(())
        }
        Err(_) => memory.write_slice(bytes, gpa),
    }
}

fn usize_of(len_bytes: u32) -> usize {
    usize::try_from(len_bytes).unwrap_or(usize::MAX)
}

/// Host ranges of guest buffers, which stay mapped while this lives.
pub(crate) struct HostRanges<M> {
    ranges: Vec<libc::iovec>,
    /// Keeps the memory mapped.
    memory: M,
}

// SAFETY: the addresses are those of a shared mapping that `memory` keeps alive wherever the value
// goes; no thread has a special relation to them, and they are only handed to the kernel.
unsafe impl<M: Send> Send for HostRanges<M> {}

impl HostRanges<Arc<GuestMemory>> {
    /// The memory of the ranges.
    pub(crate) fn memory_arc(&self) -> &Arc<GuestMemory> {
        &self.memory
    }
}

impl<'a> HostRanges<&'a GuestMemory> {
    /// Appends a part of its memory behind `offset`, up to `limit_bytes`; returns its length.
    pub(crate) fn push_slice(
        &mut self,
        slice: &GuestSlice<'a>,
        offset: usize,
        limit_bytes: usize,
    ) -> usize {
        let len_bytes = slice.len().saturating_sub(offset).min(limit_bytes);
        if len_bytes > 0 {
            let start = slice.ptr_guard_mut().as_ptr().wrapping_byte_add(offset);
            self.ranges.push(libc::iovec { iov_base: start.cast(), iov_len: len_bytes });
        }
        len_bytes
    }
}

impl<M: Deref<Target = GuestMemory>> HostRanges<M> {
    /// No ranges yet, with a place for `count` of them.
    pub(crate) fn with_capacity(memory: M, count: usize) -> Self {
        Self { ranges: Vec::with_capacity(count), memory }
    }

    /// Appends what is in a buffer of the guest behind `offset`, up to `limit_bytes`; returns its length. Appends nothing
    /// of a buffer that is not RAM.
    pub(crate) fn push(
        &mut self,
        buffer: &Segments,
        offset: u64,
        limit_bytes: usize,
    ) -> Result<usize, GuestMemoryError> {
        let count_before = self.ranges.len();
        let pushed = self.push_ranges(buffer, offset, limit_bytes);
        if pushed.is_err() {
            self.ranges.truncate(count_before);
        }
        pushed
    }

    fn push_ranges(
        &mut self,
        buffer: &Segments,
        offset: u64,
        limit_bytes: usize,
    ) -> Result<usize, GuestMemoryError> {
        let mut skipped = offset;
        let mut left_bytes = limit_bytes;
        for segment in &buffer.0 {
            let segment = segment.skip(&mut skipped);
            let len_bytes = left_bytes.min(usize_of(segment.len_bytes));
            if len_bytes == 0 {
                continue;
            }
            left_bytes -= len_bytes;
            let mut add = |place: VolatileSlice<'_, _>| {
                let iov_base = place.ptr_guard_mut().as_ptr().cast();
                self.ranges.push(libc::iovec { iov_base, iov_len: place.len() });
            };
            // Nearly always within one region.
            if let Ok(place) = self.memory.get_slice(segment.gpa, len_bytes) {
                add(place);
                continue;
            }
            for place in self.memory.get_slices(segment.gpa, len_bytes) {
                add(place?);
            }
        }
        Ok(limit_bytes - left_bytes)
    }

    /// Appends a buffer of the device to those of the guest.
    ///
    /// # Safety
    /// `len_bytes` bytes at `base` must be valid for reads and writes until this value is dropped or its
    /// last system call has ended.
    pub(crate) unsafe fn push_own(&mut self, base: *mut u8, len_bytes: usize) {
        self.ranges.push(libc::iovec { iov_base: base.cast(), iov_len: len_bytes });
    }

    pub(crate) fn len_bytes(&self) -> usize {
        self.ranges.iter().map(|range| range.iov_len).sum()
    }

    /// Number of ranges.
    pub(crate) fn count(&self) -> usize {
        self.ranges.len()
    }

    /// Whether each range starts and ends at a multiple of `align_bytes`.
    pub(crate) fn is_aligned(&self, align_bytes: usize) -> bool {
        self.ranges.iter().all(|range| {
            range.iov_base.addr().is_multiple_of(align_bytes)
                && range.iov_len.is_multiple_of(align_bytes)
        })
    }

    /// Drops the first `len_bytes`, which have been transferred.
    pub(crate) fn advance(&mut self, mut len_bytes: usize) {
        let mut gone = 0;
        for range in &mut self.ranges {
            let taken = len_bytes.min(range.iov_len);
            range.iov_base = range.iov_base.wrapping_byte_add(taken);
            range.iov_len -= taken;
            len_bytes -= taken;
            if range.iov_len > 0 {
                break;
            }
            gone += 1;
        }
        self.ranges.drain(..gone);
    }

    /// Pointer to and number of the first iovecs, as many as a system call takes. Valid until the value is
    /// changed or dropped; it may be moved.
    pub(crate) fn as_raw(&self) -> (*const libc::iovec, u32) {
        let count = self.ranges.len().min(RANGES_MAX);
        (self.ranges.as_ptr(), u32::try_from(count).unwrap_or(0))
    }

    fn as_raw_c(&self) -> (*const libc::iovec, libc::c_int) {
        let (ranges, count) = self.as_raw();
        (ranges, libc::c_int::try_from(count).unwrap_or(0))
    }

    /// `preadv` into the ranges.
    pub(crate) fn read_at(&self, file: &File, offset: u64) -> io::Result<usize> {
        let (ranges, count) = self.as_raw_c();
        let offset = offset_of(offset)?;
        // SAFETY: the ranges lie in the mapping that `self` keeps alive or in buffers that
        // `push_own` vouches for, so the kernel may write there; there are no Rust references to
        // guest memory. The descriptor is open.
        check_len(unsafe { libc::preadv(file.as_raw_fd(), ranges, count, offset) })
    }

    /// `pwritev2` from the ranges; `flags` are `RWF_*`.
    pub(crate) fn write_at(
        &self,
        file: &File,
        offset: u64,
        flags: libc::c_int,
    ) -> io::Result<usize> {
        let (ranges, count) = self.as_raw_c();
        let offset = offset_of(offset)?;
        // SAFETY: as for `read_at`, but the kernel only reads.
        check_len(unsafe { libc::pwritev2(file.as_raw_fd(), ranges, count, offset, flags) })
    }

    /// `readv` into the ranges.
    pub(crate) fn read(&self, file: &impl AsRawFd) -> io::Result<usize> {
        let (ranges, count) = self.as_raw_c();
        // SAFETY: as for `read_at`.
        check_len(unsafe { libc::readv(file.as_raw_fd(), ranges, count) })
    }

    /// `writev` from the ranges.
    pub(crate) fn write(&self, file: &File) -> io::Result<usize> {
        let (ranges, count) = self.as_raw_c();
        // SAFETY: as for `read_at`, but the kernel only reads.
        check_len(unsafe { libc::writev(file.as_raw_fd(), ranges, count) })
    }

    /// `sendmsg` from the ranges, without a signal if the other side of the socket has gone.
    pub(crate) fn send(&self, socket: &impl AsRawFd) -> io::Result<usize> {
        let (ranges, count) = self.as_raw();
        // SAFETY: all zero is a valid msghdr, without an address and control data.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        message.msg_iov = ranges.cast_mut();
        message.msg_iovlen = usize_of(count);
        // SAFETY: as for `read_at`, but the kernel only reads, also the iovecs.
        let sent =
            unsafe { libc::sendmsg(socket.as_raw_fd(), &raw const message, libc::MSG_NOSIGNAL) };
        check_len(sent)
    }
}

fn offset_of(offset: u64) -> io::Result<libc::off_t> {
    libc::off_t::try_from(offset).map_err(|_| io::Error::from_raw_os_error(libc::EINVAL))
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

    use proptest::prelude::*;

    use super::*;

    fn segments(parts: &[(u64, u32)]) -> Segments {
        let mut segments = Segments::default();
        for &(gpa, len_bytes) in parts {
            segments.push(Segment { gpa: GuestAddress(gpa), len_bytes });
        }
        segments
    }

    #[test]
    fn splits_take_from_the_end_that_they_name() {
        let mut whole = segments(&[(0x100, 10), (0x200, 10)]);
        let front = whole.split_front(12).unwrap();
        assert_eq!(front, segments(&[(0x100, 10), (0x200, 2)]));
        assert_eq!(whole, segments(&[(0x202, 8)]));

        let mut whole = segments(&[(0x100, 10), (0x200, 10)]);
        let back = whole.split_back(1).unwrap();
        assert_eq!(back, segments(&[(0x209, 1)]));
        assert_eq!(whole, segments(&[(0x100, 10), (0x200, 9)]));
        assert!(whole.split_back(20).is_none());
        assert_eq!(whole.len_bytes(), 19);
    }

    #[test]
    fn a_segment_across_two_regions_becomes_two_ranges() {
        let regions = [(GuestAddress(0), 0x1000), (GuestAddress(0x1000), 0x1000)];
        let memory = GuestMemory::from_ranges(&regions).unwrap();
        let ranges = segments(&[(0xff0, 0x20)]).host_ranges(&memory).unwrap();
        assert_eq!(ranges.as_raw().1, 2);
        assert_eq!(ranges.len_bytes(), 0x20);
        assert!(segments(&[(0x1ff0, 0x20)]).host_ranges(&memory).is_err());
        assert!(segments(&[(u64::MAX - 1, 0x20)]).host_ranges(&memory).is_err());
    }

    #[test]
    fn advance_continues_where_a_transfer_ended() {
        let memory = GuestMemory::from_ranges(&[(GuestAddress(0), 0x1000)]).unwrap();
        let mut ranges = segments(&[(0, 4), (0x10, 4), (0x20, 4)]).host_ranges(&memory).unwrap();
        let start = ranges.as_raw().0;
        ranges.advance(0);
        assert_eq!(ranges.len_bytes(), 12);
        ranges.advance(6);
        assert_eq!(ranges.len_bytes(), 6);
        assert_eq!(ranges.as_raw(), (start, 2));
        ranges.advance(6);
        assert_eq!(ranges.as_raw().1, 0);
    }

    #[test]
    fn copies_begin_and_end_where_they_are_told() {
        let memory = GuestMemory::from_ranges(&[(GuestAddress(0), 0x1000)]).unwrap();
        // What lies behind the copy is not looked at.
        let buffer = segments(&[(0x10, 2), (0x20, 3), (0x30, 4), (u64::MAX, 8)]);
        assert_eq!(buffer.copy_in_at(&memory, 3, &[1, 2, 3, 4]).unwrap(), 4);
        let mut out = [9; 9];
        assert_eq!(buffer.copy_out(&memory, &mut out).unwrap(), 9);
        assert_eq!(out, [0, 0, 0, 1, 2, 3, 4, 0, 0]);
        let buffer = segments(&[(0x10, 2)]);
        assert_eq!(buffer.copy_in_at(&memory, 1, &[7, 8]).unwrap(), 1);
        assert_eq!(buffer.copy_in_at(&memory, 2, &[7, 8]).unwrap(), 0);
        assert!(segments(&[(u64::MAX, 8)]).copy_in_at(&memory, 4, &[1]).is_err());
        let buffer = segments(&[(0x10, 2), (0x20, 3), (0x30, 4), (u64::MAX, 8)]);
        let mut out = [9; 3];
        assert_eq!(buffer.copy_out_at(&memory, 4, &mut out).unwrap(), 3);
        assert_eq!(out, [2, 3, 4]);
        assert!(buffer.copy_out_at(&memory, 9, &mut out).is_err());
    }

    #[test]
    fn a_buffer_that_is_not_ram_adds_no_range() {
        let memory = GuestMemory::from_ranges(&[(GuestAddress(0), 0x1000)]).unwrap();
        let mut ranges = HostRanges::with_capacity(&memory, 0);
        ranges.push(&segments(&[(0x10, 4)]), 0, 4).unwrap();
        for bad in [&[(0x20, 4), (0x1000, 4)][..], &[(0x20, 4), (0xffe, 4)]] {
            ranges.push(&segments(bad), 0, 8).unwrap_err();
            assert_eq!((ranges.count(), ranges.len_bytes()), (1, 4), "{bad:?}");
        }
        // What lies behind the limit is not looked at.
        assert_eq!(ranges.push(&segments(&[(0x20, 4), (0x1000, 4)]), 0, 4).unwrap(), 4);
    }

    #[test]
    fn what_a_socket_takes_is_sent_without_a_signal() {
        use std::io::Read as _;
        let memory = GuestMemory::from_ranges(&[(GuestAddress(0), 0x1000)]).unwrap();
        let buffer = segments(&[(0x10, 2), (0x20, 3)]);
        buffer.copy_in(&memory, b"hello").unwrap();
        let ranges = buffer.host_ranges(&memory).unwrap();
        let (ours, mut theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        assert_eq!(ranges.send(&ours).unwrap(), 5);
        let mut received = [0; 5];
        theirs.read_exact(&mut received).unwrap();
        assert_eq!(&received, b"hello");
        drop(theirs);
        assert_eq!(ranges.send(&ours).unwrap_err().raw_os_error(), Some(libc::EPIPE));
    }

    proptest! {
        #[test]
        fn a_part_of_a_buffer_has_the_ranges_of_what_is_split_off(
            parts in proptest::collection::vec((0_u64..0x1000, 1_u32..0x1000), 0..10),
            offset in 0_u64..20_000,
            limit in 0_usize..20_000,
        ) {
            let regions = [(GuestAddress(0), 0x800), (GuestAddress(0x800), 0x1800)];
            let memory = GuestMemory::from_ranges(&regions).unwrap();
            let mut expected = segments(&parts);
            let whole = expected.clone();
            let mut pushed = HostRanges::with_capacity(&memory, 0);
            let len_bytes = pushed.push(&whole, offset, limit).unwrap();
            prop_assert_eq!(pushed.len_bytes(), len_bytes);
            if expected.split_front(offset.min(whole.len_bytes())).is_some() {
                let limit = (limit as u64).min(expected.len_bytes());
                let expected = expected.split_front(limit).unwrap().host_ranges(&memory).unwrap();
                let places = |ranges: &HostRanges<&GuestMemory>| {
                    let ranges = ranges.ranges.iter();
                    ranges.map(|range| (range.iov_base.addr(), range.iov_len)).collect::<Vec<_>>()
                };
                prop_assert_eq!(places(&pushed), places(&expected));
            }
        }

        #[test]
        fn splitting_never_loses_a_byte(
            parts in proptest::collection::vec((any::<u64>(), 0_u32..5000), 0..10),
            at in 0_u64..50_000,
        ) {
            let whole = segments(&parts);
            let mut rest = whole.clone();
            if let Some(front) = rest.split_front(at) {
                prop_assert_eq!(front.len_bytes(), at);
                prop_assert_eq!(front.len_bytes() + rest.len_bytes(), whole.len_bytes());
            } else {
                prop_assert!(at > whole.len_bytes());
                prop_assert_eq!(rest, whole);
            }
        }
    }
}
