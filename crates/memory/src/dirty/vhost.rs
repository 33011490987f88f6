//! The log of vhost back ends: one bit for each guest-physical page, in memory that they share.
//!
//! A back end sets the bit of a page after it has written the page, by an atomic operation; a fetch takes whole words
//! of bits by exchanging them with 0. So a bit is either taken or still set, and a reader of the page sees every write
//! before the bit was taken.
//!
//! Facts: the vhost-user specification, "Migration" and `VHOST_USER_SET_LOG_BASE`: pages of 4096 bytes
//! (`VHOST_LOG_PAGE`), page `n` is bit `n % 8` of byte `n / 8`.
#![allow(unsafe_code, reason = "looks at memory that other processes write")]

use std::collections::BTreeSet;
use std::fmt;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use limosa_page::{PAGE_SIZE, holes};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};

use super::log::{DirtyLog, DirtyPages, LogError, Writers};
use crate::discarding::DiscardWatch;
use crate::mapping::Mapping;
use crate::{GuestMemory, GuestRegion};

const NAME: &str = "the log of vhost back ends";

/// Words that are checked together: a cache line.
const LINE: usize = 8;

/// Words that are taken before any of their bits is stored: 1 KiB, which stays in the L1 cache.
const PIECE: usize = 128;

/// The log's memory for back ends (`VHOST_USER_SET_LOG_BASE`).
#[derive(Debug, Clone, Copy)]
pub struct LogBase<'a> {
    /// Its memory.
    pub fd: BorrowedFd<'a>,
    /// Its length in bytes.
    pub length: u64,
}

