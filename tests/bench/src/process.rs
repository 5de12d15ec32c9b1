// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A VMM's memory other than guest RAM, and guest RAM as a file, from `/proc`.
//!
//! Owns the parsing of `smaps`. Must never populate a page.

use std::fs::{self, File};
use std::io;
use std::path::PathBuf;

use crate::pair::float;

/// Resident memory without guest RAM, in KiB.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Resident {
    /// All of it.
    pub total_kib: u64,
    /// The anonymous part.
    pub anonymous_kib: u64,
}

/// Sums up all mappings except memfds, which hold guest RAM.
pub fn resident(pid: u32) -> io::Result<Resident> {
    Ok(sum(&fs::read_to_string(format!("/proc/{pid}/smaps"))?))
}

fn sum(smaps: &str) -> Resident {
    let mut sum = Resident::default();
    let mut counted = true;
    for line in smaps.lines() {
        let mut words = line.split_ascii_whitespace();
        let Some(first) = words.next() else { continue };
        let value = || line.split_ascii_whitespace().nth(1)?.parse::<u64>().ok();
        match first {
            "Rss:" if counted => sum.total_kib += value().unwrap_or(0),
            "Anonymous:" if counted => sum.anonymous_kib += value().unwrap_or(0),
            // A header: addresses, permissions, offset, device, inode, path.
            range if !range.ends_with(':') && range.contains('-') => {
                counted = !line.contains("/memfd:");
            }
            _ => {}
        }
    }
    sum
}

/// The part of the largest mapping of a memfd that huge entries map, 0 to 1; 0 without such a mapping.
pub fn huge_part(smaps: &str) -> f64 {
    // Resident and huge, in KiB; those of hugetlb are not counted as resident.
    let mut mappings: Vec<(u64, u64)> = Vec::new();
    let mut is_memfd = false;
    for line in smaps.lines() {
        let mut words = line.split_ascii_whitespace();
        let Some(first) = words.next() else { continue };
        let value = || line.split_ascii_whitespace().nth(1)?.parse::<u64>().ok();
        if !first.ends_with(':') && first.contains('-') {
            is_memfd = line.contains("/memfd:");
            mappings.push((0, 0));
        }
        let (true, Some((resident, huge))) = (is_memfd, mappings.last_mut()) else { continue };
        match first {
            "Rss:" => *resident += value().unwrap_or(0),
            "ShmemPmdMapped:" | "FilePmdMapped:" => *huge += value().unwrap_or(0),
            "Shared_Hugetlb:" | "Private_Hugetlb:" => {
                *resident += value().unwrap_or(0);
                *huge += value().unwrap_or(0);
            }
            _ => {}
        }
    }
    let largest = mappings.into_iter().max().unwrap_or_default();
    if largest.0 == 0 { 0.0 } else { float(largest.1) / float(largest.0) }
}

/// The memfd of guest RAM that a process has open; `None` before it exists.
pub fn guest_ram(pid: u32) -> Option<File> {
    for entry in fs::read_dir(format!("/proc/{pid}/fd")).ok()? {
        let path: PathBuf = entry.ok()?.path();
        let target = fs::read_link(&path).ok()?.to_string_lossy().into_owned();
        let is_ram = ["/memfd:ram-", "/memfd:memory-backend-memfd", "/memfd:ch_ram"]
            .iter()
            .any(|name| target.starts_with(name));
        if is_ram {
            return File::open(path).ok();
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMAPS: &str = "\
00400000-00500000 r-xp 00000000 08:01 12 /usr/bin/vmm
Size:               1024 kB
Rss:                 800 kB
Anonymous:             4 kB
VmFlags: rd ex mr mw me
7f0000000000-7f0040000000 rw-s 00000000 00:01 99 /memfd:ram-0 (deleted)
Rss:              900000 kB
Anonymous:             0 kB
7f1000000000-7f1000100000 rw-p 00000000 00:00 0
Rss:                 100 kB
Anonymous:           100 kB
";

    #[test]
    fn the_largest_mapping_says_how_much_is_huge() {
        let memfd =
            |kinds: &str| format!("7f00-7f10 rw-s 0 00:01 99 /memfd:ram-0 (deleted)\n{kinds}");
        let thp = memfd("Rss: 900 kB\nShmemPmdMapped: 450 kB\nFilePmdMapped: 0 kB\n");
        let other = "7f10-7f20 rw-p 0 00:00 0\nRss: 5000 kB\nFilePmdMapped: 5000 kB\n";
        let small = memfd("Rss: 800 kB\nShmemPmdMapped: 0 kB\n");
        assert!((huge_part(&format!("{thp}{other}{small}")) - 0.5).abs() < 1e-9);
        assert!((huge_part(&memfd("Rss: 0 kB\nShared_Hugetlb: 64 kB\n")) - 1.0).abs() < 1e-9);
        assert!(huge_part(other).abs() < 1e-9);
    }

    #[test]
    fn guest_ram_is_left_out() {
        assert_eq!(sum(SMAPS), Resident { total_kib: 900, anonymous_kib: 104 });
    }
}
