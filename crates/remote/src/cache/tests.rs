use std::os::unix::fs::{MetadataExt as _, PermissionsExt};
use std::path::PathBuf;

use bytes::Bytes;
use proptest::prelude::*;
use tempfile::TempDir;

use super::*;

const BLOCK: u64 = 4096;

/// The bytes of a block of an object: none is like another.
fn contents(object: u8, block: u64, length: u64) -> Vec<u8> {
    (0..length).map(|at| (at ^ (at >> 8) ^ block.wrapping_mul(7)).to_le_bytes()[0] ^ object).collect()
}

fn cache(folder: &TempDir, limit: u64) -> Arc<BlockCache> {
    BlockCache::open(&CacheOptions::new(folder.path().join("cache")).limit(limit)).unwrap()
}

fn files(folder: &TempDir) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder.path().join("cache/blocks")).unwrap();
    let mut files: Vec<_> = entries.map(|entry| entry.unwrap().path()).filter(|path| !path.ends_with("lock")).collect();
    files.sort();
    files
}

#[test]
fn blocks_are_found_again_by_this_process_and_the_next_one() {
    let folder = tempfile::tempdir().unwrap();
    let length = 10 * BLOCK + 5;
    {
        let cache = cache(&folder, 1 << 20);
        let object = cache.object("a", length, BLOCK).unwrap();
        assert_eq!(object.read(0), None);
        object.write(0, &contents(1, 0, BLOCK));
        object.write(10, &contents(1, 10, 5));
        assert!(object.has(0) && object.has(10) && !object.has(1) && !object.has(11));
        assert!(Arc::ptr_eq(&object, &cache.object("a", length, BLOCK).unwrap()));
    }
    let cache = cache(&folder, 1 << 20);
    let object = cache.object("a", length, BLOCK).unwrap();
    assert_eq!(object.read(0), Some(Bytes::from(contents(1, 0, BLOCK))));
    assert_eq!(object.read(10), Some(Bytes::from(contents(1, 10, 5))));
    for other in
        [cache.object("b", length, BLOCK), cache.object("a", length + 1, BLOCK), cache.object("a", length, 8192)]
    {
        assert_eq!(other.unwrap().read(0), None);
    }
    assert_eq!((cache.counters().hits, cache.counters().errors), (2, 0));
}

#[test]
fn a_file_of_another_version_is_thrown_away() {
    let folder = tempfile::tempdir().unwrap();
    cache(&folder, 1 << 20).object("a", BLOCK, BLOCK).unwrap().write(0, &contents(1, 0, BLOCK));
    let path = files(&folder).remove(0);
    let mine = std::fs::read(&path).unwrap();
    let mut theirs = mine.clone();
    // The last byte of the magic. All else is as it was, also that the checksum fits.
    theirs[15] += 1;
    let checked = layout::header_length() - 4;
    let sum = crc32c::crc32c(&theirs[..checked]).to_le_bytes();
    theirs[checked..checked + 4].copy_from_slice(&sum);
    std::fs::write(&path, theirs).unwrap();
    let cache = cache(&folder, 1 << 20);
    let object = cache.object("a", BLOCK, BLOCK).unwrap();
    assert_eq!(object.read(0), None);
    object.write(0, &contents(1, 0, BLOCK));
    assert_eq!(object.read(0), Some(Bytes::from(contents(1, 0, BLOCK))));
    assert_eq!(std::fs::read(&path).unwrap()[..=checked], mine[..=checked], "there is a file of this version again");
    assert_eq!((cache.counters().damaged, cache.counters().errors), (1, 0));
}

#[test]
fn files_are_the_users_alone_and_links_are_not_followed() {
    let folder = tempfile::tempdir().unwrap();
    let mine = cache(&folder, 1 << 20);
    mine.object("a", BLOCK, BLOCK).unwrap().write(0, &contents(1, 0, BLOCK));
    let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&folder.path().join("cache/blocks")), 0o700);
    let file = files(&folder).remove(0);
    assert_eq!(mode(&file), 0o600);
    // A link in its place is replaced, and what it names is not touched.
    let victim = folder.path().join("victim");
    std::fs::rename(&file, &victim).unwrap();
    std::os::unix::fs::symlink(&victim, &file).unwrap();
    let before = std::fs::read(&victim).unwrap();
    let object = cache(&folder, 1 << 20).object("a", BLOCK, BLOCK).unwrap();
    assert_eq!(object.read(0), None);
    object.write(0, &contents(2, 0, BLOCK));
    assert_eq!(std::fs::read(&victim).unwrap(), before);
    assert!(!std::fs::symlink_metadata(&file).unwrap().is_symlink());
    // Neither is a folder that others can write to.
    std::fs::set_permissions(folder.path().join("cache/blocks"), PermissionsExt::from_mode(0o777)).unwrap();
    let error = BlockCache::open(&CacheOptions::new(folder.path().join("cache"))).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::PermissionDenied);
}

