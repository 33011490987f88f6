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
            return Ok(Self::File(UnnamedFile::create(name, replace)?));
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
        let packed = until_cancelled(handle, |cancelled| {
            // Another key makes other bytes.
            let is_repeatable = options.encryption.is_none();
            let followed = staging.follow(&url, packed_length_most(snapshot), is_repeatable, Arc::clone(cancelled))?;
            let name = url.to_string();
            let object = ObjectFile { file: staging.file(), url: Path::new(&name) };
            let is_kept = match pack_object(snapshot, object, base, options, handle) {
                Ok(packed) => match followed.finish()? {
                    Sent::Whole { .. } => return Ok(packed),
                    Sent::Cancelled { is_kept } => is_kept,
                    Sent::Forgotten => false,
                },
                Err(error @ PackError::Cancelled(_)) => {
                    cancelled.store(true, Ordering::Relaxed);
                    if !followed.give_up() {
                        return Err(error.into());
                    }
                    true
                }
                Err(error) => return Err(error.into()),
            };
            let parts = if is_kept { "; the store has parts of it until it is made again" } else { "" };
            bail!("{url}: cancelled; no object was made{parts}")
        })?;
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

/// How often a job is asked whether it was cancelled.
const TICK: Duration = Duration::from_millis(50);

/// Does work that ends when the flag is set, which says that its job was cancelled.
fn until_cancelled<T>(handle: &Handle, work: impl FnOnce(&Arc<AtomicBool>) -> anyhow::Result<T>) -> anyhow::Result<T> {
    let (cancelled, is_over) = (Arc::new(AtomicBool::new(false)), AtomicBool::new(false));
    let look = || {
        while !is_over.load(Ordering::Relaxed) {
            if handle.control.stop_requested() == Some(Stop::Cancel) {
                cancelled.store(true, Ordering::Relaxed);
            }
            thread::sleep(TICK);
        }
    };
    thread::scope(|scope| {
        thread::Builder::new().name("cancelled?".into()).spawn_scoped(scope, look).context("no thread")?;
        let _over = Over(&is_over);
        work(&cancelled)
    })
}

/// Says that work is over, also if it panics: the thread that looks after it would be waited for.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}
