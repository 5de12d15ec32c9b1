// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Observer of a migration, which writes its progress and final figures to the log and the event monitor.

use vm_migration::{Event, Observer, Phase, ProgressDocument, Side};

use super::inbox::{InboxSender, Message};
use crate::events;

/// A migration observer that sends events to the log and the event monitor.
pub struct EventObserver {
    /// Informs the VMM thread of the handover.
    pub inbox_sender: InboxSender,
}

impl Observer for EventObserver {
    fn event(&self, side: Side, event: Event) {
        announce(side, event);
        let hands_over = [Phase::Serve, Phase::InDoubt].map(Event::Begin);
        if side == Side::Source && hands_over.contains(&event) {
            self.inbox_sender.send(Message::HandedOver);
        }
    }
}

/// Emits an event with the final figures of a migration, or without if they are unknown.
pub fn report_figures(event: &'static str, last: Option<&ProgressDocument>) {
    let figures = last.map(ProgressDocument::final_figures).unwrap_or_default();
    let properties: Vec<_> = figures.iter().map(|(key, value)| (*key, value.as_str())).collect();
    events::emit("vm", event, &properties);
}

/// Like [`report_figures`], and writes a line to the log.
pub fn report_end(event: &'static str, last: Option<&ProgressDocument>) {
    report_figures(event, last);
    if let Some(last) = last {
        log::info!("the migration is over ({}): {}", last.side, last.final_line());
    }
}

/// Logs or emits one migration event.
pub fn announce(side: Side, event: Event) {
    let side = side.to_string();
    match event {
        Event::Begin(phase) => {
            let name = phase.to_string();
            events::emit("vm", "migration-phase", &[("side", &side), ("phase", &name)]);
            match phase {
                Phase::Precopy => events::emit("vm", "migration-started", &[]),
                Phase::Receive => events::emit("vm", "migration-receive-started", &[]),
                Phase::PostcopyPaused => {
                    events::emit("vm", "postcopy-migration-paused", &[("side", &side)]);
                }
                Phase::InDoubt => {
                    events::emit("vm", "migration-in-doubt", &[("side", &side)]);
                }
                Phase::PostcopyRecover => {
                    events::emit("vm", "postcopy-migration-recovering", &[("side", &side)]);
                }
                _ => {}
            }
        }
        Event::Round { round, remaining_bytes } => events::emit(
            "vm",
            "migration-memory-iteration",
            &[
                ("side", &side),
                ("id", &round.to_string()),
                ("remaining_bytes", &remaining_bytes.to_string()),
            ],
        ),
        Event::Stalled { round, expected_us, allowed_us } => events::emit(
            "vm",
            "migration-stalled",
            &[
                ("side", &side),
                ("id", &round.to_string()),
                ("expected_downtime_us", &expected_us.to_string()),
                ("allowed_downtime_us", &allowed_us.to_string()),
            ],
        ),
        Event::Throttled { percent } => events::emit(
            "vm",
            "migration-throttled",
            &[("side", &side), ("percent", &percent.to_string())],
        ),
        Event::DowntimeAllowed { allowed_us } => events::emit(
            "vm",
            "migration-downtime-allowed",
            &[("side", &side), ("allowed_downtime_us", &allowed_us.to_string())],
        ),
        Event::Fail(phase, time) => {
            log::warn!("migration ({side}): {phase} failed after {} ms", time.as_millis());
        }
        Event::PageServerFailed => events::emit("vm", "page-server-failed", &[]),
        // The `vm-migration` crate logs the times.
        Event::End(..) => {}
    }
}
