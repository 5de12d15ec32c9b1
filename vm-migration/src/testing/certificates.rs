// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Certificates for tests: a CA, and directories of what it has signed.

use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa,
    KeyPair, KeyUsagePurpose, date_time_ymd,
};

/// A CA for tests.
#[derive(Debug)]
pub struct TestCa(CertifiedIssuer<'static, KeyPair>);

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
        let mut params = params(&[], VALID);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        // With a name of its own as well: two CAs of the same name differ only by their signatures.
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let name = format!("test CA {}", COUNT.fetch_add(1, Ordering::Relaxed));
        params.distinguished_name.push(DnType::CommonName, name);
        let key = KeyPair::generate().expect("there is randomness");
        Self(CertifiedIssuer::self_signed(params, key).expect("it is a CA"))
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
        let key = KeyPair::generate().expect("there is randomness");
        let mut params = params(hosts, if has_expired { EXPIRED } else { VALID });
        params.extended_key_usages = vec![usage];
        let certificate = params.signed_by(&key, &self.0).expect("the CA signs");
        let write = |name: String, text: String| {
            std::fs::write(dir.join(name), text).expect("the directory can be written");
        };
        write("ca-cert.pem".into(), self.0.pem());
        write(format!("{side}-cert.pem"), certificate.pem());
        write(format!("{side}-key.pem"), key.serialize_pem());
    }
}

fn params(hosts: &[&str], (first, last): Years) -> CertificateParams {
    let hosts: Vec<String> = hosts.iter().map(ToString::to_string).collect();
    let mut params = CertificateParams::new(hosts).expect("the names are names");
    params.not_before = date_time_ymd(first, 1, 1);
    params.not_after = date_time_ymd(last, 1, 1);
    params
}
