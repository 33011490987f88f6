//! Errors of an object store.

use std::io;
use std::time::Duration;

/// Why an object cannot be read or written. Its text holds no credentials, and no URL with a signature.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RemoteError {
    /// There is no such object (404).
    #[error("there is no such object{}", code(.0))]
    NotFound(String),
    /// The store refuses (401, 403).
    #[error("the store refuses access ({status}{}): check the credentials and what they may do", spaced(.code))]
    Denied {
        /// The status of HTTP.
        status: u16,
        /// The store's own code; empty: none.
        code: String,
    },
    /// The store refuses a request because of its time.
    #[error("the store refuses the time of the request: set this machine's clock (the store's says {0})")]
    Clock(String),
    /// There are no credentials.
    #[error("no credentials: {0}")]
    Credentials(String),
    /// The service that gives credentials fails, or cannot be reached.
    #[error("no credentials from their service: {0}")]
    CredentialService(Box<RemoteError>),
    /// The object is another one than when it was opened.
    #[error("the object was replaced since it was opened: open it again")]
    Replaced,
    /// The object was removed since it was opened.
    #[error("the object was removed since it was opened")]
    Removed,
    /// There is an object already, which was not to be replaced.
    #[error("the object exists already")]
    Exists,
    /// The object that was to be replaced has changed.
    #[error("the object was changed by somebody else; it was not replaced")]
    Changed,
    /// Somebody else changes the object at this moment (409).
    #[error("the object is being changed by another request (409{}): try again later", spaced(.0))]
    Conflict(String),
    /// The object has no such range (416).
    #[error("the object is shorter than when it was opened (416): it was replaced, open it again")]
    Shorter,
    /// The store asks for fewer requests (429, 503).
    #[error("the store is overloaded ({status}{}): try again later, or with fewer requests", spaced(.code))]
    Busy {
        /// The status of HTTP.
        status: u16,
        /// The store's own code; empty: none.
        code: String,
        /// How long it asks to wait.
        retry_after: Option<Duration>,
    },
    /// The store fails (5xx).
    #[error("the store failed ({status}{}): try again later", spaced(.code))]
    Failed {
        /// The status of HTTP.
        status: u16,
        /// The store's own code; empty: none.
        code: String,
    },
    /// The store does not take the request.
    #[error("the store does not accept the request ({status}{})", spaced(.code))]
    Refused {
        /// The status of HTTP.
        status: u16,
        /// The store's own code; empty: none.
        code: String,
    },
    /// The server names another place.
    #[error("the server redirects to {0}, which is not followed")]
    Redirect(String),
    /// The bucket is in another region.
    #[error("the bucket is in another region{}: set AWS_REGION", code(.0))]
    Region(String),
    /// The server sends whole files only.
    #[error("the server does not send parts of files (it ignores `Range`)")]
    NoRanges,
    /// The store does not keep to the protocol.
    #[error("the store breaks the protocol: {0}")]
    Protocol(String),
    /// Nobody answers at the store's address.
    #[error("cannot connect to {host}: {why}")]
    Connect {
        /// The host and port.
        host: String,
        /// The cause.
        why: String,
    },
    /// The store shows a certificate that this machine does not trust.
    #[error(
        "the certificate of {host} is not trusted: {why} (AWS_CA_BUNDLE for S3, SSL_CERT_FILE for others name more \
         authorities)"
    )]
    Untrusted {
        /// The host and port.
        host: String,
        /// The cause.
        why: String,
    },
    /// A connection ended before its request was answered.
    #[error("the connection broke off: {0}")]
    Broken(String),
    /// The store sends nothing.
    #[error("the store was silent for {0:?}")]
    Silent(Duration),
    /// All attempts within the budget failed.
    #[error("{last} (retried for {within:?})")]
    Spent {
        /// The error of the last attempt.
        last: Box<RemoteError>,
        /// The budget.
        within: Duration,
    },
    /// Settings in the environment contradict each other, or are no settings.
    #[error("the store's settings are wrong: {0}")]
    Settings(String),
    /// The upload that was to be continued has ended. It can be begun again.
    #[error("the store does not know the upload any more: begin it again")]
    UnknownUpload,
    /// The upload was cancelled.
    #[error("the upload was cancelled{}", kept(.is_kept))]
    Cancelled {
        /// Whether its parts stay in the store, to be continued with.
        is_kept: bool,
    },
    /// A file or thread of this machine failed.
    #[error("{0}")]
    Local(String),
}

fn code(code: &str) -> String {
    if code.is_empty() { String::new() } else { format!(" ({code})") }
}

fn spaced(code: &str) -> String {
    if code.is_empty() { String::new() } else { format!(" {code}") }
}

fn kept(is_kept: &bool) -> &'static str {
    if *is_kept { "; the same one continues it" } else { "" }
}

impl RemoteError {
    /// Whether the same request may succeed later.
    #[must_use]
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Busy { .. } | Self::Connect { .. } | Self::Broken(_) | Self::Silent(_) => true,
            // 501: it does not know the request, and will not.
            Self::Failed { status, .. } => *status != 501,
            Self::Refused { status, .. } => *status == 408,
            Self::CredentialService(cause) => cause.is_transient(),
            _ => false,
        }
    }

    /// How long the store asks to wait.
    pub(crate) fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Busy { retry_after, .. } => *retry_after,
            Self::CredentialService(cause) => cause.retry_after(),
            _ => None,
        }
    }

    /// The error after all attempts.
    pub(crate) fn after(self, within: Duration) -> Self {
        Self::Spent { last: Box::new(self), within }
    }

    /// The closest kind of the standard library.
    #[must_use]
    pub fn kind(&self) -> io::ErrorKind {
        match self {
            Self::NotFound(_) | Self::Removed => io::ErrorKind::NotFound,
            Self::Denied { .. }
            | Self::Untrusted { .. }
            | Self::Clock(_)
            | Self::Credentials(_)
            | Self::CredentialService(_) => io::ErrorKind::PermissionDenied,
            Self::Exists => io::ErrorKind::AlreadyExists,
            Self::Busy { .. } | Self::Conflict(_) => io::ErrorKind::ResourceBusy,
            Self::Connect { .. } => io::ErrorKind::NotConnected,
            Self::Broken(_) => io::ErrorKind::ConnectionAborted,
            Self::Silent(_) => io::ErrorKind::TimedOut,
            Self::Settings(_) => io::ErrorKind::InvalidInput,
            Self::NoRanges => io::ErrorKind::Unsupported,
            Self::Protocol(_) => io::ErrorKind::InvalidData,
            Self::Cancelled { .. } => io::ErrorKind::Interrupted,
            Self::Spent { last, .. } => last.kind(),
            _ => io::ErrorKind::Other,
        }
    }
}

impl From<RemoteError> for io::Error {
    fn from(error: RemoteError) -> Self {
        Self::new(error.kind(), error)
    }
}
