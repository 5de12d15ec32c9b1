// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Clients other than the source that connect to a destination; and a source whose configuration names what it
//! has no business with.

use std::fs;
use std::io::Write as _;
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::harness::migrate::{Reception, failure_after, send_option};
use crate::harness::{Mode, Suite, Transport, Vmm, VmmBuilder, image, wait_for};
use crate::postcopy::Middle;

pub fn add(suite: &mut Suite) {
    for mode in [Mode::Precopy, Mode::Postcopy] {
        let name = mode.name();
        suite.add(&format!("strangers::{name}_does_not_wait_for_them"), move || moved(mode));
    }
    suite.add("strangers::recovery_does_not_wait_for_them", recovered);
    suite.add("strangers::rules_refuse_by_name_before_anything_is_opened", ruled);
    suite.add("strangers::what_a_file_holds_is_kept", kept);
}

/// Longest that the guest may stand still with strangers about: a source gives up after 30 s, and one that
/// waited for a stranger would wait for 2 s or more.
const PAUSE_MAX: Duration = Duration::from_millis(1500);

/// Strangers of all kinds at an address, until it is dropped.
struct Strangers {
    end: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Strangers {
    fn start(url: &str) -> Self {
        let to = url.trim_start_matches("tcp:").to_owned();
        let end = Arc::new(AtomicBool::new(false));
        let ended = Arc::clone(&end);
        let thread = std::thread::spawn(move || {
            let mut kept: Vec<TcpStream> = Vec::new();
            let mut count = 0_u32;
            while !ended.load(Ordering::Relaxed) {
                count += 1;
                if let Ok(mut stream) = TcpStream::connect(&to) {
                    stream.set_nonblocking(true).expect("a TCP stream");
                    match count % 4 {
                        // A port scan, and a request for another server.
                        0 => drop(stream),
                        1 => drop(stream.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")),
                        // Silence, and a byte now and then, are kept.
                        _ if kept.len() < 200 => kept.push(stream),
                        _ => {}
                    }
                }
                for stream in kept.iter_mut().step_by(2) {
                    let _ = stream.write(&[2]);
                }
                std::thread::sleep(Duration::from_millis(3));
            }
        });
        Self { end, thread: Some(thread) }
    }
}

impl Drop for Strangers {
    fn drop(&mut self) {
        self.end.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn time_of(events: &[Value], side: &str, phase: &str) -> Option<Duration> {
    let event = events.iter().find(|event| {
        event["event"] == "migration-phase"
            && event["properties"]["side"] == side
            && event["properties"]["phase"] == phase
    })?;
    let time = &event["timestamp"];
    let nanos = u32::try_from(time["nanos"].as_u64()?).ok()?;
    Some(Duration::new(time["secs"].as_u64()?, nanos))
}

/// From the stop of the guest to the source's word that it has left, by the source's clock.
fn pause(source: &Vmm) -> Duration {
    let events = source.events();
    let begun = time_of(&events, "source", "stop").expect("the guest was stopped");
    let ended = ["serve", "done"].iter().find_map(|phase| time_of(&events, "source", phase));
    ended.expect("the guest has left").saturating_sub(begun)
}

fn moved(mode: Mode) {
    let mut source = Vmm::boot(2, "size=192M,shared=on", "workload=random-write mem=32M");
    source.wait_for_work(5_000);
    let destination = Vmm::empty();
    let reception = Reception::start(&destination, Transport::Tcp, mode);
    let strangers = Strangers::start(&reception.url);
    // Those that were there before the source.
    std::thread::sleep(Duration::from_millis(500));
    let began = Instant::now();
    source.remote_ok(&["send-migration", &send_option(&reception.url, mode)]);
    let output = reception.finish();
    assert!(output.status.success(), "{output:?}\n{}", destination.output());
    wait_for("the last page", || {
        let progress = destination.api().get("vm.migration-progress").ok().json();
        (progress["phase"] == "done").then_some(())
    });
    assert_eq!(source.wait_for_exit(), 0, "{}", source.output());
    let pause = pause(&source);
    println!("     {}: {:?} in all, the guest stood {pause:?}", mode.name(), began.elapsed());
    drop(strangers);
    assert!(pause < PAUSE_MAX, "the guest stood still for {pause:?}");
    let warnings = destination.output().matches("was turned away").count();
    assert!(warnings <= 12, "{warnings} lines of the log are about strangers");
    destination.wait_for_work(5_000);
    destination.verify();
    destination.shut_down();
}

fn recovered() {
    let run = Middle::start("bandwidth=16M,preempt=2,connections=2");
    let strangers = Strangers::start(&run.url);
    run.cutter.cut(None, usize::MAX);
    let began = Instant::now();
    wait_for("the recovery", || {
        let progress = run.destination.api().get("vm.migration-progress").ok().json();
        let losses = progress["recovery"]["losses"].as_u64().unwrap_or(0);
        let on = ["fault", "done"].iter().any(|phase| progress["phase"] == *phase);
        (losses > 0 && on).then_some(())
    });
    let took = began.elapsed();
    println!("     recovered after {took:?}");
    assert!(took < Duration::from_secs(8), "strangers held the source up for {took:?}");
    run.finish();
    drop(strangers);
}

/// A guest with a disk and a console that writes to a file, and a migration of it under these rules.
fn ruled() {
    let folder = tempfile::tempdir().expect("a folder");
    let at = |name: &str| folder.path().join(name).display().to_string();
    fs::create_dir(at("vms")).expect("a folder");
    let disk = fs::File::create(at("vms/disk")).expect("a disk");
    disk.set_len(1 << 20).expect("room");
    let source = VmmBuilder::new(&["--serial", &format!("file={}", at("secret"))])
        .with(&["--console", "off", "--kernel", image()])
        .with(&["--cpus", "boot=1", "--memory", "size=96M,shared=on"])
        .with(&["--cmdline", "workload=random-write mem=32M"])
        .with(&["--disk", &format!("path={},id=root", at("vms/disk"))])
        .start();
    source.guest();
    source.wait_for_work(1_000);
    let kernel = image();
    let said = fs::read(at("secret")).expect("the console's file");
    let destination = Vmm::empty();
    for (rules, words) in [
        (String::new(), ["kernel", ":payload"]),
        (format!("{kernel}:payload,{}:disk", at("vms")), ["serial console", "secret"]),
        (format!("{kernel}:payload,{}:console", at("")), ["root", "vms/disk"]),
    ] {
        let more = format!(",allow=[{rules}]");
        let reception = Reception::start_with(&destination, Transport::Tcp, Mode::Precopy, &more);
        let before = source.events().len();
        source.remote_ok(&["send-migration", &send_option(&reception.url, Mode::Precopy)]);
        let output = reception.finish();
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{error}");
        // The source hears of it on its own connection, later perhaps than the client there; a VM that is being
        // sent runs, too.
        let reason = failure_after(&source, before);
        assert_eq!(source.api().state(), "Running");
        for word in words {
            assert!(error.contains(word), "no {word:?} in {error}");
            assert!(reason.contains(word), "no {word:?} in {reason}");
            wait_for("its log", || source.output().contains(word).then_some(()));
        }
        assert_eq!(fs::read(at("secret")).expect("the console's file"), said, "it was opened");
    }
    let rules = format!("[{kernel}:payload,{}:disk+console]", at(""));
    let more = format!(",allow={rules}");
    let reception = Reception::start_with(&destination, Transport::Tcp, Mode::Precopy, &more);
    source.remote_ok(&["send-migration", &send_option(&reception.url, Mode::Precopy)]);
    let output = reception.finish();
    assert!(output.status.success(), "{output:?}");
    destination.wait_for_work(1_000);
    destination.verify();
    destination.shut_down();
}

/// Without rules, too: the console's file of the source is that of the destination here, and what is in it
/// stays.
fn kept() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("authorized_keys");
    fs::write(&path, "not to be lost\n").expect("a file");
    let mut source = VmmBuilder::new(&["--serial", &format!("file={}", path.display())])
        .with(&["--console", "off", "--kernel", image()])
        .with(&["--cpus", "boot=1", "--memory", "size=96M,shared=on"])
        .with(&["--cmdline", "workload=random-write mem=32M"])
        .start();
    source.guest();
    source.wait_for_work(1_000);
    let destination = Vmm::empty();
    let reception = Reception::start(&destination, Transport::Tcp, Mode::Precopy);
    source.remote_ok(&["send-migration", &send_option(&reception.url, Mode::Precopy)]);
    assert!(reception.finish().status.success(), "{}", destination.output());
    assert_eq!(source.wait_for_exit(), 0);
    destination.wait_for_work(1_000);
    let text = fs::read_to_string(&path).expect("a file");
    assert!(text.starts_with("not to be lost\n"), "{text:?}");
    destination.shut_down();
}
