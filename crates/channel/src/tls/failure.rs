//! What can go wrong with TLS, in words that say what to do about it.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use rustls::pki_types::UnixTime;
use rustls::{AlertDescription, CertificateError, Error, InvalidMessage};
use thiserror::Error;

/// Why a TLS session did not come about, or broke off. Its `Display` goes on behind the peer's name.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum TlsFailure {
    /// The peer's certificate leads to no authority that this end trusts.
    #[error("its certificate is not issued by a CA in {authorities}; both ends need certificates of the same CA")]
    UnknownAuthority {
        /// The file with the authorities.
        authorities: Arc<str>,
    },
    /// The peer's certificate is not valid any more.
    #[error("its certificate has expired ({} ago); it needs a new one", Span(*ago))]
    Expired {
        /// Since when.
        ago: Duration,
    },
    /// The peer's certificate is not valid yet.
    #[error("its certificate is not valid yet (in {}); check the clocks of both machines", Span(*ahead))]
    NotYetValid {
        /// For how long.
        ahead: Duration,
    },
    /// The peer's certificate is of somebody else.
    #[error("its certificate is for {}, not for {expected}; if that is correct, set tls-hostname", names(presented))]
    WrongName {
        /// Who was to be reached.
        expected: String,
        /// Whom the certificate names.
        presented: Vec<String>,
    },
    /// The peer's certificate was taken back by its authority.
    #[error("its certificate has been revoked; it needs a new one")]
    Revoked,
    /// The peer has no certificate, and was asked for one.
    #[error("it has shown no certificate; it needs client-cert.pem and client-key.pem of this end's authority")]
    NoCertificate,
    /// Anything else that is wrong with the peer's certificate.
    #[error("its certificate is invalid: {0}")]
    BadCertificate(String),
    /// The peer's words.
    #[error("it has refused: {0}")]
    Refused(String),
    /// The peer does not speak TLS.
    #[error("its data is not TLS; enable TLS there as well (tls-creds)")]
    NotTls,
    /// The peer closed the connection instead of shaking hands.
    #[error(
        "it has closed the connection in the TLS handshake; its own log says why: it may not use TLS, or not trust this \
         end's certificate"
    )]
    Ended,
    /// The handshake took too long.
    #[error("no TLS handshake within {0:?}; it may not use TLS")]
    Late(Duration),
    /// The connection ended, and the peer had not said that this was the end.
    #[error("the connection ended without a TLS close notification{}", early(*first))]
    Truncated {
        /// Not a byte had come: many a server refuses a client's certificate so.
        first: bool,
    },
    /// The connection was reset. That is no end that anybody has meant: a peer that goes with bytes unread does so, and whoever
    /// stands between the two ends can.
    #[error("the connection was reset without a TLS close notification{}", early(*first))]
    Reset {
        /// As for [`Truncated`](Self::Truncated).
        first: bool,
    },
    /// A record that the peer cannot have sent so.
    #[error("a record does not open: it was changed on its way")]
    BadRecord,
    /// The kernel was to seal and open records, and cannot.
    #[error("in the kernel: {0}")]
    Kernel(String),
    /// The two ends have nothing in common, or one breaks TLS's rules.
    #[error("{0}")]
    Protocol(String),
}

impl TlsFailure {
    /// What rustls says of the peer. `authorities` is the file that this end trusts.
    pub(super) fn of(error: Error, authorities: &Arc<str>) -> Self {
        match error {
            Error::InvalidCertificate(error) => Self::of_certificate(error, authorities),
            Error::NoCertificatesPresented => Self::NoCertificate,
            Error::AlertReceived(alert) => Self::of_alert(alert),
            Error::InvalidMessage(InvalidMessage::InvalidContentType | InvalidMessage::UnknownProtocolVersion) => {
                Self::NotTls
            }
            Error::DecryptError => Self::BadRecord,
            error => Self::Protocol(error.to_string()),
        }
    }

