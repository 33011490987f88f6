//! The command line of limosa: parse, wire, print.

fn main() {}
