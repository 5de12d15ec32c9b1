// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Ways to copy memory while the guest writes it: many connections, compressed, cleared once a
//! round, and what is done about a guest that writes too fast. Every page is compared each time.

use std::time::Duration;

use serde_json::Value;

use crate::harness::migrate::Reception;
use crate::harness::{Mode, Suite, Transport, Vmm, skip};

/// For one migration of a guest that does not want to converge.
const LIMIT_LONG: Duration = Duration::from_mins(2);

pub fn add(suite: &mut Suite) {
    suite.add("migration_precopy::over_8_connections_of_a_unix_socket", || {
        moves(Transport::Unix, "connections=8,timeout_s=4,timeout_strategy=ignore");
    });
    suite.add("migration_precopy::over_128_connections", || {
        moves(Transport::Tcp, "connections=128,timeout_s=4,timeout_strategy=ignore");
    });
    suite.add("migration_precopy::compressed", compressed);
    suite.add("migration_precopy::cleared_once_a_round", || {
        moves(Transport::Tcp, "dirty_clear=round,timeout_s=4,timeout_strategy=ignore");
    });
    suite.add_long("migration_precopy::throttled", LIMIT_LONG, throttled);
    suite.add_long("migration_precopy::raised_downtime", LIMIT_LONG, raised_downtime);
    suite.add("migration_precopy::postcopy_to_converge", postcopy_to_converge);
}

/// Moves a guest that writes at random with these options; returns the source's events.
#[track_caller]
fn moves(transport: Transport, options: &str) -> Vec<Value> {
    let mut source = Vmm::boot(2, "size=320M,shared=on", "workload=random-write mem=192M");
    source.wait_for_work(20_000);
    let destination = Vmm::empty();
    let log = destination.path("source-events");
    std::fs::hard_link(source.path("events"), &log).expect("the source's events can be kept");
    let reception = Reception::start(&destination, transport, Mode::Precopy);
    source.remote_ok(&["send-migration", &format!("destination_url={},{options}", reception.url)]);
    let output = reception.finish();
    assert!(output.status.success(), "{output:?}\n{}", destination.output());
    assert_eq!(source.wait_for_exit(), 0, "{}", source.output());
    destination.wait_for_work(5_000);
    let report = destination.verify();
    assert_eq!(report.written, (192 << 20) / 4096, "every page was filled before: {report:?}");
    let text = std::fs::read_to_string(log).expect("the source's events");
    destination.shut_down();
    serde_json::Deserializer::from_str(&text).into_iter().map_while(Result::ok).collect()
}

fn compressed() {
    moves(Transport::Tcp, "compression=zstd,connections=2,timeout_s=4,timeout_strategy=ignore");
}

fn numbers(events: &[Value], name: &str, property: &str) -> Vec<u64> {
    let ours = events.iter().filter(|event| event["event"] == name);
    ours.filter_map(|event| event["properties"][property].as_str()?.parse().ok()).collect()
}

fn throttled() {
    // Far less than such a guest dirties in one round; it moves only because it is slowed down.
    let options = "convergence=throttle,downtime_ms=16,timeout_s=60,timeout_strategy=cancel";
    let events = moves(Transport::Tcp, options);
    let percents = numbers(&events, "migration-throttled", "percent");
    println!("     throttled to {percents:?} percent");
    assert_eq!(percents.first().copied().unwrap_or(20), 20, "{percents:?}");
    assert!(percents.is_sorted() && percents.iter().all(|percent| *percent <= 99), "{percents:?}");
}

fn raised_downtime() {
    let options = "convergence=raise-downtime,downtime_ms=8,downtime_max_ms=60000,timeout_s=60";
    let events = moves(Transport::Tcp, options);
    let allowed = numbers(&events, "migration-downtime-allowed", "allowed_downtime_us");
    println!("     allowed {allowed:?} us");
    if allowed.is_empty() {
        skip("this host is fast enough for the downtime that was asked for");
    }
    assert!(allowed.is_sorted(), "{allowed:?}");
}

/// A guest that precopy alone would not bring over in time: it writes more than the bandwidth lets pass.
fn postcopy_to_converge() {
    let mut source = Vmm::boot(2, "size=192M,shared=on", "workload=random-write mem=128M");
    source.wait_for_work(2_000);
    let there = Vmm::empty();
    let reception = Reception::start(&there, Transport::Tcp, Mode::Postcopy);
    let option = format!(
        "destination_url={},convergence=postcopy,downtime_ms=1,timeout_s=60,bandwidth=32M",
        reception.url
    );
    source.remote_ok(&["send-migration", "--wait", &option]);
    assert!(reception.finish().status.success(), "{}", there.output());
    assert_eq!(source.wait_for_exit(), 0, "{}", source.output());
    there.wait_for_event("postcopy-migration-completed");
    there.wait_for_work(2_000);
    there.verify();
    there.shut_down();
}
