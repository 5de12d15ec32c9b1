// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The network between the two VMMs: a relay that delays each direction, and can be held, cut, and
//! down for a time at any byte.
//!
//! Owns the connections through it. Bytes keep their order and are never changed. (To open a
//! connection takes no time; everything that is sent over it does.)

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::dice::Dice;

/// Bytes under way in one direction of one connection.
const UNDER_WAY_MAX: usize = 4 << 20;
/// Read at a time.
const CHUNK_BYTES: usize = 128 << 10;

/// Either kind of connection.
enum Wire {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl Wire {
    fn connect(to: &str) -> io::Result<Self> {
        if let Some(path) = to.strip_prefix("unix:") {
            return Ok(Self::Unix(UnixStream::connect(path)?));
        }
        let stream = TcpStream::connect(to.trim_start_matches("tcp:"))?;
        stream.set_nodelay(true)?;
        Ok(Self::Tcp(stream))
    }

    fn try_clone(&self) -> io::Result<Self> {
        Ok(match self {
            Self::Tcp(stream) => Self::Tcp(stream.try_clone()?),
            Self::Unix(stream) => Self::Unix(stream.try_clone()?),
        })
    }

    fn shut(&self, how: Shutdown) {
        let _ = match self {
            Self::Tcp(stream) => stream.shutdown(how),
            Self::Unix(stream) => stream.shutdown(how),
        };
    }

    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Tcp(stream) => stream.read(buffer),
            Self::Unix(stream) => stream.read(buffer),
        }
    }

    fn write_all(&mut self, bytes: &[u8]) -> io::Result<()> {
        match self {
            Self::Tcp(stream) => stream.write_all(bytes),
            Self::Unix(stream) => stream.write_all(bytes),
        }
    }
}

enum Listener {
    Tcp(TcpListener),
    Unix(UnixListener),
}

impl Listener {
    fn accept(&self) -> io::Result<Wire> {
        match self {
            Self::Tcp(listener) => {
                let (stream, _) = listener.accept()?;
                stream.set_nodelay(true)?;
                Ok(Wire::Tcp(stream))
            }
            Self::Unix(listener) => Ok(Wire::Unix(listener.accept()?.0)),
        }
    }
}

/// What is to happen at a byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// Nothing gets on until [`Link::release`].
    Hold,
    /// All connections end, and no new one can be made until [`Link::mend`].
    Cut,
    /// The connection that carries this byte ends.
    CutOne,
}

struct State {
    /// Bytes that the source has sent.
    sent: u64,
    /// What happens at which of them.
    stops: Vec<(u64, Stop)>,
    /// Stops that have been reached.
    reached: Vec<Stop>,
    is_held: bool,
    is_down: bool,
    is_over: bool,
    wires: Vec<Wire>,
}

struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    delay: (Duration, Duration),
    dice: Mutex<Dice>,
}

impl Shared {
    /// Counts bytes of the source, as many as may get on; false when this connection is cut there.
    fn count(&self, bytes: u64) -> bool {
        let mut state = self.state.lock();
        state.sent += bytes;
        let sent = state.sent;
        let (now, later) = state.stops.iter().partition(|(at, _)| *at <= sent);
        state.stops = later;
        let now: Vec<(u64, Stop)> = now;
        let mut goes_on = true;
        for (_, stop) in now {
            state.reached.push(stop);
            match stop {
                Stop::Hold => state.is_held = true,
                Stop::Cut => Self::cut(&mut state),
                Stop::CutOne => goes_on = false,
            }
        }
        self.changed.notify_all();
        goes_on
    }

    /// Bytes until something happens.
    fn until_stop(&self) -> u64 {
        let state = self.state.lock();
        let next = state.stops.iter().map(|(at, _)| *at).min();
        next.map_or(u64::MAX, |at| at.saturating_sub(state.sent).max(1))
    }

    fn cut(state: &mut State) {
        state.is_down = true;
        for wire in state.wires.drain(..) {
            wire.shut(Shutdown::Both);
        }
    }

    /// Waits while nothing gets on.
    fn pass(&self) {
        let mut state = self.state.lock();
        while state.is_held && !state.is_over {
            self.changed.wait(&mut state);
        }
    }

    fn delay(&self) -> Duration {
        let most = u64::try_from(self.delay.1.as_micros()).unwrap_or(0);
        self.delay.0 + Duration::from_micros(self.dice.lock().between(0, most))
    }
}

/// Bytes of one direction that are under way, each with the time at which it arrives.
#[derive(Default)]
struct Pipe {
    queue: Mutex<Queue>,
    changed: Condvar,
}

#[derive(Default)]
struct Queue {
    chunks: VecDeque<(Instant, Vec<u8>)>,
    bytes: usize,
    /// Nothing more comes.
    is_closed: bool,
    /// The other end takes no more.
    is_dead: bool,
}

impl Pipe {
    fn push(&self, at: Instant, bytes: Vec<u8>) -> bool {
        let mut queue = self.queue.lock();
        while queue.bytes >= UNDER_WAY_MAX && !queue.is_dead {
            self.changed.wait(&mut queue);
        }
        queue.bytes += bytes.len();
        queue.chunks.push_back((at, bytes));
        self.changed.notify_all();
        !queue.is_dead
    }

