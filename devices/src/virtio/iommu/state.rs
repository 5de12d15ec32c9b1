// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The saved state of an IOMMU: its domains with their mappings, and which endpoints are in them.
//!
//! A saved state is untrusted: it is restored by the requests that a driver would make, with their checks.

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use serde::{Deserialize, Serialize};

use super::domains::{IommuHandle, Pending, SavedDomain, Wait};
use super::request::{Request, Status};
use super::table::Mapping;
use crate::state::StateFormat;
use crate::virtio::{DeviceSnapshot, StateError};

const FORMAT: StateFormat = StateFormat { kind: "virtio-iommu", newest: 1 };

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct IommuState {
    /// Whether endpoints without a domain reach all of guest memory.
    bypass: bool,
    domains: Vec<DomainState>,
    /// The chain of a request that was carried out and is not answered.
    unanswered: Option<u16>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct DomainState {
    number: u32,
    bypass: bool,
    endpoints: Vec<u32>,
    /// A text of records, as there may be a million; see [`record`].
    mappings: String,
}

/// First and last address, address of guest memory, flags; the lowest byte first.
const RECORD_LEN_BYTES: usize = 28;

fn record((first, mapping): (u64, Mapping)) -> [u8; RECORD_LEN_BYTES] {
    let Mapping { last, gpa, access } = mapping;
    let numbers = [first, last, gpa].into_iter().flat_map(u64::to_le_bytes);
    let mut record = [0; RECORD_LEN_BYTES];
    let bytes = numbers.chain(access.to_le_bytes());
    record.iter_mut().zip(bytes).for_each(|(to, from)| *to = from);
    record
}

/// The requests that make the mappings of a domain, if the text is one of whole records.
fn requests(domain: u32, mappings: &str) -> Option<Vec<Request>> {
    let bytes = BASE64_STANDARD.decode(mappings).ok()?;
    let (records, []) = bytes.as_chunks::<RECORD_LEN_BYTES>() else { return None };
    let request = |record: &[u8; RECORD_LEN_BYTES]| {
        let number = |at: usize| {
            let bytes = record.get(at..at.saturating_add(8))?;
            Some(u64::from_le_bytes(bytes.try_into().ok()?))
        };
        let flags = u32::from_le_bytes(*record.last_chunk()?);
        Some(Request::Map { domain, first: number(0)?, last: number(8)?, gpa: number(16)?, flags })
    };
    records.iter().map(request).collect()
}

pub(super) fn save(handle: &IommuHandle) -> DeviceSnapshot {
    let domains = handle.domains.lock();
    let (saved, members) = domains.saved();
    let state = |SavedDomain { number, bypass, mappings }: SavedDomain| DomainState {
        number,
        bypass,
        endpoints: members.iter().filter(|(_, of)| *of == number).map(|(it, _)| *it).collect(),
        mappings: BASE64_STANDARD
            .encode(mappings.into_iter().map(record).collect::<Vec<_>>().as_flattened()),
    };
    FORMAT.encode(&IommuState {
        bypass: domains.bypass(),
        domains: saved.into_iter().map(state).collect(),
        unanswered: domains.pending.as_ref().map(|pending| pending.head),
    })
}

/// Restores a state; on error there are no domains.
pub(super) fn restore(snapshot: &DeviceSnapshot, handle: &IommuHandle) -> Result<(), StateError> {
    let IommuState { bypass, domains: saved, unanswered } = FORMAT.decode(snapshot)?;
    let mut domains = handle.domains.lock();
    domains.clear();
    domains.set_bypass(bypass);
    for DomainState { number: domain, bypass, endpoints, mappings } in saved {
        let attach = |endpoint: &u32| Request::Attach { domain, endpoint: *endpoint, bypass };
        let invalid = |why| StateError::Invalid { kind: FORMAT.kind, why };
        let Some(maps) = requests(domain, &mappings) else {
            domains.clear();
            return Err(invalid(format!("the mappings of domain {domain} are cut")));
        };
        for request in endpoints.iter().map(attach).chain(maps) {
            let (status, _) = domains.perform(request);
            if status != Status::Ok {
                domains.clear();
                let why = format!("{request:x?} is refused, with status {}", status.code());
                return Err(invalid(why));
            }
        }
    }
    // What it waited for had ended when the devices were paused.
    domains.pending = unanswered.map(|head| Pending { head, wait: Wait::default() });
    Ok(())
}
