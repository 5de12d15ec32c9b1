// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Guest events that the VMM must act on.
//!
//! Owns the vocabulary between vCPU and device threads on one side and the VMM thread on the
//! other. It must never decide anything.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use devices::legacy::PowerEvents;
use hypervisor::StopReason;

/// Something that the guest did, or that is done to it.
#[derive(Clone, Debug)]
pub enum GuestEvent {
    /// It asked for a reset.
    Reset,
    /// A triple fault of one of its vCPUs, which is how a PC resets itself when all else fails.
    TripleFault {
        /// Number of the vCPU.
        index: u32,
    },
    /// It has not set its watchdog back in time, so it is taken for stuck.
    WatchdogExpired,
    /// It has reported an event to its panic device.
    Panicked {
        /// The event's name in the event monitor.
        event: &'static str,
    },
    /// It switched itself off.
    Shutdown,
    /// It has ejected devices that it was asked to eject.
    Ejected,
    /// The host wants a passed-through device back, which the guest has to eject first.
    DeviceWanted {
        /// The device.
        id: String,
    },
    /// It waits for a request to a disk that the host has no room for.
    DiskFull {
        /// The disk.
        id: String,
    },
    /// One of its vCPUs cannot continue.
    VcpuStopped {
        /// Number of the vCPU.
        index: u32,
        /// Why.
        reason: StopReason,
    },
}

/// Takes events of one machine, on any thread; must not wait.
pub type EventSink = Arc<dyn Fn(GuestEvent) + Send + Sync>;

/// The power signals of one machine: passes them on, and remembers that there was one, so that a
/// vCPU leaves the guest at once and a migration does not move a guest that is about to end.
pub struct Power {
    sink: EventSink,
    pending: AtomicBool,
}

impl Power {
    /// Signals that go to `sink`.
    pub fn new(sink: EventSink) -> Arc<Self> {
        Arc::new(Self { sink, pending: AtomicBool::new(false) })
    }

    /// Whether the guest has asked for a reset or a shutdown, or lost a vCPU.
    pub fn is_pending(&self) -> bool {
        self.pending.load(Ordering::Acquire)
    }

    /// Takes note of an event and passes it on.
    pub fn signal(&self, event: GuestEvent) {
        self.pending.store(true, Ordering::Release);
        (self.sink)(event);
    }
}

impl PowerEvents for Power {
    fn reset(&self) {
        self.signal(GuestEvent::Reset);
    }

    fn shutdown(&self) {
        self.signal(GuestEvent::Shutdown);
    }
}
