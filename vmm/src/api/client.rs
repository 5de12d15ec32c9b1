// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A blocking client of the API, for `ch-remote` and tests.
//!
//! Owns one request per connection, and connections that are kept for several. It must never know what a request means.

use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use http_body_util::{BodyExt as _, Full, Limited};
use hyper::body::{Bytes, Incoming};
use hyper::client::conn::http1::SendRequest;
use hyper::header::{CONTENT_TYPE, HOST};
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, sockopt};
use thiserror::Error;
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};
use tokio::runtime::Runtime;
use tokio::task::JoinHandle;

use super::endpoints::{API_ROOT, Method};
use super::rights;

/// Maximum length of a response; `vm.info` of a large VM is about 1 MB.
const MAX_RESPONSE_BYTES: usize = 64 << 20;

/// Why a request got no successful answer.
#[derive(Debug, Error)]
pub enum ClientError {
    /// No process listens on the socket.
    #[error("the API socket '{path}' cannot be reached")]
    Connect {
        /// Path of the socket.
        path: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// The runtime of the client cannot be set up.
    #[error("the request cannot be sent")]
    Runtime(#[source] io::Error),
    /// The connection broke, or the other end does not speak HTTP.
    #[error("the VMM did not answer")]
    Http(#[source] hyper::Error),
    /// No answer within the time limit.
    #[error("there was no answer within {seconds} s; the VMM may still carry the request out")]
    Timeout {
        /// The limit.
        seconds: u64,
    },
    /// The response is too long or breaks off.
    #[error("the answer cannot be read")]
    Body(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// The VMM answered with a status of 400 or above.
    #[error("server responded with {status}{}", list(reasons))]
    Refused {
        /// Name of the HTTP status, such as `NotFound`.
        status: String,
        /// Error messages, outermost first.
        reasons: Vec<String>,
    },
}

impl ClientError {
    /// Whether the request failed because the time limit passed.
    pub fn is_timeout(&self) -> bool {
        matches!(self, Self::Timeout { .. })
    }
}

fn list(reasons: &[String]) -> String {
    if reasons.is_empty() { String::new() } else { format!(": {}", reasons.join(": ")) }
}

/// A client of the VMM behind one API socket.
#[derive(Clone, Debug)]
pub struct Client {
    path: PathBuf,
    limit: Option<Duration>,
}

impl Client {
    /// A client of the VMM that listens on the socket `path`; no time limit.
    pub fn new(path: impl AsRef<Path>) -> Self {
        Self { path: path.as_ref().to_owned(), limit: None }
    }

    /// The same client with a time limit for each request, or with none.
    #[must_use]
    pub fn with_limit(mut self, limit: Option<Duration>) -> Self {
        self.limit = limit;
        self
    }

    /// The same client for another socket.
    #[must_use]
    pub fn at(mut self, path: impl AsRef<Path>) -> Self {
        path.as_ref().clone_into(&mut self.path);
        self
    }

    /// Sends a request and waits for the answer, up to the time limit if there is one. Returns the body of
    /// the answer, if it has one.
    ///
    /// # Errors
    /// No connection, no HTTP, no answer in time, or a status of 400 and above.
    pub fn ask(
        &self,
        method: Method,
        name: &str,
        body: Option<String>,
    ) -> Result<Option<String>, ClientError> {
        self.ask_with(method, name, body, Vec::new())
    }

    /// Like [`Client::ask`], and passes descriptors to the VMM; the local copies are closed once sent.
    ///
    /// # Errors
    /// As [`Client::ask`].
    pub fn ask_with(
        &self,
        method: Method,
        name: &str,
        body: Option<String>,
        fds: Vec<OwnedFd>,
    ) -> Result<Option<String>, ClientError> {
        let runtime = runtime()?;
        let begun = Instant::now();
        let stream = self.stream()?;
        runtime.block_on(self.in_time(begun, async {
            let mut connection = Open::on(stream, fds).await?;
            connection.ask(method, name, body).await
        }))
    }

    /// The same client with a connection that is kept from one request to the next, which is made with the first.
    ///
    /// # Errors
    /// The host has no descriptor left.
    pub fn keep(&self) -> Result<KeptConnection, ClientError> {
        Ok(KeptConnection { client: self.clone(), runtime: runtime()?, open: None })
    }

    /// Connects to a VMM for several requests, all to the same one.
    ///
    /// # Errors
    /// No connection, or no HTTP.
    pub fn open(&self) -> Result<OpenClient, ClientError> {
        let (runtime, begun) = (runtime()?, Instant::now());
        let stream = self.stream()?;
        let peer = sockopt::socket_peercred(&stream).ok();
        let open = runtime.block_on(self.in_time(begun, Open::on(stream, Vec::new())))?;
        let peer_pid = peer.map(|peer| peer.pid.as_raw_nonzero().get());
        Ok(OpenClient { client: self.clone(), open, runtime, peer_pid })
    }

    fn late(&self) -> ClientError {
        ClientError::Timeout { seconds: self.limit.unwrap_or_default().as_secs() }
    }

    async fn in_time<T>(
        &self,
        begun: Instant,
        exchange: impl Future<Output = Result<T, ClientError>>,
    ) -> Result<T, ClientError> {
        let Some(limit) = self.limit else { return exchange.await };
        let left = limit.saturating_sub(begun.elapsed());
        tokio::time::timeout(left, exchange).await.unwrap_or_else(|_| Err(self.late()))
    }

    fn stream(&self) -> Result<UnixStream, ClientError> {
        self.connect().map_err(|source| match source.kind() {
            // The errno of a socket timeout.
            io::ErrorKind::WouldBlock => self.late(),
            _ => ClientError::Connect { path: self.path.clone(), source },
        })
    }

    /// Connects; waits while the backlog of the listener is full.
    fn connect(&self) -> io::Result<UnixStream> {
        let stream = rustix::net::socket_with(
            AddressFamily::UNIX,
            SocketType::STREAM,
            SocketFlags::CLOEXEC,
            None,
        )?;
        sockopt::set_socket_timeout(&stream, sockopt::Timeout::Send, self.limit)?;
        rustix::net::connect(&stream, &SocketAddrUnix::new(&self.path)?)?;
        let stream = UnixStream::from(stream);
        stream.set_nonblocking(true)?;
        Ok(stream)
    }
}

fn runtime() -> Result<Runtime, ClientError> {
    let mut builder = tokio::runtime::Builder::new_current_thread();
    builder.enable_io().enable_time().build().map_err(ClientError::Runtime)
}

/// A connection for several requests. The VMM knows by it that a client which asks for the progress of a migration is
/// still there, however long that is kept from asking again.
#[derive(Debug)]
pub struct KeptConnection {
    client: Client,
    runtime: Runtime,
    open: Option<Open>,
}

impl KeptConnection {
    /// Sends a request that changes nothing, and waits for the answer. If the connection has ended meanwhile, which a VMM
    /// with many clients may do, another one is made.
    ///
    /// # Errors
    /// As [`Client::ask`].
    pub fn get(&mut self, name: &str) -> Result<Option<String>, ClientError> {
        let begun = Instant::now();
        let Self { client, runtime, open } = self;
        if let Some(kept) = open {
            let asked = runtime.block_on(client.in_time(begun, kept.ask(Method::Get, name, None)));
            match asked {
                Ok(_) | Err(ClientError::Refused { .. }) => return asked,
                Err(_) => *open = None,
            }
            if !matches!(asked, Err(ClientError::Http(_) | ClientError::Body(_))) {
                return asked;
            }
        }
        let stream = client.stream()?;
        let answer = runtime.block_on(client.in_time(begun, async {
            let kept = open.insert(Open::on(stream, Vec::new()).await?);
            kept.ask(Method::Get, name, None).await
        }));
        if !matches!(answer, Ok(_) | Err(ClientError::Refused { .. })) {
            *open = None;
        }
        answer
    }
}

/// A connection that stays one to the same VMM, whatever becomes of the path of its socket.
#[derive(Debug)]
pub struct OpenClient {
    client: Client,
    // Before the runtime, in which it is driven.
    open: Open,
    runtime: Runtime,
    peer_pid: Option<i32>,
}

impl OpenClient {
    /// The process that listens; `None` if it is in a PID namespace that cannot be seen from here.
    pub fn peer_pid(&self) -> Option<i32> {
        self.peer_pid
    }

    /// Sends a request and waits for the answer, up to the time limit if there is one. After an error other
    /// than a refusal no further request succeeds.
    ///
    /// # Errors
    /// The connection has ended, no answer in time, or a status of 400 and above.
    pub fn ask(
        &mut self,
        method: Method,
        name: &str,
        body: Option<String>,
    ) -> Result<Option<String>, ClientError> {
        let Self { client, open, runtime, .. } = self;
        runtime.block_on(client.in_time(Instant::now(), open.ask(method, name, body)))
    }
}

/// A connection, and the task that drives it.
#[derive(Debug)]
struct Open {
    sender: SendRequest<Full<Bytes>>,
    driver: JoinHandle<hyper::Result<()>>,
}

impl Drop for Open {
    fn drop(&mut self) {
        self.driver.abort();
    }
}

impl Open {
    async fn on(stream: UnixStream, fds: Vec<OwnedFd>) -> Result<Self, ClientError> {
        let stream = tokio::net::UnixStream::from_std(stream).map_err(ClientError::Runtime)?;
        let stream = TokioIo::new(WithFds { stream, fds });
        let handshake = hyper::client::conn::http1::handshake(stream).await;
        let (sender, connection) = handshake.map_err(ClientError::Http)?;
        Ok(Self { sender, driver: tokio::task::spawn(connection) })
    }

    async fn ask(
        &mut self,
        method: Method,
        name: &str,
        body: Option<String>,
    ) -> Result<Option<String>, ClientError> {
        let request = Request::builder()
            .method(method.as_str())
            .uri(format!("{API_ROOT}{name}"))
            .header(HOST, "localhost")
            .header(CONTENT_TYPE, "application/json")
            .body(Full::new(Bytes::from(body.unwrap_or_default())))
            .map_err(|error| ClientError::Runtime(io::Error::other(error)))?;
        self.sender.ready().await.map_err(ClientError::Http)?;
        let response = self.sender.send_request(request).await.map_err(ClientError::Http)?;
        read_answer(response).await
    }
}

async fn read_answer(response: Response<Incoming>) -> Result<Option<String>, ClientError> {
    let status = response.status();
    let body = Limited::new(response.into_body(), MAX_RESPONSE_BYTES)
        .collect()
        .await
        .map_err(ClientError::Body)?
        .to_bytes();
    let text = String::from_utf8_lossy(&body).into_owned();
    if status.is_success() {
        return Ok((!text.is_empty()).then_some(text));
    }
    let reasons = serde_json::from_str(&text)
        .unwrap_or_else(|_| if text.is_empty() { Vec::new() } else { vec![text] });
    Err(ClientError::Refused { status: status_name(status), reasons })
}

/// A stream that sends descriptors with its first bytes.
struct WithFds {
    stream: tokio::net::UnixStream,
    fds: Vec<OwnedFd>,
}

impl AsyncRead for WithFds {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for WithFds {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        while !self.fds.is_empty() {
            std::task::ready!(self.stream.poll_write_ready(cx))?;
            let fds: Vec<_> = self.fds.iter().map(OwnedFd::as_fd).collect();
            let send = || rights::send(&self.stream, buf, &fds);
            match self.stream.try_io(Interest::WRITABLE, send) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Poll::Ready(Err(error)),
                Ok(bytes) => {
                    self.fds.clear();
                    return Poll::Ready(Ok(bytes));
                }
            }
        }
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

/// Name of a status; `InternalServerError` for 500, as existing clients expect.
fn status_name(status: hyper::StatusCode) -> String {
    match status.canonical_reason() {
        Some(reason) => reason.split(' ').collect(),
        None => status.as_u16().to_string(),
    }
}
