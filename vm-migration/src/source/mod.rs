// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The source of a migration: `Connect > Negotiate > Precopy > Stop > Handover > [Serve] > Done`.
//!
//! | file | owns |
//! | --- | --- |
//! | `mod` | the order of the phases, and the one exit for failures |
//! | `negotiate` | Connect and Negotiate: what both sides can do, all connections |
//! | `counts` | how many further connections there are |
//! | `precopy` | Precopy: the loop around the rounds, and its end |
//! | `round` | one round: what is sent, when its dirty bits are cleared |
//! | `content` | what goes in one message of memory |
//! | `page_maps` | sets of pages of all regions: populated, dirty, in the destination's units |
//! | `switch` | what ends precopy early, in favour of postcopy |
//! | `check` | what a migration would fail with and take, without one |
//! | `unit_space` | all memory as one index space, of which connections claim slices |
//! | `send_stream` | a connection in a round: how much it may claim |
//! | `compression` | compression of bulk memory, and whether it pays |
//! | `convergence` | when to stop precopy, and what to do if it does not help: pure policy |
//! | `blobs` | parts of the state that are sent as bytes, on all connections |
//! | `stop` | Stop: the guest is paused, remaining pages are sent or noted |
//! | `handover` | Handover: the exchange after which the guest belongs to the destination |
//! | `peers` | who is told of a failure |
//! | `other` | the same with another program that speaks plain version 0 |
//! | `verdict` | tells the destination which side has the guest, after the connection was lost |
//! | `serve` | Serve: bulk pushers and urgent servers |
//!
//! Each state is a type that owns the machine and has only the operations that are allowed in it. The
//! machine is of type `V` (it can run) up to Stop, of type `V::Paused` up to the point of no
//! return in Handover, and only its remains exist after that.

mod announce;
mod blobs;
mod check;
mod compression;
mod content;
mod convergence;
mod counts;
mod flows;
mod handover;
mod negotiate;
mod other;
mod page_maps;
mod peers;
mod precopy;
mod round;
mod send_stream;
mod serve;
mod stop;
mod switch;
mod unit_space;
mod verdict;

use std::sync::Arc;
use std::time::Duration;

use crate::cancel::Cancel;
use crate::channel::Channel;
use crate::error::{Failure, GuestLocation, MigrationError, Side, Step};
use crate::options::SendOptions;
use crate::progress::{Phase, Progress, ProgressDocument};
use crate::report::FailureReport;
use crate::vm::{PausedVm, SourceVm};

use other::Given;
use peers::Peers;
use verdict::Retraction;

pub use check::{CheckError, KnownBefore, check};
pub use serve::{Held, serve_for_another};

/// Options, progress and handles that every phase of one migration uses.
#[derive(Clone, Copy)]
pub(crate) struct Context<'a> {
    pub options: &'a SendOptions,
    pub progress: &'a Arc<Progress>,
    pub cancel: &'a Cancel,
}

impl Context<'_> {
    /// How long the destination may be silent while it prepares, if it cannot say that it does.
    fn silent_preparation(&self) -> Duration {
        let memory_bytes = self.progress.counters.total_bytes.get().unwrap_or(0);
        self.options.limits.silent_preparation(memory_bytes)
    }
}

/// A successful migration: the guest is at the destination with all its memory, or a page server
/// sends the rest ([`Phase::HandedOn`] in the report).
#[derive(Debug)]
pub struct Finished<R> {
    /// The remains of the machine at the source.
    pub remains: R,
    /// The last progress document.
    pub report: ProgressDocument,
}

/// The remains of a source machine.
pub type Remains<V> = <<V as SourceVm>::Paused as PausedVm>::Remains;

