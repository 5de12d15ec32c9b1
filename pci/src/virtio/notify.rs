// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Doorbells: driver notifications connected to a device's eventfds.
//!
//! Each queue has one eventfd for its entire life. While the device is active and its BAR mapped, the kernel
//! signals it (ioeventfd); otherwise, or if the kernel refused, the write is trapped and
//! signals it from here, without a lock. So a notification arrives in either case.

use std::io;
use std::sync::Arc;

use devices::{LogLimit, log_limited};
use hypervisor::irq::{IoEventAddress, IoEvents};
use libc::EFD_NONBLOCK;
use parking_lot::Mutex;
use vmm_sys_util::eventfd::EventFd;

use super::layout::{NOTIFY_MULTIPLIER, NOTIFY_OFFSET};

/// State of the ioeventfds.
#[derive(Default)]
struct Registrations {
    /// Address at which the BAR is mapped.
    bar_gpa: Option<u64>,
    /// Queues that need an ioeventfd.
    armed: Vec<u16>,
    /// Queues with a registered ioeventfd, and its address.
    registered: Vec<(u16, u64)>,
}

/// The notification eventfds of a device's queues.
pub struct Notify {
    kicks: Vec<EventFd>,
    events: Arc<dyn IoEvents>,
    registrations: Mutex<Registrations>,
    log_limit: LogLimit,
}

impl Notify {
    /// One eventfd per queue, none registered.
    pub fn new(queues_count: usize, events: Arc<dyn IoEvents>) -> io::Result<Self> {
        let kicks =
            (0..queues_count).map(|_| EventFd::new(EFD_NONBLOCK)).collect::<io::Result<_>>()?;
        Ok(Self { kicks, events, registrations: Mutex::default(), log_limit: LogLimit::default() })
    }

    /// A duplicate of a queue's eventfd, for the device.
    pub fn handle(&self, queue_index: u16) -> io::Result<EventFd> {
        self.kicks
            .get(usize::from(queue_index))
            .ok_or_else(|| io::Error::from(io::ErrorKind::NotFound))?
            .try_clone()
    }

    /// Signals a queue; an invalid index is ignored.
    pub fn kick(&self, queue_index: u16) {
        if let Some(kick) = self.kicks.get(usize::from(queue_index)) {
            // Fails only if the counter is saturated, and the queue is signalled already.
            let _ = kick.write(1);
        }
    }

    /// Handles a trapped write to the notification addresses.
    pub fn trapped(&self, offset: u64) {
        if let Ok(queue_index) = u16::try_from(offset / u64::from(NOTIFY_MULTIPLIER)) {
            self.kick(queue_index);
        }
    }

    /// Registers ioeventfds for these queues, at the BAR's current and later addresses.
    pub fn arm(&self, queues: Vec<u16>) {
        let mut registrations = self.registrations.lock();
        self.unregister(&mut registrations);
        registrations.armed = queues;
        self.register(&mut registrations);
    }

    /// Unregisters the ioeventfds, and drops pending signals.
    pub fn disarm(&self) {
        let mut registrations = self.registrations.lock();
        self.unregister(&mut registrations);
        registrations.armed.clear();
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
        let Some(bar_gpa) = registrations.bar_gpa else { return };
        for &queue_index in &registrations.armed {
            let offset = NOTIFY_OFFSET + u64::from(queue_index) * u64::from(NOTIFY_MULTIPLIER);
            let address = bar_gpa.checked_add(offset);
            let (Some(address), Some(kick)) = (address, self.kicks.get(usize::from(queue_index)))
            else {
                continue;
            };
            match self.events.register(kick, IoEventAddress::Mmio(address)) {
                Ok(()) => registrations.registered.push((queue_index, address)),
                Err(error) => self.complain("register", queue_index, &error),
            }
        }
    }

    fn unregister(&self, registrations: &mut Registrations) {
        for (queue_index, address) in registrations.registered.drain(..) {
            let Some(kick) = self.kicks.get(usize::from(queue_index)) else { continue };
            if let Err(error) = self.events.unregister(kick, IoEventAddress::Mmio(address)) {
                self.complain("unregister", queue_index, &error);
            }
        }
    }

    fn complain(&self, what: &str, queue_index: u16, error: &hypervisor::irq::IrqError) {
        log_limited!(
            self.log_limit,
            Warn,
            "cannot {what} the ioeventfd of queue {queue_index}: {error}; it works trapped"
        );
    }
}

impl Drop for Notify {
    fn drop(&mut self) {
        self.disarm();
    }
}
