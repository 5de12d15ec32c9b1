// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Every request of the API, from two clients at once, while something does not come to its end: a path
//! that does not open, a disk that hangs, a peer or a resolver that says nothing. Each request is answered
//! in time, what is refused changes nothing, and a signal ends the process in the time that the documents
//! name ("Disks that do not answer" in docs/usage.md, "Signals" in docs/migration.md).

use std::any::Any;
use std::fs;
use std::io::Read as _;
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::path::Path;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::harness::api::Answer;
use crate::harness::loops::{Mounted, format};
use crate::harness::{Suite, Vmm, VmmBuilder, payload, process, skip, wait_for};
use crate::hung_disk::Hung;
use crate::requests::{Held, prompt, prompt_put, requests, requests_but, wave};
use crate::starting::{Slow, wait_until_doing};

pub fn add(suite: &mut Suite) {
    let scenes: [(&str, Make); 12] = [
        ("booted", booted),
        ("given_a_disk", given_a_disk),
        ("restored", restored),
        ("running_on_a_hung_disk", running),
        ("paused", paused),
        ("shut_down", shut_down),
        ("rebooted", rebooted),
        ("saved", saved),
        ("migrated", migrated),
        ("awaited", awaited),
        ("awaited_from_a_silent_peer", awaited_from_a_silent_peer),
        ("awaited_at_a_name", awaited_at_a_name),
    ];
    for (name, scene) in scenes {
        suite.add(&format!("states::requests_and_signals_while_{name}"), move || check(scene()));
    }
    suite.add("states::a_restore_is_cancelled", cancel_restore);
    suite.add("states::a_wait_for_a_name_is_cancelled", cancel_resolution);
}

/// In which a signal ends a VMM that waits for nothing that a guest could lose, or a second one any: two seconds, and
/// three times as many for a busy host.
const SIGNAL_END: Duration = Duration::from_secs(8);

/// Makes a scene.
type Make = fn() -> Scene;

/// What a first signal comes to.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Signal {
    /// It ends the process.
    Ends,
    /// It waits for the operation in progress, and a second one does not.
    Waits,
    /// The same, but the kernel keeps the process until a thread comes back from its system call.
    WaitsInTheKernel,
}

/// Something that does not come to its end.
struct Scene {
    vmm: Vmm,
    /// The operation in progress, as `vm.info` has it.
    doing: Option<&'static str>,
    /// Requests that would end it, or begin something else.
    without: &'static [&'static str],
    signal: Signal,
    /// The request that waits.
    waiting: Option<JoinHandle<std::io::Result<Answer>>>,
    /// What it waits for; it comes when this is dropped.
    blocker: Box<dyn Any>,
}

fn check(scene: Scene) {
    let Scene { mut vmm, doing, without, signal, waiting, blocker } = scene;
    let api = vmm.api();
    let held = Held::by(&vmm);
    for _ in 0..2 {
        for (name, answer) in wave(&api, &requests_but(without)) {
            assert!(name != "vmm.ping" || answer.status == 200, "{name}: {answer:?}");
        }
    }
    held.assert_still(&vmm, "all requests");
    let info = api.get("vm.info");
    let told = if info.status == 200 { info.json()["doing"].clone() } else { Value::Null };
    assert_eq!(told, json!(doing));
    let is_waiting = || waiting.as_ref().is_none_or(|thread| !thread.is_finished());
    assert!(is_waiting(), "{:?}", waiting.map(JoinHandle::join));
    let mut blocker = Some(blocker);
    let mut began = Instant::now();
    vmm.signal(libc::SIGTERM);
    if signal != Signal::Ends {
        wait_for("the log", || vmm.output().contains("told to end").then_some(()));
        for request in requests().iter().filter(|request| request.method == "GET") {
            prompt(&api, request);
        }
        assert_eq!(vmm.exited(), None, "{}", vmm.output());
        vmm.signal_again(libc::SIGTERM);
        began = Instant::now();
    }
    if signal == Signal::WaitsInTheKernel {
        // The last that a process does by itself.
        wait_for("the end of the process", || (!vmm.socket().exists()).then_some(()));
        blocker = None;
    }
    assert_eq!(vmm.wait_for_exit(), 0, "{}", vmm.output());
    assert!(began.elapsed() < SIGNAL_END, "{:?}\n{}", began.elapsed(), vmm.output());
    assert!(!vmm.socket().exists(), "the socket is left");
    drop(blocker);
    if let Some(thread) = waiting {
        // Told of the end, or of nothing by a socket that is gone.
        let _ = thread.join().expect("it ends");
    }
}

