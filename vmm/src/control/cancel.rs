// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Cancelling a migration: which requests may do so, until when, and their answers.
//!
//! Owns the answers. A cancel is answered when the migration is over and it is known where the
//! guest is, never before; one that comes too late is refused with the place of the guest. It must
//! never decide where that is.

use vm_migration::GuestLocation;

use super::{GuestPages, VmLifecycle, Vmm};
use crate::api::request::Responder;
use crate::api::{ApiError, ApiErrorKind, ApiReply, MigrationCancelled};
use crate::events;

/// The error of a cancellation after the handover, at the source.
pub fn at_destination() -> ApiError {
    too_late("the guest belongs to the destination, where it runs")
}

/// The error of a cancellation after the guest has started, at the destination.
pub fn arrived() -> ApiError {
    too_late("the guest has arrived and runs here")
}

/// The error of a cancellation that comes too late.
pub fn too_late(where_it_is: &str) -> ApiError {
    ApiError::new(
        ApiErrorKind::Conflict,
        format!("the migration can no longer be cancelled: {where_it_is}"),
    )
}

fn no_migration() -> ApiError {
    ApiError::new(
        ApiErrorKind::NotCreated,
        "no migration is in progress here that could be cancelled",
    )
}

/// Answers all pending cancellations with an error.
pub fn refuse_all(cancellers: &mut Vec<Responder>, error: &ApiError) {
    for responder in cancellers.drain(..) {
        responder.answer(Err(error.clone()));
    }
}

/// Emits the event of a cancelled migration.
pub fn tell(side: &str, guest: GuestLocation) {
    events::emit("vm", "migration-cancelled", &[("side", side), ("guest", name(guest))]);
}

/// Name of the location, as in the progress document.
fn name(guest: GuestLocation) -> &'static str {
    match guest {
        GuestLocation::OnSource => "on-source",
        GuestLocation::PausedOnSource => "paused-on-source",
        GuestLocation::NotHere => "not-here",
        GuestLocation::OnDestination => "on-destination",
        GuestLocation::InDoubt => "in-doubt",
        GuestLocation::PostcopyPaused => "postcopy-paused",
    }
}

/// Answers all pending cancellations with the location of the guest, which has not moved.
pub fn confirm_all(
    cancellers: &mut Vec<Responder>,
    side: &str,
    guest: GuestLocation,
    reason: &str,
) {
    for responder in cancellers.drain(..) {
        responder.answer(Ok(ApiReply::Cancelled(MigrationCancelled {
            side: side.to_owned(),
            guest: name(guest).to_owned(),
            message: format!("{guest} ({reason})"),
        })));
    }
}

impl Vmm {
    /// Cancels the current migration.
    pub(super) fn cancel_migration(&mut self, responder: Responder) {
        let (side, is_told, cancel, cancellers) = match &mut self.vm {
            VmLifecycle::Receiving(receiving) if receiving.doubtful().is_some() => {
                return responder.answer(Err(super::doubt::in_doubt()));
            }
            VmLifecycle::Migrating { sending, .. } => {
                // A check is told by no event.
                ("source", !sending.is_check, &sending.cancel, &mut sending.cancellers)
            }
            VmLifecycle::Receiving(receiving) => {
                ("destination", true, &receiving.cancel, &mut receiving.cancellers)
            }
            VmLifecycle::Serving(_) => return responder.answer(Err(at_destination())),
            VmLifecycle::HandedOver { reason, .. } => {
                return responder.answer(Err(too_late(reason)));
            }
            VmLifecycle::NotStarted { .. } | VmLifecycle::Unanswered(_) => {
                return responder.answer(Err(self.vm.why_not_live()));
            }
            VmLifecycle::Live(_) if matches!(self.pages, GuestPages::Arriving { .. }) => {
                return responder.answer(Err(arrived()));
            }
            VmLifecycle::None | VmLifecycle::Created(_) | VmLifecycle::Live(_)
                if self.pending_exit.is_some() =>
            {
                return responder.answer(Err(at_destination()));
            }
            VmLifecycle::None
            | VmLifecycle::Created(_)
            | VmLifecycle::Starting(_)
            | VmLifecycle::Live(_)
            | VmLifecycle::Busy(_)
            | VmLifecycle::Transitioning(_)
            | VmLifecycle::TearingDown(_) => {
                return responder.answer(Err(no_migration()));
            }
        };
        if is_told {
            events::emit("vm", "migration-cancelling", &[("side", side)]);
        }
        cancellers.push(responder);
        cancel.cancel();
    }
}
