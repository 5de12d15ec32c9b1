// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Writing a core file of a paused machine.
//!
//! Owns which thread does it: one that has only the memory, so that storage that hangs blocks that thread
//! and not the machine.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use arch::core_dump::{self, CoreFile, CoreRange};
use thiserror::Error;
use vm_migration::Cancel;
use vm_migration::ram::GuestMemoryMap as _;
use vm_migration::snapshot::{
    CoreError, CoreFormat, CoreReport, PAGE_START_BYTES, default_threads, write_core,
};

use super::memory::{MigratingRam, MigratingRamError};
use super::storage_thread::{StorageError, write_on_thread};
use crate::machine::{Machine, MachineError};

/// Why a core file cannot be written.
#[derive(Debug, Error)]
#[error("the VM's memory cannot be dumped to {path}")]
pub struct CoreDumpError {
    path: String,
    #[source]
    source: CoreDumpCause,
}

#[derive(Debug, Error)]
enum CoreDumpCause {
    #[error("its registers cannot be read")]
    Machine(#[from] MachineError),
    #[error(transparent)]
    Memory(#[from] MigratingRamError),
    #[error(transparent)]
    Core(#[from] CoreError),
    #[error(transparent)]
    Storage(#[from] StorageError),
}

/// The format of Linux's own core files, with Linux's own note if it is in the guest's memory.
struct Elf(CoreFile);

impl CoreFormat for Elf {
    fn memory_offset(&self) -> u64 {
        self.0.memory_offset()
    }

    fn text_at(&self, start: &[u8; PAGE_START_BYTES]) -> Option<Range<usize>> {
        core_dump::vmcoreinfo_at(start)
    }

    fn header(&self, text: Option<&[u8]>) -> Vec<u8> {
        self.0.header(text)
    }
}

/// Writes registers and memory of a paused machine to a new file. The machine stays paused.
///
/// # Errors
/// Names the file, which does not exist then; if the storage hangs, it is gone once that responds.
pub fn take(machine: &Machine, path: &Path, cancel: &Cancel) -> Result<CoreReport, CoreDumpError> {
    take_into(machine, path, cancel)
        .map_err(|source| CoreDumpError { path: path.display().to_string(), source })
}

fn take_into(machine: &Machine, path: &Path, cancel: &Cancel) -> Result<CoreReport, CoreDumpCause> {
    let memory = MigratingRam::as_mapped(Arc::clone(machine.ram()))?;
    let ranges = memory.layout().regions().iter();
    let ranges = ranges.map(|region| CoreRange { gpa: region.gpa, len_bytes: region.len_bytes });
    let format = Elf(machine.core_file(ranges.collect())?);
    let (path, own_cancel) = (path.to_owned(), cancel.clone());
    let report = write_on_thread(
        move || {
            let report = write_core(&path, &format, &memory, default_threads(), &own_cancel);
            // Released before the machine's owner continues.
            drop(memory);
            report
        },
        cancel,
    )?;
    Ok(report?)
}
