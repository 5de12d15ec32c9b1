// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A stand-in for a cloud-hypervisor v53 destination: answers as one does, or fails at a message, and keeps what it got.
//!
//! Owns the order in which such a destination takes messages, by `docs/cloud-hypervisor-state.md`; it shares nothing with
//! the code under test. Must never be more lenient than the peer: what it does not expect is a panic.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::net::TcpListener;
use std::os::unix::fs::FileExt as _;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use serde_json::Value;

use super::Transport;
use super::upstream::{Frame, command};

/// Length of a header.
pub const HEADER: usize = 16;
const OK: u16 = 1;
const ERROR: u16 = 2;
const ABANDON: u16 = 6;
const ROLE_MEMORY: u16 = 1;

/// What happens at a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// It is refused.
    Refused,
    /// The connection is lost before an answer.
    LostBefore,
    /// It is answered with Ok, and the connection is lost.
    LostAfter,
    /// It is not answered, and the connection is lost when [`Destination::finish`] is called.
    Held,
}

/// What it has got.
#[derive(Debug, Default)]
pub struct Received {
    /// Commands on the first connection, runs of Memory as one.
    pub commands: Vec<u16>,
    /// Number of further connections that carried memory.
    pub further: usize,
    /// Configuration with what comes with it.
    pub config: Value,
    /// The state.
    pub state: Vec<u8>,
    memory: Vec<(u64, Vec<u8>)>,
}

impl Received {
    /// Writes what it has got as a snapshot of this peer.
    pub fn save(&self, folder: &Path) {
        let config = self.config["vm_config"].to_string();
        fs::write(folder.join("config.json"), config).expect("written");
        fs::write(folder.join("state.json"), &self.state).expect("written");
        let root: Value = serde_json::from_slice(&self.state).expect("JSON");
        let text = root["snapshots"]["memory-manager"]["snapshot_data"]["state"].as_str();
        let manager: Value = serde_json::from_str(text.expect("a state")).expect("JSON");
        let number = |value: &Value| value.as_u64().expect("a number");
        let ranges = manager["memory_ranges"]["data"].as_array().expect("ranges");
        let mut placed = Vec::new();
        let mut len = 0;
        for range in ranges {
            placed.push((number(&range["gpa"]), number(&range["length"]), len));
            len += number(&range["length"]);
        }
        let file = File::create(folder.join("memory-ranges")).expect("a file");
        file.set_len(len).expect("a length");
        // Later contents replace earlier ones.
        for (gpa, bytes) in &self.memory {
            let range = placed.iter().find(|(start, len, _)| (*start..start + len).contains(gpa));
            let (start, _, offset) = range.expect("memory of the VM");
            file.write_all_at(bytes, offset + gpa - start).expect("written");
        }
    }
}

trait Stream: Read + Write + Send {}
impl<T: Read + Write + Send> Stream for T {}

enum Listener {
    Tcp(TcpListener),
    Unix(UnixListener),
}

impl Listener {
    fn accept(&self) -> Box<dyn Stream> {
        match self {
            Self::Tcp(listener) => Box::new(listener.accept().expect("a connection").0),
            Self::Unix(listener) => Box::new(listener.accept().expect("a connection").0),
        }
    }
}

/// A destination that listens.
pub struct Destination {
    /// Where.
    pub url: String,
    thread: JoinHandle<Received>,
    held: Receiver<()>,
    release: Sender<()>,
}

/// What the thread says when it holds a message, and is told to let the connection go.
type Hold = (Sender<()>, Receiver<()>);

impl Destination {
    /// One that takes a migration, with as many `further` connections, and fails at a message if it is told to. Its socket
    /// is in the folder.
    pub fn start(
        transport: Transport,
        folder: &Path,
        further: usize,
        fault: Option<(u16, Fault)>,
    ) -> Self {
        let (listener, url) = match transport {
            Transport::Tcp => {
                let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
                let url = format!("tcp:{}", listener.local_addr().expect("an address"));
                (Listener::Tcp(listener), url)
            }
            Transport::Unix => {
                let path = folder.join("migration");
                let _ = fs::remove_file(&path);
                let url = format!("unix:{}", path.display());
                (Listener::Unix(UnixListener::bind(path).expect("a socket")), url)
            }
        };
        let (holds, held) = channel();
        let (release, released) = channel();
        let hold = (holds, released);
        let thread = std::thread::spawn(move || serve(&listener, further, fault, &hold));
        Self { url, thread, held, release }
    }

    /// Waits until it holds a message ([`Fault::Held`]).
    #[track_caller]
    pub fn wait_until_held(&self) {
        self.held.recv_timeout(super::PATIENCE).expect("the message comes");
    }

    /// What it has got, once the migration has ended.
    #[track_caller]
    pub fn finish(self) -> Received {
        // It may hold none, and have ended.
        let _ = self.release.send(());
        self.thread.join().expect("it has seen nothing strange")
    }
}

