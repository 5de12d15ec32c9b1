// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Seeds that are disk images: qcow2 and fixed VHD, each with a byte behind it that chooses how it is opened.

use super::{Seed, put};

const CLUSTER: usize = 4096;

/// What the last byte chooses.
const QCOW2: u8 = 0;
const VHD: u8 = 1;
const READONLY: u8 = 2;

/// Three L2 tables, of which the first one is there, with data, zeros and something compressed.
fn qcow2(version: u32) -> Vec<u8> {
    const DISK: u64 = 5 << 20;
    const CLUSTERS: u16 = 7;
    let at = |number: usize| number * CLUSTER;
    let offset = |number: usize| (at(number) as u64).to_be_bytes();
    let alone = |number: usize| (at(number) as u64 | 1 << 63).to_be_bytes();
    let mut image = vec![0; at(CLUSTERS.into())];
    put(&mut image, 0, b"QFI\xfb");
    put(&mut image, 4, &version.to_be_bytes());
    put(&mut image, 20, &12_u32.to_be_bytes());
    put(&mut image, 24, &DISK.to_be_bytes());
    put(&mut image, 36, &3_u32.to_be_bytes());
    put(&mut image, 40, &offset(3));
    put(&mut image, 48, &offset(1));
    put(&mut image, 56, &1_u32.to_be_bytes());
    if version == 3 {
        put(&mut image, 96, &4_u32.to_be_bytes());
        put(&mut image, 100, &104_u32.to_be_bytes());
        // A table of feature names with one entry, and the end.
        put(&mut image, 104, &0x6803_f857_u32.to_be_bytes());
        put(&mut image, 108, &48_u32.to_be_bytes());
        put(&mut image, 114, b"dirty bit");
    }
    put(&mut image, at(1), &offset(2));
    for number in 0..CLUSTERS {
        put(&mut image, at(2) + 2 * usize::from(number), &1_u16.to_be_bytes());
    }
    put(&mut image, at(3), &alone(4));
    put(&mut image, at(4), &alone(5));
    // A raw deflate stream of two stored blocks: 4096 bytes are there when the first has ended.
    let compressed = at(6) as u64 | 7 << 58 | 1 << 62;
    put(&mut image, at(4) + 8, &compressed.to_be_bytes());
    if version == 3 {
        put(&mut image, at(4) + 16, &1_u64.to_be_bytes());
    }
    image[at(5)..at(6)].fill(0x5a);
    // Stored, final, of 4091 bytes: one that is shorter than a cluster, which is an error that is survived.
    put(&mut image, at(6), &[1, 0xfb, 0x0f, 0x04, 0xf0]);
    image
}

/// A sector behind a disk of 64 KiB.
fn vhd() -> Vec<u8> {
    const DISK: usize = 64 << 10;
    let mut footer = [0; 512];
    put(&mut footer, 0, b"conectix");
    put(&mut footer, 12, &0x1_0000_u32.to_be_bytes());
    put(&mut footer, 16, &u64::MAX.to_be_bytes());
    put(&mut footer, 48, &(DISK as u64).to_be_bytes());
    put(&mut footer, 60, &2_u32.to_be_bytes());
    let sum: u32 = footer.iter().map(|byte| u32::from(*byte)).sum();
    put(&mut footer, 64, &(!sum).to_be_bytes());
    let mut image = vec![0x5a; DISK];
    image.extend(footer);
    image
}

pub fn seeds() -> Vec<Seed> {
    let with = |mut image: Vec<u8>, choice| {
        image.push(choice);
        image
    };
    [
        ("qcow2-v3", with(qcow2(3), QCOW2)),
        ("qcow2-v3-readonly", with(qcow2(3), QCOW2 | READONLY)),
        ("qcow2-v2", with(qcow2(2), QCOW2)),
        ("vhd", with(vhd(), VHD)),
    ]
    .into_iter()
    .map(|(name, contents)| Seed::new("disk_image", name, contents))
    .collect()
}
