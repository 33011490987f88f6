//! Snapshot files, written, read, compared and broken.

mod fixture;

mod adopt;
mod checkpoint_faults;
mod checkpoints;
mod comparison;
mod foreign;
mod hostile;
mod lent;
mod mappable;
mod publish;
mod round_trip;
mod working_set;
