// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Starts every virtio device of the first bus where it lies, as an operating system would: all features, all queues,
//! MSI-X; and sends the first requests of those that can answer without a partner.
//!
//! Owns the reserved RAM while it is asked for: page directories, a page of rings for each queue, a page of buffers for
//! each device. A device keeps what it was given and is not used afterwards. Must never take an interrupt: they stay
//! pending in the local APIC.

use crate::abi::PAGE_BYTES;
use crate::layout::Span;
use crate::mem;
use crate::virtio::{self, Device, Part, QUEUE_SIZE, Queue};

const GIB: u64 = 1 << 30;
/// What the tables in the image map, and what one more level could.
const STATIC_MAP_END: u64 = 4 * GIB;
const MAP_END: u64 = 512 * GIB;
/// All but bits of transports that this driver does not know: packed rings, data in notifications.
const FEATURES: u64 = !(1 << 34 | 1 << 38);
const QUEUES_MAX: u16 = 16;

const MSIX_CONTROL: u64 = 2;
const MSIX_ENABLE: u16 = 1 << 15;
const MSIX_ENTRY_BYTES: u64 = 16;
const MSI_ADDRESS: u32 = 0xfee0_0000;
/// The first vector; others follow.
const VECTOR: u32 = 0x40;

const CONSOLE: u32 = 3;
const RNG: u32 = 4;
const VSOCK: u32 = 19;
const WATCHDOG: u32 = 35;
const BUFFER_BYTES: u32 = 512;

/// Pages of the reserved RAM that are not taken yet.
struct Pages(Span);

impl Pages {
    fn take(&mut self) -> Option<u64> {
        let gpa = self.0.start;
        let end = gpa.checked_add(PAGE_BYTES).filter(|end| *end <= self.0.end)?;
        self.0.start = end;
        mem::clear(gpa, PAGE_BYTES);
        Some(gpa)
    }
}

/// Starts all that can be; gives a bit for each device number that was.
pub fn all(ecam: u64, reserved: Span) -> u64 {
    let (mut pages, mut woken, mut mapped) = (Pages(reserved), 0, 0);
    let mut vector = VECTOR;
    for function in virtio::functions(ecam) {
        let Some(kind) = virtio::device_type(function) else { continue };
        if is_mapped(function, &mut pages, &mut mapped)
            && one(function, kind, &mut pages, &mut vector).is_some()
        {
            woken |= 1 << ((function - ecam) / virtio::CONFIG_BYTES);
        }
    }
    woken
}

/// Maps the first BAR; the last gibibyte above 4 GiB that was mapped is in `mapped`.
fn is_mapped(function: u64, pages: &mut Pages, mapped: &mut u64) -> bool {
    let gpa = virtio::bar_gpa(function, 0);
    if gpa < STATIC_MAP_END {
        return gpa != 0;
    }
    let entry = gpa / GIB;
    if gpa >= MAP_END {
        return false;
    }
    if entry != *mapped {
        let Some(directory) = pages.take() else { return false };
        crate::map_gib(entry, directory);
        *mapped = entry;
    }
    true
}

fn one(function: u64, kind: u32, pages: &mut Pages, vector: &mut u32) -> Option<()> {
    virtio::enable(function);
    let msix = virtio::msix_capability(function)?;
    let table = virtio::regions(function).msix;
    let device = Device::reset(function).ok()?;
    device.agree(FEATURES).ok()?;
    for entry in 0..=u64::from(device.queues) {
        let at = table + entry * MSIX_ENTRY_BYTES;
        for (offset, word) in [(0, MSI_ADDRESS), (4, 0), (8, *vector), (12, 0)] {
            mem::store32(at + offset, word);
        }
        *vector += 1;
    }
    let control = function + msix + MSIX_CONTROL;
    mem::store16(control, mem::load16(control) | MSIX_ENABLE);
    let buffer = pages.take()?;
    let mut queues = [const { None }; QUEUES_MAX as usize];
    for (queue, number) in queues.iter_mut().zip(0..device.queues.min(QUEUES_MAX)) {
        *queue = Some(start_queue(&device, number, pages.take()?)?);
    }
    device.announce();
    device.ready();
    ask(kind, &mut queues, buffer);
    Some(())
}

/// With all descriptors, or fewer if the device has fewer, and with interrupts.
fn start_queue(device: &Device, number: u16, rings: u64) -> Option<Queue> {
    let sizes = [QUEUE_SIZE, QUEUE_SIZE / 4];
    let queue = sizes.into_iter().find_map(|size| device.queue_of(number, rings, size).ok())?;
    mem::store16(rings + virtio::AVAIL_AT, 0);
    Some(queue)
}

/// The first requests: some are answered now, some wait for what never comes.
fn ask(kind: u32, queues: &mut [Option<Queue>], buffer: u64) {
    let part = |len_bytes, writable| Part { gpa: buffer, len_bytes, writable };
    if kind == CONSOLE {
        mem::store(buffer, u64::from_le_bytes(*b"awake\r\n\0"));
    }
    let receive = part(BUFFER_BYTES, true);
    // Queue, whether the answer comes at once, request.
    let requests: &[(usize, bool, Part)] = match kind {
        RNG => &[(0, true, receive); 3],
        WATCHDOG => &[(0, true, part(1, true))],
        CONSOLE => &[(1, true, part(7, false)), (0, false, receive)],
        VSOCK => &[(0, false, receive), (2, false, receive)],
        _ => &[],
    };
    for (number, is_answered, part) in requests {
        let Some(Some(queue)) = queues.get_mut(*number) else { continue };
        if *is_answered {
            queue.request(&[*part], || ());
        } else {
            queue.post(&[*part]);
        }
    }
}
