//! URIs of end points, spelled as in QEMU (QEMU docs: migration URIs), and `-`.
//!
//! The law of this module: parsing touches nothing (no name lookup, no file access), never panics, and what it returns
//! prints as a string that parses back to the same value.

use std::fmt;
use std::net::Ipv6Addr;
use std::os::fd::RawFd;
use std::path::PathBuf;
use std::str::FromStr;

use thiserror::Error;

/// The largest file offset that the kernel accepts (`off_t`), in bytes.
const OFFSET_MAX: u64 = i64::MAX as u64;

/// Separator between a file's path and its offset.
const OFFSET_KEY: &str = ",offset=";

/// One end point, as given on a command line.
///
/// | form | meaning |
/// |---|---|
/// | `tcp:HOST:PORT` | TCP; an IPv6 address is in brackets; port 0 listens on any free port |
/// | `unix:PATH` | a stream socket in the file system |
/// | `vsock:CID:PORT` | the machine with this context: 2 is the host; 4294967295 listens for all, as a port on any |
/// | `fd:N` | a descriptor that this process inherited |
/// | `file:PATH[,offset=N]` | a file, from byte N on; N is decimal, `0x` hexadecimal, or has a suffix K, M, G, T |
/// | `exec:COMMAND` | a command's standard input and output; the shell runs it |
/// | `-` | this process's own standard input and output, one direction each |
///
/// ```
/// use limosa_channel::Uri;
///
/// let uri: Uri = "tcp:[::1]:4444".parse()?;
/// assert_eq!(uri, Uri::Tcp { host: "::1".into(), port: 4444 });
/// assert_eq!(uri.to_string(), "tcp:[::1]:4444");
/// # Ok::<(), limosa_channel::UriError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Uri {
    /// A TCP end point.
    Tcp {
        /// Host name or address; an IPv6 address is held without its brackets.
        host: String,
        /// Port number; 0 lets a listener choose.
        port: u16,
    },
    /// A unix stream socket at this path.
    Unix(PathBuf),
    /// A stream socket between a host and a virtual machine (vsock(7)).
    Vsock {
        /// Context identifier of the machine: 1 is this one, 2 the host, `u32::MAX` any (to listen).
        cid: u32,
        /// Port number; `u32::MAX` lets a listener choose.
        port: u32,
    },
    /// A descriptor inherited from the parent process.
    Fd(RawFd),
    /// A file, used from `offset` on.
    File {
        /// Path of the file.
        path: PathBuf,
        /// First byte used, at most `i64::MAX`.
        offset: u64,
    },
    /// A command for `/bin/sh -c`: everything after the colon, unchanged.
    Exec(String),
    /// This process's standard input and output.
    Stdio,
}

/// The reason why a string is no [`Uri`]. The message repeats the string and names the accepted forms.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{text:?} is not an address: {reason}")]
pub struct UriError {
    text: String,
    reason: Reason,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
enum Reason {
    #[error(
        "expected tcp:HOST:PORT, unix:PATH, vsock:CID:PORT, fd:NUMBER, file:PATH[,offset=BYTES], exec:COMMAND or -"
    )]
    Form,
    #[error("tcp: needs a host and a port, as in tcp:localhost:4444")]
    TcpParts,
    #[error("the host is empty; to listen on every interface use tcp:0.0.0.0:PORT or tcp:[::]:PORT")]
    HostEmpty,
    #[error("the host has a character that is not allowed in host names")]
    HostCharacter,
    #[error("an IPv6 address must be in brackets, as in tcp:[::1]:4444")]
    HostBrackets,
    #[error("the text in brackets is not an IPv6 address")]
    HostAddress,
    #[error("the port is a decimal number from 0 to 65535")]
    Port,
    #[error("vsock: needs the decimal number of a context and of a port, as in vsock:2:10809")]
    Vsock,
    #[error("the path is empty")]
    PathEmpty,
    #[error("the path contains a NUL byte")]
    PathNul,
    #[error("the command is empty")]
    CommandEmpty,
    #[error("the command contains a NUL byte")]
    CommandNul,
    #[error("fd: takes the decimal number of an open descriptor, as in fd:3")]
    Descriptor,
    #[error("the offset is a number of bytes below 2^63: decimal, 0x hexadecimal, or with a suffix K, M, G or T")]
    Offset,
}

