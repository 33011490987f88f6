//! The arguments of what may be encrypted.

use std::path::PathBuf;

use clap::{ArgAction, Args};
use limosa_channel::{ChannelError, Tls, Uri};
use limosa_console::on_off_parser;

/// Said where a connection cannot be encrypted.
const NOT_THERE: &str =
    "--tls-creds needs tcp:HOST:PORT or unix:PATH; encrypt commands and descriptors by their own means";

/// For the end that connects.
#[derive(Debug, Args)]
pub(crate) struct TlsClientArgs {
    /// Encrypt the connection by TLS; DIR has ca-cert.pem and, if the server verifies clients, client-cert.pem and
    /// client-key.pem (the dir of QEMU's tls-creds-x509)
    #[arg(long, value_name = "DIR")]
    pub(crate) tls_creds: Option<PathBuf>,

    /// Host name expected in the server's certificate; default: HOST of tcp:HOST:PORT (QEMU's tls-hostname)
    #[arg(long, value_name = "NAME", requires = "tls_creds")]
    pub(crate) tls_hostname: Option<String>,
}

/// For the end that listens.
#[derive(Debug, Args)]
pub(crate) struct TlsServerArgs {
    /// Accept TLS connections only; DIR has ca-cert.pem, server-cert.pem and server-key.pem (the dir of QEMU's
    /// tls-creds-x509)
    #[arg(long, value_name = "DIR")]
    pub(crate) tls_creds: Option<PathBuf>,

    /// Whether clients must present a certificate (the verify-peer of QEMU's tls-creds-x509)
    #[arg(long, value_parser = on_off_parser(), action = ArgAction::Set, value_name = "TLS_VERIFY_PEER", default_value = "on", requires = "tls_creds")]
    pub(crate) tls_verify_peer: bool,
}

impl TlsClientArgs {
    /// Returns the reason why the options contradict each other, if they do.
    pub(crate) fn contradiction(&self, uri: &Uri) -> Option<&'static str> {
        match uri {
            _ if self.tls_creds.is_none() => None,
            Uri::Tcp { .. } => None,
            Uri::Unix(_) | Uri::Vsock { .. } if self.tls_hostname.is_some() => None,
            Uri::Unix(_) => Some("--tls-creds over unix:PATH needs --tls-hostname: a path names no host"),
            Uri::Vsock { .. } => Some("--tls-creds over vsock:CID:PORT needs --tls-hostname: a number names no host"),
            _ => Some(NOT_THERE),
        }
    }

    /// The credentials, read and found to be good.
    pub(crate) fn read(&self) -> Result<Option<Tls>, ChannelError> {
        self.tls_creds.as_ref().map(|folder| Tls::client(folder, self.tls_hostname.as_deref())).transpose()
    }
}

impl TlsServerArgs {
    /// Returns the reason why the options contradict each other, if they do.
    pub(crate) fn contradiction(&self, uri: &Uri) -> Option<&'static str> {
        match uri {
            _ if self.tls_creds.is_none() => None,
            Uri::Tcp { .. } | Uri::Unix(_) | Uri::Vsock { .. } => None,
            _ => Some(NOT_THERE),
        }
    }

    /// The credentials, read and found to be good.
    pub(crate) fn read(&self) -> Result<Option<Tls>, ChannelError> {
        self.tls_creds.as_ref().map(|folder| Tls::server(folder, self.tls_verify_peer)).transpose()
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
        let server = TlsServerArgs { tls_creds: folder.clone(), tls_verify_peer: true };
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
