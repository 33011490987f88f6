//! Certificates and keys from a folder, with the file names of QEMU's `tls-creds-x509` (QEMU docs: system/tls).
//!
//! | file | client | server |
//! |---|---|---|
//! | `ca-cert.pem` | the authorities of servers | the authorities of clients; not needed if those are not verified |
//! | `ca-crl.pem` | optional: what they have revoked | likewise |
//! | `client-cert.pem`, `client-key.pem` | optional: who this end is | |
//! | `server-cert.pem`, `server-key.pem` | | who this end is |
//!
//! The law: what is wrong with this end's own files is reported when they are read, before a connection is made. A file
//! that would admit every peer, or none, is wrong.

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

use super::failure::TlsFailure;
use super::kernel::KernelTls;
use crate::error::ChannelError;

type Result<T> = std::result::Result<T, ChannelError>;

const AUTHORITIES: &str = "ca-cert.pem";
const REVOKED: &str = "ca-crl.pem";

/// Longest file that is read: some hundred certificates.
const FILE_MAX: u64 = 4 << 20;

/// What a channel needs to be encrypted: who this end is, and whom it trusts. Cheap to clone.
#[derive(Clone)]
pub struct Tls {
    pub(super) role: Role,
    /// The file with the authorities, for messages.
    pub(super) authorities: Arc<str>,
    pub(super) kernel: KernelTls,
    /// Records that one key may seal, at most.
    pub(super) renewed_after: u64,
}

#[derive(Clone)]
pub(super) enum Role {
    Client { config: Arc<ClientConfig>, name: Option<ServerName<'static>>, deferred: bool },
    Server(Arc<ServerConfig>),
}

impl Tls {
    /// The end that connects: QEMU's `endpoint=client`. `hostname` is whom the server's certificate has to name, by
    /// default the host that is connected to.
    ///
    /// # Errors
    /// [`ChannelError::Credentials`] if a file is missing, cannot be read, or is of no use; `client-cert.pem` and
    /// `client-key.pem` may be missing together.
    pub fn client(folder: impl AsRef<Path>, hostname: Option<&str>) -> Result<Self> {
        let folder = Folder::of(folder.as_ref())?;
        let name = hostname.map(|name| server_name(name).ok_or_else(|| folder.wrong("", not_a_name(name))));
        let authorities = folder.authorities()?;
        let verifier = WebPkiServerVerifier::builder_with_provider(Arc::clone(&authorities), provider())
            .with_crls(folder.revoked(&authorities, "client-cert.pem")?)
            // As GnuTLS: what no list speaks of is not revoked.
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

    /// The end that is connected to: QEMU's `endpoint=server`. With `verify_peer`, QEMU's default, a client has to show
    /// a certificate.
    ///
    /// # Errors
    /// As for [`client`](Self::client); `server-cert.pem` and `server-key.pem` have to be there.
    pub fn server(folder: impl AsRef<Path>, verify_peer: bool) -> Result<Self> {
        let folder = Folder::of(folder.as_ref())?;
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
            (builder.with_client_cert_verifier(verifier), Some(authorities))
        } else {
            (builder.with_no_client_auth(), None)
        };
        let own = folder.own("server")?;
        let (chain, key) =
            own.ok_or_else(|| folder.wrong("server-cert.pem", "a server needs it, and there is none"))?;
        if let Some(authorities) = &authorities {
            folder.check_own("server-cert.pem", &chain, |own, above, now| {
                let (own, algorithms) =
                    (ParsedCertificate::try_from(own)?, provider().signature_verification_algorithms);
                verify_server_cert_signed_by_trust_anchor(&own, authorities, above, now, algorithms.all)
            })?;
        }
        let built = builder.with_single_cert(chain, key);
        let mut config = built.map_err(|error| folder.wrong_key("server", &error))?;
        // A channel of a migration is not resumed.
        config.send_tls13_tickets = 0;
        config.enable_secret_extraction = true;
        Ok(Self::of(Role::Server(Arc::new(config)), folder))
    }

    fn of(role: Role, folder: Folder<'_>) -> Self {
        let authorities = folder.file(AUTHORITIES).to_string_lossy().into();
        Self { role, authorities, kernel: KernelTls::default(), renewed_after: u64::MAX }
    }

    /// The same, with records sealed and opened [by the kernel](KernelTls) or not.
    #[must_use]
    pub fn kernel(self, kernel: KernelTls) -> Self {
        Self { kernel, ..self }
    }

