// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The destination of a migration: `Listen > Negotiate > Receive > Prepare > Run > [Fault] > Done`.
//!
//! | file | owns |
//! | --- | --- |
//! | `mod` | the order of the phases, and the one exit for failures |
//! | `negotiate` | Listen and Negotiate: versions, capabilities, mapping memory |
//! | `parking` | threads of a postcopy, tried and started before the guest is stopped |
//! | `check` | answers what a migration would fail with, while a source is awaited |
//! | `building` | the machine while it is built, during the first rounds |
//! | `receive` | Receive: memory arrives, extra connections join |
//! | `helpers` | the threads that receive memory from those |
//! | `blobs` | parts of the state that come as bytes, on all connections |
//! | `tables` | ranges that a peer names: looked up, bounded, filled or made zero |
//! | `unpopulated` | memory into which nothing has arrived yet |
//! | `run` | Prepare and Run: state is loaded, the guest starts, and never too early |
//! | `engine` | the page engine of postcopy: what an arrival means |
//! | `contents` | contents on their way from a connection into memory |
//! | `demand` | what is missing and what is requested, and since when |
//! | `assembly` | its large host pages, which are assembled from pieces |
//! | `emptying`, `stale` | discards pages that will arrive again; which of them are old |
//! | `fault` | the engine's threads |
//! | `resolver` | faults that the vCPU threads resolve themselves |
//! | `own` | connections on which a vCPU thread reads its own answers |
//! | `claim` | whether it reads there, or the thread for what is left |
//! | `inbox` | the messages there, read without blocking |
//! | `waiters` | vCPUs that wait for a page, found by the page |
//! | `faulting` | Fault: until all pages are resident, over as many sets of connections as that takes |
//! | `arrivals` | accepted connections before their hello is complete |
//! | `doubt` | in doubt: the connection was lost at the commit, and the source has not said which side has the guest |
//! | `late_reconnects` | answers to a source that reconnects after the end |
//! | `rejoin` | reconnection of a source that lost its connections |
//!
//! Nothing from the peer is trusted before it is checked against the machine that was built
//! here. Until the source has confirmed the handover the guest does not run, whatever has arrived.

mod arrivals;
mod assembly;
mod blobs;
mod building;
mod check;
mod claim;
mod contents;
mod demand;
mod doubt;
mod emptying;
mod engine;
mod fault;
mod faulting;
mod helpers;
mod inbox;
mod late_reconnects;
mod negotiate;
mod own;
mod parking;
mod preparing;
mod receive;
pub(crate) mod refusals;
mod rejoin;
mod resolver;
mod run;
mod stale;
mod tables;
mod unpopulated;
mod waiters;

use std::sync::Arc;

use crate::cancel::Cancel;
use crate::channel::Channel;
use crate::error::{Failure, GuestLocation, MigrationError, Side};
use crate::options::ReceiveOptions;
use crate::progress::{Phase, Progress};
use crate::report::FailureReport;
use crate::transport::{self, Address, ServerTls, TransportError};
use crate::vm::{DestinationBuilder, DestinationVm};

#[cfg(any(test, feature = "testing"))]
pub(crate) use blobs::Blobs;
use check::Checks;
#[cfg(all(test, not(loom)))]
pub(crate) use check::RUNNING_MAX as CHECKS_MAX;
pub(crate) use engine::{Engine, Via};
pub use faulting::{Faulting, PostcopyPaused};
use late_reconnects::EndedMigration;
pub use late_reconnects::LateReconnects;
#[cfg(test)]
pub(crate) use late_reconnects::late_reconnects_for_tests;
pub(crate) use negotiate::BEGINS_NOTHING;
pub use negotiate::READERS_MAX;
#[cfg(all(test, not(loom)))]
pub(crate) use stale::Stale;

