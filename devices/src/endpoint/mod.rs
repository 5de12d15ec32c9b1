// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Host endpoints of serial port, virtio console and debug console.
//!
//! Owns the terminal, pseudo terminal, file or socket that a guest's console is connected to.
//! Output never waits for its reader: what cannot be written at once is kept, up to a limit
//! above which the oldest bytes are dropped. So a vCPU may write from its own thread. Input is read only
//! when the device has room for it.
//!
//! An endpoint is one descriptor to watch, [`ConsoleEndpoint::poll_fd`], and one call to make when
//! it is readable, [`ConsoleEndpoint::service`].

mod backend;
pub(crate) mod listener;
mod output;
mod standard;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd as _, AsRawFd, BorrowedFd, RawFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use log::warn;
use parking_lot::Mutex;
use thiserror::Error;
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};

pub use backend::RawTerminal;
use backend::{Backend, Channel};
pub use output::open_output;

/// Maximum output kept for a slow or absent reader, in bytes; as in cloud-hypervisor.
const PENDING_BYTES_MAX: usize = 1 << 20;
/// Bytes written at a time once the descriptor is ready.
const WRITE_CHUNK_BYTES: usize = 512;

/// Why an endpoint cannot be opened.
#[derive(Debug, Error)]
pub enum EndpointError {
    /// The output file cannot be created.
    #[error("cannot open {path} for console output")]
    File {
        /// Path of the file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// A pseudo terminal cannot be created.
    #[error("cannot open a pseudo terminal")]
    Pty(#[source] io::Error),
    /// The terminal cannot be set up.
    #[error("cannot set up the terminal")]
    Terminal(#[source] io::Error),
    /// The socket cannot be created.
    #[error("cannot listen on the console socket {path}")]
    Socket {
        /// Path of the socket.
        path: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// The epoll descriptor cannot be created.
    #[error("cannot watch the console")]
    Epoll(#[source] io::Error),
}

/// The back end of a console; see the module.
pub struct ConsoleEndpoint {
    epoll: Epoll,
    pty_path: Option<PathBuf>,
    /// Held for one non-blocking read or write.
    inner: Mutex<Inner>,
}

struct Inner {
    backend: Backend,
    pending: VecDeque<u8>,
    lost_bytes: u64,
    input_wanted: bool,
    /// Descriptors registered with epoll.
    watched: Watched,
}

#[derive(Default)]
struct Watched {
    input: Option<RawFd>,
    output: Option<RawFd>,
    listener: Option<RawFd>,
}

impl ConsoleEndpoint {
    /// Discards output; no input.
    pub fn null() -> Result<Self, EndpointError> {
        Self::new(Backend::null(), None)
    }

    /// Writes output to a file, which is created or appended to; no input.
    pub fn file(path: &Path) -> Result<Self, EndpointError> {
        let backend = Backend::file(path)
            .map_err(|source| EndpointError::File { path: path.to_owned(), source })?;
        Self::new(backend, None)
    }

    /// Standard input and output. A terminal is put into raw mode until the endpoint is dropped.
    pub fn tty() -> Result<Self, EndpointError> {
        Self::standard(io::stdin().as_fd(), io::stdout().as_fd())
    }

    /// The same with other descriptors.
    pub(crate) fn standard(
        input: BorrowedFd<'_>,
        output: BorrowedFd<'_>,
    ) -> Result<Self, EndpointError> {
        Self::new(Backend::standard(input, output).map_err(EndpointError::Terminal)?, None)
    }

    /// A new pseudo terminal; [`Self::pty_path`] returns its path.
    pub fn pty() -> Result<Self, EndpointError> {
        let (backend, path) = Backend::pty().map_err(EndpointError::Pty)?;
        Self::new(backend, Some(path))
    }

    /// Listens on a Unix socket for one peer at a time, the newest. The socket is removed when dropped.
    pub fn socket(path: &Path) -> Result<Self, EndpointError> {
        let backend = Backend::socket(path)
            .map_err(|source| EndpointError::Socket { path: path.to_owned(), source })?;
        Self::new(backend, None)
    }

    fn new(backend: Backend, pty_path: Option<PathBuf>) -> Result<Self, EndpointError> {
        let epoll = Epoll::new().map_err(EndpointError::Epoll)?;
        let inner = Inner {
            backend,
            pending: VecDeque::new(),
            lost_bytes: 0,
            input_wanted: false,
            watched: Watched::default(),
        };
        let endpoint = Self { epoll, pty_path, inner: Mutex::new(inner) };
        endpoint.with(Inner::update_watches);
        Ok(endpoint)
    }

    /// Path of the pseudo terminal, if the endpoint is one.
    pub fn pty_path(&self) -> Option<&Path> {
        self.pty_path.as_deref()
    }

    /// Columns and rows of the terminal, if it is one.
    pub fn size(&self) -> Option<(u16, u16)> {
        self.with(|inner, _| {
            let screen = inner.backend.screen()?;
            crate::syscalls::terminal_size(screen).ok()
        })
    }

    /// Readable when [`Self::service`] has something to do. Valid as long as the endpoint.
    pub fn poll_fd(&self) -> RawFd {
        self.epoll.as_raw_fd()
    }

    /// Sets whether [`Self::service`] reads input; initially it does not.
    pub fn want_input(&self, wanted: bool) {
        self.with(|inner, epoll| {
            inner.input_wanted = wanted;
            inner.update_watches(epoll);
        });
    }

    /// Writes guest output; never blocks and never fails.
    pub fn write(&self, bytes: &[u8]) {
        self.with(|inner, epoll| {
            inner.write(bytes);
            inner.update_watches(epoll);
        });
    }

    /// Accepts a peer, writes pending output, and reads input if wanted; returns the number of bytes read
    /// into `buffer`.
    pub fn service(&self, buffer: &mut [u8]) -> usize {
        self.with(|inner, epoll| {
            inner.backend.accept();
            inner.flush();
            let len_bytes = if inner.input_wanted { inner.read(buffer) } else { 0 };
            inner.update_watches(epoll);
            len_bytes
        })
    }

    /// Restores the terminal or removes the socket. Later output is discarded.
    pub fn close(&self) {
        self.with(Inner::close);
    }

    /// The same, unless another thread holds the endpoint for longer than `within`, such as one that has
    /// panicked or is blocked; false then.
    pub fn try_close(&self, within: Duration) -> bool {
        let Some(mut inner) = self.inner.try_lock_for(within) else { return false };
        inner.close(&self.epoll);
        true
    }

    /// Bytes of output that were discarded unread.
    pub fn lost_bytes(&self) -> u64 {
        self.with(|inner, _| inner.lost_bytes)
    }

    fn with<T>(&self, work: impl FnOnce(&mut Inner, &Epoll) -> T) -> T {
        let mut inner = self.inner.lock();
        work(&mut inner, &self.epoll)
    }
}

impl Inner {
    fn close(&mut self, epoll: &Epoll) {
        self.backend = Backend::null();
        self.update_watches(epoll);
    }

    fn write(&mut self, bytes: &[u8]) {
        if self.backend.discards() {
            return;
        }
        if self.pending.is_empty() {
            let written = self.backend.channel.write(bytes);
            self.keep(bytes.get(written..).unwrap_or_default());
        } else {
            self.keep(bytes);
            self.flush();
        }
    }

    /// Keeps the newest bytes.
    fn keep(&mut self, bytes: &[u8]) {
        self.pending.extend(bytes);
        let excess = self.pending.len().saturating_sub(PENDING_BYTES_MAX);
        self.pending.drain(..excess);
        self.lost_bytes = self.lost_bytes.saturating_add(u64::try_from(excess).unwrap_or(u64::MAX));
    }

    fn flush(&mut self) {
        while !self.pending.is_empty() {
            let (front, _) = self.pending.as_slices();
            let written = self.backend.channel.write(front);
            if written == 0 {
                break;
            }
            self.pending.drain(..written);
        }
    }

    fn read(&mut self, buffer: &mut [u8]) -> usize {
        self.backend.read(buffer)
    }

    fn update_watches(&mut self, epoll: &Epoll) {
        let Channel { input, output, .. } = &self.backend.channel;
        let input = input.as_ref().filter(|_| self.input_wanted).map(AsRawFd::as_raw_fd);
        let output = output.as_ref().filter(|_| !self.pending.is_empty()).map(AsRawFd::as_raw_fd);
        let listener = self.backend.listener();
        self.watched.input = watch(epoll, self.watched.input, input, EventSet::IN);
        self.watched.output = watch(epoll, self.watched.output, output, EventSet::OUT);
        self.watched.listener = watch(epoll, self.watched.listener, listener, EventSet::IN);
    }
}

/// Replaces a watched descriptor by another; returns the one that is watched now.
fn watch(epoll: &Epoll, old: Option<RawFd>, new: Option<RawFd>, events: EventSet) -> Option<RawFd> {
    if old == new {
        return new;
    }
    if let Some(fd) = old {
        // Fails only for a closed descriptor, which epoll has removed already.
        let _ = epoll.ctl(ControlOperation::Delete, fd, EpollEvent::default());
    }
    let fd = new?;
    match epoll.ctl(ControlOperation::Add, fd, EpollEvent::new(events, 0)) {
        Ok(()) => {}
        // Regular files cannot be polled, and are always ready.
        Err(error) if error.raw_os_error() == Some(libc::EPERM) => {}
        Err(error) => warn!("cannot watch a console descriptor: {error}"),
    }
    Some(fd)
}
