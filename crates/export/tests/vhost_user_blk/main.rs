//! The vhost-user-blk device, used by a driver of its own, and by what no honest driver does.

#[path = "../nbd/bed.rs"]
#[allow(dead_code, reason = "the tests over NBD use the rest")]
mod images;

mod bad_rings;
mod model;
mod requests;
mod served;
mod stopping;
