// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The configuration space of one function.
//!
//! Owns the 4 KiB of registers, which of their bits a guest can write, the capability lists and
//! the BAR registers with their sizing protocol. Has no side effects: its owner looks at the
//! command register, the BARs and the capabilities after a write and acts. Never lets a guest
//! change a bit that is not marked writable.

mod state;
#[cfg(test)]
mod tests;

use thiserror::Error;

use crate::bar::{BarDecode, BarDescription, BarKind, ROM_INDEX};

pub use state::{ConfigSpaceState, ConfigStateError};

/// Length of the configuration space of a PCI Express function.
pub const CONFIG_SPACE_LEN_BYTES: u16 = 4096;
const LEN: usize = CONFIG_SPACE_LEN_BYTES as usize;

/// End of conventional configuration space, where extended capabilities start.
const EXTENDED_OFFSET: u16 = 0x100;
const FIRST_CAPABILITY_OFFSET: u16 = 0x40;
/// Number of BARs of a type 0 header.
pub const BARS_COUNT: u8 = 6;

/// Registers of the type 0 header (PCI 3.0, 6.1).
pub mod register {
    /// Vendor ID, 16 bits.
    pub const VENDOR_ID: u16 = 0x00;
    /// Device ID, 16 bits.
    pub const DEVICE_ID: u16 = 0x02;
    /// Command, 16 bits.
    pub const COMMAND: u16 = 0x04;
    /// Status, 16 bits.
    pub const STATUS: u16 = 0x06;
    /// Revision ID, 8 bits, followed by the 24-bit class code.
    pub const REVISION_ID: u16 = 0x08;
    /// Cache line size, 8 bits.
    pub const CACHE_LINE_SIZE: u16 = 0x0c;
    /// First BAR, 32 bits.
    pub const BAR0: u16 = 0x10;
    /// Subsystem vendor ID, 16 bits.
    pub const SUBSYSTEM_VENDOR_ID: u16 = 0x2c;
    /// Subsystem ID, 16 bits.
    pub const SUBSYSTEM_ID: u16 = 0x2e;
    /// Expansion ROM, 32 bits.
    pub const ROM: u16 = 0x30;
    /// Offset of the first capability, 8 bits.
    pub const CAPABILITIES: u16 = 0x34;
    /// Interrupt line, 8 bits.
    pub const INTERRUPT_LINE: u16 = 0x3c;
}

const COMMAND_IO: u16 = 1;
const COMMAND_MEMORY: u16 = 1 << 1;
const COMMAND_BUS_MASTER: u16 = 1 << 2;
/// Memory decoding, bus master, parity response, SERR, INTx disable. I/O decoding is added with the first
/// I/O BAR; bits that PCI Express hardwires to zero are left out.
const COMMAND_WRITABLE: u16 = COMMAND_MEMORY | COMMAND_BUS_MASTER | 1 << 6 | 1 << 8 | 1 << 10;
const STATUS_CAPABILITIES: u16 = 1 << 4;

const BAR_IS_PORTS: u32 = 1;
const BAR_TYPE_64: u32 = 0b10 << 1;
const BAR_PREFETCHABLE: u32 = 1 << 3;
const BAR_ADDRESS_MASK: u64 = !0xf;
const BAR_PORTS_MASK: u64 = !0x3;
/// Minimum length of a memory BAR, given its flag bits (PCI 3.0, 6.2.5.1).
const BAR_LEN_MIN_BYTES: u64 = 16;
/// Valid lengths of an I/O BAR, likewise.
pub const BAR_PORTS_LENS: std::ops::RangeInclusive<u64> = 4..=256;

const ROM_ENABLE: u32 = 1;
const ROM_ADDRESS_MASK: u64 = !0x7ff;
/// Valid lengths of an expansion ROM (PCI 3.0, 6.2.5.2).
pub const ROM_LENS: std::ops::RangeInclusive<u64> = 0x800..=0x100_0000;

/// Why a configuration space cannot be built. These are programming errors.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum ConfigError {
    /// The BAR index is out of range or taken (a 64-bit BAR takes two).
    #[error("BAR {index} does not exist or is taken")]
    BarIndex {
        /// Index of the BAR.
        index: u8,
    },
    /// The BAR length is invalid.
    #[error(
        "a BAR cannot be {len_bytes} bytes long; it takes a power of two, 16 at least, an I/O BAR \
         4 to 256, and an expansion ROM 2 KiB to 16 MiB"
    )]
    BarSize {
        /// The requested length.
        len_bytes: u64,
    },
    /// No space is left for a capability.
    #[error("no room for capability {id:#x} of {len_bytes} bytes")]
    CapabilityRoom {
        /// Capability ID.
        id: u16,
        /// Its length in bytes, including the header.
        len_bytes: usize,
    },
}

