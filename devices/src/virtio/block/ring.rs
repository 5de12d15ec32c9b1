// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Reads, writes and flushes in flight through io_uring.
//!
//! Owns every operation from its submission to its completion, together with the memory that the kernel
//! works on: neither can be dropped before the other. A transfer that the kernel does only in part is
//! continued here.

use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::Instant;

use io_uring::{IoUring, Probe, opcode, squeue, types};
use memory::GuestMemory;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::image::Disk;
use super::long_transfer::UNDER_WAY_BYTES;
use super::request::Request;
use crate::virtio::buffers::HostRanges;

/// Most operations in flight of one queue.
const DEPTH_MAX: u16 = 1024;

/// What the kernel does with the host ranges.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Action {
    Read,
    /// Onto stable storage at once, if so.
    Write {
        through: bool,
    },
    Flush,
}

/// An operation to be done.
pub(super) struct Job {
    pub(super) request: Request,
    pub(super) action: Action,
    /// Where on the disk the rest begins.
    pub(super) offset: u64,
    /// The rest of the host's addresses; empty for a flush.
    pub(super) ranges: HostRanges<Arc<GuestMemory>>,
    pub(super) started: Instant,
    /// Transferred up to now.
    pub(super) done_bytes: u64,
}

/// A completed operation.
pub(super) struct Done {
    pub(super) job: Box<Job>,
    pub(super) result: io::Result<()>,
}

/// An io_uring instance of one queue.
pub(super) struct Ring {
    uring: IoUring,
    completed: EventFd,
    disk: Arc<Disk>,
    /// Operations in flight; the index is what the kernel returns.
    slots: Vec<Option<Box<Job>>>,
    free: Vec<usize>,
    /// What the operations in flight transfer together, when they are begun.
    in_flight_bytes: u64,
}

impl Ring {
    /// Whether the host lets this process use all that is needed.
    pub(super) fn is_available() -> bool {
        let Ok(ring) = IoUring::new(2) else { return false };
        let mut probe = Probe::new();
        if ring.submitter().register_probe(&mut probe).is_err() {
            return false;
        }
        // SUBMIT_STABLE: the kernel has read the array of ranges when the submission returns.
        ring.params().is_feature_submit_stable()
            && [opcode::Readv::CODE, opcode::Writev::CODE, opcode::Fsync::CODE]
                .iter()
                .all(|code| probe.is_supported(*code))
    }

    pub(super) fn new(disk: Arc<Disk>, queue_size: u16) -> io::Result<Self> {
        let depth = queue_size.clamp(1, DEPTH_MAX);
        let ring = IoUring::new(depth.into())?;
        let completed = EventFd::new(EFD_NONBLOCK)?;
        ring.submitter().register_eventfd(completed.as_raw_fd())?;
        let slots = (0..depth).map(|_| None).collect();
        let free = (0..depth.into()).rev().collect();
        Ok(Self { uring: ring, completed, disk, slots, free, in_flight_bytes: 0 })
    }

    /// Signalled when operations completed.
    pub(super) fn completed(&self) -> &EventFd {
        &self.completed
    }

    pub(super) fn has_room(&self) -> bool {
        !self.free.is_empty() && self.in_flight_bytes < UNDER_WAY_BYTES
    }

    pub(super) fn is_idle(&self) -> bool {
        self.free.len() == self.slots.len()
    }

    /// Takes an operation, to be given to the kernel by [`Self::submit`]. Without room it comes
    /// back.
    pub(super) fn push(&mut self, job: Box<Job>) -> Result<(), Box<Job>> {
        let len_bytes = job.request.operation.transfer_bytes();
        let Some(slot) = self.free.pop() else { return Err(job) };
        match self.slots.get_mut(slot) {
            Some(place) => *place = Some(job),
            None => return Err(job),
        }
        if self.queue_entry(slot) {
            self.in_flight_bytes = self.in_flight_bytes.saturating_add(len_bytes);
            return Ok(());
        }
        // The submission queue is as long as there are slots, and is emptied by `submit`.
        self.free.push(slot);
        match self.slots.get_mut(slot).and_then(Option::take) {
            Some(job) => Err(job),
            None => Ok(()),
        }
    }

