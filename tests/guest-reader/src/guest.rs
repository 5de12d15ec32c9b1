// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A running test guest, attached to by the process id of its VMM.
//!
//! Owns finding it, reading it and asking it for something else. What it says is not believed
//! blindly: addresses and counts from the guest are checked before they are used.

use std::time::{Duration, Instant};

use thiserror::Error;

use crate::abi::{self, command, control, param, vcpu};
use crate::cmdline::Settings;
use crate::histogram::Histogram;
use crate::layout::{List, Range};
use crate::memory::{GuestMemory, MemoryError, Segment, Words};
use crate::process::{self, ProcessError};
use crate::status::{Status, VcpuStatus};
use crate::tsc;

/// How often something awaited is looked at.
const POLL: Duration = Duration::from_millis(1);

/// Why the guest could not be read.
#[derive(Debug, Error)]
pub enum GuestError {
    /// Its VMM could not be inspected.
    #[error("cannot attach to process {pid}")]
    Process {
        /// Which process.
        pid: u32,
        /// Why.
        #[source]
        source: ProcessError,
    },
    /// Its memory could not be read.
    #[error("cannot read the guest")]
    Memory(#[from] MemoryError),
    /// The control page says something else, or nothing yet.
    #[error("there is no test guest here, or it has not started yet (first word {found:#x})")]
    NoGuest {
        /// First word of the control page.
        found: u64,
    },
    /// The guest speaks another version of the ABI.
    #[error("the guest has ABI version {found}, this reader has {}", abi::VERSION)]
    Version {
        /// Its version.
        found: u64,
    },
    /// The control page does not fit the guest's memory.
    #[error("the guest's {what} make no sense")]
    Nonsense {
        /// Which words.
        what: &'static str,
    },
    /// Something awaited did not happen in time.
    #[error("{what} did not happen within {} ms", waited.as_millis())]
    TimedOut {
        /// What was awaited.
        what: String,
        /// How long.
        waited: Duration,
        /// What was in the way at the end.
        #[source]
        source: Option<Box<GuestError>>,
    },
    /// A setting that the guest does not know.
    #[error("the setting {word:?} is not understood")]
    Setting {
        /// The `name=value` word.
        word: String,
    },
}

impl GuestError {
    /// Whether it may go away by itself: the guest has not started, or a page is to arrive.
    pub fn is_transient(&self) -> bool {
        match self {
            Self::NoGuest { .. } | Self::Memory(MemoryError::NotResident { .. }) => true,
            Self::Process { source, .. } => matches!(source, ProcessError::NoRam { .. }),
            _ => false,
        }
    }
}

/// How to find guest RAM when the usual way does not do.
#[derive(Clone, Debug, Default)]
pub struct AttachOptions {
    /// More names (parts of them) of files that hold guest RAM.
    pub names: Vec<String>,
    /// Whole names of memfds in the order of their guest addresses. Those that are not among them follow by
    /// their descriptors, which is the order in which a process has made them only if it has closed no other
    /// descriptor meanwhile.
    pub order: Vec<String>,
    /// RAM below the MMIO hole, bytes; otherwise found out.
    pub low_bytes: Option<u64>,
    /// Where everything is, when no guess can be right.
    pub segments: Option<Vec<Segment>>,
    /// The guest's TSC frequency, kHz; otherwise the host's.
    pub tsc_khz: Option<u64>,
}

/// How long to wait for something.
#[derive(Clone, Copy, Debug)]
pub struct Patience(pub Duration);

impl Patience {
    /// So many milliseconds.
    pub const fn millis(milliseconds: u64) -> Self {
        Self(Duration::from_millis(milliseconds))
    }

    /// Tries until something comes of it; a transient error counts as not yet.
    pub fn until<T>(
        self,
        what: &str,
        mut attempt: impl FnMut() -> Result<Option<T>, GuestError>,
    ) -> Result<T, GuestError> {
        let start = Instant::now();
        loop {
            let reason = match attempt() {
                Ok(Some(value)) => return Ok(value),
                Ok(None) => None,
                Err(error) if error.is_transient() => Some(Box::new(error)),
                Err(error) => return Err(error),
            };
            if start.elapsed() >= self.0 {
                let what = what.to_owned();
                return Err(GuestError::TimedOut { what, waited: self.0, source: reason });
            }
            std::thread::sleep(POLL);
        }
    }
}

/// A test guest in a VMM process.
#[derive(Debug)]
pub struct Guest {
    pid: u32,
    memory: GuestMemory,
    khz: u64,
}

impl Guest {
    /// Attaches to the guest of the VMM `pid`, which must have come as far as its control page.
    pub fn attach(pid: u32) -> Result<Self, GuestError> {
        Self::attach_with(pid, &AttachOptions::default())
    }

