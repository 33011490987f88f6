//! The objects of a folder: listed, and removed.
//!
//! Stores have no folders: one is what names have in common up to a `/`.

use std::io;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use limosa_storage::{Operation, StorageError};
use object_store::ObjectStoreExt as _;
use object_store::path::Path;

use crate::budget::Budget;
use crate::counters::Count;
use crate::error::RemoteError;
use crate::runtime;
use crate::store::{Store, StoreOptions, exchange};
use crate::url::ObjectUrl;

/// How long a list may take; one of many thousand objects is several requests.
const LIST: Duration = Duration::from_secs(60);

/// An object of a folder.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ListedObject {
    /// Its URL.
    pub url: String,
    /// Its length in bytes.
    pub length: u64,
    /// When it was written.
    pub modified: SystemTime,
    /// Its `ETag`, which another content does not have.
    pub tag: Option<String>,
}

/// The objects of a folder.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Listing {
    /// The objects, by name. Those of folders below are left out.
    pub objects: Vec<ListedObject>,
    /// Requests that were made.
    pub requests: u64,
}

/// Lists the objects of a folder, `s3://BUCKET/FOLDER` with or without a slash at its end, or `s3://BUCKET`.
///
/// # Errors
/// A [`RemoteError`] as the source: it is no folder of a store, no access, no answer within the budget.
pub fn list(folder: &str, options: &StoreOptions) -> Result<Listing, StorageError> {
    let failed = |error: RemoteError| StorageError::for_storage(Operation::List, &folder.into(), error);
    let base = folder.trim_end_matches('/');
    // Of the URL of any object there is its store and its folder.
    let url: ObjectUrl = format!("{base}/any")
        .parse()
        .map_err(|error: crate::url::UrlError| failed(RemoteError::Settings(error.to_string())))?;
    if url.is_web() {
        return Err(failed(RemoteError::Settings("a web server has no list of its files".to_owned())));
    }
    // As it is: another way to make one would encode some characters.
    let prefix = url.key().rsplit_once('/').map(|(folder, _)| Path::parse(folder)).transpose();
    let prefix = prefix.map_err(|_| failed(RemoteError::Settings("the folder is not supported".to_owned())))?;
    let store = Store::new(&url, options).map_err(failed)?;
    let requests = Arc::<Count>::default();
    let (store, counted) = (Arc::new(store), Arc::clone(&requests));
    let found = persist(options, LIST, move || {
        let (store, counted, prefix) = (Arc::clone(&store), Arc::clone(&counted), prefix.clone());
        async move { exchange(&counted, None, store.objects().list_with_delimiter(prefix.as_ref())).await }
    });
    let found = found.map_err(|error| StorageError::for_storage(Operation::List, &folder.into(), error))?;
    let listed = |meta: object_store::ObjectMeta| ListedObject {
        url: format!("{}://{}/{}", url.scheme(), url.bucket(), meta.location),
        length: meta.size,
        modified: meta.last_modified.into(),
        tag: meta.e_tag,
    };
    let mut objects: Vec<_> = found.objects.into_iter().map(listed).collect();
    objects.sort_by(|a, b| a.url.cmp(&b.url));
    Ok(Listing { objects, requests: requests.get() })
}

/// Removes an object; one that is not there is removed. Returns the number of requests that were made.
///
/// # Errors
/// A [`RemoteError`] as the source: no access, no answer within the budget.
pub fn remove(url: &ObjectUrl, options: &StoreOptions) -> Result<u64, StorageError> {
    let name: Arc<str> = url.to_string().into();
    let failed = |error: io::Error| StorageError::for_storage(Operation::Remove, &name, error);
    let store = Store::new(url, options).map_err(|error| failed(error.into()))?;
    let requests = Arc::<Count>::default();
    let (store, counted) = (Arc::new(store), Arc::clone(&requests));
    let removed = persist(options, options.silence, move || {
        let (store, counted) = (Arc::clone(&store), Arc::clone(&counted));
        async move { exchange(&counted, None, store.objects().delete(&store.path)).await }
    });
    match removed {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(failed(error)),
        _ => Ok(requests.get()),
    }
}

/// Makes a request until it succeeds, cannot succeed, or the budget is spent; waits for that.
fn persist<T: Send + 'static, F: Future<Output = Result<T, RemoteError>> + Send>(
    options: &StoreOptions,
    most: Duration,
    mut request: impl FnMut() -> F + Send + 'static,
) -> io::Result<T> {
    let (mut budget, most) = (Budget::new(options.budget, 0), most.min(options.budget));
    let attempts = async move {
        let retries = Count::default();
        loop {
            match budget.attempt(Some(most), request()).await {
                Ok(done) => return Ok::<_, RemoteError>(done),
                Err(error) => budget.pause(error, &retries).await?,
            }
        }
    };
    Ok(runtime::block_on(attempts)??)
}
