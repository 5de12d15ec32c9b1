// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! VHDX images, fixed and dynamic.
//!
//! Owns reading and writing them. Does not use the log of the format: besides data, a write changes only the table entry
//! of each block that it allocates. That entry is written after the data are stable, and cannot be torn. Refuses an
//! image whose log has to be replayed, and one with a parent.

mod layout;
mod table;
#[cfg(test)]
mod tests;

use std::hash::{BuildHasher as _, Hasher as _, RandomState};
use std::io;

use imago::{Storage as _, StorageExt as _};
use parking_lot::RwLock;

use self::layout::{Header, Layout, MIB};
use self::table::BlockTable;
use super::formatted::{FormatDriver, FormatError, Unloaded};
use super::image::{Disk, file_or_device_len_bytes};
use super::request::Range;
use super::store::{Store, StoreFile};

#[cfg(any(test, feature = "testing"))]
pub(crate) use layout::seal;

/// An open image.
pub(super) struct Vhdx {
    file: StoreFile,
    layout: Layout,
}

impl Vhdx {
    pub(super) fn open(disk: &Disk) -> Result<Self, FormatError> {
        let file = StoreFile::of(disk);
        let layout = Layout::read(&store(&file), file_or_device_len_bytes(&file.file)?)?;
        Ok(Self { file, layout })
    }

    /// Reads layout and table again. The layout must not have changed.
    fn read(&self) -> Result<(Store, BlockTable), FormatError> {
        let store = store(&self.file);
        let len_bytes = file_or_device_len_bytes(&self.file.file)?;
        if Layout::read(&store, len_bytes)? != self.layout {
            return layout::damaged("its metadata are not those that it had");
        }
        let table = BlockTable::read(&store, &self.layout, len_bytes)?;
        // A new block is put at the end of the file.
        if self.file.is_writable && !self.file.file.metadata()?.is_file() && !table.is_complete() {
            return Err(FormatError::OnDevice);
        }
        Ok((store, table))
    }
}

fn store(file: &StoreFile) -> Store {
    Store::new(file.clone(), MIB)
}

impl Unloaded for Vhdx {
    fn size_bytes(&self) -> u64 {
        self.layout.size_bytes
    }

    fn sector_bytes(&self) -> u64 {
        self.layout.sector_bytes
    }

    fn unit_bytes(&self) -> u64 {
        self.layout.sector_bytes
    }

    fn check(&self) -> Result<(), FormatError> {
        self.read().map(drop)
    }

    fn load(&self) -> Result<Box<dyn FormatDriver>, FormatError> {
        let (store, table) = self.read()?;
        if self.file.is_writable {
            Header::read(&store)?.announce(&store, [new_guid(), new_guid()])?;
        }
        Ok(Box::new(VhdxDriver { store, table: RwLock::new(table), layout: self.layout.clone() }))
    }
}

/// A random GUID, from the keys of the standard library's hasher, which need no file.
fn new_guid() -> [u8; 16] {
    let random = || RandomState::new().build_hasher().finish();
    let number = u128::from(random()) << 64 | u128::from(random());
    // Version 4 and variant, in the mixed byte order of GUIDs.
    let mut bytes = number.to_le_bytes();
    if let Some(version) = bytes.get_mut(7) {
        *version = *version & 0x0f | 0x40;
    }
    if let Some(variant) = bytes.get_mut(8) {
        *variant = *variant & 0x3f | 0x80;
    }
    bytes
}

struct VhdxDriver {
    store: Store,
    /// Held while a new block is written; otherwise only locked briefly.
    table: RwLock<BlockTable>,
    layout: Layout,
}

/// The part of a transfer in one block.
struct Part {
    block: u64,
    in_block: u64,
    /// Offset and length in the transfer.
    at: usize,
    len: usize,
}

