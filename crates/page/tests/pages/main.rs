//! Pages from outside: bitmaps, claims, scans, zero detection.

mod bitmaps;
mod claims;
mod scans;
mod shared_memory;
mod zero_detection;
