// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! MSI-X (PCI 3.0, 6.8.2): the vector table, masking and pending bits.
//!
//! Owns what the guest wrote into the table and tells each [`MsiVector`] when to deliver and when
//! to hold back. Raising an interrupt takes no lock. Never loses an interrupt: one that comes
//! while its vector is masked, by its own bit, by the function mask or because MSI-X is off, is
//! delivered when the vector is unmasked.

mod state;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use devices::{LogLimit, log_limited};
use hypervisor::irq::{IrqError, MsiMessage, MsiSource, MsiVector};
use parking_lot::Mutex;
use thiserror::Error;

pub use state::{MsixEntryState, MsixState};

/// Vector number for an event without a vector (virtio 1.3, 4.1.5.1.2).
pub const NO_VECTOR: u16 = 0xffff;
/// Maximum number of vectors: the table size field has 11 bits (PCI 3.0, 6.8.2.3).
pub const VECTORS_MAX_COUNT: u16 = 2048;
/// Length of a table entry in bytes.
pub const ENTRY_LEN_BYTES: u64 = ENTRY_LEN as u64;
const ENTRY_LEN: usize = 16;

/// Capability ID.
pub const CAPABILITY_ID: u8 = 0x11;
/// Offset of the message control register in the capability.
pub const CONTROL_OFFSET: u16 = 2;
const CONTROL_ENABLE: u16 = 1 << 15;
const CONTROL_FUNCTION_MASK: u16 = 1 << 14;
const VECTOR_CONTROL_OFFSET: usize = 12;
const VECTOR_CONTROL_MASK: u8 = 1;

/// Why MSI-X cannot be set up or restored.
#[derive(Debug, Error)]
pub enum MsixError {
    /// The number of entries is invalid.
    #[error("an MSI-X table of {count} vectors is impossible (1 to {VECTORS_MAX_COUNT})")]
    Count {
        /// The requested number.
        count: u16,
    },
    /// A vector cannot be allocated or programmed.
    #[error("cannot set up MSI-X vector {vector}")]
    Vector {
        /// Its index.
        vector: u16,
        /// The cause.
        #[source]
        source: IrqError,
    },
    /// The version of the state is unknown.
    #[error("MSI-X state version {found} is not known here (newest known: {newest})")]
    StateVersion {
        /// The version.
        found: u32,
        /// Newest known version.
        newest: u32,
    },
    /// The state has another number of entries.
    #[error("the MSI-X state has {found} vectors, the device has {expected}")]
    StateLength {
        /// Entries in the state.
        found: usize,
        /// Entries in the table.
        expected: usize,
    },
}

/// One entry of the table.
#[derive(Clone, Copy, Debug)]
struct Entry {
    message: MsiMessage,
    masked: bool,
    /// An interrupt arrived while the vector was masked and was collected; another may still be pending in
    /// the [`MsiVector`].
    pending: bool,
    /// The message currently delivered; `None` while masked.
    programmed: Option<MsiMessage>,
}

impl Entry {
    /// After a reset all vectors are masked (PCI 3.0, 6.8.2.9).
    const RESET: Self = Self {
        message: MsiMessage { address: 0, data: 0 },
        masked: true,
        pending: false,
        programmed: None,
    };

    fn to_bytes(self) -> [u8; ENTRY_LEN] {
        let mut bytes = [0; ENTRY_LEN];
        bytes[..8].copy_from_slice(&self.message.address.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.message.data.to_le_bytes());
        bytes[VECTOR_CONTROL_OFFSET] = u8::from(self.masked);
        bytes
    }

    fn take_bytes(&mut self, bytes: [u8; ENTRY_LEN]) {
        let [a0, a1, a2, a3, a4, a5, a6, a7, d0, d1, d2, d3, control, ..] = bytes;
        self.message = MsiMessage {
            address: u64::from_le_bytes([a0, a1, a2, a3, a4, a5, a6, a7]),
            data: u32::from_le_bytes([d0, d1, d2, d3]),
        };
        self.masked = control & VECTOR_CONTROL_MASK != 0;
    }
}

