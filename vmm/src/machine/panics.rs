// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Wiring of the panic device.
//!
//! Owns its device number and the limit on the events that a guest can cause with it.

use std::sync::Arc;

use devices::LogLimit;
use pci::{Bdf, DeviceNumber, PanicDevice, PciDevice, PciSegment};

use super::events::{EventSink, GuestEvent};
use super::place::TakenNumbers;
use super::virtio::VirtioError;
use crate::config::VmConfig;
use crate::config::vm::PVPANIC_ID;

/// The panic device and its address on the bus.
pub type PanicFunction = (Bdf, Arc<PanicDevice>);

/// Adds the device to the bus if the configuration asks for it; `taken` has device numbers in use or reserved.
/// From a guest that reports events continuously, a few are passed on, and then one per minute.
///
/// # Errors
/// No device number is free.
pub fn wire(
    config: &VmConfig,
    segment: &PciSegment,
    taken: &mut TakenNumbers,
    sink: EventSink,
) -> Result<Option<PanicFunction>, VirtioError> {
    if !config.pvpanic {
        return Ok(None);
    }
    let limit = LogLimit::default();
    let tell = Arc::new(move |event: pci::PanicEvent| {
        if limit.take().is_some() {
            sink(GuestEvent::Panicked { event: event.name() });
        }
    });
    let id = || PVPANIC_ID.to_owned();
    let rules = config.machine_platform().panic_device;
    let device = PanicDevice::with_rules(id(), tell, rules);
    let device = device.map_err(|source| VirtioError::Layout { id: id(), source })?;
    let device = Arc::new(device);
    let number = taken.take(PVPANIC_ID).and_then(|number| DeviceNumber::new(number).ok());
    let function: Arc<dyn PciDevice> = device.clone();
    let added = segment.add_device(&function, number);
    let bdf = added.map_err(|source| VirtioError::Bus { id: id(), source: source.into() })?;
    Ok(Some((bdf, device)))
}
