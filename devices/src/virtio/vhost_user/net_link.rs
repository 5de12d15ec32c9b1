// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What a network device of vhost-user has beside its rings: what its driver chose by the control queue, which the VMM serves
//! (virtio 1.3, 5.1.6.5), and the announcement of its guest.
//!
//! Owns the number of pairs in use, and whether the driver is asked to announce itself. It must never talk to the back end.

use std::sync::Arc;

use parking_lot::Mutex;
use virtio_bindings::virtio_net as abi;

use crate::virtio::device::VirtioInterrupt;

/// Offset of the status in the configuration (virtio 1.3, 5.1.4).
pub(super) const STATUS_OFFSET: usize = 6;

/// What the driver chose, and what it is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct NetState {
    /// Pairs of queues in use.
    pub(super) active_pairs: u16,
    /// Whether the driver was asked to announce itself and has not acknowledged that.
    pub(super) announce_pending: bool,
}

impl Default for NetState {
    fn default() -> Self {
        Self { active_pairs: 1, announce_pending: false }
    }
}

/// Shared by the device and its thread.
pub(super) struct NetLink {
    /// Pairs of queues of the device.
    pub(super) pairs_max: u16,
    /// Address of the guest's end.
    pub(super) mac: [u8; 6],
    state: Mutex<NetState>,
    /// Set while there is a driver that can be asked to announce itself; locked while it is asked.
    interrupt: Mutex<Option<Arc<dyn VirtioInterrupt>>>,
}

impl NetLink {
    pub(super) fn new(pairs_max: u16, mac: [u8; 6]) -> Self {
        Self { pairs_max, mac, state: Mutex::default(), interrupt: Mutex::new(None) }
    }

    pub(super) fn state(&self) -> NetState {
        *self.state.lock()
    }

    pub(super) fn set_state(&self, state: NetState) {
        *self.state.lock() = state;
    }

    pub(super) fn set_active_pairs(&self, pairs: u16) {
        self.state.lock().active_pairs = pairs;
    }

    /// The driver has announced itself.
    pub(super) fn announced(&self) {
        self.state.lock().announce_pending = false;
    }

    /// Whether a queue is served; the others are of pairs that are not in use.
    pub(super) fn is_in_use(&self, queue_index: u16) -> bool {
        queue_index / 2 < self.state().active_pairs
    }

    /// Sets the interrupt for the request to announce, while there is a driver that knows it.
    pub(super) fn set_interrupt(&self, interrupt: Option<Arc<dyn VirtioInterrupt>>) {
        *self.interrupt.lock() = interrupt;
    }

    /// Asks the driver to announce itself; false if there is none that can.
    pub(super) fn ask_to_announce(&self) -> bool {
        let interrupt = self.interrupt.lock();
        let Some(interrupt) = &*interrupt else { return false };
        self.state.lock().announce_pending = true;
        interrupt.config_changed();
        true
    }

    /// The driver has gone: the next one finds a new device.
    pub(super) fn reset(&self) {
        self.set_interrupt(None);
        self.set_state(NetState::default());
    }

    /// Adds what the driver is asked for to the configuration that it reads.
    pub(super) fn add_status(&self, config: &mut [u8]) {
        if self.state().announce_pending
            && let Some(status) = config.get_mut(STATUS_OFFSET)
        {
            *status |= u8::try_from(abi::VIRTIO_NET_S_ANNOUNCE).unwrap_or(0);
        }
    }
}
