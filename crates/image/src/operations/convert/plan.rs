//! The plan of reads, writes and zeroings, computed without I/O.
//!
//! Law: a byte that the map of the source knows to be zero, or to come from below, is never read; a byte of contents is
//! read once, and written unless it is part of a run of zeros that is long enough.
//!
//! The disk is walked in pieces at multiples of a length. The contents of a piece are read into one buffer, at their
//! places in the piece; known zeros between contents are zeros in the buffer, so that a cluster of the target is
//! written at once. Where there are no contents from one piece into the next, nothing is cut and no buffer is needed.

use std::collections::VecDeque;
use std::ops::Range;

/// The kind of a part of the source.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Content {
    /// Bytes that have to be read to be known.
    Data,
    /// Zeros.
    Zero,
    /// Contents that the target's backing image has, too.
    Below,
}

/// A run of bytes of the source, alike.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Span {
    /// From where to where on the disk.
    pub(super) range: Range<u64>,
    /// Its kind.
    pub(super) content: Content,
}

/// A step of the conversion.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Step {
    /// There are contents in it: they are read, and then [`actions`] tells what to do.
    Piece(Range<u64>, Vec<Span>),
    /// All of it is zeros.
    Zero(Range<u64>),
    /// Nothing is done.
    Leave(Range<u64>),
}

/// Cuts spans into steps.
#[derive(Debug)]
pub(super) struct Cutter {
    piece: u64,
    end: u64,
    write_zeros: bool,
    held: VecDeque<Span>,
}

impl Cutter {
    /// A cutter for a disk that ends at `end`, in pieces of `piece` bytes. `write_zeros`: zeros, too, need a buffer.
    #[must_use]
    pub(super) fn new(piece: u64, end: u64, write_zeros: bool) -> Self {
        Self { piece: piece.max(1), end, write_zeros, held: VecDeque::new() }
    }

    /// Up to where spans have come.
    #[must_use]
    pub(super) fn known_to(&self, begin: u64) -> u64 {
        self.held.back().map_or(begin, |span| span.range.end)
    }

    /// The next span, which begins where the last one ended.
    pub(super) fn push(&mut self, span: Span) {
        match self.held.back_mut() {
            Some(last) if last.content == span.content && last.range.end == span.range.start => {
                last.range.end = span.range.end;
            }
            _ => self.held.push_back(span),
        }
    }

    /// The next step, if enough is known of what follows.
    pub(super) fn step(&mut self) -> Option<Step> {
        let first = self.held.front_mut()?;
        let begin = first.range.start;
        let boundary = (begin / self.piece).saturating_add(1).saturating_mul(self.piece).min(self.end);
        let buffered = first.content == Content::Data || (self.write_zeros && first.content == Content::Zero);
        if !buffered && first.range.end >= boundary {
            let last = if first.range.end >= self.end { self.end } else { first.range.end / self.piece * self.piece };
            let content = first.content;
            first.range.start = last;
            if first.range.is_empty() {
                self.held.pop_front();
            }
            return Some(if content == Content::Zero { Step::Zero(begin..last) } else { Step::Leave(begin..last) });
        }
        if self.known_to(begin) < boundary {
            return None;
        }
        let mut spans = Vec::new();
        while let Some(span) = self.held.front_mut().filter(|span| span.range.start < boundary) {
            let part = span.range.start..span.range.end.min(boundary);
            span.range.start = part.end;
            let (content, used_up) = (span.content, span.range.is_empty());
            spans.push(Span { range: part, content });
            if used_up {
                self.held.pop_front();
            }
        }
        Some(Step::Piece(begin..boundary, spans))
    }
}

