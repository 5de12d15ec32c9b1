// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Seeds that are disk images: qcow2, fixed VHD, and what makes a VHDX image different from others of its kind; each
//! with a byte behind it that chooses how it is opened.

use super::{Seed, put};

const CLUSTER: usize = 4096;

/// What the last byte chooses.
const QCOW2: u8 = 0;
const VHD: u8 = 1;
const READONLY: u8 = 2;
const VHDX: u8 = 4;

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

/// The parts that the entry point puts together: header, region table, metadata and items, table of blocks.
fn vhdx() -> Vec<u8> {
    const GUIDS: [[u8; 16]; 7] = [
        [0x66, 0x77, 0xc2, 0x2d, 0x23, 0xf6, 0, 0x42, 0x9d, 0x64, 0x11, 0x5e, 0x9b, 0xfd, 0x4a, 8],
        [6, 0xa2, 0x7c, 0x8b, 0x90, 0x47, 0x9a, 0x4b, 0xb8, 0xfe, 0x57, 0x5f, 5, 0x0f, 0x88, 0x6e],
        [
            0x37, 0x67, 0xa1, 0xca, 0x36, 0xfa, 0x43, 0x4d, 0xb3, 0xb6, 0x33, 0xf0, 0xaa, 0x44,
            0xe7, 0x6b,
        ],
        [
            0x24, 0x42, 0xa5, 0x2f, 0x1b, 0xcd, 0x76, 0x48, 0xb2, 0x11, 0x5d, 0xbe, 0xd8, 0x3b,
            0xf4, 0xb8,
        ],
        [
            0x1d, 0xbf, 0x41, 0x81, 0x6f, 0xa9, 9, 0x47, 0xba, 0x47, 0xf2, 0x33, 0xa8, 0xfa, 0xab,
            0x5f,
        ],
        [
            0xc7, 0x48, 0xa3, 0xcd, 0x5d, 0x44, 0x71, 0x44, 0x9c, 0xc9, 0xe9, 0x88, 0x52, 0x51,
            0xc5, 0x56,
        ],
        [0xab, 0x12, 0xca, 0xbe, 0xe6, 0xb2, 0x23, 0x45, 0x93, 0xef, 0xc3, 9, 0xe0, 0, 0xc7, 0x46],
    ];
    const REGIONS: usize = 80;
    const METADATA: usize = 160;
    const ITEMS: usize = 352;
    const TABLE: usize = 672;
    let mut parts = vec![0; TABLE + 6 * 8];
    put(&mut parts, 0, b"head");
    put(&mut parts, 66, &1_u16.to_le_bytes());
    put(&mut parts, 68, &(1_u32 << 20).to_le_bytes());
    put(&mut parts, 72, &(1_u64 << 20).to_le_bytes());
    put(&mut parts, REGIONS, b"regi");
    put(&mut parts, REGIONS + 8, &2_u32.to_le_bytes());
    for (number, guid) in GUIDS[..2].iter().enumerate() {
        let at = REGIONS + 16 + 32 * number;
        put(&mut parts, at, guid);
        put(&mut parts, at + 16, &((2 + number as u64) << 20).to_le_bytes());
        put(&mut parts, at + 24, &(1_u32 << 20).to_le_bytes());
        put(&mut parts, at + 28, &1_u32.to_le_bytes());
    }
    put(&mut parts, METADATA, b"metadata");
    put(&mut parts, METADATA + 10, &5_u16.to_le_bytes());
    let items: [&[u8]; 5] = [
        &(1_u64 << 20).to_le_bytes(),
        &(5_u64 << 20).to_le_bytes(),
        &512_u32.to_le_bytes(),
        &4096_u32.to_le_bytes(),
        &[0x11; 16],
    ];
    for (number, (guid, value)) in GUIDS[2..].iter().zip(items).enumerate() {
        let at = METADATA + 32 + 32 * number;
        put(&mut parts, at, guid);
        put(&mut parts, at + 16, &((64 << 10) + 64 * number as u32).to_le_bytes());
        put(&mut parts, at + 20, &(value.len() as u32).to_le_bytes());
        put(&mut parts, at + 24, &4_u32.to_le_bytes());
        put(&mut parts, ITEMS + 64 * number, value);
    }
    for (block, place) in [(0, 5_u64), (1, 4), (3, 7)] {
        put(&mut parts, TABLE + 8 * block, &(place << 20 | 6).to_le_bytes());
    }
    parts
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
        ("vhdx", with(vhdx(), VHDX)),
        ("vhdx-readonly", with(vhdx(), VHDX | READONLY)),
    ]
    .into_iter()
    .map(|(name, contents)| Seed::new("disk_image", name, contents))
    .collect()
}
