// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What wakes a thread that waits in poll: a token like that of a parked thread, beside descriptors.
//!
//! Owns one eventfd and whether its thread listens. A ring while the thread does not listen is kept, and ends the
//! next wait at once; only one while it listens makes a system call. Of several rings without a wait in between one
//! is left. Must never know why it rings: the thread looks again at what it waits for.
//!
//! | thread | does, in this order, all sequentially consistent |
//! | --- | --- |
//! | who rings | changes something; state = `RUNG`; if it was `LISTENING`, writes the eventfd |
//! | who waits | `QUIET` becomes `LISTENING`, or it was `RUNG`; looks; polls; state = `QUIET` |

#[cfg(loom)]
use loom::sync::atomic::{AtomicU8, Ordering};
#[cfg(not(loom))]
use std::sync::atomic::{AtomicU8, Ordering};

use std::io;
use std::os::fd::RawFd;
use std::time::Duration;

#[cfg(not(loom))]
use std::os::fd::AsRawFd as _;
#[cfg(not(loom))]
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

/// No thread listens, and it has not rung.
const QUIET: u8 = 0;
/// Its thread polls, or is about to.
const LISTENING: u8 = 1;
/// It has rung since the last wait.
const RUNG: u8 = 2;

/// Wakes one thread. On cache lines of its own, as others have theirs beside it.
#[derive(Debug)]
#[repr(align(128))]
pub struct Bell {
    state: AtomicU8,
    #[cfg(not(loom))]
    event: EventFd,
    #[cfg(loom)]
    event: loom::sync::Notify,
}

/// How a wait ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Heard {
    /// It rang, now or before the wait. Takes precedence over the others.
    Ring,
    /// A descriptor can be read, or has failed, which reading shows.
    Ready,
    /// The timeout has expired.
    Nothing,
}

impl Bell {
    /// Rings: the wait of its thread ends, or the next one does at once.
    pub fn ring(&self) {
        if self.state.swap(RUNG, Ordering::SeqCst) == LISTENING {
            self.wake();
        }
    }

    /// Begins to listen; false if it has rung.
    fn listen(&self) -> bool {
        let quiet =
            self.state.compare_exchange(QUIET, LISTENING, Ordering::SeqCst, Ordering::SeqCst);
        if quiet.is_err() {
            self.state.swap(QUIET, Ordering::SeqCst);
        }
        quiet.is_ok()
    }

    /// True if it has rung since the last wait; that ring is heard then.
    pub(crate) fn take_ring(&self) -> bool {
        let rung = self.state.compare_exchange(RUNG, QUIET, Ordering::SeqCst, Ordering::SeqCst);
        rung.is_ok()
    }

    /// Ends that; true if it has rung meanwhile.
    fn has_rung(&self) -> bool {
        self.state.swap(QUIET, Ordering::SeqCst) == RUNG
    }

    /// Waits until it rings or a descriptor can be read.
    pub(crate) fn wait_or(&self, fd: RawFd) -> io::Result<Heard> {
        self.wait_with(&mut [self.entry(), readable(fd)], None)
    }
}

#[cfg(not(loom))]
impl Bell {
    /// A bell that has not rung.
    ///
    /// # Errors
    /// When the process may not open another file descriptor.
    pub fn new() -> io::Result<Self> {
        let event = EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?;
        Ok(Self { state: AtomicU8::new(QUIET), event })
    }

    fn wake(&self) {
        // The counter cannot overflow: it is written once for each wait.
        let _ = self.event.write(1);
    }

    /// Waits until it rings, or one of the descriptors of `polled` can be read. The first entry is this one's.
    ///
    /// # Errors
    /// When the poll fails.
    pub(crate) fn wait_with(
        &self,
        polled: &mut [libc::pollfd],
        timeout: Option<Duration>,
    ) -> io::Result<Heard> {
        if !self.listen() {
            return Ok(Heard::Ring);
        }
        let ready = crate::transport::poll_readable(polled, timeout);
        let rung = self.has_rung();
        // Of a ring whose write comes only now the next wait hears once more.
        let heard = rung || polled.first().is_some_and(|entry| entry.revents != 0);
        if heard {
            let _ = self.event.read();
            return Ok(Heard::Ring);
        }
        Ok(if ready? { Heard::Ready } else { Heard::Nothing })
    }

    /// The entry with which [`wait_with`](Self::wait_with) hears it.
    pub(crate) fn entry(&self) -> libc::pollfd {
        readable(self.event.as_raw_fd())
    }

