// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Fakes of everything around this crate, for its tests and fuzz targets.
//!
//! They record the requests that were made, and every request that the real implementation would have
//! to refuse (`violations`). Never used by a VMM.
#![allow(missing_docs, reason = "not part of the interface")]

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;

use devices::bus::BusDevice;
use devices::virtio::{
    ActivateError, Activation, DeviceSnapshot, Pausing, PendingPause, StateError, VirtioDevice,
    VirtioInterrupt,
};
use hypervisor::irq::{IoEventAddress, IoEvents, IrqError, MsiMessage, MsiSource, MsiVector};
use parking_lot::{Mutex, MutexGuard};
use virtio_queue::QueueState;
use vmm_sys_util::eventfd::EventFd;

use crate::bar_placement::{BarMapper, MapError, MmioRange};

fn refusal(what: &'static str) -> IrqError {
    IrqError::Kernel { what, source: io::Error::from(io::ErrorKind::AlreadyExists) }
}

/// What a vector was told and what it delivered.
#[derive(Default)]
pub struct VectorRecord {
    pub programmed: Option<MsiMessage>,
    pub pending: bool,
    /// Refuse to be programmed, as an interrupt controller without room would.
    pub refuses: bool,
    pub delivered: Vec<MsiMessage>,
}

pub struct FakeVector {
    record: Mutex<VectorRecord>,
    event: EventFd,
}

impl FakeVector {
    pub fn record(&self) -> MutexGuard<'_, VectorRecord> {
        self.record.lock()
    }
}

impl MsiVector for FakeVector {
    fn program(&self, message: MsiMessage) -> Result<(), IrqError> {
        let mut record = self.record();
        if record.refuses {
            return Err(refusal("set an interrupt route"));
        }
        record.programmed = Some(message);
        if std::mem::take(&mut record.pending) {
            record.delivered.push(message);
        }
        Ok(())
    }

    fn mask(&self) -> Result<(), IrqError> {
        self.record().programmed = None;
        Ok(())
    }

    fn trigger(&self) -> Result<(), IrqError> {
        let mut record = self.record();
        match record.programmed {
            Some(message) => record.delivered.push(message),
            None => record.pending = true,
        }
        Ok(())
    }

    fn redeliver(&self, message: MsiMessage) -> Result<(), IrqError> {
        self.record().delivered.push(message);
        Ok(())
    }

    fn eventfd(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor belongs to `self.event`, which lives as long as the borrow.
        unsafe { BorrowedFd::borrow_raw(self.event.as_raw_fd()) }
    }

    fn take_pending(&self) -> bool {
        std::mem::take(&mut self.record().pending)
    }
}

/// Hands out [`FakeVector`]s, up to a limit.
pub struct FakeMsiSource {
    vectors: Mutex<Vec<Arc<FakeVector>>>,
    limit: u32,
}

impl FakeMsiSource {
    pub fn new(limit: u32) -> Self {
        Self { vectors: Mutex::default(), limit }
    }

    pub fn vector(&self, index: usize) -> Option<Arc<FakeVector>> {
        self.vectors.lock().get(index).cloned()
    }
}

impl MsiSource for FakeMsiSource {
    fn create_vector(&self) -> Result<Arc<dyn MsiVector>, IrqError> {
        let mut vectors = self.vectors.lock();
        if u32::try_from(vectors.len()).is_ok_and(|count| count >= self.limit) {
            return Err(IrqError::Exhausted { limit: self.limit });
        }
        let event = EventFd::new(0)
            .map_err(|source| IrqError::Kernel { what: "create an eventfd", source })?;
        let vector = Arc::new(FakeVector { record: Mutex::default(), event });
        vectors.push(Arc::clone(&vector));
        Ok(vector)
    }
}

/// Signals eventfds as KVM does, and refuses what KVM refuses.
#[derive(Default)]
pub struct FakeIoEvents {
    registered: Mutex<BTreeMap<u64, EventFd>>,
    violations: Mutex<Vec<String>>,
}

impl FakeIoEvents {
    /// What the kernel does with a guest's write; false if it continues to the VMM.
    pub fn signal(&self, gpa: u64) -> bool {
        let registered = self.registered.lock();
        registered.get(&gpa).is_some_and(|event| event.write(1).is_ok())
    }

    pub fn addresses(&self) -> Vec<u64> {
        self.registered.lock().keys().copied().collect()
    }

    pub fn violations(&self) -> Vec<String> {
        self.violations.lock().clone()
    }
}

impl IoEvents for FakeIoEvents {
    fn register(&self, event: &EventFd, address: IoEventAddress) -> Result<(), IrqError> {
        let IoEventAddress::Mmio(gpa) = address else { return Err(refusal("register a port")) };
        let event = event
            .try_clone()
            .map_err(|source| IrqError::Kernel { what: "duplicate an eventfd", source })?;
        if self.registered.lock().insert(gpa, event).is_some() {
            self.violations.lock().push(format!("{gpa:#x} registered twice"));
        }
        Ok(())
    }

