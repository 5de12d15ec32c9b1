// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The saved state of an IOMMU: its domains with their mappings, and which endpoints are in them.
//!
//! A saved state is untrusted: it is restored by the requests that a driver would make, with their checks.

use serde::{Deserialize, Serialize};

use super::domains::{IommuHandle, Pending, SavedDomain, Wait};
use super::request::{Request, Status};
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
    /// First and last address, address of guest memory, flags.
    mappings: Vec<(u64, u64, u64, u32)>,
}

pub(super) fn save(handle: &IommuHandle) -> DeviceSnapshot {
    let domains = handle.domains.lock();
    let (saved, members) = domains.saved();
    let state = |SavedDomain { number, bypass, mappings }: SavedDomain| DomainState {
        number,
        bypass,
        endpoints: members.iter().filter(|(_, of)| *of == number).map(|(it, _)| *it).collect(),
        mappings: mappings
            .into_iter()
            .map(|(first, mapping)| (first, mapping.last, mapping.gpa, mapping.access))
            .collect(),
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
        let map = |(first, last, gpa, flags)| Request::Map { domain, first, last, gpa, flags };
        let requests = endpoints.iter().map(attach).chain(mappings.into_iter().map(map));
        for request in requests {
            let (status, _) = domains.perform(request);
            if status != Status::Ok {
                domains.clear();
                let why = format!("{request:x?} is refused, with status {}", status.code());
                return Err(StateError::Invalid { kind: FORMAT.kind, why });
            }
        }
    }
    // What it waited for had ended when the devices were paused.
    domains.pending = unanswered.map(|head| Pending { head, wait: Wait::default() });
    Ok(())
}
