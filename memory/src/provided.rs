// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Files that back zones of guest RAM instead of new ones: memory of another VMM, and of the pool.
//!
//! Owns for which zone a file is, and the lease of the pool's. Whether a file suits its zone is decided where the
//! zone's backing is made.

use std::fs::File;
use std::sync::Arc;

use crate::backing::ProvidedContent;
use crate::lease::Lease;

/// A file that backs a zone instead of a new one.
#[derive(Debug, Clone)]
pub struct ProvidedFile {
    /// ID of the zone.
    zone: String,
    file: Arc<File>,
    /// For memory of the pool, which is populated and zero: it returns to the pool when this is dropped.
    lease: Option<Lease>,
}

impl ProvidedFile {
    /// A file with any contents, such as memory that another VMM hands over.
    pub fn file(zone: &str, file: Arc<File>) -> Self {
        Self { zone: zone.to_owned(), file, lease: None }
    }

    /// Populated and zeroed memory of the pool; the lease is kept for as long as the zone exists.
    pub fn prezeroed(zone: &str, file: Arc<File>, lease: Lease) -> Self {
        Self { zone: zone.to_owned(), file, lease: Some(lease) }
    }

    /// ID of the zone that it is for.
    pub fn zone(&self) -> &str {
        &self.zone
    }

    /// True for memory of the pool.
    pub fn is_prezeroed(&self) -> bool {
        self.lease.is_some()
    }

    pub(crate) fn shared_file(&self) -> Arc<File> {
        Arc::clone(&self.file)
    }

    pub(crate) fn lease(&self) -> Option<Lease> {
        self.lease.clone()
    }

    pub(crate) fn content(&self) -> ProvidedContent {
        if self.is_prezeroed() {
            ProvidedContent::PopulatedZeroes
        } else {
            ProvidedContent::Unknown
        }
    }
}
