use std::fs;
use std::ops::ControlFlow;

use limosa_storage::testing::{Loss, PowerCut, SeededRandom};
use limosa_storage::{FileOptions, Io, MemoryStorage, block_on};

use super::*;
use crate::compression::Compress;
use crate::disk::BlockStatus;
use crate::offset::GuestOffset;
use crate::operations::convert::{ConvertOptions, convert_recorded};
use crate::qcow2::{CreateOptions, Header, ImageParts, Qcow2, Qcow2Options};
use crate::raw::{Raw, RawOptions};
use crate::test_disk::{Part, TestDisk};

const MOST: u64 = 16 << 20;

/// A disk of parts of all kinds: bytes, zeros in bytes, and holes.
fn source(seed: u64) -> Arc<TestDisk> {
    let mut chance = SeededRandom::new(seed);
    let parts: Vec<Part> = (0..40)
        .map(|part| {
            let length = (chance.below(60) + 1) * 512;
            let kind = [BlockStatus::Data, BlockStatus::Zero, BlockStatus::Unallocated, BlockStatus::Data][part % 4];
            let byte = if kind == BlockStatus::Data && part % 8 != 3 { u8::try_from(part + 1).unwrap() } else { 0 };
            (length, kind, 0, byte)
        })
        .collect();
    Arc::new(TestDisk::new(&parts))
}

/// The bytes of a new target.
fn empty(format: Format, length: u64) -> Vec<u8> {
    if format == Format::Raw {
        return vec![0; limosa_page::to_usize(length)];
    }
    let storage = MemoryStorage::growing_to(MOST);
    let options = CreateOptions::default().cluster_size(4096).size(length);
    block_on(qcow2::create(&storage, None, &options)).unwrap();
    storage.contents()
}

fn open(format: Format, storage: Arc<dyn Storage>) -> Arc<dyn Disk> {
    if format == Format::Raw {
        return Raw::open(storage, &RawOptions::default()).unwrap();
    }
    let header = block_on(Header::read(&*storage)).unwrap();
    block_on(Qcow2::open(ImageParts::new(storage, header), Qcow2Options::default())).unwrap()
}

fn options(start: u64, compress: bool) -> ConvertOptions {
    let compress = compress.then(Compress::default);
    ConvertOptions::default().max_in_flight(3).chunk_size(8192).start(start).compress(compress)
}

fn copy(source: &Arc<TestDisk>, target: &dyn Disk, options: &ConvertOptions, checkpoints: &Checkpoints) {
    let sources = [Arc::clone(source) as Arc<dyn Disk>];
    convert_recorded(&sources, target, options, checkpoints, &|_| ControlFlow::Continue(())).unwrap();
}

#[test]
fn a_copy_goes_on_after_a_cut_at_any_moment() {
    let mut cuts = 0;
    for (seed, (format, compress)) in
        [(Format::Raw, false), (Format::Qcow2, false), (Format::Qcow2, true)].into_iter().cycle().take(6).enumerate()
    {
        let seed = seed as u64;
        println!("seed {seed}: {format}, compressed: {compress}");
        let source = source(seed);
        let power = PowerCut::new();
        let target = power.add_storage("target", empty(format, source.len()), MOST);
        let journal = power.add_storage("journal", Vec::new(), MOST);
        let checkpoints = Checkpoints::new(journal, Record::new(source.len(), "request", "source"), Duration::ZERO);
        {
            let disk = open(format, target);
            copy(&source, &*disk, &options(0, compress).target_is_zero(true), &checkpoints);
            block_on(disk.close()).unwrap();
        }
        let mut chance = SeededRandom::new(seed);
        for _ in 0..60 {
            let moment = limosa_page::to_usize(chance.below(power.moments() as u64 + 1));
            let loss = [Loss::None, Loss::All, Loss::Some(chance.below(u64::MAX))][cuts % 3];
            let mut contents = power.cut(moment, loss);
            cuts += 1;
            let journal = MemoryStorage::with_contents(contents.remove(1), MOST);
            let target: Arc<dyn Storage> = Arc::new(MemoryStorage::with_contents(contents.remove(0), MOST));
            let found = match block_on(journal::read(&journal)).unwrap() {
                Found::Record(found) => found,
                _ => Record::new(source.len(), "", ""),
            };
            if format == Format::Qcow2 {
                block_on(qcow2::repair(&*target, Repair::Leaks, CheckOptions::default())).unwrap();
            }
            let start = found.position;
            let again = Checkpoints::new(Arc::new(journal), found, Duration::ZERO);
            let disk = open(format, Arc::clone(&target));
            // Of a copy that has just begun, the target need not be empty either.
            copy(&source, &*disk, &options(start, compress), &again);
            let bytes = Buffer::zeroed(limosa_page::to_usize(source.len()));
            block_on(disk.read(GuestOffset(0), bytes.clone().into())).unwrap();
            assert!(bytes.to_vec() == source.bytes(), "seed {seed}, cut at {moment}, {loss:?}, from {start}");
            block_on(disk.close()).unwrap();
            drop(disk);
            if format == Format::Qcow2 {
                // As a copy that was continued does before it gets its name.
                let report = block_on(qcow2::repair(&*target, Repair::Leaks, CheckOptions::default())).unwrap();
                assert!(report.is_clean(), "seed {seed}, cut at {moment}, {loss:?}: {report:?}");
            }
        }
    }
    println!("{cuts} cuts");
}

