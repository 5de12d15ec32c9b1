// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! libvirt's driver: libcurl on one connection, requests made by hand where descriptors go with them, and a
//! FIFO with events.
//!
//! The API socket is made by libvirt and inherited. An answer to a request made by hand is what one `recv`
//! gives within half a second. Events are told apart by counting braces in a buffer of 4096 bytes. Threads
//! of vCPUs and devices are known by their names.

use std::fs::{self, File};
use std::io::{Read as _, Write as _};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileTypeExt as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use serde_json::{Value, json};

use super::{Place, start, thread_names, wait_for_socket};
use crate::harness::api::{Answer, read_answer};
use crate::harness::programs::VMM;
use crate::harness::taps::{Tap, inherited, send_with, taps_of};
use crate::harness::{Suite, Vmm, image, wait_for};

pub fn add(suite: &mut Suite) {
    suite.add("clients::libvirt_runs_saves_and_restores_a_domain", domain);
    suite.add("clients::libvirt_has_the_serial_port_at_a_socket", serial_socket);
    suite.add("clients::libvirt_finds_every_event", events);
    suite.add("clients::libvirt_reads_the_version", version);
}

/// Size of its buffer for events.
const EVENT_BUFFER_BYTES: usize = 4096;

/// What has been read from the FIFO: `source:event`, and the whole.
type Events = Arc<Mutex<Vec<(String, Value)>>>;

/// The driver's end of one domain.
struct Monitor {
    vmm: Vmm,
    socket: PathBuf,
    curl: Option<UnixStream>,
    events: Events,
}

/// Reads events from the FIFO until its writer is gone.
fn read_events(fifo: &Path, events: &Events) {
    let mut file = File::open(fifo).expect("the FIFO");
    let mut buffer = [0; EVENT_BUFFER_BYTES - 1];
    let mut filled = 0;
    loop {
        let count = file.read(&mut buffer[filled..]).expect("events");
        if count == 0 {
            return;
        }
        filled += count;
        let (mut depth, mut start) = (0, None);
        for at in 0..filled {
            match (buffer[at], start) {
                (b'{', _) => {
                    depth += 1;
                    start = start.or(Some(at));
                }
                (b'}', Some(from)) => {
                    depth -= 1;
                    if depth == 0 {
                        let event: Value =
                            serde_json::from_slice(&buffer[from..=at]).expect("an event");
                        let text = |key: &str| event[key].as_str().expect("a text").to_owned();
                        let name = format!("{}:{}", text("source"), text("event"));
                        let mut events = events.lock();
                        events.push((name, event));
                        start = None;
                    }
                }
                _ => {}
            }
        }
        filled = start.map_or(0, |from| {
            buffer.copy_within(from..filled, 0);
            filled - from
        });
        assert!(filled < buffer.len(), "an event does not fit into the buffer");
    }
}

impl Monitor {
    fn start(place: &Place) -> Self {
        let socket = place.at("domain-socket");
        let _ = fs::remove_file(&socket);
        let listener: OwnedFd = UnixListener::bind(&socket).expect("a socket").into();
        let fifo = place.at("domain-event-monitor-fifo");
        let _ = fs::remove_file(&fifo);
        let made = Command::new("mkfifo").arg("-m600").arg(&fifo).status();
        assert!(made.is_ok_and(|status| status.success()), "a FIFO");
        let monitor = format!("path={}", fifo.display());
        let vmm = inherited(&listener, |number| {
            start(&["--api-socket", &format!("fd={number}"), "--event-monitor", &monitor])
        });
        drop(listener);
        let events = Events::default();
        let for_thread = Arc::clone(&events);
        std::thread::spawn(move || read_events(&fifo, &for_thread));
        Self { vmm, socket, curl: None, events }
    }

    /// libcurl keeps its connection, and makes another if it was closed.
    fn curl(&mut self, request: &str) -> Answer {
        let mut stream = self.curl.take().unwrap_or_else(|| connect(&self.socket));
        stream.write_all(request.as_bytes()).expect("sent");
        let answer = read_answer(&mut stream).expect("an answer");
        self.curl = Some(stream);
        answer
    }

