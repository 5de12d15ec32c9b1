// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Lower bound of a fault over a socket with userfaultfd: one thread touches missing pages, a
//! second one fetches each over its own socket and copies it in, and nothing else.
//!
//! Owns both threads and both ends. Must never use any code of the migration.

use std::io::{self, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use guest_reader::rtt::{REPLY_BYTES, REQUEST_BYTES, RoundTrips};

use super::uffd::{Missing, PAGE_BYTES};

/// Faults before those that are counted.
const WARM_UP: usize = 200;
/// Distance between two touched pages: coprime to any number of pages, and not adjacent.
const STEP: usize = 7919;

/// Measures `count` faults.
pub fn faults(count: usize) -> io::Result<RoundTrips> {
    let all = count + WARM_UP;
    let memory = Missing::new(all, 0)?;
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let mut stream = TcpStream::connect(listener.local_addr()?)?;
    let (peer, _) = listener.accept()?;
    stream.set_nodelay(true)?;
    peer.set_nodelay(true)?;
    let server = std::thread::spawn(move || serve(peer));
    let mut times = Vec::with_capacity(count);
    std::thread::scope(|scope| {
        let handler = scope.spawn(|| {
            let mut page = [0; PAGE_BYTES];
            for _ in 0..all {
                let address = memory.next_fault()?;
                stream.write_all(&[1; REQUEST_BYTES])?;
                stream.read_exact(&mut page)?;
                memory.fill(address, &page)?;
            }
            Ok::<(), io::Error>(())
        });
        for round in 0..all {
            let page = round * STEP % all;
            let start = Instant::now();
            memory.touch(page);
            if round >= WARM_UP {
                times.push(start.elapsed());
            }
        }
        handler.join().map_err(|_| io::Error::other("the handling thread panicked"))?
    })?;
    drop(stream);
    // It ends with the connection, by an end-of-stream error.
    let _ = server.join();
    Ok(distribution(times))
}

fn serve(mut peer: TcpStream) -> io::Result<()> {
    let mut request = [0; REQUEST_BYTES];
    let page = vec![7; REPLY_BYTES];
    loop {
        peer.read_exact(&mut request)?;
        peer.write_all(&page)?;
    }
}

fn distribution(mut times: Vec<Duration>) -> RoundTrips {
    times.sort_unstable();
    let at = |share: usize| {
        let index = (times.len() * share / 100).min(times.len().saturating_sub(1));
        let time = times.get(index).copied().unwrap_or_default();
        u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
    };
    RoundTrips { count: times.len(), p50_ns: at(50), p99_ns: at(99), max_ns: at(100) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_page_is_touched_once() {
        for all in [WARM_UP + 50, WARM_UP + 2000, WARM_UP + 5000] {
            let pages: std::collections::BTreeSet<usize> =
                (0..all).map(|round| round * STEP % all).collect();
            assert_eq!(pages.len(), all);
        }
    }

    #[test]
    fn faults_are_counted_and_ordered() {
        let Some(faults) = test_skip::permitted(faults(50)) else { return };
        assert_eq!(faults.count, 50);
        assert!(faults.p50_ns > 0 && faults.p50_ns <= faults.p99_ns);
        assert!(faults.p99_ns <= faults.max_ns);
    }
}
