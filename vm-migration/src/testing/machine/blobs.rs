// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Fake devices whose state is sent as bytes beside that of the machine.
//!
//! Owns what they have and what has come for them, shared with the test that compares both.

use std::sync::Arc;
use std::sync::mpsc::Receiver;

use parking_lot::Mutex;

use crate::vm::{BlobInfo, BlobSink, BlobSource, VmError};

/// What goes wrong with a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlobFault {
    /// Reading fails after so many bytes.
    Read(u64),
    /// Writing fails after so many bytes.
    Write(u64),
    /// The destination lacks the device.
    Missing,
    /// The first has so many bytes more than it says it may have.
    Longer(u64),
    /// The first does not end.
    Endless,
}

#[derive(Debug, Default)]
struct Devices {
    /// The state of each.
    there: Vec<Vec<u8>>,
    /// What has come, by device.
    here: Vec<Vec<u8>>,
    fault: Option<BlobFault>,
    /// Sources that were not dropped yet.
    open: usize,
    /// The state as a document had it, without bytes of its own.
    was_apart: bool,
    /// Bytes that were read of the sources.
    read_bytes: u64,
    /// Devices that were left behind.
    left: Vec<usize>,
    /// Times that a call came to the gate.
    at_gate: usize,
}

/// What waits for a gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gated {
    /// Each write into any device.
    Writes,
    /// Each write into one device.
    WritesOf(usize),
    /// Each read of one device.
    ReadsOf(usize),
    /// The begin of reading.
    Open,
    /// The end of reading one device.
    EndOf(usize),
    /// The preparation of the devices at the destination.
    Prepare,
    /// That of one device, on its own thread.
    BeginOf(usize),
}

/// A gate lets one through with each message, and all once it is dropped.
type Gate = Arc<Mutex<Option<(Gated, Arc<Mutex<Receiver<()>>>)>>>;

/// The state of the devices of a fake machine, at both ends.
#[derive(Clone, Debug, Default)]
pub struct FakeBlobs(Arc<Mutex<Devices>>, Gate);

/// What tells the state of a fake machine.
#[derive(serde::Serialize, serde::Deserialize)]
struct State {
    vcpus: Vec<u32>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    lens: Vec<u64>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    bytes: Vec<Vec<u8>>,
}

impl FakeBlobs {
    /// Devices with state of these lengths.
    pub fn new(lens: &[usize]) -> Self {
        let state = |(device, len): (usize, &usize)| {
            // Each word, and so each chunk, and each device differ.
            let word = |at: usize| (at as u64) << 16 | device as u64;
            let words = (0..len.div_ceil(8)).map(word);
            let mut bytes = Vec::with_capacity(len + 8);
            words.for_each(|word| bytes.extend_from_slice(&word.to_le_bytes()));
            bytes.truncate(*len);
            bytes
        };
        let there = lens.iter().enumerate().map(state);
        let devices = Devices { there: there.collect(), ..Devices::default() };
        Self(Arc::new(Mutex::new(devices)), Gate::default())
    }

    /// The same devices, of which one goes wrong.
    #[must_use]
    pub fn fault(self, fault: BlobFault) -> Self {
        self.0.lock().fault = Some(fault);
        self
    }

    /// The same devices, which wait for a gate.
    #[must_use]
    pub fn gate(self, gated: Gated, gate: Receiver<()>) -> Self {
        *self.1.lock() = Some((gated, Arc::new(Mutex::new(gate))));
        self
    }

    /// Waits for the gate, if it is before one of these.
    fn pass(&self, here: &[Gated]) {
        let gate = self.1.lock().clone();
        if let Some((_, gate)) = gate.filter(|(gated, _)| here.contains(gated)) {
            self.0.lock().at_gate += 1;
            // A dropped gate is open.
            let _ = gate.lock().recv();
        }
    }

    /// Whether all has come as it was, beside the state if `apart`.
    pub fn have_arrived(&self, apart: bool) -> bool {
        let devices = self.0.lock();
        devices.here == devices.there && devices.was_apart == apart && devices.open == 0
    }

    /// Bytes that have come.
    pub fn arrived_bytes(&self) -> usize {
        self.0.lock().here.iter().map(Vec::len).sum()
    }

    /// Whether a call has come to the gate.
    pub fn is_at_gate(&self) -> bool {
        self.0.lock().at_gate > 0
    }

    /// Bytes that have come of one device.
    pub fn arrived_of(&self, device: usize) -> usize {
        self.0.lock().here.get(device).map_or(0, Vec::len)
    }

    /// Bytes that were read of all devices.
    pub fn read_bytes(&self) -> u64 {
        self.0.lock().read_bytes
    }

    /// Devices that were left behind.
    pub fn left(&self) -> Vec<usize> {
        self.0.lock().left.clone()
    }

    pub(super) fn leave(&self, device: usize) {
        self.0.lock().left.push(device);
    }

    /// Sources that are being read.
    pub fn open_sources(&self) -> usize {
        self.0.lock().open
    }

