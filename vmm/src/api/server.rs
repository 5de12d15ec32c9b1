// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The HTTP server: one thread with a single-threaded runtime, one task per connection.
//!
//! Owns accepting, the limits of a connection, and an orderly end: the response to
//! `vmm.shutdown` still goes out. There is such a thread for the API and one for metrics, each only if its socket was
//! asked for, so that scrapes and requests do not delay each other. It must
//! never run anything of a VM.

use std::future::{Future, poll_fn};
use std::io;
use std::pin::pin;
use std::rc::Rc;
use std::task::Poll;
use std::time::Duration;

use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use stoppable_thread::{Builder, StoppableThread};
use tokio::io::AsyncWriteExt as _;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{oneshot, watch};

use super::connection;
use super::connection_slots::{ConnectionSlot, ConnectionSlots};
use super::hangup::Hangup;
use super::request::ApiHandle;
use super::rights::ReceivedFds;
use super::scrape;
use super::socket::{ApiListener, SocketError};
use super::timeout_stream::{HeadClock, StreamTimeouts, TimeoutStream};

/// Limits on what a client can use.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Maximum number of simultaneous connections. Clients are tools and managers, so they are few.
    pub connections: usize,
    /// Maximum length of a request head in bytes. Those of known clients are below 300.
    pub head_bytes: usize,
    /// Maximum number of headers of a request.
    pub headers: usize,
    /// Maximum length of a body in bytes. A configuration with a thousand disks is about 300 KiB.
    pub body_bytes: usize,
    /// Time from the first byte of a head to its last. Between requests there is no limit.
    pub head_time: Duration,
    /// Time within which the body must arrive.
    pub body_time: Duration,
    /// Time within which a client must accept more of its response.
    pub write_time: Duration,
    /// Time that open requests have to finish when the server ends.
    pub end_time: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections: 128,
            head_bytes: 16 << 10,
            headers: 64,
            body_bytes: 512 << 10,
            head_time: Duration::from_secs(15),
            body_time: Duration::from_secs(10),
            write_time: Duration::from_secs(10),
            end_time: Duration::from_millis(500),
        }
    }
}

/// What a server offers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Front {
    /// All endpoints.
    Api,
    /// Metrics alone: nothing that changes a VM, and nothing else that is said of it.
    Metrics,
}

impl Front {
    /// Name of its thread.
    const fn thread(self) -> &'static str {
        match self {
            Self::Api => "http-server",
            Self::Metrics => "metrics-server",
        }
    }

    /// In messages.
    const fn name(self) -> &'static str {
        match self {
            Self::Api => "the API",
            Self::Metrics => "metrics",
        }
    }
}

/// Stack size of the server thread; its deepest use is parsing a large configuration.
const STACK_BYTES: usize = 1 << 20;

/// Pause before the next accept when the descriptor limit has been reached.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// The running server; it ends when this is dropped.
#[derive(Debug)]
pub struct ApiServer {
    thread: StoppableThread,
}

impl ApiServer {
    /// Starts the server on a listening socket.
    ///
    /// # Errors
    /// The thread or the poll descriptor cannot be created.
    pub fn start(listener: ApiListener, handle: ApiHandle) -> Result<Self, SocketError> {
        Self::start_with(Front::Api, listener, handle, Limits::default())
    }

    /// Starts the server of metrics on a listening socket.
    ///
    /// # Errors
    /// The thread or the poll descriptor cannot be created.
    pub fn start_metrics(listener: ApiListener, handle: ApiHandle) -> Result<Self, SocketError> {
        Self::start_with(Front::Metrics, listener, handle, scrape::limits())
    }

    /// Starts a server with other limits.
    ///
    /// # Errors
    /// The thread or the poll descriptor cannot be created.
    pub fn start_with(
        front: Front,
        listener: ApiListener,
        handle: ApiHandle,
        limits: Limits,
    ) -> Result<Self, SocketError> {
        let (stop, stopped) = oneshot::channel::<()>();
        let stop = Mutex::new(Some(stop));
        let (started, start) = std::sync::mpsc::sync_channel(1);
        let body = move || {
            crate::signals::block_signals();
            match prepare(&listener) {
                Ok((runtime, accept)) => {
                    let _ = started.send(Ok(()));
                    let local = tokio::task::LocalSet::new();
                    local.block_on(&runtime, run(front, accept, handle, limits, stopped));
                }
                Err(error) => {
                    let _ = started.send(Err(error));
                }
            }
            drop(listener);
        };
        let builder = Builder::new(front.thread()).stack_bytes(STACK_BYTES);
        let thread = StoppableThread::build(builder, move || drop(stop.lock().take()), body)
            .map_err(SocketError::Start)?;
        match start.recv() {
            Ok(Ok(())) => Ok(Self { thread }),
            Ok(Err(error)) => Err(SocketError::Start(error)),
            Err(_) => Err(SocketError::Start(io::ErrorKind::BrokenPipe.into())),
        }
    }

