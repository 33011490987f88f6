//! Checksums of guest memory, one for each MiB.
//!
//! A checksum covers 1 MiB of guest memory, not of the file: pages that are not stored count as zeros, so it stays true
//! when a page moves between "stored zeros" and "not stored". crc32c, because the processor has an instruction for it:
//! it guards against a disk that returns something else than it was given, not against an attacker, who can compute one
//! too.
//!
//! Law of this module: a page that is served comes from the very buffer that was verified, which is a small cache's or
//! was just read. That a page is zero because it is not stored is the bitmap's word, and not believed either: a chunk
//! without a stored page is compared with the checksum of zeros when the file is opened, which reads nothing, and one
//! that is partly stored when it is asked for ([`Verifier::verify`]).

use std::collections::VecDeque;
use std::fmt;
use std::num::NonZeroUsize;
use std::panic::resume_unwind;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::thread;

use limosa_page::{AtomicPageBitmap, PAGE_LEN, PAGE_SIZE, PageBitmap, PageNumber, PageRange, to_usize};
use limosa_stream::mapped_ram::Layout;
use parking_lot::Mutex;

use crate::error::SnapshotError;
use crate::layout::Memory;
use crate::store::{StoreFile, StoredRange};
use crate::trailer::CHUNK;

/// The checksum of the device state: of the sections before the pages, if there are any, and of `tail`.
pub(crate) fn of_devices(layout: &Layout, tail: &[u8]) -> u32 {
    crc32c::crc32c_append(crc32c::crc32c(&layout.early_sections), tail)
}

/// Pages that one checksum covers.
pub(crate) const CHUNK_PAGES: u64 = CHUNK / PAGE_SIZE;
/// Verified chunks that are kept: 16 MiB, so that neighbouring faults do not read a chunk twice.
const CACHED: usize = 16;
/// More threads than this only wait for memory.
const THREADS: usize = 4;

/// How many checksums blocks of these lengths (in pages) have.
pub(crate) fn count(places: &[StoredRange]) -> u64 {
    places.iter().map(|place| place.pages.div_ceil(CHUNK_PAGES)).sum()
}

/// A RAM block of a snapshot: its number, its place, and which of its pages are stored.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StoredBlock<'a> {
    pub(crate) index: usize,
    pub(crate) place: &'a StoredRange,
    pub(crate) stored: &'a PageBitmap,
}

/// A chunk of a RAM block.
struct Chunk<'a> {
    place: &'a StoredRange,
    pages: PageRange,
    /// Its index among all chunks of the snapshot.
    index: u64,
}

/// The pages of the `index`-th chunk of a block.
fn chunk_pages(place: &StoredRange, index: u64) -> PageRange {
    let start = PageNumber(index * CHUNK_PAGES);
    PageRange::starting_at(start, CHUNK_PAGES).intersect(PageRange::whole_block(place.pages))
}

/// The bytes in a range of at most a chunk's pages.
fn length(pages: PageRange) -> usize {
    to_usize(pages.len() * PAGE_SIZE)
}

/// The checksums of everything that is stored, in block order.
///
/// Reads the stored chunks once, by several threads: right after a save they are in the page cache.
///
/// # Errors
/// The first chunk that cannot be read.
pub(crate) fn compute(
    file: &StoreFile,
    places: &[StoredRange],
    stored: &[PageBitmap],
) -> Result<Vec<u32>, SnapshotError> {
    let jobs: Vec<(&StoredRange, &PageBitmap, PageRange)> = places
        .iter()
        .zip(stored)
        .flat_map(|(place, stored)| {
            (0..place.pages.div_ceil(CHUNK_PAGES)).map(move |index| (place, stored, chunk_pages(place, index)))
        })
        .collect();
    let results: Vec<AtomicU32> = jobs.iter().map(|_| AtomicU32::new(0)).collect();
    let next = AtomicUsize::new(0);
    let zeros = ZeroChecksums::new();
    let work = || -> Result<(), SnapshotError> {
        let mut buffer = Vec::new();
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            let (Some((place, stored, pages)), Some(result)) = (jobs.get(at), results.get(at)) else { return Ok(()) };
            let checksum = if stored.count_in(*pages) == 0 {
                zeros.of(*pages)
            } else {
                buffer.clear();
                buffer.resize(length(*pages), 0);
                file.read_pages(place, stored, *pages, &mut buffer)?;
                crc32c::crc32c(&buffer)
            };
            result.store(checksum, Ordering::Relaxed);
        }
    };
    let threads = thread::available_parallelism().map_or(1, NonZeroUsize::get).min(THREADS);
    thread::scope(|scope| {
        let others: Vec<_> = (1..threads).map(|_| scope.spawn(work)).collect();
        let mine = work();
        others
            .into_iter()
            .map(|other| other.join().unwrap_or_else(|panic| resume_unwind(panic)))
            .fold(mine, Result::and)
    })?;
    Ok(results.into_iter().map(AtomicU32::into_inner).collect())
}