/// Reads a request; none if the source has gone.
pub fn read_frame(stream: &mut (impl Read + ?Sized)) -> Option<Frame> {
    let mut head = [0; HEADER];
    stream.read_exact(&mut head).ok()?;
    let word = |at: usize| u64::from_le_bytes(head[at..at + 8].try_into().expect("eight bytes"));
    let mut frame = Frame {
        kind: u16::from_le_bytes([head[0], head[1]]),
        between: head[2..8].try_into().expect("six bytes"),
        payload: vec![0; usize::try_from(word(8)).expect("64 bits")],
        contents: Vec::new(),
    };
    stream.read_exact(&mut frame.payload).ok()?;
    if frame.kind == command::MEMORY {
        let len: u64 = frame.ranges().iter().map(|(_, len)| len).sum();
        frame.contents = vec![0; usize::try_from(len).expect("64 bits")];
        stream.read_exact(&mut frame.contents).ok()?;
    }
    Some(frame)
}

/// False if the source has gone.
fn answer(stream: &mut dyn Stream, status: u16) -> bool {
    let mut bytes = [0; HEADER];
    bytes[..2].copy_from_slice(&status.to_le_bytes());
    stream.write_all(&bytes).is_ok()
}

/// Start and length of each mapping of memory that the configuration has.
fn mappings(config: &Value) -> Vec<(u64, u64)> {
    let mappings = config["memory_manager_data"]["guest_ram_mappings"].as_array();
    let number = |value: &Value| value.as_u64().expect("a number");
    let ends = |it: &Value| (number(&it["gpa"]), number(&it["size"]));
    mappings.expect("mappings").iter().map(ends).collect()
}

/// A range lies in one mapping: such a destination puts one that does not in the wrong place.
fn keep(frame: &Frame, mappings: &[(u64, u64)], memory: &Mutex<Vec<(u64, Vec<u8>)>>) {
    let mut contents = &frame.contents[..];
    for (gpa, len) in frame.ranges() {
        let holds = |(start, size): &(u64, u64)| {
            gpa.checked_sub(*start).is_some_and(|offset| offset + len <= *size)
        };
        assert!(len > 0 && mappings.iter().any(holds), "{gpa:#x}+{len:#x} is in none of them");
        let (bytes, rest) = contents.split_at(usize::try_from(len).expect("64 bits"));
        memory.lock().expect("no panic").push((gpa, bytes.to_vec()));
        contents = rest;
    }
}

fn serve(
    listener: &Listener,
    further: usize,
    fault: Option<(u16, Fault)>,
    (holds, released): &Hold,
) -> Received {
    let mut control = listener.accept();
    let memory = Arc::new(Mutex::new(Vec::new()));
    let mut received = Received::default();
    let mut carriers = Vec::new();
    while let Some(frame) = read_frame(&mut *control) {
        let kind = frame.kind;
        if kind != command::MEMORY || received.commands.last() != Some(&command::MEMORY) {
            check_order(&received.commands, kind);
            received.commands.push(kind);
        }
        match kind {
            command::CONFIG => {
                received.config = serde_json::from_slice(&frame.payload).expect("JSON");
            }
            command::STATE => received.state.clone_from(&frame.payload),
            command::MEMORY => keep(&frame, &mappings(&received.config), &memory),
            _ => {}
        }
        match fault.filter(|(at, _)| *at == kind).map(|(_, fault)| fault) {
            Some(Fault::LostBefore) => break,
            Some(Fault::Held) => {
                holds.send(()).expect("the test waits");
                released.recv().expect("the test ends");
                break;
            }
            Some(Fault::Refused) => {
                answer(&mut *control, ERROR);
                break;
            }
            Some(Fault::LostAfter) => {
                answer(&mut *control, OK);
                break;
            }
            None => {}
        }
        if !answer(&mut *control, OK) || kind == ABANDON {
            break;
        }
        if kind == command::CONFIG {
            for _ in 0..further {
                let mut stream = listener.accept();
                let (memory, mappings) = (Arc::clone(&memory), mappings(&received.config));
                carriers.push(std::thread::spawn(move || carry(&mut *stream, &mappings, &memory)));
            }
        }
    }
    drop(control);
    let carried = carriers.into_iter().map(|thread| thread.join().expect("nothing strange"));
    received.further = carried.filter(|carried| *carried).count();
    received.memory = std::mem::take(&mut memory.lock().expect("no panic"));
    received
}

/// Takes memory until the end of a further connection; whether some has come.
fn carry(
    stream: &mut dyn Stream,
    mappings: &[(u64, u64)],
    memory: &Mutex<Vec<(u64, Vec<u8>)>>,
) -> bool {
    let mut role = [0; 2];
    stream.read_exact(&mut role).expect("a role");
    assert_eq!(u16::from_le_bytes(role), ROLE_MEMORY);
    let mut has_carried = false;
    while let Some(frame) = read_frame(stream) {
        assert_eq!(frame.kind, command::MEMORY);
        keep(&frame, mappings, memory);
        has_carried = true;
        answer(stream, OK);
    }
    has_carried
}

/// What such a destination takes after what.
fn check_order(before: &[u16], kind: u16) {
    let is_next = match kind {
        ABANDON => true,
        command::START => before.is_empty(),
        command::CONFIG => before == [command::START],
        command::MEMORY => before == [command::START, command::CONFIG],
        command::STATE => matches!(before.last(), Some(&command::CONFIG | &command::MEMORY)),
        command::COMPLETE | command::COMPLETE_PAUSED => before.last() == Some(&command::STATE),
        _ => false,
    };
    assert!(is_next, "{kind} after {before:?}");
}
