//! Images that are written, and what reaches their files.

mod allocate_ahead;
mod clones;
mod closing;
mod compressed;
mod damaged_bitmaps;
mod device;
mod dirty_bitmaps;
mod failed_growth;
mod failed_writes;
mod first_writes;
mod growing;
mod growing_concurrently;
mod journal;
mod not_closed;
mod overlap;
mod overlapping_requests;
