// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Doorbells: driver notifications connected to a device's eventfds.
//!
//! Each queue has one eventfd for its entire life. While the device is active and its BAR mapped, the kernel
//! signals it (ioeventfd); otherwise, or if the kernel refused, the write is trapped and
//! signals it from here, without a lock. So a notification arrives in either case.
//!
//! The eventfds of a device that another process serves are that process's too, and it may make them block. They must
//! never be read or written here: each start of a queue has a new one, signalled before that process gets it. A
//! notification that the kernel does not take signals the queue's own eventfd, which the device watches.

use std::io;
use std::sync::Arc;

use devices::virtio::Kicks;
use devices::{LogLimit, log_limited};
use hypervisor::irq::{IoEventAddress, IoEvents};
use libc::EFD_NONBLOCK;
use parking_lot::Mutex;
use vmm_sys_util::eventfd::EventFd;

use super::layout::NOTIFY_MULTIPLIER;

/// State of the ioeventfds.
#[derive(Default)]
struct Registrations {
    /// Address at which the BAR is mapped.
    bar_gpa: Option<u64>,
    /// Queues that need an ioeventfd.
    armed: Vec<u16>,
    /// Queues with a registered ioeventfd, and its address.
    registered: Vec<(u16, u64)>,
    /// Eventfds that another process has, by queue.
    shared: Vec<(u16, EventFd)>,
}

/// The notification eventfds of a device's queues.
pub struct Notify {
    kicks: Vec<EventFd>,
    events: Arc<dyn IoEvents>,
    registrations: Mutex<Registrations>,
    /// The device shares its eventfds with another process.
    is_shared: bool,
    /// Offset of the notification addresses in the BAR.
    offset: u64,
    log_limit: LogLimit,
}

impl Notify {
    /// One eventfd per queue, none registered; `offset` is that of the notification addresses in the BAR. A device that shares its eventfds gets others from
    /// [`renew`](Kicks::renew).
    pub fn new(
        queues_count: usize,
        events: Arc<dyn IoEvents>,
        is_shared: bool,
        offset: u64,
    ) -> io::Result<Self> {
        let kicks =
            (0..queues_count).map(|_| EventFd::new(EFD_NONBLOCK)).collect::<io::Result<_>>()?;
        let (registrations, log_limit) = (Mutex::default(), LogLimit::default());
        Ok(Self { kicks, events, registrations, is_shared, offset, log_limit })
    }

    /// A duplicate of a queue's eventfd, for the device.
    pub fn handle(&self, queue_index: u16) -> io::Result<EventFd> {
        self.kicks
            .get(usize::from(queue_index))
            .ok_or_else(|| io::Error::from(io::ErrorKind::NotFound))?
            .try_clone()
    }

    /// Signals a queue that goes on after a pause; an invalid index is ignored, and so is a queue whose eventfd is
    /// shared: its start signals it.
    pub fn kick(&self, queue_index: u16) {
        if !self.is_shared {
            self.signal(queue_index);
        }
    }

    fn signal(&self, queue_index: u16) {
        if let Some(kick) = self.kicks.get(usize::from(queue_index)) {
            // Fails only if the counter is saturated, and the queue is signalled already.
            let _ = kick.write(1);
        }
    }

    /// Handles a trapped write to the notification addresses.
    pub fn trapped(&self, offset: u64) {
        if let Ok(queue_index) = u16::try_from(offset / u64::from(NOTIFY_MULTIPLIER)) {
            self.signal(queue_index);
        }
    }

    /// Registers ioeventfds for these queues, at the BAR's current and later addresses.
    pub fn arm(&self, queues: Vec<u16>) {
        let mut registrations = self.registrations.lock();
        self.unregister(&mut registrations);
        registrations.armed = queues;
        registrations.shared.clear();
        self.register(&mut registrations);
    }

