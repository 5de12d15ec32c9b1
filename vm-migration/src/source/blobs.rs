// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Parts of the state that are sent as bytes, while they are read, on all connections.
//!
//! Owns the threads of connections: each sends whatever chunk is next of those that the threads of devices have read
//! ([`super::flows`]). That
//! of the first connection hears as well how much of each blob is written, and asks whether the destination is alive while
//! there is nothing to send. A blob is read ahead of what is written of it by its window at most, which is all that this
//! side holds of it, and what the destination relies on: one that is read or written slowly holds up no other. Must never
//! know what the bytes mean.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rate_limit::RateLimit;

use super::flows::{Ended, Flows, Next};
use super::negotiate::Links;
use super::{Context, check_cancel};
use crate::bell::readable;
use crate::channel::Channel;
use crate::error::{Cause, Failure, Step};
use crate::protocol::ProtocolError;
use crate::protocol::blobs::{BlobChunk, BlobInfo};
use crate::protocol::message::Message;
use crate::session::ALIVE_EVERY;
use crate::transport::{Part, TransportError};
use crate::vm::{BlobSource, PausedVm};

/// Most unanswered messages on one connection.
const UNANSWERED_MAX: usize = 4;

/// How often a wait for the bandwidth limit checks for a cancel.
const PACED_LOOK: Duration = Duration::from_millis(20);

const STEP: &str = "sending the state of devices";

/// Sends all blobs; returns their lengths when all of them are written.
pub(super) fn send_blobs<P: PausedVm>(
    vm: &mut P,
    control: &mut Channel,
    links: &mut Links,
    context: Context<'_>,
) -> Result<Vec<u64>, Failure> {
    const OPENING: &str = "reading the state of devices";
    if links.blobs.is_empty() {
        return Ok(Vec::new());
    }
    let began = Instant::now();
    let limit = context.options.limits.answer;
    let sources = control.busy_asking(limit, || vm.open_blobs()).step(OPENING)?;
    let sources = sources.map_err(Cause::Vm).step(OPENING)?;
    if sources.len() != links.blobs.len() {
        let what = "the VM's devices have changed since the migration began".to_owned();
        return Err(Cause::Unsupported { what, remedy: "repeat the migration" }).step(STEP);
    }
    let pipe = Pipe::new(&links.blobs, context)?;
    let Ended { lens, left } = pipe.run(sources, control, &mut links.memory);
    let hang = leave(vm, &links.blobs, &left);
    let lens = lens.map_err(|failure| match failure.cause {
        // Nothing else says which device that is.
        Cause::DeviceStands { .. } => hang.unwrap_or(failure),
        // The first connection may carry the reason why others have ended.
        Cause::Transport(error) if !links.memory.is_empty() => {
            Failure { step: failure.step, cause: control.explain(error) }
        }
        _ => failure,
    })?;
    let (bytes, took) = (lens.iter().sum::<u64>(), began.elapsed().as_millis());
    log::info!("{bytes} bytes of the state of {} devices were sent in {took} ms", lens.len());
    Ok(lens)
}

/// Has the machine leave devices that hang. Returns the failure that names the first.
fn leave<P: PausedVm>(
    vm: &mut P,
    infos: &[BlobInfo],
    left: &[(usize, Duration)],
) -> Option<Failure> {
    let mut first = None;
    for (number, waited) in left {
        let doing = vm.leave_blob(*number).into();
        let name = infos.get(*number).map_or("", |info| &info.name).into();
        let cause = Cause::DeviceHangs { name, doing, waited_s: waited.as_secs() };
        log::error!("{}", error_text::chain(&cause));
        first.get_or_insert(Failure::new("reading the state of devices", cause));
    }
    first
}

/// What the threads of connections share.
struct Pipe<'a> {
    flows: Arc<Flows>,
    bandwidth_limit: RateLimit,
    context: Context<'a>,
}

impl<'a> Pipe<'a> {
    fn new(infos: &[BlobInfo], context: Context<'a>) -> Result<Self, Failure> {
        Ok(Self {
            flows: Arc::new(Flows::new(infos)?),
            bandwidth_limit: RateLimit::new(context.options.bandwidth_bytes_per_s),
            context,
        })
    }

    fn run(
        &self,
        sources: Vec<Box<dyn BlobSource>>,
        control: &mut Channel,
        further: &mut [Channel],
    ) -> Ended {
        let readers = self.flows.start(sources);
        std::thread::scope(|scope| {
            for channel in further {
                let spawned = stoppable_thread::spawn_scoped(scope, "mig-send", move || {
                    self.flows.noting(self.send_chunks(channel));
                });
                if let Err(error) = spawned {
                    // The others send all of it.
                    log::warn!("the state of devices is sent on fewer connections: {error}");
                    break;
                }
            }
            self.flows.noting(self.lead(control));
        });
        let limits = &self.context.options.limits;
        self.flows.end(readers, limits.device_leave, limits.prepare)
    }

