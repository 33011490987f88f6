//! Snapshots whose bytes are lent by another crate: what is read is what a file would give.

use std::error::Error;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use limosa_channel::Counters;
use limosa_migrate::stored::PageSource;
use limosa_page::{PAGE_LEN, PageNumber, PageRange};
use limosa_snapshot::{Manifest, PackedSummary, Snapshot, SnapshotBytes, SnapshotError, WorkingSet};

use crate::fixture::{CHECKED, put, tail, writer};

/// Bytes in memory that can be cut off from their reader.
#[derive(Debug)]
struct Far {
    bytes: Vec<u8>,
    is_gone: AtomicBool,
}

impl SnapshotBytes for Far {
    fn length(&self) -> u64 {
        self.bytes.len() as u64
    }

    fn read_exact_at(&self, into: &mut [u8], offset: u64) -> Result<(), Box<dyn Error + Send + Sync>> {
        if self.is_gone.load(Ordering::Relaxed) {
            return Err("the store is gone".into());
        }
        let start = usize::try_from(offset)?;
        into.copy_from_slice(self.bytes.get(start..start + into.len()).ok_or("beyond the end")?);
        Ok(())
    }

    fn counters(&self) -> Counters {
        Counters::default()
    }

    fn packed(&self) -> Option<PackedSummary> {
        None
    }

    fn object_length(&self) -> Option<u64> {
        Some(self.length())
    }
}

#[test]
fn a_snapshot_that_is_in_no_file_is_read_as_one_that_is() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("vm");
    let mut pages = writer(&path, 600, CHECKED);
    for page in (0..600).step_by(3) {
        put(&mut pages, 0, page, &[page]);
    }
    pages.finish(&tail("running"), Manifest::new()).unwrap();
    let plain = Snapshot::open(&path).unwrap();
    let file = std::fs::File::open(&path).unwrap();
    let mut bytes = vec![0; usize::try_from(file.metadata().unwrap().len()).unwrap()];
    file.read_exact_at(&mut bytes, 0).unwrap();
    let far = Arc::new(Far { bytes, is_gone: AtomicBool::new(false) });
    let name = Path::new("s3://bucket/vm");
    let snapshot = Snapshot::from_remote(name, Arc::clone(&far) as Arc<dyn SnapshotBytes>).unwrap();
    assert_eq!((snapshot.id(), snapshot.length(), snapshot.path()), (plain.id(), plain.length(), name));
    assert!(snapshot.is_remote() && !snapshot.is_packed() && plain.is_mappable() && !snapshot.is_mappable());
    assert_eq!(snapshot.not_plain_reason(), Some("is in an object store"));
    snapshot.lock_serving().unwrap();
    snapshot.check_unchanged().unwrap();
    assert_eq!(snapshot.locate(0, PageNumber(3)), None, "nothing is sent from its file");
    assert_eq!(WorkingSet::of(&snapshot).unwrap(), None);
    let (mut got, mut wanted) = (vec![1; 600 * PAGE_LEN], vec![2; 600 * PAGE_LEN]);
    let all = PageRange::starting_at(PageNumber(0), 600);
    plain.read(0, all, &mut wanted).unwrap();
    snapshot.read(0, all, &mut got).unwrap();
    assert!(got == wanted);
    // Never zeros in the place of what cannot be had.
    far.is_gone.store(true, Ordering::Relaxed);
    let error = snapshot.read(0, PageRange::starting_at(PageNumber(3), 1), &mut got[..PAGE_LEN]).unwrap_err();
    assert!(error.to_string().contains("s3://bucket/vm"), "{error}");
    let opened = Snapshot::from_remote(name, far).unwrap_err();
    assert!(matches!(opened, SnapshotError::Packed { .. }), "{opened:?}");
}