    /// The same, waiting for the guest to start or (on the destination of a migration) its
    /// control page to arrive.
    pub fn attach_within(pid: u32, patience: Patience) -> Result<Self, GuestError> {
        patience.until("the start of the guest", || Self::attach(pid).map(Some))
    }

    /// The same with options.
    pub fn attach_with(pid: u32, options: &AttachOptions) -> Result<Self, GuestError> {
        let wrap = |source| GuestError::Process { pid, source };
        let khz = options.tsc_khz.unwrap_or_else(tsc::khz);
        let files = process::ram_files(pid, &options.names, &options.order).map_err(wrap)?;
        if !files.is_empty() {
            let mut memory = GuestMemory::new(files, options.low_bytes);
            if let Some(segments) = &options.segments {
                memory = memory.with_segments(segments.clone());
            }
            let mut guest = Self { pid, memory, khz };
            let page = guest.control()?;
            if options.low_bytes.is_none() && options.segments.is_none() {
                guest.memory.place_hole(page.at(control::RAM_END));
            }
            return Ok(guest);
        }
        for mapping in process::anonymous_mappings(pid).map_err(wrap)? {
            let memory = GuestMemory::new(vec![mapping], options.low_bytes);
            let guest = Self { pid, memory, khz };
            if guest.control().is_ok() {
                return Ok(guest);
            }
        }
        Err(wrap(ProcessError::NoRam { pid }))
    }

    /// The VMM's process id.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Frequency that ticks are converted with, kHz.
    pub fn tsc_khz(&self) -> u64 {
        self.khz
    }

    /// Guest RAM.
    pub fn memory(&self) -> &GuestMemory {
        &self.memory
    }

    pub(crate) fn control(&self) -> Result<Words, GuestError> {
        let page = self.memory.page(abi::CONTROL_GPA)?;
        let found = page.at(control::MAGIC);
        if found != abi::MAGIC {
            return Err(GuestError::NoGuest { found });
        }
        match page.at(control::VERSION) {
            abi::VERSION => Ok(page),
            found => Err(GuestError::Version { found }),
        }
    }

    pub(crate) fn vcpu_count(page: &Words) -> Result<u64, GuestError> {
        let count = page.at(control::VCPUS);
        if count == 0 || count > abi::MAX_VCPUS {
            return Err(GuestError::Nonsense { what: "vCPUs" });
        }
        Ok(count)
    }

    pub(crate) fn ranges(page: &Words) -> Result<List<Range>, GuestError> {
        let mut ranges = List::new();
        let mut next = 0;
        for index in 0..page.at(control::RANGE_COUNT).min(control::MAX_RANGES as u64) {
            let entry = control::RANGES + index * control::RANGE_BYTES;
            let (gpa, first, pages) = (page.at(entry), page.at(entry + 8), page.at(entry + 16));
            let bytes = pages.checked_mul(abi::PAGE_BYTES);
            if first != next || bytes.and_then(|bytes| gpa.checked_add(bytes)).is_none() {
                return Err(GuestError::Nonsense { what: "ranges of pages" });
            }
            next += pages;
            ranges.push(Range { gpa, first, pages });
        }
        if next != page.at(control::PAGES) {
            return Err(GuestError::Nonsense { what: "ranges of pages" });
        }
        Ok(ranges)
    }

    /// What the guest says of itself. A vCPU whose page is not resident is left out.
    pub fn status(&self) -> Result<Status, GuestError> {
        let page = self.control()?;
        let parameters = resident(self.memory.page(abi::PARAM_GPA))?;
        let mut status = Status::new(&page, parameters.as_ref(), self.khz);
        for index in 0..Self::vcpu_count(&page)? {
            status.vcpus.push(self.vcpu(index)?);
        }
        Ok(status)
    }

    /// One vCPU; none when its page is not resident.
    pub fn vcpu(&self, index: u64) -> Result<Option<VcpuStatus>, GuestError> {
        let words = resident(self.memory.page(abi::vcpu_gpa(index)))?;
        Ok(words.map(|words| VcpuStatus::new(&words, self.khz)))
    }

    /// Sum of the heartbeats of all vCPUs whose pages are resident: one word each, cheap enough to
    /// be watched at short intervals.
    pub fn heartbeat(&self) -> Result<u64, GuestError> {
        let count = self.memory.word(abi::CONTROL_GPA + control::VCPUS)?.min(abi::MAX_VCPUS);
        let mut sum: u64 = 0;
        for index in 0..count {
            let beat = resident(self.memory.word(abi::vcpu_gpa(index) + vcpu::HEARTBEAT))?;
            sum = sum.wrapping_add(beat.unwrap_or(0));
        }
        Ok(sum)
    }

