//! Memory whose every page can be computed again: fills a VM that never runs, and compares after a restore.
//!
//! Law: a page's content follows from seed and page number alone, so nothing has to be kept for the comparison.

use std::fs::File;
use std::os::unix::fs::FileExt as _;

use anyhow::{Context as _, Result, bail};
use limosa_page::to_usize;

use crate::PAGE;

const PAGE_LEN: usize = 4096;
/// Pages per write.
const BATCH: u64 = 256;

/// The contents of a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PageKind {
    /// Not written at all: a hole of the file, reads as zeros.
    Untouched,
    /// Zeros that were written: memory is allocated for them.
    Zero,
    /// One byte repeated: compresses, but is no zero page.
    Pattern,
    /// Zeros but for one byte somewhere: what a careless zero test takes for a zero page.
    AlmostZero,
    /// Random bytes.
    Random,
}

/// A filling: shares of the page kinds in percent; what is left of 100 is [`PageKind::Random`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Prefill {
    /// Decides everything.
    pub seed: u64,
    /// Percent of [`PageKind::Untouched`].
    pub untouched: u8,
    /// Percent of [`PageKind::Zero`].
    pub zero: u8,
    /// Percent of [`PageKind::Pattern`].
    pub pattern: u8,
    /// Percent of [`PageKind::AlmostZero`].
    pub almost_zero: u8,
}

impl Prefill {
    /// Nothing but random pages.
    pub fn random(seed: u64) -> Self {
        Self { seed, untouched: 0, zero: 0, pattern: 0, almost_zero: 0 }
    }

    /// Some of every kind, half of them random.
    pub fn mixed(seed: u64) -> Self {
        Self { seed, untouched: 20, zero: 10, pattern: 10, almost_zero: 10 }
    }

    /// The kind of a page.
    pub fn kind(&self, page: u64) -> PageKind {
        let draw = splitmix(self.seed ^ splitmix(page)) % 100;
        let kinds = [
            (self.untouched, PageKind::Untouched),
            (self.zero, PageKind::Zero),
            (self.pattern, PageKind::Pattern),
            (self.almost_zero, PageKind::AlmostZero),
        ];
        let mut below = 0;
        for (share, kind) in kinds {
            below += u64::from(share);
            if draw < below {
                return kind;
            }
        }
        PageKind::Random
    }

    /// Writes the content of a page.
    pub fn write_page(&self, page: u64, out: &mut [u8; PAGE_LEN]) {
        let mut state = splitmix(self.seed.wrapping_add(1) ^ splitmix(page.wrapping_mul(3)));
        match self.kind(page) {
            PageKind::Untouched | PageKind::Zero => out.fill(0),
            PageKind::Pattern => out.fill(state.to_le_bytes()[0] | 1),
            PageKind::AlmostZero => {
                out.fill(0);
                let place = to_usize(state % PAGE);
                out[place] = 1;
            }
            PageKind::Random => {
                for word in out.as_chunks_mut::<8>().0 {
                    // xorshift64*: fast, and its state is never zero because splitmix of distinct inputs is one-to-one
                    // and the single zero is replaced.
                    state = if state == 0 { 1 } else { state };
                    state ^= state >> 12;
                    state ^= state << 25;
                    state ^= state >> 27;
                    *word = state.wrapping_mul(0x2545_f491_4f6c_dd1d).to_le_bytes();
                }
            }
        }
    }

