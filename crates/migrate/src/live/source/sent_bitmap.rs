//! Pages that were sent at least once, in a migration that may continue in postcopy.

use limosa_page::{BrokenInvariant, PageBitmap, PageRange, broken_invariant};

use crate::pages::PageSource;

/// The facts about precopy that postcopy needs: one bitmap a block each.
#[derive(Debug)]
pub(super) struct SentBitmap {
    /// Pages sent at least once.
    pub(super) sent: Vec<PageBitmap>,
    /// Pages left out because they are zero, or free in the end, and not sent since.
    pub(super) zero: Vec<PageBitmap>,
}

impl SentBitmap {
    pub(super) fn new<S: PageSource>(source: &S) -> Self {
        let none = || source.setup().blocks.iter().map(|block| PageBitmap::new(block.pages())).collect();
        Self { sent: none(), zero: none() }
    }

    /// Notes that pages of a block were sent.
    pub(super) fn sent(&mut self, block: usize, runs: &[PageRange]) -> Result<(), BrokenInvariant> {
        let (sent, zero) = self.of(block)?;
        for run in runs {
            sent.set_range(*run);
            zero.clear_range(*run);
        }
        Ok(())
    }

    /// Notes that pages of a block are zero, and were not sent.
    pub(super) fn left_out(&mut self, block: usize, run: PageRange) -> Result<(), BrokenInvariant> {
        let (sent, zero) = self.of(block)?;
        sent.clear_range(run);
        zero.set_range(run);
        Ok(())
    }

    fn of(&mut self, block: usize) -> Result<(&mut PageBitmap, &mut PageBitmap), BrokenInvariant> {
        let of_block = self.sent.get_mut(block).zip(self.zero.get_mut(block));
        of_block.ok_or_else(|| broken_invariant("pages that were sent belong to blocks of the stream"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::is_noticed;

    #[test]
    fn pages_of_a_block_that_is_not_of_the_stream_are_noticed() {
        let mut bitmap = SentBitmap { sent: vec![PageBitmap::new(8)], zero: vec![PageBitmap::new(8)] };
        bitmap.left_out(0, PageRange::whole_block(2)).unwrap();
        bitmap.sent(0, &[PageRange::whole_block(1)]).unwrap();
        assert_eq!((bitmap.sent[0].count(), bitmap.zero[0].count()), (1, 1));
        assert!(is_noticed(|| bitmap.sent(1, &[])));
        assert!(is_noticed(|| bitmap.left_out(1, PageRange::whole_block(1))));
    }
}