/// Makes all back ends write the log, or none.
type Switch = Box<dyn FnMut(Option<LogBase<'_>>) -> io::Result<()> + Send>;

/// The log.
pub struct VhostLog {
    memory: Arc<GuestMemory>,
    image: Image,
    switch: Switch,
    discards: Option<DiscardWatch>,
    on: bool,
}

/// The shared bitmap.
#[derive(Debug)]
struct Image {
    file: OwnedFd,
    mapping: Mapping,
}

impl VhostLog {
    /// Creates a log for all regions of `memory`.
    ///
    /// `switch` makes every back end write the log: it sends the log, sets the features again with `VHOST_F_LOG_ALL`,
    /// and enables logging of the rings in guest memory. It returns when each back end has confirmed it. With `None` it
    /// ends logging.
    ///
    /// # Errors
    /// The bitmap cannot be allocated: one bit a page up to the highest address of a region.
    pub fn new(
        memory: Arc<GuestMemory>,
        switch: impl FnMut(Option<LogBase<'_>>) -> io::Result<()> + Send + 'static,
    ) -> Result<Self, LogError> {
        let end = memory.regions().last().map_or(0, |region| first_bit(region) + region.pages.len());
        let image = Image::new(end).map_err(failed("allocating the bitmap"))?;
        Ok(Self { memory, image, switch: Box::new(switch), discards: None, on: false })
    }

    /// Returns the shared bitmap, for a back end that connects later.
    pub fn base(&self) -> LogBase<'_> {
        LogBase { fd: self.image.file.as_fd(), length: self.image.mapping.len() as u64 }
    }
}

impl Image {
    fn new(bits: u64) -> io::Result<Self> {
        let length = bits.div_ceil(8).max(1).next_multiple_of(PAGE_SIZE);
        let file = memfd_create("limosa-vhost-log", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&file, length)?;
        // Reading a bitmap that a back end truncated would raise SIGBUS.
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        let mapped = usize::try_from(length).map_err(io::Error::other)?;
        let mapping = Mapping::new(Some((file.as_fd(), 0)), mapped, true, None)?;
        Ok(Self { file, mapping })
    }

    fn words(&self) -> &[AtomicU64] {
        let start = self.mapping.start().cast::<AtomicU64>();
        // SAFETY: the mapping is as long as that, aligned to pages and lives as long as the borrow; its file cannot get
        // shorter; all who share it change it by atomic operations, and no other reference to it is made.
        unsafe { std::slice::from_raw_parts(start, self.mapping.len() / 8) }
    }

    /// Takes the bits of one word.
    fn take(&self, word: u64) -> u64 {
        let word = usize::try_from(word).ok().and_then(|word| self.words().get(word));
        word.map_or(0, |word| u64::from_le(word.swap(0, Ordering::AcqRel)))
    }

    /// Takes the bits of many words, and passes on, in pieces, those with set bits: the number of the first word, and
    /// the bits.
    fn take_all(&self, words: std::ops::Range<u64>, mut found: impl FnMut(u64, &[u64])) -> io::Result<()> {
        let all = self.words();
        // Untouched parts of the bitmap have no memory, and reading them would allocate it.
        for data in holes::data_ranges(self.file.as_fd(), words.start * 8..words.end * 8)? {
            let data = data?;
            let [first, end] = [data.start / 8, data.end.div_ceil(8).min(words.end)];
            let index = usize::try_from(first).ok().zip(usize::try_from(end).ok());
            let Some(within) = index.and_then(|(first, end)| all.get(first..end)) else { continue };
            for (piece, number) in within.chunks(PIECE).zip((first..).step_by(PIECE)) {
                // An atomic exchange waits for all earlier stores, so the bits are stored elsewhere only after the
                // piece.
                let mut taken = [0; PIECE];
                let mut any = 0;
                for (line, taken) in piece.chunks(LINE).zip(taken.chunks_mut(LINE)) {
                    if line.iter().fold(0, |any, word| any | word.load(Ordering::Relaxed)) == 0 {
                        continue;
                    }
                    for (word, taken) in line.iter().zip(taken) {
                        if word.load(Ordering::Relaxed) != 0 {
                            *taken = u64::from_le(word.swap(0, Ordering::AcqRel));
                            any |= *taken;
                        }
                    }
                }
                if any != 0 {
                    found(number, &taken[..piece.len()]);
                }
            }
        }
        Ok(())
    }

    /// Takes all bits and adds those of guest memory to `into`.
    fn import(&self, regions: &[GuestRegion], into: &mut DirtyPages) -> io::Result<()> {
        let mut shared = BTreeSet::new();
        for region in regions {
            let (first, end) = (first_bit(region), first_bit(region) + region.pages.len());
            let whole = first.div_ceil(64)..(end / 64).max(first.div_ceil(64));
            // Words that also have bits of other regions, or of none.
            if whole.start * 64 != first {
                shared.insert(first / 64);
            }
            if whole.end * 64 != end {
                shared.insert(end / 64);
            }
            let Some(bitmap) = into.block_mut(region.block) else { continue };
            self.take_all(whole, |word, bits| {
                bitmap.union_words(region.pages.start.saturating_add(word * 64 - first), bits);
            })?;
        }
        for word in shared {
            let bits = self.take(word);
            for region in regions {
                let first = first_bit(region);
                // The region's page of the word's lowest bit, or the number of bits before its first page.
                match (word * 64).checked_sub(first) {
                    Some(page) => into.add_words(region, page, &[bits]),
                    None => {
                        // Bits of a word: beyond 2^32 they are all shifted out, as they are beyond 64.
                        let before = u32::try_from(first - word * 64).unwrap_or(u64::BITS);
                        into.add_words(region, 0, &[bits.unbounded_shr(before)]);
                    }
                }
            }
        }
        Ok(())
    }
}

/// Returns the bit of a region's first page.
fn first_bit(region: &GuestRegion) -> u64 {
    region.guest_address / PAGE_SIZE
}

fn failed(operation: &'static str) -> impl Fn(io::Error) -> LogError {
    move |source| LogError::Failed { log: NAME, operation, source }
}

impl fmt::Debug for VhostLog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("VhostLog").field("image", &self.image).field("on", &self.on).finish_non_exhaustive()
    }
}

impl DirtyLog for VhostLog {
    fn name(&self) -> &'static str {
        NAME
    }

    fn writers(&self) -> Writers {
        Writers::VHOST
    }

    fn start(&mut self) -> Result<(), LogError> {
        self.stop()?;
        self.discards = Some(self.memory.discardable().watch());
        let words = 0..self.image.mapping.len() as u64 / 8;
        self.image.take_all(words, |_, _| {}).map_err(failed("clearing the bitmap"))?;
        let base = LogBase { fd: self.image.file.as_fd(), length: self.image.mapping.len() as u64 };
        if let Err(error) = (self.switch)(Some(base)) {
            // Back ends that were started stop again; their errors add nothing.
            let _ = (self.switch)(None);
            return Err(failed("having the back ends log")(error));
        }
        self.on = true;
        Ok(())
    }

    fn fetch(&mut self, into: &mut DirtyPages) -> Result<(), LogError> {
        if !self.on {
            return Err(LogError::NotStarted { log: NAME });
        }
        self.image.import(self.memory.regions(), into).map_err(failed("reading the bitmap"))?;
        into.add_discards(self.discards.as_ref());
        Ok(())
    }

    fn stop(&mut self) -> Result<(), LogError> {
        self.discards = None;
        if !std::mem::take(&mut self.on) {
            return Ok(());
        }
        (self.switch)(None).map_err(failed("having the back ends stop logging"))
    }
}

