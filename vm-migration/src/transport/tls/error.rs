// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Errors of TLS: files that cannot be used, handshakes that fail, records that do not fit.

use std::io;
use std::path::PathBuf;

use rustls::AlertDescription;

use super::files::FILE_BYTES_MAX;
use super::record::EMPTY_RECORDS_MAX;

/// What TLS can suffer.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file of the directory that cannot be read.
    #[error("{} cannot be read", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// A file that is too large for what it should be.
    #[error("{} has more than {FILE_BYTES_MAX} bytes", .0.display())]
    TooLarge(PathBuf),
    /// A file without what it should have.
    #[error("{} holds no {what} in PEM form", path.display())]
    Pem {
        /// The file.
        path: PathBuf,
        /// What is missing.
        what: &'static str,
    },
    /// A private key of another certificate.
    #[error("the private key in {} does not belong to the certificate in {}", key.display(), certificate.display())]
    KeyMismatch {
        /// The file of the key.
        key: PathBuf,
        /// The file of the certificate.
        certificate: PathBuf,
    },
    /// A certificate or key that TLS cannot use.
    #[error("{} cannot be used", path.display())]
    Unusable {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: rustls::Error,
    },
    /// A host that no certificate can name.
    #[error("{0:?} is not a name that a certificate can have")]
    Name(String),
    /// An address without a network.
    #[error("TLS needs a tcp: address, not {0}")]
    Unix(String),
    /// Something else than TLS came.
    #[error(
        "the peer does not use TLS, and this side has tls_dir; give tls_dir to both sides or to neither"
    )]
    NotTls,
    /// The peer's certificate, or the lack of one.
    #[error("the peer's certificate is not accepted here")]
    Certificate(#[source] rustls::Error),
    /// The peer ended the connection with an alert.
    #[error("the peer refused the TLS connection ({alert:?}); its log has the reason{}", hint(*alert))]
    Refused {
        /// What it said.
        alert: AlertDescription,
    },
    /// The connection ended in the middle of the handshake.
    #[error("the peer closed the connection during the TLS handshake; was it given tls_dir, too?")]
    Ended,
    /// Records, and nothing in them.
    #[error("the peer sent more than {EMPTY_RECORDS_MAX} TLS records in a row without data")]
    NoData,
    /// Anything else.
    #[error("TLS failed while {what}")]
    Protocol {
        /// What was being done.
        what: &'static str,
        /// Why it failed.
        #[source]
        source: rustls::Error,
    },
}

/// What is probably the matter.
fn hint(alert: AlertDescription) -> &'static str {
    match alert {
        AlertDescription::UnknownCA
        | AlertDescription::DecryptError
        | AlertDescription::CertificateUnknown
        | AlertDescription::BadCertificate => {
            "; do both sides have the same ca-cert.pem, and is this side's certificate of that CA?"
        }
        AlertDescription::CertificateExpired => "; this side's certificate is not valid now",
        AlertDescription::CertificateRequired => "; this side showed no certificate",
        _ => "",
    }
}

impl TlsError {
    /// An error of rustls in the handshake or after it.
    pub(super) fn of(what: &'static str, source: rustls::Error) -> Self {
        match source {
            rustls::Error::AlertReceived(alert) => Self::Refused { alert },
            rustls::Error::InvalidCertificate(_) | rustls::Error::NoCertificatesPresented => {
                Self::Certificate(source)
            }
            source => Self::Protocol { what, source },
        }
    }
}
