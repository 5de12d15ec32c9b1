// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! How long memory will still be populated and mapped for passed-through devices: whether a guest's driver can
//! wait for it.
//!
//! Owns the longest wait that a guest is to see, and the forecast. Rates of this host with this memory are measured, as
//! pages, processors and the IOMMU make more difference than any table could say: of each kind of page on each node by the
//! threads of that node ([`memory::LaneProgress`]), and of what is mapped after all others by a sample of each kind. Nodes
//! work side by side, so the last of them counts; what is mapped last, and BARs that other devices reach, come after that.
//!
//! ```text
//!   of a node: what is left of each lane x what a byte of it has taken a thread / threads
//!              not less than at the pace of the node so far, so that chunks which do not end count
//!   all:       slowest node + mapped last + BARs
//! ```
//!
//! The forecast is made when devices are about to be shown to the guest, and again and again after that ([`Review`]), from
//! what was done in the last moments. Must never wait for longer than a guest may for its devices to be opened.

use std::time::Duration;

use memory::LaneProgress;

/// The longest wait at the gate that is planned. Linux reports a stall of RCU after 21 s by default, and some
/// kernels are configured for less; waits of a virtual machine that is short of processors come on top.
pub const GATE_WAIT_MAX: Duration = Duration::from_secs(5);

/// How often it is looked whether enough has been mapped.
pub(crate) const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// Time that a measurement takes at least, unless all is mapped before: the first chunks may have been there.
const MEASURE_MIN: Duration = Duration::from_millis(50);

/// Time for a measurement in which a lane has no chunk done yet: one of 1 GiB pages may take that long.
const FIRST_CHUNK_MAX: Duration = Duration::from_secs(1);

/// Time for a measurement, which delays the devices; about as long as one takes to be reset.
const MEASURE_MAX: Duration = Duration::from_millis(300);

/// One of so many parts of the memory has to be mapped for a measurement.
const SAMPLE_DIVISOR: u64 = 32;

/// How often a forecast is repeated.
const REVIEW_INTERVAL: Duration = Duration::from_millis(100);

/// The last moments, from which it is made then: long enough for several chunks of each thread.
const WINDOW: Duration = Duration::from_secs(1);

/// If nothing at all is done for so long, nothing can be said any more, and the wait counts as too long.
const STALL_MAX: Duration = Duration::from_millis(2500);

/// Memory of one kind of page that is mapped when all is populated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LastProgress {
    /// What is still to be mapped.
    pub left_bytes: u64,
    /// A chunk that was mapped before, and how long that took; `None` while there is none.
    pub sample: Option<(u64, Duration)>,
}

/// How far memory is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct PinWork {
    /// How long it has been populated.
    pub took: Duration,
    /// What is populated, and mapped then if it is not mapped last.
    pub lanes: Vec<LaneProgress>,
    /// What is mapped last.
    pub last: Vec<LastProgress>,
    /// It has ended, however.
    pub is_over: bool,
}

impl PinWork {
    fn done_bytes(&self) -> u64 {
        sum(&self.lanes, |lane| lane.done_bytes)
    }

    fn total_bytes(&self) -> u64 {
        sum(&self.lanes, |lane| lane.total_bytes)
    }

    fn chunk_time(&self) -> Duration {
        chunk_time(&self.lanes)
    }

    /// Time that is left by what was done since `before`, and where that is nothing by all that was; `None` if that
    /// cannot be said.
    pub fn left(&self, before: &Self) -> Option<Duration> {
        if self.is_over {
            return Some(Duration::ZERO);
        }
        // Threads are being started.
        if self.lanes.is_empty() {
            return None;
        }
        let mut slowest = Duration::ZERO;
        let mut at = 0;
        while let Some(first) = self.lanes.get(at) {
            let same = self.lanes[at..].iter().take_while(|lane| lane.node == first.node).count();
            slowest = slowest.max(self.of_node(before, at..at + same)?);
            at += same;
        }
        let last = self.last.iter().try_fold(Duration::ZERO, |sum, last| {
            let (bytes, took) = match last {
                LastProgress { left_bytes: 0, .. } => (1, Duration::ZERO),
                last => last.sample?,
            };
            Some(sum.saturating_add(at_rate(last.left_bytes, bytes, took)?))
        })?;
        Some(slowest.saturating_add(last))
    }

    /// Time that is left for the lanes of a node.
    fn of_node(&self, before: &Self, at: std::ops::Range<usize>) -> Option<Duration> {
        let (lanes, of_all) = (&self.lanes[at.clone()], &self.lanes);
        let left_bytes = sum(lanes, LaneProgress::left_bytes);
        if left_bytes == 0 {
            return Some(Duration::ZERO);
        }
        let has_begun = lanes.iter().any(|lane| lane.done_bytes > 0);
        if !has_begun && self.took >= FIRST_CHUNK_MAX {
            return None;
        }
        let mut busy = Duration::ZERO;
        for (lane, at) in lanes.iter().zip(at) {
            let recent = before.lanes.get(at).map(|before| since(lane, before));
            let recent = recent.filter(|recent| recent.done_bytes > 0);
            // The same pages on another node are the best guess for what has not been begun here.
            let same = |other: &&LaneProgress| other.kind == lane.kind && other.done_bytes > 0;
            let own = Some(*lane).filter(|lane| lane.done_bytes > 0);
            let known = recent.or(own).or_else(|| of_all.iter().find(same).copied());
            if lane.left_bytes() > 0 {
                let LaneProgress { done_bytes, busy: took, .. } = known?;
                busy = busy.saturating_add(at_rate(lane.left_bytes(), done_bytes, took)?);
            }
        }
        let threads = lanes.first().map_or(1, |lane| lane.threads.max(1));
        let by_threads = busy / u32::try_from(threads).unwrap_or(u32::MAX);
        Some(by_threads.max(self.at_pace(before, lanes, left_bytes)))
    }