    pub(super) fn len_bytes(&self) -> u64 {
        self.0.lock().there.iter().map(|state| state.len() as u64).sum()
    }

    pub(super) fn infos(&self) -> Vec<BlobInfo> {
        let devices = self.0.lock();
        let longer = |number| match devices.fault {
            Some(BlobFault::Longer(by)) if number == 0 => by,
            _ => 0,
        };
        let info = |(number, state): (usize, &Vec<u8>)| BlobInfo {
            name: format!("gpu{number}"),
            len_bytes_max: (state.len() as u64).saturating_sub(longer(number)),
            about: serde_json::json!({"number": number}),
        };
        devices.there.iter().enumerate().map(info).collect()
    }

    pub(super) fn sources(&self) -> Vec<Box<dyn BlobSource>> {
        self.pass(&[Gated::Open]);
        let mut devices = self.0.lock();
        devices.open = devices.there.len();
        let source = |device| -> Box<dyn BlobSource> {
            Box::new(Source { blobs: self.clone(), device, at: 0 })
        };
        (0..devices.there.len()).map(source).collect()
    }

    pub(super) fn state(&self, lens: &[u64]) -> Vec<u8> {
        let devices = self.0.lock();
        let bytes = if lens.is_empty() { devices.there.clone() } else { Vec::new() };
        let state = State { vcpus: vec![1, 2], lens: lens.to_vec(), bytes };
        serde_json::to_vec(&state).unwrap_or_default()
    }

    pub(super) fn sinks(&self, infos: &[BlobInfo]) -> Result<Vec<Box<dyn BlobSink>>, VmError> {
        self.pass(&[Gated::Prepare]);
        let mut devices = self.0.lock();
        if devices.fault == Some(BlobFault::Missing) {
            return Err("there is no 'gpu0' here".into());
        }
        for (number, info) in infos.iter().enumerate() {
            if info.name != format!("gpu{number}") || info.about["number"] != number {
                return Err(format!("unknown device '{}'", info.name).into());
            }
        }
        devices.here = vec![Vec::new(); infos.len()];
        let sink = |device| -> Box<dyn BlobSink> { Box::new(Sink { blobs: self.clone(), device }) };
        Ok((0..infos.len()).map(sink).collect())
    }

    pub(super) fn apply(&self, state_json: &[u8]) -> Result<(), VmError> {
        let Ok(state) = serde_json::from_slice::<State>(state_json) else {
            // A state of another form, made by the test.
            let _: serde_json::Value = serde_json::from_slice(state_json)?;
            return Ok(());
        };
        let mut devices = self.0.lock();
        devices.was_apart = !state.lens.is_empty();
        if !devices.was_apart {
            devices.here = state.bytes;
            return Ok(());
        }
        let came = devices.here.iter().map(|state| state.len() as u64);
        if came.eq(state.lens) { Ok(()) } else { Err("another length has come".into()) }
    }
}

struct Source {
    blobs: FakeBlobs,
    device: usize,
    at: usize,
}

impl BlobSource for Source {
    fn read(&mut self, buffer: &mut [u8]) -> Result<usize, VmError> {
        /// As a driver that gives a part of its state at a time.
        const PART_BYTES: usize = 300_000;
        self.blobs.pass(&[Gated::ReadsOf(self.device)]);
        let mut devices = self.blobs.0.lock();
        if matches!(devices.fault, Some(BlobFault::Read(after)) if self.at as u64 >= after) {
            return Err("the device has failed".into());
        }
        if devices.fault == Some(BlobFault::Endless) && self.device == 0 {
            return Ok(buffer.len().min(PART_BYTES));
        }
        let state = devices.there.get(self.device).map_or(&[][..], Vec::as_slice);
        let rest = state.get(self.at..).unwrap_or(&[]);
        let len = rest.len().min(buffer.len()).min(PART_BYTES);
        buffer[..len].copy_from_slice(&rest[..len]);
        self.at += len;
        devices.read_bytes += len as u64;
        Ok(len)
    }
}

impl Drop for Source {
    fn drop(&mut self) {
        self.blobs.pass(&[Gated::EndOf(self.device)]);
        self.blobs.0.lock().open -= 1;
    }
}

struct Sink {
    blobs: FakeBlobs,
    device: usize,
}

impl BlobSink for Sink {
    fn write(&self, bytes: &[u8]) -> Result<(), VmError> {
        self.blobs.pass(&[Gated::Writes, Gated::WritesOf(self.device)]);
        let mut devices = self.blobs.0.lock();
        let fault = devices.fault;
        let Some(here) = devices.here.get_mut(self.device) else {
            return Err("nothing was announced".into());
        };
        here.extend_from_slice(bytes);
        if matches!(fault, Some(BlobFault::Write(after)) if here.len() as u64 > after) {
            return Err("the device refuses its state".into());
        }
        Ok(())
    }

    fn begin(&self) -> Result<(), VmError> {
        self.blobs.pass(&[Gated::BeginOf(self.device)]);
        Ok(())
    }

    fn leave(&self) -> String {
        self.blobs.leave(self.device);
        "taking its state".to_owned()
    }
}
