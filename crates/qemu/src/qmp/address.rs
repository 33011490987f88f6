//! Where a monitor listens.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use super::QmpError;

/// The address of a QMP monitor: `unix:PATH`, `tcp:HOST:PORT` or just a path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MonitorAddress {
    /// A unix socket. Only this kind can pass file descriptors.
    Unix(PathBuf),
    /// A TCP socket.
    Tcp {
        /// Name or address of the host, IPv6 addresses without brackets.
        host: String,
        /// Port.
        port: u16,
    },
}

impl FromStr for MonitorAddress {
    type Err = QmpError;

    fn from_str(text: &str) -> Result<Self, QmpError> {
        let wrong = || QmpError::Address { text: text.to_owned() };
        if let Some(rest) = text.strip_prefix("tcp:") {
            let (host, port) = rest.rsplit_once(':').ok_or_else(wrong)?;
            let host = host.strip_prefix('[').and_then(|inner| inner.strip_suffix(']')).unwrap_or(host);
            let port = port.parse().ok().filter(|port| *port != 0).ok_or_else(wrong)?;
            if host.is_empty() || host.contains(['[', ']']) {
                return Err(wrong());
            }
            return Ok(Self::Tcp { host: host.to_owned(), port });
        }
        let path = text.strip_prefix("unix:").unwrap_or(text);
        if path.is_empty() || path.contains('\0') {
            return Err(wrong());
        }
        Ok(Self::Unix(PathBuf::from(path)))
    }
}

impl fmt::Display for MonitorAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
            Self::Tcp { host, port } if host.contains(':') => write!(f, "tcp:[{host}]:{port}"),
            Self::Tcp { host, port } => write!(f, "tcp:{host}:{port}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_round_trip_and_a_bare_path_is_a_unix_socket() {
        for text in ["unix:/run/a b.sock", "tcp:localhost:4444", "tcp:[::1]:1", "tcp:10.0.0.1:65535"] {
            assert_eq!(text.parse::<MonitorAddress>().unwrap().to_string(), text);
        }
        assert_eq!("/run/q".parse::<MonitorAddress>().unwrap(), MonitorAddress::Unix("/run/q".into()));
    }

    #[test]
    fn wrong_addresses_say_which_forms_there_are() {
        for text in ["", "tcp:[[]]:444", "unix:", "tcp:host", "tcp::1", "tcp:host:0", "tcp:host:70000", "tcp:host:port"]
        {
            let message = text.parse::<MonitorAddress>().unwrap_err().to_string();
            assert!(message.contains("unix:PATH") && message.contains("tcp:HOST:PORT"), "{message}");
        }
    }
}
