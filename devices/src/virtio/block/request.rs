// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Requests of a block device's driver (virtio 1.3, 5.2.6).
//!
//! A chain becomes a request here: its parts are located, its numbers are checked against the disk.
//! A chain without room for the answer is a protocol violation by the driver; any other
//! error is reported in the answer.

use memory::GuestMemory;
use virtio_bindings::virtio_blk as abi;

use super::image::SECTOR_BYTES;
use super::limits::BlockLimits;
use crate::virtio::buffers::Segments;
use crate::virtio::queue::Chain;

const HEADER_BYTES: usize = 16;
/// Length of the device's serial string (virtio 1.3, 5.2.6).
pub(super) const SERIAL_BYTES: usize = 20;
/// Length of a segment of a discard or write-zeroes request.
const RANGE_BYTES: usize = 16;
/// Flag of a segment: storage may be deallocated. All other bits are reserved.
const RANGE_FLAG_UNMAP: u32 = 1;

/// Status of a request, its last byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Status {
    Ok,
    IoError,
    Unsupported,
}

impl Status {
    fn byte(self) -> u8 {
        match self {
            Self::Ok => 0,
            Self::IoError => 1,
            Self::Unsupported => 2,
        }
    }
}

/// A range of sectors, validated to be on the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Range {
    pub(super) offset: u64,
    pub(super) len_bytes: u64,
    /// Whether storage may be deallocated.
    pub(super) unmap: bool,
}

/// Operation of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Operation {
    /// Read from the disk at `offset` to guest memory.
    Read { offset: u64, data: Segments },
    /// Write from guest memory to the disk at `offset`.
    Write { offset: u64, data: Segments },
    /// Make earlier writes stable.
    Flush,
    /// Return the serial string.
    GetId { data: Segments },
    /// Discard these ranges.
    Discard(Vec<Range>),
    /// Write zeros to these ranges.
    WriteZeroes(Vec<Range>),
    /// None; complete the request with this status.
    Refused(Status),
}

impl Operation {
    /// Name for messages.
    pub(super) fn name(&self) -> &'static str {
        match self {
            Self::Read { .. } => "read",
            Self::Write { .. } => "write",
            Self::Flush => "flush",
            Self::Discard(_) => "discard",
            Self::WriteZeroes(_) => "write of zeroes",
            Self::GetId { .. } | Self::Refused(_) => "request",
        }
    }

    /// Whether it needs space, so that it can be retried when there is more. A flush needs space for the tables
    /// of an image in a format.
    pub(super) fn takes_room(&self) -> bool {
        let writes = matches!(self, Self::Write { .. } | Self::Discard(_) | Self::WriteZeroes(_));
        writes || matches!(self, Self::Flush)
    }
}

/// A request with the location of its status.
#[derive(Debug)]
pub(super) struct Request {
    pub(super) head: u16,
    status: Segments,
    /// Length of the data buffer before the status.
    room_bytes: u64,
    pub(super) operation: Operation,
}

/// Limits for validation.
#[derive(Clone, Copy)]
pub(super) struct Limits {
    pub(super) capacity_sectors: u64,
    pub(super) readonly: bool,
    pub(super) ranges: BlockLimits,
}

/// Limits of a request without data transfer.
#[derive(Clone, Copy)]
struct RangeLimits {
    /// Maximum number of segments.
    count_max: u32,
    /// Maximum number of sectors of a segment.
    sectors_max: u32,
}

impl Request {
    /// Parses a chain; the error says why it cannot have a status.
    pub(super) fn parse(
        mut chain: Chain,
        memory: &GuestMemory,
        limits: Limits,
    ) -> Result<Self, &'static str> {
        let status = chain.writable.split_back(1).ok_or("has no room for a status byte")?;
        let header = u64::try_from(HEADER_BYTES).unwrap_or(0);
        let header = chain.readable.split_front(header).ok_or("is shorter than a header")?;
        let room_bytes = chain.writable.len_bytes();
        let mut bytes = [0; HEADER_BYTES];
        let operation = match header.copy_out(memory, &mut bytes) {
            Ok(_) => {
                operation(bytes, &mut chain, memory, limits).unwrap_or_else(Operation::Refused)
            }
            Err(_) => Operation::Refused(Status::IoError),
        };
        Ok(Self { head: chain.head, status, room_bytes, operation })
    }

    /// Used length for `data_bytes` of data written from the front: including the status at the end, if
    /// nothing before it is missing (virtio 1.3, 2.7.8.2).
    pub(super) fn used_bytes(&self, data_bytes: u64) -> u64 {
        if data_bytes == self.room_bytes { data_bytes.saturating_add(1) } else { data_bytes }
    }

    /// Writes the status. A failure is ignored, as there is nowhere to report it to.
    pub(super) fn answer(&self, memory: &GuestMemory, status: Status) {
        let _ = self.status.copy_in(memory, &[status.byte()]);
    }
}

