// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Seeds that are messages of the pool of prezeroed memory: requests, grants, refusals.

use super::Seed;

fn message(kind: u16, body: &[u8]) -> Vec<u8> {
    let mut bytes = b"GPZ1".to_vec();
    bytes.extend(kind.to_le_bytes());
    bytes.extend([0, 0]);
    bytes.extend((body.len() as u32).to_le_bytes());
    bytes.extend([0; 4]);
    bytes.extend(body);
    bytes
}

fn take(size_bytes: u64, pages: u8, node: u32) -> Vec<u8> {
    let mut body = size_bytes.to_le_bytes().to_vec();
    body.extend([pages, 0, 0, 0]);
    body.extend(node.to_le_bytes());
    message(1, &body)
}

fn granted(size_bytes: u64, pages: u8) -> Vec<u8> {
    let mut body = size_bytes.to_le_bytes().to_vec();
    body.extend([pages, 0, 0, 0, 0, 0, 0, 0]);
    message(2, &body)
}

fn refused(reason: u16, text: &str) -> Vec<u8> {
    let mut body = reason.to_le_bytes().to_vec();
    body.extend([0, 0]);
    body.extend(text.as_bytes());
    message(3, &body)
}

fn regions(body: &mut Vec<u8>) {
    for number in [0_u64, 3, 4, 1, 5, 2] {
        body.extend((number << 30).to_le_bytes());
    }
}

fn take_pinned() -> Vec<u8> {
    // 0000:65:00.0 and 0001:02:00.0
    let mut body = vec![2, 2, 3, 0, 0, 0, 0x65, 0, 1, 0, 2, 0];
    for (size_gib, node) in [(4_u64, u32::MAX), (2, 1)] {
        body.extend((size_gib << 30).to_le_bytes());
        body.extend([2, 0, 0, 0]);
        body.extend(node.to_le_bytes());
    }
    regions(&mut body);
    message(6, &body)
}

fn granted_pinned() -> Vec<u8> {
    let mut body = vec![2, 3, 0, 0, 0, 0, 0x65, 0];
    for number in [1_u32, 2, 3, 0] {
        body.extend(number.to_le_bytes());
    }
    body.extend((64_u64 << 20).to_le_bytes());
    for size_gib in [4_u64, 2] {
        body.extend((size_gib << 30).to_le_bytes());
        body.extend([2, 0, 0, 0, 0, 0, 0, 0]);
    }
    regions(&mut body);
    message(7, &body)
}

pub fn seeds() -> Vec<Seed> {
    let two = [take(1 << 32, 2, 0), take(4096, 0, u32::MAX)].concat();
    let dialogue = [take(1 << 30, 1, u32::MAX), granted(1 << 30, 1)].concat();
    [
        ("requests", two),
        ("dialogue", dialogue),
        ("granted", granted(1 << 36, 3)),
        ("pinned", [take_pinned(), granted_pinned()].concat()),
        ("refused", refused(0, "none of its 3 slots of this kind is ready")),
    ]
    .map(|(name, bytes)| Seed::new("pool_protocol", name, bytes))
    .into()
}
