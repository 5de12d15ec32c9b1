// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Cryptography for fuzzing, with which an input has the same result each time.
//!
//! Owns what replaces randomness and key agreement, and a record protection that changes nothing. Signatures, hashes,
//! key schedule and the other record protections are those of a migration. Must never be used for one.

use std::sync::{Arc, OnceLock};

use rustls::crypto::cipher::{
    AeadKey, InboundOpaqueMessage, InboundPlainMessage, Iv, MessageDecrypter, MessageEncrypter,
    OutboundOpaqueMessage, OutboundPlainMessage, PrefixedPayload, Tls13AeadAlgorithm,
    UnsupportedOperationError,
};
use rustls::crypto::{
    ActiveKeyExchange, CryptoProvider, GetRandomFailed, SecureRandom, SharedSecret,
    SupportedKxGroup,
};
use rustls::{
    CipherSuiteCommon, ConnectionTrafficSecrets, ContentType, Error, NamedGroup, PeerMisbehaved,
    ProtocolVersion, SupportedCipherSuite, Tls13CipherSuite,
};

use crate::testing::TestCa;
use crate::transport::tls::files::Kind;
use crate::transport::tls::{ClientTls, PemFiles, ServerTls, provider};

/// The host that the destination's certificate names.
pub(super) const HOST: &str = "127.0.0.1";

/// What stands for randomness.
const RANDOM_BYTE: u8 = 0x5a;

#[derive(Debug)]
struct SameBytes;

impl SecureRandom for SameBytes {
    fn fill(&self, buf: &mut [u8]) -> Result<(), GetRandomFailed> {
        buf.fill(RANDOM_BYTE);
        Ok(())
    }
}

/// A group whose shares have the usual length, and whose secret is known.
#[derive(Debug)]
struct SameSecret {
    name: NamedGroup,
    share: &'static [u8],
}

impl SupportedKxGroup for SameSecret {
    fn start(&self) -> Result<Box<dyn ActiveKeyExchange>, Error> {
        Ok(Box::new(Self { name: self.name, share: self.share }))
    }

    fn name(&self) -> NamedGroup {
        self.name
    }
}

impl ActiveKeyExchange for SameSecret {
    fn complete(self: Box<Self>, peer_pub_key: &[u8]) -> Result<SharedSecret, Error> {
        if peer_pub_key.len() != self.share.len() {
            return Err(PeerMisbehaved::InvalidKeyShare.into());
        }
        Ok(SharedSecret::from(&[RANDOM_BYTE; 32][..]))
    }

    fn pub_key(&self) -> &[u8] {
        self.share
    }

    fn group(&self) -> NamedGroup {
        self.name
    }
}

/// Two groups, so that a server can ask for the other one.
static GROUPS: [&dyn SupportedKxGroup; 2] = [
    &SameSecret { name: NamedGroup::X25519, share: &[RANDOM_BYTE; 32] },
    &SameSecret { name: NamedGroup::secp256r1, share: &[4; 65] },
];

/// A record protection that only appends the type: what follows the keys can be changed like what precedes them.
struct Unprotected;

impl Tls13AeadAlgorithm for Unprotected {
    fn encrypter(&self, _: AeadKey, _: Iv) -> Box<dyn MessageEncrypter> {
        Box::new(Self)
    }

    fn decrypter(&self, _: AeadKey, _: Iv) -> Box<dyn MessageDecrypter> {
        Box::new(Self)
    }

    fn key_len(&self) -> usize {
        16
    }

    fn extract_keys(
        &self,
        key: AeadKey,
        iv: Iv,
    ) -> Result<ConnectionTrafficSecrets, UnsupportedOperationError> {
        Ok(ConnectionTrafficSecrets::Aes128Gcm { key, iv })
    }
}

impl MessageEncrypter for Unprotected {
    fn encrypt(
        &mut self,
        message: OutboundPlainMessage<'_>,
        _: u64,
    ) -> Result<OutboundOpaqueMessage, Error> {
        let len = self.encrypted_payload_len(message.payload.len());
        let mut payload = PrefixedPayload::with_capacity(len);
        payload.extend_from_chunks(&message.payload);
        payload.extend_from_slice(&[message.typ.into()]);
        let (typ, version) = (ContentType::ApplicationData, ProtocolVersion::TLSv1_2);
        Ok(OutboundOpaqueMessage::new(typ, version, payload))
    }

    fn encrypted_payload_len(&self, payload_len: usize) -> usize {
        payload_len + 1
    }
}

impl MessageDecrypter for Unprotected {
    fn decrypt<'a>(
        &mut self,
        message: InboundOpaqueMessage<'a>,
        _: u64,
    ) -> Result<InboundPlainMessage<'a>, Error> {
        message.into_tls13_unpadded_message()
    }
}

/// The suite with [`Unprotected`] records.
fn unprotected(like: &Tls13CipherSuite) -> &'static Tls13CipherSuite {
    static SUITE: OnceLock<Tls13CipherSuite> = OnceLock::new();
    SUITE.get_or_init(|| Tls13CipherSuite {
        common: CipherSuiteCommon {
            suite: like.common.suite,
            hash_provider: like.common.hash_provider,
            confidentiality_limit: like.common.confidentiality_limit,
        },
        hkdf_provider: like.hkdf_provider,
        aead_alg: &Unprotected,
        quic: None,
    })
}

/// Cipher suites of [`certificates`]; the first one protects nothing.
pub(super) const SUITES: usize = 4;

/// Configurations of both sides for one of [`SUITES`] cipher suites.
pub(super) fn certificates(suite: usize) -> &'static (ClientTls, ServerTls) {
    static ALL: OnceLock<Vec<(ClientTls, ServerTls)>> = OnceLock::new();
    let all = ALL.get_or_init(|| {
        let dir = tempfile::tempdir().expect("there is a directory for temporary files");
        TestCa::fixed().write_all(dir.path(), &[HOST]);
        let read = |kind| PemFiles::read(dir.path(), kind).expect("the files were written");
        let real = provider().cipher_suites.clone();
        let without = real[0].tls13().map(unprotected).map(SupportedCipherSuite::Tls13);
        without
            .into_iter()
            .chain(real)
            .map(|suite| {
                let provider = Arc::new(CryptoProvider {
                    cipher_suites: vec![suite],
                    kx_groups: GROUPS.to_vec(),
                    secure_random: &SameBytes,
                    ..CryptoProvider::clone(&provider())
                });
                let client = ClientTls::with_provider(read(Kind::Client), provider.clone());
                let server = ServerTls::with_provider(read(Kind::Server), provider);
                (client.expect("the files are valid"), server.expect("the files are valid"))
            })
            .collect()
    });
    &all[suite % SUITES]
}
