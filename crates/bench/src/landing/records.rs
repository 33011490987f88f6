//! The RAM records of the stream that the bench sends: one block, so every record carries CONTINUE and no name.

use anyhow::{Result, bail};

use super::batch::PAGE;

/// Bytes of a record's address-and-flags word.
pub(super) const HEADER: usize = 8;

const ZERO: u64 = 0x02;
const DATA: u64 = 0x08;
const END: u64 = 0x10;
const CONTINUE: u64 = 0x20;

/// A record, by page number in the block. A page's 4096 bytes or a zero page's fill byte follow it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Record {
    Page(u64),
    Zero(u64),
    End,
}

impl Record {
    pub(super) fn encode(self) -> [u8; HEADER] {
        let word = match self {
            Self::Page(number) => (number * PAGE as u64) | DATA | CONTINUE,
            Self::Zero(number) => (number * PAGE as u64) | ZERO | CONTINUE,
            Self::End => END,
        };
        word.to_be_bytes()
    }

    /// Decodes a header for a block of `pages` pages.
    pub(super) fn decode(header: [u8; HEADER], pages: u64) -> Result<Self> {
        let word = u64::from_be_bytes(header);
        let number = word / PAGE as u64;
        match word % PAGE as u64 {
            flags if flags == DATA | CONTINUE && number < pages => Ok(Self::Page(number)),
            flags if flags == ZERO | CONTINUE && number < pages => Ok(Self::Zero(number)),
            END if number == 0 => Ok(Self::End),
            _ => bail!("record {word:#x}: not one of a block of {pages} pages"),
        }
    }
}
