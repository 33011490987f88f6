//! Disks that become longer, and are replaced by others, while clients use them.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use limosa_export::nbd::ServerOptions;
use limosa_export::{Export, ExportError, Exports};
use limosa_image::qcow2::CreateOptions;
use limosa_image::raw::{Raw, RawOptions};
use limosa_image::{Disk, Format, GuestOffset, ImageError};
use limosa_storage::testing::{Failing, Fault};
use limosa_storage::{Buffer, MemoryStorage, Operation, block_on};
use limosa_testkit::image::TestImage;
use limosa_testkit::{NbdClient, scratch, wait_for};

use crate::bed::{Bed, assert_clean, make_qcow2, open_image, pattern, qcow2, raw};

/// For what takes moments.
const LONG: Duration = Duration::from_secs(60);
const SIZE: u64 = 1 << 20;

fn served(export: Export) -> (Bed, Arc<Export>, NbdClient) {
    let exports = Exports::new();
    let export = exports.add(export).unwrap();
    let bed = Bed::with(exports, ServerOptions::default());
    let client = bed.client();
    (bed, export, client)
}

#[test]
fn a_disk_becomes_longer_under_its_clients() {
    let folder = scratch().unwrap();
    let path = folder.path().join("disk.raw");
    std::fs::write(&path, vec![7; 1 << 20]).unwrap();
    for disk in [open_image(&path, Format::Raw, false), qcow2(&folder, SIZE)] {
        let (bed, export, mut client) = served(Export::new("", disk).unwrap());
        assert_eq!(client.write(0, SIZE, &[1; 512]).unwrap(), 28, "past the end");
        export.resize(SIZE + 512, LONG).unwrap();
        assert_eq!((export.size(), export.disk().len()), (SIZE + 512, SIZE + 512));
        assert_eq!(client.read(SIZE, 512).unwrap(), [0; 512]);
        assert_eq!(client.write(0, SIZE, &[1; 512]).unwrap(), 0);
        let mut late = bed.client();
        assert_eq!(late.read(SIZE, 512).unwrap(), [1; 512]);
        for size in [SIZE, SIZE + 513] {
            let refused = export.resize(size, LONG).unwrap_err();
            assert!(matches!(refused, ExportError::Image(ImageError::Unsupported { .. })), "{refused}");
        }
        assert_eq!(late.write(0, SIZE + 512, &[1; 512]).unwrap(), 28);
        drop((client, late, export));
        bed.stop();
    }
    assert_clean(&folder.path().join("disk.qcow2"));
}

#[test]
fn a_part_and_a_disk_that_is_only_read_keep_their_length() {
    let part = Export::new("", raw(vec![7; 4096])).unwrap().part(0, Some(4096)).unwrap();
    assert!(matches!(part.resize(8192, LONG), Err(ExportError::Part(_))));
    let read_only = Export::new("", raw(vec![7; 4096])).unwrap().read_only(true);
    assert!(matches!(read_only.resize(8192, LONG), Err(ExportError::Image(ImageError::ReadOnly { .. }))));
    assert_eq!(read_only.disk().len(), 4096);
}

#[test]
fn a_quiesced_export_stays_quiesced_when_its_disk_changes() {
    let folder = scratch().unwrap();
    let export = Export::new("", qcow2(&folder, 4096)).unwrap();
    export.quiesce(LONG).unwrap();
    export.resize(8192, LONG).unwrap();
    assert!(export.is_quiesced());
    export.replace_disk::<ExportError>(LONG, || Ok(raw(vec![8; 8192])), || unreachable!()).unwrap();
    assert!(export.is_quiesced());
    export.resume().unwrap();
    export.replace_disk::<ExportError>(LONG, || Ok(raw(vec![9; 8192])), || unreachable!()).unwrap();
    assert!(!export.is_quiesced());
}

#[test]
fn clients_that_send_nothing_let_go_of_a_disk_that_was_replaced() {
    let (old, new) = (raw(vec![7; 4096]), raw(vec![8; 4096]));
    let before = Arc::downgrade(&old);
    let (bed, export, mut client) = served(Export::new("", old).unwrap());
    assert_eq!(client.read(0, 1).unwrap(), [7]);
    let _silent = bed.client();
    export.replace_disk::<ExportError>(LONG, || Ok(new), || unreachable!()).unwrap();
    wait_for("its files to be closed", || before.upgrade().is_none().then_some(()));
    assert_eq!(client.read(0, 1).unwrap(), [8]);
}

