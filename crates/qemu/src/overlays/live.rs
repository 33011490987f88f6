//! The overlays of a VM whose checkpoints are made.

use std::path::{Path, PathBuf};
use std::time::Duration;

use limosa_image::qcow2::{self, CreateOptions};
use limosa_page::error_with_causes;
use limosa_snapshot::OverlaidDisk;
use limosa_storage::{FileOptions, FileStorage, block_on, sync_folder};
use parking_lot::Mutex;
use uuid::Uuid;

use super::ledger::{ImageState, Ledger, Stamp};
use super::{file, job_of, merge, remove};
use crate::conflict::{Conflict, DiskConflict};
use crate::disk_server::EpochDisks;
use crate::file_identity::FileId;
use crate::job::JobError;
use crate::job_record::{OverlayChain, overlay_digits};
use crate::monitor::{Device, Disk, Monitor};
use crate::save::overlay::{check, freezable, make_file, place, text};

/// Digits of the protection's id in the names of nodes, which QEMU limits to 31 characters.
const NODE_DIGITS: usize = 8;
/// Events of block jobs, which nobody else takes.
const JOB_EVENTS: [&str; 3] = ["JOB_STATUS_CHANGE", "BLOCK_JOB_COMPLETED", "BLOCK_JOB_ERROR"];

/// The disks of a VM that have an overlay for each epoch. One thread works with them.
#[derive(Debug)]
pub struct EpochOverlays {
    overlays: Uuid,
    disks: Vec<EpochDisk>,
    progress: Mutex<Progress>,
}

/// One disk.
#[derive(Debug)]
struct EpochDisk {
    device: String,
    /// The node of the image.
    base: String,
    image: PathBuf,
    format: &'static str,
    /// Bytes of the disk.
    size: u64,
    direct: bool,
    no_flush: bool,
    /// The names of its nodes without the epoch.
    nodes: String,
}

/// How far they are, by epoch.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Progress {
    /// The newest overlay that QEMU has opened.
    prepared: u64,
    /// The newest one that the VM writes to, or has written to.
    put: u64,
    /// The overlay that is being merged.
    merging: Option<u64>,
    /// The newest one that the image has.
    merged: u64,
    /// The newest one whose file was removed.
    removed: u64,
}

impl Default for EpochOverlays {
    /// Those of a VM without such disks.
    fn default() -> Self {
        Self { overlays: Uuid::nil(), disks: Vec::new(), progress: Mutex::new(Progress::default()) }
    }
}

impl EpochOverlays {
    /// Finds the VM's writable disks, but for those of servers, and checks that all can have overlays. `overlays`
    /// identifies these. Nothing is changed.
    ///
    /// # Errors
    /// A disk is no raw or qcow2 image in a file of this host, or has more to it than its file says; a block job works
    /// on one; an earlier protection of one was not ended; the monitor's.
    pub fn find(monitor: &Monitor, overlays: Uuid, served: &EpochDisks) -> Result<Self, JobError> {
        let not = |name: &str, why: &str| {
            Err(JobError::conflict(
                format!("no overlay can be put over the disk {name}: {why}"),
                Conflict::Disk(DiskConflict::NotFreezable),
            ))
        };
        let is_served = |name: &str| served.devices().any(|device| device == name);
        let is_foreign = |device: &&Device| device.is_external_disk() && !is_served(&device.id);
        if let Some(device) = monitor.devices()?.iter().find(is_foreign) {
            return not(&device.kind, "another process serves it");
        }
        let mut found = monitor.disks()?;
        found.retain(|disk| !is_served(&disk.device));
        if !found.is_empty() {
            check(monitor)?;
        }
        let short: String = overlay_digits(overlays).chars().take(NODE_DIGITS).collect();
        let (mut disks, mut files): (Vec<EpochDisk>, Vec<FileId>) = (Vec::new(), Vec::new());
        for disk in found {
            // One node under two devices has one overlay.
            if disks.iter().any(|other| other.base == disk.node) {
                continue;
            }
            let image = freezable(&disk)?;
            let Disk { device, node: base, virtual_size: size, direct, no_flush, .. } = disk;
            let format = match disk.format.as_str() {
                "qcow2" => "qcow2",
                "raw" | "file" => "raw",
                other => return not(&device, &format!("its format is {other}; raw and qcow2 are supported")),
            };
            text(&image)?;
            let metadata = std::fs::metadata(&image).map_err(place("look at the disk", &image))?;
            if !metadata.is_file() {
                let why = format!("it is a block device ({}), beside which none can stand", image.display());
                return not(&device, &why);
            }
            let identity = FileId::from(&metadata);
            if files.contains(&identity) {
                return Err(JobError::conflict(
                    format!("the disk {device} writes to the same file as another one, {}", image.display()),
                    Conflict::Disk(DiskConflict::SharedFile),
                ));
            }
            files.push(identity);
            check_ended(&device, &image)?;
            let nodes = format!("limosa-{short}-{}-", disks.len());
            disks.push(EpochDisk { device, base, image, format, size, direct, no_flush, nodes });
        }
        Ok(Self { overlays, disks, progress: Mutex::new(Progress::default()) })
    }

