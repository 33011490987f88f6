//! Continuous protection: a stock QEMU whose COLO works, the real keeper, and guests whose memory can be proven.
//!
//! One module for each feature.

#[path = "../stage/mod.rs"]
#[allow(unreachable_pub, reason = "it is shared with other test programs")]
mod stage;

#[path = "../stage/overlays.rs"]
#[allow(unreachable_pub, reason = "it is shared with other test programs")]
mod overlays;

mod file_system;
mod line;
mod network;
mod outside;
mod requests;
mod running;
mod scene;

mod acknowledged;
mod background;
mod both;
mod channels;
mod disks;
mod ends;
mod failover;
mod filters;
mod full;
mod gate;
mod hosts;
mod hung;
mod losses;
mod overlaid;
mod passt;
mod refusals;
mod refused;
mod remote;
mod remote_disks;
mod seen;
mod standby;
mod two_keepers;
