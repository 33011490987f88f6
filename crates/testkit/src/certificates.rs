//! Certificates for TLS, in folders as QEMU's `tls-creds-x509` has them (QEMU docs: system/tls).

use std::path::Path;

use anyhow::{Context as _, Result};
use rcgen::{
    BasicConstraints, CertificateParams, CertificateRevocationListParams, DnType, ExtendedKeyUsagePurpose, IsCa,
    Issuer, KeyIdMethod, KeyPair, KeyUsagePurpose, RevocationReason, RevokedCertParams, SerialNumber, date_time_ymd,
};

/// The end that a certificate is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TlsEnd {
    /// The end that connects.
    Client,
    /// The end that listens.
    Server,
}

impl TlsEnd {
    fn name(self) -> &'static str {
        match self {
            Self::Client => "client",
            Self::Server => "server",
        }
    }
}

/// When a certificate is valid.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Validity {
    /// From long ago until long from now.
    Now,
    /// It has ended.
    Over,
    /// It has not begun.
    Later,
}

impl Validity {
    fn years(self) -> (i32, i32) {
        match self {
            Self::Now => (2000, 2095),
            Self::Over => (2000, 2001),
            Self::Later => (2090, 2095),
        }
    }
}

/// An authority that issues certificates.
pub struct Authority {
    issuer: Issuer<'static, KeyPair>,
    pem: String,
}

impl Authority {
    /// A new one. All have the same name: their keys differ.
    ///
    /// # Errors
    /// No key can be made.
    pub fn new() -> Result<Self> {
        Self::named("limosa's tests", Validity::Now)
    }

    /// One of another name, or whose own certificate is not valid now.
    ///
    /// # Errors
    /// No key can be made.
    pub fn named(name: &str, validity: Validity) -> Result<Self> {
        let mut params = CertificateParams::new([])?;
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let (from, to) = validity.years();
        (params.not_before, params.not_after) = (date_time_ymd(from, 1, 1), date_time_ymd(to, 1, 1));
        let key = KeyPair::generate()?;
        let pem = params.self_signed(&key)?.pem();
        Ok(Self { issuer: Issuer::new(params, key), pem })
    }

    /// Writes `ca-cert.pem` into the folder.
    ///
    /// # Errors
    /// The folder cannot be written.
    pub fn trusted_in(&self, folder: &Path) -> Result<()> {
        write(folder, "ca-cert.pem", &self.pem)
    }

    /// Writes the certificate and the key of an end into the folder. It is for these hosts, by name or address.
    ///
    /// # Errors
    /// The folder cannot be written.
    pub fn issue(&self, folder: &Path, end: TlsEnd, hosts: &[&str], validity: Validity) -> Result<()> {
        let mut params = CertificateParams::new(hosts.iter().map(|&host| host.to_owned()).collect::<Vec<_>>())?;
        params.distinguished_name.push(DnType::CommonName, format!("a {}", end.name()));
        params.serial_number = Some(serial(end));
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature, KeyUsagePurpose::KeyEncipherment];
        params.extended_key_usages = vec![match end {
            TlsEnd::Client => ExtendedKeyUsagePurpose::ClientAuth,
            TlsEnd::Server => ExtendedKeyUsagePurpose::ServerAuth,
        }];
        params.use_authority_key_identifier_extension = true;
        let (from, to) = validity.years();
        (params.not_before, params.not_after) = (date_time_ymd(from, 1, 1), date_time_ymd(to, 1, 1));
        let key = KeyPair::generate()?;
        let certificate = params.signed_by(&key, &self.issuer)?;
        write(folder, &format!("{}-cert.pem", end.name()), &certificate.pem())?;
        write(folder, &format!("{}-key.pem", end.name()), &key.serialize_pem())
    }

    /// Writes `ca-crl.pem` into the folder: the certificates of all such ends are taken back.
    ///
    /// # Errors
    /// The folder cannot be written.
    pub fn revoke(&self, folder: &Path, end: TlsEnd) -> Result<()> {
        let (this_update, next_update) = (date_time_ymd(2000, 1, 1), date_time_ymd(2095, 1, 1));
        let revoked = RevokedCertParams {
            serial_number: serial(end),
            revocation_time: this_update,
            reason_code: Some(RevocationReason::KeyCompromise),
            invalidity_date: None,
        };
        let list = CertificateRevocationListParams {
            this_update,
            next_update,
            crl_number: 1_u64.into(),
            issuing_distribution_point: None,
            revoked_certs: vec![revoked],
            key_identifier_method: KeyIdMethod::Sha256,
        };
        write(folder, "ca-crl.pem", &list.signed_by(&self.issuer)?.pem()?)
    }

    /// A folder with all that both ends need, the server on this machine.
    ///
    /// # Errors
    /// The folder cannot be made.
    pub fn equip(&self, folder: &Path) -> Result<()> {
        std::fs::create_dir_all(folder).with_context(|| format!("making {}", folder.display()))?;
        self.trusted_in(folder)?;
        self.issue(folder, TlsEnd::Client, &[], Validity::Now)?;
        self.issue(folder, TlsEnd::Server, &["localhost", "127.0.0.1", "::1"], Validity::Now)
    }
}

fn serial(end: TlsEnd) -> SerialNumber {
    SerialNumber::from(match end {
        TlsEnd::Client => 1,
        TlsEnd::Server => 2,
    })
}

fn write(folder: &Path, name: &str, text: &str) -> Result<()> {
    let path = folder.join(name);
    std::fs::write(&path, text).with_context(|| format!("writing {}", path.display()))
}
