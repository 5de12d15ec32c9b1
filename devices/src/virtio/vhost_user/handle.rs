// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What the VMM does with a vhost-user device that the transport has.
//!
//! Owns no device: it moves with its guest, as far as that can be said without stopping its rings.

use std::sync::Arc;

use memory::GuestRam;
use parking_lot::Mutex;

use super::net_link::NetLink;
use super::session::Session;
use super::write_log::WriteLog;

/// A device, beside its transport.
pub struct VhostUserHandle {
    pub(super) id: String,
    pub(super) session: Arc<Mutex<Session>>,
    /// Of a network.
    pub(super) net: Option<Arc<NetLink>>,
}

impl VhostUserHandle {
    /// Id of the device.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Whether the back end is lost.
    pub fn is_lost(&self) -> bool {
        self.session.lock().is_lost()
    }

    /// Starts to log what the back end writes to guest memory; ends when the log is dropped.
    pub fn watch_writes(&self, ram: &GuestRam) -> WriteLog {
        WriteLog::start(&self.id, &self.session, ram)
    }

    /// Has a guest that has arrived announced on the network, by its driver if that can and by the back end otherwise.
    pub fn announce(&self) {
        let Some(net) = &self.net else { return };
        if !net.ask_to_announce() {
            // A back end that is lost now is noticed by the thread of the device.
            let _ = self.session.lock().announce(net.mac);
        }
    }
}