    /// Access times, one histogram per vCPU; none where the vCPU's own page is not resident. Counts
    /// in other pages that are holes are zero: a page of zeros is not sent in a migration and
    /// stays a hole at the destination until a count in it grows. While pages still arrive, such
    /// counts may be on their way.
    pub fn histograms(&self) -> Result<Vec<Option<Histogram>>, GuestError> {
        let count = Self::vcpu_count(&self.control()?)?;
        let read = |index| {
            let gpa = abi::vcpu_gpa(index);
            if resident(self.memory.word(gpa + vcpu::HEARTBEAT))?.is_none() {
                return Ok(None);
            }
            let block = self.memory.words_or_zero(gpa, vcpu::STATISTICS_BYTES / 8)?;
            Ok(Some(Histogram::new(&block, self.khz)))
        };
        (0..count).map(read).collect()
    }

    /// Access times of all vCPUs together; an error when the page of one is not resident.
    pub fn histogram(&self) -> Result<Histogram, GuestError> {
        let mut sum: Option<Histogram> = None;
        for (index, histogram) in (0..).zip(self.histograms()?) {
            let gpa = abi::vcpu_gpa(index);
            let histogram = histogram.ok_or(MemoryError::NotResident { gpa })?;
            match &mut sum {
                None => sum = Some(histogram),
                Some(sum) => sum.merge(&histogram),
            }
        }
        sum.ok_or(GuestError::Nonsense { what: "vCPUs" })
    }

    /// Waits until the status is as wanted.
    pub fn wait_until(
        &self,
        what: &str,
        patience: Patience,
        mut wanted: impl FnMut(&Status) -> bool,
    ) -> Result<Status, GuestError> {
        patience.until(what, || {
            let status = self.status()?;
            Ok(wanted(&status).then_some(status))
        })
    }

    /// Waits until every vCPU has shown a sign of life after this call.
    pub fn wait_for_heartbeat(&self, patience: Patience) -> Result<Status, GuestError> {
        let mut first: Option<Vec<u64>> = None;
        self.wait_until("a heartbeat of every vCPU", patience, |status| {
            if status.stage != "running" || !status.complete() {
                return false;
            }
            let beats: Vec<u64> = status.known().map(|vcpu| vcpu.heartbeat).collect();
            let before = first.get_or_insert_with(|| beats.clone());
            before.len() == beats.len() && before.iter().zip(&beats).all(|(a, b)| a != b)
        })
    }

    /// Changes parameters: blank-separated `name=value` words as on the command line, on top of
    /// what the parameter page holds, except that `prefill` and `reset` are off unless named.
    /// Gives the new generation; [`Guest::wait_for_generation`] waits until it is in use.
    pub fn set(&self, words: &str) -> Result<u64, GuestError> {
        let page = self.control()?;
        let old = self.memory.page(abi::PARAM_GPA)?;
        let mut settings = Settings::from_fields(|field| old.at(field));
        for word in words.split_ascii_whitespace() {
            if settings.apply(word.as_bytes()).is_none() {
                return Err(GuestError::Setting { word: word.to_owned() });
            }
        }
        for (field, value) in settings.fields(page.at(control::PAGES), Self::vcpu_count(&page)?) {
            if field != param::COMMAND {
                self.memory.set_word(abi::PARAM_GPA + field, value)?;
            }
        }
        let generation = old.at(param::GENERATION).wrapping_add(1);
        self.memory.set_word(abi::PARAM_GPA + param::GENERATION, generation)?;
        Ok(generation)
    }

    /// Waits until every vCPU works by the parameters of `generation`.
    pub fn wait_for_generation(
        &self,
        generation: u64,
        patience: Patience,
    ) -> Result<Status, GuestError> {
        self.wait_until("taking up the parameters", patience, |status| {
            status.complete() && status.known().all(|vcpu| vcpu.generation == generation)
        })
    }

    /// Makes every vCPU hold still between two iterations, and waits until they do.
    pub fn hold(&self, patience: Patience) -> Result<Status, GuestError> {
        self.memory.set_word(abi::PARAM_GPA + param::COMMAND, command::PAUSE)?;
        self.wait_until("holding still", patience, |status| status.all_in("paused"))
    }

    /// Lets the vCPUs continue after [`Guest::hold`].
    pub fn release(&self) -> Result<(), GuestError> {
        Ok(self.memory.set_word(abi::PARAM_GPA + param::COMMAND, command::RUN)?)
    }
}

/// A page that is not resident is an answer, not an error.
fn resident<T>(outcome: Result<T, MemoryError>) -> Result<Option<T>, GuestError> {
    match outcome {
        Ok(value) => Ok(Some(value)),
        Err(MemoryError::NotResident { .. }) => Ok(None),
        Err(error) => Err(error.into()),
    }
}
