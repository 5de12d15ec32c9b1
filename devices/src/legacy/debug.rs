// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Ports for debugging: the console that firmware writes to, and the POST code port.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::bus::BusDevice;
use crate::endpoint::ConsoleEndpoint;
use crate::state::StateFormat;
use crate::virtio::{DeviceSnapshot, StateError};
use crate::{LogLimit, Snapshot, log_limited};

/// Default port of the [`DebugConsole`].
pub const DEBUG_CONSOLE_PORT: u16 = 0xe9;
/// Ports that the [`DebugConsole`] takes.
pub const DEBUG_CONSOLE_LEN_BYTES: u64 = 1;
/// Port of the [`DebugPort`].
pub const DEBUG_PORT: u16 = 0x80;
/// Ports that the [`DebugPort`] takes.
pub const DEBUG_PORT_LEN_BYTES: u64 = 1;

/// Codes that are logged at once; firmware writes some hundred, and Linux uses the port to wait.
const POST_CODES: u32 = 4096;

/// What a read gives: firmware recognises the console by it, whatever port it is at.
const DEBUG_CONSOLE_MAGIC: u8 = 0xe9;

/// A port of which each written byte is a character of output.
pub struct DebugConsole {
    endpoint: Arc<ConsoleEndpoint>,
}

impl DebugConsole {
    /// A console whose output goes to `endpoint`.
    pub fn new(endpoint: Arc<ConsoleEndpoint>) -> Self {
        Self { endpoint }
    }
}

impl BusDevice for DebugConsole {
    fn read(&self, _offset: u64, data: &mut [u8]) {
        data.fill(DEBUG_CONSOLE_MAGIC);
    }

    fn write(&self, _offset: u64, data: &[u8]) {
        self.endpoint.write(data);
    }
}

const DEBUG_CONSOLE_STATE: StateFormat = StateFormat { kind: "debug-console", newest: 1 };

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct DebugConsoleState {}

impl Snapshot for DebugConsole {
    fn save(&self) -> DeviceSnapshot {
        DEBUG_CONSOLE_STATE.encode(&DebugConsoleState {})
    }

    fn restore(&self, state: &DeviceSnapshot) -> Result<(), StateError> {
        DEBUG_CONSOLE_STATE.decode::<DebugConsoleState>(state).map(|_| ())
    }
}

/// The port of the POST codes: writes go to the log at debug level and have no other effect.
pub struct DebugPort {
    log: LogLimit,
}

impl Default for DebugPort {
    fn default() -> Self {
        Self { log: LogLimit::with_burst(POST_CODES) }
    }
}

impl BusDevice for DebugPort {
    fn read(&self, _offset: u64, data: &mut [u8]) {
        data.fill(0xff);
    }

    fn write(&self, _offset: u64, data: &[u8]) {
        log_limited!(self.log, Debug, "guest wrote {data:02x?} to the debug port");
    }
}
