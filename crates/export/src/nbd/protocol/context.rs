//! Metadata contexts: what `BLOCK_STATUS` can report.

use limosa_image::{BlockStatus, MapEntry};

/// A metadata context.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Context {
    /// `base:allocation`: holes and zeros (doc/proto.md).
    Allocation,
    /// `qemu:allocation-depth`: the file of a chain that has the contents (QEMU docs: interop/nbd).
    AllocationDepth,
}

/// Bits of `base:allocation`.
mod allocation {
    /// Nothing is allocated.
    pub(super) const HOLE: u32 = 1 << 0;
    /// It reads as zeros.
    pub(super) const ZERO: u32 = 1 << 1;
}

impl Context {
    /// All of them.
    pub const ALL: [Self; 2] = [Self::Allocation, Self::AllocationDepth];

    /// Returns its name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Allocation => "base:allocation",
            Self::AllocationDepth => "qemu:allocation-depth",
        }
    }

    /// Returns its number in requests and replies.
    #[must_use]
    pub const fn id(self) -> u32 {
        match self {
            Self::Allocation => 1,
            Self::AllocationDepth => 2,
        }
    }

    /// Returns the status of a run of bytes.
    #[must_use]
    pub fn status(self, entry: &MapEntry) -> u32 {
        match self {
            Self::Allocation => {
                let data = !entry.kind.is_zero() || entry.kind == BlockStatus::Preallocated;
                let zero = if entry.kind.is_zero() { allocation::ZERO } else { 0 };
                if data { zero } else { zero | allocation::HOLE }
            }
            Self::AllocationDepth if entry.kind == BlockStatus::Unallocated => 0,
            Self::AllocationDepth => entry.depth.saturating_add(1),
        }
    }

    /// Returns whether a query of a list finds it: by its name, or by its namespace alone (`base:`).
    fn is_listed_by(self, query: &[u8]) -> bool {
        let name = self.name().as_bytes();
        query == name || (query.ends_with(b":") && name.starts_with(query))
    }
}

/// A set of contexts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Contexts(u8);

impl Contexts {
    /// Returns the contexts that a list has. Without queries: all of them.
    #[must_use]
    pub fn listed(queries: &[&[u8]]) -> Self {
        let listed = |context: &Context| queries.is_empty() || queries.iter().any(|query| context.is_listed_by(query));
        Context::ALL.into_iter().filter(listed).collect()
    }

    /// Returns the contexts that are chosen by their names. Unknown ones are left out.
    #[must_use]
    pub fn chosen(queries: &[&[u8]]) -> Self {
        Context::ALL.into_iter().filter(|context| queries.contains(&context.name().as_bytes())).collect()
    }

    /// Returns those with these numbers. `None`: one is not in the set, or given twice.
    #[must_use]
    pub fn subset(self, ids: impl IntoIterator<Item = u32>) -> Option<Self> {
        ids.into_iter().try_fold(Self::default(), |found, id| {
            let context = self.iter().find(|context| context.id() == id)?;
            let bit = Self(1 << context as u8);
            (found.0 & bit.0 == 0).then_some(Self(found.0 | bit.0))
        })
    }

    /// Returns the contexts in it.
    pub fn iter(self) -> impl Iterator<Item = Context> {
        Context::ALL.into_iter().filter(move |context| self.0 & (1 << *context as u8) != 0)
    }

    /// Returns whether there are none.
    #[must_use]
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }
}

impl FromIterator<Context> for Contexts {
    fn from_iter<T: IntoIterator<Item = Context>>(contexts: T) -> Self {
        Self(contexts.into_iter().fold(0, |set, context| set | 1 << context as u8))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contexts_are_found_by_name_and_listed_by_namespace() {
        let [both, base, depth] = [&Context::ALL[..], &[Context::Allocation], &[Context::AllocationDepth]]
            .map(|contexts| contexts.iter().copied().collect::<Contexts>());
        assert_eq!(Contexts::listed(&[]), both);
        assert_eq!(Contexts::listed(&[b"base:"]), base);
        assert_eq!(Contexts::listed(&[b"qemu:allocation-depth", b"x-other:y"]), depth);
        assert_eq!(Contexts::chosen(&[b"base:", b"qemu:", b"", b"base"]), Contexts::default());
        assert_eq!(Contexts::chosen(&[b"base:allocation", b"base:allocation"]), base);
        assert!(Contexts::chosen(&[]).is_empty());
    }

    #[test]
    fn a_subset_has_known_numbers_once_each() {
        let both: Contexts = Context::ALL.into_iter().collect();
        assert_eq!(both.subset([2]), Some([Context::AllocationDepth].into_iter().collect()));
        assert_eq!(both.subset([2, 1]), Some(both));
        assert_eq!((both.subset([1, 1]), both.subset([3])), (None, None));
        assert_eq!(Contexts::default().subset([1]), None);
    }

    #[test]
    fn statuses_are_those_of_the_protocol() {
        let entry = |kind| MapEntry::new(1, kind).depth(1);
        let of = |kind| Context::ALL.map(|context| context.status(&entry(kind)));
        assert_eq!(of(BlockStatus::Data), [0, 2]);
        assert_eq!(of(BlockStatus::Compressed), [0, 2]);
        assert_eq!(of(BlockStatus::Zero), [3, 2]);
        assert_eq!(of(BlockStatus::Preallocated), [2, 2]);
        assert_eq!(of(BlockStatus::Unallocated), [3, 0]);
    }
}
