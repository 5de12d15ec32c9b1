// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Passed-through devices that take long to be opened: what can be asked of their VM meanwhile, and how that ends.
//!
//! No VFIO of the host is needed: a library that is loaded into the VMM stands in (`probes/vfio-stand-in.c`), whose devices
//! are opened when the test says so. They do nothing, and memory is not mapped for them in truth.

use std::ffi::CString;
use std::fs;
use std::io::{Read as _, Write as _};
use std::net::Shutdown;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{OpenOptionsExt as _, symlink};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use prezero_pool_client::{MESSAGE_BYTES_MAX, Refusal, Reply, Request, TakePinned};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::harness::api::Answer;
use crate::harness::{PATIENCE, Suite, Vmm, VmmBuilder, is_root, skip, wait_for};
use crate::hotplug::places;
use crate::lifecycle::config;

pub fn add(suite: &mut Suite) {
    suite.add("late_devices::a_vm_lives_while_a_device_is_opened", lives);
    suite.add("late_devices::one_comes_to_a_paused_vm", paused);
    suite.add("late_devices::one_that_cannot_be_opened_is_left_out", fails);
    suite.add("late_devices::one_is_removed_before_it_is_open", removed);
    suite.add("late_devices::a_reboot_does_not_wait", reboot);
    suite.add("late_devices::a_pool_is_told_of_them_again_only_if_it_was_started_anew", pool);
    suite.add("late_devices::a_deletion_does_not_wait", deleted);
    suite.add("late_devices::the_next_vm_is_refused_it_until_it_is_closed", given_to_another);
    suite.add("late_devices::the_end_of_the_vmm_does_not_wait", ended);
    suite.add("late_devices::the_start_waits_for_one_that_the_guest_cannot_be_without", overlap);
}

const MEMORY: &str = "size=128M,shared=on";
const GUEST: &str = "workload=random-write mem=16M";
/// In which what waits for no device is answered on a busy host: the devices here are never open before they are told to be.
const PROMPT: Duration = Duration::from_secs(10);
/// Longer than any device is waited for that the guest can be without, and a VMM takes to start a guest.
const LATE: Duration = Duration::from_secs(8);
/// What the library takes for leave to open a device.
const OPENS: u8 = b'o';
const FAILS: u8 = b'f';

/// The library, compiled once.
fn library() -> &'static Path {
    static LIBRARY: OnceLock<Option<PathBuf>> = OnceLock::new();
    let compile = || {
        let source = concat!(env!("CARGO_MANIFEST_DIR"), "/probes/vfio-stand-in.c");
        let library = Path::new(env!("CARGO_TARGET_TMPDIR")).join("vfio-stand-in.so");
        let mut compiler = Command::new("cc");
        compiler.args(["-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-o"]);
        let output = compiler.arg(&library).arg(source).output().ok()?;
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        Some(library)
    };
    LIBRARY.get_or_init(compile).as_deref().unwrap_or_else(|| skip("there is no C compiler"))
}

/// A host with devices.
struct Host(TempDir);

impl Host {
    fn new() -> Self {
        if !is_root() {
            skip("the memory of a VM with devices is above the limit on locked memory");
        }
        Self(TempDir::with_prefix("godwit-late-").expect("a folder"))
    }

    /// A device, in a group of its own.
    fn device(&self, number: u8) -> Device {
        let folder = self.0.path();
        let name = format!("0000:{number:02x}:00.0");
        let path = folder.join(&name);
        fs::create_dir(&path).expect("a folder");
        let link = |target: &str, name: &str| symlink(target, path.join(name)).expect("a link");
        link(&format!("/sys/kernel/iommu_groups/{number}"), "iommu_group");
        link("/sys/bus/pci/drivers/vfio-pci", "driver");
        fs::write(path.join("reset_method"), "flr\n").expect("a file");
        Device { pipe: folder.join(format!("{name}.pipe")), path }
    }

    /// One that is opened when the test says so.
    fn slow_device(&self, number: u8) -> Device {
        let device = self.device(number);
        let pipe = CString::new(device.pipe.as_os_str().as_bytes()).expect("a path");
        // SAFETY: a string that ends with a zero byte, and lives across the call.
        assert_eq!(unsafe { libc::mkfifo(pipe.as_ptr(), 0o600) }, 0);
        device
    }

