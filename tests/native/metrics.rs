// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Metrics as a monitoring system reads them: of a guest at work, paused, and on its way in postcopy; their socket; and
//! clients of it that mean no good.

use std::collections::BTreeMap;
use std::io::{Read as _, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Instant;

use tempfile::TempDir;

use crate::disks::{Disk, MEMORY, write_more};
use crate::harness::api::Answer;
use crate::harness::migrate::Reception;
use crate::harness::vmm::finish;
use crate::harness::{Api, Mode, Suite, Transport, Vmm, VmmBuilder, skip, wait_for};
use crate::landlock::confined_guest;
use crate::postcopy::{SPARING, wait_for_phase};
use crate::requests::PROMPT;

pub fn add(suite: &mut Suite) {
    suite.add("metrics::counters_move_while_the_guest_works", at_work);
    suite.add("metrics::top_shows_a_guest_at_work_until_its_vmm_ends", top);
    suite.add("metrics::both_sides_of_a_postcopy_are_scraped", in_postcopy);
    suite.add("metrics::their_socket_is_that_of_the_owner_and_of_one_vmm", socket);
    suite.add("metrics::a_confined_vm_has_them_and_removes_their_socket", confined);
    suite.add("metrics::hostile_clients_delay_neither_scrapes_nor_the_guest", hostile);
    suite.add("metrics::promtool_finds_no_fault", promtool);
}

/// A socket of metrics in a folder of its own.
struct Scraped {
    folder: TempDir,
}

/// Samples by name and labels, as they are written.
struct Scrape(BTreeMap<String, f64>);

impl Scraped {
    fn new() -> Self {
        Self { folder: TempDir::with_prefix("godwit-metrics-").expect("a folder") }
    }

    fn path(&self) -> PathBuf {
        self.folder.path().join("metrics")
    }

    /// Options of the VMM.
    fn options(&self) -> [String; 2] {
        ["--metrics".to_owned(), format!("unix:{}", self.path().display())]
    }

    fn vmm(&self, builder: VmmBuilder) -> Vmm {
        builder.with(&self.options()).start()
    }

    fn ask(&self, headers: &str) -> Answer {
        let text =
            format!("GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{headers}\r\n");
        Api::new(&self.path()).raw(text.as_bytes()).expect("an answer")
    }

    /// A scrape, which has all and comes in time.
    #[track_caller]
    fn scrape(&self) -> Scrape {
        let begun = Instant::now();
        let text = self.ask("").ok().body;
        assert!(begun.elapsed() < PROMPT, "{:?}", begun.elapsed());
        assert!(text.ends_with("\n# EOF\n"), "{text}");
        let samples = text.lines().filter(|line| !line.starts_with('#'));
        let samples = samples.map(|line| {
            let (name, value) = line.rsplit_once(' ').expect("a value");
            (name.to_owned(), value.parse().expect("a number"))
        });
        let scrape = Scrape(samples.collect());
        assert!((scrape.at("godwit_scrape_complete") - 1.0).abs() < 0.1, "{text}");
        scrape
    }
}

impl Scraped {
    /// A scrape once the VM is in this state.
    #[track_caller]
    fn scrape_in_state(&self, state: &str) -> Scrape {
        let name = format!("godwit_vm_state{{state=\"{state}\"}}");
        wait_for(state, || Some(self.scrape()).filter(|scrape| scrape.is(&name)))
    }
}

impl Scrape {
    #[track_caller]
    fn at(&self, name: &str) -> f64 {
        *self.0.get(name).unwrap_or_else(|| panic!("no {name} in {:#?}", self.0))
    }

    /// Whether it is the one of several states that is 1.
    fn is(&self, name: &str) -> bool {
        self.0.get(name).is_some_and(|value| *value > 0.5)
    }

    /// Sum of all samples whose name begins so.
    fn sum(&self, begin: &str) -> f64 {
        self.0.iter().filter(|(name, _)| name.starts_with(begin)).map(|(_, value)| value).sum()
    }
}

fn disk_guest(disk: &Disk) -> VmmBuilder {
    let option = format!("path={},id=data", disk.file.display());
    let words = ["--disk", &option, "--balloon", "size=0,free_page_reporting=on"];
    VmmBuilder::guest(2, MEMORY, "workload=disk-write mem=16M").with(&words)
}

fn top() {
    let disk = Disk::new();
    let vmm = disk_guest(&disk).start();
    write_more(&vmm, 100);
    let shown = vmm.remote_ok(&["top", "--interval", "1", "--count", "2"]);
    let heads: Vec<_> =
        shown.lines().filter(|line| line.contains("running  2 of 2 vCPUs")).collect();
    assert_eq!(heads.len(), 2, "{shown}");
    let written: f64 = shown
        .lines()
        .filter_map(|line| line.strip_prefix("data "))
        .filter_map(|line| line.split_whitespace().nth(2)?.parse::<f64>().ok())
        .sum();
    assert!(written > 1.0, "a guest that writes: {shown}");
    assert!(!shown.contains('\x1b'), "this is no terminal: {shown}");
    // Without a number it goes on until the VMM has ended.
    let watching = vmm.remote_spawn(&["top", "--interval", "1"]);
    vmm.shut_down();
    let output = finish(watching);
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{error}");
    assert!(error.contains("metrics of the VMM"), "{error}");
}

fn at_work() {
    let (scraped, disk) = (Scraped::new(), Disk::new());
    let vmm = scraped.vmm(disk_guest(&disk));
    write_more(&vmm, 100);
    let first = scraped.scrape();
    assert!(first.is("godwit_vm_state{state=\"running\"}"), "{:#?}", first.0);
    assert!((first.at("godwit_vcpus") - 2.0).abs() < 0.1);
    let size = f64::from(128 << 20);
    assert!((first.sum("godwit_memory_size_bytes") - size).abs() < 1.0);
    let allocated = first.sum("godwit_memory_allocated_bytes");
    assert!(allocated > f64::from(16 << 20) && allocated <= size, "{allocated}");
    assert!(first.at("godwit_process_resident_memory_bytes") > f64::from(16 << 20));
    assert!(first.0.contains_key("godwit_balloon_actual_bytes{device=\"__balloon\"}"));
    assert!(first.at("godwit_api_requests_total{endpoint=\"vm.info\",outcome=\"success\"}") > 0.5);
    let info = format!("godwit_vm_info{{uuid=\"\",api_socket=\"{}\"}}", vmm.socket().display());
    assert!(first.is(&info), "{:#?}", first.0);
    write_more(&vmm, 100);
    let second = scraped.scrape();
    for counter in [
        "godwit_disk_writes_total{device=\"data\"}",
        "godwit_disk_written_bytes_total{device=\"data\"}",
        "godwit_disk_write_time_seconds_total{device=\"data\"}",
        "godwit_vcpu_cpu_seconds_total{vcpu=\"0\"}",
        "godwit_process_cpu_seconds_total",
    ] {
        assert!(second.at(counter) > first.at(counter), "{counter}: {}", first.at(counter));
    }
    let written = second.at("godwit_disk_written_bytes_total{device=\"data\"}");
    assert!(written >= 200.0 * 4096.0, "{written}");
    vmm.api().put("vm.pause", "").ok();
    let paused = scraped.scrape();
    assert!(paused.is("godwit_vm_state{state=\"paused\"}"), "{:#?}", paused.0);
    assert!(!paused.is("godwit_vm_state{state=\"running\"}"), "there is one state");
    // Nothing moves, and nothing is gone.
    let again = scraped.scrape();
    let counter = "godwit_disk_writes_total{device=\"data\"}";
    assert!((again.at(counter) - paused.at(counter)).abs() < 0.1);
    vmm.api().put("vm.resume", "").ok();
    write_more(&vmm, 10);
    assert!(scraped.scrape().at(counter) > paused.at(counter));
    vmm.api().put("vm.delete", "").ok();
    let gone = scraped.scrape();
    assert!(gone.is("godwit_vm_state{state=\"none\"}"), "{:#?}", gone.0);
    assert!(!gone.0.keys().any(|name| name.contains("device=")), "{:#?}", gone.0);
    vmm.shut_down();
}

fn in_postcopy() {
    let (here, there) = (Scraped::new(), Scraped::new());
    let mut source = here.vmm(VmmBuilder::guest(2, "size=192M,shared=on", SPARING));
    source.wait_for_work(5_000);
    let destination = there.vmm(VmmBuilder::new::<&str>(&[]));
    let reception = Reception::start(&destination, Transport::Tcp, Mode::Postcopy);
    assert!(there.scrape().is("godwit_vm_state{state=\"receiving\"}"));
    // 96 MiB take more than five seconds.
    let option = format!("destination_url={},memory_mode=postcopy,bandwidth=16M", reception.url);
    source.remote_ok(&["send-migration", &option]);
    wait_for_phase(&destination, "fault");
    wait_for_phase(&source, "serve");
    // The VMM thread is told of the phase a moment later.
    let serving = here.scrape_in_state("migrated");
    assert!(serving.is("godwit_migration_phase{phase=\"serve\"}"), "{:#?}", serving.0);
    assert!(serving.at("godwit_migration_moved_bytes_total{direction=\"sent\"}") > 0.0);
    let faults = "godwit_postcopy_fault_wait_seconds_count";
    let first = there.scrape_in_state("running");
    assert!(first.is("godwit_migration_phase{phase=\"fault\"}"), "{:#?}", first.0);
    assert!(first.at("godwit_migration_postcopy") > 0.5);
    // The first pages of a guest are always waited for, and the rest of its memory goes on arriving.
    let received = "godwit_migration_moved_bytes_total{direction=\"received\"}";
    let later = wait_for("more of its memory", || {
        let later = there.scrape();
        (later.at(received) > first.at(received) && later.at(faults) > 0.5).then_some(later)
    });
    let bucket =
        |le: &str| later.at(&format!("godwit_postcopy_fault_wait_seconds_bucket{{le=\"{le}\"}}"));
    assert!((bucket("+Inf") - later.at(faults)).abs() < 0.1 && bucket("0.001") <= bucket("10.0"));
    assert!(later.at("godwit_postcopy_fault_wait_seconds_sum") > 0.0);
    assert!(reception.finish().status.success(), "{}", destination.output());
    wait_for_phase(&destination, "done");
    let last = there.scrape();
    assert!(last.at("godwit_migration_remaining_bytes") < 0.5, "{:#?}", last.0);
    assert!(last.at("godwit_migration_downtime_seconds{kind=\"measured\"}") > 0.0);
    assert!(last.at("godwit_vcpu_cpu_seconds_total{vcpu=\"1\"}") > 0.0);
    assert_eq!(source.wait_for_exit(), 0, "{}", source.output());
    assert!(!here.path().exists(), "the source has removed its socket");
    destination.verify();
    destination.shut_down();
}

fn socket() {
    let scraped = Scraped::new();
    // One that is left of a process that has ended.
    drop(UnixListener::bind(scraped.path()).expect("a socket"));
    let vmm = scraped.vmm(VmmBuilder::new::<&str>(&[]));
    let metadata = std::fs::metadata(scraped.path()).expect("the socket");
    assert_eq!(metadata.permissions().mode() & 0o777, 0o600);
    assert!(scraped.scrape().is("godwit_vm_state{state=\"none\"}"));
    let (code, output) = VmmBuilder::new::<&str>(&[]).with(&scraped.options()).run();
    assert!(code == 1 && output.contains("cannot serve metrics"), "{code}: {output}");
    assert!(output.contains("in use by another process"), "{output}");
    scraped.scrape();
    for bad in ["unix:", "/metrics", "tcp:127.0.0.1:0"] {
        let (code, output) = VmmBuilder::new(&["--metrics", bad]).run();
        assert!(code == 2 && output.contains("is not unix:<path>"), "{code}: {output}");
    }
    let file = scraped.folder.path().join("file");
    std::fs::write(&file, "precious").expect("a file");
    let (code, output) = VmmBuilder::new(&["--metrics", &format!("unix:{}", file.display())]).run();
    assert!(code == 1 && output.contains("is not a socket"), "{code}: {output}");
    assert_eq!(std::fs::read(&file).expect("it is there"), b"precious");
    vmm.shut_down();
    assert!(!scraped.path().exists(), "the socket is left behind");
}

fn confined() {
    let scraped = Scraped::new();
    let vmm = scraped.vmm(confined_guest(1, MEMORY, "workload=random-write mem=16M"));
    vmm.wait_for_heartbeat();
    let scrape = scraped.scrape();
    assert!(scrape.is("godwit_vm_state{state=\"running\"}"), "{:#?}", scrape.0);
    assert!(scrape.at("godwit_process_threads") > 3.0);
    vmm.shut_down();
    assert!(!scraped.path().exists(), "the socket is left behind");
}

fn hostile() {
    let scraped = Scraped::new();
    let vmm = scraped.vmm(VmmBuilder::guest(1, MEMORY, "workload=random-write mem=16M"));
    vmm.wait_for_heartbeat();
    let api = Api::new(&scraped.path());
    // Far more than there are connections: silent, in the middle of a head, and with an answer that they do not read.
    let request = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n".repeat(50);
    let mut held: Vec<_> = (0..60).map(|_| api.connect().expect("a connection")).collect();
    for (number, stream) in held.iter_mut().enumerate() {
        let sent = [0, 12, request.len()][number % 3];
        // It may have been hung up on in favour of another.
        let _ = stream.write_all(&request[..sent]);
    }
    for junk in
        [&b"\0\xff\r\n\r\n"[..], b"GET\r\n\r\n", b"\x16\x03\x01\x02\x00", b"PUT / HTTP/1.1\r\n"]
    {
        let mut stream = api.connect().expect("a connection");
        stream.write_all(junk).expect("bytes can be sent");
        stream.shutdown(std::net::Shutdown::Write).expect("one side can be closed");
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        let answer = String::from_utf8_lossy(&answer).into_owned();
        assert!(!answer.contains("godwit_"), "{junk:?}: {answer}");
    }
    for path in ["api/v1/vmm.shutdown", "api/v1/vm.info"] {
        let text = format!("PUT /{path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
        assert_eq!(api.raw(text.as_bytes()).expect("an answer").status, 404);
    }
    for _ in 0..20 {
        scraped.scrape();
    }
    vmm.api().get("vmm.ping").ok();
    vmm.wait_for_heartbeat();
    drop(held);
    vmm.verify();
    vmm.shut_down();
}

fn promtool() {
    if Command::new("promtool").arg("--version").output().is_err() {
        skip("promtool (package prometheus) is not installed");
    }
    let (scraped, disk) = (Scraped::new(), Disk::new());
    let vmm = scraped.vmm(disk_guest(&disk));
    write_more(&vmm, 100);
    let text = scraped.ask("Accept: text/plain\r\n").ok().body;
    let mut tool = Command::new("promtool");
    tool.args(["check", "metrics"]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut tool = tool.stderr(Stdio::piped()).spawn().expect("promtool can be started");
    tool.stdin.take().expect("a pipe").write_all(text.as_bytes()).expect("it reads");
    let output = tool.wait_with_output().expect("its output");
    assert!(output.status.success(), "{output:?}\n{text}");
    vmm.shut_down();
}
