//! Overlays: the disks are frozen at the instant at which the VM stops for its memory, and the VM continues with
//! overlays over them.
//!
//! In time:
//!
//! 1. Before anything is changed: which disks there are, whether each can be frozen, where its overlay goes.
//! 2. The overlays are written down in QEMU (the job's record). Then their files are made and QEMU opens them, unused:
//!    a file that QEMU may not open is refused here, with the VM untouched.
//! 3. The memory is saved while the VM runs. With `pause-before-switchover` QEMU stops the VM and waits; all overlays
//!    are put over their disks in one transaction, all or none; the migration continues.
//! 4. The VM continues with its overlays, and the snapshot is published, with the frozen files in its manifest.
//!
//! The law: **until the snapshot has its name, all of this can be undone** (`takeover::overlays`): an overlay that
//! is unused is closed and removed, one that is used is merged back into its disk while the VM runs. From then on the
//! snapshot stands on the frozen files, and the VM continues with the overlays in every case.

use std::ffi::OsStr;
use std::fs::{File, Permissions};
use std::ops::ControlFlow;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use limosa_snapshot::Manifest;

use super::options::{DiskPolicy, SaveOptions};
use crate::conflict::{Conflict, DiskConflict, JobOption, MissingPermission};
use crate::file_identity::FileId;
use crate::job::JobError;
use crate::job_record::{OVERLAY_DIGITS, OVERLAY_SUFFIX, Overlay};
use crate::monitor::{Disk, Monitor};
use crate::program::{self, Ended};

/// How long qemu-img may take to make an empty image.
const MADE_WITHIN: Duration = Duration::from_secs(60);

/// One disk and the overlay that it gets.
#[derive(Debug)]
pub(super) struct Planned {
    disk: Disk,
    path: PathBuf,
    overlay: Overlay,
}

/// Refuses a VM whose disks cannot get overlays, whoever puts them.
pub(crate) fn check(monitor: &Monitor) -> Result<(), JobError> {
    if !monitor.qmp().passes_descriptors() {
        return Err(JobError::refused(
            "overlays are made where the VM runs, and this monitor is reached over tcp; run there, with a unix socket \
             monitor",
        ));
    }
    match monitor.block_jobs()?.first() {
        Some(job) => Err(JobError::refused(format!(
            "a {} job ({}) works on the VM's disks; wait for its end, or cancel it",
            job.kind, job.id
        ))),
        None => Ok(()),
    }
}

/// Plans the overlays of the save; none if the policy is another, or no disk can be written to.
pub(super) fn plan(options: &SaveOptions, disks: Vec<Disk>, digits: &str) -> Result<Vec<Planned>, JobError> {
    if options.disks != DiskPolicy::Overlay || disks.is_empty() {
        return Ok(Vec::new());
    }
    let mut planned: Vec<Planned> = Vec::new();
    let mut files: Vec<(String, FileId)> = Vec::new();
    for disk in disks {
        if planned.iter().any(|other| other.disk.node == disk.node) {
            // One node under two devices: one overlay serves both.
            continue;
        }
        let path = freezable(&disk)?;
        let found = std::fs::metadata(&path).map_err(place("look at the disk", &path))?;
        let identity = FileId::from(&found);
        if let Some((other, _)) = files.iter().find(|(_, known)| *known == identity) {
            return Err(JobError::conflict(
                format!("the disks {other} and {} write to the same file, {}", disk.device, path.display()),
                Conflict::Disk(DiskConflict::SharedFile),
            ));
        }
        files.push((disk.device.clone(), identity));
        let mut file = place_for(&disk.device, &path, options.overlay_dir.as_deref(), digits, !found.is_file())?;
        if planned.iter().any(|other| Path::new(&other.overlay.file) == file) {
            file.as_mut_os_string().push(format!("-{}", planned.len()));
        }
        let overlay = Overlay {
            device: disk.device.clone(),
            base: disk.node.clone(),
            frozen: text(&path)?,
            node: format!("limosa-{digits}-{}", planned.len()),
            file: text(&file)?,
        };
        planned.push(Planned { disk, path, overlay });
    }
    Ok(planned)
}

/// Returns the overlays for the job's record.
pub(super) fn records(planned: &[Planned]) -> Vec<Overlay> {
    planned.iter().map(|one| one.overlay.clone()).collect()
}

