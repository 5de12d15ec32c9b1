// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Images that lie.

use imago::StorageExt as _;

use super::*;
use crate::virtio::block::store::{Store, StoreFile};

fn changed(changes: &[(u64, &[u8])]) -> Vec<u8> {
    let mut image = small().image();
    for (at, bytes) in changes {
        let at = usize::try_from(*at).unwrap();
        image[at..at + bytes.len()].copy_from_slice(bytes);
    }
    image
}

#[track_caller]
fn refused(changes: &[(u64, &[u8])], why: &str) {
    let images = Images::new();
    let path = images.add("a", changed(changes));
    let refusal = refusal(open(&config(&path)));
    assert!(refusal.contains(why), "{refusal}");
}

#[test]
fn a_header_beyond_the_limits_is_refused() {
    for size_bytes in [u64::MAX, 1 << 56, 1 << 50] {
        refused(&[(24, &size_bytes.to_be_bytes())], "too large for its clusters");
    }
    for bits in [0_u32, 8, 22, 63, u32::MAX] {
        refused(&[(20, &bits.to_be_bytes())], "clusters have 2^");
    }
    refused(&[(36, &u32::MAX.to_be_bytes())], "L1 table has");
    refused(&[(36, &1_u32.to_be_bytes())], "L1 table has 1 entries");
    refused(&[(56, &u32::MAX.to_be_bytes())], "refcount table has");
    refused(&[(56, &0_u32.to_be_bytes())], "refcount table has 0");
    refused(&[(96, &7_u32.to_be_bytes())], "more than 64 bits");
    refused(&[(100, &u32::MAX.to_be_bytes())], "its header has");
    refused(&[(100, &72_u32.to_be_bytes())], "its header has");
    refused(&[(4, &1_u32.to_be_bytes())], "version 1");
    refused(&[(0, b"QED\0")], "not a qcow2 image");
}

#[test]
fn what_is_not_supported_is_named() {
    for (bit, name) in [
        (0, "not closed"),
        (1, "marked as such"),
        (2, "an external data file"),
        (3, "another compression"),
        (4, "subclusters"),
        (63, "0x8000000000000000"),
    ] {
        refused(&[(72, &(1_u64 << bit).to_be_bytes())], name);
    }
    refused(&[(32, &1_u32.to_be_bytes())], "encryption");
    refused(&[(32, &2_u32.to_be_bytes())], "encryption");
    refused(&[(100, &112_u32.to_be_bytes()), (104, &[1])], "another compression");
}

#[test]
fn extensions_that_lead_out_of_the_header_are_refused() {
    let extension = |kind: u32, len: u32| [kind.to_be_bytes(), len.to_be_bytes()].concat();
    refused(&[(104, &extension(1, u32::MAX))], "not in its first cluster");
    refused(&[(104, &extension(1, 4096 - 112))], "do not end");
    refused(&[(104, &extension(0x6803_f857, 1))], "feature names is cut off");
    refused(&[(104, &extension(0xe279_2aca, 4)), (112, &[0xff; 4])], "not one word");
    let name = |offset: u64, len: u32| [&offset.to_be_bytes()[..], &len.to_be_bytes()].concat();
    for (offset, len) in [(4090, 8), (u64::MAX, 8), (4096, 1), (200, 1024), (200, 0)] {
        refused(&[(8, &name(offset, len))], "name of its backing file");
    }
    refused(&[(8, &name(200, 4)), (200, &[0xff; 4])], "is not text");
    refused(&[(8, &name(200, 4)), (200, b"a\0bc")], "is not text");
}

#[test]
fn tables_outside_of_the_file_or_in_each_other_are_refused() {
    let at = |number: u64| (number * CLUSTER).to_be_bytes();
    // Refcount table 1, block 2, L1 table 3.
    let refcount_entry = |number: u64| (CLUSTER, at(number));
    for far in [4, 1 << 20, u64::MAX >> CLUSTER_BITS] {
        refused(&[(40, &at(far))], "its L1 table is at");
        refused(&[(48, &at(far))], "its refcount table is at");
        let (place, entry) = refcount_entry(far);
        refused(&[(place, &entry)], "its refcount block is at");
    }
    refused(&[(40, &(3 * CLUSTER + 512).to_be_bytes())], "its L1 table is at");
    refused(&[(40, &0_u64.to_be_bytes())], "L1 table is nowhere");
    refused(&[(48, &0_u64.to_be_bytes())], "refcount table is nowhere");
    // What is in the other table may be refused first.
    for (one, other) in [(40, 1), (40, 2), (48, 3), (48, 2)] {
        refused(&[(one, &at(other))], "is damaged");
    }
    for number in [1, 3] {
        let (place, entry) = refcount_entry(number);
        refused(&[(place, &entry)], "two of its tables");
    }
    // L2 tables: behind the end, twice, in the header, in another table, with reserved bits.
    let l1 = 3 * CLUSTER;
    refused(&[(l1, &at(4))], "its L2 table is at");
    refused(&[(l1, &at(2))], "two of its tables");
    refused(&[(l1, &(1_u64 << 62).to_be_bytes())], "its L1 table has the entry");
    refused(&[(2 * CLUSTER, &0_u16.to_be_bytes())], "its header counts as free");
    refused(&[(CLUSTER, &0_u64.to_be_bytes())], "its header counts as free");
}

