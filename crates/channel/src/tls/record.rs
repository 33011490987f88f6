//! Records of an established session: bytes sealed into them, and records opened (RFC 8446, section 5).
//!
//! The laws: each record has its number, and no number is used twice with one key; new keys are taken before the
//! cipher's limit is reached; what a peer can send without bytes for us is bounded.

use std::ops::Range;

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
/// Most bytes that one record carries.
pub(super) const PAYLOAD_MAX: usize = 1 << 14;
/// Most bytes behind a record's header.
pub(super) const BODY_MAX: usize = PAYLOAD_MAX + 256;
/// Records without bytes for us that may come one after the other: tickets, new keys, empty ones.
const IDLE_MAX: u32 = 64;
/// The word that new keys follow, without a request for the other direction's.
pub(super) const UPDATE: [u8; 5] = [0x18, 0, 0, 1, 0];
/// The word that this was all: a warning, `close_notify`.
pub(super) const CLOSE: [u8; 2] = [1, 0];

/// Where both directions get new keys from.
pub(super) trait NewKeys {
    /// The next secrets for what is sent.
    fn next_sending(&mut self) -> Result<ConnectionTrafficSecrets>;
    /// The next secrets for what is received.
    fn next_receiving(&mut self) -> Result<ConnectionTrafficSecrets>;
}

/// The cipher that both ends have agreed on, if it is one of TLS 1.3, as all are that were offered.
pub(super) fn cipher(suite: SupportedCipherSuite) -> Result<&'static Tls13CipherSuite> {
    suite.tls13().ok_or_else(|| TlsFailure::Protocol("the session is older than TLS 1.3".into()))
}

/// How many records one key seals before the word that new ones follow, which is the last.
fn limit(cipher: &Tls13CipherSuite, records: u64) -> u64 {
    cipher.common.confidentiality_limit.min(records).saturating_sub(1).max(1)
}

fn parts(secrets: ConnectionTrafficSecrets) -> Result<(AeadKey, Iv)> {
    match secrets {
        ConnectionTrafficSecrets::Aes128Gcm { key, iv }
        | ConnectionTrafficSecrets::Aes256Gcm { key, iv }
        | ConnectionTrafficSecrets::Chacha20Poly1305 { key, iv } => Ok((key, iv)),
        _ => Err(TlsFailure::Protocol("a cipher of an unknown kind".into())),
    }
}

/// One direction's place in its row of records.
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

/// Seals bytes into records.
pub(super) struct Encrypter {
    cipher: &'static Tls13CipherSuite,
    with: Box<dyn MessageEncrypter>,
    numbers: Numbers,
    /// Records that may be sealed with one key.
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

    /// The same, with a key that is renewed after so many records at the latest.
    pub(super) fn renewed_after(self, records: u64) -> Self {
        Self { limit: limit(self.cipher, records), ..self }
    }

    /// Records that may be sealed with one key, besides the word that new ones follow.
    pub(super) fn limit(&self) -> u64 {
        self.limit
    }

    /// Whether this key has sealed as much as it may.
    pub(super) fn is_used_up(&self) -> bool {
        self.numbers.next >= self.limit
    }

    /// A record of at most [`PAYLOAD_MAX`] bytes.
    pub(super) fn seal(&mut self, bytes: &[u8]) -> Result<Vec<u8>> {
        self.record(ContentType::ApplicationData, bytes)
    }

    /// The word that this was all.
    pub(super) fn close(&mut self) -> Result<Vec<u8>> {
        self.record(ContentType::Alert, &CLOSE)
    }

    /// The word that what follows is sealed with the next key, which is taken.
    pub(super) fn renew(&mut self, keys: &mut dyn NewKeys) -> Result<Vec<u8>> {
        let word = self.record(ContentType::Handshake, &UPDATE)?;
        let (key, iv) = parts(keys.next_sending()?)?;
        self.with = self.cipher.aead_alg.encrypter(key, iv);
        self.numbers.next = 0;
        Ok(word)
    }

    fn record(&mut self, typ: ContentType, bytes: &[u8]) -> Result<Vec<u8>> {
        let payload = OutboundChunks::Single(bytes);
        let message = OutboundPlainMessage { typ, version: ProtocolVersion::TLSv1_3, payload };
        let sealed = self.with.encrypt(message, self.numbers.take()?);
        Ok(sealed.map_err(|error| TlsFailure::Protocol(error.to_string()))?.encode())
    }
}

