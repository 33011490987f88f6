//! The steps of an upload.

use std::collections::{BTreeMap, HashMap};
use std::future::Future;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderName, HeaderValue, header};
use object_store::multipart::{MultipartStore, PartId};
use object_store::{
    Attribute, Attributes, GetOptions, PutMode, PutMultipartOptions, PutOptions, PutPayload, PutResult, UpdateVersion,
};
use parking_lot::{Condvar, Mutex};
use tokio::time::{sleep, timeout};

use super::record::{Begun, Part, Record, digest};
use super::{Existing, UploadCounters, UploadOptions, Uploaded, plan};
use crate::budget::Budget;
use crate::counters::Count;
use crate::error::RemoteError;
use crate::runtime;
use crate::store::{Store, StoreOptions, exchange};

/// The attribute that tells our object from one of the same length.
const MARK: &str = "limosa-upload";

/// How long an abort may take.
const ABORT: Duration = Duration::from_secs(10);

/// Bytes in a second that a part is sent with at least: slower ones are sent again.
const SLOWEST: u64 = 32 << 10;

/// The object as it was when the upload began.
#[derive(Debug, Clone)]
struct Seen {
    e_tag: Option<String>,
    version: Option<String>,
    length: u64,
    mark: Option<String>,
}

/// An upload that has not ended.
pub(super) struct Session {
    shared: Arc<Shared>,
    options: UploadOptions,
    part_size: u64,
    length: u64,
    seen: Option<Seen>,
    record: Option<Record>,
    /// Parts that an earlier upload had sent.
    resumable: HashMap<usize, Part>,
    is_resumed: bool,
    /// The upload in parts; `None`: there is at most one part, and it is not sent yet.
    begun: Option<Begun>,
    first: Option<Vec<u8>>,
    next: usize,
    sent: u64,
    resumed: u64,
}

/// The part of a session that the tasks which send parts share.
struct Shared {
    store: Store,
    options: StoreOptions,
    requests: Arc<Count>,
    bytes: Count,
    retries: Count,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    in_flight: usize,
    /// Parts that were sent and are not in the record yet: with their digests.
    sent: Vec<Part>,
    ids: BTreeMap<usize, String>,
    error: Option<RemoteError>,
}

impl Session {
    pub(super) fn begin(
        store: Store,
        identity: &str,
        length: u64,
        options: &UploadOptions,
    ) -> Result<Self, RemoteError> {
        let part_size = plan::part_size(length, options.part_size)?;
        let shared = Arc::new(Shared {
            store,
            options: options.store.clone(),
            requests: Arc::default(),
            bytes: Count::default(),
            retries: Count::default(),
            state: Mutex::default(),
            changed: Condvar::new(),
        });
        let seen = run(&shared, |shared| async move { shared.look().await })?;
        if seen.is_some() && options.existing == Existing::Refuse {
            return Err(RemoteError::Exists);
        }
        let mut session = Self {
            shared,
            options: options.clone(),
            part_size,
            length,
            seen,
            record: None,
            resumable: HashMap::new(),
            is_resumed: false,
            begun: None,
            first: None,
            next: 0,
            sent: 0,
            resumed: 0,
        };
        if let Some(folder) = &options.records
            && session.shared.store.has_conditional_completion()
        {
            match Record::open(folder, identity) {
                Ok(Some((record, found))) => session.take_record(record, found),
                Ok(None) => {}
                Err(error) => tracing::warn!(%error, "the upload cannot be continued if it is killed: no record"),
            }
        }
        Ok(session)
    }

    /// Continues an earlier upload if it is of such an object, or aborts it.
    fn take_record(&mut self, record: Record, found: Option<super::record::Resumable>) {
        self.record = Some(record);
        let Some((begun, parts)) = found else { return };
        if begun.length == self.length && begun.part_size == self.part_size {
            self.begun = Some(begun);
            self.resumable = parts;
            self.is_resumed = true;
        } else {
            self.abort(&begun.id);
        }
    }

    pub(super) fn part_size(&self) -> u64 {
        self.part_size
    }

    pub(super) fn counters(&self) -> UploadCounters {
        UploadCounters {
            requests: self.shared.requests.get(),
            bytes: self.shared.bytes.get(),
            parts: self.next as u64,
            resumed: self.resumed,
            retries: self.shared.retries.get(),
        }
    }

