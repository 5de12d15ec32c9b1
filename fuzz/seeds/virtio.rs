// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Seeds that are guest memory: rings with valid requests, one page for each queue.
//!
//! The layout is that of the entry points in `devices/src/virtio/fuzz.rs`. The last byte chooses
//! features; each layout is written with several.

use super::{Seed, put};

const QUEUE_STRIDE: usize = 0x1000;
const AVAILABLE_OFFSET: usize = 0x400;
const QUEUE_SIZE: usize = 16;
/// Buffers of queue 0; the rings end before.
const BUFFERS: usize = 0xc00;

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;

/// A buffer: address, length, whether the device writes it.
type Buffer = (usize, u32, bool);

struct Memory {
    bytes: Vec<u8>,
    /// Descriptors and heads used so far, by queue.
    used: Vec<(usize, usize)>,
}

impl Memory {
    fn new(queues: usize) -> Self {
        Self { bytes: vec![0; queues * QUEUE_STRIDE], used: vec![(0, 0); queues] }
    }

    fn descriptor(
        &mut self,
        at: usize,
        (gpa, len, writable): Buffer,
        next: Option<usize>,
        flags: u16,
    ) {
        let flags =
            flags | if next.is_some() { NEXT } else { 0 } | if writable { WRITE } else { 0 };
        let next = u16::try_from(next.unwrap_or(0)).expect("tables are short");
        put(&mut self.bytes, at, &(gpa as u64).to_le_bytes());
        put(&mut self.bytes, at + 8, &len.to_le_bytes());
        put(&mut self.bytes, at + 12, &flags.to_le_bytes());
        put(&mut self.bytes, at + 14, &next.to_le_bytes());
    }

    fn offer(&mut self, queue: usize, head: usize) {
        let ring = queue * QUEUE_STRIDE + AVAILABLE_OFFSET;
        let (descriptors, heads) = self.used[queue];
        let head = u16::try_from(head).expect("rings are short");
        put(&mut self.bytes, ring + 4 + 2 * heads, &head.to_le_bytes());
        let count = u16::try_from(heads + 1).expect("rings are short");
        put(&mut self.bytes, ring + 2, &count.to_le_bytes());
        self.used[queue] = (descriptors, heads + 1);
    }

    /// Offers the buffers as a chain.
    fn chain(&mut self, queue: usize, buffers: &[Buffer]) {
        let first = self.used[queue].0;
        assert!(first + buffers.len() <= QUEUE_SIZE, "the table is full");
        for (number, buffer) in buffers.iter().enumerate() {
            let index = first + number;
            let next = (number + 1 < buffers.len()).then_some(index + 1);
            self.descriptor(queue * QUEUE_STRIDE + 16 * index, *buffer, next, 0);
        }
        self.used[queue].0 += buffers.len();
        self.offer(queue, first);
    }

    /// Offers the buffers through a table of their own.
    fn indirect(&mut self, queue: usize, table: usize, buffers: &[Buffer]) {
        for (number, buffer) in buffers.iter().enumerate() {
            let next = (number + 1 < buffers.len()).then_some(number + 1);
            self.descriptor(table + 16 * number, *buffer, next, 0);
        }
        let first = self.used[queue].0;
        let len = u32::try_from(16 * buffers.len()).expect("tables are short");
        self.descriptor(queue * QUEUE_STRIDE + 16 * first, (table, len, false), None, INDIRECT);
        self.used[queue].0 += 1;
        self.offer(queue, first);
    }

    /// The layout with each choice of features.
    fn seeds(&self, target: &'static str, name: &str, choices: &[u8]) -> Vec<Seed> {
        let with = |choice: &u8| {
            let mut bytes = self.bytes.clone();
            bytes.push(*choice);
            Seed::new(target, format!("{name}-{choice}"), bytes)
        };
        choices.iter().map(with).collect()
    }
}