/// Identification registers of a function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    /// Vendor ID.
    pub vendor_id: u16,
    /// Device ID.
    pub device_id: u16,
    /// Revision.
    pub revision: u8,
    /// Class code: base class, subclass, programming interface, from the top (24 bits).
    pub class: u32,
    /// Subsystem vendor ID.
    pub subsystem_vendor_id: u16,
    /// Subsystem ID.
    pub subsystem_id: u16,
}

/// Configuration space of one function.
#[derive(Clone)]
pub struct ConfigSpace {
    bytes: Box<[u8; LEN]>,
    writable: Box<[u8; LEN]>,
    /// The expansion ROM is the last.
    bars: [Option<BarDescription>; BARS_COUNT as usize + 1],
    /// Offset of the pointer to the next capability, and offset of that one.
    capability_link: u16,
    capability_next: u16,
    extended_last: Option<u16>,
    extended_next: u16,
}

impl ConfigSpace {
    /// A type 0 function without BARs and capabilities. It has no interrupt pin, as only message-signalled
    /// interrupts are supported.
    pub fn endpoint(identity: &Identity) -> Self {
        let mut space = Self {
            bytes: Box::new([0; LEN]),
            writable: Box::new([0; LEN]),
            bars: [None; BARS_COUNT as usize + 1],
            capability_link: register::CAPABILITIES,
            capability_next: FIRST_CAPABILITY_OFFSET,
            extended_last: None,
            extended_next: EXTENDED_OFFSET,
        };
        space.put(register::VENDOR_ID, &identity.vendor_id.to_le_bytes());
        space.put(register::DEVICE_ID, &identity.device_id.to_le_bytes());
        let [class0, class1, class2, _] = identity.class.to_le_bytes();
        space.put(register::REVISION_ID, &[identity.revision, class0, class1, class2]);
        space.put(register::SUBSYSTEM_VENDOR_ID, &identity.subsystem_vendor_id.to_le_bytes());
        space.put(register::SUBSYSTEM_ID, &identity.subsystem_id.to_le_bytes());
        space.allow(register::COMMAND, &COMMAND_WRITABLE.to_le_bytes());
        space.allow(register::CACHE_LINE_SIZE, &[0xff]);
        space.allow(register::INTERRUPT_LINE, &[0xff]);
        space
    }

    /// A host bridge: an endpoint without writable registers.
    pub fn host_bridge(identity: &Identity) -> Self {
        let mut space = Self::endpoint(identity);
        space.writable.fill(0);
        space
    }

    /// Adds a BAR, which reads as address zero until placed.
    pub fn add_bar(&mut self, bar: BarDescription) -> Result<(), ConfigError> {
        let index = bar.index;
        let registers = bar.kind.registers_count();
        let exists = if bar.kind == BarKind::Rom {
            index == ROM_INDEX
        } else {
            index.checked_add(registers).is_some_and(|end| end <= BARS_COUNT)
        };
        let taken =
            !exists || (index..index + registers).any(|register| self.register_is_taken(register));
        if taken {
            return Err(ConfigError::BarIndex { index });
        }
        let len_bytes = bar.len_bytes;
        let fits = match bar.kind {
            BarKind::Memory32 => (BAR_LEN_MIN_BYTES..=1 << 31).contains(&len_bytes),
            BarKind::Memory64 => len_bytes >= BAR_LEN_MIN_BYTES,
            BarKind::Ports => BAR_PORTS_LENS.contains(&len_bytes),
            BarKind::Rom => ROM_LENS.contains(&len_bytes),
        };
        if !len_bytes.is_power_of_two() || !fits {
            return Err(ConfigError::BarSize { len_bytes });
        }
        let mut flags = 0;
        if bar.kind == BarKind::Memory64 {
            flags |= BAR_TYPE_64;
        }
        if bar.kind == BarKind::Ports {
            flags |= BAR_IS_PORTS;
            self.allow(register::COMMAND, &COMMAND_IO.to_le_bytes());
        } else if bar.kind == BarKind::Rom {
            self.allow(register::ROM, &ROM_ENABLE.to_le_bytes());
        } else if bar.prefetchable {
            flags |= BAR_PREFETCHABLE;
        }
        // The writable bits are those that read back as ones for sizing.
        let address_bits = (!(len_bytes - 1)).to_le_bytes();
        let offset = bar_offset(index);
        self.put(offset, &flags.to_le_bytes());
        self.allow(offset, &address_bits[..usize::from(registers) * 4]);
        self.bars[usize::from(index)] = Some(bar);
        Ok(())
    }

