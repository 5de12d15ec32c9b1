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
            Event::Begin(phase) => {
                log::info!("migration ({side}): {phase}");
                events::emit(
                    "vm",
                    "migration-phase",
                    &[("side", &side), ("phase", &phase.to_string())],
                );
            }
            Event::End(phase, time) => {
                log::info!("migration ({side}): {phase} took {:.3} ms", time.as_secs_f64() * 1e3);
            }
            Event::Fail(phase, time) => {
                log::warn!(
                    "migration ({side}): {phase} failed after {:.3} ms",
                    time.as_secs_f64() * 1e3
                );
            }
            Event::Round { round, remaining_bytes } => {
                log::info!("migration ({side}): round {round}, {remaining_bytes} bytes to send");
            }
        }
    }
}
