//! Certificates and keys from a folder, with the file names of QEMU's `tls-creds-x509` (QEMU docs: system/tls).
//!
//! | file | client | server |
//! |---|---|---|
//! | `ca-cert.pem` | the authorities of servers | the authorities of clients; not needed if those are not verified |
//! | `ca-crl.pem` | optional: what they revoked | likewise |
//! | `client-cert.pem`, `client-key.pem` | optional: identity of this end | |
//! | `server-cert.pem`, `server-key.pem` | | identity of this end |
//!
//! The law: an error in this end's own files is reported when they are read, before a connection is made. A file that
//! would admit every peer, or none, is an error.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use limosa_page::to_usize;
use rustls::client::verify_server_cert_signed_by_trust_anchor;
use rustls::client::{Resumption, WebPkiServerVerifier};
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::server::{ParsedCertificate, WebPkiClientVerifier};
use rustls::version::TLS13;
use rustls::{ClientConfig, Error, RootCertStore, ServerConfig};
use webpki::{BorrowedCertRevocationList, CertRevocationList, EndEntityCert, KeyUsage, anchor_from_trusted_cert};
use zeroize::Zeroizing;

use super::allowed::AllowedClients;
use super::failure::TlsFailure;
use crate::error::ChannelError;

type Result<T> = std::result::Result<T, ChannelError>;

const AUTHORITIES: &str = "ca-cert.pem";
const REVOKED: &str = "ca-crl.pem";

/// Maximum size of a file: some hundred certificates.
const FILE_MAX: u64 = 4 << 20;

/// The credentials of an encrypted channel: the identity of this end, and the authorities that it trusts. Cheap to
/// clone.
#[derive(Clone)]
pub struct Tls {
    pub(super) role: Role,
    /// The file with the authorities, for messages.
    pub(super) authorities: Arc<str>,
    /// Maximum number of records that one key encrypts.
    pub(super) key_update_after: u64,
}

