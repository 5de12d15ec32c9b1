// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The panic device (pvpanic-pci, QEMU's `docs/specs/pvpanic.rst`), with which a guest reports a kernel panic.
//!
//! Owns one register: reads return the events that the device supports, writes report an event. The device passes
//! events to its sink and must never stop or change the guest itself.

use std::sync::Arc;

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use crate::bar::{BarDecode, BarDescription, BarKind};
use crate::config_space::{ConfigError, ConfigSpace, ConfigSpaceState, Identity, register};
use crate::device::{PciDevice, PciDeviceState, PciStateError};

/// Kind of the function in saved state.
pub const PANIC_DEVICE_KIND: &str = "pvpanic-pci";
/// Version of the saved state that is written, and the newest that is read.
const VERSION: u32 = 1;
const VENDOR_ID: u16 = 0x1b36;
const DEVICE_ID: u16 = 0x0011;
const REVISION: u8 = 1;
/// Base system peripheral, other.
const CLASS: u32 = 0x08_80_00;
const BAR_INDEX: u8 = 0;
/// The register has one byte; a memory BAR has 16 at least.
const BAR_LEN_BYTES: u64 = 16;
const REGISTER: u64 = 0;
const PANICKED: u8 = 1 << 0;
const CRASH_LOADED: u8 = 1 << 1;

/// An event that a guest reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PanicEvent {
    /// The guest's kernel has panicked.
    Panicked,
    /// The guest's kernel has panicked, and a crash kernel takes over.
    CrashLoaded,
    /// A value that the device does not list as supported.
    Unknown,
}

impl PanicEvent {
    fn of(value: u8) -> Self {
        match value {
            PANICKED => Self::Panicked,
            CRASH_LOADED => Self::CrashLoaded,
            _ => Self::Unknown,
        }
    }

    /// Name of the event, as in cloud-hypervisor.
    pub fn name(self) -> &'static str {
        match self {
            Self::Panicked => "panic",
            Self::CrashLoaded => "crash_loaded",
            Self::Unknown => "unknown_event",
        }
    }
}

/// What a platform decides about the command register of a panic device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PanicDeviceRules {
    /// Its value at reset.
    pub command_at_reset: u16,
    /// Bits that guests can write, in addition to those of every function.
    pub command_writable: u16,
}

/// The rules for this program's own guests.
pub const GODWIT_PANIC_DEVICE: PanicDeviceRules =
    PanicDeviceRules { command_at_reset: 0, command_writable: 0 };

/// Called with each event on the thread of the vCPU that reported it; must not block.
pub type PanicSink = Arc<dyn Fn(PanicEvent) + Send + Sync>;

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct PanicDeviceState {
    config: ConfigSpaceState,
}

/// A panic device.
pub struct PanicDevice {
    id: String,
    config: Mutex<ConfigSpace>,
    sink: PanicSink,
}

impl PanicDevice {
    /// A device that passes its events to `sink`.
    ///
    /// # Errors
    /// The configuration space cannot be built, which is a programming error.
    pub fn new(id: String, sink: PanicSink) -> Result<Self, ConfigError> {
        Self::with_rules(id, sink, GODWIT_PANIC_DEVICE)
    }

    /// Like [`PanicDevice::new`], by the rules of a platform.
    ///
    /// # Errors
    /// As [`PanicDevice::new`].
    pub fn with_rules(
        id: String,
        sink: PanicSink,
        rules: PanicDeviceRules,
    ) -> Result<Self, ConfigError> {
        let mut config = ConfigSpace::endpoint(&Identity {
            vendor_id: VENDOR_ID,
            device_id: DEVICE_ID,
            revision: REVISION,
            class: CLASS,
            subsystem_vendor_id: 0,
            subsystem_id: 0,
        });
        config.add_bar(BarDescription {
            index: BAR_INDEX,
            kind: BarKind::Memory32,
            prefetchable: false,
            len_bytes: BAR_LEN_BYTES,
        })?;
        config.allow(register::COMMAND, &rules.command_writable.to_le_bytes());
        config.put(register::COMMAND, &rules.command_at_reset.to_le_bytes());
        Ok(Self { id, config: Mutex::new(config), sink })
    }
}

