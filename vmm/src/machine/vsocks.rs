// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Wiring of socket devices.
//!
//! Owns the translation from options to devices, and the handle of the socket: it listens when the machine
//! is about to run, as another VMM may have its path until then.

use std::sync::Arc;

use devices::virtio::Counters;
use devices::virtio::vsock::{Vsock, VsockConfig as DeviceConfig, VsockSocket};

use crate::config::VsockConfig;
use crate::panicking;

/// Handle to a vsock device of a running VM.
pub struct VsockHandle {
    /// Its socket.
    pub socket: Arc<VsockSocket>,
    /// Its counters.
    pub counters: Arc<dyn Counters>,
}

/// Creates a device; its socket listens later.
pub fn make(config: &VsockConfig) -> (Vsock, VsockHandle) {
    let device = Vsock::new(DeviceConfig {
        id: config.id.clone().unwrap_or_default(),
        cid: config.cid,
        path: config.socket.clone(),
    });
    let handle = VsockHandle { socket: device.socket(), counters: device.counters() };
    panicking::note_vsock(&handle.socket);
    (device, handle)
}
