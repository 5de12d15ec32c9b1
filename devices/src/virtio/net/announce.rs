// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Announcement of a migrated guest to the network (reverse ARP).
//!
//! Owns the frame and how often it is sent. A guest that can announce itself is asked to do so as well, since
//! it knows all its addresses. Both happen a few times, because a single frame gets lost where a bridge
//! has not opened the port yet. It must never send for a guest that has left: each time the tap is checked
//! anew, and it is not held in between.

use std::io::Write;
use std::sync::{Arc, Weak};
use std::time::Duration;

use log::debug;

use super::config::Link;
use super::tap::{HEADER_BYTES, MacAddress};

/// Minimum length of an Ethernet frame, without its checksum.
const FRAME_BYTES: usize = 60;

/// Delays before the repeated announcements: the first one is sent at once, the last within a second, by
/// when a bridge has learned of a new port.
const PAUSES_MS: [u64; 4] = [50, 150, 250, 350];

/// Announces a guest on the network; a handle for the VMM while the transport owns the device.
#[derive(Clone)]
pub struct Announcer {
    pub(super) link: Arc<Link>,
}

impl Announcer {
    /// Updates the switches' forwarding tables for the guest's MAC address, and asks the driver, if it
    /// supports that, to announce its other addresses (virtio 1.3, 5.1.6.5.4).
    pub fn announce(&self) {
        announce_once(&self.link);
        // Repetitions are not waited for, as the guest is about to run.
        let link = Arc::downgrade(&self.link);
        if let Err(error) = stoppable_thread::spawn("announce", move || repeat(&link)) {
            debug!("only one announcement is sent: {error}");
        }
    }
}

/// Sends the repetitions, until the device or its tap is gone.
fn repeat(link: &Weak<Link>) {
    for pause_ms in PAUSES_MS {
        std::thread::sleep(Duration::from_millis(pause_ms));
        match link.upgrade() {
            Some(link) if announce_once(&link) => {}
            _ => return,
        }
    }
}

/// Sends a frame and notifies the driver; false without a tap.
fn announce_once(link: &Link) -> bool {
    let mac = link.state().mac;
    let Some(tap) = link.tap.pair(0) else { return false };
    let mut file = tap.file();
    if let Err(error) = file.write(&announcement(mac)) {
        debug!("cannot send an announcement for {mac}: {error}");
    }
    link.ask_to_announce();
    true
}

/// A reverse ARP request by the guest for itself (RFC 903), with the tap's header. It needs no IP address
/// and gets no reply.
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
    // Ethernet and IPv4 with their address lengths; reverse request.
    put(&[0, 1, 0x08, 0, 6, 4, 0, 3]);
    put(&mac.0);
    put(&[0; 4]);
    put(&mac.0);
    put(&[0; 4]);
    bytes
}
