// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Fuzzing of what a vDPA device answers.
//!
//! Owns the entry point: bytes are what the device says of itself, and choose which of its calls fail. The device is
//! opened, started, paused, continued and reset, and all of that must end, with nothing mapped.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;

use memory::{GuestRam, RamConfig, RamLayout, ZoneSpec};
use virtio_queue::{Queue, QueueT as _};
use vm_memory::GuestAddress;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::scripted::{Answers, Scripted};
use super::{Vdpa, VdpaDeviceConfig};
use crate::virtio::fuzz::NoKicks;
use crate::virtio::{Activation, ActiveQueue, VirtioDevice, VirtioInterrupt};

struct NoInterrupt;

impl VirtioInterrupt for NoInterrupt {
    fn queue_used(&self, _queue_index: u16) {}
    fn config_changed(&self) {}
    fn needs_reset(&self) {}
}

/// Bytes of the input, zeros after its end.
struct Input(VecDeque<u8>);

impl Input {
    fn byte(&mut self) -> u8 {
        self.0.pop_front().unwrap_or(0)
    }

    fn word(&mut self) -> u64 {
        u64::from_le_bytes(std::array::from_fn(|_| self.byte()))
    }
}

#[expect(clippy::cast_possible_truncation, reason = "any bits will do")]
fn answers(input: &mut Input) -> Answers {
    let mut answers = Answers::default();
    let chosen = input.byte();
    let is_chosen = |bit: u8| chosen & 1 << bit != 0;
    if is_chosen(0) {
        answers.device_id = input.word() as u32;
    }
    if is_chosen(1) {
        answers.queues = u32::from(input.byte());
    }
    if is_chosen(2) {
        answers.queue_size = input.word() as u16;
    }
    if is_chosen(3) {
        answers.config_len_bytes = input.word() as u32;
        answers.config = (0..input.byte()).map(|_| input.byte()).collect();
    }
    if is_chosen(4) {
        answers.iova = input.word()..=input.word();
    }
    if is_chosen(5) {
        answers.features = input.word();
    }
    if is_chosen(6) {
        answers.backend_features = input.word();
        answers.vring_base = input.word() as u32;
    }
    if is_chosen(7) {
        answers.refused_status = input.byte();
        answers.own_status = input.byte();
    }
    answers
}

/// Lets a device that answers with `data` be driven. An error is one of the device, and expected.
///
/// # Errors
/// The host gives no memory, eventfds or threads, or something is left mapped although no call has failed.
pub fn serve(data: &[u8]) -> Result<(), Box<dyn std::error::Error>> {
    let zones = vec![ZoneSpec { shared: true, ..ZoneSpec::new("a", 4 << 20) }];
    let ram = Arc::new(GuestRam::new(&RamConfig { zones }, RamLayout::default())?);
    let mut input = Input(data.to_vec().into());
    let num_queues = u16::from(input.byte() & 7).max(1);
    let answers = answers(&mut input);
    let may_fail = input.byte() & 1 != 0;
    let fails = move |_: &str| {
        let fails = may_fail && input.byte() & 7 == 7;
        fails.then(|| io::Error::from_raw_os_error(libc::EIO))
    };
    let scripted = Scripted::new(answers, Box::new(fails));
    let seen = Arc::clone(&scripted.seen);
    let config = VdpaDeviceConfig { id: "fuzz".to_owned(), path: "/nowhere".into(), num_queues };
    let opened = Vdpa::over(Box::new(scripted), config, &ram);
    if let Ok(mut device) = opened {
        drive(&mut device, &ram, data)?;
        drop(device);
    }
    if ram.discards_banned().is_some() {
        return Err("memory stays banned from being discarded".into());
    }
    if !may_fail && !seen.mapped.lock().is_empty() {
        return Err("memory stays mapped".into());
    }
    Ok(())
}

fn drive(device: &mut Vdpa, ram: &GuestRam, data: &[u8]) -> Result<(), Box<dyn std::error::Error>> {
    let offset = data.first().copied().map_or(0, u64::from) * 16;
    let mut read = [0; 16];
    for offset in [0, offset, u64::MAX] {
        device.read_config(offset, &mut read);
        device.write_config(offset, &read);
    }
    if device.queue_sizes_max().iter().any(|size| !size.is_power_of_two()) {
        return Err("the transport takes powers of two".into());
    }
    for _ in 0..2 {
        device.activate(activation(ram, device.features())?)?;
        device.pause();
        device.resume();
        device.reset();
    }
    Ok(())
}

fn activation(ram: &GuestRam, features: u64) -> Result<Activation, Box<dyn std::error::Error>> {
    let mut queue = Queue::new(16)?;
    queue.try_set_avail_ring_address(GuestAddress(0x400))?;
    queue.try_set_used_ring_address(GuestAddress(0x800))?;
    queue.set_ready(true);
    let kick = EventFd::new(EFD_NONBLOCK)?;
    let queues = vec![ActiveQueue { index: 0, queue, kick, kicks: Arc::new(NoKicks), dma: None }];
    Ok(Activation {
        memory: ram.guest_memory(),
        interrupt: Arc::new(NoInterrupt),
        queues,
        features,
    })
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(128))]

        #[test]
        fn any_answers_end(data in proptest::collection::vec(any::<u8>(), 0..200)) {
            serve(&data).unwrap();
        }

        /// What it says of itself is usual, so that the faults come late.
        #[test]
        fn late_faults_end(usual in 0_usize..60, data in proptest::collection::vec(any::<u8>(), 0..60)) {
            let mut all = vec![1, 0, 1];
            all.extend(vec![0; usual]);
            all.extend(data);
            serve(&all).unwrap();
        }
    }
}
