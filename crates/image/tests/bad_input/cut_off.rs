//! A file that others make shorter while the image is in use.

use std::fs::{File, read as file_bytes};
use std::path::Path;
use std::sync::Arc;

use limosa_image::Format;
use limosa_image::Policy;
use limosa_image::chain::{OpenOptions, open_image};
use limosa_image::qcow2::{CreateOptions, Header, create};
use limosa_image::raw::{Raw, RawOptions};
use limosa_image::reference::Reference;
use limosa_image::{Disk, GuestOffset};
use limosa_storage::{Buffer, Create, FileOptions, FileStorage, MemoryStorage, Storage, block_on};
use limosa_testkit::image::write;
use limosa_testkit::scratch;

use crate::read;

/// Bytes of the disk, and of what is read at once.
const SIZE: usize = 1 << 20;
const STEP: usize = 4096;

fn cut(path: &Path, length: u64) {
    File::options().write(true).open(path).unwrap().set_len(length).unwrap();
}

/// No sector of it is zeros.
fn contents() -> Vec<u8> {
    (0..SIZE).map(|at| u8::try_from(at / 512 % 251).unwrap() + 1).collect()
}

fn opened(path: &Path, format: Format, read_only: bool) -> Arc<dyn Disk> {
    let options = OpenOptions::default().format(Some(format)).read_only(read_only).policy(Policy::Follow);
    block_on(open_image(&Reference::file(path), &options)).map(|image| image.as_disk()).unwrap()
}

/// An image whose disk is all contents.
fn made(path: &Path, options: Option<&CreateOptions>) -> Format {
    let file = FileStorage::open(path, &FileOptions { create: Create::New, ..FileOptions::default() }).unwrap();
    let format = if options.is_some() { Format::Qcow2 } else { Format::Raw };
    match options {
        Some(options) => drop(block_on(create(&*file, None, options)).unwrap()),
        None => block_on(file.set_len(SIZE as u64)).unwrap(),
    }
    drop(file);
    let disk = opened(path, format, false);
    write(&*disk, 0, &contents());
    block_on(disk.close()).unwrap();
    format
}

fn kinds() -> [Option<CreateOptions>; 4] {
    let with = |cluster_size, extended_l2| {
        Some(CreateOptions::default().size(SIZE as u64).cluster_size(cluster_size).extended_l2(extended_l2))
    };
    [None, with(512, false), with(64 << 10, false), with(16 << 10, true)]
}

#[test]
fn what_is_read_from_a_file_that_was_cut_off_is_right_or_an_error_that_says_where() {
    let folder = scratch().unwrap();
    let (path, all) = (folder.path().join("image"), contents());
    for options in kinds() {
        let _ = std::fs::remove_file(&path);
        let format = made(&path, options.as_ref());
        let whole = file_bytes(&path).unwrap();
        let length = whole.len() as u64;
        for left in [0, 512, length / 3 / 512 * 512, length / 2 / 4096 * 4096, length - (80 << 10), length - 512] {
            std::fs::write(&path, &whole).unwrap();
            let disk = opened(&path, format, true);
            cut(&path, left);
            let (mut right, mut lost) = (0, 0);
            for at in (0..SIZE).step_by(STEP) {
                match read(&*disk, at as u64, STEP) {
                    Ok(found) => {
                        assert!(found == all[at..at + STEP], "{options:?} cut at {left:#x}: wrong at {at:#x}");
                        right += 1;
                    }
                    Err(said) => {
                        assert!(said.starts_with(path.to_str().unwrap()), "{said}");
                        assert!(said.contains(" at 0x") && said.contains(&format!("{left:#x}")), "{said}");
                        lost += 1;
                    }
                }
            }
            assert!(lost > 0 && (left < length / 3 || right > 0), "{options:?} cut at {left:#x}: {right}, {lost}");
        }
    }
}

