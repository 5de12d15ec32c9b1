// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A stream with timeouts: its peer must finish the head that it has begun, and read what it asked for.
//!
//! Owns the limits on the time for a request head and on how long a write may stand still, and
//! reads in the way that keeps descriptors which come with the bytes. A body
//! has a separate limit, in the HTTP layer. It must never limit the time between a request and its
//! answer, as some take minutes, or the time between two requests: clients keep one connection for
//! the life of a VM.

use std::cell::Cell;
use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};
use tokio::net::UnixStream;
use tokio::time::Sleep;

use super::rights::ReceivedFds;

/// State of a connection as to the time limit of a request head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ReadPhase {
    /// Between two requests: no limit.
    Idle,
    /// The head has begun and is not complete.
    Head,
    /// The request is being read or carried out: no limit here.
    Request,
}

/// State of the current request head, shared by the HTTP layer and the stream.
#[derive(Clone, Debug)]
pub struct HeadClock(Rc<Cell<ReadPhase>>);

impl HeadClock {
    /// The clock of a new connection.
    pub fn new() -> Self {
        Self(Rc::new(Cell::new(ReadPhase::Idle)))
    }

    /// Marks the head complete. Bytes read until the guard is dropped do not count as a head. A pipelined
    /// head gets its limit with the first byte read after that.
    pub fn request(&self) -> RequestGuard {
        self.0.set(ReadPhase::Request);
        RequestGuard(self.clone())
    }
}

/// A request that is not answered yet.
#[derive(Debug)]
pub struct RequestGuard(HeadClock);

impl Drop for RequestGuard {
    fn drop(&mut self) {
        self.0.0.set(ReadPhase::Idle);
    }
}

/// Time limits of a connection.
#[derive(Clone, Copy, Debug)]
pub struct StreamTimeouts {
    /// From the first byte of a request head to its last.
    pub head: Duration,
    /// Longest time without progress while a response is written.
    pub write: Duration,
}

/// A stream that fails when its peer exceeds a time limit.
#[derive(Debug)]
pub struct TimeoutStream {
    stream: UnixStream,
    timeouts: StreamTimeouts,
    clock: HeadClock,
    received: ReceivedFds,
    head: Option<Pin<Box<Sleep>>>,
    stalled: Option<Pin<Box<Sleep>>>,
}

impl TimeoutStream {
    /// Wraps the stream; descriptors that arrive are kept in `received`.
    pub fn new(
        stream: UnixStream,
        timeouts: StreamTimeouts,
        clock: HeadClock,
        received: ReceivedFds,
    ) -> Self {
        Self { stream, timeouts, clock, received, head: None, stalled: None }
    }

    fn receive(&self, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        loop {
            std::task::ready!(self.stream.poll_read_ready(cx))?;
            let room = buf.initialize_unfilled();
            let read = || self.received.read(&self.stream, room);
            match self.stream.try_io(Interest::READABLE, read) {
                Ok(bytes) => {
                    buf.advance(bytes);
                    return Poll::Ready(Ok(()));
                }
                // It was not readable after all; poll the readiness again.
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
    }

    /// Starts or polls the timer of a write that makes no progress; stops it otherwise.
    fn limit_stall<T>(
        &mut self,
        cx: &mut Context<'_>,
        poll: Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        if poll.is_ready() {
            self.stalled = None;
            return poll;
        }
        let limit = self.timeouts.write;
        let clock = self.stalled.get_or_insert_with(|| Box::pin(tokio::time::sleep(limit)));
        match clock.as_mut().poll(cx) {
            Poll::Ready(()) => Poll::Ready(Err(io::ErrorKind::TimedOut.into())),
            Poll::Pending => Poll::Pending,
        }
    }
}

use std::future::Future as _;

impl AsyncRead for TimeoutStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let poll = self.receive(cx, buf);
        if buf.filled().len() > before && self.clock.0.get() == ReadPhase::Idle {
            self.clock.0.set(ReadPhase::Head);
        }
        if self.clock.0.get() != ReadPhase::Head {
            self.head = None;
            return poll;
        }
        let limit = self.timeouts.head;
        let clock = self.head.get_or_insert_with(|| Box::pin(tokio::time::sleep(limit)));
        match clock.as_mut().poll(cx) {
            Poll::Ready(()) => Poll::Ready(Err(io::ErrorKind::TimedOut.into())),
            Poll::Pending => poll,
        }
    }
}

impl AsyncWrite for TimeoutStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        let poll = Pin::new(&mut self.stream).poll_write(cx, buf);
        self.limit_stall(cx, poll)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let poll = Pin::new(&mut self.stream).poll_flush(cx);
        if poll.is_pending() { self.limit_stall(cx, poll) } else { poll }
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