    /// Time that is left at the pace of a node: each thread may have begun a chunk that is not counted yet.
    fn at_pace(&self, before: &Self, lanes: &[LaneProgress], left_bytes: u64) -> Duration {
        let chunk = chunk_time(lanes);
        let done = sum(lanes, |lane| lane.done_bytes);
        let node = lanes.first().and_then(|lane| lane.node);
        let done_before = before.lanes.iter().filter(|lane| lane.node == node);
        let done_before = sum(done_before, |lane| lane.done_bytes);
        let (bytes, took) = match done.saturating_sub(done_before) {
            0 => (done, self.took),
            recent => (recent, self.took.saturating_sub(before.took)),
        };
        if bytes == 0 {
            return Duration::ZERO;
        }
        at_rate(left_bytes, bytes, took.saturating_sub(chunk)).unwrap_or(Duration::MAX)
    }
}

fn sum<'a>(
    lanes: impl IntoIterator<Item = &'a LaneProgress>,
    of: impl Fn(&LaneProgress) -> u64,
) -> u64 {
    lanes.into_iter().map(of).fold(0, u64::saturating_add)
}

/// What a chunk of these has taken a thread.
fn chunk_time(lanes: &[LaneProgress]) -> Duration {
    let chunks = sum(lanes, |lane| lane.done_chunks);
    let busy = lanes.iter().map(|lane| lane.busy).fold(Duration::ZERO, Duration::saturating_add);
    busy / u32::try_from(chunks.max(1)).unwrap_or(u32::MAX)
}

/// What has been done of a lane since `before`.
fn since(now: &LaneProgress, before: &LaneProgress) -> LaneProgress {
    LaneProgress {
        done_bytes: now.done_bytes.saturating_sub(before.done_bytes),
        busy: now.busy.saturating_sub(before.busy),
        ..*now
    }
}

/// Whether a driver that enables DMA now would have to wait for longer than [`GATE_WAIT_MAX`], with `bars` for the BARs that
/// are mapped after memory; `None` while that is not known, which is not for longer than `waited` may be. A measurement that
/// is `cancelled` ends with what is known.
pub(crate) fn judge(
    work: &PinWork,
    bars: Duration,
    waited: Duration,
    cancelled: bool,
) -> Option<bool> {
    if work.is_over {
        // A device that is withheld would be shown at once.
        return Some(false);
    }
    let left = work.left(&PinWork::default()).map(|left| left.saturating_add(bars));
    let has_sample = work.done_bytes() >= work.total_bytes() / SAMPLE_DIVISOR;
    let is_measured = left.is_some() && has_sample && work.took >= MEASURE_MIN;
    // What others who populate the memory take to end is no measure of it.
    let is_over_time =
        if left.is_some() { work.took >= MEASURE_MAX } else { waited >= FIRST_CHUNK_MAX };
    let is_decided = is_measured || is_over_time || cancelled;
    is_decided.then(|| left.is_none_or(|left| left > GATE_WAIT_MAX))
}

/// Repeats a forecast.
#[derive(Debug)]
pub(crate) struct Review {
    bars: Duration,
    /// Where the last moments begin.
    before: PinWork,
    /// Where they will.
    next: PinWork,
    /// When it was made last.
    looked: Duration,
}

impl Review {
    pub fn new(bars: Duration) -> Self {
        let (before, next) = (PinWork::default(), PinWork::default());
        Self { bars, before, next, looked: Duration::ZERO }
    }

    /// Whether it is time to look again, so long after populating began.
    pub fn is_due(&self, took: Duration) -> bool {
        took >= self.looked.saturating_add(REVIEW_INTERVAL)
    }

    /// The time that is left, if it is more than a guest may wait. What cannot be said is not too much, unless nothing
    /// is done for long.
    pub fn look(&mut self, now: &PinWork) -> Option<Duration> {
        self.looked = now.took;
        let idle = now.took.saturating_sub(self.next.took);
        let is_idle = now.done_bytes() == self.next.done_bytes();
        let has_work = now.lanes.iter().any(|lane| lane.left_bytes() > 0);
        let is_stalled = is_idle && has_work && idle >= STALL_MAX.saturating_add(now.chunk_time());
        let left = if is_stalled { Some(Duration::MAX) } else { now.left(&self.before) };
        // As long as nothing is done, the moments become longer.
        if idle >= WINDOW && !is_idle {
            self.before = std::mem::replace(&mut self.next, now.clone());
        }
        let left = left.unwrap_or_default().saturating_add(self.bars);
        (!now.is_over && left > GATE_WAIT_MAX).then_some(left)
    }
}

/// Time for `left_bytes` if `bytes` took so long.
fn at_rate(left_bytes: u64, bytes: u64, took: Duration) -> Option<Duration> {
    if left_bytes == 0 {
        return Some(Duration::ZERO);
    }
    // What is too large for a number is not unknown.
    let nanos = u128::from(left_bytes).saturating_mul(took.as_nanos());
    let nanos = nanos.checked_div(u128::from(bytes))?;
    Some(Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX)))
}

#[cfg(test)]
#[path = "pin_time_tests.rs"]
mod tests;
