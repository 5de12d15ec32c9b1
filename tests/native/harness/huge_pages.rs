// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Huge pages of 2 MiB that a test borrows from the host's pool, and returns.
//!
//! Owns the number of pages while it has them: a lock keeps other runs of these tests away, and a
//! file says what there was before, for the next one if this one is killed.

use std::fs::{self, File, OpenOptions};
use std::io::{Read as _, Seek as _, Write as _};
use std::time::{Duration, Instant};

const POOL: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages";
/// For other runs to give theirs back.
const LOCK_TIME: Duration = Duration::from_mins(1);

/// What the pool held before, and the lock.
pub struct HugePages {
    before: u64,
    in_use_before: u64,
    lock: File,
}

impl HugePages {
    fn now() -> u64 {
        fs::read_to_string(POOL).unwrap_or_default().trim().parse().unwrap_or(0)
    }

    /// So many more; the test is SKIPPED where the host gives none.
    pub fn borrow(pages: u64) -> Self {
        Self::try_borrow(pages)
            .unwrap_or_else(|| super::skip(format!("the host gives no {pages} pages of 2 MiB")))
    }

    /// So many more, if the host gives them.
    pub fn try_borrow(pages: u64) -> Option<Self> {
        let mut lock = Self::lock()?;
        let mut text = String::new();
        let _ = lock.read_to_string(&mut text);
        if let Ok(before) = text.trim().parse::<u64>() {
            // Whose it was has been killed.
            let _ = fs::write(POOL, before.to_string());
        }
        let mut borrowed = Self { before: Self::now(), in_use_before: Self::in_use(), lock };
        borrowed.note(&borrowed.before.to_string());
        let _ = fs::write(POOL, (borrowed.before + pages).to_string());
        (Self::now() >= borrowed.before + pages).then_some(borrowed)
    }

    /// How many more are in use than before they were borrowed, once no process has them that is ending.
    pub fn taken(&self) -> u64 {
        let start = Instant::now();
        loop {
            let taken = Self::in_use().saturating_sub(self.in_use_before);
            if taken == 0 || start.elapsed() > super::PATIENCE {
                return taken;
            }
            std::thread::sleep(super::POLL);
        }
    }

    fn in_use() -> u64 {
        let free = POOL.replace("nr_", "free_");
        let free: u64 = fs::read_to_string(free).unwrap_or_default().trim().parse().unwrap_or(0);
        Self::now().saturating_sub(free)
    }

    fn lock() -> Option<File> {
        let path = std::env::temp_dir().join("godwit-huge-pages.lock");
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(path)
            .ok()?;
        let start = Instant::now();
        while file.try_lock().is_err() {
            if start.elapsed() > LOCK_TIME {
                return None;
            }
            std::thread::sleep(super::POLL);
        }
        Some(file)
    }

    fn note(&mut self, text: &str) {
        let _ = self.lock.set_len(0);
        let _ = self.lock.rewind();
        let _ = self.lock.write_all(text.as_bytes());
    }
}

impl Drop for HugePages {
    fn drop(&mut self) {
        let _ = fs::write(POOL, self.before.to_string());
        self.note("");
    }
}
