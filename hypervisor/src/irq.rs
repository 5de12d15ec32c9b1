// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Traits by which devices use interrupts and I/O event notification.
//!
//! The traits here are the only part of this crate that the `pci` crate uses, so that its tests
//! run with a fake. The KVM implementation is in this crate as well.

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use thiserror::Error;
use vmm_sys_util::eventfd::EventFd;

/// Why an interrupt or ioeventfd cannot be set up.
#[derive(Debug, Error)]
pub enum IrqError {
    /// All interrupt routes of the VM are in use.
    #[error("no free interrupt route: the VM has {limit} at most")]
    Exhausted {
        /// Maximum number of routes.
        limit: u32,
    },
    /// The kernel refused the request.
    #[error("the kernel refused to {what}")]
    Kernel {
        /// What was attempted, as an infinitive clause.
        what: &'static str,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
}

/// Address and data of a message-signalled interrupt (PCI 3.0, 6.8.1).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MsiMessage {
    /// 64-bit message address.
    pub address: u64,
    /// Message data.
    pub data: u32,
}

impl MsiMessage {
    /// Whether KVM refuses it as a route: it takes the upper part of an APIC id from bits 63 to 40 of the address
    /// (`KVM_CAP_X2APIC_API`), and no address with any of bits 39 to 32. A guest can write one, and gets no interrupt by
    /// it.
    pub const fn is_refused(self) -> bool {
        self.address & 0xff << 32 != 0
    }
}

/// One message-signalled interrupt vector, backed by an interrupt route and an irqfd.
pub trait MsiVector: Send + Sync {
    /// Sets the message and unmasks the vector. A trigger that arrived while masked is delivered.
    fn program(&self, message: MsiMessage) -> Result<(), IrqError>;
    /// Masks the vector until the next [`MsiVector::program`]; triggers meanwhile stay pending.
    fn mask(&self) -> Result<(), IrqError>;
    /// Raises the interrupt.
    fn trigger(&self) -> Result<(), IrqError>;
    /// Raises the interrupt of a trigger that [`MsiVector::take_pending`] has taken. Unlike [`MsiVector::trigger`] it does
    /// not write the eventfd, at which a process that has it could have the caller wait.
    fn redeliver(&self, message: MsiMessage) -> Result<(), IrqError>;
    /// The eventfd behind [`MsiVector::trigger`], for back ends that signal it directly.
    fn eventfd(&self) -> BorrowedFd<'_>;
    /// Clears a trigger that arrived while the vector was masked, without delivering it; returns whether
    /// there was one. Used to save the pending bit. Does not wait, whatever the flags of the eventfd.
    fn take_pending(&self) -> bool;
}

/// Allocates interrupt vectors of one VM.
pub trait MsiSource: Send + Sync {
    /// Allocates a vector, masked until it is programmed. Dropping it frees the route.
    fn create_vector(&self) -> Result<Arc<dyn MsiVector>, IrqError>;
}

/// Address of guest writes that signal an eventfd.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IoEventAddress {
    /// A port.
    Pio(u16),
    /// A guest physical address.
    Mmio(u64),
}

/// Has guest writes signal an eventfd without an exit to user space (KVM_IOEVENTFD).
pub trait IoEvents: Send + Sync {
    /// Signals `event` on each guest write to `address`, of any length and value.
    fn register(&self, event: &EventFd, address: IoEventAddress) -> Result<(), IrqError>;
    /// Removes a registration.
    fn unregister(&self, event: &EventFd, address: IoEventAddress) -> Result<(), IrqError>;
}
