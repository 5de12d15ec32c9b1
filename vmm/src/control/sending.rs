// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Sending a VM: the migration thread at the source, and the result.
//!
//! Owns the machine while it migrates, on a thread of its own; the VMM thread only has a
//! description of it and the means to watch and to cancel.

use std::sync::Arc;
use std::time::{Duration, Instant};

use vm_migration::source::{Held, SendFailure, migrate};
use vm_migration::{
    Cancel, Cause, Convergence, FailureReport, GuestLocation, MemoryMode, MigrationError, Phase,
    Progress, SendOptions, Side, Steering, TimeoutStrategy,
};

use super::inbox::{InboxSender, Message};
use super::observer::EventObserver;
use super::threads::spawn_with;
use crate::api::request::Responder;
use crate::api::{ApiError, ApiErrorKind};
use crate::machine::Machine;
use crate::migration::destination::DmaToMissingPages;
use crate::migration::memory::MigratingRam;
use crate::migration::page_server::PageServerPlan;
use crate::migration::source::{LeavingMachine, Remains, StopLimits};

/// Outcome of an outgoing migration.
pub enum SendEnd {
    /// The guest is elsewhere, with all of its pages.
    Complete(Remains),
    /// The guest is here, running or paused.
    Returned(Box<Machine>, ReturnReason),
    /// The guest is elsewhere, and may miss pages that only this process has.
    Incomplete {
        /// Remains of the machine.
        remains: Remains,
        /// The pages that are kept.
        held: Option<Held<MigratingRam>>,
        /// The cause.
        reason: String,
    },
}

/// Why a guest was not migrated.
pub struct ReturnReason {
    /// The cause.
    pub reason: String,
    /// Location of the guest.
    pub guest: GuestLocation,
    /// Whether the migration was cancelled by request.
    pub is_cancelled: bool,
}

impl ReturnReason {
    fn new(error: &MigrationError) -> Self {
        let is_cancelled = matches!(error.cause, Cause::Cancelled);
        Self { reason: chain(error), guest: error.guest, is_cancelled }
    }
}

/// An outgoing migration in progress.
pub struct Sending {
    /// Its progress.
    pub progress: Arc<Progress>,
    /// Cancels it.
    pub cancel: Cancel,
    /// Steers it.
    pub steering: Steering,
    /// How memory is transferred.
    pub mode: MemoryMode,
    /// Nothing is sent: a migration is only checked.
    pub is_check: bool,
    /// Requests to cancel it that wait for the result.
    pub cancellers: Vec<Responder>,
    /// Requests to delete the VM that gave up the pages being served, and wait until that is done.
    pub deleters: Vec<Responder>,
    /// Requests to resume the paused VM, which cancelled the migration.
    pub resumers: Vec<Responder>,
}

impl Sending {
    /// Whether nothing has been sent: the peer may not even exist.
    pub fn has_sent_nothing(&self) -> bool {
        matches!(self.progress.phase(), Phase::Idle | Phase::Connect | Phase::Negotiate)
    }
}

/// Removes postcopy from the options, which a VM with devices that reach its memory beside the VMM cannot do.
///
/// # Errors
/// Postcopy alone was requested.
pub fn without_postcopy(options: &mut SendOptions) -> Result<(), ApiError> {
    match options.mode() {
        MemoryMode::Precopy => return Ok(()),
        MemoryMode::Auto if !options.page_server => {}
        _ => return Err(ApiError::from_error(ApiErrorKind::Conflict, &DmaToMissingPages)),
    }
    log::info!(
        "a VM with passed-through or vhost-user devices moves in precopy only: no switch to postcopy"
    );
    options.memory_mode = MemoryMode::Precopy;
    options.urgent_connections = None;
    options.postcopy_after = None;
    if options.convergence == Convergence::Postcopy {
        options.convergence = Convergence::None;
    }
    Ok(())
}

fn chain(error: &MigrationError) -> String {
    ApiError::from_error(ApiErrorKind::Failed, error).to_string()
}

