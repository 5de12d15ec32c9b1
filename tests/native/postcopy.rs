// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Postcopy between two processes when something happens in its middle: connections that are cut
//! again and again, commands, a guest that is paused; every page is compared afterwards.
//!
//! `GODWIT_CUTS=100` makes the full number of cuts; otherwise 5.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use serde_json::Value;

use crate::harness::migrate::{Reception, wait_for_done};
use crate::harness::{Mode, Suite, Transport, Vmm, VmmBuilder, is_root, skip, wait_for};

/// A guest that touches all of its 96 MiB once and then a fiftieth of it, over and over: requested pages are not
/// limited, and vCPUs that go as fast as they can have requested all of them within a second or two.
pub const SPARING: &str = "workload=hot-write mem=96M hot_permille=20 hot_percent=100";

/// As fast as it can.
const BUSY: &str = "workload=random-write mem=96M";

/// Bytes per second that leave time for something to happen: of a sparing guest 96 MiB take more than 5 s.
const SLOW: &str = "bandwidth=16M";

/// Longer than the period of a watchdog (20 s).
const OUTAGE: Duration = Duration::from_secs(24);

/// For so many cuts.
const LIMIT_EACH_CUT: Duration = Duration::from_secs(10);

pub fn add(suite: &mut Suite) {
    let cuts = std::env::var("GODWIT_CUTS").ok().and_then(|text| text.parse().ok()).unwrap_or(5);
    let limit = Duration::from_mins(2) + LIMIT_EACH_CUT * cuts;
    let cuts_heal = move |receiving| soak(cuts, Mode::Postcopy, receiving, |_| ());
    suite.add_long("postcopy::cuts_heal_without_a_command", limit, move || cuts_heal(""));
    suite.add_long("postcopy::cuts_heal_while_vcpus_bring_their_pages", limit, move || {
        if !is_root() {
            skip("fault_source=sigbus needs CAP_BPF and CAP_PERFMON");
        }
        cuts_heal(",fault_source=sigbus");
    });
    suite.add("postcopy::recovery_on_command_at_another_address", recover);
    suite.add("postcopy::auto_switches_on_command", switch);
    suite.add("postcopy::a_source_with_needed_pages_is_not_ended_without_force", force);
    suite
        .add("postcopy::a_source_that_was_told_to_end_ends_when_it_is_deleted", force_after_signal);
    suite.add("postcopy::a_pause_is_refused_until_the_last_page", pause);
    suite.add("postcopy::a_pause_is_taken_as_soon_as_the_end_is_told", pause_at_the_end);
    suite.add_long("postcopy::no_watchdog_runs_out_while_pages_are_missing", OUTAGE * 4, outage);
    suite.add("postcopy::requests_may_share_the_bulk_connection", no_preempt);
    suite.add("postcopy::many_connections_of_each_kind", many);
}

/// Passes TCP connections on and can cut them.
pub struct Cutter {
    pub url: String,
    streams: Arc<Mutex<Vec<[TcpStream; 2]>>>,
    shut: Arc<Mutex<bool>>,
}

impl Cutter {
    pub fn start(to: &str) -> Self {
        let to = to.strip_prefix("tcp:").expect("a tcp address").to_owned();
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let url = format!("tcp:{}", listener.local_addr().expect("an address"));
        let streams: Arc<Mutex<Vec<[TcpStream; 2]>>> = Arc::default();
        let shut = Arc::new(Mutex::new(false));
        let (all, closed) = (Arc::clone(&streams), Arc::clone(&shut));
        std::thread::spawn(move || {
            while let Ok((source, _)) = listener.accept() {
                if *closed.lock() {
                    continue;
                }
                let Ok(destination) = TcpStream::connect(&to) else { continue };
                pass(&source, &destination);
                pass(&destination, &source);
                let ends = [source, destination];
                all.lock().push(ends);
            }
        });
        Self { url, streams, shut }
    }

