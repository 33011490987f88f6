//! Pages read straight to where they belong, on the guess that the stream goes on as it did: header, page, header, page.
//!
//! One vectored read scatters headers into an array and pages into places. The headers are looked at afterwards. Where
//! one is not what was guessed (a zero record, a page of elsewhere), the bytes behind it lie in the wrong places: they are
//! gathered, decoded as they come and copied. The length of the guess follows how well the last ones went.

use std::io::IoSliceMut;
use std::os::fd::OwnedFd;

use anyhow::{Context, Result, ensure};
use rustix::io::readv;

use super::Intake;
use super::batch::{Batch, Hand, Outlet, PAGE, Page};
use super::records::{HEADER, Record};
use crate::raw::Mapping;

/// Most pages that one read asks for.
const WIDEST: usize = 256;
/// Fewest.
const NARROWEST: usize = 4;

/// Where pages go.
pub(super) trait Places {
    /// The places of the next pages if they are consecutive.
    fn upcoming(&mut self) -> &mut [Page];
    /// Whether page `number` may stay where the first upcoming place is.
    fn accept(&mut self, number: u64) -> bool;
    /// Makes the first upcoming place that of page `number`.
    fn seek(&mut self, number: u64);
    /// The page accepted or sought last is whole.
    fn completed(&mut self) -> Result<()>;
    /// Page `number` is zero.
    fn zero(&mut self, number: u64);
    /// A read may have written into this many upcoming places.
    fn guessed(&mut self, places: usize);
}

/// Places in a ring of aligned buffers: any page may lie anywhere, a buffer knows what it holds.
pub(super) struct Ring<'scope, 'env> {
    pub(super) hand: Hand<'scope, 'env>,
    batch: Batch,
    filled: usize,
    number: u64,
}

impl<'scope, 'env> Ring<'scope, 'env> {
    pub(super) fn new(hand: Hand<'scope, 'env>, len: usize) -> Self {
        Self { hand, batch: Batch::new(len), filled: 0, number: 0 }
    }

    pub(super) fn finish(self) -> Result<std::time::Duration> {
        let mut hand = self.hand;
        hand.deliver(self.batch)?;
        hand.finish()
    }
}

impl Places for Ring<'_, '_> {
    fn upcoming(&mut self) -> &mut [Page] {
        self.batch.memory.get_mut(self.filled..).unwrap_or_default()
    }

    fn accept(&mut self, number: u64) -> bool {
        self.number = number;
        true
    }

    fn seek(&mut self, number: u64) {
        self.number = number;
    }

    fn completed(&mut self) -> Result<()> {
        self.batch.pages.push((self.filled * PAGE, self.number));
        self.filled += 1;
        if self.filled == self.batch.memory.len() {
            let full = std::mem::replace(&mut self.batch, Batch { memory: Vec::new(), pages: Vec::new() });
            self.batch = self.hand.deliver(full)?;
            self.filled = 0;
        }
        Ok(())
    }

    fn zero(&mut self, _: u64) {}

    fn guessed(&mut self, _: usize) {}
}

/// Places in the file itself, mapped. A wrong guess has written into the file: what it spoilt is zeroed again. That is
/// right only while pages come in ascending order, once; a later round could lose a page that way.
pub(super) struct InFile<'a> {
    mapping: Mapping,
    outlet: &'a Outlet<'a>,
    next: usize,
    spoilt: usize,
}

impl<'a> InFile<'a> {
    /// All of `outlet`'s file, which is `len` bytes long.
    pub(super) fn new(outlet: &'a Outlet<'a>, len: usize) -> Result<Self> {
        let mapping = Mapping::of_file(outlet.file(), len).context("mapping the file")?;
        Ok(Self { mapping, outlet, next: 0, spoilt: 0 })
    }

    fn pages(&mut self) -> &mut [Page] {
        zerocopy::FromBytes::mut_from_bytes(self.mapping.bytes_mut()).unwrap_or_default()
    }

    pub(super) fn finish(mut self) {
        let (next, spoilt) = (self.next, self.spoilt);
        for page in self.pages().get_mut(next..spoilt).unwrap_or_default() {
            page.0.fill(0);
        }
    }
}

impl Places for InFile<'_> {
    fn upcoming(&mut self) -> &mut [Page] {
        let next = self.next;
        self.pages().get_mut(next..).unwrap_or_default()
    }

    fn accept(&mut self, number: u64) -> bool {
        self.next as u64 == number
    }

    fn seek(&mut self, number: u64) {
        self.next = usize::try_from(number).unwrap_or(usize::MAX);
    }

    fn completed(&mut self) -> Result<()> {
        let start = (self.next * PAGE) as u64;
        self.next += 1;
        self.outlet.wrote(start, start + PAGE as u64, 0)
    }

    fn zero(&mut self, number: u64) {
        self.seek(number);
        if self.next < self.spoilt
            && let Some(page) = self.upcoming().first_mut()
        {
            page.0.fill(0);
        }
        self.next += 1;
    }

    fn guessed(&mut self, places: usize) {
        self.spoilt = self.spoilt.max(self.next + places);
    }
}

/// How far the record that a read cut in two has come.
#[derive(Clone, Copy)]
enum Partial {
    /// Bytes of a header, in the first of the array.
    Header(usize),
    /// Bytes of a page, in the first upcoming place.
    Page(usize),
    /// A zero record without its fill byte.
    Fill(u64),
}

/// The receiver.
pub(super) struct Scatter<'a, P> {
    socket: &'a OwnedFd,
    pub(super) places: P,
    pages: u64,
    headers: Vec<[u8; HEADER]>,
    width: usize,
    partial: Partial,
    pub(super) intake: Intake,
}