/// The checksums of zero pages: at index n, that of n pages.
#[derive(Debug)]
struct ZeroChecksums(Vec<u32>);

impl ZeroChecksums {
    fn new() -> Self {
        let append = |so_far: &mut u32, ()| {
            let checksum = *so_far;
            *so_far = crc32c::crc32c_append(checksum, &[0; PAGE_LEN]);
            Some(checksum)
        };
        Self(
            std::iter::repeat_n((), length(PageRange::whole_block(CHUNK_PAGES)) / PAGE_LEN + 1)
                .scan(0, append)
                .collect(),
        )
    }

    /// That of a chunk of zeros.
    fn of(&self, chunk: PageRange) -> u32 {
        self.0[to_usize(chunk.len())]
    }
}

/// A chunk that has no stored page although its recorded checksum is not that of zeros.
#[derive(Debug, Clone)]
pub(crate) struct Lost {
    block: String,
    offset: u64,
    recorded: u32,
    found: u32,
}

impl Lost {
    /// The error that this is for the file of that name.
    pub(crate) fn error(&self, path: &Path) -> SnapshotError {
        SnapshotError::Checksum {
            path: path.to_path_buf(),
            block: self.block.clone(),
            offset: self.offset,
            recorded: self.recorded,
            found: self.found,
        }
    }
}

impl fmt::Display for Lost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { block, offset, .. } = self;
        write!(
            f,
            "the page bitmap of RAM block {block} is damaged: nothing is stored at block offset {offset:#x}, where by its \
             checksum there was more than zeros"
        )
    }
}

/// Recorded checksums, and which chunks were found to match theirs.
#[derive(Debug)]
pub(crate) struct Verifier {
    recorded: Vec<u32>,
    /// Index of each block's first checksum.
    first: Vec<u64>,
    verified: AtomicPageBitmap,
    zeros: ZeroChecksums,
    /// The first chunk that lost its pages.
    lost: Option<Lost>,
    cache: Mutex<VecDeque<(u64, Arc<[u8]>)>>,
}

impl Verifier {
    /// The checksums, in block order.
    pub(crate) fn recorded(&self) -> &[u32] {
        &self.recorded
    }

    /// `recorded` has exactly [`count`] checksums.
    ///
    /// Verifies the chunks that have no stored page.
    pub(crate) fn new(recorded: Vec<u32>, memory: &Memory) -> Self {
        let (zeros, verified) = (ZeroChecksums::new(), AtomicPageBitmap::new(recorded.len() as u64));
        let (mut first, mut lost) = (Vec::new(), None);
        let mut checksums = recorded.iter().copied();
        let mut next = 0;
        for (place, stored) in memory.places.iter().zip(&memory.stored) {
            first.push(next);
            for (index, recorded) in (0..place.pages.div_ceil(CHUNK_PAGES)).zip(checksums.by_ref()) {
                let chunk = chunk_pages(place, index);
                if stored.count_in(chunk) == 0 {
                    let found = zeros.of(chunk);
                    if found == recorded {
                        verified.set(PageNumber(next + index));
                    } else if lost.is_none() {
                        let (block, offset) = (place.name.clone(), chunk.start.offset());
                        lost = Some(Lost { block, offset, recorded, found });
                    }
                }
            }
            next += place.pages.div_ceil(CHUNK_PAGES);
        }
        Self { recorded, first, verified, zeros, lost, cache: Mutex::default() }
    }

    /// The first chunk whose stored pages are gone from the bitmap, all of them.
    pub(crate) fn lost(&self) -> Option<&Lost> {
        self.lost.as_ref()
    }

    /// Chunks that were verified so far.
    pub(crate) fn verified(&self) -> u64 {
        self.verified.count()
    }

