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

use io_uring::register::Restriction;
use io_uring::{IoUring, Probe, opcode, squeue, types};
use memory::GuestMemory;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::image::Disk;
use super::long_transfer::UNDER_WAY_BYTES;
use super::placed::Transfer;
use super::request::Request;
use crate::virtio::buffers::HostRanges;

/// Maximum number of operations in flight of a queue.
const DEPTH_MAX: u16 = 1024;

/// Operations that a ring accepts. Operations of a ring do not pass the filters of system calls.
const OPERATIONS: [u8; 3] = [opcode::Readv::CODE, opcode::Writev::CODE, opcode::Fsync::CODE];

/// Type of an operation on host ranges.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Action {
    Read,
    /// With stability of the data on completion, if set.
    Write {
        through: bool,
    },
    Flush,
}

/// An operation to be submitted.
pub(super) struct Job {
    pub(super) request: Request,
    pub(super) action: Action,
    /// Offset in the file of the remaining part.
    pub(super) offset: u64,
    /// Keeps the place of an image in a format.
    pub(super) transfer: Option<Transfer>,
    /// Remaining host ranges; empty for a flush.
    pub(super) ranges: HostRanges<Arc<GuestMemory>>,
    pub(super) started: Instant,
    /// Bytes transferred so far.
    pub(super) done_bytes: u64,
}

/// A completed operation.
pub(super) struct Done {
    pub(super) job: Box<Job>,
    pub(super) result: io::Result<()>,
}

/// The io_uring instance of one queue.
pub(super) struct Ring {
    uring: IoUring,
    completed: EventFd,
    disk: Arc<Disk>,
    /// Operations in flight; the index is their user data.
    slots: Vec<Option<Box<Job>>>,
    free: Vec<usize>,
    /// Bytes of the operations in flight, counted when they start.
    in_flight_bytes: u64,
}

/// A ring that accepts [`OPERATIONS`] only, without flags, and nothing more to be registered
/// (`io_uring_register(2)`, Linux 5.10). It signals `completed`.
fn restricted(depth: u32, completed: &EventFd) -> io::Result<IoUring> {
    let ring = IoUring::builder().setup_r_disabled().build(depth)?;
    ring.submitter().register_eventfd(completed.as_raw_fd())?;
    ring.submitter().register_restrictions(&mut OPERATIONS.map(Restriction::sqe_op))?;
    ring.submitter().register_enable_rings()?;
    Ok(ring)
}

impl Ring {
    /// Whether this process may use all required io_uring features.
    pub(super) fn is_available() -> bool {
        let Ok(ring) = IoUring::new(2) else { return false };
        let is_restricted =
            EventFd::new(EFD_NONBLOCK).is_ok_and(|event| restricted(2, &event).is_ok());
        let mut probe = Probe::new();
        if ring.submitter().register_probe(&mut probe).is_err() {
            return false;
        }
        // SUBMIT_STABLE: the kernel has copied the iovecs when the submission returns.
        is_restricted
            && ring.params().is_feature_submit_stable()
            && OPERATIONS.iter().all(|code| probe.is_supported(*code))
    }

    pub(super) fn new(disk: Arc<Disk>, queue_size: u16) -> io::Result<Self> {
        let depth = queue_size.clamp(1, DEPTH_MAX);
        let completed = EventFd::new(EFD_NONBLOCK)?;
        let ring = restricted(depth.into(), &completed)?;
        let slots = (0..depth).map(|_| None).collect();
        let free = (0..depth.into()).rev().collect();
        Ok(Self { uring: ring, completed, disk, slots, free, in_flight_bytes: 0 })
    }

    /// Signalled when operations complete; to be watched with `Watch::on_signal`, as it is never read.
    pub(super) fn completed(&self) -> &EventFd {
        &self.completed
    }

    pub(super) fn has_room(&self) -> bool {
        !self.free.is_empty() && self.in_flight_bytes < UNDER_WAY_BYTES
    }

    pub(super) fn is_idle(&self) -> bool {
        self.free.len() == self.slots.len()
    }

    /// Queues an operation for [`Self::submit`]; returns it if there is no slot.
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
        // The submission queue has an entry per slot, and `submit` empties it.
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

    /// Submits queued operations; `false` if the kernel could not accept all of them now.
    pub(super) fn submit(&mut self) -> bool {
        if self.is_submitted() {
            return true;
        }
        while let Err(error) = self.uring.submit() {
            if error.kind() != io::ErrorKind::Interrupted {
                log::debug!("io_uring takes no submission now: {error}");
                break;
            }
        }
        self.is_submitted()
    }

    /// Whether the kernel has accepted all operations.
    pub(super) fn is_submitted(&mut self) -> bool {
        self.uring.submission().is_empty()
    }

    /// Waits for a completion, if anything is in flight.
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

    /// Takes completed operations; continues partial ones.
    pub(super) fn take_completed(&mut self) -> Vec<Done> {
        let completions: Vec<(u64, i32)> =
            self.uring.completion().map(|entry| (entry.user_data(), entry.result())).collect();
        let mut done = Vec::with_capacity(completions.len());
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
            if !self.queue_entry(slot)
                && let Some(job) = self.slots.get_mut(slot).and_then(Option::take)
            {
                self.free.push(slot);
                self.has_completed(&job);
                done.push(Done { job, result: Err(io::ErrorKind::ResourceBusy.into()) });
            }
        }
        self.submit();
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

/// Handles a completion; `None` if a part remains.
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
    // The image has been truncated.
    if len_bytes == 0 { Some(Err(io::ErrorKind::UnexpectedEof.into())) } else { None }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test that cannot unwrap has failed")]

    use super::*;

    fn answer(ring: &mut IoUring, entry: &squeue::Entry) -> i32 {
        // SAFETY: the operations of this test refer to no memory but a string literal.
        unsafe { ring.submission().push(entry).unwrap() };
        ring.submit_and_wait(1).unwrap();
        ring.completion().next().unwrap().result()
    }

    #[test]
    fn a_ring_opens_nothing_and_connects_nowhere() {
        if !Ring::is_available() {
            test_skip::skip!("io_uring cannot be used here");
            return;
        }
        let event = EventFd::new(EFD_NONBLOCK).unwrap();
        let mut ring = restricted(8, &event).unwrap();
        let at = types::Fd(libc::AT_FDCWD);
        let open = opcode::OpenAt::new(at, c"/dev/null".as_ptr()).build();
        assert_eq!(answer(&mut ring, &open), -libc::EACCES);
        let socket = opcode::Socket::new(libc::AF_UNIX, libc::SOCK_STREAM, 0).build();
        assert_eq!(answer(&mut ring, &socket), -libc::EACCES);
        let file = tempfile::tempfile().unwrap();
        let flush = opcode::Fsync::new(types::Fd(file.as_raw_fd())).build();
        assert_eq!(answer(&mut ring, &flush), 0);
        ring.submitter().register_eventfd(event.as_raw_fd()).unwrap_err();
    }
}