fn block_header(memory: &mut Memory, at: usize, kind: u32, sector: u64) {
    put(&mut memory.bytes, at, &kind.to_le_bytes());
    put(&mut memory.bytes, at + 8, &sector.to_le_bytes());
}

/// Header, data, status byte: the data lie across the border of the two memory regions.
fn block() -> Vec<Seed> {
    const DATA: usize = 0x7e00;
    let mut transfers = Memory::new(1);
    for (number, (kind, device_writes)) in
        [(1, false), (0, true), (8, true), (4, true)].iter().enumerate()
    {
        let header = BUFFERS + 32 * number;
        block_header(&mut transfers, header, *kind, 8);
        let status = (header + 16, 1, true);
        let len = if *kind == 8 { 20 } else { 1024 };
        let data = (DATA, len, *device_writes);
        let buffers = [(header, 16, false), data, status];
        match kind {
            4 => transfers.chain(0, &[buffers[0], buffers[2]]),
            _ => transfers.chain(0, &buffers),
        }
    }
    let mut ranges = Memory::new(1);
    for (number, kind) in [11, 13].iter().enumerate() {
        let header = BUFFERS + 64 * number;
        block_header(&mut ranges, header, *kind, 0);
        put(&mut ranges.bytes, header + 32, &16_u64.to_le_bytes());
        put(&mut ranges.bytes, header + 40, &8_u32.to_le_bytes());
        ranges.chain(0, &[(header, 16, false), (header + 32, 16, false), (header + 16, 1, true)]);
    }
    let mut indirect = Memory::new(1);
    for (number, (kind, device_writes)) in [(1, false), (0, true)].iter().enumerate() {
        let header = BUFFERS + 32 * number;
        block_header(&mut indirect, header, *kind, 1);
        let data = [(DATA, 512, *device_writes), (0x9000, 512, *device_writes)];
        let buffers = [(header, 16, false), data[0], data[1], (header + 16, 1, true)];
        indirect.indirect(0, BUFFERS + 0x100 + 0x80 * number, &buffers);
    }
    // Bits: ring features, read-only, flush negotiated, sparse, io_uring or not.
    let mut seeds = transfers.seeds("virtio_block", "transfers", &[0, 1, 3, 5, 16, 21]);
    seeds.extend(ranges.seeds("virtio_block", "ranges", &[8, 13, 24]));
    seeds.extend(indirect.seeds("virtio_block", "indirect", &[1, 17]));
    seeds
}

/// Buffers for frames on queue 0, frames to send on queue 1.
fn net() -> Vec<Seed> {
    const FRAME: usize = QUEUE_STRIDE + BUFFERS;
    let mut memory = Memory::new(2);
    memory.chain(0, &[(0x4000, 1526, true)]);
    memory.chain(0, &[(0x5000, 12, true), (0x7c00, 0x800, true)]);
    memory.chain(0, &[(0x9000, 0x3000, true)]);
    // Broadcast ARP behind a header without offloads.
    put(&mut memory.bytes, FRAME + 12, &[0xff; 6]);
    put(&mut memory.bytes, FRAME + 18, &[2, 0, 0, 0, 0, 1, 8, 6]);
    memory.chain(1, &[(FRAME, 12 + 60, false)]);
    // A segment to be split: flags, type, lengths of header and segment, checksum's place.
    put(&mut memory.bytes, FRAME + 0x80, &[1, 1, 54, 0, 0xb4, 5, 34, 0, 16, 0]);
    memory.chain(1, &[(FRAME + 0x80, 12, false), (FRAME + 0x90, 54, false), (0x4000, 3000, false)]);
    memory.seeds("virtio_net", "frames", &[0, 1, 2, 3])
}

