//! The logs of epochs: files beside images whose VMs are protected.
//!
//! Law: an image with a log is served again only when the log was brought to it; and unless protection had ended, only
//! when the user says that its VM is off. That VM knows a later disk, which is gone.

use std::fs::{self, File};
use std::io::ErrorKind;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::UNIX_EPOCH;

use anyhow::Context as _;
use limosa_console::{anyhow_error_line, say};
use limosa_export::Export;
use limosa_image::Format;
use limosa_image::chain::Image;
use limosa_image::epochs::{EpochError, EpochOptions, Recovered, examine, recover};
use limosa_image::reference::Reference;
use limosa_page::to_nanos;
use limosa_storage::{FileOptions, FileStorage, Storage, block_on, sync_folder};
use rustix::fs::{OFlags, unlink};
use serde_json::{Value, json};

use super::beside::log_of;
use super::dropped;
use super::wanted::{Recovery, Wanted};

/// The kernel's identifier of the time since the machine was booted.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// Identifies the time since the machine was booted; 0: it is unknown.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Boot([u64; 2]);

impl Boot {
    /// Asks the kernel, before this process is confined.
    pub(super) fn of_now() -> Self {
        let digits: String = fs::read_to_string(BOOT_ID).unwrap_or_default().replace('-', "");
        let word = |part: std::ops::Range<usize>| u64::from_str_radix(digits.get(part)?, 16).ok();
        Self(word(0..16).zip(word(16..32)).map_or([0; 2], |(first, second)| [first, second]))
    }

    pub(super) fn is_known(self) -> bool {
        self.0 != [0; 2]
    }

    /// Returns it for a record.
    pub(super) fn value(self) -> Value {
        json!(self.0)
    }
}

/// The log of an image.
#[derive(Debug)]
pub(super) struct EpochLog {
    image: PathBuf,
    path: PathBuf,
}

impl EpochLog {
    /// Returns the log of an export's image, for protection.
    ///
    /// # Errors
    /// The image cannot be protected.
    pub(super) fn for_export(export: &Export, wanted: &Wanted) -> anyhow::Result<Self> {
        let name = &wanted.source.name;
        anyhow::ensure!(!export.is_read_only(), "{name}: it is served read-only, and cannot be protected");
        anyhow::ensure!(wanted.compress.is_none(), "{name}: it is served with --compress, and cannot be protected");
        // Its first sector must not look like another format, which is found out only when it is written.
        let is_guessed = !wanted.source.image_opts && wanted.source.format.is_none();
        let is_raw = export.disk().format() == Format::Raw.name();
        anyhow::ensure!(
            !is_guessed || !is_raw,
            "{name}: its format was probed as raw; serve it with -f raw to protect it"
        );
        let log = Self::of(wanted)?;
        log.with_context(|| format!("{name}: only an image in a file that is given by its path can be protected"))
    }

    /// The log of an image, whether it exists or not; `None`: the image is in no file of its own.
    fn of(wanted: &Wanted) -> anyhow::Result<Option<Self>> {
        let source = &wanted.source;
        if source.image_opts {
            return Ok(None);
        }
        let found = log_of(&Reference::from_name(&source.name)?)?;
        Ok(found.map(|(image, path)| Self { image, path }))
    }

    /// Returns the epoch that a drop has left its image at, which was not written since.
    pub(super) fn proved(wanted: &Wanted, boot: Boot) -> Option<Recovery> {
        dropped::read(&Self::of(wanted).ok()??.image, boot)
    }

    /// Keeps what was proved of its image before that was opened, unless opening it has brought writes to it.
    fn confirm(&self, wanted: &Wanted, image: &Image, proved: Option<Recovery>, boot: Boot) -> Option<Recovery> {
        let is_unchanged = image.replayed() == 0 && image.repair_report().is_none();
        if wanted.is_read_only() {
            // A journal may have writes that the image has not.
            return proved.filter(|_| is_unchanged && wanted.journals.is_none());
        }
        let proved = proved.filter(|_| is_unchanged);
        match proved {
            Some(recovery) => {
                if dropped::read(&self.image, boot).is_none() {
                    self.record(recovery, boot);
                }
            }
            None => self.forget(),
        }
        proved
    }

