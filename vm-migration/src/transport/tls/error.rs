// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Errors of TLS: files that cannot be used, handshakes that fail, records that do not fit.

use std::io;
use std::path::PathBuf;

use rustls::AlertDescription;

use super::files::FILE_BYTES_MAX;
use super::record::EMPTY_RECORDS_MAX;

/// Why TLS failed.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file that cannot be read.
    #[error("{} cannot be read", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The host's error.
        #[source]
        source: io::Error,
    },
    /// A file that is too large.
    #[error("{} has more than {FILE_BYTES_MAX} bytes", .0.display())]
    TooLarge(PathBuf),
    /// A file without the expected contents.
    #[error("{} holds no {what} in PEM form", path.display())]
    Pem {
        /// The file.
        path: PathBuf,
        /// The kind of contents that is missing.
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
        /// The error of rustls.
        #[source]
        source: rustls::Error,
    },
    /// A host name that no certificate can have.
    #[error("{0:?} is not a name that a certificate can have")]
    Name(String),
    /// A Unix socket as the address.
    #[error("TLS needs a tcp: address, not {0}")]
    Unix(String),
    /// The peer's data is not TLS.
    #[error(
        "the peer does not use TLS, and this side has tls_dir; give tls_dir to both sides or to neither"
    )]
    NotTls,
    /// The peer's certificate is missing or not accepted.
    #[error("the peer's certificate is not accepted here")]
    Certificate(#[source] rustls::Error),
    /// The peer ended the connection with an alert.
    #[error("the peer refused the TLS connection ({alert:?}); its log has the reason{}", hint(*alert))]
    Refused {
        /// The alert.
        alert: AlertDescription,
    },
    /// The connection ended in the middle of the handshake.
    #[error("the peer closed the connection during the TLS handshake; was it given tls_dir, too?")]
    Ended,
    /// Too many records without data.
    #[error("the peer sent more than {EMPTY_RECORDS_MAX} TLS records in a row without data")]
    NoData,
    /// Another TLS error.
    #[error("TLS failed while {what}")]
    Protocol {
        /// The step.
        what: &'static str,
        /// The error of rustls.
        #[source]
        source: rustls::Error,
    },
}

/// The probable cause of an alert.
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
    /// Converts an error of rustls.
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
