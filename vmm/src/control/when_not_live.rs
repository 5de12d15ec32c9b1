// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What a request is told that needs a live VM and meets none: which operation is in progress, and what to do.
//!
//! Owns these texts. Must never change the state of the VM.

use vm_migration::Phase;

use super::{VmLifecycle, doubt, pausing};
use crate::api::{ApiError, ApiErrorKind};

impl VmLifecycle {
    /// The operation in progress that other requests wait for, as in `vm.info`.
    pub(super) fn doing(&self) -> Option<String> {
        let doing = match self {
            Self::Starting(starting) => starting.doing(),
            Self::Busy(busy) => busy.name(),
            Self::Transitioning(transition) => transition.kind.doing()?,
            Self::TearingDown(_) => "ended",
            Self::Migrating { sending, .. } if sending.is_check => "checked for a migration",
            Self::Migrating { .. } => "migrated",
            _ => return None,
        };
        Some(doing.to_owned())
    }

    /// The error of a request that needs a live machine.
    pub(super) fn why_not_live(&self) -> ApiError {
        match self {
            Self::None | Self::Live(_) => ApiError::not_created(),
            Self::Created(_) => ApiError::not_booted(),
            Self::Migrating { sending, .. } if sending.is_check => ApiError::new(
                ApiErrorKind::Conflict,
                "a migration of the VM is being checked; wait until that is over, or cancel it with \
                 vm.migration-cancel",
            ),
            Self::Migrating { .. } => ApiError::new(
                ApiErrorKind::Conflict,
                "the VM is being migrated; wait until that is over, or cancel it with \
                 vm.migration-cancel",
            ),
            Self::Serving(sending) if sending.progress.phase() == Phase::InDoubt => ApiError::new(
                ApiErrorKind::Conflict,
                "the destination of the migration owns the VM; it may not know that yet, and is informed when it \
                 can be reached; force ends that",
            ),
            Self::Serving(_) => ApiError::new(
                ApiErrorKind::Conflict,
                "the VM runs at the destination of its migration, which receives the last pages from \
                 here; this VMM ends by itself when all are sent, and with force the VM is lost",
            ),
            Self::Busy(busy) => ApiError::new(
                ApiErrorKind::Conflict,
                format!(
                    "the VM is being {}; wait until that is over{}",
                    busy.name(),
                    if busy.is_restore() {
                        ", or discard it with vm.delete"
                    } else {
                        ", or end it with vm.snapshot-cancel"
                    }
                ),
            ),
            Self::Starting(starting) => ApiError::new(
                ApiErrorKind::Conflict,
                format!(
                    "the VM is being {}, which waits for its resources; wait until that is \
                     over, or discard it with vm.shutdown",
                    starting.name()
                ),
            ),
            Self::Transitioning(transition) => ApiError::new(
                ApiErrorKind::Conflict,
                format!(
                    "the VM is being {}; wait until that is over{}",
                    transition.kind.name(),
                    if transition.kind == pausing::TransitionKind::Pause {
                        ", or cancel it with vm.resume"
                    } else {
                        ""
                    }
                ),
            ),
            Self::TearingDown(_) => ApiError::new(
                ApiErrorKind::Conflict,
                "the VM is being ended, which waits until its devices have finished their requests \
                 and its disks are written back; vmm.shutdown with force does not wait",
            ),
            Self::Receiving(receiving) if receiving.doubtful().is_some() => doubt::in_doubt(),
            Self::Receiving(_) => ApiError::new(
                ApiErrorKind::NotCreated,
                "a migration is awaited here; there is no VM yet",
            ),
            Self::NotStarted { reason, .. } => ApiError::new(
                ApiErrorKind::Conflict,
                format!(
                    "the VM has arrived and was not started: {reason}; vm.resume starts it, \
                     vm.delete discards it"
                ),
            ),
            Self::Unanswered(unanswered) => unanswered.error(),
            Self::HandedOver { reason, .. } => ApiError::new(
                ApiErrorKind::NotCreated,
                format!(
                    "the VM belongs to another VMM, which may need pages from here: {reason}; \
                     vm.delete discards them"
                ),
            ),
        }
    }
}