    pub(super) fn put(&mut self, part: Vec<u8>) -> Result<(), RemoteError> {
        let is_last = (part.len() as u64) < self.part_size || self.sent + part.len() as u64 >= self.length;
        if part.len() as u64 > self.part_size || part.is_empty() || self.sent + part.len() as u64 > self.length {
            return Err(RemoteError::Settings("a part has another length than announced".to_owned()));
        }
        self.check()?;
        self.sent += part.len() as u64;
        self.next += 1;
        if self.begun.is_none() && self.next == 1 && is_last {
            self.first = Some(part);
            return Ok(());
        }
        self.send(self.next - 1, part)
    }

    /// Fails if an earlier part has failed, or nobody wants the upload any more.
    fn check(&mut self) -> Result<(), RemoteError> {
        if self.options.cancelled.load(Ordering::Relaxed) {
            return Err(RemoteError::Cancelled);
        }
        let (sent, error) = {
            let mut state = self.shared.state.lock();
            (std::mem::take(&mut state.sent), state.error.clone())
        };
        self.note(&sent);
        match error {
            Some(error) => Err(self.of_resumed(error)),
            None => Ok(()),
        }
    }

    /// The error of an upload that may be continued: if the store does not know it any more it is begun again. Stores
    /// say that with 404, and some of them with 403.
    fn of_resumed(&self, error: RemoteError) -> RemoteError {
        match error {
            RemoteError::NotFound(_) | RemoteError::Denied { .. } if self.is_resumed => RemoteError::UnknownUpload,
            error => error,
        }
    }

    /// Notes sent parts in the record.
    fn note(&mut self, parts: &[Part]) {
        let Some(record) = &mut self.record else { return };
        if let Err(error) = parts.iter().try_for_each(|part| record.add(part)) {
            tracing::warn!(%error, "parts of the upload cannot be recorded; they are sent again if it is killed");
        }
    }

    fn send(&mut self, index: usize, part: Vec<u8>) -> Result<(), RemoteError> {
        let id = self.upload_id()?;
        let digest = self.record.as_ref().map(|_| digest(&part));
        if let Some(digest) = &digest
            && let Some(known) = self.resumable.get(&index).filter(|known| known.digest == *digest)
        {
            self.shared.state.lock().ids.insert(index, known.id.clone());
            self.resumed += 1;
            return Ok(());
        }
        {
            let mut state = self.shared.state.lock();
            while state.in_flight >= self.options.streams.clamp(1, 64) && state.error.is_none() {
                self.shared.changed.wait(&mut state);
            }
            state.in_flight += 1;
        }
        // After the wait: what has come meanwhile.
        let flight = Flight(Arc::clone(&self.shared));
        self.check()?;
        let part = Bytes::from(part);
        let handle = runtime::handle().map_err(|error| local(&error))?;
        handle.spawn(async move {
            let shared = &flight.0;
            match shared.put_part(&id, index, &part).await {
                Ok(PartId { content_id: id }) => {
                    let mut state = shared.state.lock();
                    state.ids.insert(index, id.clone());
                    state.sent.extend(digest.map(|digest| Part { index, digest, id }));
                }
                Err(error) => _ = shared.state.lock().error.get_or_insert(error),
            }
            drop(flight);
        });
        Ok(())
    }

    /// The store's name of the upload in parts, which is begun if it was not.
    fn upload_id(&mut self) -> Result<String, RemoteError> {
        if let Some(begun) = &self.begun {
            return Ok(begun.id.clone());
        }
        let mark = mark().map_err(|error| local(&error))?;
        let id = run(&self.shared, |shared| {
            let mark = mark.clone();
            async move { shared.create(&mark).await }
        })?;
        let begun = Begun { id: id.clone(), mark, part_size: self.part_size, length: self.length };
        if let Some(record) = &mut self.record
            && let Err(error) = record.begin(&begun)
        {
            tracing::warn!(%error, "the upload cannot be continued if it is killed: no record");
        }
        self.begun = Some(begun);
        Ok(id)
    }

    pub(super) fn finish(&mut self) -> Result<Uploaded, RemoteError> {
        let outcome = self.complete();
        if let Err(error) = &outcome {
            // Whether the upload is aborted depends on it.
            self.shared.state.lock().error.get_or_insert_with(|| error.clone());
        }
        outcome
    }

