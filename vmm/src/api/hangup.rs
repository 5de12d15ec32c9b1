// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Detection of a client that hangs up while its request is carried out.
//!
//! Owns a second descriptor of the connection, as the first has to stay ready for the answer. A client that
//! has shut down only its sending side (`nc -N`, socat) still waits for the answer: on a Unix socket this can be
//! distinguished, as only the end of both sides is a hang-up.

use std::future::pending;
use std::io;
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream as StdStream;

use tokio::io::Interest;
use tokio::net::UnixStream;

/// Detects that the peer of a connection has closed it.
#[derive(Debug)]
pub struct Hangup(Option<UnixStream>);

impl Hangup {
    /// Watches the peer of `stream`. If the descriptor cannot be duplicated, a hang-up is only noticed when
    /// the answer is written.
    pub fn of(stream: &UnixStream) -> Self {
        let again = stream.as_fd().try_clone_to_owned().map(StdStream::from);
        let again = again.and_then(UnixStream::from_std);
        if let Err(error) = &again {
            log::debug!("the end of a connection to the API cannot be detected: {error}");
        }
        Self(again.ok())
    }

    /// Waits until the peer has closed the connection.
    pub async fn wait(&self) {
        let Some(stream) = &self.0 else { return pending().await };
        loop {
            // The write side: a peer may shut down its sending side and still wait for the answer.
            match stream.ready(Interest::WRITABLE).await {
                Ok(ready) if ready.is_write_closed() => return,
                Ok(_) => {
                    // The socket is writable, which says nothing about the peer. Reporting WouldBlock
                    // clears the readiness, so that the next change is waited for.
                    let full = || Err::<(), _>(io::ErrorKind::WouldBlock.into());
                    let _ = stream.try_io(Interest::WRITABLE, full);
                }
                // The runtime is shutting down.
                Err(_) => return pending().await,
            }
        }
    }
}
