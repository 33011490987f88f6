//! One contract, kept by every storage.

mod beds;
mod promises;
