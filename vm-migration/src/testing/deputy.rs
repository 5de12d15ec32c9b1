// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A page server on a thread of its own: it maps the memory again, as another process would.

use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use super::memory::FakeMemory;
use crate::cancel::Cancel;
use crate::channel::Channel;
use crate::error::{Cause, Side};
use crate::options::Limits;
use crate::page_server::{Charge, Deputy, Identity, Principal, Successor, Taken};
use crate::progress::{Progress, Snapshot};
use crate::protocol::message::{Message, Recover};
use crate::source::serve_for_another;
use crate::steering::Steering;
use crate::transport::Connection;
use crate::vm::VmError;

/// What a fake page server does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Conduct {
    /// What it should.
    #[default]
    Serves,
    /// It refuses the memory.
    RefusesMemory,
    /// It ends when it is told to take over.
    Vanishes,
    /// It connects where nobody listens.
    FindsNobody,
    /// It ends when the destination has let go of the source for it.
    EndsHalfWay,
    /// It connects when it is asked to recover, and not before.
    ComesLate,
}

/// A page server to be, and what becomes of it.
#[derive(Debug)]
pub struct FakeDeputy {
    conduct: Conduct,
    limits: Limits,
    /// How far it is.
    pub progress: Arc<Progress>,
    /// What may be asked of it.
    pub steering: Steering,
    /// Held for one look.
    thread: Mutex<Option<JoinHandle<Served>>>,
}

/// What a page server came to: nothing when it was never told to take over.
pub type Served = Result<Option<Snapshot>, String>;

impl FakeDeputy {
    /// One that is not there yet.
    pub fn new(conduct: Conduct, limits: Limits) -> Arc<Self> {
        let progress = Arc::new(Progress::new(Side::Source));
        let (steering, thread) = (Steering::new(), Mutex::new(None));
        Arc::new(Self { conduct, limits, progress, steering, thread })
    }

    /// Starts it with this memory.
    pub(super) fn start(
        self: &Arc<Self>,
        memory: &FakeMemory,
    ) -> Result<Box<dyn Successor>, VmError> {
        let (ours, theirs) = UnixStream::pair()?;
        let deputy = Arc::clone(self);
        let thread = std::thread::spawn(move || deputy.run(theirs));
        *self.thread.lock().unwrap_or_else(PoisonError::into_inner) = Some(thread);
        let mut principal = Principal::new(ours, self.limits)?;
        principal.give_memory(memory)?;
        Ok(Box::new(FakeSuccessor(principal)))
    }

    fn run(&self, socket: UnixStream) -> Served {
        let said = |cause: Cause| error_text::chain(&cause);
        let mut deputy = Deputy::new(socket).map_err(said)?;
        let made = deputy.take_memory(|description, files| match self.conduct {
            Conduct::RefusesMemory => Err(Cause::Vm("there is no room".into())),
            _ => FakeMemory::over(&description.layout()?, files).map_err(Cause::Vm),
        });
        let (description, memory) = made.map_err(said)?;
        let layout = description.layout().map_err(|error| error_text::chain(&error))?;
        let Some(charge) = deputy.wait_for_charge(&layout).map_err(said)? else { return Ok(None) };
        if self.conduct == Conduct::Vanishes {
            return Ok(None);
        }
        if self.conduct == Conduct::EndsHalfWay {
            return half_way(&charge, &self.limits).map(|()| None).map_err(said);
        }
        while self.conduct == Conduct::ComesLate && self.steering.take_recover().is_none() {
            std::thread::yield_now();
        }
        let charge = match self.conduct {
            Conduct::FindsNobody => elsewhere(&charge)?,
            _ => charge,
        };
        let taken = |taken: Result<Taken, &Cause>| deputy.tell(taken);
        let served = serve_for_another(memory, &charge, &self.steering, &self.progress, taken);
        served.map(Some).map_err(|error| error_text::chain(&*error))
    }

    /// Waits for its end.
    ///
    /// # Panics
    /// When it was never started.
    pub fn join(&self) -> Served {
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        thread.expect("it was started").join().expect("it does not panic")
    }
}

/// The same charge with an address where nobody listens.
fn elsewhere(charge: &Charge) -> Result<Charge, String> {
    let text = |error: serde_json::Error| error.to_string();
    let mut document = serde_json::to_value(charge).map_err(text)?;
    document["to"] = "unix:/nonexistent/socket".into();
    serde_json::from_value(document).map_err(text)
}

/// Asks to go on, and ends with the answer.
fn half_way(charge: &Charge, limits: &Limits) -> Result<(), Cause> {
    let to = charge.options()?.to;
    let never = Cancel::new().map_err(Cause::Resource)?;
    let connection = Connection::connect(&to, &never, limits.connect, limits.answer)?;
    let Charge { id, attempt, bulk, urgent, .. } = *charge;
    let recover = Message::Recover(Recover { id, attempt, bulk, urgent, alive: false });
    Channel::new(connection).ask(&recover, limits.answer).map(drop)
}

#[derive(Debug)]
struct FakeSuccessor(Principal);

impl Successor for FakeSuccessor {
    fn identity(&self) -> Identity {
        Identity { socket: "/page-server".to_owned(), pid: std::process::id() }
    }

    fn take_over(mut self: Box<Self>, charge: &Charge) -> Result<Taken, VmError> {
        Ok(self.0.charge(charge)?)
    }
}
