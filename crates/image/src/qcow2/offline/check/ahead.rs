//! Refcounts and flags for a header that is written next.
//!
//! Law: whichever header is in force, no cluster has more references than its refcount says, and none that has several
//! may be written in place. So before a header takes effect refcounts are raised to what it needs, and none is lowered;
//! the surplus is leaked until a repair after it.

use std::sync::Arc;

use limosa_storage::Storage;

use super::repair::{Change, copied, refcounts};
use super::report::CheckOptions;
use super::{Outcome, examine_image};
use crate::error::ImageError;
use crate::qcow2::format::header::Header;

/// Prepares an image for the header that is written to it next, durably: what that leads to is in the file already.
///
/// # Errors
/// [`ImageError::NeedsRepair`]: entries of tables, or refcounts that cannot be changed in place, are wrong;
/// [`ImageError::Unsupported`]: a cluster would have more references than a refcount can say; what the storage says.
pub(in crate::qcow2) async fn admit_header(
    storage: &dyn Storage,
    next: &Header,
    options: CheckOptions,
) -> Result<(), ImageError> {
    let outcome = examine_image(storage, next, options).await?;
    refuse(storage, next, &outcome)?;
    refcounts(storage, next, options, Change::Raise).await?;
    copied(storage, next, options).await?;
    Ok(())
}

fn refuse(storage: &dyn Storage, next: &Header, outcome: &Outcome) -> Result<(), ImageError> {
    let image = Arc::clone(storage.name());
    if outcome.overflow {
        let bits = next.geometry().refcount_bits();
        let what = format!("its refcounts of {bits} bits are too small for another reference to each cluster");
        return Err(ImageError::Unsupported { image, what });
    }
    if outcome.takes_away() || outcome.rebuild || outcome.report.check_errors > 0 {
        let what = "it is damaged: check and repair it before its snapshots change".to_owned();
        return Err(ImageError::NeedsRepair { image, what });
    }
    Ok(())
}
