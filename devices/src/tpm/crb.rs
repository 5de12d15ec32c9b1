// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The registers of the command response buffer interface, for locality 0.
//!
//! Owns what the guest sees. Source: TCG PC Client Platform TPM Profile for TPM 2.0, 1.05, section 6.5.3.
//! Must never wait.

use super::state::SavedRegisters;

/// Length of the registers and the buffer: those of one locality.
pub const CRB_LEN_BYTES: u64 = 0x1000;
/// Offset of the control area, whose address is in the ACPI table `TPM2`.
pub const CRB_CONTROL_OFFSET: u64 = 0x40;
/// Length of the buffer for commands and responses.
pub(super) const BUFFER_BYTES: usize = 0x1000 - BUFFER_OFFSET;

const BUFFER_OFFSET: usize = 0x80;
const LOC_STATE: u64 = 0x00;
const LOC_CTRL: u64 = 0x08;
const LOC_STS: u64 = 0x0c;
const INTF_ID: u64 = 0x30;
const INTF_VENDOR: u64 = 0x34;
const CTRL_REQ: u64 = 0x40;
const CTRL_STS: u64 = 0x44;
const CTRL_START: u64 = 0x4c;
const CMD_SIZE: u64 = 0x58;
const CMD_ADDR_LOW: u64 = 0x5c;
const CMD_ADDR_HIGH: u64 = 0x60;
const RSP_SIZE: u64 = 0x64;
const RSP_ADDR_LOW: u64 = 0x68;
const RSP_ADDR_HIGH: u64 = 0x6c;

/// No measured launch has taken place; the registers are valid.
const STATE_FIXED: u32 = 1 | 1 << 7;
const STATE_ASSIGNED: u32 = 1 << 1;
const LOC_REQUEST: u32 = 1;
const LOC_RELINQUISH: u32 = 1 << 1;
/// Interface type and version of a CRB, transfers of 64 bytes, CRB supported and selected.
const INTERFACE: u32 = 1 | 1 << 4 | 3 << 11 | 1 << 14 | 1 << 17;
/// The vendor of swtpm.
const VENDOR: u32 = 0x1014;
const REQ_READY: u32 = 1;
const REQ_IDLE: u32 = 1 << 1;
const STS_FAILED: u32 = 1;
const STS_IDLE: u32 = 1 << 1;

/// Tag, length and code of the response to a command that failed.
const RESPONSE_FAILURE: [u8; 10] = [0x80, 0x01, 0, 0, 0, 10, 0, 0, 0x01, 0x01];
/// Tag, length and code of a command.
pub(super) const HEADER_BYTES: usize = 10;

/// The length that a command or response says it has, if it has a header.
pub(super) fn length_of(message: &[u8]) -> Option<usize> {
    let length = message.get(2..6)?;
    usize::try_from(u32::from_be_bytes(length.try_into().ok()?)).ok()
}

/// Registers and buffer.
pub(super) struct Crb {
    gpa: u64,
    is_assigned: bool,
    is_idle: bool,
    has_failed: bool,
    is_running: bool,
    buffer: [u8; BUFFER_BYTES],
}

impl Crb {
    /// Registers after a reset, at this address.
    pub(super) fn new(gpa: u64) -> Self {
        Self {
            gpa,
            is_assigned: false,
            is_idle: true,
            has_failed: false,
            is_running: false,
            buffer: [0; BUFFER_BYTES],
        }
    }

    /// Whether a command is being executed.
    pub(super) fn is_running(&self) -> bool {
        self.is_running
    }

    /// Ends the command with a response.
    pub(super) fn finish(&mut self, response: &[u8]) {
        if let Some(place) = self.buffer.get_mut(..response.len()) {
            place.copy_from_slice(response);
        }
        self.is_running = false;
    }

    /// Ends the command, if there is one, as failed; the TPM reports that it does not work.
    pub(super) fn fail(&mut self) {
        self.has_failed = true;
        if self.is_running {
            self.finish(&RESPONSE_FAILURE);
        }
    }

    pub(super) fn save(&self) -> SavedRegisters {
        let used = self.buffer.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
        SavedRegisters {
            is_assigned: self.is_assigned,
            is_idle: self.is_idle,
            buffer: self.buffer[..used].to_vec(),
        }
    }

