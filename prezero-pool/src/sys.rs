// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Direct system calls of the pool.
//!
//! May contain `unsafe`: system calls with plain numbers and structures. Must never decide anything.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd as _;
use std::os::unix::net::UnixStream;
use std::time::Duration;

/// Whether another process has a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Users {
    /// There is no other open file of the inode, be it a descriptor, a mapping, or on its way
    /// through a socket.
    OnlyUs,
    /// There is one.
    Others,
    /// This kernel does not say so for this kind of file.
    Unknown,
}

/// Whether other processes have `file`, which must have been opened by path (the kernel counts those only).
pub fn users_of(file: &File) -> Users {
    let fd = file.as_raw_fd();
    // SAFETY: takes and returns numbers; the descriptor is open.
    if unsafe { libc::fcntl(fd, libc::F_SETLEASE, libc::F_WRLCK) } == 0 {
        // SAFETY: as above.
        unsafe { libc::fcntl(fd, libc::F_SETLEASE, libc::F_UNLCK) };
        return Users::OnlyUs;
    }
    match io::Error::last_os_error().raw_os_error() {
        Some(libc::EAGAIN) => Users::Others,
        _ => Users::Unknown,
    }
}

/// Ignores signals that would end the process and are not meant to: SIGIO, which the kernel sends
/// when another process opens a file under a lease, SIGHUP of a closed terminal, and those that
/// mean nothing to a daemon. SIGTERM, SIGINT and SIGQUIT end it.
pub fn ignore_stray_signals() {
    for signal in [libc::SIGIO, libc::SIGHUP, libc::SIGUSR1, libc::SIGUSR2, libc::SIGALRM] {
        // SAFETY: ignoring a signal runs no code.
        unsafe { libc::signal(signal, libc::SIG_IGN) };
    }
}

/// The other end of a socket.
#[derive(Debug, Clone, Copy)]
pub struct Peer {
    pub uid: u32,
    pub pid: i32,
}

/// Credentials of the peer, as the kernel recorded them at connect.
pub fn peer_of(stream: &UnixStream) -> io::Result<Peer> {
    let mut peer = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut len = libc::socklen_t::try_from(size_of::<libc::ucred>()).map_err(io::Error::other)?;
    // SAFETY: the kernel writes at most `len` bytes, the size of `peer`; both outlive the call.
    let result = unsafe {
        libc::getsockopt(
            stream.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut peer).cast(),
            &raw mut len,
        )
    };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(Peer { uid: peer.uid, pid: peer.pid })
}

/// The user of this process.
pub fn own_uid() -> u32 {
    // SAFETY: takes nothing and cannot fail.
    unsafe { libc::geteuid() }
}

/// Lets the calling thread run only where a processor would idle otherwise.
pub fn run_when_idle() -> io::Result<()> {
    let parameters = libc::sched_param { sched_priority: 0 };
    // SAFETY: 0 is the calling thread; the kernel reads the structure, which outlives the call.
    match unsafe { libc::sched_setscheduler(0, libc::SCHED_IDLE, &raw const parameters) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Processor time that the calling thread has used.
pub fn processor_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the kernel writes one structure, which outlives the call.
    if unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) } != 0 {
        return Duration::ZERO;
    }
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    Duration::new(seconds, u32::try_from(time.tv_nsec).unwrap_or(0))
}