/// A cluster of a table that counts as free would be allocated again, and the table overwritten.
#[test]
fn tables_that_count_as_free_are_refused_for_writing_only() {
    let images = Images::new();
    let l1_entry = ((1 << 63) | (4 * CLUSTER)).to_be_bytes();
    let one_more = |counts: [u16; 5]| {
        let counts: Vec<u8> = counts.iter().flat_map(|count| count.to_be_bytes()).collect();
        let image = changed(&[(3 * CLUSTER, &l1_entry), (2 * CLUSTER, &counts)]);
        let path = images.add("a", [image, vec![0; usize::try_from(CLUSTER).unwrap()]].concat());
        open(&BlockConfig { readonly: true, ..config(&path) }).unwrap().unlock().unwrap();
        unloaded(&config(&path)).unwrap().check_format().unwrap();
        open(&config(&path))
    };
    one_more([1; 5]).unwrap();
    for cluster in 1..5 {
        let mut counts = [1; 5];
        counts[cluster] = 0;
        let refusal = refusal(one_more(counts));
        let why = format!("its table at {:#x} counts as free", cluster << CLUSTER_BITS);
        assert!(refusal.contains(&why), "{refusal}");
    }
}

#[test]
fn data_outside_of_the_file_are_an_error() {
    let images = Images::new();
    let mut buffer = [0; 512];
    let end = 5 * CLUSTER;
    for (entry, is_there) in [
        ((1_u64 << 63) | (4 * CLUSTER), true),
        // Behind the end, by one cluster and by far; compressed; not where a cluster begins.
        (1 << 63 | end, false),
        (1 << 63 | 1 << 40, false),
        (1 << 62 | 1 << 40, false),
        (1 << 63 | 512, false),
    ] {
        let image = changed(&[(3 * CLUSTER, &((1 << 63) | (4 * CLUSTER)).to_be_bytes())]);
        let mut l2 = vec![0; usize::try_from(CLUSTER).unwrap()];
        l2[..8].copy_from_slice(&entry.to_be_bytes());
        let path = images.add("a", [image, l2].concat());
        let lock = open(&BlockConfig { readonly: true, ..config(&path) }).unwrap();
        let read = lock.disk.read_exact_at(&mut buffer, 0);
        assert_eq!(read.is_ok(), is_there, "{entry:#x}: {read:?}");
    }
}

#[test]
fn whatever_the_tables_say_the_header_stays() {
    let images = Images::new();
    let path = images.add("a", small().image());
    let disk = Disk::open_as(&config(&path)).unwrap();
    let store = Store::new(StoreFile::of(&disk), CLUSTER).with_header(48..60);
    let before = fs::read(&path).unwrap();
    for offset in [0, 8, 512, CLUSTER - 512] {
        store.write(&[1; 512][..], offset).unwrap_err();
        store.write_zeroes(offset, 512).unwrap_err();
        store.punch_hole(offset, 512).unwrap_err();
    }
    // What looks like the header has another backing file, size or table.
    for at in [8, 24, 36, 40, 47, 60, 72, 88, 300] {
        let mut header = before[..512].to_vec();
        header[at] ^= 1;
        store.write(&header, 0).unwrap_err();
    }
    assert!(fs::read(&path).unwrap() == before);
    let mut header = before[..512].to_vec();
    header[48..60].fill(1);
    store.write(&header, 0).unwrap();
    store.write(&[1; 512][..], CLUSTER).unwrap();
}

#[test]
fn an_image_that_is_cut_off_is_refused_or_read_as_far_as_it_goes() {
    let images = Images::new();
    let whole = small().image();
    for len in (0..whole.len()).step_by(97) {
        let path = images.add("a", &whole[..len]);
        // None of these may panic; which of them are refused says the test of the tables.
        if let Ok(lock) = open(&config(&path)) {
            let _ = lock.disk.write_all_at(&[1; 4096], 0);
            let _ = lock.write_back();
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn any_change_of_an_image_is_survived(
        changes in proptest::collection::vec((0..20_480_u64, any::<u64>()), 1..8),
        bits in proptest::collection::vec((0..20_480_u64, 0..8_u32), 0..8),
    ) {
        let images = Images::new();
        let path = images.add("a", small().image());
        {
            let lock = open(&config(&path)).unwrap();
            for offset in [0, 9000, 3 << 20] {
                lock.disk.write_all_at(&pattern(9216), offset / 512 * 512).unwrap();
            }
            lock.unlock().unwrap();
        }
        let mut image = fs::read(&path).unwrap();
        let len = image.len();
        for (at, number) in changes {
            let at = usize::try_from(at / 8 * 8).unwrap() % (len - 8);
            // Numbers that are offsets of clusters now and then.
            let number = if number % 2 == 0 { (number % 16) << CLUSTER_BITS | 1 << 63 } else { number };
            image[at..at + 8].copy_from_slice(&number.to_be_bytes());
        }
        for (at, bit) in bits {
            image[usize::try_from(at).unwrap() % len] ^= 1 << bit;
        }
        fs::write(&path, image).unwrap();
        let Ok(lock) = open(&config(&path)) else { return Ok(()) };
        let mut buffer = vec![0; 65536];
        let sectors = lock.disk.capacity_sectors();
        for offset in [0, 8192, 1 << 20, 3 << 20].into_iter().filter(|at| at / 512 + 128 <= sectors) {
            let _ = lock.disk.read_exact_at(&mut buffer, offset);
            let _ = lock.disk.write_all_at(&buffer, offset);
            let range = Range { offset, len_bytes: 16384, unmap: false };
            let _ = lock.disk.formatted().unwrap().discard(range);
            let _ = lock.disk.formatted().unwrap().write_zeroes(range, offset % 3 == 0);
        }
        let _ = lock.write_back();
        let _ = lock.unlock();
    }
}
