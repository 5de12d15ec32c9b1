// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The message that comes before the state in a migration: configuration, CPUID, memory.

use json_bound::Budget;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::error::DocumentError;
use crate::lists::List;
use crate::memory::MemoryManager;
use crate::text::{parse, print};
use crate::vm::{CPUID_ENTRIES_MAX, CpuidEntry};

/// Name of the message in paths.
const PATH: &str = "config";
/// Maximum length in bytes, and maximum number of values.
const BYTES_MAX: usize = 16 << 20;
const VALUES_MAX: usize = 512 << 10;

/// The message.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ConfigMessage {
    /// Configuration of the VM, in the form of cloud-hypervisor's API. Not interpreted here.
    pub vm_config: Value,
    /// What the source's host would show any VM of this configuration.
    pub common_cpuid: List<CpuidEntry, CPUID_ENTRIES_MAX>,
    /// Where RAM is. Its `memory_ranges` mean nothing here.
    pub memory_manager_data: MemoryManager,
}

impl ConfigMessage {
    /// Reads a message from untrusted bytes.
    ///
    /// # Errors
    /// Names the field.
    pub fn read(bytes: &[u8]) -> Result<Self, DocumentError> {
        let text = text_within(PATH, bytes, BYTES_MAX)?;
        let read: Self = parse(PATH, text, &mut Budget::new(VALUES_MAX))?;
        match read.memory_manager_data.problem() {
            Some(problem) => Err(DocumentError::OutOfBounds {
                path: format!("{PATH}/memory_manager_data"),
                problem,
            }),
            None => Ok(read),
        }
    }

    /// Reads the configuration of a snapshot, which is a document of its own.
    ///
    /// # Errors
    /// The bytes are no JSON, or too many.
    pub fn read_vm_config(bytes: &[u8]) -> Result<Value, DocumentError> {
        let text = text_within(PATH, bytes, BYTES_MAX)?;
        parse(PATH, text, &mut Budget::new(VALUES_MAX))
    }

    /// Writes the message.
    ///
    /// # Errors
    /// It cannot be written as JSON.
    pub fn write(&self) -> Result<Vec<u8>, DocumentError> {
        print(PATH, self).map(String::into_bytes)
    }
}

/// The bytes as text, if they are one and not too long.
pub(crate) fn text_within<'a>(
    path: &str,
    bytes: &'a [u8],
    max_bytes: usize,
) -> Result<&'a str, DocumentError> {
    if bytes.len() > max_bytes {
        return Err(DocumentError::TooLong { len_bytes: bytes.len(), max_bytes });
    }
    std::str::from_utf8(bytes).map_err(|error| DocumentError::Malformed {
        path: path.to_owned(),
        problem: format!("no text after {} bytes", error.valid_up_to()),
    })
}