    #[track_caller]
    fn put(&mut self, name: &str) {
        let answer = self.curl(&format!(
            "PUT /api/v1/{name} HTTP/1.1\r\nHost: localhost\r\nAccept: application/json\r\n\
             Content-Length: 0\r\n\r\n"
        ));
        assert!(matches!(answer.status, 200 | 204), "{name}: {answer:?}");
    }

    /// The same as older versions of the driver send it, which give no length.
    #[track_caller]
    fn put_chunked(&mut self, name: &str) {
        let mut stream = self.curl.take().unwrap_or_else(|| connect(&self.socket));
        let head = format!(
            "PUT /api/v1/{name} HTTP/1.1\r\nHost: localhost\r\nAccept: */*\r\n\
             Transfer-Encoding: chunked\r\nExpect: 100-continue\r\n\r\n"
        );
        stream.write_all(head.as_bytes()).expect("sent");
        let mut go_on = [0; 25];
        stream.read_exact(&mut go_on).expect("an answer");
        assert_eq!(&go_on, b"HTTP/1.1 100 Continue\r\n\r\n");
        stream.write_all(b"0\r\n\r\n").expect("sent");
        let answer = read_answer(&mut stream).expect("an answer");
        assert!(matches!(answer.status, 200 | 204), "{name}: {answer:?}");
        self.curl = Some(stream);
    }