impl Uri {
    /// Whether it is a socket that one process listens at and others connect to.
    #[must_use]
    pub fn is_socket(&self) -> bool {
        matches!(self, Self::Tcp { .. } | Self::Unix(_) | Self::Vsock { .. })
    }
}

impl FromStr for Uri {
    type Err = UriError;

    fn from_str(text: &str) -> Result<Self, UriError> {
        let parsed = match text.split_once(':') {
            Some(("tcp", rest)) => tcp(rest),
            Some(("unix", rest)) => path(rest).map(Self::Unix),
            Some(("vsock", rest)) => vsock(rest).ok_or(Reason::Vsock),
            Some(("fd", rest)) => decimal(rest).map(Self::Fd).ok_or(Reason::Descriptor),
            Some(("file", rest)) => file(rest),
            Some(("exec", rest)) => command(rest).map(Self::Exec),
            None if text == "-" => Ok(Self::Stdio),
            _ => Err(Reason::Form),
        };
        parsed.map_err(|reason| UriError { text: text.to_owned(), reason })
    }
}

fn tcp(rest: &str) -> Result<Uri, Reason> {
    let (host, port) = if let Some(bracketed) = rest.strip_prefix('[') {
        let (host, after) = bracketed.split_once(']').ok_or(Reason::HostBrackets)?;
        // A link-local address carries its interface after a percent sign (RFC 4007, section 11).
        let (address, zone) = host.split_once('%').unwrap_or((host, "-"));
        address.parse::<Ipv6Addr>().map_err(|_| Reason::HostAddress)?;
        if zone.is_empty() || !zone.chars().all(in_host_name) {
            return Err(Reason::HostAddress);
        }
        (host, after.strip_prefix(':').ok_or(Reason::TcpParts)?)
    } else {
        let (host, port) = rest.rsplit_once(':').ok_or(Reason::TcpParts)?;
        if host.contains(':') {
            return Err(Reason::HostBrackets);
        }
        (host, port)
    };
    if host.is_empty() {
        return Err(Reason::HostEmpty);
    }
    if !rest.starts_with('[') && !host.chars().all(in_host_name) {
        return Err(Reason::HostCharacter);
    }
    Ok(Uri::Tcp { host: host.to_owned(), port: decimal(port).ok_or(Reason::Port)? })
}

fn vsock(rest: &str) -> Option<Uri> {
    let (cid, port) = rest.split_once(':')?;
    Some(Uri::Vsock { cid: decimal(cid)?, port: decimal(port)? })
}

/// Letters of any script are left to the resolver; separators, blanks and control characters never are.
fn in_host_name(c: char) -> bool {
    c.is_alphanumeric() || matches!(c, '-' | '.' | '_')
}

fn path(text: &str) -> Result<PathBuf, Reason> {
    if text.is_empty() {
        Err(Reason::PathEmpty)
    } else if text.contains('\0') {
        Err(Reason::PathNul)
    } else {
        Ok(PathBuf::from(text))
    }
}

fn command(text: &str) -> Result<String, Reason> {
    if text.trim().is_empty() {
        Err(Reason::CommandEmpty)
    } else if text.contains('\0') {
        Err(Reason::CommandNul)
    } else {
        Ok(text.to_owned())
    }
}

/// The last `,offset=` counts, so that a path that contains one can still be given (with an explicit offset).
fn file(rest: &str) -> Result<Uri, Reason> {
    let (name, offset) = match rest.rsplit_once(OFFSET_KEY) {
        Some((name, digits)) => (name, bytes(digits).ok_or(Reason::Offset)?),
        None => (rest, 0),
    };
    Ok(Uri::File { path: path(name)?, offset })
}

