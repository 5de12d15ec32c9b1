// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Numbers and layouts of the vfio-user protocol, version 0.
//!
//! Owns how a message becomes bytes, and bytes fields. All numbers are in the host's byte order, which is little endian
//! where this runs. Does not check what a field says: `answers` does.

use vfio_bindings::bindings::vfio::{
    VFIO_IRQ_SET_ACTION_TRIGGER, VFIO_IRQ_SET_ACTION_UNMASK, VFIO_IRQ_SET_DATA_EVENTFD,
    VFIO_IRQ_SET_DATA_NONE,
};

/// Length of the header of each message.
pub const HEADER_LEN_BYTES: usize = 16;
/// Version of the protocol that is spoken.
pub const MAJOR: u16 = 0;
/// The highest minor version of it.
pub const MINOR: u16 = 1;
/// Length of the region information without capabilities.
pub const REGION_INFO_LEN_BYTES: u32 = 32;
/// Length of what is before the bytes of a region's read or write.
pub const ACCESS_LEN_BYTES: u32 = 16;
/// Descriptors that are taken with one message: the file of a region.
pub const FDS_TAKEN_MAX: usize = 1;
/// Bytes of a region that are read or written by one message at most, where nothing else is agreed.
pub const TRANSFER_LEN_BYTES_MAX: u32 = 1 << 20;

const TYPE_MASK: u32 = 0xf;
const TYPE_COMMAND: u32 = 0;
const TYPE_REPLY: u32 = 1;
const NO_REPLY: u32 = 1 << 4;
const ERROR: u32 = 1 << 5;

/// Readable and writable.
const DMA_FLAGS: u32 = 0b11;

/// A command that is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub enum Command {
    /// Greeting and limits.
    Version = 1,
    /// A part of guest memory, with its file.
    DmaMap = 2,
    /// Takes it back.
    DmaUnmap = 3,
    /// What the device is.
    DeviceGetInfo = 4,
    /// What a region is.
    DeviceGetRegionInfo = 5,
    /// How many interrupts of a kind there are.
    DeviceGetIrqInfo = 7,
    /// Connects, disconnects or unmasks interrupts.
    DeviceSetIrqs = 8,
    /// Reads a region.
    RegionRead = 9,
    /// Writes a region.
    RegionWrite = 10,
    /// Resets the device.
    DeviceReset = 13,
}

impl Command {
    /// Its name in the protocol, for messages.
    pub fn name(self) -> &'static str {
        match self {
            Self::Version => "VERSION",
            Self::DmaMap => "DMA_MAP",
            Self::DmaUnmap => "DMA_UNMAP",
            Self::DeviceGetInfo => "DEVICE_GET_INFO",
            Self::DeviceGetRegionInfo => "DEVICE_GET_REGION_INFO",
            Self::DeviceGetIrqInfo => "DEVICE_GET_IRQ_INFO",
            Self::DeviceSetIrqs => "DEVICE_SET_IRQS",
            Self::RegionRead => "REGION_READ",
            Self::RegionWrite => "REGION_WRITE",
            Self::DeviceReset => "DEVICE_RESET",
        }
    }
}

/// What a message is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A command, and whether it is to be answered.
    Command {
        /// It is.
        wants_reply: bool,
    },
    /// An answer.
    Reply,
    /// An answer that the command has failed.
    Failure,
}

/// The header of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Number of the message, which its answer repeats.
    pub id: u16,
    /// The command.
    pub command: u16,
    /// Length of the message in bytes, with the header.
    pub len_bytes: u32,
    /// Type and flags.
    flags: u32,
    /// An errno, if the answer is that of a failure.
    pub error: u32,
}

impl Header {
    /// Of a command with a payload of this length.
    pub fn command(id: u16, command: Command, payload_len_bytes: usize) -> Self {
        let len_bytes = u32::try_from(payload_len_bytes.saturating_add(HEADER_LEN_BYTES));
        let len_bytes = len_bytes.unwrap_or(u32::MAX);
        Self { id, command: command as u16, len_bytes, flags: TYPE_COMMAND, error: 0 }
    }

    /// Of the answer that a command of the server is not carried out.
    pub fn refusal(&self, errno: i32) -> Self {
        let len_bytes = u32::try_from(HEADER_LEN_BYTES).unwrap_or(u32::MAX);
        Self { len_bytes, flags: TYPE_REPLY | ERROR, error: errno.unsigned_abs(), ..*self }
    }

    /// From its bytes.
    pub fn parse(bytes: &[u8; HEADER_LEN_BYTES]) -> Self {
        let [i0, i1, c0, c1, l0, l1, l2, l3, f0, f1, f2, f3, e0, e1, e2, e3] = *bytes;
        Self {
            id: u16::from_le_bytes([i0, i1]),
            command: u16::from_le_bytes([c0, c1]),
            len_bytes: u32::from_le_bytes([l0, l1, l2, l3]),
            flags: u32::from_le_bytes([f0, f1, f2, f3]),
            error: u32::from_le_bytes([e0, e1, e2, e3]),
        }
    }