/// Spans in which contents of the target's backing image share no unit with anything else: such units count as
/// contents.
pub(super) fn whole_units(spans: &[Span], unit: u64) -> Vec<Span> {
    let mut runs = Runs::default();
    let mixed: Vec<u64> = spans
        .windows(2)
        .filter_map(|pair| match pair {
            [one, other] if one.content == Content::Below || other.content == Content::Below => Some(other.range.start),
            _ => None,
        })
        .filter(|border| !border.is_multiple_of(unit))
        .map(|border| border / unit * unit)
        .collect();
    for span in spans {
        let mut at = span.range.start;
        for begin in &mixed {
            let both = (*begin).max(at)..begin.saturating_add(unit).min(span.range.end);
            if both.start >= both.end {
                continue;
            }
            runs.push(Span { range: at..both.start, content: span.content }, span.content);
            at = both.end;
            runs.push(Span { range: both, content: Content::Data }, Content::Data);
        }
        runs.push(Span { range: at..span.range.end, content: span.content }, span.content);
    }
    runs.0
}

/// The treatment of zeros.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Rules {
    /// The shortest run of zeros between contents that is left out, in bytes; 0: everything is written, zeros too.
    pub(super) sparse: u64,
    /// Bytes that are looked at together, from a multiple of them on: a power of two.
    pub(super) unit: u64,
    /// Bytes that the target allocates together: a power of two. Contents are written together with the zeros around
    /// them in one such whole.
    pub(super) granularity: u64,
    /// The target reads as zeros already.
    pub(super) target_is_zero: bool,
}

/// The change of a part of the target.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Action {
    /// The contents of the buffer are written.
    Write(Range<u64>),
    /// It is made zero.
    Zero(Range<u64>),
    /// It is zero already, and stays so.
    Spare(Range<u64>),
}

#[cfg(test)]
impl Action {
    /// The part that it changes.
    #[must_use]
    fn range(&self) -> &Range<u64> {
        match self {
            Self::Write(range) | Self::Zero(range) | Self::Spare(range) => range,
        }
    }
}

/// Returns the actions for a piece whose contents were read: `is_zero` tells whether a part of them is all zeros.
pub(super) fn actions(spans: &[Span], is_zero: impl Fn(&Range<u64>) -> bool, rules: &Rules) -> Vec<Action> {
    let mut runs = Runs::default();
    for span in spans {
        match span.content {
            _ if rules.sparse == 0 && span.content != Content::Below => runs.push(span.clone(), Content::Data),
            Content::Data => {
                let mut begin = span.range.start;
                while begin < span.range.end {
                    let end = (begin / rules.unit + 1).saturating_mul(rules.unit).min(span.range.end);
                    let content = if is_zero(&(begin..end)) { Content::Zero } else { Content::Data };
                    runs.push(Span { range: begin..end, content }, content);
                    begin = end;
                }
            }
            content => runs.push(span.clone(), content),
        }
    }
    let shrunk = shrink(&runs.0, rules);
    shrunk
        .0
        .into_iter()
        .filter_map(|Span { range, content }| match content {
            Content::Data => Some(Action::Write(range)),
            Content::Zero if rules.target_is_zero => Some(Action::Spare(range)),
            Content::Zero => Some(Action::Zero(range)),
            Content::Below => None,
        })
        .collect()
}

/// Spans, with equal neighbours merged.
#[derive(Default)]
struct Runs(Vec<Span>);

impl Runs {
    fn push(&mut self, Span { range, .. }: Span, content: Content) {
        match self.0.last_mut() {
            _ if range.is_empty() => {}
            Some(last) if last.content == content => last.range.end = range.end,
            _ => self.0.push(Span { range, content }),
        }
    }
}

