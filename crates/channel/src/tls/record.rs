//! Records of an established session: encryption and decryption (RFC 8446, section 5).
//!
//! The laws: each record has its number, and no number is used twice with one key; keys are updated before the cipher's
//! limit is reached; the number of consecutive records without data is bounded.

use std::ops::Range;

use limosa_page::invariant;
use rustls::crypto::cipher::{
    AeadKey, InboundOpaqueMessage, Iv, MessageDecrypter, MessageEncrypter, OutboundChunks, OutboundPlainMessage,
};
use rustls::{
    AlertDescription, ConnectionTrafficSecrets, ContentType, Error, HandshakeType, ProtocolVersion,
    SupportedCipherSuite, Tls13CipherSuite,
};

use super::failure::TlsFailure;

type Result<T> = std::result::Result<T, TlsFailure>;

/// Type, version and length of a record.
pub(super) const HEADER: usize = 5;
/// Maximum number of bytes in one record.
pub(super) const PAYLOAD_MAX: usize = 1 << 14;
/// Maximum number of bytes after a record's header.
pub(super) const BODY_MAX: usize = PAYLOAD_MAX + 256;
/// Maximum number of consecutive records without data: tickets, key updates, empty ones.
const IDLE_MAX: u32 = 64;
/// A `KeyUpdate` message that does not request one from the peer.
const UPDATE: [u8; 5] = [0x18, 0, 0, 1, 0];
/// The close notification: a warning alert, `close_notify`.
const CLOSE: [u8; 2] = [1, 0];

/// Source of new keys for both directions.
pub(super) trait NewKeys {
    /// Derives the next secrets for sending.
    fn next_sending(&mut self) -> Result<ConnectionTrafficSecrets>;
    /// Derives the next secrets for receiving.
    fn next_receiving(&mut self) -> Result<ConnectionTrafficSecrets>;
}

/// Returns the negotiated cipher. It is one of TLS 1.3, because no other is offered.
pub(super) fn cipher(suite: SupportedCipherSuite) -> Result<&'static Tls13CipherSuite> {
    suite.tls13().ok_or_else(|| TlsFailure::Protocol("the session is older than TLS 1.3".into()))
}

/// Returns the number of records that one key encrypts before its last one, the `KeyUpdate`.
fn limit(cipher: &Tls13CipherSuite, records: u64) -> u64 {
    cipher.common.confidentiality_limit.min(records).saturating_sub(1).max(1)
}

fn parts(secrets: ConnectionTrafficSecrets) -> Result<(AeadKey, Iv)> {
    match secrets {
        ConnectionTrafficSecrets::Aes128Gcm { key, iv }
        | ConnectionTrafficSecrets::Aes256Gcm { key, iv }
        | ConnectionTrafficSecrets::Chacha20Poly1305 { key, iv } => Ok((key, iv)),
        _ => Err(TlsFailure::Protocol("unknown cipher".into())),
    }
}

/// The record number of one direction.
struct Numbers {
    next: u64,
}

impl Numbers {
    fn take(&mut self) -> Result<u64> {
        let number = self.next;
        self.next = number.checked_add(1).ok_or_else(|| TlsFailure::Protocol("no record number is left".into()))?;
        Ok(number)
    }
}

/// Encrypts bytes into records.
pub(super) struct Encrypter {
    cipher: &'static Tls13CipherSuite,
    with: Box<dyn MessageEncrypter>,
    numbers: Numbers,
    /// Records that one key may encrypt.
    limit: u64,
}

impl Encrypter {
    pub(super) fn new(
        cipher: &'static Tls13CipherSuite,
        (first, secrets): (u64, ConnectionTrafficSecrets),
    ) -> Result<Self> {
        let (key, iv) = parts(secrets)?;
        let with = cipher.aead_alg.encrypter(key, iv);
        Ok(Self { cipher, with, numbers: Numbers { next: first }, limit: limit(cipher, u64::MAX) })
    }

    /// Updates the key after this number of records at the latest.
    pub(super) fn key_update_after(self, records: u64) -> Self {
        Self { limit: limit(self.cipher, records), ..self }
    }

    /// Whether this key has reached its limit.
    pub(super) fn is_used_up(&self) -> bool {
        self.numbers.next >= self.limit
    }

