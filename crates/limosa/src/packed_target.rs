//! The place of a new packed snapshot: a file, or an object of a store.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, bail};
use limosa_migrate::Handle;
use limosa_migrate::control::Stop;
use limosa_pack::{Base, ObjectFile, PackError, PackOptions, Packed, pack, pack_object, packed_length_most};
use limosa_snapshot::{Snapshot, UnnamedFile};

use crate::packed;
use crate::remote::{self, Sent, Staging, Url};

/// The place of a new packed snapshot.
pub(crate) enum PackedTarget {
    File(UnnamedFile),
    /// An object, and the file that becomes it.
    Object(Url, Staging),
}

impl PackedTarget {
    /// Prepares it, so that what can be refused is before the work.
    ///
    /// # Errors
    /// It exists, and must not be replaced; it cannot be made.
    pub(crate) fn prepare(name: &Path, replace: bool) -> anyhow::Result<Self> {
        let Some(url) = remote::target(name.as_os_str())? else {
            return Ok(Self::File(packed::new_file(name, replace)?));
        };
        if replace {
            bail!("{url}: an object is not replaced, because others may stand on it; omit --force");
        }
        remote::check(&url)?;
        Ok(Self::Object(url, Staging::new()?))
    }

    /// Packs a snapshot into it.
    ///
    /// # Errors
    /// As [`pack`]; the store's; its base was replaced before it was there.
    pub(crate) fn pack(
        self,
        snapshot: &Snapshot,
        base: Option<&Base>,
        options: &PackOptions,
        handle: &Handle,
    ) -> anyhow::Result<Packed> {
        let (url, staging) = match self {
            Self::File(pending) => return Ok(pack(snapshot, pending, base, options, handle)?),
            Self::Object(url, staging) => (url, staging),
        };
        let packed = pack_and_upload(snapshot, (&staging, &url), base, options, handle)?;
        // Objects have no locks: its base may be gone.
        let found = packed::open(&packed.path);
        let found =
            found.with_context(|| format!("{url}: is written, and was not opened again: limosa inspect {url}"))?;
        if found.id() != snapshot.id() {
            bail!("{url}: another object has its name now");
        }
        Ok(packed)
    }
}

/// Packs a snapshot into a file, and uploads that: meanwhile, unless it has a base. The clusters of an increment are
/// small, so tables that are written last are all over its file.
fn pack_and_upload(
    snapshot: &Snapshot,
    (staging, url): (&Staging, &Url),
    base: Option<&Base>,
    options: &PackOptions,
    handle: &Handle,
) -> anyhow::Result<Packed> {
    let cancelled = Arc::new(AtomicBool::new(false));
    // Another key makes other bytes.
    let is_repeatable = options.encryption.is_none();
    let follow = |most| staging.follow(url, most, is_repeatable, Arc::clone(&cancelled));
    let name = url.to_string();
    let pack =
        || pack_object(snapshot, ObjectFile { file: staging.file(), url: Path::new(&name) }, base, options, handle);
    let note_cancel = || {
        if handle.control.stop_requested() == Some(Stop::Cancel) {
            cancelled.store(true, Ordering::Relaxed);
        }
    };
    let (packed, sent) = if base.is_some() {
        let packed = pack().map_err(|error| remote::of_staging(error.into()))?;
        let upload = || follow(staging.file().metadata()?.len())?.finish();
        (Some(packed), watched(note_cancel, upload)?)
    } else {
        let followed = follow(packed_length_most(snapshot))?;
        let note = || {
            note_cancel();
            if followed.has_failed() {
                handle.control.stop(Stop::Cancel);
            }
        };
        match watched(note, || Ok(pack()))? {
            Ok(packed) => (Some(packed), watched(note_cancel, || followed.finish())?),
            Err(PackError::Cancelled(_)) if followed.has_failed() => (None, followed.finish()?),
            Err(error) => {
                note_cancel();
                let is_kept = followed.give_up();
                if !is_kept {
                    return Err(remote::of_staging(error.into()));
                }
                (None, Sent::Cancelled { is_kept })
            }
        }
    };
    match (packed, sent) {
        (Some(packed), Sent::Whole { .. }) => Ok(packed),
        (_, Sent::Forgotten) => bail!("{url}: the store has forgotten the upload; no object was made"),
        (_, Sent::Cancelled { is_kept: true }) => {
            bail!("{url}: cancelled; no object was made; the store has parts of it until it is made again")
        }
        _ => bail!("{url}: cancelled; no object was made"),
    }
}

/// How often a look is taken during work.
const TICK: Duration = Duration::from_millis(50);

/// Does work, and takes looks meanwhile.
fn watched<T>(look: impl Fn() + Sync, work: impl FnOnce() -> anyhow::Result<T>) -> anyhow::Result<T> {
    let is_over = AtomicBool::new(false);
    let looks = || {
        while !is_over.load(Ordering::Relaxed) {
            look();
            thread::sleep(TICK);
        }
    };
    thread::scope(|scope| {
        thread::Builder::new().name("upload-watch".into()).spawn_scoped(scope, looks).context("no thread")?;
        let _over = Over(&is_over);
        work()
    })
}

/// Says that work is over, also if it panics: the thread that looks after it would be waited for.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}
