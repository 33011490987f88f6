//! The steps of an upload.

use std::collections::{BTreeSet, HashMap};
use std::future::Future;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use bytes::Bytes;
use object_store::multipart::PartId;
use parking_lot::MutexGuard;

use super::record::{Begun, Part, Record, digest};
use super::requests::{Seen, Shared, State};
use super::{Existing, UploadCounters, UploadOptions, Uploaded, plan};
use crate::error::RemoteError;
use crate::runtime;
use crate::store::Store;

/// How often an upload that waits looks if it is cancelled.
const LOOK: Duration = Duration::from_millis(100);

/// How long parts in flight may take to end before the upload is aborted.
const LAST_PARTS: Duration = Duration::from_secs(10);

/// An upload that has not ended.
pub(super) struct Session {
    shared: Arc<Shared>,
    options: UploadOptions,
    /// The name of the object that no other one has.
    identity: String,
    /// The folder for records, if this store's uploads can be continued.
    records: Option<PathBuf>,
    part_size: u64,
    length: u64,
    seen: Option<Seen>,
    record: Option<Record>,
    /// Parts that an earlier upload had sent.
    resumable: HashMap<usize, Part>,
    progress: Progress,
    first: Option<Vec<u8>>,
    /// Parts that were given to this upload.
    put: BTreeSet<usize>,
    next: usize,
    sent: u64,
    resumed: u64,
}

/// The state of the upload in the store.
enum Progress {
    /// Nothing is sent yet: there is at most one part.
    Nothing,
    /// Parts are sent. `is_resumed`: those of an earlier upload are among them.
    Parts { begun: Begun, is_resumed: bool },
    /// An earlier upload has made the object, and was killed before it removed its record.
    Completed,
}

impl Session {
    pub(super) fn begin(store: Store, length: u64, options: &UploadOptions) -> Result<Self, RemoteError> {
        let part_size = plan::part_size(length, options.part_size)?;
        let shared = Arc::new(Shared::new(store, options.store.clone()));
        let seen = run(&shared, |shared| async move { shared.look().await })?;
        let identity = shared.store.identity().unwrap_or_default();
        let records = options.records.clone().filter(|_| shared.store.has_conditional_completion());
        let mut session = Self {
            shared,
            options: options.clone(),
            identity,
            records,
            part_size,
            length,
            seen,
            record: None,
            resumable: HashMap::new(),
            progress: Progress::Nothing,
            first: None,
            put: BTreeSet::new(),
            next: 0,
            sent: 0,
            resumed: 0,
        };
        // Before it is refused: an upload that was killed may have left parts, or be complete.
        session.take_record();
        if session.is_refused() && !matches!(session.progress, Progress::Completed) {
            return Err(RemoteError::Exists);
        }
        Ok(session)
    }

    /// Fails if an upload would, because of what is there.
    pub(super) fn check_target(store: Store, options: &UploadOptions) -> Result<(), RemoteError> {
        let shared = Arc::new(Shared::new(store, options.store.clone()));
        let Some(seen) = run(&shared, |shared| async move { shared.look().await })? else { return Ok(()) };
        let identity = shared.store.identity().unwrap_or_default();
        let record = options.records.as_ref().and_then(|folder| Record::find(folder, &identity).ok()?);
        let may_be_ours = record.is_some_and(|(_, (begun, _))| seen.is_of(&begun.mark));
        if options.existing == Existing::Refuse && !may_be_ours { Err(RemoteError::Exists) } else { Ok(()) }
    }

    /// Whether an object is there that must not be replaced.
    fn is_refused(&self) -> bool {
        self.seen.is_some() && self.options.existing == Existing::Refuse
    }

