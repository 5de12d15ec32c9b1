// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tells the log and the event monitor how a migration goes.

use vm_migration::{Event, Observer, Side};

use crate::events;

/// Takes every transition of a migration.
pub struct Herald;

impl Observer for Herald {
    fn event(&self, side: Side, event: Event) {
        let side = side.to_string();
        match event {
            Event::Begin(phase) => events::emit(
                "vm",
                "migration-phase",
                &[("side", &side), ("phase", &phase.to_string())],
            ),
            Event::Round { round, remaining_bytes } => events::emit(
                "vm",
                "migration-round",
                &[
                    ("side", &side),
                    ("round", &round.to_string()),
                    ("remaining_bytes", &remaining_bytes.to_string()),
                ],
            ),
            Event::Fail(phase, time) => {
                log::warn!("migration ({side}): {phase} failed after {} ms", time.as_millis());
            }
            // The crate's own log has the times.
            Event::End(..) => {}
        }
    }
}
