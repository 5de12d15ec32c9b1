// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! `baseline=` of `--cpus`: the features that several hosts have in common, to which those of a guest are limited.
//!
//! Owns the family, its text in a file, and the limits of both. It must never know a feature, which `arch::cpuid` does, nor
//! the host's.

use std::fs::OpenOptions;
use std::io::{self, Read as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use arch::cpuid::{Baseline, UnknownPart};
use kvm_bindings::kvm_cpuid_entry2;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use thiserror::Error;
use utoipa::openapi::RefOr;
use utoipa::openapi::schema::{ObjectBuilder, Schema, Type};

use super::codec::{JsonOnly, ValueCodec};
use super::family::option_family;
use super::value::FieldValue;

/// The longest file.
const FILE_BYTES_MAX: u64 = 64 << 10;
/// The most leaves, and the most MSRs. There are fewer registers that mean features.
const ROWS_MAX: usize = 64;

/// A number that is a hexadecimal string in JSON, as JSON's own numbers have fewer than 64 bits in many programs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Hex(pub u64);

impl FromStr for Hex {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let digits =
            text.strip_prefix("0x").filter(|digits| digits.bytes().all(|b| b.is_ascii_hexdigit()));
        let number = digits.and_then(|digits| u64::from_str_radix(digits, 16).ok());
        number.map(Self).ok_or_else(|| format!("'{text}' is not a number of 64 bits like 0x1f"))
    }
}

impl Serialize for Hex {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&format_args!("{:#x}", self.0))
    }
}

impl<'de> Deserialize<'de> for Hex {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

impl FieldValue for Hex {
    fn schema() -> RefOr<Schema> {
        ObjectBuilder::new().schema_type(Type::String).pattern(Some("^0x[0-9a-fA-F]{1,16}$")).into()
    }

    fn type_name() -> String {
        "hexadecimal string".to_owned()
    }
}

option_family! {
    /// Registers of a CPUID leaf that mean features. Those that are absent are zero.
    CpuidRegisters "cpuid" {
        /// The leaf.
        leaf: Hex = Hex(0), "" as JsonOnly, required_json();
        /// Its subleaf.
        subleaf: Hex = Hex(0), "" as JsonOnly;
        /// The register.
        eax: Hex = Hex(0), "" as JsonOnly;
        /// The register.
        ebx: Hex = Hex(0), "" as JsonOnly;
        /// The register.
        ecx: Hex = Hex(0), "" as JsonOnly;
        /// The register.
        edx: Hex = Hex(0), "" as JsonOnly;
    }
}

option_family! {
    /// A model-specific register that means features.
    FeatureMsr "msr" {
        /// Its number.
        index: Hex = Hex(0), "" as JsonOnly, required_json();
        /// Its value.
        value: Hex = Hex(0), "" as JsonOnly, required_json();
    }
}

option_family! {
    /// Features that several hosts have in common. The guest is shown no others, and the VM does not start where one is
    /// missing.
    CpuBaseline "baseline" {
        /// File with the others of these fields, read when the VM boots. The configuration has what it said from then on.
        file: Option<PathBuf> = None, "" as JsonOnly;
        /// Registers of CPUID.
        cpuid: Vec<CpuidRegisters> = Vec::new(), "" as JsonOnly;
        /// Model-specific registers.
        msrs: Vec<FeatureMsr> = Vec::new(), "" as JsonOnly;
    }
}

/// A baseline cannot be used.
#[derive(Debug, Error)]
pub enum BaselineError {
    /// The file cannot be read.
    #[error("cannot read the CPU baseline {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// The file is not one.
    #[error("{} is no CPU baseline; `cloud-hypervisor --cpu-baseline` writes one", path.display())]
    Text {
        /// The file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: serde_json::Error,
    },
    /// A file that names a file.
    #[error("the CPU baseline {} names another file", path.display())]
    Nested {
        /// The file.
        path: PathBuf,
    },
    /// What is written is wrong.
    #[error(transparent)]
    Contents(#[from] BaselineContentsError),
}

/// What a baseline says cannot be used.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum BaselineContentsError {
    /// Both forms at once, or none.
    #[error("cpus.baseline has either 'file', or 'cpuid' and 'msrs'")]
    Form,
    /// More than there can be.
    #[error("the CPU baseline has {rows} {what}, and {ROWS_MAX} at most are possible")]
    Rows {
        /// Of what.
        what: &'static str,
        /// How many.
        rows: usize,
    },
    /// A number that does not fit its register.
    #[error("the CPU baseline has {value:#x} in 32 bits")]
    Wide {
        /// The number.
        value: u64,
    },
    /// Something that this version does not know.
    #[error("the CPU baseline cannot be kept")]
    Unknown(#[from] UnknownPart),
}

impl CpuBaseline {
    /// The text form of one that was made.
    pub fn of(baseline: &Baseline) -> Self {
        let row = |entry: &kvm_cpuid_entry2| CpuidRegisters {
            leaf: Hex(entry.function.into()),
            subleaf: Hex(entry.index.into()),
            eax: Hex(entry.eax.into()),
            ebx: Hex(entry.ebx.into()),
            ecx: Hex(entry.ecx.into()),
            edx: Hex(entry.edx.into()),
        };
        let msr = |(index, value): &(u32, u64)| FeatureMsr {
            index: Hex((*index).into()),
            value: Hex(*value),
        };
        Self {
            file: None,
            cpuid: baseline.entries().iter().map(row).collect(),
            msrs: baseline.msrs().iter().map(msr).collect(),
        }
    }