    /// A VMM on it.
    fn vmm(&self, builder: VmmBuilder) -> VmmBuilder {
        let library = format!("LD_PRELOAD={}", library().display());
        let folder = format!("VFIO_STAND_IN={}", self.0.path().display());
        // What stands in does more than the VMM's threads may.
        builder.wrapped(&["env", &library, &folder]).with(&["--seccomp", "false"]).unconfined()
    }

    /// A VMM that boots a guest with these devices.
    fn guest(&self, devices: &[String]) -> VmmBuilder {
        let builder = self.vmm(VmmBuilder::guest(1, MEMORY, GUEST)).with(&["--device"]);
        builder.with(devices)
    }
}

struct Device {
    path: PathBuf,
    pipe: PathBuf,
}

impl Device {
    fn option(&self, id: &str) -> String {
        format!("path={},id={id}", self.path.display())
    }

    fn json(&self, id: &str) -> Value {
        json!({"path": self.path, "id": id})
    }

    /// Has the next attempt to open it end so; waits for that attempt.
    #[track_caller]
    fn ends(&self, how: u8) {
        let taken = || fs::metadata(self.pipe.with_extension("taken")).map_or(0, |it| it.len());
        let (before, mut options) = (taken(), fs::File::options());
        let options = options.write(true).custom_flags(libc::O_NONBLOCK);
        let mut pipe = wait_for("the attempt to open it", || options.open(&self.pipe).ok());
        pipe.write_all(&[how]).expect("it waits");
        wait_for("the end of the attempt", || (taken() > before).then_some(()));
    }
}

/// Ids of withheld devices, and what each waits for.
fn withheld(vmm: &Vmm) -> Vec<(String, String)> {
    let info = vmm.api().get("vm.info").ok().json();
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let listed = info["passthrough"]["withheld"].as_array().cloned().unwrap_or_default();
    listed.iter().map(|device| (text(&device["id"]), text(&device["waits_for"]))).collect()
}

#[track_caller]
fn is_late(vmm: &Vmm) {
    assert_eq!(vmm.api().state(), "Running");
    assert_eq!(withheld(vmm), [("late".to_owned(), "Opening".to_owned())]);
}

fn count(vmm: &Vmm, name: &str, id: &str) -> usize {
    let is_it = |event: &&Value| event["event"] == name && event["properties"]["id"] == id;
    vmm.events().iter().filter(is_it).count()
}

#[track_caller]
fn wait_for_device(vmm: &Vmm, event: &str, id: &str) {
    wait_for(event, || (count(vmm, event, id) > 0).then_some(()));
}

#[track_caller]
fn refused(answer: &Answer, why: &str) {
    assert!((400..600).contains(&answer.status) && answer.body.contains(why), "{answer:?}");
}

/// What is answered without a wait for a device.
#[track_caller]
fn prompt<T>(ask: impl FnOnce() -> T) -> T {
    let asked = Instant::now();
    let answer = ask();
    assert!(asked.elapsed() < PROMPT, "after {} ms", asked.elapsed().as_millis());
    answer
}

fn id(id: &str) -> String {
    json!({"id": id}).to_string()
}

fn lives() {
    let host = Host::new();
    let (late, here) = (host.slow_device(0x65), host.device(0x66));
    let vmm = host.guest(&[late.option("late"), here.option("here")]).start();
    let api = vmm.api();
    is_late(&vmm);
    vmm.wait_for_heartbeat();
    vmm.wait_for_event("passthrough-pinned");
    let info = api.get("vm.info").ok().json();
    assert_eq!(info["passthrough"]["state"], "Pinned", "{info}");
    let ids: Vec<_> = places(&api).into_iter().map(|(id, _)| id).collect();
    assert!(["here", "late"].iter().all(|id| ids.iter().any(|other| other == id)), "{ids:?}");
    prompt(|| api.put("vm.pause", "").ok());
    assert_eq!(api.state(), "Paused");
    let why = "'late': it is still being opened";
    let snapshot = json!({"destination_url": format!("file://{}", vmm.path("saved").display())});
    refused(&prompt(|| api.put("vm.snapshot", &snapshot.to_string())), why);
    prompt(|| api.put("vm.resume", "").ok());
    let there = json!({"destination_url": format!("unix:{}", vmm.path("nowhere").display())});
    refused(&prompt(|| api.put("vm.send-migration", &there.to_string())), why);
    let disk = vmm.path("disk");
    fs::File::create(&disk).and_then(|file| file.set_len(1 << 20)).expect("a file");
    let disk = json!({"path": disk, "id": "disk", "image_type": "Raw"});
    prompt(|| api.put("vm.add-disk", &disk.to_string()).ok());
    let third = host.device(0x67);
    prompt(|| api.put("vm.add-device", &third.json("third").to_string()).ok());
    wait_for_device(&vmm, "device-added", "third");
    is_late(&vmm);
    late.ends(OPENS);
    wait_for_device(&vmm, "device-added", "late");
    assert!(withheld(&vmm).is_empty());
    assert_eq!(count(&vmm, "device-added", "here"), 0, "the guest has found it when it booted");
    vmm.wait_for_heartbeat();
    vmm.shut_down();
}

