// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The manifest: the file that makes a directory a snapshot.
//!
//! A JSON document with two members: the snapshot, and the CRC-32C of exactly its bytes. The format and its
//! version are read first, so that a later version is reported as such even if all other members have
//! changed. Owns the format of the manifest; the other files are checked elsewhere.

use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::error::SnapshotError;
use super::geometry::{CHUNK_PAGES, Geometry};
use crate::layout::{Layout, PAGE_BYTES};

/// The format version that is written, and the newest that is read.
pub const FORMAT_VERSION: u32 = 1;

/// Longest manifest: 4,096 regions at 200 bytes, doubled.
pub(crate) const MANIFEST_BYTES_MAX: u64 = 2 << 20;

const FORMAT: &str = "godwit-snapshot";

/// Length and checksum of a file that is verified as a whole.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Sealed {
    /// Its length.
    pub len_bytes: u64,
    /// CRC-32C of its bytes.
    pub crc32c: u32,
}

impl Sealed {
    /// The length and checksum of these bytes.
    pub(crate) fn of(bytes: &[u8]) -> Self {
        Self { len_bytes: bytes.len() as u64, crc32c: crc32c::crc32c(bytes) }
    }
}

/// One region of RAM in the memory file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SavedRegion {
    /// Name of the zone, for messages.
    pub name: String,
    /// First guest physical address.
    pub gpa: u64,
    /// Length in guest RAM and in the file.
    pub len_bytes: u64,
    /// Offset in the file.
    pub offset_bytes: u64,
}

/// The manifest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Manifest {
    pub format: String,
    pub version: u32,
    /// Name and version of the program, for messages.
    pub program: String,
    /// Time of creation in seconds since 1970, for messages.
    pub created_s: u64,
    pub config: Sealed,
    pub state: Sealed,
    pub index: Sealed,
    /// Length of the memory file; its contents are verified by the index.
    pub memory_len_bytes: u64,
    pub chunk_bytes: u64,
    pub regions: Vec<SavedRegion>,
}

/// The fields that every version of the manifest has.
#[derive(Deserialize)]
struct Identity {
    format: String,
    version: u32,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Envelope<'a> {
    crc32c: u32,
    #[serde(borrow)]
    snapshot: &'a RawValue,
}

impl Manifest {
    /// A manifest of these parts.
    pub(crate) fn new(
        config: Sealed,
        state: Sealed,
        index: Sealed,
        layout: &Layout,
        geometry: &Geometry,
    ) -> Self {
        let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        let regions = layout.regions().iter().zip(geometry.regions());
        Self {
            format: FORMAT.to_owned(),
            version: FORMAT_VERSION,
            program: concat!("godwit ", env!("CARGO_PKG_VERSION")).to_owned(),
            created_s: since.unwrap_or_default().as_secs(),
            config,
            state,
            index,
            memory_len_bytes: geometry.len_bytes(),
            chunk_bytes: CHUNK_PAGES * PAGE_BYTES,
            regions: regions
                .map(|(region, place)| SavedRegion {
                    name: region.name.clone(),
                    gpa: region.gpa,
                    len_bytes: region.len_bytes,
                    offset_bytes: place.offset_bytes,
                })
                .collect(),
        }
    }

    /// Encodes the manifest.
    pub(crate) fn encode(&self) -> Result<Vec<u8>, serde_json::Error> {
        let snapshot = RawValue::from_string(serde_json::to_string_pretty(self)?)?;
        let crc32c = crc32c::crc32c(snapshot.get().as_bytes());
        let mut bytes = serde_json::to_vec(&Envelope { crc32c, snapshot: &snapshot })?;
        bytes.push(b'\n');
        Ok(bytes)
    }

    /// Decodes a manifest; `path` is for errors.
    pub(crate) fn decode(bytes: &[u8], path: &Path) -> Result<Self, SnapshotError> {
        let malformed = |why: String| SnapshotError::Malformed { path: path.to_owned(), why };
        let envelope: Envelope<'_> =
            serde_json::from_slice(bytes).map_err(|error| malformed(error.to_string()))?;
        let text = envelope.snapshot.get();
        let identity: Identity =
            serde_json::from_str(text).map_err(|_| SnapshotError::Foreign(path.to_owned()))?;
        if identity.format != FORMAT {
            return Err(SnapshotError::Foreign(path.to_owned()));
        }
        if identity.version > FORMAT_VERSION {
            let (found, known) = (identity.version, FORMAT_VERSION);
            return Err(SnapshotError::Newer { path: path.to_owned(), found, known });
        }
        if crc32c::crc32c(text.as_bytes()) != envelope.crc32c {
            let part = "its contents".to_owned();
            return Err(SnapshotError::Damaged { path: path.to_owned(), part });
        }
        let manifest: Self =
            serde_json::from_str(text).map_err(|error| malformed(error.to_string()))?;
        if manifest.version == 0 || manifest.chunk_bytes != CHUNK_PAGES * PAGE_BYTES {
            return Err(malformed("its version or chunk size never existed".to_owned()));
        }
        Ok(manifest)
    }

    /// True when the saved regions match this machine's.
    pub(crate) fn fits(&self, layout: &Layout, geometry: &Geometry) -> bool {
        let saved = self.regions.iter().map(|r| (r.gpa, r.len_bytes, r.offset_bytes));
        let here = layout.regions().iter().zip(geometry.regions());
        let here = here.map(|(r, place)| (r.gpa, r.len_bytes, place.offset_bytes));
        self.memory_len_bytes == geometry.len_bytes() && saved.eq(here)
    }

    /// The saved regions as text.
    pub(crate) fn regions_in_words(&self) -> String {
        let words = self.regions.iter().take(8).map(|r| format!("{:#x}+{:#x}", r.gpa, r.len_bytes));
        words.collect::<Vec<_>>().join(", ")
    }
}

/// Entry point of the fuzz target: decoding returns for any bytes, and what it accepts can be encoded and
/// decoded again.
#[cfg(any(test, feature = "testing"))]
pub fn fuzz_manifest(bytes: &[u8]) {
    let path = Path::new("manifest.json");
    if let Ok(manifest) = Manifest::decode(bytes, path)
        && let Ok(again) = manifest.encode()
    {
        assert!(Manifest::decode(&again, path).is_ok_and(|same| same == manifest));
    }
}
