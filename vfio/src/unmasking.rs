// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Unmasking of an interrupt pin (INTx) in user space, where the kernel cannot do it.
//!
//! Owns a thread that unmasks the pin whenever the guest has finished an interrupt. Host drivers of mediated
//! devices often support no eventfd for that; for all others the kernel does it, without an exit.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, IntoRawFd};
use std::sync::Arc;

use log::warn;
use stoppable_thread::StoppableThread;
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use super::host::HostFunction;

/// Token of the event that ends the thread.
const STOP: u64 = 0;
/// Token of the event that the guest has acknowledged the interrupt.
const DONE: u64 = 1;

/// Unmasks a pin after each interrupt, on a thread, until dropped.
pub struct Unmasking {
    _thread: StoppableThread,
}

impl Unmasking {
    /// Starts the thread, which unmasks the pin of `host` whenever `done` is signalled.
    ///
    /// # Errors
    /// A descriptor or the thread cannot be created.
    pub fn start(id: &str, host: Arc<dyn HostFunction>, done: BorrowedFd<'_>) -> io::Result<Self> {
        let done = done.try_clone_to_owned()?;
        // SAFETY: the descriptor is an eventfd's, and from here on belongs to the new value alone.
        let done = unsafe { EventFd::from_raw_fd(done.into_raw_fd()) };
        let stop = EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?;
        let epoll = Epoll::new()?;
        for (event, token) in [(&stop, STOP), (&done, DONE)] {
            let interest = EpollEvent::new(EventSet::IN, token);
            epoll.ctl(ControlOperation::Add, event.as_raw_fd(), interest)?;
        }
        let id = id.to_owned();
        // A saturated counter wakes the thread as well.
        let stop = move || drop(stop.write(1));
        let body = move || unmask(&id, host.as_ref(), &epoll, &done);
        Ok(Self { _thread: StoppableThread::spawn("vfio-unmask", stop, body)? })
    }
}

fn unmask(id: &str, host: &dyn HostFunction, epoll: &Epoll, done: &EventFd) {
    let mut ready = [EpollEvent::default(); 2];
    loop {
        let count = match epoll.wait(-1, &mut ready) {
            Ok(count) => count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => {
                warn!("passed-through device {id} can no longer interrupt by its pin: {error}");
                return;
            }
        };
        let mut tokens = ready.iter().take(count).map(EpollEvent::data);
        if tokens.any(|token| token == STOP) {
            return;
        }
        // One unmasking is enough for several signals.
        if done.read().is_ok()
            && let Err(error) = host.unmask_pin()
        {
            let error = error_text::chain(&error);
            warn!("passed-through device {id} can no longer interrupt by its pin: {error}");
            return;
        }
    }
}

#[cfg(test)]
#[expect(clippy::unwrap_used, reason = "tests")]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;
    use crate::fakes::FakeFunction;
    use crate::gate::DmaGate;

    #[test]
    fn the_pin_is_unmasked_each_time_the_guest_is_done() {
        let host = FakeFunction::new(FakeFunction::config(), Arc::new(DmaGate::default())).unwrap();
        let done = EventFd::new(EFD_NONBLOCK).unwrap();
        // SAFETY: the eventfd is open for as long as `done` lives, which is beyond the call.
        let borrowed = unsafe { BorrowedFd::borrow_raw(done.as_raw_fd()) };
        let unmasking = Unmasking::start("gpu", host.clone(), borrowed).unwrap();
        for times in 1..4 {
            done.write(1).unwrap();
            let began = Instant::now();
            while host.unmasked() < times {
                assert!(began.elapsed() < Duration::from_secs(20), "{times}");
                std::thread::yield_now();
            }
        }
        drop(unmasking);
        done.write(1).unwrap();
        assert_eq!(host.unmasked(), 3);
    }
}
