//! The images that the programs read and change.
//!
//! Law: an image is made when a run first needs it, and no run changes it but random writes to encrypted disks. What a
//! run changes is a fresh copy. qcow2 images are made by stock qemu-img if it is there; encrypted ones by limosa,
//! because qemu-img measures its key derivation for seconds.

use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use limosa_page::{to_u64, to_usize};

use super::program::{Program, words};
use crate::content::{Mixture, PIECE};

/// The options with which an encrypted image is named.
pub(super) const LUKS: &str = "driver=luks,key-secret=s,file.filename={}";

/// The images of a bench.
#[derive(Debug)]
pub(super) struct Images {
    folder: PathBuf,
    /// Bytes of the larger disks.
    size: u64,
    maker: Program,
    limosa: Program,
}

impl Images {
    pub(super) fn new(folder: &Path, size: u64, maker: Program, limosa: Program) -> Self {
        Self { folder: folder.to_owned(), size, maker, limosa }
    }

    pub(super) fn folder(&self) -> &Path {
        &self.folder
    }

    /// Bytes of the smaller disks, for the slow commands.
    fn half(&self) -> u64 {
        self.size / 2
    }

    /// A path at which no file is.
    pub(super) fn output(&self, name: &str) -> PathBuf {
        let path = self.folder.join(name);
        let _ = fs::remove_file(&path);
        path
    }

    /// Makes an image unless it is there.
    fn once(&self, name: &str, make: impl FnOnce(&Path) -> Result<()>) -> Result<PathBuf> {
        let path = self.folder.join(name);
        if !path.exists() {
            make(&path).with_context(|| format!("making {}", path.display()))?;
        }
        Ok(path)
    }

    fn make(&self, line: &str, paths: &[&Path]) -> Result<()> {
        self.maker.run(&words(line, paths)?)
    }

    /// A fresh copy, with its holes.
    fn copy(&self, from: &Path, name: &str) -> Result<PathBuf> {
        let path = self.output(name);
        let status = Command::new("cp").arg("--sparse=auto").args([from, &path]).status().context("cp")?;
        ensure!(status.success(), "cp {}: {status}", from.display());
        Ok(path)
    }

    /// The passphrase of encrypted images.
    pub(super) fn key(&self) -> Result<PathBuf> {
        self.once("key", |path| Ok(fs::write(path, "passphrase")?))
    }

    /// A raw disk full of a mixture; its zeros are holes.
    pub(super) fn raw(&self) -> Result<PathBuf> {
        self.once("disk.raw", |path| mixture(path, self.size, |_| 1))
    }

    /// Half as large.
    pub(super) fn small_raw(&self) -> Result<PathBuf> {
        self.once("small.raw", |path| mixture(path, self.half(), |_| 1))
    }

    /// [`Self::raw`] as qcow2.
    pub(super) fn qcow2(&self) -> Result<PathBuf> {
        let raw = self.raw()?;
        self.once("disk.qcow2", |path| self.make("convert -f raw -O qcow2 {} {}", &[&raw, path]))
    }

    /// Another one with the same contents, in clusters of another length.
    pub(super) fn other_qcow2(&self) -> Result<PathBuf> {
        let raw = self.raw()?;
        let line = "convert -f raw -O qcow2 -o cluster_size=128k {} {}";
        self.once("other.qcow2", |path| self.make(line, &[&raw, path]))
    }

    /// A compressed image.
    pub(super) fn compressed(&self, method: &str) -> Result<PathBuf> {
        let raw = self.small_raw()?;
        let line = format!("convert -c -f raw -O qcow2 -o compression_type={method} {{}} {{}}");
        self.once(&format!("{method}.qcow2"), |path| self.make(&line, &[&raw, path]))
    }

    /// A raw disk of 64 times the size with 4 KiB to 256 KiB of contents in each 16 MiB.
    pub(super) fn sparse(&self) -> Result<PathBuf> {
        self.once("sparse.raw", |path| {
            let file = File::create(path)?;
            file.set_len(self.size * 64)?;
            for at in 0..(self.size * 64) >> 24 {
                let length = to_usize(4096 << (at % 7));
                file.write_all_at(&vec![0x5a; length], (at << 24) + (at % 13) * 4096)?;
            }
            Ok(())
        })
    }

    /// An encrypted disk with a mixture, all of it written.
    pub(super) fn luks(&self) -> Result<PathBuf> {
        let raw = self.raw()?;
        self.once("disk.luks", |path| self.fill_luks(&raw, path))
    }

    fn fill_luks(&self, raw: &Path, path: &Path) -> Result<()> {
        let key = self.key()?;
        self.create_luks(path)?;
        let object = "--object secret,id=s,file={}";
        let line = format!("convert {object} -n -f raw --target-image-opts {{}} {LUKS}");
        self.limosa.run(&words(&line, &[&key, raw, path])?)
    }

