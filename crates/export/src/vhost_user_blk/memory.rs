//! Guest memory as buffers of requests.
//!
//! **Law: guest memory is never a `&[u8]`.** The guest may write it at any time. Data goes to the kernel by address;
//! headers and ranges are copied out before they are looked at. Memory stays mapped as long as a buffer of it lives,
//! and no request is in flight when the front end is told that a ring has stopped or its memory has changed.
#![allow(unsafe_code, reason = "guest memory becomes buffers, whose addresses go to the kernel")]

use std::any::Any;
use std::sync::Arc;

use limosa_storage::{Buffer, IoVector};
use limosa_vhost::Ram;
use vm_memory::{Bytes as _, GuestAddress};

use super::chain::Piece;

/// The memory of a queue.
#[derive(Debug, Clone)]
pub(super) struct GuestMemory {
    ram: Arc<Ram>,
}

impl GuestMemory {
    /// The memory that a ring is in.
    pub(super) const fn new(ram: Arc<Ram>) -> Self {
        Self { ram }
    }

    /// Copies bytes out. Returns false if not all of them are memory.
    pub(super) fn read(&self, address: u64, into: &mut [u8]) -> bool {
        self.ram.memory().read_slice(into, GuestAddress(address)).is_ok()
    }

    /// Writes a byte. Returns false if there is no memory.
    pub(super) fn write_byte(&self, address: u64, byte: u8) -> bool {
        self.ram.memory().write_obj(byte, GuestAddress(address)).is_ok()
    }

    /// Returns whether a byte is memory.
    pub(super) fn holds(&self, address: u64) -> bool {
        self.ram.visit_host_ranges(address, 1, |_, _| {})
    }

    /// Returns the pieces as buffers of the same memory; `None` if not all of them are memory.
    pub(super) fn vector(&self, pieces: &[Piece]) -> Option<IoVector> {
        let keep: Arc<dyn Any + Send + Sync> = self.ram.clone();
        let mut vector = IoVector::new();
        let all = pieces.iter().all(|piece| {
            self.ram.visit_host_ranges(piece.address, piece.length.into(), |start, length| {
                // SAFETY: `Ram` has the range mapped, readable and writable, until `keep` is dropped, and makes no
                // reference to it: `vm-memory` accesses it by volatile pointers.
                vector.push(unsafe { Buffer::from_raw(start, length, Arc::clone(&keep)) });
            })
        });
        all.then_some(vector)
    }
}
