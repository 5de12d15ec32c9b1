// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Lower bound of a page that is brought from another process: a blocking round trip on a socket pair, and a copy.
//!
//! Owns the threads of both ends, one of each for a vCPU. Must never use any code of the migration.

use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::os::fd::{FromRawFd as _, OwnedFd};
use std::os::unix::fs::FileExt as _;
use std::os::unix::net::UnixStream;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use super::PAGE_BYTES;

/// Bytes of a request.
const REQUEST_BYTES: usize = 16;
/// Pages that a thread copies into in turn, where they are populated.
const PLACES: usize = 64;

/// Where the contents go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Into {
    /// Memory that is populated.
    Populated,
    /// Pages of a file in memory that are not: the kernel finds each, and copies.
    New,
}

/// What was measured.
#[derive(Clone, Copy, Debug)]
pub struct Floor {
    pub pages_per_s: f64,
    /// Of both ends, for a page.
    pub processor_us: f64,
    pub median_us: f64,
    pub p99_us: f64,
}

/// Brings about so many pages on `threads` threads.
pub fn measure(threads: usize, pages: usize, into: Into) -> io::Result<Floor> {
    let each = pages.div_ceil(threads);
    let memory = new_memory(threads * each)?;
    let pairs = (0..threads).map(|_| UnixStream::pair()).collect::<io::Result<Vec<_>>>()?;
    let begin = Barrier::new(threads + 1);
    std::thread::scope(|scope| {
        let mut clients = Vec::new();
        for (number, (client, server)) in pairs.into_iter().enumerate() {
            scope.spawn(move || serve(server));
            let (begin, memory) = (&begin, &memory);
            let first = number * each;
            clients.push(scope.spawn(move || {
                let mut place = Place::of(into, memory, first)?;
                begin.wait();
                fetch(client, each, &mut place)
            }));
        }
        begin.wait();
        let (start, before) = (Instant::now(), processor_time()?);
        let mut times = Vec::with_capacity(threads * each);
        for client in clients {
            let taken = client.join().map_err(|_| io::Error::other("a thread panicked"))?;
            times.extend(taken?);
        }
        let (wall, used) = (start.elapsed(), processor_time()?.saturating_sub(before));
        times.sort_unstable();
        let at = |share: usize| {
            let index = (times.len() * share / 100).min(times.len().saturating_sub(1));
            times.get(index).copied().unwrap_or_default().as_secs_f64() * 1e6
        };
        let count = u32::try_from(times.len()).map_or(1.0, f64::from);
        Ok(Floor {
            pages_per_s: count / wall.as_secs_f64(),
            processor_us: used.as_secs_f64() * 1e6 / count,
            median_us: at(50),
            p99_us: at(99),
        })
    })
}

/// Where a thread puts its pages.
enum Place<'a> {
    Populated { memory: Vec<u8>, next: usize },
    New { file: &'a File, offset: u64 },
}

impl<'a> Place<'a> {
    fn of(into: Into, file: &'a File, first: usize) -> io::Result<Self> {
        Ok(match into {
            Into::Populated => Self::Populated { memory: vec![1; PLACES * PAGE_BYTES], next: 0 },
            Into::New => {
                let offset = u64::try_from(first * PAGE_BYTES).map_err(io::Error::other)?;
                Self::New { file, offset }
            }
        })
    }

    fn put(&mut self, page: &[u8; PAGE_BYTES]) -> io::Result<()> {
        match self {
            Self::Populated { memory, next } => {
                if let Some(place) = memory.chunks_exact_mut(PAGE_BYTES).nth(*next) {
                    place.copy_from_slice(page);
                    std::hint::black_box(place);
                }
                *next = (*next + 1) % PLACES;
            }
            Self::New { file, offset } => {
                file.write_all_at(page, *offset)?;
                *offset += PAGE_BYTES as u64;
            }
        }
        Ok(())
    }
}

fn fetch(mut stream: UnixStream, count: usize, place: &mut Place<'_>) -> io::Result<Vec<Duration>> {
    let mut page = [0; PAGE_BYTES];
    let mut times = Vec::with_capacity(count);
    for _ in 0..count {
        let start = Instant::now();
        stream.write_all(&[1; REQUEST_BYTES])?;
        stream.read_exact(&mut page)?;
        place.put(&page)?;
        times.push(start.elapsed());
    }
    Ok(times)
}

/// Answers until the other end is closed.
fn serve(mut stream: UnixStream) {
    let (mut request, page) = ([0; REQUEST_BYTES], [7; PAGE_BYTES]);
    while stream.read_exact(&mut request).is_ok() && stream.write_all(&page).is_ok() {}
}

/// A file in memory, without pages.
fn new_memory(pages: usize) -> io::Result<File> {
    // SAFETY: the name is a C string, and no memory is taken.
    let fd = unsafe { libc::memfd_create(c"bench-floor".as_ptr(), libc::MFD_CLOEXEC) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a new descriptor, which nothing else owns.
    let file = File::from(unsafe { OwnedFd::from_raw_fd(fd) });
    file.set_len(u64::try_from(pages * PAGE_BYTES).map_err(io::Error::other)?)?;
    Ok(file)
}

/// Processor time of this process so far.
fn processor_time() -> io::Result<Duration> {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: fills the structure that it is given.
    if unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &raw mut time) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let seconds = u64::try_from(time.tv_sec).map_err(io::Error::other)?;
    let nanoseconds = u64::try_from(time.tv_nsec).map_err(io::Error::other)?;
    Ok(Duration::from_secs(seconds) + Duration::from_nanos(nanoseconds))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_thread_brings_its_pages_and_their_processor_time_is_counted() {
        for into in [Into::Populated, Into::New] {
            let floor = measure(3, 100, into).expect("sockets and memory");
            assert!(floor.pages_per_s > 0.0 && floor.processor_us > 0.0, "{into:?} {floor:?}");
            assert!(floor.median_us > 0.0 && floor.median_us <= floor.p99_us, "{floor:?}");
        }
    }

    #[test]
    fn pages_that_are_not_populated_get_their_contents() {
        let memory = new_memory(4).expect("a file");
        let mut place = Place::of(Into::New, &memory, 2).expect("a place");
        place.put(&[9; PAGE_BYTES]).expect("a page");
        let mut all = [1; 4 * PAGE_BYTES];
        memory.read_exact_at(&mut all, 0).expect("four pages");
        assert!(all[..2 * PAGE_BYTES].iter().all(|byte| *byte == 0));
        assert!(all[2 * PAGE_BYTES..3 * PAGE_BYTES].iter().all(|byte| *byte == 9));
        assert!(all[3 * PAGE_BYTES..].iter().all(|byte| *byte == 0));
    }
}
