// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The kinds of zone memory, by their mapping: shared or private, with or without a file.
//!
//! Owns only their names. What follows from a kind is decided where memory is mapped, discarded or examined.

/// What kind of memory a zone is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ZoneKind {
    /// A memfd, hugetlb memfd or file, mapped `MAP_SHARED`: has a file to share and an alias.
    Shared,
    /// Private anonymous memory: neither.
    PrivateAnonymous,
    /// A file that held data before, mapped `MAP_PRIVATE`: the guest's writes stay in memory.
    PrivateFile,
}
