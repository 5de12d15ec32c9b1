// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! TLS 1.3 for migration connections, with certificates of both sides.
//!
//! | file | owns |
//! | --- | --- |
//! | `files` | the directory with certificates and key |
//! | `handshake` | the handshake, without blocking |
//! | `record` | the records after it, each direction independently |
//! | `control` | what a peer says about the connection itself after the handshake: key updates, tickets |
//! | `error` | the errors |
//! | `fuzz` | the entry point for fuzzing, over the two ends of a connection |
//!
//! rustls owns the handshake, the certificates, the keys, and the protection of each record; the framing
//! of records is here, so that plaintext goes from a record straight to guest memory and the two directions
//! share no lock. On every connection the source is the client and the destination the server. Both must
//! show a certificate of the CA; the source checks that the destination's certificate names the host that it
//! connects to. Sessions are never resumed, so no ticket outlives a connection.

mod control;
mod error;
mod files;
#[cfg(all(any(test, feature = "testing"), not(loom)))]
mod fuzz;
mod handshake;
mod record;
#[cfg(all(test, not(loom)))]
pub(crate) mod tests;

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use rustls::client::Resumption;
use rustls::crypto::CryptoProvider;
use rustls::crypto::ring::{self, cipher_suite};
use rustls::pki_types::ServerName;
use rustls::server::WebPkiClientVerifier;
use rustls::version::TLS13;
use rustls::{ClientConfig, ServerConfig};

pub use error::TlsError;
use files::Kind;
pub(crate) use files::PemFiles;
#[cfg(all(any(test, feature = "testing"), not(loom)))]
pub use fuzz::{TlsRecordsOutcome, fuzz_tls_records, tls_records_outcome};
pub(crate) use handshake::Handshake;
pub(super) use handshake::Progress;
pub(super) use record::{Left, Opener, Stream};

/// The first two bytes of a TLS client's first record. No message of the protocol and no role begins with
/// these.
pub(crate) const FIRST_BYTES: [u8; 2] = [0x16, 0x03];

/// The algorithms of ring; AES-128 first, which costs least.
fn provider() -> Arc<CryptoProvider> {
    let cipher_suites = vec![
        cipher_suite::TLS13_AES_128_GCM_SHA256,
        cipher_suite::TLS13_AES_256_GCM_SHA384,
        cipher_suite::TLS13_CHACHA20_POLY1305_SHA256,
    ];
    Arc::new(CryptoProvider { cipher_suites, ..ring::default_provider() })
}

/// TLS configuration of a source.
#[derive(Clone)]
pub struct ClientTls {
    config: Arc<ClientConfig>,
    files: Arc<PemFiles>,
}

impl fmt::Debug for ClientTls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("ClientTls").field(&self.files).finish()
    }
}

impl PartialEq for ClientTls {
    fn eq(&self, other: &Self) -> bool {
        self.files == other.files
    }
}

impl Eq for ClientTls {}

impl ClientTls {
    /// Reads `ca-cert.pem`, `client-cert.pem` and `client-key.pem`.
    ///
    /// # Errors
    /// Names the file that is missing or cannot be used.
    pub fn load(dir: &Path) -> Result<Self, TlsError> {
        Self::new(PemFiles::read(dir, Kind::Client)?)
    }

    /// The configuration for files that were read before.
    pub(crate) fn new(files: PemFiles) -> Result<Self, TlsError> {
        Self::with_provider(files, provider())
    }

    fn with_provider(files: PemFiles, provider: Arc<CryptoProvider>) -> Result<Self, TlsError> {
        let material = files.material(Kind::Client)?;
        let unusable = files.unusable(Kind::Client);
        let mut config = ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&TLS13])
            .map_err(&unusable)?
            .with_root_certificates(material.roots)
            .with_client_auth_cert(material.chain, material.key)
            .map_err(&unusable)?;
        config.resumption = Resumption::disabled();
        // The keys are needed because records are framed here.
        config.enable_secret_extraction = true;
        Ok(Self { config: Arc::new(config), files: Arc::new(files) })
    }

    /// The files, with which another process can act as the same source.
    pub(crate) fn files(&self) -> &PemFiles {
        &self.files
    }

    /// The name that a destination's certificate must have.
    ///
    /// # Errors
    /// When no certificate can have the name.
    pub(super) fn name(host: &str) -> Result<ServerName<'static>, TlsError> {
        ServerName::try_from(host.to_owned()).map_err(|_| TlsError::Name(host.to_owned()))
    }
}

/// TLS configuration of a destination.
#[derive(Clone)]
pub struct ServerTls {
    config: Arc<ServerConfig>,
    files: Arc<PemFiles>,
}

impl fmt::Debug for ServerTls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("ServerTls").field(&self.files).finish()
    }
}

impl ServerTls {
    /// Reads `ca-cert.pem`, `server-cert.pem` and `server-key.pem`.
    ///
    /// # Errors
    /// Names the file that is missing or cannot be used.
    pub fn load(dir: &Path) -> Result<Self, TlsError> {
        Self::with_provider(PemFiles::read(dir, Kind::Server)?, provider())
    }

    fn with_provider(files: PemFiles, provider: Arc<CryptoProvider>) -> Result<Self, TlsError> {
        let material = files.material(Kind::Server)?;
        let unusable = files.unusable(Kind::Server);
        let general = |error: rustls::server::VerifierBuilderError| {
            unusable(rustls::Error::General(error.to_string()))
        };
        let verifier =
            WebPkiClientVerifier::builder_with_provider(material.roots, provider.clone())
                .build()
                .map_err(general)?;
        let mut config = ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&TLS13])
            .map_err(&unusable)?
            .with_client_cert_verifier(verifier)
            .with_single_cert(material.chain, material.key)
            .map_err(&unusable)?;
        config.send_tls13_tickets = 0;
        config.enable_secret_extraction = true;
        Ok(Self { config: Arc::new(config), files: Arc::new(files) })
    }
}
