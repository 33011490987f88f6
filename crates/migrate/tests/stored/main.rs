//! Stored memory, sent and received: precopy, postcopy, multifd, checkpoints.

#[path = "../model/mod.rs"]
mod model;

mod checkpoints;
mod multifd_destination;
mod multifd_source;
mod postcopy;
mod precopy;
