//! `limosa img` does what qemu-img does, says what that says, and ends as that ends.

mod stage;

#[path = "img/bed.rs"]
mod bed;
#[path = "img/bench.rs"]
mod bench;
#[path = "img/check.rs"]
mod check;
#[path = "img/compare.rs"]
mod compare;
#[path = "img/convert.rs"]
mod convert;
#[path = "img/create.rs"]
mod create;
#[path = "img/info.rs"]
mod info;
#[path = "img/interrupt.rs"]
mod interrupt;
#[path = "img/locks.rs"]
mod locks;
#[path = "img/map.rs"]
mod map;
#[path = "img/resize.rs"]
mod resize;
#[path = "img/usage.rs"]
mod usage;
