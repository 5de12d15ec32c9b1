// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The log of what a vhost-user back end writes to guest memory while the guest moves.
//!
//! Owns the memory in which the back end marks pages (vhost-user, "Migration"), and the decision which may have new
//! contents: a back end that cannot log may have written every page until its rings stop, and all count as written then, once.
//! The back end marks what it wants: only pages of guest memory are looked at.

use std::fs::File;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use log::{info, warn};
use memory::{GuestRam, PAGE_BYTES, RamRegion};
use parking_lot::Mutex;
use vm_memory::{FileOffset, MmapRegion, VolatileMemory as _};

use super::session::Session;

/// Pages of a word of bits.
const WORD_PAGES: u64 = 64;
/// Words that are moved at a time.
const WORDS_AT_ONCE: usize = 512;

/// Memory in which the back end sets a bit for each page, by guest address.
pub(super) struct SharedLog {
    file: File,
    bits: MmapRegion<()>,
    len_bytes: u64,
}

impl SharedLog {
    /// For guest memory that ends at `end_gpa`.
    pub(super) fn new(end_gpa: u64) -> io::Result<Self> {
        // A word more, so that each page has one after its own.
        let words = end_gpa.div_ceil(PAGE_BYTES).div_ceil(WORD_PAGES).saturating_add(1);
        let len_bytes = words.saturating_mul(8).next_multiple_of(PAGE_BYTES);
        let file = memory::sealed_file("vhost-user-log", len_bytes)?;
        let mapped = FileOffset::new(file.try_clone()?, 0);
        let len = usize::try_from(len_bytes).map_err(io::Error::other)?;
        let bits = MmapRegion::from_file(mapped, len).map_err(io::Error::other)?;
        Ok(Self { file, bits, len_bytes })
    }

    pub(super) fn file(&self) -> &File {
        &self.file
    }

    pub(super) fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    /// Takes the bits of a word that are in the mask.
    fn take_masked(&self, word: u64, mask: u64) -> u64 {
        let offset = usize::try_from(word.saturating_mul(8)).unwrap_or(usize::MAX);
        // Beyond the end nothing is marked.
        let Ok(word) = self.bits.get_atomic_ref::<AtomicU64>(offset) else { return 0 };
        // Little-endian, as the processor is (vhost-user: bit `page % 8` of byte `page / 8`).
        if word.load(Ordering::Relaxed) & mask == 0 {
            return 0;
        }
        word.fetch_and(!mask, Ordering::SeqCst) & mask
    }

    /// Takes the bits of the next pages from `page` on, 64 at most.
    fn take(&self, page: u64, count: u64) -> u64 {
        let wanted = if count >= WORD_PAGES { u64::MAX } else { (1 << count) - 1 };
        let (word, shift) = (page / WORD_PAGES, page % WORD_PAGES);
        let low = self.take_masked(word, wanted << shift) >> shift;
        let above =
            wanted.checked_shr(u32::try_from(WORD_PAGES - shift).unwrap_or(64)).unwrap_or(0);
        if above == 0 {
            return low;
        }
        low | self.take_masked(word.saturating_add(1), above) << (WORD_PAGES - shift)
    }

    /// Moves all marks to the logs of the regions.
    fn collect(&self, ram: &GuestRam) {
        for region in ram.regions() {
            let page = |first: u64| region.gpa() / PAGE_BYTES + first;
            mark(region, |first, count| self.take(page(first), count));
        }
    }
}

/// Adds to a region's log of device writes, by 64 pages from `first` on.
fn mark(region: &RamRegion, bits: impl Fn(u64, u64) -> u64) {
    let end = region.len_pages();
    let mut words = Vec::with_capacity(WORDS_AT_ONCE);
    let mut first = 0;
    while first < end {
        words.clear();
        let from = first;
        while first < end && words.len() < WORDS_AT_ONCE {
            let count = WORD_PAGES.min(end - first);
            words.push(bits(first, count));
            first += count;
        }
        if words.iter().any(|word| *word != 0) {
            region.device_dirty().put_back(from..first, &words);
        }
    }
}

/// What a back end writes to guest memory, from creation until dropped.
pub struct WriteLog {
    id: String,
    session: Arc<Mutex<Session>>,
    /// None if the back end cannot log.
    log: Option<Arc<SharedLog>>,
}

fn started(session: &mut Session, ram: &GuestRam) -> io::Result<Option<Arc<SharedLog>>> {
    if !session.can_log() {
        return Ok(None);
    }
    let ends = ram.regions().iter().map(|region| region.gpa().saturating_add(region.len_bytes()));
    let log = Arc::new(SharedLog::new(ends.max().unwrap_or(0))?);
    session.start_log(&log).map_err(io::Error::other)?;
    Ok(Some(log))
}

impl WriteLog {
    /// Starts the log; later writes to guest memory are reported.
    pub(super) fn start(id: &str, session: &Arc<Mutex<Session>>, ram: &GuestRam) -> Self {
        let (begun, session_is_lost) = {
            let session = &mut *session.lock();
            if session.is_stopped() {
                // Nothing was written since memory was last read.
                session.take_has_run();
            }
            (started(session, ram), session.is_lost())
        };
        let log = match begun {
            Ok(Some(log)) => {
                info!("the back end of {id} logs what it writes to guest memory");
                Some(log)
            }
            Err(error) if session_is_lost => {
                warn!("the back end of {id} is lost as its log begins: {error}");
                None
            }
            other => {
                let why = other.err().map(|error| format!(" ({error})")).unwrap_or_default();
                warn!(
                    "the back end of {id} cannot log what it writes to guest memory{why}: all of it will have \
                     to be sent again when the guest has stopped"
                );
                None
            }
        };
        Self { id: id.to_owned(), session: Arc::clone(session), log }
    }