    /// Whether the VM has none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.disks.is_empty()
    }

    /// The devices of the disks.
    pub fn devices(&self) -> impl Iterator<Item = &str> {
        self.disks.iter().map(|disk| disk.device.as_str())
    }

    /// Returns what has to be undone when the job ends.
    #[must_use]
    pub fn records(&self) -> Vec<OverlayChain> {
        self.disks.iter().map(EpochDisk::record).collect()
    }

    /// Returns the disks for the manifest of their checkpoints.
    #[must_use]
    pub fn in_manifest(&self) -> Vec<OverlaidDisk> {
        let disk = |disk: &EpochDisk| OverlaidDisk {
            device: disk.device.clone(),
            path: disk.image.clone(),
            format: disk.format.to_owned(),
            overlays: self.overlays,
        };
        self.disks.iter().map(disk).collect()
    }

    /// Makes the overlays of the next epoch and has QEMU open them, if it has not yet. The VM runs. They are in the
    /// job's record already.
    ///
    /// # Errors
    /// A file cannot be made, or QEMU may not open it.
    pub fn prepare(&self, monitor: &Monitor) -> Result<(), JobError> {
        let Progress { prepared, put, .. } = *self.progress.lock();
        if self.is_empty() || prepared > put {
            return Ok(());
        }
        let epoch = put + 1;
        for disk in &self.disks {
            disk.make(monitor, self.overlays, epoch)?;
            let target = disk.file(self.overlays, epoch);
            let added = monitor.add_overlay(&disk.node(epoch), &text(&target)?, disk.direct, disk.no_flush);
            added.map_err(|error| match error.desc() {
                Some(said) => JobError::refused(format!(
                    "QEMU cannot open the overlay {}: {said}; let it open files in that folder",
                    target.display()
                )),
                None => error.into(),
            })?;
        }
        self.progress.lock().prepared = epoch;
        Ok(())
    }

    /// Begins epochs: what the VM has written until now is the images', and epoch 1 is open. The VM stands still.
    ///
    /// # Errors
    /// QEMU's; a ledger cannot be written.
    pub fn begin(&self, monitor: &Monitor) -> Result<(), JobError> {
        if self.is_empty() {
            return Ok(());
        }
        self.put(monitor, 1)?;
        self.note_merged(0)
    }

    /// Seals an epoch. The VM stands still, before and after it.
    ///
    /// # Errors
    /// QEMU's: the checkpoint must not count.
    pub fn seal(&self, monitor: &Monitor, epoch: u64) -> Result<(), JobError> {
        if self.is_empty() { Ok(()) } else { self.put(monitor, epoch.saturating_add(1)) }
    }

    fn put(&self, monitor: &Monitor, epoch: u64) -> Result<(), JobError> {
        let Progress { prepared, put, merging, .. } = *self.progress.lock();
        if (prepared, put + 1, merging) != (epoch, epoch, None) {
            return Err(JobError::refused(format!("the overlays of epoch {epoch} are not prepared")));
        }
        // An overlay of the size before would cut it off.
        let disks = monitor.disks()?;
        for EpochDisk { device, size, .. } in &self.disks {
            match disks.iter().find(|disk| disk.device == *device).map(|disk| disk.virtual_size) {
                Some(now) if now != *size => {
                    return Err(JobError::refused(format!("the disk {device} has {now} bytes, and had {size}")));
                }
                _ => {}
            }
        }
        let pairs: Vec<_> = self.disks.iter().map(|disk| (disk.below(epoch), disk.node(epoch))).collect();
        monitor.put_overlays(pairs.iter().map(|(below, node)| (below.as_str(), node.as_str())))?;
        self.progress.lock().put = epoch;
        Ok(())
    }

    /// The checkpoint of an epoch counts, and no older one is needed any more: QEMU begins to merge its overlays, and
    /// the next ones are prepared. The VM runs.
    ///
    /// # Errors
    /// QEMU's; a file cannot be made or removed. The VM can continue all the same.
    pub fn count(&self, monitor: &Monitor, epoch: u64) -> Result<(), JobError> {
        if self.is_empty() {
            return Ok(());
        }
        // The base has nothing to be merged.
        if epoch > 0 {
            self.remove_merged()?;
            for disk in &self.disks {
                disk.write(Ledger::new(self.overlays, ImageState::Merging { epoch }))?;
            }
            self.progress.lock().merging = Some(epoch);
            for disk in &self.disks {
                let top = disk.node(epoch);
                let active = disk.node(epoch.saturating_add(1));
                monitor.begin_commit(&disk.job(), &active, &top, &disk.base)?;
            }
        }
        self.prepare(monitor)
    }

    /// Looks at the merge that was begun. Whether it is over, so that the next epoch may be sealed.
    ///
    /// # Errors
    /// It has failed: the image has a part of the epoch, which its overlay covers.
    pub fn is_merged(&self, monitor: &Monitor) -> Result<bool, JobError> {
        let Some(epoch) = self.progress.lock().merging else { return Ok(true) };
        let jobs = monitor.jobs()?;
        let of = |disk: &EpochDisk| jobs.iter().find(|job| job.id == disk.job());
        if self.disks.iter().filter_map(of).any(|job| !job.is_concluded()) {
            return Ok(false);
        }
        for disk in &self.disks {
            let Some(job) = of(disk) else { continue };
            let failure = job.error.clone();
            monitor.dismiss_job(&job.id)?;
            if let Some(failure) = failure {
                let EpochDisk { device, image, .. } = disk;
                let why =
                    format!("{}, the image of the disk {device}, does not take writes: {failure}", image.display());
                return Err(JobError::refused(why));
            }
        }
        for disk in &self.disks {
            monitor.remove_node(&disk.node(epoch))?;
        }
        while monitor.qmp().wait_event(&JOB_EVENTS, Duration::ZERO)?.is_some() {}
        self.note_merged(epoch)?;
        let mut progress = self.progress.lock();
        (progress.merging, progress.merged) = (None, epoch);
        Ok(true)
    }

    /// Merges all overlays into the images: those of a VM that has ended by itself, and of its QEMU. What it has
    /// written is all that there is.
    ///
    /// # Errors
    /// As of [`merge_overlays`](merge::merge_overlays).
    pub fn end(&self) -> Result<(), JobError> {
        merge::merge_each(&self.in_manifest(), merge::Writers::None)
    }

    /// Notes that the images have the epochs up to this one, and nothing else.
    fn note_merged(&self, epoch: u64) -> Result<(), JobError> {
        for disk in &self.disks {
            let stamp = Stamp::of(&disk.image).map_err(place("look at the disk", &disk.image))?;
            disk.write(Ledger::new(self.overlays, ImageState::Merged { epoch, stamp }))?;
        }
        Ok(())
    }

    /// Removes the files that were merged before the newest checkpoint stopped the VM: that has made the header
    /// durable in which the overlay above names the image instead.
    fn remove_merged(&self) -> Result<(), JobError> {
        let Progress { merged, removed, .. } = *self.progress.lock();
        for epoch in removed.saturating_add(1)..=merged {
            for disk in &self.disks {
                remove(&disk.image, self.overlays, epoch).map_err(place("remove an overlay of", &disk.image))?;
            }
        }
        self.progress.lock().removed = merged;
        Ok(())
    }
}

