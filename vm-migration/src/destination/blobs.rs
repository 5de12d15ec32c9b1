// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Blobs on their way from all connections into the machine.
//!
//! Owns the order of their bytes, and a thread for each blob, which writes them in order. A thread of a connection only puts
//! a chunk here, and never waits: a device that takes its bytes slowly holds up no other one, nor the messages behind. The
//! source is told how much is written, and sends of a blob no more than its window beyond that, which is all that is held
//! of it here. A call into a device may never return: its thread shares with the others no more than it uses, and is left
//! behind when it hangs.

use std::collections::BTreeMap;
use std::os::fd::{AsRawFd as _, RawFd};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use crate::error::{Cause, Failure, Step};
use crate::left_threads::Stay;
use crate::protocol::ProtocolError;
use crate::protocol::blobs::{BlobChunk, BlobError, BlobInfo, window_bytes};
use crate::vm::BlobSink;

/// The most chunks of a blob that wait to be written. Whole ones fill the window with 32.
const HELD_MAX: usize = 1024;

const WRITING: &str = "writing the state of devices";

/// All blobs of a state.
pub(crate) struct Blobs {
    /// Each is shared with its thread alone.
    all: Vec<Arc<Blob>>,
    window_bytes: u64,
    news: Arc<News>,
    /// What the source was told of.
    told: Mutex<Vec<u64>>,
}

/// What the threads say.
struct News {
    /// Written when a device takes bytes, more of a blob is written, or something has failed.
    event: EventFd,
    /// The first failure of a writer. Locked for one access.
    failure: Mutex<Option<Failure>>,
}

struct Blob {
    name: String,
    len_bytes_max: u64,
    sink: Box<dyn BlobSink>,
    /// Not locked while bytes are written.
    assembly: Mutex<Assembly>,
    /// A chunk or the end has come, or the writer is to end, or has ended.
    changed: Condvar,
}

#[derive(Default)]
struct Assembly {
    /// Bytes that are written.
    written: u64,
    /// The end of what the writer has taken: what it has and has not written yet is held as well.
    taken: u64,
    /// The end of all that has come.
    highest: u64,
    /// Chunks that the writer has not taken, by offset.
    held: BTreeMap<u64, Vec<u8>>,
    /// The length, once it has come.
    end: Option<u64>,
    /// Why bytes were refused.
    refusal: Option<String>,
    /// The device takes bytes.
    has_begun: bool,
    /// The writer is to end.
    is_over: bool,
    /// The writer.
    stay: Stay,
}

/// The threads that write blobs. Dropping this ends them, each after what it is writing; one in the call of a device that
/// takes longer than the limit is left behind.
pub(crate) struct Writers {
    blobs: Arc<Blobs>,
    leave: Duration,
    threads: Vec<(usize, JoinHandle<()>)>,
}

impl Writers {
    /// Starts a thread for each blob. At their end they are waited for so long.
    ///
    /// # Errors
    /// What the host refuses.
    pub(super) fn start(blobs: &Arc<Blobs>, leave: Duration) -> Result<Self, Cause> {
        let mut writers = Self { blobs: Arc::clone(blobs), leave, threads: Vec::new() };
        for (number, blob) in blobs.all.iter().enumerate() {
            let (blob, news) = (Arc::clone(blob), Arc::clone(&blobs.news));
            let write = move || blob.write(&news);
            let thread = stoppable_thread::spawn("mig-state", write).map_err(Cause::Resource)?;
            writers.threads.push((number, thread));
        }
        Ok(writers)
    }
}

impl Drop for Writers {
    fn drop(&mut self) {
        for blob in &self.blobs.all {
            blob.assembly.lock().is_over = true;
            blob.changed.notify_all();
        }
        let deadline = Instant::now() + self.leave;
        for (number, thread) in self.threads.drain(..) {
            let Some(blob) = self.blobs.all.get(number) else { continue };
            if !blob.wait_for_end(deadline) {
                // Another one was left when it was found to hang, and that was said.
                if !blob.is_left() {
                    let hangs = blob.leave(self.leave);
                    log::error!("{}", error_text::chain(&hangs));
                }
            } else if thread.join().is_err() {
                log::error!("a thread that writes the state of a device has panicked");
            }
        }
    }
}

