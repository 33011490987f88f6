//! The source role: pages from a [`PageSource`](crate::PageSource) to a destination.

mod host_pages;
mod inbox;
mod ledger;
pub mod multifd;
pub mod postcopy;
pub mod precopy;
mod records;
mod sender;
