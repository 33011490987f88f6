//! A keeper on another host: the checkpoints outlive the VM's host.
//!
//! The keeper is the secondary of QEMU's COLO, as it is on the VM's own host: one engine receives, [`Series`]. On the
//! VM's host a [`Relay`] passes QEMU's stream on, and holds gates and the VM's stops.
//!
//! ```text
//!  the VM's host                                   another host
//!  QEMU ──► Relay ──────────────────────────────► Series ──► DIR/checkpoint.limosa
//!       ◄── seals, lets out, waits until due ◄────
//! ```
//!
//! A bare QEMU or a VMM that links limosa may be the primary as well: it takes the request for the next checkpoint,
//! answered, for the word that the last one counts.
//!
//! When the VM is lost a keeper may fail over by itself: `failover` decides, and a standby QEMU that it has fed all the
//! while continues the VM.
//!
//! [`Series`]: crate::series::Series

mod connect;
mod desk;
mod failover;
mod forward;
mod keep;
mod message;
mod ownership;
mod recovery;
mod relay;

pub(crate) use connect::Greeted;
pub use connect::KeeperAddress;
pub use failover::{StandbyOptions, Survivor};
pub(crate) use forward::Forward;
pub use keep::{KeepEvent, KeepOptions, KeepReport, KeepRequest, keep};
pub use message::Farewell;
pub(crate) use message::KeptNotes;
pub(crate) use ownership::refuse_other_vm;
pub use ownership::{give_back, has_survivor, take_over};
pub(crate) use recovery::{Recovery, Unprotected};
pub(crate) use relay::{Relay, cut};
