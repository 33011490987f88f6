//! The program from outside: what each command prints, refuses and ends with.

#[path = "../stage/mod.rs"]
#[allow(unreachable_pub, reason = "it is shared with other test programs")]
mod stage;

#[path = "../../../snapshot/tests/snapshots/fixture/mod.rs"]
mod snapshot_fixture;

mod balloon;
mod compare;
mod control;
mod inspect;
mod operators;
mod pack_memory;
mod packaging;
mod refusals;
mod run;
mod snapshots;
mod snapshots_in_stores;