    /// Its bytes.
    pub fn bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(HEADER_LEN_BYTES);
        bytes.extend(self.id.to_le_bytes());
        bytes.extend(self.command.to_le_bytes());
        for word in [self.len_bytes, self.flags, self.error] {
            bytes.extend(word.to_le_bytes());
        }
        bytes
    }

    /// What the message is; `None` if its flags are none that the protocol knows.
    pub fn kind(&self) -> Option<Kind> {
        match (self.flags & TYPE_MASK, self.flags & !TYPE_MASK) {
            (TYPE_COMMAND, flags) if flags & !NO_REPLY == 0 => {
                Some(Kind::Command { wants_reply: flags == 0 })
            }
            (TYPE_REPLY, 0) => Some(Kind::Reply),
            (TYPE_REPLY, ERROR) => Some(Kind::Failure),
            _ => None,
        }
    }

    /// Length of what follows the header; `None` if it is said to end within the header.
    pub fn payload_len_bytes(&self) -> Option<usize> {
        usize::try_from(self.len_bytes).ok()?.checked_sub(HEADER_LEN_BYTES)
    }
}

/// Reads the fields of a payload, one after the other.
#[derive(Clone, Copy, Debug)]
pub struct Fields<'a>(pub &'a [u8]);

impl<'a> Fields<'a> {
    /// The next bytes, as many as are given.
    pub fn take<const COUNT: usize>(&mut self) -> Option<[u8; COUNT]> {
        let (head, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*head)
    }

    /// The next 16 bits.
    pub fn word(&mut self) -> Option<u16> {
        self.take().map(u16::from_le_bytes)
    }

    /// The next 32 bits.
    pub fn double_word(&mut self) -> Option<u32> {
        self.take().map(u32::from_le_bytes)
    }

    /// The next 64 bits.
    pub fn quad_word(&mut self) -> Option<u64> {
        self.take().map(u64::from_le_bytes)
    }

    /// What is left.
    pub fn rest(self) -> &'a [u8] {
        self.0
    }
}

fn double_words<const COUNT: usize>(words: [u32; COUNT]) -> Vec<u8> {
    words.into_iter().flat_map(u32::to_le_bytes).collect()
}

/// The greeting: version and limits, as JSON with a zero at its end.
pub fn version() -> Vec<u8> {
    let mut payload = Vec::new();
    payload.extend(MAJOR.to_le_bytes());
    payload.extend(MINOR.to_le_bytes());
    let limits = format!(
        r#"{{"capabilities":{{"max_msg_fds":{FDS_TAKEN_MAX},"max_data_xfer_size":{TRANSFER_LEN_BYTES_MAX}}}}}"#
    );
    payload.extend(limits.into_bytes());
    payload.push(0);
    payload
}

/// Asks what the device is.
pub fn device_get_info() -> Vec<u8> {
    double_words([16, 0, 0, 0])
}

/// Asks what a region is, with room for an answer of `room_bytes`.
pub fn device_get_region_info(index: u32, room_bytes: u32) -> Vec<u8> {
    double_words([room_bytes, 0, index, 0, 0, 0, 0, 0])
}

/// Asks how many interrupts of a kind there are.
pub fn device_get_irq_info(index: u32) -> Vec<u8> {
    double_words([16, 0, index, 0])
}

/// What is done with interrupts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IrqAction {
    /// Connected to the eventfds that come along.
    Connect,
    /// Disconnected, all of the kind.
    Disconnect,
    /// The pin is unmasked.
    Unmask,
}

/// Connects, disconnects or unmasks interrupts.
pub fn device_set_irqs(index: u32, action: IrqAction, start: u32, count: u32) -> Vec<u8> {
    let flags = match action {
        IrqAction::Connect => VFIO_IRQ_SET_DATA_EVENTFD | VFIO_IRQ_SET_ACTION_TRIGGER,
        IrqAction::Disconnect => VFIO_IRQ_SET_DATA_NONE | VFIO_IRQ_SET_ACTION_TRIGGER,
        IrqAction::Unmask => VFIO_IRQ_SET_DATA_NONE | VFIO_IRQ_SET_ACTION_UNMASK,
    };
    double_words([20, flags, index, start, count])
}

/// What is before the bytes of a read or write of a region, in the command and in its answer.
pub fn region_access(region: u32, offset: u64, count: u32) -> Vec<u8> {
    let mut payload = Vec::new();
    payload.extend(offset.to_le_bytes());
    payload.extend(region.to_le_bytes());
    payload.extend(count.to_le_bytes());
    payload
}

/// Hands over a part of guest memory, which is at `file_offset` of the file that comes along.
pub fn dma_map(file_offset: u64, gpa: u64, len_bytes: u64) -> Vec<u8> {
    let mut payload = double_words([32, DMA_FLAGS]);
    payload.extend([file_offset, gpa, len_bytes].into_iter().flat_map(u64::to_le_bytes));
    payload
}

/// Takes it back.
pub fn dma_unmap(gpa: u64, len_bytes: u64) -> Vec<u8> {
    let mut payload = double_words([24, 0]);
    payload.extend([gpa, len_bytes].into_iter().flat_map(u64::to_le_bytes));
    payload
}
