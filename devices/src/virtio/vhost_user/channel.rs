// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The channel by which a vhost-user back end makes requests of the VMM (vhost-user, "Back-end communication").
//!
//! Owns the VMM's end, and the thread that answers: at once, whatever else is asked of the back end meanwhile, which may wait
//! for the answer first. One request is carried out, that the configuration has changed, and not here: it is noted for the
//! thread of the device. All others are refused. Nothing that comes here is kept, descriptors are not received,
//! and there is a limit on requests per second, beyond which the back end waits. It must never touch guest memory,
//! nor the connection of the front end.

use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use log::warn;
use parking_lot::{Condvar, Mutex};
use stoppable_thread::StoppableThread;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

/// Number of the request that is known: the configuration has changed.
const CONFIG_CHANGE: u32 = 2;
const HEADER_LEN_BYTES: usize = 12;
/// Flags of a message: its version, and bits of it.
const VERSION: u32 = 1;
const VERSION_MASK: u32 = 3;
const IS_REPLY: u32 = 1 << 2;
const NEED_REPLY: u32 = 1 << 3;
/// Longer than any request of the protocol.
const PAYLOAD_LEN_BYTES_MAX: usize = 4096;
/// Requests in a period; more wait for the next one. A device is changed by people and their tools, so this
/// is many, and few for the guest, whose driver may be interrupted as often.
const REQUESTS_MAX: u32 = 32;
/// See [`REQUESTS_MAX`].
const PERIOD: Duration = Duration::from_secs(1);

/// The end of the thread, which does not wait for the next period then.
#[derive(Default)]
struct End {
    is_ending: Mutex<bool>,
    changed: Condvar,
}

impl End {
    /// Waits until a time; false if the thread is to end.
    fn wait_until(&self, until: Instant) -> bool {
        let mut is_ending = self.is_ending.lock();
        while !*is_ending {
            if self.changed.wait_until(&mut is_ending, until).timed_out() {
                return !*is_ending;
            }
        }
        false
    }
}

/// The channel; its thread ends when this is dropped.
pub(super) struct Channel {
    changed: Arc<EventFd>,
    _thread: StoppableThread,
}

impl Channel {
    /// Starts to answer a back end that `confirms` requests, and so may want answers. Returns its end of the channel as well.
    pub(super) fn open(confirms: bool) -> io::Result<(Self, UnixStream)> {
        let (ours, theirs) = UnixStream::pair()?;
        let changed = Arc::new(EventFd::new(EFD_NONBLOCK)?);
        let (end, noted) = (Arc::<End>::default(), Arc::clone(&changed));
        let (connection, ending) = (ours.try_clone()?, Arc::clone(&end));
        let stop = move || {
            *ending.is_ending.lock() = true;
            ending.changed.notify_all();
            // Fails if the back end has closed it, and then nothing waits for it.
            let _ = connection.shutdown(Shutdown::Both);
        };
        let builder = stoppable_thread::Builder::new("vhost-requests");
        let thread = StoppableThread::build(builder, stop, move || {
            if let Err(error) = serve(&ours, confirms, &noted, &end) {
                warn!("a vhost-user back end makes requests that cannot be read: {error}");
            }
            // It is not to wait for an answer.
            let _ = ours.shutdown(Shutdown::Both);
        })?;
        Ok((Self { changed, _thread: thread }, theirs))
    }

    /// Readable when the configuration has changed, until [`take_change`](Self::take_change).
    pub(super) fn changed_fd(&self) -> RawFd {
        self.changed.as_raw_fd()
    }

    /// Whether the configuration has changed since the last call.
    pub(super) fn take_change(&self) -> bool {
        self.changed.read().is_ok()
    }
}

/// A request of the back end.
struct Request {
    number: u32,
    flags: u32,
    len_bytes: usize,
}

fn invalid(what: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

impl Request {
    /// Reads one, and passes over what comes with it; none if the channel is closed.
    fn read(mut from: impl Read) -> io::Result<Option<Self>> {
        let mut header = [0; HEADER_LEN_BYTES];
        match from.read_exact(&mut header) {
            Err(error) if is_end(&error) => return Ok(None),
            read => read?,
        }
        let (words, _) = header.as_chunks();
        let word = |at: usize| words.get(at).map_or(0, |word| u32::from_le_bytes(*word));
        let (number, flags) = (word(0), word(1));
        if flags & VERSION_MASK != VERSION || flags & IS_REPLY != 0 {
            return Err(invalid(format!("request {number} has the flags {flags:#x}")));
        }
        let len_bytes = usize::try_from(word(2)).unwrap_or(usize::MAX);
        if len_bytes > PAYLOAD_LEN_BYTES_MAX {
            return Err(invalid(format!("request {number} has {len_bytes} bytes")));
        }
        let mut payload = [0; PAYLOAD_LEN_BYTES_MAX];
        match from.read_exact(payload.get_mut(..len_bytes).unwrap_or_default()) {
            Err(error) if is_end(&error) => return Ok(None),
            read => read?,
        }
        Ok(Some(Self { number, flags, len_bytes }))
    }

    /// The answer, which says whether it was carried out.
    fn answer(&self, is_done: bool) -> Vec<u8> {
        let mut answer: Vec<u8> = [self.number, VERSION | IS_REPLY, 8]
            .iter()
            .flat_map(|word| word.to_le_bytes())
            .collect();
        answer.extend(u64::from(!is_done).to_le_bytes());
        answer
    }
}

/// Whether the back end has closed the channel.
fn is_end(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset)
}

fn serve(
    mut connection: &UnixStream,
    confirms: bool,
    changed: &EventFd,
    end: &End,
) -> io::Result<()> {
    let (mut began, mut count) = (Instant::now(), 0);
    while let Some(request) = Request::read(connection)? {
        let is_done = request.number == CONFIG_CHANGE && request.len_bytes == 0;
        if is_done {
            // Fails if very many are noted already.
            let _ = changed.write(1);
        }
        if confirms && request.flags & NEED_REPLY != 0 {
            match connection.write_all(&request.answer(is_done)) {
                Err(error) if error.kind() == io::ErrorKind::BrokenPipe => return Ok(()),
                written => written?,
            }
        }
        let now = Instant::now();
        if now.duration_since(began) >= PERIOD {
            (began, count) = (now, 0);
        }
        count += 1;
        if count >= REQUESTS_MAX {
            let Some(until) = began.checked_add(PERIOD) else { return Ok(()) };
            if !end.wait_until(until) {
                return Ok(());
            }
        }
    }
    Ok(())
}
