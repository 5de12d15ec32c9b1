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

use super::confining::Confiner;
use super::describe;
use super::doubt::{self, DecisionRequest, InDoubtVm};
use super::inbox::{InboxSender, Message};
use super::observer::EventObserver;
use super::threads::spawn_with;
use crate::api::request::Responder;
use crate::api::{ApiError, ApiErrorKind};
use crate::config::zone_update::MemoryUpdates;
use crate::config::{ArrivingFds, Grant, VmConfig};
use crate::events;
use crate::machine::{EventSink, Host, Machine};
use crate::migration::destination::{ArrivingBuilder, ArrivingMachine, DoubtObserver};
use crate::migration::faults::FaultPlan;
use crate::migration::memory::MigratingRam;
use crate::preflight::HostCheck;
use crate::sandbox::PathRule;

/// Outcome of an incoming migration.
pub enum ReceiveOutcome {
    /// The guest runs here.
    Runs {
        /// The machine.
        machine: Box<Machine>,
        /// Whether pages are still missing.
        pages_missing: bool,
    },
    /// All of the guest is here and it could not be started; the operator decides.
    NotStarted {
        /// The machine.
        machine: Box<ArrivingMachine>,
        /// Why it could not be started.
        error: ApiError,
        /// Whether pages are still missing.
        pages_missing: bool,
    },
    /// The guest is not here.
    Failed {
        /// The cause.
        error: ApiError,
        /// Whether a client of this side cancelled the migration.
        is_cancelled: bool,
        /// Location of the guest.
        guest: GuestLocation,
    },
}

/// The end of an incoming migration.
pub struct ReceiveEnd {
    /// The outcome.
    pub outcome: ReceiveOutcome,
    /// The responder of the request, unless it was answered while the VM was in doubt.
    pub responder: Option<Responder>,
}

/// An incoming migration, awaited or in progress.
pub struct Receiving {
    /// Its progress.
    pub progress: Arc<Progress>,
    /// Cancels it.
    pub cancel: Cancel,
    /// Steers it.
    pub steering: Steering,
    /// Requests to cancel it that wait for the result.
    pub cancellers: Vec<Responder>,
    /// Set while the VM is in doubt.
    pub doubt: Option<InDoubtVm>,
    /// Requests that have decided the doubt or cancelled the wait, and are answered at the end.
    pub decision_requests: Vec<DecisionRequest>,
}

/// What a receiving thread needs.
pub struct ReceiveContext {
    /// The host.
    pub host: Arc<Host>,
    /// Takes the events of the guest.
    pub sink: EventSink,
    /// The fault source for missing pages.
    pub faults: FaultPlan,
    /// Descriptors for the devices.
    pub fds: ArrivingFds,
    /// Where memory comes from on this host.
    pub memory: MemoryUpdates,
    /// What the configuration may name on this host; `None`: no restriction.
    pub rules: Option<Vec<Grant>>,
    /// Handles reconnections of sources that may not know that their migration to here has ended.
    pub late_reconnects: LateReconnects,
    /// Confines the process as the VM's configuration requests.
    pub confiner: Confiner,
    /// Informs the VMM thread.
    pub inbox_sender: InboxSender,
}

/// Where an incoming migration is awaited.
pub enum ListenTarget {
    /// A bound socket.
    Bound(Listener),
    /// A name still to be resolved, which may block, and the certificates to use.
    Unresolved(Address, Option<ServerTls>),
}

/// Binds the address at once, so that errors are reported at once; an address that needs the resolver is
/// bound later.
///
/// # Errors
/// The address is invalid, in use or not local, or the certificates cannot be used.
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

/// Reports that a source can connect, and whether it has to authenticate.
fn report_ready(listener: &Listener) {
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
    /// The socket that is made for it, and removed afterwards.
    fn made_socket(&self) -> Option<&Path> {
        match self {
            Self::Bound(listener) => match listener.address() {
                Address::Unix(path) => Some(path),
                Address::Tcp { .. } => None,
            },
            // A name is of a host.
            Self::Unresolved(..) => None,
        }
    }

    /// Listens on the target.
    fn listen(
        self,
        late_reconnects: &LateReconnects,
        progress: &Progress,
        cancel: &Cancel,
    ) -> Result<Listener, ReceiveOutcome> {
        let (address, tls) = match self {
            Self::Bound(listener) => {
                report_ready(&listener);
                return Ok(listener);
            }
            Self::Unresolved(address, tls) => (address, tls),
        };
        log::info!("resolving {address}");
        let bound =
            Listener::bind_over(&address, tls, late_reconnects, cancel).inspect(report_ready);
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

/// A callback that reports a VM in doubt to the VMM thread. When the doubt lasts, the request that awaits
/// the VM is answered.
fn report_doubts(slot: Arc<Mutex<Option<Responder>>>, inbox_sender: InboxSender) -> DoubtObserver {
    Box::new(move |machine, state, lasts| {
        let info = Box::new(describe::of_machine(machine));
        inbox_sender.send(Message::InDoubt(InDoubtVm { state, info }));
        if lasts && let Some(responder) = take(&slot) {
            responder.answer(Err(doubt::in_doubt()));
        }
    })
}

/// Starts the thread that waits for a machine until cancelled.
///
/// # Errors
/// The thread cannot be started; the responder is returned.
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
        let ReceiveContext {
            host,
            sink,
            faults,
            fds,
            memory,
            rules,
            late_reconnects,
            confiner,
            inbox_sender,
        } = context;
        let confiner = confiner.with(target.made_socket().map(PathRule::remove_socket));
        let confine = Box::new(move |config: &VmConfig| confiner.confine(config));
        let slot = Arc::new(Mutex::new(Some(responder)));
        let doubts = report_doubts(Arc::clone(&slot), inbox_sender.clone());
        let check = HostCheck {
            host: Arc::clone(&host),
            fds: fds.clone(),
            memory: memory.clone(),
            rules: rules.clone(),
        };
        let builder = ArrivingBuilder::new(host, sink, faults, doubts).checked_by(Arc::new(check));
        let builder = builder.within(rules).with_descriptors(fds).with_memory(memory);
        let builder = builder.confined_by(confine);
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