/// Class and command, data, a byte for the answer.
fn net_control() -> Vec<Seed> {
    let commands: [(u8, u8, &[u8]); 5] = [
        (4, 0, &[1, 0]),
        (5, 0, &[1, 0, 0, 0, 0, 0, 0, 0]),
        (3, 0, &[]),
        (1, 1, &[2, 0, 0, 0, 0, 9]),
        (0, 0, &[1]),
    ];
    let mut memory = Memory::new(1);
    for (number, (class, command, data)) in commands.iter().enumerate() {
        let at = BUFFERS + 32 * number;
        put(&mut memory.bytes, at, &[*class, *command]);
        put(&mut memory.bytes, at + 8, data);
        let len = u32::try_from(data.len()).expect("data are short");
        let (head, answer) = ((at, 2, false), (at + 24, 1, true));
        match len {
            0 => memory.chain(0, &[head, answer]),
            _ => memory.chain(0, &[head, (at + 8, len, false), answer]),
        }
    }
    memory.seeds("virtio_net_control", "commands", &[0, 1])
}

fn console_and_rng() -> Vec<Seed> {
    let mut console = Memory::new(2);
    console.chain(0, &[(0x4000, 256, true)]);
    put(&mut console.bytes, QUEUE_STRIDE + BUFFERS, b"login: ");
    console.chain(1, &[(QUEUE_STRIDE + BUFFERS, 7, false)]);
    console.chain(1, &[(QUEUE_STRIDE + BUFFERS, 3, false), (0x7ff0, 64, false)]);
    let mut rng = Memory::new(1);
    rng.chain(0, &[(0x4000, 64, true)]);
    rng.chain(0, &[(0x7f00, 0x200, true), (0x5000, 16, true)]);
    let mut seeds = console.seeds("virtio_console", "text", &[0, 1]);
    seeds.extend(rng.seeds("virtio_rng", "buffers", &[0, 1]));
    seeds.extend(rng.seeds("virtio_watchdog", "buffers", &[0, 1]));
    seeds
}

/// What clocks there are, and the time of one, answered across the border of the two memory regions.
fn rtc() -> Vec<Seed> {
    let mut memory = Memory::new(1);
    put(&mut memory.bytes, BUFFERS, &0x1000_u16.to_le_bytes());
    put(&mut memory.bytes, BUFFERS + 32, &1_u16.to_le_bytes());
    memory.chain(0, &[(BUFFERS, 8, false), (0x5000, 16, true)]);
    memory.chain(0, &[(BUFFERS + 32, 16, false), (0x7ff8, 16, true)]);
    memory.seeds("virtio_rtc", "requests", &[0, 1])
}

/// A device is attached and has its rings and a buffer mapped, a buffer is unmapped again; a probe; a fault. The third
/// queue is that of the device.
fn iommu() -> Vec<Seed> {
    const ENDPOINT: u32 = 8;
    const DOMAIN: u32 = 1;
    let mut memory = Memory::new(3);
    let request = |memory: &mut Memory, number: usize, kind: u32, rest: &[&[u8]], room: u32| {
        let at = BUFFERS + 0x40 * number;
        put(&mut memory.bytes, at, &kind.to_le_bytes());
        put(&mut memory.bytes, at + 4, &rest.concat());
        let len = u32::try_from(4 + rest.concat().len()).expect("requests are short");
        memory.chain(0, &[(at, len, false), (0x7000 + 0x80 * number, room, true)]);
    };
    let (domain, endpoint) = (DOMAIN.to_le_bytes(), ENDPOINT.to_le_bytes());
    let pages = |first: u64, gpa: u64| {
        [first.to_le_bytes(), (first + 0xfff).to_le_bytes(), gpa.to_le_bytes()].concat()
    };
    request(&mut memory, 0, 1, &[&domain, &endpoint, &[0; 8]], 4);
    request(&mut memory, 1, 3, &[&domain, &pages(0x2000, 0x2000), &3_u32.to_le_bytes()], 4);
    request(&mut memory, 2, 3, &[&domain, &pages(1 << 32, 0x6000), &2_u32.to_le_bytes()], 4);
    request(&mut memory, 3, 3, &[&domain, &pages(1 << 33, 0x5000), &1_u32.to_le_bytes()], 4);
    request(&mut memory, 4, 4, &[&domain, &pages(1 << 33, 0)[..16], &[0; 4]], 4);
    request(&mut memory, 5, 5, &[&endpoint, &[0; 64]], 68);
    memory.chain(1, &[(0x7c00, 24, true)]);
    memory.chain(2, &[(1 << 32, 64, true)]);
    memory.chain(2, &[(1 << 33, 64, true)]);
    memory.seeds("virtio_iommu", "requests", &[0, 1])
}

