// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A passed-through function on the guest's PCI bus.
//!
//! Owns its shadow of configuration space, its BARs in the guest's address space, and whether it is
//! still present for the guest. The write that would let it reach memory waits at the gate; if memory
//! cannot be mapped, the function is gone for the guest, as if unplugged.
//!
//! Locks: configuration, then BARs or interrupts, then those of [`P2pBars`]. A vCPU holds none of them at the
//! gate. Whether the function is gone is checked again under the configuration lock before anything is written
//! to the host, and code that removes it from the guest takes that lock after it has set the mark: a write
//! either came before that, or never reaches the host.

mod dma_log;
mod migration;
mod power;
#[cfg(test)]
mod power_tests;
mod steps;
#[cfg(test)]
mod steps_tests;
mod streaming;

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use devices::{LogLimit, log_limited};
use hypervisor::irq::MsiSource;
use log::{error, warn};
use parking_lot::Mutex;

pub use dma_log::DmaLog;
use steps::Steps;
pub use streaming::{StateReader, StateWriter};

use crate::bars::{self, MsixRanges};
use crate::config::{MsiLayout, MsixLayout, ShadowConfig};
use crate::device_events::DeviceEvents;
use crate::error::VfioError;
use crate::gate::DmaGate;
use crate::host::{HostFunction, InterruptKind};
use crate::interrupts::{Interrupts, IntxLine};
use crate::mapping::BarMapping;
use crate::migration::{Migration, MigrationPort, VFIO_STATE_VERSION};
use crate::p2p::{P2pBars, Peer};
use crate::rom::{self, Rom};
use pci::register;
use pci::{BarDecode, BarDescription, BarKind, MapError, ROM_INDEX};
use pci::{PciDevice, PciDeviceState, PciStateError};

/// Kind of a passed-through function in saved state.
pub const VFIO_PCI_KIND: &str = "vfio-pci";

/// The memory slots for BARs.
///
/// Called from within a vCPU's access to configuration space.
pub trait BarSlots: Send + Sync {
    /// Maps device memory at `gpa`; returns the slot number. The mapping is kept while the guest can access
    /// it.
    ///
    /// # Errors
    /// KVM refuses.
    fn map(&self, gpa: u64, memory: &Arc<BarMapping>) -> Result<u32, MapError>;
    /// Removes a slot.
    ///
    /// # Errors
    /// KVM refuses.
    fn unmap(&self, slot: u32) -> Result<(), MapError>;
}

/// What a function is connected to.
pub struct VfioWiring<'a> {
    /// Interrupt vectors.
    pub msi_source: &'a dyn MsiSource,
    /// Memory slots for BARs.
    pub slots: Arc<dyn BarSlots>,
    /// The gate that delays DMA until memory is mapped.
    pub gate: Arc<DmaGate>,
    /// Line for the interrupt pin, if it is connected.
    pub intx: Option<Box<dyn IntxLine>>,
    /// Indexes of BARs to which all accesses are trapped.
    pub trapped_bars: Vec<u8>,
    /// Whether its bus has ports. Without them the guest does not see the function's I/O BARs: one that has no
    /// address keeps Linux from enabling the function.
    pub has_ports: bool,
    /// The GPUDirect clique that the function is to name, if it is in one.
    pub gpudirect_clique: Option<u8>,
    /// The functions with which it is to share BARs for p2p.
    pub peers: Option<Arc<P2pBars>>,
}

/// A part of a BAR that the guest can access directly.
struct DirectArea {
    offset: u64,
    memory: Arc<BarMapping>,
    shown: Option<Shown>,
}

/// Where the part is in the guest.
struct Shown {
    gpa: u64,
    /// The memory slot; none while the function sleeps, or if there could be none when it woke.
    slot: Option<u32>,
}

struct DirectBar {
    index: u8,
    areas: Vec<DirectArea>,
}

/// When the guest set Bus Master Enable, and when that took effect.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BusMasterTimes {
    /// Time of the first write that set the bit.
    pub asked: Option<Instant>,
    /// Time at which the write was let through.
    pub granted: Option<Instant>,
}

