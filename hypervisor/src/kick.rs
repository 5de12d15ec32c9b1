// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The signal that makes a vCPU's thread leave KVM_RUN, and the token that ends its sleep in a handler.
//!
//! May contain `unsafe`: signal calls. Owns the signal's handler, which does nothing, and the signal mask
//! of vCPU threads. `threads` explains why the signal alone is not enough.

use std::io;
use std::os::unix::thread::JoinHandleExt;
use std::sync::OnceLock;
use std::thread::JoinHandle;

use vmm_sys_util::signal::SIGRTMIN;

/// Signals a vCPU thread, and unparks it if it has parked itself, as a signal alone does not end that.
pub(crate) fn kick(thread: &JoinHandle<()>) {
    thread.thread().unpark();
    // SAFETY: a thread whose handle is there has not been joined, so its pthread_t is valid, and
    // the signal has a handler, which is installed before the first vCPU thread starts.
    unsafe { libc::pthread_kill(thread.as_pthread_t(), SIGRTMIN()) };
}

extern "C" fn on_kick(_signal: libc::c_int) {}

/// Installs an empty handler for the kick signal, once per process.
///
/// Not through vmm-sys-util, which cannot set SA_RESTART: the signal may also interrupt a system call of a
/// device. KVM_RUN returns EINTR all the same.
pub(crate) fn install_kick_handler() -> io::Result<()> {
    static INSTALLED: OnceLock<Result<(), i32>> = OnceLock::new();
    let install = || {
        // SAFETY: all zeros is a valid sigaction: no flags, an empty mask, the default action.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        let handler: extern "C" fn(libc::c_int) = on_kick;
        action.sa_sigaction = handler as *const () as libc::sighandler_t;
        action.sa_flags = libc::SA_RESTART;
        // SAFETY: the handler does nothing, which is safe at any point of any thread.
        match unsafe { libc::sigaction(SIGRTMIN(), &raw const action, std::ptr::null_mut()) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error().raw_os_error().unwrap_or(libc::EINVAL)),
        }
    };
    INSTALLED.get_or_init(install).map_err(io::Error::from_raw_os_error)
}

/// Blocks all signals in a vCPU thread except the kick and synchronous ones.
pub(crate) fn set_signal_mask() -> io::Result<()> {
    let open = [
        SIGRTMIN(),
        libc::SIGSEGV,
        libc::SIGBUS,
        libc::SIGILL,
        libc::SIGFPE,
        libc::SIGTRAP,
        libc::SIGABRT,
        libc::SIGSYS,
    ];
    // SAFETY: an all-zero sigset is overwritten by sigfillset, the signal numbers are valid, and
    // the mask is that of this thread only.
    let error = unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&raw mut set);
        for signal in open {
            libc::sigdelset(&raw mut set, signal);
        }
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const set, std::ptr::null_mut())
    };
    if error == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(error)) }
}
