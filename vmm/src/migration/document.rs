// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The document from which the destination builds the machine: its configuration, and what its
//! guest was told about the processor.
//!
//! Owns its form. A document of the first form, the configuration alone, is read as well: its processor
//! is then unknown, and the check happens only when the vCPUs are restored.

use hypervisor::CpuidEntry;
use hypervisor::MsrValue;
use serde::Deserialize;
use vm_migration::protocol::formats::Formats;

use crate::config::VmConfig;
use crate::config::value::FieldValue as _;
use crate::json_bound::{self, CONFIG_VALUES_MAX, TooManyValues};
use crate::machine::MACHINE_STATE_VERSION;

/// Newest version of the configuration and of this document that is read. Raised when the meaning of a
/// field or the value of a default changes; see docs/migration.md, "Versions and formats".
pub const CONFIG_VERSION: u32 = 1;

/// The formats that this program reads, in migrations and snapshots.
pub const KNOWN: Formats = Formats { config: CONFIG_VERSION, state: MACHINE_STATE_VERSION };

/// Maximum number of CPUID entries, which is KVM's own.
const CPUID_ENTRIES_MAX: usize = 256;
/// Maximum number of feature MSRs; several times as many as exist.
const FEATURE_MSRS_MAX: usize = 256;

/// Why a machine document is refused.
#[derive(Debug, thiserror::Error)]
pub enum DocumentError {
    /// The JSON is malformed.
    #[error("the configuration that the source sent cannot be read")]
    Json(#[from] serde_json::Error),
    /// More values than any configuration has.
    #[error("the configuration that the source sent cannot be used")]
    TooLarge(#[from] TooManyValues),
    /// More CPUID entries than KVM accepts.
    #[error("the source names {0} CPUID entries, at most {CPUID_ENTRIES_MAX} are possible")]
    Cpuid(usize),
    /// More feature MSRs than exist.
    #[error("the source names {0} feature registers, at most {FEATURE_MSRS_MAX} are possible")]
    FeatureMsrs(usize),
}

/// The configuration and processor features of a machine, for migrations and snapshots.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MachineDocument {
    /// The configuration.
    pub vm_config: VmConfig,
    /// CPUID that all vCPUs were shown when the guest booted.
    #[serde(default)]
    pub common_cpuid: Vec<CpuidEntry>,
    /// Feature MSRs that the guest sees. Programs before version 2 of the state neither send nor compare
    /// them.
    #[serde(default)]
    pub feature_msrs: Vec<MsrValue>,
}

/// The configuration in the form that is saved and sent: without fields that have their default.
///
/// # Errors
/// A value has no JSON form.
pub fn sparse_config(config: &VmConfig) -> Result<serde_json::Value, serde_json::Error> {
    config.sparse()
}

impl MachineDocument {
    /// Serialises the document, without fields that have their default.
    ///
    /// # Errors
    /// A value has no JSON form.
    pub fn to_json(&self) -> Result<Vec<u8>, serde_json::Error> {
        let mut document = serde_json::Map::new();
        document.insert("vm_config".to_owned(), sparse_config(&self.vm_config)?);
        if !self.common_cpuid.is_empty() {
            document.insert("common_cpuid".to_owned(), serde_json::to_value(&self.common_cpuid)?);
        }
        if !self.feature_msrs.is_empty() {
            document.insert("feature_msrs".to_owned(), serde_json::to_value(&self.feature_msrs)?);
        }
        serde_json::to_vec(&document)
    }

    /// Parses either form.
    ///
    /// # Errors
    /// Names the field that is wrong.
    pub fn read(json: &[u8]) -> Result<Self, DocumentError> {
        json_bound::check(json, CONFIG_VALUES_MAX)?;
        let value: serde_json::Value = serde_json::from_slice(json)?;
        let document = if value.get("vm_config").is_some() {
            serde_json::from_value(value)?
        } else {
            Self {
                vm_config: serde_json::from_value(value)?,
                common_cpuid: Vec::new(),
                feature_msrs: Vec::new(),
            }
        };
        match (document.common_cpuid.len(), document.feature_msrs.len()) {
            (0..=CPUID_ENTRIES_MAX, 0..=FEATURE_MSRS_MAX) => Ok(document),
            (0..=CPUID_ENTRIES_MAX, count) => Err(DocumentError::FeatureMsrs(count)),
            (count, _) => Err(DocumentError::Cpuid(count)),
        }
    }
}

/// Fuzzes the parser with bytes of a peer; an accepted document must survive a round trip.
#[cfg(any(test, feature = "testing"))]
pub fn fuzz_document(data: &[u8]) {
    if let Ok(document) = MachineDocument::read(data) {
        let json = document.to_json().unwrap_or_default();
        let again = MachineDocument::read(&json).map(|document| document.common_cpuid);
        assert_eq!(again.ok(), Some(document.common_cpuid));
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test that cannot unwrap has failed")]

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(
            text in "[{}\\[\\]\",:a-z_0-9 ]{0,80}",
            numbers in any::<[u32; 7]>(),
        ) {
            let [function, index, flags, answer @ ..] = numbers;
            let entry = CpuidEntry { function, index, flags, answer };
            let whole = MachineDocument { common_cpuid: vec![entry], ..document() };
            fuzz_document(&whole.to_json().unwrap());
            fuzz_document(text.as_bytes());
            let half = format!(r#"{{"vm_config":{{"payload":{{}}}},"common_cpuid":[{text}]}}"#);
            fuzz_document(half.as_bytes());
        }
    }

    fn entry(function: u32) -> CpuidEntry {
        CpuidEntry { function, index: 0, flags: 0, answer: [0, u32::MAX, 0, 0] }
    }

    fn document() -> MachineDocument {
        MachineDocument {
            vm_config: serde_json::from_str(r#"{"payload":{"kernel":"/k"}}"#).unwrap(),
            common_cpuid: vec![entry(7)],
            feature_msrs: vec![MsrValue { index: 0x345, value: 0x2000 }],
        }
    }

    #[test]
    fn what_is_written_is_read() {
        let json = document().to_json().unwrap();
        assert_eq!(MachineDocument::read(&json).unwrap(), document());
    }

    #[test]
    fn a_configuration_alone_is_read() {
        let json = serde_json::to_vec(&document().vm_config).unwrap();
        let read = MachineDocument::read(&json).unwrap();
        assert_eq!(
            read,
            MachineDocument { common_cpuid: Vec::new(), feature_msrs: Vec::new(), ..document() }
        );
    }

    #[test]
    fn lists_without_an_end_are_refused_before_they_are_made() {
        let zeros = vec!["0"; CONFIG_VALUES_MAX].join(",");
        let json = format!(r#"{{"vm_config":{{"payload":{{}},"disks":[{zeros}]}}}}"#);
        let error = MachineDocument::read(json.as_bytes()).unwrap_err();
        assert!(matches!(error, DocumentError::TooLarge(_)), "{error}");
    }

    #[test]
    fn what_is_no_document_is_refused() {
        for bad in ["", "[]", "{}", r#"{"vm_config":7}"#, r#"{"vm_config":{"payload":{},"x":1}}"#] {
            assert!(MachineDocument::read(bad.as_bytes()).is_err(), "{bad}");
        }
        let many = MachineDocument { common_cpuid: vec![entry(0); 257], ..document() };
        let error = MachineDocument::read(&many.to_json().unwrap()).unwrap_err();
        assert!(matches!(error, DocumentError::Cpuid(257)), "{error}");
    }
}

#[cfg(test)]
#[path = "formats_tests.rs"]
mod formats;