    /// The same, with keys that are renewed after so many records of up to 16 KiB, if that is earlier than their cipher
    /// needs it.
    #[must_use]
    pub fn renewed_after(self, records: u64) -> Self {
        Self { renewed_after: records, ..self }
    }

    /// The same, for a client that only begins to shake hands when it connects, and goes on when its channel is used or
    /// [established](crate::Channel::establish): for a peer that waits for something else of this end's first. Stock
    /// QEMU waits for the first bytes of each multifd channel before it looks at the next.
    #[must_use]
    pub fn deferred(mut self) -> Self {
        if let Role::Client { deferred, .. } = &mut self.role {
            *deferred = true;
        }
        self
    }

    /// The same, for a client that is to reach this host, unless it was said whom to expect.
    pub(crate) fn to_host(&self, host: &str) -> Self {
        let mut this = self.clone();
        if let Role::Client { name, .. } = &mut this.role
            && name.is_none()
        {
            *name = server_name(host);
        }
        this
    }

    /// Whether this end begins: a server waits until it is spoken to.
    pub(crate) fn is_client(&self) -> bool {
        matches!(self.role, Role::Client { .. })
    }

    /// Whether both ends are to know each other before the channel is there.
    pub(super) fn is_eager(&self) -> bool {
        matches!(self.role, Role::Client { deferred: false, .. })
    }

    /// Whether the kernel is wanted that has no TLS.
    pub(crate) fn misses_the_kernels(&self) -> bool {
        self.kernel == KernelTls::On && super::kernel::is_missing()
    }

    /// Whether it is known whom to expect, where that has to be.
    pub(crate) fn knows_its_peer(&self) -> bool {
        !matches!(self.role, Role::Client { name: None, .. })
    }
}

impl fmt::Debug for Tls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let side = if self.is_client() { "client" } else { "server" };
        f.debug_struct("Tls")
            .field("endpoint", &side)
            .field("authorities", &self.authorities)
            .field("kernel", &self.kernel)
            .finish_non_exhaustive()
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

/// What a certificate is good for among the authorities.
enum AuthorityCheck {
    Good,
    Expired(TlsFailure),
    /// It is an end's, not an authority's.
    Subject,
}

/// Looks at a certificate as if it were an end's: its dates are looked at first, and then that it is an authority's. Of
/// an authority as such its name and its key are all that is ever looked at.
fn check_authority(certificate: &CertificateDer<'_>) -> AuthorityCheck {
    // One so old that it says nothing of the kind (version 1) is taken, or refused with what is wrong with it.
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

/// Where the files are.
#[derive(Clone, Copy)]
struct Folder<'a>(&'a Path);

impl<'a> Folder<'a> {
    /// It is there.
    fn of(path: &'a Path) -> Result<Self> {
        let folder = Self(path);
        if path.is_dir() { Ok(folder) } else { Err(folder.wrong("", "no such directory")) }
    }

    fn wrong_key(self, role: &str, error: &Error) -> ChannelError {
        let key = format!("{role}-key.pem");
        match error {
            Error::InconsistentKeys(_) => self.wrong(&key, format!("it is not the key of {role}-cert.pem")),
            error => self.wrong(&key, error),
        }
    }

    fn file(self, name: &str) -> PathBuf {
        if name.is_empty() { self.0.to_owned() } else { self.0.join(name) }
    }

    fn wrong(self, name: &str, why: impl fmt::Display) -> ChannelError {
        ChannelError::Credentials { path: self.file(name), why: why.to_string() }
    }