    /// Takes over saved registers, whose buffer has been checked.
    pub(super) fn restore(&mut self, saved: &SavedRegisters) {
        self.is_assigned = saved.is_assigned;
        self.is_idle = saved.is_idle;
        self.is_running = false;
        self.buffer = [0; BUFFER_BYTES];
        self.finish(&saved.buffer);
    }

    fn register(&self, offset: u64) -> u32 {
        let buffer_gpa = self.gpa.saturating_add(BUFFER_OFFSET as u64);
        let flag = |is_set: bool, bits| if is_set { bits } else { 0 };
        #[expect(clippy::cast_possible_truncation, reason = "the two halves of an address")]
        let (low, high) = (buffer_gpa as u32, (buffer_gpa >> 32) as u32);
        match offset {
            LOC_STATE => STATE_FIXED | flag(self.is_assigned, STATE_ASSIGNED),
            LOC_STS => flag(self.is_assigned, 1),
            INTF_ID => INTERFACE,
            INTF_VENDOR => VENDOR,
            CTRL_STS => flag(self.has_failed, STS_FAILED) | flag(self.is_idle, STS_IDLE),
            CTRL_START => flag(self.is_running, 1),
            CMD_SIZE | RSP_SIZE => u32::try_from(BUFFER_BYTES).unwrap_or(0),
            CMD_ADDR_LOW | RSP_ADDR_LOW => low,
            CMD_ADDR_HIGH | RSP_ADDR_HIGH => high,
            _ => 0,
        }
    }

    /// A read by the guest; zeros beyond the end.
    pub(super) fn read(&self, offset: u64, data: &mut [u8]) {
        for (byte, index) in data.iter_mut().zip(0..) {
            let at = offset.saturating_add(index);
            let in_buffer = usize::try_from(at).ok().and_then(|at| at.checked_sub(BUFFER_OFFSET));
            let found = if let Some(at) = in_buffer {
                self.buffer.get(at).copied()
            } else {
                let register = self.register(at & !3).to_le_bytes();
                usize::try_from(at & 3).ok().and_then(|at| register.get(at).copied())
            };
            *byte = found.unwrap_or(0);
        }
    }

    /// A write by the guest; returns the command that is to be executed. A cancel has no effect: swtpm executes a
    /// command to its end before it looks at anything else.
    pub(super) fn write(&mut self, offset: u64, data: &[u8]) -> Option<Vec<u8>> {
        let in_buffer = usize::try_from(offset).ok().and_then(|at| at.checked_sub(BUFFER_OFFSET));
        if let Some(at) = in_buffer {
            let end = at.saturating_add(data.len());
            if let Some(place) = self.buffer.get_mut(at..end).filter(|_| !self.is_running) {
                place.copy_from_slice(data);
            }
            return None;
        }
        let mut command = None;
        for (index, word) in (0_u64..).zip(data.chunks(4)) {
            let at = offset.saturating_add(4 * index);
            let mut bytes = [0; 4];
            // A part of a register is written as if the rest were zero: no register has bits to keep.
            for (byte, place) in word.iter().zip((at & 3)..4) {
                if let Some(slot) = usize::try_from(place).ok().and_then(|i| bytes.get_mut(i)) {
                    *slot = *byte;
                }
            }
            command = self.write_register(at & !3, u32::from_le_bytes(bytes)).or(command);
        }
        command
    }

    fn write_register(&mut self, offset: u64, value: u32) -> Option<Vec<u8>> {
        match offset {
            LOC_CTRL if value & LOC_RELINQUISH != 0 => self.is_assigned = false,
            LOC_CTRL if value & LOC_REQUEST != 0 => self.is_assigned = true,
            CTRL_REQ if self.is_running => {}
            CTRL_REQ if value & REQ_IDLE != 0 => self.is_idle = true,
            CTRL_REQ if value & REQ_READY != 0 => self.is_idle = false,
            CTRL_START if value & 1 != 0 && !self.is_running => return self.start(),
            _ => {}
        }
        None
    }

    fn start(&mut self) -> Option<Vec<u8>> {
        let length = length_of(&self.buffer).filter(|length| *length >= HEADER_BYTES);
        let command = length.and_then(|length| self.buffer.get(..length));
        self.is_running = true;
        if let Some(command) = command {
            return Some(command.to_vec());
        }
        self.finish(&RESPONSE_FAILURE);
        None
    }
}