    fn unregister(&self, _event: &EventFd, address: IoEventAddress) -> Result<(), IrqError> {
        let IoEventAddress::Mmio(gpa) = address else { return Err(refusal("unregister a port")) };
        if self.registered.lock().remove(&gpa).is_none() {
            self.violations.lock().push(format!("{gpa:#x} unregistered without being registered"));
        }
        Ok(())
    }
}

/// What a mapper was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MapCall {
    Map(u64),
    Unmap(u64),
    Relocate(u64, u64),
}

/// Length and device of each range, by its start.
type MappedRanges = BTreeMap<u64, (u64, Arc<dyn BusDevice>)>;

/// An MMIO address space with a part where BARs may not lie.
#[derive(Default)]
pub struct FakeMapper {
    mapped: Mutex<MappedRanges>,
    calls: Mutex<Vec<MapCall>>,
    violations: Mutex<Vec<String>>,
    allowed: Vec<MmioRange>,
    /// Refuse everything from now on, as an address space without room would.
    pub refuses: std::sync::atomic::AtomicBool,
}

impl FakeMapper {
    pub fn new(allowed: Vec<MmioRange>) -> Self {
        Self { allowed, ..Self::default() }
    }

    pub fn mapped(&self) -> Vec<u64> {
        self.mapped.lock().keys().copied().collect()
    }

    pub fn take_calls(&self) -> Vec<MapCall> {
        std::mem::take(&mut self.calls.lock())
    }

    pub fn violations(&self) -> Vec<String> {
        self.violations.lock().clone()
    }

    fn device_at(&self, gpa: u64) -> Option<(u64, Arc<dyn BusDevice>)> {
        let mapped = self.mapped.lock();
        let (start, (len, device)) = mapped.range(..=gpa).next_back()?;
        (gpa - start < *len).then(|| (gpa - start, Arc::clone(device)))
    }

    /// A guest's read; false where nothing is mapped.
    pub fn read(&self, gpa: u64, data: &mut [u8]) -> bool {
        let device = self.device_at(gpa);
        if let Some((offset, device)) = &device {
            device.read(*offset, data);
        }
        device.is_some()
    }

    /// A guest's write; false where nothing is mapped.
    pub fn write(&self, gpa: u64, data: &[u8]) -> bool {
        let device = self.device_at(gpa);
        if let Some((offset, device)) = &device {
            device.write(*offset, data);
        }
        device.is_some()
    }

    fn insert(&self, range: MmioRange, device: Arc<dyn BusDevice>) {
        let last = |start: u64, len: u64| start.checked_add(len - 1);
        let end = last(range.start_gpa, range.len_bytes);
        let inside = self.allowed.iter().any(|allowed| {
            allowed.start_gpa <= range.start_gpa
                && end.is_some_and(|end| Some(end) <= last(allowed.start_gpa, allowed.len_bytes))
        });
        let mut mapped = self.mapped.lock();
        let overlap = mapped.iter().any(|(start, (len, _))| {
            end.is_none_or(|end| *start <= end) && last(*start, *len) >= Some(range.start_gpa)
        });
        if !inside || overlap {
            self.violations.lock().push(format!("{range:x?} mapped (inside: {inside})"));
        }
        mapped.insert(range.start_gpa, (range.len_bytes, device));
    }

    fn remove(&self, range: MmioRange) -> Option<Arc<dyn BusDevice>> {
        let removed = self.mapped.lock().remove(&range.start_gpa);
        if removed.as_ref().is_none_or(|(len, _)| *len != range.len_bytes) {
            self.violations.lock().push(format!("{range:x?} unmapped without being mapped"));
        }
        removed.map(|(_, device)| device)
    }

    fn call(&self, call: MapCall) -> Result<(), MapError> {
        self.calls.lock().push(call);
        if self.refuses.load(std::sync::atomic::Ordering::Relaxed) {
            return Err(MapError { source: "told to refuse".into() });
        }
        Ok(())
    }
}

impl BarMapper for FakeMapper {
    fn map(&self, range: MmioRange, device: Arc<dyn BusDevice>) -> Result<(), MapError> {
        self.call(MapCall::Map(range.start_gpa))?;
        self.insert(range, device);
        Ok(())
    }

    fn unmap(&self, range: MmioRange) -> Result<(), MapError> {
        // Always works, as taking something away needs no room.
        self.calls.lock().push(MapCall::Unmap(range.start_gpa));
        self.remove(range);
        Ok(())
    }

    fn relocate(&self, from: MmioRange, to: MmioRange) -> Result<(), MapError> {
        self.call(MapCall::Relocate(from.start_gpa, to.start_gpa))?;
        if let Some(device) = self.remove(from) {
            self.insert(to, device);
        }
        Ok(())
    }
}

/// What a device was told, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceCall {
    Acknowledge(u64),
    Activate,
    Reset,
    Pause,
    Resume,
    Restore,
}

/// What a device was told and what it was given; shared with the test.
#[derive(Default)]
pub struct DeviceRecord {
    pub calls: Vec<DeviceCall>,
    pub activation: Option<Activation>,
    pub config: [u8; FakeDevice::CONFIG_LEN_BYTES],
    pub refuses_activation: bool,
    /// Added to the positions of all queues at the next pause, as if the device had worked.
    pub progress: u16,
}

