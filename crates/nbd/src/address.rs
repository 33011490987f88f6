//! The address of an export, in the forms of QEMU (QEMU docs: system/qemu-block-drivers) and of NBD's own URIs
//! (NetworkBlockDevice/nbd, doc/uri.md).
//!
//! Law: an address prints as a URI that parses back to the same address.

use std::ffi::OsString;
use std::fmt;
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::PathBuf;
use std::str::FromStr;

use limosa_channel::Uri;

/// The port of servers that do not say another one.
const PORT: u16 = 10809;

/// An export of a server.
///
/// | form | meaning |
/// |---|---|
/// | `nbd://HOST[:PORT]/[EXPORT]`, `nbd+tcp:...` | TCP; an IPv6 address is in brackets |
/// | `nbd+unix:///[EXPORT]?socket=PATH` | a unix socket |
/// | `nbd+vsock://CID[:PORT]/[EXPORT]` | a socket of the machine with this context: 2 is the host |
/// | `nbd:HOST:PORT[:exportname=EXPORT]` | the same, in QEMU's older form |
/// | `nbd:unix:PATH[:exportname=EXPORT]` | |
///
/// In URIs `%XX` is a byte.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct NbdAddress {
    /// The server: TCP, a unix socket or vsock.
    pub server: Uri,
    /// The name of the export; empty: the server's default.
    pub export: String,
}

/// Why a string is no address of an export.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum AddressError {
    /// The form is another one.
    #[error(
        "expected nbd://HOST[:PORT]/EXPORT, nbd+unix:///EXPORT?socket=PATH, nbd+vsock://CID/EXPORT or nbd:HOST:PORT"
    )]
    Form,
    /// The host or the socket is missing.
    #[error("the server's host or socket is missing")]
    Server,
    /// The port is no number up to 65535.
    #[error("the port must be a number from 1 to 65535")]
    Port,
    /// The name of the export is not UTF-8.
    #[error("the name of the export is not valid UTF-8")]
    Export,
    /// The URI has a parameter that is not supported.
    #[error("after `?` there may only be socket=PATH, and that only with nbd+unix://")]
    Query,
    /// The URI asks for TLS, which needs credentials.
    #[error("URIs do not name the credentials of TLS")]
    Tls,
}

impl NbdAddress {
    /// An export of a server that listens at this TCP or unix address.
    #[must_use]
    pub fn new(server: Uri, export: impl Into<String>) -> Self {
        Self { server, export: export.into() }
    }

    /// The address of a server by host and port, without a port the protocol's own.
    ///
    /// # Errors
    /// The port is no number.
    pub fn tcp(host: &str, port: Option<&str>) -> Result<Uri, AddressError> {
        let port = port.map_or(Ok(PORT), |port| port.parse().map_err(|_| AddressError::Port))?;
        match (host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host), port) {
            ("", _) => Err(AddressError::Server),
            (_, 0) => Err(AddressError::Port),
            (host, port) => Ok(Uri::Tcp { host: host.to_owned(), port }),
        }
    }

    fn from_uri(scheme: &str, rest: &str) -> Result<Self, AddressError> {
        let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
        let mut parameters = query.split('&').filter(|parameter| !parameter.is_empty());
        let socket = if scheme == "nbd+unix" { parameters.next() } else { None };
        if parameters.next().is_some() || socket.is_some_and(|socket| !socket.starts_with("socket=")) {
            return Err(AddressError::Query);
        }
        let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
        let export = String::from_utf8(decoded(path)).map_err(|_| AddressError::Export)?;
        let server = match scheme {
            "nbd" | "nbd+tcp" => {
                // The colons of an IPv6 address are in brackets.
                let (host, port) = match authority.rsplit_once(':').filter(|(_, port)| !port.contains(']')) {
                    Some((host, port)) => (host, Some(port)),
                    None => (authority, None),
                };
                Self::tcp(host, port)?
            }
            "nbd+vsock" => {
                let (cid, port) = authority.split_once(':').map_or((authority, None), |(cid, port)| (cid, Some(port)));
                let cid = cid.parse().map_err(|_| AddressError::Server)?;
                let port = port.map_or(Ok(PORT.into()), str::parse).map_err(|_| AddressError::Port)?;
                Uri::Vsock { cid, port }
            }
            _ => {
                let socket = socket.and_then(|socket| socket.strip_prefix("socket="));
                let socket = socket.filter(|path| !path.is_empty()).ok_or(AddressError::Server)?;
                Uri::Unix(PathBuf::from(OsString::from_vec(decoded(socket))))
            }
        };
        Ok(Self { server, export })
    }

    fn from_older_form(rest: &str) -> Result<Self, AddressError> {
        let (server, export) = rest.split_once(":exportname=").unwrap_or((rest, ""));
        let server = match server.strip_prefix("unix:") {
            Some("") => return Err(AddressError::Server),
            Some(path) => Uri::Unix(path.into()),
            None => {
                let (host, port) = server.rsplit_once(':').ok_or(AddressError::Form)?;
                Self::tcp(host, Some(port))?
            }
        };
        Ok(Self { server, export: export.to_owned() })
    }
}

impl FromStr for NbdAddress {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        match text.split_once("://") {
            Some((scheme @ ("nbd" | "nbd+tcp" | "nbd+unix" | "nbd+vsock"), rest)) => Self::from_uri(scheme, rest),
            Some(("nbds" | "nbds+tcp" | "nbds+unix" | "nbds+vsock", _)) => Err(AddressError::Tls),
            _ => Self::from_older_form(text.strip_prefix("nbd:").ok_or(AddressError::Form)?),
        }
    }
}