    /// Reads pages of one block out of verified chunks.
    pub(crate) fn read(
        &self,
        file: &StoreFile,
        StoredBlock { index: block, place, stored }: StoredBlock<'_>,
        pages: PageRange,
        mut into: &mut [u8],
    ) -> Result<(), SnapshotError> {
        let mut rest = pages;
        while !rest.is_empty() {
            let index = rest.start.0 / CHUNK_PAGES;
            let chunk = chunk_pages(place, index);
            let whole = Chunk { place, pages: chunk, index: self.global(block, index) };
            let (now, later) = rest.split_at(chunk.end);
            rest = later;
            let Some(part) = into.split_off_mut(..length(now)) else {
                return Err(file.misuse("a buffer shorter than the pages it is for".to_owned()));
            };
            if stored.count_in(chunk) == 0 {
                self.check(file, &whole, self.zeros.of(chunk))?;
                part.fill(0);
            } else if now == chunk {
                // A whole chunk is verified in place, which costs no reading.
                file.read_pages(place, stored, chunk, part)?;
                self.check(file, &whole, crc32c::crc32c(part))?;
            } else if let Some(cached) = self.cached(whole.index) {
                copy(file, &cached, chunk, now, part)?;
            } else {
                // Also if it was verified before: that was another reading of the file.
                let mut buffer = vec![0; length(chunk)];
                file.read_pages(place, stored, chunk, &mut buffer)?;
                self.check(file, &whole, crc32c::crc32c(&buffer))?;
                copy(file, &buffer, chunk, now, part)?;
                self.keep(whole.index, buffer.into());
            }
        }
        Ok(())
    }

    /// Verifies every chunk that has one of these pages and was not verified yet.
    pub(crate) fn verify(
        &self,
        file: &StoreFile,
        StoredBlock { index: block, place, stored }: StoredBlock<'_>,
        pages: PageRange,
    ) -> Result<(), SnapshotError> {
        let mut buffer = Vec::new();
        let mut rest = pages;
        while !rest.is_empty() {
            let index = rest.start.0 / CHUNK_PAGES;
            let chunk = chunk_pages(place, index);
            rest = rest.split_at(chunk.end).1;
            let whole = Chunk { place, pages: chunk, index: self.global(block, index) };
            if self.verified.get(PageNumber(whole.index)) {
                continue;
            }
            let found = if stored.count_in(chunk) == 0 {
                self.zeros.of(chunk)
            } else {
                buffer.resize(length(chunk), 0);
                file.read_pages(place, stored, chunk, &mut buffer)?;
                crc32c::crc32c(&buffer)
            };
            self.check(file, &whole, found)?;
        }
        Ok(())
    }

    /// Returns the index of a block's chunk among all.
    fn global(&self, block: usize, index: u64) -> u64 {
        self.first[block] + index
    }

    /// Compares the checksum `found` of a whole chunk with the one that was recorded.
    fn check(&self, file: &StoreFile, chunk: &Chunk<'_>, found: u32) -> Result<(), SnapshotError> {
        let Chunk { place, pages, index } = *chunk;
        let recorded = usize::try_from(index).ok().and_then(|index| self.recorded.get(index)).copied();
        let Some(recorded) = recorded else {
            return Err(file.misuse(format!("no checksum for {pages} of RAM block {}", place.name)));
        };
        if found != recorded {
            let (path, block) = (file.path().to_path_buf(), place.name.clone());
            return Err(SnapshotError::Checksum { path, block, offset: pages.start.offset(), recorded, found });
        }
        self.verified.set(PageNumber(index));
        Ok(())
    }

    fn cached(&self, global: u64) -> Option<Arc<[u8]>> {
        let cache = self.cache.lock();
        cache.iter().find(|(index, _)| *index == global).map(|(_, contents)| Arc::clone(contents))
    }

    fn keep(&self, global: u64, contents: Arc<[u8]>) {
        let mut cache = self.cache.lock();
        if cache.iter().any(|(index, _)| *index == global) {
            return;
        }
        if cache.len() >= CACHED {
            cache.pop_front();
        }
        cache.push_back((global, contents));
    }
}

/// Copies the pages `wanted` out of the contents of `chunk`.
fn copy(
    file: &StoreFile,
    contents: &[u8],
    chunk: PageRange,
    wanted: PageRange,
    into: &mut [u8],
) -> Result<(), SnapshotError> {
    let start = length(PageRange::new(chunk.start, wanted.start));
    let found = contents.get(start..).and_then(|found| found.get(..into.len()));
    into.copy_from_slice(found.ok_or_else(|| file.misuse(format!("{wanted} are not inside a chunk of {chunk}")))?);
    Ok(())
}
