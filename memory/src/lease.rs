// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A lease: an opaque value that is kept for as long as lent memory is in use.
//!
//! Owns a reference to what the lender wants kept, such as the connection to a pool, whose closing ends the lease. Must
//! never inspect it, so that this crate depends on no lender.

use std::any::Any;
use std::sync::Arc;

/// Keeps what must exist for as long as leased memory is in use. Dropping the last copy ends the lease.
#[derive(Debug, Clone)]
pub struct Lease {
    _kept: Arc<dyn Any + Send + Sync>,
}

impl Lease {
    /// A lease that keeps `kept`; several zones may share it.
    pub fn new(kept: Arc<dyn Any + Send + Sync>) -> Self {
        Self { _kept: kept }
    }
}