    /// Continues an earlier upload if it is of such an object, or aborts it. Its record goes when the store has no
    /// parts of it any more.
    fn take_record(&mut self) {
        let Some(folder) = &self.records else { return };
        let (record, (begun, parts)) = match Record::find(folder, &self.identity) {
            Ok(Some(found)) => found,
            Ok(None) => return,
            Err(error) => {
                tracing::warn!(%error, "{NO_RECORD}");
                self.records = None;
                return;
            }
        };
        let is_same = begun.length == self.length && begun.part_size == self.part_size;
        let is_completed = self.seen.as_ref().is_some_and(|seen| seen.is_of(&begun.mark));
        if is_completed && !is_same {
            record.remove();
        } else if is_completed {
            (self.record, self.resumable, self.progress) = (Some(record), parts, Progress::Completed);
        } else if is_same && !self.is_refused() {
            let progress = Progress::Parts { begun, is_resumed: true };
            (self.record, self.resumable, self.progress) = (Some(record), parts, progress);
        } else if self.abort(&begun.id) {
            record.remove();
        } else {
            // It stays, and this upload has none.
            self.records = None;
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
        self.put_at(self.next, part, None)
    }

    /// Sends a part, whose digest may be known. One that was sent before is replaced by it.
    pub(super) fn put_at(&mut self, index: usize, part: Vec<u8>, known: Option<String>) -> Result<(), RemoteError> {
        let length = part.len() as u64;
        let end = (index as u64).saturating_mul(self.part_size).saturating_add(length);
        if part.is_empty() || length > self.part_size || end > self.length {
            return Err(RemoteError::Settings("a part has another length than announced".to_owned()));
        }
        if !self.put.insert(index) {
            // The store keeps the one that comes last.
            drop(self.wait(|state| state.in_flight == 0));
        }
        self.check()?;
        let is_only = index == 0 && self.next <= 1 && (length < self.part_size || end >= self.length);
        self.sent = self.sent.max(end);
        self.next = self.next.max(index + 1);
        match self.progress {
            Progress::Completed => self.compare(index, &part),
            Progress::Nothing if is_only => {
                self.first = Some(part);
                Ok(())
            }
            _ => self.send(index, part, known),
        }
    }

    /// Compares a part with that of the object which an earlier upload has made.
    fn compare(&mut self, index: usize, part: &[u8]) -> Result<(), RemoteError> {
        if self.resumable.get(&index).is_some_and(|known| known.digest == digest(part)) {
            self.resumed += 1;
            return Ok(());
        }
        // That upload has ended, and this is another object.
        if let Some(record) = self.record.take() {
            record.remove();
        }
        Err(if self.is_refused() { RemoteError::Exists } else { RemoteError::UnknownUpload })
    }

    /// Fails if an earlier part has failed, or nobody wants the upload any more.
    pub(super) fn check(&mut self) -> Result<(), RemoteError> {
        let is_cancelled = self.is_cancelled();
        let (sent, error) = {
            let mut state = self.shared.state.lock();
            if is_cancelled {
                state.error.get_or_insert(RemoteError::Cancelled { is_kept: self.record.is_some() });
            }
            (std::mem::take(&mut state.sent), state.error.clone())
        };
        self.note(&sent);
        match error {
            Some(error) => Err(self.of_resumed(error)),
            None => Ok(()),
        }
    }

    fn is_cancelled(&self) -> bool {
        self.options.cancelled.load(Ordering::Relaxed)
    }

    /// Waits until it is so, or the upload has failed or is cancelled.
    fn wait(&self, is_so: impl Fn(&State) -> bool) -> MutexGuard<'_, State> {
        let mut state = self.shared.state.lock();
        while !is_so(&state) && state.error.is_none() && !self.is_cancelled() {
            self.shared.changed.wait_for(&mut state, LOOK);
        }
        state
    }

