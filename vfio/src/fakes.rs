// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Fakes of a host function, of memory slots and of an IOMMU, for tests and fuzz targets.
//!
//! They record the requests that were made, and every request that must not be made
//! (`violations`). Never used by a VMM.
#![allow(missing_docs, reason = "not part of the interface")]

mod target;

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Write as _};
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;
use vmm_sys_util::tempfile::TempFile;

use super::error::VfioError;
use super::gate::DmaGate;
use super::host::{DeviceEvent, HostBar, HostFunction, InterruptKind};
use super::mapping::BarMapping;
use super::migration::fakes::FakeMigration;
use super::migration::{DeviceState, MigrationPort, MigrationSupport};
pub use super::p2p::fakes::FakeP2p;
use super::{BarSlots, IntxLine};
use pci::MapError;
use pci::register;
pub use target::FakeTarget;

/// Offsets of the capabilities of [`FakeFunction::config`].
pub const POWER_OFFSET: u16 = 0x44;
pub const MSI_OFFSET: u16 = 0x50;
pub const MSIX_OFFSET: u16 = 0x70;
pub const SRIOV_OFFSET: u16 = 0x140;
pub const MSIX_COUNT: u16 = 5;
pub const TABLE_OFFSET: u64 = 0x2000;
pub const PENDING_OFFSET: u64 = 0x3000;
const BAR_LENS: [u64; 6] = [0x4000, 0, 0x1000, 0, 0x20, 0];

/// BARs that can be mapped as a whole.
fn host_bars() -> [HostBar; 6] {
    BAR_LENS.map(|len_bytes| {
        let mappable = (len_bytes >= 0x1000).then_some(0..len_bytes).into_iter().collect();
        HostBar { len_bytes, mappable }
    })
}

/// A function that remembers.
pub struct FakeFunction {
    config: Mutex<Vec<u8>>,
    bars: Mutex<BTreeMap<(u8, u64), u8>>,
    host_bars: Mutex<[HostBar; 6]>,
    /// Length and contents of its expansion ROM.
    rom: Mutex<(u64, Vec<u8>)>,
    /// How often its ROM was read.
    pub rom_reads: AtomicU64,
    /// Its ROM cannot be read.
    pub refuses_rom: AtomicBool,
    file: File,
    gate: Arc<DmaGate>,
    connected: Mutex<Option<(InterruptKind, usize)>>,
    resample: Mutex<bool>,
    violations: Mutex<Vec<String>>,
    notices: Mutex<BTreeMap<DeviceEvent, File>>,
    is_silent: AtomicBool,
    /// Has no eventfd by which the pin is unmasked.
    pub never_resamples: AtomicBool,
    /// No interrupt can be connected.
    pub refuses_interrupts: AtomicBool,
    /// A reset fails.
    pub refuses_resets: AtomicBool,
    /// Writes of its command register have no effect.
    pub ignores_commands: AtomicBool,
    /// Writes of its power state have no effect.
    pub ignores_power: AtomicBool,
    /// What it was told last: whether the guest uses it.
    pub in_use: AtomicBool,
    /// It was told that it is left to a call.
    pub is_left: AtomicBool,
    /// Called before its power state changes.
    pub on_power: OnceLock<Box<dyn Fn() + Send + Sync>>,
    unmasked: AtomicU64,
    pub resets: Mutex<u32>,
    pub migration: FakeMigration,
    /// Called before it may reach memory.
    pub on_bus_master: OnceLock<Box<dyn Fn() + Send + Sync>>,
    pub config_writes: Mutex<Vec<(u16, Vec<u8>)>>,
}

fn put(config: &mut [u8], offset: u16, bytes: &[u8]) {
    let start = usize::from(offset);
    if let Some(part) = config.get_mut(start..start + bytes.len()) {
        part.copy_from_slice(bytes);
    }
}

impl FakeFunction {
    /// Configuration space with BARs 0 (64 bits, with MSI-X), 2 (32 bits) and 4 (ports), with MSI,
    /// MSI-X and SR-IOV.
    pub fn config() -> Vec<u8> {
        let mut config = vec![0; 4096];
        put(&mut config, 0, &[0x36, 0x1b, 0x10, 0x00, 0, 0, 0x10, 0, 2, 2, 8, 1]);
        put(&mut config, 0x0e, &[0x80]);
        put(&mut config, 0x10, &[0x04]);
        put(&mut config, 0x20, &[0x01]);
        put(&mut config, 0x34, &[0x40]);
        put(&mut config, 0x3d, &[1]);
        put(&mut config, 0x40, &[0x01, 0x50, 3, 0]);
        // Four messages, 64 bits, maskable.
        put(&mut config, MSI_OFFSET, &[0x05, 0x70, 0x84, 0x01]);
        put(&mut config, MSIX_OFFSET, &[0x11, 0x80, 4, 0]);
        put(&mut config, MSIX_OFFSET + 4, &[0x00, 0x20, 0, 0, 0x00, 0x30, 0, 0]);
        put(&mut config, 0x80, &[0x10, 0, 2, 0]);
        put(&mut config, 0x100, &0x1401_0001_u32.to_le_bytes());
        put(&mut config, SRIOV_OFFSET, &0x1801_0010_u32.to_le_bytes());
        put(&mut config, 0x180, &0x0001_0003_u32.to_le_bytes());
        config
    }