    /// Cuts all connections, or of the last `of` the one with this number.
    pub fn cut(&self, one: Option<usize>, of: usize) {
        let streams = self.streams.lock();
        let last = streams.len().saturating_sub(of);
        for (number, ends) in streams[last..].iter().enumerate() {
            if one.is_none_or(|one| one == number) {
                for end in ends {
                    let _ = end.shutdown(Shutdown::Both);
                }
            }
        }
    }

    pub fn set_shut(&self, shut: bool) {
        *self.shut.lock() = shut;
    }
}

fn pass(from: &TcpStream, to: &TcpStream) {
    let clone = |stream: &TcpStream| {
        stream.set_nodelay(true).expect("a TCP stream");
        stream.try_clone().expect("a descriptor")
    };
    let (mut from, mut to) = (clone(from), clone(to));
    std::thread::spawn(move || {
        let mut buffer = vec![0; 64 << 10];
        while let Ok(len @ 1..) = from.read(&mut buffer) {
            if to.write_all(&buffer[..len]).is_err() {
                break;
            }
        }
        let _ = (from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both));
    });
}

pub fn progress(vmm: &Vmm) -> Value {
    vmm.api().get("vm.migration-progress").ok().json()
}

pub fn phase(vmm: &Vmm) -> String {
    progress(vmm)["phase"].as_str().unwrap_or_default().to_owned()
}

pub fn wait_for_phase(vmm: &Vmm, wanted: &str) {
    wait_for(wanted, || (phase(vmm) == wanted).then_some(()));
}

/// A guest under way in postcopy through a cutter, and the one that receives it.
pub struct Middle {
    source: Vmm,
    pub destination: Vmm,
    pub cutter: Cutter,
    /// Where the destination itself listens.
    pub url: String,
    reception: Reception,
}

impl Middle {
    pub fn start(options: &str) -> Self {
        Self::start_with(SPARING, options, "")
    }

    /// `receiving` are options of the destination, which begin with a comma.
    fn start_with(workload: &str, options: &str, receiving: &str) -> Self {
        let source = Vmm::boot(2, "size=192M,shared=on", workload);
        Self::of(source, Mode::Postcopy, options, receiving)
    }

    /// With a source of its own.
    fn of(source: Vmm, mode: Mode, options: &str, receiving: &str) -> Self {
        source.wait_for_work(5_000);
        let destination = Vmm::empty();
        let reception = Reception::start_with(&destination, Transport::Tcp, mode, receiving);
        let cutter = Cutter::start(&reception.url);
        let mode = mode.name();
        let option = format!("destination_url={},memory_mode={mode},{options}", cutter.url);
        source.remote_ok(&["send-migration", &option]);
        wait_for_phase(&destination, "fault");
        let url = reception.url.clone();
        Self { source, destination, cutter, url, reception }
    }

    /// Everything arrives and is right.
    pub fn finish(self) -> Value {
        let Self { mut source, destination, reception, .. } = self;
        assert!(reception.finish().status.success(), "{}", destination.output());
        wait_for_phase(&destination, "done");
        let last = progress(&destination);
        assert_eq!(source.wait_for_exit(), 0, "{}", source.output());
        destination.wait_for_work(5_000);
        destination.verify();
        destination.shut_down();
        last
    }
}

