//! Metadata contexts: what `BLOCK_STATUS` can report.

use std::borrow::Cow;

use limosa_image::{BlockStatus, MapEntry};
use limosa_nbd::protocol::allocation;

/// The most bitmaps of an export that clients can read.
pub(crate) const BITMAPS_MAX: usize = 30;
/// The most contexts of an export.
pub(crate) const CONTEXTS_MAX: usize = 2 + BITMAPS_MAX;

/// The namespace of bitmaps.
const BITMAP: &str = "qemu:dirty-bitmap:";

/// A metadata context.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Context {
    /// `base:allocation`: holes and zeros (doc/proto.md).
    Allocation,
    /// `qemu:allocation-depth`: the file of a chain that has the contents (QEMU docs: interop/nbd).
    AllocationDepth,
    /// `qemu:dirty-bitmap:NAME`: what was written (QEMU docs: interop/nbd). Its place among the bitmaps of the export;
    /// there are at most [`BITMAPS_MAX`].
    DirtyBitmap(u8),
}

/// The bit of `qemu:dirty-bitmap:NAME`: it was written.
pub(crate) const DIRTY: u32 = 1 << 0;

impl Context {
    /// Returns all contexts of an export that has this number of bitmaps.
    pub(crate) fn all(bitmaps: usize) -> impl Iterator<Item = Self> {
        let bitmaps = (0..).take(bitmaps.min(BITMAPS_MAX)).map(Self::DirtyBitmap);
        [Self::Allocation, Self::AllocationDepth].into_iter().chain(bitmaps)
    }

    /// Returns its name in an export with these bitmaps. `None`: the export has no such bitmap.
    #[must_use]
    pub(crate) fn name(self, bitmaps: &[String]) -> Option<Cow<'static, str>> {
        Some(match self {
            Self::Allocation => allocation::NAME.into(),
            Self::AllocationDepth => "qemu:allocation-depth".into(),
            Self::DirtyBitmap(number) => format!("{BITMAP}{}", bitmaps.get(usize::from(number))?).into(),
        })
    }

    /// Returns its number in requests and replies.
    #[must_use]
    pub(crate) const fn id(self) -> u32 {
        self.place() + 1
    }

    const fn place(self) -> u32 {
        match self {
            Self::Allocation => 0,
            Self::AllocationDepth => 1,
            Self::DirtyBitmap(number) => 2 + number as u32,
        }
    }

    const fn bit(self) -> u32 {
        1_u32.wrapping_shl(self.place())
    }

    /// Returns the status of a run of bytes. `None`: its origin does not tell it.
    #[must_use]
    pub(crate) fn status(self, entry: &MapEntry) -> Option<u32> {
        match self {
            Self::Allocation => {
                let data = !entry.kind.is_zero() || entry.kind == BlockStatus::Preallocated;
                let zero = if entry.kind.is_zero() { allocation::ZERO } else { 0 };
                Some(if data { zero } else { zero | allocation::HOLE })
            }
            Self::AllocationDepth if entry.kind == BlockStatus::Unallocated => Some(0),
            Self::AllocationDepth => Some(entry.depth.saturating_add(1)),
            Self::DirtyBitmap(_) => None,
        }
    }

    /// Whether a query of a list finds it: by its name, or by its namespace alone (`base:`, `qemu:dirty-bitmap:`).
    fn is_listed_by(self, query: &[u8], bitmaps: &[String]) -> bool {
        let Some(name) = self.name(bitmaps) else { return false };
        let is_namespace = ["base:", "qemu:", BITMAP].iter().any(|namespace| namespace.as_bytes() == query);
        query == name.as_bytes() || (is_namespace && name.as_bytes().starts_with(query))
    }
}

/// A set of contexts of an export.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Contexts(u32);

impl Contexts {
    /// Returns the contexts that a list has, of an export with these bitmaps. Without queries: all of them.
    #[must_use]
    pub(crate) fn listed(queries: &[&[u8]], bitmaps: &[String]) -> Self {
        let is_listed =
            |context: &Context| queries.is_empty() || queries.iter().any(|query| context.is_listed_by(query, bitmaps));
        Context::all(bitmaps.len()).filter(is_listed).collect()
    }

    /// Returns the contexts that are chosen by their names. Unknown ones are left out.
    #[must_use]
    pub(crate) fn chosen(queries: &[&[u8]], bitmaps: &[String]) -> Self {
        let is_chosen =
            |context: &Context| context.name(bitmaps).is_some_and(|name| queries.contains(&name.as_bytes()));
        Context::all(bitmaps.len()).filter(is_chosen).collect()
    }