#[derive(Clone)]
pub(super) enum Role {
    Client { config: Arc<ClientConfig>, name: Option<ServerName<'static>>, deferred: bool },
    Server(Arc<ServerConfig>),
}

impl Tls {
    /// The end that connects: QEMU's `endpoint=client`. `hostname` is the name that the server's certificate must have
    /// (default: the host of the URI).
    ///
    /// # Errors
    /// [`ChannelError::Credentials`] if a file is missing, unreadable or invalid; `client-cert.pem` and
    /// `client-key.pem` may both be missing.
    pub fn client(folder: impl AsRef<Path>, hostname: Option<&str>) -> Result<Self> {
        let folder = Folder::of(folder.as_ref())?;
        let name = hostname.map(|name| server_name(name).ok_or_else(|| folder.wrong("", not_a_name(name))));
        let authorities = folder.authorities()?;
        let verifier = WebPkiServerVerifier::builder_with_provider(Arc::clone(&authorities), provider())
            .with_crls(folder.revoked(&authorities, "client-cert.pem")?)
            // As GnuTLS: a certificate that no list mentions is not revoked.
            .allow_unknown_revocation_status()
            .enforce_revocation_expiration()
            .build()
            .map_err(|error| folder.wrong(REVOKED, error))?;
        let builder = ClientConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&TLS13])
            .map_err(|error| folder.wrong("", error))?
            .with_webpki_verifier(verifier);
        let mut config = match folder.own("client")? {
            None => builder.with_no_client_auth(),
            Some((chain, key)) => {
                folder.check_own("client-cert.pem", &chain, |own, above, now| {
                    let verifier = WebPkiClientVerifier::builder_with_provider(authorities, provider()).build();
                    let verifier = verifier.map_err(|error| Error::General(error.to_string()))?;
                    verifier.verify_client_cert(own, above, now).map(drop)
                })?;
                let built = builder.with_client_auth_cert(chain, key);
                built.map_err(|error| folder.wrong_key("client", &error))?
            }
        };
        config.resumption = Resumption::disabled();
        config.enable_secret_extraction = true;
        let role = Role::Client { config: Arc::new(config), name: name.transpose()?, deferred: false };
        Ok(Self::of(role, folder))
    }

    /// The end that is connected to: QEMU's `endpoint=server`. With `verify_peer`, QEMU's default, a client must
    /// present a certificate.
    ///
    /// # Errors
    /// As for [`client`](Self::client); `server-cert.pem` and `server-key.pem` are required.
    pub fn server(folder: impl AsRef<Path>, verify_peer: bool) -> Result<Self> {
        Self::server_of(Folder::of(folder.as_ref())?, verify_peer, None)
    }

    /// As [`server`](Self::server) with `verify_peer`, and a client's certificate must have one of these names: as a
    /// DNS name of its `subjectAltName`, or as the common name of its subject.
    ///
    /// # Errors
    /// As for [`server`](Self::server).
    pub fn server_for(folder: impl AsRef<Path>, clients: Vec<String>) -> Result<Self> {
        Self::server_of(Folder::of(folder.as_ref())?, true, Some(clients))
    }

    fn server_of(folder: Folder<'_>, verify_peer: bool, allowed: Option<Vec<String>>) -> Result<Self> {
        let builder = ServerConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&TLS13])
            .map_err(|error| folder.wrong("", error))?;
        let (builder, authorities) = if verify_peer {
            let authorities = folder.authorities()?;
            let verifier = WebPkiClientVerifier::builder_with_provider(Arc::clone(&authorities), provider())
                .with_crls(folder.revoked(&authorities, "server-cert.pem")?)
                .allow_unknown_revocation_status()
                .enforce_revocation_expiration()
                .build()
                .map_err(|error| folder.wrong(REVOKED, error))?;
            let verifier = match allowed {
                Some(names) => Arc::new(AllowedClients { verifier, names }),
                None => verifier,
            };
            (builder.with_client_cert_verifier(verifier), Some(authorities))
        } else {
            (builder.with_no_client_auth(), None)
        };
        let own = folder.own("server")?;
        let (chain, key) = own.ok_or_else(|| folder.lacks("server-cert.pem", "the certificate of this server"))?;
        if let Some(authorities) = &authorities {
            folder.check_own("server-cert.pem", &chain, |own, above, now| {
                let (own, algorithms) =
                    (ParsedCertificate::try_from(own)?, provider().signature_verification_algorithms);
                verify_server_cert_signed_by_trust_anchor(&own, authorities, above, now, algorithms.all)
            })?;
        }
        let built = builder.with_single_cert(chain, key);
        let mut config = built.map_err(|error| folder.wrong_key("server", &error))?;
        // Sessions of a migration are never resumed.
        config.send_tls13_tickets = 0;
        config.enable_secret_extraction = true;
        Ok(Self::of(Role::Server(Arc::new(config)), folder))
    }

    fn of(role: Role, folder: Folder<'_>) -> Self {
        let authorities = folder.file(AUTHORITIES).to_string_lossy().into();
        Self { role, authorities, key_update_after: u64::MAX }
    }

    /// Sends a `KeyUpdate` after this number of records of up to 16 KiB, if that is before the cipher's own limit.
    #[must_use]
    pub fn key_update_after(self, records: u64) -> Self {
        Self { key_update_after: records, ..self }
    }

    /// Makes a client only start the handshake when it connects, and complete it when its channel is used or
    /// [established](crate::Channel::complete_handshake). For a peer that first waits for something else from this end:
    /// stock QEMU waits for the first bytes of each multifd channel before it accepts the next.
    #[must_use]
    pub fn with_deferred_handshake(mut self) -> Self {
        if let Role::Client { deferred, .. } = &mut self.role {
            *deferred = true;
        }
        self
    }

    /// Sets the expected host name of a client, unless one was given: for a connection that becomes encrypted later
    /// ([`Channel::encrypt`](crate::Channel::encrypt)).
    #[must_use]
    pub fn to_host(&self, host: &str) -> Self {
        let mut this = self.clone();
        if let Role::Client { name, .. } = &mut this.role
            && name.is_none()
        {
            *name = server_name(host);
        }
        this
    }

    /// Whether this end is the client, which starts the handshake.
    pub(crate) fn is_client(&self) -> bool {
        matches!(self.role, Role::Client { .. })
    }

    /// Whether connecting includes the whole handshake.
    pub(super) fn is_eager(&self) -> bool {
        matches!(self.role, Role::Client { deferred: false, .. })
    }

    /// Whether the expected host name is known; always true for a server.
    pub(crate) fn has_peer_name(&self) -> bool {
        !matches!(self.role, Role::Client { name: None, .. })
    }
}

impl fmt::Debug for Tls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let side = if self.is_client() { "client" } else { "server" };
        f.debug_struct("Tls").field("endpoint", &side).field("authorities", &self.authorities).finish_non_exhaustive()
    }
}

fn provider() -> Arc<CryptoProvider> {
    Arc::new(ring::default_provider())
}

