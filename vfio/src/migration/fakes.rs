// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A fake function with VFIO migration v2, for tests and fuzz targets.
//!
//! Its state contains its length and a checksum, so that truncated or changed state is noticed as
//! with hardware: only when the function is to leave `RESUMING`. Never used by a VMM.
#![allow(missing_docs, reason = "not part of the interface")]

use std::collections::BTreeSet;
use std::io;
use std::ops::Range;
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};

use super::port::{DeviceState, LOG_PAGE_BYTES, MigrationSupport};

/// Outcome for a step that goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StepFailure {
    /// It is refused, nothing changes.
    Refused,
    /// The function fails.
    Failed,
    /// The function fails, and does not even say so.
    Silent,
}

/// A kind of calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FakeHang {
    /// Into a state.
    Into(DeviceState),
    Read,
    Write,
    Reset,
}

/// What a test may set and look at.
pub struct FakeHardware {
    pub support: Option<MigrationSupport>,
    pub state: DeviceState,
    /// What it remembers.
    pub memory: Vec<u8>,
    /// Steps to that state go wrong.
    pub failure: Option<(DeviceState, StepFailure)>,
    /// Reading ends with an error after so many bytes.
    pub breaks_after: Option<usize>,
    /// Calls of this kind hang while the lock is held by the test.
    pub hang: Option<(FakeHang, Arc<Mutex<()>>)>,
    /// Its state never ends.
    pub is_endless: bool,
    /// What it says of the length of its state, if that is not the length.
    pub estimate_bytes: Option<u64>,
    /// It takes no more than so many bytes.
    pub takes_at_most: Option<usize>,
    /// It can log what it writes.
    pub logs: bool,
    /// Its log gets lost.
    pub loses_log: bool,
    /// The states that it was in.
    pub history: Vec<DeviceState>,
    stream: Vec<u8>,
    at: usize,
    /// It does not even answer.
    pub is_silent: bool,
    logged: Option<Vec<Range<u64>>>,
    dirty: BTreeSet<u64>,
}

impl Default for FakeHardware {
    fn default() -> Self {
        Self {
            support: None,
            state: DeviceState::Running,
            memory: Vec::new(),
            failure: None,
            breaks_after: None,
            hang: None,
            is_endless: false,
            estimate_bytes: None,
            takes_at_most: None,
            logs: false,
            loses_log: false,
            history: Vec::new(),
            stream: Vec::new(),
            at: 0,
            is_silent: false,
            logged: None,
            dirty: BTreeSet::new(),
        }
    }
}

#[derive(Default)]
pub struct FakeMigration(Mutex<FakeHardware>);

fn refusal(errno: i32) -> io::Error {
    io::Error::from_raw_os_error(errno)
}

fn sum(bytes: &[u8]) -> u8 {
    bytes.iter().fold(7, |sum, byte| sum.rotate_left(1) ^ byte)
}

