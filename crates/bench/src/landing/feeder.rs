//! The sending side: a stream with the shape of QEMU's, as fast as the receiver takes it.
//!
//! QEMU gathers up to 64 pieces and then sends them in one call: a page is a piece, and so are the small records that
//! lie between two pages, because they are collected in one buffer.

use std::io::IoSlice;
use std::os::fd::OwnedFd;

use anyhow::{Context, Result};

use super::batch::PAGE;
use super::records::Record;

/// Pieces in one call.
const PIECES: usize = 64;

/// What the stream holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Content {
    /// Every page has content.
    Dense,
    /// Three pages in ten are zero, scattered over the memory.
    ScatteredZeros,
    /// Three pages in ten are zero, in runs of 64.
    ZeroRuns,
}

impl Content {
    /// Whether a page is sent as a zero record.
    pub(super) fn is_zero(self, number: u64) -> bool {
        let mixed = |value: u64| (value.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) % 10 < 3;
        match self {
            Self::Dense => false,
            Self::ScatteredZeros => mixed(number),
            Self::ZeroRuns => mixed(number / 64),
        }
    }
}

/// Sends every page of `memory` in ascending order, then the end mark, and closes the socket.
pub(super) fn feed(socket: &OwnedFd, memory: &[u8], content: Content) -> Result<()> {
    let mut numbers = (0u64..).zip(memory.as_chunks::<PAGE>().0).peekable();
    let mut small = Vec::new();
    let mut pieces = Vec::new();
    while numbers.peek().is_some() {
        small.clear();
        pieces.clear();
        // Where each page's piece comes among the small bytes.
        while pieces.len() * 2 < PIECES {
            let Some((number, page)) = numbers.next() else { break };
            if content.is_zero(number) {
                small.extend_from_slice(&Record::Zero(number).encode());
                small.push(0);
            } else {
                small.extend_from_slice(&Record::Page(number).encode());
                pieces.push((small.len(), page));
            }
        }
        if numbers.peek().is_none() {
            small.extend_from_slice(&Record::End.encode());
        }
        let (mut slices, mut sent) = (Vec::with_capacity(PIECES + 1), 0);
        for &(end, page) in &pieces {
            slices.push(IoSlice::new(small.get(sent..end).unwrap_or_default()));
            slices.push(IoSlice::new(page));
            sent = end;
        }
        slices.push(IoSlice::new(small.get(sent..).unwrap_or_default()));
        let mut rest = slices.as_mut_slice();
        IoSlice::advance_slices(&mut rest, 0);
        while !rest.is_empty() {
            let count = rustix::io::writev(socket, rest).context("sending pages")?;
            IoSlice::advance_slices(&mut rest, count);
        }
    }
    rustix::net::shutdown(socket, rustix::net::Shutdown::Write).context("closing the stream")
}
