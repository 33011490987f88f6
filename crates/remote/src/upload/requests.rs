//! The requests of an upload.

use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderName, HeaderValue, header};
use object_store::multipart::{MultipartStore, PartId};
use object_store::{
    Attribute, Attributes, GetOptions, GetRange, GetResult, PutMode, PutMultipartOptions, PutOptions, PutPayload,
    UpdateVersion,
};
use parking_lot::{Condvar, Mutex};
use tokio::sync::watch;
use tokio::time::timeout;

use super::record::{Begun, Part};
use crate::budget::Budget;
use crate::counters::Count;
use crate::error::RemoteError;
use crate::store::{Store, StoreOptions, exchange};

/// The attribute that tells our object from others. Its name is one that each store takes: Azure wants a word.
const MARK: &str = "limosaupload";

/// How long a store may put parts together: S3 says that it may take several minutes.
const COMPLETION: Duration = Duration::from_secs(900);

/// How long an abort may take.
const ABORT: Duration = Duration::from_secs(10);

/// Bytes in a second that a part is sent with at least: slower ones are sent again.
const SLOWEST: u64 = 32 << 10;

/// An object that is there.
#[derive(Debug, Clone)]
pub(super) struct Seen {
    pub(super) e_tag: Option<String>,
    version: Option<String>,
    pub(super) length: u64,
    mark: Option<String>,
}

impl Seen {
    /// Whether an upload with this mark has written it.
    pub(super) fn is_of(&self, mark: &str) -> bool {
        self.mark.as_deref() == Some(mark)
    }
}

/// The part of a session that the tasks which send parts share.
pub(super) struct Shared {
    pub(super) store: Store,
    options: StoreOptions,
    pub(super) requests: Arc<Count>,
    pub(super) bytes: Count,
    pub(super) retries: Count,
    pub(super) state: Mutex<State>,
    pub(super) changed: Condvar,
    /// Whether tasks that send parts have to end.
    pub(super) is_stopped: watch::Sender<bool>,
}

#[derive(Default)]
pub(super) struct State {
    /// The parts that are being sent.
    pub(super) in_flight: BTreeSet<usize>,
    /// Parts that were sent and are not in the record yet: with their digests.
    pub(super) sent: Vec<Part>,
    pub(super) ids: BTreeMap<usize, String>,
    pub(super) error: Option<RemoteError>,
}

impl Shared {
    pub(super) fn new(store: Store, options: StoreOptions) -> Self {
        Self {
            store,
            options,
            requests: Arc::default(),
            bytes: Count::default(),
            retries: Count::default(),
            state: Mutex::default(),
            changed: Condvar::new(),
            is_stopped: watch::Sender::new(false),
        }
    }

    /// Whether something has failed, so that no part need be sent any more.
    fn has_failed(&self) -> bool {
        self.state.lock().error.is_some()
    }

    /// Makes a request until it succeeds, cannot succeed, or the budget is spent.
    async fn persist<T, F: Future<Output = Result<T, RemoteError>>>(
        &self,
        attempt_within: Duration,
        mut request: impl FnMut() -> F,
    ) -> Result<T, RemoteError> {
        let mut budget = Budget::new(self.options.budget, self.requests.get());
        loop {
            match budget.attempt(Some(attempt_within), request()).await {
                Ok(done) => return Ok(done),
                Err(error) if self.has_failed() => return Err(error),
                Err(error) => budget.pause(error, &self.retries).await?,
            }
        }
    }

    fn parts(&self) -> Result<&dyn MultipartStore, RemoteError> {
        self.store.parts().ok_or_else(|| RemoteError::Settings("the store takes no uploads".to_owned()))
    }

    /// Looks what is there. It asks for a byte: an error of a request for no bytes has no text, which names its cause.
    pub(super) async fn look(&self) -> Result<Option<Seen>, RemoteError> {
        let ask = |options: GetOptions| self.persist(self.options.silence, move || self.get(options.clone()));
        let byte = GetOptions { range: Some(GetRange::Bounded(0..1)), ..GetOptions::default() };
        let found = match ask(byte).await {
            // An empty object has no byte.
            Err(RemoteError::Shorter) => ask(GetOptions { head: true, ..GetOptions::default() }).await,
            found => found,
        };
        match found {
            Ok(found) => Ok(Some(Seen {
                e_tag: found.meta.e_tag,
                version: found.meta.version,
                length: found.meta.size,
                mark: found.attributes.get(&Attribute::Metadata(MARK.into())).map(|mark| mark.to_string()),
            })),
            Err(RemoteError::NotFound(code)) if code != "NoSuchBucket" => Ok(None),
            Err(error) => Err(error),
        }
    }

    async fn get(&self, options: GetOptions) -> Result<GetResult, RemoteError> {
        exchange(&self.requests, None, self.store.objects().get_opts(&self.store.path, options)).await
    }

    /// Fails if another object is there than was seen, or one that this upload has not written.
    async fn expect(&self, seen: Option<&Seen>, mark: &str) -> Result<(), RemoteError> {
        let now = self.look().await?;
        let key = |object: &Seen| (object.e_tag.clone(), object.length);
        let is_ours = now.as_ref().is_some_and(|now| now.is_of(mark));
        match seen {
            _ if is_ours || now.as_ref().map(key) == seen.map(key) => Ok(()),
            Some(_) => Err(RemoteError::Changed),
            None => Err(RemoteError::Exists),
        }
    }

