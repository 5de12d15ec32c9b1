// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Receiving a VM: the migration thread at the destination, and the result.
//!
//! Owns the listening end while it waits. In postcopy the thread stays until the last page is here,
//! or the source is lost.

use std::path::Path;
use std::sync::Arc;

use parking_lot::Mutex;
use vm_migration::destination::{Faulting, LateReconnects, Listener, ReceiveFailure};
use vm_migration::transport::{ServerTls, TransportError};
use vm_migration::{
    Address, Cancel, Cause, FailureReport, GuestLocation, Phase, Progress, ReceiveOptions, Side,
    Steering,
};

use super::describe;
use super::doubt::{self, DecisionRequest, InDoubtVm};
use super::inbox::{InboxSender, Message};
use super::observer::EventObserver;
use super::threads::spawn_with;
use crate::api::request::Responder;
use crate::api::{ApiError, ApiErrorKind};
use crate::config::{ArrivingFds, Grant};
use crate::events;
use crate::machine::{EventSink, Host, Machine};
use crate::migration::destination::{ArrivingBuilder, ArrivingMachine, DoubtObserver};
use crate::migration::faults::FaultPlan;
use crate::migration::memory::MigratingRam;

/// How a migration to here ended.
pub enum ReceiveOutcome {
    /// The guest is here.
    Runs {
        /// Its machine.
        machine: Box<Machine>,
        /// Whether pages still arrive.
        pages_missing: bool,
    },
    /// The guest is here, whole, and did not start; the operator decides.
    NotStarted {
        /// Its machine.
        machine: Box<ArrivingMachine>,
        /// Why it did not start.
        error: ApiError,
        /// Whether pages still arrive.
        pages_missing: bool,
    },
    /// There is no guest here.
    Failed {
        /// Why.
        error: ApiError,
        /// A client on this side asked for it.
        is_cancelled: bool,
        /// Where the guest is.
        guest: GuestLocation,
    },
}

/// The end of a migration to here.
pub struct ReceiveEnd {
    /// How it ended.
    pub outcome: ReceiveOutcome,
    /// The request for it, unless that was answered while the migration was in doubt.
    pub responder: Option<Responder>,
}

/// A migration that is awaited or under way.
pub struct Receiving {
    /// How far it is.
    pub progress: Arc<Progress>,
    /// Ends it.
    pub cancel: Cancel,
    /// What may be asked of it.
    pub steering: Steering,
    /// Clients that asked to end it and wait for the answer.
    pub cancellers: Vec<Responder>,
    /// Which side has the guest is not known.
    pub doubt: Option<InDoubtVm>,
    /// Requests that have decided it, or ended the wait, and are answered when that is done.
    pub decision_requests: Vec<DecisionRequest>,
}

/// What a receiving thread works with.
pub struct ReceiveContext {
    /// This host.
    pub host: Arc<Host>,
    /// Takes events of the guest.
    pub sink: EventSink,
    /// How accesses to missing pages are caught.
    pub faults: FaultPlan,
    /// Descriptors for its devices.
    pub fds: ArrivingFds,
    /// What the configuration may name on this host; anything if there are none.
    pub rules: Option<Vec<Grant>>,
    /// Migrations to this process that are over, and whose sources may not know it.
    pub late_reconnects: LateReconnects,
    /// The way back.
    pub inbox_sender: InboxSender,
}

/// Where a migration is awaited.
pub enum ListenTarget {
    /// There it is listened already.
    Bound(Listener),
    /// A resolver has to be asked where that is, which may take long; with these certificates.
    Unresolved(Address, Option<ServerTls>),
}

/// Binds the address, so that a wrong one is told at once, unless a resolver has to be asked.
///
/// # Errors
/// When it is taken, not ours, or not an address, or the certificates cannot be used.
pub fn bind(
    url: &str,
    tls_dir: Option<&Path>,
    late_reconnects: &LateReconnects,
    cancel: &Cancel,
) -> Result<ListenTarget, ApiError> {
    let address: Address =
        url.parse().map_err(|error| ApiError::from_error(ApiErrorKind::BadRequest, &error))?;
    let tls = tls_dir.map(ServerTls::load).transpose();
    let tls = tls.map_err(|error| ApiError::from_error(ApiErrorKind::BadRequest, &error))?;
    if address.has_name() {
        return Ok(ListenTarget::Unresolved(address, tls));
    }
    Listener::bind_over(&address, tls, late_reconnects, cancel)
        .map(ListenTarget::Bound)
        .map_err(|error| ApiError::from_error(ApiErrorKind::Failed, &error))
}