    fn queue_entry(&mut self, slot: usize) -> bool {
        let Some(Some(job)) = self.slots.get(slot) else { return false };
        let entry = entry(&self.disk, job).user_data(u64::try_from(slot).unwrap_or(u64::MAX));
        // SAFETY: the descriptor stays open with `self.disk`. The addresses are those of guest
        // memory, kept mapped by the job; the array of ranges is not changed while the job is in
        // its slot, where it stays until its completion was seen; dropping `self` waits for that.
        unsafe { self.uring.submission().push(&entry) }.is_ok()
    }

    /// Gives the kernel what was pushed; `false` if it is too busy to take all of it now.
    pub(super) fn submit(&mut self) -> bool {
        while let Err(error) = self.uring.submit() {
            if error.kind() != io::ErrorKind::Interrupted {
                log::debug!("io_uring takes no submission now: {error}");
                break;
            }
        }
        self.uring.submission().is_empty()
    }

    /// Waits until something completed, if anything is in flight.
    pub(super) fn wait(&self) {
        if self.is_idle() {
            return;
        }
        if let Err(error) = self.uring.submit_and_wait(1)
            && error.kind() != io::ErrorKind::Interrupted
        {
            log::debug!("io_uring is busy: {error}");
            std::thread::yield_now();
        }
    }

    /// Takes completed operations; continues with those of which only a part is done.
    pub(super) fn take_completed(&mut self) -> Vec<Done> {
        // An error means that there is nothing to take, which is as good.
        let _ = self.completed.read();
        let completions: Vec<(u64, i32)> =
            self.uring.completion().map(|entry| (entry.user_data(), entry.result())).collect();
        let mut done = Vec::with_capacity(completions.len());
        let mut resubmitted = false;
        for (slot, result) in completions {
            let Ok(slot) = usize::try_from(slot) else { continue };
            let Some(place) = self.slots.get_mut(slot) else { continue };
            let Some(mut job) = place.take() else { continue };
            if let Some(result) = advance(&mut job, result) {
                self.free.push(slot);
                self.has_completed(&job);
                done.push(Done { job, result });
                continue;
            }
            *place = Some(job);
            if self.queue_entry(slot) {
                resubmitted = true;
            } else if let Some(job) = self.slots.get_mut(slot).and_then(Option::take) {
                self.free.push(slot);
                self.has_completed(&job);
                done.push(Done { job, result: Err(io::ErrorKind::ResourceBusy.into()) });
            }
        }
        if resubmitted || !self.uring.submission().is_empty() {
            self.submit();
        }
        done
    }
}

impl Ring {
    fn has_completed(&mut self, job: &Job) {
        let len_bytes = job.request.operation.transfer_bytes();
        self.in_flight_bytes = self.in_flight_bytes.saturating_sub(len_bytes);
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        while !self.is_idle() {
            self.wait();
            self.take_completed();
        }
    }
}

fn entry(disk: &Disk, job: &Job) -> squeue::Entry {
    let fd = types::Fd(disk.file().as_raw_fd());
    let (ranges, count) = job.ranges.as_raw();
    match job.action {
        Action::Read => opcode::Readv::new(fd, ranges, count).offset(job.offset).build(),
        Action::Write { through } => {
            let flags = if through { libc::RWF_DSYNC } else { 0 };
            let fd = types::Fd(disk.file_to_change().as_raw_fd());
            opcode::Writev::new(fd, ranges, count).offset(job.offset).rw_flags(flags).build()
        }
        Action::Flush => opcode::Fsync::new(fd).flags(types::FsyncFlags::DATASYNC).build(),
    }
}

/// Takes note of what the kernel did; `None` if there is a rest to be done.
fn advance(job: &mut Job, result: i32) -> Option<io::Result<()>> {
    let Ok(len_bytes) = usize::try_from(result) else {
        let error = io::Error::from_raw_os_error(result.saturating_neg());
        let again = matches!(error.kind(), io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock);
        return if again { None } else { Some(Err(error)) };
    };
    if job.action == Action::Flush {
        return Some(Ok(()));
    }
    let transferred = u64::try_from(len_bytes).unwrap_or(0);
    job.ranges.advance(len_bytes);
    job.offset = job.offset.saturating_add(transferred);
    job.done_bytes = job.done_bytes.saturating_add(transferred);
    if job.ranges.len_bytes() == 0 {
        return Some(Ok(()));
    }
    // The image is shorter than it was.
    if len_bytes == 0 { Some(Err(io::ErrorKind::UnexpectedEof.into())) } else { None }
}