    /// Stops the server: pending responses are sent, within a time limit, and the socket is removed.
    pub fn stop(self) {
        drop(self.thread);
    }
}

fn prepare(
    listener: &ApiListener,
) -> io::Result<(tokio::runtime::Runtime, std::os::unix::net::UnixListener)> {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_io().enable_time().build()?;
    let accept = listener.listener().try_clone()?;
    accept.set_nonblocking(true)?;
    Ok((runtime, accept))
}

/// Accepts connections until the server is stopped, then waits for the open ones.
async fn run(
    front: Front,
    accept: std::os::unix::net::UnixListener,
    handle: ApiHandle,
    limits: Limits,
    stopped: oneshot::Receiver<()>,
) {
    let listener = match UnixListener::from_std(accept) {
        Ok(listener) => listener,
        Err(error) => {
            log::error!("the socket of {} cannot be polled: {error}", front.name());
            return;
        }
    };
    let slots = ConnectionSlots::new(limits.connections);
    let (end, ended) = watch::channel(false);
    let mut stopped = pin!(stopped);
    let http = Rc::new(http(limits));
    loop {
        let next = {
            let mut next = pin!(listener.accept());
            poll_fn(|cx| match stopped.as_mut().poll(cx) {
                Poll::Ready(_) => Poll::Ready(None),
                Poll::Pending => next.as_mut().poll(cx).map(Some),
            })
            .await
        };
        match next {
            None => break,
            Some(Ok((stream, _))) => match slots.acquire() {
                Some((slot, leave)) => {
                    let (http, handle) = (Rc::clone(&http), handle.clone());
                    let server = Common { front, http, handle, limits };
                    tokio::task::spawn_local(client(server, stream, slot, leave, ended.clone()));
                }
                None => turn_away(stream),
            },
            Some(Err(error)) => {
                log::warn!("a connection to {} cannot be accepted: {error}", front.name());
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
    let _ = end.send(true);
    let _ = tokio::time::timeout(limits.end_time, slots.empty()).await;
}

fn http(limits: Limits) -> http1::Builder {
    let mut http = http1::Builder::new();
    // Old clients match `Content-Length` case-sensitively.
    http.title_case_headers(true)
        .auto_date_header(false)
        .max_headers(limits.headers)
        .max_header_size(limits.head_bytes)
        .max_buf_size(limits.head_bytes.max(8192))
        // A client may shut down its sending side and wait for the answer; `hangup` detects one that has
        // left.
        .half_close(true)
        // `timeout_stream` limits the time of a head: this timeout would include the time between two
        // requests.
        .header_read_timeout(None);
    http
}

/// State that the tasks of all clients share.
struct Common {
    front: Front,
    http: Rc<http1::Builder>,
    handle: ApiHandle,
    limits: Limits,
}

/// Serves one client until it disconnects, times out, is disconnected for another, or the server ends.
async fn client(
    server: Common,
    stream: UnixStream,
    slot: ConnectionSlot,
    leave: oneshot::Receiver<()>,
    mut ended: watch::Receiver<bool>,
) {
    let Common { front, http, handle, limits } = server;
    let slot = Rc::new(slot);
    let clock = HeadClock::new();
    let timeouts = StreamTimeouts { head: limits.head_time, write: limits.write_time };
    let received = match front {
        Front::Api => ReceivedFds::default(),
        Front::Metrics => ReceivedFds::refusing(),
    };
    let hangup = Rc::new(Hangup::of(&stream));
    let watching = Rc::default();
    let io = TokioIo::new(TimeoutStream::new(stream, timeouts, clock.clone(), received.clone()));
    let service = service_fn(|request| {
        let (request_guard, handle, slot) = (clock.request(), handle.clone(), Rc::clone(&slot));
        let (received, hangup) = (received.clone(), Rc::clone(&hangup));
        let client = connection::Peer { slot, received, hangup, watching: Rc::clone(&watching) };
        async move {
            let answer = connection::serve(request, front, handle, limits, client).await;
            drop(request_guard);
            answer
        }
    });
    let mut connection = pin!(http.serve_connection(io, service));
    let mut leave = pin!(leave);
    let mut end = pin!(async move {
        let _ = ended.wait_for(|ended| *ended).await;
    });
    let mut ending = false;
    let result = poll_fn(|cx| {
        if leave.as_mut().poll(cx).is_ready() {
            log::debug!("a connection to {} is closed in favour of another", front.name());
            return Poll::Ready(Ok(()));
        }
        if !ending && end.as_mut().poll(cx).is_ready() {
            ending = true;
            connection.as_mut().graceful_shutdown();
        }
        connection.as_mut().poll(cx)
    })
    .await;
    if let Err(error) = result {
        log::debug!("a connection to {} ended: {error}", front.name());
    }
}

/// Refuses a connection above the limit; what does not fit into the socket buffer is dropped.
fn turn_away(mut stream: UnixStream) {
    tokio::task::spawn_local(async move {
        let goodbye = connection::too_many();
        let _ = tokio::time::timeout(Duration::from_secs(1), stream.write_all(&goodbye)).await;
    });
}
