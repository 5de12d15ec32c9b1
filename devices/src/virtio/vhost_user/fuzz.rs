// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Fuzzing of what a vhost-user back end answers.
//!
//! Owns the entry point: bytes choose for each request whether it is answered as usual, with other bytes, or not at
//! all. The device is made, started, paused, continued and reset, and all of that must end.

use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use memory::{GuestMemory, GuestMemoryHandle, GuestRam, RamConfig, RamLayout, ZoneSpec};
use virtio_queue::{Queue, QueueT as _};
use vm_memory::{GuestAddress, GuestAddressSpace as _};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::scripted::{Answer, Request, back_end_with_thread};
use super::session::Session;
use super::{NET_QUEUES, NetOffloads, VhostUser, VhostUserConfig, VhostUserKind};
use crate::virtio::fuzz::NoKicks;
use crate::virtio::{Activation, ActiveQueue, VirtioDevice as _, VirtioInterrupt};

/// Time limit of an answer: a back end that is silent must not slow the runs down.
const LIMIT: Duration = Duration::from_millis(5);
/// Bytes of an answer that the input provides.
const CHUNK_LEN_BYTES: usize = 24;

struct NoInterrupt;

impl VirtioInterrupt for NoInterrupt {
    fn queue_used(&self, _queue_index: u16) {}
    fn config_changed(&self) {}
    fn needs_reset(&self) {}
}

/// Answers to requests, from the input: a byte says what kind of answer, and others may follow.
fn answers(data: &[u8]) -> impl FnMut(&Request) -> Answer + Send + use<> {
    let mut data = std::collections::VecDeque::from(data.to_vec());
    move |request| {
        let choice = data.pop_front().unwrap_or(0);
        let mut chunk = || data.drain(..CHUNK_LEN_BYTES.min(data.len())).collect::<Vec<_>>();
        match choice & 7 {
            // A payload of the input in a usual header.
            4 => request.reply(&chunk()),
            // The same as long as the request is.
            5 => {
                let mut payload = chunk();
                payload.resize(request.payload.len(), choice);
                request.reply(&payload)
            }
            6 => Answer::Send(chunk()),
            7 if choice & 8 == 0 => Answer::Close,
            7 => {
                let Answer::Send(mut bytes) = request.usual() else { return Answer::Close };
                bytes.extend(chunk());
                Answer::Send(bytes)
            }
            _ => request.usual(),
        }
    }
}

/// Lets a back end that answers with `data` serve a device. An error is one of the back end, and expected.
///
/// # Errors
/// The host gives no memory, sockets or threads.
pub fn serve(data: &[u8]) -> Result<(), Box<dyn std::error::Error>> {
    let (connection, back_end) = back_end_with_thread(answers(data))?;
    let result = drive(data, connection);
    // Nothing of one run is left in the next.
    back_end.join().map_err(|_| "the back end panicked")?;
    result
}

fn drive(data: &[u8], connection: UnixStream) -> Result<(), Box<dyn std::error::Error>> {
    let zone = ZoneSpec { shared: true, ..ZoneSpec::new("ram", 1 << 20) };
    let ram = GuestRam::new(&RamConfig { zones: vec![zone] }, RamLayout::default())?;
    let memory = ram.guest_memory();
    let (kind, num_queues) = match data.last().map_or(0, |last| last & 3) {
        1 => (VhostUserKind::Fs { tag: "tag".to_owned() }, 1),
        2 => {
            let offloads = NetOffloads { csum: true, tso: true, ufo: true };
            (VhostUserKind::Net { mac: [2; 6], mtu: Some(1500), offloads }, NET_QUEUES)
        }
        3 => (VhostUserKind::Generic { device_id: 26, queue_sizes: vec![16, 32] }, 0),
        _ => (VhostUserKind::Block, 1),
    };
    let session = Session::over(connection, kind.needs(num_queues), LIMIT);
    let Ok(session) = session else { return Ok(()) };
    let (id, socket) = (String::new(), std::path::PathBuf::new());
    let config = VhostUserConfig { id, kind, socket, listens: false, num_queues, queue_size: 16 };
    let device = VhostUser::over(session, config, &memory.memory(), Arc::new(|_| ()));
    let Ok(mut device) = device else { return Ok(()) };
    device.read_config(0, &mut [0; 64]);
    for _ in 0..2 {
        device.write_config(4, &[1; 4]);
        device.activate(activation(&memory, device.features())?)?;
        device.pause();
        device.resume();
        device.reset();
    }
    Ok(())
}

fn activation(
    memory: &GuestMemoryHandle,
    features: u64,
) -> Result<Activation, Box<dyn std::error::Error>> {
    let mut queue = Queue::new(16)?;
    queue.try_set_avail_ring_address(GuestAddress(0x400))?;
    queue.try_set_used_ring_address(GuestAddress(0x800))?;
    queue.set_ready(true);
    let valid: &GuestMemory = &memory.memory();
    debug_assert!(queue.is_valid(valid), "the rings are in memory");
    let kick = EventFd::new(EFD_NONBLOCK)?;
    let queues = vec![ActiveQueue { index: 0, queue, kick, kicks: Arc::new(NoKicks) }];
    let interrupt = Arc::new(NoInterrupt);
    Ok(Activation { memory: memory.clone(), interrupt, queues, features })
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn any_answers_end(data in proptest::collection::vec(any::<u8>(), 0..200)) {
            serve(&data).unwrap();
        }

        /// Most of them usual, so that the faults come late.
        #[test]
        fn late_faults_end(usual in 0_usize..40, data in proptest::collection::vec(any::<u8>(), 0..60)) {
            let mut all = vec![0; usual];
            all.extend(data);
            serve(&all).unwrap();
        }
    }
}
