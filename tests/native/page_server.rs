// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Postcopy whose last pages a process of its own sends: the source ends, or is killed, while they
//! are still on their way; every page is compared afterwards.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Output;
use std::time::Duration;

use serde_json::Value;

use crate::harness::migrate::Reception;
use crate::harness::vmm::{finish, write_file};
use crate::harness::{
    Api, HugePages, Mode, Suite, Transport, Vmm, VmmBuilder, ch_remote, is_root, skip, wait_for,
    wait_within,
};
use crate::landlock;
use crate::postcopy::{Cutter, SPARING, phase, progress, wait_for_phase};
use crate::sandbox::held;

/// Bytes per second with which 96 MiB of a sparing guest take some 12 s.
const SLOW: &str = "bandwidth=8M";

/// For a test that only waits for the end.
const QUICK: &str = "bandwidth=48M";

pub fn add(suite: &mut Suite) {
    suite.add("page_server::the_source_ends_before_its_pages_are_there", source_ends);
    suite.add("page_server::the_source_may_be_killed", source_is_killed);
    suite.add("page_server::it_holds_nothing_but_memory", clean);
    suite.add("page_server::cuts_heal", cuts);
    suite.add("page_server::recovery_on_command_at_another_address", recover);
    suite.add("page_server::needed_pages_are_not_discarded_without_force", force);
    suite.add("page_server::a_waiting_client_sees_the_last_page", followed);
    suite.add("page_server::after_precopy_and_with_zones", zones);
    suite.add("page_server::of_memory_of_huge_pages", huge_pages);
    suite.add("page_server::vcpus_that_bring_their_pages_do_not_notice", own_faults);
    suite.add("page_server::one_that_is_not_needed_ends", unneeded);
    suite.add("page_server::private_memory_is_refused_by_name", private);
    suite.add("page_server::without_its_socket_the_guest_stays", no_socket);
    suite.add("page_server::one_that_dies_early_is_done_without", dies_early);
    suite.add("page_server::one_of_a_confined_vm_serves", of_confined);
}

/// A page server; ended with the test.
struct PageServer {
    pid: u32,
    socket: PathBuf,
}

impl PageServer {
    /// From the progress document of the source, or of itself.
    fn new(server: &Value) -> Self {
        let pid = server["pid"].as_u64().and_then(|pid| u32::try_from(pid).ok());
        let socket = server["socket"].as_str().expect("a socket");
        Self { pid: pid.expect("a process"), socket: socket.into() }
    }

    /// Whether the process is there, and is what it was.
    fn lives(&self) -> bool {
        let name = fs::read_to_string(format!("/proc/{}/comm", self.pid)).unwrap_or_default();
        let state = fs::read_to_string(format!("/proc/{}/stat", self.pid)).unwrap_or_default();
        name.trim() == "page-server" && !state.contains(") Z ")
    }

    fn progress(&self) -> Value {
        Api::new(&self.socket).get("vm.migration-progress").ok().json()
    }

    fn remote(&self, arguments: &[&str]) -> Output {
        let socket = self.socket.to_str().expect("UTF-8");
        ch_remote(&[&["--api-socket", socket], arguments].concat())
    }

    fn kill(&self) {
        if self.lives() {
            let pid = libc::pid_t::try_from(self.pid).expect("a process id");
            // SAFETY: its name has just been looked at.
            unsafe { libc::kill(pid, libc::SIGKILL) };
        }
    }

    /// What its descriptors are.
    fn descriptors(&self) -> Vec<String> {
        let folder = fs::read_dir(format!("/proc/{}/fd", self.pid)).expect("its descriptors");
        let target = |entry: fs::DirEntry| fs::read_link(entry.path()).ok();
        let targets = folder.filter_map(Result::ok).filter_map(target);
        targets.map(|path| path.display().to_string()).collect()
    }

    /// It ends by itself, and leaves nothing.
    fn wait_for_end(&self) {
        wait_for("the end of the page server", || (!self.lives()).then_some(()));
        assert!(!self.socket.exists(), "its socket is still there");
    }
}