/// A passed-through PCI function.
pub struct VfioPciDevice {
    pub(super) id: String,
    pub(super) config: Mutex<ShadowConfig>,
    pub(super) interrupts: Interrupts,
    msix_ranges: Option<MsixRanges>,
    rom: Rom,
    direct: Mutex<Vec<DirectBar>>,
    /// In D3hot, where nothing has a memory slot; changed with `direct` locked.
    asleep: AtomicBool,
    slots: Arc<dyn BarSlots>,
    peer: Option<Peer>,
    pub(super) gate: Arc<DmaGate>,
    lost: AtomicBool,
    /// Set once the function can never access memory again.
    disarmed: AtomicBool,
    /// The one reset after a call that hung has begun.
    late_reset: AtomicBool,
    asked: OnceLock<Instant>,
    granted: OnceLock<Instant>,
    log_limit: LogLimit,
    /// State of its migration interface.
    pub(super) migration: Migration,
    /// The threads that are in a step of it.
    steps: Steps,
    /// Declared last, as dropping it releases the group once the function is unused.
    pub(super) host: Arc<dyn HostFunction>,
}

impl VfioPciDevice {
    /// Prepares a function for a guest. Its BARs are mapped into this process, and not yet into the guest.
    ///
    /// # Errors
    /// The function is not an endpoint, or interrupt routes are exhausted.
    pub fn new(
        id: String,
        host: Arc<dyn HostFunction>,
        wiring: VfioWiring<'_>,
    ) -> Result<Self, VfioError> {
        let mut raw = vec![0xff; host.config_len_bytes().into()];
        host.read_config(0, &mut raw);
        let mut bars = bars::describe(&raw, host.as_ref());
        bars.retain(|bar| wiring.has_ports || bar.kind != BarKind::Ports);
        let counts = |kind: InterruptKind| host.interrupts_count(kind);
        let msix = MsixLayout::find(&raw)
            .filter(|layout| counts(InterruptKind::Msix) >= u32::from(layout.count));
        let msix_ranges = msix.as_ref().and_then(|layout| MsixRanges::of(layout, &bars));
        let msix = msix.filter(|_| msix_ranges.is_some());
        let msi = MsiLayout::find(&raw)
            .filter(|layout| counts(InterruptKind::Msi) >= u32::from(layout.count()));
        let intx = wiring.intx.filter(|_| counts(InterruptKind::Intx) > 0);
        // After all that looks for something in a BAR: MSI-X may name one that does not exist.
        let with_rom: Vec<_> =
            bars.iter().copied().chain(rom::describe(&id, host.as_ref())).collect();
        let mut config = ShadowConfig::new(&raw, &with_rom, msi, msix, intx.is_some())?;
        if let Some(clique) = wiring.gpudirect_clique {
            config.show_clique(&raw, clique)?;
        }
        let interrupts = Interrupts::new(
            &id,
            Arc::clone(&host),
            msi.as_ref(),
            msix.as_ref(),
            intx,
            wiring.msi_source,
        )?;
        host.write_config(register::COMMAND, &ShadowConfig::first_command());
        let direct =
            map_bars(&id, host.as_ref(), &bars, msix_ranges.as_ref(), &wiring.trapped_bars);
        // A driver may use the pin without enabling it.
        interrupts.apply(config.msix_control(), config.msi().as_ref());
        let port: Arc<dyn MigrationPort> = Arc::<dyn HostFunction>::clone(&host);
        let areas = direct.iter().flat_map(|bar: &DirectBar| &bar.areas);
        let mappable: Vec<_> = areas.map(|area| area.memory.len_bytes()).collect();
        let peer = wiring.peers.map(|peers| peers.join(&id, mappable));
        Ok(Self {
            migration: Migration::new(&id, port),
            steps: Steps::default(),
            id,
            config: Mutex::new(config),
            interrupts,
            msix_ranges,
            rom: Rom::default(),
            direct: Mutex::new(direct),
            asleep: AtomicBool::new(false),
            slots: wiring.slots,
            peer,
            gate: wiring.gate,
            lost: AtomicBool::new(false),
            disarmed: AtomicBool::new(false),
            late_reset: AtomicBool::new(false),
            asked: OnceLock::new(),
            granted: OnceLock::new(),
            log_limit: LogLimit::default(),
            host,
        })
    }

