use std::sync::Arc;

use limosa_remote::{BlockCache, CacheOptions, RemoteObject};
use limosa_storage::Storage as _;
use limosa_testkit::{ObjectServerKind, stores_skipped};

use crate::{Bed, counted, pattern, read, url};

fn cache(folder: &tempfile::TempDir) -> Arc<BlockCache> {
    BlockCache::open(&CacheOptions::new(folder.path()).limit(64 << 20)).unwrap()
}

/// Waits until the cache has written this number of blocks.
fn written(cache: &BlockCache, blocks: u64) {
    limosa_testkit::wait_for("the cache", || (cache.counters().written >= blocks).then_some(()));
}

#[test]
fn what_was_read_once_is_not_fetched_again() {
    if stores_skipped() {
        return;
    }
    let bed = Bed::new(ObjectServerKind::S3s);
    let folder = tempfile::tempdir().unwrap();
    let bytes = pattern(20, (4 << 20) + 5);
    bed.put("k", &bytes);
    let first = cache(&folder);
    let object = RemoteObject::open(&url("k"), &bed.options().cache(Some(Arc::clone(&first)))).unwrap();
    assert_eq!(read(&*object, 0, bytes.len()).unwrap(), bytes);
    written(&first, 17);
    bed.proxy.take_requests();
    let second = cache(&folder);
    let object = RemoteObject::open(&url("k"), &bed.options().cache(Some(second))).unwrap();
    assert_eq!(read(&*object, 0, bytes.len()).unwrap(), bytes);
    assert_eq!(bed.proxy.take_requests().len(), 1, "only the one that opens it");
    assert_eq!(object.counters().cache_hits, 16);
    // Another content under the same name has nothing of it.
    let other = pattern(21, bytes.len());
    bed.put("k", &other);
    let object = RemoteObject::open(&url("k"), &bed.options().cache(Some(cache(&folder)))).unwrap();
    assert_eq!(read(&*object, 0, other.len()).unwrap(), other);
    assert_eq!(object.counters().cache_hits, 0);
}

#[test]
fn a_damaged_cache_costs_requests_and_no_bytes() {
    if stores_skipped() {
        return;
    }
    let bed = Bed::new(ObjectServerKind::S3s);
    let folder = tempfile::tempdir().unwrap();
    let bytes = pattern(22, 2 << 20);
    bed.put("k", &bytes);
    let first = cache(&folder);
    let object = RemoteObject::open(&url("k"), &bed.options().cache(Some(Arc::clone(&first)))).unwrap();
    read(&*object, 0, bytes.len()).unwrap();
    written(&first, 8);
    let files = std::fs::read_dir(folder.path().join("blocks")).unwrap().map(|entry| entry.unwrap().path());
    let file = files.filter(|path| !path.ends_with("lock")).last().unwrap();
    let mut damaged = std::fs::read(&file).unwrap();
    let end = damaged.len();
    damaged[end - 1000] ^= 1;
    damaged[end - 600_000] ^= 1;
    damaged.truncate(end - 500);
    std::fs::write(&file, damaged).unwrap();
    let object = RemoteObject::open(&url("k"), &bed.options().cache(Some(cache(&folder)))).unwrap();
    assert_eq!(read(&*object, 0, bytes.len()).unwrap(), bytes);
    let counters = counted(&object, |counters| counters.demanded >= 2);
    assert_eq!((counters.cache_hits, counters.demanded), (5, 2), "{counters:?}");
}

#[test]
fn a_prefetch_fills_the_cache_beyond_the_memory() {
    if stores_skipped() {
        return;
    }
    let bed = Bed::new(ObjectServerKind::S3s);
    let folder = tempfile::tempdir().unwrap();
    let bytes = pattern(23, 16 << 20);
    bed.put("k", &bytes);
    let kept = cache(&folder);
    let mut options = bed.options().cache(Some(Arc::clone(&kept)));
    options.memory = 1 << 20;
    let object = RemoteObject::open(&url("k"), &options).unwrap();
    object.prefetch(std::slice::from_ref(&(0..bytes.len() as u64)));
    limosa_testkit::wait_for("the prefetch", || (object.counters().prefetched >= 63).then_some(()));
    written(&kept, 60);
    let before = object.counters().demanded;
    assert_eq!(read(&*object, 0, bytes.len()).unwrap(), bytes);
    assert!(object.counters().demanded - before <= 4, "{:?}", object.counters());
}
