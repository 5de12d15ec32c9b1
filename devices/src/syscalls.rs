// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Safe forms of the system calls that neither `std` nor `vmm-sys-util` wrap.
//!
//! Owns the `unsafe` of plain calls with owned or borrowed descriptors. Calls that take addresses
//! of guest memory are in [`crate::virtio`]'s guest buffers instead.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;

use memory::CpuSet;

/// Converts a return value of -1 to the error of the last system call.
pub(crate) fn check(value: libc::c_int) -> io::Result<libc::c_int> {
    if value < 0 { Err(io::Error::last_os_error()) } else { Ok(value) }
}

/// Converts a negative length to the error of the last system call.
pub(crate) fn check_len(value: libc::ssize_t) -> io::Result<usize> {
    usize::try_from(value).map_err(|_| io::Error::last_os_error())
}

/// Which of `events` (`POLLIN`, `POLLOUT`) `fd` is ready for now, and error conditions.
pub(crate) fn poll_now(fd: BorrowedFd<'_>, events: libc::c_short) -> io::Result<libc::c_short> {
    poll(fd, events, 0)
}

/// The same, blocking until it is ready.
pub(crate) fn poll_for(fd: BorrowedFd<'_>, events: libc::c_short) -> io::Result<libc::c_short> {
    poll(fd, events, -1)
}

fn poll(
    fd: BorrowedFd<'_>,
    events: libc::c_short,
    timeout_ms: libc::c_int,
) -> io::Result<libc::c_short> {
    let mut entry = libc::pollfd { fd: fd.as_raw_fd(), events, revents: 0 };
    // SAFETY: `entry` is one valid pollfd, lives during the call, and the descriptor is open.
    check(unsafe { libc::poll(&raw mut entry, 1, timeout_ms) })?;
    Ok(entry.revents)
}

/// Connects to a Unix socket without blocking: fails with `WouldBlock` if the backlog is full, and with
/// `ConnectionRefused` without a listener.
pub(crate) fn connect_now(path: &std::path::Path) -> io::Result<OwnedFd> {
    use std::os::unix::ffi::OsStrExt as _;
    // SAFETY: all zero is a valid sockaddr_un.
    let mut address: libc::sockaddr_un = unsafe { std::mem::zeroed() };
    address.sun_family = libc::sa_family_t::try_from(libc::AF_UNIX).unwrap_or_default();
    let bytes = path.as_os_str().as_bytes();
    if bytes.len() >= address.sun_path.len() {
        return Err(io::ErrorKind::InvalidFilename.into());
    }
    for (slot, byte) in address.sun_path.iter_mut().zip(bytes) {
        *slot = libc::c_char::from_ne_bytes([*byte]);
    }
    let kind = libc::SOCK_STREAM | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
    // SAFETY: no memory is passed.
    let fd = check(unsafe { libc::socket(libc::AF_UNIX, kind, 0) })?;
    // SAFETY: the kernel has just made this descriptor, and nothing else owns it.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    let len = libc::socklen_t::try_from(size_of_val(&address)).unwrap_or_default();
    // SAFETY: `address` is an initialised sockaddr_un of `len` bytes that outlives the call.
    check(unsafe { libc::connect(fd.as_raw_fd(), (&raw const address).cast(), len) })?;
    Ok(fd)
}

/// Reads from a stream without consuming the data.
pub(crate) fn peek(stream: &UnixStream, to: &mut [u8]) -> io::Result<usize> {
    let (at, len_bytes) = (to.as_mut_ptr().cast(), to.len());
    // SAFETY: the kernel writes at most `len_bytes` bytes into `to`, which outlives the call.
    check_len(unsafe { libc::recv(stream.as_raw_fd(), at, len_bytes, libc::MSG_PEEK) })
}

/// Makes the open file description non-blocking.
pub(crate) fn set_nonblocking(fd: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: F_GETFL takes no third argument; the descriptor is open.
    let flags = check(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GETFL) })?;
    // SAFETY: F_SETFL takes an int; the descriptor is open.
    check(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_SETFL, flags | libc::O_NONBLOCK) })?;
    Ok(())
}

