// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A blocking client of the API, for `ch-remote` and tests.
//!
//! Owns one request per connection. It must never know what a request means.

use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use http_body_util::{BodyExt as _, Full, Limited};
use hyper::Request;
use hyper::body::Bytes;
use hyper::header::{CONTENT_TYPE, HOST};
use hyper_util::rt::TokioIo;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, sockopt};
use thiserror::Error;
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};

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
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_io()
            .enable_time()
            .build()
            .map_err(ClientError::Runtime)?;
        let late = || ClientError::Timeout { seconds: self.limit.unwrap_or_default().as_secs() };
        let begun = Instant::now();
        let stream = self.connect().map_err(|source| match source.kind() {
            // The errno of a socket timeout.
            io::ErrorKind::WouldBlock => late(),
            _ => ClientError::Connect { path: self.path.clone(), source },
        })?;
        let exchange = exchange(stream, method, name, body, fds);
        runtime.block_on(async {
            let Some(limit) = self.limit else { return exchange.await };
            let left = limit.saturating_sub(begun.elapsed());
            tokio::time::timeout(left, exchange).await.unwrap_or_else(|_| Err(late()))
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

async fn exchange(
    stream: UnixStream,
    method: Method,
    name: &str,
    body: Option<String>,
    fds: Vec<OwnedFd>,
) -> Result<Option<String>, ClientError> {
    let stream = tokio::net::UnixStream::from_std(stream).map_err(ClientError::Runtime)?;
    let stream = WithFds { stream, fds };
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
        .await
        .map_err(ClientError::Http)?;
    let driver = tokio::task::spawn(connection);
    let request = Request::builder()
        .method(method.as_str())
        .uri(format!("{API_ROOT}{name}"))
        .header(HOST, "localhost")
        .header(CONTENT_TYPE, "application/json")
        .body(Full::new(Bytes::from(body.unwrap_or_default())))
        .map_err(|error| ClientError::Runtime(io::Error::other(error)))?;
    let response = sender.send_request(request).await.map_err(ClientError::Http)?;
    let status = response.status();
    let body = Limited::new(response.into_body(), MAX_RESPONSE_BYTES)
        .collect()
        .await
        .map_err(ClientError::Body)?
        .to_bytes();
    driver.abort();
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
