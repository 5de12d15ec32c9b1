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
/// Number of ports of the [`DebugConsole`].
pub const DEBUG_CONSOLE_LEN_BYTES: u64 = 1;
/// Port of the [`DebugPort`].
pub const DEBUG_PORT: u16 = 0x80;
/// Number of ports of the [`DebugPort`].
pub const DEBUG_PORT_LEN_BYTES: u64 = 1;

/// Maximum number of codes logged in a burst; firmware writes some hundred, and Linux uses the port for
/// delays.
const POST_CODES: u32 = 4096;

/// Value read from the port, by which firmware detects the console.
const DEBUG_CONSOLE_MAGIC: u8 = 0xe9;

/// A port to which output is written byte by byte.
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

/// The port to which firmware writes its messages, as some platforms have it: it answers as the debug console does, and
/// what is written is logged at debug level, if at all.
pub struct FirmwareOutput {
    log: LogLimit,
}

impl Default for FirmwareOutput {
    fn default() -> Self {
        Self { log: LogLimit::with_burst(POST_CODES) }
    }
}

impl BusDevice for FirmwareOutput {
    fn read(&self, _offset: u64, data: &mut [u8]) {
        data.fill(DEBUG_CONSOLE_MAGIC);
    }

    fn write(&self, _offset: u64, data: &[u8]) {
        log_limited!(self.log, Debug, "firmware wrote {data:02x?} to its debug port");
    }
}

/// The POST code port: writes are logged at debug level, and otherwise ignored.
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