impl<'a, P: Places> Scatter<'a, P> {
    pub(super) fn new(socket: &'a OwnedFd, places: P, pages: u64) -> Self {
        Self {
            socket,
            places,
            pages,
            headers: vec![[0; HEADER]; WIDEST],
            width: NARROWEST,
            partial: Partial::Header(0),
            intake: Intake::default(),
        }
    }

    /// Reads the socket to its end.
    pub(super) fn receive(&mut self) -> Result<()> {
        loop {
            if let Partial::Fill(number) = self.partial {
                self.intake.reads += 1;
                ensure!(rustix::io::read(self.socket, &mut [0u8][..])? == 1, "the stream ended inside a record");
                self.zero(number);
                self.partial = Partial::Header(0);
            }
            let (count, places) = self.read()?;
            if count == 0 {
                ensure!(matches!(self.partial, Partial::Header(0)), "the stream ended inside a record");
                return Ok(());
            }
            // One more for the rest of a record at the start of the read, one for a part at its end.
            self.places.guessed(places.min(count / (HEADER + PAGE) + 2));
            self.verify(count, places)?;
        }
    }

    fn zero(&mut self, number: u64) {
        self.places.zero(number);
        self.intake.zeros += 1;
    }

    fn completed(&mut self) -> Result<()> {
        self.intake.pages += 1;
        self.places.completed()
    }

    /// One read; the bytes that came and the places that it could have reached.
    fn read(&mut self) -> Result<(usize, usize)> {
        let places = self.places.upcoming();
        let reach = self.width.min(places.len());
        let (header_have, page_have) = match self.partial {
            Partial::Header(have) => (have, 0),
            Partial::Page(have) => (HEADER, have),
            Partial::Fill(_) => (HEADER, PAGE),
        };
        let mut slices: Vec<IoSliceMut<'_>> = Vec::with_capacity(2 * reach + 1);
        let mut places = places.iter_mut();
        for (at, header) in self.headers.iter_mut().take(reach.max(1)).enumerate() {
            let (header_from, page_from) = if at == 0 { (header_have, page_have) } else { (0, 0) };
            slices.push(IoSliceMut::new(&mut header[header_from..]));
            if let Some(place) = places.next() {
                slices.push(IoSliceMut::new(&mut place.0[page_from..]));
            }
        }
        self.intake.reads += 1;
        Ok((readv(self.socket, &mut slices).context("receiving pages")?, reach))
    }

    /// Looks at the headers of a read of `left` bytes into `places` places.
    fn verify(&mut self, mut left: usize, places: usize) -> Result<()> {
        for at in 0..places.max(1) {
            let page_have = match std::mem::replace(&mut self.partial, Partial::Header(0)) {
                Partial::Page(have) => have,
                Partial::Fill(_) => 0,
                Partial::Header(have) => {
                    let header = self.headers.get(at).copied().unwrap_or_default();
                    let take = left.min(HEADER - have);
                    left -= take;
                    if have + take < HEADER {
                        self.keep_header(&header[..have + take]);
                        self.width = (at + 16).min(WIDEST);
                        return Ok(());
                    }
                    match Record::decode(header, self.pages)? {
                        Record::Page(number) if at < places && self.places.accept(number) => 0,
                        record => {
                            self.width = (2 * at).clamp(NARROWEST, WIDEST);
                            let behind = self.gather(at, left);
                            return self.repair(record, &behind);
                        }
                    }
                }
            };
            let take = left.min(PAGE - page_have);
            left -= take;
            if page_have + take < PAGE {
                self.partial = Partial::Page(page_have + take);
                self.width = (at + 16).min(WIDEST);
                return Ok(());
            }
            self.completed()?;
        }
        self.width = (2 * self.width).min(WIDEST);
        Ok(())
    }

    fn keep_header(&mut self, part: &[u8]) {
        if let Some(first) = self.headers.first_mut() {
            first[..part.len()].copy_from_slice(part);
        }
        self.partial = Partial::Header(part.len());
    }

    /// The bytes behind the header `at`, in the order of the stream.
    fn gather(&mut self, at: usize, mut left: usize) -> Vec<u8> {
        let mut behind = Vec::with_capacity(left);
        let headers = self.headers.get(at + 1..).unwrap_or_default().iter().map(|header| &header[..]);
        let mut headers = headers.chain(std::iter::repeat(&[][..]));
        for page in self.places.upcoming() {
            for piece in [&page.0[..], headers.next().unwrap_or_default()] {
                let take = left.min(piece.len());
                behind.extend_from_slice(&piece[..take]);
                left -= take;
            }
            if left == 0 {
                break;
            }
        }
        behind
    }

    /// Takes `record` and those in `behind` as they come and copies pages to their places.
    fn repair(&mut self, mut record: Record, mut behind: &[u8]) -> Result<()> {
        loop {
            match record {
                Record::Page(number) => {
                    self.places.seek(number);
                    let take = behind.len().min(PAGE);
                    let (payload, rest) = behind.split_at(take);
                    let place = self.places.upcoming().first_mut().context("no place for a page")?;
                    place.0[..take].copy_from_slice(payload);
                    self.intake.copied += 1;
                    if take < PAGE {
                        self.partial = Partial::Page(take);
                        return Ok(());
                    }
                    self.completed()?;
                    behind = rest;
                }
                Record::Zero(number) => {
                    let Some((_fill, rest)) = behind.split_first() else {
                        self.partial = Partial::Fill(number);
                        return Ok(());
                    };
                    self.zero(number);
                    behind = rest;
                }
                Record::End => {}
            }
            let Some((header, rest)) = behind.split_first_chunk::<HEADER>() else {
                self.keep_header(behind);
                return Ok(());
            };
            record = Record::decode(*header, self.pages)?;
            behind = rest;
        }
    }
}
