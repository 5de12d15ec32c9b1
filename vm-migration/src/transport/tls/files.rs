// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The directory with certificates and key, in PEM, with cloud-hypervisor's file names.
//!
//! Reads the files once, before anything starts. What was read is used for as long as the
//! migration lasts, also by its page server; a change of a file meanwhile has no effect.

use std::fmt;
use std::fs::OpenOptions;
use std::io::{self, Read as _};
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::RootCertStore;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use serde::{Deserialize, Serialize};
use zeroize::Zeroize as _;

use super::TlsError;

/// Longest file: a chain of several certificates has a few KiB, and no handshake carries more than this.
pub(super) const FILE_BYTES_MAX: u64 = 64 << 10;

/// File with the CA certificates that are accepted.
const CA: &str = "ca-cert.pem";

/// The side whose files are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// The source's.
    Client,
    /// The destination's.
    Server,
}

impl Kind {
    fn certificate(self) -> &'static str {
        match self {
            Self::Client => "client-cert.pem",
            Self::Server => "server-cert.pem",
        }
    }

    fn key(self) -> &'static str {
        match self {
            Self::Client => "client-key.pem",
            Self::Server => "server-key.pem",
        }
    }
}

/// The text of the three files of one side. Contains a private key: never logged, and zeroed when dropped.
/// rustls and ring keep forms of their own as long as a configuration exists.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct PemFiles {
    /// The directory, for messages.
    dir: PathBuf,
    ca: String,
    certificate: String,
    key: String,
}

impl fmt::Debug for PemFiles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PemFiles").field("dir", &self.dir).finish_non_exhaustive()
    }
}

impl Drop for PemFiles {
    fn drop(&mut self) {
        self.key.zeroize();
    }
}

/// The parsed certificates and key.
pub(super) struct Material {
    pub roots: Arc<RootCertStore>,
    pub chain: Vec<CertificateDer<'static>>,
    pub key: PrivateKeyDer<'static>,
}

impl PemFiles {
    /// Reads the files of one side.
    pub(super) fn read(dir: &Path, kind: Kind) -> Result<Self, TlsError> {
        let ca = read(&dir.join(CA))?;
        let certificate = read(&dir.join(kind.certificate()))?;
        let key_path = dir.join(kind.key());
        let key = read(&key_path)?;
        warn_of_readers(&key_path);
        Ok(Self { dir: dir.to_owned(), ca, certificate, key })
    }

    /// Parses certificates and key.
    pub(super) fn material(&self, kind: Kind) -> Result<Material, TlsError> {
        let ca_path = self.dir.join(CA);
        let mut roots = RootCertStore::empty();
        for certificate in certificates(&self.ca, &ca_path)? {
            let path = ca_path.clone();
            roots.add(certificate).map_err(|source| TlsError::Unusable { path, source })?;
        }
        let chain = certificates(&self.certificate, &self.dir.join(kind.certificate()))?;
        let key = PrivateKeyDer::from_pem_slice(self.key.as_bytes())
            .map_err(|_| TlsError::Pem { path: self.dir.join(kind.key()), what: "private key" })?;
        Ok(Material { roots: Arc::new(roots), chain, key })
    }

    /// Returns a function that names the file to which an error of rustls belongs.
    pub(super) fn unusable(&self, kind: Kind) -> impl Fn(rustls::Error) -> TlsError + use<> {
        let certificate = self.dir.join(kind.certificate());
        let key = self.dir.join(kind.key());
        move |source| {
            let (certificate, key) = (certificate.clone(), key.clone());
            match source {
                rustls::Error::InconsistentKeys(rustls::InconsistentKeys::KeyMismatch) => {
                    TlsError::KeyMismatch { key, certificate }
                }
                rustls::Error::InvalidCertificate(_) => {
                    TlsError::Unusable { path: certificate, source }
                }
                source => TlsError::Unusable { path: key, source },
            }
        }
    }
}

/// Reads a regular file. Opening a pipe in its place does not block.
fn read(path: &Path) -> Result<String, TlsError> {
    let failed = |source| TlsError::File { path: path.to_owned(), source };
    let open = || {
        let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path)?;
        if !file.metadata()?.is_file() {
            return Err(io::Error::other("it is not a regular file"));
        }
        Ok(file)
    };
    // Full capacity from the start: a string that grows leaves copies in freed memory.
    let mut text = String::with_capacity(usize::try_from(FILE_BYTES_MAX).unwrap_or_default() + 2);
    open()
        .and_then(|file| file.take(FILE_BYTES_MAX + 1).read_to_string(&mut text))
        .map_err(failed)?;
    if text.len() as u64 > FILE_BYTES_MAX {
        return Err(TlsError::TooLarge(path.to_owned()));
    }
    Ok(text)
}

fn certificates(pem: &str, path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let missing = || TlsError::Pem { path: path.to_owned(), what: "certificate" };
    let all = CertificateDer::pem_slice_iter(pem.as_bytes()).collect::<Result<Vec<_>, _>>();
    all.ok().filter(|all| !all.is_empty()).ok_or_else(missing)
}

/// True when the file is readable by users who are neither owner nor in the group.
fn is_world_readable(path: &Path) -> bool {
    std::fs::metadata(path).is_ok_and(|there| there.permissions().mode() & 0o004 != 0)
}

fn warn_of_readers(key: &Path) {
    if is_world_readable(key) {
        log::warn!("every user of this host may read the private key {}", key.display());
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a failing unwrap fails the test")]
    use super::*;

    #[test]
    fn a_key_that_every_user_may_read_is_noticed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("key");
        std::fs::write(&path, "").unwrap();
        for (mode, noticed) in [(0o600, false), (0o640, false), (0o644, true)] {
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
            assert_eq!(is_world_readable(&path), noticed, "{mode:o}");
        }
    }
}
