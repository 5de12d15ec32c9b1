// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A bulk stream over loopback, at a given rate or without a limit, in parallel with a measurement.
//!
//! Owns both ends and their threads until it is dropped. Must never carry the measured traffic.

use std::io::{self, Read as _, Write as _};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Bytes passed to the kernel at a time, as a background thread does.
const CHUNK_BYTES: usize = 64 << 10;

/// A running stream.
pub struct Stream {
    stop: Arc<AtomicBool>,
    socket: TcpStream,
    threads: Vec<JoinHandle<()>>,
}

impl Stream {
    /// Starts it; `bytes_per_s` 0 means no limit.
    pub fn start(bytes_per_s: u64) -> io::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let socket = TcpStream::connect(listener.local_addr()?)?;
        let (mut from, _) = listener.accept()?;
        let mut to = socket.try_clone()?;
        let stop = Arc::new(AtomicBool::new(false));
        let seen = Arc::clone(&stop);
        let sender = std::thread::spawn(move || {
            let chunk = vec![0x5a; CHUNK_BYTES];
            let (start, mut sent) = (Instant::now(), 0_u64);
            while !seen.load(Ordering::Relaxed) && to.write_all(&chunk).is_ok() {
                sent += CHUNK_BYTES as u64;
                if let Some(due_ns) = (sent * 1_000_000_000).checked_div(bytes_per_s) {
                    let due = Duration::from_nanos(due_ns);
                    std::thread::sleep(due.saturating_sub(start.elapsed()));
                }
            }
        });
        let receiver = std::thread::spawn(move || {
            let mut chunk = vec![0; CHUNK_BYTES];
            while matches!(from.read(&mut chunk), Ok(1..)) {}
        });
        Ok(Self { stop, socket, threads: vec![sender, receiver] })
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        let _ = self.socket.shutdown(Shutdown::Both);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}
