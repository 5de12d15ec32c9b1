// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Certificates for tests: a CA, and directories of what it has signed.

use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa,
    KeyPair, KeyUsagePurpose, PKCS_ED25519, date_time_ymd,
};
use rustls::pki_types::PrivatePkcs8KeyDer;

/// A CA for tests.
#[derive(Debug)]
pub struct TestCa {
    issuer: CertifiedIssuer<'static, KeyPair>,
    /// Keys are the same each time.
    is_fixed: bool,
}

/// First and last year of validity.
type Years = (i32, i32);

const VALID: Years = (2000, 4000);
const EXPIRED: Years = (2000, 2001);

impl TestCa {
    /// A CA with a new key.
    ///
    /// # Panics
    /// When the host has no randomness.
    #[expect(clippy::new_without_default, reason = "each is another one")]
    pub fn new() -> Self {
        // With a name of its own as well: two CAs of the same name differ only by their signatures.
        static COUNT: AtomicU32 = AtomicU32::new(0);
        Self::named(format!("test CA {}", COUNT.fetch_add(1, Ordering::Relaxed)), false)
    }

    /// A CA that is the same each time, as is what it signs: its keys, and their signatures, need no randomness.
    pub fn fixed() -> Self {
        Self::named("fixed test CA".to_owned(), true)
    }

    fn named(name: String, is_fixed: bool) -> Self {
        let mut params = params(&[], VALID);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        params.distinguished_name.push(DnType::CommonName, name);
        let key = if is_fixed { fixed_key(b"a") } else { new_key() };
        let issuer = CertifiedIssuer::self_signed(params, key).expect("it is a CA");
        Self { issuer, is_fixed }
    }

    /// Writes all five files, for a destination with these host names.
    ///
    /// # Panics
    /// When the directory cannot be written.
    pub fn write_all(&self, dir: &Path, hosts: &[&str]) {
        self.write_side(dir, "server", hosts, false);
        self.write_side(dir, "client", &["source"], false);
    }

    /// Writes the CA's certificate, and certificate and key of one side.
    ///
    /// # Panics
    /// When the directory cannot be written.
    pub fn write_side(&self, dir: &Path, side: &str, hosts: &[&str], has_expired: bool) {
        let usage = match side {
            "server" => ExtendedKeyUsagePurpose::ServerAuth,
            _ => ExtendedKeyUsagePurpose::ClientAuth,
        };
        let key = if self.is_fixed { fixed_key(side.as_bytes()) } else { new_key() };
        let mut params = params(hosts, if has_expired { EXPIRED } else { VALID });
        params.extended_key_usages = vec![usage];
        let certificate = params.signed_by(&key, &self.issuer).expect("the CA signs");
        let write = |name: String, text: String| {
            std::fs::write(dir.join(name), text).expect("the directory can be written");
        };
        write("ca-cert.pem".into(), self.issuer.pem());
        write(format!("{side}-cert.pem"), certificate.pem());
        write(format!("{side}-key.pem"), key.serialize_pem());
    }
}

fn new_key() -> KeyPair {
    KeyPair::generate().expect("there is randomness")
}

/// An Ed25519 key for a name, in the form of RFC 8410.
fn fixed_key(name: &[u8]) -> KeyPair {
    const BEGIN: [u8; 16] = [0x30, 46, 2, 1, 0, 0x30, 5, 6, 3, 0x2b, 0x65, 0x70, 4, 34, 4, 32];
    let seed = name.iter().copied().cycle().take(32);
    let der: Vec<u8> = BEGIN.into_iter().chain(seed).collect();
    let der = PrivatePkcs8KeyDer::from(der);
    KeyPair::from_pkcs8_der_and_sign_algo(&der, &PKCS_ED25519).expect("it is a key")
}

fn params(hosts: &[&str], (first, last): Years) -> CertificateParams {
    let hosts: Vec<String> = hosts.iter().map(ToString::to_string).collect();
    let mut params = CertificateParams::new(hosts).expect("the names are names");
    params.not_before = date_time_ymd(first, 1, 1);
    params.not_after = date_time_ymd(last, 1, 1);
    params
}