    /// The error of an upload that may be continued: if the store does not know it any more it is begun again. No other
    /// refusal says that: credentials may be wrong for a moment.
    fn of_resumed(&self, error: RemoteError) -> RemoteError {
        let is_resumed = matches!(self.progress, Progress::Parts { is_resumed: true, .. });
        match error {
            RemoteError::NotFound(code) if is_resumed && code == "NoSuchUpload" => RemoteError::UnknownUpload,
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

    fn send(&mut self, index: usize, part: Vec<u8>, known: Option<String>) -> Result<(), RemoteError> {
        let id = self.upload_id()?;
        let digest = self.record.as_ref().map(|_| known.unwrap_or_else(|| digest(&part)));
        if let Some(digest) = &digest
            && let Some(known) = self.resumable.get(&index).filter(|known| known.digest == *digest)
        {
            self.shared.state.lock().ids.insert(index, known.id.clone());
            self.resumed += 1;
            return Ok(());
        }
        // The store has another part there from now on.
        self.resumable.remove(&index);
        let streams = self.options.streams.clamp(1, 64);
        self.wait(|state| state.in_flight < streams).in_flight += 1;
        // After the wait: what has come meanwhile.
        let flight = Flight(Arc::clone(&self.shared));
        self.check()?;
        let part = Bytes::from(part);
        let handle = runtime::handle().map_err(|error| local(&error))?;
        handle.spawn(async move {
            let shared = &flight.0;
            let mut stopped = shared.is_stopped.subscribe();
            let sent = tokio::select! {
                sent = shared.put_part(&id, index, &part) => sent,
                _ = stopped.wait_for(|is_stopped| *is_stopped) => Err(RemoteError::Cancelled { is_kept: false }),
            };
            match sent {
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
        if let Progress::Parts { begun, .. } = &self.progress {
            return Ok(begun.id.clone());
        }
        let mark = mark().map_err(|error| local(&error))?;
        let id = run(&self.shared, |shared| {
            let mark = mark.clone();
            async move { shared.create(&mark).await }
        })?;
        let begun = Begun { id: id.clone(), mark, part_size: self.part_size, length: self.length };
        if let Some(folder) = &self.records {
            match Record::create(folder, &self.identity, &begun) {
                Ok(record) => self.record = record,
                Err(error) => tracing::warn!(%error, "{NO_RECORD}"),
            }
        }
        self.progress = Progress::Parts { begun, is_resumed: false };
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
        drop(self.wait(|state| state.in_flight == 0));
        self.check()?;
        let (shared, seen, length) = (Arc::clone(&self.shared), self.seen.clone(), self.sent);
        let (e_tag, is_conditional) = match &self.progress {
            Progress::Completed if length == self.length => (seen.and_then(|seen| seen.e_tag), true),
            Progress::Completed => return Err(RemoteError::Local("parts of the upload are missing".to_owned())),
            Progress::Nothing => {
                let bytes = Bytes::from(self.first.take().unwrap_or_default());
                let mark = mark().map_err(|error| local(&error))?;
                (run(&shared, |shared| async move { shared.put(bytes, seen, &mark).await })?, true)
            }
            Progress::Parts { begun, .. } => {
                let ids = std::mem::take(&mut shared.state.lock().ids);
                if ids.len() != self.next || ids.keys().copied().ne(0..self.next) {
                    return Err(RemoteError::Local("parts of the upload are missing".to_owned()));
                }
                let parts = ids.into_values().map(|content_id| PartId { content_id }).collect();
                let begun = Begun { length, ..begun.clone() };
                let completed = run(&shared, |shared| async move { shared.complete(&begun, parts, seen).await });
                let e_tag = completed.map_err(|error| self.of_resumed(error))?;
                (e_tag, shared.store.has_conditional_completion())
            }
        };
        self.progress = Progress::Nothing;
        if let Some(record) = self.record.take() {
            record.remove();
        }
        Ok(Uploaded { length, e_tag, is_conditional, counters: self.counters() })
    }

    /// Aborts an upload in parts. Returns whether the store has nothing of it any more.
    fn abort(&self, id: &str) -> bool {
        let id = id.to_owned();
        let outcome = run(&self.shared, |shared| async move { shared.abort(&id).await });
        if let Err(error) = &outcome {
            tracing::warn!(%error, "the parts of an upload that was given up remain in the store");
        }
        outcome.is_ok()
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        let is_cancelled = self.is_cancelled();
        let Progress::Parts { begun, .. } = std::mem::replace(&mut self.progress, Progress::Nothing) else { return };
        // The parts in flight end first, so that none comes after the abort.
        let (error, sent) = {
            let until = Instant::now() + LAST_PARTS;
            let mut state = self.shared.state.lock();
            state.error.get_or_insert(RemoteError::Cancelled { is_kept: false });
            while state.in_flight > 0 {
                if self.shared.changed.wait_until(&mut state, until).timed_out() {
                    self.shared.is_stopped.send_replace(true);
                    self.shared.changed.wait_for(&mut state, LOOK);
                }
            }
            (state.error.clone(), std::mem::take(&mut state.sent))
        };
        self.note(&sent);
        if self.record.is_some() && (is_cancelled || error.as_ref().is_some_and(may_be_continued)) {
            return;
        }
        // Without that its record stays: the next upload continues it, or aborts it.
        if self.abort(&begun.id)
            && let Some(record) = &self.record
        {
            record.remove();
        }
    }
}

/// Whether an upload that has failed so may be continued: the store could not be reached, or gave no access. Then it
/// cannot be aborted, either.
fn may_be_continued(error: &RemoteError) -> bool {
    matches!(
        error,
        RemoteError::Spent { .. }
            | RemoteError::Denied { .. }
            | RemoteError::Credentials(_)
            | RemoteError::CredentialService(_)
            | RemoteError::Connect { .. }
            | RemoteError::Untrusted { .. }
            | RemoteError::Broken(_)
            | RemoteError::Clock(_)
            | RemoteError::Silent(_)
    )
}

const NO_RECORD: &str = "the upload cannot be continued if it is killed: no record";

/// A part in flight.
struct Flight(Arc<Shared>);

impl Drop for Flight {
    fn drop(&mut self) {
        self.0.state.lock().in_flight -= 1;
        self.0.changed.notify_all();
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