/// Says that a source can come, and whether it has to show who it is.
fn tell_ready(listener: &Listener) {
    let address = listener.address().to_string();
    let tls = if listener.is_authenticated() { "on" } else { "off" };
    log::info!("waiting for a migration at {address}");
    if !listener.is_authenticated() && matches!(listener.address(), Address::Tcp { .. }) {
        log::warn!(
            "{address} takes one source from any host that reaches it, unauthenticated and unencrypted: \
             give tls_dir to both sides, or use a trusted network"
        );
    }
    events::emit("vm", "migration-receive-ready", &[("address", &address), ("tls", tls)]);
}

impl ListenTarget {
    /// Listens there.
    fn listen(
        self,
        late_reconnects: &LateReconnects,
        progress: &Progress,
        cancel: &Cancel,
    ) -> Result<Listener, ReceiveOutcome> {
        let (address, tls) = match self {
            Self::Bound(listener) => {
                tell_ready(&listener);
                return Ok(listener);
            }
            Self::Unresolved(address, tls) => (address, tls),
        };
        log::info!("asking where {address} is");
        let bound = Listener::bind_over(&address, tls, late_reconnects, cancel).inspect(tell_ready);
        bound.map_err(|error| {
            let is_cancelled = matches!(error, TransportError::Cancelled);
            let report = FailureReport::before_the_begin(Side::Destination, "listening", &error);
            let guest = report.guest;
            progress.fail(Phase::Failed, FailureReport { cancelled: is_cancelled, ..report });
            let error = ApiError::from_error(ApiErrorKind::Failed, &error);
            ReceiveOutcome::Failed { error, is_cancelled, guest }
        })
    }
}

fn failed(
    failure: ReceiveFailure<ArrivingMachine>,
) -> (ReceiveOutcome, Option<Faulting<MigratingRam>>) {
    let ReceiveFailure { error, vm, faults } = failure;
    let (guest, is_cancelled) = (error.guest, matches!(error.cause, Cause::Cancelled));
    let error = ApiError::from_error(ApiErrorKind::Failed, &error);
    let outcome = match vm {
        Some(machine) if guest != GuestLocation::NotHere => {
            let pages_missing = faults.is_some();
            ReceiveOutcome::NotStarted { machine: Box::new(machine), error, pages_missing }
        }
        _ => ReceiveOutcome::Failed { error, is_cancelled, guest },
    };
    (outcome, faults)
}

fn take(slot: &Mutex<Option<Responder>>) -> Option<Responder> {
    slot.lock().take()
}

/// Tells the VMM thread of a machine in doubt. The request that awaits the machine is answered when
/// the doubt lasts.
fn tell_doubts(slot: Arc<Mutex<Option<Responder>>>, inbox_sender: InboxSender) -> DoubtObserver {
    Box::new(move |machine, state, lasts| {
        let info = Box::new(describe::of_machine(machine));
        inbox_sender.send(Message::InDoubt(InDoubtVm { state, info }));
        if lasts && let Some(responder) = take(&slot) {
            responder.answer(Err(doubt::in_doubt()));
        }
    })
}

/// Starts to wait for a machine, until the cancel.
///
/// # Errors
/// The thread cannot be started; the responder comes back.
pub fn start(
    target: ListenTarget,
    context: ReceiveContext,
    responder: Responder,
    cancel: Cancel,
) -> Result<Receiving, (Responder, std::io::Error)> {
    let observer = Box::new(EventObserver { inbox_sender: context.inbox_sender.clone() });
    let progress = Arc::new(Progress::observed(Side::Destination, observer));
    let options = ReceiveOptions::default();
    let steering = options.steering.clone();
    let (own_progress, own_cancel) = (Arc::clone(&progress), cancel.clone());
    let spawned = spawn_with("migration-recv", responder, move |responder| {
        let ReceiveContext { host, sink, faults, fds, rules, late_reconnects, inbox_sender } =
            context;
        let slot = Arc::new(Mutex::new(Some(responder)));
        let doubts = tell_doubts(Arc::clone(&slot), inbox_sender.clone());
        let builder = ArrivingBuilder::new(host, sink, faults, doubts);
        let builder = builder.within(rules).with_descriptors(fds);
        let received = target
            .listen(&late_reconnects, &own_progress, &own_cancel)
            .map(|listener| listener.receive(builder, &options, &own_progress, &own_cancel));
        let (outcome, faults) = match received {
            Ok(Ok(received)) => {
                let pages_missing = received.faults.is_some();
                let machine = Box::new(received.vm);
                (ReceiveOutcome::Runs { machine, pages_missing }, received.faults)
            }
            Ok(Err(failure)) => failed(*failure),
            Err(outcome) => (outcome, None),
        };
        let responder = take(&slot);
        inbox_sender.send(Message::ReceiveEnd(Box::new(ReceiveEnd { outcome, responder })));
        if let Some(faults) = faults {
            inbox_sender.send(Message::PagesComplete(faults.wait().map(drop)));
        }
    });
    spawned.map(|_detached| Receiving {
        progress,
        cancel,
        steering,
        cancellers: Vec::new(),
        doubt: None,
        decision_requests: Vec::new(),
    })
}
