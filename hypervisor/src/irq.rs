// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Traits by which devices use interrupts and I/O event notification.
//!
//! The traits here are the only part of this crate that the `pci` crate uses, so that its tests
//! run with a fake. The KVM implementation is in this crate as well.

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use thiserror::Error;
use vmm_sys_util::eventfd::EventFd;

/// Why an interrupt or an I/O event could not be set up.
#[derive(Debug, Error)]
pub enum IrqError {
    /// All interrupt routes of the VM are taken.
    #[error("no free interrupt route: the VM has {limit} at most")]
    Exhausted {
        /// Routes that this VM can have.
        limit: u32,
    },
    /// The kernel refused the request.
    #[error("the kernel refused to {what}")]
    Kernel {
        /// What was asked for, as an infinitive clause.
        what: &'static str,
        /// The kernel's answer.
        #[source]
        source: std::io::Error,
    },
}

/// The address and data words of a message-signalled interrupt (PCI 3.0, 6.8.1).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MsiMessage {
    /// 64-bit message address.
    pub address: u64,
    /// Message data.
    pub data: u32,
}

/// One message-signalled interrupt vector, backed by an interrupt route and an irqfd.
pub trait MsiVector: Send + Sync {
    /// Sets the message and enables delivery. A trigger that came while masked is delivered.
    fn program(&self, message: MsiMessage) -> Result<(), IrqError>;
    /// Stops delivery until the next [`MsiVector::program`]; triggers meanwhile are remembered.
    fn mask(&self) -> Result<(), IrqError>;
    /// Raises the interrupt.
    fn trigger(&self) -> Result<(), IrqError>;
    /// The eventfd behind [`MsiVector::trigger`], for back ends that raise it by themselves.
    fn eventfd(&self) -> BorrowedFd<'_>;
    /// Takes, without delivering it, a trigger that came while the vector was masked.
    ///
    /// Used to save the pending bit; returns whether there was one.
    fn take_pending(&self) -> bool;
}

/// Hands out interrupt vectors of one VM.
pub trait MsiSource: Send + Sync {
    /// Makes a vector; it is masked until it is programmed. Dropping it frees the route.
    fn create_vector(&self) -> Result<Arc<dyn MsiVector>, IrqError>;
}

/// Where a guest write that should signal an eventfd happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IoEventAddress {
    /// A port.
    Pio(u16),
    /// A guest physical address.
    Mmio(u64),
}

/// Lets a guest write signal an eventfd without leaving the kernel (KVM_IOEVENTFD).
pub trait IoEvents: Send + Sync {
    /// Signals `event` for each guest write to `address` of any length and value.
    fn register(&self, event: &EventFd, address: IoEventAddress) -> Result<(), IrqError>;
    /// Takes a registration back.
    fn unregister(&self, event: &EventFd, address: IoEventAddress) -> Result<(), IrqError>;
}