    /// Takes the function from the guest for good: configuration space and BARs read as ones, and
    /// interrupts are disconnected. DMA may continue: see [`disarm`](Self::disarm). Idempotent.
    pub fn lose(&self) {
        if self.lost.swap(true, Ordering::AcqRel) {
            return;
        }
        // Waits for a write in progress, which may still connect interrupts.
        drop(self.config.lock());
        self.interrupts.cut_off();
        self.host.set_in_use(false);
        for bar in self.direct.lock().iter_mut() {
            self.hide(bar);
        }
    }

    /// Has the guest reach no part of a BAR without an exit from now on. Returns whether it could; then an access to memory
    /// that the host could not provide may be tried again.
    pub fn stop_mapping(&self) -> bool {
        let mut direct = self.direct.lock();
        let could = direct.iter().any(|bar| !bar.areas.is_empty());
        direct.iter_mut().for_each(|bar| self.hide(bar));
        direct.clear();
        could
    }

    /// Stops the function's DMA for good: it is lost to the guest, bus mastering is disabled, and it is
    /// reset. No guest write can enable DMA again, not even one that waits at the gate. Memory may be
    /// unmapped when this returns.
    ///
    /// If another thread is in a call for its state, the reset would wait for that call in the kernel: the function is left to
    /// that thread then, as by [`leave`](Self::leave), and is not disarmed before that thread has reset it.
    pub fn disarm(&self) {
        self.lose();
        if !self.is_left_to_a_step() {
            self.end_dma();
        }
    }

    /// Ends DMA of a function that is lost to the guest.
    fn end_dma(&self) {
        // Under the lock and after the mark, so that it follows any write in progress.
        let config = self.config.lock();
        self.wake_host(&config);
        self.host.write_config(register::COMMAND, &ShadowConfig::first_command());
        drop(config);
        if let Err(source) = self.host.reset() {
            // Without Bus Master Enable it reaches no memory all the same.
            error!("passed-through device {}: {}", self.id, error_text::chain(&source));
        }
        self.migration.was_reset();
        self.disarmed.store(true, Ordering::Release);
    }

    /// Stops the function's DMA before the guest reboots: it is lost to this guest, and bus mastering is disabled.
    /// Returns whether the function says so itself, which comes after all that it has written: then nothing of
    /// it reaches memory when this returns.
    pub fn silence(&self) -> bool {
        self.lose();
        if self.migration.is_left() {
            return false;
        }
        let config = self.config.lock();
        self.wake_host(&config);
        self.host.write_config(register::COMMAND, &ShadowConfig::first_command());
        let mut command = [0xff; 2];
        self.host.read_config(register::COMMAND, &mut command);
        drop(config);
        command != [0xff; 2] && !ShadowConfig::asks_for_bus_master(register::COMMAND, &command)
    }

    /// Whether the function was [disarmed](Self::disarm), and needs no memory mapped any more.
    pub fn is_disarmed(&self) -> bool {
        self.disarmed.load(Ordering::Acquire)
    }

    /// Registers the function's events with `notices`.
    ///
    /// # Errors
    /// The host refuses.
    pub fn report_to(&self, notices: &DeviceEvents) -> Result<(), VfioError> {
        notices.watch(&self.id, self.host.as_ref())
    }

    /// Its BARs with their registers; `None` while an access to its configuration space is in progress,
    /// which waits for hardware (a reset, for example), as a description must not.
    pub fn bars_if_idle(&self) -> Option<(Vec<BarDescription>, BarDecode)> {
        let config = self.config.try_lock()?;
        Some((config.bars(), config.bar_decode()))
    }

    /// Whether it is shown as an integrated endpoint, which it is not on the host.
    pub fn is_integrated_endpoint(&self) -> bool {
        self.config.lock().is_integrated_endpoint()
    }

    /// Whether the guest sees an expansion ROM.
    pub fn has_rom(&self) -> bool {
        self.config.lock().bars().iter().any(|bar| bar.kind == BarKind::Rom)
    }

