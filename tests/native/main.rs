// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The native tests: the release binaries as processes, on this machine's KVM, with the test guest.
//!
//! One file per feature; `harness/` has what they share. Run them with `scripts/test native`.

#![expect(clippy::expect_used, clippy::indexing_slicing, reason = "a test that cannot go on fails")]

mod api_client;
mod bad_input;
mod boot;
mod cuts;
mod events;
mod harness;
mod http;
mod leaks;
mod lifecycle;
mod locks;
mod meanwhile;
mod migration;
mod migration_failures;
mod pause;
mod postcopy;
mod remote;

use std::process::ExitCode;

fn main() -> ExitCode {
    let mut suite = harness::Suite::default();
    boot::add(&mut suite);
    lifecycle::add(&mut suite);
    pause::add(&mut suite);
    postcopy::add(&mut suite);
    events::add(&mut suite);
    remote::add(&mut suite);
    api_client::add(&mut suite);
    http::add(&mut suite);
    bad_input::add(&mut suite);
    locks::add(&mut suite);
    leaks::add(&mut suite);
    migration::add(&mut suite);
    migration_failures::add(&mut suite);
    cuts::add(&mut suite);
    meanwhile::add(&mut suite);
    suite.main()
}
