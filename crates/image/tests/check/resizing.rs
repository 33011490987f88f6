//! Disks that become longer and shorter, compared with the stock tool.

use std::path::Path;
use std::sync::Arc;

use limosa_image::qcow2::{CheckOptions, Header, ImageParts, ResizeOptions, resize};
use limosa_image::raw::{Raw, RawOptions};
use limosa_image::{Disk, ImageError, Preallocation};
use limosa_storage::testing::{Loss, PowerCut, SeededRandom};
use limosa_storage::{MemoryStorage, Storage, block_on};
use limosa_testkit::qemu_img;

use crate::cuts::contents;
use crate::verdict::{ours, stock};
use crate::{seed, zoo};

pub(crate) fn shrink() -> ResizeOptions {
    ResizeOptions::default().shrink(true).check(CheckOptions::default().memory(1 << 20).max_findings(10))
}

/// Resizes an image in memory.
pub(crate) fn resized(
    file: Arc<dyn Storage>,
    below: Option<Arc<dyn Disk>>,
    data_file: Option<Arc<dyn Storage>>,
    size: u64,
    options: ResizeOptions,
) -> Result<(), ImageError> {
    block_on(async {
        let header = Header::read(&*file).await?;
        resize(ImageParts::new(file, header).data_file(data_file).backing(below), size, options).await
    })
}

fn alone(file: &MemoryStorage, size: u64, options: ResizeOptions) -> Result<(), ImageError> {
    resized(Arc::new(file.clone()), None, None, size, options)
}

pub(crate) fn clean(path: &Path, what: &str) {
    let (found, said) = stock(path);
    let found = found.unwrap_or_else(|| panic!("{what}: {said}"));
    assert_eq!((found.leaks, found.corruptions, found.errors), (0, 0, 0), "{what}: {said}");
}

#[test]
fn a_resized_disk_is_the_one_that_the_stock_tool_makes() {
    if limosa_testkit::qemu_skipped() {
        return;
    }
    let folder = limosa_testkit::scratch().unwrap();
    let (mine, theirs) = (folder.path().join("mine.qcow2"), folder.path().join("theirs.qcow2"));
    for name in [
        "usual",
        "tiny",
        "width1",
        "width2",
        "width64",
        "subclusters",
        "zlib",
        "fine-zlib",
        "large",
        "metadata",
        "lazy",
    ] {
        let path = zoo::one(folder.path(), name).path;
        for size in [512_u64, 64 << 10, 3 << 20, (5 << 20) + 512, 8 << 20, 9 << 20, 100 << 20, 3 << 30] {
            if name == "tiny" && size > 1 << 30 {
                continue;
            }
            let what = format!("{name} of {size} bytes");
            let storage = MemoryStorage::with_contents(std::fs::read(&path).unwrap(), 1 << 30);
            alone(&storage, size, shrink()).unwrap_or_else(|error| panic!("{what}: {error}"));
            std::fs::write(&mine, storage.contents()).unwrap();
            std::fs::copy(&path, &theirs).unwrap();
            let [mine_name, theirs_name] = [&mine, &theirs].map(|path| path.to_str().unwrap());
            qemu_img(["resize", "-q", "-f", "qcow2", "--shrink", theirs_name, &size.to_string()]).unwrap();
            clean(&mine, &what);
            qemu_img(["compare", "-s", "-f", "qcow2", "-F", "qcow2", mine_name, theirs_name]).unwrap();
        }
    }
}

#[test]
fn a_disk_that_grows_has_space_where_that_is_asked_for() {
    if limosa_testkit::qemu_skipped() {
        return;
    }
    let folder = limosa_testkit::scratch().unwrap();
    let path = folder.path().join("grown.qcow2");
    for name in ["usual", "tiny", "width1", "subclusters", "old-plain"] {
        let options = if name == "old-plain" { "compat=0.10,cluster_size=4k" } else { "" };
        let animal =
            if options.is_empty() { zoo::one(folder.path(), name) } else { zoo::plain(folder.path(), options) };
        for preallocation in [Preallocation::Metadata, Preallocation::Falloc, Preallocation::Full] {
            let storage = MemoryStorage::with_contents(std::fs::read(&animal.path).unwrap(), 1 << 30);
            let options = shrink().preallocation(preallocation);
            alone(&storage, (20 << 20) + 512, options).unwrap();
            std::fs::write(&path, storage.contents()).unwrap();
            clean(&path, name);
            let before = ours(&std::fs::read(&animal.path).unwrap(), 1 << 20).unwrap();
            let after = ours(&storage.contents(), 1 << 20).unwrap();
            let new = after.total_clusters - before.total_clusters;
            assert_eq!(after.allocated_clusters, before.allocated_clusters + new, "{name} {preallocation:?}");
        }
    }
}

