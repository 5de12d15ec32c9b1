// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! `cloud-hypervisor --cpu-baseline`: the CPU features that several hosts have in common.
//!
//! Owns which files are read, and what is said of each host. What belongs to a baseline is decided in `arch::cpuid`. It
//! must never look at this host: its own report is a file like those of others.

use std::fmt::Write as _;
use std::fs::File;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use crate::config::cpu_baseline::{BaselineContentsError, CpuBaseline};
use arch::cpuid::{Baseline, NoBaseline};
use serde_json::Value;
use thiserror::Error;

/// The longest report; one has some tens of KiB.
const FILE_BYTES_MAX: u64 = 4 << 20;

/// Why there is no baseline.
#[derive(Debug, Error)]
pub enum CommonError {
    /// A file cannot be read.
    #[error("cannot read '{}'", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// A file is something else.
    #[error("'{}' is neither what `cloud-hypervisor --check=json` prints nor a CPU baseline", path.display())]
    Text {
        /// The file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: serde_json::Error,
    },
    /// A report of a host without KVM.
    #[error("'{}' is the report of a host that cannot use KVM, and says nothing of its vCPUs", path.display())]
    NoCpu {
        /// The file.
        path: PathBuf,
    },
    /// A baseline that cannot be used.
    #[error("'{}' cannot be used", path.display())]
    Contents {
        /// The file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: BaselineContentsError,
    },
    /// What they have in common cannot be written.
    #[error("the baseline has no form in JSON")]
    Written(#[source] serde_json::Error),
    /// Two hosts have nothing in common.
    #[error("'{}' and the hosts before it have no baseline", path.display())]
    Common {
        /// The file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: NoBaseline,
    },
}

/// What the hosts of these files have in common, as JSON, and a line for each of them that has more.
///
/// # Errors
/// Names the file.
pub fn common(paths: &[PathBuf]) -> Result<(String, String), CommonError> {
    let hosts = paths.iter().map(|path| Ok((path, read(path)?))).collect::<Result<Vec<_>, _>>()?;
    let mut pool: Option<Baseline> = None;
    for (path, host) in &hosts {
        let more = match &pool {
            None => host.common(host),
            Some(pool) => pool.common(host),
        };
        let failed = |source| CommonError::Common { path: (*path).clone(), source };
        pool = Some(more.map_err(failed)?);
    }
    let pool = pool.unwrap_or_default();
    let mut notes = String::new();
    for (path, host) in &hosts {
        if let Some(more) = host.beyond(&pool, true) {
            // Writing to a string does not fail.
            let _ = writeln!(notes, "{}: no guest will have {more}", path.display());
        }
    }
    let mut models = hosts.iter().map(|(_, host)| host.model());
    let first = models.next();
    if let (Some((path, _)), true) = (hosts.first(), models.any(|model| Some(model) != first)) {
        let _ = writeln!(
            notes,
            "the processors are of several models: guests are shown that of {}, which has to be the oldest",
            path.display()
        );
    }
    let text = serde_json::to_string_pretty(&CpuBaseline::of(&pool));
    Ok((text.map_err(CommonError::Written)?, notes))
}

fn read(path: &Path) -> Result<Baseline, CommonError> {
    let at = || path.to_owned();
    let failed = |source| CommonError::Read { path: at(), source };
    let mut text = Vec::new();
    let file = File::open(path).map_err(failed)?;
    let read = file.take(FILE_BYTES_MAX + 1).read_to_end(&mut text).map_err(failed)?;
    if read as u64 > FILE_BYTES_MAX {
        return Err(failed(io::Error::other("it is too long for a report")));
    }
    let parsed = |source| CommonError::Text { path: at(), source };
    let mut value: Value = serde_json::from_slice(&text).map_err(parsed)?;
    if value.get("verdict").is_some() {
        let cpu = value.get_mut("cpu").map(Value::take);
        value = cpu.ok_or_else(|| CommonError::NoCpu { path: at() })?;
    }
    let written: CpuBaseline = serde_json::from_value(value).map_err(parsed)?;
    let contents = |source| CommonError::Contents { path: at(), source };
    if written.file.is_some() {
        return Err(contents(BaselineContentsError::Form));
    }
    written.to_baseline().map_err(contents)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn host(maker: &str, leaf_7_ebx: &str) -> Value {
        let (ebx, edx, ecx) = match maker {
            "Intel" => ("0x756e6547", "0x49656e69", "0x6c65746e"),
            _ => ("0x68747541", "0x69746e65", "0x444d4163"),
        };
        json!({"cpuid": [
            {"leaf": "0x0", "eax": "0x10", "ebx": ebx, "ecx": ecx, "edx": edx},
            {"leaf": "0x1", "eax": if leaf_7_ebx == "0x20" { "0x50654" } else { "0x606a6" }},
            {"leaf": "0x7", "ebx": leaf_7_ebx},
            {"leaf": "0x80000001", "edx": "0x20000000"},
            {"leaf": "0x80000008", "eax": "0x2e"},
        ]})
    }

    #[test]
    fn reports_and_baselines_become_one_and_what_is_left_out_is_named() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = |name: &str, value: &Value| {
            let path = folder.path().join(name);
            std::fs::write(&path, value.to_string()).expect("a file");
            path
        };
        // AVX2 and AVX-512; AVX2 alone.
        let report =
            json!({"version": 1, "verdict": "ok", "findings": [], "cpu": host("Intel", "0x10020")});
        let new = file("new.json", &report);
        let old = file("old.json", &host("Intel", "0x20"));
        let (pool, notes) = common(&[old.clone(), new.clone()]).expect("a baseline");
        let pool: Value = serde_json::from_str(&pool).expect("JSON");
        assert_eq!(pool["cpuid"][2]["ebx"], "0x20");
        assert_eq!(notes.lines().count(), 2, "{notes}");
        assert!(notes.contains("old.json, which has to be the oldest"), "{notes}");
        assert!(notes.contains("new.json") && notes.contains("avx512f"), "{notes}");
        // What comes out goes in.
        let pool = file("pool.json", &pool);
        let (again, notes) = common(&[pool, old]).expect("a baseline");
        assert!(again.contains("\"0x20\"") && notes.is_empty(), "{notes}");

        let other = file("other.json", &host("AMD", "0x20"));
        let blind = file("blind.json", &json!({"version": 1, "verdict": "fails", "findings": []}));
        let odd = file("odd.json", &json!({"cpuid": [{"leaf": "0x4", "eax": "0x1"}]}));
        let nothing = file("nothing.json", &json!({"something": 1}));
        for (path, why) in [
            (&other, "different makers"),
            (&blind, "cannot use KVM"),
            (&odd, "leaf 0x4"),
            (&nothing, "neither"),
            (&file("named.json", &json!({"file": "/etc/hostname"})), "either 'file'"),
            (&file("long.json", &json!(" ".repeat(5 << 20))), "too long"),
            (&folder.path().join("absent"), "cannot read"),
        ] {
            let error = common(&[new.clone(), path.clone()]).expect_err("no baseline");
            let text = error_text::chain(&error);
            assert!(text.contains(why), "{text}");
        }
    }
}
