//! The source role: pages from a [`PageSource`](crate::stored::PageSource) to a destination.

pub(crate) mod dirty_page_queue;
mod gather;
pub(crate) mod host_pages;
pub(crate) mod multifd;
pub(crate) mod postcopy;
pub(crate) mod precopy;
pub(crate) mod records;
pub(crate) mod return_path;
pub(crate) mod sender;
mod stream_buffer;
mod touched;
mod unsent;