/// Returns the disk's file, if the disk can be frozen.
pub(crate) fn freezable(disk: &Disk) -> Result<PathBuf, JobError> {
    /// Formats and protocols whose nodes are images; everything else stands between an image and a device.
    const IMAGES: [&str; 12] =
        ["raw", "qcow2", "qcow", "qed", "vmdk", "vdi", "vhdx", "vpc", "parallels", "luks", "file", "host_device"];
    let refused = |why: String| {
        Err(JobError::conflict(
            format!("no overlay can be put over the disk {}: {why}", disk.device),
            Conflict::Disk(DiskConflict::NotFreezable),
        ))
    };
    if !IMAGES.contains(&disk.format.as_str()) {
        return refused(format!("its topmost node is a '{}', which is no image", disk.format));
    }
    if let Some(override_key) = &disk.overriding_option {
        return refused(format!("QEMU was given more about {} than its file says ('{override_key}')", disk.filename));
    }
    match &disk.path {
        // QEMU's directory, which relative names count from, cannot be read by every user.
        Some(path) if path.is_relative() => refused(format!(
            "the place of '{}' is unknown: it is a relative path of QEMU's working directory",
            path.display()
        )),
        Some(path) => Ok(path.clone()),
        None => refused(format!("'{}' is no file of this host", disk.filename)),
    }
}

/// Returns the place of a disk's overlay: beside it, or in `folder`.
pub(super) fn place_for(
    disk: &str,
    path: &Path,
    folder: Option<&Path>,
    digits: &str,
    device: bool,
) -> Result<PathBuf, JobError> {
    if device && folder.is_none() {
        return Err(JobError::conflict(
            format!("the disk {disk} is a block device ({}), beside which no overlay can stand", path.display()),
            Conflict::Missing(JobOption::OverlayDirectory),
        ));
    }
    let folder = match folder {
        Some(folder) => std::path::absolute(folder).map_err(place("find the folder", folder))?,
        None => path.parent().unwrap_or(Path::new("/")).to_owned(),
    };
    let mut name = trunk(path.file_name().unwrap_or(OsStr::new("disk"))).to_owned();
    name.push(format!("{OVERLAY_SUFFIX}{digits}"));
    Ok(folder.join(name))
}

/// Returns a file's name without the part that an earlier save added, so that names do not grow from save to save.
fn trunk(name: &OsStr) -> &OsStr {
    let Some((trunk, digits)) = name.to_str().and_then(|name| name.rsplit_once(OVERLAY_SUFFIX)) else { return name };
    let ours = digits.len() >= OVERLAY_DIGITS && digits.bytes().all(|byte| byte.is_ascii_hexdigit() || byte == b'-');
    if ours && !trunk.is_empty() { OsStr::new(trunk) } else { name }
}

/// Returns a path as text, which QEMU's monitor needs.
pub(crate) fn text(path: &Path) -> Result<String, JobError> {
    path.to_str().map(str::to_owned).ok_or_else(|| {
        JobError::refused(format!(
            "the path {} is no text, and QEMU's monitor takes nothing else; rename it",
            path.display()
        ))
    })
}

/// Makes the overlays' files and lets QEMU open them. They are in the job's record already, so a failure leaves
/// nothing.
pub(super) fn prepare(monitor: &Monitor, planned: &[Planned]) -> Result<(), JobError> {
    for one in planned {
        create(monitor, one)?;
        let Planned { disk, overlay, .. } = one;
        monitor.add_overlay(&overlay.node, &overlay.file, disk.direct, disk.no_flush).map_err(|error| {
            match error.desc() {
                Some(said) => JobError::conflict(
                    format!("QEMU cannot open the overlay of the disk {}: {said}", disk.device),
                    Conflict::Permission(MissingPermission::OverlayDirectory),
                ),
                None => error.into(),
            }
        })?;
    }
    Ok(())
}

