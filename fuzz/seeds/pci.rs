// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Seeds that are what a driver does to a PCI device: enumeration, then setting up virtio.
//!
//! The form is that of the entry points in `pci/src/fuzzing.rs`: a byte that says what and where,
//! an offset, a byte for the width, eight bytes of data.

use super::Seed;

/// How the entry points read a width: any byte of the right range will do.
fn width(bytes: u8) -> u8 {
    match bytes {
        1 => 0,
        2 => 5,
        4 => 9,
        _ => 13,
    }
}

fn access(kind: u8, offset: u8, bytes: u8, value: u64) -> Vec<u8> {
    let mut out = vec![kind, offset, width(bytes)];
    out.extend_from_slice(&value.to_le_bytes());
    out
}

/// Sizes and places the BARs of all devices, switches them on, moves one, switches them off.
fn enumeration(ports: bool) -> Vec<u8> {
    const WRITE: u8 = 0;
    const READ: u8 = 1;
    const BAR: u8 = 4;
    let command = |device: u8, value: u64| {
        let mut out = vec![device << 4 | 8 | WRITE, width(2)];
        out.extend_from_slice(&value.to_le_bytes());
        out
    };
    let mut input = Vec::new();
    for device in 1..4 {
        let header = device << 4;
        for register in [0, 8, 0x2c, 0x34, 0x3c] {
            input.extend(access(header | READ, register, 4, 0));
        }
        for (register, address) in [(0, 0xc010_0000), (4, 0x40), (0x10, 0xc020_0000)] {
            input.extend(access(header | BAR | WRITE, register, 4, 0xffff_ffff));
            input.extend(access(header | BAR | READ, register, 4, 0));
            input.extend(access(
                header | BAR | WRITE,
                register,
                4,
                address + u64::from(device) * 0x8_0000,
            ));
        }
        input.extend(command(device, 6));
        input.extend(access(header | BAR | WRITE, 4, 4, 0x41));
        input.extend(command(device, 0));
    }
    if ports {
        for address in [0x8000_0800_u64, 0x8000_1010, 0x8001_0000] {
            input.extend(access(2, 0, 4, address));
            input.extend(access(3, 4, 4, 0));
            input.extend(access(2, 6, 2, 0xffff));
            input.extend(access(3, 7, 1, 0));
        }
    }
    input
}

/// What a driver does to the common configuration until the device runs, then notifications.
fn driver(queues: u64, msix: bool) -> Vec<u8> {
    let write = |offset, bytes, value| access(0, offset, bytes, value);
    let read = |offset, bytes| access(10, offset, bytes, 0);
    let status = |value: u64| {
        let mut out = vec![3 << 4, width(1)];
        out.extend_from_slice(&value.to_le_bytes());
        out
    };
    let mut input = [status(0), status(1), status(3)].concat();
    for half in 0..2_u64 {
        input.extend([write(0x00, 4, half), read(0x04, 4), write(0x08, 4, half)].concat());
        input.extend(write(0x0c, 4, u64::from(half == 1)));
    }
    input.extend([status(0xb), read(0x14, 1), write(0x10, 2, 0)].concat());
    if msix {
        // Entry 0 of the table: address, data, not masked.
        for (offset, value) in [(0, 0xfee0_0000), (4, 0), (8, 0x4021), (12, 0)] {
            input.extend(access(6 << 4, offset, 4, value));
        }
    }
    for queue in 0..queues {
        input.extend([write(0x16, 2, queue), read(0x18, 2), write(0x18, 2, 64)].concat());
        input.extend(write(0x1a, 2, queue));
        for (register, page) in [(0x20, 0x1000), (0x28, 0x2000), (0x30, 0x3000)] {
            input.extend(write(register, 4, page + queue * 0x4000));
            input.extend(write(register + 4, 4, 0));
        }
        input.extend(write(0x1c, 2, 1));
    }
    input.extend(status(0xf));
    for queue in 0..queues {
        let offset = u8::try_from(queue * 4).expect("few queues");
        input.extend(access(7 << 4, offset, 2, queue));
    }
    // Pause and resume, then reset and once more the first steps.
    input.extend([vec![13, 0, 0], vec![0; 8], vec![14, 0, 0], vec![0; 8]].concat());
    input.extend([status(0), status(1), status(3)].concat());
    input
}