    /// The log of a scripted back end, and the file in which a test marks pages in its place.
    ///
    /// # Errors
    /// The host has no memory or sockets for it.
    #[cfg(any(test, feature = "testing"))]
    pub fn for_tests(id: &str, ram: &GuestRam) -> io::Result<(Self, File)> {
        use super::kind::{NetOffloads, VhostUserKind};
        use super::scripted::{Request, back_end_with_thread};

        const QUEUES: u16 = 2;
        let offloads = NetOffloads { csum: true, tso: true, ufo: true };
        let kind = VhostUserKind::Net { mac: [2, 0, 0, 0, 0, 1], mtu: None, offloads };
        let (connection, _ends_with_it) = back_end_with_thread(Request::usual_of_all)?;
        let limit = std::time::Duration::from_mins(1);
        let session = Session::over(connection, kind.needs(QUEUES), limit);
        let session = Arc::new(Mutex::new(session.map_err(io::Error::other)?));
        let log = Self::start(id, &session, ram);
        let file = log.log.as_ref().map(|log| log.file().try_clone());
        Ok((log, file.ok_or_else(|| io::Error::other("no log"))??))
    }

    /// Whether the back end may write every page until its rings stop.
    pub fn is_missing(&self) -> bool {
        self.log.is_none() && self.session.lock().has_run()
    }

    /// Whether the back end is known to be lost: not while the session with it is in use, at whose end it will be.
    pub fn is_lost(&self) -> bool {
        self.session.try_lock().is_some_and(|session| session.is_lost())
    }

    /// Id of the device.
    pub fn device_id(&self) -> &str {
        &self.id
    }

    /// Marks the pages written since the last call in the regions' logs of device writes.
    pub fn collect(&self, ram: &GuestRam) {
        if let Some(log) = &self.log {
            // Also of a back end that was lost: it still has the log.
            log.collect(ram);
            return;
        }
        // The driver may start them again, if the guest has not stopped.
        let is_complete = {
            let session = &mut *self.session.lock();
            session.is_stopped() && session.take_has_run()
        };
        if is_complete {
            for region in ram.regions() {
                mark(
                    region,
                    |_, count| if count >= WORD_PAGES { u64::MAX } else { (1 << count) - 1 },
                );
            }
        }
    }
}

impl Drop for WriteLog {
    fn drop(&mut self) {
        if self.log.is_some()
            && let Err(error) = self.session.lock().stop_log()
        {
            warn!("the back end of {} is lost as its log ends: {error}", self.id);
        }
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

    use std::os::unix::fs::FileExt as _;

    use memory::{RamConfig, RamLayout, ZoneSpec};

    use super::*;

    /// Marks pages as a back end does: byte by byte.
    fn mark_pages(log: &SharedLog, pages: &[u64]) {
        for page in pages {
            let mut byte = [0];
            log.file().read_exact_at(&mut byte, page / 8).unwrap();
            log.file().write_all_at(&[byte[0] | 1 << (page % 8)], page / 8).unwrap();
        }
    }

    #[test]
    fn bits_are_taken_wherever_a_region_begins() {
        let log = SharedLog::new(1 << 20).unwrap();
        mark_pages(&log, &[0, 63, 64, 70, 127, 128, 200]);
        assert_eq!(log.take(0, 64), 1 | 1 << 63);
        assert_eq!(log.take(0, 64), 0, "once");
        assert_eq!(log.take(70, 3), 1);
        assert_eq!(log.take(120, 64), 1 << 7 | 1 << 8);
        assert_eq!(log.take(64, 64), 1, "what was not asked for is kept");
        assert_eq!(log.take(190, 10), 0);
        assert_eq!(log.take(190, 11), 1 << 10);
        assert_eq!(log.take(1 << 40, 64), 0);
    }

    #[test]
    fn marks_arrive_at_their_pages_and_no_others() {
        let zone = |name: &str| ZoneSpec { shared: true, ..ZoneSpec::new(name, 2 << 20) };
        let config = RamConfig { zones: vec![zone("a"), zone("b")] };
        let ram = GuestRam::new(&config, RamLayout::default()).unwrap();
        ram.track_device_writes(true);
        let log = SharedLog::new(4 << 20).unwrap();
        mark_pages(&log, &[0, 511, 512, 600, 1023]);
        log.collect(&ram);
        let page = |number: u64| number * PAGE_BYTES;
        let mut first = vec![0; 8];
        (first[0], first[7]) = (1, 1 << 63);
        assert_eq!(ram.take_device_dirty(0, page(512)).unwrap(), first);
        let mut second = vec![0; 8];
        (second[0], second[1], second[7]) = (1, 1 << 24, 1 << 63);
        assert_eq!(ram.take_device_dirty(page(512), page(512)).unwrap(), second);
        log.collect(&ram);
        assert_eq!(ram.take_device_dirty(0, page(512)).unwrap(), [0; 8]);
    }
}