/// Options, progress and handles that every phase of one migration uses.
#[derive(Clone, Copy)]
pub(crate) struct Context<'a> {
    pub options: &'a ReceiveOptions,
    pub progress: &'a Arc<Progress>,
    pub cancel: &'a Cancel,
    pub listener: &'a Arc<transport::Listener>,
    /// Ended migrations whose sources may still ask.
    pub ended: &'a [EndedMigration],
    pub late_reconnects: &'a LateReconnects,
}

/// An address on which one source at a time can connect.
#[derive(Debug)]
pub struct Listener {
    socket: Arc<transport::Listener>,
    ended: Vec<EndedMigration>,
    late_reconnects: LateReconnects,
}

impl Drop for Listener {
    fn drop(&mut self) {
        // Whatever the outcome, earlier sources may reconnect again.
        self.late_reconnects.answer_for(&self.socket, std::mem::take(&mut self.ended));
    }
}

/// A guest that has arrived.
pub struct Received<V: DestinationVm> {
    /// The machine, running (or paused by its user, as it was at the source).
    pub vm: V::Running,
    /// Set while pages still arrive: wait on it, and keep the machine until it has ended.
    pub faults: Option<Faulting<V::Memory>>,
}

impl<V: DestinationVm> std::fmt::Debug for Received<V> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Received").field("faults", &self.faults.is_some()).finish_non_exhaustive()
    }
}

/// A migration that failed here.
pub struct ReceiveFailure<V: DestinationVm> {
    /// The failure, and where the guest is.
    pub error: MigrationError,
    /// The machine, when it is complete and did not start: see [`GuestLocation::InDoubt`] and
    /// [`GuestLocation::OnDestination`]. `None` when there is nothing to keep.
    pub vm: Option<V>,
    /// Set while pages of that machine still arrive, as in [`Received::faults`]: the source serves them
    /// whether the guest runs yet or not.
    pub faults: Option<Faulting<V::Memory>>,
}

impl<V: DestinationVm> std::fmt::Debug for ReceiveFailure<V> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("ReceiveFailure").field(&self.error).finish()
    }
}

/// How a phase failed.
pub(crate) struct PhaseFailure<V: DestinationVm> {
    pub peer: Option<Channel>,
    pub failure: Failure,
    pub guest: GuestLocation,
    pub vm: Option<V>,
    pub faults: Option<Box<Faulting<V::Memory>>>,
}

impl<V: DestinationVm> PhaseFailure<V> {
    /// A failure before the handover.
    pub(crate) fn early(peer: Option<Channel>, failure: Failure) -> Self {
        Self { peer, failure, guest: GuestLocation::NotHere, vm: None, faults: None }
    }
}

impl Listener {
    /// Listens on `address`; with TCP port 0 the kernel chooses the port, see [`address`](Self::address).
    ///
    /// # Errors
    /// When the address is in use, does not belong to this host, or does not resolve.
    pub fn bind(address: &Address) -> Result<Self, TransportError> {
        let socket = Arc::new(transport::Listener::bind(address)?);
        Ok(Self { socket, ended: Vec::new(), late_reconnects: LateReconnects::default() })
    }

    /// Like [`bind`](Self::bind), in place of listeners of this process that only answer the sources of ended
    /// migrations: this one answers those as well. Connections use TLS with these certificates, or no TLS if
    /// `None`. `cancel` ends the wait for name resolution.
    ///
    /// # Errors
    /// As [`bind`](Self::bind), and [`TransportError::NeedsTls`] where an ended migration has used TLS.
    pub fn bind_over(
        address: &Address,
        tls: Option<ServerTls>,
        late_reconnects: &LateReconnects,
        cancel: &Cancel,
    ) -> Result<Self, TransportError> {
        let (socket, ended) = late_reconnects.bind(address, tls, cancel)?;
        Ok(Self { socket, ended, late_reconnects: late_reconnects.clone() })
    }

