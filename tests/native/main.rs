// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The native tests: the release binaries as processes, on this machine's KVM, with the test guest.
//!
//! One file per feature; `harness/` has what they share. Run them with `scripts/test native`.

#![expect(
    clippy::expect_used,
    clippy::indexing_slicing,
    reason = "a test that cannot continue fails"
)]

mod adopted;
mod api_client;
mod bad_input;
mod balloon;
mod boot;
mod clients;
mod clock;
mod clones;
mod console_sockets;
mod copies;
mod core_dump;
mod cpu_baseline;
mod cpu_hotplug;
mod cuts;
mod descriptors;
mod disk_formats;
mod disk_sizes;
mod disks;
mod driver_events;
mod events;
mod exported;
mod fault_sources;
mod fault_stress;
mod figures;
mod file_zones;
mod firmware;
mod full_disk;
mod harness;
mod hostile;
mod hotplug;
mod http;
mod hung_disk;
mod in_doubt;
mod iommu;
mod landlock;
mod late_devices;
mod leaks;
mod lifecycle;
mod locks;
mod many_vcpus;
mod meanwhile;
mod memory_size;
mod metrics;
mod migrate_check;
mod migration;
mod migration_failures;
mod migration_local;
mod migration_precopy;
mod migration_recorded;
mod migration_rounds;
mod numa;
mod page_server;
mod pause;
mod platforms;
mod pmem;
mod pool_arrivals;
mod postcopy;
mod prefault;
mod preflight;
mod prezero;
mod rate_limits;
mod recorded;
mod remote;
mod report;
mod requests;
mod rtc;
mod sandbox;
mod seen;
mod segments;
mod snapshot;
mod snapshot_failures;
mod snapshot_recorded;
mod soak;
mod starting;
mod states;
mod strangers;
mod tls;
mod tpm;
mod turning;
mod unfit;
mod unread;
mod upgrade;
mod upstream_arrives;
mod upstream_doubt;
mod upstream_leaves;
mod upstream_live;
mod upstream_recorded;
mod user_devices;
mod vhost_moves;
mod vhost_peers;
mod vhost_user;
mod vsock;
mod watch;
mod watchdog;

use std::process::ExitCode;

fn main() -> ExitCode {
    if let Some(code) = vhost_user::serve_if_asked()
        .or_else(vhost_peers::serve_if_asked)
        .or_else(user_devices::serve_if_asked)
    {
        return code;
    }
    let mut suite = harness::Suite::default();
    boot::add(&mut suite);
    sandbox::add(&mut suite);
    landlock::add(&mut suite);
    firmware::add(&mut suite);
    lifecycle::add(&mut suite);
    pause::add(&mut suite);
    platforms::add(&mut suite);
    rtc::add(&mut suite);
    iommu::add(&mut suite);
    postcopy::add(&mut suite);
    tls::add(&mut suite);
    events::add(&mut suite);
    figures::add(&mut suite);
    remote::add(&mut suite);
    report::add(&mut suite);
    api_client::add(&mut suite);
    http::add(&mut suite);
    metrics::add(&mut suite);
    bad_input::add(&mut suite);
    balloon::add(&mut suite);
    memory_size::add(&mut suite);
    locks::add(&mut suite);
    disk_formats::add(&mut suite);
    rate_limits::add(&mut suite);
    leaks::add(&mut suite);
    migrate_check::add(&mut suite);
    migration::add(&mut suite);
    migration_rounds::add(&mut suite);
    snapshot::add(&mut suite);
    tpm::add(&mut suite);
    cpu_baseline::add(&mut suite);
    cpu_hotplug::add(&mut suite);
    cuts::add(&mut suite);
    turning::add(&mut suite);
    in_doubt::add(&mut suite);
    migration_local::add(&mut suite);
    unfit::add(&mut suite);
    watch::add(&mut suite);
    clock::add(&mut suite);
    seen::add(&mut suite);
    segments::add(&mut suite);
    migration_precopy::add(&mut suite);
    snapshot_recorded::add(&mut suite);
    migration_recorded::add(&mut suite);
    console_sockets::add(&mut suite);
    clones::add(&mut suite);
    copies::add(&mut suite);
    prefault::add(&mut suite);
    preflight::add(&mut suite);
    prezero::add(&mut suite);
    pool_arrivals::add(&mut suite);
    fault_sources::add(&mut suite);
    fault_stress::add(&mut suite);
    many_vcpus::add(&mut suite);
    hostile::add(&mut suite);
    hotplug::add(&mut suite);
    descriptors::add(&mut suite);
    vsock::add(&mut suite);
    clients::add(&mut suite);
    file_zones::add(&mut suite);
    suite.beside(add_beside);
    suite.main()
}

/// Tests that mind no other, as [`harness::Suite::beside`] says.
fn add_beside(suite: &mut harness::Suite) {
    // The first one, as it takes the longest.
    soak::add(suite);
    starting::add(suite);
    requests::add(suite);
    states::add(suite);
    unread::add(suite);
    upgrade::add(suite);
    hung_disk::add(suite);
    full_disk::add(suite);
    page_server::add(suite);
    pmem::add(suite);
    numa::add(suite);
    snapshot_failures::add(suite);
    migration_failures::add(suite);
    meanwhile::add(suite);
    strangers::add(suite);
    disks::add(suite);
    disk_sizes::add(suite);
    driver_events::add(suite);
    core_dump::add(suite);
    vhost_user::add(suite);
    vhost_peers::add(suite);
    vhost_moves::add(suite);
    user_devices::add(suite);
    watchdog::add(suite);
    late_devices::add(suite);
    hostile::add_beside(suite);
    adopted::add(suite);
    exported::add(suite);
    upstream_recorded::add(suite);
    upstream_arrives::add(suite);
    upstream_doubt::add(suite);
    upstream_leaves::add(suite);
    upstream_live::add(suite);
}
