// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Legacy devices and virtio devices.
//!
//! A device knows what it does and nothing of how the guest reaches it: not PCI, not KVM, not the
//! configuration file. Legacy devices sit on a [`bus::Bus`], virtio devices behind
//! [`virtio::VirtioDevice`].

pub mod bus;
pub mod virtio;
