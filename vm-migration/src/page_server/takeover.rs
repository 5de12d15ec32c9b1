// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The documents that a page server gets: the memory that it serves, and how it continues with the migration.
//!
//! Owns the two documents and their checks. The sender is a process of the same program, and its numbers are
//! checked like a peer's: each becomes an address, a page or a time here, or an error.

use std::collections::BTreeMap;
use std::fmt;
use std::os::fd::BorrowedFd;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::error::Cause;
use crate::layout::{Backing, Layout, PAGE_BYTES, RegionInfo};
use crate::options::{CONNECTIONS_MAX, Limits, SendOptions, URGENT_CONNECTIONS_MAX};
use crate::protocol::ProtocolError;
use crate::protocol::capabilities::TOKEN_BYTES;
use crate::ram::GuestMemoryMap;
use crate::transport::tls::PemFiles;
use crate::transport::{Address, ClientTls};

/// Version of both documents. An update of the program does not matter: the page server is the same
/// executable as its VMM.
const VERSION: u32 = 1;

/// Longest time in milliseconds that a limit may have.
const TIME_MS_MAX: u64 = 366 * 24 * 3600 * 1000;

/// A region and where its pages are.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ServedRegion {
    /// The region.
    pub region: RegionInfo,
    /// Index of its file, in the order in which the files are sent.
    pub file: u32,
    /// Where the region begins in the file.
    pub file_offset: u64,
}

/// The memory of a page server.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ServedMemory {
    version: u32,
    /// Number of files that follow.
    pub(super) files: u32,
    pub(super) regions: Vec<ServedRegion>,
}

/// The parameters with which a page server continues the migration.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TakeoverRequest {
    version: u32,
    /// Address of the destination.
    to: String,
    /// The token that proves that this is the same migration. Never logged.
    pub(crate) id: [u8; TOKEN_BYTES],
    /// Number of the page server's first attempt to connect.
    pub(crate) attempt: u32,
    pub(crate) bulk: u16,
    pub(crate) urgent: u16,
    bandwidth_bytes_per_s: u64,
    recover_timeout_ms: u64,
    connect_timeout_ms: u64,
    stall_timeout_ms: u64,
    /// Certificates and key of the source, if its connections use TLS. Never logged.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    tls: Option<PemFiles>,
    /// By region: pages of 4 KiB that are sent together, and that the destination makes visible together.
    pub(crate) units: Vec<(u64, u64)>,
}

impl fmt::Debug for TakeoverRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TakeoverRequest").field("to", &self.to).finish_non_exhaustive()
    }
}

const MEMORY: &str = "description of memory";
const TAKEOVER: &str = "takeover request of a page server";

fn wrong(what: &'static str, why: &'static str) -> ProtocolError {
    ProtocolError::Malformed { what, why }
}

fn read<'a, T: Deserialize<'a>>(what: &'static str, json: &'a [u8]) -> Result<T, ProtocolError> {
    serde_json::from_slice(json).map_err(|source| ProtocolError::Json { what, source })
}

fn same_version(what: &'static str, version: u32) -> Result<(), ProtocolError> {
    if version == VERSION { Ok(()) } else { Err(wrong(what, "it is of another version")) }
}

impl ServedMemory {
    /// Describes memory, and returns its files in their order.
    ///
    /// # Errors
    /// When some of the memory has no file.
    pub fn of<M: GuestMemoryMap>(memory: &M) -> Result<(Self, Vec<BorrowedFd<'_>>), Cause> {
        let (mut files, mut numbers) = (Vec::new(), BTreeMap::new());
        let mut regions = Vec::new();
        for (index, info) in memory.layout().regions().iter().enumerate() {
            let Some(file) = memory.file(index) else {
                let what = format!(
                    "a page server cannot have memory zone '{}', which is private memory",
                    info.name
                );
                let remedy = "boot the VM with shared=on or hugepages=on, or leave page_server out";
                return Err(Cause::Unsupported { what, remedy });
            };
            // Regions with the same name are parts of the same file.
            let number = *numbers.entry(info.name.as_str()).or_insert_with(|| {
                files.push(file);
                u32::try_from(files.len() - 1).unwrap_or(u32::MAX)
            });
            let file_offset = memory.file_offset(index);
            regions.push(ServedRegion { region: info.clone(), file: number, file_offset });
        }
        let count = u32::try_from(files.len()).unwrap_or(u32::MAX);
        Ok((Self { version: VERSION, files: count, regions }, files))
    }

    /// Parses a description.
    ///
    /// # Errors
    /// When the JSON is not a description of memory.
    pub fn parse(json: &[u8]) -> Result<Self, ProtocolError> {
        let memory: Self = read(MEMORY, json)?;
        memory.check()?;
        Ok(memory)
    }

    pub(super) fn to_json(&self) -> Vec<u8> {
        // It has no map and no float: serialising cannot fail.
        serde_json::to_vec(self).unwrap_or_default()
    }