fn server_name(host: &str) -> Option<ServerName<'static>> {
    ServerName::try_from(host.to_owned()).ok()
}

fn not_a_name(name: &str) -> String {
    format!("{name:?} is neither a host's name nor an address")
}

/// Result of checking a certificate of `ca-cert.pem`.
enum AuthorityCheck {
    Good,
    Expired(TlsFailure),
    /// An end-entity certificate, not a CA's.
    Subject,
}

/// Checks a CA certificate by verifying it as an end-entity certificate: webpki checks the dates first and then rejects
/// it as a CA. webpki itself uses only the name and the key of an authority, and no dates.
fn check_authority(certificate: &CertificateDer<'_>) -> AuthorityCheck {
    // A version 1 certificate has no such extension: accepted here, or refused later with its own error.
    let Ok(as_end) = EndEntityCert::try_from(certificate) else { return AuthorityCheck::Good };
    let (now, usage) = (UnixTime::now(), KeyUsage::server_auth());
    match as_end.verify_for_usage(&[], &[], &[], now, usage, None, None).map(|_| ()) {
        Err(webpki::Error::CaUsedAsEndEntity) => AuthorityCheck::Good,
        Err(webpki::Error::CertExpired { time, not_after }) => AuthorityCheck::Expired(TlsFailure::Expired {
            ago: Duration::from_secs(time.as_secs().saturating_sub(not_after.as_secs())),
        }),
        Err(webpki::Error::CertNotValidYet { time, not_before }) => AuthorityCheck::Expired(TlsFailure::NotYetValid {
            ahead: Duration::from_secs(not_before.as_secs().saturating_sub(time.as_secs())),
        }),
        _ => AuthorityCheck::Subject,
    }
}

/// The folder with the files.
#[derive(Clone, Copy)]
struct Folder<'a>(&'a Path);

impl<'a> Folder<'a> {
    /// Checks that the folder exists.
    fn of(path: &'a Path) -> Result<Self> {
        let folder = Self(path);
        match path.metadata() {
            Ok(found) if found.is_dir() => Ok(folder),
            Ok(_) => Err(folder.wrong("", "must be a directory")),
            Err(error) => Err(folder.wrong("", error)),
        }
    }

    fn wrong_key(self, role: &str, error: &Error) -> ChannelError {
        let key = format!("{role}-key.pem");
        match error {
            Error::InconsistentKeys(_) => self.wrong(&key, format!("not the key of {role}-cert.pem")),
            error => self.wrong(&key, error),
        }
    }

    fn file(self, name: &str) -> PathBuf {
        if name.is_empty() { self.0.to_owned() } else { self.0.join(name) }
    }

    fn wrong(self, name: &str, why: impl fmt::Display) -> ChannelError {
        ChannelError::Credentials { path: self.file(name), why: why.to_string() }
    }

    /// Reports a file in which none of the `expected` objects was found: it is missing, or has none.
    fn lacks(self, name: &str, expected: &str) -> ChannelError {
        match self.file(name).metadata() {
            Err(error) => self.wrong(name, format!("must contain {expected}: {error}")),
            Ok(found) if found.len() == 0 => self.wrong(name, format!("must contain {expected}: the file is empty")),
            Ok(_) => self.wrong(name, format!("must contain {expected}: the file has none in PEM format")),
        }
    }

