// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A running guest moves from the real cloud-hypervisor v53 to here, again and again, its memory compared page by page.
//!
//! `GODWIT_UPSTREAM_BIN` names the program; without it these are skipped. `GODWIT_MIGRATIONS=20` makes the full number of
//! moves; otherwise 3.

use std::fs;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use guest_reader::{AttachOptions, Guest};
use serde_json::json;
use tempfile::TempDir;

use crate::harness::migrate::Reception;
use crate::harness::vmm::GUEST_PATIENCE;
use crate::harness::{Api, Mode, Suite, Transport, Vmm, image, skip, wait_for};

const PROGRAM: &str = "GODWIT_UPSTREAM_BIN";
/// Part of the name of the file that its guest RAM is in.
const RAM: &str = "ch_ram";
const LIMIT_EACH: Duration = Duration::from_mins(1);
/// Pages that are visited before a move, so that all has contents.
const VISITS: u64 = 20_000;
/// What a source has to notice, far longer than that takes.
const LOOK: Duration = Duration::from_micros(200);

pub fn add(suite: &mut Suite) {
    let count = std::env::var("GODWIT_MIGRATIONS").ok().and_then(|text| text.parse().ok());
    let count: u32 = count.unwrap_or(3).max(1);
    let ways = [
        ("unix", Transport::Unix, 1),
        ("tcp", Transport::Tcp, 1),
        ("tcp_3_connections", Transport::Tcp, 3),
    ];
    for (name, transport, connections) in ways {
        let name = format!("upstream_live::{name}_{count}_moves");
        suite.add_long(&name, LIMIT_EACH * (count + 1), move || {
            moves(transport, connections, count);
        });
    }
}

/// The real program with the test guest; it ends with this.
struct Upstream {
    child: Child,
    folder: TempDir,
}

impl Drop for Upstream {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            eprintln!("--- cloud-hypervisor ---\n{}", self.log());
        }
    }
}

impl Upstream {
    fn start() -> Self {
        let Some(program) = std::env::var_os(PROGRAM) else {
            skip(format!("{PROGRAM} names no cloud-hypervisor v53"));
        };
        let folder = TempDir::with_prefix("godwit-upstream-").expect("a folder");
        let at = |name: &str| folder.path().join(name);
        fs::File::create(at("disk")).and_then(|file| file.set_len(1 << 20)).expect("a disk");
        let disk = format!("path={},image_type=raw", at("disk").display());
        let mut command = Command::new(program);
        command.arg("--api-socket").arg(at("api")).arg("--log-file").arg(at("log"));
        command.args(["--kernel", image(), "--cmdline", "workload=random-write mem=64M"]);
        command.args(["--cpus", "boot=2", "--memory", "size=256M,shared=on", "--disk", &disk]);
        command.args(["--console", "null", "--serial", "null"]);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let child = command.spawn().expect("the program can be started");
        Self { child, folder }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn log(&self) -> String {
        fs::read_to_string(self.path("log")).unwrap_or_default()
    }

    /// Its guest, which works.
    fn guest(&self) -> Guest {
        let guest = attach(self.child.id()).expect("the guest starts");
        let works = guest.wait_until("work", GUEST_PATIENCE, |now| now.iterations() >= VISITS);
        works.expect("the guest works");
        guest
    }
}

fn attach(pid: u32) -> Result<Guest, guest_reader::GuestError> {
    let options = AttachOptions { names: vec![RAM.to_owned()], ..AttachOptions::default() };
    GUEST_PATIENCE.until("the guest", || Guest::attach_with(pid, &options).map(Some))
}

fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1000.0
}

fn moves(transport: Transport, connections: u32, count: u32) {
    for number in 1..=count {
        let mut source = Upstream::start();
        let before = source.guest();
        let there = Vmm::empty();
        let mut reception = Reception::start(&there, transport, Mode::Precopy);
        let began = Instant::now();
        let mut wanted = json!({"destination_url": reception.url});
        if connections > 1 {
            wanted["connections"] = json!(connections);
        }
        let api = Api::new(&source.path("api"));
        let sent = std::thread::spawn(move || api.put("vm.send-migration", &wanted.to_string()));
        // The last moment at which the guest was seen to work there, and the first one here.
        let mut seen = (before.status().map_or(0, |now| now.iterations()), Instant::now());
        while !reception.has_ended() {
            let Ok(now) = before.status() else { break };
            if now.iterations() > seen.0 {
                seen = (now.iterations(), Instant::now());
            }
            std::thread::sleep(LOOK);
        }
        let output = reception.finish();
        assert!(output.status.success(), "{output:?}\n{}\n{}", there.output(), source.log());
        let total = began.elapsed();
        let sent = sent.join().expect("no panic");
        assert!(sent.status < 300, "{sent:?}\n{}", source.log());
        let ended = wait_for("the end of the source", || source.child.try_wait().expect("a child"));
        assert!(ended.success(), "{ended:?}\n{}", source.log());
        let here = there.guest();
        let first = here.status().expect("a status").iterations();
        here.wait_until("work", GUEST_PATIENCE, |now| now.iterations() > first).expect("it works");
        let stood = seen.1.elapsed();
        there.wait_for_work(VISITS / 10);
        let report = there.verify();
        println!(
            "move {number}: {:.1} ms in all, at most {:.1} ms without work, {} pages compared",
            milliseconds(total),
            milliseconds(stood),
            report.written
        );
        there.shut_down();
    }
}
