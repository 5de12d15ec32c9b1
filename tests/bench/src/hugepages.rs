// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Huge pages that a benchmark needs of the host: those of 2 MiB that it reserves, and transparent ones for shared
//! memory. What was set before is set again when dropped.

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

const SHARED_THP: &str = "/sys/kernel/mm/transparent_hugepage/shmem_enabled";

/// Transparent huge pages for shared memory that asks for them.
pub struct SharedThp {
    before: String,
}

impl SharedThp {
    /// Allows them where memory asks for them.
    pub fn advise() -> io::Result<Self> {
        let text = fs::read_to_string(SHARED_THP)?;
        // The choice that is set stands in brackets.
        let set = text.split_once('[').and_then(|(_, rest)| rest.split_once(']'));
        let (before, _) = set.ok_or_else(|| io::Error::other(format!("{SHARED_THP}: {text}")))?;
        fs::write(SHARED_THP, "advise")?;
        Ok(Self { before: before.to_owned() })
    }
}

impl Drop for SharedThp {
    fn drop(&mut self) {
        let _ = fs::write(SHARED_THP, &self.before);
    }
}
