//! An allocator that fills what is freed, so that a use after free shows.
#![allow(unsafe_code)] // An allocator is unsafe to write.

use std::alloc::{GlobalAlloc, Layout, System};
use std::hint::black_box;

/// The system's allocator, which fills memory with [`POISON`](Self::POISON) before it frees it: what was lent to the
/// kernel and freed too early arrives as that. For the `#[global_allocator]` of a test program.
#[derive(Debug, Clone, Copy)]
pub struct Poisoning;

impl Poisoning {
    /// The byte that freed memory is filled with.
    pub const POISON: u8 = 0xdb;
}

// SAFETY: the system's allocator, with memory written that is about to be freed. What is not implemented here is made
// of these two.
unsafe impl GlobalAlloc for Poisoning {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, start: *mut u8, layout: Layout) {
        // SAFETY: the caller gives back memory of this layout, and uses it no more.
        unsafe {
            start.write_bytes(Self::POISON, layout.size());
            // Without `black_box` the compiler could leave the write out, since nothing reads it.
            System.dealloc(black_box(start), layout);
        }
    }
}