    /// Waits until it rings.
    pub(crate) fn wait(&self) {
        if let Err(error) = self.wait_with(&mut [self.entry()], None) {
            // The caller looks, and waits again.
            log::debug!("a wait for a page has failed: {error}");
            std::thread::yield_now();
        }
    }
}

/// The entry of a descriptor for a wait.
pub(crate) fn readable(fd: RawFd) -> libc::pollfd {
    libc::pollfd { fd, events: libc::POLLIN, revents: 0 }
}

/// In models sockets are what the model makes of them.
#[cfg(loom)]
#[expect(missing_docs, reason = "as above")]
impl Bell {
    pub fn new() -> io::Result<Self> {
        Ok(Self { state: AtomicU8::new(QUIET), event: loom::sync::Notify::new() })
    }

    fn wake(&self) {
        self.event.notify();
    }

    pub(crate) fn wait_with(
        &self,
        _: &mut [libc::pollfd],
        _: Option<Duration>,
    ) -> io::Result<Heard> {
        self.wait();
        Ok(Heard::Ring)
    }

    pub(crate) fn entry(&self) -> libc::pollfd {
        readable(-1)
    }

    pub(crate) fn wait(&self) {
        let _ = self.wait_until(|| false);
    }

    /// Waits until it rings, or `is_ready` holds, with which [`readable`](Self::readable) is called.
    pub(crate) fn wait_until(&self, is_ready: impl Fn() -> bool) -> Heard {
        if !self.listen() {
            return Heard::Ring;
        }
        let ready = is_ready();
        if !ready {
            self.event.wait();
        }
        if self.has_rung() || !ready { Heard::Ring } else { Heard::Ready }
    }

    /// A descriptor that is polled with it becomes readable.
    pub(crate) fn readable(&self) {
        self.event.notify();
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a failing unwrap fails the test")]
    use std::io::Write as _;
    use std::os::unix::net::UnixStream;
    use std::sync::Arc;
    use std::sync::mpsc::channel;

    use super::*;

    /// Longer than anything here takes.
    const PATIENCE: Duration = Duration::from_mins(1);

    fn is_readable(fd: RawFd) -> bool {
        crate::transport::poll_readable(&mut [readable(fd)], Some(Duration::ZERO)).unwrap()
    }

    #[test]
    fn a_ring_before_the_wait_ends_it_once_and_makes_no_call() {
        let (bell, (socket, mut other)) = (Bell::new().unwrap(), UnixStream::pair().unwrap());
        bell.ring();
        bell.ring();
        assert!(
            !is_readable(bell.event.as_raw_fd()),
            "no thread listens, and the eventfd is written"
        );
        assert_eq!(bell.wait_or(socket.as_raw_fd()).unwrap(), Heard::Ring);
        other.write_all(b"x").unwrap();
        assert_eq!(bell.wait_or(socket.as_raw_fd()).unwrap(), Heard::Ready);
        let polled = &mut [bell.entry()];
        assert_eq!(bell.wait_with(polled, Some(Duration::ZERO)).unwrap(), Heard::Nothing);
    }

    #[test]
    fn a_ring_ends_a_wait_of_another_thread() {
        let bell = Arc::new(Bell::new().unwrap());
        let (tell, told) = channel();
        let waiting = {
            let bell = Arc::clone(&bell);
            std::thread::spawn(move || {
                let mut heard = Vec::new();
                for _ in 0..1000 {
                    heard.push(bell.wait_with(&mut [bell.entry()], Some(PATIENCE)).unwrap());
                    tell.send(()).unwrap();
                }
                heard
            })
        };
        for _ in 0..1000 {
            bell.ring();
            if told.recv_timeout(PATIENCE).is_err() {
                break;
            }
        }
        let heard = waiting.join().unwrap();
        assert!(heard.iter().all(|heard| *heard == Heard::Ring));
    }
}

#[cfg(all(test, loom))]
mod model {
    use loom::sync::Arc;
    use loom::sync::atomic::AtomicBool;
    use loom::thread;

    use super::*;

    /// A change and a ring at any moment of a wait: the waiting thread sees the change (a model in which it does
    /// not ends in a deadlock).
    #[test]
    fn no_ring_is_lost() {
        loom::model(|| {
            let (bell, is_here) =
                (Arc::new(Bell::new().unwrap()), Arc::new(AtomicBool::new(false)));
            let waiting = {
                let (bell, is_here) = (Arc::clone(&bell), Arc::clone(&is_here));
                thread::spawn(move || {
                    while !is_here.load(Ordering::SeqCst) {
                        bell.wait();
                    }
                })
            };
            bell.ring();
            is_here.store(true, Ordering::SeqCst);
            bell.ring();
            waiting.join().unwrap();
        });
    }
}
