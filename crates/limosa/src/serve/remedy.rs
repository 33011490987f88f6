//! Remedies for a server that failed.

use limosa_export::nbd::ServerError;

/// The remedy for a server that failed.
pub(crate) fn of(error: &ServerError) -> Option<&'static str> {
    match error {
        ServerError::Start(_) | ServerError::Thread(_) => {
            Some("; raise the limits of this user (ulimit -n, ulimit -u)")
        }
        _ => None,
    }
}
