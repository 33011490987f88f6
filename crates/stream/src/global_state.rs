//! The device section `globalstate`: in which run state the VM was saved.
//!
//! A precopy destination adopts this run state. The body: be32 length of the name with its NUL, the name padded with
//! zeros, and two flags about suspension behind the first 36 bytes.

use limosa_page::to_u64;

use crate::error::{EncodeError, ErrorKind, StreamError};

/// Name of the section.
pub const GLOBAL_STATE_SECTION: &str = "globalstate";
/// Bytes of the name field, NUL included.
pub const RUN_STATE_FIELD_LENGTH: usize = 32;
/// Bytes of the whole body as QEMU writes it.
pub const GLOBAL_STATE_LENGTH: usize = 104;

/// The section's contents.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GlobalState {
    /// QEMU's run state, e.g. `running`, `paused`.
    pub run_state: String,
    /// Whether the VM was suspended when it stopped, if the source knows that field.
    pub was_suspended: Option<bool>,
}

impl GlobalState {
    /// Reads the body of the section.
    ///
    /// # Errors
    /// A body that is too short, or an invalid name.
    pub fn decode(body: &[u8]) -> Result<Self, StreamError> {
        let fail = |at: u64, error_kind| StreamError::new(at, "body of section \"globalstate\"", error_kind);
        let (Some(length), Some(field)) = (body.first_chunk::<4>(), body.get(4..4 + RUN_STATE_FIELD_LENGTH)) else {
            let what = "the run state".into();
            return Err(fail(
                0,
                ErrorKind::Truncated { what, wanted: 4 + RUN_STATE_FIELD_LENGTH, available: body.len() },
            ));
        };
        let length = u32::from_be_bytes(*length) as usize;
        let name = length.checked_sub(1).and_then(|end| field.split_at_checked(end));
        let Some((name, [0, ..])) = name else {
            return Err(fail(0, ErrorKind::expected("the length of a name with its NUL, 1 to 32", length)));
        };
        if name.is_empty() || !name.iter().all(|byte| byte.is_ascii_lowercase() || *byte == b'-') {
            return Err(fail(
                4,
                ErrorKind::expected("the name of a run state", format!("{:?}", name.escape_ascii().to_string())),
            ));
        }
        let run_state = name.iter().copied().map(char::from).collect();
        let was_suspended = match body.get(4 + RUN_STATE_FIELD_LENGTH..6 + RUN_STATE_FIELD_LENGTH) {
            Some([1, suspended]) => Some(*suspended != 0),
            _ => None,
        };
        Ok(Self { run_state, was_suspended })
    }

    /// The body of the section as QEMU writes it.
    ///
    /// # Errors
    /// A run state that is no such name.
    pub fn encode(&self) -> Result<[u8; GLOBAL_STATE_LENGTH], EncodeError> {
        let mut body = [0; GLOBAL_STATE_LENGTH];
        replace_run_state(&mut body, &self.run_state)?;
        if let Some(suspended) = self.was_suspended {
            body[4 + RUN_STATE_FIELD_LENGTH] = 1;
            body[5 + RUN_STATE_FIELD_LENGTH] = u8::from(suspended);
        }
        Ok(body)
    }
}

/// Puts `run_state` into the body of a `globalstate` section and leaves the rest of it alone.
///
/// # Errors
/// A name that is empty, has more than 31 bytes or other letters than QEMU's names; a body that is too short.
pub fn replace_run_state(body: &mut [u8], run_state: &str) -> Result<(), EncodeError> {
    let (what, limit) = ("run state", RUN_STATE_FIELD_LENGTH - 1);
    let plain = run_state.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'-');
    let length = u32::try_from(run_state.len()).ok().filter(|length| *length > 0 && *length < 32 && plain);
    let length = length.ok_or_else(|| EncodeError::Name { what, name: run_state.to_owned(), limit })?;
    let value = to_u64(body.len());
    let Some(front) = body.first_chunk_mut::<{ 4 + RUN_STATE_FIELD_LENGTH }>() else {
        let rule = "must have 36 bytes or more";
        return Err(EncodeError::Number { what: "length of the globalstate body", value, rule });
    };
    front.fill(0);
    front[..4].copy_from_slice(&(length + 1).to_be_bytes());
    front[4..4 + run_state.len()].copy_from_slice(run_state.as_bytes());
    Ok(())
}
