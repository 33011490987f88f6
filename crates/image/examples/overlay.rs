//! A base image, an overlay of it, a write that copies the rest of its cluster, and a check of the result.
//!
//! `cargo run -p limosa-image --example overlay`

use std::ffi::OsString;
use std::path::Path;

use limosa_image::chain::{OpenOptions, open};
use limosa_image::qcow2::{CheckOptions, CreateOptions, check, create};
use limosa_image::reference::Reference;
use limosa_image::{GuestOffset, ImageError, Policy};
use limosa_storage::{Buffer, Create, FileOptions, FileStorage, block_on};

/// Makes an image of 1 GiB, over `base` if there is one.
async fn make(path: &Path, base: Option<&str>) -> Result<(), ImageError> {
    let file = FileStorage::open(path, &FileOptions { create: Create::New, ..FileOptions::default() })?;
    let options = CreateOptions::default()
        .size(1 << 30)
        .backing_file(base.map(OsString::from))
        .backing_format(base.map(|_| "qcow2".to_owned()));
    create(&*file, None, &options).await?;
    Ok(())
}

async fn run(folder: &Path) -> Result<(), ImageError> {
    let (base, overlay) = (folder.join("base.qcow2"), folder.join("overlay.qcow2"));
    make(&base, None).await?;
    let disk = open(&Reference::file(&base), &OpenOptions::default()).await?;
    disk.write(GuestOffset(0), Buffer::from_slice(&[b'a'; 64 << 10]).into()).await?;
    disk.close().await?;
    drop(disk);

    make(&overlay, Some("base.qcow2")).await?;
    // The overlay names its base: whether that is opened is the caller's decision.
    let options = OpenOptions::default().policy(Policy::Within(vec![folder.to_owned()]));
    let disk = open(&Reference::file(&overlay), &options).await?;
    disk.write(GuestOffset(4096), Buffer::from_slice(b"hello").into()).await?;
    disk.flush().await?;
    let found = Buffer::zeroed(16);
    disk.read(GuestOffset(4092), found.clone().into()).await?;
    println!("{:?}", String::from_utf8_lossy(&found.to_vec()));
    disk.close().await?;
    drop(disk);

    let file = FileStorage::open(&overlay, &FileOptions { read_only: true, ..FileOptions::default() })?;
    let report = check(&*file, CheckOptions::default()).await?;
    println!("{} corruptions, {} leaks", report.corruptions, report.leaks);
    Ok(())
}

fn main() -> Result<(), ImageError> {
    let folder = tempfile::tempdir().expect("a folder for the images");
    block_on(run(folder.path()))
}