    /// Checks what can be checked without the file.
    ///
    /// # Errors
    /// Names what is wrong.
    pub fn validate(&self) -> Result<(), BaselineContentsError> {
        match (&self.file, self.cpuid.is_empty() && self.msrs.is_empty()) {
            (Some(_), true) => Ok(()),
            (None, false) => self.to_baseline().map(drop),
            _ => Err(BaselineContentsError::Form),
        }
    }

    /// Puts what the file says in place of its name, if there is one.
    ///
    /// # Errors
    /// The file cannot be read, or is no baseline.
    pub fn load(&mut self) -> Result<(), BaselineError> {
        let Some(path) = self.file.take() else { return Ok(()) };
        *self = Self::read(&path)?;
        Ok(())
    }

    /// What a file says.
    fn read(path: &Path) -> Result<Self, BaselineError> {
        let failed = |source| BaselineError::Read { path: path.to_owned(), source };
        // A pipe without a writer would block.
        let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path);
        let file = file.map_err(failed)?;
        if !file.metadata().map_err(failed)?.is_file() {
            return Err(failed(io::Error::other("it is no regular file")));
        }
        let mut text = Vec::new();
        let length = file.take(FILE_BYTES_MAX + 1).read_to_end(&mut text);
        if length.map_err(failed)? as u64 > FILE_BYTES_MAX {
            let why = format!("it has more than {} KiB", FILE_BYTES_MAX >> 10);
            return Err(failed(io::Error::other(why)));
        }
        let read: Self = serde_json::from_slice(&text)
            .map_err(|source| BaselineError::Text { path: path.to_owned(), source })?;
        if read.file.is_some() {
            return Err(BaselineError::Nested { path: path.to_owned() });
        }
        read.validate()?;
        Ok(read)
    }

    /// The baseline that is written here; that of a file after [`Self::load`].
    ///
    /// # Errors
    /// Names what is wrong.
    pub fn to_baseline(&self) -> Result<Baseline, BaselineContentsError> {
        for (what, rows) in [("CPUID leaves", self.cpuid.len()), ("MSRs", self.msrs.len())] {
            if rows > ROWS_MAX {
                return Err(BaselineContentsError::Rows { what, rows });
            }
        }
        let narrow = |Hex(value): Hex| {
            u32::try_from(value).map_err(|_| BaselineContentsError::Wide { value })
        };
        let mut entries = Vec::new();
        for row in &self.cpuid {
            entries.push(kvm_cpuid_entry2 {
                function: narrow(row.leaf)?,
                index: narrow(row.subleaf)?,
                eax: narrow(row.eax)?,
                ebx: narrow(row.ebx)?,
                ecx: narrow(row.ecx)?,
                edx: narrow(row.edx)?,
                ..Default::default()
            });
        }
        let mut msrs = Vec::new();
        for row in &self.msrs {
            msrs.push((narrow(row.index)?, row.value.0));
        }
        Ok(Baseline::from_parts(entries, msrs)?)
    }
}

/// The path of a file with a baseline.
#[derive(Debug)]
pub struct BaselineFile;

impl ValueCodec<CpuBaseline> for BaselineFile {
    const SYNTAX: &'static str = "<file>";

    fn parse(raw: &str) -> Result<CpuBaseline, String> {
        if raw.is_empty() {
            return Err("expected the path of a file".to_owned());
        }
        Ok(CpuBaseline { file: Some(raw.into()), ..CpuBaseline::default() })
    }

