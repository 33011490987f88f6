//! The upload of a file that is still written.
//!
//! **Law: the object is the file as its writer has left it.** A part is sent once the file has grown past it, because
//! most of what a file has is written once and in order. A part that was changed after that, as tables and headers are,
//! is found by its digest at the end, and sent again.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::Duration;
use std::{fmt, io};

use limosa_page::to_usize;
use limosa_storage::{Operation, Storage, StorageError};

use super::record::digest;
use super::session::Stopper;
use super::{Upload, UploadOptions, Uploaded, is_unknown_upload, read_part, upload};
use crate::url::ObjectUrl;

/// How often the file is asked for its length.
const LOOK: Duration = Duration::from_millis(20);

/// Bytes at the end of the file that its writers may be at work on, and may cut off again. That nothing in front of
/// them is changed is likely and not needed.
const AT_WORK: u64 = 16 << 20;

/// A file that is uploaded while it is written. If it is dropped the upload ends as one that has failed.
pub struct FollowedFile {
    /// Gets a message when the file is written; closed without one if the file is of no use.
    written: Option<Sender<()>>,
    thread: Option<JoinHandle<Result<Uploaded, StorageError>>>,
    stopper: Stopper,
    cancelled: Arc<AtomicBool>,
    name: Arc<str>,
}

/// Uploads a file of at most `most` bytes that grows meanwhile, in a thread of its own.
///
/// # Errors
/// As [`Upload::begin`]; no thread.
pub fn follow(
    file: Arc<dyn Storage>,
    url: &ObjectUrl,
    most: u64,
    options: &UploadOptions,
) -> Result<FollowedFile, StorageError> {
    let name = Arc::clone(file.name());
    let (written, is_written) = channel();
    let upload_in_parts = Upload::begin(url, most, options)?;
    let (stopper, cancelled) = (upload_in_parts.stopper(), Arc::clone(&options.cancelled));
    let following = Following {
        upload: upload_in_parts,
        file: Arc::clone(&file),
        most,
        sent: BTreeMap::new(),
        written: is_written,
        is_written: false,
    };
    let (url, options) = (url.clone(), options.clone());
    let run = move || match following.run()? {
        Some(uploaded) => Ok(uploaded),
        None => upload(&file, &url, &options),
    };
    let thread = thread::Builder::new().name("upload".into()).spawn(run);
    let thread = thread.map_err(|error| StorageError::for_storage(Operation::Create, &name, error))?;
    Ok(FollowedFile { written: Some(written), thread: Some(thread), stopper, cancelled, name })
}

impl FollowedFile {
    /// Whether the upload has failed already, so that the file need not be written. [`finish`](Self::finish) returns
    /// why.
    #[must_use]
    pub fn has_failed(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Sends the rest of the file, which is as it will be, and makes the object visible.
    ///
    /// # Errors
    /// As [`upload`]; those of a part that was sent meanwhile.
    pub fn finish(mut self) -> Result<Uploaded, StorageError> {
        if let Some(written) = self.written.take() {
            // A thread that has failed receives nothing.
            let _ = written.send(());
        }
        self.join()
    }

    /// Ends the upload of a file that is of no use: as one that is cancelled if it was, else as one that has failed.
    /// Returns why it has ended.
    #[must_use]
    pub fn give_up(mut self) -> StorageError {
        self.stop();
        self.join().err().unwrap_or_else(|| self.ended("its upload has ended"))
    }

    fn stop(&mut self) {
        self.written = None;
        // One that is cancelled ends by that, and may stay to be continued.
        if !self.cancelled.load(Ordering::Relaxed) {
            self.stopper.stop();
        }
    }

    fn join(&mut self) -> Result<Uploaded, StorageError> {
        let outcome = self.thread.take().and_then(|thread| thread.join().ok());
        outcome.unwrap_or_else(|| Err(self.ended("its upload has ended by a panic")))
    }

    fn ended(&self, why: &'static str) -> StorageError {
        StorageError::for_storage(Operation::Write, &self.name, io::Error::other(why))
    }
}

impl fmt::Debug for FollowedFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FollowedFile").field("name", &self.name).finish_non_exhaustive()
    }
}

impl Drop for FollowedFile {
    fn drop(&mut self) {
        self.stop();
        if let Some(thread) = self.thread.take() {
            // How the upload of a file that is of no use ends is of no use.
            let _ = thread.join();
        }
    }
}

/// The upload, and what it has sent.
struct Following {
    upload: Upload,
    file: Arc<dyn Storage>,
    most: u64,
    /// The digests of parts.
    sent: BTreeMap<usize, String>,
    /// The message that the file is written.
    written: Receiver<()>,
    is_written: bool,
}

impl Following {
    /// Uploads the file. `None`: it is written, and has to be uploaded from its beginning.
    fn run(mut self) -> Result<Option<Uploaded>, StorageError> {
        let outcome = match self.send_all() {
            Ok(true) => self.upload.complete().map(Some),
            Ok(false) => Ok(None),
            Err(error) => Err(error),
        };
        match outcome {
            Err(error) if is_unknown_upload(&error) => {
                while !self.is_written(LOOK)? {}
                Ok(None)
            }
            outcome => outcome,
        }
    }

    /// Sends parts until the file is written, and then what was not sent as it is then. False if the file is longer
    /// than parts were planned for, or shorter than it was.
    fn send_all(&mut self) -> Result<bool, StorageError> {
        // The first part waits: headers are written last, and a short file is sent with one request.
        let (mut next, mut pause) = (1, Duration::ZERO);
        while !self.is_written(pause)? {
            let end = self.upload.part_size().saturating_mul(next as u64 + 1);
            // Those of an object that is there already are compared when they are as they will be.
            let is_early = !self.upload.is_completed() && end.saturating_add(AT_WORK) <= self.file.length()?;
            pause = if is_early {
                let part = self.read(next, end)?;
                let digest = digest(&part);
                self.send(next, part, digest)?;
                next += 1;
                Duration::ZERO
            } else {
                LOOK
            };
        }
        let length = self.file.length()?;
        let parts = to_usize(length.div_ceil(self.upload.part_size()));
        if length > self.most || self.sent.keys().next_back().is_some_and(|last| *last >= parts) {
            return Ok(false);
        }
        for index in (1..parts).chain((parts > 0).then_some(0)) {
            let part = self.read(index, length)?;
            let digest = digest(&part);
            if self.sent.get(&index) != Some(&digest) {
                self.send(index, part, digest)?;
            }
        }
        Ok(true)
    }

    /// Waits until the file is written, but no longer than this. Fails if it is of no use.
    fn is_written(&mut self, pause: Duration) -> Result<bool, StorageError> {
        if !self.is_written {
            match self.written.recv_timeout(pause) {
                Ok(()) => self.is_written = true,
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => {
                    self.upload.check()?;
                    let why = io::Error::other("its writer has given it up");
                    return Err(StorageError::for_storage(Operation::Read, self.file.name(), why));
                }
            }
        }
        Ok(self.is_written)
    }

    /// Reads a part of the file, which has this length.
    fn read(&self, index: usize, length: u64) -> Result<Vec<u8>, StorageError> {
        read_part(&*self.file, self.upload.part_size(), index, length)
    }

    fn send(&mut self, index: usize, part: Vec<u8>, digest: String) -> Result<(), StorageError> {
        self.upload.put_at(index, part, digest.clone())?;
        self.sent.insert(index, digest);
        Ok(())
    }
}
