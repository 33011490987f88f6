//! Channels from outside: addresses, files, commands, vectors, rates.

mod addresses;
mod descriptors;
mod ends;
mod exec;
mod files;
mod rate;
mod raw;
mod sendfile;
mod signals;
mod vectors;