    fn complete(&mut self) -> Result<Uploaded, RemoteError> {
        let shared = Arc::clone(&self.shared);
        {
            let mut state = shared.state.lock();
            while state.in_flight > 0 {
                shared.changed.wait(&mut state);
            }
        }
        self.check()?;
        let seen = self.seen.clone();
        let Some(begun) = self.begun.clone() else {
            let (length, bytes) = (self.sent, Bytes::from(self.first.take().unwrap_or_default()));
            let result = run(&shared, |shared| async move { shared.put(bytes, seen).await })?;
            return Ok(self.uploaded(result.e_tag, length, true));
        };
        let ids = std::mem::take(&mut shared.state.lock().ids);
        if ids.len() != self.next || ids.keys().copied().ne(0..self.next) {
            return Err(RemoteError::Local("parts of the upload are missing".to_owned()));
        }
        let parts = ids.into_values().map(|content_id| PartId { content_id }).collect();
        let (length, is_conditional) = (self.sent, shared.store.has_conditional_completion());
        let completing = begun;
        let e_tag = run(&shared, |shared| async move { shared.complete(&completing, parts, seen, length).await })
            .map_err(|error| self.of_resumed(error))?;
        self.begun = None;
        if let Some(record) = &self.record {
            record.remove();
        }
        Ok(self.uploaded(e_tag, length, is_conditional))
    }

    fn uploaded(&self, e_tag: Option<String>, length: u64, is_conditional: bool) -> Uploaded {
        Uploaded { length, e_tag, is_conditional, counters: self.counters() }
    }

    /// Aborts an upload in parts, if the store can be reached.
    fn abort(&self, id: &str) {
        let (shared, id) = (Arc::clone(&self.shared), id.to_owned());
        let aborting = async move {
            let Some(parts) = shared.store.parts() else { return };
            let request = exchange(&shared.requests, None, parts.abort_multipart(&shared.store.path, &id));
            match timeout(ABORT, request).await {
                Ok(Ok(())) | Ok(Err(RemoteError::NotFound(_))) => {}
                Ok(Err(error)) => tracing::warn!(%error, "the parts of an upload that has failed remain in the store"),
                Err(_) => tracing::warn!("the parts of an upload that has failed remain in the store: it is silent"),
            }
        };
        if let Err(error) = runtime::block_on(aborting) {
            tracing::warn!(%error, "the parts of an upload that has failed remain in the store");
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        let Some(begun) = self.begun.take() else { return };
        // The parts in flight end first, so that none comes after the abort.
        let error = {
            let mut state = self.shared.state.lock();
            state.error.get_or_insert(RemoteError::Cancelled);
            while state.in_flight > 0 {
                self.shared.changed.wait(&mut state);
            }
            state.error.clone()
        };
        // While the store cannot be reached nothing can be aborted: the next upload continues this one.
        if self.record.is_some() && matches!(error, Some(RemoteError::Spent { .. })) {
            let sent = std::mem::take(&mut self.shared.state.lock().sent);
            self.note(&sent);
            return;
        }
        self.abort(&begun.id);
        if let Some(record) = &self.record {
            record.remove();
        }
    }
}

/// A part in flight.
struct Flight(Arc<Shared>);

impl Drop for Flight {
    fn drop(&mut self) {
        self.0.state.lock().in_flight -= 1;
        self.0.changed.notify_all();
    }
}

impl Shared {
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
        let (mut budget, mut last) = (Budget::new(self.options.budget, self.requests.get()), None);
        loop {
            let within = attempt_within.min(budget.for_attempt());
            let error = match timeout(within, request()).await {
                Ok(Ok(done)) => return Ok(done),
                Ok(Err(error)) => error,
                Err(_) => last.unwrap_or(RemoteError::Silent(within)),
            };
            last = Some(error.clone());
            if !error.is_transient() || self.has_failed() {
                return Err(error);
            }
            let Some(pause) = budget.next_pause(error.retry_after()) else { return Err(error.after(budget.total())) };
            tracing::debug!(?pause, %error, "an object store's request is made again");
            self.retries.add(1);
            sleep(pause).await;
        }
    }

    fn parts(&self) -> Result<&dyn MultipartStore, RemoteError> {
        self.store.parts().ok_or_else(|| RemoteError::Settings("the store takes no uploads".to_owned()))
    }