fn paused() {
    let host = Host::new();
    let late = host.slow_device(0x65);
    let vmm = host.guest(&[late.option("late")]).start();
    let api = vmm.api();
    is_late(&vmm);
    let info = api.get("vm.info").ok().json();
    assert_eq!(info["passthrough"]["pinned_bytes"], 0, "there is nothing to map for: {info}");
    api.put("vm.pause", "").ok();
    late.ends(OPENS);
    wait_for_device(&vmm, "device-added", "late");
    assert_eq!(api.state(), "Paused");
    vmm.wait_for_event("passthrough-pinned");
    api.put("vm.resume", "").ok();
    vmm.wait_for_heartbeat();
    vmm.shut_down();
}

fn fails() {
    let host = Host::new();
    let (late, other) = (host.slow_device(0x65), host.slow_device(0x66));
    let vmm = host.guest(&[late.option("late"), other.option("other")]).start();
    let api = vmm.api();
    assert_eq!(withheld(&vmm).len(), 2);
    let place = |of: &str| places(&api).into_iter().find(|(id, _)| id == of).map(|found| found.1);
    let before = place("late").expect("it has one");
    late.ends(FAILS);
    wait_for_device(&vmm, "device-removed", "late");
    let lost = vmm.wait_for_event("passthrough-device-lost");
    assert_eq!(lost["properties"]["id"], "late", "{lost}");
    assert!(lost["properties"]["error"].to_string().contains("0000:65:00.0"), "{lost}");
    assert_eq!(api.state(), "Running");
    let info = api.get("vm.info").ok().json();
    let devices = info["config"]["devices"].as_array().expect("the other one");
    assert!(devices.len() == 1 && devices[0]["id"] == "other", "{info}");
    let third = host.device(0x67);
    api.put("vm.add-device", &third.json("third").to_string()).ok();
    assert_eq!(place("third"), Some(before), "its number is free");
    other.ends(OPENS);
    wait_for_device(&vmm, "device-added", "other");
    vmm.wait_for_heartbeat();
    vmm.shut_down();
}

fn removed() {
    let host = Host::new();
    let late = host.slow_device(0x65);
    let vmm = host.guest(&[late.option("late")]).start();
    let api = vmm.api();
    is_late(&vmm);
    prompt(|| api.put("vm.remove-device", &id("late")).ok());
    wait_for_device(&vmm, "device-removed", "late");
    assert!(withheld(&vmm).is_empty());
    let info = api.get("vm.info").ok().json();
    assert!(info["config"]["devices"].is_null() && info["passthrough"].is_null(), "{info}");
    let again = || api.put("vm.add-device", &late.json("late").to_string());
    refused(&prompt(again), "the host is still opening it");
    late.ends(OPENS);
    fs::remove_file(&late.pipe).expect("from now on it is opened at once");
    wait_for("it can be added again", || (again().status == 200).then_some(()));
    wait_for_device(&vmm, "device-added", "late");
    assert_eq!(count(&vmm, "passthrough-device-opened", "late"), 1, "the first was for nothing");
    vmm.shut_down();
}

