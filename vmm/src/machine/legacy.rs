// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Wiring of the devices at fixed ports.
//!
//! Owns which of them a machine has and where. What they do is up to the devices.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use arch::acpi::RegisterPlace;
use arch::layout;
use devices::Snapshot;
use devices::bus::{BusDevice, BusError};
use devices::legacy::{
    CMOS_LEN_BYTES, Cmos, DEBUG_CONSOLE_LEN_BYTES, DEBUG_PORT_LEN_BYTES, DebugConsole, DebugPort,
    FirmwareOutput, GED_CPU_DEVICES_CHANGED, GED_GENERATION_CHANGED, GED_MEMORY_DEVICES_CHANGED,
    GED_PCI_DEVICES_CHANGED, GED_REGISTER_LEN_BYTES, GedDevice, GenerationId, HostClock, I8042,
    I8042_DATA_PORTS, I8042_LEN_BYTES, PM_TIMER_LEN_BYTES, POWER_CONTROL_LEN_BYTES, PmTimer,
    PowerControl, SERIAL_LEN_BYTES, Serial, SerialError,
};
use devices::virtio::{DeviceSnapshot, StateError};
use hypervisor::Vm;
use hypervisor::irq::IrqError;
use memory::GuestRam;
use thiserror::Error;

use super::consoles::Consoles;
use super::events::Power;
use super::space::AddressSpace;
use super::state::GENERATION_ID;
use crate::platform::PortRules;

