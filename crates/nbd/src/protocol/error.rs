//! Errors of requests.

/// An error as a reply has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, strum::Display, strum::FromRepr)]
#[repr(u32)]
pub enum ErrorCode {
    /// The export is read-only.
    #[strum(to_string = "operation not permitted")]
    NotPermitted = 1,
    /// Storage failed.
    #[strum(to_string = "input/output error")]
    Io = 5,
    /// No memory.
    #[strum(to_string = "out of memory")]
    NoMemory = 12,
    /// The request is wrong.
    #[strum(to_string = "invalid request")]
    Invalid = 22,
    /// No space is left, or the request is past the end.
    #[strum(to_string = "no space left")]
    NoSpace = 28,
    /// The request is too long.
    #[strum(to_string = "request too long")]
    Overflow = 75,
    /// It is not supported, or not fast.
    #[strum(to_string = "not supported")]
    NotSupported = 95,
    /// The server is about to end.
    #[strum(to_string = "the server is shutting down")]
    Shutdown = 108,
}

impl ErrorCode {
    /// Returns its number.
    #[must_use]
    pub const fn number(self) -> u32 {
        self as u32
    }
}
