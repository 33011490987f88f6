//! The QEMU guest agent: a program in the guest that executes commands of its host (QEMU docs: interop/qemu-ga).
//!
//! limosa asks it for one thing: to set the guest's clock, which stands where it was when the VM was saved.
//!
//! Laws:
//! - **The guest is hostile.** A conversation has a time limit and a limit of bytes, which no agent can extend.
//! - **Other programs keep their connection.** A chardev that another program is connected to is not used, and limosa's
//!   own connection ends with the conversation.

mod answers;
mod clock;
mod conversation;
mod error;
mod port;

pub use answers::{AgentAnswers, TooManyBytes};
pub use clock::{ClockSet, GuestClock};
pub use error::GuestAgentError;