    /// Reads a file; `None` if it does not exist. The contents are wiped when dropped, because one of the files
    /// contains a key.
    fn read(self, name: &str) -> Result<Option<Zeroizing<Vec<u8>>>> {
        let read = || -> io::Result<Zeroizing<Vec<u8>>> {
            use std::io::Read as _;
            let file = std::fs::File::open(self.file(name))?;
            // Allocated in full: a growing vector leaves copies of the key behind.
            let length = file.metadata()?.len().min(FILE_MAX) + 64;
            let mut bytes = Zeroizing::new(Vec::with_capacity(to_usize(length)));
            file.take(FILE_MAX + 1).read_to_end(&mut bytes)?;
            Ok(bytes)
        };
        match read() {
            Ok(bytes) if bytes.len() as u64 > FILE_MAX => Err(self.wrong(name, "too long for certificates")),
            Ok(bytes) => Ok(Some(bytes)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(self.wrong(name, error)),
        }
    }

    /// Reads all objects of one kind from a file that may be missing.
    fn objects<T: PemObject>(self, name: &str) -> Result<Option<Vec<T>>> {
        let Some(bytes) = self.read(name)? else { return Ok(None) };
        let objects: std::result::Result<Vec<T>, pem::Error> = T::pem_slice_iter(&bytes).collect();
        let objects = objects.map_err(|error| self.wrong(name, format!("damaged: {error}")))?;
        Ok(Some(objects).filter(|objects| !objects.is_empty()))
    }

    fn authorities(self) -> Result<Arc<RootCertStore>> {
        let found: Option<Vec<CertificateDer<'static>>> = self.objects(AUTHORITIES)?;
        let found = found.ok_or_else(|| self.lacks(AUTHORITIES, "a CA certificate"))?;
        let mut store = RootCertStore::empty();
        let (mut good, mut expired) = (false, None);
        for certificate in found {
            match check_authority(&certificate) {
                AuthorityCheck::Good => good = true,
                AuthorityCheck::Expired(failure) => expired = Some(failure),
                AuthorityCheck::Subject => {
                    let why = "contains a certificate that is not a CA certificate (basicConstraints=CA:TRUE)";
                    return Err(self.wrong(AUTHORITIES, why));
                }
            }
            store.add(certificate).map_err(|error| self.wrong(AUTHORITIES, error))?;
        }
        match expired.filter(|_| !good) {
            None => Ok(Arc::new(store)),
            Some(expired) => Err(self.wrong(AUTHORITIES, format!("cannot verify any peer: {expired}"))),
        }
    }

    /// Reads the revocation lists. A file that exists but is no list must not admit the peers that it was meant to
    /// refuse; nor must a list of another CA. This end's own chain names the intermediate CAs.
    fn revoked(self, authorities: &RootCertStore, own: &str) -> Result<Vec<CertificateRevocationListDer<'static>>> {
        if let Some(lists) = self.objects::<CertificateRevocationListDer<'static>>(REVOKED)? {
            let chain: Vec<CertificateDer<'static>> = self.objects(own)?.unwrap_or_default();
            let between = chain.iter().filter_map(|above| anchor_from_trusted_cert(above).ok());
            let known: Vec<_> = between.chain(authorities.roots.iter().cloned()).map(|anchor| anchor.subject).collect();
            let applies = |list: &CertificateRevocationListDer<'_>| {
                // A damaged list is refused by the verifier.
                BorrowedCertRevocationList::from_der(list)
                    .map(CertRevocationList::from)
                    .map_or(true, |list| known.iter().any(|subject| subject.as_ref() == list.issuer()))
            };
            if !lists.iter().any(applies) {
                let why = format!("not issued by a CA in {AUTHORITIES}");
                return Err(self.wrong(REVOKED, why));
            }
            return Ok(lists);
        }
        match self.file(REVOKED).symlink_metadata() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
            Err(error) => Err(self.wrong(REVOKED, error)),
            Ok(_) => {
                Err(self
                    .wrong(REVOKED, "contains no list of revoked certificates (PEM); remove the file if none exists"))
            }
        }
    }

    /// Reads this end's certificate chain and its key; `None` if both are missing.
    fn own(self, role: &str) -> Result<Option<(Vec<CertificateDer<'static>>, PrivateKeyDer<'static>)>> {
        let (certificate, key) = (format!("{role}-cert.pem"), format!("{role}-key.pem"));
        let chain = self.objects(&certificate)?;
        let keys: Option<Vec<PrivateKeyDer<'static>>> = self.objects(&key)?;
        match (chain, keys.and_then(|keys| keys.into_iter().next())) {
            (Some(chain), Some(key)) => Ok(Some((chain, key))),
            (None, None) => Ok(None),
            (None, _) => Err(self.lacks(&certificate, &format!("the certificate of {key}"))),
            (_, None) => Err(self.lacks(&key, &format!("the key of {certificate}, unencrypted"))),
        }
    }

    /// Checks that a peer that trusts the same authorities would accept this end's certificate.
    fn check_own(
        self,
        name: &str,
        chain: &[CertificateDer<'_>],
        verify: impl FnOnce(&CertificateDer<'_>, &[CertificateDer<'_>], UnixTime) -> std::result::Result<(), Error>,
    ) -> Result<()> {
        let (own, above) = chain.split_first().ok_or_else(|| self.wrong(name, "contains no certificate"))?;
        verify(own, above, UnixTime::now()).map_err(|error| {
            let failure = TlsFailure::of(error, &self.file(AUTHORITIES).to_string_lossy().into());
            self.wrong(name, format!("a peer would refuse it: {failure}"))
        })
    }
}