fn operation(
    header: [u8; HEADER_BYTES],
    chain: &mut Chain,
    memory: &GuestMemory,
    limits: Limits,
) -> Result<Operation, Status> {
    let [t0, t1, t2, t3, _, _, _, _, sector @ ..] = header;
    let sector = u64::from_le_bytes(sector);
    match u32::from_le_bytes([t0, t1, t2, t3]) {
        abi::VIRTIO_BLK_T_IN => {
            let data = std::mem::take(&mut chain.writable);
            Ok(Operation::Read { offset: place(sector, &data, limits)?, data })
        }
        abi::VIRTIO_BLK_T_OUT => {
            let data = std::mem::take(&mut chain.readable);
            refuse_if_readonly(limits)?;
            Ok(Operation::Write { offset: place(sector, &data, limits)?, data })
        }
        abi::VIRTIO_BLK_T_FLUSH => Ok(Operation::Flush),
        abi::VIRTIO_BLK_T_GET_ID => {
            Ok(Operation::GetId { data: std::mem::take(&mut chain.writable) })
        }
        abi::VIRTIO_BLK_T_DISCARD => {
            refuse_if_readonly(limits)?;
            let own = RangeLimits {
                count_max: limits.ranges.discard_ranges_max,
                sectors_max: limits.ranges.discard_sectors_max,
            };
            let ranges = ranges(&chain.readable, memory, limits, own)?;
            // The flag is only valid for write zeroes (virtio 1.3, 5.2.6.2).
            if ranges.iter().any(|range| range.unmap) {
                return Err(Status::Unsupported);
            }
            Ok(Operation::Discard(ranges))
        }
        abi::VIRTIO_BLK_T_WRITE_ZEROES => {
            refuse_if_readonly(limits)?;
            let own = RangeLimits {
                count_max: limits.ranges.zero_ranges_max,
                sectors_max: limits.ranges.zero_sectors_max,
            };
            let ranges = ranges(&chain.readable, memory, limits, own)?;
            Ok(Operation::WriteZeroes(ranges))
        }
        _ => Err(Status::Unsupported),
    }
}

fn refuse_if_readonly(limits: Limits) -> Result<(), Status> {
    if limits.readonly { Err(Status::IoError) } else { Ok(()) }
}

/// Byte offset of a transfer, if it consists of whole sectors on the disk.
fn place(sector: u64, data: &Segments, limits: Limits) -> Result<u64, Status> {
    let len_bytes = data.len_bytes();
    if !len_bytes.is_multiple_of(SECTOR_BYTES) {
        return Err(Status::IoError);
    }
    offset(sector, len_bytes / SECTOR_BYTES, limits)
}

fn offset(sector: u64, sectors: u64, limits: Limits) -> Result<u64, Status> {
    let end = sector.checked_add(sectors).ok_or(Status::IoError)?;
    if end > limits.capacity_sectors {
        return Err(Status::IoError);
    }
    sector.checked_mul(SECTOR_BYTES).ok_or(Status::IoError)
}

fn ranges(
    data: &Segments,
    memory: &GuestMemory,
    limits: Limits,
    range_limits: RangeLimits,
) -> Result<Vec<Range>, Status> {
    let len_bytes = usize::try_from(data.len_bytes()).map_err(|_| Status::IoError)?;
    let count_max = usize::try_from(range_limits.count_max).unwrap_or(0);
    let count = len_bytes / RANGE_BYTES;
    if count == 0 || !len_bytes.is_multiple_of(RANGE_BYTES) {
        return Err(Status::IoError);
    }
    if count > count_max {
        return Err(Status::IoError);
    }
    let mut bytes = vec![0; len_bytes];
    data.copy_out(memory, &mut bytes).map_err(|_| Status::IoError)?;
    let (elements, _) = bytes.as_chunks::<RANGE_BYTES>();
    elements.iter().map(|element| range(*element, limits, range_limits)).collect()
}

fn range(
    element: [u8; RANGE_BYTES],
    limits: Limits,
    range_limits: RangeLimits,
) -> Result<Range, Status> {
    let [s0, s1, s2, s3, s4, s5, s6, s7, n0, n1, n2, n3, flags @ ..] = element;
    let sector = u64::from_le_bytes([s0, s1, s2, s3, s4, s5, s6, s7]);
    let sectors = u32::from_le_bytes([n0, n1, n2, n3]);
    let flags = u32::from_le_bytes(flags);
    if flags & !RANGE_FLAG_UNMAP != 0 {
        return Err(Status::Unsupported);
    }
    if sectors > range_limits.sectors_max {
        return Err(Status::IoError);
    }
    let offset = offset(sector, sectors.into(), limits)?;
    let len_bytes = u64::from(sectors) * SECTOR_BYTES;
    Ok(Range { offset, len_bytes, unmap: flags & RANGE_FLAG_UNMAP != 0 })
}
