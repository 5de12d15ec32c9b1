// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Empty qcow2 images for tests and as seeds of fuzz targets.

use super::header::Table;

/// What an image is made from.
#[derive(Clone, Debug)]
pub struct Sample {
    /// Bytes of a cluster, as a power of two.
    pub cluster_bits: u32,
    /// Size of the disk.
    pub size_bytes: u64,
    /// Version of the format.
    pub version: u32,
    /// Name and, if it is stated, format of the backing file.
    pub backing: Option<(String, Option<String>)>,
}

impl Default for Sample {
    fn default() -> Self {
        Self { cluster_bits: 16, size_bytes: 1 << 30, version: 3, backing: None }
    }
}

impl Sample {
    /// The bytes of the image: header, refcount table, one refcount block and the L1 table.
    ///
    /// # Panics
    /// One refcount block is too small for all that.
    pub fn image(&self) -> Vec<u8> {
        let cluster_bytes = 1_u64 << self.cluster_bits;
        let cluster = |number: u64| number * cluster_bytes;
        let reach_bytes = cluster_bytes / 8 * cluster_bytes;
        let l1 =
            Table { offset: cluster(3), entries: self.size_bytes.div_ceil(reach_bytes).max(1) };
        let clusters = 3 + l1.len_bytes().div_ceil(cluster_bytes);
        assert!(clusters <= cluster_bytes / 2, "one refcount block is too small");
        let len_bytes = usize::try_from(cluster(clusters)).unwrap_or(0);
        let mut image = Image(vec![0; len_bytes]);
        image.put(0, b"QFI\xfb");
        image.put(4, &self.version.to_be_bytes());
        image.put(20, &self.cluster_bits.to_be_bytes());
        image.put(24, &self.size_bytes.to_be_bytes());
        image.put(36, &u32::try_from(l1.entries).unwrap_or(0).to_be_bytes());
        image.put(40, &l1.offset.to_be_bytes());
        image.put(48, &cluster(1).to_be_bytes());
        image.put(56, &1_u32.to_be_bytes());
        let mut end = 72;
        if self.version == 3 {
            image.put(96, &4_u32.to_be_bytes());
            image.put(100, &104_u32.to_be_bytes());
            end = 104;
            if let Some((_, Some(format))) = &self.backing {
                image.put(end, &0xe279_2aca_u32.to_be_bytes());
                image.put(end + 4, &u32::try_from(format.len()).unwrap_or(0).to_be_bytes());
                image.put(end + 8, format.as_bytes());
                end += 8 + format.len().next_multiple_of(8);
            }
            end += 8;
        }
        if let Some((name, _)) = &self.backing {
            image.put(8, &u64::try_from(end).unwrap_or(0).to_be_bytes());
            image.put(16, &u32::try_from(name.len()).unwrap_or(0).to_be_bytes());
            image.put(end, name.as_bytes());
        }
        let at = |offset: u64| usize::try_from(offset).unwrap_or(usize::MAX);
        image.put(at(cluster(1)), &cluster(2).to_be_bytes());
        for number in 0..clusters {
            image.put(at(cluster(2) + 2 * number), &1_u16.to_be_bytes());
        }
        image.0
    }
}

struct Image(Vec<u8>);

impl Image {
    fn put(&mut self, at: usize, bytes: &[u8]) {
        for (to, from) in self.0.iter_mut().skip(at).zip(bytes) {
            *to = *from;
        }
    }
}