    /// Encrypts a record of at most [`PAYLOAD_MAX`] bytes.
    pub(super) fn encrypt(&mut self, bytes: &[u8]) -> Result<Vec<u8>> {
        self.record(ContentType::ApplicationData, bytes)
    }

    /// Encrypts the close notification.
    pub(super) fn close(&mut self) -> Result<Vec<u8>> {
        self.record(ContentType::Alert, &CLOSE)
    }

    /// Encrypts a `KeyUpdate`, and changes to the next key.
    pub(super) fn update_key(&mut self, keys: &mut dyn NewKeys) -> Result<Vec<u8>> {
        let record = self.record(ContentType::Handshake, &UPDATE)?;
        let (key, iv) = parts(keys.next_sending()?)?;
        self.with = self.cipher.aead_alg.encrypter(key, iv);
        self.numbers.next = 0;
        Ok(record)
    }

    fn record(&mut self, typ: ContentType, bytes: &[u8]) -> Result<Vec<u8>> {
        let payload = OutboundChunks::Single(bytes);
        let message = OutboundPlainMessage { typ, version: ProtocolVersion::TLSv1_3, payload };
        let encrypted = self.with.encrypt(message, self.numbers.take()?);
        Ok(encrypted.map_err(|error| TlsFailure::Protocol(error.to_string()))?.encode())
    }
}

/// Content of a decrypted record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Decrypted {
    /// Data: the number of bytes at the beginning of its body.
    Bytes(usize),
    /// No data. The peer may request a key update of this end.
    Control { update_key: bool },
    /// The close notification.
    Close,
}

/// Decrypts records.
pub(super) struct Decrypter {
    cipher: &'static Tls13CipherSuite,
    with: Box<dyn MessageDecrypter>,
    numbers: Numbers,
    messages: Messages,
    /// Consecutive records without data.
    idle: u32,
}

impl Decrypter {
    pub(super) fn new(
        cipher: &'static Tls13CipherSuite,
        (first, secrets): (u64, ConnectionTrafficSecrets),
    ) -> Result<Self> {
        let (key, iv) = parts(secrets)?;
        let with = cipher.aead_alg.decrypter(key, iv);
        Ok(Self { cipher, with, numbers: Numbers { next: first }, messages: Messages::default(), idle: 0 })
    }

    /// Decrypts the record with this body in place.
    pub(super) fn decrypt(&mut self, body: &mut [u8], keys: &mut dyn NewKeys) -> Result<Decrypted> {
        let length = body.len();
        let message = InboundOpaqueMessage::new(ContentType::ApplicationData, ProtocolVersion::TLSv1_2, body);
        let decrypted = self.with.decrypt(message, self.numbers.take()?).map_err(|error| match error {
            Error::DecryptError => TlsFailure::BadRecord,
            error => TlsFailure::Protocol(error.to_string()),
        })?;
        let (typ, payload) = (decrypted.typ, decrypted.payload);
        invariant(payload.len() <= length, "a decrypted record is no longer than its ciphertext")?;
        if self.messages.is_inside_message() && typ != ContentType::Handshake {
            return Err(TlsFailure::Protocol("a record inside a handshake message".into()));
        }
        if typ == ContentType::ApplicationData && !payload.is_empty() {
            self.idle = 0;
            return Ok(Decrypted::Bytes(payload.len()));
        }
        self.idle += 1;
        if self.idle > IDLE_MAX {
            return Err(TlsFailure::Protocol(format!("more than {IDLE_MAX} consecutive records without data")));
        }
        match typ {
            ContentType::ApplicationData => Ok(Decrypted::Control { update_key: false }),
            ContentType::Alert => alert(payload),
            ContentType::Handshake => match self.messages.take(payload)? {
                PostHandshake::Nothing => Ok(Decrypted::Control { update_key: false }),
                PostHandshake::NewKey { answer } => {
                    let (key, iv) = parts(keys.next_receiving()?)?;
                    self.with = self.cipher.aead_alg.decrypter(key, iv);
                    self.numbers.next = 0;
                    Ok(Decrypted::Control { update_key: answer })
                }
            },
            typ => Err(TlsFailure::Protocol(format!("a record of type {}", u8::from(typ)))),
        }
    }
}