    /// Fills `bytes` of `file` from its beginning on.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn fill(&self, file: &File, bytes: u64) -> Result<()> {
        let mut buffer = Vec::new();
        let mut start = 0;
        for page in 0..=bytes / PAGE {
            let untouched = page == bytes / PAGE || self.kind(page) == PageKind::Untouched;
            if untouched || page - start == BATCH {
                file.write_all_at(&buffer, start * PAGE).with_context(|| format!("filling page {start}"))?;
                buffer.clear();
                start = if untouched { page + 1 } else { page };
            }
            if !untouched {
                let mut content = [0; PAGE_LEN];
                self.write_page(page, &mut content);
                buffer.extend_from_slice(&content);
            }
        }
        Ok(())
    }

    /// Compares `bytes` of `file` with the filling.
    ///
    /// # Errors
    /// Names the first page that differs, its kind, and how many differ.
    pub fn verify(&self, file: &File, bytes: u64) -> Result<()> {
        let mut buffer = vec![0; usize::try_from(BATCH * PAGE)?];
        let mut expected = [0; PAGE_LEN];
        let (mut differing, mut first) = (0_u64, None);
        let mut page = 0;
        while page < bytes / PAGE {
            let count = BATCH.min(bytes / PAGE - page);
            let part = buffer.get_mut(..usize::try_from(count * PAGE)?).context("a batch is larger than its buffer")?;
            file.read_exact_at(part, page * PAGE).with_context(|| format!("reading page {page}"))?;
            for found in part.as_chunks::<PAGE_LEN>().0 {
                self.write_page(page, &mut expected);
                if *found != expected {
                    differing += 1;
                    first.get_or_insert((page, found.iter().all(|&byte| byte == 0)));
                }
                page += 1;
            }
        }
        if let Some((page, is_zero)) = first {
            let now = if is_zero { "is zero now" } else { "has other content" };
            bail!("{differing} pages differ; the first is page {page}, filled as {:?}: it {now}", self.kind(page));
        }
        Ok(())
    }
}

/// The finalizer of splitmix64: a one-to-one mixing of 64 bits.
fn splitmix(value: u64) -> u64 {
    let mut z = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt as _;

    const PAGES: u64 = 3000;

    fn filled(prefill: Prefill) -> File {
        let file = tempfile::tempfile().unwrap();
        file.set_len(PAGES * PAGE).unwrap();
        prefill.fill(&file, PAGES * PAGE).unwrap();
        file
    }

    #[test]
    fn a_filled_file_verifies_and_one_changed_byte_is_named() {
        let prefill = Prefill::mixed(7);
        let file = filled(prefill);
        prefill.verify(&file, PAGES * PAGE).unwrap();
        file.write_all_at(&[0xee], 2999 * PAGE + 4000).unwrap();
        let error = prefill.verify(&file, PAGES * PAGE).unwrap_err().to_string();
        assert!(error.starts_with("1 pages differ; the first is page 2999"), "{error}");
        assert!(Prefill::mixed(8).verify(&file, PAGES * PAGE).is_err());
    }

    #[test]
    fn every_kind_occurs_about_as_often_as_asked() {
        let prefill = Prefill::mixed(1);
        let count = |kind| (0..100_000).filter(|&page| prefill.kind(page) == kind).count();
        assert!((18_000..22_000).contains(&count(PageKind::Untouched)));
        assert!((9_000..11_000).contains(&count(PageKind::AlmostZero)));
        assert!((48_000..52_000).contains(&count(PageKind::Random)));
        assert!((0..1000).all(|page| Prefill::random(3).kind(page) == PageKind::Random));
    }

    #[test]
    fn untouched_pages_stay_holes() {
        let empty = Prefill { untouched: 100, ..Prefill::random(1) };
        assert_eq!(filled(empty).metadata().unwrap().blocks(), 0);
        let zeros = Prefill { zero: 100, ..Prefill::random(1) };
        assert!(filled(zeros).metadata().unwrap().blocks() * 512 >= PAGES * PAGE);
    }

    #[test]
    fn random_pages_differ_from_each_other() {
        let (mut a, mut b) = ([0; PAGE_LEN], [0; PAGE_LEN]);
        Prefill::random(1).write_page(1, &mut a);
        Prefill::random(1).write_page(2, &mut b);
        assert_ne!(a, b);
        Prefill::random(2).write_page(1, &mut b);
        assert_ne!(a, b);
    }
}
