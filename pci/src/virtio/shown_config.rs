// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The device configuration as its driver last saw it (virtio 1.3, 4.1.4.3.1).
//!
//! Owns a copy, by which the transport notices every change, whatever its cause and whenever the device tells
//! of it: a driver that reads a field in parts must find another generation after a change between two
//! of them. Reads come from the copy, so that no read shows what has not been compared. Never saved: what a
//! restored device shows first counts as changed.

use devices::virtio::VirtioDevice;

use super::interrupt::PciInterrupt;

/// No device here has a longer configuration; what may come behind is read from the device.
const LEN_BYTES: usize = 64;

/// The copy; see the module.
pub(super) struct ShownConfig(Option<[u8; LEN_BYTES]>);

fn whole(device: &dyn VirtioDevice) -> [u8; LEN_BYTES] {
    let mut bytes = [0; LEN_BYTES];
    device.read_config(0, &mut bytes);
    bytes
}

impl ShownConfig {
    /// That of a device without a driver.
    pub(super) fn new(device: &dyn VirtioDevice) -> Self {
        Self(Some(whole(device)))
    }

    /// Forgets what was shown, as by another process.
    pub(super) fn forget(&mut self) {
        self.0 = None;
    }

    /// Takes what the device shows now, and counts a change; before each read by the driver of the
    /// configuration or its generation.
    pub(super) fn update(
        &mut self,
        device: &dyn VirtioDevice,
        interrupt: &PciInterrupt,
    ) -> &[u8; LEN_BYTES] {
        let now = whole(device);
        if self.0 != Some(now) {
            interrupt.count_config_change();
        }
        self.0.insert(now)
    }
}