    #[track_caller]
    fn put_json(&mut self, name: &str, body: &Value) {
        let body = body.to_string();
        let answer = self.curl(&format!(
            "PUT /api/v1/{name} HTTP/1.1\r\nHost: localhost\r\nAccept: application/json\r\n\
             Content-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        ));
        assert!(matches!(answer.status, 200 | 204), "{name}: {answer:?}");
    }

    fn info(&mut self) -> Value {
        let answer = self.curl(
            "GET /api/v1/vm.info HTTP/1.1\r\nHost: localhost\r\nAccept: application/json\r\n\
             Content-Type: application/json\r\n\r\n",
        );
        assert_eq!(answer.status, 200, "{answer:?}");
        answer.json()
    }

    #[track_caller]
    fn wait_for_event(&self, name: &str) -> Value {
        wait_for(name, || {
            let events = self.events.lock();
            events.iter().find(|(it, _)| it == name).map(|(_, event)| event.clone())
        })
    }

    /// The numbers of the threads, which libvirt reads as soon as a start or a restore is answered.
    fn threads(&self) -> Vec<PathBuf> {
        let tasks = fs::read_dir(format!("/proc/{}/task", self.vmm.pid())).expect("threads");
        tasks.map(|task| task.expect("a thread").path()).collect()
    }

    /// Each of these gets a cgroup a little later, and one that is gone has the start fail.
    #[track_caller]
    fn have_stayed(&self, threads: &[PathBuf]) {
        let names = thread_names(self.vmm.pid());
        assert!(threads.iter().all(|task| task.exists()), "{threads:?}, now {names:?}");
    }

    /// What is done when a domain has started: threads get their CPUs, terminals their names.
    fn set_up(&mut self, vcpus: usize) {
        let names = thread_names(self.vmm.pid());
        let numbers = names.iter().filter_map(|name| name.strip_prefix("vcpu"));
        let numbers: Result<Vec<usize>, _> = numbers.map(str::parse).collect();
        let mut numbers = numbers.unwrap_or_else(|error| panic!("{error}: {names:?}"));
        numbers.sort_unstable();
        assert!(numbers.into_iter().eq(0..vcpus), "{names:?}");
        let info = self.info();
        for device in ["console", "serial"] {
            let path = info["config"][device]["file"].as_str().expect("a terminal");
            let kind = fs::metadata(path).expect("the terminal").file_type();
            assert!(kind.is_char_device(), "{device}: {path}");
        }
    }

    /// Ends the process, as every domain's is.
    fn abort(mut self) {
        self.vmm.signal(libc::SIGTERM);
        assert_eq!(self.vmm.wait_for_exit(), 0, "{}", self.vmm.output());
    }
}

fn connect(socket: &Path) -> UnixStream {
    let stream = UnixStream::connect(socket).expect("a connection");
    stream.set_read_timeout(Some(Duration::from_secs(100))).expect("a limit");
    stream
}

/// One message with a request and its descriptors; the answer is one `recv`.
#[track_caller]
fn by_hand(
    stream: &mut UnixStream,
    name: &str,
    body: &Value,
    fds: &[BorrowedFd<'_>],
    limit: Option<Duration>,
) {
    let body = body.to_string();
    let request = format!(
        "PUT /api/v1/{name} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n\
         Content-Length: {}\r\n\r\n{body}",
        body.len()
    );
    send_with(&*stream, &request, fds);
    stream.set_read_timeout(limit).expect("a limit");
    let mut piece = [0; 1023];
    let count = stream.read(&mut piece).expect("an answer in time");
    let text = String::from_utf8_lossy(&piece[..count]).into_owned();
    let status = text.strip_prefix("HTTP/1.").and_then(|rest| rest.split_once(' '));
    let status = status.map(|(_, rest)| rest.chars().take_while(char::is_ascii_digit).collect());
    let status: String = status.unwrap_or_default();
    assert!(matches!(status.as_str(), "200" | "204"), "{name}: {text}");
    // What is left would be taken for the answer to the next request; it may come at any time later.
    let (head, rest) = text.split_once("\r\n\r\n").expect("a whole head");
    let length = head.lines().find_map(|line| line.strip_prefix("Content-Length: "));
    let length: usize = length.map_or(0, |length| length.parse().expect("a length"));
    assert_eq!(rest.len(), length, "{name}: the answer came in several pieces");
    stream.set_nonblocking(true).expect("a flag");
    assert!(stream.read(&mut piece).is_err(), "{name}: the answer came in several pieces");
    stream.set_nonblocking(false).expect("a flag");
}

fn config(place: &Place) -> Value {
    json!({
        "console": {"mode": "Pty"},
        "serial": {"mode": "Pty"},
        "cpus": {"boot_vcpus": 2, "max_vcpus": 2},
        "memory": {"size": 192_u64 << 20},
        "payload": {"kernel": image(), "cmdline": "workload=random-write mem=32M"},
        "disks": [
            {"path": place.disk("disk")}, {"path": place.disk("seed"), "readonly": true},
        ],
    })
}

fn net(index: usize) -> Value {
    let id = format!("net_{index}");
    json!({"id": id, "mac": format!("52:54:00:00:00:0{index}"), "num_queues": 2, "queue_size": 256})
}

const ADD_LIMIT: Option<Duration> = Some(Duration::from_millis(500));

fn domain() {
    let place = Place::new();
    let mut monitor = Monitor::start(&place);
    monitor.put_json("vm.create", &config(&place));
    let taps = [Tap::open(), Tap::open()];
    let mut stream = connect(&monitor.socket);
    for (index, tap) in taps.iter().enumerate() {
        by_hand(&mut stream, "vm.add-net", &net(index), &[tap.fd.as_fd()], ADD_LIMIT);
    }
    drop(stream);
    monitor.put("vm.boot");
    let threads = monitor.threads();
    assert_eq!(taps_of(&monitor.vmm), taps.map(Tap::close));
    monitor.wait_for_event("vm:booted");
    monitor.set_up(2);
    monitor.vmm.wait_for_heartbeat();
    monitor.have_stayed(&threads);
    // Attached and detached while it runs.
    let tap = Tap::open();
    let mut stream = connect(&monitor.socket);
    by_hand(&mut stream, "vm.add-net", &net(2), &[tap.fd.as_fd()], ADD_LIMIT);
    let disk = json!({"path": place.disk("hot"), "id": "virtio-disk2"});
    monitor.put_json("vm.add-disk", &disk);
    monitor.put_json("vm.remove-device", &json!({"id": "virtio-disk2"}));
    drop(tap);
    // A reboot gives the terminals other names.
    monitor.put("vm.reboot");
    monitor.wait_for_event("vm:rebooted");
    monitor.set_up(2);
    monitor.vmm.wait_for_heartbeat();
    let folder = place.at("saved");
    fs::create_dir(&folder).expect("a folder");
    monitor.put("vm.pause");
    // What libvirt knows of the domain lies alongside the snapshot.
    fs::write(folder.join("libvirt-save.xml"), "<domain/>").expect("a file");
    let url = format!("file://{}", folder.display());
    monitor.put_json("vm.snapshot", &json!({"destination_url": url}));
    monitor.wait_for_event("vm:snapshotted");
    monitor.abort();

    let mut monitor = Monitor::start(&place);
    let taps = [Tap::open(), Tap::open(), Tap::open()];
    let nets: Vec<_> =
        (0..taps.len()).map(|index| json!({"id": format!("net_{index}"), "num_fds": 1})).collect();
    let fds: Vec<_> = taps.iter().map(|tap| tap.fd.as_fd()).collect();
    let mut stream = connect(&monitor.socket);
    let restore = json!({"source_url": url, "net_fds": nets});
    by_hand(&mut stream, "vm.restore", &restore, &fds, None);
    let threads = monitor.threads();
    monitor.set_up(2);
    monitor.have_stayed(&threads);
    assert_eq!(monitor.info()["state"], "Paused");
    assert_eq!(taps_of(&monitor.vmm), taps.map(Tap::close));
    monitor.put("vm.resume");
    monitor.wait_for_event("vm:resumed");
    monitor.vmm.wait_for_heartbeat();
    monitor.put_chunked("vm.pause");
    monitor.vmm.verify_paused();
    monitor.put_chunked("vm.resume");
    monitor.put("vm.shutdown");
    monitor.wait_for_event("vm:shutdown");
    monitor.abort();
}

/// A domain whose serial port is a socket, and whose network is behind the IOMMU.
fn serial_socket() {
    let place = Place::new();
    let mut monitor = Monitor::start(&place);
    let mut config = config(&place);
    config["serial"] = json!({"mode": "Socket", "socket": place.text("serial")});
    monitor.put_json("vm.create", &config);
    let tap = Tap::open();
    let mut body = net(0);
    body["iommu"] = json!(true);
    let mut stream = connect(&monitor.socket);
    by_hand(&mut stream, "vm.add-net", &body, &[tap.fd.as_fd()], ADD_LIMIT);
    monitor.put("vm.boot");
    monitor.wait_for_event("vm:booted");
    let info = monitor.info();
    assert_eq!(info["config"]["net"][0]["iommu"], true, "{info}");
    assert!(info["config"]["console"]["file"].is_string(), "{info}");
    wait_for_socket(&place.at("serial"));
    monitor.vmm.wait_for_heartbeat();
    monitor.abort();
}

/// Whatever is said in an event: the reader finds its end, and those behind it.
fn events() {
    let place = Place::new();
    let mut monitor = Monitor::start(&place);
    wait_for_socket(&monitor.socket);
    let awkward = format!("{}/a{{b}}}}{}", place.0.path().display(), "{".repeat(180));
    let url = format!("file://{awkward}");
    let restore = json!({"source_url": url}).to_string();
    let request = format!(
        "PUT /api/v1/vm.restore HTTP/1.1\r\nHost: localhost\r\nAccept: application/json\r\n\
         Content-Type: application/json\r\nContent-Length: {}\r\n\r\n{restore}",
        restore.len()
    );
    assert!(monitor.curl(&request).status >= 400, "there is no such directory");
    let failed = monitor.wait_for_event("vm:restore-failed");
    let error = failed["properties"]["error"].as_str().expect("an error");
    assert!(error.contains(&awkward), "{error}");
    monitor.put_json("vm.create", &config(&place));
    monitor.put("vm.delete");
    monitor.wait_for_event("vm:deleted");
    monitor.abort();
}

/// The driver chooses by the version what it may ask for.
fn version() {
    let output = Command::new(VMM).arg("--version").env("LC_ALL", "C").output().expect("it runs");
    let text = String::from_utf8(output.stdout).expect("UTF-8");
    let version = text.strip_prefix("cloud-hypervisor v").expect("the name");
    let numbers = version.split(|it: char| !it.is_ascii_digit() && it != '.').next();
    let numbers: Vec<u32> = numbers
        .unwrap_or_default()
        .split('.')
        .map(|number| number.parse().expect("a number"))
        .collect();
    // From version 40 on it restores domains with networks.
    assert!(numbers.len() >= 2 && numbers[0] >= 40, "{text}");
}