struct Table {
    enabled: bool,
    function_masked: bool,
    /// Whether Bus Master Enable is set, without which no messages are sent.
    bus_master: bool,
    entries: Vec<Entry>,
}

/// MSI-X of a function: the table and the pending bits.
pub struct Msix {
    /// Never changes, so that raising an interrupt takes no lock.
    vectors: Vec<Arc<dyn MsiVector>>,
    table: Mutex<Table>,
    log_limit: LogLimit,
}

impl Msix {
    /// MSI-X with `count` vectors, disabled and masked.
    pub fn new(count: u16, source: &dyn MsiSource) -> Result<Self, MsixError> {
        if count == 0 || count > VECTORS_MAX_COUNT {
            return Err(MsixError::Count { count });
        }
        let vectors = (0..count)
            .map(|vector| {
                source.create_vector().map_err(|source| MsixError::Vector { vector, source })
            })
            .collect::<Result<Vec<_>, _>>()?;
        let entries = vec![Entry::RESET; vectors.len()];
        Ok(Self {
            vectors,
            table: Mutex::new(Table {
                enabled: false,
                function_masked: false,
                bus_master: true,
                entries,
            }),
            log_limit: LogLimit::default(),
        })
    }

    /// Number of vectors.
    pub fn vectors_count(&self) -> u16 {
        u16::try_from(self.vectors.len()).unwrap_or(VECTORS_MAX_COUNT)
    }

    /// Body and writable bits of the capability, for a table and pending bits at these offsets of one BAR.
    pub fn capability(&self, bar: u8, table_offset: u32, pba_offset: u32) -> ([u8; 10], [u8; 2]) {
        let mut body = [0; 10];
        body[..2].copy_from_slice(&(self.vectors_count() - 1).to_le_bytes());
        body[2..6].copy_from_slice(&(table_offset & !7 | u32::from(bar & 7)).to_le_bytes());
        body[6..].copy_from_slice(&(pba_offset & !7 | u32::from(bar & 7)).to_le_bytes());
        (body, (CONTROL_ENABLE | CONTROL_FUNCTION_MASK).to_le_bytes())
    }

    /// Applies the message control register after a guest write.
    pub fn set_control(&self, control: u16) {
        let mut table = self.table.lock();
        let enabled = control & CONTROL_ENABLE != 0;
        let function_masked = control & CONTROL_FUNCTION_MASK != 0;
        if (enabled, function_masked) != (table.enabled, table.function_masked) {
            table.enabled = enabled;
            table.function_masked = function_masked;
            for vector in 0..self.vectors.len() {
                self.apply_or_log(&mut table, vector);
            }
        }
    }

    /// Applies Bus Master Enable. A message is a memory write, so without it all vectors are masked, as
    /// with the function mask (PCI 3.0, 6.2.2). Set initially, for functions whose hardware implements the
    /// bit.
    pub fn set_bus_master(&self, bus_master: bool) {
        let mut table = self.table.lock();
        if bus_master != table.bus_master {
            table.bus_master = bus_master;
            for vector in 0..self.vectors.len() {
                self.apply_or_log(&mut table, vector);
            }
        }
    }

    /// Raises a vector; [`NO_VECTOR`] and vectors that do not exist are ignored. Takes no lock.
    pub fn trigger(&self, vector: u16) {
        let Some(msi) = self.vectors.get(usize::from(vector)) else { return };
        if let Err(error) = msi.trigger() {
            self.complain(usize::from(vector), &error);
        }
    }

    /// A vector, for back ends that signal its eventfd directly.
    pub fn vector(&self, vector: u16) -> Option<&Arc<dyn MsiVector>> {
        self.vectors.get(usize::from(vector))
    }