    /// A file's contents, or nothing if there is none. They are wiped when they are dropped: one of the files has a key
    /// in it.
    fn read(self, name: &str) -> Result<Option<Zeroizing<Vec<u8>>>> {
        let read = || -> io::Result<Zeroizing<Vec<u8>>> {
            use std::io::Read as _;
            let file = std::fs::File::open(self.file(name))?;
            // With room for all of it: what grows leaves copies behind.
            let length = file.metadata()?.len().min(FILE_MAX) + 64;
            let mut bytes = Zeroizing::new(Vec::with_capacity(to_usize(length)));
            file.take(FILE_MAX + 1).read_to_end(&mut bytes)?;
            Ok(bytes)
        };
        match read() {
            Ok(bytes) if bytes.len() as u64 > FILE_MAX => Err(self.wrong(name, "it is too long to be certificates")),
            Ok(bytes) => Ok(Some(bytes)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(self.wrong(name, error)),
        }
    }

    /// All objects of a kind in a file that may be missing.
    fn objects<T: PemObject>(self, name: &str) -> Result<Option<Vec<T>>> {
        let Some(bytes) = self.read(name)? else { return Ok(None) };
        let objects: std::result::Result<Vec<T>, pem::Error> = T::pem_slice_iter(&bytes).collect();
        let objects = objects.map_err(|error| self.wrong(name, format!("it is damaged: {error}")))?;
        Ok(Some(objects).filter(|objects| !objects.is_empty()))
    }

    fn authorities(self) -> Result<Arc<RootCertStore>> {
        let found: Option<Vec<CertificateDer<'static>>> = self.objects(AUTHORITIES)?;
        let found = found.ok_or_else(|| self.wrong(AUTHORITIES, "a CA certificate is needed here"))?;
        let mut store = RootCertStore::empty();
        let (mut good, mut expired) = (false, None);
        for certificate in found {
            match check_authority(&certificate) {
                AuthorityCheck::Good => good = true,
                AuthorityCheck::Expired(failure) => expired = Some(failure),
                AuthorityCheck::Subject => {
                    let why = "one of its certificates is not a CA certificate (basicConstraints=CA:TRUE)";
                    return Err(self.wrong(AUTHORITIES, why));
                }
            }
            store.add(certificate).map_err(|error| self.wrong(AUTHORITIES, error))?;
        }
        match expired.filter(|_| !good) {
            None => Ok(Arc::new(store)),
            Some(expired) => Err(self.wrong(AUTHORITIES, format!("no peer can be verified with it: {expired}"))),
        }
    }

    /// What was taken back. A list that is there and cannot be read as one must not let those in whom it was to keep
    /// out; nor must lists of others. Those of an authority between are known by this end's own chain.
    fn revoked(self, authorities: &RootCertStore, own: &str) -> Result<Vec<CertificateRevocationListDer<'static>>> {
        if let Some(lists) = self.objects::<CertificateRevocationListDer<'static>>(REVOKED)? {
            let chain: Vec<CertificateDer<'static>> = self.objects(own)?.unwrap_or_default();
            let between = chain.iter().filter_map(|above| anchor_from_trusted_cert(above).ok());
            let known: Vec<_> = between.chain(authorities.roots.iter().cloned()).map(|anchor| anchor.subject).collect();
            let applies = |list: &CertificateRevocationListDer<'_>| {
                // One that is damaged is refused by who is to use it.
                BorrowedCertRevocationList::from_der(list)
                    .map(CertRevocationList::from)
                    .map_or(true, |list| known.iter().any(|subject| subject.as_ref() == list.issuer()))
            };
            if !lists.iter().any(applies) {
                let why = format!("it is not issued by a CA in {AUTHORITIES}");
                return Err(self.wrong(REVOKED, why));
            }
            return Ok(lists);
        }
        match self.file(REVOKED).symlink_metadata() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
            Err(error) => Err(self.wrong(REVOKED, error)),
            Ok(_) => {
                Err(self.wrong(REVOKED, "no list of revoked certificates (PEM) is in it; remove it if there is none"))
            }
        }
    }

    /// Who this end is: a chain and its key, or neither.
    fn own(self, role: &str) -> Result<Option<(Vec<CertificateDer<'static>>, PrivateKeyDer<'static>)>> {
        let (certificate, key) = (format!("{role}-cert.pem"), format!("{role}-key.pem"));
        let chain = self.objects(&certificate)?;
        let keys: Option<Vec<PrivateKeyDer<'static>>> = self.objects(&key)?;
        match (chain, keys.and_then(|keys| keys.into_iter().next())) {
            (Some(chain), Some(key)) => Ok(Some((chain, key))),
            (None, None) => Ok(None),
            (None, _) => Err(self.wrong(&certificate, format!("no certificate is here, and {key} is its key"))),
            (_, None) => Err(self.wrong(&key, "the certificate's key is needed here, not encrypted")),
        }
    }

    /// Makes sure that a peer that trusts the same authorities can accept this end's certificate.
    fn check_own(
        self,
        name: &str,
        chain: &[CertificateDer<'_>],
        verify: impl FnOnce(&CertificateDer<'_>, &[CertificateDer<'_>], UnixTime) -> std::result::Result<(), Error>,
    ) -> Result<()> {
        let (own, above) = chain.split_first().ok_or_else(|| self.wrong(name, "no certificate is here"))?;
        verify(own, above, UnixTime::now()).map_err(|error| {
            let failure = TlsFailure::of(error, &self.file(AUTHORITIES).to_string_lossy().into());
            self.wrong(name, format!("a peer would say: {failure}"))
        })
    }
}