    /// Changes the width of a memory BAR, which reads as address zero until placed.
    ///
    /// # Errors
    /// There is no such memory BAR, or no register for the upper half; nothing has changed then.
    pub fn set_bar_width(&mut self, index: u8, kind: BarKind) -> Result<(), ConfigError> {
        let bar = self.bars.get(usize::from(index)).copied().flatten();
        let is_plain = |kind| matches!(kind, BarKind::Memory32 | BarKind::Memory64);
        let Some(bar) = bar.filter(|bar| is_plain(bar.kind) && is_plain(kind)) else {
            return Err(ConfigError::BarIndex { index });
        };
        if bar.kind == kind {
            return Ok(());
        }
        let mut other = self.clone();
        let offset = usize::from(bar_offset(index));
        let registers = offset..offset + usize::from(bar.kind.registers_count()) * 4;
        other.bytes.iter_mut().take(registers.end).skip(registers.start).for_each(|byte| *byte = 0);
        other
            .writable
            .iter_mut()
            .take(registers.end)
            .skip(registers.start)
            .for_each(|mask| *mask = 0);
        if let Some(slot) = other.bars.get_mut(usize::from(index)) {
            *slot = None;
        }
        other.add_bar(BarDescription { kind, ..bar })?;
        *self = other;
        Ok(())
    }

    fn register_is_taken(&self, register: u8) -> bool {
        self.bars
            .iter()
            .flatten()
            .any(|bar| (bar.index..bar.index + bar.kind.registers_count()).contains(&register))
    }

    /// Appends a capability (PCI 3.0, 6.7); returns its offset.
    ///
    /// `body` follows the two header bytes (id and next pointer). `writable` is the mask of guest-writable
    /// bits of `body`; bytes beyond its end are read-only.
    pub fn add_capability(
        &mut self,
        id: u8,
        body: &[u8],
        writable: &[u8],
    ) -> Result<u16, ConfigError> {
        let len_bytes = 2 + body.len();
        let offset = self.capability_next;
        let end = u16::try_from(len_bytes)
            .ok()
            .and_then(|len| offset.checked_add(len))
            .filter(|end| *end <= EXTENDED_OFFSET)
            .ok_or(ConfigError::CapabilityRoom { id: id.into(), len_bytes })?;
        let [link, _] = offset.to_le_bytes();
        self.put(self.capability_link, &[link]);
        self.put(offset, &[id, 0]);
        self.put(offset + 2, body);
        self.allow(offset + 2, &writable[..writable.len().min(body.len())]);
        let status = self.read_u16(register::STATUS) | STATUS_CAPABILITIES;
        self.put(register::STATUS, &status.to_le_bytes());
        self.capability_link = offset + 1;
        self.capability_next = end.next_multiple_of(4);
        Ok(offset)
    }

    /// Appends an extended capability (PCIe 4.0, 7.6.3); returns its offset. `body` follows the
    /// four header bytes; `writable` as in [`ConfigSpace::add_capability`].
    pub fn add_extended_capability(
        &mut self,
        id: u16,
        version: u8,
        body: &[u8],
        writable: &[u8],
    ) -> Result<u16, ConfigError> {
        let len_bytes = 4 + body.len();
        let offset = self.extended_next;
        let end = u16::try_from(len_bytes)
            .ok()
            .and_then(|len| offset.checked_add(len))
            .filter(|end| *end <= CONFIG_SPACE_LEN_BYTES)
            .ok_or(ConfigError::CapabilityRoom { id, len_bytes })?;
        if let Some(last) = self.extended_last {
            let linked = self.read_u16(last + 2) & 0xf | offset << 4;
            self.put(last + 2, &linked.to_le_bytes());
        }
        let header = u32::from(id) | u32::from(version & 0xf) << 16;
        self.put(offset, &header.to_le_bytes());
        self.put(offset + 4, body);
        self.allow(offset + 4, &writable[..writable.len().min(body.len())]);
        self.extended_last = Some(offset);
        self.extended_next = end.next_multiple_of(4);
        Ok(offset)
    }