    /// Sends chunks on a further connection until there are no more.
    fn send_chunks(&self, channel: &mut Channel) -> Result<(), Failure> {
        let mut unanswered = 0;
        loop {
            let next = match unanswered {
                UNANSWERED_MAX.. => Next::Nothing,
                count => self.flows.next(count == 0),
            };
            match next {
                Next::Chunk(chunk) => {
                    self.wait_for_turn(chunk.bytes.len() as u64)?;
                    send_chunk(channel, &chunk)?;
                    unanswered += 1;
                }
                Next::Nothing | Next::Over => {
                    if unanswered == 0 {
                        return Ok(());
                    }
                    let limit = channel.connection.stall_timeout();
                    channel.answer(limit).step(STEP)?;
                    unanswered -= 1;
                }
            }
        }
    }

    /// Sends chunks on the first connection, and hears how much is written, until that is all.
    fn lead(&self, control: &mut Channel) -> Result<(), Failure> {
        let limit = control.connection.stall_timeout();
        let mut unanswered = 0;
        // When the destination was heard last, or asked for the first time since.
        let mut since = Instant::now();
        let mut sent_at = since;
        // How far all have come, and since when: the guest stands still meanwhile, and a destination that answers may wait for a
        // device there that never ends.
        let patience = self.context.options.limits.prepare;
        let (mut moved, mut moved_at) = (0, since);
        loop {
            check_cancel(self.context.cancel, STEP)?;
            if control.has_data().map_err(Cause::Resource).step(STEP)? {
                match control.hear_of_blobs().step(STEP)? {
                    Some(written) => self.flows.note_written(&written).step(STEP)?,
                    None => unanswered = one_less(unanswered).step(STEP)?,
                }
                since = Instant::now();
                continue;
            }
            let pause = self.bandwidth_limit.reserve(0);
            match self.flows.next_to_lead(unanswered < UNANSWERED_MAX && pause.is_zero()) {
                Next::Chunk(chunk) => {
                    self.bandwidth_limit.reserve(chunk.bytes.len() as u64);
                    send_chunk(control, &chunk)?;
                }
                Next::Over if unanswered == 0 || self.flows.has_failed() => return Ok(()),
                Next::Nothing if unanswered == 0 && sent_at.elapsed() >= ALIVE_EVERY => {
                    control.tell(&Message::Alive).step(STEP)?;
                }
                Next::Nothing | Next::Over => {
                    if self.flows.one_hangs(patience) {
                        let waited_s = patience.as_secs();
                        return Err(Cause::DeviceStands { waited_s }).step(STEP);
                    }
                    let now_moved = self.flows.state.lock().moved();
                    if now_moved != moved {
                        (moved, moved_at) = (now_moved, Instant::now());
                    } else if moved_at.elapsed() >= patience {
                        let waited_s = patience.as_secs();
                        return Err(Cause::DeviceStands { waited_s }).step(STEP);
                    }
                    if unanswered > 0 && since.elapsed() >= limit {
                        let timeout = TransportError::Timeout { what: STEP, after: limit };
                        return Err(timeout).step(STEP);
                    }
                    let pause = if pause.is_zero() { ALIVE_EVERY } else { pause };
                    self.wait(control, pause.min(ALIVE_EVERY)).step(STEP)?;
                    continue;
                }
            }
            sent_at = Instant::now();
            if unanswered == 0 {
                since = sent_at;
            }
            unanswered += 1;
        }
    }

    /// Waits until there may be something to send or to hear, or a cancel.
    fn wait(&self, control: &Channel, limit: Duration) -> Result<(), Cause> {
        use std::os::fd::AsRawFd as _;
        let (cancel, socket) = (self.context.cancel.fd(), control.connection.as_raw_fd());
        let mut polled = [self.flows.bell.entry(), readable(cancel), readable(socket)];
        self.flows.bell.wait_with(&mut polled, Some(limit)).map(drop).map_err(Cause::Resource)
    }

    /// Waits until the bandwidth limit allows so many bytes more.
    fn wait_for_turn(&self, bytes: u64) -> Result<(), Failure> {
        loop {
            let pause = self.bandwidth_limit.reserve(0);
            if pause.is_zero() {
                self.bandwidth_limit.reserve(bytes);
                return Ok(());
            }
            check_cancel(self.context.cancel, STEP)?;
            std::thread::sleep(pause.min(PACED_LOOK));
        }
    }
}

fn send_chunk(channel: &mut Channel, chunk: &BlobChunk) -> Result<(), Failure> {
    let parts = [Part::Bytes(&chunk.head()), Part::Bytes(&chunk.bytes)];
    let sent = channel.connection.send_parts(&parts);
    sent.map_err(|error| channel.explain(error)).step(STEP)
}

pub(super) fn one_less(unanswered: usize) -> Result<usize, ProtocolError> {
    let what = "an answer";
    unanswered.checked_sub(1).ok_or(ProtocolError::Malformed { what, why: "nothing was asked" })
}