#[test]
fn a_disk_that_does_not_fit_does_not_take_the_place_of_another() {
    let (bed, export, mut client) = served(Export::new("", raw(vec![7; 8192])).unwrap());
    let fresh = || Ok::<_, ExportError>(raw(vec![9; 8192]));
    let short = export.replace_disk(LONG, || Ok(raw(vec![8; 4096])), fresh).unwrap_err();
    assert!(matches!(short, ExportError::PastEnd { length: 4096, size: Some(8192), .. }), "{short}");
    assert_eq!(client.read(0, 512).unwrap(), [9; 512], "opened again");
    let failed = || Err(ExportError::NotFound("x".into()));
    assert!(matches!(export.replace_disk(LONG, failed, fresh), Err(ExportError::NotFound(_))));
    assert_eq!(client.read(0, 512).unwrap(), [9; 512]);
    assert!(export.replace_disk(LONG, failed, failed).is_err());
    assert_eq!(client.write(0, 0, &[1; 512]).unwrap(), 5, "its disk is closed, and no request is lost silently");
    export.replace_disk(LONG, fresh, failed).unwrap();
    assert_eq!(client.write(0, 0, &[1; 512]).unwrap(), 0);
    drop((client, export));
    bed.stop();
}

#[test]
fn a_disk_that_cannot_be_flushed_stays_in_its_place_and_loses_nothing() {
    let failing = Failing::only(&[Operation::Write, Operation::Allocate]);
    let image = TestImage::new(&CreateOptions::default().size(SIZE)).over(|file| failing.wrap(file));
    let (bed, export, mut client) = served(Export::new("", image.open()).unwrap());
    assert_eq!(client.write(0, 4096, &pattern(1, 4096)).unwrap(), 0);
    failing.fail(0, u64::MAX, Fault::NoSpace);
    let unused = || -> Result<Arc<dyn Disk>, ExportError> { unreachable!("nothing is opened") };
    export.replace_disk(LONG, unused, unused).unwrap_err();
    bed.exports.remove("", LONG).unwrap_err();
    failing.mend();
    assert_eq!(client.read(4096, 4096).unwrap(), pattern(1, 4096));
    assert_eq!(client.write(0, 8192, &pattern(2, 4096)).unwrap(), 0);
    export.flush().unwrap();
    drop(export);
    bed.exports.remove("", LONG).unwrap();
    drop(client);
    bed.stop();
}

/// Some have requests wait and give up soon, or let them begin again, while the disk is replaced: a request never meets
/// one that is closed.
#[test]
fn those_who_have_requests_wait_do_not_let_those_of_each_other_begin() {
    let memory = MemoryStorage::with_contents(vec![7; 8192], 8192);
    let open = || Ok::<_, ExportError>(Raw::open(Arc::new(memory.clone()), &RawOptions::default())?);
    let (bed, export, client) = served(Export::new("", open().unwrap()).unwrap());
    drop(client);
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        for within in [0, 200, LONG.as_micros()] {
            let within = Duration::from_micros(u64::try_from(within).unwrap());
            let (export, over) = (&export, &over);
            scope.spawn(move || {
                while !over.load(Ordering::Relaxed) {
                    let _ = export.quiesce(within);
                    let _ = export.resume();
                }
            });
        }
        for number in 0..2 {
            let (socket, over) = (bed.socket(), &over);
            scope.spawn(move || {
                let mut client = NbdClient::open(&socket, "", &[]).unwrap();
                while !over.load(Ordering::Relaxed) {
                    assert_eq!(client.write(0, number * 4096, &pattern(1, 4096)).unwrap(), 0);
                }
            });
        }
        let mut replaced = 0;
        while replaced < 200 {
            let slowly = || {
                thread::sleep(Duration::from_micros(300));
                Ok(open()? as Arc<dyn Disk>)
            };
            match export.replace_disk(LONG, slowly, || unreachable!()) {
                Ok(()) => replaced += 1,
                Err(ExportError::Resumed(_)) => {}
                Err(error) => panic!("{error}"),
            }
        }
        over.store(true, Ordering::Relaxed);
    });
    drop(export);
    bed.stop();
}

