//! Built-in guests that move between processes.

#[path = "../stage/mod.rs"]
#[allow(unreachable_pub, reason = "it is shared with other test programs")]
mod stage;

mod chaos;

mod hints;
mod moves;
mod network;
mod postcopy_chaos;
mod precopy_chaos;
