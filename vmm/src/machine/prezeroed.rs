// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Zones whose memory comes from a pool of prezeroed memory.
//!
//! Owns which zone asks which pool for what, and what is reported when it gets nothing. Must never fail
//! a VM: without the pool its memory is allocated here, as without the option.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use memory::{Backing, HugePageSize, Lease, ProvidedFile, ZoneSpec};
use prezero_pool_client::{PagesWanted, PoolConnection, PoolError, PoolMemory, Take};

use crate::events;

/// The kind of pages to request from a pool for this zone.
pub fn pages(zone: &ZoneSpec) -> PagesWanted {
    match zone.backing {
        // The usual default is 2 MiB; if the host has another, the pool's memory does not fit and is not
        // used.
        Backing::Hugetlb { page_size: HugePageSize::HostDefault | HugePageSize::Mib2 } => {
            PagesWanted::Huge2Mib
        }
        Backing::Hugetlb { page_size: HugePageSize::Gib1 } => PagesWanted::Huge1Gib,
        _ if zone.thp => PagesWanted::Transparent,
        _ => PagesWanted::Small,
    }
}

/// Connections by socket; `None` for one that could not be reached or has not answered, which is not tried
/// again. Such a connection is closed with that, unless memory came over it before: what the pool grants too late
/// goes back.
#[derive(Default)]
struct Pools<'a>(BTreeMap<&'a Path, Option<Arc<PoolConnection>>>);

impl<'a> Pools<'a> {
    fn at(&mut self, socket: &'a Path) -> Result<Option<Arc<PoolConnection>>, PoolError> {
        if let Some(known) = self.0.get(socket) {
            return Ok(known.clone());
        }
        let opened = PoolConnection::open(socket).map(Arc::new);
        self.0.insert(socket, opened.as_ref().ok().cloned());
        opened.map(Some)
    }

    /// Memory from the pool at `socket`, with its connection; `None` if the pool has failed before.
    fn take(
        &mut self,
        socket: &'a Path,
        request: &Take,
    ) -> Result<Option<(Arc<PoolConnection>, PoolMemory)>, PoolError> {
        let Some(pool) = self.at(socket)? else { return Ok(None) };
        match pool.take(request) {
            Ok(memory) => Ok(Some((pool, memory))),
            Err(refused @ PoolError::Refused { .. }) => Err(refused),
            Err(error) => {
                self.0.insert(socket, None);
                Err(error)
            }
        }
    }
}

/// Logs why a zone does not use prezeroed memory.
pub fn warn(zone: &str, error: &dyn std::error::Error) {
    let why = error_text::chain(error);
    log::warn!(
        "memory zone '{zone}' does without prezeroed memory and is zeroed when it is used: {why}"
    );
    events::emit("vm", "prezeroed-unavailable", &[("zone", zone), ("error", &why)]);
}

/// Takes memory for the zones that name a pool. `pool`: a connection to one of them, over which a slot with a device was
/// asked for: its memory is given over no other. Failures are logged, and the zone left out.
pub fn take(
    zones: &[(&ZoneSpec, Option<&Path>)],
    pool: Option<&Arc<PoolConnection>>,
) -> Vec<ProvidedFile> {
    let mut pools = Pools::default();
    pools.0.extend(pool.map(|pool| (pool.path(), Some(Arc::clone(pool)))));
    let mut all = Vec::new();
    for (zone, socket) in zones {
        let Some(socket) = socket else { continue };
        let request =
            Take { size_bytes: zone.size_bytes, pages: pages(zone), node: zone.host_numa_node };
        match pools.take(socket, &request) {
            Ok(Some((pool, memory))) => {
                let size = memory.size_bytes.to_string();
                let properties =
                    [("zone", zone.id.as_str()), ("bytes", &size), ("pages", memory.pages.name())];
                events::emit("vm", "prezeroed-taken", &properties);
                all.push(ProvidedFile::prezeroed(
                    &zone.id,
                    Arc::new(memory.file),
                    Lease::new(pool),
                ));
            }
            // Logged for an earlier zone.
            Ok(None) => {}
            Err(error) => warn(&zone.id, &error),
        }
    }
    all
}
