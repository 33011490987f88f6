//! Stored memory, sent and received: precopy, postcopy, multifd, control.

#[path = "../model/mod.rs"]
mod model;

mod control;
mod multifd_destination;
mod multifd_source;
mod postcopy;
mod precopy;
