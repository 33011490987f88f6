//! The disks of a checkpoint, brought to it: the overlays up to it are merged into the image, the newer ones removed.
//!
//! No QEMU has the disk. Laws: **each step can be cut off and repeated**, because an overlay covers what it has brought
//! to the image, and goes only when the ledger says that the image has it. **Only an image with the ledger of these
//! overlays beside it is changed**: the checkpoint is a file, which may name any other.

use std::collections::BTreeSet;
use std::ops::ControlFlow;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use limosa_image::chain::{ImageFile, NamedImage, OpenOptions};
use limosa_image::commit::{Commit, CommitOptions, CommitRequest};
use limosa_image::reference::{BackingOverride, Reference};
use limosa_image::{Format, Policy};
use limosa_page::error_with_causes;
use limosa_snapshot::OverlaidDisk;
use limosa_storage::{LockPolicy, block_on};

use super::ledger::{ImageState, Ledger, Stamp};
use super::{file, found, remove};
use crate::conflict::{Conflict, DiskConflict};
use crate::job::JobError;

/// How long a QEMU that was ended may take to close its images.
const CLOSED_WITHIN: Duration = Duration::from_secs(10);
/// How often it is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// The next thing to be done to an image.
#[derive(Debug, PartialEq, Eq)]
enum Step {
    /// Merge the overlays of these epochs, and remove all.
    Merge(Vec<u64>),
    /// It is as of the checkpoint; remove all overlays that are left.
    Remove,
}

/// Brings the disks of a checkpoint, which is that of `epoch`, to it: what the VM wrote later is dropped. The VM is
/// off. It can be repeated, also after a kill.
///
/// # Errors
/// A disk is as of another instant, or was written since; an image is in use, or fails.
pub fn bring(disks: &[OverlaidDisk], epoch: u64) -> Result<(), JobError> {
    disks.iter().try_for_each(|disk| bring_one(disk, epoch).map_err(|why| conflict(disk, epoch, &why)))
}

/// Checks that the disks of a checkpoint can be [brought](bring) to it, and changes nothing.
///
/// # Errors
/// A disk is as of another instant, or was written since.
pub fn check_bringable(disks: &[OverlaidDisk], epoch: u64) -> Result<(), JobError> {
    disks.iter().try_for_each(|disk| look(disk, epoch).map(drop).map_err(|why| conflict(disk, epoch, &why)))
}

/// Checks that the disks of a checkpoint are as of it, and that nobody has written to them since.
///
/// # Errors
/// One is not.
pub(crate) fn check(disks: &[OverlaidDisk], epoch: u64) -> Result<(), JobError> {
    disks.iter().try_for_each(|disk| match look(disk, epoch) {
        Ok((Step::Remove, _)) => Ok(()),
        Ok((Step::Merge(_), _)) => Err(conflict(disk, epoch, "its overlays are not merged, which a failover does")),
        Err(why) => Err(conflict(disk, epoch, &why)),
    })
}

fn conflict(disk: &OverlaidDisk, epoch: u64, why: &str) -> JobError {
    match JobError::other_instant(&disk.device, &disk.path, epoch, why) {
        JobError::Refused { why, .. } if is_ending(&disk.path) => {
            JobError::conflict(why, Conflict::Disk(DiskConflict::Unmerged))
        }
        other => other,
    }
}

/// Whether the last writes to an image were being merged when that was cut off.
fn is_ending(image: &Path) -> bool {
    Ledger::read(image).is_ok_and(|ledger| ledger.is_some_and(|ledger| ledger.image == ImageState::Ending))
}

/// Looks at a disk, without changing anything. Returns the step, and the overlays that are there.
fn look(disk: &OverlaidDisk, epoch: u64) -> Result<(Step, Vec<u64>), String> {
    let OverlaidDisk { path, overlays, .. } = disk;
    let at = |error: std::io::Error| format!("{}: {error}", path.display());
    let ledger = Ledger::read(path).map_err(|error| format!("{}: {error}", Ledger::path(path).display()))?;
    let stamp = Stamp::of(path).map_err(at)?;
    let there = found(path, *overlays).map_err(at)?;
    let Some(ledger) = ledger.filter(|ledger| ledger.overlays == *overlays) else {
        let mut why = "its protection has ended, and it has what the VM wrote since".to_owned();
        // They may have been merged, and the image written since: merging them again would destroy it.
        if let Some(top) = there.last() {
            let top = file(path, *overlays, *top);
            why = format!("{why}; if the VM ended while that was merged, {} has the last of it", top.display());
        }
        return Err(why);
    };
    plan(ledger.image, stamp, &there.iter().copied().collect(), epoch).map(|step| (step, there))
}