/// A failed migration, by where the guest is.
pub enum SendFailure<V: SourceVm> {
    /// The guest continues at the source, as before.
    Resumed {
        /// The machine.
        vm: V,
        /// The failure.
        error: MigrationError,
    },
    /// The guest is at the source, paused: it could not be resumed, or it is not known whether the destination runs it
    /// ([`GuestLocation::InDoubt`]).
    StillPaused {
        /// The machine.
        vm: V::Paused,
        /// The first failure. The reason why resuming failed has been logged.
        error: MigrationError,
    },
    /// The destination owns the guest, and a later step failed.
    HandedOver {
        /// The remains of the machine.
        remains: Remains<V>,
        /// Pages that the destination may still need: keep this value, and the process, until the
        /// destination is known to be complete or to have ended. `None` after precopy.
        held: Option<Held<V::Memory>>,
        /// The failure.
        error: MigrationError,
    },
}

impl<V: SourceVm> SendFailure<V> {
    /// The failure.
    pub fn error(&self) -> &MigrationError {
        match self {
            Self::Resumed { error, .. }
            | Self::StillPaused { error, .. }
            | Self::HandedOver { error, .. } => error,
        }
    }
}

impl<V: SourceVm> std::fmt::Debug for SendFailure<V> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("SendFailure").field(self.error()).finish()
    }
}

/// How a phase failed, with the owner of the guest at that time.
pub(crate) enum PhaseFailure<V: SourceVm> {
    Running(V, Option<Peers>, Failure),
    Paused {
        vm: V::Paused,
        peers: Peers,
        failure: Failure,
        /// Set when the destination may be in doubt, and is to be told.
        retraction: Option<Box<Retraction>>,
        /// The destination is another program and has the state: it has to drop its machine before this one can take back
        /// what only one may hold.
        given: Option<Given>,
        /// The dirty log, which is stopped when the guest continues.
        log: Option<V::Log>,
    },
    /// The other program may run the guest: it has been told to, and its answer is not known.
    InDoubt(V::Paused, Failure),
    HandedOver(Remains<V>, Option<Held<V::Memory>>, Failure),
}

/// Moves a machine to another host.
///
/// Blocks until the guest is at the destination with all its memory, or the migration has failed.
/// Meanwhile it owns the machine; `progress` shows its state, and `cancel` ends it until the handover
/// and has no effect afterwards.
///
/// # Errors
/// On any failure before the destination owns the guest, the guest is resumed and returned in
/// [`SendFailure::Resumed`]; the peer has been sent the reason, if the connection still works. After
/// that the source can never run it again: [`SendFailure::HandedOver`].
pub fn migrate<V: SourceVm>(
    vm: V,
    options: &SendOptions,
    progress: &Arc<Progress>,
    cancel: &Cancel,
) -> Result<Finished<Remains<V>>, Box<SendFailure<V>>> {
    let context = Context { options, progress, cancel };
    match drive(vm, context) {
        Ok((remains, last)) => {
            progress.finish(last);
            Ok(Finished { remains, report: progress.snapshot() })
        }
        Err(phase_failure) => Err(Box::new(fail_phase(context, phase_failure))),
    }
}

/// Runs the phases in order; returns the last one.
fn drive<V: SourceVm>(vm: V, context: Context<'_>) -> Result<(Remains<V>, Phase), PhaseFailure<V>> {
    let run = context.progress;
    let connected = run.run(Phase::Connect, || negotiate::connect(vm, context))?;
    let negotiated = run.run(Phase::Negotiate, || connected.negotiate(context))?;
    let copied = run.run(Phase::Precopy, || negotiated.precopy(context))?;
    let stopped = run.run(Phase::Stop, || copied.stop(context))?;
    let handed_over = run.run(Phase::Handover, || stopped.hand_over(context))?;
    if handed_over.has_pages_to_serve() {
        return run.run(Phase::Serve, || handed_over.serve(context));
    }
    if handed_over.unconfirmed.is_some() {
        return run.run(Phase::InDoubt, || handed_over.confirm_again(context));
    }
    Ok((handed_over.into_remains(), Phase::Done))
}