    /// Looks what is there.
    async fn look(&self) -> Result<Option<Seen>, RemoteError> {
        let path = &self.store.path;
        let found = self
            .persist(self.options.silence, || {
                let head = GetOptions { head: true, ..GetOptions::default() };
                exchange(&self.requests, None, self.store.objects().get_opts(path, head))
            })
            .await;
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

    async fn create(&self, mark: &str) -> Result<String, RemoteError> {
        let parts = self.parts()?;
        self.persist(self.options.silence, || {
            let attributes = Attributes::from_iter([(Attribute::Metadata(MARK.into()), mark.to_owned())]);
            let options = PutMultipartOptions { attributes, ..PutMultipartOptions::default() };
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

    async fn put_part(&self, id: &String, index: usize, part: &Bytes) -> Result<PartId, RemoteError> {
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

    /// Writes a short object with one request.
    async fn put(&self, bytes: Bytes, seen: Option<Seen>) -> Result<PutResult, RemoteError> {
        let replaced = seen.is_some();
        let mode = match seen {
            None => PutMode::Create,
            Some(Seen { e_tag, version, .. }) => PutMode::Update(UpdateVersion { e_tag, version }),
        };
        let done = self
            .persist(self.part_time(&bytes), || {
                self.bytes.add(bytes.len() as u64);
                let options = PutOptions { mode: mode.clone(), ..PutOptions::default() };
                let payload = PutPayload::from(bytes.clone());
                exchange(&self.requests, None, self.store.objects().put_opts(&self.store.path, payload, options))
            })
            .await;
        done.map_err(|error| of_condition(error, replaced))
    }

    /// Makes the parts visible as one object. Returns its `ETag`.
    async fn complete(
        &self,
        begun: &Begun,
        ids: Vec<PartId>,
        seen: Option<Seen>,
        length: u64,
    ) -> Result<Option<String>, RemoteError> {
        let (parts, is_s3, replaced) = (self.parts()?, self.store.has_conditional_completion(), seen.is_some());
        let condition: Option<(HeaderName, HeaderValue)> = match &seen {
            _ if !is_s3 => None,
            None => Some((header::IF_NONE_MATCH, HeaderValue::from_static("*"))),
            Some(Seen { e_tag: Some(tag), .. }) => HeaderValue::from_str(tag).ok().map(|tag| (header::IF_MATCH, tag)),
            Some(_) => None,
        };
        // Not every store knows conditions, and one that does not know them ignores them.
        let now = self.look().await?;
        let [there, expected] = [&now, &seen].map(|object| object.as_ref().map(|it| (it.e_tag.clone(), it.length)));
        let is_ours = now.is_some_and(|now| now.mark.as_ref() == Some(&begun.mark));
        if there != expected && !is_ours {
            return Err(if replaced { RemoteError::Changed } else { RemoteError::Exists });
        }
        let done = self
            .persist(self.options.budget, || {
                let complete = parts.complete_multipart(&self.store.path, &begun.id, ids.clone());
                exchange(&self.requests, condition.clone(), complete)
            })
            .await;
        match done {
            Ok(result) => Ok(result.e_tag),
            // The answer of an earlier attempt may have been lost. Then the object is there, with our mark.
            Err(error) => match self.look().await {
                Ok(Some(now)) if now.length == length && now.mark.as_ref() == Some(&begun.mark) => Ok(now.e_tag),
                _ => Err(of_condition(error, replaced)),
            },
        }
    }
}

/// The error of a conditional request.
fn of_condition(error: RemoteError, replaced: bool) -> RemoteError {
    match error {
        RemoteError::Replaced if replaced => RemoteError::Changed,
        RemoteError::Replaced => RemoteError::Exists,
        error => error,
    }
}

/// Runs a step on the runtime, and waits for its end.
fn run<T: Send + 'static, F: Future<Output = Result<T, RemoteError>> + Send + 'static>(
    shared: &Arc<Shared>,
    step: impl FnOnce(Arc<Shared>) -> F,
) -> Result<T, RemoteError> {
    runtime::block_on(step(Arc::clone(shared))).map_err(|error| local(&error))?
}

fn local(error: &io::Error) -> RemoteError {
    RemoteError::Local(error.to_string())
}

/// A name that no other upload has.
fn mark() -> io::Result<String> {
    let mut bytes = [0_u8; 16];
    rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}