/// Decides what has to be done to an image with this ledger, to be as of `epoch`. `stamp`: the image's, `there`: the
/// overlays beside it.
fn plan(image: ImageState, stamp: Stamp, there: &BTreeSet<u64>, epoch: u64) -> Result<Step, String> {
    let written = || Err("it was written since".to_owned());
    let as_of = |found: u64| Err(format!("it is as of checkpoint {found}"));
    let merged = match image {
        ImageState::Brought { epoch: brought, stamp: left } => {
            return if brought != epoch {
                as_of(brought)
            } else if left == stamp {
                Ok(Step::Remove)
            } else {
                written()
            };
        }
        ImageState::Ending => {
            return Err("its protection has ended, and what its VM wrote last is not merged".to_owned());
        }
        // What belongs to no checkpoint of its own goes with the first merge.
        ImageState::Merged { stamp: left, .. } if left != stamp => return written(),
        ImageState::Merged { epoch: merged, .. } => merged,
        ImageState::Merging { epoch: merging } if merging > epoch => return as_of(merging),
        ImageState::Merging { epoch: merging } => merging.saturating_sub(1),
        ImageState::Bringing { epoch: bringing } if bringing != epoch => return as_of(bringing),
        // All of them are there until the ledger says that it is brought, but for those that were merged before.
        ImageState::Bringing { .. } => {
            let first = there.first().copied().unwrap_or(epoch.saturating_add(1));
            first.saturating_sub(1).min(epoch)
        }
    };
    if merged > epoch {
        return as_of(merged);
    }
    let wanted: Vec<u64> = (merged.saturating_add(1)..=epoch).collect();
    match wanted.iter().find(|epoch| !there.contains(epoch)) {
        Some(missing) => Err(format!("its overlay of checkpoint {missing} is not there")),
        None => Ok(Step::Merge(wanted)),
    }
}

fn bring_one(disk: &OverlaidDisk, epoch: u64) -> Result<(), String> {
    let OverlaidDisk { path, overlays, format, .. } = disk;
    let format: Format = format.parse().map_err(|error| format!("{error}"))?;
    let (step, there) = look(disk, epoch)?;
    let note = |state: ImageState| {
        let written = Ledger::new(*overlays, state).write(path);
        written.map_err(|error| format!("{}: {error}", Ledger::path(path).display()))
    };
    if let Step::Merge(epochs) = step {
        // A QEMU that still has the image must not find its ledger changed.
        wait_closed(path, format)?;
        note(ImageState::Bringing { epoch })?;
        for epoch in epochs {
            merge(path, format, &file(path, *overlays, epoch))?;
        }
        let stamp = Stamp::of(path).map_err(|error| format!("{}: {error}", path.display()))?;
        note(ImageState::Brought { epoch, stamp })?;
    }
    let removed = there.into_iter().try_for_each(|epoch| remove(path, *overlays, epoch));
    removed.map_err(|error| format!("an overlay of it cannot be removed: {error}"))
}

/// Waits until no other process has an image open for writing.
pub(super) fn wait_closed(image: &Path, format: Format) -> Result<(), String> {
    let limit = Instant::now() + CLOSED_WITHIN;
    let reference = Reference::file(image).format(Some(format));
    let options = OpenOptions::default().lock(LockPolicy::Auto).policy(Policy::Follow);
    loop {
        match block_on(ImageFile::open(&reference, &options)) {
            Ok(_) => return Ok(()),
            Err(_) if Instant::now() < limit => thread::sleep(LOOK_EVERY),
            Err(error) => return Err(error_with_causes(&error)),
        }
    }
}

/// Writes what an overlay has into the image, durably, whichever image it stands on by its own header.
pub(super) fn merge(image: &Path, format: Format, overlay: &Path) -> Result<(), String> {
    let base = Reference::file(image).format(Some(format));
    let top = Reference::file(overlay).format(Some(Format::Qcow2)).backing(BackingOverride::Other(Box::new(base)));
    let options = OpenOptions::default().lock(LockPolicy::Auto).policy(Policy::Follow);
    let mut request = CommitRequest::new(NamedImage::new(top, options));
    request.options = CommitOptions::default().keep_overlay(true);
    let prepared: Commit = block_on(request.prepare()).map_err(|error| error_with_causes(&error))?;
    prepared.run(&|_| ControlFlow::Continue(())).map(drop).map_err(|error| error_with_causes(&error))
}

#[cfg(test)]
mod tests {
    use limosa_storage::testing::SeededRandom;

    use super::*;

    /// A disk of a few sectors, each with the number of the write that it has.
    const SECTORS: usize = 6;
    type Contents = [u64; SECTORS];
    type Overlay = [Option<u64>; SECTORS];

    /// A protected VM's disk as it is on the host, and what it must be.
    #[derive(Clone)]
    struct Host {
        image: Contents,
        /// Counts the writes to the image.
        stamp: i64,
        overlays: Vec<(u64, Overlay)>,
        ledger: ImageState,
        /// The disk of the newest checkpoint that counts, and its number.
        newest: (u64, Contents),
        /// The disk as the VM sees it.
        seen: Contents,
    }

    fn stamp(at: i64) -> Stamp {
        serde_json::from_value(serde_json::json!({ "size": 1, "modified": [at, 0] })).unwrap()
    }

