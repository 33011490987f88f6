//! Monitors from outside: scripted ones, and those of stock QEMU.

#[path = "../stock/mod.rs"]
mod stock;

mod monitor;
mod scripted;
