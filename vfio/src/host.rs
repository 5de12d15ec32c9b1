// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The interface to a host function, implemented by VFIO and by fakes.
//!
//! Owns the trait that [`super::VfioFunction`] and the tests' fake implement.
//! The kernel filters every access again; nothing here is a security boundary towards the host.

use std::io;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use super::error::VfioError;
use super::mapping::BarMapping;
use super::migration::MigrationPort;

/// Interrupt mechanism of a function, which uses one at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum InterruptKind {
    /// Interrupt pin.
    Intx,
    /// MSI.
    Msi,
    /// MSI-X.
    Msix,
}

/// An event that the host reports for a function.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum DeviceEvent {
    /// The function has failed beyond repair.
    Failed,
    /// The host requests the function back, and waits for it.
    WantedBack,
}

/// A BAR of the host's function.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HostBar {
    /// Length in bytes.
    pub len_bytes: u64,
    /// The ranges that can be mapped into a process; whole host pages.
    pub mappable: Vec<Range<u64>>,
}

/// An open function of the host.
///
/// All methods may be called from several vCPUs concurrently. Reads that the host refuses return ones; such
/// writes are dropped.
pub trait HostFunction: MigrationPort {
    /// Length of its configuration space in bytes: 256 or 4096, or one less for some mediated devices.
    fn config_len_bytes(&self) -> u16;
    /// Reads configuration space.
    fn read_config(&self, offset: u16, data: &mut [u8]);
    /// Writes configuration space.
    fn write_config(&self, offset: u16, data: &[u8]);
    /// The BAR, if it exists; a 64-bit BAR has its first index.
    fn bar(&self, index: u8) -> Option<HostBar>;
    /// Reads a BAR.
    fn read_bar(&self, index: u8, offset: u64, data: &mut [u8]);
    /// Writes a BAR.
    fn write_bar(&self, index: u8, offset: u64, data: &[u8]);
    /// Length of its expansion ROM in bytes; zero if it has none that can be read.
    fn rom_len_bytes(&self) -> u64;
    /// Reads its expansion ROM, of which the end may be missing.
    ///
    /// # Errors
    /// The host refuses.
    fn read_rom(&self) -> io::Result<Vec<u8>>;
    /// Maps a part of a BAR into this process, where huge pages are possible: see [`BarMapping`].
    ///
    /// # Errors
    /// The host refuses.
    fn map_bar(&self, index: u8, range: &Range<u64>) -> io::Result<Arc<BarMapping>>;
    /// Number of interrupts of a kind; zero if not supported.
    fn interrupts_count(&self, kind: InterruptKind) -> u32;
    /// Connects interrupts to `events`, in order. No other kind may be connected.
    ///
    /// # Errors
    /// The host refuses, usually as interrupt vectors are exhausted.
    fn connect(&self, kind: InterruptKind, events: &[BorrowedFd<'_>]) -> Result<(), VfioError>;
    /// Has the host unmask the pin whenever `event` is signalled; false if that is not supported, and the
    /// caller must use [`HostFunction::unmask_pin`].
    ///
    /// # Errors
    /// The host refuses.
    fn connect_resample(&self, event: BorrowedFd<'_>) -> Result<bool, VfioError>;
    /// Unmasks the pin.
    ///
    /// # Errors
    /// The host refuses.
    fn unmask_pin(&self) -> Result<(), VfioError>;
    /// Has the host signal `event` for this kind of event; false if not supported.
    ///
    /// # Errors
    /// The host refuses.
    fn connect_device_event(
        &self,
        notice: DeviceEvent,
        event: BorrowedFd<'_>,
    ) -> Result<bool, VfioError>;
    /// Disconnects interrupts of a kind.
    ///
    /// # Errors
    /// The host refuses.
    fn disconnect(&self, kind: InterruptKind) -> Result<(), VfioError>;
    /// Resets the function. Does nothing if the host knows no way, and says so in the log.
    ///
    /// # Errors
    /// There is one, and it has failed.
    fn reset(&self) -> Result<(), VfioError>;
    /// Tells whether the guest uses the function: if so, it is not reset for the sake of others on its bus. May wait for such a
    /// reset.
    fn set_in_use(&self, _is_used: bool) {}
    /// Tells whether it is left to a call into the kernel that has not returned: it must not be opened again meanwhile, nor reset
    /// for the sake of others.
    fn note_left(&self, _is_left: bool) {}
}
