// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The programs under test: where they are, and building them.
//!
//! Owns that they are what users get: compiled with the release profile, without what only tests
//! need, and from the sources as they are now. Must never run them.

use std::path::Path;
use std::process::Command;

/// The VMM.
pub const VMM: &str = concat!(env!("CARGO_TARGET_TMPDIR"), "/../release/cloud-hypervisor");
/// Its remote control.
pub const CH_REMOTE: &str = concat!(env!("CARGO_TARGET_TMPDIR"), "/../release/ch-remote");
/// The daemon that keeps memory ready.
pub const POOL: &str = concat!(env!("CARGO_TARGET_TMPDIR"), "/../release/prezero-pool");

/// Brings them up to date; with nothing to do that takes a moment.
///
/// # Errors
/// What cargo said.
pub fn build() -> Result<(), String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).join("..");
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    // What cargo says of this package: build scripts of others look at it, and all that depends on them would be
    // compiled now, and once more by the next build without it.
    for (name, _) in std::env::vars_os() {
        let is_of_package = ["CARGO_PKG_", "CARGO_MANIFEST_"]
            .iter()
            .any(|prefix| name.as_encoded_bytes().starts_with(prefix.as_bytes()));
        if is_of_package {
            command.env_remove(name);
        }
    }
    let output = command
        .current_dir(root)
        // The same words as in scripts/lib/common.sh: another choice of packages means other
        // features of what they share, and everything is compiled once more.
        .args(["build", "--release", "--quiet", "--locked", "--package", "godwit", "--bins"])
        .arg("--target-dir")
        .arg(target)
        .output()
        .map_err(|error| format!("cargo cannot be run: {error}"))?;
    if output.status.success() {
        return Ok(());
    }
    Err(String::from_utf8_lossy(&output.stderr).into_owned())
}
