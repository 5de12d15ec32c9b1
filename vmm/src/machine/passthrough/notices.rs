// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What becomes of it when the host says that a device has failed, or wants it back.
//!
//! A device that has failed is gone for the guest at once, as nothing that it reads can be trusted.
//! One that is wanted back is the guest's until it has let go; the host asks again until it has it.

use std::io;
use std::sync::{Arc, Weak};

use pci::PciDevice as _;
use pci::vfio::{HostNotice, Notices, VfioPciDevice};

use super::{Roll, read};
use crate::events;
use crate::machine::events::{EventSink, GuestEvent};

/// Listens to the devices of `roll` that are reported to the answer.
///
/// # Errors
/// No descriptor or no thread.
pub fn listen(roll: Roll, sink: EventSink) -> io::Result<Notices> {
    Notices::start(Box::new(move |id, notice| {
        let devices: Vec<_> = read(&roll).iter().filter_map(Weak::upgrade).collect();
        let Some(device) = devices.iter().find(|device| device.id() == id) else { return };
        match notice {
            HostNotice::Failed => fail(device),
            HostNotice::WantedBack => {
                log::warn!("the host wants device '{id}' back: the guest is asked to let go of it");
                events::emit("vm", "passthrough-device-wanted", &[("id", id)]);
                sink(GuestEvent::DeviceWanted { id: id.to_owned() });
            }
        }
    }))
}

fn fail(device: &Arc<VfioPciDevice>) {
    if device.is_lost() {
        return;
    }
    let id = device.id();
    log::error!("device '{id}' has failed beyond repair, and is gone for the guest");
    device.lose();
    let reason = "the host reports an error that the device does not recover from";
    events::emit("vm", "passthrough-device-lost", &[("id", id), ("error", reason)]);
}