/// What a record was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Opened {
    /// Bytes for us: so many, at the beginning of its body.
    Bytes(usize),
    /// Nothing for us. The peer may want to see this end's key renewed.
    Control { renew: bool },
    /// The peer's word that nothing more comes.
    Close,
}

/// What a record says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RecordContent {
    /// All of it is bytes for us.
    Bytes,
    /// Nothing for us.
    Nothing,
    /// What follows is sealed with the next key; perhaps the same is wanted of this end.
    NewKey { answer: bool },
    /// The peer's word that nothing more comes.
    Close,
}

/// Reads records that were opened.
#[derive(Debug, Default)]
pub(super) struct Reader {
    messages: Messages,
    idle: u32,
}

impl Reader {
    /// What a record of this type says.
    pub(super) fn take(&mut self, typ: ContentType, payload: &[u8]) -> Result<RecordContent> {
        if self.is_amid() && typ != ContentType::Handshake {
            return Err(TlsFailure::Protocol("a record amid a handshake message".into()));
        }
        if typ == ContentType::ApplicationData && !payload.is_empty() {
            self.heard();
            return Ok(RecordContent::Bytes);
        }
        self.idle += 1;
        if self.idle > IDLE_MAX {
            return Err(TlsFailure::Protocol(format!("more than {IDLE_MAX} records with nothing in them")));
        }
        match typ {
            ContentType::ApplicationData => Ok(RecordContent::Nothing),
            ContentType::Alert => alert(payload),
            ContentType::Handshake => Ok(match self.messages.take(payload)? {
                PostHandshake::Nothing => RecordContent::Nothing,
                PostHandshake::NewKey { answer } => RecordContent::NewKey { answer },
            }),
            typ => Err(TlsFailure::Protocol(format!("a record of type {}", u8::from(typ)))),
        }
    }

    /// Bytes for us have come, outside of a handshake message.
    pub(super) fn heard(&mut self) {
        self.idle = 0;
    }

    /// Whether a handshake message has begun and not ended.
    pub(super) fn is_amid(&self) -> bool {
        self.messages.is_amid()
    }
}

/// Opens records.
pub(super) struct Decrypter {
    cipher: &'static Tls13CipherSuite,
    with: Box<dyn MessageDecrypter>,
    numbers: Numbers,
    reader: Reader,
    /// Whether the peer has renewed its key.
    renewed: bool,
}

impl Decrypter {
    pub(super) fn new(
        cipher: &'static Tls13CipherSuite,
        (first, secrets): (u64, ConnectionTrafficSecrets),
    ) -> Result<Self> {
        let (key, iv) = parts(secrets)?;
        let with = cipher.aead_alg.decrypter(key, iv);
        Ok(Self { cipher, with, numbers: Numbers { next: first }, reader: Reader::default(), renewed: false })
    }

    /// Opens the record with this body where it lies.
    pub(super) fn open(&mut self, body: &mut [u8], keys: &mut dyn NewKeys) -> Result<Opened> {
        let message = InboundOpaqueMessage::new(ContentType::ApplicationData, ProtocolVersion::TLSv1_2, body);
        let opened = self.with.decrypt(message, self.numbers.take()?).map_err(|error| match error {
            Error::DecryptError => TlsFailure::BadRecord,
            error => TlsFailure::Protocol(error.to_string()),
        })?;
        Ok(match self.reader.take(opened.typ, opened.payload)? {
            RecordContent::Bytes => Opened::Bytes(opened.payload.len()),
            RecordContent::Nothing => Opened::Control { renew: false },
            RecordContent::Close => Opened::Close,
            RecordContent::NewKey { answer } => {
                let (key, iv) = parts(keys.next_receiving()?)?;
                self.with = self.cipher.aead_alg.decrypter(key, iv);
                self.numbers.next = 0;
                self.renewed = true;
                Opened::Control { renew: answer }
            }
        })
    }

    /// The number of the next record, as long as it is one of the first key's.
    pub(super) fn next_of_first_key(&self) -> Option<u64> {
        (!self.renewed).then_some(self.numbers.next)
    }

    /// What the records before have left incomplete.
    pub(super) fn reader_mut(&mut self) -> &mut Reader {
        &mut self.reader
    }
}

