// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Drivers of devices that another process serves: a file system, which is asked for its root, and a network device
//! whose frames come back; of persistent memory; of a real-time clock; of an IOMMU with a disk behind it; and of a device of a
//! vfio-user server.
//!
//! Owns the requests, one at a time, and the check of each answer. Must never count a request before it was answered.

use crate::abi::{self, PAGE_BYTES, disk_failure, workload};
use crate::iommu::Iommu;
use crate::mem;
use crate::pmem::Pmem;
use crate::user_device::UserDevice;
use crate::virtio::{Device, Part, Queue};

const TYPE_NET: u32 = 1;
const TYPE_FS: u32 = 26;
const TYPE_RTC: u32 = 17;

const OUT_GPA: u64 = abi::BALLOON_REQUEST_GPA;
const IN_GPA: u64 = OUT_GPA + PAGE_BYTES;

/// Rings of a control queue, which has no page among those of the other queues.
const CONTROL_RINGS_GPA: u64 = abi::BALLOON_TOLD_GPA;

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

/// Features of a network device: a control queue, by which pairs of queues are chosen (virtio 1.3, 5.1.3).
const NET_CONTROL: u64 = 1 << 17;
const NET_PAIRS: u64 = 1 << 22;
/// Pairs that are used at most.
const PAIRS_MAX: u16 = 2;
/// Frames that are sent until the number of pairs in use changes.
const FRAMES_PER_CHANGE: u64 = 8;
/// Offset of the number of pairs in the configuration, and the class of the command that chooses it (virtio 1.3, 5.1.6.5.6).
const NET_PAIRS_AT: u64 = 8;
const CONTROL_PAIRS: u32 = 4;
/// Where a command is, and its answer.
const COMMAND_GPA: u64 = OUT_GPA + 0x800;
const COMMAND_BYTES: u32 = 4;
const ANSWER_GPA: u64 = COMMAND_GPA + 8;

/// Requests of the first clock, and the size of a request and of an answer (linux/virtio_rtc.h).
const RTC_READ: u32 = 1;
const RTC_CONFIG: u32 = 0x1000;
const RTC_CAPABILITIES: u32 = 0x1001;
const RTC_BYTES: u32 = 16;
/// UTC, perhaps smeared.
const RTC_UTC: u64 = 4;

/// A network device.
pub struct Net {
    /// Where frames come, and where they go.
    pairs: [Option<(Queue, Queue)>; PAIRS_MAX as usize],
    /// If there are several pairs.
    control: Option<Queue>,
    /// Pairs in use.
    active: u64,
}

/// A driver.
pub enum Peer {
    /// Of a file system.
    Fs {
        /// The queue of its requests.
        queue: Queue,
    },
    /// Of persistent memory.
    Pmem(Pmem),
    /// Of a device of a vfio-user server.
    User(UserDevice),
    /// Of a network device.
    Net(Net),
    /// Of an IOMMU with a disk behind it.
    Iommu(Iommu),
    /// Of a real-time clock.
    Rtc {
        /// The queue of its requests.
        queue: Queue,
        /// What it has shown last.
        last_ns: u64,
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
        if workload == workload::USER_DEVICE {
            return UserDevice::start(ecam).map(Self::User);
        }
        if workload == workload::NET_ECHO {
            return Net::start(ecam).map(Self::Net);
        }
        if workload == workload::IOMMU_DISK {
            return Iommu::start(ecam).map(Self::Iommu);
        }
        if workload == workload::RTC_READ {
            let device = Device::find(ecam, TYPE_RTC)?;
            device.agree(0)?;
            let mut queue = device.queue(0, rings(0))?;
            device.ready();
            let (clocks, kind) =
                (rtc(&mut queue, RTC_CONFIG, || ())?, rtc(&mut queue, RTC_CAPABILITIES, || ())?);
            let is_known = clocks == 1 && kind == RTC_UTC;
            return if is_known {
                Ok(Self::Rtc { queue, last_ns: 0 })
            } else {
                Err(disk_failure::CONTENT)
            };
        }
        let device = Device::find(ecam, TYPE_FS)?;
        device.agree(0)?;
        // The first queue is the one of high priority.
        let (_, mut queue) = (device.queue(0, rings(0))?, device.queue(1, rings(1))?);
        device.ready();
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
            Self::Iommu(iommu) => iommu.write(number, meanwhile),
            Self::User(device) => device.ask(number, meanwhile),
            Self::Net(net) => net.ask(number, meanwhile),
            Self::Rtc { queue, last_ns } => {
                let now_ns = rtc(queue, RTC_READ, meanwhile)?;
                let is_later = now_ns >= *last_ns;
                *last_ns = now_ns;
                if is_later { Ok(()) } else { Err(disk_failure::CONTENT) }
            }
        }
    }
}