    /// Returns those with these numbers. `None`: one is not in the set, or given twice.
    #[must_use]
    pub(crate) fn subset(self, ids: impl IntoIterator<Item = u32>) -> Option<Self> {
        ids.into_iter().try_fold(Self::default(), |found, id| {
            let context = self.iter().find(|context| context.id() == id)?;
            (found.0 & context.bit() == 0).then_some(Self(found.0 | context.bit()))
        })
    }

    /// Returns the contexts in it.
    pub(crate) fn iter(self) -> impl Iterator<Item = Context> {
        Context::all(BITMAPS_MAX).filter(move |context| self.0 & context.bit() != 0)
    }

    /// Returns how many there are.
    #[must_use]
    pub(crate) const fn len(self) -> usize {
        self.0.count_ones() as usize
    }

    /// Returns whether there are none.
    #[must_use]
    pub(crate) const fn is_empty(self) -> bool {
        self.0 == 0
    }
}

impl FromIterator<Context> for Contexts {
    fn from_iter<T: IntoIterator<Item = Context>>(contexts: T) -> Self {
        Self(contexts.into_iter().fold(0, |set, context| set | context.bit()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contexts_are_found_by_name_and_listed_by_namespace() {
        let bitmaps = ["b0".to_owned(), "b1:x".to_owned()];
        let set = |contexts: &[Context]| contexts.iter().copied().collect::<Contexts>();
        let bitmap = Context::DirtyBitmap;
        let all = set(&[Context::Allocation, Context::AllocationDepth, bitmap(0), bitmap(1)]);
        let listed = |queries: &[&[u8]]| Contexts::listed(queries, &bitmaps);
        assert_eq!(listed(&[]), all);
        assert_eq!(listed(&[b"base:"]), set(&[Context::Allocation]));
        assert_eq!(listed(&[b"qemu:"]), set(&[Context::AllocationDepth, bitmap(0), bitmap(1)]));
        assert_eq!(listed(&[b"qemu:dirty-bitmap:"]), set(&[bitmap(0), bitmap(1)]));
        assert_eq!(listed(&[b"qemu:dirty-bitmap:b1:"]), Contexts::default());
        assert_eq!(listed(&[b"qemu:allocation-depth", b"x-other:y"]), set(&[Context::AllocationDepth]));
        let chosen = |queries: &[&[u8]]| Contexts::chosen(queries, &bitmaps);
        assert_eq!(chosen(&[b"base:", b"qemu:", b"", b"base", b"qemu:dirty-bitmap:"]), Contexts::default());
        assert_eq!(chosen(&[b"base:allocation", b"base:allocation"]), set(&[Context::Allocation]));
        assert_eq!(chosen(&[b"qemu:dirty-bitmap:b1:x", b"qemu:dirty-bitmap:b2"]), set(&[bitmap(1)]));
        assert!(chosen(&[]).is_empty());
        assert_eq!(Contexts::listed(&[], &[]).len(), 2);
        assert_eq!(Contexts::listed(&[], &vec!["b".to_owned(); 100]).len(), CONTEXTS_MAX);
    }

    #[test]
    fn a_subset_has_known_numbers_once_each() {
        let most: Contexts = Context::all(1).collect();
        assert_eq!(most.subset([2]), Some([Context::AllocationDepth].into_iter().collect()));
        assert_eq!(most.subset([3, 2, 1]), Some(most));
        assert_eq!((most.subset([1, 1]), most.subset([4])), (None, None));
        assert_eq!(Contexts::default().subset([1]), None);
    }

    #[test]
    fn statuses_are_those_of_the_protocol() {
        let entry = |kind| MapEntry::new(1, kind).depth(1);
        let of = |kind| [Context::Allocation, Context::AllocationDepth].map(|context| context.status(&entry(kind)));
        assert_eq!(of(BlockStatus::Data), [Some(0), Some(2)]);
        assert_eq!(of(BlockStatus::Compressed), [Some(0), Some(2)]);
        assert_eq!(of(BlockStatus::Zero), [Some(3), Some(2)]);
        assert_eq!(of(BlockStatus::Preallocated), [Some(2), Some(2)]);
        assert_eq!(of(BlockStatus::Unallocated), [Some(3), Some(0)]);
        assert_eq!(Context::DirtyBitmap(0).status(&entry(BlockStatus::Data)), None);
    }
}
