//! The device, driven by the model of Linux's driver and by rings with arbitrary contents.

#![allow(clippy::single_range_in_vec_init, reason = "ranges of memory are compared as lists of them")]

mod bare;
mod bounds;
mod device;
#[cfg(feature = "vhost-user")]
mod done;
mod huge;
mod machine;
mod properties;
mod refused;
mod rings;
mod waiting;
