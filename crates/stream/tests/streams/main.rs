//! The migration stream from outside.

mod colo;
mod device_tail;
mod early;
mod mapped_ram;
mod multifd;
mod refusals;
mod round_trip;
mod walk;
mod wire_vectors;
mod xbzrle;