impl Net {
    fn start(ecam: u64) -> Result<Self, u64> {
        let device = Device::find(ecam, TYPE_NET)?;
        let agreed = device.agree(NET_CONTROL | NET_PAIRS)?;
        let has_pairs = agreed == agreed | NET_CONTROL | NET_PAIRS;
        let count = if has_pairs { mem::load16(device.config + NET_PAIRS_AT) } else { 1 };
        let mut pairs = [const { None }; PAIRS_MAX as usize];
        for (pair, number) in pairs.iter_mut().zip(0..count) {
            let queue = |index: u16| device.queue(index, rings(index));
            *pair = Some((queue(2 * number)?, queue(2 * number + 1)?));
        }
        // After the queues of all pairs, also of those that are not used.
        let control =
            if has_pairs { Some(device.queue(2 * count, CONTROL_RINGS_GPA)?) } else { None };
        device.ready();
        Ok(Self { pairs, control, active: 1 })
    }

    /// Sends a frame by one of the pairs in use, whose number changes now and then.
    fn ask(&mut self, number: u64, mut meanwhile: impl FnMut()) -> Result<(), u64> {
        let there = self.pairs.iter().flatten().count() as u64;
        let wanted = 1 + number / FRAMES_PER_CHANGE % there;
        if let Some(control) = &mut self.control
            && wanted != self.active
        {
            use_pairs(control, wanted, &mut meanwhile)?;
            self.active = wanted;
        }
        let mut pairs = self.pairs.iter_mut().flatten();
        #[expect(clippy::cast_possible_truncation, reason = "it is small")]
        let chosen = pairs.nth((number % self.active) as usize);
        let (rx, tx) = chosen.ok_or(disk_failure::REQUEST)?;
        echo(rx, tx, number, meanwhile)
    }
}

/// Has the device use this many pairs.
fn use_pairs(control: &mut Queue, pairs: u64, meanwhile: impl FnMut()) -> Result<(), u64> {
    #[expect(clippy::cast_possible_truncation, reason = "it is small")]
    mem::store32(COMMAND_GPA, CONTROL_PAIRS | (pairs as u32) << 16);
    mem::store8(ANSWER_GPA, u8::MAX);
    let parts = [
        Part { gpa: COMMAND_GPA, len_bytes: COMMAND_BYTES, writable: false },
        Part { gpa: ANSWER_GPA, len_bytes: 1, writable: true },
    ];
    control.request(&parts, meanwhile);
    if mem::load8(ANSWER_GPA) == 0 { Ok(()) } else { Err(disk_failure::REQUEST) }
}

/// Sends a request about the first clock; returns what the answer says.
fn rtc(queue: &mut Queue, kind: u32, meanwhile: impl FnMut()) -> Result<u64, u64> {
    mem::clear(OUT_GPA, u64::from(RTC_BYTES));
    mem::store32(OUT_GPA, kind);
    // An answer that is not written is an error.
    mem::store(IN_GPA, u64::MAX);
    let parts = [
        Part { gpa: OUT_GPA, len_bytes: RTC_BYTES, writable: false },
        Part { gpa: IN_GPA, len_bytes: RTC_BYTES, writable: true },
    ];
    let len_bytes = queue.request(&parts, meanwhile);
    let is_whole = len_bytes == RTC_BYTES && mem::load(IN_GPA) == 0;
    if is_whole { Ok(mem::load(IN_GPA + 8)) } else { Err(disk_failure::REQUEST) }
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
