// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Seeds that are files of a snapshot: manifests with right and wrong checksums, memory indexes.

use super::Seed;

const MANIFEST: &str = r#"{"format":"godwit-snapshot","version":1,"program":"godwit","created_s":1,"config":{"len_bytes":2,"crc32c":1},"state":{"len_bytes":2,"crc32c":2},"index":{"len_bytes":80,"crc32c":3},"memory_len_bytes":176128,"chunk_bytes":65536,"regions":[{"name":"mem0","gpa":0,"len_bytes":163840,"offset_bytes":0},{"name":"mem1","gpa":4294967296,"len_bytes":12288,"offset_bytes":163840}]}"#;

/// CRC-32C, bit by bit.
fn crc32c(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc: u32, _| {
            if crc & 1 == 0 { crc >> 1 } else { crc >> 1 ^ 0x82f6_3b78 }
        })
    })
}

fn envelope(snapshot: &str, crc: u32) -> Vec<u8> {
    format!("{{\"crc32c\":{crc},\"snapshot\":{snapshot}}}\n").into_bytes()
}

/// The index of 40 pages and of 3, with these entries: checksum, pages.
fn index(entries: [(u32, u16); 4]) -> Vec<u8> {
    let mut bytes = b"GODWITMX".to_vec();
    bytes.extend([1_u32.to_le_bytes(), 16_u32.to_le_bytes()].concat());
    bytes.extend([4_u64.to_le_bytes(), 0_u64.to_le_bytes()].concat());
    for (crc, present) in entries {
        bytes.extend(crc.to_le_bytes());
        bytes.extend(present.to_le_bytes());
        bytes.extend([0, 0]);
    }
    bytes
}

pub fn seeds() -> Vec<Seed> {
    let newer = MANIFEST.replace("\"version\":1", "\"version\":2");
    let manifests = [
        ("whole", envelope(MANIFEST, crc32c(MANIFEST.as_bytes()))),
        ("newer", envelope(&newer, crc32c(newer.as_bytes()))),
        ("damaged", envelope(MANIFEST, 0)),
        ("foreign", envelope("{}", crc32c(b"{}"))),
    ];
    let indexes = [
        ("empty", index([(0, 0); 4])),
        ("full", index([(1, 0xffff), (2, 0xffff), (3, 0xff), (4, 7)])),
        ("scattered", index([(1, 0x8001), (0, 0), (3, 0x55), (0, 0)])),
    ];
    let manifests = manifests.map(|(name, bytes)| Seed::new("snapshot_manifest", name, bytes));
    let indexes = indexes.map(|(name, bytes)| Seed::new("snapshot_index", name, bytes));
    manifests.into_iter().chain(indexes).collect()
}
