//! Clients that are allowed by the names in their certificates.
//!
//! Laws: a name counts only after the certificate was verified. A name is compared as a whole: there are no wildcards.

use std::sync::Arc;

use rustls::client::danger::HandshakeSignatureValid;
use rustls::pki_types::{CertificateDer, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{CertificateError, DigitallySignedStruct, DistinguishedName, Error, SignatureScheme};
use webpki::EndEntityCert;

/// The object identifier of a common name (X.520), as DER has it.
const COMMON_NAME: [u8; 5] = [6, 3, 0x55, 4, 3];
/// DER: a set, a sequence, and the kinds of text that a common name may have.
const SET: u8 = 0x31;
const SEQUENCE: u8 = 0x30;
const TEXTS: [u8; 3] = [0x0c, 0x13, 0x16];

/// Accepts the clients that another verifier accepts and that have one of these names.
#[derive(Debug)]
pub(super) struct AllowedClients {
    pub(super) verifier: Arc<dyn ClientCertVerifier>,
    pub(super) names: Vec<String>,
}

impl ClientCertVerifier for AllowedClients {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.verifier.root_hint_subjects()
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        let verified = self.verifier.verify_client_cert(end_entity, intermediates, now)?;
        let encoding = |_| Error::InvalidCertificate(CertificateError::BadEncoding);
        let certificate = EndEntityCert::try_from(end_entity).map_err(encoding)?;
        let is_allowed = |name: &str| self.names.iter().any(|allowed| allowed == name);
        if certificate.valid_dns_names().any(is_allowed) || common_names(certificate.subject()).any(is_allowed) {
            return Ok(verified);
        }
        Err(Error::InvalidCertificate(CertificateError::ApplicationVerificationFailure))
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.verifier.verify_tls12_signature(message, cert, dss)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.verifier.verify_tls13_signature(message, cert, dss)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.verifier.supported_verify_schemes()
    }
}

/// The common names of a subject: sets of sequences of an identifier and a text (RFC 5280, section 4.1.2.4).
fn common_names(subject: &[u8]) -> impl Iterator<Item = &str> {
    let sets = Values(subject).filter(|(tag, _)| *tag == SET);
    let pairs = sets.flat_map(|(_, set)| Values(set)).filter(|(tag, _)| *tag == SEQUENCE);
    pairs.filter_map(|(_, pair)| {
        let (tag, text) = Values(pair.strip_prefix(&COMMON_NAME)?).next()?;
        if TEXTS.contains(&tag) { str::from_utf8(text).ok() } else { None }
    })
}

/// The values of DER one after the other, each with its tag. It ends where a length is wrong.
struct Values<'a>(&'a [u8]);

impl<'a> Iterator for Values<'a> {
    type Item = (u8, &'a [u8]);

    fn next(&mut self) -> Option<Self::Item> {
        let (length, rest) = match *self.0.get(1..)? {
            [length @ 0..=0x7f, ref rest @ ..] => (usize::from(length), rest),
            [0x81, length, ref rest @ ..] => (usize::from(length), rest),
            [0x82, high, low, ref rest @ ..] => (usize::from(u16::from_be_bytes([high, low])), rest),
            _ => return None,
        };
        let (value, rest) = rest.split_at_checked(length)?;
        let tag = *self.0.first()?;
        self.0 = rest;
        Some((tag, value))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A set with one pair.
    fn pair(identifier: [u8; 5], tag: u8, text: &[u8]) -> Vec<u8> {
        let value = |tag: u8, bytes: &[u8]| [&[tag, u8::try_from(bytes.len()).unwrap()], bytes].concat();
        let inside = [&identifier[..], &value(tag, text)].concat();
        value(SET, &value(SEQUENCE, &inside))
    }

    #[test]
    fn common_names_are_found_among_others() {
        let organization = [6, 3, 0x55, 4, 10];
        let subject =
            [pair(organization, 0x0c, b"us"), pair(COMMON_NAME, 0x13, b"host1"), pair(COMMON_NAME, 0x0c, b"host2")];
        assert_eq!(common_names(&subject.concat()).collect::<Vec<_>>(), ["host1", "host2"]);
        let wrong = [pair(COMMON_NAME, 0x04, b"bytes"), pair(COMMON_NAME, 0x0c, b"\xff")].concat();
        assert_eq!(common_names(&wrong).count(), 0);
        assert_eq!(common_names(&[SET, 0x84, 1, 1, 1, 1]).count(), 0);
    }

    proptest! {
        #[test]
        fn no_subject_makes_it_panic(subject in prop::collection::vec(any::<u8>(), 0..60)) {
            let _ = common_names(&subject).count();
        }
    }
}