/// Digits only: the standard parsers also take a sign, which no form has.
fn decimal<N: FromStr>(text: &str) -> Option<N> {
    text.bytes().all(|b| b.is_ascii_digit()).then(|| text.parse().ok())?
}

fn bytes(text: &str) -> Option<u64> {
    let value = if let Some(digits) = text.strip_prefix("0x") {
        digits.bytes().all(|b| b.is_ascii_hexdigit()).then(|| u64::from_str_radix(digits, 16).ok())??
    } else {
        let shift = match text.bytes().last()? {
            b'K' => 10,
            b'M' => 20,
            b'G' => 30,
            b'T' => 40,
            _ => 0,
        };
        let digits = if shift == 0 { text } else { text.get(..text.len() - 1)? };
        decimal::<u64>(digits)?.checked_mul(1 << shift)?
    };
    (value <= OFFSET_MAX).then_some(value)
}

impl fmt::Display for Uri {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp { host, port } if host.contains(':') => write!(f, "tcp:[{host}]:{port}"),
            Self::Tcp { host, port } => write!(f, "tcp:{host}:{port}"),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
            Self::Vsock { cid, port } => write!(f, "vsock:{cid}:{port}"),
            Self::Fd(number) => write!(f, "fd:{number}"),
            Self::File { path, offset } => {
                let path = path.display().to_string();
                write!(f, "file:{path}")?;
                if *offset != 0 || path.contains(OFFSET_KEY) {
                    write!(f, "{OFFSET_KEY}{offset}")?;
                }
                Ok(())
            }
            Self::Exec(command) => write!(f, "exec:{command}"),
            Self::Stdio => f.write_str("-"),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parse(text: &str) -> Result<Uri, Reason> {
        text.parse::<Uri>().map_err(|e| e.reason)
    }

    #[test]
    fn each_form_parses() {
        assert_eq!(parse("tcp:vm-7.example:4444"), Ok(Uri::Tcp { host: "vm-7.example".into(), port: 4444 }));
        assert_eq!(parse("tcp:[fe80::1%eth0]:0"), Ok(Uri::Tcp { host: "fe80::1%eth0".into(), port: 0 }));
        assert_eq!(parse("unix:/run/a:b,c"), Ok(Uri::Unix("/run/a:b,c".into())));
        assert_eq!(parse("vsock:2:4294967295"), Ok(Uri::Vsock { cid: 2, port: u32::MAX }));
        assert_eq!(parse("fd:0"), Ok(Uri::Fd(0)));
        assert_eq!(parse("file:a"), Ok(Uri::File { path: "a".into(), offset: 0 }));
        assert_eq!(parse("file:a,offset=0x1000"), Ok(Uri::File { path: "a".into(), offset: 4096 }));
        assert_eq!(parse("file:a,offset=3M"), Ok(Uri::File { path: "a".into(), offset: 3 << 20 }));
        assert_eq!(parse("exec:ssh a 'b | c:1'"), Ok(Uri::Exec("ssh a 'b | c:1'".into())));
        assert_eq!(parse("-"), Ok(Uri::Stdio));
        assert_eq!(parse("file:a,offset=1,offset=2"), Ok(Uri::File { path: "a,offset=1".into(), offset: 2 }));
    }

