//! Credentials of TLS, for images at NBD servers.

use std::path::PathBuf;

use anyhow::Context as _;
use limosa_channel::Tls;

use super::Properties;

/// The credentials of a client: `tls-creds-x509,id=NAME,dir=PATH[,endpoint=client]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TlsFolder {
    pub(super) id: String,
    folder: PathBuf,
}

impl TlsFolder {
    /// Takes its properties.
    ///
    /// # Errors
    /// The reason.
    pub(super) fn new(id: &str, properties: &mut Properties) -> Result<Self, String> {
        let folder =
            properties.remove("dir").ok_or_else(|| format!("tls-creds-x509 {id}: needs a folder: dir=PATH"))?;
        for (name, value, why) in [
            ("endpoint", "client", "images are opened by a client"),
            ("verify-peer", "on", "an unverified server could be anyone"),
            ("sanity-check", "on", "certificates are always checked"),
        ] {
            let given = properties.remove(name);
            let is_it = |given: &String| given == value || (value == "on" && given == "yes");
            if let Some(other) = given.filter(|given| !is_it(given)) {
                return Err(format!("tls-creds-x509 {id}: {name}={other}: not supported: {why}"));
            }
        }
        Ok(Self { id: id.to_owned(), folder: folder.into() })
    }

    /// Reads the certificates and the key.
    pub(super) fn read(&self) -> anyhow::Result<Tls> {
        Tls::client(&self.folder, None).with_context(|| format!("--object: tls-creds-x509 {}", self.id))
    }
}
