// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Telling the network where the guest is now, after a migration.

use std::io::Write;
use std::sync::Arc;

use log::debug;

use super::config::Link;
use super::tap::{HEADER_BYTES, MacAddress};

/// Length of the shortest Ethernet frame, without its checksum.
const FRAME_BYTES: usize = 60;

/// Makes a guest's new place known; a handle for the VMM while the transport owns the device.
#[derive(Clone)]
pub struct Announcer {
    pub(super) link: Arc<Link>,
}

impl Announcer {
    /// Teaches switches the way to the guest's Ethernet address, and asks the driver, if it knows
    /// how, to announce its other addresses (virtio 1.3, 5.1.6.5.4).
    pub fn announce(&self) {
        let mac = self.link.state().mac;
        if let Some(tap) = self.link.tap.pair(0) {
            let mut file = tap.file();
            if let Err(error) = file.write(&announcement(mac)) {
                debug!("cannot send an announcement for {mac}: {error}");
            }
        }
        if let Some(interrupt) = self.link.interrupt() {
            self.link.change(|state| state.announce_pending = true);
            interrupt.config_changed();
        }
    }
}

/// A reverse ARP request by the guest for itself (RFC 903), with the tap's header before it. It
/// needs no IP address and is answered by nobody.
fn announcement(mac: MacAddress) -> [u8; HEADER_BYTES + FRAME_BYTES] {
    let mut bytes = [0; HEADER_BYTES + FRAME_BYTES];
    let mut position = HEADER_BYTES;
    let mut put = |part: &[u8]| {
        for (to, from) in bytes.iter_mut().skip(position).zip(part) {
            *to = *from;
        }
        position += part.len();
    };
    put(&[0xff; 6]);
    put(&mac.0);
    put(&0x8035_u16.to_be_bytes());
    // Ethernet and IPv4 with the lengths of their addresses; reverse request.
    put(&[0, 1, 0x08, 0, 6, 4, 0, 3]);
    put(&mac.0);
    put(&[0; 4]);
    put(&mac.0);
    put(&[0; 4]);
    bytes
}
