// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The page server: a process that sends the last pages of a migrated guest, so that the VMM can exit.
//!
//! | file | owns |
//! | --- | --- |
//! | `mod` | the process from its beginning to its end |
//! | `memory` | the guest's memory, mapped once more |
//! | `api` | the requests that it answers |
//!
//! It is this program in another role, started by a VMM whose guest is to leave in postcopy. It has
//! the guest's memory, a socket for requests, what its VMM lends it for log and events, and nothing
//! else: no disk, no tap, no KVM. It must never write to the memory. How a VMM starts it, and ends it if it is not
//! needed, is in `migration::page_server`.

mod api;
mod memory;

use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::Instant;

use thiserror::Error;
use vm_migration::page_server::{Identity, PageServerEnd, TakeoverOutcome};
use vm_migration::source::serve_for_another;
use vm_migration::{Cause, Event, MigrationError, Observer, Progress, Side, Steering};
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use crate::api::{ApiListener, ApiQueue, ApiServer, ApiSocket, SocketError};
use crate::control::{announce, report_end};
use crate::events;
use crate::signals::{Signal, Signals};

use api::{Next, PageServerApi};
use memory::ServedRam;

/// Options of a page server process.
#[derive(Debug)]
pub struct PageServerOptions {
    /// Path of its API socket.
    pub socket: PathBuf,
}