/// Cuts connections of migrations until so many have been cut; each ends well, with every page. Precopy comes to an
/// eighth of memory, where it comes first. When all pages of a guest are here, it is shown to `look`.
pub fn soak(cuts: u32, mode: Mode, receiving: &str, look: impl Fn(&Vmm)) {
    let first = if mode == Mode::Auto { ",downtime_ms=1,postcopy_after_s=3" } else { "" };
    let options = format!("bandwidth=4M,preempt=2,connections=2{first}");
    let mut number = 0x2545_f491_4f6c_dd1d_u64;
    let mut done = 0;
    while done < cuts {
        let source = Vmm::boot(2, "size=192M,shared=on", BUSY);
        let run = Middle::of(source, mode, &options, receiving);
        while done < cuts && phase(&run.destination) != "done" {
            number = number.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let one = usize::try_from(number >> 40 & 15).unwrap_or(0);
            let losses = progress(&run.destination)["recovery"]["losses"].clone();
            run.cutter.cut((one < 5).then_some(one), 5);
            done += 1;
            // At any moment after the loss: while it heals, or after that.
            wait_for("the loss", || {
                let now = progress(&run.destination);
                (now["recovery"]["losses"] != losses || now["phase"] == "done").then_some(())
            });
            std::thread::sleep(Duration::from_millis(number >> 48 & 255));
        }
        wait_for_phase(&run.destination, "done");
        look(&run.destination);
        let last = run.finish();
        println!("     {done} cuts so far, recovery: {}", last["recovery"]);
    }
}

fn recover() {
    let run = Middle::start(&format!("{SLOW},recover_timeout_s=0"));
    // The destination may be ahead of it.
    wait_for_phase(&run.source, "serve");
    let refused = run.source.remote(&["migration-recover"]);
    let text = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(text.contains("nothing is to recover"), "{text}");
    run.cutter.set_shut(true);
    run.cutter.cut(None, usize::MAX);
    wait_for_phase(&run.source, "postcopy-paused");
    wait_for_phase(&run.destination, "postcopy-paused");
    run.source.wait_for_event("postcopy-migration-paused");
    let info = run.destination.api().get("vm.info").ok().json();
    assert_eq!(info["state"], "Running", "vCPUs that need no page continue");
    assert!(info["postcopy_paused"].as_str().is_some_and(|why| !why.is_empty()), "{info}");
    assert_eq!(progress(&run.source)["recovery"]["left_ms"], 0, "it waits for a command");
    let there = format!("unix:{}", run.destination.path("again").display());
    run.destination.remote_ok(&["migration-recover", &there]);
    let socket = run.destination.path("again");
    wait_for("the new address", || socket.exists().then_some(()));
    run.source.remote_ok(&["migration-recover", &there]);
    run.finish();
}

fn switch() {
    let source = Vmm::boot(2, "size=192M,shared=on", BUSY);
    source.wait_for_work(5_000);
    let destination = Vmm::empty();
    let reception = Reception::start(&destination, Transport::Tcp, Mode::Auto);
    let early = source.remote(&["migration-start-postcopy"]);
    assert!(!early.status.success(), "nothing is being sent yet");
    let option = format!(
        "destination_url={},memory_mode=auto,downtime_ms=1,timeout_s=600,convergence=throttle",
        reception.url
    );
    source.remote_ok(&["send-migration", &option]);
    wait_for_phase(&source, "precopy");
    source.remote_ok(&["migration-start-postcopy"]);
    let mut source = source;
    assert!(reception.finish().status.success(), "{}", destination.output());
    wait_for_phase(&destination, "done");
    assert!(progress(&destination)["faults"]["source"].is_string(), "it was postcopy");
    assert_eq!(source.wait_for_exit(), 0, "{}", source.output());
    destination.wait_for_work(5_000);
    destination.verify();
    destination.shut_down();
}

fn force() {
    let run = Middle::start(SLOW);
    run.cutter.set_shut(true);
    run.cutter.cut(None, usize::MAX);
    wait_for_phase(&run.source, "postcopy-paused");
    for command in ["delete", "shutdown-vmm"] {
        let refused = run.source.remote(&[command]);
        let text = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(!refused.status.success() && text.contains("force"), "{command}: {text}");
    }
    let refused = run.destination.remote(&["shutdown-vmm"]);
    assert!(!refused.status.success(), "the guest waits for its pages");
    let Middle { mut source, destination, .. } = run;
    source.remote_ok(&["shutdown-vmm", "--force"]);
    assert_eq!(source.wait_for_exit(), 0, "{}", source.output());
    let mut destination = destination;
    let socket = destination.path("again");
    destination.remote_ok(&["migration-recover", &format!("unix:{}", socket.display())]);
    wait_for("the new address", || socket.exists().then_some(()));
    destination.remote_ok(&["shutdown-vmm", "--force"]);
    assert_eq!(destination.wait_for_exit(), 0, "{}", destination.output());
    assert!(!socket.exists(), "the socket for its source is left");
}

