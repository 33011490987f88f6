//! A stream that has arrived, and the confirmation that its source waits for.

use std::sync::Arc;

use limosa_channel::{Channel, ChannelError};
use limosa_stream::{CompleteTail, Decoder, ReturnMessage};

use super::colo::Checkpoints;
use super::options::{DestinationStats, TAIL_TIMEOUT};
use super::receiver::Receiver;
use crate::error::MigrateError;
use crate::pages::StreamSetup;

/// A stream that has arrived completely; its source waits for the confirmation.
#[derive(Debug)]
pub struct ReceivedStream {
    /// The layout.
    pub setup: StreamSetup,
    /// The end of the stream as it came: device sections and their description.
    pub tail: Vec<u8>,
    /// The place of each device section in `tail`.
    pub devices: CompleteTail,
    /// Counters of the stream.
    pub stats: DestinationStats,
    pub(super) channel: Arc<Channel>,
    /// Kept open: the source closes them when it is done.
    pub(super) _pages: Vec<Arc<Channel>>,
    pub(super) owner: Ownership,
    pub(super) return_path: bool,
    /// Continues with checkpoints, if they were expected.
    pub(super) receiver: Option<Box<Receiver<'static>>>,
}

/// The way in which a source gives its VM away.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ownership {
    /// By its commit, before the end of the stream. The device sections were loaded before that, where there is a VM.
    Committed,
    /// With the acknowledgement that it waits for. Without one, stock QEMU takes its VM back.
    Awaited,
    /// With the last byte of the stream: stock QEMU without a return path hears no answer.
    Unanswerable,
}

/// The state of a source whose stream seems to have ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SourceNow {
    /// Waits for the acknowledgement.
    Waits,
    /// Does not wait for it: it has ended, or has taken its VM back.
    Gone,
    /// Sends more: the end was none.
    Sends,
}

/// A stream that has come to its end, or to the point where the VM runs before its memory is here.
pub(crate) enum Received {
    Whole(Box<ReceivedStream>),
    PostcopySwitchover(Box<PostcopySwitchover>),
}

/// A stream that continues with the package of a postcopy.
pub(crate) struct PostcopySwitchover {
    pub(crate) start: StreamSetup,
    pub(crate) decoder: Decoder,
    /// Bytes that have arrived behind the command PACKAGED.
    pub(crate) arrived: Vec<u8>,
    /// Bytes of the package.
    pub(crate) length: u32,
    pub(crate) stats: DestinationStats,
    pub(crate) channel: Arc<Channel>,
    /// Kept open: the source closes them when it is done.
    pub(crate) _pages: Vec<Arc<Channel>>,
}

/// A stream that has not arrived.
pub(crate) struct Broken {
    pub(crate) error: MigrateError,
    /// The source had been told before that everything is in its place: which end has the VM is not known here.
    pub(crate) answered: bool,
}

impl ReceivedStream {
    /// Whether the source waits for [`acknowledge`](Self::acknowledge). One that opened no return path does not: it
    /// took its last write for success, and nothing can call it back.
    pub fn has_return_path(&self) -> bool {
        self.return_path
    }

    /// The way in which the source gives its VM away.
    pub(crate) fn owner(&self) -> Ownership {
        self.owner
    }

    /// Looks at the source, whose stream seems to have ended.
    pub(crate) fn source_now(&self) -> SourceNow {
        match self.channel.peek(&mut [0; 1]) {
            Ok(Some(0)) | Err(ChannelError::Broken { .. }) => SourceNow::Gone,
            Ok(Some(_)) => SourceNow::Sends,
            // What is no socket cannot be asked.
            Ok(None) | Err(_) => SourceNow::Waits,
        }
    }

    /// Continues with the checkpoints that follow the stream of a source with COLO. Neither
    /// [`acknowledge`](Self::acknowledge) nor [`refuse`](Self::refuse) may have been called.
    ///
    /// A source without COLO takes the answer for the acknowledgement of its migration, and ends.
    ///
    /// # Errors
    /// The stream was received without the option [`colo`](super::DestinationOptions::colo).
    pub fn into_checkpoints(mut self) -> Result<Checkpoints, MigrateError> {
        let not_expected = || MigrateError::Protocol("no checkpoints were expected behind this stream".into());
        let receiver = self.receiver.take().ok_or_else(not_expected)?;
        Ok(Checkpoints::new(self, *receiver))
    }

    /// Tells the source that all is well: its VM is now this side's.
    pub fn acknowledge(&self) -> Result<(), MigrateError> {
        self.shut(0)
    }

    /// Makes sure, after [`acknowledge`](Self::acknowledge), that the stream ended where it seemed to: the source
    /// closes the channel then, and not a byte comes before that.
    ///
    /// A guest can put what looks like an end into a device's memory. If that was believed because the source was held
    /// up just there, the rest of the stream comes now, and what was received is worth nothing.
    pub fn confirm_end(&self) -> Result<(), MigrateError> {
        self.channel.set_timeouts(Some(TAIL_TIMEOUT), None)?;
        match self.channel.read(&mut [0; 64]) {
            Ok(0) => Ok(()),
            // Over TLS stock QEMU does not announce the end.
            Err(error) if error.lacks_close_notify() => Ok(()),
            Err(error) => Err(error.into()),
            Ok(_) => Err(MigrateError::Protocol(
                "the stream continues behind what looked like its end: what was received is incomplete".into(),
            )),
        }
    }

    /// Tells the source that this side failed: its VM resumes.
    pub fn refuse(&self) -> Result<(), MigrateError> {
        self.shut(1)
    }

    fn shut(&self, status: u32) -> Result<(), MigrateError> {
        if !self.return_path {
            return Ok(());
        }
        let mut bytes = Vec::new();
        ReturnMessage::Shut(status).encode(&mut bytes)?;
        Ok(self.channel.write_all(&bytes)?)
    }
}
