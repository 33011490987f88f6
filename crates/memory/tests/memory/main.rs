//! Guest memory from outside: dirty logs, population, discards.

mod discard;
mod lost_writes;
mod page_size;
mod populate;
mod populated;
mod rust_vmm;
mod write_protection;