    fn pop(&self) -> Option<(Instant, Vec<u8>)> {
        let mut queue = self.queue.lock();
        loop {
            if let Some((at, bytes)) = queue.chunks.pop_front() {
                queue.bytes -= bytes.len();
                self.changed.notify_all();
                return Some((at, bytes));
            }
            if queue.is_closed {
                return None;
            }
            self.changed.wait(&mut queue);
        }
    }

    fn set(&self, change: impl FnOnce(&mut Queue)) {
        change(&mut self.queue.lock());
        self.changed.notify_all();
    }
}

/// Carries one direction of one connection, on two threads.
fn carry(shared: &Arc<Shared>, mut from: Wire, mut to: Wire, is_source: bool) {
    let pipe = Arc::new(Pipe::default());
    let (end, over) = (Arc::clone(&pipe), Arc::clone(shared));
    let spawn = |run: Box<dyn FnOnce() + Send>| {
        let thread = std::thread::Builder::new().name("link".to_owned()).stack_size(64 << 10);
        thread.spawn(run).expect("a thread");
    };
    spawn(Box::new(move || {
        while let Some((at, bytes)) = end.pop() {
            // The link itself: what was sent arrives that much later.
            std::thread::sleep(at.saturating_duration_since(Instant::now()));
            over.pass();
            if to.write_all(&bytes).is_err() {
                break;
            }
        }
        end.set(|queue| queue.is_dead = true);
        to.shut(Shutdown::Write);
    }));
    let shared = Arc::clone(shared);
    spawn(Box::new(move || {
        let mut buffer = vec![0; CHUNK_BYTES];
        let mut last = Instant::now();
        loop {
            let most = if is_source { shared.until_stop() } else { u64::MAX };
            let most = usize::try_from(most).unwrap_or(CHUNK_BYTES).min(CHUNK_BYTES);
            let Ok(count @ 1..) = from.read(&mut buffer[..most]) else { break };
            // What is sent later never arrives earlier.
            last = last.max(Instant::now() + shared.delay());
            let goes_on = !is_source || shared.count(count as u64);
            // What the other end takes no more of is refused here, too.
            if !pipe.push(last, buffer[..count].to_vec()) || !goes_on {
                from.shut(Shutdown::Both);
                break;
            }
        }
        pipe.set(|queue| queue.is_closed = true);
    }));
}

/// A relay that runs until it is dropped.
pub struct Link {
    /// Where the source has to connect.
    pub url: String,
    shared: Arc<Shared>,
}

impl Link {
    /// Passes on to `to`. Each direction takes `delay_ms`, and at random up to so much more. For a
    /// Unix socket, `path` is its own.
    pub fn start(to: &str, path: PathBuf, delay_ms: (u64, u64), dice: Dice) -> Self {
        let (listener, url) = if to.starts_with("unix:") {
            let url = format!("unix:{}", path.display());
            (Listener::Unix(UnixListener::bind(path).expect("a socket")), url)
        } else {
            let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
            let url = format!("tcp:{}", listener.local_addr().expect("an address"));
            (Listener::Tcp(listener), url)
        };
        let shared = Arc::new(Shared {
            state: Mutex::new(State {
                sent: 0,
                stops: Vec::new(),
                reached: Vec::new(),
                is_held: false,
                is_down: false,
                is_over: false,
                wires: Vec::new(),
            }),
            changed: Condvar::new(),
            delay: (Duration::from_millis(delay_ms.0), Duration::from_millis(delay_ms.1)),
            dice: Mutex::new(dice),
        });
        let (all, to) = (Arc::clone(&shared), to.to_owned());
        std::thread::spawn(move || {
            while let Ok(source) = listener.accept() {
                if all.state.lock().is_over {
                    return;
                }
                let Ok(destination) = Wire::connect(&to) else { continue };
                let Ok(ends) = [&source, &destination]
                    .map(Wire::try_clone)
                    .into_iter()
                    .chain([&source, &destination].map(Wire::try_clone))
                    .collect::<io::Result<Vec<_>>>()
                else {
                    continue;
                };
                let mut state = all.state.lock();
                if state.is_down {
                    continue;
                }
                let mut ends = ends.into_iter();
                state.wires.extend(ends.by_ref().take(2));
                drop(state);
                let (Some(back), Some(out)) = (ends.next(), ends.next()) else { continue };
                carry(&all, source, out, true);
                carry(&all, destination, back, false);
            }
        });
        Self { url, shared }
    }

    /// Something happens once the source has sent so many bytes.
    pub fn stop_at(&self, bytes: u64, stop: Stop) {
        self.shared.state.lock().stops.push((bytes, stop));
    }

    /// Whether such a stop has been reached, which is answered once for each.
    pub fn take_reached(&self, stop: Stop) -> bool {
        let reached = &mut self.shared.state.lock().reached;
        let at = reached.iter().position(|other| *other == stop);
        at.map(|at| reached.swap_remove(at)).is_some()
    }

    /// What was held gets on.
    pub fn release(&self) {
        self.shared.state.lock().is_held = false;
        self.shared.changed.notify_all();
    }

    /// New connections can be made again.
    pub fn mend(&self) {
        self.shared.state.lock().is_down = false;
    }

    /// Everything ends.
    pub fn cut(&self) {
        Shared::cut(&mut self.shared.state.lock());
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        let mut state = self.shared.state.lock();
        state.is_over = true;
        Shared::cut(&mut state);
        drop(state);
        self.shared.changed.notify_all();
        // The thread that accepts ends with this connection.
        let _ = Wire::connect(&self.url);
    }
}