    /// With this configuration space; `gate` is what bus mastering has to wait for.
    pub fn new(config: Vec<u8>, gate: Arc<DmaGate>) -> io::Result<Arc<Self>> {
        let file = TempFile::new().map_err(|error| io::Error::from_raw_os_error(error.errno()))?;
        let file = file.into_file();
        Ok(Arc::new(Self {
            config: Mutex::new(config),
            bars: Mutex::default(),
            host_bars: Mutex::new(host_bars()),
            rom: Mutex::default(),
            rom_reads: AtomicU64::new(0),
            refuses_rom: AtomicBool::new(false),
            file,
            gate,
            connected: Mutex::default(),
            resample: Mutex::default(),
            violations: Mutex::default(),
            notices: Mutex::default(),
            is_silent: AtomicBool::new(false),
            never_resamples: AtomicBool::new(false),
            refuses_interrupts: AtomicBool::new(false),
            refuses_resets: AtomicBool::new(false),
            ignores_commands: AtomicBool::new(false),
            ignores_power: AtomicBool::new(false),
            in_use: AtomicBool::new(false),
            is_left: AtomicBool::new(false),
            on_power: OnceLock::new(),
            unmasked: AtomicU64::new(0),
            resets: Mutex::default(),
            migration: FakeMigration::default(),
            on_bus_master: OnceLock::new(),
            config_writes: Mutex::default(),
        }))
    }

    /// Changes its configuration space as hardware does.
    pub fn put_config(&self, offset: u16, bytes: &[u8]) {
        put(&mut self.config.lock(), offset, bytes);
    }

    pub fn violations(&self) -> Vec<String> {
        self.violations.lock().clone()
    }

    pub fn connected(&self) -> Option<(InterruptKind, usize)> {
        *self.connected.lock()
    }

    pub fn has_resample(&self) -> bool {
        *self.resample.lock()
    }

    /// How often its pin was unmasked.
    pub fn unmasked(&self) -> u64 {
        self.unmasked.load(Ordering::Relaxed)
    }

    pub fn command(&self) -> u8 {
        self.config.lock().get(4).copied().unwrap_or(0)
    }

    pub fn is_bus_master(&self) -> bool {
        self.command() & 4 != 0
    }

    /// Has this BAR from now on; called before the function is taken for a guest.
    pub fn set_bar(&self, index: u8, bar: HostBar) {
        if let Some(current) = self.host_bars.lock().get_mut(usize::from(index)) {
            *current = bar;
        }
    }

    /// Has an expansion ROM from now on, of which this is the beginning; called as [`set_bar`](Self::set_bar) is.
    pub fn set_rom(&self, len_bytes: u64, contents: &[u8]) {
        *self.rom.lock() = (len_bytes, contents.to_vec());
    }

    /// Signals what a host would; false if no event is connected.
    pub fn tell(&self, notice: DeviceEvent) -> bool {
        let notices = self.notices.lock();
        notices.get(&notice).is_some_and(|mut event| event.write_all(&1_u64.to_ne_bytes()).is_ok())
    }

    /// Has nothing to tell from now on.
    pub fn be_silent(&self) {
        self.is_silent.store(true, Ordering::Relaxed);
    }

    fn violate(&self, what: String) {
        self.violations.lock().push(what);
    }
}

impl HostFunction for FakeFunction {
    fn config_len_bytes(&self) -> u16 {
        u16::try_from(self.config.lock().len()).unwrap_or(u16::MAX)
    }

    fn read_config(&self, offset: u16, data: &mut [u8]) {
        let config = self.config.lock();
        if usize::from(offset) + data.len() > config.len() {
            self.violate(format!("read of {} bytes at {offset:#x}", data.len()));
        }
        for (byte, at) in data.iter_mut().zip(usize::from(offset)..) {
            *byte = config.get(at).copied().unwrap_or(0xff);
        }
    }

