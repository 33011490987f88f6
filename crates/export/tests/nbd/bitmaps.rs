//! Dirty bitmaps as clients read them.

use std::sync::Arc;
use std::time::Duration;

use limosa_export::nbd::ServerOptions;
use limosa_export::{Export, ExportError, Exports};
use limosa_image::qcow2::CreateOptions;
use limosa_image::{BitmapAction, Disk, ImageError};
use limosa_storage::block_on;
use limosa_testkit::image::TestImage;
use limosa_testkit::{NbdChunk, NbdClient, NbdCommand};

use crate::bed::Bed;

const K: u64 = 1 << 10;

fn disk(bitmaps: &[(&str, u64)]) -> Arc<dyn Disk> {
    let disk = TestImage::new(&CreateOptions::default().size(1024 * K)).open();
    let add =
        |(name, granularity): &(&str, u64)| ((*name).to_owned(), BitmapAction::Add { granularity: Some(*granularity) });
    block_on(disk.change_bitmaps(&bitmaps.iter().map(add).collect::<Vec<_>>())).unwrap();
    disk
}

fn names(bitmaps: &[&str]) -> Vec<String> {
    bitmaps.iter().map(|name| (*name).to_owned()).collect()
}

fn serve(export: Export) -> Bed {
    let exports = Exports::new();
    exports.add(export).unwrap();
    Bed::with(exports, ServerOptions::default())
}

/// The extents of a bitmap that is the client's only context.
fn extents(client: &mut NbdClient, offset: u64, length: u64) -> Vec<(u64, u64)> {
    let reply = client.request(NbdCommand::BlockStatus, 0, offset, length).unwrap();
    assert_eq!(reply.error, 0);
    let mut found: Vec<(u64, u64)> = Vec::new();
    let [NbdChunk::Status(_, extents)] = &reply.chunks[..] else { panic!("{reply:?}") };
    for &(length, status) in extents {
        // Neighbours differ.
        assert_ne!(found.last().map(|(_, before)| *before), Some(status), "{extents:?}");
        found.push((length, status));
    }
    found
}

#[test]
fn a_bitmap_is_what_clients_have_written_since_it_was_cleared() {
    let export = Export::new("", disk(&[("fine", K), ("coarse", 64 * K)])).unwrap();
    let bed = serve(export.bitmaps(names(&["fine", "coarse"])).unwrap());
    let mut writer = bed.client();
    let mut fine = NbdClient::open(&bed.socket(), "", &["qemu:dirty-bitmap:fine"]).unwrap();
    let mut coarse = NbdClient::open(&bed.socket(), "", &["qemu:dirty-bitmap:coarse"]).unwrap();
    assert_eq!(extents(&mut fine, 0, 1024 * K), [(1024 * K, 0)]);
    assert_eq!(writer.write(0, 70 * K + 100, &[1; 1024]).unwrap(), 0);
    assert_eq!(writer.simple(NbdCommand::WriteZeroes, 0, 512 * K, 2 * K).unwrap(), 0);
    assert_eq!(writer.simple(NbdCommand::Trim, 0, 900 * K, K).unwrap(), 0);
    let expected = [(70 * K, 0), (2 * K, 1), (440 * K, 0), (2 * K, 1), (386 * K, 0), (K, 1), (123 * K, 0)];
    assert_eq!(extents(&mut fine, 0, 1024 * K), expected);
    assert_eq!(extents(&mut fine, 71 * K + 1, 2 * K), [(K - 1, 1), (K + 1, 0)]);
    let expected = [(64 * K, 0), (64 * K, 1), (384 * K, 0), (64 * K, 1), (320 * K, 0), (64 * K, 1), (64 * K, 0)];
    assert_eq!(extents(&mut coarse, 0, 1024 * K), expected);

    let export = bed.exports.find("").unwrap();
    let clear = [("fine".to_owned(), BitmapAction::Clear)];
    export.change_bitmaps(&clear, Duration::from_secs(10)).unwrap();
    assert_eq!(extents(&mut fine, 0, 1024 * K), [(1024 * K, 0)]);
    // What a client has agreed on stays the bitmap that it is.
    let again = [BitmapAction::Remove, BitmapAction::Add { granularity: None }].map(|it| ("fine".to_owned(), it));
    for remove in [&again[..1], &again] {
        let refused = export.change_bitmaps(remove, Duration::from_secs(10)).unwrap_err();
        assert!(matches!(&refused, ExportError::BitmapExported { bitmap, .. } if bitmap == "fine"), "{refused:?}");
    }
    assert_eq!(extents(&mut fine, 0, 1024 * K), [(1024 * K, 0)]);
    assert_eq!(extents(&mut coarse, 0, 64 * K), [(64 * K, 0)]);
    bed.stop();
}

#[test]
fn every_second_block_is_an_extent_up_to_the_limit_of_a_reply() {
    let disk = TestImage::new(&CreateOptions::default().size(64 << 20)).open();
    let add = BitmapAction::Add { granularity: Some(512) };
    block_on(disk.change_bitmaps(&[("b".to_owned(), add)])).unwrap();
    let export = Export::new("", disk).unwrap().bitmaps(names(&["b"])).unwrap();
    let bed = serve(export);
    let mut writer = bed.client();
    for number in 0..20_000 {
        writer.send_write(0, number * 1024, &[1; 512]).unwrap();
        if number % 64 == 63 {
            (0..64).for_each(|_| assert_eq!(writer.receive().unwrap().error, 0));
        }
    }
    let mut client = NbdClient::open(&bed.socket(), "", &["qemu:dirty-bitmap:b"]).unwrap();
    let first = extents(&mut client, 0, 64 << 20);
    assert_eq!(first.len(), 32 << 10);
    assert!(first.iter().enumerate().all(|(number, extent)| *extent == (512, u64::from(number % 2 == 0))));
    let rest = extents(&mut client, 16 << 20, 48 << 20);
    assert_eq!(rest.len(), 40_000 - 32_768);
}

#[test]
fn bitmaps_that_cannot_be_read_are_refused() {
    let export = || Export::new("", disk(&[("a", 512)])).unwrap();
    let missing = export().bitmaps(names(&["a", "b"])).unwrap_err();
    assert_eq!(missing.to_string(), "image: it has no bitmap \"b\"");
    let twice = export().bitmaps(names(&["a", "a"])).unwrap_err();
    assert_eq!(twice.to_string(), "the bitmap \"a\" is named twice");
    let many = export().bitmaps(vec!["a".to_owned(); 31]).unwrap_err();
    assert!(matches!(many, ExportError::Bitmaps), "{many:?}");
    let read_only = export().read_only(true);
    let refused = read_only.change_bitmaps(&[("a".to_owned(), BitmapAction::Clear)], Duration::ZERO).unwrap_err();
    assert!(matches!(refused, ExportError::Image(ImageError::ReadOnly { .. })), "{refused:?}");
}