fn alert(payload: &[u8]) -> Result<Decrypted> {
    let [_level, description] = payload else {
        return Err(TlsFailure::Protocol(format!("an alert of {} bytes", payload.len())));
    };
    match AlertDescription::from(*description) {
        AlertDescription::CloseNotify => Ok(Decrypted::Close),
        // The only other one that does not end a session (RFC 8446, section 6.1).
        AlertDescription::UserCanceled => Ok(Decrypted::Control { update_key: false }),
        description => Err(TlsFailure::of_alert(description)),
    }
}

/// Meaning of handshake messages after the handshake.
#[derive(Debug, PartialEq, Eq)]
enum PostHandshake {
    Nothing,
    /// A `KeyUpdate`: the next key follows. `answer`: the peer requests one of this end too.
    NewKey {
        answer: bool,
    },
}

/// Reads the handshake messages of an established session, which may begin and end anywhere in records. Tickets are
/// skipped.
#[derive(Debug, Default)]
struct Messages {
    /// Type and length of the current message.
    head: [u8; 4],
    known: usize,
    /// Bytes of its body that are missing.
    left: usize,
}

impl Messages {
    /// Whether a message is incomplete.
    fn is_inside_message(&self) -> bool {
        self.known != 0
    }

    fn take(&mut self, mut bytes: &[u8]) -> Result<PostHandshake> {
        while let Some((&first, rest)) = bytes.split_first() {
            if let Some(place) = self.head.get_mut(self.known) {
                *place = first;
                self.known += 1;
                bytes = rest;
                if self.known < self.head.len() {
                    continue;
                }
                let [typ, a, b, c] = self.head;
                self.left = u32::from_be_bytes([0, a, b, c]) as usize;
                match HandshakeType::from(typ) {
                    HandshakeType::NewSessionTicket => {}
                    HandshakeType::KeyUpdate if self.left == 1 => {}
                    _ => {
                        let what = format!("a handshake message of type {typ} and {} bytes", self.left);
                        return Err(TlsFailure::Protocol(what));
                    }
                }
            } else if HandshakeType::from(self.head[0]) == HandshakeType::KeyUpdate {
                // The next record has another key (RFC 8446, section 5.1), so nothing may follow in this one.
                if first > 1 || !rest.is_empty() {
                    return Err(TlsFailure::Protocol("an invalid key update".into()));
                }
                (self.known, self.left) = (0, 0);
                return Ok(PostHandshake::NewKey { answer: first == 1 });
            } else {
                let skipped = self.left.min(bytes.len());
                self.left -= skipped;
                bytes = &bytes[skipped..];
            }
            if self.known == self.head.len() && self.left == 0 {
                self.known = 0;
            }
        }
        Ok(PostHandshake::Nothing)
    }
}

