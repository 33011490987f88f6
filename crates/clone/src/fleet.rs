//! Clones of one snapshot: what is the same for all of them is checked once, before anything is made.

use std::ffi::OsString;
use std::fs;
use std::num::NonZeroUsize;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::Child;
use std::thread;
use std::time::Duration;

use limosa_page::{PAGE_SIZE, error_with_causes};
use limosa_qemu::command_line::escaped;
use limosa_qemu::{
    BlockPlace, GuestClock, MappedCommandLine, RunChoice, SOCKET_PATH_MAX, check_snapshot_not_shared, is_same_file,
    name_memory_backend, rewrite_for_mapping,
};
use limosa_snapshot::{Snapshot, check_disks};

use crate::command_line::{CommandTemplate, OverlayPlan, Ownership, behind_overlays, check_outputs, plan};
use crate::error::CloneError;
use crate::home::clear_left_over;
use crate::overlay::{self, Backing};
use crate::record::{MONITOR, PoolPurpose, Record, SnapshotIdentity, name_of};

/// Options of [`Fleet::new`].
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct FleetOptions {
    /// Number of clones started at a time; `None`: the number of processors.
    pub jobs: Option<NonZeroUsize>,
    /// How overlays name the disks below them.
    pub backing: Backing,
    /// How the clones get their memory.
    pub memory: CloneMemory,
    /// The run state that the clones come up in.
    pub run: RunChoice,
    /// Whether the clocks of clones that run are set to the host's, through their guest agents.
    pub set_clock: bool,
}

/// How clones get their memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum CloneMemory {
    /// Mapped if the command line and the snapshot allow it, else copied.
    #[default]
    Auto,
    /// All of them map the snapshot.
    Mapped,
    /// Each gets a copy.
    Copied,
}

/// A clone that runs.
#[derive(Debug)]
#[non_exhaustive]
pub struct StartedClone {
    /// Its name, which is that of its directory.
    pub name: String,
    /// Its directory.
    pub folder: PathBuf,
    /// Its record.
    pub record: Record,
    /// The RAM blocks that it maps.
    pub mapped_blocks: Vec<String>,
    /// From the beginning until QEMU had its VM.
    pub time_to_loaded: Duration,
    /// From the beginning until QEMU reported the VM's final run state.
    pub time_to_running: Duration,
    /// Its run state then.
    pub state: String,
    /// Pages that were sent.
    pub sent_pages: u64,
    /// Its QEMU, which keeps running when this is dropped.
    pub child: Option<Child>,
    /// The clock of its guest, which is still being set; `None` if that was not asked for, or the VM does not run.
    pub clock: Option<GuestClock>,
}

/// A QEMU that waits in a pool for the next clone.
#[derive(Debug)]
#[non_exhaustive]
pub struct PooledClone {
    /// The clone's name, which is that of its directory.
    pub name: String,
    /// The clone's directory.
    pub folder: PathBuf,
    /// The clone's record.
    pub record: Record,
    /// The QEMU, which keeps running when this is dropped.
    pub child: Option<Child>,
}

/// A clone that was not started.
#[derive(Debug)]
#[non_exhaustive]
pub struct FailedClone {
    /// Its number.
    pub number: u64,
    /// Why.
    pub error: Box<CloneError>,
    /// Files that are left of it, because they do not belong to the clone or cannot be removed.
    pub leftover_files: Vec<PathBuf>,
}

impl FailedClone {
    /// A failure that leaves nothing.
    pub(crate) fn new(number: u64, error: CloneError) -> Self {
        Self { number, error: Box::new(error), leftover_files: Vec::new() }
    }
}

/// The outcome of [`Fleet::start`] or [`Fleet::fill_pool`].
#[derive(Debug)]
#[non_exhaustive]
pub struct FleetReport<T> {
    /// By number.
    pub started: Vec<T>,
    /// By number.
    pub failed: Vec<FailedClone>,
    /// Number of clones that were not tried, because all of the first failed.
    pub not_tried: u64,
}

impl<T> Default for FleetReport<T> {
    /// Nothing was wanted.
    fn default() -> Self {
        Self { started: Vec::new(), failed: Vec::new(), not_tried: 0 }
    }
}

/// Makes clones of one snapshot.
#[derive(Debug)]
pub struct Fleet<'a> {
    pub(crate) snapshot: &'a Snapshot,
    pub(crate) identity: SnapshotIdentity,
    pub(crate) folder: PathBuf,
    /// The command line of every clone: disks, memory and monitor are in it.
    pub(crate) template: CommandTemplate,
    /// Names in it, with placeholders, of files that each clone must have for itself.
    pub(crate) own_names: Vec<String>,
    pub(crate) overlays: Vec<OverlayPlan>,
    /// The RAM blocks that each clone maps; none if each gets a copy.
    pub(crate) mapped: Vec<String>,
    /// The descriptor that QEMU maps. Its lock on the file lasts as long as a QEMU has it open.
    mapping: OwnedFd,
    /// The purpose that a waiting QEMU of a pool must have to be taken.
    pub(crate) pool: PoolPurpose,
    pub(crate) options: FleetOptions,
    notices: Vec<String>,
}

