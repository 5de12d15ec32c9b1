// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Huge pages of 2 MiB that a benchmark reserves; returned when dropped.

use std::fs;
use std::io;

const FILE: &str = "/proc/sys/vm/nr_hugepages";

/// Additional pages in the host's pool, returned on drop.
pub struct HugePages {
    before: u64,
}

impl HugePages {
    /// Adds `pages` to the pool.
    pub fn set_aside(pages: u64) -> io::Result<Self> {
        let borrowed = Self { before: read()? };
        fs::write(FILE, (borrowed.before + pages).to_string())?;
        let now = read()?;
        if now < borrowed.before + pages {
            let text = format!("the host gave {} of {pages} pages", now - borrowed.before.min(now));
            return Err(io::Error::other(text));
        }
        Ok(borrowed)
    }
}

fn read() -> io::Result<u64> {
    fs::read_to_string(FILE)?.trim().parse().map_err(io::Error::other)
}

impl Drop for HugePages {
    fn drop(&mut self) {
        let _ = fs::write(FILE, self.before.to_string());
    }
}
