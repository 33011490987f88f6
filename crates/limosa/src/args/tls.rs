//! The arguments of what may be encrypted.

use std::path::PathBuf;

use clap::Args;
use limosa_channel::{ChannelError, Tls, Uri};

use super::demo::OnOffArg;

/// Said where a connection cannot be encrypted.
const NOT_THERE: &str =
    "--tls-creds is for tcp:HOST:PORT and unix:PATH; a command or a descriptor sees to its own secrecy";

/// For the end that connects.
#[derive(Debug, Args)]
pub(crate) struct TlsClientArgs {
    /// Encrypt the connection: a folder with ca-cert.pem and, if the other end verifies this one, client-cert.pem and
    /// client-key.pem (the dir of QEMU's tls-creds-x509)
    #[arg(long, value_name = "DIR")]
    pub(crate) tls_creds: Option<PathBuf>,

    /// Whom the other end's certificate has to name, if not the host of tcp:HOST:PORT (QEMU's tls-hostname)
    #[arg(long, value_name = "NAME", requires = "tls_creds")]
    pub(crate) tls_hostname: Option<String>,
}

/// For the end that listens.
#[derive(Debug, Args)]
pub(crate) struct TlsServerArgs {
    /// Take encrypted connections only: a folder with ca-cert.pem, server-cert.pem and server-key.pem (the dir of QEMU's
    /// tls-creds-x509)
    #[arg(long, value_name = "DIR")]
    pub(crate) tls_creds: Option<PathBuf>,

    /// Whether who connects has to show a certificate (the verify-peer of QEMU's tls-creds-x509)
    #[arg(long, value_enum, default_value_t = OnOffArg::On, requires = "tls_creds")]
    pub(crate) tls_verify_peer: OnOffArg,
}

impl TlsClientArgs {
    /// What does not go together.
    pub(crate) fn contradiction(&self, uri: &Uri) -> Option<&'static str> {
        match uri {
            _ if self.tls_creds.is_none() => None,
            Uri::Tcp { .. } => None,
            Uri::Unix(_) if self.tls_hostname.is_some() => None,
            Uri::Unix(_) => {
                Some("--tls-creds over unix:PATH needs --tls-hostname: the path does not say whom to expect")
            }
            _ => Some(NOT_THERE),
        }
    }

    /// The credentials, read and found to be good.
    pub(crate) fn read(&self) -> Result<Option<Tls>, ChannelError> {
        self.tls_creds.as_ref().map(|folder| Tls::client(folder, self.tls_hostname.as_deref())).transpose()
    }
}

impl TlsServerArgs {
    /// What does not go together.
    pub(crate) fn contradiction(&self, uri: &Uri) -> Option<&'static str> {
        match uri {
            _ if self.tls_creds.is_none() => None,
            Uri::Tcp { .. } | Uri::Unix(_) => None,
            _ => Some(NOT_THERE),
        }
    }

    /// The credentials, read and found to be good.
    pub(crate) fn read(&self) -> Result<Option<Tls>, ChannelError> {
        self.tls_creds.as_ref().map(|folder| Tls::server(folder, self.tls_verify_peer == OnOffArg::On)).transpose()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_connects_to_an_address_is_encrypted() {
        let folder = Some("x".into());
        let client = |tls_hostname: Option<&str>| TlsClientArgs {
            tls_creds: folder.clone(),
            tls_hostname: tls_hostname.map(str::to_owned),
        };
        let server = TlsServerArgs { tls_creds: folder.clone(), tls_verify_peer: OnOffArg::On };
        for (uri, named, unnamed, listening) in [
            ("tcp:host:1", true, true, true),
            ("unix:/a", true, false, true),
            ("fd:3", false, false, false),
            ("exec:cat", false, false, false),
            ("-", false, false, false),
        ] {
            let uri = uri.parse().unwrap();
            assert_eq!(client(Some("host")).contradiction(&uri).is_none(), named, "{uri}");
            assert_eq!(client(None).contradiction(&uri).is_none(), unnamed, "{uri}");
            assert_eq!(server.contradiction(&uri).is_none(), listening, "{uri}");
            assert_eq!(TlsClientArgs { tls_creds: None, tls_hostname: None }.contradiction(&uri), None);
        }
    }
}