#[cfg(test)]
mod tests {
    use limosa_page::{PageNumber, PageRange};
    use proptest::prelude::*;

    use super::*;
    use crate::BlockOptions;

    /// Two blocks, seen at these guest pages: block, pages of it, and the guest page.
    fn memory(regions: &[(usize, std::ops::Range<u64>, u64)]) -> Option<GuestMemory> {
        let blocks = ["a", "b"].map(|name| BlockOptions::memfd(name, 300 << 12).map().unwrap());
        let regions = regions.iter().map(|(block, pages, at)| GuestRegion {
            guest_address: at * PAGE_SIZE,
            block: *block,
            pages: PageRange::new(PageNumber(pages.start), PageNumber(pages.end)),
        });
        GuestMemory::with_regions(blocks.into(), regions.collect()).ok()
    }

    /// As a back end does.
    fn set(image: &Image, page: u64) {
        // SAFETY: a byte of the mapping, which back ends change by atomic operations.
        let bytes = unsafe {
            std::slice::from_raw_parts(image.mapping.start().cast::<std::sync::atomic::AtomicU8>(), image.mapping.len())
        };
        bytes[usize::try_from(page / 8).unwrap()].fetch_or(1 << (page % 8), Ordering::AcqRel);
    }

    fn region() -> impl Strategy<Value = (usize, std::ops::Range<u64>, u64)> {
        (0..2_usize, 0..299_u64, 1..300_u64, 0..700_u64)
            .prop_map(|(block, start, length, at)| (block, start..(start + length).min(300), at))
    }

    proptest! {
        #[test]
        fn every_bit_gets_to_its_page_once_and_no_other_does(
            regions in prop::collection::vec(region(), 1..4), bits in prop::collection::btree_set(0..1024_u64, 0..300),
        ) {
            let Some(memory) = memory(&regions) else { return Ok(()) };
            let image = Image::new(1024).unwrap();
            bits.iter().for_each(|bit| set(&image, *bit));
            let (mut expected, mut found) = (DirtyPages::new(&memory), DirtyPages::new(&memory));
            for page in &bits {
                if let Some((block, page)) = memory.page_at(page * PAGE_SIZE) {
                    expected.add(block, PageRange::starting_at(page, 1));
                }
            }
            image.import(memory.regions(), &mut found).unwrap();
            prop_assert_eq!(&found, &expected);
            let mut again = DirtyPages::new(&memory);
            image.import(memory.regions(), &mut again).unwrap();
            prop_assert_eq!(again.count(), 0);
        }
    }

    #[test]
    fn a_bit_outside_all_regions_is_passed_over() {
        let memory = memory(&[(0, 0..100, 10), (1, 0..10, 500)]).unwrap();
        let image = Image::new(510).unwrap();
        (0..image.mapping.len() as u64 * 8).for_each(|bit| set(&image, bit));
        let mut found = DirtyPages::new(&memory);
        image.import(memory.regions(), &mut found).unwrap();
        assert_eq!((found.block(0).unwrap().count(), found.block(1).unwrap().count()), (100, 10));
    }

    #[test]
    fn what_no_back_end_touched_takes_no_memory() {
        let memory = Arc::new(memory(&[(0, 0..300, 1 << 30)]).unwrap());
        let mut log = VhostLog::new(memory, |_| Ok(())).unwrap();
        log.start().unwrap();
        set(&log.image, (1 << 30) + 5);
        let mut found = DirtyPages::new(&log.memory.clone());
        log.fetch(&mut found).unwrap();
        assert_eq!(found.count(), 1);
        assert_eq!(rustix::fs::fstat(log.base().fd).unwrap().st_blocks, 8, "one page of a bitmap of 128 MiB");
    }
}