    impl Host {
        fn new() -> Self {
            let ledger = ImageState::Merged { epoch: 0, stamp: stamp(0) };
            let overlays = vec![(1, [None; SECTORS])];
            Self { image: [0; 6], stamp: 0, overlays, ledger, newest: (0, [0; 6]), seen: [0; 6] }
        }

        fn write(&mut self, sector: usize, value: u64) {
            self.overlays.last_mut().unwrap().1[sector] = Some(value);
            self.seen[sector] = value;
        }

        /// Brings a part of an overlay, or all of it, to the image.
        fn merge(&mut self, epoch: u64, sectors: usize) {
            let (_, overlay) = *self.overlays.iter().find(|(there, _)| *there == epoch).unwrap();
            self.stamp += 1;
            for (sector, value) in overlay.iter().enumerate().take(sectors) {
                self.image[sector] = value.unwrap_or(self.image[sector]);
            }
        }

        /// A failover that is cut off after `steps`; whether it came to its end.
        fn bring(&mut self, steps: usize) -> Result<bool, String> {
            let epoch = self.newest.0;
            let there: BTreeSet<u64> = self.overlays.iter().map(|(epoch, _)| *epoch).collect();
            let step = plan(self.ledger, stamp(self.stamp), &there, epoch)?;
            let mut left = steps;
            let mut cut = || {
                left = left.saturating_sub(1);
                left == 0
            };
            if let Step::Merge(epochs) = step {
                if cut() {
                    return Ok(false);
                }
                self.ledger = ImageState::Bringing { epoch };
                for epoch in epochs {
                    if cut() {
                        self.merge(epoch, SECTORS / 2);
                        return Ok(false);
                    }
                    self.merge(epoch, SECTORS);
                }
                if cut() {
                    return Ok(false);
                }
                self.ledger = ImageState::Brought { epoch, stamp: stamp(self.stamp) };
            }
            while !self.overlays.is_empty() {
                if cut() {
                    return Ok(false);
                }
                self.overlays.remove(0);
            }
            Ok(true)
        }

        /// Expects failovers that are cut off at any step to lead to the newest checkpoint.
        #[track_caller]
        fn check(&self, chance: &mut SeededRandom) {
            let mut host = self.clone();
            while !host.bring(1 + usize::try_from(chance.below(9)).unwrap()).unwrap() {}
            assert_eq!(host.image, self.newest.1);
            assert_eq!(host.bring(1), Ok(true), "it can be repeated");
            host.stamp += 1;
            assert_eq!(host.bring(1), Err("it was written since".to_owned()));
        }
    }

    #[test]
    fn the_disk_of_the_newest_checkpoint_is_there_at_every_moment() {
        let mut chance = SeededRandom::new(1);
        for _ in 0..200 {
            let (mut host, mut value) = (Host::new(), 0);
            for epoch in 1..8 {
                let mut write = |host: &mut Host, chance: &mut SeededRandom| {
                    value += 1;
                    host.write(usize::try_from(chance.below(SECTORS as u64)).unwrap(), value);
                    host.check(chance);
                };
                (0..chance.below(4)).for_each(|_| write(&mut host, &mut chance));
                // Sealed: what is written from now on is in the next overlay.
                let sealed = host.seen;
                host.overlays.push((epoch + 1, [None; SECTORS]));
                (0..chance.below(3)).for_each(|_| write(&mut host, &mut chance));
                host.newest = (epoch, sealed);
                host.check(&mut chance);
                // The files of the one before go.
                host.overlays.retain(|(there, _)| *there >= epoch);
                host.check(&mut chance);
                host.ledger = ImageState::Merging { epoch };
                host.check(&mut chance);
                for sectors in 0..=SECTORS {
                    host.merge(epoch, sectors);
                    write(&mut host, &mut chance);
                }
                host.ledger = ImageState::Merged { epoch, stamp: stamp(host.stamp) };
                host.check(&mut chance);
            }
        }
    }

    #[test]
    fn an_image_of_another_instant_is_not_changed() {
        let there = |epochs: &[u64]| epochs.iter().copied().collect::<BTreeSet<u64>>();
        let (now, before) = (stamp(2), stamp(1));
        let why = |image, epochs: &[u64], epoch| plan(image, now, &there(epochs), epoch).unwrap_err();
        assert!(why(ImageState::Merged { epoch: 3, stamp: before }, &[4], 3).contains("written since"));
        assert!(why(ImageState::Merged { epoch: 3, stamp: now }, &[4], 2).contains("as of checkpoint 3"));
        assert!(why(ImageState::Merged { epoch: 3, stamp: now }, &[5], 5).contains("checkpoint 4 is not there"));
        assert!(why(ImageState::Merging { epoch: 3 }, &[3, 4], 2).contains("as of checkpoint 3"));
        assert!(why(ImageState::Bringing { epoch: 3 }, &[3, 4], 4).contains("as of checkpoint 3"));
        assert!(why(ImageState::Ending, &[3, 4], 3).contains("has ended"));
        assert!(why(ImageState::Brought { epoch: 3, stamp: now }, &[], 4).contains("as of checkpoint 3"));
    }
}
