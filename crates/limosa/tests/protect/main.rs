//! Continuous protection: a stock QEMU whose COLO works, the real keeper, and guests whose memory can be proven.
//!
//! One module for each feature.

#[path = "../stage/mod.rs"]
#[allow(unreachable_pub, reason = "it is shared with other test programs")]
mod stage;

mod outside;
mod scene;

mod ends;
mod failover;
mod gate;
mod refusals;