    /// Reads the table; zeros beyond its end.
    pub fn read_table(&self, offset: u64, data: &mut [u8]) {
        let table = self.table.lock();
        for (byte, index) in data.iter_mut().zip(0..) {
            *byte = split(offset.saturating_add(index)).map_or(0, |(entry, offset_in_entry)| {
                table.entries.get(entry).map_or(0, |entry| entry.to_bytes()[offset_in_entry])
            });
        }
    }

    /// Writes the table. Drivers write aligned words; other accesses are handled byte by byte.
    pub fn write_table(&self, offset: u64, data: &[u8]) {
        let mut table = self.table.lock();
        let mut rest = data;
        let mut at = offset;
        while let Some((index, start)) = split(at) {
            let part = rest.len().min(ENTRY_LEN - start);
            let Some(entry) = table.entries.get_mut(index) else { return };
            if part == 0 {
                return;
            }
            let mut bytes = entry.to_bytes();
            bytes[start..start + part].copy_from_slice(&rest[..part]);
            entry.take_bytes(bytes);
            self.apply_or_log(&mut table, index);
            rest = &rest[part..];
            at = at.saturating_add(part as u64);
        }
    }

    /// Reads the pending bits; zeros beyond their end.
    pub fn read_pba(&self, offset: u64, data: &mut [u8]) {
        let mut table = self.table.lock();
        for (byte, index) in data.iter_mut().zip(0..) {
            let at = offset.saturating_add(index);
            *byte = 0;
            for bit in 0..8_u32 {
                let vector = at.checked_mul(8).and_then(|first| first.checked_add(bit.into()));
                let Some(vector) = vector.and_then(|vector| usize::try_from(vector).ok()) else {
                    continue;
                };
                *byte |= u8::from(self.collect_pending(&mut table, vector)) << bit;
            }
        }
    }

    /// Whether an interrupt is pending for a masked vector; records it if the vector had it.
    fn collect_pending(&self, table: &mut Table, vector: usize) -> bool {
        let (Some(entry), Some(msi)) = (table.entries.get_mut(vector), self.vectors.get(vector))
        else {
            return false;
        };
        if entry.programmed.is_none() {
            entry.pending |= msi.take_pending();
        }
        entry.pending
    }

    /// Updates a vector from the table. One with a message that KVM refuses is masked.
    fn apply(&self, table: &mut Table, vector: usize) -> Result<(), IrqError> {
        let delivers = table.enabled && !table.function_masked && table.bus_master;
        let (Some(entry), Some(msi)) = (table.entries.get_mut(vector), self.vectors.get(vector))
        else {
            return Ok(());
        };
        if delivers && !entry.masked && !entry.message.is_refused() {
            if entry.pending {
                // They coalesce into one interrupt.
                msi.take_pending();
            }
            if entry.programmed != Some(entry.message) {
                msi.program(entry.message)?;
                entry.programmed = Some(entry.message);
            }
            if std::mem::take(&mut entry.pending) {
                msi.redeliver(entry.message)?;
            }
        } else if entry.programmed.take().is_some() {
            msi.mask()?;
        }
        Ok(())
    }

    fn apply_or_log(&self, table: &mut Table, vector: usize) {
        if let Err(error) = self.apply(table, vector) {
            self.complain(vector, &error);
        }
    }

    fn complain(&self, vector: usize, error: &IrqError) {
        log_limited!(self.log_limit, Warn, "MSI-X vector {vector}: {error}");
    }

    /// Resets to the power-on state: disabled, masked, nothing pending.
    pub fn reset(&self) {
        let mut table = self.table.lock();
        table.enabled = false;
        table.function_masked = false;
        for vector in 0..self.vectors.len() {
            self.apply_or_log(&mut table, vector);
            self.collect_pending(&mut table, vector);
        }
        table.entries.fill(Entry::RESET);
    }
}

/// Entry index and offset in the entry of a table offset.
fn split(offset: u64) -> Option<(usize, usize)> {
    let entry = usize::try_from(offset / ENTRY_LEN_BYTES).ok()?;
    let offset_in_entry = usize::try_from(offset % ENTRY_LEN_BYTES).ok()?;
    Some((entry, offset_in_entry))
}
