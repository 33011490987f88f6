//! The steps of an upload.

use std::collections::{BTreeMap, HashMap};
use std::future::Future;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use object_store::multipart::PartId;
use parking_lot::MutexGuard;
use tokio::time::sleep;

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
    /// The lengths of the parts that were given to this upload.
    lengths: BTreeMap<usize, u64>,
    resumed: u64,
}

/// The state of the upload in the store.
enum Progress {
    /// Nothing is sent yet: there is at most one part.
    Nothing,
    /// Parts are sent.
    Parts(Begun),
    /// An earlier upload has made the object, and was killed before it removed its record.
    Completed,
}

impl Session {
    pub(super) fn begin(store: Store, length: u64, options: &UploadOptions) -> Result<Self, RemoteError> {
        let part_size = plan::part_size(length, options.part_size)?;
        let shared = Arc::new(Shared::new(store, options.store.clone()));
        let seen = run_until(&shared, &options.cancelled, |shared| async move { shared.look().await })?;
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
            lengths: BTreeMap::new(),
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
            let progress = Progress::Parts(begun);
            (self.record, self.resumable, self.progress) = (Some(record), parts, progress);
        } else if self.abort(&begun.id) {
            record.remove();
        } else {
            // It stays, and this upload has none.
            self.records = None;
        }
    }

    /// Returns what ends the upload from another thread, at its next step.
    pub(super) fn stopper(&self) -> Stopper {
        Stopper(Arc::clone(&self.shared))
    }

    pub(super) fn part_size(&self) -> u64 {
        self.part_size
    }

    pub(super) fn counters(&self) -> UploadCounters {
        UploadCounters {
            requests: self.shared.requests.get(),
            bytes: self.shared.bytes.get(),
            parts: self.lengths.len() as u64,
            resumed: self.resumed,
            retries: self.shared.retries.get(),
        }
    }

    pub(super) fn put(&mut self, part: Vec<u8>) -> Result<(), RemoteError> {
        self.put_at(self.lengths.len(), part, None)
    }

    /// Sends a part, whose digest may be known. One that was sent before is replaced by it.
    pub(super) fn put_at(&mut self, index: usize, part: Vec<u8>, known: Option<String>) -> Result<(), RemoteError> {
        let length = part.len() as u64;
        let end = (index as u64).saturating_mul(self.part_size).saturating_add(length);
        if part.is_empty() || length > self.part_size || end > self.length {
            return Err(RemoteError::Settings("a part has another length than announced".to_owned()));
        }
        // The store keeps the one that comes last.
        drop(self.wait(|state| !state.in_flight.contains(&index)));
        self.check()?;
        self.lengths.insert(index, length);
        let is_short = length < self.part_size || end >= self.length;
        let is_only = index == 0 && self.lengths.len() == 1 && is_short;
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
        Err(self.completed_by_another())
    }

    /// The error if the object that an earlier upload has made is another one. That upload has ended.
    fn completed_by_another(&mut self) -> RemoteError {
        if let Some(record) = self.record.take() {
            record.remove();
        }
        if self.is_refused() { RemoteError::Exists } else { RemoteError::UnknownUpload }
    }

    /// Whether an earlier upload has made the object: parts are only compared with those of it.
    pub(super) fn is_completed(&self) -> bool {
        matches!(self.progress, Progress::Completed)
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
            Some(error) => Err(Self::of_parts(error)),
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

    /// The error of an upload in parts: if the store does not know it any more, as after a day by a rule of the bucket,
    /// it is begun again. No other refusal says that: credentials may be wrong for a moment.
    fn of_parts(error: RemoteError) -> RemoteError {
        match error {
            RemoteError::NotFound(code) if code == "NoSuchUpload" => RemoteError::UnknownUpload,
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
        // The store has another part there from now on, also if this process is killed before it knows that.
        let was_there = self.shared.state.lock().ids.remove(&index).is_some();
        if self.resumable.remove(&index).is_some() || was_there {
            self.note(&[Part::taken_back(index)]);
        }
        let streams = self.options.streams.clamp(1, 64);
        self.wait(|state| state.in_flight.len() < streams).in_flight.insert(index);
        // After the wait: what has come meanwhile.
        let flight = Flight(Arc::clone(&self.shared), index);
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
        if let Progress::Parts(begun) = &self.progress {
            return Ok(begun.id.clone());
        }
        let mark = mark().map_err(|error| local(&error))?;
        let id = run_until(&self.shared, &self.options.cancelled, |shared| {
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
        self.progress = Progress::Parts(begun);
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
        drop(self.wait(|state| state.in_flight.is_empty()));
        self.check()?;
        let (shared, seen) = (Arc::clone(&self.shared), self.seen.clone());
        let (parts, length) = (self.lengths.len(), self.lengths.values().sum::<u64>());
        let (e_tag, is_conditional) = match &self.progress {
            Progress::Completed => match seen {
                // All of its parts were compared.
                Some(seen) if seen.length == length && self.resumable.len() == parts => (seen.e_tag, true),
                _ => return Err(self.completed_by_another()),
            },
            Progress::Nothing => {
                let bytes = Bytes::from(self.first.take().unwrap_or_default());
                let mark = mark().map_err(|error| local(&error))?;
                (run(&shared, |shared| async move { shared.put(bytes, seen, &mark).await })?, true)
            }
            Progress::Parts(begun) => {
                let ids = std::mem::take(&mut shared.state.lock().ids);
                if ids.keys().copied().ne(0..parts) {
                    return Err(RemoteError::Local("parts of the upload are missing".to_owned()));
                }
                let parts = ids.into_values().map(|content_id| PartId { content_id }).collect();
                let begun = Begun { length, ..begun.clone() };
                let completed = run(&shared, |shared| async move { shared.complete(&begun, parts, seen).await });
                let e_tag = completed.map_err(Self::of_parts)?;
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
        let Progress::Parts(begun) = std::mem::replace(&mut self.progress, Progress::Nothing) else { return };
        // The parts in flight end first, so that none comes after the abort.
        let (error, sent) = {
            let until = Instant::now() + LAST_PARTS;
            let mut state = self.shared.state.lock();
            state.error.get_or_insert(RemoteError::Cancelled { is_kept: false });
            while !state.in_flight.is_empty() {
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

/// Ends an upload.
pub(super) struct Stopper(Arc<Shared>);

impl Stopper {
    /// Ends the steps that may be ended, and lets no further one begin.
    pub(super) fn stop(&self) {
        self.0.state.lock().error.get_or_insert(RemoteError::Cancelled { is_kept: false });
        self.0.is_stopped.send_replace(true);
        self.0.changed.notify_all();
    }
}

/// A part in flight.
struct Flight(Arc<Shared>, usize);

impl Drop for Flight {
    fn drop(&mut self) {
        self.0.state.lock().in_flight.remove(&self.1);
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

/// As [`run`], but it ends when the upload is cancelled or given up: nothing has to be taken back yet.
fn run_until<T: Send + 'static, F: Future<Output = Result<T, RemoteError>> + Send + 'static>(
    shared: &Arc<Shared>,
    cancelled: &Arc<AtomicBool>,
    step: impl FnOnce(Arc<Shared>) -> F,
) -> Result<T, RemoteError> {
    let (mut stopped, cancelled) = (shared.is_stopped.subscribe(), Arc::clone(cancelled));
    let is_cancelled = async move {
        while !cancelled.load(Ordering::Relaxed) {
            sleep(LOOK).await;
        }
    };
    run(shared, |shared| {
        let step = step(shared);
        async move {
            tokio::select! {
                done = step => done,
                () = is_cancelled => Err(RemoteError::Cancelled { is_kept: false }),
                _ = stopped.wait_for(|is_stopped| *is_stopped) => Err(RemoteError::Cancelled { is_kept: false }),
            }
        }
    })
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
