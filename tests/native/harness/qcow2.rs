// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! qcow2 images, made and read without the code under test.

const CLUSTER: usize = 1 << 16;

/// An empty image of a disk that one L2 table maps (512 MiB): header, refcount table and block, L1 table.
pub fn empty(disk_bytes: u64) -> Vec<u8> {
    assert!(disk_bytes <= 512 << 20, "more than one L2 table");
    let mut image = vec![0; 4 * CLUSTER];
    let mut put = |at: usize, bytes: &[u8]| image[at..at + bytes.len()].copy_from_slice(bytes);
    let offset = |number: usize| ((number * CLUSTER) as u64).to_be_bytes();
    put(0, b"QFI\xfb\0\0\0\x03");
    put(20, &16_u32.to_be_bytes());
    put(24, &disk_bytes.to_be_bytes());
    put(36, &1_u32.to_be_bytes());
    put(40, &offset(3));
    put(48, &offset(1));
    put(56, &1_u32.to_be_bytes());
    put(96, &4_u32.to_be_bytes());
    put(100, &104_u32.to_be_bytes());
    put(CLUSTER, &offset(2));
    for number in 0..4 {
        put(2 * CLUSTER + 2 * number, &1_u16.to_be_bytes());
    }
    image
}

/// What is on the disk of such an image; the image may have room behind it.
///
/// # Panics
/// A table leads out of the image, or two clusters of the disk to one place.
pub fn contents(image: &[u8]) -> Vec<u8> {
    let number = |at: usize| {
        let bytes = image[at..at + 8].try_into().expect("eight bytes");
        u64::from_be_bytes(bytes)
    };
    let place = |entry: u64| usize::try_from(entry & 0x00ff_ffff_ffff_fe00).expect("64 bits");
    let len = usize::try_from(number(24)).expect("64 bits");
    let mut disk = vec![0; len];
    let l2 = place(number(place(number(40))));
    let mut used = std::collections::BTreeSet::from([0, place(number(40)), place(number(48)), l2]);
    if l2 == 0 {
        return disk;
    }
    for (index, cluster) in disk.chunks_mut(CLUSTER).enumerate() {
        let entry = number(l2 + 8 * index);
        assert_eq!(entry >> 62 & 1, 0, "nothing here writes compressed clusters");
        let at = place(entry);
        // Bit 0: zeros, wherever it leads.
        if at == 0 || entry & 1 == 1 {
            continue;
        }
        assert!(used.insert(at), "two clusters are at {at:#x}");
        let len = cluster.len();
        cluster.copy_from_slice(&image[at..at + len]);
    }
    disk
}