    /// Reads from `offset`; all ones beyond the end.
    pub fn read(&self, offset: u16, data: &mut [u8]) {
        for (byte, at) in data.iter_mut().zip(usize::from(offset)..) {
            *byte = self.bytes.get(at).copied().unwrap_or(0xff);
        }
    }

    /// Handles a guest write; bits that are not writable keep their value.
    pub fn write(&mut self, offset: u16, data: &[u8]) {
        for (byte, at) in data.iter().zip(usize::from(offset)..) {
            let (Some(current), Some(mask)) = (self.bytes.get_mut(at), self.writable.get(at))
            else {
                return;
            };
            *current = *current & !mask | byte & mask;
        }
    }

    /// Sets registers regardless of the write mask.
    pub fn put(&mut self, offset: u16, data: &[u8]) {
        for (byte, current) in data.iter().zip(self.bytes.iter_mut().skip(offset.into())) {
            *current = *byte;
        }
    }

    /// Makes bits writable by the guest.
    pub fn allow(&mut self, offset: u16, masks: &[u8]) {
        for (mask, current) in masks.iter().zip(self.writable.iter_mut().skip(offset.into())) {
            *current |= mask;
        }
    }

    /// The 16-bit register at `offset`.
    pub fn read_u16(&self, offset: u16) -> u16 {
        let mut data = [0; 2];
        self.read(offset, &mut data);
        u16::from_le_bytes(data)
    }

    /// The 32-bit register at `offset`.
    pub fn read_u32(&self, offset: u16) -> u32 {
        let mut data = [0; 4];
        self.read(offset, &mut data);
        u32::from_le_bytes(data)
    }

    /// Whether memory decoding is enabled.
    pub fn memory_decode(&self) -> bool {
        self.read_u16(register::COMMAND) & COMMAND_MEMORY != 0
    }

    /// Whether I/O decoding is enabled.
    pub fn io_decode(&self) -> bool {
        self.read_u16(register::COMMAND) & COMMAND_IO != 0
    }

    /// Whether Bus Master Enable is set.
    pub fn bus_master(&self) -> bool {
        self.read_u16(register::COMMAND) & COMMAND_BUS_MASTER != 0
    }

    /// The BARs.
    pub fn bars(&self) -> impl Iterator<Item = BarDescription> + '_ {
        self.bars.iter().flatten().copied()
    }

    /// Address in a BAR register; `None` if there is no such BAR.
    pub fn bar_gpa(&self, index: u8) -> Option<u64> {
        let bar = self.bars.get(usize::from(index)).copied().flatten()?;
        let offset = bar_offset(index);
        let low = u64::from(self.read_u32(offset));
        Some(match bar.kind {
            BarKind::Memory32 => low & BAR_ADDRESS_MASK,
            BarKind::Memory64 => {
                (u64::from(self.read_u32(offset + 4)) << 32 | low) & BAR_ADDRESS_MASK
            }
            BarKind::Ports => low & BAR_PORTS_MASK,
            BarKind::Rom => low & ROM_ADDRESS_MASK,
        })
    }

    /// Sets a BAR register; bits below the BAR's size are ignored (an expansion ROM is disabled), as is a BAR that does not exist, as in a
    /// guest write.
    pub fn set_bar_gpa(&mut self, index: u8, gpa: u64) {
        let Some(bar) = self.bars.get(usize::from(index)).copied().flatten() else { return };
        let registers_len = usize::from(bar.kind.registers_count()) * 4;
        self.write(bar_offset(index), &gpa.to_le_bytes()[..registers_len]);
    }

    /// The BAR registers and decode bits.
    pub fn bar_decode(&self) -> BarDecode {
        BarDecode {
            enabled: self.memory_decode(),
            ports_enabled: self.io_decode(),
            rom_enabled: self.read_u32(register::ROM) & ROM_ENABLE != 0,
            gpas: self
                .bars()
                .filter_map(|bar| self.bar_gpa(bar.index).map(|gpa| (bar.index, gpa)))
                .collect(),
        }
    }
}

fn bar_offset(index: u8) -> u16 {
    if index == ROM_INDEX { register::ROM } else { register::BAR0 + u16::from(index) * 4 }
}
