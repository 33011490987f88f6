//! Cuts what an agent sends into lines, and drops what belongs to an earlier conversation.
//!
//! Every answer is a line of JSON. The answer to `guest-sync-delimited` follows a byte 0xff, which is part of no JSON
//! text: what was cut off before it is of no use (QEMU docs: interop/qemu-ga-ref).

use std::collections::VecDeque;

/// The byte before the answer to `guest-sync-delimited`, and before the command.
pub(super) const DELIMITER: u8 = 0xff;

/// The answers of a guest agent, from bytes in pieces of any size.
#[derive(Debug)]
pub struct AgentAnswers {
    /// Bytes that may still come.
    left: usize,
    unfinished: Vec<u8>,
    lines: VecDeque<Vec<u8>>,
}

/// More bytes came than are read in one conversation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TooManyBytes;

impl AgentAnswers {
    /// Takes at most `limit` bytes in all, and so holds at most as many.
    #[must_use]
    pub fn new(limit: usize) -> Self {
        Self { left: limit, unfinished: Vec::new(), lines: VecDeque::new() }
    }

    /// Takes bytes as they come.
    ///
    /// # Errors
    /// They exceed the limit. None of them is taken.
    pub fn push(&mut self, bytes: &[u8]) -> Result<(), TooManyBytes> {
        self.left = self.left.checked_sub(bytes.len()).ok_or(TooManyBytes)?;
        for byte in bytes {
            match *byte {
                DELIMITER => self.unfinished.clear(),
                b'\n' if self.unfinished.is_empty() => {}
                b'\n' => self.lines.push_back(std::mem::take(&mut self.unfinished)),
                other => self.unfinished.push(other),
            }
        }
        Ok(())
    }

    /// Returns the next complete line, without its end. Empty lines are left out.
    pub fn next_line(&mut self) -> Option<Vec<u8>> {
        self.lines.pop_front()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn lines(answers: &mut AgentAnswers) -> Vec<Vec<u8>> {
        std::iter::from_fn(|| answers.next_line()).collect()
    }

    #[test]
    fn what_was_cut_off_before_a_delimiter_is_dropped() {
        let mut answers = AgentAnswers::new(1000);
        answers.push(b"{\"return\": [1, 2\xff{\"return\": 7}\n{\"ret").unwrap();
        assert_eq!(lines(&mut answers), [b"{\"return\": 7}".to_vec()]);
        answers.push(b"urn\": {}}\n").unwrap();
        assert_eq!(lines(&mut answers), [b"{\"return\": {}}".to_vec()]);
    }

    proptest! {
        #[test]
        fn lines_do_not_depend_on_the_pieces_in_which_they_come(
            bytes in prop::collection::vec(prop_oneof![Just(b'\n'), Just(DELIMITER), any::<u8>()], 0..200),
            cut in 0usize..200,
        ) {
            let (first, second) = bytes.split_at(cut.min(bytes.len()));
            let (mut whole, mut pieces) = (AgentAnswers::new(200), AgentAnswers::new(200));
            whole.push(&bytes).unwrap();
            pieces.push(first).unwrap();
            pieces.push(second).unwrap();
            prop_assert_eq!(lines(&mut whole), lines(&mut pieces));
        }

        #[test]
        fn no_more_than_the_limit_is_ever_held(pieces in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..50), 0..20)) {
            let mut answers = AgentAnswers::new(100);
            let taken: usize = pieces.iter().filter(|piece| answers.push(piece).is_ok()).map(Vec::len).sum();
            prop_assert!(taken <= 100);
            let held: usize = lines(&mut answers).iter().map(Vec::len).sum();
            prop_assert!(held <= taken);
        }
    }
}