/// Reopens the file of a descriptor with `access` (`O_RDONLY`, `O_WRONLY`): the new file description is
/// non-blocking, the original unchanged.
pub(crate) fn open_again(fd: BorrowedFd<'_>, access: libc::c_int) -> io::Result<OwnedFd> {
    let path = std::ffi::CString::new(format!("/proc/self/fd/{}", fd.as_raw_fd()))?;
    let flags = access | libc::O_NONBLOCK | libc::O_NOCTTY | libc::O_CLOEXEC;
    // SAFETY: the path is a C string that lives during the call; the result is checked before use.
    let again = check(unsafe { libc::open(path.as_ptr(), flags) })?;
    // SAFETY: it was just opened and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(again) })
}

/// The effective user id of this process.
pub(crate) fn effective_user() -> libc::uid_t {
    // SAFETY: takes nothing and cannot fail.
    unsafe { libc::geteuid() }
}

/// Makes a named pipe.
#[cfg(test)]
pub(crate) fn make_fifo(path: &std::path::Path) -> io::Result<()> {
    use std::os::unix::ffi::OsStrExt as _;
    let path = std::ffi::CString::new(path.as_os_str().as_bytes())?;
    // SAFETY: `path` is a C string that lives during the call.
    check(unsafe { libc::mkfifo(path.as_ptr(), 0o600) }).map(drop)
}

