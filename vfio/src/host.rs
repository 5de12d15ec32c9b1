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

/// Ways in which a function interrupts. A function uses one at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum InterruptKind {
    /// The pin.
    Intx,
    /// MSI.
    Msi,
    /// MSI-X.
    Msix,
}

/// What the host tells of a function by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum DeviceEvent {
    /// It has failed beyond repair.
    Failed,
    /// The host wants it back, and waits for it.
    WantedBack,
}

/// A BAR as the host has it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HostBar {
    /// Its length.
    pub len_bytes: u64,
    /// The parts of it that can be mapped into a process; whole host pages.
    pub mappable: Vec<Range<u64>>,
}

/// A function of the host that was opened for this VM.
///
/// All methods may be called from several vCPUs at once. Accesses that the host refuses read as ones
/// and are lost when written.
pub trait HostFunction: MigrationPort {
    /// Length of its configuration space: 256 or 4096, or a byte less of some mediated devices.
    fn config_len_bytes(&self) -> u16;
    /// Fills `data` from its configuration space.
    fn read_config(&self, offset: u16, data: &mut [u8]);
    /// Writes to its configuration space.
    fn write_config(&self, offset: u16, data: &[u8]);
    /// Its BAR, if it has that one; a 64-bit BAR is at its first index.
    fn bar(&self, index: u8) -> Option<HostBar>;
    /// Fills `data` from a BAR.
    fn read_bar(&self, index: u8, offset: u64, data: &mut [u8]);
    /// Writes to a BAR.
    fn write_bar(&self, index: u8, offset: u64, data: &[u8]);
    /// Maps a part of a BAR into this process.
    ///
    /// # Errors
    /// The host refuses.
    fn map_bar(&self, index: u8, range: &Range<u64>) -> io::Result<Arc<BarMapping>>;
    /// How many interrupts of a kind it has; zero if it has none.
    fn interrupts_count(&self, kind: InterruptKind) -> u32;
    /// Lets it signal `events`, the first for its first interrupt. It must not use another kind.
    ///
    /// # Errors
    /// The host refuses, mostly for want of interrupt vectors.
    fn connect(&self, kind: InterruptKind, events: &[BorrowedFd<'_>]) -> Result<(), VfioError>;
    /// Unmasks the pin whenever `event` is signalled; false if the host cannot, and the caller has to call
    /// [`HostFunction::unmask_pin`] then.
    ///
    /// # Errors
    /// The host refuses.
    fn connect_resample(&self, event: BorrowedFd<'_>) -> Result<bool, VfioError>;
    /// Unmasks the pin.
    ///
    /// # Errors
    /// The host refuses.
    fn unmask_pin(&self) -> Result<(), VfioError>;
    /// Lets the host signal `event` when there is that to tell; false if there never is.
    ///
    /// # Errors
    /// The host refuses.
    fn connect_device_event(
        &self,
        notice: DeviceEvent,
        event: BorrowedFd<'_>,
    ) -> Result<bool, VfioError>;
    /// Lets it interrupt in that way no more.
    ///
    /// # Errors
    /// The host refuses.
    fn disconnect(&self, kind: InterruptKind) -> Result<(), VfioError>;
    /// Resets it, if it can be reset by itself.
    fn reset(&self);
}
