//! `cargo xtask setup|test|demo|bench|fuzz`.

fn main() {}
