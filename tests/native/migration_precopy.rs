// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Ways to copy memory while the guest writes it: many connections, compressed, cleared once a
//! round, and what is done about a guest that writes too fast. Every page is compared each time.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::harness::migrate::Reception;
use crate::harness::{Mode, Suite, Transport, Vmm, VmmBuilder, process, skip};

/// For one migration of a guest that does not want to converge.
const LIMIT_LONG: Duration = Duration::from_mins(2);

/// How often a migration is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(10);

/// Where the guest has memory that it does not write to, and how much: its workload lies below.
const IDLE_GPA: u64 = 256 << 20;
const IDLE_BYTES: usize = 32 << 20;

pub fn add(suite: &mut Suite) {
    suite.add("migration_precopy::over_8_connections_of_a_unix_socket", || {
        connections(Transport::Unix, 8);
    });
    suite.add("migration_precopy::over_128_connections", || connections(Transport::Tcp, 128));
    suite.add("migration_precopy::compressed", compressed);
    suite.add("migration_precopy::cleared_once_a_round", || {
        moves(Transport::Tcp, "dirty_clear=round,timeout_s=4,timeout_strategy=ignore");
    });
    suite.add_long("migration_precopy::throttled", LIMIT_LONG, throttled);
    suite.add_long("migration_precopy::raised_downtime", LIMIT_LONG, raised_downtime);
    suite.add("migration_precopy::postcopy_to_converge", postcopy_to_converge);
}

/// What was seen of a migration.
struct Moved {
    /// The source's events.
    events: Vec<Value>,
    /// The source's last progress document.
    last: Value,
    /// Most sockets of the source at a time, beyond those before.
    sockets: usize,
}

fn sockets(vmm: &Vmm) -> usize {
    let all = process::descriptors(vmm.pid());
    all.iter().filter(|target| target.starts_with("socket:")).count()
}

/// Looks at the source, which had so many sockets before, until its migration is over.
#[track_caller]
fn watch(source: &Vmm, before: usize) -> (Value, usize) {
    let (mut last, mut most) = (Value::Null, 0);
    let deadline = Instant::now() + LIMIT_LONG;
    while last["phase"] != "done" {
        assert!(Instant::now() < deadline && last["phase"] != "failed", "{last}");
        last = source.api().get("vm.migration-progress").ok().json();
        most = most.max(sockets(source).saturating_sub(before));
        std::thread::sleep(LOOK_EVERY);
    }
    (last, most)
}

/// Moves a guest that writes at random with these options.
#[track_caller]
fn moves(transport: Transport, options: &str) -> Moved {
    let mut source =
        VmmBuilder::guest(2, "size=320M,shared=on,prefault=on", "workload=random-write mem=192M")
            .start();
    source.wait_for_work(20_000);
    // Of what the guest writes nothing can be compressed.
    source.guest().memory().write(IDLE_GPA, &vec![0x5a; IDLE_BYTES]).expect("guest memory");
    let destination = Vmm::empty();
    let log = destination.path("source-events");
    std::fs::hard_link(source.path("events"), &log).expect("the source's events can be kept");
    let reception = Reception::start(&destination, transport, Mode::Precopy);
    let before = sockets(&source);
    source.remote_ok(&["send-migration", &format!("destination_url={},{options}", reception.url)]);
    // It is there for who asks until that one has seen the end.
    let (last, sockets) = watch(&source, before);
    let output = reception.finish();
    assert!(output.status.success(), "{output:?}\n{}", destination.output());
    assert_eq!(source.wait_for_exit(), 0, "{}", source.output());
    destination.wait_for_work(5_000);
    let (guest, mut idle) = (destination.guest(), vec![0; IDLE_BYTES]);
    guest.memory().read_or_zero(IDLE_GPA, &mut idle).expect("guest memory");
    assert!(idle.iter().all(|byte| *byte == 0x5a), "what the guest does not write is another");
    // The guest's own table says that it is zero.
    guest.memory().write(IDLE_GPA, &vec![0; IDLE_BYTES]).expect("guest memory");
    let report = destination.verify();
    assert_eq!(report.written, (192 << 20) / 4096, "every page was filled before: {report:?}");
    let text = std::fs::read_to_string(log).expect("the source's events");
    destination.shut_down();
    let events =
        serde_json::Deserializer::from_str(&text).into_iter().map_while(Result::ok).collect();
    Moved { events, last, sockets }
}

fn connections(transport: Transport, count: usize) {
    let options = format!("connections={count},timeout_s=4,timeout_strategy=ignore");
    let moved = moves(transport, &options);
    // A socket of the API that was there before may have gone.
    assert!(moved.sockets >= count, "{} sockets", moved.sockets);
    let compression = &moved.last["compression"];
    assert_eq!((&compression["raw_bytes"], &compression["decisions"]), (&json!(0), &json!(0)));
}

fn compressed() {
    let options = "compression=zstd,connections=2,timeout_s=4,timeout_strategy=ignore";
    let moved = moves(Transport::Tcp, options);
    let number = |name: &str| moved.last["compression"][name].as_u64().expect("a number");
    let (raw, sent) = (number("raw_bytes"), number("frame_bytes"));
    println!("     {raw} bytes of memory in {sent}, {} decisions", number("decisions"));
    // On a fast link each decision may be against it, and then nothing is compressed.
    assert!(number("decisions") > 0 && sent <= raw, "{}", moved.last);
}

fn numbers(events: &[Value], name: &str, property: &str) -> Vec<u64> {
    let ours = events.iter().filter(|event| event["event"] == name);
    ours.filter_map(|event| event["properties"][property].as_str()?.parse().ok()).collect()
}

fn throttled() {
    // Far less than such a guest dirties in one round at this bandwidth; it moves only because it is slowed down.
    let options =
        "convergence=throttle,downtime_ms=16,bandwidth=96M,timeout_s=100,timeout_strategy=cancel";
    let events = moves(Transport::Tcp, options).events;
    let percents = numbers(&events, "migration-throttled", "percent");
    println!("     throttled to {percents:?} percent");
    assert_eq!(percents.first(), Some(&20), "{percents:?}");
    assert!(percents.is_sorted() && percents.iter().all(|percent| *percent <= 99), "{percents:?}");
}

fn raised_downtime() {
    let options = "convergence=raise-downtime,downtime_ms=8,downtime_max_ms=60000,timeout_s=60";
    let events = moves(Transport::Tcp, options).events;
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
