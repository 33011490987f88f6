//! `limosa restore` from outside: the real program, stock QEMU, guests whose memory can be proven.
//!
//! One module for each feature.

#[path = "../stage/mod.rs"]
#[allow(unreachable_pub, reason = "it is shared with other test programs")]
mod stage;

#[path = "../stage/destination.rs"]
#[allow(unreachable_pub, reason = "it is shared with other test programs")]
mod destination;

#[path = "../stage/clones.rs"]
#[allow(unreachable_pub, reason = "it is shared with other test programs")]
mod clone_scene;

mod scene;

mod channels;
mod damage;
mod eager;
mod far;
mod foreign;
mod guests;
mod huge;
mod interrupted;
mod large;
mod lazy;
mod limited;
mod mapped;
mod mapped_pages;
mod packed;
mod refusals;
mod remote;
mod remote_first;
mod remote_made;
mod remote_room;
mod remote_uses;
mod run_state;
mod steered;
mod working_set;
