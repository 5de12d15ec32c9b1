// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The raw round trip of a loopback TCP socket: what a page fetched from a peer costs at the least.
//!
//! Owns both ends of its own connection. Must never touch a guest.

use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use serde::Serialize;

/// A request, as a page fault needs it, bytes.
pub const REQUEST_BYTES: usize = 16;
/// A page, bytes.
pub const REPLY_BYTES: usize = 4096;
/// Round trips before those that count.
const WARM_UP: usize = 200;

/// A distribution of round trips, nanoseconds.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct RoundTrips {
    /// How many.
    pub count: usize,
    /// Median.
    pub p50_ns: u64,
    /// 99th percentile.
    pub p99_ns: u64,
    /// Longest.
    pub max_ns: u64,
}

/// Sends `REQUEST_BYTES` and waits for `REPLY_BYTES`, `count` times, over TCP on loopback with
/// `TCP_NODELAY` on both ends.
pub fn measure(count: usize) -> io::Result<RoundTrips> {
    let count = count.max(1);
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let mut stream = TcpStream::connect(listener.local_addr()?)?;
    let (peer, _) = listener.accept()?;
    stream.set_nodelay(true)?;
    peer.set_nodelay(true)?;
    let server = std::thread::spawn(move || serve(peer));
    let mut times = Vec::with_capacity(count);
    let mut reply = vec![0; REPLY_BYTES];
    for round in 0..count + WARM_UP {
        let start = Instant::now();
        stream.write_all(&[1; REQUEST_BYTES])?;
        stream.read_exact(&mut reply)?;
        if round >= WARM_UP {
            times.push(start.elapsed());
        }
    }
    drop(stream);
    // It ends with the connection; what it says then is the end of the stream.
    let _ = server.join();
    times.sort_unstable();
    let at = |share: usize| {
        let index = (times.len() * share / 100).min(times.len() - 1);
        nanoseconds(times.get(index).copied().unwrap_or_default())
    };
    Ok(RoundTrips { count: times.len(), p50_ns: at(50), p99_ns: at(99), max_ns: at(100) })
}

fn serve(mut peer: TcpStream) -> io::Result<()> {
    let mut request = [0; REQUEST_BYTES];
    let page = vec![7; REPLY_BYTES];
    loop {
        peer.read_exact(&mut request)?;
        peer.write_all(&page)?;
    }
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test that cannot unwrap has failed")]

    use super::*;

    #[test]
    fn round_trips_are_counted_and_ordered() {
        let trips = measure(50).unwrap();
        assert_eq!(trips.count, 50);
        assert!(trips.p50_ns > 0 && trips.p50_ns <= trips.p99_ns && trips.p99_ns <= trips.max_ns);
    }
}
