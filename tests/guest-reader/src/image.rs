// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The guest's kernel image: where it is, and building it.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs, io};

use thiserror::Error;

/// Names an image to use instead of building one.
pub const IMAGE_VARIABLE: &str = "GODWIT_TEST_GUEST";

/// Why there is no image.
#[derive(Debug, Error)]
pub enum ImageError {
    /// cargo could not be started.
    #[error("cannot run cargo to build the test guest")]
    Cargo(#[source] io::Error),
    /// The build failed.
    #[error("building the test guest ({}) failed: {output}", manifest.display())]
    Build {
        /// Its manifest.
        manifest: PathBuf,
        /// What cargo said.
        output: String,
    },
    /// A file that should be there is not.
    #[error("there is no test guest at {}", path.display())]
    Absent {
        /// Where it should be.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
}

/// The image: the file that `GODWIT_TEST_GUEST` names, or a fresh build (cargo itself sees to it
/// that only one process builds at a time, and that nothing is built twice).
pub fn image() -> Result<PathBuf, ImageError> {
    let path = match env::var_os(IMAGE_VARIABLE) {
        Some(path) => PathBuf::from(path),
        None => build()?,
    };
    fs::canonicalize(&path).map_err(|source| ImageError::Absent { path, source })
}

fn build() -> Result<PathBuf, ImageError> {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let manifest = here.join("../guest/Cargo.toml");
    let base = env::var_os("CARGO_TARGET_DIR").map_or(here.join("../../target"), PathBuf::from);
    let target = base.join("guest");
    let output = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
        .args(["build", "--release", "--quiet", "--manifest-path"])
        .arg(&manifest)
        .arg("--target-dir")
        .arg(&target)
        // Flags meant for the host's binaries would end up in a freestanding one.
        .env_remove("RUSTFLAGS")
        .env_remove("CARGO_ENCODED_RUSTFLAGS")
        .output()
        .map_err(ImageError::Cargo)?;
    if !output.status.success() {
        let output = String::from_utf8_lossy(&output.stderr).into_owned();
        return Err(ImageError::Build { manifest, output });
    }
    Ok(target.join("release/test-guest"))
}