fn put_overlay(export: &Export, below: &Path, overlay: &Path) {
    let options = CreateOptions::default().size(SIZE).backing_file(Some(below.into()));
    make_qcow2(overlay, &options.backing_format(Some("qcow2".into())));
    let open = || Ok::<_, ExportError>(open_image(overlay, Format::Qcow2, false));
    export.replace_disk(LONG, open, || unreachable!()).unwrap();
}

fn contents(path: &Path) -> Vec<u8> {
    let (disk, found) = (open_image(path, Format::Qcow2, true), Buffer::zeroed(1 << 20));
    block_on(disk.read(GuestOffset(0), found.clone().into())).unwrap();
    found.to_vec()
}

/// Each of two writers counts in its half of the blocks. What an image has when it is frozen is what was acknowledged
/// until then, and perhaps the one write after it.
#[test]
fn overlays_are_put_on_a_disk_while_clients_write_and_no_write_is_lost() {
    const BLOCK: usize = 4096;
    let folder = scratch().unwrap();
    let (bed, export, client) = served(Export::new("", qcow2(&folder, SIZE)).unwrap());
    drop(client);
    let over = Arc::new(AtomicBool::new(false));
    let acknowledged: [Arc<std::sync::atomic::AtomicU64>; 2] = Default::default();
    let writers: Vec<_> = (0..2_u64)
        .map(|number| {
            let (socket, over) = (bed.socket(), Arc::clone(&over));
            let acknowledged = Arc::clone(&acknowledged[usize::try_from(number).unwrap()]);
            thread::spawn(move || {
                let mut client = NbdClient::open(&socket, "", &[]).unwrap();
                let mut count = 0;
                while !over.load(Ordering::Relaxed) {
                    let at = (count % 100 * 2 + number) * BLOCK as u64;
                    assert_eq!(client.write(0, at, &pattern(count + 1, BLOCK)).unwrap(), 0);
                    count += 1;
                    acknowledged.store(count, Ordering::SeqCst);
                }
            })
        })
        .collect();
    // What a person orders meanwhile waits.
    let flushing = thread::spawn({
        let (export, over) = (Arc::clone(&export), Arc::clone(&over));
        move || {
            while !over.load(Ordering::Relaxed) {
                export.flush().unwrap();
            }
        }
    });
    let mut images = vec![folder.path().join("disk.qcow2")];
    let holds = |found: &[u8], number: u64, count: u64| {
        (count.saturating_sub(100)..count).all(|count| {
            let at = usize::try_from(count % 100 * 2 + number).unwrap() * BLOCK;
            found[at..at + BLOCK] == pattern(count + 1, BLOCK)
        })
    };
    for round in 1..=12 {
        let writes = export.counters().writes;
        wait_for("more writes", || (export.counters().writes > writes + 20).then_some(()));
        let overlay: PathBuf = folder.path().join(format!("overlay{round}"));
        let before: Vec<_> = acknowledged.iter().map(|count| count.load(Ordering::SeqCst)).collect();
        put_overlay(&export, images.last().unwrap(), &overlay);
        let after: Vec<_> = acknowledged.iter().map(|count| count.load(Ordering::SeqCst)).collect();
        // Others can open it now, and it is whole.
        let frozen = images.last().unwrap();
        assert_clean(frozen);
        let found = contents(frozen);
        for number in 0..2 {
            let place = usize::try_from(number).unwrap();
            let counts = before[place]..=after[place] + 1;
            assert!(counts.clone().any(|count| holds(&found, number, count)), "round {round}: {counts:?}");
        }
        images.push(overlay);
    }
    over.store(true, Ordering::Relaxed);
    writers.into_iter().chain([flushing]).for_each(|thread| thread.join().unwrap());
    drop(export);
    bed.stop();
    images.iter().for_each(|image| assert_clean(image));
    let found = contents(images.last().unwrap());
    for (number, count) in (0..).zip(&acknowledged) {
        assert!(holds(&found, number, count.load(Ordering::SeqCst)));
    }
}
