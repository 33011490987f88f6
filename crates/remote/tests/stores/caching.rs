use std::os::unix::fs::MetadataExt as _;
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use limosa_remote::{BlockCache, CacheOptions, RemoteObject, RemoteOptions};
use limosa_storage::Storage as _;
use limosa_testkit::{ObjectServerKind, Process, own_test, stores_skipped};

use crate::{Bed, counted, pattern, read, store, url};

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
    let id = object.content_id();
    // Another content under the same name has nothing of it.
    let other = pattern(21, bytes.len());
    bed.put("k", &other);
    let object = RemoteObject::open(&url("k"), &bed.options().cache(Some(cache(&folder)))).unwrap();
    assert_eq!(read(&*object, 0, other.len()).unwrap(), other);
    assert_eq!(object.counters().cache_hits, 0);
    assert!(id.is_some() && object.content_id().is_some() && object.content_id() != id);
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

/// The object that processes share a cache for.
fn shared() -> Vec<u8> {
    pattern(24, (8 << 20) + 99)
}

/// Run by the next test, in processes of its own: some are killed.
#[test]
#[ignore = "a part of another test"]
fn reads_an_object_through_a_shared_cache() {
    let Some(address) = std::env::var_os("LIMOSA_TEST_STORE") else { return };
    let address = address.to_str().unwrap().parse().unwrap();
    let folder = std::env::var_os("LIMOSA_TEST_CACHE").unwrap();
    let cache = BlockCache::open(&CacheOptions::new(folder).limit(64 << 20)).unwrap();
    let options = RemoteOptions::default().store(store(address)).cache(Some(cache));
    let object = RemoteObject::open(&url("k"), &options).unwrap();
    assert!(read(&*object, 0, shared().len()).unwrap() == shared());
}

#[test]
fn processes_that_share_a_cache_read_the_right_bytes_although_one_is_killed_while_it_writes() {
    if stores_skipped() {
        return;
    }
    let bed = Bed::new(ObjectServerKind::S3s);
    let bytes = shared();
    bed.put("k", &bytes);
    let mut killed_early = 0;
    for trial in 0..3 {
        let folder = tempfile::tempdir().unwrap();
        bed.proxy.set_rate(Some(32 << 20));
        let reader = || {
            let mut command = own_test!(reads_an_object_through_a_shared_cache);
            command.env("LIMOSA_TEST_STORE", bed.proxy.address().to_string());
            command.env("LIMOSA_TEST_CACHE", folder.path()).stdout(Stdio::null());
            Process::spawn("a reader", command).unwrap()
        };
        let (victim, other) = (reader(), reader());
        let on_disk = || {
            let files = std::fs::read_dir(folder.path().join("blocks")).into_iter().flatten();
            files.map(|file| file.unwrap().metadata().unwrap().blocks() * 512).sum::<u64>()
        };
        limosa_testkit::wait_for("blocks on disk", || (on_disk() >= (1 + 2 * trial) << 19).then_some(()));
        killed_early += u32::from(victim.try_wait().unwrap().is_none());
        victim.kill();
        assert!(other.wait(Duration::from_secs(60)).unwrap().success(), "the other one read wrong bytes");
        bed.proxy.set_rate(None);
        let kept = cache(&folder);
        let object = RemoteObject::open(&url("k"), &bed.options().cache(Some(Arc::clone(&kept)))).unwrap();
        assert!(read(&*object, 0, bytes.len()).unwrap() == bytes);
        assert!(object.counters().cache_hits > 0 && kept.counters().errors == 0, "{:?}", kept.counters());
    }
    assert!(killed_early > 0, "all had ended before they were killed");
}