    fn print(value: &CpuBaseline) -> String {
        // What a file has said has no form in an option.
        value.file.as_deref().map_or_else(String::new, |path| path.display().to_string())
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test that cannot unwrap has failed")]

    use serde_json::json;

    use super::*;
    use crate::config::cpus::CpusConfig;

    fn text() -> serde_json::Value {
        json!({
            "cpuid": [
                {"leaf": "0x0", "eax": "0x10", "ebx": "0x68747541", "ecx": "0x444d4163", "edx": "0x69746e65"},
                {"leaf": "0x7", "ebx": "0x20"},
                {"leaf": "0x80000001", "edx": "0x20000000"},
                {"leaf": "0x80000008", "eax": "0x2e"},
            ],
            "msrs": [{"index": "0x10a", "value": "0x4000000000000001"}],
        })
    }

    fn read(value: serde_json::Value) -> Result<Baseline, String> {
        let written: CpuBaseline =
            serde_json::from_value(value).map_err(|error| error.to_string())?;
        written.validate().map_err(|error| error_text::chain(&error))?;
        written.to_baseline().map_err(|error| error_text::chain(&error))
    }

    #[test]
    fn what_is_written_is_read() {
        let baseline = read(text()).unwrap();
        assert_eq!(baseline.maker(), "AuthenticAMD");
        assert_eq!(baseline.msrs(), [(0x10a, 1 << 62 | 1)]);
        let again = serde_json::to_value(CpuBaseline::of(&baseline)).unwrap();
        assert_eq!(read(again).unwrap(), baseline);
    }

    #[test]
    fn what_is_none_is_refused_by_name() {
        let with = |pointer: &str, value: serde_json::Value| {
            let mut text = text();
            *text.pointer_mut(pointer).unwrap() = value;
            read(text).unwrap_err()
        };
        for (pointer, value, why) in [
            ("/cpuid/0/eax", json!(16), "expected a string"),
            ("/cpuid/0/eax", json!("16"), "'16' is not a number"),
            ("/cpuid/0/eax", json!("0x"), "'0x' is not a number"),
            ("/cpuid/0/eax", json!("0x+1"), "is not a number"),
            ("/cpuid/0/eax", json!("0x100000000"), "0x100000000 in 32 bits"),
            ("/cpuid/1/leaf", json!("0x4"), "leaf 0x4.0x0"),
            ("/cpuid/1/leaf", json!("0x0"), "leaf 0x0.0x0 twice"),
            ("/cpuid/1", json!({"leaf": "0x7", "eax": "0x1"}), "leaf 0x7.0x0"),
            ("/cpuid/1", json!({"leaf": "0x7", "efx": "0x1"}), "efx"),
            ("/cpuid/2/edx", json!("0x0"), "64-bit mode"),
            ("/cpuid/3/eax", json!("0x1f"), "physical address bits"),
            ("/cpuid/0", json!({"leaf": "0x6"}), "maker"),
            ("/msrs/0/index", json!("0x10"), "MSR 0x10"),
            (
                "/msrs",
                json!([{"index": "0x10a", "value": "0x1"}, {"index": "0x10a", "value": "0x1"}]),
                "MSR 0x10a twice",
            ),
            ("/msrs", json!([{"index": "0x10a"}]), "value"),
            ("/cpuid", json!(vec![json!({"leaf": "0x7"}); 65]), "65 CPUID leaves"),
        ] {
            let error = with(pointer, value);
            assert!(error.contains(why), "{pointer}: {error}");
        }
        assert!(read(json!({})).unwrap_err().contains("either 'file'"));
        assert!(
            read(json!({"file": "/f", "msrs": text()["msrs"]}))
                .unwrap_err()
                .contains("either 'file'")
        );
    }

    #[test]
    fn a_file_is_read_once_and_within_limits() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("pool.json");
        let load = |content: &[u8]| {
            std::fs::write(&path, content).unwrap();
            let mut cpus =
                CpusConfig::parse_cpus(&format!("boot=1,baseline={}", path.display())).unwrap();
            cpus.validate().unwrap();
            let baseline = cpus.baseline.as_mut().unwrap();
            baseline.load().map_err(|error| error_text::chain(&error))?;
            baseline.load().unwrap();
            Ok::<_, String>(baseline.clone())
        };
        let loaded = load(text().to_string().as_bytes()).unwrap();
        assert_eq!((loaded.file.as_ref(), loaded.cpuid.len()), (None, 4));
        let long = vec![b' '; 70 << 10];
        for (content, why) in [
            (&b""[..], "is no CPU baseline"),
            (b"{\"file\": \"/etc/passwd\"}", "names another file"),
            (b"{}", "either 'file'"),
            (long.as_slice(), "more than 64 KiB"),
        ] {
            let error = load(content).unwrap_err();
            assert!(error.contains(why), "{error}");
        }
        let mut gone =
            CpuBaseline { file: Some(folder.path().join("none")), ..CpuBaseline::default() };
        assert!(gone.load().unwrap_err().to_string().contains("none"));
        let config = json!({"payload": {"kernel": "/k"}, "cpus": {"boot_vcpus": 1, "max_vcpus": 1, "baseline": {"file": "/f"}}});
        let config: crate::config::VmConfig = serde_json::from_value(config).unwrap();
        config.clone().complete().unwrap();
        let error = config.complete_begun().unwrap_err().to_string();
        assert!(error.contains("names the file /f"), "{error}");
        let amx = CpusConfig::parse_cpus("boot=1,baseline=/f,features=[amx]").unwrap();
        assert!(amx.validate().unwrap_err().to_string().contains("AMX"));
        let without = CpusConfig::parse_cpus("boot=1,baseline=").unwrap();
        assert_eq!(without.baseline, None);
    }
}
