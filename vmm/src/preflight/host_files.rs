// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The files by which a kernel tells about its host.
//!
//! Owns reading them, within bounds. Must never write, and never take a file that cannot be read for more than unknown.

use std::fs::{self, File};
use std::io::Read as _;
#[cfg(test)]
use std::path::Path;
use std::path::PathBuf;

use rustix::fs::Access;

use crate::machine::ahead::refusal;

/// Most bytes that are taken of a file; those read here have some thousands at most.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// `/proc`, `/sys` and `/dev` of a host.
#[derive(Clone, Debug)]
pub struct HostFiles {
    root: PathBuf,
}

impl HostFiles {
    /// Those of this host.
    pub fn real() -> Self {
        Self { root: "/".into() }
    }

    /// Those in a folder.
    #[cfg(test)]
    pub fn at(root: &Path) -> Self {
        Self { root: root.to_owned() }
    }

    /// Where a file is.
    pub fn path(&self, absolute: &str) -> PathBuf {
        self.root.join(absolute.trim_start_matches('/'))
    }

    /// The text of a file, without space around it.
    pub fn text(&self, absolute: &str) -> Option<String> {
        let mut bytes = Vec::new();
        let file = File::open(self.path(absolute)).ok()?;
        file.take(FILE_BYTES_MAX).read_to_end(&mut bytes).ok()?;
        Some(String::from_utf8_lossy(&bytes).trim().to_owned())
    }

    /// A number that is all of a file.
    pub fn number(&self, absolute: &str) -> Option<u64> {
        self.text(absolute)?.parse().ok()
    }

    /// Whether there is such a file or folder.
    pub fn exists(&self, absolute: &str) -> bool {
        self.path(absolute).exists()
    }

    /// Names in a folder, sorted; none if it cannot be read.
    pub fn names(&self, absolute: &str) -> Vec<String> {
        let entries = fs::read_dir(self.path(absolute)).into_iter().flatten().flatten();
        let mut names: Vec<_> =
            entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
        names.sort();
        names
    }

    /// Error number with which a device node cannot be used; `None` if it can.
    pub fn refusal(&self, absolute: &str) -> Option<i32> {
        refusal(&self.path(absolute), Access::READ_OK | Access::WRITE_OK)
    }
}
