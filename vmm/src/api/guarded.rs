// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A socket whose peer must finish the head that it has begun, and read what it asked for.
//!
//! Owns the limits on the time for a request head and on how long a write may stand still, and
//! reads in the way that keeps descriptors which come with the bytes. A body
//! has a limit of its own, in the HTTP layer. It must never limit the time between a request and its
//! answer, some take minutes, nor the time between two requests: clients keep one connection for
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

use super::rights::Received;

/// Where a connection is, as far as the time limit of a head is concerned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reading {
    /// Between two requests: no limit.
    Idle,
    /// A head has begun, and is not complete.
    Head,
    /// A request is being read or carried out: no limit here.
    Request,
}

/// What the HTTP layer tells the stream of its requests.
#[derive(Clone, Debug)]
pub struct HeadClock(Rc<Cell<Reading>>);

impl HeadClock {
    /// The clock of a new connection.
    pub fn new() -> Self {
        Self(Rc::new(Cell::new(Reading::Idle)))
    }

    /// A head is complete. What is read until the guard goes is not part of a head, but for one
    /// that the client sends ahead of the answer: that one has no limit before its next byte.
    pub fn request(&self) -> InRequest {
        self.0.set(Reading::Request);
        InRequest(self.clone())
    }
}

/// A request that has not been answered yet.
#[derive(Debug)]
pub struct InRequest(HeadClock);

impl Drop for InRequest {
    fn drop(&mut self) {
        self.0.0.set(Reading::Idle);
    }
}

/// Times that a client has.
#[derive(Clone, Copy, Debug)]
pub struct Times {
    /// From the first byte of a head to its last.
    pub head: Duration,
    /// Without taking a byte of its answer.
    pub write: Duration,
}

/// A stream that fails when the peer takes longer than that.
#[derive(Debug)]
pub struct Guarded {
    stream: UnixStream,
    times: Times,
    clock: HeadClock,
    received: Received,
    head: Option<Pin<Box<Sleep>>>,
    stalled: Option<Pin<Box<Sleep>>>,
}

impl Guarded {
    /// Guards the stream; descriptors that come are kept in `received`.
    pub fn new(stream: UnixStream, times: Times, clock: HeadClock, received: Received) -> Self {
        Self { stream, times, clock, received, head: None, stalled: None }
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
                // It was not readable after all, which the next look knows.
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
    }

    /// Starts or polls the clock of a write that makes no progress, and stops it otherwise.
    fn guard<T>(&mut self, cx: &mut Context<'_>, poll: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if poll.is_ready() {
            self.stalled = None;
            return poll;
        }
        let limit = self.times.write;
        let clock = self.stalled.get_or_insert_with(|| Box::pin(tokio::time::sleep(limit)));
        match clock.as_mut().poll(cx) {
            Poll::Ready(()) => Poll::Ready(Err(io::ErrorKind::TimedOut.into())),
            Poll::Pending => Poll::Pending,
        }
    }
}

use std::future::Future as _;

impl AsyncRead for Guarded {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let poll = self.receive(cx, buf);
        if buf.filled().len() > before && self.clock.0.get() == Reading::Idle {
            self.clock.0.set(Reading::Head);
        }
        if self.clock.0.get() != Reading::Head {
            self.head = None;
            return poll;
        }
        let limit = self.times.head;
        let clock = self.head.get_or_insert_with(|| Box::pin(tokio::time::sleep(limit)));
        match clock.as_mut().poll(cx) {
            Poll::Ready(()) => Poll::Ready(Err(io::ErrorKind::TimedOut.into())),
            Poll::Pending => poll,
        }
    }
}

impl AsyncWrite for Guarded {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        let poll = Pin::new(&mut self.stream).poll_write(cx, buf);
        self.guard(cx, poll)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let poll = Pin::new(&mut self.stream).poll_flush(cx);
        if poll.is_pending() { self.guard(cx, poll) } else { poll }
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
