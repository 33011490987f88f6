//! An image on storages that a test has in its hands.

use std::path::Path;
use std::sync::Arc;

use limosa_image::Disk;
use limosa_storage::Storage;
use limosa_storage::testing::SparseMemory;
use limosa_testkit::image::raw;
use limosa_testkit::{qemu_img, qemu_img_output, scratch};
use tempfile::TempDir;

use crate::Verdict;
use crate::recipe::{BackingOverride, Data, Recipe, seen};

/// The storages of an image.
pub(crate) struct Storages {
    pub(crate) image: Arc<dyn Storage>,
    pub(crate) data: Option<Arc<dyn Storage>>,
    /// The backing image, as a disk.
    pub(crate) below: Option<Arc<dyn Disk>>,
}

/// Makes a storage with a name and contents.
pub(crate) type Make<'a> = dyn Fn(&str, Vec<u8>) -> Arc<dyn Storage> + 'a;

/// Puts something over a storage.
pub(crate) type Over<'a> = dyn Fn(Arc<dyn Storage>) -> Arc<dyn Storage> + 'a;

/// An image made by a recipe, and all that is known of it.
pub(crate) struct Bed {
    pub(crate) recipe: Recipe,
    pub(crate) folder: TempDir,
    /// The first contents of the disk.
    pub(crate) first: Vec<u8>,
    /// The contents of each snapshot.
    snapshots: Vec<Vec<u8>>,
    /// The files as they were made.
    made: Vec<(&'static str, Vec<u8>)>,
}

impl Bed {
    pub(crate) fn new(recipe: &Recipe, seed: u64) -> Self {
        Self::new_in(scratch().unwrap(), recipe, seed)
    }

    /// In a folder.
    pub(crate) fn new_in(folder: TempDir, recipe: &Recipe, seed: u64) -> Self {
        let first = recipe.make(folder.path(), seed);
        let snapshots = (0..recipe.snapshots).map(|number| snapshot(folder.path(), number)).collect();
        let made = ["image", "data"]
            .into_iter()
            .filter_map(|name| Some((name, std::fs::read(folder.path().join(name)).ok()?)));
        Self { recipe: recipe.clone(), first, snapshots, made: made.collect(), folder }
    }

    fn made(&self, wanted: &str) -> Vec<u8> {
        self.made.iter().find(|(name, _)| *name == wanted).map(|(_, bytes)| bytes.clone()).unwrap()
    }

    /// Puts the files back as they were made.
    pub(crate) fn restore(&self) {
        for (name, bytes) in &self.made {
            std::fs::write(self.folder.path().join(name), bytes).unwrap();
        }
    }

    /// Its storages as files in memory; `make` is told the name and the contents of each.
    /// What lies below goes through `over`.
    pub(crate) fn storages(&self, make: &Make<'_>, over: &Over<'_>) -> Storages {
        Storages {
            image: make("image", self.made("image")),
            data: (self.recipe.data != Data::Inside).then(|| make("data", self.made("data"))),
            below: self.below(over),
        }
    }

    /// The backing image, read-only bytes, through `over`.
    pub(crate) fn below(&self, over: &Over<'_>) -> Option<Arc<dyn Disk>> {
        let bytes = match self.recipe.below {
            BackingOverride::Nothing => return None,
            BackingOverride::Raw | BackingOverride::Shorter => std::fs::read(self.folder.path().join("below")).unwrap(),
            BackingOverride::Longer => {
                let [below, raw] = ["below", "below.raw"].map(|name| self.folder.path().join(name));
                qemu_img(["convert", "-O", "raw", below.to_str().unwrap(), raw.to_str().unwrap()]).unwrap();
                std::fs::read(raw).unwrap()
            }
        };
        let len = bytes.len() as u64;
        Some(raw(over(Arc::new(SparseMemory::file_with("below", bytes, len)))))
    }

    /// Asks stock QEMU about what the storages contain now: whether the image is sound, and whether the guest sees
    /// `expected`. `leaks`: whether clusters may be lost.
    pub(crate) fn judge(&self, contents: &[Vec<u8>], expected: &[u8], leaks: bool) -> Verdict {
        self.check(contents, leaks)?;
        self.judge_seen(expected)
    }

    /// Asks stock QEMU whether the guest sees `expected` in the image in the folder.
    pub(crate) fn judge_seen(&self, expected: &[u8]) -> Verdict {
        let found = seen(self.folder.path(), &[]);
        differs(&found, expected).map_or(Ok(()), |at| Err(format!("qemu-img reads something else at {at:#x}")))?;
        self.snapshots_are_unchanged()
    }

    /// Whether what the image in the folder has in its snapshots is what it had at first.
    pub(crate) fn snapshots_are_unchanged(&self) -> Verdict {
        for (number, before) in self.snapshots.iter().enumerate() {
            let found = snapshot(self.folder.path(), u32::try_from(number).unwrap());
            if let Some(at) = differs(&found, before) {
                return Err(format!("snapshot {number} has changed at {at:#x}"));
            }
        }
        Ok(())
    }

    /// Puts the contents of the storages into the folder and has `qemu-img check` look at them.
    pub(crate) fn check(&self, contents: &[Vec<u8>], leaks: bool) -> Verdict {
        for (name, bytes) in ["image", "data"].iter().zip(contents) {
            std::fs::write(self.folder.path().join(name), bytes).unwrap();
        }
        self.check_files(leaks)
    }

    /// Has `qemu-img check` look at the image in the folder.
    pub(crate) fn check_files(&self, leaks: bool) -> Verdict {
        let image = self.folder.path().join("image");
        let image = image.to_str().unwrap();
        let mut output = qemu_img_output(["check", "-f", "qcow2", image]).unwrap();
        if self.recipe.lazy && output.status.code() == Some(2) {
            // An image that says that its refcounts are not up to date is repaired by the program that opens it.
            qemu_img(["check", "-q", "-f", "qcow2", "-r", "all", image]).map_err(|error| error.to_string())?;
            output = qemu_img_output(["check", "-f", "qcow2", image]).unwrap();
        }
        let sound = match output.status.code() {
            Some(0) => true,
            Some(3) => leaks,
            _ => false,
        };
        if sound {
            return Ok(());
        }
        let [printed, said] = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
        let kept = std::env::temp_dir().join(format!("limosa-broken-{}", std::process::id()));
        let _ = std::fs::create_dir_all(&kept).and_then(|()| std::fs::copy(image, kept.join("image")));
        let all: String = said.lines().chain(printed.lines()).take(12).map(|line| format!("\n  {line}")).collect();
        Err(format!("qemu-img check: {}:{all}\n  the image is in {}", output.status, kept.display()))
    }
}

fn snapshot(folder: &Path, number: u32) -> Vec<u8> {
    seen(folder, &["-l", &format!("snapshot.name=s{number}")])
}

/// Where two differ first.
pub(crate) fn differs(one: &[u8], other: &[u8]) -> Option<usize> {
    let at = one.iter().zip(other).position(|(one, other)| one != other);
    at.or_else(|| (one.len() != other.len()).then(|| one.len().min(other.len())))
}
