// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A page server on a thread of its own: it maps the memory again, as another process would.

use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread::JoinHandle;

use parking_lot::Mutex;

use super::memory::FakeMemory;
use crate::cancel::Cancel;
use crate::channel::Channel;
use crate::error::{Cause, Side};
use crate::options::Limits;
use crate::page_server::{
    Identity, PageServerEnd, PageServerHandle, SourceEnd, TakeoverOutcome, TakeoverRequest,
};
use crate::progress::{Progress, ProgressDocument};
use crate::protocol::message::{Message, Recover};
use crate::source::serve_for_another;
use crate::steering::Steering;
use crate::transport::Connection;
use crate::vm::VmError;

/// Behaviour of a fake page server.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Behaviour {
    /// It serves the pages.
    #[default]
    Serves,
    /// It refuses the memory.
    RefusesMemory,
    /// It exits when it is told to take over.
    Vanishes,
    /// It connects to an address without a listener.
    NoDestination,
    /// It exits when the destination has dropped the source's connections for it.
    EndsHalfWay,
    /// It connects only when a recovery is requested.
    ComesLate,
}

/// A fake page server and its state.
#[derive(Debug)]
pub struct FakePageServer {
    behaviour: Behaviour,
    limits: Limits,
    /// Its progress.
    pub progress: Arc<Progress>,
    /// Its requests.
    pub steering: Steering,
    /// Locked for one access.
    thread: Mutex<Option<JoinHandle<Served>>>,
}

/// Result of a page server; `None` when it was never told to take over.
pub type Served = Result<Option<ProgressDocument>, String>;

impl FakePageServer {
    /// A page server that has not been started.
    pub fn new(behaviour: Behaviour, limits: Limits) -> Arc<Self> {
        let progress = Arc::new(Progress::new(Side::Source));
        let (steering, thread) = (Steering::new(), Mutex::new(None));
        Arc::new(Self { behaviour, limits, progress, steering, thread })
    }

    /// Starts it with this memory.
    pub(super) fn start(
        self: &Arc<Self>,
        memory: &FakeMemory,
    ) -> Result<Box<dyn PageServerHandle>, VmError> {
        let (ours, theirs) = UnixStream::pair()?;
        let page_server = Arc::clone(self);
        let thread = std::thread::spawn(move || page_server.run(theirs));
        *self.thread.lock() = Some(thread);
        let mut source_end = SourceEnd::new(ours, self.limits)?;
        source_end.give_memory(memory)?;
        Ok(Box::new(FakePageServerHandle(source_end)))
    }

    fn run(&self, socket: UnixStream) -> Served {
        let said = |cause: Cause| error_text::chain(&cause);
        let mut page_server = PageServerEnd::new(socket).map_err(said)?;
        let made = page_server.take_memory(|description, files| match self.behaviour {
            Behaviour::RefusesMemory => Err(Cause::Vm("there is no room".into())),
            _ => FakeMemory::over(&description.layout()?, files).map_err(Cause::Vm),
        });
        let (description, memory) = made.map_err(said)?;
        let layout = description.layout().map_err(|error| error_text::chain(&error))?;
        let Some(takeover) = page_server.wait_for_takeover(&layout).map_err(said)? else {
            return Ok(None);
        };
        if self.behaviour == Behaviour::Vanishes {
            return Ok(None);
        }
        if self.behaviour == Behaviour::EndsHalfWay {
            return half_way(&takeover, &self.limits).map(|()| None).map_err(said);
        }
        while self.behaviour == Behaviour::ComesLate && self.steering.take_recover().is_none() {
            std::thread::yield_now();
        }
        let takeover = match self.behaviour {
            Behaviour::NoDestination => elsewhere(&takeover)?,
            _ => takeover,
        };
        let taken = |taken: Result<TakeoverOutcome, &Cause>| page_server.tell(taken);
        let served = serve_for_another(memory, &takeover, &self.steering, &self.progress, taken);
        served.map(Some).map_err(|error| error_text::chain(&*error))
    }

    /// Waits for its end.
    ///
    /// # Panics
    /// When it was never started.
    pub fn join(&self) -> Served {
        let thread = self.thread.lock().take();
        thread.expect("it was started").join().expect("it does not panic")
    }
}

/// The same request with an address at which nothing listens.
fn elsewhere(takeover: &TakeoverRequest) -> Result<TakeoverRequest, String> {
    let text = |error: serde_json::Error| error.to_string();
    let mut document = serde_json::to_value(takeover).map_err(text)?;
    document["to"] = "unix:/nonexistent/socket".into();
    serde_json::from_value(document).map_err(text)
}

/// Asks to continue, and ends after the answer.
fn half_way(takeover: &TakeoverRequest, limits: &Limits) -> Result<(), Cause> {
    let options = takeover.options()?;
    let never = Cancel::new().map_err(Cause::Resource)?;
    let (to, tls) = (&options.to, options.tls.as_ref());
    let connection = Connection::connect_secured(to, tls, &never, limits.connect, limits.answer)?;
    let TakeoverRequest { id, attempt, bulk, urgent, .. } = *takeover;
    let recover = Message::Recover(Recover { id, attempt, bulk, urgent, alive: false });
    Channel::new(connection).ask(&recover, limits.answer).map(drop)
}

#[derive(Debug)]
struct FakePageServerHandle(SourceEnd);

impl PageServerHandle for FakePageServerHandle {
    fn identity(&self) -> Identity {
        Identity { socket: "/page-server".to_owned(), pid: std::process::id() }
    }

    fn take_over(
        mut self: Box<Self>,
        takeover: &TakeoverRequest,
    ) -> Result<TakeoverOutcome, VmError> {
        Ok(self.0.takeover(takeover)?)
    }
}
