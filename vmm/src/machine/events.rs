// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Guest events that the VMM must act on.
//!
//! Owns the vocabulary between vCPU and device threads on one side and the VMM thread on the
//! other. It must never decide anything.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use devices::legacy::PowerEvents;
use hypervisor::StopReason;

/// An event of the guest or of its host, for the VMM thread.
#[derive(Clone, Debug)]
pub enum GuestEvent {
    /// The guest requested a reset.
    Reset,
    /// A vCPU had a triple fault, by which a PC resets itself as a last resort.
    TripleFault {
        /// Index of the vCPU.
        index: u32,
    },
    /// The guest did not reset its watchdog in time, so it counts as stuck.
    WatchdogExpired,
    /// The guest has reported an event to its panic device.
    Panicked {
        /// Name of the event in the event monitor.
        event: &'static str,
    },
    /// The guest powered off.
    Shutdown,
    /// The guest has ejected devices as requested.
    Ejected,
    /// The host wants a passed-through device back, which the guest has to eject first.
    DeviceWanted {
        /// Id of the device.
        id: String,
    },
    /// A passed-through device that the guest does not see yet is open or cannot be opened, can be announced, or has to
    /// be removed.
    WithheldDevice,
    /// Memory will be mapped for passed-through devices for longer than was forecast when the guest was to see them.
    LongMapping {
        /// How long from now on.
        left: Duration,
    },
    /// A request of the guest waits for free space on the host.
    DiskFull {
        /// Id of the disk.
        id: String,
    },
    /// A vCPU cannot continue.
    VcpuStopped {
        /// Index of the vCPU.
        index: u32,
        /// The cause.
        reason: StopReason,
    },
}

/// Receives the events of one machine, on any thread; must not block.
pub type EventSink = Arc<dyn Fn(GuestEvent) + Send + Sync>;

/// The power signals of a machine. Forwards them, and records that there was one, so that a vCPU leaves the
/// guest at once and a guest that is about to end is not migrated.
pub struct Power {
    sink: EventSink,
    pending: AtomicBool,
}

impl Power {
    /// Forwards signals to `sink`.
    pub fn new(sink: EventSink) -> Arc<Self> {
        Arc::new(Self { sink, pending: AtomicBool::new(false) })
    }

    /// Whether the guest has requested a reset or shutdown, or a vCPU has stopped.
    pub fn is_pending(&self) -> bool {
        self.pending.load(Ordering::Acquire)
    }

    /// Records an event and forwards it.
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
