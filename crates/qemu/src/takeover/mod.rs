//! Taking over a VM whose job died.
//!
//! Law: **at most one side runs the VM.** A VM that has been handed over, or may have been, is left stopped for a
//! person to decide; everything else is undone and the VM continues as it was.
//!
//! **Nothing is seen of a VM that its checkpoint does not know.** A protected VM whose disk is lost with its server can
//! only be failed over, because its disk goes back to the checkpoint: the watchdog leaves it stopped.
//!
//! [`next_step`] decides, from the job's record and what QEMU says, without touching anything; [`take_over`] does it.
//! The watchdog and `limosa resume` share both.
//!
//! Facts found with QEMU 10.0.2 that the plan rests on:
//!
//! * `migrate_cancel` works in every state of an outgoing precopy migration, `device` included: the VM runs again if it
//!   ran before, and stays `paused` if it did not. With no migration it does nothing.
//! * A receiver that goes away before its SHUT makes the migration `failed`; the VM runs again by itself.
//! * A migration that has `failed` or `completed` is not done with: settings that change before QEMU has let go of it
//!   can end the process, at once or with the next migration ([`crate::monitor::Monitor::holds_migration`]).
//! * `cont` is refused between STOP and the end ("Migration is not finalized yet"); after `completed` (`postmigrate`)
//!   it works.
//! * Capabilities cannot be changed while a migration runs, parameters can.
//! * A failed `migrate-incoming` cannot be repeated in the same process, whether the address was bad (the state stays
//!   `setup`) or the stream ("The incoming migration has already been started"): that QEMU has to be started again.
//! * A channel that breaks while a destination loads device state ends the migration (`failed`); after the guest runs,
//!   it makes it `postcopy-paused`, with the guest running, or stopped and continued at will, on the pages that are
//!   there.
//! * In COLO (11.1) a VM whose checkpoint is cut off stands still until `x-colo-lost-heartbeat`; the migration is
//!   `completed` after that, and the VM runs. `migrate_cancel` leaves `cancelling` there.

mod execute;
mod overlays;
mod plan;
mod served;

pub(crate) use execute::take_over_holding;
pub use execute::{Takeover, take_over};
pub(crate) use overlays::abandoned;
pub(crate) use plan::SAVE_SETUP_PATIENCE;
pub use plan::{Actor, Outcome, Progress, QemuState, Step, next_step};
