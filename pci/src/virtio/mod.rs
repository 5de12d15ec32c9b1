// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The virtio 1.x transport over PCI (virtio 1.3, 4.1), without legacy parts.
//!
//! ```text
//!   VirtioPciDevice ── ConfigSpace (capabilities, BAR, command)
//!        │        ├── Msix ── MsiVector
//!        │        ├── PciInterrupt  which event raises which vector; no lock
//!        │        └── Notify        kick eventfds, ioeventfds; trapped kicks take no lock
//!        └── Transport (one lock) ── status, queue registers ── Box<dyn VirtioDevice>
//! ```
//!
//! Knows the registers and the life cycle; never what a device does with its queues.

mod bus_master;
mod common;
mod identity;
mod interrupt;
mod layout;
mod notify;
mod pci_device;
mod queue;
mod rules;
mod shown_config;
mod state;
mod status;
#[cfg(test)]
mod tests;
mod transport;

pub use layout::{BarWidth, VIRTIO_QUEUES_MAX_COUNT};
pub use pci_device::{VirtioPciDevice, VirtioPciError, VirtioPciForm};
pub use queue::QueueError;
pub use rules::{
    BarStructure, BusMastering, GODWIT as GODWIT_VIRTIO_PCI, VirtioCapability, VirtioPciRules,
};
pub use state::{
    CommonState, NARROW_BAR_VERSION, QueueProgressState, QueueRegisterState, VIRTIO_PCI_KIND,
    VirtioPciState, VirtioStateError,
};
pub use transport::{Rings, RunningQueues};