fn reboot() {
    let host = Host::new();
    let (late, here) = (host.slow_device(0x65), host.device(0x66));
    let vmm = host.guest(&[late.option("late"), here.option("here")]).start();
    let api = vmm.api();
    is_late(&vmm);
    for _ in 0..2 {
        // The next guest waits for the device as any does.
        api.put("vm.reboot", "").ok();
        is_late(&vmm);
        vmm.wait_for_heartbeat();
    }
    // For the first guest, which is gone, and then for the last.
    late.ends(OPENS);
    late.ends(OPENS);
    wait_for_device(&vmm, "device-added", "late");
    assert_eq!(count(&vmm, "passthrough-device-opened", "late"), 1);
    assert_eq!(count(&vmm, "passthrough-device-opened", "here"), 3);
    vmm.shut_down();
}

/// What comes of a connection to a pool.
#[derive(Debug)]
enum Said {
    Opened(UnixStream),
    Asked(Request),
    Closed,
}

/// A pool that refuses everything.
struct RefusingPool {
    path: PathBuf,
    said: Receiver<Said>,
}

impl RefusingPool {
    fn start(folder: &Path) -> Self {
        let path = folder.join("pool");
        let listener = UnixListener::bind(&path).expect("a socket");
        let (sender, said) = channel();
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let sender = sender.clone();
                std::thread::spawn(move || refuse_all(stream, &sender));
            }
        });
        Self { path, said }
    }

    #[track_caller]
    fn next(&self) -> Said {
        self.said.recv_timeout(PATIENCE).expect("something is said")
    }

    /// A connection over which devices and memory are asked for.
    #[track_caller]
    fn next_opened(&self) -> (UnixStream, TakePinned) {
        match (self.next(), self.next()) {
            (Said::Opened(stream), Said::Asked(Request::TakePinned(request))) => (stream, request),
            other => panic!("{other:?}"),
        }
    }

    #[track_caller]
    fn assert_silent(&self) {
        let said = self.said.try_recv();
        assert!(said.is_err(), "{said:?}");
    }
}

fn refuse_all(mut stream: UnixStream, said: &Sender<Said>) {
    let mut bytes = vec![0; MESSAGE_BYTES_MAX];
    let _ = said.send(Said::Opened(stream.try_clone().expect("a descriptor")));
    while let Ok(len @ 1..) = stream.read(&mut bytes) {
        let (request, _) = Request::decode(&bytes[..len]).expect("valid").expect("all of it");
        let _ = said.send(Said::Asked(request));
        let refused = Reply::Refused { reason: Refusal::Empty, text: String::new() };
        let _ = stream.write_all(&refused.encode());
    }
    let _ = said.send(Said::Closed);
}

fn pool() {
    let host = Host::new();
    let late = host.slow_device(0x65);
    fs::create_dir_all(late.path.join("vfio-dev/0000:65:00.0")).expect("a folder");
    let pool = RefusingPool::start(host.0.path());
    let memory = format!("{MEMORY},prezeroed={}", pool.path.display());
    let options = ["--platform", "iommufd=on", "--device", &late.option("late")];
    let vmm = host.vmm(VmmBuilder::guest(1, &memory, GUEST)).with(&options).start();
    let (stream, request) = pool.next_opened();
    assert_eq!(request.zones.len(), 1);
    let said = pool.next();
    assert!(matches!(said, Said::Asked(Request::Take(_))), "{said:?}");
    let reboot = || {
        vmm.api().put("vm.reboot", "").ok();
        is_late(&vmm);
    };
    for _ in 0..2 {
        reboot();
        // Nor is the connection closed, over which the pool leaves the device alone.
        pool.assert_silent();
    }
    stream.shutdown(Shutdown::Both).expect("an open connection");
    let said = pool.next();
    assert!(matches!(said, Said::Closed), "{said:?}");
    reboot();
    let (_stream, again) = pool.next_opened();
    let (zones, regions) = (Vec::new(), Vec::new());
    assert_eq!(again, TakePinned { devices: request.devices, zones, regions });
    reboot();
    pool.assert_silent();
    vmm.shut_down();
}

