// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Interrupts and ioeventfds with KVM: the implementation of the traits of [`crate::irq`].
//!
//! Owns the eventfds of vectors and lines, and their attachment to the kernel. A masked vector is a
//! detached one: its eventfd counts what happens meanwhile, and the kernel looks at that count when
//! the eventfd is attached again, so nothing is lost and nothing is delivered twice.
//!
//! Locks: a vector's own, then that of the routes. Neither is held while anything waits.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;

use kvm_bindings::{KvmIrqRouting, kvm_msi};
use kvm_ioctls::{NoDatamatch, VmFd};
use parking_lot::{Mutex, MutexGuard};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use super::{Vm, VmShared};
use crate::irq::{IoEventAddress, IoEvents, IrqError, MsiMessage, MsiSource, MsiVector};
use crate::routing::{IOAPIC_LINES, InterruptRules, RouteTable};

/// The interrupt routes of one VM.
pub(crate) struct Routes(Mutex<RouteTable>);

impl Routes {
    pub(crate) fn new(limit: u32, rules: InterruptRules) -> Self {
        Self(Mutex::new(RouteTable::with_rules(limit, rules)))
    }

    /// Gives the kernel the table as it is.
    pub(crate) fn apply(&self, fd: &VmFd) -> io::Result<()> {
        let invalid = |_| io::Error::from(io::ErrorKind::InvalidInput);
        let table = KvmIrqRouting::from_entries(&self.lock().entries()).map_err(invalid)?;
        fd.set_gsi_routing(&table).map_err(io::Error::from)
    }

    fn lock(&self) -> MutexGuard<'_, RouteTable> {
        self.0.lock()
    }
}

pub(crate) fn kernel(what: &'static str) -> impl Fn(kvm_ioctls::Error) -> IrqError {
    move |error| IrqError::Kernel { what, source: error.into() }
}

pub(crate) fn new_event() -> Result<EventFd, IrqError> {
    EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)
        .map_err(|source| IrqError::Kernel { what: "create an eventfd", source })
}

/// Signals an eventfd. A saturated counter means that it is signalled already.
fn signal(event: &EventFd) -> Result<(), IrqError> {
    match event.write(1) {
        Err(error) if error.kind() != io::ErrorKind::WouldBlock => {
            Err(IrqError::Kernel { what: "signal an eventfd", source: error })
        }
        _ => Ok(()),
    }
}

/// Reads an eventfd; false if there is nothing to read. Another process that has the eventfd can clear its O_NONBLOCK,
/// after which read(2) waits, but not this.
fn read_now(event: &EventFd) -> bool {
    let mut count = [0_u8; 8];
    let mut buffer = libc::iovec { iov_base: count.as_mut_ptr().cast(), iov_len: count.len() };
    // An eventfd has no offset, which is said by -1.
    // SAFETY: the kernel writes at most `count.len()` bytes into `count`, which outlives the call, as does the buffer.
    let got = unsafe { libc::preadv2(event.as_raw_fd(), &raw mut buffer, 1, -1, libc::RWF_NOWAIT) };
    usize::try_from(got) == Ok(count.len())
}

fn borrow(event: &EventFd) -> BorrowedFd<'_> {
    // SAFETY: the descriptor stays open for as long as `event` is borrowed.
    unsafe { BorrowedFd::borrow_raw(event.as_raw_fd()) }
}

/// An MSI vector of a VM.
struct Vector {
    vm: Arc<VmShared>,
    gsi: u32,
    event: EventFd,
    /// Whether the irqfd is attached, which means unmasked.
    attached: Mutex<bool>,
}

impl Vector {
    fn attached(&self) -> MutexGuard<'_, bool> {
        self.attached.lock()
    }

    fn detach(&self, attached: &mut bool) -> Result<(), IrqError> {
        if *attached {
            self.vm
                .fd
                .unregister_irqfd(&self.event, self.gsi)
                .map_err(kernel("detach an interrupt's eventfd"))?;
            *attached = false;
        }
        Ok(())
    }
}

impl MsiVector for Vector {
    fn program(&self, message: MsiMessage) -> Result<(), IrqError> {
        let mut attached = self.attached();
        let mut routes = self.vm.routes.lock();
        if routes.set(self.gsi, message) {
            let table = KvmIrqRouting::from_entries(&routes.entries())
                .map_err(|_| IrqError::Exhausted { limit: routes.limit() })?;
            if let Err(error) = self.vm.fd.set_gsi_routing(&table) {
                // The kernel keeps its old table. The message is forgotten here, so that the next program()
                // is not taken for a no-op.
                routes.unset(self.gsi);
                return Err(kernel("set the interrupt routes")(error));
            }
        }
        drop(routes);
        if !*attached {
            self.vm
                .fd
                .register_irqfd(&self.event, self.gsi)
                .map_err(kernel("attach an interrupt's eventfd"))?;
            *attached = true;
        }
        Ok(())
    }

