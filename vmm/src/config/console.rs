// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! `--console`, `--serial`, `--debug-console`: output of the guest's consoles.
//!
//! Owns the families. In an option string the mode is a bare word (`tty`), or follows from
//! `file=` or `socket=`.

use std::path::PathBuf;

use super::codec::{Codec, File, Id, Int, One, Opt, Port, Toggle};
use super::enums::option_enum;
use super::error::ConfigError;
use super::family::option_family;
use super::option_string::{KeySyntax, OptionError, Options, Printer};

/// I/O port of the debug console.
pub const DEBUG_CONSOLE_PORT: u16 = 0xe9;

option_enum! {
    /// Backend of a console.
    ConsoleMode = "off|pty|tty|file|socket|null", default Off {
        /// The device is absent.
        Off = "off",
        /// A newly created pseudo-terminal.
        Pty = "pty",
        /// The terminal of this process.
        Tty = "tty",
        /// A file.
        File = "file",
        /// Clients of a Unix socket.
        Socket = "socket",
        /// Output is discarded.
        Null = "null",
    }
}

option_family! {
    /// The virtio console.
    ConsoleConfig "console" {
        /// Backend.
        mode: ConsoleMode = ConsoleMode::Tty, "" as ModeWords, required();
        /// File for mode `File`.
        file: Option<PathBuf> = None, "file" as Opt<File>;
        /// Socket for mode `Socket`, at which the VMM listens for one client at a time.
        socket: Option<PathBuf> = None, "socket" as Opt<File>;
        /// Place the device behind the virtual IOMMU.
        iommu: bool = false, "iommu" as One<Toggle>;
        /// Name of the device.
        id: Option<String> = None, "id" as Opt<Id>;
        /// PCI segment.
        pci_segment: u16 = 0, "pci_segment" as One<Int>;
        /// PCI device number.
        pci_device_id: Option<u8> = None, "pci_device_id" as Opt<Int>, range(1, 31);
    }
}

option_family! {
    /// The serial port (16550, COM1).
    SerialConfig "serial" {
        /// Backend.
        mode: ConsoleMode = ConsoleMode::Null, "" as ModeWords, required();
        /// File for mode `File`.
        file: Option<PathBuf> = None, "file" as Opt<File>;
        /// Socket for mode `Socket`, at which the VMM listens for one client at a time.
        socket: Option<PathBuf> = None, "socket" as Opt<File>;
    }
}

option_family! {
    /// The debug console, one I/O port.
    DebugConsoleConfig "debug-console" {
        /// Backend.
        mode: ConsoleMode = ConsoleMode::Off, "" as ModeWords, required();
        /// File for mode `File`.
        file: Option<PathBuf> = None, "file" as Opt<File>;
        /// I/O port.
        iobase: Option<u16> = Some(DEBUG_CONSOLE_PORT), "iobase" as Opt<Port>;
    }
}

fn validate_target(
    what: &'static str,
    mode: ConsoleMode,
    file: Option<&PathBuf>,
    socket: Option<&PathBuf>,
) -> Result<(), ConfigError> {
    let refuse = |problem: &str| {
        Err(ConfigError::Device { what, id: String::new(), problem: problem.to_owned() })
    };
    match mode {
        ConsoleMode::File if file.is_none_or(|path| path.as_os_str().is_empty()) => {
            refuse("mode File needs a file")
        }
        ConsoleMode::Socket if socket.is_none_or(|path| path.as_os_str().is_empty()) => {
            refuse("mode Socket needs a socket")
        }
        // `vm.info` reports the path of a pseudo terminal here, and clients send that back.
        ConsoleMode::Pty | ConsoleMode::File | ConsoleMode::Socket => Ok(()),
        _ if file.is_some() => refuse("file needs mode File"),
        _ if socket.is_some() => refuse("socket needs mode Socket"),
        _ => Ok(()),
    }
}

impl ConsoleConfig {
    /// Validates the options within the family.
    ///
    /// # Errors
    /// The first violated rule.
    pub fn validate(&self) -> Result<(), ConfigError> {
        validate_target("console", self.mode, self.file.as_ref(), self.socket.as_ref())
    }
}

impl SerialConfig {
    /// Validates the options within the family.
    ///
    /// # Errors
    /// The first violated rule.
    pub fn validate(&self) -> Result<(), ConfigError> {
        validate_target("serial", self.mode, self.file.as_ref(), self.socket.as_ref())
    }
}

impl DebugConsoleConfig {
    /// Validates the options within the family.
    ///
    /// # Errors
    /// The first violated rule.
    pub fn validate(&self) -> Result<(), ConfigError> {
        validate_target("debug-console", self.mode, self.file.as_ref(), None)
    }
}

/// The mode as a bare word, or implied by `file=` and `socket=`.
#[derive(Debug)]
pub struct ModeWords;

const WORDS: [(ConsoleMode, &str); 4] = [
    (ConsoleMode::Off, "off"),
    (ConsoleMode::Null, "null"),
    (ConsoleMode::Pty, "pty"),
    (ConsoleMode::Tty, "tty"),
];

fn take_mode(options: &Options<'_>) -> Result<Option<ConsoleMode>, OptionError> {
    let words = WORDS.into_iter().filter(|(_, word)| options.is_set(word));
    let paths = [(ConsoleMode::File, "file"), (ConsoleMode::Socket, "socket")]
        .into_iter()
        .filter(|(_, key)| options.is_set(key));
    let mut given = words.chain(paths);
    let first = given.next();
    if let (Some((_, first)), Some((_, second))) = (first, given.next()) {
        return Err(OptionError::Shape {
            family: options.family(),
            key: second.to_owned(),
            problem: if first == "file" || second == "file" {
                "contradicts the other destination of the text"
            } else {
                "contradicts the other mode"
            },
        });
    }
    Ok(first.map(|(mode, _)| mode))
}

fn put_mode(mode: ConsoleMode, out: &mut Printer) {
    if let Some((_, word)) = WORDS.iter().find(|(candidate, _)| *candidate == mode) {
        out.flag(word);
    }
}

impl Codec<ConsoleMode> for ModeWords {
    fn keys(_key: &'static str) -> Vec<KeySyntax> {
        WORDS.iter().map(|(_, key)| KeySyntax { key, value: None }).collect()
    }

    fn take(_key: &'static str, options: &Options<'_>) -> Result<Option<ConsoleMode>, OptionError> {
        take_mode(options)
    }

    fn put(_key: &'static str, value: &ConsoleMode, out: &mut Printer) {
        put_mode(*value, out);
    }
}