/// Refuses a disk with an earlier protection that was not ended.
fn check_ended(device: &str, image: &Path) -> Result<(), JobError> {
    let ledger = Ledger::read(image).map_err(place("read", &Ledger::path(image)))?;
    match ledger.map(|ledger| ledger.image) {
        None | Some(ImageState::Brought { .. }) => Ok(()),
        Some(_) => Err(JobError::conflict(
            format!(
                "an earlier protection of the disk {device} was not ended, and {} belongs to it: fail over to its \
                 checkpoint, or merge its overlays",
                Ledger::path(image).display()
            ),
            Conflict::Disk(DiskConflict::Unmerged),
        )),
    }
}

impl EpochDisk {
    fn record(&self) -> OverlayChain {
        OverlayChain {
            device: self.device.clone(),
            base: self.base.clone(),
            // It is text.
            image: self.image.to_string_lossy().into_owned(),
            nodes: self.nodes.clone(),
        }
    }

    fn node(&self, epoch: u64) -> String {
        format!("{}{epoch}", self.nodes)
    }

    /// The node that the overlay of an epoch is put over.
    fn below(&self, epoch: u64) -> String {
        match epoch.saturating_sub(1) {
            0 => self.base.clone(),
            below => self.node(below),
        }
    }

    fn job(&self) -> String {
        job_of(&self.nodes)
    }

    fn file(&self, overlays: Uuid, epoch: u64) -> PathBuf {
        file(&self.image, overlays, epoch)
    }

    /// Makes the empty overlay of an epoch.
    fn make(&self, monitor: &Monitor, overlays: Uuid, epoch: u64) -> Result<(), JobError> {
        let target = self.file(overlays, epoch);
        let (backing, format) = match epoch.saturating_sub(1) {
            0 => (self.image.clone(), self.format),
            below => (self.file(overlays, below), "qcow2"),
        };
        let options = CreateOptions::default()
            .size(self.size)
            .backing_file(Some(backing.into_os_string()))
            .backing_format(Some(format.to_owned()));
        let made = make_file(monitor, &self.image, &target)?;
        let made = FileStorage::from_fd(made.into(), &target.display().to_string(), &FileOptions::default())
            .map_err(limosa_image::ImageError::from)
            .and_then(|storage| block_on(qcow2::create(&*storage, None, &options)));
        if let Err(error) = made {
            let why = error_with_causes(&error);
            return Err(JobError::refused(format!("cannot make the overlay {}: {why}", target.display())));
        }
        // What the guest believes to be durable must not hang on a name that is not.
        sync_folder(&target).map_err(place("make durable the folder of", &target))
    }

    fn write(&self, ledger: Ledger) -> Result<(), JobError> {
        ledger.write(&self.image).map_err(place("write", &Ledger::path(&self.image)))
    }
}