/// Drops all capabilities of the calling thread.
#[cfg(test)]
pub(crate) fn drop_capabilities() -> io::Result<()> {
    /// From linux/capability.h: version 3, whose sets have two words each.
    const VERSION: u32 = 0x2008_0522;
    let (header, sets) = ([VERSION, 0], [0_u32; 6]);
    // SAFETY: capset reads a header of two words, in which 0 is the calling thread, and three sets of two
    // words each, which live during the call.
    let done = unsafe { libc::syscall(libc::SYS_capset, header.as_ptr(), sets.as_ptr()) };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Whether the descriptor is a terminal.
pub(crate) fn is_terminal(fd: BorrowedFd<'_>) -> bool {
    // SAFETY: the descriptor is open and nothing else is passed.
    unsafe { libc::isatty(fd.as_raw_fd()) == 1 }
}

/// Reads the settings of a terminal.
pub(crate) fn terminal_settings(fd: BorrowedFd<'_>) -> io::Result<libc::termios> {
    // SAFETY: termios is a plain C struct for which all zeros is a valid value.
    let mut settings: libc::termios = unsafe { std::mem::zeroed() };
    // SAFETY: `settings` is a valid termios to be filled, and the descriptor is open.
    check(unsafe { libc::tcgetattr(fd.as_raw_fd(), &raw mut settings) })?;
    Ok(settings)
}

/// Changes the settings of a terminal immediately.
pub(crate) fn set_terminal_settings(
    fd: BorrowedFd<'_>,
    settings: &libc::termios,
) -> io::Result<()> {
    // SAFETY: `settings` is a valid termios that is only read, and the descriptor is open.
    check(unsafe { libc::tcsetattr(fd.as_raw_fd(), libc::TCSANOW, settings) })?;
    Ok(())
}

/// The settings with all processing of input and output disabled.
pub(crate) fn raw_settings(mut settings: libc::termios) -> libc::termios {
    // SAFETY: `settings` is a valid termios that is changed in place.
    unsafe { libc::cfmakeraw(&raw mut settings) };
    settings
}

/// Columns and rows of a terminal.
pub(crate) fn terminal_size(fd: BorrowedFd<'_>) -> io::Result<(u16, u16)> {
    let mut size = libc::winsize { ws_row: 0, ws_col: 0, ws_xpixel: 0, ws_ypixel: 0 };
    // SAFETY: TIOCGWINSZ fills one winsize, which is what it gets; the descriptor is open.
    check(unsafe { libc::ioctl(fd.as_raw_fd(), libc::TIOCGWINSZ, &raw mut size) })?;
    Ok((size.ws_col, size.ws_row))
}

/// Sets columns and rows of a terminal.
#[cfg(test)]
pub(crate) fn set_terminal_size(fd: BorrowedFd<'_>, columns: u16, rows: u16) -> io::Result<()> {
    let size = libc::winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
    // SAFETY: TIOCSWINSZ reads one winsize, which is what it gets; the descriptor is open.
    check(unsafe { libc::ioctl(fd.as_raw_fd(), libc::TIOCSWINSZ, &raw const size) }).map(drop)
}

/// Opens a new pseudo terminal: its master (non-blocking), its slave, and the slave's path.
pub(crate) fn open_pty() -> io::Result<(OwnedFd, OwnedFd, String)> {
    let flags = libc::O_RDWR | libc::O_NOCTTY | libc::O_CLOEXEC;
    // SAFETY: the path is a C string; the result is checked before use.
    let fd = check(unsafe { libc::open(c"/dev/ptmx".as_ptr(), flags | libc::O_NONBLOCK) })?;
    // SAFETY: `fd` was just opened and has no other owner.
    let master = unsafe { OwnedFd::from_raw_fd(fd) };
    let unlock: libc::c_int = 0;
    // SAFETY: TIOCSPTLCK reads one int; the descriptor is open.
    check(unsafe { libc::ioctl(master.as_raw_fd(), libc::TIOCSPTLCK, &raw const unlock) })?;
    let mut number: libc::c_uint = 0;
    // SAFETY: TIOCGPTN writes one unsigned int; the descriptor is open.
    check(unsafe { libc::ioctl(master.as_raw_fd(), libc::TIOCGPTN, &raw mut number) })?;
    // SAFETY: TIOCGPTPEER takes open flags and returns a descriptor; the descriptor is open.
    let fd = check(unsafe { libc::ioctl(master.as_raw_fd(), libc::TIOCGPTPEER, flags) })?;
    // SAFETY: `fd` was just opened and has no other owner.
    let slave = unsafe { OwnedFd::from_raw_fd(fd) };
    Ok((master, slave, format!("/dev/pts/{number}")))
}

/// Sets the CPU affinity of the calling thread. CPUs that no host has are an error.
pub(crate) fn bind_thread(cpus: &[usize]) -> io::Result<()> {
    CpuSet::of(cpus)?.bind(0)
}

/// Resets the CPU affinity of the calling thread to that of the process's first thread; a new thread
/// inherits that of its creator.
pub(crate) fn unbind_thread() -> io::Result<()> {
    // SAFETY: takes nothing and cannot fail.
    let process = unsafe { libc::getpid() };
    CpuSet::of_thread(process)?.bind(0)
}

/// Fills a buffer with random bytes from the kernel.
pub(crate) fn random(buffer: &mut [u8]) -> io::Result<()> {
    let mut done = 0;
    while let Some(rest) = buffer.get_mut(done..).filter(|rest| !rest.is_empty()) {
        // SAFETY: `rest` is valid for writes of its length during the call.
        match check_len(unsafe { libc::getrandom(rest.as_mut_ptr().cast(), rest.len(), 0) }) {
            Ok(len_bytes) => done += len_bytes,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// An anonymous file in memory.
#[cfg(any(test, feature = "testing"))]
pub(crate) fn memory_file(len_bytes: u64) -> io::Result<std::fs::File> {
    // SAFETY: the name is a C string; the result is checked before use.
    let fd = check(unsafe { libc::memfd_create(c"devices".as_ptr(), libc::MFD_CLOEXEC) })?;
    // SAFETY: `fd` was just opened and has no other owner.
    let file = std::fs::File::from(unsafe { OwnedFd::from_raw_fd(fd) });
    file.set_len(len_bytes)?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

    use super::*;

    #[test]
    fn a_thread_is_bound_to_cpus_of_any_number_that_the_host_has() {
        std::thread::spawn(|| {
            let all = CpuSet::of_thread(0).unwrap();
            let last = *all.cpus().last().unwrap();
            bind_thread(&[last, 8191]).unwrap();
            assert_eq!(CpuSet::of_thread(0).unwrap().cpus(), [last]);
            let refused = bind_thread(&[usize::MAX]).unwrap_err();
            assert_eq!(refused.kind(), io::ErrorKind::InvalidInput);
            unbind_thread().unwrap();
            assert_eq!(CpuSet::of_thread(0).unwrap(), all);
        })
        .join()
        .unwrap();
    }
}
