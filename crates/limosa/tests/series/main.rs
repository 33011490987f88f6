//! Every series of QEMU: a VM that was saved in one is restored, run and cloned in each, in newer ones and, by an old
//! machine type, in older ones.
//!
//! Every run of the tests has [`everywhere`]; `cargo xtask test --qemu all` has [`pairs`], a test for each cell of the
//! table in docs/compatibility.md.

#[path = "../stage/mod.rs"]
#[allow(unreachable_pub, reason = "it is shared with other test programs")]
mod stage;

#[path = "../stage/overlays.rs"]
#[allow(unreachable_pub, reason = "it is shared with other test programs")]
mod overlays;

#[path = "../stage/clones.rs"]
#[allow(unreachable_pub, reason = "it is shared with other test programs")]
mod clone_scene;

#[path = "../stage/destination.rs"]
#[allow(unreachable_pub, reason = "it is shared with other test programs")]
mod destination;

#[path = "../restore/scene.rs"]
#[allow(dead_code, reason = "it is shared with other test programs")]
mod scene;

#[path = "../program/run/scene.rs"]
#[allow(dead_code, reason = "it is shared with other test programs")]
mod run_scene;

mod everywhere;
mod pairs;
mod steps;
mod types;
mod unseen_writes;