    /// Records the epoch that its image is as of.
    fn record(&self, recovery: Recovery, boot: Boot) {
        if let Err(error) = dropped::write(&self.image, recovery, boot) {
            let error = anyhow_error_line(&error);
            say!("limosa: {error}: after a restart it is not known that this is the disk of a checkpoint");
            self.forget();
        }
    }

    fn forget(&self) {
        if let Err(error) = dropped::remove(&self.image) {
            tracing::warn!("{}", anyhow_error_line(&error));
        }
    }

    /// Creates it, durably: only its owner can read it.
    ///
    /// # Errors
    /// It exists, or the kernel's.
    pub(super) fn create(&self) -> anyhow::Result<Arc<dyn Storage>> {
        let path = self.path.display();
        self.forget();
        let mut file = File::options();
        file.read(true).write(true).create_new(true).mode(0o600);
        let file = file.open(&self.path).with_context(|| path.to_string())?;
        let storage = FileStorage::from_fd(file.into(), &path.to_string(), &FileOptions::default())?;
        sync_folder(&self.path).context("its folder")?;
        Ok(storage)
    }

    /// Removes it: the image has all that is in it.
    pub(super) fn remove(&self) -> anyhow::Result<()> {
        unlink(&self.path).with_context(|| format!("cannot remove {}", self.path.display()))?;
        sync_folder(&self.path).context("its folder")
    }

    /// Options of protection for its image.
    pub(super) fn options(&self, Boot(boot): Boot) -> anyhow::Result<EpochOptions> {
        let found = fs::metadata(&self.image).with_context(|| self.image.display().to_string())?;
        let created = found.created().ok().and_then(|created| created.duration_since(UNIX_EPOCH).ok());
        Ok(EpochOptions::default().boot(boot).file([found.ino(), created.map_or(0, to_nanos)]))
    }
}

/// Brings the log of an image to it, if there is one, and removes it. Returns the epoch that the image is as of, if
/// that is known: `proved` is what was [known](EpochLog::proved) before it was opened.
///
/// # Errors
/// The image is only read; its VM was protected, and is not said to be off; the log cannot be brought to it.
pub(super) fn bring(
    wanted: &Wanted,
    image: &Image,
    proved: Option<Recovery>,
    boot: Boot,
) -> anyhow::Result<Option<Recovery>> {
    let Some(log) = EpochLog::of(wanted)? else { return Ok(None) };
    let path = log.path.display();
    let mut file = File::options();
    file.read(true).write(!wanted.is_read_only()).custom_flags(OFlags::NOFOLLOW.bits().cast_signed());
    let file = match file.open(&log.path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(log.confirm(wanted, image, proved, boot)),
        opened => opened.with_context(|| path.to_string())?,
    };
    let name = &wanted.source.name;
    anyhow::ensure!(
        !wanted.is_read_only(),
        "{name}: {path} has what its VM wrote while it was protected; serve it without --read-only once"
    );
    let storage: Arc<dyn Storage> = FileStorage::from_fd(file.into(), &path.to_string(), &FileOptions::default())?;
    let options = log.options(boot)?;
    let Some(found) = block_on(examine(Arc::clone(&storage), &options))? else {
        log.remove()?;
        return Ok(None);
    };
    anyhow::ensure!(
        wanted.fenced,
        "{name}: it is as of epoch {} of a protected VM, and what that wrote later is gone; if the VM is off for \
         certain, serve it with --fenced",
        found.kept
    );
    let recovered = match block_on(recover(&image.as_disk(), storage, (&options, wanted.epoch))) {
        Err(undecided @ EpochError::Undecided { .. }) => anyhow::bail!("{undecided}; say it with --epoch"),
        other => other?,
    };
    let Recovered::Cut { epoch, .. } = recovered else {
        log.remove()?;
        return Ok(None);
    };
    let recovery = Recovery { log: found.log, epoch };
    // Before the log goes: a server that is killed in between leaves one of them.
    log.record(recovery, boot);
    log.remove()?;
    say!("limosa: {name}: it is as of epoch {epoch} of a protected VM");
    Ok(Some(recovery))
}