/// Flushes, another request, and chains without room.
fn pmem() -> Vec<Seed> {
    let mut memory = Memory::new(1);
    put(&mut memory.bytes, BUFFERS + 16, &1_u32.to_le_bytes());
    for (number, (request, len)) in [(0, 4), (16, 4), (0, 64), (0, 2)].iter().enumerate() {
        let answer = (0x7ffe + 64 * number, *len, true);
        memory.chain(0, &[(BUFFERS + request, 4, false), answer]);
    }
    memory.seeds("virtio_pmem", "requests", &[0, 1])
}

/// Page numbers on queues 0 and 1, statistics on 2, a command and hints on 3, reports on 4. Both
/// regions of memory are released in part, the border between them included.
fn balloon() -> Vec<Seed> {
    const PFNS: usize = BUFFERS;
    const STATISTICS: usize = 2 * QUEUE_STRIDE + BUFFERS;
    const COMMAND: usize = 3 * QUEUE_STRIDE + BUFFERS;
    let mut memory = Memory::new(5);
    for (number, pfn) in [10_u32, 9, 8, 10, 15, 16, u32::MAX].iter().enumerate() {
        put(&mut memory.bytes, PFNS + 4 * number, &pfn.to_le_bytes());
    }
    memory.chain(0, &[(PFNS, 28, false)]);
    memory.chain(0, &[(PFNS, 12, false), (PFNS + 64, 1, true)]);
    memory.chain(1, &[(PFNS, 8, false)]);
    put(&mut memory.bytes, STATISTICS, &[4, 0, 1, 2, 3]);
    put(&mut memory.bytes, STATISTICS + 10, &[99, 0, 7]);
    memory.chain(2, &[(STATISTICS, 20, false)]);
    // The first command that the device ever gives, hints, and the end of them.
    put(&mut memory.bytes, COMMAND, &2_u32.to_le_bytes());
    memory.chain(3, &[(COMMAND, 4, false)]);
    memory.chain(3, &[(0x9000, 0x2000, true)]);
    memory.chain(3, &[(0x7800, 0x1_0000, true)]);
    memory.chain(3, &[(COMMAND + 8, 4, false)]);
    memory.chain(4, &[(0x6000, 0x1000, true), (0x7000, 0x2000, true), (0xc800, 0x2000, true)]);
    memory.chain(4, &[(usize::MAX - 0xfff, 0x2000, true), (0xf000, 0x8000, true)]);
    memory.seeds("virtio_balloon", "pages", &[0, 1])
}

/// Requests of every kind: blocks that come, go and are asked for, and some that are not there.
fn mem() -> Vec<Seed> {
    const REGION: u64 = 4 << 30;
    const BLOCK: u64 = 2 << 20;
    let mut memory = Memory::new(1);
    let requests: [(u16, u64, u16); 8] = [
        (0, REGION, 4),
        (0, REGION + 5 * BLOCK, 1),
        (3, REGION, 8),
        (1, REGION + BLOCK, 2),
        (0, REGION + 7 * BLOCK, 2),
        (9, 0, 0),
        (2, 0, 0),
        (0, REGION - BLOCK, 1),
    ];
    for (number, (kind, gpa, count)) in requests.into_iter().enumerate() {
        let at = BUFFERS + 64 * number;
        put(&mut memory.bytes, at, &kind.to_le_bytes());
        put(&mut memory.bytes, at + 8, &gpa.to_le_bytes());
        put(&mut memory.bytes, at + 16, &count.to_le_bytes());
        memory.chain(0, &[(at, 24, false), (at + 32, 10, true)]);
    }
    memory.seeds("virtio_mem", "requests", &[0, 1])
}