    /// Whether it is lost to the guest.
    pub fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Acquire)
    }

    /// When the guest set Bus Master Enable, and when that took effect.
    pub fn bus_master_times(&self) -> BusMasterTimes {
        BusMasterTimes { asked: self.asked.get().copied(), granted: self.granted.get().copied() }
    }

    /// Waits until memory is mapped for DMA; false if it never will be.
    fn pass_gate(&self) -> bool {
        self.asked.get_or_init(Instant::now);
        match self.gate.wait() {
            Ok(()) => {
                if let Some(peer) = &self.peer {
                    peer.pass_gate();
                }
                self.granted.get_or_init(Instant::now);
                true
            }
            Err(closed) => {
                if !self.is_lost() {
                    error!("passed-through device {} is closed for the guest: {closed}", self.id);
                }
                self.lose();
                false
            }
        }
    }

    fn show(&self, bar: &mut DirectBar, gpa: u64) {
        for area in &mut bar.areas {
            let Some(gpa) = gpa.checked_add(area.offset) else { continue };
            let slot = if self.is_asleep() {
                Ok(None)
            } else {
                self.slots.map(gpa, &area.memory).map(Some)
            };
            match slot {
                Ok(slot) => {
                    area.shown = Some(Shown { gpa, slot });
                    if let Some(peer) = &self.peer {
                        peer.show(gpa, &area.memory);
                    }
                }
                // Guest accesses are trapped instead, only slower.
                Err(error) => self.complain("show", bar.index, &error),
            }
        }
    }

    fn hide(&self, bar: &mut DirectBar) {
        for area in &mut bar.areas {
            let Some(Shown { gpa, slot }) = area.shown.take() else { continue };
            // First: other functions may only access it while the guest can.
            if let Some(peer) = &self.peer {
                peer.hide(gpa, &area.memory);
            }
            if let Some(Err(error)) = slot.map(|slot| self.slots.unmap(slot)) {
                self.complain("hide", bar.index, &error);
            }
        }
    }

    fn complain(&self, what: &str, index: u8, error: &MapError) {
        let reason = &error.source;
        log_limited!(
            self.log_limit,
            Warn,
            "passed-through device {}: cannot {what} a part of BAR {index}: {reason}",
            self.id
        );
    }

    fn msix_place(&self, index: u8, offset: u64) -> MsixPlace {
        let inside = |(bar, range): &(u8, Range<u64>)| {
            (*bar == index && range.contains(&offset)).then(|| offset - range.start)
        };
        let Some(ranges) = &self.msix_ranges else { return MsixPlace::Elsewhere };
        if let Some(offset) = inside(&ranges.table) {
            MsixPlace::Table(offset)
        } else if let Some(offset) = inside(&ranges.pending) {
            MsixPlace::Pending(offset)
        } else {
            MsixPlace::Elsewhere
        }
    }
}

enum MsixPlace {
    Table(u64),
    Pending(u64),
    Elsewhere,
}

/// Maps the parts of BARs for direct access; parts that cannot be mapped are trapped.
fn map_bars(
    id: &str,
    host: &dyn HostFunction,
    bars: &[BarDescription],
    msix: Option<&MsixRanges>,
    trapped_bars: &[u8],
) -> Vec<DirectBar> {
    let mut direct = Vec::new();
    let mappable = bars.iter().filter(|bar| bar.kind != BarKind::Ports).map(|bar| bar.index);
    for index in mappable.filter(|index| !trapped_bars.contains(index)) {
        let Some(bar) = host.bar(index) else { continue };
        let mut areas = Vec::new();
        for range in bars::direct_areas(index, &bar, msix) {
            match host.map_bar(index, &range) {
                Ok(memory) => areas.push(DirectArea { offset: range.start, memory, shown: None }),
                Err(error) => warn!(
                    "passed-through device {id}: cannot map BAR {index} from {:#x}, accesses will be \
                     slow: {error}",
                    range.start
                ),
            }
        }
        direct.push(DirectBar { index, areas });
    }
    direct
}

