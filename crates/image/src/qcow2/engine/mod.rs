//! An image in use: its owners, each with private fields, and the order in which they write.
//!
//! `image` describes them and the laws that they keep. A module imports only modules that are below it.

pub(super) mod allocator;
pub(super) mod cancelled_writes;
mod compressed_writes;
pub(super) mod context;
pub(super) mod counters;
pub(super) mod dirty_bitmaps;
pub(super) mod epoch;
pub(super) mod flusher;
pub(super) mod grow;
pub(super) mod guest_data;
pub(super) mod header_owner;
pub(super) mod image;
pub(super) mod journal;
pub(super) mod l1;
pub(super) mod layers;
pub(super) mod lengths;
pub(super) mod locks;
pub(super) mod lookup;
pub(super) mod options;
pub(super) mod overlap_check;
pub(super) mod owners;
pub(super) mod pool;
pub(super) mod preallocated;
pub(super) mod reader;
pub(super) mod refcounts;
pub(super) mod seams;
pub(super) mod shared_future;
pub(super) mod slice;
mod slices;
pub(super) mod tables;
pub(super) mod writer;
