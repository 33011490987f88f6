//! The parts of a request in guest memory.
//!
//! A request is a header that the device reads, data, and a status byte that the device writes. The driver may cut it
//! into descriptors as it likes (virtio 1.2, section 2.7.4): the header is the first 16 bytes that the device may read,
//! the status the last byte that it may write.
//! Law: what a driver says is bounded here: a chain that is longer than any request needs is invalid, and so is one
//! whose end cannot be found.

use limosa_page::to_usize;

use super::config::SEGMENTS_MAX;

/// Bytes of a header.
const HEADER: usize = 16;

/// Most descriptors of a request. Drivers that merge less than they could may use more segments than the device
/// announces.
const DESCRIPTORS_MAX: usize = 8 * SEGMENTS_MAX as usize;

/// A range of guest memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Piece {
    /// Guest-physical address.
    pub(super) address: u64,
    /// Bytes.
    pub(super) length: u32,
}

/// A descriptor of a chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Link {
    pub(super) piece: Piece,
    /// The device writes it, and does not read it.
    pub(super) is_writable: bool,
    /// Another one follows.
    pub(super) has_next: bool,
}

/// The parts of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Parts {
    pub(super) header: [u8; HEADER],
    /// Memory that the device reads, after the header.
    pub(super) readable: Vec<Piece>,
    /// Memory that the device writes, before the status.
    pub(super) writable: Vec<Piece>,
    /// Address of the status byte.
    pub(super) status: u64,
}

/// Returns the bytes of all pieces.
pub(super) fn total(pieces: &[Piece]) -> u64 {
    pieces.iter().map(|piece| u64::from(piece.length)).sum()
}

impl Parts {
    /// Finds the parts in a chain. `read` copies bytes out of guest memory, and returns false
    /// where there is no memory.
    ///
    /// # Errors
    /// The reason why the chain is not a request; the driver has broken the ring.
    pub(super) fn of(
        links: impl Iterator<Item = Link>,
        mut read: impl FnMut(u64, &mut [u8]) -> bool,
    ) -> Result<Self, &'static str> {
        let mut header = [0; HEADER];
        let mut missing = header.as_mut_slice();
        let (mut readable, mut writable) = (Vec::new(), Vec::<Piece>::new());
        // An empty chain has an end that was not found.
        let mut is_cut = true;
        for (number, Link { mut piece, is_writable, has_next }) in links.enumerate() {
            if number == DESCRIPTORS_MAX {
                return Err("it has too many descriptors");
            }
            is_cut = has_next;
            if piece.address.checked_add(u64::from(piece.length)).is_none() {
                return Err("a descriptor reaches past the end of the address space");
            }
            if piece.length == 0 {
                continue;
            }
            if is_writable {
                writable.push(piece);
                continue;
            }
            if !writable.is_empty() {
                return Err("the device would read behind what it writes");
            }
            let length = missing.len().min(to_usize(u64::from(piece.length)));
            if let Some((part, rest)) = std::mem::take(&mut missing).split_at_mut_checked(length) {
                if !part.is_empty() && !read(piece.address, part) {
                    return Err("its header is not in memory");
                }
                missing = rest;
            }
            // At most the 16 bytes of a header.
            let taken = u32::try_from(length).unwrap_or(piece.length);
            piece = Piece { address: piece.address + u64::from(taken), length: piece.length - taken };
            if piece.length > 0 {
                readable.push(piece);
            }
        }
        if is_cut {
            return Err("its descriptors do not end, or are not in memory");
        }
        if !missing.is_empty() {
            return Err("it has no header");
        }
        let Some(last) = writable.last_mut() else { return Err("it has no status byte") };
        last.length -= 1;
        let status = last.address + u64::from(last.length);
        if last.length == 0 {
            writable.pop();
        }
        Ok(Self { header, readable, writable, status })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn link(address: u64, length: u32, is_writable: bool) -> Link {
        Link { piece: Piece { address, length }, is_writable, has_next: true }
    }

    fn of(mut links: Vec<Link>) -> Result<Parts, &'static str> {
        if let Some(last) = links.last_mut() {
            last.has_next = false;
        }
        // Each byte of memory is the low byte of its address.
        Parts::of(links.into_iter(), |address, bytes| {
            (address..).zip(&mut *bytes).for_each(|(address, byte)| *byte = address.to_le_bytes()[0]);
            address < 1 << 20
        })
    }

    fn piece(address: u64, length: u32) -> Piece {
        Piece { address, length }
    }

    #[test]
    fn a_header_data_and_a_status_may_be_cut_anywhere() {
        let usual = of(vec![link(0x100, 16, false), link(0x1000, 4096, true), link(0x200, 1, true)]).unwrap();
        assert_eq!((usual.header[0], usual.header[15]), (0, 15));
        assert_eq!((usual.readable, usual.writable, usual.status), (vec![], vec![piece(0x1000, 4096)], 0x200));
        // The header in three parts, the last of them with data; data and the status in one.
        let odd = of(vec![
            link(0x100, 1, false),
            link(0x101, 14, false),
            link(0x10f, 10, false),
            link(0x300, 0, false),
            link(0x400, 5, false),
            link(0x500, 513, true),
        ])
        .unwrap();
        assert_eq!(odd.header, usual.header);
        assert_eq!(odd.readable, [piece(0x110, 9), piece(0x400, 5)]);
        assert_eq!((odd.writable, odd.status), (vec![piece(0x500, 512)], 0x700));
    }

    #[test]
    fn a_chain_that_is_no_request_is_said_to_be_wrong() {
        let header = link(0, 16, false);
        for (links, why) in [
            (vec![], "do not end"),
            (vec![link(0, 15, false), link(0, 1, true)], "no header"),
            (vec![link(0, 1, true)], "no header"),
            (vec![header], "no status"),
            (vec![header, link(0, 0, true)], "no status"),
            (vec![header, link(0, 1, true), link(0, 1, false)], "read behind"),
            (vec![link(1 << 20, 16, false), link(0, 1, true)], "not in memory"),
            (vec![header, link(u64::MAX, 2, true)], "address space"),
            (vec![header; DESCRIPTORS_MAX + 1], "too many"),
        ] {
            assert!(of(links.clone()).unwrap_err().contains(why), "{why}: {links:?}");
        }
        let endless = std::iter::repeat(link(0, 16, false));
        assert!(Parts::of(endless, |_, _| true).unwrap_err().contains("too many"));
        let cut = [header, link(0, 1, true)];
        assert!(Parts::of(cut.into_iter(), |_, _| true).unwrap_err().contains("do not end"));
    }

    proptest! {
        #[test]
        fn no_byte_is_lost_and_none_is_used_twice(
            readable in prop::collection::vec(0_u32..40, 0..6),
            writable in prop::collection::vec(0_u32..40, 0..6),
        ) {
            let links = |lengths: &[u32], is_writable| {
                lengths.iter().zip(0_u64..).map(|(length, at)| link(at * 64, *length, is_writable)).collect::<Vec<_>>()
            };
            let sum = |lengths: &[u32]| lengths.iter().copied().map(u64::from).sum::<u64>();
            let found = of([links(&readable, false), links(&writable, true)].concat());
            prop_assert_eq!(found.is_ok(), sum(&readable) >= 16 && sum(&writable) >= 1);
            if let Ok(parts) = found {
                prop_assert_eq!(total(&parts.readable), sum(&readable) - 16);
                prop_assert_eq!(total(&parts.writable), sum(&writable) - 1);
                prop_assert!(parts.readable.iter().chain(&parts.writable).all(|piece| piece.length > 0));
            }
        }
    }
}