impl Drop for PageServer {
    fn drop(&mut self) {
        self.kill();
    }
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// A guest that has gone, and whose pages are still on their way.
struct Middle {
    source: Vmm,
    destination: Vmm,
    reception: Reception,
    cutter: Cutter,
    server: PageServer,
}

impl Middle {
    /// `options` of the source begin with a comma.
    fn start(options: &str) -> Self {
        let source = Vmm::boot(2, "size=192M,shared=on", SPARING);
        Self::leave(source, Mode::Postcopy, options)
    }

    fn leave(source: Vmm, mode: Mode, options: &str) -> Self {
        Self::leave_to(source, mode, options, "")
    }

    /// `receiving` are options of the destination, which begin with a comma.
    fn leave_to(source: Vmm, mode: Mode, options: &str, receiving: &str) -> Self {
        source.wait_for_work(5_000);
        let destination = Vmm::empty();
        let reception = Reception::start_with(&destination, Transport::Tcp, mode, receiving);
        let cutter = Cutter::start(&reception.url);
        let option = format!(
            "destination_url={},memory_mode={},page_server=on{options}",
            cutter.url,
            mode.name()
        );
        source.remote_ok(&["send-migration", &option]);
        let handed_on = source.wait_for_event("migration-handed-on");
        let properties = &handed_on["properties"];
        let number = |name: &str| properties[name].as_str().and_then(|text| text.parse().ok());
        let server = PageServer {
            pid: number("pid").expect("a process"),
            socket: properties["socket"].as_str().expect("a socket").into(),
        };
        println!("     took over in {} us", properties["took_us"]);
        Self { source, destination, reception, cutter, server }
    }

    /// The source has ended well, and pages are still to come.
    fn source_has_ended(&mut self) {
        assert_eq!(self.source.wait_for_exit(), 0, "{}", self.source.output());
        // It may be about to continue after the loss that was planned.
        wait_for_phase(&self.destination, "fault");
        let now = progress(&self.destination);
        assert_eq!(now["phase"], "fault", "{now}");
        assert!(now["remaining_bytes"].as_u64() > Some(0), "{now}");
        assert!(self.server.lives(), "{}", self.source.output());
    }

