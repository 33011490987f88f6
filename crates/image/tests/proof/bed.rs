//! An image on storages that a test has in its hands.

use std::collections::HashSet;
use std::path::Path;
use std::sync::Arc;

use limosa_image::Disk;
use limosa_image::luks::{Passphrase, SectorCipher};
use limosa_image::qcow2::{self, CheckOptions, Header, Repair};
use limosa_storage::testing::SparseMemory;
use limosa_storage::{MemoryStorage, Storage, block_on};
use limosa_testkit::image::raw;
use limosa_testkit::{qemu_img, qemu_img_output, scratch};
use tempfile::TempDir;

use crate::Verdict;
use crate::recipe::{BackingOverride, Data, PASSPHRASE, Recipe};

/// The storages of an image.
pub(crate) struct Storages {
    pub(crate) image: Arc<dyn Storage>,
    pub(crate) data: Option<Arc<dyn Storage>>,
    /// The backing image, as a disk.
    pub(crate) below: Option<Arc<dyn Disk>>,
    /// The cipher of encrypted contents.
    pub(crate) cipher: Option<Arc<SectorCipher>>,
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
    /// Derived once: a key takes its time.
    pub(crate) cipher: Option<Arc<SectorCipher>>,
}

impl Bed {
    pub(crate) fn new(recipe: &Recipe, seed: u64) -> Self {
        Self::new_in(scratch().unwrap(), recipe, seed)
    }

    /// In a folder.
    pub(crate) fn new_in(folder: TempDir, recipe: &Recipe, seed: u64) -> Self {
        let first = recipe.make(folder.path(), seed);
        let snapshots = (0..recipe.snapshots).map(|number| snapshot(recipe, folder.path(), number)).collect();
        let made = ["image", "data"]
            .into_iter()
            .filter_map(|name| Some((name, std::fs::read(folder.path().join(name)).ok()?)));
        let made: Vec<_> = made.collect();
        let cipher = recipe.luks.map(|_| cipher(&made[0].1));
        Self { recipe: recipe.clone(), first, snapshots, made, cipher, folder }
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
            cipher: self.cipher.clone(),
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
        let found = self.seen();
        differs(&found, expected).map_or(Ok(()), |at| Err(format!("qemu-img reads something else at {at:#x}")))?;
        self.snapshots_are_unchanged()
    }

    /// Whether what the image in the folder has in its snapshots is what it had at first.
    pub(crate) fn snapshots_are_unchanged(&self) -> Verdict {
        for (number, before) in self.snapshots.iter().enumerate() {
            let found = snapshot(&self.recipe, self.folder.path(), u32::try_from(number).unwrap());
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

    /// Has limosa's own check look at the image, which takes a hundredth of the time of a process.
    pub(crate) fn check_own(&self, contents: &[Vec<u8>], leaks: bool) -> Verdict {
        let file = SparseMemory::file_with("image", contents[0].clone(), 256 << 20);
        let check =
            || block_on(qcow2::check(&file, CheckOptions::default())).map_err(|error| format!("check: {error}"));
        let mut report = check()?;
        if self.recipe.lazy && report.corruptions > 0 {
            // As in `check_files`.
            block_on(qcow2::repair(&file, Repair::All, CheckOptions::default())).map_err(|error| format!("{error}"))?;
            report = check()?;
        }
        let sound = report.is_clean() || (leaks && report.corruptions == 0 && report.check_errors == 0);
        if sound { Ok(()) } else { Err(format!("limosa's check: {:?}", report.findings)) }
    }

    /// The contents of the image in the folder, as stock QEMU reads it.
    pub(crate) fn seen(&self) -> Vec<u8> {
        self.recipe.seen(self.folder.path(), &[])
    }

    /// Whether none of these contents of an encrypted disk are in the storages: blocks of the cipher, wherever one can
    /// be.
    pub(crate) fn nothing_plain(&self, contents: &[Vec<u8>], plain: &[u8]) -> Verdict {
        // Not zeros with a few bytes between them, as tables are.
        let is_told = |block: &&[u8; 16]| block.iter().filter(|byte| **byte != 0).count() > 12;
        let plain: HashSet<&[u8; 16]> = plain.as_chunks().0.iter().filter(is_told).collect();
        let mut blocks = contents.iter().flat_map(|bytes| bytes.as_chunks().0).filter(is_told);
        match blocks.find(|block| plain.contains(block)) {
            Some(block) if self.recipe.luks.is_some() => Err(format!("{block:x?} of the disk is in the file as it is")),
            _ => Ok(()),
        }
    }

    /// Has `qemu-img check` look at the image in the folder.
    pub(crate) fn check_files(&self, leaks: bool) -> Verdict {
        let image = self.folder.path().join("image");
        let image = image.to_str().unwrap();
        let named = self.recipe.image(self.folder.path());
        let words = |more: &[&str]| -> Vec<String> {
            [&["check"], more].concat().into_iter().map(str::to_owned).chain(named.clone()).collect()
        };
        let mut output = qemu_img_output(words(&[])).unwrap();
        if self.recipe.lazy && output.status.code() == Some(2) {
            // An image that says that its refcounts are not up to date is repaired by the program that opens it.
            qemu_img(words(&["-q", "-r", "all"])).map_err(|error| error.to_string())?;
            output = qemu_img_output(words(&[])).unwrap();
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

/// The cipher of the image in a file.
fn cipher(file: &[u8]) -> Arc<SectorCipher> {
    let file = MemoryStorage::with_contents(file.to_vec(), 256 << 20);
    let passphrase = Passphrase::new(PASSPHRASE.as_bytes().to_vec());
    block_on(async { qcow2::cipher(&file, &Header::read(&file).await?, &passphrase).await }).unwrap()
}

fn snapshot(recipe: &Recipe, folder: &Path, number: u32) -> Vec<u8> {
    recipe.seen(folder, &["-l", &format!("snapshot.name=s{number}")])
}

/// Where two differ first.
pub(crate) fn differs(one: &[u8], other: &[u8]) -> Option<usize> {
    let at = one.iter().zip(other).position(|(one, other)| one != other);
    at.or_else(|| (one.len() != other.len()).then(|| one.len().min(other.len())))
}