/// A request that is not answered before something comes to its end.
fn begin(vmm: &Vmm, name: &'static str, body: &str) -> JoinHandle<std::io::Result<Answer>> {
    let (api, body) = (vmm.api(), body.to_owned());
    std::thread::spawn(move || {
        api.request("PUT", name, Some(body.as_str()).filter(|body| !body.is_empty()))
    })
}

/// A VM that halts at once, with these disks.
fn config(vmm: &Vmm, disks: &[Value]) -> String {
    let mut config = json!({
        "memory": { "size": 64 << 20, "shared": true },
        "payload": { "kernel": payload::halting(vmm.path("").as_path()) },
        "serial": { "mode": "Off" },
        "console": { "mode": "Off" },
    });
    if !disks.is_empty() {
        config["disks"] = json!(disks);
    }
    config.to_string()
}

fn running_vm(disks: &[Value]) -> Vmm {
    let vmm = Vmm::empty();
    vmm.api().put("vm.create", &config(&vmm, disks)).ok();
    vmm.api().put("vm.boot", "").ok();
    vmm
}

fn booted() -> Scene {
    let (vmm, slow) = (Vmm::empty(), Slow::new());
    vmm.api().put("vm.create", &config(&vmm, &[slow.disk()])).ok();
    let waiting = Some(begin(&vmm, "vm.boot", ""));
    wait_until_doing(&vmm, "booted");
    slow.wait_until_asked();
    Scene {
        vmm,
        doing: Some("booted"),
        without: &["vm.shutdown", "vm.delete"],
        signal: Signal::Ends,
        waiting,
        blocker: Box::new(slow),
    }
}

fn given_a_disk() -> Scene {
    let (vmm, slow) = (running_vm(&[]), Slow::new());
    let waiting = Some(begin(&vmm, "vm.add-disk", &slow.disk().to_string()));
    wait_until_doing(&vmm, "changed");
    slow.wait_until_asked();
    Scene {
        vmm,
        doing: Some("changed"),
        without: &[],
        signal: Signal::Ends,
        waiting,
        blocker: Box::new(slow),
    }
}

/// A snapshot of a VM whose disk does not open any more.
fn snapshot_of(slow: &mut Slow, folder: &Path) -> String {
    slow.open();
    let source = running_vm(&[slow.disk()]);
    let url = format!("file://{}", folder.display());
    source.api().put("vm.pause", "").ok();
    source.api().put("vm.snapshot", &json!({ "destination_url": url }).to_string()).ok();
    source.shut_down();
    slow.close();
    json!({ "source_url": url }).to_string()
}

fn wait_until_restored(vmm: &Vmm) {
    wait_for("the restore", || {
        let info = vmm.api().get("vm.info");
        (info.status == 409 && info.body.contains("being restored")).then_some(())
    });
}

fn restored() -> Scene {
    let (vmm, mut slow) = (Vmm::empty(), Slow::new());
    let folder = TempDir::with_prefix("godwit-snapshot-").expect("a folder");
    let body = snapshot_of(&mut slow, folder.path());
    let waiting = Some(begin(&vmm, "vm.restore", &body));
    wait_until_restored(&vmm);
    slow.wait_until_asked();
    Scene {
        vmm,
        doing: None,
        without: &["vm.delete", "vm.shutdown"],
        signal: Signal::Ends,
        waiting,
        blocker: Box::new((slow, folder)),
    }
}

/// A restore that waits is cancelled by `vm.delete`, which is answered when what waits has ended.
fn cancel_restore() {
    let (vmm, mut slow) = (Vmm::empty(), Slow::new());
    let folder = TempDir::with_prefix("godwit-snapshot-").expect("a folder");
    let body = snapshot_of(&mut slow, folder.path());
    let held = Held::by(&vmm);
    let waiting = begin(&vmm, "vm.restore", &body);
    wait_until_restored(&vmm);
    let deleting = begin(&vmm, "vm.delete", "");
    slow.open();
    let restored = waiting.join().expect("it ends").expect("an answer");
    assert!(restored.status >= 400, "{restored:?}");
    deleting.join().expect("it ends").expect("an answer").ok();
    held.assert_still(&vmm, "a restore that was cancelled");
    // And the next one is as if there had been none.
    vmm.api().put("vm.restore", &body).ok();
    assert_eq!(vmm.api().state(), "Paused");
    vmm.shut_down();
}

