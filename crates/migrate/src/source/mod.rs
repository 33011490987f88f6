//! The source role: pages from a [`PageSource`](crate::PageSource) to a destination.

mod copied;
mod gather;
pub(crate) mod host_pages;
pub(crate) mod inbox;
pub(crate) mod multifd;
pub(crate) mod postcopy;
pub(crate) mod precopy;
pub(crate) mod records;
pub(crate) mod sender;
mod unsent;
pub(crate) mod windows;