    /// Unregisters the ioeventfds, and drops pending signals.
    pub fn disarm(&self) {
        let mut registrations = self.registrations.lock();
        self.unregister(&mut registrations);
        registrations.armed.clear();
        registrations.shared.clear();
        for kick in &self.kicks {
            // Fails if there is no signal.
            let _ = kick.read();
        }
    }

    /// Follows the BAR, which is mapped at `gpa` or unmapped.
    pub fn bar_moved(&self, gpa: Option<u64>) {
        let mut registrations = self.registrations.lock();
        self.unregister(&mut registrations);
        registrations.bar_gpa = gpa;
        self.register(&mut registrations);
    }

    fn register(&self, registrations: &mut Registrations) {
        for queue_index in registrations.armed.clone() {
            if let Err(error) = self.register_one(registrations, queue_index) {
                self.complain("register", queue_index, &error);
            }
        }
    }

    /// Registers a queue, if the BAR is mapped and there is an eventfd.
    fn register_one(
        &self,
        registrations: &mut Registrations,
        queue_index: u16,
    ) -> Result<(), hypervisor::irq::IrqError> {
        let offset = self.offset + u64::from(queue_index) * u64::from(NOTIFY_MULTIPLIER);
        let address = registrations.bar_gpa.and_then(|gpa| gpa.checked_add(offset));
        let kick = self.eventfd(&registrations.shared, queue_index);
        let (Some(address), Some(kick)) = (address, kick) else { return Ok(()) };
        self.events.register(kick, IoEventAddress::Mmio(address))?;
        registrations.registered.push((queue_index, address));
        Ok(())
    }

    /// What the driver of a queue signals.
    fn eventfd<'a>(
        &'a self,
        shared: &'a [(u16, EventFd)],
        queue_index: u16,
    ) -> Option<&'a EventFd> {
        if self.is_shared {
            let of_queue = shared.iter().find(|(index, _)| *index == queue_index);
            return of_queue.map(|(_, kick)| kick);
        }
        self.kicks.get(usize::from(queue_index))
    }

    fn unregister(&self, registrations: &mut Registrations) {
        let Registrations { registered, shared, .. } = registrations;
        for (queue_index, address) in registered.drain(..) {
            self.unregister_one(shared, queue_index, address);
        }
    }

    fn unregister_one(&self, shared: &[(u16, EventFd)], queue_index: u16, address: u64) {
        let Some(kick) = self.eventfd(shared, queue_index) else { return };
        if let Err(error) = self.events.unregister(kick, IoEventAddress::Mmio(address)) {
            self.complain("unregister", queue_index, &error);
        }
    }

    fn complain(&self, what: &str, queue_index: u16, error: &hypervisor::irq::IrqError) {
        let then = if self.is_shared { "the queue is not served" } else { "it works trapped" };
        log_limited!(
            self.log_limit,
            Warn,
            "cannot {what} the ioeventfd of queue {queue_index}: {error}; {then}"
        );
    }
}

impl Kicks for Notify {
    fn renew(&self, queue_index: u16) -> io::Result<EventFd> {
        if !self.is_shared {
            // The driver would go on to signal the queue's own.
            return Err(io::ErrorKind::Unsupported.into());
        }
        let new = EventFd::new(EFD_NONBLOCK)?;
        // The other process does not have it yet.
        new.write(1)?;
        let copy = new.try_clone()?;
        let mut registrations = self.registrations.lock();
        let before = registrations.registered.iter().position(|(index, _)| *index == queue_index);
        if let Some(before) = before {
            let (_, address) = registrations.registered.swap_remove(before);
            self.unregister_one(&registrations.shared, queue_index, address);
        }
        registrations.shared.retain(|(index, _)| *index != queue_index);
        registrations.shared.push((queue_index, new));
        if registrations.armed.contains(&queue_index) {
            self.register_one(&mut registrations, queue_index).map_err(io::Error::other)?;
        }
        Ok(copy)
    }
}

impl Drop for Notify {
    fn drop(&mut self) {
        self.disarm();
    }
}

#[cfg(test)]
#[path = "notify_tests.rs"]
mod tests;
