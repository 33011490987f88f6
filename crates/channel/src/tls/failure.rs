//! Errors of TLS.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use limosa_page::BrokenInvariant;
use rustls::pki_types::UnixTime;
use rustls::{AlertDescription, CertificateError, Error, InvalidMessage};
use thiserror::Error;

/// The reason why a TLS session was not established, or ended. Its `Display` follows the peer's name.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum TlsFailure {
    /// No trusted authority issued the peer's certificate.
    #[error("its certificate is not issued by a CA in {authorities}")]
    UnknownAuthority {
        /// The file with the authorities.
        authorities: Arc<str>,
    },
    /// The peer's certificate has expired.
    #[error("its certificate has expired ({} ago)", Span(*ago))]
    Expired {
        /// Time since then.
        ago: Duration,
    },
    /// The peer's certificate is not valid yet.
    #[error("its certificate is not valid yet (in {})", Span(*ahead))]
    NotYetValid {
        /// Time until then.
        ahead: Duration,
    },
    /// The peer's certificate has another name.
    #[error("its certificate is for {}, not for {expected}", names(presented))]
    WrongName {
        /// The expected name.
        expected: String,
        /// The names in the certificate.
        presented: Vec<String>,
    },
    /// The peer's certificate has been revoked.
    #[error("its certificate has been revoked")]
    Revoked,
    /// The peer presented no certificate although one is required.
    #[error("it presented no certificate")]
    NoCertificate,
    /// The peer's certificate has none of the names that are allowed.
    #[error("its certificate has no name that is allowed")]
    NotAllowed,
    /// The peer's certificate is invalid for another reason.
    #[error("its certificate is invalid: {0}")]
    BadCertificate(String),
    /// The peer's alert.
    #[error("it refused: {0}")]
    Refused(TlsAlert),
    /// A client does not know which name the server's certificate must have.
    #[error("the expected host name is not given")]
    NoHostName,
    /// The peer does not speak TLS.
    #[error("its data is not TLS")]
    NotTls,
    /// The peer closed the connection during the handshake.
    #[error(
        "it closed the connection during the TLS handshake: it may not use TLS, or not trust this end's \
         certificate"
    )]
    HandshakeClosed,
    /// The handshake took too long.
    #[error("no TLS handshake within {0:?}; it may not use TLS")]
    HandshakeTimedOut(Duration),
    /// The connection ended without a close notification.
    #[error("the connection ended without a TLS close notification{}", early(*before_first_byte))]
    Truncated {
        /// No byte had arrived. Many servers refuse a client's certificate this way.
        before_first_byte: bool,
    },
    /// The connection was reset, which is no intended end: a peer that closes with unread bytes causes it, and so can
    /// an attacker on the path.
    #[error("the connection was reset without a TLS close notification{}", early(*before_first_byte))]
    Reset {
        /// As for [`Truncated`](Self::Truncated).
        before_first_byte: bool,
    },
    /// A record failed authentication: the peer did not send it in this form.
    #[error("a record failed authentication: it was changed in transit")]
    BadRecord,
    /// The two ends have no common parameters, or one violates the protocol.
    #[error("{0}")]
    Protocol(String),
    /// A bug of limosa.
    #[error(transparent)]
    Internal(#[from] BrokenInvariant),
}

/// The meaning of a peer's alert (RFC 8446, section 6.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum TlsAlert {
    /// `unknown_ca`.
    #[error("this end's certificate is not issued by a CA that it trusts")]
    UnknownAuthority,
    /// `certificate_required`.
    #[error("it requires a certificate, and this end has none")]
    CertificateRequired,
    /// `decrypt_error`: the peer trusts an authority of the same name with another key.
    #[error("it cannot verify this end's certificate")]
    Unverifiable,
    /// `certificate_expired`.
    #[error("this end's certificate has expired")]
    Expired,
    /// `certificate_revoked`.
    #[error("this end's certificate has been revoked")]
    Revoked,
    /// `bad_certificate`, `certificate_unknown`, `unsupported_certificate`.
    #[error("it does not accept this end's certificate")]
    BadCertificate,
    /// `protocol_version`.
    #[error("it has no TLS 1.3")]
    Version,
    /// `handshake_failure`.
    #[error("it has no cipher in common with this end")]
    NoCommonCipher,
    /// Any other alert, by its number.
    #[error("alert {0}")]
    Other(u8),
}

impl TlsFailure {
    /// Converts an error of rustls. `authorities` is the file that this end trusts.
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
            // A wrong signature means another authority of the same name.
            CertificateError::UnknownIssuer | CertificateError::BadSignature => {
                Self::UnknownAuthority { authorities: Arc::clone(authorities) }
            }
            CertificateError::ExpiredContext { time, not_after } => Self::Expired { ago: between(time, not_after) },
            CertificateError::NotValidYetContext { time, not_before } => {
                Self::NotYetValid { ahead: between(not_before, time) }
            }
            CertificateError::NotValidForNameContext { expected, presented } => {
                // rustls writes them as DnsName("host"), IpAddress(192.0.2.7).
                let inside =
                    |name: &String| name.split_once('(').map_or(name.as_str(), |(_, inside)| inside).to_owned();
                let presented = presented.iter().map(inside).map(|name| name.replace(['"', ')'], "")).collect();
                Self::WrongName { expected: expected.to_str().into_owned(), presented }
            }
            CertificateError::Revoked => Self::Revoked,
            CertificateError::ApplicationVerificationFailure => Self::NotAllowed,
            error => Self::BadCertificate(error.to_string()),
        }
    }

    /// Converts a fatal alert of the peer.
    pub(super) fn of_alert(alert: AlertDescription) -> Self {
        Self::Refused(match alert {
            AlertDescription::UnknownCA => TlsAlert::UnknownAuthority,
            AlertDescription::CertificateRequired => TlsAlert::CertificateRequired,
            AlertDescription::DecryptError => TlsAlert::Unverifiable,
            AlertDescription::CertificateExpired => TlsAlert::Expired,
            AlertDescription::CertificateRevoked => TlsAlert::Revoked,
            AlertDescription::BadCertificate
            | AlertDescription::CertificateUnknown
            | AlertDescription::UnsupportedCertificate => TlsAlert::BadCertificate,
            AlertDescription::ProtocolVersion => TlsAlert::Version,
            AlertDescription::HandshakeFailure => TlsAlert::NoCommonCipher,
            alert => TlsAlert::Other(u8::from(alert)),
        })
    }
}

impl From<TlsFailure> for io::Error {
    fn from(failure: TlsFailure) -> Self {
        let kind = match failure {
            TlsFailure::Truncated { .. } | TlsFailure::Reset { .. } | TlsFailure::HandshakeClosed => {
                io::ErrorKind::UnexpectedEof
            }
            _ => io::ErrorKind::InvalidData,
        };
        Self::new(kind, failure)
    }
}

/// Displays a duration in the unit that fits.
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
        ", and no byte has arrived: it may not trust this end's certificate"
    } else {
        " (close_notify): the connection was cut"
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
            TlsFailure::HandshakeClosed,
            TlsFailure::Truncated { before_first_byte: true },
            TlsFailure::Reset { before_first_byte: false },
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