/// Receive buffers on queue 0, packets on 1, buffers for events on 2: a connection is asked for, has data in
/// pieces, and ends; others are out of place.
fn vsock() -> Vec<Seed> {
    const HEADER: u32 = 44;
    const PACKETS: usize = QUEUE_STRIDE + BUFFERS;
    let mut memory = Memory::new(3);
    for number in 0..8 {
        memory.chain(0, &[(0x4000 + 0x400 * number, 44, true), (0x6000 + 0x400 * number, 256, true)]);
    }
    let packets: [(u16, u32, u32, u32); 7] =
        [(1, 1, 0, 0), (5, 1, 8, 0), (6, 1, 0, 0), (4, 1, 0, 2), (1, 2, 0, 0), (7, 1, 0, 0), (3, 1, 0, 0)];
    for (number, (op, port, len, flags)) in packets.into_iter().enumerate() {
        let at = PACKETS + 64 * number;
        put(&mut memory.bytes, at, &3_u64.to_le_bytes());
        put(&mut memory.bytes, at + 8, &2_u64.to_le_bytes());
        put(&mut memory.bytes, at + 16, &1024_u32.to_le_bytes());
        put(&mut memory.bytes, at + 20, &port.to_le_bytes());
        put(&mut memory.bytes, at + 24, &len.to_le_bytes());
        put(&mut memory.bytes, at + 28, &1_u16.to_le_bytes());
        put(&mut memory.bytes, at + 30, &op.to_le_bytes());
        put(&mut memory.bytes, at + 32, &flags.to_le_bytes());
        put(&mut memory.bytes, at + 36, &0x1_0000_u32.to_le_bytes());
        match len {
            0 => memory.chain(1, &[(at, HEADER, false)]),
            _ => memory.chain(1, &[(at, 20, false), (at + 20, 24, false), (0x7ffc, len, false)]),
        }
    }
    memory.chain(2, &[(0x5000, 8, true)]);
    memory.seeds("virtio_vsock", "packets", &[0, 1, 2, 3])
}

