// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Requests to a postcopy migration: to begin it, and to connect again.
//!
//! Owns the answers. Both take effect on the thread of the migration; the progress document shows
//! their result. It must never decide where a guest is.

use vm_migration::steering::Recover;
use vm_migration::{Address, MemoryMode, Phase, Steering};

use super::{GuestPages, VmLifecycle, Vmm};
use crate::api::{ApiError, ApiErrorKind};
use crate::config::MigrationRecoverData;

fn conflict(text: &str) -> ApiError {
    ApiError::new(ApiErrorKind::Conflict, text)
}

impl Vmm {
    /// `vm.migration-start-postcopy`.
    pub(super) fn start_postcopy(&self) -> Result<(), ApiError> {
        match &self.vm {
            VmLifecycle::Migrating { sending, .. } if sending.mode == MemoryMode::Precopy => {
                Err(conflict(
                    "this migration was begun with memory_mode=precopy; only memory_mode=auto can \
                 switch to postcopy",
                ))
            }
            VmLifecycle::Migrating { sending, .. } => {
                sending.steering.start_postcopy();
                Ok(())
            }
            VmLifecycle::Serving(_) => Err(conflict("the migration is in postcopy already")),
            _ => Err(ApiError::new(
                ApiErrorKind::NotCreated,
                "no migration from here can switch to postcopy",
            )),
        }
    }

    /// `vm.migration-recover`.
    pub(super) fn recover_migration(&self, data: &MigrationRecoverData) -> Result<(), ApiError> {
        let steering: &Steering = match (&self.vm, &self.pages) {
            (VmLifecycle::Serving(sending), _) => &sending.steering,
            (VmLifecycle::Receiving(receiving), _) if receiving.doubtful().is_some() => {
                &receiving.steering
            }
            (
                VmLifecycle::Live(_)
                | VmLifecycle::NotStarted { .. }
                | VmLifecycle::Transitioning(_),
                GuestPages::Arriving { steering, .. },
            ) => steering,
            (VmLifecycle::Live(_) | VmLifecycle::Transitioning(_), GuestPages::Lost(paused)) => {
                return Err(ApiError::from_error(ApiErrorKind::Conflict, &paused.error)
                    .context("this migration cannot be recovered"));
            }
            _ => {
                return Err(ApiError::new(
                    ApiErrorKind::NotCreated,
                    "there is no postcopy migration to recover here",
                ));
            }
        };
        let phase = self.progress.as_ref().map_or(Phase::Idle, |progress| progress.phase());
        let (recover, connections_max) = recover_request(data, phase)?;
        steering.recover_over(recover, connections_max);
        Ok(())
    }
}

/// The request to reconnect: the address, and the maximum number of connections.
///
/// # Errors
/// The migration's phase does not allow it, or the address is invalid.
pub fn recover_request(
    data: &MigrationRecoverData,
    phase: Phase,
) -> Result<(Recover, Option<u16>), ApiError> {
    if !matches!(phase, Phase::PostcopyPaused | Phase::PostcopyRecover | Phase::InDoubt) {
        return Err(conflict("the connections of this migration work; nothing is to recover"));
    }
    let recover = match &data.url {
        None => Recover::There,
        Some(url) => {
            let address = url.parse::<Address>();
            let bad = |error| ApiError::from_error(ApiErrorKind::BadRequest, &error);
            Recover::At(address.map_err(bad)?)
        }
    };
    let connections_max = data.connections.map(|max| u16::try_from(max).unwrap_or(u16::MAX));
    Ok((recover, connections_max))
}