#[test]
fn the_oldest_files_and_then_the_oldest_blocks_go_first() {
    let folder = tempfile::tempdir().unwrap();
    let limit = 64 * BLOCK;
    let cache = cache(&folder, limit);
    for number in 0..3 {
        let object = cache.object(&number.to_string(), 100 * BLOCK, BLOCK).unwrap();
        (0..16).for_each(|block| object.write(block, &contents(1, block, BLOCK)));
        // The file's times are those of the last use.
        let old = std::time::SystemTime::now() - std::time::Duration::from_secs(1000 - number);
        let newest = files(&folder).into_iter().max_by_key(|file| std::fs::metadata(file).unwrap().mtime()).unwrap();
        std::fs::File::open(newest).unwrap().set_modified(old).unwrap();
    }
    let object = cache.object("large", 1000 * BLOCK, BLOCK).unwrap();
    (0..1000).for_each(|block| object.write(block, &contents(2, block, BLOCK)));
    let used: u64 = files(&folder).iter().map(|file| std::fs::metadata(file).unwrap().blocks() * 512).sum();
    assert!(used <= limit + limit / 16, "{used} of {limit} bytes");
    assert_eq!(files(&folder).len(), 1);
    let found = (0..1000).filter(|block| object.read(*block).is_some()).count();
    assert!((16..=64).contains(&found), "{found} blocks");
    assert!(cache.counters().evicted > 900 * BLOCK && cache.counters().errors == 0, "{:?}", cache.counters());
}

#[test]
fn a_file_that_another_process_uses_loses_blocks_and_not_its_name() {
    let folder = tempfile::tempdir().unwrap();
    let limit = 64 * BLOCK;
    let (theirs, mine) = (cache(&folder, limit), cache(&folder, limit));
    let old = theirs.object("old", 100 * BLOCK, BLOCK).unwrap();
    (0..32).for_each(|block| old.write(block, &contents(1, block, BLOCK)));
    let file = files(&folder).remove(0);
    let long_ago = std::time::SystemTime::now() - std::time::Duration::from_secs(1000);
    std::fs::File::open(&file).unwrap().set_modified(long_ago).unwrap();
    let new = mine.object("new", 1000 * BLOCK, BLOCK).unwrap();
    (0..200).for_each(|block| new.write(block, &contents(2, block, BLOCK)));
    let used = || files(&folder).iter().map(|file| std::fs::metadata(file).unwrap().blocks() * 512).sum::<u64>();
    assert!(used() <= limit + limit / 16, "{} of {limit} bytes", used());
    // Its user finds nothing wrong, writes again, and that is counted: both have the same file.
    assert!(file.exists() && (0..32).filter(|block| old.read(*block).is_some()).count() < 32);
    (0..200).for_each(|block| old.write(block % 100, &contents(1, block % 100, BLOCK)));
    assert!(used() <= limit + limit / 16, "{} of {limit} bytes", used());
    let third = cache(&folder, limit).object("old", 100 * BLOCK, BLOCK).unwrap();
    let found = (0..100).filter(|block| old.read(*block).is_some()).collect::<Vec<_>>();
    assert!(!found.is_empty() && found.iter().all(|block| third.read(*block) == old.read(*block)));
    assert_eq!([theirs.counters(), mine.counters()].map(|counters| (counters.errors, counters.damaged)), [(0, 0); 2]);
}

#[test]
fn what_cannot_be_kept_is_not_kept() {
    let folder = tempfile::tempdir().unwrap();
    let cache = cache(&folder, 1 << 20);
    assert!(cache.object("long", u64::MAX, BLOCK).is_none() && cache.object("empty", 0, BLOCK).is_none());
    assert!(cache.object("coarse", 1 << 30, 1 << 20).is_none());
    // Nobody can write any more: reads continue without it.
    let object = cache.object("a", 10 * BLOCK, BLOCK).unwrap();
    std::fs::remove_dir_all(folder.path().join("cache")).unwrap();
    object.write(0, &contents(1, 0, BLOCK));
    assert!(cache.object("b", BLOCK, BLOCK).is_none() && cache.counters().errors == 1);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// A block that is read is the one that was written, also after damage to the file of an object.
    #[test]
    fn a_damaged_file_gives_no_wrong_bytes(
        written in proptest::collection::vec(0..12_u64, 0..12),
        damage in proptest::collection::vec((0..5_u8, any::<u64>(), any::<u8>(), 0..9000_usize), 1..4),
    ) {
        let folder = tempfile::tempdir().unwrap();
        let length = 11 * BLOCK + 100;
        let bytes = |block: u64| contents(3, block, BLOCK.min(length - block * BLOCK));
        {
            let object = cache(&folder, 1 << 20).object("a", length, BLOCK).unwrap();
            written.iter().for_each(|block| object.write(*block, &bytes(*block)));
        }
        let path = files(&folder).remove(0);
        let mut file = std::fs::read(&path).unwrap();
        for (kind, place, byte, count) in damage {
            if file.is_empty() {
                break;
            }
            let place = usize::try_from(place % file.len() as u64).unwrap();
            let end = file.len().min(place + count);
            match kind {
                // Cut, a byte changed, a part of zeros as after a power cut, a part of other bytes, a part moved.
                0 => file.truncate(place),
                1 => file[place] ^= byte,
                2 => file[place..end].fill(0),
                3 => file[place..end].fill(byte),
                _ => file.copy_within(place..end, (end - place).min(place)),
            }
        }
        std::fs::write(&path, &file).unwrap();
        let object = cache(&folder, 1 << 20).object("a", length, BLOCK).unwrap();
        for block in 0..12 {
            if let Some(found) = object.read(block) {
                prop_assert_eq!(&found[..], &bytes(block)[..]);
            }
            object.write(block, &bytes(block));
            prop_assert_eq!(object.read(block), Some(Bytes::from(bytes(block))));
        }
    }
}
