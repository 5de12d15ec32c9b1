// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The device that is served: a PCI function that copies guest memory.
//!
//! Owns its registers, what it has been handed, and what has been done to it. Knows no message.

use std::fs::File;
use std::io::{self, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt as _;

/// Vendor and device.
pub const ID: [u8; 4] = [0x34, 0x12, 0x0d, 0x0d];
/// Length of configuration space in bytes.
pub const CONFIG_LEN_BYTES: u64 = 256;
/// Length of BAR 0, the registers: each access is a message.
pub const REGISTERS_LEN_BYTES: u64 = 0x1000;
/// Length of BAR 1, whose first page can be mapped.
pub const SHARED_LEN_BYTES: u64 = 0x2000;
/// Length of that page.
pub const SHARED_MAPPED_LEN_BYTES: u64 = 0x1000;
/// Where it begins in its file.
pub const SHARED_FILE_OFFSET: u64 = 0x1000;
/// Length of BAR 2, with the table of MSI-X at its begin and the pending bits at [`PENDING_OFFSET`].
pub const MSIX_LEN_BYTES: u64 = 0x1000;
/// Where these are.
pub const PENDING_OFFSET: u64 = 0x800;
/// Number of its MSI-X vectors.
pub const VECTORS: u16 = 4;

/// Registers of BAR 0, of 64 bits each.
pub mod register {
    /// Guest physical address that is copied from.
    pub const SOURCE: u64 = 0x00;
    /// Guest physical address that is copied to.
    pub const TARGET: u64 = 0x08;
    /// Bytes to copy.
    pub const LEN: u64 = 0x10;
    /// What to do, done when this is written: one of [`super::order`].
    pub const ORDER: u64 = 0x18;
    /// How many orders have been carried out.
    pub const DONE: u64 = 0x20;
    /// What [`super::order::LOOK`] has found.
    pub const RESULT: u64 = 0x28;
    /// How often the device was reset.
    pub const RESETS: u64 = 0x30;
}

/// What the device can do.
pub mod order {
    /// Copies.
    pub const COPY: u64 = 1;
    /// Signals the first interrupt.
    pub const INTERRUPT: u64 = 2;
    /// Puts the first 64 bits of BAR 1 into the result.
    pub const LOOK: u64 = 3;
}

/// A part of guest memory.
#[derive(Debug)]
pub struct Part {
    /// Guest physical address.
    pub gpa: u64,
    /// Length in bytes.
    pub len_bytes: u64,
    /// Its file.
    pub file: File,
    /// Where it is in the file.
    pub file_offset: u64,
}

/// The device.
#[derive(Debug)]
pub struct Device {
    /// Configuration space.
    pub config: Vec<u8>,
    /// BAR 0.
    pub registers: Vec<u8>,
    /// The file of BAR 1.
    pub shared: File,
    /// What is mapped.
    pub parts: Vec<Part>,
    /// By kind: the eventfds that are connected.
    pub interrupts: [Vec<File>; 3],
    /// How often its pin was unmasked.
    pub unmasked: u32,
    /// Numbers of the commands that came, in their order.
    pub commands: Vec<u16>,
    /// Errors in the answers to the device's own commands.
    pub refusals: Vec<u32>,
}

impl Device {
    /// A new one.
    ///
    /// # Errors
    /// The host gives no memory.
    pub fn new() -> io::Result<Self> {
        let shared = rustix::fs::memfd_create("shared", rustix::fs::MemfdFlags::CLOEXEC)?;
        let shared = File::from(shared);
        shared.set_len(SHARED_FILE_OFFSET + SHARED_LEN_BYTES)?;
        let len = |len_bytes: u64| usize::try_from(len_bytes).map_err(io::Error::other);
        let mut config = vec![0; len(CONFIG_LEN_BYTES)?];
        let mut put = |at: usize, bytes: &[u8]| {
            config.iter_mut().skip(at).zip(bytes).for_each(|(to, from)| *to = *from);
        };
        put(0, &ID);
        // It has a list of capabilities, and an odd class.
        put(6, &[0x10]);
        put(0x0b, &[0xff]);
        put(0x34, &[0x40]);
        put(0x3d, &[1]);
        put(0x40, &[0x11, 0]);
        put(0x42, &(VECTORS - 1).to_le_bytes());
        put(0x44, &2_u32.to_le_bytes());
        put(0x48, &(u32::try_from(PENDING_OFFSET).unwrap_or(0) | 2).to_le_bytes());
        Ok(Self {
            config,
            registers: vec![0; len(REGISTERS_LEN_BYTES)?],
            shared,
            parts: Vec::new(),
            interrupts: Default::default(),
            unmasked: 0,
            commands: Vec::new(),
            refusals: Vec::new(),
        })
    }

    /// A register.
    pub fn register(&self, at: u64) -> u64 {
        let mut bytes = [0; 8];
        read(&self.registers, at, &mut bytes);
        u64::from_le_bytes(bytes)
    }

    fn set(&mut self, at: u64, value: u64) {
        write(&mut self.registers, at, &value.to_le_bytes());
    }

    /// Reads a region.
    pub fn read(&self, region: u32, offset: u64, data: &mut [u8]) {
        match region {
            0 => read(&self.registers, offset, data),
            1 => {
                let at = SHARED_FILE_OFFSET + offset;
                if self.shared.read_exact_at(data, at).is_err() {
                    data.fill(0xff);
                }
            }
            7 => read(&self.config, offset, data),
            _ => data.fill(0),
        }
    }

    /// Writes a region.
    pub fn write(&mut self, region: u32, offset: u64, data: &[u8]) {
        match region {
            0 => {
                write(&mut self.registers, offset, data);
                if offset == register::ORDER {
                    self.carry_out();
                }
            }
            1 => drop(self.shared.write_all_at(data, SHARED_FILE_OFFSET + offset)),
            // Of configuration space the command register can be written, and not the status behind it.
            7 => {
                let command = data.iter().zip(offset..).filter(|(_, at)| (4..6).contains(at));
                for (byte, at) in command {
                    write(&mut self.config, at, &[*byte]);
                }
            }
            _ => {}
        }
    }

    fn carry_out(&mut self) {
        match self.register(register::ORDER) {
            order::COPY => drop(self.copy()),
            order::INTERRUPT => {
                for mut event in self.interrupts.iter().filter_map(|events| events.first()) {
                    // A full counter is an interrupt as well.
                    let _ = event.write_all(&1_u64.to_ne_bytes());
                }
            }
            order::LOOK => {
                let mut bytes = [0; 8];
                self.read(1, 0, &mut bytes);
                self.set(register::RESULT, u64::from_le_bytes(bytes));
            }
            _ => return,
        }
        self.set(register::DONE, self.register(register::DONE).wrapping_add(1));
    }

    /// Where guest memory is in a file.
    fn at(&self, gpa: u64, len_bytes: u64) -> io::Result<(&File, u64)> {
        let end = gpa.saturating_add(len_bytes);
        let holds = |part: &&Part| part.gpa <= gpa && end <= part.gpa + part.len_bytes;
        let part = self.parts.iter().find(holds);
        let part = part.ok_or_else(|| io::Error::from(io::ErrorKind::NotFound))?;
        Ok((&part.file, part.file_offset + (gpa - part.gpa)))
    }

    fn copy(&self) -> io::Result<()> {
        let is_bus_master = self.config.get(4).is_some_and(|command| command & 4 != 0);
        if !is_bus_master {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        let len_bytes = self.register(register::LEN).min(1 << 20);
        let mut bytes = vec![0; usize::try_from(len_bytes).map_err(io::Error::other)?];
        let (file, at) = self.at(self.register(register::SOURCE), len_bytes)?;
        file.read_exact_at(&mut bytes, at)?;
        let (file, at) = self.at(self.register(register::TARGET), len_bytes)?;
        file.write_all_at(&bytes, at)
    }

    /// Connects interrupts of a kind from `start` on; without descriptors, disconnects all.
    pub fn connect(&mut self, kind: usize, start: usize, fds: Vec<OwnedFd>) {
        let Some(events) = self.interrupts.get_mut(kind) else { return };
        events.truncate(start);
        events.extend(fds.into_iter().map(File::from));
    }

    /// Resets it.
    pub fn reset(&mut self) {
        let resets = self.register(register::RESETS).wrapping_add(1);
        self.registers.fill(0);
        self.set(register::RESETS, resets);
        write(&mut self.config, 4, &[0, 0]);
    }

    /// Forgets a client that has gone.
    pub fn forget(&mut self) {
        self.parts.clear();
        self.interrupts = Default::default();
    }
}

fn read(from: &[u8], offset: u64, data: &mut [u8]) {
    let rest = usize::try_from(offset).ok().and_then(|at| from.get(at..)).unwrap_or_default();
    data.fill(0xff);
    data.iter_mut().zip(rest).for_each(|(to, from)| *to = *from);
}

fn write(to: &mut [u8], offset: u64, data: &[u8]) {
    let rest = usize::try_from(offset).ok().and_then(|at| to.get_mut(at..)).unwrap_or_default();
    rest.iter_mut().zip(data).for_each(|(to, from)| *to = *from);
}
