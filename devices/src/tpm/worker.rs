// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The thread that passes commands to the emulator.
//!
//! Owns the data connection. A command may take minutes; the end of the machine ends the wait. Must never hold the lock of the registers while it waits.

use std::io::{self, Read as _, Write as _};
use std::os::fd::AsRawFd as _;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};

use super::Shared;
use super::crb::{BUFFER_BYTES, HEADER_BYTES, length_of};

const KICK: u64 = 0;
const DATA: u64 = 1;

pub(super) struct Worker {
    shared: Arc<Shared>,
    data: UnixStream,
    epoll: Epoll,
    /// Whether a response is expected.
    is_executing: bool,
}

impl Worker {
    pub(super) fn new(shared: Arc<Shared>, data: UnixStream) -> io::Result<Self> {
        let epoll = Epoll::new()?;
        for (fd, tag) in [(shared.kick.as_raw_fd(), KICK), (data.as_raw_fd(), DATA)] {
            epoll.ctl(ControlOperation::Add, fd, EpollEvent::new(EventSet::IN, tag))?;
        }
        Ok(Self { shared, data, epoll, is_executing: false })
    }

    /// Works until the machine ends or the emulator is lost.
    pub(super) fn run(mut self) {
        if let Err(error) = self.work() {
            self.shared.lose(&error.to_string());
        }
    }

    fn work(&mut self) -> io::Result<()> {
        let mut events = [EpollEvent::default(); 2];
        loop {
            let count = match self.epoll.wait(-1, &mut events) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                other => other?,
            };
            let is_ready = |tag| events.iter().take(count).any(|event| event.data() == tag);
            if is_ready(DATA) {
                self.take_response()?;
            }
            if is_ready(KICK) {
                // Another kick may have been counted meanwhile; the command is looked at below in any case.
                let _ = self.shared.kick.read();
                let mut inner = self.shared.inner.lock();
                if inner.is_ending {
                    return Ok(());
                }
                let command = inner.command.take();
                drop(inner);
                if let Some(command) = command {
                    self.data.write_all(&command)?;
                    self.is_executing = true;
                }
            }
        }
    }

    fn take_response(&mut self) -> io::Result<()> {
        let mut response = vec![0; HEADER_BYTES];
        self.data.read_exact(&mut response)?;
        let wrong = |what| Err(io::Error::new(io::ErrorKind::InvalidData, what));
        if !self.is_executing {
            return wrong("the TPM answers without a command");
        }
        let Some(length @ HEADER_BYTES..=BUFFER_BYTES) = length_of(&response) else {
            return wrong("the TPM's answer has an impossible length");
        };
        response.resize(length, 0);
        self.data.read_exact(&mut response[HEADER_BYTES..])?;
        self.is_executing = false;
        self.shared.inner.lock().crb.finish(&response);
        self.shared.ended.notify_all();
        Ok(())
    }
}
