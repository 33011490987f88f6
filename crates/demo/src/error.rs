//! Errors of a demonstration.

use std::io;

use crate::guest::GuestError;
use limosa_qemu::qmp::QmpError;

/// Why a demonstration, or one of its ends, cannot continue.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DemoError {
    /// The settings do not go together, or not on this machine.
    #[error("{0}")]
    Settings(String),

    /// A process, file or socket of the demonstration failed.
    #[error("{what}")]
    System {
        /// The operation.
        what: String,
        /// The system's reason.
        source: io::Error,
    },

    /// The guest failed.
    #[error("the guest: {0}")]
    Guest(String),

    /// The guest cannot be made, or failed.
    #[error(transparent)]
    Built(#[from] GuestError),

    /// An end is not there any more.
    #[error(
        "the end at {control} is gone: its process has ended, and its guest if it ran there; see limosa-demo status for the other \
         end"
    )]
    Gone {
        /// Its control socket.
        control: String,
    },

    /// An end refuses a request, for the reason that it gives.
    #[error("the end at {control} refuses {command}: {why}")]
    Refused {
        /// Its control socket.
        control: String,
        /// The request.
        command: String,
        /// Its words.
        why: String,
    },

    /// An end does not answer.
    #[error("the end at {control} does not answer")]
    Monitor {
        /// Its control socket.
        control: String,
        /// The error.
        source: Box<QmpError>,
    },

    /// An end gives an invalid answer.
    #[error("an end of the demonstration gave an invalid answer: {0}")]
    Answer(String),

    /// An end makes no progress.
    #[error("an end of the demonstration did not {what} in time; its status is {status}")]
    Late {
        /// The step that it did not do.
        what: &'static str,
        /// Its own status.
        status: String,
    },

    /// The memory at the destination is not what it was.
    #[error("the memory is not the same at both ends: {0}")]
    Differs(String),
}

impl DemoError {
    pub(crate) fn system(what: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let what = what.into();
        move |source| Self::System { what, source }
    }
}
