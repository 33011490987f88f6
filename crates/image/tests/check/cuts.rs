//! A repair that is cut short.

use std::sync::Arc;

use limosa_image::GuestOffset;
use limosa_image::qcow2::{CheckOptions, Header, ImageParts, Qcow2, Qcow2Options, Repair, read_snapshots, repair};
use limosa_image::{Disk, ImageError};
use limosa_storage::testing::{Loss, PowerCut, SeededRandom};
use limosa_storage::{Buffer, MemoryStorage, Storage, block_on};

use crate::breaking::Tables;
use crate::{seed, times, zoo};

/// The guest's contents, in pieces; nothing for clusters that cannot be read.
type Contents = Vec<Option<Vec<u8>>>;

/// The guest's contents of an image.
pub(crate) fn contents(bytes: &[u8]) -> Result<Contents, ImageError> {
    let file = MemoryStorage::with_contents(bytes.to_vec(), u64::MAX);
    let header = block_on(Header::read(&file))?;
    seen(file, header, None)
}

/// The guest's contents of an image, and of its snapshots.
pub(crate) fn views(bytes: &[u8], data: Option<&[u8]>) -> Result<Vec<Contents>, ImageError> {
    let file = MemoryStorage::with_contents(bytes.to_vec(), u64::MAX);
    let header = block_on(Header::read(&file))?;
    let mut all = vec![seen(file.clone(), header.clone(), data)?];
    for snapshot in block_on(read_snapshots(&file, &header))? {
        let mut as_then = header.clone();
        as_then.l1 = snapshot.l1;
        all.push(seen(file.clone(), as_then, data)?);
    }
    Ok(all)
}

fn seen(file: MemoryStorage, header: Header, data: Option<&[u8]>) -> Result<Contents, ImageError> {
    const STEP: usize = 4096;
    let data_file =
        data.map(|bytes| Arc::new(MemoryStorage::with_contents(bytes.to_vec(), u64::MAX)) as Arc<dyn Storage>);
    block_on(async {
        let options = Qcow2Options::default().read_only(true);
        let disk = Qcow2::open(ImageParts::new(Arc::new(file), header).data_file(data_file), options).await?;
        let mut all = Vec::new();
        for at in (0..disk.len()).step_by(STEP) {
            let buffer = Buffer::zeroed(STEP);
            let read = disk.read(GuestOffset(at), buffer.clone().into()).await;
            all.push(read.is_ok().then(|| buffer.to_vec()));
        }
        Ok(all)
    })
}

#[test]
fn a_repair_that_was_cut_short_makes_nothing_worse_and_is_finished_by_the_next_one() {
    if limosa_testkit::qemu_skipped() {
        return;
    }
    let folder = limosa_testkit::scratch().unwrap();
    let mut chance = SeededRandom::new(seed());
    let (mut cuts, mut compared) = (0, 0);
    for name in [
        "usual",
        "tiny",
        "width2",
        "width64",
        "subclusters",
        "bitmaps",
        "zlib",
        "zstd",
        "fine-zlib",
        "data-file",
        "lazy",
        "old",
    ] {
        let whole = std::fs::read(zoo::one(folder.path(), name).path).unwrap();
        let data = std::fs::read(folder.path().join(format!("{name}.data"))).ok();
        let views = |bytes: &[u8]| views(bytes, data.as_deref());
        for _ in 0..times(6) {
            let mut bytes = whole.clone();
            let tables = Tables::of(&bytes);
            let what: Vec<_> = (0..=chance.below(3)).map(|_| tables.break_one(&mut bytes, &mut chance)).collect();
            let power = PowerCut::new();
            let storage = power.add_storage("image", bytes.clone(), 1 << 30);
            let Ok(report) = block_on(repair(&*storage, Repair::All, CheckOptions::default())) else { continue };
            if !report.is_clean() {
                continue;
            }
            let before = views(&bytes);
            let expected = views(&power.cut(power.moments(), Loss::None)[0]).unwrap();
            for moment in 0..=power.moments() {
                for loss in [Loss::None, Loss::All, Loss::Some(chance.bits())] {
                    let said = format!("{name} {what:#?}, cut at {moment} of {} with {loss:?}", power.moments());
                    let cut = power.cut(moment, loss).remove(0);
                    // It is no worse: what could be read reads as before, or as it will.
                    if let Ok(before) = &before {
                        let found = views(&cut).unwrap_or_else(|error| panic!("{said}: {error}"));
                        if before.len() == found.len() && before.len() == expected.len() {
                            let all =
                                before.iter().flatten().zip(found.iter().flatten()).zip(expected.iter().flatten());
                            let worse = all
                                .map(|((before, found), expected)| {
                                    before == found || found == expected || before.is_none()
                                })
                                .position(|fine| !fine);
                            assert_eq!(worse, None, "{said}");
                            compared += 1;
                        }
                    }
                    let again = MemoryStorage::with_contents(cut, 1 << 30);
                    let report = block_on(repair(&again, Repair::All, CheckOptions::default()))
                        .unwrap_or_else(|error| panic!("{said}: {error}"));
                    assert!(report.is_clean(), "{said}: {report:#?}");
                    let found = views(&again.contents()).unwrap();
                    assert_eq!(found.len(), expected.len(), "{said}");
                    let all = found.iter().flatten().zip(expected.iter().flatten());
                    let differ = all.map(|(found, expected)| found == expected).position(|same| !same);
                    assert_eq!(differ, None, "{said}");
                    cuts += 1;
                }
            }
        }
    }
    println!("{cuts} cuts, {compared} compared with what was before");
    assert!(cuts > 100 && compared > 100);
}
