//! The errors of migrations.

use std::io;
use std::time::Duration;

use limosa_channel::ChannelError;
use limosa_memory::dirty::LogError;
use limosa_page::BrokenInvariant;
use limosa_stream::{EncodeError, StreamError};

use crate::live::VmError;
use crate::live::destination::LayoutDifference;
use crate::pages::PageError;

/// The reason why an engine gave up. Each names the object that failed. Only the caller knows who runs the VM now, so
/// only the caller can say what to do.
///
/// The causes are in [`source`](std::error::Error::source); [`error_with_causes`](limosa_page::error_with_causes)
/// prints them too.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MigrateError {
    /// The transport failed: refused, timed out, or closed in the middle.
    #[error(transparent)]
    Channel(#[from] ChannelError),

    /// One of the multifd channels failed, and with it the whole job.
    #[error("multifd channel {id}")]
    Multifd {
        /// Its number, counted from 0.
        id: u8,
        /// The failure.
        source: Box<Self>,
    },

    /// The main channel ended before its stream did; the source may have another number of multifd channels.
    #[error("the migration stream is not valid (multifd channels here: {channels})")]
    MainEnded {
        /// Number of multifd channels here.
        channels: usize,
        /// The end of the stream.
        source: StreamError,
    },

    /// The peer's bytes are not a migration stream that this engine can take.
    #[error("the migration stream is not valid")]
    Stream(#[from] StreamError),

    /// The primary gave a checkpoint up behind its pages, and says why in a
    /// [note](limosa_stream::colo::ColoMessage::Note).
    #[error("the primary gave a checkpoint up")]
    CheckpointAbandoned {
        /// The kind of the note.
        kind: u8,
        /// Its number.
        value: u64,
    },

    /// The pages of a channel could not be compressed.
    #[error("cannot compress pages")]
    Compress(#[source] io::Error),

    /// The system has no thread left for a channel.
    #[error("cannot start the thread of a channel")]
    Thread(#[source] io::Error),

    /// Pages cannot leave in the way that was named.
    #[error("zero-copy is not available: {0}")]
    ZeroCopy(&'static str),

    /// The guest cannot be asked for its free pages in such a migration.
    #[error("free-page hints cannot be used: {0}")]
    Hints(&'static str),

    /// The connections are not the channels that the migration should have.
    #[error("the channels of the migration do not come together: {0}")]
    Channels(String),

    /// The channels did not all come in time.
    #[error("{what}")]
    MissingChannels {
        /// The channels that are missing, and the connections that came instead.
        what: String,
        /// Reason for the refusal of the last connection that was refused, if one was; part of `what`.
        refused: Option<Box<MigrateError>>,
    },

    /// The source cannot be put into a stream: the stored layout is not one that QEMU makes.
    #[error("cannot be put into a migration stream")]
    Encode(#[from] EncodeError),

    /// The sink of the pages failed.
    #[error("cannot store pages")]
    Sink(#[source] PageError),

    /// The source of the pages failed.
    #[error("cannot read pages")]
    Source(#[source] PageError),

    /// The stream is valid but asks for something that this role does not do.
    #[error("the peer asked for {what} at stream offset {offset}, which {role} does not do")]
    Unsupported {
        /// The request.
        what: String,
        /// Offset in bytes from the start of the stream.
        offset: u64,
        /// The role that was asked.
        role: &'static str,
    },

    /// The page size given for a RAM block is one that it cannot have.
    #[error("RAM block {block} cannot have pages of {page_size} bytes: {why}")]
    PageSize {
        /// The block.
        block: String,
        /// Bytes.
        page_size: u64,
        /// The reason.
        why: &'static str,
    },

    /// The source let the guest run here before its memory had come.
    #[error("the source switched to postcopy at stream offset {offset}, but no VM runs here that could use its pages")]
    SwitchedToPostcopy {
        /// Offset in bytes from the start of the stream.
        offset: u64,
    },

    /// The source wants answers, and the channel carries none.
    #[error("{peer}: the source wants answers (capability return-path), but this channel carries none")]
    NoReturnPath {
        /// The channel.
        peer: String,
    },

    /// The peer answers in TLS, and this end does not speak it.
    #[error("{peer}: it speaks TLS, and this end does not (tls-creds)")]
    WantsTls {
        /// The channel.
        peer: String,
    },

    /// The destination ended the migration with a status other than 0.
    #[error("the destination reports failure (status {status}), whose reason is in its own log")]
    Refused {
        /// The status of its SHUT message.
        status: u32,
    },

    /// The peer broke the order of the protocol.
    #[error("the peer broke the protocol: {0}")]
    Protocol(String),

    /// The destination did not answer within the time allowed.
    #[error("the destination did not answer {what} within {} s", waited.as_secs())]
    AnswerTimedOut {
        /// The answer that it owes.
        what: &'static str,
        /// Time waited.
        waited: Duration,
    },

    /// The guest's writes cannot be followed.
    #[error("what the guest writes cannot be followed")]
    DirtyLog(#[from] LogError),

    /// The VMM did not do what the migration needs.
    #[error("the VM cannot {what}")]
    Vm {
        /// The operation, to stand behind "cannot".
        what: &'static str,
        /// Its reason.
        source: VmError,
    },

    /// The VM here is not the one that the source sends.
    #[error("the VM here has other memory than the source's")]
    Layout(#[from] LayoutDifference),

    /// The guest writes its memory faster than it can be sent.
    #[error("the migration does not converge: {0}")]
    NoConvergence(String),

    /// A bug of limosa, noticed before anything was committed.
    #[error(transparent)]
    Internal(#[from] BrokenInvariant),

    /// The job was cancelled through its [`Control`](crate::control::Control).
    #[error("cancelled")]
    Cancelled,

    /// A postcopy was paused on request: the destination waits for recovery. If the request came between the end of the
    /// stream and its answer, the destination has every page and needs none.
    #[error("paused")]
    Paused,
}

/// Whether a broken invariant is noticed: by a panic in debug builds, by [`MigrateError::Internal`] in release builds.
#[cfg(test)]
pub(crate) fn is_noticed<T, E: Into<MigrateError>>(attempt: impl FnOnce() -> Result<T, E>) -> bool {
    let attempt = std::panic::AssertUnwindSafe(|| attempt().map_err(Into::into));
    match std::panic::catch_unwind(attempt) {
        Err(_) => cfg!(debug_assertions),
        Ok(result) => matches!(result, Err(MigrateError::Internal(_))),
    }
}
