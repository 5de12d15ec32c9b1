// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What a destination says to connections that it does not take because of what it is and does now, whatever they ask for.
//!
//! Owns the texts, which a source compares when it checks a migration: versions that differ in one take it for a failure of
//! the check. Must never hold a refusal that follows from what the connection has sent.

/// The refusal, sent without TLS, of a connection without TLS where TLS is required.
pub(crate) const NEEDS_TLS: &str =
    "connections to this destination use TLS: give tls_dir to send-migration as well";

/// While a VM arrives.
pub(crate) const ANOTHER_ARRIVES: &str =
    "another VM is on its way to here; nothing else is received meanwhile";

/// While pages of a VM that runs here are elsewhere.
pub(crate) const PAGES_TO_COME: &str =
    "a VM is here already, and pages of it are still to come from where it was";

/// While it is not known which side has the guest.
pub(crate) const IN_DOUBT: &str = "a VM has arrived here, and it is not known yet whether it runs where it was; nothing else \
                                   is received";

/// After a migration, while its source may still come back to ask how it ended.
pub(crate) const NOTHING_AWAITED: &str = "a migration to here is over, and nothing is awaited";

/// True for the refusals that a migration would meet as a check of it does.
pub(crate) fn is_of_any_migration(reason: &str) -> bool {
    [NEEDS_TLS, ANOTHER_ARRIVES, PAGES_TO_COME, IN_DOUBT, NOTHING_AWAITED].contains(&reason)
}
