// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Domains and endpoints of an IOMMU.
//!
//! Owns which endpoint is in which domain, the limits on what a driver can have, and what each request does. A domain
//! exists while an endpoint is in it, so there are no more of them than devices. A change is made at once; the request
//! that made it may have to wait for what is in flight ([`Wait`]), which the thread of the IOMMU does.

use std::collections::BTreeMap;
use std::io;
use std::ops::RangeInclusive;
use std::sync::Arc;

use parking_lot::{Mutex, RwLock};

use super::endpoint::{Endpoint, Notices, Space};
use super::request::{MSI_FIRST, MSI_LAST, Request, Status};
use super::table::{Mapping, READ, Table, TableError, WRITE};

/// Mappings of all domains together that any guest may have, and the most that there may be. A mapping takes some 50
/// bytes of the host and 38 of a saved state, which is sent while the guest stands still.
pub(super) const MAPPINGS_RANGE: RangeInclusive<usize> = 1 << 17..=1 << 20;
/// Largest number of a domain.
pub(super) const DOMAIN_MAX: u32 = 0xffff;
/// Size of the smallest page.
pub(super) const PAGE_BYTES: u64 = 4096;

/// What has to end before a request is answered.
#[derive(Clone, Debug, Default)]
pub(super) struct Wait {
    endpoints: Vec<Arc<Endpoint>>,
    first: u64,
    last: u64,
}

impl Wait {
    /// Whether there is still something in flight.
    pub(super) fn is_due(&self) -> bool {
        self.endpoints.iter().any(|endpoint| endpoint.is_in_flight(self.first, self.last))
    }
}

/// A request that was carried out and waits for its answer.
#[derive(Clone, Debug)]
pub(super) struct Pending {
    /// The chain that it came in.
    pub(super) head: u16,
    pub(super) wait: Wait,
}

struct Member {
    endpoint: Arc<Endpoint>,
    domain: Option<u32>,
}

struct Domain {
    /// None in a domain without translation.
    table: Option<Arc<RwLock<Table>>>,
}

/// A domain as it is saved.
pub(super) struct SavedDomain {
    pub(super) number: u32,
    pub(super) bypass: bool,
    pub(super) mappings: Vec<(u64, Mapping)>,
}

/// All that requests change.
pub(super) struct Domains {
    endpoints: BTreeMap<u32, Member>,
    by_number: BTreeMap<u32, Domain>,
    mappings: usize,
    mappings_max: usize,
    /// Whether a driver was told that there are too many.
    was_full: bool,
    /// Whether endpoints without a domain reach all of guest memory.
    bypass: bool,
    /// The last address that can be mapped.
    last_address: u64,
    pub(super) pending: Option<Pending>,
}

impl Domains {
    fn outside(&self) -> Space {
        if self.bypass { Space::Bypass } else { Space::Nothing }
    }

    pub(super) fn bypass(&self) -> bool {
        self.bypass
    }

    pub(super) fn last_address(&self) -> u64 {
        self.last_address
    }

    #[cfg(test)]
    pub(super) fn mappings_max(&self) -> usize {
        self.mappings_max
    }

    /// Changes what endpoints without a domain reach.
    pub(super) fn set_bypass(&mut self, bypass: bool) {
        self.bypass = bypass;
        let outside = self.outside();
        for member in self.endpoints.values().filter(|member| member.domain.is_none()) {
            member.endpoint.set_space(outside.clone());
        }
    }

    /// Drops all domains, as a reset of the IOMMU does.
    pub(super) fn clear(&mut self) {
        self.pending = None;
        self.by_number.clear();
        self.mappings = 0;
        let outside = self.outside();
        for member in self.endpoints.values_mut().filter(|member| member.domain.is_some()) {
            member.domain = None;
            member.endpoint.set_space(outside.clone());
        }
    }

    /// Carries out a request; returns how it ends, and what has to end before that is said.
    pub(super) fn perform(&mut self, request: Request) -> (Status, Wait) {
        let done = match request {
            Request::Attach { domain, endpoint, bypass } => self.attach(domain, endpoint, bypass),
            Request::Detach { domain, endpoint } => self.detach(domain, endpoint),
            Request::Map { domain, first, last, gpa, flags } => {
                let mapping = Mapping { last, gpa, access: flags };
                self.map(domain, first, mapping).map(|()| Wait::default())
            }
            Request::Unmap { domain, first, last } => self.unmap(domain, first, last),
            Request::Probe { endpoint } => {
                let member = self.endpoints.get(&endpoint).ok_or(Status::NoEntry);
                member.map(|_| Wait::default())
            }
        };
        match done {
            Ok(wait) => (Status::Ok, wait),
            Err(status) => (status, Wait::default()),
        }
    }

    fn attach(&mut self, domain: u32, endpoint: u32, bypass: bool) -> Result<Wait, Status> {
        if domain > DOMAIN_MAX {
            return Err(Status::Range);
        }
        let before = self.endpoints.get(&endpoint).ok_or(Status::NoEntry)?.domain;
        if self.by_number.get(&domain).is_some_and(|it| it.table.is_none() != bypass) {
            return Err(Status::Invalid);
        }
        if before == Some(domain) {
            return Ok(Wait::default());
        }
        let table = (!bypass).then(Arc::default);
        let domain_entry = self.by_number.entry(domain).or_insert(Domain { table });
        let space = domain_entry.table.clone().map_or(Space::Bypass, Space::Domain);
        let member = self.endpoints.get_mut(&endpoint).ok_or(Status::NoEntry)?;
        member.domain = Some(domain);
        member.endpoint.set_space(space);
        let endpoint = Arc::clone(&member.endpoint);
        if let Some(before) = before {
            self.drop_if_empty(before);
        }
        Ok(Wait { endpoints: vec![endpoint], first: 0, last: u64::MAX })
    }

