//! Chains in which an image below the first one is written, too: the base of a commit.
//!
//! Law: the base is opened once, to be written, and the images above it read through that same object: no file is in
//! use twice, and what is written to the base is seen at once.

use std::ffi::OsStr;
use std::sync::Arc;

use super::{Image, OpenOptions, Walk};
use crate::error::ImageError;
use crate::location::Identity;
use crate::qcow2::ImageParts;
use crate::reference::{Location, Reference};

/// A chain whose base is open to be written.
#[derive(Debug)]
#[non_exhaustive]
pub struct ChainWithBase {
    /// The topmost image, not in use. Its files are open as the caller's options say.
    pub top: ImageParts,
    /// The base: the topmost image's backing image, or one further down.
    pub base: Image,
    /// Number of images above the base.
    pub layers: u32,
}

impl ChainWithBase {
    /// An image over a base that is the backing image of the last of `layers` images.
    #[must_use]
    pub const fn new(top: ImageParts, base: Image, layers: u32) -> Self {
        Self { top, base, layers }
    }
}

/// The image of a chain that is written besides the first one.
#[derive(Debug)]
pub(super) struct Base {
    options: OpenOptions,
    /// Files that it may be; empty: the first one's backing file.
    files: Vec<Identity>,
    /// Number of images down to it, with it, once it is found.
    at: Option<usize>,
}

impl Base {
    /// The backing file of an image, or one further down by name: as the caller would open it, or as the image would.
    fn new(options: OpenOptions, name: Option<&OsStr>, image: &Location) -> Self {
        let names = name.into_iter().flat_map(|name| [Reference::from_name(name), Reference::from_image(name, image)]);
        // What is not there cannot be in the chain.
        let files = names.filter_map(|reference| reference.ok()?.location.identity()).collect();
        let at = name.is_none().then_some(2);
        Self { options, files, at }
    }

    /// Looks at the next file of the chain, before it is opened.
    pub(super) fn look(&mut self, depth: usize, identity: &Identity) {
        if self.at.is_none() && depth > 1 && self.files.contains(identity) {
            self.at = Some(depth);
        }
    }

    pub(super) fn is_at(&self, depth: usize) -> bool {
        self.at == Some(depth)
    }

    pub(super) const fn options(&self) -> &OpenOptions {
        &self.options
    }
}

/// Opens a qcow2 image, not in use, and all below it; its backing image, or the one below it that `base` names, is
/// opened to be written.
///
/// # Errors
/// [`ImageError::Unsupported`]: the image is raw, it has no backing file, or none of that name is in its chain; as
/// [`open`](super::open) otherwise.
pub async fn open_with_base(
    reference: &Reference,
    options: &OpenOptions,
    base: Option<&OsStr>,
) -> Result<ChainWithBase, ImageError> {
    let mut walk = Walk::new(reference, options);
    let writable = OpenOptions { read_only: false, ..options.below() };
    walk.base = Some(Base::new(writable, base, &reference.location));
    let (top, below, found) = walk.levels().await?;
    let image = Arc::clone(top.file.storage.name());
    let unsupported = |what: String| ImageError::Unsupported { image: Arc::clone(&image), what };
    let Some((found, layers)) = found else {
        return Err(unsupported(match base {
            Some(base) if below.is_some() => format!("{} is not in its backing chain", base.display()),
            _ => "it has no backing file".into(),
        }));
    };
    let cipher = top.cipher(options).await?;
    let top = top.parts(below).map_err(|_| unsupported("it is not a qcow2 image".into()))?.cipher(cipher);
    Ok(ChainWithBase { top, base: found, layers })
}
