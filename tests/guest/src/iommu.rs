// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A driver of the virtual IOMMU, and of the first disk behind it.
//!
//! Owns the mappings: the disk's rings and requests have addresses that lead elsewhere, the page of its data is mapped
//! for each request and unmapped after it. Before that the disk is to be stopped by an access that is not mapped, of
//! which the IOMMU tells. Must never count a block before the device said that it is done.

use crate::abi::{self, PAGE_BYTES, disk_failure};
use crate::disk::{DATA_GPA, Disk};
use crate::mem;
use crate::virtio::{Device, Part, Queue};

const DEVICE_TYPE: u32 = 23;
/// All that are used here: ranges, MAP, PROBE, the bypass register.
const FEATURES: u64 = 1 << 1 | 1 << 2 | 1 << 4 | 1 << 6;
const BYPASS_AT: u64 = 36;

const ATTACH: u32 = 1;
const MAP: u32 = 3;
const UNMAP: u32 = 4;
const DOMAIN: u32 = 5;
const READ_AND_WRITE: u32 = 3;
const STATUS_OK: u32 = 0;
const STATUS_RANGE: u32 = 5;

/// Addresses behind the IOMMU, less those that they lead to.
const OFFSET: u64 = 0x1_2000_0000;

const REQUEST_RINGS_GPA: u64 = abi::BALLOON_RINGS_GPA + PAGE_BYTES;
const FAULT_RINGS_GPA: u64 = REQUEST_RINGS_GPA + PAGE_BYTES;
const REQUEST_GPA: u64 = FAULT_RINGS_GPA + PAGE_BYTES;
const ANSWER_GPA: u64 = REQUEST_GPA + 0x100;
const FAULT_GPA: u64 = REQUEST_GPA + 0x200;
const FAULT_BYTES: u32 = 24;

/// The driver.
pub struct Iommu {
    requests: Queue,
    disk: Disk,
}

/// Sends a request whose parameters behind the domain are in place; returns its status.
fn request(queue: &mut Queue, kind: u32, len_bytes: u32, meanwhile: impl FnMut()) -> u32 {
    mem::store32(REQUEST_GPA, kind);
    mem::store32(REQUEST_GPA + 4, DOMAIN);
    mem::store32(ANSWER_GPA, u32::MAX);
    let parts = [
        Part { gpa: REQUEST_GPA, len_bytes, writable: false },
        Part { gpa: ANSWER_GPA, len_bytes: 4, writable: true },
    ];
    queue.request(&parts, meanwhile);
    mem::load32(ANSWER_GPA)
}

fn map(queue: &mut Queue, gpa: u64, pages: u64, meanwhile: impl FnMut()) -> u32 {
    mem::store(REQUEST_GPA + 8, gpa + OFFSET);
    mem::store(REQUEST_GPA + 16, gpa + OFFSET + pages * PAGE_BYTES - 1);
    mem::store(REQUEST_GPA + 24, gpa);
    mem::store32(REQUEST_GPA + 32, READ_AND_WRITE);
    request(queue, MAP, 36, meanwhile)
}

fn unmap(queue: &mut Queue, gpa: u64, len_bytes: u64, meanwhile: impl FnMut()) -> u32 {
    mem::store(REQUEST_GPA + 8, gpa + OFFSET);
    mem::store(REQUEST_GPA + 16, gpa + OFFSET + len_bytes - 1);
    mem::store32(REQUEST_GPA + 24, 0);
    request(queue, UNMAP, 28, meanwhile)
}

fn is(status: u32, expected: u32) -> Result<(), u64> {
    if status == expected { Ok(()) } else { Err(disk_failure::REQUEST) }
}

impl Iommu {
    /// Starts the IOMMU and the disk that configuration space at `ecam` shows.
    pub fn start(ecam: u64) -> Result<Self, u64> {
        let device = Device::find(ecam, DEVICE_TYPE)?;
        if device.agree(FEATURES)? & FEATURES != FEATURES {
            return Err(disk_failure::REQUEST);
        }
        let mut requests = device.queue(0, REQUEST_RINGS_GPA)?;
        let mut faults = device.queue(1, FAULT_RINGS_GPA)?;
        device.ready();
        mem::store8(device.config + BYPASS_AT, 0);
        mem::clear(FAULT_GPA, u64::from(FAULT_BYTES));
        faults.post(&[Part { gpa: FAULT_GPA, len_bytes: FAULT_BYTES, writable: true }]);

        let number = Disk::number(ecam)?;
        mem::store32(REQUEST_GPA + 8, number);
        mem::store(REQUEST_GPA + 12, 0);
        is(request(&mut requests, ATTACH, 20, || ()), STATUS_OK)?;
        is(map(&mut requests, abi::BALLOON_RINGS_GPA, 1, || ()), STATUS_OK)?;
        // The rings are mapped, and nothing else is.
        Disk::start_behind(ecam, OFFSET)?.post_read();
        faults.wait(|| ());
        if mem::load32(FAULT_GPA + 8) != number || mem::load(FAULT_GPA + 16) < OFFSET {
            return Err(disk_failure::CONTENT);
        }
        let disk = Disk::start_behind(ecam, OFFSET)?;
        // Its header and status lie behind the page with its data.
        is(map(&mut requests, DATA_GPA + PAGE_BYTES, 1, || ()), STATUS_OK)?;
        Ok(Self { requests, disk })
    }

    /// As that of [`Disk`].
    pub fn write(&mut self, number: u64, mut meanwhile: impl FnMut()) -> Result<(), u64> {
        let requests = &mut self.requests;
        is(map(requests, DATA_GPA, 1, &mut meanwhile), STATUS_OK)?;
        self.disk.write(number, &mut meanwhile)?;
        // A part of a mapping stays.
        is(unmap(requests, DATA_GPA, 8, &mut meanwhile), STATUS_RANGE)?;
        is(unmap(requests, DATA_GPA, PAGE_BYTES, meanwhile), STATUS_OK)
    }
}
