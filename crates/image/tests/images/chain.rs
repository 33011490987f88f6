//! Chains of images: what is opened, and what is not.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use limosa_image::Format;
use limosa_image::Policy;
use limosa_image::chain::{OpenOptions, open};
use limosa_image::qcow2::{CreateOptions, create};
use limosa_image::reference::Reference;
use limosa_image::{Disk, GuestOffset, ImageError};
use limosa_storage::{Buffer, Create, FileOptions, FileStorage, Storage, block_on};
use limosa_testkit::{qemu_img, qemu_skipped, scratch};

const SIZE: u64 = 1 << 20;

fn options(policy: Policy) -> OpenOptions {
    OpenOptions::default().read_only(true).policy(policy)
}

fn opened(path: &Path, policy: Policy) -> Result<Arc<dyn Disk>, ImageError> {
    block_on(open(&Reference::file(path), &options(policy)))
}

fn refused(path: &Path, policy: Policy) -> String {
    opened(path, policy).unwrap_err().to_string()
}

/// An image with no contents of its own.
fn make(path: &Path, backing: Option<(&str, Option<&str>)>, data_file: Option<&str>) {
    let options = FileOptions { create: Create::IfMissing, ..FileOptions::default() };
    let storage = FileStorage::open(path, &options).unwrap();
    let data = data_file.map(|name| FileStorage::open(path.with_file_name(name), &options).unwrap());
    let wanted = CreateOptions::default()
        .size(SIZE)
        .backing_file(backing.map(|(name, _)| name.into()))
        .backing_format(backing.and_then(|(_, format)| format.map(str::to_owned)))
        .data_file(data.as_ref().map(|data| (**data.name()).into()));
    block_on(create(&*storage, data.as_deref().map(|data| data as &dyn Storage), &wanted)).unwrap();
}

fn byte(disk: &dyn Disk, at: u64) -> u8 {
    let found = Buffer::zeroed(1);
    block_on(disk.read(GuestOffset(at), found.clone().into())).unwrap();
    found.to_vec()[0]
}