impl fmt::Display for NbdAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let export = encoded(self.export.as_bytes());
        match &self.server {
            Uri::Tcp { host, port } => {
                let host = if host.contains(':') { format!("[{host}]") } else { host.clone() };
                write!(f, "nbd://{host}")?;
                if *port != PORT {
                    write!(f, ":{port}")?;
                }
                if export.is_empty() { Ok(()) } else { write!(f, "/{export}") }
            }
            Uri::Vsock { cid, port } => {
                write!(f, "nbd+vsock://{cid}")?;
                if *port != u32::from(PORT) {
                    write!(f, ":{port}")?;
                }
                if export.is_empty() { Ok(()) } else { write!(f, "/{export}") }
            }
            Uri::Unix(path) => {
                let slash = if export.is_empty() { "" } else { "/" };
                write!(f, "nbd+unix://{slash}{export}?socket={}", encoded(path.as_os_str().as_bytes()))
            }
            other => write!(f, "{other}"),
        }
    }
}

/// Bytes of a part of a URI. A `%` that does not begin a byte is one itself.
fn decoded(text: &str) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((first, after)) = rest.split_first() {
        let digits = after.get(..2).filter(|digits| *first == b'%' && digits.iter().all(u8::is_ascii_hexdigit));
        let digits = digits.and_then(|digits| str::from_utf8(digits).ok());
        match digits.and_then(|digits| u8::from_str_radix(digits, 16).ok()) {
            Some(byte) => {
                bytes.push(byte);
                rest = after.get(2..).unwrap_or_default();
            }
            None => {
                bytes.push(*first);
                rest = after;
            }
        }
    }
    bytes
}

/// A part of a URI: what is not plain in it becomes `%XX`.
fn encoded(bytes: &[u8]) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~/".contains(&byte);
    let of = |byte: &u8| if plain(*byte) { char::from(*byte).to_string() } else { format!("%{byte:02X}") };
    bytes.iter().map(of).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn tcp(host: &str, port: u16, export: &str) -> NbdAddress {
        NbdAddress::new(Uri::Tcp { host: host.into(), port }, export)
    }

    fn unix(path: &str, export: &str) -> NbdAddress {
        NbdAddress::new(Uri::Unix(path.into()), export)
    }

    #[test]
    fn every_form_of_an_address_is_understood() {
        for (text, address) in [
            ("nbd://host", tcp("host", 10809, "")),
            ("nbd://host/", tcp("host", 10809, "")),
            ("nbd+tcp://host:1/a/b%20c", tcp("host", 1, "a/b c")),
            ("nbd://[::1]:2/x", tcp("::1", 2, "x")),
            ("nbd://[::1]", tcp("::1", 10809, "")),
            ("nbd+unix:///x?socket=/run/a%3fb", unix("/run/a?b", "x")),
            ("nbd+unix://?socket=a", unix("a", "")),
            ("nbd+vsock://2/e", NbdAddress::new(Uri::Vsock { cid: 2, port: 10809 }, "e")),
            ("nbd+vsock://3:5", NbdAddress::new(Uri::Vsock { cid: 3, port: 5 }, "")),
            ("nbd:host:3:exportname=e", tcp("host", 3, "e")),
            ("nbd:[::1]:3", tcp("::1", 3, "")),
            ("nbd:unix:/run/s:exportname=a:b", unix("/run/s", "a:b")),
            ("nbd:unix:s", unix("s", "")),
        ] {
            assert_eq!(text.parse(), Ok(address), "{text}");
        }
        for (text, error) in [
            ("nbd:host", AddressError::Form),
            ("file:a", AddressError::Form),
            ("nbd://", AddressError::Server),
            ("nbd://:1", AddressError::Server),
            ("nbd+unix:///x", AddressError::Server),
            ("nbd:unix:", AddressError::Server),
            ("nbd:host:99999", AddressError::Port),
            ("nbd://host:0", AddressError::Port),
            ("nbd://host/%ff", AddressError::Export),
            ("nbd+vsock://host", AddressError::Server),
            ("nbd+vsock://2:x", AddressError::Port),
            ("nbds://host", AddressError::Tls),
            ("nbd://host?tls-certificates=x", AddressError::Query),
            ("nbd://host?socket=x", AddressError::Query),
            ("nbd+unix:///x?socket=a&tls-psk-file=b", AddressError::Query),
            ("nbd+unix:///x?sock=a", AddressError::Query),
        ] {
            assert_eq!(text.parse::<NbdAddress>(), Err(error), "{text}");
        }
    }

    proptest! {
        #[test]
        fn an_address_prints_as_it_is_parsed(host in "[a-z0-9.-]{1,9}|::[0-9]", port in 1..=u16::MAX, export: String, path in "\\PC{1,20}", kind in 0..3_u8) {
            let server = match kind {
                0 => Uri::Tcp { host, port },
                1 => Uri::Vsock { cid: 2 + u32::from(port), port: port.into() },
                _ => Uri::Unix(path.into()),
            };
            let address = NbdAddress::new(server, export);
            prop_assert_eq!(address.to_string().parse(), Ok(address));
        }

        #[test]
        fn no_text_makes_it_panic(text: String, rest: String) {
            let _ = (text.parse::<NbdAddress>(), format!("nbd:{rest}").parse::<NbdAddress>(), format!("nbd://{rest}").parse::<NbdAddress>());
        }
    }
}
