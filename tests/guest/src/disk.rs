// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A block driver that writes numbered blocks, so that a reader of the image knows which of them were
//! acknowledged, or only reads them.
//!
//! Owns the requests, one at a time. Must never count a block before the device said that it is done.

use crate::abi::{self, PAGE_BYTES, disk, disk_failure};
use crate::mem;
use crate::smp;
use crate::virtio::{self, Device, Part, Queue};

const DEVICE_TYPE: u32 = 2;
const SECTOR_BYTES: u64 = 512;
/// Written data may stay in the host's cache until a flush, which this driver never sends.
const F_FLUSH: u64 = 1 << 9;
const READ: u32 = 0;
const WRITE: u32 = 1;
const HEADER_BYTES: u32 = 16;
const BLOCK_BYTES: u32 = 4096;
const OK: u8 = 0;

/// Where the data of a request is; header and status are in the next page.
pub const DATA_GPA: u64 = abi::BALLOON_REQUEST_GPA;
const HEADER_GPA: u64 = DATA_GPA + PAGE_BYTES;
const STATUS_GPA: u64 = HEADER_GPA + 16;

/// Releases the devices of these numbers, a bit for each, of the segment in the high half; says whether that was
/// done. The vCPU behind the last one that works does it.
#[expect(clippy::cast_possible_truncation, reason = "a bus has 32 device numbers")]
pub fn eject(devices: u64, vcpus: u64, khz: u64) -> bool {
    let segment = (devices >> 32) as u32;
    let selected = segment == 0 || smp::write_port(vcpus, khz, disk::SELECT_PORT, segment);
    selected && smp::write_port(vcpus, khz, disk::EJECT_PORT, devices as u32)
}

/// The driver.
pub struct Disk {
    queue: Queue,
}

impl Disk {
    /// Starts the first block device that configuration space at `ecam` shows.
    pub fn start(ecam: u64) -> Result<Self, u64> {
        Self::start_behind(ecam, 0)
    }

    /// The same for one behind an IOMMU that has mapped everything at addresses that are greater by `offset`.
    pub fn start_behind(ecam: u64, offset: u64) -> Result<Self, u64> {
        let mut device = Device::find(ecam, DEVICE_TYPE)?;
        device.offset = offset;
        device.agree(F_FLUSH)?;
        let queue = device.queue(0, abi::BALLOON_RINGS_GPA)?;
        device.ready();
        Ok(Self { queue })
    }

    /// The number of the first block device for an IOMMU.
    pub fn number(ecam: u64) -> Result<u32, u64> {
        virtio::number(ecam, DEVICE_TYPE)
    }

    /// Sends a request, and waits for nothing.
    pub fn post_read(&mut self) {
        self.queue.post(&parts(READ));
    }

    /// Checks what was written to the place of block `number` last, and writes the block.
    pub fn write(&mut self, number: u64, mut meanwhile: impl FnMut()) -> Result<(), u64> {
        if let Some(before) = number.checked_sub(disk::BLOCKS) {
            self.request(READ, number, &mut meanwhile)?;
            if words().any(|gpa| mem::load(gpa) != before + 1) {
                return Err(disk_failure::CONTENT);
            }
        }
        words().for_each(|gpa| mem::store(gpa, number + 1));
        self.request(WRITE, number, meanwhile)
    }

    /// Reads block `number`, whatever it holds.
    pub fn read(&mut self, number: u64, meanwhile: impl FnMut()) -> Result<(), u64> {
        self.request(READ, number, meanwhile)
    }

    fn request(&mut self, kind: u32, number: u64, meanwhile: impl FnMut()) -> Result<(), u64> {
        mem::store32(HEADER_GPA, kind);
        mem::store32(HEADER_GPA + 4, 0);
        mem::store(HEADER_GPA + 8, number % disk::BLOCKS * (PAGE_BYTES / SECTOR_BYTES));
        mem::store8(STATUS_GPA, u8::MAX);
        self.queue.request(&parts(kind), meanwhile);
        if mem::load8(STATUS_GPA) == OK { Ok(()) } else { Err(disk_failure::REQUEST) }
    }
}

fn parts(kind: u32) -> [Part; 3] {
    [
        Part { gpa: HEADER_GPA, len_bytes: HEADER_BYTES, writable: false },
        Part { gpa: DATA_GPA, len_bytes: BLOCK_BYTES, writable: kind == READ },
        Part { gpa: STATUS_GPA, len_bytes: 1, writable: true },
    ]
}

/// Where the words of the data are.
fn words() -> impl Iterator<Item = u64> {
    (DATA_GPA..DATA_GPA + PAGE_BYTES).step_by(8)
}