    fn detach(&mut self, domain: u32, endpoint: u32) -> Result<Wait, Status> {
        let outside = self.outside();
        let member = self.endpoints.get_mut(&endpoint).ok_or(Status::NoEntry)?;
        if member.domain != Some(domain) {
            return Err(Status::Invalid);
        }
        member.domain = None;
        member.endpoint.set_space(outside);
        let endpoint = Arc::clone(&member.endpoint);
        self.drop_if_empty(domain);
        Ok(Wait { endpoints: vec![endpoint], first: 0, last: u64::MAX })
    }

    fn drop_if_empty(&mut self, number: u32) {
        if self.endpoints.values().any(|member| member.domain == Some(number)) {
            return;
        }
        if let Some(Domain { table: Some(table) }) = self.by_number.remove(&number) {
            self.mappings = self.mappings.saturating_sub(table.read().len());
        }
    }

    fn table(&self, domain: u32) -> Result<Arc<RwLock<Table>>, Status> {
        let domain = self.by_number.get(&domain).ok_or(Status::NoEntry)?;
        domain.table.clone().ok_or(Status::Invalid)
    }

    fn map(&mut self, domain: u32, first: u64, mapping: Mapping) -> Result<(), Status> {
        let table = self.table(domain)?;
        if mapping.access & !(READ | WRITE) != 0 {
            return Err(Status::Invalid);
        }
        let end = mapping.last.wrapping_add(1);
        let is_whole = [first, end, mapping.gpa].iter().all(|at| at.is_multiple_of(PAGE_BYTES));
        if !is_whole || mapping.last > self.last_address {
            return Err(Status::Range);
        }
        if first <= MSI_LAST && mapping.last >= MSI_FIRST {
            return Err(Status::Invalid);
        }
        if self.mappings >= self.mappings_max {
            if !std::mem::replace(&mut self.was_full, true) {
                let most = self.mappings_max;
                // Linux does not look at the answer, and learns of it by the access that then fails.
                log::warn!("the guest has {most} mappings in its IOMMU, further ones are refused");
            }
            return Err(Status::NoMemory);
        }
        table.write().map(first, mapping).map_err(|error| match error {
            TableError::Overlaps | TableError::Cuts => Status::Invalid,
            TableError::Impossible => Status::Range,
        })?;
        self.mappings = self.mappings.saturating_add(1);
        Ok(())
    }

    fn unmap(&mut self, domain: u32, first: u64, last: u64) -> Result<Wait, Status> {
        let table = self.table(domain)?;
        let gone = table.write().unmap(first, last).map_err(|_| Status::Range)?;
        self.mappings = self.mappings.saturating_sub(gone);
        let members = self.endpoints.values().filter(|member| member.domain == Some(domain));
        let endpoints: Vec<_> = members.map(|member| Arc::clone(&member.endpoint)).collect();
        for endpoint in &endpoints {
            endpoint.forget_kept();
        }
        Ok(Wait { endpoints, first, last })
    }

    /// The domains, and which endpoints are in them.
    pub(super) fn saved(&self) -> (Vec<SavedDomain>, Vec<(u32, u32)>) {
        let mappings = |it: &Domain| it.table.as_ref().map(|it| it.read().iter().collect());
        let saved = |(number, it): (&u32, &Domain)| SavedDomain {
            number: *number,
            bypass: it.table.is_none(),
            mappings: mappings(it).unwrap_or_default(),
        };
        let domains = self.by_number.iter().map(saved).collect();
        let members = self.endpoints.iter();
        (domains, members.filter_map(|(number, it)| Some((*number, it.domain?))).collect())
    }
}

/// An IOMMU, for the VMM while the transport owns the device.
#[derive(Clone)]
pub struct IommuHandle {
    pub(super) domains: Arc<Mutex<Domains>>,
    pub(super) notices: Arc<Notices>,
}

impl IommuHandle {
    /// An IOMMU of a guest with this much memory.
    pub(super) fn new(last_address: u64, memory_bytes: u64) -> io::Result<Self> {
        let pages = usize::try_from(memory_bytes / PAGE_BYTES).unwrap_or(usize::MAX);
        let domains = Domains {
            endpoints: BTreeMap::new(),
            by_number: BTreeMap::new(),
            mappings: 0,
            mappings_max: pages.clamp(*MAPPINGS_RANGE.start(), *MAPPINGS_RANGE.end()),
            was_full: false,
            // As in cloud-hypervisor: firmware reads its disk before any driver of the IOMMU runs.
            bypass: true,
            last_address,
            pending: None,
        };
        Ok(Self { domains: Arc::new(Mutex::new(domains)), notices: Arc::new(Notices::new()?) })
    }

    /// The view of a device that is to be behind the IOMMU, and reaches what one without a domain reaches until it is
    /// given to [`Self::add`].
    pub fn endpoint(&self) -> Arc<Endpoint> {
        let space = self.domains.lock().outside();
        Arc::new(Endpoint::new(space, Arc::clone(&self.notices)))
    }

    /// Makes a device known to the guest's driver under a number.
    pub fn add(&self, number: u32, endpoint: &Arc<Endpoint>) {
        endpoint.set_number(number);
        let mut domains = self.domains.lock();
        endpoint.set_space(domains.outside());
        let member = Member { endpoint: Arc::clone(endpoint), domain: None };
        domains.endpoints.insert(number, member);
    }

    /// Forgets a device that is gone.
    pub fn remove(&self, number: u32) {
        let mut domains = self.domains.lock();
        if let Some(Member { domain: Some(domain), .. }) = domains.endpoints.remove(&number) {
            domains.drop_if_empty(domain);
        }
    }
}
