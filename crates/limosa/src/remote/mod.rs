//! Objects of stores as images: how they are opened, what they cost, and how one is written.
//!
//! The client of stores is the feature `remote`. Without it every use of an object says so.

#[cfg(feature = "remote")]
mod client;
#[cfg(not(feature = "remote"))]
mod without_client;
#[cfg(feature = "remote")]
mod writing;

use std::error::Error;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::bail;
use limosa_console::{quantity, say};
use limosa_image::reference::{is_object, shown_object};
use serde_json::Value;

#[cfg(feature = "remote")]
pub(crate) use self::client::{content, cost, expect, is_in_use, stay_out, stores};
#[cfg(not(feature = "remote"))]
pub(crate) use self::without_client::{
    ObjectStream, Staging, Url, check, content, cost, expect, is_in_use, stay_out, stores, target,
};
#[cfg(feature = "remote")]
pub(crate) use self::writing::{ObjectStream, Staging, Url, check, target};

/// The folder of files that become objects: `$TMPDIR`, or `/var/tmp`, which outlives a restart of the machine.
pub(crate) fn staging_folder() -> PathBuf {
    let folder = std::env::var_os("TMPDIR").filter(|folder| !folder.is_empty());
    folder.map_or_else(|| PathBuf::from("/var/tmp"), PathBuf::from)
}

/// Adds to the error of a full disk which disk that is: an object's name alone would have people look in the store.
pub(crate) fn of_staging(error: anyhow::Error) -> anyhow::Error {
    let kind = |cause: &(dyn Error + 'static)| {
        let shared = || cause.downcast_ref::<Arc<io::Error>>().map(|cause| cause.kind());
        cause.downcast_ref::<io::Error>().map(io::Error::kind).or_else(shared)
    };
    let is_full = |kind| matches!(kind, ErrorKind::StorageFull | ErrorKind::QuotaExceeded);
    if !error.chain().filter_map(kind).any(is_full) {
        return error;
    }
    let folder = staging_folder();
    error.context(format!("{}: has no room for the image, which is made there (set TMPDIR)", folder.display()))
}

/// The end of an upload.
#[cfg_attr(not(feature = "remote"), expect(dead_code, reason = "there are no uploads"))]
pub(crate) enum Sent {
    Whole {
        length: u64,
        requests: u64,
    },
    /// `is_kept`: the same upload can be continued.
    Cancelled {
        is_kept: bool,
    },
    /// The store does not know the upload that was to be continued: the bytes have to be made again.
    Forgotten,
}

/// Refuses a name of an object where a file is made.
///
/// # Errors
/// It is one; `instead` says what to do.
pub(crate) fn refuse_target(name: &Path, instead: &str) -> anyhow::Result<()> {
    if is_object(name) {
        let shown = shown_object(&name.to_string_lossy());
        bail!("{shown}: is an object of a store, and only packed snapshots become one: {instead}");
    }
    Ok(())
}

/// Tells people what objects have cost; nothing if there was none.
pub(crate) fn tell_cost() {
    let Some(cost) = cost() else { return };
    let figure = |name: &str| cost[name].as_u64().unwrap_or(0);
    say!(
        "  object store: {} requests, {} received, {} sent",
        quantity::count(figure("requests")),
        quantity::bytes(figure("bytes-received")),
        quantity::bytes(figure("bytes-sent"))
    );
}

/// Adds what objects have cost to an object for programs.
pub(crate) fn add_cost(object: &mut Value) {
    if let (Some(object), Some(cost)) = (object.as_object_mut(), cost()) {
        object.insert("remote".to_owned(), cost);
    }
}
