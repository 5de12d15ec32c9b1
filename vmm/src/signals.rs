// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Signals of the process as events of its main thread.
//!
//! Owns the descriptor from which they are read, how other threads block them, and what all other signals do that would end the
//! process: nothing. A closed terminal, a log rotation that signals the wrong process or a stray
//! timer must not end a VM whose pages are needed elsewhere. All threads block all signals (the
//! vCPU threads but for their kick), so each reaches this descriptor.

use std::fs::File;
use std::io::{self, Read as _};
use std::os::fd::{AsRawFd, FromRawFd, RawFd};

/// A signal that the VMM handles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Signal {
    /// A request to end the process: one of [`ENDING`].
    End,
    /// The size of the process's terminal has changed.
    Resized,
}

/// Signals that ask the process to end. Ending waits for a migration, see `ending`. One that was ignored
/// when the process started stays ignored: nohup(1) ignores SIGHUP so that a VM outlives its terminal, and
/// a shell ignores SIGINT and SIGQUIT for background commands of scripts.
const ENDING: [libc::c_int; 4] = [libc::SIGTERM, libc::SIGINT, libc::SIGHUP, libc::SIGQUIT];

/// Signals that would end the process and have no meaning for it; they are ignored. With SIGXFSZ ignored, a
/// file that exceeds the process's limit, such as a snapshot, is an error of that write, which names the
/// file, and not the end of the VM. Fault signals are left as they are (populating memory handles its own SIGBUS), and the
/// real-time ones, the first of which kicks a vCPU.
const WITHOUT_MEANING: [libc::c_int; 11] = [
    libc::SIGXFSZ,
    libc::SIGXCPU,
    libc::SIGUSR1,
    libc::SIGUSR2,
    libc::SIGPIPE,
    libc::SIGALRM,
    libc::SIGVTALRM,
    libc::SIGPROF,
    libc::SIGIO,
    libc::SIGPWR,
    libc::SIGSTKFLT,
];

/// Whether a signal is ignored.
pub fn is_ignored(signal: libc::c_int) -> bool {
    let mut action = std::mem::MaybeUninit::<libc::sigaction>::uninit();
    // SAFETY: changes nothing and writes one sigaction, which lives during the call.
    let done = unsafe { libc::sigaction(signal, std::ptr::null(), action.as_mut_ptr()) };
    // SAFETY: the call that succeeded has filled it.
    done == 0 && unsafe { action.assume_init() }.sa_sigaction == libc::SIG_IGN
}

/// Signals that a thread causes itself. The kernel ends a process in which such a signal is blocked, without a call
/// of its handler.
const SYNCHRONOUS: [libc::c_int; 7] = [
    libc::SIGSEGV,
    libc::SIGBUS,
    libc::SIGILL,
    libc::SIGFPE,
    libc::SIGTRAP,
    libc::SIGABRT,
    libc::SIGSYS,
];

/// Blocks all but the synchronous signals in the calling thread, so that they reach the signalfd.
pub(crate) fn block_signals() {
    set_mask(libc::SIG_BLOCK, &asynchronous());
}

/// Starts threads with these signals blocked: one that blocks them itself could be ended by one before it has.
pub(crate) fn with_signals_blocked<T>(start: impl FnOnce() -> T) -> T {
    let before = set_mask(libc::SIG_BLOCK, &asynchronous());
    let started = start();
    set_mask(libc::SIG_SETMASK, &before);
    started
}

/// All but the synchronous signals.
fn asynchronous() -> libc::sigset_t {
    let mut all = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: sigfillset initialises the set it is given, from which sigdelset removes valid numbers.
    unsafe {
        libc::sigfillset(all.as_mut_ptr());
        for signal in SYNCHRONOUS {
            libc::sigdelset(all.as_mut_ptr(), signal);
        }
        all.assume_init()
    }
}

/// Changes the mask of the calling thread; returns what it was.
fn set_mask(how: libc::c_int, signals: &libc::sigset_t) -> libc::sigset_t {
    // SAFETY: an all-zero set is a valid value; pthread_sigmask reads one set and writes the other, both live across the
    // call, and changes nothing but the mask of the calling thread.
    unsafe {
        let mut before: libc::sigset_t = std::mem::zeroed();
        libc::pthread_sigmask(how, signals, &raw mut before);
        before
    }
}

/// Reads signals from a signalfd.
pub(crate) struct Signals {
    file: File,
}

impl Signals {
    /// Creates the signalfd for the handled signals, which must be blocked in all threads. Ignored signals
    /// are left out, as a blocked signal reaches the descriptor even if it is ignored.
    ///
    /// # Errors
    /// The descriptor cannot be created.
    pub(crate) fn new() -> io::Result<Self> {
        for signal in WITHOUT_MEANING {
            // SAFETY: only the disposition of one signal is changed, to one that runs no code.
            unsafe { libc::signal(signal, libc::SIG_IGN) };
        }
        // SAFETY: an all-zero set is a valid argument of sigemptyset, which initialises it; the
        // calls write only to `set`, which lives across them; the descriptor is new and ours.
        let fd = unsafe {
            let mut set: libc::sigset_t = std::mem::zeroed();
            libc::sigemptyset(&raw mut set);
            let ending = ENDING.into_iter().filter(|signal| !is_ignored(*signal));
            for signal in ending.chain([libc::SIGWINCH]) {
                libc::sigaddset(&raw mut set, signal);
            }
            libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut());
            libc::signalfd(-1, &raw const set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK)
        };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor was just made and nothing else owns it.
        Ok(Self { file: unsafe { File::from_raw_fd(fd) } })
    }

    /// The next signal, if there is one.
    pub(crate) fn next(&mut self) -> Option<Signal> {
        let mut info = [0_u8; size_of::<libc::signalfd_siginfo>()];
        let read = self.file.read(&mut info).ok()?;
        // The first word is the signal number (signalfd(2)).
        let (number, _) = info.get(..read)?.split_first_chunk()?;
        let resized = u32::from_ne_bytes(*number) == libc::SIGWINCH.cast_unsigned();
        Some(if resized { Signal::Resized } else { Signal::End })
    }
}

impl AsRawFd for Signals {
    fn as_raw_fd(&self) -> RawFd {
        self.file.as_raw_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether the calling thread has a signal blocked.
    fn has_blocked(signal: libc::c_int) -> bool {
        // SAFETY: an all-zero set is valid, and adds nothing to the mask, which is read; sigismember reads that set.
        unsafe {
            let mask = set_mask(libc::SIG_BLOCK, &std::mem::zeroed());
            libc::sigismember(&raw const mask, signal) == 1
        }
    }

    #[test]
    fn a_thread_has_signals_blocked_from_its_start_and_the_one_that_starts_it_is_as_before() {
        let asked = [libc::SIGTERM, libc::SIGUSR1, libc::SIGSEGV];
        let starting = std::thread::spawn(move || {
            let before = asked.map(has_blocked);
            let thread =
                with_signals_blocked(|| std::thread::spawn(move || asked.map(has_blocked)));
            (before, thread.join().ok(), asked.map(has_blocked))
        });
        let (before, started, after) = starting.join().unwrap_or_default();
        assert_eq!(started, Some([true, true, false]));
        assert_eq!(after, before);
    }
}