/// Limits of the stop: the requested downtime or the one that convergence has come to allow, and never more
/// time than the migration has left.
fn stop_limits(options: &SendOptions, progress: &Arc<Progress>, cancel: &Cancel) -> StopLimits {
    let (asked, progress) = (options.downtime, Arc::clone(progress));
    let downtime = move || {
        asked.max(Duration::from_micros(progress.snapshot().allowed_downtime_us.unwrap_or(0)))
    };
    let is_limited = options.timeout_strategy == TimeoutStrategy::Cancel;
    let until = Instant::now().checked_add(options.timeout).filter(|_| is_limited);
    let cancel = cancel.clone();
    let is_cancelled = Box::new(move || cancel.is_cancelled());
    StopLimits { downtime: Box::new(downtime), until, is_cancelled }
}

fn send_machine(
    machine: Box<Machine>,
    page_server: Option<PageServerPlan>,
    options: &SendOptions,
    progress: &Arc<Progress>,
    cancel: &Cancel,
) -> SendEnd {
    let limits = stop_limits(options, progress, cancel);
    let leaving = match LeavingMachine::new(machine, page_server, limits) {
        Ok(leaving) => leaving,
        Err((machine, error)) => {
            let step = "describing guest memory";
            let report = FailureReport::before_the_begin(Side::Source, step, &error);
            let reason = report.chain.join(": ");
            progress.fail(Phase::Failed, report);
            let stay = ReturnReason { reason, guest: GuestLocation::OnSource, is_cancelled: false };
            return SendEnd::Returned(machine, stay);
        }
    };
    match migrate(leaving, options, progress, cancel) {
        Ok(finished) => SendEnd::Complete(finished.remains),
        Err(failure) => match *failure {
            SendFailure::Resumed { vm, error } => {
                SendEnd::Returned(vm.into_machine(), ReturnReason::new(&error))
            }
            SendFailure::StillPaused { vm, error } => {
                SendEnd::Returned(vm.into_machine(), ReturnReason::new(&error))
            }
            SendFailure::HandedOver { remains, held, error } => {
                SendEnd::Incomplete { remains, held, reason: chain(&error) }
            }
        },
    }
}

/// Starts the thread that sends a machine.
///
/// # Errors
/// The machine is returned with the reason.
pub fn start(
    machine: Box<Machine>,
    options: SendOptions,
    page_server: Option<PageServerPlan>,
    inbox_sender: InboxSender,
) -> Result<Sending, (Box<Machine>, std::io::Error)> {
    let cancel = match Cancel::new() {
        Ok(cancel) => cancel,
        Err(error) => return Err((machine, error)),
    };
    let progress = Arc::new(Progress::observed(
        Side::Source,
        Box::new(EventObserver { inbox_sender: inbox_sender.clone() }),
    ));
    let (steering, mode) = (options.steering.clone(), options.mode());
    let (own_progress, own_cancel) = (Arc::clone(&progress), cancel.clone());
    let spawned = spawn_with("migration-send", machine, move |machine| {
        let end = send_machine(machine, page_server, &options, &own_progress, &own_cancel);
        inbox_sender.send(Message::SendEnd(Box::new(end)));
    });
    spawned.map(|_detached| {
        let (cancellers, deleters, resumers) = (Vec::new(), Vec::new(), Vec::new());
        let is_check = false;
        Sending { progress, cancel, steering, mode, is_check, cancellers, deleters, resumers }
    })
}

#[cfg(test)]
#[expect(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;
    use crate::config::SendMigrationData;

    fn with_devices(keys: &str) -> Result<SendOptions, String> {
        let data = format!("destination_url=tcp:h:1,{keys}");
        let mut sent = SendMigrationData::parse_or_url(&data).unwrap().options().unwrap();
        without_postcopy(&mut sent).map_err(|error| error.to_string())?;
        Ok(sent)
    }

    #[test]
    fn passed_through_devices_move_in_precopy_only() {
        for keys in [
            "memory_mode=auto,postcopy_after_s=3,preempt=2",
            "convergence=postcopy",
            "downtime_ms=7",
        ] {
            let sent = with_devices(keys).unwrap();
            assert_eq!((sent.mode(), sent.postcopy_after), (MemoryMode::Precopy, None), "{keys}");
            assert_eq!(sent.check(), Ok(()), "{keys}");
        }
        for refused in [
            "memory_mode=postcopy",
            "memory_mode=auto,page_server=on",
            "convergence=postcopy,page_server=on",
        ] {
            let error = with_devices(refused).unwrap_err();
            assert!(error.contains("cannot wait for pages that are still to come"), "{error}");
        }
    }
}
