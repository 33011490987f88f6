//! Stored memory, sent and received: precopy, postcopy, multifd.

#[path = "../model/mod.rs"]
mod model;

mod multifd_destination;
mod multifd_source;
mod postcopy;
mod precopy;
