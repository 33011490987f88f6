//! A request on its way to the store: what is added to it, and what came back.
//!
//! The client of a store reports little of a failure, and some of it with the URL. So the connection below it notes
//! what it has seen, in the [`Exchange`] of the task that made the request.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use http::{HeaderName, HeaderValue};
use parking_lot::Mutex;

use crate::counters::Count;
use crate::error::RemoteError;
use crate::printable::printable;

tokio::task_local! {
    static EXCHANGE: Arc<Exchange>;
}

/// The part of a request that the connection knows and the client does not.
#[derive(Debug, Default)]
pub(super) struct Exchange {
    /// Requests to the store.
    pub(super) requests: Arc<Count>,
    /// A condition of the completion of an upload. The client has no option for it.
    pub(super) condition: Option<(HeaderName, HeaderValue)>,
    seen: Mutex<Option<Seen>>,
}

/// A failure as the connection has seen it.
#[derive(Debug, Clone)]
pub(super) enum Seen {
    /// The store answered with an error.
    Status(Status),
    /// The request failed by another cause.
    Error(RemoteError),
}

/// The answer of a store that failed or refused.
#[derive(Debug, Clone, Default)]
pub(super) struct Status {
    pub(super) status: u16,
    /// The store's own code, such as `SlowDown`.
    pub(super) code: String,
    pub(super) retry_after: Option<Duration>,
    /// The store's clock.
    pub(super) date: String,
}

impl Exchange {
    /// The exchange of the current task, if it has one.
    pub(super) fn current() -> Option<Arc<Self>> {
        EXCHANGE.try_with(Arc::clone).ok()
    }

    pub(super) fn note(&self, seen: Seen) {
        *self.seen.lock() = Some(seen);
    }
}

/// Runs a request, and says why it failed. Each request to the store is counted.
pub(crate) async fn exchange<T>(
    requests: &Arc<Count>,
    condition: Option<(HeaderName, HeaderValue)>,
    request: impl Future<Output = object_store::Result<T>>,
) -> Result<T, RemoteError> {
    let exchange = Arc::new(Exchange { requests: Arc::clone(requests), condition, seen: Mutex::default() });
    let outcome = EXCHANGE.scope(Arc::clone(&exchange), request).await;
    outcome.map_err(|error| match exchange.seen.lock().take() {
        Some(Seen::Status(status)) => status.into_error(),
        Some(Seen::Error(error)) => error,
        None => of_client(&error),
    })
}

/// An error that the client itself has found.
pub(crate) fn of_client(error: &object_store::Error) -> RemoteError {
    match error {
        object_store::Error::NotSupported { .. } | object_store::Error::NotImplemented { .. } => {
            RemoteError::Settings("the store does not support this request".to_owned())
        }
        error => {
            // The innermost cause alone: the others may name URLs.
            let mut cause: &(dyn std::error::Error + 'static) = error;
            loop {
                // Its text quotes values, which may be credentials.
                if let Some(json) = cause.downcast_ref::<serde_json::Error>() {
                    let place = format!("line {}, column {}", json.line(), json.column());
                    return RemoteError::Protocol(format!("not the expected JSON at {place}"));
                }
                match cause.source() {
                    Some(source) => cause = source,
                    None => break,
                }
            }
            RemoteError::Protocol(printable(&cause.to_string(), 200))
        }
    }
}

impl Status {
    /// The error of a request that is not conditional.
    pub(super) fn into_error(self) -> RemoteError {
        let Self { status, code, retry_after, date } = self;
        match (status, code.as_str()) {
            (403, "RequestTimeTooSkewed") => RemoteError::Clock(date),
            (301 | 307 | 400, "PermanentRedirect" | "TemporaryRedirect" | "AuthorizationHeaderMalformed") => {
                RemoteError::Region(code)
            }
            (401 | 403, _) | (400, "ExpiredToken" | "InvalidToken" | "TokenRefreshRequired") => {
                RemoteError::Denied { status, code }
            }
            (404 | 410, _) => RemoteError::NotFound(code),
            (409, _) => RemoteError::Conflict(code),
            (412, _) => RemoteError::Replaced,
            (416, _) => RemoteError::Shorter,
            (429 | 503, _) => RemoteError::Busy { status, code, retry_after },
            (200 | 500.., _) => RemoteError::Failed { status, code },
            _ => RemoteError::Refused { status, code },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_in_json_are_not_quoted() {
        let source = serde_json::from_str::<u32>("\"a secret\"").unwrap_err();
        let error = object_store::Error::Generic { store: "x", source: Box::new(source) };
        assert_eq!(of_client(&error), RemoteError::Protocol("not the expected JSON at line 1, column 10".into()));
    }
}
