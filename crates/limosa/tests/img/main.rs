//! `limosa img` does what qemu-img does, says what that says, and ends as that ends.

#[path = "../stage/mod.rs"]
#[allow(unreachable_pub, reason = "it is shared with other test programs")]
mod stage;

mod amend;
mod bed;
mod bench;
mod bitmap;
mod check;
mod commit;
mod compare;
mod compress;
mod convert;
mod create;
mod dd;
mod info;
mod interrupt;
mod limits;
mod locks;
mod luks;
mod map;
mod measure;
mod nbd;
mod nbd_tls;
mod old_aes;
mod overlaid;
mod pipe;
mod rebase;
#[cfg(feature = "remote")]
mod remote;
mod resize;
mod resume;
mod snapshot;
mod usage;