#[test]
fn what_an_image_does_not_have_is_read_from_below_if_that_is_allowed() {
    let folder = scratch().unwrap();
    let inner = folder.path().join("inner");
    fs::create_dir(&inner).unwrap();
    fs::write(inner.join("base"), vec![7; 1 << 19]).unwrap();
    make(&inner.join("middle"), Some(("base", Some("raw"))), None);
    let top = folder.path().join("top");
    make(&top, Some(("inner/middle", None)), None);
    for policy in [Policy::Follow, Policy::Within(vec![inner])] {
        let disk = opened(&top, policy).unwrap();
        assert_eq!((disk.len(), byte(&*disk, 0), byte(&*disk, (1 << 19) - 1), byte(&*disk, 1 << 19)), (SIZE, 7, 7, 0));
    }
    let said = refused(&top, Policy::default());
    assert!(said.contains("inner/middle, which is not opened: it is not trusted to have a backing file"), "{said}");
    let elsewhere = scratch().unwrap();
    let said = refused(&top, Policy::Within(vec![elsewhere.path().to_owned()]));
    assert!(said.ends_with("a backing file must be in one of the allowed directories"), "{said}");
    // What the caller names is not asked about.
    let alone =
        Reference::from_name(format!(r#"json:{{"file.filename":"{}","backing":null}}"#, top.display())).unwrap();
    assert_eq!(byte(&*block_on(open(&alone, &options(Policy::Refuse))).unwrap(), 0), 0);
}

#[test]
fn a_file_in_its_own_chain_is_found_whatever_it_is_called() {
    let folder = scratch().unwrap();
    let at = |name: &str| folder.path().join(name);
    make(&at("a"), Some(("b", Some("qcow2"))), None);
    make(&at("b"), Some(("./link", Some("qcow2"))), None);
    std::os::unix::fs::symlink("a", at("link")).unwrap();
    let said = refused(&at("a"), Policy::Follow);
    assert!(said.ends_with("that file is already part of the chain"), "{said}");
    make(&at("self"), Some(("self", Some("qcow2"))), None);
    for read_only in [true, false] {
        let options = options(Policy::Follow).read_only(read_only);
        let said = block_on(open(&Reference::file(at("self")), &options)).unwrap_err().to_string();
        assert!(said.contains("already part of the chain"), "{said}");
    }
}

#[test]
fn an_image_is_not_its_own_data_file() {
    let folder = scratch().unwrap();
    let top = folder.path().join("top");
    make(&top, None, Some("data"));
    assert_eq!(byte(&*opened(&top, Policy::Follow).unwrap(), 0), 0);
    let said = refused(&top, Policy::Refuse);
    assert!(said.contains("it is not trusted to have a data file"), "{said}");
    let data = folder.path().join("data");
    fs::remove_file(&data).unwrap();
    fs::hard_link(&top, &data).unwrap();
    assert!(refused(&top, Policy::Follow).contains("already part of the chain"));
    fs::remove_file(&data).unwrap();
    assert!(refused(&top, Policy::Follow).contains("cannot open"));
}

#[test]
fn a_chain_without_end_is_refused_at_its_limit() {
    let folder = scratch().unwrap();
    let name = |number: usize| format!("{number}");
    fs::write(folder.path().join("0"), [0; 512]).unwrap();
    for number in 1..=limosa_image::chain::MAX_CHAIN_DEPTH {
        make(&folder.path().join(name(number)), Some((&name(number - 1), None)), None);
    }
    assert!(opened(&folder.path().join(name(limosa_image::chain::MAX_CHAIN_DEPTH - 1)), Policy::Follow).is_ok());
    let said = refused(&folder.path().join(name(limosa_image::chain::MAX_CHAIN_DEPTH)), Policy::Follow);
    assert!(said.contains("a chain has at most 200 files"), "{said}");
}

#[test]
fn protocols_and_foreign_formats_are_refused_by_name() {
    let folder = scratch().unwrap();
    let top = folder.path().join("top");
    make(&top, Some(("ssh://host/disk", Some("raw"))), None);
    assert!(refused(&top, Policy::Follow).contains(r#"protocol "ssh" is not supported"#));
    make(&top, Some(("base", Some("vmdk"))), None);
    assert!(refused(&top, Policy::Follow).contains(r#"format "vmdk" is not supported"#));
    fs::write(folder.path().join("base"), b"KDMV").unwrap();
    make(&top, Some(("base", None)), None);
    assert!(refused(&top, Policy::Follow).contains("it looks like vmdk"));
}

#[test]
fn a_format_that_was_said_is_not_guessed() {
    let folder = scratch().unwrap();
    let top = folder.path().join("top");
    make(&top, None, None);
    let raw = options(Policy::Refuse).format(Some(Format::Raw));
    let disk = block_on(open(&Reference::file(&top), &raw)).unwrap();
    assert_eq!((disk.format(), byte(&*disk, 0)), ("raw", b'Q'));
    fs::write(&top, [0; 512]).unwrap();
    let qcow2 = options(Policy::Refuse).format(Some(Format::Qcow2));
    let said = block_on(open(&Reference::file(&top), &qcow2)).unwrap_err().to_string();
    assert!(said.ends_with(": it is not a qcow2 image"), "{said}");
}

#[test]
fn chains_of_stock_tools_are_read() {
    if qemu_skipped() {
        return;
    }
    let folder = scratch().unwrap();
    let at = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    fs::write(at("base"), vec![7; 1 << 20]).unwrap();
    let json =
        format!(r#"json:{{"driver":"raw","offset":512,"file":{{"driver":"file","filename":"{}"}}}}"#, at("base"));
    qemu_img(["create", "-q", "-f", "qcow2", "-b", &json, "-F", "raw", &at("middle")]).unwrap();
    limosa_testkit::qemu_io(["-c", "write -P 9 64k 64k", &at("middle")]).unwrap();
    qemu_img(["create", "-q", "-f", "qcow2", "-b", "middle", "-F", "qcow2", &at("top")]).unwrap();
    let disk = opened(Path::new(&at("top")), Policy::Follow).unwrap();
    assert_eq!(disk.len(), (1 << 20) - 512);
    assert_eq!((byte(&*disk, 0), byte(&*disk, 65536), byte(&*disk, 131_072)), (7, 9, 7));
}