/// Treats zeros next to contents as data, unless they are a long enough run; zeros in the same unit as contents are
/// data in any case.
fn shrink(runs: &[Span], rules: &Rules) -> Runs {
    let data =
        |index: Option<usize>| index.and_then(|index| runs.get(index)).is_some_and(|run| run.content == Content::Data);
    let mut shrunk = Runs::default();
    for (index, Span { range, content }) in runs.iter().enumerate() {
        let (before, after) = (data(index.checked_sub(1)), data(index.checked_add(1)));
        if *content != Content::Zero || !(before || after) {
            shrunk.push(Span { range: range.clone(), content: *content }, *content);
            continue;
        }
        let begin = if before { range.start.next_multiple_of(rules.granularity) } else { range.start };
        let end = if after { range.end / rules.granularity * rules.granularity } else { range.end };
        let short = before && after && range.end - range.start < rules.sparse;
        let parts = if short || begin >= end {
            [(range.clone(), Content::Data), (0..0, Content::Zero), (0..0, Content::Data)]
        } else {
            [(range.start..begin, Content::Data), (begin..end, Content::Zero), (end..range.end, Content::Data)]
        };
        for (range, content) in parts {
            shrunk.push(Span { range, content }, content);
        }
    }
    shrunk
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::Content::{Below, Data, Zero};
    use super::*;

    const RULES: Rules = Rules { sparse: 4, unit: 4, granularity: 4, target_is_zero: true };

    fn spans(lengths: &[(u64, Content)]) -> Vec<Span> {
        let mut begin = 0;
        lengths
            .iter()
            .map(|&(length, content)| {
                let range = begin..begin + length;
                begin = range.end;
                Span { range, content }
            })
            .collect()
    }

    /// All steps, with spans that become known as late as possible.
    fn cut(piece: u64, lengths: &[(u64, Content)]) -> Vec<Step> {
        let spans = spans(lengths);
        let mut cutter = Cutter::new(piece, spans.last().map_or(0, |span| span.range.end), false);
        let mut steps = Vec::new();
        for span in spans {
            cutter.push(span);
            steps.extend(std::iter::from_fn(|| cutter.step()));
        }
        assert_eq!(cutter.held, []);
        steps
    }

    #[test]
    fn what_has_no_contents_is_not_cut() {
        assert_eq!(cut(8, &[(100, Zero)]), [Step::Zero(0..100)]);
        assert_eq!(
            cut(8, &[(20, Below), (4, Data)]),
            [
                Step::Leave(0..16),
                Step::Piece(
                    16..24,
                    vec![Span { range: 16..20, content: Below }, Span { range: 20..24, content: Data }]
                ),
            ]
        );
    }

    #[test]
    fn contents_are_cut_at_multiples_and_take_short_holes_with_them() {
        let piece = |range: Range<u64>, parts: &[(Range<u64>, Content)]| {
            Step::Piece(range, parts.iter().cloned().map(|(range, content)| Span { range, content }).collect())
        };
        assert_eq!(
            cut(8, &[(3, Data), (2, Zero), (15, Data), (7, Zero), (1, Data)]),
            [
                piece(0..8, &[(0..3, Data), (3..5, Zero), (5..8, Data)]),
                piece(8..16, &[(8..16, Data)]),
                piece(16..24, &[(16..20, Data), (20..24, Zero)]),
                piece(24..28, &[(24..27, Zero), (27..28, Data)]),
            ]
        );
    }

    #[test]
    fn zeros_that_the_contents_turn_out_to_be_are_left_out() {
        let zero = |range: &Range<u64>| (8..24).contains(&range.start) && range.end <= 24;
        let spans = spans(&[(32, Data)]);
        assert_eq!(actions(&spans, zero, &RULES), [Action::Write(0..8), Action::Spare(8..24), Action::Write(24..32)]);
        let unknown = Rules { target_is_zero: false, ..RULES };
        assert_eq!(actions(&spans, zero, &unknown), [Action::Write(0..8), Action::Zero(8..24), Action::Write(24..32)]);
        assert_eq!(actions(&spans, zero, &Rules { sparse: 17, ..RULES }), [Action::Write(0..32)]);
        assert_eq!(actions(&spans, zero, &Rules { sparse: 0, ..RULES }), [Action::Write(0..32)]);
    }

    #[test]
    fn zeros_in_a_cluster_that_is_written_are_written_with_it() {
        let rules = Rules { granularity: 16, ..RULES };
        let known = spans(&[(4, Data), (40, Zero), (4, Data)]);
        assert_eq!(
            actions(&known, |_| false, &rules),
            [Action::Write(0..16), Action::Spare(16..32), Action::Write(32..48)]
        );
        let short = spans(&[(4, Data), (24, Zero), (4, Data)]);
        assert_eq!(actions(&short, |_| false, &rules), [Action::Write(0..32)]);
    }

    #[test]
    fn zeros_at_the_edge_of_a_piece_count_however_few() {
        let edges = spans(&[(4, Zero), (8, Data), (4, Zero)]);
        let rules = Rules { sparse: 8, ..RULES };
        assert_eq!(
            actions(&edges, |_| false, &rules),
            [Action::Spare(0..4), Action::Write(4..12), Action::Spare(12..16)]
        );
    }

    #[test]
    fn everything_is_written_without_a_sparse_size_except_what_comes_from_below() {
        let all = spans(&[(8, Zero), (8, Below), (8, Data), (8, Zero)]);
        let rules = Rules { sparse: 0, ..RULES };
        assert_eq!(actions(&all, |_| true, &rules), [Action::Write(0..8), Action::Write(16..32)]);
    }

    fn content() -> impl Strategy<Value = Content> {
        prop_oneof![Just(Data), Just(Zero), Just(Below)]
    }

    #[test]
    fn a_cluster_that_the_backing_image_has_a_part_of_is_contents_as_a_whole() {
        let parts = |lengths: &[(u64, Content)]| {
            let whole = whole_units(&spans(lengths), 8);
            whole.iter().map(|span| (span.range.end - span.range.start, span.content)).collect::<Vec<_>>()
        };
        assert_eq!(parts(&[(16, Below), (8, Data), (8, Zero)]), [(16, Below), (8, Data), (8, Zero)]);
        assert_eq!(parts(&[(20, Below), (3, Zero), (20, Below)]), [(16, Below), (8, Data), (19, Below)]);
        assert_eq!(parts(&[(4, Zero), (12, Data), (8, Below)]), [(4, Zero), (12, Data), (8, Below)]);
        assert_eq!(parts(&[(9, Zero), (12, Below), (11, Zero)]), [(8, Zero), (16, Data), (8, Zero)]);
    }

    proptest! {
        #[test]
        fn every_byte_is_dealt_with_once_and_right(
            lengths in prop::collection::vec((1_u64..40, content()), 1..20),
            zeros in prop::collection::vec(any::<bool>(), 800),
            bits in 2_u32..6,
            sparse in 0_u64..40,
            target_is_zero: bool,
        ) {
            let rules = Rules { sparse, unit: 4, granularity: 1 << bits, target_is_zero };
            let spans = spans(&lengths);
            let kind = |at: u64| spans.iter().find(|span| span.range.contains(&at)).map(|span| span.content);
            let is_zero = |range: &Range<u64>| range.clone().all(|at| zeros[usize::try_from(at).unwrap()]);
            let mut next = 0;
            for step in cut(64, &lengths) {
                let (range, done) = match step {
                    Step::Zero(range) => { prop_assert!(range.clone().all(|at| kind(at) == Some(Zero))); (range, None) }
                    Step::Leave(range) => { prop_assert!(range.clone().all(|at| kind(at) == Some(Below))); (range, None) }
                    Step::Piece(range, spans) => (range, Some(actions(&spans, is_zero, &rules))),
                };
                prop_assert_eq!(range.start, next);
                next = range.end;
                let Some(done) = done else { continue };
                let mut place = range.start;
                for action in &done {
                    prop_assert!((place..action.range().start).all(|at| kind(at) == Some(Below)));
                    place = action.range().end;
                    for at in action.range().clone() {
                        match (kind(at), action) {
                            (Some(Below) | None, _) => prop_assert!(false, "{} is not ours", at),
                            (Some(Data), Action::Zero(_) | Action::Spare(_)) => prop_assert!(zeros[usize::try_from(at).unwrap()]),
                            _ => {}
                        }
                    }
                    prop_assert!(matches!(action, Action::Write(_)) || sparse > 0);
                    prop_assert_eq!(matches!(action, Action::Spare(_)), !matches!(action, Action::Write(_)) && target_is_zero);
                }
                prop_assert!((place..range.end).all(|at| kind(at) == Some(Below)));
            }
            prop_assert_eq!(next, spans.last().unwrap().range.end);
        }
    }
}
