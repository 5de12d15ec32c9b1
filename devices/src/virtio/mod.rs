// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Virtio 1.3 devices and the trait that a transport drives them by.

mod device;

pub use device::{
    ActivateError, Activation, ActiveQueue, DeviceSnapshot, StateError, VirtioDevice,
    VirtioInterrupt,
};