    #[test]
    fn each_wrong_string_gets_its_own_reason() {
        for (text, reason) in [
            ("", Reason::Form),
            ("tcp", Reason::Form),
            ("TCP:a:1", Reason::Form),
            ("--", Reason::Form),
            ("exec:", Reason::CommandEmpty),
            ("exec: \n", Reason::CommandEmpty),
            ("exec:a\0b", Reason::CommandNul),
            ("tcp:", Reason::TcpParts),
            ("tcp:a", Reason::TcpParts),
            ("tcp:[::1]", Reason::TcpParts),
            ("tcp:[::1]4444", Reason::TcpParts),
            ("tcp::4444", Reason::HostEmpty),
            ("tcp:a b:1", Reason::HostCharacter),
            ("tcp:a\0:1", Reason::HostCharacter),
            ("tcp:::1:4444", Reason::HostBrackets),
            ("tcp:[::1:4444", Reason::HostBrackets),
            ("tcp:[]:1", Reason::HostAddress),
            ("tcp:[127.0.0.1]:1", Reason::HostAddress),
            ("tcp:[fe80::1%]:1", Reason::HostAddress),
            ("tcp:a:", Reason::Port),
            ("tcp:a:+1", Reason::Port),
            ("tcp:a:65536", Reason::Port),
            ("tcp:a:1,ipv4=on", Reason::Port),
            ("unix:", Reason::PathEmpty),
            ("unix:a\0b", Reason::PathNul),
            ("vsock:", Reason::Vsock),
            ("vsock:2", Reason::Vsock),
            ("vsock:2:", Reason::Vsock),
            ("vsock:-1:1", Reason::Vsock),
            ("vsock:2:4294967296", Reason::Vsock),
            ("vsock:2:1:1", Reason::Vsock),
            ("fd:", Reason::Descriptor),
            ("fd:-1", Reason::Descriptor),
            ("fd:name", Reason::Descriptor),
            ("fd:2147483648", Reason::Descriptor),
            ("file:", Reason::PathEmpty),
            ("file:,offset=1", Reason::PathEmpty),
            ("file:a,offset=", Reason::Offset),
            ("file:a,offset=K", Reason::Offset),
            ("file:a,offset=-1", Reason::Offset),
            ("file:a,offset=0x", Reason::Offset),
            ("file:a,offset=1é", Reason::Offset),
            ("file:a,offset=9223372036854775808", Reason::Offset),
            ("file:a,offset=99999999T", Reason::Offset),
        ] {
            assert_eq!(parse(text), Err(reason), "{text:?}");
        }
    }

    #[test]
    fn an_error_repeats_the_string_and_names_the_forms() {
        let message = "ssh:host".parse::<Uri>().unwrap_err().to_string();
        assert!(message.contains("\"ssh:host\"") && message.contains("unix:PATH"), "{message}");
    }

    fn uris() -> impl Strategy<Value = Uri> {
        let path = "[^\0]{1,24}".prop_map(PathBuf::from);
        let awkward = "(,offset=|[0-9]|/|K){1,6}".prop_map(PathBuf::from);
        prop_oneof![
            ("[a-z0-9._-]{1,20}", any::<u16>()).prop_map(|(host, port)| Uri::Tcp { host, port }),
            (any::<Ipv6Addr>(), any::<u16>()).prop_map(|(a, port)| Uri::Tcp { host: a.to_string(), port }),
            path.clone().prop_map(Uri::Unix),
            (any::<u32>(), any::<u32>()).prop_map(|(cid, port)| Uri::Vsock { cid, port }),
            (0..=RawFd::MAX).prop_map(Uri::Fd),
            (prop_oneof![path, awkward], prop_oneof![Just(0), 0..=OFFSET_MAX])
                .prop_map(|(path, offset)| Uri::File { path, offset }),
            "[^\0]{0,20}[a-z|][^\0]{0,20}".prop_map(Uri::Exec),
            Just(Uri::Stdio),
        ]
    }

    proptest! {
        #[test]
        fn what_is_printed_parses_back(uri in uris()) {
            prop_assert_eq!(uri.to_string().parse::<Uri>().unwrap(), uri);
        }

        #[test]
        fn any_string_is_refused_or_survives_a_round_trip(
            scheme in "(tcp:|unix:|vsock:|fd:|file:|exec:|-|)",
            rest in prop_oneof!["\\PC{0,40}", "[\\[\\]:%,=0-9a-fK+ -]{0,30}", "(a|,offset=|0x|9{1,20}|T){0,6}"],
        ) {
            if let Ok(uri) = format!("{scheme}{rest}").parse::<Uri>() {
                prop_assert_eq!(uri.to_string().parse::<Uri>().unwrap(), uri);
            }
        }
    }
}