/// Usual answers to all requests; one of other bytes, with and without a header, at some of them.
fn vhost_user() -> Vec<Seed> {
    let late = |usual: usize, choice: u8| {
        let mut contents = vec![0; usual];
        contents.push(choice);
        contents.extend([1, 0, 0, 0, 5, 0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        contents
    };
    let usual = [("usual-block", 0), ("usual-fs", 1), ("usual-net", 2), ("usual-generic", 3)];
    let usual = usual.map(|(name, last)| Seed::new("vhost_user", name, [0; 39].into_iter().chain([last]).collect::<Vec<u8>>()));
    let faults = [0, 1, 3, 5, 8, 12, 14].into_iter().flat_map(|at| [4, 5, 6, 7, 15].map(|choice| (at, choice)));
    let faults = faults.map(|(at, choice)| Seed::new("vhost_user", format!("fault-{at}-{choice}"), late(at, choice)));
    // Two pairs, one, an announcement; the requests of the back end come among the answers.
    let command = |name, command: [u8; 4]| {
        let end = command.into_iter().chain([0, 0, 0, 0, 2]);
        Seed::new("vhost_user", name, [0; 80].into_iter().chain(end).collect::<Vec<u8>>())
    };
    let commands = [("pairs-2", [4, 0, 2, 0]), ("pairs-1", [4, 0, 1, 0]), ("announced", [3, 0, 0, 0])];
    let commands = commands.map(|(name, bytes)| command(name, bytes));
    // Behind the answers before: no answer of another kind, and then what the channel carries.
    let change = [0, 0, 0, 0, 0, 0].into_iter().chain([2_u8, 0, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0]);
    let change = change.chain([2, 0, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0]).chain([0; 60]);
    let change = Seed::new("vhost_user", "config-change", change.collect::<Vec<u8>>());
    usual.into_iter().chain(faults).chain(commands).chain([change]).collect()
}

/// A usual device with one queue, and with several; each answer of another one; a call that fails early or late.
fn vdpa() -> Vec<Seed> {
    let usual = [("usual", vec![1]), ("usual-queues", vec![4])];
    let word = |value: u64| value.to_le_bytes().to_vec();
    let others = [
        ("network", [vec![3, 0b10_1001], word(1), word(12), vec![10, 0, 0, 0, 0, 0, 0, 0, 0, 2, 0], word(u64::MAX)].concat()),
        ("queues", vec![2, 0b10, 1]),
        ("size", [vec![1, 0b100], word(1000)].concat()),
        ("reach", [vec![1, 0b1_0000], word(0), word(0xfff)].concat()),
        ("bare", [vec![1, 0b100_0000], word(2), word(0)].concat()),
        ("refuses", vec![1, 0b1000_0000, 8, 0]),
        ("broken", vec![1, 0b1000_0000, 0, 64]),
    ];
    let fails = |at: usize| [vec![1, 0, 1], vec![0; at], vec![7]].concat();
    let faults = [0, 3, 9, 11, 14, 18, 24, 27, 30].map(|at| (format!("fault-{at}"), fails(at)));
    let named = usual.into_iter().chain(others).map(|(name, bytes)| (name.to_owned(), bytes));
    named.chain(faults).map(|(name, bytes)| Seed::new("vdpa", name, bytes)).collect()
}

/// Answers to what is asked at a start, when the state is read, and when it is set again; then a command.
fn tpm() -> Vec<Seed> {
    let words = |words: &[u32]| words.iter().flat_map(|word| word.to_be_bytes()).collect::<Vec<u8>>();
    // Capabilities, the data socket, stop, the buffer; stop, init, twice; three parts; stop, three parts, init.
    let mut answers = words(&[0, 0xffff, 0, 0, 0, 3968, 256, 4096, 0, 0, 0, 0]);
    for kind in 1..=3 {
        answers.extend(words(&[0, 0, 8, 8, kind, kind]));
    }
    answers.extend(words(&[0; 5]));
    answers.resize(answers.len().next_multiple_of(16), 0);
    let split = u8::try_from(answers.len() / 16).unwrap_or(u8::MAX);
    let mut accesses = Vec::new();
    // Locality, ready, a command of 12 bytes, start, cancel, and a look at all.
    let write = |offset, value: u64| [vec![0x94, offset], value.to_le_bytes().to_vec()].concat();
    for (offset, value) in [(8, 1), (0x40, 1), (0x80, 0x0180), (0x84, 0x0c00), (0x88, 0x7b01), (0x4c, 1), (0x48, 1)] {
        accesses.extend(write(offset, value));
    }
    for offset in (0..0x80).step_by(8) {
        accesses.extend([8, offset, 0, 0, 0, 0, 0, 0, 0, 0]);
    }
    let whole = [vec![split], answers.clone(), accesses.clone()].concat();
    let guest = [vec![0], accesses].concat();
    let lacking = [vec![split], vec![0; answers.len()]].concat();
    [("whole", whole), ("guest", guest), ("lacking", lacking)].map(|(name, bytes)| Seed::new("tpm", name, bytes)).into()
}

pub fn seeds() -> Vec<Seed> {
    [vhost_user(), vdpa(), tpm(), vsock(), balloon(), mem(), block(), net(), net_control(), console_and_rng(), rtc(), iommu(), pmem()].into_iter().flatten().collect()
}