/// Why a page server ended with an error.
#[derive(Debug, Error)]
pub enum PageServerError {
    /// A descriptor or thread cannot be created.
    #[error("the page server cannot be set up")]
    SetUp(#[source] io::Error),
    /// The VMM's description of the memory is invalid.
    #[error("the page server did not receive the guest's memory from its VMM")]
    Memory(#[source] Cause),
    /// The API socket cannot be set up.
    #[error("the page server cannot take requests")]
    Api(#[source] SocketError),
    /// The takeover request is invalid.
    #[error("the page server received an invalid takeover request")]
    TakeoverRequest(#[source] Cause),
    /// Serving failed or was cancelled.
    #[error("the page server stopped serving pages")]
    Serve(#[source] Box<MigrationError>),
}

/// Sends migration events to the log and the event monitor.
struct EventObserver;

impl Observer for EventObserver {
    fn event(&self, side: Side, event: Event) {
        announce(side, event);
    }
}

/// How the serving thread has ended.
enum End {
    /// No takeover was requested, or no page was left to serve: the VMM handles the end.
    Unneeded,
    /// The destination has all pages.
    Served,
}

/// State shared by both threads.
struct Shared {
    progress: Arc<Progress>,
    steering: Steering,
}

/// Turns this process into a page server: closes all inherited descriptors except the standard ones, and
/// sets the process name. Called first in `main`.
pub fn begin() {
    // SAFETY: takes no pointer. Nothing in this process has opened a descriptor yet, so none of
    // those that are closed is in use; they are left from the process that started the VMM.
    unsafe { libc::syscall(libc::SYS_close_range, 3_u32, u32::MAX, 0_u32) };
    // SAFETY: reads a constant, terminated text and changes the name of the calling thread.
    unsafe { libc::prctl(libc::PR_SET_NAME, c"page-server".as_ptr()) };
}

/// Runs a page server. Standard input is the connection to the VMM that started it.
///
/// # Errors
/// [`PageServerError`]; it is reported to the VMM if that still runs.
pub fn run(options: PageServerOptions) -> Result<(), PageServerError> {
    let signals = Signals::new().map_err(PageServerError::SetUp)?;
    let link = io::stdin().as_fd().try_clone_to_owned().map_err(PageServerError::SetUp)?;
    let mut page_server =
        PageServerEnd::new(UnixStream::from(link)).map_err(PageServerError::Memory)?;
    let progress = Arc::new(Progress::observed(Side::Source, Box::new(EventObserver)));
    let socket = options.socket.display().to_string();
    progress.has_page_server(Identity { socket, pid: std::process::id() });
    let shared = Arc::new(Shared { progress, steering: Steering::new() });
    let (_, (ram, listener)) = page_server
        .take_memory(|description, files| {
            let ram = ServedRam::map(description, files).map_err(|e| Cause::Vm(e.into()))?;
            let socket = ApiSocket::Path(options.socket);
            let listener = ApiListener::bind(socket).map_err(|e| Cause::Vm(e.into()))?;
            Ok((ram, listener))
        })
        .map_err(PageServerError::Memory)?;
    log::info!("the page server is ready with {} of guest memory", Mib(ram.len_bytes()));
    let (handle, queue) = crate::api::channel().map_err(PageServerError::SetUp)?;
    queue.hub().follow(&shared.progress);
    let server = ApiServer::start(listener, handle).map_err(PageServerError::Api)?;
    let ended = start(page_server, ram, &shared).map_err(PageServerError::SetUp)?;
    let (progress, steering) = (Arc::clone(&shared.progress), shared.steering.clone());
    let mut api = PageServerApi::new(progress, steering, queue.watchers().clone());
    let result = attend(&mut api, &queue, signals, &ended);
    drop(queue);
    server.stop();
    events::flush();
    result
}

struct Mib(u64);

impl std::fmt::Display for Mib {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} MiB", self.0 >> 20)
    }
}

/// Signals that serving has ended.
struct Ended {
    event: EventFd,
    end: Receiver<Result<End, PageServerError>>,
}

/// Starts the serving thread.
fn start(page_server: PageServerEnd, ram: ServedRam, shared: &Arc<Shared>) -> io::Result<Ended> {
    let event = EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?;
    let (wake, (sender, end)) = (event.try_clone()?, channel());
    let shared = Arc::clone(shared);
    stoppable_thread::spawn("serve", move || {
        let result = serve(page_server, ram, &shared);
        if sender.send(result).is_ok() {
            // A saturated counter wakes the loop as well.
            let _ = wake.write(1);
        }
    })?;
    Ok(Ended { event, end })
}

fn serve(
    mut page_server: PageServerEnd,
    ram: ServedRam,
    shared: &Shared,
) -> Result<End, PageServerError> {
    let layout = vm_migration::ram::GuestMemoryMap::layout(&ram).clone();
    let takeover =
        page_server.wait_for_takeover(&layout).map_err(PageServerError::TakeoverRequest)?;
    let Some(takeover) = takeover else { return Ok(End::Unneeded) };
    let Shared { progress, steering } = shared;
    let mut end = End::Unneeded;
    let taken = |taken: Result<TakeoverOutcome, &Cause>| {
        if matches!(taken, Ok(TakeoverOutcome::Serving)) {
            events::emit("vm", "page-server-serving", &[]);
            log::info!("the page server has taken over");
            end = End::Served;
        }
        page_server.tell(taken);
    };
    serve_for_another(Arc::new(ram), &takeover, steering, progress, taken)
        .map_err(PageServerError::Serve)?;
    Ok(end)
}

const API: u64 = 0;
const SIGNALS: u64 = 1;
const ENDED: u64 = 2;

/// Answers requests until serving has ended and clients have read that.
fn attend(
    api: &mut PageServerApi,
    queue: &ApiQueue,
    mut signals: Signals,
    ended: &Ended,
) -> Result<(), PageServerError> {
    let epoll = Epoll::new().map_err(PageServerError::SetUp)?;
    let sources = [
        (queue.event().as_raw_fd(), API),
        (signals.as_raw_fd(), SIGNALS),
        (ended.event.as_raw_fd(), ENDED),
    ];
    for (fd, token) in sources {
        epoll
            .ctl(ControlOperation::Add, fd, EpollEvent::new(EventSet::IN, token))
            .map_err(PageServerError::SetUp)?;
    }
    let mut ready = [EpollEvent::default(); 3];
    loop {
        match epoll.wait(api.timeout_ms(), &mut ready) {
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(PageServerError::SetUp(error)),
        }
        if signals.next() == Some(Signal::End) {
            log::warn!(
                "told to end: that waits until the destination has the last page; shutdown-vmm \
                 --force discards the pages"
            );
        }
        // WouldBlock: it was clear already.
        let _ = ended.event.read();
        match ended.end.try_recv() {
            Ok(Ok(End::Unneeded)) => {
                log::info!("the page server is not needed");
                return Ok(());
            }
            Ok(Ok(End::Served)) => {
                report_end("migration-finished", Some(&api.snapshot()));
                api.served(Instant::now());
            }
            Ok(Err(error)) => return api.abandoned(error),
            Err(_) => {}
        }
        queue.clear();
        while let Some(call) = queue.take() {
            api.call(call);
        }
        if api.next(Instant::now()) == Next::End {
            return Ok(());
        }
    }
}
