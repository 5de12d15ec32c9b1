// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What sources of earlier versions sent, kept in `tests/data/streams`, must still make a VM here.
//!
//! Owns the form: all bytes that went each way on the one connection of a precopy migration.
//! `GODWIT_RECORD_STREAM=DIRECTORY` makes the test of that name record one of this version.

use std::fs;
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use serde_json::Value;
use vm_migration::layout::GpaRange;
use vm_migration::protocol::message::{Answer, Message};

use crate::harness::migrate::Reception;
use crate::harness::{Mode, Suite, Transport, Vmm, VmmBuilder, skip};
use crate::recorded;

/// What the source said, and what it was answered.
const SAID: &str = "source";
const ANSWERED: &str = "destination";

pub fn add(suite: &mut Suite) {
    suite.add("migration_recorded::v1_arrives", || arrives("v1"));
    suite.add("migration_recorded::record", record);
}

fn data(version: &str, name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/streams").join(version).join(name)
}

/// Passes bytes on until one side is done, and keeps them.
fn pass(mut from: UnixStream, mut to: UnixStream) -> Vec<u8> {
    let (mut kept, mut part) = (Vec::new(), [0; 65536]);
    while let Ok(count @ 1..) = from.read(&mut part) {
        kept.extend_from_slice(&part[..count]);
        if to.write_all(&part[..count]).is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Write);
    kept
}

/// One message of a recorded stream, with its contents.
struct Frame {
    message: Message,
    bytes: Vec<u8>,
}

/// Splits a stream; configuration and state go through `change`.
fn frames(mut stream: &[u8], change: impl Fn(&mut Value)) -> Vec<Frame> {
    let mut frames = Vec::new();
    let change = |json: &[u8]| -> Vec<u8> {
        let mut value = serde_json::from_slice(json).expect("JSON");
        change(&mut value);
        value.to_string().into_bytes()
    };
    while !stream.is_empty() {
        let begin = stream;
        let message = match Message::read(&mut stream).expect("a message") {
            Message::Config(json) => Message::Config(change(&json)),
            Message::State(json) => Message::State(change(&json)),
            message => message,
        };
        let contents: u64 = match &message {
            Message::Memory(ranges) => ranges.iter().map(|range: &GpaRange| range.len_bytes).sum(),
            Message::MemoryZstd { frame_bytes, .. } => u64::from(*frame_bytes),
            _ => 0,
        };
        let contents = usize::try_from(contents).expect("small");
        let header = begin.len() - stream.len();
        let bytes = if matches!(message, Message::Config(_) | Message::State(_)) {
            message.encode()
        } else {
            begin[..header + contents].to_vec()
        };
        stream = &stream[contents..];
        frames.push(Frame { message, bytes });
    }
    frames
}

fn record() {
    let Some(target) = std::env::var_os("GODWIT_RECORD_STREAM") else {
        skip("GODWIT_RECORD_STREAM names no directory to record to");
    };
    let target = Path::new(&target);
    let cpus = format!("boot=2,max_phys_bits={},nested=off", recorded::PHYS_BITS);
    let source = VmmBuilder::new(&["--console", "null", "--serial", "null"])
        .with(&["--kernel", crate::harness::image(), "--cmdline", "workload=random-write mem=256K"])
        .with(&["--cpus", &cpus, "--memory", "size=32M,shared=on"])
        .start();
    source.wait_for_work(1_000);
    source.remote_ok(&["pause"]);
    let destination = Vmm::empty();
    let reception = Reception::start(&destination, Transport::Unix, Mode::Precopy);
    let to = reception.url.trim_start_matches("unix:").to_owned();
    let path = source.path("recorder");
    let listener = UnixListener::bind(&path).expect("a socket");
    let recorder = std::thread::spawn(move || {
        let (from, _) = listener.accept().expect("a source");
        let to = UnixStream::connect(to).expect("it listens");
        let back = (to.try_clone().expect("a socket"), from.try_clone().expect("a socket"));
        let answers = std::thread::spawn(move || pass(back.0, back.1));
        let said = pass(from, to);
        (said, answers.join().expect("no panic"))
    });
    let option = format!("destination_url=unix:{},memory_mode=precopy", path.display());
    source.remote_ok(&["send-migration", "--wait", &option]);
    assert!(reception.finish().status.success());
    let (said, answered) = recorder.join().expect("no panic");
    destination.shut_down();
    let neutral = |value: &mut Value| {
        if value.get("vm_config").is_some() {
            recorded::neutral_document(value);
            // So that no path of the recording machine is kept.
            value["vm_config"]["payload"]["kernel"] = "recorded-guest".into();
        } else {
            recorded::neutral(value);
        }
    };
    let said: Vec<u8> = frames(&said, neutral).into_iter().flat_map(|frame| frame.bytes).collect();
    fs::create_dir_all(target).expect("the directory");
    fs::write(target.join(SAID), said).expect("written");
    fs::write(target.join(ANSWERED), answered).expect("written");
}

/// Plays the source of a recorded migration; what it is answered.
fn play(version: &str, to: &str) -> io::Result<Vec<(&'static str, Answer)>> {
    let stream = fs::read(data(version, SAID)).expect("the recorded stream");
    let mut socket = UnixStream::connect(to.trim_start_matches("unix:"))?;
    let mut answers = Vec::new();
    for frame in frames(&stream, recorded::adapt) {
        socket.write_all(&frame.bytes)?;
        let answer = read_answer(&mut socket)?;
        let refused = matches!(answer, Answer::Error { .. });
        answers.push((frame.message.command().name(), answer));
        if refused {
            break;
        }
    }
    Ok(answers)
}

/// Reads the 16 bytes of a header, then as many as it says.
fn read_answer(socket: &mut UnixStream) -> io::Result<Answer> {
    let mut bytes = vec![0; 16];
    socket.read_exact(&mut bytes)?;
    let len = u64::from_le_bytes(bytes[8..].try_into().expect("eight bytes"));
    bytes.resize(16 + usize::try_from(len).expect("small"), 0);
    socket.read_exact(&mut bytes[16..])?;
    Answer::read(&mut &bytes[..]).map_err(io::Error::other)
}

fn arrives(version: &str) {
    let destination = Vmm::empty();
    let reception = Reception::start(&destination, Transport::Unix, Mode::Precopy);
    let answers = play(version, &reception.url).expect("the destination answers");
    let output = reception.finish();
    if let Some((_, Answer::Error { reason })) = answers.last() {
        panic!("{version} is refused: {reason}");
    }
    assert!(output.status.success(), "{output:?}");
    assert_eq!(answers.last().map(|(command, _)| *command), Some("Confirm"));
    assert_eq!(destination.api().state(), "Paused");
    destination.verify_paused();
    destination.remote_ok(&["resume"]);
    destination.wait_for_work(1_000);
    destination.verify();
    destination.shut_down();
}