/// Why a legacy device cannot be created.
#[derive(Debug, Error)]
pub enum LegacyError {
    /// Its ports or addresses are taken.
    #[error("cannot place a legacy device")]
    Bus(#[from] BusError),
    /// Its interrupt line is not available.
    #[error("cannot connect the interrupt of a legacy device")]
    Irq(#[from] IrqError),
    /// The eventfd of its interrupt cannot be duplicated.
    #[error("cannot share the interrupt of a legacy device")]
    Event(#[source] std::io::Error),
    /// The serial port cannot be created.
    #[error("cannot make the serial port")]
    Serial(#[from] SerialError),
}

/// What of the legacy devices is not at the same place in every machine.
#[derive(Clone, Copy, Debug)]
pub struct FixedPlaces {
    /// Port of the debug console.
    pub debug_port: u16,
    /// Interrupt line of the event device.
    pub ged_gsi: u32,
    /// Register of the event device.
    pub ged: RegisterPlace,
    /// Ports that not every machine has.
    pub ports: PortRules,
}

/// The legacy devices of a machine.
pub struct LegacyDevices {
    serial: Option<Arc<Serial>>,
    ged: Arc<GedDevice>,
    timer: Arc<PmTimer>,
    generation: GenerationId,
    /// The devices with saved state, by name.
    stateful: BTreeMap<&'static str, Arc<dyn Snapshot + Send + Sync>>,
    /// Keep the interrupt lines connected.
    _lines: Vec<hypervisor::InterruptLine>,
}

impl LegacyDevices {
    /// Creates the devices and places them in `space`.
    ///
    /// # Errors
    /// Names the address range or resource.
    pub fn wire(
        vm: &Vm,
        space: &AddressSpace,
        ram: &GuestRam,
        consoles: &Consoles,
        fixed: FixedPlaces,
        power: &Arc<Power>,
    ) -> Result<Self, LegacyError> {
        let mut lines = Vec::new();
        let mut stateful: BTreeMap<&'static str, Arc<dyn Snapshot + Send + Sync>> = BTreeMap::new();
        let mut line = |gsi| -> Result<_, LegacyError> {
            let line = vm.create_line(gsi)?;
            let event = line.event().try_clone().map_err(LegacyError::Event)?;
            lines.push(line);
            Ok(event)
        };
        let mut place = |name, port, len_bytes, device: Arc<dyn BusDevice>, state| {
            stateful.insert(name, state);
            space.insert_ports(port, len_bytes, name, device)
        };

        let serial = match &consoles.serial {
            Some(endpoint) => {
                let serial =
                    Arc::new(Serial::new(Arc::clone(endpoint), line(layout::SERIAL_GSI)?)?);
                place(
                    "serial",
                    layout::SERIAL_PORT,
                    SERIAL_LEN_BYTES,
                    serial.clone(),
                    serial.clone(),
                )?;
                Some(serial)
            }
            None => None,
        };
        let (low, high) = sizes(ram);
        let cmos = Arc::new(Cmos::new(low, high, Box::new(HostClock)));
        place("cmos", layout::CMOS_PORT, CMOS_LEN_BYTES, cmos.clone(), cmos)?;
        if fixed.ports.keyboard_data {
            let i8042 = Arc::new(I8042::new(power.clone()));
            place("i8042", layout::I8042_PORT, I8042_LEN_BYTES, i8042.clone(), i8042)?;
        } else {
            let i8042 = Arc::new(I8042::without_data_port(power.clone()));
            let port = layout::I8042_PORT + I8042_DATA_PORTS;
            let len_bytes = I8042_LEN_BYTES - u64::from(I8042_DATA_PORTS);
            place("i8042", port, len_bytes, i8042.clone(), i8042)?;
        }
        let control = Arc::new(PowerControl::new(power.clone()));
        place(
            "acpi-power",
            layout::ACPI_POWER_PORT,
            POWER_CONTROL_LEN_BYTES,
            control.clone(),
            control,
        )?;
        let timer = Arc::new(PmTimer::new());
        place(
            "pm-timer",
            layout::ACPI_PM_TIMER_PORT,
            PM_TIMER_LEN_BYTES,
            timer.clone(),
            timer.clone(),
        )?;
        let ged = Arc::new(GedDevice::new(line(fixed.ged_gsi)?));
        if let Some(endpoint) = &consoles.debug {
            let console = Arc::new(DebugConsole::new(Arc::clone(endpoint)));
            place(
                "debug-console",
                fixed.debug_port,
                DEBUG_CONSOLE_LEN_BYTES,
                console.clone(),
                console,
            )?;
        }
        if let Some(port) = fixed.ports.firmware_output {
            let output = Arc::<FirmwareOutput>::default();
            space.insert_ports(port, DEBUG_PORT_LEN_BYTES, "firmware output", output)?;
        }
        stateful.insert("ged", ged.clone());
        space.insert_registers(fixed.ged, GED_REGISTER_LEN_BYTES, "ged", ged.clone())?;
        space.insert_ports(
            layout::POST_PORT,
            DEBUG_PORT_LEN_BYTES,
            "post-code",
            Arc::<DebugPort>::default(),
        )?;
        let generation = GenerationId::new(layout::GENERATION_ID_GPA);
        Ok(Self { serial, ged, timer, generation, stateful, _lines: lines })
    }

    /// Presses the power button.
    pub fn press_power_button(&self) {
        self.ged.set_power_button();
    }

    /// Notifies the guest that PCI devices were added or are to be removed.
    pub fn notify_pci_changed(&self) {
        self.ged.notify(GED_PCI_DEVICES_CHANGED);
    }

    /// Notifies the guest that vCPUs were added or are to be removed.
    pub fn notify_cpus_changed(&self) {
        self.ged.notify(GED_CPU_DEVICES_CHANGED);
    }

    /// Notifies the guest that memory was added.
    pub fn notify_memory_changed(&self) {
        self.ged.notify(GED_MEMORY_DEVICES_CHANGED);
    }

    /// Number of the newest ACPI event, if the guest has not read all of them.
    pub fn unread_event(&self) -> Option<u64> {
        self.ged.unread()
    }

    /// Raises the interrupt of unread ACPI events again.
    pub fn repeat_unread_events(&self) {
        self.ged.resume();
    }

    /// The generation ID device; a booting guest gets an ID once it is present here.
    pub fn generation(&self) -> &GenerationId {
        &self.generation
    }

    /// Notifies the guest that its generation ID has changed.
    pub fn notify_generation_changed(&self) {
        self.ged.notify(GED_GENERATION_CHANGED);
    }

    /// Stops input to the guest.
    pub fn pause(&self) {
        if let Some(serial) = &self.serial {
            serial.pause();
        }
    }

    /// Resumes input to the guest.
    pub fn resume(&self) {
        self.ged.resume();
        if let Some(serial) = &self.serial {
            serial.resume();
        }
    }

    /// Marks the time at which the guest's other clocks were read, as of which those of legacy devices are
    /// saved.
    pub fn clock_was_read(&self) {
        self.timer.read_at(Instant::now());
    }

    /// Advances the timers by the guest time `passed` between the saved state and `at`.
    pub fn advance(&self, passed: Duration, at: Instant) {
        self.timer.advance(passed, at);
    }

    /// Saved states by name.
    pub fn save(&self) -> BTreeMap<String, DeviceSnapshot> {
        let all = self.stateful.iter().map(|(name, device)| ((*name).to_owned(), device.save()));
        let generation = self.generation.gpa().map(|_| self.generation.save());
        all.chain(generation.map(|state| (GENERATION_ID.to_owned(), state))).collect()
    }

    /// Restores the devices; the states must match the devices exactly.
    ///
    /// # Errors
    /// Names the device.
    pub fn restore(
        &self,
        states: &BTreeMap<String, DeviceSnapshot>,
    ) -> Result<(), LegacyStateError> {
        for name in states.keys() {
            if name != GENERATION_ID && !self.stateful.contains_key(name.as_str()) {
                return Err(LegacyStateError::Unknown(name.clone()));
            }
        }
        for (name, device) in &self.stateful {
            let state = states.get(*name).ok_or(LegacyStateError::Missing(name))?;
            device.restore(state).map_err(|source| LegacyStateError::Refused { name, source })?;
        }
        // A guest that booted without a generation ID has none here either.
        self.generation.set_present(false);
        if let Some(state) = states.get(GENERATION_ID) {
            let refused = |source| LegacyStateError::Refused { name: GENERATION_ID, source };
            self.generation.restore(state).map_err(refused)?;
        }
        Ok(())
    }
}

/// Why the saved states of legacy devices are refused.
#[derive(Debug, Error)]
pub enum LegacyStateError {
    /// The state names an unknown device.
    #[error("the state is that of a machine with a device '{0}', which this one does not have")]
    Unknown(String),
    /// The state of a device is missing.
    #[error("there is no state for the device '{0}'")]
    Missing(&'static str),
    /// A device refuses its state.
    #[error("the device '{name}' refused its state")]
    Refused {
        /// Name of the device.
        name: &'static str,
        /// The cause.
        #[source]
        source: StateError,
    },
}

/// RAM sizes in bytes below and above 4 GiB.
fn sizes(ram: &GuestRam) -> (u64, u64) {
    let now = ram.regions().iter().filter(|region| region.block_bytes().is_none());
    now.fold((0, 0), |(low, high), region| {
        if region.gpa() < layout::LOW_RAM_END_GPA {
            (low + region.len_bytes(), high)
        } else {
            (low, high + region.len_bytes())
        }
    })
}