impl VhdxDriver {
    fn parts(&self, offset: u64, len_bytes: u64) -> impl Iterator<Item = io::Result<Part>> {
        let (block_bytes, size_bytes) = (self.layout.block_bytes, self.layout.size_bytes);
        let end = offset.checked_add(len_bytes).filter(|end| *end <= size_bytes);
        let mut at = offset;
        std::iter::from_fn(move || {
            let Some(end) = end else {
                let is_first = at == offset;
                at = at.wrapping_add(1);
                return is_first.then(|| Err(io::ErrorKind::UnexpectedEof.into()));
            };
            let left = end.checked_sub(at).filter(|left| *left > 0)?;
            let in_block = at % block_bytes;
            let len_bytes = left.min(block_bytes - in_block);
            let number = |bytes| usize::try_from(bytes).unwrap_or(usize::MAX);
            let part = Part {
                block: at / block_bytes,
                in_block,
                at: number(at - offset),
                len: number(len_bytes),
            };
            at += len_bytes;
            Some(Ok(part))
        })
    }

    /// Writes to a block that is not allocated, and allocates it.
    fn write_new(&self, part: &Part, bytes: &[u8]) -> io::Result<()> {
        let mut table = self.table.write();
        // Another thread may have been first.
        if let Some(place) = table.place(part.block) {
            drop(table);
            return self.store.write(bytes, place + part.in_block);
        }
        let place = table.next_place();
        // Provides the zeros of the rest of the block.
        self.store.grow(place + self.layout.block_bytes)?;
        if let Err(error) = self.store.write(bytes, place + part.in_block) {
            // A part may be written, and a new block must contain zeros.
            table.skip(place);
            return Err(error);
        }
        table.set(part.block, place);
        Ok(())
    }

    /// Calls `work` with offset and length in the file for each allocated part of a range.
    fn each_place(
        &self,
        range: Range,
        work: impl Fn(u64, u64) -> io::Result<()>,
    ) -> io::Result<()> {
        for part in self.parts(range.offset, range.len_bytes) {
            let part = part?;
            let place = self.table.read().place(part.block);
            if let Some(place) = place {
                work(place + part.in_block, part.len as u64)?;
            }
        }
        Ok(())
    }
}

impl FormatDriver for VhdxDriver {
    fn read(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        for part in self.parts(offset, buffer.len() as u64) {
            let part = part?;
            let bytes = buffer.get_mut(part.at..part.at + part.len).unwrap_or_default();
            let place = self.table.read().place(part.block);
            match place {
                Some(place) => self.store.read(bytes, place + part.in_block)?,
                None => bytes.fill(0),
            }
        }
        Ok(())
    }

    fn write(&self, buffer: &[u8], offset: u64) -> io::Result<()> {
        for part in self.parts(offset, buffer.len() as u64) {
            let part = part?;
            let bytes = buffer.get(part.at..part.at + part.len).unwrap_or_default();
            let place = self.table.read().place(part.block);
            match place {
                Some(place) => self.store.write(bytes, place + part.in_block)?,
                None => self.write_new(&part, bytes)?,
            }
        }
        Ok(())
    }

    fn discard(&mut self, range: Range) -> io::Result<()> {
        // The block stays allocated in the image.
        self.each_place(range, |place, len_bytes| self.store.punch_hole(place, len_bytes).map(drop))
    }

    fn write_zeroes(&mut self, range: Range) -> io::Result<()> {
        self.each_place(range, |place, len_bytes| self.store.write_zeroes(place, len_bytes))
    }

    fn write_zeroes_and_free(&mut self, range: Range) -> io::Result<()> {
        self.each_place(range, |place, len_bytes| {
            let is_zero = self.store.punch_hole(place, len_bytes)?;
            if is_zero { Ok(()) } else { self.store.write_zeroes(place, len_bytes) }
        })
    }

    fn write_tables(&self) -> io::Result<()> {
        if !self.table.read().has_changed() {
            return Ok(());
        }
        let mut table = self.table.write();
        // An entry must not be stable before the data of its block.
        self.store.sync()?;
        table.write(&self.store)
    }
}
