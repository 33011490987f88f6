//! Another name for an image's external data file.
//!
//! Law: at any moment the header is the old one or the new one ([`replace_header`]). No data file is opened.

use std::ffi::OsString;
use std::sync::Arc;

use limosa_storage::Storage;

use super::amend::sound;
use super::check::CheckOptions;
use super::header_change::{can_replace_header, replace_header};
use crate::error::ImageError;
use crate::qcow2::format::feature::Features;
use crate::qcow2::format::header::Header;
use crate::setters::setters;

/// A change of what an image says of its external data file.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct DataFileChange {
    /// Its new name; an empty one: the image names none, and has to be opened with a name. `None`: it stays.
    pub name: Option<OsString>,
    /// Whether it is kept valid as a raw image. One that is not cannot become so.
    pub is_raw: Option<bool>,
}

setters!(DataFileChange { name: Option<OsString>, is_raw: Option<bool> });

/// Changes the name of the data file of an image, durably. The file itself is not looked for. Nothing else uses the
/// image. One that was not closed is repaired first.
///
/// # Errors
/// [`ImageError::Unsupported`]: it has no data file, or one that is not raw would become so;
/// [`ImageError::NeedsRepair`]: it is damaged; what the storage says.
pub async fn change_data_file(
    file: &dyn Storage,
    change: &DataFileChange,
    options: CheckOptions,
) -> Result<(), ImageError> {
    let Some(mut old) = admitted(file, change, options).await? else { return Ok(()) };
    old.prepare_autoclear(file, true).await?;
    let new = changed(&old, change);
    if new == old { Ok(()) } else { replace_header(file, &old, new).await }
}

/// Refuses what [`change_data_file`] refuses.
///
/// # Errors
/// As [`change_data_file`].
pub(crate) async fn check_data_file_change(
    file: &dyn Storage,
    change: &DataFileChange,
    options: CheckOptions,
) -> Result<(), ImageError> {
    match admitted(file, change, options).await? {
        Some(old) => can_replace_header(file.name(), &old, changed(&old, change)),
        None => Ok(()),
    }
}

/// The header of an image that can be changed like this; `None`: nothing is asked for.
async fn admitted(
    file: &dyn Storage,
    change: &DataFileChange,
    options: CheckOptions,
) -> Result<Option<Header>, ImageError> {
    if *change == DataFileChange::default() {
        return Ok(None);
    }
    let refuse = |what: &str| Err(ImageError::Unsupported { image: Arc::clone(file.name()), what: what.to_owned() });
    let old = sound(file, options).await?;
    // As with stock tools, such an image keeps no raw data file already.
    if !old.features.data_file() && (change.name.is_some() || change.is_raw == Some(true)) {
        return refuse("it has no external data file");
    }
    if change.is_raw == Some(true) && !old.features.raw_data_file() {
        return refuse("its data file is not kept valid as a raw image, and cannot become so");
    }
    Ok(Some(old))
}

fn changed(old: &Header, change: &DataFileChange) -> Header {
    let mut new = old.clone();
    if let Some(name) = &change.name {
        new.extensions.data_file = Some(name.clone()).filter(|name| !name.is_empty());
    }
    if change.is_raw == Some(false) {
        new.features.autoclear &= !Features::RAW_DATA_FILE;
    }
    new
}
