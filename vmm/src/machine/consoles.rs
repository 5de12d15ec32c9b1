// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Host backends of a machine's consoles: terminals, files, sockets.
//!
//! Owns the endpoints. They outlive a reboot, so that clients stay attached.

use std::path::PathBuf;
use std::sync::Arc;

use devices::endpoint::{ConsoleEndpoint, EndpointError};
use thiserror::Error;

use crate::config::{ConsoleMode, VmConfig};
use crate::panicking;

/// Why a console cannot be opened.
#[derive(Debug, Error)]
#[error("cannot open the {console}")]
pub struct ConsoleError {
    /// The console.
    console: &'static str,
    /// The cause.
    #[source]
    source: EndpointError,
}

/// The console endpoints of a VM; they outlive a reboot.
#[derive(Clone, Default)]
pub struct Consoles {
    /// Endpoint of the serial port.
    pub serial: Option<Arc<ConsoleEndpoint>>,
    /// Endpoint of the virtio console.
    pub virtio: Option<Arc<ConsoleEndpoint>>,
    /// Endpoint of the debug console.
    pub debug: Option<Arc<ConsoleEndpoint>>,
}

fn open(
    console: &'static str,
    mode: ConsoleMode,
    file: Option<&PathBuf>,
    socket: Option<&PathBuf>,
) -> Result<Option<Arc<ConsoleEndpoint>>, ConsoleError> {
    let opened = match (mode, file, socket) {
        (ConsoleMode::Off, ..) => return Ok(None),
        (ConsoleMode::Pty, ..) => ConsoleEndpoint::pty(),
        (ConsoleMode::Tty, ..) => ConsoleEndpoint::tty(),
        (ConsoleMode::File, Some(path), _) => ConsoleEndpoint::file(path),
        (ConsoleMode::Socket, _, Some(path)) => ConsoleEndpoint::socket(path),
        _ => ConsoleEndpoint::null(),
    };
    opened
        .map(|endpoint| Some(Arc::new(endpoint)).inspect(panicking::note_console))
        .map_err(|source| ConsoleError { console, source })
}

impl Consoles {
    /// Restores terminals and removes sockets, for a process that exits without dropping the endpoints.
    pub fn close(&self) {
        let all = [&self.serial, &self.virtio, &self.debug];
        all.into_iter().flatten().for_each(|endpoint| endpoint.close());
    }

    /// Opens the configured endpoints, and writes the paths of new pseudo terminals into the configuration.
    ///
    /// # Errors
    /// Names the console.
    pub fn open(config: &mut VmConfig) -> Result<Self, ConsoleError> {
        let VmConfig { serial, console, debug_console, .. } = config;
        let consoles = Self {
            serial: open(
                "serial console",
                serial.mode,
                serial.file.as_ref(),
                serial.socket.as_ref(),
            )?,
            virtio: open("console", console.mode, console.file.as_ref(), console.socket.as_ref())?,
            debug: open("debug console", debug_console.mode, debug_console.file.as_ref(), None)?,
        };
        let pty = |endpoint: &Option<Arc<ConsoleEndpoint>>| {
            endpoint.as_ref().and_then(|end| end.pty_path().map(ToOwned::to_owned))
        };
        for (mode, file, endpoint) in [
            (serial.mode, &mut serial.file, &consoles.serial),
            (console.mode, &mut console.file, &consoles.virtio),
            (debug_console.mode, &mut debug_console.file, &consoles.debug),
        ] {
            if mode == ConsoleMode::Pty {
                *file = pty(endpoint);
            }
        }
        Ok(consoles)
    }
}
