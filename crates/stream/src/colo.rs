//! The messages of COLO, QEMU's fault tolerance by checkpoints: numbers of 32 bits, big-endian; one has a value.
//!
//! The stream begins as that of any migration: the base. QEMU 10.0 sends the command
//! [`EnableColo`](crate::Command::EnableColo) in it, 11.1 nothing that tells it from others. Behind its description the
//! two sides talk in [`ColoMessage`]s on the same channel, and each checkpoint is one turn:
//!
//! ```text
//! primary                                   secondary
//!                                       ◄── READY                 once, behind the base
//! REQUEST                               ──►                       the VM still runs
//!                                       ◄── REPLY                 the VM stops
//! VMSTATE_SEND, pages, VMSTATE_SIZE N,  ──►
//! N bytes of device sections
//!                                       ◄── RECEIVED, LOADED      the VM continues
//! ```
//!
//! The pages are those written since the last checkpoint: one RAM section of type END, behind an optional command
//! [`SwitchoverStart`](crate::Command::SwitchoverStart), up to the byte that ends the sections. A
//! [`Decoder`](crate::Decoder) reads them behind [`next_checkpoint`](crate::Decoder::next_checkpoint). The device
//! sections are FULL ones and the byte that ends them, without the description that a base has. Facts from the wire of
//! QEMU 10.0 and 11.1.
//!
//! Two limosas have more to say to each other, in [notes](ColoMessage::Note) between the messages; neither sends them
//! to another program.

use crate::cursor::{Cursor, Stop};
use crate::error::{ErrorKind, StreamError};

/// Bytes of the longest message.
pub const COLO_MESSAGE_LIMIT: usize = 12;
/// Number of the note of kind 0: `LMS`, and the kind.
const FIRST_NOTE: u32 = 0x4c4d_5300;

/// A message of a checkpoint's turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ColoMessage {
    /// 0, to the primary: the base is here, and checkpoints may follow.
    CheckpointReady,
    /// 1, from the primary: a checkpoint is due.
    CheckpointRequest,
    /// 2, to the primary: it may stop the VM.
    CheckpointReply,
    /// 3, from the primary: the VM is stopped, and its pages follow.
    VmstateSend,
    /// 4, from the primary: this number of bytes of device sections follows.
    VmstateSize(u64),
    /// 5, to the primary: the device sections are here.
    VmstateReceived,
    /// 6, to the primary: the VM may continue.
    VmstateLoaded,
    /// `0x4c4d5300` and the kind, from limosa to limosa: a number. A reader ignores kinds that are new to it.
    Note {
        /// The kind of number.
        kind: u8,
        /// The number.
        value: u64,
    },
}

impl ColoMessage {
    /// The message's number.
    pub fn number(self) -> u32 {
        match self {
            Self::CheckpointReady => 0,
            Self::CheckpointRequest => 1,
            Self::CheckpointReply => 2,
            Self::VmstateSend => 3,
            Self::VmstateSize(_) => 4,
            Self::VmstateReceived => 5,
            Self::VmstateLoaded => 6,
            Self::Note { kind, .. } => FIRST_NOTE | u32::from(kind),
        }
    }

    /// Appends the message.
    pub fn encode(self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.number().to_be_bytes());
        if let Self::VmstateSize(value) | Self::Note { value, .. } = self {
            out.extend_from_slice(&value.to_be_bytes());
        }
    }

    /// Reads one message from the beginning of `input`: the message and its length in bytes, or `None` if `input` ends
    /// inside it. `offset` is the stream offset of `input`, for errors; `limit` the most bytes of device sections that
    /// a message may announce, at most [`TAIL_LIMIT`](crate::devices::TAIL_LIMIT).
    ///
    /// # Errors
    /// An unknown number; more bytes of device sections than the limit.
    pub fn decode(input: &[u8], offset: u64, limit: u64) -> Result<Option<(Self, usize)>, StreamError> {
        let mut cursor = Cursor::new(input);
        match Self::read(&mut cursor, limit) {
            Ok(message) => Ok(Some((message, cursor.at()))),
            Err(Stop::Need(_)) => Ok(None),
            Err(stop) => Err(stop.into_error(offset, "COLO message", input.len())),
        }
    }

    fn read(cursor: &mut Cursor<'_>, limit: u64) -> Result<Self, Stop> {
        Ok(match cursor.be32()? {
            0 => Self::CheckpointReady,
            1 => Self::CheckpointRequest,
            2 => Self::CheckpointReply,
            3 => Self::VmstateSend,
            4 => {
                let at = cursor.at();
                let value = cursor.be64()?;
                if value > limit {
                    let what = "length of the device sections of a checkpoint";
                    return Err(Stop::Fail { at, error_kind: ErrorKind::TooLarge { what, value, limit } });
                }
                Self::VmstateSize(value)
            }
            5 => Self::VmstateReceived,
            6 => Self::VmstateLoaded,
            number => match number.to_be_bytes() {
                [b'L', b'M', b'S', kind] => Self::Note { kind, value: cursor.be64()? },
                _ => {
                    let found = format_args!("{number:#x}").to_string();
                    let error_kind = ErrorKind::expected("a COLO message from 0 to 6", found);
                    return Err(Stop::Fail { at: 0, error_kind });
                }
            },
        })
    }
}
