// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Drivers of devices that another process serves: a file system, which is asked for its root, and a network device
//! whose frames come back; and of persistent memory.
//!
//! Owns the requests, one at a time, and the check of each answer. Must never count a request before it was answered.

use crate::abi::{self, PAGE_BYTES, disk_failure, workload};
use crate::mem;
use crate::pmem::Pmem;
use crate::virtio::{Device, Part, Queue};

const TYPE_NET: u32 = 1;
const TYPE_FS: u32 = 26;

const OUT_GPA: u64 = abi::BALLOON_REQUEST_GPA;
const IN_GPA: u64 = OUT_GPA + PAGE_BYTES;

/// Header of a FUSE request, and of an answer (linux/fuse.h).
const FUSE_HEADER_BYTES: u32 = 40;
const FUSE_OUT_HEADER_BYTES: u32 = 16;
const FUSE_GETATTR: u32 = 3;
const FUSE_GETATTR_BYTES: u32 = 16;
const FUSE_ATTR_OUT_BYTES: u32 = 104;
const FUSE_INIT: u32 = 26;
const FUSE_INIT_BYTES: u32 = 16;
const FUSE_INIT_OUT_BYTES: u32 = 64;
const FUSE_MAJOR: u32 = 7;
const FUSE_MINOR: u32 = 31;
const ROOT: u64 = 1;

/// Header of a frame (virtio 1.3, 5.1.6), and the frame.
const NET_HEADER_BYTES: u32 = 12;
const FRAME_BYTES: u32 = 128;

/// A driver.
pub enum Peer {
    /// Of a file system.
    Fs {
        /// The queue of its requests.
        queue: Queue,
    },
    /// Of persistent memory.
    Pmem(Pmem),
    /// Of a network device.
    Net {
        /// Where frames come.
        rx: Queue,
        /// Where they go.
        tx: Queue,
    },
}

fn rings(number: u16) -> u64 {
    abi::BALLOON_RINGS_GPA + u64::from(number) * PAGE_BYTES
}

impl Peer {
    /// Starts the driver that the workload is about, for the first such device that configuration space at `ecam` shows.
    pub fn start(ecam: u64, workload: u64) -> Result<Self, u64> {
        if workload == workload::PMEM_WRITE {
            return Pmem::start(ecam).map(Self::Pmem);
        }
        let is_net = workload == workload::NET_ECHO;
        let device = Device::find(ecam, if is_net { TYPE_NET } else { TYPE_FS })?;
        device.agree(0)?;
        let (first, second) = (device.queue(0, rings(0))?, device.queue(1, rings(1))?);
        device.ready();
        if is_net {
            return Ok(Self::Net { rx: first, tx: second });
        }
        // The first queue is the one of high priority.
        let mut queue = second;
        mem::store32(OUT_GPA + 40, FUSE_MAJOR);
        mem::store32(OUT_GPA + 44, FUSE_MINOR);
        mem::store(OUT_GPA + 48, 0);
        fuse(&mut queue, FUSE_INIT, 0, (FUSE_INIT_BYTES, FUSE_INIT_OUT_BYTES), || ())?;
        let version = mem::load32(IN_GPA + u64::from(FUSE_OUT_HEADER_BYTES));
        if version == FUSE_MAJOR { Ok(Self::Fs { queue }) } else { Err(disk_failure::CONTENT) }
    }

    /// Sends request `number` and checks the answer.
    pub fn ask(&mut self, number: u64, meanwhile: impl FnMut()) -> Result<(), u64> {
        match self {
            Self::Fs { queue } => {
                mem::clear(OUT_GPA + 40, 16);
                let lengths = (FUSE_GETATTR_BYTES, FUSE_ATTR_OUT_BYTES);
                fuse(queue, FUSE_GETATTR, number + 1, lengths, meanwhile)?;
                let inode = mem::load(IN_GPA + u64::from(FUSE_OUT_HEADER_BYTES) + 16);
                if inode == ROOT { Ok(()) } else { Err(disk_failure::CONTENT) }
            }
            Self::Pmem(pmem) => pmem.write(number, meanwhile),
            Self::Net { rx, tx } => echo(rx, tx, number, meanwhile),
        }
    }
}

/// Sends a request about the root whose body is in place already.
fn fuse(
    queue: &mut Queue,
    opcode: u32,
    unique: u64,
    (body_bytes, answer_bytes): (u32, u32),
    meanwhile: impl FnMut(),
) -> Result<(), u64> {
    let len_bytes = FUSE_HEADER_BYTES + body_bytes;
    mem::clear(OUT_GPA, u64::from(FUSE_HEADER_BYTES));
    mem::store32(OUT_GPA, len_bytes);
    mem::store32(OUT_GPA + 4, opcode);
    mem::store(OUT_GPA + 8, unique);
    mem::store(OUT_GPA + 16, ROOT);
    let answer_bytes = FUSE_OUT_HEADER_BYTES + answer_bytes;
    mem::clear(IN_GPA, u64::from(answer_bytes));
    let parts = [
        Part { gpa: OUT_GPA, len_bytes, writable: false },
        Part { gpa: IN_GPA, len_bytes: answer_bytes, writable: true },
    ];
    queue.request(&parts, meanwhile);
    if mem::load32(IN_GPA + 4) != 0 {
        return Err(disk_failure::REQUEST);
    }
    let is_whole = mem::load32(IN_GPA) == answer_bytes && mem::load(IN_GPA + 8) == unique;
    if is_whole { Ok(()) } else { Err(disk_failure::CONTENT) }
}

/// Sends a frame that nothing else looks like, and waits until it comes back.
fn echo(
    rx: &mut Queue,
    tx: &mut Queue,
    number: u64,
    mut meanwhile: impl FnMut(),
) -> Result<(), u64> {
    let len_bytes = NET_HEADER_BYTES + FRAME_BYTES;
    mem::clear(OUT_GPA, u64::from(len_bytes));
    mem::clear(IN_GPA, u64::from(len_bytes));
    let words = || (u64::from(NET_HEADER_BYTES)..u64::from(len_bytes)).step_by(4);
    #[expect(clippy::cast_possible_truncation, reason = "any word will do")]
    let word = |at: u64| (number * 1_000 + at) as u32;
    words().for_each(|at| mem::store32(OUT_GPA + at, word(at)));
    rx.post(&[Part { gpa: IN_GPA, len_bytes, writable: true }]);
    tx.request(&[Part { gpa: OUT_GPA, len_bytes, writable: false }], &mut meanwhile);
    let came_bytes = rx.wait(meanwhile);
    let is_same = words().all(|at| mem::load32(IN_GPA + at) == word(at));
    if came_bytes == len_bytes && is_same { Ok(()) } else { Err(disk_failure::CONTENT) }
}