    fn check(&self) -> Result<(), ProtocolError> {
        same_version(MEMORY, self.version)?;
        self.layout()?;
        if self.files as usize > self.regions.len() {
            return Err(wrong(MEMORY, "it has more files than regions"));
        }
        for ServedRegion { region, file, file_offset } in &self.regions {
            if region.backing != Backing::Shared {
                return Err(wrong(MEMORY, "some of it is private"));
            }
            if *file >= self.files {
                return Err(wrong(MEMORY, "it names a file that does not come"));
            }
            let end = file_offset.checked_add(region.len_bytes);
            if !file_offset.is_multiple_of(region.host_page_bytes)
                || end.is_none_or(|end| i64::try_from(end).is_err())
            {
                return Err(wrong(MEMORY, "a region is at an impossible place of its file"));
            }
        }
        Ok(())
    }

    /// The layout of the regions.
    ///
    /// # Errors
    /// When the regions do not form a valid layout.
    pub fn layout(&self) -> Result<Layout, ProtocolError> {
        Ok(Layout::new(self.regions.iter().map(|served| served.region.clone()).collect())?)
    }

    /// The regions, by ascending address.
    pub fn regions(&self) -> &[ServedRegion] {
        &self.regions
    }
}

/// Parameters of a takeover request in addition to [`SendOptions`].
pub(crate) struct Terms {
    pub id: [u8; TOKEN_BYTES],
    pub attempt: u32,
    pub bulk: u16,
    pub urgent: u16,
    pub units: Vec<(u64, u64)>,
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX).min(TIME_MS_MAX)
}

impl TakeoverRequest {
    pub(crate) fn new(
        (to, tls): (&Address, Option<&ClientTls>),
        limits: &Limits,
        recover_timeout: Duration,
        bandwidth_bytes_per_s: u64,
        terms: Terms,
    ) -> Self {
        let Terms { id, attempt, bulk, urgent, units } = terms;
        Self {
            version: VERSION,
            to: to.to_string(),
            id,
            attempt,
            bulk,
            urgent,
            bandwidth_bytes_per_s,
            recover_timeout_ms: millis(recover_timeout),
            connect_timeout_ms: millis(limits.connect),
            stall_timeout_ms: millis(limits.stall),
            tls: tls.map(|tls| tls.files().clone()),
            units,
        }
    }

    /// Parses a request for memory with this layout.
    ///
    /// # Errors
    /// When the JSON is not a takeover request, or is for other memory.
    pub fn parse(json: &[u8], layout: &Layout) -> Result<Self, ProtocolError> {
        let takeover: Self = read(TAKEOVER, json)?;
        takeover.check(layout)?;
        Ok(takeover)
    }

    pub(super) fn to_json(&self) -> Vec<u8> {
        // As above.
        serde_json::to_vec(self).unwrap_or_default()
    }

    fn address(&self) -> Result<Address, ProtocolError> {
        self.to.parse().map_err(|_| wrong(TAKEOVER, "its address is none"))
    }

    fn tls(&self) -> Result<Option<ClientTls>, ProtocolError> {
        let tls = self.tls.clone().map(ClientTls::new).transpose();
        tls.map_err(|_| wrong(TAKEOVER, "its certificates cannot be used"))
    }

    fn check(&self, layout: &Layout) -> Result<(), ProtocolError> {
        same_version(TAKEOVER, self.version)?;
        self.address()?;
        self.tls()?;
        if !(1..=CONNECTIONS_MAX).contains(&self.bulk) || self.urgent > URGENT_CONNECTIONS_MAX {
            return Err(wrong(TAKEOVER, "its numbers of connections make no sense"));
        }
        // Later attempts continue the count from it.
        if self.attempt == 0 || self.attempt > u32::MAX / 2 {
            return Err(wrong(TAKEOVER, "its number of an attempt makes no sense"));
        }
        let times = [self.connect_timeout_ms, self.stall_timeout_ms];
        if times.contains(&0) || times.iter().any(|ms| *ms > TIME_MS_MAX) {
            return Err(wrong(TAKEOVER, "its limits in time make no sense"));
        }
        if self.recover_timeout_ms > TIME_MS_MAX {
            return Err(wrong(TAKEOVER, "its limits in time make no sense"));
        }
        if self.units.len() != layout.regions().len() {
            return Err(wrong(TAKEOVER, "it is for other memory"));
        }
        for ((piece, unit), region) in self.units.iter().zip(layout.regions()) {
            let fits = *piece > 0
                && *unit > 0
                && unit.is_multiple_of(*piece)
                && region.pages().is_multiple_of(*unit)
                && *unit <= region.pages()
                && *piece <= (1 << 30) / PAGE_BYTES;
            if !fits {
                return Err(wrong(TAKEOVER, "its pages do not fit the memory"));
            }
        }
        Ok(())
    }

    /// The sender's options that the request contains.
    ///
    /// # Errors
    /// When the address is invalid, which [`parse`](Self::parse) has ruled out.
    pub(crate) fn options(&self) -> Result<SendOptions, ProtocolError> {
        let limits = Limits {
            connect: Duration::from_millis(self.connect_timeout_ms),
            stall: Duration::from_millis(self.stall_timeout_ms),
            ..Limits::default()
        };
        Ok(SendOptions {
            bandwidth_bytes_per_s: self.bandwidth_bytes_per_s,
            recover_timeout: Duration::from_millis(self.recover_timeout_ms),
            limits,
            tls: self.tls()?,
            ..SendOptions::new(self.address()?)
        })
    }
}