/// A VM with a disk that hangs, and the hang ends when it is dropped.
fn hung() -> (Vmm, Box<dyn Any>) {
    let hung = Hung::new(true);
    let frozen = hung.hang();
    let Hung { vmm, rest } = hung;
    (vmm, Box::new((frozen, rest)))
}

/// Waits until a machine that is being ended has no vCPUs any more, and the thread that ends it waits for the disk: until
/// then threads and their descriptors go, whatever is asked meanwhile.
#[track_caller]
fn wait_until_the_disk_is_waited_for(vmm: &Vmm) {
    wait_for("the end of all but the disk", || {
        let threads = process::thread_states(vmm.pid());
        let has_vcpus = threads.iter().any(|(name, _)| name.starts_with("vcpu"));
        let ends = |(name, state): &(String, char)| {
            *state == 'S' && ["vm-shutdown", "vm-reboot"].contains(&name.as_str())
        };
        (!has_vcpus && threads.iter().any(ends)).then_some(())
    });
}

fn while_hung(
    request: Option<&'static str>,
    doing: Option<&'static str>,
    without: &'static [&'static str],
) -> Scene {
    let (vmm, blocker) = hung();
    let waiting = request.map(|name| begin(&vmm, name, ""));
    if let Some(doing) = doing {
        wait_until_doing(&vmm, doing);
    }
    if doing == Some("ended") {
        wait_until_the_disk_is_waited_for(&vmm);
    }
    Scene { vmm, doing, without, signal: Signal::Waits, waiting, blocker }
}

fn running() -> Scene {
    // An NMI resets this guest, as it has no interrupt descriptor table.
    let without =
        &["vm.pause", "vm.reboot", "vm.shutdown", "vm.delete", "vm.send-migration", "vm.nmi"];
    while_hung(None, None, without)
}

fn paused() -> Scene {
    while_hung(Some("vm.pause"), Some("paused"), &["vm.resume"])
}

fn shut_down() -> Scene {
    while_hung(Some("vm.shutdown"), Some("ended"), &[])
}

fn rebooted() -> Scene {
    let scene = while_hung(Some("vm.reboot"), Some("ended"), &[]);
    // What the disk has not written back is written back meanwhile.
    Scene { signal: Signal::WaitsInTheKernel, ..scene }
}

fn saved() -> Scene {
    let folder = TempDir::with_prefix("godwit-full-").expect("a folder");
    let (system, mount) = (folder.path().join("system"), folder.path().join("mount"));
    fs::File::create(&system).and_then(|file| file.set_len(64 << 20)).expect("a file");
    format(&system);
    fs::create_dir(&mount).expect("a folder");
    let system = system.to_str().expect("UTF-8");
    let mounted = Mounted::at(&mount, &["-t", "ext4", "-o", "loop,noatime", system]);
    let url = format!("file://{}/snapshot", mount.display());
    fs::create_dir(mount.join("snapshot")).expect("a folder");
    let frozen = mounted.freeze();
    let vmm = running_vm(&[]);
    vmm.api().put("vm.pause", "").ok();
    let body = json!({ "destination_url": url }).to_string();
    let waiting = Some(begin(&vmm, "vm.snapshot", &body));
    wait_until_doing(&vmm, "saved");
    // From then on nothing changes by itself.
    wait_for("the file system to hold it", || {
        process::waits_in_the_kernel(vmm.pid()).then_some(())
    });
    Scene {
        vmm,
        doing: Some("saved"),
        without: &["vm.snapshot-cancel"],
        signal: Signal::WaitsInTheKernel,
        waiting,
        blocker: Box::new((frozen, mounted, folder)),
    }
}

fn migrated() -> Scene {
    // Connections are made, and nothing answers there.
    let silent = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = silent.local_addr().expect("an address");
    let vmm = running_vm(&[]);
    let body = json!({ "destination_url": format!("tcp:{address}") }).to_string();
    vmm.api().put("vm.send-migration", &body).ok();
    wait_until_doing(&vmm, "migrated");
    let (mut source, _) = silent.accept().expect("a connection");
    // From its first message on it waits for the answer.
    source.read_exact(&mut [0]).expect("its first message");
    Scene {
        vmm,
        doing: Some("migrated"),
        without: &["vm.migration-cancel"],
        signal: Signal::Waits,
        waiting: None,
        blocker: Box::new((silent, source)),
    }
}

const RECEIVE: &str = r#"{"receiver_url":"tcp:127.0.0.1:0"}"#;

