// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The host bridge at device number 0, which has no behaviour beyond its configuration space.

use parking_lot::Mutex;

use crate::bar::{BarDecode, BarDescription};
use crate::config_space::{ConfigSpace, ConfigSpaceState, Identity};
use crate::device::{PciDevice, PciDeviceState, PciStateError};

const KIND: &str = "pci-host-bridge";
const STATE_VERSION: u32 = 1;

const VENDOR_ID_INTEL: u16 = 0x8086;
/// Device id of the host bridge, as in cloud-hypervisor.
const DEVICE_ID_VIRTUAL_HOST: u16 = 0x0d57;
const CLASS_HOST_BRIDGE: u32 = 0x06_00_00;

/// A host bridge without registers of its own.
pub struct HostBridge {
    id: String,
    config: Mutex<ConfigSpace>,
}

impl HostBridge {
    /// The host bridge of a segment.
    pub fn new(segment: u16) -> Self {
        let identity = Identity {
            vendor_id: VENDOR_ID_INTEL,
            device_id: DEVICE_ID_VIRTUAL_HOST,
            revision: 0,
            class: CLASS_HOST_BRIDGE,
            subsystem_vendor_id: 0,
            subsystem_id: 0,
        };
        Self {
            id: format!("_pci_host_bridge_{segment}"),
            config: Mutex::new(ConfigSpace::host_bridge(&identity)),
        }
    }
}

impl PciDevice for HostBridge {
    fn id(&self) -> &str {
        &self.id
    }

    fn kind(&self) -> &'static str {
        KIND
    }

    fn read_config(&self, offset: u16, data: &mut [u8]) {
        self.config.lock().read(offset, data);
    }

    fn write_config(&self, offset: u16, data: &[u8]) {
        self.config.lock().write(offset, data);
    }

    fn bars(&self) -> Vec<BarDescription> {
        Vec::new()
    }

    fn bar_decode(&self) -> BarDecode {
        BarDecode { enabled: false, ports_enabled: false, rom_enabled: false, gpas: Vec::new() }
    }

    fn place_bar(&self, _index: u8, _gpa: u64) {}

    fn bar_moved(&self, _index: u8, _gpa: Option<u64>) {}

    fn read_bar(&self, _index: u8, _offset: u64, data: &mut [u8]) {
        data.fill(0);
    }

    fn write_bar(&self, _index: u8, _offset: u64, _data: &[u8]) {}

    fn save(&self) -> Result<PciDeviceState, PciStateError> {
        PciDeviceState::encode(self, STATE_VERSION, &self.config.lock().save())
    }

    fn restore(&self, state: &PciDeviceState) -> Result<(), PciStateError> {
        let state: ConfigSpaceState = state.decode(self, STATE_VERSION)?;
        let mut config = self.config.lock();
        *config = config.restored(&state).map_err(|source| PciStateError::Device {
            id: self.id.clone(),
            source: source.into(),
        })?;
        Ok(())
    }
}