fn deleted() {
    let host = Host::new();
    let late = host.slow_device(0x65);
    let vmm = host.vmm(VmmBuilder::new::<&str>(&[])).start();
    let api = vmm.api();
    let mut config: Value = serde_json::from_str(&config(128)).expect("JSON");
    config["devices"] = json!([late.json("late")]);
    for end in ["vm.delete", "vm.shutdown"] {
        api.put("vm.create", &config.to_string()).ok();
        api.put("vm.boot", "").ok();
        is_late(&vmm);
        prompt(|| api.put(end, "").ok());
        api.put("vm.delete", "").ok();
        assert_eq!(api.get("vm.info").status, 404);
    }
    api.put("vm.create", &config.to_string()).ok();
    api.put("vm.boot", "").ok();
    is_late(&vmm);
    late.ends(OPENS);
    late.ends(OPENS);
    wait_for_device(&vmm, "device-added", "late");
    assert_eq!(count(&vmm, "passthrough-device-opened", "late"), 1);
    vmm.shut_down();
}

fn given_to_another() {
    let host = Host::new();
    let late = host.slow_device(0x65);
    let vmm = host.vmm(VmmBuilder::new::<&str>(&[])).start();
    let api = vmm.api();
    let without: Value = serde_json::from_str(&config(128)).expect("JSON");
    let mut with = without.clone();
    with["devices"] = json!([late.json("late")]);
    api.put("vm.create", &with.to_string()).ok();
    api.put("vm.boot", "").ok();
    is_late(&vmm);
    prompt(|| api.put("vm.delete", "").ok());
    api.put("vm.create", &without.to_string()).ok();
    api.put("vm.boot", "").ok();
    let add = || api.put("vm.add-device", &late.json("late").to_string());
    refused(&prompt(add), "for a VM that has ended");
    late.ends(OPENS);
    fs::remove_file(&late.pipe).expect("from now on it is opened at once");
    wait_for("it can be added", || (add().status == 200).then_some(()));
    wait_for_device(&vmm, "device-added", "late");
    vmm.shut_down();
}

fn ended() {
    let host = Host::new();
    let late = host.slow_device(0x65);
    let mut vmm = host.guest(&[late.option("late")]).start();
    is_late(&vmm);
    vmm.signal(libc::SIGTERM);
    assert_eq!(prompt(|| vmm.wait_for_exit()), 0, "{}", vmm.output());
    assert!(vmm.event_names().iter().any(|name| name == "shutdown"));
    // While its start still waits.
    let mut vmm = host.guest(&[late.option("late")]).start_at_once();
    vmm.signal(libc::SIGTERM);
    assert_eq!(prompt(|| vmm.wait_for_exit()), 0, "{}", vmm.output());
    let vmm = host.guest(&[late.option("late")]).start();
    prompt(|| vmm.shut_down());
}

fn overlap() {
    let host = Host::new();
    let (late, needed) = (host.slow_device(0x65), host.slow_device(0x66));
    let needs = format!("{},pin=overlap", needed.option("needed"));
    let mut vmm = host.guest(&[late.option("late"), needs]).start_at_once();
    wait_for("the other one is late", || vmm.output().contains("'late' takes long").then_some(()));
    let info = vmm.api().get("vm.info").ok().json();
    assert_eq!((&info["state"], &info["doing"]), (&json!("Created"), &json!("booted")), "{info}");
    needed.ends(OPENS);
    wait_for("the VM", || {
        assert!(vmm.exited().is_none(), "{}", vmm.output());
        (vmm.api().state() == "Running").then_some(())
    });
    is_late(&vmm);
    late.ends(OPENS);
    wait_for_device(&vmm, "device-added", "late");
    vmm.shut_down();

    // Alone, and open later than any other is waited for.
    let alone = [format!("{},pin=overlap", needed.option("needed"))];
    let mut vmm = host.guest(&alone).start_at_once();
    let started = Instant::now();
    wait_for("the time to pass", || (started.elapsed() > LATE).then_some(()));
    assert_eq!(vmm.api().state(), "Created");
    needed.ends(OPENS);
    wait_for("the VM", || {
        assert!(vmm.exited().is_none(), "{}", vmm.output());
        (vmm.api().state() == "Running").then_some(())
    });
    vmm.wait_for_event("passthrough-pinned");
    let info = vmm.api().get("vm.info").ok().json();
    assert!(info["passthrough"]["withheld"].is_null(), "{info}");
    vmm.shut_down();

    let mut vmm = host.guest(&alone).start_at_once();
    needed.ends(FAILS);
    assert_eq!(vmm.wait_for_exit(), 1, "the VM does not start without it: {}", vmm.output());
}
