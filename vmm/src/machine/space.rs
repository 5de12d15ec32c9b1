// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Dispatch of vCPU exits for port I/O and MMIO.
//!
//! Owns the two buses. Holds no lock during an access.

use std::sync::{Arc, OnceLock};
use std::time::Instant;

use arch::acpi::RegisterPlace;
use arch::layout;
use devices::bus::{Bus, BusDevice, BusError};
use hypervisor::{AfterExit, ExitHandler, FaultAction, FaultedAccess, FaultedAt, StopReason};
use pci::{
    BarMapper, BarRules, MapError, MmioRange, MmioWindows, PciError, PciSegment, PciSegmentOptions,
    PortWindow,
};

use super::events::{GuestEvent, Power};
use super::faults::MissingPages;

/// Memory that a guest can do without.
pub trait Revocable: Send + Sync {
    /// Has the guest reach by exits what it reaches in memory that other processes provide. Returns whether there was any:
    /// then an access for which there is no memory may be tried again.
    fn revoke(&self, vcpu_index: u32) -> bool;
}

/// The I/O ports and MMIO of a machine.
#[derive(Default)]
pub struct AddressSpace {
    pio: Bus,
    mmio: Bus,
    first_mmio: OnceLock<Instant>,
    /// Handler for accesses to missing RAM, where vCPUs can be refused them.
    missing: OnceLock<Arc<dyn MissingPages>>,
    /// Memory of other processes, which may take it away.
    revocable: OnceLock<Arc<dyn Revocable>>,
}

impl AddressSpace {
    /// Places a device at `port`.
    ///
    /// # Errors
    /// The ports are taken.
    pub fn insert_ports(
        &self,
        port: u16,
        len_bytes: u64,
        name: &str,
        device: Arc<dyn BusDevice>,
    ) -> Result<(), BusError> {
        self.pio.insert(name, u64::from(port), len_bytes, device)
    }

    /// Places a device at `gpa`.
    ///
    /// # Errors
    /// The addresses are taken.
    pub fn insert_memory(
        &self,
        gpa: u64,
        len_bytes: u64,
        name: &str,
        device: Arc<dyn BusDevice>,
    ) -> Result<(), BusError> {
        self.mmio.insert(name, gpa, len_bytes, device)
    }

    /// Places registers where a platform has them.
    ///
    /// # Errors
    /// The ports or addresses are taken.
    pub fn insert_registers(
        &self,
        place: RegisterPlace,
        len_bytes: u64,
        name: &str,
        device: Arc<dyn BusDevice>,
    ) -> Result<(), BusError> {
        match place {
            RegisterPlace::Ports(port) => self.insert_ports(port, len_bytes, name, device),
            RegisterPlace::Memory(gpa) => self.insert_memory(gpa, len_bytes, name, device),
        }
    }

    /// Sets the handler that fetches missing pages for faulting vCPUs. Called once, before they run.
    pub fn set_missing_pages(&self, pages: Arc<dyn MissingPages>) {
        let _ = self.missing.set(pages);
    }

    /// Sets what is revoked when there is no memory for an access. Called once, before vCPUs run.
    pub fn set_revocable(&self, memory: Arc<dyn Revocable>) {
        let _ = self.revocable.set(memory);
    }

    /// A PCI segment whose memory BARs are in `windows`, and placed by `rules`; I/O BARs of segment 0 are among the ports.
    ///
    /// # Errors
    /// A window is invalid.
    pub fn new_segment(
        self: &Arc<Self>,
        segment: u16,
        windows: MmioWindows,
        rules: BarRules,
    ) -> Result<Arc<PciSegment>, PciError> {
        let ports = (segment == 0).then(|| PortWindow {
            first: layout::PCI_IO_PORT,
            last: layout::PCI_IO_LAST_PORT,
            mapper: Arc::new(Ports(Arc::clone(self))),
        });
        PciSegment::with_rules(PciSegmentOptions { segment, windows }, rules, self.clone(), ports)
    }

    /// When the guest first accessed MMIO.
    pub fn first_mmio(&self) -> Option<Instant> {
        self.first_mmio.get().copied()
    }
}

impl BarMapper for AddressSpace {
    fn map(&self, range: MmioRange, device: Arc<dyn BusDevice>) -> Result<(), MapError> {
        map(&self.mmio, range, device)
    }

