// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Fuzzing of what a vhost-user back end answers.
//!
//! Owns the entry point: bytes choose for each request whether it is answered as usual, with other bytes, or not at
//! all, and what the back end asks by itself. The device is made, started, given commands, paused, continued, logged
//! and reset, and all of that must end.

use std::io::Write as _;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use memory::{GuestMemory, GuestMemoryHandle, GuestRam, RamConfig, RamLayout, ZoneSpec};
use virtio_queue::{Queue, QueueT as _};
use vm_memory::{Bytes as _, GuestAddress, GuestAddressSpace as _};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::net_link::NetLink;
use super::scripted::{
    Answer, Request, SET_BACKEND_REQ_FD, SET_DEVICE_STATE_FD, back_end_with_thread,
};
use super::session::Session;
use super::state;
use super::{NetOffloads, VhostUser, VhostUserConfig, VhostUserKind};
use crate::virtio::fuzz::NoKicks;
use crate::virtio::{Activation, ActiveQueue, DeviceSnapshot, VirtioDevice as _, VirtioInterrupt};

/// Time limit of an answer: a back end that is silent must not slow the runs down.
const LIMIT: Duration = Duration::from_millis(5);
/// Queues of a network, but for the control queue: two pairs.
const NET_QUEUES: u16 = 4;
/// Where a command of the driver is, and how long it is.
const COMMAND_GPA: u64 = 0x8000;
const COMMAND_LEN_BYTES: usize = 8;
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
        let is_written = [SET_BACKEND_REQ_FD, SET_DEVICE_STATE_FD].contains(&request.number);
        if let (true, Some(mut other)) = (is_written, request.file.as_ref()) {
            // It has room for that; nothing reads answers.
            let _ = other.write_all(&chunk());
        }
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
                let Answer::Send(mut bytes) = request.usual_of_all() else { return Answer::Close };
                bytes.extend(chunk());
                Answer::Send(bytes)
            }
            _ => request.usual_of_all(),
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
            // Whether the back end has one is the input's.
            let mtu = data.first().filter(|first| **first < 128).map(|_| 1500);
            (VhostUserKind::Net { mac: [2; 6], mtu, offloads }, NET_QUEUES)
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
    let handle = device.handle();
    // Refused if there is none.
    let _ = handle.fetch_state();
    let state = device.save();
    for round in 0..2 {
        device.write_config(4, &[1; 4]);
        put_command(&memory, data)?;
        let queues = u16::try_from(device.queue_sizes_max().len())?;
        // Refused by all but networks and file systems.
        let _ = device.restore(&state);
        let log = (round == 0).then(|| handle.watch_writes(&ram));
        device.activate(activation(&memory, device.features(), queues)?)?;
        let other = (round == 1).then(|| handle.watch_writes(&ram));
        handle.announce();
        device.pause();
        for log in [&log, &other].into_iter().flatten() {
            log.collect(&ram);
        }
        drop(log);
        device.resume();
        device.reset();
    }
    Ok(())
}

/// Puts a command of the driver where each queue has its first chain.
fn put_command(memory: &GuestMemoryHandle, data: &[u8]) -> Result<(), Box<dyn std::error::Error>> {
    let memory = memory.memory();
    // Of the end, whose last byte says what the device is.
    let end = data.len().saturating_sub(1);
    let command = data.get(end.saturating_sub(COMMAND_LEN_BYTES)..end).unwrap_or_default();
    memory.write_slice(command, GuestAddress(COMMAND_GPA))?;
    for queue in 0..=NET_QUEUES {
        let at = ring(queue);
        for (number, (gpa, len_bytes, flags)) in
            [(COMMAND_GPA, command.len(), 1_u16), (COMMAND_GPA + 0x100, 1, 2)]
                .into_iter()
                .enumerate()
        {
            let descriptor = at + 16 * number as u64;
            memory.write_obj(gpa, GuestAddress(descriptor))?;
            memory.write_obj(u32::try_from(len_bytes)?, GuestAddress(descriptor + 8))?;
            memory.write_obj(flags, GuestAddress(descriptor + 12))?;
            memory.write_obj(1_u16, GuestAddress(descriptor + 14))?;
        }
        memory.write_obj(1_u16, GuestAddress(at + 0x402))?;
    }
    Ok(())
}

/// Where a queue has its rings.
fn ring(queue: u16) -> u64 {
    0x1000 * u64::from(queue)
}

fn activation(
    memory: &GuestMemoryHandle,
    features: u64,
    count: u16,
) -> Result<Activation, Box<dyn std::error::Error>> {
    let mut queues = Vec::new();
    for index in 0..count {
        let mut queue = Queue::new(16)?;
        queue.try_set_desc_table_address(GuestAddress(ring(index)))?;
        queue.try_set_avail_ring_address(GuestAddress(ring(index) + 0x400))?;
        queue.try_set_used_ring_address(GuestAddress(ring(index) + 0x800))?;
        queue.set_ready(true);
        let valid: &GuestMemory = &memory.memory();
        debug_assert!(queue.is_valid(valid), "the rings are in memory");
        let kick = EventFd::new(EFD_NONBLOCK)?;
        queues.push(ActiveQueue { index, queue, kick, kicks: Arc::new(NoKicks), dma: None });
    }
    let interrupt = Arc::new(NoInterrupt);
    Ok(Activation { memory: memory.clone(), interrupt, queues, features })
}

/// What is saved of a network, and of a file system as far as it is not for the back end to check.
pub fn restore(snapshot: &DeviceSnapshot) {
    let link = NetLink::new(NET_QUEUES / 2, [2, 0, 0, 0, 0, 1]);
    let _ = state::restore(&link, Some(1500), snapshot);
    let _ = state::fs_state(snapshot);
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