/// Its state, as it comes out of the stream.
fn packed(memory: &[u8]) -> Vec<u8> {
    let mut bytes = (memory.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(memory);
    bytes.push(sum(memory));
    bytes
}

fn unpacked(bytes: &[u8]) -> Option<Vec<u8>> {
    let (len, rest) = bytes.split_first_chunk::<8>()?;
    let (last, memory) = rest.split_last()?;
    (u64::from_le_bytes(*len) == memory.len() as u64 && *last == sum(memory))
        .then(|| memory.to_vec())
}

impl FakeMigration {
    /// What a test may set and look at.
    pub fn hardware_mut(&self) -> MutexGuard<'_, FakeHardware> {
        self.0.lock()
    }

    /// From here on it can be moved.
    pub fn allow(&self, p2p: bool, memory: &[u8]) {
        let mut hardware = self.0.lock();
        hardware.support = Some(MigrationSupport { stop_copy: true, p2p, pre_copy: false });
        hardware.memory = memory.to_vec();
    }

    /// Its state, as it comes out of the stream.
    pub fn hardware(&self) -> Vec<u8> {
        packed(&self.0.lock().memory)
    }

    /// Writes to guest memory, as a function that works does.
    pub fn write_memory(&self, gpa: u64) {
        let mut hardware = self.0.lock();
        let is_logged = |ranges: &Vec<Range<u64>>| ranges.iter().any(|range| range.contains(&gpa));
        if hardware.logged.as_ref().is_some_and(is_logged) {
            hardware.dirty.insert(gpa / LOG_PAGE_BYTES);
        }
    }

    pub fn is_logging(&self) -> bool {
        self.0.lock().logged.is_some()
    }

    /// Hangs as long as the test has it so, without a lock of its own.
    fn pass(&self, kind: FakeHang) {
        let hang = self.0.lock().hang.clone().filter(|(it, _)| *it == kind);
        if let Some((_, gate)) = hang {
            drop(gate.lock());
        }
    }

    pub(crate) fn reset(&self) {
        self.pass(FakeHang::Reset);
        let mut hardware = self.0.lock();
        hardware.state = DeviceState::Running;
        hardware.is_silent = false;
    }

    pub(crate) fn support(&self) -> io::Result<Option<MigrationSupport>> {
        let hardware = self.0.lock();
        if hardware.is_silent { Err(refusal(libc::EIO)) } else { Ok(hardware.support) }
    }

    pub(crate) fn set_state(&self, to: DeviceState) -> io::Result<()> {
        self.pass(FakeHang::Into(to));
        let mut hardware = self.0.lock();
        let Some(support) = hardware.support else { return Err(refusal(libc::ENOTTY)) };
        if let Some((_, failure)) = hardware.failure.filter(|(state, _)| *state == to) {
            if failure != StepFailure::Refused {
                hardware.state = DeviceState::Error;
            }
            hardware.is_silent = failure == StepFailure::Silent;
            return Err(refusal(libc::EIO));
        }
        let is_unknown = match to {
            DeviceState::Error => true,
            DeviceState::RunningP2p => !support.p2p,
            DeviceState::PreCopy | DeviceState::PreCopyP2p => !support.pre_copy,
            _ => false,
        };
        if is_unknown || hardware.state == DeviceState::Error {
            return Err(refusal(libc::EINVAL));
        }
        if hardware.state == DeviceState::Resuming && to != DeviceState::Resuming {
            let Some(memory) = unpacked(&hardware.stream) else {
                hardware.state = DeviceState::Error;
                return Err(refusal(libc::EINVAL));
            };
            hardware.memory = memory;
        }
        hardware.stream.clear();
        hardware.at = 0;
        if to == DeviceState::StopCopy {
            hardware.stream = packed(&hardware.memory);
        }
        hardware.state = to;
        hardware.history.push(to);
        Ok(())
    }

    pub(crate) fn state(&self) -> io::Result<u32> {
        let hardware = self.0.lock();
        if hardware.is_silent { Err(refusal(libc::EIO)) } else { Ok(hardware.state as u32) }
    }

    pub(crate) fn read(&self, buffer: &mut [u8]) -> io::Result<usize> {
        self.pass(FakeHang::Read);
        let mut hardware = self.0.lock();
        if hardware.state != DeviceState::StopCopy {
            return Err(refusal(libc::ENODEV));
        }
        if hardware.is_endless {
            return Ok(buffer.len());
        }
        let at = hardware.at;
        if hardware.breaks_after.is_some_and(|end| at >= end) {
            return Err(refusal(libc::EIO));
        }
        // In small pieces, as a pipe would.
        let rest = hardware.stream.get(at..).unwrap_or(&[]);
        let len = rest.len().min(buffer.len()).min(5);
        for (to, from) in buffer.iter_mut().zip(rest.iter().take(len)) {
            *to = *from;
        }
        hardware.at += len;
        Ok(len)
    }

    pub(crate) fn write(&self, data: &[u8]) -> io::Result<()> {
        self.pass(FakeHang::Write);
        let mut hardware = self.0.lock();
        if hardware.state != DeviceState::Resuming {
            return Err(refusal(libc::ENODEV));
        }
        if hardware.takes_at_most.is_some_and(|most| data.len() > most) {
            return Err(refusal(libc::ENOMEM));
        }
        hardware.stream.extend_from_slice(data);
        Ok(())
    }

    pub(crate) fn start_log(&self, ranges: &[Range<u64>]) -> io::Result<()> {
        let mut hardware = self.0.lock();
        if !hardware.logs || hardware.logged.is_some() {
            return Err(refusal(if hardware.logs { libc::EBUSY } else { libc::ENOTTY }));
        }
        hardware.logged = Some(ranges.to_vec());
        hardware.dirty.clear();
        Ok(())
    }

    pub(crate) fn take_log(&self, range: &Range<u64>) -> io::Result<Vec<u64>> {
        let mut hardware = self.0.lock();
        if hardware.loses_log || hardware.logged.is_none() {
            return Err(refusal(libc::EIO));
        }
        let first = range.start / LOG_PAGE_BYTES;
        let end = range.end.div_ceil(LOG_PAGE_BYTES);
        let mut words = vec![0; usize::try_from((end - first).div_ceil(64)).unwrap_or(0)];
        for page in hardware.dirty.extract_if(first..end, |_| true) {
            let bit = page - first;
            let word = usize::try_from(bit / 64).ok().and_then(|index| words.get_mut(index));
            if let Some(word) = word {
                *word |= 1 << (bit % 64);
            }
        }
        Ok(words)
    }

    pub(crate) fn stop_log(&self) -> io::Result<()> {
        self.0.lock().logged.take().map(|_ranges| ()).ok_or_else(|| refusal(libc::EINVAL))
    }
}
