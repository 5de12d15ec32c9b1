// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A relay between a source here and a real cloud-hypervisor destination, which cuts both connections at a message.
//!
//! Owns the moment of the cut. It passes whole messages on, so that one either has reached the destination or has not.

use std::io::{Read as _, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::thread::JoinHandle;
use std::time::Duration;

use super::upstream_destination::{HEADER, read_frame};

/// Time in which the destination answers a message.
const PATIENCE: Duration = Duration::from_secs(30);

/// When it cuts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cut {
    /// The message does not reach the destination.
    Before,
    /// The destination has answered, and the answer does not reach the source.
    After,
}

/// A relay that waits for one connection.
pub struct Cutter {
    /// Where it listens.
    pub url: String,
    thread: JoinHandle<bool>,
}

impl Cutter {
    /// Relays to the socket at `to`, by a socket in a folder, and cuts at the first such message.
    pub fn start(folder: &Path, to: &Path, at: u16, cut: Cut) -> Self {
        let path = folder.join("relay");
        let _ = std::fs::remove_file(&path);
        let url = format!("unix:{}", path.display());
        let (listener, to) = (UnixListener::bind(path).expect("a socket"), to.to_owned());
        let thread = std::thread::spawn(move || {
            let mut source = listener.accept().expect("a connection").0;
            let mut there = UnixStream::connect(to).expect("it listens");
            there.set_read_timeout(Some(PATIENCE)).expect("a time limit");
            relay(&mut source, &mut there, at, cut)
        });
        Self { url, thread }
    }

    /// Whether it has cut.
    #[track_caller]
    pub fn has_cut(self) -> bool {
        self.thread.join().expect("it has seen nothing strange")
    }
}

fn relay(source: &mut UnixStream, there: &mut UnixStream, at: u16, cut: Cut) -> bool {
    while let Some(frame) = read_frame(source) {
        let is_at = frame.kind == at;
        if is_at && cut == Cut::Before {
            return true;
        }
        if there.write_all(&frame.encode()).is_err() {
            return false;
        }
        let mut answer = [0; HEADER];
        if there.read_exact(&mut answer).is_err() {
            return false;
        }
        if is_at {
            return true;
        }
        if source.write_all(&answer).is_err() {
            return false;
        }
    }
    false
}