/// Sizes and places the first BAR of a passed-through function, switches MSI and MSI-X on and off, and
/// then bus mastering. The form is that of `vfio/src/fuzzing.rs`: the gate, patches (none), accesses of
/// a kind, an offset in two bytes (the second chooses a register) and data.
fn passthrough(gate_open: bool) -> Vec<u8> {
    const COMMAND: u8 = 0;
    const BARS: u8 = 1;
    const MSI: u8 = 4;
    const MSIX: u8 = 5;
    let write = |place: u8, offset: u8, data: &[u8]| {
        let size = u8::try_from(data.len().ilog2()).unwrap_or(0);
        [&[size, offset, place][..], data].concat()
    };
    let mut input = vec![u8::from(!gate_open), 0];
    input.extend(write(BARS, 0, &[0xff; 4]));
    input.extend(write(BARS, 0, &[0, 0, 0x10, 0]));
    input.extend(write(BARS, 4, &[0x40, 0, 0, 0]));
    input.extend(write(COMMAND, 0, &[2, 0]));
    input.extend(write(MSI, 4, &[0, 0x10, 0xe0, 0xfe]));
    input.extend(write(MSI, 2, &[0x11, 0]));
    input.extend(write(MSI, 2, &[0, 0]));
    input.extend(write(MSIX, 2, &[4, 0x80]));
    input.extend(write(COMMAND, 0, &[6, 4]));
    input.extend(write(BARS, 0, &[0, 0, 0x20, 0]));
    input.extend(write(MSIX, 2, &[4, 0]));
    input
}

/// Answers of a device server, by the form of `vfio/src/user/fuzz.rs`: as usual for a while, then another one, then as
/// usual. A start has a greeting, the device, seven regions, three kinds of interrupts, a reset and memory.
fn device_server() -> Vec<Seed> {
    let after = |usual: usize, bytes: &[u8]| [&vec![0; usual][..], bytes].concat();
    let other = |payload: &[u8]| {
        let len = u8::try_from(payload.len()).unwrap_or(0);
        [&[0x80 | len][..], payload].concat()
    };
    let words = |words: &[u32]| words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<u8>>();
    let greeting = [&[0, 0, 0, 0][..], br#"{"capabilities":{"max_msg_fds":8}}"#, &[0]].concat();
    // Of the second region: one area, without a file.
    let region = words(&[64, 0b1111, 1, 32, 0x2000, 0, 0, 0, 0x1_0001, 0, 1, 0, 0, 0, 0x1000, 0]);
    let named = [
        ("usual", Vec::new()),
        ("greeting", other(&greeting)),
        ("device", after(1, &other(&words(&[16, 0b10, 9, 3])))),
        ("areas", after(3, &other(&region))),
        ("interrupts", after(9, &other(&words(&[16, 1, 0, 0])))),
        ("changed", after(2, &[0xf0, 20, 2])),
        ("refused", after(12, &[0xf1, 22])),
        ("asks", after(1, &[0xf2, 16, 0, 0x10, 0, 0, 0, 0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0])),
        ("no-message", after(5, &[0xf3, 1, 2, 3])),
        ("ends-at-work", after(20, &[0xff])),
        ("refuses-at-work", after(18, &[0xf1, 5, 0xf1, 5, 0xf1, 28])),
    ];
    named.into_iter().map(|(name, bytes)| Seed::new("vfio_user", name, bytes)).collect()
}

pub fn seeds() -> Vec<Seed> {
    let mut seeds = device_server();
    seeds.extend([
        Seed::new("vfio_config", "gate-open", passthrough(true)),
        Seed::new("vfio_config", "gate-failed", passthrough(false)),
        Seed::new("vfio_state", "as-saved", b"{}".to_vec()),
        Seed::new("vfio_state", "registers", br#"{"command":1030,"msi_pending":5}"#.to_vec()),
        Seed::new(
            "vfio_state",
            "hardware",
            br#"{"state":{"len_bytes":3,"base64":"QUJD"},"msix":{"version":1,"entries":[]}}"#.to_vec(),
        ),
        Seed::new("pci_config_space", "ecam", enumeration(false)),
        Seed::new("pci_config_space", "ports", enumeration(true)),
        Seed::new("virtio_transport", "one-queue", driver(1, false)),
        Seed::new("virtio_transport", "two-queues-msix", driver(2, true)),
    ]);
    seeds
}