impl DeviceRecord {
    /// Whether a queue was kicked since the last time; takes the kicks.
    pub fn take_kicks(&self, queue_index: u16) -> u64 {
        self.activation
            .iter()
            .flat_map(|activation| &activation.queues)
            .find(|queue| queue.index == queue_index)
            .and_then(|queue| queue.kick.read().ok())
            .unwrap_or(0)
    }

    /// The way back to the driver.
    pub fn interrupt(&self) -> Option<Arc<dyn VirtioInterrupt>> {
        self.activation.as_ref().map(|activation| Arc::clone(&activation.interrupt))
    }

    pub fn take_calls(&mut self) -> Vec<DeviceCall> {
        std::mem::take(&mut self.calls)
    }
}

/// A device that does nothing but remember.
pub struct FakeDevice {
    record: Arc<Mutex<DeviceRecord>>,
}

impl FakeDevice {
    pub const DEVICE_ID: u16 = 2;
    pub const CONFIG_LEN_BYTES: usize = 16;
    pub const QUEUE_SIZES_MAX: [u16; 3] = [256, 64, 1024];
    pub const KIND: &'static str = "virtio-fake";
    /// VERSION_1, EVENT_IDX, a feature of its own, and one that the transport cannot do.
    pub const FEATURES: u64 = 1 << 32 | 1 << 29 | 1 << 5 | 1 << 40;
    /// What of that a driver sees.
    pub const OFFERED: u64 = 1 << 32 | 1 << 29 | 1 << 5;

    pub fn with_record() -> (Box<dyn VirtioDevice>, Arc<Mutex<DeviceRecord>>) {
        let record = Arc::new(Mutex::new(DeviceRecord::default()));
        (Box::new(Self { record: Arc::clone(&record) }), record)
    }
}

impl Pausing for FakeDevice {
    fn begin_pause(&mut self) -> PendingPause {
        PendingPause::default()
    }

    fn pause(&mut self) -> Vec<(u16, QueueState)> {
        let mut record = self.record.lock();
        record.calls.push(DeviceCall::Pause);
        let progress = std::mem::take(&mut record.progress);
        record
            .activation
            .iter()
            .flat_map(|activation| &activation.queues)
            .map(|active| {
                let mut state = active.queue.state();
                state.next_avail = state.next_avail.wrapping_add(progress);
                state.next_used = state.next_used.wrapping_add(progress);
                (active.index, state)
            })
            .collect()
    }

    fn resume(&mut self) {
        self.record.lock().calls.push(DeviceCall::Resume);
    }
}

impl VirtioDevice for FakeDevice {
    fn device_id(&self) -> u16 {
        Self::DEVICE_ID
    }

    fn queue_sizes_max(&self) -> &[u16] {
        &Self::QUEUE_SIZES_MAX
    }

    fn features(&self) -> u64 {
        Self::FEATURES
    }

    fn acknowledge_features(&mut self, features: u64) {
        self.record.lock().calls.push(DeviceCall::Acknowledge(features));
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        let record = self.record.lock();
        let start = usize::try_from(offset).unwrap_or(usize::MAX);
        for (at, byte) in data.iter_mut().enumerate() {
            *byte = record.config.get(start.saturating_add(at)).copied().unwrap_or(0);
        }
    }

    fn write_config(&mut self, offset: u64, data: &[u8]) {
        let mut record = self.record.lock();
        let start = usize::try_from(offset).unwrap_or(usize::MAX);
        for (at, byte) in data.iter().enumerate() {
            if let Some(to) = record.config.get_mut(start.saturating_add(at)) {
                *to = *byte;
            }
        }
    }

    fn activate(&mut self, activation: Activation) -> Result<(), ActivateError> {
        let mut record = self.record.lock();
        record.calls.push(DeviceCall::Activate);
        if record.refuses_activation {
            return Err(ActivateError::MissingQueue { index: 0 });
        }
        record.activation = Some(activation);
        Ok(())
    }

    fn reset(&mut self) {
        let mut record = self.record.lock();
        record.calls.push(DeviceCall::Reset);
        record.activation = None;
    }

    fn pausing(&mut self) -> &mut dyn Pausing {
        self
    }

    fn save(&self) -> DeviceSnapshot {
        let config = self.record.lock().config;
        DeviceSnapshot { kind: Self::KIND.to_owned(), version: 1, data: config.to_vec().into() }
    }

    fn restore(&mut self, state: &DeviceSnapshot) -> Result<(), StateError> {
        if state.kind != Self::KIND {
            return Err(StateError::Kind { expected: Self::KIND, found: state.kind.clone() });
        }
        if state.version != 1 {
            let found = state.version;
            return Err(StateError::Version { kind: Self::KIND, found, newest: 1 });
        }
        let config = serde_json::from_value(state.data.clone())
            .map_err(|source| StateError::Malformed { kind: Self::KIND, source })?;
        let mut record = self.record.lock();
        record.config = config;
        record.calls.push(DeviceCall::Restore);
        Ok(())
    }
}