    fn write_config(&self, offset: u16, data: &[u8]) {
        let end = usize::from(offset) + data.len();
        let touches = |first: u16, len: u16| {
            usize::from(first) < end && offset < first + len && !data.is_empty()
        };
        let mut config = self.config.lock();
        if data.is_empty() || end > config.len() {
            self.violate(format!("write of {} bytes at {offset:#x}", data.len()));
        }
        if touches(register::BAR0, 24) || touches(0x30, 4) || touches(0x3c, 2) {
            self.violate(format!("{data:x?} written at {offset:#x}, which is made up"));
        }
        for (byte, at) in data.iter().zip(usize::from(offset)..) {
            if at == usize::from(register::COMMAND) {
                if self.ignores_commands.load(Ordering::Relaxed) {
                    continue;
                }
                let has_ports = config.get(0x20).is_some_and(|flags| flags & 1 != 0);
                if byte & 2 == 0 || (byte & 1 != 0 && !has_ports) {
                    self.violate(format!(
                        "command {byte:#x}: memory decode must stay, ports only where there are any"
                    ));
                }
                if byte & 4 != 0 && !self.gate.is_open() {
                    self.violate("bus mastering behind a closed gate".to_owned());
                }
                if let Some(told) = self.on_bus_master.get().filter(|_| byte & 4 != 0) {
                    told();
                }
            }
            if at == usize::from(POWER_OFFSET) {
                if let Some(told) = self.on_power.get() {
                    told();
                }
                if self.ignores_power.load(Ordering::Relaxed) {
                    continue;
                }
            }
            if let Some(current) = config.get_mut(at) {
                *current = *byte;
            }
        }
        self.config_writes.lock().push((offset, data.to_vec()));
    }

    fn bar(&self, index: u8) -> Option<HostBar> {
        self.host_bars.lock().get(usize::from(index)).filter(|bar| bar.len_bytes > 0).cloned()
    }

    fn read_bar(&self, index: u8, offset: u64, data: &mut [u8]) {
        let bars = self.bars.lock();
        for (byte, at) in data.iter_mut().zip(offset..) {
            *byte = bars.get(&(index, at)).copied().unwrap_or(0);
        }
    }

    fn write_bar(&self, index: u8, offset: u64, data: &[u8]) {
        if index >= pci::BARS_COUNT {
            self.violate(format!("write of BAR {index}, which does not exist"));
        }
        let mut bars = self.bars.lock();
        for (byte, at) in data.iter().zip(offset..) {
            bars.insert((index, at), *byte);
        }
    }

    fn rom_len_bytes(&self) -> u64 {
        self.rom.lock().0
    }

    fn read_rom(&self) -> io::Result<Vec<u8>> {
        self.rom_reads.fetch_add(1, Ordering::Relaxed);
        if self.refuses_rom.load(Ordering::Relaxed) {
            return Err(io::Error::from_raw_os_error(libc::EIO));
        }
        Ok(self.rom.lock().1.clone())
    }

    fn map_bar(&self, index: u8, range: &Range<u64>) -> io::Result<Arc<BarMapping>> {
        let bars = self.host_bars.lock();
        let len = |bar: &HostBar| bar.len_bytes.next_multiple_of(0x1000);
        let start: u64 = bars.iter().take(index.into()).map(len).sum();
        self.file.set_len(bars.iter().map(len).sum())?;
        let bar_len_bytes = bars.get(usize::from(index)).map_or(0, |bar| bar.len_bytes);
        let offset = start + range.start;
        BarMapping::new(self.file.as_fd(), offset, bar_len_bytes, range).map(Arc::new)
    }

    fn interrupts_count(&self, kind: InterruptKind) -> u32 {
        match kind {
            InterruptKind::Intx => 1,
            InterruptKind::Msi => 4,
            InterruptKind::Msix => MSIX_COUNT.into(),
        }
    }

