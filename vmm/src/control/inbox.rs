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

use super::checking::CheckEnd;
use super::confining::ConfineRequest;
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
    /// An event of the guest of the machine with this number, with its time; ignored if that machine is
    /// gone.
    Guest(u64, GuestEvent, Instant),
    /// An outgoing migration has ended.
    SendEnd(Box<SendEnd>),
    /// A check of a migration has ended.
    CheckEnd(Box<CheckEnd>),
    /// An incoming migration has ended, or its guest runs.
    ReceiveEnd(Box<ReceiveEnd>),
    /// An incoming VM is in doubt.
    InDoubt(InDoubtVm),
    /// The outgoing guest belongs to the destination; its pages are being served.
    HandedOver,
    /// All pages of a guest received in postcopy are resident, or the source is lost.
    PagesComplete(Result<(), Box<PostcopyPaused<MigratingRam>>>),
    /// A thread that is about to build a machine requests that the VMM thread be confined by Landlock.
    Confine(ConfineRequest),
    /// A machine has been created and runs, or its start has failed.
    Started(Box<StartEnd>),
    /// Memory of a VM that is being started is being populated.
    Populating,
    /// A pause, resume or device change of the machine has ended.
    TransitionOver(Box<TransitionEnd>),
    /// The start of a machine that had arrived and not been started has ended.
    ArrivedStarted(Box<ArrivedEnd>),
    /// The machine has been torn down.
    TornDown,
    /// A snapshot has been written, or has failed.
    Saved(Box<SaveEnd>),
    /// The disks of a paused VM have been written back, or the write has failed.
    PauseEnd(Box<PauseEnd>),
    /// A restore has ended.
    Restored(Box<RestoreEnd>),
    /// All memory of the machine with this number, restored on demand, is resident.
    MemoryComplete(u64),
}

/// The sending end of the inbox; cheap to clone.
#[derive(Clone)]
pub struct InboxSender {
    sender: Sender<Message>,
    event: Arc<EventFd>,
}

impl InboxSender {
    /// Queues a message. It is dropped if the receiving end is gone.
    pub fn send(&self, message: Message) {
        if self.sender.send(message).is_ok() {
            // A saturated counter wakes the thread as well.
            let _ = self.event.write(1);
        }
    }
}

/// The receiving end of the inbox.
pub struct Inbox {
    receiver: Receiver<Message>,
    event: Arc<EventFd>,
}

impl Inbox {
    /// Makes both ends.
    ///
    /// # Errors
    /// The event descriptor cannot be created.
    pub fn new() -> io::Result<(InboxSender, Self)> {
        let event = Arc::new(EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?);
        let (sender, receiver) = channel();
        Ok((InboxSender { sender, event: Arc::clone(&event) }, Self { receiver, event }))
    }

    /// Readable while there may be messages.
    pub fn event(&self) -> &EventFd {
        &self.event
    }

    /// Makes the event unreadable; call this before taking messages.
    pub fn clear(&self) {
        // WouldBlock: it was clear already.
        let _ = self.event.read();
    }

    /// The next message, if any.
    pub fn take(&self) -> Option<Message> {
        self.receiver.try_recv().ok()
    }
}
