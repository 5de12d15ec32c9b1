// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Guest memory that a device server maps.
//!
//! Owns which parts it has been handed. A part is a whole region of guest memory with its file, also where memory is
//! still to be plugged in: pages that come later are in the same file. The same holds for pages that are discarded and
//! come back. Must never hand over memory that is private, as the server would see other pages.

use std::os::fd::AsFd as _;
use std::sync::Arc;

use memory::{ForeignWriter, GuestRam, ZoneKind};
use parking_lot::Mutex;

use super::answers;
use super::connection::Deadline;
use super::protocol::{self, Command};
use super::session::{Question, Session};
use crate::user_error::UserError;

/// The parts that a server has.
#[derive(Default)]
pub(super) struct Handed {
    /// Address and length in bytes.
    parts: Mutex<Vec<(u64, u64)>>,
    /// Until all of them are back.
    writer: Mutex<Option<ForeignWriter>>,
}

/// Refuses memory that cannot be handed over.
///
/// # Errors
/// Names where it is.
pub(super) fn check(ram: &GuestRam) -> Result<(), UserError> {
    let mut regions = ram.regions().iter();
    let private =
        regions.find(|region| region.kind() != ZoneKind::Shared || region.file().is_none());
    match private {
        Some(region) => Err(UserError::PrivateMemory { gpa: region.gpa() }),
        None => Ok(()),
    }
}

impl Handed {
    /// Hands over all memory. If this is dropped before all is back, no later guest gets the memory.
    ///
    /// # Errors
    /// The server is lost, or refuses; or it was cancelled, before anything was handed over.
    pub fn map_all(
        &self,
        session: &Session,
        ram: &Arc<GuestRam>,
        deadline: &Deadline,
        is_cancelled: &dyn Fn() -> bool,
    ) -> Result<(), UserError> {
        check(ram)?;
        *self.writer.lock() = Some(ram.foreign_writer());
        // In this order: a guest that boots next asks for writers after it has cancelled.
        if is_cancelled() {
            self.stopped();
            return Err(UserError::Withdrawn);
        }
        for region in ram.regions() {
            let (gpa, len_bytes) = (region.gpa(), region.len_bytes());
            let file = region.file().ok_or(UserError::PrivateMemory { gpa })?;
            let payload = protocol::dma_map(region.file_offset(), gpa, len_bytes);
            // A server that does not answer may have it.
            self.parts.lock().push((gpa, len_bytes));
            session.ask(
                &Question::new(Command::DmaMap, &payload, 0).with(&[file.as_fd()]),
                deadline,
                |answer| answers::nothing(&answer.payload),
            )?;
        }
        Ok(())
    }

    /// Takes all of it back. When this succeeds, the server says that it has no reference to any of it left.
    ///
    /// # Errors
    /// The server is lost, or refuses: it may still write guest memory.
    pub fn unmap_all(&self, session: &Session, deadline: &Deadline) -> Result<(), UserError> {
        let mut parts = self.parts.lock();
        while let Some(&(gpa, len_bytes)) = parts.last() {
            let payload = protocol::dma_unmap(gpa, len_bytes);
            let room = answers::UNMAPPED_LEN_BYTES;
            session.ask(&Question::new(Command::DmaUnmap, &payload, room), deadline, |answer| {
                answers::unmapped(gpa, len_bytes, &answer.payload)
            })?;
            parts.pop();
        }
        drop(parts);
        self.stopped();
        Ok(())
    }

    fn stopped(&self) {
        if let Some(writer) = self.writer.lock().take() {
            writer.has_stopped();
        }
    }

    /// Whether the server has any.
    pub fn is_empty(&self) -> bool {
        self.parts.lock().is_empty()
    }
}