fn awaited() -> Scene {
    let vmm = Vmm::empty();
    let waiting = Some(begin(&vmm, "vm.receive-migration", RECEIVE));
    vmm.wait_for_event("migration-receive-ready");
    Scene {
        vmm,
        doing: None,
        without: &["vm.migration-cancel", "vm.delete"],
        signal: Signal::Ends,
        waiting,
        blocker: Box::new(()),
    }
}

fn awaited_from_a_silent_peer() -> Scene {
    let scene = awaited();
    let ready = scene.vmm.wait_for_event("migration-receive-ready");
    let address = ready["properties"]["address"].as_str().expect("an address");
    let address = address.strip_prefix("tcp:").expect("a TCP port");
    let sockets = || {
        let all = process::descriptors(scene.vmm.pid());
        all.iter().filter(|target| target.starts_with("socket:")).count()
    };
    // Connections of requests that were answered are closed a moment later.
    let later_looks = (0..20).map(|_| {
        std::thread::sleep(Duration::from_millis(5));
        sockets()
    });
    let before = later_looks.min().expect("looks");
    let peer = TcpStream::connect(address).expect("a connection");
    wait_for("the connection to be taken", || (sockets() > before).then_some(()));
    Scene { blocker: Box::new(peer), ..scene }
}

/// A VMM whose resolver asks a server that does not answer, and the server.
fn unresolving() -> (Vmm, UdpSocket, TempDir) {
    let folder = TempDir::with_prefix("godwit-resolver-").expect("a folder");
    let server = match UdpSocket::bind("127.83.77.9:53") {
        Ok(server) => server,
        Err(error) => skip(format!("a name server cannot be had: {error}")),
    };
    server.set_nonblocking(true).expect("a socket");
    let settings = folder.path().join("resolv.conf");
    fs::write(&settings, "nameserver 127.83.77.9\noptions timeout:30 attempts:5\n")
        .expect("a file");
    let settings = settings.to_str().expect("UTF-8");
    let script = "mount --bind \"$0\" /etc/resolv.conf && exec \"$@\"";
    let words = ["unshare", "--mount", "sh", "-c", script, settings];
    let (code, output) = VmmBuilder::new(&["--version"]).bare().wrapped(&words).run();
    if code != 0 {
        skip(format!("a resolver of its own cannot be had: {output}"));
    }
    (VmmBuilder::new::<&str>(&[]).wrapped(&words).start(), server, folder)
}

/// Begins to wait for a migration where only the resolver knows.
fn receive_at_a_name(vmm: &Vmm, server: &UdpSocket) -> JoinHandle<std::io::Result<Answer>> {
    let body = r#"{"receiver_url":"tcp:host.godwit-test.example:0"}"#;
    let waiting = begin(vmm, "vm.receive-migration", body);
    wait_for("a question to the name server", || {
        assert!(!waiting.is_finished(), "{}", vmm.output());
        server.recv(&mut [0; 512]).ok()
    });
    // That may have been one of an earlier wait.
    wait_for("the wait", || {
        vmm.api().get("vm.info").body.contains("a migration is awaited").then_some(())
    });
    waiting
}

fn awaited_at_a_name() -> Scene {
    let (vmm, server, folder) = unresolving();
    let waiting = Some(receive_at_a_name(&vmm, &server));
    Scene {
        vmm,
        doing: None,
        without: &["vm.migration-cancel", "vm.delete"],
        signal: Signal::Ends,
        waiting,
        blocker: Box::new((server, folder)),
    }
}

fn cancel_resolution() {
    let (vmm, server, _folder) = unresolving();
    for name in ["vm.migration-cancel", "vm.delete"] {
        let waiting = receive_at_a_name(&vmm, &server);
        prompt_put(&vmm.api(), name).ok();
        let received = waiting.join().expect("it ends").expect("an answer");
        assert!(received.status >= 400 && received.body.contains("cancelled"), "{received:?}");
    }
    // A name that can be resolved is listened at as before.
    let waiting = begin(&vmm, "vm.receive-migration", r#"{"receiver_url":"tcp:localhost:0"}"#);
    let ready = vmm.wait_for_event("migration-receive-ready");
    let address = ready["properties"]["address"].as_str().expect("an address");
    assert!(address.starts_with("tcp:localhost:"), "{ready}");
    prompt_put(&vmm.api(), "vm.migration-cancel").ok();
    waiting.join().expect("it ends").expect("an answer");
    vmm.shut_down();
}
