//! Built-in guests that move between processes.

mod chaos;

mod hints;
mod moves;
mod network;
mod postcopy_chaos;
mod precopy_chaos;
mod protect;