/// Opens the copy of `length` bytes to a target in this folder.
fn opened(folder: &Path, length: u64, request: &str, source: &str) -> Result<(Resumable, Beginning), OperationError> {
    block_on(Resumable::open(Paths::of(&folder.join("target")).unwrap(), length, request, source))
}

#[test]
fn a_journal_that_is_of_another_copy_or_lies_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let part = folder.path().join("target.limosa-part");
    let begin = || {
        let (mut copy, beginning) = opened(folder.path(), 1 << 20, "request", "source").unwrap();
        assert_eq!(beginning, Beginning::New);
        fs::write(&part, "part").unwrap();
        block_on(copy.created()).unwrap();
        copy
    };
    // Killed while it was created: what is there counts for nothing.
    drop(opened(folder.path(), 1 << 20, "request", "source").unwrap());
    fs::write(&part, "half").unwrap();
    let mut copy = begin();
    // In use.
    assert!(opened(folder.path(), 1 << 20, "request", "source").is_err());
    copy.record.position = 4096;
    block_on(copy.write()).unwrap();
    drop(copy);
    let at = |length, request: &str, source: &str| match opened(folder.path(), length, request, source) {
        Ok((_, beginning)) => Ok(beginning),
        Err(error) => Err(error.to_string()),
    };
    assert_eq!(at(1 << 20, "request", "source"), Ok(Beginning::At(4096)));
    assert!(at(1 << 20, "other", "source").unwrap_err().contains("with other options: request, not other"));
    assert!(at(1 << 20, "request", "other").unwrap_err().contains("the source has changed"));
    assert!(at(2 << 20, "request", "source").unwrap_err().contains("the source has changed"));
    // Another file at that place, and none.
    fs::write(folder.path().join("other"), "other").unwrap();
    fs::rename(folder.path().join("other"), &part).unwrap();
    assert!(at(1 << 20, "request", "source").unwrap_err().contains("is not the file that was written"));
    fs::remove_file(&part).unwrap();
    assert!(at(1 << 20, "request", "source").unwrap_err().contains("is gone"));
    fs::remove_file(folder.path().join("target.limosa-journal")).unwrap();
    for position in [513, (1 << 20) + 512] {
        let mut copy = begin();
        copy.record.position = position;
        block_on(copy.write()).unwrap();
        drop(copy);
        assert!(at(1 << 20, "request", "source").unwrap_err().contains("what cannot be"));
        fs::remove_file(folder.path().join("target.limosa-journal")).unwrap();
        assert!(at(1 << 20, "request", "source").unwrap_err().contains("without a journal"));
        fs::remove_file(&part).unwrap();
    }
    drop(begin());
    fs::write(folder.path().join("target.limosa-journal"), "damaged").unwrap();
    assert!(at(1 << 20, "request", "source").unwrap_err().contains("is damaged"));
}

#[test]
fn a_copy_that_is_complete_gets_its_name_and_its_journal_goes() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let (mut copy, _) = opened(folder.path(), 4096, "request", "source").unwrap();
    fs::write(path("target.limosa-part"), "contents").unwrap();
    block_on(copy.created()).unwrap();
    // Cut between the new name and the end of the journal.
    fs::copy(path("target.limosa-journal"), path("kept")).unwrap();
    block_on(copy.complete(false)).unwrap();
    assert_eq!(fs::read(path("target")).unwrap(), b"contents");
    assert!(!path("target.limosa-journal").exists() && !path("target.limosa-part").exists());
    fs::rename(path("kept"), path("target.limosa-journal")).unwrap();
    let gone = opened(folder.path(), 4096, "request", "source").unwrap_err();
    assert!(gone.to_string().contains("is gone"), "{gone}");
    let storage =
        FileStorage::open(path("target.limosa-journal"), &FileOptions { io: Io::CallerThread, ..Default::default() });
    let storage = storage.unwrap();
    let Found::Record(mut record) = block_on(journal::read(&*storage)).unwrap() else { panic!("no record") };
    record.position = 4096;
    block_on(journal::write(&*storage, &mut record)).unwrap();
    drop(storage);
    let (copy, beginning) = opened(folder.path(), 4096, "request", "source").unwrap();
    assert_eq!(beginning, Beginning::Complete);
    block_on(copy.complete(true)).unwrap();
    assert!(!path("target.limosa-journal").exists());
}
