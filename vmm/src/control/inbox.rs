// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The message queue from other threads of this process to the VMM thread.
//!
//! Owns the queue. A sender never waits.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Instant;

use vm_migration::destination::PostcopyPaused;
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use super::doubt::InDoubtVm;
use super::pausing::{ArrivedEnd, PauseEnd, TransitionEnd};
use super::receiving::ReceiveEnd;
use super::sending::SendEnd;
use super::snapshot::{RestoreEnd, SaveEnd};
use super::starting::StartEnd;
use crate::machine::GuestEvent;
use crate::migration::memory::MigratingRam;

/// A message to the VMM thread.
pub enum Message {
    /// From the machine with this number, at this moment: those of machines that are gone are ignored.
    Guest(u64, GuestEvent, Instant),
    /// A migration from here is over.
    SendEnd(Box<SendEnd>),
    /// A migration to here is over, or its guest runs.
    ReceiveEnd(Box<ReceiveEnd>),
    /// Which side has a guest that has arrived is not known.
    InDoubt(InDoubtVm),
    /// The guest that leaves belongs to the destination; its pages are being served.
    HandedOver,
    /// All pages of a guest that arrived in postcopy are here, or the source is lost.
    PagesComplete(Result<(), Box<PostcopyPaused<MigratingRam>>>),
    /// A machine has been made and runs, or not.
    Started(Box<StartEnd>),
    /// The machine has stopped or started, or not.
    TransitionOver(Box<TransitionEnd>),
    /// A machine that has arrived and was not started has been, or not.
    ArrivedStarted(Box<ArrivedEnd>),
    /// The machine has ended.
    TornDown,
    /// The VM was saved, or not.
    Saved(Box<SaveEnd>),
    /// The disks of a VM that was paused are written back, or not.
    PauseEnd(Box<PauseEnd>),
    /// A VM was restored, or not.
    Restored(Box<RestoreEnd>),
    /// All memory of the machine with this number, which was restored on demand, is here.
    MemoryComplete(u64),
}

/// The sending end; cheap to clone.
#[derive(Clone)]
pub struct InboxSender {
    sender: Sender<Message>,
    event: Arc<EventFd>,
}

impl InboxSender {
    /// Puts a message into the queue. Its reader may be gone; then the message is not needed.
    pub fn send(&self, message: Message) {
        if self.sender.send(message).is_ok() {
            // A full counter wakes as well.
            let _ = self.event.write(1);
        }
    }
}

/// The receiving end.
pub struct Inbox {
    receiver: Receiver<Message>,
    event: Arc<EventFd>,
}

impl Inbox {
    /// Both ends.
    ///
    /// # Errors
    /// The host gives no descriptor.
    pub fn new() -> io::Result<(InboxSender, Self)> {
        let event = Arc::new(EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?);
        let (sender, receiver) = channel();
        Ok((InboxSender { sender, event: Arc::clone(&event) }, Self { receiver, event }))
    }

    /// Readable while there may be messages.
    pub fn event(&self) -> &EventFd {
        &self.event
    }

    /// Makes the event unreadable; call it before taking messages.
    pub fn clear(&self) {
        // WouldBlock means that it was clear.
        let _ = self.event.read();
    }

    /// The next message.
    pub fn take(&self) -> Option<Message> {
        self.receiver.try_recv().ok()
    }
}