    fn of_certificate(error: CertificateError, authorities: &Arc<str>) -> Self {
        let between =
            |later: UnixTime, earlier: UnixTime| Duration::from_secs(later.as_secs().saturating_sub(earlier.as_secs()));
        match error {
            // What a signature of an authority of the same name does not open is of another one.
            CertificateError::UnknownIssuer | CertificateError::BadSignature => {
                Self::UnknownAuthority { authorities: Arc::clone(authorities) }
            }
            CertificateError::ExpiredContext { time, not_after } => Self::Expired { ago: between(time, not_after) },
            CertificateError::NotValidYetContext { time, not_before } => {
                Self::NotYetValid { ahead: between(not_before, time) }
            }
            CertificateError::NotValidForNameContext { expected, presented } => {
                // As rustls writes them: DnsName("host"), IpAddress(192.0.2.7).
                let inside =
                    |name: &String| name.split_once('(').map_or(name.as_str(), |(_, inside)| inside).to_owned();
                let presented = presented.iter().map(inside).map(|name| name.replace(['"', ')'], "")).collect();
                Self::WrongName { expected: expected.to_str().into_owned(), presented }
            }
            CertificateError::Revoked => Self::Revoked,
            error => Self::BadCertificate(error.to_string()),
        }
    }

    /// The peer's word that it will not go on.
    pub(super) fn of_alert(alert: AlertDescription) -> Self {
        Self::Refused(match alert {
            AlertDescription::UnknownCA => "this end's certificate is not issued by a CA that it trusts".into(),
            AlertDescription::CertificateRequired => {
                "it requires a certificate, and this end has none; put client-cert.pem and client-key.pem next to ca-cert.pem"
                    .into()
            }
            // An authority of the same name, and another key.
            AlertDescription::DecryptError => "it cannot verify this end's certificate; both ends need certificates of the \
                same CA".into(),
            AlertDescription::CertificateExpired => "this end's certificate has expired".into(),
            AlertDescription::CertificateRevoked => "this end's certificate has been revoked".into(),
            AlertDescription::BadCertificate
            | AlertDescription::CertificateUnknown
            | AlertDescription::UnsupportedCertificate => "it does not accept this end's certificate".into(),
            AlertDescription::ProtocolVersion => "it has no TLS 1.3".into(),
            AlertDescription::HandshakeFailure => "it has no cipher in common with this end".into(),
            alert => format!("alert {}", u8::from(alert)),
        })
    }
}

impl From<TlsFailure> for io::Error {
    fn from(failure: TlsFailure) -> Self {
        let kind = match failure {
            TlsFailure::Truncated { .. } | TlsFailure::Reset { .. } | TlsFailure::Ended => io::ErrorKind::UnexpectedEof,
            _ => io::ErrorKind::InvalidData,
        };
        Self::new(kind, failure)
    }
}

/// A length of time as a person says it.
struct Span(Duration);

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seconds = self.0.as_secs();
        let (count, unit) = match seconds {
            0..120 => (seconds, "second"),
            120..7200 => (seconds / 60, "minute"),
            7200..172_800 => (seconds / 3600, "hour"),
            _ => (seconds / 86_400, "day"),
        };
        write!(f, "{count} {unit}{}", if count == 1 { "" } else { "s" })
    }
}

fn names(presented: &[String]) -> String {
    if presented.is_empty() { "no name".into() } else { presented.join(", ") }
}

fn early(first: bool) -> &'static str {
    if first {
        ", and not a byte has come: it may not trust this end's certificate; its own log says why"
    } else {
        " (close_notify): it was cut"
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_failure_is_one_line() {
        let some = [
            TlsFailure::UnknownAuthority { authorities: "/etc/pki/qemu/ca-cert.pem".into() },
            TlsFailure::Expired { ago: Duration::from_secs(3 * 86_400) },
            TlsFailure::WrongName { expected: "b".into(), presented: vec![] },
            TlsFailure::Ended,
            TlsFailure::Truncated { first: true },
            TlsFailure::Reset { first: false },
            TlsFailure::of_alert(AlertDescription::CertificateRequired),
        ];
        for failure in some {
            let line = failure.to_string();
            assert!(!line.contains('\n') && !line.contains("  "), "{line}");
        }
    }

    #[test]
    fn a_length_of_time_is_said_in_the_unit_that_fits() {
        for (seconds, said) in [(1, "1 second"), (90, "90 seconds"), (7199, "119 minutes"), (3 * 86_400, "3 days")] {
            assert_eq!(Span(Duration::from_secs(seconds)).to_string(), said);
        }
    }
}
