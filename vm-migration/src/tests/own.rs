// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Postcopy to machines whose vCPUs are refused missing pages, and resolve their own faults.

use super::moves::Case;
use super::{have_uffd, loopback, memory};
use crate::MemoryMode;
use crate::fault::FaultSourceKind;
use crate::progress::ProgressDocument;

fn postcopy(case: &Case, urgent_connections: u16) -> ProgressDocument {
    let (_, destination) = case.go(&loopback(), |options| {
        options.memory_mode = MemoryMode::Postcopy;
        options.urgent_connections = Some(urgent_connections);
        options.bandwidth_bytes_per_s = 32 << 20;
    });
    assert_eq!(destination.faults.source, Some(FaultSourceKind::Sigbus));
    assert_eq!(destination.remaining_bytes, Some(0));
    destination
}

#[test]
pub(super) fn a_guest_is_whole_that_brings_its_own_pages() {
    if !have_uffd() {
        return;
    }
    for (seed, urgent_connections) in [(1, 2), (2, 1), (3, 0), (4, 4)] {
        let case = Case::new(memory(), memory(), seed).own_faults();
        let faults = postcopy(&case, urgent_connections).faults;
        assert!(faults.requested > Some(0), "{faults:?}");
        let resolved = [faults.requested, faults.merged, faults.local].into_iter().flatten();
        assert!(faults.seen >= Some(resolved.sum()), "{faults:?}");
    }
}

#[test]
fn what_precopy_left_is_brought_by_who_needs_it() {
    if !have_uffd() {
        return;
    }
    let case = Case::new(memory(), memory(), 9).own_faults();
    let (_, destination) = case.go(&loopback(), |options| {
        options.memory_mode = MemoryMode::Auto;
        options.postcopy_after = Some(std::time::Duration::ZERO);
    });
    assert_eq!(destination.faults.source, Some(FaultSourceKind::Sigbus));
}