impl<'a> Fleet<'a> {
    /// Checks everything that is the same for all clones, before anything is made: the snapshot, its disks, the command
    /// line. `folder` is created if it does not exist.
    ///
    /// # Errors
    /// A snapshot or a disk that has changed; a command line that cannot be cloned.
    pub fn new(
        snapshot: &'a Snapshot,
        folder: &Path,
        template: CommandTemplate,
        options: FleetOptions,
    ) -> Result<Self, CloneError> {
        snapshot.check_restorable()?;
        if let Some(change) = snapshot.manifest().and_then(|manifest| check_disks(manifest).into_iter().next()) {
            let why = format!("{change}: memory and disk would be of different instants; put the disk back");
            return Err(CloneError::Disk { why });
        }
        let protected = snapshot.manifest().and_then(|manifest| manifest.protected_disks.first());
        if let Some(disk) = protected {
            let why = format!(
                "the disk {} belongs to this checkpoint, and its server ({}) brings it to one VM alone",
                disk.device,
                disk.control.display()
            );
            return Err(CloneError::Disk { why });
        }
        if let Some(disk) = snapshot.manifest().and_then(|manifest| manifest.overlaid_disks.first()) {
            let why =
                format!("the disk {} belongs to this checkpoint, and is brought to it for one VM alone", disk.device);
            return Err(CloneError::Disk { why });
        }
        let recorded = snapshot.manifest().map(|manifest| manifest.disks.as_slice()).unwrap_or_default();
        let overlays = plan(recorded.iter().map(overlay::read_frozen).collect::<Result<_, _>>()?);
        let folder = &std::path::absolute(folder).map_err(CloneError::path("find", folder))?;
        check_folder(folder)?;
        check_length(&resolved(folder))?;
        let command = template.args().iter().map(|arg| arg.to_string_lossy().into_owned()).collect();
        let (args, own_names) = for_all_clones(template.args(), &overlays, folder, snapshot)?;
        let mapping = snapshot.mapping_descriptor()?;
        let mut notices = Vec::new();
        let mapped = match snapshot.is_mappable() {
            _ if options.memory == CloneMemory::Copied => Err("it was not asked for".to_owned().into()),
            false if options.memory == CloneMemory::Mapped => {
                return Err(CloneError::NotMappable { path: snapshot.path().to_path_buf() });
            }
            false => {
                let why = snapshot.not_plain_reason().unwrap_or("was not made to be mapped");
                Err(format!("the snapshot {why}").into())
            }
            // The open file itself: another file may have its name by then.
            true => BlockPlace::guest_memory_of(snapshot)
                .and_then(|blocks| rewrite_for_mapping(&args, &blocks, &format!("/dev/fd/{}", mapping.as_raw_fd()))),
        };
        let (args, mapped) = match mapped {
            Ok(MappedCommandLine { args, blocks, notices: found, .. }) => {
                notices.extend(found);
                (args, blocks)
            }
            Err(conflict) if options.memory == CloneMemory::Mapped => {
                return Err(CloneError::Memory { why: conflict.to_string() });
            }
            Err(conflict) => {
                if options.memory == CloneMemory::Auto {
                    let why = format!("each clone gets a copy of the memory, because it cannot be mapped: {conflict}");
                    notices.push(why);
                }
                let named = name_memory_backend(&args, snapshot);
                (named.map_err(|conflict| CloneError::CommandLine { why: conflict.to_string() })?, Vec::new())
            }
        };
        fs::create_dir_all(folder).map_err(CloneError::path("make", folder))?;
        let folder = fs::canonicalize(folder).map_err(CloneError::path("find", folder))?;
        check_folder(&folder)?;
        let snapshot_path = match snapshot.path() {
            name if snapshot.is_remote() => name.to_owned(),
            path => fs::canonicalize(path).map_err(CloneError::path("find", path))?,
        };
        if !mapped.is_empty() {
            if let Err(error) = snapshot.make_read_only() {
                notices.push(format!("{}; a write to it changes the memory of running VMs", error_with_causes(&error)));
            }
            snapshot.verify_all()?;
        }
        let id = snapshot.manifest().map(|manifest| manifest.id);
        let identity = SnapshotIdentity::of(&snapshot_path, id, snapshot.file())?;
        clear_left_over(&folder);
        let template = CommandTemplate::new(args);
        let directory = std::env::current_dir().map_err(CloneError::path("find", "."))?;
        let pool = PoolPurpose { command, directory, mapped: mapped.clone(), backing: options.backing };
        Ok(Self { snapshot, identity, folder, template, own_names, overlays, mapped, mapping, pool, options, notices })
    }