    fn create_luks(&self, path: &Path) -> Result<()> {
        let key = self.key()?;
        let line = "create -f luks --object secret,id=s,file={} -o key-secret=s,iter-time=10 {}";
        let mut line = words(line, &[&key, path])?;
        line.push(self.size.to_string());
        self.limosa.run(&line)
    }

    /// A fresh encrypted disk.
    pub(super) fn empty_luks(&self) -> Result<PathBuf> {
        let path = self.output("output");
        self.create_luks(&path)?;
        Ok(path)
    }

    /// An encrypted qcow2 image, all of it allocated.
    pub(super) fn encrypted_qcow2(&self) -> Result<PathBuf> {
        let (raw, key) = (self.raw()?, self.key()?);
        let object = "--object secret,id=s,file={}";
        let how = "-o encrypt.format=luks,encrypt.key-secret=s,encrypt.iter-time=10";
        let line = format!("convert {object} -S 0 -f raw -O qcow2 {how} {{}} {{}}");
        self.once("encrypted.qcow2", |path| self.limosa.run(&words(&line, &[&key, &raw, path])?))
    }

    /// A fresh overlay with much data, for a commit into its fresh base.
    pub(super) fn overlay_to_commit(&self) -> Result<PathBuf> {
        let base = self.base()?;
        let own = self.copy(&base, "own-base.qcow2")?;
        let overlay = self.overlay("overlay-to-commit.qcow2", &own, 2)?;
        self.copy(&overlay, "output")
    }

    /// A fresh overlay with some data, for a rebase.
    pub(super) fn overlay_to_rebase(&self) -> Result<PathBuf> {
        let overlay = self.overlay_in_chain()?;
        self.copy(&overlay, "output")
    }

    /// An overlay with data in one cluster of eight, and its base.
    pub(super) fn overlay_in_chain(&self) -> Result<PathBuf> {
        self.overlay("overlay.qcow2", &self.base()?, 8)
    }

    /// The base of the overlays.
    pub(super) fn base(&self) -> Result<PathBuf> {
        let raw = self.small_raw()?;
        self.once("base.qcow2", |path| self.make("convert -f raw -O qcow2 {} {}", &[&raw, path]))
    }

    /// An image that differs from the base in each second MiB.
    pub(super) fn new_base(&self) -> Result<PathBuf> {
        let raw = self.once("new-base.raw", |path| mixture(path, self.half(), |number| 1 + (number >> 6) % 2))?;
        self.once("new-base.qcow2", |path| self.make("convert -f raw -O qcow2 {} {}", &[&raw, path]))
    }

    /// An overlay with data in one cluster of `every`.
    fn overlay(&self, name: &str, base: &Path, every: u64) -> Result<PathBuf> {
        self.once(name, |path| {
            self.make("create -q -f qcow2 -F qcow2 -b {} {}", &[base, path])?;
            self.write_clusters(path, self.half(), every)
        })
    }

    /// Writes one cluster of `every` on the first `size` bytes.
    fn write_clusters(&self, path: &Path, size: u64, every: u64) -> Result<()> {
        let (step, count) = (every << 16, (size >> 16) / every);
        let line = format!("bench -q -f qcow2 -w --pattern 90 -d 16 -s 65536 -S {step} -c {count} {{}}");
        self.make(&line, &[path])
    }

    /// A fresh image of 64 times the size with data in an eighth of it, and a snapshot from which a part of that
    /// differs. The clusters of the data are allocated and holes.
    pub(super) fn with_snapshot(&self) -> Result<PathBuf> {
        let path = self.snapshots()?;
        self.copy(&path, "output")
    }

    /// The image itself.
    pub(super) fn snapshots(&self) -> Result<PathBuf> {
        self.once("snapshots.qcow2", |path| {
            self.preallocated(path, self.size * 8)?;
            let mut line = words("resize -q {}", &[path])?;
            line.push((self.size * 64).to_string());
            self.maker.run(&line)?;
            self.make("snapshot -c first {}", &[path])?;
            self.write_clusters(path, self.size * 8, 64)
        })
    }

    /// An image of 64 times the size, all of it allocated.
    pub(super) fn full(&self) -> Result<PathBuf> {
        self.once("full.qcow2", |path| self.preallocated(path, self.size * 64))
    }

    fn preallocated(&self, path: &Path, size: u64) -> Result<()> {
        let mut line = words("create -q -f qcow2 -o preallocation=metadata {}", &[path])?;
        line.push(size.to_string());
        self.maker.run(&line)
    }
}

/// Writes a mixture of whole pieces; `seed` tells of each whose it is.
fn mixture(path: &Path, size: u64, seed: impl Fn(u64) -> u64) -> Result<()> {
    let mixture = Mixture::new();
    let file = File::create(path)?;
    file.set_len(size)?;
    let mut piece = vec![0; PIECE];
    for (number, at) in (0..size).step_by(PIECE).enumerate() {
        let number = to_u64(number);
        mixture.fill(seed(number), number, &mut piece);
        if piece.iter().any(|byte| *byte != 0) {
            file.write_all_at(&piece, at)?;
        }
    }
    Ok(())
}