impl Blobs {
    /// The blobs of a list, each with what takes its bytes.
    ///
    /// # Errors
    /// The machine has not prepared for all of them, or the host has no descriptor left.
    pub(crate) fn new(infos: Vec<BlobInfo>, sinks: Vec<Box<dyn BlobSink>>) -> Result<Self, Cause> {
        let count = infos.len();
        if count != sinks.len() {
            let what = "the machine does not take all announced parts of the state".to_owned();
            let remedy = "update the destination";
            return Err(Cause::Unsupported { what, remedy });
        }
        let blob = |(info, sink): (BlobInfo, _)| {
            Arc::new(Blob {
                name: info.name,
                len_bytes_max: info.len_bytes_max,
                sink,
                assembly: Mutex::default(),
                changed: Condvar::new(),
            })
        };
        let event = EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC).map_err(Cause::Resource)?;
        Ok(Self {
            all: infos.into_iter().zip(sinks).map(blob).collect(),
            window_bytes: window_bytes(count),
            news: Arc::new(News { event, failure: Mutex::new(None) }),
            told: Mutex::new(vec![0; count]),
        })
    }

    /// Takes a chunk. Does not wait.
    ///
    /// # Errors
    /// It does not fit to what has come before, or the machine has refused what was before it.
    pub(crate) fn put(&self, chunk: BlobChunk) -> Result<(), BlobError> {
        let BlobChunk { blob: number, offset, bytes } = chunk;
        let Some(blob) = self.all.get(usize::from(number)) else {
            return Err(BlobError::Unknown { blob: number, count: self.all.len() });
        };
        blob.put(offset, bytes, self.window_bytes)
    }

    /// Readable when there may be [`news`](Self::news).
    pub(super) fn fd(&self) -> RawFd {
        self.news.event.as_raw_fd()
    }

    /// Whether all devices take bytes.
    ///
    /// # Errors
    /// One refuses, or hangs: its call takes so long already. It is left behind then.
    pub(super) fn have_begun(&self, limit: Duration) -> Result<bool, Cause> {
        // What comes later is heard by the next wait.
        let _ = self.news.event.read();
        if let Some(failure) = self.news.failure.lock().take() {
            return Err(failure.cause);
        }
        self.check_calls(limit)?;
        Ok(self.all.iter().all(|blob| blob.assembly.lock().has_begun))
    }

    /// Leaves a device behind whose call takes so long already.
    ///
    /// # Errors
    /// Names it.
    pub(super) fn check_calls(&self, limit: Duration) -> Result<(), Cause> {
        let waited = |blob: &Arc<Blob>| {
            let stay = &blob.assembly.lock().stay;
            stay.hangs(limit).filter(|_| !stay.is_left)
        };
        match self.all.iter().find_map(|blob| Some((blob, waited(blob)?))) {
            Some((blob, waited)) => Err(blob.leave(waited)),
            None => Ok(()),
        }
    }

    /// How much of each blob is written, if the source has not been told of that.
    ///
    /// # Errors
    /// The machine has refused bytes.
    pub(super) fn news(&self) -> Result<Option<Vec<u64>>, Failure> {
        if self.news.event.read().is_err() {
            return Ok(None);
        }
        if let Some(failure) = self.news.failure.lock().take() {
            return Err(failure);
        }
        let written: Vec<u64> = self.written().collect();
        let mut told = self.told.lock();
        if *told == written {
            return Ok(None);
        }
        told.clone_from(&written);
        Ok(Some(written))
    }

    /// The lengths of the blobs, if all are complete.
    ///
    /// # Errors
    /// Names one that is not.
    pub(crate) fn finish(&self) -> Result<Vec<u64>, ProtocolError> {
        self.all.iter().map(|blob| Ok(blob.finish()?)).collect()
    }

    /// The number of bytes of each that are written.
    pub(crate) fn written(&self) -> impl Iterator<Item = u64> {
        self.all.iter().map(|blob| blob.assembly.lock().written)
    }

    /// Writes on this thread all that can be written.
    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn write_now(&self) {
        for blob in &self.all {
            while matches!(blob.write_next(), Ok(true)) {}
        }
    }
}

impl News {
    fn tell(&self, done: Result<(), Failure>) {
        if let Err(failure) = done {
            self.failure.lock().get_or_insert(failure);
        }
        // It cannot overflow: it is read long before.
        let _ = self.event.write(1);
    }
}

/// Says that the thread of a blob has ended, also if it has panicked.
struct EndOfThread<'a>(&'a Blob, &'a News);

impl Drop for EndOfThread<'_> {
    fn drop(&mut self) {
        let Self(blob, news) = self;
        blob.assembly.lock().stay.end(&blob.name);
        blob.changed.notify_all();
        news.tell(if std::thread::panicking() {
            let what = std::io::Error::other("a thread that writes the state of a device panicked");
            Err(Failure::new(WRITING, Cause::Resource(what)))
        } else {
            Ok(())
        });
    }
}

impl Blob {
    /// Has the device take bytes, and writes the blob, to its end or until told to end.
    fn write(&self, news: &News) {
        let _ended = EndOfThread(self, news);
        let begun = self.begin();
        let may_write = begun.is_ok();
        news.tell(begun.step(WRITING));
        while may_write && self.wait_for_next() {
            news.tell(self.write_next().map(drop).step(WRITING));
        }
    }

    fn begin(&self) -> Result<(), Cause> {
        let mut assembly = self.assembly.lock();
        assembly.stay.called = Some(Instant::now());
        let begun = MutexGuard::unlocked(&mut assembly, || self.sink.begin());
        assembly.stay.called = None;
        match begun {
            Ok(()) => assembly.has_begun = true,
            Err(error) => {
                assembly.refusal = Some(error_text::chain(&*error));
                return Err(Cause::Vm(error));
            }
        }
        Ok(())
    }

