//! How an object is recognized, so that bytes of two are never mixed.

use std::fmt;

use object_store::{GetOptions, GetRange, ObjectMeta};

use crate::error::RemoteError;
use crate::printable::printable;

/// The property by which an object is told from one that replaces it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Pin {
    /// The version: it can be read also when another one has replaced it.
    Version(String),
    /// The strong `ETag`: each request fails if it has changed.
    ETag(String),
    /// A weak `ETag`, which need not change with every byte.
    WeakETag(String),
    /// The time of the last change, in seconds, and the length.
    Modified,
    /// The length alone: a replacement of the same length cannot be noticed.
    Length,
}

impl Pin {
    /// Whether a replacement is noticed in every case.
    #[must_use]
    pub fn is_strong(&self) -> bool {
        matches!(self, Self::Version(_) | Self::ETag(_))
    }
}

impl fmt::Display for Pin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Version(version) => write!(f, "version {version}"),
            Self::ETag(tag) | Self::WeakETag(tag) => write!(f, "ETag {tag}"),
            Self::Modified => f.write_str("time of change and length"),
            Self::Length => f.write_str("length"),
        }
    }
}

/// An object as it was when it was opened.
#[derive(Debug, Clone)]
pub(super) struct Pinned(ObjectMeta);

impl Pinned {
    pub(super) fn new(meta: ObjectMeta) -> Self {
        Self(meta)
    }

    pub(super) fn length(&self) -> u64 {
        self.0.size
    }

    pub(super) fn pin(&self) -> Pin {
        let meta = &self.0;
        match (&meta.version, &meta.e_tag) {
            (Some(version), _) => Pin::Version(printable(version, 200)),
            (None, Some(tag)) if tag.starts_with("W/") => Pin::WeakETag(printable(tag, 200)),
            (None, Some(tag)) => Pin::ETag(printable(tag, 200)),
            (None, None) if meta.last_modified.timestamp() > 0 => Pin::Modified,
            (None, None) => Pin::Length,
        }
    }

    /// The name of this content in a cache; `None`: another one could have the same.
    pub(super) fn identity(&self) -> Option<String> {
        let meta = &self.0;
        let tag = meta.e_tag.as_deref().filter(|tag| !tag.starts_with("W/"));
        if tag.is_none() && meta.version.is_none() {
            return None;
        }
        Some(format!("{}\n{}\n{}", meta.version.as_deref().unwrap_or(""), tag.unwrap_or(""), meta.size))
    }

    /// The options of a request for a part. `by_version`: of the version that was seen, if it has one.
    pub(super) fn options(&self, range: std::ops::Range<u64>, by_version: bool) -> GetOptions {
        let strong = self.0.e_tag.clone().filter(|tag| !tag.starts_with("W/"));
        // A condition of the time is left out if there is a better one: stores compare it with their own clock.
        let by_time = self.0.e_tag.is_none() && self.0.version.is_none() && self.0.last_modified.timestamp() > 0;
        GetOptions {
            range: Some(GetRange::Bounded(range)),
            if_match: strong,
            if_unmodified_since: by_time.then_some(self.0.last_modified),
            version: self.0.version.clone().filter(|_| by_version),
            ..GetOptions::default()
        }
    }

    /// Whether there is a version to ask for.
    pub(super) fn has_version(&self) -> bool {
        self.0.version.is_some()
    }

    /// Checks what a request for a part has brought: stores need not support conditions.
    pub(super) fn check(&self, meta: &ObjectMeta) -> Result<(), RemoteError> {
        let same_tag = self.0.e_tag.is_none() || self.0.e_tag == meta.e_tag;
        let same_time =
            self.0.e_tag.is_some() || self.0.version.is_some() || self.0.last_modified == meta.last_modified;
        if meta.size == self.0.size && same_tag && same_time { Ok(()) } else { Err(RemoteError::Replaced) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn meta(e_tag: Option<&str>, version: Option<&str>, size: u64) -> ObjectMeta {
        ObjectMeta {
            location: "k".into(),
            last_modified: Default::default(),
            size,
            e_tag: e_tag.map(Into::into),
            version: version.map(Into::into),
        }
    }

    #[test]
    fn a_replaced_object_is_noticed() {
        let pinned = Pinned::new(meta(Some("\"a\""), None, 10));
        assert_eq!(pinned.pin(), Pin::ETag("\"a\"".into()));
        assert_eq!(pinned.options(0..5, true).if_match.as_deref(), Some("\"a\""));
        assert_eq!(pinned.check(&meta(Some("\"a\""), None, 10)), Ok(()));
        for other in [meta(Some("\"b\""), None, 10), meta(Some("\"a\""), None, 11), meta(None, None, 10)] {
            assert_eq!(pinned.check(&other), Err(RemoteError::Replaced));
        }
    }

    #[test]
    fn weak_tags_are_compared_here_and_name_nothing_in_a_cache() {
        let pinned = Pinned::new(meta(Some("W/\"a\""), None, 10));
        assert!(!pinned.pin().is_strong() && pinned.identity().is_none());
        assert_eq!(pinned.options(0..5, true).if_match, None);
        assert_eq!(pinned.check(&meta(Some("W/\"b\""), None, 10)), Err(RemoteError::Replaced));
        assert_eq!(Pinned::new(meta(None, None, 1)).pin(), Pin::Length);
    }

    #[test]
    fn a_version_is_asked_for_as_long_as_it_may_be() {
        let pinned = Pinned::new(meta(Some("\"a\""), Some("v"), 10));
        assert_eq!(pinned.options(0..5, true).version.as_deref(), Some("v"));
        assert_eq!(pinned.options(0..5, false).version, None);
    }
}