impl Drop for VfioPciDevice {
    fn drop(&mut self) {
        // The guest's slots share ownership of the mappings, which keep the function open.
        self.lose();
        self.direct.lock().clear();
    }
}

impl PciDevice for VfioPciDevice {
    fn id(&self) -> &str {
        &self.id
    }

    fn kind(&self) -> &'static str {
        VFIO_PCI_KIND
    }

    fn read_config(&self, offset: u16, data: &mut [u8]) {
        data.fill(0xff);
        if self.is_lost() {
            return;
        }
        let config = self.config.lock();
        let in_range = usize::from(config.len_bytes().saturating_sub(offset)).min(data.len());
        if let Some(part) = data.get_mut(..in_range).filter(|part| !part.is_empty()) {
            self.host.read_config(offset, part);
        }
        config.overlay(offset, data);
    }

    fn write_config(&self, offset: u16, data: &[u8]) {
        if self.is_lost() || (ShadowConfig::asks_for_bus_master(offset, data) && !self.pass_gate())
        {
            return;
        }
        let mut config = self.config.lock();
        // It may have been lost while this waited at the gate or for the lock.
        if self.is_lost() {
            return;
        }
        if ShadowConfig::begins_use(offset, data) {
            self.host.set_in_use(true);
        }
        if config.sets_power(offset, data.len()) {
            self.fall_asleep();
        }
        for (at, bytes) in config.write(offset, data) {
            self.host.write_config(at, &bytes);
        }
        self.wake_up_if_awake(&config);
        self.interrupts.apply(config.msix_control(), config.msi().as_ref());
    }

    fn bars(&self) -> Vec<BarDescription> {
        self.config.lock().bars()
    }

    fn bar_decode(&self) -> BarDecode {
        let mut decode = self.config.lock().bar_decode();
        let is_there = !self.is_lost();
        decode.enabled &= is_there;
        decode.ports_enabled &= is_there;
        decode
    }

    fn place_bar(&self, index: u8, gpa: u64) {
        self.config.lock().set_bar_gpa(index, gpa);
    }

    fn bar_moved(&self, index: u8, gpa: Option<u64>) {
        let mut direct = self.direct.lock();
        let Some(bar) = direct.iter_mut().find(|bar| bar.index == index) else { return };
        self.hide(bar);
        // Under the lock that `lose` takes after setting its mark: either the mark is seen here, or `lose`
        // hides what is shown here.
        if let Some(gpa) = gpa.filter(|_| !self.is_lost()) {
            self.show(bar, gpa);
        }
    }

    fn read_bar(&self, index: u8, offset: u64, data: &mut [u8]) {
        if self.is_lost() {
            return data.fill(0xff);
        }
        if matches!(self.msix_place(index, offset), MsixPlace::Elsewhere) && self.is_out_of_reach()
        {
            return data.fill(0xff);
        }
        if index == ROM_INDEX {
            return self.rom.read(&self.id, self.host.as_ref(), offset, data);
        }
        match (self.msix_place(index, offset), self.interrupts.msix()) {
            (MsixPlace::Table(offset), Some(msix)) => msix.read_table(offset, data),
            (MsixPlace::Pending(offset), Some(msix)) => msix.read_pba(offset, data),
            _ => self.host.read_bar(index, offset, data),
        }
    }

    fn write_bar(&self, index: u8, offset: u64, data: &[u8]) {
        if self.is_lost() || index == ROM_INDEX {
            return;
        }
        match (self.msix_place(index, offset), self.interrupts.msix()) {
            (MsixPlace::Table(offset), Some(msix)) => msix.write_table(offset, data),
            (MsixPlace::Pending(_), Some(_)) => {}
            _ if self.is_out_of_reach() => {}
            _ => self.host.write_bar(index, offset, data),
        }
    }

    fn save(&self) -> Result<PciDeviceState, PciStateError> {
        let state = self.saved().map_err(|error| self.state_error(error))?;
        self.encoded(&state)
    }

    fn restore(&self, state: &PciDeviceState) -> Result<(), PciStateError> {
        let state = state.decode(self, VFIO_STATE_VERSION)?;
        self.put_in(&state).map_err(|error| self.state_error(error))
    }
}