#[test]
fn what_the_backing_file_has_behind_the_old_end_stays_out_of_sight() {
    if limosa_testkit::qemu_skipped() {
        return;
    }
    let folder = limosa_testkit::scratch().unwrap();
    let [base, overlay] =
        ["base.raw", "overlay.qcow2"].map(|name| folder.path().join(name).to_str().unwrap().to_owned());
    std::fs::write(&base, vec![7; 2 << 20]).unwrap();
    let read_only = RawOptions::default().read_only(true);
    for options in ["cluster_size=4k", "cluster_size=64k", "cluster_size=16k,extended_l2=on", "compat=0.10"] {
        // Ends within a cluster, too: with contents of its own there, or none.
        for (old, write) in [(1 << 20, None), ((1 << 20) - 1536, None), ((1 << 20) + 512, Some("write -P 5 1M 512"))] {
            let create = ["create", "-q", "-f", "qcow2", "-F", "raw", "-b", &base, "-o", options, &overlay];
            qemu_img(create.into_iter().chain([&*old.to_string()])).unwrap();
            if let Some(write) = write {
                limosa_testkit::qemu_io(["-f", "qcow2", "-c", write, &overlay]).unwrap();
            }
            for preallocation in [Preallocation::Off, Preallocation::Metadata] {
                let what = format!("{options}, {old} bytes, {preallocation:?}");
                let storage = MemoryStorage::with_contents(std::fs::read(&overlay).unwrap(), 1 << 30);
                let below =
                    Raw::open(Arc::new(MemoryStorage::with_contents(vec![7; 2 << 20], 2 << 20)), &read_only).unwrap();
                let options = shrink().preallocation(preallocation);
                resized(Arc::new(storage.clone()), Some(below), None, 3 << 20, options).unwrap();
                let path = folder.path().join("grown.qcow2");
                std::fs::write(&path, storage.contents()).unwrap();
                clean(&path, &what);
                let own = old.min(1 << 20);
                let commands = [format!("read -P 7 0 {own}"), format!("read -P 0 {old} {}", (3 << 20) - old)];
                let read = commands.iter().flat_map(|command| ["-c", command]).chain(["-f", "qcow2"]);
                let said = limosa_testkit::qemu_io(read.chain([path.to_str().unwrap()])).unwrap();
                assert!(!said.contains("verification failed"), "{what}: {said}");
            }
        }
    }
}

#[test]
fn a_resize_that_was_cut_short_leaves_one_size_or_the_other() {
    if limosa_testkit::qemu_skipped() {
        return;
    }
    let folder = limosa_testkit::scratch().unwrap();
    let mut chance = SeededRandom::new(seed());
    for name in ["usual", "tiny", "width1", "width2", "subclusters", "zlib"] {
        let whole = std::fs::read(zoo::one(folder.path(), name).path).unwrap();
        let before = contents(&whole).unwrap();
        for (size, preallocation) in
            [(3 << 20, Preallocation::Off), (40 << 20, Preallocation::Off), (9 << 20, Preallocation::Metadata)]
        {
            let power = PowerCut::new();
            let storage = power.add_storage("image", whole.clone(), 1 << 30);
            resized(storage, None, None, size, shrink().preallocation(preallocation)).unwrap();
            for moment in 0..=power.moments() {
                for loss in [Loss::None, Loss::All, Loss::Some(chance.bits())] {
                    let cut = power.cut(moment, loss).remove(0);
                    let what = format!("{name} to {size}, cut at {moment} of {} with {loss:?}", power.moments());
                    let report = ours(&cut, 1 << 20).unwrap_or_else(|error| panic!("{what}: {error}"));
                    assert_eq!((report.corruptions, report.check_errors), (0, 0), "{what}: {report:#?}");
                    let found = contents(&cut).unwrap();
                    let end = usize::try_from(size / 4096).unwrap();
                    assert!(found.len() == before.len() || found.len() == end, "{what}");
                    let both = before.len().min(end);
                    assert!(found[..both] == before[..both], "{what}");
                }
            }
        }
    }
}