    fn connect(&self, kind: InterruptKind, events: &[BorrowedFd<'_>]) -> Result<(), VfioError> {
        if self.refuses_interrupts.load(Ordering::Relaxed) {
            let source = io::Error::from_raw_os_error(libc::ENOSPC);
            return Err(VfioError::Io { what: "connect an interrupt", source });
        }
        let before = self.connected.lock().replace((kind, events.len()));
        if before.is_some() || events.is_empty() {
            self.violate(format!("{kind:?} connected over {before:?}"));
        }
        Ok(())
    }

    fn connect_resample(&self, _event: BorrowedFd<'_>) -> Result<bool, VfioError> {
        if self.never_resamples.load(Ordering::Relaxed) {
            return Ok(false);
        }
        *self.resample.lock() = true;
        Ok(true)
    }

    fn unmask_pin(&self) -> Result<(), VfioError> {
        self.unmasked.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    fn connect_device_event(
        &self,
        notice: DeviceEvent,
        event: BorrowedFd<'_>,
    ) -> Result<bool, VfioError> {
        if self.is_silent.load(Ordering::Relaxed) {
            return Ok(false);
        }
        let failed = |source| VfioError::Io { what: "duplicate an eventfd", source };
        let event = event.try_clone_to_owned().map_err(failed)?;
        self.notices.lock().insert(notice, event.into());
        Ok(true)
    }

    fn disconnect(&self, kind: InterruptKind) -> Result<(), VfioError> {
        let before = self.connected.lock().take();
        if before.is_none_or(|(connected, _)| connected != kind) {
            self.violate(format!("{kind:?} disconnected instead of {before:?}"));
        }
        Ok(())
    }

    fn reset(&self) -> Result<(), VfioError> {
        *self.resets.lock() += 1;
        if self.refuses_resets.load(Ordering::Relaxed) {
            return Err(VfioError::Reset(io::Error::from_raw_os_error(libc::EIO)));
        }
        self.migration.reset();
        Ok(())
    }

    fn set_in_use(&self, is_used: bool) {
        self.in_use.store(is_used, Ordering::Relaxed);
    }

    fn note_left(&self, is_left: bool) {
        self.is_left.store(is_left, Ordering::Relaxed);
    }
}

impl MigrationPort for FakeFunction {
    fn migration_support(&self) -> io::Result<Option<MigrationSupport>> {
        self.migration.support()
    }

    fn set_device_state(&self, state: DeviceState) -> io::Result<()> {
        if state == DeviceState::Resuming && !self.gate.is_open() {
            self.violate("a state put in behind a closed gate".to_owned());
        }
        if state == DeviceState::Resuming && !self.in_use.load(Ordering::Relaxed) {
            self.violate("a state put in that a reset of the bus may take away".to_owned());
        }
        self.migration.set_state(state)
    }

    fn device_state(&self) -> io::Result<u32> {
        self.migration.state()
    }

    fn state_len_bytes(&self) -> io::Result<u64> {
        let estimate = self.migration.hardware_mut().estimate_bytes;
        Ok(estimate.unwrap_or_else(|| self.migration.hardware().len() as u64))
    }

    fn read_state(&self, buffer: &mut [u8]) -> io::Result<usize> {
        self.migration.read(buffer)
    }

    fn write_state(&self, data: &[u8]) -> io::Result<()> {
        self.migration.write(data)
    }

    fn start_dma_log(&self, ranges: &[Range<u64>]) -> io::Result<()> {
        self.migration.start_log(ranges)
    }

    fn take_dma_log(&self, range: &Range<u64>) -> io::Result<Vec<u64>> {
        self.migration.take_log(range)
    }

    fn stop_dma_log(&self) -> io::Result<()> {
        self.migration.stop_log()
    }
}

/// Memory slots that may not overlap.
#[derive(Default)]
pub struct FakeSlots {
    /// Guest physical addresses, and the host address of the first.
    slots: Mutex<BTreeMap<u32, (Range<u64>, u64)>>,
    violations: Mutex<Vec<String>>,
}

impl FakeSlots {
    /// First and last guest physical addresses of what is shown, in order.
    pub fn shown(&self) -> Vec<Range<u64>> {
        self.shown_at().into_iter().map(|(range, _)| range).collect()
    }

    /// The same, each with its first host address.
    pub fn shown_at(&self) -> Vec<(Range<u64>, u64)> {
        let mut shown: Vec<_> = self.slots.lock().values().cloned().collect();
        shown.sort_by_key(|(range, _)| range.start);
        shown
    }

    pub fn violations(&self) -> Vec<String> {
        self.violations.lock().clone()
    }
}

impl BarSlots for FakeSlots {
    fn map(&self, gpa: u64, memory: &Arc<BarMapping>) -> Result<u32, MapError> {
        let end = gpa.checked_add(memory.len_bytes());
        let end = end.ok_or_else(|| MapError { source: "the range wraps around".into() })?;
        let mut slots = self.slots.lock();
        if slots.values().any(|(other, _)| other.start < end && gpa < other.end) {
            self.violations.lock().push(format!("{gpa:#x}..{end:#x} overlaps another"));
        }
        let number = slots.keys().next_back().map_or(0, |last| last + 1);
        slots.insert(number, (gpa..end, memory.host_addr()));
        Ok(number)
    }

    fn unmap(&self, slot: u32) -> Result<(), MapError> {
        if self.slots.lock().remove(&slot).is_none() {
            self.violations.lock().push(format!("slot {slot} was not there"));
        }
        Ok(())
    }
}

/// A line whose events go nowhere.
pub struct FakeLine(pub File);

impl IntxLine for FakeLine {
    fn trigger(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    fn resample(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