    /// Notices for a person, known before anything is started.
    #[must_use]
    pub fn notices(&self) -> &[String] {
        &self.notices
    }

    /// Whether the clones share the snapshot's memory.
    #[must_use]
    pub fn is_mapped(&self) -> bool {
        !self.mapped.is_empty()
    }

    /// Estimates the host memory that `count` clones need at least, in bytes: QEMU's own, and a copy of the snapshot's
    /// contents for each that does not share them. Shared contents are page cache, which the kernel can take back.
    /// Pages that the guests will write are not included.
    #[must_use]
    pub fn estimate_memory(&self, count: u64) -> u64 {
        /// A QEMU with few devices, started from a snapshot, has 17 to 20 MiB that it shares with no other
        /// (docs/benchmarks).
        const QEMU_OWN: u64 = 16 << 20;
        let contents = if self.is_mapped() { 0 } else { self.snapshot.stored_pages().saturating_mul(PAGE_SIZE) };
        count.saturating_mul(contents.saturating_add(QEMU_OWN))
    }

    /// The descriptors that a clone's QEMU inherits.
    pub(crate) fn inherited_fds(&self) -> Vec<BorrowedFd<'_>> {
        if self.is_mapped() { vec![self.mapping.as_fd()] } else { Vec::new() }
    }

    /// Number of clones started at a time.
    pub(crate) fn jobs(&self) -> usize {
        self.options.jobs.or_else(|| thread::available_parallelism().ok()).map_or(1, NonZeroUsize::get)
    }
}

/// Returns the command line of every clone, with its disks and its monitor, and the names in it that are each clone's
/// own. Its memory is as it was given.
fn for_all_clones(
    args: &[OsString],
    overlays: &[OverlayPlan],
    folder: &Path,
    snapshot: &Snapshot,
) -> Result<(Vec<OsString>, Vec<String>), CloneError> {
    let same = |name: &str, file: &Path| is_same_file(Path::new(name), file);
    let refused = |why| CloneError::CommandLine { why };
    if let Some(arg) = args.iter().find(|arg| arg.to_str().is_none()) {
        return Err(refused(format!("{}: not valid UTF-8, so it cannot be read", arg.to_string_lossy())));
    }
    check_snapshot_not_shared(args, &|name| same(name, snapshot.path()))
        .map_err(|conflict| refused(conflict.to_string()))?;
    let ownership = Ownership::new(folder);
    check_outputs(args, &ownership).map_err(refused)?;
    let mut args = behind_overlays(args, overlays, &ownership, &same).map_err(|why| CloneError::Disk { why })?;
    args.extend(["-qmp".into(), format!("unix:{},server=on,wait=off", escaped("{dir}/qmp")).into()]);
    Ok((args, ownership.into_names()))
}

/// Refuses a directory whose path would say something else inside an option of QEMU.
fn check_folder(folder: &Path) -> Result<(), CloneError> {
    let is_plain = |letter: char| !letter.is_control() && !matches!(letter, ',' | '"' | '\\' | '{' | '}');
    if folder.to_str().is_some_and(|text| text.chars().all(is_plain)) {
        return Ok(());
    }
    let why = "the path of clones goes into QEMU's options: no comma, quote, backslash, brace or control character";
    Err(CloneError::path("use", folder)(std::io::Error::other(why)))
}

/// Returns the path that a directory will have: links are resolved in the part of it that exists.
fn resolved(folder: &Path) -> PathBuf {
    let with_rest = |top: &Path| Some(fs::canonicalize(top).ok()?.join(folder.strip_prefix(top).ok()?));
    folder.ancestors().find_map(with_rest).unwrap_or_else(|| folder.to_owned())
}

/// Refuses a directory that is too long for the sockets of monitors: once for all clones, and before any is made.
fn check_length(folder: &Path) -> Result<(), CloneError> {
    let monitor = folder.join(name_of(0)).join(MONITOR);
    match monitor.as_os_str().len().checked_sub(SOCKET_PATH_MAX) {
        None | Some(0) => Ok(()),
        Some(over) => Err(CloneError::path("use", folder)(std::io::Error::other(format!(
            "the path is {over} bytes too long: a clone's monitor is a unix socket in it, whose path has at most \
             {SOCKET_PATH_MAX} bytes"
        )))),
    }
}
