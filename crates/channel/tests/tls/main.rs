//! Encrypted channels from outside: what they carry, whom they refuse, how they end.
//!
//! One module for each feature.

mod bed;

mod acceptor;
mod ends;
mod hostile;
mod openssl;
mod pieces;
mod refusals;
mod transfers;