/// Returns the range of the body of the record at the beginning of `bytes`; `None` if it is incomplete.
pub(super) fn body(bytes: &[u8]) -> Result<Option<Range<usize>>> {
    let Some(&[typ, _, _, high, low]) = bytes.first_chunk::<HEADER>() else { return Ok(None) };
    let length = usize::from(u16::from_be_bytes([high, low]));
    if ContentType::from(typ) != ContentType::ApplicationData || length > BODY_MAX {
        return Err(TlsFailure::Protocol(format!("a record of type {typ} and {length} bytes")));
    }
    let whole = HEADER..HEADER + length;
    Ok((bytes.len() >= whole.end).then_some(whole))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rustls::crypto::ring::cipher_suite::{TLS13_AES_256_GCM_SHA384, TLS13_CHACHA20_POLY1305_SHA256};

    use super::*;

    /// Counts key updates.
    #[derive(Default)]
    struct Counting {
        sending: u8,
        receiving: u8,
    }

    fn secrets(number: u8) -> ConnectionTrafficSecrets {
        ConnectionTrafficSecrets::Chacha20Poly1305 { key: [number; 32].into(), iv: [number; 12].into() }
    }

    impl NewKeys for Counting {
        fn next_sending(&mut self) -> Result<ConnectionTrafficSecrets> {
            self.sending += 1;
            Ok(secrets(self.sending))
        }

        fn next_receiving(&mut self) -> Result<ConnectionTrafficSecrets> {
            self.receiving += 1;
            Ok(secrets(self.receiving))
        }
    }

    fn ends() -> (Encrypter, Decrypter) {
        let cipher = cipher(TLS13_CHACHA20_POLY1305_SHA256).unwrap();
        (Encrypter::new(cipher, (0, secrets(0))).unwrap(), Decrypter::new(cipher, (0, secrets(0))).unwrap())
    }

    fn decrypt(decrypter: &mut Decrypter, keys: &mut Counting, mut record: Vec<u8>) -> Result<(Decrypted, Vec<u8>)> {
        let range = body(&record)?.unwrap();
        assert_eq!(range.end, record.len());
        let decrypted = decrypter.decrypt(&mut record[range], keys)?;
        let length = if let Decrypted::Bytes(length) = decrypted { length } else { 0 };
        Ok((decrypted, record[HEADER..HEADER + length].to_vec()))
    }

    /// A cipher that decrypts more than there is.
    #[cfg(debug_assertions)]
    struct Longer;

    #[cfg(debug_assertions)]
    impl MessageDecrypter for Longer {
        fn decrypt<'a>(
            &mut self,
            message: InboundOpaqueMessage<'a>,
            _number: u64,
        ) -> std::result::Result<rustls::crypto::cipher::InboundPlainMessage<'a>, Error> {
            let (typ, version, payload) = (ContentType::ApplicationData, message.version, &[7; 9][..]);
            Ok(rustls::crypto::cipher::InboundPlainMessage { typ, version, payload })
        }
    }

    #[test]
    #[cfg(debug_assertions)]
    #[should_panic(expected = "a decrypted record is no longer than its ciphertext")]
    fn a_record_that_grows_when_it_is_decrypted_is_a_broken_invariant() {
        let (_, mut decrypter) = ends();
        decrypter.with = Box::new(Longer);
        let _ = decrypter.decrypt(&mut [0; 8], &mut Counting::default());
    }

    #[test]
    fn a_key_is_renewed_before_its_limit_and_both_ends_go_on() {
        let ((mut encrypter, mut decrypter), mut here, mut there) = (ends(), Counting::default(), Counting::default());
        encrypter.limit = 3;
        for number in 0..20_u8 {
            if encrypter.is_used_up() {
                let record = encrypter.update_key(&mut here).unwrap();
                assert_eq!(
                    decrypt(&mut decrypter, &mut there, record).unwrap().0,
                    Decrypted::Control { update_key: false }
                );
            }
            let record = encrypter.encrypt(&[number; 100]).unwrap();
            assert_eq!(
                decrypt(&mut decrypter, &mut there, record).unwrap(),
                (Decrypted::Bytes(100), vec![number; 100])
            );
        }
        assert_eq!((here.sending, there.receiving), (6, 6));
        let close = encrypter.close().unwrap();
        assert_eq!(decrypt(&mut decrypter, &mut there, close).unwrap().0, Decrypted::Close);
    }

    #[test]
    fn the_ciphers_own_limit_is_kept() {
        let aes = cipher(TLS13_AES_256_GCM_SHA384).unwrap();
        let secrets = ConnectionTrafficSecrets::Aes256Gcm { key: [7; 32].into(), iv: [7; 12].into() };
        let mut encrypter = Encrypter::new(aes, ((1 << 24) - 2, secrets)).unwrap();
        assert!(!encrypter.is_used_up());
        encrypter.encrypt(b"the last but one").unwrap();
        assert!(encrypter.is_used_up());
    }

    #[test]
    fn a_record_that_was_changed_left_out_or_sent_twice_does_not_open() {
        let ((mut encrypter, mut decrypter), mut keys) = (ends(), Counting::default());
        let (mut first, second) = (encrypter.encrypt(b"first").unwrap(), encrypter.encrypt(b"second").unwrap());
        assert_eq!(decrypt(&mut decrypter, &mut keys, first.clone()).unwrap().1, b"first");
        assert_eq!(decrypt(&mut decrypter, &mut keys, first.clone()).unwrap_err(), TlsFailure::BadRecord);
        let (mut encrypter, mut decrypter) = ends();
        encrypter.encrypt(b"left out").unwrap();
        assert_eq!(
            decrypt(&mut decrypter, &mut keys, encrypter.encrypt(b"next").unwrap()).unwrap_err(),
            TlsFailure::BadRecord
        );
        let (_, mut decrypter) = ends();
        first[HEADER] ^= 1;
        assert_eq!(decrypt(&mut decrypter, &mut keys, first).unwrap_err(), TlsFailure::BadRecord);
        drop(second);
    }

    #[test]
    fn a_peer_that_sends_empty_records_for_ever_is_refused() {
        let ((mut encrypter, mut decrypter), mut keys) = (ends(), Counting::default());
        for _ in 0..IDLE_MAX {
            let empty = encrypter.encrypt(&[]).unwrap();
            assert_eq!(decrypt(&mut decrypter, &mut keys, empty).unwrap().0, Decrypted::Control { update_key: false });
        }
        let empty = encrypter.encrypt(&[]).unwrap();
        assert!(matches!(decrypt(&mut decrypter, &mut keys, empty), Err(TlsFailure::Protocol(_))));
    }

    #[test]
    fn alerts_but_two_end_the_session() {
        let ((mut encrypter, mut decrypter), mut keys) = (ends(), Counting::default());
        for (alert, decrypted) in [
            (&[1, 90][..], Ok(Decrypted::Control { update_key: false })),
            (&[2, 48], Err("it refused: this end's certificate is not issued by a CA that it trusts")),
            (&[2], Err("an alert of 1 bytes")),
            (&[1, 0], Ok(Decrypted::Close)),
        ] {
            let record = encrypter.record(ContentType::Alert, alert).unwrap();
            let found = decrypt(&mut decrypter, &mut keys, record).map(|(decrypted, _)| decrypted);
            assert_eq!(found.map_err(|error| error.to_string()), decrypted.map_err(str::to_owned));
        }
    }

    #[test]
    fn a_header_that_no_peer_would_send_is_refused_before_its_body_is_waited_for() {
        assert_eq!(body(&[23, 3, 3, 0]), Ok(None));
        assert_eq!(body(&[23, 3, 3, 0, 2, 7]), Ok(None));
        assert_eq!(body(&[23, 3, 3, 0, 1, 7, 8]), Ok(Some(5..6)));
        assert!(body(&[23, 3, 3, 0x41, 1]).is_err());
        assert!(body(b"QEVM\0").is_err() && body(&[22, 3, 3, 0, 1]).is_err());
    }

    #[test]
    fn a_key_may_be_renewed_earlier_than_its_cipher_needs_but_not_later() {
        let aes = cipher(TLS13_AES_256_GCM_SHA384).unwrap();
        let encrypter = |records| {
            let secrets = ConnectionTrafficSecrets::Aes256Gcm { key: [7; 32].into(), iv: [7; 12].into() };
            Encrypter::new(aes, (0, secrets)).unwrap().key_update_after(records)
        };
        assert_eq!([0, 1, 100, u64::MAX].map(|records| encrypter(records).limit), [1, 1, 99, (1 << 24) - 1]);
    }

    proptest! {
        #[test]
        fn messages_are_recognized_wherever_records_split_them(
            tickets in prop::collection::vec(0..300_usize, 0..5),
            answer in any::<bool>(),
            cuts in prop::collection::vec(1..40_usize, 1..10),
        ) {
            let mut bytes = Vec::new();
            for length in tickets {
                bytes.extend([4, 0]);
                bytes.extend(u16::try_from(length).unwrap().to_be_bytes());
                bytes.extend(vec![0x18; length]);
            }
            bytes.extend([0x18, 0, 0, 1, u8::from(answer)]);
            let (mut messages, mut found, mut rest) = (Messages::default(), PostHandshake::Nothing, bytes.as_slice());
            for round in 0.. {
                if rest.is_empty() {
                    break;
                }
                prop_assert_eq!(&found, &PostHandshake::Nothing);
                let cut = cuts[round % cuts.len()].min(rest.len());
                found = messages.take(&rest[..cut]).unwrap();
                rest = &rest[cut..];
            }
            prop_assert_eq!(found, PostHandshake::NewKey { answer });
            prop_assert!(!messages.is_inside_message());
        }

        #[test]
        fn no_bytes_of_messages_are_too_strange(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let mut messages = Messages::default();
            let _ = messages.take(&bytes);
            let _ = body(&bytes);
        }
    }
}