    fn unmap(&self, range: MmioRange) -> Result<(), MapError> {
        unmap(&self.mmio, range)
    }

    fn relocate(&self, from: MmioRange, to: MmioRange) -> Result<(), MapError> {
        relocate(&self.mmio, from, to)
    }
}

/// Maps I/O BARs to the ports of an address space.
struct Ports(Arc<AddressSpace>);

impl BarMapper for Ports {
    fn map(&self, range: MmioRange, device: Arc<dyn BusDevice>) -> Result<(), MapError> {
        map(&self.0.pio, range, device)
    }

    fn unmap(&self, range: MmioRange) -> Result<(), MapError> {
        unmap(&self.0.pio, range)
    }

    fn relocate(&self, from: MmioRange, to: MmioRange) -> Result<(), MapError> {
        relocate(&self.0.pio, from, to)
    }
}

fn map(bus: &Bus, range: MmioRange, device: Arc<dyn BusDevice>) -> Result<(), MapError> {
    let inserted = bus.insert("PCI BAR", range.start_gpa, range.len_bytes, device);
    inserted.map_err(|error| MapError { source: Box::new(error) })
}

fn unmap(bus: &Bus, range: MmioRange) -> Result<(), MapError> {
    let removed = bus.remove(range.start_gpa);
    removed.map(drop).map_err(|error| MapError { source: Box::new(error) })
}

fn relocate(bus: &Bus, from: MmioRange, to: MmioRange) -> Result<(), MapError> {
    let moved = bus.move_range(from.start_gpa, to.start_gpa);
    moved.map_err(|error| MapError { source: Box::new(error) })
}

/// Handles the exits of a machine's vCPUs.
pub struct Exits {
    space: Arc<AddressSpace>,
    power: Arc<Power>,
}

impl Exits {
    /// For the vCPUs of `space`.
    pub fn new(space: Arc<AddressSpace>, power: Arc<Power>) -> Self {
        Self { space, power }
    }

    /// Makes a vCPU leave after a write that requested a reset or shutdown, so that no further instruction
    /// runs.
    fn after_write(&self) -> AfterExit {
        if self.power.is_pending() { AfterExit::Leave } else { AfterExit::Resume }
    }
}

impl ExitHandler for Exits {
    fn pio_read(&self, port: u16, data: &mut [u8]) {
        self.space.pio.read(u64::from(port), data);
    }

    fn pio_write(&self, port: u16, data: &[u8]) -> AfterExit {
        self.space.pio.write(u64::from(port), data);
        self.after_write()
    }

    fn mmio_read(&self, gpa: u64, data: &mut [u8]) {
        self.space.first_mmio.get_or_init(Instant::now);
        if self.space.missing.get().is_some_and(|pages| pages.read(gpa, data)) {
            return;
        }
        self.space.mmio.read(gpa, data);
    }

    fn mmio_write(&self, gpa: u64, data: &[u8]) -> AfterExit {
        self.space.first_mmio.get_or_init(Instant::now);
        if self.space.missing.get().is_some_and(|pages| pages.write(gpa, data)) {
            return AfterExit::Resume;
        }
        self.space.mmio.write(gpa, data);
        self.after_write()
    }

    fn faulted_at(&self, _vcpu_index: u32) -> Option<FaultedAt> {
        self.space.missing.get().and_then(|pages| pages.faulted_at())
    }

    fn kicked(&self, vcpu_index: u32) {
        if let Some(pages) = self.space.missing.get() {
            pages.kicked(vcpu_index);
        }
    }

    fn memory_fault(&self, vcpu_index: u32, access: FaultedAccess) -> FaultAction {
        let missing = self.space.missing.get();
        let action = missing.map_or(FaultAction::Stop, |pages| pages.resolve(vcpu_index, access));
        let revocable = self.space.revocable.get().filter(|_| action == FaultAction::Stop);
        if revocable.is_some_and(|memory| memory.revoke(vcpu_index)) {
            FaultAction::Retry
        } else {
            action
        }
    }

    fn stopped(&self, vcpu_index: u32, reason: StopReason) {
        let event = match reason {
            StopReason::Shutdown => GuestEvent::TripleFault { index: vcpu_index },
            reason => GuestEvent::VcpuStopped { index: vcpu_index, reason },
        };
        self.power.signal(event);
    }
}
