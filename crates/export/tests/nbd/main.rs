//! The NBD server, asked by a client of its own, by stock clients, and by what is no client at all.

mod bad_input;
mod bed;
mod bitmaps;
mod client;
mod limits;
mod media;
mod model;
mod power;
mod requests;
mod steering;
