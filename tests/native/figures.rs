// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What an operator is told: the figures of a migration at both of its ends, what a VM waits for, and
//! what is refused while one is in progress.

use std::net::TcpListener;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::harness::migrate::Reception;
use crate::harness::{Mode, Suite, Transport, Vmm, VmmBuilder, wait_for};
use crate::postcopy::progress;

pub fn add(suite: &mut Suite) {
    for mode in [Mode::Precopy, Mode::Postcopy, Mode::Auto] {
        suite.add(&format!("figures::of_{}", mode.name()), move || both_sides(mode));
    }
    suite.add("figures::bandwidth_limits_precopy", limited);
    suite.add("figures::a_silent_peer_does_not_keep_a_vm_paused", silent);
    suite.add("figures::prefault_beyond_the_host_is_refused", too_large);
}

fn property<'a>(event: &'a Value, name: &str) -> &'a str {
    event["properties"][name].as_str().unwrap_or_else(|| panic!("no {name} in {event}"))
}

/// Neither side knows less than the other, and nothing unknown is 0.
fn both_sides(mode: Mode) {
    let mut source = Vmm::boot(2, "size=192M,shared=on", "workload=random-write mem=64M");
    source.wait_for_work(5_000);
    let destination = Vmm::empty();
    let kept = destination.path("source-log");
    std::fs::hard_link(source.path("log"), &kept).expect("the source's log can be kept");
    // The time until the source connects does not count.
    let reception = Reception::start(&destination, Transport::Tcp, mode);
    std::thread::sleep(Duration::from_millis(1500));
    let began = Instant::now();
    let early = if mode == Mode::Auto { ",postcopy_after_s=0" } else { "" };
    let option = format!(
        "destination_url={},memory_mode={},timeout_s=4,timeout_strategy=ignore{early}",
        reception.url,
        mode.name()
    );
    source.remote_ok(&["send-migration", &option]);
    let here = source.wait_for_event("migration-finished");
    assert!(reception.finish().status.success(), "{}", destination.output());
    let end = match mode {
        Mode::Precopy => "migration-receive-finished",
        Mode::Postcopy | Mode::Auto => "postcopy-migration-completed",
    };
    let there = destination.wait_for_event(end);
    let took_ms = u64::try_from(began.elapsed().as_millis()).expect("some time");
    for event in [&here, &there] {
        assert_eq!(property(event, "mode"), mode.name());
        assert!(event["wallclock"].as_str().is_some_and(|text| text.ends_with('Z')), "{event}");
        let number = |name| property(event, name).parse::<u64>().expect("a number");
        assert!(number("downtime_us") > 0 && number("bytes") > 0, "{event}");
        assert!((1..=took_ms).contains(&number("total_ms")), "{took_ms} ms, {event}");
        assert_eq!(number("memory_bytes"), 192 << 20);
    }
    for name in ["rounds", "postcopy"] {
        assert_eq!(property(&here, name), property(&there, name), "{name}");
    }
    if mode != Mode::Precopy {
        assert_eq!(property(&here, "faults"), property(&there, "faults"));
    }
    let document = wait_for("the end", || {
        let document = progress(&destination);
        (document["phase"] == "done").then_some(document)
    });
    assert_eq!(document["downtime_us"].to_string(), property(&there, "downtime_us"));
    // The event may have been told a moment before the clock of the document was stopped.
    let took_ms = u64::try_from(began.elapsed().as_millis()).expect("some time");
    assert!(document["elapsed_ms"].as_u64().is_some_and(|ms| ms <= took_ms), "{document}");
    assert_eq!(source.wait_for_exit(), 0, "{}", source.output());
    let source_log = std::fs::read_to_string(kept).expect("the source's log");
    let is_over = |log: &str| log.contains("the migration is over");
    let destination_log = wait_for("the last line of the log", || {
        Some(destination.output()).filter(|log| is_over(log))
    });
    for log in [source_log, destination_log] {
        let line = log.lines().find(|line| is_over(line));
        let line = line.unwrap_or_else(|| panic!("nothing is said of the end: {log}"));
        assert!(line.contains(" in all, downtime ") && !line.contains("unknown"), "{line}");
    }
    destination.verify();
    destination.shut_down();
}

/// 48 MiB/s for at least 96 MiB; the guest writes faster than that, and is moved all the same.
fn limited() {
    let source = Vmm::boot(1, "size=192M,shared=on", "workload=random-write mem=96M prefill=1");
    source.wait_for_heartbeat();
    let destination = Vmm::empty();
    let reception = Reception::start(&destination, Transport::Tcp, Mode::Precopy);
    let option = format!(
        "destination_url={},connections=2,bandwidth=48M,timeout_s=3,timeout_strategy=ignore",
        reception.url
    );
    source.remote_ok(&["send-migration", "--wait", &option]);
    assert!(reception.finish().status.success(), "{}", destination.output());
    let document = progress(&destination);
    let moved = document["memory_bytes_received"].as_u64().expect("bytes");
    let least_ms = moved.saturating_sub(8 << 20) * 1000 / (48 << 20);
    let took_ms = document["elapsed_ms"].as_u64().expect("a time");
    assert!(moved > 64 << 20 && took_ms >= least_ms, "{moved} bytes in {took_ms} ms");
    destination.shut_down();
}

/// The peer takes connections and says nothing: the VM is not there for it to keep.
fn silent() {
    let vmm = Vmm::boot(1, "size=128M,shared=on", "workload=random-write mem=32M");
    let api = vmm.api();
    api.put("vm.pause", "").ok();
    let peer = TcpListener::bind("127.0.0.1:0").expect("a port");
    let url = format!("tcp:{}", peer.local_addr().expect("an address"));
    api.put("vm.send-migration", &format!(r#"{{"destination_url":"{url}"}}"#)).ok();
    let _connection = peer.accept().expect("the source connects");
    for (request, body) in [
        ("vm.resize", r#"{"desired_balloon":0}"#),
        ("vm.resize-zone", r#"{"id":"mem0","desired_ram":1}"#),
        ("vm.pause", ""),
    ] {
        let answer = api.put(request, body);
        assert_eq!(answer.status, 409, "{request}: {answer:?}");
    }
    let began = Instant::now();
    api.put("vm.resume", "").ok();
    assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
    assert_eq!(api.state(), "Running");
    let failed = vmm.wait_for_event("migration-failed");
    assert!(failed["properties"]["error"].to_string().contains("cancel"), "{failed}");
    vmm.wait_for_work(1000);
    let empty = api.put("vm.resize", "{}");
    assert!(empty.status == 400 && empty.body.contains("desired_ram"), "{empty:?}");
    vmm.verify();
    vmm.shut_down();
}

fn too_large() {
    let (code, output) = VmmBuilder::guest(1, "size=8T,shared=on,prefault=on", "").bare().run();
    assert_eq!(code, 1, "{output}");
    assert!(output.contains("guest memory needs 8388608 MiB"), "{output}");
    assert!(output.contains("MiB available") && output.contains("prefault=off"), "{output}");
}