    fn mask(&self) -> Result<(), IrqError> {
        self.detach(&mut self.attached())
    }

    fn trigger(&self) -> Result<(), IrqError> {
        signal(&self.event)
    }

    fn redeliver(&self, message: MsiMessage) -> Result<(), IrqError> {
        // Not by way of a route, which would have been translated.
        let message = self.vm.routes.lock().as_kernel(message);
        let [a0, a1, a2, a3, a4, a5, a6, a7] = message.address.to_le_bytes();
        let msi = kvm_msi {
            address_lo: u32::from_le_bytes([a0, a1, a2, a3]),
            address_hi: u32::from_le_bytes([a4, a5, a6, a7]),
            data: message.data,
            ..kvm_msi::default()
        };
        // A guest that takes none of these now is no error, nor is one that has no such local APIC.
        match self.vm.fd.signal_msi(msi) {
            Err(error) if error.errno() != libc::EPERM => {
                Err(kernel("deliver an interrupt")(error))
            }
            _ => Ok(()),
        }
    }

    fn eventfd(&self) -> BorrowedFd<'_> {
        borrow(&self.event)
    }

    fn take_pending(&self) -> bool {
        let attached = self.attached();
        !*attached && read_now(&self.event)
    }
}

impl Drop for Vector {
    fn drop(&mut self) {
        let attached = *self.attached();
        if attached && let Err(error) = self.vm.fd.unregister_irqfd(&self.event, self.gsi) {
            log::warn!("interrupt {}: cannot detach its eventfd: {error}", self.gsi);
        }
        // The kernel drops the entry with its next table update; until then nothing raises it.
        self.vm.routes.lock().free(self.gsi);
    }
}

impl MsiSource for Vm {
    fn create_vector(&self) -> Result<Arc<dyn MsiVector>, IrqError> {
        let event = new_event()?;
        let mut routes = self.shared().routes.lock();
        let limit = routes.limit();
        let gsi = routes.allocate().ok_or(IrqError::Exhausted { limit })?;
        drop(routes);
        let vm = Arc::clone(self.shared());
        Ok(Arc::new(Vector { vm, gsi, event, attached: Mutex::new(false) }))
    }
}

/// An edge-triggered interrupt line, raised through an eventfd.
pub struct InterruptLine {
    vm: Arc<VmShared>,
    gsi: u32,
    event: EventFd,
}

impl InterruptLine {
    /// GSI of the line.
    pub fn gsi(&self) -> u32 {
        self.gsi
    }

    /// Raises the interrupt.
    pub fn trigger(&self) -> Result<(), IrqError> {
        signal(&self.event)
    }

    /// The eventfd behind [`InterruptLine::trigger`].
    pub fn event(&self) -> &EventFd {
        &self.event
    }
}

impl Drop for InterruptLine {
    fn drop(&mut self) {
        if let Err(error) = self.vm.fd.unregister_irqfd(&self.event, self.gsi) {
            log::warn!("interrupt line {}: cannot detach its eventfd: {error}", self.gsi);
        }
    }
}

impl Vm {
    /// Creates an eventfd that raises line `gsi` (0 to 23) as an edge.
    pub fn create_line(&self, gsi: u32) -> Result<InterruptLine, IrqError> {
        if gsi >= IOAPIC_LINES {
            return Err(IrqError::Exhausted { limit: IOAPIC_LINES });
        }
        let event = new_event()?;
        let shared = self.shared();
        shared
            .fd
            .register_irqfd(&event, gsi)
            .map_err(kernel("attach an interrupt line's eventfd"))?;
        Ok(InterruptLine { vm: Arc::clone(shared), gsi, event })
    }
}

fn address(address: IoEventAddress) -> kvm_ioctls::IoEventAddress {
    match address {
        IoEventAddress::Pio(port) => kvm_ioctls::IoEventAddress::Pio(port.into()),
        IoEventAddress::Mmio(gpa) => kvm_ioctls::IoEventAddress::Mmio(gpa),
    }
}

impl IoEvents for Vm {
    fn register(&self, event: &EventFd, at: IoEventAddress) -> Result<(), IrqError> {
        self.shared()
            .fd
            .register_ioevent(event, &address(at), NoDatamatch)
            .map_err(kernel("attach an eventfd to guest writes"))
    }

    fn unregister(&self, event: &EventFd, at: IoEventAddress) -> Result<(), IrqError> {
        self.shared()
            .fd
            .unregister_ioevent(event, &address(at), NoDatamatch)
            .map_err(kernel("detach an eventfd from guest writes"))
    }
}
