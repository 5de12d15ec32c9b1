// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The saved state of a memory device: what the guest is to have, and which blocks it has.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::state::StateFormat;
use crate::virtio::{DeviceSnapshot, StateError};

const FORMAT: StateFormat = StateFormat { kind: "virtio-mem", newest: 1 };

/// Plain data, untrusted.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct MemState {
    /// Block size in bytes; a state with another one cannot be restored.
    block_bytes: u64,
    requested_bytes: u64,
    /// First block and number of blocks of each plugged range, ascending.
    plugged: Vec<(u64, u64)>,
}

pub(super) fn save(
    block_bytes: u64,
    requested_bytes: u64,
    usable: &[Range<u64>],
) -> DeviceSnapshot {
    let of = |run: &Range<u64>| (run.start / block_bytes, (run.end - run.start) / block_bytes);
    let plugged = usable.iter().map(of).collect();
    FORMAT.encode(&MemState { block_bytes, requested_bytes, plugged })
}

/// The requested size, and the plugged ranges in bytes of the region, validated against the region.
pub(super) fn check(
    snapshot: &DeviceSnapshot,
    block_bytes: u64,
    region_bytes: u64,
) -> Result<(u64, Vec<Range<u64>>), StateError> {
    let state: MemState = FORMAT.decode(snapshot)?;
    if state.block_bytes != block_bytes {
        return Err(FORMAT.invalid(format!(
            "blocks have {} bytes there and {block_bytes} here",
            state.block_bytes
        )));
    }
    let requested_bytes = state.requested_bytes;
    if requested_bytes > region_bytes || !requested_bytes.is_multiple_of(block_bytes) {
        return Err(FORMAT.invalid(format!(
            "the guest is to have {requested_bytes} bytes of {region_bytes}, in blocks of \
             {block_bytes}"
        )));
    }
    let mut usable: Vec<Range<u64>> = Vec::new();
    for (first, count) in state.plugged {
        let run = || {
            let start = first.checked_mul(block_bytes)?;
            let end = first.checked_add(count)?.checked_mul(block_bytes)?;
            let after = usable.last().map_or(0, |last| last.end);
            (start >= after && start < end && end <= region_bytes).then_some(start..end)
        };
        let Some(run) = run() else {
            return Err(FORMAT.invalid(format!("{count} blocks from {first} on do not fit")));
        };
        usable.push(run);
    }
    Ok((requested_bytes, usable))
}
