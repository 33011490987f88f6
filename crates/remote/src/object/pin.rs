//! How an object is recognized, so that bytes of two are never mixed.

use std::fmt;
use std::time::{SystemTime, UNIX_EPOCH};

use object_store::{GetOptions, GetRange, ObjectMeta};

use crate::error::RemoteError;
use crate::printable::printable;

/// The age from which a time of change, in whole seconds, is that of one content (RFC 9110, 8.8.2.2).
const SETTLED: i64 = 60;

/// The property by which an object is told from one that replaces it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Pin {
    /// The version: it can be read also when another one has replaced it.
    Version(String),
    /// The strong `ETag`: each request fails if it has changed.
    ETag(String),
    /// A weak `ETag`, which need not change with every byte. Also one made of the length and a time of change that was
    /// a moment ago: a second change within the same second has the same one.
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
pub(super) struct Pinned {
    meta: ObjectMeta,
    /// Whether no other content has its `ETag`.
    is_strong: bool,
}

impl Pinned {
    pub(super) fn new(meta: ObjectMeta) -> Self {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        Self::at(meta, i64::try_from(now).unwrap_or(i64::MAX))
    }

    /// As it is seen at a time, in seconds since 1970.
    fn at(mut meta: ObjectMeta, now: i64) -> Self {
        // An empty one says nothing.
        meta.e_tag = meta.e_tag.filter(|tag| !matches!(tag.trim(), "" | "\"\"" | "W/\"\""));
        let changed = meta.last_modified.timestamp();
        // That of nginx, whose time has whole seconds.
        let of_time = format!("\"{changed:x}-{:x}\"", meta.size);
        let is_settled = now.saturating_sub(changed) >= SETTLED;
        let is_strong =
            meta.e_tag.as_ref().is_some_and(|tag| !tag.starts_with("W/") && (*tag != of_time || is_settled));
        Self { meta, is_strong }
    }

    pub(super) fn length(&self) -> u64 {
        self.meta.size
    }

    pub(super) fn pin(&self) -> Pin {
        let meta = &self.meta;
        match (&meta.version, &meta.e_tag) {
            (Some(version), _) => Pin::Version(printable(version, 200)),
            (None, Some(tag)) if !self.is_strong => Pin::WeakETag(printable(tag, 200)),
            (None, Some(tag)) => Pin::ETag(printable(tag, 200)),
            (None, None) if meta.last_modified.timestamp() > 0 => Pin::Modified,
            (None, None) => Pin::Length,
        }
    }

    /// The name of this content in a cache; `None`: another one could have the same.
    pub(super) fn identity(&self) -> Option<String> {
        let meta = &self.meta;
        let tag = meta.e_tag.as_deref().filter(|_| self.is_strong);
        if tag.is_none() && meta.version.is_none() {
            return None;
        }
        Some(format!("{}\n{}\n{}", meta.version.as_deref().unwrap_or(""), tag.unwrap_or(""), meta.size))
    }

    /// The content in one line: objects that differ in it are not the same.
    pub(super) fn content(&self) -> String {
        let meta = &self.meta;
        let of = match (&meta.e_tag, &meta.version) {
            // The tag first: the same content may have several versions.
            (Some(tag), _) => format!("ETag {}", printable(tag, 200)),
            (None, Some(version)) => format!("version {}", printable(version, 200)),
            (None, None) => format!("changed {}", meta.last_modified.timestamp()),
        };
        format!("{of}, {} bytes", meta.size)
    }

    /// The options of a request for a part. `by_version`: of the version that was seen, if it has one.
    pub(super) fn options(&self, range: std::ops::Range<u64>, by_version: bool) -> GetOptions {
        let meta = &self.meta;
        let comparable = meta.e_tag.clone().filter(|tag| !tag.starts_with("W/"));
        // A condition of the time is left out if there is a better one: stores compare it with their own clock.
        let by_time = meta.e_tag.is_none() && meta.version.is_none() && meta.last_modified.timestamp() > 0;
        GetOptions {
            range: Some(GetRange::Bounded(range)),
            if_match: comparable,
            if_unmodified_since: by_time.then_some(meta.last_modified),
            version: meta.version.clone().filter(|_| by_version),
            ..GetOptions::default()
        }
    }

    /// Whether there is a version to ask for.
    pub(super) fn has_version(&self) -> bool {
        self.meta.version.is_some()
    }

    /// Checks what a request for a part has brought: stores need not support conditions.
    pub(super) fn check(&self, meta: &ObjectMeta) -> Result<(), RemoteError> {
        let known = &self.meta;
        let same_tag = known.e_tag.is_none() || known.e_tag == meta.e_tag;
        let same_version = match (&known.version, &meta.version) {
            (None, _) => true,
            (Some(known), Some(found)) => known == found,
            // Not every answer names it. The tag tells then.
            (Some(_), None) => known.e_tag.is_some(),
        };
        let same_time = known.e_tag.is_some() || known.version.is_some() || known.last_modified == meta.last_modified;
        let is_same = meta.size == known.size && same_tag && same_version && same_time;
        if is_same { Ok(()) } else { Err(RemoteError::Replaced) }
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
    fn a_tag_made_of_a_time_is_weak_until_the_time_is_over_and_an_empty_one_is_none() {
        let of_time = meta(Some("\"0-a\""), None, 10);
        let young = Pinned::at(of_time.clone(), 59);
        assert!(!young.pin().is_strong() && young.identity().is_none());
        assert_eq!(young.options(0..5, true).if_match.as_deref(), Some("\"0-a\""));
        let settled = Pinned::at(of_time, 60);
        assert!(settled.pin().is_strong() && settled.identity().is_some());
        assert_eq!(young.content(), settled.content());
        for empty in ["", "\"\"", "W/\"\""] {
            assert_eq!(Pinned::new(meta(Some(empty), None, 1)).pin(), Pin::Length);
        }
    }

    #[test]
    fn another_version_is_another_object() {
        let pinned = Pinned::new(meta(None, Some("v"), 10));
        assert_eq!(pinned.check(&meta(None, Some("v"), 10)), Ok(()));
        assert_eq!(pinned.check(&meta(None, Some("w"), 10)), Err(RemoteError::Replaced));
        assert_eq!(pinned.check(&meta(None, None, 10)), Err(RemoteError::Replaced));
        let tagged = Pinned::new(meta(Some("\"a\""), Some("v"), 10));
        assert_eq!(tagged.check(&meta(Some("\"a\""), None, 10)), Ok(()));
        assert_eq!(tagged.content(), "ETag \"a\", 10 bytes");
    }

    #[test]
    fn a_version_is_asked_for_as_long_as_it_may_be() {
        let pinned = Pinned::new(meta(Some("\"a\""), Some("v"), 10));
        assert_eq!(pinned.options(0..5, true).version.as_deref(), Some("v"));
        assert_eq!(pinned.options(0..5, false).version, None);
    }
}