    /// Waits until its thread has ended; false if it is not awaited any more.
    fn wait_for_end(&self, deadline: Instant) -> bool {
        let mut assembly = self.assembly.lock();
        while !assembly.stay.has_ended {
            if assembly.stay.is_left || self.changed.wait_until(&mut assembly, deadline).timed_out()
            {
                return assembly.stay.has_ended;
            }
        }
        true
    }

    /// Whether its thread was left behind.
    fn is_left(&self) -> bool {
        self.assembly.lock().stay.is_left
    }

    /// Leaves its thread behind, and the device with it. Returns the error that says so.
    fn leave(&self, waited: Duration) -> Cause {
        let mut assembly = self.assembly.lock();
        assembly.is_over = true;
        assembly.held.clear();
        let waited = assembly.stay.hangs(Duration::ZERO).unwrap_or(waited);
        assembly.stay.leave(&self.name);
        drop(assembly);
        let (name, doing) = (self.name.as_str().into(), self.sink.leave().into());
        Cause::DeviceHangs { name, doing, waited_s: waited.as_secs() }
    }

    fn put(&self, offset: u64, bytes: Vec<u8>, window_bytes: u64) -> Result<(), BlobError> {
        let mut assembly = self.assembly.lock();
        if let Some(reason) = assembly.refusal.clone() {
            return Err(BlobError::Refused { name: self.name.clone(), reason });
        }
        if bytes.is_empty() {
            self.take_end(&mut assembly, offset)?;
        } else {
            let end = self.check(&assembly, offset, bytes.len(), window_bytes)?;
            if assembly.held.len() >= HELD_MAX {
                // Each takes memory beyond its bytes, of which it may have one.
                return Err(BlobError::Pieces { name: self.name.clone(), max: HELD_MAX });
            }
            assembly.highest = assembly.highest.max(end);
            assembly.held.insert(offset, bytes);
        }
        drop(assembly);
        self.changed.notify_all();
        Ok(())
    }

    /// Where these bytes end, if they may come now.
    fn check(
        &self,
        assembly: &Assembly,
        offset: u64,
        count: usize,
        window_bytes: u64,
    ) -> Result<u64, BlobError> {
        let name = || self.name.clone();
        let end = offset.saturating_add(count as u64);
        let len_bytes_max = self.len_bytes_max;
        if end > len_bytes_max {
            return Err(BlobError::TooLong { name: name(), end, len_bytes_max });
        }
        if assembly.end.is_some_and(|length| end > length) {
            return Err(BlobError::BeyondEnd { name: name(), at: offset });
        }
        let before = assembly.held.range(..end).next_back();
        let overlaps = before.is_some_and(|(at, bytes)| at + bytes.len() as u64 > offset);
        if offset < assembly.taken || overlaps {
            return Err(BlobError::Twice { name: name(), offset });
        }
        if end > assembly.written + window_bytes {
            return Err(BlobError::Ahead { name: name(), end, written: assembly.written });
        }
        Ok(end)
    }

    fn take_end(&self, assembly: &mut Assembly, length: u64) -> Result<(), BlobError> {
        let name = || self.name.clone();
        if assembly.end.is_some() {
            return Err(BlobError::Twice { name: name(), offset: length });
        }
        if length < assembly.highest {
            return Err(BlobError::BeyondEnd { name: name(), at: length });
        }
        let len_bytes_max = self.len_bytes_max;
        if length > len_bytes_max {
            return Err(BlobError::TooLong { name: name(), end: length, len_bytes_max });
        }
        assembly.end = Some(length);
        Ok(())
    }

    /// Waits for bytes that can be written; false when there will be none.
    fn wait_for_next(&self) -> bool {
        let mut assembly = self.assembly.lock();
        loop {
            let is_complete = assembly.end == Some(assembly.written);
            if assembly.is_over || is_complete || assembly.refusal.is_some() {
                return false;
            }
            if assembly.held.contains_key(&assembly.taken) {
                return true;
            }
            self.changed.wait(&mut assembly);
        }
    }

    /// Writes the next chunk; false if it has not come. Not called by two threads at once.
    fn write_next(&self) -> Result<bool, Cause> {
        let mut assembly = self.assembly.lock();
        let at = assembly.taken;
        if assembly.refusal.is_some() {
            return Ok(false);
        }
        let Some(bytes) = assembly.held.remove(&at) else { return Ok(false) };
        assembly.taken += bytes.len() as u64;
        assembly.stay.called = Some(Instant::now());
        let wrote = MutexGuard::unlocked(&mut assembly, || self.sink.write(&bytes));
        assembly.stay.called = None;
        match wrote {
            Ok(()) => assembly.written = assembly.taken,
            Err(error) => {
                assembly.refusal = Some(error_text::chain(&*error));
                return Err(Cause::Vm(error));
            }
        }
        Ok(true)
    }

    fn finish(&self) -> Result<u64, BlobError> {
        let assembly = self.assembly.lock();
        let written = assembly.written;
        if assembly.end == Some(written) && assembly.refusal.is_none() {
            return Ok(written);
        }
        Err(BlobError::Incomplete { name: self.name.clone(), written })
    }
}

#[cfg(all(test, not(loom)))]
#[path = "blobs_tests.rs"]
mod tests;
