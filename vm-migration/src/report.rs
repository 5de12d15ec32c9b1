// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A failure as the progress document reports it, made from an error.
//!
//! Owns the conversion only. Must never decide where the guest is: that comes from the error.

use crate::error::{Cause, MigrationError};
use crate::phase::{GuestLocation, Phase, Side};

pub use crate::document::FailureReport;

impl FailureReport {
    /// The report of an error of the migration.
    pub fn new(error: &MigrationError) -> Self {
        Self {
            side: error.side,
            phase: error.phase,
            step: error.step.to_owned(),
            guest: error.guest,
            cancelled: matches!(error.cause, Cause::Cancelled),
            chain: error_text::sentences(error),
        }
    }

    /// The report of a failure before the migration began: the guest is unaffected.
    pub fn before_the_begin(
        side: Side,
        step: &'static str,
        error: &(dyn std::error::Error + 'static),
    ) -> Self {
        let guest = match side {
            Side::Source => GuestLocation::OnSource,
            Side::Destination => GuestLocation::NotHere,
        };
        let mut chain = vec![format!("the migration could not begin, while {step}; {guest}")];
        chain.extend(error_text::sentences(error));
        Self { side, phase: Phase::Idle, step: step.to_owned(), guest, cancelled: false, chain }
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test that cannot unwrap has failed")]

    use super::*;
    use crate::Progress;
    use crate::transport::TransportError;

    fn error() -> MigrationError {
        MigrationError {
            side: Side::Source,
            phase: Phase::Precopy,
            step: "sending memory",
            guest: GuestLocation::OnSource,
            cause: Cause::Transport(TransportError::Closed),
        }
    }

    #[test]
    fn the_document_has_side_phase_step_and_every_sentence() {
        let progress = Progress::new(Side::Source);
        assert!(progress.snapshot().error.is_none());
        progress.fail(Phase::Failed, FailureReport::new(&error()));
        let document = serde_json::to_value(progress.snapshot()).unwrap();
        assert_eq!(document["phase"], "failed");
        let told = &document["error"];
        assert_eq!((&told["side"], &told["phase"]), (&"source".into(), &"precopy".into()));
        assert_eq!(told["step"], "sending memory");
        assert_eq!((&told["guest"], &told["cancelled"]), (&"on-source".into(), &false.into()));
        // The transparent layer between the two is not repeated.
        let chain = told["chain"].as_array().unwrap();
        assert_eq!(chain.len(), 2, "{chain:?}");
        assert_eq!(chain[1], "the peer closed the connection");
    }

    #[test]
    fn a_cancel_is_told_as_one_and_the_first_failure_stays() {
        let progress = Progress::new(Side::Source);
        let cancelled = MigrationError { cause: Cause::Cancelled, ..error() };
        progress.fail(Phase::Failed, FailureReport::new(&cancelled));
        progress.fail(Phase::Failed, FailureReport::new(&error()));
        assert!(progress.snapshot().error.unwrap().cancelled);
    }
}
