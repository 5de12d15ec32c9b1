// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Delivery of a passed-through function's interrupts to the guest.
//!
//! Owns which of the pin, MSI and MSI-X is connected at the host (at most one), and follows
//! what the guest has enabled. No interrupt passes through this code: the host function signals
//! an eventfd that KVM turns into the guest's interrupt. Only a guest's end of interrupt of the pin does,
//! where the host has no other way.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::Arc;

use devices::{LogLimit, log_limited};
use hypervisor::LevelLine;
use hypervisor::irq::MsiSource;
use log::info;
use parking_lot::Mutex;

use super::config::{MsiLayout, MsiRegisters, MsixLayout};
use super::error::VfioError;
use super::host::{HostFunction, InterruptKind};
use super::msi::Msi;
use super::unmasking::Unmasking;
use pci::Msix;

const MSIX_ENABLE: u16 = 1 << 15;

/// A level-triggered interrupt line for the pin of a function.
pub trait IntxLine: Send + Sync {
    /// Eventfd that raises the line.
    fn trigger(&self) -> BorrowedFd<'_>;
    /// Eventfd that is signalled when the guest has acknowledged the interrupt.
    fn resample(&self) -> BorrowedFd<'_>;
}

impl IntxLine for LevelLine {
    fn trigger(&self) -> BorrowedFd<'_> {
        // SAFETY: the eventfd is open for as long as `self` is borrowed.
        unsafe { BorrowedFd::borrow_raw(self.event().as_raw_fd()) }
    }

    fn resample(&self) -> BorrowedFd<'_> {
        // SAFETY: the eventfd is open for as long as `self` is borrowed.
        unsafe { BorrowedFd::borrow_raw(self.resample().as_raw_fd()) }
    }
}

/// Which kind of interrupt is connected at the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Connected {
    Nothing,
    Intx,
    Msi { count: u16 },
    Msix,
}

/// The interrupts of one function.
pub struct Interrupts {
    id: String,
    host: Arc<dyn HostFunction>,
    msix: Option<Msix>,
    msi: Option<Msi>,
    intx: Option<Box<dyn IntxLine>>,
    connected: Mutex<Connected>,
    /// For a pin that the kernel cannot unmask. Locked after `connected`, by the thread that changes it.
    unmasking: Mutex<Option<Unmasking>>,
    log_limit: LogLimit,
}

impl Interrupts {
    /// Allocates vectors for the layouts; nothing is connected yet.
    ///
    /// # Errors
    /// Interrupt routes are exhausted.
    pub fn new(
        id: &str,
        host: Arc<dyn HostFunction>,
        msi: Option<&MsiLayout>,
        msix: Option<&MsixLayout>,
        intx: Option<Box<dyn IntxLine>>,
        source: &dyn MsiSource,
    ) -> Result<Self, VfioError> {
        Ok(Self {
            id: id.to_owned(),
            host,
            msix: msix.map(|layout| Msix::new(layout.count, source)).transpose()?,
            msi: msi
                .map(|layout| Msi::new(layout.count(), source))
                .transpose()
                .map_err(VfioError::Msi)?,
            intx,
            connected: Mutex::new(Connected::Nothing),
            unmasking: Mutex::default(),
            log_limit: LogLimit::default(),
        })
    }

    /// The MSI-X table and pending bits, if the function has MSI-X.
    pub fn msix(&self) -> Option<&Msix> {
        self.msix.as_ref()
    }

    /// The MSI vectors, if the function has MSI.
    pub fn msi(&self) -> Option<&Msi> {
        self.msi.as_ref()
    }

    /// Applies guest writes to the registers. These cannot be refused, so failures are logged. One call at
    /// a time, in the order of the writes.
    pub fn apply(&self, msix_control: Option<u16>, msi: Option<&MsiRegisters>) {
        if let Err(error) = self.connect_as(msix_control, msi) {
            self.complain(&error);
        }
    }

    /// Connects what the registers request. One call at a time.
    ///
    /// # Errors
    /// The host refuses an interrupt; the others are connected.
    pub fn connect_as(
        &self,
        msix_control: Option<u16>,
        msi: Option<&MsiRegisters>,
    ) -> Result<(), VfioError> {
        if let (Some(msix), Some(control)) = (&self.msix, msix_control) {
            msix.set_control(control);
        }
        let routed = match (&self.msi, msi) {
            (Some(vectors), Some(registers)) => vectors.apply(registers).map_err(VfioError::Msi),
            _ => Ok(()),
        };
        let wanted = if msix_control.is_some_and(|control| control & MSIX_ENABLE != 0) {
            Connected::Msix
        } else if let Some(registers) = msi.filter(|registers| registers.enabled) {
            Connected::Msi { count: registers.count }
        } else if self.intx.is_some() {
            Connected::Intx
        } else {
            Connected::Nothing
        };
        let mut connected = self.connected.lock();
        if *connected != wanted {
            self.disconnect(&mut connected);
            self.connect(wanted)?;
            *connected = wanted;
        }
        routed
    }

    /// Disconnects all interrupts for good.
    pub fn cut_off(&self) {
        self.disconnect(&mut self.connected.lock());
    }

    fn connect(&self, wanted: Connected) -> Result<(), VfioError> {
        match wanted {
            Connected::Nothing => Ok(()),
            Connected::Intx => {
                let Some(line) = &self.intx else { return Ok(()) };
                self.host.connect(InterruptKind::Intx, &[line.trigger().as_fd()])?;
                if self.host.connect_resample(line.resample())? {
                    return Ok(());
                }
                info!("passed-through device {}: the VMM unmasks its interrupt pin", self.id);
                let unmasking = Unmasking::start(&self.id, Arc::clone(&self.host), line.resample());
                *self.unmasking.lock() = Some(unmasking.map_err(|source| VfioError::Io {
                    what: "unmask the interrupt pin by a thread",
                    source,
                })?);
                Ok(())
            }
            Connected::Msi { count } => {
                let Some(msi) = &self.msi else { return Ok(()) };
                self.host.connect(InterruptKind::Msi, &msi.events(count))
            }
            Connected::Msix => {
                let Some(msix) = &self.msix else { return Ok(()) };
                let events: Vec<_> = (0..msix.vectors_count())
                    .filter_map(|vector| msix.vector(vector))
                    .map(|vector| vector.eventfd())
                    .collect();
                self.host.connect(InterruptKind::Msix, &events)
            }
        }
    }

    fn disconnect(&self, connected: &mut Connected) {
        let kind = match std::mem::replace(connected, Connected::Nothing) {
            Connected::Nothing => return,
            Connected::Intx => InterruptKind::Intx,
            Connected::Msi { .. } => InterruptKind::Msi,
            Connected::Msix => InterruptKind::Msix,
        };
        let unmasking = self.unmasking.lock().take();
        drop(unmasking);
        if let Err(error) = self.host.disconnect(kind) {
            self.complain(&error);
        }
    }

    fn complain(&self, error: &dyn std::error::Error) {
        let reason = error.source().map(|source| format!(": {source}")).unwrap_or_default();
        log_limited!(self.log_limit, Warn, "passed-through device {}: {error}{reason}", self.id);
    }
}

impl Drop for Interrupts {
    fn drop(&mut self) {
        self.cut_off();
    }
}
