// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The keyboard controller (i8042), reduced to the one command that operating systems still use: reset.
//!
//! It has no keyboard and no mouse.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::PowerEvents;
use crate::bus::BusDevice;
use crate::state::StateFormat;
use crate::virtio::{DeviceSnapshot, StateError};
use crate::{LogLimit, Snapshot, log_limited};

/// First port of the [`I8042`].
pub const I8042_PORT: u16 = 0x60;
/// Number of ports of the [`I8042`]: data, system control port B and command.
pub const I8042_LEN_BYTES: u64 = 5;

const SYSTEM_CONTROL_B_OFFSET: u64 = 1;
const COMMAND_OFFSET: u64 = 4;
/// Pulses output line 0, which is connected to the reset pin of the CPUs.
const COMMAND_RESET: u8 = 0xfe;
/// The output of timer 2 is high, so that loops waiting for it end.
const TIMER_2_OUTPUT: u8 = 0x20;

/// Number of ports below those of an [`I8042`] without a data port.
pub const I8042_DATA_PORTS: u16 = 1;

/// A keyboard controller whose only function is to reset the machine.
pub struct I8042 {
    events: Arc<dyn PowerEvents>,
    /// Ports at the start that there are not.
    missing: u64,
    log: LogLimit,
}

impl I8042 {
    /// A controller that reports to `events`.
    pub fn new(events: Arc<dyn PowerEvents>) -> Self {
        Self { events, missing: 0, log: LogLimit::default() }
    }

    /// A controller without a data port: its first port is the next one, and it has one port fewer.
    pub fn without_data_port(events: Arc<dyn PowerEvents>) -> Self {
        Self { missing: I8042_DATA_PORTS.into(), ..Self::new(events) }
    }
}

impl BusDevice for I8042 {
    fn read(&self, offset: u64, data: &mut [u8]) {
        // Status 0: no data to read, ready for a command.
        data.fill(0);
        let offset = offset.saturating_add(self.missing);
        if let (SYSTEM_CONTROL_B_OFFSET, Some(first)) = (offset, data.first_mut()) {
            *first = TIMER_2_OUTPUT;
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        if offset.saturating_add(self.missing) == COMMAND_OFFSET && data == [COMMAND_RESET] {
            log_limited!(self.log, Info, "guest asked for a reset by the keyboard controller");
            self.events.reset();
        }
    }
}

const I8042_STATE: StateFormat = StateFormat { kind: "i8042", newest: 1 };

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct I8042State {}

impl Snapshot for I8042 {
    fn save(&self) -> DeviceSnapshot {
        I8042_STATE.encode(&I8042State {})
    }

    fn restore(&self, state: &DeviceSnapshot) -> Result<(), StateError> {
        I8042_STATE.decode::<I8042State>(state).map(|_| ())
    }
}