/// The signal waits for the last page; when the pages are released nothing is left to wait for.
fn force_after_signal() {
    let run = Middle::start(SLOW);
    run.cutter.set_shut(true);
    run.cutter.cut(None, usize::MAX);
    wait_for_phase(&run.source, "postcopy-paused");
    let Middle { mut source, destination, .. } = run;
    source.signal(libc::SIGTERM);
    wait_for("the log", || source.output().contains("told to end").then_some(()));
    source.api().put("vm.delete", r#"{"force":true}"#).ok();
    assert_eq!(source.wait_for_exit(), 0, "{}", source.output());
    destination.remote_ok(&["shutdown-vmm", "--force"]);
}

fn pause() {
    let run = Middle::start(SLOW);
    for command in ["pause", "delete"] {
        let refused = run.destination.remote(&[command]);
        let text = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(!refused.status.success() && text.contains("still arriving"), "{command}: {text}");
    }
    assert_eq!(run.destination.api().state(), "Running");
    run.finish();
}

/// A client may follow the events: what they call done is done, while the threads of the connections still end.
fn pause_at_the_end() {
    let mut here = Vmm::boot(2, "size=64M,shared=on", "workload=random-write mem=24M");
    let mut is_early = false;
    for round in 0.. {
        if is_early && round >= 3 {
            break;
        }
        assert!(round < 20, "each end was processed before it was seen");
        here.wait_for_work(2_000);
        let there = Vmm::empty();
        let reception = Reception::start(&there, Transport::Tcp, Mode::Postcopy);
        let option = format!(
            "destination_url={},memory_mode=postcopy,connections=64,preempt=8",
            reception.url
        );
        here.remote_ok(&["send-migration", &option]);
        is_early |= wait_for_done(&there);
        there.verify();
        assert!(reception.finish().status.success(), "{}", there.output());
        assert_eq!(here.wait_for_exit(), 0, "{}", here.output());
        here = there;
    }
    here.shut_down();
}

/// vCPUs wait for pages for longer than a watchdog would: its clock stands. Time itself is what happens here.
fn outage() {
    // At a pace at which most pages are missing when the connections are cut: every vCPU waits soon after.
    let guest = format!("{BUSY} pace_ns=200000 watchdog=1");
    let source = VmmBuilder::guest(2, "size=192M,shared=on", &guest).with(&["--watchdog"]).start();
    source.guest();
    let run = Middle::of(source, Mode::Postcopy, "bandwidth=4M,connections=2", "");
    run.cutter.set_shut(true);
    run.cutter.cut(None, usize::MAX);
    wait_for_phase(&run.destination, "postcopy-paused");
    let until = Instant::now() + OUTAGE;
    while Instant::now() < until {
        let output = run.destination.output();
        assert!(!output.contains("WatchdogExpired"), "the guest is taken for stuck:\n{output}");
        std::thread::sleep(Duration::from_millis(200));
    }
    assert_eq!(phase(&run.destination), "postcopy-paused", "it still waits");
    run.cutter.set_shut(false);
    run.finish();
}

fn no_preempt() {
    let run = Middle::start(&format!("{SLOW},preempt=0"));
    run.cutter.cut(None, usize::MAX);
    let last = run.finish();
    assert_eq!(last["recovery"]["recoveries"], 1, "{last}");
}

fn many() {
    let last = Middle::start_with(BUSY, "connections=4,preempt=8", "").finish();
    assert!(last["faults"]["latency_us"]["count"].as_u64() > Some(0), "{last}");
}
