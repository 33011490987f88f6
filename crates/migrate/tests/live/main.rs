//! Running VMs, moved by the live engine.

#[path = "../model/mod.rs"]
mod model;

mod balloon;
mod checkpoints;
mod cuts;
mod deciding;
mod destination;
mod discards;
mod ends;
mod examples;
mod from_qemu;
mod hints;
mod huge_pages;
mod limited;
mod postcopy;
mod postcopy_source;
mod qemu;
mod rounds;
mod seeded;
mod shared;
mod shared_with_qemu;
mod source;