/// The only exit for failures: tells the peer, and resumes the guest if the source still owns it.
fn fail_phase<V: SourceVm>(context: Context<'_>, phase_failure: PhaseFailure<V>) -> SendFailure<V> {
    let phase = context.progress.phase();
    let fail = |last, guest, failure: Failure| {
        let Failure { step, cause } = failure;
        let error = MigrationError { side: Side::Source, phase, step, guest, cause };
        context.progress.fail(last, FailureReport::new(&error));
        error
    };
    match phase_failure {
        PhaseFailure::Running(vm, peers, failure) => {
            if let Some(peers) = peers {
                peers.tell(&failure);
            }
            let error = fail(Phase::Failed, GuestLocation::OnSource, failure);
            SendFailure::Resumed { vm, error }
        }
        PhaseFailure::Paused { vm, peers, failure, retraction, given, log } => {
            let peers = match given {
                None => Some(peers),
                Some(given) => {
                    if !other::withdraw(peers.control, given, &failure, context) {
                        let error = fail(Phase::Failed, GuestLocation::InDoubt, failure);
                        return SendFailure::StillPaused { vm, error };
                    }
                    None
                }
            };
            // The guest is resumed first; a peer of this program does not run it without a Confirm, and another one does not
            // without the state.
            let resumed = vm.resume();
            drop(log);
            if let Some(peers) = peers {
                peers.tell(&failure);
            }
            if let Some(retraction) = retraction {
                retraction.send_in_background();
            }
            match resumed {
                Ok(vm) => {
                    let error = fail(Phase::Failed, GuestLocation::OnSource, failure);
                    SendFailure::Resumed { vm, error }
                }
                Err((vm, reason)) => {
                    log::error!("the guest could not be resumed: {}", error_text::chain(&*reason));
                    let error = fail(Phase::Failed, GuestLocation::PausedOnSource, failure);
                    SendFailure::StillPaused { vm, error }
                }
            }
        }
        PhaseFailure::InDoubt(vm, failure) => {
            let error = fail(Phase::Failed, GuestLocation::InDoubt, failure);
            SendFailure::StillPaused { vm, error }
        }
        PhaseFailure::HandedOver(remains, held, failure) => {
            let (last, guest) = match held {
                Some(_) => (Phase::PostcopyPaused, GuestLocation::PostcopyPaused),
                None => (Phase::Failed, GuestLocation::OnDestination),
            };
            let error = fail(last, guest, failure);
            SendFailure::HandedOver { remains, held, error }
        }
    }
}

/// A connection to the destination on which nothing has been sent.
pub(crate) struct Connected<V> {
    vm: V,
    control: Channel,
}

impl<V: SourceVm> Connected<V> {
    /// Negotiates the protocol and has the destination map memory.
    fn negotiate(
        mut self,
        context: Context<'_>,
    ) -> Result<precopy::Negotiated<V>, PhaseFailure<V>> {
        let memory = self.vm.memory();
        match negotiate::agree(&mut self.vm, &memory, &mut self.control, context) {
            Ok(mut links) => match serve::await_requests(&mut links) {
                Ok(gate) => {
                    let Self { vm, control } = self;
                    Ok(precopy::Negotiated { vm, memory, control, links, gate })
                }
                Err(failure) => {
                    let peers = Peers::new(self.control, links);
                    Err(PhaseFailure::Running(self.vm, Some(peers), failure))
                }
            },
            Err(failure) => {
                let peers = Peers::first(self.control);
                Err(PhaseFailure::Running(self.vm, Some(peers), failure))
            }
        }
    }
}

/// Checks for a cancel in a loop that does not wait on a descriptor.
pub(crate) fn check_cancel(cancel: &Cancel, step: &'static str) -> Result<(), Failure> {
    if cancel.is_cancelled() {
        return Err(crate::error::Cause::Cancelled).step(step);
    }
    Ok(())
}
