//! The internal snapshots of an image: listed, and read as a disk.
//!
//! limosa lists the snapshots of a qcow2 image, opens the disk as it was when one was taken, read-only, and keeps their
//! clusters when the image is written, checked, repaired or resized. It does not create, apply or delete them:
//! `qemu-img snapshot` does, and `take` below stands in for it.
//!
//! `cargo run -p limosa-image --example snapshots`

use std::path::Path;

use limosa_image::chain::{OpenOptions, open};
use limosa_image::qcow2::{
    CheckOptions, CreateOptions, Header, Repair, SnapshotChoice, create, read_snapshots, repair,
};
use limosa_image::reference::Reference;
use limosa_image::{GuestOffset, ImageError};
use limosa_storage::{Buffer, Create, FileOptions, FileStorage, Storage, block_on};

/// Writes `text` at the beginning of the disk.
async fn write(path: &Path, text: &str) -> Result<(), ImageError> {
    let disk = open(&Reference::file(path), &OpenOptions::default()).await?;
    disk.write(GuestOffset(0), Buffer::from_slice(text.as_bytes()).into()).await?;
    disk.close().await
}

/// Reads five bytes at the beginning of the disk, as it is or as it was.
async fn read(path: &Path, snapshot: Option<SnapshotChoice>) -> Result<String, ImageError> {
    let options = OpenOptions::default().read_only(true).snapshot(snapshot);
    let disk = open(&Reference::file(path), &options).await?;
    let found = Buffer::zeroed(5);
    disk.read(GuestOffset(0), found.clone().into()).await?;
    Ok(String::from_utf8_lossy(&found.to_vec()).into_owned())
}

/// Lists the names of the snapshots.
async fn list(path: &Path) -> Result<Vec<String>, ImageError> {
    let file = FileStorage::open(path, &FileOptions { read_only: true, ..FileOptions::default() })?;
    let header = Header::read(&*file).await?;
    Ok(read_snapshots(&*file, &header).await?.into_iter().map(|snapshot| snapshot.name).collect())
}

/// Takes a snapshot of an image that is not open, as `qemu-img snapshot -c NAME` does: a copy of the L1 table, and an
/// entry that refers to it. The repair counts the new references.
async fn take(path: &Path, name: &str) -> Result<(), ImageError> {
    let file = FileStorage::open(path, &FileOptions::default())?;
    let header = Header::read(&*file).await?;
    let cluster = header.geometry().cluster_size();
    let (l1_at, entries) = (header.l1.0.0, header.l1.1);
    let l1 = Buffer::zeroed(usize::try_from(entries).unwrap_or_default() * 8);
    file.read(l1_at, l1.clone().into()).await?;
    let copy_at = file.length()?.next_multiple_of(cluster);
    let table_at = (copy_at + l1.len() as u64).next_multiple_of(cluster);

    let mut entry = Vec::new();
    entry.extend(copy_at.to_be_bytes());
    entry.extend(entries.to_be_bytes());
    entry.extend([0, 1]); // bytes of the id
    entry.extend(u16::try_from(name.len()).unwrap_or_default().to_be_bytes());
    entry.extend([0; 20]); // dates, clock, size of the VM's state
    entry.extend(16_u32.to_be_bytes()); // bytes of extra data
    entry.extend(0_u64.to_be_bytes()); // size of the VM's state
    entry.extend(header.size.to_be_bytes());
    entry.extend(b"1");
    entry.extend(name.as_bytes());
    file.write(copy_at, l1.into()).await?;
    file.write(table_at, Buffer::from_slice(&entry).into()).await?;
    file.set_len((table_at + entry.len() as u64).next_multiple_of(cluster)).await?;
    let place = [&1_u32.to_be_bytes()[..], &table_at.to_be_bytes()].concat();
    file.write(60, Buffer::from_slice(&place).into()).await?;
    repair(&*file, Repair::All, CheckOptions::default()).await?;
    Ok(())
}

async fn run(folder: &Path) -> Result<[String; 2], ImageError> {
    let path = &folder.join("disk.qcow2");
    let file = FileStorage::open(path, &FileOptions { create: Create::New, ..FileOptions::default() })?;
    create(&*file, None, &CreateOptions::default().size(1 << 30)).await?;
    drop(file);
    write(path, "first").await?;
    take(path, "installed").await?;
    write(path, "later").await?;

    println!("snapshots: {:?}", list(path).await?);
    let now = read(path, None).await?;
    let then = read(path, Some(SnapshotChoice::IdOrName("installed".into()))).await?;
    println!("now {now:?}, then {then:?}");
    Ok([now, then])
}

fn main() -> Result<(), ImageError> {
    let folder = tempfile::tempdir().expect("a folder for the image");
    block_on(run(folder.path())).map(|_| ())
}

#[test]
fn a_snapshot_is_read_as_it_was() {
    let folder = tempfile::tempdir().unwrap();
    assert_eq!(block_on(run(folder.path())).unwrap(), ["later".to_owned(), "first".to_owned()]);
}