impl PciDevice for PanicDevice {
    fn id(&self) -> &str {
        &self.id
    }

    fn kind(&self) -> &'static str {
        PANIC_DEVICE_KIND
    }

    fn read_config(&self, offset: u16, data: &mut [u8]) {
        self.config.lock().read(offset, data);
    }

    fn write_config(&self, offset: u16, data: &[u8]) {
        self.config.lock().write(offset, data);
    }

    fn bars(&self) -> Vec<BarDescription> {
        self.config.lock().bars().collect()
    }

    fn bar_decode(&self) -> BarDecode {
        self.config.lock().bar_decode()
    }

    fn place_bar(&self, index: u8, gpa: u64) {
        self.config.lock().set_bar_gpa(index, gpa);
    }

    fn bar_moved(&self, _index: u8, _gpa: Option<u64>) {}

    fn read_bar(&self, index: u8, offset: u64, data: &mut [u8]) {
        data.fill(0);
        if (index, offset) == (BAR_INDEX, REGISTER)
            && let Some(register) = data.first_mut()
        {
            *register = PANICKED | CRASH_LOADED;
        }
    }

    fn write_bar(&self, index: u8, offset: u64, data: &[u8]) {
        if (index, offset) == (BAR_INDEX, REGISTER)
            && let Some(value) = data.first()
        {
            (self.sink)(PanicEvent::of(*value));
        }
    }

    fn save(&self) -> Result<PciDeviceState, PciStateError> {
        let config = self.config.lock().save();
        PciDeviceState::encode(self, VERSION, &PanicDeviceState { config })
    }

    fn restore(&self, state: &PciDeviceState) -> Result<(), PciStateError> {
        let state: PanicDeviceState = state.decode(self, VERSION)?;
        let mut config = self.config.lock();
        let restored = config.restored(&state.config).map_err(|source| PciStateError::Device {
            id: self.id.clone(),
            source: source.into(),
        })?;
        *config = restored;
        Ok(())
    }
}

#[cfg(test)]
#[expect(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    fn device() -> (PanicDevice, Arc<Mutex<Vec<PanicEvent>>>) {
        let heard = Arc::new(Mutex::new(Vec::new()));
        let hear = Arc::clone(&heard);
        let sink: PanicSink = Arc::new(move |event| hear.lock().push(event));
        (PanicDevice::new("__pvpanic".to_owned(), sink).unwrap(), heard)
    }

    #[test]
    fn the_register_lists_events_and_reports_them() {
        let (device, heard) = device();
        let mut ids = [0; 4];
        device.read_config(0, &mut ids);
        assert_eq!(ids, [0x36, 0x1b, 0x11, 0]);
        let mut register = [0xff; 4];
        device.read_bar(0, 0, &mut register);
        assert_eq!(register, [3, 0, 0, 0]);
        device.read_bar(0, 1, &mut register);
        assert_eq!(register, [0; 4]);
        device.read_bar(0, 0, &mut []);
        for value in [1, 2, 3, 0] {
            device.write_bar(0, 0, &[value]);
        }
        device.write_bar(0, 1, &[1]);
        device.write_bar(1, 0, &[1]);
        device.write_bar(0, 0, &[]);
        let names: Vec<_> = heard.lock().iter().map(|event| event.name()).collect();
        assert_eq!(names, ["panic", "crash_loaded", "unknown_event", "unknown_event"]);
    }

    #[test]
    fn the_bar_address_is_saved_and_restored() {
        let (device, _) = device();
        device.place_bar(0, 0xc000_0000);
        device.write_config(4, &[2, 0]);
        let saved = device.save().unwrap();
        let (second, heard) = self::device();
        assert_ne!(second.bar_decode(), device.bar_decode());
        second.restore(&saved).unwrap();
        assert_eq!(second.bar_decode(), device.bar_decode());
        assert!(second.bar_decode().enabled);
        let mut other = saved.clone();
        other.version = 2;
        assert!(matches!(second.restore(&other), Err(PciStateError::Version { .. })));
        assert!(heard.lock().is_empty());
    }
}
