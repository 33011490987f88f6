//! A stream that has arrived, and the word that its source waits for.

use std::sync::Arc;

use limosa_channel::Channel;
use limosa_stream::devices::DeviceState;
use limosa_stream::return_path::ReturnMessage;

use super::{DestinationStats, TAIL_PATIENCE};
use crate::error::MigrateError;
use crate::pages::StreamStart;

/// A stream that has arrived whole, and a source that waits for the word that it has.
#[derive(Debug)]
pub struct Incoming {
    /// The layout.
    pub start: StreamStart,
    /// The end of the stream as it came: device sections and their description.
    pub tail: Vec<u8>,
    /// Where in `tail` each device section lies.
    pub devices: DeviceState,
    /// What was counted.
    pub stats: DestinationStats,
    pub(super) channel: Arc<Channel>,
    /// Kept open: the source closes them when it is done.
    pub(super) _pages: Vec<Arc<Channel>>,
    pub(super) return_path: bool,
}

impl Incoming {
    /// Whether the source waits for [`acknowledge`](Self::acknowledge). One that opened no return path does not: it took
    /// its last write for success, and nothing can call it back.
    pub fn has_return_path(&self) -> bool {
        self.return_path
    }

    /// Tells the source that all is well: its VM is now this side's.
    pub fn acknowledge(&self) -> Result<(), MigrateError> {
        self.shut(0)
    }

    /// Makes sure, after [`acknowledge`](Self::acknowledge), that the stream ended where it seemed to: the source closes the
    /// channel then, and not a byte comes before that.
    ///
    /// A guest can put what looks like an end into a device's memory. If that was believed because the source was held up
    /// just there, the rest of the stream comes now, and what was received is worth nothing.
    pub fn confirm_end(&self) -> Result<(), MigrateError> {
        self.channel.set_timeouts(Some(TAIL_PATIENCE), None)?;
        match self.channel.get_some(&mut [0; 64])? {
            0 => Ok(()),
            _ => Err(MigrateError::Protocol(
                "the stream goes on behind what looked like its end: what was received is not whole; try again".into(),
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
        Ok(self.channel.put(&bytes)?)
    }
}