    /// The object's `ETag` after a request to make it visible. The answer of an earlier attempt may have been lost:
    /// then the object is there, with our mark.
    async fn made(
        &self,
        done: Result<Option<String>, RemoteError>,
        mark: &str,
        length: u64,
        replaced: bool,
    ) -> Result<Option<String>, RemoteError> {
        match done {
            Ok(tag) => Ok(tag),
            Err(error) => match self.look().await {
                Ok(Some(now)) if now.length == length && now.is_of(mark) => Ok(now.e_tag),
                _ => Err(of_condition(error, replaced)),
            },
        }
    }

    pub(super) async fn create(&self, mark: &str) -> Result<String, RemoteError> {
        let parts = self.parts()?;
        self.persist(self.options.silence, || {
            let options = PutMultipartOptions { attributes: attributes(mark), ..PutMultipartOptions::default() };
            let create = async move {
                match parts.create_multipart_opts(&self.store.path, options).await {
                    // Azure's uploads have no attributes, and no beginning that could carry them.
                    Err(object_store::Error::NotSupported { .. }) => parts.create_multipart(&self.store.path).await,
                    created => created,
                }
            };
            exchange(&self.requests, None, create)
        })
        .await
    }

    pub(super) async fn put_part(&self, id: &String, index: usize, part: &Bytes) -> Result<PartId, RemoteError> {
        let parts = self.parts()?;
        self.persist(self.part_time(part), || {
            self.bytes.add(part.len() as u64);
            let payload = PutPayload::from(part.clone());
            exchange(&self.requests, None, parts.put_part(&self.store.path, id, index, payload))
        })
        .await
    }

    /// How long one attempt to send bytes may take.
    fn part_time(&self, bytes: &Bytes) -> Duration {
        self.options.silence + Duration::from_secs(bytes.len() as u64 / SLOWEST)
    }

    /// Writes a short object with one request. Returns its `ETag`.
    pub(super) async fn put(
        &self,
        bytes: Bytes,
        seen: Option<Seen>,
        mark: &str,
    ) -> Result<Option<String>, RemoteError> {
        let (replaced, length) = (seen.is_some(), bytes.len() as u64);
        if self.store.has_conditional_completion() {
            // Not every store that speaks this protocol knows conditions.
            self.expect(seen.as_ref(), mark).await?;
        }
        let mode = match seen {
            None => PutMode::Create,
            Some(Seen { e_tag, version, .. }) => PutMode::Update(UpdateVersion { e_tag, version }),
        };
        let done = self
            .persist(self.part_time(&bytes), || {
                self.bytes.add(length);
                let options = PutOptions { mode: mode.clone(), attributes: attributes(mark), ..PutOptions::default() };
                let payload = PutPayload::from(bytes.clone());
                exchange(&self.requests, None, self.store.objects().put_opts(&self.store.path, payload, options))
            })
            .await;
        self.made(done.map(|done| done.e_tag), mark, length, replaced).await
    }

    /// Makes the parts visible as one object. Returns its `ETag`.
    pub(super) async fn complete(
        &self,
        upload: &Begun,
        ids: Vec<PartId>,
        seen: Option<Seen>,
    ) -> Result<Option<String>, RemoteError> {
        let Begun { id, mark, length, .. } = upload;
        let (parts, is_s3, replaced) = (self.parts()?, self.store.has_conditional_completion(), seen.is_some());
        let condition: Option<(HeaderName, HeaderValue)> = match &seen {
            _ if !is_s3 => None,
            None => Some((header::IF_NONE_MATCH, HeaderValue::from_static("*"))),
            Some(Seen { e_tag: Some(tag), .. }) => HeaderValue::from_str(tag).ok().map(|tag| (header::IF_MATCH, tag)),
            Some(_) => None,
        };
        // Not every store knows conditions, and one that does not know them ignores them.
        self.expect(seen.as_ref(), mark).await?;
        let done = self
            .persist(COMPLETION, || {
                let complete = parts.complete_multipart(&self.store.path, id, ids.clone());
                exchange(&self.requests, condition.clone(), complete)
            })
            .await;
        self.made(done.map(|done| done.e_tag), mark, *length, replaced).await
    }

    /// Removes an upload in parts. One that the store does not know is removed.
    pub(super) async fn abort(&self, id: &String) -> Result<(), RemoteError> {
        let parts = self.parts()?;
        let request = exchange(&self.requests, None, parts.abort_multipart(&self.store.path, id));
        match timeout(ABORT, request).await {
            Ok(Ok(()) | Err(RemoteError::NotFound(_))) => Ok(()),
            Ok(Err(error)) => Err(error),
            Err(_) => Err(RemoteError::Silent(ABORT)),
        }
    }
}

fn attributes(mark: &str) -> Attributes {
    Attributes::from_iter([(Attribute::Metadata(MARK.into()), mark.to_owned())])
}

/// The error of a conditional request.
fn of_condition(error: RemoteError, replaced: bool) -> RemoteError {
    match error {
        RemoteError::Replaced if replaced => RemoteError::Changed,
        RemoteError::Replaced => RemoteError::Exists,
        error => error,
    }
}
