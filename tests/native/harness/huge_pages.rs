// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Huge pages of 2 MiB that a test borrows from the host's pool, and gives back.

use std::fs;

const POOL: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages";

/// What the pool held before.
pub struct HugePages(u64);

impl HugePages {
    fn now() -> u64 {
        fs::read_to_string(POOL).unwrap_or_default().trim().parse().unwrap_or(0)
    }

    /// So many more; the test is SKIPPED where the host gives none.
    pub fn borrow(pages: u64) -> Self {
        let before = Self::now();
        let _ = fs::write(POOL, (before + pages).to_string());
        let borrowed = Self(before);
        if Self::now() < before + pages {
            drop(borrowed);
            super::skip(format!("the host gives no {pages} pages of 2 MiB"));
        }
        borrowed
    }
}

impl Drop for HugePages {
    fn drop(&mut self) {
        let _ = fs::write(POOL, self.0.to_string());
    }
}
