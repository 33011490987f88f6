//! A journal with any words in its records: it is refused, and the image is as it was; or it is brought to the image,
//! which is in order afterwards, and shows nothing that neither it nor the journal had.

#![no_main]

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock};

use libfuzzer_sys::fuzz_target;
use limosa_image::qcow2::{
    CheckOptions, CreateOptions, Header, ImageParts, Journal, JournalFolder, Qcow2, Qcow2Options, check, create,
};
use limosa_image::{Disk, GuestOffset, ImageError};
use limosa_storage::{Buffer, Create, FileOptions, FileStorage, block_on};

const CLUSTER: u64 = 4096;

/// An image that a killed process left, its journal, and what both were.
struct Left {
    folder: PathBuf,
    image: PathBuf,
    journal: PathBuf,
    contents: Vec<u8>,
    records: Vec<u8>,
}

static LEFT: LazyLock<Left> = LazyLock::new(|| left().expect("an image and its journal"));

fn left() -> Result<Left, Box<dyn std::error::Error>> {
    let folder = std::env::temp_dir().join(format!("limosa-fuzz-journal-{}", std::process::id()));
    fs::create_dir_all(&folder)?;
    let image = folder.join("image");
    let new = FileOptions { create: Create::New, ..FileOptions::default() };
    let file = FileStorage::open(&image, &new)?;
    block_on(create(&*file, None, &CreateOptions::default().size(8 << 20).cluster_size(CLUSTER)))?;
    drop(file);
    let disk = open(&folder, &image)?;
    let write = |cluster: u64| disk.write(GuestOffset(cluster * CLUSTER), Buffer::from_slice(&[7; 4096]).into());
    block_on(write(1))?;
    block_on(write(3))?;
    block_on(disk.flush())?;
    for cluster in [2, 5, 600] {
        block_on(write(cluster))?;
    }
    block_on(disk.discard(GuestOffset(CLUSTER), CLUSTER))?;
    drop(disk);
    let journal = fs::read_dir(folder.join("journals"))?.next().ok_or("a journal")??.path();
    let (contents, records) = (fs::read(&image)?, fs::read(&journal)?);
    Ok(Left { folder, image, journal, contents, records })
}

fn open(folder: &Path, image: &Path) -> Result<Arc<Qcow2>, ImageError> {
    let file = FileStorage::open(image, &FileOptions::default())?;
    let header = block_on(Header::read(&*file))?;
    let journals = JournalFolder::open(&folder.join("journals")).expect("a folder of journals");
    let journal = Journal::open(&journals, &file, &header.geometry())?;
    block_on(Qcow2::open(ImageParts::new(file, header).journal(Some(journal)), Qcow2Options::default()))
}

fuzz_target!(|data: &[u8]| {
    let left = &*LEFT;
    let mut journal = left.records.get(..64 * 64).unwrap_or_default().to_vec();
    // Words that are changed: where, how, and by what.
    for patch in data.chunks_exact(4).take(32) {
        let &[at, how, low, high] = patch else { continue };
        let at = (16 + usize::from(at) % 112) * 8;
        let Some(word) = journal.get_mut(at..at + 8) else { continue };
        let value = u64::from(u16::from_le_bytes([low, high]));
        let old = u64::from_ne_bytes(word.try_into().unwrap_or_default());
        let new = match how % 6 {
            0 => value,
            1 => value << 12 | 1 << 63,
            2 => old ^ 1 << (value % 64),
            3 => old.wrapping_add(value),
            4 => old.wrapping_sub(value << 12),
            _ => u64::MAX,
        };
        word.copy_from_slice(&new.to_ne_bytes());
    }
    fs::write(&left.image, &left.contents).expect("the image");
    fs::write(&left.journal, &journal).expect("the journal");
    match open(&left.folder, &left.image) {
        Err(ImageError::Journal { .. }) => {
            assert!(fs::read(&left.image).expect("the image") == left.contents, "it was changed and refused");
        }
        Err(error) => panic!("{error}"),
        Ok(disk) => {
            let found = Buffer::zeroed(8 << 20);
            block_on(disk.read(GuestOffset(0), found.clone().into())).expect("a disk that is read");
            for cluster in found.to_vec().chunks(4096) {
                assert!(cluster == [7; 4096] || cluster == [0; 4096], "contents that were never there");
            }
            block_on(disk.close()).expect("a close");
            drop(disk);
            let file = FileStorage::open(&left.image, &FileOptions::default()).expect("the image");
            let report = block_on(check(&*file, CheckOptions::default())).expect("a check");
            assert!(report.is_clean(), "{report:?}");
        }
    }
});