fn alert(payload: &[u8]) -> Result<RecordContent> {
    let [_level, description] = payload else {
        return Err(TlsFailure::Protocol(format!("an alert of {} bytes", payload.len())));
    };
    match AlertDescription::from(*description) {
        AlertDescription::CloseNotify => Ok(RecordContent::Close),
        // The only other one that does not end a session (RFC 8446, section 6.1).
        AlertDescription::UserCanceled => Ok(RecordContent::Nothing),
        description => Err(TlsFailure::of_alert(description)),
    }
}

/// What handshake messages behind the handshake had to say.
#[derive(Debug, PartialEq, Eq)]
enum PostHandshake {
    Nothing,
    /// What follows is sealed with the next key; perhaps the same is wanted of this end.
    NewKey {
        answer: bool,
    },
}

/// Reads the handshake messages of an established session, which may begin and end anywhere in records. None is kept:
/// tickets are skipped.
#[derive(Debug, Default)]
struct Messages {
    /// Type and length of the one that has begun.
    head: [u8; 4],
    known: usize,
    /// Bytes of its body to come.
    left: usize,
}

impl Messages {
    /// Whether a message has begun and not ended.
    fn is_amid(&self) -> bool {
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
                // What follows it is sealed with another key (RFC 8446, section 5.1).
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

/// Where the body of the record at the beginning of `bytes` lies, if all of it is there.
pub(super) fn body(bytes: &[u8]) -> Result<Option<Range<usize>>> {
    let Some(&[typ, _, _, high, low]) = bytes.first_chunk::<HEADER>() else { return Ok(None) };
    let length = usize::from(u16::from_be_bytes([high, low]));
    if ContentType::from(typ) != ContentType::ApplicationData || length > BODY_MAX {
        return Err(TlsFailure::Protocol(format!("a record of type {typ} and {length} bytes")));
    }
    let whole = HEADER..HEADER + length;
    Ok((bytes.len() >= whole.end).then_some(whole))
}

/// How many bytes of the record at the beginning of `bytes` have yet to come; of its header, as long as that is not
/// there.
pub(super) fn missing(bytes: &[u8]) -> usize {
    let Some(&[_, _, _, high, low]) = bytes.first_chunk::<HEADER>() else { return HEADER - bytes.len() };
    (HEADER + usize::from(u16::from_be_bytes([high, low]))).saturating_sub(bytes.len())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rustls::crypto::ring::cipher_suite::{TLS13_AES_256_GCM_SHA384, TLS13_CHACHA20_POLY1305_SHA256};

    use super::*;

    /// Keys that count.
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

    fn open(decrypter: &mut Decrypter, keys: &mut Counting, mut record: Vec<u8>) -> Result<(Opened, Vec<u8>)> {
        let range = body(&record)?.unwrap();
        assert_eq!(range.end, record.len());
        let opened = decrypter.open(&mut record[range], keys)?;
        let length = if let Opened::Bytes(length) = opened { length } else { 0 };
        Ok((opened, record[HEADER..HEADER + length].to_vec()))
    }

    #[test]
    fn a_key_is_renewed_before_its_limit_and_both_ends_go_on() {
        let ((mut encrypter, mut decrypter), mut here, mut there) = (ends(), Counting::default(), Counting::default());
        encrypter.limit = 3;
        for number in 0..20_u8 {
            if encrypter.is_used_up() {
                let word = encrypter.renew(&mut here).unwrap();
                assert_eq!(open(&mut decrypter, &mut there, word).unwrap().0, Opened::Control { renew: false });
            }
            let record = encrypter.seal(&[number; 100]).unwrap();
            assert_eq!(open(&mut decrypter, &mut there, record).unwrap(), (Opened::Bytes(100), vec![number; 100]));
        }
        assert_eq!((here.sending, there.receiving), (6, 6));
        let close = encrypter.close().unwrap();
        assert_eq!(open(&mut decrypter, &mut there, close).unwrap().0, Opened::Close);
    }

    #[test]
    fn the_ciphers_own_limit_is_kept() {
        let aes = cipher(TLS13_AES_256_GCM_SHA384).unwrap();
        let secrets = ConnectionTrafficSecrets::Aes256Gcm { key: [7; 32].into(), iv: [7; 12].into() };
        let mut encrypter = Encrypter::new(aes, ((1 << 24) - 2, secrets)).unwrap();
        assert!(!encrypter.is_used_up());
        encrypter.seal(b"the last but one").unwrap();
        assert!(encrypter.is_used_up());
    }

    #[test]
    fn a_record_that_was_changed_left_out_or_sent_twice_does_not_open() {
        let ((mut encrypter, mut decrypter), mut keys) = (ends(), Counting::default());
        let (mut first, second) = (encrypter.seal(b"first").unwrap(), encrypter.seal(b"second").unwrap());
        assert_eq!(open(&mut decrypter, &mut keys, first.clone()).unwrap().1, b"first");
        assert_eq!(open(&mut decrypter, &mut keys, first.clone()).unwrap_err(), TlsFailure::BadRecord);
        let (mut encrypter, mut decrypter) = ends();
        encrypter.seal(b"left out").unwrap();
        assert_eq!(
            open(&mut decrypter, &mut keys, encrypter.seal(b"next").unwrap()).unwrap_err(),
            TlsFailure::BadRecord
        );
        let (_, mut decrypter) = ends();
        first[HEADER] ^= 1;
        assert_eq!(open(&mut decrypter, &mut keys, first).unwrap_err(), TlsFailure::BadRecord);
        drop(second);
    }

    #[test]
    fn a_peer_that_sends_empty_records_for_ever_is_refused() {
        let ((mut encrypter, mut decrypter), mut keys) = (ends(), Counting::default());
        for _ in 0..IDLE_MAX {
            let empty = encrypter.seal(&[]).unwrap();
            assert_eq!(open(&mut decrypter, &mut keys, empty).unwrap().0, Opened::Control { renew: false });
        }
        let empty = encrypter.seal(&[]).unwrap();
        assert!(matches!(open(&mut decrypter, &mut keys, empty), Err(TlsFailure::Protocol(_))));
    }

    #[test]
    fn alerts_but_two_end_the_session() {
        let ((mut encrypter, mut decrypter), mut keys) = (ends(), Counting::default());
        for (alert, opened) in [
            (&[1, 90][..], Ok(Opened::Control { renew: false })),
            (&[2, 48], Err("it has refused: this end's certificate is not issued by a CA that it trusts")),
            (&[2], Err("an alert of 1 bytes")),
            (&[1, 0], Ok(Opened::Close)),
        ] {
            let record = encrypter.record(ContentType::Alert, alert).unwrap();
            let found = open(&mut decrypter, &mut keys, record).map(|(opened, _)| opened);
            assert_eq!(found.map_err(|error| error.to_string()), opened.map_err(str::to_owned));
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
    fn what_is_missing_of_a_record_ends_where_the_next_one_begins() {
        let record = [23, 3, 3, 0, 2, 7, 8, 23, 3];
        for (have, missing_yet) in [(0, 5), (3, 2), (5, 2), (6, 1), (7, 0)] {
            assert_eq!(missing(&record[..have]), missing_yet);
        }
    }

    #[test]
    fn a_key_may_be_renewed_earlier_than_its_cipher_needs_but_not_later() {
        let aes = cipher(TLS13_AES_256_GCM_SHA384).unwrap();
        let encrypter = |records| {
            let secrets = ConnectionTrafficSecrets::Aes256Gcm { key: [7; 32].into(), iv: [7; 12].into() };
            Encrypter::new(aes, (0, secrets)).unwrap().renewed_after(records)
        };
        assert_eq!([0, 1, 100, u64::MAX].map(|records| encrypter(records).limit()), [1, 1, 99, (1 << 24) - 1]);
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
            let (mut messages, mut told, mut rest) = (Messages::default(), PostHandshake::Nothing, bytes.as_slice());
            for round in 0.. {
                if rest.is_empty() {
                    break;
                }
                prop_assert_eq!(&told, &PostHandshake::Nothing);
                let cut = cuts[round % cuts.len()].min(rest.len());
                told = messages.take(&rest[..cut]).unwrap();
                rest = &rest[cut..];
            }
            prop_assert_eq!(told, PostHandshake::NewKey { answer });
            prop_assert!(!messages.is_amid());
        }

        #[test]
        fn no_bytes_of_messages_are_too_strange(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let mut messages = Messages::default();
            let _ = messages.take(&bytes);
            let _ = body(&bytes);
        }
    }
}
