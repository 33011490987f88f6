//! `limosa serve`, used by stock clients: QEMU's tools and libnbd's.

#[path = "../stage/mod.rs"]
mod stage;

#[path = "../stage/overlays.rs"]
#[allow(unreachable_pub, reason = "it is shared with other test programs")]
mod overlays;

mod bed;
mod bitmaps;
mod blk_guests;
mod blk_kills;
mod blk_program;
mod clients;
mod commit;
mod epochs;
mod exercise;
mod guest;
mod idle;
mod kills;
mod locks;
mod media;
mod metrics;
mod program;
mod sandbox;
mod saves;
mod steering;
mod tls;
mod versions;
