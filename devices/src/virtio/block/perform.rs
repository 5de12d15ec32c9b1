// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Synchronous execution of a request.
//!
//! Owns the choice of the call for each operation, and the distinction that decides whether a request may be
//! carried out again: whether the host refused it, or lost data that it had accepted before.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use memory::GuestMemory;

use super::image::Disk;
use super::no_space::OnFull;
use super::request::{Operation, SERIAL_BYTES, Status};
use super::synchronous;

/// Cache mode, on which it depends whether writes may stay in a cache until a flush.
#[derive(Clone)]
pub(crate) struct CacheMode {
    /// Whether the driver can flush.
    pub(crate) flush_negotiated: bool,
    /// The writeback field of the configuration, which the driver may change.
    pub(crate) writeback: Arc<AtomicBool>,
}

impl CacheMode {
    fn through(&self) -> bool {
        !(self.flush_negotiated && self.writeback.load(Ordering::Acquire))
    }
}

/// How a write becomes stable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stability {
    /// By a later flush of the driver.
    Later,
    /// By the write itself.
    AtOnce,
    /// By a flush after it.
    Behind,
}

/// Why a request failed.
#[derive(Debug)]
pub(super) enum Failure {
    /// The request is invalid or unsupported.
    Status(Status),
    /// The host refused it.
    Host(io::Error),
    /// The host could not make earlier writes stable.
    Flush(io::Error),
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Self::Host(error)
    }
}

impl From<Status> for Failure {
    fn from(status: Status) -> Self {
        Self::Status(status)
    }
}

/// What carries out requests; cheap to clone.
#[derive(Clone)]
pub(crate) struct Engine {
    pub(crate) disk: Arc<Disk>,
    pub(crate) serial: [u8; SERIAL_BYTES],
    pub(crate) cache: CacheMode,
    /// Whether storage may be deallocated.
    pub(crate) sparse: bool,
    pub(crate) on_full: OnFull,
}

impl Engine {
    /// How a write that starts now becomes stable.
    pub(super) fn stability(&self) -> Stability {
        if !self.cache.through() {
            return Stability::Later;
        }
        // The error of a stable write through the page cache does not distinguish a full disk, for which
        // the request may wait, from earlier data that could not be written back and are lost.
        let is_ambiguous = self.on_full == OnFull::Pause && !self.disk.direct();
        if is_ambiguous { Stability::Behind } else { Stability::AtOnce }
    }

    /// Carries out an operation; returns the number of bytes written to guest memory.
    pub(super) fn perform(
        &self,
        operation: &Operation,
        memory: &GuestMemory,
    ) -> Result<u64, Failure> {
        let disk = &self.disk;
        let flush = || {
            // Can be retried if there is no space, unlike the flush of data.
            disk.write_tables()?;
            disk.flush().map_err(Failure::Flush)
        };
        let stability = self.stability();
        match operation {
            Operation::Read { offset, data } => {
                synchronous::read(disk, memory, *offset, data)?;
                Ok(data.len_bytes())
            }
            Operation::Write { offset, data } => {
                let at_once = stability == Stability::AtOnce;
                let is_stable = synchronous::write(disk, memory, *offset, data, at_once)?;
                if stability != Stability::Later && !is_stable {
                    flush()?;
                }
                Ok(0)
            }
            Operation::Flush => {
                flush()?;
                Ok(0)
            }
            Operation::GetId { data } => Ok(synchronous::get_id(memory, data, &self.serial)?),
            // Only offered if storage may be deallocated.
            Operation::Discard(_) if !self.sparse => Err(Failure::Status(Status::Unsupported)),
            Operation::Discard(ranges) => {
                let is_done = synchronous::discard(disk, ranges)?;
                if is_done { Ok(0) } else { Err(Failure::Status(Status::Unsupported)) }
            }
            Operation::WriteZeroes(ranges) => {
                synchronous::write_zeroes(disk, ranges, self.sparse)?;
                if stability != Stability::Later {
                    flush()?;
                }
                Ok(0)
            }
            Operation::Refused(status) => Err(Failure::Status(*status)),
        }
    }
}
