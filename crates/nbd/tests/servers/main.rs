//! The client against servers that a test makes up.

mod bed;
mod hostile;
mod units;