#[test]
fn what_is_read_from_a_data_file_that_was_cut_off_is_right_or_an_error_that_names_it() {
    let folder = scratch().unwrap();
    let (path, contents_path, all) = (folder.path().join("image"), folder.path().join("contents"), contents());
    for (data_file_raw, extended_l2) in [(false, false), (true, false), (false, true)] {
        for path in [&path, &contents_path] {
            let _ = std::fs::remove_file(path);
        }
        let options = FileOptions { create: Create::New, ..FileOptions::default() };
        let [file, data] = [&path, &contents_path].map(|path| FileStorage::open(path, &options).unwrap());
        let options = CreateOptions::default()
            .size(SIZE as u64)
            // As is, it would be looked for in the current folder.
            .data_file(Some(contents_path.clone().into()))
            .data_file_raw(data_file_raw)
            .extended_l2(extended_l2);
        drop(block_on(create(&*file, Some(&*data), &options)).unwrap());
        drop((file, data));
        let disk = opened(&path, Format::Qcow2, false);
        write(&*disk, 0, &all);
        block_on(disk.close()).unwrap();
        drop(disk);
        for left in [0, 512, 300 << 10, (1 << 20) - 512] {
            std::fs::write(&contents_path, &all).unwrap();
            let disk = opened(&path, Format::Qcow2, true);
            cut(&contents_path, left);
            for at in (0..SIZE).step_by(STEP) {
                match read(&*disk, at as u64, STEP) {
                    Ok(found) => assert!(at + STEP <= usize::try_from(left).unwrap() && found == all[at..at + STEP]),
                    Err(said) => {
                        assert!(at + STEP > usize::try_from(left).unwrap(), "{said}");
                        assert!(said.starts_with(contents_path.to_str().unwrap()), "{said}");
                        assert!(said.contains(&format!("contents at {at:#x} of guest offset {at:#x}")), "{said}");
                        assert!(said.contains(&format!("the file ends at {left:#x}")), "{said}");
                    }
                }
            }
        }
    }
}

#[test]
fn a_file_that_always_ended_within_its_last_cluster_is_read_to_its_end() {
    let memory = MemoryStorage::with_contents(vec![7; 700], 1 << 20);
    let raw = Raw::open(Arc::new(memory), &RawOptions::default().read_only(true)).unwrap();
    assert_eq!(read(&*raw, 512, 512).unwrap(), [vec![7; 188], vec![0; 324]].concat());

    let folder = scratch().unwrap();
    let path = folder.path().join("image");
    let options = CreateOptions::default().size(SIZE as u64);
    made(&path, Some(&options));
    let length = std::fs::metadata(&path).unwrap().len();
    // The last of its clusters is the last one that was written.
    cut(&path, length - (32 << 10));
    let disk = opened(&path, Format::Qcow2, true);
    let found: Vec<_> = (0..SIZE).step_by(STEP).map(|at| read(&*disk, at as u64, STEP).unwrap()).collect();
    let zeros = found.iter().filter(|part| part.iter().all(|byte| *byte == 0)).count();
    assert_eq!(zeros, (32 << 10) / STEP);
}

#[test]
fn nothing_is_written_behind_what_is_left_of_an_image_and_it_is_marked() {
    let folder = scratch().unwrap();
    let path = folder.path().join("image");
    for options in kinds().into_iter().flatten() {
        for ahead in [false, true] {
            let what = format!("{} bytes, extended: {}, ahead: {ahead}", options.cluster_size, options.extended_l2);
            let _ = std::fs::remove_file(&path);
            made(&path, Some(&options.clone().size(64 << 20)));
            let disk = opened(&path, Format::Qcow2, false);
            if ahead {
                // Clusters have been taken ahead.
                write(&*disk, 8 << 20, &[7; 512]);
                block_on(disk.flush()).unwrap();
            }
            let left = 600 << 10;
            cut(&path, left);
            let before = file_bytes(&path).unwrap();
            let written = block_on(disk.write(GuestOffset(9 << 20), Buffer::from_slice(&[8; 512]).into()));
            let said = written.and_then(|()| block_on(disk.flush())).unwrap_err().to_string();
            assert!(said.starts_with(path.to_str().unwrap()), "{what}: {said}");
            assert!(said.contains("file at 0x") || said.contains("the file of 0x"), "{what}: {said}");
            // Nothing continues, in any of these cases.
            let _ = block_on(disk.flush());
            let _ = block_on(disk.close());
            drop(disk);
            let after = file_bytes(&path).unwrap();
            // The feature bits are bytes 72 to 79.
            assert!(after[80..before.len()] == before[80..], "{what}: what is left has changed");
            assert!(before[..72] == after[..72], "{what}: the header has changed");
            let file: Arc<dyn Storage> = FileStorage::open(&path, &FileOptions::default()).unwrap();
            assert!(block_on(Header::read(&*file)).map_or(true, |header| header.features.corrupt()), "{what}: {said}");
        }
    }
}