/// Makes an empty overlay, with the owner and the mode of the frozen file, or of QEMU if that is a device.
fn create(monitor: &Monitor, Planned { disk, path, overlay }: &Planned) -> Result<(), JobError> {
    let target = Path::new(&overlay.file);
    let file = make_file(monitor, path, target)?;
    let format = if matches!(disk.format.as_str(), "file" | "host_device") { "raw" } else { &disk.format };
    // Through a descriptor: a qemu-img that outlives this process makes no file again. -u: the disk is not opened.
    let mut command = Command::new("qemu-img");
    command.args(["create", "-q", "-u", "-f", "qcow2", "-F", format, "-b", &overlay.frozen, "/proc/self/fd/0"]);
    command.arg(disk.virtual_size.to_string()).stdin(Stdio::from(file));
    let made = program::run(&mut command, MADE_WITHIN, |_| ControlFlow::Continue(()));
    // What the guest will believe to be durable must not hang on a name that is not.
    if let Some(folder) = target.parent() {
        File::open(folder).and_then(|folder| folder.sync_all()).map_err(place("make durable the folder", folder))?;
    }
    match made {
        Ok(Ended::Itself(status, _)) if status.success() => Ok(()),
        Ok(Ended::Itself(_, said)) => {
            let why = format!("qemu-img cannot make the overlay {}: {said}", overlay.file);
            Err(JobError::refused(format!("{why}; the VM is untouched")))
        }
        Ok(Ended::Enough) => Err(JobError::refused("qemu-img was ended before it was done; the VM is untouched")),
        Err(error) if error.kind() == std::io::ErrorKind::TimedOut => {
            let why = format!("qemu-img does not make the overlay {} within {} s", overlay.file, MADE_WITHIN.as_secs());
            Err(JobError::refused(format!("{why}; the VM is untouched; look at that file system")))
        }
        Err(error) => Err(JobError::refused(format!(
            "qemu-img cannot be run: {error}; install it (package qemu-utils): it makes the overlays"
        ))),
    }
}

/// Makes the empty file of an overlay over `image`, with that one's owner and mode, or QEMU's owner if it is a device.
pub(crate) fn make_file(monitor: &Monitor, image: &Path, target: &Path) -> Result<File, JobError> {
    let file = File::options().read(true).write(true).create_new(true).mode(0o600).open(target);
    let file = file.map_err(place("make the overlay", target))?;
    let below = std::fs::metadata(image).map_err(place("look at the disk", image))?;
    let (owner, mode) = if below.is_file() {
        (Some((below.uid(), below.gid())), below.mode() & 0o777)
    } else {
        let process = monitor.qmp().process().and_then(|process| std::fs::metadata(format!("/proc/{process}")).ok());
        (process.map(|process| (process.uid(), process.gid())), 0o600)
    };
    if let Some((user, group)) = owner {
        // A process that may not give files away finds out later whether QEMU can open it all the same.
        let _ = std::os::unix::fs::fchown(&file, Some(user), Some(group));
    }
    file.set_permissions(Permissions::from_mode(mode)).map_err(place("set the mode of the overlay", target))?;
    Ok(file)
}

/// Freezes the disks at the instant of the save: QEMU has stopped the VM and waits.
pub(super) fn put(monitor: &Monitor, planned: &[Planned]) -> Result<(), JobError> {
    if planned.is_empty() {
        return Ok(());
    }
    Ok(monitor.put_overlays(planned.iter().map(|one| (one.overlay.base.as_str(), one.overlay.node.as_str())))?)
}

/// Notes in the manifest which overlays the VM continues with.
pub(super) fn note(manifest: &mut Manifest, planned: &[Planned]) {
    for disk in &mut manifest.disks {
        let over = planned.iter().find(|one| one.overlay.base == disk.node);
        disk.overlay = over.map(|one| PathBuf::from(&one.overlay.file));
    }
}

pub(crate) fn place(what: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> JobError {
    let path = path.to_owned();
    move |source| JobError::Io { what, path, source }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_do_not_grow_from_save_to_save() {
        let short = |name: &str| trunk(OsStr::new(name)).to_str().unwrap().to_owned();
        assert_eq!(short("disk.qcow2"), "disk.qcow2");
        assert_eq!(short("disk.qcow2.overlay-0123456789abcdef"), "disk.qcow2");
        assert_eq!(short("disk.qcow2.overlay-0123456789abcdef-1"), "disk.qcow2");
        assert_eq!(short("disk.overlay-mine"), "disk.overlay-mine");
        assert_eq!(short(".overlay-0123456789abcdef"), ".overlay-0123456789abcdef");
    }
}