    /// Makes connections use TLS with these certificates, or no TLS if `None`.
    #[must_use]
    pub fn with_tls(mut self, tls: Option<ServerTls>) -> Self {
        self.socket = Arc::new(self.socket.with_tls(tls));
        self
    }

    /// True when connections use TLS, and both sides authenticate by certificate.
    pub fn is_authenticated(&self) -> bool {
        self.socket.tls().is_some()
    }

    /// The address on which it listens.
    pub fn address(&self) -> &Address {
        self.socket.address()
    }

    /// Waits for a source and receives its guest.
    ///
    /// Blocks until the guest runs here, or the migration has failed. After a postcopy handover
    /// pages still arrive: see [`Received::faults`]. `cancel` works until the handover has been
    /// acknowledged; from then on only the source's decision counts, or the operator's
    /// ([`Steering::decide`](crate::Steering::decide)).
    ///
    /// # Errors
    /// The source has been sent the reason, if the connection still works. Unless [`ReceiveFailure::error`]
    /// says otherwise, the guest continues there and everything that was built here is dropped.
    pub fn receive<B: DestinationBuilder>(
        mut self,
        builder: B,
        options: &ReceiveOptions,
        progress: &Arc<Progress>,
        cancel: &Cancel,
    ) -> Result<Received<B::Vm>, Box<ReceiveFailure<B::Vm>>> {
        let Self { socket: listener, ended, late_reconnects } = &self;
        let context = Context { options, progress, cancel, listener, ended, late_reconnects };
        let (result, pages_come) = match drive(builder, context) {
            Ok(received) => {
                let pages_come = received.faults.is_some();
                if !pages_come {
                    progress.finish(Phase::Done);
                }
                (Ok(received), pages_come)
            }
            Err(phase_failure) => {
                let failure = fail_phase(context, phase_failure);
                let pages_come = failure.faults.is_some();
                (Err(Box::new(failure)), pages_come)
            }
        };
        if pages_come {
            // The threads that receive the pages listen, and answer for these as well.
            self.ended.clear();
        }
        result
    }
}

/// Runs the phases in order.
fn drive<B: DestinationBuilder>(
    builder: B,
    context: Context<'_>,
) -> Result<Received<B::Vm>, PhaseFailure<B::Vm>> {
    let run = context.progress;
    let checks = Checks::new(builder.check(), builder.formats(), context);
    let connected = run.run(Phase::Listen, || negotiate::listen(context, checks))?;
    let mapped = run.run(Phase::Negotiate, || connected.negotiate(builder, context))?;
    let received = run.run(Phase::Receive, || mapped.receive(context))?;
    let ready = run.run(Phase::Prepare, || received.prepare(context))?;
    let mut received = run.run(Phase::Run, || ready.run(context))?;
    if let Some(faults) = &mut received.faults {
        faults.begin();
    }
    Ok(received)
}

impl Failure {
    /// Sends the peer the reason, if that could still arrive.
    fn tell(&self, peer: &Channel) {
        if self.peer_listens() {
            peer.refuse(&self.for_peer());
        }
    }
}

/// The only exit for failures: tells the peer and states where the guest is.
fn fail_phase<V: DestinationVm>(
    context: Context<'_>,
    phase_failure: PhaseFailure<V>,
) -> ReceiveFailure<V> {
    let PhaseFailure { peer, failure, guest, vm, faults } = phase_failure;
    let phase = context.progress.phase();
    if let Some(peer) = peer {
        failure.tell(&peer);
    }
    let Failure { step, cause } = failure;
    let error = MigrationError { side: Side::Destination, phase, step, guest, cause };
    let report = FailureReport::new(&error);
    let Some(mut faults) = faults else {
        context.progress.fail(Phase::Failed, report);
        return ReceiveFailure { error, vm, faults: None };
    };
    // The migration continues: pages still arrive.
    context.progress.note_failure(report);
    faults.begin();
    ReceiveFailure { error, vm, faults: Some(*faults) }
}