    /// Everything arrives and is right, and the page server ends.
    fn finish(self) -> Value {
        let Self { source, destination, reception, server, .. } = self;
        assert!(reception.finish().status.success(), "{}", destination.output());
        wait_for_phase(&destination, "done");
        let last = progress(&destination);
        server.wait_for_end();
        destination.wait_for_work(5_000);
        destination.verify();
        destination.shut_down();
        let finished = source.event_names().iter().any(|name| name == "migration-finished");
        assert!(finished, "the page server continues with the events of its VMM");
        assert!(!source.output().contains("ERROR"), "{}", source.output());
        last
    }
}

/// Microseconds between two events of the destination.
fn held_still_us(destination: &Vmm) -> i64 {
    let time = |event: &Value| {
        let at = &event["timestamp"];
        at["secs"].as_i64().unwrap_or(0) * 1_000_000 + at["nanos"].as_i64().unwrap_or(0) / 1000
    };
    let phase = |event: &&Value, name: &str| event["properties"]["phase"] == name;
    // Events are written a little after the progress document has changed.
    wait_for("a loss and a recovery", || {
        let events = destination.events();
        let mut after = events.iter().skip_while(|event| !phase(event, "postcopy-paused"));
        let paused = after.next()?;
        Some(time(after.find(|event| phase(event, "fault"))?) - time(paused))
    })
}

fn source_ends() {
    let mut run = Middle::start(&format!(",{SLOW}"));
    run.source_has_ended();
    let now = run.server.progress();
    assert_eq!((&now["side"], &now["phase"]), (&"source".into(), &"serve".into()), "{now}");
    assert_eq!(now["page_server"]["state"], "serving", "{now}");
    // What is left of the VMM's own socket is for the next one.
    assert!(!run.source.socket().exists());
    let held_us = held_still_us(&run.destination);
    println!("     the destination held still for {held_us} us");
    let last = run.finish();
    assert_eq!(last["recovery"]["recoveries"], 1, "one planned loss: {last}");
}

fn of_confined() {
    let source = landlock::confined_guest(2, "size=192M,shared=on", SPARING).start();
    let mut run = Middle::leave(source, Mode::Postcopy, &format!(",{SLOW}"));
    run.source_has_ended();
    // Devices are added when all pages are here. A limit is no promise: a busy host takes longer.
    let is_done = || (phase(&run.destination) == "done").then_some(());
    wait_within(Duration::from_mins(2), "the last page", is_done);
    landlock::assert_confined(&run.destination);
    run.finish();
}

fn source_is_killed() {
    let source = Vmm::boot(2, "size=192M,shared=on", SPARING);
    // A watching client makes it stay after its work is done.
    let _ = source.remote(&["migration-progress"]);
    let mut run = Middle::leave(source, Mode::Postcopy, &format!(",{SLOW}"));
    run.source.signal(libc::SIGKILL);
    assert_eq!(run.source.wait_for_exit(), -libc::SIGKILL);
    wait_for_phase(&run.destination, "fault");
    assert!(run.server.lives(), "{}", run.source.output());
    run.finish();
}

fn clean() {
    let folder = tempfile::TempDir::with_prefix("godwit-disk-").expect("a folder");
    let disk = write_file(&folder.path().join("disk"), &vec![0; 1 << 20]);
    let source = VmmBuilder::guest(2, "size=192M,shared=on", SPARING)
        .with(&["--disk", &format!("path={disk}")])
        // A descriptor that every process it starts would have.
        .wrapped(&["bash", "-c", "exec 9<\"$0\"; exec \"$@\"", &disk])
        .start();
    source.guest();
    let mut run = Middle::leave(source, Mode::Postcopy, &format!(",{SLOW}"));
    run.source_has_ended();
    let log = run.source.path("log").display().to_string();
    let events = run.source.path("events").display().to_string();
    let own = format!("/proc/{}/stat", run.server.pid);
    let allowed = |target: &str| {
        ["socket:[", "anon_inode:[event", "anon_inode:[signalfd]", "/memfd:ram-"]
            .iter()
            .any(|begin| target.starts_with(begin))
            // What its metrics say of the process itself.
            || [log.as_str(), events.as_str(), own.as_str()].contains(&target)
    };
    let descriptors = run.server.descriptors();
    let strange: Vec<_> = descriptors.iter().filter(|target| !allowed(target)).collect();
    assert!(strange.is_empty(), "{strange:?} of {descriptors:?}");
    assert!(descriptors.iter().any(|target| target.starts_with("/memfd:")), "{descriptors:?}");
    let maps = fs::read_to_string(format!("/proc/{}/maps", run.server.pid)).expect("its maps");
    assert!(!maps.contains("kvm") && !maps.contains(&disk), "{maps}");
    assert_eq!(
        fs::read_link(format!("/proc/{}/cwd", run.server.pid)).expect("a folder"),
        Path::new("/")
    );
    // Of what root may do it has the files of other users, and what its threads need once for their priority.
    let allowed = 1 << 1 | 1 << 2 | 1 << 3 | 1 << 23;
    wait_for("what its threads may do", || {
        let (held, _) = held(run.server.pid);
        assert!(held.values().all(|held| held & !allowed == 0), "{held:x?}");
        // A thread has its name before it drops what it does not need.
        let senders: Vec<_> =
            ["mig-urgent", "mig-bulk"].iter().filter_map(|name| held.get(*name)).collect();
        (!senders.is_empty() && senders.iter().all(|held| **held == 0)).then_some(())
    });
    run.finish();
}

fn cuts() {
    let mut run = Middle::start(&format!(",{SLOW},preempt=2"));
    run.source_has_ended();
    for cut in 2..5 {
        run.cutter.cut(None, usize::MAX);
        wait_for("the recovery", || {
            let now = progress(&run.destination);
            let is_over = now["recovery"]["recoveries"].as_u64() >= Some(cut);
            // A cut in the middle of a recovery is no loss of its own.
            (is_over && run.server.progress()["phase"] == "serve").then_some(())
        });
    }
    let losses = run.server.progress()["recovery"]["losses"].clone();
    assert_eq!(losses, 3);
    run.finish();
}

fn recover() {
    let mut run = Middle::start(&format!(",{SLOW},recover_timeout_s=0"));
    run.source_has_ended();
    let refused = run.server.remote(&["migration-recover"]);
    assert!(text(&refused).contains("nothing is to recover"), "{}", text(&refused));
    run.cutter.set_shut(true);
    run.cutter.cut(None, usize::MAX);
    wait_for("the loss", || (run.server.progress()["phase"] == "postcopy-paused").then_some(()));
    wait_for_phase(&run.destination, "postcopy-paused");
    let socket = run.destination.path("again");
    let there = format!("unix:{}", socket.display());
    run.destination.remote_ok(&["migration-recover", &there]);
    wait_for("the new address", || socket.exists().then_some(()));
    let asked = run.server.remote(&["migration-recover", &there]);
    assert!(asked.status.success(), "{}", text(&asked));
    run.finish();
}

fn force() {
    let mut run = Middle::start(&format!(",{SLOW}"));
    run.source_has_ended();
    for command in ["shutdown-vmm", "delete", "info", "pause", "boot"] {
        let refused = run.server.remote(&[command]);
        let said = text(&refused);
        assert!(!refused.status.success() && said.contains("page server"), "{command}: {said}");
    }
    let pid = libc::pid_t::try_from(run.server.pid).expect("a process id");
    // SAFETY: a process of this test that has just answered.
    assert_eq!(unsafe { libc::kill(pid, libc::SIGTERM) }, 0);
    wait_for("the signal", || run.source.output().contains("told to end").then_some(()));
    assert!(run.server.lives(), "a signal does not make it discard the pages");
    let forced = run.server.remote(&["shutdown-vmm", "--force"]);
    assert!(forced.status.success(), "{}", text(&forced));
    run.server.wait_for_end();
    wait_for_phase(&run.destination, "postcopy-paused");
    run.destination.remote_ok(&["shutdown-vmm", "--force"]);
    assert_eq!(run.destination.wait_for_exit(), 0, "{}", run.destination.output());
}

fn followed() {
    let mut source = Vmm::boot(2, "size=192M,shared=on", "workload=random-write mem=96M");
    source.wait_for_work(5_000);
    let destination = Vmm::empty();
    let reception = Reception::start(&destination, Transport::Tcp, Mode::Postcopy);
    let socket = source.path("elsewhere");
    let option = format!(
        "destination_url={},memory_mode=postcopy,page_server=on,page_server_socket={},{QUICK}",
        reception.url,
        socket.display()
    );
    let waiting = source.remote_spawn(&["send-migration", "--watch", &option]);
    let server = wait_for("the page server", || {
        let answer = Api::new(&socket).request("GET", "vm.migration-progress", None).ok()?;
        (answer.status == 200).then(|| PageServer::new(&answer.json()["page_server"]))
    });
    assert_eq!(server.socket, socket);
    let output = finish(waiting);
    let shown = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{shown}{}", text(&output));
    assert!(shown.contains("handed-on") && shown.contains("done in"), "{shown}");
    assert_eq!(phase(&destination), "done", "it was told too early");
    assert!(reception.finish().status.success(), "{}", destination.output());
    assert_eq!(source.wait_for_exit(), 0, "{}", source.output());
    server.wait_for_end();
    destination.verify();
    destination.shut_down();
}

fn zones() {
    let source = VmmBuilder::guest(4, "size=0", SPARING)
        .with(&["--memory-zone", "id=zone0,size=128M,shared=on", "id=zone1,size=64M,shared=on"])
        .start();
    source.guest();
    let options = format!(",{SLOW},postcopy_after_s=1,downtime_ms=1,preempt=0,connections=2");
    let mut run = Middle::leave(source, Mode::Auto, &options);
    run.source_has_ended();
    run.finish();
}

fn huge_pages() {
    // One guest here and one there.
    let _pool = HugePages::borrow(2 * 80);
    let memory = "size=160M,hugepages=on,hugepage_size=2M";
    let source = Vmm::boot(2, memory, SPARING);
    let mut run = Middle::leave(source, Mode::Postcopy, &format!(",{SLOW}"));
    run.source_has_ended();
    run.finish();
}

fn own_faults() {
    if !is_root() {
        skip("fault_source=sigbus needs CAP_BPF and CAP_PERFMON");
    }
    let source = Vmm::boot(2, "size=192M,shared=on", SPARING);
    let options = format!(",{SLOW}");
    let more = ",fault_source=sigbus";
    let mut run = Middle::leave_to(source, Mode::Postcopy, &options, more);
    run.source_has_ended();
    let last = run.finish();
    assert_eq!(last["faults"]["source"], "sigbus", "{last}");
}

fn unneeded() {
    let mut source = Vmm::boot(1, "size=64M,shared=on", "workload=random-write mem=4M");
    let destination = Vmm::empty();
    let reception = Reception::start(&destination, Transport::Tcp, Mode::Auto);
    let option = format!(
        "destination_url={},memory_mode=auto,page_server=on,downtime_ms=2000",
        reception.url
    );
    source.remote_ok(&["send-migration", &option]);
    source.wait_for_event("migration-finished");
    assert!(reception.finish().status.success(), "{}", destination.output());
    assert_eq!(source.wait_for_exit(), 0, "{}", source.output());
    let mut socket = source.socket().into_os_string();
    socket.push(".pages");
    assert!(!Path::new(&socket).exists());
    destination.verify();
    destination.shut_down();
}

fn private() {
    let source = Vmm::boot(1, "size=64M,mergeable=on", "workload=random-write mem=16M");
    let option = "destination_url=tcp:127.0.0.1:1,memory_mode=postcopy,page_server=on";
    let refused = source.remote(&["send-migration", option]);
    let said = text(&refused);
    assert!(!refused.status.success() && said.contains("'mem0'"), "{said}");
    assert!(said.contains("private memory"), "{said}");
    source.wait_for_heartbeat();
    source.shut_down();
}

fn no_socket() {
    let source = Vmm::boot(1, "size=64M,shared=on", "workload=random-write mem=16M");
    let destination = Vmm::empty();
    let reception = Reception::start(&destination, Transport::Tcp, Mode::Postcopy);
    let taken = write_file(&source.path("taken"), b"this is no socket");
    let option = format!(
        "destination_url={},memory_mode=postcopy,page_server=on,page_server_socket={taken}",
        reception.url
    );
    source.remote_ok(&["send-migration", &option]);
    let failed = source.wait_for_event("migration-failed");
    let reason = failed["properties"]["error"].as_str().unwrap_or_default();
    assert!(
        reason.contains("starting the page server") && reason.contains("not a socket"),
        "{reason}"
    );
    assert!(!reception.finish().status.success());
    assert_eq!(fs::read(&taken).expect("it is still there"), b"this is no socket");
    source.wait_for_heartbeat();
    source.shut_down();
    destination.shut_down();
}

fn dies_early() {
    let mut source = Vmm::boot(2, "size=192M,shared=on", "workload=random-write mem=96M");
    source.wait_for_work(5_000);
    let destination = Vmm::empty();
    let reception = Reception::start(&destination, Transport::Tcp, Mode::Auto);
    let option = format!(
        "destination_url={},memory_mode=auto,page_server=on,downtime_ms=1,timeout_s=600,\
         convergence=throttle,{QUICK}",
        reception.url
    );
    source.remote_ok(&["send-migration", &option]);
    let server = wait_for("the page server", || {
        let server = progress(&source)["page_server"].clone();
        (server["state"] == "ready").then(|| PageServer::new(&server))
    });
    server.kill();
    source.remote_ok(&["migration-start-postcopy"]);
    source.wait_for_event("page-server-failed");
    assert!(reception.finish().status.success(), "{}", destination.output());
    wait_for_phase(&destination, "done");
    assert_eq!(progress(&destination)["recovery"]["losses"], 0);
    assert_eq!(source.wait_for_exit(), 0, "{}", source.output());
    destination.wait_for_work(5_000);
    destination.verify();
    destination.shut_down();
}
